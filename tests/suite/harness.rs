//! The runner: one process for each test, so that a test which hangs or crashes ends
//! alone, with everything that it started.
//!
//! A test passes only by returning. What a host cannot run is printed with its reason
//! and counted, never passed over.
//!
//! Independent tests run two at a time. A test that looks at the whole host for what a run
//! left behind, or judges time or a load of its own, is marked `alone`: those come last, one
//! after another. Either way results are printed in the order of the tests.

use std::{
    collections::BTreeMap,
    ffi::OsString,
    fs::{self, DirBuilder},
    io::{Read, Write},
    os::unix::{
        fs::DirBuilderExt,
        process::{CommandExt, ExitStatusExt},
    },
    path::{Path, PathBuf},
    process::{Child, Command, ExitCode, Stdio},
    sync::{
        OnceLock,
        atomic::{AtomicUsize, Ordering},
        mpsc::channel,
    },
    thread,
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, killpg},
    unistd::{Pid, Uid},
};

use crate::{
    patience::{is_slow, patient},
    stockade,
};

/// Whose test it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Who {
    /// Root and everybody else.
    Both,
    /// Only root can set it up, or only root's launcher promises it.
    RootOnly,
    /// Only an ordinary user's launcher promises it.
    RootlessOnly,
}

/// What a host must offer for a test to say anything.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// A cgroup of the run's own, with limits.
    Cgroup,
    /// The same on cgroup v1.
    Cgroup1,
    /// The same on cgroup v2.
    Cgroup2,
    /// No cgroup: the rlimits that stand in.
    NoCgroup,
    /// A program of the host.
    Program(&'static str),
    /// The environment that `scripts/prepare-data-science` makes.
    DataScience,
    /// Two CPUs or more.
    TwoCpus,
    /// A host that systemd runs; for an ordinary user a manager of their own.
    Systemd,
    /// A container engine that can start a container.
    Container,
    /// A machine of usual speed.
    Speed,
}

/// One test. Its name is the promise that it holds the program to.
#[derive(Clone, Copy)]
pub struct Test {
    pub module: &'static str,
    pub name: &'static str,
    pub who: Who,
    pub needs: &'static [Need],
    pub seconds: u64,
    pub beside: Beside,
    pub body: fn(),
}

/// What may run at the same time as a test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Beside {
    /// Any other test that says so too.
    Another,
    /// No other test.
    Nothing,
}

/// `test!(Both, name)`, `test!(RootOnly, name, needs [Cgroup], seconds 90)`,
/// `test!(alone Both, name)`.
macro_rules! test {
    (alone $($rest:tt)*) => {
        $crate::harness::Test { beside: $crate::harness::Beside::Nothing, ..$crate::harness::test!($($rest)*) }
    };
    ($who:ident, $name:ident $(, needs [$($need:expr),*])? $(, seconds $seconds:literal)?) => {
        $crate::harness::Test {
            module: module_path!(),
            name: stringify!($name),
            who: $crate::harness::Who::$who,
            needs: {
                #[allow(unused_imports, reason = "not every test has a need")]
                use $crate::harness::Need::*;
                &[$($($need),*)?]
            },
            seconds: { #[allow(unused_variables, reason = "the default")] let seconds = 30; $(let seconds = $seconds;)? seconds },
            beside: $crate::harness::Beside::Another,
            body: $name,
        }
    };
}
pub(crate) use test;

/// Names the directory of one test, for the process that runs it.
const DIRECTORY: &str = "STOCKADE_TEST_DIRECTORY";
const SELECT: &str = "--exactly";
/// Tests that the meta test runs, and nobody else.
const BROKEN: &str = "--broken";

impl Test {
    fn full_name(&self) -> String {
        let module = self.module.rsplit("::").next().unwrap_or(self.module);
        format!("{module}::{}", self.name)
    }
}

enum Ending {
    Passed,
    Failed(String),
    Skipped(String),
}

pub fn is_root() -> bool {
    Uid::effective().is_root()
}

/// The directory of the test that this process runs; removed when it has ended.
pub fn directory() -> PathBuf {
    std::env::var_os(DIRECTORY).map(PathBuf::from).expect("only a test has a directory")
}

/// See the module.
pub fn main(tests: &[Test]) -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match words.as_slice() {
        [SELECT, name] => return run_here(tests.iter().chain(crate::meta::BROKEN), name),
        [BROKEN, rest @ ..] => return run_all(&chosen(crate::meta::BROKEN, rest)),
        ["--list"] => {
            tests.iter().for_each(|test| println!("{} ({:?})", test.full_name(), test.who));
            return ExitCode::SUCCESS;
        }
        _ => {}
    }
    if let Some(option) = words.iter().find(|word| word.starts_with('-')) {
        eprintln!("sandbox: no option {option}; there is --list, and words that select tests by name");
        return ExitCode::from(2);
    }
    if let Err(why) = stockade::program_path() {
        eprintln!("sandbox: {why}");
        return ExitCode::from(2);
    }
    if let Some(word) = words.iter().find(|word| chosen(tests, &[**word]).is_empty()) {
        eprintln!("sandbox: no test has {word} in its name");
        return ExitCode::from(2);
    }
    // Where it is known what there must be, a test that is skipped for want of it is a failure.
    if let Ok(wanted) = std::env::var("STOCKADE_TEST_CGROUP")
        && wanted != cgroup()
    {
        eprintln!("sandbox: runs are to have cgroup {wanted} here, but have {}", cgroup());
        return ExitCode::from(2);
    }
    run_all(&chosen(tests, &words))
}

fn chosen(tests: &[Test], words: &[&str]) -> Vec<Test> {
    let wanted = |test: &&Test| words.is_empty() || words.iter().any(|word| test.full_name().contains(word));
    tests.iter().filter(wanted).copied().collect()
}

/// The process of one test.
fn run_here<'a>(mut tests: impl Iterator<Item = &'a Test>, name: &str) -> ExitCode {
    let Some(test) = tests.find(|test| test.full_name() == name) else { return ExitCode::from(2) };
    (test.body)();
    ExitCode::SUCCESS
}

fn run_all(tests: &[Test]) -> ExitCode {
    let who = if is_root() { "root" } else { "an ordinary user" };
    println!("{} tests as {who} (uid {})", tests.len(), Uid::effective());
    let begin = Instant::now();
    let mut tally = Tally::default();
    let (together, alone): (Vec<Test>, Vec<Test>) = tests.iter().partition(|test| test.beside == Beside::Another);
    run_together(&together, &mut tally);
    alone.iter().for_each(|test| tally.note(&run_one(test)));
    let Tally { passed, failed, skipped } = tally;
    if !failed.is_empty() {
        println!("\nfailed:\n    {}", failed.join("\n    "));
    }
    println!("\nin {} s", begin.elapsed().as_secs());
    println!("{passed} passed, {} failed, {skipped} skipped", failed.len());
    // No tests, or nothing but skipped ones, prove nothing.
    if failed.is_empty() && passed > 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Independent tests that run at a time. Most of them wait, but there may be two CPUs only.
const TOGETHER: usize = 2;

/// Starts tests in their order, a further one whenever one has ended, and notes what came of
/// them in that order too.
fn run_together(tests: &[Test], tally: &mut Tally) {
    let (next, (ended, endings)) = (AtomicUsize::new(0), channel());
    thread::scope(|scope| {
        for _ in 0..TOGETHER {
            let (next, ended) = (&next, ended.clone());
            scope.spawn(move || {
                while let Some((index, test)) =
                    Some(next.fetch_add(1, Ordering::Relaxed)).and_then(|index| Some((index, tests.get(index)?)))
                {
                    ended.send((index, run_one(test))).expect("the results are waited for");
                }
            });
        }
        drop(ended);
        // Those that have ended before one that was started earlier.
        let mut early = BTreeMap::new();
        let mut noted = 0;
        for (index, done) in endings {
            early.insert(index, done);
            while let Some(done) = early.remove(&noted) {
                tally.note(&done);
                noted += 1;
            }
        }
    });
}

/// A test that has ended.
struct Ended {
    name: String,
    how: Ending,
    took: Duration,
}

fn run_one(test: &Test) -> Ended {
    let started = Instant::now();
    let how = reason_to_skip(test).map_or_else(|| run_apart(test), Ending::Skipped);
    Ended { name: test.full_name(), how, took: started.elapsed() }
}

#[derive(Default)]
struct Tally {
    passed: u32,
    failed: Vec<String>,
    skipped: u32,
}

impl Tally {
    /// Prints and counts.
    fn note(&mut self, Ended { name, how, took }: &Ended) {
        match how {
            Ending::Passed => {
                self.passed += 1;
                println!("ok       {name} ({} ms)", took.as_millis());
            }
            Ending::Skipped(why) => {
                self.skipped += 1;
                println!("skipped  {name}: {why}");
            }
            Ending::Failed(how) => {
                println!("FAILED   {name}\n{}", how.trim_end().lines().map(|line| format!("    {line}\n")).collect::<String>());
                self.failed.push(name.clone());
            }
        }
        let _nobody_reads = std::io::stdout().flush();
    }
}

fn reason_to_skip(test: &Test) -> Option<String> {
    match (test.who, is_root()) {
        (Who::RootOnly, false) => return Some(String::from("for root only")),
        (Who::RootlessOnly, true) => return Some(String::from("for ordinary users only")),
        _ => {}
    }
    test.needs.iter().find_map(|need| match need {
        Need::Cgroup if !has_cgroup() => Some(String::from("no cgroup of one's own here: rlimits stand in")),
        Need::Cgroup1 if !cgroup().starts_with("v1") => Some(format!("no cgroup v1 of one's own here, but {}", cgroup())),
        Need::Cgroup2 if !cgroup().starts_with("v2") => Some(format!("no cgroup v2 of one's own here, but {}", cgroup())),
        Need::NoCgroup if has_cgroup() => Some(String::from("there is a cgroup, which no rlimit has to stand in for")),
        Need::Program(name) if find_program(name).is_none() => Some(format!("{name} is not installed")),
        Need::DataScience if !Path::new("/opt/stockade/data-science/bin/python3").exists() => {
            Some(String::from("scripts/prepare-data-science has not been run"))
        }
        Need::TwoCpus if thread::available_parallelism().map_or(1, usize::from) < 2 => Some(String::from("one CPU only")),
        Need::Systemd if !crate::delegation::systemd_answers() => Some(String::from("no systemd to ask for a unit")),
        Need::Container => crate::container::hindrance(),
        Need::Speed if is_slow() => Some(String::from("it would take too long on a machine as slow as STOCKADE_TEST_SLOW says")),
        _ => None,
    })
}

/// A program of the host, by name.
pub fn find_program(name: &str) -> Option<PathBuf> {
    ["/usr/bin", "/bin", "/usr/sbin", "/sbin"].iter().map(|directory| Path::new(directory).join(name)).find(|path| path.is_file())
}

fn has_cgroup() -> bool {
    cgroup() != "none"
}

/// The version of a run's cgroup here, by its own receipt: `v1`, `v2` or `none`.
fn cgroup() -> &'static str {
    static ANSWER: OnceLock<&str> = OnceLock::new();
    ANSWER.get_or_init(|| {
        let program = stockade::program_path().expect("checked at the start");
        let asked = Command::new(program).arg("exec").stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn();
        let mut child = asked.expect("start the program");
        let _refused = child.stdin.take().expect("piped").write_all(br#"{"code": "0"}"#);
        let output = child.wait_with_output().expect("wait for the program");
        let result: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
        let layers = result["receipt"]["layers"].as_array().cloned().unwrap_or_default();
        let kept = layers.iter().find(|layer| layer["layer"] == "cgroup" && layer["known"] == "read_back");
        let detail = kept.and_then(|layer| layer["detail"].as_str()).unwrap_or_default();
        ["v1", "v2"].into_iter().find(|version| detail.starts_with(version)).unwrap_or("none")
    })
}

/// Removed with everything in it when dropped.
struct Directory(PathBuf);

impl Directory {
    fn make(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("suite-{}-{name}", std::process::id()));
        DirBuilder::new().mode(0o755).create(&path).expect("make the test's directory");
        Directory(path)
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        // A test may have left directories that nobody may enter.
        if fs::remove_dir_all(&self.0).is_err() {
            let _tried = Command::new("chmod").args(["-R", "u+rwx"]).arg(&self.0).stderr(Stdio::null()).status();
            let _left = fs::remove_dir_all(&self.0);
        }
    }
}

/// Runs a test in a process group of its own, within its time.
fn run_apart(test: &Test) -> Ending {
    let directory = Directory::make(test.name);
    let program = std::env::current_exe().expect("this program has a path");
    let log = directory.0.join("log");
    let file = fs::File::create(&log).expect("make the test's log");
    let mut command = Command::new(program);
    command.arg(SELECT).arg(test.full_name()).env(DIRECTORY, &directory.0).stdin(Stdio::null()).process_group(0);
    command.stdout(file.try_clone().expect("share the log")).stderr(file);
    let mut child = command.spawn().expect("start the test's process");
    let time = Duration::from_secs(test.seconds);
    let status = wait_within(&mut child, time);
    // Whatever it left behind in its group.
    let _gone = killpg(group(&child), Signal::SIGKILL);
    let mut said = String::new();
    let _unread = fs::File::open(&log).map(|file| file.take(1 << 16).read_to_string(&mut said));
    match status {
        Some(status) if status.success() => Ending::Passed,
        Some(status) => Ending::Failed(match status.signal() {
            Some(signal) => format!("{said}\nended by signal {signal}"),
            None => said,
        }),
        None => {
            let _reaped = child.wait();
            Ending::Failed(format!("{said}\nnot done after {} s", patient(time).as_secs()))
        }
    }
}

fn group(child: &Child) -> Pid {
    Pid::from_raw(i32::try_from(child.id()).expect("a process id"))
}

/// Waits for a child, patiently; none where the time was up. It is not killed.
pub fn wait_within(child: &mut Child, time: Duration) -> Option<std::process::ExitStatus> {
    let mut status = None;
    eventually(time, || {
        status = child.try_wait().expect("wait for a child");
        status.is_some()
    });
    status
}

/// Asks until the answer is yes, or the time is up, patiently. True: it was yes.
pub fn eventually(time: Duration, mut ask: impl FnMut() -> bool) -> bool {
    let end = Instant::now() + patient(time);
    loop {
        if ask() {
            return true;
        }
        if Instant::now() >= end {
            return false;
        }
        thread::sleep(Duration::from_millis(2));
    }
}

/// Runs this suite's deliberately broken tests with so much patience, for the meta test.
pub fn run_broken(slow: u32, words: &[&str]) -> std::process::Output {
    let program = std::env::current_exe().expect("this program has a path");
    let arguments = std::iter::once(OsString::from(BROKEN)).chain(words.iter().map(OsString::from));
    let mut command = Command::new(program);
    command.args(arguments).env_remove(DIRECTORY).env("STOCKADE_TEST_SLOW", slow.to_string());
    command.stdin(Stdio::null()).output().expect("run the suite again")
}
