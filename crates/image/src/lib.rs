//! Images from outside into the store of images.
//!
//! Layers are decompressed and unpacked by processes without rights (`confine.rs`); what is read outside
//! them is JSON of at most 4 MiB and the headers of archives, by code without `unsafe`. Nothing of an image is
//! run. An import that fails changes no name, and no image that was there (`writer.rs`). It makes no sandbox and mounts nothing.
#![forbid(unsafe_code)]

pub mod arguments;
pub mod confine;
pub mod decompress;
pub mod error;
pub mod import;
pub mod layer;
pub mod manifest;
pub mod opaque;
pub mod progress;
pub mod pull;
pub mod show;
pub mod source;
pub mod tar;
pub mod tree;
pub mod unpack;
pub mod writer;
