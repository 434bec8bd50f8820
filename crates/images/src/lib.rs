//! The store of images: its format on disk, and how it is read.
//!
//! Guarantees: an image is given out only from a store of the expected owner that no other user can
//! write; its layers stay while the [`Image`] lives, since it holds the store's lock shared; a name
//! or a digest from outside never becomes part of a path before it was checked. It writes nothing:
//! `stockade-image` does. It does not look into the trees of layers.
//!
//! ```text
//! format                       see FORMAT
//! lock                         flock: shared while a run or an import holds layers, exclusive to remove some
//! layers/<key>/root/           the tree of one layer, as a lower directory of an overlay with `userxattr`
//! layers/<key>/layer.json      LayerRecord
//! flat/<chain-id hex>/root/    the merged tree of an image with more than MAX_LOWER layers
//! images/<digest hex>.json     ImageRecord
//! names/<escaped name>         the digest of an image, in hex
//! tmp/                         unfinished imports
//! ```
//!
//! The key of a layer that refers to none below it is its diff-id; that of another its chain-id
//! (OCI image specification, "Layer ChainID").
#![forbid(unsafe_code)]

mod digest;
mod error;
mod name;
mod record;
mod store;

pub use digest::Digest;
pub use error::ImageError;
pub use name::{check_name, escape, unescape};
pub use record::{Dropped, FlatRef, ImageRecord, LayerRecord, LayerRef};
pub use store::{Image, Store, default_path};

/// The format on disk that this reads and writes.
pub const FORMAT: &str = "2\n";
/// More layers than this are merged into one tree at import: each is a mount option of its own. The
/// launcher takes no more (`MAX_OVERLAY_LAYERS` in `stockade-policy`): `engine` compares the two.
pub const MAX_LOWER: usize = 10;
