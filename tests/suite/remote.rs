//! `--server`: a run at a service has the result that it has here, the key goes to one address alone,
//! and no server, however it answers, gets more of this host than an error.

use std::{
    fs::{self, File, Permissions},
    io::{BufRead, BufReader, Read, Write},
    net::{TcpListener, TcpStream},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
    sync::{Arc, Mutex},
    thread,
    time::{Duration, Instant},
};

use serde_json::{Value, json};

use super::serve::Service;
use crate::support::{
    exec::{ExecResult, OWNER, both_streams, exec, exec_bytes, run_under, run_with_stdin, start, stockade, text, token},
    leftovers::host_process_with,
    runner::{directory, eventually, test, wait_within},
    timeouts::scaled,
    tls::{Killed, certificates, tls_proxy},
};

/// A file with a token that only its owner may read.
fn key_file(token: &str) -> PathBuf {
    let path = directory().join("token");
    fs::write(&path, format!("{token}\n")).unwrap();
    fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
    path
}

/// `exec --server` with these options, not yet started.
fn command(server: &str, options: &[&str]) -> Command {
    let mut command = stockade([&["exec", "--server", server], options].concat());
    command.env("STOCKADE_KEY_FILE", directory().join("token"));
    command
}

fn ask(server: &str, options: &[&str], request: &Value) -> ExecResult {
    ExecResult::of(run_with_stdin(&mut command(server, options), request.to_string().as_bytes()))
}

impl Service {
    /// Its address, once the file of the key is there.
    fn url(&self) -> String {
        key_file(&self.token);
        format!("http://127.0.0.1:{}", self.port)
    }

    fn command(&self, words: &[&str]) -> Command {
        let mut command = stockade([words, &["--server", &self.url()]].concat());
        command.env("STOCKADE_KEY_FILE", directory().join("token"));
        command
    }
}

/// A server whose every connection gets what a function writes; it has read the request by then.
struct Server {
    port: u16,
    /// Heads and bodies of requests.
    heard: Arc<Mutex<Vec<String>>>,
}

impl Server {
    fn new(answer: impl Fn(&str, &mut TcpStream) + Send + Sync + 'static) -> Self {
        key_file("sd_test_secret");
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (port, heard) = (listener.local_addr().unwrap().port(), Arc::default());
        let (all, answer) = (Arc::clone(&heard), Arc::new(answer));
        thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let (all, answer): (Arc<Mutex<Vec<String>>>, _) = (Arc::clone(&all), Arc::clone(&answer));
                thread::spawn(move || {
                    let mut stream = stream;
                    let request = read_request(&stream);
                    all.lock().unwrap().push(request.clone());
                    answer(&request, &mut stream);
                });
            }
        });
        Server { port, heard }
    }

    /// One that says the same to all.
    fn saying(answer: impl Into<Vec<u8>>) -> Self {
        let answer = answer.into();
        Server::new(move |_, stream| {
            send(stream, &answer);
        })
    }

    fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    fn heard(&self) -> Vec<String> {
        self.heard.lock().unwrap().clone()
    }

    fn ask(&self) -> ExecResult {
        ask(&self.url(), &[], &json!({"code": "print(1)"}))
    }
}

fn read_request(stream: &TcpStream) -> String {
    let mut reader = BufReader::new(stream);
    let mut request = String::new();
    while !request.ends_with("\r\n\r\n") && reader.read_line(&mut request).unwrap_or(0) > 0 {}
    let length = request.lines().find_map(|line| line.to_ascii_lowercase().strip_prefix("content-length: ")?.parse::<u64>().ok());
    let _cut = reader.take(length.unwrap_or(0)).read_to_string(&mut request);
    request
}

/// Sends what the client may refuse to read.
fn send(stream: &mut TcpStream, bytes: &[u8]) -> bool {
    stream.write_all(bytes).is_ok()
}

fn head(status: &str, kind: &str) -> String {
    format!("HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nConnection: close\r\n")
}

/// The head of a stream, and its events.
fn events(events: &[Value]) -> String {
    let lines: String = events.iter().map(|event| format!("{event}\n")).collect();
    format!("{}\r\n{lines}", head("200 OK", "application/x-ndjson"))
}

fn accepted() -> Value {
    json!({"type": "accepted", "seq": 1, "at_ms": 0, "run": "00aa", "position": 0})
}

fn result(output: &str) -> Value {
    json!({"type": "result", "seq": 9, "at_ms": 5, "result": {"schema": 1, "output": output, "verdict": "exited", "code": 0, "success": true, "started": true}})
}

test!(Both, a_run_at_a_service_has_the_result_that_it_has_here, seconds 60);
fn a_run_at_a_service_has_the_result_that_it_has_here() {
    let service = Service::new();
    let url = service.url();
    for request in [
        json!({"code": "print(6 * 7)", "id": "x", "labels": {"a": "b"}}),
        json!({"code": "import sys; print('e', file=sys.stderr); raise SystemExit(3)"}),
        json!({"code": "kill -SEGV $$", "language": "sh"}),
        json!({"code": "while True: pass", "limits": {"wall": "300ms"}}),
        json!({"code": "import sys; sys.stdout.buffer.write(b'\\xff\\n')"}),
        json!({"code": "print(input())", "stdin": "ä", "encoding": "base64"}),
        json!({"code": "open('a.txt', 'w').write('x')", "collect": ["*.txt"]}),
        json!({"code": "import socket; socket.create_connection(('192.0.2.1', 80), 1)"}),
        json!({"code": "print(1)", "colour": "red"}),
        json!({"code": "print(1)", "language": "cobol"}),
        json!({"code": 1}),
        json!({"code": "print(1)", "limits": {"wall": "100h"}}),
    ] {
        let (here, there) = (exec(request.clone()), ask(&url, &[], &request));
        assert_eq!(there.status, here.status, "{request}: {}", there.brief());
        for field in ["output", "error", "code", "success", "verdict", "reason", "started", "signal", "limits_hit", "bytes", "truncated"] {
            assert_eq!(there[field], here[field], "`{field}` of {request}: {} {}", there.brief(), here.brief());
        }
        for field in ["lossy", "denials", "files", "policy", "id", "labels"] {
            assert_eq!(
                without_peaks(&there[field]),
                without_peaks(&here[field]),
                "`{field}` of {request}: {} {}",
                there.brief(),
                here.brief()
            );
        }
        assert!(there["run"].is_string() && there["key"] == "test", "{}", there.brief());
    }
    // What the service judges before a worker does ends in the same way.
    let (here, there) = (exec_bytes(&[], b"{"), ExecResult::of(run_with_stdin(&mut command(&url, &[]), b"{")));
    assert_eq!((there.status, &there["verdict"]), (here.status, &here["verdict"]));
    there.refused("bad_json", &["the service says"]);
    service.end();
}

/// Denials without what differs from run to run.
fn without_peaks(value: &Value) -> Value {
    let mut value = value.clone();
    for denial in value.as_array_mut().into_iter().flatten() {
        if denial["limit"].is_object() {
            denial["limit"]["peak"] = Value::Null;
        }
    }
    value
}

test!(Both, a_result_of_a_service_is_printed_in_each_form);
fn a_result_of_a_service_is_printed_in_each_form() {
    let service = Service::new();
    let url = service.url();
    let print = |options: &[&str]| {
        let done = run_with_stdin(&mut command(&url, options), br#"{"code": "print(6 * 7)"}"#);
        assert!(done.status.success(), "{}", both_streams(&done));
        String::from_utf8(done.stdout).unwrap()
    };
    assert!(print(&["--text"]).starts_with("exitcode: 0 (execution succeeded)\nCode output: 42\n"));
    assert!(print(&["--pretty"]).contains("\n  \"output\": \"42\\n\",\n"));
    let brief: Value = serde_json::from_str(&print(&["--brief"])).unwrap();
    assert_eq!((&brief["output"], &brief["receipt"]), (&json!("42\n"), &Value::Null));
    let stream = print(&["--stream"]);
    let last: Value = serde_json::from_str(stream.lines().last().unwrap()).unwrap();
    assert_eq!((&last["type"], &last["result"]["output"]), (&json!("result"), &json!("42\n")));
    // For people: each stream to its own, without what a terminal would act on.
    let code = r"import sys; print('out\x1b[2J'); print('err', file=sys.stderr); sys.stdout.buffer.write(b'\xff\n'); raise SystemExit(3)";
    let live = |request: &Value| run_with_stdin(&mut command(&url, &["--stream", "--text", "-q"]), request.to_string().as_bytes());
    let done = live(&json!({ "code": code }));
    assert_eq!((done.status.code(), &*String::from_utf8_lossy(&done.stdout)), (Some(0), "out\\u{1b}[2J\n\u{fffd}\n"));
    assert_eq!(String::from_utf8_lossy(&done.stderr), "err\nexitcode: 3 (execution failed)\n");
    let done = live(&json!({"code": "print(1)", "language": "cobol"}));
    assert!(done.status.code() == Some(2) && done.stdout.is_empty(), "{}", both_streams(&done));
    assert!(
        both_streams(&done).contains("cobol") && both_streams(&done).ends_with("exitcode: 2 (execution failed)\n[not run: bad request]\n")
    );
    service.end();
}

test!(Both, what_a_service_refuses_is_a_result_with_its_reason);
fn what_a_service_refuses_is_a_result_with_its_reason() {
    let service = Service::new();
    let url = service.url();
    let request = json!({"code": "print(1)"});
    ask(&url, &["--policy", "default"], &request).succeeded();
    ask(&url, &["--policy", "strict"], &request).broke("policy_not_granted", &["may use default"]);
    let (path, unix) = (service.place.0.join("s"), format!("unix:{}", text(&service.place.0.join("s"))));
    ask(&unix, &[], &request).succeeded();
    let without_key =
        |url: &str| ExecResult::of(run_with_stdin(command(url, &[]).env_remove("STOCKADE_KEY_FILE"), request.to_string().as_bytes()));
    without_key(&unix).broke("key_missing", &["has no key"]);
    without_key(&url).refused("key_file", &["STOCKADE_KEY_FILE"]);
    // It refuses what it has not read to the end.
    let large = json!({"code": "print(1)", "stdin": "x".repeat(20 << 20)});
    ask(&unix, &["--policy", "strict"], &large).broke("policy_not_granted", &["may use default"]);
    key_file("sd_test_wrong");
    ask(&url, &[], &request).broke("key_unknown", &["the service says"]);
    let url = service.url();
    service.end();
    ask(&url, &[], &request).broke("server_unreachable", &["connect to http://127.0.0.1", "refused"]);
    ask(&unix, &[], &request).broke("server_unreachable", &["No such file"]);
    assert!(!path.exists());
}

test!(Both, a_key_that_others_can_read_is_not_sent);
fn a_key_that_others_can_read_is_not_sent() {
    let server = Server::saying(events(&[accepted(), result("1\n")]));
    let path = directory().join("token");
    server.ask().succeeded();
    for (mode, words) in [(0o644, "chmod 600"), (0o640, "chmod 600"), (0o602, "chmod 600")] {
        fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
        server.ask().refused("key_file", &[words, text(&path)]);
    }
    key_file("");
    server.ask().refused("key_file", &["has no token"]);
    key_file("two words");
    let refused = server.ask();
    refused.refused("key_file", &["has no token"]);
    assert!(!refused.line.contains("two words"));
    fs::remove_file(&path).unwrap();
    server.ask().refused("key_file", &["No such file"]);
    assert_eq!(server.heard().len(), 1);
    for (url, words) in [("ftp://x", "begins with none"), ("http://sd_x@h", "STOCKADE_KEY_FILE"), ("unix:s", "absolute")] {
        ask(url, &[], &json!({"code": "1"})).refused("server_url", &[words]);
    }
}

test!(Both, options_that_a_service_cannot_honour_are_refused_by_name);
fn options_that_a_service_cannot_honour_are_refused_by_name() {
    for option in ["--scratch=/x", "--runtime=python=/x", "--allow=pypi.org:443", "--dry-run", "--socket=/x", "--approve=T", "--markdown"] {
        let name = option.split('=').next().unwrap();
        exec_bytes(&["--server", "http://127.0.0.1:1", option], b"{}").refused("usage", &["--server", name]);
    }
    exec_bytes(&["--stream"], b"{}").refused("usage", &["--server"]);
}

test!(RootOnly, no_caller_of_sudo_asks_a_service_as_root);
fn no_caller_of_sudo_asks_a_service_as_root() {
    let server = Server::saying(events(&[accepted(), result("1\n")]));
    let through_sudo = |command: &mut Command| {
        let id = OWNER.to_string();
        run_with_stdin(command.env("SUDO_UID", &id).env("SUDO_GID", &id), br#"{"code": "1"}"#)
    };
    ExecResult::of(through_sudo(&mut command(&server.url(), &[]))).refused("server_through_sudo", &["leave sudo out"]);
    for words in [&["ps"][..], &["kill", "00aa"]] {
        let done = through_sudo(&mut stockade([words, &["--server", &server.url()]].concat()));
        assert!(done.status.code() == Some(125) && both_streams(&done).contains("leave sudo out"), "{}", both_streams(&done));
    }
    assert!(server.heard().is_empty());
    server.ask().succeeded();
}

test!(RootOnly, no_socket_of_another_user_gets_a_request, needs[Program("python3")]);
fn no_socket_of_another_user_gets_a_request() {
    let place = directory().join("s");
    let listen = format!(
        "import os, socket\ns = socket.socket(socket.AF_UNIX)\ns.bind('{0}')\nos.chmod('{0}', 0o666)\nif {1}: os.setuid({OWNER})\ns.listen()\nprint('ready', flush=True)\nwhile True: s.accept()[0].recv(1 << 16) and print('heard', flush=True)",
        place.display(),
        "{}"
    );
    key_file("sd_test_secret");
    for is_other in [true, false] {
        let _before = fs::remove_file(&place);
        let code = listen.replace("{}", if is_other { "True" } else { "False" });
        let mut other = Killed(Command::new("python3").args(["-c", &code]).stdout(Stdio::piped()).spawn().unwrap());
        let mut said = BufReader::new(other.0.stdout.take().unwrap());
        let mut line = String::new();
        said.read_line(&mut line).unwrap();
        let refused = ask(&format!("unix:{}", place.display()), &[], &json!({"code": "1"}));
        if is_other {
            refused.broke("socket_untrusted", &["nothing was sent"]);
        } else {
            // The control: root's own gets it, whole or not, and ends the connection.
            refused.expect(json!({"reason": "server_lost"}));
            said.read_line(&mut line).unwrap();
        }
        drop(other);
        said.read_to_string(&mut line).unwrap();
        assert_eq!(line.contains("heard"), !is_other, "{line}");
    }
}

test!(Both, events_are_printed_while_the_code_runs);
fn events_are_printed_while_the_code_runs() {
    let gate = Arc::new(Mutex::new(()));
    let (held, shut) = (Arc::clone(&gate), gate.lock().unwrap());
    let server = Server::new(move |request, stream| {
        assert!(request.contains("application/x-ndjson") && request.ends_with(r#"{"code": "1"}"#), "{request}");
        let output = json!({"type": "stdout", "seq": 3, "at_ms": 2, "text": "early\n"});
        send(stream, events(&[accepted(), output]).as_bytes());
        drop(held.lock());
        send(stream, format!("{}\n", result("early\nlate\n")).as_bytes());
    });
    let mut child = start(&mut command(&server.url(), &["--stream"]), br#"{"code": "1"}"#);
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map(|line| serde_json::from_str::<Value>(&line.unwrap()).unwrap());
    assert_eq!(lines.next().unwrap()["type"], "accepted");
    assert_eq!(lines.next().unwrap()["text"], "early\n");
    // The server sends the rest only now.
    drop(shut);
    assert_eq!(lines.next().unwrap()["result"]["output"], "early\nlate\n");
    assert!(lines.next().is_none() && child.wait().unwrap().success());
    // What has no result ends in one all the same.
    let server = Server::saying(events(&[accepted()]));
    let done = run_with_stdin(&mut command(&server.url(), &["--stream"]), br#"{"code": "1"}"#);
    let last: Value = serde_json::from_slice(done.stdout.trim_ascii().rsplit(|byte| *byte == b'\n').next().unwrap()).unwrap();
    assert_eq!((done.status.code(), &last["type"], &last["result"]["reason"]), (Some(125), &json!("result"), &json!("server_lost")));
}

test!(Both, a_signal_cancels_the_run_and_its_result_still_comes);
fn a_signal_cancels_the_run_and_its_result_still_comes() {
    let mark = token("remote");
    let service = Service::new();
    let sleep = format!("import subprocess; print('begun', flush=True); subprocess.run(['sh', '-c', 'sleep 60; : {mark}'])");
    let request = json!({ "code": sleep }).to_string();
    for signal in ["TERM", "INT", "HUP"] {
        let mut child = start(&mut command(&service.url(), &[]), request.as_bytes());
        assert!(eventually(scaled(Duration::from_secs(10)), || host_process_with(&mark)));
        assert!(Command::new("kill").args([&format!("-{signal}"), &child.id().to_string()]).status().unwrap().success());
        assert!(wait_within(&mut child, scaled(Duration::from_secs(10))).is_some(), "SIG{signal} does not end it");
        let done = ExecResult::of(child.wait_with_output().unwrap());
        done.expect(json!({"verdict": "cancelled", "started": true}));
        assert!(eventually(scaled(Duration::from_secs(15)), || !host_process_with(&mark)), "the run goes on");
    }
    service.end();
    // By its number, where the service has told it.
    let server = Server::new(|request, stream| {
        if request.starts_with("DELETE /v1/runs/00aa ") {
            send(stream, format!("{}Content-Length: 0\r\n\r\n", head("202 Accepted", "text/plain")).as_bytes());
            return;
        }
        send(stream, events(&[accepted()]).as_bytes());
        thread::sleep(Duration::from_secs(1));
        send(stream, format!("{}\n", result("partial\n")).as_bytes());
    });
    let mut child = start(&mut command(&server.url(), &["--stream"]), br#"{"code": "1"}"#);
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.next().unwrap().unwrap().contains("accepted"));
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
    assert!(lines.next().unwrap().unwrap().contains("partial"));
    let heard = server.heard();
    assert!(child.wait().unwrap().success() && heard.len() == 2, "{heard:?}");
    assert!(heard.iter().all(|request| request.to_ascii_lowercase().contains("authorization: bearer sd_test_secret")), "{heard:?}");
}

test!(Both, a_stream_that_was_cut_is_gone_on_with_and_nothing_runs_twice);
fn a_stream_that_was_cut_is_gone_on_with_and_nothing_runs_twice() {
    let server = Server::new(|request, stream| {
        let output = |seq: u64| json!({"type": "stdout", "seq": seq, "at_ms": 1, "text": format!("{seq}\n")});
        let part = if request.starts_with("POST ") {
            events(&[accepted(), output(2)])
        } else if request.starts_with("GET /v1/runs/00aa/events?after=2 ") {
            events(&[output(3)])
        } else if request.starts_with("GET /v1/runs/00aa/events?after=3 ") {
            events(&[result("2\n3\n")])
        } else {
            String::from("HTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n")
        };
        send(stream, part.as_bytes());
    });
    let done = run_with_stdin(&mut command(&server.url(), &["--stream"]), br#"{"code": "1"}"#);
    let lines: Vec<Value> = done.stdout.split(|byte| *byte == b'\n').filter_map(|line| serde_json::from_slice(line).ok()).collect();
    let kinds: Vec<&str> = lines.iter().map(|event| event["type"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["accepted", "stdout", "stdout", "result"]);
    assert_eq!((&lines[2]["text"], &lines[3]["result"]["output"]), (&json!("3\n"), &json!("2\n3\n")));
    assert_eq!(server.heard().iter().filter(|request| request.starts_with("POST ")).count(), 1);
}

test!(Both, a_redirect_does_not_get_the_key);
fn a_redirect_does_not_get_the_key() {
    for status in ["301 Moved", "302 Found", "303 See Other", "307 Temporary", "308 Permanent"] {
        let other = Server::saying(events(&[accepted(), result("1\n")]));
        let place = other.url();
        let first = Server::new(move |_, stream| {
            send(
                stream,
                format!("HTTP/1.1 {status}\r\nLocation: {place}/v1/run\r\nContent-Length: 0\r\nConnection: close\r\n\r\n").as_bytes(),
            );
        });
        first.ask().broke("server_answer", &["leads to", &other.url()]);
        assert!(first.heard().len() == 1 && other.heard().is_empty());
        other.ask().succeeded();
    }
}

test!(Both, what_is_no_answer_of_a_service_is_an_error_that_says_so);
fn what_is_no_answer_of_a_service_is_an_error_that_says_so() {
    let ndjson = |body: &str| format!("{}\r\n{body}", head("200 OK", "application/x-ndjson"));
    let plain = |status: &str, kind: &str, body: &str| format!("{}Content-Length: {}\r\n\r\n{body}", head(status, kind), body.len());
    let cut = events(&[accepted()]);
    let problem =
        json!({"type": "urn:stockade:key_rate", "status": 429, "detail": "wait", "reason": "key_rate", "started": false}).to_string();
    for (answer, reason, started, words) in [
        (String::new(), "server_lost", true, "the code may have run"),
        (cut.clone(), "server_lost", true, "the code may have run"),
        (format!("{cut}{}", &result("x").to_string()[..40]), "server_lost", true, "it ended the stream"),
        (ndjson("<html>\n"), "server_answer", true, "no event"),
        (ndjson("{\"type\": 1}\n"), "server_answer", true, "no event"),
        (ndjson("{\"type\": \"result\", \"result\": {}}\n"), "server_answer", true, "no result"),
        (ndjson("{\"type\": \"result\"}\n"), "server_answer", true, "empty"),
        (plain("200 OK", "text/html", "<html>"), "server_answer", true, "text/html"),
        (plain("200 OK", "application/json", "[1]"), "server_answer", true, "no result"),
        (plain("404 Not Found", "text/html", "<html>"), "server_answer", false, "status 404"),
        (plain("502 Bad Gateway", "text/html", "<html>"), "server_answer", true, "status 502"),
        (plain("503 Unavailable", "application/problem+json", "{}"), "server_answer", true, "status 503"),
        (
            plain("429 Slow", "application/problem+json", &problem).replacen("Content-Length", "Retry-After: 7\r\nContent-Length", 1),
            "key_rate",
            false,
            "try again in 7 s",
        ),
        (String::from("SSH-2.0-OpenSSH_9.2\r\n"), "server_answer", true, "not that of stockade serve"),
    ] {
        let server = Server::saying(answer);
        let done = server.ask();
        done.expect(json!({"verdict": "sandbox_error", "reason": reason, "started": started}));
        assert!(done.error().contains(words), "{words}: {}", done.error());
        assert!(!done.line.contains("sd_test_secret") && !done.stderr.contains("sd_test_secret"));
    }
    // The control, as a stream and as one result.
    let whole = result("1\n")["result"].to_string();
    for answer in [events(&[accepted(), result("1\n")]), plain("200 OK", "application/json", &whole)] {
        let server = Server::saying(answer);
        server.ask().expect(json!({"verdict": "exited", "output": "1\n"}));
    }
}

test!(serial Both, an_answer_without_end_gets_an_error_and_no_memory, seconds 90);
fn an_answer_without_end_gets_an_error_and_no_memory() {
    let block = Arc::new(vec![b'x'; 1 << 20]);
    let endless = |first: String| {
        let block = Arc::clone(&block);
        Server::new(move |_, stream| {
            if send(stream, first.as_bytes()) {
                while send(stream, &block) {}
            }
        })
    };
    let ten_gb = "Content-Length: 10000000000\r\n\r\n";
    for (first, words) in [
        (String::from("HTTP/1.1 200 OK\r\nX: "), "64 KiB"),
        (String::from("HTTP/1.1 200 "), "64 KiB"),
        (format!("{}{ten_gb}{{\"a\": \"", head("200 OK", "application/json")), "128 MiB"),
        (format!("{}{ten_gb}{{\"a\": \"", head("200 OK", "application/x-ndjson")), "128 MiB"),
        (format!("{}{ten_gb}{{\"a\": \"", head("500 Broken", "application/problem+json")), "status 500"),
    ] {
        let server = endless(first.clone());
        // Of address space; the control below does with it.
        let limited = |url: &str| {
            let mut limited =
                run_under(&["sh", "-c", "ulimit -v 1000000; exec \"$@\"", "sh", text(&crate::support::exec::program_path().unwrap())]);
            limited.args(["exec", "--server", url]).env("STOCKADE_KEY_FILE", directory().join("token"));
            ExecResult::of(run_with_stdin(&mut limited, br#"{"code": "print(1)"}"#))
        };
        let begun = Instant::now();
        let done = limited(&server.url());
        done.expect(json!({"verdict": "sandbox_error", "reason": "server_answer", "started": true}));
        assert!(done.error().contains(words), "{first}: {}", done.error());
        assert!(begun.elapsed() < scaled(Duration::from_secs(20)), "{:?}", begun.elapsed());
        let fine = Server::saying(events(&[accepted(), result(&"y".repeat(1 << 20))]));
        limited(&fine.url()).expect(json!({"verdict": "exited"}));
    }
}

test!(Both, a_key_goes_by_tls_to_whom_an_authority_vouches_for, needs [Program("openssl"), Program("python3")]);
fn a_key_goes_by_tls_to_whom_an_authority_vouches_for() {
    let [authority, certificate, key] = certificates();
    let server = Server::saying(events(&[accepted(), result("1\n")]));
    let (_proxy, port) = tls_proxy(&certificate, &key, server.port);
    let asked = |url: &str, roots: &Path| {
        let mut command = command(url, &[]);
        command.env("SSL_CERT_FILE", roots).env("HTTPS_PROXY", "http://192.0.2.1:1");
        ExecResult::of(run_with_stdin(&mut command, br#"{"code": "1"}"#))
    };
    let url = format!("https://127.0.0.1:{port}");
    asked(&url, &authority).expect(json!({"verdict": "exited", "output": "1\n"}));
    assert_eq!(server.heard().len(), 1);
    // Another authority, another name, and no TLS at all.
    asked(&url, &certificate).broke("server_not_trusted", &["SSL_CERT_FILE"]);
    asked(&format!("https://localhost:{port}"), &authority).broke("server_not_trusted", &["SSL_CERT_FILE"]);
    asked(&url, &directory().join("missing")).broke("server_not_trusted", &["missing"]);
    asked(&format!("https://127.0.0.1:{}", server.port), &authority).broke("server_unreachable", &["no TLS"]);
    asked(&format!("http://127.0.0.1:{port}"), &authority).expect(json!({"verdict": "sandbox_error"}));
    assert!(server.heard().iter().skip(1).all(|request| !request.contains("Bearer")), "{:?}", server.heard());
}

test!(Both, a_proxy_of_the_environment_is_for_other_hosts);
fn a_proxy_of_the_environment_is_for_other_hosts() {
    let proxy = Server::saying(b"HTTP/1.1 502 No\r\nContent-Length: 0\r\n\r\n");
    let server = Server::saying(events(&[accepted(), result("1\n")]));
    let asked = |url: &str| {
        let mut command = command(url, &[]);
        command.env("ALL_PROXY", proxy.url());
        ExecResult::of(run_with_stdin(&mut command, br#"{"code": "1"}"#))
    };
    asked(&server.url()).expect(json!({"verdict": "exited"}));
    assert!(proxy.heard().is_empty());
    let other = asked("https://192.0.2.1");
    other.expect(json!({"verdict": "sandbox_error", "reason": "server_unreachable", "started": false}));
    let heard = proxy.heard();
    assert!(heard.len() == 1 && heard[0].starts_with("CONNECT 192.0.2.1:443 ") && !heard[0].contains("Bearer"), "{heard:?}");
    // Without TLS the key would be for all to read, which is said.
    assert!(asked("http://192.0.2.1").stderr.contains("unencrypted"));
}

test!(Both, the_example_for_javascript_prints_output_as_it_comes, needs[Program("node")]);
fn the_example_for_javascript_prints_output_as_it_comes() {
    let service = Service::new();
    let url = service.url();
    let example = directory().join("run.mjs");
    fs::write(&example, include_str!("../../crates/serve/examples/run.mjs")).unwrap();
    let node = |url: &str, code: &str| {
        let mut command = run_under(&["node", text(&example), url, code]);
        command.env("STOCKADE_KEY_FILE", directory().join("token"));
        command
    };
    let done = node(&url, "import sys; print('ä', 6 * 7); print('e', file=sys.stderr); raise SystemExit(3)").output().unwrap();
    assert_eq!((done.status.code(), &*done.stdout, &*done.stderr), (Some(3), "ä 42\n".as_bytes(), &b"e\n"[..]));
    // Ctrl-C cancels its run.
    let mark = token("node");
    let code = format!("import subprocess; subprocess.run(['sh', '-c', 'sleep 60; : {mark}'])");
    let mut child = Killed(node(&url, &code).spawn().unwrap());
    assert!(eventually(scaled(Duration::from_secs(10)), || host_process_with(&mark)));
    assert!(Command::new("kill").args(["-INT", &child.0.id().to_string()]).status().unwrap().success());
    assert!(wait_within(&mut child.0, scaled(Duration::from_secs(10))).is_some_and(|ended| !ended.success()));
    assert!(eventually(scaled(Duration::from_secs(5)), || !host_process_with(&mark)));
    key_file("sd_test_wrong");
    let refused = node(&url, "print(1)").output().unwrap();
    assert!(!refused.status.success() && both_streams(&refused).contains("key_unknown"), "{}", both_streams(&refused));
    service.end();
    // The key goes to no other address.
    let other = Server::saying(events(&[accepted(), result("1\n")]));
    let place = other.url();
    let moved = Server::saying(format!("HTTP/1.1 307 Moved\r\nLocation: {place}/v1/run\r\nContent-Length: 0\r\n\r\n"));
    assert!(!node(&moved.url(), "print(1)").output().unwrap().status.success());
    assert!(moved.heard().len() == 1 && other.heard().is_empty());
}

fn said(done: &Output) -> (Option<i32>, String) {
    (done.status.code(), both_streams(done))
}

test!(Both, runs_at_a_service_are_listed_and_ended);
fn runs_at_a_service_are_listed_and_ended() {
    let mark = token("listed");
    let service = Service::new();
    let sleep = json!({"code": format!("import subprocess; subprocess.run(['sh', '-c', 'sleep 60; : {mark}'])")}).to_string();
    let child = start(&mut command(&service.url(), &[]), sleep.as_bytes());
    assert!(service.has_runs("running", 1) && eventually(scaled(Duration::from_secs(10)), || host_process_with(&mark)));
    let number = service.runs()[0]["run"].as_str().unwrap().to_owned();
    let (status, list) = said(&service.command(&["ps"]).output().unwrap());
    assert!(status == Some(0) && list.starts_with("ID ") && list.contains(&number) && list.contains("running"), "{list}");
    let listed: Value = serde_json::from_slice(&service.command(&["ps", "--json"]).output().unwrap().stdout).unwrap();
    assert_eq!((&listed["schema"], &listed["runs"][0]["run"]), (&json!(1), &json!(number)));
    let mut watching = Killed(service.command(&["ps", "--watch", "--json"]).spawn().unwrap());
    let mut lists = BufReader::new(watching.0.stdout.take().unwrap()).lines();
    assert!(lists.next().unwrap().unwrap().contains(&number));
    let (status, words) = said(&service.command(&["kill", &number]).output().unwrap());
    assert_eq!(status, Some(0), "{words}");
    assert!(eventually(scaled(Duration::from_secs(5)), || !host_process_with(&mark)));
    ExecResult::of(child.wait_with_output().unwrap()).expect(json!({"verdict": "cancelled"}));
    assert!(lists.any(|list| list.unwrap() == r#"{"runs":[],"schema":1}"#));
    for other in ["0123456789abcdef", "../../live", ""] {
        let (status, words) = said(&service.command(&["kill", other]).output().unwrap());
        assert!(status == Some(1) && words.contains("number"), "{other}: {status:?} {words}");
    }
    let url = service.url();
    service.end();
    let gone = stockade(["ps", "--server", &url]).env("STOCKADE_KEY_FILE", directory().join("token")).output().unwrap();
    assert!(gone.status.code() == Some(125) && both_streams(&gone).contains("connect to"), "{}", both_streams(&gone));
}

test!(Both, runs_of_this_host_are_watched_too);
fn runs_of_this_host_are_watched_too() {
    let log = directory().join("lists");
    let mut watching = Killed(stockade(["ps", "--watch"]).stdout(File::create(&log).unwrap()).spawn().unwrap());
    let mut child = start(&mut stockade(["exec"]), br#"{"code": "import time; time.sleep(30)", "id": "watched"}"#);
    let lists = || fs::read_to_string(&log).unwrap();
    assert!(eventually(scaled(Duration::from_secs(10)), || lists().contains("watched")), "{}", lists());
    assert!(watching.0.try_wait().unwrap().is_none());
    assert!(Command::new("kill").arg(child.id().to_string()).status().unwrap().success());
    assert!(wait_within(&mut child, scaled(Duration::from_secs(10))).is_some());
}
