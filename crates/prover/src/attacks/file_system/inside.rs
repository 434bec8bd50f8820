//! The sandbox's own files: what lies in its root, in /proc, and what its mounts allow.

use nix::libc::{EACCES, EPERM, EROFS, ETXTBSY};
use std::{io::Read, path::Path};

use stockade_policy::plan::RootEntry;

use super::super::{
    Act, CHANGE_MODE, CHANGE_TIMES, MAKE_DIRECTORY, MAKE_LINK, O_CREAT, O_WRONLY, REMOVE, RENAME, TRUNCATE, WRITE, on, on_new, open, read,
    read_link,
};
use crate::{
    attack::{Attack, Class, Control, ControlExpectation, ControlHost, Expected},
    fixture::Fixture,
    script::{CWD, n, script},
};

const CLASS: Class = Class::FileSystem;
/// Read-only mounts; behind them Landlock, for what changes contents.
const READ_ONLY: &[&str] = &["mounts", "landlock"];
const FIXED: Expected = Expected::Errno(&[EROFS, EACCES]);

pub(super) fn attacks(fixture: &Fixture) -> Vec<Attack> {
    let mut all = creating(fixture);
    all.extend(changing(fixture));
    all.extend(through_proc(fixture));
    all.extend(masked(fixture));
    all.extend(mount_flags(fixture));
    all.extend(special_files(fixture));
    all
}

fn creating(fixture: &Fixture) -> Vec<Attack> {
    let mut all = Vec::new();
    // An image may lack some.
    let is_there = |directory: &&str| directory.is_empty() || fixture.has(directory);
    for directory in
        ["", "/usr", "/usr/bin", "/usr/lib", "/usr/local/bin", "/etc", "/dev", "/home", "/sys", "/bin", "/lib"].into_iter().filter(is_there)
    {
        let path = format!("{directory}/stockade-probe");
        all.push(Attack::new(
            CLASS,
            format!("create {path}"),
            format!("create the file {path}"),
            READ_ONLY,
            open(&path, O_WRONLY | O_CREAT),
            FIXED,
            Control::Instead(open("/tmp/created", O_WRONLY | O_CREAT), ControlExpectation::Succeeds),
        ));
    }
    let make_fifo: Act = |b, path| {
        let path = b.text(path);
        b.attack("mknodat", &[CWD, path, n(0o010_600), n(0)]);
    };
    let others = [("make a directory", MAKE_DIRECTORY), ("make a symbolic link", MAKE_LINK), ("make a fifo", make_fifo)];
    for (kind, (what, make)) in others.into_iter().enumerate() {
        for (place, directory) in ["", "/etc", "/usr"].into_iter().filter(is_there).enumerate() {
            all.push(Attack::new(
                CLASS,
                format!("{what} in {}", if directory.is_empty() { "/" } else { directory }),
                format!("{what} where the policy lets nothing be written"),
                READ_ONLY,
                on(&format!("{directory}/made"), make),
                FIXED,
                Control::Instead(on(&format!("/tmp/made-{kind}-{place}"), make), ControlExpectation::Succeeds),
            ));
        }
    }
    all
}

/// Changing what is there. Landlock knows nothing of modes, times and attributes: there
/// the read-only mounts stand alone.
fn changing(fixture: &Fixture) -> Vec<Attack> {
    const MOUNTS: &[&str] = &["mounts"];
    let changes = [
        ("open for writing", READ_ONLY, WRITE),
        ("truncate", READ_ONLY, TRUNCATE),
        ("change the mode of", MOUNTS, CHANGE_MODE),
        ("change the times of", MOUNTS, CHANGE_TIMES),
        ("rename", READ_ONLY, RENAME),
        ("remove", READ_ONLY, REMOVE),
    ];
    let mut all = Vec::new();
    for (what, layers, change) in changes {
        all.push(Attack::new(
            CLASS,
            format!("{what} /etc/passwd"),
            format!("{what} the sandbox's own /etc/passwd, which belongs to the code's user"),
            layers,
            on("/etc/passwd", change),
            FIXED,
            Control::Instead(on_new(&format!("/tmp/{}", what.replace(' ', "-")), change), ControlExpectation::Succeeds),
        ));
    }
    let files = [
        "/usr/bin/env",
        "/usr/bin/sh",
        "/lib64/ld-linux-x86-64.so.2",
        "/etc/hosts",
        "/etc/group",
        "/etc/nsswitch.conf",
        "/etc/ld.so.cache",
    ];
    for path in files.into_iter().filter(|path| fixture.has(path) && Path::new(path).exists()) {
        all.push(Attack::new(
            CLASS,
            format!("write to {path}"),
            format!("open {path} for writing"),
            READ_ONLY,
            open(path, O_WRONLY),
            Expected::Errno(&[EROFS, EACCES, ETXTBSY]),
            Control::Instead(open(path, 0), ControlExpectation::Succeeds),
        ));
    }
    all
}

/// The kernel's switches and the memory of processes are files too.
fn through_proc(fixture: &Fixture) -> Vec<Attack> {
    let mut all = Vec::new();
    let switches = [
        "sys/kernel/core_pattern",
        "sys/kernel/hostname",
        "sys/kernel/modprobe",
        "sys/kernel/panic",
        "sys/kernel/randomize_va_space",
        "sys/kernel/pid_max",
        "sys/vm/overcommit_memory",
        "sys/vm/swappiness",
        "sys/fs/file-max",
        "sys/fs/protected_symlinks",
        "sys/fs/suid_dumpable",
        "sys/net/ipv4/ip_forward",
        "sys/net/ipv4/ip_unprivileged_port_start",
        "sys/user/max_user_namespaces",
        "self/comm",
        "self/oom_score_adj",
        "self/uid_map",
        "self/gid_map",
        "self/setgroups",
        "self/mem",
        "self/coredump_filter",
        "self/timerslack_ns",
        "self/loginuid",
        "self/attr/current",
        "self/attr/exec",
    ];
    for name in switches {
        let path = format!("/proc/{name}");
        if !Path::new(&path).exists() {
            continue;
        }
        all.push(Attack::new(
            CLASS,
            format!("write to {path}"),
            format!("open {path} for writing"),
            &["proc", "landlock"],
            open(&path, O_WRONLY),
            FIXED,
            Control::Instead(open(&path, 0), ControlExpectation::Succeeds),
        ));
    }
    all.push(Attack::new(
        CLASS,
        "change times in /proc",
        "set the times of /proc/self/comm, which belongs to the code's user",
        &["proc"],
        script(|b| {
            let path = b.text("/proc/self/comm");
            b.attack("utimensat", &[CWD, path, n(0), n(0)]);
        }),
        Expected::Errno(&[EROFS]),
        Control::Outside(ControlHost::Host, ControlExpectation::Succeeds),
    ));
    all.push(Attack::new(
        CLASS,
        "overwrite the running program",
        "open /proc/self/exe for writing, as the escape from runc did (CVE-2019-5736)",
        &["mounts", "landlock"],
        open("/proc/self/exe", O_WRONLY),
        Expected::Errno(&[EROFS, EACCES, ETXTBSY]),
        Control::Instead(open("/proc/self/exe", 0), ControlExpectation::Succeeds),
    ));
    for name in ["exe", "cwd", "root", "ns/mnt", "ns/user"] {
        all.push(Attack::new(
            CLASS,
            format!("follow /proc/1/{name}"),
            format!("read where pid 1's {name} leads"),
            &["executor"],
            read_link(&format!("/proc/1/{name}")),
            Expected::Errno(&[EACCES, EPERM]),
            Control::Instead(read_link(&format!("/proc/self/{name}")), ControlExpectation::Finds),
        ));
    }
    if fixture.uid == 0 && Path::new("/proc/sysrq-trigger").exists() {
        all.push(Attack::new(
            CLASS,
            "the trigger of magic keys",
            "open /proc/sysrq-trigger for writing",
            &["proc", "landlock"],
            open("/proc/sysrq-trigger", O_WRONLY),
            FIXED,
            Control::Outside(ControlHost::Host, ControlExpectation::Succeeds),
        ));
    }
    all
}

/// Files of /proc and /sys about the whole host.
fn masked(fixture: &Fixture) -> Vec<Attack> {
    let mut all = Vec::new();
    for entry in fixture.plan.root.iter() {
        let RootEntry::Mask { target } = entry else { continue };
        let path = Path::new("/").join(target).to_string_lossy().into_owned();
        // A file that the launching user cannot read outside either shows nothing.
        // What it shows to anybody but root changes by the moment.
        if path == "/proc/keys" && fixture.uid != 0 {
            continue;
        }
        let mut first = [0];
        let readable = std::fs::File::open(&path).and_then(|mut file| file.read(&mut first));
        if !matches!(readable, Ok(1)) {
            continue;
        }
        all.push(Attack::new(
            CLASS,
            format!("read {path}"),
            format!("read {path}, which describes the whole host"),
            &["proc masks"],
            read(&path),
            Expected::Value(0),
            Control::Outside(ControlHost::Host, ControlExpectation::Finds),
        ));
    }
    all
}

/// No mount may honour set-ID bits or, but for the six nodes, devices.
fn mount_flags(fixture: &Fixture) -> Vec<Attack> {
    const FLAGS: u32 = 80;
    const NOSUID: u64 = 2;
    const NODEV: u64 = 4;
    let flags = |path: &str| {
        script(|b| {
            let (path, to) = (b.text(path), b.space(120));
            b.attack("statfs", &[path, to]);
            b.load(to, FLAGS, 8, NOSUID | NODEV);
        })
    };
    let mut places: Vec<String> = fixture.plan.writable_mounts().iter().map(|path| path.to_string_lossy().into_owned()).collect();
    places.extend(["/", "/usr", "/proc"].into_iter().filter(|place| fixture.has(place)).map(String::from));
    places
        .into_iter()
        .map(|path| {
            Attack::new(
                CLASS,
                format!("set-ID bits and devices in {path}"),
                format!("find that {path} honours set-ID bits or device nodes"),
                &["scratch flags"],
                flags(&path),
                Expected::Value((NOSUID | NODEV).cast_signed()),
                Control::OutsideInstead(ControlHost::Host, flags("/"), ControlExpectation::Succeeds),
            )
        })
        .collect()
}

/// Sockets and fifos in places where a host program could meet them.
fn special_files(fixture: &Fixture) -> Vec<Attack> {
    let bind = |path: &str| {
        script(|b| {
            let mut address = vec![1, 0];
            address.extend_from_slice(path.as_bytes());
            address.push(0);
            let fd = b.need("socket", &[n(1), n(1), n(0)]);
            let length = i64::try_from(address.len()).unwrap_or(0);
            let address = b.bytes(&address);
            b.attack("bind", &[fd, address, n(length)]);
        })
    };
    let fifo = |path: &str| {
        script(|b| {
            let path = b.text(path);
            b.attack("mknodat", &[CWD, path, n(0o010_600), n(0)]);
        })
    };
    if fixture.plan.landlock.handled == 0 {
        return Vec::new();
    }
    let mut all = Vec::new();
    let mut places = vec![String::from("/dev/shm")];
    if !fixture.plan.scratch.read_only {
        places.push(fixture.plan.scratch.path.to_string_lossy().into_owned());
    }
    for (index, place) in places.into_iter().enumerate() {
        let denied = Expected::Errno(&[EACCES]);
        all.push(Attack::new(
            CLASS,
            format!("a fifo in {place}"),
            format!("make a fifo in {place}"),
            &["landlock"],
            fifo(&format!("{place}/fifo")),
            denied,
            Control::Instead(fifo(&format!("/tmp/fifo-{index}")), ControlExpectation::Succeeds),
        ));
        if fixture.has_family(1) {
            all.push(Attack::new(
                CLASS,
                format!("a socket in {place}"),
                format!("bind a socket in {place}"),
                &["landlock"],
                bind(&format!("{place}/socket")),
                denied,
                Control::Instead(bind(&format!("/tmp/socket-{index}")), ControlExpectation::Succeeds),
            ));
        }
    }
    all
}
