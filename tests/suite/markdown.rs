//! `stockade exec --markdown`: a model's reply in, one result out.

use std::{
    fs,
    os::unix::process::ExitStatusExt,
    process::Output,
    thread,
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::{Value, json};

use crate::support::{
    exec::{ExecResult, program_path, run_under, run_with_stdin, scratch, start, stockade, text},
    leftovers::no_process_is_left,
    policy_dir::PolicyDirectory,
    runner::{directory, eventually, test, wait_within},
    timeouts::scaled,
};

fn markdown(options: &[&str], reply: &str) -> ExecResult {
    ExecResult::of(output(options, reply))
}

fn output(options: &[&str], reply: &str) -> Output {
    run_with_stdin(&mut stockade([&["exec", "--markdown"], options].concat()), reply.as_bytes())
}

/// Of each block whether it ran, else why not.
fn fates(done: &ExecResult) -> Vec<Value> {
    let blocks = done["blocks"].as_array().unwrap();
    blocks.iter().map(|block| if block["ran"] == true { json!(true) } else { block["why"].clone() }).collect()
}

test!(Both, blocks_are_run_in_order_in_one_scratch, seconds 60);
fn blocks_are_run_in_order_in_one_scratch() {
    let reply = "First the data:\n\n```python\nopen('data', 'w').write('6 7')\nprint('written')\n```\n\nthen the sum:\r\n\r\n\
                 ~~~~sh\r\nread a b <data\r\necho $((a * b))\r\necho note >&2\r\n~~~~\n\nand\n```JS\nconsole.log(require('fs').readdirSync('.').filter(name => !name.startsWith('stockade_')).join())\n```\n";
    let done = markdown(&[], reply);
    done.succeeded().expect(json!({"output": "written\n42\ndata\n", "error": "note\n"}));
    assert_eq!(fates(&done), [true, true, true]);
    let second = &done["blocks"][1];
    assert_eq!((&second["line"], &second["language"], &second["file"]), (&json!(10), &json!("sh"), &Value::Null));
    assert_eq!((&second["result"]["output"], &second["result"]["verdict"]), (&json!("42\n"), &json!("exited")));
    // The result is a whole one, of the last block.
    assert_eq!(done["receipt"], done["blocks"][2]["result"]["receipt"]);
    assert!(done["receipt"]["layers"].is_array() && done["blocks"][0]["result"]["receipt"]["layers"].is_array(), "{}", done.brief());
}

test!(Both, the_first_failure_is_the_last_block_that_runs);
fn the_first_failure_is_the_last_block_that_runs() {
    let reply = "```sh\necho one\n```\n```python\nprint('two')\nraise SystemExit(3)\n```\n```sh\necho three\n```\n";
    let done = markdown(&[], reply);
    done.expect(json!({"output": "one\ntwo\n", "code": 3, "success": false, "verdict": "exited", "started": true}));
    assert_eq!(fates(&done), [json!(true), json!(true), json!("after_failure")]);
    // A language that the policy does not have is such a failure.
    let done = markdown(&[], "```sh\necho one\n```\n```cobol\nx\n```\n```sh\necho three\n```\n");
    done.expect(json!({"output": "one\n", "verdict": "bad_request", "reason": "unknown_language", "success": false, "started": true}));
    assert!(done.error().contains("`cobol`") && done.error().contains("python"), "{}", done.error());
    assert_eq!(fates(&done), [json!(true), json!("bad_request"), json!("after_failure")]);
}

test!(Both, what_is_no_code_is_not_run_and_is_listed);
fn what_is_no_code_is_not_run_and_is_listed() {
    let reply = "```\nls -l\n```\n```json\n{}\n```\n```python\nprint(1)\n```\nwhich prints\n```text\n1\n```\n";
    let done = markdown(&[], reply);
    done.succeeded().expect(json!({"output": "1\n"}));
    assert_eq!(fates(&done), [json!("no_language"), json!("no_code"), json!(true), json!("no_code")]);
    assert_eq!(done["blocks"][0]["result"], Value::Null);
}

test!(Both, only_the_last_block_is_run_if_asked);
fn only_the_last_block_is_run_if_asked() {
    let done = markdown(&["--last"], "```sh\necho one\n```\n```sh\necho two\n```\n```\ntwo\n```\n");
    done.succeeded().expect(json!({"output": "two\n"}));
    assert_eq!(fates(&done), [json!("not_last"), json!(true), json!("no_language")]);
}

test!(Both, the_text_is_what_agents_are_used_to, seconds 60);
fn the_text_is_what_agents_are_used_to() {
    let said = |reply: &str| {
        let output = output(&["--text"], reply);
        (output.status.code(), String::from_utf8(output.stdout).unwrap())
    };
    let (status, text) = said("```python\nprint('a')\n```\n```sh\necho b\n```");
    assert_eq!((status, text.as_str()), (Some(0), "exitcode: 0 (execution succeeded)\nCode output: a\nb\n"));
    let (status, text) = said("```python\nprint('a')\n```\n```sh\necho b; echo oops >&2; exit 1\n```");
    assert_eq!((status, text.as_str()), (Some(0), "exitcode: 1 (execution failed)\nCode output: a\noops\nb\n"));
    let (status, text) = said("```sh\necho a\n```\n```sh\necho '[not run: x]'\n```");
    assert_eq!((status, text.as_str()), (Some(0), "exitcode: 0 (execution succeeded)\nCode output: a\n[not run: x]\n[exit status 0]\n"));
    let (status, text) = said("no code at all");
    assert!(status == Some(2) && text.starts_with("exitcode: 2 (execution failed)\nCode output: the reply has no block to run;"), "{text}");
}

test!(Both, a_block_is_written_to_the_file_that_its_first_line_names);
fn a_block_is_written_to_the_file_that_its_first_line_names() {
    let reply = "```python\n# filename: shapes/area.py\ndef area(a, b): return a * b\n```\n\
                 ```python\nimport sys\nsys.path.insert(0, 'shapes')\nimport area\nprint(area.area(6, 7))\n```\n\
                 ```js\n// filename: x.js\nconsole.log(require('fs').readFileSync('x.js', 'utf8').length)\n```\n";
    let done = markdown(&[], reply);
    done.succeeded().expect(json!({"output": "42\n81\n"}));
    assert_eq!((&done["blocks"][0]["file"], &done["blocks"][1]["file"]), (&json!("shapes/area.py"), &Value::Null));
}

test!(Both, a_file_name_that_leads_out_is_refused);
fn a_file_name_that_leads_out_is_refused() {
    let victim = directory().join("victim");
    for name in ["../victim", "/tmp/victim", text(&victim), "a/../../victim", "a//b", ".."] {
        let done = markdown(&["--scratch", text(&scratch_once())], &format!("```python\n# filename: {name}\nprint('ran')\n```"));
        done.expect(json!({"verdict": "bad_request", "reason": "path_malformed", "output": "", "started": false}));
        assert!(!victim.exists(), "{name}");
    }
}

/// The same one in each turn.
fn scratch_once() -> std::path::PathBuf {
    let path = directory().join("scratch");
    if path.exists() { path } else { scratch() }
}

test!(Both, a_host_scratch_holds_what_the_blocks_leave);
fn a_host_scratch_holds_what_the_blocks_leave() {
    let scratch = scratch();
    let done = markdown(&["--scratch", text(&scratch)], "```sh\necho x >left\npwd\n```\n```python\nprint(open('left').read())\n```\n");
    done.succeeded().expect(json!({"output": format!("{}\nx\n\n", text(&scratch))}));
    assert_eq!(fs::read_to_string(scratch.join("left")).unwrap(), "x\n");
    assert_eq!(fs::read_dir(&scratch).unwrap().count(), 1);
    let refused = markdown(&["--scratch", "/etc"], "```sh\necho x\n```");
    assert_eq!((&refused["verdict"], &refused["started"]), (&json!("bad_request"), &json!(false)));
    let missing = markdown(&["--policy", "no-such-policy"], "```sh\necho x\n```");
    assert_eq!((&missing["verdict"], &missing["reason"]), (&json!("sandbox_error"), &json!("policy_not_found")));
}

test!(Both, a_reply_that_cannot_be_run_is_a_bad_request_and_none_of_it_runs);
fn a_reply_that_cannot_be_run_is_a_bad_request_and_none_of_it_runs() {
    let scratch = scratch();
    let many = "```sh\ntouch ran\n```\n".repeat(101);
    for (reply, reason) in [
        ("", "reply_without_code"),
        ("words, and `code` in them", "reply_without_code"),
        ("    ```sh\n    touch ran\n    ```\n", "reply_without_code"),
        ("```\ntouch ran\n```", "reply_without_code"),
        ("```sh\ntouch ran\n```\n```sh\ntouch ran; rm -rf /scratch/a", "reply_not_closed"),
        ("````sh\ntouch ran\n```\n", "reply_not_closed"),
        (&many, "reply_too_many_blocks"),
    ] {
        let done = markdown(&["--scratch", text(&scratch)], reply);
        done.expect(json!({"verdict": "bad_request", "reason": reason, "started": false, "code": 2, "output": "", "blocks": []}));
        assert_eq!(fs::read_dir(&scratch).unwrap().count(), 0, "{reply}");
    }
    let bytes = run_with_stdin(&mut stockade(["exec", "--markdown"]), b"```sh\necho \xff\n```\n");
    ExecResult::of(bytes).expect(json!({"verdict": "bad_request", "reason": "reply_not_utf8"}));
    // The control: the same block, closed.
    markdown(&["--scratch", text(&scratch)], "```sh\ntouch ran\n```\n").succeeded();
    assert!(scratch.join("ran").exists());
    for options in [&["--last"][..], &["--markdown", "--socket", "/x"], &["--markdown", "--dry-run"]] {
        let usage = ExecResult::of(stockade([&["exec"], options].concat()).output().unwrap());
        assert_eq!((&usage["verdict"], &usage["reason"]), (&json!("bad_request"), &json!("usage")));
    }
}

test!(Both, a_reply_of_backticks_ends_in_time, seconds 60);
fn a_reply_of_backticks_ends_in_time() {
    let begin = Instant::now();
    for reply in ["`".repeat(10 << 20), "`` ` ".repeat(1 << 18), "```\n".repeat(1 << 16), "> ".repeat(1 << 16)] {
        assert_eq!(markdown(&[], &reply)["verdict"], "bad_request");
    }
    assert!(begin.elapsed() < scaled(Duration::from_secs(40)), "{:?}", begin.elapsed());
}

test!(Both, cancelling_ends_the_block_and_still_answers, seconds 60);
fn cancelling_ends_the_block_and_still_answers() {
    let scratch = scratch();
    for (signal, code) in [(Signal::SIGTERM, 143), (Signal::SIGINT, 130)] {
        let begun = scratch.join("begun");
        let reply = "```sh\ntouch begun\nexec sleep 6021\n```\n```sh\ntouch after\n```\n";
        let mut child = start(&mut stockade(["exec", "--markdown", "--scratch", text(&scratch)]), reply.as_bytes());
        assert!(eventually(Duration::from_secs(10), || begun.exists()));
        kill(Pid::from_raw(child.id().cast_signed()), signal).unwrap();
        assert!(wait_within(&mut child, Duration::from_secs(10)).is_some(), "{signal}");
        let done = ExecResult::of(child.wait_with_output().unwrap());
        assert_eq!(done["verdict"], "cancelled", "{}", done.brief());
        assert!([json!(code), json!(130)].contains(&done["code"]), "{}", done.brief());
        assert!(!scratch.join("after").exists());
        fs::remove_file(&begun).unwrap();
        no_process_is_left("sleep 6021");
    }
}

test!(Both, it_ends_by_a_signal_though_its_answer_is_not_read, seconds 60);
fn it_ends_by_a_signal_though_its_answer_is_not_read() {
    let scratch = scratch();
    let begun = scratch.join("begun");
    let much = "print('x' * 400_000)";
    let ends = [(Signal::SIGTERM, 143), (Signal::SIGHUP, 129), (Signal::SIGINT, 130)];
    // With its answer ready, and while a block runs whose answer will not be read either.
    for (last, waits) in [("true", false), ("touch begun; exec sleep 6023", true)] {
        for (signal, code) in ends {
            let reply = format!("```python\n{much}\n```\n```sh\n{last}\n```\n");
            let mut child = start(&mut stockade(["exec", "--markdown", "--scratch", text(&scratch)]), reply.as_bytes());
            // Its pipe is full, and has no reader.
            let is_ready = || if waits { begun.exists() } else { is_printing(child.id()) };
            assert!(eventually(Duration::from_secs(20), is_ready), "{signal} {waits}");
            kill(Pid::from_raw(child.id().cast_signed()), signal).unwrap();
            let status = wait_within(&mut child, Duration::from_secs(10)).unwrap_or_else(|| panic!("{signal} {waits}: it goes on"));
            let number = if waits { status.code() } else { status.signal() };
            assert_eq!(number, Some(if waits { code } else { code - 128 }), "{status}");
            no_process_is_left("sleep 6023");
            no_process_is_left(&format!("session --scratch {}", text(&scratch)));
            let _none_yet = fs::remove_file(&begun);
        }
    }
}

test!(Both, whichever_thread_is_given_a_signal_it_ends_by_it, needs [Program("python3")], seconds 60);
/// The kernel may choose any that does not block it, and a busy host makes it choose others than
/// the first.
fn whichever_thread_is_given_a_signal_it_ends_by_it() {
    let give = "import ctypes, sys\nctypes.CDLL(None).syscall(234, int(sys.argv[1]), int(sys.argv[2]), 15)";
    for nth in 0.. {
        let mut child = start(&mut stockade(["exec", "--markdown"]), b"```python\nprint('x' * 400_000)\n```\n");
        assert!(eventually(Duration::from_secs(20), || is_printing(child.id())));
        let pid = child.id();
        // It began, waits for signals, and prints; one that starts another blocks all signals meanwhile.
        let taking = || threads_of(pid).into_iter().filter(|thread| !blocks_sigterm(pid, *thread)).collect::<Vec<u32>>();
        assert!(eventually(Duration::from_secs(10), || taking().len() == 3), "{:?}", taking());
        let Some(thread) = taking().get(nth).copied() else {
            child.kill().unwrap();
            child.wait().unwrap();
            break;
        };
        assert!(run_under(&["python3", "-c", give, &pid.to_string(), &thread.to_string()]).status().unwrap().success());
        let status = wait_within(&mut child, Duration::from_secs(10)).unwrap_or_else(|| panic!("thread {nth}: it goes on"));
        assert_eq!(status.signal(), Some(15), "{status}");
    }
}

fn blocks_sigterm(pid: u32, thread: u32) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/task/{thread}/status")).unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigBlk:")).unwrap_or_default();
    u64::from_str_radix(mask.trim(), 16).is_ok_and(|mask| mask & (1 << 14) != 0)
}

test!(Both, a_signal_at_any_moment_makes_no_sandbox_error, seconds 90);
fn a_signal_at_any_moment_makes_no_sandbox_error() {
    let mut cancelled = 0;
    // Each millisecond at first; a busy host begins later.
    for moment in (0..40).chain((40..400).step_by(40)) {
        let mut child = start(&mut stockade(["exec", "--markdown"]), "```sh\nsleep 6024\n```\n".as_bytes());
        thread::sleep(Duration::from_millis(moment));
        kill(Pid::from_raw(child.id().cast_signed()), Signal::SIGTERM).unwrap();
        assert!(wait_within(&mut child, Duration::from_secs(10)).is_some(), "{moment} ms: it goes on");
        let done = child.wait_with_output().unwrap();
        if done.status.signal() != Some(15) {
            let done = ExecResult::of(done);
            done.expect(json!({"verdict": "cancelled", "code": 143}));
            cancelled += 1;
        }
    }
    assert!(cancelled > 0);
    no_process_is_left("sleep 6024");
}

/// Whether a process waits for room in the pipe that it prints to.
fn is_printing(pid: u32) -> bool {
    fs::read_to_string(format!("/proc/{pid}/task/{}/wchan", writer(pid))).is_ok_and(|at| at.contains("pipe_write"))
}

fn threads_of(pid: u32) -> Vec<u32> {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    threads.filter_map(|thread| thread.file_name().to_str()?.parse().ok()).collect()
}

/// The last thread of a process: the one that prints.
fn writer(pid: u32) -> u32 {
    threads_of(pid).into_iter().max().unwrap_or(pid)
}

test!(Both, killing_it_leaves_nothing);
fn killing_it_leaves_nothing() {
    let scratch = scratch();
    let reply = "```sh\ntouch begun\nsleep 6022\n```\n";
    let mut child = start(&mut stockade(["exec", "--markdown", "--scratch", text(&scratch)]), reply.as_bytes());
    assert!(eventually(Duration::from_secs(10), || scratch.join("begun").exists()));
    child.kill().unwrap();
    child.wait().unwrap();
    no_process_is_left("sleep 6022");
    no_process_is_left(&format!("session --scratch {}", text(&scratch)));
}

test!(Both, without_its_companion_it_says_what_to_install);
fn without_its_companion_it_says_what_to_install() {
    let alone = PolicyDirectory::new();
    let program = alone.0.join("stockade");
    fs::copy(program_path().unwrap(), &program).unwrap();
    let missing = ExecResult::of(run_with_stdin(&mut run_under(&[text(&program), "exec", "--markdown"]), b"```sh\necho x\n```"));
    // One that was made for another version does not run anything either.
    let companion = program_path().unwrap().with_file_name("stockade-markdown");
    let words = [text(&companion), "--program", text(&program), "--program-version", "0.0.1", "--"];
    let other = ExecResult::of(run_with_stdin(&mut run_under(&words), b"```sh\necho x\n```"));
    missing.expect(json!({"verdict": "sandbox_error", "reason": "companion_missing", "started": false}));
    assert!(missing.error().contains("stockade-markdown") && missing.error().contains("install"), "{}", missing.error());
    other.expect(json!({"verdict": "sandbox_error", "reason": "companion_version", "started": false}));
}
