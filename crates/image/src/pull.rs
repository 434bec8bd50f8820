//! An image from a registry: its blobs come as the import reads them, and are checked as any other's.
//!
//! A reference is resolved once, and all else is asked for by digest. Layers that the store has are not
//! asked for, since the import opens no blob of theirs. Nothing of a blob is written but what is unpacked of
//! it. What the registry may do wrong, and where passwords go, is the crate `registry`'s.

use std::io::Cursor;

use stockade_registry::{Manifest, Options, Reference, Registry};

use crate::{
    error::ImportError,
    manifest::Descriptor,
    source::{Blob, Blobs},
};

/// What an index calls an image's manifest, or another index.
const MANIFESTS: [&str; 4] = [
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
];
/// Digits of a digest in a name that is made of it.
const SHORT: usize = 12;

/// What a reference names, at its registry.
#[derive(Debug)]
pub struct Pull {
    registry: Registry,
    reference: Reference,
    top: Manifest,
}

impl Pull {
    /// Asks the registry what the reference names.
    ///
    /// # Errors
    /// The registry does not say it.
    pub fn resolve(reference: Reference, options: Options) -> Result<Self, ImportError> {
        let registry = Registry::new(reference.clone(), options)?;
        let top = registry.resolve()?;
        Ok(Pull { registry, reference, top })
    }

    /// What was resolved: a manifest, or an index of several.
    pub fn top(&self) -> Descriptor {
        Descriptor {
            media_type: String::new(),
            digest: self.top.digest.clone(),
            size: self.top.bytes.len() as u64,
            platform: None,
            annotations: [].into(),
        }
    }

    /// Whence the image came, with the digest that its tag had.
    pub fn origin(&self) -> String {
        let reference = self.reference.to_string();
        if self.reference.digest().is_some() { reference } else { format!("{reference}@{}", self.top.digest) }
    }
}

impl Blobs for Pull {
    fn blob(&self, descriptor: &Descriptor) -> Result<Blob, ImportError> {
        if descriptor.digest == self.top.digest {
            return Ok(Box::new(Cursor::new(self.top.bytes.clone())));
        }
        if MANIFESTS.contains(&descriptor.media_type.as_str()) {
            return Ok(Box::new(Cursor::new(self.registry.manifest(&descriptor.digest)?.bytes)));
        }
        Ok(Box::new(self.registry.blob(&descriptor.digest, descriptor.size)))
    }
}

/// The name in the store of what was asked for as `text`: the text itself, with its tag. A digest alone
/// is no name, so the first digits of it stand in for a tag.
pub fn name_of(text: &str, reference: &Reference) -> String {
    let named = text.split('@').next().unwrap_or(text);
    let has_tag = named.rsplit('/').next().is_some_and(|last| last.contains(':'));
    match reference.digest() {
        _ if has_tag => named.to_owned(),
        None => format!("{named}:latest"),
        Some(digest) => format!("{named}:sha256-{}", digest.hex().get(..SHORT).unwrap_or_default()),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]

    use super::name_of;

    #[test]
    fn a_pulled_image_has_the_name_that_was_asked_for() {
        let digest = format!("sha256:{}", "0123456789abcdef".repeat(4));
        for (text, name) in [
            ("python", "python:latest"),
            ("python:3.13", "python:3.13"),
            ("localhost:5000/a", "localhost:5000/a:latest"),
            ("localhost:5000/a:1", "localhost:5000/a:1"),
            (&format!("python@{digest}"), "python:sha256-0123456789ab"),
            (&format!("python:3.13@{digest}"), "python:3.13"),
        ] {
            let found = name_of(text, &text.parse().unwrap());
            assert_eq!(found, name);
            stockade_images::check_name(&found).unwrap();
        }
    }
}
