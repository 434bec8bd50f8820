//! Giving up rights irrevocably: what a helper process does before it reads hostile bytes.
//!
//! Guarantees, in this order: the process ends with its parent, has only the descriptors that
//! are named, is held to its limits, has no capabilities, cannot gain any, hides its memory,
//! opens no file but below the directories that are named, and makes only the system calls that are
//! named. Any step that fails is an
//! error, after which the caller must end. It does not decide what to keep.

use linux_raw_sys::general::{RLIMIT_AS, RLIMIT_CORE, RLIMIT_CPU, RLIMIT_DATA, RLIMIT_MEMLOCK, RLIMIT_NOFILE, RLIMIT_NPROC, RLIMIT_STACK};
use rustix::{
    fd::BorrowedFd,
    fs::{Mode, OFlags, open},
    process::{DumpableBehavior, Pid, Signal, getegid, geteuid, getppid, set_dumpable_behavior, set_parent_process_death_signal, setpgid},
};

use crate::{
    Errno, Result, cred,
    descriptors::keep_only,
    landlock,
    process::{place_descriptor, rlimit, set_rlimit},
    seccomp::{
        Instruction, load_filter,
        program::{
            ALLOW, ARCHITECTURE, ARCHITECTURE_X86_64, KILL_PROCESS, NUMBER, and, answer, any_bit, equal, jump, load, load_argument,
            load_high_half,
        },
    },
};

/// System call numbers and flags, by name.
pub use linux_raw_sys::{general as numbers, net};

/// What a process keeps.
#[derive(Clone, Copy, Debug)]
pub struct Lockdown<'a> {
    /// Standard descriptors below this number stay; those from it up to 2 become /dev/null.
    pub standard_kept: i32,
    /// Further descriptors that stay open.
    pub descriptors: &'a [BorrowedFd<'a>],
    /// Resource limits.
    pub limits: &'a [Limit],
    /// The user and group to switch to, for a process that root started; it needs its
    /// capabilities until then.
    pub run_as: Option<(u32, u32)>,
    /// The expected parent. The process leaves the launcher's process group and fails with
    /// ESRCH where its parent is another process.
    pub child_of: Option<Pid>,
    /// What it may do to files; nothing where there is no rule. Needs Landlock where there is one.
    pub files: &'a [FileRule<'a>],
    /// The allowed system calls, in lists. The kernel kills the process for any other.
    pub calls: &'a [&'a [CallRule]],
}

/// Rights on and below a directory.
#[derive(Clone, Copy, Debug)]
pub struct FileRule<'a> {
    /// The directory. It need not stay open.
    pub directory: BorrowedFd<'a>,
    /// The rights, from [`landlock::access`]; those that this kernel does not know cannot be used.
    pub rights: u64,
}

/// One resource limit, of `getrlimit(2)`.
#[derive(Clone, Copy, Debug)]
pub struct Limit {
    /// The resource.
    pub resource: Resource,
    /// The new soft and hard limit, capped at the present hard limit.
    pub max: u64,
    /// EMFILE where the hard limit is lower than this.
    pub min: u64,
}

/// A limited resource.
#[derive(Clone, Copy, Debug)]
#[repr(u32)]
pub enum Resource {
    /// Seconds of CPU time.
    Cpu = RLIMIT_CPU,
    /// Bytes of heap and other private memory.
    Data = RLIMIT_DATA,
    /// Bytes of stack.
    Stack = RLIMIT_STACK,
    /// Bytes of a core dump.
    Core = RLIMIT_CORE,
    /// Processes of the user.
    Processes = RLIMIT_NPROC,
    /// Descriptors.
    Descriptors = RLIMIT_NOFILE,
    /// Bytes locked in memory.
    Locked = RLIMIT_MEMLOCK,
    /// Bytes of address space.
    AddressSpace = RLIMIT_AS,
}

impl Resource {
    /// A limit that keeps a lower hard limit.
    pub const fn at_most(self, max: u64) -> Limit {
        Limit { resource: self, max, min: 0 }
    }
}

/// A system call that is allowed where all its checks hold. It may have several rules.
#[derive(Clone, Copy, Debug)]
pub struct CallRule {
    /// Its number, from [`numbers`].
    pub number: u32,
    /// Conditions on its arguments.
    pub checks: &'static [ArgumentCheck],
}

/// A condition on an argument, on its low half where nothing else is said.
#[derive(Clone, Copy, Debug)]
pub enum ArgumentCheck {
    /// With the ignored bits cleared it is one of the values.
    OneOf {
        /// Its index, from 0.
        argument: u32,
        /// The ignored bits.
        ignored: u32,
        /// The values.
        values: &'static [u32],
    },
    /// It has none of these bits.
    Without {
        /// Its index, from 0.
        argument: u32,
        /// The bits.
        bits: u32,
    },
    /// It is a null pointer: both halves are 0.
    Null {
        /// Its index, from 0.
        argument: u32,
    },
}

/// A system call with any arguments.
pub const fn any(number: u32) -> CallRule {
    CallRule { number, checks: &[] }
}

/// Of memory that is to be mapped or changed: it is not code.
pub const NOT_EXECUTABLE: &[ArgumentCheck] = &[ArgumentCheck::Without { argument: 2, bits: numbers::PROT_EXEC }];

/// By this a build with debug assertions looks whether what it closes is open.
pub const IS_OPEN: CallRule =
    CallRule { number: numbers::__NR_fcntl, checks: &[ArgumentCheck::OneOf { argument: 1, ignored: 0, values: &[numbers::F_GETFD] }] };

/// What every program in Rust needs to read and write what it has open, to use memory, and to end.
pub const COMMON_CALLS: [CallRule; 14] = [
    any(numbers::__NR_read),
    any(numbers::__NR_write),
    any(numbers::__NR_close),
    any(numbers::__NR_munmap),
    any(numbers::__NR_brk),
    any(numbers::__NR_mremap),
    any(numbers::__NR_madvise),
    any(numbers::__NR_futex),
    any(numbers::__NR_getrandom),
    any(numbers::__NR_rt_sigreturn),
    any(numbers::__NR_sigaltstack),
    any(numbers::__NR_exit),
    any(numbers::__NR_exit_group),
    CallRule { number: numbers::__NR_mmap, checks: NOT_EXECUTABLE },
];

/// A step of the lockdown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LockdownStep {
    /// Ending with the parent.
    EndWithParent,
    /// Closing descriptors.
    CloseDescriptors,
    /// Setting resource limits.
    LimitResources,
    /// Changing the user and group.
    ChangeUser,
    /// Giving up capabilities.
    DropCapabilities,
    /// Making the memory unreadable for other processes.
    HideMemory,
    /// Restricting what it may do to files, with Landlock.
    RestrictFiles,
    /// Loading the system call filter.
    LoadFilter,
}

impl LockdownStep {
    /// In the order of their numbers.
    pub const ALL: [LockdownStep; 8] = [
        LockdownStep::EndWithParent,
        LockdownStep::CloseDescriptors,
        LockdownStep::LimitResources,
        LockdownStep::ChangeUser,
        LockdownStep::DropCapabilities,
        LockdownStep::HideMemory,
        LockdownStep::RestrictFiles,
        LockdownStep::LoadFilter,
    ];

    /// What could not be done, for "could not ...".
    pub fn name(self) -> &'static str {
        match self {
            LockdownStep::EndWithParent => "tie its life to the launcher's",
            LockdownStep::CloseDescriptors => "close the launcher's descriptors",
            LockdownStep::LimitResources => "limit its resources",
            LockdownStep::ChangeUser => "give up the launcher's user",
            LockdownStep::DropCapabilities => "give up capabilities",
            LockdownStep::HideMemory => "hide its memory",
            LockdownStep::RestrictFiles => "restrict its access to files",
            LockdownStep::LoadFilter => "load its system call filter",
        }
    }
}

/// A step that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LockdownError {
    /// The step.
    pub step: LockdownStep,
    /// The kernel's errno.
    pub errno: Errno,
}

fn at(step: LockdownStep) -> impl Fn(Errno) -> LockdownError {
    move |errno| LockdownError { step, errno }
}

impl Lockdown<'_> {
    /// The first half, after which files can still be opened.
    ///
    /// # Errors
    /// The kernel refuses a step.
    pub fn begin(&self) -> core::result::Result<(), LockdownError> {
        set_parent_process_death_signal(Some(Signal::KILL)).map_err(at(LockdownStep::EndWithParent))?;
        self.close_descriptors().map_err(at(LockdownStep::CloseDescriptors))?;
        limit_resources(self.limits).map_err(at(LockdownStep::LimitResources))
    }

    /// The second half, after which it reads hostile bytes.
    ///
    /// # Errors
    /// The kernel refuses a step.
    pub fn finish(&self) -> core::result::Result<(), LockdownError> {
        if let Some((uid, gid)) = self.run_as {
            // Both need the capabilities that the change of user takes away.
            cred::lock_securebits().and_then(|()| cred::drop_bounding_set()).map_err(at(LockdownStep::DropCapabilities))?;
            change_user(uid, gid).map_err(at(LockdownStep::ChangeUser))?;
        }
        cred::drop_all_sets().and_then(|()| rustix::thread::set_no_new_privs(true)).map_err(at(LockdownStep::DropCapabilities))?;
        set_dumpable_behavior(DumpableBehavior::NotDumpable).map_err(at(LockdownStep::HideMemory))?;
        self.end_with_parent().map_err(at(LockdownStep::EndWithParent))?;
        self.restrict_files().map_err(at(LockdownStep::RestrictFiles))?;
        Filter::new(self.calls).and_then(|filter| load_filter(filter.instructions())).map_err(at(LockdownStep::LoadFilter))
    }

    /// What a copy of a process that is locked down gives up beyond that: it gets further limits and
    /// fewer system calls. A copy does not inherit the death signal, and gets that too.
    ///
    /// # Errors
    /// The kernel refuses a step.
    pub fn narrow(limits: &[Limit], calls: &[&[CallRule]]) -> core::result::Result<(), LockdownError> {
        set_parent_process_death_signal(Some(Signal::KILL)).map_err(at(LockdownStep::EndWithParent))?;
        limit_resources(limits).map_err(at(LockdownStep::LimitResources))?;
        Filter::new(calls).and_then(|filter| load_filter(filter.instructions())).map_err(at(LockdownStep::LoadFilter))
    }

    /// Replaces standard descriptors by /dev/null: a later socket must not get number 2, where
    /// a panic message would be written to it.
    fn close_descriptors(&self) -> Result<()> {
        let null = open(c"/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
        for number in self.standard_kept..3 {
            place_descriptor(&null, number)?;
        }
        drop(null);
        keep_only(3, self.descriptors)
    }

    /// Without Landlock a filter that allows no file to be opened suffices; one that does, does not.
    fn restrict_files(&self) -> Result<()> {
        let abi = landlock::abi();
        if abi == 0 {
            return if self.files.is_empty() { Ok(()) } else { Err(Errno::OPNOTSUPP) };
        }
        let handled = landlock::access::handled(abi);
        let ruleset = landlock::create_ruleset(handled, landlock::scopes(abi))?;
        for rule in self.files {
            landlock::allow_beneath(&ruleset, rule.directory, rule.rights & handled)?;
        }
        landlock::restrict_self(ruleset)
    }

    /// Sets the death signal again, since a change of user clears it (prctl(2)).
    fn end_with_parent(&self) -> Result<()> {
        set_parent_process_death_signal(Some(Signal::KILL))?;
        if let Some(parent) = self.child_of {
            // Signals from the terminal are meant for the launcher. setsid would also create a
            // scheduling group (autogroup), which doubles the wait for a CPU on a busy host.
            setpgid(None, None)?;
            if getppid() != Some(parent) {
                return Err(Errno::SRCH);
            }
        }
        Ok(())
    }
}

fn limit_resources(limits: &[Limit]) -> Result<()> {
    for Limit { resource, max, min } in limits.iter().copied() {
        let (_, hard) = rlimit(resource as u32)?;
        if hard < min {
            return Err(Errno::MFILE);
        }
        set_rlimit(resource as u32, Some(max.min(hard)))?;
    }
    Ok(())
}

fn change_user(uid: u32, gid: u32) -> Result<()> {
    cred::set_groups(&[])?;
    cred::set_group(gid)?;
    cred::set_user(uid)?;
    // setresuid(-1) succeeds and changes nothing.
    if (geteuid().as_raw(), getegid().as_raw()) != (uid, gid) || uid == 0 {
        return Err(Errno::INVAL);
    }
    Ok(())
}

/// The program of a system call filter.
#[derive(Clone, Debug)]
pub struct Filter {
    code: [Instruction; Filter::MAX_LEN],
    length: usize,
}

impl Filter {
    const MAX_LEN: usize = 192;

    /// Allows the calls of these lists of rules, compared in order. Any other call kills the process.
    ///
    /// # Errors
    /// E2BIG for more rules than fit.
    pub fn new(rules: &[&[CallRule]]) -> Result<Self> {
        let mut filter = Filter { code: [answer(KILL_PROCESS); Filter::MAX_LEN], length: 0 };
        filter.push(&[load(ARCHITECTURE), equal(ARCHITECTURE_X86_64, 1, 0), answer(KILL_PROCESS), load(NUMBER)])?;
        for rule in rules.iter().copied().flatten() {
            let checks: u32 = rule.checks.iter().map(ArgumentCheck::length).sum();
            // After the checks come the instruction that allows the call and the one that loads
            // the call's number again for the next rule.
            let mut left = checks + 1;
            let reload = u32::from(checks > 0);
            filter.push(&[equal(rule.number, 0, u8::try_from(left + reload).map_err(|_| Errno::TOOBIG)?)])?;
            for check in rule.checks {
                left -= check.length();
                filter.push_check(check, left)?;
            }
            filter.push(&[answer(ALLOW)])?;
            if checks > 0 {
                filter.push(&[load(NUMBER)])?;
            }
        }
        filter.push(&[answer(KILL_PROCESS)])?;
        Ok(filter)
    }

    /// Its instructions.
    pub fn instructions(&self) -> &[Instruction] {
        &self.code[..self.length]
    }

    /// Continues after the check where it holds, else skips the rest of the rule.
    fn push_check(&mut self, check: &ArgumentCheck, rest: u32) -> Result<()> {
        match *check {
            ArgumentCheck::OneOf { argument, ignored, values } => {
                self.push(&[load_argument(argument), and(!ignored)])?;
                for (index, value) in values.iter().enumerate() {
                    self.push(&[equal(*value, u8::try_from(values.len() - index).map_err(|_| Errno::TOOBIG)?, 0)])?;
                }
            }
            ArgumentCheck::Without { argument, bits } => self.push(&[load_argument(argument), any_bit(bits, 0, 1)])?,
            ArgumentCheck::Null { argument } => {
                self.push(&[load_argument(argument), equal(0, 0, 2), load_high_half(argument), equal(0, 1, 0)])?;
            }
        }
        self.push(&[jump(rest)])
    }

    fn push(&mut self, more: &[Instruction]) -> Result<()> {
        let end = self.length + more.len();
        self.code.get_mut(self.length..end).ok_or(Errno::TOOBIG)?.copy_from_slice(more);
        self.length = end;
        Ok(())
    }
}

impl ArgumentCheck {
    /// Its number of instructions.
    fn length(&self) -> u32 {
        match self {
            ArgumentCheck::OneOf { values, .. } => 3 + values.len() as u32,
            ArgumentCheck::Without { .. } => 3,
            ArgumentCheck::Null { .. } => 5,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CALL: u32 = 280;

    /// Runs a filter with one rule as the kernel does, on a call of its number and its second argument.
    fn run(checks: &'static [ArgumentCheck], argument: u64) -> u32 {
        let Ok(filter) = Filter::new(&[&[CallRule { number: CALL, checks }]]) else { panic!("too long") };
        let (mut at, mut word) = (0, 0);
        loop {
            let [code, _, when_true, when_false, value @ ..] = filter.instructions()[at].0.to_le_bytes();
            let value = u32::from_le_bytes(value);
            let jump = |holds: bool| usize::from(if holds { when_true } else { when_false });
            at += 1 + match code {
                0x20 => {
                    word = match value {
                        NUMBER => CALL,
                        ARCHITECTURE => ARCHITECTURE_X86_64,
                        24 => argument as u32,
                        28 => (argument >> 32) as u32,
                        _ => 0,
                    };
                    0
                }
                0x54 => {
                    word &= value;
                    0
                }
                0x05 => value as usize,
                0x15 => jump(word == value),
                0x45 => jump(word & value != 0),
                _ => return value,
            };
        }
    }

    #[test]
    fn a_null_pointer_is_null_in_both_halves() {
        const NULL: &[ArgumentCheck] = &[ArgumentCheck::Null { argument: 1 }];
        const LOW_HALF: &[ArgumentCheck] = &[ArgumentCheck::OneOf { argument: 1, ignored: 0, values: &[0] }];
        assert_eq!(run(NULL, 0), ALLOW);
        for pointer in [1, 1 << 31, 1 << 32, 1 << 63, u64::MAX] {
            assert_eq!(run(NULL, pointer), KILL_PROCESS, "{pointer:x}");
        }
        assert_eq!((run(LOW_HALF, 1 << 32), run(LOW_HALF, 1)), (ALLOW, KILL_PROCESS), "the control");
    }
}
