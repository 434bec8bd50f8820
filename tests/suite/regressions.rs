//! Ways out that attacks on the program have found and that are closed now. Each stands
//! here as the promise that it broke.

use std::{
    ffi::OsStr,
    fs::{self, File, Permissions},
    io::{Read, Write},
    os::unix::{
        ffi::OsStrExt,
        fs::{MetadataExt, PermissionsExt},
        net::{UnixDatagram, UnixListener, UnixStream},
    },
    path::Path,
    process::Output,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use rustix::fs::{CWD, FileType, Mode, RenameFlags};
use serde_json::{Value, json};

use crate::support::{
    control::{Control, denied, denied_in},
    exec::{
        ExecResult, OWNER, chown_to_owner, exec, exec_with, program_path, run_under, run_with_stdin, scratch, scratch_named, stockade,
        text, token, write_file,
    },
    leftovers::no_process_is_left,
    policy_dir::{PolicyDirectory, command_with_etc, derived, with_etc},
    runner::{directory, eventually, is_root, test, wait_within},
    session::Session,
    timeouts::{scaled, scaled_limit},
    tracer::{Act, INIT, Point, trace},
};

/// `stockade` by root behind sudo, for a caller with these grants.
fn behind_sudo(grants: Option<&str>, arguments: &[&str]) -> Output {
    let files: Vec<(&str, &str)> = grants.map(|grants| ("stockade/grants.toml", grants)).into_iter().collect();
    let id = OWNER.to_string();
    with_etc(&files, &[("SUDO_UID", id.as_str()), ("SUDO_GID", id.as_str()), ("SUDO_USER", "agent")], arguments, "")
}

fn grant_of_default() -> String {
    format!("[[grant]]\nuid = {OWNER}\npolicies = [\"default\"]\n")
}

fn both_streams(output: &Output) -> String {
    [String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr)].concat()
}

test!(RootOnly, sudo_writes_no_report_where_its_caller_could_not);
fn sudo_writes_no_report_where_its_caller_could_not() {
    let place = PolicyDirectory::new();
    let (old, new, linked) = (place.0.join("old"), place.0.join("new"), directory().join("linked"));
    fs::write(&old, "untouched").unwrap();
    fs::set_permissions(&old, Permissions::from_mode(0o600)).unwrap();
    std::os::unix::fs::symlink(&old, &linked).unwrap();
    let granted = grant_of_default();
    for grants in [None, Some(granted.as_str())] {
        for path in [&old, &new, &linked] {
            let output = behind_sudo(grants, &["run", "--report", text(path), "--", "true"]);
            assert_eq!(output.status.code(), Some(125), "{}", both_streams(&output));
            assert_eq!(fs::read_to_string(&old).unwrap(), "untouched");
            assert!(!new.exists());
        }
    }
    // The controls: where the caller may write, and root for itself.
    let own = directory().join("own");
    fs::create_dir(&own).unwrap();
    chown_to_owner(&own);
    let report = own.join("report");
    let output = behind_sudo(Some(&granted), &["run", "--report", text(&report), "--", "true"]);
    assert_eq!(output.status.code(), Some(0), "{}", both_streams(&output));
    for path in [&old, &new] {
        let output = stockade(["run", "--report", text(path), "--", "true"]).output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{}", both_streams(&output));
    }
    for path in [&report, &old, &new] {
        let written: Value = serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap();
        assert_eq!(written["success"], true, "{}", path.display());
    }
}

test!(RootOnly, sudo_quotes_no_file_that_its_caller_could_not_read);
fn sudo_quotes_no_file_that_its_caller_could_not_read() {
    let place = PolicyDirectory::new();
    let secret = token("quoted");
    let path = place.write("secret", &format!("root:{secret}:19000:0:99999\n"));
    fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
    let granted = grant_of_default();
    for grants in [None, Some(granted.as_str())] {
        for arguments in [&["run", "--policy", &path, "--", "true"][..], &["run", "--dry-run", "--policy", &path, "--", "true"]] {
            let output = behind_sudo(grants, arguments);
            assert_eq!(output.status.code(), Some(125), "{}", both_streams(&output));
            assert!(!both_streams(&output).contains(&secret), "{}", both_streams(&output));
        }
    }
    // The control: the words for root itself do quote it.
    let output = stockade(["run", "--policy", &path, "--", "true"]).output().unwrap();
    assert!(output.status.code() == Some(125) && both_streams(&output).contains(&secret), "{}", both_streams(&output));
}

test!(RootOnly, what_is_mounted_inside_is_not_mounted_on_a_host_whose_mounts_are_shared);
/// As systemd has them: each new mount appears on all copies of what it is mounted on.
fn what_is_mounted_inside_is_not_mounted_on_a_host_whose_mounts_are_shared() {
    let scratch = scratch();
    let secret = token("shared");
    write_file(&scratch.join(".env"), &secret);
    let request = json!({"code": "import os; print(os.path.getsize('.env'))", "scratch": text(&scratch)}).to_string();
    let script = "set -e; cat /proc/self/mountinfo >before; \"$STOCKADE\" exec >result; cat /proc/self/mountinfo >after; cat \"$1/.env\"; mkdir a b; mount --bind a b; mount -t tmpfs none a; grep -c ' '\"$PWD/[ab]\"' ' /proc/self/mountinfo";
    let mut command = run_under(&["unshare", "--mount", "--propagation", "shared", "sh", "-c", script, "sh", text(&scratch)]);
    let output = run_with_stdin(&mut command, request.as_bytes());
    let read = |name: &str| fs::read_to_string(directory().join(name)).unwrap();
    // The control: there a mount is mounted on copies too, for a, for b and, by b, once more.
    assert_eq!(String::from_utf8_lossy(&output.stdout), format!("{secret}3\n"), "{output:?}");
    assert_eq!(read("before"), read("after"));
    let result: Value = serde_json::from_str(&read("result")).unwrap();
    assert_eq!((&result["verdict"], &result["output"]), (&json!("exited"), &json!("0\n")), "{result}");
}

test!(RootOnly, a_file_of_the_host_that_cannot_be_read_is_not_taken_for_missing);
/// Whose ids are whose is not guessed at: `/etc/subuid` may give away that of the run.
fn a_file_of_the_host_that_cannot_be_read_is_not_taken_for_missing() {
    let exec_after = |name: &str, act: &str| {
        let script = format!(
            "set -e; mount -t tmpfs -o mode=755 none \"$1\"; cp -a /etc/. \"$1\"; cd \"$1\"; {act}; cd /; mount --bind \"$1\" /etc; exec \"$STOCKADE\" exec"
        );
        let etc = directory().join(name);
        fs::create_dir(&etc).unwrap();
        let mut command = run_under(&["unshare", "--mount", "--propagation", "private", "sh", "-c", &script, "sh", text(&etc)]);
        ExecResult::of(run_with_stdin(&mut command, br#"{"code": "print(1)"}"#))
    };
    exec_after("circle", "rm -f subuid; ln -s subuid subuid").broke("host_unreadable", &["/etc/subuid", "symbolic links"]);
    // The controls: one that is not there gives nothing away, nor does the host's own.
    exec_after("missing", "rm -f subuid").succeeded();
    exec_after("own", "true").succeeded();
}

test!(Both, a_host_scratch_of_many_files_runs);
fn a_host_scratch_of_many_files_runs() {
    let scratch = scratch();
    for i in 0..16_000 {
        File::create(scratch.join(format!("f{i}"))).unwrap();
    }
    let done = exec(json!({"code": "import os; print(sum(name[0] == 'f' for name in os.listdir('.')))", "scratch": text(&scratch)}));
    done.succeeded().expect(json!({"output": "16000\n"}));
}

test!(Both, a_tree_too_deep_to_count_is_a_disk_limit, seconds 60);
fn a_tree_too_deep_to_count_is_a_disk_limit() {
    let ask = |name: &str, depth: u32| {
        let code = format!(
            "import os, time\nfor _ in range({depth}):\n    os.mkdir('d'); os.chdir('d')\nopen('f', 'wb').write(b'x' * (1 << 20))\ntime.sleep(3)"
        );
        exec(json!({"code": code, "scratch": text(&scratch_named(name)), "limits": {"wall": scaled_limit(20_000)}}))
    };
    uncounted(&ask("deep", 250));
    ask("flat", 50).succeeded();
}

/// Ended for what no larger limit lets through, and no limit is named.
#[track_caller]
fn uncounted(done: &ExecResult) {
    done.expect(json!({"verdict": "disk_limit", "code": 137, "success": false, "reason": "scratch_uncounted", "limits_hit": []}));
    let [denial] = done["denials"].as_array().unwrap().as_slice() else { panic!("{}", done["denials"]) };
    assert_eq!((&denial["answer"], &denial["allow"], &denial["limit"]), (&json!("ended"), &Value::Null, &Value::Null), "{denial}");
    assert!(denial["help"].as_str().unwrap().contains("keep u+rx"), "{denial}");
}

test!(RootlessOnly, a_directory_closed_to_the_count_is_a_disk_limit, seconds 60);
fn a_directory_closed_to_the_count_is_a_disk_limit() {
    let ask = |name: &str, mode: &str, size: &str| {
        let code = format!(
            "import os, time\nos.mkdir('d')\nfor i in range(40): open(f'd/f{{i}}', 'wb').write(b'x' * (1 << 20))\nos.chmod('d', {mode})\ntime.sleep(3)"
        );
        exec(json!({"code": code, "scratch": text(&scratch_named(name)), "limits": {"wall": scaled_limit(20_000), "scratch_size": size}}))
    };
    // However large the limit: what it holds cannot be known.
    for (name, size) in [("closed", "8MiB"), ("closed-large", "100MiB")] {
        let done = ask(name, "0", size);
        // It may have been counted, and too large, before it was closed.
        if size == "8MiB" && done["reason"].is_null() {
            done.expect(json!({"verdict": "disk_limit", "code": 137, "success": false}));
        } else {
            uncounted(&done);
        }
    }
    // The controls: it is the limit that ends an open one.
    let full = ask("open", "0o700", "8MiB");
    full.expect(json!({"verdict": "disk_limit", "code": 137, "success": false, "reason": null}));
    assert_eq!(full["denials"][0]["limit"]["key"], "scratch_size");
    ask("open-large", "0o700", "100MiB").succeeded();
}

test!(Both, code_that_closes_its_own_scratch_ends_neither_its_run_nor_the_next, seconds 60);
fn code_that_closes_its_own_scratch_ends_neither_its_run_nor_the_next() {
    let scratch = scratch();
    let set = |mode| fs::set_permissions(&scratch, Permissions::from_mode(mode)).unwrap();
    let mode = || fs::metadata(&scratch).unwrap().permissions().mode() & 0o7777;
    let ask = |code: &str| exec(json!({"code": code, "scratch": text(&scratch), "limits": {"wall": scaled_limit(20_000)}}));
    set(0o711);
    // At once, and over several counts.
    for rest in ["", "; time.sleep(0.5)"] {
        for closed in [0, 0o311, 0o555, 0o055] {
            let code = format!("import os, time\nopen('kept', 'w').write('k'); os.chmod('.', {closed}){rest}; print('through')");
            ask(&code).succeeded().expect(json!({"output": "through\n"}));
            // The owner has back what it had, and the rest is as the code left it.
            assert_eq!(mode(), 0o700 | closed, "after {closed:o}");
            assert_eq!(fs::read_dir(&scratch).unwrap().count(), 1, "the program's file was left");
            ask("print(open('kept').read())").succeeded().expect(json!({"output": "k\n"}));
        }
    }
    // Closed again and again, faster than it is counted: its own end, or that of what cannot be.
    let done = ask(
        "import os, time\nend = time.monotonic() + 1\nwhile time.monotonic() < end: os.chmod('.', 0); os.chmod('.', 0o700); os.chmod('.', 0)",
    );
    assert!(["exited", "disk_limit"].contains(&done["verdict"].as_str().unwrap()), "{}", done.brief());
    ask("").succeeded();
    // The controls: the code's word counts while it runs, nothing is given that was not
    // there before, and nothing where the code could take nothing.
    ask("import os; os.chmod('.', 0o555); print(oct(os.stat('.').st_mode & 0o777))").succeeded().expect(json!({"output": "0o555\n"}));
    set(0o500);
    let output = stockade(["run", "--scratch", text(&scratch), "--", "chmod", "0", "."]).output().unwrap();
    assert_eq!((output.status.code(), mode()), (Some(0), 0o500), "{}", both_streams(&output));
    set(0o700);
    let policies = PolicyDirectory::new();
    let policy = policies.write("read-only", &derived("[scratch]\naccess = \"ro\""));
    let output = stockade(["run", "--policy", &policy, "--scratch", text(&scratch), "--", "chmod", "0", "."]).output().unwrap();
    assert_eq!((output.status.code(), mode()), (Some(1), 0o700), "{}", both_streams(&output));
}

test!(Both, a_socket_of_the_host_in_scratch_cannot_be_reached);
fn a_socket_of_the_host_in_scratch_cannot_be_reached() {
    let scratch = scratch();
    fs::create_dir(scratch.join("below")).unwrap();
    for name in ["host.sock", "below/host.sock"] {
        let path = scratch.join(name);
        let listener = UnixListener::bind(&path).unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o666)).unwrap();
        chown_to_owner(&path);
        let act = format!("s = socket.socket(socket.AF_UNIX)\ns.connect({:?})", text(&path));
        denied_in(json!({"scratch": text(&scratch)}), &act, "EACCES", Control::Outside);
        UnixStream::connect(&path).unwrap();
        // The two controls connected, and nothing else.
        listener.set_nonblocking(true).unwrap();
        let mut came = 0;
        while listener.accept().is_ok() {
            came += 1;
        }
        assert_eq!(came, 2);
    }
}

test!(Both, without_unix_no_pair_of_datagrams_reaches_a_socket_of_the_host);
fn without_unix_no_pair_of_datagrams_reaches_a_socket_of_the_host() {
    let shown = directory().join("shown");
    fs::create_dir(&shown).unwrap();
    let path = shown.join("log");
    let socket = UnixDatagram::bind(&path).unwrap();
    fs::set_permissions(&path, Permissions::from_mode(0o666)).unwrap();
    socket.set_nonblocking(true).unwrap();
    let policies = PolicyDirectory::new();
    let ran = |families: &str| {
        let lines = format!("[filesystem]\nread_only = {{ add = [{:?}] }}\n[seccomp]\n{families}", text(&shown));
        let policy = policies.write("shown", &derived(&lines));
        let code = format!(
            "import socket\nfor kind in socket.SOCK_STREAM, socket.SOCK_SEQPACKET, socket.SOCK_DGRAM, socket.SOCK_RAW:\n  try: pair = socket.socketpair(type=kind); pair[0].sendto(b'x', {:?}); print('sent')\n  except OSError as error: print(error.errno)",
            text(&path)
        );
        exec_with(&["--policy", &policy], json!({"code": code})).output().to_owned()
    };
    // EISCONN: a stream, and a sequence of packets (which leaves the address alone), stay with their peer.
    let without = ran("socket_families = { remove = [\"unix\"] }");
    assert_eq!(without, "106\nsent\n1\n1\n");
    assert!(socket.recv(&mut [0; 8]).is_err());
    // The control.
    assert_eq!(ran(""), "106\nsent\nsent\nsent\n");
    assert_eq!(socket.recv(&mut [0; 8]).unwrap(), 1);
}

test!(RootlessOnly, the_registrys_directory_is_no_scratch);
fn the_registrys_directory_is_no_scratch() {
    let home = directory().join("home");
    let ask = |path: &Path| exec(json!({"code": "", "scratch": text(path)}));
    let (registry, other) = (home.join("stockade"), home.join("other"));
    let below = registry.join("below");
    // A run that keeps records has made it already.
    for path in [&below, &other] {
        fs::create_dir_all(path).unwrap();
    }
    for path in [&registry, &below] {
        ask(path).refused("scratch_holds_registry", &["records"]);
    }
    // The control: a directory beside it.
    ask(&other).succeeded();
}

test!(Both, what_lies_deeper_in_a_scratch_keeps_the_name_that_the_policy_goes_by);
fn what_lies_deeper_in_a_scratch_keeps_the_name_that_the_policy_goes_by() {
    let policies = PolicyDirectory::new();
    let policy =
        policies.write("deep", &derived("[scratch]\nhidden = { add = [\"conf/*.key\"] }\nread_only = { add = [\"lib/hooks/*\"] }"));
    let scratch = scratch();
    for (directory, file) in [("conf", "a.key"), ("lib/hooks", "hook"), ("free/below", "file")] {
        fs::create_dir_all(scratch.join(directory)).unwrap();
        fs::write(scratch.join(directory).join(file), "HOSTS").unwrap();
    }
    for path in ["conf", "conf/a.key", "lib", "lib/hooks", "lib/hooks/hook", "free", "free/below", "free/below/file"] {
        chown_to_owner(&scratch.join(path));
    }
    let code = "import os\nfor a in ('conf', 'lib', 'lib/hooks', 'free'):\n try: os.rename(a, a.replace('/', '_') + '2'); print(a, 'renamed')\n except OSError as e: print(a, e.strerror)\nopen('conf/new', 'w').write('x'); open('lib/new', 'w').write('x')\nprint(open('conf/a.key').read())";
    let done = exec_with(&["--policy", &policy], json!({"code": code, "scratch": text(&scratch), "collect": ["**/*"]}));
    done.expect(
        json!({"output": "conf Device or resource busy\nlib Device or resource busy\nlib/hooks Invalid cross-device link\nfree renamed\n"}),
    );
    let collected: Vec<&str> = done["files"].as_array().unwrap().iter().map(|file| file["path"].as_str().unwrap()).collect();
    assert!(collected.contains(&"free2/below/file") && !collected.iter().any(|path| path.ends_with("a.key")), "{collected:?}");
    assert_eq!(fs::read_to_string(scratch.join("lib/hooks/hook")).unwrap(), "HOSTS");
}

test!(Both, what_lies_above_anything_kept_from_code_keeps_its_name);
/// Otherwise one run could move it past the walk of another that starts meanwhile.
fn what_lies_above_anything_kept_from_code_keeps_its_name() {
    let scratch = scratch();
    for place in ["program", "socket", "fifo", "free"] {
        let below = scratch.join(place).join("sub");
        fs::create_dir_all(&below).unwrap();
        write_file(&below.join("file"), "x");
        for path in [&scratch.join(place), &below] {
            chown_to_owner(path);
        }
    }
    fs::set_permissions(scratch.join("program/sub/file"), Permissions::from_mode(0o4755)).unwrap();
    let _listener = UnixListener::bind(scratch.join("socket/sub/socket")).unwrap();
    rustix::fs::mknodat(CWD, scratch.join("fifo/sub/fifo"), FileType::Fifo, Mode::RWXU, 0).unwrap();
    let code = "import os\nfor a in ('program', 'socket', 'fifo', 'free'):\n for path in (a + '/sub', a):\n  try: os.rename(path, path + '2'); print(path)\n  except OSError as e: print(path, e.errno)";
    // The control is the one that holds nothing of the kind.
    exec(json!({"code": code, "scratch": text(&scratch)})).expect(json!({
        "output": "program/sub 16\nprogram 16\nsocket/sub 16\nsocket 16\nfifo/sub 16\nfifo 16\nfree/sub\nfree\n"
    }));
}

test!(RootOnly, what_lies_beneath_a_mount_in_a_scratch_is_kept_from_the_code);
/// The run gets a copy of the one mount, where the code would see what the other covers.
fn what_lies_beneath_a_mount_in_a_scratch_is_kept_from_the_code() {
    let scratch = scratch();
    for name in ["below", "free", "../empty", "../full"] {
        fs::create_dir(scratch.join(name)).unwrap();
        chown_to_owner(&scratch.join(name));
    }
    for name in ["below/set-id", "free/file", "../full/set-id", "file", "../other"] {
        write_file(&scratch.join(name), "contents");
        if name.ends_with("set-id") {
            fs::set_permissions(scratch.join(name), Permissions::from_mode(0o4755)).unwrap();
        }
    }
    let code = "for name in ('below/set-id', 'free/file', 'file'):\n try: print(open(name).read())\n except OSError as e: print(e.errno)";
    let request = json!({"code": code, "scratch": text(&scratch)}).to_string();
    let script = "set -e; cd \"$1\"; [ -z \"$2\" ] || mount --bind \"$2\" \"$3\"; exec \"$STOCKADE\" exec";
    for (over, under, output) in [
        // The control: without a mount.
        ("", "", "contents\ncontents\ncontents\n"),
        ("../empty", "below", "13\ncontents\ncontents\n"),
        ("../full", "below", "13\ncontents\ncontents\n"),
        ("../other", "file", "contents\ncontents\n13\n"),
    ] {
        let mut command = run_under(&["unshare", "--mount", "sh", "-c", script, "sh", text(&scratch), over, under]);
        let done = ExecResult::of(run_with_stdin(&mut command, request.as_bytes()));
        assert_eq!(done.output(), output, "{over} over {under}: {}", done.brief());
    }
}

test!(RootOnly, a_bind_mount_makes_no_scratch_of_what_the_host_trusts, seconds 60);
fn a_bind_mount_makes_no_scratch_of_what_the_host_trusts() {
    let place = directory().join("bound");
    fs::create_dir(&place).unwrap();
    let home = directory().join("stock");
    fs::create_dir_all(home.join("work")).unwrap();
    let program = home.join("stockade");
    fs::copy(program_path().unwrap(), &program).unwrap();
    let script = "set -e; mount --bind \"$1\" \"$2\"; shift 2; exec \"$@\" exec";
    let run = |source: &Path, below: &str, words: &[&str]| {
        let scratch = place.join(below);
        let scratch = if below.is_empty() { &place } else { &scratch };
        let mut command =
            run_under(&[&["unshare", "--mount", "sh", "-c", script, "sh", text(source), text(&place)], words, &[text(&program)]].concat());
        ExecResult::of(run_with_stdin(&mut command, json!({"code": "", "scratch": text(scratch)}).to_string().as_bytes()))
    };
    for (source, below, reason) in [
        ("/etc", "", "scratch_in_system_directory"),
        ("/etc", "ssl", "scratch_in_system_directory"),
        ("/etc/ssl", "", "scratch_in_system_directory"),
        ("/usr", "lib", "scratch_in_system_directory"),
        ("/", "usr/bin", "scratch_in_system_directory"),
        ("/run", "", "scratch_holds_registry"),
        ("/", "", "scratch_is_home"),
        ("/root", "", "scratch_is_home"),
    ] {
        if Path::new(source).join(below).is_dir() {
            run(Path::new(source), below, &[]).refused(reason, &[]);
        }
    }
    // The running program, also for an ordinary user; and a control beside it.
    let own = OWNER.to_string();
    let as_user =
        ["setpriv", "--reuid", &own, "--regid", &own, "--clear-groups", "--inh-caps=-all", "env", "-u", "XDG_RUNTIME_DIR", "HOME=/"];
    run(&home, "", &[]).refused("scratch_holds_the_launcher", &[text(&place)]);
    run(&home, "work", &[]).succeeded();
    for path in [&home, &home.join("work")] {
        chown_to_owner(path);
    }
    run(&home, "", &as_user).refused("scratch_holds_the_launcher", &[text(&place)]);
    run(&home, "work", &as_user).succeeded();
}

test!(serial Both, only_the_programs_own_file_is_removed_under_a_name_of_the_request, seconds 90);
/// Serial: a start of another test would be the next one, and remove what this looks for.
fn only_the_programs_own_file_is_removed_under_a_name_of_the_request() {
    let scratch = scratch();
    let program = scratch.join("app.py");
    let request = |code: &str| json!({"code": code, "scratch": text(&scratch), "filename": "app.py"}).to_string();
    let waits = request("import time; open('began', 'w').close(); time.sleep(600 if not __import__('os').path.exists('short') else 4)");
    let begin = || {
        let mut child = stockade(["exec"]).stdin(std::process::Stdio::piped()).stdout(std::process::Stdio::piped()).spawn().unwrap();
        child.stdin.take().unwrap().write_all(waits.as_bytes()).unwrap();
        assert!(eventually(Duration::from_secs(20), || scratch.join("began").exists()));
        fs::remove_file(scratch.join("began")).unwrap();
        child
    };
    // A launcher that is killed removes nothing; the next start does.
    let mut child = begin();
    kill(Pid::from_raw(child.id().cast_signed()), Signal::SIGKILL).unwrap();
    child.wait().unwrap();
    assert!(program.exists());
    exec(json!({"code": "", "scratch": text(&scratch)})).succeeded();
    assert!(eventually(Duration::from_secs(20), || !program.exists()));
    exec(json!({"code": "", "scratch": text(&scratch), "filename": "app.py"})).succeeded();
    // What the host has put in its place, during the run or after the launcher's death, stays.
    write_file(&scratch.join("short"), "");
    for killed in [false, true] {
        let mut child = begin();
        write_file(&scratch.join("new"), "the host's");
        fs::rename(scratch.join("new"), &program).unwrap();
        if killed {
            kill(Pid::from_raw(child.id().cast_signed()), Signal::SIGKILL).unwrap();
        }
        child.wait().unwrap();
        exec(json!({"code": "", "scratch": text(&scratch)})).succeeded();
        assert_eq!(fs::read_to_string(&program).unwrap(), "the host's");
        fs::remove_file(&program).unwrap();
    }
}

test!(Both, no_link_on_the_way_to_a_protected_path_is_followed, seconds 90);
fn no_link_on_the_way_to_a_protected_path_is_followed() {
    const RUNS: usize = 30;
    let policies = PolicyDirectory::new();
    let policy = policies.write("deep", &derived("[scratch]\nread_only = { add = [\"lib/*\"] }"));
    let (scratch, secrets) = (scratch(), directory().join("secrets"));
    for (directory, contents) in [(scratch.join("lib"), "decoy"), (secrets.clone(), "TOPKEY")] {
        fs::create_dir_all(&directory).unwrap();
        fs::write(directory.join("id"), contents).unwrap();
    }
    chown_to_owner(&scratch.join("lib"));
    chown_to_owner(&scratch.join("lib/id"));
    std::os::unix::fs::symlink(&secrets, scratch.join("way")).unwrap();
    let over = std::sync::atomic::AtomicBool::new(false);
    thread::scope(|scope| {
        // As the code of another run in the same scratch could.
        scope.spawn(|| {
            let (one, other) = (scratch.join("lib"), scratch.join("way"));
            while !over.load(std::sync::atomic::Ordering::Relaxed) {
                nix::fcntl::renameat2(nix::fcntl::AT_FDCWD, &one, nix::fcntl::AT_FDCWD, &other, nix::fcntl::RenameFlags::RENAME_EXCHANGE)
                    .unwrap();
            }
        });
        let code = "for i in range(30):\n for p in ('lib/id', 'way/id'):\n  try: print(open(p).read())\n  except OSError: pass";
        let mut ran = 0;
        for _ in 0..RUNS {
            let done = exec_with(&["--policy", &policy], json!({"code": code, "scratch": text(&scratch)}));
            let output = done["output"].as_str().unwrap();
            assert!(!output.contains("TOPKEY"), "{}", done.result);
            ran += usize::from(output.contains("decoy"));
        }
        over.store(true, std::sync::atomic::Ordering::Relaxed);
        // The control: some of them ran, and saw what lies there.
        assert!(ran > 0);
    });
}

test!(Both, a_request_sheds_no_rule_by_naming_a_directory_below);
fn a_request_sheds_no_rule_by_naming_a_directory_below() {
    let policies = PolicyDirectory::new();
    let rules = "[scratch]\nhidden = { add = [\"config/*.key\", \"secrets\"] }\nread_only = { add = [\"config/*.ini\", \"fixed\"] }";
    let policy = policies.write("keeps", &derived(rules));
    let (top, secret) = (scratch(), token("below"));
    for directory in ["config", "secrets", "secrets/deeper", "fixed", "other"] {
        fs::create_dir(top.join(directory)).unwrap();
        chown_to_owner(&top.join(directory));
    }
    for (name, contents) in [("config/a.key", secret.as_str()), ("config/c.ini", "old"), ("config/plain", "old"), ("secrets/pw", &secret)] {
        write_file(&top.join(name), contents);
    }
    let code = "import os\nfor name in ('a.key', 'plain'):\n try: print(open(name).read())\n except OSError as e: print(e.errno)\nfor name in ('c.ini', 'plain'): print(os.access(name, os.W_OK))";
    let ask = |ceiling: &Path, path: &Path| {
        exec_with(&["--policy", &policy, "--scratch", text(ceiling)], json!({"code": code, "scratch": text(path)}))
    };
    ask(&top, &top.join("config")).succeeded().expect(json!({"output": "13\nold\nFalse\nTrue\n"}));
    for directory in ["secrets", "secrets/deeper", "fixed"] {
        ask(&top, &top.join(directory)).refused("scratch_protected", &[directory.split('/').next().unwrap(), "--scratch"]);
    }
    // The controls: a directory that no rule names, and one that --scratch itself names.
    ask(&top, &top.join("other")).succeeded();
    let config = top.join("config");
    ask(&config, &config).succeeded().expect(json!({"output": format!("{secret}\nold\nTrue\nTrue\n")}));
}

/// A request's result, where something is done before the first path of its scratch is covered. What
/// is to be covered has been decided by then.
fn run_while_covering(policy: &str, request: &Value, act: &dyn Fn()) -> Value {
    let [stdin, out, err] = ["request", "out", "err"].map(|name| directory().join(name));
    write_file(&stdin, request.to_string());
    let open = |path| fs::File::create(path).unwrap();
    let streams = [fs::File::open(&stdin).unwrap(), open(&out), open(&err)];
    // The sandbox's first process opens no path before.
    let first = Point { process: String::from(INIT), ordinal: 0, call: nix::libc::SYS_openat2.cast_unsigned() };
    let traced = trace(&["exec", "--policy", policy], streams, Some((&first, Act::After(act))));
    assert!(traced.acted.is_some(), "nothing is covered");
    serde_json::from_slice(&fs::read(&out).unwrap()).unwrap()
}

test!(Both, what_changes_its_name_before_it_is_covered_stops_the_run, seconds 60);
fn what_changes_its_name_before_it_is_covered_stops_the_run() {
    let policies = PolicyDirectory::new();
    let policy = policies.write("keeps", &derived("[scratch]\nhidden = { add = [\"d/.env\"] }\nread_only = { add = [\"kept\"] }"));
    let (scratch, secret) = (scratch(), token("changes"));
    for directory in ["d", "e"] {
        fs::create_dir(scratch.join(directory)).unwrap();
        chown_to_owner(&scratch.join(directory));
    }
    for (name, contents) in [(".env", secret.as_str()), ("d/.env", &secret), ("plain", "plain"), ("e/.env", "plain"), ("kept", "k")] {
        write_file(&scratch.join(name), contents);
    }
    let code = "import os\nfor name in ('.env', 'plain', 'd/.env', 'e/.env'):\n try: print(open(name).read())\n except OSError as e: print(e.errno)\nfor name in ('kept', 'plain'): print(os.access(name, os.W_OK))";
    let request = json!({"code": code, "scratch": text(&scratch)});
    let exchange = |one: &str, other: &str| {
        let (one, other) = (scratch.join(one), scratch.join(other));
        let at = nix::fcntl::AT_FDCWD;
        nix::fcntl::renameat2(at, &one, at, &other, nix::fcntl::RenameFlags::RENAME_EXCHANGE).unwrap();
    };
    let run = |act: &dyn Fn()| run_while_covering(&policy, &request, act);
    for (one, other) in [(".env", "plain"), ("d", "e"), ("kept", "plain"), (".env", "kept")] {
        // A control: with all in its place, it runs.
        let result = run(&|| ());
        assert_eq!(result["output"], "13\nplain\n13\nplain\nFalse\nTrue\n", "{result}");
        let result = run(&|| exchange(one, other));
        exchange(one, other);
        let of_it = (&result["verdict"], &result["started"], &result["output"]);
        assert_eq!(of_it, (&json!("sandbox_error"), &json!(false), &json!("")), "{one} and {other}: {result}");
        let why = result["error"].as_str().unwrap();
        assert!(why.contains("ESTALE") && why.contains("nobody changes names"), "{why}");
    }
}

test!(Both, what_is_moved_into_scratch_while_a_run_starts_stops_the_run, seconds 60);
fn what_is_moved_into_scratch_while_a_run_starts_stops_the_run() {
    let policies = PolicyDirectory::new();
    let policy = policies.write("keeps", &derived("[scratch]\nhidden = { replace = [\"**/.env*\"] }"));
    let (scratch, secret) = (scratch(), token("moved"));
    let beside = crate::support::exec::scratch_named("beside");
    write_file(&scratch.join(".env"), "covered");
    let code = "import os\nfound = sorted(f'{at}/{name}' for at, _, names in os.walk('.') for name in names if name.startswith('.env'))\nfor path in found:\n try: print(open(path).read())\n except OSError as e: print(e.errno)";
    let request = json!({"code": code, "scratch": text(&scratch)});
    let run = |act: &dyn Fn()| run_while_covering(&policy, &request, act);
    let moved = |name: &str| {
        let from = beside.join(name);
        fs::create_dir(&from).unwrap();
        write_file(&from.join(".env.old"), &secret);
        // Files have the time of the last tick: it is to be older than the run.
        thread::sleep(Duration::from_millis(50));
        let result = run(&|| fs::rename(&from, scratch.join(name)).unwrap());
        fs::remove_dir_all(scratch.join(name)).unwrap();
        result
    };
    let result = moved("d");
    assert_eq!((&result["verdict"], &result["started"]), (&json!("sandbox_error"), &json!(false)), "{result}");
    let why = result["error"].as_str().unwrap();
    assert!(why.contains("ESTALE") && why.contains("d/.env.old") && why.contains("nobody changes names"), "{why}");
    // The controls: nothing is moved; what is made while a run starts is seen, as what is made later.
    assert_eq!(run(&|| ())["output"], "13\n");
    let result = run(&|| write_file(&scratch.join(".env.new"), "new"));
    assert_eq!(result["output"], "13\nnew\n", "{result}");
    fs::remove_file(scratch.join(".env.new")).unwrap();
    // A large scratch is not looked through twice.
    for number in 0..1100 {
        write_file(&scratch.join(number.to_string()), "");
    }
    assert_eq!(moved("e")["output"], format!("13\n{secret}\n"));
}

test!(Both, a_name_that_is_no_text_is_kept_from_the_code_like_any_other);
fn a_name_that_is_no_text_is_kept_from_the_code_like_any_other() {
    let (scratch, secret) = (scratch(), token("latin"));
    let policies = PolicyDirectory::new();
    let policy = policies.write("deep", &derived("[scratch]\nhidden = { replace = [\"**/.env*\"] }"));
    let ask = |options: &[&str], code: &str| exec_with(options, json!({"code": code, "scratch": text(&scratch), "collect": ["own*"]}));
    let read = |path: &str| format!("try: print(open(b'{path}').read())\nexcept OSError as e: print(e.strerror)");
    let made = ask(&[], "open(b'.env\\xff', 'w').write('own'); open(b'own\\xff', 'w').write('text')");
    assert_eq!(made.succeeded().file("own\u{fffd}")["text"], "text");
    // What code has left keeps no later run from its start.
    ask(&[], &read(".env\\xff")).succeeded().expect(json!({"output": "Permission denied\n"}));
    // By text, the two directories would have one name.
    for (directory, contents) in [("caf\u{fffd}".as_bytes(), "decoy"), (b"caf\xe9", &secret)] {
        let directory = scratch.join(OsStr::from_bytes(directory));
        fs::create_dir(&directory).unwrap();
        chown_to_owner(&directory);
        write_file(&directory.join(".env"), contents);
    }
    ask(&["--policy", &policy], &read("caf\\xe9/.env")).succeeded().expect(json!({"output": "Permission denied\n"}));
    // The control: `default` hides the top level only.
    ask(&[], &read("caf\\xe9/.env")).succeeded().expect(json!({"output": format!("{secret}\n")}));
}

test!(Both, a_scratch_that_holds_more_to_keep_from_code_than_can_be_says_so);
fn a_scratch_that_holds_more_to_keep_from_code_than_can_be_says_so() {
    const MAX_COVERED_PATHS: usize = 4096;
    let scratch = scratch();
    let code = "try: open('.env1')\nexcept OSError as e: print(e.strerror)";
    let ask = |options: &[&str]| exec_with(options, json!({"code": code, "scratch": text(&scratch)}));
    (0..MAX_COVERED_PATHS).for_each(|number| write_file(&scratch.join(format!(".env{number}")), ""));
    ask(&[]).succeeded().expect(json!({"output": "Permission denied\n"}));
    write_file(&scratch.join(".env"), "");
    ask(&[]).refused("scratch_protects_too_much", &["4096", text(&scratch), ".env", "hidden", "`default`", "another scratch"]);
    // The control: where they need not be kept from it, their number is no matter.
    let policies = PolicyDirectory::new();
    let policy = policies.write("open", &derived("[scratch]\nhidden = { replace = [] }"));
    ask(&["--policy", &policy]).succeeded().expect(json!({"output": ""}));
}

test!(RootOnly, no_file_is_collected_that_the_code_could_not_read);
fn no_file_is_collected_that_the_code_could_not_read() {
    let scratch = scratch();
    for (name, mode) in [("roots", 0o600), ("everybodys", 0o644)] {
        let path = scratch.join(name);
        fs::write(&path, "contents").unwrap();
        fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
    }
    let code = "open('own', 'w').write('contents'); import os; os.chmod('own', 0o600)";
    let done = exec(json!({"code": code, "scratch": text(&scratch), "collect": ["*"]}));
    let read = |name: &str| {
        let files = done["files"].as_array().unwrap();
        files.iter().find(|file| file["path"] == name).map(|file| file["text"].clone()).unwrap_or_default()
    };
    assert_eq!((read("roots"), read("everybodys"), read("own")), (Value::Null, json!("contents"), json!("contents")), "{}", done.result);
}

test!(RootOnly, nothing_is_read_or_written_for_root_in_its_scratch_that_code_could_not);
fn nothing_is_read_or_written_for_root_in_its_scratch_that_code_could_not() {
    let path = directory().join("of-root");
    fs::create_dir_all(path.join("pd")).unwrap();
    for (name, mode) in [("priv", 0o600), ("pd/x", 0o600), ("pd", 0o700), ("own", 0o600)] {
        let path = path.join(name);
        if name != "pd" {
            fs::write(&path, "contents").unwrap();
        }
        fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
        if name != "own" {
            chown_to_owner(&path);
        }
    }
    let code = "for name in ('priv', 'pd/x', 'own'):\n try: print(open(name).read())\n except OSError as e: print(e.errno)";
    let done = exec(json!({"code": code, "scratch": text(&path), "collect": ["priv", "pd/*", "own"]}));
    // The control is the file of root's own, mode 0600.
    assert_eq!(done.output(), "13\n13\ncontents\n", "{}", done.brief());
    let read: Vec<&str> = done["files"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|file| file["text"] == "contents")
        .filter_map(|file| file["path"].as_str())
        .collect();
    assert_eq!(read, ["own"], "{}", done["files"]);
    let mut session = Session::open(&["--scratch", text(&path)]);
    for name in ["priv", "pd/x"] {
        session.refused(json!({"op": "read", "path": name}), "permission_denied");
    }
    for name in ["priv", "pd/x", "pd/new"] {
        session.refused(json!({"op": "write", "path": name, "contents": "other"}), "permission_denied");
    }
    session.refused(json!({"op": "list", "path": "pd"}), "permission_denied");
    session.write("own", json!("written"));
    session.write("new/below", json!("written"));
    assert_eq!(session.ask(json!({"op": "read", "path": "own"}))["text"], "written");
    session.close();
    assert_eq!(fs::read_to_string(path.join("priv")).unwrap(), "contents");
    assert!(!path.join("pd/new").exists() && path.join("new/below").exists());
}

test!(Both, code_does_not_choose_what_its_environment_has_shown);
fn code_does_not_choose_what_its_environment_has_shown() {
    let (scratch, secrets, other) = (scratch(), directory().join("secrets"), scratch_named("other"));
    fs::create_dir_all(secrets.join("bin")).unwrap();
    fs::write(secrets.join("id"), "TOPKEY").unwrap();
    fs::write(secrets.join("bin/key"), "TOPKEY").unwrap();
    let environment = scratch.join("venv");
    fs::create_dir_all(environment.join("bin")).unwrap();
    let program = environment.join("bin/python");
    std::os::unix::fs::symlink("/usr/bin/python3", &program).unwrap();
    let option = format!("python={}", text(&program));
    let code = format!("print(6*7)\ntry: print(open({:?}).read())\nexcept OSError as e: print(e.strerror)", text(&secrets.join("id")));
    let run = |scratch: Option<&Path>| exec_with(&["--runtime", &option], json!({"code": code, "scratch": scratch.map(text)}));
    let ask = |home: &str, scratch: Option<&Path>| {
        fs::write(environment.join("pyvenv.cfg"), format!("home = {home}\n")).unwrap();
        run(scratch)
    };
    ask("/usr/bin", Some(&scratch)).succeeded().expect(json!({"output": "42\nNo such file or directory\n"}));
    let crooked = format!("{}/../secrets/bin", text(&scratch));
    // Whatever the scratch is this time: an earlier run may have had another.
    for place in [Some(&*scratch), Some(&*other), None] {
        for home in [text(&secrets.join("bin")), &crooked, "secrets/bin"] {
            ask(home, place).refused("interpreter_led_astray", &[text(&program), "pyvenv.cfg", home.trim_end_matches("/bin"), "read_only"]);
        }
    }
    // Nor by a link.
    fs::write(environment.join("pyvenv.cfg"), "home = /usr/bin\n").unwrap();
    fs::remove_file(&program).unwrap();
    std::os::unix::fs::symlink(secrets.join("bin/key"), &program).unwrap();
    run(None).refused("interpreter_led_astray", &[text(&program), "link", text(&secrets), "read_only"]);
    fs::rename(&environment, scratch.join("real")).unwrap();
    fs::rename(secrets.join("bin/key"), secrets.join("bin/python")).unwrap();
    std::os::unix::fs::symlink(&secrets, &environment).unwrap();
    run(None).refused("interpreter_led_astray", &[text(&environment), "link"]);
    // The control: the same directory, once it is an interpreter's own.
    fs::remove_file(&environment).unwrap();
    fs::rename(scratch.join("real"), &environment).unwrap();
    fs::remove_file(&program).unwrap();
    std::os::unix::fs::symlink("/usr/bin/python3", &program).unwrap();
    fs::create_dir_all(secrets.join("lib/python3.99")).unwrap();
    fs::write(secrets.join("lib/python3.99/os.py"), "").unwrap();
    let home = secrets.join("bin");
    for place in [Some(&*other), None] {
        ask(text(&home), place).succeeded().expect(json!({"output": "42\nTOPKEY\n"}));
    }
    // Not where what is hidden lies beside it, nor from out of this run's own scratch.
    fs::write(secrets.join(".netrc"), "").unwrap();
    ask(text(&home), None).refused("interpreter_led_astray", &[text(&secrets)]);
    fs::remove_file(secrets.join(".netrc")).unwrap();
    ask(text(&home), Some(&scratch)).refused("scratch_holds_the_environment", &[text(&secrets), "read_only"]);
    std::os::unix::fs::symlink(&secrets, scratch.join("way")).unwrap();
    ask(text(&scratch.join("way/bin")), Some(&scratch)).refused("scratch_holds_the_environment", &["way", "read_only"]);
}

test!(Both, an_environment_in_the_scratch_stays_as_it_is, seconds 60);
/// The host starts `venv/bin/pip`, and each start of the interpreter reads `evil.pth`.
fn an_environment_in_the_scratch_stays_as_it_is() {
    let (place, policies) = (scratch(), PolicyDirectory::new());
    let project = place.join("a/project");
    let environment = project.join("venv");
    fs::create_dir_all(environment.join("bin")).unwrap();
    fs::create_dir_all(environment.join("lib/python3/site-packages")).unwrap();
    std::os::unix::fs::symlink("/usr/bin/python3", environment.join("bin/python3")).unwrap();
    for (name, text) in [("bin/pip", "the user's"), ("pyvenv.cfg", "home = /usr/bin\n")] {
        write_file(&environment.join(name), text);
    }
    let made = ["a", "a/project", "a/project/venv", "a/project/venv/bin", "a/project/venv/bin/pip", "a/project/venv/pyvenv.cfg"];
    for path in made.into_iter().chain(["a/project/venv/lib", "a/project/venv/lib/python3", "a/project/venv/lib/python3/site-packages"]) {
        chown_to_owner(&place.join(path));
    }
    let code = r#"
import os, shutil, sys
def tried(what, act, *words):
    try: act(*words); print(what, 'done')
    except OSError as e: print(what, e.strerror)
tried('open', open, 'a/project/venv/bin/pip', 'a')
tried('make', open, 'a/project/venv/lib/python3/site-packages/evil.pth', 'w')
tried('replace', os.rename, 'own', 'a/project/venv/bin/pip')
tried('remove', os.unlink, 'a/project/venv/pyvenv.cfg')
tried('chmod', os.chmod, 'a/project/venv/bin', 0o777)
tried('link', os.link, 'a/project/venv/bin/pip', 'linked')
for path in ('a/project/venv', 'a/project', 'a'):
    tried('move ' + path, os.rename, path, path + '-moved')
tried('beside', open, 'a/project/beside', 'w')
"#;
    let attempt = |options: &[&str]| {
        write_file(&place.join("own"), "the code's");
        chown_to_owner(&place.join("own"));
        let _none = fs::remove_file(project.join("beside"));
        let done = exec_with(options, json!({"code": code, "scratch": text(&place)}));
        done.succeeded();
        done["output"].as_str().unwrap().to_owned()
    };
    let program = environment.join("bin/python3");
    let option = format!("python={}", text(&program));
    let of_policy = policies.write("of-policy", &derived(&format!("[runtimes.python]\nvenv = {environment:?}")));
    let busy = "move a/project/venv Device or resource busy\nmove a/project Device or resource busy\nmove a Device or resource busy\n";
    let read_only = ["open", "make"].map(|what| format!("{what} Read-only file system\n")).concat();
    let kept = format!(
        "{read_only}replace Invalid cross-device link\nremove Read-only file system\nchmod Read-only file system\nlink Invalid cross-device link\n{busy}beside done\n"
    );
    // The second is for another language: that policy's environment is in the scratch all the same.
    let shell = policies.write("shell-first", &derived(&format!("language = \"bash\"\n[runtimes.python]\nvenv = {environment:?}")));
    for options in [&["--runtime", &option][..], &["--policy", &of_policy]] {
        assert_eq!(attempt(options), kept, "{options:?}");
    }
    let overwrite = json!({"code": "echo evil >> a/project/venv/bin/pip", "scratch": text(&place)});
    exec_with(&["--policy", &shell], overwrite).expect(json!({"verdict": "exited", "code": 1}));
    assert_eq!(fs::read_to_string(environment.join("bin/pip")).unwrap(), "the user's");
    // Nor where the environment is, or holds, the scratch.
    for inside in [&environment, &environment.join("lib")] {
        let refused = exec_with(&["--runtime", &option], json!({"code": "", "scratch": text(inside)}));
        refused.refused("scratch_shown_read_only", &[text(&environment), "read-only"]);
    }
    // Nor by a link that code could replace.
    std::os::unix::fs::symlink("/usr/bin/python3", place.join("python3")).unwrap();
    let linked = format!("python={}", text(&place.join("python3")));
    exec_with(&["--runtime", &linked], json!({"code": "", "scratch": text(&place)}))
        .refused("scratch_holds_the_environment", &["python3", "link"]);
    // The control: under a policy that does not name it, it is a directory of the scratch.
    assert!(attempt(&[]).starts_with("open done\nmake done\nreplace done\nremove done\n"));
}

test!(Both, code_does_not_choose_what_a_policy_shows_by_a_link);
/// A policy shows what lies below another run's scratch.
fn code_does_not_choose_what_a_policy_shows_by_a_link() {
    let (above, secrets, policies) = (scratch(), scratch_named("secrets"), PolicyDirectory::new());
    let (data, canary) = (above.join("data"), token("shown"));
    for (path, key) in [(&data, "own"), (&secrets, canary.as_str())] {
        fs::create_dir_all(path.join("below")).unwrap();
        fs::write(path.join("key"), key).unwrap();
        fs::write(path.join("below/key"), key).unwrap();
        fs::write(path.join("pyvenv.cfg"), "home = /usr/bin\n").unwrap();
        fs::create_dir(path.join("bin")).unwrap();
        std::os::unix::fs::symlink("/usr/bin/python3", path.join("bin/python")).unwrap();
    }
    chown_to_owner(&data);
    let policy =
        |name: &str, key: &str, path: &Path| policies.write(name, &derived(&format!("[filesystem]\n{key} = {{ add = [{path:?}] }}")));
    let read = |policy: &str, path: &Path| {
        let code = format!("print(open({:?}).read(20000)[:40])", text(&path.join("key")));
        exec_with(&["--policy", policy], json!({"code": code}))
    };
    let ways = ["read_only", "read_only_optional"].map(|key| policy(key, key, &data));
    let deeper = policy("deeper", "read_only", &data.join("below"));
    let option = format!("python={}", text(&data.join("bin/python")));
    let run = || exec_with(&["--runtime", &option], json!({"code": format!("print(open({:?}).read())", text(&data.join("key")))}));
    // The control: they are shown while they are what they were.
    for policy in &ways {
        read(policy, &data).succeeded().expect(json!({"output": "own\n"}));
    }
    read(&deeper, &data.join("below")).succeeded().expect(json!({"output": "own\n"}));
    run().succeeded().expect(json!({"output": "own\n"}));
    let plant = format!("import os\nos.rename('data', 'moved')\nos.symlink({:?}, 'data')", text(&secrets));
    exec(json!({"code": plant, "scratch": text(&above)})).succeeded();
    let remedy = format!("without the link: {}", text(&secrets));
    for policy in &ways {
        read(policy, &data).broke("shown_foreign_link", &[text(&data), "only root's are followed", &remedy]);
        let output = run_with_stdin(&mut stockade(["exec", "--dry-run", "--policy", policy]), br#"{"code": ""}"#);
        let said = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && said.contains(&remedy), "{said}");
    }
    read(&deeper, &data.join("below")).broke("shown_foreign_link", &[text(&data), &format!("{}/below", text(&secrets))]);
    run().refused("shown_foreign_link", &[text(&data), "python", &format!("without the link: in {}", text(&secrets))]);
    // The controls: what it leads to by its own name, and links of root's.
    read(&policy("own", "read_only", &secrets), &secrets).succeeded().expect(json!({"output": format!("{canary}\n")}));
    let release = Path::new("/etc/os-release");
    assert!(release.is_symlink());
    let code = "print(len(open('/etc/os-release').read()) > 9)";
    exec_with(&["--policy", &policy("release", "read_only", release)], json!({"code": code}))
        .succeeded()
        .expect(json!({"output": "True\n"}));
    if is_root() {
        std::os::unix::fs::lchown(&data, Some(0), Some(0)).unwrap();
        read(&ways[0], &data).succeeded().expect(json!({"output": format!("{canary}\n")}));
    }
    // Root's link to where no policy may name anything.
    let mounts = Path::new("/etc/mtab");
    assert!(mounts.is_symlink());
    read(&policy("mounts", "read_only", mounts), mounts).broke("shown_system_directory", &["/etc/mtab", "/proc/"]);
}

test!(Both, a_link_put_there_meanwhile_is_not_shown);
/// Between the launcher's look at the way and the mount a link takes a directory's place.
fn a_link_put_there_meanwhile_is_not_shown() {
    let (above, secrets, policies) = (scratch(), scratch_named("secrets"), PolicyDirectory::new());
    let (data, link, canary) = (above.join("data"), above.join("link"), token("shown"));
    fs::create_dir(&data).unwrap();
    fs::write(data.join("key"), "own").unwrap();
    fs::write(secrets.join("key"), &canary).unwrap();
    std::os::unix::fs::symlink(&secrets, &link).unwrap();
    if is_root() {
        std::os::unix::fs::lchown(&link, Some(OWNER), Some(OWNER)).unwrap();
    }
    let policy = policies.write("shows", &derived(&format!("[filesystem]\nread_only = {{ add = [{data:?}] }}")));
    let code = format!("print(open({:?}).read())", text(&data.join("key")));
    let stop = AtomicBool::new(false);
    let outcomes: Vec<ExecResult> = thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                rustix::fs::renameat_with(CWD, &data, CWD, &link, RenameFlags::EXCHANGE).unwrap();
            }
        });
        let outcomes = (0..40).map(|_| exec_with(&["--policy", &policy], json!({"code": code}))).collect();
        stop.store(true, Ordering::Relaxed);
        outcomes
    });
    outcomes.iter().for_each(|done| assert!(!done.result.to_string().contains(&canary), "{}", done.result));
    // The control: it is shown where it was no link.
    if data.is_symlink() {
        fs::remove_file(&data).unwrap();
        fs::rename(&link, &data).unwrap();
    }
    exec_with(&["--policy", &policy], json!({"code": code})).succeeded().expect(json!({"output": "own\n"}));
}

test!(Both, a_socket_and_a_fifo_that_a_policy_shows_can_be_used);
/// What the threat model states of them; in a scratch they are covered.
fn a_socket_and_a_fifo_that_a_policy_shows_can_be_used() {
    let (shown, policies) = (directory().join("shown"), PolicyDirectory::new());
    fs::create_dir(&shown).unwrap();
    let (socket, fifo) = (shown.join("socket"), shown.join("fifo"));
    let listener = UnixListener::bind(&socket).unwrap();
    rustix::fs::mknodat(CWD, &fifo, FileType::Fifo, Mode::from_raw_mode(0o644), 0).unwrap();
    fs::set_permissions(&socket, Permissions::from_mode(0o666)).unwrap();
    let mut writer = File::options().read(true).write(true).open(&fifo).unwrap();
    writer.write_all(b"word").unwrap();
    let code = format!(
        "import os, socket\ns = socket.socket(socket.AF_UNIX)\ns.connect({:?})\nf = os.open({:?}, os.O_RDONLY | os.O_NONBLOCK)\nprint(os.read(f, 9))",
        text(&socket),
        text(&fifo)
    );
    let policy = policies.write("shows", &derived(&format!("[filesystem]\nread_only = {{ add = [{shown:?}] }}")));
    exec_with(&["--policy", &policy], json!({"code": code})).succeeded().expect(json!({"output": "b'word'\n"}));
    listener.set_nonblocking(true).unwrap();
    listener.accept().unwrap();
    // Where they are not shown they are not there.
    let done = exec(json!({"code": code}));
    assert!(done["error"].as_str().unwrap().contains("FileNotFoundError"), "{}", done.result);
}

test!(RootlessOnly, code_that_becomes_a_directory_leaves_no_record);
fn code_that_becomes_a_directory_leaves_no_record() {
    let scratch = scratch();
    let registry = directory().join("home/stockade");
    let records = || {
        let entries = fs::read_dir(&registry).into_iter().flatten().flatten();
        entries.filter(|entry| entry.file_name().as_encoded_bytes().starts_with(b"run-")).count()
    };
    let before = records();
    let code = "import os, sys; p = sys.argv[0]; print(os.path.isfile(p)); os.remove(p); os.mkdir(p)";
    let done = exec(json!({"code": code, "scratch": text(&scratch)}));
    done.succeeded().expect(json!({"output": "True\n"}));
    assert_eq!(records(), before);
}

test!(RootOnly, a_caller_of_sudo_ends_or_stops_no_run_before_its_record);
fn a_caller_of_sudo_ends_or_stops_no_run_before_its_record() {
    let grants = grant_of_default();
    let id = OWNER.to_string();
    let environment = [("SUDO_UID", id.as_str()), ("SUDO_GID", id.as_str()), ("SUDO_USER", "agent")];
    for (signals, verdict) in
        [(&[Signal::SIGINT, Signal::SIGQUIT, Signal::SIGHUP][..], "cancelled"), (&[Signal::SIGTSTP][..], "wall_timeout")]
    {
        let mut command = command_with_etc(&[("stockade/grants.toml", &grants)], &environment, &["exec"]);
        let mut child = command.stdin(std::process::Stdio::piped()).spawn().unwrap();
        let wall = scaled_limit(3000);
        // Other tests' runs are in this log too.
        let named = format!("{verdict}-{}", std::process::id());
        let request = json!({"id": named, "code": "import time\nwhile True: time.sleep(1)", "limits": {"wall": wall}}).to_string();
        std::io::Write::write_all(&mut child.stdin.take().unwrap(), request.as_bytes()).unwrap();
        let pid = Pid::from_raw(child.id().cast_signed());
        thread::sleep(scaled(Duration::from_millis(700)));
        let mut said = String::new();
        while child.try_wait().unwrap().is_none() {
            for signal in signals {
                let _gone = kill(pid, *signal);
            }
            thread::sleep(Duration::from_micros(300));
        }
        child.stdout.take().unwrap().read_to_string(&mut said).unwrap();
        let files = fs::read_dir("/var/log/stockade").unwrap().flatten();
        let log: String = files.filter_map(|file| fs::read_to_string(file.path()).ok()).collect();
        let last = log.lines().rfind(|line| line.contains(&format!("\"id\":\"{named}\""))).unwrap_or_default();
        assert!(last.contains(&format!("\"verdict\":\"{verdict}\"")), "{signals:?}: {last}\n{said}");
    }
}

test!(serial RootOnly, a_registry_name_taken_in_tmp_first_stops_no_run);
fn a_registry_name_taken_in_tmp_first_stops_no_run() {
    struct Taken(String);
    impl Drop for Taken {
        fn drop(&mut self) {
            let _removed = fs::remove_dir_all(&self.0).or_else(|_| fs::remove_file(&self.0));
        }
    }
    // A user who has run nothing else.
    const USER: u32 = OWNER + 17;
    let own = |path: &Path| std::os::unix::fs::chown(path, Some(USER), Some(USER)).unwrap();
    let place = Taken(format!("/tmp/stockade-{USER}"));
    let (home, scratch) = (directory().join("own"), scratch());
    fs::create_dir(&home).unwrap();
    own(&home);
    own(&scratch);
    let id = USER.to_string();
    let request = json!({"code": "print(6*7)", "scratch": text(&scratch)}).to_string();
    let program = program_path().unwrap();
    let ask = || {
        let words = ["setpriv", "--reuid", &id, "--regid", &id, "--clear-groups", "--inh-caps=-all", text(&program), "exec"];
        ExecResult::of(run_with_stdin(run_under(&words).env("HOME", &home).env_remove("XDG_RUNTIME_DIR"), request.as_bytes()))
    };
    fs::create_dir(&place.0).unwrap();
    ask().succeeded().expect(json!({"output": "42\n"}));
    let longer =
        || fs::read_dir("/tmp").unwrap().flatten().map(|entry| entry.path()).find(|path| text(path).starts_with(&format!("{}-", place.0)));
    let own_place = Taken(text(&longer().expect("a name that no other user knew")).to_owned());
    assert_eq!(fs::metadata(&own_place.0).map(|there| (there.uid(), there.mode() & 0o777)).unwrap(), (USER, 0o700));
    assert_eq!(fs::read_dir(&place.0).unwrap().count(), 0);
    // A file of the user's own, which somebody else has moved there.
    fs::remove_dir(&place.0).unwrap();
    fs::write(&place.0, "").unwrap();
    own(Path::new(&place.0));
    ask().succeeded().expect(json!({"output": "42\n"}));
    // The control: left alone, it is where the runs are noted.
    fs::remove_file(&place.0).unwrap();
    ask().succeeded();
    assert!(Path::new(&place.0).is_dir());
}

test!(RootlessOnly, no_scratch_holds_what_the_next_run_believes);
fn no_scratch_holds_what_the_next_run_believes() {
    let home = directory().join("home");
    let ask = |path: &Path| exec(json!({"code": "", "scratch": text(path)}));
    let other = home.join("other");
    for (place, reason) in [(".config", "scratch_holds_a_policy"), (".local/state", "scratch_holds_the_log")] {
        let (place, below) = (home.join(place), home.join(place).join("stockade"));
        // Before there is anything in it, and after.
        for path in [&place, &below, &other] {
            fs::create_dir_all(path).unwrap();
            match path == &other {
                true => drop(ask(path).succeeded()),
                false => drop(ask(path).refused(reason, &[text(path), "lies in it"])),
            }
        }
        let output = stockade(["session", "--scratch", text(&below)]).output().unwrap();
        assert!(both_streams(&output).contains(reason), "{}", both_streams(&output));
    }
    // Where the user's policies are elsewhere, that place is the one.
    let request = json!({"code": "", "scratch": text(&other)}).to_string();
    let done = ExecResult::of(run_with_stdin(stockade(["exec"]).env("XDG_CONFIG_HOME", &other), request.as_bytes()));
    done.refused("scratch_holds_a_policy", &[text(&other)]);
}

test!(Both, no_scratch_holds_the_policy_of_its_run_or_the_program);
fn no_scratch_holds_the_policy_of_its_run_or_the_program() {
    let scratch = scratch();
    let policy = scratch.join("own.toml");
    fs::write(&policy, derived("")).unwrap();
    let ask = |options: &[&str]| exec_with(options, json!({"code": "print(6*7)", "scratch": text(&scratch)}));
    let named = ask(&["--policy", text(&policy)]);
    // Root believes no policy where others could write.
    let reason = if is_root() { "policy_unreadable" } else { "scratch_holds_a_policy" };
    assert_eq!(named["reason"], reason, "{}", named.result);
    ask(&[]).succeeded().expect(json!({"output": "42\n"}));
    let copy = scratch.join("stockade");
    fs::copy(program_path().unwrap(), &copy).unwrap();
    let request = json!({"code": "print(6*7)", "scratch": text(&scratch)}).to_string();
    ExecResult::of(run_with_stdin(&mut run_under(&[text(&copy), "exec"]), request.as_bytes()))
        .refused("scratch_holds_the_launcher", &[text(&copy)]);
    // The same for a link by which it is started.
    let (links, other) = (scratch_named("links"), scratch_named("other"));
    let link = links.join("stockade");
    std::os::unix::fs::symlink(program_path().unwrap(), &link).unwrap();
    let start = |scratch: &Path| {
        let request = json!({"code": "print(6*7)", "scratch": text(scratch)}).to_string();
        ExecResult::of(run_with_stdin(&mut run_under(&[text(&link), "exec"]), request.as_bytes()))
    };
    start(&links).refused("scratch_holds_the_launcher", &[text(&link)]);
    start(&other).succeeded().expect(json!({"output": "42\n"}));
}

test!(RootlessOnly, no_scratch_holds_a_link_on_the_way_to_what_the_next_run_believes);
fn no_scratch_holds_a_link_on_the_way_to_what_the_next_run_believes() {
    let (scratch, far, other) = (scratch(), directory().join("far"), scratch_named("other"));
    fs::create_dir(&far).unwrap();
    let (policy, middle, first) = (far.join("mine.toml"), scratch.join("mine.toml"), directory().join("mine.toml"));
    fs::write(&policy, derived("")).unwrap();
    std::os::unix::fs::symlink(&policy, &middle).unwrap();
    std::os::unix::fs::symlink(&middle, &first).unwrap();
    let ask = |scratch: &Path| exec_with(&["--policy", text(&first)], json!({"code": "print(6*7)", "scratch": text(scratch)}));
    ask(&scratch).refused("scratch_holds_a_policy", &[text(&first)]);
    // The control: the same policy, and a scratch off its way.
    ask(&other).succeeded().expect(json!({"output": "42\n"}));
}

test!(RootOnly, limits_of_a_caller_of_sudo_keep_no_run_out_of_the_log);
fn limits_of_a_caller_of_sudo_keep_no_run_out_of_the_log() {
    let grants = grant_of_default();
    let id = OWNER.to_string();
    let environment = [("SUDO_UID", id.as_str()), ("SUDO_GID", id.as_str()), ("SUDO_USER", "agent")];
    let is_recorded = |done: &ExecResult| {
        let run = done["audit"]["run"].as_str().unwrap();
        let files = fs::read_dir("/var/log/stockade").unwrap().flatten();
        files.filter_map(|file| fs::read_to_string(file.path()).ok()).any(|text| text.contains(run))
    };
    let ask = |limit: &str| {
        let command = command_with_etc(&[("stockade/grants.toml", &grants)], &environment, &["exec"]);
        let words: Vec<&str> =
            std::iter::once(command.get_program()).chain(command.get_args()).map(|word| word.to_str().unwrap()).collect();
        let mut limited = run_under(&[&["prlimit", limit, "--"], &words[..]].concat());
        limited.envs(environment);
        ExecResult::of(run_with_stdin(&mut limited, br#"{"code": "print(6*7)"}"#))
    };
    // The control; and a limit that root may lift without any right.
    for limit in ["--fsize=unlimited", "--fsize=67108864:unlimited", "--cpu=1000:unlimited"] {
        let done = ask(limit);
        done.succeeded().expect(json!({"output": "42\n"}));
        assert!(is_recorded(&done), "{limit}");
    }
    for limit in ["--fsize=67108864:67108864", "--cpu=1000:1000", "--as=8000000000:8000000000"] {
        let done = ask(limit);
        match done["verdict"].as_str() {
            // Root here may lift any.
            Some("exited") => assert!(is_recorded(&done), "{limit}"),
            _ => drop(done.broke("limits_of_caller", &["ulimit", "CAP_SYS_RESOURCE"])),
        }
    }
}

test!(Both, a_caller_that_ignores_its_children_is_served);
fn a_caller_that_ignores_its_children_is_served() {
    let script = "trap '' CHLD; exec \"$@\"";
    let mut command = run_under(&["bash", "-c", script, "bash", text(&program_path().unwrap()), "exec"]);
    ExecResult::of(run_with_stdin(&mut command, br#"{"code": "import subprocess; print(subprocess.run(['true']).returncode)"}"#))
        .succeeded()
        .expect(json!({"output": "0\n"}));
}

test!(Both, too_many_arguments_are_refused);
fn too_many_arguments_are_refused() {
    let patterns = |count: usize| exec(json!({"code": "open('f', 'w').close()", "collect": vec!["f"; count]}));
    assert_eq!(patterns(256).succeeded()["files"].as_array().unwrap().len(), 1);
    patterns(257).expect(json!({"verdict": "bad_request", "reason": "too_many_patterns", "started": false}));
    let ask = |count: usize| exec(json!({"code": "import sys; print(len(sys.argv))", "args": vec!["x"; count]}));
    ask(50_000).refused("arguments_too_large", &["args"]);
    ask(1000).succeeded().expect(json!({"output": "1001\n"}));
}

test!(Both, too_long_a_variable_is_refused);
fn too_long_a_variable_is_refused() {
    let policies = PolicyDirectory::new();
    let policy = policies.write("long", &derived("[environment]\naccept = { add = [\"LONG\"] }"));
    let ask = |length: usize| {
        let code = "import os; print(len(os.environ['LONG']))";
        exec_with(&["--policy", &policy], json!({"code": code, "env": {"LONG": "x".repeat(length)}}))
    };
    ask(200 << 10).refused("arguments_too_large", &["env"]);
    ask(100 << 10).succeeded().expect(json!({"output": "102400\n"}));
}

test!(Both, code_cannot_bring_a_seccomp_filter);
fn code_cannot_bring_a_seccomp_filter() {
    denied("call(157, 22, 2, 0, 0, 0)", "EPERM", Control::Instead("call(157, 3, 0, 0, 0, 0)"));
    // Outside, the kernel takes it: one instruction that allows.
    let filter = "code = ctypes.create_string_buffer(struct.pack('HBBI', 6, 0, 0, 0x7fff0000))\nprogram = ctypes.create_string_buffer(struct.pack('HxxxxxxQ', 1, ctypes.addressof(code)))\ncall(157, 38, 1, 0, 0, 0)\ncall(157, 22, 2, ctypes.addressof(program), 0, 0)";
    denied(filter, "EPERM", Control::Outside);
}

test!(Both, code_cannot_attach_a_socket_filter);
fn code_cannot_attach_a_socket_filter() {
    let filter = |socket: &str| {
        format!(
            "code = ctypes.create_string_buffer(struct.pack('HBBI', 6, 0, 0, 0xffff))\nprogram = struct.pack('HxxxxxxQ', 1, ctypes.addressof(code))\ns = {socket}\ns.setsockopt(socket.SOL_SOCKET, 26, program)"
        )
    };
    for socket in ["socket.socket()", "socket.socket(socket.AF_UNIX)", "socket.socketpair()[0]"] {
        let other = format!("s = {socket}\ns.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)");
        denied(&filter(socket), "EPERM", Control::Instead(&other));
    }
    // The filter itself is one that the kernel takes; some refuse it to users on the Internet's sockets.
    denied(&filter("socket.socket(socket.AF_UNIX)"), "EPERM", Control::Outside);
}

test!(Both, no_rename_leaves_a_whiteout);
fn no_rename_leaves_a_whiteout() {
    for path in ["", "/tmp/"] {
        let act = format!("write('{path}from')\ncall(316, -100, b'{path}from', -100, b'{path}to', FLAGS)");
        let (whiteout, plain) = (act.replace("FLAGS", "4"), act.replace("FLAGS", "0"));
        denied(&whiteout, "EPERM", Control::Instead(&plain));
        let scratch = scratch_named(if path.is_empty() { "first" } else { "second" });
        denied_in(json!({"scratch": text(&scratch)}), &whiteout, "EPERM", Control::Instead(&plain));
    }
}

test!(serial Both, an_unread_stdout_does_not_keep_a_run_that_is_asked_to_end, seconds 60);
fn an_unread_stdout_does_not_keep_a_run_that_is_asked_to_end() {
    let mark = token("yes");
    let mut child = stockade(["run", "--", "yes", &mark]).spawn().unwrap();
    // It has begun; from here on its output is not read.
    let mut first = [0; 1];
    child.stdout.as_mut().unwrap().read_exact(&mut first).unwrap();
    thread::sleep(scaled(Duration::from_millis(500)));
    // The control: by itself it stays.
    assert!(child.try_wait().unwrap().is_none());
    let begin = Instant::now();
    kill(Pid::from_raw(i32::try_from(child.id()).unwrap()), Signal::SIGTERM).unwrap();
    let ended = wait_within(&mut child, Duration::from_secs(15));
    if ended.is_none() {
        child.kill().unwrap();
    }
    assert!(ended.is_some(), "still there after {:?}", begin.elapsed());
    no_process_is_left(&mark);
}

test!(Both, pending_signals_are_few);
fn pending_signals_are_few() {
    let code = r#"
import ctypes, errno, json, os, signal
library = ctypes.CDLL(None, use_errno=True)
number = signal.SIGRTMIN + 1
signal.pthread_sigmask(signal.SIG_BLOCK, [number])
sent = 0
while sent < 600 and library.sigqueue(os.getpid(), number, ctypes.c_void_p(0)) == 0:
    sent += 1
print(json.dumps([sent, sent < 600 and errno.errorcode[ctypes.get_errno()]]))
"#;
    let answer = exec(json!({"code": code})).succeeded().json();
    let sent = answer[0].as_u64().unwrap();
    assert!((100..=512).contains(&sent) && answer[1] == "EAGAIN", "{answer}");
    // Where the launcher may have few, code may have fewer.
    let program = program_path().unwrap();
    let few = format!("ulimit -i 100; exec {} exec", text(&program));
    let done = ExecResult::of(run_with_stdin(&mut run_under(&["bash", "-c", &few]), json!({"code": code}).to_string().as_bytes()));
    assert!(done.succeeded().json()[0].as_u64().unwrap() <= 50, "{}", done.brief());
    // The control: outside there is room for all of them.
    let output = run_with_stdin(&mut run_under(&["/usr/bin/python3", "-"]), code.as_bytes());
    assert_eq!(serde_json::from_slice::<Value>(&output.stdout).unwrap(), json!([600, false]));
}

/// Fills the receive buffers of many sockets and prints how many bytes they hold: 72 MiB, where
/// nothing holds them back. More than a tenth of 1 GiB would end the run of the control. How much
/// one socket takes is the host's to say (`net.core.rmem_max`): Debian 12 takes 13 of these blocks.
const FILL_SOCKETS: &str = r#"
import socket
sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sender.setblocking(False)
block = b'x' * 32768
held = []
sent = 0
for _ in range(300):
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
    s.setblocking(False)
    s.bind(('127.0.0.1', 0))
    held.append(s)
    for _ in range(10):
        try: sent += sender.sendto(block, s.getsockname())
        except OSError: break
    if sent > 72 << 20: break
total = 0
for s in held:
    try:
        while True: total += len(s.recv(67108864))
    except OSError: pass
print(total)
"#;

test!(RootOnly, socket_buffers_count_as_memory, needs [Cgroup], seconds 60);
fn socket_buffers_count_as_memory() {
    let ask = |memory: &str| {
        exec(
            json!({"code": FILL_SOCKETS, "limits": {"memory": memory, "tmp_size": "8MiB", "scratch_size": "8MiB", "wall": scaled_limit(20_000), "open_files": 600}}),
        )
    };
    let total = |done: &ExecResult| done.succeeded().output().trim().parse::<u64>().unwrap();
    let small = ask("48MiB");
    // Either way of holding it back will do.
    if small["verdict"] != "out_of_memory" {
        let held = total(&small);
        assert!(held <= 48 << 20, "{held} bytes\n{}", small.brief());
    }
    // The control: where memory is plenty, the same sockets hold more than that.
    let large = ask("1GiB");
    let held = total(&large);
    assert!(held > 64 << 20, "{held} bytes\n{}", large.brief());
}
