//! Screening: what is found is told, what the policy refuses does not run, and whatever the
//! screener does ends only itself. Which rules find what is the corpus's to show.

use std::{
    fs,
    io::Read,
    os::unix::fs::{PermissionsExt, symlink},
    path::{Path, PathBuf},
    process::Stdio,
    thread,
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::{Value, json};

use crate::support::{
    exec::{ExecResult, OWNER, exec, exec_with, program_path, run_under, run_with_stdin, scratch, stockade, text, write_file},
    policy_dir::{PolicyDirectory, derived, derived_from},
    runner::{directory, eventually, is_root, test},
    session::{Session, children, is_screener, prepared_sandbox, stop},
    timeouts::{scaled, scaled_limit},
};

/// What was found, as rule and line.
fn found(findings: &Value) -> Vec<(String, u64)> {
    let findings = findings.as_array().unwrap();
    findings.iter().map(|finding| (finding["rule"].as_str().unwrap().to_owned(), finding["line"].as_u64().unwrap())).collect()
}

fn rules(done: &ExecResult) -> Vec<String> {
    found(&done["findings"]).into_iter().map(|(rule, _)| rule).collect()
}

/// `exec` under `default` with these lines of [screen].
fn exec_under(lines: &str, request: Value) -> ExecResult {
    let policies = PolicyDirectory::new();
    let policy = policies.write("screening", &derived(&format!("[screen]\n{lines}")));
    exec_with(&["--policy", &policy], request)
}

test!(Both, what_is_found_stands_in_the_result_of_code_that_runs);
fn what_is_found_stands_in_the_result_of_code_that_runs() {
    let done = exec(json!({"code": "import os as o\nx = 'é'; o.system('true')\nprint(x)"}));
    done.succeeded();
    assert_eq!(
        done["findings"],
        json!([{"rule": "process", "action": "note", "line": 2, "column": 10, "text": "o.system", "what": "os.system"}]),
        "{}",
        done.brief()
    );
    let honest = exec(json!({"code": "import math\nprint(math.pi)"}));
    honest.succeeded();
    assert_eq!(honest["findings"], json!([]));
}

test!(Both, what_the_policy_denies_does_not_run);
fn what_the_policy_denies_does_not_run() {
    let request = json!({"code": "import shutil\nshutil.rmtree('/', ignore_errors=True)\nprint('ran')"});
    exec(request.clone()).expect(json!({"verdict": "exited", "code": 0, "output": "ran\n"}));
    let done = exec_under("destroy = \"deny\"", request);
    done.expect(json!({"verdict": "screened", "reason": "screened", "code": 126, "started": false, "success": false, "output": ""}));
    assert_eq!(found(&done["findings"]), [("destroy".to_owned(), 2)]);
    assert_eq!(done["findings"][0]["action"], "deny");
    for part in ["line 2, column 1", "destroy", "shutil.rmtree", "[screen]"] {
        assert!(done.error().contains(part), "{}", done.error());
    }
}

test!(Both, shell_code_is_screened_and_other_languages_are_not);
fn shell_code_is_screened_and_other_languages_are_not() {
    let shell = exec(json!({"language": "bash", "code": "true\nrm -rf /nowhere/*"}));
    assert_eq!(found(&shell["findings"]), [("delete".to_owned(), 2), ("write_outside".to_owned(), 2)], "{}", shell.brief());
    let other = exec_under("language = \"deny\"", json!({"language": "node", "code": "1"}));
    other.expect(json!({"verdict": "screened"}));
    assert_eq!(found(&other["findings"]), [("language".to_owned(), 0)]);
}

test!(Both, what_lists_do_not_name_is_refused);
fn what_lists_do_not_name_is_refused() {
    let lines =
        "module = \"deny\"\nmodules = { replace = [\"math\", \"os.path\"] }\nbuiltin = \"deny\"\nbuiltins = { replace = [\"print\"] }";
    exec_under(lines, json!({"code": "import math\nfrom os import path\nprint(math.pi, path.sep)"})).succeeded();
    for (code, rule) in [("import os", "module"), ("from math2 import pi", "module"), ("print(len('x'))", "builtin")] {
        let done = exec_under(lines, json!({"code": code}));
        done.expect(json!({"verdict": "screened", "started": false}));
        assert_eq!(rules(&done), [rule], "{code}");
    }
}

test!(Both, text_that_overflows_a_parser_ends_only_the_screener);
/// Each of these overflowed the stack of a parser, or of a walk over what it gave.
fn text_that_overflows_a_parser_ends_only_the_screener() {
    let python = [
        "1+".repeat(100_000) + "1",
        "1**".repeat(66_000) + "1",
        "f".to_owned() + &"()".repeat(100_000),
        "not ".repeat(50_000) + "x",
        "x".to_owned() + &"[0]".repeat(66_000),
        "lambda:".repeat(28_000) + "0",
        "a.".repeat(100_000) + "b",
    ];
    for code in python {
        let began = Instant::now();
        let done = exec_under("screener = \"deny\"", json!({"code": code}));
        done.expect(json!({"verdict": "screened", "started": false}));
        assert!(rules(&done).contains(&"screener".to_owned()), "{}: {}", &code[..20], done.brief());
        assert!(began.elapsed() < scaled(Duration::from_secs(20)), "{}", &code[..20]);
    }
    exec_under("screener = \"deny\"", json!({"code": "(".repeat(100_000)})).expect(json!({"verdict": "exited", "code": 1}));
    for code in ["$(".repeat(60_000), "a|".repeat(60_000) + "b", "((".repeat(60_000), "if true; then ".repeat(10_000)] {
        // Found or not, it is answered.
        let done = exec_under("screener = \"deny\"", json!({"language": "bash", "code": code, "limits": {"wall": "10s"}}));
        assert!(done["verdict"] != "sandbox_error", "{}: {}", &code[..6], done.brief());
    }
}

/// The program in its own directory, with this in the place of the screener.
fn with_screener(companion: Option<&Path>) -> PathBuf {
    let place = directory().join("program");
    fs::create_dir(&place).unwrap();
    let copy = |from: &Path, name: &str| {
        fs::copy(from, place.join(name)).unwrap();
        fs::set_permissions(place.join(name), fs::Permissions::from_mode(0o755)).unwrap();
    };
    copy(&program_path().unwrap(), "stockade");
    if let Some(companion) = companion {
        copy(companion, "stockade-screen");
    }
    place
}

test!(Both, a_screener_that_fails_is_a_finding);
/// A shell in the screener's place runs the code that it is given, as one would that the code
/// has taken over.
fn a_screener_that_fails_is_a_finding() {
    let cases = [
        (None, "exit 7", "is neither beside"),
        (Some("/bin/false"), "exit 7", "ended with status 1"),
        (Some("/bin/sh"), "exit 7", "ended with status 7"),
        (Some("/bin/sh"), "kill -SEGV $$", "ended by signal 11"),
        (Some("/bin/sh"), "exec /bin/sleep 60", "took longer than 5 s"),
        (Some("/bin/cat"), "exit 7", "talks nonsense"),
        // It writes without end, and cannot fill the launcher's memory.
        (Some("/usr/bin/yes"), "exit 7", "ended with status 1"),
    ];
    let policies = PolicyDirectory::new();
    let policy = |name: &str, action: &str| {
        policies.write(name, &derived(&format!("[screen]\nscreener = \"{action}\"\n[limits]\nwall = \"{}\"", scaled_limit(2000))))
    };
    let (note, deny) = (policy("note", "note"), policy("deny", "deny"));
    for (companion, code, why) in cases {
        let place = with_screener(companion.map(Path::new));
        let request = json!({"code": format!("\n{code}\n"), "language": "sh"}).to_string();
        let run = |policy: &str| {
            let program = place.join("stockade");
            ExecResult::of(run_with_stdin(&mut run_under(&[text(&program), "exec", "--policy", policy]), request.as_bytes()))
        };
        let (noted, denied) = (run(&note), run(&deny));
        noted.expect(json!({"started": true, "success": false}));
        denied.expect(json!({"verdict": "screened", "code": 126, "started": false}));
        for done in [noted, denied] {
            assert_eq!(rules(&done), ["screener"], "{}", done.brief());
            let what = done["findings"][0]["what"].as_str().unwrap();
            assert!(what.contains(why), "{what}");
        }
        fs::remove_dir_all(&place).unwrap();
    }
}

test!(Both, a_screener_answers_no_nonsense_and_opens_nothing);
fn a_screener_answers_no_nonsense_and_opens_nothing() {
    let screener = program_path().unwrap().with_file_name("stockade-screen");
    for bytes in [&b""[..], b"nonsense", &[0xff; 4096]] {
        let output = run_with_stdin(&mut run_under(&[text(&screener)]), bytes);
        assert_eq!((output.status.code(), output.stdout.len(), output.stderr.len()), (Some(4), 0, 0));
    }
    // While it waits for its question it is confined already.
    let mut command = run_under(&[text(&screener)]);
    let mut child = command.stdin(std::process::Stdio::piped()).spawn().unwrap();
    let status = || fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap_or_default();
    let confined = || status().contains("Seccomp:\t2\n");
    assert!(eventually(Duration::from_secs(10), confined), "{}", status());
    for line in ["NoNewPrivs:\t1\n", "CapPrm:\t0000000000000000\n", "CapEff:\t0000000000000000\n"] {
        assert!(status().contains(line), "{line}: {}", status());
    }
    assert!(!status().contains("Uid:\t0\t"), "{}", status());
    let limits = fs::read_to_string(format!("/proc/{}/limits", child.id())).unwrap();
    assert_limits(&limits);
    drop(child.stdin.take());
    assert_eq!(child.wait().unwrap().code(), Some(4));
}

/// The limits of a process that screens.
#[track_caller]
fn assert_limits(limits: &str) {
    for (limit, most) in [("Max cpu time", 2), ("Max stack size", 8 << 20), ("Max address space", 512 << 20), ("Max processes", 0)] {
        let line = limits.lines().find_map(|line| line.strip_prefix(limit)).unwrap();
        assert_eq!(line.split_whitespace().next(), Some(most.to_string().as_str()), "{limit}: {limits}");
    }
}

/// The processes of a session that screen: the one that stays, and its copies, with their states.
fn screeners(session: &Session) -> Vec<(u32, String)> {
    let all = children(session.pid().as_raw().unsigned_abs()).into_iter();
    let all = all.map(|pid| (pid, fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default()));
    all.filter(|(pid, status)| is_screener(*pid) || status.contains("State:\tZ")).collect()
}

test!(Both, a_session_has_one_screener_and_a_copy_of_it_for_each_text, seconds 90);
fn a_session_has_one_screener_and_a_copy_of_it_for_each_text() {
    let policies = PolicyDirectory::new();
    let policy = policies.write("denies", &derived("[screen]\ndestroy = \"deny\"\nscreener = \"deny\""));
    let mut session = Session::open(&["--policy", &policy]);
    let standing = |session: &Session| {
        let mut found = None;
        let stands = eventually(Duration::from_secs(20), || {
            found = match screeners(session).as_slice() {
                [(pid, status)] if !status.contains("State:\tZ") => Some(*pid),
                _ => None,
            };
            found.is_some()
        });
        assert!(stands, "{:?}", screeners(session));
        found.unwrap()
    };
    let denied = json!({"op": "run", "code": "import shutil\nshutil.rmtree('/', ignore_errors=True)"});
    let told = json!({"op": "run", "code": "import os\nos.system('true')"});
    // The first has a screener of its own; a session answers like `exec`.
    assert_eq!(session.ask(denied.clone())["verdict"], "screened");
    let alone = exec_with(&["--policy", &policy], json!({"code": told["code"]}));
    assert_eq!(session.ask(told.clone())["findings"], alone["findings"]);
    let first = standing(&session);
    let status = fs::read_to_string(format!("/proc/{first}/status")).unwrap();
    for line in ["NoNewPrivs:\t1\n", "CapPrm:\t0000000000000000\n", "CapEff:\t0000000000000000\n"] {
        assert!(status.contains(line), "{line}: {status}");
    }
    assert!(!status.contains("Uid:\t0\t"), "{status}");
    for _ in 0..3 {
        let denied = session.ask(denied.clone());
        assert_eq!((&denied["verdict"], found(&denied["findings"])), (&json!("screened"), vec![("destroy".to_owned(), 2)]));
        assert_eq!(session.ask(told.clone())["findings"], alone["findings"]);
        assert_eq!(standing(&session), first);
    }
    // A text that uses up the time of its copy ends no other.
    session.send(&json!({"op": "run", "code": "a.".repeat(100_000) + "b"}).to_string());
    let mut copy = String::new();
    let reads = eventually(Duration::from_secs(2), || {
        let confined = |(pid, status): (u32, String)| {
            let limits = fs::read_to_string(format!("/proc/{pid}/limits")).unwrap_or_default();
            (pid != first && status.contains("Seccomp_filters:\t2\n")).then_some(limits)
        };
        copy = screeners(&session).into_iter().find_map(confined).unwrap_or_default();
        !copy.is_empty()
    });
    // It has given up what the one that stays needs.
    assert!(reads, "no copy has a filter of its own");
    assert_limits(&copy);
    let endless = session.answer();
    // A build for tests uses all of that up, another finds that the text is nested too deep.
    assert_eq!((&endless["verdict"], &endless["findings"][0]["rule"]), (&json!("screened"), &json!("screener")), "{endless}");
    assert_eq!(standing(&session), first);
    // Where it has ended another stands for the texts that follow, and none goes unscreened.
    kill(Pid::from_raw(i32::try_from(first).unwrap()), Signal::SIGKILL).unwrap();
    assert_eq!(session.ask(denied.clone())["verdict"], "screened");
    assert_eq!(session.ask(told.clone())["findings"], alone["findings"]);
    let second = standing(&session);
    assert_ne!(second, first);
    assert_eq!(session.ask(denied)["verdict"], "screened");
    // Also where it ends after it was asked.
    stop(Pid::from_raw(i32::try_from(second).unwrap()));
    session.send(&told.to_string());
    thread::sleep(Duration::from_millis(300));
    kill(Pid::from_raw(i32::try_from(second).unwrap()), Signal::SIGKILL).unwrap();
    assert_eq!(session.answer()["findings"], alone["findings"]);
    // One that does not answer is a finding when its time is up, and is replaced: after a pause not yet
    // beside the first text.
    prepared_sandbox(&session);
    let third = standing(&session);
    stop(Pid::from_raw(i32::try_from(third).unwrap()));
    session.send(&format!("{told}\n{told}"));
    let late = session.answer();
    assert_eq!((&late["verdict"], late["error"].as_str().unwrap().contains("took longer than 5 s")), (&json!("screened"), true), "{late}");
    // The next text does not wait for it again.
    assert_eq!(session.answer()["findings"], alone["findings"]);
    let fourth = standing(&session);
    assert_ne!(fourth, third);
    assert_eq!(session.ask(told)["findings"], alone["findings"]);
    session.close();
    assert!([second, third, fourth].iter().all(|pid| !fs::exists(format!("/proc/{pid}")).unwrap()), "it outlives its session");
}

fn screened_files(arguments: &[&str]) -> (Option<i32>, String, String) {
    let output = stockade([&["screen"], arguments].concat()).output().unwrap();
    (output.status.code(), String::from_utf8_lossy(&output.stdout).into_owned(), String::from_utf8_lossy(&output.stderr).into_owned())
}

test!(Both, files_are_screened_with_an_exit_status_for_each_case);
fn files_are_screened_with_an_exit_status_for_each_case() {
    let tree = directory().join("tree");
    fs::create_dir_all(tree.join("deep/.hidden")).unwrap();
    for (name, code) in [
        ("honest.py", "print(6*7)\n"),
        ("deep/wipe.py", "import shutil\nshutil.rmtree('/')\n"),
        ("deep/tool", "#!/usr/bin/env python3\nimport shutil\nshutil.rmtree('\u{1b}[2Jid')\n"),
        ("deep/.hidden/x.py", "eval('1')\n"),
        ("deep/run.sh", "curl x | sh\n"),
        ("deep/notes.txt", "rm -rf /\n"),
    ] {
        fs::write(tree.join(name), code).unwrap();
    }
    symlink("/", tree.join("deep/link")).unwrap();
    // A name is one line of what is printed, whatever is in it.
    let forged = "deep/a\n2 of 2 files would be stopped\u{1b}[2J\u{202e}.py";
    fs::write(tree.join(forged), "import shutil\nshutil.rmtree('/')\n").unwrap();
    let tree_text = text(&tree);
    let honest = text(&tree.join("honest.py")).to_owned();
    assert_eq!(screened_files(&["--policy", "strict", &honest]).0, Some(0));
    let (status, said, _) = screened_files(&["--policy", "strict", tree_text]);
    assert_eq!(status, Some(1), "{said}");
    assert!(said.contains("deep/wipe.py: deny: line 2, column 1: destroy") && said.contains("3 of 5 files would be stopped"), "{said}");
    assert!(said.contains("\\u{1b}") && !said.contains(['\u{1b}', '\u{202e}']), "{said:?}");
    assert!(said.contains(r"deep/a\n2 of 2 files") && !said.lines().any(|line| line.starts_with("2 of 2")), "{said:?}");
    // `default` only notes.
    assert_eq!(screened_files(&[tree_text]).0, Some(0));
    let (status, said, _) = screened_files(&["--policy", "strict", "--json", tree_text]);
    let whole: Value = serde_json::from_str(&said).unwrap();
    assert_eq!((status, &whole["stops"]), (Some(1), &json!(true)));
    let files: Vec<&str> = whole["files"].as_array().unwrap().iter().map(|file| file["language"].as_str().unwrap()).collect();
    assert_eq!(files, ["python", "bash", "python", "python", "python"]);
    assert_eq!(whole["files"][0]["path"], json!(text(&tree.join(forged))));
    for (arguments, said) in [
        (&["/nonexistent/file"][..], "/nonexistent/file"),
        (&["/nonexistent/\n\u{1b}"], r"/nonexistent/\n\u{1b}"),
        (&[text(&tree.join("deep/notes.txt"))], "--language"),
        (&["--language", "cobol", &honest], "bash"),
        (&["--policy", "strikt", &honest], "strict"),
    ] {
        let (status, _, complained) = screened_files(arguments);
        assert!(status == Some(2) && complained.contains(said), "{arguments:?}: {status:?} {complained}");
    }
    let output = run_with_stdin(&mut stockade(["screen", "--language", "bash", "--policy", "strict", "-"]), b"rm -rf ~");
    assert_eq!(output.status.code(), Some(1));
    // A name is no command to a machine that reads the output line by line.
    fs::write(tree.join("::error title=a::.py"), "import shutil\nshutil.rmtree('/')\n").unwrap();
    let mut by_name = stockade(["screen", "--policy", "strict", "::error title=a::.py", "honest.py"]);
    let output = by_name.current_dir(&tree).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(said.starts_with("./::error title=a::.py: deny: ") && !said.lines().any(|line| line.starts_with("::")), "{said}");
    fs::remove_file(tree.join("::error title=a::.py")).unwrap();
    // A fifo is not waited for; what comes from elsewhere comes on stdin, as above.
    let fifo = text(&tree.join("fifo.py")).to_owned();
    nix::unistd::mkfifo(fifo.as_str(), nix::sys::stat::Mode::S_IRWXU).unwrap();
    let (status, said, complained) = screened_files(&[&fifo, &honest]);
    assert!(status == Some(2) && said.contains("0 of 1 files") && complained.contains("no regular file"), "{status:?} {said} {complained}");
    fs::remove_file(&fifo).unwrap();
    // What cannot be read does not stop the rest.
    let (status, said, complained) = screened_files(&["/nonexistent/file", &honest]);
    assert!(
        status == Some(2) && said.contains("0 of 1 files") && complained.contains("/nonexistent/file"),
        "{status:?} {said} {complained}"
    );
    if !is_root() {
        let closed = tree.join("deep/closed.py");
        fs::write(&closed, "").unwrap();
        fs::set_permissions(&closed, fs::Permissions::from_mode(0o000)).unwrap();
        let (status, said, complained) = screened_files(&["--policy", "strict", tree_text]);
        assert!(status == Some(1) && said.contains("3 of 5 files"), "{status:?} {said}");
        assert!(complained.contains("deep/closed.py") && complained.contains("ermission denied"), "{complained}");
    }
}

test!(Both, code_that_makes_work_of_itself_is_told);
/// Code that has texts and lists put together over and over is followed so far, and the
/// screener lives.
fn code_that_makes_work_of_itself_is_told() {
    let item = "0,".repeat(4000);
    let letters = "a".repeat(60_000);
    let doubled: String = (0..60).map(|n| format!("a{} = [a{n}, a{n}]\n", n + 1)).collect();
    // Another that holds two of the one before, and a text of texts that no memory could hold.
    for code in [format!("a0 = 'x'\n{doubled}"), format!("x = '{letters}'\ny = x\nif 0: x.replace('a', y)")] {
        exec_under("screener = \"deny\"", json!({"code": code})).succeeded();
    }
    // A list of thousands is looked at again and again.
    let done = exec_under("screener = \"deny\"", json!({"code": format!("x = [{item}]\n{}", "x\n".repeat(250_000))}));
    done.expect(json!({"verdict": "screened", "started": false}));
    assert_eq!(rules(&done), ["screener"], "{}", done.brief());
    assert_eq!(done["findings"][0]["what"], "puts more together than is followed");
}

test!(Both, files_of_a_request_are_screened_with_it);
fn files_of_a_request_are_screened_with_it() {
    let request = |files: Value| json!({"code": "import wipe", "files": files});
    let wipe = "print('wiped')\nif 0: __import__('shutil').rmtree('/')\n";
    let named = json!({"wipe.py": wipe});
    exec(request(named.clone())).expect(json!({"output": "wiped\n", "code": 0}));
    let lines = "destroy = \"deny\"";
    let done = exec_under(lines, request(named));
    done.expect(json!({"verdict": "screened", "started": false}));
    assert_eq!((&done["findings"][0]["file"], &done["findings"][0]["line"]), (&json!("wipe.py"), &json!(2)), "{}", done.brief());
    assert!(done.error().contains("wipe.py: line 2"), "{}", done.error());
    // By its first line, and in base64: `#!/bin/sh`, `rm -rf /`.
    for files in [json!({"wipe": "#!/bin/sh\nrm -rf /\n"}), json!({"wipe": {"base64": "IyEvYmluL3NoCnJtIC1yZiAvCg=="}})] {
        exec_under(lines, json!({"code": "1", "files": files})).expect(json!({"verdict": "screened"}));
    }
    let data = json!({"wipe.txt": wipe, "wipe": "rm -rf /", "wipe.rb": "rm -rf /"});
    exec_under(lines, json!({"code": "1", "files": data})).succeeded();
    let large = json!({"large.py": "#".repeat(2 << 20)});
    let done = exec_under("screener = \"deny\"", json!({"code": "1", "files": large}));
    assert_eq!((rules(&done), &done["findings"][0]["file"]), (vec!["screener".to_owned()], &json!("large.py")));
}

test!(Both, commands_and_their_scripts_are_screened);
fn commands_and_their_scripts_are_screened() {
    let policies = PolicyDirectory::new();
    let policy = policies.write("screening", &derived("[screen]\ndelete = \"deny\""));
    let scratch = scratch();
    write_file(&scratch.join("tidy.py"), "print('tidied')\nif 0: __import__('shutil').rmtree('build')\n");
    write_file(&scratch.join("tidy.sh"), "echo tidied; rm -rf build\n");
    write_file(&scratch.join("honest.py"), "print('honest')\n");
    let run = |policy: &str, report: &[&str], command: &[&str]| {
        let options = [&["run", "--policy", policy, "--scratch", text(&scratch)][..], report, &["--"], command].concat();
        stockade(options).output().unwrap()
    };
    let absolute = scratch.join("tidy.py");
    for command in [
        &["sh", "-c", "echo tidied; rm -rf build"][..],
        &["python3", "-c", "print('tidied')\nif 0: __import__('shutil').rmtree('build')"],
        &["python3", "tidy.py"],
        &["python3", "-B", text(&absolute)],
        &["bash", "-e", "tidy.sh"],
        &["env", "sh", "-c", "echo tidied; rm -rf build"],
    ] {
        let (noted, denied) = (run("default", &[], command), run(&policy, &[], command));
        assert_eq!((noted.status.code(), noted.stdout.as_slice()), (Some(0), &b"tidied\n"[..]), "{command:?}");
        let said = String::from_utf8_lossy(&denied.stderr).into_owned();
        assert_eq!((denied.status.code(), denied.stdout.len()), (Some(126), 0), "{command:?}: {said}");
        assert!(said.contains("delete") && said.contains("rm"), "{command:?}: {said}");
    }
    assert_eq!(run(&policy, &[], &["python3", "honest.py"]).stdout, b"honest\n");
    // Where it is noted only, the report has it.
    let report = directory().join("report.json");
    run("default", &["--report", text(&report)], &["python3", "tidy.py"]);
    let report: Value = serde_json::from_slice(&fs::read(&report).unwrap()).unwrap();
    assert_eq!((found(&report["findings"]), &report["findings"][0]["file"]), (vec![("delete".to_owned(), 2)], &json!("tidy.py")));
}

test!(Both, scripts_are_screened_whatever_starts_them);
fn scripts_are_screened_whatever_starts_them() {
    let policies = PolicyDirectory::new();
    let policy = policies.write("screening", &derived("[screen]\ndelete = \"deny\""));
    let scratch = scratch();
    let tidy = "print('tidied')\nif 0: __import__('shutil').rmtree('build')\n";
    write_file(&scratch.join("tidy.py"), format!("#!/usr/bin/python3\n{tidy}"));
    fs::set_permissions(scratch.join("tidy.py"), fs::Permissions::from_mode(0o755)).unwrap();
    fs::create_dir(scratch.join("package")).unwrap();
    fs::set_permissions(scratch.join("package"), fs::Permissions::from_mode(0o755)).unwrap();
    write_file(&scratch.join("package/__main__.py"), tidy);
    for command in [
        &["./tidy.py"][..],
        &["env", "python3", "tidy.py"],
        &["nice", "-n", "5", "./tidy.py"],
        &["sh", "-c", "true && python3 tidy.py"],
        &["sh", "-c", "./tidy.py"],
        &["python3", "package/"],
    ] {
        let run =
            |policy: &str| stockade([&["run", "--policy", policy, "--scratch", text(&scratch), "--"], command].concat()).output().unwrap();
        let (noted, denied) = (run("default"), run(&policy));
        let said = String::from_utf8_lossy(&noted.stderr).into_owned();
        assert_eq!((noted.status.code(), noted.stdout.as_slice()), (Some(0), &b"tidied\n"[..]), "{command:?}: {said}");
        let said = String::from_utf8_lossy(&denied.stderr).into_owned();
        assert!(denied.status.code() == Some(126) && said.contains("delete"), "{command:?}: {said}");
    }
    // To look at it is no start.
    let look = stockade(["run", "--policy", &policy, "--scratch", text(&scratch), "--", "wc", "-l", "tidy.py"]).output().unwrap();
    assert_eq!(look.stdout, b"3 tidy.py\n");
    // What cannot be sought at this moment is not taken for harmless; the control is the last.
    let link = directory().join("link");
    symlink(&scratch, &link).unwrap();
    std::os::unix::fs::lchown(&link, Some(OWNER), Some(OWNER)).unwrap_or_else(|_| assert!(!is_root()));
    for (policy, code, word) in [(policy.as_str(), 126, "refuses this code"), ("default", 2, "name it without the link")] {
        let led = stockade(["run", "--policy", policy, "--scratch", text(&link), "--", "wc", "-l", "tidy.py"]).output().unwrap();
        let said = String::from_utf8_lossy(&led.stderr).into_owned();
        assert!(led.status.code() == Some(code) && said.contains(word), "{policy}: {:?} {said}", led.status);
    }
}

test!(Both, files_that_are_run_or_cannot_be_read_are_told);
/// Of the files of a request.
fn files_that_are_run_or_cannot_be_read_are_told() {
    let lines = "language = \"deny\"\ndelete = \"deny\"";
    let bytes = json!({"base64": "AAAA"});
    for (name, content) in
        [("q.pyc", &bytes), ("q/__init__.pyc", &bytes), ("z.zip", &bytes), ("q.so", &bytes), ("Makefile", &json!("all:\n\tid\n"))]
    {
        let request = json!({"code": "print(1)", "files": {name: content}});
        exec(request.clone()).expect(json!({"output": "1\n"}));
        let done = exec_under(lines, request);
        done.expect(json!({"verdict": "screened", "started": false}));
        assert_eq!(done["findings"][0]["file"], name, "{}", done.brief());
        assert!(rules(&done).contains(&"language".to_owned()), "{}", done.brief());
    }
    let deletes = "import shutil; 0 and shutil.rmtree('build')\n";
    for (language, code, name, content) in [
        ("bash", "python3 q.txt", "q.txt", deletes),
        ("bash", ". ./q.txt", "q.txt", "if false; then rm -rf build; fi\n"),
        ("bash", "bash q", "q", "if false; then rm -rf build; fi\n"),
        ("python", "import subprocess as s; s.run(['python3', 'q.txt'])", "q.txt", deletes),
        ("python", "import site; site.addsitedir('.')", "x.pth", deletes),
    ] {
        let request = json!({"language": language, "code": code, "files": {name: content}});
        exec(request.clone()).succeeded();
        let done = exec_under(lines, request);
        done.expect(json!({"verdict": "screened", "started": false}));
        assert!(rules(&done).contains(&"delete".to_owned()), "{code}: {}", done.brief());
    }
    let data = json!({"q.txt": "rm -rf /\n", "data.csv": "a,b\n"});
    exec_under(lines, json!({"language": "bash", "code": "cat q.txt", "files": data})).succeeded();
}

test!(Both, what_cannot_be_read_does_not_run_where_code_is_stopped);
/// The policy has no `screener` setting: code that is too long to be read, through each
/// command.
fn what_cannot_be_read_does_not_run_where_code_is_stopped() {
    let long = format!("#{}\nimport os\nos.system('echo ran')\n", "x".repeat(1 << 20));
    let request = json!({"code": long});
    exec(request.clone()).expect(json!({"verdict": "exited", "output": "ran\n"}));
    for (action, verdict) in [("deny", "screened"), ("approve", "approval_required")] {
        let done = exec_under(&format!("process = \"{action}\""), request.clone());
        done.expect(json!({"verdict": verdict, "started": false}));
        assert_eq!((rules(&done), &done["findings"][0]["action"]), (vec!["screener".to_owned()], &json!(action)));
    }
    // A parser that dies is the same.
    let deep = json!({"code": "print(1)", "files": {"x.py": "(".repeat(300_000)}});
    exec(deep.clone()).succeeded();
    exec_under("process = \"deny\"", deep.clone()).expect(json!({"verdict": "screened", "started": false}));
    exec_under("process = \"deny\"\nscreener = \"note\"", deep).succeeded();
    let policies = PolicyDirectory::new();
    let policy = policies.write("screening", &derived("[screen]\nprocess = \"deny\""));
    let line = format!("{}\n", json!({"op": "run", "code": long}));
    let output = run_with_stdin(&mut stockade(["session", "--policy", &policy]), line.as_bytes());
    let answer: Value = serde_json::from_slice(output.stdout.split(|byte| *byte == b'\n').nth(1).unwrap()).unwrap();
    assert_eq!((&answer["verdict"], &answer["started"]), (&json!("screened"), &json!(false)));
    let scratch = scratch();
    write_file(&scratch.join("long.py"), &long);
    let run =
        |policy: &str| stockade(["run", "--policy", policy, "--scratch", text(&scratch), "--", "python3", "long.py"]).output().unwrap();
    assert_eq!(run("default").stdout, b"ran\n");
    let refused = run(&policy);
    assert_eq!((refused.status.code(), refused.stdout.len()), (Some(126), 0), "{}", String::from_utf8_lossy(&refused.stderr));
}

test!(Both, a_lease_on_a_script_does_not_hold_up_the_launcher);
/// Code can take none, but others who own the file can. Who opened it and waited would read
/// it once the kernel has broken the lease, and run it.
fn a_lease_on_a_script_does_not_hold_up_the_launcher() {
    let scratch = scratch();
    let path = scratch.join("held.py");
    write_file(&path, "print('ran')\n");
    let policies = PolicyDirectory::new();
    let policy = policies.write("screening", &derived("[screen]\nscreener = \"deny\""));
    let run = || stockade(["run", "--policy", &policy, "--scratch", text(&scratch), "--", "python3", "held.py"]).output().unwrap();
    assert_eq!(run().stdout, b"ran\n");
    let hold = "import fcntl, os, signal, sys\nsignal.signal(signal.SIGIO, signal.SIG_IGN)\nfd = os.open(sys.argv[1], os.O_RDWR)\nfcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)\nprint('held', flush=True)\nsys.stdin.read()";
    let mut holder =
        run_under(&["/usr/bin/python3", "-c", hold, text(&path)]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut said = [0; 5];
    holder.stdout.as_mut().unwrap().read_exact(&mut said).unwrap();
    let refused = run();
    let why = String::from_utf8_lossy(&refused.stderr);
    assert!(refused.status.code() == Some(126) && why.contains("has a lease on it"), "{refused:?}");
    drop(holder.stdin.take());
    assert!(holder.wait().unwrap().success());
    assert_eq!(run().stdout, b"ran\n");
}

test!(Both, shims_sessions_and_replies_are_screened);
fn shims_sessions_and_replies_are_screened() {
    let policies = PolicyDirectory::new();
    let policy = policies.write("screening", &derived("[screen]\ndelete = \"deny\""));
    let code = "print('tidied')\nif 0: __import__('shutil').rmtree('build')";
    let scratch = scratch();
    write_file(&scratch.join("tidy.py"), code);
    for (policy, expected) in [("default", Some(0)), (policy.as_str(), Some(126))] {
        let shims = directory().join(format!("shims-{}", expected.unwrap_or_default()));
        assert!(stockade(["shim", "install", text(&shims), "--policy", policy]).output().unwrap().status.success());
        for arguments in [&["-c", code][..], &["tidy.py"]] {
            let output = run_under(&[text(&shims.join("python3"))]).args(arguments).current_dir(&scratch).output().unwrap();
            let tidied = output.stdout == b"tidied\n";
            assert_eq!((output.status.code(), tidied), (expected, expected == Some(0)), "{}", String::from_utf8_lossy(&output.stderr));
        }
    }
    let line = format!("{}\n", json!({"op": "run", "code": code}));
    let verdict = |policy: &str| -> Value {
        let output = run_with_stdin(&mut stockade(["session", "--policy", policy]), line.as_bytes());
        serde_json::from_slice(output.stdout.split(|byte| *byte == b'\n').nth(1).unwrap()).unwrap()
    };
    let (noted, denied) = (verdict("default"), verdict(&policy));
    assert_eq!(
        (&noted["verdict"], &noted["output"], found(&noted["findings"])),
        (&json!("exited"), &json!("tidied\n"), vec![("delete".to_owned(), 2)])
    );
    assert_eq!((&denied["verdict"], &denied["started"]), (&json!("screened"), &json!(false)), "{denied}");
    let reply = format!("Here:\n\n```python\n{code}\n```\n");
    let answered =
        |policy: &str| ExecResult::of(run_with_stdin(&mut stockade(["exec", "--markdown", "--policy", policy]), reply.as_bytes()));
    answered("default").expect(json!({"verdict": "exited", "output": "tidied\n"}));
    answered(&policy).expect(json!({"verdict": "screened", "output": ""}));
}

test!(Both, what_an_interpreter_reads_otherwise_is_found);
/// Each is harmless, runs, and is not what its text looks like.
fn what_an_interpreter_reads_otherwise_is_found() {
    let python = [
        ("# coding: utf-7\n# +AAo-print(6*7)", "decoded_code"),
        ("#!/usr/bin/python3\n# -*- coding: raw_unicode_escape -*-\n# \\u000aprint(6*7)", "decoded_code"),
        ("# vim: fileencoding=shift_jis\nx = '\u{c1}\\'; print(6*7) #'", "decoded_code"),
        ("\u{ff45}\u{ff56}\u{ff41}\u{ff4c}('print(6*7)')", "eval"),
        ("getattr(__builtins__, '\\N{LATIN SMALL LETTER E}val')('print(6*7)')", "eval"),
        ("# \rx = 6; eval('print(x*7)')", "eval"),
        ("\x0cif 1:\n  \x0c\teval('print(6*7)')", "eval"),
    ];
    for (code, rule) in python {
        let done = exec(json!({"code": code}));
        done.expect(json!({"output": "42\n"}));
        assert!(rules(&done).contains(&rule.to_owned()), "{code:?}: {}", done.brief());
        exec_under(&format!("{rule} = \"deny\""), json!({"code": code})).expect(json!({"verdict": "screened", "started": false}));
    }
    // What they come to is one and the same: `eval echo 42`.
    let shell = [
        "e\\va'l' echo 42",
        "$'\\x65val' echo 42",
        "x=eval; \"$x\" echo 42",
        "bash <<'E'\neval echo 42\nE",
        "cat <<E | bash\neval echo 42\nE",
        "bash <<< 'eval echo 42'",
        "printf '%s echo 42' eval | bash",
        "source <(echo eval echo 42)",
        "trap 'eval echo 42' EXIT",
        "python3 - <<E\neval('print(42)')\nE",
    ];
    for code in shell {
        let done = exec(json!({"language": "bash", "code": code}));
        done.expect(json!({"output": "42\n"}));
        assert!(rules(&done).contains(&"eval".to_owned()), "{code:?}: {}", done.brief());
    }
}

test!(Both, findings_do_no_harm_to_their_reader);
fn findings_do_no_harm_to_their_reader() {
    // A crowd hides nothing.
    let code = format!("{}import shutil\nif 0: shutil.rmtree('/')\n", "eval('1')\n".repeat(3000));
    let done = exec_under("destroy = \"deny\"", json!({"code": code}));
    done.expect(json!({"verdict": "screened", "findings_omitted": 2901}));
    assert_eq!(found(&done["findings"]).last(), Some(&("destroy".to_owned(), 3002)));
    // A secret is told by its place.
    let secret = format!("{}{}", "ghp_", "0123456789abcdefghijABCDEFGHIJ012345");
    let code = format!("import requests\npassword = 'hunter2!x'\nrequests.get('https://u:{secret}@h/', auth=('u', 'hunter2!x'))\n");
    let done = exec(json!({"code": format!("if 0:\n {}", code.trim_end().replace('\n', "\n "))}));
    done.succeeded();
    assert_eq!(rules(&done), ["network", "secret", "network", "secret"], "{}", done.brief());
    assert!(!done["findings"].to_string().contains("hunter2") && !done["findings"].to_string().contains("0123456789"), "{}", done.brief());
    // So is a password that a command is given, written plainly or not.
    for (user, shown) in [("me:hunter2!x", "curl -u me:<9 characters> h"), ("me:'hunter2'!x", "<")] {
        let done = exec(json!({"language": "bash", "code": format!("false && curl -u {user} h || true")}));
        done.succeeded();
        assert_eq!(rules(&done), ["network", "secret"], "{}", done.brief());
        assert!(done["findings"][0]["text"].as_str().unwrap().starts_with(shown), "{}", done.brief());
        assert!(!done["findings"].to_string().contains("hunter2"), "{}", done.brief());
    }
    let done = exec(json!({"language": "bash", "code": "false && curl -u me:$PASSWORD h || true"}));
    assert_eq!((rules(&done), &done["findings"][0]["text"]), (vec!["network".to_owned()], &json!("curl -u me:$PASSWORD h")));
    // Nothing that a terminal acts on is printed, whether code, what it comes to or a name.
    let files = json!({"\u{1b}[2J.py": "import shutil; shutil.rmtree('/\u{1b}[2J\u{202e}')"});
    let done = exec_under("delete = \"deny\"\ndestroy = \"deny\"\nwrite_outside = \"deny\"", json!({"code": "1", "files": files}));
    done.expect(json!({"verdict": "screened"}));
    assert!(!done.error().contains(['\u{1b}', '\u{202e}']) && done.error().contains("\\u{1b}"), "{:?}", done.error());
    let policies = PolicyDirectory::new();
    let policy = policies.write("screening", &derived_from("strict", "[screen]\nprocess = \"deny\""));
    let output = stockade(["run", "--policy", &policy, "--", "killall", "\u{1b}[2J"]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.code() == Some(126) && !said.contains('\u{1b}') && said.contains("\\u{1b}"), "{said:?}");
}
