//! The processes of a sandbox, as the host's `/proc` shows them.
//!
//! All that is seen is of a moment that has passed: code goes on forking and ending while it
//! is looked at, and can keep ahead for as long as it likes. The caller decides when to
//! stop. What cannot be read is left out.

use std::{
    fs::{read_dir, read_to_string},
    path::PathBuf,
};

/// Of the times in `/proc/PID/stat`: the kernel shows all of them in hundredths of a second,
/// whatever it counts in (USER_HZ).
const TICK_US: u64 = 10_000;

/// Visits pid 1 of a sandbox and all that descend from it, by their pids on the host, until
/// `visit` is false. Says whether all were visited.
pub(crate) fn each(pid_one: i32, visit: &mut dyn FnMut(&str) -> bool) -> bool {
    let mut pending = vec![pid_one.to_string()];
    while let Some(pid) = pending.pop() {
        if !visit(&pid) {
            return false;
        }
        for task in entries(&format!("/proc/{pid}/task")) {
            let children = read_to_string(task.join("children")).unwrap_or_default();
            pending.extend(children.split_ascii_whitespace().map(String::from));
        }
    }
    true
}

/// CPU time, user and kernel, in microseconds, of those that are alive but pid 1, and of those
/// that they have waited for. It is lost once they are killed with pid 1, because the kernel
/// then waits for them itself (zap_pid_ns_processes).
pub(crate) fn cpu_of_living(pid_one: i32, goes_on: &mut dyn FnMut() -> bool) -> (u64, u64) {
    let (mut user_us, mut system_us) = (0, 0);
    let own = pid_one.to_string();
    each(pid_one, &mut |pid| {
        let stat = read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        if let Some([user, system]) = times(&stat).filter(|_| pid != own) {
            user_us += user;
            system_us += system;
        }
        goes_on()
    });
    (user_us, system_us)
}

/// The times of a line of `/proc/PID/stat`: user and kernel, in microseconds.
fn times(stat: &str) -> Option<[u64; 2]> {
    // Behind the name, which is the second field and may hold anything; proc_pid_stat(5) has
    // utime, stime, cutime and cstime as its 14th to 17th.
    let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace().skip(11).map(|field| field.parse::<u64>().ok());
    let mut next = || fields.next().flatten();
    let [user, system, waited_user, waited_system] = [next()?, next()?, next()?, next()?];
    Some([(user + waited_user) * TICK_US, (system + waited_system) * TICK_US])
}

/// Paths of a directory's entries; none where it is gone.
pub(crate) fn entries(directory: &str) -> impl Iterator<Item = PathBuf> {
    read_dir(directory).into_iter().flatten().flatten().map(|entry| entry.path())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]
    use super::*;

    #[test]
    fn times_stand_behind_a_name_that_may_hold_anything() {
        let stat = "7 (a) 1 2 (b)) S 1 7 7 0 -1 4194560 100 200 3 4 31 17 5 6 20 0 1 0 4142";
        assert_eq!(times(stat), Some([360_000, 230_000]));
        assert_eq!(times("7 (sh) S 1 7 7 0 -1 4194560 100 200 3 4 31 17 5"), None);
        assert_eq!(times(""), None);
    }

    #[test]
    fn descendants_are_found_with_what_they_have_used_until_it_is_enough() {
        let own = i32::try_from(std::process::id()).unwrap();
        let mut child = std::process::Command::new("sh").args(["-c", "while :; do :; done"]).spawn().unwrap();
        let pid = child.id().to_string();
        let mut seen = Vec::new();
        let used = || cpu_of_living(own, &mut || true).0;
        while used() < 50_000 {}
        assert!(each(own, &mut |pid| {
            seen.push(String::from(pid));
            true
        }));
        assert!(seen.contains(&own.to_string()) && seen.contains(&pid), "{seen:?}");
        assert!(!each(own, &mut |_| false));
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
