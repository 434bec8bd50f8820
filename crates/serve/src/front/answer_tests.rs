//! Tests of what answers take of the memory for requests and results, asked by requests as they come.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use axum::{
    body::Body,
    http::{Request, Response},
};
use http_body_util::BodyExt;
use hyper::service::Service;
use hyper_util::service::TowerToHyperService;
use stockade_protocol::{
    OutputStream,
    service::{ListenerKind, Scope},
};

use super::{
    tests::{front, key, settings},
    *,
};
use crate::http::{Peer, router};

const MIB: usize = 1 << 20;

/// The answer to a `GET` of the key, whose body is not read yet.
async fn get(front: &Arc<Front>, path: &str) -> Response<Body> {
    let mut request = Request::get(path).body(Body::empty()).unwrap();
    request.extensions_mut().insert(Peer { kind: ListenerKind::Unix, uid: Some(1) });
    TowerToHyperService::new(router(Arc::clone(front))).call(request).await.unwrap()
}

async fn frames(response: Response<Body>) -> Vec<Bytes> {
    let (mut body, mut frames) = (response.into_body(), Vec::new());
    while let Some(frame) = body.frame().await {
        frames.push(frame.unwrap().into_data().unwrap());
    }
    frames
}

/// A front with one key and so much room, which keeps a run with these bytes of result.
async fn front_with_kept(most: usize, result: usize) -> Arc<Front> {
    let front = front(Settings { max_buffers: most as u64, ..settings(&[key("a")]) });
    let log = Arc::new(RunLog::new(front.buffer("a"), 1 << 20));
    log.accept("1", 0);
    log.end(front.buffered("a", format!("{{\"output\":\"{}\"}}\n", "x".repeat(result)).into_bytes(), true));
    let until = tokio::time::Instant::now() + Duration::from_secs(300);
    front.keep("1".to_owned(), EndedRun { key: "a".to_owned(), name: None, log, until });
    front
}

#[tokio::test(start_paused = true)]
async fn all_who_ask_for_a_kept_result_have_the_same_bytes_which_count_until_the_last_has_them() {
    for path in ["/v1/runs/1", "/v1/runs/1/events"] {
        let front = front_with_kept(16 * MIB, 3 * MIB).await;
        let mut answers = Vec::new();
        for _ in 0..50 {
            let response = get(&front, path).await;
            assert_eq!(response.status(), StatusCode::OK);
            let length = response.headers().get("content-length").map(|length| length.to_str().unwrap().parse::<usize>().unwrap());
            let frames = frames(response).await;
            let whole = frames.concat();
            assert!(length.is_none_or(|length| length == whole.len()));
            let last = whole.split(|byte| *byte == b'\n').rfind(|line| !line.is_empty()).unwrap();
            let value: Value = serde_json::from_slice(last).unwrap();
            assert_eq!(value["result"]["output"].as_str().unwrap().len(), 3 * MIB);
            answers.push(frames.into_iter().find(|frame| frame.len() > MIB).unwrap());
        }
        assert!(answers.iter().all(|answer| answer.as_ptr() == answers[0].as_ptr()), "{path}");
        // It is kept no more, and the answers still count.
        tokio::time::sleep(Duration::from_secs(310)).await;
        assert_eq!(get(&front, path).await.status(), StatusCode::NOT_FOUND);
        let room = |bytes| front.buffer("a").grow(bytes).is_ok();
        assert!(room(12 * MIB) && !room(14 * MIB));
        answers.truncate(1);
        assert!(!room(14 * MIB));
        // The control: there is room when the last has gone.
        answers.clear();
        assert!(room(16 * MIB));
    }
}

#[tokio::test(start_paused = true)]
async fn parts_of_a_stream_count_until_they_are_written_and_the_next_waits_for_room() {
    let front = front(Settings { max_buffers: MIB as u64, ..settings(&[key("a")]) });
    let log = Arc::new(RunLog::new(front.buffer("a"), 1 << 20));
    log.print(stockade_protocol::OutputStream::Stdout, &[b'z'; 60 << 10]);
    log.end(Err(draining()));
    let until = tokio::time::Instant::now() + Duration::from_secs(300);
    front.keep("1".to_owned(), EndedRun { key: "a".to_owned(), name: None, log, until });
    let (mut bodies, mut parts) = (Vec::new(), Vec::new());
    for _ in 0..20 {
        let mut body = get(&front, "/v1/runs/1/events").await.into_body();
        match tokio::time::timeout(Duration::from_secs(1), body.frame()).await {
            Ok(part) => parts.push(part.unwrap().unwrap().into_data().unwrap()),
            Err(_) => bodies.push(body),
        }
    }
    assert!(parts.len() >= 5 && parts.iter().all(|part| part.len() > 60 << 10) && bodies.len() >= 5, "{} {}", parts.len(), bodies.len());
    // The control: they go on, each from where it was.
    parts.clear();
    for body in bodies {
        let whole = body.collect().await.unwrap().to_bytes();
        assert_eq!(whole.iter().filter(|byte| **byte == b'z').count(), 60 << 10);
    }
    assert!(front.buffer("a").grow(MIB - (64 << 10)).is_ok());
}

/// A run of the key that waits, with these labels.
fn waiting_run(front: &Arc<Front>, labels: &BTreeMap<String, String>) -> RunHandle {
    let about = About::of(None, None, labels.clone());
    let order = Order { about, ..super::tests::order(front, &key("a"), Duration::from_secs(60)) };
    front.run(order).map_err(|(problem, _)| problem).unwrap()
}

#[tokio::test(start_paused = true)]
async fn a_list_of_runs_has_the_newest_alone_and_counts_until_it_is_written() {
    let many = Key { waiting: 2000, scopes: vec![Scope::Run, Scope::Watch], ..key("a") };
    let mut settings = settings(std::slice::from_ref(&many));
    settings.capacity.waiting = 2000;
    settings.max_buffers = 24 << 20;
    let front = front(settings);
    let labels = BTreeMap::from_iter((0..4).map(|number| (format!("label{number}"), "x".repeat(400))));
    let mut runs: Vec<RunHandle> = (0..MAX_LISTED).map(|_| waiting_run(&front, &labels)).collect();
    for truncated in [false, true] {
        for path in ["/v1/runs", "/v1/watch"] {
            let text = frames(get(&front, path).await).await.concat();
            let list: Value = serde_json::from_slice(&text).unwrap();
            let numbers: Vec<_> = list["runs"].as_array().unwrap().iter().map(|run| run["run"].as_str().unwrap().to_owned()).collect();
            assert_eq!((numbers.len(), &list["truncated"]), (MAX_LISTED, &json!(truncated)), "{path}");
            // The first one gives way to a newer one.
            assert_eq!(numbers.contains(&runs[0].number), !truncated);
            assert!(numbers.contains(&runs.last().unwrap().number));
        }
        runs.push(waiting_run(&front, &BTreeMap::new()));
    }
    // Large labels make the list shorter, and not larger.
    let labels = BTreeMap::from_iter((0..32).map(|number| (format!("{number:02}{}", "\u{1}".repeat(300)), "\u{1}".repeat(300))));
    runs.extend((0..MAX_LISTED).map(|_| waiting_run(&front, &labels)));
    for path in ["/v1/runs", "/v1/watch"] {
        let text = frames(get(&front, path).await).await.concat();
        let list: Value = serde_json::from_slice(&text).unwrap();
        assert!(list["truncated"] == true && text.len() > MIB / 2 && text.len() < 5 * MIB / 4, "{path}: {} bytes", text.len());
        assert_eq!(list["runs"][0]["run"].as_str().unwrap(), runs.last().unwrap().number);
    }
    let (mut held, mut statuses) = (Vec::new(), Vec::new());
    for _ in 0..40 {
        let response = get(&front, "/v1/runs").await;
        statuses.push(response.status());
        held.push(response);
    }
    assert!(statuses.starts_with(&[StatusCode::OK; 2]) && statuses.ends_with(&[StatusCode::SERVICE_UNAVAILABLE]), "{statuses:?}");
    // The control: they make room when they are gone.
    held.clear();
    assert_eq!(get(&front, "/v1/runs").await.status(), StatusCode::OK);
}

#[test]
fn output_in_many_small_parts_counts_what_these_take() {
    let front = front(Settings { max_buffers: 1 << 30, ..settings(&[key("a")]) });
    let output_of = |parts: usize, bytes: usize| {
        let log = RunLog::new(front.buffer("a"), 1 << 30);
        (0..parts).for_each(|_| log.print(OutputStream::Stdout, &vec![b'x'; bytes]));
        log.output()
    };
    // The control: the same bytes in large parts.
    assert!(output_of(4, 16 << 10) < 65 << 10);
    assert!((300 << 10..500 << 10).contains(&output_of(64 << 10, 1)), "{}", output_of(64 << 10, 1));
}

#[test]
fn a_language_that_no_policy_can_have_is_not_kept() {
    let kept =
        |language: &str| crate::http::read_request(json!({"code": "", "language": language}).to_string().as_bytes()).unwrap().0.language;
    assert_eq!((kept("python").as_str(), kept(&"x".repeat(1 << 20)).as_str()), ("python", ""));
}

#[test]
fn few_descriptors_leave_fewer_connections_or_none() {
    let settings = settings(&[key("a")]);
    let connections = |descriptors| crate::listen::connections(&settings, descriptors).map_err(|error| error.to_string());
    assert_eq!(connections(16384), Ok(1024));
    assert!(connections(1024).is_ok_and(|each| each > 400 && each < 500));
    assert!(connections(64).is_err_and(|why| why.contains("64 open files are too few") && why.contains("LimitNOFILE=")));
}

#[test]
fn labels_of_usual_length_are_shown_whole() {
    let labels = BTreeMap::from_iter((0..32).map(|number| (format!("label{number:02}"), "x".repeat(100))));
    assert_eq!(About::of(None, None, labels.clone()).labels, labels);
    let long = BTreeMap::from([("a".to_owned(), "\u{1}".repeat(2000)), ("b".to_owned(), "é".repeat(2000))]);
    let kept = About::of(None, None, long).labels;
    assert_eq!((kept["a"].chars().count(), kept["b"].chars().count()), (256, 256));
}
