//! What the way through the gate costs: connect, round trip, throughput, the gate's memory,
//! each beside the same client on the host's own loopback. `egress --bench` prints a line of
//! JSON for each measurement, by turns; `scripts/bench --egress` gathers and judges them, and
//! adds what setting up costs. Build it optimised.

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use serde_json::json;

use crate::{egress::gate::resident_kib, egress::testbed::FILES, egress::testbed::Testbed};

const CLOSE: u16 = 7001;
const ECHO: u16 = 7002;
const SINK: u16 = 7003;
const SOURCE: u16 = 7004;
const HOST: &str = "10.0.5.1";
/// Below the burst of connections that the rules let through.
const TIMES: usize = 1500;
/// Native and gate by turns.
const ROUNDS: usize = 3;
const FOR: Duration = Duration::from_secs(1);

/// Serves until it is killed.
pub fn serve() {
    let loops: [(u16, fn(TcpStream)); 4] = [(CLOSE, drop), (ECHO, echo), (SINK, sink), (SOURCE, source)];
    for (port, work) in loops {
        let listener = TcpListener::bind(("0.0.0.0", port)).expect("a port of the host");
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                stream.set_nodelay(true).expect("nodelay");
                if port == CLOSE {
                    work(stream);
                } else {
                    std::thread::spawn(move || work(stream));
                }
            }
        });
    }
    println!("ready");
    std::thread::sleep(Duration::from_secs(120));
}

fn echo(mut stream: TcpStream) {
    let mut bytes = [0u8; 64];
    while let Ok(count @ 1..) = stream.read(&mut bytes) {
        let _gone = stream.write_all(&bytes[..count]);
    }
}

fn sink(mut stream: TcpStream) {
    let mut bytes = vec![0u8; 1 << 20];
    while let Ok(1..) = stream.read(&mut bytes) {}
}

fn source(mut stream: TcpStream) {
    let bytes = vec![7u8; 1 << 18];
    while stream.write(&bytes).is_ok_and(|count| count > 0) {}
}

fn percentile(times: &mut [f64], share: usize) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() * share / 100]
}

/// Measures from wherever it runs, and prints one line.
pub fn client(what: &str) {
    let dial = |port| TcpStream::connect(SocketAddr::new(HOST.parse().expect("an address"), port)).expect("connect");
    let mut connects: Vec<f64> = Vec::new();
    for _ in 0..TIMES {
        let begin = Instant::now();
        let mut stream = dial(CLOSE);
        connects.push(begin.elapsed().as_secs_f64() * 1e6);
        let _end = stream.read(&mut [0]);
    }
    let mut stream = dial(ECHO);
    stream.set_nodelay(true).expect("nodelay");
    let mut trips: Vec<f64> = Vec::new();
    for _ in 0..TIMES {
        let begin = Instant::now();
        stream.write_all(&[1]).expect("write");
        stream.read_exact(&mut [0]).expect("read");
        trips.push(begin.elapsed().as_secs_f64() * 1e6);
    }
    let bytes = vec![1u8; 1 << 18];
    let mut stream = dial(SINK);
    let (begin, mut up) = (Instant::now(), 0);
    while begin.elapsed() < FOR {
        up += stream.write(&bytes).expect("write");
    }
    let up = up as f64 / begin.elapsed().as_secs_f64() / 1e6;
    let mut bytes = vec![0u8; 1 << 18];
    let mut stream = dial(SOURCE);
    let (begin, mut down) = (Instant::now(), 0);
    while begin.elapsed() < FOR {
        down += stream.read(&mut bytes).expect("read");
    }
    let down = down as f64 / begin.elapsed().as_secs_f64() / 1e6;
    println!(
        "{}",
        json!({
            "what": what,
            "connect_p50_us": tenths(percentile(&mut connects, 50)), "connect_p99_us": tenths(percentile(&mut connects, 99)),
            "trip_p50_us": tenths(percentile(&mut trips, 50)), "trip_p99_us": tenths(percentile(&mut trips, 99)),
            "up_mb_s": up.round(), "down_mb_s": down.round(),
        })
    );
}

fn tenths(number: f64) -> f64 {
    (number * 10.0).round() / 10.0
}

/// Prints everything.
pub fn main() {
    let mut testbed = Testbed::new();
    let program = std::env::current_exe().expect("this program has a path");
    // Where the sandbox sees it.
    let inside = format!("{FILES}/client");
    std::fs::copy(&program, testbed.directory().join("client")).expect("copy the client");
    let mut server = Command::new(&program).arg("--bench-server").stdout(Stdio::piped()).spawn().expect("start the server");
    let mut ready = [0u8; 6];
    server.stdout.take().expect("piped").read_exact(&mut ready).expect("the server is ready");
    let rules = ["10.0.5.1:7001-7004"];
    for _ in 0..ROUNDS {
        let native = Command::new(&program).args(["--bench-client", "native"]).output().expect("measure");
        print!("{}", String::from_utf8_lossy(&native.stdout));
        let ran = testbed.run(&rules, &format!("os.execv({inside:?}, ['egress', '--bench-client', 'gate'])"));
        print!("{}", ran.output);
    }
    let script = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
s = [dial('10.0.5.1', 7002) for _ in range(200)]
for x in s: x.sendall(b'x'); x.recv(1)
time.sleep(.5)";
    let mut kib = 0;
    let _ran = testbed.run_watched(&rules, script, |running| {
        let mut now = 1;
        while now > 0 {
            std::thread::sleep(Duration::from_millis(20));
            now = resident_kib(running.gate);
            kib = kib.max(now);
        }
    });
    println!("{}", json!({"what": "memory", "connections": 200, "peak_kib": kib}));
    let _ended = server.kill().and_then(|()| server.wait());
}
