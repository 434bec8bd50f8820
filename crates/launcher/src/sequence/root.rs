//! The parts of which the sandbox's root is made: mounts, entries, scratch, programs.
//!
//! Each is one entry of the plan. In which order they come, and why, stands in `sequence.rs`;
//! what may be done between clone and exec too.

use std::ffi::CStr;

use rustix::{
    fd::{AsFd, OwnedFd},
    fs::{
        Access, AtFlags, CWD, FileType, Mode, OFlags, ResolveFlags, accessat, mkdirat, mknodat, open, openat, openat2, symlinkat, unlinkat,
    },
    io::Errno,
    mount::{
        FsMountFlags, FsOpenFlags, FsPickFlags, MountAttrFlags, MoveMountFlags, OpenTreeFlags, UnmountFlags, fsconfig_create,
        fsconfig_reconfigure, fsconfig_set_flag, fsconfig_set_string, fsmount, fsopen, fspick, move_mount, open_tree, unmount,
    },
    path::DecInt,
};
use stockade_policy::plan::MAX_OVERLAY_LAYERS;
use stockade_protocol::step::Step;
use stockade_sys::mount::attr;

use super::{At, StepResult};
use crate::{
    child_data::{ChildData, ChildLayer, ChildScratch, ChildTree, Entry, Laid, ScratchRule},
    layers::{Layer, Layers},
    tree,
};

pub(crate) const INSIDE: MountAttrFlags = MountAttrFlags::MOUNT_ATTR_NOSUID.union(MountAttrFlags::MOUNT_ATTR_NODEV);
/// Names in the root tmpfs, gone before the payload starts.
const HIDDEN_FILE: &CStr = c".hidden-file";
const HIDDEN_DIRECTORY: &CStr = c".hidden-directory";
pub(super) const MASK_FILE: &CStr = c".mask";
const COVER_FILE: &CStr = c".cover";
/// Directories of the root tmpfs beside which an image's layers are laid: what hides its files, what
/// code changes of them, overlay's own, and where layers that were sent are attached.
const UPON_IMAGE: &CStr = c".upon-image";
const UPPER: &CStr = c".upper";
const WORK: &CStr = c".work";
const LAYERS: &CStr = c".layers";
/// Where a path leads while it follows no link and stays below its directory.
const NO_LINKS: ResolveFlags = ResolveFlags::BENEATH.union(ResolveFlags::NO_SYMLINKS);

pub(crate) fn new_tmpfs(size: Option<&CStr>, inodes: Option<&CStr>, mode: &CStr, attributes: MountAttrFlags) -> Result<OwnedFd, Errno> {
    let context = fsopen(c"tmpfs", FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_set_string(&context, c"mode", mode)?;
    if let Some(size) = size {
        fsconfig_set_string(&context, c"size", size)?;
    }
    if let Some(inodes) = inodes {
        fsconfig_set_string(&context, c"nr_inodes", inodes)?;
    }
    fsconfig_create(&context)?;
    fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, attributes)
}

pub(crate) fn attach(mount: impl AsFd, root: &OwnedFd, target: &CStr) -> Result<(), Errno> {
    move_mount(mount, c"", root, target, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)
}

/// Attaches a mount where a caller's path leads inside. Until the pivot a link would lead to the
/// host, so none is followed.
fn place(mount: impl AsFd, root: &OwnedFd, target: &CStr) -> Result<(), Errno> {
    let at = openat2(root, target, OFlags::PATH | OFlags::CLOEXEC, Mode::empty(), NO_LINKS)?;
    let both_empty = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
    move_mount(mount, c"", at, c"", both_empty)
}

/// A copy of a host directory that must be the one that was checked: a descriptor of the host's
/// mount namespace cannot be copied (EINVAL), so it is opened again.
fn copy_checked(path: &CStr, device: u64, inode: u64) -> Result<OwnedFd, Errno> {
    let again = copy_tree(CWD, path)?;
    let found = rustix::fs::fstat(&again)?;
    if (found.st_dev, found.st_ino) == (device, inode) { Ok(again) } else { Err(Errno::STALE) }
}

/// What was sent, or a copy made here, which `copy` keeps.
fn child_tree<'a>(from: &ChildTree, sent_mounts: &'a [Option<OwnedFd>], copy: &'a mut Option<OwnedFd>) -> Result<&'a OwnedFd, Errno> {
    match from {
        ChildTree::Sent(index) => sent_mounts.get(*index).and_then(Option::as_ref).ok_or(Errno::BADF),
        ChildTree::Path { path, device, inode } => Ok(copy.insert(copy_checked(path, *device, *inode)?)),
    }
}

/// A copy of a mount, not attached anywhere. AT_RECURSIVE: without it a directory with
/// mounts below it is refused (EINVAL), as it would uncover what they hide.
pub(super) fn copy_tree(directory: impl AsFd, path: &CStr) -> Result<OwnedFd, Errno> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | OpenTreeFlags::AT_RECURSIVE;
    open_tree(directory, path, if path.is_empty() { flags | OpenTreeFlags::AT_EMPTY_PATH } else { flags })
}

/// The root while it is made.
pub(super) struct NewRoot {
    /// The file system of all that the set-up makes.
    tmpfs: OwnedFd,
    /// Where files are made that lie above an image's; none: in the tmpfs itself.
    upon_image: Option<OwnedFd>,
    /// The image with these above it; none: the tmpfs is the root.
    merged: Option<OwnedFd>,
}

impl NewRoot {
    /// Mounts the root tmpfs over `/`, so that no directory of the host is needed; paths still start
    /// at the old root, where this process's root directory stays until the pivot.
    pub(super) fn mount(data: &ChildData) -> Result<Self, Errno> {
        let tmpfs = new_tmpfs(data.root_size.as_deref(), Some(data.root_inodes.as_c_str()), c"0755", INSIDE)?;
        move_mount(&tmpfs, c"", CWD, c"/", MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)?;
        let upon_image = data.has_image_root.then(|| make_directory(&tmpfs, UPON_IMAGE)).transpose()?;
        Ok(NewRoot { tmpfs, upon_image, merged: None })
    }

    /// The tmpfs, whose own names code does not see where an image lies over it.
    pub(super) fn tmpfs(&self) -> &OwnedFd {
        &self.tmpfs
    }

    pub(super) fn into_tmpfs(self) -> OwnedFd {
        self.tmpfs
    }

    /// Where directories, links and files of the root are made.
    fn files(&self) -> &OwnedFd {
        self.upon_image.as_ref().unwrap_or(&self.tmpfs)
    }

    /// What becomes `/`.
    pub(super) fn top(&self) -> &OwnedFd {
        self.merged.as_ref().unwrap_or(&self.tmpfs)
    }

    /// Mounts the image's layers below the files that were made so far, over `/` again.
    fn mount_image_below(&mut self, layers: &[ChildLayer], writable: bool, sent_mounts: &[Option<OwnedFd>]) -> Result<(), Errno> {
        let layers = open_layers(&self.tmpfs, layers, sent_mounts)?;
        let changes = || Ok([make_directory(&self.tmpfs, UPPER)?, make_directory(&self.tmpfs, WORK)?]);
        let merged = overlay(self.upon_image.as_ref(), &layers, writable.then(changes).transpose()?, INSIDE)?;
        move_mount(&merged, c"", CWD, c"/", MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)?;
        self.merged = Some(merged);
        Ok(())
    }
}

/// Directories that are laid over one another, bottom first.
type OpenedLayers = [Option<OwnedFd>; MAX_OVERLAY_LAYERS];

fn open_layers(tmpfs: &OwnedFd, layers: &[ChildLayer], sent_mounts: &[Option<OwnedFd>]) -> Result<OpenedLayers, Errno> {
    let mut opened = [const { None }; MAX_OVERLAY_LAYERS];
    for (layer, place) in layers.iter().zip(&mut opened) {
        *place = Some(open_layer(tmpfs, layer, sent_mounts)?);
    }
    Ok(opened)
}

/// Lays directories over one another, and `above` over them. `changes`: where what code writes goes,
/// and a directory of overlay's own; none: nothing can be written.
fn overlay(
    above: Option<&OwnedFd>,
    layers: &OpenedLayers,
    changes: Option<[OwnedFd; 2]>,
    attributes: MountAttrFlags,
) -> Result<OwnedFd, Errno> {
    let context = fsopen(c"overlay", FsOpenFlags::FSOPEN_CLOEXEC)?;
    // The topmost first. By descriptor, so that what was looked at is what is mounted.
    let mut lower = DescriptorPaths::new();
    above.into_iter().chain(layers.iter().flatten().rev()).try_for_each(|layer| lower.push(layer))?;
    fsconfig_set_string(&context, c"lowerdir", lower.text()?)?;
    // A user namespace may not read trusted.*, and layers are written without it (CVE-2021-3493).
    fsconfig_set_flag(&context, c"userxattr")?;
    // Before Linux 6.5 no path is looked up until all are there: descriptors stay open until then.
    for (option, directory) in [c"upperdir", c"workdir"].into_iter().zip(changes.iter().flatten()) {
        let mut path = DescriptorPaths::new();
        path.push(directory)?;
        fsconfig_set_string(&context, option, path.text()?)?;
    }
    fsconfig_create(&context)?;
    fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, attributes)
}

fn open_layer(tmpfs: &OwnedFd, layer: &ChildLayer, sent_mounts: &[Option<OwnedFd>]) -> Result<OwnedFd, Errno> {
    match layer {
        ChildLayer::Sent(index) => {
            let tree = sent_mounts.get(*index).and_then(Option::as_ref).ok_or(Errno::BADF)?;
            stockade_sys::mount::set_attributes(tree, attr::RDONLY | attr::NOSUID | attr::NODEV, false)?;
            // Only a mount of this namespace can be a layer. They lie over one another, and go with the
            // tmpfs when the old root is detached: overlay has copies of its own.
            match mkdirat(tmpfs, LAYERS, Mode::RWXU) {
                Ok(()) | Err(Errno::EXIST) => attach(tree, tmpfs, LAYERS)?,
                Err(errno) => return Err(errno),
            }
            rustix::io::fcntl_dupfd_cloexec(tree, 0)
        }
        ChildLayer::Path { path, file_id } => {
            let directory = tree::open_unlinked(path.as_c_str())?;
            let found = rustix::fs::fstat(&directory)?;
            if (found.st_dev, found.st_ino) == *file_id { Ok(directory) } else { Err(Errno::STALE) }
        }
    }
}

/// A directory of the root's own file system.
fn open_own(files: &OwnedFd, path: &CStr) -> Result<OwnedFd, Errno> {
    openat2(files, path, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty(), NO_LINKS)
}

fn make_directory(parent: &OwnedFd, name: &CStr) -> Result<OwnedFd, Errno> {
    mkdirat(parent, name, Mode::from_raw_mode(0o755))?;
    openat(parent, name, OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())
}

/// The paths of descriptors in the host's `/proc`, with colons between, made without an allocation.
struct DescriptorPaths {
    bytes: [u8; MAX_DESCRIPTOR_PATHS],
    length: usize,
}

/// A path has at most 26 bytes: 14, ten digits, a colon and the NUL.
const MAX_DESCRIPTOR_PATHS: usize = 26 * (MAX_OVERLAY_LAYERS + 1);

impl DescriptorPaths {
    fn new() -> Self {
        DescriptorPaths { bytes: [0; MAX_DESCRIPTOR_PATHS], length: 0 }
    }

    fn push(&mut self, fd: &OwnedFd) -> Result<(), Errno> {
        let number = DecInt::from_fd(fd);
        let colon: &[u8] = if self.length == 0 { b"" } else { b":" };
        for part in [colon, b"/proc/self/fd/", number.as_bytes()] {
            let end = self.length + part.len();
            self.bytes.get_mut(self.length..end).ok_or(Errno::NAMETOOLONG)?.copy_from_slice(part);
            self.length = end;
        }
        Ok(())
    }

    fn text(&self) -> Result<&CStr, Errno> {
        CStr::from_bytes_until_nul(&self.bytes).map_err(|_| Errno::NAMETOOLONG)
    }
}

/// What is needed again of the entries that were made.
#[derive(Default)]
pub(super) struct Made {
    pub(super) proc: Option<OwnedFd>,
    /// The launcher's end of what watched interpreters write to.
    pub(super) modules: Option<OwnedFd>,
}

pub(super) fn make_entry(
    new_root: &mut NewRoot,
    entry: &Entry,
    sent_mounts: &[Option<OwnedFd>],
    made: &mut Made,
    layers: Layers,
) -> Result<(), Errno> {
    let (files, root, tmpfs) = (new_root.files(), new_root.top(), new_root.tmpfs());
    let set = |mount: &OwnedFd, attributes, recursive| stockade_sys::mount::set_attributes(mount, attributes, recursive);
    match entry {
        Entry::Directory { target, mode } => match mkdirat(files, target.as_c_str(), Mode::from_raw_mode(*mode)) {
            // Above a scratch in /tmp, say, another entry has made it.
            Err(Errno::EXIST) => Ok(()),
            other => other,
        },
        Entry::Link { target, to } => symlinkat(to.as_c_str(), files, target.as_c_str()),
        // A mount point needs no contents, and so no descriptor.
        Entry::File { target, mode, text } if text.is_empty() => {
            mknodat(files, target.as_c_str(), FileType::RegularFile, Mode::from_raw_mode(*mode), 0)
        }
        Entry::File { target, mode, text } => write_file(files, target, *mode, text).map(drop),
        Entry::Image { layers: lower, writable } => new_root.mount_image_below(lower, *writable, sent_mounts),
        Entry::Bind { source, sent, target, executable } => {
            let copy;
            // Root has opened what belongs to the caller with the caller's rights.
            let tree = match sent {
                Some(index) => sent_mounts.get(*index).and_then(Option::as_ref).ok_or(Errno::BADF)?,
                None => {
                    // Where its links lead stands in the plan; any other was put there since.
                    copy = copy_tree(tree::open_unlinked(source.as_c_str())?, c"")?;
                    &copy
                }
            };
            let noexec = if *executable { 0 } else { attr::NOEXEC };
            set(tree, attr::RDONLY | attr::NOSUID | attr::NODEV | noexec, true)?;
            attach(tree, root, target)
        }
        Entry::Device { source, target } => {
            // mknod is refused in a user namespace; nodev would make the node useless.
            let node = open_tree(CWD, source.as_c_str(), OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC)?;
            set(&node, attr::RDONLY | attr::NOSUID | attr::NOEXEC, false)?;
            attach(&node, root, target)
        }
        Entry::Writable { target } => {
            // A mount of its own stays writable when the root mount is sealed.
            let own = copy_tree(files, target)?;
            attach(&own, root, target)
        }
        Entry::Kept { sent, target } => attach(sent_mounts.get(*sent).and_then(Option::as_ref).ok_or(Errno::BADF)?, root, target),
        Entry::Proc { target } => {
            // Before the old root is detached: afterwards "mount too revealing" (EPERM).
            let placed = if layers.has(Layer::PidNamespace) {
                let context = fsopen(c"proc", FsOpenFlags::FSOPEN_CLOEXEC)?;
                fsconfig_create(&context)?;
                fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, INSIDE | MountAttrFlags::MOUNT_ATTR_NOEXEC)?
            } else {
                // One that shows another user namespace's processes is refused to us.
                copy_tree(CWD, c"/proc")?
            };
            attach(&placed, root, target)?;
            // Still writable, for the inner user namespace's maps and counts.
            made.proc = Some(placed);
            Ok(())
        }
        Entry::Devpts { target } => {
            let context = fsopen(c"devpts", FsOpenFlags::FSOPEN_CLOEXEC)?;
            // Not gid=5: that group is not mapped (EINVAL).
            fsconfig_set_string(&context, c"mode", c"0620")?;
            fsconfig_set_string(&context, c"ptmxmode", c"0666")?;
            fsconfig_create(&context)?;
            let attributes = MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NOEXEC;
            attach(fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, attributes)?, root, target)
        }
        // Not every kernel has each file. A copy that is not needed after all would be taken down
        // again, which waits for all CPUs.
        Entry::Mask { target } => match accessat(root, target.as_c_str(), Access::EXISTS, AtFlags::empty()) {
            Err(Errno::NOENT) => Ok(()),
            _ => attach(read_only_copy(tmpfs, MASK_FILE)?, root, target),
        },
        Entry::Cover { target, text } => {
            write_file(tmpfs, COVER_FILE, 0o444, text)?;
            attach(read_only_copy(tmpfs, COVER_FILE)?, root, target)?;
            unlinkat(tmpfs, COVER_FILE, AtFlags::empty())
        }
        Entry::Pipe { target } => {
            // Owned by the sandbox's user, who may only write: no process of the run reads
            // what another has written.
            mknodat(files, target.as_c_str(), FileType::Fifo, Mode::from_raw_mode(0o600), 0)?;
            // To write as well, so that it does not hang up with each writer.
            let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let pipe = openat(files, target.as_c_str(), flags, Mode::empty())?;
            rustix::fs::fchmod(&pipe, Mode::from_raw_mode(0o200))?;
            made.modules = Some(pipe);
            Ok(())
        }
        Entry::Placed { source, target, executable } => {
            // Where its links lead stands in the plan; any other was put there since.
            let tree = copy_tree(tree::open_unlinked(source.as_c_str())?, c"")?;
            let noexec = if *executable { 0 } else { attr::NOEXEC };
            set(&tree, attr::RDONLY | attr::NOSUID | attr::NODEV | noexec, true)?;
            place(tree, root, target)
        }
        Entry::Tree { from, target, rules } => {
            let mut copy = None;
            let tree = child_tree(from, sent_mounts, &mut copy)?;
            let flags = if layers.has(Layer::ScratchFlags) { INSIDE } else { MountAttrFlags::empty() };
            set(tree, u64::from(flags.bits()), true)?;
            place(tree, root, target)?;
            apply_rules(tmpfs, tree, rules).map_err(|(errno, _)| errno)
        }
        Entry::Socket { from, target } => {
            let mut copy = None;
            let socket = child_tree(from, sent_mounts, &mut copy)?;
            set(socket, attr::RDONLY | attr::NOSUID | attr::NODEV | attr::NOEXEC, false)?;
            place(socket, root, target)
        }
        Entry::Tmpfs { from, target, writable } => {
            let copy = copy_tree(open_own(files, from)?, c"")?;
            let read_only = if *writable { 0 } else { attr::RDONLY };
            set(&copy, read_only | attr::NOSUID | attr::NODEV, false)?;
            place(copy, root, target)
        }
        Entry::Overlay { layers: lower, changes, target, executable } => {
            let lower = open_layers(tmpfs, lower, sent_mounts)?;
            let changes = changes.as_ref().map(|[upper, work]| Ok([open_own(files, upper)?, open_own(files, work)?])).transpose()?;
            let read_only = if changes.is_none() { MountAttrFlags::MOUNT_ATTR_RDONLY } else { MountAttrFlags::empty() };
            let noexec = if *executable { MountAttrFlags::empty() } else { MountAttrFlags::MOUNT_ATTR_NOEXEC };
            place(overlay(None, &lower, changes, INSIDE | read_only | noexec)?, root, target)
        }
        Entry::Laid { target, mode, bytes, writable } => {
            write_file(tmpfs, COVER_FILE, *mode, bytes)?;
            let copy = copy_tree(tmpfs, COVER_FILE)?;
            let read_only = if *writable { 0 } else { attr::RDONLY };
            set(&copy, read_only | attr::NOSUID | attr::NODEV, false)?;
            place(copy, root, target)?;
            unlinkat(tmpfs, COVER_FILE, AtFlags::empty())
        }
        Entry::StandIn => mknodat(tmpfs, MASK_FILE, FileType::RegularFile, Mode::from_raw_mode(0o444), 0),
    }
}

/// A read-only copy of one of the root's own files, to be laid over another.
fn read_only_copy(root: &OwnedFd, stand_in: &CStr) -> Result<OwnedFd, Errno> {
    let copy = copy_tree(root, stand_in)?;
    stockade_sys::mount::set_attributes(&copy, attr::RDONLY | attr::NOSUID | attr::NODEV | attr::NOEXEC, false)?;
    Ok(copy)
}

pub(super) fn write_file(root: &OwnedFd, target: &CStr, mode: u32, mut text: &[u8]) -> Result<OwnedFd, Errno> {
    let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::CLOEXEC;
    let file = openat(root, target, flags, Mode::from_raw_mode(mode))?;
    while !text.is_empty() {
        let written = rustix::io::write(&file, text)?;
        text = text.get(written..).unwrap_or_default();
    }
    Ok(file)
}

/// Mounts scratch at its place and returns its root.
pub(super) fn mount_scratch(data: &ChildData, layers: Layers, sent: Option<OwnedFd>, root: &NewRoot) -> StepResult<OwnedFd> {
    let flags = if layers.has(Layer::ScratchFlags) { INSIDE } else { MountAttrFlags::empty() };
    let scratch = match &data.scratch {
        ChildScratch::Private { size, inodes } => new_tmpfs(size.as_deref(), inodes.as_deref(), c"0755", flags).at(Step::Scratch)?,
        // Root's is idmapped already, which only the initial user namespace's root may do; a
        // session's is its own.
        ChildScratch::Tree => sent.ok_or(Errno::BADF).at(Step::Scratch)?,
        ChildScratch::Path { path, device, inode } => copy_checked(path, *device, *inode).at(Step::Scratch)?,
    };
    let read_only = if data.scratch_read_only { attr::RDONLY } else { 0 };
    stockade_sys::mount::set_attributes(&scratch, u64::from(flags.bits()) | read_only, true).at(Step::Scratch)?;
    attach(&scratch, root.top(), &data.scratch_target).at(Step::Scratch)?;
    match apply_rules(root.tmpfs(), &scratch, &data.scratch_rules) {
        Ok(()) => Ok(scratch),
        Err((errno, Some(index))) => Err(errno).at_entry(Step::ScratchRule, index),
        Err((errno, None)) => Err(errno).at(Step::ScratchRule),
    }
}

/// Lays over a host directory what its rules say; an error has the rule's place.
fn apply_rules(tmpfs: &OwnedFd, directory: &OwnedFd, rules: &[ScratchRule]) -> Result<(), (Errno, Option<usize>)> {
    let at = |errno| (errno, None);
    let hides = rules.iter().any(|rule| matches!(rule.how, Laid::HiddenDirectory | Laid::HiddenFile));
    if hides {
        mknodat(tmpfs, HIDDEN_FILE, FileType::RegularFile, Mode::empty(), 0).map_err(at)?;
        mkdirat(tmpfs, HIDDEN_DIRECTORY, Mode::empty()).map_err(at)?;
    }
    for (index, rule) in rules.iter().enumerate() {
        protect(tmpfs, directory, rule).map_err(|errno| (errno, Some(index)))?;
    }
    // What was laid over a path stays, without a name.
    if hides {
        unlinkat(tmpfs, HIDDEN_FILE, AtFlags::empty()).map_err(at)?;
        unlinkat(tmpfs, HIDDEN_DIRECTORY, AtFlags::REMOVEDIR).map_err(at)?;
    }
    Ok(())
}

/// Lays over a path of scratch what its rule says. Another run may be at work in the same
/// directory: the path is opened once, no link on it is followed, it must be what the rule was
/// made for, and what is laid there lies over what was opened, wherever that has gone.
fn protect(root: &OwnedFd, scratch: &OwnedFd, rule: &ScratchRule) -> Result<(), Errno> {
    let place = openat2(scratch, &*rule.path, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty(), NO_LINKS)?;
    let found = rustix::fs::fstat(&place)?;
    if rule.file_id.is_some_and(|file_id| file_id != (found.st_dev, found.st_ino)) {
        return Err(Errno::STALE);
    }
    let laid = match rule.how {
        Laid::HiddenDirectory => read_only_copy(root, HIDDEN_DIRECTORY)?,
        Laid::HiddenFile => read_only_copy(root, HIDDEN_FILE)?,
        Laid::ReadOnly => {
            let copy = copy_tree(&place, c"")?;
            stockade_sys::mount::set_attributes(&copy, attr::RDONLY | attr::NOSUID | attr::NODEV, true)?;
            copy
        }
        Laid::Pinned => copy_tree(&place, c"")?,
    };
    let both_empty = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
    move_mount(&laid, c"", &place, c"", both_empty)
}

/// Bounds the root's file system once nothing more is put there: what the set-up has needed does
/// not count for the code, and what it has not needed is no room for the code.
pub(super) fn bound_root(root: &OwnedFd, room: u64) -> Result<(), Errno> {
    let stat = rustix::fs::fstatvfs(root)?;
    let held = (stat.f_blocks - stat.f_bfree) * stat.f_frsize;
    let context = fspick(root, c"", FsPickFlags::FSPICK_CLOEXEC | FsPickFlags::FSPICK_EMPTY_PATH)?;
    fsconfig_set_string(&context, c"size", DecInt::new(held.saturating_add(room)))?;
    fsconfig_reconfigure(&context)
}

/// Makes the new root this process's `/`, and detaches the old one, after which no path leads
/// to the host.
pub(super) fn pivot(root: &NewRoot, layers: Layers) -> StepResult<()> {
    rustix::process::fchdir(root.top()).at(Step::PivotRoot)?;
    if layers.has(Layer::DetachedRoot) {
        rustix::process::pivot_root(c".", c".").at(Step::PivotRoot)?;
        // The old root now lies over the new one, and over that, where an image is the root, the tmpfs.
        if root.merged.is_some() {
            unmount(c".", UnmountFlags::DETACH).at(Step::DetachOldRoot)?;
        }
        return unmount(c".", UnmountFlags::DETACH).at(Step::DetachOldRoot);
    }
    // In builds for tests alone. Not over the new one, or it counts as a chroot, in which no
    // user namespace can be made.
    mkdirat(root.files(), c".host", Mode::from_raw_mode(0o755)).at(Step::PivotRoot)?;
    rustix::process::pivot_root(c".", c".host").at(Step::PivotRoot)
}

/// Makes `/proc` read-only, the last of the mounts.
pub(super) fn seal_proc(proc: &OwnedFd, layers: Layers) -> Result<(), Errno> {
    let sealed = if layers.has(Layer::ReadOnlyProc) { attr::RDONLY } else { 0 };
    stockade_sys::mount::set_attributes(proc, sealed, false)
}

/// Writes a program into the root and takes its name away again: a file of this run
/// alone, through which nothing on the host can be reached.
pub(super) fn place_program(root: &OwnedFd, bytes: &[u8]) -> Result<OwnedFd, Errno> {
    const NAME: &CStr = c".executor";
    // Closed before the exec, which refuses a file open for writing (ETXTBSY).
    drop(write_file(root, NAME, 0o500, bytes)?);
    let program = openat(root, NAME, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?;
    unlinkat(root, NAME, AtFlags::empty())?;
    Ok(program)
}

/// The two ends of a terminal of the sandbox's own devpts.
pub(super) struct Terminal {
    pub(super) master: OwnedFd,
    pub(super) slave: OwnedFd,
}

pub(super) fn open_terminal() -> Result<Terminal, Errno> {
    let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
    let master = open(c"/dev/pts/ptmx", flags, Mode::empty())?;
    rustix::pty::unlockpt(&master)?;
    // The first terminal of a fresh instance.
    let slave = open(c"/dev/pts/0", flags, Mode::empty())?;
    Ok(Terminal { master, slave })
}
