//! The file of a proof's page: from the first moment on it is never an older proof's.
//!
//! Each page is written beside it and takes its place whole, so that nobody reads half of
//! one. What stands there before must be a file of the caller's own, or nothing: no link is
//! followed, nothing is waited for, and no other user's file is touched. All of it is done
//! with the caller's rights.

use std::{
    ffi::OsString,
    fs::{File, OpenOptions},
    io::{self, Read, Write},
    os::unix::fs::{MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

use anyhow::{Context, bail};
use stockade_prover::unfinished;
use stockade_runtime::with_callers_rights;

/// See the module.
pub(crate) struct Page {
    path: PathBuf,
}

impl Page {
    /// Puts a page in place that says that nothing is proven yet.
    ///
    /// # Errors
    /// What stands there must not be replaced, or nothing can be written there.
    pub(crate) fn begin(path: &Path) -> anyhow::Result<Self> {
        let page = Page { path: path.to_path_buf() };
        with_callers_rights(|| page.look())??;
        page.put(&unfinished(None))?;
        Ok(page)
    }

    /// Puts the page of a proof in place.
    ///
    /// # Errors
    /// It cannot be written. Then the one before stays, which proves nothing.
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
                "{path} belongs to uid {}, not to the caller (uid {own}); --html replaces no file of another user's: name another",
                found.uid()
            );
        }
        Ok(())
    }

    fn replace(&self, text: &[u8]) -> io::Result<()> {
        let mut nonce = [0; 8];
        File::open("/dev/urandom")?.read_exact(&mut nonce)?;
        let mut name = OsString::from(".");
        name.push(self.path.file_name().unwrap_or_default());
        name.push(format!("-{:016x}", u64::from_ne_bytes(nonce)));
        let beside = self.path.with_file_name(name);
        // A name that nothing had, and so no link either.
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o644).open(&beside)?;
        let written = file.write_all(text).and_then(|()| std::fs::rename(&beside, &self.path));
        if written.is_err() {
            let _stays = std::fs::remove_file(&beside);
        }
        written
    }
}
