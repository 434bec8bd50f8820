//! Which directories of root's may be a scratch of root itself.
//!
//! Agents in containers and build machines are root, and name directories of their own. Code may
//! then change every file in it, so it must be nothing that the host's programs trust: no
//! directory of the system, no home, nothing that all users write to. The policy lists the places
//! (`[scratch] root`). Whether a caller acts for root alone is decided by the caller of this.

use std::{
    os::unix::ffi::OsStrExt,
    path::{Component, Path, PathBuf},
};

use rustix::fs::Mode;

use super::{Opener, ScratchProblem, directory_paths::DirectoryPaths};

/// Directories of the system at the top of the tree, and those whose name begins with `lib`.
const SYSTEM: [&str; 12] = ["bin", "boot", "dev", "etc", "opt", "proc", "run", "sbin", "snap", "sys", "usr", "var"];
/// Below /var, and as open as /tmp.
const VAR_TMP: &str = "/var/tmp";

/// Refuses a directory of root's that may not be a scratch. `owner` and `mode` are its own.
///
/// # Errors
/// It may not.
pub(super) fn judge(real: &Path, paths: &DirectoryPaths, owner: u32, mode: Mode, opener: &Opener<'_>) -> Result<(), ScratchProblem> {
    if opener.roots.is_empty() {
        return Err(if owner == 0 { ScratchProblem::RootOwned } else { ScratchProblem::RootGroup });
    }
    if mode.contains(Mode::WOTH) {
        return Err(ScratchProblem::Shared);
    }
    let system = system_directory(real).or_else(|| paths.own().filter_map(system_directory).find(|system| paths.below(system).is_some()));
    let may_be = |place: &&PathBuf| real.starts_with(place) && system.as_deref().is_none_or(|system| place.starts_with(system));
    if !opener.roots.iter().any(|place| may_be(&place)) {
        return Err(ScratchProblem::SystemDirectory { real: real.to_path_buf(), system });
    }
    let is_homes = |home: &PathBuf| paths.contains(home) || paths.below(home).is_some_and(begins_hidden);
    if opener.homes.iter().any(is_homes) {
        return Err(ScratchProblem::RootsHome);
    }
    Ok(())
}

/// The directory of the system that a path is or lies in.
fn system_directory(real: &Path) -> Option<PathBuf> {
    let Some(Component::Normal(first)) = real.components().nth(1) else { return None };
    let is_system = SYSTEM.iter().any(|name| first == *name) || first.as_bytes().starts_with(b"lib");
    (is_system && !real.starts_with(VAR_TMP)).then(|| Path::new("/").join(first))
}

/// Whether a path below a home is or lies in a hidden directory: shells, SSH and desktops read
/// those.
fn begins_hidden(below: &Path) -> bool {
    below.components().next().is_some_and(|first| first.as_os_str().as_bytes().starts_with(b"."))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]

    use stockade_policy::facts::Caller;

    use super::{super::ShownFiles, *};

    /// The answer for a directory of mode 0755.
    fn answer(path: &str, roots: &[&str]) -> Result<(), ScratchProblem> {
        let caller = Caller { uid: 0, gid: 0, groups: Vec::new() };
        let homes = [PathBuf::from("/root"), PathBuf::from("/home/alice"), PathBuf::from("/bin")];
        let roots: Vec<PathBuf> = roots.iter().map(PathBuf::from).collect();
        let opener = Opener {
            caller: &caller,
            privileged: true,
            unique_id: None,
            homes: &homes,
            registry: None,
            ceiling: None,
            roots: &roots,
            shown: &ShownFiles::new(),
        };
        let path = Path::new(path);
        judge(path, &DirectoryPaths::of(path).unwrap(), 0, Mode::from_raw_mode(0o755), &opener)
    }

    #[test]
    fn nothing_that_the_host_trusts_is_a_scratch_of_roots() {
        for path in ["/agents", "/tmp/x", "/var/tmp/x", "/srv/a/b", "/root/agents", "/home/alice/agents", "/mnt/data", "/builds/.cache"] {
            answer(path, &["/"]).unwrap();
        }
        for path in [
            "/bin/x",
            "/boot",
            "/dev/shm/x",
            "/etc/cron.d",
            "/lib/x",
            "/lib64",
            "/libx32/x",
            "/opt",
            "/opt/x",
            "/proc/1",
            "/run/x",
            "/sbin",
            "/sys/x",
            "/usr/local/bin",
            "/var/lib/x",
            "/var/spool/cron",
            "/var",
            "/snap/x",
        ] {
            assert!(matches!(answer(path, &["/"]), Err(ScratchProblem::SystemDirectory { .. })), "{path}");
        }
        for path in ["/root", "/home", "/home/alice", "/root/.ssh", "/root/.config/systemd", "/home/alice/.local/bin"] {
            assert_eq!(answer(path, &["/"]), Err(ScratchProblem::RootsHome), "{path}");
        }
    }

    #[test]
    fn a_policy_widens_narrows_and_forbids() {
        assert_eq!(answer("/agents", &[]), Err(ScratchProblem::RootOwned));
        answer("/opt/agents/x", &["/", "/opt/agents"]).unwrap();
        assert!(answer("/opt/other", &["/", "/opt/agents"]).is_err());
        answer("/srv/agents/x", &["/srv/agents"]).unwrap();
        assert!(matches!(answer("/srv/x", &["/srv/agents"]), Err(ScratchProblem::SystemDirectory { system: None, .. })));
    }
}
