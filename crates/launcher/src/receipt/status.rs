//! The `status` of the sandbox's first process (proc_pid_status(5)), compared with the plan.
//!
//! It is read after that process has given up its last right. Since no_new_privs is set, no
//! system call and no execve can change one of these lines in its favour afterwards. Mounts and
//! namespaces are not looked at here.

use stockade_policy::plan::Plan;

use crate::{
    LaunchError,
    error::ReceiptError,
    layers::{Layer, Layers},
};

/// What must be there.
const CONFINED: [(&str, &str); 7] = [
    ("CapInh:", "0000000000000000"),
    ("CapPrm:", "0000000000000000"),
    ("CapEff:", "0000000000000000"),
    ("CapBnd:", "0000000000000000"),
    ("CapAmb:", "0000000000000000"),
    ("NoNewPrivs:", "1"),
    ("Seccomp:", "2"),
];

/// Whether it has no capability left, cannot gain one, and is under a filter.
///
/// # Errors
/// It is not so.
pub(super) fn check_confinement(status: &str) -> Result<(), LaunchError> {
    let layers = Layers::in_this_build();
    for (key, expected) in CONFINED {
        let found = line(status, key);
        // Without no_new_privs a capability must take its place until the payload starts.
        let by: &[Layer] = if key.starts_with("Cap") { &[Layer::Capabilities, Layer::NoNewPrivs] } else { &[Layer::NoNewPrivs] };
        if found != expected && by.iter().all(|layer| layers.has(*layer)) {
            return Err(wrong(key, found, expected));
        }
    }
    Ok(())
}

/// Without a user namespace no map translates the ids, so they are read back themselves.
///
/// # Errors
/// They are not the plan's.
pub(super) fn check_ids(plan: &Plan, status: &str) -> Result<(), LaunchError> {
    let (uid, gid) = plan.identity.outside;
    let four = |id: u32| [id.to_string(), id.to_string(), id.to_string(), id.to_string()].join("\t");
    for (key, expected) in [("Uid:", four(uid)), ("Gid:", four(gid)), ("Groups:", String::new())] {
        let found = line(status, key);
        if found != expected {
            return Err(wrong(key, found, &expected));
        }
    }
    Ok(())
}

fn wrong(key: &'static str, found: &str, expected: &str) -> LaunchError {
    ReceiptError::Status { key, found: found.to_owned(), expected: expected.to_owned() }.into()
}

/// The signals that the launcher or its caller ignores.
pub(super) fn ignored_signals(status: &str) -> u64 {
    // An unreadable mask means all: setting a default signal to its default is harmless.
    u64::from_str_radix(line(status, "SigIgn:"), 16).unwrap_or(u64::MAX)
}

/// The value of a key; empty where the key is missing.
pub(super) fn line<'a>(status: &'a str, key: &str) -> &'a str {
    status.lines().find_map(|line| line.strip_prefix(key)).unwrap_or_default().trim()
}

#[cfg(test)]
mod tests {
    use super::{CONFINED, check_confinement, ignored_signals, line};

    #[test]
    fn each_line_is_missed() {
        let confined: String = CONFINED.iter().map(|(key, value)| format!("{key}\t{value}\n")).collect();
        assert!(check_confinement(&confined).is_ok());
        for (key, value) in CONFINED {
            let other = confined.replace(&format!("{key}\t{value}"), &format!("{key}\t0000000000200000"));
            assert!(check_confinement(&other).is_err_and(|error| error.to_string().contains(key)), "{key}");
            let without = confined.replace(key, "Other:");
            assert!(check_confinement(&without).is_err_and(|error| error.to_string().contains(key)), "{key}");
        }
    }

    #[test]
    fn ignored_signals_are_read() {
        assert_eq!(ignored_signals("SigBlk:\t0\nSigIgn:\t0000000000001000\n"), 1 << 12);
        assert_eq!(ignored_signals(""), u64::MAX);
        assert_eq!(line("Seccomp_filters:\t1\n", "Seccomp:"), "");
    }
}
