//! Rights: capabilities, other users, namespaces in which the code would be root.

use nix::libc::{EINVAL, EPERM};
use stockade_policy::plan::UserNamespaces;
use stockade_protocol::probe::Script;

use super::shared_namespace;
use crate::{
    attack::{Attack, Class, Control, ControlExpectation, ControlHost, Expected},
    fixture::Fixture,
    script::{CWD, n, one, script},
};

const CLASS: Class = Class::Privileges;
const CAPABILITIES: &[&str] = &["capabilities"];
const REFUSED: Expected = Expected::Errno(&[EPERM]);

pub(crate) fn attacks(fixture: &Fixture) -> Vec<Attack> {
    let mut all = Vec::new();
    if fixture.plan.identity.user_namespaces == UserNamespaces::Nested {
        all.extend(shared_namespace(CLASS, "user", &["user_namespace"]));
        all.extend(maps(fixture));
    }
    all.extend(other_ids());
    all.extend(capabilities());
    all.extend(building_blocks());
    all.extend(owners(fixture));
    all
}

/// The maps of a user namespace show the ids of the one above it.
fn maps(fixture: &Fixture) -> Vec<Attack> {
    let (inside, outside) = (fixture.plan.identity.inside.0, fixture.plan.identity.outside.0);
    let found = |what: String| {
        script(move |b| {
            let (to, length) = b.read("/proc/self/uid_map");
            b.find(to, length, what.as_bytes());
        })
    };
    let outside_sees = |what: &str| {
        let what = what.to_owned();
        script(move |b| {
            let (to, length) = b.read("/proc/self/uid_map");
            b.find(to, length, what.as_bytes());
        })
    };
    let mut all = vec![Attack::new(
        CLASS,
        "every user of the host",
        "be in a user namespace that maps all ids of the host",
        &["user_namespace"],
        found(String::from("4294967295")),
        Expected::Value(0),
        Control::Outside(ControlHost::Host, ControlExpectation::Finds),
    )];
    if inside != outside {
        // Where root launches, the run has its own uid. Another run may hold the planned one;
        // all such uids share their first digits.
        let digits = outside.to_string();
        let seen = if digits.len() == 10 { &digits[..4] } else { &digits };
        all.push(Attack::new(
            CLASS,
            "the run's uid on the host",
            "learn it from the uid map, as is possible in the user namespace that owns the mounts",
            &["inner user namespace"],
            found(format!("{inside:>10} {seen:>width$}", width = 10 - (digits.len() - seen.len()))),
            Expected::Value(0),
            Control::OutsideInstead(ControlHost::Host, outside_sees("0          0"), ControlExpectation::Finds),
        ));
    }
    all
}

fn other_ids() -> Vec<Attack> {
    let zero = n(0);
    [
        ("become root", "setuid", vec![zero]),
        ("become root in all three ids", "setresuid", vec![zero, zero, zero]),
        ("become root in two ids", "setreuid", vec![zero, zero]),
        ("join root's group", "setgid", vec![zero]),
        ("join root's group in all three ids", "setresgid", vec![zero, zero, zero]),
        ("join root's group in two ids", "setregid", vec![zero, zero]),
    ]
    .into_iter()
    .map(|(name, call, arguments)| {
        Attack::new(
            CLASS,
            name,
            format!("{name}, by {call}"),
            &["seccomp", "capabilities"],
            one(call, &arguments),
            REFUSED,
            Control::Outside(ControlHost::OwnNamespaces, ControlExpectation::Succeeds),
        )
    })
    .collect()
}

const PR_SET_KEEPCAPS: i64 = 8;
const PR_CAPBSET_READ: i64 = 23;
const PR_SET_SECUREBITS: i64 = 28;
const PR_GET_NO_NEW_PRIVS: i64 = 39;

fn capabilities() -> Vec<Attack> {
    let known = [
        (0, "CAP_CHOWN"),
        (1, "CAP_DAC_OVERRIDE"),
        (2, "CAP_DAC_READ_SEARCH"),
        (3, "CAP_FOWNER"),
        (4, "CAP_FSETID"),
        (5, "CAP_KILL"),
        (6, "CAP_SETGID"),
        (7, "CAP_SETUID"),
        (8, "CAP_SETPCAP"),
        (12, "CAP_NET_ADMIN"),
        (13, "CAP_NET_RAW"),
        (15, "CAP_IPC_OWNER"),
        (16, "CAP_SYS_MODULE"),
        (17, "CAP_SYS_RAWIO"),
        (18, "CAP_SYS_CHROOT"),
        (19, "CAP_SYS_PTRACE"),
        (21, "CAP_SYS_ADMIN"),
        (22, "CAP_SYS_BOOT"),
        (23, "CAP_SYS_NICE"),
        (24, "CAP_SYS_RESOURCE"),
        (25, "CAP_SYS_TIME"),
        (27, "CAP_MKNOD"),
        (29, "CAP_AUDIT_WRITE"),
        (31, "CAP_SETFCAP"),
        (34, "CAP_SYSLOG"),
        (38, "CAP_PERFMON"),
        (39, "CAP_BPF"),
        (40, "CAP_CHECKPOINT_RESTORE"),
    ];
    let mut all: Vec<Attack> = known
        .into_iter()
        .map(|(number, name)| {
            Attack::new(
                CLASS,
                format!("{name} in the bounding set"),
                format!("find {name} in the bounding set, from which a program could gain it"),
                CAPABILITIES,
                one("prctl", &[n(PR_CAPBSET_READ), n(number)]),
                Expected::Value(0),
                Control::Outside(ControlHost::OwnNamespaces, ControlExpectation::Finds),
            )
        })
        .collect();
    for (offset, set) in [(0, "effective"), (4, "permitted")] {
        all.push(Attack::new(
            CLASS,
            format!("a capability in the {set} set"),
            format!("find any capability in the {set} set"),
            CAPABILITIES,
            held(offset),
            Expected::Value(0),
            Control::Outside(ControlHost::OwnNamespaces, ControlExpectation::Finds),
        ));
    }
    all.push(Attack::new(
        CLASS,
        "take capabilities",
        "set all capabilities by capset",
        &["seccomp", "capabilities"],
        script(|b| {
            let (header, data) = (b.bytes(&CAPABILITY_VERSION_3), b.bytes(&[0xff, 0, 0, 0, 0xff, 0, 0, 0, 0, 0, 0, 0]));
            b.space(12);
            b.attack("capset", &[header, data]);
        }),
        REFUSED,
        Control::Outside(ControlHost::OwnNamespaces, ControlExpectation::Succeeds),
    ));
    all.push(Attack::new(
        CLASS,
        "keep capabilities",
        "ask that capabilities survive a change of user",
        CAPABILITIES,
        one("prctl", &[n(PR_SET_KEEPCAPS), n(1)]),
        REFUSED,
        Control::Outside(ControlHost::Host, ControlExpectation::Succeeds),
    ));
    all.push(Attack::new(
        CLASS,
        "unlock the secure bits",
        "clear the bits that keep uid 0 from having capabilities",
        CAPABILITIES,
        one("prctl", &[n(PR_SET_SECUREBITS), n(0)]),
        REFUSED,
        Control::Outside(ControlHost::OwnNamespaces, ControlExpectation::Succeeds),
    ));
    all.push(Attack::new(
        CLASS,
        "rights from a program's file",
        "find no_new_privs unset, so that set-ID bits and file capabilities count",
        &["no_new_privs"],
        one("prctl", &[n(PR_GET_NO_NEW_PRIVS)]),
        Expected::Value(1),
        Control::Outside(ControlHost::Host, ControlExpectation::Succeeds),
    ));
    all
}

/// Version 3, of this process.
const CAPABILITY_VERSION_3: [u8; 8] = [0x22, 0x05, 0x08, 0x20, 0, 0, 0, 0];

fn held(offset: u32) -> Script {
    script(|b| {
        let (header, data) = (b.bytes(&CAPABILITY_VERSION_3), b.space(24));
        b.attack("capget", &[header, data]);
        b.load(data, offset, 4, u64::from(u32::MAX));
    })
}

/// What a sandbox is built of, and what would take it apart.
fn building_blocks() -> Vec<Attack> {
    const NAMESPACES: [(&str, i64); 8] = [
        ("user", 0x1000_0000),
        ("mount", 0x2_0000),
        ("PID", 0x2000_0000),
        ("network", 0x4000_0000),
        ("UTS", 0x400_0000),
        ("IPC", 0x800_0000),
        ("cgroup", 0x200_0000),
        ("time", 0x80),
    ];
    let mut all: Vec<Attack> = NAMESPACES
        .into_iter()
        .map(|(name, flag)| {
            Attack::new(
                CLASS,
                format!("leave for a new {name} namespace"),
                format!("unshare the {name} namespace"),
                &["seccomp", "user_namespace counts"],
                one("unshare", &[n(flag)]),
                REFUSED,
                Control::Outside(ControlHost::OwnNamespaces, ControlExpectation::Succeeds),
            )
        })
        .collect();
    let acts: [(&str, &str, Script); 8] = [
        (
            "mount a tmpfs",
            "mount a new tmpfs on /tmp",
            script(|b| {
                let (none, at, kind) = (b.text("none"), b.text("/tmp"), b.text("tmpfs"));
                b.attack("mount", &[none, at, kind, n(0), n(0)]);
            }),
        ),
        (
            "bind a directory",
            "bind /usr onto /tmp",
            script(|b| {
                const BIND: i64 = 0x1000;
                let (from, at) = (b.text("/usr"), b.text("/tmp"));
                b.attack("mount", &[from, at, n(0), n(BIND), n(0)]);
            }),
        ),
        (
            "change a mount's propagation",
            "make the root mount private",
            script(|b| {
                const PRIVATE: i64 = 0x4_0000;
                let at = b.text("/");
                b.attack("mount", &[at, at, n(0), n(PRIVATE), n(0)]);
            }),
        ),
        (
            "copy a mount",
            "copy the mount of / by open_tree",
            script(|b| {
                const CLONE_RECURSIVE: i64 = 0x8001;
                let path = b.text("/");
                b.attack("open_tree", &[CWD, path, n(CLONE_RECURSIVE)]);
            }),
        ),
        (
            "begin a file system",
            "begin a tmpfs by fsopen",
            script(|b| {
                let kind = b.text("tmpfs");
                b.attack("fsopen", &[kind, n(0)]);
            }),
        ),
        (
            "change the root directory",
            "chroot into /",
            script(|b| {
                let path = b.text("/");
                b.attack("chroot", &[path]);
            }),
        ),
        (
            "rename the host",
            "set the host name",
            script(|b| {
                let name = b.text("x");
                b.attack("sethostname", &[name, n(1)]);
            }),
        ),
        (
            "rename the domain",
            "set the domain name",
            script(|b| {
                let name = b.text("x");
                b.attack("setdomainname", &[name, n(1)]);
            }),
        ),
    ];
    all.extend(acts.into_iter().map(|(name, tried, act)| {
        Attack::new(
            CLASS,
            name,
            tried,
            &["seccomp", "user_namespace"],
            act,
            REFUSED,
            Control::Outside(ControlHost::OwnNamespaces, ControlExpectation::Succeeds),
        )
    }));
    all
}

/// Giving files away, or taking them.
fn owners(fixture: &Fixture) -> Vec<Attack> {
    if !fixture.knows("fchownat") {
        return Vec::new();
    }
    let give = |path: &str, uid: u32, gid: u32| {
        script(|b| {
            b.open(path, 0o101);
            let path = b.text(path);
            b.attack("fchownat", &[CWD, path, n(i64::from(uid)), n(i64::from(gid)), n(0)]);
        })
    };
    let own = fixture.plan.identity.inside;
    [("root", 0, 0), ("nobody", 65534, 65534), ("the host's root by its number outside", 4_294_901_760, 4_294_901_760)]
        .into_iter()
        .enumerate()
        .map(|(index, (owner, uid, gid))| {
            Attack::new(
                CLASS,
                format!("give a file to {owner}"),
                format!("give the code's own file to {uid}:{gid}"),
                &["user_namespace", "capabilities"],
                give(&format!("/tmp/given-{index}"), uid, gid),
                Expected::Errno(&[EPERM, EINVAL]),
                Control::Instead(give(&format!("/tmp/kept-{index}"), own.0, own.1), ControlExpectation::Succeeds),
            )
        })
        .collect()
}
