//! The front with workers whose other end a test holds: who gets which run, and what comes of a worker
//! when a run does not begin.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::{
    io::{Read, Write},
    os::{fd::OwnedFd, unix::net::UnixStream},
};

use stockade_protocol::service::{Capacity, Credential, FrameDecoder, FromWorker, Message, Scope, ToWorker};

use super::*;

/// A key that may do what runs do.
pub(super) fn key(id: &str) -> Key {
    Key {
        id: id.to_owned(),
        credential: Credential::Uid(1),
        policies: vec!["p".to_owned()],
        scopes: vec![Scope::Run],
        running: 100,
        waiting: 100,
        runs_per_minute: None,
        cpu_per_hour: None,
        weight: 1,
        expires: None,
        sessions: 1,
    }
}

/// Room for eight runs of the one policy.
pub(super) fn settings(keys: &[Key]) -> Settings {
    let size = RunSize { cpus: 1000, memory: 1 << 20 };
    Settings {
        keys: keys.to_vec(),
        capacity: Capacity { size: RunSize { cpus: 8000, memory: 8 << 20 }, waiting: 100, queue_ms: 60_000, sessions: 4 },
        max_body: 1 << 20,
        max_buffers: 64 << 20,
        stream_size: 1 << 20,
        policies: BTreeMap::from([("p".to_owned(), size)]),
        ..Settings::default()
    }
}

fn front(settings: Settings) -> Arc<Front> {
    Arc::new(Front::new(settings, mpsc::unbounded_channel().0))
}

/// A worker that is idle, and its other end.
struct Worker {
    socket: UnixStream,
    said: FrameDecoder,
}

impl Worker {
    fn new() -> (WorkerLink, Self) {
        let (front, socket) = UnixStream::pair().unwrap();
        socket.set_nonblocking(true).unwrap();
        (WorkerLink::new(OwnedFd::from(front)).unwrap(), Worker { socket, said: FrameDecoder::default() })
    }

    /// What the front has told it until now, and whether the front still holds its other end.
    fn heard(&mut self) -> (Vec<ToWorker>, bool) {
        let (mut piece, mut is_there) = ([0; 4096], true);
        while let Ok(length) = self.socket.read(&mut piece) {
            if length == 0 {
                is_there = false;
                break;
            }
            self.said.push(&piece[..length]);
        }
        (std::iter::from_fn(|| self.said.take().unwrap()).collect(), is_there)
    }

    fn say(&mut self, message: &FromWorker) {
        self.socket.write_all(&message.to_frame().unwrap()).unwrap();
    }

    /// Answers a run.
    fn answer(&mut self, result: &Value) {
        self.say(&FromWorker::Started);
        self.say(&FromWorker::Result(result.to_string().into_bytes()));
        self.say(&FromWorker::End);
    }
}

/// A request of a key that waits at most so long.
fn order(front: &Front, key: &Key, wait: Duration) -> Order {
    static LAST: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
    let request = br#"{"code": "1"}"#.to_vec();
    let number = LAST.fetch_add(1, std::sync::atomic::Ordering::Relaxed).to_string();
    let size = front.settings().policies["p"];
    Order {
        number,
        key: key.clone(),
        policy: "p".to_owned(),
        size,
        about: About::default(),
        request,
        buffer: front.buffer(&key.id),
        wait,
        output: false,
        keep: Duration::ZERO,
        session: None,
        name: None,
    }
}

fn run(front: &Arc<Front>, key: &Key, wait: Duration) -> RunHandle {
    front.run(order(front, key, wait)).map_err(|(problem, _)| problem).unwrap()
}

/// Lets all tasks go on until they wait for something else.
async fn settle() {
    for _ in 0..20 {
        tokio::task::yield_now().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_worker_that_is_handed_over_as_the_run_is_cancelled_or_late_stays() {
    let (a, short) = (key("a"), Duration::from_millis(5));
    // What is chosen among several that are ready is chosen at random, so often that each is.
    for cancels in [true, false].repeat(40) {
        let front = front(settings(std::slice::from_ref(&a)));
        let run = run(&front, &a, if cancels { Duration::from_secs(60) } else { short });
        settle().await;
        // Both are ready when the run's task looks.
        if cancels {
            assert!(front.cancel(&run.number, |_| true));
        } else {
            tokio::time::advance(short).await;
        }
        let (link, mut worker) = Worker::new();
        front.add_idle(link, None);
        settle().await;
        let (told, is_there) = worker.heard();
        assert!(is_there, "it was dropped, cancels: {cancels}");
        // It has the run, or waits for the next.
        if let Some(ToWorker::Begin(begin)) = told.first() {
            assert_eq!((&begin.run, told.contains(&ToWorker::Cancel)), (&run.number, cancels));
            worker.answer(&json!({ "verdict": "exited" }));
            worker.say(&FromWorker::Idle(None));
        }
        assert!(run.answer().await.is_ok() || front.now().idle == 1);
        settle().await;
        assert_eq!(front.now().idle, 1);
        assert!(worker.heard().1);
    }
}

#[tokio::test(start_paused = true)]
async fn a_run_that_is_cancelled_or_late_without_a_worker_does_not_begin() {
    let a = key("a");
    let front = front(settings(std::slice::from_ref(&a)));
    let (cancelled, late) = (run(&front, &a, Duration::from_secs(60)), run(&front, &a, Duration::ZERO));
    front.cancel(&cancelled.number, |_| true);
    assert_eq!(cancelled.answer().await.unwrap_err().reason, "cancelled");
    assert_eq!(late.answer().await.unwrap_err().reason, "queue_timeout");
    let (link, mut worker) = Worker::new();
    front.add_idle(link, None);
    settle().await;
    assert_eq!(worker.heard(), (Vec::new(), true));
}

#[test]
fn a_worker_that_is_prepared_for_a_request_comes_before_one_for_none_and_that_before_others() {
    let prepared = |key: Option<&str>, policy: &str, languages: &[&str]| Prepared {
        key: key.map(str::to_owned),
        policy: policy.to_owned(),
        languages: languages.iter().map(|name| (*name).to_owned()).collect(),
    };
    let asks = |language: &str| Asks { key: "a".to_owned(), policy: "p".to_owned(), language: language.to_owned() };
    let names = ["python", "py", ""];
    for language in names {
        assert_eq!(asks(language).rank(Some(&prepared(None, "p", &names))), 2, "{language}");
        assert_eq!(asks(language).rank(Some(&prepared(Some("a"), "p", &names))), 2, "{language}");
        assert_eq!(asks(language).rank(None), 1);
        for other in
            [prepared(Some("b"), "p", &names), prepared(None, "q", &names), prepared(None, "p", &["sh"]), prepared(None, "p", &[])]
        {
            assert_eq!(asks(language).rank(Some(&other)), 0, "{other:?}");
        }
    }
}
