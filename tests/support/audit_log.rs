//! An audit log of one test's own, and what stands in it.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Output,
};

use nix::{
    mount::{MsFlags, mount},
    sched::{CloneFlags, unshare},
};
use serde_json::Value;

use super::{
    exec::stockade,
    leftovers::registry_ends_with_test,
    runner::{directory, is_root},
};

pub fn mount_tmpfs(at: &str, options: &str) {
    mount(Some("none"), at, Some("tmpfs"), MsFlags::empty(), Some(options)).unwrap();
}

/// A log of this test's own; its directory, which the first run makes. So is the registry: else
/// runs that other tests have lost would be written down here.
pub fn own_log() -> PathBuf {
    if !is_root() {
        return directory().join("home/.local/state/stockade/audit");
    }
    unshare(CloneFlags::CLONE_NEWNS).unwrap();
    mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>).unwrap();
    mount_tmpfs("/var/log", "size=4m,mode=755");
    fs::create_dir_all("/run/stockade").unwrap();
    mount_tmpfs("/run/stockade", "size=4m,mode=700");
    registry_ends_with_test();
    PathBuf::from("/var/log/stockade")
}

pub fn audit(arguments: &[&str]) -> (Option<i32>, String) {
    let Output { status, stdout, stderr } = stockade([&["audit"], arguments].concat()).output().unwrap();
    let said = String::from_utf8(stdout).unwrap() + &String::from_utf8(stderr).unwrap();
    assert!(said.chars().all(|c| c == '\n' || (' '..='~').contains(&c)), "{said:?}");
    (status.code(), said)
}

/// The last file, whole.
pub fn written(log: &Path) -> String {
    fs::read_to_string(log.join("audit-00000001.jsonl")).unwrap()
}

pub fn records(log: &Path) -> Vec<Value> {
    written(log).lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[track_caller]
pub fn is_whole() {
    let (status, said) = audit(&["verify"]);
    assert_eq!(status, Some(0), "{said}");
}
