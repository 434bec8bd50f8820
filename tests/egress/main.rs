//! The egress suite: a sandbox, its host and all other hosts in namespaces of the test's
//! own. Every denial is proved where it counts: no packet arrived at the other side, and
//! with the rule in place it does. Runs as root and as anybody else; needs python3, ip and
//! no outside network. A test of a program that is not installed is skipped and counted.
//!
//! usage: egress [WORD …]    only tests whose `module::name` holds a WORD
//!        egress --list | --bench
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a test panics where its promise is broken, and a runner prints"
)]

mod abuse;
mod bench;
mod bypass;
mod clients;
mod gate;
mod names;
mod outlets;
#[path = "../patience.rs"]
#[allow(dead_code, reason = "here no limit of a run has to be patient")]
mod patience;
mod programs;
mod rig;
mod rules;
mod sockets;
mod speech;

use std::{
    os::unix::process::CommandExt,
    path::Path,
    process::{Command, ExitCode, Stdio},
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, killpg},
    unistd::{Pid, Uid},
};
use patience::patient;

/// One test. Its name is the promise; without the programs that it needs it is skipped.
#[allow(missing_docs, reason = "name and body")]
pub struct Test {
    pub name: &'static str,
    pub needs: &'static [&'static str],
    pub body: fn(),
}

impl Test {
    fn lacks(&self) -> Option<&'static str> {
        let is_there = |name: &str| ["/usr/bin", "/bin"].iter().any(|directory| Path::new(directory).join(name).is_file());
        self.needs.iter().copied().find(|name| !is_there(name))
    }
}

macro_rules! tests {
    ($($name:ident $(needs [$($program:literal),*])?),* $(,)?) => {
        pub const TESTS: &[$crate::Test] = &[$($crate::Test {
            name: concat!(module_path!(), "::", stringify!($name)),
            needs: &[$($($program),*)?],
            body: $name,
        }),*];
    };
}
pub(crate) use tests;

const SELECT: &str = "--exactly";
const PATIENCE: Duration = Duration::from_secs(90);

fn main() -> ExitCode {
    let tests: Vec<&Test> = [
        rules::TESTS,
        names::TESTS,
        speech::TESTS,
        sockets::TESTS,
        bypass::TESTS,
        outlets::TESTS,
        abuse::TESTS,
        programs::TESTS,
        clients::TESTS,
        gate::TESTS,
    ]
    .concat_refs();
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match words.as_slice() {
        // Each test is a process of its own: it leaves its namespaces with it.
        [SELECT, name] => {
            let Some(test) = tests.iter().find(|test| short(test) == *name) else { return ExitCode::from(2) };
            (test.body)();
            return ExitCode::SUCCESS;
        }
        ["--bench"] => {
            bench::main();
            return ExitCode::SUCCESS;
        }
        ["--bench-server"] => {
            bench::serve();
            return ExitCode::SUCCESS;
        }
        ["--bench-client", what] => {
            bench::client(what);
            return ExitCode::SUCCESS;
        }
        ["--list"] => {
            tests.iter().for_each(|test| println!("{}", short(test)));
            return ExitCode::SUCCESS;
        }
        _ => {}
    }
    if let Some(word) = words.iter().find(|word| !tests.iter().any(|test| short(test).contains(**word))) {
        eprintln!("egress: no test has {word} in its name");
        return ExitCode::from(2);
    }
    let (mut passed, mut failed, mut skipped) = (0u32, Vec::new(), 0u32);
    println!("egress, as uid {}", Uid::current());
    for test in tests.iter().filter(|test| words.is_empty() || words.iter().any(|word| short(test).contains(word))) {
        if let Some(program) = test.lacks() {
            skipped += 1;
            println!("skipped  {}: {program} is not installed", short(test));
            continue;
        }
        let begin = Instant::now();
        match run_apart(short(test)) {
            Ok(()) => {
                passed += 1;
                println!("ok       {} ({} ms)", short(test), begin.elapsed().as_millis());
            }
            Err(said) => {
                println!("FAILED   {}\n{}", short(test), said.trim_end().lines().map(|line| format!("    {line}\n")).collect::<String>());
                failed.push(short(test));
            }
        }
    }
    println!(
        "\n{passed} passed, {} failed, {skipped} skipped{}",
        failed.len(),
        failed.iter().map(|name| format!("\n    {name}")).collect::<String>()
    );
    if failed.is_empty() && passed > 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Without the crate's name.
fn short(test: &Test) -> &'static str {
    test.name.split_once("::").map_or(test.name, |(_, rest)| rest)
}

trait ConcatRefs {
    fn concat_refs(&self) -> Vec<&'static Test>;
}

impl ConcatRefs for [&'static [Test]] {
    fn concat_refs(&self) -> Vec<&'static Test> {
        self.iter().flat_map(|tests| tests.iter()).collect()
    }
}

fn run_apart(name: &str) -> Result<(), String> {
    let program = std::env::current_exe().expect("this program has a path");
    let mut command = Command::new(program);
    command.args([SELECT, name]).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
    let mut child = command.spawn().expect("start the test's process");
    let group = Pid::from_raw(i32::try_from(child.id()).expect("a process id"));
    let begin = Instant::now();
    let ended = loop {
        if child.try_wait().expect("wait for a child").is_some() || begin.elapsed() > patient(PATIENCE) {
            break begin.elapsed() <= patient(PATIENCE);
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    let _gone = killpg(group, Signal::SIGKILL);
    let output = child.wait_with_output().expect("hear the test");
    let said = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    match (ended, output.status.success()) {
        (true, true) => Ok(()),
        (true, false) => Err(format!("{said}\n{}", output.status)),
        (false, _) => Err(format!("{said}\nnot done after {} s", PATIENCE.as_secs())),
    }
}
