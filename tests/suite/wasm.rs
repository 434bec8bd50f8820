//! The policy `wasm`: modules of WebAssembly behind two walls, Wasmtime's and the sandbox's.
//! Modules are written in the text form, which Wasmtime compiles itself.

use std::{
    fs::{self, Permissions},
    os::unix::fs::PermissionsExt,
};

use base64::{Engine, prelude::BASE64_STANDARD};
use serde_json::{Value, json};

use crate::support::{
    exec::{ExecResult, exec, exec_with, run_with_stdin, scratch, stockade, text, write_file},
    image_store::ImageStore,
    policy_dir::{PolicyDirectory, derived_from},
    runner::test,
    timeouts::scaled_limit,
};

/// A module that ends with status 7.
const SEVEN: &str = "AGFzbQEAAAABCAJgAX8AYAAAAiQBFndhc2lfc25hcHNob3RfcHJldmlldzEJcHJvY19leGl0AAADAgEBBQMBAAEHEwIGbWVtb3J5AgAGX3N0YXJ0AAEKCAEGAEEHEAALAA4EbmFtZQEHAQAEZXhpdA==";

/// A module whose start is `body`, with the functions of WASI that the tests need. `$said` writes
/// so many bytes at 1024 to a descriptor, and `$opened` opens the path of so many bytes at 512 in the first
/// directory, creates it if flag 1 is set, and leaves its descriptor at 8.
fn module(data: &str, body: &str) -> String {
    let import = |name: &str, parameters: &str| {
        format!("(import \"wasi_snapshot_preview1\" \"{name}\" (func ${name} (param {parameters}) (result i32)))\n")
    };
    let imports = [
        import("fd_write", "i32 i32 i32 i32"),
        import("fd_read", "i32 i32 i32 i32"),
        import("args_get", "i32 i32"),
        import("environ_get", "i32 i32"),
        import("path_open", "i32 i32 i32 i32 i32 i64 i64 i32 i32"),
        String::from("(import \"wasi_snapshot_preview1\" \"proc_exit\" (func $exit (param i32)))\n"),
    ];
    format!(
        r#"(module {}
  (memory (export "memory") 2)
  (data (i32.const 512) "{data}")
  (func $said (param $to i32) (param $length i32)
    (i32.store (i32.const 0) (i32.const 1024)) (i32.store (i32.const 4) (local.get $length))
    (drop (call $fd_write (local.get $to) (i32.const 0) (i32.const 1) (i32.const 16))))
  (func $opened (param $length i32) (param $flags i32) (result i32)
    (call $path_open (i32.const 3) (i32.const 1) (i32.const 512) (local.get $length) (local.get $flags)
      (i64.const 66) (i64.const 0) (i32.const 0) (i32.const 8)))
  (func (export "_start") {body}))"#,
        imports.concat()
    )
}

/// Under the policy, with the time that a slow machine needs.
fn run(mut request: Value) -> ExecResult {
    if request["limits"].get("wall").is_none() {
        request["limits"]["wall"] = json!(scaled_limit(30_000));
    }
    exec_with(&["--policy", "wasm"], request)
}

test!(Both, a_module_has_streams_arguments_variables_and_files, needs [Wasm], seconds 60);
fn a_module_has_streams_arguments_variables_and_files() {
    // Arguments and variables are texts one behind the other, each with a NUL byte at its end.
    let body = r#"
    (drop (call $args_get (i32.const 64) (i32.const 1024)))
    (call $said (i32.const 2) (i32.const 14))
    (drop (call $environ_get (i32.const 2048) (i32.const 1024)))
    (call $said (i32.const 2) (i32.const 4096))
    (i32.store (i32.const 0) (i32.const 1024)) (i32.store (i32.const 4) (i32.const 100))
    (drop (call $fd_read (i32.const 0) (i32.const 0) (i32.const 1) (i32.const 32)))
    (call $said (i32.const 1) (i32.load (i32.const 32)))
    (drop (call $opened (i32.const 4) (i32.const 1)))
    (call $said (i32.load (i32.const 8)) (i32.load (i32.const 32)))
    (call $exit (i32.const 3))"#;
    let request = json!({
        "code": module("made", body), "args": ["a", "b"], "stdin": "in", "env": {"DEBUG": "yes"}, "collect": ["*"],
    });
    let done = run(request);
    done.expect(json!({ "verdict": "exited", "code": 3, "output": "in", "started": true, "denials": [] }));
    assert!(done.error().starts_with("main.wasm\0a\0b\0"), "{:?}", done.error());
    assert!(done.error().contains("DEBUG=yes\0"), "{:?}", done.error());
    assert_eq!(done.file("made")["text"], "in");
}

test!(Both, a_binary_module_comes_in_base64, needs [Wasm], seconds 60);
fn a_binary_module_comes_in_base64() {
    run(json!({ "code": {"base64": SEVEN} })).expect(json!({ "verdict": "exited", "code": 7, "error": "" }));
    // Not only a module: any program, in any policy.
    exec(json!({ "code": {"base64": BASE64_STANDARD.encode("print(6*7)")} })).succeeded().expect(json!({ "output": "42\n" }));
    // It is no text, and a policy that stops code of which that cannot be said still lets it run.
    let place = PolicyDirectory::new();
    let stopping = place.write("stopping", &derived_from("wasm", "[screen]\nprocess = \"deny\""));
    let request = json!({ "code": {"base64": SEVEN}, "limits": {"wall": scaled_limit(30_000)} });
    exec_with(&["--policy", &stopping], request).expect(json!({ "verdict": "exited", "code": 7 }));
    run(json!({ "code": "\0asm" })).refused("code_holds_nul", &["{\"base64\": …}"]);
    run(json!({ "code": {"base64": "AGFzb"} })).refused("base64_malformed", &["code: "]);
    run(json!({ "code": {"base64": "AGFzbQ==", "text": "a"} })).refused("request_malformed", &[]);
    run(json!({ "code": 7 })).refused("request_malformed", &["expected a string or {\"base64\": \"…\"}"]);
}

test!(Both, a_module_is_run_from_a_file_and_by_the_program_wasmtime, needs [Wasm], seconds 60);
fn a_module_is_run_from_a_file_and_by_the_program_wasmtime() {
    let here = scratch();
    write_file(&here.join("seven.wasm"), BASE64_STANDARD.decode(SEVEN).unwrap());
    let command = |words: &[&str]| {
        let output = stockade([&["run", "--policy", "wasm"], words].concat()).current_dir(&here).output().unwrap();
        assert_eq!(output.status.code(), Some(7), "{words:?}: {output:?}");
    };
    command(&["seven.wasm"]);
    command(&["--scratch", text(&here), "--", "wasmtime", "seven.wasm"]);
    let mut piped = stockade(["run", "--policy", "wasm", "--language", "wasm", "-"]);
    let output = run_with_stdin(&mut piped, &fs::read(here.join("seven.wasm")).unwrap());
    assert_eq!(output.status.code(), Some(7), "{output:?}");
}

test!(Both, each_end_of_a_module_has_its_own_verdict, needs [Wasm], seconds 90);
fn each_end_of_a_module_has_its_own_verdict() {
    let trap = run(json!({ "code": module("", "unreachable") }));
    trap.expect(json!({ "verdict": "exited", "code": 134, "success": false }));
    assert!(trap.error().contains("wasm trap: wasm `unreachable` instruction executed"), "{}", trap.error());
    let endless = json!({ "code": module("", "(loop $again (br $again))"), "limits": {"wall": scaled_limit(1_000)} });
    run(endless).expect(json!({ "verdict": "wall_timeout", "code": 124 }));
    let broken = run(json!({ "code": "(module (func" }));
    broken.expect(json!({ "verdict": "exited", "code": 1 }));
    assert!(broken.error().contains("main.wasm"), "{}", broken.error());
    let named = run(json!({ "code": "(module (memory (export \"_start\") 1))" }));
    named.expect(json!({ "verdict": "exited", "code": 1 }));
    assert!(named.error().contains("main.wasm") && !named.error().contains("Traceback"), "{}", named.error());
}

test!(Both, the_memory_of_a_module_counts_as_memory, needs [Wasm, Cgroup], seconds 90);
fn the_memory_of_a_module_counts_as_memory() {
    // Writes to so many pages of 64 KiB.
    let fills = |pages: u32| {
        let bytes = pages * 65_536;
        module("", &format!("(drop (memory.grow (i32.const {pages}))) (memory.fill (i32.const 0) (i32.const 1) (i32.const {bytes}))"))
    };
    run(json!({ "code": fills(16_000) })).expect(json!({ "verdict": "out_of_memory", "code": 137 }));
    run(json!({ "code": fills(160) })).succeeded();
}

test!(Both, a_module_opens_no_file_outside_the_directories_that_it_has, needs [Wasm], seconds 60);
fn a_module_opens_no_file_outside_the_directories_that_it_has() {
    let opens = |path: &str| {
        let done = run(
            json!({ "code": module(path, &format!("(call $exit (call $opened (i32.const {}) (i32.const 0)))", path.len())), "files": {"own": "1"} }),
        );
        done["code"].as_u64().unwrap()
    };
    // In WASI 63 is EPERM. The control is a file of scratch.
    assert_eq!(opens("own"), 0);
    // The sandbox alone shows this file to every program.
    let native = exec(json!({ "code": "open('/etc/passwd')" }));
    native.succeeded();
    for path in ["../etc/passwd", "/etc/passwd"] {
        assert_eq!(opens(path), 63, "{path}");
    }
}

test!(Both, a_policy_with_a_second_wall_has_no_language_without_it);
fn a_policy_with_a_second_wall_has_no_language_without_it() {
    for policy in ["wasm", "pyodide"] {
        for language in ["bash", "sh", "node"] {
            exec_with(&["--policy", policy], json!({ "code": "", "language": language })).refused("unknown_language", &[policy]);
            exec(json!({ "code": "", "language": language })).succeeded();
        }
    }
}

test!(Both, a_policy_with_a_second_wall_takes_no_image);
fn a_policy_with_a_second_wall_takes_no_image() {
    let (store, place) = (ImageStore::new(), PolicyDirectory::new());
    store.layer("fake", |tree| {
        fs::create_dir(tree.join("bin")).unwrap();
        for name in ["pyodide", "wasmtime"] {
            let program = tree.join("bin").join(name);
            fs::write(&program, "#!/bin/sh\necho native\n").unwrap();
            fs::set_permissions(&program, Permissions::from_mode(0o755)).unwrap();
        }
    });
    store.image("fake", &["programs", "fake"], json!({}));
    for policy in ["wasm", "pyodide"] {
        let request = json!({ "code": "", "image": "fake" });
        store.exec_with(&["--policy", policy], request.clone()).refused("image_not_allowed", &[policy]);
        // The control: a policy that takes images.
        let taking = place.write(policy, &derived_from(policy, "[filesystem]\nimages = { add = [\"*\"] }"));
        store.exec_with(&["--policy", &taking], request).expect(json!({ "output": "native\n" }));
    }
}

test!(Both, bytes_that_are_no_text_count_as_code_that_nobody_reads);
fn bytes_that_are_no_text_count_as_code_that_nobody_reads() {
    let done = |policy: &str, language: &str, code: &[u8]| {
        exec_with(&["--policy", policy], json!({ "code": {"base64": BASE64_STANDARD.encode(code)}, "language": language }))
    };
    let has = |done: &ExecResult, rule: &str| {
        done["findings"].as_array().is_some_and(|findings| findings.iter().any(|finding| finding["rule"] == rule))
    };
    // Bash leaves out NUL bytes, and so would read another word than a screener that kept them.
    for (code, is_text) in [(&b"echo\nsu\0do true"[..], false), (b"sudo tru\xe9", false), (b"sudo true", true)] {
        let held = done("review", "bash", code);
        assert!(has(&held, "screener") != is_text && has(&held, "system"), "{}", held.brief());
    }
    let latin = b"# coding: latin-1\n#\xff\nprint(6*7)\n";
    done("strict", "python", latin).expect(json!({ "verdict": "screened", "started": false }));
    let noted = done("default", "python", latin);
    noted.succeeded().expect(json!({ "output": "42\n" }));
    assert!(has(&noted, "screener"), "{}", noted.brief());
    // The control: the same as text.
    assert_ne!(done("strict", "python", b"# coding: latin-1\nprint(6*7)\n")["verdict"], "screened");
    assert!(has(&done("strict", "python", b"#\xff\nimport ctypes\n"), "native"));
}
