//! The token of a key, from the file that `STOCKADE_KEY_FILE` names.
//!
//! Refused is a file that another user could read or write: a token is a password. It is never
//! printed, and stands in no error.

use std::{
    fs::File,
    io::Read,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use crate::RemoteError;

/// Names the file.
pub const VARIABLE: &str = "STOCKADE_KEY_FILE";
/// The longest token.
const MAX_LEN: u64 = 4096;

/// The token; none where the variable is not set.
///
/// # Errors
/// There is a file and it cannot be used.
pub fn read() -> Result<Option<String>, RemoteError> {
    std::env::var_os(VARIABLE).filter(|path| !path.is_empty()).map(|path| read_file(&PathBuf::from(path))).transpose()
}

fn read_file(path: &Path) -> Result<String, RemoteError> {
    let refuse = |why: String| RemoteError::Key(format!("{VARIABLE}={}: {why}", path.display()));
    let failed = |error: std::io::Error| refuse(error.to_string());
    let file = File::open(path).map_err(failed)?;
    let found = file.metadata().map_err(failed)?;
    let own = rustix::process::geteuid().as_raw();
    if !found.is_file() {
        return Err(refuse("it is no regular file; name the file that has the token".into()));
    }
    if ![0, own].contains(&found.uid()) {
        return Err(refuse(format!("it belongs to uid {}, who is neither root nor you; copy the token to a file of yours", found.uid())));
    }
    if found.mode() & 0o077 != 0 {
        let mode = found.mode() & 0o777;
        return Err(refuse(format!("others may read or write it (mode {mode:04o}); make it yours alone: chmod 600 {}", path.display())));
    }
    let mut text = String::new();
    file.take(MAX_LEN + 1).read_to_string(&mut text).map_err(failed)?;
    let token = text.trim();
    if token.is_empty() || text.len() as u64 > MAX_LEN || !token.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Err(refuse("it has no token; it must have what `stockade key new` printed, on one line".into()));
    }
    Ok(token.to_owned())
}
