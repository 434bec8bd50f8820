//! A failed step, worded from the plan: the child sends only numbers.
//!
//! The step's number is the failure's identity; the words around it are for a person.

use rustix::io::Errno;
use stockade_policy::plan::{Mode, Plan, RootEntry};
use stockade_protocol::step::Step;

use super::describe;

/// A step of the sandbox's set-up that failed.
#[derive(Debug, thiserror::Error)]
#[error("{}{subject}: {}{}{remedy}", step.name(), describe(*errno), in_brackets(detail))]
pub struct StepFailure {
    /// Its identity.
    pub step: Step,
    /// What the kernel answered.
    pub errno: Errno,
    /// The part of the plan that it was about, as it follows the step's name.
    subject: String,
    /// What the executor adds, such as a file's name.
    detail: String,
    remedy: &'static str,
}

impl StepFailure {
    /// Adds to the numbers that the child sends what the plan has under them.
    pub(crate) fn new(plan: &Plan, step: Step, errno: Errno, index: Option<usize>, detail: String) -> Self {
        StepFailure { step, errno, subject: subject(plan, step, index), detail, remedy: remedy(plan, step, errno, index) }
    }
}

fn in_brackets(detail: &str) -> String {
    if detail.is_empty() { String::new() } else { format!(" ({detail})") }
}

fn subject(plan: &Plan, step: Step, index: Option<usize>) -> String {
    match (step, index) {
        (Step::RootEntry, Some(index)) => entry_subject(plan, index),
        (Step::ScratchRule, Some(index)) => {
            plan.scratch.protected.get(index).map(|(path, ..)| format!(" {}", path.display())).unwrap_or_default()
        }
        (Step::Landlock, Some(index)) => {
            plan.landlock.rules.get(index).map(|rule| format!(" (rule on {})", rule.path.display())).unwrap_or_default()
        }
        (Step::WriteProgram, _) => plan.program_file.as_ref().map(|(at, name)| format!(" {}", at.join(name).display())).unwrap_or_default(),
        (Step::WorkingDirectory, _) => plan.start_directories().last().map(|path| format!(" {}", path.display())).unwrap_or_default(),
        (Step::Scratch, _) => format!(" {}", plan.scratch.path.display()),
        (Step::EgressSockets, Some(index)) => stockade_egress::netns::NAMES.get(index).map(|name| format!(": {name}")).unwrap_or_default(),
        (Step::ExecPayload, _) => program_subject(plan),
        _ => String::new(),
    }
}

/// The program, and where it was looked for if it is no path.
fn program_subject(plan: &Plan) -> String {
    let program = plan.argv.first().map_or("", String::as_str);
    let path = plan.environment_values.iter().find_map(|variable| variable.strip_prefix("PATH=")).unwrap_or_default();
    if program.contains('/') { format!(" {program}") } else { format!(" `{program}` (looked for in {path})") }
}

fn remedy(plan: &Plan, step: Step, errno: Errno, index: Option<usize>) -> &'static str {
    match (step, errno) {
        (Step::RootEntry, Errno::PERM) if index.is_some_and(|index| is_proc(plan, index)) => {
            "; the host's /proc is partly covered (\"mount too revealing\"): inside Docker run with --security-opt systempaths=unconfined; in a systemd unit drop ProtectKernelTunables= and ProcSubset="
        }
        (Step::RootEntry, Errno::STALE | Errno::NOENT | Errno::LOOP) if index.is_some_and(|index| is_image(plan, index)) => {
            "; the store has changed since the image was looked up; `stockade image verify` looks whether it is whole"
        }
        (Step::RootEntry, Errno::INVAL) if plan.mode == Mode::Root && index.is_some_and(|index| is_writable_image(plan, index)) => {
            "; root's image is writable only where overlay takes idmapped layers (Linux 5.19): run as an ordinary user, or remove `writable_root` from the policy"
        }
        (Step::RootEntry, Errno::INVAL | Errno::NODEV | Errno::PERM)
            if matches!(index.and_then(|index| entry(plan, index)), Some(RootEntry::Overlay { .. })) =>
        {
            "; the kernel must have overlay with `userxattr` (Linux 5.11, CONFIG_OVERLAY_FS), and no mount of the host may lie below a layer"
        }
        (Step::RootEntry, Errno::INVAL | Errno::NODEV | Errno::PERM) if index.is_some_and(|index| is_image(plan, index)) => {
            "; the kernel must have overlay with `userxattr` (Linux 5.11, CONFIG_OVERLAY_FS), and the store must lie on a file system that can be a layer"
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
        (Step::ExecPayload, Errno::NOENT) => "; the sandbox does not have it, or not the interpreter that its first line names",
        (Step::ExecPayload, Errno::ACCESS) => "; it is not executable, or lies where the policy allows no programs",
        (Step::WriteFile | Step::WriteProgram, Errno::NOSPC) if plan.scratch.host => {
            "; the file system of scratch is full: make room there"
        }
        (Step::WriteFile | Step::WriteProgram, Errno::NOSPC) => "; scratch is too small: raise scratch_size",
        (Step::WriteProgram, Errno::EXIST) => {
            "; it was there before, and no file is replaced by a program: choose another `filename`, or name none"
        }
        (Step::WriteProgram, Errno::ROFS) => "; the caller may not write there",
        (Step::WriteFile | Step::WriteProgram, Errno::ACCESS) => {
            "; the owner of scratch may not write there: chmod u+rwx the directory, should earlier code have closed it"
        }
        (Step::WriteFile, Errno::LOOP | Errno::NOTDIR) => "; a link or a file stands where the path needs a directory",
        (Step::RootEntry, Errno::NOENT | Errno::NOTDIR | Errno::LOOP)
            if index.and_then(|index| entry(plan, index)).is_some_and(is_laid) =>
        {
            "; nothing is made below what is shown read-only, and no link is followed: make the file or directory on the host before"
        }
        (Step::WorkingDirectory, Errno::LOOP) => "; nothing in /proc can be one, nor what a link of /proc leads to",
        (Step::WorkingDirectory, _) if plan.image_root.is_none() && !plan.working_directories.is_empty() => {
            "; name a directory that the operations show"
        }
        (Step::CallersFilters, Errno::INVAL) => "; the kernel takes no such filter",
        (Step::Seccomp, Errno::INVAL) => "; the kernel needs CONFIG_SECCOMP_FILTER",
        _ => "",
    }
}

/// The plan's entries are numbered from 1 behind the stand-ins, which come first.
fn entry(plan: &Plan, index: usize) -> Option<&RootEntry> {
    index.checked_sub(1).and_then(|index| plan.root.get(index))
}

fn is_laid(entry: &RootEntry) -> bool {
    matches!(
        entry,
        RootEntry::Placed { .. }
            | RootEntry::Tree { .. }
            | RootEntry::Socket { .. }
            | RootEntry::Tmpfs { .. }
            | RootEntry::Overlay { .. }
            | RootEntry::Laid { .. }
    )
}

fn is_image(plan: &Plan, index: usize) -> bool {
    matches!(entry(plan, index), Some(RootEntry::Image { .. }))
}

fn is_writable_image(plan: &Plan, index: usize) -> bool {
    matches!(entry(plan, index), Some(RootEntry::Image { writable: true, .. }))
}

fn is_proc(plan: &Plan, index: usize) -> bool {
    matches!(entry(plan, index), Some(RootEntry::Proc { .. }))
}

fn entry_subject(plan: &Plan, index: usize) -> String {
    match entry(plan, index) {
        Some(RootEntry::Bind { source, .. } | RootEntry::Device { source, .. }) => format!(", bind {} read-only", source.display()),
        Some(RootEntry::Placed { source, target, .. }) => format!(", bind {} read-only at /{}", source.display(), target.display()),
        Some(RootEntry::Tree { index, target }) => {
            let source = plan.writable_trees.get(*index).map(|tree| tree.source.display().to_string()).unwrap_or_default();
            format!(", bind {source} at /{}", target.display())
        }
        Some(RootEntry::Socket { source, target, .. }) => format!(", bind socket {} at /{}", source.display(), target.display()),
        Some(RootEntry::Tmpfs { target, .. }) => format!(", lay a tmpfs at /{}", target.display()),
        Some(RootEntry::Overlay { target, .. }) => format!(", lay an overlay at /{}", target.display()),
        Some(RootEntry::Laid { target, .. }) => format!(", lay a file over /{}", target.display()),
        Some(RootEntry::Image { .. }) => String::from(", lay the image's layers below the root"),
        Some(RootEntry::Proc { .. }) => String::from(", mount proc on /proc"),
        Some(RootEntry::Devpts { .. }) => String::from(", mount devpts on /dev/pts"),
        Some(RootEntry::Cover { target, .. }) => format!(", watch modules through /{}", target.display()),
        Some(RootEntry::Mask { target }) => format!(", mask /{}", target.display()),
        Some(
            RootEntry::Directory { target, .. }
            | RootEntry::Link { target, .. }
            | RootEntry::File { target, .. }
            | RootEntry::Contents { target, .. }
            | RootEntry::Pipe { target }
            | RootEntry::Writable { target },
        ) => {
            format!(", make /{}", target.display())
        }
        None => String::from(", make the stand-ins for hidden files"),
    }
}
