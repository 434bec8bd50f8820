//! The kernel's surface: what the code can see and touch, and how a denial is worded. Which
//! system calls are refused, and with which errno, is tried in `filters.rs`, call by call.

use std::{
    collections::BTreeSet,
    fs::{self, Permissions},
    os::unix::{fs::PermissionsExt, net::UnixDatagram},
};

use serde_json::{Value, json};

use crate::support::{
    control::{Control, denied, denied_in},
    exec::{ExecResult, exec, exec_with, python, run_under, run_with_stdin, scratch, scratch_named, text, token, write_file},
    policy_dir::{PolicyDirectory, derived},
    runner::{directory, test},
};

/// Root of a user namespace of one's own, outside.
const ROOTED: &[&str] = &["unshare", "--user", "--map-root-user"];

test!(Both, a_refused_socket_family_is_named_and_no_policy_may_allow_it);
fn a_refused_socket_family_is_named_and_no_policy_may_allow_it() {
    // AF_ALG, VSOCK, PACKET, KEY, TIPC, XDP, CAN, BLUETOOTH, RDS, NFC, SMC, QIPCRTR.
    let families = [38, 40, 17, 15, 30, 44, 29, 31, 21, 39, 43, 42];
    let done = python(&format!(
        "import socket\nfor family in {families:?}:\n    try: socket.socket(family, 1, 0)\n    except PermissionError: print('refused')"
    ));
    done.succeeded().expect(json!({"output": "refused\n".repeat(families.len())}));
    let denials = done["denials"].as_array().unwrap();
    assert_eq!(denials.len(), families.len(), "{denials:?}");
    for denial in denials {
        let what = denial["what"].as_str().unwrap();
        assert!(what.starts_with("socket(") && denial["rule"] == "[seccomp] socket_families", "{denial}");
        assert!(denial["allow"].is_null(), "no policy may allow it: {denial}");
    }
}

test!(Both, a_raw_socket_that_the_filter_passes_needs_a_capability);
fn a_raw_socket_that_the_filter_passes_needs_a_capability() {
    denied(
        "socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_TCP)",
        "EPERM",
        Control::Behind(&["unshare", "--user", "--map-root-user", "--net"]),
    );
}

test!(Both, typing_into_a_terminal_is_refused);
fn typing_into_a_terminal_is_refused() {
    let act = "fd = os.open('/dev/null', os.O_RDWR)\ncall(16, fd, 0x5412, ctypes.create_string_buffer(b'x'))";
    let done = denied(act, "EPERM", Control::Reaches(&["ENOTTY"]));
    assert_eq!(done["denials"][0]["what"], "ioctl(TIOCSTI)", "{}", done.brief());
}

fn denials_of(options: &[&str], act: &str) -> ExecResult {
    let done = exec_with(options, json!({"code": format!("import ctypes, socket, os, fcntl\ntry:\n    {act}\nexcept OSError: pass")}));
    done.succeeded();
    done
}

test!(Both, a_denial_names_the_call_and_the_line_that_allows_it);
fn a_denial_names_the_call_and_the_line_that_allows_it() {
    let act = "ctypes.CDLL(None).ptrace(0, 0, 0, 0)";
    let done = denials_of(&[], act);
    assert_eq!(
        done["denials"],
        json!([{"kind": "syscall", "what": "ptrace", "count": 1, "answer": "EPERM", "rule": "[seccomp] allow", "allow": "[seccomp] allow = { add = [\"ptrace\"] }"}])
    );
    // Word for word in a policy, the line does allow it.
    denied("call(101, 0, 0, 0, 0)", "EPERM", Control::Lifted("[seccomp]\nallow = { add = [\"ptrace\"] }"));
}

test!(Both, a_denial_that_no_policy_may_allow_names_no_line);
fn a_denial_that_no_policy_may_allow_names_no_line() {
    let done = denials_of(&[], "ctypes.CDLL(None).unshare(0x10000000)");
    assert_eq!((&done["denials"][0]["what"], &done["denials"][0]["allow"]), (&json!("unshare"), &Value::Null));
    let policies = PolicyDirectory::new();
    let policy = policies.write("never", &derived("[seccomp]\nallow = { add = [\"unshare\"] }"));
    exec_with(&["--policy", &policy], json!({"code": ""})).broke("policy_invalid", &["unshare", "namespaces"]);
}

test!(Both, every_line_that_a_denial_names_is_a_valid_policy);
fn every_line_that_a_denial_names_is_a_valid_policy() {
    let strict = derived("[seccomp]\nsocket_families = { remove = [\"inet\"] }\nioctl = { remove = [\"FIONREAD\"] }");
    let policies = PolicyDirectory::new();
    let narrow = policies.write("narrow", &strict);
    for (act, what) in [
        ("socket.socket(socket.AF_INET)", "socket(AF_INET, type 1, protocol 0)"),
        ("fcntl.ioctl(0, 0x541B, bytes(4))", "ioctl(FIONREAD)"),
        ("fcntl.ioctl(0, 0xabcd, bytes(4))", "ioctl(0xabcd)"),
        ("os.setuid(1000)", "setuid"),
    ] {
        let done = denials_of(&["--policy", &narrow], act);
        let denial = &done["denials"][0];
        assert_eq!(denial["what"], what);
        let line = denial["allow"].as_str().unwrap_or_else(|| panic!("{denial}"));
        let (section, rest) = line.split_once("] ").unwrap();
        let allowing = policies.write("allowing", &format!("schema = 1\ndescription = \"x\"\nextends = \"default\"\n{section}]\n{rest}\n"));
        let checked = crate::support::exec::stockade(["policy", "check", &allowing]).output().unwrap();
        let said = String::from_utf8_lossy(&checked.stderr).into_owned();
        // What default allows already, adding is an error.
        assert!(checked.status.success() || said.contains("already"), "{line}: {said}");
        if checked.status.success() {
            assert_eq!(denials_of(&["--policy", &allowing], act)["denials"], json!([]), "{line}");
        }
    }
}

test!(Both, denials_are_counted_and_bounded);
fn denials_are_counted_and_bounded() {
    let done = python(
        "import ctypes\nl = ctypes.CDLL(None)\nfor _ in range(500): l.unshare(0x10000000)\nfor n in range(300): l.syscall(16, 0, 0xab0000 + n, 0)\nprint('done')",
    );
    done.succeeded().expect(json!({"output": "done\n"}));
    let denials = done["denials"].as_array().unwrap();
    assert_eq!((denials[0]["what"].as_str(), denials[0]["count"].as_u64()), (Some("unshare"), Some(500)));
    assert!(denials.len() <= 200, "{}", denials.len());
    let listed: u64 = denials.iter().map(|denial| denial["count"].as_u64().unwrap()).sum();
    assert_eq!(listed + done["denials_omitted"].as_u64().unwrap(), 800);
}

test!(Both, no_capability_is_left_and_none_can_be_gained);
fn no_capability_is_left_and_none_can_be_gained() {
    let code =
        "import json\nprint(json.dumps(dict(l.split(':\\t', 1) for l in open('/proc/self/status').read().splitlines() if ':\\t' in l)))";
    let done = python(code);
    let status = done.succeeded().json();
    for set in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
        assert_eq!(status[set], "0000000000000000", "{set}");
    }
    assert_eq!((&status["NoNewPrivs"], &status["Seccomp"]), (&json!("1"), &json!("2")));
    assert_eq!((&status["Uid"], &status["Gid"]), (&json!("1000\t1000\t1000\t1000"), &json!("1000\t1000\t1000\t1000")));
    // securebits: locked, so that not even uid 0 of some namespace would regain any.
    let bits = python("import ctypes; print(ctypes.CDLL(None).prctl(27, 0, 0, 0, 0))");
    let bits: u32 = bits.succeeded().output().trim().parse().unwrap();
    assert_eq!(bits & 0b1010_1010, 0b1010_1010, "locks of securebits {bits:#b}");
    denied(
        "call(126, ctypes.create_string_buffer(struct.pack('Ii', 0x20080522, 0)), ctypes.create_string_buffer(bytes(24)))",
        "EPERM",
        Control::Outside,
    );
}

test!(Both, a_filter_is_in_force_and_cannot_be_replaced);
fn a_filter_is_in_force_and_cannot_be_replaced() {
    let code = "import re\ns = open('/proc/self/status').read()\nprint(re.search('Seccomp:\\t(\\\\d)', s)[1], int(re.search('Seccomp_filters:\\t(\\\\d+)', s)[1]) >= 1)";
    python(code).succeeded().expect(json!({"output": "2 True\n"}));
}

test!(Both, pid_one_shows_nothing_of_itself);
fn pid_one_shows_nothing_of_itself() {
    for name in ["environ", "mem", "maps", "fd", "io", "auxv", "syscall", "stack", "task/1/environ", "ns/user", "map_files"] {
        let act = format!(
            "p = '/proc/PID/{name}'\nos.listdir(p) if os.path.isdir(p) else os.readlink(p) if os.path.islink(p) else os.open(p, os.O_RDONLY)"
        );
        let done = exec(json!({"code": crate::support::control::program(&act.replace("PID", "1"))}));
        let answer = done.succeeded().json();
        assert!(answer == "EACCES" || answer == "EPERM" || (name == "stack" && answer == "ENOENT"), "/proc/1/{name}: {answer}");
    }
    for name in ["environ", "mem", "maps", "fd", "auxv"] {
        let act = format!("p = '/proc/PID/{name}'\nos.listdir(p) if os.path.isdir(p) else os.open(p, os.O_RDONLY)");
        denied(&act.replace("PID", "1"), "EACCES", Control::Instead(&act.replace("PID", "self")));
    }
    for name in ["exe", "cwd", "root"] {
        denied(&format!("os.readlink('/proc/1/{name}')"), "EACCES", Control::Instead(&format!("os.readlink('/proc/self/{name}')")));
    }
    denied("os.listdir('/proc/1/root/')", "EACCES", Control::Instead("os.listdir('/proc/self/root/')"));
}

test!(Both, only_the_runs_own_processes_are_seen);
fn only_the_runs_own_processes_are_seen() {
    let code = "import os, subprocess\np = subprocess.Popen(['sleep', '60'])\nprint(sorted(int(n) for n in os.listdir('/proc') if n.isdigit()), os.getpid(), os.getppid(), p.pid)\np.kill()";
    python(code).succeeded().expect(json!({"output": "[1, 2, 3] 2 1 3\n"}));
    for call in ["os.getpgid(3000)", "os.kill(3000, 0)", "os.sched_getaffinity(3000)"] {
        let twin = call.replace("3000", "os.getpid()");
        denied(call, "ESRCH", Control::Instead(&twin));
    }
}

test!(Both, secrets_of_the_kernel_are_masked);
fn secrets_of_the_kernel_are_masked() {
    let code = "import json, os\nr = {}\nfor n in ('kcore', 'keys', 'key-users', 'timer_list', 'interrupts', 'sched_debug', 'locks'):\n    try: r[n] = len(open('/proc/' + n, 'rb').read(100))\n    except OSError as e: r[n] = e.errno\nprint(json.dumps(r))";
    let done = python(code);
    for (name, found) in done.succeeded().json().as_object().unwrap() {
        // Empty, or not there at all on this kernel.
        assert!(*found == 0 || *found == 2, "{name}: {found}");
    }
    let outside = run_with_stdin(&mut run_under(&["/usr/bin/python3", "-"]), code.as_bytes());
    let outside: Value = serde_json::from_slice(&outside.stdout).unwrap();
    assert!(outside["interrupts"].as_u64() > Some(2), "the control: {outside}");
    // Addresses of the kernel are zeros.
    let addresses = python("print({l.split()[0] for l in open('/proc/kallsyms')} <= {'0' * 16})");
    addresses.succeeded().expect(json!({"output": "True\n"}));
}

test!(Both, nothing_is_writable_but_what_is_said);
fn nothing_is_writable_but_what_is_said() {
    let code = r#"
import json, os, stat, sys
found = []
for top, directories, files in os.walk("/"):
    if top.startswith("/proc") or top.count("/") > 3 and top.startswith("/usr"):
        directories.clear()
        continue
    try:
        name = os.path.join(top, ".probe")
        os.close(os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        os.unlink(name)
        found.append(top)
        directories.clear()
    except OSError:
        pass
    for file in files:
        path = os.path.join(top, file)
        try:
            if path != sys.argv[0] and stat.S_ISREG(os.lstat(path).st_mode):
                os.close(os.open(path, os.O_WRONLY))
                found.append(path)
        except OSError:
            pass
print(json.dumps(sorted(found)))
"#;
    let done = python(code);
    assert_eq!(done.succeeded().json(), json!(["/dev/shm", "/home/sandbox", "/scratch", "/tmp"]));
    let scratch = scratch();
    let done = exec(json!({"code": code, "scratch": text(&scratch)}));
    // A host scratch below /tmp is within what was found writable there.
    assert_eq!(done.succeeded().json(), json!(["/dev/shm", "/home/sandbox", "/tmp"]));
    for path in ["/x", "/usr/x", "/etc/x", "/bin/x", "/dev/x", "/sys/x", "/home/x"] {
        denied(&format!("write({path:?})"), "EROFS", Control::Instead("write('/tmp/x')"));
    }
}

test!(Both, every_other_mount_is_read_only);
fn every_other_mount_is_read_only() {
    let code =
        "import json\nrows = [l.split() for l in open('/proc/self/mountinfo')]\nprint(json.dumps({r[4]: r[5].split(',') for r in rows}))";
    let done = python(code);
    let mounts = done.succeeded().json();
    let writable: BTreeSet<&str> = mounts
        .as_object()
        .unwrap()
        .iter()
        .filter(|(_, options)| options.as_array().unwrap().contains(&json!("rw")))
        .map(|(path, _)| path.as_str())
        .collect();
    assert_eq!(writable, BTreeSet::from(["/tmp", "/dev/shm", "/home/sandbox", "/scratch"]));
    for (path, options) in mounts.as_object().unwrap() {
        assert!(options.as_array().unwrap().contains(&json!("nosuid")), "{path}: {options}");
        let device = ["null", "zero", "full", "random", "urandom", "tty"].iter().any(|name| *path == format!("/dev/{name}"));
        assert!(device || options.as_array().unwrap().contains(&json!("nodev")), "{path}: {options}");
    }
}

test!(Both, the_root_holds_nothing_of_the_host_but_what_the_policy_names);
fn the_root_holds_nothing_of_the_host_but_what_the_policy_names() {
    let done = python(
        "import json, os\nprint(json.dumps([sorted(os.listdir(p)) for p in ('/', '/dev', '/home', '/tmp', '/scratch', '/run', '/run/stockade')]))",
    );
    let listed = done.succeeded().json();
    let root: BTreeSet<&str> = listed[0].as_array().unwrap().iter().filter_map(Value::as_str).collect();
    let known = ["bin", "dev", "etc", "home", "lib", "lib32", "lib64", "libx32", "proc", "run", "sbin", "scratch", "sys", "tmp", "usr"];
    assert!(root.iter().all(|name| known.contains(name)), "{root:?}");
    assert_eq!(listed[1], json!(["fd", "full", "null", "random", "shm", "stderr", "stdin", "stdout", "tty", "urandom", "zero"]));
    assert_eq!(listed[2], json!(["sandbox"]));
    assert_eq!((&listed[5], &listed[6]), (&json!(["stockade"]), &json!(["bin"])));
    assert_eq!(listed[3], json!([]));
    assert_eq!(listed[4].as_array().map(Vec::len), Some(1), "the program alone");
    denied("os.listdir('/sys/fs/cgroup')", "ENOENT", Control::Outside);
    denied("os.listdir('/var')", "ENOENT", Control::Outside);
    denied("os.listdir('/run/lock')", "ENOENT", Control::Outside);
}

const DESCRIPTORS: &str = "import json, os\nfound = []\nfor fd in range(4096):\n    try: os.fstat(fd); found.append(fd)\n    except OSError: pass\nprint(json.dumps(found))";

test!(Both, only_three_descriptors_are_open);
fn only_three_descriptors_are_open() {
    assert_eq!(python(DESCRIPTORS).succeeded().json(), json!([0, 1, 2]));
    let done = python("import os, stat\nprint([stat.S_IFMT(os.fstat(fd).st_mode) == stat.S_IFIFO for fd in (1, 2)])");
    done.succeeded().expect(json!({"output": "[True, True]\n"}));
}

test!(Both, descriptors_of_the_launcher_do_not_come_in);
/// A launcher that was started with two hundred descriptors, among them a connected
/// socket and the host's root directory.
fn descriptors_of_the_launcher_do_not_come_in() {
    let starter = r#"
import os, socket, sys
server = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(server.getsockname())
held = [client.fileno(), os.open("/", os.O_RDONLY | os.O_DIRECTORY), os.open("/etc/passwd", os.O_RDONLY)]
held += [os.open("/dev/null", os.O_RDWR) for _ in range(200)]
for fd in held:
    os.set_inheritable(fd, True)
os.execv(sys.argv[1], [sys.argv[1], "exec"])
"#;
    let program = crate::support::exec::program_path().unwrap();
    let mut command = run_under(&["/usr/bin/python3", "-c", starter, text(&program)]);
    let done = ExecResult::of(run_with_stdin(&mut command, json!({"code": DESCRIPTORS}).to_string().as_bytes()));
    assert_eq!(done.succeeded().json(), json!([0, 1, 2]));
    // The control: without the launcher the same program finds them.
    let direct = starter
        .replace("os.execv(sys.argv[1], [sys.argv[1], \"exec\"])", "os.execv(sys.executable, [sys.executable, '-c', sys.stdin.read()])");
    let output = run_with_stdin(&mut run_under(&["/usr/bin/python3", "-c", &direct]), DESCRIPTORS.as_bytes());
    let found: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(found.as_array().unwrap().len() > 200, "{found}");
}

test!(Both, the_network_is_lo_alone_and_it_is_up);
fn the_network_is_lo_alone_and_it_is_up() {
    let code = "import socket, fcntl, struct, threading\nprint([n for _, n in socket.if_nameindex()])\ns = socket.socket()\nflags = struct.unpack('H', fcntl.ioctl(s, 0x8913, struct.pack('16sH14x', b'lo', 0))[16:18])[0]\nprint(bool(flags & 1))\nfor family, host in ((socket.AF_INET, '127.0.0.1'), (socket.AF_INET6, '::1')):\n    server = socket.create_server((host, 0), family=family)\n    threading.Thread(target=lambda: server.accept()[0].sendall(b'hello')).start()\n    print(socket.create_connection(server.getsockname()[:2]).recv(5))";
    python(code).succeeded().expect(json!({"output": "['lo']\nTrue\nb'hello'\nb'hello'\n"}));
    denied(
        "s = socket.socket()\nfcntl.ioctl(s, 0x8914, struct.pack('16sH14x', b'lo', 0))",
        "EPERM",
        Control::Behind(&["unshare", "--user", "--map-root-user", "--net"]),
    );
}

test!(Both, the_identity_is_the_sandboxs_own);
fn the_identity_is_the_sandboxs_own() {
    let code = "import getpass, grp, os, pwd, socket\nprint(os.getuid(), os.getgid(), os.getgroups() == [] or True, getpass.getuser(), pwd.getpwuid(1000).pw_dir, grp.getgrgid(1000).gr_name, socket.gethostname(), open('/etc/hostname').read().strip(), set(open('/etc/machine-id').read().strip()))";
    python(code).succeeded().expect(json!({"output": "1000 1000 True sandbox /home/sandbox sandbox stockade stockade {'0'}\n"}));
}

const CPUS: &str = "import os; print(os.cpu_count(), len(os.sched_getaffinity(0)))";

test!(Both, cpus_are_those_of_the_quota);
fn cpus_are_those_of_the_quota() {
    python(CPUS).succeeded().expect(json!({"output": "1 1\n"}));
    exec(json!({"code": CPUS, "limits": {"cpus": 0.5}})).succeeded().expect(json!({"output": "1 1\n"}));
}

test!(Both, two_cpus_are_seen_where_two_are_granted, needs[TwoCpus]);
fn two_cpus_are_seen_where_two_are_granted() {
    exec(json!({"code": CPUS, "limits": {"cpus": 2}})).succeeded().expect(json!({"output": "2 2\n"}));
    exec(json!({"code": CPUS, "limits": {"cpus": 1.5}})).succeeded().expect(json!({"output": "2 2\n"}));
}

test!(Both, the_cgroup_is_shown_as_the_root);
fn the_cgroup_is_shown_as_the_root() {
    let done =
        python("import json; print(json.dumps([l.strip().split(':', 2)[2] for l in open('/proc/self/cgroup') if 'name=' not in l]))");
    let degraded = done["receipt"]["degraded"] == json!(["cgroup"]);
    let paths = done.succeeded().json();
    assert!(degraded || paths.as_array().unwrap().iter().all(|path| path == "/"), "{paths}");
}

test!(Both, limits_cannot_be_raised_again);
fn limits_cannot_be_raised_again() {
    for (name, value) in [("RLIMIT_NOFILE", 1024u64), ("RLIMIT_FSIZE", 128 << 20), ("RLIMIT_STACK", 8 << 20)] {
        let act = format!(
            "h = resource.getrlimit(resource.{name})[1]\nassert h == {value}, h\ncall(160, resource.{name}, ctypes.create_string_buffer(struct.pack('QQ', h, h + DELTA)))"
        );
        denied(&act.replace("DELTA", "1"), "EPERM", Control::Instead(&act.replace("DELTA", "0")));
    }
    denied(
        "[os.open('/dev/null', os.O_RDONLY) for _ in range(1100)]",
        "EMFILE",
        Control::Instead("[os.open('/dev/null', os.O_RDONLY) for _ in range(900)]"),
    );
}

test!(Both, no_core_is_dumped);
fn no_core_is_dumped() {
    let scratch = scratch();
    exec(json!({"code": "import os; os.abort()", "scratch": text(&scratch)})).expect(json!({"verdict": "signaled", "signal": "SIGABRT"}));
    assert_eq!(std::fs::read_dir(&scratch).unwrap().count(), 0);
}

test!(Both, programs_in_scratch_can_be_run_and_those_of_configuration_cannot);
fn programs_in_scratch_can_be_run_and_those_of_configuration_cannot() {
    let code = "import os, subprocess\nopen('tool','w').write('#!/bin/sh\\necho ran'); os.chmod('tool', 0o755)\nprint(subprocess.run(['./tool'], capture_output=True).stdout)";
    python(code).succeeded().expect(json!({"output": "b'ran\\n'\n"}));
    denied("os.execv('/proc/self/exe/../x', ['x'])", "ENOTDIR", Control::Instead("os.stat('/usr/bin/python3')"));
    let mounts = python(
        "rows = [l.split() for l in open('/proc/self/mountinfo')]\nprint(all('noexec' in r[5] for r in rows if r[4].startswith(('/etc', '/proc', '/dev/n'))))",
    );
    mounts.succeeded().expect(json!({"output": "True\n"}));
}

test!(Both, a_setuid_program_of_the_host_gives_nothing);
fn a_setuid_program_of_the_host_gives_nothing() {
    let code = "import glob, os, stat, subprocess\nfound = [p for p in ('/usr/bin/su', '/usr/bin/mount', '/usr/bin/passwd', '/usr/bin/newgrp') if os.path.exists(p) and os.stat(p).st_mode & stat.S_ISUID]\nfor p in found:\n    q = subprocess.Popen([p, '--help'], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)\n    q.wait()\nprint(os.getresuid())";
    python(code).succeeded().expect(json!({"output": "(1000, 1000, 1000)\n"}));
    let mounts = python("print(all('nosuid' in l.split()[5] for l in open('/proc/self/mountinfo')))");
    mounts.succeeded().expect(json!({"output": "True\n"}));
    denied_in(json!({}), "os.setuid(0)", "EPERM", Control::Behind(ROOTED));
}

test!(Both, signals_sent_by_the_caller_are_not_inherited_blocked);
fn signals_sent_by_the_caller_are_not_inherited_blocked() {
    let code = "import re\ns = open('/proc/self/status').read()\nprint(re.search('SigBlk:\\t(\\\\w+)', s)[1])";
    let done = python(code);
    done.succeeded().expect(json!({"output": "0000000000000000\n"}));
    let shell = exec(json!({"language": "bash", "code": "grep -E 'SigIgn|SigBlk' /proc/self/status"}));
    shell.succeeded().expect(json!({"output": "SigBlk:\t0000000000000000\nSigIgn:\t0000000000000000\n"}));
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
