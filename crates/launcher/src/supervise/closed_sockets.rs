//! What sockets hold that no dump has: TCP sockets whose connection has ended, and UDP sockets that
//! have given their port back.
//!
//! They keep what waits in them as long as they have a descriptor, and the kernel tells of each only
//! by its own descriptor. So the descriptors of the run are looked at while it stands still: then
//! none of the sockets is used, and none of their last descriptors is closed here, which could take
//! as long as code likes (SO_LINGER). When to look and how much is too much is not decided here.

use std::{
    collections::BTreeSet,
    fs::{read_dir, read_link, read_to_string},
    path::Path,
    thread::sleep,
    time::Duration,
};

use rustix::{
    fd::{AsFd, AsRawFd, OwnedFd},
    io::Errno,
    net::{AddressFamily, sockopt::socket_domain},
    process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open},
};
use stockade_sys::socket::socket_memory;

use super::sockets::{Sockets, closed};
use crate::{hold::Hold, processes};

/// How often a count is repeated that code has broken.
const MAX_HOLDS: u32 = 2;
/// How often, and after which pause, a run that stands still is looked at while peers go on.
const MAX_LOOKS: u32 = 10;
const PAUSE: Duration = Duration::from_millis(20);
/// What a socket keeps at most: twice the kernel's `rmem_max`.
const MAX_RECEIVED: u64 = 8 << 20;

/// Whether descriptors of others can be looked at: a kernel before 5.6 or an outer filter may have
/// no pidfd_getfd(2), and Yama may allow no tracing at all.
pub(super) fn can_be_counted(any: impl AsFd) -> bool {
    let own = pidfd_open(rustix::process::getpid(), PidfdFlags::empty());
    let taken = own.and_then(|own| pidfd_getfd(own, any.as_fd().as_raw_fd(), PidfdGetfdFlags::empty()));
    taken.is_ok() && !read_to_string("/proc/sys/kernel/yama/ptrace_scope").is_ok_and(|scope| scope.trim() == "3")
}

/// How many bytes they hold, or at least more than `most`. None where the run cannot be held in
/// time, or where those that no descriptor leads to could hold more than `most`.
pub(super) fn held(pid_one: i32, sockets: &mut Sockets, most: u64, goes_on: &mut dyn FnMut() -> bool) -> Option<u64> {
    for _ in 0..MAX_HOLDS {
        let Some(hold) = Hold::take(pid_one, goes_on) else { continue };
        for _ in 0..MAX_LOOKS {
            let dumped = match sockets.inodes() {
                Ok(inodes) => inodes,
                // The receipt says so.
                Err(_) if sockets.is_blind => return Some(0),
                Err(_) => return None,
            };
            let (held, found) = by_descriptor(pid_one, &dumped, goes_on);
            // On their way between processes, or behind a table that cannot be looked at, or closed by
            // their peer since the dump, or of the egress gate, which is about to give them back.
            let missed = closed(pid_one).saturating_sub(found);
            if held > most || (hold.is_whole() && held + missed * MAX_RECEIVED <= most) {
                return Some(held);
            }
            if !goes_on() {
                return None;
            }
            sleep(PAUSE);
        }
    }
    None
}

/// Bytes of the sockets that descriptors lead to, and how many sockets these are.
fn by_descriptor(pid_one: i32, dumped: &BTreeSet<u64>, goes_on: &mut dyn FnMut() -> bool) -> (u64, u64) {
    let (mut held, mut seen) = (0, BTreeSet::new());
    let own = pid_one.to_string();
    processes::each(pid_one, &mut |pid| {
        let tables = if *pid == own { Vec::new() } else { processes::tables(pid) };
        for task in tables {
            if !goes_on() {
                return false;
            }
            let Ok(process) = open_task(pid, task) else { continue };
            let Ok(entries) = read_dir(format!("/proc/{pid}/task/{task}/fd")) else { continue };
            for entry in entries.flatten() {
                let number = entry.file_name().to_str().and_then(|name| name.parse().ok());
                let Some((number, inode)) = number.zip(inode_of_socket(&entry.path())) else { continue };
                if !dumped.contains(&inode)
                    && !seen.contains(&inode)
                    && let Some(bytes) = memory_of(&process, number)
                {
                    held += bytes;
                    seen.insert(inode);
                }
            }
        }
        true
    });
    (held, u64::try_from(seen.len()).unwrap_or(u64::MAX))
}

/// A thread with a table of its own is opened from Linux 6.9 on (PIDFD_THREAD).
fn open_task(pid: &str, task: i32) -> Result<OwnedFd, Errno> {
    const THREAD: PidfdFlags = PidfdFlags::from_bits_retain(0o200);
    let flags = if pid.parse() == Ok(task) { PidfdFlags::empty() } else { THREAD };
    pidfd_open(Pid::from_raw(task).ok_or(Errno::SRCH)?, flags)
}

/// Of a link as `/proc/PID/fd` has them: `socket:[4711]`.
fn inode_of_socket(link: &Path) -> Option<u64> {
    read_link(link).ok()?.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok()
}

/// None: it is no socket of IPv4 or IPv6, or it cannot be looked at.
fn memory_of(process: impl AsFd, number: i32) -> Option<u64> {
    let socket = pidfd_getfd(process, number, PidfdGetfdFlags::empty()).ok()?;
    let is_internet = matches!(socket_domain(&socket), Ok(AddressFamily::INET | AddressFamily::INET6));
    is_internet.then(|| socket_memory(&socket).ok()).flatten()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]

    use std::net::UdpSocket;

    use super::*;

    #[test]
    fn what_waits_in_a_socket_is_told_by_its_descriptor() {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        let own = std::process::id();
        let inode = || inode_of_socket(Path::new(&format!("/proc/{own}/fd/{}", socket.as_raw_fd())));
        let process = open_task(&own.to_string(), own.cast_signed()).unwrap();
        assert_eq!((inode().is_some(), memory_of(&process, socket.as_raw_fd())), (true, Some(0)));
        socket.send_to(&[0; 5000], socket.local_addr().unwrap()).unwrap();
        assert!(memory_of(&process, socket.as_raw_fd()).unwrap() >= 5000);
        let (other, _end) = std::os::unix::net::UnixStream::pair().unwrap();
        assert_eq!((memory_of(&process, other.as_raw_fd()), memory_of(&process, 9999)), (None, None));
        assert_eq!(inode_of_socket(Path::new("/proc/self/exe")), None);
        assert!(can_be_counted(&socket));
    }
}
