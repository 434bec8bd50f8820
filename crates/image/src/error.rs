//! Why an image cannot be imported.

use std::{io, path::PathBuf};

use stockade_images::{Digest, ImageError};
use stockade_registry::{FetchError, ReferenceError};
use stockade_sys::{
    Errno,
    lockdown::{LockdownError, LockdownStep},
};

use crate::{confine::CPU_SECONDS, manifest::ManifestError, tar::TarError};

/// Why an image cannot be imported, or the store not be changed.
#[derive(Debug, thiserror::Error)]
pub enum ImportError {
    /// Of the store.
    #[error(transparent)]
    Store(#[from] ImageError),
    /// Of an index, manifest or configuration.
    #[error(transparent)]
    Manifest(#[from] ManifestError),
    /// Of the archive that has the image.
    #[error(transparent)]
    Archive(#[from] TarError),
    /// Of the name of an image of a registry.
    #[error(transparent)]
    Reference(#[from] ReferenceError),
    /// Of a registry.
    #[error(transparent)]
    Registry(Box<FetchError>),
    /// The kernel refuses a step.
    #[error("{verb} {}: {error}", path.display())]
    Io {
        /// What was attempted.
        verb: &'static str,
        /// On what.
        path: PathBuf,
        /// Why it failed.
        error: io::Error,
    },
    /// It is no image that this program knows.
    #[error("{} is neither an OCI image layout nor an archive of one nor one of `docker save`: it has neither index.json nor manifest.json", .0.display())]
    NoImage(PathBuf),
    /// A fifo, a socket or a device.
    #[error("{} is neither a directory nor a file, and an archive is read in several places; write it to a file", .0.display())]
    NoFile(PathBuf),
    /// A blob that is not there.
    #[error("{what} is missing from the image; make the archive or layout again, with all its layers")]
    Missing {
        /// Which.
        what: String,
    },
    /// A file of JSON that is too long.
    #[error("{what} has more than 4 MiB, the most that is read")]
    TooLong {
        /// Which.
        what: String,
    },
    /// An archive of too many files, or of names that are too long.
    #[error("{} has more than 10,000 files, or a name or link of more than 4096 bytes; no archive of an image has", .0.display())]
    Files(PathBuf),
    /// Bytes that are not those that were promised.
    #[error("{what} has the digest {found}, and {expected} is promised: the image is damaged or was changed")]
    Digest {
        /// Of what.
        what: String,
        /// What it has.
        found: Digest,
        /// What it should have.
        expected: Digest,
    },
    /// A tree of the store that is not what was imported.
    #[error("the tree {} {why}; {}", .tree.display(), remedy(.images))]
    Changed {
        /// Which.
        tree: PathBuf,
        /// What is wrong with it.
        why: String,
        /// The images that have it.
        images: Vec<Digest>,
    },
    /// More or fewer bytes than promised.
    #[error("{what} has {found} bytes, and {expected} are promised: the image is damaged or was changed")]
    Size {
        /// Of what.
        what: String,
        /// What it has, or one more than promised.
        found: u64,
        /// What it should have.
        expected: u64,
    },
    /// It cannot be decompressed.
    #[error("decompress layer {layer}: {why}")]
    Decompress {
        /// Which.
        layer: Digest,
        /// Why not.
        why: String,
    },
    /// It cannot be unpacked.
    #[error("unpack layer {layer}: {why}")]
    Unpack {
        /// Which.
        layer: Digest,
        /// Why not.
        why: String,
    },
    /// What an unpacker that has been taken over made of a layer.
    #[error(
        "unpack layer {layer}: the process has made {what}, which no archive leads to: the archive has taken it over, so do not use this image"
    )]
    Made {
        /// Which.
        layer: Digest,
        /// What it has made.
        what: &'static str,
    },
    /// Too much CPU time.
    #[error("the processes that decompress and unpack the image's layers have used {CPU_SECONDS} s of CPU time, the most that they may")]
    CpuTime,
    /// More than allowed.
    #[error("the image has more than {max} bytes when it is uncompressed; --max-size allows more")]
    TooLarge {
        /// The limit in bytes.
        max: u64,
    },
    /// The disk is nearly full.
    #[error("the file system of {} has less than 256 MiB or 10,000 inodes free, which stay free; make room (`stockade image gc` removes what no image has)", .0.display())]
    NoRoom(PathBuf),
    /// The merged tree of many layers.
    #[error(
        "the merged tree of the layers needs more than the {bytes} bytes or {entries} files and directories that --max-size and the file system still have room for"
    )]
    Merged {
        /// How many bytes it may have beside those of the layers.
        bytes: u64,
        /// How many files and directories.
        entries: u64,
    },
    /// Others hold images.
    #[error(
        "a run, a sandbox that is prepared for one, an import or a pull holds images of the store, so no layer is removed; call `stockade image gc` when it has ended (a prepared sandbox is ended after 30 s without a request)"
    )]
    Held,
    /// It has no name, and none was given.
    #[error("the image has no name; give it one with --name")]
    Unnamed,
    /// A process could not give up its rights.
    #[error("an unpacking process could not {}: {}{}", .0.step.name(), .0.errno, needs(.0))]
    Confine(LockdownError),
    /// A layer below the one that is unpacked cannot be opened.
    #[error("open the layers below: {0}; `stockade image verify` says what is wrong with the store")]
    Below(Errno),
}

/// How a tree is made again that these images have: one that is there is taken as it is.
fn remedy(images: &[Digest]) -> String {
    if images.is_empty() {
        return String::from("no image has it, and `stockade image gc` removes it");
    }
    let images: Vec<String> = images.iter().map(Digest::to_string).collect();
    let images = images.join(" ");
    format!(
        "`stockade image rm {images}` removes every image that has it, and `stockade image gc` what a run still held; then import again"
    )
}

/// What a kernel lacks that refuses a step so.
fn needs(error: &LockdownError) -> &'static str {
    match error {
        LockdownError { step: LockdownStep::RestrictFiles, errno: Errno::OPNOTSUPP } => {
            "; it needs Linux 5.13 or later with `landlock` among its security modules"
        }
        _ => "",
    }
}

impl From<FetchError> for ImportError {
    fn from(error: FetchError) -> Self {
        ImportError::Registry(Box::new(error))
    }
}

/// Adds what was attempted, and on what.
pub trait Attempt<T> {
    /// The error with both.
    ///
    /// # Errors
    /// The same.
    fn attempt(self, verb: &'static str, path: impl Into<PathBuf>) -> Result<T, ImportError>;
}

impl<T, E: Into<io::Error>> Attempt<T> for Result<T, E> {
    fn attempt(self, verb: &'static str, path: impl Into<PathBuf>) -> Result<T, ImportError> {
        self.map_err(|error| ImportError::Io { verb, path: path.into(), error: error.into() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_without_landlock_is_named_only_where_it_is_the_reason() {
        let says = |step, errno| ImportError::Confine(LockdownError { step, errno }).to_string().contains("landlock");
        assert!(says(LockdownStep::RestrictFiles, Errno::OPNOTSUPP));
        assert!(!says(LockdownStep::EndWithParent, Errno::SRCH) && !says(LockdownStep::RestrictFiles, Errno::NOMEM));
    }
}
