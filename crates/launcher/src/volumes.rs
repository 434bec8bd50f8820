//! What a session keeps from one run to the next: the file systems that its code may write.
//!
//! They lie in a mount namespace in which there is no process and nothing else, held by a
//! descriptor. Each run gets copies of the mounts, so that none is lost with a run, however
//! it fails. When the descriptors are closed, all of it is gone. The bytes are bounded by
//! the sizes of the file systems; they are charged to the cgroup of the run that wrote
//! them, and to those above it when that one is removed, never to a later run's.
//!
//! A host scratch is not kept here: each run opens it again.

use std::{
    cell::Cell,
    collections::BTreeMap,
    ffi::{CStr, CString},
    path::{Path, PathBuf},
};

use rustix::{
    fd::{AsFd, OwnedFd},
    fs::{
        AtFlags, CWD, Dir, Gid, Mode, OFlags, Timespec, Timestamps, UTIME_NOW, Uid, chmodat, chownat, flistxattr, flistxattr_query, fstat,
        futimens, mkdirat, openat, statat,
    },
    io::Errno,
    mount::{MountPropagationFlags, MoveMountFlags, OpenTreeFlags, UnmountFlags, mount_change, move_mount, open_tree, unmount},
    process::{DumpableBehavior, Pid, WaitOptions, dumpable_behavior, set_dumpable_behavior, waitpid},
    thread::{LinkNameSpaceType, move_into_link_name_space},
};
use stockade_policy::plan::{Mode as LaunchMode, Plan, RootEntry};
use stockade_sys::clone::{self, flags};

use crate::{
    ErrorKind, LaunchError,
    child_data::c_string,
    sequence::{INSIDE, attach, new_tmpfs},
};

/// Writable places beside scratch that a session can keep.
const MAX_PLACES: usize = 8;
/// The mode that [`Maker`] mounts scratch with.
const SCRATCH_MODE: u32 = 0o755;
/// Names in the private root: the parent of the writable places, and scratch.
const TMP: &CStr = c"tmp";
const SCRATCH: &CStr = c"scratch";
/// Names of the writable places.
const NAMES: [&CStr; MAX_PLACES] = [c"tmp/0", c"tmp/1", c"tmp/2", c"tmp/3", c"tmp/4", c"tmp/5", c"tmp/6", c"tmp/7"];

/// The file systems of one session.
pub struct SessionVolumes {
    /// Rootless: the user namespace that the mounts belong to.
    user: Option<OwnedFd>,
    mounts: OwnedFd,
    tmp: OwnedFd,
    scratch: Option<OwnedFd>,
    /// Targets without their leading slash, and their directories.
    writable: Vec<(PathBuf, OwnedFd)>,
    /// The modes that these were made with.
    modes: Vec<u32>,
    owner: (u32, u32),
}

/// What one run gets of a session's volumes.
pub struct VolumeCopies {
    /// The private scratch; none where it is the host's.
    pub(crate) scratch: Option<OwnedFd>,
    /// Mounts by their target, which has no leading slash.
    pub(crate) writable: BTreeMap<PathBuf, OwnedFd>,
    /// The file system that those are on.
    pub(crate) tmp: OwnedFd,
}

fn failed(attempt: &'static str) -> impl Fn(Errno) -> LaunchError {
    LaunchError::system(ErrorKind::Volumes, attempt)
}

impl SessionVolumes {
    /// Makes what a session under this plan keeps, empty.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn make(plan: &Plan) -> Result<Self, LaunchError> {
        let number = |value: Option<u64>| value.map(|n| c_string(n.to_string().as_bytes())).transpose();
        let targets: Vec<&Path> = plan
            .root
            .iter()
            .filter_map(|entry| match entry {
                RootEntry::Writable { target } => Some(target.as_path()),
                _ => None,
            })
            .collect();
        if targets.len() > MAX_PLACES {
            return Err(LaunchError::TooManyVolumes(MAX_PLACES));
        }
        let mode = |target: &Path| {
            let of_it = |entry: &RootEntry| match entry {
                RootEntry::Directory { target: directory, mode } if directory == target => Some(*mode),
                _ => None,
            };
            plan.root.iter().find_map(of_it).unwrap_or(0o700)
        };
        let modes: Vec<u32> = targets.iter().map(|target| mode(target)).collect();
        let (inside, outside) = (plan.identity.inside, plan.identity.outside);
        let maps = (plan.mode == LaunchMode::Rootless)
            .then_some([(c"/proc/self/gid_map", inside.1, outside.1), (c"/proc/self/uid_map", inside.0, outside.0)])
            .map(|maps| maps.map(|(file, inside, outside)| (file, format!("{inside} {outside} 1"))));
        let maker = Maker {
            ids: if maps.is_some() { inside } else { outside },
            maps: maps.as_ref(),
            modes: &modes,
            tmp_size: number(plan.limits.get(stockade_protocol::LimitKey::TmpSize))?,
            // One more for the root directory itself.
            scratch: match plan.scratch.host {
                true => None,
                false => Some((number(plan.scratch.size)?, number(plan.scratch.files.map(|n| n + 1))?)),
            },
            made: Cell::new(None),
        };
        let namespaces = flags::NEWNS | if maps.is_some() { flags::NEWUSER } else { 0 };
        let attempt = failed("make the session's file systems");
        let made = run_apart(namespaces, &VolumeTask::Make(&maker))
            .and_then(|()| maker.made.take().unwrap_or(Err(Errno::CHILD)))
            .map_err(&attempt)?;
        let directory = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let mut writable = Vec::new();
        for (target, name) in targets.iter().zip(NAMES) {
            let name = name.to_bytes().strip_prefix(b"tmp/").unwrap_or_default();
            writable.push((target.to_path_buf(), openat(&made.tmp, name, directory, Mode::empty()).map_err(&attempt)?));
        }
        let MadeVolumes { user, mounts, tmp, scratch } = made;
        Ok(SessionVolumes { user, mounts, tmp, scratch, writable, modes, owner: outside })
    }

    /// Copies of the mounts, for one run. `opens`: what code has closed is opened to its owner, else
    /// it is an error.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn copies(&self, opens: bool) -> Result<VolumeCopies, LaunchError> {
        let attempt = failed("copy the session's mounts");
        let copier = Copier { volumes: self, opens, made: Cell::new(None) };
        let ended = run_apart(0, &VolumeTask::Copy(&copier));
        let (scratch, all) = ended.and_then(|()| copier.made.take().unwrap_or(Err(Errno::CHILD))).map_err(&attempt)?;
        let targets = self.writable.iter().map(|(target, _)| target.clone());
        let tmp = rustix::io::fcntl_dupfd_cloexec(&self.tmp, 0).map_err(failed("copy a descriptor"))?;
        Ok(VolumeCopies { scratch, writable: targets.zip(all.into_iter().flatten()).collect(), tmp })
    }

    /// Who owns what is in it, by the host's ids.
    pub fn owner(&self) -> (u32, u32) {
        self.owner
    }

    /// The private scratch; none where it is the host's.
    pub fn scratch(&self) -> Option<&OwnedFd> {
        self.scratch.as_ref()
    }

    /// Whether earlier code has left nothing in any of them: no entry, no extended attribute, no
    /// other mode than each was made with. Their times, which code can set to any value, become
    /// the present ones. A directory that code has closed is an error for a launcher without the
    /// right to read it all the same.
    ///
    /// # Errors
    /// One cannot be read.
    pub fn is_left_empty(&self) -> Result<bool, LaunchError> {
        let attempt = failed("look into the session's directories");
        let writable = self.writable.iter().zip(&self.modes).map(|((_, directory), mode)| (directory, *mode));
        for (directory, mode) in writable.chain(self.scratch.iter().map(|scratch| (scratch, SCRATCH_MODE))) {
            if !is_as_made(directory, mode).map_err(&attempt)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Whether all of them are open to their owner. What code has closed stays closed until the
    /// next run takes its copies, also for the client's reads and writes between the runs.
    pub fn is_open(&self) -> bool {
        let open = |directory: &OwnedFd| fstat(directory).is_ok_and(|stat| Mode::from_raw_mode(stat.st_mode).contains(Mode::RWXU));
        self.writable.iter().map(|(_, directory)| directory).chain(&self.scratch).all(open)
    }

    /// The other directories that it keeps, by their absolute path inside.
    pub fn directories(&self) -> impl Iterator<Item = (PathBuf, &OwnedFd)> {
        self.writable.iter().map(|(target, directory)| (Path::new("/").join(target), directory))
    }
}

/// See [`SessionVolumes::is_left_empty`]; of one directory.
fn is_as_made(directory: &OwnedFd, mode: u32) -> Result<bool, Errno> {
    let directory = openat(directory, c".", OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    // The owner's bits are given back before each run.
    if Mode::from_raw_mode(fstat(&directory)?.st_mode) | Mode::RWXU != Mode::from_raw_mode(mode) | Mode::RWXU {
        return Ok(false);
    }
    let mut names = match flistxattr_query(&directory) {
        // The file system of an older kernel.
        Err(Errno::NOTSUP) => Vec::new(),
        length => vec![0; length?],
    };
    if !names.is_empty() {
        let length = flistxattr(&directory, names.as_mut_slice())?;
        names.truncate(length);
    }
    // Those of `security` are the kernel's own labels, which code has no right to set here.
    if names.split(|byte| *byte == 0).any(|name| !name.is_empty() && !name.starts_with(b"security.")) {
        return Ok(false);
    }
    for entry in Dir::read_from(&directory)? {
        if !matches!(entry?.file_name().to_bytes(), b"." | b"..") {
            return Ok(false);
        }
    }
    let now = Timespec { tv_sec: 0, tv_nsec: UTIME_NOW };
    futimens(&directory, &Timestamps { last_access: now, last_modification: now })?;
    Ok(true)
}

/// What a second process does that shares the launcher's memory and descriptors: only system
/// calls, and nothing of libc.
enum VolumeTask<'t> {
    Make(&'t Maker<'t>),
    Copy(&'t Copier<'t>),
}

impl VolumeTask<'_> {
    fn run(&self) -> i32 {
        match self {
            VolumeTask::Make(maker) => maker.made.set(Some(maker.try_make())),
            VolumeTask::Copy(copier) => copier.made.set(Some(copier.try_copy())),
        }
        0
    }
}

/// Runs such a process and reaps it. Its change of ids makes the shared memory undumpable; that is
/// undone.
fn run_apart(namespaces: u64, task: &VolumeTask<'_>) -> Result<(), Errno> {
    let before = dumpable_behavior()?;
    // SAFETY: each task makes system calls only.
    #[expect(unsafe_code, reason = "a second process in this memory, while this one waits for it")]
    let process = unsafe { clone::in_namespaces(namespaces, VolumeTask::run, task) }?;
    waitpid(Pid::from_raw(process), WaitOptions::empty())?;
    if before == DumpableBehavior::Dumpable { set_dumpable_behavior(before) } else { Ok(()) }
}

/// What the process that makes the volumes needs, and leaves.
struct Maker<'p> {
    maps: Option<&'p [(&'static CStr, String); 2]>,
    ids: (u32, u32),
    modes: &'p [u32],
    tmp_size: Option<CString>,
    scratch: Option<(Option<CString>, Option<CString>)>,
    made: Cell<Option<Result<MadeVolumes, Errno>>>,
}

struct MadeVolumes {
    user: Option<OwnedFd>,
    mounts: OwnedFd,
    tmp: OwnedFd,
    scratch: Option<OwnedFd>,
}

/// Files that each of the places beside scratch may have in all.
const TMP_INODES: &CStr = c"32768";

impl Maker<'_> {
    fn try_make(&self) -> Result<MadeVolumes, Errno> {
        let read = |path| openat(CWD, path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty());
        let write = |path: &CStr, text: &[u8]| -> Result<(), Errno> {
            let file = openat(CWD, path, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())?;
            rustix::io::write(&file, text).map(drop)
        };
        let mut user = None;
        if let Some(maps) = self.maps {
            write(c"/proc/self/setgroups", b"deny")?;
            for (file, map) in maps {
                write(file, map.as_bytes())?;
            }
            user = Some(read(c"/proc/self/ns/user")?);
        }
        let mounts = read(c"/proc/self/ns/mnt")?;
        // pivot_root refuses shared propagation, and no mount event may leave.
        mount_change(c"/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)?;
        let root = new_tmpfs(Some(c"64k"), Some(c"16"), c"0700", INSIDE)?;
        move_mount(&root, c"", CWD, c"/", MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)?;
        let tmp = new_tmpfs(self.tmp_size.as_deref(), Some(TMP_INODES), c"0755", INSIDE)?;
        self.place(&root, &tmp, TMP)?;
        for (name, mode) in NAMES.iter().zip(self.modes) {
            mkdirat(&root, *name, Mode::from_raw_mode(*mode))?;
            // Regardless of the caller's umask.
            chmodat(&root, *name, Mode::from_raw_mode(*mode), AtFlags::empty())?;
            self.give(&root, name)?;
        }
        let scratch = match &self.scratch {
            Some((size, inodes)) => {
                let scratch = new_tmpfs(size.as_deref(), inodes.as_deref(), c"0755", INSIDE)?;
                self.place(&root, &scratch, SCRATCH)?;
                self.give(&root, SCRATCH)?;
                Some(scratch)
            }
            None => None,
        };
        // Else the namespace would hold the host's mounts for as long as the session lives.
        rustix::process::fchdir(&root)?;
        rustix::process::pivot_root(c".", c".")?;
        unmount(c".", UnmountFlags::DETACH)?;
        Ok(MadeVolumes { user, mounts, tmp, scratch })
    }

    fn place(&self, root: &OwnedFd, mount: &OwnedFd, name: &CStr) -> Result<(), Errno> {
        mkdirat(root, name, Mode::from_raw_mode(0o755))?;
        attach(mount, root, name)
    }

    fn give(&self, root: &OwnedFd, name: &CStr) -> Result<(), Errno> {
        chownat(root, name, Some(Uid::from_raw(self.ids.0)), Some(Gid::from_raw(self.ids.1)), AtFlags::SYMLINK_NOFOLLOW)
    }
}

type CopiedMounts = (Option<OwnedFd>, [Option<OwnedFd>; MAX_PLACES]);

/// The same for the process that copies the mounts.
struct Copier<'s> {
    volumes: &'s SessionVolumes,
    opens: bool,
    made: Cell<Option<Result<CopiedMounts, Errno>>>,
}

impl Copier<'_> {
    /// open_tree(2) copies mounts of one's own mount namespace only.
    fn try_copy(&self) -> Result<CopiedMounts, Errno> {
        if let Some(user) = &self.volumes.user {
            move_into_link_name_space(user.as_fd(), Some(LinkNameSpaceType::User))?;
        }
        move_into_link_name_space(self.volumes.mounts.as_fd(), Some(LinkNameSpaceType::Mount))?;
        let copy = |name: &CStr| open_tree(CWD, name, OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC);
        let mut all = [const { None }; MAX_PLACES];
        for (place, name) in all.iter_mut().zip(NAMES).take(self.volumes.writable.len()) {
            open_to_owner(name, self.opens)?;
            *place = Some(copy(name)?);
        }
        if self.volumes.scratch.is_none() {
            return Ok((None, all));
        }
        open_to_owner(SCRATCH, self.opens)?;
        Ok((Some(copy(SCRATCH)?), all))
    }
}

/// Gives a directory's owner back what an earlier run may have taken: no later one could
/// start in it. EACCES where it is closed and `opens` is false: the run may still go on.
fn open_to_owner(directory: &CStr, opens: bool) -> Result<(), Errno> {
    const ALL: Mode = Mode::RWXU;
    let mode = Mode::from_raw_mode(statat(CWD, directory, AtFlags::SYMLINK_NOFOLLOW)?.st_mode);
    match () {
        () if mode.contains(ALL) => Ok(()),
        () if !opens => Err(Errno::ACCESS),
        () => chmodat(CWD, directory, mode | ALL, AtFlags::empty()),
    }
}
