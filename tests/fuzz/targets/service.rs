//! The service: bodies of clients of other services, and frames between its processes.

use serde_json::Value;
use stockade_protocol::{
    LimitKey, OutputStream, Request,
    service::{
        Begin, FrameDecoder, FromFront, FromSupervisor, FromWorker, KeeperOf, ListenerKind, MAX_PAYLOAD, Message, NoKeeper, Prepared,
        TemplateLent, TemplateOf, TemplateRefused, TemplateWanted, ToSupervisor, ToWorker,
    },
};
use stockade_serve::facade::{Invalid, execute, sandbox_fusion};

use super::Target;

pub const FACADE: Target = Target {
    name: "facade",
    about: "a body of a client of SandboxFusion, and a result for it",
    corpus: include_str!("../corpus/facade"),
    seeds: || {
        let texts = [
            r#"{"code":"print(1)","language":"python"}"#,
            r#"{"compile_timeout":10,"run_timeout":0.5,"memory_limit_MB":-1,"code":"","stdin":"a","language":"nodejs","files":{"a":"AA==","b":null},
               "fetch_files":["x[1]*"],"args":["-k"]}"#,
            r#"{"code":1,"run_timeout":"2","memory_limit_MB":1.0,"files":[],"args":[1],"timeout":true}"#,
            r#"{"verdict":"exited","code":0,"output":"","error":"","duration_ms":7,"files":[{"path":"a","size":1,"sha256":null,"text":"x"}]}"#,
        ];
        texts.iter().map(|text| text.as_bytes().to_vec()).collect()
    },
    words: &[
        b"\"code\":",
        b"\"language\":",
        b"\"run_timeout\":",
        b"\"memory_limit_MB\":",
        b"\"files\":{",
        b"\"fetch_files\":[",
        b"\"stdin\":",
        b"null",
        b"1e300",
        b"-9223372036854775809",
        b"\"nan\"",
        b"\"verdict\":\"",
        b"wall_timeout",
        b"\"omitted\":",
        b"\\ud83d\\ude00",
        b"[[[[[[[[",
    ],
    longest: 4 << 10,
    run: |input| {
        for translated in [sandbox_fusion::request(input), execute::request(input)] {
            match translated {
                Ok(request) => assert_request(&request),
                Err(invalid) => assert_told(&invalid),
            }
        }
        let Ok(answer) = serde_json::from_slice::<Value>(&sandbox_fusion::response(input)) else { panic!("an answer is JSON") };
        let (status, ran) = (&answer["status"], &answer["run_result"]);
        assert!(ran.is_null() == (status == "SandboxError"), "only code that ran has a result: {answer}");
        assert!(status != "Success" || (ran["return_code"] == 0 && ran["status"] == "Finished"), "{answer}");
        assert!((ran["status"] == "TimeLimitExceeded") == (ran.is_object() && ran["return_code"].is_null()), "{answer}");
    },
};

/// The worker can read it, and no limit of it is malformed.
fn assert_request(request: &[u8]) {
    let Ok(request) = serde_json::from_slice::<Request>(request) else { panic!("it is a request of `exec`") };
    assert!(request.limits.contains_key(LimitKey::Wall.name()), "no client decides that there is no wall clock");
    for (name, value) in &request.limits {
        let parsed = LimitKey::from_name(name).map(|key| key.parse(value));
        assert!(matches!(parsed, Some(Ok(Some(_)))), "{name}: {value:?}");
    }
    let asks_for_more = request.scratch.is_some() || request.approve.is_some() || !request.env.is_empty();
    assert!(!asks_for_more, "what no client of another service can ask for");
}

fn assert_told(invalid: &Invalid) {
    let told: Value = serde_json::from_str(&invalid.to_json()).unwrap_or_default();
    let mistakes = told["detail"].as_array().map_or(&[][..], Vec::as_slice);
    assert!(!mistakes.is_empty() && mistakes.iter().all(|mistake| mistake["loc"][0] == "body" && mistake["type"].is_string()));
}

pub const FRAMES: Target = Target {
    name: "frames",
    about: "frames between front, workers and supervisor",
    corpus: include_str!("../corpus/frames"),
    seeds: || {
        let begin = Begin { run: "1".to_owned(), key: "a".to_owned(), policy: "p".to_owned(), length: 3, output: true };
        let to_worker = [ToWorker::Begin(begin), ToWorker::Request(b"abc".to_vec()), ToWorker::Cancel, ToWorker::Line(2)];
        let prepared = Prepared { key: None, policy: "p".to_owned(), languages: vec!["python".to_owned()] };
        let from_worker = [
            FromWorker::Idle(Some(prepared)),
            FromWorker::Started,
            FromWorker::Output(OutputStream::Stdout, b"out".to_vec()),
            FromWorker::Output(OutputStream::Stderr, b"err".to_vec()),
            FromWorker::LeftOut(OutputStream::Stdout, 7),
            FromWorker::LeftOut(OutputStream::Stderr, 8),
            FromWorker::Result(b"{}".to_vec()),
            FromWorker::End,
            FromWorker::Idle(None),
        ];
        let of = TemplateOf { policy: "p".to_owned(), runtime: "python".to_owned(), key: Some("a".to_owned()) };
        let keeper = KeeperOf {
            session: "s".to_owned(),
            key: "a".to_owned(),
            policy: "p".to_owned(),
            idle_ms: 1000,
            labels: [("a".to_owned(), "b".to_owned())].into(),
        };
        let from_supervisor = [
            FromSupervisor::SettingsPart(b"{}".to_vec()),
            FromSupervisor::SettingsEnd,
            FromSupervisor::Listener(ListenerKind::Tcp),
            FromSupervisor::Worker,
            FromSupervisor::Template(TemplateLent { of: of.clone(), number: 1, runs: 2, made_ms: 3 }),
            FromSupervisor::NoTemplate(TemplateRefused { of: of.clone(), why: "none".to_owned() }),
            FromSupervisor::Keeper(keeper.clone()),
            FromSupervisor::NoKeeper(NoKeeper { session: "s".to_owned(), why: "none".to_owned(), is_full: false }),
            FromSupervisor::Front,
            FromSupervisor::Drain,
            FromSupervisor::Table,
        ];
        let from_front = [FromFront::Keep(keeper)];
        let to_supervisor =
            [ToSupervisor::Wants(TemplateWanted { of, key: "a".to_owned(), unfit: Some(1), has_one: false }), ToSupervisor::HasTable];
        vec![frames(&to_worker), frames(&from_worker), frames(&from_supervisor), frames(&to_supervisor), frames(&from_front)]
    },
    words: &[
        b"\x00\x00\x00\x00",
        b"\x01\x00\x00\x00",
        b"\x00\x00\x01\x00",
        b"\x01\x00\x01\x00",
        b"\xff\xff\xff\xff",
        b"\x01",
        b"\x02",
        b"\x10",
        b"\x15",
        b"\x17",
        b"\x40",
        b"\x60",
        b"\x80",
        b"\x86",
        b"\"of\":{",
        b"\"run\":\"",
        b"\"length\":",
        b"\"tcp\"",
        b"{",
        b"}",
    ],
    longest: 2 << 10,
    run: |input| {
        assert_frames::<ToWorker>(input);
        assert_frames::<FromWorker>(input);
        assert_frames::<FromSupervisor>(input);
        assert_frames::<ToSupervisor>(input);
        assert_frames::<FromFront>(input);
    },
};

fn frames(messages: &[impl Message]) -> Vec<u8> {
    messages.iter().filter_map(|message| message.to_frame().ok()).flatten().collect()
}

/// The same messages come out however the bytes come, and each is written as a frame that is read as it.
fn assert_frames<M: Message + PartialEq + std::fmt::Debug>(input: &[u8]) {
    let whole = taken::<M>(input, input.len().max(1));
    for piece in [1, 3, 64] {
        assert_eq!(taken::<M>(input, piece), whole, "in pieces of {piece}");
    }
    for message in &whole.0 {
        // The JSON of a message may be longer than that which it was read from.
        let Ok(frame) = message.to_frame() else { continue };
        assert!(frame.len() <= MAX_PAYLOAD + 5);
        let again = taken::<M>(&frame, frame.len());
        assert_eq!((again.0.as_slice(), again.1), (std::slice::from_ref(message), true), "a frame is read as it was written");
    }
}

/// The messages of these bytes, and whether there was nothing wrong with them.
fn taken<M: Message>(input: &[u8], piece: usize) -> (Vec<M>, bool) {
    let (mut decoder, mut messages) = (FrameDecoder::default(), Vec::new());
    for bytes in input.chunks(piece) {
        decoder.push(bytes);
        loop {
            match decoder.take() {
                Ok(Some(message)) => messages.push(message),
                Ok(None) => break,
                Err(_) => return (messages, false),
            }
        }
    }
    (messages, true)
}
