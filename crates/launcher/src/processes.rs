//! The processes of a sandbox, as the host's `/proc` shows them.
//!
//! All that is seen is of a moment that has passed: code goes on forking and ending while it
//! is looked at, and can keep ahead for as long as it likes. The caller decides when to
//! stop. What cannot be read is left out.

use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::OsStr,
    fs::{File, read_dir, read_to_string},
    io::{BufRead, BufReader, ErrorKind},
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
    thread::sleep,
    time::Duration,
};

use rustix::{
    fd::{AsRawFd, OwnedFd},
    fs::{CWD, FileType, Mode, OFlags, Stat, fstat, getxattr, makedev, openat, readlink},
    io::Errno,
    net::{AddressFamily, SocketFlags, SocketType, socketpair},
    process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open},
};
use stockade_sys::process::{Common, have_in_common};

use crate::scratch::usage::LinkedOutside;

/// A pidfd of a thread (Linux 6.9).
const PIDFD_THREAD: PidfdFlags = PidfdFlags::from_bits_retain(0x80);
/// How many open files are looked at before it is asked whether to go on: some 50 us.
const ASKED_EVERY: u64 = 32;
/// The same of maps: some 500 us.
const MAPS_ASKED_EVERY: usize = 512;

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
/// the kernel does not say (CONFIG_TASK_IO_ACCOUNTING), another cannot be looked at, or `goes_on`
/// said to end.
pub(crate) fn written(pid_one: i32, goes_on: &mut dyn FnMut() -> bool) -> Option<u64> {
    let mut all = Some(0);
    let own = pid_one.to_string();
    each(pid_one, &mut |pid| {
        if pid == own {
            return true;
        }
        match io_of(pid, goes_on) {
            Ok(Some(text)) => {
                let bytes = text.lines().find_map(|line| line.strip_prefix("write_bytes:")?.trim().parse::<u64>().ok());
                all = all.zip(bytes).map(|(all, bytes)| all + bytes);
            }
            // Ended meanwhile: another has waited for it.
            Ok(None) => {}
            Err(_) => all = None,
        }
        if !goes_on() {
            all = None;
        }
        all.is_some()
    });
    all
}

/// The text of `/proc/PID/io`; none for a process that has ended. The kernel refuses it of one that
/// is just ending: it has no memory any more, and is waited for.
fn io_of(pid: &str, goes_on: &mut dyn FnMut() -> bool) -> std::io::Result<Option<String>> {
    const TRIES: u32 = 20;
    const PAUSE: Duration = Duration::from_millis(1);
    let mut read = read_to_string(format!("/proc/{pid}/io"));
    for _ in 0..TRIES {
        match &read {
            Err(error) if is_refusal(error) && !has_ended(pid) && goes_on() => sleep(PAUSE),
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
pub(crate) fn has_ended(pid: &str) -> bool {
    let Ok(stat) = read_to_string(format!("/proc/{pid}/stat")) else { return true };
    // Behind the name, which is the second field and may hold anything: proc_pid_stat(5).
    stat.rsplit_once(") ").is_none_or(|(_, rest)| rest.starts_with(['Z', 'X']))
}

/// Whether no thread of a process is left but one that has ended: where the first has, others may go on.
pub(crate) fn is_over(pid: &str) -> bool {
    let Ok(stat) = read_to_string(format!("/proc/{pid}/stat")) else { return true };
    let Some((_, rest)) = stat.rsplit_once(") ") else { return true };
    // The 20th field: proc_pid_stat(5); the rest begins with the third.
    let threads = rest.split(' ').nth(17).and_then(|count| count.parse::<u32>().ok());
    rest.starts_with(['Z', 'X']) && threads.is_none_or(|count| count <= 1)
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
/// program nor the working directory of a process. Whatever was opened by a name keeps the
/// directory in being that the name was in, and those above it, after all of them are deleted.
#[derive(Debug, Default)]
pub(crate) struct NamelessFiles {
    /// Bytes of each of which the kernel shows the size, by inode.
    open: BTreeMap<u64, u64>,
    /// Inodes that are mapped.
    mapped: BTreeSet<u64>,
    /// Something may have such a file and cannot be looked at: a process whose program its user
    /// may not read, a message with descriptors on its way (before Linux 5.10 any UNIX socket), or the
    /// directory of a deleted name.
    closed: bool,
    looked_at: u64,
}

/// Which files without a name are looked for.
pub(crate) struct FileQuery<'a> {
    /// The device that stat(2) shows.
    pub(crate) device: u64,
    /// Those of which a name is deleted count too, by what they have grown by.
    pub(crate) linked_outside: &'a LinkedOutside,
    /// Whether it may be the device that a map shows. None: maps, messages and the directories of
    /// deleted names are not looked at.
    pub(crate) maps: Option<&'a dyn Fn(u64) -> bool>,
    /// The directory below which code has its files, as code sees it: it cannot be deleted. None:
    /// directories are not looked for.
    pub(crate) root: Option<&'a Path>,
    /// More than so many are not looked for.
    pub(crate) enough: u64,
}

/// Something that a process has open, or its program or working directory.
struct OpenFile<'a> {
    stat: &'a Stat,
    /// The kernel's link to it.
    link: &'a str,
    /// The kernel's text about it; empty where there is none.
    info: &'a str,
}

impl NamelessFiles {
    /// Looks at all processes but pid 1, which takes nothing from the code. None where `goes_on`
    /// said to end: code that forks and ends can keep ahead of the search.
    pub(crate) fn of(pid_one: i32, wanted: &FileQuery<'_>, goes_on: &mut dyn FnMut() -> bool) -> Option<Self> {
        let mut files = NamelessFiles::default();
        let own = pid_one.to_string();
        let all = each(pid_one, &mut |pid| {
            if pid == own {
                return goes_on();
            }
            let on = open_files(pid, &mut |file| match file {
                Some(file) => files.add(&file, wanted, goes_on),
                None => {
                    files.closed = true;
                    true
                }
            });
            // The program is not mapped any more, if it has so chosen.
            let thread = living_thread(pid);
            let on = on && files.add_link(&format!("/proc/{thread}/exe"), wanted, goes_on);
            // Each thread may have its own.
            let on =
                on && entries(&format!("/proc/{pid}/task")).all(|task| files.add_link(&format!("{}/cwd", task.display()), wanted, goes_on));
            let on = on && wanted.maps.is_none_or(|is_wanted| files.add_maps(&thread, is_wanted, wanted.root, goes_on));
            on && goes_on()
        });
        (all || files.is_enough(wanted)).then_some(files)
    }

    fn is_enough(&self, wanted: &FileQuery<'_>) -> bool {
        self.count() > wanted.enough
    }

    /// Whether the search goes on.
    fn goes_on(&mut self, wanted: &FileQuery<'_>, goes_on: &mut dyn FnMut() -> bool) -> bool {
        self.looked_at += 1;
        !self.is_enough(wanted) && (!self.looked_at.is_multiple_of(ASKED_EVERY) || goes_on())
    }

    /// Whether the search goes on.
    fn add(&mut self, file: &OpenFile<'_>, wanted: &FileQuery<'_>, goes_on: &mut dyn FnMut() -> bool) -> bool {
        let kind = FileType::from_raw_mode(file.stat.st_mode);
        if wanted.maps.is_some() && kind == FileType::Socket {
            // Descriptors that were sent to this socket and not received (Linux 5.10).
            let text = read_to_string(file.info).unwrap_or_default();
            let sent = text.lines().find_map(|line| line.strip_prefix("scm_fds:")).map(str::trim);
            self.closed |= sent.map_or_else(|| may_carry_descriptors(file.link), |count| count != "0");
        }
        if file.stat.st_dev == wanted.device {
            let is_nameless = self.insert_nameless(file.stat);
            if let Some(before) = wanted.linked_outside.get(&(file.stat.st_dev, file.stat.st_ino)).filter(|_| is_deleted(file.link)) {
                self.open.insert(file.stat.st_ino, allocated(file.stat).saturating_sub(*before));
            }
            if let Some(root) = wanted.root {
                match kind {
                    FileType::Directory if is_nameless => return self.add_above(file.link, wanted, goes_on),
                    FileType::Directory => {}
                    // The kernel leads from a directory to the one above it, but from no file.
                    _ => self.closed |= wanted.maps.is_some() && lies_elsewhere(file.link, root),
                }
            }
        }
        self.goes_on(wanted, goes_on)
    }

    /// Whether it has no name.
    fn insert_nameless(&mut self, stat: &Stat) -> bool {
        if stat.st_nlink == 0 {
            self.open.insert(stat.st_ino, allocated(stat));
        }
        stat.st_nlink == 0
    }

    /// Adds the deleted directories above a deleted one, which it keeps in being. Whether the
    /// search goes on.
    fn add_above(&mut self, link: &str, wanted: &FileQuery<'_>, goes_on: &mut dyn FnMut() -> bool) -> bool {
        let Ok(mut directory) = openat(CWD, link, UP, Mode::empty()) else { return self.goes_on(wanted, goes_on) };
        loop {
            let above = openat(&directory, "..", UP, Mode::empty()).and_then(|above| Ok((fstat(&above)?, above)));
            let Ok((stat, above)) = above else {
                self.closed = true;
                return self.goes_on(wanted, goes_on);
            };
            let is_known = self.open.contains_key(&stat.st_ino);
            if stat.st_dev != wanted.device || is_known || !self.insert_nameless(&stat) {
                return self.goes_on(wanted, goes_on);
            }
            if !self.goes_on(wanted, goes_on) {
                return false;
            }
            directory = above;
        }
    }

    /// Adds what the launcher itself has open, if it has no name.
    pub(crate) fn add_own(&mut self, file: &OwnedFd) -> Result<(), Errno> {
        fstat(file).map(|stat| _ = self.insert_nameless(&stat))
    }

    /// What a link of the kernel's leads to. Whether the search goes on.
    fn add_link(&mut self, link: &str, wanted: &FileQuery<'_>, goes_on: &mut dyn FnMut() -> bool) -> bool {
        match rustix::fs::stat(link) {
            Ok(stat) => return self.add(&OpenFile { stat: &stat, link, info: "" }, wanted, goes_on),
            Err(Errno::ACCESS) => self.closed = true,
            Err(_) => {}
        }
        true
    }

    /// Whether the search goes on.
    fn add_maps(&mut self, pid: &str, is_wanted: &dyn Fn(u64) -> bool, root: Option<&Path>, goes_on: &mut dyn FnMut() -> bool) -> bool {
        let lines = match File::open(format!("/proc/{pid}/maps")) {
            Ok(maps) => BufReader::new(maps).split(b'\n'),
            Err(error) => {
                self.closed |= is_refusal(&error);
                return true;
            }
        };
        for (at, line) in lines.map_while(Result::ok).enumerate() {
            if let Some(map) = deleted_map(&line).filter(|map| is_wanted(map.device)) {
                self.mapped.insert(map.inode);
                self.closed |= root.is_some_and(|root| map.path.parent() != Some(root));
            }
            if (at + 1).is_multiple_of(MAPS_ASKED_EVERY) && !goes_on() {
                return false;
            }
        }
        true
    }

    /// How many there are of which the kernel shows the size.
    pub(crate) fn count(&self) -> u64 {
        u64::try_from(self.open.len()).unwrap_or(u64::MAX)
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

/// To be looked at, and to go up from.
const UP: OFlags = OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);
/// What the kernel writes behind a path whose last name is deleted.
const DELETED: &[u8] = b" (deleted)";

fn allocated(stat: &Stat) -> u64 {
    u64::try_from(stat.st_blocks).unwrap_or(0) * 512
}

/// Whether the name by which a file was opened is deleted.
fn is_deleted(link: &str) -> bool {
    readlink(link, Vec::new()).is_ok_and(|path| path.to_bytes().ends_with(DELETED))
}

fn own_link(file: &OwnedFd) -> String {
    format!("/proc/self/fd/{}", file.as_raw_fd())
}

/// Whether a socket is, or may be, of the one kind that carries descriptors: a UNIX socket.
fn may_carry_descriptors(link: &str) -> bool {
    let mut protocol = [0; 32];
    match getxattr(link, "system.sockprotoname", &mut protocol) {
        Ok(_) => protocol.starts_with(b"UNIX"),
        // Closed, or ended, meanwhile.
        Err(errno) => !matches!(errno, Errno::NOENT | Errno::SRCH),
    }
}

/// Whether a file was opened by a name that is deleted and was in another directory than this. A
/// directory of that path proves nothing: it may have been made after the one that the name was in.
fn lies_elsewhere(link: &str, root: &Path) -> bool {
    match readlink(link, Vec::new()) {
        Ok(path) => path.to_bytes().strip_suffix(DELETED).is_some_and(|path| Path::new(OsStr::from_bytes(path)).parent() != Some(root)),
        Err(Errno::NOENT) => false,
        Err(_) => true,
    }
}

/// What a line of `/proc/PID/maps` says of a file.
#[derive(Debug, PartialEq, Eq)]
struct FileMap<'a> {
    device: u64,
    inode: u64,
    path: &'a Path,
}

/// The file of a line of `/proc/PID/maps`, if it has no name any more.
fn deleted_map(line: &[u8]) -> Option<FileMap<'_>> {
    // Range, rights, offset, device, inode, path: proc_pid_maps(5).
    let line = line.strip_suffix(DELETED)?;
    let path = line.get(line.iter().position(|byte| *byte == b'/')?..)?;
    let mut fields = line.split(u8::is_ascii_whitespace).skip(3).map(|field| std::str::from_utf8(field).ok());
    let (major, minor) = fields.next()??.split_once(':')?;
    let number = |text| u32::from_str_radix(text, 16).ok();
    let device = makedev(number(major)?, number(minor)?);
    Some(FileMap { device, inode: fields.next()??.parse().ok()?, path: Path::new(OsStr::from_bytes(path)) })
}

pub(crate) fn is_refusal(error: &std::io::Error) -> bool {
    error.kind() == ErrorKind::PermissionDenied
}

/// Visits a process's open files until `visit` is false. None stands for all those that cannot be
/// looked at.
fn open_files(pid: &str, visit: &mut dyn FnMut(Option<OpenFile<'_>>) -> bool) -> bool {
    tables(pid).iter().all(|task| {
        let task = format!("/proc/{pid}/task/{task}");
        let links = match read_dir(format!("{task}/fd")) {
            Ok(links) => links,
            Err(error) if is_refusal(&error) => return duplicated_files(&task, visit),
            Err(_) => return true,
        };
        links.flatten().all(|entry| {
            let number = entry.file_name();
            let number = number.to_string_lossy();
            let (link, info) = (format!("{task}/fd/{number}"), format!("{task}/fdinfo/{number}"));
            // Follows the link to the open file itself.
            match rustix::fs::stat(&link) {
                Ok(stat) => visit(Some(OpenFile { stat: &stat, link: &link, info: &info })),
                Err(Errno::ACCESS) => visit(None),
                Err(_) => true,
            }
        })
    })
}

/// The same of a process that is not dumpable: its `fd` directory is root's, but what the
/// launcher may do to a process of a user namespace of its own includes ptrace(2), and with it
/// pidfd_getfd(2). It may do nothing to one whose program it cannot read (mode 0111).
fn duplicated_files(task: &str, visit: &mut dyn FnMut(Option<OpenFile<'_>>) -> bool) -> bool {
    let numbers = match read_dir(format!("{task}/fdinfo")) {
        Ok(numbers) => numbers,
        Err(error) if is_refusal(&error) => return visit(None),
        Err(_) => return true,
    };
    let mut ids = task.split('/').filter_map(|part| part.parse::<i32>().ok());
    let (process, thread) = (ids.next(), ids.next());
    let flags = if process == thread { PidfdFlags::empty() } else { PIDFD_THREAD };
    let opened = thread.and_then(Pid::from_raw).ok_or(Errno::SRCH).and_then(|pid| pidfd_open(pid, flags));
    let pidfd = match opened {
        Ok(pidfd) => pidfd,
        Err(Errno::SRCH) => return true,
        Err(_) => return visit(None),
    };
    numbers.flatten().all(|entry| {
        let Some(number) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { return true };
        let file = pidfd_getfd(&pidfd, number, PidfdGetfdFlags::empty()).and_then(|file| Ok((fstat(&file)?, file)));
        match file {
            Ok((stat, file)) => visit(Some(OpenFile { stat: &stat, link: &own_link(&file), info: &format!("{task}/fdinfo/{number}") })),
            // Closed, or ended, meanwhile.
            Err(Errno::BADF | Errno::SRCH) => true,
            Err(_) => visit(None),
        }
    })
}

/// The threads of a process that have a table of descriptors of their own, one for each table:
/// the first may have ended, and clone(2) does not have to share it. Without kcmp(2), all threads.
pub(crate) fn tables(pid: &str) -> Vec<i32> {
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
    use std::process::Stdio;

    use super::*;

    #[test]
    fn times_stand_behind_a_name_that_may_hold_anything() {
        let stat = "7 (a) 1 2 (b)) S 1 7 7 0 -1 4194560 100 200 3 4 31 17 5 6 20 0 1 0 4142";
        assert_eq!(times(stat), Some([360_000, 230_000]));
        assert_eq!(times("7 (sh) S 1 7 7 0 -1 4194560 100 200 3 4 31 17 5"), None);
        assert_eq!(times(""), None);
    }

    #[test]
    fn what_was_written_is_not_known_where_the_time_is_over() {
        let mut shell = std::process::Command::new("sh");
        shell.args(["-c", "sleep 600 & echo; read line; kill $!; wait"]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = shell.spawn().unwrap();
        std::io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut [0]).unwrap();
        let pid = child.id().cast_signed();
        assert!(written(pid, &mut || true).is_some());
        assert_eq!(written(pid, &mut || false), None);
        drop(child.stdin.take());
        child.wait().unwrap();
    }

    #[test]
    fn maps_of_files_without_a_name_are_read() {
        let line = "7f1200000000-7f1200100000 rw-s 00000000 fe:10 52311                     /home/a b/held (deleted)";
        let map = FileMap { device: makedev(0xfe, 0x10), inode: 52311, path: Path::new("/home/a b/held") };
        assert_eq!(deleted_map(line.as_bytes()), Some(map));
        assert_eq!(deleted_map(line.trim_end_matches(" (deleted)").as_bytes()), None);
        assert_eq!(deleted_map(b"7f1200000000-7f1200100000 rw-p 00000000 00:00 0"), None);
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
            let wanted =
                FileQuery { device: stats[0].st_dev, linked_outside: &LinkedOutside::new(), maps: None, root: None, enough: u64::MAX };
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
    fn deleted_directories_above_a_deleted_one_are_found_and_those_of_a_file_are_unknown() {
        let root = std::env::temp_dir().join(format!("stockade-above-{}", std::process::id()));
        let below = root.join("a/b/c");
        std::fs::create_dir_all(&below).unwrap();
        std::fs::write(root.join("a/b/file"), "").unwrap();
        std::fs::write(root.join("file"), "").unwrap();
        let device = rustix::fs::stat(&root).unwrap().st_dev;
        let is_wanted = |_| false;
        let all = FileQuery { device, linked_outside: &LinkedOutside::new(), maps: Some(&is_wanted), root: Some(&root), enough: u64::MAX };
        let found = |file: &OwnedFd, wanted: &FileQuery<'_>| {
            let mut files = NamelessFiles::default();
            let stat = fstat(file).unwrap();
            files.add(&OpenFile { stat: &stat, link: &own_link(file), info: "" }, wanted, &mut || true);
            (files.count(), files.closed)
        };
        let open = |path: &Path| OwnedFd::from(std::fs::File::open(path).unwrap());
        let [directory, file, top] = [below, root.join("a/b/file"), root.join("file")].map(|path| open(&path));
        assert_eq!([&directory, &file, &top].map(|held| found(held, &all)), [(0, false); 3]);
        std::fs::remove_dir_all(root.join("a")).unwrap();
        std::fs::remove_file(root.join("file")).unwrap();
        assert_eq!([&directory, &file, &top].map(|held| found(held, &all)), [(3, false), (1, true), (1, false)]);
        // No more are sought than are enough.
        assert_eq!(found(&directory, &FileQuery { enough: 1, ..all }), (2, false));
        std::fs::remove_dir(&root).unwrap();
    }

    #[test]
    fn a_socket_that_does_not_tell_what_is_on_its_way_may_have_anything() {
        use std::{
            io::{IoSlice, IoSliceMut},
            mem::MaybeUninit,
        };

        use rustix::{
            fd::AsFd,
            net::{RecvAncillaryBuffer, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, recvmsg, sendmsg},
        };
        let (sender, receiver) = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
        let udp = rustix::net::socket(AddressFamily::INET, SocketType::DGRAM, None).unwrap();
        let is_wanted = |_| false;
        let wanted =
            FileQuery { device: u64::MAX, linked_outside: &LinkedOutside::new(), maps: Some(&is_wanted), root: None, enough: u64::MAX };
        let is_closed = |socket: &OwnedFd, info: &str| {
            let mut files = NamelessFiles::default();
            files.add(&OpenFile { stat: &fstat(socket).unwrap(), link: &own_link(socket), info }, &wanted, &mut || true);
            files.closed
        };
        let info = |socket: &OwnedFd| format!("/proc/self/fdinfo/{}", socket.as_raw_fd());
        assert_eq!([is_closed(&receiver, &info(&receiver)), is_closed(&udp, &info(&udp))], [false, false]);
        // As of a kernel that does not say, or where the text cannot be read.
        assert_eq!([is_closed(&receiver, "/proc/self/fdinfo/none"), is_closed(&udp, "/proc/self/fdinfo/none")], [true, false]);
        // The control: something is on its way, and then it is not.
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        let file = [udp.as_fd()];
        assert!(ancillary.push(SendAncillaryMessage::ScmRights(&file)));
        sendmsg(&sender, &[IoSlice::new(b".")], &mut ancillary, SendFlags::empty()).unwrap();
        assert!(is_closed(&receiver, &info(&receiver)));
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        recvmsg(&receiver, &mut [IoSliceMut::new(&mut [0])], &mut ancillary, RecvFlags::empty()).unwrap();
        assert!(!is_closed(&receiver, &info(&receiver)));
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
