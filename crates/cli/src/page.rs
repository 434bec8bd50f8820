//! The file of a proof's page: once a proof starts, it never shows an older proof.
//!
//! Each page is written to a temporary file in the same directory and renamed, so that no
//! reader sees half a page. An existing file must be a regular one of the caller's: symlinks
//! are not followed and other users' files are not replaced. The directory is sought before the
//! proof, through no link but root's, and only its descriptor is used. All with the caller's rights.

use std::{
    ffi::OsString,
    fs::File,
    io::Write,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
};

use anyhow::{Context, anyhow, bail};
use rustix::{
    fs::{AtFlags, FileType, Mode, OFlags, openat, renameat, statat, unlinkat},
    io::Errno,
    rand::{GetRandomFlags, getrandom},
};
use stockade_engine::{open_directory, with_callers_rights};
use stockade_prover::unfinished;

/// The page's file.
pub(crate) struct Page {
    path: PathBuf,
    directory: OwnedFd,
    name: OsString,
}

impl Page {
    /// Writes a page that states that nothing is proven yet.
    ///
    /// # Errors
    /// The existing file must not be replaced, or the directory is not writable.
    pub(crate) fn begin(path: &Path) -> anyhow::Result<Self> {
        let page = with_callers_rights(|| Self::find(path))??;
        page.put(&unfinished(None))?;
        Ok(page)
    }

    /// Puts the page of a proof in place.
    ///
    /// # Errors
    /// It cannot be written. Then the unfinished page stays, which proves nothing.
    pub(crate) fn put(&self, text: &str) -> anyhow::Result<()> {
        with_callers_rights(|| self.replace(text.as_bytes()))?.with_context(|| format!("write the page to {}", self.path.display()))
    }

    fn find(named: &Path) -> anyhow::Result<Self> {
        let path = named.display();
        let whole = std::path::absolute(named)?;
        let (Some(above), Some(name)) = (whole.parent(), named.file_name()) else {
            bail!("{path} names no file; name the page that --html is to write, such as proof.html");
        };
        let opened = open_directory(above, None).map_err(|error| anyhow!(error.problem));
        let directory = opened.with_context(|| format!("write the page to {path}"))?;
        let page = Page { path: named.to_path_buf(), directory, name: name.to_owned() };
        let found = match statat(&page.directory, name, AtFlags::SYMLINK_NOFOLLOW) {
            Err(Errno::NOENT) => return Ok(page),
            found => found.with_context(|| format!("look at {path}"))?,
        };
        if !FileType::from_raw_mode(found.st_mode).is_file() {
            bail!("{path} is a link, a directory or no regular file; --html replaces a file only: remove it, or name another");
        }
        let own = rustix::process::geteuid().as_raw();
        if found.st_uid != own {
            bail!(
                "{path} belongs to uid {}, not to the caller (uid {own}); --html does not replace another user's file: name another",
                found.st_uid
            );
        }
        Ok(page)
    }

    fn replace(&self, text: &[u8]) -> anyhow::Result<()> {
        let mut nonce = [0; 8];
        getrandom(&mut nonce, GetRandomFlags::empty())?;
        let mut temporary = OsString::from(".");
        temporary.push(&self.name);
        temporary.push(format!("-{:016x}", u64::from_ne_bytes(nonce)));
        // It follows no symlink and opens no existing file.
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mut file = File::from(openat(&self.directory, &temporary, flags, Mode::from_raw_mode(0o644))?);
        let written = file.write_all(text).map_err(anyhow::Error::from);
        let placed = written.and_then(|()| Ok(renameat(&self.directory, &temporary, &self.directory, &self.name)?));
        if placed.is_err() {
            let _stays = unlinkat(&self.directory, &temporary, AtFlags::empty());
        }
        placed
    }
}
