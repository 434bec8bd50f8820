//! The kernel's surface: what the code can call, see and touch. Every refused system
//! call with its exact errno, and the same call outside, where it gets past.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use crate::{
    harness::{Test, is_root, test},
    probe::{Call, Control, calls_denied, denied, denied_in, outside},
    stockade::{Done, PolicyDirectory, derived, exec, exec_with, feed, python, scratch, text, under},
};

pub const TESTS: &[Test] = &[
    test!(Both, mounting_and_changing_the_root_are_refused),
    test!(Both, new_namespaces_are_refused),
    test!(Both, a_clone_with_a_new_namespace_is_refused),
    test!(Both, looking_into_other_processes_is_refused),
    test!(Both, the_kernels_own_interpreters_and_rings_are_refused),
    test!(Both, keys_are_refused),
    test!(Both, files_by_handle_are_refused),
    test!(Both, changing_the_host_is_refused),
    test!(Both, changing_ids_is_refused),
    test!(Both, calls_whose_arguments_lie_in_memory_do_not_exist),
    test!(Both, calls_newer_than_the_list_do_not_exist),
    test!(Both, exotic_sockets_are_refused),
    test!(Both, raw_sockets_are_refused),
    test!(Both, netlink_other_than_route_is_refused),
    test!(Both, typing_into_a_terminal_is_refused),
    test!(Both, other_personalities_are_refused),
    test!(Both, only_oneself_can_be_limited_and_scheduled),
    test!(Both, priorities_of_others_are_refused),
    test!(Both, calls_of_foreign_abis_do_not_exist),
    test!(Both, a_denial_names_the_call_and_the_line_that_allows_it),
    test!(Both, a_denial_that_no_policy_may_allow_names_no_line),
    test!(Both, every_line_that_a_denial_names_is_a_valid_policy),
    test!(Both, denials_are_counted_and_bounded),
    test!(Both, no_capability_is_left_and_none_can_be_gained),
    test!(Both, a_filter_is_in_force_and_cannot_be_replaced),
    test!(Both, pid_one_shows_nothing_of_itself),
    test!(Both, only_the_runs_own_processes_are_seen),
    test!(Both, secrets_of_the_kernel_are_masked),
    test!(Both, nothing_is_writable_but_what_is_said),
    test!(Both, every_other_mount_is_read_only),
    test!(Both, the_root_holds_nothing_of_the_host_but_what_the_policy_names),
    test!(Both, only_three_descriptors_are_open),
    test!(Both, descriptors_of_the_launcher_do_not_come_in),
    test!(Both, the_network_is_lo_alone_and_it_is_up),
    test!(Both, the_identity_is_the_sandboxs_own),
    test!(Both, cpus_are_those_of_the_quota),
    test!(Both, two_cpus_are_seen_where_two_are_granted, needs[TwoCpus]),
    test!(Both, the_cgroup_is_shown_as_the_root),
    test!(Both, limits_cannot_be_raised_again),
    test!(Both, no_core_is_dumped),
    test!(Both, programs_in_scratch_can_be_run_and_those_of_configuration_cannot),
    test!(Both, a_setuid_program_of_the_host_gives_nothing),
    test!(Both, signals_sent_by_the_caller_are_not_inherited_blocked),
];

/// `name number arguments errno`, one system call each.
macro_rules! calls {
    ($($name:ident $number:literal ($arguments:literal) $errno:ident;)*) => {
        &[$(Call { name: stringify!($name), number: $number, arguments: $arguments, errno: stringify!($errno) }),*]
    };
}

// Arguments are such that the kernel, where it is asked at all, answers something else
// than EPERM, and does nothing: null pointers and bad descriptors.

fn mounting_and_changing_the_root_are_refused() {
    calls_denied(calls! {
        mount 165 ("0, 0, 0, 0, 0") EPERM;
        umount2 166 ("b'/no/such/place', 0xffff") EPERM;
    });
    denied("call(161, b'.')", "EPERM", Control::Behind(ROOTED));
    denied("call(165, b'none', b'/tmp', b'tmpfs', 0, 0)", "EPERM", Control::Behind(OWN_MOUNTS));
    denied("call(430, b'tmpfs', 0)", "EPERM", Control::Behind(OWN_MOUNTS));
    denied("call(428, -100, b'/', 0x8001)", "EPERM", Control::Behind(OWN_MOUNTS));
    denied(
        "call(166, b'/tmp', 2)",
        "EPERM",
        Control::Behind(&["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", "mount -t tmpfs none /tmp && exec \"$0\" \"$@\""]),
    );
}

/// Root of a user namespace of one's own, outside.
const ROOTED: &[&str] = &["unshare", "--user", "--map-root-user"];
const OWN_MOUNTS: &[&str] = &["unshare", "--user", "--map-root-user", "--mount"];

fn new_namespaces_are_refused() {
    for flag in [
        "0x10000000",
        "0x10000000 | 0x00020000",
        "0x10000000 | 0x40000000",
        "0x10000000 | 0x20000000",
        "0x10000000 | 0x04000000",
        "0x10000000 | 0x02000000",
    ] {
        denied(&format!("call(272, {flag})"), "EPERM", Control::Outside);
    }
    calls_denied(calls! { setns 308 ("-1, 0") EPERM; });
}

fn a_clone_with_a_new_namespace_is_refused() {
    let act = "pid = call(56, FLAGS | 17, 0, 0, 0, 0)\nif pid == 0:\n    os._exit(0)\nos.waitpid(pid, 0)";
    for flags in ["0x10000000", "0x10000000 | 0x20000000", "0x10000000 | 0x00020000", "0x10000000 | 0x40000000"] {
        denied(&act.replace("FLAGS", flags), "EPERM", Control::Outside);
    }
    // High halves of the flags do not hide them.
    denied(&act.replace("FLAGS", "0x700000000 | 0x10000000"), "EPERM", Control::Instead(&act.replace("FLAGS", "0")));
}

fn looking_into_other_processes_is_refused() {
    denied("call(101, 0, 0, 0, 0)", "EPERM", Control::Outside);
    calls_denied(calls! {
        process_vm_readv 310 ("0x7fffffff, 0, 0, 0, 0, 0") EPERM;
        process_vm_writev 311 ("0x7fffffff, 0, 0, 0, 0, 0") EPERM;
        kcmp 312 ("0x7fffffff, 0x7fffffff, 0, 0, 0") EPERM;
        pidfd_getfd 438 ("-1, 0, 0") EPERM;
        process_madvise 440 ("-1, 0, 0, 0, 0xffff") EPERM;
        migrate_pages 256 ("0x7fffffff, 0, 0, 0") EPERM;
        move_pages 279 ("0x7fffffff, 0, 0, 0, 0, 0") EPERM;
    });
}

fn the_kernels_own_interpreters_and_rings_are_refused() {
    calls_denied(calls! {
        bpf 321 ("0x7fffffff, 0, 0xffffff") EPERM;
        perf_event_open 298 ("0, 0, -1, -1, 0xffff") EPERM;
        io_uring_setup 425 ("0, 0") EPERM;
        io_uring_enter 426 ("-1, 0, 0, 0, 0, 0") EPERM;
        io_uring_register 427 ("-1, 0, 0, 0") EPERM;
        userfaultfd 323 ("0xffff") EPERM;
        vmsplice 278 ("-1, 0, 0, 0") EPERM;
        modify_ldt 154 ("0x7f, 0, 0") EPERM;
        seccomp 317 ("0x7f, 0, 0") EPERM;
        fanotify_init 300 ("0x200, 0") EPERM;
    });
}

fn keys_are_refused() {
    calls_denied(calls! {
        keyctl 250 ("0xffff, 0, 0, 0, 0") EPERM;
        add_key 248 ("0, 0, 0, 0, 0") EPERM;
        request_key 249 ("0, 0, 0, 0") EPERM;
    });
}

fn files_by_handle_are_refused() {
    calls_denied(calls! {
        name_to_handle_at 303 ("-1, 0, 0, 0, 0xffffff") EPERM;
    });
    denied(
        "call(303, -100, b'/', bytearray(b'\\0' * 136) and ctypes.create_string_buffer(struct.pack('Ii', 128, 0) + bytes(128)), ctypes.create_string_buffer(4), 0)",
        "EPERM",
        Control::Outside,
    );
    let code = "import ctypes\nprint(ctypes.CDLL(None, use_errno=True).syscall(304, -1, 0, 0), ctypes.get_errno())";
    python(code).succeeded();
    assert!(exec(json!({"code": code}))["denials"][0]["what"] == "open_by_handle_at");
}

fn changing_the_host_is_refused() {
    calls_denied(calls! {
        sysfs 139 ("0xff, 0, 0") EPERM;
        quotactl 179 ("0xffff, 0, 0, 0") EPERM;
    });
    for (number, name) in [
        (103, "syslog"),
        (170, "sethostname"),
        (171, "setdomainname"),
        (169, "reboot"),
        (167, "swapon"),
        (168, "swapoff"),
        (163, "acct"),
        (164, "settimeofday"),
        (159, "adjtimex"),
        (227, "clock_settime"),
        (175, "init_module"),
        (313, "finit_module"),
        (176, "delete_module"),
        (246, "kexec_load"),
        (320, "kexec_file_load"),
        (172, "iopl"),
        (173, "ioperm"),
        (153, "vhangup"),
        (155, "pivot_root"),
        (162, "sync"),
        (306, "syncfs"),
    ] {
        // Outside these need rights, or would change the host: the control is the
        // denial itself, which says that the filter refused, and not the kernel.
        let code = format!(
            "import ctypes, errno\nprint(ctypes.CDLL(None, use_errno=True).syscall({number}, -1, 0, 0, 0, 0), errno.errorcode[ctypes.get_errno()])"
        );
        let done = python(&code);
        done.succeeded().expect(json!({"output": "-1 EPERM\n"}));
        assert_eq!(done["denials"][0]["what"], name, "{}", done.brief());
    }
}

fn changing_ids_is_refused() {
    let own = "u = os.getuid()\n";
    for act in ["os.setuid(u)", "os.setgid(os.getgid())", "os.setresuid(u, u, u)", "os.setreuid(u, u)", "call(122, u)"] {
        denied(&format!("{own}{act}"), "EPERM", Control::Outside);
    }
    if is_root() {
        denied("os.setgroups([])", "EPERM", Control::Outside);
    }
}

fn calls_whose_arguments_lie_in_memory_do_not_exist() {
    calls_denied(calls! {
        clone3 435 ("0, 0") ENOSYS;
        openat2 437 ("-100, 0, 0, 0") ENOSYS;
    });
}

fn calls_newer_than_the_list_do_not_exist() {
    let code = "import ctypes, errno\nfor n in (470, 500, 599, 600, 1000, 0x7fffffff):\n    print(ctypes.CDLL(None, use_errno=True).syscall(n, 0, 0, 0), errno.errorcode[ctypes.get_errno()])";
    python(code).succeeded().expect(json!({"output": "-1 ENOSYS\n".repeat(6)}));
}

fn exotic_sockets_are_refused() {
    let families = [
        ("AF_ALG", 38, 5),
        ("AF_VSOCK", 40, 1),
        ("AF_PACKET", 17, 3),
        ("AF_KEY", 15, 3),
        ("AF_TIPC", 30, 5),
        ("AF_XDP", 44, 3),
        ("AF_CAN", 29, 3),
        ("AF_BLUETOOTH", 31, 3),
        ("AF_RDS", 21, 5),
        ("AF_NFC", 39, 5),
        ("AF_SMC", 43, 1),
        ("AF_QIPCRTR", 42, 2),
    ];
    for (name, family, kind) in families {
        let act = format!("socket.socket({family}, {kind}, 0)");
        let done = denied(&act, "EPERM", Control::Instead("socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, 0)"));
        let denial = &done["denials"][0];
        let what = denial["what"].as_str().unwrap();
        assert!(what.starts_with("socket(") && denial["rule"] == "[seccomp] socket_families", "{name}: {denial}");
        assert!(denial["allow"].is_null(), "no policy may allow {name}: {denial}");
    }
    // High halves of the family do not hide it.
    denied("call(41, 0x100000000 | 40, 1, 0)", "EPERM", Control::Instead("call(41, 0x100000000 | 1, 1, 0)"));
    denied("socket.socketpair(socket.AF_INET)", "EPERM", Control::Instead("socket.socketpair(socket.AF_UNIX)"));
}

fn raw_sockets_are_refused() {
    for protocol in ["socket.IPPROTO_ICMP", "socket.IPPROTO_RAW", "132", "262"] {
        let kind = if protocol == "262" || protocol == "132" { "SOCK_STREAM" } else { "SOCK_RAW" };
        denied(
            &format!("socket.socket(socket.AF_INET, socket.{kind}, {protocol})"),
            "EPERM",
            Control::Instead("socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)"),
        );
    }
    denied(
        "socket.socket(socket.AF_INET, socket.SOCK_DGRAM, socket.IPPROTO_ICMP)",
        "EPERM",
        Control::Instead("socket.socket(socket.AF_INET, socket.SOCK_DGRAM, socket.IPPROTO_UDP)"),
    );
    // What passes the filter meets a kernel that sees no capability.
    denied(
        "socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_TCP)",
        "EPERM",
        Control::Behind(&["unshare", "--user", "--map-root-user", "--net"]),
    );
}

fn netlink_other_than_route_is_refused() {
    for protocol in [12, 9, 15, 16, 6] {
        denied(
            &format!("socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, {protocol})"),
            "EPERM",
            Control::Instead("socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)"),
        );
    }
}

fn typing_into_a_terminal_is_refused() {
    for request in ["0x5412", "0x541C", "0x100005412", "0xffffffff00005412", "0x5603", "0x4B3A", "0x5423"] {
        let act = format!(
            "fd = os.open('/dev/null', os.O_RDWR)\ncall(16, fd, {request} if {request} < 1 << 63 else {request} - (1 << 64), ctypes.create_string_buffer(b'x'))"
        );
        denied(&act, "EPERM", Control::Reaches(&["ENOTTY"]));
    }
    let done = python("import fcntl\ntry: fcntl.ioctl(0, 0x5412, b'x')\nexcept OSError: pass");
    assert_eq!(done["denials"][0]["what"], "ioctl(TIOCSTI)", "{}", done.brief());
    // What is listed reaches the device.
    let act = "fd = os.open('/dev/null', os.O_RDWR)\ntry:\n    call(16, fd, 0x5401, ctypes.create_string_buffer(64))\nexcept OSError as e:\n    if e.errno != errno.ENOTTY: raise";
    assert_eq!(exec(json!({"code": crate::probe::program(act)})).json(), "ok");
}

fn other_personalities_are_refused() {
    for persona in ["0x0040000", "0x0008", "0x0400000", "0x100040000"] {
        denied(&format!("call(135, {persona})"), "EPERM", Control::Outside);
    }
    denied("call(135, 0x0020000)", "EPERM", Control::Instead("call(135, 0xffffffff)\ncall(135, 0)"));
}

fn only_oneself_can_be_limited_and_scheduled() {
    let limit = "call(302, PID, 0, ctypes.create_string_buffer(struct.pack('QQ', 2**64 - 1, 2**64 - 1)), 0)";
    for pid in ["1", "os.getpid()", "0x100000001"] {
        denied(&limit.replace("PID", pid), "EPERM", Control::Instead(&limit.replace("PID", "0")));
    }
    // Already reading another's limits is refused.
    denied("resource.prlimit(1, resource.RLIMIT_CPU)", "EPERM", Control::Instead("resource.prlimit(0, resource.RLIMIT_CPU)"));
    denied(
        "os.sched_setaffinity(1, os.sched_getaffinity(0))",
        "EPERM",
        Control::Instead("os.sched_setaffinity(0, os.sched_getaffinity(0))"),
    );
    denied(
        "os.sched_setscheduler(1, os.SCHED_OTHER, os.sched_param(0))",
        "EPERM",
        Control::Instead("os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))"),
    );
    denied("os.sched_setparam(1, os.sched_param(0))", "EPERM", Control::Instead("os.sched_setparam(0, os.sched_param(0))"));
    let attributes = "call(314, PID, ctypes.create_string_buffer(struct.pack('IIQiIQQQ', 48, 0, 0, 0, 0, 0, 0, 0)), 0)";
    denied(&attributes.replace("PID", "1"), "EPERM", Control::Instead(&attributes.replace("PID", "0")));
}

fn priorities_of_others_are_refused() {
    denied("os.setpriority(os.PRIO_PROCESS, 1, 5)", "EPERM", Control::Instead("os.setpriority(os.PRIO_PROCESS, 0, 5)"));
    denied("os.setpriority(os.PRIO_USER, 0, 5)", "EPERM", Control::Instead("os.setpriority(os.PRIO_PROCESS, 0, 5)"));
    denied("call(251, 1, 1, 0x4004)", "EPERM", Control::Instead("call(251, 1, 0, 0x4004)"));
}

/// Machine code that asks for a call through the 32-bit door.
const INT_80: &str = "code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)\ncode.write(b'\\xb8' + struct.pack('<I', 20) + b'\\x53\\xcd\\x80\\x5b\\xc3')\nf = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))\nr = f()\nif r < 0:\n    raise OSError(-r, 'int 80')";

fn calls_of_foreign_abis_do_not_exist() {
    // x32: the same numbers with one bit more. Kernels seldom have it: the control is
    // the same call without the bit.
    denied("call(0x40000000 | 39)", "ENOSYS", Control::Instead("call(39)"));
    // i386, where the kernel has it.
    let i386 = under(&["/usr/bin/python3", "-c", &crate::probe::program(INT_80)]).output().unwrap();
    if i386.status.success() && outside(&[], INT_80) == "ok" {
        denied(INT_80, "ENOSYS", Control::Outside);
    }
}

fn denials_of(options: &[&str], act: &str) -> Done {
    let done = exec_with(options, json!({"code": format!("import ctypes, socket, os, fcntl\ntry:\n    {act}\nexcept OSError: pass")}));
    done.succeeded();
    done
}

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

fn a_denial_that_no_policy_may_allow_names_no_line() {
    let done = denials_of(&[], "ctypes.CDLL(None).unshare(0x10000000)");
    assert_eq!((&done["denials"][0]["what"], &done["denials"][0]["allow"]), (&json!("unshare"), &Value::Null));
    let policies = PolicyDirectory::new();
    let policy = policies.write("never", &derived("[seccomp]\nallow = { add = [\"unshare\"] }"));
    exec_with(&["--policy", &policy], json!({"code": ""})).broke("policy_invalid", &["unshare", "namespaces"]);
}

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
        let checked = crate::stockade::stockade(["policy", "check", &allowing]).output().unwrap();
        let said = String::from_utf8_lossy(&checked.stderr).into_owned();
        // What default allows already, adding is an error that says so.
        assert!(checked.status.success() || said.contains("already"), "{line}: {said}");
        if checked.status.success() {
            assert_eq!(denials_of(&["--policy", &allowing], act)["denials"], json!([]), "{line}");
        }
    }
}

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

fn a_filter_is_in_force_and_cannot_be_replaced() {
    let code = "import re\ns = open('/proc/self/status').read()\nprint(re.search('Seccomp:\\t(\\\\d)', s)[1], int(re.search('Seccomp_filters:\\t(\\\\d+)', s)[1]) >= 1)";
    python(code).succeeded().expect(json!({"output": "2 True\n"}));
}

fn pid_one_shows_nothing_of_itself() {
    for name in ["environ", "mem", "maps", "fd", "io", "auxv", "syscall", "stack", "task/1/environ", "ns/user", "map_files"] {
        let act = format!(
            "p = '/proc/PID/{name}'\nos.listdir(p) if os.path.isdir(p) else os.readlink(p) if os.path.islink(p) else os.open(p, os.O_RDONLY)"
        );
        let done = exec(json!({"code": crate::probe::program(&act.replace("PID", "1"))}));
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

fn only_the_runs_own_processes_are_seen() {
    let code = "import os, subprocess\np = subprocess.Popen(['sleep', '60'])\nprint(sorted(int(n) for n in os.listdir('/proc') if n.isdigit()), os.getpid(), os.getppid(), p.pid)\np.kill()";
    python(code).succeeded().expect(json!({"output": "[1, 2, 3] 2 1 3\n"}));
    for call in ["os.getpgid(3000)", "os.kill(3000, 0)", "os.sched_getaffinity(3000)"] {
        let twin = call.replace("3000", "os.getpid()");
        denied(call, "ESRCH", Control::Instead(&twin));
    }
}

fn secrets_of_the_kernel_are_masked() {
    let code = "import json, os\nr = {}\nfor n in ('kcore', 'keys', 'key-users', 'timer_list', 'interrupts', 'sched_debug', 'locks'):\n    try: r[n] = len(open('/proc/' + n, 'rb').read(100))\n    except OSError as e: r[n] = e.errno\nprint(json.dumps(r))";
    let done = python(code);
    for (name, found) in done.succeeded().json().as_object().unwrap() {
        // Empty, or not there at all on this kernel.
        assert!(*found == 0 || *found == 2, "{name}: {found}");
    }
    let outside = feed(&mut under(&["/usr/bin/python3", "-"]), code.as_bytes());
    let outside: Value = serde_json::from_slice(&outside.stdout).unwrap();
    assert!(outside["interrupts"].as_u64() > Some(2), "the control: {outside}");
    // Addresses of the kernel are zeros.
    let addresses = python("print({l.split()[0] for l in open('/proc/kallsyms')} <= {'0' * 16})");
    addresses.succeeded().expect(json!({"output": "True\n"}));
}

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

fn the_root_holds_nothing_of_the_host_but_what_the_policy_names() {
    let done = python("import json, os\nprint(json.dumps([sorted(os.listdir(p)) for p in ('/', '/dev', '/home', '/tmp', '/scratch')]))");
    let listed = done.succeeded().json();
    let root: BTreeSet<&str> = listed[0].as_array().unwrap().iter().filter_map(Value::as_str).collect();
    let known = ["bin", "dev", "etc", "home", "lib", "lib32", "lib64", "libx32", "proc", "sbin", "scratch", "sys", "tmp", "usr"];
    assert!(root.iter().all(|name| known.contains(name)), "{root:?}");
    assert_eq!(listed[1], json!(["fd", "full", "null", "random", "shm", "stderr", "stdin", "stdout", "tty", "urandom", "zero"]));
    assert_eq!(listed[2], json!(["sandbox"]));
    assert_eq!(listed[3], json!([]));
    assert_eq!(listed[4].as_array().map(Vec::len), Some(1), "the program alone");
    denied("os.listdir('/sys/fs/cgroup')", "ENOENT", Control::Outside);
    denied("os.listdir('/var')", "ENOENT", Control::Outside);
    denied("os.listdir('/run')", "ENOENT", Control::Outside);
}

const DESCRIPTORS: &str = "import json, os\nfound = []\nfor fd in range(4096):\n    try: os.fstat(fd); found.append(fd)\n    except OSError: pass\nprint(json.dumps(found))";

fn only_three_descriptors_are_open() {
    assert_eq!(python(DESCRIPTORS).succeeded().json(), json!([0, 1, 2]));
    let done = python("import os, stat\nprint([stat.S_IFMT(os.fstat(fd).st_mode) == stat.S_IFIFO for fd in (1, 2)])");
    done.succeeded().expect(json!({"output": "[True, True]\n"}));
}

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
    let program = crate::stockade::program_path().unwrap();
    let mut command = under(&["/usr/bin/python3", "-c", starter, text(&program)]);
    let done = Done::of(feed(&mut command, json!({"code": DESCRIPTORS}).to_string().as_bytes()));
    assert_eq!(done.succeeded().json(), json!([0, 1, 2]));
    // The control: without the launcher the same program finds them.
    let direct = starter
        .replace("os.execv(sys.argv[1], [sys.argv[1], \"exec\"])", "os.execv(sys.executable, [sys.executable, '-c', sys.stdin.read()])");
    let output = feed(&mut under(&["/usr/bin/python3", "-c", &direct]), DESCRIPTORS.as_bytes());
    let found: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(found.as_array().unwrap().len() > 200, "{found}");
}

fn the_network_is_lo_alone_and_it_is_up() {
    let code = "import socket, fcntl, struct, threading\nprint([n for _, n in socket.if_nameindex()])\ns = socket.socket()\nflags = struct.unpack('H', fcntl.ioctl(s, 0x8913, struct.pack('16sH14x', b'lo', 0))[16:18])[0]\nprint(bool(flags & 1))\nfor family, host in ((socket.AF_INET, '127.0.0.1'), (socket.AF_INET6, '::1')):\n    server = socket.create_server((host, 0), family=family)\n    threading.Thread(target=lambda: server.accept()[0].sendall(b'hello')).start()\n    print(socket.create_connection(server.getsockname()[:2]).recv(5))";
    python(code).succeeded().expect(json!({"output": "['lo']\nTrue\nb'hello'\nb'hello'\n"}));
    denied(
        "s = socket.socket()\nfcntl.ioctl(s, 0x8914, struct.pack('16sH14x', b'lo', 0))",
        "EPERM",
        Control::Behind(&["unshare", "--user", "--map-root-user", "--net"]),
    );
}

fn the_identity_is_the_sandboxs_own() {
    let code = "import getpass, grp, os, pwd, socket\nprint(os.getuid(), os.getgid(), os.getgroups() == [] or True, getpass.getuser(), pwd.getpwuid(1000).pw_dir, grp.getgrgid(1000).gr_name, socket.gethostname(), open('/etc/hostname').read().strip(), set(open('/etc/machine-id').read().strip()))";
    python(code).succeeded().expect(json!({"output": "1000 1000 True sandbox /home/sandbox sandbox stockade stockade {'0'}\n"}));
}

const CPUS: &str = "import os; print(os.cpu_count(), len(os.sched_getaffinity(0)))";

fn cpus_are_those_of_the_quota() {
    python(CPUS).succeeded().expect(json!({"output": "1 1\n"}));
    exec(json!({"code": CPUS, "limits": {"cpus": 0.5}})).succeeded().expect(json!({"output": "1 1\n"}));
}

fn two_cpus_are_seen_where_two_are_granted() {
    exec(json!({"code": CPUS, "limits": {"cpus": 2}})).succeeded().expect(json!({"output": "2 2\n"}));
    exec(json!({"code": CPUS, "limits": {"cpus": 1.5}})).succeeded().expect(json!({"output": "2 2\n"}));
}

fn the_cgroup_is_shown_as_the_root() {
    let done =
        python("import json; print(json.dumps([l.strip().split(':', 2)[2] for l in open('/proc/self/cgroup') if 'name=' not in l]))");
    let degraded = done["receipt"]["degraded"] == json!(["cgroup"]);
    let paths = done.succeeded().json();
    assert!(degraded || paths.as_array().unwrap().iter().all(|path| path == "/"), "{paths}");
}

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

fn no_core_is_dumped() {
    let scratch = scratch();
    exec(json!({"code": "import os; os.abort()", "scratch": text(&scratch)})).expect(json!({"verdict": "signaled", "signal": "SIGABRT"}));
    assert_eq!(std::fs::read_dir(&scratch).unwrap().count(), 0);
}

fn programs_in_scratch_can_be_run_and_those_of_configuration_cannot() {
    let code = "import os, subprocess\nopen('tool','w').write('#!/bin/sh\\necho ran'); os.chmod('tool', 0o755)\nprint(subprocess.run(['./tool'], capture_output=True).stdout)";
    python(code).succeeded().expect(json!({"output": "b'ran\\n'\n"}));
    denied("os.execv('/proc/self/exe/../x', ['x'])", "ENOTDIR", Control::Instead("os.stat('/usr/bin/python3')"));
    let mounts = python(
        "rows = [l.split() for l in open('/proc/self/mountinfo')]\nprint(all('noexec' in r[5] for r in rows if r[4].startswith(('/etc', '/proc', '/dev/n'))))",
    );
    mounts.succeeded().expect(json!({"output": "True\n"}));
}

fn a_setuid_program_of_the_host_gives_nothing() {
    let code = "import glob, os, stat, subprocess\nfound = [p for p in ('/usr/bin/su', '/usr/bin/mount', '/usr/bin/passwd', '/usr/bin/newgrp') if os.path.exists(p) and os.stat(p).st_mode & stat.S_ISUID]\nfor p in found:\n    q = subprocess.Popen([p, '--help'], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)\n    q.wait()\nprint(os.getresuid())";
    python(code).succeeded().expect(json!({"output": "(1000, 1000, 1000)\n"}));
    let mounts = python("print(all('nosuid' in l.split()[5] for l in open('/proc/self/mountinfo')))");
    mounts.succeeded().expect(json!({"output": "True\n"}));
    denied_in(json!({}), "os.setuid(0)", "EPERM", Control::Behind(ROOTED));
}

fn signals_sent_by_the_caller_are_not_inherited_blocked() {
    let code = "import re\ns = open('/proc/self/status').read()\nprint(re.search('SigBlk:\\t(\\\\w+)', s)[1])";
    let done = python(code);
    done.succeeded().expect(json!({"output": "0000000000000000\n"}));
    let shell = exec(json!({"language": "bash", "code": "grep -E 'SigIgn|SigBlk' /proc/self/status"}));
    shell.succeeded().expect(json!({"output": "SigBlk:\t0000000000000000\nSigIgn:\t0000000000000000\n"}));
}
