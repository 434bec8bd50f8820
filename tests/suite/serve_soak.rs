//! The service under load and for long: what overload, slow clients, killed processes, a clock that
//! is set, reloads and many runs change, and what they must not. Figures are printed, and kept where a
//! test fails.
//!
//! What one request of each kind gets is tested beside this. Most are for `scripts/test --long`.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{self, OpenOptions},
    io::{BufReader, Read, Write},
    net::TcpStream,
    os::unix::{fs::OpenOptionsExt, net::UnixStream},
    path::Path,
    process::Command,
    sync::Mutex,
    thread,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use serde_json::{Value, json};

use super::{
    serve::{Service, head, kill, read_answer, start},
    serve_quotas::key,
    serve_streams::{Stream, next},
};
use crate::support::{
    audit_log::{is_whole, own_log, records},
    exec::{text, token},
    leftovers::{cgroups_of, dead_records, host_process_with},
    load::{Client, Held, OtherWork, Pace, Reply, percentile, while_asking},
    policy_dir::{PolicyDirectory, derived},
    runner::{eventually, test, wait_within},
    timeouts::scaled,
};

fn shell(code: &str) -> Value {
    json!({"code": code, "language": "sh"})
}

fn client(service: &Service, token: &str) -> Client {
    Client::at_unix(&service.place.0.join("s"), token)
}

/// A clean end by itself, with this output.
#[track_caller]
fn ran(reply: &Reply, output: &str) {
    assert_eq!((reply.status, &reply.body["verdict"], &reply.body["output"]), (200, &json!("exited"), &json!(output)), "{}", reply.body);
}

/// A value of the service's counters.
fn counter(asks: &mut Client, name: &str) -> u64 {
    let all = asks.ask("GET", "/metrics", "").body;
    let line = all.as_str().unwrap().lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')).unwrap_or("0");
    line.parse::<f64>().unwrap() as u64
}

const KEYS: usize = 8;
/// Of one key, at the same time: more than can wait and run, so that one is always free to be refused.
const CLIENTS: usize = 10;
/// Requests of a key that come in a minute. The service has room for 20 runs of 200 ms a second.
const EVERY: Duration = Duration::from_millis(100);
const BEATS: u32 = 600;

/// The request of this number, and its verdict, status and output.
fn numbered(number: u32) -> (Value, (&'static str, i64, String)) {
    let (end, verdict, code) = match number % 4 {
        0 => ("exit 3", "exited", 3),
        1 => ("kill -SEGV $$", "signaled", 139),
        _ => ("exit 0", "exited", 0),
    };
    (shell(&format!("sleep 0.2; echo {number}; {end}")), (verdict, code, format!("{number}\n")))
}

test!(serial Both, an_overload_is_refused_at_once_and_the_rest_is_shared_evenly, needs [Long], seconds 180);
fn an_overload_is_refused_at_once_and_the_rest_is_shared_evenly() {
    let others = OtherWork::now();
    let keys: Vec<(String, String)> = (0..KEYS).map(|number| key(&format!("k{number}"), "waiting = 4")).collect();
    let tables: String = keys.iter().map(|(table, _)| format!("{table}\n")).collect();
    let service = Service::with("[capacity]\ncpus = 4\noversubscribe = 1.0\n", &tables);
    let refusals = Mutex::new(Vec::new());
    let answered: Vec<usize> = thread::scope(|scope| {
        let of_key = |token: &str| {
            let pace = Pace::new(EVERY, BEATS);
            thread::scope(|scope| {
                let ask = || {
                    let (mut client, mut answered) = (client(&service, token), 0);
                    while let Some(number) = pace.beat() {
                        let (request, expected) = numbered(number);
                        let Reply { status, head, body, after } = client.run(&request);
                        if status == 200 {
                            let verdict = (
                                body["verdict"].as_str().unwrap(),
                                body["code"].as_i64().unwrap(),
                                body["output"].as_str().unwrap().to_owned(),
                            );
                            assert_eq!(verdict, expected, "{body}");
                            answered += 1;
                            continue;
                        }
                        assert_eq!((status, &body["reason"], &body["started"]), (429, &json!("key_queue"), &json!(false)), "{body}");
                        assert!(head.to_ascii_lowercase().contains("retry-after:"), "{head}");
                        refusals.lock().unwrap().push(after);
                    }
                    answered
                };
                let threads: Vec<_> = (0..CLIENTS).map(|_| scope.spawn(ask)).collect();
                threads.into_iter().map(|thread| thread.join().unwrap()).sum()
            })
        };
        let threads: Vec<_> = keys.iter().map(|(_, token)| scope.spawn(move || of_key(token))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let mut refusals = refusals.into_inner().unwrap();
    let (all, refused) = (answered.iter().sum::<usize>(), refusals.len());
    let [median, last] = [50, 99].map(|of| percentile(&mut refusals, of));
    println!("{all} answered, by key {answered:?}; {refused} refused in {median:?} at the median, {last:?} at p99; {others:?}");
    // The control: it was overloaded, and served all the same.
    assert!(refused > all && all > KEYS * 50, "{all} answered, {refused} refused");
    assert!(last <= others.beside(Duration::from_millis(20)), "{last:?}, {others:?}");
    let (least, most) = (answered.iter().min().unwrap(), answered.iter().max().unwrap());
    assert!(most - least <= all / KEYS / 10, "{answered:?}");
    service.end();
}

/// Runs a second that two clients get within this time, one at each socket.
fn rate(service: &Service, time: Duration) -> f64 {
    let clients = vec![client(service, &service.token), Client::at_port(service.port, &service.token)];
    let begun = Instant::now();
    let ((), answers) = while_asking(clients, &shell("echo 1"), |reply| ran(&reply, "1\n"), || thread::sleep(time));
    f64::from(answers) / begun.elapsed().as_secs_f64()
}

test!(serial Both, slow_readers_and_half_heads_take_nothing_from_others, needs [Long], seconds 600);
fn slow_readers_and_half_heads_take_nothing_from_others() {
    const READERS: usize = 200;
    const HALVES: usize = 1000;
    const PHASE: Duration = Duration::from_secs(6);
    // Each stream keeps 256 KiB of output, and its result, which is 110 MiB of all.
    const BUFFERS: u64 = 128;
    let printing = shell(&format!("head -c {} /dev/zero | tr '\\0' x", 300 << 10)).to_string();
    let half = format!("POST /v1/run HTTP/1.1\r\nHost: localhost\r\nX-Long: {}", "x".repeat(30 << 10));
    let mut tries = Vec::new();
    // Other work of the host comes and goes, and takes from one phase what it leaves to another.
    let is_kept = (0..5).any(|_| {
        let service = Service::with(&format!("[limits]\nbuffers = \"{BUFFERS}MiB\"\n"), "");
        let front = service.processes("stockade-serve");
        let fields =
            [&*format!("Authorization: Bearer {}", service.token), "Content-Type: application/json", "Accept: application/x-ndjson"];
        let before = rate(&service, PHASE);
        let readers: Vec<_> = (0..READERS)
            .map(|_| {
                let mut socket = service.connect();
                socket.write_all(head("POST", "/v1/run", &fields, printing.len()).as_bytes()).unwrap();
                socket.write_all(printing.as_bytes()).unwrap();
                socket.set_nonblocking(true).unwrap();
                socket
            })
            .collect();
        assert!(eventually(scaled(Duration::from_secs(60)), || service.runs().is_empty()), "{}", service.log());
        let halves: Vec<_> = (0..HALVES)
            .map(|_| {
                let mut socket = TcpStream::connect(("127.0.0.1", service.port)).unwrap();
                socket.write_all(half.as_bytes()).unwrap();
                socket
            })
            .collect();
        let (during, most) = thread::scope(|scope| {
            let reads = scope.spawn(|| {
                let mut most = 0;
                for _ in 0..PHASE.as_secs() {
                    // One that has nothing to read has been cut off.
                    let gets_one = |mut reader: &UnixStream| reader.read(&mut [0]).is_ok_and(|length| length == 1);
                    let read = readers.iter().filter(|reader| gets_one(reader)).count();
                    assert!(read >= READERS * 9 / 10, "{read} of {READERS} get something");
                    most = most.max(Held::by(&front).rss_kib);
                    thread::sleep(Duration::from_secs(1));
                }
                most
            });
            let during = rate(&service, PHASE);
            (during, reads.join().unwrap())
        });
        drop((readers, halves));
        let after = rate(&service, PHASE);
        let usual = f64::midpoint(before, after);
        println!("{usual:.1} runs a second alone, {during:.1} beside slow readers and half heads; front at most {most} KiB");
        assert!(most <= (64 + BUFFERS) << 10, "{most} KiB");
        assert_eq!(service.processes("stockade-serve"), front);
        service.end();
        tries.push(during / usual);
        during >= 0.95 * usual
    });
    assert!(is_kept, "{tries:?}");
}

/// Sends a run whose answer nothing waits for.
fn begin(service: &Service, request: &Value) -> UnixStream {
    let (mut socket, body) = (service.connect(), request.to_string());
    let fields = [&*format!("Authorization: Bearer {}", service.token), "Content-Type: application/json"];
    socket.write_all(head("POST", "/v1/run", &fields, body.len()).as_bytes()).unwrap();
    socket.write_all(body.as_bytes()).unwrap();
    socket
}

fn sleeping(mark: &str) -> Value {
    json!({"code": format!("sh -c 'sleep 60; : {mark}'"), "language": "sh", "id": mark})
}

/// So much time was enough each time.
#[track_caller]
fn are_within(times: &mut [Duration], most: Duration, what: &str, others: OtherWork) {
    let [median, usual, last] = [50, 90, 100].map(|of| percentile(times, of));
    println!("{what}: {median:?} at the median, {usual:?} at p90, {last:?} at most; {others:?}");
    assert!(last <= others.beside(most), "{what}: {times:?}, {others:?}");
}

/// Processes have so long before their next end that this one counts as the end of a life.
const LIFE: Duration = Duration::from_millis(1050);

test!(serial Both, a_front_that_is_killed_a_hundred_times_is_back_each_time, needs [Long], seconds 600);
fn a_front_that_is_killed_a_hundred_times_is_back_each_time() {
    const FRONTS: usize = 100;
    let others = OtherWork::now();
    let log = own_log();
    let (table, keeper) = key("keeper", "scopes = [\"keep\"]");
    let mut service = Service::with("[capacity]\ncpus = 3\n", &format!("{table}\n"));
    let opened = service.ask("POST", "/v1/sessions", &keeper, &json!({}));
    assert_eq!(opened.status, 201, "{}", opened.body);
    let file = format!("/v1/sessions/{}/files/kept", opened.body["session"].as_str().unwrap());
    let put = [&*format!("Authorization: Bearer {keeper}"), "Content-Type: application/octet-stream"];
    assert_eq!(service.ask_with("PUT", &file, &put, b"\"kept\"").status, 204);
    let (mut back, mut launchers, mut started) = (Vec::new(), BTreeSet::new(), Vec::new());
    for number in 0..FRONTS {
        let life = Instant::now();
        let marks = [0, 1].map(|run| token(&format!("front-{number}-{run}")));
        let _clients = marks.each_ref().map(|mark| begin(&service, &sleeping(mark)));
        // Now and then it is killed at the moment that they come.
        if number % 4 != 0 {
            assert!(marks.iter().all(|mark| eventually(scaled(Duration::from_secs(10)), || host_process_with(mark))), "{}", service.log());
            started.extend(marks.clone());
        }
        thread::sleep(LIFE.saturating_sub(life.elapsed()));
        launchers.extend(service.processes("stockade serve-worker").iter().map(|pid| pid.cast_unsigned()));
        let killed = Instant::now();
        kill(service.processes("stockade-serve")[0], "KILL");
        let serves = eventually(scaled(Duration::from_secs(10)), || {
            client(&service, &service.token).try_ask("POST", "/v1/run", &shell("echo 1").to_string()).is_ok_and(|reply| {
                ran(&reply, "1\n");
                true
            })
        });
        assert!(serves, "{}", service.log());
        back.push(killed.elapsed());
        let is_over = || marks.iter().all(|mark| !host_process_with(mark));
        assert!(eventually(scaled(Duration::from_secs(2)), is_over), "a run outlives its front");
    }
    are_within(&mut back, Duration::from_millis(500), "from the front's end to the next result", others);
    let of_marks = || -> BTreeMap<String, Value> {
        let of = |record: &Value| Some((record["id"].as_str()?.to_owned(), record["verdict"].clone()));
        records(&log).iter().filter_map(of).collect()
    };
    let is_recorded = || {
        let recorded = of_marks();
        started.iter().all(|mark| recorded.get(mark) == Some(&json!("cancelled")))
    };
    assert!(eventually(scaled(Duration::from_secs(5)), is_recorded), "{:?}", of_marks());
    let kept = service.ask("GET", &file, &keeper, &Value::Null);
    assert_eq!((kept.status, &kept.body), (200, &json!("kept")));

    // And the supervisor, with all that is below it.
    let mark = token("supervisor");
    let _client = begin(&service, &sleeping(&mark));
    assert!(eventually(scaled(Duration::from_secs(10)), || host_process_with(&mark)));
    let all = service.processes("stockade");
    assert!(all.len() >= 5, "{all:?}");
    launchers.extend(all.iter().map(|pid| pid.cast_unsigned()));
    let killed = Instant::now();
    service.child.kill().unwrap();
    service.child.wait().unwrap();
    let is_there = |pid: &i32| fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| !stat.contains(") Z "));
    let is_over = || !host_process_with(&mark) && !all.iter().any(is_there);
    let ended = eventually(Duration::from_secs(10), is_over);
    println!("all are gone {:?} after the supervisor was killed", killed.elapsed());
    assert!(
        ended && killed.elapsed() <= others.beside(Duration::from_secs(2)),
        "{:?}",
        all.iter().filter(|pid| is_there(pid)).collect::<Vec<_>>()
    );
    assert!(eventually(Duration::from_secs(5), || cgroups_of(&launchers).is_empty()), "{:?}", cgroups_of(&launchers));
    // It begins again where it was.
    service.child = start(&service.place);
    assert!(
        eventually(scaled(Duration::from_secs(20)), || service.get("/live").is_some_and(|live| live.status == 200)),
        "{}",
        service.log()
    );
    service.run("print(1)").ran("1\n");
    service.end();
    assert_eq!(of_marks().get(&mark), Some(&json!("cancelled")));
    assert_eq!(dead_records(), Vec::<String>::new());
    is_whole();
}

test!(serial Both, a_worker_that_is_killed_says_whether_its_code_had_started, needs [Long], seconds 600);
fn a_worker_that_is_killed_says_whether_its_code_had_started() {
    const WORKERS: usize = 2;
    const ROUNDS: usize = 150;
    const BYTES: usize = 3;
    let others = OtherWork::now();
    own_log();
    let place = PolicyDirectory::new();
    let shown = place.0.join("shown");
    fs::create_dir(&shown).unwrap();
    let pipe = shown.join("pipe");
    // A byte of it is gone once the code has run, whatever becomes of the run.
    assert!(Command::new("mkfifo").args(["-m", "644", text(&pipe)]).status().unwrap().success());
    let mut bytes = OpenOptions::new().read(true).write(true).custom_flags(nix::libc::O_NONBLOCK).open(&pipe).unwrap();
    let policy = place.write("shown", &derived(&format!("[filesystem]\nread_only = {{ add = [{:?}] }}\n", text(&shown))));
    let (table, token) = key("worker", "");
    let table = table.replace("\"default\"", &format!("{policy:?}"));
    let service = Service::at(place, &format!("[capacity]\ncpus = {WORKERS}\n"), &format!("{table}\n"));
    let request = shell(&format!("dd if={} bs=1 count=1 2>/dev/null; sleep 0.01; echo", text(&pipe)));
    let mut asks = client(&service, "");
    let (mut replaced, mut seen) = (Vec::new(), BTreeMap::<String, usize>::new());
    for round in 0..ROUNDS {
        let are_idle = || counter(&mut asks, "stockade_workers{state=\"idle\"}") == WORKERS as u64;
        assert!(eventually(scaled(Duration::from_secs(10)), are_idle), "round {round}: {}", asks.ask("GET", "/metrics", "").body);
        let life = Instant::now();
        bytes.write_all(&[b'x'; BYTES]).unwrap();
        let workers = service.processes("stockade serve-worker");
        assert_eq!(workers.len(), WORKERS);
        let reply = thread::scope(|scope| {
            let reply = scope.spawn(|| client(&service, &token).run(&request));
            thread::sleep(Duration::from_millis((round * 7 % 40) as u64));
            workers.iter().for_each(|pid| kill(*pid, "KILL"));
            let killed = Instant::now();
            let are_back = eventually(scaled(Duration::from_secs(10)), || {
                let now = service.processes("stockade serve-worker");
                now.len() == WORKERS && now.iter().all(|pid| !workers.contains(pid))
            });
            assert!(are_back, "{}", service.log());
            replaced.push(killed.elapsed());
            reply.join().unwrap()
        });
        let mut left = [0; 2 * BYTES];
        let taken = BYTES - bytes.read(&mut left).unwrap();
        assert!(taken <= 1, "the code ran {taken} times");
        let (started, ran) = (reply.body["started"] == true, taken == 1);
        match (reply.status, reply.body["reason"].as_str()) {
            (200, None) => assert!(started && ran, "{}", reply.body),
            (500, Some("worker_lost")) => assert!(started || !ran, "{}", reply.body),
            _ => panic!("{} {}", reply.status, reply.body),
        }
        *seen.entry(format!("{}, started {started}, has run {ran}", reply.status)).or_default() += 1;
        thread::sleep(LIFE.saturating_sub(life.elapsed()));
    }
    println!("{seen:?}");
    are_within(&mut replaced, Duration::from_millis(200), "from the workers' end to their successors", others);
    assert!(seen.len() >= 2 && seen.contains_key("500, started true, has run true"), "{seen:?}");
    client(&service, &service.token).run(&shell("echo 1"));
    service.end();
    assert_eq!(dead_records(), Vec::<String>::new());
    is_whole();
}

test!(RootOnly, a_full_disk_of_the_log_is_503_where_the_log_is_required, seconds 60);
fn a_full_disk_of_the_log_is_503_where_the_log_is_required() {
    own_log();
    let journal = super::audit::journal();
    let place = PolicyDirectory::new();
    let policy = place.write("required", &derived("[audit]\nmode = \"required\"\n"));
    let (table, token) = key("required", "scopes = [\"run\", \"keep\"]");
    let service = Service::at(place, "", &format!("{}\n", table.replace("\"default\"", &format!("{policy:?}"))));
    let mut required = client(&service, &token);
    ran(&required.run(&shell("echo 1")), "1\n");
    let opened = required.ask("POST", "/v1/sessions", "{}");
    let session = format!("/v1/sessions/{}", opened.body["session"].as_str().unwrap());
    let filler = Path::new("/var/log/filler");
    assert!(fs::write(filler, vec![0; 8 << 20]).is_err(), "the disk is full");
    let is_refused = |reply: &Reply| reply.status == 503 && reply.body["reason"] == "audit_unavailable" && reply.body["started"] == false;
    // What is left of the file's last block takes a few.
    assert!(eventually(scaled(Duration::from_secs(10)), || is_refused(&required.run(&shell("echo 1")))));
    let refused = required.run(&shell("echo 1"));
    assert!(is_refused(&refused) && refused.head.to_ascii_lowercase().contains("retry-after:"), "{} {}", refused.head, refused.body);
    assert!(refused.body["detail"].as_str().unwrap().contains("No space left on device"), "{}", refused.body);
    assert!(is_refused(&required.ask("POST", &format!("{session}/run"), &shell("echo 1").to_string())));
    let fields = [&*format!("Authorization: Bearer {token}"), "Content-Type: application/octet-stream"];
    service.ask_with("PUT", &format!("{session}/files/file"), &fields, b"x").is(503, "audit_unavailable");
    // What the journal got until here is of other runs.
    let _before = super::audit::received(&journal);
    let tried = service.run("print(2)");
    assert!(tried.ran("2\n").body["audit"]["failure"].is_string(), "{}", tried.body);
    let told = super::audit::received(&journal);
    assert!(told.iter().any(|message| message.contains("\nPRIORITY=3\n") && message.contains("MESSAGE=not in the audit log")), "{told:?}");
    assert!(counter(&mut client(&service, ""), "stockade_audit_failures_total") > 2);
    fs::remove_file(filler).unwrap();
    ran(&required.run(&shell("echo 3")), "3\n");
    assert!(service.run("print(4)").ran("4\n").body["audit"]["failure"].is_null());
    service.end();
    is_whole();
}

test!(serial Both, a_key_that_is_taken_away_is_refused_within_a_second, needs [Long], seconds 60);
fn a_key_that_is_taken_away_is_refused_within_a_second() {
    let others = OtherWork::now();
    let (table, gone) = key("gone", "scopes = [\"run\", \"keep\"]\nrunning = 1");
    let service = Service::with("[capacity]\ncpus = 3\n", &format!("{table}\n"));
    let keys = fs::read_to_string(service.keys()).unwrap();
    let mut of_gone = client(&service, &gone);
    assert_eq!(of_gone.ask("POST", "/v1/sessions", "{}").status, 201);
    let keepers = service.processes("stockade serve-keeper");
    assert_eq!(keepers.len(), 1);
    let clients = vec![client(&service, &service.token)];
    let ((), answers) = while_asking(
        clients,
        &shell("echo 1"),
        |reply| ran(&reply, "1\n"),
        || {
            thread::scope(|scope| {
                let running = scope.spawn(|| client(&service, &gone).run(&shell("sleep 3; echo ran")));
                let list = |of: &mut Client, state: &str| {
                    of.ask("GET", &format!("/v1/runs?state={state}"), "").body["runs"].as_array().map_or(0, Vec::len)
                };
                assert!(eventually(scaled(Duration::from_secs(5)), || list(&mut of_gone, "running") == 1));
                let waiting = scope.spawn(|| client(&service, &gone).run(&shell("echo late")));
                assert!(eventually(scaled(Duration::from_secs(5)), || list(&mut of_gone, "waiting") == 1));
                fs::write(
                    service.keys(),
                    keys.split_once("[[key]]").unwrap().1.split_once("[[key]]").map(|(_, own)| format!("[[key]]{own}")).unwrap(),
                )
                .unwrap();
                let told = Instant::now();
                service.signal("HUP");
                assert!(
                    eventually(scaled(Duration::from_secs(5)), || of_gone.ask("GET", "/v1/runs", "").status == 401),
                    "{}",
                    service.log()
                );
                println!("refused {:?} after SIGHUP", told.elapsed());
                assert!(told.elapsed() <= others.beside(Duration::from_secs(1)), "{:?}", told.elapsed());
                let waiting = waiting.join().unwrap();
                assert_eq!(
                    (waiting.status, &waiting.body["reason"], &waiting.body["started"]),
                    (401, &json!("key_revoked"), &json!(false))
                );
                let is_gone = || !Path::new("/proc").join(keepers[0].to_string()).exists();
                assert!(eventually(scaled(Duration::from_secs(2)), is_gone), "a keeper outlives its key");
                ran(&running.join().unwrap(), "ran\n");
            });
        },
    );
    assert!(answers > 10, "{answers}");
    service.end();
}

/// The host's clock is everybody's, and has no namespace.
fn clock_is_shared() -> Option<String> {
    let may_be_set = std::env::var("STOCKADE_TEST_CLOCK").as_deref() == Ok("yes");
    (!may_be_set).then(|| String::from("the clock of this host stays as it is: scripts/test vm-root has a guest"))
}

/// The clock of the machine as it was; set so when dropped.
struct Clock(SystemTime, Instant);

impl Clock {
    fn set(&self, at: SystemTime) {
        let seconds = at.duration_since(UNIX_EPOCH).unwrap().as_secs_f64();
        assert!(Command::new("date").arg(format!("--set=@{seconds}")).output().unwrap().status.success());
    }

    fn restore(&self) {
        self.set(self.0 + self.1.elapsed());
    }
}

impl Drop for Clock {
    fn drop(&mut self) {
        self.restore();
    }
}

test!(serial RootOnly, a_clock_that_is_set_moves_what_expires_and_nothing_else, needs [Other(clock_is_shared)], seconds 120);
fn a_clock_that_is_set_moves_what_expires_and_nothing_else() {
    let ((expires, short), (keeps, keeper)) = (key("short", "expires = 2030-01-01"), key("keeper", "scopes = [\"keep\"]"));
    let service = Service::with("[capacity]\ncpus = 1\n", &format!("{expires}\n{keeps}\n"));
    let clock = Clock(SystemTime::now(), Instant::now());
    let year = |number: u64| UNIX_EPOCH + Duration::from_secs((number - 1970) * 31_557_600);
    // How long three things take that end by a time of theirs, with the clock set in the middle.
    let times = |change: &(dyn Fn() + Sync)| -> [Duration; 3] {
        let opened = service.ask("POST", "/v1/sessions", &keeper, &json!({"idle": "2s"}));
        let session = format!("/v1/sessions/{}", opened.body["session"].as_str().unwrap_or_else(|| panic!("{}", opened.body)));
        let opened = Instant::now();
        thread::scope(|scope| {
            let kept = scope.spawn(|| {
                let has_ended = || service.ask("GET", &session, &keeper, &Value::Null).status == 404;
                assert!(eventually(scaled(Duration::from_secs(10)), has_ended), "{}", service.log());
                opened.elapsed()
            });
            let limited = scope.spawn(|| {
                let request = json!({"code": "sleep 60", "language": "sh", "limits": {"wall": "1500ms"}});
                let reply = client(&service, &service.token).run(&request);
                assert_eq!((reply.status, &reply.body["verdict"]), (200, &json!("wall_timeout")), "{}", reply.body);
                Duration::from_millis(reply.body["duration_ms"].as_u64().unwrap())
            });
            assert!(service.has_runs("running", 1));
            let queued = scope.spawn(|| {
                let reply = client(&service, &service.token).ask("POST", "/v1/run?queue=500ms", &shell("echo").to_string());
                assert_eq!((reply.status, &reply.body["reason"]), (503, &json!("queue_timeout")), "{}", reply.body);
                reply.after
            });
            thread::sleep(Duration::from_millis(100));
            change();
            [limited.join().unwrap(), queued.join().unwrap(), kept.join().unwrap()]
        })
    };
    // The shortest of three, each with the clock as it was before: other work of the machine only adds.
    let shortest = |change: &(dyn Fn() + Sync)| {
        let all = [0; 3].map(|_| {
            clock.restore();
            times(change)
        });
        [0, 1, 2].map(|what| all.iter().map(|times| times[what]).min().unwrap())
    };
    let usual = shortest(&|| {});
    let ask = || service.ask("GET", "/v1/runs", &short, &Value::Null);
    assert_eq!(ask().status, 200);
    for (number, status) in [(2020, 200), (2038, 401)] {
        let times = shortest(&|| clock.set(year(number)));
        println!("{number}: {times:?}, with a clock that stays {usual:?}");
        let are_near = times.iter().zip(&usual).all(|(time, usual)| time.abs_diff(*usual) <= scaled(Duration::from_millis(50)));
        assert!(are_near, "{number}: {times:?}, with a clock that stays {usual:?}");
        assert_eq!(ask().status, status);
        service.run("print(1)").ran("1\n");
    }
    ask().is(401, "key_revoked");
    clock.restore();
    assert_eq!(ask().status, 200);
    service.end();
}

test!(serial Both, a_hundred_reloads_lose_no_request, needs [Long], seconds 300);
fn a_hundred_reloads_lose_no_request() {
    const RELOADS: usize = 100;
    // Six times in it the supervisor looks whether the front stands still, often just after a reload.
    let patience = scaled(Duration::from_secs(3)).as_micros().to_string();
    let service = Service::under(&[], &[("WATCHDOG_USEC", &patience)], PolicyDirectory::new(), "", "");
    let good = fs::read_to_string(service.keys()).unwrap();
    let said = |words: &str| service.log().matches(words).count();
    let clients = vec![client(&service, &service.token), Client::at_port(service.port, &service.token)];
    let ((), answers) = while_asking(
        clients,
        &shell("echo 1"),
        |reply| ran(&reply, "1\n"),
        || {
            for number in 0..RELOADS {
                let (keys, words) = match number % 2 {
                    // It changes something each time.
                    0 => (
                        good.replace("id = \"test\"", &format!("id = \"test\"\nweight = {}", number + 1)),
                        "the configuration was read again",
                    ),
                    _ => (format!("{good}colour = 1\n"), "the configuration stays as it was"),
                };
                fs::write(service.keys(), keys).unwrap();
                service.signal("HUP");
                assert!(eventually(scaled(Duration::from_secs(10)), || said(words) == number / 2 + 1), "{}", service.log());
            }
        },
    );
    println!("{answers} answers during {RELOADS} reloads");
    assert!(answers > 100, "{answers}");
    assert_eq!(said("has ended"), 0, "{}", service.log());
    service.end();
}

test!(serial Both, a_batch_of_ten_thousand_has_each_id_once_and_ends_with_its_client, needs [Long], seconds 1200);
fn a_batch_of_ten_thousand_has_each_id_once_and_ends_with_its_client() {
    const COUNT: usize = 10_000;
    let others = OtherWork::now();
    let service = Service::new();
    let lines: String =
        (0..COUNT).map(|n| json!({"id": n.to_string(), "code": format!("echo {n}"), "language": "sh"}).to_string() + "\n").collect();
    let ask = || BufReader::new(Stream::open(&service, "POST", "/v1/batch", &["Content-Type: application/x-ndjson"], lines.as_bytes()));
    let (mut seen, begun) = (BTreeSet::new(), Instant::now());
    let mut answers = ask();
    loop {
        let line = next(&mut answers).expect("it ends with its last line");
        if line["type"] == "end" {
            assert_eq!(line, json!({"type": "end", "lines": COUNT, "problems": 0}));
            break;
        }
        let id = line["id"].as_str().unwrap().to_owned();
        assert_eq!((&line["result"]["output"], line["index"].to_string()), (&json!(format!("{id}\n")), id.clone()), "{line}");
        assert!(seen.insert(id), "{line}");
    }
    assert_eq!((seen.len(), next(&mut answers)), (COUNT, None));
    println!("{:.1} runs a second", COUNT as f64 / begun.elapsed().as_secs_f64());
    // Cut in the middle.
    let mut answers = ask();
    let first: BTreeSet<String> = (0..COUNT / 20).map(|_| next(&mut answers).unwrap()["id"].as_str().unwrap().to_owned()).collect();
    assert_eq!(first.len(), COUNT / 20);
    drop(answers);
    let mut asks = client(&service, "");
    thread::sleep(others.beside(Duration::from_millis(100)));
    let begun = counter(&mut asks, "stockade_queue_seconds_count");
    thread::sleep(scaled(Duration::from_secs(2)));
    assert_eq!(counter(&mut asks, "stockade_queue_seconds_count"), begun, "runs begin after their client has gone");
    assert!(begun < (2 * COUNT) as u64 && service.has_runs("running", 0) && service.has_runs("waiting", 0));
    // The control: it counts what begins.
    service.run("print(1)").ran("1\n");
    assert_eq!(counter(&mut asks, "stockade_queue_seconds_count"), begun + 1);
    service.end();
}

test!(serial Both, fifty_that_run_when_the_service_ends_are_answered, needs [Long], seconds 120);
fn fifty_that_run_when_the_service_ends_are_answered() {
    const COUNT: usize = 50;
    let mut service = Service::with(&format!("[capacity]\ncpus = {COUNT}\nmemory = \"64GiB\"\n[limits]\ndrain = \"60s\"\n"), "");
    let runs: Vec<_> = (0..COUNT).map(|n| begin(&service, &shell(&format!("sleep 4; echo {n}; exit {n}")))).collect();
    assert!(service.has_runs("running", COUNT));
    let waits = begin(&service, &shell("echo late"));
    assert!(service.has_runs("waiting", 1));
    let told = Instant::now();
    service.signal("TERM");
    read_answer(waits).is(503, "draining");
    for (number, run) in runs.into_iter().enumerate() {
        let answer = read_answer(run);
        let expected = (200, &json!("exited"), &json!(number), &json!(format!("{number}\n")));
        assert_eq!((answer.status, &answer.body["verdict"], &answer.body["code"], &answer.body["output"]), expected, "{}", answer.body);
    }
    let ended = wait_within(&mut service.child, scaled(Duration::from_secs(20))).expect("it ends when it is told to");
    println!("it has ended {:?} after SIGTERM", told.elapsed());
    assert!(ended.success(), "{ended}: {}", service.log());
}

/// How many runs the test below has, where `STOCKADE_TEST_RUNS` does not say it.
const RUNS: u32 = 20_000;

test!(serial Both, processes_of_the_service_grow_by_no_run, needs [Long], seconds 3000);
fn processes_of_the_service_grow_by_no_run() {
    let runs = std::env::var("STOCKADE_TEST_RUNS").map_or(RUNS, |runs| runs.parse().expect("STOCKADE_TEST_RUNS is a number"));
    let service = Service::with("[capacity]\ncpus = 2\n", "");
    let roles = ["stockade-serve", "stockade serve-worker"];
    let held = || {
        let supervisor = i32::try_from(service.child.id()).unwrap();
        let below = roles.map(|role| Held::by(&service.processes(role)));
        [Held::by(&[supervisor]), below[0], below[1]]
    };
    let pids = || roles.map(|role| service.processes(role));
    let (first, begun) = (pids(), Instant::now());
    let run = |count: u32| {
        let pace = Pace::new(Duration::ZERO, count);
        thread::scope(|scope| {
            for number in 0..4 {
                let (pace, service) = (&pace, &service);
                scope.spawn(move || {
                    let token = &service.token;
                    let mut client = if number % 2 == 0 { client(service, token) } else { Client::at_port(service.port, token) };
                    while let Some(number) = pace.beat() {
                        ran(&client.run(&shell(&format!("echo {number}"))), &format!("{number}\n"));
                    }
                });
            }
        });
        // What a worker has prepared is there again.
        let mut asks = client(&service, "");
        assert!(eventually(scaled(Duration::from_secs(10)), || counter(&mut asks, "stockade_workers{state=\"idle\"}") == 2));
    };
    run(1000);
    let before = held();
    run(runs.saturating_sub(1000));
    let after = held();
    println!("{:.1} runs a second", f64::from(runs) / begun.elapsed().as_secs_f64());
    println!("supervisor, front and workers after 1000 runs: {before:?}, after {runs}: {after:?}");
    assert_eq!(pids(), first, "a process was replaced: {}", service.log());
    for (before, after) in before.iter().zip(&after) {
        assert!(after.rss_kib * 100 <= before.rss_kib * 105, "{before:?} {after:?}");
        assert!(after.descriptors <= before.descriptors, "{before:?} {after:?}");
    }
    service.end();
}
