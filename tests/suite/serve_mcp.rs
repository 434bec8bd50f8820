//! The Model Context Protocol over HTTP: the tools in a session of a key, which messages are refused and how,
//! and what ends a call and a session. The official client has its tests in `tests/frameworks/mcp`.

use std::{
    fs,
    io::{Read, Write},
    net::TcpStream,
    os::unix::net::UnixStream,
    thread,
    time::{Duration, Instant},
};

use serde_json::{Value, json};

use super::{
    serve::{Answer, Service, answer_of, head, kill},
    serve_sessions::service,
    serve_streams::peak_of_front,
};
use crate::support::{
    exec::{stockade, text, token},
    leftovers::host_process_with,
    runner::{eventually, test},
    timeouts::scaled,
};

const ACCEPT: &str = "Accept: application/json, text/event-stream";
const JSON: &str = "Content-Type: application/json";

/// A message, sent by this key in this session; nothing of its answer is read yet.
fn send(service: &Service, token: &str, session: Option<&str>, message: &Value) -> UnixStream {
    let mut fields = vec![format!("Authorization: Bearer {token}"), JSON.to_owned(), ACCEPT.to_owned()];
    fields.extend(session.map(|session| format!("Mcp-Session-Id: {session}")));
    send_with(service, &fields.iter().map(String::as_str).collect::<Vec<_>>(), message)
}

fn send_with(service: &Service, fields: &[&str], message: &Value) -> UnixStream {
    let (mut stream, body) = (service.connect(), message.to_string());
    stream.write_all((head("POST", "/mcp", fields, body.len()) + &body).as_bytes()).unwrap();
    stream
}

/// The answer to it, of which the last message is the body: that of a stream, or the only one.
fn read(mut stream: UnixStream) -> Answer {
    let mut said = Vec::new();
    let _reset = stream.read_to_end(&mut said);
    let said = String::from_utf8(said).unwrap();
    let (head, body) = said.split_once("\r\n\r\n").unwrap_or((&said, ""));
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or_else(|| panic!("no answer: {said:?}"));
    let message = body.lines().map(|line| line.strip_prefix("data: ").unwrap_or(line)).rfind(|line| line.starts_with('{'));
    Answer { status, head: head.to_owned(), body: message.map_or(Value::Null, |text| serde_json::from_str(text).unwrap()) }
}

fn ask(service: &Service, session: Option<&str>, message: &Value) -> Answer {
    read(send(service, &service.token, session, message))
}

fn initialize() -> Value {
    let client = json!({"name": "test", "version": "1"});
    json!({"jsonrpc": "2.0", "id": 0, "method": "initialize",
        "params": {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": client}})
}

/// The number of a new session.
#[track_caller]
fn begin(service: &Service) -> String {
    let begun = ask(service, None, &initialize());
    assert_eq!((begun.status, &begun.body["result"]["protocolVersion"]), (200, &json!("2025-06-18")), "{}{}", begun.head, begun.body);
    let number = begun.head.lines().find_map(|line| line.strip_prefix("mcp-session-id: ")).expect("the session's number").to_owned();
    let told = ask(service, Some(&number), &json!({"jsonrpc": "2.0", "method": "notifications/initialized"}));
    assert_eq!(told.status, 202, "{}", told.body);
    number
}

fn call(id: u64, tool: &str, arguments: &Value) -> Value {
    json!({"jsonrpc": "2.0", "id": id, "method": "tools/call", "params": {"name": tool, "arguments": arguments}})
}

/// What a tool has answered to the model.
#[track_caller]
fn told(answer: &Answer) -> (&str, bool) {
    let result = &answer.body["result"];
    let text = result["content"][0]["text"].as_str().unwrap_or_else(|| panic!("{}{}", answer.head, answer.body));
    (text, result["isError"].as_bool().unwrap_or(false))
}

fn execute(service: &Service, session: &str, code: &str) -> Answer {
    ask(service, Some(session), &call(7, "execute_code", &json!({ "code": code })))
}

/// Runs until it is ended, visibly.
fn endless(mark: &str) -> String {
    format!("import subprocess; open('begun', 'w'); subprocess.run(['sh', '-c', 'sleep 60; : {mark}'])")
}

fn keepers(service: &Service, count: usize) -> bool {
    eventually(scaled(Duration::from_secs(20)), || service.processes("stockade serve-keeper").len() == count)
}

fn end(service: &Service, session: &str) -> Answer {
    let fields = [&*format!("Authorization: Bearer {}", service.token), &format!("Mcp-Session-Id: {session}")];
    service.ask_with("DELETE", "/mcp", &fields, b"")
}

test!(Both, the_tools_of_mcp_work_in_a_session_of_the_key);
fn the_tools_of_mcp_work_in_a_session_of_the_key() {
    let service = service("", "");
    let begun = ask(&service, None, &initialize());
    let instructions = begun.body["result"]["instructions"].as_str().unwrap();
    assert!(instructions.contains("\nLanguages: ") && instructions.contains("\nLimits: wall clock "), "{instructions}");
    let first = begun.head.lines().find_map(|line| line.strip_prefix("mcp-session-id: ")).unwrap();
    let session = begin(&service);
    assert_ne!(first, session);
    let listed = ask(&service, Some(&session), &json!({"jsonrpc": "2.0", "id": 1, "method": "tools/list"}));
    let mut names: Vec<&str> =
        listed.body["result"]["tools"].as_array().unwrap().iter().map(|tool| tool["name"].as_str().unwrap()).collect();
    names.sort_unstable();
    assert_eq!(names, ["execute_code", "list_files", "read_file", "reset", "write_file"]);
    let written = ask(&service, Some(&session), &call(2, "write_file", &json!({"path": "n", "text": "41"})));
    assert_eq!(told(&written), ("n: 2 bytes", false));
    let ran = execute(&service, &session, "n = int(open('n').read()) + 1; open('n', 'w').write(str(n)); print(n)");
    assert_eq!(told(&ran), ("42\n", false));
    assert!(ran.head.contains("content-type: text/event-stream"), "{}", ran.head);
    let structured = &ran.body["result"]["structuredContent"];
    assert_eq!((&structured["verdict"], &structured["code"], &structured["output"]), (&json!("exited"), &json!(0), &json!("42\n")));
    assert!(structured.get("run").is_none() && structured.get("key").is_none(), "{structured}");
    // It is a session as others are: by its number, with its files, and its runs those of the key.
    let file = format!("/v1/sessions/{session}/files/n");
    assert_eq!(service.ask("GET", &file, &service.token, &Value::Null).body, json!(42));
    let shown = service.ask("GET", &format!("/v1/sessions/{session}"), &service.token, &Value::Null).body;
    assert_eq!((&shown["key"], &shown["policy"], &shown["idle_ms"]), (&json!("test"), &json!("default"), &json!(600_000)));
    // Another has none of them.
    assert_eq!(told(&execute(&service, first, "import os; print(os.path.exists('n'))")), ("False\n", false));
    // A refusal of the launcher is an error of the tool, and ends nothing.
    let refused = ask(&service, Some(&session), &call(3, "execute_code", &json!({"code": "1", "language": "cobol"})));
    assert!(told(&refused).1 && refused.body["result"]["structuredContent"]["reason"] == "unknown_language", "{}", refused.body);
    assert_eq!(told(&ask(&service, Some(&session), &call(4, "reset", &json!({})))), ("everything is empty again", false));
    assert_eq!(told(&execute(&service, &session, "import os; print(os.path.exists('n'))")), ("False\n", false));
    assert_eq!(end(&service, first).status, 204);
    assert!(keepers(&service, 1));
    execute(&service, first, "1").is(404, "no_such_session");
    end(&service, first).is(404, "no_such_session");
    assert_eq!(told(&execute(&service, &session, "print(1)")), ("1\n", false));
    service.end();
}

test!(Both, a_message_of_mcp_that_cannot_be_taken_has_its_status);
fn a_message_of_mcp_that_cannot_be_taken_has_its_status() {
    let service = service("[limits]\nbody = \"64KiB\"\n", "");
    let session = begin(&service);
    let (key, own) = (format!("Authorization: Bearer {}", service.token), format!("Mcp-Session-Id: {session}"));
    let ping = json!({"jsonrpc": "2.0", "id": 1, "method": "ping"}).to_string();
    let start = initialize().to_string();
    let (ping, start) = (ping.as_bytes(), start.as_bytes());
    let post = |path: &str, fields: &[&str], body: &[u8]| service.ask_with("POST", path, fields, body);
    // The control, with a version that was agreed on.
    let good = post("/mcp", &[&key, &own, JSON, ACCEPT, "MCP-Protocol-Version: 2025-06-18"], ping);
    assert_eq!(good.status, 200, "{}", good.body);
    for (path, fields, body, status, reason) in [
        ("/mcp", &[&*own, JSON, ACCEPT][..], ping, 401, "key_missing"),
        ("/mcp", &[&key, JSON, ACCEPT], ping, 400, "bad_http"),
        ("/mcp", &[&key, &own, &own, JSON, ACCEPT], ping, 400, "bad_http"),
        ("/mcp", &[&key, "Mcp-Session-Id: 0123456789abcdef", JSON, ACCEPT], ping, 404, "no_such_session"),
        ("/mcp", &[&key, "Mcp-Session-Id: 0123456789abcdef", JSON, ACCEPT], start, 404, "no_such_session"),
        ("/mcp", &[&key, &own, JSON], ping, 406, "not_acceptable"),
        ("/mcp", &[&key, &own, JSON, "Accept: application/json"], ping, 406, "not_acceptable"),
        ("/mcp", &[&key, &own, ACCEPT], ping, 415, "bad_type"),
        ("/mcp", &[&key, &own, ACCEPT, "Content-Type: text/plain"], ping, 415, "bad_type"),
        ("/mcp", &[&key, &own, JSON, ACCEPT], b"{", 400, "bad_json"),
        ("/mcp", &[&key, &own, JSON, ACCEPT], b"[1, 2]", 400, "bad_json"),
        ("/mcp", &[&key, &own, JSON, ACCEPT], b"{\"id\": 1}", 400, "bad_json"),
        ("/mcp", &[&key, &own, JSON, ACCEPT], &vec![b' '; 65537], 413, "too_large"),
        ("/mcp", &[&key, &own, JSON, ACCEPT, "MCP-Protocol-Version: 1999-01-01"], ping, 400, "bad_http"),
        ("/mcp?colour=red", &[&key, JSON, ACCEPT], start, 400, "bad_http"),
        ("/mcp?idle=1ms", &[&key, JSON, ACCEPT], start, 400, "bad_http"),
        ("/mcp?policy=strict", &[&key, JSON, ACCEPT], start, 403, "policy_not_granted"),
        ("/mcp?idle=1h", &[&key, &own, JSON, ACCEPT], ping, 400, "bad_http"),
    ] {
        post(path, fields, body).is(status, reason);
    }
    // Nothing is sent that no call asked for, so there is no stream to wait at.
    let stream = service.ask_with("GET", "/mcp", &[&key, &own, "Accept: text/event-stream"], b"");
    assert!(stream.is(405, "no_such_method").head.contains("allow: "), "{}", stream.head);
    service.ask_with("DELETE", "/mcp", &[&key], b"").is(400, "bad_http");
    // A version without sessions is refused by the words of the protocol, which name those that there are.
    let meta = json!({"io.modelcontextprotocol/protocolVersion": "2026-07-28",
        "io.modelcontextprotocol/clientCapabilities": {}, "io.modelcontextprotocol/clientInfo": {"name": "x", "version": "1"}});
    for (method, params) in [
        ("server/discover", json!({"_meta": meta})),
        ("tools/call", json!({"_meta": meta, "name": "execute_code", "arguments": {"code": "open('x', 'w')"}})),
    ] {
        let message = json!({"jsonrpc": "2.0", "id": 5, "method": method, "params": params});
        let method = format!("Mcp-Method: {method}");
        let fields = [&*key, JSON, ACCEPT, "MCP-Protocol-Version: 2026-07-28", &method, "Mcp-Name: execute_code"];
        for fields in [&fields[..], &[&fields[..], &[&own]].concat()] {
            let answer = read(send_with(&service, fields, &message));
            assert_eq!((answer.status, &answer.body["error"]["code"]), (400, &json!(-32022)), "{} {}", answer.head, answer.body);
            assert!(answer.body["error"]["data"]["supported"].as_array().unwrap().contains(&json!("2025-11-25")), "{}", answer.body);
        }
    }
    // Nor does an `initialize` that is answered with an error of JSON-RPC begin one.
    for params in [json!({}), json!({"protocolVersion": 5, "capabilities": {}, "clientInfo": {}})] {
        let answer = ask(&service, None, &json!({"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": params}));
        assert!(answer.body["error"].is_object() && !answer.head.contains("mcp-session-id"), "{} {}", answer.head, answer.body);
    }
    // None of them has begun a session; two of this key may be open.
    begin(&service);
    ask(&service, None, &initialize()).is(429, "key_sessions");
    assert!(keepers(&service, 2));
    // Over TCP a page of a browser may ask: only under a name of the service, and from its own origin.
    let tcp = |fields: &str| {
        let head = head("POST", "/mcp", &[&key, &own, JSON, ACCEPT], ping.len());
        answer_of(TcpStream::connect(("127.0.0.1", service.port)).unwrap(), &head.replace("Host: localhost", fields), ping)
    };
    let host = format!("Host: localhost:{}", service.port);
    assert_eq!(tcp(&host).status, 200);
    assert_eq!(tcp(&format!("{host}\r\nOrigin: http://localhost:{}", service.port)).status, 200);
    tcp("Host: evil.example").is(421, "host_unknown");
    tcp(&format!("{host}\r\nOrigin: http://evil.example")).is(403, "origin_refused");
    assert_eq!(told(&execute(&service, &session, "import os; print(os.path.exists('x'))")), ("False\n", false));
    service.end();
}

test!(Both, a_session_of_mcp_is_of_the_key_that_began_it);
fn a_session_of_mcp_is_of_the_key_that_began_it() {
    let service = service("", "");
    let session = begin(&service);
    let other = stockade(["key", "new", "other", "--policy", "default", "--add", "--file", text(&service.keys())]).output().unwrap();
    let other = String::from_utf8(other.stdout).unwrap().trim().to_owned();
    let ping = json!({"jsonrpc": "2.0", "id": 1, "method": "ping"});
    let is_known = |scope: u16| {
        service.signal("HUP");
        eventually(scaled(Duration::from_secs(65)), || service.ask("GET", "/v1/sessions", &other, &Value::Null).status == scope)
    };
    assert!(is_known(403));
    read(send(&service, &other, None, &initialize())).is(403, "scope_missing");
    let keys = fs::read_to_string(service.keys()).unwrap();
    fs::write(service.keys(), keys.replace("scopes = [\"run\"]", "scopes = [\"keep\"]")).unwrap();
    assert!(is_known(200));
    read(send(&service, &other, Some(&session), &ping)).is(404, "no_such_session");
    let of_other = format!("Authorization: Bearer {other}");
    service.ask_with("DELETE", "/mcp", &[&of_other, &format!("Mcp-Session-Id: {session}")], b"").is(404, "no_such_session");
    // The controls: its own key may, and the other with a session of its own.
    assert_eq!(ask(&service, Some(&session), &ping).status, 200);
    assert_eq!(read(send(&service, &other, None, &initialize())).status, 200);
    // The key goes: its session ends.
    let keys = fs::read_to_string(service.keys()).unwrap();
    fs::write(service.keys(), &keys[keys.rfind("[[key]]").unwrap()..]).unwrap();
    service.signal("HUP");
    assert!(keepers(&service, 1));
    ask(&service, Some(&session), &ping).is(401, "key_unknown");
    service.end();
}

test!(Both, a_call_of_mcp_over_http_ends_when_its_client_says_so_or_goes);
fn a_call_of_mcp_over_http_ends_when_its_client_says_so_or_goes() {
    let (service, mark) = (service("", ""), token("mcp"));
    let session = begin(&service);
    let runs = || eventually(scaled(Duration::from_secs(10)), || host_process_with(&mark));
    let is_gone = || eventually(scaled(Duration::from_secs(5)), || !host_process_with(&mark));
    let start = |id: u64| {
        let call = call(id, "execute_code", &json!({"code": endless(&mark), "timeout": 30}));
        let stream = send(&service, &service.token, Some(&session), &call);
        assert!(runs(), "it does not begin: {}", service.log());
        stream
    };
    let cancel = |id: Value| {
        let word = json!({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": id}});
        assert_eq!(ask(&service, Some(&session), &word).status, 202);
    };
    // By its id, and by no other.
    let stream = start(11);
    cancel(json!(12));
    cancel(json!("11"));
    assert!(host_process_with(&mark));
    cancel(json!(11));
    assert!(is_gone(), "it outlives its cancellation");
    let ended = read(stream);
    assert_eq!(ended.body["result"]["structuredContent"]["verdict"], "cancelled", "{}", ended.body);
    // By a client that goes; the next call has its turn, and finds the files.
    drop(start(13));
    assert!(is_gone(), "it outlives its client");
    assert_eq!(told(&execute(&service, &session, "import os; print(os.path.exists('begun'))")), ("True\n", false));
    // By the end of its session.
    let stream = start(14);
    let since = Instant::now();
    assert_eq!(end(&service, &session).status, 204);
    assert!(is_gone() && since.elapsed() < scaled(Duration::from_secs(10)));
    read(stream);
    assert!(keepers(&service, 0));
    service.end();
}

test!(Both, a_session_of_mcp_outlives_its_front_and_a_dead_keeper_is_not_found);
fn a_session_of_mcp_outlives_its_front_and_a_dead_keeper_is_not_found() {
    let (mut service, mark) = (service("", ""), token("dead"));
    let session = begin(&service);
    assert_eq!(told(&execute(&service, &session, "open('kept', 'w').write('1'); print(1)")), ("1\n", false));
    kill(service.processes("stockade-serve")[0], "KILL");
    assert!(eventually(scaled(Duration::from_secs(10)), || service.get("/live").is_some_and(|live| live.status == 200)));
    let place = format!("/v1/sessions/{session}");
    assert!(eventually(scaled(Duration::from_secs(5)), || service.ask("GET", &place, &service.token, &Value::Null).status == 200));
    assert_eq!(told(&execute(&service, &session, "print(open('kept').read())")), ("1\n", false));
    // A call that loses its keeper says so; whatever is asked after it is not found, at once.
    let call = call(3, "execute_code", &json!({"code": endless(&mark)}));
    let stream = send(&service, &service.token, Some(&session), &call);
    assert!(eventually(scaled(Duration::from_secs(10)), || host_process_with(&mark)));
    kill(service.processes("stockade serve-keeper")[0], "KILL");
    let died = read(stream);
    assert!(told(&died).1 && told(&died).0.contains("the session has ended, and its files with it"), "{}", died.body);
    execute(&service, &session, "print(1)").is(404, "no_such_session");
    let again = begin(&service);
    assert_eq!(told(&execute(&service, &again, "import os; print(os.path.exists('kept'))")), ("False\n", false));
    service.end();
}

test!(Both, a_call_of_mcp_is_answered_while_the_service_ends_and_counts_in_its_quotas);
fn a_call_of_mcp_is_answered_while_the_service_ends_and_counts_in_its_quotas() {
    let service = service("", "");
    let session = begin(&service);
    let keys = fs::read_to_string(service.keys()).unwrap();
    fs::write(service.keys(), keys.replace("sessions = 2", "sessions = 2\nruns_per_minute = 3")).unwrap();
    service.signal("HUP");
    let most = || service.ask("GET", "/v1/limits", &service.token, &Value::Null).body["runs_per_minute"] == 3;
    assert!(eventually(scaled(Duration::from_secs(5)), most));
    for _ in 0..2 {
        assert_eq!(told(&execute(&service, &session, "print(1)")), ("1\n", false));
    }
    let mark = token("drain");
    let code = format!("import subprocess; print(subprocess.run(['sh', '-c', 'sleep 2; : {mark}']).returncode)");
    let stream = send(&service, &service.token, Some(&session), &call(9, "execute_code", &json!({ "code": code })));
    assert!(eventually(scaled(Duration::from_secs(10)), || host_process_with(&mark)));
    assert!(service.runs().iter().any(|run| run["key"] == "test" && run["state"] == "running"), "{:?}", service.runs());
    let refused = execute(&service, &session, "print(1)");
    assert!(told(&refused).1 && told(&refused).0.contains("may send 3 requests a minute"), "{}", refused.body);
    service.signal("TERM");
    assert_eq!(told(&read(stream)), ("0\n", false));
    service.end();
}

test!(Both, what_is_answered_over_mcp_counts_as_buffered);
fn what_is_answered_over_mcp_counts_as_buffered() {
    let service = service("[limits]\nbody = \"1MiB\"\nbuffers = \"4MiB\"\n", "");
    let session = begin(&service);
    assert_eq!(told(&execute(&service, &session, "open('f', 'w').write('x' * (3 << 20))")), ("", false));
    let read_file = |length: u64| ask(&service, Some(&session), &call(5, "read_file", &json!({"path": "f", "length": length})));
    for _ in 0..3 {
        let refused = read_file(3 << 20);
        let (words, is_error) = told(&refused);
        assert!(is_error && words.contains("`[limits] buffers`") && !words.contains("has begun"), "{}", refused.body);
        // The controls: what fits is given, and what was refused takes no room from it.
        assert_eq!(told(&read_file(800 << 10)).0.len(), 800 << 10);
    }
    // An answer counts until it was read.
    let fits = || !told(&read_file(800 << 10)).1;
    let message = call(5, "read_file", &json!({"path": "f", "length": 800 << 10}));
    let unread = send(&service, &service.token, Some(&session), &message);
    assert!(eventually(scaled(Duration::from_secs(5)), || !fits()));
    thread::sleep(Duration::from_millis(500));
    assert!(!fits());
    assert_eq!(told(&read(unread)).0.len(), 800 << 10);
    assert!(eventually(scaled(Duration::from_secs(5)), fits));
    // Code whose result finds no room has run, and the model is told so.
    let code = "import os; open('ran', 'w'); print(os.path.getsize('f'))";
    let refused = ask(&service, Some(&session), &call(6, "execute_code", &json!({"code": code, "collect": ["f"]})));
    let (words, is_error) = told(&refused);
    assert!(is_error && words.starts_with("this has begun, and may be done: "), "{}", refused.body);
    assert!(words.contains("`[limits] buffers`") && words.ends_with("before you do it again"), "{}", refused.body);
    assert_eq!(told(&execute(&service, &session, "import os; print(os.path.exists('ran'))")), ("True\n", false));
    service.end();
}

test!(RootOnly, a_message_of_mcp_takes_no_more_memory_than_is_counted, seconds 60);
fn a_message_of_mcp_takes_no_more_memory_than_is_counted() {
    let service = service("[limits]\nbody = \"32MiB\"\nbuffers = \"64MiB\"\n", "");
    let session = begin(&service);
    let fields = [&*format!("Authorization: Bearer {}", service.token), &format!("Mcp-Session-Id: {session}"), JSON, ACCEPT];
    let before = peak_of_front(&service);
    let (text, list) = (format!("\"{}\"", "0".repeat(12 << 20)), format!("[{}0]", "0,".repeat(6 << 20)));
    let params = |meta: &str| format!("{{\"_meta\":{{{meta}}},\"name\":\"list_files\",\"arguments\":{{}}}}");
    let plain = params("");
    for (id, method, params, said) in [
        ("1", "\"tools/call\"", &*params(&format!("\"a\":{list}")), "more than 10000 values"),
        ("1", "\"ping\"", &params(&format!("\"a\":{list}")), "more than 10000 values"),
        ("1", "\"ping\"", &params(&format!("\"a\":{text}")), "one that calls no tool may have 65536"),
        ("1", "\"tools/call\"", &params(&format!("\"progressToken\":{text}")), "`params._meta.progressToken` has 12582914 bytes"),
        (&text, "\"tools/call\"", &plain, "`id` has 12582914 bytes, and may have 1024"),
        (&text, "\"ping\"", &plain, "`id` has 12582914 bytes, and may have 1024"),
        ("1", &text, &plain, "`method` has 12582914 bytes, and may have 1024"),
    ] {
        let message = format!("{{\"jsonrpc\":\"2.0\",\"id\":{id},\"method\":{method},\"params\":{params}}}");
        let answer = service.ask_with("POST", "/mcp", &fields, message.as_bytes());
        assert!(answer.is(400, "bad_json").body["detail"].as_str().unwrap().contains(said), "{said}: {}", answer.body);
        assert!(peak_of_front(&service) < before + (24 << 10), "{said}: {} KiB after {before}", peak_of_front(&service));
    }
    // The controls: texts of that size may be in a call, and are seen there; short ones may be where those were.
    let mut listed = call(8, "list_files", &json!({}));
    (listed["id"], listed["params"]["_meta"]) = (json!("0".repeat(1000)), json!({"progressToken": "0".repeat(1000), "a": [0, 0]}));
    let listed = ask(&service, Some(&session), &listed);
    assert_eq!((told(&listed).1, &listed.body["id"]), (false, &json!("0".repeat(1000))), "{}", listed.body);
    let written = ask(&service, Some(&session), &call(9, "write_file", &json!({"path": "f", "text": "0".repeat(12 << 20)})));
    assert_eq!(told(&written), ("f: 12582912 bytes", false));
    assert!(peak_of_front(&service) > before + (24 << 10), "{} KiB after {before}", peak_of_front(&service));
    service.end();
}
