//! README and the pages of `stockade help`: every command in them is run, and prints what stands
//! below it.
//!
//! A block `console` has commands after `$ `, continued by `\`, and below each what it prints on
//! stdout and stderr; `…` in a line stands for any text, and alone for any lines. All blocks of a
//! page run in one directory, in their order. What a command with `&` at its end starts runs until the end of
//! its page. `file=NAME` after a block's language writes it there.
//! `needs=…` selects the test that runs a block ([`NEEDS`]); one that no test can run is counted.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Duration,
};

use crate::{
    egress::testbed::Testbed,
    support::{
        exec::{program_path, text},
        runner::{directory, eventually, test},
        timeouts::scaled,
    },
};

/// The needs that a block can have, and where such a block is run, or why it is not.
const NEEDS: [(&str, &str); 9] = [
    ("root", "run in the guest, by tests/package"),
    ("systemd", "run in the guest, by tests/package"),
    ("member", "run in the guest, as a member of the group `stockade`"),
    ("service", "run by a test of their own, in a network of its own"),
    ("network", "run against servers of the test bed"),
    ("python-packages", "run by the step frameworks-all, which may use the package index"),
    ("clone", "not run: they build the program, the package or the wheel, or run all tests"),
    ("root-and-index", "not run: the guest has no package index; the steps data-science and webassembly run the same scripts"),
    ("apparmor", "not run: the guest has no apparmor_parser"),
];

/// A member of the group in the guest.
const MEMBER: &str = "alice";

/// A fenced block: the line of its fence, what stands behind that, and its lines.
struct Block {
    line: usize,
    info: Vec<String>,
    body: Vec<String>,
}

impl Block {
    fn is(&self, language: &str) -> bool {
        self.info.first().is_some_and(|first| first == language)
    }

    fn option(&self, name: &str) -> Option<&str> {
        self.info.iter().find_map(|word| word.strip_prefix(name)?.strip_prefix('='))
    }
}

fn blocks(page: &str) -> Vec<Block> {
    let mut found = Vec::new();
    let mut open: Option<Block> = None;
    for (index, line) in page.lines().enumerate() {
        match (&mut open, line.strip_prefix("```")) {
            (None, Some(info)) => {
                open = Some(Block { line: index + 1, info: info.split_whitespace().map(str::to_owned).collect(), body: Vec::new() });
            }
            (Some(_), Some("")) => found.extend(open.take()),
            (Some(block), _) => block.body.push(line.to_owned()),
            (None, None) => {}
        }
    }
    assert!(open.is_none(), "a block is not closed");
    found
}

/// The commands of a block, each with the lines that it prints.
fn commands(block: &Block) -> Vec<(String, Vec<String>)> {
    let mut all: Vec<(String, Vec<String>)> = Vec::new();
    let mut continued = false;
    for line in &block.body {
        match (line.strip_prefix("$ "), all.last_mut()) {
            (Some(command), _) if !continued => all.push((command.to_owned(), Vec::new())),
            (_, Some((command, _))) if continued => command.push_str(&format!("\n{line}")),
            (_, Some((_, printed))) => printed.push(line.clone()),
            (_, None) => panic!("line {}: output before a command", block.line),
        }
        continued = line.ends_with('\\') && (continued || line.starts_with("$ "));
    }
    all
}

/// Whether a line is as it was written, with `…` for any text.
fn fits(line: &str, wanted: &str) -> bool {
    let parts: Vec<&str> = wanted.split('…').collect();
    let [first, middle @ .., last] = parts.as_slice() else { return line == wanted };
    let Some(mut rest) = line.strip_prefix(first) else { return false };
    for part in middle {
        let Some(at) = rest.find(part) else { return false };
        rest = &rest[at + part.len()..];
    }
    rest.ends_with(last)
}

/// The same of lines, with a line `…` for any lines.
fn all_fit(lines: &[&str], wanted: &[String]) -> bool {
    match wanted {
        [] => lines.is_empty(),
        [first, others @ ..] if first.trim() == "…" => (0..=lines.len()).any(|skipped| all_fit(&lines[skipped..], others)),
        [first, others @ ..] => lines.split_first().is_some_and(|(line, rest)| fits(line, first) && all_fit(rest, others)),
    }
}

/// Which blocks are run, and how.
struct Reader {
    /// The needs of the blocks; those without one have "".
    needs: &'static [&'static str],
    /// Variables beside PATH, HOME and LANG.
    variables: Vec<(&'static str, PathBuf)>,
    /// Who runs them, if not this user.
    user: Option<u32>,
}

/// What came of the pages.
#[derive(Default)]
struct Outcome {
    run: usize,
    /// The need of each command that was left to another test.
    left: Vec<String>,
    faults: Vec<String>,
}

impl Reader {
    fn new(needs: &'static [&'static str]) -> Self {
        Reader { needs, variables: Vec::new(), user: None }
    }

    /// Runs the blocks of all pages.
    fn follow_all(&self) -> Outcome {
        let mut outcome = Outcome::default();
        pages().iter().for_each(|page| self.follow(page, &mut outcome));
        assert!(outcome.faults.is_empty(), "{}", outcome.faults.join("\n"));
        println!("{} commands run", outcome.run);
        outcome
    }

    /// Runs the blocks of a page in a directory of its own.
    fn follow(&self, page: &Path, outcome: &mut Outcome) {
        let name = page.file_stem().unwrap().to_str().unwrap();
        let place = directory().join("pages").join(name);
        fs::create_dir_all(&place).unwrap();
        std::os::unix::fs::chown(&place, self.user, self.user).unwrap();
        let mut running = Running(Vec::new());
        for block in blocks(&fs::read_to_string(page).unwrap()) {
            let at = format!("{name}.md:{}", block.line);
            let contents = block.body.join("\n") + "\n";
            let need = block.option("needs").unwrap_or_default();
            let is_chosen = self.needs.contains(&need);
            if let Some(file) = block.option("file").filter(|_| is_chosen || need.is_empty()) {
                fs::write(place.join(file), &contents).unwrap();
            }
            match block.info.first().map(String::as_str) {
                Some("json") if serde_json::from_str::<serde_json::Value>(&contents).is_err() => {
                    outcome.faults.push(format!("{at}: no JSON"))
                }
                Some("toml") if contents.parse::<toml::Table>().is_err() => outcome.faults.push(format!("{at}: no TOML")),
                None => outcome.faults.push(format!("{at}: a block without a language")),
                _ => {}
            }
            if !need.is_empty() && !NEEDS.iter().any(|(known, _)| *known == need) {
                outcome.faults.push(format!("{at}: no test knows needs={need}"));
            }
            if !block.is("console") {
                continue;
            }
            for (command, wanted) in commands(&block) {
                if is_chosen {
                    outcome.run += 1;
                    outcome
                        .faults
                        .extend(self.run(&command, &wanted, need, &place, &mut running).map(|fault| format!("{at}: $ {command}\n{fault}")));
                } else {
                    outcome.left.push(need.to_owned());
                }
            }
        }
    }

    /// Runs a command. What is wrong: its output is another, or it has a need and failed, though any
    /// output fits.
    fn run(&self, command: &str, wanted: &[String], need: &str, place: &Path, running: &mut Running) -> Option<String> {
        let home = directory().join("homes").join(place.file_name().unwrap());
        fs::create_dir_all(&home).unwrap();
        std::os::unix::fs::chown(&home, self.user, self.user).unwrap();
        let program = program_path().unwrap();
        let path = format!("{}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", text(program.parent().unwrap()));
        let limit = scaled(Duration::from_secs(240)).as_secs().to_string();
        let member: &[&str] = if need == "member" { &["runuser", "-u", MEMBER, "--"] } else { &[] };
        let ids = self.user.map(|id| [format!("--reuid={id}"), format!("--regid={id}")]);
        let user: Vec<&str> = ids.iter().flat_map(|[uid, gid]| ["setpriv", uid, gid, "--clear-groups", "--inh-caps=-all", "--"]).collect();
        let in_background = command.strip_suffix(" &");
        let script = format!("exec 2>&1\n{}{}", if in_background.is_some() { "exec " } else { "" }, in_background.unwrap_or(command));
        let words = [&["timeout", limit.as_str()], member, &user, &["sh", "-c", script.as_str()]].concat();
        let mut started = Command::new(words[0]);
        started
            .args(&words[1..])
            .env_clear()
            .envs([("PATH", path.as_str()), ("HOME", text(&home)), ("LANG", "C.UTF-8")])
            .envs(self.variables.iter().map(|(name, value)| (name, value)))
            .current_dir(place);
        if in_background.is_some() {
            let log = directory().join("background");
            started.stdin(Stdio::null()).stdout(fs::File::create(&log).unwrap());
            running.0.push(started.spawn().unwrap());
            let said = || fs::read_to_string(&log).unwrap();
            let fits = eventually(scaled(Duration::from_secs(20)), || all_fit(&said().lines().collect::<Vec<_>>(), wanted));
            return (!fits).then(|| format!("prints\n{}in place of\n{}\n", said(), wanted.join("\n")));
        }
        let output = started.output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        if !all_fit(&said.lines().collect::<Vec<_>>(), wanted) {
            return Some(format!("prints\n{said}in place of\n{}\n", wanted.join("\n")));
        }
        let fits_all = wanted.iter().all(|line| line.trim() == "…");
        (!need.is_empty() && fits_all && !output.status.success()).then(|| format!("fails ({}):\n{said}", output.status))
    }
}

/// What commands of a page have left running.
struct Running(Vec<Child>);

impl Drop for Running {
    fn drop(&mut self) {
        for child in &mut self.0 {
            // timeout(1) passes it on.
            let _sent = Command::new("kill").arg(child.id().to_string()).status();
            let _reaped = child.wait();
        }
    }
}

fn pages() -> Vec<PathBuf> {
    let repo = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_path_buf();
    let repo = std::env::var_os("CARGO_MANIFEST_DIR").map_or(repo, |tests| PathBuf::from(tests).parent().unwrap().to_path_buf());
    let mut pages = vec![repo.join("README.md")];
    let help = fs::read_dir(repo.join("crates/cli/help")).unwrap().map(|entry| entry.unwrap().path());
    // Pictures lie there too.
    pages.extend(help.filter(|path| path.extension().is_some_and(|extension| extension == "md")));
    pages.sort();
    pages
}

test!(RootlessOnly, every_command_of_the_documents_prints_what_they_say, needs [Program("jq")], seconds 600);
fn every_command_of_the_documents_prints_what_they_say() {
    let outcome = Reader::new(&[""]).follow_all();
    for (need, whereabouts) in NEEDS {
        let commands = outcome.left.iter().filter(|left| *left == need).count();
        println!("{commands} with needs={need} are {whereabouts}");
        assert!(commands > 0, "no page has needs={need}");
    }
    assert!(outcome.run >= 60, "{}", outcome.run);
}

test!(RootlessOnly, every_command_that_needs_a_network_prints_what_it_says, needs [Program("openssl")], seconds 180);
fn every_command_that_needs_a_network_prints_what_it_says() {
    let mut testbed = Testbed::trusted();
    testbed.index();
    let variables = vec![("XDG_RUNTIME_DIR", testbed.directory().to_path_buf())];
    let outcome = Reader { variables, ..Reader::new(&["network"]) }.follow_all();
    assert!(outcome.run >= 3, "{}", outcome.run);
}

/// An ordinary user, without an account.
const USER: u32 = 65533;

test!(RootOnly, every_command_that_needs_a_service_prints_what_it_says, needs [Program("curl"), Program("ip")], seconds 60);
fn every_command_that_needs_a_service_prints_what_it_says() {
    // In a network of its own, whose ports are free.
    nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).unwrap();
    assert!(Command::new("ip").args(["link", "set", "lo", "up"]).status().unwrap().success());
    let outcome = Reader { user: Some(USER), ..Reader::new(&["service"]) }.follow_all();
    assert!(outcome.run >= 3, "{}", outcome.run);
}

/// Why the package index may not be used.
fn no_index() -> Option<String> {
    let is_allowed = std::env::var("STOCKADE_TEST_INDEX").is_ok_and(|value| value == "yes");
    (!is_allowed).then(|| String::from("the package index is for the step frameworks-all alone"))
}

test!(RootlessOnly, every_command_that_needs_packages_prints_what_it_says, needs [Other(no_index)], seconds 900);
fn every_command_that_needs_packages_prints_what_it_says() {
    let variables = vec![("PIP_CACHE_DIR", directory().join("pip"))];
    let outcome = Reader { variables, ..Reader::new(&["python-packages"]) }.follow_all();
    assert!(outcome.run >= 4, "{}", outcome.run);
}

/// Why accounts, units and packages must stay as they are.
fn no_guest() -> Option<String> {
    let is_guest = std::env::var("STOCKADE_TEST_GUEST").is_ok_and(|value| value == "yes");
    (!is_guest).then(|| String::from("it changes accounts and units: tests/package runs it in the guest"))
}

test!(RootOnly, every_command_for_an_administrator_prints_what_it_says, needs [Other(no_guest)], seconds 300);
fn every_command_for_an_administrator_prints_what_it_says() {
    // The package that is installed, in the place of one that is built.
    let scripts = directory().join("pages/install/scripts");
    fs::create_dir_all(&scripts).unwrap();
    fs::write(scripts.join("package"), format!("#!/bin/sh\necho {}\n", std::env::var("STOCKADE_TEST_PACKAGE").unwrap())).unwrap();
    fs::set_permissions(scripts.join("package"), fs::Permissions::from_mode(0o755)).unwrap();
    let outcome = Reader::new(&["root", "systemd", "member"]).follow_all();
    assert!(outcome.run >= 15, "{}", outcome.run);
}

test!(Both, what_documents_print_is_compared);
fn what_documents_print_is_compared() {
    let wanted = |lines: &[&str]| lines.iter().map(|line| (*line).to_owned()).collect::<Vec<_>>();
    assert!(all_fit(&["a 12 b", "c", "d"], &wanted(&["a … b", "…", "d"])) && all_fit(&[], &wanted(&["…"])));
    assert!(!all_fit(&["a 12 c"], &wanted(&["a … b"])) && !all_fit(&["a"], &wanted(&["a", "b"])) && !all_fit(&["a", "b"], &wanted(&["a"])));
}
