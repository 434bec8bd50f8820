//! Who the sandbox is on the host: uid and gid maps, and idmapped mounts of scratch and of layers.
//!
//! Maps are read back after they were written. Which ids are used is the plan's
//! decision; no id is invented here.

use rustix::{fd::OwnedFd, io::Errno};
use stockade_policy::plan::{Mode, Plan, UserNamespaces};
use stockade_sys::{clone, mount};

use crate::{
    ErrorKind, LaunchError,
    layers::{Layer, Layers},
    proc::ProcDirectory,
};

/// The outer user namespace, as read back.
pub(crate) struct OuterNamespaces {
    pub(crate) proc: ProcDirectory,
    /// Its name, such as `user:[4026532178]`; none where the plan goes without.
    pub(crate) user: Option<String>,
}

/// Writes the maps of the child's outer user namespace. Where the plan goes without one
/// there is nothing to write.
///
/// # Errors
/// The kernel refused.
pub(crate) fn write_maps(plan: &Plan, pid: i32) -> Result<ProcDirectory, LaunchError> {
    let proc = ProcDirectory::open(pid).map_err(maps_failed)?;
    if plan.identity.user_namespaces == UserNamespaces::Nested {
        if plan.mode == Mode::Rootless {
            // user_namespaces(7): without it an unprivileged gid map is refused.
            proc.write("setgroups", "deny").map_err(maps_failed)?;
        }
        for (file, inside, outside) in maps(plan.identity.inside, plan.identity.outside) {
            proc.write(file, &format!("{inside} {outside} 1")).map_err(maps_failed)?;
        }
    }
    Ok(proc)
}

/// Reads them back. A map is written once, so this can follow when the child is on its way.
///
/// # Errors
/// The kernel keeps other maps than were written.
pub(crate) fn check_maps(plan: &Plan, proc: ProcDirectory) -> Result<OuterNamespaces, LaunchError> {
    if plan.identity.user_namespaces == UserNamespaces::Missing {
        return Ok(OuterNamespaces { proc, user: None });
    }
    for (file, inside, outside) in maps(plan.identity.inside, plan.identity.outside) {
        let kept = proc.read(file).map_err(maps_failed)?;
        if kept.split_ascii_whitespace().collect::<Vec<_>>() != [inside.to_string(), outside.to_string(), String::from("1")] {
            return Err(LaunchError::Maps { file, kept, ids: (inside, outside) });
        }
    }
    let user = Some(proc.namespace("user").map_err(maps_failed)?);
    Ok(OuterNamespaces { proc, user })
}

fn maps(inside: (u32, u32), outside: (u32, u32)) -> [(&'static str, u32, u32); 2] {
    [("uid_map", inside.0, outside.0), ("gid_map", inside.1, outside.1)]
}

fn maps_failed(errno: Errno) -> LaunchError {
    LaunchError::system(ErrorKind::Maps, "write the user namespace's maps")(errno)
}

/// The ended process that holds an idmap's user namespace; reaped when dropped.
struct UsernsHolder(clone::Child);

impl Drop for UsernsHolder {
    fn drop(&mut self) {
        // A failed wait would only leave it to our own end.
        let _served = reap(&self.0);
    }
}

/// Why the kernel refuses to idmap a mount.
#[derive(Debug, thiserror::Error)]
pub enum IdmapError {
    /// None can be made.
    #[error("a user namespace for the idmap cannot be made: {0}")]
    Namespace(Errno),
    /// It gets no map of all ids.
    // user_namespaces(7): a map that holds the parent's uid 0 needs CAP_SETFCAP.
    #[error("a map of all ids cannot be written ({0}); give the launcher CAP_SETFCAP, outside any container's user namespace")]
    Map(Errno),
    /// The mount takes none.
    #[error("its file system does not take it ({0}); put it on ext4, xfs or btrfs (tmpfs from Linux 6.3)")]
    FileSystem(Errno),
}

/// Idmaps detached copies of directories: every id to itself, except the owner's and
/// the run's, which change places. Files that the run makes so belong to the owner. A mount
/// can be idmapped once; one that was refused is as it was.
pub(crate) fn idmap(trees: &[OwnedFd], owner: (u32, u32), run: (u32, u32)) -> Result<(), IdmapError> {
    if !Layers::in_this_build().has(Layer::Idmap) {
        return Ok(());
    }
    let holder = UsernsHolder(clone::user_namespace_holder().map_err(IdmapError::Namespace)?);
    let proc = ProcDirectory::open(holder.0.pid).map_err(IdmapError::Namespace)?;
    proc.write("uid_map", &exchange(owner.0, run.0)).map_err(IdmapError::Map)?;
    proc.write("gid_map", &exchange(owner.1, run.1)).map_err(IdmapError::Map)?;
    let namespace = proc.open_namespace("user").map_err(IdmapError::Namespace)?;
    let attributes = mount::attr::NOSUID | mount::attr::NODEV;
    trees.iter().try_for_each(|tree| mount::set_idmap(tree, attributes, &namespace)).map_err(IdmapError::FileSystem)
}

fn reap(holder: &clone::Child) -> Result<(), Errno> {
    let holder = rustix::process::WaitId::PidFd(rustix::fd::AsFd::as_fd(&holder.pidfd));
    rustix::process::waitid(holder, rustix::process::WaitIdOptions::EXITED).map(drop)
}

/// Why root can make no user namespace here, with the remedy. Tried by making one alone:
/// that a sandbox could not be cloned may have another cause.
pub fn user_namespace_refusal() -> Option<String> {
    match clone::user_namespace_holder().and_then(|holder| reap(&holder)) {
        Err(errno @ (Errno::NOSPC | Errno::PERM | Errno::ACCESS | Errno::INVAL | Errno::USERS)) => {
            Some(LaunchError::Clone { privileged: true, errno }.to_string())
        }
        _ => None,
    }
}

/// A map of all ids to themselves with `a` and `b` exchanged.
fn exchange(a: u32, b: u32) -> String {
    const END: u64 = u32::MAX as u64;
    let (low, high) = (u64::from(a.min(b)), u64::from(a.max(b)));
    if low == high {
        return format!("0 0 {END}\n");
    }
    let ranges = [(0, 0, low), (low, high, 1), (low + 1, low + 1, high - low - 1), (high, low, 1), (high + 1, high + 1, END - high - 1)];
    ranges.iter().filter(|(.., count)| *count > 0).map(|(inside, outside, count)| format!("{inside} {outside} {count}\n")).collect()
}

#[cfg(test)]
mod tests {
    use super::exchange;

    #[test]
    fn two_ids_change_places_and_the_rest_stay() {
        assert_eq!(
            exchange(1000, 1_879_048_192),
            "0 0 1000\n1000 1879048192 1\n1001 1001 1879047191\n1879048192 1000 1\n1879048193 1879048193 2415919102\n"
        );
        assert_eq!(exchange(5, 5), "0 0 4294967295\n");
        assert_eq!(exchange(0, 1), "0 1 1\n1 0 1\n2 2 4294967293\n");
    }
}
