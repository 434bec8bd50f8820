//! Who asks, and with whose rights the launcher acts.
//!
//! Accounts are read from `/etc/passwd` and `/etc/group` alone: a static program has no
//! safe way to ask name services. When root acts, no environment variable is read but
//! the two that sudo sets, and those can only take rights away; behind a socket, none.

use std::{
    env,
    ffi::{OsStr, OsString},
    io::{self, Read},
    os::unix::ffi::OsStrExt,
    path::PathBuf,
    sync::OnceLock,
};

use caps::{CapSet, Capability};
use rlimit::Resource;
use rustix::{
    event::{PollFd, PollFlags, poll},
    fd::OwnedFd,
    fs::Mode,
    io::Errno,
    process::{Pid, PidfdFlags, Signal, getpid, getppid, kill_process, pidfd_open},
};
use stockade_launcher::{CONTAINER, signals::hold_back_stops};
pub use stockade_policy::facts::Caller;
use stockade_policy::model::Policy;
use stockade_protocol::Verdict;

use crate::{Refusal, RefusalCause, facts::HostError};

/// Why nothing is done for who asks.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CallerError {
    #[error(
        "this program was started with more rights than its caller has; it must have no set-ID bit and no file capabilities (chmod u-s,g-s; setcap -r)"
    )]
    SetId,
    #[error(
        "the launcher is root without {0}, which is neither root nor an ordinary user; start it as one of them, in a container as an ordinary user (Docker: --user) and {CONTAINER}"
    )]
    PowerlessRoot(Capability),
    #[error("uid {own} serves this socket without root's rights, so it runs nothing for uid {peer}; run stockade as yourself")]
    PeerNotServed { own: u32, peer: u32 },
    #[error(
        "the limit {limit} that came along through sudo could keep this run out of the audit log, and root cannot lift it here: {error}; call sudo without that limit (ulimit), or give root CAP_SYS_RESOURCE"
    )]
    Limit { limit: &'static str, error: std::io::Error },
    #[error("{name}={} is not a number; start through sudo, or unset it", text.display())]
    SudoVariable { name: &'static str, text: OsString },
    #[error("SUDO_UID is set but SUDO_GID is not; start through sudo, or unset SUDO_UID")]
    SudoGidMissing,
    #[error("cannot change to the caller's rights: {0}")]
    Rights(Errno),
}

impl RefusalCause for CallerError {
    fn verdict_and_reason(&self) -> (Verdict, &'static str) {
        let reason = match self {
            CallerError::SetId => "set_id_program",
            CallerError::PowerlessRoot(_) => "root_without_capabilities",
            CallerError::PeerNotServed { .. } => "peer_not_served",
            CallerError::Limit { .. } => "limits_of_caller",
            CallerError::SudoVariable { .. } | CallerError::SudoGidMissing => "sudo_variables",
            CallerError::Rights(_) => "caller_rights",
        };
        (Verdict::SandboxError, reason)
    }
}

/// Who asks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// The launcher has root's rights.
    pub privileged: bool,
    /// The caller's ids.
    pub caller: Caller,
    /// Root acts for somebody else, whose grants decide.
    pub on_behalf: bool,
}

impl Identity {
    /// Where a scratch may be root's: nowhere while root acts for another user.
    pub(crate) fn roots_scratch<'p>(&self, policy: &'p Policy) -> &'p [PathBuf] {
        if self.on_behalf { &[] } else { &policy.scratch.root }
    }
}

/// The processes that wait for a result, as pidfds; a run ends with the first of them that ends:
/// the one that started this one, and behind sudo, which outlives its caller, that caller too.
/// None where the run was started by nohup. One that lies in another PID namespace, or has ended by
/// now, is left out.
pub fn waiting() -> Vec<OwnedFd> {
    waiting_with_pids().into_iter().map(|(_, pidfd)| pidfd).collect()
}

/// The same by their pids, for a companion program that takes this process's place.
pub fn waiting_pids() -> Vec<Pid> {
    waiting_with_pids().into_iter().map(|(pid, _)| pid).collect()
}

fn waiting_with_pids() -> Vec<(Pid, OwnedFd)> {
    if is_given_nohup() {
        return Vec::new();
    }
    [held(getppid), held(caller_of_sudo)].into_iter().flatten().collect()
}

/// Whether this process ignores SIGHUP and its caller does not. Where the caller ignores it too, as an
/// agent under nohup, the signal says nothing about this run.
fn is_given_nohup() -> bool {
    stockade_sys::process::ignores(Signal::HUP.as_raw()) && caller_of_sudo().or_else(getppid).is_some_and(takes_hang_ups)
}

/// Whether a process is seen not to ignore SIGHUP.
fn takes_hang_ups(process: Pid) -> bool {
    const HANG_UP: u64 = 1 << (Signal::HUP.as_raw() - 1);
    let status = std::fs::read_to_string(format!("/proc/{}/status", process.as_raw_nonzero())).unwrap_or_default();
    let ignored = status.lines().find_map(|line| u64::from_str_radix(line.strip_prefix("SigIgn:")?.trim(), 16).ok());
    ignored.is_some_and(|ignored| ignored & HANG_UP == 0)
}

/// The process that this finds, with its pidfd.
fn held(find: impl Fn() -> Option<Pid>) -> Option<(Pid, OwnedFd)> {
    let found = find()?;
    let pidfd = pidfd_open(found, PidfdFlags::empty()).ok()?;
    // Another process can have its pid only after it has ended.
    (find() == Some(found)).then_some((found, pidfd))
}

/// Stdin, of which something is awaited for as long as these processes live. When the first of
/// them has ended and nothing has come, this process ends as after SIGHUP: somebody else may
/// hold the other end, which then never closes.
pub struct AwaitedStdin<'a> {
    /// Pidfds.
    pub callers: &'a [OwnedFd],
}

impl Read for AwaitedStdin<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let stdin = rustix::stdio::stdin();
        let mut fds = vec![PollFd::new(&stdin, PollFlags::IN)];
        fds.extend(self.callers.iter().map(|caller| PollFd::new(caller, PollFlags::IN)));
        poll(&mut fds, None)?;
        if fds.first().is_some_and(|stdin| stdin.revents().is_empty()) {
            kill_process(getpid(), Signal::HUP)?;
            // The signal is blocked or ignored.
            return Err(io::Error::other("the process that started this one has ended"));
        }
        drop(fds);
        Ok(rustix::io::read(stdin, buffer)?)
    }
}

/// The nearest process above this one that is of the user who called sudo; between them are
/// sudo and what it was told to start. It is only watched, never trusted.
fn caller_of_sudo() -> Option<Pid> {
    const MAX_DEPTH: u32 = 64;
    let uid = env::var("SUDO_UID").ok()?.parse::<u32>().ok().filter(|_| rustix::process::geteuid().is_root())?;
    let mut process = getppid()?;
    for _ in 0..MAX_DEPTH {
        let status = std::fs::read_to_string(format!("/proc/{}/status", process.as_raw_nonzero())).ok()?;
        let number = |name: &str, place: usize| {
            let numbers = status.lines().find_map(|line| line.strip_prefix(name))?;
            numbers.split_whitespace().nth(place)?.parse::<u32>().ok()
        };
        // The effective uid: sudo's real one is its caller's.
        if number("Uid:", 1)? == uid {
            return Some(process);
        }
        process = Pid::from_raw(number("PPid:", 0)?.cast_signed())?;
    }
    None
}

fn own_groups() -> Vec<u32> {
    rustix::process::getgroups().unwrap_or_default().iter().map(|group| group.as_raw()).collect()
}

/// The caller: the user who started this process, unless the kernel named a peer.
///
/// # Errors
/// The program was started with more rights than its caller has (set-ID bits or file
/// capabilities), sudo's variables make no sense, or only root could act for the peer.
pub fn identify(peer: Option<&Caller>) -> Result<Identity, Refusal> {
    /// Asked at every gate of a run; what a process was started with does not change.
    static OWN: OnceLock<Result<Identity, Refusal>> = OnceLock::new();
    let own = OWN.get_or_init(own_identity).clone()?;
    match (peer, env::var_os("SUDO_UID")) {
        (Some(peer), _) => Ok(behind_a_socket(own, peer)?),
        (None, Some(sudo_uid)) if own.privileged => behind_sudo(&sudo_uid),
        _ => Ok(own),
    }
}

/// What a message to a caller of sudo ends with where that caller lacks a right: a root shell of
/// sudo's looks like root, and is not. None where root acts for nobody.
pub fn sudo_remedy() -> Option<String> {
    let identity = identify(None).ok().filter(|identity| identity.on_behalf)?;
    Some(format!(
        "you came through sudo as uid {} (SUDO_UID); as administrator: sudo env -u SUDO_UID -u SUDO_GID stockade ...",
        identity.caller.uid
    ))
}

/// Whether this program was started with more rights than its caller has.
fn has_more_rights() -> Result<bool, HostError> {
    let missing = || HostError::NoProc("/proc/self");
    // Much else depends on it, and what this process writes in another's would meet others.
    let own = rustix::fs::readlink("/proc/self", [0; 16]).map_err(|_| missing())?;
    if !own.to_str().is_ok_and(|pid| pid == std::process::id().to_string()) {
        return Err(HostError::OtherProc);
    }
    // From Linux 6.4 on; a fifth of the time that the file takes.
    if let Ok(secure) = stockade_sys::process::is_secure_exec() {
        return Ok(secure);
    }
    match std::fs::read("/proc/self/auxv") {
        Ok(auxv) if !auxv.is_empty() => Ok(stockade_sys::process::says_secure_exec(&auxv)),
        // It belongs to root where a set-ID bit changed only the group.
        Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => Ok(true),
        _ => Err(missing()),
    }
}

/// The user who started this process.
fn own_identity() -> Result<Identity, Refusal> {
    if has_more_rights()? {
        return Err(CallerError::SetId.into());
    }
    let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    let privileged = uid == 0;
    // Mounts want the first, maps of the run's ids the next two, and the run's pipes the last.
    for needed in [Capability::CAP_SYS_ADMIN, Capability::CAP_SETUID, Capability::CAP_SETGID, Capability::CAP_CHOWN] {
        if privileged && !caps::has_cap(None, CapSet::Effective, needed).unwrap_or(false) {
            return Err(CallerError::PowerlessRoot(needed).into());
        }
    }
    Ok(Identity { privileged, caller: Caller { uid, gid, groups: own_groups() }, on_behalf: false })
}

/// Root acts for its peer as for a caller of sudo; an ordinary user acts only for itself.
fn behind_a_socket(own: Identity, peer: &Caller) -> Result<Identity, CallerError> {
    if peer.uid == own.caller.uid {
        return Ok(own);
    }
    if !own.privileged {
        return Err(CallerError::PeerNotServed { own: own.caller.uid, peer: peer.uid });
    }
    Ok(Identity { privileged: true, caller: peer.clone(), on_behalf: true })
}

/// Once is enough.
static LIFTED: OnceLock<Result<(), Refusal>> = OnceLock::new();

/// Resets what sudo's caller has handed down: limits and timers that end this
/// process or fail its writes at a moment of the caller's choice, after the run and before
/// its record; and a umask that closes the log to its readers. What code may use is the
/// policy's to say.
///
/// # Errors
/// One is in force, and root has not the right to lift it.
fn lift_limits() -> Result<(), CallerError> {
    /// Enough for a launcher.
    const DESCRIPTORS: u64 = 256;
    const STACK: u64 = 8 << 20;
    stockade_sys::process::stop_timers();
    hold_back_stops();
    protect_from_oom_killer();
    rustix::process::umask(Mode::WGRP | Mode::WOTH);
    for (resource, least) in [
        (Resource::CPU, rlimit::INFINITY),
        (Resource::FSIZE, rlimit::INFINITY),
        (Resource::DATA, rlimit::INFINITY),
        (Resource::AS, rlimit::INFINITY),
        (Resource::STACK, STACK),
        (Resource::NOFILE, DESCRIPTORS),
    ] {
        let lifted = resource.get().and_then(|(soft, hard)| match soft < least {
            true => resource.set(least, hard.max(least)),
            false => Ok(()),
        });
        lifted.map_err(|error| CallerError::Limit { limit: resource.as_name(), error })?;
    }
    Ok(())
}

/// A caller that raised it could have root's launcher killed before the run is recorded. The
/// kernel lets it be lowered to what it was before an unprivileged process raised it.
fn protect_from_oom_killer() {
    const FILE: &str = "/proc/self/oom_score_adj";
    let raised = std::fs::read_to_string(FILE).is_ok_and(|score| score.trim().parse::<i32>().is_ok_and(|score| score > 0));
    if raised {
        // Root of a container may have been started so.
        let _as_it_is = std::fs::write(FILE, "0");
    }
}

fn behind_sudo(sudo_uid: &OsStr) -> Result<Identity, Refusal> {
    let number = |name: &'static str, text: &OsStr| {
        // No sign, which Rust would take.
        let digits = text.to_str().filter(|text| text.bytes().all(|byte| byte.is_ascii_digit()));
        digits.and_then(|digits| digits.parse::<u32>().ok()).ok_or_else(|| CallerError::SudoVariable { name, text: text.to_owned() })
    };
    let uid = number("SUDO_UID", sudo_uid)?;
    let gid = number("SUDO_GID", &env::var_os("SUDO_GID").ok_or(CallerError::SudoGidMissing)?)?;
    if uid == 0 {
        return Ok(Identity { privileged: true, caller: Caller { uid, gid, groups: own_groups() }, on_behalf: false });
    }
    LIFTED.get_or_init(|| Ok(lift_limits()?)).clone()?;
    let groups = supplementary_groups(uid, gid);
    Ok(Identity { privileged: true, caller: Caller { uid, gid, groups }, on_behalf: true })
}

/// Lines of an account file, split at colons.
fn account_lines(path: &str) -> Vec<Vec<String>> {
    // A name in it may be in any encoding.
    let bytes = std::fs::read(path).unwrap_or_default();
    String::from_utf8_lossy(&bytes).lines().map(|line| line.split(':').map(String::from).collect()).collect()
}

/// Whose ids an account of this name has, as the caller of runs; none: there is no such account.
pub fn account(name: &str) -> Option<Caller> {
    let fields = account_lines("/etc/passwd").into_iter().find(|fields| fields.first().is_some_and(|field| field == name))?;
    let number = |place: usize| fields.get(place)?.parse().ok();
    let (uid, gid) = (number(2)?, number(3)?);
    Some(Caller { uid, gid, groups: vec![gid] })
}

/// The name of an account.
pub fn user_name(uid: u32) -> Option<String> {
    let passwd = account_lines("/etc/passwd");
    passwd.into_iter().find(|fields| fields.get(2).is_some_and(|field| field.parse() == Ok(uid)))?.into_iter().next()
}

/// The id of a group.
pub fn group_id(name: &str) -> Option<u32> {
    let groups = account_lines("/etc/group");
    groups.into_iter().find(|fields| fields.first().is_some_and(|field| field == name))?.get(2)?.parse().ok()
}

fn supplementary_groups(uid: u32, gid: u32) -> Vec<u32> {
    let passwd = account_lines("/etc/passwd");
    let name = passwd.iter().find(|fields| fields.get(2).is_some_and(|field| field.parse() == Ok(uid))).and_then(|fields| fields.first());
    let mut groups = vec![gid];
    if let Some(name) = name {
        for fields in account_lines("/etc/group") {
            if let (Some(number), Some(members)) = (fields.get(2).and_then(|field| field.parse().ok()), fields.get(3))
                && members.split(',').any(|member| member == name)
            {
                groups.push(number);
            }
        }
    }
    groups.sort_unstable();
    groups.dedup();
    groups
}

/// Every account's home directory; none of them may be a scratch itself.
pub fn homes() -> Vec<PathBuf> {
    let accounts = std::fs::read("/etc/passwd").unwrap_or_default();
    let in_accounts = accounts.split(|byte| *byte == b'\n').filter_map(|account| account.split(|byte| *byte == b':').nth(5));
    let mut homes: Vec<&OsStr> = in_accounts.filter(|home| home.len() > 1).map(OsStr::from_bytes).collect();
    homes.sort_unstable();
    homes.dedup();
    homes.into_iter().map(PathBuf::from).collect()
}
