//! Whether a user was told since the host's start that their runs lack layers.
//!
//! A file in the user's registry says which. It decides about a line for a person and about
//! nothing else: receipt, audit log and `doctor` name missing layers each time. Where the file
//! cannot be read or written the line is shown again. Root is told each time.

use std::{
    fs::{OpenOptions, read_to_string},
    io::{self, Read},
    os::unix::fs::{FileExt, OpenOptionsExt},
    path::Path,
};

use rustix::fs::OFlags;

use crate::{caller, facts};

/// Its name; records of runs have others.
const FILE: &str = "told";
/// It has a boot id and names of layers.
const MAX_LEN: u64 = 4096;

/// Whether this user is to be told that runs lack these layers; then they count as told.
pub fn is_due(layers: &[&str]) -> bool {
    let Ok(identity) = caller::identify(None) else { return true };
    if identity.privileged {
        return true;
    }
    facts::registry(&identity).map_or(true, |registry| !was_told(&registry.directory().join(FILE), layers).unwrap_or(false))
}

fn was_told(path: &Path, layers: &[&str]) -> io::Result<bool> {
    let boot = read_to_string("/proc/sys/kernel/random/boot_id")?;
    let now = format!("{}\n{}\n", boot.trim_end(), layers.join(" "));
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false).mode(0o600).custom_flags(flags.bits().cast_signed());
    let mut file = options.open(path)?;
    let mut found = Vec::new();
    (&mut file).take(MAX_LEN).read_to_end(&mut found)?;
    if found == now.as_bytes() {
        return Ok(true);
    }
    file.set_len(0)?;
    file.write_all_at(now.as_bytes(), 0)?;
    Ok(false)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]
    use super::*;

    #[test]
    fn layers_are_told_once_and_others_anew() {
        let place = std::env::temp_dir().join(format!("stockade-notice-{}", std::process::id()));
        std::fs::create_dir(&place).unwrap();
        let path = place.join(FILE);
        let told = |layers: &[&str]| was_told(&path, layers).unwrap();
        assert!(!told(&["cgroup"]) && told(&["cgroup"]));
        assert!(!told(&["cgroup", "landlock"]) && told(&["cgroup", "landlock"]) && !told(&["cgroup"]));
        std::fs::write(&path, "00000000-0000-0000-0000-000000000000\ncgroup\n").unwrap();
        assert!(!told(&["cgroup"]) && told(&["cgroup"]), "of an earlier boot");
        std::fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink("elsewhere", &path).unwrap();
        was_told(&path, &["cgroup"]).unwrap_err();
        std::fs::remove_dir_all(place).unwrap();
    }
}
