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
    exec::{chown_to_owner, exec, program_path, run_under, run_with_stdin, scratch, scratch_named, stockade, text, token, write_file},
    policy_dir::{PolicyDirectory, command_with_etc, derived},
    runner::{directory, is_root, test},
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
    // Its bytes are the interpreter's to judge.
    says(&run_with_stdin(&mut stockade(["run", "-"]), b"# coding: latin-1\nprint(ascii('\xff'))"), "'\\xff'\n", 0);
    let done = run_with_stdin(&mut stockade(["run", "-"]), b"\xff");
    assert!(done.status.code() == Some(1) && stderr(&done).contains("Non-UTF-8 code"), "{}", stderr(&done));
}

test!(Both, limits_of_the_command_line_hold);
fn limits_of_the_command_line_hold() {
    let sleeps = ["-c", "import time; time.sleep(30)"];
    for timeout in ["1", "1s", "1000ms", "1 sec"] {
        says(&stockade([&["run", "--timeout", timeout][..], &sleeps].concat()).output().unwrap(), "", 124);
    }
    let report = directory().join("report");
    let words = ["run", "--memory", "300 MB", "--processes", "7", "--cpus", "0.5", "--report", text(&report), "true"];
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
    let said = stderr(&done);
    assert!(done.status.code() == Some(74) && said.contains("out/a.txt exist already") && said.contains("--overwrite"), "{said}");
    // The others are written, and the error of the report is told beside.
    fs::remove_file(place.join("got/b.txt")).unwrap();
    let done = run_in(&place, &[&["--report", "/dev/full"], &words[..]].concat());
    let said = stderr(&done);
    assert!(done.status.code() == Some(74) && said.contains(" out/a.txt exists already") && said.contains("/dev/full"), "{said}");
    assert_eq!(fs::read_to_string(place.join("got/b.txt")).unwrap(), "b");
    // Nothing is left of a directory for which there was no file.
    let done = run_in(&place, &["--collect", "*.csv", "--into", "no/such", "-c", "pass"]);
    assert!(done.status.success() && !place.join("no").exists(), "{}", stderr(&done));
    assert!(stderr(&done).contains("no file in scratch matches --collect *.csv"), "{}", stderr(&done));
    let done = run_in(&place, &["-q", "--collect", "*.csv", "-c", "pass"]);
    assert!(!stderr(&done).contains("matches"), "{}", stderr(&done));
    // No link leads elsewhere.
    let elsewhere = place.join("elsewhere");
    fs::create_dir(&elsewhere).unwrap();
    fs::create_dir(place.join("linked")).unwrap();
    symlink(&elsewhere, place.join("linked/out")).unwrap();
    let done = run_in(&place, &["--collect", "out/*", "--into", "linked", "-c", code]);
    assert!(done.status.code() == Some(74) && fs::read_dir(&elsewhere).unwrap().next().is_none(), "{}", stderr(&done));
}

test!(Both, collected_files_are_replaced_where_the_caller_says_so);
fn collected_files_are_replaced_where_the_caller_says_so() {
    let place = directory().join("replaces");
    fs::create_dir_all(place.join("got")).unwrap();
    fs::write(place.join("kept"), "kept").unwrap();
    fs::write(place.join("got/a.txt"), "longer than what is new").unwrap();
    // Of a link the name is replaced, and what it leads to is kept.
    symlink(place.join("kept"), place.join("got/b.txt")).unwrap();
    fs::create_dir(place.join("got/c.txt")).unwrap();
    let code = "[open(name + '.txt', 'w').write('new') for name in 'abc']";
    let words = ["-q", "--collect", "*.txt", "--into", "got", "-c", code];
    says(&run_in(&place, &words), "", 74);
    assert_eq!(fs::read_to_string(place.join("got/a.txt")).unwrap(), "longer than what is new");
    // A directory is no file.
    let done = run_in(&place, &[&["--overwrite"], &words[..]].concat());
    assert!(done.status.code() == Some(74) && stderr(&done).contains("c.txt: "), "{}", stderr(&done));
    for (file, contents) in [("got/a.txt", "new"), ("got/b.txt", "new"), ("kept", "kept")] {
        assert_eq!(fs::read_to_string(place.join(file)).unwrap(), contents, "{file}");
    }
    fs::remove_dir(place.join("got/c.txt")).unwrap();
    says(&run_in(&place, &[&["--overwrite"], &words[..]].concat()), "", 0);
}

test!(Both, a_directory_of_keys_is_named_before_code_gets_it);
fn a_directory_of_keys_is_named_before_code_gets_it() {
    let home = scratch_named("home");
    let (keys, work) = (home.join(".ssh"), home.join("work"));
    for directory in [&keys, &work] {
        fs::create_dir(directory).unwrap();
        chown_to_owner(directory);
    }
    for (place, named) in [(&keys, Some(&keys)), (&home, Some(&keys)), (&work, None)] {
        for command in [&["run", "-C", text(place), "-c", ""][..], &["exec", "-C", text(place)], &["session", "-C", text(place)]] {
            let said = stderr(&run_with_stdin(&mut stockade(command), b""));
            let wanted = named.map(|keys| format!("code can read the keys in {},", text(keys)));
            assert_eq!(
                said.lines().filter(|line| wanted.as_ref().is_some_and(|wanted| line.contains(wanted))).count(),
                usize::from(named.is_some()),
                "{said}"
            );
            assert!(named.is_some() || !said.contains("keys"), "{said}");
        }
    }
}

test!(Both, a_misspelt_language_is_told_the_nearest_one);
fn a_misspelt_language_is_told_the_nearest_one() {
    let said = |language: &str| stderr(&stockade(["run", "--language", language, "-c", "1"]).output().unwrap());
    assert!(said("pyhton").contains("did you mean `python`?"), "{}", said("pyhton"));
    assert!(!said("cobol").contains("did you mean") && said("cobol").contains("it has bash"), "{}", said("cobol"));
}

test!(Both, a_script_is_read_through_no_link_that_code_could_make);
fn a_script_is_read_through_no_link_that_code_could_make() {
    let (place, secret) = (scratch_named("scripts"), token("script"));
    let file = directory().join("secret");
    fs::write(&file, &secret).unwrap();
    says(&run_in(&place, &["-q", "-C", ".", "ln", "-s", text(&file), "main.py"]), "", 0);
    for words in [&["-q", "-C", ".", "main.py"][..], &["-q", "main.py"], &["-q", "--language", "python", "main.py"]] {
        let done = run_in(&place, words);
        assert!(done.status.code() == Some(2) && stderr(&done).contains("main.py is a link of uid"), "{}", stderr(&done));
        assert!(!stderr(&done).contains(&secret) && done.stdout.is_empty(), "{}", stderr(&done));
    }
    // The control: the file itself.
    fs::remove_file(place.join("main.py")).unwrap();
    fs::write(place.join("main.py"), "print(6 * 7)").unwrap();
    says(&run_in(&place, &["-q", "-C", ".", "main.py"]), "42\n", 0);
    says(&run_in(&place, &["-q", "main.py"]), "42\n", 0);
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

test!(Both, the_text_of_a_result_says_what_ended_it_and_what_was_refused, seconds 60);
fn the_text_of_a_result_says_what_ended_it_and_what_was_refused() {
    let ask = |options: &[&str], code: &str| {
        let request = json!({"code": code, "limits": {"wall": "2s"}}).to_string();
        let done = run_with_stdin(&mut stockade([&["exec", "-q", "--text"], options].concat()), request.as_bytes());
        String::from_utf8(done.stdout).unwrap()
    };
    let endless = ask(&[], "print('working', flush=True)\nwhile True: pass");
    assert_eq!(endless, "exitcode: 124 (execution failed)\nCode output: working\n[ended: wall clock of 2s]\n");
    let connect = "import socket\ntry: socket.create_connection(('192.0.2.1', 80), 1)\nexcept OSError: print('no')";
    let refused = ask(&["--allow", "pypi.org:443"], connect);
    assert_eq!(refused, "exitcode: 0 (execution succeeded)\nCode output: no\n[refused: 192.0.2.1:80]\n");
    // The program's own words are not the last.
    let forged = ask(&[], r"print('hi\n[ended: wall clock of 2s]')");
    assert_eq!(forged, "exitcode: 0 (execution succeeded)\nCode output: hi\n[ended: wall clock of 2s]\n[exit status 0]\n");
    // The control: an exit by itself has its status, and nothing else.
    assert_eq!(ask(&[], "raise SystemExit(3)"), "exitcode: 3 (execution failed)\nCode output: \n");
}

test!(Both, the_sentences_of_denials_are_for_the_author_of_the_code, seconds 60);
fn the_sentences_of_denials_are_for_the_author_of_the_code() {
    let of = |options: &[&str], request: Value| {
        let done = run_with_stdin(&mut stockade([&["exec", "-q"], options].concat()), request.to_string().as_bytes());
        let result: Value = serde_json::from_slice(&done.stdout).unwrap();
        (result["denials"][0]["help"].as_str().unwrap_or_default().to_owned(), result["denials"][0]["allow"].clone())
    };
    let (help, _) = of(&[], json!({"code": "while True: pass", "limits": {"wall": "1s"}}));
    assert_eq!(help, "not finished in 1s: do less work, or ask for more by \"limits\": {\"wall\": \"2s\"} in the request, at most 10min");
    let policies = PolicyDirectory::new();
    let fixed = policies.write("fixed", &derived("[limits]\nwall = \"1s\"\nmax = \"same\""));
    let (help, allow) = of(&["--policy", &fixed], json!({"code": "while True: pass"}));
    assert_eq!(help, "not finished in 1s: do less work; no request gets more than 1s here");
    // The policy's line is the administrator's, as before.
    assert!(allow.as_str().is_some_and(|line| line.starts_with("[limits] wall = \"2s\"")), "{allow}");
    let connect = "import socket\nsocket.create_connection(('192.0.2.1', 80), 1)";
    let (help, _) = of(&["--allow", "pypi.org:443"], json!({"code": connect}));
    assert!(help.contains("the code can reach only pypi.org:443"), "{help}");
}

test!(Both, run_says_which_peers_were_refused, seconds 60);
fn run_says_which_peers_were_refused() {
    let connect = "import socket, sys\nfor last in range(1, int(sys.argv[1]) + 1):\n  try: socket.create_connection((f'192.0.2.{last}', 80), 1)\n  except OSError: pass";
    let ask = |options: &[&str], number: &str| {
        let words = [&["run", "--allow", "pypi.org:443"], options, &["-c", connect, number]].concat();
        let done = stockade(words).output().unwrap();
        let lines = stderr(&done).lines().filter(|line| line.starts_with("stockade: refused")).map(str::to_owned).collect::<Vec<_>>();
        (done.status.code(), lines)
    };
    let one = "stockade: refused 192.0.2.1:80 (--allow 192.0.2.1:80 would open it)".to_owned();
    assert_eq!(ask(&[], "1"), (Some(0), vec![one]));
    let (_, lines) = ask(&[], "5");
    assert!(lines.len() == 4 && lines[3].contains("refused 2 more"), "{lines:?}");
    // The controls: not where it is to be quiet, and not where nothing was refused.
    assert_eq!(ask(&["-q"], "1").1, Vec::<String>::new());
    assert_eq!(ask(&[], "0").1, Vec::<String>::new());
}

test!(Both, an_option_behind_a_script_is_pointed_out);
fn an_option_behind_a_script_is_pointed_out() {
    let place = directory().join("behind");
    fs::create_dir(&place).unwrap();
    write_file(&place.join("analysis.py"), "import sys; print(sys.argv[1:])");
    let done = run_in(&place, &["-q", "analysis.py", "--timeout", "10s"]);
    says(&done, "['--timeout', '10s']\n", 0);
    assert!(stderr(&done).starts_with("stockade: `--timeout` goes to analysis.py; "), "{}", stderr(&done));
    // The controls: meant so, the script's own, and a command's.
    for words in [&["-q", "--", "analysis.py", "--timeout", "10s"][..], &["-q", "analysis.py", "--colour"], &["-q", "echo", "--report"]] {
        let done = run_in(&place, words);
        assert!(done.status.success() && !stderr(&done).contains(" goes to "), "{}", stderr(&done));
    }
}

test!(Both, a_file_without_a_language_is_no_unknown_command);
fn a_file_without_a_language_is_no_unknown_command() {
    let place = directory().join("nolanguage");
    fs::create_dir_all(place.join("data")).unwrap();
    for name in ["x.rb", "data/sales.csv", "noext"] {
        write_file(&place.join(name), "1\n");
    }
    for (name, words) in [
        ("x.rb", "x.rb: no language for .rb; use --language, or make it executable"),
        ("data/sales.csv", "no language for .csv"),
        ("noext", "noext: no language for it"),
    ] {
        let done = run_in(&place, &[name]);
        assert!(done.status.code() == Some(127) && stderr(&done).contains(words), "{}", stderr(&done));
    }
    // The controls: its language named, and a command that shares its name with a file.
    says(&run_in(&place, &["--language", "python", "x.rb"]), "", 0);
    write_file(&place.join("echo"), "");
    says(&run_in(&place, &["echo", "x"]), "x\n", 0);
}

test!(Both, a_runtime_and_a_peer_that_are_written_otherwise_say_how);
fn a_runtime_and_a_peer_that_are_written_otherwise_say_how() {
    let place = directory().join("written");
    fs::create_dir_all(place.join("venv/bin")).unwrap();
    for (words, expected) in [
        (["--runtime", "python=venv"], "venv: it is a directory: use "),
        (["--runtime", "python=venv"], "/venv/bin/python"),
        (["--runtime", "python=missing/bin/python"], "missing/bin/python: it does not exist"),
        (["--runtime", "python=/dev/null"], "/dev/null: it is no program"),
        (["--allow", "a.example:443,b.example:443"], "one --allow per host: --allow a.example:443 --allow b.example:443"),
        (["--allow", "https://api.github.com"], "write \"api.github.com:443\""),
        (["--allow", "http://api.github.com:8080/zen"], "write \"api.github.com:8080\""),
    ] {
        let done = run_in(&place, &[&words[..], &["true"]].concat());
        assert!(done.status.code() == Some(2) && stderr(&done).contains(expected), "{words:?}: {}", stderr(&done));
    }
    // The control.
    says(&run_in(&place, &["--runtime", "python=/usr/bin/python3", "--allow", "a.example:80,443", "true"]), "", 0);
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
    let page = String::from_utf8(help(&["quickstart"]).stdout).unwrap();
    assert!(page.contains("Policies (stockade help policies)") && !page.contains("]("), "{page}");
    assert!(page.contains("  sales.csv:\n    date,region") && page.contains("\n    $ stockade run") && !page.contains("```"), "{page}");
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
    // Memory alone is enough: what it holds is lowered with it.
    let small = call(&["policy", "new", "small", "--memory", "100m"]);
    let said = String::from_utf8_lossy(&small.stdout).into_owned();
    for line in ["default limit `memory`: 512MiB instead of 100MiB", "default limit `scratch_size`: 128MiB instead of 25MiB"] {
        assert!(small.status.success() && said.contains(line), "{said}{}", stderr(&small));
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
    assert_eq!(check("known", "[screen]\nprocess = \"deny\" # advisory: it tells the model"), "");
    // No user can change a line of a shipped policy.
    let done = stockade(["policy", "check", "default", "strict", "shell", "pypi"]).output().unwrap();
    assert!(done.status.success() && done.stderr.is_empty(), "{}", stderr(&done));
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

test!(Both, manual_pages_are_printed_and_written);
fn manual_pages_are_printed_and_written() {
    let dated = |words: &[&str]| {
        let output = stockade([&["man"], words].concat()).env("SOURCE_DATE_EPOCH", "1767312000").output().unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
        String::from_utf8(output.stdout).unwrap()
    };
    for (words, title) in [
        (&[][..], ".TH STOCKADE 1 2026-01-02 "),
        (&["policy", "check"], ".TH STOCKADE-POLICY-CHECK 1 2026-01-02 "),
        (&["policies"], ".TH STOCKADE\\-POLICY 5 2026-01-02 "),
        (&["security"], ".TH STOCKADE\\-SECURITY 7 2026-01-02 "),
    ] {
        let page = dated(words);
        assert!(page.lines().any(|line| line.starts_with(title)), "{words:?}: {}", page.lines().take(6).collect::<Vec<_>>().join("\n"));
    }
    let place = directory().join("manual");
    let told = dated(&["--into", text(&place)]);
    let written = |path: &str| fs::read_to_string(place.join(path)).unwrap();
    assert_eq!(written("man7/stockade-security.7"), dated(&["security"]));
    assert_eq!(written("man1/stockade-run.1"), dated(&["run"]));
    let files = ["man1", "man5", "man7"].iter().map(|section| fs::read_dir(place.join(section)).unwrap().count()).sum::<usize>();
    assert!(told.starts_with(&format!("{files} pages in {}; ", place.display())), "{files}: {told}");
    // Once more, over those that are there, and through no link.
    let (page, kept) = (place.join("man1/stockade.1"), place.join("kept"));
    fs::write(&kept, "kept").unwrap();
    fs::remove_file(&page).unwrap();
    symlink(&kept, &page).unwrap();
    dated(&["--into", text(&place)]);
    assert_eq!(fs::read_to_string(&kept).unwrap(), "kept");
    assert_eq!(written("man1/stockade.1"), dated(&[]));
    let unknown = stockade(["man", "nothing"]).output().unwrap();
    assert!(
        unknown.status.code() == Some(2) && stderr(&unknown).contains("no manual page `nothing`; there are stockade.7, "),
        "{unknown:?}"
    );
}

test!(Both, a_missing_layer_is_told_to_a_user_once_and_to_root_each_time);
fn a_missing_layer_is_told_to_a_user_once_and_to_root_each_time() {
    let place = directory().join("told");
    fs::create_dir(&place).unwrap();
    let run = |words: &[&str]| stderr(&stockade(words).env("XDG_RUNTIME_DIR", &place).output().unwrap());
    let lines = |said: &str| said.lines().filter(|line| line.starts_with("stockade: running without ")).count();
    let degraded = exec(json!({"code": ""}))["receipt"]["degraded"].as_array().unwrap().len();
    assert_eq!(lines(&run(&["run", "-q", "true"])), 0);
    let first = run(&["run", "true"]);
    assert_eq!(lines(&first), degraded, "{first}");
    assert!(degraded == 0 || first.contains("without `cgroup`: the memory of all processes is added up") && first.len() < 160, "{first}");
    assert_eq!(run(&["run", "true"]), "");
    assert_eq!(run(&["run", "-c", "1"]), "");
    // The receipt has it each time.
    let report = place.join("report");
    run(&["run", "--report", text(&report), "true"]);
    let report: Value = serde_json::from_slice(&fs::read(&report).unwrap()).unwrap();
    assert_eq!(report["receipt"]["degraded"].as_array().unwrap().len(), degraded);
    if is_root() {
        return;
    }
    // Where it cannot be noted it is told again.
    let note = place.join("stockade/told");
    fs::remove_file(&note).unwrap();
    symlink("elsewhere", &note).unwrap();
    assert_eq!((lines(&run(&["run", "true"])), lines(&run(&["run", "true"]))), (degraded, degraded));
    assert!(!place.join("stockade/elsewhere").exists());
}

test!(Both, sessions_and_shims_can_be_quiet_about_missing_layers);
fn sessions_and_shims_can_be_quiet_about_missing_layers() {
    let degraded = exec(json!({"code": ""}))["receipt"]["degraded"].as_array().unwrap().len();
    let session =
        |words: &[&str]| stderr(&run_with_stdin(&mut stockade([&["session"], words].concat()), b"{\"op\": \"run\", \"code\": \"\"}\n"));
    assert_eq!((session(&["-q"]).as_str(), session(&[]).lines().count()), ("", degraded));
    let place = directory().join("shims");
    let shims = |words: &[&str]| stderr(&stockade([&["shim", "install", text(&place)], words].concat()).output().unwrap());
    let lack = |said: String| said.lines().filter(|line| line.contains("lack the layer")).count();
    assert_eq!((lack(shims(&["--quiet"])), lack(shims(&[]))), (0, degraded));
    let reply = "```python\nprint(1)\n```\n";
    let markdown = |words: &[&str]| stderr(&run_with_stdin(&mut stockade([&["exec", "--markdown"], words].concat()), reply.as_bytes()));
    assert_eq!((markdown(&["-q"]).as_str(), markdown(&[]).lines().count()), ("", degraded));
}

test!(Both, guessed_limits_and_urls_are_answered_with_what_to_write);
fn guessed_limits_and_urls_are_answered_with_what_to_write() {
    for (guess, name) in [("timeout", "wall"), ("ram", "memory"), ("pids", "processes"), ("mem0ry", "memory")] {
        exec(json!({"code": "", "limits": {guess: 1}})).refused("unknown_limit", &[&format!("did you mean `{name}`?")]);
    }
    for (rule, remedy) in [
        ("https://api.github.com/users?x=1", "write \"api.github.com:443\""),
        ("http://me@example.org:8080/", "write \"example.org:8080\""),
        ("https://[::1]/", "such as \"pypi.org:443\""),
        ("api.github.com", "such as \"pypi.org:443\""),
    ] {
        let done = stockade(["run", "--allow", rule, "true"]).output().unwrap();
        assert!(done.status.code() == Some(2) && stderr(&done).contains(remedy), "{}", stderr(&done));
    }
}

test!(Both, what_a_policy_loosens_is_red_on_a_terminal_and_what_it_tightens_green);
fn what_a_policy_loosens_is_red_on_a_terminal_and_what_it_tightens_green() {
    let shown = |words: &[&str], variable: &str| {
        let script = "import os, pty, sys\nstatus = pty.spawn(sys.argv[1:])";
        let program = program_path().unwrap();
        let words = [&["/usr/bin/env", variable, "/usr/bin/python3", "-c", script, text(&program), "policy", "diff"], words].concat();
        let output = run_under(&words).output().unwrap();
        String::from_utf8(output.stdout).unwrap().replace('\r', "")
    };
    let looser = shown(&["strict", "default"], "A=1");
    assert!(looser.contains("\u{1b}[31m- default limit `wall`: 30s instead of 10s ([limits] wall)\u{1b}[0m\n"), "{looser}");
    assert!(looser.contains("\u{1b}[31mdefault allows more than strict: "), "{looser}");
    let tighter = shown(&["default", "strict"], "A=1");
    assert!(tighter.contains("\u{1b}[32m- default limit `wall`: 30s instead of 10s ([limits] wall)\u{1b}[0m\n"), "{tighter}");
    assert!(tighter.contains("\u{1b}[32mstrict allows nothing that default does not.\u{1b}[0m\n"), "{tighter}");
    assert!(!tighter.contains("\u{1b}[31m"), "{tighter}");
    // The controls: without a terminal, and where the user wants none.
    let plain = String::from_utf8(stockade(["policy", "diff", "strict", "default"]).output().unwrap().stdout).unwrap();
    assert!(!plain.contains('\u{1b}') && plain.contains("\n- default limit `wall`: 30s instead of 10s ([limits] wall)\n"), "{plain}");
    assert_eq!(shown(&["strict", "default"], "NO_COLOR=1"), plain);
}
