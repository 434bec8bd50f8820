//! The host side of one sandbox: from a plan to an outcome.
//!
//! [`spawn`] starts the sandbox's init process, [`InitProcess::setup`] puts every layer of a
//! plan in place, up to the executor that waits behind them, and [`WaitingSandbox::run`] gives it
//! its job and watches the run; dropping the [`Teardown`] removes what then still stands. It has
//! no options of its own and never goes on without a layer that the plan lists. It does not
//! decide what is permitted (that is the plan) and does not word results (that is `engine`).
#![deny(unsafe_code)]

mod capture;
mod cgroup;
mod child_data;
mod client;
mod collect;
mod egress;
mod error;
pub mod files;
mod hold;
pub mod host_socket;
mod identity;
mod init;
mod layers;
mod messages;
mod modules;
pub mod nonblocking;
mod notify;
mod proc;
mod processes;
mod receipt;
pub mod registry;
mod relay;
pub mod resolve;
mod sandbox;
pub mod scratch;
mod sequence;
mod setup;
pub mod signals;
mod sock_diag;
mod supervise;
mod teardown;
pub mod terminal;
mod tree;
mod utf8;
mod verdict;
pub mod volumes;

use std::{borrow::Cow, collections::BTreeMap, path::PathBuf, sync::Arc};

use rustix::fd::OwnedFd;
use stockade_protocol::{CollectedFile, EgressReport, LimitKey, PerStream, Receipt, Usage, Verdict, modules::Modules};

pub use capture::Captured;
pub use cgroup::leave_for_child;
pub use client::{Asked, Client, SocketClient};
pub use error::{
    CONTAINER, CgroupError, ErrorKind, ExecutorError, InputsError, LaunchError, OUTPUT_UNWRITABLE, ReceiptError, RegistryError, StepFailure,
};
pub use identity::{IdmapError, user_namespace_refusal};
pub use init::{InitProcess, spawn};
pub use notify::RefusedCall;
pub use proc::read_to_string;
pub use scratch::OpenedScratch;
pub use setup::WaitingSandbox;
pub use sock_diag::probe as probe_sock_diag;
pub use stockade_egress::probe as probe_egress;
pub use teardown::Teardown;
pub use verdict::{KERNEL_MEMORY_UNCOUNTED, SCRATCH_UNCOUNTED};

/// The program and its version, as receipts and records name it.
pub const PROGRAM: &str = concat!("stockade ", env!("CARGO_PKG_VERSION"));

/// Whether this build for tests leaves a layer out.
#[cfg(feature = "ablation")]
pub fn is_left_out(layer: stockade_protocol::layer::Layer) -> bool {
    !layers::Layers::in_this_build().has(layer)
}

/// What a run needs beside its plan: contents and opened descriptors.
pub struct Inputs<'a> {
    /// The code; empty for a command.
    pub program: Cow<'a, [u8]>,
    /// The program, where the plan says that Stockade carries it.
    pub carried_program: Option<&'static [u8]>,
    /// The memory image that the program's process writes or comes from.
    pub memory: Option<Memory>,
    /// Files to write, by path below scratch.
    pub files: Vec<(String, Cow<'a, [u8]>)>,
    /// The payload's stdin.
    pub stdin: Stdin<'a>,
    /// The host scratch, opened as the caller; none: a private one.
    pub scratch: Option<OpenedScratch>,
    /// The host directories that a view has writable, opened likewise, in the plan's order.
    pub writable_trees: Vec<OpenedScratch>,
    /// The sockets of the host that a view shows, likewise.
    pub sockets: Vec<host_socket::OpenedSocket>,
    /// Mount points on the host, which end with the run.
    pub mount_points: Vec<scratch::MountPoint>,
    /// What the session keeps, for this run.
    pub kept: Option<volumes::VolumeCopies>,
    /// Read-only directories that were opened with the caller's rights, by source path.
    pub opened_binds: BTreeMap<PathBuf, OwnedFd>,
    /// Locks of files that the sandbox shows, held until nothing of it is left.
    pub held: Vec<std::fs::File>,
    /// What happens to the payload's output.
    pub streams: Streams,
    /// Globs of files to return.
    pub collect: Vec<String>,
    /// This run's place in the registry.
    pub record: Option<registry::Record>,
    /// What tells that a signal means this run; none: no signal of `kill` does.
    pub cancel_word: Option<signals::CancelWord>,
    /// Who waits for the result and may cancel the run.
    pub client: Option<&'a mut dyn Client>,
    /// Pidfds: the run ends when the first of their processes does. None: it outlives its caller.
    pub callers: &'a [OwnedFd],
    /// The program's interpreter is started before the request for it comes.
    pub prestart: bool,
    /// Done while the sandbox sets itself up, when the launcher would only wait for it.
    pub meanwhile: Option<Box<dyn FnOnce() + 'a>>,
    /// Done once the program runs, unless it has ended by then. While this goes on, nothing watches
    /// the run.
    pub beside: Option<Box<dyn FnOnce() + 'a>>,
}

/// The file of a memory image (`stockade_protocol::memory_image`), and what a run does with it.
#[derive(Clone, Debug)]
pub enum Memory {
    /// The program gets the empty file, to write its own memory to it.
    ToWrite(Arc<OwnedFd>),
    /// The program's process is a copy that the restorer makes from the sealed file.
    ToRestore(Arc<OwnedFd>),
}

impl Memory {
    /// The file.
    pub fn file(&self) -> &OwnedFd {
        match self {
            Memory::ToWrite(file) | Memory::ToRestore(file) => file,
        }
    }

    /// Whether the program's process is a copy.
    pub fn is_restored(&self) -> bool {
        matches!(self, Memory::ToRestore(_))
    }
}

/// The payload's stdin.
pub enum Stdin<'a> {
    /// `/dev/null`.
    Null,
    /// These bytes, through a pipe.
    Bytes(Cow<'a, [u8]>),
    /// The launcher's own stdin, relayed.
    Relay,
}

/// What happens to the payload's output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Streams {
    /// It is kept, head and tail, for the result.
    Capture,
    /// It goes to the launcher's own stdout and stderr, and signals to the payload.
    Relay(Relay),
}

/// How streams and signals are passed on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Relay {
    /// Some of what it says of its errors is kept too, for the result's hints.
    pub keep_errors: bool,
    /// What is not UTF-8 becomes U+FFFD, but on a terminal.
    pub as_text: bool,
}

/// What came of a run.
#[derive(Debug)]
pub struct Outcome {
    /// The one cause of the end.
    pub verdict: Verdict,
    /// Stable identifier of the detail.
    pub reason: Option<&'static str>,
    /// Exit status as the contract counts it.
    pub code: i32,
    /// The signal that ended the payload.
    pub signal: Option<i32>,
    /// Whether the payload may have run: the executor had sent Ready and was told to go.
    pub started: bool,
    /// What went wrong, where the verdict is a sandbox error.
    pub message: Option<String>,
    /// From the payload's start to the end.
    pub duration_ms: u64,
    /// The limit that ended the run.
    pub limit: Option<LimitKey>,
    /// Limits touched without ending the run.
    pub limits_hit: Vec<&'static str>,
    /// Peaks.
    pub usage: Usage,
    /// Refused system calls.
    pub denials: Vec<RefusedCall>,
    /// Refusals that `denials` has no room for.
    pub denials_omitted: u64,
    /// Both streams, where they were captured; relayed ones as far as they were kept, on a
    /// terminal both in the first.
    pub output: Captured,
    /// See `output`.
    pub error: Captured,
    /// Bytes that each stream carried.
    pub bytes: PerStream<u64>,
    /// Connections out, allowed and refused.
    pub egress: EgressReport,
    /// What watched interpreters said; none where the plan watches none.
    pub modules: Option<Modules>,
    /// Collected files.
    pub files: Vec<CollectedFile>,
    /// What was in force.
    pub receipt: Option<Receipt>,
}
