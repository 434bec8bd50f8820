//! Templates: that requests of a session start from copies, that a program and its client find such
//! a run to be like any other, and what ends or holds back copies. The control of each denial is a
//! request that starts from a copy.

use std::{
    collections::BTreeSet,
    fs,
    path::Path,
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use nix::{
    errno::Errno,
    sys::{
        signal::{Signal, kill},
        wait::{WaitPidFlag, WaitStatus, waitpid},
    },
    unistd::Pid,
};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::support::{
    audit_log::{own_log, records},
    exec::{OWNER, both_streams, exec, scratch, stockade, text},
    leftovers::{cgroups_of, dead_records, mounts, the_next_start_has_swept},
    policy_dir::{PolicyDirectory, command_with_etc, derived, derived_from},
    runner::{eventually, test},
    session::{Session, children, prepared_sandbox, waiting},
    starts::{
        AT_REQUEST, CURIOUS_PROGRAMS, NO_TEMPLATE, compare_corpus, interpreter, line_of, session_without_template, started, told_afresh,
        told_after_pause, told_without_pause,
    },
    timeouts::{scaled, scaled_limit},
};

/// The time that a session has for its template, with others beside it.
const MADE: Duration = Duration::from_secs(60);

fn line(code: &str) -> Value {
    line_of("python", code, 30_000)
}

/// Asks until a request without a pause before it starts in this way. Returns the first such result.
#[track_caller]
fn until_started(session: &mut Session, start: &str, cause: &str) -> Value {
    let mut result = Value::Null;
    let is_so = eventually(MADE, || {
        thread::sleep(Duration::from_millis(60));
        result = at_once(session, &line(""));
        let receipt = &result["receipt"];
        receipt["start"] == start && receipt["start_cause"].as_str().unwrap_or_default().contains(cause)
    });
    assert!(is_so, "no request starts so: {start}, {cause}: {} {}", result["receipt"], result["error"]);
    result
}

/// A session whose template is made.
#[track_caller]
fn ready_session(options: &[&str]) -> Session {
    let mut session = Session::open(options);
    until_started(&mut session, "restored", "");
    session
}

/// A request's result without a pause before it, so that no interpreter waits for it: the request
/// before it takes one that does.
#[track_caller]
fn at_once(session: &mut Session, asked: &Value) -> Value {
    session.send(&format!("{}\n{asked}", line("")));
    assert_eq!(session.answer()["success"], true);
    session.answer()
}

/// The same; or after a pause, in which an interpreter comes to wait for the request.
#[track_caller]
fn asked(session: &mut Session, line: &Value, pauses: bool) -> Value {
    if !pauses {
        return at_once(session, line);
    }
    interpreter(session);
    session.ask(line.clone())
}

/// It started from a copy, and nothing was held back.
#[track_caller]
fn restored(result: &Value) {
    started(result, "restored", "");
    let receipt = &result["receipt"];
    assert_eq!((&receipt["layout"], &receipt["start_cause"]), (&json!("shared"), &Value::Null));
    assert_eq!(result["denials"], json!([]), "the start of a copy counts for its program");
}

/// It did not, for this reason.
#[track_caller]
fn not_restored(result: &Value, start: &str, cause: &str) {
    started(result, start, cause);
    assert_eq!(result["receipt"]["layout"], Value::Null);
}

/// A policy with this template for Python.
fn with_template(lines: &str) -> String {
    derived(&format!("[templates.bare]\n{lines}"))
}

fn layers(result: &Value) -> Vec<(String, String)> {
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    result["receipt"]["layers"].as_array().unwrap().iter().map(|layer| (text(&layer["layer"]), text(&layer["known"]))).collect()
}

test!(Both, requests_start_from_copies_once_the_template_is_made, seconds 90);
fn requests_start_from_copies_once_the_template_is_made() {
    let mut session = Session::open(&[]);
    session.send(&format!("{}\n{}\n{}", line("print(1)"), line("print(1)"), line("print(1)")));
    let [_, fresh, next] = [(); 3].map(|()| session.answer());
    // It is begun after the first, and where that took long before the second.
    not_restored(&fresh, "fresh", "the template is ");
    not_restored(&next, AT_REQUEST, "the template is still being made");
    until_started(&mut session, "restored", "");
    let show = "import os, sys\nprint(sys.argv[1:], sys.stdin.read(), sorted(os.listdir('.'))[:-1], os.getpid())";
    for (field, value, shows) in [
        ("language", json!("py"), "[]  [] 2\n"),
        ("args", json!(["a b", ""]), "['a b', '']  [] 2\n"),
        ("stdin", json!("given"), "[] given [] 2\n"),
        ("files", json!({"a/b": "c", "f": ""}), "[]  ['a', 'f'] 2\n"),
    ] {
        for pauses in [false, true] {
            let mut request = line(show);
            request[field] = value.clone();
            let result = asked(&mut session, &request, pauses);
            assert_eq!(result["output"], shows, "{field}: {result}");
            restored(&result);
            assert_eq!((layers(&result), &result["receipt"]["degraded"]), (layers(&fresh), &fresh["receipt"]["degraded"]));
            session.output("import os, shutil\nfor name in {'a', 'f'} & {*os.listdir('.')}: shutil.rmtree(name, True) if name == 'a' else os.remove(name)");
        }
    }
    // What a copy cannot be asked for starts afresh.
    for (field, value) in [("env", json!({"TZ": "Asia/Tokyo"})), ("limits", json!({"open_files": 64})), ("filename", json!("named.py"))] {
        let mut request = line("");
        request[field] = value;
        not_restored(&at_once(&mut session, &request), AT_REQUEST, "the request has other variables or limits, or another file name");
    }
    let bash = at_once(&mut session, &json!({"op": "run", "code": "echo $0", "language": "bash"}));
    not_restored(&bash, AT_REQUEST, "");
    restored(&at_once(&mut session, &line("")));
    session.close();
}

test!(RootOnly, through_sudo_a_session_makes_a_template_of_what_is_granted, seconds 90);
fn through_sudo_a_session_makes_a_template_of_what_is_granted() {
    let id = OWNER.to_string();
    let variables = [("SUDO_UID", id.as_str()), ("SUDO_GID", id.as_str()), ("SUDO_USER", "agent")];
    let grants = format!("[[grant]]\nuid = {OWNER}\npolicies = [\"default\"]\n");
    let files = [("stockade/grants.toml", grants.as_str())];
    let mut session = Session::of(&mut command_with_etc(&files, &variables, &["session"]));
    until_started(&mut session, "restored", "");
    restored(&asked(&mut session, &line(""), true));
    session.close();
    // What is not granted is refused to `templates` too.
    for (policy, status) in [("default", 0), ("data-science", 2)] {
        let output = command_with_etc(&files, &variables, &["templates", "ls", "--policy", policy]).output().unwrap();
        let said = both_streams(&output);
        assert_eq!((output.status.code(), said.contains("/etc/stockade/grants.toml")), (Some(status), status == 2), "{said}");
    }
}

test!(Both, a_copy_is_written_down_as_any_run_and_its_template_is_not, seconds 90);
fn a_copy_is_written_down_as_any_run_and_its_template_is_not() {
    let log = own_log();
    let mut session = ready_session(&[]);
    let result = at_once(&mut session, &json!({"op": "run", "code": "print('said')", "id": "copy"}));
    restored(&result);
    session.close();
    let all = records(&log);
    let record = all.iter().find(|record| record["id"] == "copy").unwrap();
    assert_eq!((&record["event"], &record["verdict"], &record["run"]), (&json!("run"), &json!("exited"), &result["audit"]["run"]));
    assert_eq!((&record["code"]["preview"], &record["output"]["preview"]), (&json!("print('said')"), &json!("said\n")));
    let hash = Sha256::digest("print('said')").iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    assert_eq!(record["code"]["sha256"], hash.as_str(), "{record}");
    let fresh = all.iter().find(|record| record["event"] == "run").unwrap();
    let keys = |record: &Value| {
        record.as_object().unwrap().keys().filter(|key| !["id", "output"].contains(&key.as_str())).cloned().collect::<BTreeSet<_>>()
    };
    assert_eq!(keys(record), keys(fresh));
    // All other runs are those that the session was asked for.
    let runs = all.iter().filter(|record| record["event"] == "run");
    assert!(runs.clone().count() > 2 && runs.clone().all(|record| record["code"]["kind"] == "code"), "{all:?}");
    assert!(runs.clone().all(|record| ["", "print('said')"].contains(&record["code"]["preview"].as_str().unwrap())), "{all:?}");
}

test!(Both, a_program_cannot_tell_that_its_interpreter_is_a_copy, seconds 120);
fn a_program_cannot_tell_that_its_interpreter_is_a_copy() {
    let policies = PolicyDirectory::new();
    let (mut plain, mut copies) = (session_without_template(&policies), ready_session(&[]));
    for (language, code) in CURIOUS_PROGRAMS.into_iter().filter(|(language, _)| *language == "python") {
        let line = line_of(language, code, 30_000);
        let fresh = told_afresh(&mut plain, &line);
        assert_eq!(told_after_pause(&mut copies, &line, "restored"), fresh, "{code}");
        assert_eq!(told_without_pause(&mut copies, &line, "restored"), fresh, "{code}");
    }
}

test!(Both, honest_programs_end_alike_in_a_copy, needs [SlowAsUser], seconds 240);
fn honest_programs_end_alike_in_a_copy() {
    let corpora = [include_str!("../corpus/benign-python-1.txt"), include_str!("../corpus/benign-python-2.txt")];
    let policies = PolicyDirectory::new();
    // Else the order of a set is another at every start.
    let seed = "[environment.set]\nPYTHONHASHSEED = \"1\"";
    let plain = policies.write("plain", &derived(&format!("{NO_TEMPLATE}\n{seed}")));
    let (mut plain, mut copies) =
        (Session::open(&["--policy", &plain]), ready_session(&["--policy", &policies.write("copies", &derived(seed))]));
    let (mut same, mut different) = (0, Vec::new());
    for (corpus, pauses) in corpora.into_iter().zip([false, true]) {
        let (alike, others) = compare_corpus(corpus, |code| {
            let line = line_of("python", code, 1_000);
            let told_of_copy = if pauses { told_after_pause } else { told_without_pause };
            (told_afresh(&mut plain, &line), told_of_copy(&mut copies, &line, "restored"))
        });
        same += alike;
        different.extend(others);
    }
    assert!(different.is_empty() && same > 90, "{same} are the same, and not: {different:?}");
}

/// Forty copies of one image draw no random value twice.
#[track_caller]
fn draw_in_forty(session: &mut Session, values: &str) {
    let code = format!(
        "import json, os, random, secrets, sqlite3, ssl, tempfile, uuid\nvalues = dict(random=random.random(), uuid=str(uuid.uuid4()), \
         address=uuid.uuid1().fields[3:], secret=secrets.token_hex(8), system=os.urandom(8).hex(), file=tempfile.mktemp(), ssl=ssl.RAND_bytes(8).hex(), \
         sqlite=sqlite3.connect(':memory:').execute('select hex(randomblob(8))').fetchone()[0])\n{values}\n\
         print(json.dumps([os.getpid(), id(print), values]))"
    );
    let (mut layouts, mut drawn) = (BTreeSet::new(), Vec::new());
    for _ in 0..40 {
        let result = at_once(session, &line(&code));
        restored(&result);
        let [pid, layout, values]: [Value; 3] =
            serde_json::from_str(result["output"].as_str().unwrap()).unwrap_or_else(|_| panic!("{result}"));
        assert_eq!(pid, 2);
        layouts.insert(layout.to_string());
        drawn.push(values);
    }
    // The control: what is not random is the same in all.
    assert_eq!(layouts.len(), 1, "they are not of one image");
    for name in drawn[0].as_object().unwrap().keys() {
        let distinct: BTreeSet<String> = drawn.iter().map(|values| values[name].to_string()).collect();
        assert_eq!(distinct.len(), 40, "{name}: {distinct:?}");
    }
}

test!(Both, no_two_copies_draw_the_same_random_value, seconds 120);
fn no_two_copies_draw_the_same_random_value() {
    let policies = PolicyDirectory::new();
    draw_in_forty(&mut ready_session(&[]), "");
    // Here the generators are in the image, and have been drawn from.
    let modules = "imports = [\"random\", \"secrets\", \"sqlite3\", \"ssl\", \"tempfile\", \"uuid\"]";
    let warm = "import random, sqlite3, ssl, tempfile, uuid\nrandom.random()\nssl.RAND_bytes(8)\ntempfile.mktemp()\nuuid.uuid1()\n\
                uuid.getnode()\nc = sqlite3.connect(':memory:')\nc.execute('select randomblob(8)').fetchone()\nc.close()\ndel c";
    let policy = policies.write("generators", &with_template(&format!("{modules}\nwarm = \"\"\"\n{warm}\n\"\"\"")));
    draw_in_forty(&mut ready_session(&["--policy", &policy]), "");
}

test!(Both, no_two_copies_of_numpy_draw_the_same_random_value, needs [DataScience, SlowAsUser], seconds 120);
fn no_two_copies_of_numpy_draw_the_same_random_value() {
    let numpy = "import numpy, pandas\nvalues.update(numpy=numpy.random.random(), generator=numpy.random.default_rng().random(), \
                 sample=pandas.Series(range(10 ** 6)).sample(3).tolist())";
    draw_in_forty(&mut ready_session(&["--policy", "data-science"]), numpy);
}

test!(Both, code_is_screened_before_a_copy_gets_it, seconds 90);
fn code_is_screened_before_a_copy_gets_it() {
    let policies = PolicyDirectory::new();
    let mut session = ready_session(&["--policy", &policies.write("screened", &derived("[screen]\ndestroy = \"deny\""))]);
    let denied = line("import shutil\nshutil.rmtree('/', ignore_errors=True)\nprint('ran')");
    for pauses in [true, false] {
        let result = asked(&mut session, &denied, pauses);
        assert_eq!(
            (&result["verdict"], &result["started"], &result["output"]),
            (&json!("screened"), &json!(false), &json!("")),
            "{result}"
        );
        let result = asked(&mut session, &line("print('ran')"), pauses);
        assert_eq!(result["output"], "ran\n");
        restored(&result);
    }
    session.close();
}

test!(Both, without_a_template_no_request_starts_from_a_copy, seconds 90);
fn without_a_template_no_request_starts_from_a_copy() {
    let policies = PolicyDirectory::new();
    // An ordinary user may have no cgroup here.
    let strict = policies.write("stricter", &derived_from("strict", "[degrade]\nrootless = { add = [\"cgroup\"] }"));
    let none = policies.write("none", &derived(NO_TEMPLATE));
    for policy in [strict, none] {
        let mut session = Session::open(&["--policy", &policy]);
        // As long as `strict` allows.
        let request = json!({"op": "run", "code": "", "limits": {"wall": "60s"}});
        for _ in 0..3 {
            not_restored(&asked(&mut session, &request, true), "prestarted", "");
            session.send(&format!("{request}\n{request}"));
            session.answer();
            not_restored(&session.answer(), AT_REQUEST, "");
        }
        // None was made either.
        assert!(!is_making(&session));
        session.close();
    }
}

test!(Both, a_request_says_whether_it_wants_a_copy, seconds 90);
fn a_request_says_whether_it_wants_a_copy() {
    let mut session = ready_session(&[]);
    let naming = |template: &str| json!({"op": "run", "code": "print(1)", "template": template, "limits": {"wall": scaled_limit(30_000)}});
    restored(&asked(&mut session, &naming("bare"), false));
    restored(&asked(&mut session, &naming("bare"), true));
    // What waits for it is a copy; the next time it is not.
    not_restored(&asked(&mut session, &naming("none"), true), AT_REQUEST, "the request asks for no copy");
    not_restored(&asked(&mut session, &naming("none"), false), AT_REQUEST, "the request asks for no copy");
    session.ask(naming("none"));
    not_restored(&asked(&mut session, &naming("none"), true), "prestarted", "the request asks for no copy");
    not_restored(&asked(&mut session, &line(""), true), "prestarted", "prepared for requests that get no copy");
    restored(&asked(&mut session, &line(""), true));
    // A name that would mean nothing is refused, here and without a session.
    for (language, template, says) in
        [("python", "data", "it has `bare`"), ("bash", "bare", "it has none"), ("python", "", "it has `bare`")]
    {
        let mut request = naming(template);
        request["language"] = json!(language);
        let error = session.ask(request)["error"].as_str().unwrap().to_owned();
        assert!(error.contains(says), "{error}");
        let alone = exec(json!({"code": "", "language": language, "template": template}));
        alone.refused("template_unknown", &["template: ", says]);
    }
    session.close();
    // Where there are no copies the receipt says so.
    let alone = exec(json!({"code": "print(1)", "template": "bare"}));
    assert_eq!((alone.output(), &alone["receipt"]["start"]), ("1\n", &json!("fresh")));
    assert_eq!(alone["receipt"]["start_cause"], "only requests of a session or a service get copies of a template");
    let alone = exec(json!({"code": "print(1)", "template": "none"}));
    assert_eq!((alone.output(), &alone["receipt"]["start_cause"]), ("1\n", &Value::Null));
}

test!(Both, where_no_copy_may_start_the_receipt_says_why, seconds 90);
fn where_no_copy_may_start_the_receipt_says_why() {
    let (policies, place) = (PolicyDirectory::new(), scratch());
    let approved = policies.write("approved", &derived("[screen]\nprocess = \"approve\""));
    let variable = policies.write("variable", &derived("[environment.set]\nPYTHONPATH = \"/scratch/lib\""));
    for (options, cause) in [
        (["--scratch", text(&place)], "the template was refused: scratch is a directory of the host"),
        (["--policy", &approved], "the template was refused: the policy asks for approvals"),
        (["--policy", &variable], "the template was refused: the policy sets a variable"),
    ] {
        let mut session = Session::open(&options);
        not_restored(&until_started(&mut session, "fresh", cause), "fresh", cause);
        session.close();
    }
    // What earlier code has left at home an interpreter may execute at its start.
    let mut session = ready_session(&[]);
    restored(&at_once(&mut session, &line("import os; open(os.path.expanduser('~/left'), 'w')")));
    not_restored(&at_once(&mut session, &line("")), AT_REQUEST, "home holds files");
    session.output("import os; os.remove(os.path.expanduser('~/left'))");
    restored(&at_once(&mut session, &line("")));
    session.close();
}

/// Makes calls of one name fail in all processes that a session starts from now on.
fn fail_calls_of(session: &Session, call: &str) -> Child {
    let pid = session.pid().to_string();
    let inject = format!("--inject={call}:error=ENOMEM");
    let mut command = Command::new("strace");
    command.args(["--follow-forks", "--quiet=all", "--output=/dev/null", &format!("--trace={call}"), &inject, "--attach", &pid]);
    let tracer = command.stdin(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let traced = || fs::read_to_string(format!("/proc/{pid}/status")).unwrap().contains(&format!("TracerPid:\t{}\n", tracer.id()));
    assert!(eventually(scaled(Duration::from_secs(10)), traced), "nothing is traced");
    tracer
}

test!(RootOnly, where_no_copy_can_be_made_a_fresh_interpreter_runs_the_program, needs [Program("strace")], seconds 90);
fn where_no_copy_can_be_made_a_fresh_interpreter_runs_the_program() {
    let mut session = ready_session(&[]);
    // The restorer moves the vDSO; no interpreter here asks for such a thing.
    let mut tracer = fail_calls_of(&session, "mremap");
    let program = "import os, sys; print(*(set(os.listdir()) - {os.path.basename(__file__)})); print(open('given').read(), file=sys.stderr); sys.exit(7)";
    let mut asked = line(program);
    asked["files"] = json!({"given": "text"});
    let result = at_once(&mut session, &asked);
    not_restored(&result, AT_REQUEST, "no copy could be made of the memory image: ");
    assert!(result["receipt"]["start_cause"].as_str().unwrap().contains("ENOMEM"), "{}", result["receipt"]);
    // It ran once, and nothing of the start before it is left.
    let told = (&result["verdict"], &result["code"], &result["output"], &result["error"]);
    assert_eq!(told, (&json!("exited"), &json!(7), &json!("given\n"), &json!("text\n")));
    kill(Pid::from_raw(tracer.id().cast_signed()), Signal::SIGTERM).unwrap();
    tracer.wait().unwrap();
    // The control: the session's next copies are made; and a copy cannot say that it is none.
    let says_so = "import os, sys\nfor fd in range(3, 64):\n    try: os.lseek(fd, 12, 0)\n    except OSError: pass\n\
                   print('stockade-restore: map contents: errno 12', file=sys.stderr); sys.exit(125)";
    let result = at_once(&mut session, &line(says_so));
    restored(&result);
    assert_eq!((&result["verdict"], &result["code"], &result["started"]), (&json!("exited"), &json!(125), &json!(true)));
    session.close();
}

/// What `templates ls` prints of the one template of a policy, and its status.
fn listed(policy: &str) -> (Option<i32>, String) {
    let output = stockade(["templates", "ls", "--policy", policy]).output().unwrap();
    assert!(output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
    (output.status.code(), String::from_utf8(output.stdout).unwrap())
}

/// Templates that must be refused, and what is said of each.
fn bad_templates() -> Vec<(String, &'static str)> {
    let warm = |code: &str| format!("[templates.bare]\nwarm = '''\n{code}\n'''\n");
    let limit = |name: &str, value: &str| format!("[limits]\n{name} = \"{value}\"\n");
    let thread = "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()";
    let child = "import subprocess, sys\nsys.kept = subprocess.Popen(['sleep', '60'])";
    vec![
        (warm(thread), "2 threads"),
        (warm("import sys\nsys.kept = open('/etc/passwd')"), "is open: /etc/passwd"),
        (warm("import socket, sys\nsys.kept = socket.socketpair()"), "is open: socket:"),
        (warm("1 / 0"), "ZeroDivisionError"),
        (warm("import os\nos._exit(3)"), "ended as Exited with status 3"),
        (warm(child), "a child process"),
        (warm("import os, time\nif not os.fork(): time.sleep(60)"), "a child process"),
        (warm("import random, sys\nsys.kept = random.Random()"), "a generator that would repeat: random.Random"),
        (warm("import gc, random, sys\nsys.kept = random.Random()\ngc.freeze()"), "a generator that would repeat: random.Random"),
        (warm("import _random, sys\nsys.kept = _random.Random()"), "a generator that would repeat: _random.Random"),
        (warm("import gc\ngc.disable()"), "a copy differs from a fresh start"),
        // Its state is in no object that a template looks for: the copies are compared.
        (warm("import random\nrandom.random = iter(range(9)).__next__"), "two copies draw the same random values: random"),
        (warm("import sys\nsys.setrecursionlimit(500)"), "a copy differs from a fresh start"),
        (warm("while True: pass") + &limit("wall", &scaled_limit(2_000)), "WallTimeout"),
        (limit("file_size", "1MiB"), "write the contents: errno 27"),
        (limit("output_size", "1KiB") + "[limits.max]\noutput_size = \"1KiB\"\n", "printed more than the policy's output_size keeps"),
        (String::from("[templates.bare]\nimports = [\"no_such_module\"]"), "ModuleNotFoundError"),
    ]
}

test!(Both, a_template_that_is_refused_costs_a_session_nothing_else, seconds 180);
fn a_template_that_is_refused_costs_a_session_nothing_else() {
    let policies = PolicyDirectory::new();
    for (lines, cause) in bad_templates() {
        let policy = policies.write("bad", &derived(&lines));
        let (status, said) = listed(&policy);
        assert!(status == Some(1) && said.contains("refused: ") && said.contains(cause), "{status:?} {said}");
        let mut session = Session::open(&["--policy", &policy]);
        assert_eq!(session.output("print(6 * 7)"), "42\n", "{lines}");
        let result = until_started(&mut session, "fresh", "the template was refused: ");
        assert!(result["receipt"]["start_cause"].as_str().unwrap().contains(cause), "{}", result["receipt"]);
        not_restored(&asked(&mut session, &line(""), true), "prestarted", "");
        // It is not tried again.
        assert!(!is_making(&session));
        session.close();
    }
    let policy = policies.write("good", &with_template("warm = '''\nimport json\njson.dumps({})\n'''"));
    let (status, said) = listed(&policy);
    assert!(status == Some(0) && said.contains("made and tried in"), "{status:?} {said}");
    ready_session(&["--policy", &policy]).close();
}

test!(Both, a_template_says_what_it_was_made_from_however_little_a_model_reads, seconds 90);
fn a_template_says_what_it_was_made_from_however_little_a_model_reads() {
    let policies = PolicyDirectory::new();
    let names = ["json", "logging", "email", "sqlite3", "asyncio", "zipfile"];
    let policy = policies.write("little", &with_template(&format!("imports = {names:?}\n[limits]\noutput_size = \"256B\"")));
    let mut session = ready_session(&["--policy", &policy]);
    for name in names {
        let mut request = line(&format!("import {name}; print({name}.own)"));
        request["files"] = json!({format!("{name}.py"): "own = 'own'"});
        let result = at_once(&mut session, &request);
        not_restored(&result, AT_REQUEST, "has the name of a module");
        assert_eq!(result["output"], "own\n", "{name}: {result}");
        assert_eq!(session.ask(json!({"op": "reset"}))["ok"], true);
    }
    session.close();
}

test!(Both, what_a_template_says_of_its_files_tells_nothing_of_others, seconds 90);
fn what_a_template_says_of_its_files_tells_nothing_of_others() {
    let policies = PolicyDirectory::new();
    let hidden = policies.0.join("hidden");
    fs::create_dir(&hidden).unwrap();
    fs::write(hidden.join("present"), "").unwrap();
    // It says of this path what it may say of the first of its own.
    let say = |path: &str| {
        let warm = format!(
            "import os\nwrite = os.write\ndef say(to, data):\n    if b'made from' not in data: return write(to, data)\n    line = data[data.index(b'\\nfile ') + 1:].split(b'\\n')[0]\n    \
             path = {path:?}.encode() or line.rsplit(b' ', 1)[1]\n    \
             return write(to, data.replace(b'\\nend\\n', b'\\n' + line.rsplit(b' ', 1)[0] + b' ' + path + b'\\nend\\n'))\n\
             os.write = say"
        );
        listed(&policies.write("says", &with_template(&format!("warm = '''\n{warm}\n'''"))))
    };
    let said = ["present", "absent!"].map(|name| {
        let (status, said) = say(text(&hidden.join(name)));
        assert!(status == Some(1) && said.contains("was changed while it was made, or cannot be found"), "{status:?} {said}");
        said.replace(name, "NAME")
    });
    assert_eq!(said[0], said[1]);
    // The control: it may say so of its own.
    let (status, said) = say("");
    assert!(status == Some(0) && said.contains("made and tried in"), "{status:?} {said}");
}

test!(Both, a_template_whose_maker_was_killed_is_made_once_more, seconds 120);
fn a_template_whose_maker_was_killed_is_made_once_more() {
    for (kills, refused) in [(1, false), (3, true)] {
        let mut session = Session::open(&[]);
        let mut killed = BTreeSet::new();
        let all = eventually(MADE, || {
            // A session that is asked nothing makes none anew.
            session.ask(line(""));
            thread::sleep(Duration::from_millis(10));
            let maker = makers(&session).into_iter().find(|pid| !killed.contains(pid));
            if let Some(maker) = maker.filter(|_| killed.len() < kills) {
                kill(Pid::from_raw(maker.cast_signed()), Signal::SIGKILL).unwrap();
                killed.insert(maker);
            }
            killed.len() == kills
        });
        assert!(all, "only {killed:?} were made");
        match refused {
            false => restored(&until_started(&mut session, "restored", "")),
            true => not_restored(&until_started(&mut session, "fresh", "the template was refused: "), "fresh", "without a word"),
        }
        session.close();
    }
}

test!(Both, a_template_that_needs_more_memory_than_a_run_may_have_is_refused, needs [Cgroup], seconds 60);
fn a_template_that_needs_more_memory_than_a_run_may_have_is_refused() {
    let policies = PolicyDirectory::new();
    let small = "[limits]\nmemory = \"12MiB\"\ntmp_size = \"1MiB\"\nscratch_size = \"1MiB\"";
    let (status, said) = listed(&policies.write("small", &derived(small)));
    assert!(status == Some(1) && said.contains("OutOfMemory"), "{status:?} {said}");
    assert_eq!(listed("default").0, Some(0));
}

test!(Both, a_file_with_the_name_of_an_imported_module_is_what_code_imports, seconds 90);
fn a_file_with_the_name_of_an_imported_module_is_what_code_imports() {
    let policies = PolicyDirectory::new();
    let mut session = ready_session(&["--policy", &policies.write("json", &with_template("imports = [\"json\"]"))]);
    let (import, own) = ("import json; print(getattr(json, 'own', 'none'))", "own = 'own'");
    let shadowed = "has the name of a module";
    let of_copy = at_once(&mut session, &line(import));
    restored(&of_copy);
    // A file of the request.
    for path in ["json.py", "json/__init__.py"] {
        let request = json!({"op": "run", "code": import, "files": {path: own}});
        let result = at_once(&mut session, &request);
        not_restored(&result, AT_REQUEST, shadowed);
        assert_eq!(result["output"], "own\n", "{path}");
        // But for how its process came to be, it is the same run.
        assert_eq!(layers(&result), layers(&of_copy));
        assert_eq!(session.ask(json!({"op": "reset"}))["ok"], true);
        let result = asked(&mut session, &request, true);
        not_restored(&result, "fresh", "");
        assert_eq!(result["output"], "own\n", "{path}");
        assert_eq!(session.ask(json!({"op": "reset"}))["ok"], true);
    }
    // What the client writes, and what earlier code has left.
    for left_by_code in [false, true] {
        match left_by_code {
            false => session.write("json.py", json!(own)),
            true => assert_eq!(session.output(&format!("open('json.py', 'w').write({own:?})")), ""),
        }
        let result = at_once(&mut session, &line(import));
        not_restored(&result, AT_REQUEST, shadowed);
        assert_eq!(result["output"], "own\n");
        let result = asked(&mut session, &line(import), true);
        not_restored(&result, "prestarted", "");
        assert_eq!(result["output"], "own\n");
        // A file of another name, or elsewhere, is in no copy's way.
        let remove = "import os, shutil\nos.remove('json.py')\nshutil.rmtree('__pycache__', True)\nos.makedirs('d', exist_ok=True)\n\
                      open('d/json.py', 'w')\nopen('json5.py', 'w')";
        assert_eq!(session.output(remove), "");
        let result = at_once(&mut session, &line(import));
        restored(&result);
        assert_eq!(result["output"], "none\n");
    }
    session.close();
}

test!(Both, what_is_left_under_the_name_of_the_templates_programs_holds_copies_back, seconds 90);
fn what_is_left_under_the_name_of_the_templates_programs_holds_copies_back() {
    let mut session = ready_session(&[]);
    let names = "import os\nprint([name for name in os.listdir('.') if name != os.path.basename(__file__)])";
    let taken = "has the name that the template's programs have";
    for leave in ["os.remove(__file__); os.mkdir(__file__)", "os.rename(__file__, __file__ + '~')", "open(__file__ + 'x', 'w')"] {
        restored(&at_once(&mut session, &line(&format!("import os\n{leave}"))));
        for _ in 0..2 {
            let result = at_once(&mut session, &line(names));
            not_restored(&result, AT_REQUEST, taken);
            assert!(result["output"].as_str().unwrap().starts_with("['stockade_"), "{result}");
            not_restored(&asked(&mut session, &line(""), true), "prestarted", taken);
        }
        let remove = "import os\nfor name in os.listdir('.'):\n    if name != os.path.basename(__file__):\n        os.rmdir(name) if os.path.isdir(name) else os.remove(name)";
        assert_eq!(session.output(remove), "");
        restored(&at_once(&mut session, &line("")));
        restored(&asked(&mut session, &line(""), true));
    }
    // A symlink goes with the program's file, as at any other start.
    restored(&at_once(&mut session, &line("import os\nos.remove(__file__); os.symlink('/etc/passwd', __file__)")));
    restored(&at_once(&mut session, &line("")));
    assert_eq!(session.ask(json!({"op": "list", "path": "."}))["entries"], json!([]));
    session.close();
}

/// Where the interpreter keeps a function.
#[track_caller]
fn layout(result: &Value) -> &str {
    restored(result);
    result["output"].as_str().unwrap()
}

test!(Both, an_image_is_made_anew_after_so_many_runs_and_at_such_an_age, seconds 120);
fn an_image_is_made_anew_after_so_many_runs_and_at_such_an_age() {
    let policies = PolicyDirectory::new();
    for lines in ["max_runs = 3", "max_age = \"2s\""] {
        let mut session = ready_session(&["--policy", &policies.write("renewed", &with_template(lines))]);
        let mut layouts = BTreeSet::new();
        let is_renewed = eventually(MADE, || {
            thread::sleep(Duration::from_millis(30));
            let result = session.run("print(id(print), hash('x'))");
            // While the next is made there may be none.
            if result["receipt"]["start"] == "restored" {
                layouts.insert(layout(&result).to_owned());
            }
            layouts.len() > 2
        });
        assert!(is_renewed, "{lines}: {layouts:?}");
        session.close();
    }
    // The control: within such bounds it is the same.
    let mut session = ready_session(&["--policy", "default"]);
    let begun = Instant::now();
    let mut layouts = BTreeSet::new();
    while layouts.len() < 2 && begun.elapsed() < scaled(Duration::from_secs(4)) {
        thread::sleep(Duration::from_millis(30));
        layouts.insert(layout(&session.run("print(id(print), hash('x'))")).to_owned());
    }
    assert_eq!(layouts.len(), 1, "{layouts:?}");
    session.close();
}

/// Puts another interpreter in the place of this one.
fn replace(own: &Path) {
    fs::create_dir_all(own.parent().unwrap()).unwrap();
    fs::copy("/usr/bin/python3", own.with_extension("new")).unwrap();
    fs::rename(own.with_extension("new"), own).unwrap();
}

test!(Both, a_template_whose_interpreter_is_replaced_meanwhile_is_made_once_more, seconds 120);
fn a_template_whose_interpreter_is_replaced_meanwhile_is_made_once_more() {
    let policies = PolicyDirectory::new();
    let own = policies.0.join("env/bin/python3");
    let policy = policies.write("slow", &with_template("warm = \"import time; time.sleep(1)\""));
    for (times, refused) in [(1, false), (3, true)] {
        replace(&own);
        let mut session = Session::open(&["--policy", &policy, "--runtime", &format!("python={}", text(&own))]);
        let mut seen = BTreeSet::new();
        let all = eventually(MADE, || {
            session.ask(line(""));
            thread::sleep(Duration::from_millis(20));
            for maker in makers(&session).into_iter().filter(|_| seen.len() < times).collect::<Vec<_>>() {
                if seen.insert(maker) {
                    // It has begun by then, and is not done: one that is replaced before is the template's.
                    thread::sleep(Duration::from_millis(400));
                    replace(&own);
                }
            }
            seen.len() == times
        });
        assert!(all, "only {seen:?} were made");
        match refused {
            false => restored(&until_started(&mut session, "restored", "")),
            true => {
                not_restored(&until_started(&mut session, "fresh", "the template was refused: "), "fresh", "was changed while it was made")
            }
        }
        session.close();
    }
}

test!(Both, an_interpreter_that_is_replaced_is_the_next_request_s, seconds 90);
fn an_interpreter_that_is_replaced_is_the_next_request_s() {
    let policies = PolicyDirectory::new();
    let own = policies.0.join("env/bin/python3");
    let replace = || replace(&own);
    replace();
    let mut session = ready_session(&["--runtime", &format!("python={}", text(&own))]);
    let show = "import sys; print(sys.executable)";
    let result = at_once(&mut session, &line(show));
    assert_eq!(result["output"], format!("{}\n", text(&own)));
    restored(&result);
    // No sandbox is prepared between two lines that come together.
    session.send(&line("import time; time.sleep(0.5)").to_string());
    session.send(&line(show).to_string());
    thread::sleep(scaled(Duration::from_millis(100)));
    replace();
    session.answer();
    not_restored(&session.answer(), AT_REQUEST, "is another one than that of the template, which is made anew");
    until_started(&mut session, "restored", "");
    // Also for a client that leaves no pause.
    interpreter(&session);
    replace();
    session.send(&line("").to_string());
    let mut starts = BTreeSet::new();
    let is_made = eventually(MADE, || {
        session.send(&line("import time; time.sleep(0.05)").to_string());
        starts.insert(session.answer()["receipt"]["start"].as_str().unwrap().to_owned());
        starts.contains("restored")
    });
    assert!(is_made && starts.len() > 1, "{starts:?}");
    session.answer();
    // Nor does one take it that waits.
    interpreter(&session);
    replace();
    let result = session.ask(line(show));
    not_restored(&result, "fresh", "");
    assert_eq!(result["receipt"]["start_cause"].as_str().unwrap().matches("another one than").count(), 1, "{}", result["receipt"]);
    until_started(&mut session, "restored", "");
    session.close();
}

/// The processes that make templates of a session.
fn makers(session: &Session) -> Vec<u32> {
    let all = children(session.pid().as_raw().unsigned_abs());
    let makes =
        |pid: &u32| fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| String::from_utf8_lossy(&line).contains("templates\0make\0"));
    all.into_iter().filter(makes).collect()
}

fn is_making(session: &Session) -> bool {
    !makers(session).is_empty()
}

/// Waits for every child, and what has become one.
#[track_caller]
fn no_child_is_left() {
    let none = || loop {
        match waitpid(None, Some(WaitPidFlag::WNOHANG)) {
            Err(Errno::ECHILD) => return true,
            Ok(WaitStatus::StillAlive) => return false,
            _ => {}
        }
    };
    assert!(eventually(Duration::from_secs(10), none), "left: {:?}", children(std::process::id()));
}

test!(serial Both, the_process_that_makes_a_template_ends_with_its_session, seconds 120);
fn the_process_that_makes_a_template_ends_with_its_session() {
    // What loses its parent becomes a child of this process.
    rustix::process::set_child_subreaper(Some(rustix::process::getpid())).unwrap();
    let policies = PolicyDirectory::new();
    let for_ever = policies.write("for-ever", &with_template("warm = \"while True: pass\""));
    let mounts_before = mounts();
    let mut launchers = BTreeSet::new();
    for policy in [for_ever.as_str(), "default"] {
        for (signal, milliseconds) in
            [(None, 0), (None, 150), (Some(Signal::SIGTERM), 50), (Some(Signal::SIGKILL), 0), (Some(Signal::SIGKILL), 100)]
        {
            let mut session = Session::open(&["--policy", policy]);
            let mut made_by = Vec::new();
            let makes = eventually(Duration::from_secs(10), || {
                made_by = makers(&session);
                !made_by.is_empty()
            });
            assert!(makes, "no template is made");
            thread::sleep(Duration::from_millis(milliseconds));
            launchers.extend(made_by);
            launchers.insert(session.child.id());
            match signal {
                None => session.end_input(),
                Some(signal) => kill(session.pid(), signal).unwrap(),
            }
            session.ended();
            no_child_is_left();
            if signal != Some(Signal::SIGKILL) {
                assert_eq!((cgroups_of(&launchers), dead_records()), (Vec::new(), Vec::new()), "{policy} {signal:?} {milliseconds}");
            } else {
                // The session's own are cleared away by the next start, as ever.
                the_next_start_has_swept(&launchers);
            }
            assert_eq!(mounts(), mounts_before);
        }
    }
}

test!(serial Both, a_session_whose_template_is_made_does_nothing_while_it_waits, seconds 60);
fn a_session_whose_template_is_made_does_nothing_while_it_waits() {
    let mut session = ready_session(&[]);
    interpreter(&session);
    let ready = prepared_sandbox(&session);
    let switches = || {
        let status = fs::read_to_string(format!("/proc/{}/status", session.pid())).unwrap();
        status.lines().filter(|line| line.contains("ctxt_switches")).map(str::to_owned).collect::<Vec<_>>()
    };
    // It may still be on its way to its wait.
    let mut before = switches();
    assert!(eventually(Duration::from_secs(5), || {
        thread::sleep(Duration::from_millis(100));
        std::mem::replace(&mut before, switches()) == before
    }));
    thread::sleep(Duration::from_millis(500));
    assert_eq!((switches(), waiting(&session), makers(&session)), (before, Some(ready), Vec::new()));
    restored(&session.run(""));
    session.close();
}

test!(Both, templates_ls_prints_what_came_of_each_template, seconds 60);
fn templates_ls_prints_what_came_of_each_template() {
    let policies = PolicyDirectory::new();
    let two = "[templates.other]\nimports = [\"json\", \"re\"]\nwarm = \"1 / 0\"\n\
               [runtimes.second]\ncommand = [\"/usr/bin/python3\", \"{file}\"]\nextension = \"py\"\ntemplate = \"other\"";
    let policy = policies.write("two", &derived(two));
    let (status, said) = listed(&policy);
    let [first, second] = said.lines().collect::<Vec<_>>()[..] else { panic!("{said}") };
    assert!(first.starts_with("bare: python with nothing imported; an image of ") && first.ends_with(" ms"), "{first}");
    assert_eq!(second, "other: second with json, re imported; refused: ZeroDivisionError: division by zero");
    assert_eq!(status, Some(1));
    let output = stockade(["templates", "ls", "--json", "--policy", &policy]).output().unwrap();
    let mut all: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((output.status.code(), &all["schema"], &all["policy"]), (Some(1), &json!(1), &json!(policy)));
    for template in all["templates"].as_array_mut().unwrap() {
        assert!(template["making_ms"].take().as_u64().is_some_and(|ms| ms > 10), "{template}");
    }
    assert!(all["templates"][0]["image_bytes"].take().as_u64().is_some_and(|bytes| bytes > 1 << 20));
    let refused = "ZeroDivisionError: division by zero";
    assert_eq!(
        all["templates"],
        json!([
            {"name": "bare", "runtime": "python", "imports": [], "image_bytes": null, "refused": null, "making_ms": null},
            {"name": "other", "runtime": "second", "imports": ["json", "re"], "image_bytes": null, "refused": refused, "making_ms": null},
        ])
    );
    // A policy without templates, and one that there is not.
    assert_eq!(listed("strict"), (Some(0), String::from("policy strict has no template\n")));
    let output = stockade(["templates", "ls", "--json", "--policy", "strict"]).output().unwrap();
    let all: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(all, json!({"schema": 1, "policy": "strict", "templates": []}));
    let output = stockade(["templates", "ls", "--policy", "no-such-policy"]).output().unwrap();
    assert!(output.status.code() == Some(2) && String::from_utf8_lossy(&output.stderr).contains("there is no policy"), "{output:?}");
}

test!(Both, what_a_program_leaves_in_a_module_of_the_image_ends_as_in_a_fresh_start, seconds 90);
fn what_a_program_leaves_in_a_module_of_the_image_ends_as_in_a_fresh_start() {
    let policies = PolicyDirectory::new();
    let mut session = ready_session(&["--policy", &policies.write("logging", &with_template("imports = [\"logging\"]"))]);
    for code in [
        "import os\nos.file = open('left', 'w'); os.file.write('written')",
        "import logging\nlogging.getLogger().addHandler(logging.StreamHandler(open('left', 'w'))); logging.error('written')",
        "import os\nclass Last:\n    file = open('left', 'w')\n    def __del__(self): self.file.write('written'); self.file.close()\nos.last = Last()",
        "import os\ndef last(write, left):\n    try: yield\n    finally: write(left, b'written')\nos.last = last(os.write, os.open('left', os.O_CREAT | os.O_WRONLY)); next(os.last)",
    ] {
        restored(&at_once(&mut session, &line(code)));
        let left = session.ask(json!({"op": "read", "path": "left"}));
        assert_eq!(left["text"].as_str().map(str::trim_end), Some("written"), "{code}: {left}");
        session.output("import os; os.remove('left')");
    }
    session.close();
}
