//! Opening a store, and finding images in it.

use std::{
    env, fs,
    fs::File,
    io::{self, Read},
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use serde::de::DeserializeOwned;

use crate::{Digest, FORMAT, ImageError, ImageRecord, LayerRecord, check_name, escape, unescape};

/// Root's store.
const ROOTS_STORE: &str = "/var/lib/stockade/images";
/// No file of records is longer, in bytes: a manifest and a configuration have 4 MiB each.
const MAX_RECORD_LEN: u64 = 16 << 20;

/// The store of the user who runs this. Root's is fixed, and reads no variable.
///
/// # Errors
/// An ordinary user without a home.
pub fn default_path(privileged: bool) -> Result<PathBuf, ImageError> {
    if privileged {
        return Ok(PathBuf::from(ROOTS_STORE));
    }
    let absolute = |name: &str| env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let data = absolute("XDG_DATA_HOME").or_else(|| absolute("HOME").map(|home| home.join(".local/share")));
    data.map(|data| data.join("stockade/images")).ok_or(ImageError::Nowhere)
}

/// A store of images.
#[derive(Clone, Debug)]
pub struct Store {
    path: PathBuf,
    owner: u32,
}

/// An image, whose layers stay while this lives.
#[derive(Debug)]
pub struct Image {
    /// The name by which it was found.
    pub name: Option<String>,
    /// Its lower directories, bottom first. One, merged, where it has more than [`crate::MAX_LOWER`] layers.
    pub layers: Vec<PathBuf>,
    /// What the store knows of it.
    pub record: ImageRecord,
    /// The store's lock, shared.
    held: File,
}

impl Image {
    /// The lock by which its layers stay while this lives.
    pub fn into_lock(self) -> File {
        self.held
    }
}

impl Store {
    /// Opens the store at this path, which must belong to the user `owner` alone.
    ///
    /// # Errors
    /// There is none, it has another format, or another user could have written it.
    pub fn open(path: &Path, owner: u32) -> Result<Self, ImageError> {
        if fs::symlink_metadata(path.join("format")).is_err_and(|error| error.kind() == io::ErrorKind::NotFound) {
            return Err(ImageError::NoStore { path: path.to_owned() });
        }
        // A run opens its layers without following a link, and a directory above the store may be one.
        let store = Store { path: fs::canonicalize(path).map_err(|error| io_error("look at", path, error))?, owner };
        let path = store.path();
        store.check_owner(path)?;
        for part in ["format", "lock", "layers", "flat", "images", "names"] {
            store.check_owner(&path.join(part))?;
        }
        let found = read(&path.join("format"))?;
        if found != FORMAT.as_bytes() {
            return Err(ImageError::Format { path: path.to_owned(), found: String::from_utf8_lossy(&found).trim_end().to_owned() });
        }
        Ok(store)
    }

    /// Its directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The directory of a layer, which has `root` and `layer.json`.
    pub fn layer(&self, key: &Digest) -> PathBuf {
        self.path.join("layers").join(key.hex())
    }

    /// The directory of a merged tree, which has `root`.
    pub fn flat(&self, chain_id: &Digest) -> PathBuf {
        self.path.join("flat").join(chain_id.hex())
    }

    /// The file of an image's record.
    pub fn image(&self, digest: &Digest) -> PathBuf {
        self.path.join("images").join(digest.hex()).with_extension("json")
    }

    /// The file of a name.
    ///
    /// # Errors
    /// It can name no image.
    pub fn name(&self, name: &str) -> Result<PathBuf, ImageError> {
        check_name(name)?;
        Ok(self.path.join("names").join(escape(name)))
    }

    /// Finds an image by name, `NAME@sha256:…`, where the digest alone decides, or by digest, and
    /// holds it. A name without a tag also finds `NAME:latest`.
    ///
    /// # Errors
    /// There is none, or what the store says of it cannot be read.
    pub fn resolve(&self, name_or_digest: &str) -> Result<Image, ImageError> {
        // First, so that what is found is not removed.
        let held = self.lock_shared()?;
        let (name, digest) = self.find(name_or_digest)?;
        let record = self.record(&digest)?;
        let layers: Vec<PathBuf> = match &record.flat {
            Some(flat) => vec![self.flat(&flat.chain_id).join("root")],
            None => record.lower().map(|layer| self.layer(&layer.key).join("root")).collect(),
        };
        if let Some(missing) = layers.iter().find(|layer| !layer.is_dir()) {
            return Err(ImageError::Damaged { path: missing.clone(), why: format!("{digest} has this layer, and it is missing") });
        }
        Ok(Image { name, layers, record, held })
    }

    /// The name and digest that a text stands for. It has a name only if the store has the digest by it.
    ///
    /// # Errors
    /// It names nothing that the store has.
    pub fn find(&self, name_or_digest: &str) -> Result<(Option<String>, Digest), ImageError> {
        let parse = |text: &str| {
            text.parse::<Digest>().map_err(|_| ImageError::Name {
                name: name_or_digest.to_owned(),
                why: "a digest is `sha256:` and 64 hex digits in lower case",
            })
        };
        if name_or_digest.starts_with("sha256:") {
            return Ok((None, parse(name_or_digest)?));
        }
        if let Some((name, digest)) = name_or_digest.split_once('@') {
            check_name(name)?;
            let digest = parse(digest)?;
            // Who asks chooses this name, and it is shown: one that the store does not know is none.
            let is_its_name = self.digest_of(name).is_ok_and(|named| named.as_ref() == Some(&digest));
            return Ok((is_its_name.then(|| name.to_owned()), digest));
        }
        let with_tag =
            (!name_or_digest.rsplit('/').next().is_some_and(|last| last.contains(':'))).then(|| format!("{name_or_digest}:latest"));
        for name in [Some(name_or_digest.to_owned()), with_tag].into_iter().flatten() {
            if let Some(digest) = self.digest_of(&name)? {
                return Ok((Some(name), digest));
            }
        }
        Err(ImageError::UnknownName { name: name_or_digest.to_owned() })
    }

    fn digest_of(&self, name: &str) -> Result<Option<Digest>, ImageError> {
        let path = self.name(name)?;
        match read(&path) {
            Ok(text) => {
                let hex = String::from_utf8_lossy(&text);
                Digest::from_hex(hex.trim_end()).map(Some).map_err(|error| ImageError::Damaged { path, why: error.to_string() })
            }
            Err(ImageError::Io { error, .. }) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// What the store knows of an image.
    ///
    /// # Errors
    /// It has none of this digest, or the record cannot be read.
    pub fn record(&self, digest: &Digest) -> Result<ImageRecord, ImageError> {
        let path = self.image(digest);
        match read_record::<ImageRecord>(&path) {
            Ok(record) if record.digest == *digest => Ok(record),
            Ok(record) => Err(ImageError::Damaged { path, why: format!("it is the record of {}", record.digest) }),
            Err(ImageError::Io { error, .. }) if error.kind() == io::ErrorKind::NotFound => {
                Err(ImageError::UnknownDigest { digest: digest.clone() })
            }
            Err(error) => Err(error),
        }
    }

    /// What the store knows of a layer. None: it has no such layer.
    ///
    /// # Errors
    /// The record cannot be read.
    pub fn layer_record(&self, key: &Digest) -> Result<Option<LayerRecord>, ImageError> {
        match read_record(&self.layer(key).join("layer.json")) {
            Ok(record) => Ok(Some(record)),
            Err(ImageError::Io { error, .. }) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Every image, by digest.
    ///
    /// # Errors
    /// The store or a record cannot be read.
    pub fn list(&self) -> Result<Vec<ImageRecord>, ImageError> {
        let mut records = Vec::new();
        for file in self.entries("images")? {
            let digest = file.strip_suffix(".json").and_then(|hex| Digest::from_hex(hex).ok());
            if let Some(digest) = digest {
                records.push(self.record(&digest)?);
            }
        }
        Ok(records)
    }

    /// Every name with its image, by name. One that is damaged names nothing, and can be removed.
    ///
    /// # Errors
    /// The store or a name cannot be read.
    pub fn names(&self) -> Result<Vec<(String, Digest)>, ImageError> {
        let mut names = Vec::new();
        for name in self.entries("names")?.iter().filter_map(|file| unescape(file)) {
            match self.digest_of(&name) {
                Ok(Some(digest)) => names.push((name, digest)),
                Ok(None) | Err(ImageError::Damaged { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(names)
    }

    /// The names of files in one of its directories, sorted.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn entries(&self, part: &str) -> Result<Vec<String>, ImageError> {
        let path = self.path.join(part);
        let listed = fs::read_dir(&path).and_then(|entries| entries.map(|entry| Ok(entry?.file_name())).collect::<io::Result<Vec<_>>>());
        let mut names: Vec<String> =
            listed.map_err(|error| io_error("read", &path, error))?.into_iter().filter_map(|name| name.into_string().ok()).collect();
        names.sort();
        Ok(names)
    }

    /// The store's lock, shared: no layer is removed while it is held. It waits for a removal, which
    /// renames layers away and so takes milliseconds; no other user can open the file and lock it.
    ///
    /// # Errors
    /// The kernel refuses it.
    pub fn lock_shared(&self) -> Result<File, ImageError> {
        let path = self.path.join("lock");
        let file = File::open(&path).map_err(|error| io_error("open", &path, error))?;
        file.lock_shared().map_err(|error| io_error("lock", &path, error))?;
        Ok(file)
    }

    fn check_owner(&self, path: &Path) -> Result<(), ImageError> {
        let found = fs::symlink_metadata(path).map_err(|error| io_error("look at", path, error))?;
        let (owner, mode) = (found.uid(), found.mode());
        if owner == self.owner && mode & 0o022 == 0 && !found.is_symlink() {
            return Ok(());
        }
        Err(ImageError::Untrusted { path: path.to_owned(), owner, mode, expected: self.owner })
    }
}

fn io_error(verb: &'static str, path: &Path, error: io::Error) -> ImageError {
    ImageError::Io { verb, path: path.to_owned(), error }
}

fn read(path: &Path) -> Result<Vec<u8>, ImageError> {
    let mut bytes = Vec::new();
    let read = File::open(path).and_then(|file| file.take(MAX_RECORD_LEN).read_to_end(&mut bytes));
    read.map_err(|error| io_error("read", path, error))?;
    Ok(bytes)
}

fn read_record<T: DeserializeOwned>(path: &Path) -> Result<T, ImageError> {
    let bytes = read(path)?;
    serde_json::from_slice(&bytes).map_err(|error| ImageError::Damaged { path: path.to_owned(), why: error.to_string() })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]

    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn digest(of: u8) -> Digest {
        Digest::of_bytes(&[of; 32])
    }

    /// A store with the image 1, `python:3.12`, of one layer.
    fn store(name: &str) -> (PathBuf, u32) {
        let path = env::temp_dir().join(format!("stockade-images-{}-{name}", std::process::id()));
        for part in ["flat", "images", "names", "tmp", &format!("layers/{}/root", digest(2).hex())] {
            fs::create_dir_all(path.join(part)).unwrap();
        }
        fs::write(path.join("format"), FORMAT).unwrap();
        fs::write(path.join("lock"), "").unwrap();
        let record = ImageRecord {
            digest: digest(1),
            config_digest: digest(3),
            os: "linux".into(),
            architecture: "amd64".into(),
            created: None,
            layers: vec![crate::LayerRef { diff_id: digest(2), key: digest(2) }],
            flat: None,
            env: vec![],
            working_dir: String::new(),
            entrypoint: vec![],
            cmd: vec!["python3".into()],
            user: String::new(),
            size_bytes: 0,
            source: "test".into(),
            imported_at: 0,
        };
        fs::write(path.join(format!("images/{}.json", digest(1).hex())), serde_json::to_string(&record).unwrap()).unwrap();
        fs::write(path.join("names").join(escape("python:latest")), digest(1).hex()).unwrap();
        let owner = fs::metadata(&path).unwrap().uid();
        (path, owner)
    }

    #[test]
    fn an_image_is_found_by_name_by_digest_and_by_both_and_is_held() {
        let (path, owner) = store("found");
        let store = Store::open(&path, owner).unwrap();
        for text in ["python", "python:latest", &digest(1).to_string(), &format!("other@{}", digest(1))] {
            let image = store.resolve(text).unwrap();
            assert_eq!((&image.record.digest, image.layers.len()), (&digest(1), 1), "{text}");
            let lock = File::options().write(true).open(path.join("lock")).unwrap();
            assert!(lock.try_lock().is_err(), "held");
            drop(image);
            lock.try_lock().unwrap();
        }
        // A name that was asked for beside a digest is the image's only if the store says so.
        for (name, is) in [("python:latest", true), ("trusted:1", false)] {
            let image = store.resolve(&format!("{name}@{}", digest(1))).unwrap();
            assert_eq!(image.name, is.then(|| name.to_owned()));
        }
        for text in ["python:3", "../names", "", "sha256:..", &digest(9).to_string(), "python@sha256:1"] {
            assert!(store.resolve(text).is_err(), "{text}");
        }
        fs::remove_dir_all(path).unwrap();
    }

    #[test]
    fn no_link_is_on_the_way_to_a_layer() {
        let (path, owner) = store("linked");
        let link = path.with_extension("link");
        std::os::unix::fs::symlink(&path, &link).unwrap();
        let layers = |path: &Path| Store::open(path, owner).unwrap().resolve("python").unwrap().layers;
        assert_eq!(layers(&link), layers(&path));
        fs::remove_file(link).unwrap();
        fs::remove_dir_all(path).unwrap();
    }

    #[test]
    fn a_store_that_others_can_write_or_of_another_format_is_refused() {
        let (path, owner) = store("refused");
        assert!(matches!(Store::open(&path, owner + 1), Err(ImageError::Untrusted { .. })));
        let names = path.join("names");
        fs::set_permissions(&names, fs::Permissions::from_mode(0o777)).unwrap();
        assert!(matches!(Store::open(&path, owner), Err(ImageError::Untrusted { path, .. }) if path == names));
        fs::set_permissions(&names, fs::Permissions::from_mode(0o755)).unwrap();
        Store::open(&path, owner).unwrap();
        fs::write(path.join("format"), "1\n").unwrap();
        assert!(matches!(Store::open(&path, owner), Err(ImageError::Format { found, .. }) if found == "1"));
        fs::remove_dir_all(&path).unwrap();
        assert!(matches!(Store::open(&path, owner), Err(ImageError::NoStore { .. })));
    }
}
