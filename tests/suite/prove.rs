//! `stockade prove`: what it promises about a policy, and that it does not promise more
//! than its controls show.
//!
//! That a missing layer is found is `tests/ablation`'s to show.

use std::{fs, path::Path, process::Output};

use serde_json::Value;

use crate::support::{
    exec::{program_path, run_under, stockade, text},
    policy_dir::{PolicyDirectory, derived},
    runner::{directory, is_root, test},
};

struct Proof {
    status: Option<i32>,
    value: Value,
    stderr: String,
}

impl Proof {
    fn of(output: &Output) -> Self {
        let value = serde_json::from_slice(&output.stdout).unwrap_or_default();
        Proof { status: output.status.code(), value, stderr: String::from_utf8_lossy(&output.stderr).into_owned() }
    }

    fn count(&self, what: &str) -> u64 {
        self.value["count"][what].as_u64().unwrap()
    }

    fn findings(&self) -> &Vec<Value> {
        self.value["findings"].as_array().unwrap()
    }

    fn finding(&self, class: &str, attack: &str) -> Option<&Value> {
        self.findings().iter().find(|finding| finding["class"] == class && finding["attack"] == attack)
    }

    /// Everything that did not hold, for a message.
    fn open(&self) -> String {
        // There are none where the proof was refused, of which stderr tells.
        let findings = self.value["findings"].as_array().into_iter().flatten();
        let open = findings.filter(|finding| finding["state"] == "breach" || finding["state"] == "not_proven");
        open.map(|finding| format!("{finding}\n")).collect()
    }

    #[track_caller]
    fn held(&self) -> &Self {
        assert_eq!(self.status, Some(0), "{}\n{}", self.stderr, self.open());
        assert!(self.value["proven"] == true && self.count("breaches") == 0 && self.count("not_proven") == 0, "{}", self.open());
        assert_eq!(self.count("tried"), self.count("held"));
        self
    }
}

fn prove(options: &[&str]) -> Proof {
    Proof::of(&stockade([&["prove", "--json"], options].concat()).output().unwrap())
}

/// The same where the launcher's own id is so small that somebody inside has one alike.
fn prove_among_few_processes() -> Proof {
    let program = program_path().unwrap();
    let words = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", "--", text(&program), "prove", "--json"];
    Proof::of(&run_under(&words).output().unwrap())
}

test!(serial Both, default_holds_against_every_attack, seconds 180);
fn default_holds_against_every_attack() {
    // An ordinary user's PID namespace would come with a user namespace, in which no user is
    // the root that owns /tmp.
    let (proof, target) = match is_root() {
        true => (prove_among_few_processes(), "signal a child of the launcher, by its pid"),
        false => (prove(&[]), "signal "),
    };
    proof.held();
    let signal = proof.finding("processes", "signal the launcher").unwrap();
    assert!(signal["state"] == "held" && signal["tried"].as_str().unwrap().starts_with(target), "{signal}");
    assert_eq!(proof.value["schema"], 1);
    // Hundreds, and not because there are hundreds of system calls.
    assert!(proof.value["distinct"]["tried"].as_u64().unwrap() > 400, "{}", proof.value["distinct"]);
    let tried = |class: &str| proof.findings().iter().filter(|finding| finding["class"] == class && finding["state"] == "held").count();
    for (class, least) in [
        ("file_system", 100),
        ("processes", 30),
        ("privileges", 50),
        ("system_calls", 80),
        ("kernel_surface", 150),
        ("network", 20),
        ("resources", 12),
        ("result_forgery", 15),
        ("cross_run_leaks", 12),
        ("launcher", 5),
    ] {
        assert!(tried(class) >= least, "{class}: {}", tried(class));
    }
    for finding in proof.findings() {
        let said = |field: &str| finding[field].as_str().is_some_and(|text| !text.is_empty());
        assert!(["attack", "tried", "expected", "seen", "control"].iter().all(|field| said(field)), "{finding}");
        assert!(finding["state"] != "held" || finding["layers"].as_array().is_some_and(|layers| !layers.is_empty()), "{finding}");
        let untried = |field: &str| finding[field].as_str().unwrap().contains("not tried");
        assert!(finding["state"] != "held" || !untried("seen") && !untried("control"), "{finding}");
    }
    for beside in ["an abstract socket of a run beside it", "a service of a run beside it", "what a run beside it has in /tmp"] {
        assert!(proof.finding("cross_run_leaks", beside).is_some_and(|finding| finding["state"] == "held"), "{beside}");
    }
    assert!(
        proof.value["receipt"]["layers"].as_array().unwrap().iter().any(|layer| layer["layer"] == "image"),
        "the image is not in the receipt"
    );
    let left = crate::suite::proof_files::proofs();
    assert!(left.is_empty(), "a directory is left: {left:?}");
}

test!(RootOnly, every_other_shipped_policy_holds, seconds 900);
fn every_other_shipped_policy_holds() {
    // Of the sandbox these are `default`: what `review` screens for is no layer, nor is WebAssembly.
    let others = |name: &str| !matches!(name, "default" | "review" | "wasm" | "pyodide" | "strict");
    for (name, _) in stockade_policy::SHIPPED.iter().filter(|(name, _)| others(name)) {
        println!("{name}");
        prove(&["--policy", name]).held();
    }
}

// Its control for CPU time computes with half a CPU, against a clock.
test!(RootOnly, strict_holds_or_is_refused_for_its_cgroup, needs [Speed], seconds 300);
fn strict_holds_or_is_refused_for_its_cgroup() {
    let proof = prove(&["--policy", "strict"]);
    if proof.status == Some(125) {
        assert!(proof.stderr.contains("cgroup"), "{}", proof.stderr);
    } else {
        proof.held();
    }
}

test!(Both, what_a_policy_allows_is_no_attack, seconds 180);
fn what_a_policy_allows_is_no_attack() {
    let tight = prove(&[]);
    assert!(tight.finding("processes", "signal the launcher").is_some());
    assert_eq!(tight.finding("system_calls", "kcmp").map(|finding| &finding["state"]), Some(&Value::from("held")));
    let policies = PolicyDirectory::new();
    let loose = policies.write(
        "loose",
        &derived("[filesystem]\nread_only = { add = [\"/srv\"] }\n[seccomp]\nallow = { add = [\"kcmp\"] }\nioctl = { add = [\"FIDEDUPERANGE\"] }"),
    );
    let proof = prove(&["--policy", &loose]);
    proof.held();
    assert!(tight.finding("file_system", "see /srv").is_some() && proof.finding("file_system", "see /srv").is_none());
    assert!(proof.finding("system_calls", "kcmp").is_none());
    assert!(proof.finding("kernel_surface", "ioctl FIDEDUPERANGE").is_none());
    let allowed = |proof: &Proof| proof.findings().iter().find(|finding| finding["state"] == "allowed").unwrap()["attack"].clone();
    let number = |proof: &Proof| allowed(proof).as_str().unwrap().split(' ').next().unwrap().parse::<u64>().unwrap();
    assert_eq!(number(&proof), number(&tight) + 1);
}

test!(Both, a_control_that_cannot_succeed_proves_nothing, seconds 180);
fn a_control_that_cannot_succeed_proves_nothing() {
    let policies = PolicyDirectory::new();
    // Whatever a run asks for, it never gets what the attack on memory would need.
    let little = "[limits]\nmemory = \"30MiB\"\nscratch_size = \"8MiB\"\ntmp_size = \"8MiB\"\nfile_size = \"8MiB\"\naddress_space = \"40MiB\"\n[limits.max]\nmemory = \"30MiB\"\naddress_space = \"40MiB\"";
    let proof = prove(&["--policy", &policies.write("little", &derived(little))]);
    assert_eq!(proof.status, Some(3), "{}\n{}", proof.stderr, proof.open());
    let memory = proof.finding("resources", "memory").unwrap();
    assert_eq!(memory["state"], "not_proven", "{memory}");
    assert!(memory["advice"].as_str().unwrap().contains("control"), "{memory}");
    assert_eq!((proof.value["proven"] == false, proof.count("breaches")), (true, 0));
}

/// The policies of `stockade help tighten`, by their files' names.
fn recipes() -> Vec<(String, String)> {
    let tests = std::env::var("CARGO_MANIFEST_DIR").unwrap_or_else(|_| String::from(env!("CARGO_MANIFEST_DIR")));
    let page = fs::read_to_string(Path::new(&tests).join("../crates/cli/help/tighten.md")).unwrap();
    let blocks = page.split("```toml file=").skip(1).map(|block| block.split_once('\n').unwrap());
    blocks.map(|(name, rest)| (name.trim_end_matches(".toml").to_owned(), rest.split("```").next().unwrap().to_owned())).collect()
}

test!(Both, every_recipe_of_help_tighten_is_proven, needs [SlowAsUser], seconds 400);
fn every_recipe_of_help_tighten_is_proven() {
    let policies = PolicyDirectory::new();
    let recipes = recipes();
    assert_eq!(recipes.len(), 3, "{recipes:?}");
    for (name, text) in recipes {
        println!("{name}");
        let proof = prove(&["--policy", &policies.write(&name, &text)]);
        proof.held();
        let held = |class: &str, attack: &str| {
            let finding = proof.finding(class, attack).unwrap_or_else(|| panic!("{name}: no attack {attack}"));
            assert_eq!(finding["state"], "held", "{finding}");
        };
        match name.as_str() {
            "single" => {
                held("resources", "processes");
                let attack = proof.finding("resources", "processes").unwrap();
                assert_eq!(attack["tried"], "have 2 processes under a limit of 1");
                let raised = serde_json::json!([{"limit": "processes", "policy": 1, "attacks": 16}]);
                assert_eq!(proof.value["limits_raised"], raised);
            }
            "readonly" => {
                held("file_system", "create a file in a private scratch");
                held("file_system", "remove a file in a host scratch");
            }
            _ => assert!(proof.value.get("limits_raised").is_none()),
        }
        assert_eq!(proof.value["uncovered"], serde_json::json!(["limits.cpus", "limits.collect_size"]), "{name}");
    }
}

test!(Both, a_small_limit_of_processes_is_proven_with_its_own_number, needs [Long], seconds 300);
fn a_small_limit_of_processes_is_proven_with_its_own_number() {
    let policies = PolicyDirectory::new();
    // A proof takes its time, and the recipes' have 1: each user tries one number.
    let own = if is_root() { "2" } else { "16" };
    let policy = policies.write("few", &derived(&format!("[limits]\nprocesses = {own}\nmax = \"same\"")));
    let proof = prove(&["--policy", &policy]);
    proof.held();
    let attack = proof.finding("resources", "processes").unwrap();
    assert!(attack["tried"].as_str().unwrap().ends_with(&format!("under a limit of {own}")), "{attack}");
    assert!(attack["control"].as_str().unwrap().ends_with("all were made"), "{attack}");
}

test!(Both, what_a_policy_keeps_in_a_scratch_is_attacked, seconds 180);
fn what_a_policy_keeps_in_a_scratch_is_attacked() {
    let policies = PolicyDirectory::new();
    let globs = "[scratch]\nread_only = { add = [\"*.csv\", \".git/hooks\"] }\nhidden = { add = [\"**/*.pem\", \"[!!]\"] }";
    let proof = prove(&["--policy", &policies.write("globs", &derived(globs))]);
    proof.held();
    for glob in ["*.csv", ".git/hooks"] {
        for act in ["write to", "truncate", "replace", "remove"] {
            let attack = proof.finding("file_system", &format!("{act} a read-only file, {glob}")).unwrap();
            assert_eq!(attack["state"], "held", "{attack}");
            assert!(attack["control"].as_str().unwrap().starts_with("inside, in a scratch that may be written: success"), "{attack}");
        }
    }
    assert_eq!(proof.finding("file_system", "a hidden file, **/*.pem").unwrap()["state"], "held");
    // A glob from which no name can be read is not attacked, and the proof says so.
    assert!(proof.value["uncovered"].as_array().unwrap().contains(&Value::from("scratch.hidden [!!]")), "{}", proof.value["uncovered"]);
}

test!(Both, the_page_is_well_formed_and_needs_nothing_else, seconds 180);
fn the_page_is_well_formed_and_needs_nothing_else() {
    let path = directory().join("proof.html");
    let policies = PolicyDirectory::new();
    let hostile = "schema = 1\ndescription = \"<script>alert('x')</script> & \\u202e\"\nextends = \"default\"\n";
    let policy = policies.write("hostile", hostile);
    let output = stockade(["prove", "--policy", &policy, "--html", text(&path)]).output().unwrap();
    let said = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(0), "{said}\n{}", String::from_utf8_lossy(&output.stderr));
    assert!(said.contains("everything held"), "{said}");
    let page = fs::read_to_string(&path).unwrap();
    assert!(page.starts_with("<!DOCTYPE html>") && page.contains("everything held") && page.contains("Receipt"));
    for outside in ["<script", "<link", "<img", "src=", "@import", "url(", "http:", "https:"] {
        assert!(!page.contains(outside), "{outside}");
    }
    assert!(page.contains("&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt; &amp; \\u{202e}"));
    let mut open = Vec::new();
    for part in page.split('<').skip(1) {
        let (tag, rest) = part.split_once('>').unwrap_or_else(|| panic!("an open tag: {part}"));
        assert!(!rest.contains('>') || open.last() == Some(&"style"), "{part}");
        let name = tag.split([' ', '\n']).next().unwrap();
        match name.strip_prefix('/') {
            Some(closed) => assert_eq!(open.pop(), Some(closed), "{part}"),
            None if ["!DOCTYPE", "meta", "br"].contains(&name) => {}
            None => open.push(name),
        }
    }
    assert!(open.is_empty(), "{open:?}");
    // A link in its place is not written through.
    let link = directory().join("link.html");
    std::os::unix::fs::symlink(&path, &link).unwrap();
    let refused = stockade(["prove", "--html", text(&link)]).output().unwrap();
    assert_eq!(refused.status.code(), Some(125), "{}", String::from_utf8_lossy(&refused.stderr));
}

test!(Both, mistakes_are_refused_before_anything_is_tried);
fn mistakes_are_refused_before_anything_is_tried() {
    let code = |options: &[&str]| stockade([&["prove"], options].concat()).output().unwrap().status.code();
    assert_eq!(code(&["--no-such-option"]), Some(2));
    assert_eq!(code(&["--policy", "no-such-policy"]), Some(125));
    assert_eq!(code(&["--html", "/no/such/directory/page.html"]), Some(125));
}
