//! The argument rules read for one call: whether it keeps them, and which one it breaks.
//!
//! Gives for all arguments the answer of the compiled filter; a test compares the two. Whether
//! the call is listed at all is not asked here.

use super::{
    AF_UNIX, ALLOWED_PRCTL, CONNECTED_PAIRS, Check, F_NOTIFY, FILE_TYPE_MASK, FORBIDDEN_SOCKET_OPTIONS, LEASES, MADV_MERGEABLE,
    MKNOD_TYPES, NEW_NAMESPACES, O_CREAT_OR_TMPFILE, OPEN_FILE_LOCKS, PERSONALITIES, RENAME_WHITEOUT, SET_ID_BITS, SOCK_DGRAM, SOCK_STREAM,
    SOCK_TYPE_MASK, WATCHING, family_rule,
};
use crate::{
    model::{Seccomp, SocketFamily},
    names,
};

/// The rule that a call's arguments break.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BrokenRule {
    /// It stands in every filter.
    Fixed(&'static str),
    /// No policy can put the value into this list of `[seccomp]`, and why.
    Never(&'static str, &'static str),
    /// This list of `[seccomp]` lacks this value.
    Lacks(&'static str, String),
}

/// The low half of an argument, which is what the kernel reads and the filter compares.
pub(crate) fn low_half(arguments: &[u64; 6], index: u8) -> u32 {
    let half = arguments.get(usize::from(index)).map_or(0, |argument| argument & u64::from(u32::MAX));
    u32::try_from(half).unwrap_or(u32::MAX)
}

impl Check {
    /// Whether arguments keep the rule.
    ///
    /// # Errors
    /// What they break, and what would have to change.
    pub fn judge(self, policy: &Seccomp, arguments: &[u64; 6]) -> Result<(), BrokenRule> {
        let low = |index| low_half(arguments, index);
        let fixed = |kept: bool, rule| if kept { Ok(()) } else { Err(BrokenRule::Fixed(rule)) };
        let plain_mode = |mode: u32| fixed(mode & SET_ID_BITS == 0, "set-ID bits are refused in every mode");
        match self {
            Check::Clone => fixed(low(0) & NEW_NAMESPACES == 0, "new namespaces are refused"),
            Check::Mode(mode) => plain_mode(low(mode)),
            Check::Open(flags) if low(flags) & O_CREAT_OR_TMPFILE == 0 => Ok(()),
            Check::Open(flags) => plain_mode(low(flags + 1)),
            Check::Mknod(mode) if MKNOD_TYPES.contains(&(low(mode) & FILE_TYPE_MASK)) => plain_mode(low(mode)),
            Check::Mknod(_) => Err(BrokenRule::Fixed("device nodes are refused")),
            Check::PidIsSelf(pid) => fixed(low(pid) == 0, "only pid 0, oneself, may be named"),
            Check::PrlimitSelf => fixed(low(0) == 0, "only pid 0, oneself, may be named"),
            // The limit of core dumps is answered as if it were set.
            Check::SetRlimit => Ok(()),
            Check::Priority(which) => fixed((low(0), low(1)) == (which, 0), "only oneself may be named"),
            Check::Personality => fixed(PERSONALITIES.contains(&low(0)), "only the plain personality is allowed"),
            Check::Prctl => fixed(ALLOWED_PRCTL.contains(&low(0)), "only what a program may ask of itself, a fixed list, is allowed"),
            Check::NoHugePages(argument, bit) => {
                fixed(low(argument) & bit == 0, "huge pages of the host's pool, which no limit counts, are refused")
            }
            Check::Madvise => fixed(low(2) != MADV_MERGEABLE, "pages shared with other runs (MADV_MERGEABLE) are refused"),
            Check::SetSockOpt => {
                match FORBIDDEN_SOCKET_OPTIONS.iter().find(|(level, options, _)| *level == low(1) && options.contains(&low(2))) {
                    Some((_, _, rule)) => Err(BrokenRule::Fixed(rule)),
                    None => Ok(()),
                }
            }
            Check::Rename => fixed(low(4) & RENAME_WHITEOUT == 0, "RENAME_WHITEOUT, which makes a device node, is refused"),
            Check::Fcntl { .. } if LEASES.contains(&low(1)) => {
                Err(BrokenRule::Fixed("leases, which block other processes that open the file, are refused"))
            }
            Check::Fcntl { .. } if OPEN_FILE_LOCKS.contains(&low(1)) => {
                Err(BrokenRule::Fixed("locks of open files (F_OFD_SETLK), which no limit counts, are refused; F_SETLK and flock are not"))
            }
            // One permission for both ways to watch a directory.
            Check::Fcntl { watching: false } if low(1) == F_NOTIFY => Err(BrokenRule::Lacks("allow", WATCHING.to_owned())),
            Check::Fcntl { .. } => Ok(()),
            Check::SocketPair if low(0) == AF_UNIX && !CONNECTED_PAIRS.contains(&(low(1) & SOCK_TYPE_MASK)) => {
                judge_socket(policy, AF_UNIX, low(1) & SOCK_TYPE_MASK, 0)
            }
            Check::SocketPair => fixed(low(0) == AF_UNIX, "only pairs of AF_UNIX are allowed"),
            Check::Ioctl => match names::FORBIDDEN_IOCTLS.iter().find(|(_, number, _)| *number == low(1)) {
                Some((_, _, reason)) => Err(BrokenRule::Never("ioctl", reason)),
                None if policy.ioctl.contains(&low(1)) => Ok(()),
                None => Err(BrokenRule::Lacks("ioctl", names::ioctl_text(low(1)))),
            },
            Check::Socket => judge_socket(policy, low(0), low(1) & SOCK_TYPE_MASK, low(2)),
        }
    }
}

fn judge_socket(policy: &Seccomp, family: u32, kind: u32, protocol: u32) -> Result<(), BrokenRule> {
    let never = |why| Err(BrokenRule::Never("socket_families", why));
    let Some((_, family)) = names::FAMILIES.iter().find(|(_, known)| family_rule(*known).0 == family) else {
        return never("only unix, inet, inet6 and netlink can be listed");
    };
    let protocols = family_rule(*family).1;
    let typed = !matches!(family, SocketFamily::Inet | SocketFamily::Inet6) || [SOCK_STREAM, SOCK_DGRAM].contains(&kind);
    if !typed || (!protocols.is_empty() && !protocols.contains(&protocol)) {
        return never("only TCP, UDP and route netlink can be used");
    }
    match policy.socket_families.contains(family) {
        true => Ok(()),
        false => Err(BrokenRule::Lacks("socket_families", family.name().to_owned())),
    }
}
