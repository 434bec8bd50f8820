//! The socket for local users: requests over a UNIX socket, served as systemd would have it.
//!
//! A listener of the test's own takes systemd's place: it starts `stockade serve-one` for each
//! connection, with the connection on stdin. What systemd itself does is tested in the guest.

use std::{
    fs::{self, Permissions},
    io::{Read, Write},
    net::Shutdown,
    os::{
        fd::OwnedFd,
        unix::{
            fs::{MetadataExt, PermissionsExt, chown},
            net::{UnixListener, UnixStream},
        },
    },
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::mpsc::{Receiver, channel},
    thread,
    time::Duration,
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::{Value, json};

use crate::support::{
    exec::{ExecResult, OWNER, exec, program_path, run_under, run_with_stdin, scratch, start, stockade, text, token, write_file},
    leftovers::no_process_is_left,
    policy_dir::command_with_etc,
    runner::{directory, eventually, is_root, test, wait_within},
};

/// Listens, and starts what `command` makes for each connection.
pub struct SocketServer {
    path: PathBuf,
    served: Receiver<Child>,
}

impl SocketServer {
    pub fn open(name: &str, command: impl Fn() -> Command + Send + 'static) -> Self {
        let path = directory().join(name);
        let listener = UnixListener::bind(&path).unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o666)).unwrap();
        let (started, served) = channel();
        thread::spawn(move || {
            for connection in listener.incoming() {
                let mut command = command();
                command.stdin(OwnedFd::from(connection.unwrap())).stdout(Stdio::null()).stderr(Stdio::inherit());
                if started.send(command.spawn().unwrap()).is_err() {
                    return;
                }
            }
        });
        SocketServer { path, served }
    }

    /// Of the policy `default`, with nothing special.
    fn plain() -> Self {
        SocketServer::open("default.sock", || stockade(["serve-one"]))
    }

    /// Where these grants are the host's.
    fn granting(grants: &str) -> Self {
        let grants = grants.to_owned();
        SocketServer::open("default.sock", move || command_with_etc(&[("stockade/grants.toml", &grants)], &[], &["serve-one"]))
    }

    /// A client of the program's own, by these words before it.
    pub fn client(&self, words: &[&str]) -> Command {
        client(&self.path, words)
    }

    #[track_caller]
    pub fn ask(&self, words: &[&str], request: &Value) -> ExecResult {
        ExecResult::of(run_with_stdin(&mut self.client(words), request.to_string().as_bytes()))
    }

    /// A connection without a client.
    fn connect(&self) -> UnixStream {
        UnixStream::connect(&self.path).unwrap()
    }

    /// The server of the last connection.
    fn server(&self) -> Child {
        let mut last = self.served.recv_timeout(Duration::from_secs(20)).unwrap();
        while let Ok(next) = self.served.try_recv() {
            last = next;
        }
        last
    }
}

fn client(socket: &Path, words: &[&str]) -> Command {
    let program = program_path().unwrap();
    let program = [program.to_str().unwrap(), "exec", "--socket", text(socket)];
    run_under(&[words, &program].concat())
}

fn as_uid(uid: u32) -> [String; 4] {
    [String::from("setpriv"), format!("--reuid={uid}"), format!("--regid={uid}"), String::from("--clear-groups")]
}

/// `SocketServer::ask` of an ordinary user's.
#[track_caller]
fn ask_as(socket: &SocketServer, uid: u32, request: &Value) -> ExecResult {
    let words = as_uid(uid);
    socket.ask(&words.each_ref().map(String::as_str), request)
}

/// Everything that the server sends, as a result.
fn read_result(mut connection: &UnixStream) -> Value {
    let mut said = Vec::new();
    // A server that had enough of us has closed with something unread.
    let _reset = connection.read_to_end(&mut said);
    serde_json::from_slice(&said).unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(&said)))
}

test!(Both, a_request_through_a_socket_has_the_result_and_the_status_that_it_has_without, seconds 60);
fn a_request_through_a_socket_has_the_result_and_the_status_that_it_has_without() {
    let socket = SocketServer::plain();
    let long = "print('x' * 3_000_000)";
    for request in [
        json!({"code": "import sys\nprint('out'); print('err', file=sys.stderr); sys.exit(3)", "id": "7", "labels": {"a": "b"}}),
        json!({"code": "print(open(0).read(), end='')", "stdin": "y".repeat(2 << 20), "encoding": "base64", "limits": {"output_size": "4MiB"}}),
        json!({"code": long}),
        json!({"code": "import time\ntime.sleep(60)", "limits": {"wall": "500ms"}}),
        json!({"code": "", "language": "cobol"}),
        json!({"cod": ""}),
    ] {
        let (direct, through) = (exec(request.clone()), socket.ask(&[], &request));
        assert_eq!((direct.status, &direct.stderr), (through.status, &through.stderr));
        let lasting = |done: &ExecResult| {
            let mut result = done.result.clone();
            // These differ from run to run; a slow machine's wall clock was lengthened for one.
            for field in ["duration_ms", "usage", "receipt", "limits", "audit"] {
                result.as_object_mut().unwrap().remove(field);
            }
            if let Some(peak) = result.pointer_mut("/denials/0/limit/peak") {
                *peak = Value::Null;
            }
            result
        };
        assert_eq!(lasting(&direct), lasting(&through), "{request}");
        let layers = |done: &ExecResult| done["receipt"]["layers"].as_array().map(Vec::len);
        assert_eq!(layers(&direct), layers(&through));
        assert!([&direct, &through].iter().all(|done| done["audit"]["seq"].is_u64()), "each is in the log: {}", through.brief());
    }
}

test!(Both, the_name_of_the_socket_is_the_policy);
fn the_name_of_the_socket_is_the_policy() {
    let socket = SocketServer::open("blueprint.sock", || stockade(["serve-one"]));
    let done = socket.ask(&[], &json!({"code": "print(6 * 7)"}));
    assert_eq!(done.succeeded()["policy"]["name"], "blueprint");
    // What a request says does not matter, and what a client says of options is refused.
    socket.ask(&[], &json!({"code": "", "policy": "shell"})).refused("request_malformed", &["policy"]);
    let mut command = socket.client(&[]);
    ExecResult::of(run_with_stdin(command.args(["--policy", "shell"]), b"{}")).refused("usage", &["--policy", "--socket"]);
    let named = SocketServer::open("other.sock", || stockade(["serve-one", "--policy", "shell"]));
    assert_eq!(named.ask(&[], &json!({"code": ""})).succeeded()["policy"]["name"], "shell");
    let unknown = SocketServer::open("unheard-of.sock", || stockade(["serve-one"]));
    unknown.ask(&[], &json!({"code": ""})).broke("policy_not_found", &["unheard-of"]);
    // A name that says nothing: the server goes without having looked at the request.
    let nameless = SocketServer::open("nameless", || stockade(["serve-one"]));
    nameless.ask(&[], &json!({"code": ""})).broke("server_lost", &["the code has not run"]);
}

/// Code that writes into its scratch that it runs, and a request for it.
fn lasting(scratch: &Path, word: &str) -> (Value, PathBuf) {
    let code = format!("import time\nprint('begun', flush=True)\nopen('runs', 'w').close()\ntime.sleep(600) # {word}");
    (json!({"code": code, "scratch": text(scratch), "args": [word]}), scratch.join("runs"))
}

#[track_caller]
fn wait_for(path: &Path) {
    assert!(eventually(Duration::from_secs(10), || path.exists()), "{} did not come to be", path.display());
}

test!(Both, a_client_that_hangs_up_cancels_the_run, seconds 60);
fn a_client_that_hangs_up_cancels_the_run() {
    let socket = SocketServer::plain();
    let scratch = scratch();
    // The two ways to end a request.
    for (way, end) in [("half", None), ("nul", Some(0))] {
        let word = token(way);
        let (request, runs) = lasting(&scratch, &word);
        let mut connection = socket.connect();
        connection.write_all(request.to_string().as_bytes()).unwrap();
        match end {
            Some(byte) => connection.write_all(&[byte]).unwrap(),
            None => connection.shutdown(Shutdown::Write).unwrap(),
        }
        wait_for(&runs);
        let mut server = socket.server();
        // The control: it runs for as long as somebody waits.
        assert!(server.try_wait().unwrap().is_none());
        drop(connection);
        let status = wait_within(&mut server, Duration::from_secs(10)).expect("the server goes on");
        assert!(status.success(), "{status}");
        no_process_is_left(&word);
        fs::remove_file(&runs).unwrap();
    }
}

test!(Both, a_signal_to_the_client_cancels_the_run_and_its_result_comes);
fn a_signal_to_the_client_cancels_the_run_and_its_result_comes() {
    let socket = SocketServer::plain();
    let scratch = scratch();
    let (request, runs) = lasting(&scratch, &token("signal"));
    for (signal, code) in [(Signal::SIGTERM, 143), (Signal::SIGINT, 130)] {
        let child = start(&mut socket.client(&[]), request.to_string().as_bytes());
        wait_for(&runs);
        kill(Pid::from_raw(i32::try_from(child.id()).unwrap()), signal).unwrap();
        let done = ExecResult::of(child.wait_with_output().unwrap());
        done.expect(json!({"verdict": "cancelled", "code": code, "output": "begun\n", "started": true}));
        fs::remove_file(&runs).unwrap();
    }
}

test!(RootOnly, a_request_that_never_ends_is_refused_when_its_time_is_up, seconds 60);
fn a_request_that_never_ends_is_refused_when_its_time_is_up() {
    let socket = SocketServer::plain();
    let mut connection = socket.connect();
    connection.write_all(br#"{"code": "print(1)"}"#).unwrap();
    let result = read_result(&connection);
    assert_eq!(
        (&result["verdict"], &result["reason"], &result["started"]),
        (&json!("bad_request"), &json!("request_timeout"), &json!(false))
    );
    let status = wait_within(&mut socket.server(), Duration::from_secs(10)).expect("the server goes on");
    assert!(status.success());
    // The control: the same request with an end.
    let mut connection = socket.connect();
    connection.write_all(br#"{"code": "print(1)"}"#).unwrap();
    connection.shutdown(Shutdown::Write).unwrap();
    assert_eq!(read_result(&connection)["output"], "1\n");
}

test!(Both, a_request_beyond_the_cap_is_refused, seconds 60);
fn a_request_beyond_the_cap_is_refused() {
    const CAP: usize = 64 << 20;
    let socket = SocketServer::plain();
    let padded = |length: usize| {
        let mut request = br#"{"code": "print(1)"}"#.to_vec();
        request.resize(length, b' ');
        request
    };
    let mut connection = socket.connect();
    // It stops reading; what more is sent finds a closed connection.
    let _stopped = connection.write_all(&padded(CAP + (1 << 20)));
    let result = read_result(&connection);
    assert_eq!((&result["verdict"], &result["reason"]), (&json!("bad_request"), &json!("request_too_large")));
    // The client would not even send it.
    ExecResult::of(run_with_stdin(&mut socket.client(&[]), &padded(CAP + 1))).refused("request_too_large", &["64 MiB"]);
    // The control: the largest that is allowed.
    ExecResult::of(run_with_stdin(&mut socket.client(&[]), &padded(CAP))).succeeded();
}

test!(Both, a_server_that_dies_is_a_sandbox_error_that_says_whether_code_may_have_run, seconds 60);
fn a_server_that_dies_is_a_sandbox_error_that_says_whether_code_may_have_run() {
    let scratch = scratch();
    let word = token("dies");
    let (request, runs) = lasting(&scratch, &word);
    let request = request.to_string();
    let lost = |done: &ExecResult, started: bool| {
        done.expect(json!({"verdict": "sandbox_error", "reason": "server_lost", "code": 125, "started": started, "output": ""}));
        let says = if started { "may have run" } else { "has not run" };
        assert!(done.error().contains(says), "{}", done.error());
    };
    // In the middle of a run.
    let socket = SocketServer::plain();
    let child = start(&mut socket.client(&[]), request.as_bytes());
    wait_for(&runs);
    socket.server().kill().unwrap();
    lost(&ExecResult::of(child.wait_with_output().unwrap()), true);
    no_process_is_left(&word);
    // Before it has read anything, and before it has read all.
    let unread = SocketServer::open("unread.sock", || run_under(&["true"]));
    lost(&unread.ask(&[], &json!({"code": "1"})), false);
    let begun = SocketServer::open("begun.sock", || run_under(&["head", "-c", "100000"]));
    lost(&begun.ask(&[], &json!({"code": "1", "stdin": "z".repeat(1 << 20)})), false);
    // In the middle of its answer, which is not taken for one.
    let half = r#"import socket; s = socket.socket(fileno=0); s.recv(1 << 16); s.sendall(b'{"verdict": "exited", "code": 0')"#;
    let half = SocketServer::open("half.sock", move || run_under(&["python3", "-c", half]));
    lost(&half.ask(&[], &json!({"code": "1"})), true);
}

test!(Both, a_server_that_is_told_to_stop_cancels_the_run_and_says_so);
/// As `systemctl stop` does it.
fn a_server_that_is_told_to_stop_cancels_the_run_and_says_so() {
    let socket = SocketServer::plain();
    let scratch = scratch();
    let word = token("stop");
    let (request, runs) = lasting(&scratch, &word);
    let child = start(&mut socket.client(&[]), request.to_string().as_bytes());
    wait_for(&runs);
    let mut server = socket.server();
    kill(Pid::from_raw(i32::try_from(server.id()).unwrap()), Signal::SIGTERM).unwrap();
    let done = ExecResult::of(child.wait_with_output().unwrap());
    done.expect(json!({"verdict": "cancelled", "code": 143, "output": "begun\n", "started": true}));
    let status = wait_within(&mut server, Duration::from_secs(10)).expect("the server goes on");
    assert!(status.success(), "{status}");
    no_process_is_left(&word);
}

test!(serial Both, fifty_at_once_are_all_served, seconds 120);
fn fifty_at_once_are_all_served() {
    let socket = SocketServer::plain();
    thread::scope(|scope| {
        let path = socket.path.clone();
        let ask = move |number: usize| {
            let request = json!({"code": format!("echo {number}"), "language": "sh", "id": number.to_string()});
            ExecResult::of(run_with_stdin(&mut client(&path, &[]), request.to_string().as_bytes()))
        };
        let asked: Vec<_> = (0..50)
            .map(|number| {
                let ask = ask.clone();
                scope.spawn(move || ask(number))
            })
            .collect();
        for (number, asked) in asked.into_iter().enumerate() {
            let done = asked.join().unwrap();
            done.succeeded().expect(json!({"output": format!("{number}\n"), "id": number.to_string()}));
            assert!(done["audit"]["seq"].is_u64(), "{}", done["audit"]);
        }
    });
}

test!(RootlessOnly, a_run_that_is_not_written_down_says_so_to_the_client);
fn a_run_that_is_not_written_down_says_so_to_the_client() {
    let socket = SocketServer::open("default.sock", || {
        let mut command = stockade(["serve-one"]);
        // No directory is made there.
        command.env("HOME", "/proc");
        command
    });
    let done = socket.ask(&[], &json!({"code": "print(1)"}));
    assert!(done.succeeded().stderr.contains("not in the audit log: cannot make the audit log /proc/"), "{}", done.stderr);
    // The control.
    let done = SocketServer::open("written.sock", || stockade(["serve-one", "--policy", "default"])).ask(&[], &json!({"code": "print(1)"}));
    assert!(!done.succeeded().stderr.contains("audit"), "{}", done.stderr);
}

test!(Both, a_socket_that_cannot_be_reached_is_an_error_with_its_remedy);
fn a_socket_that_cannot_be_reached_is_an_error_with_its_remedy() {
    let ask = |path: &Path, words: &[&str]| ExecResult::of(run_with_stdin(&mut client(path, words), br#"{"code": ""}"#));
    let path = directory().join("default.sock");
    ask(&path, &[]).broke("socket_missing", &[text(&path), "systemctl enable --now stockade-exec@default.socket"]);
    let listener = UnixListener::bind(&path).unwrap();
    fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
    let stranger = as_uid(OWNER);
    let mut words: Vec<&str> = Vec::new();
    if is_root() {
        words.extend(stranger.iter().map(String::as_str));
    } else {
        fs::set_permissions(&path, Permissions::from_mode(0o000)).unwrap();
    }
    ask(&path, &words).broke("socket_denied", &[text(&path), "adduser USER stockade"]);
    fs::set_permissions(&path, Permissions::from_mode(0o666)).unwrap();
    drop(listener);
    ask(&path, &words).broke("socket_refused", &[text(&path), "systemctl restart stockade-exec@default.socket"]);
    write_file(&directory().join("file"), "");
    ask(&directory().join("file"), &words).broke("socket_refused", &["file"]);
    ask(&directory().join("x".repeat(200)), &words).broke("socket_unusable", &["--socket", "107 bytes"]);
    // The control: somebody answers.
    fs::remove_file(&path).unwrap();
    SocketServer::plain().ask(&[], &json!({"code": "print(1)"})).succeeded();
}

test!(Both, without_a_connection_there_is_nothing_to_serve);
fn without_a_connection_there_is_nothing_to_serve() {
    let (read, _write) = std::io::pipe().unwrap();
    for stdin in [Stdio::null(), Stdio::from(OwnedFd::from(read))] {
        let output = stockade(["serve-one", "--policy", "default"]).stdin(stdin).output().unwrap();
        assert_eq!((output.status.code(), output.stdout.as_slice()), (Some(125), &b""[..]));
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(said.contains("not a connected UNIX socket") && said.contains("stockade-exec@.socket"), "{said}");
    }
}

test!(RootOnly, a_peer_gets_what_is_granted_to_it_and_nothing_else, seconds 60);
fn a_peer_gets_what_is_granted_to_it_and_nothing_else() {
    let request = json!({"code": "print(6 * 7)"});
    let socket = SocketServer::granting(&format!("[[grant]]\nuid = {OWNER}\npolicies = [\"default\"]\n"));
    let served = ask_as(&socket, OWNER, &request);
    served.succeeded();
    let refused = ask_as(&socket, OWNER + 1, &request);
    refused.broke("not_granted", &[&format!("uid {}", OWNER + 1), "[[grant]]"]);
    // Root's log names both.
    for (done, uid) in [(&served, OWNER), (&refused, OWNER + 1)] {
        let shown = stockade(["audit", "show", done["audit"]["run"].as_str().unwrap()]).output().unwrap();
        let record: Value = serde_json::from_slice(&shown.stdout).unwrap_or_else(|error| panic!("{error}: {shown:?}"));
        assert_eq!((&record["who"]["uid"], &record["who"]["on_behalf"]), (&json!(uid), &json!(true)), "{record}");
    }
    // The control of the refusal: root itself needs no grant.
    socket.ask(&[], &request).succeeded();
    fs::remove_file(&socket.path).unwrap();
    let other = SocketServer::granting(&format!("[[grant]]\nuid = {OWNER}\npolicies = [\"strict\"]\n"));
    ask_as(&other, OWNER, &request).broke("not_granted", &["`default`", "policies = [\"strict\", \"default\"]"]);
    fs::remove_file(&other.path).unwrap();
    // Grants of no user.
    ask_as(&SocketServer::plain(), OWNER, &request).broke("not_granted", &[&format!("uid {OWNER}"), "/etc/stockade/grants.toml"]);
}

test!(RootOnly, who_asks_is_what_the_kernel_says_and_no_variable, seconds 60);
fn who_asks_is_what_the_kernel_says_and_no_variable() {
    let request = json!({"code": "print(6 * 7)"});
    let grants = format!("[[grant]]\nuid = {OWNER}\npolicies = [\"default\"]\n");
    // The server's variables name root, or a user with a grant.
    for uid in [String::from("0"), OWNER.to_string()] {
        let grants = grants.clone();
        let name = format!("default-{uid}.sock");
        let serve = move || {
            let variables = [("SUDO_UID", uid.as_str()), ("SUDO_GID", uid.as_str())];
            command_with_etc(&[("stockade/grants.toml", &grants)], &variables, &["serve-one", "--policy", "default"])
        };
        let socket = SocketServer::open(&name, serve);
        ask_as(&socket, OWNER + 1, &request).broke("not_granted", &[&format!("uid {}", OWNER + 1)]);
        ask_as(&socket, OWNER, &request).succeeded();
    }
}

test!(RootOnly, no_caller_of_sudo_asks_as_root);
fn no_caller_of_sudo_asks_as_root() {
    let socket = SocketServer::plain();
    let request = json!({"code": "print(6 * 7)"});
    let sudo = ["env", &format!("SUDO_UID={OWNER}"), &format!("SUDO_GID={OWNER}")];
    socket.ask(&sudo, &request).refused("socket_through_sudo", &[&format!("uid {OWNER}"), "leave sudo out"]);
    // The controls: root itself, which needs no grant, and a caller of sudo, who has none.
    socket.ask(&[], &request).succeeded();
    ask_as(&socket, OWNER, &request).broke("not_granted", &[&format!("uid {OWNER}")]);
}

test!(RootOnly, a_grant_to_a_group_is_for_peers_that_are_in_it);
fn a_grant_to_a_group_is_for_peers_that_are_in_it() {
    const GROUP: u32 = 54399;
    let socket = SocketServer::granting(&format!("[[grant]]\ngid = {GROUP}\npolicies = [\"default\"]\n"));
    let request = json!({"code": "print(1)"});
    let (reuid, regid, groups) = (format!("--reuid={OWNER}"), format!("--regid={OWNER}"), format!("--groups=7,{GROUP}"));
    socket.ask(&["setpriv", &reuid, &regid, &groups], &request).succeeded();
    socket.ask(&["setpriv", &reuid, &format!("--regid={GROUP}"), "--clear-groups"], &request).succeeded();
    socket.ask(&["setpriv", &reuid, &regid, "--groups=7"], &request).broke("not_granted", &[&format!("uid {OWNER}")]);
}

/// A peer that sends nothing and takes whatever comes, as this uid.
const SILENT: &str =
    "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); s.settimeout(4); print(s.makefile().read(), end='')";

test!(RootOnly, nothing_is_read_for_a_peer_without_a_grant);
fn nothing_is_read_for_a_peer_without_a_grant() {
    let socket = SocketServer::granting(&format!("[[grant]]\nuid = {OWNER}\npolicies = [\"default\"]\n"));
    let silent = |uid: u32| {
        let words = as_uid(uid);
        let words: Vec<&str> = words.iter().map(String::as_str).chain(["python3", "-c", SILENT, text(&socket.path)]).collect();
        run_under(&words).output().unwrap()
    };
    // Refused at once, and well before a request's time is up.
    let output = silent(OWNER + 1);
    let result: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{output:?}"));
    assert_eq!(result["reason"], "not_granted");
    // The control: for a user who has one the server waits.
    let output = silent(OWNER);
    assert!(output.stdout.is_empty() && String::from_utf8_lossy(&output.stderr).contains("timed out"), "{output:?}");
}

/// A peer that reports when it is connected, sends nothing and stays.
const STAYING: &str =
    "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); print('there', flush=True); s.recv(1 << 20)";

test!(RootOnly, one_user_cannot_take_every_connection, seconds 60);
fn one_user_cannot_take_every_connection() {
    let grants = format!("[[grant]]\nuid = {OWNER}\npolicies = [\"default\"]\n[[grant]]\nuid = {}\npolicies = [\"default\"]\n", OWNER + 1);
    let socket = SocketServer::open("default.sock", move || {
        command_with_etc(&[("stockade/grants.toml", &grants)], &[], &["serve-one", "--per-user", "2"])
    });
    let request = json!({"code": "print(6 * 7)"});
    let stay = || {
        let words = as_uid(OWNER);
        let words: Vec<&str> = words.iter().map(String::as_str).chain(["python3", "-c", STAYING, text(&socket.path)]).collect();
        let mut child = run_under(&words).spawn().unwrap();
        child.stdout.as_mut().unwrap().read_exact(&mut [0; 6]).unwrap();
        child
    };
    let mut staying = [stay(), stay()];
    // They are connected; their servers count from a moment later on. Where a request below
    // was counted before one of these, that one was refused, and comes again.
    let mut last = None;
    let full = eventually(Duration::from_secs(10), || {
        let done = ask_as(&socket, OWNER, &request);
        let full = done["reason"] == "too_many_connections";
        last = Some(done);
        for gone in staying.iter_mut().filter_map(|child| child.try_wait().unwrap().map(|_| child)) {
            *gone = stay();
        }
        full
    });
    let last = last.unwrap();
    assert!(full, "{}", last.brief());
    last.broke("too_many_connections", &[&format!("uid {OWNER} has 2 connections"), "--per-user"]);
    // The controls: others are served meanwhile, and so is this one when a place is free.
    ask_as(&socket, OWNER + 1, &request).succeeded();
    socket.ask(&[], &request).succeeded();
    staying[0].kill().unwrap();
    assert!(eventually(Duration::from_secs(10), || ask_as(&socket, OWNER, &request)["verdict"] == "exited"));
    for child in &mut staying {
        let _ended = child.kill();
        child.wait().unwrap();
    }
}

test!(RootOnly, a_scratch_is_opened_with_the_peers_rights);
fn a_scratch_is_opened_with_the_peers_rights() {
    let own = scratch();
    let other = directory().join("other");
    fs::create_dir(&other).unwrap();
    fs::set_permissions(&other, Permissions::from_mode(0o700)).unwrap();
    chown(&other, Some(OWNER + 1), Some(OWNER + 1)).unwrap();
    let roots = json!([own, other]).to_string();
    let grant = |uid: u32| format!("[[grant]]\nuid = {uid}\npolicies = [\"default\"]\nscratch = {roots}\n");
    let socket = SocketServer::granting(&format!("{}{}", grant(OWNER), grant(OWNER + 1)));
    let request = |path: &Path| json!({"code": "open('made', 'w').write('x')", "scratch": text(path)});
    ask_as(&socket, OWNER, &request(&own)).succeeded();
    assert_eq!(fs::metadata(own.join("made")).unwrap().uid(), OWNER);
    // Granted, and still not theirs to use.
    let done = ask_as(&socket, OWNER, &request(&other));
    assert_eq!((&done["verdict"], &done["started"]), (&json!("bad_request"), &json!(false)), "{}", done.brief());
    assert!(!other.join("made").exists());
    ask_as(&socket, OWNER + 1, &request(&other)).succeeded();
    assert_eq!(fs::metadata(other.join("made")).unwrap().uid(), OWNER + 1);
}

/// What `CapabilityBoundingSet=` of a unit leaves, for setpriv(1).
fn bounding_set(unit: &str) -> Vec<String> {
    let tests = std::env::var("CARGO_MANIFEST_DIR").map(PathBuf::from).unwrap_or_else(|_| PathBuf::from(env!("CARGO_MANIFEST_DIR")));
    let path = tests.join("../scripts/systemd").join(unit);
    let text = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let lines = text.lines().filter_map(|line| line.strip_prefix("CapabilityBoundingSet="));
    lines.flat_map(|line| line.split(' ')).map(|name| format!("+{}", name.strip_prefix("CAP_").unwrap().to_lowercase())).collect()
}

test!(RootOnly, the_capabilities_of_the_units_are_enough_for_them);
fn the_capabilities_of_the_units_are_enough_for_them() {
    let all = bounding_set("stockade-exec@.service");
    assert_eq!(all, bounding_set("stockade@.service"));
    let scratch = scratch();
    let request = json!({"code": "open('made', 'w').write('x')", "scratch": text(&scratch), "collect": ["made"]});
    let ask = |set: &[String]| {
        let set = format!("--bounding-set=-all,{}", set.join(","));
        let program = program_path().unwrap();
        ExecResult::of(run_with_stdin(
            &mut run_under(&["setpriv", &set, "--inh-caps=-all", "--", text(&program), "exec"]),
            request.to_string().as_bytes(),
        ))
    };
    let done = ask(&all);
    assert_eq!(done.succeeded()["receipt"]["degraded"], json!([]));
    assert_eq!(done.file("made")["text"], "x");
    // The controls: a set that lacks one of those that every run with a scratch needs.
    for (missing, reason, words) in [
        ("+sys_admin", "root_without_capabilities", "root without CAP_SYS_ADMIN"),
        ("+setuid", "root_without_capabilities", "root without CAP_SETUID"),
        ("+setgid", "root_without_capabilities", "root without CAP_SETGID"),
        ("+chown", "root_without_capabilities", "root without CAP_CHOWN"),
        ("+setfcap", "unique_uid_unavailable", "give the launcher CAP_SETFCAP"),
    ] {
        let without: Vec<String> = all.iter().filter(|name| *name != missing).cloned().collect();
        ask(&without).broke(reason, &[words]);
    }
}

/// Listens where it is told, tells what came, and answers as a server would.
const SQUATTER: &str = r#"
import os, socket, sys
s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); os.chmod(sys.argv[1], 0o666); s.listen(); print(flush=True)
while True:
    c, _ = s.accept()
    got = c.recv(1 << 16)
    open(sys.argv[2], 'a').write(repr(got) + '\n')
    if got: c.sendall(b'{"verdict": "exited", "code": 0, "output": "whatever it likes"}\n')
    c.close()
"#;

test!(RootOnly, nothing_is_sent_to_a_listener_that_is_neither_root_nor_the_caller);
fn nothing_is_sent_to_a_listener_that_is_neither_root_nor_the_caller() {
    let place = scratch();
    let (socket, got) = (place.join("default.sock"), place.join("got"));
    let words = as_uid(OWNER);
    let words: Vec<&str> = words.iter().map(String::as_str).chain(["python3", "-c", SQUATTER, text(&socket), text(&got)]).collect();
    let mut squatter = run_under(&words).spawn().unwrap();
    squatter.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
    let ask = |words: &[&str]| ExecResult::of(run_with_stdin(&mut client(&socket, words), br#"{"code": "a secret"}"#));
    let stranger = as_uid(OWNER + 1);
    ask(&stranger.each_ref().map(String::as_str)).broke("socket_untrusted", &[&format!("uid {OWNER} listens"), "nothing was sent"]);
    ask(&[]).broke("socket_untrusted", &[text(&socket)]);
    // The control: the same listener, asked by its own user.
    let own = as_uid(OWNER);
    ask(&own.each_ref().map(String::as_str)).expect(json!({"output": "whatever it likes"}));
    squatter.kill().unwrap();
    squatter.wait().unwrap();
    let got = fs::read_to_string(&got).unwrap();
    let got: Vec<&str> = got.lines().collect();
    assert!(got.len() == 3 && got[..2] == ["b''"; 2] && got[2].contains("a secret"), "{got:?}");
}

test!(RootOnly, a_server_without_roots_rights_serves_its_own_user_only);
fn a_server_without_roots_rights_serves_its_own_user_only() {
    let runtime = directory().join("runtime");
    fs::create_dir(&runtime).unwrap();
    chown(&runtime, Some(OWNER), Some(OWNER)).unwrap();
    let socket = SocketServer::open("default.sock", move || {
        let program = program_path().unwrap();
        let words = as_uid(OWNER);
        let words: Vec<&str> = words.iter().map(String::as_str).chain([program.to_str().unwrap(), "serve-one"]).collect();
        let mut command = run_under(&words);
        command.env("XDG_RUNTIME_DIR", &runtime).env("HOME", &runtime);
        command
    });
    let request = json!({"code": "print(1)"});
    let refused = ask_as(&socket, OWNER + 1, &request);
    refused.broke("peer_not_served", &[&format!("uid {OWNER}"), &format!("uid {}", OWNER + 1)]);
    assert_eq!(refused["audit"]["seq"], 2, "the refusal is in the log of the server's user");
    socket.ask(&[], &request).broke("peer_not_served", &["uid 0"]);
    ask_as(&socket, OWNER, &request).succeeded();
}
