//! The service and its host: what it says to the manager that started it, sockets that it is given, what
//! keeps it from beginning, and what it says of a host that lacks something.

use std::{
    fs,
    net::{TcpListener, TcpStream},
    os::unix::{fs::MetadataExt, fs::PermissionsExt, net::UnixDatagram},
    path::PathBuf,
    time::{Duration, Instant},
};

use serde_json::json;

use super::serve::{Answer, Service, answer_of, head, kill, start_under};
use crate::support::{
    exec::{stockade, text},
    policy_dir::{PolicyDirectory, derived},
    runner::{directory, eventually, is_root, test, wait_within},
    timeouts::scaled,
};

/// The manager, at the other end of `NOTIFY_SOCKET`.
struct Manager(UnixDatagram);

impl Manager {
    /// The next word that begins so, and how many `WATCHDOG=1` were said before it.
    #[track_caller]
    fn hears(&self, word: &str) -> (String, usize) {
        let (end, mut alive) = (Instant::now() + scaled(Duration::from_secs(20)), 0);
        while Instant::now() < end {
            let said = self.next(Duration::from_millis(100));
            match said {
                Some(said) if said.starts_with(word) => return (said, alive),
                Some(said) => alive += usize::from(said == "WATCHDOG=1\n"),
                None => {}
            }
        }
        panic!("it does not say {word}");
    }

    fn next(&self, most: Duration) -> Option<String> {
        let mut bytes = [0; 4096];
        self.0.set_read_timeout(Some(most)).unwrap();
        let length = self.0.recv(&mut bytes).ok()?;
        Some(String::from_utf8(bytes[..length].to_vec()).unwrap())
    }
}

test!(Both, the_manager_of_the_service_hears_what_becomes_of_it);
fn the_manager_of_the_service_hears_what_becomes_of_it() {
    let path = directory().join("notify");
    let manager = Manager(UnixDatagram::bind(&path).unwrap());
    // It is to be heard of every three seconds, scaled: that often it looks six times.
    let patience = scaled(Duration::from_secs(3)).as_micros().to_string();
    let variables = [("NOTIFY_SOCKET", text(&path)), ("WATCHDOG_USEC", &patience)];
    let mut service = Service::under(&[], &variables, PolicyDirectory::new(), "", "");
    let (ready, _) = manager.hears("READY=1\n");
    assert!(ready.contains("\nSTATUS=serving at unix:") && ready.contains(", 1 keys"), "{ready}");
    assert_eq!(service.get("/ready").unwrap().status, 200);
    // No worker could speak in its name.
    for worker in service.processes("stockade serve-worker") {
        let environment = fs::read_to_string(format!("/proc/{worker}/environ")).unwrap();
        assert!(!environment.contains("NOTIFY_SOCKET") && !environment.contains("WATCHDOG"), "{environment}");
    }
    service.signal("HUP");
    let (reloading, _) = manager.hears("RELOADING=1\n");
    assert!(reloading.contains("\nMONOTONIC_USEC="), "{reloading}");
    let (ready, _) = manager.hears("READY=1\n");
    assert!(!ready.contains("stays as it was"), "{ready}");
    let keys = fs::read_to_string(service.keys()).unwrap();
    fs::write(service.keys(), format!("{keys}colour = 1\n")).unwrap();
    service.signal("HUP");
    let (ready, _) = manager.hears("READY=1\n");
    assert!(ready.contains("; the configuration stays as it was: "), "{ready}");
    fs::write(service.keys(), keys).unwrap();
    for _ in 0..3 {
        manager.hears("WATCHDOG=1");
    }
    // A front that stands still: at most the words that were under way.
    let front = service.processes("stockade-serve")[0];
    kill(front, "STOP");
    while manager.next(Duration::from_millis(1)).is_some() {}
    let is_ended = eventually(scaled(Duration::from_secs(10)), || service.log().contains("the front has ended, and is started again"));
    assert!(is_ended, "{}", service.log());
    let said: Vec<String> = std::iter::from_fn(|| manager.next(Duration::from_millis(1))).collect();
    assert!(said.len() <= 1, "{said:?}");
    assert!(service.log().contains("the front does not read what it is sent"));
    manager.hears("WATCHDOG=1");
    service.run("print(1)").ran("1\n");
    // And a supervisor that stands still, whose manager would end it.
    service.signal("STOP");
    while manager.next(Duration::from_millis(1)).is_some() {}
    assert_eq!(manager.next(scaled(Duration::from_secs(2))), None);
    service.signal("CONT");
    manager.hears("WATCHDOG=1");
    service.end();
    let (stopping, _) = manager.hears("STOPPING=1\n");
    assert!(stopping.contains("\nEXTEND_TIMEOUT_USEC=45000000\n"), "{stopping}");
}

/// A program that listens, as systemd does for a service, and becomes the program after its arguments:
/// the first says at which addresses.
const PASS: &str = r#"
import os, socket, sys
made = []
for at in sys.argv[1].split():
    kind = socket.SOCK_DGRAM if at.startswith('dgram:') else socket.SOCK_STREAM
    at = at.removeprefix('dgram:')
    if at.startswith('/'):
        s = socket.socket(socket.AF_UNIX, kind)
        s.bind(at)
    else:
        s = socket.socket(socket.AF_INET, kind)
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        s.bind(('127.0.0.1', int(at)))
    if kind == socket.SOCK_STREAM:
        s.listen()
    made.append(os.dup(s.fileno()))
top = max(made) + 10
made = [os.dup2(s, top + i) for i, s in enumerate(made)]
for i, s in enumerate(made):
    os.dup2(s, 3 + i, inheritable=True)
os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS=str(len(made)))
os.execv(sys.argv[2], sys.argv[2:])
"#;

test!(Both, sockets_that_systemd_passes_are_those_of_the_configuration);
fn sockets_that_systemd_passes_are_those_of_the_configuration() {
    let place = PolicyDirectory::new();
    let at = |name: &str| place.0.join(name);
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let made = stockade(["key", "new", "k", "--add", "--file", text(&at("keys.toml"))]).output().unwrap();
    assert!(made.status.success(), "{made:?}");
    let config = format!("schema = 1\n[listen]\nunix = {:?}\ntcp = \"127.0.0.1:{port}\"\n", at("s"));
    fs::write(at("serve.toml"), &config).unwrap();
    let begin = |passed: &str| start_under(&["/usr/bin/python3", "-c", PASS, passed], &[], &place);
    let log = || fs::read_to_string(at("log")).unwrap();
    let refused = |passed: &str, words: &str| {
        let mut child = begin(passed);
        let ended = wait_within(&mut child, scaled(Duration::from_secs(20))).expect("it does not begin");
        assert!(ended.code() == Some(125) && log().contains(words), "{passed}: {}", log());
        for name in ["s", "other"] {
            let _not_there = fs::remove_file(at(name));
        }
    };
    let other = text(&at("other")).to_owned();
    refused(&other, &format!("systemd passes a socket at unix:{other}, and the service is to listen at unix:"));
    refused(&format!("{}", port - 1), &format!("systemd passes a socket at http://127.0.0.1:{}", port - 1));
    refused(&format!("dgram:{}", text(&at("s"))), "it does not listen for connections; its unit needs `ListenStream=` and `Accept=no`");
    // The control: both, and the one that is not passed is made.
    for passed in [format!("{} {port}", text(&at("s"))), text(&at("s")).to_owned(), port.to_string()] {
        let mut child = begin(&passed);
        let is_there = eventually(scaled(Duration::from_secs(20)), || log().contains("serving at"));
        assert!(is_there, "{passed}: {}", log());
        let is_passed = passed.contains('/');
        let inode = fs::metadata(at("s")).unwrap().ino();
        let over_unix = std::os::unix::net::UnixStream::connect(at("s")).unwrap();
        assert_eq!(answer_of(over_unix, &head("GET", "/live", &[], 0), b"").status, 200);
        let host = head("GET", "/live", &[], 0).replace("Host: localhost", &format!("Host: 127.0.0.1:{port}"));
        assert_eq!(answer_of(TcpStream::connect(("127.0.0.1", port)).unwrap(), &host, b"").status, 200);
        kill(i32::try_from(child.id()).unwrap(), "TERM");
        assert!(wait_within(&mut child, scaled(Duration::from_secs(20))).is_some_and(|ended| ended.success()), "{}", log());
        // Systemd's file stays systemd's.
        assert_eq!(fs::metadata(at("s")).ok().map(|file| file.ino()), is_passed.then_some(inode), "{passed}");
        let _not_there = fs::remove_file(at("s"));
    }
}

/// What a service says that does not begin with these files, whose keys have these modes.
fn refusal(config: &str, keys: &str, modes: [u32; 2], variables: &[(&str, &str)]) -> String {
    let place = PolicyDirectory::new();
    for ((name, text), mode) in [("serve.toml", config), ("keys.toml", keys)].into_iter().zip(modes) {
        fs::write(place.0.join(name), text).unwrap();
        fs::set_permissions(place.0.join(name), fs::Permissions::from_mode(mode)).unwrap();
    }
    let mut child = start_under(&[], variables, &place);
    let said = || fs::read_to_string(place.0.join("log")).unwrap();
    let mut ended = None;
    eventually(scaled(Duration::from_secs(20)), || {
        ended = child.try_wait().unwrap();
        ended.is_some() || said().contains("serving at")
    });
    match ended {
        Some(status) => {
            assert_eq!(status.code(), Some(125), "{}", said());
            said()
        }
        None => {
            kill(i32::try_from(child.id()).unwrap(), "TERM");
            assert!(wait_within(&mut child, scaled(Duration::from_secs(20))).is_some_and(|status| status.success()), "{}", said());
            format!("it begins: {}", said())
        }
    }
}

/// A directory for policies that this launcher believes, beside that of a service.
fn own_directory() -> PathBuf {
    let own = if is_root() { PathBuf::from(format!("/var/lib/suite-own-{}", std::process::id())) } else { directory().join("own") };
    fs::create_dir(&own).unwrap();
    own
}

test!(Both, what_could_not_be_kept_is_refused_at_the_start);
fn what_could_not_be_kept_is_refused_at_the_start() {
    let place = directory();
    let config = format!("schema = 1\n[listen]\nunix = {:?}\ntcp = \"none\"\n", place.join("s"));
    let key = |policy: &str| format!("[[key]]\nid = \"a\"\nuid = 1000\npolicies = [{policy:?}]\n");
    let policies = own_directory();
    let policy = |name: &str, lines: &str| {
        fs::write(policies.join(name), derived(lines)).unwrap();
        text(&policies.join(name)).to_owned()
    };
    let of_no_host = policy("path.toml", "[filesystem]\nread_only = { add = [\"/usr/not-there\"] }\n");
    let required = policy("audit.toml", "[audit]\nmode = \"required\"\n");
    // No directory can be made in a file.
    let no_log = [("XDG_STATE_HOME", "/proc/version")];
    let default = key("default");
    let tcp = format!("schema = 1\n[listen]\nunix = {:?}\ntcp = \"127.0.0.1:18722\"\n", place.join("s"));
    let mut cases = vec![
        (&*config, default.clone(), [0o666, 0o600], &[][..], "not trusted"),
        (&config, default.clone(), [0o644, 0o644], &[], "chmod 0640"),
        (&config, default.clone(), [0o644, 0o660], &[], "not trusted"),
        (&tcp, default.clone(), [0o644, 0o600], &[], "has a token, which every client of TCP needs"),
        (&config, key(&of_no_host), [0o644, 0o600], &[], "cannot be enforced here: "),
    ];
    if !is_root() {
        cases.push((&config, key(&required), [0o644, 0o600], &no_log, "cannot be enforced here: "));
    }
    for (config, keys, modes, variables, words) in cases {
        let said = refusal(config, &keys, modes, variables);
        assert!(!said.starts_with("it begins") && said.contains(words), "{words}: {said}");
    }
    // The controls: with these files it begins, and with a log that may be missing.
    for (keys, variables) in [(&default, &[][..]), (&key(&required), &[]), (&default, &no_log)] {
        let said = refusal(&config, keys, [0o644, 0o600], if is_root() { &[] } else { variables });
        assert!(said.starts_with("it begins") && said.contains("serving at"), "{said}");
        assert!(variables.is_empty() || is_root() || said.contains("goes without audit log"), "{said}");
    }
    fs::remove_dir_all(&policies).unwrap();
}

test!(Both, what_the_host_lacks_is_said_by_ready);
fn what_the_host_lacks_is_said_by_ready() {
    let own = own_directory();
    let (shown, policy) = (own.join("shown"), own.join("policy.toml"));
    fs::write(&shown, "x").unwrap();
    fs::write(&policy, derived(&format!("[filesystem]\nread_only = {{ add = [{:?}] }}\n", text(&shown)))).unwrap();
    let keys = format!("[[key]]\nid = \"own\"\nuid = 1\npolicies = [{:?}]\n", text(&policy));
    let mut service = Service::with("", &keys);
    let lacks = |answer: &Answer| {
        let lacks = answer.body["lacks"].as_array().unwrap().iter().map(|lack| lack.as_str().unwrap().to_owned());
        lacks.filter(|lack| lack.contains("cannot be enforced here")).collect::<Vec<_>>()
    };
    let ready = service.get("/ready").unwrap();
    assert_eq!((ready.status, &ready.body["ready"], lacks(&ready)), (200, &json!(true), vec![]));
    fs::remove_file(&shown).unwrap();
    service.signal("HUP");
    assert!(eventually(scaled(Duration::from_secs(10)), || service.get("/ready").unwrap().status == 503), "{}", service.log());
    assert!(service.log().contains("the configuration stays as it was: policy /"), "{}", service.log());
    let ready = service.get("/ready").unwrap();
    let lacking = lacks(&ready);
    assert!(ready.body["ready"] == false && lacking.len() == 1, "{}", ready.body);
    assert!(lacking[0].contains(text(&policy)) && lacking[0].contains(text(&shown)), "{lacking:?}");
    // Over TCP it is for keys: a stranger learns that it is not ready, and no more.
    let over_tcp = |field: &str| {
        let head = head("GET", "/ready", &[field], 0).replace("Host: localhost", &format!("Host: localhost:{}", service.port));
        answer_of(TcpStream::connect(("127.0.0.1", service.port)).unwrap(), &head, b"")
    };
    assert_eq!(lacks(&over_tcp(&format!("Authorization: Bearer {}", service.token))), lacking);
    let stranger = over_tcp("X-Nothing: 1");
    assert_eq!((stranger.status, &stranger.body), (503, &json!({"live": true, "ready": false})));
    // Other policies go on.
    service.run("print(1)").ran("1\n");
    fs::write(&shown, "x").unwrap();
    service.signal("HUP");
    assert!(eventually(scaled(Duration::from_secs(10)), || service.get("/ready").unwrap().status == 200), "{}", service.log());
    service.end();
    fs::remove_dir_all(&own).unwrap();
}

/// A service that is told to read its settings again, and the processes that try its policies then.
struct Reloading(Service);

impl Reloading {
    /// With so many policies that there is time to stop the process that tries them.
    fn new() -> Self {
        let place = PolicyDirectory::new();
        let policies: Vec<String> = (0..30).map(|number| place.write(&format!("p{number}"), &derived(""))).collect();
        let service = Service::at(place, "[capacity]\ncpus = 1\n", "");
        let keys = fs::read_to_string(service.keys()).unwrap();
        fs::write(service.keys(), format!("[[key]]\nid = \"all\"\nuid = 1\npolicies = {policies:?}\n{keys}")).unwrap();
        Reloading(service)
    }

    fn examiners(&self) -> Vec<i32> {
        self.0.processes("/proc/self/exe serve-examine")
    }

    fn times_read(&self) -> usize {
        self.0.log().matches("the configuration was read again").count()
    }

    /// Has it read its settings again. Stops the process that tries them, which another one goes for: `before`.
    fn stop_examiner(&self, before: i32) -> i32 {
        self.0.signal("HUP");
        let next = || self.examiners().into_iter().find(|examiner| *examiner != before);
        assert!(eventually(scaled(Duration::from_secs(10)), || next().is_some()), "{}", self.0.log());
        let examiner = next().unwrap();
        kill(examiner, "STOP");
        examiner
    }
}

test!(Both, a_service_goes_on_while_its_policies_are_tried_again, seconds 150);
fn a_service_goes_on_while_its_policies_are_tried_again() {
    let reloading = Reloading::new();
    let service = &reloading.0;
    let examiner = reloading.stop_examiner(0);
    // Meanwhile a worker that ends is replaced, and runs.
    let worker = service.processes("stockade serve-worker");
    kill(worker[0], "KILL");
    assert!(eventually(scaled(Duration::from_secs(8)), || service.log().contains("a worker has ended")), "{}", service.log());
    service.run("print(1)").ran("1\n");
    assert_eq!((reloading.times_read(), reloading.examiners()), (0, vec![examiner]), "{}", service.log());
    // Another signal begins anew, with the files as they are then.
    let second = reloading.stop_examiner(examiner);
    assert_eq!(reloading.examiners(), [second]);
    // The control.
    kill(second, "CONT");
    assert!(eventually(scaled(Duration::from_secs(65)), || reloading.times_read() == 1), "{}", service.log());
    // One that is under way ends with the service.
    reloading.stop_examiner(0);
    reloading.0.end();
}

test!(Both, a_reload_whose_policies_take_too_long_changes_nothing, needs [Long], seconds 300);
fn a_reload_whose_policies_take_too_long_changes_nothing() {
    let reloading = Reloading::new();
    reloading.stop_examiner(0);
    let is_given_up = || reloading.0.log().contains("its policies have taken more than 60 s");
    assert!(eventually(scaled(Duration::from_secs(70)), is_given_up), "{}", reloading.0.log());
    assert!(reloading.examiners().is_empty() && reloading.times_read() == 0, "{}", reloading.0.log());
    reloading.0.run("print(1)").ran("1\n");
    // The control.
    reloading.0.signal("HUP");
    assert!(eventually(scaled(Duration::from_secs(65)), || reloading.times_read() == 1), "{}", reloading.0.log());
    reloading.0.end();
}
