//! A temporary directory of the prover. This process removes it, or, if it is killed, the next
//! start does.
//!
//! No other user can enter it. An ordinary user's is closed; root's can be
//! passed through, because root opens a scratch below it with its caller's rights, so what
//! is made in it must be closed. It is noted in the registry before it is made.

use std::{
    fs::{DirBuilder, Permissions, set_permissions},
    io,
    os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt},
    path::{Path, PathBuf},
};

use stockade_launcher::registry::{PROOF_PREFIX, Record, remove_directory};
use stockade_protocol::Verdict;

use crate::{Refusal, RefusalCause, caller, facts, runs};

/// On a disk rather than in memory where the host has it so: a tmpfs cannot be idmapped
/// before Linux 6.3.
const PARENT: &str = "/tmp";

/// A temporary directory in `/tmp` with a record in the registry.
#[derive(Debug)]
pub struct TempDir {
    path: PathBuf,
    record: Record,
}

/// Why there is none.
#[derive(Debug, thiserror::Error)]
enum TempDirError {
    #[error("{attempt} {}: {error}", path.display())]
    Io { attempt: &'static str, path: PathBuf, error: io::Error },
    #[error("others could exchange what is made in {PARENT}; it must be root's, with mode 1777 (chmod 1777 {PARENT})")]
    Unsafe,
}

impl RefusalCause for TempDirError {
    fn verdict_and_reason(&self) -> (Verdict, &'static str) {
        (Verdict::SandboxError, "prover")
    }
}

fn failed(attempt: &'static str, path: &Path) -> impl Fn(io::Error) -> TempDirError {
    move |error| TempDirError::Io { attempt, path: path.to_path_buf(), error }
}

impl TempDir {
    /// Makes one for a proof; `nonce` must be hard to guess. What killed proofs and runs
    /// have left is removed first.
    ///
    /// # Errors
    /// The registry cannot be had, or the directory cannot be made safely.
    pub fn new(nonce: u64) -> Result<Self, Refusal> {
        // Without symlinks: the sweep follows none.
        let parent = std::fs::canonicalize(PARENT).map_err(failed("look at", Path::new(PARENT)))?;
        let found = std::fs::symlink_metadata(&parent).map_err(failed("look at", &parent))?;
        let own = rustix::process::geteuid().as_raw();
        const STICKY: u32 = 0o1000;
        let safe = found.is_dir() && (found.uid() == 0 || found.uid() == own) && (found.mode() & 0o022 == 0 || found.mode() & STICKY != 0);
        if !safe {
            return Err(TempDirError::Unsafe.into());
        }
        let identity = caller::identify(None)?;
        let registry = facts::registry(&identity)?;
        runs::sweep()?;
        let mut record = registry.claim()?;
        let path = parent.join(format!("{PROOF_PREFIX}{nonce:016x}"));
        record.note_proof(&path)?;
        DirBuilder::new().mode(0o700).create(&path).map_err(failed("make the directory", &path))?;
        if identity.privileged {
            // Apart from its making, which the umask would narrow.
            set_permissions(&path, Permissions::from_mode(0o711)).map_err(failed("open the directory", &path))?;
        }
        Ok(TempDir { path, record })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Removes it with everything in it.
    ///
    /// # Errors
    /// Something of it cannot be removed. The next start tries again.
    pub fn remove(mut self) -> Result<(), Refusal> {
        remove_directory(&self.path).map_err(failed("remove all of", &self.path))?;
        self.record.settle();
        Ok(())
    }
}
