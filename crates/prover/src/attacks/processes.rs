//! Processes: the launcher, pid 1 and other processes of the host.

use nix::libc::{EACCES, ENOENT, EPERM, ESRCH};
use stockade_protocol::probe::Script;

use super::{look, open, read, read_link, shared_namespace};
use crate::{
    attack::{Attack, Class, Control, ControlExpectation, ControlHost, Expected},
    fixture::Fixture,
    script::{n, one, script},
};

const CLASS: Class = Class::Processes;
const PIDS: &[&str] = &["PID namespace"];
/// Pid 1 is not dumpable, and the payload's own Landlock layer shuts it off.
const PID_1: &[&str] = &["executor", "landlock of the payload"];

pub(crate) fn attacks(fixture: &Fixture) -> Vec<Attack> {
    let mut all = Vec::new();
    all.extend(shared_namespace(CLASS, "pid", PIDS));
    all.extend(the_launcher(fixture));
    all.extend(pid_1(fixture));
    all
}

/// By its pid on the host, which no process inside has.
fn the_launcher(fixture: &Fixture) -> Vec<Attack> {
    let (pid, target) = (i64::from(fixture.target.pid()), fixture.target.words());
    let gone = Expected::Errno(&[ESRCH]);
    let calls: [(&str, Script); 7] = [
        ("signal", one("kill", &[n(pid), n(0)])),
        ("signal a thread of", one("tgkill", &[n(pid), n(pid), n(0)])),
        ("learn the process group of", one("getpgid", &[n(pid)])),
        ("learn the session of", one("getsid", &[n(pid)])),
        ("learn the priority of", one("getpriority", &[n(0), n(pid)])),
        ("learn the scheduler of", one("sched_getscheduler", &[n(pid)])),
        ("open a pidfd of", one("pidfd_open", &[n(pid), n(0)])),
    ];
    let names = ["kill", "tgkill", "getpgid", "getsid", "getpriority", "sched_getscheduler", "pidfd_open"];
    let mut all: Vec<Attack> = calls
        .into_iter()
        .zip(names)
        .filter(|(_, name)| fixture.knows(name))
        .map(|((what, act), _)| {
            Attack::new(
                CLASS,
                format!("{what} the launcher"),
                format!("{what} {target}, by its pid on the host ({pid})"),
                PIDS,
                act,
                gone,
                Control::Outside(ControlHost::Host, ControlExpectation::Succeeds),
            )
        })
        .collect();
    for name in ["cmdline", "environ", "status", "maps", "stat", "cgroup"] {
        all.push(Attack::new(
            CLASS,
            format!("read the launcher's {name}"),
            format!("read /proc/{pid}/{name}, of {target}"),
            PIDS,
            read(&format!("/proc/{pid}/{name}")),
            Expected::Errno(&[ENOENT]),
            Control::OutsideInstead(ControlHost::Host, look(&format!("/proc/{pid}/{name}")), ControlExpectation::Succeeds),
        ));
    }
    all
}

fn pid_1(fixture: &Fixture) -> Vec<Attack> {
    let mut all = Vec::new();
    // Not timers, which Linux 6.1 still opens for everybody in the PID namespace; pid 1 has none.
    let files = ["environ", "mem", "maps", "auxv", "io", "syscall", "pagemap", "personality"]
        .map(|name| (name, open as fn(&str, i64) -> Script, 0));
    let directories = ["fd", "fdinfo", "map_files", "task/1/fd"].map(|name| (name, list as fn(&str, i64) -> Script, 0o200_000));
    for (name, act, flags) in files.into_iter().chain(directories) {
        let (of_1, own) = (format!("/proc/1/{name}"), format!("/proc/self/{}", name.trim_start_matches("task/1/")));
        if !std::path::Path::new(&own).exists() {
            continue;
        }
        all.push(Attack::new(
            CLASS,
            format!("read pid 1's {name}"),
            format!("open {of_1}"),
            PID_1,
            act(&of_1, flags),
            Expected::Errno(&[EACCES, EPERM]),
            Control::Instead(act(&own, flags), ControlExpectation::Succeeds),
        ));
    }
    for name in ["ns/pid", "ns/net", "ns/ipc", "ns/uts", "ns/cgroup"] {
        all.push(Attack::new(
            CLASS,
            format!("follow pid 1's {name}"),
            format!("read where /proc/1/{name} leads"),
            PID_1,
            read_link(&format!("/proc/1/{name}")),
            Expected::Errno(&[EACCES, EPERM]),
            Control::Instead(read_link(&format!("/proc/self/{name}")), ControlExpectation::Finds),
        ));
    }
    // Scopes came with Landlock's ABI 6; before, pid 1 ignores what it does not expect.
    if fixture.plan.payload_landlock.scoped != 0 {
        let refused = Expected::Errno(&[EPERM]);
        let own_pid = |b: &mut crate::script::Builder| b.need("getpid", &[]);
        let signals: [(&str, i64); 5] = [("a signal of no effect", 0), ("SIGKILL", 9), ("SIGTERM", 15), ("SIGSTOP", 19), ("SIGCHLD", 17)];
        for (what, signal) in signals {
            all.push(Attack::new(
                CLASS,
                format!("send pid 1 {what}"),
                format!("send {what} to pid 1, which reports the run's end"),
                &["landlock of the payload"],
                one("kill", &[n(1), n(signal)]),
                refused,
                Control::Instead(
                    script(|b| {
                        let own = own_pid(b);
                        b.attack("kill", &[own, n(0)]);
                    }),
                    ControlExpectation::Succeeds,
                ),
            ));
        }
        let by_descriptor = |who: Option<i64>| {
            script(|b| {
                let pid = who.map_or_else(|| own_pid(b), n);
                let fd = b.need("pidfd_open", &[pid, n(0)]);
                b.attack("pidfd_send_signal", &[fd, n(0), n(0), n(0)]);
            })
        };
        if fixture.knows("pidfd_open") && fixture.knows("pidfd_send_signal") {
            all.push(Attack::new(
                CLASS,
                "signal pid 1 by descriptor",
                "open a pidfd of pid 1 and send a signal through it",
                &["landlock of the payload"],
                by_descriptor(Some(1)),
                refused,
                Control::Instead(by_descriptor(None), ControlExpectation::Succeeds),
            ));
        }
        if fixture.knows("tgkill") {
            all.push(Attack::new(
                CLASS,
                "signal a thread of pid 1",
                "send a signal to the only thread of pid 1",
                &["landlock of the payload"],
                one("tgkill", &[n(1), n(1), n(0)]),
                refused,
                Control::Instead(
                    script(|b| {
                        let own = own_pid(b);
                        b.attack("tgkill", &[own, own, n(0)]);
                    }),
                    ControlExpectation::Succeeds,
                ),
            ));
        }
    }
    all
}

/// Lists a directory.
fn list(path: &str, flags: i64) -> Script {
    script(|b| {
        let path = b.text(path);
        let fd = b.attack("openat", &[crate::script::CWD, path, n(flags)]);
        let to = b.space(1024);
        b.attack("getdents64", &[fd, to, n(1024)]);
    })
}
