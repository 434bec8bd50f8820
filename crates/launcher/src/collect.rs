//! Files that the request asked to get back.
//!
//! Read when everything inside is dead, from a tree that hostile code wrote: beneath
//! scratch, through no link, on no other file system, regular files only, bounded in
//! number and size.

use base64::{Engine, prelude::BASE64_STANDARD};
use rustix::{
    fd::OwnedFd,
    fs::{FileType, OFlags},
};
use sha2::{Digest, Sha256};
use std::{
    fs::File,
    io::Read,
    path::{Path, PathBuf},
};
use stockade_policy::plan::{PathKindName, Protection};
use stockade_protocol::CollectedFile;

use crate::{
    error::describe,
    tree::{Walk, matches, open_beneath, walk},
};

/// Files that a result lists.
const MAX_FILES: usize = 4096;

/// Returns the files below `scratch` that match one of `globs`, in the order of their
/// paths; those beyond `limit` bytes in all are named but not read. What the policy hides
/// from the code is hidden from its results too.
pub(crate) fn collect(
    scratch: &OwnedFd,
    globs: &[String],
    protected: &[(PathBuf, PathKindName, Protection)],
    limit: Option<u64>,
) -> Vec<CollectedFile> {
    if globs.is_empty() {
        return Vec::new();
    }
    let hidden = || protected.iter().filter(|(.., how)| *how == Protection::Hidden).map(|(hidden, ..)| hidden);
    let is_hidden = |path: &Path| hidden().any(|hidden| path.starts_with(hidden));
    // The name of a hidden directory itself is seen by the code too.
    let is_below_hidden = |path: &Path| hidden().any(|hidden| path != hidden && path.starts_with(hidden));
    let mut matched: Vec<(PathBuf, u64)> = Vec::new();
    let mut closed: Vec<PathBuf> = Vec::new();
    let walked = walk(scratch, &mut |found| {
        let wanted = || globs.iter().any(|glob| matches(glob, found.path));
        if found.kind == FileType::RegularFile && wanted() && !is_hidden(found.path) {
            matched.push((found.path.to_owned(), found.size()));
        } else if found.closed && globs.iter().any(|glob| may_match_below(glob, found.path)) && !is_below_hidden(found.path) {
            closed.push(found.path.to_owned());
        }
        if matched.len() + closed.len() > MAX_FILES { Walk::Stop } else { Walk::On }
    });
    matched.sort_by(|a, b| a.0.as_os_str().cmp(b.0.as_os_str()));
    let mut room = limit.unwrap_or(u64::MAX);
    let mut files = Vec::with_capacity(matched.len());
    for (index, (path, size)) in matched.into_iter().enumerate() {
        files.push(if index >= MAX_FILES {
            omitted(&path, size, "more than 4096 files match")
        } else if size > room {
            omitted(&path, size, "collect_size")
        } else {
            read(scratch, &path, size, &mut room)
        });
    }
    // What lies in there cannot be named, but that something may be missing is said.
    closed.sort();
    closed.dedup();
    files.extend(closed.into_iter().map(|path| omitted(&path.join(""), 0, "a directory that cannot be read")));
    if let Err(errno) = walked {
        files.push(omitted(Path::new("/"), 0, &format!("the tree cannot be read to its end: {}", describe(errno))));
    }
    files
}

/// Whether a glob could match something below a directory.
fn may_match_below(glob: &str, directory: &Path) -> bool {
    let (mut parts, mut names) = (glob.split('/'), directory.iter().map(Path::new));
    loop {
        match (parts.next(), names.next()) {
            (Some("**"), _) => return true,
            (Some(_), None) => return true,
            (None, _) => return false,
            (Some(part), Some(name)) if matches(part, name) => {}
            // A brace may hold a slash, and then the parts are none.
            (Some(part), Some(_)) => return part.contains('{'),
        }
    }
}

fn omitted(path: &Path, size: u64, why: &str) -> CollectedFile {
    CollectedFile { omitted: Some(why.to_owned()), ..named(path, size) }
}

/// A name that is not UTF-8 has U+FFFD in it, as the result is text, and is marked: several
/// files can read alike.
fn named(path: &Path, size: u64) -> CollectedFile {
    let lossy = path.to_str().is_none();
    CollectedFile { path: path.to_string_lossy().into_owned(), lossy, size, sha256: None, text: None, base64: None, omitted: None }
}

fn read(scratch: &OwnedFd, path: &Path, size: u64, room: &mut u64) -> CollectedFile {
    // NONBLOCK: what was a file when it was listed may be a fifo now.
    let opened = open_beneath(scratch, path, OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOFOLLOW);
    let Ok(file) = opened else { return omitted(path, size, "unreadable") };
    if !rustix::fs::fstat(&file).is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile) {
        return omitted(path, size, "not a regular file");
    }
    let mut bytes = Vec::new();
    // One byte more than there is room for shows that it has grown.
    if File::from(file).take(room.saturating_add(1)).read_to_end(&mut bytes).is_err() {
        return omitted(path, size, "unreadable");
    }
    let size = bytes.len() as u64;
    if size > *room {
        return omitted(path, size, "collect_size");
    }
    *room -= size;
    let hash = stockade_protocol::text::hex(&Sha256::digest(&bytes));
    let (text, base64) = match String::from_utf8(bytes) {
        Ok(text) => (Some(text), None),
        Err(error) => (None, Some(BASE64_STANDARD.encode(error.as_bytes()))),
    };
    CollectedFile { sha256: Some(hash), text, base64, ..named(path, size) }
}
