//! The lines of a session: what its client asks for, exactly as written, and the answers
//! about files.
//!
//! Unknown fields are refused by name, as a request's are. Values are not judged here.

use alloc::{boxed::Box, string::String, vec::Vec};
use serde::{Deserialize, Serialize};

use crate::{Encoding, Request, TextOrBase64};

/// What a line asks for.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "lowercase")]
pub enum Line {
    /// To run code: what a request of `exec` asks for.
    Run(Box<Request>),
    /// To write a file.
    Write(Write),
    /// To read one.
    Read(Read),
    /// To list a directory.
    List(List),
    /// To remove a file, a link or an empty directory.
    Remove(Remove),
    /// To cancel what runs.
    Cancel(Cancel),
    /// To empty everything that the session keeps.
    Reset(Only),
    /// To end the session.
    Close(Only),
}

/// See [`Line::Write`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Write {
    /// Below scratch, or absolute as the code sees it.
    pub path: String,
    /// The bytes.
    pub contents: TextOrBase64,
    /// They are added to what is there.
    #[serde(default)]
    pub append: bool,
    /// Where not all can be written, what stands there stays as it was. That takes room for both.
    #[serde(default)]
    pub whole: bool,
    /// Echoed.
    pub id: Option<String>,
}

/// See [`Line::Read`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Read {
    /// As in [`Write`].
    pub path: String,
    /// From which byte on.
    #[serde(default)]
    pub offset: u64,
    /// How many; absent: all.
    pub length: Option<u64>,
    /// `base64`: never as text.
    #[serde(default)]
    pub encoding: Encoding,
    /// Echoed.
    pub id: Option<String>,
}

/// See [`Line::List`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct List {
    /// As in [`Write`]; absent: scratch.
    #[serde(default)]
    pub path: String,
    /// Everything below it too.
    #[serde(default)]
    pub recursive: bool,
    /// Echoed.
    pub id: Option<String>,
}

/// See [`Line::Remove`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Remove {
    /// As in [`Write`].
    pub path: String,
    /// Echoed.
    pub id: Option<String>,
}

/// See [`Line::Cancel`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cancel {
    /// The `id` of the request that is meant; absent: whichever runs.
    pub run: Option<String>,
    /// Echoed.
    pub id: Option<String>,
}

/// An op without anything else.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Only {
    /// Echoed.
    pub id: Option<String>,
}

/// A file that was written.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct WrittenFile {
    /// Its path.
    pub path: String,
    /// Its size in bytes.
    pub size: u64,
}

/// A file, or a part of one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct FilePart {
    /// Its path.
    pub path: String,
    /// The whole file's size in bytes.
    pub size: u64,
    /// Where this part begins.
    pub offset: u64,
    /// Its text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
    /// Its bytes, where they are not UTF-8 or `base64` was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub base64: Option<String>,
}

/// A directory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct DirectoryListing {
    /// Its path.
    pub path: String,
    /// What lies in it.
    pub entries: Vec<DirectoryEntry>,
    /// There is more than is listed.
    pub truncated: bool,
}

/// One entry of a directory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct DirectoryEntry {
    /// Its path.
    pub path: String,
    /// The name is not UTF-8: `path` shows U+FFFD for the bytes that are not.
    #[serde(default, skip_serializing_if = "core::ops::Not::not")]
    pub lossy: bool,
    /// `file`, `directory`, `link` or `other`.
    pub kind: String,
    /// Bytes of a file.
    pub size: u64,
}
