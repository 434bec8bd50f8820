//! The remedy for a refused system call: the rule that refused it, and the policy lines that
//! allow it.
//!
//! It offers no lines if the call fails with them as well, for want of a capability for instance.

use stockade_policy::{
    filter::{ACCESS_LISTS, BrokenRule, Check, PINS_PAGES},
    model::Seccomp,
    names,
};

/// How to allow a refused system call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CallRemedy {
    /// The rule that refused it.
    pub rule: String,
    /// The lines that allow it, after their section; none if no policy may.
    pub allow: Option<String>,
    /// Why no policy may allow it.
    pub help: Option<String>,
}

/// Calls that need a capability, which code in a sandbox never has.
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

/// The remedy for a call that a policy refused.
pub fn call(seccomp: &Seccomp, name: &str, arguments: &[u64; 6]) -> CallRemedy {
    let never = |rule: &str, why: String| CallRemedy { rule: rule.to_owned(), allow: None, help: Some(why) };
    let listed = |list: &[String]| list.iter().any(|other| other == name);
    let (allowed, killed) = (listed(&seccomp.allow), listed(&seccomp.kill));
    let rule = if killed { "[seccomp] kill" } else { "[seccomp] allow" };
    if let Some((_, reason)) = names::FORBIDDEN_SYSCALLS.iter().find(|(forbidden, _)| *forbidden == name) {
        return never(rule, format!("no policy may allow it: {reason}"));
    }
    if PRIVILEGED.contains(&name) {
        return never(rule, String::from("no policy line helps: it needs a capability, and code in a sandbox has none"));
    }
    if ACCESS_LISTS.contains(&name) {
        return never(
            rule,
            String::from("no policy line helps: no limit counts access control lists, so a policy that has it gets EOPNOTSUPP"),
        );
    }
    if PINS_PAGES.contains(&name) {
        return never(
            rule,
            String::from("no policy line helps: no limit counts the pages that it keeps, so a policy that has it gets EINVAL"),
        );
    }
    let mut lines = Vec::new();
    if killed {
        lines.push(format!("kill = {{ remove = [\"{name}\"] }}"));
    }
    if !allowed {
        lines.push(format!("allow = {{ add = [\"{name}\"] }}"));
    }
    let mut refused_by = rule.to_owned();
    match Check::of(name, seccomp).map_or(Ok(()), |check| check.judge(seccomp, arguments)) {
        Err(BrokenRule::Fixed(fixed)) => return never(fixed, String::from("no policy may allow it: every filter has this rule")),
        Err(BrokenRule::Never(list, why)) => return never(&format!("[seccomp] {list}"), format!("no policy may allow it: {why}")),
        Err(BrokenRule::Lacks(list, value)) => {
            if allowed {
                refused_by = format!("[seccomp] {list}");
            }
            lines.push(format!("{list} = {{ add = [{}] }}", super::quoted(&value)));
        }
        Ok(()) => {}
    }
    let allow = (!lines.is_empty()).then(|| super::line("seccomp", &lines));
    CallRemedy { rule: refused_by, allow, help: None }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic, reason = "a test may panic")]
    use stockade_policy::{
        call::describe,
        filter::{self, Action, F_NOTIFY, LEASES, Rules},
        load_shipped, load_text,
        model::Policy,
    };

    use super::*;

    fn extended(base: &str, line: &str) -> Result<Policy, String> {
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
            for name in (0..filter::names::END).filter_map(filter::names::name) {
                if rules.action(&name) != Some(Action::Deny) {
                    continue;
                }
                match call(&policy.seccomp, &name, &[0; 6]) {
                    CallRemedy { allow: Some(line), .. } => {
                        let allowing = extended(base, &line).unwrap_or_else(|error| panic!("{name}: {line}: {error}"));
                        assert!(passes(&allowing.seccomp, &name), "{name}: {line}");
                        lines += 1;
                    }
                    CallRemedy { help, .. } => assert!(help.is_some(), "{name}: neither a line nor a reason"),
                }
            }
            assert!(lines > 50, "{base}: {lines}");
        }
    }

    #[test]
    fn a_call_that_is_not_listed_and_an_argument_that_is_not_need_both_lines() {
        let mut seccomp = load_shipped("strict").unwrap().seccomp;
        seccomp.allow.retain(|name| name != "socket");
        let remedy = call(&seccomp, "socket", &[2, 1, 0, 0, 0, 0]);
        assert_eq!(remedy.allow.unwrap(), "[seccomp] allow = { add = [\"socket\"] }\nsocket_families = { add = [\"inet\"] }");
    }

    #[test]
    fn the_older_way_to_watch_a_directory_needs_the_line_of_the_newer() {
        let f_notify = [3, u64::from(F_NOTIFY), 1, 0, 0, 0];
        let strict = load_shipped("strict").unwrap();
        let refused = call(&strict.seccomp, "fcntl", &f_notify);
        assert_eq!((refused.rule.as_str(), describe("fcntl", &f_notify).as_str()), ("[seccomp] allow", "fcntl(F_NOTIFY)"));
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
            let remedy = call(&seccomp, name, &arguments);
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
                Check::PidIsSelf(index) => (index, 7),
                Check::PrlimitSelf => (0, 7),
                // It is never refused.
                Check::SetRlimit => return None,
                Check::Priority(_) => (1, 7),
                Check::Personality => (0, 8),
                Check::Prctl => (0, 22),
                Check::NoHugePages(index, bit) => (index, bit.into()),
                Check::Madvise => (2, 12),
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
                let remedy = call(&seccomp, name, &arguments);
                assert!(remedy.allow.is_none() && remedy.rule != "[seccomp] allow", "{name}: {remedy:?}");
                checked += 1;
            }
        }
        assert!(checked > 20, "{checked}");
    }
}
