//! What is printed of images: tables for a person, JSON for a program.

use std::time::SystemTime;

use serde::Serialize;
use stockade_images::{Digest, ImageError, ImageRecord, LayerRecord, Store};
use stockade_protocol::text::{columns, visible};

/// An image with its names.
#[derive(Debug, Serialize)]
pub struct Listed {
    names: Vec<String>,
    #[serde(flatten)]
    record: ImageRecord,
}

/// An image with what is known of its layers.
#[derive(Debug, Serialize)]
struct Inspected {
    #[serde(flatten)]
    image: Listed,
    layer_records: Vec<Option<LayerRecord>>,
}

fn names_of(names: &[(String, Digest)], digest: &Digest) -> Vec<String> {
    names.iter().filter(|(_, named)| named == digest).map(|(name, _)| name.clone()).collect()
}

/// Every image.
///
/// # Errors
/// The store cannot be read.
pub fn list(store: &Store) -> Result<Vec<Listed>, ImageError> {
    let names = store.names()?;
    let images = store.list()?.into_iter().map(|record| Listed { names: names_of(&names, &record.digest), record });
    Ok(images.collect())
}

/// A table: a line for each name, and one for an image without a name.
pub fn table(images: &[Listed]) -> String {
    let mut rows = vec![["NAME", "DIGEST", "PLATFORM", "LAYERS", "SIZE", "IMPORTED"].map(str::to_owned)];
    for image in images {
        let record = &image.record;
        let names = if image.names.is_empty() { vec!["-".to_owned()] } else { image.names.clone() };
        rows.extend(names.into_iter().map(|name| {
            [
                name,
                record.digest.hex().chars().take(12).collect(),
                visible(&format!("{}/{}", record.os, record.architecture)),
                record.layers.len().to_string(),
                size(record.size_bytes),
                age(record.imported_at),
            ]
        }));
    }
    columns(&rows)
}

/// Bytes as a person reads them.
fn size(bytes: u64) -> String {
    match bytes {
        0..1024 => format!("{bytes} B"),
        1024..0x10_0000 => format!("{} KiB", bytes >> 10),
        0x10_0000..0x4000_0000 => format!("{} MiB", bytes >> 20),
        _ => format!("{}.{} GiB", bytes >> 30, (bytes >> 20) % 1024 * 10 / 1024),
    }
}

fn age(since: u64) -> String {
    let now = SystemTime::UNIX_EPOCH.elapsed().map_or(0, |time| time.as_secs());
    match now.saturating_sub(since) {
        seconds @ 0..120 => format!("{seconds} s ago"),
        seconds @ 120..7200 => format!("{} min ago", seconds / 60),
        seconds @ 7200..172_800 => format!("{} h ago", seconds / 3600),
        seconds => format!("{} days ago", seconds / 86400),
    }
}

/// All that is known of an image, as JSON.
///
/// # Errors
/// There is none, or the store cannot be read.
pub fn inspect(store: &Store, name_or_digest: &str) -> Result<impl Serialize, ImageError> {
    let (_, digest) = store.find(name_or_digest)?;
    let record = store.record(&digest)?;
    let layer_records = record.layers.iter().map(|layer| store.layer_record(&layer.key)).collect::<Result<_, _>>()?;
    Ok(Inspected { image: Listed { names: names_of(&store.names()?, &digest), record }, layer_records })
}
