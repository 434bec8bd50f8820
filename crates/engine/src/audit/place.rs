//! Where a user's log is, and that no sandbox shows it.

use std::{
    collections::BTreeMap,
    env,
    fs::DirBuilder,
    io::ErrorKind,
    os::unix::fs::{DirBuilderExt, MetadataExt},
    path::{Path, PathBuf},
};

use stockade_audit::{AuditError, Log};

use super::error::{RecordError, RecordRefusal};
use crate::{
    Refusal,
    caller::{self, Identity},
    facts::{FileId, HostError, unknown},
};

/// Root's log.
const ROOTS_LOG: &str = "/var/log/stockade";

/// The directory of the log of the user who runs this; none: an ordinary user without a home.
pub fn directory(identity: &Identity) -> Option<PathBuf> {
    if identity.privileged {
        return Some(PathBuf::from(ROOTS_LOG));
    }
    let absolute = |name: &str| env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let state = absolute("XDG_STATE_HOME").or_else(|| absolute("HOME").map(|home| home.join(".local/state")))?;
    Some(state.join("stockade/audit"))
}

/// The log of the user who runs this, to read it.
///
/// # Errors
/// It cannot be known whose.
pub fn own_directory() -> Result<Option<PathBuf>, Refusal> {
    Ok(directory(&caller::identify(None)?))
}

pub(super) fn open(identity: &Identity) -> Result<Log, RecordError> {
    open_at(&directory(identity).ok_or(RecordError::Nowhere)?, identity.privileged)
}

pub(super) fn open_at(path: &Path, privileged: bool) -> Result<Log, RecordError> {
    let open = |mode| Log::open(path, rustix::process::geteuid().as_raw(), mode);
    if privileged {
        return Ok(open(0o750)?);
    }
    match (open(0o700), path.parent()) {
        (Err(AuditError::Io { error, .. }), Some(parent)) if error.kind() == ErrorKind::NotFound => {
            // What went wrong with it is said by the open after it.
            let _there_or_not = DirBuilder::new().recursive(true).mode(0o700).create(parent);
            Ok(open(0o700)?)
        }
        (opened, _) => Ok(opened?),
    }
}

/// Refuses to show the log inside, or a directory above it, by whatever name: the parts of
/// its path are known by device and inode, which links and bind mounts share. `seen`: those
/// of paths that were looked at already.
pub(crate) fn check_unseen<'p>(
    identity: &Identity,
    shown: impl Iterator<Item = &'p Path>,
    seen: &BTreeMap<&Path, Option<FileId>>,
) -> Result<(), Refusal> {
    let Some(log) = directory(identity) else { return Ok(()) };
    let (mut above, mut real) = (Vec::new(), log.clone());
    for path in log.ancestors() {
        if let Some(file_id) = file_id(path)? {
            if above.is_empty() {
                let there = path.canonicalize().map_err(unknown(path))?;
                real = log.strip_prefix(path).map_or(there.clone(), |rest| there.join(rest));
                // Of the real path, where links have led elsewhere.
                for path in there.ancestors().skip(1).filter(|_| there != path) {
                    above.extend(self::file_id(path)?);
                }
            }
            above.push(file_id);
        }
    }
    for path in shown {
        let inside = path.starts_with(&real) || path.starts_with(&log);
        let own_id = || seen.get(path).map_or_else(|| file_id(path), |id| Ok(*id));
        if inside || real.starts_with(path) || own_id()?.is_some_and(|id| above.contains(&id)) {
            return Err(RecordRefusal::Shown { path: path.to_path_buf(), log }.into());
        }
    }
    Ok(())
}

/// None where the path does not exist or the caller cannot look at it.
fn file_id(path: &Path) -> Result<Option<FileId>, HostError> {
    match std::fs::metadata(path) {
        Ok(metadata) => Ok(Some((metadata.dev(), metadata.ino()))),
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory | ErrorKind::PermissionDenied) => Ok(None),
        // A circle of links leads nowhere.
        Err(error) if error.raw_os_error() == Some(rustix::io::Errno::LOOP.raw_os_error()) => Ok(None),
        Err(error) => Err(unknown(path)(error)),
    }
}
