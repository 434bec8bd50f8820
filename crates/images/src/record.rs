//! What the store says of an image and of a layer, in JSON. An unknown field is an error: this program
//! would not know what it must obey.

use serde::{Deserialize, Serialize};

use crate::Digest;

/// What is kept of an image's manifest and configuration.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ImageRecord {
    /// The image's digest: its manifest's, or its configuration's where it came without a manifest.
    pub digest: Digest,
    /// The digest of its configuration.
    pub config_digest: Digest,
    /// The operating system, as the configuration says.
    pub os: String,
    /// The architecture in Go's words, such as `amd64`.
    pub architecture: String,
    /// When it was made, as the configuration says.
    pub created: Option<String>,
    /// Its layers, bottom first.
    pub layers: Vec<LayerRef>,
    /// The merged tree of all layers, where there are many.
    pub flat: Option<FlatRef>,
    /// `NAME=VALUE` each.
    pub env: Vec<String>,
    /// The working directory; empty: the root.
    pub working_dir: String,
    /// The program and its first arguments.
    pub entrypoint: Vec<String>,
    /// The default arguments, or the program where there is no entry point.
    pub cmd: Vec<String>,
    /// The user that the image asks for, which no run becomes.
    pub user: String,
    /// Bytes of all files in its layers, shared ones included.
    pub size_bytes: u64,
    /// What it was imported from.
    pub source: String,
    /// When, in seconds since 1970.
    pub imported_at: u64,
}

impl ImageRecord {
    /// The layers that an overlay is made of, bottom first. One that an image has twice is there once, at
    /// its upper place: the kernel takes no directory twice (ELOOP), and the upper hides all of the lower.
    pub fn lower(&self) -> impl Iterator<Item = &LayerRef> {
        let is_last = |(at, layer): &(usize, &LayerRef)| !self.layers[at + 1..].iter().any(|above| above.key == layer.key);
        self.layers.iter().enumerate().filter(is_last).map(|(_, layer)| layer)
    }
}

/// A layer of an image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayerRef {
    /// The digest of its uncompressed archive.
    pub diff_id: Digest,
    /// Its directory in `layers`: the diff-id, or the chain-id.
    pub key: Digest,
}

/// The merged tree of an image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FlatRef {
    /// Its directory in `flat`.
    pub chain_id: Digest,
    /// The digest of the tree.
    #[serde(rename = "tree")]
    pub tree_digest: Digest,
}

/// What is known of an unpacked layer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayerRecord {
    /// The digest of its uncompressed archive.
    pub diff_id: Digest,
    /// Bytes of its files.
    pub bytes: u64,
    /// Files, directories, links and whiteouts that were made of it.
    pub entries: u64,
    /// It removes or links to files of layers below, or leaves a directory to them. Where such a layer
    /// is the lowest its tree has no whiteouts.
    pub refers_below: bool,
    /// What the tree has not of the archive.
    pub dropped: Dropped,
    /// The digest of the tree, which `verify` compares.
    #[serde(rename = "tree")]
    pub tree_digest: Digest,
}

/// What was left out of a tree, counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Dropped {
    /// Files and directories that lost a set-ID or sticky bit.
    pub set_id: u64,
    /// Block and character devices.
    pub devices: u64,
    /// Fifos.
    pub fifos: u64,
    /// Extended attributes, file capabilities among them.
    pub xattrs: u64,
    /// Entries of another owner or group than 0, which belong to the store's owner now.
    pub owners: u64,
}

impl Dropped {
    /// Both together.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Dropped {
            set_id: self.set_id + other.set_id,
            devices: self.devices + other.devices,
            fifos: self.fifos + other.fifos,
            xattrs: self.xattrs + other.xattrs,
            owners: self.owners + other.owners,
        }
    }
}
