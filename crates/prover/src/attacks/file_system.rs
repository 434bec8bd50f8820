//! Files: what of the host can be seen, and what can be changed.

use std::{io::Read, path::Path};

use stockade_policy::plan::RootEntry;
use stockade_protocol::probe::Script;

use super::{O_CREAT, O_WRONLY, look, open, read, read_link, shared_namespace};
use crate::{
    attack::{Attack, Class, Control, Expected, Place, Wanted},
    script::{CWD, n, script},
    words::errno::{EACCES, EBUSY, ENOENT, EPERM, EROFS, ETXTBSY},
    world::World,
};

const CLASS: Class = Class::FileSystem;
/// A root built from nothing, in a mount namespace; behind it Landlock.
const ROOT: &[&str] = &["mounts", "landlock"];
/// Read-only mounts; behind them Landlock, for what changes contents.
const READ_ONLY: &[&str] = &["mounts", "landlock"];
const GONE: Expected = Expected::Errno(&[ENOENT]);
const CLOSED: Expected = Expected::Errno(&[ENOENT, EACCES]);
const FIXED: Expected = Expected::Errno(&[EROFS, EACCES]);

pub(crate) fn attacks(world: &World) -> Vec<Attack> {
    let mut all = Vec::new();
    all.extend(shared_namespace(CLASS, "mnt", ROOT));
    all.extend(mounts_of_the_host(world));
    all.extend(ways_to_the_secret(world));
    all.extend(places_of_the_host(world));
    all.extend(files_of_the_host(world));
    all.extend(victims(world));
    all.extend(creating());
    all.extend(changing(world));
    all.extend(through_proc(world));
    all.extend(masked(world));
    all.extend(mount_flags(world));
    all.extend(special_files(world));
    all.extend(protected(world));
    all
}

/// The host's mounts, of which none may be left, whether its files can be opened or not.
fn mounts_of_the_host(world: &World) -> Option<Attack> {
    let table = std::fs::read_to_string("/proc/self/mountinfo").ok()?;
    let inside = world.plan.required_mounts();
    let points = table.lines().filter_map(|line| line.split(' ').nth(4));
    // Some are inside too, or lie where the read stops.
    let own = points.filter(|point| {
        point.len() > 4 && !point.contains('\\') && !inside.iter().any(|path| path.ends_with(point.trim_start_matches('/')))
    });
    let sought = own.max_by_key(|point| point.len())?.to_owned();
    Some(Attack::new(
        CLASS,
        "a mount of the host",
        format!("find the host's mount {sought} in the table of mounts"),
        &["mounts"],
        script(|b| {
            let (to, length) = b.read("/proc/self/mountinfo");
            b.find(to, length, format!("{sought} ").as_bytes());
        }),
        Expected::Value(0),
        Control::Outside(Place::Host, Wanted::Finds),
    ))
}

/// A file of the host that nobody shows, by every way that leads to a file.
fn ways_to_the_secret(world: &World) -> Vec<Attack> {
    let path = world.secret_path();
    let ways = [
        ("by its path", path.clone()),
        ("past the root", format!("/../../../..{path}")),
        ("through /proc/self/root", format!("/proc/self/root{path}")),
        ("through /proc/self/cwd", format!("/proc/self/cwd/../../../../../../..{path}")),
        ("through /proc/thread-self/root", format!("/proc/thread-self/root{path}")),
        ("with slashes and dots", path.replace('/', "/.//")),
    ];
    let mut all: Vec<Attack> = ways
        .into_iter()
        .map(|(way, path)| {
            Attack::new(
                CLASS,
                format!("a file of the host, {way}"),
                format!("read {path}, which lies on the host"),
                ROOT,
                read(&path),
                GONE,
                Control::Outside(Place::Host, Wanted::Finds),
            )
        })
        .collect();
    let through = |name: &str, target: &str, prepare: bool| {
        script(|b| {
            if prepare {
                let fd = b.open(target, O_WRONLY | O_CREAT);
                b.need("write", &[fd, n(0), n(0)]);
            }
            let (link, to) = (b.text(name), b.text(target));
            b.need("symlinkat", &[to, CWD, link]);
            b.attack("openat", &[CWD, link, n(0)]);
        })
    };
    all.push(Attack::new(
        CLASS,
        "a file of the host, through a link",
        "read it through a symbolic link made inside",
        ROOT,
        through("/tmp/link-out", &path, false),
        GONE,
        Control::Instead(through("/tmp/link-in", "/tmp/link-target", true), Wanted::Succeeds),
    ));
    all.push(Attack::new(
        CLASS,
        "a file of the host, as a hard link",
        "link it into the sandbox under another name",
        ROOT,
        script(|b| {
            let (from, to) = (b.text(&path), b.text("/tmp/hard"));
            b.attack("linkat", &[CWD, from, CWD, to, n(0)]);
        }),
        GONE,
        Control::OutsideInstead(Place::Host, look(&path), Wanted::Succeeds),
    ));
    all.push(Attack::new(
        CLASS,
        "a file of the host, from pid 1's root",
        "read it through /proc/1/root",
        ROOT,
        read(&format!("/proc/1/root{path}")),
        CLOSED,
        Control::OutsideInstead(Place::Host, read(&format!("/proc/self/root{path}")), Wanted::Finds),
    ));
    all.push(Attack::new(
        CLASS,
        "the directory above the root",
        "leave the root by changing into .. again and again",
        ROOT,
        script(|b| {
            let (up, path, stat) = (b.text(".."), b.text(path.trim_start_matches('/')), b.space(144));
            (0..32).for_each(|_| {
                b.need("chdir", &[up]);
            });
            b.attack("newfstatat", &[CWD, path, stat, n(0)]);
        }),
        GONE,
        Control::Outside(Place::Host, Wanted::Succeeds),
    ));
    all
}

/// Directories that nearly every host has.
fn places_of_the_host(world: &World) -> Vec<Attack> {
    let places = [
        "/boot",
        "/media",
        "/mnt",
        "/opt",
        "/root",
        "/run",
        "/srv",
        "/var",
        "/var/lib",
        "/var/log",
        "/var/run",
        "/var/spool",
        "/var/tmp",
        "/sys/block",
        "/sys/bus",
        "/sys/class",
        "/sys/dev",
        "/sys/firmware",
        "/sys/fs",
        "/sys/fs/cgroup",
        "/sys/kernel",
        "/sys/module",
        "/sys/power",
        "/lost+found",
        "/etc/ssh",
        "/etc/systemd",
        "/etc/apt",
        "/etc/cron.d",
        "/etc/pam.d",
        "/etc/security",
        "/etc/default",
        "/etc/init.d",
        "/etc/network",
        "/etc/profile.d",
        "/dev/mapper",
        "/dev/mqueue",
        "/dev/disk",
        "/dev/net",
        "/dev/vfio",
        "/dev/cpu",
    ];
    let seen = places.into_iter().filter(|path| !world.has(path) && Path::new(path).exists());
    seen.map(|path| {
        Attack::new(
            CLASS,
            format!("see {path}"),
            format!("look for the host's {path}"),
            ROOT,
            look(path),
            CLOSED,
            Control::Outside(Place::Host, Wanted::Succeeds),
        )
    })
    .collect()
}

/// Files that tell secrets or give rights, where the host has them and does not show them.
fn files_of_the_host(world: &World) -> Vec<Attack> {
    let files = [
        "/etc/shadow",
        "/etc/gshadow",
        "/etc/sudoers",
        "/etc/fstab",
        "/etc/crontab",
        "/etc/environment",
        "/etc/issue",
        "/etc/os-release",
        "/etc/resolv.conf",
        "/etc/hostname",
        "/etc/machine-id",
        "/etc/group-",
        "/etc/passwd-",
        "/etc/subuid",
        "/etc/subgid",
        "/etc/login.defs",
        "/etc/ssh/sshd_config",
        "/root/.bashrc",
        "/dev/mem",
        "/dev/kmsg",
        "/dev/fuse",
        "/dev/kvm",
        "/dev/loop-control",
        "/dev/ptmx",
        "/dev/console",
        "/dev/tty0",
        "/dev/hpet",
        "/dev/rtc0",
        "/dev/port",
        "/dev/sda",
        "/dev/vda",
        "/dev/nvme0n1",
        "/dev/userfaultfd",
        "/dev/net/tun",
        "/dev/uinput",
        "/dev/vhost-net",
        "/dev/btrfs-control",
        "/dev/snapshot",
        "/dev/autofs",
        "/dev/cuse",
        "/run/docker.sock",
        "/var/run/docker.sock",
        "/run/containerd/containerd.sock",
        "/run/dbus/system_bus_socket",
        "/run/systemd/private",
    ];
    let there = files.into_iter().filter(|path| !world.has(path) && Path::new(path).exists());
    there
        .map(|path| {
            Attack::new(
                CLASS,
                format!("find {path}"),
                format!("find the host's {path}"),
                ROOT,
                look(path),
                CLOSED,
                Control::Outside(Place::Host, Wanted::Succeeds),
            )
        })
        .collect()
}

/// Acts on a file of the host that is there to be destroyed.
fn victims(world: &World) -> Vec<Attack> {
    type On = fn(&str) -> Script;
    let acts: [(&str, On); 7] = [
        ("open for writing", |path| open(path, O_WRONLY)),
        ("truncate", |path| {
            script(|b| {
                let path = b.text(path);
                b.attack("truncate", &[path, n(0)]);
            })
        }),
        ("change the mode of", |path| {
            script(|b| {
                let path = b.text(path);
                b.attack("fchmodat", &[CWD, path, n(0o600)]);
            })
        }),
        ("change the times of", |path| {
            script(|b| {
                let path = b.text(path);
                b.attack("utimensat", &[CWD, path, n(0), n(0)]);
            })
        }),
        ("rename", |path| {
            script(|b| {
                let (from, to) = (b.text(path), b.text(&format!("{path}-2")));
                b.attack("renameat2", &[CWD, from, CWD, to, n(0)]);
            })
        }),
        ("remove", |path| {
            script(|b| {
                let path = b.text(path);
                b.attack("unlinkat", &[CWD, path, n(0)]);
            })
        }),
        ("create a neighbour of", |path| open(&format!("{path}-neighbour"), O_WRONLY | O_CREAT)),
    ];
    let mut all = Vec::new();
    for (index, (what, act)) in acts.into_iter().enumerate() {
        let path = world.path(&format!("victim-{index}"));
        if std::fs::write(&path, "victim").is_err() {
            continue;
        }
        all.push(Attack::new(
            CLASS,
            format!("{what} a file of the host"),
            format!("{what} a file of the host, by its path"),
            ROOT,
            act(&path),
            GONE,
            Control::Outside(Place::Host, Wanted::Succeeds),
        ));
    }
    all
}

fn creating() -> Vec<Attack> {
    let mut all = Vec::new();
    for directory in ["", "/usr", "/usr/bin", "/usr/lib", "/usr/local/bin", "/etc", "/dev", "/home", "/sys", "/bin", "/lib"] {
        let path = format!("{directory}/stockade-probe");
        all.push(Attack::new(
            CLASS,
            format!("create {path}"),
            format!("create the file {path}"),
            READ_ONLY,
            open(&path, O_WRONLY | O_CREAT),
            FIXED,
            Control::Instead(open("/tmp/created", O_WRONLY | O_CREAT), Wanted::Succeeds),
        ));
    }
    type Make = fn(&str) -> Script;
    let others: [(&str, Make); 3] = [
        ("make a directory", |at| {
            script(|b| {
                let path = b.text(at);
                b.attack("mkdirat", &[CWD, path, n(0o755)]);
            })
        }),
        ("make a symbolic link", |at| {
            script(|b| {
                let (to, path) = (b.text("/tmp"), b.text(at));
                b.attack("symlinkat", &[to, CWD, path]);
            })
        }),
        ("make a fifo", |at| {
            script(|b| {
                let path = b.text(at);
                b.attack("mknodat", &[CWD, path, n(0o010_600), n(0)]);
            })
        }),
    ];
    for (kind, (what, make)) in others.into_iter().enumerate() {
        for (place, directory) in ["", "/etc", "/usr"].into_iter().enumerate() {
            all.push(Attack::new(
                CLASS,
                format!("{what} in {}", if directory.is_empty() { "/" } else { directory }),
                format!("{what} where the policy lets nothing be written"),
                READ_ONLY,
                make(&format!("{directory}/made")),
                FIXED,
                Control::Instead(make(&format!("/tmp/made-{kind}-{place}")), Wanted::Succeeds),
            ));
        }
    }
    all
}

/// Changing what is there. Landlock knows nothing of modes, times and attributes: there
/// the read-only mounts stand alone.
fn changing(world: &World) -> Vec<Attack> {
    const MOUNTS: &[&str] = &["mounts"];
    type Change = fn(&mut crate::script::Builder, stockade_protocol::probe::Value);
    let changes: [(&str, &'static [&'static str], Change); 6] = [
        ("open for writing", READ_ONLY, |b, path| {
            b.attack("openat", &[CWD, path, n(O_WRONLY)]);
        }),
        ("truncate", READ_ONLY, |b, path| {
            b.attack("truncate", &[path, n(0)]);
        }),
        ("change the mode of", MOUNTS, |b, path| {
            b.attack("fchmodat", &[CWD, path, n(0o666)]);
        }),
        ("change the times of", MOUNTS, |b, path| {
            b.attack("utimensat", &[CWD, path, n(0), n(0)]);
        }),
        ("rename", READ_ONLY, |b, path| {
            let to = b.text("/etc/renamed");
            b.attack("renameat2", &[CWD, path, CWD, to, n(0)]);
        }),
        ("remove", READ_ONLY, |b, path| {
            b.attack("unlinkat", &[CWD, path, n(0)]);
        }),
    ];
    let mut all = Vec::new();
    for (what, layers, change) in changes {
        let of = |path: &str, make: bool| {
            script(|b| {
                if make {
                    b.open(path, O_WRONLY | O_CREAT);
                }
                let path = b.text(path);
                change(b, path);
            })
        };
        // A rename within /tmp, since its target is read-only.
        let twin = if what == "rename" {
            script(|b| {
                b.open("/tmp/rename-me", O_WRONLY | O_CREAT);
                let (from, to) = (b.text("/tmp/rename-me"), b.text("/tmp/renamed"));
                b.attack("renameat2", &[CWD, from, CWD, to, n(0)]);
            })
        } else {
            of(&format!("/tmp/{}", what.replace(' ', "-")), true)
        };
        all.push(Attack::new(
            CLASS,
            format!("{what} /etc/passwd"),
            format!("{what} the sandbox's own /etc/passwd, which belongs to the code's user"),
            layers,
            of("/etc/passwd", false),
            FIXED,
            Control::Instead(twin, Wanted::Succeeds),
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
    for path in files.into_iter().filter(|path| world.has(path) && Path::new(path).exists()) {
        all.push(Attack::new(
            CLASS,
            format!("write to {path}"),
            format!("open {path} for writing"),
            READ_ONLY,
            open(path, O_WRONLY),
            Expected::Errno(&[EROFS, EACCES, ETXTBSY]),
            Control::Instead(open(path, 0), Wanted::Succeeds),
        ));
    }
    all
}

/// The kernel's switches and the memory of processes are files too.
fn through_proc(world: &World) -> Vec<Attack> {
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
            Control::Instead(open(&path, 0), Wanted::Succeeds),
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
        Control::Outside(Place::Host, Wanted::Succeeds),
    ));
    all.push(Attack::new(
        CLASS,
        "overwrite the running program",
        "open /proc/self/exe for writing, as the escape from runc did (CVE-2019-5736)",
        &["mounts", "landlock"],
        open("/proc/self/exe", O_WRONLY),
        Expected::Errno(&[EROFS, EACCES, ETXTBSY]),
        Control::Instead(open("/proc/self/exe", 0), Wanted::Succeeds),
    ));
    for name in ["exe", "cwd", "root", "ns/mnt", "ns/user"] {
        all.push(Attack::new(
            CLASS,
            format!("follow /proc/1/{name}"),
            format!("read where pid 1's {name} leads"),
            &["executor"],
            read_link(&format!("/proc/1/{name}")),
            Expected::Errno(&[EACCES, EPERM]),
            Control::Instead(read_link(&format!("/proc/self/{name}")), Wanted::Finds),
        ));
    }
    if world.uid == 0 && Path::new("/proc/sysrq-trigger").exists() {
        all.push(Attack::new(
            CLASS,
            "the trigger of magic keys",
            "open /proc/sysrq-trigger for writing",
            &["proc", "landlock"],
            open("/proc/sysrq-trigger", O_WRONLY),
            FIXED,
            Control::Outside(Place::Host, Wanted::Succeeds),
        ));
    }
    all
}

/// What the kernel tells about itself and others.
fn masked(world: &World) -> Vec<Attack> {
    let mut all = Vec::new();
    for entry in &world.plan.root {
        let RootEntry::Mask { target } = entry else { continue };
        let path = Path::new("/").join(target).to_string_lossy().into_owned();
        // Whoever may not read it outside loses nothing inside.
        // What it shows to anybody but root changes by the moment.
        if path == "/proc/keys" && world.uid != 0 {
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
            format!("read {path}, which tells of the whole host"),
            &["proc masks"],
            read(&path),
            Expected::Value(0),
            Control::Outside(Place::Host, Wanted::Finds),
        ));
    }
    all
}

/// No mount may honour set-ID bits or, but for the six nodes, devices.
fn mount_flags(world: &World) -> Vec<Attack> {
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
    let mut places: Vec<String> = world.plan.writable_mounts().iter().map(|path| path.to_string_lossy().into_owned()).collect();
    places.extend(["/", "/usr", "/proc"].map(String::from));
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
                Control::OutsideInstead(Place::Host, flags("/"), Wanted::Succeeds),
            )
        })
        .collect()
}

/// Sockets and fifos in places where a host program could meet them.
fn special_files(world: &World) -> Vec<Attack> {
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
    if world.plan.landlock.handled == 0 {
        return Vec::new();
    }
    let mut all = Vec::new();
    let mut places = vec![String::from("/dev/shm")];
    if !world.plan.scratch.read_only {
        places.push(world.plan.scratch.path.to_string_lossy().into_owned());
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
            Control::Instead(fifo(&format!("/tmp/fifo-{index}")), Wanted::Succeeds),
        ));
        if world.has_family(1) {
            all.push(Attack::new(
                CLASS,
                format!("a socket in {place}"),
                format!("bind a socket in {place}"),
                &["landlock"],
                bind(&format!("{place}/socket")),
                denied,
                Control::Instead(bind(&format!("/tmp/socket-{index}")), Wanted::Succeeds),
            ));
        }
    }
    all
}

/// What the policy hides in a host scratch, and what lies beside it.
fn protected(world: &World) -> Vec<Attack> {
    let scratch = world.scratch.to_string_lossy().into_owned();
    let mut all = vec![
        Attack::new(
            CLASS,
            "beside the scratch",
            "read a file of the host that lies beside the scratch, by ..",
            ROOT,
            read("../secret"),
            CLOSED,
            Control::OutsideInstead(Place::Host, read(&format!("{scratch}/../secret")), Wanted::Finds),
        )
        .in_host_scratch(),
        Attack::new(
            CLASS,
            "a link of the scratch that leads out",
            "read the host's secret through a link that lay in the scratch before",
            ROOT,
            read("link-to-secret"),
            GONE,
            Control::OutsideInstead(Place::Host, read(&format!("{scratch}/link-to-secret")), Wanted::Finds),
        )
        .in_host_scratch(),
    ];
    if world.policy.scratch.hidden.iter().any(|glob| glob == ".env*") {
        all.push(
            Attack::new(
                CLASS,
                "a hidden file",
                "read the .env of the scratch, which the policy hides",
                &["scratch rules"],
                read(".env"),
                Expected::Errno(&[EACCES]),
                Control::OutsideInstead(Place::Host, read(&format!("{scratch}/.env")), Wanted::Finds),
            )
            .in_host_scratch(),
        );
        all.push(
            Attack::new(
                CLASS,
                "uncover a hidden file",
                "remove what stands over the .env of the scratch",
                &["scratch rules"],
                script(|b| {
                    let path = b.text(".env");
                    b.attack("unlinkat", &[CWD, path, n(0)]);
                }),
                Expected::Errno(&[EBUSY, EROFS, EACCES]),
                Control::Instead(
                    script(|b| {
                        b.open("removable", O_WRONLY | O_CREAT);
                        let path = b.text("removable");
                        b.attack("unlinkat", &[CWD, path, n(0)]);
                    }),
                    Wanted::Succeeds,
                ),
            )
            .in_host_scratch(),
        );
    }
    if world.policy.scratch.access == stockade_policy::model::Access::Ro {
        all.retain(|attack| !attack.name.starts_with("uncover"));
    }
    all
}
