//! Denials with their controls.
//!
//! A probe is a piece of Python that tries one act. It runs in the sandbox, where it must
//! fail with exactly the stated errno, and once more where the one restriction is lifted,
//! where it must get through. There is no way to write the first without the second:
//! "it failed" alone would also be true of a misspelt path or a missing interpreter.

use serde_json::{Value, json};

use super::{
    exec::{ExecResult, exec_with, run_under, run_with_stdin},
    policy_dir::{PolicyDirectory, derived},
};

/// Where the act must get through.
pub enum Control<'a> {
    /// Outside the sandbox, by the user who runs the suite.
    Outside,
    /// Outside, behind these words (`unshare --user …`).
    Behind(&'a [&'a str]),
    /// Outside it reaches the kernel, whose own answer is one of these.
    Reaches(&'a [&'a str]),
    /// In the sandbox, under `default` with these lines added.
    Lifted(&'a str),
    /// In the same sandbox, where this other act, which differs in one thing, succeeds.
    Instead(&'a str),
    /// In a sandbox that is asked for with these fields in place of the first ones.
    Request(Value),
}

/// Names for the acts, and the frame that tries one.
const FRAME: &str = r#"
import ctypes, errno, fcntl, json, mmap, os, resource, signal, socket, stat, struct, subprocess, sys, time
library = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    "A raw system call. Whole numbers are passed in 64 bits."
    ctypes.set_errno(0)
    result = library.syscall(ctypes.c_long(number), *[ctypes.c_long(a) if isinstance(a, int) else a for a in arguments])
    if result == -1:
        raise OSError(ctypes.get_errno(), "call")
    return result
def read(path):
    with open(path, "rb") as file:
        return file.read().decode(errors="replace")
def write(path, text="x"):
    with open(path, "w") as file:
        file.write(text)
def answer(act):
    try:
        act()
        return "ok"
    except OSError as error:
        return {95: "EOPNOTSUPP"}.get(error.errno) or errno.errorcode.get(error.errno, str(error.errno))
"#;

/// A program that answers `"ok"` or an errno's name for the act.
pub fn program(act: &str) -> String {
    let body: String = act.trim().lines().map(|line| format!("    {line}\n")).collect();
    format!("{FRAME}\ndef act():\n{body}\nprint(json.dumps(answer(act)))\n")
}

/// The act must fail with this errno, and get through under the control.
#[track_caller]
pub fn denied(act: &str, errno: &str, control: Control<'_>) -> ExecResult {
    denied_in(json!({}), act, errno, control)
}

/// As [`denied`], with more fields of the request (a scratch, files).
#[track_caller]
pub fn denied_in(request: Value, act: &str, errno: &str, control: Control<'_>) -> ExecResult {
    let done = inside(&[], &request, act);
    assert_eq!(done.json(), errno, "{act}: {}", done.brief());
    match control {
        Control::Outside => assert_eq!(outside(&[], act), "ok", "the control of {act}"),
        Control::Behind(words) => assert_eq!(outside(words, act), "ok", "the control of {act}"),
        Control::Reaches(answers) => {
            let answer = outside(&[], act);
            assert!(answers.contains(&answer.as_str()), "the control of {act}: {answer}");
            assert!(!answers.contains(&errno), "the control of {act} must differ from {errno}");
        }
        Control::Lifted(lines) => {
            let directory = PolicyDirectory::new();
            let policy = directory.write("lifted", &derived(lines));
            let done = inside(&["--policy", &policy], &request, act);
            assert_eq!(done.json(), "ok", "the control of {act}: {}", done.brief());
        }
        Control::Instead(twin) => {
            let done = inside(&[], &request, twin);
            assert_eq!(done.json(), "ok", "the control of {act}: {}", done.brief());
        }
        Control::Request(request) => {
            let done = inside(&[], &request, act);
            assert_eq!(done.json(), "ok", "the control of {act}: {}", done.brief());
        }
    }
    done
}

fn inside(options: &[&str], request: &Value, act: &str) -> ExecResult {
    let mut request = request.clone();
    request["code"] = json!(program(act));
    let done = exec_with(options, request);
    done.succeeded();
    done
}

/// What the act meets outside.
#[track_caller]
pub fn outside(words: &[&str], act: &str) -> String {
    let mut command = run_under(&[words, &["/usr/bin/python3", "-"]].concat());
    let output = run_with_stdin(&mut command, program(act).as_bytes());
    let said = String::from_utf8_lossy(&output.stdout);
    let answer: Result<String, _> = serde_json::from_str(&said);
    answer.unwrap_or_else(|_| panic!("the control said {said:?}\n{}", String::from_utf8_lossy(&output.stderr)))
}
