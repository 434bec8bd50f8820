//! Languages that are compiled: compiler and program are two runs of the policy that share what code
//! may write. The compiler is a shell's script where a test says what it does.

use std::{path::Path, process::Command, time::Duration};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::{Value, json};

use super::approval::token_of;
use crate::support::{
    audit_log::{is_whole, own_log, records},
    exec::{ExecResult, exec_with, run_with_stdin, scratch, start, stockade, text, write_file},
    leftovers::{host_process_with, names, no_process_is_left},
    policy_dir::{PolicyDirectory, derived, derived_from},
    runner::{directory, eventually, test},
    session::Session,
    timeouts::{scaled, scaled_limit},
};

pub(super) const C: &str = r#"
[runtimes.c]
compile = ["/usr/bin/gcc", "-O1", "-o", "{output}", "{file}"]
command = ["{output}"]
extension = "c"
"#;

/// A language whose compiler is this script of a shell, with the code in `$0` and the output in `$1`.
/// What it makes is run by a shell.
fn compiled_by(script: &str) -> String {
    format!(
        "[runtimes.made]\ncompile = [\"/usr/bin/sh\", \"-c\", {script:?}, \"{{file}}\", \"{{output}}\"]\ncommand = [\"/usr/bin/sh\", \"{{output}}\"]\nextension = \"sh\"\n"
    )
}

const COPIES: &str = "cp $0 $1";

/// A request, with the time that a slow machine needs for each of its runs.
fn patient(mut request: Value) -> Value {
    for limits in ["limits", "compile_limits"] {
        if request[limits].get("wall").is_none() {
            request[limits]["wall"] = json!(scaled_limit(30_000));
        }
    }
    request
}

fn ask(policy: &str, request: Value) -> ExecResult {
    exec_with(&["--policy", policy], patient(request))
}

fn made(code: &str) -> Value {
    json!({ "code": code, "language": "made" })
}

test!(Both, a_program_in_c_is_compiled_and_run, needs [Program("gcc")], seconds 60);
fn a_program_in_c_is_compiled_and_run() {
    let (place, log) = (PolicyDirectory::new(), own_log());
    let policy = place.write("c", &derived(C));
    let code = r#"
#include <stdio.h>
#include "x.h"
int main(int count, char **words) {
    char line[16] = "";
    fgets(line, sizeof line, stdin);
    fprintf(fopen("out", "w"), "%d", X);
    fprintf(stderr, "%d %s", count, words[0]);
    printf("%s %s", words[1], line);
    return 3;
}"#;
    let request = json!({
        "code": code, "language": "C", "files": {"x.h": "#define X 7\n"}, "args": ["arg"], "stdin": "in", "collect": ["*"], "id": "k",
    });
    let done = ask(&policy, request);
    done.expect(json!({ "verdict": "exited", "code": 3, "output": "arg in", "error": "2 /tmp/compiled", "started": true, "id": "k" }));
    let compile = &done["compile"];
    assert_eq!((&compile["verdict"], &compile["code"], &compile["output"]), (&json!("exited"), &json!(0), &json!("")), "{compile}");
    // The code's file is gone, and of what the compiler made nothing is in scratch.
    let found: Vec<_> = done["files"].as_array().unwrap().iter().map(|file| file["path"].as_str().unwrap()).collect();
    assert_eq!((found, &done.file("out")["text"]), (vec!["out", "x.h"], &json!("7")));
    // Each is a run of its own: with the same layers, another plan and a record that says so.
    let layers = |receipt: &Value| -> Vec<Value> {
        receipt["layers"].as_array().unwrap().iter().map(|layer| json!([layer["layer"], layer["known"]])).collect()
    };
    assert_eq!(layers(&compile["receipt"]), layers(&done["receipt"]));
    assert_ne!(compile["receipt"]["plan_sha256"], done["receipt"]["plan_sha256"]);
    let records = records(&log);
    let [_opened, compiler, program] = &records[..] else { panic!("{records:?}") };
    assert_eq!((&compiler["run"], &program["run"]), (&compile["audit"]["run"], &done["audit"]["run"]));
    assert_eq!((&compiler["compiles"], &program["compiles"]), (&program["run"], &Value::Null));
    assert_eq!((&compiler["status"], &program["status"], &compiler["id"]), (&json!(0), &json!(3), &json!("k")));
    assert_eq!(compiler["code"]["sha256"], program["code"]["sha256"]);
    is_whole();
    // A control: another language has no such part.
    assert!(ask(&policy, json!({ "code": "print(1)" })).succeeded()["compile"].is_null());
}

test!(Both, code_that_does_not_compile_is_a_result_of_its_own, needs [Program("gcc")], seconds 60);
fn code_that_does_not_compile_is_a_result_of_its_own() {
    let (place, log) = (PolicyDirectory::new(), own_log());
    let policy = place.write("c", &derived(&format!("[audit]\nmode = \"required\"\n{C}")));
    let done = ask(&policy, json!({ "code": "int main() { return x; }", "language": "c", "encoding": "text" }));
    done.expect(json!({ "verdict": "exited", "code": 1, "reason": "compile_failed", "started": false, "success": false, "output": "" }));
    assert!(done.error().contains("'x' undeclared") || done.error().contains("‘x’ undeclared"), "{}", done.error());
    assert_eq!((&done["compile"]["error"], &done["compile"]["code"]), (&done["error"], &json!(1)));
    // Begun and ended are the compiler's run, and the request's own ends without having begun.
    let written: Vec<_> =
        records(&log).iter().skip(1).map(|record| json!([record["event"], record["started"], record["reason"]])).collect();
    assert_eq!(written, [json!(["begun", null, null]), json!(["run", true, null]), json!(["run", false, "compile_failed"])]);
    // The control, whose program is to blame itself.
    let late = ask(&policy, json!({ "code": "int main() { for (;;); }", "language": "c", "limits": {"wall": "300ms"} }));
    late.expect(json!({ "verdict": "wall_timeout", "reason": null, "started": true }));
    assert_eq!(late["compile"]["code"], 0);
}

test!(Both, the_compiler_has_limits_of_its_own, needs [Cgroup], seconds 60);
fn the_compiler_has_limits_of_its_own() {
    let place = PolicyDirectory::new();
    let sleeps = place.write("sleeps", &derived(&compiled_by("sleep 1; cp $0 $1")));
    let slow = ask(&sleeps, json!({ "code": "echo ran", "language": "made", "compile_limits": {"wall": "300ms"} }));
    slow.expect(json!({ "verdict": "wall_timeout", "code": 124, "reason": "compile_failed", "started": false }));
    // The controls: the program's clock is not the compiler's, nor the other way round.
    let limits = json!({"wall": scaled_limit(600)});
    ask(&sleeps, json!({ "code": "echo ran", "language": "made", "limits": limits })).succeeded().expect(json!({ "output": "ran\n" }));
    let late = json!({ "code": "sleep 60", "language": "made", "limits": {"wall": "300ms"} });
    ask(&sleeps, late).expect(json!({ "verdict": "wall_timeout", "reason": null, "started": true }));
    // What the program may have of memory is not what the compiler needs, and is by default the policy's.
    let eats = place.write("eats", &derived(&compiled_by("head -c 150m /dev/zero | tail > /dev/null; cp $0 $1")));
    let small = json!({ "code": "echo ran", "language": "made", "limits": {"memory": "64MiB"} });
    let done = ask(&eats, small.clone());
    done.succeeded().expect(json!({ "output": "ran\n" }));
    let limit = |of: &Value| of["limits"]["memory_bytes"].as_u64().unwrap() >> 20;
    assert_eq!((limit(&done["compile"]), limit(&done.result)), (512, 64));
    let mut both = small;
    both["compile_limits"] = json!({"memory": "64MiB"});
    ask(&eats, both).expect(json!({ "verdict": "out_of_memory", "reason": "compile_failed", "started": false }));
    for (limits, reason, words) in [
        (json!({"wall": "20min"}), "limit_above_maximum", &["compile the code: ", "[limits.max]"][..]),
        (json!({"wally": "1s"}), "unknown_limit", &["compile_limits: there is no limit `wally`"]),
        (json!({"wall": "1day"}), "limit_malformed", &["compile_limits.wall: "]),
        (json!({"tmp_size": "1MiB"}), "limit_malformed", &["compile_limits.tmp_size: ", "`limits`"]),
    ] {
        let request = json!({ "code": "", "language": "made", "compile_limits": limits });
        exec_with(&["--policy", &sleeps], request).refused(reason, words);
    }
}

test!(Both, the_compiler_gets_nothing_of_the_program_but_its_code_and_files, seconds 60);
fn the_compiler_gets_nothing_of_the_program_but_its_code_and_files() {
    let place = PolicyDirectory::new();
    let script = "echo $#:$EXTRA:$(cat):$(ls):$(id -u):$(ls /proc | grep -c '^[0-9]') >&2; (sleep 60 &); echo left > left; echo cp $0 > /tmp/left; cp $0 $1";
    let policy = place.write("made", &derived(&format!("[environment]\naccept = {{ add = [\"EXTRA\"] }}\n{}", compiled_by(script))));
    let code = "echo $#:$EXTRA:$(cat):$(ls):$(cat /tmp/left):$(cat /proc/[0-9]*/comm | grep -c sleep)";
    let request = json!({
        "code": code, "language": "made", "env": {"EXTRA": "e"}, "args": ["a"], "stdin": "in", "files": {"f": "1"},
    });
    let done = ask(&policy, request);
    // Nothing of the compiler's run goes on, and its files are there.
    done.succeeded().expect(json!({ "output": "1:e:in:f left:cp /scratch/main.sh:0\n" }));
    let said = done["compile"]["error"].as_str().unwrap();
    assert!(said.starts_with("1:::f main.sh:1000:"), "{said}");
    // A compiler of the same code in another request finds neither.
    let again = ask(&policy, made("ls /tmp"));
    assert_eq!(again.succeeded().output(), "compiled\nleft\n");
    assert!(again["compile"]["error"].as_str().unwrap().starts_with("1:::main.sh:"), "{}", again["compile"]);
}

test!(Both, a_host_scratch_keeps_what_code_wrote_and_nothing_else, seconds 60);
fn a_host_scratch_keeps_what_code_wrote_and_nothing_else() {
    let (place, scratch) = (PolicyDirectory::new(), scratch());
    let policy = place.write("made", &derived(&compiled_by("cp $0 $1; echo c > by_compiler")));
    write_file(&scratch.join("data"), "there");
    let mut request = made("cat data by_compiler; echo p > by_program");
    request["scratch"] = json!(text(&scratch));
    ask(&policy, request.clone()).succeeded().expect(json!({ "output": "therec\n" }));
    let found: Vec<_> = names(&scratch).into_iter().collect();
    assert_eq!(found, ["by_compiler", "by_program", "data"]);
    // Where it is read-only the code lies elsewhere, and the rest is as before.
    let policy = place.write("ro", &derived(&format!("[scratch]\naccess = \"ro\"\n{}", compiled_by(COPIES))));
    ask(&policy, json!({ "code": "cat data; touch x || echo no", "language": "made", "scratch": text(&scratch) }))
        .succeeded()
        .expect(json!({ "output": "thereno\n" }));
    assert_eq!(names(&scratch).len(), 3);
}

test!(Both, a_session_compiles_each_request_and_keeps_its_files_alone, seconds 60);
fn a_session_compiles_each_request_and_keeps_its_files_alone() {
    let place = PolicyDirectory::new();
    // The output is a directory with something in it.
    let script = "mkdir -p $1.d/sub && cp $0 $1.d/sub/x && mv $1.d $1";
    let lines = compiled_by(script).replace("sh\", \"{output}\"]", "sh\", \"{output}/sub/x\"]");
    let policy = place.write("made", &derived(&lines));
    let mut session = Session::open(&["--policy", &policy]);
    let mut run = |language: &str, code: &str| {
        let mut line = patient(json!({ "code": code, "language": language }));
        line["op"] = json!("run");
        session.ask(line)
    };
    for number in 1..4 {
        let done = run("made", "echo x >> kept; cat kept; ls /tmp | wc -l");
        assert_eq!(done["output"], json!(format!("{}1\n", "x\n".repeat(number))), "{done}");
        // An interpreter that waited would have waited while a compiler ran.
        let python = run("python", "import os; print(os.listdir('/tmp'), os.path.getsize('kept'))");
        assert_eq!(python["output"], json!(format!("[] {}\n", number * 2)), "{python}");
    }
    let failed = run("made", "exit 4");
    assert_eq!((&failed["code"], &failed["compile"]["code"]), (&json!(4), &json!(0)), "{failed}");
    session.close();
}

test!(Both, what_a_compiler_that_fails_has_written_does_not_stay_in_a_session, seconds 60);
fn what_a_compiler_that_fails_has_written_does_not_stay_in_a_session() {
    let place = PolicyDirectory::new();
    let kept = "echo x >> /tmp/compiled; head -c 65536 /dev/zero > $1; ls /tmp | wc -l";
    let script = format!("{kept}; case $(cat $0) in exits) exit 3;; killed) kill -9 $$;; late) sleep 600;; esac; cp $0 $1");
    let policy = place.write("made", &derived(&compiled_by(&script)));
    let mut session = Session::open(&["--policy", &policy]);
    let mut run = |code: &str| {
        let mut line = patient(json!({ "op": "run", "code": code, "language": "made" }));
        if code == "late" {
            line["compile_limits"]["wall"] = json!("1s");
        }
        session.ask(line)
    };
    for code in ["exits", "killed", "late"] {
        let failed = run(code);
        assert_eq!((&failed["started"], &failed["reason"]), (&json!(false), &json!("compile_failed")), "{failed}");
        // The control: it was there while the compiler ran, beside the file that a session keeps.
        assert_eq!(failed["compile"]["output"], "2\n", "{failed}");
    }
    let ran = run("ls /tmp | wc -l; wc -l < /tmp/compiled");
    assert_eq!(ran["output"], "2\n4\n", "{ran}");
    session.close();
}

test!(Both, a_run_is_cancelled_while_its_code_is_compiled, seconds 60);
fn a_run_is_cancelled_while_its_code_is_compiled() {
    let place = PolicyDirectory::new();
    let words = format!("cancelled-compiler-{}", std::process::id());
    let policy = place.write("made", &derived(&compiled_by(&format!(": {words}; sleep 60; cp $0 $1"))));
    let mut command = stockade(["exec", "--policy", &policy]);
    let child = start(&mut command, made("echo ran").to_string().as_bytes());
    assert!(eventually(scaled(Duration::from_secs(10)), || host_process_with(&words)));
    kill(Pid::from_raw(i32::try_from(child.id()).unwrap()), Signal::SIGTERM).unwrap();
    let done = ExecResult::of(child.wait_with_output().unwrap());
    done.expect(json!({ "verdict": "cancelled", "started": false, "output": "" }));
    no_process_is_left(&words);
}

test!(Both, approved_code_has_its_scratch_alone_in_both_runs, seconds 90);
fn approved_code_has_its_scratch_alone_in_both_runs() {
    super::approval::own_registry();
    let words = format!("approved-compiler-{}", std::process::id());
    let (place, scratch) = (PolicyDirectory::new(), scratch());
    let policy = place.write("made", &derived_from("review", &compiled_by(&format!(": {words}; sleep 0.7; cp $0 $1"))));
    let mut request = patient(made("sleep 0.7; curl --version | head -c 4; sudo -n true; echo done"));
    request["scratch"] = json!(text(&scratch));
    let token = token_of(&exec_with(&["--policy", &policy], request.clone()));
    request["approve"] = json!(token);
    let mut child = start(&mut stockade(["exec", "--policy", &policy]), request.to_string().as_bytes());
    assert!(eventually(scaled(Duration::from_secs(10)), || host_process_with(&words)));
    let other = patient(json!({ "code": "pass", "scratch": text(&scratch) }));
    let mut seen = Vec::new();
    while child.try_wait().unwrap().is_none() {
        let done = exec_with(&[], other.clone());
        seen.push(done["reason"].as_str().unwrap_or("ran").to_owned());
    }
    let done = ExecResult::of(child.wait_with_output().unwrap());
    done.expect(json!({ "verdict": "exited", "started": true }));
    assert!(done.output().ends_with("done\n"), "{}", done.brief());
    // The last may have come after its end, and none between the two runs.
    let free = seen.iter().position(|reason| reason == "ran").unwrap_or(seen.len());
    assert!(free > 3 && seen[..free].iter().all(|reason| reason == "scratch_in_use") && free + 2 > seen.len(), "{seen:?}");
    exec_with(&[], other).succeeded();
    // The token was used up by the two together.
    exec_with(&["--policy", &policy], request).refused("approval_used", &["once"]);
}

test!(Both, run_compiles_a_file_and_says_what_the_compiler_said, needs [Program("gcc")], seconds 60);
fn run_compiles_a_file_and_says_what_the_compiler_said() {
    let place = PolicyDirectory::new();
    let policy = place.write("c", &derived(C));
    let scratch = scratch();
    let run = |options: &[&str], file: &Path| {
        let mut command: Command = stockade([&["run", "-q", "--policy", &policy][..], options, &[text(file), "word"]].concat());
        let output = run_with_stdin(&mut command, b"in");
        let [said, errors] = [output.stdout, output.stderr].map(|bytes| String::from_utf8(bytes).unwrap());
        (output.status.code(), said, errors)
    };
    let (good, bad, inside) = (directory().join("good.c"), directory().join("bad.c"), scratch.join("inside.c"));
    let code = "#include <stdio.h>\nint main(int n, char **w) { printf(\"%s %c\", w[1], getchar()); return 4; }\n";
    write_file(&good, code);
    write_file(&inside, code);
    write_file(&bad, "int main() { return nowhere; }\n");
    assert_eq!(run(&[], &good), (Some(4), String::from("word i"), String::new()));
    // A file that the scratch shows is compiled too, and stays alone.
    assert_eq!(run(&["--scratch", text(&scratch)], &inside).0, Some(4));
    assert_eq!(names(&scratch).into_iter().collect::<Vec<_>>(), ["inside.c"]);
    let (status, said, errors) = run(&[], &bad);
    assert_eq!((status, said.as_str()), (Some(1), ""));
    assert!(errors.contains("nowhere") && errors.contains("stockade: the code does not compile: exited, status 1"), "{errors}");
}

test!(Both, a_compiler_that_is_missing_is_named_and_one_that_is_there_is_found, needs [Program("gcc")], seconds 60);
fn a_compiler_that_is_missing_is_named_and_one_that_is_there_is_found() {
    let place = PolicyDirectory::new();
    let no_compiler = "[runtimes.made]\ncompile = [\"/usr/bin/no-compiler\", \"{file}\", \"{output}\"]\nextension = \"x\"\n";
    let of_output = place.write("a", &derived(&format!("{no_compiler}command = [\"{{output}}\"]\n")));
    ask(&of_output, made("")).broke("interpreter_missing", &["/usr/bin/no-compiler is not on this host"]);
    let of_other = place.write("b", &derived(&format!("{no_compiler}command = [\"/usr/bin/sh\", \"{{output}}\"]\n")));
    ask(&of_other, made("")).broke("interpreter_missing", &["/usr/bin/no-compiler is not on this host", "`compile`"]);
    // An empty program is none in C, and the compiler that says so is there.
    let c = place.write("c", &derived(C));
    let output = stockade(["runtimes", "--policy", &c, "--json"]).output().unwrap();
    let said: Value = serde_json::from_slice(&output.stdout).unwrap();
    let found = said["runtimes"].as_array().unwrap().iter().find(|one| one["name"] == "c").unwrap();
    assert_eq!((&found["available"], &found["path"]), (&json!(true), &json!("/usr/bin/gcc")), "{said}");
    assert!(found["version"].is_string(), "{said}");
    let doctor = stockade(["doctor", "--policy", &c]).output().unwrap();
    let doctor = String::from_utf8(doctor.stdout).unwrap();
    let line = doctor.lines().find(|line| line.contains("runtime c ")).unwrap_or_default();
    assert!(line.contains("/usr/bin/gcc starts"), "{doctor}");
}
