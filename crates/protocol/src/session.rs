//! The lines of a session: what its client asks for, exactly as written.
//!
//! Unknown fields are refused by name, as a request's are. Values are not judged here.

use alloc::{boxed::Box, string::String};
use serde::Deserialize;

use crate::{Encoding, Request, TextOrBase64};

/// What a line asks for.
#[derive(Clone, Debug, PartialEq, Deserialize)]
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
    /// To cancel what runs.
    Cancel(Cancel),
    /// To make everything anew that the session keeps.
    Reset(Only),
    /// To end the session.
    Close(Only),
}

/// See [`Line::Write`].
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Write {
    /// Below scratch, or absolute as the code sees it.
    pub path: String,
    /// The bytes.
    pub contents: TextOrBase64,
    /// They are added to what is there.
    #[serde(default)]
    pub append: bool,
    /// Echoed.
    pub id: Option<String>,
}

/// See [`Line::Read`].
#[derive(Clone, Debug, PartialEq, Deserialize)]
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
#[derive(Clone, Debug, PartialEq, Deserialize)]
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

/// See [`Line::Cancel`].
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cancel {
    /// The `id` of the request that is meant; absent: whichever runs.
    pub run: Option<String>,
    /// Echoed.
    pub id: Option<String>,
}

/// An op without anything else.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Only {
    /// Echoed.
    pub id: Option<String>,
}
