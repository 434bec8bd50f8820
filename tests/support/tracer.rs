//! One system call of one process of a run made to fail, or that process killed at it, or
//! something else done before it.
//!
//! The program runs under ptrace(2) with all its processes, and is not told. A process is
//! named by its descent: `launcher.0` is the first that the launcher started (pid 1 of the
//! sandbox), `launcher.0.1` the second that this one started. A call is named by its
//! ordinal within the process; it is the same call in every run, but where two processes
//! meet by chance. The payload is let go at its execve and never interfered with.

use std::{
    collections::{HashMap, HashSet},
    fs::{self, File},
    path::PathBuf,
    sync::mpsc,
    thread,
    time::Duration,
};

use nix::{
    errno::Errno,
    libc,
    sys::{
        ptrace::{self, Options},
        signal::{Signal, kill},
        wait::{WaitPidFlag, WaitStatus, waitpid},
    },
    unistd::Pid,
};

use super::{
    exec::{program_path, run_under, text},
    runner::directory,
};

/// The name of the process that the caller starts.
pub const LAUNCHER: &str = "launcher";
/// The name of the sandbox's first process.
pub const INIT: &str = "launcher.0";

/// A system call of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Point {
    /// The process, by its descent.
    pub process: String,
    /// Which of its calls, from its start on.
    pub ordinal: usize,
    /// The number of the call.
    pub call: u64,
}

impl Point {
    /// Calls that cannot fail, or do not come back. What close(2) answers is of earlier
    /// writes; the descriptor is gone in any case. clock_gettime(2) is a call only where the
    /// vDSO cannot answer, as under emulation.
    pub fn is_sure(&self) -> bool {
        let sure =
            [libc::SYS_exit, libc::SYS_exit_group, libc::SYS_rt_sigreturn, libc::SYS_close, libc::SYS_uname, libc::SYS_clock_gettime];
        self.is_one_of(&sure)
    }

    pub fn is_one_of(&self, calls: &[i64]) -> bool {
        calls.iter().any(|call| call.cast_unsigned() == self.call)
    }
}

/// What happens at a point.
#[derive(Clone, Copy)]
pub enum Act<'a> {
    /// The call is not made, and answers this.
    Fail(Errno),
    /// The process gets SIGKILL before the call is made.
    Kill,
    /// This is done first. It is the first call of the point's number, at its ordinal or later.
    After(&'a dyn Fn()),
}

/// What came of a run.
pub struct Traced {
    /// Every call before the act, or all.
    pub calls: Vec<Point>,
    /// How the launcher ended; none if it had to be killed after [`RUN_TIMEOUT`].
    pub ending: Option<WaitStatus>,
    /// The launcher's process id.
    pub pid: u32,
    /// The call at which the act came to pass; none where the process ended earlier.
    pub acted: Option<Point>,
}

/// How long a run may take that was interfered with.
pub const RUN_TIMEOUT: Duration = Duration::from_secs(20);

struct Process {
    name: String,
    children: usize,
    calls: usize,
    /// The call that it is in was exchanged for a harmless one.
    failing: bool,
    /// The launcher counts from its own execve on: before, it is a shell.
    counted: bool,
}

struct Tracer<'a> {
    processes: HashMap<Pid, Process>,
    /// Stopped at their birth, before their parent has told of them.
    unnamed: HashSet<Pid>,
    act: Option<(Point, Act<'a>)>,
    /// The act is done: everybody is let go at their next stop.
    done: bool,
    acted: Option<Point>,
    calls: Vec<Point>,
}

/// The program without the screener beside it, whose process would be one more of the
/// launcher's: what becomes of that changes findings only, as
/// `screen::a_screener_that_fails_is_a_finding` shows.
fn alone() -> PathBuf {
    let place = directory().join("traced");
    if !place.exists() {
        fs::create_dir(&place).unwrap();
        fs::copy(program_path().unwrap(), place.join("stockade")).unwrap();
    }
    place.join("stockade")
}

/// Runs the program with these arguments, and interferes at one point.
pub fn trace(arguments: &[&str], [stdin, stdout, stderr]: [File; 3], act: Option<(&Point, Act<'_>)>) -> Traced {
    // A shell that stops itself: nothing of the program happens before it is traced.
    let program = alone();
    let mut command = run_under(&["/bin/sh", "-c", r#"kill -STOP $$; exec "$0" "$@""#, text(&program)]);
    #[expect(clippy::zombie_processes, reason = "it is waited for below, as one of those that are traced")]
    let child = command.args(arguments).stdin(stdin).stdout(stdout).stderr(stderr).spawn().unwrap();
    let launcher = Pid::from_raw(i32::try_from(child.id()).unwrap());
    assert!(matches!(waitpid(launcher, Some(WaitPidFlag::WUNTRACED)), Ok(WaitStatus::Stopped(..))));
    let options = Options::PTRACE_O_TRACESYSGOOD
        | Options::PTRACE_O_TRACECLONE
        | Options::PTRACE_O_TRACEFORK
        | Options::PTRACE_O_TRACEVFORK
        | Options::PTRACE_O_TRACEEXEC
        | Options::PTRACE_O_EXITKILL;
    ptrace::seize(launcher, options).unwrap();
    let first = Process { name: String::from(LAUNCHER), children: 0, calls: 0, failing: false, counted: false };
    let mut tracer = Tracer {
        processes: HashMap::from([(launcher, first)]),
        unnamed: HashSet::new(),
        act: act.map(|(point, act)| (point.clone(), act)),
        done: false,
        acted: None,
        calls: Vec::new(),
    };
    kill(launcher, Signal::SIGCONT).unwrap();

    let (ended, watch) = mpsc::channel::<()>();
    let watchdog = thread::spawn(move || {
        let hung = watch.recv_timeout(RUN_TIMEOUT) == Err(mpsc::RecvTimeoutError::Timeout);
        hung && kill(launcher, Signal::SIGKILL).is_ok()
    });
    let mut ending = None;
    // Until no process is left to wait for: the launcher, and those still traced.
    while let Ok(status) = waitpid(None, Some(WaitPidFlag::__WALL)) {
        match status {
            WaitStatus::Exited(pid, _) | WaitStatus::Signaled(pid, ..) => {
                tracer.processes.remove(&pid);
                if pid == launcher {
                    ending = Some(status);
                }
            }
            _ => tracer.stopped(status),
        }
    }
    drop(ended);
    let hung = watchdog.join().unwrap();
    Traced { calls: tracer.calls, ending: ending.filter(|_| !hung), pid: child.id(), acted: tracer.acted }
}

impl Tracer<'_> {
    fn stopped(&mut self, status: WaitStatus) {
        match status {
            WaitStatus::PtraceSyscall(pid) => self.at_call(pid),
            WaitStatus::PtraceEvent(pid, _, libc::PTRACE_EVENT_FORK | libc::PTRACE_EVENT_VFORK | libc::PTRACE_EVENT_CLONE) => {
                self.born(pid);
                self.go_on(pid, None);
            }
            WaitStatus::PtraceEvent(pid, _, libc::PTRACE_EVENT_EXEC) => self.executed(pid),
            WaitStatus::PtraceEvent(pid, ..) if self.processes.contains_key(&pid) => self.go_on(pid, None),
            WaitStatus::PtraceEvent(pid, ..) => {
                self.unnamed.insert(pid);
                if self.done {
                    self.go_on(pid, None);
                }
            }
            WaitStatus::Stopped(pid, signal) => self.go_on(pid, Some(signal)),
            _ => {}
        }
    }

    /// A process that vanished meanwhile is reported as ended next.
    fn go_on(&self, pid: Pid, signal: Option<Signal>) {
        let _gone = if self.done { ptrace::detach(pid, signal) } else { ptrace::syscall(pid, signal) };
    }

    fn born(&mut self, parent: Pid) {
        let (Ok(pid), Some(process)) = (ptrace::getevent(parent), self.processes.get_mut(&parent)) else { return };
        let pid = Pid::from_raw(i32::try_from(pid).unwrap());
        let name = format!("{}.{}", process.name, process.children);
        process.children += 1;
        self.processes.insert(pid, Process { name, children: 0, calls: 0, failing: false, counted: true });
        if self.unnamed.remove(&pid) {
            self.go_on(pid, None);
        }
    }

    fn executed(&mut self, pid: Pid) {
        let Some(process) = self.processes.get_mut(&pid) else { return };
        process.counted = true;
        if process.name.starts_with(INIT) && process.name != INIT {
            // The payload.
            let _gone = ptrace::detach(pid, None);
        } else {
            self.go_on(pid, None);
        }
    }

    fn at_call(&mut self, pid: Pid) {
        const ENTRY: u8 = 1;
        let (Ok(info), Some(process)) = (ptrace::syscall_info(pid), self.processes.get_mut(&pid)) else { return self.go_on(pid, None) };
        let Ok(mut registers) = ptrace::getregs(pid) else { return self.go_on(pid, None) };
        if info.op == ENTRY && process.counted {
            let point = Point { process: process.name.clone(), ordinal: process.calls, call: registers.orig_rax };
            process.calls += 1;
            let here = |wanted: &Point| wanted.process == point.process && point.ordinal >= wanted.ordinal && !point.is_sure();
            match &self.act {
                Some((wanted, Act::After(first))) if self.acted.is_none() && here(wanted) && wanted.call == point.call => {
                    first();
                    self.acted = Some(point);
                    self.done = true;
                }
                Some((wanted, act @ (Act::Fail(_) | Act::Kill))) if self.acted.is_none() && here(wanted) => {
                    self.acted = Some(point);
                    if matches!(act, Act::Kill) {
                        self.done = kill(pid, Signal::SIGKILL).is_ok();
                        return;
                    }
                    registers.orig_rax = libc::SYS_getpid.cast_unsigned();
                    process.failing = ptrace::setregs(pid, registers).is_ok();
                }
                _ => self.calls.push(point),
            }
        } else if let (true, Some((_, Act::Fail(errno)))) = (process.failing, &self.act) {
            registers.rax = i64::from(-(*errno as i32)).cast_unsigned();
            self.done = ptrace::setregs(pid, registers).is_ok();
        }
        self.go_on(pid, None);
    }
}
