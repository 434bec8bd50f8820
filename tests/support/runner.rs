//! The runner: one process for each test, so that a test which hangs or crashes ends alone,
//! with everything that it started. Arguments, lists and output are those of `libtest-mimic`,
//! which cargo, nextest and editors understand.
//!
//! A test passes only by returning. What a host cannot run is printed with its reason and
//! counted, never passed over. The last line is `N passed, N failed, N skipped`.
//!
//! Tests run four at a time. A `serial` test runs with no other beside it: one that looks at the
//! whole host for what a run left behind, or that judges time or a load.

use std::{
    fs::{self, DirBuilder},
    io::Read,
    os::unix::{
        fs::DirBuilderExt,
        process::{CommandExt, ExitStatusExt},
    },
    path::PathBuf,
    process::{Child, Command, ExitCode, ExitStatus, Output, Stdio},
    sync::{Mutex, PoisonError, RwLock},
    thread,
    time::{Duration, Instant},
};

use libtest_mimic::{Arguments, Completion, Failed, Trial};
use nix::{
    sys::signal::{Signal, killpg},
    unistd::{Pid, Uid},
};

use super::{
    exec::program_path,
    leftovers::sweep_own_registry,
    needs::{Need, cgroup, reason_to_skip},
    timeouts::scaled,
};

/// The user that a test is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Who {
    /// Root and every other user.
    Both,
    /// Only root can set it up, or only root's launcher promises it.
    RootOnly,
    /// Only an ordinary user's launcher promises it.
    RootlessOnly,
}

/// One test. Its name is the promise that it holds the program to.
#[derive(Clone, Copy)]
pub struct Test {
    /// With the crate's name before it: `integration::suite::meta::passes`.
    path: &'static str,
    line: u32,
    who: Who,
    needs: &'static [Need],
    seconds: u64,
    serial: bool,
    broken: bool,
    body: fn(),
}

inventory::collect!(Test);

/// Declares the function below it as a test: `test!(Both, name);`, with what a host must have
/// and a time limit other than 30 seconds `test!(RootOnly, name, needs [Cgroup], seconds 90);`,
/// with no other test beside it `test!(serial Both, name);`.
macro_rules! test {
    (@ [$($mark:ident)*] serial $($rest:tt)*) => { $crate::support::runner::test! { @ [$($mark)* serial] $($rest)* } };
    (@ [$($mark:ident)*] broken $($rest:tt)*) => { $crate::support::runner::test! { @ [$($mark)* broken] $($rest)* } };
    (@ [$($mark:ident)*] $who:ident, $name:ident $(, needs $needs:tt)? $(, seconds $seconds:literal)?) => {
        inventory::submit! {{
            #[allow(unused_imports, reason = "not every test has a need")]
            use $crate::support::{needs::Need::*, runner::{Test, Who}};
            Test::new(Who::$who, concat!(module_path!(), "::", stringify!($name)), line!(), $name)
                $(.needs(&$needs))? $(.seconds($seconds))? $(.$mark())*
        }}
    };
    ($($all:tt)*) => { $crate::support::runner::test! { @ [] $($all)* } };
}
pub(crate) use test;

/// Names the directory of one test, for the process that runs it.
const DIRECTORY: &str = "STOCKADE_TEST_DIRECTORY";
/// Runs one test in this process.
const BODY: &str = "--body";
/// Selects the tests that fail on purpose, for the tests of the runner.
const BROKEN: &str = "--broken";
/// Tests that run at a time. With two, on two CPUs, half of their time is waiting.
const THREADS: usize = 4;
/// What a test may take before its time is printed at the end.
const SLOW: Duration = Duration::from_secs(4);
/// Serial tests hold it alone, the others together.
static SERIAL: RwLock<()> = RwLock::new(());
/// How long each test took.
static TIMES: Mutex<Vec<(Duration, String)>> = Mutex::new(Vec::new());

impl Test {
    /// Used by [`test!`] alone, like the setters below.
    pub const fn new(who: Who, path: &'static str, line: u32, body: fn()) -> Self {
        Test { path, line, who, needs: &[], seconds: 30, serial: false, broken: false, body }
    }

    pub const fn needs(mut self, needs: &'static [Need]) -> Self {
        self.needs = needs;
        self
    }

    pub const fn seconds(mut self, seconds: u64) -> Self {
        self.seconds = seconds;
        self
    }

    pub const fn serial(mut self) -> Self {
        self.serial = true;
        self
    }

    pub const fn broken(mut self) -> Self {
        self.broken = true;
        self
    }

    /// Its name in lists and arguments: `suite::meta::passes`.
    fn name(&self) -> &'static str {
        self.path.split_once("::").map_or(self.path, |(_, rest)| rest)
    }

    fn module(&self) -> &'static str {
        self.path.rsplit_once("::").map_or("", |(module, _)| module)
    }

    /// Runs it as its own process, unless this user or host cannot.
    fn run(&self) -> Result<Completion, Failed> {
        if let Some(reason) = reason_to_skip(self.who, self.needs) {
            return Ok(Completion::ignored_with(reason));
        }
        let _beside = (!self.serial).then(|| SERIAL.read().unwrap_or_else(PoisonError::into_inner));
        let _alone = self.serial.then(|| SERIAL.write().unwrap_or_else(PoisonError::into_inner));
        let started = Instant::now();
        let ended = self.run_as_process();
        TIMES.lock().unwrap_or_else(PoisonError::into_inner).push((started.elapsed(), self.name().to_owned()));
        ended.map(|()| Completion::Completed).map_err(Failed::from)
    }

    /// Runs it in its own process group, within its time.
    fn run_as_process(&self) -> Result<(), String> {
        let directory = Directory::make(self.name());
        let log = directory.0.join("log");
        let file = fs::File::create(&log).expect("make the test's log");
        let mut command = Command::new(std::env::current_exe().expect("this program has a path"));
        command.args([BODY, self.name()]).env(DIRECTORY, &directory.0).stdin(Stdio::null()).process_group(0);
        command.stdout(file.try_clone().expect("share the log")).stderr(file);
        let mut child = command.spawn().expect("start the test's process");
        let time = Duration::from_secs(self.seconds);
        let status = wait_within(&mut child, time);
        // The processes that are left in its group.
        let _gone = killpg(Pid::from_raw(child.id().cast_signed()), Signal::SIGKILL);
        let mut output = String::new();
        let _unread = fs::File::open(&log).map(|file| file.take(1 << 16).read_to_string(&mut output));
        let Some(status) = status else {
            let _reaped = child.wait();
            return Err(format!("{output}\nnot done after {} s", scaled(time).as_secs()));
        };
        match status.signal() {
            _ if status.success() => Ok(()),
            Some(signal) => Err(format!("{output}\nended by signal {signal}")),
            None => Err(output),
        }
    }
}

pub fn is_root() -> bool {
    Uid::effective().is_root()
}

/// The directory of the test that this process runs; removed when it has ended.
pub fn directory() -> PathBuf {
    std::env::var_os(DIRECTORY).map(PathBuf::from).expect("only a test has a directory")
}

/// Runs the tests that the arguments select: those with one of the words in their name.
pub fn main() -> ExitCode {
    let (mut options, words) = split(std::env::args().collect());
    if let [_, BODY] = options.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        let Some(test) = inventory::iter::<Test>().find(|test| words == [test.name()]) else { return ExitCode::from(2) };
        (test.body)();
        sweep_own_registry();
        return ExitCode::SUCCESS;
    }
    let broken = options.iter().any(|option| option == BROKEN);
    options.retain(|option| option != BROKEN);
    let mut arguments = Arguments::from_iter(options);
    arguments.test_threads.get_or_insert(THREADS);
    let mut tests: Vec<&Test> = inventory::iter::<Test>().filter(|test| test.broken == broken).collect();
    tests.sort_by_key(|test| (test.serial, test.module(), test.line));
    let has = |test: &Test, word: &String| if arguments.exact { test.name() == word } else { test.name().contains(word.as_str()) };
    if let Some(word) = words.iter().find(|word| !tests.iter().any(|test| has(test, word))) {
        eprintln!("integration: no test has {word} in its name");
        return ExitCode::from(2);
    }
    tests.retain(|test| words.is_empty() || words.iter().any(|word| has(test, word)));
    if !arguments.list {
        // Plain `cargo test` builds no program and has one user: it counts these tests, and runs none.
        if words.is_empty() && std::env::var_os("STOCKADE").is_none() {
            println!("the integration tests want the program and two users: scripts/test runs them, scripts/test one NAME runs one");
            println!("0 passed, 0 failed, {} skipped", tests.len());
            return ExitCode::SUCCESS;
        }
        if let Err(why) = program_path() {
            eprintln!("integration: {why}");
            return ExitCode::from(2);
        }
        // Where it is known what there must be, a test that is skipped for want of it is a failure.
        if let Ok(wanted) = std::env::var("STOCKADE_TEST_CGROUP")
            && wanted != cgroup()
        {
            eprintln!("integration: runs are to have cgroup {wanted} here, but have {}", cgroup());
            return ExitCode::from(2);
        }
    }
    let trials = tests.iter().map(|&test| Trial::ignorable_test(test.name(), || test.run())).collect();
    let conclusion = libtest_mimic::run(&arguments, trials);
    if arguments.list {
        return ExitCode::SUCCESS;
    }
    let mut times = std::mem::take(&mut *TIMES.lock().unwrap_or_else(PoisonError::into_inner));
    times.sort_by_key(|(time, _)| std::cmp::Reverse(*time));
    let slow = times.iter().filter(|(time, _)| *time >= SLOW);
    let slow: Vec<String> = slow.map(|(time, name)| format!("{:.1} s {name}", time.as_secs_f64())).collect();
    let total: Duration = times.iter().map(|(time, _)| *time).sum();
    println!(
        "as uid {}; {} s of all tests together; of {} s and longer:\n{}",
        Uid::effective(),
        total.as_secs(),
        SLOW.as_secs(),
        slow.join("\n")
    );
    println!("{} passed, {} failed, {} skipped", conclusion.num_passed, conclusion.num_failed, conclusion.num_ignored);
    // Tests that were all skipped prove nothing, unless one was asked for by its name.
    let proved = conclusion.num_passed > 0 || arguments.exact;
    if conclusion.num_failed == 0 && proved { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// The arguments of `libtest-mimic`, which takes one word, and the words.
fn split(arguments: Vec<String>) -> (Vec<String>, Vec<String>) {
    let (mut options, mut words) = (Vec::new(), Vec::new());
    let mut value = true;
    for argument in arguments {
        if value || argument.starts_with('-') {
            value = !value && ["--test-threads", "--logfile", "--skip", "--color", "--format", "-Z"].contains(&argument.as_str());
            options.push(argument);
        } else {
            words.push(argument);
        }
    }
    (options, words)
}

/// Removed with everything in it when dropped.
struct Directory(PathBuf);

impl Directory {
    fn make(name: &str) -> Self {
        // Short, since a socket's path in it has at most 107 bytes.
        let name = name.rsplit("::").next().unwrap_or(name);
        let path = std::env::temp_dir().join(format!("suite-{}-{name}", std::process::id()));
        DirBuilder::new().mode(0o755).create(&path).expect("make the test's directory");
        Directory(path)
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        // A test may have left directories that cannot be entered.
        if fs::remove_dir_all(&self.0).is_err() {
            let _tried = Command::new("chmod").args(["-R", "u+rwx"]).arg(&self.0).stderr(Stdio::null()).status();
            let _left = fs::remove_dir_all(&self.0);
        }
    }
}

/// Waits for a child as long as [`scaled`] says; none where the time was up. It is not killed.
pub fn wait_within(child: &mut Child, time: Duration) -> Option<ExitStatus> {
    let mut status = None;
    eventually(time, || {
        status = child.try_wait().expect("wait for a child");
        status.is_some()
    });
    status
}

/// Asks until the answer is yes, or the [`scaled`] time is up. True: it was yes.
pub fn eventually(time: Duration, mut ask: impl FnMut() -> bool) -> bool {
    let end = Instant::now() + scaled(time);
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

/// Runs this program's deliberately broken tests with this timeout factor, for the tests of it.
pub fn run_broken(factor: u32, words: &[&str]) -> Output {
    let mut command = Command::new(std::env::current_exe().expect("this program has a path"));
    command.arg(BROKEN).args(words).env_remove(DIRECTORY).env("STOCKADE_TEST_TIMEOUT_FACTOR", factor.to_string());
    command.stdin(Stdio::null()).output().expect("run the tests again")
}
