//! What a policy keeps from code in a host scratch: hidden and read-only paths, sockets of the host,
//! what a mount covers. No name, link, move or second run uncovers it.
//!
//! Which directories may be a scratch at all is in `scratch_places.rs`.

use std::{
    ffi::OsStr,
    fs::{self, Permissions},
    os::unix::{
        ffi::OsStrExt,
        fs::PermissionsExt,
        net::{UnixListener, UnixStream},
    },
    path::Path,
    thread,
    time::Duration,
};

use rustix::fs::{CWD, FileType, Mode};
use serde_json::{Value, json};

use crate::support::{
    control::{Control, denied_in},
    exec::{ExecResult, chown_to_owner, exec, exec_with, run_under, run_with_stdin, scratch, text, token, write_file},
    policy_dir::{PolicyDirectory, derived},
    runner::{directory, test},
    tracer::{Act, INIT, Point, trace},
};

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
