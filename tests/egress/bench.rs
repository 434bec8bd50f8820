//! What the gate costs: set-up, connect, round trip, throughput, memory, each beside the
//! same client on the host's own loopback. `egress --bench`; build it optimised.

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    os::fd::AsFd,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use stockade_egress::{gate::Gate, inside::Sockets, setup};

use crate::{
    gate::resident_kib,
    rig::{Rig, Sandbox},
};

const CLOSE: u16 = 7001;
const ECHO: u16 = 7002;
const SINK: u16 = 7003;
const SOURCE: u16 = 7004;
const HOST: &str = "10.0.5.1";
/// Below the burst of connections that the rules let through.
const ROUNDS: usize = 1500;
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
    for _ in 0..ROUNDS {
        let begin = Instant::now();
        let mut stream = dial(CLOSE);
        connects.push(begin.elapsed().as_secs_f64() * 1e6);
        let _end = stream.read(&mut [0]);
    }
    let mut stream = dial(ECHO);
    stream.set_nodelay(true).expect("nodelay");
    let mut trips: Vec<f64> = Vec::new();
    for _ in 0..ROUNDS {
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
    let up = up as f64 / begin.elapsed().as_secs_f64() / 1e9;
    let mut bytes = vec![0u8; 1 << 18];
    let mut stream = dial(SOURCE);
    let (begin, mut down) = (Instant::now(), 0);
    while begin.elapsed() < FOR {
        down += stream.read(&mut bytes).expect("read");
    }
    let down = down as f64 / begin.elapsed().as_secs_f64() / 1e9;
    println!(
        "{what:8} connect p50 {:5.1} us p99 {:6.1} us   round trip p50 {:5.1} us p99 {:5.1} us   up {up:.2} GB/s down {down:.2} GB/s",
        percentile(&mut connects, 50),
        percentile(&mut connects, 99),
        percentile(&mut trips, 50),
        percentile(&mut trips, 99),
    );
}

/// Prints everything.
pub fn main() {
    let mut rig = Rig::new();
    let program = std::env::current_exe().expect("this program has a path");
    let mut server = Command::new(&program).arg("--bench-server").stdout(Stdio::piped()).spawn().expect("start the server");
    let mut ready = [0u8; 6];
    server.stdout.take().expect("piped").read_exact(&mut ready).expect("the server is ready");
    let rules = ["10.0.5.1:7001-7004"];
    for _ in 0..3 {
        let native = Command::new(&program).args(["--bench-client", "native"]).output().expect("measure");
        print!("{}", String::from_utf8_lossy(&native.stdout));
        let ran = rig.run_bare(&rules, &format!("os.execv({program:?}, ['egress', '--bench-client', 'gate'])"));
        print!("{}", ran.output);
    }
    let script = "s = [dial('10.0.5.1', 7002) for _ in range(200)]
for x in s: x.sendall(b'x'); x.recv(1)
say('open'); time.sleep(.5)";
    let mut kib = 0;
    let ran = rig.run_bare_watched(&rules, script, |gate| {
        std::thread::sleep(Duration::from_millis(600));
        kib = resident_kib(gate.pid());
    });
    println!("gate     peak resident {kib} KiB with 200 connections ({})", ran.output.trim());
    set_up(&rig);
    let _ended = server.kill().and_then(|()| server.wait());
}

/// What egress adds to a start, part by part.
fn set_up(rig: &Rig) {
    let mut times: [Vec<f64>; 4] = Default::default();
    for _ in 0..100 {
        let sandbox = Sandbox::start(rig, "pass");
        let sockets = Sockets::receive(sandbox.handover.as_fd()).expect("sockets");
        let mut begin = Instant::now();
        let mut lap = |times: &mut Vec<f64>| {
            times.push(begin.elapsed().as_secs_f64() * 1e6);
            begin = Instant::now();
        };
        let channels = setup::configure(sockets).expect("set up");
        lap(&mut times[0]);
        let gate = Gate::start(channels, rig.request(stockade_policy::egress::Whitelist::default())).expect("start");
        lap(&mut times[1]);
        gate.confirm().expect("confined");
        lap(&mut times[2]);
        drop(sandbox.go);
        stockade_sys::process::wait_child(&sandbox.child.pidfd).expect("the sandbox ends");
        let begin = Instant::now();
        gate.finish().expect("a record");
        times[3].push(begin.elapsed().as_secs_f64() * 1e6);
    }
    for (what, times) in ["addresses, rules, sockets", "fork", "confined and serving", "record"].iter().zip(&mut times) {
        println!("set-up   {what:28} p50 {:6.0} us p90 {:6.0} us", percentile(times, 50), percentile(times, 90));
    }
}
