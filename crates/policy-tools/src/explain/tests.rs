//! Explanation and comparison cover each key of the format.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test may panic")]

use serde_json::Value;
use stockade_policy::{load_shipped, load_text, model::Policy, schema};
use stockade_protocol::{LimitKey, Quantity, screen::Rule};

use super::explain;
use crate::compare::compare;

/// Keys that change neither, each with its reason.
const SILENT: &[(&str, &str)] =
    &[("schema", "has one value"), ("extends", "is shown by what it brings: a policy is explained with all that it inherits")];

/// Keys that change the explanation and no permission.
const UNCOMPARED: &[(&str, &str)] = &[("description", "is for a person")];

/// Where a limit that is unlimited by default can be raised, it has to be limited first.
const LIMITED: &str = "[limits]\ncpu = \"5s\"\naddress_space = \"1GiB\"\n";

/// For each key the lines of a policy before and after it changes.
fn changes() -> Vec<(String, String, String)> {
    let plain = [
        ("description", "description = \"of another test\""),
        ("language", "language = \"bash\""),
        ("remove_runtimes", "remove_runtimes = [\"node\"]"),
        ("filesystem.read_only", "[filesystem]\nread_only = { add = [\"/opt/x\"] }"),
        ("filesystem.read_only_optional", "[filesystem]\nread_only_optional = { add = [\"/opt/x\"] }"),
        ("filesystem.devices", "[filesystem]\ndevices = { remove = [\"tty\"] }"),
        ("filesystem.root.image", "[filesystem]\nroot = { image = \"python:3.12\" }"),
        ("filesystem.images", "[filesystem]\nimages = { remove = [\"*\"] }"),
        ("filesystem.writable_root", "[filesystem]\nwritable_root = true"),
        ("filesystem.sockets", "[filesystem]\nsockets = { add = [\"/srv/proxy.sock\"] }"),
        ("identity.user", "[identity]\nuser = \"somebody\""),
        ("identity.uid", "[identity]\nuid = 1234"),
        ("identity.gid", "[identity]\ngid = 1234"),
        ("identity.hostname", "[identity]\nhostname = \"elsewhere\""),
        ("environment.accept", "[environment]\naccept = { add = [\"EXTRA\"] }"),
        ("environment.set", "[environment.set]\nEXTRA = \"1\""),
        ("runtimes.*.command", "[runtimes.python]\ncommand = [\"/usr/bin/python3\", \"-I\", \"{file}\"]"),
        ("runtimes.*.aliases", "[runtimes.python]\naliases = [\"snake\"]"),
        ("runtimes.*.extension", "[runtimes.python]\nextension = \"pyw\""),
        ("runtimes.*.venv", "[runtimes.python]\nvenv = \"/opt/venv\""),
        ("runtimes.*.template", "[runtimes.python]\ntemplate = \"none\""),
        (
            "runtimes.*.compile",
            "[runtimes.bash]\ncompile = [\"/usr/bin/cp\", \"{file}\", \"{output}\"]\ncommand = [\"/usr/bin/bash\", \"{output}\"]",
        ),
        ("templates.*.imports", "[templates.bare]\nimports = [\"json\"]"),
        ("templates.*.warm", "[templates.bare]\nwarm = \"x = 1\""),
        ("templates.*.max_runs", "[templates.bare]\nmax_runs = 7"),
        ("templates.*.max_age", "[templates.bare]\nmax_age = \"1h\""),
        ("templates.*.images", "[templates.bare]\nimages = 2"),
        ("templates.*.shared_by", "[templates.bare]\nshared_by = \"policy\""),
        ("templates.*.ready", "[templates.bare]\nready = 2"),
        ("runtimes.*.environment", "[runtimes.python.environment]\nEXTRA = \"1\""),
        ("runtimes.*.modules", "[runtimes.python.modules]\n\"os.*\" = \"note\""),
        ("seccomp.allow", "[seccomp]\nallow = { add = [\"ptrace\"] }"),
        ("seccomp.kill", "[seccomp]\nkill = { add = [\"ptrace\"] }"),
        ("seccomp.enosys", "[seccomp]\nenosys = { add = [\"ptrace\"] }"),
        ("seccomp.socket_families", "[seccomp]\nsocket_families = { remove = [\"inet6\"] }"),
        ("seccomp.ioctl", "[seccomp]\nioctl = { add = [\"FIOQSIZE\"] }"),
        ("egress.whitelist", "[egress]\nwhitelist = { add = [\"pypi.org:443\"] }"),
        ("scratch.access", "[scratch]\naccess = \"ro\""),
        ("scratch.create", "[scratch]\ncreate = true"),
        ("scratch.home", "[scratch]\nhome = true"),
        ("scratch.read_only", "[scratch]\nread_only = { add = [\".git\"] }"),
        ("scratch.hidden", "[scratch]\nhidden = { add = [\"*.key\"] }"),
        ("scratch.root", "[scratch]\nroot = { add = [\"/opt/work\"] }"),
        ("degrade.rootless", "[degrade]\nrootless = { add = [\"landlock\"] }"),
        ("audit.mode", "[audit]\nmode = \"required\""),
        ("audit.preview", "[audit]\npreview = \"1KiB\""),
        ("audit.alerts", "[audit]\nalerts = { add = [\"verdict:out_of_memory\"] }"),
        ("degrade.root", "[degrade]\nroot = { add = [\"cgroup\"] }"),
    ];
    let mut all: Vec<_> = plain.map(|(key, after)| (key.to_owned(), String::new(), after.to_owned())).to_vec();
    for rule in Rule::ALL {
        let list = match rule {
            Rule::Module => "modules = { replace = [\"math\"] }\n",
            Rule::Builtin => "builtins = { replace = [\"print\"] }\n",
            _ => "",
        };
        let with = |action: &str| format!("[screen]\n{list}{} = \"{action}\"", rule.name());
        all.push((format!("screen.{}", rule.name()), with("note"), with("deny")));
    }
    for (list, rule) in [("modules", "module"), ("builtins", "builtin")] {
        let with = |names: &str| format!("[screen]\n{rule} = \"note\"\n{list} = {{ replace = [{names}] }}");
        all.push((format!("screen.{list}"), with("\"a\""), with("\"a\", \"b\"")));
    }
    let with = |more: &str| format!("[screen]\nprocess = \"approve\"\n{more}");
    all.push((String::from("screen.approval_time"), with(""), with("approval_time = \"1h\"")));
    all.push((String::from("screen.approvers"), with("approvers = { add = [\"uid:7\"] }"), with("approvers = { add = [\"group:x\"] }")));
    for key in LimitKey::ALL {
        let (value, most) = match key.quantity() {
            Quantity::Duration => ("\"7s\"", "\"9h\""),
            Quantity::Size if key == LimitKey::Memory => ("\"300MiB\"", "\"9GiB\""),
            Quantity::Size => ("\"9MiB\"", "\"9GiB\""),
            Quantity::Count => ("9", "999999"),
            Quantity::Cpus => ("0.5", "9"),
        };
        all.push((format!("limits.{}", key.name()), String::new(), format!("[limits]\n{} = {value}", key.name())));
        let after = format!("{LIMITED}[limits.max]\n{} = {most}", key.name());
        all.push((format!("limits.max.{}", key.name()), LIMITED.to_owned(), after));
    }
    all
}

fn policy(lines: &str) -> Policy {
    let description = if lines.contains("description") { "" } else { "description = \"of a test\"\n" };
    load_text(&format!("schema = 1\n{description}extends = \"default\"\n{lines}\n")).unwrap_or_else(|error| panic!("{lines}: {error}"))
}

/// Every key of the format, as a path, read off its schema.
fn every_key(table: &Value, above: &str, out: &mut Vec<String>) {
    for (name, key) in table["properties"].as_object().into_iter().flatten() {
        let path = format!("{above}{name}");
        // `max` of the limits: one word, or a table.
        let key = if key["oneOf"][0]["const"] == "same" { &key["oneOf"][1] } else { key };
        let named = &key["additionalProperties"];
        match () {
            () if key["properties"].is_object() => every_key(key, &format!("{path}."), out),
            () if named["properties"].is_object() => every_key(named, &format!("{path}.*."), out),
            () => out.push(path),
        }
    }
}

#[test]
fn every_key_changes_the_explanation_and_the_comparison() {
    let strict = load_shipped("strict").unwrap();
    let mut tried: Vec<String> = SILENT.iter().map(|(key, _)| (*key).to_owned()).collect();
    for (key, before, after) in changes() {
        let (before, after) = (policy(&before), policy(&after));
        let lines_of = |policy: &Policy| {
            let explanation = explain(policy, Some(&strict));
            (explanation.sections, explanation.description)
        };
        assert_ne!(lines_of(&before), lines_of(&after), "{key}: the explanation is the same");
        let comparison = compare(&before, &after);
        let differs = !(comparison.more.is_empty() && comparison.less.is_empty() && comparison.other.is_empty());
        assert_eq!(differs, UNCOMPARED.iter().all(|(silent, _)| *silent != key), "{key}: {comparison:?}");
        tried.push(key);
    }
    let mut all = Vec::new();
    every_key(&schema(), "", &mut all);
    all.sort();
    tried.sort();
    assert_eq!(all, tried, "a key without a change that tries it");
}

#[test]
fn every_loosening_has_a_consequence() {
    let strict = load_shipped("strict").unwrap();
    for (_, _, after) in changes() {
        for difference in explain(&policy(&after), Some(&strict)).loosened.unwrap().differences {
            assert!(difference.consequence.is_some_and(|text| !text.is_empty()), "{}", difference.text);
        }
    }
}

fn statements(lines: &str) -> Vec<String> {
    let policy = load_text(&format!("schema = 1\ndescription = \"d\"\nextends = \"default\"\n{lines}")).unwrap();
    let explained = explain(&policy, Some(&load_shipped("default").unwrap()));
    explained.sections.into_iter().flat_map(|section| section.statements).map(|statement| statement.text).collect()
}

#[test]
fn what_runs_of_a_session_start_from_is_said() {
    let said = |lines: &str| {
        let about = |text: &String| {
            ["template `", "that interpreter has run", "one image", "of a service", "a service keeps"]
                .iter()
                .any(|part| text.contains(part))
        };
        statements(lines).into_iter().filter(about).collect::<Vec<_>>()
    };
    let start = "runs of `python` in a session or service start from a copy of an interpreter";
    let shared = "share memory layout, hash seed and stack canary; the image is made anew after";
    assert_eq!(
        said(""),
        [
            format!("{start} (template `bare`) that has started and made no imports"),
            format!("copies of one image of `bare` {shared} 1000 runs or 10min")
        ]
    );
    let own = "[runtimes.python]\ntemplate = \"data\"\n[templates.data]\nimports = [\"numpy\"]\nwarm = \"x = 1\"\nmax_runs = 1\nmax_age = \"90s\"\n";
    assert_eq!(
        said(own),
        [
            format!("{start} (template `data`) that has imported"),
            String::from("after its imports that interpreter has run \"x = 1\" (5 bytes)"),
            format!("copies of one image of `data` {shared} 1 run or 90s"),
        ]
    );
    let served = said("[templates.bare]\nimages = 2\nshared_by = \"policy\"\nready = 3\n");
    assert_eq!(
        served[1..],
        [
            format!("copies of one image of `bare` {shared} 1000 runs or 10min; in a service all keys of the policy share it"),
            String::from("a service keeps 2 images of `bare`, each with its own memory layout and hash seed"),
            String::from("3 workers of a service keep a copy of `bare` waiting for a request, from the start of the service on"),
        ]
    );
    assert_eq!(said("[runtimes.python]\ntemplate = \"none\"\n"), [""; 0]);
}

#[test]
fn sockets_of_the_host_are_reachable_as_the_filter_has_it() {
    let said = |lines: &str| statements(lines).into_iter().find(|text| text.starts_with("UNIX sockets of the host")).unwrap();
    assert!(said("").contains(": reachable, because AF_UNIX is allowed."));
    let without = "[seccomp]\nsocket_families = { remove = [\"unix\"] }\n";
    assert!(said(without).contains(": not reachable."));
}

#[test]
fn without_a_cgroup_memory_and_processes_are_limited_for_the_run() {
    let said = statements("").into_iter().find(|text| text.contains("`cgroup`. Without it")).unwrap();
    assert!(said.contains("memory of all processes is added up, processes are limited for the run"), "{said}");
}
