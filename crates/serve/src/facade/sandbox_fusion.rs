//! SandboxFusion's `POST /run_code`, as reward functions of reinforcement learning call it.
//!
//! Its `status` says `SandboxError` only where the code is not to blame: clients take that for a
//! failure of the service. A verdict on the code is never one. `compile_result` is that of a runtime
//! with `compile`; of another it is null, and `compile_timeout` bounds nothing.

use std::collections::BTreeMap;

use base64::{Engine, prelude::BASE64_STANDARD};
use serde::{Deserialize, Serialize};
use stockade_protocol::{Base64, COMPILE_FAILED, CollectedFile, LimitKey, LimitValue, Request, TextOrBase64};

use super::{Invalid, fields::Fields};

/// What of a body is read.
const FIELDS: [&str; 9] =
    ["compile_timeout", "run_timeout", "memory_limit_MB", "code", "stdin", "language", "files", "fetch_files", "args"];
/// Languages whose names differ here.
const LANGUAGES: [(&str, &str); 1] = [("nodejs", "node")];
const MEBIBYTE: u64 = 1 << 20;
/// How a policy gets the language that no policy has by itself.
const PYTEST: &str =
    r#"; for pytest: `command = ["/usr/bin/python3", "-m", "pytest", "{file}"]` and `extension = "py"` in [runtimes.pytest]"#;

/// `exec`'s request.
///
/// # Errors
/// The body is not what SandboxFusion takes.
pub fn request(body: &[u8]) -> Result<Vec<u8>, Invalid> {
    let mut fields = Fields::of(body, &FIELDS)?;
    // In the order in which SandboxFusion has them.
    let compile_timeout = fields.seconds("compile_timeout", 10.0);
    let run_timeout = fields.seconds("run_timeout", 10.0);
    let memory = fields.integer("memory_limit_MB", -1);
    let code = fields.text("code");
    let stdin = fields.optional_text("stdin").map(TextOrBase64::Text);
    let language = fields.text("language");
    let files = fields.texts_by_name("files");
    let collect = fields.texts("fetch_files").iter().map(|path| literal(path)).collect();
    let args = fields.texts("args");
    let mut limits = BTreeMap::from([(LimitKey::Wall.name().to_owned(), wall(run_timeout))]);
    if let Ok(mebibytes @ 1..) = u64::try_from(memory) {
        let bytes = mebibytes.saturating_mul(MEBIBYTE).min(LARGEST);
        limits.insert(LimitKey::Memory.name().to_owned(), LimitValue::Text(LimitKey::Memory.format(Some(bytes))));
    }
    let language = LANGUAGES.iter().find(|(theirs, _)| *theirs == language).map_or(language, |(_, ours)| (*ours).to_owned());
    let files = files.into_iter().map(|(path, content)| (path, TextOrBase64::Base64(Base64 { base64: without_blanks(content) }))).collect();
    let compile_limits = BTreeMap::from([(LimitKey::Wall.name().to_owned(), wall(compile_timeout))]);
    let request =
        Request { code: code.into(), language: Some(language), args, stdin, files, collect, limits, compile_limits, ..Request::default() };
    fields.check(request).map(|request| to_json(&request))
}

/// No limit is larger (`LimitKey`): it is beyond what any policy permits.
const LARGEST: u64 = 1 << 60;

/// A wall clock of so many seconds, which are above zero.
pub(super) fn wall(seconds: f64) -> LimitValue {
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "what does not fit becomes the nearest that does")]
    let ms = (seconds * 1000.0).ceil() as u64;
    LimitValue::Text(format!("{}ms", ms.clamp(1, LARGEST)))
}

pub(super) fn to_json(request: &Request) -> Vec<u8> {
    // It is made of texts, numbers and maps with text for keys.
    serde_json::to_vec(request).unwrap_or_default()
}

/// Python's `b64decode` passes over blanks and ends of lines.
fn without_blanks(mut text: String) -> String {
    text.retain(|c| !c.is_ascii_whitespace());
    text
}

/// A glob that matches this path alone.
fn literal(path: &str) -> String {
    let mut glob = String::with_capacity(path.len());
    for c in path.chars() {
        if matches!(c, '*' | '?' | '[' | ']' | '{' | '}' | '!' | '\\') {
            glob.push('\\');
        }
        glob.push(c);
    }
    glob
}

/// What the answer says beyond SandboxFusion's own fields; null: it was not run.
#[derive(Clone, Debug, Default, Serialize)]
struct Run {
    /// Its number.
    run: Option<String>,
    verdict: Option<String>,
    /// How long the request waited.
    queued_ms: Option<u64>,
}

#[derive(Debug, Serialize)]
struct Response {
    status: Status,
    message: String,
    compile_result: Option<CommandResult>,
    run_result: Option<CommandResult>,
    executor_pod_name: Option<String>,
    files: BTreeMap<String, String>,
    stockade: Run,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
enum Status {
    Success,
    Failed,
    SandboxError,
}

#[derive(Clone, Copy, Debug, Serialize)]
enum CommandStatus {
    Finished,
    TimeLimitExceeded,
}

#[derive(Debug, Serialize)]
struct CommandResult {
    status: CommandStatus,
    execution_time: f64,
    return_code: Option<i32>,
    stdout: String,
    stderr: String,
}

/// What of the service's result is read.
#[derive(Debug, Default, Deserialize)]
struct ExecResult {
    verdict: String,
    #[serde(default)]
    reason: Option<String>,
    #[serde(default)]
    output: Option<String>,
    #[serde(default)]
    error: String,
    #[serde(default)]
    code: i32,
    #[serde(default)]
    duration_ms: u64,
    #[serde(default)]
    files: Vec<CollectedFile>,
    /// Of the compiler's run.
    compile: Option<ExecCompile>,
    run: Option<String>,
    queued_ms: Option<u64>,
}

/// The same of the compiler's run.
#[derive(Debug, Deserialize)]
struct ExecCompile {
    verdict: String,
    #[serde(default)]
    output: String,
    #[serde(default)]
    error: String,
    #[serde(default)]
    code: i32,
    #[serde(default)]
    duration_ms: u64,
}

impl CommandResult {
    fn of(verdict: &str, code: i32, duration_ms: u64, stdout: String, stderr: String) -> Self {
        let is_late = matches!(verdict, "wall_timeout" | "cpu_timeout");
        CommandResult {
            status: if is_late { CommandStatus::TimeLimitExceeded } else { CommandStatus::Finished },
            execution_time: duration_ms as f64 / 1000.0,
            return_code: (!is_late).then_some(code),
            stdout,
            stderr,
        }
    }
}

/// SandboxFusion's answer to a run with this result.
pub fn response(result: &[u8]) -> Vec<u8> {
    let Ok(result) = serde_json::from_slice::<ExecResult>(result) else {
        return failed("the worker's result cannot be read", Run::default());
    };
    let stockade = Run { run: result.run, verdict: Some(result.verdict.clone()), queued_ms: result.queued_ms };
    let status = match (result.verdict.as_str(), result.code) {
        ("exited", 0) => Status::Success,
        ("sandbox_error" | "bad_request" | "cancelled", _) => {
            let lacks_pytest = result.reason.as_deref() == Some("unknown_language") && result.error.starts_with("language `pytest`");
            return failed(&format!("{}{}", result.error.trim_end(), if lacks_pytest { PYTEST } else { "" }), stockade);
        }
        _ => Status::Failed,
    };
    let (mut files, mut message) = (BTreeMap::new(), String::new());
    for CollectedFile { path, text, base64, omitted, .. } in result.files {
        match text.map(|text| BASE64_STANDARD.encode(text)).or(base64) {
            Some(content) => {
                files.insert(path, content);
            }
            None => {
                let why = omitted.as_deref().unwrap_or("it was not read");
                message.push_str(&format!("{}{path} is not in `files`: {why}", if message.is_empty() { "" } else { "\n" }));
            }
        }
    }
    let compile_result = result
        .compile
        .map(|ExecCompile { verdict, output, error, code, duration_ms }| CommandResult::of(&verdict, code, duration_ms, output, error));
    // The program was not started, and the result's streams are the compiler's.
    let is_compilers = result.reason.as_deref() == Some(COMPILE_FAILED);
    let run_result = (!is_compilers)
        .then(|| CommandResult::of(&result.verdict, result.code, result.duration_ms, result.output.unwrap_or_default(), result.error));
    let response = Response { status, message, compile_result, run_result, executor_pod_name: None, files, stockade };
    serde_json::to_vec(&response).unwrap_or_default()
}

/// The answer where there was no run, and no other try would change that.
pub fn sandbox_error(message: &str) -> Vec<u8> {
    failed(message, Run::default())
}

fn failed(message: &str, stockade: Run) -> Vec<u8> {
    let response = Response {
        status: Status::SandboxError,
        message: message.to_owned(),
        compile_result: None,
        run_result: None,
        executor_pod_name: None,
        files: BTreeMap::new(),
        stockade,
    };
    serde_json::to_vec(&response).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]

    use serde_json::{Value, json};

    use super::*;

    fn read(body: &str) -> Value {
        serde_json::from_slice(&request(body.as_bytes()).unwrap()).unwrap()
    }

    #[test]
    fn a_body_becomes_a_request_of_exec() {
        let usual = read(r#"{"code": "1", "language": "python"}"#);
        assert_eq!(usual["limits"], json!({"wall": "10000ms"}));
        assert_eq!(usual["compile_limits"], json!({"wall": "10000ms"}));
        assert_eq!((&usual["stdin"], &usual["files"], &usual["collect"]), (&Value::Null, &json!({}), &json!([])));
        let all = read(
            r#"{"code": "1", "language": "nodejs", "run_timeout": 1.5, "compile_timeout": 3, "memory_limit_MB": 1024, "stdin": "",
                "files": {"a/b": "YW\nI=", "c": null}, "fetch_files": ["x[1]*.txt", "!y"], "args": ["-k", "z"], "unknown": 1}"#,
        );
        assert_eq!(all["limits"], json!({"wall": "1500ms", "memory": "1GiB"}));
        assert_eq!(all["compile_limits"], json!({"wall": "3000ms"}));
        assert_eq!((&all["language"], &all["stdin"], &all["args"]), (&json!("node"), &json!(""), &json!(["-k", "z"])));
        assert_eq!(all["files"], json!({"a/b": {"base64": "YWI="}}));
        assert_eq!(all["collect"], json!([r"x\[1\]\*.txt", r"\!y"]));
        // The worker takes it as it is.
        assert!(serde_json::from_value::<Request>(all).is_ok());
    }

    #[test]
    fn limits_stay_limits_however_large_or_small_they_are() {
        let limits = |body: &str| {
            let read = read(&format!(r#"{{"code": "", "language": "x", {body}}}"#));
            let request: Request = serde_json::from_value(read).unwrap();
            let value = |key: LimitKey| request.limits.get(key.name()).map(|value| key.parse(value).unwrap().unwrap());
            (value(LimitKey::Wall), value(LimitKey::Memory))
        };
        assert_eq!(limits(r#""run_timeout": 1e-9, "memory_limit_MB": 1"#), (Some(1), Some(1 << 20)));
        assert_eq!(limits(r#""run_timeout": 1e300, "memory_limit_MB": 9223372036854775807"#), (Some(1 << 60), Some(1 << 60)));
        assert_eq!(limits(r#""run_timeout": 0.0011, "memory_limit_MB": 1e30"#), (Some(2), Some(1 << 60)));
        for policys in ["-1", "0", "-9223372036854775808", "-1e300"] {
            assert_eq!(limits(&format!(r#""memory_limit_MB": {policys}"#)), (Some(10_000), None), "{policys}");
        }
    }

    fn answered(result: &Value) -> Value {
        serde_json::from_slice(&response(result.to_string().as_bytes())).unwrap()
    }

    fn result(verdict: &str, code: i32) -> Value {
        json!({ "verdict": verdict, "code": code, "output": "out", "error": "err", "duration_ms": 1500, "files": [], "run": "7", "queued_ms": 3 })
    }

    #[test]
    fn each_verdict_has_its_status() {
        for (verdict, code, status, command, return_code) in [
            ("exited", 0, "Success", "Finished", json!(0)),
            ("exited", 3, "Failed", "Finished", json!(3)),
            ("signaled", 139, "Failed", "Finished", json!(139)),
            ("out_of_memory", 137, "Failed", "Finished", json!(137)),
            ("process_limit", 1, "Failed", "Finished", json!(1)),
            ("disk_limit", 1, "Failed", "Finished", json!(1)),
            ("output_limit", 137, "Failed", "Finished", json!(137)),
            ("syscall_denied", 159, "Failed", "Finished", json!(159)),
            ("screened", 126, "Failed", "Finished", json!(126)),
            ("approval_required", 126, "Failed", "Finished", json!(126)),
            ("of_a_later_version", 1, "Failed", "Finished", json!(1)),
            ("wall_timeout", 124, "Failed", "TimeLimitExceeded", Value::Null),
            ("cpu_timeout", 137, "Failed", "TimeLimitExceeded", Value::Null),
        ] {
            let found = answered(&result(verdict, code));
            let run_result =
                json!({ "status": command, "execution_time": 1.5, "return_code": return_code, "stdout": "out", "stderr": "err" });
            let expected = json!({
                "status": status, "message": "", "compile_result": null, "run_result": run_result, "executor_pod_name": null, "files": {},
                "stockade": { "run": "7", "verdict": verdict, "queued_ms": 3 },
            });
            assert_eq!(found, expected);
        }
        for verdict in ["sandbox_error", "bad_request", "cancelled"] {
            let found = answered(&result(verdict, 2));
            assert_eq!((&found["status"], &found["message"]), (&json!("SandboxError"), &json!("err")));
            assert_eq!((&found["run_result"], &found["stockade"]["verdict"]), (&Value::Null, &json!(verdict)));
        }
        let mut lacks = result("bad_request", 2);
        lacks.as_object_mut().unwrap().extend([
            ("reason".to_owned(), json!("unknown_language")),
            ("error".to_owned(), json!("language `pytest`: policy `p` has no such runtime\n")),
        ]);
        assert!(answered(&lacks)["message"].as_str().unwrap().ends_with("in [runtimes.pytest]"));
        let unread: Value = serde_json::from_slice(&response(b"{")).unwrap();
        assert_eq!((&unread["status"], &unread["stockade"]["verdict"]), (&json!("SandboxError"), &Value::Null));
    }

    #[test]
    fn a_compiler_has_a_result_of_its_own() {
        let with = |verdict: &str, code: i32, compile: (&str, i32), reason: Option<&str>| {
            let mut result = result(verdict, code);
            result["reason"] = json!(reason);
            result["compile"] = json!({ "verdict": compile.0, "code": compile.1, "output": "o", "error": "e", "duration_ms": 2500 });
            answered(&result)
        };
        let compiled = |status: &str, code: Value| json!({ "status": status, "execution_time": 2.5, "return_code": code, "stdout": "o", "stderr": "e" });
        let good = with("exited", 0, ("exited", 0), None);
        assert_eq!((&good["status"], &good["run_result"]["return_code"]), (&json!("Success"), &json!(0)));
        assert_eq!(good["compile_result"], compiled("Finished", json!(0)));
        let late = with("wall_timeout", 124, ("exited", 0), None);
        assert_eq!((&late["run_result"]["status"], &late["compile_result"]["status"]), (&json!("TimeLimitExceeded"), &json!("Finished")));
        for (verdict, code, status, return_code) in [
            ("exited", 1, "Finished", json!(1)),
            ("out_of_memory", 137, "Finished", json!(137)),
            ("wall_timeout", 124, "TimeLimitExceeded", Value::Null),
        ] {
            let bad = with(verdict, code, (verdict, code), Some("compile_failed"));
            assert_eq!((&bad["status"], &bad["run_result"]), (&json!("Failed"), &Value::Null));
            assert_eq!(bad["compile_result"], compiled(status, return_code));
        }
        // Where neither says anything of the code, there is no verdict on it.
        let broken = with("sandbox_error", 125, ("exited", 0), Some("cgroup_unavailable"));
        assert_eq!((&broken["status"], &broken["compile_result"]), (&json!("SandboxError"), &Value::Null));
    }

    #[test]
    fn files_come_back_as_base64_and_one_that_is_left_out_is_told() {
        let file = |path: &str, content: Value| {
            let mut file = json!({ "path": path, "size": 1, "sha256": null });
            file.as_object_mut().unwrap().extend(content.as_object().unwrap().clone());
            file
        };
        let files = [
            file("a", json!({"text": "é"})),
            file("b", json!({"base64": "/w=="})),
            file("c", json!({"omitted": "too large"})),
            file("d", json!({})),
        ];
        let mut result = result("exited", 0);
        result["files"] = json!(files);
        let found = answered(&result);
        assert_eq!((&found["status"], &found["files"]), (&json!("Success"), &json!({"a": "w6k=", "b": "/w=="})));
        assert_eq!(found["message"], "c is not in `files`: too large\nd is not in `files`: it was not read");
    }
}
