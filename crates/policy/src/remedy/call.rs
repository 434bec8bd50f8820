//! Refused system calls: in words, with the rule that decided and the lines that would
//! have allowed them.
//!
//! A line is named only if it is all that stands between the call and the kernel.

use crate::{
    compare::ioctl,
    filter::{F_NOTIFY, FORBIDDEN_PRCTL, FORBIDDEN_SOCKET_OPTIONS, LEASES, WATCHING},
    inherit::family_name,
    model::{Seccomp, SocketFamily},
    names,
};

/// What would have allowed a refused call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Remedy {
    /// The rule that decided.
    pub rule: String,
    /// The lines that would allow it, behind their section; none where no policy may.
    pub allow: Option<String>,
    /// Why no policy may.
    pub help: Option<String>,
}

/// What becomes of a call that is listed, by its arguments.
enum Arguments {
    Pass,
    /// A rule that no policy can change.
    Fixed(&'static str),
    /// What no policy can put into this list of `[seccomp]`.
    Never(&'static str, &'static str),
    /// This list of `[seccomp]` lacks this value.
    Lacks(&'static str, String),
}

/// Calls that ask for a capability, so that the filter's leave would change nothing.
const PRIVILEGED: &[&str] = &[
    "acct",
    "clock_settime",
    "ioperm",
    "iopl",
    "lookup_dcookie",
    "quotactl",
    "quotactl_fd",
    "reboot",
    "setdomainname",
    "setgroups",
    "sethostname",
    "settimeofday",
    "swapoff",
    "swapon",
    "vhangup",
];

const SET_ID: &str = "set-ID bits are refused in every mode";

/// The low half of an argument, which is what the kernel reads and the filter compares.
fn low(arguments: &[u64; 6], index: usize) -> u32 {
    let half = arguments.get(index).map_or(0, |argument| argument & u64::from(u32::MAX));
    u32::try_from(half).unwrap_or(u32::MAX)
}

/// A call with the arguments that mattered, in words.
pub fn call(name: &str, arguments: &[u64; 6]) -> String {
    let low = |index| low(arguments, index);
    match name {
        "socket" | "socketpair" => {
            let family = family(low(0));
            match low(0) {
                2 | 10 | 16 => format!("{name}({family}, type {}, protocol {})", low(1) & 0xf, low(2)),
                _ => format!("{name}({family})"),
            }
        }
        "ioctl" => {
            let forbidden = names::FORBIDDEN_IOCTLS.iter().find(|(_, number, _)| *number == low(1));
            format!("ioctl({})", forbidden.map_or_else(|| ioctl(low(1)), |(name, ..)| (*name).to_owned()))
        }
        "clone" => format!("clone(flags {:#x})", low(0)),
        "chmod" | "fchmod" | "mkdir" | "creat" | "mknod" => format!("{name}(mode {:#o})", low(1)),
        "fchmodat" | "fchmodat2" | "mkdirat" | "mknodat" | "open" => format!("{name}(mode {:#o})", low(2)),
        "openat" => format!("{name}(mode {:#o})", low(3)),
        "prlimit64" | "sched_setaffinity" | "sched_setattr" | "sched_setparam" | "sched_setscheduler" => {
            format!("{name}(pid {})", low(0))
        }
        "setpriority" | "ioprio_set" => format!("{name}(which {}, who {})", low(0), low(1)),
        "personality" => format!("personality({:#x})", low(0)),
        "prctl" => format!("prctl({})", low(0)),
        "fcntl" if low(1) == F_NOTIFY => String::from("fcntl(F_NOTIFY)"),
        "fcntl" if low(1) == LEASES[0] => String::from("fcntl(F_SETLEASE)"),
        "fcntl" if low(1) == LEASES[1] => String::from("fcntl(F_SETDELEG)"),
        "setsockopt" => format!("setsockopt(level {}, option {})", low(1), low(2)),
        _ => name.to_owned(),
    }
}

/// The rule that refused a call under a policy, and the lines that would allow it.
pub fn remedy(seccomp: &Seccomp, name: &str, arguments: &[u64; 6]) -> Remedy {
    let never = |rule: &str, why: String| Remedy { rule: rule.to_owned(), allow: None, help: Some(why) };
    let listed = |list: &[String]| list.iter().any(|other| other == name);
    let (allowed, killed) = (listed(&seccomp.allow), listed(&seccomp.kill));
    let rule = if killed { "[seccomp] kill" } else { "[seccomp] allow" };
    if let Some((_, reason)) = names::FORBIDDEN_SYSCALLS.iter().find(|(forbidden, _)| *forbidden == name) {
        return never(rule, format!("no policy may allow it: {reason}"));
    }
    if PRIVILEGED.contains(&name) {
        return never(rule, String::from("it needs a capability, and nothing in a sandbox has one: no line would make it work"));
    }
    let mut lines = Vec::new();
    if killed {
        lines.push(format!("kill = {{ remove = [\"{name}\"] }}"));
    }
    if !allowed {
        lines.push(format!("allow = {{ add = [\"{name}\"] }}"));
    }
    let mut decided = rule.to_owned();
    match judge(seccomp, name, arguments) {
        Arguments::Fixed(fixed) => return never(fixed, String::from("no policy may allow it: this rule stands in every filter")),
        Arguments::Never(list, why) => return never(&format!("[seccomp] {list}"), format!("no policy may allow it: {why}")),
        Arguments::Lacks(list, value) => {
            if allowed {
                decided = format!("[seccomp] {list}");
            }
            lines.push(format!("{list} = {{ add = [{}] }}", super::quoted(&value)));
        }
        Arguments::Pass => {}
    }
    let allow = (!lines.is_empty()).then(|| super::line("seccomp", &lines));
    Remedy { rule: decided, allow, help: None }
}

/// The filter's argument rules, which stand in `filter`, read for one call.
fn judge(seccomp: &Seccomp, name: &str, arguments: &[u64; 6]) -> Arguments {
    let low = |index| low(arguments, index);
    let fixed = |broken: bool, rule| if broken { Arguments::Fixed(rule) } else { Arguments::Pass };
    let set_id = |mode: u32| fixed(mode & 0o6000 != 0, SET_ID);
    match name {
        "socket" => {
            let (family, protocols): (_, &[u32]) = match low(0) {
                1 => (SocketFamily::Unix, &[]),
                2 => (SocketFamily::Inet, &[0, 6, 17]),
                10 => (SocketFamily::Inet6, &[0, 6, 17]),
                16 => (SocketFamily::Netlink, &[0]),
                _ => {
                    return Arguments::Never("socket_families", "only unix, inet, inet6 and netlink can be listed");
                }
            };
            match () {
                () if !protocols.is_empty() && !protocols.contains(&low(2)) => {
                    Arguments::Never("socket_families", "only TCP, UDP and route netlink can be used")
                }
                () if seccomp.socket_families.contains(&family) => Arguments::Pass,
                () => Arguments::Lacks("socket_families", family_name(family).to_owned()),
            }
        }
        "socketpair" => fixed(low(0) != 1, "only pairs of AF_UNIX are allowed"),
        "ioctl" => match names::FORBIDDEN_IOCTLS.iter().find(|(_, number, _)| *number == low(1)) {
            Some((_, _, reason)) => Arguments::Never("ioctl", reason),
            None if seccomp.ioctl.contains(&low(1)) => Arguments::Pass,
            None => Arguments::Lacks("ioctl", ioctl(low(1))),
        },
        "clone" => fixed(low(0) & 0x7e02_0000 != 0, "new namespaces are refused"),
        "mknod" | "mknodat" => {
            let mode = low(if name == "mknod" { 1 } else { 2 });
            if matches!(mode & 0o170_000, 0 | 0o100_000 | 0o010_000 | 0o140_000) {
                set_id(mode)
            } else {
                Arguments::Fixed("device nodes are refused")
            }
        }
        "chmod" | "fchmod" | "mkdir" | "creat" => set_id(low(1)),
        "fchmodat" | "fchmodat2" | "mkdirat" => set_id(low(2)),
        "open" | "openat" => {
            let flags = if name == "open" { 1 } else { 2 };
            if low(flags) & 0o20_000_100 == 0 { Arguments::Pass } else { set_id(low(flags + 1)) }
        }
        "prlimit64" | "sched_setaffinity" | "sched_setattr" | "sched_setparam" | "sched_setscheduler" => {
            fixed(low(0) != 0, "only pid 0, oneself, may be named")
        }
        "setpriority" => fixed((low(0), low(1)) != (0, 0), "only oneself may be named"),
        "ioprio_set" => fixed((low(0), low(1)) != (1, 0), "only oneself may be named"),
        "personality" => fixed(!matches!(low(0), 0 | u32::MAX), "only the plain personality is allowed"),
        "prctl" => fixed(FORBIDDEN_PRCTL.contains(&low(0)), "filters and system call dispatch of the code's own are refused"),
        "setsockopt" => fixed(low(1) == 1 && FORBIDDEN_SOCKET_OPTIONS.contains(&low(2)), "BPF programs on sockets are refused"),
        "renameat2" => fixed(low(4) & 4 != 0, "RENAME_WHITEOUT, which makes a device node, is refused"),
        "fcntl" if LEASES.contains(&low(1)) => fixed(true, "leases, which make whoever opens the file wait, are refused"),
        // One permission for both ways to watch a directory.
        "fcntl" if low(1) == F_NOTIFY && !seccomp.allow.iter().any(|name| name == WATCHING) => {
            Arguments::Lacks("allow", WATCHING.to_owned())
        }
        _ => Arguments::Pass,
    }
}

fn family(number: u32) -> String {
    let name = match number {
        1 => "AF_UNIX",
        2 => "AF_INET",
        10 => "AF_INET6",
        15 => "AF_KEY",
        16 => "AF_NETLINK",
        17 => "AF_PACKET",
        30 => "AF_TIPC",
        38 => "AF_ALG",
        40 => "AF_VSOCK",
        44 => "AF_XDP",
        _ => return format!("family {number}"),
    };
    String::from(name)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic, reason = "a test may panic")]
    use super::*;
    use crate::{
        filter::{Action, Check, Rules},
        load_shipped, load_text,
    };

    fn extended(base: &str, line: &str) -> Result<crate::model::Policy, String> {
        let (section, rest) = line.split_once("] ").unwrap();
        load_text(&format!("schema = 1\ndescription = \"x\"\nextends = \"{base}\"\n{section}]\n{rest}\n"))
            .map_err(|error| error.to_string())
    }

    /// Whether a policy's filter lets a call with plain arguments pass.
    fn passes(seccomp: &Seccomp, name: &str) -> bool {
        matches!(Rules::new(seccomp, false).unwrap().action(name), Some(Action::Allow | Action::Check(_)))
    }

    #[test]
    fn every_line_for_a_call_loads_and_lets_it_pass() {
        for base in ["default", "strict"] {
            let policy = load_shipped(base).unwrap();
            let rules = Rules::new(&policy.seccomp, false).unwrap();
            let mut lines = 0;
            for name in (0..crate::filter::names::END).filter_map(crate::filter::names::name) {
                if rules.action(&name) != Some(Action::Deny) {
                    continue;
                }
                match remedy(&policy.seccomp, &name, &[0; 6]) {
                    Remedy { allow: Some(line), .. } => {
                        let allowing = extended(base, &line).unwrap_or_else(|error| panic!("{name}: {line}: {error}"));
                        assert!(passes(&allowing.seccomp, &name), "{name}: {line}");
                        lines += 1;
                    }
                    Remedy { help, .. } => assert!(help.is_some(), "{name}: neither a line nor a reason"),
                }
            }
            assert!(lines > 50, "{base}: {lines}");
        }
    }

    #[test]
    fn a_call_that_is_not_listed_and_an_argument_that_is_not_need_both_lines() {
        let mut seccomp = load_shipped("strict").unwrap().seccomp;
        seccomp.allow.retain(|name| name != "socket");
        let remedy = remedy(&seccomp, "socket", &[2, 1, 0, 0, 0, 0]);
        assert_eq!(remedy.allow.unwrap(), "[seccomp] allow = { add = [\"socket\"] }\nsocket_families = { add = [\"inet\"] }");
    }

    #[test]
    fn the_older_way_to_watch_a_directory_needs_the_line_of_the_newer() {
        let f_notify = [3, u64::from(F_NOTIFY), 1, 0, 0, 0];
        let strict = load_shipped("strict").unwrap();
        let refused = remedy(&strict.seccomp, "fcntl", &f_notify);
        assert_eq!((refused.rule.as_str(), call("fcntl", &f_notify).as_str()), ("[seccomp] allow", "fcntl(F_NOTIFY)"));
        let allowing = extended("strict", &refused.allow.unwrap()).unwrap();
        let action = |seccomp| Rules::new(seccomp, false).unwrap().action("fcntl");
        let fcntl = |watching| Some(Action::Check(Check::Fcntl { watching }));
        assert_eq!((action(&strict.seccomp), action(&allowing.seccomp)), (fcntl(false), fcntl(true)));
    }

    #[test]
    fn what_no_policy_may_allow_names_no_line_and_says_why() {
        let seccomp = load_shipped("default").unwrap().seccomp;
        for (name, arguments) in [
            ("unshare", [0; 6]),
            ("reboot", [0; 6]),
            ("prctl", [22, 0, 0, 0, 0, 0]),
            ("setsockopt", [3, 1, 50, 0, 0, 0]),
            ("renameat2", [0, 0, 0, 0, 4, 0]),
            ("clone", [0x1000_0000, 0, 0, 0, 0, 0]),
            ("chmod", [0, 0o4755, 0, 0, 0, 0]),
            ("openat", [0, 0, 0o100, 0o2755, 0, 0]),
            ("mknodat", [0, 0, 0o060_600, 0, 0, 0]),
            ("socket", [40, 1, 0, 0, 0, 0]),
            ("socket", [2, 3, 1, 0, 0, 0]),
            ("ioctl", [0, 0x5412, 0, 0, 0, 0]),
            ("personality", [8, 0, 0, 0, 0, 0]),
            ("prlimit64", [7, 0, 0, 0, 0, 0]),
        ] {
            let remedy = remedy(&seccomp, name, &arguments);
            assert!(remedy.allow.is_none() && remedy.help.is_some(), "{name}: {remedy:?}");
        }
    }

    #[test]
    fn argument_rules_are_read_as_the_filter_has_them() {
        // A call that gains a rule in the filter must gain one here.
        let rules = Rules::new(&load_shipped("default").unwrap().seccomp, false).unwrap();
        let seccomp = load_shipped("default").unwrap().seccomp;
        let broken = |check: Check| -> Option<[u64; 6]> {
            let mut arguments = [0; 6];
            let (index, value) = match check {
                Check::Clone => (0, 0x1000_0000),
                Check::Socket | Check::SocketPair => (0, 40),
                Check::Ioctl => (1, 0x5412),
                Check::Mode(index) => (index, 0o4000),
                Check::Open(index) => {
                    arguments[usize::from(index)] = 0o100;
                    (index + 1, 0o4000)
                }
                Check::Mknod(index) => (index, 0o020_000),
                Check::OnSelf(index) => (index, 7),
                Check::OwnLimit => (0, 7),
                // It is never refused.
                Check::Limit => return None,
                Check::Priority(_) => (1, 7),
                Check::Personality => (0, 8),
                Check::Prctl => (0, 22),
                Check::SetSockOpt => {
                    arguments[2] = 26;
                    (1, 1)
                }
                Check::Rename => (4, 4),
                Check::Fcntl { .. } => (1, u64::from(LEASES[0])),
            };
            arguments[usize::from(index)] = value;
            Some(arguments)
        };
        let mut checked = 0;
        for name in &seccomp.allow {
            if let Some(Action::Check(check)) = rules.action(name)
                && let Some(arguments) = broken(check)
            {
                let remedy = remedy(&seccomp, name, &arguments);
                assert!(remedy.allow.is_none() && remedy.rule != "[seccomp] allow", "{name}: {remedy:?}");
                checked += 1;
            }
        }
        assert!(checked > 20, "{checked}");
    }
}
