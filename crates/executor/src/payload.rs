//! Starting the payload: its descriptors, its own Landlock layer, limits, the caller's filters, execve.
//!
//! The child borrows this process's memory until it execs, so it only makes system
//! calls on prepared pointers; it reports a failed step in shared memory.

use alloc::vec::Vec;
use core::sync::atomic::{AtomicU32, Ordering::Relaxed};

use rustix::io::Errno;
use stockade_protocol::{frame::ProcessStart, memory_image, step::Step};
use stockade_sys::{
    landlock, process, seccomp,
    start::{Arguments, TerminatedBytes, descriptor, exec_by_descriptor, exec_prepared, vfork},
};

use crate::Failure;

struct PreparedExec<'a> {
    start: &'a ProcessStart<'a>,
    arguments: Arguments<'a>,
    /// Paths to try, in this order: one, or the name below each directory of PATH.
    candidates: Vec<TerminatedBytes<'a>>,
    ignored_signals: u64,
    /// The step that the child has reached, and the errno if it failed there.
    step: AtomicU32,
    errno: AtomicU32,
}

/// Starts the payload and returns its pid once its execve has succeeded.
pub(crate) fn start(start: &ProcessStart<'_>, ignored_signals: u64) -> Result<i32, Failure> {
    let name = start.argv.first().copied().ok_or_else(|| Failure::new(Step::ExecPayload, Errno::INVAL))?;
    let (argv, envp) = (with_nul(&start.argv), with_nul(&start.envp));
    let candidates = candidates(name, &start.envp);
    let prepared = PreparedExec {
        start,
        arguments: Arguments::new(&terminated(&argv)?, &terminated(&envp)?),
        candidates: terminated(&candidates)?,
        ignored_signals,
        step: AtomicU32::new(u32::from(Step::Fork as u16)),
        errno: AtomicU32::new(0),
    };
    process::close_on_exec_from(3).map_err(|errno| Failure::new(Step::Fork, errno))?;
    let pid = vfork(become_payload, &prepared).map_err(|errno| Failure::new(Step::Fork, errno))?;
    let reached = Step::from_number(prepared.step.load(Relaxed) as u16).unwrap_or(Step::Fork);
    match (reached, prepared.errno.load(Relaxed)) {
        (Step::ExecPayload, 0) => Ok(pid),
        // vfork also returns when the child is killed, for example by the OOM killer.
        (step, 0) => Err(Failure::new(step, Errno::SRCH).because(b"its process was killed before the program began")),
        (step, errno) => Err(Failure::new(step, Errno::from_raw_os_error(errno as i32))),
    }
}

fn with_nul(strings: &[&[u8]]) -> Vec<Vec<u8>> {
    strings.iter().map(|string| [string, b"\0".as_slice()].concat()).collect()
}

fn terminated(strings: &[Vec<u8>]) -> Result<Vec<TerminatedBytes<'_>>, Failure> {
    let all: Option<_> = strings.iter().map(|string| TerminatedBytes::new(string)).collect();
    all.ok_or_else(|| Failure::new(Step::ReadJob, Errno::BADMSG))
}

fn candidates(name: &[u8], envp: &[&[u8]]) -> Vec<Vec<u8>> {
    let join = |directory: &[u8]| [directory, b"/", name, b"\0"].concat();
    if name.contains(&b'/') {
        return alloc::vec![[name, b"\0"].concat()];
    }
    let path = envp.iter().find_map(|variable| variable.strip_prefix(b"PATH=")).unwrap_or(b"/usr/bin:/bin");
    path.split(|&byte| byte == b':').filter(|directory| !directory.is_empty()).map(join).collect()
}

fn become_payload(prepared: &PreparedExec<'_>) -> i32 {
    match confine_and_exec(prepared) {
        Ok(never) => match never {},
        Err(errno) => {
            prepared.errno.store(errno.raw_os_error() as u32, Relaxed);
            127
        }
    }
}

fn confine_and_exec(prepared: &PreparedExec<'_>) -> Result<core::convert::Infallible, Errno> {
    let start = prepared.start;
    let begin = |step: Step| prepared.step.store(u32::from(step as u16), Relaxed);
    process::reset_signals(prepared.ignored_signals);
    begin(Step::Session);
    // A new session: signals to the payload's process group do not reach pid 1.
    rustix::process::setsid()?;
    if start.terminal {
        begin(Step::Terminal);
        process::take_terminal(descriptor::STDIN)?;
    }
    begin(Step::Descriptors);
    // stdin takes descriptor 0, where the job was; 3 and 4 are close-on-exec.
    process::place_descriptor(descriptor::STDIN, 0)?;
    if start.memory {
        // In this process alone: pid 1 keeps its status pipe there.
        process::place_descriptor(descriptor::MEMORY, memory_image::DESCRIPTOR)?;
    }

    if start.payload_landlock {
        begin(Step::PayloadLandlock);
        // Its domain is below that of pid 1, so it can neither signal nor trace pid 1. The filter
        // may refuse rules, so the ruleset was made before it.
        landlock::restrict_self(descriptor::RULESET)?;
    }
    begin(Step::ResourceLimits);
    // A small address space or file size would hit the steps above.
    for (resource, value) in &start.rlimits {
        process::set_rlimit(*resource, *value)?;
    }

    begin(Step::CallersFilters);
    // Last, and in this process alone: what they answer in the kernel's place keeps no step above from
    // being done. The first of them lets no filter be loaded without the key.
    for filter in &start.filters {
        seccomp::load_further(filter, start.filters_key)?;
    }

    begin(Step::ExecPayload);
    if start.by_descriptor {
        return Err(exec_by_descriptor(descriptor::PROGRAM, &prepared.arguments));
    }
    // As execvp(3): ENOENT moves on to the next directory, EACCES is reported if none works.
    let mut failed = Errno::NOENT;
    for &path in &prepared.candidates {
        failed = match exec_prepared(path, &prepared.arguments) {
            Errno::NOENT | Errno::NOTDIR => failed,
            Errno::ACCESS => Errno::ACCESS,
            errno => return Err(errno),
        };
    }
    Err(failed)
}
