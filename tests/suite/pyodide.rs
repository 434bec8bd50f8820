//! The policy `pyodide`: CPython compiled to WebAssembly, with the contract that every language has. Each
//! start of it takes a second of CPU time or more, so each test asks for much in one run.

use serde_json::{Value, json};

use crate::support::{
    exec::{ExecResult, exec, exec_with},
    runner::test,
    timeouts::scaled_limit,
};

/// Under the policy, with the time that a slow machine needs.
pub(super) fn run(mut request: Value) -> ExecResult {
    if request["limits"].get("wall").is_none() {
        request["limits"]["wall"] = json!(scaled_limit(60_000));
    }
    exec_with(&["--policy", "pyodide"], request)
}

test!(Both, a_program_has_streams_arguments_variables_and_files, needs [Pyodide], seconds 90);
fn a_program_has_streams_arguments_variables_and_files() {
    let code = r#"
import json, os, sqlite3, sys, tempfile
print(json.dumps([sys.argv, os.getcwd(), os.environ["DEBUG"], os.environ["HOME"], sys.platform, open("given").read()]))
print(repr(input("first? ")), repr(sys.stdin.read()))
print("to stderr", file=sys.stderr)
sqlite3.connect("made.db").execute("create table t (x)")
os.makedirs("sub"); open("sub/made.txt", "w").write("text")
open(os.path.join(tempfile.mkdtemp(), "x"), "w").write("in /tmp")
sys.exit(3)
"#;
    let request = json!({
        "code": code, "language": "python", "args": ["a", "b c"], "stdin": "one\ntwo\n", "env": {"DEBUG": "yes"},
        "files": {"given": "g"}, "collect": ["**/*"],
    });
    let done = run(request);
    done.expect(json!({ "verdict": "exited", "code": 3, "error": "to stderr\n", "denials": [] }));
    let lines: Vec<_> = done.output().lines().collect();
    let seen: Value = serde_json::from_str(lines[0]).unwrap();
    assert_eq!(seen, json!([["/scratch/main.py", "a", "b c"], "/scratch", "yes", "/home/sandbox", "emscripten", "g"]));
    assert_eq!(lines[1..], ["first? 'one' 'two\\n'"]);
    assert_eq!(done.file("sub/made.txt")["text"], "text");
    assert_eq!(done.file("made.db")["size"], 8192);
}

test!(Both, an_error_names_the_line_of_the_program, needs [SlowAsUser, Pyodide], seconds 60);
fn an_error_names_the_line_of_the_program() {
    let done = run(json!({ "code": "def f():\n    return 1 / 0\n\nf()\n", "filename": "work.py" }));
    done.expect(json!({ "verdict": "exited", "code": 1, "output": "" }));
    let traceback = "Traceback (most recent call last):\n  File \"/scratch/work.py\", line 4, in <module>\n    f()\n";
    assert!(done.error().starts_with(traceback) && done.error().ends_with("ZeroDivisionError: division by zero\n"), "{}", done.error());
}

test!(Both, too_much_memory_is_out_of_memory, needs [Pyodide, Cgroup], seconds 90);
fn too_much_memory_is_out_of_memory() {
    let code = "all = []\nwhile True: all.append(b'x' * 2**20)\n";
    let done = run(json!({ "code": code, "limits": {"memory": "400MiB"} }));
    done.expect(json!({ "verdict": "out_of_memory", "code": 137, "started": true }));
}

/// Each act with what it says.
const ACTS: &str = r#"
import json, os
said = {}
def attempt(name, act):
    try: said[name] = repr(act())
    except BaseException as error: said[name] = f"{type(error).__name__}: {error}"
attempt("shell", lambda: os.system("echo ran > shell"))
attempt("passwd", lambda: open("/etc/passwd").read())
attempt("usr", lambda: os.listdir("/usr"))
def evaluated():
    from pyodide.code import run_js
    return run_js("globalThis")
attempt("eval", evaluated)
def constructed():
    import js
    return js.Object.constructor("return process")()
attempt("constructor", constructed)
def imported(name):
    import js
    return getattr(js, name)
for name in ["process", "require", "fetch", "globalThis", "WebAssembly"]:
    attempt(name, lambda: imported(name))
def mounted():
    import pyodide_js
    return pyodide_js.mountNodeFS("/mnt", "/etc")
attempt("mount", mounted)
def changed():
    import js
    js.Object.prototype.polluted = 1
attempt("prototype", changed)
def timer():
    import js
    number = js.setTimeout(print, 60_000)
    js.clearTimeout(number)
    return number
attempt("timer", lambda: type(timer()))
def connected():
    import socket
    place = os.environ["HOME"] + "/.node_modules/ws"
    os.makedirs(place)
    open(place + "/index.js", "w").write("require('fs').writeFileSync('native', ''); module.exports = class {}")
    own = socket.socket()
    own.setblocking(False)
    own.connect(("127.0.0.1", 80))
attempt("socket", connected)
def called_back():
    import asyncio, time
    from pyodide.ffi import create_proxy
    # Without a delay it is another object of Node's.
    own = []
    for delay in [0, 50]: time.sleep.__globals__["scheduleCallback"](create_proxy(lambda this: own.append(this), capture_this=True), delay)
    asyncio.run(asyncio.sleep(0.3))
    return own
attempt("callback", called_back)
# Every object of JavaScript to which a way leads from what Python has.
import js, pyodide_js, sys, time
reached, waiting = set(), [js, pyodide_js, time.sleep.__globals__["scheduleCallback"], sys.modules["pyodide._package_loader"].loadedPackages]
names = set()
while waiting:
    thing = waiting.pop()
    if type(thing).__name__ != "JsProxy" or thing.js_id in reached:
        continue
    reached.add(thing.js_id)
    own = set(dir(thing)) - set(dir(object))
    names |= own
    for name in own:
        try: waiting.append(getattr(thing, name))
        except BaseException: pass
said["reached"] = len(reached)
said["objects"] = sorted(names & {"FS", "_module", "mount", "filesystems", "NODEFS", "process", "mainModule", "mountNodeFS", "binding"})
print(json.dumps(said))
"#;

test!(Both, python_reaches_no_shell_no_file_and_no_object_of_node, needs [SlowAsUser, Pyodide], seconds 90);
fn python_reaches_no_shell_no_file_and_no_object_of_node() {
    let done = run(json!({ "code": ACTS, "collect": ["*"] }));
    let said: Value = serde_json::from_str(done.succeeded().output()).unwrap();
    let begins = |name: &str, with: &str| assert!(said[name].as_str().unwrap().starts_with(with), "{name}: {said}");
    begins("shell", "32512");
    for (name, with) in
        [("passwd", "FileNotFoundError"), ("usr", "FileNotFoundError"), ("eval", "ImportError"), ("mount", "AttributeError")]
    {
        begins(name, with);
    }
    begins("constructor", "JsException: EvalError: Code generation from strings disallowed");
    for name in ["process", "require", "fetch", "globalThis", "WebAssembly"] {
        begins(name, "AttributeError");
    }
    begins("timer", "<class 'int'>");
    begins("prototype", "JsException: TypeError: Cannot");
    begins("socket", "OSError: [Errno 23]");
    // Node 18 cannot wait.
    assert!(["[None, None]", "RuntimeError"].iter().any(|with| said["callback"].as_str().unwrap().starts_with(with)), "{said}");
    assert!(said["objects"] == json!([]) && said["reached"].as_u64().unwrap() > 50, "{said}");
    assert!(done["files"].as_array().unwrap().iter().all(|file| file["path"] != "shell" && file["path"] != "native"), "{}", done.brief());
    // The control: to the sandbox alone all of it is allowed.
    let native = "import os; print(os.system('echo ran > shell'), len(os.listdir('/usr')) > 0, open('shell').read())";
    exec(json!({ "code": native })).succeeded().expect(json!({ "output": "0 True ran\n\n" }));
}
