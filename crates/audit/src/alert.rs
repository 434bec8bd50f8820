//! How many alerts one caller may raise: so many a minute, counted across launchers.
//!
//! A file in the log's directory holds one count per caller, so that one caller's flood does
//! not silence another. Alerts that are held back are counted, and the next alert states how
//! many. Every record names its alerts in any case.

use std::{
    io::{Read, Seek, Write},
    time::{SystemTime, UNIX_EPOCH},
};

use crate::{AuditError, Log, failed};

/// Alerts that one caller may raise in one minute.
pub const MAX_PER_MINUTE: u64 = 10;
const FILE: &str = "alerts";

/// One caller's count: uid, minute, alerts in it, alerts held back since the last that passed.
type Count = (u32, u64, u64, u64);

/// Counts one alert. Returns how many were held back before it; `None`: this one is held back
/// too.
///
/// # Errors
/// The count cannot be read or written.
pub fn admit(log: &Log, uid: u32, now: SystemTime) -> Result<Option<u64>, AuditError> {
    let minute = now.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs() / 60);
    let path = log.path().join(FILE);
    let mut file = log.locked(FILE)?;
    let mut text = String::new();
    (&mut file).take(1 << 20).read_to_string(&mut text).map_err(failed("read", &path))?;
    let mut counts: Vec<Count> = text.lines().filter_map(parse).collect();
    // A caller of an earlier minute with no alert held back needs no entry.
    counts.retain(|(other, at, _, held)| *other == uid || *at == minute || *held > 0);
    let index = counts.iter().position(|(other, ..)| *other == uid).unwrap_or_else(|| {
        counts.push((uid, minute, 0, 0));
        counts.len() - 1
    });
    let (_, at, count, held) = &mut counts[index];
    if *at != minute {
        // A clock that was set back starts a new count too.
        (*at, *count) = (minute, 0);
    }
    let admitted = if *count < MAX_PER_MINUTE {
        *count += 1;
        Some(std::mem::take(held))
    } else {
        *held += 1;
        None
    };
    let written: String = counts.iter().map(|(uid, at, count, held)| format!("{uid} {at} {count} {held}\n")).collect();
    let mut write = || -> std::io::Result<()> {
        file.rewind()?;
        file.write_all(written.as_bytes())?;
        file.set_len(written.len() as u64)
    };
    write().map_err(failed("write", &path))?;
    Ok(admitted)
}

fn parse(line: &str) -> Option<Count> {
    let mut words = line.split(' ');
    let count = (words.next()?.parse().ok()?, words.next()?.parse().ok()?, words.next()?.parse().ok()?, words.next()?.parse().ok()?);
    words.next().is_none().then_some(count)
}
