//! How many record locks (fcntl(2)) a run holds: the kernel charges them to no cgroup.
//!
//! `/proc/locks` tells what the host holds, in the host's PID namespace; whose lock is whose only
//! the descriptors of the run tell, and only while it stands still. How many are too many is not
//! decided here.

use std::{
    collections::BTreeMap,
    fs::{File, read_dir, read_link},
    io::{BufRead, BufReader, Read},
    mem,
    time::{Duration, Instant},
};

use rustix::io::Errno;
use stockade_sys::process::is_duplicate;

use crate::{error::errno_of, hold::Hold, processes};

/// How many pages of the locks of the host are read whatever time it takes: some thousand locks.
const FIRST_PAGES: u32 = 16;
/// How long the locks of the host are read.
const MAX_LIST: Duration = Duration::from_millis(20);
/// After how many descriptors and locks it is asked whether to go on.
const ASKED_EVERY: u32 = 32;
/// How often a count is repeated that code has broken.
const MAX_HOLDS: u32 = 2;
/// The PID namespace of the host, whose `/proc/locks` has every lock (PROC_PID_INIT_INO).
const HOST: &str = "pid:[4026531836]";

/// Whether `/proc/locks` shows more than `most`: in the host's PID namespace it has every lock. The
/// kernel begins anew for each page of it and keeps all others from locking meanwhile, so what
/// takes long counts as more.
pub(super) fn are_more_on_host(most: u64) -> bool {
    let Ok(mut file) = File::open("/proc/locks") else { return true };
    let begun = Instant::now();
    let (mut page, mut count) = ([0; 4096], 0);
    // The first pages whatever the time: on a busy host this process waits for its turn.
    for pages in 0.. {
        if count > most || (pages > FIRST_PAGES && begun.elapsed() >= MAX_LIST) {
            break;
        }
        match file.read(&mut page) {
            Ok(0) => return false,
            Ok(length) => count += page.iter().take(length).map(|byte| u64::from(*byte == b'\n')).sum::<u64>(),
            Err(_) => return true,
        }
    }
    true
}

pub(super) fn is_in_namespace_of_host() -> bool {
    read_link("/proc/self/ns/pid").is_ok_and(|namespace| namespace.as_os_str() == HOST)
}

/// How many locks the run holds, or at least one more than `most`, counted while it stands still.
/// None where a process cannot be looked at, or the run cannot be held in time.
pub(super) fn locks(pid_one: i32, most: u64, goes_on: &mut dyn FnMut() -> bool) -> Option<u64> {
    for _ in 0..MAX_HOLDS {
        let Some(hold) = Hold::take(pid_one, goes_on) else { continue };
        let (count, is_whole) = visible_locks(pid_one, most, goes_on);
        if count > most || (is_whole && hold.is_whole()) {
            return Some(count);
        }
    }
    None
}

/// How many locks the descriptors of the run show, up to more than `most`, and whether each was
/// looked at.
fn visible_locks(pid_one: i32, most: u64, goes_on: &mut dyn FnMut() -> bool) -> (u64, bool) {
    let (mut count, mut steps, mut is_open) = (0, 0_u32, true);
    let own = pid_one.to_string();
    let all = processes::each(pid_one, &mut |pid| {
        let tables = if *pid == own { Vec::new() } else { processes::tables(pid) };
        tables.iter().all(|task| {
            let mut adds = |more| {
                count += more;
                steps = steps.wrapping_add(1);
                count <= most && (!steps.is_multiple_of(ASKED_EVERY) || goes_on())
            };
            let looked = locks_in(&format!("/proc/{pid}/task/{task}/fdinfo"), *task, &mut adds);
            is_open &= looked.is_some();
            looked != Some(false)
        })
    });
    (count, all && is_open)
}

/// Passes on each lock that a table of descriptors shows, and a 0 for each descriptor, until
/// `goes_on` is false, and returns its last answer. None where one cannot be looked at. A lock shows
/// at each descriptor of its open file and counts once, where kcmp(2) tells; where it does not, each
/// thread has a table, too, and then all counts as often as it shows. Locks of open files, which
/// several processes can show, are refused by the filter.
fn locks_in(fdinfo: &str, task: i32, goes_on: &mut dyn FnMut(u64) -> bool) -> Option<bool> {
    // Descriptors, by the first lock that they show: open files have none in common, because a
    // process's locks on a file do not overlap.
    let mut known: BTreeMap<Vec<u8>, Vec<u32>> = BTreeMap::new();
    let entries = match read_dir(fdinfo) {
        Ok(entries) => entries,
        Err(error) => return is_gone(&error).then_some(true),
    };
    for entry in entries {
        let Ok(entry) = entry else { return None };
        let number = entry.file_name().to_str()?.parse().ok()?;
        let file = match File::open(entry.path()) {
            Ok(file) => file,
            Err(error) if is_gone(&error) => continue,
            Err(_) => return None,
        };
        let (mut is_first, mut is_told_to_end) = (true, !goes_on(0));
        let read = each_posix_lock(file, &mut |lock| {
            if mem::take(&mut is_first) {
                let others = known.entry(lock.to_vec()).or_default();
                if others.iter().any(|other| is_duplicate(task, *other, number) == Ok(true)) {
                    return false;
                }
                others.push(number);
            }
            is_told_to_end |= !goes_on(1);
            !is_told_to_end
        });
        match read {
            _ if is_told_to_end => return Some(false),
            Err(error) if !is_gone(&error) => return None,
            Ok(()) | Err(_) => {}
        }
    }
    Some(true)
}

/// A descriptor that was closed meanwhile, or a process that has ended.
fn is_gone(error: &std::io::Error) -> bool {
    matches!(errno_of(error), Errno::NOENT | Errno::SRCH)
}

/// Shows the record locks of `/proc/PID/fdinfo/FD`, without their numbers, until `goes_on` is false.
/// Those of flock(2) are no more than files. There can be a million: the text is not kept.
fn each_posix_lock(text: impl Read, goes_on: &mut dyn FnMut(&[u8]) -> bool) -> std::io::Result<()> {
    const POSIX: &[u8] = b" POSIX ";
    let mut text = BufReader::with_capacity(1 << 16, text);
    let mut line = Vec::new();
    while text.read_until(b'\n', &mut line)? > 0 {
        let lock = line.strip_prefix(b"lock:").and_then(|line| line.get(line.windows(POSIX.len()).position(|at| at == POSIX)?..));
        if lock.is_some_and(|lock| !goes_on(lock)) {
            break;
        }
        line.clear();
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]

    use rustix::fd::OwnedFd;

    use super::*;

    #[test]
    fn locks_of_a_descriptor_are_counted() {
        let text = "pos:\t0\nflags:\t02\nlock:\t1: POSIX  ADVISORY  WRITE 7 00:01:42 0 0\nlock:\t2: FLOCK  ADVISORY  WRITE 7 00:01:42 0 EOF\nlock:\t3: POSIX  ADVISORY  READ 7 00:01:42 2 2\n";
        let all = |text: &str| {
            let mut all = Vec::new();
            each_posix_lock(text.as_bytes(), &mut |lock| {
                all.push(String::from_utf8_lossy(lock).into_owned());
                true
            })
            .unwrap();
            all
        };
        assert_eq!(all(text), [" POSIX  ADVISORY  WRITE 7 00:01:42 0 0\n", " POSIX  ADVISORY  READ 7 00:01:42 2 2\n"]);
        assert!(all("pos:\t0\nscm_fds: 0\n").is_empty());
    }

    #[test]
    fn a_lock_counts_once_however_many_descriptors_its_file_has() {
        let open = || rustix::fs::memfd_create("held", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let lock = |file: &OwnedFd| rustix::fs::fcntl_lock(file, rustix::fs::FlockOperation::LockExclusive).unwrap();
        let own = std::process::id().cast_signed();
        let count = || {
            let mut count = 0;
            let looked = locks_in(&format!("/proc/{own}/fdinfo"), own, &mut |more| {
                count += more;
                true
            });
            assert_eq!(looked, Some(true));
            count
        };
        let (one, other) = (open(), open());
        assert_eq!(count(), 0);
        lock(&one);
        let duplicates: Vec<OwnedFd> = (0..8).map(|_| one.try_clone().unwrap()).collect();
        assert_eq!((count(), duplicates.len()), (1, 8));
        lock(&other);
        assert_eq!(count(), 2);
        // What is gone has no locks; what cannot be looked at may have any.
        assert_eq!(locks_in("/proc/self/fdinfo/none", own, &mut |_| true), Some(true));
        assert_eq!(locks_in("/proc/self/status", own, &mut |_| true), None);
        assert_eq!(locks_in(&format!("/proc/{own}/fdinfo"), own, &mut |more| more == 0), Some(false));
    }

    #[test]
    fn a_count_of_locks_is_broken_off_at_once_and_finds_nothing_then() {
        let mut child = std::process::Command::new("sleep").arg("600").spawn().unwrap();
        let begun = Instant::now();
        let pid = child.id().cast_signed();
        let counts = [locks(pid, u64::MAX, &mut || false), locks(pid, u64::MAX, &mut || true)];
        assert!(counts == [None, Some(0)] && begun.elapsed() < Duration::from_secs(2), "{counts:?}");
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
