//! Watching Python's modules: what reading the code misses is told while it runs, what the
//! policy refuses is refused by the interpreter, and a program that does nothing special sees
//! nothing of it. It is advice: how code gets around it, and that it then meets the sandbox
//! all the same, is shown here too.

use std::{fs, os::unix::fs::PermissionsExt, path::Path, process::Output, rc::Rc};

use serde_json::{Value, json};

use crate::support::{
    exec::{ExecResult, exec, exec_with, run_with_stdin, scratch, stockade, text, write_file},
    policy_dir::{PolicyDirectory, derived},
    runner::{directory, test},
};

/// A policy with these lines of [runtimes.python.modules].
struct Watched {
    policy: String,
    policies: Rc<PolicyDirectory>,
}

impl Watched {
    fn new(lines: &str) -> Self {
        Watched::write(Rc::new(PolicyDirectory::new()), "watched", lines)
    }

    /// Another beside it.
    fn other(&self, lines: &str) -> Self {
        Watched::write(self.policies.clone(), "other", lines)
    }

    fn write(policies: Rc<PolicyDirectory>, name: &str, lines: &str) -> Self {
        let policy = policies.write(name, &derived(&format!("[runtimes.python.modules]\n{lines}")));
        Watched { policy, policies }
    }

    #[track_caller]
    fn python(&self, code: &str) -> ExecResult {
        self.exec(json!({"code": code}))
    }

    #[track_caller]
    fn exec(&self, request: Value) -> ExecResult {
        exec_with(&["--policy", &self.policy], request)
    }

    /// A command, and the `modules` of its report.
    fn run(&self, command: &[&str], stdin: &str) -> (Output, Value) {
        let path = directory().join("report.json");
        let output = run_with_stdin(
            &mut stockade([&["run", "--policy", &self.policy, "--report", text(&path), "--"], command].concat()),
            stdin.as_bytes(),
        );
        let report: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
        (output, report["modules"].clone())
    }
}

/// What was met, as `action kind name count`.
fn met(modules: &Value) -> Vec<String> {
    let seen = modules["seen"].as_array().unwrap_or_else(|| panic!("{modules}"));
    let word = |seen: &Value, key: &str| seen[key].as_str().unwrap().to_owned();
    seen.iter().map(|seen| format!("{} {} {} {}", word(seen, "action"), word(seen, "kind"), word(seen, "name"), seen["count"])).collect()
}

const HIDDEN: &str = r#"
import importlib, os
module = importlib.import_module("".join(["ct", "ypes"]))
getattr(os, "sys" + "tem")("true")
for n in range(5):
    try:
        open("/usr/n", "w")
    except OSError as error:
        print(error.strerror)
open("kept", "w"), open("/tmp/kept", "wb"), open("/dev/null", "w"), open("/usr/bin/env")
"#;

test!(Both, what_reading_missed_stands_in_the_result);
fn what_reading_missed_stands_in_the_result() {
    let lines = "ctypes = \"note\"\n\"os.system\" = \"note\"\nwrite_outside = \"note\"";
    let done = Watched::new(lines).python(HIDDEN);
    done.succeeded();
    // Told at each doubling: four of the five.
    assert_eq!(met(&done["modules"]), ["note import ctypes 1", "note event os.system 1", "note event write_outside 4"], "{}", done.brief());
    let seen = &done["modules"]["seen"];
    assert_eq!((&seen[0]["line"], &seen[1]["line"], &seen[2]["line"]), (&json!(3), &json!(4), &json!(7)));
    assert!(seen[0]["file"].as_str().is_some_and(|file| file.starts_with("/scratch/") && file.ends_with(".py")), "{seen}");
    assert_eq!((&done["modules"]["interpreters"], &done["modules"]["omitted"]), (&json!(1), &json!(0)));
    // Reading the code has not found the one, and no policy asks for the rest.
    let read = done["findings"].as_array().unwrap();
    assert!(read.iter().all(|finding| finding["text"] != "ctypes"), "{read:?}");
    let unwatched = exec(json!({"code": HIDDEN}));
    unwatched.succeeded();
    assert_eq!((&unwatched["modules"], unwatched.output()), (&Value::Null, done.output()));
}

test!(Both, what_is_refused_is_an_error_that_names_the_line_which_allows_it);
fn what_is_refused_is_an_error_that_names_the_line_which_allows_it() {
    let code = r#"
import os, importlib
def attempt(act):
    try:
        act()
        print("done")
    except OSError as error:
        print(type(error).__name__, error.errno, error.strerror)
    except ImportError as error:
        print(type(error).__name__, error.name, error)
def plain():
    import ctypes
attempt(plain)
attempt(lambda: importlib.import_module("ctypes"))
attempt(lambda: __import__("ctypes"))
attempt(lambda: os.system("true"))
attempt(lambda: open("/usr/n", "a"))
"#;
    let lines = ["ctypes = \"deny\"", "\"os.*\" = \"deny\"", "write_outside = \"deny\""];
    let watched = Watched::new(&lines.join("\n"));
    let done = watched.python(code);
    done.succeeded();
    let place = "is refused by the policy; to allow it, write";
    let line = |name: &str| format!("{place} \"{name}\" = \"allow\" under [runtimes.python.modules]");
    let refused = |kind: &str, name: &str| format!("{kind} {name} {}", line(name));
    let import = format!("ImportError ctypes {}", refused("import", "ctypes"));
    let event = |name: &str| format!("PermissionError 1 {}", refused("event", name));
    let said: Vec<&str> = done.output().lines().collect();
    assert_eq!(said, [&import[..], &import, &import, &event("os.system"), &event("write_outside")]);
    assert_eq!(met(&done["modules"]), ["deny import ctypes 2", "deny event os.system 1", "deny event write_outside 1"], "{}", done.brief());
    // With those lines in place of the first.
    let allowed =
        watched.other("\"ctypes\" = \"allow\"\n\"os.system\" = \"allow\"\n\"os.*\" = \"deny\"\n\"write_outside\" = \"allow\"").python(code);
    allowed.succeeded();
    let last = "OSError 30 Read-only file system";
    assert_eq!(allowed.output().lines().collect::<Vec<_>>(), ["done", "done", "done", "done", last]);
    // What nothing catches ends the program as any error does, and no verdict comes of it.
    let done = watched.python("import ctypes");
    done.expect(json!({"verdict": "exited", "code": 1}));
    assert_eq!(done["denials"], json!([]), "{}", done.brief());
    assert!(done.error().trim_end().lines().last().unwrap().starts_with("ImportError: import ctypes is refused"), "{}", done.error());
}

test!(Both, what_a_library_imports_for_itself_is_its_own_affair);
fn what_a_library_imports_for_itself_is_its_own_affair() {
    let watched = Watched::new("default = \"deny\"\nasyncio = \"allow\"\njson = \"allow\"\nimportlib = \"allow\"\nsubprocess = \"deny\"");
    let code = "import json.decoder, asyncio, importlib.util\nprint(importlib.util.find_spec('csv') is not None, asyncio.run(asyncio.sleep(0, 7)))";
    let done = watched.python(code);
    assert_eq!((done.output(), met(&done["modules"])), ("True 7\n", Vec::<String>::new()), "{}", done.brief());
    for name in ["subprocess", "csv", "xml.dom"] {
        let done = watched.python(&format!("import {name}"));
        done.expect(json!({"code": 1}));
        let first = name.split('.').next().unwrap();
        assert!(met(&done["modules"])[0].starts_with(&format!("deny import {first}")), "{}", done.brief());
    }
}

test!(Both, what_code_can_write_is_no_library);
/// Whatever its directory is called, and although Python reads it before any program.
fn what_code_can_write_is_no_library() {
    let named = json!({
        "code": "import sys\nsys.path.insert(0, '/scratch/site-packages')\nimport m",
        "files": {"site-packages/m.py": "import ctypes\nprint('ran')\n"},
    });
    let path_file = json!({"code": r#"
import os, site, subprocess, sys
place = site.getusersitepackages()
os.makedirs(place)
with open(place + "/x.pth", "w") as file:
    file.write("import ctypes; print('ran', flush=True)\n")
child = subprocess.run([sys.executable, "-c", "import json"], capture_output=True, text=True)
print(child.stdout, end="")
"#});
    let allowed = "subprocess = \"allow\"\njson = \"allow\"\nm = \"allow\"";
    let lines = |action: &str| format!("default = \"note\"\n{allowed}\nctypes = \"{action}\"");
    let watched = Watched::new(&lines("note"));
    let other = watched.other(&lines("deny"));
    for request in [named, path_file] {
        let done = watched.exec(request.clone());
        done.succeeded();
        assert_eq!((done.output(), met(&done["modules"])), ("ran\n", vec![String::from("note import ctypes 1")]), "{}", done.brief());
        let done = other.exec(request);
        assert_eq!((done.output(), met(&done["modules"])), ("", vec![String::from("deny import ctypes 1")]), "{}", done.brief());
    }
}

test!(Both, no_option_and_no_variable_switches_it_off, seconds 60);
fn no_option_and_no_variable_switches_it_off() {
    let watched = Watched::new("ctypes = \"note\"");
    let ways: &[(&[&str], &str)] = &[
        (&["-c", "import ctypes"], ""),
        (&["-I", "-S", "-E", "-s", "-B", "-c", "import ctypes"], ""),
        (&["-X", "frozen_modules=off", "-X", "utf8=0", "-OO", "-c", "import ctypes"], ""),
        (&["-I", "-S", "-"], "import ctypes"),
        (&["-m", "timeit", "-n1", "-r1", "import ctypes"], ""),
        (&["-i", "-q"], "import ctypes\n"),
    ];
    for (arguments, stdin) in ways {
        let (output, modules) = watched.run(&[&["/usr/bin/python3"], *arguments].concat(), stdin);
        assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        assert_eq!(met(&modules), ["note import ctypes 1"], "{arguments:?}: {modules}");
    }
    let variables = json!({"PYTHONPATH": "/scratch", "PYTHONOPTIMIZE": "2", "LC_ALL": "C", "LANG": "C", "PYTHONWARNINGS": "ignore"});
    let files = json!({"sitecustomize.py": "import sys\nsys.flags\n", "codecs.py": "raise SystemExit(9)\n"});
    let done = watched.exec(json!({"code": "import ctypes", "env": variables, "files": files}));
    done.succeeded();
    assert_eq!(met(&done["modules"]), ["note import ctypes 1"], "{}", done.brief());
}

test!(Both, children_are_watched_as_their_parents_are, seconds 60);
fn children_are_watched_as_their_parents_are() {
    let code = r#"
import multiprocessing, os, subprocess, sys, threading
def work(n):
    import ctypes
    return n
if __name__ == "__main__":
    for method in ("fork", "spawn", "forkserver"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            assert pool.map(work, [1, 2]) == [1, 2]
    subprocess.run([sys.executable, "-I", "-c", "import ctypes"], check=True, env={}, close_fds=True)
    child = os.fork()
    if child == 0:
        os.closerange(3, 100)
        work(0)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    thread = threading.Thread(target=work, args=(0,))
    thread.start(), thread.join()
    print("done")
"#;
    let done = Watched::new("ctypes = \"note\"").python(code);
    done.succeeded();
    // A pool's for each method, a program's, a fork's and the thread's; a fork of one that
    // has imported it imports nothing.
    assert_eq!((done.output(), met(&done["modules"])), ("done\n", vec![String::from("note import ctypes 6")]), "{}", done.brief());
    assert!(done["modules"]["interpreters"].as_u64().is_some_and(|count| count >= 4), "{}", done.brief());
}

/// Whatever a program could tell it by, but for the list of finders.
const LOOKS: &str = r#"
import sys, os, io, encodings.utf_8, codecs
print(sys.flags, sys.argv[1:], sys.orig_argv[:-1] if len(sys.orig_argv) < 4 else sys.orig_argv[2:], sys.path[1:], sys._xoptions, sys.warnoptions)
print(sorted(sys.modules), sorted(globals()), __name__, sys.getrecursionlimit(), sys.gettrace(), sys.getprofile())
print(sorted(os.environ.items()), sorted(os.listdir("/proc/self/fd")), os.getcwd(), sys.stdout.encoding, sys.getfilesystemencoding())
print(sorted(name for name in vars(encodings.utf_8) if name != "__builtins__"), encodings.utf_8.__file__, codecs.lookup("utf-8").name)
print(open(os.devnull).fileno(), sys.dont_write_bytecode, sys.displayhook, sys.excepthook, sys.getswitchinterval())
try:
    import no_such_module
except ImportError as error:
    print(type(error), error, error.name, error.__traceback__.tb_next)
try:
    open("/no/such/file")
except OSError as error:
    print(error, error.__traceback__.tb_next)
import traceback
def fails(): 1 / 0
try:
    fails()
except ZeroDivisionError:
    print(traceback.format_exc().replace(__file__ if "__file__" in globals() else "\0", "FILE"))
import nowhere.at.all
"#;

test!(Both, a_program_that_does_nothing_special_sees_no_difference, seconds 60);
fn a_program_that_does_nothing_special_sees_no_difference() {
    let watched =
        Watched::new("default = \"note\"\n\"os.*\" = \"note\"\nwrite_outside = \"note\"\n\"sys.*\" = \"note\"\n\"object.*\" = \"note\"");
    let unwatched = watched.policies.write("plain", &derived(""));
    let scratch = scratch();
    write_file(&scratch.join("looks.py"), LOOKS);
    let ways: &[&[&str]] = &[
        &["-c", LOOKS, "a"],
        &["-I", "-S", "-c", LOOKS],
        &["-", "b"],
        &["looks.py", "c"],
        &["-m", "looks", "d"],
        &["-E", "-OO", "looks.py"],
    ];
    for way in ways {
        let [seen, wanted] = [&watched.policy, &unwatched].map(|policy| {
            let command = [&["run", "-q", "--policy", policy, "--scratch", text(&scratch), "--", "/usr/bin/python3"], *way].concat();
            let output = run_with_stdin(&mut stockade(command), LOOKS.as_bytes());
            (output.status.code(), String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap())
        });
        assert_eq!(wanted.0, Some(1), "{way:?}: {wanted:?}");
        assert_eq!(seen, wanted, "{way:?}");
    }
}

test!(Both, what_was_met_before_an_end_is_not_lost);
fn what_was_met_before_an_end_is_not_lost() {
    let watched = Watched::new("ctypes = \"note\"");
    for (end, verdict) in [("os.kill(os.getpid(), 9)", "signaled"), ("os._exit(3)", "exited"), ("os.close(2), os.abort()", "signaled")] {
        let done = watched.python(&format!("import os, ctypes\n{end}"));
        done.expect(json!({"verdict": verdict}));
        assert_eq!(met(&done["modules"]), ["note import ctypes 1"], "{end}: {}", done.brief());
    }
    let done = watched.exec(json!({"code": "import ctypes\nwhile True: pass", "limits": {"wall": "2s"}}));
    done.expect(json!({"verdict": "wall_timeout"}));
    assert_eq!(met(&done["modules"]), ["note import ctypes 1"], "{}", done.brief());
}

test!(Both, code_gets_around_it_and_meets_the_sandbox);
/// Each does what the policy refuses, and is not seen doing it: by the C library, behind the
/// interpreter's back; and by taking away what the hook asks, which the collector of garbage
/// hands out. What is done is refused or made ineffective by layers that no code of a process undoes.
fn code_gets_around_it_and_meets_the_sandbox() {
    let watched = Watched::new("write_outside = \"deny\"\n\"socket.*\" = \"deny\"\n\"os.system\" = \"deny\"");
    let acts = r#"
import os, socket
def write():
    open("/usr/bin/env", "a")
def connect():
    socket.create_connection(("1.1.1.1", 443), 1)
def start():
    os.system("touch /etc/passwd")
def shown():
    open("/etc/shadow").read()
for act in (write, connect, start, shown):
    try:
        act()
        print(act.__name__, "done")
    except OSError as error:
        print(act.__name__, error.errno)
"#;
    // The control: so each is refused, but for what no line names.
    let control = watched.python(acts);
    assert_eq!(control.output(), "write 1\nconnect 1\nstart 1\nshown 2\n", "{}", control.brief());
    assert_eq!(met(&control["modules"]).len(), 3, "{}", control.brief());
    let unhooked = r#"
import gc
for thing in gc.get_objects():
    if type(thing).__name__ == "function" and thing.__qualname__.startswith("_watch."):
        for cell in thing.__closure__ or ():
            if type(cell.cell_contents) is dict:
                cell.cell_contents.clear()
"#;
    let native = r#"
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
class Address(ctypes.Structure):
    _fields_ = [("family", ctypes.c_uint16), ("port", ctypes.c_uint16), ("address", ctypes.c_uint32), ("rest", ctypes.c_uint64)]
def say(name, result):
    print(name, ctypes.get_errno() if result < 0 else "done")
say("write", libc.open(b"/usr/bin/env", 1025))
say("connect", libc.connect(libc.socket(2, 1, 0), ctypes.byref(Address(2, 0xbb01, 0x01010101, 0)), 16))
print("start", "done" if libc.system(b"touch /etc/passwd") >= 0 else "failed")
say("shown", libc.open(b"/etc/shadow", 0))
"#;
    for (way, code) in [("by gc", format!("{unhooked}{acts}")), ("by ctypes", native.to_owned())] {
        let done = watched.python(&code);
        done.succeeded();
        // The advice is gone. EACCES, ENETUNREACH, a file that root alone may write, ENOENT:
        // the sandbox is not.
        assert_eq!(done.output(), "write 13\nconnect 101\nstart done\nshown 2\n", "{way}: {}", done.brief());
        assert_eq!(met(&done["modules"]), Vec::<String>::new(), "{way}: {}", done.brief());
        assert!(done.error().contains("touch:"), "{way}: {}", done.error());
    }
}

test!(Both, forged_lines_are_advice_and_a_flood_is_cut_off);
fn forged_lines_are_advice_and_a_flood_is_cut_off() {
    let code = r#"
import os, select
pipe = "/run/stockade/modules"
def attempt(act):
    try:
        act()
        print("done")
    except OSError as error:
        print(error.strerror)
attempt(lambda: os.open(pipe, os.O_RDONLY | os.O_NONBLOCK))
attempt(lambda: os.unlink(pipe))
attempt(lambda: os.chmod(pipe, 0o666))
with open(pipe, "wb", buffering=0) as out:
    out.write(b"deny\timport\tforged\t9\t1\t/x\n\x00\xff\nnote\timport\t\x1b[2J\t1\t1\t\nwatch")
    out.write(b"\n")
    for n in range(300):
        out.write(b"note\timport\tm%d\t1\t1\t\n" % n)
flood, sent = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK), 0
while sent < 16 << 20 and select.select([], [flood], [], 2)[1]:
    try:
        sent += os.write(flood, b"note\timport\tmore\t1\t1\t\n" * 40)
    except BlockingIOError:
        pass
print("cut off" if sent < 8 << 20 else sent)
"#;
    let done = Watched::new("ctypes = \"note\"").exec(json!({"code": code, "limits": {"wall": "20s"}}));
    let said: Vec<&str> = done.output().lines().collect();
    assert_eq!(said[..3], ["Permission denied", "Read-only file system", "Read-only file system"], "{}", done.brief());
    done.succeeded();
    assert_eq!(said[3..], ["cut off"], "{}", done.brief());
    let modules = &done["modules"];
    assert_eq!((&modules["seen"][0]["name"], &modules["interpreters"]), (&json!("forged"), &json!(2)), "{modules}");
    assert_eq!(modules["seen"].as_array().unwrap().len(), 256);
    assert!(modules["omitted"].as_u64().is_some_and(|omitted| (300..1_000_000).contains(&omitted)), "{}", modules["omitted"]);
    assert!(!modules.to_string().contains('\u{1b}') && !modules.to_string().contains("[2J"), "{modules}");
}

/// An interpreter that is none that can be watched: a script of a shell's.
fn stranger(place: &Path) -> String {
    let program = place.join("bin/python");
    fs::create_dir_all(place.join("bin")).unwrap();
    fs::write(&program, "#!/bin/sh\necho ran\n").unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    format!("python={}", text(&program))
}

test!(Both, no_link_of_an_environment_has_the_launcher_read_another_file);
fn no_link_of_an_environment_has_the_launcher_read_another_file() {
    let watched = Watched::new("ctypes = \"note\"");
    let (environment, secret) = (directory().join("venv"), directory().join("secret.py"));
    let (program, codec) = (environment.join("bin/python"), environment.join("lib/python3.99/encodings/utf_8.py"));
    for file in [&program, &codec] {
        fs::create_dir_all(file.parent().unwrap()).unwrap();
    }
    std::os::unix::fs::symlink("/usr/bin/python3", &program).unwrap();
    fs::write(environment.join("pyvenv.cfg"), "home = /usr/bin\n").unwrap();
    fs::write(&secret, "TOPKEY = 1\n").unwrap();
    let runtime = format!("python={}", text(&program));
    let code = format!("try: print(open({:?}).read()[:10])\nexcept OSError as e: print(e.strerror)", text(&codec));
    let read = || exec_with(&["--policy", &watched.policy, "--runtime", &runtime], json!({"code": code}));
    std::os::unix::fs::symlink(&secret, &codec).unwrap();
    read().succeeded().expect(json!({"output": "No such file or directory\n"}));
    // The control: its own codec is read, and covered.
    fs::remove_file(&codec).unwrap();
    fs::write(&codec, "TOPKEY = 1\n").unwrap();
    read().succeeded().expect(json!({"output": "TOPKEY = 1\n"}));
}

test!(Both, an_interpreter_that_is_not_watched_is_told_of_or_does_not_start);
fn an_interpreter_that_is_not_watched_is_told_of_or_does_not_start() {
    let noting = Watched::new("ctypes = \"note\"");
    let denying = noting.other("ctypes = \"note\"\n\"os.system\" = \"deny\"");
    let runtime = stranger(&directory().join("place"));
    let ran = |watched: &Watched| exec_with(&["--policy", &watched.policy, "--runtime", &runtime], json!({"code": ""}));
    let done = ran(&noting);
    done.expect(json!({"verdict": "exited", "code": 0, "output": "ran\n"}));
    assert_eq!(done["modules"], json!({"interpreters": 0, "seen": [], "omitted": 0}));
    ran(&denying).broke("modules_not_watchable", &["[runtimes.python.modules]", "encodings/utf_8.py", "--runtime python=PATH"]);
    // The code can install another codec, and the result shows it.
    let python = fs::canonicalize("/usr/bin/python3").unwrap();
    let library = Path::new("/usr/lib").join(python.file_name().unwrap()).join("encodings");
    let codec = |name: &str| fs::read_to_string(library.join(name)).unwrap();
    let package = format!("__path__.append({:?})\n{}", text(&library), codec("__init__.py"));
    let request = json!({
        "code": "import os; print(os.system('true'))",
        "env": {"PYTHONPATH": "/scratch"},
        "files": {"encodings/__init__.py": package, "encodings/utf_8.py": codec("utf_8.py")},
    });
    let done = denying.exec(request);
    done.expect(json!({"verdict": "exited", "code": 0, "output": "0\n"}));
    assert_eq!(done["modules"]["interpreters"], 0, "{}", done.brief());
}

test!(Both, sessions_tell_what_each_run_met);
fn sessions_tell_what_each_run_met() {
    let watched = Watched::new("ctypes = \"note\"");
    let lines = "{\"op\": \"run\", \"code\": \"import ctypes\"}\n{\"op\": \"run\", \"code\": \"1\"}\n";
    let output = run_with_stdin(&mut stockade(["session", "--policy", &watched.policy]), lines.as_bytes());
    let answers: Vec<Value> = String::from_utf8(output.stdout).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let runs: Vec<&Value> = answers.iter().filter(|answer| answer["op"] == "run").map(|answer| &answer["modules"]).collect();
    assert_eq!(runs.len(), 2, "{answers:?}");
    assert_eq!((met(runs[0]), met(runs[1])), (vec![String::from("note import ctypes 1")], vec![]));
}
