//! The system call filter: from names to BPF.
//!
//! One filter, because each costs the kernel a pass over every system call number
//! when it is loaded. The numbers are ranges of equal action, searched by a balanced
//! tree; on this shape loading takes a fifth of what a linear list costs. A test
//! compares it, call by call and argument by argument, with what libseccomp compiles
//! from the same rules.
//!
//! Refused calls are notified to the launcher, which answers EPERM and keeps account;
//! ENOSYS is answered by the filter itself. Arguments are compared in their low 32
//! bits, as the kernel reads them.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

mod judge;

use libseccomp::{ScmpArch, ScmpSyscall};

pub use judge::BrokenRule;
pub(crate) use judge::low_half;

use crate::model::{Seccomp, SocketFamily};

/// Names and numbers of the system calls of x86_64, as libseccomp knows them.
pub mod names {
    use super::{ScmpArch, ScmpSyscall};

    /// One past the largest number looked at.
    pub const END: u32 = 512;

    /// The number of a call, if this architecture has it.
    pub fn number(name: &str) -> Option<u32> {
        let call = ScmpSyscall::from_name_by_arch(name, ScmpArch::X8664).ok()?;
        u32::try_from(i32::from(call)).ok().filter(|number| *number < END)
    }

    /// The name of a number.
    pub fn name(number: u32) -> Option<String> {
        ScmpSyscall::from(i32::try_from(number).ok()?).get_name_by_arch(ScmpArch::X8664).ok()
    }

    /// One past the largest number that has a name.
    pub fn first_unknown() -> u32 {
        (0..END).rev().find(|number| name(*number).is_some()).map_or(0, |number| number + 1)
    }
}

/// Bits of a socket's type that are no flags.
const SOCK_TYPE_MASK: u32 = 0xf;
const SOCK_STREAM: u32 = 1;
const SOCK_DGRAM: u32 = 2;
const SOCK_SEQPACKET: u32 = 5;
/// Pairs that stay connected to each other. One of datagrams (or SOCK_RAW, which is the same) sends
/// to any socket that has a path.
const CONNECTED_PAIRS: [u32; 2] = [SOCK_STREAM, SOCK_SEQPACKET];

const RET_ALLOW: u32 = 0x7fff_0000;
const RET_NOTIFY: u32 = 0x7fc0_0000;
const RET_ERRNO: u32 = 0x0005_0000;
const ENOSYS: u32 = 38;
const EPERM: u32 = 1;
const EINVAL: u32 = 22;
const EOPNOTSUPP: u32 = 95;
const AUDIT_ARCH_X86_64: u32 = 0xc000_003e;

/// The answer that stands in for a notification where another supervisor already
/// holds a listener: the denial stays, its report is lost.
pub const RET_WITHOUT_LISTENER: u32 = RET_ERRNO | EPERM;
/// The answer 0, without doing it.
const RET_DONE: u32 = RET_ERRNO;
/// The answer that asks the listener.
pub const RET_WITH_LISTENER: u32 = RET_NOTIFY;

const AF_UNIX: u32 = 1;
/// S_IFMT, and what `mknod` may make: S_IFREG (also as 0), S_IFIFO, S_IFSOCK.
const FILE_TYPE_MASK: u32 = 0o170_000;
const MKNOD_TYPES: [u32; 4] = [0, 0o100_000, 0o010_000, 0o140_000];
/// PER_LINUX and the query.
const PERSONALITIES: [u32; 2] = [0, u32::MAX];
/// Set-ID bits of a mode (S_ISUID and S_ISGID).
const SET_ID_BITS: u32 = 0o6000;
/// Every CLONE_NEW* flag that clone(2) takes.
const NEW_NAMESPACES: u32 = 0x7e02_0000;
const RENAME_WHITEOUT: u32 = 4;
/// Watches a directory, as inotify's forerunner dnotify did.
pub const F_NOTIFY: u32 = 1026;
/// F_SETLEASE and F_SETDELEG: a process that opens a file, or changes a directory, under another
/// process's lease is blocked until the lease is released; the host and the launcher too.
pub const LEASES: [u32; 2] = [1024, 1040];
/// F_OFD_SETLK and F_OFD_SETLKW: no cgroup counts locks, and these go on where the launcher does not
/// find them, with a file that is only mapped or on its way in a message. The others, F_SETLK and
/// flock(2), last no longer than a descriptor.
pub const OPEN_FILE_LOCKS: [u32; 2] = [37, 38];
/// Where this call is not allowed, F_NOTIFY, the older way to watch, is refused too.
pub const WATCHING: &str = "inotify_add_watch";
/// What a program may ask of prctl(2) of itself: its death signal, dumpability, capabilities and
/// securebits (of which it has none), name, filter mode, timer slack, subreaper, no_new_privs,
/// whether it has huge pages, speculation, executable memory, who may trace it.
/// A list of what is allowed, because what is new in the kernel may take memory that no limit
/// counts: PR_FUTEX_HASH (78) did, names of mappings (PR_SET_VMA) do, and PR_SET_MEMORY_MERGE (67)
/// shares pages between runs.
/// Where no cgroup counts huge pages, the launcher takes them by PR_SET_THP_DISABLE (41).
/// PR_SET_SECCOMP (22) and PR_SET_SYSCALL_USER_DISPATCH (59) could answer in place of this filter,
/// unreported.
pub const ALLOWED_PRCTL: [u32; 28] =
    [1, 2, 3, 4, 7, 8, 13, 15, 16, 21, 23, 24, 27, 29, 30, 36, 37, 38, 39, 40, 42, 47, 52, 53, 65, 66, 0x4155_5856, 0x5961_6d61];
/// MAP_HUGETLB of mmap(2), MFD_HUGETLB of memfd_create(2), SHM_HUGETLB of shmget(2): pages of the
/// host's pool, which count in no limit of a run.
const HUGE_PAGES: [(&str, u8, u32); 3] = [("mmap", 3, 0x4_0000), ("memfd_create", 1, 4), ("shmget", 2, 0o4000)];
/// MADV_MERGEABLE: the kernel shares equal pages between runs, and how long a write takes tells
/// what another run holds.
const MADV_MERGEABLE: u32 = 12;
/// Options of sockets that take memory which no cgroup counts, each level once: SO_ATTACH_FILTER,
/// SO_ATTACH_BPF, SO_ATTACH_REUSEPORT_CBPF and _EBPF; groups of multicast and filters of their
/// sources; IPV6_2292PKTOPTIONS, IPV6_FLOWLABEL_MGR, IPV6_HOPOPTS, IPV6_RTHDRDSTOPTS, IPV6_RTHDR and
/// IPV6_DSTOPTS, whose headers of up to 4 KiB each socket keeps; TCP_MD5SIG, TCP_MD5SIG_EXT and
/// TCP_AO_ADD_KEY.
pub const FORBIDDEN_SOCKET_OPTIONS: [(u32, &[u32], &str); 4] = [
    (1, &[26, 50, 51, 52], "BPF programs on sockets are refused"),
    (0, &[35, 39, 40, 41, 42, 43, 44, 45, 46, 47, 48], "groups of multicast, which no limit counts, are refused"),
    (
        41,
        &[6, 20, 32, 42, 43, 44, 45, 46, 47, 48, 54, 55, 57, 59],
        "groups of multicast and extension headers of IPv6, which no limit counts, are refused",
    ),
    (6, &[14, 32, 38], "keys of TCP, which no limit counts, are refused"),
];
/// Core dumps are forbidden by a limit of 1, at which the kernel does not start a core_pattern
/// that is a pipe, root's on the host; at 0 it does. Code that
/// sets 0 gets success without effect, since no core is what it wants.
pub const RLIMIT_CORE: u32 = 4;
/// How many `ioctl` requests a policy may allow: a conditional jump of BPF spans so many comparisons.
pub const MAX_IOCTLS: usize = 255;
const O_CREAT_OR_TMPFILE: u32 = 0o100 | 0o20_000_000;

/// What happens to one system call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// It runs.
    Allow,
    /// It is refused with EPERM and reported.
    Deny,
    /// It does not exist.
    NoSuchCall,
    /// It is refused with this errno, as a file system without it would; programs fall back.
    Unsupported(u32),
    /// It runs if its arguments pass.
    Check(Check),
}

/// A rule on the arguments of an allowed call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Check {
    /// `clone` without new namespaces.
    Clone,
    /// `socket` of an allowed family; TCP and UDP only; route netlink only.
    Socket,
    /// `socketpair` of AF_UNIX; without that family only of a type that stays connected.
    SocketPair,
    /// `ioctl` with a listed request.
    Ioctl,
    /// A mode in this argument without set-ID bits.
    Mode(u8),
    /// `open` flags in this argument, and the mode behind it if they create.
    Open(u8),
    /// `mknod` of a regular file, fifo or socket, mode in this argument.
    Mknod(u8),
    /// The process in this argument is the caller itself (0).
    PidIsSelf(u8),
    /// `setrlimit`: that of core dumps stays as it is.
    SetRlimit,
    /// `prlimit64` on the caller itself (0): likewise.
    PrlimitSelf,
    /// `setpriority` and `ioprio_set`: this "which", and who 0.
    Priority(u32),
    /// `personality` 0 or the query.
    Personality,
    /// `prctl` of [`ALLOWED_PRCTL`].
    Prctl,
    /// Flags in this argument without this bit, which takes huge pages.
    NoHugePages(u8, u32),
    /// `madvise` without MADV_MERGEABLE.
    Madvise,
    /// `setsockopt` without [`FORBIDDEN_SOCKET_OPTIONS`].
    SetSockOpt,
    /// `renameat2` without RENAME_WHITEOUT, which makes a device node.
    Rename,
    /// `fcntl` without leases and locks of open files, and without F_NOTIFY where nothing may be watched.
    Fcntl {
        /// Directories may be.
        watching: bool,
    },
}

impl Check {
    /// The argument rule of a call under a policy, if it has one.
    pub fn of(name: &str, policy: &Seccomp) -> Option<Self> {
        Some(match name {
            "clone" => Check::Clone,
            "socket" => Check::Socket,
            "socketpair" => Check::SocketPair,
            "ioctl" => Check::Ioctl,
            "chmod" | "fchmod" | "mkdir" | "creat" => Check::Mode(1),
            "fchmodat" | "fchmodat2" | "mkdirat" => Check::Mode(2),
            "open" => Check::Open(1),
            "openat" => Check::Open(2),
            "mknod" => Check::Mknod(1),
            "mknodat" => Check::Mknod(2),
            "sched_setaffinity" | "sched_setattr" | "sched_setparam" | "sched_setscheduler" => Check::PidIsSelf(0),
            "setrlimit" => Check::SetRlimit,
            "prlimit64" => Check::PrlimitSelf,
            "setpriority" => Check::Priority(0),
            "ioprio_set" => Check::Priority(1),
            "personality" => Check::Personality,
            "prctl" => Check::Prctl,
            "madvise" => Check::Madvise,
            "setsockopt" => Check::SetSockOpt,
            "renameat2" => Check::Rename,
            "fcntl" => Check::Fcntl { watching: policy.allow.iter().any(|name| name == WATCHING) },
            _ => {
                let (_, argument, bit) = HUGE_PAGES.iter().find(|(call, ..)| *call == name)?;
                Check::NoHugePages(*argument, *bit)
            }
        })
    }
}

/// The number of a family, and the protocols that its sockets may have; AF_UNIX has no others.
const fn family_rule(family: SocketFamily) -> (u32, &'static [u32]) {
    match family {
        SocketFamily::Unix => (AF_UNIX, &[]),
        SocketFamily::Inet => (2, &[0, 6, 17]),
        SocketFamily::Inet6 => (10, &[0, 6, 17]),
        SocketFamily::Netlink => (16, &[0]),
    }
}

/// What the filter does to each system call number below [`names::END`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rules {
    actions: Vec<Action>,
    families: Vec<SocketFamily>,
    ioctl: Vec<u32>,
}

/// A call that no filter of ours can allow, or that the executor cannot do without.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FilterError {
    /// The executor would not start.
    #[error("the policy's [seccomp] allow list lacks `{0}`, which the executor needs to start the program; add it")]
    Needed(&'static str),
    /// The policy names what does not exist here.
    #[error("unknown system call `{0}`")]
    Unknown(String),
    /// A rule is longer than a conditional jump reaches.
    #[error("the filter needs a jump over {0} instructions, and a BPF jump spans at most 255; shorten `ioctl` under [seccomp]")]
    JumpTooFar(usize),
}

/// Calls that the executor makes behind the filter.
pub const NEEDED: &[&str] = &[
    "brk",
    "clone",
    "close",
    "close_range",
    "dup2",
    "execve",
    "execveat",
    "exit",
    "exit_group",
    "fcntl",
    "fstat",
    "getdents64",
    "ioctl",
    "landlock_restrict_self",
    "mkdirat",
    "mknodat",
    "mmap",
    "openat",
    "prctl",
    "prlimit64",
    "read",
    "rt_sigaction",
    "rt_sigprocmask",
    "sendmsg",
    "setsid",
    "wait4",
    "write",
];

/// Calls that give a file an access control list: a tmpfs keeps 64 KiB for each, which no cgroup
/// counts. The attribute's name lies in memory, so every attribute is refused; cp and tar go on.
pub const ACCESS_LISTS: [&str; 4] = ["setxattr", "lsetxattr", "fsetxattr", "setxattrat"];

/// Calls that put pages of a file into a pipe or socket without a copy. One byte there keeps up to
/// 2 MiB of the file in memory, also when it is deleted, and no limit of this run counts pages that
/// another read first. EINVAL is the answer of a file system that cannot do it (splice(2),
/// sendfile(2)).
pub const PINS_PAGES: [&str; 3] = ["sendfile", "splice", "tee"];

/// Calls after which blocks of a host scratch are in use that no count finds.
const ESCAPES_COUNT: [&str; 3] = ["fallocate", "landlock_create_ruleset", "landlock_add_rule"];

impl Rules {
    /// Works out the action of every call. `growing_scratch`: scratch is a host directory, where
    /// preallocated blocks would escape the launcher's count, and so would a deleted file that a
    /// rule of Landlock has. EOPNOTSUPP is what Landlock answers where it was switched off at
    /// boot: a program that can do without it goes on.
    ///
    /// # Errors
    /// A name is unknown, or one of [`NEEDED`] is not allowed.
    pub fn new(policy: &Seccomp, growing_scratch: bool) -> Result<Self, FilterError> {
        let unknown = names::first_unknown();
        let mut actions: Vec<Action> = (0..names::END)
            .map(|number| if number >= unknown || names::name(number).is_none() { Action::NoSuchCall } else { Action::Deny })
            .collect();
        let mut set = |name: &str, action: Action| -> Result<(), FilterError> {
            let number = names::number(name).ok_or_else(|| FilterError::Unknown(name.to_owned()))?;
            if let Some(slot) = actions.get_mut(number as usize) {
                *slot = action;
            }
            Ok(())
        };
        for name in &policy.allow {
            let called = name.as_str();
            let escapes = ACCESS_LISTS.contains(&called) || (growing_scratch && ESCAPES_COUNT.contains(&called));
            let action = if escapes {
                Action::Unsupported(EOPNOTSUPP)
            } else if PINS_PAGES.contains(&called) {
                Action::Unsupported(EINVAL)
            } else {
                Check::of(name, policy).map_or(Action::Allow, Action::Check)
            };
            set(name, action)?;
        }
        for name in &policy.enosys {
            set(name, Action::NoSuchCall)?;
        }
        // Their arguments lie in memory, where they can change after any check; programs
        // fall back to clone and openat.
        set("clone3", Action::NoSuchCall)?;
        set("openat2", Action::NoSuchCall)?;
        let rules = Rules { actions, families: policy.socket_families.clone(), ioctl: policy.ioctl.clone() };
        match NEEDED.iter().find(|name| !matches!(rules.action(name), Some(Action::Allow | Action::Check(_)))) {
            Some(missing) => Err(FilterError::Needed(missing)),
            None => Ok(rules),
        }
    }

    /// The action of a call by name.
    pub fn action(&self, name: &str) -> Option<Action> {
        names::number(name).and_then(|number| self.actions.get(number as usize)).copied()
    }

    /// Compiles to BPF: each instruction is a `struct sock_filter` in one integer.
    ///
    /// # Errors
    /// A list is longer than a conditional jump reaches.
    pub fn compile(&self) -> Result<Vec<u64>, FilterError> {
        let mut ranges: Vec<(u32, Action)> = Vec::new();
        for (number, action) in (0u32..).zip(&self.actions) {
            if ranges.last().map(|(_, last)| last) != Some(action) {
                ranges.push((number, *action));
            }
        }
        let mut code = Backwards { rules: self, reversed: Vec::new(), answers: BTreeMap::new(), checks: BTreeMap::new() };
        code.tree(&ranges)?;
        let mut out = vec![load(OFFSET_ARCH), jump_equal(AUDIT_ARCH_X86_64, 1, 0), ret(RET_ERRNO | ENOSYS), load(OFFSET_NUMBER)];
        out.extend(code.reversed.iter().rev());
        Ok(out)
    }

    fn compile_check(&self, check: Check) -> Result<Vec<u64>, FilterError> {
        Ok(match check {
            Check::Clone => no_bits(0, NEW_NAMESPACES),
            Check::Mode(argument) => no_bits(argument, SET_ID_BITS),
            Check::Open(argument) => {
                let mut code = vec![load(low(argument)), jump_any_bit(O_CREAT_OR_TMPFILE, 1, 0), ret(RET_ALLOW)];
                code.extend(no_bits(argument + 1, SET_ID_BITS));
                code
            }
            Check::Mknod(argument) => {
                let mut code = vec![load(low(argument)), and(FILE_TYPE_MASK)];
                code.extend(one_of(&MKNOD_TYPES, no_bits(argument, SET_ID_BITS))?);
                code
            }
            Check::PidIsSelf(argument) => equals_any(argument, &[0])?,
            Check::SetRlimit => vec![load(low(0)), jump_equal(RLIMIT_CORE, 0, 1), ret(RET_DONE), ret(RET_ALLOW)],
            Check::PrlimitSelf => {
                let mut code = vec![load(low(0)), jump_equal(0, 1, 0), ret(RET_NOTIFY)];
                // Without a new one, which is a pointer, it only asks.
                let is_set = [load(low(2)), jump_equal(0, 0, 2), load(low(2) + 4), jump_equal(0, 1, 0)];
                code.extend([load(low(1)), jump_equal(RLIMIT_CORE, 1, 0), ret(RET_ALLOW)].into_iter().chain(is_set));
                code.extend([ret(RET_DONE), ret(RET_ALLOW)]);
                code
            }
            Check::Priority(which) => {
                let mut code = vec![load(low(0))];
                code.extend(one_of(&[which], equals_any(1, &[0])?)?);
                code
            }
            Check::Personality => equals_any(0, &PERSONALITIES)?,
            Check::SocketPair if self.families.contains(&SocketFamily::Unix) => equals_any(0, &[AF_UNIX])?,
            Check::SocketPair => {
                let mut of_type = vec![load(low(1)), and(SOCK_TYPE_MASK)];
                of_type.extend(one_of(&CONNECTED_PAIRS, vec![ret(RET_ALLOW)])?);
                let mut code = vec![load(low(0))];
                code.extend(one_of(&[AF_UNIX], of_type)?);
                code
            }
            Check::Rename => no_bits(4, RENAME_WHITEOUT),
            Check::Fcntl { watching } => {
                let mut code = vec![load(low(1))];
                let watch = (!watching).then_some(F_NOTIFY);
                code.extend(none_of(&LEASES.into_iter().chain(OPEN_FILE_LOCKS).chain(watch).collect::<Vec<_>>())?);
                code
            }
            Check::Prctl => equals_any(0, &ALLOWED_PRCTL)?,
            Check::NoHugePages(argument, bit) => no_bits(argument, bit),
            Check::Madvise => {
                let mut code = vec![load(low(2))];
                code.extend(none_of(&[MADV_MERGEABLE])?);
                code
            }
            Check::SetSockOpt => {
                let mut code = vec![load(low(1))];
                for (level, options, _) in FORBIDDEN_SOCKET_OPTIONS {
                    let mut body = vec![load(low(2))];
                    body.extend(none_of(options)?);
                    code.push(jump_equal(level, 0, span(body.len())?));
                    code.extend(body);
                }
                code.push(ret(RET_ALLOW));
                code
            }
            Check::Ioctl => equals_any(1, &self.ioctl)?,
            Check::Socket => {
                let mut code = vec![load(low(0))];
                for family in &self.families {
                    let (number, protocols) = family_rule(*family);
                    let body = match family {
                        SocketFamily::Unix => vec![ret(RET_ALLOW)],
                        SocketFamily::Netlink => equals_any(2, protocols)?,
                        // A type alone can mean a protocol, and have its module loaded:
                        // SOCK_SEQPACKET is SCTP, SOCK_DCCP DCCP.
                        SocketFamily::Inet | SocketFamily::Inet6 => {
                            let types = [
                                load(low(1)),
                                and(SOCK_TYPE_MASK),
                                jump_equal(SOCK_STREAM, 2, 0),
                                jump_equal(SOCK_DGRAM, 1, 0),
                                ret(RET_NOTIFY),
                            ];
                            types.into_iter().chain(equals_any(2, protocols)?).collect()
                        }
                    };
                    code.push(jump_equal(number, 0, span(body.len())?));
                    code.extend(body);
                }
                code.push(ret(RET_NOTIFY));
                code
            }
        })
    }
}

/// `struct seccomp_data`: nr, arch, instruction_pointer, args.
const OFFSET_NUMBER: u32 = 0;
const OFFSET_ARCH: u32 = 4;

/// Offset of the low half of an argument.
fn low(argument: u8) -> u32 {
    16 + 8 * u32::from(argument)
}

fn instruction(code: u16, when_true: u8, when_false: u8, k: u32) -> u64 {
    u64::from(code) | u64::from(when_true) << 16 | u64::from(when_false) << 24 | u64::from(k) << 32
}
fn load(offset: u32) -> u64 {
    instruction(0x20, 0, 0, offset)
}
fn and(mask: u32) -> u64 {
    instruction(0x54, 0, 0, mask)
}
fn ret(action: u32) -> u64 {
    instruction(0x06, 0, 0, action)
}
fn jump_equal(value: u32, when_true: u8, when_false: u8) -> u64 {
    instruction(0x15, when_true, when_false, value)
}
fn jump_at_least(value: u32, when_true: u8, when_false: u8) -> u64 {
    instruction(0x35, when_true, when_false, value)
}
fn jump_any_bit(mask: u32, when_true: u8, when_false: u8) -> u64 {
    instruction(0x45, when_true, when_false, mask)
}
fn jump(distance: u32) -> u64 {
    instruction(0x05, 0, 0, distance)
}

fn no_bits(argument: u8, mask: u32) -> Vec<u64> {
    vec![load(low(argument)), jump_any_bit(mask, 0, 1), ret(RET_NOTIFY), ret(RET_ALLOW)]
}

/// The distance of a conditional jump, which has eight bits.
fn span(distance: usize) -> Result<u8, FilterError> {
    u8::try_from(distance).map_err(|_| FilterError::JumpTooFar(distance))
}

fn equals_any(argument: u8, values: &[u32]) -> Result<Vec<u64>, FilterError> {
    let mut code = vec![load(low(argument))];
    code.extend(one_of(values, vec![ret(RET_ALLOW)])?);
    Ok(code)
}

/// Goes on with `body` where the loaded value is one of `values`, else denies.
fn one_of(values: &[u32], body: Vec<u64>) -> Result<Vec<u64>, FilterError> {
    let mut code: Vec<u64> = Vec::with_capacity(values.len() + 1 + body.len());
    for (index, value) in values.iter().enumerate() {
        code.push(jump_equal(*value, span(values.len() - index)?, 0));
    }
    code.push(ret(RET_NOTIFY));
    code.extend(body);
    Ok(code)
}

/// Allows, unless the loaded value is one of `values`.
fn none_of(values: &[u32]) -> Result<Vec<u64>, FilterError> {
    let mut code: Vec<u64> = Vec::with_capacity(values.len() + 2);
    for (index, value) in values.iter().enumerate() {
        code.push(jump_equal(*value, span(values.len() - index)?, 0));
    }
    code.extend([ret(RET_ALLOW), ret(RET_NOTIFY)]);
    Ok(code)
}

/// Where a search of the tree goes on.
#[derive(Clone, Copy)]
enum Next {
    /// At this instruction, counted from the end.
    At(usize),
    /// With this answer.
    Answer(u32),
}

/// The tree, written from its end. All jumps lead forwards, so what they lead to stands
/// already, and what is the same stands once as far as jumps reach: the kernel translates a
/// filter anew for each load, which takes as long as the filter is.
struct Backwards<'r> {
    rules: &'r Rules,
    reversed: Vec<u64>,
    /// The last place of each answer, and of each check.
    answers: BTreeMap<u32, usize>,
    checks: BTreeMap<Check, usize>,
}

impl Backwards<'_> {
    /// Writes the whole tree; its first instruction is the last one written.
    fn tree(&mut self, ranges: &[(u32, Action)]) -> Result<(), FilterError> {
        let top = self.branch(ranges)?;
        let at = self.within_reach(top)?;
        if at + 1 != self.reversed.len() {
            self.push_jump(at)?;
        }
        Ok(())
    }

    fn branch(&mut self, ranges: &[(u32, Action)]) -> Result<Next, FilterError> {
        let (left, right) = ranges.split_at(ranges.len() / 2);
        let Some((first, action)) = right.first() else { return Ok(Next::Answer(RET_ERRNO | ENOSYS)) };
        if left.is_empty() {
            return Ok(match action {
                Action::Allow => Next::Answer(RET_ALLOW),
                Action::Deny => Next::Answer(RET_NOTIFY),
                Action::NoSuchCall => Next::Answer(RET_ERRNO | ENOSYS),
                Action::Unsupported(errno) => Next::Answer(RET_ERRNO | errno),
                Action::Check(check) => Next::At(self.check(*check)?),
            });
        }
        let (right, left) = (self.branch(right)?, self.branch(left)?);
        let (right, left) = (self.within_reach(right)?, self.within_reach(left)?);
        let node = jump_at_least(*first, span(self.distance(right))?, span(self.distance(left))?);
        Ok(Next::At(self.push(node)))
    }

    fn check(&mut self, check: Check) -> Result<usize, FilterError> {
        if let Some(at) = self.checks.get(&check) {
            return Ok(*at);
        }
        self.reversed.extend(self.rules.compile_check(check)?.iter().rev());
        let at = self.reversed.len() - 1;
        self.checks.insert(check, at);
        Ok(at)
    }

    fn push(&mut self, instruction: u64) -> usize {
        self.reversed.push(instruction);
        self.reversed.len() - 1
    }

    fn push_jump(&mut self, at: usize) -> Result<usize, FilterError> {
        let distance = self.distance(at);
        let distance = u32::try_from(distance).map_err(|_| FilterError::JumpTooFar(distance))?;
        Ok(self.push(jump(distance)))
    }

    /// How many instructions one that is written next would jump over.
    fn distance(&self, at: usize) -> usize {
        self.reversed.len() - 1 - at
    }

    /// Conditional jumps span 255 instructions, a plain one any number. The next may be the
    /// other way of the same branch, which takes one more.
    fn within_reach(&mut self, next: Next) -> Result<usize, FilterError> {
        const SPAN: usize = 254;
        Ok(match next {
            Next::At(at) if self.distance(at) > SPAN => self.push_jump(at)?,
            Next::At(at) => at,
            Next::Answer(answer) => match self.answers.get(&answer) {
                Some(at) if self.distance(*at) <= SPAN => *at,
                _ => {
                    let at = self.push(ret(answer));
                    self.answers.insert(answer, at);
                    at
                }
            },
        })
    }
}

/// A policy's filters, compiled. Resolving some four hundred names takes half a
/// millisecond, so the shipped policies' are made when the program is built.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Filters {
    /// For a private scratch, whose size its tmpfs holds.
    pub private_scratch: Filter,
    /// For a writable host directory, in which everything must be counted.
    pub host_scratch: Filter,
    /// Numbers of the calls for which the policy kills.
    pub kill: BTreeSet<u32>,
}

/// One compiled filter.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Filter {
    /// Instructions, a `struct sock_filter` each.
    #[serde(with = "packed")]
    pub program: Arc<[u64]>,
    /// SHA-256 in hex over the instructions in the kernel's layout.
    pub sha256: String,
}

/// The number of seccomp(2), and its operation that loads a filter.
const SECCOMP: u32 = 317;
const SECCOMP_SET_MODE_FILTER: u32 = 1;

impl Filter {
    /// The same, but for seccomp(2) that loads a further filter and asks for nothing else: without
    /// flags, so without a listener. Filters only add up: the kernel asks all, and takes the strictest
    /// answer. It is for pid 1 alone; the first of the caller's ([`callers_programs`]) refuses it to code.
    pub fn taking_callers(&self) -> Filter {
        let may_load = [
            load(OFFSET_ARCH),
            jump_equal(AUDIT_ARCH_X86_64, 0, 7),
            load(OFFSET_NUMBER),
            jump_equal(SECCOMP, 0, 5),
            load(low(0)),
            jump_equal(SECCOMP_SET_MODE_FILTER, 0, 3),
            load(low(1)),
            jump_equal(0, 0, 1),
            ret(RET_ALLOW),
        ];
        let program: Vec<u64> = may_load.into_iter().chain(self.program.iter().copied()).collect();
        Filter { sha256: sha256(&program), program: program.into() }
    }
}

/// The instructions that [`callers_programs`] puts before a caller's.
pub(crate) const CLOSING: usize = 8;

/// A caller's filters as bytes, in the kernel's layout. The first answers EPERM to seccomp(2), unless
/// the fourth argument is `key`, which the kernel does not read: the process that loads the others
/// knows it, and the code does not.
pub fn callers_programs(filters: &[Vec<u64>], key: u64) -> Vec<Vec<u8>> {
    // LD | IMM: a program begins with an accumulator of 0.
    let clear = instruction(0, 0, 0, 0);
    let (key_low, key_high) = (key as u32, (key >> 32) as u32);
    let closing: [u64; CLOSING] = [
        load(OFFSET_NUMBER),
        jump_equal(SECCOMP, 0, 5),
        load(low(3)),
        jump_equal(key_low, 0, 2),
        load(low(3) + 4),
        jump_equal(key_high, 1, 0),
        ret(RET_ERRNO | EPERM),
        clear,
    ];
    let before = std::iter::once(&closing[..]).chain(std::iter::repeat(&[][..]));
    filters.iter().zip(before).map(|(filter, before)| bytes(&[before, filter.as_slice()].concat())).collect()
}

impl Filters {
    /// Compiles a policy's filters.
    ///
    /// # Errors
    /// As [`Rules::new`] and [`Rules::compile`].
    pub fn new(policy: &Seccomp) -> Result<Self, FilterError> {
        let compile = |growing| {
            let program = Rules::new(policy, growing)?.compile()?;
            let sha256 = sha256(&program);
            Ok(Filter { program: program.into(), sha256 })
        };
        let kill = policy.kill.iter().filter_map(|name| names::number(name)).collect();
        Ok(Filters { private_scratch: compile(false)?, host_scratch: compile(true)?, kill })
    }
}

/// Instructions as the kernel has them in memory.
fn bytes(program: &[u64]) -> Vec<u8> {
    program.iter().flat_map(|instruction| instruction.to_le_bytes()).collect()
}

/// Instructions in one piece: to read these hundreds of numbers one by one is a sixth of all
/// that the launcher computes for a plan.
mod packed {
    use std::{fmt, sync::Arc};

    use serde::{
        Deserializer, Serializer,
        de::{Error, Visitor},
    };

    pub(super) fn serialize<S: Serializer>(program: &[u64], to: S) -> Result<S::Ok, S::Error> {
        to.serialize_bytes(&super::bytes(program))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Arc<[u64]>, D::Error> {
        struct Instructions;
        impl Visitor<'_> for Instructions {
            type Value = Arc<[u64]>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("instructions of eight bytes each")
            }

            fn visit_bytes<E: Error>(self, bytes: &[u8]) -> Result<Self::Value, E> {
                match bytes.as_chunks() {
                    (whole, []) => Ok(whole.iter().map(|bytes| u64::from_le_bytes(*bytes)).collect()),
                    _ => Err(E::invalid_length(bytes.len(), &self)),
                }
            }
        }
        from.deserialize_bytes(Instructions)
    }
}

fn sha256(program: &[u64]) -> String {
    use sha2::Digest;
    stockade_protocol::text::hex(&sha2::Sha256::digest(bytes(program)))
}
