//! Indexes, manifests and configurations, as JSON from outside: which image is meant, and of what it is.
//!
//! What is read is text of at most 4 MiB whose digest the caller has compared. Unknown fields are
//! ignored, as the OCI image specification asks; a digest that is none, a missing field and an
//! absurd number of layers are errors. It reads no file.

use serde::{Deserialize, de::IgnoredAny};
use stockade_images::Digest;

/// The most bytes of an index, manifest or configuration: registries accept 4 MiB.
pub const MAX_JSON_LEN: u64 = 4 << 20;
/// The most layers, as Docker allows. An overlay takes 500.
pub const MAX_IMAGE_LAYERS: usize = 128;

/// An operating system and an architecture, in Go's words.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Platform {
    /// `linux`.
    #[serde(default)]
    pub os: String,
    /// `amd64`.
    #[serde(default)]
    pub architecture: String,
    /// `v8`; empty: any.
    #[serde(default)]
    pub variant: String,
}

impl Platform {
    /// Of this machine.
    pub fn host() -> Self {
        Platform { os: "linux".into(), architecture: "amd64".into(), variant: String::new() }
    }

    /// `OS/ARCHITECTURE` or `OS/ARCHITECTURE/VARIANT`.
    pub fn parse(text: &str) -> Option<Self> {
        let mut parts = text.split('/').map(str::to_owned);
        let (os, architecture) = (parts.next()?, parts.next()?);
        let variant = parts.next().unwrap_or_default();
        (parts.next().is_none() && !os.is_empty() && !architecture.is_empty()).then_some(Platform { os, architecture, variant })
    }

    /// Whether an image for `offered` is one for this.
    fn takes(&self, offered: &Platform) -> bool {
        self.os == offered.os && self.architecture == offered.architecture && (self.variant.is_empty() || self.variant == offered.variant)
    }
}

impl std::fmt::Display for Platform {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "{}/{}", self.os, self.architecture)?;
        if self.variant.is_empty() { Ok(()) } else { write!(out, "/{}", self.variant) }
    }
}

/// What points to a blob.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Descriptor {
    /// What is there.
    #[serde(default)]
    pub media_type: String,
    /// Its digest.
    pub digest: Digest,
    /// Its bytes.
    pub size: u64,
    /// Of an image in an index.
    pub platform: Option<Platform>,
    /// Names among them.
    #[serde(default)]
    pub annotations: std::collections::BTreeMap<String, String>,
}

impl Descriptor {
    /// The name that a tool has given the image: containerd's is whole, the specification's may be a tag.
    pub fn reference(&self) -> Option<&str> {
        ["io.containerd.image.name", "org.opencontainers.image.ref.name"]
            .iter()
            .find_map(|key| self.annotations.get(*key))
            .map(String::as_str)
    }
}

/// An image index, or an image manifest.
#[derive(Debug)]
pub enum Document {
    /// Images to choose from.
    Index(Vec<Descriptor>),
    /// One image.
    Manifest(Manifest),
}

/// The configuration and the layers of an image, bottom first.
#[derive(Clone, Debug)]
pub struct Manifest {
    /// The configuration.
    pub config: Descriptor,
    /// The layers.
    pub layers: Vec<Descriptor>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct RawDocument {
    schema_version: u64,
    manifests: Option<Vec<Descriptor>>,
    config: Option<Descriptor>,
    layers: Option<Vec<Descriptor>>,
}

/// Why JSON from outside is no image.
#[derive(Debug, thiserror::Error)]
pub enum ManifestError {
    /// It is something else.
    #[error("{what} is none: {error}")]
    Json {
        /// What it should be.
        what: &'static str,
        /// Where it is wrong.
        error: serde_json::Error,
    },
    /// Of another version.
    #[error("the manifest has schema version {0}, and 2 is the one that is read")]
    Version(u64),
    /// It has neither what an index has, nor what a manifest has.
    #[error("the manifest has neither `manifests` nor `config` and `layers`")]
    Neither,
    /// A configuration that could be a manifest too.
    #[error("the image's configuration has `schemaVersion`, as manifests have: its digest could mean two images")]
    Ambiguous,
    /// More layers than anybody makes.
    #[error("the image has {0} layers; at most {MAX_IMAGE_LAYERS} are taken")]
    Layers(usize),
    /// Not as many layers as the configuration says.
    #[error("the image has {layers} layers, and its configuration names {diff_ids}")]
    Count {
        /// Of the manifest.
        layers: usize,
        /// Of the configuration.
        diff_ids: usize,
    },
    /// It is for another machine.
    #[error("it is an image for {found}, and {wanted} is wanted; --platform names another")]
    Platform {
        /// What it is for.
        found: String,
        /// What was wanted.
        wanted: String,
    },
    /// An index has no image for this machine.
    #[error("there is no image for {wanted}; there are {}", list(.found))]
    NoPlatform {
        /// What it has.
        found: Vec<String>,
        /// What was wanted.
        wanted: String,
    },
    /// No image has this name.
    #[error("no image there is called {wanted:?}; there are {}", list(.found))]
    NoReference {
        /// What it has.
        found: Vec<String>,
        /// What was wanted.
        wanted: String,
    },
    /// Several images, and none was chosen.
    #[error("there are several images; choose one by --ref: {}", list(.0))]
    Several(Vec<String>),
}

fn list(names: &[String]) -> String {
    if names.is_empty() { "none with a name".into() } else { names.join(", ") }
}

fn parse<'a, T: Deserialize<'a>>(what: &'static str, text: &'a [u8]) -> Result<T, ManifestError> {
    serde_json::from_slice(text).map_err(|error| ManifestError::Json { what, error })
}

/// Reads an index or a manifest.
///
/// # Errors
/// It is neither.
pub fn document(text: &[u8]) -> Result<Document, ManifestError> {
    let raw: RawDocument = parse("the manifest", text)?;
    if raw.schema_version != 2 {
        return Err(ManifestError::Version(raw.schema_version));
    }
    match (raw.manifests, raw.config, raw.layers) {
        (Some(manifests), None, None) => Ok(Document::Index(manifests)),
        (None, Some(config), Some(layers)) if layers.len() <= MAX_IMAGE_LAYERS => Ok(Document::Manifest(Manifest { config, layers })),
        (None, Some(_), Some(layers)) => Err(ManifestError::Layers(layers.len())),
        _ => Err(ManifestError::Neither),
    }
}

/// Chooses the image of an index: by name where one is wanted, and by platform.
///
/// # Errors
/// None fits, or several do.
pub fn choose<'a>(manifests: &'a [Descriptor], wanted: &Platform, reference: Option<&str>) -> Result<&'a Descriptor, ManifestError> {
    let names = |chosen: &[&Descriptor]| chosen.iter().filter_map(|one| one.reference().map(str::to_owned)).collect::<Vec<_>>();
    let named = manifests.iter().filter(|one| reference.is_none_or(|reference| one.reference() == Some(reference))).collect::<Vec<_>>();
    if let (Some(reference), true) = (reference, named.is_empty()) {
        return Err(ManifestError::NoReference { found: names(&manifests.iter().collect::<Vec<_>>()), wanted: reference.to_owned() });
    }
    // Without a platform it is said by the image itself.
    let fitting: Vec<&Descriptor> =
        named.iter().copied().filter(|one| one.platform.as_ref().is_none_or(|offered| wanted.takes(offered))).collect();
    let first = *fitting.first().ok_or_else(|| ManifestError::NoPlatform {
        found: named.iter().filter_map(|one| one.platform.as_ref().map(ToString::to_string)).collect(),
        wanted: wanted.to_string(),
    })?;
    // An index may have variants of one architecture, and the first is its default; several names are several images.
    let others = fitting.iter().filter(|one| one.digest != first.digest && one.reference() != first.reference()).count();
    let unnamed = fitting.iter().filter(|one| one.digest != first.digest && one.platform.is_none()).count();
    if others + unnamed > 0 {
        return Err(ManifestError::Several(names(&fitting)));
    }
    Ok(first)
}

/// What is used of an image's configuration.
#[derive(Clone, Debug, Deserialize)]
pub struct Config {
    /// What it is for.
    #[serde(flatten)]
    pub platform: Platform,
    /// When it was made.
    pub created: Option<String>,
    /// How it is run.
    #[serde(default)]
    pub config: Option<RunConfig>,
    /// Of what its root is made.
    pub rootfs: RootFs,
}

/// What an index and a manifest have.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Kind {
    schema_version: Option<IgnoredAny>,
}

/// How an image is run.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct RunConfig {
    /// `NAME=VALUE` each.
    #[serde(default)]
    pub env: Option<Vec<String>>,
    /// The working directory.
    #[serde(default)]
    pub working_dir: Option<String>,
    /// The program.
    #[serde(default)]
    pub entrypoint: Option<Vec<String>>,
    /// Its arguments.
    #[serde(default)]
    pub cmd: Option<Vec<String>>,
    /// The user.
    #[serde(default)]
    pub user: Option<String>,
}

/// The layers of a configuration.
#[derive(Clone, Debug, Deserialize)]
pub struct RootFs {
    /// Of the uncompressed archives, bottom first.
    pub diff_ids: Vec<Digest>,
}

/// Reads a configuration of so many layers for a platform.
///
/// # Errors
/// It is none, or of something else.
pub fn config(text: &[u8], layers: usize, wanted: &Platform) -> Result<Config, ManifestError> {
    // A digest names one image: what is read as a manifest has this field, and no configuration has.
    let kind: Kind = parse("the image's configuration", text)?;
    if kind.schema_version.is_some() {
        return Err(ManifestError::Ambiguous);
    }
    let config: Config = parse("the image's configuration", text)?;
    if config.rootfs.diff_ids.len() != layers {
        return Err(ManifestError::Count { layers, diff_ids: config.rootfs.diff_ids.len() });
    }
    if !wanted.takes(&config.platform) {
        return Err(ManifestError::Platform { found: config.platform.to_string(), wanted: wanted.to_string() });
    }
    Ok(config)
}

/// An image of a `docker save` archive of the old shape.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct DockerImage {
    /// The name of its configuration's file.
    pub config: String,
    /// Its names.
    #[serde(default)]
    pub repo_tags: Option<Vec<String>>,
    /// The names of its layers' files.
    pub layers: Vec<String>,
}

/// Reads `manifest.json` of a `docker save` archive, and chooses the image of this name.
///
/// # Errors
/// It is none, no image has the name, or several images are there and no name.
pub fn docker_image(text: &[u8], reference: Option<&str>) -> Result<DockerImage, ManifestError> {
    let mut images: Vec<DockerImage> = parse("manifest.json", text)?;
    let tags = |image: &DockerImage| image.repo_tags.clone().unwrap_or_default();
    let found: Vec<String> = images.iter().flat_map(tags).collect();
    if let Some(reference) = reference {
        images.retain(|image| tags(image).iter().any(|tag| tag == reference));
    }
    match (images.len(), reference) {
        (1, _) if images[0].layers.len() > MAX_IMAGE_LAYERS => Err(ManifestError::Layers(images[0].layers.len())),
        (1, _) => Ok(images.remove(0)),
        (0, Some(wanted)) => Err(ManifestError::NoReference { found, wanted: wanted.to_owned() }),
        (0, None) => Err(ManifestError::Neither),
        _ => Err(ManifestError::Several(found)),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]
    use super::*;

    fn descriptor(digit: &str, platform: Option<&str>, name: Option<&str>) -> Descriptor {
        let annotations = name.map(|name| ("org.opencontainers.image.ref.name".to_owned(), name.to_owned())).into_iter().collect();
        let digest = Digest::from_hex(&digit.repeat(64)).unwrap();
        Descriptor { media_type: String::new(), digest, size: 1, platform: platform.and_then(Platform::parse), annotations }
    }

    #[test]
    fn an_image_is_chosen_by_platform_and_name_and_never_guessed() {
        let both = [
            descriptor("a", Some("linux/arm64"), None),
            descriptor("b", Some("linux/amd64"), None),
            descriptor("c", Some("unknown/unknown"), None),
        ];
        let host = Platform::host();
        assert_eq!(choose(&both, &host, None).unwrap().digest, both[1].digest);
        assert!(matches!(choose(&both[..1], &host, None), Err(ManifestError::NoPlatform { found, .. }) if found == ["linux/arm64"]));
        let named = [descriptor("a", None, Some("one")), descriptor("b", None, Some("two"))];
        assert_eq!(choose(&named, &host, Some("two")).unwrap().digest, named[1].digest);
        assert!(matches!(choose(&named, &host, None), Err(ManifestError::Several(names)) if names == ["one", "two"]));
        assert!(matches!(choose(&named, &host, Some("three")), Err(ManifestError::NoReference { .. })));
    }

    #[test]
    fn what_leads_outside_is_no_digest_and_too_many_layers_are_no_image() {
        let layer = format!(r#"{{"digest":"sha256:{}","size":1}}"#, "a".repeat(64));
        let manifest = |layers: &[&str]| format!(r#"{{"schemaVersion":2,"config":{layer},"layers":[{}]}}"#, layers.join(","));
        let read = |text: &str| document(text.as_bytes());
        assert!(matches!(read(&manifest(&[&layer])), Ok(Document::Manifest(_))));
        assert!(read(&manifest(&[r#"{"digest":"sha256:../../../etc/passwd","size":1}"#])).is_err());
        assert!(matches!(read(&manifest(&vec![layer.as_str(); 129])), Err(ManifestError::Layers(129))));
        assert!(matches!(read(r#"{"schemaVersion":1,"name":"x"}"#), Err(ManifestError::Version(1))));
        assert!(matches!(read(r#"{"schemaVersion":2}"#), Err(ManifestError::Neither)));
    }

    #[test]
    fn what_is_a_manifest_is_no_configuration() {
        let blob = format!(r#"{{"digest":"sha256:{}","size":1}}"#, "a".repeat(64));
        let configuration = r#""os":"linux","architecture":"amd64","rootfs":{"diff_ids":[]}"#;
        let both = format!(r#"{{"schemaVersion":2,"config":{blob},"layers":[],{configuration}}}"#);
        assert!(matches!(document(both.as_bytes()), Ok(Document::Manifest(_))), "the control: it is a manifest");
        let read = |text: &str| config(text.as_bytes(), 0, &Platform::host());
        assert!(matches!(read(&both), Err(ManifestError::Ambiguous)));
        assert!(read(&both.replace(r#""schemaVersion":2,"#, "")).is_ok(), "the control: without the field it is a configuration");
    }
}
