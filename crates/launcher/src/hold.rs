//! Holding the processes of a run still while they are looked at.
//!
//! Code that runs can move what is counted behind the count. Every process is sent SIGSTOP, which
//! none can ignore, until a look at all of them finds each one stopped and no new one; dropping
//! the hold lets them go on. What code has stopped itself stays stopped. Code may see that it was
//! stopped (SIGCHLD, SIGCONT, a call that ends with EINTR), so a run is held only where something
//! is amiss. A signal goes by a pidfd to a process that was a descendant of pid 1 after that was
//! opened: never to another one that has its number.

use std::{
    collections::{BTreeMap, BTreeSet, btree_map::Entry},
    fs::read_to_string,
    thread::sleep,
    time::{Duration, Instant},
};

use rustix::{
    fd::OwnedFd,
    process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal},
};

use crate::processes;

/// Between two looks at processes that are about to stop.
const PAUSE: Duration = Duration::from_micros(200);
/// How long a call that no signal interrupts is waited for: the reading of a disk, vfork(2). After
/// it the process stops before its next instruction.
const MAX_CALL: Duration = Duration::from_millis(20);
/// How long code can keep a run from being held.
pub(crate) const MAX_RESISTANCE: Duration = Duration::from_millis(500);

/// Processes that stand still until this is dropped.
pub(crate) struct Hold {
    pid_one: i32,
    /// The processes that this has stopped, and lets go on.
    stopped: BTreeMap<i32, OwnedFd>,
    all: BTreeSet<i32>,
}

/// What a process does.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Motion {
    Stopped,
    /// It is in a call that no signal interrupts, and stops after it.
    InCall,
    /// It was told to stop.
    Told,
    Free,
    Gone,
}

impl Hold {
    /// Holds all but pid 1. None where the code cannot be held, or where `goes_on` said to end: no
    /// signal interrupts a large write, so what is written grows until it is done.
    pub(crate) fn take(pid_one: i32, goes_on: &mut dyn FnMut() -> bool) -> Option<Self> {
        let begun = Instant::now();
        let mut hold = Hold { pid_one, stopped: BTreeMap::new(), all: BTreeSet::new() };
        while begun.elapsed() < MAX_RESISTANCE && goes_on() {
            let patient = begun.elapsed() < MAX_CALL;
            if hold.stop(patient) {
                return Some(hold);
            }
            sleep(PAUSE);
        }
        None
    }

    /// Sends each the signal that does not stand still. Whether all did, and none is new.
    fn stop(&mut self, patient: bool) -> bool {
        let mut whole = true;
        let mut family = BTreeSet::from([self.pid_one]);
        processes::each(self.pid_one, &mut |pid| {
            let Some(pid) = pid.parse().ok().filter(|pid| *pid != self.pid_one) else { return true };
            whole &= !self.all.insert(pid);
            match motion(pid) {
                Motion::Stopped | Motion::Gone => {}
                Motion::InCall => whole &= !patient,
                Motion::Told => whole = false,
                Motion::Free => {
                    whole = false;
                    self.tell(pid, &family);
                }
            }
            family.insert(pid);
            true
        });
        whole
    }

    fn tell(&mut self, number: i32, family: &BTreeSet<i32>) {
        let pidfd = match self.stopped.entry(number) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(place) => match open_child_of(family, number) {
                Some(pidfd) => place.insert(pidfd),
                None => return,
            },
        };
        let _ended = pidfd_send_signal(&*pidfd, Signal::STOP);
    }

    /// Whether all still stand, and none is new: what was seen meanwhile is of one moment.
    pub(crate) fn is_whole(&self) -> bool {
        let mut whole = true;
        processes::each(self.pid_one, &mut |pid| {
            let Some(pid) = pid.parse().ok().filter(|pid| *pid != self.pid_one) else { return true };
            whole &= self.all.contains(&pid) && !matches!(motion(pid), Motion::Told | Motion::Free);
            whole
        });
        whole
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        for pidfd in self.stopped.values() {
            let _ended = pidfd_send_signal(pidfd, Signal::CONT);
        }
    }
}

/// A process by its number, if its parent is one of these after it was opened.
fn open_child_of(family: &BTreeSet<i32>, number: i32) -> Option<OwnedFd> {
    let pidfd = pidfd_open(Pid::from_raw(number)?, PidfdFlags::empty()).ok()?;
    let status = read_to_string(format!("/proc/{number}/status")).ok()?;
    let parent = status.lines().find_map(|line| line.strip_prefix("PPid:")?.trim().parse().ok())?;
    family.contains(&parent).then_some(pidfd)
}

/// What all threads of a process do: the freest counts.
fn motion(pid: i32) -> Motion {
    let mut states = Vec::new();
    for task in processes::entries(&format!("/proc/{pid}/task")) {
        let stat = read_to_string(task.join("stat")).unwrap_or_default();
        // Behind the name, which is the second field and may hold anything: proc_pid_stat(5).
        states.extend(stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next()));
    }
    let all_are = |kinds: &str| states.iter().all(|state| kinds.contains(*state));
    if all_are("ZX") {
        return Motion::Gone;
    }
    if all_are("TtZX") {
        return Motion::Stopped;
    }
    let is_stopping = states.contains(&'T') || has_pending_stop(pid);
    match (is_stopping, all_are("TtZXD")) {
        (true, true) => Motion::InCall,
        (true, false) => Motion::Told,
        (false, _) => Motion::Free,
    }
}

/// Whether SIGSTOP waits for a process.
fn has_pending_stop(pid: i32) -> bool {
    let status = read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let pending = status.lines().find_map(|line| u64::from_str_radix(line.strip_prefix("ShdPnd:")?.trim(), 16).ok());
    pending.is_some_and(|signals| signals & (1 << (Signal::STOP.as_raw() - 1)) != 0)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]
    use std::process::{Child, Command, Stdio};

    use super::*;

    /// A shell that forks without end, below a pid 1 of its own.
    fn forking() -> Child {
        let script = "echo; while :; do (exec true); : & done";
        let mut child = Command::new("sh").args(["-c", &format!("sh -c '{script}' & wait")]).stdout(Stdio::piped()).spawn().unwrap();
        std::io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut [0]).unwrap();
        child
    }

    #[test]
    fn a_run_is_held_still_and_goes_on_afterwards() {
        let mut child = forking();
        let pid = child.id().cast_signed();
        let hold = Hold::take(pid, &mut || true).unwrap();
        let stopped: Vec<i32> = hold.stopped.keys().copied().collect();
        assert!(!stopped.is_empty() && hold.is_whole());
        let inner = *stopped.first().unwrap();
        sleep(Duration::from_millis(50));
        assert!(hold.is_whole() && motion(inner) == Motion::Stopped);
        drop(hold);
        assert!(motion(inner) != Motion::Stopped);
        // The control: who is not held is not whole.
        let free = Hold { pid_one: pid, stopped: BTreeMap::new(), all: BTreeSet::new() };
        assert!(!free.is_whole());
        let ended = Pid::from_raw(inner).map(|pid| rustix::process::kill_process(pid, Signal::KILL));
        assert_eq!(ended, Some(Ok(())));
        child.wait().unwrap();
    }
}
