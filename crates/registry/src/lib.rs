//! A registry of images, by the OCI distribution protocol: what a reference names, and the bytes of its
//! manifests and blobs.
//!
//! Nothing is asked of another host than the registry but what a redirect or the realm of a token leads
//! to, by the rules of `client.rs` and `token.rs`. What is sent has never more bytes than was
//! said. It compares the digest of what a reference names; that of a blob, which is read as it comes,
//! its reader compares. It writes nothing, and knows no store.
#![forbid(unsafe_code)]

mod blob;
mod challenge;
mod client;
mod credentials;
mod error;
mod reference;
#[cfg(test)]
mod tests;
mod token;

use std::{path::PathBuf, time::Duration};

pub use blob::Blob;
pub use challenge::Challenge;
pub use client::{Manifest, Registry};
pub use credentials::docker_config;
pub use error::FetchError;
pub use reference::{Reference, ReferenceError};

/// How to ask.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// A file in the form of docker's `config.json`.
    pub credentials: Option<PathBuf>,
    /// The certificate of a private authority, beside the host's.
    pub ca: Option<PathBuf>,
    /// Hosts that are asked by plain HTTP, with a port or without; those of this host are anyway.
    pub insecure_http: Vec<String>,
    /// Hosts beyond the registry's own domain that may get its password.
    pub auth_hosts: Vec<String>,
    /// How long to wait.
    pub timeouts: Timeouts,
}

/// How long to wait for a server.
#[derive(Clone, Copy, Debug)]
pub struct Timeouts {
    /// For its address, and for a connection.
    pub connect: Duration,
    /// For its next byte.
    pub silence: Duration,
    /// For all of a manifest or a token.
    pub document: Duration,
    /// Before the second attempt; it doubles with each.
    pub pause: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        Timeouts {
            connect: Duration::from_secs(10),
            silence: Duration::from_secs(30),
            document: Duration::from_secs(120),
            pause: Duration::from_millis(500),
        }
    }
}
