//! What the two processes give up that read the bytes of a layer, before they read the first.
//!
//! The decompressor can read stdin, write stdout and use memory. The unpacker can besides make and
//! remove directories, files, links and whiteouts in the one tree that it unpacks, and read the trees
//! of the layers below; Landlock holds it to these, and without Landlock it does not start. Landlock does
//! not cover times: code that takes the unpacker over can change those of the owner's files in the layers
//! below too, which no tree's digest covers. Nor does it cover extended attributes, of which some are access
//! lists and so modes: neither process has a call that sets one (`opaque.rs`). Neither has a capability, a
//! network, or another program to start. Those of root stay uid 0, which owns the store, and have no right but
//! those of an owner.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::{io::Errno, process::Pid};
use stockade_sys::{
    landlock::access,
    lockdown::{
        ArgumentCheck, COMMON_CALLS, CallRule, FileRule, IS_OPEN, Limit, Lockdown, LockdownError, NOT_EXECUTABLE, Resource, any, numbers::*,
    },
};

use crate::error::ImportError;

/// Seconds of CPU time that all processes of one import may use.
pub const CPU_SECONDS: u64 = 1800;

const fn limits(cpu_seconds: u64) -> [Limit; 6] {
    [
        Resource::Stack.at_most(8 << 20),
        Resource::Core.at_most(0),
        Resource::AddressSpace.at_most(512 << 20),
        Resource::Cpu.at_most(cpu_seconds),
        Resource::Processes.at_most(0),
        Resource::Descriptors.at_most(1024),
    ]
}

/// A whiteout, and no other device.
const WHITEOUT: &[ArgumentCheck] = &[
    ArgumentCheck::OneOf { argument: 2, ignored: 0o777, values: &[S_IFCHR] },
    ArgumentCheck::OneOf { argument: 3, ignored: 0, values: &[0] },
];
/// Of an open file, by no path: Landlock does not forbid this call.
const NO_PATH: &[ArgumentCheck] = &[ArgumentCheck::Null { argument: 1 }];

const OF_BOTH: [CallRule; 4] =
    [any(__NR_rt_sigaction), any(__NR_rt_sigprocmask), IS_OPEN, CallRule { number: __NR_mprotect, checks: NOT_EXECUTABLE }];

const UNPACKING: [CallRule; 13] = [
    any(__NR_openat2),
    any(__NR_mkdirat),
    any(__NR_symlinkat),
    any(__NR_linkat),
    any(__NR_unlinkat),
    any(__NR_readlinkat),
    any(__NR_fstat),
    any(__NR_newfstatat),
    any(__NR_getdents64),
    any(__NR_lseek),
    any(__NR_fgetxattr),
    CallRule { number: __NR_mknodat, checks: WHITEOUT },
    CallRule { number: __NR_utimensat, checks: NO_PATH },
];

const TREE_RIGHTS: u64 = access::READ
    | access::WRITE_FILE
    | access::TRUNCATE
    | access::REMOVE_DIR
    | access::REMOVE_FILE
    | access::MAKE_CHAR
    | access::MAKE_DIR
    | access::MAKE_REG
    | access::MAKE_SYM
    | access::REFER;

/// Confines this process as a decompressor, child of `parent`, with so much CPU time.
///
/// # Errors
/// The kernel refuses a step.
pub fn decompressor(parent: Pid, cpu_seconds: u64) -> Result<(), LockdownError> {
    let lockdown = Lockdown {
        standard_kept: 3,
        descriptors: &[],
        limits: &limits(cpu_seconds),
        run_as: None,
        child_of: Some(parent),
        files: &[],
        calls: &[&COMMON_CALLS, &OF_BOTH],
    };
    lockdown.begin()?;
    lockdown.finish()
}

/// Confines this process as an unpacker, child of `parent`, with so much CPU time, that has its tree and the
/// store open. `below` opens the trees that it may read, which close again here.
///
/// # Errors
/// The kernel refuses a step or has no Landlock, or a layer below is missing.
pub fn unpacker(
    parent: Pid,
    cpu_seconds: u64,
    store: BorrowedFd<'_>,
    tree: BorrowedFd<'_>,
    below: impl FnOnce() -> Result<Vec<OwnedFd>, Errno>,
) -> Result<(), ImportError> {
    let kept = [store, tree];
    let lockdown = Lockdown {
        standard_kept: 3,
        descriptors: &kept,
        limits: &limits(cpu_seconds),
        run_as: None,
        child_of: Some(parent),
        files: &[],
        calls: &[&COMMON_CALLS, &OF_BOTH, &UNPACKING],
    };
    lockdown.begin().map_err(ImportError::Confine)?;
    // After the first half, which closes all that it does not keep.
    let below = below().map_err(ImportError::Below)?;
    let mut files = vec![FileRule { directory: tree, rights: TREE_RIGHTS }];
    files.extend(below.iter().map(|directory| FileRule { directory: directory.as_fd(), rights: access::READ }));
    Lockdown { files: &files, ..lockdown }.finish().map_err(ImportError::Confine)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::exit, reason = "a test may panic, and a confined process can only exit")]

    use std::{
        env,
        os::unix::process::ExitStatusExt,
        process::{Command, ExitStatus, Stdio, exit},
    };

    use rustix::fs::{Mode, OFlags, XattrFlags, fgetxattr, fsetxattr, open};

    use super::*;

    const ACT: &str = "STOCKADE_TEST_OF_AN_UNPACKER";

    fn act(act: &str) {
        let directory = open(env::temp_dir(), OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty()).unwrap();
        if act.starts_with("confined") {
            let parent = rustix::process::getppid().unwrap();
            unpacker(parent, 10, directory.as_fd(), directory.as_fd(), || Ok(Vec::new())).unwrap();
        }
        // Whatever they answer; no file system has this name.
        let _answer = match act.ends_with("set") {
            true => fsetxattr(&directory, "stockade.none", b"x", XattrFlags::empty()),
            false => fgetxattr(&directory, "stockade.none", &mut [0; 1]).map(drop),
        };
        exit(0);
    }

    #[test]
    fn an_unpacker_that_sets_an_extended_attribute_ends() {
        const SIGSYS: i32 = 31;
        if let Ok(which) = env::var(ACT) {
            act(&which);
        }
        let ended = |act: &str| -> ExitStatus {
            let name = "confine::tests::an_unpacker_that_sets_an_extended_attribute_ends";
            let mut command = Command::new(env::current_exe().unwrap());
            command.args(["--exact", name]).env(ACT, act).stdout(Stdio::null()).status().unwrap()
        };
        assert_eq!(ended("confined set").signal(), Some(SIGSYS));
        assert!(ended("confined get").success(), "the control: it is the call");
        assert!(ended("set").success(), "the control: it is the filter");
    }
}
