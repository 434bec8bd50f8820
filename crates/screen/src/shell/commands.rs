//! What a command does, by its words.

use stockade_protocol::screen::Rule;

use super::{Stage, Walk, words, words::Word};
use crate::{paths, python, shell};

/// Commands that run what follows them; with the options of theirs that take a value.
const WRAPPERS: [(&str, &[&str]); 20] = [
    ("sudo", &["-u", "-g", "-h", "-p", "-C", "-T", "--user", "--group"]),
    ("doas", &["-u", "-C"]),
    ("env", &["-u", "-C", "-S"]),
    ("nice", &["-n"]),
    ("ionice", &["-c", "-n"]),
    ("timeout", &["-s", "-k"]),
    ("nohup", &[]),
    ("exec", &["-a"]),
    ("command", &[]),
    ("builtin", &[]),
    ("time", &["-o", "-f"]),
    ("stdbuf", &["-i", "-o", "-e"]),
    ("setsid", &[]),
    ("busybox", &[]),
    ("xargs", &["-I", "-n", "-P", "-d", "-L", "-s", "-a"]),
    ("watch", &["-n"]),
    ("parallel", &["-j"]),
    ("chronic", &[]),
    ("unbuffer", &[]),
    ("coproc", &[]),
];
const SHELLS: [&str; 7] = ["sh", "bash", "dash", "zsh", "ash", "ksh", "fish"];
const INTERPRETERS: [&str; 7] = ["python", "python3", "python2", "perl", "ruby", "node", "php"];
const FETCHERS: [&str; 4] = ["curl", "wget", "aria2c", "fetch"];
const NETWORK: [&str; 24] = [
    "curl",
    "wget",
    "aria2c",
    "fetch",
    "nc",
    "ncat",
    "netcat",
    "telnet",
    "ssh",
    "scp",
    "sftp",
    "ftp",
    "tftp",
    "socat",
    "nmap",
    "masscan",
    "dig",
    "nslookup",
    "host",
    "ping",
    "traceroute",
    "smbclient",
    "rclone",
    "openvpn",
];
const SYSTEM: [&str; 47] = [
    "sudo",
    "su",
    "doas",
    "mount",
    "umount",
    "chroot",
    "pivot_root",
    "systemctl",
    "service",
    "crontab",
    "at",
    "useradd",
    "usermod",
    "userdel",
    "adduser",
    "groupadd",
    "passwd",
    "chpasswd",
    "visudo",
    "iptables",
    "ip6tables",
    "nft",
    "ufw",
    "firewall-cmd",
    "setenforce",
    "insmod",
    "modprobe",
    "rmmod",
    "kexec",
    "unshare",
    "nsenter",
    "docker",
    "podman",
    "ctr",
    "kubectl",
    "setcap",
    "chattr",
    "reboot",
    "shutdown",
    "poweroff",
    "halt",
    "swapoff",
    "losetup",
    "cryptsetup",
    "debugfs",
    "capsh",
    "auditctl",
];
const DISKS: [&str; 10] = ["mkfs", "wipefs", "sgdisk", "fdisk", "sfdisk", "parted", "blkdiscard", "mkswap", "hdparm", "badblocks"];

/// Whether a word is the name of a command that some rule knows.
pub(super) fn is_known(name: &str) -> bool {
    let lists: [&[&str]; 6] = [
        &SHELLS,
        &INTERPRETERS,
        &NETWORK,
        &SYSTEM,
        &DISKS,
        &["rm", "dd", "shred", "mv", "cp", "chmod", "chown", "eval", "source", "kill", "find", "tee", "base64"],
    ];
    lists.iter().any(|list| list.contains(&name)) || WRAPPERS.iter().any(|(wrapper, _)| *wrapper == name)
}

/// A command's own name, without its directory.
fn base(word: &str) -> &str {
    word.rsplit('/').next().unwrap_or(word)
}

fn is_flag(word: &str, short: char, long: &str) -> bool {
    word == long || (word.starts_with('-') && !word.starts_with("--") && word.contains(short))
}

/// The words behind those that only say how to run them.
fn unwrapped(words: &[Word]) -> &[Word] {
    let mut rest = words;
    while let Some((name, values)) = rest.first().and_then(|word| WRAPPERS.iter().find(|(wrapper, _)| *wrapper == base(&word.text))) {
        let mut at = 1;
        while let Some(word) = rest.get(at).map(|word| word.text.as_str()) {
            let assignment = *name == "env" && word.contains('=');
            // `timeout` has its time first.
            let time = *name == "timeout" && word.starts_with(|c: char| c.is_ascii_digit());
            if values.contains(&word) {
                at += 2;
            } else if word.starts_with('-') || assignment || time {
                at += 1;
            } else {
                break;
            }
        }
        if at >= rest.len() {
            return rest;
        }
        rest = &rest[at..];
    }
    rest
}

impl Walk<'_, '_> {
    /// A command, with what is fed to it.
    pub(super) fn command_of(&mut self, words: &[Word], at: (usize, usize), fed: &[Stage]) {
        for wrapper in words.iter().take(3) {
            if matches!(base(&wrapper.text), "sudo" | "doas") {
                self.findings.add(Rule::System, at, base(&wrapper.text));
            }
        }
        let inner = unwrapped(words);
        let Some(name) = inner.first().map(|word| base(&word.text).to_owned()) else { return };
        let arguments = inner.get(1..).unwrap_or_default();
        let text = |index: usize| arguments.get(index).map(|word| word.text.as_str()).unwrap_or_default();
        let targets: Vec<String> = arguments.iter().filter(|word| !word.text.starts_with('-')).map(|word| self.place(&word.text)).collect();
        if NETWORK.contains(&name.as_str()) || self.reaches_out(&name, arguments) {
            self.findings.add(Rule::Network, at, &name);
        }
        if SYSTEM.contains(&name.as_str()) && !(name == "crontab" && text(0) == "-l") {
            self.findings.add(Rule::System, at, &name);
        }
        if DISKS.iter().any(|disk| name == *disk || name.strip_prefix(disk).is_some_and(|rest| rest.starts_with('.'))) {
            self.findings.add(Rule::Destroy, at, &name);
        }
        match name.as_str() {
            "cd" => self.directory = self.place(text(0)),
            "rm" | "shred" | "srm" => self.removes(&name, arguments, &targets, at),
            "find" => self.finds(arguments, at),
            "dd" => {
                for word in arguments {
                    if let Some(path) = word.text.strip_prefix("of=") {
                        self.writes(path, at, "dd");
                    }
                }
            }
            "chmod" | "chown" | "chgrp" => {
                let recursive = arguments.iter().any(|word| is_flag(&word.text, 'R', "--recursive"));
                if recursive && targets.iter().skip(1).any(|path| paths::is_vital(path)) {
                    self.findings.add(Rule::Destroy, at, &name);
                }
                let mode = targets.first().map(String::as_str).unwrap_or_default();
                let set_id = base(mode).contains("+s") || (base(mode).len() == 4 && base(mode).starts_with(['2', '4', '6']));
                if name == "chmod" && set_id {
                    self.findings.add(Rule::System, at, "set-ID");
                }
            }
            "mv" => {
                let (destination, sources) = targets.split_last().map(|(last, rest)| (last.clone(), rest.to_vec())).unwrap_or_default();
                if sources.iter().any(|path| paths::is_vital(path)) {
                    self.findings.add(Rule::Destroy, at, "mv");
                }
                self.writes(&destination, at, "mv");
            }
            "cp" | "install" | "ln" | "rsync" => {
                if let (Some(destination), true) = (targets.last().cloned(), targets.len() > 1) {
                    self.writes(&destination, at, &name);
                }
            }
            "tee" | "touch" | "mkdir" | "truncate" => targets.clone().iter().for_each(|path| self.writes(path, at, &name)),
            "kill" if arguments.iter().any(|word| word.text == "-1") && arguments.len() > 1 => {
                self.findings.add(Rule::Process, at, "kill -1")
            }
            "killall" | "pkill" | "killall5" => self.findings.add(Rule::Process, at, &name),
            "env" | "printenv" | "set" if arguments.is_empty() => self.findings.add(Rule::Credentials, at, &name),
            "eval" => self.evaluates(arguments, at),
            // What a signal, the end or a name of its own will have it run.
            "trap" if arguments.first().is_some_and(|word| word.known && !word.text.starts_with('-')) => self.runs("sh", text(0), at),
            "alias" => {
                let scripts: Vec<&str> = arguments.iter().filter_map(|word| Some(word.text.split_once('=')?.1)).collect();
                scripts.into_iter().for_each(|script| self.runs("sh", script, at));
            }
            "perl" | "ruby" | "php" | "node" => {
                let script = arguments.iter().map(|word| word.text.as_str()).collect::<Vec<_>>().join(" ");
                for (rule, signs) in [(Rule::Network, ["socket", "Socket", "net."]), (Rule::Process, ["exec", "system", "spawn"])] {
                    if signs.iter().any(|sign| script.contains(sign)) {
                        self.findings.add(rule, at, &name);
                    }
                }
            }
            _ => {}
        }
        if let Some(script) = self.script_of(&name, arguments) {
            self.runs(&name, &script, at);
        }
        self.fed(words, fed, at);
        self.substituted(&name, at);
    }

    fn place(&self, path: &str) -> String {
        paths::join(&self.directory, path)
    }

    fn reaches_out(&self, name: &str, arguments: &[Word]) -> bool {
        let has = |wanted: &str| arguments.iter().any(|word| word.text == wanted);
        match name {
            "pip" | "pip3" => (has("install") || has("download")) && !has("--no-index"),
            "npm" | "yarn" | "pnpm" => (has("install") || has("ci") || has("add") || has("publish")) && !has("--offline"),
            "apt" | "apt-get" | "dnf" | "yum" | "apk" => has("install") || has("update") || has("add"),
            "git" => ["clone", "fetch", "pull", "push"].iter().any(|verb| has(verb)),
            "rsync" => arguments.iter().any(|word| word.text.contains(':')),
            _ => false,
        }
    }

    fn removes(&mut self, name: &str, arguments: &[Word], targets: &[String], at: (usize, usize)) {
        let recursive = arguments.iter().any(|word| is_flag(&word.text, 'r', "--recursive") || is_flag(&word.text, 'R', "--recursive"));
        let everything = arguments.iter().any(|word| word.text == "--no-preserve-root");
        // `"$UNSET/"*` is `/*` on a bad day.
        let unset =
            |path: &str| path.strip_prefix('$').and_then(|rest| rest.split_once('/')).is_some_and(|(_, rest)| matches!(rest, "" | "*"));
        let disk = targets.iter().any(|path| paths::is_disk(path));
        let vital = targets.iter().any(|path| paths::is_vital(path) || unset(path));
        if everything || disk || (vital && (recursive || name != "rm")) {
            self.findings.add(Rule::Destroy, at, name);
        } else if recursive {
            self.findings.add(Rule::Delete, at, name);
        }
        for path in targets {
            if !vital && paths::is_outside(path, self.question.scratch) {
                self.findings.add(Rule::WriteOutside, at, &format!("{name} {path}"));
            }
        }
    }

    fn finds(&mut self, arguments: &[Word], at: (usize, usize)) {
        let texts: Vec<&str> = arguments.iter().map(|word| word.text.as_str()).collect();
        let vital = texts.iter().take_while(|text| !text.starts_with('-')).any(|path| paths::is_vital(&self.place(path)));
        let executed = texts.iter().position(|text| matches!(*text, "-exec" | "-execdir" | "-ok")).and_then(|exec| texts.get(exec + 1));
        let deletes = texts.contains(&"-delete") || executed.is_some_and(|program| matches!(base(program), "rm" | "shred" | "unlink"));
        if vital && deletes {
            self.findings.add(Rule::Destroy, at, "find");
        }
    }

    /// Text that the shell is to read as commands.
    fn evaluates(&mut self, arguments: &[Word], at: (usize, usize)) {
        self.findings.add(Rule::Eval, at, "eval");
        if arguments.iter().all(|word| word.known) {
            let script = arguments.iter().map(|word| word.text.as_str()).collect::<Vec<_>>().join(" ");
            self.runs("sh", &script, at);
        }
    }

    /// The script in a command's words, as `-c` and `-e` take one.
    fn script_of(&self, name: &str, arguments: &[Word]) -> Option<String> {
        let wanted = if SHELLS.contains(&name) || name.starts_with("python") || name == "su" { 'c' } else { return None };
        let flag = arguments.iter().position(|word| is_flag(&word.text, wanted, "--command"))?;
        arguments.get(flag + 1).map(|word| word.text.clone())
    }

    /// Screens a text that a command takes for code.
    pub(super) fn runs(&mut self, name: &str, script: &str, at: (usize, usize)) {
        let Some(depth) = self.depth.checked_sub(1) else { return };
        let question = self.question;
        self.findings.inside(at, |findings| match name.starts_with("python") {
            true => python::screen(question, script, depth, findings),
            false => shell::screen(question, script, depth, findings),
        });
    }

    /// What earlier commands of a pipeline feed to this one.
    pub(super) fn fed(&mut self, words: &[Word], fed: &[Stage], at: (usize, usize)) {
        let inner = unwrapped(words);
        let Some(name) = inner.first().map(|word| base(&word.text).to_owned()) else { return };
        let by_xargs = words.iter().take(4).any(|word| base(&word.text) == "xargs");
        if by_xargs && matches!(name.as_str(), "rm" | "shred") {
            let listed = fed
                .iter()
                .filter(|stage| stage.words.first().is_some_and(|word| matches!(base(&word.text), "echo" | "printf" | "find" | "ls")));
            let vital = listed.flat_map(|stage| &stage.words).any(|word| paths::is_vital(&self.place(&word.text)));
            if vital {
                self.findings.add(Rule::Destroy, at, &name);
            }
        }
        if let Some(name) = reads_code(words) {
            self.code_from(&name, fed, at);
        }
    }

    /// What the substitutions in a command's words bring to it, where it runs them.
    fn substituted(&mut self, name: &str, at: (usize, usize)) {
        if !(SHELLS.contains(&name) || matches!(name, "eval" | "source" | ".")) || self.code.is_empty() {
            return;
        }
        let Some(text) = self.code.get(at.0..at.1) else { return };
        if !(text.contains("$(") || text.contains("<(") || text.contains('`')) {
            return;
        }
        let mut parser = tree_sitter::Parser::new();
        if parser.set_language(&tree_sitter_bash::LANGUAGE.into()).is_err() {
            return;
        }
        let Some(tree) = parser.parse(text, None) else { return };
        let inner = Walk {
            question: self.question,
            code: text,
            depth: 0,
            findings: self.findings,
            variables: words::Variables::default(),
            directory: String::new(),
            functions: Vec::new(),
            endless: 0,
        };
        let stages = inner.inner_stages(tree.root_node(), 0);
        self.code_from(name, stages.get(1..).unwrap_or_default(), at);
    }

    /// Code comes out of these commands, for the one of this name.
    fn code_from(&mut self, name: &str, stages: &[Stage], at: (usize, usize)) {
        if let Some(script) = stages.last().and_then(|stage| printed(&stage.words)) {
            self.runs(name, &script, at);
        }
        for stage in stages {
            let words = unwrapped(&stage.words);
            let Some(name) = words.first().map(|word| base(&word.text)) else { continue };
            if FETCHERS.contains(&name) {
                self.findings.add(Rule::RemoteCode, at, name);
            }
            if decodes(name, words.get(1..).unwrap_or_default()) {
                self.findings.add(Rule::DecodedCode, at, name);
            }
        }
    }
}

/// The name of a command that takes what it is fed for code, as one with a script does not.
pub(super) fn reads_code(words: &[Word]) -> Option<String> {
    let words = unwrapped(words);
    let name = base(&words.first()?.text);
    if matches!(name, "eval" | "source" | ".") {
        return Some(name.to_owned());
    }
    let arguments = words.get(1..).unwrap_or_default();
    let script = arguments.iter().any(|word| !word.text.starts_with('-') && word.text != "*");
    let reads = (SHELLS.contains(&name) || INTERPRETERS.contains(&name)) && (!script || arguments.iter().any(|word| word.text == "-s"));
    reads.then(|| name.to_owned())
}

/// What a command prints, where that stands in its words.
fn printed(words: &[Word]) -> Option<String> {
    let words = unwrapped(words);
    let (name, mut arguments) = words.split_first()?;
    let flagged = arguments.first().is_some_and(|word| matches!(word.text.as_str(), "-e" | "-n" | "-ne" | "-en"));
    if flagged {
        arguments = arguments.get(1..).unwrap_or_default();
    }
    if !arguments.iter().all(|word| word.known) {
        return None;
    }
    let mut texts = arguments.iter().map(|word| word.text.as_str());
    match base(&name.text) {
        "echo" => {
            let text = texts.collect::<Vec<_>>().join(" ");
            Some(if flagged { words::escapes(&text) } else { text })
        }
        "printf" => {
            let form = words::escapes(texts.next()?);
            Some(texts.fold(form, |form, text| form.replacen("%s", text, 1)))
        }
        _ => None,
    }
}

/// Whether a command makes another text of what it is given, or prints one.
pub(super) fn makes_text(words: &[Word]) -> bool {
    let words = unwrapped(words);
    let Some(name) = words.first().map(|word| base(&word.text)) else { return false };
    matches!(name, "echo" | "printf" | "tr" | "sed") || decodes(name, words.get(1..).unwrap_or_default())
}

/// Whether a command undoes an encoding.
fn decodes(name: &str, arguments: &[Word]) -> bool {
    let any = |test: fn(&str) -> bool| arguments.iter().any(|word| test(&word.text));
    match name {
        "base64" | "base32" | "basenc" => any(|word| is_flag(word, 'd', "--decode") || word == "-D"),
        "openssl" => any(|word| word == "-d"),
        "xxd" => any(|word| is_flag(word, 'r', "-revert")),
        "rev" | "gunzip" | "zcat" | "bunzip2" | "xzcat" | "unxz" | "uudecode" => true,
        "gzip" | "bzip2" | "xz" => any(|word| is_flag(word, 'd', "--decompress")),
        "printf" | "echo" => any(|word| word.contains("\\x") || word.contains("\\0")),
        "tr" => arguments.len() == 2 && arguments.iter().all(|word| word.text.len() >= 10),
        _ => false,
    }
}
