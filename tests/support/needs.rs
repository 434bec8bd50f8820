//! What a host must offer for a test to prove anything, and why it does not.

use std::{
    io::Write,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::OnceLock,
    thread,
};

use super::{
    exec::program_path,
    runner::{Who, is_root},
    timeouts::is_slow,
};

/// A condition of a test.
#[derive(Clone, Copy, Debug)]
pub enum Need {
    /// A cgroup of the run's own, with limits.
    Cgroup,
    /// The same on cgroup v1.
    Cgroup1,
    /// The same on cgroup v2.
    Cgroup2,
    /// No cgroup: the rlimits that stand in.
    NoCgroup,
    /// A program of the host.
    Program(&'static str),
    /// The environment that `scripts/prepare-data-science` makes.
    DataScience,
    /// What `scripts/prepare-wasm` makes.
    Wasm,
    /// What `scripts/prepare-pyodide` makes.
    Pyodide,
    /// Two CPUs or more.
    TwoCpus,
    /// A host that systemd runs; for an ordinary user their own manager.
    Systemd,
    /// Further conditions, of one module: the function returns what is missing.
    Other(fn() -> Option<String>),
    /// A machine of usual speed.
    Speed,
    /// The time that `scripts/test --long` has: a soak.
    Long,
    /// An ordinary user's time: root's half of a landing has it, and every other run of the tests.
    SlowAsUser,
    /// The program as it is shipped. One of profile `quick` is linked dynamically, and its
    /// assertions abort it at calls that cannot fail.
    ShippedProgram,
}

/// Why this user or host cannot run a test.
pub fn reason_to_skip(who: Who, needs: &[Need]) -> Option<String> {
    match (who, is_root()) {
        (Who::RootOnly, false) => return Some(String::from("for root only")),
        (Who::RootlessOnly, true) => return Some(String::from("for ordinary users only")),
        _ => {}
    }
    needs.iter().find_map(|need| match need {
        Need::Cgroup if cgroup() == "none" => Some(String::from("runs have no cgroup here: rlimits stand in")),
        Need::Cgroup1 if cgroup() != "v1" => Some(format!("runs have no cgroup v1 here, but {}", cgroup())),
        Need::Cgroup2 if cgroup() != "v2" => Some(format!("runs have no cgroup v2 here, but {}", cgroup())),
        Need::NoCgroup if cgroup() != "none" => Some(String::from("runs have a cgroup here, and no rlimit stands in for it")),
        Need::Program(name) if find_program(name).is_none() => Some(format!("{name} is not installed")),
        Need::DataScience if !Path::new("/opt/stockade/data-science/bin/python3").exists() => {
            Some(String::from("scripts/prepare-data-science has not been run"))
        }
        Need::Wasm if !Path::new("/opt/stockade/wasm/bin/wasmtime").exists() => Some(String::from("scripts/prepare-wasm has not been run")),
        Need::Pyodide if !Path::new("/opt/stockade/pyodide/bin/pyodide").exists() => {
            Some(String::from("scripts/prepare-pyodide has not been run"))
        }
        Need::TwoCpus if thread::available_parallelism().map_or(1, usize::from) < 2 => Some(String::from("one CPU only")),
        Need::Systemd if !systemd_answers() => Some(String::from("no systemd to ask for a unit")),
        Need::Other(missing) => missing(),
        Need::Speed if is_slow() => Some(String::from("too long on a machine as slow as STOCKADE_TEST_TIMEOUT_FACTOR says")),
        Need::Long if std::env::var("STOCKADE_TEST_LONG").as_deref() != Ok("yes") => Some(String::from("a soak, for scripts/test --long")),
        Need::SlowAsUser if !is_root() && std::env::var("STOCKADE_TEST_LANDING").as_deref() == Ok("yes") => {
            Some(String::from("slow, and root has run it: as a user for scripts/test --long"))
        }
        Need::ShippedProgram if is_dynamic() => {
            Some(String::from("the program is of profile `quick`: scripts/test integration-root has it"))
        }
        _ => None,
    })
}

/// Whether the program asks for a dynamic linker.
fn is_dynamic() -> bool {
    const LINKER: &[u8] = b"/lib64/ld-linux-x86-64.so.2\0";
    let program = std::fs::read(program_path().expect("checked at the start")).expect("read the program");
    // Among the first pages, where the section of its name lies.
    program.windows(LINKER.len()).take(1 << 16).any(|window| window == LINKER)
}

/// A program of the host, by name.
pub fn find_program(name: &str) -> Option<PathBuf> {
    ["/usr/bin", "/bin", "/usr/sbin", "/sbin"].iter().map(|directory| Path::new(directory).join(name)).find(|path| path.is_file())
}

/// Whether systemd runs this host, and the manager that would be asked.
pub fn systemd_answers() -> bool {
    let runtime = format!("/run/user/{}", nix::unistd::getuid());
    let mut command = Command::new("systemctl");
    if !is_root() {
        command.arg("--user").env("XDG_RUNTIME_DIR", &runtime).env("DBUS_SESSION_BUS_ADDRESS", format!("unix:path={runtime}/bus"));
    }
    command.args(["show", "--property=Version"]).output().is_ok_and(|output| output.status.success() && !output.stdout.is_empty())
}

/// The version of a run's cgroup here, by its own receipt: `v1`, `v2` or `none`.
pub fn cgroup() -> &'static str {
    static ANSWER: OnceLock<&str> = OnceLock::new();
    ANSWER.get_or_init(|| {
        let program = program_path().expect("checked at the start");
        let started = Command::new(program).arg("exec").stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn();
        let mut child = started.expect("start the program");
        let _refused = child.stdin.take().expect("piped").write_all(br#"{"code": "0"}"#);
        let output = child.wait_with_output().expect("wait for the program");
        let result: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
        let layers = result["receipt"]["layers"].as_array().cloned().unwrap_or_default();
        let kept = layers.iter().find(|layer| layer["layer"] == "cgroup" && layer["known"] == "read_back");
        let detail = kept.and_then(|layer| layer["detail"].as_str()).unwrap_or_default();
        ["v1", "v2"].into_iter().find(|version| detail.starts_with(version)).unwrap_or("none")
    })
}
