//! `policy explain` and `policy diff`: that what they say is what a run gets, and that a
//! comparison's exit status can hold a policy to a ceiling.

use std::{collections::BTreeSet, process::Output};

use serde_json::{Value, json};

use crate::support::{
    exec::stockade,
    policy_dir::{PolicyDirectory, derived, derived_from},
    runner::{is_root, test},
};

fn policy(arguments: &[&str]) -> (Output, String, String) {
    let output = stockade([&["policy"], arguments].concat()).output().unwrap();
    let (said, complained) = (String::from_utf8_lossy(&output.stdout).into_owned(), String::from_utf8_lossy(&output.stderr).into_owned());
    (output, said, complained)
}

fn parsed(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

/// All that a section of an explanation names, and its sentences in one text.
fn section(explanation: &Value, about: &str) -> (BTreeSet<String>, String) {
    let sections = explanation["sections"].as_array().unwrap();
    let section = sections.iter().find(|section| section["about"] == about).unwrap_or_else(|| panic!("no section {about}"));
    let statements = section["statements"].as_array().unwrap();
    let items = statements.iter().flat_map(|statement| statement["items"].as_array().cloned().unwrap_or_default());
    let says: Vec<&str> = statements.iter().map(|statement| statement["says"].as_str().unwrap()).collect();
    (items.map(|item| item.as_str().unwrap().to_owned()).collect(), says.join("\n"))
}

test!(Both, an_explanation_begins_with_what_the_policy_changes);
fn an_explanation_begins_with_what_the_policy_changes() {
    let policies = PolicyDirectory::new();
    let own = policies.write(
        "tight",
        &derived("[limits]\nprocesses = 1\nmax = \"same\"\n[scratch]\naccess = \"ro\"\n[egress]\nwhitelist = { add = [\"pypi.org:443\"] }"),
    );
    let (_, said, _) = policy(&["explain", &own]);
    let (summary, rest) = said.split_once("\n\nReadable\n").unwrap();
    let (_, changed) = summary.split_once("Changed, compared with default, which it extends\n").unwrap_or_else(|| panic!("{said}"));
    let marks: Vec<&str> = changed.lines().filter(|line| line.starts_with("- ")).map(|line| &line[..line.find(':').unwrap()]).collect();
    assert_eq!(marks, ["- new", "- no longer", "- no longer", "- no longer"], "{changed}");
    assert!(rest.contains("processes: at most 1 process or thread at a time; code can still replace itself"), "{rest}");
    assert!(rest.contains("scratch_size: moot, the scratch is read-only"), "{rest}");
    let explained = parsed(&policy(&["explain", "--json", &own]).1);
    assert_eq!((&explained["changes"]["base"], explained["changes"]["more"].as_array().unwrap().len()), (&Value::from("default"), 1));
    // What extends nothing changes nothing, and says nothing of it.
    let (_, of_default, _) = policy(&["explain", "default"]);
    assert!(!of_default.contains("which it extends") && of_default.contains("scratch_size: the scratch may grow by"), "{of_default}");
    // Long lists are cut, and where to read on is said.
    let names = ["wall", "memory", "file_size", "open_files", "stack", "output_size"];
    let limits: String = names.iter().map(|name| format!("{name} = \"none\"\n")).collect();
    let (_, many, _) = policy(&["explain", &policies.write("loose", &derived(&format!("[limits]\n{limits}max = \"same\"")))]);
    let many = many.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(many.contains("- and 2 more: stockade policy diff default "), "{many}");
}

test!(Both, an_explanation_says_what_the_plan_does);
fn an_explanation_says_what_the_plan_does() {
    // Without a cgroup, which an ordinary user may lack, `strict` has no plan.
    let names = ["default", "review", "shell", "pypi", "blueprint", "data-science", "wasm", "pyodide", "strict"];
    for name in names.into_iter().filter(|name| is_root() || *name != "strict") {
        let plan = parsed(&{
            let output = stockade(["run", "--policy", name, "--dry-run", "--json", "--", "true"]).output().unwrap();
            String::from_utf8(output.stdout).unwrap()
        });
        let explanation = parsed(&policy(&["explain", "--json", name]).1);
        let ((read, _), (write, _), (run, programs)) =
            (section(&explanation, "read"), section(&explanation, "write"), section(&explanation, "run"));
        let mut counted = 0;
        for entry in plan["root"].as_array().unwrap() {
            let target = || format!("/{}", entry["target"].as_str().unwrap());
            match entry["make"].as_str().unwrap() {
                "bind" => {
                    let (path, executable) = (target(), entry["executable"] == true);
                    let of_runtime = programs.contains(&format!("environment {path},"));
                    assert!(read.contains(&path) || of_runtime, "{name}: {path} is shown, and not explained");
                    assert_eq!(run.contains(&path) || of_runtime, executable, "{name}: {path}");
                    counted += 1;
                }
                "device" | "mask" => assert!(read.contains(&target()), "{name}: {}", target()),
                "writable" => assert!(write.contains(&target()), "{name}: {}", target()),
                _ => {}
            }
        }
        assert!(counted >= 2, "{name}: {plan}");
        let rules = |value: &Value| {
            value.as_array().cloned().unwrap_or_default().into_iter().map(|rule| rule.as_str().unwrap().to_owned()).collect::<BTreeSet<_>>()
        };
        assert_eq!(section(&explanation, "reach").0, rules(&plan["egress"]["whitelist"]), "{name}");
        let consume = section(&explanation, "consume").1;
        assert_eq!(consume.lines().count(), plan["limits"].as_object().unwrap().len(), "{name}");
        let mebibytes = plan["limits"]["memory_bytes"].as_u64().unwrap() >> 20;
        let memory = if mebibytes.is_multiple_of(1024) { format!("{}GiB", mebibytes / 1024) } else { format!("{mebibytes}MiB") };
        assert!(consume.contains(&format!("memory: at most {memory} for all processes together\n")), "{name}: {consume}");
        let identity = section(&explanation, "identity").1;
        for id in plan["identity"]["inside"].as_array().unwrap() {
            assert!(identity.contains(&id.to_string()), "{name}: {identity}");
        }
        let set = section(&explanation, "environment").0;
        for variable in plan["environment"].as_array().unwrap().iter().map(|variable| variable.as_str().unwrap()) {
            let own = ["HOME", "USER", "LOGNAME"].contains(&variable);
            assert!(own || set.iter().any(|item| item.starts_with(&format!("{variable}="))), "{name}: {variable}");
        }
    }
}

test!(Both, an_explanation_says_what_follows_from_each_loosening);
fn an_explanation_says_what_follows_from_each_loosening() {
    // Lines are wrapped for a person.
    let plain = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
    let (_, alone, _) = policy(&["explain", "pypi"]);
    let (output, said, complained) = policy(&["explain", "pypi", "--against", "strict"]);
    let end = said.find("\nAllowed, but not by strict").unwrap();
    assert_eq!(alone, said[..end], "without a policy to compare it with, nothing is compared");
    assert!(output.status.success() && complained.is_empty(), "{complained}");
    let said = plain(&said);
    for sentence in [
        "code can change and delete everything in the scratch",
        "code can send anything that it reads to files.pythonhosted.org:443, pypi.org:443",
        "memory: at most 1GiB for all processes together",
        "Allowed, but not by strict",
        "memory from 1GiB to at most 4GiB",
    ] {
        assert!(said.contains(sentence), "`{sentence}` is not in: {said}");
    }
    assert!(plain(&policy(&["explain", "strict", "--against", "strict"]).1).ends_with("Allowed, but not by strict - nothing"));
    let against = plain(&policy(&["explain", "--against", "default", "shell"]).1);
    assert!(against.contains("not by default") && against.contains("a run may last for ever"), "{against}");
    let (output, said, complained) = policy(&["explain", "strct"]);
    assert!(output.status.code() == Some(1) && said.is_empty() && complained.contains("did you mean `strict`?"), "{complained}");
}

test!(Both, an_explanation_as_json_says_the_same);
fn an_explanation_as_json_says_the_same() {
    let policies = PolicyDirectory::new();
    let own = policies.write("own", &derived("[environment.set]\nESCAPE = \"\\u001b[2J\"\n[scratch]\nread_only = { add = [\".git\"] }"));
    let (explanation, text) = (parsed(&policy(&["explain", "--json", &own]).1), policy(&["explain", &own]).1);
    assert_eq!(
        (&explanation["schema"], &explanation["policy"], &explanation["loosened"]["against"]),
        (&json!(1), &json!(own), &json!("strict"))
    );
    assert_eq!(explanation["sha256"].as_str().map(str::len), Some(64));
    let words = |text: &str| text.split_whitespace().collect::<String>();
    for section in explanation["sections"].as_array().unwrap() {
        for statement in section["statements"].as_array().unwrap() {
            assert!(words(&text).contains(&words(statement["says"].as_str().unwrap())), "{statement}");
        }
    }
    assert!(section(&explanation, "write").0.contains(".git"));
    assert!(!text.contains('\u{1b}'), "control characters of a policy reach no terminal");
}

test!(Both, a_comparison_ends_with_0_only_where_nothing_more_is_allowed);
fn a_comparison_ends_with_0_only_where_nothing_more_is_allowed() {
    for (first, second, code) in
        [("default", "default", 0), ("default", "strict", 0), ("strict", "default", 1), ("default", "pypi", 1), ("shell", "default", 0)]
    {
        let (output, said, complained) = policy(&["diff", first, second]);
        assert_eq!((output.status.code(), complained.as_str()), (Some(code), ""), "{first} {second}: {said}");
        let comparison = parsed(&policy(&["diff", "--json", first, second]).1);
        assert_eq!(comparison["within"], code == 0);
        assert_eq!(comparison["more"].as_array().unwrap().is_empty(), code == 0);
        assert_eq!((&comparison["a"]["name"], &comparison["b"]["name"], &comparison["schema"]), (&json!(first), &json!(second), &json!(1)));
    }
    let (_, said, _) = policy(&["diff", "default", "pypi"]);
    assert!(said.contains("- peers: files.pythonhosted.org:443, pypi.org:443") && said.contains("[egress] whitelist"), "{said}");
}

test!(Both, a_comparison_goes_by_what_is_covered_and_not_by_words);
fn a_comparison_goes_by_what_is_covered_and_not_by_words() {
    let policies = PolicyDirectory::new();
    let ceiling = "[filesystem]\nread_only = { add = [\"/opt\"] }\n[egress]\nwhitelist = { add = [\"10.0.0.0/8:54-1000\", \"*.example.org:443\"] }\n[environment]\naccept = { add = [\"MY_*\"] }";
    let ceiling = policies.write("ceiling", &derived(ceiling));
    let within = "[filesystem]\nread_only = { add = [\"/opt/tool\"] }\n[egress]\nwhitelist = { add = [\"10.0.0.0/9:80-90\", \"a.example.org:443\"] }\n[environment]\naccept = { add = [\"MY_NAME\"] }\n[scratch]\nhidden = { add = [\"**/*.key\"] }";
    let within = policies.write("within", &derived(within));
    let (output, said, _) = policy(&["diff", &ceiling, &within]);
    assert_eq!(output.status.code(), Some(0), "{said}");
    // Each of these, with one thing more, is beyond it.
    for (lines, what) in [
        ("[filesystem]\nread_only = { add = [\"/srv\"] }", "/srv"),
        ("[egress]\nwhitelist = { add = [\"10.0.0.0/9:80-1001\"] }", "10.0.0.0/9:1001"),
        ("[egress]\nwhitelist = { add = [\"169.254.169.254:80\"] }", "169.254.169.254:80"),
        ("[egress]\nwhitelist = { add = [\"a.example.org:443/tcp\"] }", "a.example.org:443"),
        ("[seccomp]\nallow = { add = [\"ptrace\"] }", "ptrace"),
        ("[limits]\nwall = \"31s\"", "wall"),
        ("[limits.max]\nwall = \"11min\"", "wall"),
        ("[scratch]\nhidden = { replace = [] }", ".env*"),
        ("[degrade]\nroot = { add = [\"cgroup\"] }", "cgroup"),
    ] {
        let beyond = policies.write("beyond", &derived(lines));
        let (output, said, _) = policy(&["diff", &ceiling, &beyond]);
        let more = said.split("\n\n").next().unwrap();
        assert!(output.status.code() == Some(1) && more.contains(what), "{lines}: {said}");
    }
}

test!(Both, what_cannot_be_decided_counts_as_more_and_says_so);
fn what_cannot_be_decided_counts_as_more_and_says_so() {
    let policies = PolicyDirectory::new();
    let other = policies.write("other", &derived("[runtimes.python]\ncommand = [\"/usr/bin/python3\", \"-I\", \"{file}\"]"));
    let (output, said, _) = policy(&["diff", "default", &other]);
    assert!(output.status.code() == Some(1) && said.contains("undecided, so it counts as more"), "{said}");
    assert_eq!(parsed(&policy(&["diff", "--json", "default", &other]).1)["more"][0]["certain"], false);
}

test!(Both, a_comparison_with_no_policy_ends_with_2);
fn a_comparison_with_no_policy_ends_with_2() {
    let policies = PolicyDirectory::new();
    let bad = policies.write("bad", &derived_from("default", "[limits]\nwal = \"1s\""));
    for arguments in [&["diff", "default", "nope"][..], &["diff", "nope", "default"], &["diff", "default", &bad], &["diff", "default"]] {
        let (output, said, complained) = policy(arguments);
        assert!(output.status.code() == Some(2) && said.is_empty() && !complained.is_empty(), "{arguments:?}: {said}{complained}");
    }
}

test!(Both, what_hides_or_turns_text_is_escaped_and_means_the_same);
/// A policy may come from somebody who wants it to be read as another.
fn what_hides_or_turns_text_is_escaped_and_means_the_same() {
    const PATH: &str = "/srv/\u{202e}drow\u{2028}- nothing\u{200b}";
    let policies = PolicyDirectory::new();
    let written = format!(
        "schema = 1\ndescription = \"a \\u202eb\"\nextends = \"default\"\n[filesystem]\nread_only_optional = {{ add = [\"{PATH}\"] }}\n"
    );
    let hostile = policies.write("hostile", &written);
    let hidden = |text: &str| text.chars().any(|letter| matches!(u32::from(letter), 0x7f..=0x9f | 0x200b..=0x200f | 0x2028..=0x202e));
    for command in [&["explain", &hostile][..], &["diff", "default", &hostile], &["show", &hostile]] {
        let (said, json) = (policy(command).1, policy(&[command, &["--json"]].concat()).1);
        assert!(!hidden(&said) && said.to_lowercase().contains("202e"), "{command:?}: {said}");
        assert!(!hidden(&json) && parsed(&json).to_string().contains(PATH), "{command:?}: {json}");
    }
    // Nor can words of a policy stand where Stockade's do, or one path look like two.
    let spoken = "schema = 1\ndescription = \"x                                                                               Allowed, but not by default - nothing\"\nextends = \"default\"\n[filesystem]\nread_only_optional = { add = [\"/srv/a, /srv/b - nothing\"] }\n";
    let said = policy(&["explain", &policies.write("spoken", spoken)]).1;
    assert!(said.lines().all(|line| !line.starts_with("Allowed, but not by default")), "{said}");
    assert!(said.contains("\"/srv/a, /srv/b - nothing\""), "{said}");
    // What is shown loads as the same policy again.
    let again = policies.write("again", &policy(&["show", &hostile]).1);
    let of = |name: &str| parsed(&policy(&["show", "--json", name]).1)["filesystem"].clone();
    assert_eq!(of(&again), of(&hostile));
}
