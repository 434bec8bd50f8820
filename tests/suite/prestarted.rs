//! Interpreters that a session starts before the request comes: that programs cannot tell, that
//! no code runs before its request, and that nothing else than what the request asks for is used.
//! Those of Python are here without templates, by which they start another way (`templates.rs`).

use std::{fs, thread, time::Duration};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::{Value, json};

use crate::support::{
    exec::{scratch, text},
    policy_dir::{PolicyDirectory, derived, derived_from},
    runner::{eventually, is_root, test},
    session::{Session, begin, children, prepared_sandbox, waiting},
    starts::{
        CURIOUS_PROGRAMS, NO_TEMPLATE, compare_corpus, interpreter, line_of, session_without_template, started, told_afresh,
        told_after_pause,
    },
    timeouts::{is_slow, scaled},
};

/// Results of a program in an empty session: started afresh, and in an interpreter that waited.
fn compared(session: &mut Session, line: &Value) -> (String, String) {
    (told_afresh(session, line), told_after_pause(session, line, "prestarted"))
}

test!(Both, a_program_cannot_tell_that_its_interpreter_had_been_started, seconds 120);
fn a_program_cannot_tell_that_its_interpreter_had_been_started() {
    let policies = PolicyDirectory::new();
    let policy = policies.write("no-template", &derived(NO_TEMPLATE));
    let mut sessions: Vec<(&str, Session)> = Vec::new();
    for (language, code) in CURIOUS_PROGRAMS {
        if !sessions.iter().any(|(name, _)| *name == language) {
            let mut session = Session::open(&["--policy", &policy]);
            let hello = if language == "node" { "1" } else { "" };
            assert_eq!(session.ask(json!({"op": "run", "code": hello, "language": language}))["success"], true);
            sessions.push((language, session));
        }
        let (_, session) = sessions.iter_mut().find(|(name, _)| *name == language).unwrap();
        // The first request after a reset has the language of the last one.
        let (fresh, waited) = compared(session, &line_of(language, code, 30_000));
        assert_eq!(waited, fresh, "{language}: {code}");
    }
}

test!(Both, honest_programs_end_alike_in_an_interpreter_that_waited, needs [SlowAsUser], seconds 240);
fn honest_programs_end_alike_in_an_interpreter_that_waited() {
    let corpora = [
        ("python", include_str!("../corpus/benign-python-1.txt")),
        ("python", include_str!("../corpus/benign-python-2.txt")),
        ("bash", include_str!("../corpus/benign-shell.txt")),
    ];
    let policies = PolicyDirectory::new();
    // Else the order of a set is another at every start.
    let policy = policies.write("hashed", &derived(&format!("{NO_TEMPLATE}\n[environment.set]\nPYTHONHASHSEED = \"1\"")));
    let (mut same, mut different) = (0, Vec::new());
    for (language, corpus) in corpora {
        let mut session = Session::open(&["--policy", &policy]);
        assert_eq!(session.ask(json!({"op": "run", "code": "", "language": language}))["success"], true);
        let (alike, others) = compare_corpus(corpus, |code| compared(&mut session, &line_of(language, code, 1_000)));
        same += alike;
        different.extend(others);
    }
    assert!(different.is_empty() && same > 140, "{same} are the same, and not: {different:?}");
}

test!(Both, without_a_pause_the_next_sandbox_is_prepared_beside_the_program, seconds 60);
fn without_a_pause_the_next_sandbox_is_prepared_beside_the_program() {
    let policies = PolicyDirectory::new();
    let mut session = session_without_template(&policies);
    let count = "import os, stat, time\ntime.sleep(0.1)\nopen('count', 'a').write('x')\n\
        print(len(open('count').read()), [name for name in os.listdir('.') if stat.S_ISFIFO(os.lstat(name).st_mode)])";
    let line = line_of("python", count, 30_000);
    session.send(&vec![line.to_string(); 5].join("\n"));
    let results: Vec<Value> = (0..5).map(|_| session.answer()).collect();
    for (n, result) in results.iter().enumerate() {
        // Each has all that the one before it has left, and no interpreter waits beside it.
        assert_eq!(result["output"], format!("{} []\n", n + 1), "{result}");
    }
    // That the client leaves no pause shows with the third.
    results[1..3].iter().for_each(|result| started(result, "fresh", "no sandbox was prepared"));
    results[3..].iter().for_each(|result| started(result, "prepared", "the client leaves no pause"));
    // To look through a directory of the host takes its time, for which nothing would watch the run.
    let place = scratch();
    let mut on_host = Session::open(&["--scratch", text(&place)]);
    on_host.send(&vec![line.to_string(); 5].join("\n"));
    [(); 5].map(|()| on_host.answer()).iter().skip(1).for_each(|result| started(result, "fresh", "no sandbox was prepared"));
    on_host.close();
    // A directory that code has closed stays so beside that, and is open to the next program.
    let close = line_of("python", "import os, time\nos.chmod('.', 0)\ntime.sleep(0.1)\nprint(os.access('.', os.W_OK))", 30_000);
    session.send(&[line.to_string(), close.to_string(), line.to_string()].join("\n"));
    assert_eq!([(); 3].map(|()| session.answer()["output"].clone()), ["6 []\n", "False\n", "7 []\n"]);
    // The control: after a pause an interpreter waits.
    interpreter(&session);
    started(&session.ask(line), "prestarted", "");
    session.close();
}

test!(Both, a_request_for_another_start_of_the_interpreter_gets_one, seconds 60);
fn a_request_for_another_start_of_the_interpreter_gets_one() {
    let policies = PolicyDirectory::new();
    let mut session = session_without_template(&policies);
    let show = "import os, resource, sys\nprint(sys.argv[1:], os.environ.get('TZ'), resource.getrlimit(resource.RLIMIT_NOFILE)[0], os.path.basename(__file__))";
    for (field, value, shows) in [
        ("args", json!(["a b", ""]), "['a b', ''] UTC 1024 stockade_"),
        ("env", json!({"TZ": "Asia/Tokyo"}), "[] Asia/Tokyo 1024 stockade_"),
        ("limits", json!({"open_files": 64}), "[] UTC 64 stockade_"),
        ("filename", json!("named.py"), "[] UTC 1024 named.py"),
        ("language", json!("PY"), "[] UTC 1024 stockade_"),
    ] {
        interpreter(&session);
        let mut line = json!({"op": "run", "code": show});
        line[field] = value;
        let result = session.ask(line);
        assert!(result["output"].as_str().unwrap().starts_with(shows), "{field}: {result}");
        let (start, cause) = if field == "language" { ("prestarted", "") } else { ("fresh", "other arguments, variables or limits") };
        started(&result, start, cause);
    }
    let left = session.ask(json!({"op": "list", "path": "."}));
    assert_eq!(left["entries"], json!([]), "{left}");
    // Stdin is not where it has begun.
    interpreter(&session);
    let result = session.ask(json!({"op": "run", "code": "print(input())", "stdin": "given"}));
    assert_eq!(result["output"], "given\n");
    started(&result, "fresh", "did not fit");
    interpreter(&session);
    let result = session.ask(json!({"op": "run", "code": "echo $0", "language": "bash"}));
    assert!(result["output"].as_str().unwrap().ends_with(".sh\n"), "{result}");
    started(&result, "fresh", "other arguments");
    // Files of the request, and those of the client, are there when its interpreter starts.
    let mut session = session_without_template(&policies);
    let module = "console.log(typeof require, this === undefined)";
    let ask = |session: &mut Session, files: Value| session.ask(json!({"op": "run", "language": "node", "code": module, "files": files}));
    ask(&mut session, json!({}));
    interpreter(&session);
    let result = ask(&mut session, json!({"package.json": "{\"type\": \"module\"}"}));
    started(&result, "fresh", "the request brings files");
    assert_eq!(result["output"], "undefined true\n");
    started(&result, "fresh", "the request brings files");
    // Here another thread of it waits.
    interpreter(&session);
    let result = ask(&mut session, json!({}));
    assert_eq!(result["output"], "undefined true\n");
    started(&result, "prestarted", "");
    session.write("package.json", json!("{}"));
    interpreter(&session);
    session.write("package.json", json!("{\"type\": \"commonjs\"}"));
    interpreter(&session);
    let result = ask(&mut session, json!({}));
    assert_eq!(result["output"], "function false\n", "{result}");
    started(&result, "prestarted", "");
    session.close();
}

test!(Both, what_an_interpreter_used_that_was_not_taken_counts_for_no_request, seconds 60);
fn what_an_interpreter_used_that_was_not_taken_counts_for_no_request() {
    let policies = PolicyDirectory::new();
    let mut session = session_without_template(&policies);
    session.ask(json!({"op": "run", "language": "node", "code": "1"}));
    // It has a dozen threads, and holds more than the next program.
    interpreter(&session);
    let result = session.ask(json!({"op": "run", "language": "bash", "code": "echo $$"}));
    assert_eq!(result["output"], "2\n", "{result}");
    assert!(result["usage"]["processes_peak"].as_u64().is_none_or(|peak| peak <= 2), "{}", result["usage"]);
    session.close();
}

test!(Both, no_code_of_a_session_runs_before_its_request, seconds 60);
fn no_code_of_a_session_runs_before_its_request() {
    let policies = PolicyDirectory::new();
    let mut session = session_without_template(&policies);
    interpreter(&session);
    // An interpreter executes such a file at its start.
    let plant = "import os, site\nos.makedirs(site.getusersitepackages())\n\
        open(site.getusersitepackages() + '/usercustomize.py', 'w').write(\"open('/tmp/ran', 'a').write('x')\")";
    assert_eq!(session.output(plant), "");
    let sandbox = prepared_sandbox(&session);
    thread::sleep(scaled(Duration::from_millis(300)));
    assert_eq!((waiting(&session), children(sandbox).len()), (Some(sandbox), 0), "an interpreter was started");
    let listed = session.ask(json!({"op": "list", "path": "/tmp"}));
    assert_eq!(listed["entries"], json!([]), "it ran before the request");
    // The control: at the request it runs.
    let result = session.run("print(open('/tmp/ran').read())");
    assert_eq!(result["output"], "x\n");
    started(&result, "prepared", "home holds files");
    // What the client writes there after the interpreter has started is seen too.
    assert_eq!(session.ask(json!({"op": "reset"}))["ok"], true);
    interpreter(&session);
    session.write("/home/sandbox/.local", json!(""));
    prepared_sandbox(&session);
    started(&session.run("1"), "prepared", "home holds files");
    session.close();
}

test!(Both, no_code_reaches_the_place_where_an_interpreter_waits, seconds 60);
fn no_code_reaches_the_place_where_an_interpreter_waits() {
    let policies = PolicyDirectory::new();
    let mut session = session_without_template(&policies);
    let look = "import os, stat\nprint([name for name in os.listdir('.') if stat.S_ISFIFO(os.lstat(name).st_mode)])";
    for _ in 0..3 {
        interpreter(&session);
        assert_eq!(session.output(look), "[]\n");
    }
    // A write of the client ends the interpreter first, whatever it names.
    let waits = interpreter(&session);
    session.write("anything", json!("x"));
    assert!(!fs::exists(format!("/proc/{waits}")).unwrap());
    assert_eq!(session.output("import os; os.remove('anything')"), "");
    // Nor does the client see it, and a program that takes its time meets none beside it.
    interpreter(&session);
    assert_eq!(session.ask(json!({"op": "list", "recursive": true}))["entries"], json!([]));
    let waits =
        "import os, stat, time\ntime.sleep(0.3)\nprint([name for name in os.listdir('.') if stat.S_ISFIFO(os.lstat(name).st_mode)])";
    assert_eq!(session.output(waits), "[]\n");
    // The control: it is there.
    let sandbox = prepared_sandbox(&session);
    interpreter(&session);
    let scratch = format!("/proc/{sandbox}/root/scratch");
    let fifos = || {
        let entries = fs::read_dir(&scratch).unwrap().map(|entry| entry.unwrap());
        entries.filter(|entry| std::os::unix::fs::FileTypeExt::is_fifo(&entry.file_type().unwrap())).count()
    };
    if is_root() {
        assert_eq!(fifos(), 1);
    }
    session.close();
}

test!(Both, an_interpreter_that_has_ended_costs_its_request_nothing, seconds 60);
fn an_interpreter_that_has_ended_costs_its_request_nothing() {
    let policies = PolicyDirectory::new();
    let mut session = session_without_template(&policies);
    for signal in [Signal::SIGKILL, Signal::SIGTERM, Signal::SIGSTOP] {
        let waits = interpreter(&session);
        kill(Pid::from_raw(waits.cast_signed()), signal).unwrap();
        thread::sleep(Duration::from_millis(50));
        let result = session.run("print(6 * 7)");
        assert_eq!((&result["output"], &result["verdict"]), (&json!("42\n"), &json!("exited")), "{signal}: {result}");
        match signal {
            // It is continued.
            Signal::SIGSTOP => started(&result, "prestarted", ""),
            _ => started(&result, "fresh", "had ended"),
        }
    }
    session.close();
}

test!(Both, where_no_interpreter_may_wait_the_receipt_says_why, seconds 60);
fn where_no_interpreter_may_wait_the_receipt_says_why() {
    let policies = PolicyDirectory::new();
    let place = scratch();
    let watched = policies.write("watched", &derived("[runtimes.python.modules]\n\"os.*\" = \"note\""));
    let home = policies.write("at_home", &derived("[scratch]\nhome = true"));
    let filtered = policies.write("without_kill", &derived("[seccomp]\nallow = { remove = [\"kill\"] }"));
    // Code could leave what these execute.
    let variable = policies.write("variable", &derived("[environment.set]\nPYTHONPATH = \"/scratch/lib\""));
    let of_runtime = policies.write("of_runtime", &derived("[runtimes.python.environment]\nLD_PRELOAD = \"/scratch/x.so\""));
    let module = policies.write("module", &derived("[runtimes.python]\ncommand = [\"/usr/bin/python3\", \"-m\", \"trace\", \"{file}\"]"));
    // Here another process opens the program.
    let wrapped = policies
        .write("wrapped", &derived("[runtimes.python]\ncommand = [\"/usr/bin/timeout\", \"20\", \"/usr/bin/python3\", \"{file}\"]"));
    let approved = policies.write("approved", &derived("[screen]\nprocess = \"approve\""));
    for (options, cause) in [
        (vec!["--scratch", text(&place)], "scratch is a directory of the host"),
        (vec!["--policy", &watched], "the policy watches modules"),
        (vec!["--policy", &home], "home is in scratch"),
        (vec!["--policy", &filtered], "allow list lacks `kill`"),
        (vec!["--policy", &variable], "sets a variable"),
        (vec!["--policy", &of_runtime], "sets a variable"),
        (vec!["--policy", &module], "the runtime's command is not"),
        (vec!["--policy", &wrapped], "the runtime's command is not"),
        (vec!["--policy", &approved], "the policy asks for approvals"),
    ] {
        let mut session = Session::open(&options);
        let sandbox = prepared_sandbox(&session);
        assert_eq!(children(sandbox), [0; 0], "{cause}");
        started(&session.run("1"), "prepared", cause);
        session.close();
    }
    // Nor is a sandbox prepared.
    let peers = policies.write("peers", &derived("[egress]\nwhitelist = { add = [\"192.0.2.1:443\"] }"));
    (0..=1024).for_each(|n| fs::write(place.join(n.to_string()), "").unwrap());
    for (options, cause) in
        [(vec!["--policy", &peers], "the policy lets code reach peers"), (vec!["--scratch", text(&place)], "scratch holds too many files")]
    {
        let mut session = Session::open(&options);
        let is_told = || {
            thread::sleep(Duration::from_millis(20));
            session.run("1")["receipt"]["start_cause"].as_str().unwrap().starts_with(cause)
        };
        assert!(eventually(Duration::from_secs(10), is_told), "{cause}");
        started(&session.run("1"), "fresh", cause);
        session.close();
    }
}

test!(Both, under_strict_an_interpreter_waits_too, seconds 60);
fn under_strict_an_interpreter_waits_too() {
    let policies = PolicyDirectory::new();
    // An ordinary user may have no cgroup here.
    let strict = policies.write("stricter", &derived_from("strict", "[degrade]\nrootless = { add = [\"cgroup\"] }"));
    let mut session = Session::open(&["--policy", &strict]);
    for _ in 0..3 {
        interpreter(&session);
        let result = session.ask(json!({"op": "run", "code": "print(6 * 7)", "limits": {"wall": "60s"}}));
        assert_eq!(result["output"], "42\n", "{result}");
        started(&result, "prestarted", "");
    }
    session.close();
}

test!(Both, an_interpreter_that_waits_for_long_gives_its_memory_back, seconds 90);
fn an_interpreter_that_waits_for_long_gives_its_memory_back() {
    if is_slow() {
        return;
    }
    let policies = PolicyDirectory::new();
    let mut session = session_without_template(&policies);
    let waits = interpreter(&session);
    let gone = eventually(Duration::from_secs(40), || !fs::exists(format!("/proc/{waits}")).unwrap());
    assert!(gone, "it waits on");
    let sandbox = prepared_sandbox(&session);
    assert_eq!(children(sandbox), [0; 0]);
    started(&session.run("1"), "prepared", "waited for too long");
    // After a request the next one waits again.
    interpreter(&session);
    session.close();
}

test!(Both, the_time_for_which_an_interpreter_waited_is_not_the_programs, seconds 60);
fn the_time_for_which_an_interpreter_waited_is_not_the_programs() {
    let policies = PolicyDirectory::new();
    let mut session = session_without_template(&policies);
    interpreter(&session);
    thread::sleep(Duration::from_millis(1500));
    let result = session.ask(json!({"op": "run", "code": "import time; time.sleep(0.2)", "limits": {"wall": "1200ms"}}));
    assert_eq!((&result["verdict"], &result["limits_hit"]), (&json!("exited"), &json!([])), "{result}");
    assert!(result["duration_ms"].as_u64().unwrap() < 1200, "{result}");
    started(&result, "prestarted", "");
    begin(&mut session, "sleeps");
    session.send(r#"{"op":"cancel"}"#);
    assert_eq!(session.answer()["verdict"], "cancelled");
    session.answer();
    session.close();
}
