//! Where an image comes from on this host: an OCI image layout, an archive of one, or `docker save`.
//!
//! A blob is found by its digest alone, and a file of an archive by its name there; no path of an image
//! becomes one of the host. Nothing that is opened in a layout's directory is a link or leads out of it.
//! It compares no digest of a layer: its reader does. An archive that is compressed must be
//! decompressed before, by the same confined process as a layer.

use std::{
    collections::HashMap,
    fs::File,
    io::{BufReader, Read, Seek},
    os::{
        fd::{AsFd, OwnedFd},
        unix::fs::OpenOptionsExt,
    },
    path::{Path, PathBuf},
    sync::Arc,
};

use rustix::fs::{FileType, Mode, OFlags, ResolveFlags, fstat, openat2};
use sha2::{Digest as _, Sha256};
use stockade_images::Digest;
use stockade_protocol::text::escape_bytes;

use crate::{
    error::{Attempt, ImportError},
    manifest::{self, Descriptor, Document, MAX_JSON_LEN, Platform},
    tar::{Archive, Kind, Section},
};

/// The most files of an archive: each is a blob, or a few to a layer.
const MAX_FILES: usize = 10_000;
/// The longest name or target in it, in bytes: all of them are kept in memory.
const MAX_NAME_LEN: usize = 4096;
/// The most links that lead from one name in an archive to another.
const MAX_LINKS: usize = 8;
/// The most indexes in indexes.
const MAX_INDEXES: usize = 4;

/// Bytes that are read once.
pub type Blob = Box<dyn Read + Send>;

/// One layer of an image that was found.
#[derive(Clone, Debug)]
pub struct Layer {
    /// The digest of its uncompressed archive.
    pub diff_id: Digest,
    /// Where it is.
    pub blob: LayerBlob,
}

/// Where a layer is.
#[derive(Clone, Debug)]
pub enum LayerBlob {
    /// A blob of this digest and size.
    Described(Descriptor),
    /// A file of an archive of `docker save`, which promises only the diff-id.
    File(String),
}

/// An image that was found, with its configuration; its layers are to be read.
#[derive(Clone, Debug)]
pub struct Found {
    /// Its digest, of the manifest, or of the configuration where there is no manifest.
    pub digest: Digest,
    /// Of the configuration.
    pub config_digest: Digest,
    /// The configuration.
    pub config: manifest::Config,
    /// Bottom first.
    pub layers: Vec<Layer>,
    /// The name that it comes with.
    pub name: Option<String>,
}

/// What has the blobs of an image.
pub trait Blobs {
    /// Opens a blob, from its beginning. It may have another content than its digest says, and more bytes.
    ///
    /// # Errors
    /// It is missing or cannot be read.
    fn blob(&self, descriptor: &Descriptor) -> Result<Blob, ImportError>;

    /// Opens a file of an archive of `docker save`.
    ///
    /// # Errors
    /// It is missing.
    fn file(&self, name: &str) -> Result<Blob, ImportError> {
        Err(ImportError::Missing { what: format!("the file {name}") })
    }
}

/// Reads JSON of a blob, and compares its size and digest.
///
/// # Errors
/// It is missing, too long, or another.
pub fn json(blobs: &dyn Blobs, descriptor: &Descriptor) -> Result<Vec<u8>, ImportError> {
    let what = format!("the blob {}", descriptor.digest);
    let bytes = read_json(blobs.blob(descriptor)?, &what)?;
    if bytes.len() as u64 != descriptor.size {
        return Err(ImportError::Size { what, found: bytes.len() as u64, expected: descriptor.size });
    }
    let found = digest_of(&bytes);
    if found != descriptor.digest {
        return Err(ImportError::Digest { what, found, expected: descriptor.digest.clone() });
    }
    Ok(bytes)
}

/// The digest of bytes in memory.
pub fn digest_of(bytes: &[u8]) -> Digest {
    Digest::of_bytes(&Sha256::digest(bytes).into())
}

fn read_json(blob: Blob, what: &str) -> Result<Vec<u8>, ImportError> {
    let mut bytes = Vec::new();
    blob.take(MAX_JSON_LEN + 1).read_to_end(&mut bytes).attempt("read", what)?;
    if bytes.len() as u64 > MAX_JSON_LEN {
        return Err(ImportError::TooLong { what: what.to_owned() });
    }
    Ok(bytes)
}

/// Finds the image that an index, or a manifest, leads to.
///
/// # Errors
/// There is none, or several, or it is for another platform.
pub fn find(blobs: &dyn Blobs, top: &[Descriptor], wanted: &Platform, reference: Option<&str>) -> Result<Found, ImportError> {
    let mut chosen = manifest::choose(top, wanted, reference)?.clone();
    let name = chosen.reference().map(str::to_owned);
    for _ in 0..MAX_INDEXES {
        match manifest::document(&json(blobs, &chosen)?)? {
            // A name is one of the outermost index.
            Document::Index(manifests) => chosen = manifest::choose(&manifests, wanted, None)?.clone(),
            Document::Manifest(image) => {
                let config = manifest::config(&json(blobs, &image.config)?, image.layers.len(), wanted)?;
                let described = image.layers.into_iter().map(LayerBlob::Described);
                let layers = config.rootfs.diff_ids.iter().cloned().zip(described);
                let layers = layers.map(|(diff_id, blob)| Layer { diff_id, blob }).collect();
                return Ok(Found { digest: chosen.digest, config_digest: image.config.digest, config, layers, name });
            }
        }
    }
    Err(ImportError::Missing { what: format!("an image behind {MAX_INDEXES} indexes, the most that are followed") })
}

/// A layout or an archive on this host.
#[derive(Debug)]
pub enum Source {
    /// A directory.
    Layout(Layout),
    /// A file.
    Archive(ArchiveFiles),
}

/// An OCI image layout.
#[derive(Debug)]
pub struct Layout {
    path: PathBuf,
    directory: OwnedFd,
}

/// The files of an archive, by name.
#[derive(Debug)]
pub struct ArchiveFiles {
    path: PathBuf,
    file: Arc<File>,
    files: HashMap<Vec<u8>, Place>,
}

#[derive(Clone, Debug)]
enum Place {
    At { position: u64, size: u64 },
    Link(Vec<u8>),
}

/// Opens what an image is imported from; true: it is a directory.
///
/// # Errors
/// It cannot be opened, or is neither a directory nor a file. To open a fifo would wait for its writer.
pub fn open(path: &Path) -> Result<(File, bool), ImportError> {
    let file = File::options().read(true).custom_flags(OFlags::NONBLOCK.bits().cast_signed()).open(path).attempt("open", path)?;
    let kind = file.metadata().attempt("look at", path)?.file_type();
    if kind.is_dir() || kind.is_file() { Ok((file, kind.is_dir())) } else { Err(ImportError::NoFile(path.to_owned())) }
}

impl Layout {
    /// A layout in a directory, which is open.
    pub fn of(path: &Path, directory: File) -> Self {
        Layout { path: path.to_owned(), directory: directory.into() }
    }

    fn read(&self, name: &str) -> Result<Option<Blob>, ImportError> {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
        match openat2(&self.directory, name, flags, Mode::empty(), ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS) {
            Ok(fd) => {
                let found = fstat(&fd).attempt("look at", self.path.join(name))?;
                let is_file = FileType::from_raw_mode(found.st_mode) == FileType::RegularFile;
                Ok(is_file.then(|| Box::new(File::from(fd)) as Blob))
            }
            Err(rustix::io::Errno::NOENT) => Ok(None),
            Err(error) => Err(error).attempt("open", self.path.join(name)),
        }
    }
}

impl ArchiveFiles {
    /// Reads the headers of an archive, which is not compressed.
    ///
    /// # Errors
    /// It is none, is cut off, or has too many files.
    pub fn open(path: &Path, mut file: File) -> Result<Self, ImportError> {
        file.rewind().attempt("read", path)?;
        let mut archive = Archive::new(BufReader::new(file.as_fd().try_clone_to_owned().map(File::from).attempt("open", path)?));
        let mut files = HashMap::new();
        while let Some(entry) = archive.next_entry()? {
            if files.len() >= MAX_FILES || entry.name.len().max(entry.target.len()) > MAX_NAME_LEN {
                return Err(ImportError::Files(path.to_owned()));
            }
            let place = match entry.kind {
                Kind::File => Place::At { position: entry.position, size: entry.size },
                Kind::Symlink => Place::Link(beside(&entry.name, &entry.target)),
                Kind::HardLink => Place::Link(entry.target),
                _ => continue,
            };
            let name = entry.name.strip_prefix(b"./").unwrap_or(&entry.name).to_vec();
            archive.seek_over()?;
            files.insert(name, place);
        }
        Ok(ArchiveFiles { path: path.to_owned(), file: Arc::new(file), files })
    }

    /// By name, behind links of the archive itself.
    fn read(&self, name: &[u8]) -> Option<Blob> {
        let mut name = name.to_vec();
        for _ in 0..MAX_LINKS {
            match self.files.get(&name)? {
                Place::At { position, size } => return Some(Box::new(Section::new(Arc::clone(&self.file), *position, *size))),
                Place::Link(target) => name.clone_from(target),
            }
        }
        None
    }
}

/// The name that a link's target has from the top of an archive on.
fn beside(name: &[u8], target: &[u8]) -> Vec<u8> {
    let mut parts: Vec<&[u8]> = name.split(|byte| *byte == b'/').filter(|part| !matches!(*part, b"" | b".")).collect();
    parts.pop();
    for part in target.split(|byte| *byte == b'/') {
        match part {
            b"" | b"." => {}
            b".." => drop(parts.pop()),
            part => parts.push(part),
        }
    }
    parts.join(&b'/')
}

impl Source {
    fn read(&self, name: &str) -> Result<Option<Blob>, ImportError> {
        match self {
            Source::Layout(layout) => layout.read(name),
            Source::Archive(archive) => Ok(archive.read(name.as_bytes())),
        }
    }

    fn path(&self) -> &Path {
        match self {
            Source::Layout(layout) => &layout.path,
            Source::Archive(archive) => &archive.path,
        }
    }

    /// Finds the image that is wanted.
    ///
    /// # Errors
    /// There is none, or several, or it is for another platform.
    pub fn find(&self, wanted: &Platform, reference: Option<&str>) -> Result<Found, ImportError> {
        if let Some(index) = self.read("index.json")? {
            let Document::Index(top) = manifest::document(&read_json(index, "index.json")?)? else {
                return Err(ImportError::NoImage(self.path().to_owned()));
            };
            return find(self, &top, wanted, reference);
        }
        let Some(list) = self.read("manifest.json")? else { return Err(ImportError::NoImage(self.path().to_owned())) };
        let image = manifest::docker_image(&read_json(list, "manifest.json")?, reference)?;
        let text = read_json(self.file(&image.config)?, &image.config)?;
        let digest = digest_of(&text);
        // The file is called by its digest.
        let stem = image.config.rsplit('/').next().and_then(|name| name.split('.').next()).unwrap_or_default();
        if let Ok(expected) = Digest::from_hex(stem)
            && expected != digest
        {
            return Err(ImportError::Digest { what: format!("the file {}", image.config), found: digest, expected });
        }
        let config = manifest::config(&text, image.layers.len(), wanted)?;
        let layers = config.rootfs.diff_ids.iter().cloned().zip(image.layers.into_iter().map(LayerBlob::File));
        let layers = layers.map(|(diff_id, blob)| Layer { diff_id, blob }).collect();
        let name = reference.map(str::to_owned).or_else(|| image.repo_tags.and_then(|tags| tags.into_iter().next()));
        Ok(Found { digest: digest.clone(), config_digest: digest, config, layers, name })
    }
}

impl Blobs for Source {
    fn blob(&self, descriptor: &Descriptor) -> Result<Blob, ImportError> {
        let missing = || ImportError::Missing { what: format!("the blob {}", descriptor.digest) };
        let blob = self.read(&format!("blobs/sha256/{}", descriptor.digest.hex()))?.ok_or_else(missing)?;
        // One byte more shows that it is longer.
        Ok(Box::new(blob.take(descriptor.size.saturating_add(1))))
    }

    fn file(&self, name: &str) -> Result<Blob, ImportError> {
        self.read(name)?.ok_or_else(|| ImportError::Missing { what: format!("the file {}", escape_bytes(name.as_bytes(), 200)) })
    }
}
