//! The attacks, a file for each class.

mod concurrent;
mod file_system;
mod forgery;
mod kernel_surface;
mod launcher;
mod leaks;
mod network;
mod privileges;
mod processes;
mod resources;
mod system_calls;

use stockade_protocol::probe::Script;

use crate::{
    attack::{Attack, Class, Control, ControlExpectation, ControlHost, Expected},
    fixture::Fixture,
    script::{Builder, CWD, n, script},
};

pub(crate) use concurrent::{READY, concurrent_script};
pub(crate) use leaks::plant;

/// All of them, as far as they make sense under the policy.
pub(crate) fn all(fixture: &Fixture) -> Vec<Attack> {
    [
        file_system::attacks,
        processes::attacks,
        privileges::attacks,
        system_calls::attacks,
        kernel_surface::attacks,
        network::attacks,
        resources::attacks,
        forgery::attacks,
        leaks::attacks,
        concurrent::attacks,
        launcher::attacks,
    ]
    .into_iter()
    .flat_map(|attacks| attacks(fixture))
    .collect()
}

const O_WRONLY: i64 = 1;
const O_CREAT: i64 = 0o100;

/// Reads a file's beginning.
fn read(path: &str) -> Script {
    script(|b| {
        b.read(path);
    })
}

/// Reads a file's beginning and looks for a text in it.
fn seek(path: &str, sought: &str) -> Script {
    script(|b| {
        let (to, length) = b.read(path);
        b.find(to, length, sought.as_bytes());
    })
}

/// Opens a file with these flags.
fn open(path: &str, flags: i64) -> Script {
    script(|b| open_with(b, path, flags))
}

fn open_with(b: &mut Builder, path: &str, flags: i64) {
    let path = b.text(path);
    b.attack("openat", &[CWD, path, n(flags), n(0o600)]);
}

/// Does something to what lies at a path, or makes it there.
type Act = fn(&mut Builder, &str);

const WRITE: Act = |b, path| open_with(b, path, O_WRONLY);
const CREATE: Act = |b, path| open_with(b, path, O_WRONLY | O_CREAT);
const TRUNCATE: Act = |b, path| {
    let path = b.text(path);
    b.attack("truncate", &[path, n(0)]);
};
const CHANGE_MODE: Act = |b, path| {
    let path = b.text(path);
    b.attack("fchmodat", &[CWD, path, n(0o600)]);
};
const CHANGE_TIMES: Act = |b, path| {
    let path = b.text(path);
    b.attack("utimensat", &[CWD, path, n(0), n(0)]);
};
const RENAME: Act = |b, path| {
    let (from, to) = (b.text(path), b.text(&format!("{path}-2")));
    b.attack("renameat2", &[CWD, from, CWD, to, n(0)]);
};
const REMOVE: Act = |b, path| {
    let path = b.text(path);
    b.attack("unlinkat", &[CWD, path, n(0)]);
};
const MAKE_DIRECTORY: Act = |b, path| {
    let path = b.text(path);
    b.attack("mkdirat", &[CWD, path, n(0o755)]);
};
const MAKE_LINK: Act = |b, path| {
    let (to, path) = (b.text("/tmp"), b.text(path));
    b.attack("symlinkat", &[to, CWD, path]);
};

/// An act alone.
fn on(path: &str, act: Act) -> Script {
    script(|b| act(b, path))
}

/// An act on a file that the script itself has made.
fn on_new(path: &str, act: Act) -> Script {
    script(|b| {
        b.open(path, O_WRONLY | O_CREAT);
        act(b, path);
    })
}

/// Looks whether something is there.
fn look(path: &str) -> Script {
    script(|b| {
        let (path, stat) = (b.text(path), b.space(144));
        b.attack("newfstatat", &[CWD, path, stat, n(0)]);
    })
}

/// Where a link leads.
fn read_link(path: &str) -> Script {
    script(|b| {
        let (path, to) = (b.text(path), b.space(256));
        b.attack("readlinkat", &[CWD, path, to, n(256)]);
    })
}

/// Whether the sandbox shares a namespace of the launcher's.
fn shared_namespace(class: Class, kind: &str, layers: &'static [&'static str]) -> Option<Attack> {
    let link = format!("/proc/self/ns/{kind}");
    let own = std::fs::read_link(&link).ok()?.to_string_lossy().into_owned();
    let act = script(|b| {
        let (path, to) = (b.text(&link), b.space(64));
        let length = b.attack("readlinkat", &[CWD, path, to, n(64)]);
        b.find(to, length, own.as_bytes());
    });
    Some(Attack::new(
        class,
        format!("the launcher's {kind} namespace"),
        format!("be in the same {kind} namespace as the launcher"),
        layers,
        act,
        Expected::Value(0),
        Control::Outside(ControlHost::Host, ControlExpectation::Finds),
    ))
}
