//! Two runs at the same time: one, the concurrent run, has sockets and files, and the other
//! tries to reach them.
//!
//! The caller's scratch, which both share by design, is not attacked.

use nix::libc::{ECONNREFUSED, ENOENT, EPERM};
use stockade_policy::{
    model::{Policy, SocketFamily},
    plan::HOME,
};
use stockade_protocol::probe::{Script, Value};

use super::{O_CREAT, O_WRONLY, seek};
use crate::{
    attack::{Attack, Class, Control, ControlExpectation, Expected},
    fixture::Fixture,
    script::{Builder, n, script},
};

const CLASS: Class = Class::CrossRunLeaks;
/// Where a run writes that no other run sees.
const PLACES: [&str; 3] = ["/tmp", "/dev/shm", HOME];
/// A port on the concurrent run's loopback, and one for the control.
const PORTS: (u16, u16) = (41_001, 41_002);

/// The file in the shared scratch by which the concurrent run reports that it is ready.
pub(crate) const READY: &str = "concurrent-run-is-ready";

fn file(place: &str, name: &str) -> String {
    format!("{place}/{name}-beside")
}

fn in_memory(name: &str) -> Vec<u8> {
    [&[1, 0, 0][..], name.as_bytes(), b"-beside"].concat()
}

fn on_loopback(port: u16) -> Vec<u8> {
    [&[2, 0][..], &port.to_be_bytes(), &[127, 0, 0, 1], &[0; 8]].concat()
}

fn socket_at(b: &mut Builder, address: &[u8]) -> (Value, Value, Value) {
    let family = i64::from(address.first().copied().unwrap_or(0));
    let fd = b.need("socket", &[n(family), n(1), n(0)]);
    (fd, b.bytes(address), n(i64::try_from(address.len()).unwrap_or(0)))
}

fn listen(b: &mut Builder, address: &[u8]) {
    let (fd, at, length) = socket_at(b, address);
    b.need("bind", &[fd, at, length]);
    b.need("listen", &[fd, n(1)]);
}

fn connect(b: &mut Builder, address: &[u8]) {
    let (fd, at, length) = socket_at(b, address);
    b.attack("connect", &[fd, at, length]);
}

fn leave(b: &mut Builder, path: &str, text: &str) {
    let fd = b.open(path, O_WRONLY | O_CREAT);
    let bytes = b.text(text);
    b.need("write", &[fd, bytes, n(i64::try_from(text.len()).unwrap_or(0))]);
}

/// What the concurrent run does: it makes its sockets and files, reports, and waits.
pub(crate) fn concurrent_script(name: &str, policy: &Policy) -> Script {
    let has = |family| policy.seccomp.socket_families.contains(&family);
    script(|b| {
        if has(SocketFamily::Unix) {
            listen(b, &in_memory(name));
        }
        if has(SocketFamily::Inet) {
            listen(b, &on_loopback(PORTS.0));
        }
        let home = if policy.scratch.home { &PLACES[..2] } else { &PLACES[..] };
        home.iter().for_each(|place| leave(b, &file(place, name), name));
        leave(b, READY, name);
        // Longer than any limit on its time.
        let time = b.bytes(&[3600u64.to_le_bytes(), 0u64.to_le_bytes()].concat());
        b.may("nanosleep", &[time, n(0)]);
    })
}

pub(crate) fn attacks(fixture: &Fixture) -> Vec<Attack> {
    if fixture.plan.scratch.read_only {
        return Vec::new();
    }
    let name = &fixture.abstract_name;
    let mut all = Vec::new();
    let mut reach = |what: &str, tried: String, layers, theirs: Vec<u8>, own: Vec<u8>| {
        let twin = script(|b| {
            listen(b, &own);
            connect(b, &own);
        });
        let act = script(|b| connect(b, &theirs));
        let expected = Expected::Errno(&[ECONNREFUSED, EPERM]);
        all.push(Attack::new(CLASS, what, tried, layers, act, expected, Control::Instead(twin, ControlExpectation::Succeeds)).concurrent());
    };
    if fixture.has_family(1) {
        let layers: &[&str] = &["network namespace", "landlock of the payload"];
        let tried = String::from("connect to an abstract socket on which another run listens at this moment");
        reach("an abstract socket of a run beside it", tried, layers, in_memory(name), in_memory(&format!("{name}-own")));
    }
    // Behind an egress gate the gate decides on every connection; the egress suite tests that.
    if fixture.has_family(2) && fixture.plan.egress.is_none() {
        let tried = format!("connect to 127.0.0.1 port {}, on which another run listens at this moment", PORTS.0);
        reach("a service of a run beside it", tried, &["network namespace"], on_loopback(PORTS.0), on_loopback(PORTS.1));
    }
    let writable = fixture.plan.writable_mounts();
    for place in PLACES.into_iter().filter(|place| writable.iter().any(|path| path.as_os_str() == *place)) {
        let own = file(place, &format!("{name}-own"));
        let twin = script(|b| {
            leave(b, &own, name);
            let (to, length) = b.read(&own);
            b.find(to, length, name.as_bytes());
        });
        all.push(
            Attack::new(
                CLASS,
                format!("what a run beside it has in {place}"),
                format!("read a file that another run has in {place} at this moment"),
                &["mounts"],
                seek(&file(place, name), name),
                Expected::Errno(&[ENOENT]),
                Control::Instead(twin, ControlExpectation::Finds),
            )
            .concurrent(),
        );
    }
    all
}
