//! What a run left on this host: processes, mounts, cgroups, records of runs.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use serde_json::json;

use super::{
    exec::{exec, program_path, text},
    runner::{directory, eventually, is_root},
};

/// The directory of the run records of the user who runs this.
pub fn registry() -> PathBuf {
    if is_root() { PathBuf::from("/run/stockade") } else { directory().join("home/stockade") }
}

/// Cgroups of this launcher's run.
pub fn cgroups_of(launchers: &BTreeSet<u32>) -> Vec<PathBuf> {
    fn walk(directory: &Path, depth: usize, found: &mut Vec<PathBuf>) {
        for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                if entry.file_name().to_string_lossy().starts_with("stockade-") {
                    found.push(entry.path());
                }
                if depth < 8 {
                    walk(&entry.path(), depth + 1, found);
                }
            }
        }
    }
    let mut found = Vec::new();
    walk(Path::new("/sys/fs/cgroup"), 0, &mut found);
    found.retain(|path| {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        name.split('-').nth(1).and_then(|pid| pid.parse().ok()).is_some_and(|pid| launchers.contains(&pid))
    });
    found
}

/// Processes of the sandboxes that this scratch was shown in, and launchers of this
/// program: by their mounts, or, where those may not be read, by their owner.
pub fn processes_around(scratch: &Path, before: &BTreeSet<u32>) -> Vec<String> {
    let own = nix::unistd::getuid().as_raw();
    let program = program_path().unwrap();
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc").unwrap().flatten() {
        let Ok(pid) = entry.file_name().to_string_lossy().parse::<u32>() else { continue };
        if before.contains(&pid) {
            continue;
        }
        let status = fs::read_to_string(entry.path().join("status")).unwrap_or_default();
        let field =
            |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).map(|rest| rest.trim().to_owned()).unwrap_or_default();
        let uid = field("Uid:").split_whitespace().next().and_then(|uid| uid.parse().ok()).unwrap_or(0u32);
        let mounts = fs::read_to_string(entry.path().join("mountinfo")).unwrap_or_default();
        let launcher = fs::read_link(entry.path().join("exe")).is_ok_and(|exe| exe == program);
        let ours = if is_root() { mounts.contains(text(scratch)) || launcher } else { uid == own };
        if ours && !field("State:").starts_with('Z') {
            found.push(format!("{pid} {} {}", field("Name:"), field("State:")));
        }
    }
    found
}

pub fn processes() -> BTreeSet<u32> {
    fs::read_dir("/proc").unwrap().flatten().filter_map(|entry| entry.file_name().to_string_lossy().parse().ok()).collect()
}

pub fn mounts() -> usize {
    fs::read_to_string("/proc/self/mountinfo").unwrap().lines().count()
}

pub fn names(directory: &Path) -> BTreeSet<String> {
    fs::read_dir(directory).into_iter().flatten().flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

/// Records that no launcher holds any more: such a file can be locked.
pub fn dead_records() -> Vec<String> {
    names(&registry())
        .into_iter()
        .filter(|name| {
            // The socket's file is no record, and stays; so do requests for approval, of any user, and
            // what the user was told.
            if name == "connections" || name == "told" || name == "scratch-locks" || name.starts_with("approval-") {
                return false;
            }
            let Ok(file) = fs::File::open(registry().join(name)) else { return false };
            file.try_lock().is_ok() && fs::exists(registry().join(name)).unwrap()
        })
        .collect()
}

/// Another launcher of this host may be sweeping the same record at this moment, or have
/// been killed at it: then it is the start after that one which finds it free.
#[track_caller]
pub fn the_next_start_has_swept(launchers: &BTreeSet<u32>) {
    let swept = (0..5).any(|_| {
        let clean = cgroups_of(launchers).is_empty();
        if !clean {
            exec(json!({"code": ""})).succeeded();
        }
        clean
    });
    assert!(swept, "{:?}, records {:?}", cgroups_of(launchers), names(&registry()));
}

/// Whether this test's registry is a mount of its own.
static HAS_OWN_REGISTRY: AtomicBool = AtomicBool::new(false);

/// The registry ends with this process, as the mount that it is in.
pub fn registry_ends_with_test() {
    HAS_OWN_REGISTRY.store(true, Ordering::Relaxed);
}

/// No start after the test knows its own registry. The one before may have met the last processes of
/// a killed launcher's run, and have left its cgroup to the next.
pub fn sweep_own_registry() {
    if HAS_OWN_REGISTRY.load(Ordering::Relaxed) {
        let _kept_where_no_log_is = eventually(Duration::from_secs(5), || {
            let is_swept = dead_records().is_empty();
            if !is_swept {
                exec(json!({"code": ""}));
            }
            is_swept
        });
    }
}

/// A process of the host with these words in its command line.
pub fn host_process_with(words: &str) -> bool {
    let entries = fs::read_dir("/proc").unwrap();
    let own = std::process::id().to_string();
    entries.flatten().any(|entry| {
        let name = entry.file_name().to_string_lossy().into_owned();
        name != own
            && name.bytes().all(|byte| byte.is_ascii_digit())
            && fs::read(entry.path().join("cmdline")).is_ok_and(|line| String::from_utf8_lossy(&line).replace('\0', " ").contains(words))
    })
}

/// Within five seconds no process of the host has these words in its command line.
#[track_caller]
pub fn no_process_is_left(words: &str) {
    assert!(eventually(Duration::from_secs(5), || !host_process_with(words)), "a process is left: {words}");
}
