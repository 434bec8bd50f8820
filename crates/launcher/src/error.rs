//! Why a run could not begin, in words that name the step, the thing and the remedy.
//!
//! A failed step is worded from the plan: the child sends only numbers.

use rustix::io::Errno;
use stockade_policy::plan::{Plan, RootEntry};
use stockade_protocol::step::Step;

/// What lets a run begin in a container of the usual engines, whose filter and covered files
/// in /proc forbid it.
pub const CONTAINER: &str = "start the container with --security-opt seccomp=unconfined --security-opt apparmor=unconfined --security-opt systempaths=unconfined, or use the host";

/// The part of the launcher that met the failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// Pipes, job, strings.
    Prepare,
    /// Cgroups.
    Cgroup,
    /// Namespaces.
    Clone,
    /// Uid and gid maps.
    Maps,
    /// The idmap of scratch: without it the run may still be planned, on other terms.
    Idmap,
    /// The registry of runs.
    Registry,
    /// A step behind the clone.
    Step(Step),
    /// The receipt.
    Receipt,
    /// The egress gate.
    Egress,
    /// The executor or its pipe.
    Executor,
    /// What a session keeps.
    Store,
}

impl What {
    /// A stable identifier for the result's `reason`.
    pub const fn reason(self) -> &'static str {
        match self {
            What::Prepare => "prepare_failed",
            What::Cgroup => "cgroup_failed",
            What::Clone => "namespaces_refused",
            What::Maps => "maps_refused",
            What::Idmap => "scratch_not_idmappable",
            What::Registry => "registry_failed",
            What::Step(Step::RootEntry) => "root_entry_failed",
            What::Step(_) => "setup_step_failed",
            What::Receipt => "receipt_mismatch",
            What::Egress => "egress_gate_failed",
            What::Executor => "executor_vanished",
            What::Store => "session_store_failed",
        }
    }
}

/// See the module.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{message}")]
pub struct LaunchError {
    /// Where it failed.
    pub what: What,
    /// The errno, where there is one.
    pub errno: Option<i32>,
    /// For a person.
    pub message: String,
}

impl LaunchError {
    /// A failed system call of the launcher.
    pub fn system(what: What, attempt: &str, errno: Errno) -> Self {
        LaunchError { what, errno: Some(errno.raw_os_error()), message: format!("{attempt}: {}", describe(errno)) }
    }

    /// A failure that is no system call's.
    pub fn other(what: What, message: String) -> Self {
        LaunchError { what, errno: None, message }
    }
}

/// An errno's name and meaning.
pub(crate) fn describe(errno: Errno) -> String {
    let text = std::io::Error::from(errno).to_string();
    // "Operation not permitted (os error 1)"
    let text = text.split(" (os error").next().unwrap_or(&text).to_lowercase();
    let name = format!("{:?}", nix::errno::Errno::from_raw(errno.raw_os_error()));
    // No file that the launcher writes is large: there is a limit for whoever started it.
    let remedy = if errno == Errno::FBIG { "; files of this size are forbidden to the launcher: ulimit -f unlimited" } else { "" };
    format!("{text} ({name}){remedy}")
}

/// clone3 was refused: the one failure that most users will meet, so it says why.
pub(crate) fn clone_failed(privileged: bool, errno: Errno) -> LaunchError {
    let attempt = "make the namespaces";
    let remedy = match errno {
        Errno::PERM | Errno::ACCESS => namespace_remedy(privileged),
        Errno::NOSPC => {
            "; the limit in /proc/sys/user/max_user_namespaces is used up or zero: raise it (sysctl user.max_user_namespaces=10000)".into()
        }
        Errno::INVAL => "; the kernel has no user namespaces (it needs CONFIG_USER_NS)".into(),
        Errno::NOSYS => {
            format!("; the kernel needs clone3 (Linux 5.3), or a filter around the launcher forbids it; in a container: {CONTAINER}")
        }
        Errno::AGAIN => "; the user's process limit is reached (ulimit -u)".into(),
        _ => String::new(),
    };
    LaunchError { what: What::Clone, errno: Some(errno.raw_os_error()), message: format!("{attempt}: {}{remedy}", describe(errno)) }
}

/// What forbids user namespaces here.
pub fn namespace_remedy(privileged: bool) -> String {
    let read = |path| std::fs::read_to_string(path).unwrap_or_default();
    if read("/proc/sys/kernel/apparmor_restrict_unprivileged_userns").trim() == "1" && !privileged {
        return String::from(
            "; AppArmor keeps user namespaces from unconfined programs on this host: install the profile scripts/apparmor/stockade into /etc/apparmor.d and load it with `apparmor_parser -r`",
        );
    }
    if read("/proc/sys/kernel/unprivileged_userns_clone").trim() == "0" {
        return String::from("; unprivileged user namespaces are off: sysctl kernel.unprivileged_userns_clone=1");
    }
    format!("; user namespaces are forbidden here (a container's seccomp profile, or a security module); in a container: {CONTAINER}")
}

/// Words a step's failure from the plan.
pub(crate) fn step_failed(plan: &Plan, step: Step, errno: Errno, index: Option<usize>, detail: &str) -> LaunchError {
    let subject = match (step, index) {
        (Step::RootEntry, Some(index)) => entry_subject(plan, index),
        (Step::ScratchRule, Some(index)) => {
            plan.scratch.protected.get(index).map(|(path, ..)| format!(" {}", path.display())).unwrap_or_default()
        }
        (Step::Landlock, Some(index)) => {
            plan.landlock.rules.get(index).map(|rule| format!(" (rule on {})", rule.path.display())).unwrap_or_default()
        }
        (Step::Scratch | Step::WorkingDirectory | Step::WriteProgram, _) => format!(" {}", plan.scratch.path.display()),
        (Step::EgressSockets, Some(index)) => stockade_egress::inside::NAMES.get(index).map(|name| format!(": {name}")).unwrap_or_default(),
        (Step::ExecPayload, _) => format!(" {}", plan.argv.first().map_or("", String::as_str)),
        _ => String::new(),
    };
    let remedy = match (step, errno) {
        (Step::RootEntry, Errno::PERM) if index.is_some_and(|index| is_proc(plan, index)) => {
            "; the host's /proc is partly covered (\"mount too revealing\"): inside Docker run with --security-opt systempaths=unconfined; in a systemd unit drop ProtectKernelTunables= and ProcSubset="
        }
        (Step::NetworkNamespace | Step::CgroupNamespace | Step::InnerUserNamespace, Errno::NOSPC) => {
            "; the number of namespaces is limited: see the max_* files in /proc/sys/user"
        }
        (Step::Keyring, Errno::PERM) => {
            "; a filter around the launcher forbids keyctl, as container engines do; let it through or start stockade on the host"
        }
        (Step::Keyring, Errno::DQUOT) => "; the user's key quota is used up (/proc/sys/kernel/keys/maxkeys)",
        (Step::Hostname | Step::Loopback | Step::PrivateMounts | Step::RootTmpfs | Step::Capabilities, Errno::PERM) => {
            "; a security module takes away the capabilities of the new user namespace (on Ubuntu install the profile scripts/apparmor/stockade), or a filter around the launcher forbids the call"
        }
        (Step::Scratch | Step::WorkingDirectory, Errno::ACCESS) => "; the directory or one above it cannot be entered by the caller",
        (Step::ScratchRule, Errno::STALE | Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => {
            "; it is not what was found there a moment ago, so that what the policy keeps from the code could lie under another name: wait until nobody changes names in scratch, then start it again"
        }
        (Step::ExecPayload, Errno::NOENT) => "; it is not in the sandbox's root, or its interpreter or dynamic linker is not",
        (Step::ExecPayload, Errno::ACCESS) => "; it is not executable, or lies where the policy allows no programs",
        (Step::WriteFile | Step::WriteProgram, Errno::NOSPC) if plan.scratch.host => {
            "; the file system of scratch is full: make room there"
        }
        (Step::WriteFile | Step::WriteProgram, Errno::NOSPC) => "; scratch is too small: raise scratch_size",
        (Step::WriteProgram, Errno::ROFS) => "; the caller may not write there",
        (Step::WriteFile | Step::WriteProgram, Errno::ACCESS) => {
            "; the owner of scratch may not write there: chmod u+rwx the directory, should earlier code have closed it"
        }
        (Step::WriteFile, Errno::LOOP | Errno::NOTDIR) => "; a link or a file stands where the path needs a directory",
        (Step::Seccomp, Errno::INVAL) => "; the kernel needs CONFIG_SECCOMP_FILTER",
        _ => "",
    };
    let detail = if detail.is_empty() { String::new() } else { format!(" ({detail})") };
    let what = if step == Step::Receipt { What::Receipt } else { What::Step(step) };
    LaunchError {
        what,
        errno: Some(errno.raw_os_error()),
        message: format!("{}{subject}: {}{detail}{remedy}", step.name(), describe(errno)),
    }
}

/// The plan's entries are numbered from 1 behind the stand-ins, which come first.
fn entry(plan: &Plan, index: usize) -> Option<&RootEntry> {
    index.checked_sub(1).and_then(|index| plan.root.iter().nth(index))
}

fn is_proc(plan: &Plan, index: usize) -> bool {
    matches!(entry(plan, index), Some(RootEntry::Proc { .. }))
}

fn entry_subject(plan: &Plan, index: usize) -> String {
    match entry(plan, index) {
        Some(RootEntry::Bind { source, .. } | RootEntry::Device { source, .. }) => format!(", bind {} read-only", source.display()),
        Some(RootEntry::Proc { .. }) => String::from(", mount proc on /proc"),
        Some(RootEntry::Devpts { .. }) => String::from(", mount devpts on /dev/pts"),
        Some(RootEntry::Cover { target, .. }) => format!(", watch modules through /{}", target.display()),
        Some(RootEntry::Mask { target }) => format!(", mask /{}", target.display()),
        Some(
            RootEntry::Directory { target, .. }
            | RootEntry::Link { target, .. }
            | RootEntry::File { target, .. }
            | RootEntry::Pipe { target }
            | RootEntry::Writable { target },
        ) => {
            format!(", make /{}", target.display())
        }
        None => String::from(", make the stand-ins for hidden files"),
    }
}
