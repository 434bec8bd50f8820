//! What counts as more, what does not, and what cannot be told.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test may panic")]

use stockade_policy::{SHIPPED, load_shipped, load_text, show};
use stockade_protocol::LimitKey;

use super::*;

fn policy(lines: &str) -> Policy {
    load_text(&format!("schema = 1\ndescription = \"x\"\nextends = \"default\"\n{lines}\n"))
        .unwrap_or_else(|error| panic!("{lines}: {error}"))
}

/// What the second allows beyond the first, as keys and items.
fn more(first: &str, second: &str) -> Vec<(String, String, bool)> {
    let differences = compare(&policy(first), &policy(second)).more;
    differences.into_iter().map(|difference| (difference.key, difference.items.join(" "), difference.certain)).collect()
}

fn whitelists(first: &str, second: &str) -> Vec<(String, bool)> {
    let rules = |rules: &str| format!("[egress]\nwhitelist = {{ replace = [{rules}] }}");
    more(&rules(first), &rules(second)).into_iter().map(|(_, items, certain)| (items, certain)).collect()
}

#[test]
fn no_policy_differs_from_itself_and_every_one_can_be_shown_again() {
    for (name, _) in SHIPPED {
        let shipped = load_shipped(name).unwrap();
        let again = load_text(&show(&shipped)).unwrap();
        assert_eq!(compare(&shipped, &again), Comparison::default(), "{name}");
    }
}

#[test]
fn more_the_one_way_is_less_the_other_way() {
    for (first, _) in SHIPPED {
        for (second, _) in SHIPPED {
            let (first, second) = (load_shipped(first).unwrap(), load_shipped(second).unwrap());
            let (there, back) = (compare(&first, &second), compare(&second, &first));
            let certain: Vec<_> = there.more.into_iter().filter(|difference| difference.certain).collect();
            assert_eq!(certain, back.less);
            assert_eq!(there.other.len(), back.other.len());
        }
    }
}

#[test]
fn strict_allows_nothing_beyond_default() {
    let comparison = compare(&load_shipped("default").unwrap(), &load_shipped("strict").unwrap());
    let keys: Vec<_> = comparison.more.iter().map(|difference| difference.key.as_str()).collect();
    assert_eq!(keys, [""; 0]);
    assert!(!comparison.less.is_empty());
}

#[test]
fn a_path_below_a_shown_one_is_no_loosening() {
    let add = |list: &str, path: &str| format!("[filesystem]\n{list} = {{ add = [\"{path}\"] }}");
    assert_eq!(more("", &add("read_only_optional", "/usr/share/doc")), []);
    assert_eq!(more(&add("read_only", "/opt"), &add("read_only", "/opt/x")), []);
    let read = String::from("[filesystem] read_only, read_only_optional");
    let run = String::from("[filesystem] read_only");
    assert_eq!(
        more(&add("read_only", "/opt/x"), &add("read_only", "/opt")),
        [(read.clone(), "/opt".into(), true), (run.clone(), "/opt".into(), true)]
    );
    // The same path, and now programs may be run from it.
    assert_eq!(more(&add("read_only_optional", "/opt"), &add("read_only", "/opt/x")), [(run.clone(), "/opt/x".into(), true)]);
    assert_eq!(more(&add("read_only", "/opt"), &add("read_only_optional", "/opt")), []);
    assert_eq!(more("", &add("read_only_optional", "/usrlocal")), [(read, "/usrlocal".into(), true)]);
    // What is bound last above it takes the right away, so having it is more.
    let covered = "[filesystem]\nread_only = { add = [\"/opt/x\"] }\nread_only_optional = { add = [\"/opt\"] }";
    assert_eq!(more(covered, &add("read_only", "/opt/x")), [(run, "/opt/x".into(), true)]);
}

#[test]
fn networks_and_ports_are_compared_by_what_they_cover() {
    assert_eq!(whitelists("\"10.0.0.0/8:1-52,54-1000\"", "\"10.0.0.0/9:80-90\""), []);
    assert_eq!(whitelists("\"10.0.0.0/9:80\", \"10.128.0.0/9:80\"", "\"10.0.0.0/8:80\""), []);
    assert_eq!(whitelists("\"10.0.0.0/9:80\", \"10.128.0.0/10:80\"", "\"10.0.0.0/8:80\""), [("10.0.0.0/8:80".into(), true)]);
    assert_eq!(whitelists("\"10.0.0.0/8:80-90\"", "\"10.0.0.0/8:85-95,443\""), [("10.0.0.0/8:91-95,443".into(), true)]);
    assert_eq!(whitelists("\"10.0.0.0/8:80\", \"10.0.0.0/8:81\"", "\"10.0.0.0/8:80-81\""), []);
    assert_eq!(whitelists("\"[2001:db8::/32]:443\"", "\"[2001:db8:1::/48]:443\""), []);
    assert_eq!(whitelists("\"0.0.0.0/0:443\"", "\"[2001:db8::/48]:443\""), [("[2001:db8::/48]:443".into(), true)]);
}

#[test]
fn more_rules_than_the_bound_are_not_compared() {
    let ports = |from: u32| (0..60).map(|n| (from + 2 * n).to_string()).collect::<Vec<_>>().join(",");
    let rules =
        |from: u32, net: u32| (0..200).map(|n| format!("\"10.0.0.0/{net}:{}\"", ports(from + 120 * n))).collect::<Vec<_>>().join(", ");
    let found = whitelists(&rules(1000, 8), &rules(1001, 9));
    assert!(found.len() == 1 && !found[0].1, "{}", found.len());
}

#[test]
fn a_rule_within_a_closed_block_opens_it() {
    assert_eq!(whitelists("\"0.0.0.0/0:80\"", "\"169.254.169.254:80\""), [("169.254.169.254:80".into(), true)]);
    assert_eq!(whitelists("\"0.0.0.0/0:80\"", "\"127.0.0.0/9:80\""), [("127.0.0.0/9:80".into(), true)]);
    assert_eq!(whitelists("\"127.0.0.0/8:80\"", "\"127.0.0.0/9:80\""), []);
    for hidden in ["[64:ff9b::a9fe:a9fe]:80", "[2002:a9fe:a9fe::1]:80"] {
        assert_eq!(whitelists("\"[::/0]:80\"", &format!("\"{hidden}\"")), [(hidden.into(), true)]);
        assert_eq!(whitelists(&format!("\"{hidden}\""), &format!("\"{hidden}\"")), []);
    }
    assert_eq!(whitelists("\"[::/0]:80\"", "\"[64:ff9b::a00:507]:80\""), [("[64:ff9b::a00:507]:80".into(), false)]);
    // Whether it is the host's own is not known here.
    assert_eq!(whitelists("\"10.0.0.0/8:80\"", "\"10.0.5.7:80\""), [("10.0.5.7:80".into(), false)]);
    assert_eq!(whitelists("\"10.0.0.0/8:80\", \"10.0.5.7:80-81\"", "\"10.0.5.7:80\""), []);
}

#[test]
fn names_are_compared_as_the_gate_decides_them() {
    assert_eq!(whitelists("\"*.example.org:443\"", "\"a.example.org:443\""), []);
    assert_eq!(whitelists("\"*.example.org:443\"", "\"example.org:443\""), [("example.org:443".into(), true)]);
    assert_eq!(whitelists("\"a.example.org:443\"", "\"*.example.org:443\""), [("*.example.org:443".into(), true)]);
    assert_eq!(whitelists("\"a.example.org:443\"", "\"a.example.org:443/tcp\""), [("a.example.org:443".into(), true)]);
    assert_eq!(whitelists("\"a.example.org:443/tcp\"", "\"a.example.org:443\""), []);
    // The rule that names the name comes first, so the wildcard's leave does not reach it.
    let both = "\"*.example.org:443/tcp\", \"a.example.org:443\"";
    assert_eq!(whitelists(both, "\"*.example.org:443/tcp\""), [("a.example.org:443".into(), true)]);
    assert_eq!(whitelists(both, "\"a.example.org:443\""), []);
    // A rule with the whole name may resolve to a private address, a wildcard may not.
    assert_eq!(whitelists("\"*.a.corp:443\"", "\"api.a.corp:443\""), [("api.a.corp:443".into(), true)]);
    let long = "a".repeat(41);
    assert_eq!(whitelists("\"*.example.org:443\"", &format!("\"{long}.example.org:443\"")).len(), 1);
    // A rule for a name does not open the address, nor the other way round.
    assert_eq!(whitelists("\"0.0.0.0/0:443\"", "\"pypi.org:443\""), [("pypi.org:443".into(), true)]);
}

#[test]
fn system_calls_are_compared_by_what_becomes_of_them() {
    let seccomp = |lines: &str| format!("[seccomp]\n{lines}");
    let allow = |what: &str| (String::from("[seccomp] allow"), what.to_owned(), true);
    assert_eq!(more("", &seccomp("allow = { add = [\"ptrace\", \"sync\"] }")), [allow("ptrace"), allow("sync")]);
    assert_eq!(more("", &seccomp("allow = { remove = [\"splice\"] }")), []);
    assert_eq!(more("", &seccomp("kill = { add = [\"ptrace\"] }")), []);
    let killed = seccomp("kill = { add = [\"ptrace\"] }");
    assert_eq!(more(&killed, ""), [(String::from("[seccomp] kill"), String::from("ptrace"), true)]);
    assert_eq!(more(&killed, &seccomp("enosys = { add = [\"ptrace\"] }")).len(), 1);
    // Without `socket` a family opens nothing.
    let none = seccomp("allow = { remove = [\"socket\"] }\nsocket_families = { replace = [] }");
    assert_eq!(more(&none, &seccomp("allow = { remove = [\"socket\"] }")), []);
    assert_eq!(more(&none, "").len(), 2);
    assert_eq!(more("", &seccomp("ioctl = { add = [\"0xabcd\"] }"))[0].1, "0xabcd");
    let comparison = compare(&policy(""), &policy(&seccomp("enosys = { add = [\"ptrace\"] }")));
    assert!(comparison.more.is_empty() && comparison.less.is_empty() && comparison.other.len() == 1);
}

#[test]
fn globs_that_are_no_longer_listed_are_more() {
    let scratch = |lines: &str| format!("[scratch]\n{lines}");
    let hidden = String::from("[scratch] hidden");
    assert_eq!(more("", &scratch("hidden = { replace = [] }")), [(hidden.clone(), ".env*".into(), true)]);
    assert_eq!(more("", &scratch("hidden = { add = [\"*.key\"] }")), []);
    assert_eq!(more("", &scratch("hidden = { replace = [\".env\"] }")), [(hidden.clone(), ".env*".into(), true)]);
    // Globs are compared as text, so one that protects more counts as well.
    assert_eq!(more("", &scratch("hidden = { replace = [\"**/.env*\"] }")), [(hidden, ".env*".into(), true)]);
    assert_eq!(more(&scratch("read_only = { add = [\".git\"] }"), "")[0].0, "[scratch] read_only");
    // What is hidden cannot be changed either, and nothing can in a read-only scratch.
    assert_eq!(more(&scratch("read_only = { add = [\".git\"] }"), &scratch("hidden = { add = [\".git\"] }")), []);
    assert_eq!(more(&scratch("read_only = { add = [\".git\"] }"), &scratch("access = \"ro\"")), []);
    assert_eq!(more(&scratch("access = \"ro\""), "")[0].0, "[scratch] access");
}

#[test]
fn variables_are_compared_by_their_beginnings() {
    let accept = |names: &str| format!("[environment]\naccept = {{ add = [{names}] }}");
    assert_eq!(more("", &accept("\"LC_ALL\", \"LC_T*\", \"CLICOLOR\"")), []);
    assert_eq!(more("", &accept("\"LC*\""))[0].1, "LC*");
    assert_eq!(more(&accept("\"A\""), &accept("\"A*\""))[0].1, "A*");
    assert!(compare(&policy(""), &policy(&accept("\"LD_PRE*\""))).more[0].consequence.as_ref().unwrap().contains("LD_PRELOAD"));
}

#[test]
fn another_command_cannot_be_judged_and_counts() {
    let command = "[runtimes.python]\ncommand = [\"/usr/bin/python3\", \"-I\", \"{file}\"]";
    let comparison = compare(&policy(""), &policy(command));
    assert!(comparison.more.len() == 1 && !comparison.more[0].certain && comparison.less.is_empty(), "{comparison:?}");
    assert_eq!(more("", "remove_runtimes = [\"node\"]"), []);
    assert_eq!(more("remove_runtimes = [\"node\"]", "")[0].0, "[runtimes.node]");
}

#[test]
fn watched_modules_are_compared_by_what_becomes_of_a_name() {
    let modules = |lines: &str| format!("[runtimes.python.modules]\n{lines}");
    let strict = modules("default = \"note\"\n\"os.*\" = \"deny\"\nctypes = \"deny\"");
    assert_eq!(more(&strict, &modules("default = \"deny\"\n\"os.*\" = \"deny\"")), []);
    let looser = more(&strict, &modules("default = \"note\"\n\"os.*\" = \"deny\"\n\"os.system\" = \"note\"\nctypes = \"deny\""));
    assert_eq!(looser[0].0, "[runtimes.python.modules] \"os.system\"");
    let keys: Vec<String> = more(&strict, "").into_iter().map(|(key, ..)| key).collect();
    assert_eq!(keys, ["default", "\"ctypes\"", "\"os.*\""].map(|key| format!("[runtimes.python.modules] {key}")));
}

#[test]
fn a_template_counts_as_more_and_so_does_a_longer_life_of_its_images() {
    let keys = |first: &str, second: &str| more(first, second).into_iter().map(|(key, ..)| key).collect::<Vec<_>>();
    let none = "[runtimes.python]\ntemplate = \"none\"";
    assert_eq!(keys(none, ""), ["[runtimes.python] template"]);
    assert_eq!(keys("", none), [""; 0]);
    let consequence = compare(&policy(none), &policy("")).more.swap_remove(0).consequence.unwrap();
    assert!(consequence.contains("share memory layout") && consequence.ends_with("1000 runs or 10min"), "{consequence}");
    let longer = "[templates.bare]\nmax_runs = 1001\nmax_age = \"11min\"";
    assert_eq!(keys("", longer), ["[templates.bare] max_runs", "[templates.bare] max_age"]);
    assert_eq!(keys(longer, ""), [""; 0]);
    let shared = "[templates.bare]\nshared_by = \"policy\"\nimages = 2\nready = 1";
    assert_eq!((keys("", shared), keys(shared, "")), (vec!["[templates.bare] shared_by".to_owned()], vec![]));
    // Other modules, other code and another name are neither more nor less.
    let other = "[templates.data]\nimports = [\"json\", \"re\"]\nwarm = \"x = 1\"\n[runtimes.python]\ntemplate = \"data\"";
    let Comparison { more, less, other } = compare(&policy(""), &policy(other));
    assert!(more.is_empty() && less.is_empty());
    let other: Vec<_> = other.into_iter().map(|difference| (difference.key, difference.text)).collect();
    let expected = [
        ("[runtimes.python] template", "data instead of bare"),
        ("[templates.data] imports", "json, re instead of none"),
        ("[templates.data] warm", "\"x = 1\" (5 bytes) instead of none"),
    ];
    assert_eq!(other, expected.map(|(key, text)| (key.to_owned(), text.to_owned())));
    // A template that no runtime starts from changes nothing.
    assert_eq!(compare(&policy(""), &policy("[templates.data]\nimports = [\"json\"]")), Comparison::default());
}

#[test]
fn a_limit_of_one_is_singular() {
    let one = policy("[limits]\nprocesses = 1\ncpus = 1\n");
    let bounds: Vec<String> = [LimitKey::Processes, LimitKey::Cpus].map(|key| bound(key, one.limits.get(key))).to_vec();
    assert_eq!(bounds, ["at most 1 process or thread at a time", "at most 1 CPU"]);
}
