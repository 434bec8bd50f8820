//! The file of a proof's page: once a proof starts, it never shows an older proof.
//!
//! Each page is written to a temporary file in the same directory and renamed, so that no
//! reader sees half a page. An existing file must be a regular one of the caller's: symlinks
//! are not followed and other users' files are not replaced. All with the caller's rights.

use std::{
    ffi::OsString,
    fs::OpenOptions,
    io::{self, Write},
    os::unix::fs::{MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

use anyhow::{Context, bail};
use rustix::rand::{GetRandomFlags, getrandom};
use stockade_engine::with_callers_rights;
use stockade_prover::unfinished;

/// The page's file.
pub(crate) struct Page {
    path: PathBuf,
}

impl Page {
    /// Writes a page that states that nothing is proven yet.
    ///
    /// # Errors
    /// The existing file must not be replaced, or the directory is not writable.
    pub(crate) fn begin(path: &Path) -> anyhow::Result<Self> {
        let page = Page { path: path.to_path_buf() };
        with_callers_rights(|| page.look())??;
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

    fn look(&self) -> anyhow::Result<()> {
        let path = self.path.display();
        if self.path.file_name().is_none() {
            bail!("{path} names no file; name the page that --html is to write, such as proof.html");
        }
        let found = match std::fs::symlink_metadata(&self.path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            found => found.with_context(|| format!("look at {path}"))?,
        };
        if !found.is_file() {
            bail!("{path} is a link, a directory or no regular file; --html replaces a file only: remove it, or name another");
        }
        let own = rustix::process::geteuid().as_raw();
        if found.uid() != own {
            bail!(
                "{path} belongs to uid {}, not to the caller (uid {own}); --html does not replace another user's file: name another",
                found.uid()
            );
        }
        Ok(())
    }

    fn replace(&self, text: &[u8]) -> io::Result<()> {
        let mut nonce = [0; 8];
        getrandom(&mut nonce, GetRandomFlags::empty())?;
        let mut name = OsString::from(".");
        name.push(self.path.file_name().unwrap_or_default());
        name.push(format!("-{:016x}", u64::from_ne_bytes(nonce)));
        let temporary = self.path.with_file_name(name);
        // `create_new` follows no symlink and opens no existing file.
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o644).open(&temporary)?;
        let written = file.write_all(text).and_then(|()| std::fs::rename(&temporary, &self.path));
        if written.is_err() {
            let _stays = std::fs::remove_file(&temporary);
        }
        written
    }
}
