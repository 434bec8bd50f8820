//! What an attack is: what is tried, what must stop it, and what shows that it was tried.

use std::collections::BTreeMap;

use serde::Serialize;
use stockade_protocol::{LimitKey, probe::Script};

use crate::{inside::Done, world::World};

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

/// An answer of the kernel that is stated beforehand.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Expected {
    /// One of these errnos.
    Errno(&'static [i32]),
    /// Exactly this result.
    Value(i64),
}

/// What a control must come to.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Wanted {
    /// It succeeds.
    Succeeds,
    /// It finds something.
    Finds,
    /// The kernel's own opinion: neither what a filter answers nor that there is no such call.
    Reaches,
    /// The same, but that the kernel dies of it, or knows no such thing, means it is not there.
    Exists,
}

/// Where a control is tried, when it is tried outside.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Place {
    /// As whoever launches, with nothing taken away.
    Host,
    /// As root of throw-away namespaces, so that nothing of the host can be changed.
    Own,
}

/// What shows that an attack that failed could have succeeded.
pub(crate) enum Control {
    /// The same script outside.
    Outside(Place, Wanted),
    /// Another script outside, which differs in what the sandbox has at another place.
    OutsideInstead(Place, Script, Wanted),
    /// In the same sandbox, this script, which differs in one thing.
    Instead(Script, Wanted),
}

impl Control {
    /// What it must come to.
    pub(crate) fn wanted(&self) -> Wanted {
        match self {
            Control::Outside(_, wanted) | Control::OutsideInstead(_, _, wanted) | Control::Instead(_, wanted) => *wanted,
        }
    }
}

/// Limits of a run.
pub(crate) type Limits = BTreeMap<LimitKey, Option<u64>>;

/// Who says what a run of its own came to: nothing, or what got through.
pub(crate) type Judge = fn(&Done, &World) -> Seen;

/// What was seen of a run of its own.
pub(crate) struct Seen {
    /// It held.
    pub(crate) held: bool,
    /// In words.
    pub(crate) what: String,
}

/// An attack that has a run of its own, since it ends it or is seen from outside.
pub(crate) struct Run {
    /// What runs.
    pub(crate) script: Script,
    /// In the program's first process, whose end is the run's, and not in a child of it.
    pub(crate) first_process: bool,
    /// With which limits.
    pub(crate) limits: Limits,
    /// In the host directory of the world, in place of a private scratch.
    pub(crate) host_scratch: bool,
    /// Which files are asked for.
    pub(crate) collect: &'static [&'static str],
    /// What must come of it, in words.
    pub(crate) expected: String,
    /// Whether it has.
    pub(crate) judge: Judge,
}

/// What shows that a run's attack could have succeeded.
pub(crate) enum RunControl {
    /// With these limits the script ends by itself, and with success.
    Limits(Limits),
    /// The same outside.
    Outside(Place, Script, Wanted),
    /// Another run, of which this must be true.
    Run(Box<Run>),
}

/// How it is tried.
pub(crate) enum Act {
    /// Among others in one sandbox.
    Script { script: Script, expected: Expected, control: Control },
    /// In a sandbox of its own.
    Run { run: Run, control: RunControl },
    /// Not at all: the policy allows it, by this rule.
    Allowed(String),
    /// A call for which the policy kills: in a sandbox of its own.
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
    /// In a sandbox with the world's host scratch.
    pub(crate) in_host_scratch: bool,
    /// The same, and beside another run in that scratch.
    pub(crate) beside_another: bool,
    /// The name by which the filter reports it. Where the kernel refuses it to everybody but
    /// the host's root, only that report tells the two refusals apart.
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
            beside_another: false,
            reported_as: None,
        }
    }

    /// The same in a sandbox with the world's host scratch.
    pub(crate) fn in_host_scratch(self) -> Self {
        Attack { in_host_scratch: true, ..self }
    }

    /// The same beside another run.
    pub(crate) fn beside_another(self) -> Self {
        Attack { in_host_scratch: true, beside_another: true, ..self }
    }

    /// It cannot be tried without a host scratch.
    pub(crate) fn needs_scratch(&self) -> bool {
        self.in_host_scratch || matches!(&self.act, Act::Run { run, .. } if run.host_scratch)
    }

    /// An attack that has a run of its own.
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
            beside_another: false,
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
            beside_another: false,
            reported_as: None,
        }
    }
}
