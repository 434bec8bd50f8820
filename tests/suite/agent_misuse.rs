//! What agent code does when it goes wrong or has been turned: each misdeed with its
//! control, and with canaries on the host that must stay unread and unchanged.

use std::{
    fs,
    net::TcpListener,
    os::unix::fs::PermissionsExt,
    os::unix::{fs::symlink, net::UnixListener},
    path::PathBuf,
    process::Command,
    time::{Duration, Instant},
};

use serde_json::json;

use crate::support::{
    control::{Control, denied, denied_in, outside, program},
    exec::{
        ExecResult, chown_to_owner, exec, exec_with, program_path, python, run_under, run_with_stdin, scratch, set_id_bits, stockade, text,
        token, write_file,
    },
    leftovers::no_process_is_left,
    policy_dir::{PolicyDirectory, derived},
    runner::{directory, is_root, test},
    timeouts::{scaled, scaled_limit},
};

/// A home with secrets.
struct Home {
    path: PathBuf,
    secret: String,
}

impl Home {
    fn new() -> Self {
        let path = directory().join("victim-home");
        let secret = token("home");
        for file in [".ssh/id_ed25519", ".aws/credentials", ".netrc", "project/.env", "project/notes.txt"] {
            let file = path.join(file);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, &secret).unwrap();
        }
        Home { path, secret }
    }

    /// Every canary still holds what it held.
    #[track_caller]
    fn is_unchanged(&self) {
        for file in [".ssh/id_ed25519", ".aws/credentials", ".netrc", "project/.env", "project/notes.txt"] {
            assert_eq!(fs::read_to_string(self.path.join(file)).unwrap(), self.secret, "{file}");
        }
    }
}

/// The secret is nowhere in what came back.
#[track_caller]
fn does_not_hold(done: &ExecResult, secret: &str) {
    assert!(!done.line.contains(secret) && !done.stderr.contains(secret), "the secret came out: {}", done.brief());
}

test!(Both, ssh_keys_are_not_there_to_read);
fn ssh_keys_are_not_there_to_read() {
    let home = Home::new();
    for file in [".ssh/id_ed25519", ".aws/credentials", ".netrc"] {
        let act = format!("print(read({:?}), file=sys.stderr)", text(&home.path.join(file)));
        does_not_hold(&denied(&act, "ENOENT", Control::Outside), &home.secret);
    }
    // The real ones, of the user who runs this: the home inside is empty.
    let done = python("import os\nprint(os.listdir(os.path.expanduser('~')), os.path.exists('/root'), os.listdir('/home'))");
    done.succeeded().expect(json!({"output": "[] False ['sandbox']\n"}));
    home.is_unchanged();
}

test!(RootOnly, the_shadow_file_is_not_there_to_read);
fn the_shadow_file_is_not_there_to_read() {
    denied("read('/etc/shadow')", "ENOENT", Control::Outside);
    denied("read('/etc/gshadow')", "ENOENT", Control::Outside);
    // The accounts inside are the sandbox's own.
    let accounts = python("print(open('/etc/passwd').read())");
    assert_eq!(accounts.output().lines().filter(|line| !line.is_empty()).count(), 3, "{}", accounts.output());
}

test!(Both, files_beside_the_scratch_are_not_there_to_read);
fn files_beside_the_scratch_are_not_there_to_read() {
    let home = Home::new();
    let scratch = home.path.join("project/work");
    fs::create_dir(&scratch).unwrap();
    chown_to_owner(&scratch);
    symlink("../notes.txt", scratch.join("link")).unwrap();
    for path in ["../notes.txt", "link", "../../.netrc"] {
        let request = json!({"scratch": text(&scratch)});
        let act = format!("os.chdir({:?})\nprint(read({path:?}), file=sys.stderr)", text(&scratch));
        does_not_hold(&denied_in(request, &act, "ENOENT", Control::Outside), &home.secret);
    }
}

test!(Both, a_dotenv_beside_the_program_is_hidden);
fn a_dotenv_beside_the_program_is_hidden() {
    let scratch = scratch();
    let secret = token("dotenv");
    for name in [".env", ".env.local", ".environment"] {
        write_file(&scratch.join(name), &secret);
        let act = format!("print(read({name:?}), file=sys.stderr)");
        let request = json!({"scratch": text(&scratch)});
        let done = denied_in(request, &act, "EACCES", Control::Lifted("[scratch]\nhidden = { replace = [] }"));
        does_not_hold(&done, &secret);
        let collected = exec(json!({"code": "", "scratch": text(&scratch), "collect": ["**", "*", ".env*"]}));
        does_not_hold(&collected, &secret);
    }
}

test!(Both, a_dotenv_cannot_be_uncovered);
fn a_dotenv_cannot_be_uncovered() {
    let scratch = scratch();
    let secret = token("dotenv");
    write_file(&scratch.join(".env"), &secret);
    let code = "import os, errno\ndef t(f):\n    try: f(); return 'ok'\n    except OSError as e: return errno.errorcode[e.errno]\nprint(t(lambda: os.unlink('.env')), t(lambda: os.rename('.env','x')), t(lambda: os.link('.env','x')), t(lambda: os.chmod('.env', 0o666)), t(lambda: open('.env','w')))";
    let done = exec(json!({"code": code, "scratch": text(&scratch)}));
    let answers = done.succeeded().output().to_owned();
    assert!(!answers.contains("ok"), "{answers}");
    assert_eq!(fs::read_to_string(scratch.join(".env")).unwrap(), secret);
}

test!(Both, a_directory_that_could_not_be_searched_is_hidden);
/// Its owner could open it again, and on the host the code has the owner's uid.
fn a_directory_that_could_not_be_searched_is_hidden() {
    let (scratch, secret) = (scratch(), token("closed"));
    let closed = scratch.join("closed");
    fs::create_dir(&closed).unwrap();
    chown_to_owner(&closed);
    write_file(&closed.join(".env"), &secret);
    let read = "import os\ntry: os.chmod('closed', 0o700)\nexcept OSError as error: print(error)\nprint(open('closed/.env').read())";
    let request = json!({"code": read, "scratch": text(&scratch)});
    // The control: nothing hides it, and the code reads it.
    assert!(exec(request.clone()).succeeded().output().contains(&secret));
    fs::set_permissions(&closed, fs::Permissions::from_mode(0o000)).unwrap();
    let policies = PolicyDirectory::new();
    let policy = policies.write("deep", &derived("[scratch]\nhidden = { replace = [\"**/.env*\"] }"));
    let done = exec_with(&["--policy", &policy], request);
    does_not_hold(&done, &secret);
    assert!(done.error().contains("Error"), "{}", done.brief());
}

test!(Both, another_processes_environment_is_not_there_to_read);
fn another_processes_environment_is_not_there_to_read() {
    let secret = token("environ");
    let mut other = Command::new("sleep").arg("600").env("SECRET", &secret).spawn().unwrap();
    let act = format!("print(read('/proc/{}/environ'), file=sys.stderr)", other.id());
    let done = denied(&act, "ENOENT", Control::Outside);
    does_not_hold(&done, &secret);
    let found = python("import os; print([p for p in os.listdir('/proc') if p.isdigit()])");
    found.succeeded().expect(json!({"output": "['1', '2']\n"}));
    other.kill().unwrap();
    other.wait().unwrap();
}

test!(Both, secrets_in_the_callers_environment_do_not_come_in);
fn secrets_in_the_callers_environment_do_not_come_in() {
    let secret = token("caller");
    let code = "import os, glob\nprint(dict(os.environ))\nfor path in glob.glob('/proc/*/environ') + ['/proc/self/environ', '/proc/1/environ']:\n    try: print(open(path).read())\n    except OSError as e: print(path, e)";
    let mut command = stockade(["exec"]);
    for name in ["OPENAI_API_KEY", "LD_PRELOAD_", "DEBUG", "PYTHONSTARTUP", "LANG_X"] {
        command.env(name, &secret);
    }
    let done = ExecResult::of(run_with_stdin(&mut command, json!({"code": code}).to_string().as_bytes()));
    does_not_hold(done.succeeded(), &secret);
    // The control: the same program finds it outside.
    let mut command = run_under(&["/usr/bin/python3", "-c", code]);
    let output = command.env("OPENAI_API_KEY", &secret).output().unwrap();
    assert!(String::from_utf8_lossy(&output.stdout).contains(&secret));
}

test!(Both, deleting_everything_deletes_only_scratch);
fn deleting_everything_deletes_only_scratch() {
    let home = Home::new();
    let scratch = home.path.join("project/work");
    fs::create_dir(&scratch).unwrap();
    chown_to_owner(&scratch);
    write_file(&scratch.join("result"), "x");
    let code = "import shutil, os\nshutil.rmtree('.', ignore_errors=True)\nprint(os.listdir('.'))\nfor top in ('/', '/usr', '/home', '/etc', '/tmp', '..'): shutil.rmtree(top, ignore_errors=True)\nprint(os.path.exists('/usr/bin/python3'))";
    let done = exec(json!({"code": code, "scratch": text(&scratch)}));
    done.succeeded().expect(json!({"output": "[]\nTrue\n"}));
    home.is_unchanged();
    // Its own scratch is the code's to empty, and stays.
    assert_eq!(fs::read_dir(&scratch).unwrap().count(), 0);
}

test!(Both, deleting_beyond_scratch_finds_nothing);
fn deleting_beyond_scratch_finds_nothing() {
    let home = Home::new();
    let project = home.path.join("project");
    let scratch = scratch();
    let act = format!("import shutil\nshutil.rmtree({:?})", text(&project));
    let request = json!({"scratch": text(&scratch)});
    let done = denied_in(request, &act, "ENOENT", Control::Instead("import shutil\nos.mkdir('d')\nwrite('d/f')\nshutil.rmtree('d')"));
    does_not_hold(&done, &home.secret);
    home.is_unchanged();
    // And outside it would have.
    assert_eq!(outside(&[], &act), "ok");
    assert!(!project.exists());
}

test!(Both, a_listener_of_the_host_cannot_be_reached);
fn a_listener_of_the_host_cannot_be_reached() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    denied(&format!("socket.create_connection(('127.0.0.1', {port}), 5)"), "ECONNREFUSED", Control::Outside);
    denied(&format!("s = socket.socket(socket.AF_INET6)\ns.connect(('::ffff:127.0.0.1', {port}))"), "ECONNREFUSED", Control::Outside);
    listener.set_nonblocking(true).unwrap();
    // The controls connected, and nothing else.
    let mut came = 0;
    while listener.accept().is_ok() {
        came += 1;
    }
    assert_eq!(came, 2);
}

test!(Both, an_abstract_socket_of_the_host_cannot_be_reached);
fn an_abstract_socket_of_the_host_cannot_be_reached() {
    use std::os::{linux::net::SocketAddrExt, unix::net::SocketAddr};
    let name = token("abstract");
    let _listener = UnixListener::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap();
    let act = format!("s = socket.socket(socket.AF_UNIX)\ns.connect('\\0{name}')");
    denied(&act, "ECONNREFUSED", Control::Outside);
}

test!(Both, a_socket_of_the_host_cannot_be_reached_by_its_path);
/// Such as a container engine's, behind which is root. The control is a policy that shows
/// it: a read-only mount prevents no connection.
fn a_socket_of_the_host_cannot_be_reached_by_its_path() {
    let place = PathBuf::from(format!("/var/tmp/suite-{}-socket", std::process::id()));
    fs::create_dir(&place).unwrap();
    let path = place.join("docker.sock");
    let _listener = UnixListener::bind(&path).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o666)).unwrap();
    let connect = |path: &str| format!("s = socket.socket(socket.AF_UNIX)\ns.connect({path:?})");
    let by_link = format!("os.symlink({:?}, 'way')\n{}", text(&path), connect("way"));
    let policies = PolicyDirectory::new();
    let showing = policies.write("showing", &derived(&format!("[filesystem]\nread_only_optional = {{ add = [{:?}] }}", text(&path))));
    let answer = |policy: &str, act: &str| exec_with(&["--policy", policy], json!({"code": program(act)})).json();
    let mut found = Vec::new();
    for act in [&connect(text(&path)), &by_link, &connect("/run/docker.sock"), &connect("/var/run/docker.sock")] {
        found.push(answer("default", act));
    }
    let shown = answer(&showing, &connect(text(&path)));
    fs::remove_dir_all(&place).unwrap();
    assert_eq!(found, ["ENOENT"; 4]);
    assert_eq!(shown, "ok");
}

test!(Both, no_address_can_be_reached);
fn no_address_can_be_reached() {
    // Documentation addresses, a public resolver, the link's own metadata service.
    let loopback = "a = socket.socket()\na.bind(('127.0.0.1', 0))\na.listen()\nsocket.create_connection(a.getsockname(), 5)";
    for address in ["192.0.2.1", "1.1.1.1", "169.254.169.254", "10.0.0.1"] {
        denied(&format!("socket.create_connection(({address:?}, 80), 5)"), "ENETUNREACH", Control::Instead(loopback));
        let udp = format!("s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\ns.sendto(b'x', ({address:?}, 53))");
        denied(
            &udp,
            "ENETUNREACH",
            Control::Instead("s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\ns.sendto(b'x', ('127.0.0.1', 53))"),
        );
    }
    denied("s = socket.socket(socket.AF_INET6)\ns.connect(('2001:db8::1', 80))", "ENETUNREACH", Control::Instead(loopback));
}

test!(Both, names_do_not_resolve_and_nothing_hangs);
fn names_do_not_resolve_and_nothing_hangs() {
    let code = "import socket, time\nbegin = time.time()\nfor name in ('example.com', 'metadata.google.internal', 'canary-name.invalid'):\n    try: print(socket.getaddrinfo(name, 80))\n    except socket.gaierror: print('no')\nprint(socket.gethostbyname('localhost'), time.time() - begin < 3)";
    python(code).succeeded().expect(json!({"output": "no\nno\nno\n127.0.0.1 True\n"}));
}

test!(Both, packages_cannot_be_installed);
fn packages_cannot_be_installed() {
    let code = "import subprocess, sys\nfor c in ([sys.executable, '-m', 'pip', 'install', '--retries', '0', '--timeout', '2', '--break-system-packages', 'requests'], ['apt-get', 'install', '-y', 'hello'], ['npm', 'install', '--fetch-retries=0', '--no-audit', '--no-update-notifier', 'left-pad']):\n    try: print(subprocess.run(c, stdout=subprocess.PIPE, stderr=subprocess.STDOUT).returncode != 0)\n    except FileNotFoundError: print(True)\nopen('own.py','w').write('x = 7')\nimport own; print(own.x)";
    let done = exec(json!({"code": code, "limits": {"wall": scaled_limit(25_000)}}));
    done.succeeded().expect(json!({"output": "True\nTrue\nTrue\n7\n"}));
}

test!(serial Both, a_fork_bomb_leaves_nothing_behind);
fn a_fork_bomb_leaves_nothing_behind() {
    let mark = format!("600.{}3", std::process::id());
    let code = format!(
        "import os\nfor _ in range(10):\n    try:\n        if os.fork() == 0: os.execvp('sleep', ['sleep', '{mark}'])\n    except OSError: pass\ntry:\n    while True: os.fork()\nexcept OSError: pass"
    );
    let begin = Instant::now();
    exec(json!({"code": code, "limits": {"wall": scaled_limit(20_000), "processes": 60}})).expect(json!({"started": true}));
    assert!(begin.elapsed() < scaled(Duration::from_secs(22)));
    no_process_is_left(&mark);
}

test!(Both, ten_gigabytes_of_memory_are_not_there, needs[Cgroup]);
fn ten_gigabytes_of_memory_are_not_there() {
    // In pieces: what is more than the whole machine has the kernel refuses at once.
    let code = "held = [bytearray(1 << 30) for _ in range(10)]\nprint('held')";
    exec(json!({"code": code})).expect(json!({"verdict": "out_of_memory", "code": 137, "output": ""}));
    exec(json!({"code": "x = bytearray(100 << 20)\nprint('held')"})).succeeded();
}

test!(Both, ten_gigabytes_of_address_space_are_refused_without_a_cgroup, needs[NoCgroup]);
fn ten_gigabytes_of_address_space_are_refused_without_a_cgroup() {
    let done = exec(json!({"code": "x = bytearray(10 << 30)\nprint('held')"}));
    done.expect(json!({"verdict": "exited", "code": 1, "output": ""}));
    assert!(done.error().contains("MemoryError"), "{}", done.brief());
    exec(json!({"code": "x = bytearray(100 << 20)\nprint('held')"})).succeeded();
}

fn free_bytes() -> u64 {
    let output = Command::new("stat").args(["-f", "-c", "%f %S"]).arg(directory()).output().unwrap();
    let said = String::from_utf8(output.stdout).unwrap();
    said.split_whitespace().map(|number| number.parse::<u64>().unwrap()).product()
}

test!(serial Both, the_hosts_disk_cannot_be_filled);
fn the_hosts_disk_cannot_be_filled() {
    let before = free_bytes();
    let code = "import os\nfor where in ('.', '/tmp', '/dev/shm', '/home/sandbox'):\n    try:\n        for i in range(1000): open(f'{where}/f{i}', 'wb').write(b'x' * (8 << 20))\n    except OSError as e: print(where, e.errno)";
    let done = exec(json!({"code": code, "limits": {"scratch_size": "32MiB", "tmp_size": "32MiB"}}));
    done.succeeded().expect(json!({"output": ". 28\n/tmp 28\n/dev/shm 28\n/home/sandbox 28\n"}));
    // Nothing of it was the disk's; a busy host may write a little itself.
    assert!(before.saturating_sub(free_bytes()) < 24 << 20);
}

test!(Both, a_sparse_file_of_terabytes_takes_no_room);
fn a_sparse_file_of_terabytes_takes_no_room() {
    denied("with open('f', 'w') as f: f.truncate(1 << 40)", "EFBIG", Control::Instead("with open('f', 'w') as f: f.truncate(1 << 26)"));
}

test!(serial Both, an_endless_loop_ends);
fn an_endless_loop_ends() {
    let begin = Instant::now();
    exec(json!({"code": "while True: pass", "limits": {"wall": scaled_limit(300)}}))
        .expect(json!({"verdict": "wall_timeout", "code": 124}));
    assert!(begin.elapsed() < scaled(Duration::from_secs(4)));
}

test!(Both, the_launcher_and_pid_one_cannot_be_killed);
fn the_launcher_and_pid_one_cannot_be_killed() {
    let own = "p = subprocess.Popen(['sleep', '60'])\nos.kill(p.pid, 9)\np.wait()";
    let own_by_pidfd = "p = subprocess.Popen(['sleep', '60'])\nsignal.pidfd_send_signal(os.pidfd_open(p.pid), 9)\np.wait()";
    let mut acts: Vec<(String, &str)> = [9, 15, 19, 0].map(|signal| (format!("os.kill(1, {signal})"), own)).into();
    acts.push((String::from("signal.pidfd_send_signal(os.pidfd_open(1), 9)"), own_by_pidfd));
    if stockade_sys::landlock::abi() >= 6 {
        for (act, control) in &acts {
            denied(act, "EPERM", Control::Instead(control));
        }
    } else {
        // Without Landlock's scopes the kernel takes the signal, and drops it: pid 1 of a
        // namespace gets none from inside. Its end would have been the run's.
        let all: String = acts.iter().map(|(act, _)| format!("{act}\ntime.sleep(0.2)\n")).collect();
        for code in [&all, own, own_by_pidfd] {
            assert_eq!(python(&program(code)).succeeded().json(), "ok", "{code}");
        }
    }
    // The launcher's own number means nothing inside.
    let other = Command::new("sleep").arg("600").spawn().unwrap();
    let act = format!("os.kill({}, 9)", other.id());
    denied(&act, "ESRCH", Control::Outside);
    let mut other = other;
    other.wait().unwrap();
}

test!(Both, killing_everything_kills_only_the_run);
fn killing_everything_kills_only_the_run() {
    let code = "import os, signal, subprocess\np = subprocess.Popen(['sleep', '600'])\nos.kill(-1, signal.SIGKILL)\nprint(p.wait())\nprint('still here')";
    python(code).succeeded().expect(json!({"output": "-9\nstill here\n"}));
}

test!(Both, nothing_can_be_written_through_proc);
fn nothing_can_be_written_through_proc() {
    // What belongs to the host's root is refused by its mode, the rest by the mount.
    for (path, errno) in [
        ("/proc/sys/kernel/core_pattern", "EACCES"),
        ("/proc/sys/kernel/hostname", "EACCES"),
        ("/proc/sys/vm/drop_caches", "EACCES"),
        ("/proc/self/oom_score_adj", "EROFS"),
        ("/proc/self/mem", "EROFS"),
        ("/proc/self/uid_map", "EROFS"),
        ("/proc/self/setgroups", "EROFS"),
        ("/proc/self/attr/current", "EROFS"),
        ("/proc/self/coredump_filter", "EROFS"),
        ("/proc/self/exe", "EACCES"),
        ("/proc/1/mem", "EACCES"),
        ("/proc/1/exe", "EACCES"),
        ("/proc/1/oom_score_adj", "EACCES"),
        ("/proc/1/uid_map", "EACCES"),
    ] {
        denied(
            &format!("os.close(os.open({path:?}, os.O_WRONLY))"),
            errno,
            Control::Instead("write('/tmp/f')\nos.close(os.open('/tmp/f', os.O_WRONLY))"),
        );
    }
    // One's own, outside: the file system's flag is what refuses it inside.
    denied("write('/proc/self/oom_score_adj', '1000')", "EROFS", Control::Outside);
    // A kernel need not have these.
    for path in ["/proc/sysrq-trigger", "/proc/kcore", "/proc/sys/kernel/modprobe"] {
        let done = exec(json!({"code": program(&format!("os.close(os.open({path:?}, os.O_WRONLY))"))}));
        let answer = done.succeeded().json();
        assert!(["EROFS", "EACCES", "ENOENT"].iter().any(|errno| answer == *errno), "{path}: {answer}");
    }
}

test!(Both, the_hosts_program_is_unchanged_by_writing_to_proc_exe);
fn the_hosts_program_is_unchanged_by_writing_to_proc_exe() {
    let hash = |path: &str| {
        let output = Command::new("sha256sum").arg(path).output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    };
    let program = program_path().unwrap();
    let before = (hash(text(&program)), hash("/usr/bin/python3"));
    let code = "import os\nfor path in ('/proc/self/exe', '/proc/1/exe', '/usr/bin/python3', os.path.realpath('/proc/self/exe')):\n    for flags in (os.O_WRONLY, os.O_RDWR, os.O_WRONLY | os.O_TRUNC):\n        try: os.write(os.open(path, flags), b'x'); print('wrote', path)\n        except OSError: pass";
    python(code).succeeded().expect(json!({"output": ""}));
    assert_eq!(before, (hash(text(&program)), hash("/usr/bin/python3")));
}

test!(Both, set_id_bits_cannot_be_planted, needs[Program("stat")], seconds 60);
fn set_id_bits_cannot_be_planted() {
    let scratch = scratch();
    let request = json!({"scratch": text(&scratch)});
    let acts = [
        ("write('f')\nos.chmod('f', 0o{m}755)", "chmod"),
        ("write('f')\nfd = os.open('f', os.O_RDONLY)\nos.fchmod(fd, 0o{m}755)", "fchmod"),
        ("write('f')\ncall(268, -100, b'f', 0o{m}755)", "fchmodat"),
        ("os.close(os.open('g{m}', os.O_CREAT | os.O_WRONLY, 0o{m}755))", "openat"),
        ("call(85, b'h{m}', 0o{m}755)", "creat"),
        ("call(2, b'i{m}', 0o101, 0o{m}755)", "open"),
        ("call(133, b'k{m}', 0o10{m}755, 0)", "mknod"),
        ("os.mkdir('d{m}', 0o{m}755)", "mkdir"),
        ("fd = os.open('.', 0o20200000 | os.O_WRONLY, 0o{m}755)", "tmpfile"),
    ];
    for (act, name) in acts {
        for bits in ["6", "4", "2"] {
            let done = denied_in(request.clone(), &act.replace("{m}", bits), "EPERM", Control::Instead(&act.replace("{m}", "0")));
            assert_eq!(done["denials"].as_array().map(Vec::len), Some(1), "{name}: {}", done.brief());
            // The twins of the control made files that would be in the way of the next.
            for entry in fs::read_dir(&scratch).unwrap().flatten() {
                assert_eq!(set_id_bits(&entry.path()), 0, "{name}");
                let path = entry.path();
                if path.is_dir() { fs::remove_dir(path).unwrap() } else { fs::remove_file(path).unwrap() }
            }
        }
    }
    // openat2 carries its mode in memory: it does not exist.
    denied_in(request.clone(), "call(437, -100, b'o', struct.pack('QQQ', 0o101, 0o6755, 0), 24)", "ENOSYS", Control::Outside);
    // High halves of an argument do not hide the bits: the kernel reads the low one.
    denied_in(
        request,
        "write('f')\ncall(90, b'f', 0x100000000 | 0o6755)",
        "EPERM",
        Control::Instead("write('f')\ncall(90, b'f', 0x100000000 | 0o755)"),
    );
    // The files of a request get none either.
    exec(json!({"code": "", "scratch": text(&scratch), "files": {"given": "x"}})).succeeded();
    assert_eq!(set_id_bits(&scratch.join("given")), 0);
}

test!(Both, special_files_cannot_be_planted);
fn special_files_cannot_be_planted() {
    let scratch = scratch();
    let request = || json!({"scratch": text(&scratch)});
    denied_in(request(), "os.mkfifo('fifo')", "EACCES", Control::Instead("os.mkfifo(os.environ['TMPDIR'] + '/fifo')"));
    let bind = "s = socket.socket(socket.AF_UNIX)\ns.bind(PATH)";
    denied_in(
        request(),
        &bind.replace("PATH", "'socket'"),
        "EACCES",
        Control::Instead(&bind.replace("PATH", "os.environ['TMPDIR'] + '/socket'")),
    );
    for (kind, name) in [("stat.S_IFCHR", "character"), ("stat.S_IFBLK", "block")] {
        let act = format!("os.mknod({name:?}, {kind} | 0o666, os.makedev(1, 5))");
        denied_in(request(), &act, "EPERM", Control::Instead(&format!("os.mknod({name:?}, stat.S_IFREG | 0o666)\nos.unlink({name:?})")));
        let act = act.replace("os.mknod(\"", "os.mknod(\"/tmp/");
        denied_in(request(), &act, "EPERM", Control::Instead("os.mknod('/tmp/plain', stat.S_IFREG | 0o666)"));
    }
    assert_eq!(fs::read_dir(&scratch).unwrap().count(), 0);
}

/// A policy in scratch, where none must be looked for.
const LOOSE: &str = "schema = 1\ndescription = \"planted\"\nextends = \"default\"\n[environment.set]\nPLANTED = \"yes\"\n";

test!(Both, a_planted_policy_is_not_found_by_the_next_run);
fn a_planted_policy_is_not_found_by_the_next_run() {
    let scratch = scratch();
    let names = [
        "default.toml",
        "default",
        "policies/default.toml",
        ".config/stockade/policies/default.toml",
        "stockade/policies/default.toml",
        "stockade.toml",
    ];
    let files: serde_json::Map<String, serde_json::Value> = names.iter().map(|name| ((*name).to_owned(), json!(LOOSE))).collect();
    exec(json!({"code": "", "scratch": text(&scratch), "files": files})).succeeded();
    for name in names.iter().filter(|name| **name != "default") {
        assert!(scratch.join(name).exists(), "{name}");
    }
    let request = json!({"code": "import os; print(os.environ.get('PLANTED'))", "scratch": text(&scratch)}).to_string();
    let mut next = stockade(["exec"]);
    let done = ExecResult::of(run_with_stdin(next.current_dir(&scratch), request.as_bytes()));
    done.succeeded().expect(json!({"output": "None\n"}));
    assert_eq!(done["policy"]["origin"], "shipped");
    // Not even asked for by its path, for a run in the same scratch. The control: for another
    // an ordinary user gets it; root does not believe it.
    let ask = |request: &str| {
        let mut asked = stockade(["exec", "--policy", "./default.toml"]);
        ExecResult::of(run_with_stdin(asked.current_dir(&scratch), request.as_bytes()))
    };
    let elsewhere = json!({"code": "import os; print(os.environ.get('PLANTED'))"}).to_string();
    if is_root() {
        ask(&elsewhere).broke("policy_unreadable", &["not trusted"]);
    } else {
        ask(&request).refused("scratch_holds_a_policy", &["default.toml"]);
        ask(&elsewhere).succeeded().expect(json!({"output": "yes\n"}));
    }
}

test!(Both, a_planted_module_is_not_found_by_the_next_run);
fn a_planted_module_is_not_found_by_the_next_run() {
    let scratch = scratch();
    let code = "import os\nfor d in (os.path.expanduser('~/.local/lib/python3/site-packages'), '/tmp'):\n    os.makedirs(d, exist_ok=True); open(d + '/usercustomize.py','w').write('print(\"planted\")'); open(d + '/sitecustomize.py','w').write('print(\"planted\")')\nopen(os.path.expanduser('~/.bashrc'),'w').write('echo planted')";
    exec(json!({"code": code, "scratch": text(&scratch)})).succeeded();
    python("print('clean')").succeeded().expect(json!({"output": "clean\n"}));
    exec(json!({"code": "print('clean')", "scratch": text(&scratch)})).succeeded().expect(json!({"output": "clean\n"}));
}

test!(Both, a_planted_link_does_not_lead_the_next_run_astray);
fn a_planted_link_does_not_lead_the_next_run_astray() {
    let home = Home::new();
    let scratch = scratch();
    let target = home.path.join(".netrc");
    let code = format!("import os\nos.symlink({:?}, 'data.txt'); os.symlink({:?}, 'dir')", text(&target), text(&home.path));
    exec(json!({"code": code, "scratch": text(&scratch)})).succeeded();
    exec(json!({"code": "", "scratch": text(&scratch), "files": {"data.txt": "overwritten"}})).refused("files_not_writable", &["data.txt"]);
    exec(json!({"code": "", "scratch": text(&scratch), "files": {"dir/.netrc": "overwritten"}}))
        .refused("files_not_writable", &["dir/.netrc"]);
    let done = exec(json!({"code": "", "scratch": text(&scratch), "collect": ["data.txt", "dir/**", "dir/.netrc"]}));
    does_not_hold(done.succeeded(), &home.secret);
    home.is_unchanged();
}

test!(serial Both, a_background_child_that_holds_stdout_delays_nothing_and_dies);
fn a_background_child_that_holds_stdout_delays_nothing_and_dies() {
    for language in ["python", "bash"] {
        let mark = format!("600.{}4", std::process::id());
        let code = match language {
            "python" => format!("import subprocess\nsubprocess.Popen(['sleep', '{mark}'], start_new_session=True)\nprint('done')"),
            _ => format!("setsid sleep {mark} &\nnohup sleep {mark} 2>/dev/null &\necho done"),
        };
        let begin = Instant::now();
        exec(json!({"code": code, "language": language})).succeeded().expect(json!({"output": "done\n"}));
        assert!(begin.elapsed() < scaled(Duration::from_secs(3)), "{:?}", begin.elapsed());
        no_process_is_left(&mark);
    }
}

test!(Both, a_daemon_that_ignores_signals_dies_with_the_run);
fn a_daemon_that_ignores_signals_dies_with_the_run() {
    let mark = format!("600.{}5", std::process::id());
    let code = format!(
        "import os, signal\nif os.fork() == 0:\n    os.setsid()\n    for s in (1, 2, 3, 13, 15): signal.signal(s, signal.SIG_IGN)\n    if os.fork() == 0: os.execvp('sleep', ['sleep', '{mark}'])\n    os._exit(0)\nos.wait()\nprint('done')"
    );
    exec(json!({"code": code})).succeeded().expect(json!({"output": "done\n"}));
    no_process_is_left(&mark);
}

test!(serial Both, orphans_without_end_do_not_hold_up_the_end);
fn orphans_without_end_do_not_hold_up_the_end() {
    let mark = format!("600.{}7", std::process::id());
    // A process is always there that pid 1 has to wait for.
    let code = format!(
        "import os, time\nif os.fork() == 0:\n    if os.fork() == 0: os.execvp('sleep', ['sleep', '{mark}'])\n    for stream in (0, 1, 2): os.close(stream)\n    while True:\n        if os.fork() == 0:\n            if os.fork() == 0: os._exit(0)\n            os._exit(0)\n        try: os.waitpid(-1, os.WNOHANG)\n        except ChildProcessError: pass\ntime.sleep(0.3)\nprint('done')"
    );
    let begin = Instant::now();
    exec(json!({"code": code})).succeeded().expect(json!({"output": "done\n"}));
    assert!(begin.elapsed() < scaled(Duration::from_secs(4)), "{:?}", begin.elapsed());
    no_process_is_left(&mark);
}

test!(Both, output_that_is_closed_early_ends_nothing);
fn output_that_is_closed_early_ends_nothing() {
    let code = "import os, sys, time\nprint('said', flush=True)\nos.close(1); os.close(2)\ntime.sleep(0.3)\nopen('late', 'w').write('written')\nos._exit(7)";
    let done = exec(json!({"code": code, "collect": ["late"]}));
    done.expect(json!({"verdict": "exited", "code": 7, "output": "said\n"}));
    assert_eq!(done.file("late")["text"], "written");
    assert!(done["duration_ms"].as_u64().is_some_and(|ms| ms >= 300), "{}", done.brief());
}

test!(Both, names_with_escapes_and_line_breaks_do_no_harm);
fn names_with_escapes_and_line_breaks_do_no_harm() {
    let scratch = scratch();
    let code = "import os\nfor name in (b'a\\nb', b'\\xff\\xfe', b'\\x1b[31m', b'\\\"}{', b'*', b'-rf'): open(name, 'w').write('x')";
    let done = exec(json!({"code": code, "scratch": text(&scratch), "collect": ["**", "*"]}));
    done.succeeded();
    let files = done["files"].as_array().unwrap();
    assert!(files.iter().any(|file| file["path"] == "a\nb" && file["text"] == "x"), "{}", done.brief());
    assert!((5..=6).contains(&files.len()), "{}", done.brief());
    let again = exec(json!({"code": "import os; print(len(os.listdir('.')))", "scratch": text(&scratch)}));
    again.succeeded().expect(json!({"output": "7\n"}));
}
