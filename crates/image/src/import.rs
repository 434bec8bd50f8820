//! An image from where its blobs are into the store.
//!
//! All layers that the store lacks are unpacked aside, written to disk, and put into the store by renames; the
//! record comes after them, and the name last. So an image that has a record is whole. A layer that adds
//! files alone is shared by every image that has it; one that hides, links to or leaves directories to what is
//! below is shared by images that have the same layers below (its key is the chain-id).

use std::{fs, path::Path, time::SystemTime};

use stockade_images::{Digest, Dropped, FlatRef, ImageRecord, LayerRecord, LayerRef, MAX_LOWER, check_name};

use crate::{
    error::{Attempt, ImportError},
    layer::{self, Budget, Promised, Target},
    progress::Progress,
    source::{Blobs, Found, LayerBlob, digest_of},
    tree,
    unpack::Limits,
    writer::{Staging, Writer, json, write},
};

/// Files, directories and links of an image: images with a whole scientific Python have some 300,000.
const MAX_ENTRIES: u64 = 1_000_000;
/// Bytes of an image when it is uncompressed, unless another limit is given.
pub const MAX_SIZE: u64 = 16 << 30;

/// What came of an import.
#[derive(Debug)]
pub struct Imported {
    /// The image.
    pub record: ImageRecord,
    /// The name that it has now.
    pub name: String,
    /// What its layers lost.
    pub dropped: Dropped,
    /// It was in the store before.
    pub was_there: bool,
}

/// How much one image may have.
pub fn budget(max: u64) -> Budget {
    Budget { max, blobs: max, archives: max, trees: Limits { bytes: max, entries: MAX_ENTRIES } }
}

/// A layer that is there, or is made.
struct Ready {
    key: Digest,
    record: LayerRecord,
    /// Its tree, from the store on.
    tree: String,
    /// The number of its directory, where it is made by this import.
    made: Option<usize>,
}

/// Brings an image into the store.
///
/// # Errors
/// Its blobs are not what it promises, hold what no image may, are too large, or the kernel refuses. No
/// name was changed, and no image that was there; layers that are in place already stay, to be used again
/// or removed by [`Writer::gc`].
pub fn import(
    writer: &Writer,
    found: &Found,
    blobs: &dyn Blobs,
    name: Option<&str>,
    source: &str,
    max_size: u64,
) -> Result<Imported, ImportError> {
    let name = name.or(found.name.as_deref()).ok_or(ImportError::Unnamed)?;
    check_name(name)?;
    let staging = writer.stage()?;
    if let Some(record) = writer.name_again(&staging, &found.digest, name)? {
        return Ok(Imported { record, name: name.to_owned(), dropped: Dropped::default(), was_there: true });
    }
    let mut budget = budget(max_size);
    let layers = make_layers(writer, &staging, found, blobs, &mut budget)?;
    let record = record(found, &layers, merge(writer, &staging, &layers, &budget)?, source);
    writer.sync(&staging)?;
    for layer in layers.iter().filter(|layer| layer.made.is_some()) {
        if let Some(made) = writer.store.path().join(&layer.tree).parent() {
            writer.place(made, &writer.store.layer(&layer.key))?;
        }
    }
    if let Some(flat) = &record.flat {
        let made = staging.path().join("flat");
        if made.exists() {
            writer.place(&made, &writer.store.flat(&flat.chain_id))?;
        }
    }
    writer.add(&staging, &record, name)?;
    let dropped = layers.iter().map(|layer| layer.record.dropped).fold(Dropped::default(), Dropped::and);
    Ok(Imported { record, name: name.to_owned(), dropped, was_there: false })
}

fn make_layers(
    writer: &Writer,
    staging: &Staging,
    found: &Found,
    blobs: &dyn Blobs,
    budget: &mut Budget,
) -> Result<Vec<Ready>, ImportError> {
    let total = found.layers.iter().map(|layer| match &layer.blob {
        LayerBlob::Described(blob) => blob.size,
        LayerBlob::File(_) => 0,
    });
    let progress = Progress::new(total.sum());
    let mut ready = Vec::<Ready>::new();
    let mut chain_id: Option<Digest> = None;
    for (number, layer) in found.layers.iter().enumerate() {
        progress.says(format!("layer {}/{}", number + 1, found.layers.len()));
        let below = chain_id.as_ref();
        let own = below.map_or_else(|| layer.diff_id.clone(), |below| chain(below, &layer.diff_id));
        let next = match there(writer, &ready, &layer.diff_id, &own)? {
            Some(there) => there,
            None => {
                let tree = staging.from_store(&format!("{number}/root"));
                fs::create_dir_all(writer.store.path().join(&tree)).attempt("make", &tree)?;
                let below: Vec<String> = ready.iter().map(|layer| layer.tree.clone()).collect();
                let target = Target { store: writer.store.path(), tree: &tree, below: &below };
                let record = unpack(&layer.diff_id, &layer.blob, blobs, &target, budget, &progress)?;
                let key = if record.refers_below { own.clone() } else { layer.diff_id.clone() };
                write(&staging.path().join(format!("{number}/layer.json")), &json(&record))?;
                Ready { key, record, tree, made: Some(number) }
            }
        };
        ready.push(next);
        chain_id = Some(own);
    }
    Ok(ready)
}

/// The layer, if the store or this image has it already. The lowest layer has nothing to refer to, and so
/// its tree lacks whiteouts that the same archive has elsewhere.
fn there(writer: &Writer, ready: &[Ready], diff_id: &Digest, chain_id: &Digest) -> Result<Option<Ready>, ImportError> {
    let is_usable = |record: &LayerRecord, key: &Digest| !record.refers_below || key == chain_id;
    for key in [diff_id, chain_id] {
        if let Some(twice) = ready.iter().find(|layer| layer.key == *key && is_usable(&layer.record, key)) {
            return Ok(Some(Ready { key: key.clone(), record: twice.record.clone(), tree: twice.tree.clone(), made: None }));
        }
        if let Some(record) = writer.store.layer_record(key)?.filter(|record| is_usable(record, key)) {
            let tree = writer.store.layer(key).join("root");
            if !tree.is_dir() {
                return Err(changed(writer, &tree, String::from("is missing"), |image| has_layer(image, key)));
            }
            return Ok(Some(Ready { key: key.clone(), record, tree: format!("layers/{}/root", key.hex()), made: None }));
        }
    }
    Ok(None)
}

fn unpack(
    diff_id: &Digest,
    blob: &LayerBlob,
    blobs: &dyn Blobs,
    target: &Target<'_>,
    budget: &mut Budget,
    progress: &Progress,
) -> Result<LayerRecord, ImportError> {
    let (bytes, promised) = match blob {
        LayerBlob::Described(blob) => {
            // A decompressor can find nothing in a blob that never ends.
            budget.blobs = budget.blobs.checked_sub(blob.size).ok_or(ImportError::TooLarge { max: budget.max })?;
            (blobs.blob(blob)?, Some((&blob.digest, blob.size)))
        }
        LayerBlob::File(name) => (blobs.file(name)?, None),
    };
    let done = layer::unpack(bytes, &Promised { diff_id, blob: promised }, target, budget, progress)?;
    Ok(LayerRecord {
        diff_id: diff_id.clone(),
        bytes: done.bytes,
        entries: done.entries,
        refers_below: done.refers_below,
        dropped: done.dropped,
        tree_digest: tree::digest(&target.store.join(target.tree))?,
    })
}

/// The chain-id of a layer on others (OCI image specification, "Layer ChainID").
pub fn chain(below: &Digest, diff_id: &Digest) -> Digest {
    digest_of(format!("{below} {diff_id}").as_bytes())
}

/// The merged tree, where an overlay of the layers would have too many.
fn merge(writer: &Writer, staging: &Staging, layers: &[Ready], budget: &Budget) -> Result<Option<FlatRef>, ImportError> {
    if layers.len() <= MAX_LOWER {
        return Ok(None);
    }
    let chain_id = layers
        .iter()
        .map(|layer| &layer.record.diff_id)
        .fold(None, |below: Option<Digest>, diff_id| Some(below.map_or_else(|| diff_id.clone(), |below| chain(&below, diff_id))));
    let Some(chain_id) = chain_id else { return Ok(None) };
    let there = writer.store.flat(&chain_id).join("root");
    let root = if there.exists() {
        there
    } else {
        let root = staging.path().join("flat/root");
        fs::create_dir_all(&root).attempt("make", &root)?;
        let trees: Vec<_> = layers.iter().map(|layer| writer.store.path().join(&layer.tree)).collect();
        // Its directories are those of the layers, which have been counted.
        let limits = Limits { bytes: budget.trees.bytes, entries: MAX_ENTRIES };
        tree::merge(&trees, &root, limits.within_room(writer.store.path())?)?;
        root
    };
    Ok(Some(FlatRef { chain_id, tree_digest: tree::digest(&root)? }))
}

fn record(found: &Found, layers: &[Ready], flat: Option<FlatRef>, source: &str) -> ImageRecord {
    let run = found.config.config.clone().unwrap_or_default();
    ImageRecord {
        digest: found.digest.clone(),
        config_digest: found.config_digest.clone(),
        os: found.config.platform.os.clone(),
        architecture: found.config.platform.architecture.clone(),
        created: found.config.created.clone(),
        layers: layers.iter().map(|layer| LayerRef { diff_id: layer.record.diff_id.clone(), key: layer.key.clone() }).collect(),
        flat,
        env: run.env.unwrap_or_default(),
        working_dir: run.working_dir.unwrap_or_default(),
        entrypoint: run.entrypoint.unwrap_or_default(),
        cmd: run.cmd.unwrap_or_default(),
        user: run.user.unwrap_or_default(),
        size_bytes: layers.iter().map(|layer| layer.record.bytes).sum(),
        source: source.to_owned(),
        imported_at: SystemTime::UNIX_EPOCH.elapsed().map_or(0, |time| time.as_secs()),
    }
}

fn has_layer(image: &ImageRecord, key: &Digest) -> bool {
    image.layers.iter().any(|layer| layer.key == *key)
}

/// The error of a tree that is not what was imported, with every image that has it.
fn changed(writer: &Writer, tree: &Path, why: String, has: impl Fn(&ImageRecord) -> bool) -> ImportError {
    match writer.store.list() {
        Ok(all) => {
            let images = all.into_iter().filter(has).map(|image| image.digest).collect();
            ImportError::Changed { tree: tree.to_owned(), why, images }
        }
        Err(error) => error.into(),
    }
}

/// Compares what the store has of an image with what was unpacked.
///
/// # Errors
/// It differs, or cannot be read.
pub fn verify(writer: &Writer, record: &ImageRecord) -> Result<(), ImportError> {
    let check = |path: &Path, expected: &Digest, has: &dyn Fn(&ImageRecord) -> bool| {
        if !path.is_dir() {
            return Err(changed(writer, path, String::from("is missing"), has));
        }
        let found = tree::digest(path)?;
        if found == *expected {
            return Ok(());
        }
        Err(changed(writer, path, format!("has the digest {found}, and had {expected} when it was imported"), has))
    };
    let mut chain_id: Option<Digest> = None;
    for layer in &record.layers {
        let own = chain_id.map_or_else(|| layer.diff_id.clone(), |below| chain(&below, &layer.diff_id));
        let missing = || ImportError::Missing { what: format!("layer {}", layer.diff_id) };
        let known = writer.store.layer_record(&layer.key)?.ok_or_else(missing)?;
        if known.diff_id != layer.diff_id || (layer.key != own && (layer.key != layer.diff_id || known.refers_below)) {
            let what = format!("the layer {}", layer.key);
            return Err(ImportError::Digest { what, found: known.diff_id, expected: layer.diff_id.clone() });
        }
        check(&writer.store.layer(&layer.key).join("root"), &known.tree_digest, &|image| has_layer(image, &layer.key))?;
        chain_id = Some(own);
    }
    match &record.flat {
        Some(flat) => {
            let has = |image: &ImageRecord| image.flat.as_ref().is_some_and(|its| its.chain_id == flat.chain_id);
            check(&writer.store.flat(&flat.chain_id).join("root"), &flat.tree_digest, &has)
        }
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]

    use super::*;
    use crate::{manifest::Descriptor, source::Blob};

    /// Has nothing.
    struct NoBlobs;

    impl Blobs for NoBlobs {
        fn blob(&self, descriptor: &Descriptor) -> Result<Blob, ImportError> {
            Err(ImportError::Missing { what: descriptor.digest.to_string() })
        }
    }

    #[test]
    fn blobs_of_more_bytes_than_an_image_may_have_are_not_asked_for() {
        let digest = digest_of(b"");
        let mut budget = budget(1000);
        let mut ask = |size: u64| {
            let descriptor: Descriptor = serde_json::from_value(serde_json::json!({"digest": digest.to_string(), "size": size})).unwrap();
            let target = Target { store: Path::new("/"), tree: "", below: &[] };
            unpack(&digest, &LayerBlob::Described(descriptor), &NoBlobs, &target, &mut budget, &Progress::new(0)).unwrap_err()
        };
        assert!(matches!(ask(1 << 62), ImportError::TooLarge { max: 1000 }));
        assert!(matches!(ask(600), ImportError::Missing { .. }), "the control");
        assert!(matches!(ask(600), ImportError::TooLarge { .. }), "all together");
    }
}
