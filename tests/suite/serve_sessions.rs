//! Sessions of the service: files that stay between runs, whose they are, how they end, and what
//! outlives a front.

use std::{
    fs,
    io::Write,
    thread,
    time::{Duration, Instant},
};

use serde_json::{Value, json};

use super::serve::{Answer, RUN, Service, head, kill};
use crate::support::{
    exec::{stockade, text, token},
    leftovers::host_process_with,
    policy_dir::PolicyDirectory,
    runner::{eventually, test},
    timeouts::scaled,
};

/// What a reload may take beside other tests: each policy is tried once more for it, for 60 s at most.
const RELOADED: Duration = Duration::from_secs(65);

/// What a key that may keep sessions has in its table.
const KEEPS: &str = "scopes = [\"run\", \"keep\"]\nsessions = 2";

/// A service whose key may keep sessions.
pub(super) fn service(config: &str, keys: &str) -> Service {
    Service::granted(KEEPS, &[], &[], PolicyDirectory::new(), config, keys)
}

fn open(service: &Service, asked: &Value) -> String {
    let opened = service.ask("POST", "/v1/sessions", &service.token, asked);
    assert_eq!(opened.status, 201, "{} {}", opened.body, service.log());
    format!("/v1/sessions/{}", opened.body["session"].as_str().unwrap())
}

fn run(service: &Service, session: &str, code: &str) -> Answer {
    service.ask("POST", &format!("{session}/run"), &service.token, &json!({ "code": code }))
}

fn file(service: &Service, method: &str, place: &str, fields: &[&str], body: &[u8]) -> Answer {
    let token = format!("Authorization: Bearer {}", service.token);
    let fields: Vec<&str> = [&*token, "Content-Type: application/octet-stream"].into_iter().chain(fields.iter().copied()).collect();
    service.ask_with(method, place, &fields, body)
}

test!(Both, files_of_a_session_stay_between_its_runs_and_end_with_it);
fn files_of_a_session_stay_between_its_runs_and_end_with_it() {
    let service = service("", "");
    let session = open(&service, &json!({"labels": {"who": "test"}}));
    run(&service, &session, "open('kept', 'w').write('12345'); print(1)").ran("1\n");
    run(&service, &session, "print(open('kept').read())").ran("12345\n");
    // Each is a run of its own in all else.
    run(&service, &session, "import os; os.environ['A'] = 'x'; global_name = 1").ran("");
    run(&service, &session, "import os; print(os.environ.get('A'), 'global_name' in globals())").ran("None False\n");
    let place = |name: &str| format!("{session}/files/{name}");
    let read = |name: &str, fields: &[&str]| file(&service, "GET", &place(name), fields, b"");
    assert_eq!((read("kept", &[]).status, read("kept", &[]).body), (200, json!(12345)));
    let part = read("kept", &["Range: bytes=1-2"]);
    assert_eq!((part.status, &part.body), (206, &json!(23)));
    assert!(part.head.contains("content-range: bytes 1-2/5"), "{}", part.head);
    assert_eq!(read("kept", &["Range: bytes=-1"]).body, json!(5));
    read("kept", &["Range: bytes=9-"]).is(416, "bad_range");
    assert_eq!(file(&service, "PUT", &place("a/b"), &[], b"77").status, 204);
    run(&service, &session, "print(open('a/b').read())").ran("77\n");
    let listed = service.ask("GET", &place("?recursive=true"), &service.token, &Value::Null).body;
    let paths: Vec<&Value> = listed["entries"].as_array().unwrap().iter().map(|entry| &entry["path"]).collect();
    assert_eq!(paths, ["a", "a/b", "kept"]);
    file(&service, "DELETE", &place("a"), &[], b"").is(409, "directory_not_empty");
    assert_eq!(file(&service, "DELETE", &place("a/b"), &[], b"").status, 204);
    file(&service, "GET", &place("a/b"), &[], b"").is(404, "file_missing");
    // No link leads out, and no path.
    run(&service, &session, "import os; os.symlink('/etc/passwd', 'link'); os.symlink('/etc', 'etc')").ran("");
    for name in ["link", "etc/passwd"] {
        file(&service, "GET", &place(name), &[], b"").is(403, "path_refused");
        file(&service, "PUT", &place(name), &[], b"x");
    }
    file(&service, "GET", &place("a/../../etc/passwd"), &[], b"").is(400, "bad_http");
    assert!(!fs::read_to_string("/etc/passwd").unwrap().starts_with('x'));
    // A file that finds no room leaves the one before.
    file(&service, "PUT", &place("kept"), &[], &vec![b'x'; 40 << 20]);
    assert_eq!(service.ask("POST", &format!("{session}/reset"), &service.token, &Value::Null).status, 204);
    run(&service, &session, "import os; print(os.path.exists('kept'))").ran("False\n");
    assert_eq!(service.ask("DELETE", &session, &service.token, &Value::Null).status, 204);
    run(&service, &session, "1").is(404, "no_such_session");
    assert!(eventually(scaled(Duration::from_secs(20)), || service.processes("stockade serve-keeper").is_empty()));
    service.end();
}

test!(Both, a_key_keeps_sessions_from_the_reload_on_that_grants_it, seconds 90);
fn a_key_keeps_sessions_from_the_reload_on_that_grants_it() {
    let service = Service::new();
    service.ask("POST", "/v1/sessions", &service.token, &json!({})).is(403, "scope_missing");
    let keys = fs::read_to_string(service.keys()).unwrap();
    fs::write(service.keys(), keys.replace(RUN, KEEPS)).unwrap();
    service.signal("HUP");
    assert!(eventually(scaled(RELOADED), || service.ask("GET", "/v1/sessions", &service.token, &Value::Null).status == 200));
    open(&service, &json!({}));
    service.end();
}

test!(Both, a_session_is_of_one_key_one_policy_and_has_its_quotas, seconds 90);
fn a_session_is_of_one_key_one_policy_and_has_its_quotas() {
    let service = service("", "");
    let session = open(&service, &json!({}));
    let other = stockade(["key", "new", "other", "--policy", "default", "--add", "--file", text(&service.keys())]).output().unwrap();
    let other = String::from_utf8(other.stdout).unwrap().trim().to_owned();
    let keys = fs::read_to_string(service.keys()).unwrap();
    fs::write(service.keys(), keys.replace("scopes = [\"run\"]", "scopes = [\"run\", \"keep\"]")).unwrap();
    service.signal("HUP");
    assert!(eventually(scaled(RELOADED), || service.ask("GET", "/v1/sessions", &other, &Value::Null).status == 200));
    for (method, path) in
        [("GET", ""), ("POST", "/run"), ("POST", "/reset"), ("GET", "/files/"), ("GET", "/files/x"), ("DELETE", "/files/x"), ("DELETE", "")]
    {
        service.ask(method, &format!("{session}{path}"), &other, &json!({"code": "1"})).is(404, "no_such_session");
    }
    assert_eq!(service.ask("GET", "/v1/sessions", &other, &Value::Null).body, json!({"sessions": []}));
    let ask = |asked: Value| service.ask("POST", "/v1/sessions", &service.token, &asked);
    ask(json!({"policy": "strict"})).is(403, "policy_not_granted");
    ask(json!({"idle": "1ms"})).is(422, "bad_request");
    ask(json!({"colour": 1})).is(422, "bad_request");
    service.ask("POST", &format!("{session}/run?policy=strict"), &service.token, &json!({"code": "1"})).is(400, "bad_http");
    let _second = open(&service, &json!({}));
    ask(json!({})).is(429, "key_sessions");
    // The other key loses the scope: its session ends, and those of this one stay.
    let of_other = service.ask("POST", "/v1/sessions", &other, &json!({}));
    assert_eq!((of_other.status, service.processes("stockade serve-keeper").len()), (201, 3), "{}", of_other.body);
    let both = fs::read_to_string(service.keys()).unwrap();
    let lost = both.rfind("\"keep\"").unwrap();
    fs::write(service.keys(), format!("{}{}", &both[..lost], both[lost..].replacen("\"keep\"", "\"watch\"", 1))).unwrap();
    service.signal("HUP");
    assert!(eventually(scaled(RELOADED), || service.processes("stockade serve-keeper").len() == 2), "{}", service.log());
    // The key goes: its keepers end.
    let own = fs::read_to_string(service.keys()).unwrap();
    let of_other = own.rfind("[[key]]").unwrap();
    fs::write(service.keys(), &own[of_other..]).unwrap();
    service.signal("HUP");
    assert!(eventually(scaled(RELOADED), || service.processes("stockade serve-keeper").is_empty()));
    service.end();
}

test!(Both, a_session_ends_with_its_key_also_while_code_runs_in_it, seconds 90);
fn a_session_ends_with_its_key_also_while_code_runs_in_it() {
    let mark = token("revoked");
    let service = service("", "");
    let with_key = fs::read_to_string(service.keys()).unwrap();
    // The control: of a session that goes on, the key reads the file.
    let session = open(&service, &json!({}));
    run(&service, &session, "open('kept', 'w').write('secret')").ran("");
    let read = |session: &str| service.ask("GET", &format!("{session}/files/kept"), &service.token, &Value::Null);
    assert_eq!(read(&session).status, 200);
    let code = format!("import subprocess; subprocess.run(['sh', '-c', 'sleep 60; : {mark}'])");
    let body = json!({ "code": code }).to_string();
    let fields = [&*format!("Authorization: Bearer {}", service.token), "Content-Type: application/json"];
    let head = super::serve::head("POST", &format!("{session}/run"), &fields, body.len());
    let mut client = service.connect();
    std::io::Write::write_all(&mut client, (head + &body).as_bytes()).unwrap();
    assert!(eventually(scaled(Duration::from_secs(10)), || host_process_with(&mark)));
    fs::write(service.keys(), with_key.replace("id = \"test\"", "id = \"other\"")).unwrap();
    service.signal("HUP");
    assert_eq!(super::serve::read_answer(client).body["verdict"], "cancelled");
    assert!(eventually(scaled(RELOADED), || service.processes("stockade serve-keeper").is_empty()), "{}", service.log());
    // The next who has this id finds nothing of it.
    fs::write(service.keys(), with_key).unwrap();
    service.signal("HUP");
    let is_back = || service.ask("GET", "/v1/sessions", &service.token, &Value::Null).body == json!({"sessions": []});
    assert!(eventually(scaled(RELOADED), is_back));
    assert_eq!(read(&session).status, 404);
    service.end();
}

test!(Both, a_session_outlives_its_front_and_ends_when_nothing_is_asked_of_it);
fn a_session_outlives_its_front_and_ends_when_nothing_is_asked_of_it() {
    let mut service = service("", "");
    let (session, mark) = (open(&service, &json!({"idle": "3s"})), token("keeper"));
    run(&service, &session, "open('kept', 'w').write('1')").ran("");
    let _client = {
        let code = format!("import subprocess; subprocess.run(['sh', '-c', 'sleep 60; : {mark}'])");
        let body = json!({ "code": code }).to_string();
        let mut stream = service.connect();
        let fields = [&*format!("Authorization: Bearer {}", service.token), "Content-Type: application/json"];
        let head = super::serve::head("POST", &format!("{session}/run"), &fields, body.len());
        std::io::Write::write_all(&mut stream, (head + &body).as_bytes()).unwrap();
        stream
    };
    assert!(eventually(scaled(Duration::from_secs(10)), || host_process_with(&mark)));
    let front = service.processes("stockade-serve")[0];
    kill(front, "KILL");
    // Its run ends with the front, its files do not.
    assert!(eventually(scaled(Duration::from_secs(10)), || !host_process_with(&mark)));
    assert!(eventually(scaled(Duration::from_secs(10)), || service.get("/live").is_some_and(|live| live.status == 200)));
    assert!(eventually(scaled(Duration::from_secs(5)), || service.ask("GET", &session, &service.token, &Value::Null).status == 200));
    run(&service, &session, "print(open('kept').read())").ran("1\n");
    // What is in use does not end: a run that takes longer than `idle`.
    run(&service, &session, "import time; time.sleep(4); print(2)").ran("2\n");
    let since = Instant::now();
    let gone = || service.ask("GET", &session, &service.token, &Value::Null).status == 404;
    assert!(!gone());
    assert!(eventually(scaled(Duration::from_secs(15)), gone), "it does not end");
    assert!(since.elapsed() > Duration::from_secs(2));
    assert!(eventually(scaled(Duration::from_secs(20)), || service.processes("stockade serve-keeper").is_empty()));
    service.end();
}

test!(Both, labels_of_a_session_that_do_not_fit_end_no_front);
fn labels_of_a_session_that_do_not_fit_end_no_front() {
    let service = service("", "");
    let front = service.processes("stockade-serve");
    for label in ["x".repeat(65_500), "\u{1}".repeat(9000)] {
        service.ask("POST", "/v1/sessions", &service.token, &json!({"labels": {"a": label}})).is(422, "bad_request");
    }
    // The control: as much as fits goes to the supervisor and back.
    let session = open(&service, &json!({"labels": {"a": "x".repeat(16_000)}}));
    assert_eq!(service.ask("GET", &session, &service.token, &Value::Null).body["labels"]["a"].as_str().map(str::len), Some(16_000));
    assert_eq!(service.processes("stockade-serve"), front);
    service.end();
}

test!(Both, a_client_that_hangs_up_leaves_its_session_as_it_was);
fn a_client_that_hangs_up_leaves_its_session_as_it_was() {
    let service = service("", "");
    let session = open(&service, &json!({}));
    let made = "open('kept', 'w').write('7'); open('large', 'wb').write(bytes(30 << 20)); import os; os.mkdir('d')\nfor n in range(2000): open(f'd/{n}', 'w').close()";
    run(&service, &session, made).ran("");
    let token = format!("Authorization: Bearer {}", service.token);
    let body = vec![0; 6 << 20];
    for (method, place, body) in [("GET", "large", &b""[..]), ("GET", "d/", b""), ("PUT", "written", &body)] {
        let fields = [&*token, "Content-Type: application/octet-stream"];
        let mut stream = service.connect();
        stream.write_all(head(method, &format!("{session}/files/{place}"), &fields, body.len()).as_bytes()).unwrap();
        stream.write_all(body).unwrap();
        // It is being served by now, and no client waits for its end.
        thread::sleep(Duration::from_millis(20));
        drop(stream);
        assert_eq!(file(&service, "GET", &format!("{session}/files/kept"), &[], b"").body, json!(7), "{method} {place}");
    }
    // What was sent whole is written whole.
    run(&service, &session, "import os; print(os.path.getsize('written'))").ran("6291456\n");
    // As many as may be are open again as soon as one was closed.
    open(&service, &json!({}));
    assert_eq!(service.ask("DELETE", &session, &service.token, &Value::Null).status, 204);
    let again = || service.ask("POST", "/v1/sessions", &service.token, &json!({}));
    let opened = eventually(scaled(Duration::from_secs(20)), || match again().status {
        201 => true,
        status => status != 429 && panic!("{status}"),
    });
    assert!(opened);
    again().is(429, "key_sessions");
    service.end();
}

test!(Both, what_is_asked_of_a_session_happens_in_order_and_a_dead_keeper_is_told);
fn what_is_asked_of_a_session_happens_in_order_and_a_dead_keeper_is_told() {
    let service = service("", "");
    let session = open(&service, &json!({}));
    let add = |text: &str| format!("import time; time.sleep(.3); open('order', 'a').write({text:?})");
    thread::scope(|scope| {
        for (number, letter) in ["a", "b", "c", "d"].into_iter().enumerate() {
            let (service, session) = (&service, &session);
            scope.spawn(move || {
                thread::sleep(Duration::from_millis(100 * number as u64));
                run(service, session, &add(letter)).ran("");
            });
        }
    });
    run(&service, &session, "print(open('order').read())").ran("abcd\n");
    kill(service.processes("stockade serve-keeper")[0], "KILL");
    assert!(eventually(scaled(Duration::from_secs(20)), || service.processes("stockade serve-keeper").is_empty()));
    let told = run(&service, &session, "print(1)");
    assert!([404, 410].contains(&told.status), "{}", told.body);
    assert!(eventually(scaled(Duration::from_secs(5)), || {
        service.ask("GET", "/v1/sessions", &service.token, &Value::Null).body == json!({"sessions": []})
    }));
    // The others go on.
    run(&service, &open(&service, &json!({})), "print(1)").ran("1\n");
    service.end();
}
