//! Decisions: each refusal is tested beside a similar case that passes.
//!
//! No network is used.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test may panic")]

use super::*;

fn decider(rules: &[&str]) -> Decider {
    let rules = rules.iter().map(|text| text.parse().unwrap_or_else(|error| panic!("{error}"))).collect();
    Decider::new(Whitelist::new(rules), ["10.0.0.5", "2001:db8:ff::5", "192.168.1.9"].map(ip).to_vec())
}

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn name(text: &str) -> Destination {
    Destination::Name(Name::new(text).unwrap())
}

/// The rule that allows it, or the reason of the denial and the line that would allow it.
fn decided(decider: &Decider, to: &str, port: u16) -> Result<usize, (DenialReason, Option<String>)> {
    let to = to.parse().map_or_else(|_| name(to), Destination::Address);
    decider.decide(to, port).map(|permit| permit.rule).map_err(|denied| (denied.reason, denied.allow))
}

fn no_rule(line: &str) -> Result<usize, (DenialReason, Option<String>)> {
    Err((DenialReason::NoRule, Some(line.to_owned())))
}

#[test]
fn an_empty_whitelist_allows_nothing() {
    let none = decider(&[]);
    assert_eq!(decided(&none, "pypi.org", 443), no_rule("pypi.org:443"));
    assert_eq!(decided(&none, "1.1.1.1", 443), no_rule("1.1.1.1:443"));
    assert_eq!(decided(&none, "2001:db8::1", 443), no_rule("[2001:db8::1]:443"));
}

#[test]
fn a_line_that_a_denial_offers_would_allow_it() {
    let none = decider(&[]);
    for (to, port) in [("pypi.org", 443), ("1.1.1.1", 80), ("2001:db8::1", 22), ("169.254.169.254", 80), ("10.0.0.5", 5432), ("api", 1)] {
        let Err((_, Some(line))) = decided(&none, to, port) else { panic!("{to}") };
        assert_eq!(decided(&decider(&[&line]), to, port), Ok(0), "{line}");
    }
    // Where no rule can allow it, none is offered.
    assert_eq!(decided(&none, "8.8.8.8", 53), Err((DenialReason::NoRule, None)));
    assert_eq!(decided(&none, "localhost", 80), Err((DenialReason::NoRule, None)));
    let unknown = none.decide(Destination::Unknown(Ipv4Addr::new(198, 18, 0, 9)), 443).unwrap_err();
    assert_eq!((unknown.reason, unknown.allow), (DenialReason::UnknownAddress, None));
}

#[test]
fn networks_allow_their_addresses_on_their_ports_and_no_other() {
    let some = decider(&["10.0.5.0/24:443,8000-8100", "[2001:db8:5::/48]:5432"]);
    for (to, port, rule) in [("10.0.5.7", 443, 0), ("10.0.5.0", 8000, 0), ("10.0.5.255", 8100, 0), ("2001:db8:5::7", 5432, 1)] {
        assert_eq!(decided(&some, to, port), Ok(rule), "{to}");
    }
    for (to, port) in [("10.0.5.7", 444), ("10.0.5.7", 8101), ("10.0.6.7", 443), ("10.0.4.255", 443), ("2001:db8:6::7", 5432)] {
        assert!(matches!(decided(&some, to, port), Err((DenialReason::NoRule, Some(_)))), "{to}");
    }
    // The same peer, as a program's IPv6 socket names it.
    assert_eq!(decided(&some, "::ffff:10.0.5.7", 443), Ok(0));
    assert_eq!(decided(&some, "::ffff:10.0.6.7", 443), no_rule("10.0.6.7:443"));
    assert_eq!(decided(&some, "64:ff9b::10.0.5.7", 443), no_rule("[64:ff9b::a00:507]:443"));
}

#[test]
fn names_allow_themselves_and_wildcards_one_label_more() {
    let some = decider(&["pypi.org:443", "*.pythonhosted.org:443", "*.example.org:80", "www.example.org:80/tcp"]);
    assert_eq!(decided(&some, "pypi.org", 443), Ok(0));
    assert_eq!(decided(&some, "files.pythonhosted.org", 443), Ok(1));
    for (to, port) in [
        ("pypi.org", 80),
        ("www.pypi.org", 443),
        ("org", 443),
        ("pythonhosted.org", 443),
        ("a.b.pythonhosted.org", 443),
        ("evilpythonhosted.org", 443),
        ("files.pythonhosted.org.evil.example", 443),
    ] {
        assert_eq!(decided(&some, to, port), no_rule(&format!("{to}:{port}")), "{to}");
    }
    // The rule with the exact name comes first, in any order.
    assert_eq!(decided(&some, "www.example.org", 80), Ok(3));
    assert_eq!(decided(&some, "ftp.example.org", 80), Ok(2));
    assert_eq!(some.match_name(&Name::new("www.example.org").unwrap()), Some(NameMatch::Exactly));
    assert_eq!(some.match_name(&Name::new("ftp.example.org").unwrap()), Some(NameMatch::ByWildcard));
    assert_eq!(some.match_name(&Name::new("example.org").unwrap()), None);
}

#[test]
fn an_allowed_name_does_not_open_its_address() {
    let some = decider(&["pypi.org:443"]);
    let permit = some.decide(name("pypi.org"), 443).unwrap();
    assert_eq!(some.decide_dial(&permit, ip("151.101.0.223")), Ok(()));
    assert_eq!(decided(&some, "151.101.0.223", 443), no_rule("151.101.0.223:443"));
}

#[test]
fn closed_addresses_need_a_rule_that_names_them() {
    let wide = decider(&["0.0.0.0/0:80", "[::/0]:80"]);
    let closed = [
        "0.0.0.0",
        "0.1.2.3",
        "127.0.0.1",
        "127.255.0.1",
        "169.254.169.254",
        "192.0.0.192",
        "168.63.129.16",
        "100.100.100.200",
        "224.0.0.1",
        "255.255.255.255",
        "::",
        "::1",
        "fe80::1",
        "ff02::1",
        "fd00:ec2::254",
        "::ffff:127.0.0.1",
        "::127.0.0.1",
        "::8.8.8.8",
        "64:ff9b::169.254.169.254",
        "64:ff9b:1::1.1.1.1",
        "64:ff9b:1:abcd::1",
        "2002:7f00:1::1",
        "2001:0:1:1:0:0:80ff:fffe",
        // The host's own addresses, also embedded in IPv6.
        "10.0.0.5",
        "192.168.1.9",
        "2001:db8:ff::5",
        "64:ff9b::10.0.0.5",
        "::ffff:10.0.0.5",
    ];
    for to in closed {
        let Err((reason, Some(line))) = decided(&wide, to, 80) else { panic!("{to}") };
        assert_eq!(reason, DenialReason::ForbiddenRange, "{to}");
        assert_eq!(decided(&decider(&[&line]), to, 80), Ok(0), "{line}");
        assert!(decided(&decider(&[&line]), to, 81).is_err(), "{line}");
    }
    for to in ["1.1.1.1", "10.0.0.6", "168.63.129.17", "192.168.1.8", "2001:db8:ff::6", "64:ff9b::1.1.1.1", "2002:101:101::1", "fd00::1"] {
        assert!(decided(&wide, to, 80).is_ok(), "{to}");
    }
    // A network around the block does not open it, one inside it does.
    assert!(decided(&decider(&["10.0.0.0/8:80"]), "10.0.0.5", 80).is_err());
    assert!(decided(&decider(&["169.0.0.0/8:80"]), "169.254.1.1", 80).is_err());
    assert!(decided(&decider(&["169.254.0.0/16:80"]), "169.254.1.1", 80).is_ok());
    assert!(decided(&decider(&["169.254.0.0/17:80"]), "169.254.169.254", 80).is_err());
    // The host's own addresses stay closed within an opened block.
    let mut linked = decider(&["169.254.0.0/16:80"]);
    linked.set_own_addresses(vec![ip("::ffff:169.254.7.7")]);
    assert!(decided(&linked, "169.254.7.7", 80).is_err() && decided(&linked, "169.254.7.8", 80).is_ok());
    // Unless a rule names the address.
    for (to, port, asks) in [("169.254.7.7", 80, false), ("169.254.7.7", 81, true), ("169.254.7.8", 80, true)] {
        let mut named = decider(&["169.254.7.7:80", "169.254.0.0/16:80-81"]);
        assert_eq!(named.asks_whose(ip(to), port), asks, "{to}:{port}");
        named.set_own_addresses(vec![ip(to)]);
        assert_eq!(decided(&named, to, port).is_err(), asks, "{to}:{port}");
    }
}

fn dialled(decider: &Decider, host: &str, address: &str) -> Result<(), (DenialReason, Option<String>)> {
    let permit = decider.decide(name(host), 443).unwrap();
    decider.decide_dial(&permit, ip(address)).map_err(|denied| {
        assert_eq!((denied.host.as_deref(), denied.port), (Some(host), Some(443)));
        (denied.reason, denied.allow)
    })
}

#[test]
fn a_name_that_resolves_into_a_closed_range_is_not_dialled() {
    let some = decider(&["pypi.org:443", "api.internal:443"]);
    for host in ["pypi.org", "api.internal"] {
        for address in [
            "127.0.0.1",
            "::1",
            "0.0.0.0",
            "169.254.169.254",
            "::ffff:169.254.169.254",
            "64:ff9b::a9fe:a9fe",
            "2002:a9fe:a9fe::",
            "fe80::1",
            "224.0.0.1",
            "10.0.0.5",
            "2001:db8:ff::5",
        ] {
            let (reason, line) = dialled(&some, host, address).unwrap_err();
            assert_eq!(reason, DenialReason::ResolvedToForbiddenRange, "{address}");
            let opened = decider(&["pypi.org:443", "api.internal:443", &line.unwrap()]);
            assert_eq!(dialled(&opened, host, address), Ok(()), "{address}");
        }
        for address in ["151.101.0.223", "2a04:4e42::223", "64:ff9b::151.101.0.223"] {
            assert_eq!(dialled(&some, host, address), Ok(()), "{address}");
        }
    }
}

#[test]
fn a_public_name_does_not_lead_into_a_private_network() {
    let some = decider(&["pypi.org:443", "api.internal:443", "db:443", "*.svc.internal:443"]);
    for address in ["10.1.2.3", "172.16.0.1", "192.168.0.1", "100.64.0.1", "fd12::1", "fec0::1", "64:ff9b::10.1.2.3", "2002:a01:203::1"] {
        let (reason, line) = dialled(&some, "pypi.org", address).unwrap_err();
        assert_eq!(reason, DenialReason::ResolvedToPrivateRange, "{address}");
        assert_eq!(dialled(&decider(&["pypi.org:443", &line.unwrap()]), "pypi.org", address), Ok(()));
        assert_eq!(dialled(&some, "api.internal", address), Ok(()));
        assert_eq!(dialled(&some, "db", address), Ok(()));
        // A program that chooses the label must not choose among private hosts.
        assert!(dialled(&some, "x.svc.internal", address).is_err());
    }
    let covered = decider(&["pypi.org:443", "10.0.0.0/8:443", "172.16.0.0/12:80"]);
    assert_eq!(dialled(&covered, "pypi.org", "10.1.2.3"), Ok(()));
    assert!(dialled(&covered, "pypi.org", "172.16.0.1").is_err());
    assert!(dialled(&covered, "pypi.org", "172.32.0.1").is_ok());
}

#[test]
fn only_what_was_allowed_is_dialled_for_a_literal_address() {
    let some = decider(&["10.0.5.0/24:443"]);
    let permit = some.decide(Destination::Address(ip("10.0.5.7")), 443).unwrap();
    assert_eq!(some.decide_dial(&permit, ip("10.0.5.7")), Ok(()));
    assert!(some.decide_dial(&permit, ip("10.0.5.8")).is_err());
    assert_eq!(permit.spoken_name(), None);
}

#[test]
fn tls_or_http_must_name_the_peer_unless_the_rule_allows_tcp() {
    let some = decider(&["a.example:443", "b.example:443/tcp"]);
    let permit = some.decide(name("a.example"), 443).unwrap();
    assert_eq!(permit.spoken_name().map(Name::as_str), Some("a.example"));
    let denied =
        PeerDenial::of_protocol(&permit, ip("192.0.2.1"), DenialKind::Tls, DenialReason::SniMismatch, Some("c.example".to_owned()));
    assert_eq!(denied.allow.as_deref(), Some("a.example:443/tcp"));
    assert_eq!(some.decide(name("b.example"), 443).unwrap().spoken_name(), None);
}
