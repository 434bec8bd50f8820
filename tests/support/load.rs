//! Load on the service: clients whose connections stay, threads that ask at a given pace, and
//! figures of many answers and of processes.
//!
//! It judges nothing: a test says what the figures must be.

use std::{
    fs,
    io::{BufRead, BufReader, Read, Write},
    net::TcpStream,
    os::unix::net::UnixStream,
    path::Path,
    sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed},
    thread,
    time::{Duration, Instant},
};

use serde_json::Value;

use super::timeouts::scaled;

/// A socket of either kind.
pub trait Socket: Read + Write + Send {}
impl<S: Read + Write + Send> Socket for S {}

/// A client with one connection, which asks one thing after the other.
pub struct Client {
    socket: BufReader<Box<dyn Socket>>,
    host: String,
    token: String,
}

/// An answer, and how long it took.
#[derive(Debug)]
pub struct Reply {
    pub status: u16,
    pub head: String,
    pub body: Value,
    pub after: Duration,
}

impl Client {
    /// At a UNIX socket. Without a token it brings no key.
    pub fn at_unix(path: &Path, token: &str) -> Self {
        Client::of(Box::new(UnixStream::connect(path).unwrap()), String::from("localhost"), token)
    }

    /// At a port of this host.
    pub fn at_port(port: u16, token: &str) -> Self {
        let socket = TcpStream::connect(("127.0.0.1", port)).unwrap();
        socket.set_nodelay(true).unwrap();
        Client::of(Box::new(socket), format!("127.0.0.1:{port}"), token)
    }

    fn of(socket: Box<dyn Socket>, host: String, token: &str) -> Self {
        Client { socket: BufReader::new(socket), host, token: token.to_owned() }
    }

    /// `POST /v1/run` of this request.
    pub fn run(&mut self, request: &Value) -> Reply {
        self.ask("POST", "/v1/run", &request.to_string())
    }

    /// Any request with JSON as its body.
    pub fn ask(&mut self, method: &str, path: &str, body: &str) -> Reply {
        self.try_ask(method, path, body).unwrap_or_else(|error| panic!("{method} {path}: {error}"))
    }

    /// The same; an error: the service closed the connection.
    pub fn try_ask(&mut self, method: &str, path: &str, body: &str) -> std::io::Result<Reply> {
        let asked = Instant::now();
        let Client { socket, host, token } = self;
        let key = if token.is_empty() { String::new() } else { format!("Authorization: Bearer {token}\r\n") };
        let head = format!(
            "{method} {path} HTTP/1.1\r\nHost: {host}\r\n{key}Content-Type: application/json\r\nContent-Length: {}\r\n\r\n",
            body.len()
        );
        socket.get_mut().write_all([head.as_bytes(), body.as_bytes()].concat().as_slice())?;
        let mut head = String::new();
        while !head.ends_with("\r\n\r\n") {
            if socket.read_line(&mut head)? == 0 {
                return Err(std::io::ErrorKind::UnexpectedEof.into());
            }
        }
        let field =
            |name: &str| head.lines().find_map(|line| line.to_ascii_lowercase().strip_prefix(name).map(|value| value.trim().to_owned()));
        let length = field("content-length:").and_then(|length| length.parse().ok()).unwrap_or(0);
        let mut bytes = vec![0; length];
        socket.read_exact(&mut bytes)?;
        let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or(0);
        // What is no JSON is text.
        let body = serde_json::from_slice(&bytes).unwrap_or_else(|_| Value::from(String::from_utf8_lossy(&bytes).into_owned()));
        Ok(Reply { status, head, body, after: asked.elapsed() })
    }
}

/// Beats at which those that share it ask, in turn.
pub struct Pace {
    begun: Instant,
    every: Duration,
    next: AtomicU32,
    last: u32,
}

impl Pace {
    /// So many beats, one each time.
    pub fn new(every: Duration, beats: u32) -> Self {
        Pace { begun: Instant::now(), every, next: AtomicU32::new(0), last: beats }
    }

    /// Waits for the next beat that no other has; none: it was the last.
    pub fn beat(&self) -> Option<u32> {
        let number = self.next.fetch_add(1, Relaxed);
        if number >= self.last {
            return None;
        }
        thread::sleep((self.begun + self.every * number).saturating_duration_since(Instant::now()));
        Some(number)
    }
}

/// Asks by each of these clients as fast as it is answered, until the other work is done. How many
/// answers there were, each of which was looked at.
pub fn while_asking<T>(clients: Vec<Client>, request: &Value, look: impl Fn(Reply) + Sync, work: impl FnOnce() -> T) -> (T, u32) {
    let (stop, answers) = (AtomicBool::new(false), AtomicU32::new(0));
    /// Ends the threads where the work fails, too.
    struct Stops<'a>(&'a AtomicBool);
    impl Drop for Stops<'_> {
        fn drop(&mut self) {
            self.0.store(true, Relaxed);
        }
    }
    let done = thread::scope(|scope| {
        for mut client in clients {
            let (stop, answers, look) = (&stop, &answers, &look);
            scope.spawn(move || {
                while !stop.load(Relaxed) {
                    look(client.run(request));
                    answers.fetch_add(1, Relaxed);
                }
            });
        }
        let _stops = Stops(&stop);
        work()
    });
    (done, answers.into_inner())
}

/// How much work others gave to this host's CPUs before a test began: how many times as long its own takes.
#[derive(Clone, Copy, Debug)]
pub struct OtherWork(f64);

impl OtherWork {
    /// Of the last minute.
    pub fn now() -> Self {
        let load: f64 = fs::read_to_string("/proc/loadavg").unwrap().split(' ').next().unwrap().parse().unwrap();
        OtherWork((load / thread::available_parallelism().unwrap().get() as f64).max(1.0))
    }

    /// So much time on a developer's machine that does nothing else is so much here.
    pub fn beside(self, time: Duration) -> Duration {
        scaled(time).mul_f64(self.0)
    }
}

/// The time that so many of a hundred did not exceed.
pub fn percentile(times: &mut [Duration], of_hundred: usize) -> Duration {
    times.sort_unstable();
    let at = (times.len() * of_hundred).div_ceil(100).saturating_sub(1);
    times.get(at).copied().unwrap_or_default()
}

/// What a process has of memory and of descriptors.
#[derive(Clone, Copy, Debug, Default)]
pub struct Held {
    pub rss_kib: u64,
    /// None where they may not be counted: the process has given up more rights than this one.
    pub descriptors: Option<usize>,
}

impl Held {
    /// By these together.
    pub fn by(pids: &[i32]) -> Self {
        let of = |pid: &i32| {
            let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
            let rss = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("a process that lives");
            let rss_kib = rss.trim().trim_end_matches(" kB").parse::<u64>().unwrap();
            Held { rss_kib, descriptors: fs::read_dir(format!("/proc/{pid}/fd")).ok().map(Iterator::count) }
        };
        pids.iter().map(of).fold(Held { rss_kib: 0, descriptors: Some(0) }, |all, one| Held {
            rss_kib: all.rss_kib + one.rss_kib,
            descriptors: all.descriptors.zip(one.descriptors).map(|(all, one)| all + one),
        })
    }
}
