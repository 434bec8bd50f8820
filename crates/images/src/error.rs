//! Why an image cannot be had.

use std::{io, path::PathBuf};

use crate::Digest;

/// Why an image cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// Neither variable says where the store of an ordinary user is.
    #[error("neither XDG_DATA_HOME nor HOME says where this user's images are; set one of them")]
    Nowhere,
    /// There is no store.
    #[error("there is no store of images at {}; `stockade image import FILE` makes it", path.display())]
    NoStore {
        /// Where it was sought.
        path: PathBuf,
    },
    /// It was written by another version.
    #[error("the store {} has format {found:?}, and this program reads {expected:?}; use the version that wrote it, or remove the store and import again", path.display(), expected = crate::FORMAT.trim_end())]
    Format {
        /// The store.
        path: PathBuf,
        /// What its file `format` says.
        found: String,
    },
    /// Another user could have written it.
    #[error("the store's {} belongs to uid {owner} and has mode {mode:o}; it must belong to uid {expected}, and no other user may write it", path.display())]
    Untrusted {
        /// What.
        path: PathBuf,
        /// Its owner.
        owner: u32,
        /// Its mode.
        mode: u32,
        /// Who it should belong to.
        expected: u32,
    },
    /// It is no name.
    #[error("{name:?} cannot name an image: {why}")]
    Name {
        /// The text.
        name: String,
        /// Why not.
        why: &'static str,
    },
    /// The store has no image of this name.
    #[error("there is no image {name:?}; `stockade image ls` lists what there is, `stockade image import FILE` adds one")]
    UnknownName {
        /// The name.
        name: String,
    },
    /// The store has no image of this digest.
    #[error("there is no image {digest}; `stockade image ls` lists what there is, `stockade image import FILE` adds one")]
    UnknownDigest {
        /// The digest.
        digest: Digest,
    },
    /// A file of the store says something else than this program writes.
    #[error("{}: {why}; `stockade image rm` removes the image, then import it again", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        why: String,
    },
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
}
