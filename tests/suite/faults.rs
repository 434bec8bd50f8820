//! Every system call of a run made to fail in turn, and every process of it killed at
//! each: the run then ends as a `sandbox_error` with the reason, and the code has not run;
//! or the failure changed nothing, which is shown by the world that the code sees and by
//! the receipt. Never does code run with less around it, and nothing is left behind.
//!
//! What the payload does is not interfered with, nor is more than one call of a run.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{self, File},
    path::{Path, PathBuf},
    time::Duration,
};

use nix::{
    errno::Errno,
    libc,
    sys::{signal::Signal, wait::WaitStatus},
};
use serde_json::{Value, json};

use crate::support::{
    exec::{ExecResult, exec, run_under, run_with_stdin, scratch, text, write_file},
    leftovers::{cgroups_of, dead_records, processes, processes_around, the_next_start_has_swept},
    runner::{directory, eventually, test},
    tracer::{Act, INIT, LAUNCHER, Point, Traced, trace},
};

/// Shows what is around it, in the shell's own words: no program starts that the next
/// run would have to start too.
const LOOK: &str = r#"
true > ran
while read -r line; do case $line in Cap*|NoNew*|Seccomp*|Uid*|Gid*|Groups*) echo "$line";; esac; done < /proc/self/status
while read -r id parent device root point options rest; do echo "$root $point $options $rest"; done < /proc/self/mountinfo
for map in uid_map gid_map; do read -r line < /proc/self/$map; echo "$line"; done
while read -r line; do case $line in *:*) echo "${line%%:*}";; esac; done < /proc/self/net/dev
read -r name < /proc/sys/kernel/hostname; echo "$name"
echo / /* /dev/* /etc/* /proc/[0-9]*
ulimit -a
kill -0 1; true > /usr/planted; read -r line < /etc/shadow; true > /proc/sys/kernel/hostname; true > /dev/shm/mine && echo shm
set; true
"#;

/// One run of [`LOOK`] in a scratch of the host, with a call that fails or none.
struct Run {
    traced: Traced,
    stdout: String,
    stderr: String,
    ran: bool,
}

struct Bed {
    scratch: PathBuf,
    request: PathBuf,
}

impl Bed {
    fn new() -> Self {
        let scratch = scratch();
        let request = directory().join("request");
        let body = json!({"code": LOOK, "language": "sh", "scratch": text(&scratch), "files": {"given/file": "x"}, "collect": ["given/*"]});
        write_file(&request, body.to_string());
        Bed { scratch, request }
    }

    fn run(&self, act: Option<(&Point, Act<'_>)>) -> Run {
        // A launcher that was killed may have been outlived by its code for a moment.
        self.clear();
        let paths = ["stdout", "stderr"].map(|name| directory().join(name));
        let [stdout, stderr] = paths.each_ref().map(|path| File::create(path).unwrap());
        let traced = trace(&["exec"], [File::open(&self.request).unwrap(), stdout, stderr], act);
        let [stdout, stderr] = paths.map(|path| String::from_utf8(fs::read(path).unwrap()).unwrap());
        let ran = self.scratch.join("ran").exists();
        self.clear();
        Run { traced, stdout, stderr, ran }
    }

    /// Removes what the code of one run has left.
    fn clear(&self) {
        for name in ["ran", "given/file", "given"] {
            let path = self.scratch.join(name);
            let _not_there = if path.is_dir() { fs::remove_dir(path) } else { fs::remove_file(path) };
        }
    }
}

/// What must not differ: the world inside, as the code saw it, and the receipt.
#[derive(Clone, Debug, PartialEq, Eq)]
struct World {
    seen: Vec<String>,
    receipt: Value,
    files: Value,
}

impl World {
    fn of(result: &Value) -> Self {
        let plain = |text: &str| text.split(' ').map(plain_word).collect::<Vec<_>>().join(" ");
        let mut receipt = result["receipt"].clone();
        // Its namespaces, ids and times differ from run to run.
        receipt["taken_us"] = Value::Null;
        receipt["plan_sha256"] = Value::Null;
        for layer in receipt["layers"].as_array_mut().into_iter().flatten() {
            layer["detail"] = Value::from(plain(layer["detail"].as_str().unwrap_or_default()));
        }
        let mut seen: Vec<String> =
            [&result["output"], &result["error"]].iter().flat_map(|text| text.as_str().unwrap_or_default().lines()).map(plain).collect();
        // Mounts are listed in the order in which they were made, by two processes at once.
        seen.sort();
        World { seen, receipt, files: result["files"].clone() }
    }
}

/// A word of a receipt or of the world without what differs from run to run: namespaces,
/// names of cgroups and of the program, and the numbers of host ids.
fn plain_word(word: &str) -> String {
    if word.contains(":[") || word.contains("stockade-") || word.contains("/stockade_") {
        return String::from("*");
    }
    let host_id = |number: &&str| number.parse::<u64>().is_ok_and(|number| number >= 0x7000_0000);
    let numbers: Vec<&str> = word.split(|letter: char| !letter.is_ascii_digit()).filter(host_id).collect();
    numbers.iter().fold(word.to_owned(), |word, number| word.replace(number, "*"))
}

/// The memory calls: an allocator that gets none aborts the program, as any program.
const MEMORY: [i64; 5] = [libc::SYS_mmap, libc::SYS_munmap, libc::SYS_mprotect, libc::SYS_brk, libc::SYS_mremap];

/// What a run that was interfered with has to say, and may not.
fn judge(run: &Run, usual: &World) -> Result<&'static str, String> {
    let Some(point) = &run.traced.acted else { return Ok("did not come to pass") };
    let say = |what: &str| Err(format!("{what}: {point:?}: {:?}: {}{}", run.traced.ending, short(&run.stdout), short(&run.stderr)));
    let code = match run.traced.ending {
        None => return say("it hung"),
        Some(WaitStatus::Exited(_, code)) => code,
        // Before main, and in the allocator, no code could say more.
        Some(WaitStatus::Signaled(_, Signal::SIGABRT | Signal::SIGSEGV, _))
            if !run.ran && (point.is_one_of(&MEMORY) || starting(point)) =>
        {
            return Ok("aborted at once");
        }
        Some(_) => return say("ended by a signal"),
    };
    if run.stderr.contains("panicked") || run.stdout.contains("panicked") {
        return say("a panic");
    }
    let Ok(result) = serde_json::from_str::<Value>(&run.stdout) else {
        // The write of the result itself.
        let lost = if run.ran { 74 } else { 125 };
        return if code == lost && run.stderr.contains("write the answer to stdout") {
            Ok("could not be printed")
        } else if code != 0 && !run.ran && starting(point) {
            Ok("aborted at once")
        } else {
            say("no result")
        };
    };
    match (code, result["verdict"].as_str().unwrap_or_default()) {
        (0, "exited") if result["code"] == 0 => {
            let world = World::of(&result);
            let less = world.files.as_array().is_some_and(|files| files.iter().any(|file| file["omitted"].is_string()));
            if world == *usual {
                Ok("changed nothing")
            } else if less && (World { files: usual.files.clone(), ..world.clone() }) == *usual {
                Ok("gave back less, and said so")
            } else {
                say(&format!("another world: {}", difference(&world, usual)))
            }
        }
        (125, "sandbox_error") | (2, "bad_request") => {
            let words = result["error"].as_str().unwrap_or_default();
            if words.is_empty() || result["reason"].as_str().unwrap_or_default().is_empty() {
                say("no reason")
            } else if run.ran && result["started"] == false {
                say("the code ran, and it says that it did not")
            } else {
                Ok(if run.ran { "refused afterwards" } else { "refused before" })
            }
        }
        _ => say("neither refused nor unharmed"),
    }
}

/// The loader's and the runtime's own calls, before `main`.
fn starting(point: &Point) -> bool {
    point.process == LAUNCHER && point.ordinal < 32
}

fn short(text: &str) -> String {
    let end = text.char_indices().nth(600).map_or(text.len(), |(at, _)| at);
    text.get(..end).unwrap_or_default().to_owned()
}

fn difference(a: &World, b: &World) -> String {
    let lines =
        a.seen.iter().zip(&b.seen).filter(|(a, b)| a != b).take(5).map(|(a, b)| format!("{a} | {b}")).collect::<Vec<_>>().join("; ");
    let receipt = if a.receipt == b.receipt { "" } else { "; another receipt" };
    let files = if a.files == b.files { String::new() } else { format!("; files {}", a.files) };
    format!("{} and {} lines; {lines}{receipt}{files}", a.seen.len(), b.seen.len())
}

/// The calls of a usual run, and the world of it.
fn record(bed: &Bed) -> (Vec<Point>, World) {
    let run = bed.run(None);
    let result: Value = serde_json::from_str(&run.stdout).unwrap_or_else(|error| panic!("{error}: {} {}", run.stdout, run.stderr));
    assert_eq!((&result["verdict"], &result["code"]), (&json!("exited"), &json!(0)), "{}", run.stdout);
    let points: Vec<Point> = run.traced.calls.into_iter().filter(|point| !point.is_sure()).collect();
    // The trace has seen everybody, and not just the launcher.
    let of = |name: &str| points.iter().filter(|point| point.process == name).count();
    assert!(of(LAUNCHER) > 100 && of(INIT) > 100, "{} {}", of(LAUNCHER), of(INIT));
    (points, World::of(&result))
}

test!(serial Both, a_call_that_fails_stops_the_run_or_changes_nothing, needs [ShippedProgram, SlowAsUser], seconds 900);
fn a_call_that_fails_stops_the_run_or_changes_nothing() {
    let bed = Bed::new();
    let (points, usual) = record(&bed);
    // The control: twice the same, where nothing fails.
    let again = record(&bed).1;
    assert!(again == usual, "{}", difference(&again, &usual));
    let before = processes();
    let (mut outcomes, mut wrong) = (BTreeMap::<&str, usize>::new(), Vec::new());
    for (index, point) in points.iter().enumerate() {
        let errno = [Errno::EIO, Errno::EPERM, Errno::ENOSYS, Errno::ENOMEM][index % 4];
        let run = bed.run(Some((point, Act::Fail(errno))));
        match judge(&run, &usual) {
            Ok(outcome) => *outcomes.entry(outcome).or_default() += 1,
            Err(how) => wrong.push(format!("{errno}: {how}")),
        }
        if !eventually(Duration::from_secs(5), || processes_around(&bed.scratch, &before).is_empty()) {
            wrong.push(format!("{point:?} leaves {:?}", processes_around(&bed.scratch, &before)));
        }
    }
    println!("{} points: {outcomes:?}", points.len());
    assert!(wrong.is_empty(), "{} of {} points:\n{}", wrong.len(), points.len(), wrong.join("\n"));
}

test!(serial Both, a_process_killed_at_any_call_leaves_nothing, needs [ShippedProgram, SlowAsUser], seconds 900);
fn a_process_killed_at_any_call_leaves_nothing() {
    let bed = Bed::new();
    let (points, _) = record(&bed);
    let (mut launchers, before) = (BTreeSet::new(), processes());
    let mut wrong = Vec::new();
    for point in &points {
        let run = bed.run(Some((point, Act::Kill)));
        launchers.insert(run.traced.pid);
        let left = || processes_around(&bed.scratch, &before);
        if !eventually(Duration::from_secs(5), || left().is_empty()) {
            wrong.push(format!("{point:?} leaves {:?}", left()));
        }
        if let Some(acted) = run.traced.acted.as_ref().filter(|acted| acted.process != LAUNCHER) {
            // The launcher lives, and reports the end of the run. Killed in its execve, the
            // program's process looks as if the program had been killed.
            let result: Value = serde_json::from_str(&run.stdout).unwrap_or_default();
            let in_execve = acted.process != INIT && acted.is_one_of(&[libc::SYS_execve]) && result["signal"] == "SIGKILL";
            let honest = (result["verdict"] == "sandbox_error" || in_execve) && (!run.ran || result["started"] == true);
            if !honest {
                wrong.push(format!("{point:?}: {:?}: {}{}", run.traced.ending, short(&run.stdout), short(&run.stderr)));
            }
        }
    }
    assert!(wrong.is_empty(), "{} of {} points:\n{}", wrong.len(), points.len(), wrong.join("\n"));
    // A start that keeps a record itself, as one without a scratch or a cgroup need not.
    exec(json!({"code": "", "scratch": text(&bed.scratch)})).succeeded();
    the_next_start_has_swept(&launchers);
    assert_eq!(cgroups_of(&launchers), Vec::<PathBuf>::new());
    assert!(eventually(Duration::from_secs(5), || dead_records().is_empty()), "{:?}", dead_records());
    assert!(!Path::new(&bed.scratch).join("given").exists());
}

test!(Both, too_few_descriptors_are_a_clear_error, seconds 60);
fn too_few_descriptors_are_a_clear_error() {
    let ask = |most: u32| {
        let mut command = run_under(&["sh", "-c", r#"ulimit -n "$0"; exec "$STOCKADE" exec"#, &most.to_string()]);
        ExecResult::of(run_with_stdin(&mut command, json!({"code": "echo ran", "language": "sh"}).to_string().as_bytes()))
    };
    let mut enough = 0;
    // Below, not even the shell has what it needs.
    for most in 8..64 {
        let done = ask(most);
        match done["verdict"].as_str() {
            Some("exited") => {
                enough += 1;
                done.succeeded().expect(json!({"output": "ran\n"}));
            }
            verdict => {
                assert_eq!((verdict, &done["started"], enough), (Some("sandbox_error"), &json!(false), 0), "{most}: {}", done.brief());
                assert!(done.error().contains("EMFILE") || done.error().contains("open files"), "{most}: {}", done.brief());
            }
        }
    }
    assert!(enough > 8 && enough < 56, "{enough}");
}

test!(RootOnly, a_full_registry_is_a_clear_error);
fn a_full_registry_is_a_clear_error() {
    let script = r#"mkdir -p /run/stockade; mount -t tmpfs -o "$0" none /run/stockade; exec "$STOCKADE" exec"#;
    let ask = |options: &str| {
        let mut command = run_under(&["unshare", "--mount", "sh", "-c", script, options]);
        ExecResult::of(run_with_stdin(&mut command, br#"{"code": "print(1)"}"#))
    };
    ask("nr_inodes=1,mode=700").broke("registry_failed", &["/run/stockade", "no space left on device (ENOSPC)"]);
    // The control: with room it runs.
    ask("nr_inodes=9,mode=700").succeeded();
}

test!(RootOnly, a_full_disk_below_scratch_is_a_clear_error);
/// Root lays a small disk below an ordinary user's scratch, and fills it.
fn a_full_disk_below_scratch_is_a_clear_error() {
    let script = r#"mount -t tmpfs -o size=64k,mode=700,uid=1234,gid=1234 none "$1" && chown 1234:1234 "$HOME" && head -c "$2" /dev/zero > "$1/filler"
exec setpriv --reuid=1234 --regid=1234 --clear-groups --inh-caps=-all -- "$STOCKADE" exec --scratch "$1""#;
    let disk = directory().join("disk");
    fs::create_dir(&disk).unwrap();
    let ask = |filled: &str, request: Value| {
        let mut command = run_under(&["unshare", "--mount", "sh", "-c", script, "sh", text(&disk), filled]);
        ExecResult::of(run_with_stdin(&mut command, request.to_string().as_bytes()))
    };
    let code = "print(len(open('given').read()) if __import__('os').path.exists('given') else 0)";
    let (plain, with_a_file) = (json!({"code": code}), json!({"code": code, "files": {"given": "x"}}));
    let full = ["no space left on device (ENOSPC)", "the file system of scratch is full: make room there"];
    ask("1000000", plain.clone()).broke("scratch_full", &full);
    ask("1000000", with_a_file.clone()).refused("files_not_writable", &full);
    // The control: with room they run.
    ask("1000", plain).succeeded().expect(json!({"output": "0\n"}));
    ask("1000", with_a_file).succeeded().expect(json!({"output": "1\n"}));
}
