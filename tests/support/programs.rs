//! Programs whose end is known before they run: a random mix of files, memory, children and
//! sleeps, and then one cause of the end.
//!
//! Nothing of the product is called here. What is expected follows from what the program does,
//! and from the documented meaning of `verdict` and `limits_hit`. Two programs are never made,
//! since no evidence can tell what they failed for: one that survives a refused fork, or keeps
//! a full file system or a file of the largest size, and then fails by itself for another
//! reason. Its verdict is the limit's, which `causes.rs` has as a row of its own.

use std::{collections::BTreeSet, fmt::Write};

/// Numbers from a seed (splitmix64).
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Random(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// One of these, each as likely as the others.
    fn pick<T: Copy>(&mut self, all: &[T]) -> T {
        let at = self.next() % all.len() as u64;
        all[usize::try_from(at).expect("an index")]
    }
}

/// The host that the programs are for.
#[derive(Clone, Copy, Debug)]
pub struct Host {
    /// Runs have a cgroup; without one rlimits refuse memory and processes, and count nothing.
    pub cgroup: bool,
    /// By how much waits are longer than on a developer's machine.
    pub slower: u32,
}

/// What ends a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    Exit,
    Signal,
    Memory,
    ChildMemory,
    ScratchFull,
    FilesFull,
    TmpFull,
    FileTooLarge,
    HostScratch,
    Processes,
    Cpu,
    Wall,
    Output,
    Call,
    Cancelled,
}

impl Ending {
    pub const ALL: [Ending; 15] = [
        Ending::Exit,
        Ending::Signal,
        Ending::Memory,
        Ending::ChildMemory,
        Ending::ScratchFull,
        Ending::FilesFull,
        Ending::TmpFull,
        Ending::FileTooLarge,
        Ending::HostScratch,
        Ending::Processes,
        Ending::Cpu,
        Ending::Wall,
        Ending::Output,
        Ending::Call,
        Ending::Cancelled,
    ];

    /// Whether the scratch is a host directory: what is too large for it ends the run.
    fn has_host_scratch(self) -> bool {
        matches!(self, Ending::HostScratch | Ending::Cancelled)
    }

    /// Whether the launcher ends the program, so that nothing else can be the cause.
    fn is_by_launcher(self, host: Host) -> bool {
        match self {
            Ending::Memory | Ending::ChildMemory => host.cgroup,
            Ending::HostScratch | Ending::Cpu | Ending::Wall | Ending::Output | Ending::Call | Ending::Cancelled => true,
            _ => false,
        }
    }
}

/// What a program does before, and survives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Before {
    Sleep,
    Files,
    Allocation,
    FailingChild,
    KilledChild,
    MissingFile,
    TooMuchPrinted,
    ScratchFull,
    FilesFull,
    TmpFull,
    ForkRefused,
    /// Not cleaned up.
    ScratchKeptFull,
    TmpKeptFull,
    LargestFileKept,
}

const HARMLESS: [Before; 7] = [
    Before::Sleep,
    Before::Files,
    Before::Allocation,
    Before::FailingChild,
    Before::KilledChild,
    Before::MissingFile,
    Before::TooMuchPrinted,
];

/// A program, its limits and its end.
pub struct KnownProgram {
    pub ending: Ending,
    pub code: String,
    /// Keys and values of the request's `limits`.
    pub limits: Vec<(&'static str, String)>,
    pub host_scratch: bool,
    /// The signal that the caller sends once there is a file `ready` in scratch.
    pub cancelled_by: Option<i32>,
    /// Lines that its stderr begins with: it came as far as its end.
    pub says: String,
    pub verdict: &'static str,
    pub status: i32,
    pub limits_hit: BTreeSet<&'static str>,
}

/// Sizes: below `file_size` each, so that a full file system holds no file of just that size.
const HEADER: &str = r#"import os, sys, time
def say(word): os.write(2, (word + "\n").encode())
def in_child(step):
    pid = os.fork()
    if pid == 0:
        try: step(); os._exit(0)
        finally: os._exit(9)
    if os.waitpid(pid, 0)[1] != 0: say("the child failed")
def grow(place):
    for number in range(99):
        with open(f"{place}/part{number}", "wb") as file: file.write(bytes(900 << 10))
def crowd(place):
    for number in range(999): open(f"{place}/entry{number}", "wb").close()
def refused(step, place, errno):
    try: step(place)
    except OSError as error:
        if error.errno == errno: return
        raise
    say("nothing was refused")
def clear(place):
    time.sleep(HOLD)
    for name in os.listdir(place):
        if name.startswith(("part", "entry")): os.remove(f"{place}/{name}")
def crowd_of_children():
    children = []
    try:
        for number in range(99):
            pid = os.fork()
            if pid == 0: time.sleep(600); os._exit(0)
            children.append(pid)
    finally:
        if CLEANS:
            for pid in children: os.kill(pid, 9); os.waitpid(pid, 0)
def burn():
    while True: pass
def hold():
    held = []
    while True: held.append(bytearray(1 << 20))
"#;

impl KnownProgram {
    /// Makes a program that ends so.
    pub fn new(random: &mut Random, ending: Ending, host: Host) -> Self {
        let mut program = KnownProgram {
            ending,
            code: String::new(),
            limits: vec![
                ("memory", String::from("96MiB")),
                ("scratch_size", String::from("4MiB")),
                ("scratch_files", String::from("60")),
                ("tmp_size", String::from("4MiB")),
                ("file_size", String::from("1MiB")),
                ("processes", String::from("16")),
                ("output_size", String::from("4KiB")),
            ],
            host_scratch: ending.has_host_scratch(),
            cancelled_by: None,
            says: String::new(),
            verdict: "",
            status: 0,
            limits_hit: BTreeSet::new(),
        };
        let exits_with = if ending == Ending::Exit { random.pick(&[0, 0, 0, 1, 2, 3, 77, 124, 125, 126, 137, 143, 153, 255]) } else { 1 };
        let befores = befores(random, ending, exits_with, host);
        let hold = f64::from(host.slower) * 0.25;
        let _written = writeln!(program.code, "HOLD = {hold}\nCLEANS = True\n{HEADER}");
        for (number, before) in befores.iter().enumerate() {
            // A child's own children would be left to pid 1.
            let in_child = *before != Before::ForkRefused && random.pick(&[true, false, false, false]);
            let (step, hit) = before.step(host);
            program.limits_hit.extend(hit);
            let call = if in_child { format!("in_child(step{number})") } else { format!("step{number}()") };
            let _written =
                write!(program.code, "def step{number}():\n    {}\n{call}\nsay('step {number}')\n", step.replace('\n', "\n    "));
            let _written = writeln!(program.says, "step {number}");
        }
        program.code.push_str("say('the end')\n");
        program.says.push_str("the end\n");
        program.end(random, exits_with, host);
        let waits = u32::try_from(befores.len()).expect("a few") * 400;
        let wall = if program.verdict == "wall_timeout" { 1000 + waits } else { 20_000 };
        program.limits.push(("wall", format!("{}ms", wall * host.slower)));
        program
    }

    /// Adds the end, and what it is called.
    fn end(&mut self, random: &mut Random, exits_with: i32, host: Host) {
        let (code, verdict, status) = match self.ending {
            Ending::Exit => (format!("os._exit({exits_with})"), "exited", exits_with),
            Ending::Signal => {
                let signal = random.pick(&[1, 6, 9, 10, 11, 15, 24, 31]);
                (format!("os.kill(os.getpid(), {signal})"), "signaled", 128 + signal)
            }
            Ending::Memory if host.cgroup => (String::from("hold()"), "out_of_memory", 137),
            Ending::Memory => (String::from("hold()"), "exited", 1),
            Ending::ChildMemory => {
                // Without a cgroup the child fails by an exception. When it is refused more, it and its
                // parent hold more than the limit together, and whether a count falls into that
                // moment is chance; so it is refused earlier.
                let less =
                    if host.cgroup { "" } else { "import resource; resource.setrlimit(resource.RLIMIT_DATA, (72 << 20, 72 << 20)); " };
                let child = format!("pid = os.fork()\nif pid == 0:\n    try: {less}hold()\n    finally: os._exit(9)\nos.waitpid(pid, 0)");
                let (then, verdict, status) = random.pick(&[
                    ("os._exit(0)", "exited", 0),
                    ("os._exit(3)", "exited", 3),
                    ("os.kill(os.getpid(), 11)", "signaled", 139),
                    ("time.sleep(600)", "wall_timeout", 124),
                ]);
                let (verdict, status) = if host.cgroup { ("out_of_memory", 137) } else { (verdict, status) };
                (format!("{child}\n{then}"), verdict, status)
            }
            Ending::ScratchFull => {
                let bash = in_bash("for i in 1 2 3 4 5 6 7 8 9; do head -c 900K /dev/zero > part$i; done");
                (random.pick(&["grow('.')", &bash]).to_owned(), "disk_limit", 1)
            }
            Ending::FilesFull => {
                let bash = in_bash("for ((i = 0; i < 999; i++)); do : > entry$i; done");
                (random.pick(&["crowd('.')", &bash]).to_owned(), "disk_limit", 1)
            }
            Ending::TmpFull => {
                let place = random.pick(&["/tmp", "/dev/shm", "/home/sandbox"]);
                (format!("grow({place:?})"), "disk_limit", 1)
            }
            Ending::FileTooLarge => {
                let (then, status) = random.pick(&[
                    ("open('big', 'wb').write(bytes(2 << 20))", 1),
                    // Python ignores the signal, and what it starts would.
                    ("DIE\nos.execvp('dd', ['dd', 'if=/dev/zero', 'of=big', 'bs=64k', 'count=32', 'status=none'])", 153),
                    ("DIE\nos.execvp('bash', ['bash', '-c', 'head -c 2M /dev/zero > big; exit $?'])", 153),
                ]);
                let dies = "import signal\nsignal.signal(signal.SIGXFSZ, signal.SIG_DFL)";
                (then.replace("DIE", dies), "disk_limit", status)
            }
            Ending::HostScratch => {
                let step = random.pick(&["for number in range(9): open(f'part{number}', 'wb').write(bytes(900 << 10))", "crowd('.')"]);
                let then = random.pick(&["os._exit(0)", "os._exit(3)", "time.sleep(600)"]);
                (format!("{step}\n{then}"), "disk_limit", 137)
            }
            Ending::Processes if host.cgroup => (String::from("CLEANS = False\ncrowd_of_children()"), "process_limit", 1),
            Ending::Processes => (String::from("CLEANS = False\ncrowd_of_children()"), "exited", 1),
            Ending::Cpu => {
                // Without a cgroup each process has a limit of its own, in whole seconds.
                let limit = if host.cgroup { 500 } else { 1000 };
                self.limits.push(("cpu", format!("{}ms", limit * host.slower)));
                let in_child = host.cgroup && random.pick(&[true, false]);
                (String::from(if in_child { "in_child(burn)" } else { "burn()" }), "cpu_timeout", 137)
            }
            Ending::Wall => (random.pick(&["time.sleep(600)", "burn()", "in_child(burn)"]).to_owned(), "wall_timeout", 124),
            Ending::Output => {
                let stream = random.pick(&[1, 2]);
                let code = random.pick(&[
                    "while True: os.write(N, bytes(4096))",
                    // Just above 64 times output_size, and then an end of its own.
                    "for _ in range(66): os.write(N, bytes(4096))\nos._exit(0)",
                    "for _ in range(66): os.write(N, bytes(4096))\nos._exit(3)",
                ]);
                (code.replace('N', &stream.to_string()), "output_limit", 137)
            }
            Ending::Call => (String::from("import ctypes\nctypes.CDLL(None).ptrace(0, 0, 0, 0)"), "syscall_denied", 137),
            Ending::Cancelled => {
                let signal = random.pick(&[2, 15]);
                self.cancelled_by = Some(signal);
                (String::from("open('ready', 'w').close()\ntime.sleep(600)"), "cancelled", 128 + signal)
            }
        };
        self.code.push_str(&code);
        // What ended it is no limit that was only touched.
        let by = match self.ending {
            Ending::ScratchFull => "scratch_size",
            Ending::FilesFull => "scratch_files",
            Ending::TmpFull => "tmp_size",
            _ => "",
        };
        self.limits_hit.remove(by);
        self.verdict = verdict;
        self.status = status;
    }
}

/// A script that takes the program's place, and ends with the first command that fails.
fn in_bash(script: &str) -> String {
    format!("os.execvp('bash', ['bash', '-ec', {script:?}])")
}

/// Up to three things that come before such an end; what is not cleaned up comes last.
fn befores(random: &mut Random, ending: Ending, exits_with: i32, host: Host) -> Vec<Before> {
    let mut choices = HARMLESS.to_vec();
    choices.extend([Before::TmpFull, Before::TmpFull]);
    if !ending.has_host_scratch() {
        choices.extend([Before::ScratchFull, Before::ScratchFull, Before::FilesFull, Before::FilesFull]);
    }
    // Else the verdict would be the limit's: see the head of this file.
    let succeeds = ending == Ending::Exit && exits_with == 0;
    let fails_by_itself = !succeeds && !ending.is_by_launcher(host);
    let mut befores: Vec<Before> = (0..random.pick(&[0, 1, 2, 3])).map(|_| random.pick(&choices)).collect();
    if !fails_by_itself {
        let mut last = vec![Before::ForkRefused, Before::TmpKeptFull];
        if !ending.has_host_scratch() {
            last.extend([Before::ScratchKeptFull, Before::LargestFileKept]);
        }
        if random.pick(&[true, false]) {
            befores.push(random.pick(&last));
        }
    }
    befores
}

impl Before {
    /// Its lines, and the limits that it touches.
    fn step(self, host: Host) -> (&'static str, Vec<&'static str>) {
        match self {
            Before::Sleep => ("time.sleep(0.02)", vec![]),
            Before::Files => (
                "with open('some', 'wb') as file: file.write(bytes(500 << 10))\nos.remove('some')\nopen('/tmp/other', 'w').close()",
                vec![],
            ),
            Before::Allocation => ("held = bytearray(20 << 20)\nfor at in range(0, len(held), 4096): held[at] = 1", vec![]),
            Before::FailingChild => ("pid = os.fork()\nif pid == 0: os._exit(7)\nos.waitpid(pid, 0)", vec![]),
            Before::KilledChild => ("pid = os.fork()\nif pid == 0: time.sleep(600)\nos.kill(pid, 9)\nos.waitpid(pid, 0)", vec![]),
            Before::MissingFile => ("try: open('/no/such/file')\nexcept OSError: pass", vec![]),
            // What is cut of a stream stands in `truncated`.
            Before::TooMuchPrinted => ("os.write(1, bytes(12 << 10))", vec![]),
            Before::ScratchFull => ("refused(grow, '.', 28)\nclear('.')", vec!["scratch_size"]),
            Before::FilesFull => ("refused(crowd, '.', 28)\nclear('.')", vec!["scratch_files"]),
            Before::TmpFull => ("refused(grow, '/tmp', 28)\nclear('/tmp')", vec!["tmp_size"]),
            Before::ScratchKeptFull => ("refused(grow, '.', 28)", vec!["scratch_size"]),
            Before::TmpKeptFull => ("refused(grow, '/dev/shm', 28)", vec!["tmp_size"]),
            Before::LargestFileKept => (
                "try: open('largest', 'wb').write(bytes(2 << 20))\nexcept OSError as error:\n    if error.errno != 27: raise\nelse: say('nothing was refused')",
                vec!["file_size"],
            ),
            Before::ForkRefused => (
                "try: crowd_of_children()\nexcept BlockingIOError: pass\nelse: say('nothing was refused')",
                if host.cgroup { vec!["processes"] } else { vec![] },
            ),
        }
    }
}
