//! The identity of each privileged step, and with it of each failure.
//!
//! The same name stands in errors, documents and tests. A number is never reused: it crosses
//! the pipe between launcher and sandbox. Where and why each step is taken is not said here:
//! ARCHITECTURE.md has a row for each.

macro_rules! steps {
    ($($variant:ident = $number:literal $name:literal;)*) => {
        /// One step between the clone and the program's first instruction.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(u16)]
        pub enum Step { $(#[doc = $name] $variant = $number,)* }

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
    Clone = 1 "start the sandbox's first process";
    Namespaces = 44 "make the namespaces";
    NetworkNamespace = 42 "make the network namespace";
    Loopback = 12 "bring up the loopback interface";
    Session = 9 "start a session";
    Scheduling = 50 "give up precedence over other processes";
    PrivateMounts = 13 "make mounts private";
    Maps = 2 "write the user namespace's maps";
    AwaitLauncher = 3 "wait for the launcher";
    Groups = 6 "clear supplementary groups";
    Ids = 7 "take on the sandbox's ids";
    DeathSignal = 8 "tie the sandbox's life to the launcher's";
    Keyring = 10 "join a new session keyring";
    Hostname = 11 "set the host name";
    RootTmpfs = 14 "mount the root tmpfs";
    RootEntry = 15 "build the root";
    EgressSockets = 47 "make the egress gate's sockets";
    PlaceExecutor = 18 "place the executor";
    AwaitScratch = 49 "wait for scratch";
    Scratch = 16 "mount scratch";
    ScratchRule = 17 "protect a path in scratch";
    ProgramFifo = 51 "make the program's fifo";
    PivotRoot = 19 "pivot into the new root";
    DetachOldRoot = 20 "detach the host's root";
    SealRoot = 21 "seal the root";
    OpenTerminal = 43 "open a terminal";
    NamespaceLimits = 22 "limit the user namespace's counts";
    InnerUserNamespace = 23 "make the inner user namespace";
    WorkingDirectory = 24 "enter the working directory";
    CoreLimit = 25 "forbid core dumps";
    AwaitCgroup = 45 "wait for the cgroup";
    JoinCgroup = 4 "enter the cgroup";
    CgroupNamespace = 5 "make the cgroup namespace";
    Capabilities = 26 "drop all capabilities";
    NoNewPrivs = 27 "set no_new_privs";
    Landlock = 28 "restrict with Landlock";
    Cpus = 46 "choose the sandbox's CPUs";
    Seccomp = 29 "load the system call filter";
    HandOver = 30 "hand descriptors to the launcher";
    Descriptors = 31 "place the executor's descriptors";
    ExecExecutor = 32 "start the executor";
    ReadJob = 33 "read the job";
    Prestart = 52 "stop the interpreter that waits for its program";
    WriteFile = 34 "write a file of the request";
    WriteProgram = 35 "write the program";
    Receipt = 36 "check what is in force";
    Fork = 37 "start the program's process";
    Terminal = 39 "take the terminal";
    PayloadLandlock = 40 "restrict the program with Landlock";
    ResourceLimits = 38 "set resource limits";
    CallersFilters = 54 "load the caller's filters";
    ExecPayload = 41 "start the program";
    PassProgram = 53 "let the interpreter open its program";
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
