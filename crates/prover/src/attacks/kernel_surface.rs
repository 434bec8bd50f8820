//! The kernel's surface beyond call numbers: flags and arguments that the filter looks
//! at, with and without high halves, and the other doors into the kernel.

mod sockets;

use nix::libc::{ENOSYS, EPERM};
use stockade_policy::{
    filter::{Action, F_NOTIFY, FORBIDDEN_SOCKET_OPTIONS, WATCHING},
    names::FORBIDDEN_IOCTLS,
};
use stockade_protocol::probe::Script;

use super::{O_CREAT, O_WRONLY};
use crate::{
    attack::{Attack, Class, Control, ControlExpectation, ControlHost, Expected},
    fixture::Fixture,
    script::{Builder, CWD, n, one, script},
};

const CLASS: Class = Class::KernelSurface;
const FILTER: &[&str] = &["seccomp"];
const REFUSED: Expected = Expected::Errno(&[EPERM]);
/// A bit that the kernel does not look at, and so a filter must not either.
const HIGH: i64 = 0x1_0000_0000;

pub(crate) fn attacks(fixture: &Fixture) -> Vec<Attack> {
    let mut all = Vec::new();
    all.extend(namespaces_by_clone(fixture));
    all.extend(set_id_bits(fixture));
    all.extend(devices(fixture));
    all.extend(sockets::attacks(fixture));
    all.extend(ioctls(fixture));
    all.extend(others_by_number(fixture));
    all.extend(switches(fixture));
    all.extend(the_older_watch(fixture));
    all.extend(other_abis());
    all
}

fn attack(name: impl Into<String>, tried: impl Into<String>, act: Script, control: Control) -> Attack {
    Attack::new(CLASS, name, tried, FILTER, act, REFUSED, control)
}

fn namespaces_by_clone(fixture: &Fixture) -> Vec<Attack> {
    const SIGCHLD: i64 = 17;
    let flags = [
        ("user", 0x1000_0000i64),
        ("mount", 0x2_0000),
        ("PID", 0x2000_0000),
        ("network", 0x4000_0000),
        ("UTS", 0x400_0000),
        ("IPC", 0x800_0000),
        ("cgroup", 0x200_0000),
        ("user and network", 0x5000_0000),
    ];
    if !fixture.knows("clone") {
        return Vec::new();
    }
    flags
        .into_iter()
        .flat_map(|(name, flag)| [(name, flag, ""), (name, flag | HIGH, ", with high bits")])
        .map(|(name, flag, how)| {
            attack(
                format!("a child in a new {name} namespace{how}"),
                format!("clone into a new {name} namespace{how}"),
                one("clone", &[n(flag | SIGCHLD)]),
                Control::Outside(ControlHost::OwnNamespaces, ControlExpectation::Succeeds),
            )
        })
        .collect()
}

/// Every way to give a file a mode.
fn set_id_bits(fixture: &Fixture) -> Vec<Attack> {
    type Give = fn(&mut Builder, &str, i64);
    const REGULAR: i64 = 0o100_000;
    let ways: [(&str, Give); 11] = [
        ("chmod", |b, path, mode| {
            b.open(path, O_WRONLY | O_CREAT);
            let path = b.text(path);
            b.attack("chmod", &[path, n(mode)]);
        }),
        ("fchmod", |b, path, mode| {
            let fd = b.open(path, O_WRONLY | O_CREAT);
            b.attack("fchmod", &[fd, n(mode)]);
        }),
        ("fchmodat", |b, path, mode| {
            b.open(path, O_WRONLY | O_CREAT);
            let path = b.text(path);
            b.attack("fchmodat", &[CWD, path, n(mode)]);
        }),
        ("fchmodat2", |b, path, mode| {
            b.open(path, O_WRONLY | O_CREAT);
            let path = b.text(path);
            b.attack("fchmodat2", &[CWD, path, n(mode), n(0)]);
        }),
        ("mkdir", |b, path, mode| {
            let path = b.text(path);
            b.attack("mkdir", &[path, n(mode)]);
        }),
        ("mkdirat", |b, path, mode| {
            let path = b.text(path);
            b.attack("mkdirat", &[CWD, path, n(mode)]);
        }),
        ("creat", |b, path, mode| {
            let path = b.text(path);
            b.attack("creat", &[path, n(mode)]);
        }),
        ("open", |b, path, mode| {
            let path = b.text(path);
            b.attack("open", &[path, n(O_WRONLY | O_CREAT), n(mode)]);
        }),
        ("openat", |b, path, mode| {
            let path = b.text(path);
            b.attack("openat", &[CWD, path, n(O_WRONLY | O_CREAT), n(mode)]);
        }),
        ("mknod", |b, path, mode| {
            let path = b.text(path);
            b.attack("mknod", &[path, n(REGULAR | mode), n(0)]);
        }),
        ("mknodat", |b, path, mode| {
            let path = b.text(path);
            b.attack("mknodat", &[CWD, path, n(REGULAR | mode), n(0)]);
        }),
    ];
    let mut all = Vec::new();
    for (call, give) in ways {
        if !matches!(fixture.rules.action(call), Some(Action::Check(_))) {
            continue;
        }
        for (bits, name) in [(0o4000, "set-user-ID"), (0o2000, "set-group-ID"), (0o4000 | HIGH, "set-user-ID, with high bits")] {
            let path = format!("/tmp/{call}-{bits:o}");
            all.push(attack(
                format!("{name} by {call}"),
                format!("give a file the {name} bit by {call}"),
                script(|b| give(b, &path, 0o755 | bits)),
                Control::Instead(script(|b| give(b, &format!("{path}-plain"), 0o755)), ControlExpectation::Succeeds),
            ));
        }
    }
    all
}

fn devices(fixture: &Fixture) -> Vec<Attack> {
    const NULL_DEVICE: i64 = 0x103;
    let mut all = Vec::new();
    let make = |call: &'static str, path: &str, mode: i64, device: i64| {
        script(|b| {
            let path = b.text(path);
            let arguments: &[_] = if call == "mknod" { &[path, n(mode), n(device)] } else { &[CWD, path, n(mode), n(device)] };
            b.attack(call, arguments);
        })
    };
    for call in ["mknod", "mknodat"].into_iter().filter(|call| fixture.knows(call)) {
        for (what, kind) in [("a character device", 0o020_600i64), ("a block device", 0o060_600)] {
            all.push(attack(
                format!("{what} by {call}"),
                format!("make {what} by {call}"),
                make(call, &format!("/tmp/{call}-{kind:o}"), kind, NULL_DEVICE),
                Control::Instead(make(call, &format!("/tmp/{call}-{kind:o}-file"), 0o100_600, 0), ControlExpectation::Succeeds),
            ));
        }
    }
    if fixture.knows("renameat2") {
        const WHITEOUT: i64 = 4;
        let rename = |name: &str, flags: i64| {
            script(|b| {
                b.open(&format!("/tmp/{name}"), O_WRONLY | O_CREAT);
                let (from, to) = (b.text(&format!("/tmp/{name}")), b.text(&format!("/tmp/{name}-2")));
                b.attack("renameat2", &[CWD, from, CWD, to, n(flags)]);
            })
        };
        all.push(attack(
            "a whiteout",
            "leave a device node behind by renaming (RENAME_WHITEOUT)",
            rename("whiteout", WHITEOUT),
            Control::Instead(rename("no-whiteout", 0), ControlExpectation::Succeeds),
        ));
    }
    all
}

/// dnotify, where the policy has no inotify.
fn the_older_watch(fixture: &Fixture) -> Option<Attack> {
    const DN_ACCESS: i64 = 1;
    let act = script(|b| {
        let fd = b.open("/usr", 0);
        b.attack("fcntl", &[fd, n(i64::from(F_NOTIFY)), n(DN_ACCESS)]);
    });
    let control = Control::Outside(ControlHost::Host, ControlExpectation::Reaches);
    (!fixture.knows(WATCHING))
        .then(|| attack("watch a directory by fcntl", "get a signal when something in /usr is read (F_NOTIFY)", act, control))
}

/// Requests that the policy does not list, on a pipe, which knows none of them.
fn ioctls(fixture: &Fixture) -> Vec<Attack> {
    if !fixture.knows("ioctl") {
        return Vec::new();
    }
    let more = [
        ("VT_ACTIVATE", 0x5606u32),
        ("KDSETMODE", 0x4b3a),
        ("KDSKBMODE", 0x4b45),
        ("KDSKBSENT", 0x4b49),
        ("BLKGETSIZE64", 0x8008_1272),
        ("LOOP_SET_FD", 0x4c00),
        ("LOOP_CTL_GET_FREE", 0x4c82),
        ("SG_IO", 0x2285),
        ("CDROMEJECT", 0x5309),
        ("HDIO_GET_IDENTITY", 0x30d),
        ("SIOCSIFFLAGS", 0x8914),
        ("SIOCSIFADDR", 0x8916),
        ("SIOCADDRT", 0x890b),
        ("SIOCSIFHWADDR", 0x8924),
        ("SIOCBRADDBR", 0x89a0),
        ("TUNSETIFF", 0x4004_54ca),
        ("NS_GET_USERNS", 0xb701),
        ("NS_GET_PARENT", 0xb702),
        ("PERF_EVENT_IOC_ENABLE", 0x2400),
        ("KVM_CREATE_VM", 0xae01),
        ("FS_IOC_SETFLAGS", 0x4008_6602),
        ("FS_IOC_FSSETXATTR", 0x401c_5820),
        ("FIDEDUPERANGE", 0xc018_9436),
        ("EVIOCGRAB", 0x4004_4590),
        ("UFFDIO_API", 0xc018_aa3f),
        ("RNDADDENTROPY", 0x4008_5203),
        ("RNDCLEARPOOL", 0x5206),
        ("FS_IOC_ADD_ENCRYPTION_KEY", 0xc050_6617),
        ("BTRFS_IOC_SNAP_CREATE", 0x5000_9401),
        ("SECCOMP_IOCTL_NOTIF_RECV", 0xc050_2100),
        ("USBDEVFS_RESET", 0x5514),
        ("DRM_IOCTL_VERSION", 0xc040_6400),
        ("VHOST_SET_OWNER", 0xaf01),
        ("IOC_WATCH_QUEUE_SET_SIZE", 0x5760),
    ];
    let forbidden = FORBIDDEN_IOCTLS.iter().map(|(name, number, _)| (*name, *number)).collect::<Vec<_>>();
    let mut all = Vec::new();
    for (name, request) in forbidden.iter().copied().chain(more) {
        if fixture.policy.seccomp.ioctl.contains(&request) {
            continue;
        }
        let is_forbidden = forbidden.iter().any(|(other, _)| *other == name);
        let ways: &[(i64, &str)] =
            if is_forbidden { &[(0, ""), (HIGH, ", with a high bit"), (-HIGH, ", with all high bits")] } else { &[(0, "")] };
        for (high, how) in ways {
            all.push(attack(
                format!("ioctl {name}{how}"),
                format!("ask a descriptor for {name}{how}"),
                one("ioctl", &[n(0), n(i64::from(request) | *high), n(0)]),
                Control::Outside(ControlHost::OwnNamespaces, ControlExpectation::Reaches),
            ));
        }
    }
    all
}

/// Calls that take a pid, with the pid of another process.
fn others_by_number(fixture: &Fixture) -> Vec<Attack> {
    type On = fn(&mut Builder, stockade_protocol::probe::Value);
    let calls: [(&str, &str, On); 5] = [
        ("prlimit64", "read the limits", |b, pid| {
            let to = b.space(16);
            b.attack("prlimit64", &[pid, n(7), n(0), to]);
        }),
        ("sched_setaffinity", "choose the CPUs", |b, pid| {
            let mask = b.bytes(&[0xff; 128]);
            b.attack("sched_setaffinity", &[pid, n(128), mask]);
        }),
        ("sched_setscheduler", "choose the scheduler", |b, pid| {
            let priority = b.space(8);
            b.attack("sched_setscheduler", &[pid, n(0), priority]);
        }),
        ("sched_setparam", "choose the priority", |b, pid| {
            let priority = b.space(8);
            b.attack("sched_setparam", &[pid, priority]);
        }),
        ("sched_setattr", "choose scheduler and priority", |b, pid| {
            // struct sched_attr: its size, the ordinary policy, and the lowest priority, which
            // everybody may always take.
            let attributes = b.bytes(&[48, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 19, 0, 0, 0]);
            b.space(28);
            b.attack("sched_setattr", &[pid, attributes, n(0)]);
        }),
    ];
    let mut all = Vec::new();
    for (call, what, on) in calls {
        if !matches!(fixture.rules.action(call), Some(Action::Check(_))) {
            continue;
        }
        let twin = || Control::Instead(script(|b| on(b, n(0))), ControlExpectation::Succeeds);
        for (whose, pid) in [("pid 1", 1), ("pid 1, with high bits", 1 | HIGH), ("pid 2", 2)] {
            all.push(attack(format!("{what} of {whose}"), format!("{what} of {whose} by {call}"), script(|b| on(b, n(pid))), twin()));
        }
    }
    let priorities: [(&str, [i64; 3], [i64; 3]); 2] =
        [("setpriority", [0, 1, 19], [0, 0, 19]), ("ioprio_set", [1, 1, 0x4007], [1, 0, 0x4007])];
    for (call, on_1, on_self) in priorities {
        if !matches!(fixture.rules.action(call), Some(Action::Check(_))) {
            continue;
        }
        let make = |arguments: [i64; 3]| one(call, &arguments.map(n));
        let twin = || Control::Instead(make(on_self), ControlExpectation::Succeeds);
        all.push(attack(format!("the priority of pid 1 by {call}"), format!("change the priority of pid 1 by {call}"), make(on_1), twin()));
        let [which, _, value] = on_1;
        all.push(attack(
            format!("the priority of all processes of the user by {call}"),
            format!("change the priority of every process of the user by {call}"),
            make([which + 2, 0, value]),
            twin(),
        ));
    }
    all
}

/// Calls of which only some uses are refused.
fn switches(fixture: &Fixture) -> Vec<Attack> {
    let mut all = Vec::new();
    if matches!(fixture.rules.action("personality"), Some(Action::Check(_))) {
        let personas = [
            ("without address randomisation", 0x004_0000i64),
            ("with readable executables", 0x040_0000),
            ("with a page at zero", 0x010_0000),
            ("of 32 bits", 0x8),
            ("of another Unix", 0x1),
            ("with high bits", 0x004_0000 | HIGH),
        ];
        for (name, persona) in personas {
            all.push(attack(
                format!("a personality {name}"),
                format!("take on a personality {name} ({persona:#x})"),
                one("personality", &[n(persona)]),
                Control::Outside(ControlHost::Host, ControlExpectation::Succeeds),
            ));
        }
    }
    if matches!(fixture.rules.action("prctl"), Some(Action::Check(_))) {
        for (option, name) in [(22, "a seccomp filter"), (59, "syscall user dispatch")] {
            for (high, how) in [(0, ""), (HIGH, ", with high bits")] {
                all.push(attack(
                    format!("{name}{how}"),
                    format!("ask for {name} by prctl({option}){how}"),
                    one("prctl", &[n(option | high), n(0xffff), n(0), n(0), n(0)]),
                    Control::Outside(ControlHost::Host, ControlExpectation::Reaches),
                ));
            }
        }
    }
    if matches!(fixture.rules.action("setsockopt"), Some(Action::Check(_))) && fixture.has_family(1) {
        let all_options =
            FORBIDDEN_SOCKET_OPTIONS.iter().flat_map(|(level, options, _)| options.iter().map(move |option| (*level, *option)));
        for (level, option) in all_options {
            for (high, how) in [(0, ""), (HIGH, ", with high bits")] {
                all.push(attack(
                    format!("a socket's option {option} of level {level}{how}"),
                    format!("set option {option} of level {level}{how} on a socket, which takes memory that no limit counts"),
                    script(|b| {
                        let fd = b.need("socket", &[n(1), n(1), n(0)]);
                        b.attack("setsockopt", &[fd, n(level.into()), n(i64::from(option) | high), n(-1), n(0xffff)]);
                    }),
                    Control::Outside(ControlHost::Host, ControlExpectation::Reaches),
                ));
            }
        }
    }
    all
}

/// `int 0x80` and x32.
fn other_abis() -> Vec<Attack> {
    let missing = Expected::Errno(&[ENOSYS]);
    let i386 = [
        ("getpid", 20),
        ("open", 5),
        ("execve", 11),
        ("mount", 21),
        ("ptrace", 26),
        ("clone", 120),
        ("socketcall", 102),
        ("unshare", 310),
        ("keyctl", 288),
        ("bpf", 357),
        ("socket", 359),
        ("io_uring_setup", 425),
    ];
    let mut all: Vec<Attack> = i386
        .into_iter()
        .map(|(name, number)| {
            let argument = if name == "getpid" { 0 } else { -1 };
            Attack::new(
                CLASS,
                format!("{name} as i386"),
                format!("call {name} by int 0x80, as a 32-bit program would"),
                FILTER,
                script(|b| {
                    b.attack_int80(number, &[n(argument); 5]);
                }),
                missing,
                Control::Outside(ControlHost::OwnNamespaces, ControlExpectation::Exists),
            )
        })
        .collect();
    const X32: u32 = 0x4000_0000;
    for (name, number) in [("getpid", 39), ("openat", 257), ("ptrace", 521), ("execve", 520), ("mount", 165), ("unshare", 272)] {
        all.push(Attack::new(
            CLASS,
            format!("{name} as x32"),
            format!("call {name} with the bit of x32 set"),
            FILTER,
            script(|b| {
                b.attack_number(number | X32, &[n(if name == "getpid" { 0 } else { -1 }); 5]);
            }),
            missing,
            Control::Outside(ControlHost::OwnNamespaces, ControlExpectation::Exists),
        ));
    }
    all
}
