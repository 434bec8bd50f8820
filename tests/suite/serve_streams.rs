//! Streams, later answers and batches of the service: what a client hears while a run goes on, what
//! it finds when it comes back, and that no reader slows a run.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    io::{BufRead, BufReader, Read, Write},
    os::unix::net::UnixStream,
    thread,
    time::{Duration, Instant},
};

use base64::{Engine, engine::general_purpose::STANDARD};
use serde_json::{Value, json};

use super::serve::{Service, head};
use crate::support::{
    exec::{stockade, text, token},
    leftovers::host_process_with,
    runner::{eventually, test},
    timeouts::scaled,
};

/// An answer that comes in chunks.
pub(super) struct Stream {
    from: BufReader<UnixStream>,
    pub(super) head: String,
    /// Of the chunk that is read.
    left: usize,
}

impl Read for Stream {
    fn read(&mut self, out: &mut [u8]) -> std::io::Result<usize> {
        if self.left == 0 {
            let mut size = String::new();
            self.from.read_line(&mut size)?;
            self.left = usize::from_str_radix(size.trim(), 16).unwrap_or(0);
            if self.left == 0 {
                return Ok(0);
            }
        }
        let most = out.len().min(self.left);
        let length = self.from.read(&mut out[..most])?;
        self.left -= length;
        if self.left == 0 {
            self.from.read_exact(&mut [0; 2])?;
        }
        Ok(length)
    }
}

impl Stream {
    pub(super) fn open(service: &Service, method: &str, path: &str, fields: &[&str], body: &[u8]) -> Self {
        let mut socket = service.connect();
        let token = format!("Authorization: Bearer {}", service.token);
        let fields: Vec<&str> = fields.iter().copied().chain([&*token]).collect();
        socket.write_all(head(method, path, &fields, body.len()).as_bytes()).unwrap();
        socket.write_all(body).unwrap();
        Stream::of(socket)
    }

    pub(super) fn of(socket: UnixStream) -> Self {
        let mut from = BufReader::new(socket);
        let mut head = String::new();
        while !head.ends_with("\r\n\r\n") {
            assert_ne!(from.read_line(&mut head).unwrap(), 0, "{head}");
        }
        Stream { from, head, left: 0 }
    }

    fn run(service: &Service, code: &str) -> BufReader<Self> {
        let fields = ["Content-Type: application/json", "Accept: application/x-ndjson"];
        let body = json!({ "code": code }).to_string();
        BufReader::new(Stream::open(service, "POST", "/v1/run", &fields, body.as_bytes()))
    }

    fn events(service: &Service, run: &str, after: u64) -> BufReader<Self> {
        BufReader::new(Stream::open(service, "GET", &format!("/v1/runs/{run}/events?after={after}"), &[], b""))
    }
}

pub(super) fn next(stream: &mut impl BufRead) -> Option<Value> {
    let mut line = String::new();
    stream.read_line(&mut line).unwrap();
    (!line.is_empty()).then(|| serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line}")))
}

pub(super) fn rest(mut stream: impl BufRead) -> Vec<Value> {
    std::iter::from_fn(|| next(&mut stream)).collect()
}

/// The bytes of a stream that these events have, and those that they say are missing.
fn bytes_of(events: &[Value], stream: &str) -> (Vec<u8>, u64) {
    let (mut bytes, mut missing) = (Vec::new(), 0);
    for event in events {
        if event["type"] == stream {
            match event["text"].as_str() {
                Some(text) => bytes.extend_from_slice(text.as_bytes()),
                None => bytes.extend(STANDARD.decode(event["base64"].as_str().unwrap()).unwrap()),
            }
        } else if event["type"] == "gap" && event["stream"] == stream {
            missing += event["bytes"].as_u64().unwrap();
        }
    }
    (bytes, missing)
}

fn types(events: &[Value]) -> Vec<&str> {
    events.iter().map(|event| event["type"].as_str().unwrap()).collect()
}

test!(Both, events_come_while_the_program_runs_and_end_with_one_result);
fn events_come_while_the_program_runs_and_end_with_one_result() {
    let service = Service::new();
    let mut stream = Stream::run(&service, "import time\nprint('first', flush=True)\ntime.sleep(2)\nprint('second')");
    let accepted = next(&mut stream).unwrap();
    assert_eq!((&accepted["type"], &accepted["position"]), (&json!("accepted"), &json!(0)));
    let mut events = vec![accepted];
    while bytes_of(&events, "stdout").0 != b"first\n" {
        events.push(next(&mut stream).unwrap());
    }
    // It runs still.
    assert_eq!(service.runs()[0]["state"], "running");
    events.extend(rest(stream));
    assert_eq!(types(&events[..2]), ["accepted", "started"]);
    assert_eq!(bytes_of(&events, "stdout").0, b"first\nsecond\n");
    let last = events.last().unwrap();
    assert_eq!((&last["type"], &last["result"]["output"]), (&json!("result"), &json!("first\nsecond\n")));
    assert_eq!(last["result"]["run"], events[0]["run"]);
    assert_eq!(types(&events).iter().filter(|kind| ["result", "problem"].contains(kind)).count(), 1);
    let seqs: Vec<u64> = events.iter().map(|event| event["seq"].as_u64().unwrap()).collect();
    assert!(seqs.is_sorted() && seqs.iter().collect::<BTreeSet<_>>().len() == seqs.len(), "{seqs:?}");
    assert!(events.iter().all(|event| event["at_ms"].is_u64()));
    // The same as server-sent events.
    let body = json!({"code": "print(1)"}).to_string();
    let mut stream =
        Stream::open(&service, "POST", "/v1/run", &["Content-Type: application/json", "Accept: text/event-stream"], body.as_bytes());
    assert!(stream.head.contains("content-type: text/event-stream"), "{}", stream.head);
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    let blocks: Vec<&str> = text.trim_end().split("\n\n").collect();
    assert!(blocks[0].starts_with("id: 1\nevent: accepted\ndata: {"), "{text}");
    assert!(blocks.last().unwrap().contains("\nevent: result\ndata: {"), "{text}");
    service.end();
}

test!(Both, bytes_of_streams_come_whole_and_cut_between_characters);
fn bytes_of_streams_come_whole_and_cut_between_characters() {
    let service = Service::new();
    let pieces = "import os, time\nfor piece in [b'a\\xc3', b'\\xa9b\\xf0\\x9f', b'\\x98', b'\\x80', b'\\xff\\xfe', b'c\\xe2\\x82']:\n    os.write(1, piece)\n    time.sleep(.1)";
    let events = rest(Stream::run(&service, pieces));
    let (bytes, missing) = bytes_of(&events, "stdout");
    assert_eq!((bytes, missing), (b"a\xc3\xa9b\xf0\x9f\x98\x80\xff\xfec\xe2\x82".to_vec(), 0));
    let texts: Vec<&str> = events.iter().filter_map(|event| event["text"].as_str()).collect();
    assert_eq!(texts.concat(), "a\u{e9}b\u{1f600}c");
    // What is no text comes as bytes, and so does a character that never ends.
    assert_eq!(events.iter().filter(|event| event["base64"].is_string()).count(), 2, "{events:?}");
    service.end();
}

test!(Both, a_cut_stream_goes_on_where_it_was_and_no_other_key_reads_it);
fn a_cut_stream_goes_on_where_it_was_and_no_other_key_reads_it() {
    let mut service = Service::new();
    let mut stream = Stream::run(&service, "import time\nfor i in range(40):\n    print(i, flush=True)\n    time.sleep(.05)");
    let mut events: Vec<Value> = (0..12).map(|_| next(&mut stream).unwrap()).collect();
    drop(stream);
    let run = events[0]["run"].as_str().unwrap().to_owned();
    thread::sleep(Duration::from_millis(500));
    let after = events.last().unwrap()["seq"].as_u64().unwrap();
    events.extend(rest(Stream::events(&service, &run, after)));
    let expected: String = (0..40).map(|number| format!("{number}\n")).collect();
    assert_eq!((String::from_utf8(bytes_of(&events, "stdout").0).unwrap(), bytes_of(&events, "stdout").1), (expected, 0));
    assert_eq!(types(&events).iter().filter(|kind| **kind == "result").count(), 1);
    // Once more after its end, from an event on or from the beginning.
    let again = rest(Stream::events(&service, &run, 0));
    assert_eq!(again, events);
    let from = again[3]["seq"].as_u64().unwrap();
    assert_eq!(rest(Stream::events(&service, &run, from)), events[4..]);
    let last = events.last().unwrap()["seq"].as_u64().unwrap();
    assert!(rest(Stream::events(&service, &run, last)).is_empty());
    // It is this key's alone.
    let other = stockade(["key", "new", "other", "--policy", "default", "--add", "--file", text(&service.keys())]).output().unwrap();
    let other = String::from_utf8(other.stdout).unwrap().trim().to_owned();
    service.signal("HUP");
    let path = format!("/v1/runs/{run}/events");
    assert!(eventually(scaled(Duration::from_secs(5)), || service.ask("GET", "/v1/runs", &other, &Value::Null).status == 200));
    service.ask("GET", &path, &other, &Value::Null).is(404, "no_such_run");
    service.ask("GET", &format!("{path}?after=x"), &service.token, &Value::Null).is(400, "bad_http");
    assert_eq!(service.get("/live").unwrap().status, 200);
    service.end();
}

test!(Both, a_stream_that_nobody_reads_ends_its_run_unless_it_is_gone_on_with);
fn a_stream_that_nobody_reads_ends_its_run_unless_it_is_gone_on_with() {
    let service = Service::with("[capacity]\noversubscribe = 4.0\n", "");
    let marks = [token("unread"), token("resumed")];
    let code =
        |mark: &str| format!("import subprocess; print(1, flush=True); subprocess.run(['sh', '-c', 'sleep 18; : {mark}']); print(2)");
    let body = |mark: &str| json!({"code": code(mark), "limits": {"wall": "30s"}}).to_string();
    let fields = ["Content-Type: application/json", "Accept: application/x-ndjson"];
    let streams = marks.each_ref().map(|mark| {
        let mut stream = BufReader::new(Stream::open(&service, "POST", "/v1/run", &fields, body(mark).as_bytes()));
        next(&mut stream).unwrap()["run"].as_str().unwrap().to_owned()
    });
    assert!(eventually(scaled(Duration::from_secs(10)), || marks.iter().all(|mark| host_process_with(mark))));
    let [_, resumed] = &streams;
    let events = rest(Stream::events(&service, resumed, 0));
    assert_eq!(events.last().unwrap()["result"]["output"], "1\n2\n", "{events:?}");
    assert!(!host_process_with(&marks[0]));
    let [unread, _] = &streams;
    let events = rest(Stream::events(&service, unread, 0));
    assert_eq!(events.last().unwrap()["result"]["verdict"], "cancelled");
    service.end();
}

test!(Both, a_slow_reader_slows_no_run_and_hears_what_it_has_missed);
fn a_slow_reader_slows_no_run_and_hears_what_it_has_missed() {
    const PRINTED: u64 = 4 << 20;
    let service = Service::new();
    let code = format!("import sys\nfor _ in range({}):\n    sys.stdout.write('x' * 65536)\nsys.stderr.write('end')", PRINTED / 65536);
    let mut stream = Stream::run(&service, &code);
    // Nothing is read until the run is over, which it is at once.
    assert!(eventually(scaled(Duration::from_secs(10)), || service.runs().is_empty()), "the run waits for its reader");
    let mut events = vec![next(&mut stream).unwrap()];
    events.extend(rest(stream));
    let (bytes, missing) = bytes_of(&events, "stdout");
    assert!(missing > 0, "a reader that reads nothing misses nothing");
    assert_eq!(bytes.len() as u64 + missing, PRINTED);
    assert_eq!(bytes_of(&events, "stderr"), (b"end".to_vec(), 0));
    assert_eq!(events.last().unwrap()["result"]["verdict"], "exited");
    service.end();
    // So much and no more is told, however fast the reader is.
    let service = Service::with("[limits]\nstream_size = \"100KiB\"\n", "");
    let (bytes, missing) = bytes_of(&rest(Stream::run(&service, &code)), "stdout");
    assert!(bytes.len() <= 100 << 10 && !bytes.is_empty());
    assert_eq!(bytes.len() as u64 + missing, PRINTED);
    service.end();
}

test!(Both, a_client_may_ask_for_its_result_later);
fn a_client_may_ask_for_its_result_later() {
    let service = Service::new();
    let fields = [&*format!("Authorization: Bearer {}", service.token), "Content-Type: application/json", "Prefer: respond-async"];
    let body = json!({"code": "import time; time.sleep(1); print(7)"}).to_string();
    let answer = service.ask_with("POST", "/v1/run", &fields, body.as_bytes());
    assert_eq!(answer.status, 202);
    let path = format!("/v1/runs/{}", answer.body["run"].as_str().unwrap());
    assert!(answer.head.contains(&format!("location: {path}")), "{}", answer.head);
    let ask = || service.ask("GET", &path, &service.token, &Value::Null).body;
    assert!(service.has_runs("running", 1));
    assert!(eventually(scaled(Duration::from_secs(10)), || ask()["state"] == "ended"));
    assert_eq!((&ask()["result"]["output"], &ask()["result"]["verdict"]), (&json!("7\n"), &json!("exited")));
    assert_eq!(service.runs(), [] as [Value; 0]);
    service.end();
}

test!(Both, the_same_request_gets_the_same_answer);
fn the_same_request_gets_the_same_answer() {
    let service = Service::new();
    let token = format!("Authorization: Bearer {}", service.token);
    let ask = |name: &str, code: &str| {
        let fields = [&token, "Content-Type: application/json", &format!("Idempotency-Key: {name}")];
        service.ask_with("POST", "/v1/run", &fields, json!({ "code": code }).to_string().as_bytes())
    };
    let random = "import random, time; time.sleep(1); print(random.random())";
    let first = ask("\"a\"", random);
    assert_eq!(ask("\"a\"", random).body, first.body);
    assert_ne!(ask("\"b\"", random).body["output"], first.body["output"]);
    ask("\"a\"", "print(1)").is(422, "idempotency_reused");
    // A second while the first runs; one whose client has gone runs on.
    let fields = [&token, "Content-Type: application/json", "Idempotency-Key: c"];
    let body = json!({ "code": random }).to_string();
    let mut client = service.connect();
    client.write_all(head("POST", "/v1/run", &fields, body.len()).as_bytes()).unwrap();
    client.write_all(body.as_bytes()).unwrap();
    assert!(service.has_runs("running", 1));
    ask("c", random).is(409, "idempotency_in_flight");
    drop(client);
    assert!(service.has_runs("running", 0));
    assert_eq!(ask("c", random).body["verdict"], "exited");
    service.ask_with("POST", "/v1/run", &[&token, "Content-Type: application/json", "Idempotency-Key: "], b"{}").is(400, "bad_http");
    service.end();
}

fn batch(service: &Service, query: &str, lines: &str) -> Vec<Value> {
    let fields = ["Content-Type: application/x-ndjson"];
    rest(BufReader::new(Stream::open(service, "POST", &format!("/v1/batch{query}"), &fields, lines.as_bytes())))
}

test!(Both, each_line_of_a_batch_is_answered_once);
fn each_line_of_a_batch_is_answered_once() {
    let service = Service::new();
    let cases = json!({"id": "p", "code": "import os, sys; print(input(), sys.argv[1:], os.environ.get('LANG'))", "args": ["d"],
        "cases": [{"stdin": "1"}, {"id": "c", "stdin": "2", "args": ["x"]}, {"stdin": "3", "env": {"LANG": "C"}}]});
    let lines = format!(
        "{}\n\n{cases}\nno json\n{}\n{}",
        json!({"id": "a", "code": "import time; time.sleep(1); print('slow')"}),
        json!({"id": "x", "code": "raise SystemExit(3)", "colour": 1}),
        json!({"id": "z", "code": "print('last')"})
    );
    let by_input = batch(&service, "?order=input", &lines);
    let ids: Vec<&Value> = by_input.iter().map(|line| &line["id"]).collect();
    assert_eq!(ids, [&json!("a"), &json!("p/0"), &json!("p/c"), &json!("p/2"), &Value::Null, &json!("x"), &json!("z"), &Value::Null]);
    assert_eq!(by_input.last().unwrap(), &json!({"type": "end", "lines": 5, "problems": 1}));
    let output = |at: usize| by_input[at]["result"]["output"].as_str().unwrap();
    assert_eq!((output(0), output(2), output(6)), ("slow\n", "2 ['x'] C.UTF-8\n", "last\n"));
    assert!(output(1).starts_with("1 ['d']") && output(3) == "3 ['d'] C\n", "{} {}", output(1), output(3));
    assert_eq!((&by_input[4]["problem"]["reason"], &by_input[4]["index"]), (&json!("bad_json"), &json!(2)));
    assert_eq!((&by_input[5]["result"]["verdict"], &by_input[5]["index"]), (&json!("bad_request"), &json!(3)));
    // As they end: the slow one is not first.
    let as_ended = batch(&service, "", &lines);
    assert_ne!(as_ended[0]["id"], "a");
    let of = |answers: &[Value]| answers.iter().map(|line| (line["id"].to_string(), line["index"].to_string())).collect::<BTreeSet<_>>();
    assert_eq!(of(&as_ended), of(&by_input));
    service.ask_with("POST", "/v1/batch?order=none", &[&format!("Authorization: Bearer {}", service.token)], b"").is(400, "bad_http");
    service.ask("POST", "/v1/batch", &service.token, &Value::Null).is(415, "bad_type");
    service.end();
}

test!(Both, a_large_batch_is_read_whatever_its_client_reads_and_no_id_is_lost);
fn a_large_batch_is_read_whatever_its_client_reads_and_no_id_is_lost() {
    const COUNT: usize = 300;
    // The quotas of its key make a batch wait, and refuse nothing of it.
    let service = Service::with("[capacity]\nwaiting = 3\n[limits]\nbody = \"8MiB\"\n", "");
    let filler = "#".repeat(16 << 10);
    let lines: String = (0..COUNT)
        .map(|n| json!({"id": n.to_string(), "language": "bash", "code": format!("echo {n}\n{filler}")}).to_string() + "\n")
        .collect();
    let answers = batch(&service, "", &lines);
    let outputs: BTreeMap<String, String> =
        answers.iter().filter_map(|line| Some((line["id"].as_str()?.to_owned(), line["result"]["output"].as_str()?.to_owned()))).collect();
    assert_eq!((answers.len(), outputs.len()), (COUNT + 1, COUNT));
    assert!(outputs.iter().all(|(id, output)| *output == format!("{id}\n")));
    service.end();
    // More than a body may have: what came of it is run.
    let service_with_small = Service::with("[limits]\nbody = \"64KiB\"\n", "");
    let answers = batch(&service_with_small, "?order=input", &lines);
    let problems: Vec<&Value> = answers.iter().filter(|line| line.get("problem").is_some()).collect();
    assert_eq!((problems.len(), &problems[0]["problem"]["reason"]), (1, &json!("too_large")));
    assert_eq!(answers[0]["result"]["output"], "0\n");
    service_with_small.end();
}

/// The most memory that the front has had, in KiB.
pub(super) fn peak_of_front(service: &Service) -> u64 {
    let front = service.processes("stockade-serve")[0];
    let status = fs::read_to_string(format!("/proc/{front}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

test!(RootOnly, what_a_batch_has_not_run_yet_takes_no_more_than_it_brought);
fn what_a_batch_has_not_run_yet_takes_no_more_than_it_brought() {
    let service = Service::with("[capacity]\ncpus = 1\n[limits]\nbuffers = \"32MiB\"\nbody = \"16MiB\"\n", "");
    let before = peak_of_front(&service);
    // A program of half a megabyte for each of 2,000 cases; and refusals, whose answers nobody reads.
    let cases = format!("{{\"code\":\"{}\",\"language\":\"sh\",\"cases\":[{}{{}}]}}", "#".repeat(500_000), "{},".repeat(2000));
    let refusals = "x\n".repeat(3 << 20);
    for body in [cases, refusals] {
        let fields = [&*format!("Authorization: Bearer {}", service.token), "Content-Type: application/x-ndjson"];
        let mut stream = service.connect();
        stream.write_all(head("POST", "/v1/batch", &fields, body.len()).as_bytes()).unwrap();
        stream.write_all(body.as_bytes()).unwrap();
        thread::sleep(Duration::from_secs(2));
        // Others are served meanwhile.
        assert_eq!(service.ask("GET", "/v1/limits", &service.token, &Value::Null).status, 200);
        drop(stream);
        assert!(peak_of_front(&service) < before + (96 << 10), "{} KiB after {before}", peak_of_front(&service));
    }
    // Small cases with a variable each, of which one runs.
    let line = format!("{{\"code\":\"sleep 60\",\"language\":\"sh\",\"cases\":[{}{{}}]}}", "{\"env\":{\"a\":\"0\"}},".repeat(99_000));
    let fields = [&*format!("Authorization: Bearer {}", service.token), "Content-Type: application/x-ndjson"];
    let batches = [(); 6].map(|()| {
        let mut stream = service.connect();
        stream.write_all((head("POST", "/v1/batch", &fields, line.len()) + &line).as_bytes()).unwrap();
        stream
    });
    thread::sleep(Duration::from_secs(2));
    assert_eq!(service.ask("GET", "/v1/limits", &service.token, &Value::Null).status, 200);
    assert!(peak_of_front(&service) < before + (96 << 10), "{} KiB after {before}", peak_of_front(&service));
    drop(batches);
    // The control: what a front holds is seen there.
    assert!(peak_of_front(&service) > before + (4 << 10), "{} KiB after {before}", peak_of_front(&service));
    service.end();
}

test!(Both, a_batch_ends_at_its_deadline_and_with_its_client);
fn a_batch_ends_at_its_deadline_and_with_its_client() {
    let service = Service::with("[capacity]\ncpus = 1\n", "");
    let mark = token("batch");
    let sleep = |seconds: u32| {
        let line = json!({"language": "bash", "code": format!("sh -c 'sleep {seconds}; : {mark}'")}).to_string() + "\n";
        line.repeat(20)
    };
    let begun = Instant::now();
    let answers = batch(&service, "?deadline=2s", &sleep(1));
    let late = answers.iter().filter(|line| line["problem"]["reason"] == "deadline_exceeded").count();
    let ran = answers.iter().filter(|line| line["result"]["verdict"] == "exited").count();
    assert!(late > 0 && ran > 0 && late + ran == 20 && begun.elapsed() < scaled(Duration::from_secs(15)), "{late} {ran}");
    // Its client goes: nothing is started any more, and what runs is cancelled.
    let fields = [&*format!("Authorization: Bearer {}", service.token), "Content-Type: application/x-ndjson"];
    let lines = sleep(5);
    let mut client = service.connect();
    client.write_all(head("POST", "/v1/batch", &fields, lines.len()).as_bytes()).unwrap();
    client.write_all(lines.as_bytes()).unwrap();
    assert!(eventually(scaled(Duration::from_secs(10)), || host_process_with(&mark)));
    drop(client);
    assert!(eventually(scaled(Duration::from_secs(3)), || !host_process_with(&mark) && service.runs().is_empty()));
    thread::sleep(Duration::from_millis(300));
    assert!(!host_process_with(&mark));
    service.end();
}
