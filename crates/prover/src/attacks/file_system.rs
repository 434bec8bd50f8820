//! Files: what of the host can be seen, and what can be changed.

mod inside;
mod scratch;

use std::path::Path;

use nix::libc::{EACCES, EBUSY, ENOENT, EROFS};

use super::{
    Act, CHANGE_MODE, CHANGE_TIMES, CREATE, O_CREAT, O_WRONLY, REMOVE, RENAME, TRUNCATE, WRITE, look, on, on_new, seek, shared_namespace,
};
use crate::{
    attack::{Attack, Class, Control, ControlExpectation, ControlHost, Expected},
    fixture::{Fixture, write_new},
    script::{CWD, n, script},
};

const CLASS: Class = Class::FileSystem;
/// A root built from nothing, in a mount namespace; behind it Landlock.
const ROOT: &[&str] = &["mounts", "landlock"];
const GONE: Expected = Expected::Errno(&[ENOENT]);
const CLOSED: Expected = Expected::Errno(&[ENOENT, EACCES]);

pub(crate) fn attacks(fixture: &Fixture) -> Vec<Attack> {
    let mut all = Vec::new();
    all.extend(shared_namespace(CLASS, "mnt", ROOT));
    all.extend(mounts_of_the_host(fixture));
    all.extend(ways_to_the_secret(fixture));
    all.extend(places_of_the_host(fixture));
    all.extend(files_of_the_host(fixture));
    all.extend(victims(fixture));
    all.extend(inside::attacks(fixture));
    all.extend(protected(fixture));
    all.extend(scratch::attacks(fixture));
    all
}

/// The host's mounts, of which none may be left, whether its files can be opened or not.
fn mounts_of_the_host(fixture: &Fixture) -> Option<Attack> {
    let table = std::fs::read_to_string("/proc/self/mountinfo").ok()?;
    let inside = fixture.plan.required_mounts();
    let points = table.lines().filter_map(|line| line.split(' ').nth(4));
    // Some are inside too, or lie where the read stops.
    let own = points.filter(|point| {
        point.len() > 4 && !point.contains('\\') && !inside.iter().any(|path| path.ends_with(point.trim_start_matches('/')))
    });
    let mount = own.max_by_key(|point| point.len())?.to_owned();
    Some(Attack::new(
        CLASS,
        "a mount of the host",
        format!("find the host's mount {mount} in the table of mounts"),
        &["mounts"],
        script(|b| {
            let (to, length) = b.read("/proc/self/mountinfo");
            b.find(to, length, format!("{mount} ").as_bytes());
        }),
        Expected::Value(0),
        Control::Outside(ControlHost::Host, ControlExpectation::Finds),
    ))
}

/// A file of the host that no policy shows, by every kind of path.
fn ways_to_the_secret(fixture: &Fixture) -> Vec<Attack> {
    let path = fixture.secret_path();
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
                seek(&path, &fixture.secret),
                GONE,
                Control::Outside(ControlHost::Host, ControlExpectation::Finds),
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
        Control::Instead(through("/tmp/link-in", "/tmp/link-target", true), ControlExpectation::Succeeds),
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
        Control::OutsideInstead(ControlHost::Host, look(&path), ControlExpectation::Succeeds),
    ));
    all.push(Attack::new(
        CLASS,
        "a file of the host, from pid 1's root",
        "read it through /proc/1/root",
        ROOT,
        seek(&format!("/proc/1/root{path}"), &fixture.secret),
        CLOSED,
        Control::OutsideInstead(ControlHost::Host, seek(&format!("/proc/self/root{path}"), &fixture.secret), ControlExpectation::Finds),
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
        Control::Outside(ControlHost::Host, ControlExpectation::Succeeds),
    ));
    all
}

/// Directories that nearly every host has.
fn places_of_the_host(fixture: &Fixture) -> Vec<Attack> {
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
    let seen = places.into_iter().filter(|path| !fixture.has(path) && Path::new(path).exists());
    seen.map(|path| {
        Attack::new(
            CLASS,
            format!("see {path}"),
            format!("look for the host's {path}"),
            ROOT,
            look(path),
            CLOSED,
            Control::Outside(ControlHost::Host, ControlExpectation::Succeeds),
        )
    })
    .collect()
}

/// Files that tell secrets or give rights, where the host has them and does not show them.
fn files_of_the_host(fixture: &Fixture) -> Vec<Attack> {
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
    let there = files.into_iter().filter(|path| !fixture.has(path) && Path::new(path).exists());
    there
        .map(|path| {
            Attack::new(
                CLASS,
                format!("find {path}"),
                format!("find the host's {path}"),
                ROOT,
                look(path),
                CLOSED,
                Control::Outside(ControlHost::Host, ControlExpectation::Succeeds),
            )
        })
        .collect()
}

/// Acts on a file of the host that is there to be destroyed.
fn victims(fixture: &Fixture) -> Vec<Attack> {
    let create_neighbour: Act = |b, path| CREATE(b, &format!("{path}-neighbour"));
    let acts = [
        ("open for writing", WRITE),
        ("truncate", TRUNCATE),
        ("change the mode of", CHANGE_MODE),
        ("change the times of", CHANGE_TIMES),
        ("rename", RENAME),
        ("remove", REMOVE),
        ("create a neighbour of", create_neighbour),
    ];
    let mut all = Vec::new();
    for (index, (what, act)) in acts.into_iter().enumerate() {
        let path = fixture.path(&format!("victim-{index}"));
        if write_new(Path::new(&path), "victim").is_err() {
            continue;
        }
        all.push(Attack::new(
            CLASS,
            format!("{what} a file of the host"),
            format!("{what} a file of the host, by its path"),
            ROOT,
            on(&path, act),
            GONE,
            Control::Outside(ControlHost::Host, ControlExpectation::Succeeds),
        ));
    }
    all
}

/// What the policy hides in a host scratch, and files next to the scratch.
fn protected(fixture: &Fixture) -> Vec<Attack> {
    let scratch = fixture.scratch.to_string_lossy().into_owned();
    let mut all = vec![
        Attack::new(
            CLASS,
            "beside the scratch",
            "read a file of the host next to the scratch, by ..",
            ROOT,
            seek("../../host/secret", &fixture.secret),
            CLOSED,
            Control::OutsideInstead(ControlHost::Host, seek(&fixture.secret_path(), &fixture.secret), ControlExpectation::Finds),
        )
        .in_host_scratch(),
        Attack::new(
            CLASS,
            "a link of the scratch that leads out",
            "read the host's secret through a link that lay in the scratch before",
            ROOT,
            seek("link-to-secret", &fixture.secret),
            GONE,
            Control::OutsideInstead(
                ControlHost::Host,
                seek(&format!("{scratch}/link-to-secret"), &fixture.secret),
                ControlExpectation::Finds,
            ),
        )
        .in_host_scratch(),
    ];
    if fixture.policy.scratch.hidden.iter().any(|glob| glob == ".env*") {
        all.push(
            Attack::new(
                CLASS,
                "a hidden file",
                "read the .env of the scratch, which the policy hides",
                &["scratch rules"],
                seek(".env", &fixture.secret),
                Expected::Errno(&[EACCES]),
                Control::OutsideInstead(ControlHost::Host, seek(&format!("{scratch}/.env"), &fixture.secret), ControlExpectation::Finds),
            )
            .in_host_scratch(),
        );
        all.push(
            Attack::new(
                CLASS,
                "uncover a hidden file",
                "remove the mount that hides the scratch's .env",
                &["scratch rules"],
                on(".env", REMOVE),
                Expected::Errno(&[EBUSY, EROFS, EACCES]),
                Control::Instead(on_new("removable", REMOVE), ControlExpectation::Succeeds),
            )
            .in_host_scratch(),
        );
    }
    if fixture.policy.scratch.access == stockade_policy::model::Access::Ro {
        all.retain(|attack| !attack.name.starts_with("uncover"));
    }
    all
}
