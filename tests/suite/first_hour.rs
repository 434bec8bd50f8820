//! What a new user tries first: scripts, limits and peers on the command line, short results,
//! policies from options.

use std::{
    fs,
    os::unix::fs::{PermissionsExt, symlink},
    path::Path,
    process::Output,
};

use serde_json::{Value, json};

use crate::support::{
    audit_log::own_log,
    exec::{chown_to_owner, run_with_stdin, scratch, scratch_named, stockade, text, write_file},
    policy_dir::{PolicyDirectory, command_with_etc, derived},
    runner::{directory, test},
};

/// `stockade run` in a directory.
fn run_in(place: &Path, arguments: &[&str]) -> Output {
    stockade([&["run"], arguments].concat()).current_dir(place).output().unwrap()
}

/// What a run has printed, and its status.
#[track_caller]
fn says(output: &Output, stdout: &str, status: i32) {
    let (said, why) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(said == stdout && output.status.code() == Some(status), "{said}\n{why}\n{:?}", output.status);
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

test!(Both, a_script_is_run_by_its_ending);
fn a_script_is_run_by_its_ending() {
    let place = directory().join("scripts");
    fs::create_dir(&place).unwrap();
    write_file(&place.join("a.py"), "import os, sys\nprint(sys.argv[1:], os.path.basename(__file__), os.listdir('.'))");
    write_file(&place.join("b.sh"), "echo \"$0 $*\"; read line; echo \"$line\"; exit 3");
    write_file(&place.join("noted"), "print('by its language')");
    says(&run_in(&place, &["a.py", "one", "-v"]), "['one', '-v'] a.py ['a.py']\n", 0);
    let done = run_with_stdin(stockade(["run", "b.sh", "two"]).current_dir(&place), b"from stdin\n");
    says(&done, "/scratch/b.sh two\nfrom stdin\n", 3);
    says(&run_in(&place, &["--language", "python", "noted"]), "by its language\n", 0);
    let missing = run_in(&place, &["missing.py"]);
    assert!(missing.status.code() == Some(2) && stderr(&missing).contains("no file missing.py"), "{}", stderr(&missing));
    // The controls: a word that is no script is a command, with and without `--`.
    for words in [&["echo", "a.py"][..], &["--", "echo", "a.py"]] {
        says(&run_in(&place, words), "a.py\n", 0);
    }
}

test!(Both, a_script_in_the_scratch_is_run_where_it_lies);
fn a_script_in_the_scratch_is_run_where_it_lies() {
    let place = scratch();
    for (name, code) in [("main.py", "import helper; print(helper.VALUE, __file__)"), ("helper.py", "VALUE = 42")] {
        write_file(&place.join(name), code);
        chown_to_owner(&place.join(name));
    }
    says(&run_in(&place, &["-C", ".", "main.py"]), &format!("42 {}/main.py\n", place.display()), 0);
    // The control: without the directory its neighbour is not there.
    let alone = run_in(&place, &["main.py"]);
    assert!(alone.status.code() == Some(1) && stderr(&alone).contains("No module named 'helper'"), "{}", stderr(&alone));
}

test!(Both, a_program_may_have_the_ending_of_a_script);
fn a_program_may_have_the_ending_of_a_script() {
    let programs = directory().join("programs");
    fs::create_dir(&programs).unwrap();
    write_file(&programs.join("tool.sh"), "#!/bin/sh\necho tool $*");
    fs::set_permissions(programs.join("tool.sh"), fs::Permissions::from_mode(0o755)).unwrap();
    let policies = PolicyDirectory::new();
    let lines = format!(
        "[filesystem]\nread_only = {{ add = [{:?}] }}\n[environment.set]\nPATH = \"/usr/bin:/bin:{}\"",
        text(&programs),
        text(&programs)
    );
    let policy = policies.write("with-tool", &derived(&lines));
    says(&run_in(&directory(), &["--policy", &policy, "tool.sh", "a"]), "tool a\n", 0);
    // The controls: where it is not on PATH, and where it is named by a path that is not there.
    let done = run_in(&directory(), &["tool.sh"]);
    assert!(done.status.code() == Some(2) && stderr(&done).contains("no file tool.sh in this directory"), "{}", stderr(&done));
    let done = run_in(&directory(), &["--policy", &policy, "/no/such/tool.sh"]);
    assert!(done.status.code() == Some(2) && stderr(&done).contains("no file /no/such/tool.sh\n"), "{}", stderr(&done));
}

test!(Both, an_option_that_would_have_no_effect_is_refused);
fn an_option_that_would_have_no_effect_is_refused() {
    for words in [&["--into", "x", "true"][..], &["--dry-run", "--report", "x", "true"], &["--dry-run", "--collect", "x", "true"]] {
        let done = run_in(&directory(), words);
        assert!(done.status.code() == Some(2) && stderr(&done).contains("--help"), "{words:?}: {}", stderr(&done));
    }
    // The control.
    let done = run_in(&directory(), &["--dry-run", "true"]);
    assert!(done.status.success(), "{}", stderr(&done));
}

test!(Both, code_comes_from_the_command_line_and_from_stdin);
fn code_comes_from_the_command_line_and_from_stdin() {
    says(&stockade(["run", "-c", "import sys; print(6*7, sys.argv[1:])", "a"]).output().unwrap(), "42 ['a']\n", 0);
    says(&stockade(["run", "--language", "sh", "-c", "echo $0; exit 4"]).output().unwrap(), "/scratch/main.sh\n", 4);
    says(&run_with_stdin(&mut stockade(["run", "-", "b"]), b"import sys; print(sys.argv[1:], sys.stdin.read())"), "['b'] \n", 0);
    let done = run_with_stdin(&mut stockade(["run", "-"]), b"\xff");
    assert!(done.status.code() == Some(2) && stderr(&done).contains("UTF-8"), "{}", stderr(&done));
}

test!(Both, limits_of_the_command_line_hold);
fn limits_of_the_command_line_hold() {
    let sleeps = ["-c", "import time; time.sleep(30)"];
    for timeout in ["1", "1s", "1000ms"] {
        says(&stockade([&["run", "--timeout", timeout][..], &sleeps].concat()).output().unwrap(), "", 124);
    }
    let report = directory().join("report");
    let words = ["run", "--memory", "300m", "--processes", "7", "--cpus", "0.5", "--report", text(&report), "true"];
    says(&stockade(words).output().unwrap(), "", 0);
    let report: Value = serde_json::from_slice(&fs::read(&report).unwrap()).unwrap();
    assert_eq!((&report["limits"]["memory_bytes"], &report["limits"]["processes"]), (&json!(300 << 20), &json!(7)));
    assert_eq!(report["limits"]["cpus_milli"], 500);
    // No further than the policy lets a request go.
    let done = stockade(["run", "--timeout", "2h", "true"]).output().unwrap();
    assert!(done.status.code() == Some(2) && stderr(&done).contains("maximum"), "{}", stderr(&done));
    let done = stockade(["run", "--timeout", "soon", "true"]).output().unwrap();
    assert!(done.status.code() == Some(2) && stderr(&done).contains("10min"), "{}", stderr(&done));
}

test!(Both, collected_files_are_written_over_none);
fn collected_files_are_written_over_none() {
    let place = directory().join("collects");
    fs::create_dir(&place).unwrap();
    let code = "import os; os.mkdir('out'); open('out/a.txt', 'w').write('new'); open('b.txt', 'w').write('b')";
    let words = ["-q", "--collect", "**/*.txt", "--into", "got", "-c", code];
    says(&run_in(&place, &words), "", 0);
    assert_eq!(fs::read_to_string(place.join("got/out/a.txt")).unwrap(), "new");
    assert_eq!(fs::read_to_string(place.join("got/b.txt")).unwrap(), "b");
    // A second time they are there.
    let done = run_in(&place, &words);
    assert!(done.status.code() == Some(74) && stderr(&done).contains("out/a.txt exist already"), "{}", stderr(&done));
    // The others are written, and the error of the report is told beside.
    fs::remove_file(place.join("got/b.txt")).unwrap();
    let done = run_in(&place, &[&["--report", "/dev/full"], &words[..]].concat());
    let said = stderr(&done);
    assert!(done.status.code() == Some(74) && said.contains(" out/a.txt exists already") && said.contains("/dev/full"), "{said}");
    assert_eq!(fs::read_to_string(place.join("got/b.txt")).unwrap(), "b");
    // Nothing is left of a directory for which there was no file.
    let done = run_in(&place, &["--collect", "*.csv", "--into", "no/such", "-c", "pass"]);
    assert!(done.status.success() && !place.join("no").exists(), "{}", stderr(&done));
    // No link leads elsewhere.
    let elsewhere = place.join("elsewhere");
    fs::create_dir(&elsewhere).unwrap();
    fs::create_dir(place.join("linked")).unwrap();
    symlink(&elsewhere, place.join("linked/out")).unwrap();
    let done = run_in(&place, &["--collect", "out/*", "--into", "linked", "-c", code]);
    assert!(done.status.code() == Some(74) && fs::read_dir(&elsewhere).unwrap().next().is_none(), "{}", stderr(&done));
}

/// What a run with `--collect '*.txt'` in this scratch puts into a directory that the code may not
/// write, by links that it makes; and what the run said.
fn led_astray(place: &Path, into: &[&str], code: &str) -> (usize, Output) {
    let victim = directory().join("victim");
    fs::create_dir_all(&victim).unwrap();
    let code = format!("echo x > authorized_keys.txt; V={}; {code}", text(&victim));
    let done = run_in(place, &[&["-q", "-C", ".", "--collect", "*.txt"], into, &["--", "sh", "-c", &code]].concat());
    (fs::read_dir(&victim).unwrap().count(), done)
}

test!(Both, code_cannot_lead_collected_files_elsewhere);
fn code_cannot_lead_collected_files_elsewhere() {
    let attacks = [
        (&[][..], "rm -rf collected; ln -s $V collected"),
        (&[], "mv collected away; ln -s $V collected"),
        (&["--into", "o/sub"], "mv o away; ln -s $V o"),
        (&["--into", "there"], "mv there away; ln -s $V there"),
        (&["--into", "there"], "rm -rf there/*; ln -s $V/x.txt there/authorized_keys.txt"),
    ];
    for (number, (into, code)) in attacks.into_iter().enumerate() {
        let place = scratch_named(&format!("attacked-{number}"));
        fs::create_dir(place.join("there")).unwrap();
        chown_to_owner(&place.join("there"));
        let (stolen, done) = led_astray(&place, into, code);
        assert!(stolen == 0 && done.status.code() == Some(74), "{into:?} {code}: {stolen} {}", stderr(&done));
    }
    // Nor by a link of an earlier run.
    let place = scratch();
    assert_eq!(led_astray(&place, &["--into", "fine"], "ln -s $V led").0, 0);
    for into in ["led", "led/sub"] {
        let (stolen, done) = led_astray(&place, &["--into", into], "true");
        assert!(stolen == 0 && done.status.code() == Some(125) && stderr(&done).contains("is a link"), "{into} {}", stderr(&done));
    }
    // The controls: what the code does not replace is written, in the scratch too.
    let (_, done) = led_astray(&place, &[], "true");
    assert!(done.status.success() && place.join("collected/authorized_keys.txt").exists(), "{}", stderr(&done));
    let victim = directory().join("victim");
    let (stolen, done) = led_astray(&place, &["--into", text(&victim)], "true");
    assert!(stolen == 1 && done.status.success(), "{}", stderr(&done));
}

test!(RootOnly, a_link_in_roots_scratch_is_not_trusted_as_roots);
fn a_link_in_roots_scratch_is_not_trusted_as_roots() {
    let place = directory().join("of-root");
    fs::create_dir(&place).unwrap();
    let planted = led_astray(&place, &["--into", "fine"], "ln -s $V led").1;
    assert!(planted.status.success(), "{}", stderr(&planted));
    let (stolen, done) = led_astray(&place, &["--into", "led/sub"], "true");
    assert!(stolen == 0 && done.status.code() == Some(125) && stderr(&done).contains("none in a scratch"), "{}", stderr(&done));
    let words = ["-C", ".", "--report", "led/report.json", "true"];
    let done = run_in(&place, &words);
    assert!(done.status.code() == Some(125) && fs::read_dir(directory().join("victim")).unwrap().count() == 0, "{}", stderr(&done));
    // The control: root's link beside the scratch is followed.
    symlink(directory().join("victim"), directory().join("beside")).unwrap();
    let (stolen, done) = led_astray(&place, &["--into", "../beside"], "true");
    assert!(stolen == 1 && done.status.success(), "{}", stderr(&done));
}

test!(Both, a_peer_of_the_callers_is_listed_as_such);
fn a_peer_of_the_callers_is_listed_as_such() {
    let report = directory().join("report");
    let done = stockade(["run", "--allow", "pypi.org:443", "--report", text(&report), "true"]).output().unwrap();
    says(&done, "", 0);
    let report: Value = serde_json::from_slice(&fs::read(&report).unwrap()).unwrap();
    assert_eq!(report["egress"]["allowed_by_caller"], json!(["pypi.org:443"]));
    assert_ne!(report["egress"]["mode"], "none");
    let shown = stockade(["audit", "show", report["audit"]["run"].as_str().unwrap()]).output().unwrap();
    let record: Value = serde_json::from_slice(&shown.stdout).unwrap_or_default();
    assert_eq!(record["allowed_by_caller"], json!(["pypi.org:443"]), "{}", stderr(&shown));
    let plan = stockade(["run", "--allow", "pypi.org:443", "--dry-run", "--json", "true"]).output().unwrap();
    assert!(String::from_utf8(plan.stdout).unwrap().contains("pypi.org"));
    // The control: none is allowed by itself; and what is no rule is refused.
    let plan = stockade(["run", "--dry-run", "--json", "true"]).output().unwrap();
    assert!(!String::from_utf8(plan.stdout).unwrap().contains("pypi.org"));
    let wrong = stockade(["run", "--allow", "https://pypi.org", "true"]).output().unwrap();
    assert_eq!(wrong.status.code(), Some(2));
    // Nor can a policy that opens no socket be opened so.
    let policies = PolicyDirectory::new();
    let policy = policies.write("closed", &derived("[seccomp]\nsocket_families = { remove = [\"inet\", \"inet6\"] }"));
    let done = stockade(["run", "--policy", &policy, "--allow", "pypi.org:443", "true"]).output().unwrap();
    assert!(done.status.code() == Some(2) && stderr(&done).contains("Internet socket"), "{}", stderr(&done));
}

test!(RootOnly, no_caller_of_sudo_allows_itself_a_peer);
fn no_caller_of_sudo_allows_itself_a_peer() {
    let grants = "[[grant]]\nuid = 1000\npolicies = [\"default\"]\n";
    let ask = |words: &[&str]| {
        command_with_etc(&[("stockade/grants.toml", grants)], &[("SUDO_UID", "1000"), ("SUDO_GID", "1000")], words).output().unwrap()
    };
    let done = ask(&["run", "--allow", "pypi.org:443", "true"]);
    assert!(done.status.code() == Some(125) && stderr(&done).contains("policy alone decides"), "{}", stderr(&done));
    // The control.
    says(&ask(&["run", "true"]), "", 0);
}

test!(Both, a_result_is_printed_in_the_form_that_was_asked_for);
fn a_result_is_printed_in_the_form_that_was_asked_for() {
    let ask = |form: &[&str], request: &str| {
        let done = run_with_stdin(&mut stockade([&["exec", "-q"], form].concat()), request.as_bytes());
        assert!(done.stderr.is_empty(), "{}", stderr(&done));
        String::from_utf8(done.stdout).unwrap()
    };
    let request = r#"{"code": "print(6*7)"}"#;
    let pretty = ask(&["--pretty"], request);
    assert!(pretty.lines().count() > 50 && serde_json::from_str::<Value>(&pretty).unwrap()["output"] == "42\n");
    let brief: Value = serde_json::from_str(&ask(&["--brief"], request)).unwrap();
    assert_eq!((brief.as_object().unwrap().len(), &brief["output"], &brief["verdict"]), (9, &json!("42\n"), &json!("exited")));
    assert_eq!(ask(&["--text"], request), "exitcode: 0 (execution succeeded)\nCode output: 42\n");
    assert_eq!(
        ask(&["--text"], r#"{"code": "echo \u001b[2Jx; exit 3", "language": "sh"}"#),
        "exitcode: 3 (execution failed)\nCode output: \\u{1b}[2Jx\n"
    );
}

test!(Both, a_reader_that_has_gone_is_no_error);
fn a_reader_that_has_gone_is_no_error() {
    own_log();
    assert!(stockade(["run", "-q", "true"]).output().unwrap().status.success());
    for words in ["policy show default", "audit tail", "audit verify", "audit query", "help", "run --help", "completions bash"] {
        // The reader has ended before the first byte.
        let script = format!("exec 3> >(true); wait $!; \"$STOCKADE\" {words} >&3; echo $?");
        let gone = crate::support::exec::run_under(&["bash", "-c", &script]).output().unwrap();
        assert!(gone.stdout == b"141\n" && gone.stderr.is_empty(), "{words}: {gone:?}");
    }
}

test!(Both, help_shows_pages_by_their_names_alone);
fn help_shows_pages_by_their_names_alone() {
    let help = |words: &[&str]| stockade([&["help"], words].concat()).output().unwrap();
    let page = help(&["operate"]);
    assert!(page.status.success() && help(&["stockade-operate"]).stdout == page.stdout);
    for words in [&["security", "nonsense"][..], &["stockade-nonsense"], &["policy", "nonsense"]] {
        let done = help(words);
        assert!(done.status.code() == Some(2) && stderr(&done).contains("no page and no command"), "{words:?}: {}", stderr(&done));
    }
    // The control: a command has words of its own.
    assert!(help(&["policy", "check"]).status.success());
}

test!(Both, a_policy_is_written_from_options_and_over_none);
fn a_policy_is_written_from_options_and_over_none() {
    let home = directory().join("home-of-policies");
    fs::create_dir(&home).unwrap();
    let call = |words: &[&str]| match crate::support::runner::is_root() {
        true => command_with_etc(&[], &[], words).output().unwrap(),
        false => stockade(words).env("XDG_CONFIG_HOME", &home).output().unwrap(),
    };
    let words = ["policy", "new", "api", "--allow", "api.github.com:443", "--timeout", "10", "--processes", "5"];
    let made = call(&words);
    let said = String::from_utf8_lossy(&made.stdout).into_owned();
    assert!(made.status.success() && said.contains("api.github.com:443") && said.contains("`wall`"), "{said}{}", stderr(&made));
    if !crate::support::runner::is_root() {
        let file = home.join("stockade/policies/api.toml");
        assert!(fs::read_to_string(&file).unwrap().contains("max = \"same\""));
        let again = call(&words);
        assert!(again.status.code() == Some(125) && stderr(&again).contains("exists"), "{}", stderr(&again));
        let checked = call(&["policy", "check", "api"]);
        assert!(checked.status.success() && checked.stderr.is_empty(), "{}", stderr(&checked));
    }
    for wrong in [&["policy", "new", "No Name"][..], &["policy", "new", "b", "--extends", "nope"]] {
        assert!(!call(wrong).status.success(), "{wrong:?}");
    }
}

test!(Both, a_policy_that_looks_tight_is_named);
fn a_policy_that_looks_tight_is_named() {
    let policies = PolicyDirectory::new();
    let check = |name: &str, lines: &str| {
        let policy = policies.write(name, &derived(lines));
        let done = stockade(["policy", "check", &policy]).output().unwrap();
        assert!(done.status.success());
        stderr(&done)
    };
    let said = check("loose", "[limits]\nprocesses = 1\n[screen]\nprocess = \"deny\"\n[egress]\nwhitelist = { add = [\"pypi.org:443\"] }");
    for wanted in ["`processes` is only the default", "max = \"same\"", "advisory", "no reason beside it"] {
        assert!(said.contains(wanted), "{said}");
    }
    assert_eq!(
        check("tight", "[limits]\nprocesses = 1\nmax = \"same\"\n[egress]\nwhitelist = { add = [\"pypi.org:443\"] } # packages"),
        ""
    );
    // It is tight, too.
    let policy = policies.write("same", &derived("[limits]\nprocesses = 3\nmax = \"same\""));
    let asked = stockade(["run", "--policy", &policy, "--processes", "4", "true"]).output().unwrap();
    assert!(asked.status.code() == Some(2) && stderr(&asked).contains("maximum"), "{}", stderr(&asked));
}

test!(serial Both, a_proof_has_its_dates_and_a_record, seconds 120);
fn a_proof_has_its_dates_and_a_record() {
    let log = own_log();
    let done = stockade(["prove", "--json"]).output().unwrap();
    let proof: Value = serde_json::from_slice(&done.stdout).unwrap();
    assert!(proof["begun"].as_str() < proof["ended"].as_str() && proof["doctor"]["seccomp"] == "ok", "{}", proof["begun"]);
    assert_eq!(proof["program_sha256"].as_str().unwrap().len(), 64);
    let records = stockade(["audit", "query", "--log", text(&log), "--verdict", "held", "--json"]).output().unwrap();
    let record: Value = serde_json::from_slice(&records.stdout).unwrap_or_default();
    assert!(record["event"] == "proof" && record["run"] == proof["audit"]["run"], "{record} {}", stderr(&records));
}
