//! What an attack is: what it tries, what must stop it, and the control that shows that it
//! was really tried. Nothing here runs one.

use std::collections::BTreeMap;

use serde::Serialize;
use stockade_protocol::{LimitKey, probe::Script};

use crate::{fixture::Fixture, inside::ProbeRun};

/// The classes of attacks, in the order of the report.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Class {
    /// Files of the host, and of the sandbox itself.
    FileSystem,
    /// Other processes.
    Processes,
    /// More rights.
    Privileges,
    /// System calls by number.
    SystemCalls,
    /// Arguments, flags and other doors into the kernel.
    KernelSurface,
    /// The network.
    Network,
    /// More than its share.
    Resources,
    /// A false result.
    ResultForgery,
    /// From one run to the next.
    CrossRunLeaks,
    /// The launcher and what bounds it.
    Launcher,
}

impl Class {
    /// All of them.
    pub const ALL: [Class; 10] = [
        Class::FileSystem,
        Class::Processes,
        Class::Privileges,
        Class::SystemCalls,
        Class::KernelSurface,
        Class::Network,
        Class::Resources,
        Class::ResultForgery,
        Class::CrossRunLeaks,
        Class::Launcher,
    ];

    /// What a person reads.
    pub const fn title(self) -> &'static str {
        match self {
            Class::FileSystem => "file system",
            Class::Processes => "processes",
            Class::Privileges => "privileges",
            Class::SystemCalls => "system calls by number",
            Class::KernelSurface => "kernel surface",
            Class::Network => "network",
            Class::Resources => "resources",
            Class::ResultForgery => "result forgery",
            Class::CrossRunLeaks => "cross-run leaks",
            Class::Launcher => "launcher",
        }
    }
}

/// The kernel's answer that an attack states beforehand.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Expected {
    /// One of these errnos.
    Errno(&'static [i32]),
    /// Exactly this result.
    Value(i64),
}

/// What a control must do.
#[derive(Clone, Copy, Debug)]
pub(crate) enum ControlExpectation {
    /// It succeeds.
    Succeeds,
    /// It succeeds with a result above 0.
    Finds,
    /// The kernel itself answers: not a seccomp filter, and not ENOSYS.
    Reaches,
    /// As `Reaches`; ENOSYS or SIGSEGV means that this kernel lacks the interface.
    Exists,
}

/// Where a control outside the sandbox is tried.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum ControlHost {
    /// As the launching user, with nothing taken away.
    Host,
    /// As root of throw-away namespaces, so that nothing on the host changes.
    OwnNamespaces,
}

/// What shows that an attack that failed could have succeeded.
pub(crate) enum Control {
    /// The same script outside.
    Outside(ControlHost, ControlExpectation),
    /// Another script outside, which differs in what the sandbox has at another place.
    OutsideInstead(ControlHost, Script, ControlExpectation),
    /// The same script in a sandbox of the same policy, of whose scratch all may be written.
    Writable(ControlExpectation),
    /// In the same sandbox, this script, which differs in one thing.
    Instead(Script, ControlExpectation),
}

impl Control {
    /// What it must do.
    pub(crate) fn wanted(&self) -> ControlExpectation {
        match self {
            Control::Outside(_, wanted)
            | Control::OutsideInstead(_, _, wanted)
            | Control::Writable(wanted)
            | Control::Instead(_, wanted) => *wanted,
        }
    }
}

/// Limits of a run.
pub(crate) type Limits = BTreeMap<LimitKey, Option<u64>>;

/// Decides from a run's result whether the attack was stopped.
pub(crate) type Judge = fn(&ProbeRun, &Fixture) -> Observation;

/// What a run's result shows.
pub(crate) struct Observation {
    /// The attack was stopped.
    pub(crate) held: bool,
    /// In words.
    pub(crate) what: String,
}

/// An attack with its own sandbox, because it ends the run or is observed from outside.
pub(crate) struct Run {
    /// What runs.
    pub(crate) script: Script,
    /// In the program's first process, whose end is the run's, and not in a child of it.
    pub(crate) first_process: bool,
    /// With which limits.
    pub(crate) limits: Limits,
    /// In the fixture's host scratch instead of a private one.
    pub(crate) host_scratch: bool,
    /// Which files are asked for.
    pub(crate) collect: &'static [&'static str],
    /// The expected result, in words.
    pub(crate) expected: String,
    /// Decides whether the result is the expected one.
    pub(crate) judge: Judge,
}

/// What shows that a run's attack could have succeeded.
pub(crate) enum RunControl {
    /// With these limits the script ends by itself, and with success.
    Limits(Limits),
    /// The same outside.
    Outside(ControlHost, Script, ControlExpectation),
    /// Another run, of which this must be true.
    Run(Box<Run>),
}

/// How it is tried.
pub(crate) enum Act {
    /// Among others in one sandbox.
    Script { script: Script, expected: Expected, control: Control },
    /// In its own sandbox.
    Run { run: Run, control: RunControl },
    /// Not at all: the policy allows it, by this rule.
    Allowed(String),
    /// A call for which the policy kills: in its own sandbox.
    Kill { script: Script, name: String },
}

/// One attack.
pub(crate) struct Attack {
    /// Its class.
    pub(crate) class: Class,
    /// A short name.
    pub(crate) name: String,
    /// What is tried, in a sentence.
    pub(crate) tried: String,
    /// The layers that stop it.
    pub(crate) layers: &'static [&'static str],
    /// How.
    pub(crate) act: Act,
    /// In a sandbox with the fixture's host scratch.
    pub(crate) in_host_scratch: bool,
    /// The same, while another run uses that scratch.
    pub(crate) concurrent: bool,
    /// The name by which the filter reports it. Where the kernel refuses it to everybody but
    /// the host's root, only that report distinguishes the two refusals.
    pub(crate) reported_as: Option<String>,
}

impl Attack {
    /// An attack by script.
    pub(crate) fn new(
        class: Class,
        name: impl Into<String>,
        tried: impl Into<String>,
        layers: &'static [&'static str],
        script: Script,
        expected: Expected,
        control: Control,
    ) -> Self {
        Attack {
            class,
            name: name.into(),
            tried: tried.into(),
            layers,
            act: Act::Script { script, expected, control },
            in_host_scratch: false,
            concurrent: false,
            reported_as: None,
        }
    }

    /// The same in a sandbox with the fixture's host scratch.
    pub(crate) fn in_host_scratch(self) -> Self {
        Attack { in_host_scratch: true, ..self }
    }

    /// The same while another run uses that scratch.
    pub(crate) fn concurrent(self) -> Self {
        Attack { in_host_scratch: true, concurrent: true, ..self }
    }

    /// It cannot be tried without a host scratch.
    pub(crate) fn needs_scratch(&self) -> bool {
        self.in_host_scratch || matches!(&self.act, Act::Run { run, .. } if run.host_scratch)
    }

    /// An attack with its own sandbox.
    pub(crate) fn run(
        class: Class,
        name: impl Into<String>,
        tried: impl Into<String>,
        layers: &'static [&'static str],
        run: Run,
        control: RunControl,
    ) -> Self {
        Attack {
            class,
            name: name.into(),
            tried: tried.into(),
            layers,
            act: Act::Run { run, control },
            in_host_scratch: false,
            concurrent: false,
            reported_as: None,
        }
    }

    /// What the policy allows.
    pub(crate) fn allowed(class: Class, name: impl Into<String>, tried: impl Into<String>, rule: impl Into<String>) -> Self {
        Attack {
            class,
            name: name.into(),
            tried: tried.into(),
            layers: &[],
            act: Act::Allowed(rule.into()),
            in_host_scratch: false,
            concurrent: false,
            reported_as: None,
        }
    }
}
