//! A Unix socket of the host that a view shows: opened as its caller and judged.
//!
//! It is the caller's own, no link leads to it, and no other user could have put another at its path. It is
//! opened once; the sandbox gets what was opened, or finds that file again. Which sockets may be shown is
//! the policy's to say, and who listens there is not looked at.

use std::path::{Path, PathBuf};

use rustix::{
    fd::OwnedFd,
    fs::{FileType, Mode, fstat},
    io::Errno,
};
use stockade_policy::plan::HostSocket;

use crate::{
    error::describe,
    identity,
    scratch::{FileId, Opener, as_caller, detached_copy},
    tree,
};

/// A socket, opened.
pub struct OpenedSocket {
    /// Root: a copy of its mount, idmapped for the run.
    pub(crate) tree: Option<OwnedFd>,
    pub(crate) file_id: FileId,
    /// What the plan needs to know.
    pub facts: HostSocket,
}

/// A path that is no socket to show.
#[derive(Debug, thiserror::Error)]
#[error("--bind {}: {problem}", path.display())]
pub struct SocketError {
    /// As named by the caller.
    pub path: PathBuf,
    /// What is wrong with it.
    pub problem: SocketProblem,
}

/// What is wrong with a path, and how to fix it.
#[derive(Debug, thiserror::Error)]
pub enum SocketProblem {
    /// The kernel does not open it for the caller.
    #[error("{}; name the socket itself, by a path without links", describe(*.0))]
    Unreadable(Errno),
    /// It has become something else.
    #[error("it is no socket any more")]
    NotSocket,
    /// It is another user's.
    #[error("it belongs to uid {owner}, not to the caller (uid {caller}); only a program of the caller's own may listen there")]
    NotOwned {
        /// Whose it is.
        owner: u32,
        /// Who asks for it.
        caller: u32,
    },
    /// Others could put another socket there.
    #[error("others may write in {}, which has no sticky bit, and could put another socket there; close it: chmod o-w, or g-w", .0.display())]
    Open(PathBuf),
    /// Its mount cannot be copied.
    #[error("copy its mount: {}", describe(*.0))]
    MountCopy(Errno),
    /// The launcher cannot act with the caller's rights.
    #[error("cannot change to the caller's rights: {}", describe(*.0))]
    CallerRights(Errno),
}

impl OpenedSocket {
    /// Opens a socket with the caller's rights.
    ///
    /// # Errors
    /// It is none, or another's, or others may replace it.
    pub fn open(path: &Path, opener: &Opener<'_>) -> Result<Self, SocketError> {
        let opened = as_caller(opener.caller, opener.privileged, || judged(path, opener.caller.uid, opener.caller.gid));
        let opened = opened.map_err(SocketProblem::CallerRights).flatten();
        opened.and_then(|socket| finish(socket, path, opener)).map_err(|problem| SocketError { path: path.to_path_buf(), problem })
    }
}

fn judged(path: &Path, uid: u32, gid: u32) -> Result<OwnedFd, SocketProblem> {
    let socket = tree::open_entry(path).map_err(SocketProblem::Unreadable)?;
    let stat = fstat(&socket).map_err(SocketProblem::Unreadable)?;
    if !FileType::from_raw_mode(stat.st_mode).is_socket() {
        return Err(SocketProblem::NotSocket);
    }
    if stat.st_uid != uid {
        return Err(SocketProblem::NotOwned { owner: stat.st_uid, caller: uid });
    }
    for above in path.ancestors().skip(1) {
        let stat = tree::open_entry(above).and_then(fstat).map_err(SocketProblem::Unreadable)?;
        let mode = Mode::from_raw_mode(stat.st_mode);
        let is_open = mode.contains(Mode::WOTH) || (mode.contains(Mode::WGRP) && ![0, gid].contains(&stat.st_gid));
        if is_open && !mode.contains(Mode::SVTX) {
            return Err(SocketProblem::Open(above.to_path_buf()));
        }
    }
    Ok(socket)
}

fn finish(socket: OwnedFd, path: &Path, opener: &Opener<'_>) -> Result<OpenedSocket, SocketProblem> {
    let stat = fstat(&socket).map_err(SocketProblem::Unreadable)?;
    let tree = opener.privileged.then(|| detached_copy(&socket, false)).transpose().map_err(SocketProblem::MountCopy)?;
    // connect(2) wants the right to write, which a socket's owner alone has as a rule.
    let idmapped = tree
        .as_ref()
        .zip(opener.unique_id)
        .map(|(tree, id)| identity::idmap(std::slice::from_ref(tree), (stat.st_uid, stat.st_gid), (id, id)));
    let idmap_refusal = idmapped.and_then(Result::err).map(|error| error.to_string());
    let facts = HostSocket { path: path.to_path_buf(), idmap_refusal };
    Ok(OpenedSocket { tree, file_id: (stat.st_dev, stat.st_ino), facts })
}
