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
pub fn key(id: &str) -> Key {
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
pub fn settings(keys: &[Key]) -> Settings {
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

/// A front without a worker.
pub fn front(settings: Settings) -> Arc<Front> {
    Arc::new(Front::new(settings, mpsc::unbounded_channel().0))
}

/// A worker that is idle, and its other end.
pub struct Worker {
    socket: UnixStream,
    said: FrameDecoder,
}

impl Worker {
    /// It says nothing by itself.
    pub fn new() -> (WorkerLink, Self) {
        let (front, socket) = UnixStream::pair().unwrap();
        socket.set_nonblocking(true).unwrap();
        (WorkerLink::new(OwnedFd::from(front)).unwrap(), Worker { socket, said: FrameDecoder::default() })
    }

    /// What the front has told it until now, and whether the front still holds its other end.
    pub fn heard(&mut self) -> (Vec<ToWorker>, bool) {
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

    /// Tells the front something.
    pub fn say(&mut self, message: &FromWorker) {
        self.socket.write_all(&message.to_frame().unwrap()).unwrap();
    }

    /// Answers a run.
    pub fn answer(&mut self, result: &Value) {
        self.say(&FromWorker::Started);
        self.say(&FromWorker::Result(result.to_string().into_bytes()));
        self.say(&FromWorker::End);
    }
}

/// A request of a key that waits at most so long.
pub fn order(front: &Front, key: &Key, wait: Duration) -> Order {
    static LAST: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
    let request = br#"{"code": "1"}"#.to_vec();
    let number = LAST.fetch_add(1, std::sync::atomic::Ordering::Relaxed).to_string();
    Order {
        number,
        key: key.clone(),
        policy: "p".to_owned(),
        size: AskedSize::default(),
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
pub async fn settle() {
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

/// How many of these were told of a run.
fn begun(workers: &mut [Worker]) -> usize {
    workers.iter_mut().map(|worker| worker.heard().0.iter().filter(|told| matches!(told, ToWorker::Begin(_))).count()).sum()
}

fn add_workers(front: &Front, count: usize) -> Vec<Worker> {
    let (links, workers): (Vec<_>, Vec<_>) = (0..count).map(|_| Worker::new()).unzip();
    links.into_iter().for_each(|link| front.add_idle(link, None));
    workers
}

#[tokio::test(start_paused = true)]
async fn a_request_whose_key_expires_or_loses_its_policy_in_the_queue_does_not_begin() {
    let wait = Duration::from_secs(60);
    let keys = ["stays", "expires", "loses", "goes"].map(key);
    let front = front(settings(&keys));
    let [stays, revoked @ ..] = keys.each_ref().map(|key| run(&front, key, wait));
    let [stays_key, expires, loses, _goes] = keys;
    let (expires, loses) = (Key { expires: Some(1), ..expires }, Key { policies: vec!["q".to_owned()], ..loses });
    front.change(settings(&[stays_key, expires, loses]));
    for (run, reason) in revoked.iter().zip(["key_revoked", "policy_not_granted", "key_revoked"]) {
        assert_eq!(run.answer().await.unwrap_err().reason, reason);
    }
    let mut workers = add_workers(&front, 3);
    settle().await;
    assert_eq!((begun(&mut workers), front.now().idle, front.now().waiting), (1, 2, 0));
    drop(stays);
}

#[tokio::test(start_paused = true)]
async fn a_key_that_expires_without_a_reload_begins_nothing_more() {
    let (stays, past) = (key("stays"), Key { expires: Some(1), ..key("past") });
    let front = front(settings(&[stays.clone(), past.clone()]));
    let runs = [&past, &stays].map(|key| run(&front, key, Duration::from_secs(60)));
    let mut workers = add_workers(&front, 2);
    settle().await;
    assert_eq!((begun(&mut workers), front.now().idle), (1, 1));
    let [past, _stays] = runs;
    assert_eq!(past.answer().await.unwrap_err().reason, "key_revoked");
}

#[tokio::test(start_paused = true)]
async fn a_request_in_the_queue_takes_what_its_policy_has_after_a_reload() {
    let a = key("a");
    for (cpus, begin) in [(1000, 4), (4000, 2), (8000, 1), (9000, 0)] {
        let (wait, asks) = (Duration::from_secs(60), 500);
        let front = front(settings(std::slice::from_ref(&a)));
        let runs: Vec<_> = (0..4).map(|_| run(&front, &a, wait)).collect();
        let mut changed = settings(std::slice::from_ref(&a));
        changed.policies.insert("p".to_owned(), RunSize { cpus, memory: 1 << 20 });
        front.change(changed);
        let mut workers = add_workers(&front, 5);
        settle().await;
        assert_eq!(begun(&mut workers), begin, "{cpus}");
        if begin == 0 {
            assert_eq!(runs[0].answer().await.unwrap_err().reason, "never_fits");
            // One that says what it takes takes that.
            let ask = |cpus: Option<u64>| {
                let size = AskedSize { program: AskedLimits { cpus: Some(cpus), memory: None }, ..AskedSize::default() };
                let order = Order { size, ..order(&front, &a, wait) };
                front.run(order).map_err(|(problem, _)| problem).unwrap()
            };
            let _small = ask(Some(asks));
            settle().await;
            assert_eq!(begun(&mut workers), 1);
            // Without a limit it takes all that there is, and waits for that.
            let _whole = ask(None);
            settle().await;
            assert_eq!(begun(&mut workers), 0);
        }
    }
}

fn prepared_for(language: &str) -> Option<Prepared> {
    Some(Prepared { key: None, policy: "p".to_owned(), languages: vec![language.to_owned()] })
}

#[tokio::test(start_paused = true)]
async fn an_idle_worker_is_chosen_by_what_it_has_prepared_now() {
    let a = key("a");
    for changes in [false, true] {
        let front = front(settings(std::slice::from_ref(&a)));
        let (link, mut one) = Worker::new();
        front.add_idle(link, prepared_for("python"));
        let (link, mut other) = Worker::new();
        front.add_idle(link, prepared_for("sh"));
        if changes {
            one.say(&FromWorker::Idle(prepared_for("node")));
            other.say(&FromWorker::Idle(prepared_for("sh")));
            other.say(&FromWorker::Idle(prepared_for("python")));
            settle().await;
        }
        let order = Order { about: About::of(Some("python"), None, BTreeMap::new()), ..order(&front, &a, Duration::from_secs(60)) };
        let _run = front.run(order).map_err(|(problem, _)| problem).unwrap();
        settle().await;
        let told = [one.heard().0.len(), other.heard().0.len()];
        assert_eq!(told, if changes { [0, 2] } else { [2, 0] });
    }
}

#[tokio::test(start_paused = true)]
async fn what_a_worker_says_before_it_has_read_of_its_run_is_no_answer_to_that() {
    let a = key("a");
    let front = front(settings(std::slice::from_ref(&a)));
    let (link, mut worker) = Worker::new();
    front.add_idle(link, None);
    let first = run(&front, &a, Duration::from_secs(60));
    worker.say(&FromWorker::Idle(prepared_for("sh")));
    worker.answer(&json!({ "verdict": "exited" }));
    assert!(first.answer().await.is_ok());
    worker.say(&FromWorker::Idle(None));
    settle().await;
    // Within the answer it is none of a worker.
    let second = run(&front, &a, Duration::from_secs(60));
    worker.say(&FromWorker::Started);
    worker.say(&FromWorker::Idle(None));
    assert_eq!(second.answer().await.unwrap_err().reason, "worker_lost");
    assert_eq!(front.now().idle, 0);
}

#[tokio::test(start_paused = true)]
async fn an_idle_worker_that_says_anything_else_is_dropped() {
    let a = key("a");
    let front = front(settings(std::slice::from_ref(&a)));
    let (link, mut worker) = Worker::new();
    front.add_idle(link, None);
    worker.say(&FromWorker::Started);
    settle().await;
    let _run = run(&front, &a, Duration::from_secs(60));
    settle().await;
    assert!(!worker.heard().1);
    let mut other = add_workers(&front, 1);
    settle().await;
    assert_eq!(begun(&mut other), 1);
}

#[tokio::test(start_paused = true)]
async fn the_log_of_a_run_goes_when_its_time_is_over() {
    let a = key("a");
    let front = front(settings(std::slice::from_ref(&a)));
    for keep in [Duration::from_secs(300), Duration::from_secs(10)] {
        let order = Order { keep, ..order(&front, &a, Duration::ZERO) };
        let number = order.number.clone();
        let run = front.run(order).map_err(|(problem, _)| problem).unwrap();
        assert_eq!(run.answer().await.unwrap_err().reason, "queue_timeout");
        settle().await;
        assert!(front.log(&number, "b").is_none() && front.log(&number, "a").is_some());
        tokio::time::sleep(keep - Duration::from_secs(1)).await;
        assert!(front.log(&number, "a").is_some());
        tokio::time::sleep(Duration::from_secs(1) + 2 * LOOK_AT_KEPT).await;
        assert!(front.log(&number, "a").is_none());
    }
}

#[tokio::test(start_paused = true)]
async fn the_name_of_a_request_goes_with_its_log_and_not_with_that_of_an_earlier_one() {
    let a = key("a");
    let front = front(settings(std::slice::from_ref(&a)));
    let keep = |seconds: u64| Duration::from_secs(seconds);
    let named = |keep, hash| Order { keep, name: Some(("n".to_owned(), [hash; 32])), ..order(&front, &a, Duration::ZERO) };
    // Nothing comes of the first, so that another may have its name.
    for (keep, hash) in [(keep(10), 1), (keep(100), 2)] {
        let run = front.run(named(keep, hash)).map_err(|(problem, _)| problem).unwrap();
        assert_eq!(run.answer().await.unwrap_err().reason, "queue_timeout");
    }
    settle().await;
    tokio::time::sleep(keep(15)).await;
    let requests = || front.state().named.values().map(|named| named.request[0]).collect::<Vec<_>>();
    assert_eq!(requests(), [2]);
    tokio::time::sleep(keep(100)).await;
    assert!(requests().is_empty());
    // The control: one that goes on has its name.
    let _run = front.run(Order { wait: Duration::from_secs(1000), ..named(keep(10), 3) }).map_err(|(problem, _)| problem).unwrap();
    tokio::time::sleep(keep(100)).await;
    assert_eq!(front.repeated("a", "n", &[3; 32]).err().unwrap().reason, "idempotency_in_flight");
    assert_eq!(requests(), [3]);
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
        for other in [prepared(Some("b"), "p", &names), prepared(None, "q", &names), prepared(None, "p", &["sh"]), prepared(None, "p", &[])]
        {
            assert_eq!(asks(language).rank(Some(&other)), 0, "{other:?}");
        }
    }
}
