//! The network: the host's own services, and everything beyond.

use nix::libc::{EACCES, ECONNREFUSED, EHOSTUNREACH, ENETUNREACH, ENOENT, EPERM};
use stockade_protocol::probe::Script;

use super::shared_namespace;
use crate::{
    attack::{Attack, Class, Control, ControlExpectation, ControlHost, Expected},
    fixture::Fixture,
    script::{n, one, script},
};

const CLASS: Class = Class::Network;
const NET: &[&str] = &["network namespace"];
const STREAM: i64 = 1;
const DATAGRAM: i64 = 2;

pub(crate) fn attacks(fixture: &Fixture) -> Vec<Attack> {
    let mut all = Vec::new();
    all.extend(shared_namespace(CLASS, "net", NET));
    all.extend(services_of_the_host(fixture));
    all.extend(sockets_of_the_host(fixture));
    all.extend(beyond(fixture));
    all.extend(being_a_router(fixture));
    all
}

fn address_v4(address: [u8; 4], port: u16) -> Vec<u8> {
    [&[2, 0][..], &port.to_be_bytes(), &address, &[0; 8]].concat()
}

fn address_v6(address: [u8; 16], port: u16) -> Vec<u8> {
    [&[10, 0][..], &port.to_be_bytes(), &[0; 4], &address, &[0; 4]].concat()
}

fn connect(kind: i64, address: &[u8]) -> Script {
    script(|b| {
        let family = i64::from(address.first().copied().unwrap_or(0));
        let fd = b.attack("socket", &[n(family), n(kind), n(0)]);
        let length = n(i64::try_from(address.len()).unwrap_or(0));
        let address = b.bytes(address);
        b.attack("connect", &[fd, address, length]);
    })
}

/// The errors of a connection inside: where the family is allowed, no listener or the egress
/// gate's refusal; else the filter's.
fn refused(fixture: &Fixture, family: u32) -> Expected {
    if fixture.has_family(family) { Expected::Errno(&[ECONNREFUSED, ENETUNREACH, EHOSTUNREACH, EACCES]) } else { Expected::Errno(&[EPERM]) }
}

const LOOPBACK_V6: [u8; 16] = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1];
const MAPPED: [u8; 16] = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 127, 0, 0, 1];

fn services_of_the_host(fixture: &Fixture) -> Vec<Attack> {
    let mut targets = vec![
        ("127.0.0.1", address_v4([127, 0, 0, 1], fixture.port)),
        ("0.0.0.0", address_v4([0, 0, 0, 0], fixture.port)),
        ("an IPv4 address in IPv6", address_v6(MAPPED, fixture.port)),
    ];
    if fixture.has_ipv6() {
        targets.push(("::1", address_v6(LOOPBACK_V6, fixture.port)));
        targets.push(("::", address_v6([0; 16], fixture.port)));
    }
    let mut all: Vec<Attack> = targets
        .into_iter()
        .map(|(name, address)| {
            let family = u32::from(address.first().copied().unwrap_or(0));
            Attack::new(
                CLASS,
                format!("a service of the host at {name}"),
                format!("connect to a service that listens on the host's loopback, at {name} port {}", fixture.port),
                NET,
                connect(STREAM, &address),
                refused(fixture, family),
                Control::Outside(ControlHost::Host, ControlExpectation::Succeeds),
            )
        })
        .collect();
    if fixture.plan.egress.is_none() {
        // The second send returns the error of the first.
        let act = script(|b| {
            let address = address_v4([127, 0, 0, 1], fixture.port);
            let fd = b.attack("socket", &[n(2), n(DATAGRAM), n(0)]);
            let length = n(i64::try_from(address.len()).unwrap_or(0));
            let (address, byte) = (b.bytes(&address), b.text("x"));
            b.attack("connect", &[fd, address, length]);
            b.may("write", &[fd, byte, n(1)]);
            b.attack("write", &[fd, byte, n(1)]);
        });
        all.push(Attack::new(
            CLASS,
            "a datagram for a service of the host",
            "send UDP to a service on the host's loopback",
            NET,
            act,
            refused(fixture, 2),
            Control::Outside(ControlHost::Host, ControlExpectation::Succeeds),
        ));
    }
    all
}

/// Sockets that have a name in place of an address.
fn sockets_of_the_host(fixture: &Fixture) -> Vec<Attack> {
    let unix = |path: &[u8]| [&[1, 0][..], path].concat();
    let hidden = if fixture.has_family(1) { Expected::Errno(&[ECONNREFUSED, EPERM]) } else { Expected::Errno(&[EPERM]) };
    let missing = if fixture.has_family(1) { Expected::Errno(&[ENOENT]) } else { Expected::Errno(&[EPERM]) };
    let abstract_address = unix(&[b"\0", fixture.abstract_name.as_bytes()].concat());
    let path = unix(&[fixture.socket_path().as_bytes(), b"\0"].concat());
    let attack = |name: &str, tried: &str, layers, address: &[u8], expected| {
        Attack::new(
            CLASS,
            name,
            tried,
            layers,
            connect(STREAM, address),
            expected,
            Control::Outside(ControlHost::Host, ControlExpectation::Succeeds),
        )
    };
    vec![
        attack("an abstract socket of the host", "connect to an abstract socket on which the host listens", NET, &abstract_address, hidden),
        attack("a socket of the host by its path", "connect to a socket of the host by its path", &["mounts"], &path, missing),
    ]
}

/// Addresses beyond the host. Nothing is sent where the sandbox shares the host's network
/// namespace.
fn beyond(fixture: &Fixture) -> Vec<Attack> {
    if fixture.plan.egress.is_some() {
        return vec![Attack::allowed(
            CLASS,
            "peers of the whitelist",
            "connect to the peers that the policy's whitelist names; the suite of the egress gate tries the rest",
            "[egress] whitelist",
        )];
    }
    let own = std::fs::read_link("/proc/self/ns/net").map(|link| link.to_string_lossy().into_owned()).unwrap_or_default();
    let targets: [(&str, Vec<u8>); 9] = [
        ("a name server", address_v4([192, 0, 2, 53], 53)),
        ("the metadata service of a cloud", address_v4([169, 254, 169, 254], 80)),
        ("a private network (10/8)", address_v4([10, 0, 0, 1], 22)),
        ("a private network (172.16/12)", address_v4([172, 17, 0, 1], 2375)),
        ("a private network (192.168/16)", address_v4([192, 168, 0, 1], 443)),
        ("a carrier's network (100.64/10)", address_v4([100, 64, 0, 1], 80)),
        ("a peer over IPv6", address_v6([0x20, 1, 0xd, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1], 443)),
        ("a neighbour over IPv6", address_v6([0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1], 443)),
        ("all hosts of the link", address_v4([255, 255, 255, 255], 67)),
    ];
    let mut all = Vec::new();
    for (kind, how) in [(STREAM, "TCP"), (DATAGRAM, "UDP")] {
        for (name, address) in &targets {
            let family = u32::from(address.first().copied().unwrap_or(0));
            if !fixture.has_family(family) {
                continue;
            }
            let act = script(|b| {
                let (path, to) = (b.text("/proc/self/ns/net"), b.space(64));
                let length = b.need("readlinkat", &[crate::script::CWD, path, to, n(64)]);
                let shared = b.find(to, length, own.as_bytes());
                b.require(shared, n(0));
                let fd = b.need("socket", &[n(i64::from(family)), n(kind), n(0)]);
                let length = n(i64::try_from(address.len()).unwrap_or(0));
                let address = b.bytes(address);
                b.attack("connect", &[fd, address, length]);
            });
            let lo = if family == 2 { address_v4([127, 0, 0, 1], 9) } else { address_v6(LOOPBACK_V6, 9) };
            // A datagram socket connects to lo even where no process listens.
            all.push(Attack::new(
                CLASS,
                format!("{name}, by {how}"),
                format!("connect to {name} by {how}"),
                NET,
                act,
                Expected::Errno(&[ENETUNREACH, EHOSTUNREACH, EACCES]),
                Control::Instead(connect(DATAGRAM, &lo), ControlExpectation::Succeeds),
            ));
        }
    }
    all
}

/// What needs rights over the network namespace.
fn being_a_router(fixture: &Fixture) -> Vec<Attack> {
    if !fixture.has_family(2) {
        return Vec::new();
    }
    let refused = Expected::Errno(&[EPERM]);
    let own = || Control::Outside(ControlHost::OwnNamespaces, ControlExpectation::Succeeds);
    let layers: &[&str] = &["capabilities", "user_namespace"];
    let mut all = vec![
        Attack::new(CLASS, "a raw socket", "open a raw internet socket", layers, one("socket", &[n(2), n(3), n(6)]), refused, own()),
        Attack::new(
            CLASS,
            "a privileged port",
            "listen on port 80",
            layers,
            script(|b| {
                let address = b.bytes(&address_v4([0, 0, 0, 0], 80));
                let fd = b.need("socket", &[n(2), n(STREAM), n(0)]);
                b.attack("bind", &[fd, address, n(16)]);
            }),
            Expected::Errno(&[EACCES]),
            own(),
        ),
    ];
    let options = [("mark packets", 1i64, 36i64), ("be a transparent proxy", 0, 19), ("repair a TCP connection", 6, 19)];
    for (name, level, option) in options {
        all.push(Attack::new(
            CLASS,
            name,
            format!("{name}, by a socket's option {option}"),
            layers,
            script(|b| {
                let on = b.bytes(&1u32.to_le_bytes());
                let fd = b.need("socket", &[n(2), n(STREAM), n(0)]);
                b.attack("setsockopt", &[fd, n(level), n(option), on, n(4)]);
            }),
            Expected::Errno(&[EPERM, EACCES]),
            own(),
        ));
    }
    all
}
