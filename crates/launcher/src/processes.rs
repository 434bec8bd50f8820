//! The processes of a sandbox, as the host's `/proc` shows them.
//!
//! All that is seen is of a moment that has passed: code goes on forking and ending while it
//! is looked at, and can keep ahead for as long as it likes. The caller decides when to
//! stop. What cannot be read is left out.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{read_dir, read_to_string},
    io::ErrorKind,
    path::PathBuf,
    thread::sleep,
    time::Duration,
};

use rustix::{
    fs::{FileType, Stat, fstat, makedev},
    io::Errno,
    net::{AddressFamily, SocketFlags, SocketType, socketpair},
    process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open},
};
use stockade_sys::process::{Common, have_in_common};

/// A pidfd of a thread (Linux 6.9).
const PIDFD_THREAD: PidfdFlags = PidfdFlags::from_bits_retain(0x80);
/// How many open files are looked at before it is asked whether to go on: some 50 us.
const ASKED_EVERY: u64 = 32;

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

/// Bytes that the processes of a sandbox have written to file systems with a disk, with those of
/// processes that they have waited for; pid 1, which waits for orphans, cannot be asked. None where
/// the kernel does not say (CONFIG_TASK_IO_ACCOUNTING) or another cannot be looked at.
pub(crate) fn written(pid_one: i32) -> Option<u64> {
    let mut all = Some(0);
    let own = pid_one.to_string();
    each(pid_one, &mut |pid| {
        if pid == own {
            return true;
        }
        match io_of(pid) {
            Ok(Some(text)) => {
                let bytes = text.lines().find_map(|line| line.strip_prefix("write_bytes:")?.trim().parse::<u64>().ok());
                all = all.zip(bytes).map(|(all, bytes)| all + bytes);
            }
            // Ended meanwhile: another has waited for it.
            Ok(None) => {}
            Err(_) => all = None,
        }
        all.is_some()
    });
    all
}

/// The text of `/proc/PID/io`; none for a process that has ended. The kernel refuses it of one that
/// is just ending: it has no memory any more.
fn io_of(pid: &str) -> std::io::Result<Option<String>> {
    const TRIES: u32 = 20;
    const PAUSE: Duration = Duration::from_millis(1);
    let mut read = read_to_string(format!("/proc/{pid}/io"));
    for _ in 0..TRIES {
        match &read {
            Err(error) if is_refusal(error) && !has_ended(pid) => sleep(PAUSE),
            _ => break,
        }
        read = read_to_string(format!("/proc/{pid}/io"));
    }
    match read {
        Err(_) if has_ended(pid) => Ok(None),
        read => read.map(Some),
    }
}

/// Whether a process is a zombie, or is gone.
fn has_ended(pid: &str) -> bool {
    let Ok(stat) = read_to_string(format!("/proc/{pid}/stat")) else { return true };
    // Behind the name, which is the second field and may hold anything: proc_pid_stat(5).
    stat.rsplit_once(") ").is_none_or(|(_, rest)| rest.starts_with(['Z', 'X']))
}

/// The value of a line `key: N kB` of a file in `/proc`, in bytes.
pub(crate) fn kibibytes(text: &str, key: &str) -> Option<u64> {
    let value = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'))?;
    value.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kib| kib * 1024)
}

/// A thread by which a process's memory and program are seen: its first, or another where that
/// has ended before it.
pub(crate) fn living_thread(pid: &str) -> String {
    if !has_ended(pid) {
        return pid.to_owned();
    }
    let tasks = format!("/proc/{pid}/task");
    let mut threads = entries(&tasks).filter_map(|task| task.file_name()?.to_str().map(String::from));
    threads.find(|thread| !has_ended(thread)).unwrap_or_else(|| pid.to_owned())
}

/// Has the kernel free what lies in sockets that only their own messages have: it looks for such
/// when a socket is closed, and till then they keep files in being that no process has.
pub(crate) fn free_unreachable() {
    drop(socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None));
}

/// Files without a name that the processes of a sandbox keep in being. The kernel lets go of such
/// a file when it is open nowhere, mapped nowhere, in no message on its way, and neither the
/// program nor the working directory of a process.
#[derive(Debug, Default)]
pub(crate) struct NamelessFiles {
    /// Bytes of each of which the kernel shows the size, by inode.
    open: BTreeMap<u64, u64>,
    /// Inodes that are mapped.
    mapped: BTreeSet<u64>,
    /// Something may have such a file and cannot be looked at: a process whose program its user
    /// may not read, or a message with descriptors on its way.
    closed: bool,
}

/// Which files without a name are looked for.
pub(crate) struct FileQuery<'a> {
    /// The device that stat(2) shows.
    pub(crate) device: u64,
    /// Whether it may be the device that a map shows. None: maps and messages are not looked at.
    pub(crate) maps: Option<&'a dyn Fn(u64) -> bool>,
}

impl NamelessFiles {
    /// Looks at all processes but pid 1, which takes nothing from the code. None where `goes_on`
    /// said to end: code that forks and ends can keep ahead of the search.
    pub(crate) fn of(pid_one: i32, wanted: &FileQuery<'_>, goes_on: &mut dyn FnMut() -> bool) -> Option<Self> {
        let mut files = NamelessFiles::default();
        let mut looked_at: u64 = 0;
        let own = pid_one.to_string();
        let all = each(pid_one, &mut |pid| {
            if pid == own {
                return goes_on();
            }
            let on = open_files(pid, &mut |file, info| {
                looked_at += 1;
                match file {
                    Some(stat) => files.add(stat, info, wanted),
                    None => files.closed = true,
                }
                !looked_at.is_multiple_of(ASKED_EVERY) || goes_on()
            });
            if on {
                // The program is not mapped any more, if it has so chosen.
                let thread = living_thread(pid);
                files.add_link(&format!("/proc/{thread}/exe"), wanted);
                // Each thread may have its own.
                entries(&format!("/proc/{pid}/task")).for_each(|task| files.add_link(&format!("{}/cwd", task.display()), wanted));
                if let Some(is_wanted) = wanted.maps {
                    files.add_maps(&thread, is_wanted);
                }
            }
            on && goes_on()
        });
        all.then_some(files)
    }

    fn add(&mut self, stat: &Stat, info: &str, wanted: &FileQuery<'_>) {
        if stat.st_nlink == 0 && stat.st_dev == wanted.device {
            self.open.insert(stat.st_ino, u64::try_from(stat.st_blocks).unwrap_or(0) * 512);
        }
        if wanted.maps.is_some() && FileType::from_raw_mode(stat.st_mode) == FileType::Socket {
            // Descriptors that were sent to this socket and not received (Linux 5.10).
            let text = read_to_string(info).unwrap_or_default();
            let sent = text.lines().find_map(|line| line.strip_prefix("scm_fds:")).map(str::trim);
            self.closed |= sent.is_some_and(|count| count != "0");
        }
    }

    /// What a link of the kernel's leads to.
    fn add_link(&mut self, link: &str, wanted: &FileQuery<'_>) {
        match rustix::fs::stat(link) {
            Ok(stat) => self.add(&stat, "", wanted),
            Err(Errno::ACCESS) => self.closed = true,
            Err(_) => {}
        }
    }

    fn add_maps(&mut self, pid: &str, is_wanted: &dyn Fn(u64) -> bool) {
        match read_to_string(format!("/proc/{pid}/maps")) {
            Ok(text) => {
                self.mapped.extend(text.lines().filter_map(deleted_map).filter(|(device, _)| is_wanted(*device)).map(|(_, inode)| inode))
            }
            Err(error) => self.closed |= is_refusal(&error),
        }
    }

    /// Bytes of those of which the kernel shows the size.
    pub(crate) fn bytes(&self) -> u64 {
        self.open.values().sum()
    }

    /// Whether there may be others.
    pub(crate) fn may_be_more(&self) -> bool {
        self.closed || self.mapped.iter().any(|inode| !self.open.contains_key(inode))
    }
}

/// Device and inode of a line of `/proc/PID/maps`, if its file has no name any more.
fn deleted_map(line: &str) -> Option<(u64, u64)> {
    // Range, rights, offset, device, inode, path: proc_pid_maps(5).
    let line = line.strip_suffix(" (deleted)")?;
    let mut fields = line.split_ascii_whitespace().skip(3);
    let (major, minor) = fields.next()?.split_once(':')?;
    let number = |text| u32::from_str_radix(text, 16).ok();
    Some((makedev(number(major)?, number(minor)?), fields.next()?.parse().ok()?))
}

fn is_refusal(error: &std::io::Error) -> bool {
    error.kind() == ErrorKind::PermissionDenied
}

/// Visits a process's open files, each with the path of the kernel's text about it, until `visit`
/// is false. None stands for all those that cannot be looked at.
fn open_files(pid: &str, visit: &mut dyn FnMut(Option<&Stat>, &str) -> bool) -> bool {
    tables(pid).iter().all(|task| {
        let task = format!("/proc/{pid}/task/{task}");
        let links = match read_dir(format!("{task}/fd")) {
            Ok(links) => links,
            Err(error) if is_refusal(&error) => return duplicated_files(&task, visit),
            Err(_) => return true,
        };
        links.flatten().all(|link| {
            // Follows the link to the open file itself.
            match rustix::fs::stat(link.path()) {
                Ok(stat) => visit(Some(&stat), &format!("{task}/fdinfo/{}", link.file_name().to_string_lossy())),
                Err(Errno::ACCESS) => visit(None, ""),
                Err(_) => true,
            }
        })
    })
}

/// The same of a process that is not dumpable: its `fd` directory is root's, but what the
/// launcher may do to a process of a user namespace of its own includes ptrace(2), and with it
/// pidfd_getfd(2). It may do nothing to one whose program it cannot read (mode 0111).
fn duplicated_files(task: &str, visit: &mut dyn FnMut(Option<&Stat>, &str) -> bool) -> bool {
    let numbers = match read_dir(format!("{task}/fdinfo")) {
        Ok(numbers) => numbers,
        Err(error) if is_refusal(&error) => return visit(None, ""),
        Err(_) => return true,
    };
    let mut ids = task.split('/').filter_map(|part| part.parse::<i32>().ok());
    let (process, thread) = (ids.next(), ids.next());
    let flags = if process == thread { PidfdFlags::empty() } else { PIDFD_THREAD };
    let opened = thread.and_then(Pid::from_raw).ok_or(Errno::SRCH).and_then(|pid| pidfd_open(pid, flags));
    let pidfd = match opened {
        Ok(pidfd) => pidfd,
        Err(Errno::SRCH) => return true,
        Err(_) => return visit(None, ""),
    };
    numbers.flatten().all(|entry| {
        let Some(number) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { return true };
        match pidfd_getfd(&pidfd, number, PidfdGetfdFlags::empty()).and_then(fstat) {
            Ok(stat) => visit(Some(&stat), &format!("{task}/fdinfo/{number}")),
            // Closed, or ended, meanwhile.
            Err(Errno::BADF | Errno::SRCH) => true,
            Err(_) => visit(None, ""),
        }
    })
}

/// The threads of a process that have a table of descriptors of their own, one for each table:
/// the first may have ended, and clone(2) does not have to share it.
fn tables(pid: &str) -> Vec<i32> {
    let mut all: Vec<i32> = Vec::new();
    for task in entries(&format!("/proc/{pid}/task")) {
        if let Some(task) = task.file_name().and_then(|name| name.to_str()).and_then(|name| name.parse().ok())
            && !all.iter().any(|other| have_in_common(*other, task, Common::Files) == Ok(true))
        {
            all.push(task);
        }
    }
    all
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
    fn maps_of_files_without_a_name_are_read() {
        let line = "7f1200000000-7f1200100000 rw-s 00000000 fe:10 52311                     /home/a b/held (deleted)";
        assert_eq!(deleted_map(line), Some((makedev(0xfe, 0x10), 52311)));
        assert_eq!(deleted_map(line.trim_end_matches(" (deleted)")), None);
        assert_eq!(deleted_map("7f1200000000-7f1200100000 rw-p 00000000 00:00 0"), None);
        assert_eq!(kibibytes("VmSize:\t  12 kB\nRssAnon:\t     640 kB\n", "RssAnon"), Some(640 << 10));
        assert_eq!(kibibytes("RssAnonymous:\t     640 kB\n", "RssAnon"), None);
    }

    #[test]
    fn a_table_of_descriptors_is_looked_at_once() {
        let own = std::process::id();
        let before = tables(&own.to_string()).len();
        let (send, receive) = std::sync::mpsc::channel::<()>();
        let thread = std::thread::spawn(move || receive.recv());
        assert_eq!((before, tables(&own.to_string()).len()), (1, 1));
        drop(send);
        thread.join().unwrap().unwrap_err();
    }

    #[test]
    fn a_program_and_a_working_directory_without_a_name_are_found() {
        let directory = std::env::temp_dir().join(format!("stockade-nameless-{}", std::process::id()));
        let program = directory.join("program");
        std::fs::create_dir(&directory).unwrap();
        std::fs::copy(std::fs::canonicalize("/bin/sleep").unwrap(), &program).unwrap();
        let stats = [&directory, &program].map(|path| rustix::fs::stat(path).unwrap());
        let mut child = std::process::Command::new(&program).arg("600").current_dir(&directory).spawn().unwrap();
        let found = || {
            let wanted = FileQuery { device: stats[0].st_dev, maps: None };
            let files = NamelessFiles::of(i32::try_from(std::process::id()).unwrap(), &wanted, &mut || true).unwrap();
            stats.map(|stat| files.open.contains_key(&stat.st_ino))
        };
        let named = found();
        std::fs::remove_file(&program).unwrap();
        std::fs::remove_dir(&directory).unwrap();
        let nameless = found();
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!((named, nameless), ([false, false], [true, true]));
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
