//! Archives of layers, and the JSON of container images.

use std::{
    fs::File,
    io::{BufReader, Read, Write},
    os::fd::OwnedFd,
    path::PathBuf,
    sync::OnceLock,
};

use stockade_image::{
    decompress::decompress,
    manifest::{self, Document, MAX_IMAGE_LAYERS, Platform},
    tar::Archive,
    unpack::{Limits, Unpacker},
};

use super::Target;

/// What an input expands to is not compared further.
const MAX_EXPANDED: u64 = 1 << 20;

/// One entry of an archive, with its checksum.
fn entry(name: &str, flag: u8, link: &str, content: &[u8]) -> Vec<u8> {
    let mut header = vec![0_u8; 512];
    let mut put = |at: usize, bytes: &[u8]| header[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, name.as_bytes());
    put(100, format!("0000755\x000000000\x000000000\0{:011o}\x0014000000000\0        ", content.len()).as_bytes());
    put(156, &[flag]);
    put(157, link.as_bytes());
    put(257, b"ustar\x0000");
    sign(&mut header);
    header.extend(content);
    header.resize(header.len().next_multiple_of(512), 0);
    header
}

fn sign(header: &mut [u8]) {
    header[148..156].fill(b' ');
    let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
    header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
}

/// A right checksum for each block that could be a header: a wrong one is found at once, and nothing behind it.
fn signed(input: &[u8]) -> Vec<u8> {
    let mut blocks = input.to_vec();
    for block in blocks.chunks_exact_mut(512).filter(|block| &block[257..262] == b"ustar") {
        sign(block);
    }
    blocks
}

fn tree() -> &'static PathBuf {
    static TREE: OnceLock<PathBuf> = OnceLock::new();
    TREE.get_or_init(|| std::env::temp_dir().join(format!("fuzz-layer-{}", std::process::id())))
}

fn seeds() -> Vec<Vec<u8>> {
    vec![
        [entry("a/", b'5', "", b""), entry("a/f", b'0', "", b"x"), entry("l", b'2', "a", b""), entry("l/g", b'1', "a/f", b"")].concat(),
        [entry("x", b'x', "", b"11 path=ab\n20 linkpath=../../a\n"), entry("y", b'2', "..", b""), entry("a/.wh.f", b'0', "", b"")].concat(),
        [entry("L", b'L', "", b"long/name\0"), entry("a/.wh..wh..opq", b'0', "", b""), vec![0; 1024]].concat(),
    ]
}

const WORDS: &[&[u8]] =
    &[b"ustar\x0000", b"ustar  \0", b".wh.", b".wh..wh..opq", b"../", b"/", b"a/f", b"11 path=ab\n", b"GNU.sparse.", b"\0"];

pub const TAR: Target = Target {
    name: "tar",
    about: "archives of layers, read",
    corpus: include_str!("../corpus/tar"),
    seeds,
    words: WORDS,
    longest: 4 << 10,
    run: |input| {
        let input = signed(input);
        let mut archive = Archive::new(&input[..]);
        let mut entries = 0;
        while let Ok(Some(entry)) = archive.next_entry() {
            entries += 1;
            assert!(entries <= input.len() / 512 && entry.position <= input.len() as u64, "each has a header");
            assert!(!entry.name.contains(&0) && !entry.target.contains(&0));
            let mut content = Vec::new();
            if archive.copy_to(&mut content).is_ok() {
                assert_eq!(content.len() as u64, entry.size);
            }
        }
    },
};

pub const LAYER: Target = Target {
    name: "layer",
    about: "archives of layers, unpacked",
    corpus: include_str!("../corpus/layer"),
    seeds,
    words: WORDS,
    longest: 4 << 10,
    run: unpack,
};

/// Nothing is made beside the tree, and no more in it than is allowed.
fn unpack(input: &[u8]) {
    let input = &signed(input)[..];
    let root = tree();
    let (inner, below) = (root.join("tree"), root.join("below"));
    std::fs::remove_dir_all(&inner).unwrap_or_default();
    std::fs::create_dir_all(&inner).unwrap_or_default();
    std::fs::create_dir_all(below.join("a")).unwrap_or_default();
    let (Ok(tree), Ok(store)) = (File::open(&inner), File::open(root)) else { panic!("made before") };
    let unpacker = Unpacker::new(OwnedFd::from(tree), OwnedFd::from(store), vec!["below".into()], Limits { bytes: 1 << 16, entries: 64 });
    let done = unpacker.unpack(BufReader::new(input));
    assert!(done.is_err() || done.is_ok_and(|done| done.bytes <= 1 << 16 && done.entries <= 64));
    let names = |path: &PathBuf| std::fs::read_dir(path).map(|entries| entries.count()).unwrap_or_default();
    assert_eq!((names(root), names(&below), names(&below.join("a"))), (2, 1, 0), "nothing beside the tree");
    std::fs::remove_dir_all(root).unwrap_or_default();
}

pub const MANIFEST: Target = Target {
    name: "manifest",
    about: "indexes, manifests, configurations and manifest.json",
    corpus: include_str!("../corpus/manifest"),
    seeds: || {
        let digest = format!("sha256:{}", "a".repeat(64));
        let blob = format!(r#"{{"digest":"{digest}","size":1,"platform":{{"os":"linux","architecture":"amd64"}}}}"#);
        let texts = [
            format!(r#"{{"schemaVersion":2,"manifests":[{blob}]}}"#),
            format!(r#"{{"schemaVersion":2,"config":{blob},"layers":[{blob}]}}"#),
            format!(r#"{{"os":"linux","architecture":"amd64","config":{{"Env":["A=1"]}},"rootfs":{{"diff_ids":["{digest}"]}}}}"#),
            r#"[{"Config":"a.json","RepoTags":["a:b"],"Layers":["a/layer.tar"]}]"#.to_owned(),
        ];
        texts.iter().map(|text| text.as_bytes().to_vec()).collect()
    },
    words: &[b"\"manifests\":", b"\"layers\":", b"\"digest\":", b"sha256:", b"../", b"null", b"linux/amd64", b"[", b"{"],
    longest: 2 << 10,
    run: |input| {
        let host = Platform::host();
        match manifest::document(input) {
            Ok(Document::Index(manifests)) => {
                if let Ok(chosen) = manifest::choose(&manifests, &host, None) {
                    assert!(manifests.iter().any(|one| one.digest == chosen.digest), "one that is there");
                    assert!(chosen.digest.hex().len() == 64 && !chosen.digest.hex().contains('/'));
                }
            }
            Ok(Document::Manifest(image)) => assert!(image.layers.len() <= MAX_IMAGE_LAYERS),
            Err(_) => {}
        }
        if let Ok(config) = manifest::config(input, 1, &host) {
            assert_eq!(config.rootfs.diff_ids.len(), 1);
        }
        if let Ok(image) = manifest::docker_image(input, None) {
            assert!(image.layers.len() <= MAX_IMAGE_LAYERS);
        }
    },
};

pub const COMPRESSED: Target = Target {
    name: "compressed",
    about: "gzip and zstd, with what may come around them",
    corpus: include_str!("../corpus/compressed"),
    seeds: || {
        vec![
            b"\x1f\x8b\x08\0\0\0\0\0\0\x03\x4b\x04\0\x43\xbe\xb7\xe8\x01\0\0\0".to_vec(),
            b"\x28\xb5\x2f\xfd\x20\x01\x09\0\0a".to_vec(),
            b"\x50\x2a\x4d\x18\x03\0\0\0abc\x28\xb5\x2f\xfd\x20\x01\x09\0\0a".to_vec(),
        ]
    },
    words: &[b"\x1f\x8b\x08", b"\x28\xb5\x2f\xfd", b"\x50\x2a\x4d\x18"],
    longest: 1 << 10,
    run: |input| {
        /// Ends a stream that expands without end, as the writer of the store does.
        struct Bounded(u64);
        impl Write for Bounded {
            fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
                self.0 = self.0.checked_sub(bytes.len() as u64).ok_or(std::io::ErrorKind::WriteZero)?;
                Ok(bytes.len())
            }

            fn flush(&mut self) -> std::io::Result<()> {
                Ok(())
            }
        }
        let begins_so = matches!(stockade_image::decompress::Compression::of(input), stockade_image::decompress::Compression::None);
        let done = decompress(input.take(u64::MAX), Bounded(MAX_EXPANDED));
        assert!(!(begins_so && done.is_ok()), "what is not compressed is an error");
    },
};
