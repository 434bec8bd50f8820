//! What a command does, by its words.
//!
//! It runs and looks up nothing; a command is known by its name alone.

use stockade_protocol::screen::{Grammar, Rule, Source};
use tree_sitter::Node;

use super::{
    Stage, Walk, passwords, span, words,
    words::Word,
    wrappers::{base, is_wrapper, started, unwrapped},
};
use crate::{budget, paths, screen_string};

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
/// The options for the file and for the directory to which a command fetches.
const DOWNLOADS: [(&str, [&str; 2], &[&str]); 4] = [
    ("curl", ["-o", "--output"], &["--output-dir"]),
    ("wget", ["-O", "--output-document"], &["-P", "--directory-prefix"]),
    ("aria2c", ["-o", "--out"], &["-d", "--dir"]),
    ("fetch", ["-o", "--output"], &[]),
];
/// The cost of copying a word.
const COPIED: usize = 4;
const DISKS: [&str; 10] = ["mkfs", "wipefs", "sgdisk", "fdisk", "sfdisk", "parted", "blkdiscard", "mkswap", "hdparm", "badblocks"];

/// Whether a rule knows a command of this name.
pub(super) fn is_known(name: &str) -> bool {
    let lists: [&[&str]; 6] = [
        &SHELLS,
        &INTERPRETERS,
        &NETWORK,
        &SYSTEM,
        &DISKS,
        &["rm", "dd", "shred", "mv", "cp", "chmod", "chown", "eval", "source", "kill", "find", "tee", "base64"],
    ];
    lists.iter().any(|list| list.contains(&name)) || is_wrapper(name)
}

fn is_flag(word: &str, short: char, long: &str) -> bool {
    word == long || (word.starts_with('-') && !word.starts_with("--") && word.contains(short))
}

impl Walk<'_, '_> {
    /// A command, with the commands whose output it reads.
    pub(super) fn command_of(&mut self, words: &[Word], at: (usize, usize), fed: &[Stage]) {
        // Nested commands are read once per level.
        if !self.findings.budget().spend(words.len()) {
            return;
        }
        let started = started(words);
        for wrapper in started.by {
            if SYSTEM.contains(&wrapper) {
                self.findings.add(Rule::System, at, wrapper);
            }
        }
        if let Some(script) = started.script {
            self.runs("sh", script, at);
        }
        let inner = started.words;
        let Some(name) = inner.first().map(|word| base(&word.text).to_owned()) else { return };
        let arguments = inner.get(1..).unwrap_or_default();
        let text = |index: usize| arguments.get(index).map(|word| word.text.as_str()).unwrap_or_default();
        let targets: Vec<String> = arguments.iter().filter(|word| !word.text.starts_with('-')).map(|word| self.place(&word.text)).collect();
        if NETWORK.contains(&name.as_str()) || self.reaches_out(&name, arguments) {
            self.findings.add(Rule::Network, at, &name);
        }
        for password in passwords::given(&name, arguments) {
            self.findings.secret_within(at, password, &format!("a password for {name}"));
        }
        if SYSTEM.contains(&name.as_str()) && !(name == "crontab" && text(0) == "-l") {
            self.findings.add(Rule::System, at, &name);
        }
        if DISKS.iter().any(|disk| name == *disk || name.strip_prefix(disk).is_some_and(|rest| rest.starts_with('.'))) {
            self.findings.add(Rule::Destroy, at, &name);
        }
        if self.is_fetched_code(inner, &name) {
            self.findings.add(Rule::RemoteCode, at, &name);
        }
        match name.as_str() {
            "curl" | "wget" | "aria2c" | "fetch" => self.downloads(&name, arguments, at),
            "cd" => self.directory = self.place(text(0)),
            "rm" | "shred" | "srm" | "unlink" | "rmdir" => self.removes(&name, arguments, &targets, at),
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
                targets.iter().skip(1).for_each(|path| self.writes(path, at, &name));
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
                } else {
                    sources.iter().for_each(|path| self.writes(path, at, "mv"));
                }
                self.writes(&destination, at, "mv");
            }
            "cp" | "install" | "ln" | "rsync" => {
                if let (Some(destination), true) = (targets.last().cloned(), targets.len() > 1) {
                    self.writes(&destination, at, &name);
                }
            }
            "tee" | "touch" | "mkdir" | "truncate" => targets.clone().iter().for_each(|path| self.writes(path, at, &name)),
            "kill" => self.kills(arguments, at),
            "killall" | "pkill" | "killall5" | "skill" => self.findings.add(Rule::Process, at, &name),
            "fuser" if arguments.iter().any(|word| is_flag(&word.text, 'k', "--kill")) => self.findings.add(Rule::Process, at, &name),
            "env" | "printenv" | "set" if arguments.is_empty() => self.findings.add(Rule::Credentials, at, &name),
            "sed" if arguments.iter().any(|word| is_flag(&word.text, 'i', "--in-place")) => {
                targets.iter().skip(1).for_each(|path| self.writes(path, at, &name));
            }
            "tar" | "bsdtar" | "unzip" => self.unpacks(&name, arguments, at),
            "awk" | "gawk" | "mawk" | "nawk" => {
                let scripts: Vec<String> = arguments.iter().flat_map(|word| commands_of_awk(&word.text)).map(str::to_owned).collect();
                scripts.iter().for_each(|script| self.runs("sh", script, at));
            }
            "eval" => self.evaluates(arguments, at),
            // Code for a signal or the end of the shell.
            "trap" if arguments.first().is_some_and(|word| word.known && !word.text.starts_with('-')) => self.runs("sh", text(0), at),
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
        if let Some(script) = script_of(&name, arguments) {
            self.runs(&name, script, at);
        }
        if let Some((module, rest)) = python_option(arguments, 'm').filter(|_| name.starts_with("python"))
            && module.chars().all(|c| c.is_alphanumeric() || matches!(c, '_' | '.'))
            && self.findings.budget().spend(rest.len().saturating_mul(COPIED))
        {
            self.runs(&name, &format!("import {module}"), at);
            self.command_of(&[&[Word::plain(module.to_owned())], rest].concat(), at, &[]);
        }
        self.fed(words, fed, at);
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
        // `"$UNSET/"*` is `/*` where the variable is empty.
        let unset =
            |path: &str| path.strip_prefix('$').and_then(|rest| rest.split_once('/')).is_some_and(|(_, rest)| matches!(rest, "" | "*"));
        let disk = targets.iter().any(|path| paths::is_disk(path));
        let vital = targets.iter().any(|path| paths::is_vital(path) || unset(path));
        // Without `-r` the files of a directory, but no directory.
        let files = targets.iter().any(|path| path.ends_with("/*") && paths::is_vital(path));
        let destroys = everything || disk || files || (vital && (recursive || matches!(name, "shred" | "srm")));
        if destroys {
            self.findings.add(Rule::Destroy, at, name);
        } else if recursive {
            self.findings.add(Rule::Delete, at, name);
        }
        for path in targets {
            if !destroys && paths::is_outside(path, self.question.scratch) {
                self.findings.add(Rule::WriteOutside, at, &format!("{name} {path}"));
            }
        }
    }

    fn finds(&mut self, arguments: &[Word], at: (usize, usize)) {
        let texts: Vec<&str> = arguments.iter().map(|word| word.text.as_str()).collect();
        let vital = texts.iter().take_while(|text| !text.starts_with('-')).any(|path| paths::is_vital(&self.place(path)));
        let mut deletes = texts.contains(&"-delete");
        if deletes {
            self.findings.add(Rule::Delete, at, "find");
        }
        for (exec, _) in texts.iter().enumerate().filter(|(_, text)| matches!(**text, "-exec" | "-execdir" | "-ok" | "-okdir")) {
            let behind = arguments.get(exec + 1..).unwrap_or_default();
            let words = behind.split(|word| matches!(word.text.as_str(), ";" | "+")).next().unwrap_or_default();
            if !self.findings.budget().spend(words.len()) {
                break;
            }
            deletes |= unwrapped(words).first().is_some_and(|program| matches!(base(&program.text), "rm" | "shred" | "unlink"));
            self.command_of(words, at, &[]);
        }
        if vital && deletes {
            self.findings.add(Rule::Destroy, at, "find");
        }
    }

    /// A file is fetched: to the path of an option, or under the name that it has there.
    fn downloads(&mut self, name: &str, arguments: &[Word], at: (usize, usize)) {
        let Some((_, to, below)) = DOWNLOADS.iter().find(|(known, ..)| *known == name) else { return };
        let directory = words::option_values(arguments, below, true).next().unwrap_or_default().to_owned();
        let mut files: Vec<&str> = words::option_values(arguments, to, true).collect();
        if files.is_empty() && (name != "curl" || arguments.iter().any(|word| is_flag(&word.text, 'O', "--remote-name"))) {
            let peers = arguments
                .iter()
                .map(|word| word.text.as_str())
                .filter(|text| text.contains('/') && !text.starts_with(['-', '/', '.', '~']));
            files = peers.map(base).collect();
        }
        for file in files.into_iter().filter(|file| *file != "-") {
            let path = paths::join(&directory, file);
            self.writes(&path, at, name);
            self.findings.fetches(&self.place(&path));
        }
    }

    /// Whether a command runs a file that was fetched: by its path, or as the script of an
    /// interpreter.
    fn is_fetched_code(&self, words: &[Word], name: &str) -> bool {
        let runs_script = SHELLS.contains(&name) || INTERPRETERS.contains(&name) || matches!(name, "source" | ".");
        let program = words.first().filter(|word| word.text.contains('/'));
        let script = words.iter().skip(1).find(|word| !word.text.starts_with('-')).filter(|_| runs_script);
        program.into_iter().chain(script).any(|word| self.findings.has_fetched(&self.place(&word.text)))
    }

    /// Signals to processes that the script has not started.
    fn kills(&mut self, arguments: &[Word], at: (usize, usize)) {
        // The first option is a signal.
        let signal = arguments.first().map(|word| word.text.as_str()).filter(|text| text.starts_with('-'));
        let named = matches!(signal, Some("-s" | "-n"));
        let value = arguments.get(1).map(|word| word.text.as_str()).filter(|_| named);
        // `-0` only asks whether a process lives; `-l` lists signals.
        if matches!(signal, Some("-0" | "-l" | "-L")) || matches!(value, Some("0")) {
            return;
        }
        // A script that keeps the pids of its children means one of them by an unknown pid.
        let own = self.findings.keeps_pids;
        let is_other = |text: &str| match text.trim_start_matches('-') {
            "" | "0" => false,
            text if text.starts_with('%') => false,
            text if text.starts_with(|c: char| c.is_ascii_digit()) => true,
            text => !own && text != "$$" && text != "$BASHPID",
        };
        let skipped = usize::from(signal.is_some()) + usize::from(named);
        if let Some(target) = arguments.iter().skip(skipped).map(|word| word.text.as_str()).find(|text| is_other(text)) {
            self.findings.add(Rule::Process, at, &format!("kill {target}"));
        }
    }

    /// An archive is unpacked into the directory of an option.
    fn unpacks(&mut self, name: &str, arguments: &[Word], at: (usize, usize)) {
        let texts: Vec<&str> = arguments.iter().map(|word| word.text.as_str()).collect();
        let first = texts.first().is_some_and(|text| !text.starts_with("--") && text.contains('x'));
        let extracts = name == "unzip" || first || texts.iter().any(|text| is_flag(text, 'x', "--extract") || *text == "--get");
        let option = if name == "unzip" { "-d" } else { "-C" };
        let pairs =
            texts.iter().zip(texts.iter().skip(1)).filter(|(before, _)| [option, "--directory"].contains(*before)).map(|(_, path)| *path);
        for path in pairs.chain(texts.iter().filter_map(|text| text.strip_prefix("--directory="))).filter(|_| extracts) {
            self.writes(path, at, name);
        }
    }

    /// Arguments that the shell reads as commands.
    fn evaluates(&mut self, arguments: &[Word], at: (usize, usize)) {
        self.findings.add(Rule::Eval, at, "eval");
        if arguments.iter().all(|word| word.known) {
            let script = arguments.iter().map(|word| word.text.as_str()).collect::<Vec<_>>().join(" ");
            self.runs("sh", &script, at);
        }
    }

    /// Screens a string that a command runs as code.
    pub(super) fn runs(&mut self, name: &str, script: &str, at: (usize, usize)) {
        let grammar = if name.starts_with("python") { Grammar::Python } else { Grammar::Shell };
        screen_string(self.question, Source { grammar, code: script }, self.depth, at, self.findings);
    }

    /// What this command reads from earlier commands of a pipeline.
    pub(super) fn fed(&mut self, words: &[Word], fed: &[Stage], at: (usize, usize)) {
        let inner = unwrapped(words);
        let Some(name) = inner.first().map(|word| base(&word.text).to_owned()) else { return };
        let by_xargs = words.iter().take(4).any(|word| base(&word.text) == "xargs");
        if by_xargs && name == "kill" && (finds_processes(fed) || !self.findings.keeps_pids) {
            self.findings.add(Rule::Process, at, "xargs kill");
        }
        if by_xargs && matches!(name.as_str(), "rm" | "shred" | "unlink") {
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

    /// Substitutions in the words of a command that runs their output.
    pub(super) fn substituted(&mut self, words: &[Word], node: Node<'_>) {
        let Some(name) = unwrapped(words).first().map(|word| base(&word.text)) else { return };
        let runs_output = SHELLS.contains(&name) || matches!(name, "eval" | "source" | ".");
        // The words were read before: this is work for each level of substitutions.
        if (runs_output || name == "kill") && self.findings.budget().spend(budget::of_shell(node.byte_range().len())) {
            let stages: Vec<Stage> = self.children(node).into_iter().flat_map(|part| self.inner_stages(part, 0)).collect();
            match runs_output {
                true => self.code_from(name, &stages, span(node)),
                false if finds_processes(&stages) => self.findings.add(Rule::Process, span(node), "kill"),
                false => {}
            }
        }
    }

    /// These commands print code for the command of this name.
    fn code_from(&mut self, name: &str, stages: &[Stage], at: (usize, usize)) {
        if let Some(script) = stages.last().and_then(|stage| printed(&stage.words)) {
            self.runs(name, &script, at);
        }
        for stage in stages {
            let words = unwrapped(&stage.words);
            let Some(name) = words.first().map(|word| base(&word.text)) else { continue };
            let prints_fetched = words.iter().skip(1).any(|word| self.findings.has_fetched(&self.place(&word.text)));
            if FETCHERS.contains(&name) || prints_fetched {
                self.findings.add(Rule::RemoteCode, at, name);
            }
            if decodes(name, words.get(1..).unwrap_or_default()) {
                self.findings.add(Rule::DecodedCode, at, name);
            }
        }
    }
}

/// Whether a command prints what it fetches.
pub(super) fn fetches(words: &[Word]) -> bool {
    unwrapped(words).first().is_some_and(|word| FETCHERS.contains(&base(&word.text)))
}

/// Whether these commands look for processes by name, other than the script's own children.
fn finds_processes(stages: &[Stage]) -> bool {
    let mut words = stages.iter().map(|stage| unwrapped(&stage.words));
    words.any(|words| {
        let name = words.first().map(|word| base(&word.text)).unwrap_or_default();
        matches!(name, "pgrep" | "pidof" | "ps" | "lsof" | "fuser") && !words.iter().any(|word| word.text == "$$")
    })
}

/// The script of `-c`: Python takes the next word, a shell the first word after all options.
fn script_of<'w>(name: &str, arguments: &'w [Word]) -> Option<&'w str> {
    if name.starts_with("python") {
        return python_option(arguments, 'c').map(|(script, _)| script);
    }
    let mut texts = arguments.iter().map(|word| word.text.as_str()).filter(|_| SHELLS.contains(&name));
    let mut wanted = false;
    loop {
        let text = texts.next()?;
        match text.strip_prefix(['-', '+']) {
            Some("-") => return texts.next().filter(|_| wanted),
            Some(options) if !options.is_empty() => {
                wanted |= is_flag(text, 'c', "--command");
                if options.ends_with(['o', 'O']) {
                    texts.next();
                }
            }
            _ => return wanted.then_some(text),
        }
    }
}

/// The value of `-c` or `-m`, which ends Python's options, and the words after it.
fn python_option(arguments: &[Word], wanted: char) -> Option<(&str, &[Word])> {
    let mut words = arguments.iter();
    loop {
        match words.next()?.text.strip_prefix('-')?.chars().last()? {
            'W' | 'X' => drop(words.next()),
            letter @ ('c' | 'm') => {
                let value = words.next()?.text.as_str();
                return (letter == wanted).then_some((value, words.as_slice()));
            }
            _ => {}
        }
    }
}

/// The commands in strings of an awk program.
fn commands_of_awk(program: &str) -> Vec<&str> {
    let mut found = Vec::new();
    let mut end = 0;
    while let Some(start) = program[end..].find('"').map(|start| end + start + 1) {
        let Some(length) = program[start..].find('"') else { break };
        let (before, after) = (program[..start - 1].trim_end(), program[start + length + 1..].trim_start());
        let piped = (before.ends_with('|') && !before.ends_with("||")) || (after.starts_with('|') && !after.starts_with("||"));
        if piped || before.strip_suffix('(').is_some_and(|before| before.trim_end().ends_with("system")) {
            found.push(&program[start..start + length]);
        }
        end = start + length + 1;
    }
    found
}

/// The name of a command that runs its input as code: a shell without a script.
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

/// The known output of `echo` and `printf`.
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

/// Whether a command decodes.
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
