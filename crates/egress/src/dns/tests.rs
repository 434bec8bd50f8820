//! Valid and invalid queries and their replies.
//!
//! No network is used.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use super::*;
use stockade_policy::whitelist::Whitelist;

const OPT: &[u8] = &[0, 0, 41, 4, 208, 0, 0, 0, 0, 0, 0];

fn decider() -> Decider {
    let rules = ["pypi.org:443", "*.pythonhosted.org:443", "10.0.5.0/24:443"];
    Decider::new(Whitelist::new(rules.iter().map(|text| text.parse().unwrap()).collect()), Vec::new())
}

fn wire(name: &str) -> Vec<u8> {
    let label = |text: &str| [&[u8::try_from(text.len()).unwrap()], text.as_bytes()].concat();
    name.split('.').chain([""]).flat_map(label).collect()
}

/// A query as the C library sends it.
fn question(name: &[u8], kind: u16, extra: &[u8]) -> Vec<u8> {
    let head = [0xab, 0xcd, 1, 0, 0, 1, 0, 0, 0, 0, 0, u8::from(!extra.is_empty())];
    [&head[..], name, &kind.to_be_bytes(), &[0, 1], extra].concat()
}

fn ask(name: &str, kind: u16) -> DnsReply {
    answer(&question(&wire(name), kind, &[]), &decider(), &mut Names::default(), 0)
}

fn code(reply: &[u8]) -> u8 {
    reply[3] & 0xf
}

#[test]
fn an_allowed_name_has_one_address_and_nothing_else() {
    let answer = ask("pypi.org", A);
    assert_eq!(answer.denied, None);
    let reply = answer.reply.unwrap();
    let expected = [
        &[0xab, 0xcd, 0x85, 0x80, 0, 1, 0, 1, 0, 0, 0, 0][..],
        &wire("pypi.org"),
        &[0, 1, 0, 1, 0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 60, 0, 4, 198, 18, 0, 1],
    ]
    .concat();
    assert_eq!(reply, expected);
    // AAAA, TXT, HTTPS, SVCB, ANY, NULL, SRV: the name exists without such a record.
    for kind in [28, 16, 65, 64, 255, 10, 33] {
        let answer = ask("pypi.org", kind);
        let reply = answer.reply.unwrap();
        assert_eq!((code(&reply), reply[7], answer.denied), (0, 0, None), "{kind}");
    }
}

#[test]
fn any_other_name_does_not_exist_and_is_recorded() {
    for (name, kind, said) in [
        ("evil.example", A, "A"),
        ("www.pypi.org", A, "A"),
        ("org", 28, "AAAA"),
        ("c2vjcmv0.evil.example", 16, "TXT"),
        ("pythonhosted.org", A, "A"),
        ("a.b.pythonhosted.org", A, "A"),
        ("evil.example", 10, "NULL"),
        ("evil.example", 4711, "TYPE4711"),
        ("localhost", A, "A"),
    ] {
        let answer = ask(name, kind);
        let (reply, denied) = (answer.reply.unwrap(), answer.denied.unwrap());
        assert_eq!((code(&reply), reply[7]), (3, 0), "{name}");
        assert_eq!((denied.kind, denied.reason), (DenialKind::Dns, DenialReason::NoRule), "{name}");
        assert_eq!((denied.host.as_deref(), denied.question.as_deref()), (Some(name), Some(said)));
        // A rule would answer questions for an address only.
        let line = (name != "localhost" && matches!(kind, A | AAAA)).then(|| format!("{name}:443"));
        assert_eq!(denied.allow, line);
    }
}

#[test]
fn a_service_of_an_allowed_name_is_not_answered_and_is_no_denial() {
    const SRV: u16 = 33;
    for name in ["_https._tcp.pypi.org", "_pypi.pypi.org", "_a._b.files.pythonhosted.org"] {
        let DnsReply { reply, denied } = ask(name, SRV);
        assert_eq!((code(&reply.unwrap()), denied), (3, None), "{name}");
    }
    for name in ["_https._tcp.evil.example", "_tcp._x.www.pypi.org", "x._tcp.pypi.org", "_tcp"] {
        let denied = ask(name, SRV).denied.unwrap();
        assert_eq!((denied.reason, denied.allow), (DenialReason::NoRule, None), "the control: {name}");
    }
}

#[test]
fn letter_case_is_repeated_and_ignored() {
    let mut names = Names::default();
    for name in ["pypi.org", "PyPI.oRg"] {
        let reply = answer(&question(&wire(name), A, &[]), &decider(), &mut names, 0).reply.unwrap();
        assert_eq!(&reply[12..12 + 10], &wire(name)[..]);
        assert_eq!(&reply[reply.len() - 4..], [198, 18, 0, 1]);
    }
}

#[test]
fn labels_that_hold_other_bytes_lead_nowhere() {
    for name in [&b"\x08pypi.org\0"[..], b"\x05pypi\0\x03org\0", b"\x05pypi \x03org\0", b"\x05p\xc3\xbcpi\x03org\0", b"\x05*.pyt\0", b"\0"]
    {
        let answer = answer(&question(name, A, &[]), &decider(), &mut Names::default(), 0);
        assert_eq!(code(&answer.reply.unwrap()), 3, "{name:?}");
        assert_eq!(answer.denied.unwrap().allow, None);
    }
    let answer = answer(&question(b"\x05a\n\xff.b\0", A, &[]), &decider(), &mut Names::default(), 0);
    assert_eq!(answer.denied.unwrap().host.as_deref(), Some("a\\n\\xff.b"));
}

#[test]
fn a_stand_in_address_resolves_to_its_name() {
    let mut names = Names::default();
    let mut ask = |name: &str, kind| answer(&question(&wire(name), kind, &[]), &decider(), &mut names, 0);
    assert_eq!(code(&ask("1.0.18.198.in-addr.arpa", PTR).reply.unwrap()), 3);
    ask("pypi.org", A);
    let reply = ask("1.0.18.198.in-addr.arpa", PTR).reply.unwrap();
    assert!(code(&reply) == 0 && reply.ends_with(&wire("pypi.org")));
    for name in ["2.0.18.198.in-addr.arpa", "8.8.8.8.in-addr.arpa", "1.0.18.in-addr.arpa", "in-addr.arpa", "256.0.18.198.in-addr.arpa"] {
        let denied = ask(name, PTR).denied.unwrap();
        assert_eq!(denied.allow, None, "{name}");
    }
}

#[test]
fn a_client_with_edns_gets_an_extended_error() {
    let with = |name: &str, extra: &[u8]| answer(&question(&wire(name), A, extra), &decider(), &mut Names::default(), 0).reply.unwrap();
    let reply = with("evil.example", OPT);
    assert!(reply.ends_with(&[0, 0, 41, 4, 208, 0, 0, 0, 0, 0, 6, 0, 15, 0, 2, 0, 18]), "{reply:?}");
    assert_eq!(reply[11], 1);
    assert!(with("pypi.org", OPT).ends_with(&[0, 0, 41, 4, 208, 0, 0, 0, 0, 0, 0]));
    // An unknown version of EDNS.
    let later = [0, 0, 41, 4, 208, 0, 1, 0, 0, 0, 0];
    let reply = with("pypi.org", &later);
    assert!(code(&reply) == 0 && reply[7] == 0 && reply.ends_with(&[0, 0, 41, 4, 208, 1, 0, 0, 0, 0, 0]));
    // A cookie, as some resolvers send it, and a truncated one.
    let cookie = |length: u8| [&[0, 0, 41, 4, 208, 0, 0, 0, 0, 0, 12, 0, 10, 0, length][..], &[7; 8]].concat();
    assert_eq!(code(&with("pypi.org", &cookie(8))), 0);
    assert_eq!(code(&with("pypi.org", &cookie(9))), 1);
}

#[test]
fn a_malformed_query_is_refused_or_ignored() {
    let good = question(&wire("pypi.org"), A, &[]);
    let said = |bytes: &[u8]| answer(bytes, &decider(), &mut Names::default(), 0).reply.map(|reply| code(&reply));
    assert_eq!(said(&good), Some(0));
    for end in 0..12 {
        assert_eq!(said(&good[..end]), None);
    }
    for end in 12..good.len() {
        assert_eq!(said(&good[..end]), Some(1), "{end}");
    }
    let change = |at: usize, to: u8| {
        let mut bytes = good.clone();
        bytes[at] = to;
        said(&bytes)
    };
    assert_eq!(change(2, 0x81), None, "a reply");
    assert_eq!(change(2, 0x29), Some(4), "an update");
    assert_eq!(change(2, 0x03), Some(1), "cut off");
    assert_eq!(change(3, 0x20), Some(0), "AD");
    assert_eq!(change(3, 0x05), Some(1), "a code");
    for (at, to) in [(4, 1), (5, 0), (5, 2), (7, 1), (9, 1), (10, 1), (11, 1), (11, 2)] {
        assert_eq!(change(at, to), Some(1), "count {at}");
    }
    assert_eq!(change(12, 0xc0), Some(1), "a pointer");
    assert_eq!(change(12, 0x40), Some(1), "a label of no known kind");
    assert_eq!(change(12, 200), Some(1));
    assert_eq!(change(good.len() - 1, 3), Some(1), "class CH");
    assert_eq!(said(&[&good[..], &[0]].concat()), Some(1), "something behind");
    assert_eq!(said(&question(&wire("pypi.org"), A, &[OPT, OPT].concat())), Some(1));
    // The longest name, and one byte more.
    let long = |last: usize| ["a".repeat(63), "a".repeat(63), "a".repeat(63), "a".repeat(last)].join(".");
    assert_eq!(said(&question(&wire(&long(61)), A, &[])), Some(3));
    assert_eq!(said(&question(&wire(&long(62)), A, &[])), Some(1));
}

#[test]
fn names_under_a_wildcard_are_limited() {
    let (decider, mut names) = (decider(), Names::default());
    let mut ask = |name: &str| answer(&question(&wire(name), A, &[]), &decider, &mut names, 0);
    for number in 0..30 {
        assert_eq!(ask(&format!("n{number}.pythonhosted.org")).denied, None);
    }
    let denied = ask("n30.pythonhosted.org").denied.unwrap();
    assert_eq!((denied.reason, denied.allow.as_deref()), (DenialReason::WildcardLimit, Some("n30.pythonhosted.org:443")));
    let denied = ask(&format!("{}.pythonhosted.org", "x".repeat(41))).denied.unwrap();
    assert_eq!(denied.reason, DenialReason::WildcardLabel);
}

#[test]
fn messages_over_tcp_are_read_one_by_one() {
    let good = question(&wire("pypi.org"), A, &[]);
    let stream = [frame(&good), frame(&good)].concat();
    for end in 0..good.len() + 2 {
        assert_eq!(unframe(&stream[..end]), TcpFrame::Partial);
    }
    assert_eq!(unframe(&stream), TcpFrame::Message(&good, good.len() + 2));
    assert_eq!(unframe(&[0, 0]), TcpFrame::Message(&[], 2));
    assert_eq!(unframe(&[4, 208]), TcpFrame::Partial);
    assert_eq!(unframe(&[4, 209]), TcpFrame::TooLong);
}
