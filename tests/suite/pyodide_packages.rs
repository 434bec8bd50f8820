//! What `scripts/prepare-pyodide` makes of wheels, and what else of the policy `pyodide` takes longer than
//! a landing has.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use serde_json::json;

use super::pyodide::run;
use crate::support::{
    exec::{exec_with, scratch, stockade, text, write_file},
    runner::{directory, test},
    timeouts::scaled_limit,
};

const PREPARE: &str = "../scripts/prepare-pyodide";

/// Wheels of the package index, which needs no account for that.
fn fetch(into: &Path, options: &[&str], package: &str) {
    let mut pip = Command::new("/usr/bin/python3");
    pip.args([
        "-m",
        "pip",
        "download",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
        "--only-binary",
        ":all:",
        "--dest",
        text(into),
    ]);
    let output = pip.args(options).arg(package).output().unwrap();
    assert!(output.status.success(), "{output:?}");
}

fn prepare(arguments: &[&str]) -> (bool, String) {
    let output = Command::new(PREPARE).args(arguments).output().unwrap();
    (output.status.success(), String::from_utf8(output.stderr).unwrap())
}

fn no_index() -> Option<String> {
    let asked = Command::new("/usr/bin/python3").args(["-m", "pip", "--version"]).output().is_ok_and(|output| output.status.success());
    (std::env::var("STOCKADE_TEST_INDEX").as_deref() != Ok("yes") || !asked).then(|| String::from("no package index, or no pip"))
}

test!(Both, wheels_are_imported_without_a_network, needs [Long, Pyodide, Other(no_index)], seconds 300);
fn wheels_are_imported_without_a_network() {
    let (wheels, made) = (directory().join("wheels"), directory().join("pyodide"));
    fs::create_dir(&wheels).unwrap();
    fetch(&wheels, &[], "tabulate==0.9.0");
    let wasm = ["--python-version", "3.14", "--implementation", "cp", "--abi", "cp314", "--platform", "pyemscripten_2026_0_wasm32"];
    fetch(&wheels, &wasm, "luau-wasm==0.1a0");
    let (worked, said) = prepare(&["--wheels", text(&wheels), text(&made)]);
    assert!(worked && said.ends_with("(Python 3.14, 2 wheels)\n"), "{said}");
    assert!(prepare(&["--wheels", text(&wheels), text(&made)]).1.ends_with("is up to date\n"));
    let program = format!("pyodide={}", made.join("bin/pyodide").display());
    let options = ["--policy", "pyodide", "--runtime", &program];
    let code = "import luau_wasm, tabulate\nprint(tabulate.tabulate([[1]]), luau_wasm.__file__)\ntry: open(luau_wasm.__file__, 'a')\nexcept OSError: print('read-only')";
    let request = |code: &str| json!({ "code": code, "limits": {"wall": scaled_limit(60_000)} });
    let done = exec_with(&options, request(code));
    done.succeeded().expect(json!({ "output": "-\n1\n- /lib/python3.14/site-packages/luau_wasm/__init__.py\nread-only\n" }));
    let listed = stockade([&["runtimes", "--json"], &options[..]].concat()).output().unwrap();
    let listed: serde_json::Value = serde_json::from_slice(&listed.stdout).unwrap();
    let packages = &listed["runtimes"][0]["packages"];
    assert_eq!(*packages, json!([{"name": "luau-wasm", "version": "0.1a0"}, {"name": "tabulate", "version": "0.9.0"}]), "{listed}");
    // The control has no wheels.
    let without = run(request("import tabulate"));
    assert!(without.error().ends_with("ModuleNotFoundError: No module named 'tabulate'\n"), "{}", without.error());
    // A wheel for another platform is refused, and what was there stays.
    fetch(&wheels, &["--python-version", "3.11", "--platform", "manylinux2014_x86_64"], "markupsafe==3.0.2");
    let (worked, said) = prepare(&["--wheels", text(&wheels), text(&made)]);
    assert!(!worked && said.contains("a wheel does not fit"), "{said}");
    exec_with(&options, request("import tabulate")).succeeded();
}

/// Makes a wheel whose code writes a file as soon as a Python that has it starts.
const MAKES_WHEEL: &str = r#"
import sys, zipfile
about = "early-1.0.dist-info/"
with zipfile.ZipFile(sys.argv[1] + "/early-1.0-py3-none-any.whl", "w") as wheel:
    wheel.writestr("early.pth", "import early\n")
    wheel.writestr("early.py", f"open({sys.argv[2]!r}, 'w')\n")
    wheel.writestr(about + "METADATA", "Metadata-Version: 2.1\nName: early\nVersion: 1.0\n")
    wheel.writestr(about + "WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
    wheel.writestr(about + "RECORD", "early.pth,,\nearly.py,,\n")
"#;

test!(Both, no_code_of_a_wheel_runs_while_it_is_prepared, needs [Long, Pyodide, Other(no_index), Other(no_ensurepip)], seconds 300);
fn no_code_of_a_wheel_runs_while_it_is_prepared() {
    let (wheels, made) = (directory().join("wheels"), directory().join("pyodide"));
    fs::create_dir(&wheels).unwrap();
    let mark = PathBuf::from(format!("/tmp/stockade-wheel-{}", std::process::id()));
    let making = Command::new("/usr/bin/python3").args(["-c", MAKES_WHEEL, text(&wheels), text(&mark)]).status().unwrap();
    assert!(making.success());
    let (worked, said) = prepare(&["--wheels", text(&wheels), text(&made)]);
    assert!(worked && !mark.exists(), "{said}");
    assert!(made.join("site-packages/__pycache__/early.cpython-314.pyc").exists());
    // The control: so it runs in any other Python that has it, as in a sandbox.
    let started = Command::new(made.join("bin/pyodide")).args(["-c", ""]).env("HOME", "/tmp").status().unwrap();
    assert!(started.success() && mark.exists());
    fs::remove_file(mark).unwrap();
}

test!(Both, a_directory_of_others_is_left_untouched, needs [Long, Program("node")], seconds 60);
fn a_directory_of_others_is_left_untouched() {
    let others: PathBuf = directory().join("others");
    fs::create_dir(&others).unwrap();
    write_file(&others.join("file"), "mine");
    for script in ["../scripts/prepare-pyodide", "../scripts/prepare-wasm"] {
        let output = Command::new(script).arg(&others).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && said.contains("it stays untouched"), "{script}: {said}");
    }
    assert_eq!(fs::read_to_string(others.join("file")).unwrap(), "mine");
}

test!(Both, what_lies_where_a_script_is_started_is_not_run, needs [Long, Program("python3"), Other(no_ensurepip)], seconds 120);
fn what_lies_where_a_script_is_started_is_not_run() {
    let (here, made) = (directory().join("here"), directory().join("made"));
    fs::create_dir(&here).unwrap();
    for module in ["ensurepip", "venv", "compileall"] {
        write_file(&here.join(format!("{module}.py")), "open('ran', 'w')");
    }
    let python = |words: &[&str]| Command::new("/usr/bin/python3").args(words).current_dir(&here).status().unwrap();
    assert!(python(&["-c", "import ensurepip"]).success());
    fs::remove_file(here.join("ran")).unwrap();
    for script in ["prepare-wasm", "prepare-data-science"] {
        let script = fs::canonicalize("../scripts").unwrap().join(script);
        // Nothing is fetched, so it ends at pip. The directory is there, and its name ends in a slash.
        fs::create_dir_all(&made).unwrap();
        let mut command = Command::new(&script);
        command.arg(format!("{}/", made.display())).env("PATH", "/usr/bin:/bin").env("PIP_NO_INDEX", "1").current_dir(&here);
        let output = command.output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && said.contains("pip could not install"), "{script:?}: {said}");
        assert!(!here.join("ran").exists(), "{script:?}");
        let left: Vec<_> = fs::read_dir(directory()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert!(!left.iter().any(|name| name.to_string_lossy().starts_with("made.")), "{left:?}");
    }
    let unknown = Command::new("../scripts/prepare-wasm").arg("--unknown").output().unwrap();
    assert_eq!((unknown.status.code(), unknown.stdout.len()), (Some(2), 0));
}

fn no_ensurepip() -> Option<String> {
    let found = Command::new("/usr/bin/python3").args(["-I", "-c", "import ensurepip, venv"]).status().is_ok_and(|status| status.success());
    (!found).then(|| String::from("no python3-venv"))
}

test!(Both, code_that_is_made_from_strings_in_javascript_ends_the_interpreter, needs [Long, Pyodide], seconds 90);
fn code_that_is_made_from_strings_in_javascript_ends_the_interpreter() {
    // A function of Emscripten, called past Pyodide.
    let code = "import ctypes\nprint('before')\nctypes.CDLL(None).emscripten_run_script(b'globalThis.process.exit(0)')\n";
    let done = run(json!({ "code": code }));
    done.expect(json!({ "verdict": "exited", "code": 134, "output": "before\n" }));
    assert!(done.error().contains("the interpreter broke: Code generation from strings disallowed"), "{}", done.error());
}

fn old_node() -> Option<String> {
    let output = Command::new("/usr/bin/node").arg("--version").output().ok()?;
    output.stdout.starts_with(b"v18.").then(|| String::from("Node 18 cannot wait within WebAssembly"))
}

test!(Both, asyncio_waits, needs [Long, Pyodide, Other(old_node)], seconds 90);
fn asyncio_waits() {
    let code = "import asyncio\nasync def later():\n    await asyncio.sleep(0.01)\n    return 'waited'\nprint(asyncio.run(later()))";
    run(json!({ "code": code })).succeeded().expect(json!({ "output": "waited\n" }));
}

/// Looks at an object of JavaScript by a number that Python never had of it.
const FORGES: &str = r#"
import ctypes, js, json
own, names = js.Object, js.Object.getOwnPropertyNames
words = (ctypes.c_uint32 * 10).from_address(id(own))
# In this version of Pyodide the tenth word is the number, and 7 Pyodide's inner interface.
words[9] = 7
print(json.dumps(list(names(own).to_py())))
"#;

test!(Both, a_forged_reference_reaches_nothing_that_reads_files, needs [Long, Pyodide], seconds 90);
fn a_forged_reference_reaches_nothing_that_reads_files() {
    let done = run(json!({ "code": FORGES }));
    let names: Vec<String> = serde_json::from_str(done.output()).unwrap();
    // The control: it is that interface, of which something is left.
    assert!(names.iter().any(|name| name == "runPythonInternal"), "{names:?}");
    for name in ["loadBinaryFile", "initializeNodeSockFS", "initializeStreams", "loadDynlib", "public_api", "packageManager", "tests"] {
        assert!(!names.iter().any(|has| has == name), "{name}: {names:?}");
    }
}

test!(Both, a_host_scratch_has_its_own_path, needs [Long, Pyodide], seconds 90);
fn a_host_scratch_has_its_own_path() {
    let here = scratch();
    write_file(&here.join("data"), "there");
    let code = "import os\nprint(os.getcwd(), open('data').read())\nopen('made', 'w').write('m')";
    let done = run(json!({ "code": code, "scratch": text(&here) }));
    done.succeeded().expect(json!({ "output": format!("{} there\n", here.display()) }));
    assert_eq!(fs::read_to_string(here.join("made")).unwrap(), "m");
}

test!(Both, a_program_without_end_is_a_wall_timeout, needs [Long, Pyodide], seconds 90);
fn a_program_without_end_is_a_wall_timeout() {
    let done = run(json!({ "code": "print('begun')\nwhile True: pass", "limits": {"wall": scaled_limit(15_000)} }));
    done.expect(json!({ "verdict": "wall_timeout", "code": 124, "output": "begun\n" }));
}
