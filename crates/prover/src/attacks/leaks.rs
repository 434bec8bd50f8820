//! From the host and from earlier runs into a run.

use nix::libc::{EACCES, ENOENT, EPERM};
use stockade_policy::plan::{HOME, Mode, Plan, RootEntry};
use stockade_protocol::probe::Script;

use super::{O_CREAT, O_WRONLY, seek, shared_namespace};
use crate::{
    attack::{Attack, Class, Control, ControlExpectation, ControlHost, Expected, Limits, Observation, Run, RunControl},
    fixture::Fixture,
    script::{n, one, script},
};

const CLASS: Class = Class::CrossRunLeaks;
/// What an earlier run leaves in each place that it may write to.
const LEFT: &str = "left-behind";
const PLACES: [&str; 4] = ["/tmp", "/dev/shm", HOME, "/scratch"];

pub(crate) fn attacks(fixture: &Fixture) -> Vec<Attack> {
    let mut all = Vec::new();
    for (kind, layer) in
        [("ipc", &["IPC namespace"] as &'static [&'static str]), ("uts", &["UTS namespace"]), ("cgroup", &["cgroup namespace"])]
    {
        all.extend(shared_namespace(CLASS, kind, layer));
    }
    all.extend(left_behind(fixture));
    all.extend(names_of_the_host(fixture));
    all.extend(variables(fixture));
    all.extend(ownership(fixture));
    all.extend(keyring(fixture));
    all
}

/// The session keyring that the launcher was started with, by its serial number. Only a process
/// that possesses it may link it, and a process inherits possession; its user does not matter.
fn keyring(fixture: &Fixture) -> Option<Attack> {
    const LINK: i64 = 8;
    const PROCESS_KEYRING: i64 = -2;
    let serial = fixture.session_keyring?;
    let (layers, refused): (&'static [&'static str], _) = match fixture.knows("keyctl") {
        true => (&["keyring"], Expected::Errno(&[EACCES])),
        false => (&["seccomp", "keyring"], Expected::Errno(&[EPERM])),
    };
    Some(Attack::new(
        CLASS,
        "the launcher's session keyring",
        format!("take hold of the launcher's session keyring, number {serial}, and of every key in it"),
        layers,
        one("keyctl", &[n(LINK), n(serial), n(PROCESS_KEYRING)]),
        refused,
        Control::Outside(ControlHost::Host, ControlExpectation::Succeeds),
    ))
}

fn leave(b: &mut crate::script::Builder, path: &str) {
    let path = b.text(path);
    let fd = b.may("openat", &[crate::script::CWD, path, n(O_WRONLY | O_CREAT), n(0o666)]);
    let text = b.text(LEFT);
    b.may("write", &[fd, text, n(i64::try_from(LEFT.len()).unwrap_or(0))]);
}

/// What the first run of all does: it leaves something for the later ones.
pub(crate) fn plant() -> Script {
    script(|b| PLACES.iter().for_each(|place| leave(b, &format!("{place}/{LEFT}"))))
}

fn left_behind(fixture: &Fixture) -> Vec<Attack> {
    let writable: Vec<String> = fixture.plan.writable_mounts().iter().map(|path| path.to_string_lossy().into_owned()).collect();
    PLACES
        .into_iter()
        .filter(|place| writable.iter().any(|path| path == place))
        .map(|place| {
            let twin = script(|b| {
                leave(b, &format!("{place}/{LEFT}-here"));
                let (to, length) = b.read(&format!("{place}/{LEFT}-here"));
                b.find(to, length, LEFT.as_bytes());
            });
            Attack::new(
                CLASS,
                format!("what a run left in {place}"),
                format!("read a file that an earlier run has written to {place}"),
                &["mounts"],
                seek(&format!("{place}/{LEFT}"), LEFT),
                Expected::Errno(&[ENOENT]),
                Control::Instead(twin, ControlExpectation::Finds),
            )
        })
        .collect()
}

/// What the host is called, and where on it the run is.
fn names_of_the_host(fixture: &Fixture) -> Vec<Attack> {
    let mut all = Vec::new();
    if fixture.host_name != fixture.plan.identity.hostname && fixture.host_name.len() > 2 {
        let by_uname = script(|b| {
            let to = b.space(65 * 6);
            b.attack("uname", &[to]);
            b.find(to, n(65 * 6), fixture.host_name.as_bytes());
        });
        all.push(Attack::new(
            CLASS,
            "the host's name",
            "learn the host's name by uname",
            &["UTS namespace"],
            by_uname,
            Expected::Value(0),
            Control::Outside(ControlHost::Host, ControlExpectation::Finds),
        ));
        for path in ["/proc/sys/kernel/hostname", "/etc/hostname", "/etc/hosts"] {
            let there = std::fs::read_to_string(path).is_ok_and(|text| text.contains(&fixture.host_name));
            let inside = path.starts_with("/proc") || fixture.plan.root.iter().any(|entry| matches!(entry, RootEntry::File { target, .. } if std::path::Path::new("/").join(target) == std::path::Path::new(path)));
            if there && inside {
                all.push(Attack::new(
                    CLASS,
                    format!("the host's name in {path}"),
                    format!("learn the host's name from {path}"),
                    &["UTS namespace", "mounts"],
                    seek(path, &fixture.host_name),
                    Expected::Value(0),
                    Control::Outside(ControlHost::Host, ControlExpectation::Finds),
                ));
            }
        }
    }
    all.push(Attack::new(
        CLASS,
        "the run's cgroup",
        "learn by which name the host keeps the run's cgroup",
        &["cgroup namespace"],
        seek("/proc/self/cgroup", "stockade-"),
        Expected::Value(0),
        Control::OutsideInstead(ControlHost::Host, seek("/proc/self/cgroup", ":/"), ControlExpectation::Finds),
    ));
    if let Ok(id) = std::fs::read_to_string("/etc/machine-id") {
        let id = id.trim().to_owned();
        if id.len() == 32
            && fixture.plan.root.iter().any(|entry| matches!(entry, RootEntry::File { target, .. } if target.ends_with("machine-id")))
        {
            all.push(Attack::new(
                CLASS,
                "the host's machine id",
                "learn the host's unique number from /etc/machine-id",
                &["mounts"],
                seek("/etc/machine-id", &id),
                Expected::Value(0),
                Control::Outside(ControlHost::Host, ControlExpectation::Finds),
            ));
        }
    }
    all
}

/// The launcher's environment, in which secrets often lie.
fn variables(fixture: &Fixture) -> Vec<Attack> {
    let own = std::env::vars_os().find_map(|(name, value)| {
        let (name, value) = (name.into_string().ok()?, value.into_string().ok()?);
        let ours = fixture.plan.environment.contains(&name) && fixture.plan.environment_values.contains(&format!("{name}={value}"));
        (!ours && !value.is_empty()).then_some(format!("{name}={value}"))
    });
    let Some(variable) = own else { return Vec::new() };
    let name = variable.split('=').next().unwrap_or_default().to_owned();
    vec![Attack::new(
        CLASS,
        "the launcher's environment",
        format!("find the launcher's variable {name} in the environment"),
        &["launcher"],
        seek("/proc/self/environ", &variable),
        Expected::Value(0),
        Control::Outside(ControlHost::Host, ControlExpectation::Finds),
    )]
}

/// Files that a run leaves in a host scratch must be the caller's, not of an id that a
/// later run will have.
fn ownership(fixture: &Fixture) -> Vec<Attack> {
    let Plan { mode, identity, .. } = &fixture.plan;
    if *mode != Mode::Root || fixture.plan.scratch.read_only || identity.user_namespaces == stockade_policy::plan::UserNamespaces::Missing {
        return Vec::new();
    }
    let make = |name: &str| {
        let name = name.to_owned();
        script(move |b| {
            b.open(&name, O_WRONLY | O_CREAT);
        })
    };
    let run = Run {
        script: make("made-by-the-run"),
        first_process: false,
        limits: Limits::new(),
        host_scratch: true,
        collect: &[],
        expected: String::from("it is the caller's on the host"),
        judge: |_, fixture| {
            use std::os::unix::fs::MetadataExt;
            match std::fs::symlink_metadata(fixture.scratch.join("made-by-the-run")) {
                Ok(file) => {
                    Observation { held: file.uid() == fixture.scratch_owner(), what: format!("it belongs to {} on the host", file.uid()) }
                }
                Err(error) => Observation { held: false, what: format!("it was not made: {error}") },
            }
        },
    };
    vec![Attack::run(
        CLASS,
        "a file of a later run's owner",
        "leave a file in a host scratch that belongs to the run's host uid, which a later run will have",
        &["idmapped scratch"],
        run,
        RunControl::Outside(ControlHost::Host, make(&fixture.path("made-outside")), ControlExpectation::Succeeds),
    )]
}
