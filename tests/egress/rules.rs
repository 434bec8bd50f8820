//! Which connections are made: by address, by name, by port, and not otherwise.

use serde_json::json;

use crate::{egress::testbed::FILES, egress::testbed::Testbed, egress::testbed::denials, egress::testbed::syn, support::runner::test};

test!(Both, a_network_is_open_on_its_port, seconds 90);
fn a_network_is_open_on_its_port() {
    let mut testbed = Testbed::new();
    testbed.listen("echo", &[443, 444]);
    let script = "for to in (('10.0.5.7', 443), ('10.0.5.7', 444), ('10.0.6.7', 443), ('2001:db8:5::7', 443), ('2001:db8:5::7', 444), \
                  ('2001:db8:6::7', 443)): say(echo(*to))";
    let ran = testbed.run(&["10.0.5.0/24:443", "[2001:db8:5::/48]:443"], script);
    assert_eq!(ran.output, "b'ping'\nECONNREFUSED\nECONNREFUSED\nb'ping'\nECONNREFUSED\nECONNREFUSED\n");
    assert_eq!(testbed.packets(), [syn("10.0.5.7", 443), syn("2001:db8:5::7", 443)]);
    assert_eq!(
        denials(&ran),
        [
            "connect 10.0.5.7 444 no_rule",
            "connect 10.0.6.7 443 no_rule",
            "connect 2001:db8:5::7 444 no_rule",
            "connect 2001:db8:6::7 443 no_rule"
        ]
    );
    assert_eq!(ran.egress["denied"][0]["allow"], "10.0.5.7:444");
    assert_eq!((&ran.egress["allowed"][0]["bytes_in"], &ran.egress["allowed"][0]["bytes_out"]), (&json!(4), &json!(4)));
    // The control: each of them opens by its own rule.
    let rules = ["10.0.5.7:443-444", "10.0.6.7:443", "[2001:db8::/32]:443,444"];
    assert_eq!(testbed.run(&rules, script).output, "b'ping'\n".repeat(6));
}

test!(Both, ports_may_be_ranges_and_lists, seconds 90);
fn ports_may_be_ranges_and_lists() {
    let mut testbed = Testbed::new();
    testbed.listen("echo", &[79, 80, 90, 91, 8443]);
    let ran = testbed.run(&["10.0.5.7:80-90,8443"], "for port in (79, 80, 90, 91, 8443): say(attempt('10.0.5.7', port))");
    assert_eq!(ran.output, "ECONNREFUSED\nconnected\nconnected\nECONNREFUSED\nconnected\n");
    assert_eq!(testbed.packets(), [syn("10.0.5.7", 80), syn("10.0.5.7", 90), syn("10.0.5.7", 8443)]);
}

test!(Both, an_empty_whitelist_opens_nothing, seconds 90);
fn an_empty_whitelist_opens_nothing() {
    let mut testbed = Testbed::new();
    testbed.listen("echo", &[443]);
    let script = "say(attempt('10.0.5.7', 443)); say(attempt('2001:db8:5::7', 443)); say(attempt('api.internal', 443))";
    // The program starts no gate: there is no way out at all.
    let ran = testbed.run(&[], script);
    assert!(ran.output.starts_with("ENETUNREACH\nENETUNREACH\nEAI_"), "{ran:?}");
    assert_eq!((&ran.egress["mode"], &ran.egress["denied"]), (&json!("none"), &json!([])), "{ran:?}");
    // A gate that was given nothing opens nothing.
    assert_eq!(testbed.run_bare(&[], script).output, "ECONNREFUSED\nECONNREFUSED\nEAI_-2\n");
    assert_eq!(testbed.packets(), []);
}

test!(Both, a_name_is_open_on_its_port_and_its_address_is_not, seconds 90);
fn a_name_is_open_on_its_port_and_its_address_is_not() {
    let mut testbed = Testbed::new();
    testbed.listen("echo", &[8443, 443]);
    testbed.zone(json!({"api.internal": {"a": [["10.0.5.7"]], "aaaa": [["2001:db8:5::7"]]}}));
    let script = "h = hello('api.internal')
say(echo('api.internal', 8443, h) == h, echo('API.Internal.', 8443, h) == h)
say(attempt('api.internal', 443), attempt('10.0.5.7', 8443), attempt('2001:db8:5::7', 8443), attempt('internal', 8443), attempt('x.api.internal', 8443))";
    let ran = testbed.run(&["api.internal:8443"], script);
    assert_eq!(ran.output, "True True\nECONNREFUSED ECONNREFUSED ECONNREFUSED EAI_-2 EAI_-2\n");
    // By its first address; the literal ones were never dialled.
    assert_eq!(testbed.packets_but_dns(), [syn("2001:db8:5::7", 8443), syn("2001:db8:5::7", 8443)]);
    let allowed = &ran.egress["allowed"][0];
    assert_eq!((&allowed["host"], &allowed["sni"], &allowed["connections"]), (&json!("api.internal"), &json!("api.internal"), &json!(2)));
    assert_eq!(ran.egress["denied"][0]["allow"], "api.internal:443");
    let ran = testbed.run(&["api.internal:443,8443", "10.0.5.7:8443", "[2001:db8:5::7]:8443"], script);
    assert_eq!(ran.output, "True True\nconnected connected connected EAI_-2 EAI_-2\n", "{ran:?}");
}

test!(Both, a_wildcard_is_one_label_and_no_other_name, seconds 90);
fn a_wildcard_is_one_label_and_no_other_name() {
    let mut testbed = Testbed::new();
    testbed.listen("echo", &[443]);
    let there = json!({"a": [["203.0.113.5"]]});
    testbed.zone(json!({"files.hosted.example": there, "hosted.example": there, "evilhosted.example": there, "a.b.hosted.example": there}));
    let script =
        "for name in ('files.hosted.example', 'hosted.example', 'evilhosted.example', 'a.b.hosted.example'): say(attempt(name, 443))";
    let ran = testbed.run(&["*.hosted.example:443"], script);
    assert_eq!(ran.output, "connected\nEAI_-2\nEAI_-2\nEAI_-2\n");
    assert_eq!(testbed.packets_but_dns(), [syn("203.0.113.5", 443)]);
    let all = ["*.hosted.example:443", "hosted.example:443", "evilhosted.example:443", "*.b.hosted.example:443"];
    assert_eq!(testbed.run(&all, script).output, "connected\n".repeat(4));
}

test!(Both, loopback_and_addresses_of_the_host_are_closed, seconds 90);
fn loopback_and_addresses_of_the_host_are_closed() {
    let mut testbed = Testbed::new();
    testbed.listen("echo", &[9999]);
    // A service of the host on every address it has.
    let service = std::net::TcpListener::bind("[::]:9999").unwrap();
    service.set_nonblocking(true).unwrap();
    let script =
        "for to in ('10.0.5.7', '127.0.0.1', '::1', '10.0.5.1', '2001:db8:5::1', '0.0.0.0', '198.19.255.254'): say(attempt(to, 9999))";
    let wide = ["10.0.5.0/24:9999", "[2001:db8:5::/64]:9999", "0.0.0.0/0:9999"];
    let ran = testbed.run(&wide, script);
    assert_eq!(ran.output, format!("connected\n{}", "ECONNREFUSED\n".repeat(6)));
    assert!(service.accept().is_err(), "the host's service was reached");
    assert_eq!(denials(&ran), ["connect 10.0.5.1 9999 forbidden_range", "connect 2001:db8:5::1 9999 forbidden_range"]);
    assert_eq!(ran.egress["denied"][0]["allow"], "10.0.5.1:9999");
    // The control: named, they are open.
    let ran = testbed.run(&["10.0.5.1:9999", "[2001:db8:5::1]:9999"], "say(attempt('10.0.5.1', 9999), attempt('2001:db8:5::1', 9999))");
    assert_eq!(ran.output, "connected connected\n", "{ran:?}");
    assert!(service.accept().is_ok() && service.accept().is_ok());
}

test!(Both, disguised_addresses_are_judged_by_what_they_hide, seconds 90);
fn disguised_addresses_are_judged_by_what_they_hide() {
    let mut testbed = Testbed::new();
    testbed.listen("echo", &[443]);
    let script = "for to in ('::ffff:10.0.6.7', '64:ff9b::10.0.6.7', '64:ff9b::169.254.169.254', '2002:a9fe:a9fe::1', '::ffff:169.254.169.254'): say(attempt(to, 443))";
    let ran = testbed.run(&["10.0.5.0/24:443", "[2001:db8::/32]:443"], script);
    assert_eq!(ran.output, "ECONNREFUSED\n".repeat(5));
    let ran = testbed.run(&["[64:ff9b::/96]:443", "[2002::/16]:443", "10.0.5.0/24:443"], script);
    assert_eq!(ran.output.lines().nth(2), Some("ECONNREFUSED"), "{ran:?}");
    assert_eq!(ran.output.lines().nth(3), Some("ECONNREFUSED"), "{ran:?}");
    assert!(testbed.packets().iter().all(|(_, to, _)| to == "64:ff9b::a00:607"), "{:?}", testbed.packets());
    testbed.clear();
    let ran = testbed.run(&["10.0.6.0/24:443"], "say(echo('::ffff:10.0.6.7', 443))");
    assert_eq!(ran.output, "b'ping'\n", "the control: the disguise of an allowed address is allowed");
    assert_eq!(testbed.packets(), [syn("10.0.6.7", 443)]);
}

test!(Both, the_host_behind_a_disguise_is_closed, seconds 90);
fn the_host_behind_a_disguise_is_closed() {
    let mut testbed = Testbed::new();
    testbed.listen("echo", &[9999]);
    let disguised = "['64:ff9b::10.0.5.1', '2002:a00:501::1', '2001:db8:9::5efe:10.0.5.1', '2001:0:a00:501::1']";
    testbed.zone(json!({"host.internal": {"aaaa": [["64:ff9b::a00:501", "2002:a00:501::1"]]}}));
    let script = format!("for to in {disguised} + ['host.internal', '64:ff9b::10.0.5.7']: say(attempt(to, 9999))");
    let rules =
        ["[64:ff9b::/96]:9999", "[2002::/16]:9999", "[2001:db8::/32]:9999", "[2001::/32]:9999", "10.0.5.0/24:9999", "host.internal:9999"];
    let ran = testbed.run(&rules, &script);
    assert_eq!(ran.output, format!("{}connected\n", "ECONNREFUSED\n".repeat(5)), "{ran:?}");
    assert_eq!(testbed.packets_but_dns(), [syn("64:ff9b::a00:507", 9999)]);
    assert_eq!(denials(&ran)[0], "connect 64:ff9b::a00:501 9999 forbidden_range");
    testbed.clear();
    // The control: a rule for what the disguise hides opens it.
    let ran =
        testbed.run(&[&rules[..], &["10.0.5.1:9999"]].concat(), "say(attempt('64:ff9b::10.0.5.1', 9999), attempt('host.internal', 9999))");
    assert_eq!(ran.output, "connected connected\n", "{ran:?}");
    assert!(testbed.packets_but_dns().contains(&syn("64:ff9b::a00:501", 9999)), "{:?}", testbed.packets());
}

test!(Both, a_name_does_not_lead_to_a_closed_address, seconds 90);
fn a_name_does_not_lead_to_a_closed_address() {
    let mut testbed = Testbed::new();
    testbed.listen("echo", &[8443]);
    testbed.zone(json!({
        "meta.internal": {"a": [["169.254.169.254"]]},
        "self.internal": {"a": [["127.0.0.1"]], "aaaa": [["::1"]]},
        "host.internal": {"a": [["10.0.5.1"]], "aaaa": [["::ffff:10.0.5.1"]]},
        "mapped.internal": {"aaaa": [["::ffff:169.254.169.254", "64:ff9b::a9fe:a9fe", "fe80::1", "ff02::1", "2002:7f00:1::"]]},
        "many.internal": {"a": [["224.0.0.1", "0.0.0.0", "240.0.0.1", "255.255.255.255", "168.63.129.16", "100.100.100.200"]]},
        "public.example": {"a": [["10.0.6.7"]]},
    }));
    let names = ["meta.internal", "self.internal", "host.internal", "mapped.internal", "many.internal", "public.example"];
    let rules: Vec<String> = names.iter().map(|name| format!("{name}:8443")).collect();
    let mut rules: Vec<&str> = rules.iter().map(String::as_str).collect();
    let script = format!("for name in {names:?}: say(attempt(name, 8443))");
    let service = std::net::TcpListener::bind("[::]:8443").unwrap();
    service.set_nonblocking(true).unwrap();
    let ran = testbed.run(&rules, &script);
    assert_eq!(ran.output, "ECONNREFUSED\n".repeat(names.len()), "{ran:?}");
    assert_eq!(testbed.packets_but_dns(), []);
    assert!(service.accept().is_err());
    let reasons = denials(&ran);
    assert!(reasons.contains(&String::from("connect meta.internal 169.254.169.254 8443 resolved_to_forbidden_range")), "{reasons:?}");
    assert!(reasons.contains(&String::from("connect public.example 10.0.6.7 8443 resolved_to_private_range")), "{reasons:?}");
    // The control: the address named by its own rule opens the name's way to it.
    rules.extend(["169.254.169.254:8443", "10.0.6.0/24:8443"]);
    let ran = testbed.run(&rules, "say(attempt('meta.internal', 8443), attempt('public.example', 8443))");
    assert_eq!(ran.output, "connected connected\n", "{ran:?}");
    assert_eq!(testbed.packets_but_dns(), [syn("169.254.169.254", 8443), syn("10.0.6.7", 8443)]);
}

test!(Both, an_alias_does_not_lead_to_a_closed_address, seconds 90);
fn an_alias_does_not_lead_to_a_closed_address() {
    let mut testbed = Testbed::new();
    testbed.listen("echo", &[8443]);
    testbed.zone(json!({
        "bad.internal": {"cname": ["inner.bad.example"], "a": [["169.254.169.254"]]},
        "good.internal": {"cname": ["one.example", "two.example"], "a": [["10.0.5.7"]]},
    }));
    let ran =
        testbed.run(&["bad.internal:8443", "good.internal:8443"], "say(attempt('bad.internal', 8443), attempt('good.internal', 8443))");
    assert_eq!(ran.output, "ECONNREFUSED connected\n", "{ran:?}");
    assert_eq!(testbed.packets_but_dns(), [syn("10.0.5.7", 8443)]);
}

test!(Both, the_line_that_is_offered_loads_as_it_is_printed, seconds 90);
fn the_line_that_is_offered_loads_as_it_is_printed() {
    let mut testbed = Testbed::new();
    testbed.listen("echo", &[80, 81]);
    let script = "say(attempt('10.0.5.7', 80), attempt('10.0.6.7', 81), attempt('169.254.169.254', 80))";
    let ran = testbed.run(&["203.0.113.5:80"], script);
    assert_eq!(ran.output, "ECONNREFUSED ECONNREFUSED ECONNREFUSED\n", "{ran:?}");
    let lines = ran.egress["denied"].as_array().unwrap().iter().map(|denied| denied["line"].as_str().unwrap()).collect::<Vec<_>>();
    assert_eq!(lines[1], "egress.whitelist = { add = [\"10.0.6.7:81\"] }", "{ran:?}");
    let all = ran.egress["line"].as_str().unwrap();
    assert_eq!(all, "egress.whitelist = { add = [\"10.0.5.7:80\", \"10.0.6.7:81\"] }", "{ran:?}");
    let mut outputs = Vec::new();
    for line in [lines[1], all] {
        let text = format!(
            "schema = 1\ndescription = \"x\"\nextends = \"default\"\n{line}\n[filesystem]\nread_only = {{ add = [\"{FILES}\"] }}\n"
        );
        std::fs::write(testbed.directory().join("offered.toml"), text).unwrap();
        outputs.push(testbed.run_under(&format!("{FILES}/offered.toml"), script, |_| ()).output);
    }
    assert_eq!(outputs, ["ECONNREFUSED connected ECONNREFUSED\n", "connected connected ECONNREFUSED\n"]);
}

test!(Both, a_name_that_changes_its_address_is_judged_each_time, seconds 90);
fn a_name_that_changes_its_address_is_judged_each_time() {
    let mut testbed = Testbed::new();
    testbed.listen("echo", &[8443]);
    testbed.zone(json!({"flip.internal": {"a": [["10.0.5.7"], ["169.254.169.254"], ["127.0.0.1"]]}}));
    let script = "to = socket.getaddrinfo('flip.internal', 8443)[0][4]
for _ in range(3): say(attempt(to[0], to[1])); time.sleep(2.2)";
    let ran = testbed.run(&["flip.internal:8443"], script);
    assert_eq!(ran.output, "connected\nECONNREFUSED\nECONNREFUSED\n", "{ran:?}");
    assert_eq!(testbed.packets_but_dns(), [syn("10.0.5.7", 8443)]);
}

test!(Both, spellings_of_addresses_are_no_way_round, seconds 90);
fn spellings_of_addresses_are_no_way_round() {
    let mut testbed = Testbed::new();
    testbed.listen("echo", &[443]);
    // 10.0.6.7 in decimal, octal, hex and short forms; names with odd characters.
    let script = r"for to in ('167773703', '012.0.6.7', '0x0a.0.6.7', '10.1543', '10.0.6.7.', 'api.internal%00.evil', 'api.internal\t', 'api_internal.evil', 'аpi.internal', 'xn--pi-8ia.internal'):
    try: say(attempt(to, 443))
    except Exception as error: say(type(error).__name__)";
    let ran = testbed.run(&["api.internal:443"], script);
    assert_eq!(testbed.packets(), [], "{ran:?}");
    assert!(!ran.output.contains("connected"), "{ran:?}");
    testbed.clear();
    let ran = testbed.run(&["10.0.6.7:443"], "say(attempt('167773703', 443))");
    assert_eq!((ran.output.as_str(), testbed.packets()), ("connected\n", vec![syn("10.0.6.7", 443)]));
}
