//! The identity of each privileged step, and with it of each failure.
//!
//! The same name stands in the error, the plan and the tests. A number is never
//! reused: it crosses the pipe between launcher and sandbox.

macro_rules! steps {
    ($($(#[$doc:meta])* $variant:ident = $number:literal $name:literal;)*) => {
        /// One step between the clone and the program's first instruction.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(u16)]
        pub enum Step { $($(#[$doc])* $variant = $number,)* }

        impl Step {
            /// Every step, in the order in which they are taken. Some are taken a second time
            /// later: ARCHITECTURE.md says which.
            pub const ALL: &[Step] = &[$(Step::$variant,)*];

            /// The name that errors and documents use.
            pub const fn name(self) -> &'static str {
                match self { $(Step::$variant => $name,)* }
            }

            /// The step with this number.
            pub fn from_number(number: u16) -> Option<Step> {
                match number { $($number => Some(Step::$variant),)* _ => None }
            }
        }
    };
}

steps! {
    /// The user and PID namespace, and a process in them.
    Clone = 1 "start the sandbox's first process";
    /// The mount, UTS and IPC namespaces.
    Namespaces = 44 "make the namespaces";
    /// The network namespace.
    NetworkNamespace = 42 "make the network namespace";
    /// The loopback interface.
    Loopback = 12 "bring up the loopback interface";
    /// A session of its own.
    Session = 9 "start a session";
    /// No turn before others.
    Scheduling = 50 "give up precedence over other processes";
    /// No mount event leaves or enters.
    PrivateMounts = 13 "make mounts private";
    /// Writing the uid and gid maps of the outer user namespace.
    Maps = 2 "write the user namespace's maps";
    /// Waiting for the launcher's word.
    AwaitLauncher = 3 "wait for the launcher";
    /// Clearing supplementary groups.
    Groups = 6 "clear supplementary groups";
    /// Taking on the mapped ids.
    Ids = 7 "take on the sandbox's ids";
    /// Dying with the launcher.
    DeathSignal = 8 "tie the sandbox's life to the launcher's";
    /// A keyring of its own.
    Keyring = 10 "join a new session keyring";
    /// The host name.
    Hostname = 11 "set the host name";
    /// The tmpfs that becomes the root.
    RootTmpfs = 14 "mount the root tmpfs";
    /// One entry of the root.
    RootEntry = 15 "build the root";
    /// The sockets of the egress gate.
    EgressSockets = 47 "make the egress gate's sockets";
    /// The executor's file.
    PlaceExecutor = 18 "place the executor";
    /// Waiting for the idmapped scratch.
    AwaitScratch = 49 "wait for scratch";
    /// Scratch.
    Scratch = 16 "mount scratch";
    /// A protected path below scratch.
    ScratchRule = 17 "protect a path in scratch";
    /// Entering the new root.
    PivotRoot = 19 "pivot into the new root";
    /// Letting go of the host's mounts.
    DetachOldRoot = 20 "detach the host's root";
    /// The root becomes read-only.
    SealRoot = 21 "seal the root";
    /// The terminal of the sandbox's own devpts.
    OpenTerminal = 43 "open a terminal";
    /// Counts of inotify objects and namespaces.
    NamespaceLimits = 22 "limit the user namespace's counts";
    /// The inner user namespace, which is entered as it is made.
    InnerUserNamespace = 23 "make the inner user namespace";
    /// The working directory.
    WorkingDirectory = 24 "enter the working directory";
    /// Core dumps.
    CoreLimit = 25 "forbid core dumps";
    /// Waiting for the cgroup.
    AwaitCgroup = 45 "wait for the cgroup";
    /// Entering the v1 cgroups.
    JoinCgroup = 4 "enter the cgroup";
    /// Hiding the cgroup path.
    CgroupNamespace = 5 "make the cgroup namespace";
    /// Capabilities.
    Capabilities = 26 "drop all capabilities";
    /// no_new_privs.
    NoNewPrivs = 27 "set no_new_privs";
    /// Landlock.
    Landlock = 28 "restrict with Landlock";
    /// As many CPUs as the plan says.
    Cpus = 46 "choose the sandbox's CPUs";
    /// The filter.
    Seccomp = 29 "load the system call filter";
    /// Handing descriptors to the launcher.
    HandOver = 30 "hand descriptors to the launcher";
    /// Placing the executor's descriptors.
    Descriptors = 31 "place the executor's descriptors";
    /// Starting the executor.
    ExecExecutor = 32 "start the executor";
    /// Reading the job.
    ReadJob = 33 "read the job";
    /// Writing a file of the request.
    WriteFile = 34 "write a file of the request";
    /// Writing the program.
    WriteProgram = 35 "write the program";
    /// Checking what is in force.
    Receipt = 36 "check what is in force";
    /// Starting the payload's process.
    Fork = 37 "start the program's process";
    /// The payload's terminal.
    Terminal = 39 "take the terminal";
    /// The payload's Landlock layer.
    PayloadLandlock = 40 "restrict the program with Landlock";
    /// The payload's resource limits.
    ResourceLimits = 38 "set resource limits";
    /// The payload's execve.
    ExecPayload = 41 "start the program";
    /// Waiting for the payload's end.
    WatchPayload = 48 "watch the program";
}

#[cfg(test)]
mod tests {
    use super::Step;

    #[test]
    fn every_step_is_found_by_its_number() {
        for &step in Step::ALL {
            assert_eq!(Step::from_number(step as u16), Some(step));
        }
    }
}
