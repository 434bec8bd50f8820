//! Images that a test makes, byte by byte, and a store of its own to import them to.

use std::{
    ffi::OsStr,
    fs,
    io::Write,
    path::{Path, PathBuf},
    process::{Command, Output},
};

use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::{
    exec::{program_path, stockade, text},
    runner::{directory, is_root},
};

/// An archive, entry by entry, also such as no tar would write.
#[derive(Clone, Debug, Default)]
pub struct Tar(Vec<u8>);

impl Tar {
    pub fn new() -> Self {
        Tar::default()
    }

    /// An entry of any type, mode, owner and size.
    pub fn entry(mut self, name: &str, flag: u8, link: &str, mode: u32, owner: u32, content: &[u8]) -> Self {
        let mut header = [0_u8; 512];
        let mut put = |at: usize, bytes: &[u8]| header[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &name.as_bytes()[..name.len().min(100)]);
        put(100, format!("{mode:07o}\0{owner:07o}\0{owner:07o}\0{:011o}\0{:011o}\0        ", content.len(), 1_600_000_000).as_bytes());
        put(156, &[flag]);
        put(157, &link.as_bytes()[..link.len().min(100)]);
        put(257, b"ustar\x0000");
        let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
        header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        self.0.extend(header);
        self.0.extend(content);
        self.0.resize(self.0.len().next_multiple_of(512), 0);
        self
    }

    pub fn file(self, name: &str, content: &str) -> Self {
        self.entry(name, b'0', "", 0o644, 0, content.as_bytes())
    }

    pub fn directory(self, name: &str) -> Self {
        self.entry(name, b'5', "", 0o755, 0, b"")
    }

    pub fn symlink(self, name: &str, target: &str) -> Self {
        self.entry(name, b'2', target, 0o777, 0, b"")
    }

    pub fn hard_link(self, name: &str, target: &str) -> Self {
        self.entry(name, b'1', target, 0o644, 0, b"")
    }

    /// A PAX header for the entry after it.
    pub fn pax(self, key: &str, value: &str) -> Self {
        let rest = format!(" {key}={value}\n");
        let mut length = rest.len();
        while format!("{length}{rest}").len() != length {
            length = format!("{length}{rest}").len();
        }
        self.entry("pax", b'x', "", 0o644, 0, format!("{length}{rest}").as_bytes())
    }

    /// The archive with its end.
    pub fn bytes(&self) -> Vec<u8> {
        [&self.0[..], &[0; 1024]].concat()
    }
}

pub fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

pub fn zstd(bytes: &[u8]) -> Vec<u8> {
    zstd::encode_all(bytes, 1).unwrap()
}

pub fn digest(bytes: &[u8]) -> String {
    format!("sha256:{}", Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect::<String>())
}

/// One layer: what is stored, and the archive in it.
#[derive(Clone, Debug)]
pub struct Layer {
    pub blob: Vec<u8>,
    pub archive: Vec<u8>,
}

impl Layer {
    pub fn gzip(tar: &Tar) -> Self {
        Layer { blob: gzip(&tar.bytes()), archive: tar.bytes() }
    }

    pub fn zstd(tar: &Tar) -> Self {
        Layer { blob: zstd(&tar.bytes()), archive: tar.bytes() }
    }

    pub fn plain(tar: &Tar) -> Self {
        Layer { blob: tar.bytes(), archive: tar.bytes() }
    }
}

/// The files of an OCI layout with one image called `test`, and what a test may change of them.
#[derive(Clone, Debug)]
pub struct Layout {
    pub blobs: Vec<(String, Vec<u8>)>,
    pub index: Value,
}

impl Layout {
    pub fn new(layers: &[Layer]) -> Self {
        let diff_ids: Vec<String> = layers.iter().map(|layer| digest(&layer.archive)).collect();
        Self::with(layers, &diff_ids, "linux/amd64", json!({"Env": ["A=1"], "Cmd": ["sh"], "WorkingDir": "/w", "User": "1000"}))
    }

    /// With these diff-ids, for this platform, to be run so.
    pub fn with(layers: &[Layer], diff_ids: &[String], platform: &str, run: Value) -> Self {
        let (os, architecture) = platform.split_once('/').unwrap();
        let config = json!({"os": os, "architecture": architecture, "config": run, "rootfs": {"type": "layers", "diff_ids": diff_ids}});
        let config = config.to_string().into_bytes();
        let described = |bytes: &[u8]| json!({"mediaType": "x", "digest": digest(bytes), "size": bytes.len()});
        let described_layers: Vec<Value> = layers.iter().map(|layer| described(&layer.blob)).collect();
        let manifest = json!({"schemaVersion": 2, "config": described(&config), "layers": described_layers}).to_string().into_bytes();
        let mut top = described(&manifest);
        top["annotations"] = json!({"org.opencontainers.image.ref.name": "test"});
        top["platform"] = json!({"os": os, "architecture": architecture});
        let blobs = layers.iter().map(|layer| layer.blob.clone()).chain([config, manifest]);
        let blobs = blobs.map(|blob| (digest(&blob), blob)).collect();
        Layout { blobs, index: json!({"schemaVersion": 2, "manifests": [top]}) }
    }

    /// The digest of its image.
    pub fn digest(&self) -> String {
        self.blobs.last().unwrap().0.clone()
    }

    fn files(&self) -> Vec<(String, Vec<u8>)> {
        let blobs = self.blobs.iter().map(|(digest, blob)| (format!("blobs/{}", digest.replace(':', "/")), blob.clone()));
        let top = [("oci-layout", json!({"imageLayoutVersion": "1.0.0"})), ("index.json", self.index.clone())];
        blobs.chain(top.map(|(name, value)| (name.to_owned(), value.to_string().into_bytes()))).collect()
    }

    /// Writes it as a directory.
    pub fn write(&self, name: &str) -> PathBuf {
        let path = directory().join(name);
        for (file, content) in self.files() {
            let file = path.join(file);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, content).unwrap();
        }
        path
    }

    /// As an archive.
    pub fn archive(&self) -> Vec<u8> {
        self.files().iter().fold(Tar::new(), |tar, (name, content)| tar.entry(name, b'0', "", 0o644, 0, content)).bytes()
    }
}

/// A file of `docker save` in the old shape.
pub fn docker_save(layers: &[Layer], name: &str) -> Vec<u8> {
    let diff_ids: Vec<String> = layers.iter().map(|layer| digest(&layer.archive)).collect();
    let config =
        json!({"os": "linux", "architecture": "amd64", "config": {"Cmd": ["sh"]}, "rootfs": {"type": "layers", "diff_ids": diff_ids}});
    let config = config.to_string();
    let file = format!("{}.json", &digest(config.as_bytes())[7..]);
    let names: Vec<String> = (0..layers.len()).map(|number| format!("layer{number}/layer.tar")).collect();
    let list = json!([{"Config": file, "RepoTags": [name], "Layers": names}]).to_string();
    let tar = Tar::new().file(&file, &config).file("manifest.json", &list);
    let layers = names.iter().zip(layers).enumerate();
    // As skopeo does, a layer is a link to another file of the archive.
    let tar = layers.fold(tar, |tar, (number, (name, layer))| {
        let blob = format!("blob{number}.tar");
        tar.entry(&blob, b'0', "", 0o644, 0, &layer.archive).symlink(name, &format!("../{blob}"))
    });
    tar.bytes()
}

/// The store of this test.
pub fn store() -> PathBuf {
    if is_root() { directory().join("store") } else { directory().join("data/stockade/images") }
}

/// `stockade image` with the store of this test. Root's has one place, so root has the test's there in a mount
/// namespace of the command's own.
pub fn image<S: AsRef<OsStr>>(arguments: impl IntoIterator<Item = S>) -> Command {
    if !is_root() {
        let mut command = stockade(["image"]);
        command.args(arguments).env("XDG_DATA_HOME", directory().join("data"));
        return command;
    }
    fs::create_dir_all(store()).unwrap();
    let script =
        "mount -t tmpfs none /var/lib && mkdir -p /var/lib/stockade/images && mount --bind \"$0\" /var/lib/stockade/images && exec \"$@\"";
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-c", script]).arg(store()).arg(program_path().unwrap()).arg("image").args(arguments);
    command
}

/// Runs it, and what it said.
pub fn imported(path: &Path, options: &[&str]) -> Output {
    image([&["import", text(path)], options].concat()).output().unwrap()
}

/// The tree of each layer of the image of this name, bottom first, as `inspect` says.
pub fn trees(name: &str) -> Vec<PathBuf> {
    let output = image(["inspect", name]).output().unwrap();
    let known: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{output:?}"));
    let keys = known["layers"].as_array().unwrap().iter().map(|layer| layer["key"].as_str().unwrap()[7..].to_owned());
    keys.map(|key| store().join("layers").join(key).join("root")).collect()
}
