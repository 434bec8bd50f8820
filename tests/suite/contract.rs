//! The request and the result, field by field, and the exit statuses of `exec`.

use std::{
    collections::BTreeSet,
    fs,
    os::unix::fs::{MetadataExt, symlink},
    time::Duration,
};

use base64::{Engine, prelude::BASE64_STANDARD};
use serde_json::{Value, json};

use crate::support::{
    exec::{
        ExecResult, OWNER, chown_to_owner, exec, exec_bytes, exec_with, python, run_under, run_with_stdin, scratch, scratch_named, start,
        stockade, text, token, write_file,
    },
    policy_dir::{PolicyDirectory, derived},
    runner::{directory, is_root, test},
    timeouts::{scaled, scaled_limit},
};

test!(Both, output_error_and_code_are_the_programs);
fn output_error_and_code_are_the_programs() {
    let done = python("import sys\nprint('to stdout')\nprint('to stderr', file=sys.stderr)\nsys.exit(3)");
    done.expect(json!({
        "output": "to stdout\n", "error": "to stderr\n", "code": 3, "success": false, "verdict": "exited", "reason": null, "started": true,
        "signal": null, "limits_hit": [], "denials": [], "denials_omitted": 0, "files": [], "bytes": {"output": 10, "error": 10},
        "truncated": {"output": false, "error": false}, "lossy": {"output": false, "error": false}, "schema": 1, "id": null,
    }));
    python("print(6*7)").succeeded().expect(json!({"output": "42\n", "error": ""}));
}

test!(Both, a_result_has_every_field_of_the_contract);
fn a_result_has_every_field_of_the_contract() {
    let done = python("");
    let keys = |value: &Value| value.as_object().unwrap().keys().cloned().collect::<BTreeSet<_>>();
    let promised = [
        "output",
        "error",
        "code",
        "success",
        "verdict",
        "reason",
        "started",
        "signal",
        "duration_ms",
        "limits_hit",
        "bytes",
        "truncated",
        "lossy",
        "usage",
        "limits",
        "findings",
        "modules",
        "denials",
        "egress",
        "files",
        "receipt",
        "policy",
        "audit",
        "schema",
        "id",
    ];
    for field in promised {
        assert!(keys(&done.result).contains(field), "{field} is missing: {}", done.line);
    }
    let limits = [
        "wall_ms",
        "cpu_ms",
        "memory_bytes",
        "address_space_bytes",
        "processes",
        "cpus_milli",
        "file_size_bytes",
        "open_files",
        "stack_bytes",
        "scratch_size_bytes",
        "scratch_files",
        "tmp_size_bytes",
        "output_size_bytes",
        "collect_size_bytes",
    ];
    assert_eq!(keys(&done["limits"]), limits.map(String::from).into());
    for field in ["memory_peak_bytes", "processes_peak", "cpu_user_ms", "cpu_system_ms", "scratch_bytes"] {
        assert!(keys(&done["usage"]).contains(field), "{field}");
    }
    for field in ["name", "origin", "sha256"] {
        assert!(done["policy"][field].is_string(), "{field}");
    }
    for field in ["allowed", "denied", "failed"] {
        assert_eq!(done["egress"][field], json!([]), "{field}");
    }
    // A refusal has the same fields.
    let refused = exec(json!({"code": "", "language": "klingon"}));
    for field in promised {
        assert!(keys(&refused.result).contains(field), "{field} is missing: {}", refused.line);
    }
}

test!(Both, every_number_of_a_result_is_an_integer);
fn every_number_of_a_result_is_an_integer() {
    fn check(value: &Value) {
        match value {
            Value::Number(number) => assert!(number.is_i64() || number.is_u64(), "{number}"),
            Value::Array(items) => items.iter().for_each(check),
            Value::Object(fields) => fields.values().for_each(check),
            _ => {}
        }
    }
    check(&exec(json!({"code": "open('f','w').write('x')", "collect": ["f"], "limits": {"cpus": 0.5}})).result);
}

test!(Both, a_receipt_names_every_layer_and_how_it_is_known);
fn a_receipt_names_every_layer_and_how_it_is_known() {
    let done = python("");
    let receipt = &done["receipt"];
    assert_eq!(receipt["mode"], if is_root() { "root" } else { "rootless" });
    assert!(receipt["kernel"].as_str().is_some_and(|kernel| !kernel.is_empty()));
    assert_eq!(receipt["plan_sha256"].as_str().map(str::len), Some(64));
    assert!(receipt["taken_us"]["inside"].is_u64() && receipt["taken_us"]["outside"].is_u64(), "{receipt}");
    let layers = receipt["layers"].as_array().unwrap();
    let known = |name: &str| layers.iter().find(|layer| layer["layer"] == name).map(|layer| layer["known"].clone());
    for (layer, how) in [
        ("user_namespace", "read_back"),
        ("namespaces", "read_back"),
        ("mounts", "read_back"),
        ("capabilities", "read_back"),
        ("seccomp", "probed"),
        ("landlock", "probed"),
        ("descriptors", "read_back"),
    ] {
        assert_eq!(known(layer), Some(json!(how)), "{layer}: {receipt}");
    }
    for layer in ["rlimits", "network", "cgroup"] {
        assert!(known(layer).is_some(), "{layer}: {receipt}");
    }
    let degraded = receipt["degraded"].as_array().unwrap();
    let as_layers: Vec<&Value> = layers.iter().filter(|layer| layer["known"] == "degraded").map(|layer| &layer["layer"]).collect();
    assert_eq!(degraded.iter().collect::<Vec<_>>(), as_layers);
    assert!(!is_root() || degraded.is_empty(), "{receipt}");
}

test!(Both, what_holds_in_place_of_a_cgroup_stands_in_the_receipt_and_is_in_force);
fn what_holds_in_place_of_a_cgroup_stands_in_the_receipt_and_is_in_force() {
    let code = "import resource as r, json\nprint(json.dumps([r.getrlimit(r.RLIMIT_DATA)[0], r.getrlimit(r.RLIMIT_CPU)[0]]))";
    let done = exec(json!({"code": code, "limits": {"memory": "300MiB", "cpu": "7s"}}));
    done.succeeded();
    let detail = |name: &str| {
        let layers = done["receipt"]["layers"].as_array().unwrap();
        layers.iter().find(|layer| layer["layer"] == name).unwrap()["detail"].as_str().unwrap().to_owned()
    };
    let (cgroup, rlimits) = (detail("cgroup"), detail("rlimits"));
    if done["receipt"]["degraded"] == json!(["cgroup"]) {
        assert!(cgroup.contains("in its place RLIMIT_DATA and RLIMIT_CPU"), "{cgroup}");
        assert!(rlimits.contains(&format!("RLIMIT_DATA={} RLIMIT_NPROC=", 300 << 20)) && rlimits.contains("RLIMIT_CPU=7"), "{rlimits}");
        assert_eq!(done.json(), json!([300 << 20, 7]));
        assert!(cgroup.contains("what all processes hold of memory is added up") && detail("memory").contains("every 50 ms"));
    } else {
        // The control: where there is one, nothing else is said to hold.
        assert!(!cgroup.contains("in its place") && !rlimits.contains("RLIMIT_DATA"), "{cgroup}; {rlimits}");
        assert_eq!(done.json()[0], -1);
        assert!(!done["receipt"]["layers"].as_array().unwrap().iter().any(|layer| layer["layer"] == "memory"));
    }
}

test!(Both, whatever_is_printed_the_result_is_one_line_of_utf8);
fn whatever_is_printed_the_result_is_one_line_of_utf8() {
    let all = "import sys\nsys.stdout.buffer.write(bytes(range(256)) * 3)\nsys.stderr.buffer.write(b'\\xed\\xa0\\x80 \\xff\\r\\n\\x1b]0;title\\x07')";
    let done = python(all);
    done.succeeded().expect(json!({"bytes": {"output": 768, "error": 17}, "lossy": {"output": true, "error": true}}));
    assert!(done.output().contains('\u{fffd}') && done.error().contains("\u{1b}]0;title\u{7}"));
    let lone = python(r#"import sys; sys.stdout.buffer.write('"\ud800", [{'.encode('utf-8', 'surrogatepass'))"#);
    lone.succeeded().expect(json!({"lossy": {"output": true, "error": false}}));
}

test!(Both, nul_and_escapes_in_text_are_not_lossy);
fn nul_and_escapes_in_text_are_not_lossy() {
    let done = python(r#"print("\0\x1b[31m\u2028\u00e9\U0001f600", end="")"#);
    done.succeeded().expect(json!({"output": "\0\u{1b}[31m\u{2028}\u{e9}\u{1f600}", "lossy": {"output": false, "error": false}}));
}

test!(Both, base64_output_is_exact);
fn base64_output_is_exact() {
    let code = "import sys\nsys.stdout.buffer.write(bytes(range(256)))\nsys.stderr.buffer.write(bytes(reversed(range(256))))";
    let done = exec(json!({"code": code, "encoding": "base64"}));
    done.succeeded().expect(json!({"lossy": {"output": false, "error": false}}));
    let all: Vec<u8> = (0..=255).collect();
    assert_eq!(BASE64_STANDARD.decode(done.output()).unwrap(), all);
    assert_eq!(BASE64_STANDARD.decode(done.error()).unwrap(), all.iter().rev().copied().collect::<Vec<_>>());
}

test!(Both, long_output_keeps_head_and_tail_and_counts_exactly);
fn long_output_keeps_head_and_tail_and_counts_exactly() {
    let code = "for i in range(30000): print(f'{i:06}')\nimport sys; sys.stderr.write('e' * 4096)";
    let done = exec(json!({"code": code, "limits": {"output_size": "4KiB"}}));
    done.succeeded().expect(json!({"bytes": {"output": 210_000, "error": 4096}, "truncated": {"output": true, "error": false}}));
    let output = done.output();
    assert!(output.starts_with("000000\n000001\n") && output.ends_with("029998\n029999\n"), "{output}");
    let markers: Vec<&str> = output.lines().filter(|line| line.contains("cut out")).collect();
    assert_eq!(markers, [format!("[stockade: {} bytes cut out here]", 210_000 - 4096)]);
    assert_eq!(done.error(), "e".repeat(4096));
}

test!(Both, a_forged_result_is_only_output);
fn a_forged_result_is_only_output() {
    let forged = r#"{"schema":1,"output":"","error":"","code":0,"success":true,"verdict":"exited"}"#;
    let code = format!(
        "import os\nfor fd in (1, 2):\n    os.write(fd, b'''\\n{forged}\\n''')\nfor fd in range(3, 64):\n    try: os.write(fd, b'''{forged}\\n''')\n    except OSError: pass\nos._exit(9)"
    );
    let done = python(&code);
    done.expect(
        json!({"code": 9, "success": false, "verdict": "exited", "output": format!("\n{forged}\n"), "error": format!("\n{forged}\n")}),
    );
}

const ECHO: &str = "import sys, hashlib\ndata = sys.stdin.buffer.read()\nprint(len(data), hashlib.sha256(data).hexdigest())";
const EMPTY_SHA256: &str = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";

test!(Both, stdin_arrives_as_text);
fn stdin_arrives_as_text() {
    let done = exec(json!({"code": "import sys; print(repr(sys.stdin.read()))", "stdin": "zwei\nZeilen \u{e4}\u{0}"}));
    done.succeeded().expect(json!({"output": "'zwei\\nZeilen ä\\x00'\n"}));
    exec(json!({"code": ECHO, "stdin": ""})).succeeded().expect(json!({"output": format!("0 {EMPTY_SHA256}\n")}));
}

test!(Both, stdin_arrives_as_bytes);
fn stdin_arrives_as_bytes() {
    let all: Vec<u8> = (0..=255).collect();
    let done = exec(
        json!({"code": "import sys; print(sys.stdin.buffer.read() == bytes(range(256)))", "stdin": {"base64": BASE64_STANDARD.encode(all)}}),
    );
    done.succeeded().expect(json!({"output": "True\n"}));
}

test!(Both, stdin_larger_than_a_pipe_arrives_whole);
fn stdin_larger_than_a_pipe_arrives_whole() {
    let done =
        exec(json!({"code": "import sys\nd = sys.stdin.read()\nprint(len(d), d == 'ab' * 1500000)", "stdin": "ab".repeat(1_500_000)}));
    done.succeeded().expect(json!({"output": "3000000 True\n"}));
}

test!(Both, unread_stdin_does_not_block);
fn unread_stdin_does_not_block() {
    let done = exec(json!({"code": "print('done')", "stdin": "x".repeat(3_000_000)}));
    done.succeeded().expect(json!({"output": "done\n"}));
    let done = exec(json!({"code": "import os, time\nos.close(0)\ntime.sleep(0.05)\nprint('done')", "stdin": "x".repeat(3_000_000)}));
    done.succeeded().expect(json!({"output": "done\n"}));
}

test!(Both, absent_stdin_is_dev_null);
fn absent_stdin_is_dev_null() {
    let done = python("import os, sys\ns = os.fstat(0)\nprint(os.major(s.st_rdev), os.minor(s.st_rdev), repr(sys.stdin.read()))");
    done.succeeded().expect(json!({"output": "1 3 ''\n"}));
}

test!(Both, args_arrive_unchanged);
fn args_arrive_unchanged() {
    let args = ["", " ", "a b", "--flag=\"x\"", "$HOME `id` ; exit", "line\nbreak", "\u{fc}\u{1f600}", "{file}", "-"];
    let done = exec(json!({"code": "import json, sys; print(json.dumps(sys.argv[1:]))", "args": args}));
    assert_eq!(done.succeeded().json(), json!(args));
    let done = exec(json!({"language": "bash", "code": "printf '%s|' \"$@\"", "args": args}));
    done.succeeded().expect(json!({"output": format!("{}|", args.join("|"))}));
}

test!(Both, accepted_variables_arrive);
fn accepted_variables_arrive() {
    let code = "import os, json; print(json.dumps([os.environ.get(n) for n in ('LANG', 'LC_ALL', 'DEBUG', 'TERM', 'HOME', 'TMPDIR', 'TZ', 'PATH')]))";
    let done = exec(json!({"code": code, "env": {"LC_ALL": "C", "DEBUG": "a=b c\n", "TERM": ""}}));
    assert_eq!(
        done.succeeded().json(),
        json!(["C.UTF-8", "C", "a=b c\n", "", "/home/sandbox", "/tmp", "UTC", "/usr/local/bin:/usr/bin:/bin:/run/stockade/bin"])
    );
}

test!(Both, other_variables_are_refused_by_name);
fn other_variables_are_refused_by_name() {
    for name in ["LD_PRELOAD", "SECRET", "PATH", "HOME", "BASH_ENV", "lang"] {
        exec(json!({"code": "", "env": {name: "x"}})).refused("env_not_accepted", &[&format!("`{name}`"), "accept", "[environment]"]);
    }
}

test!(Both, values_of_variables_appear_nowhere_but_in_the_program);
fn values_of_variables_appear_nowhere_but_in_the_program() {
    let secret = token("env");
    let done = exec(json!({"code": "import os; print(len(os.environ['DEBUG']))", "env": {"DEBUG": secret}}));
    done.succeeded().expect(json!({"output": format!("{}\n", secret.len())}));
    assert!(!done.line.contains(&secret) && !done.stderr.contains(&secret), "{}", done.line);
}

test!(Both, files_are_written_before_the_start);
fn files_are_written_before_the_start() {
    let all: Vec<u8> = (0..=255).collect();
    let code = "import os\nfrom package.inner import value\nprint(value, open('data.bin','rb').read() == bytes(range(256)), open('a/b/c/d.txt').read(), os.stat('empty').st_size, oct(os.stat('empty').st_mode & 0o777))";
    let files = json!({
        "data.bin": {"base64": BASE64_STANDARD.encode(all)}, "a/b/c/d.txt": "deep\u{e9}", "empty": "",
        "package/__init__.py": "", "package/inner.py": "value = 'imported'",
    });
    let done = exec(json!({"code": code, "files": files}));
    done.succeeded().expect(json!({"output": "imported True deepé 0 0o644\n"}));
}

test!(Both, files_may_replace_those_of_a_host_scratch);
fn files_may_replace_those_of_a_host_scratch() {
    let scratch = scratch();
    write_file(&scratch.join("old"), "a much longer text than the new one");
    let done = exec(json!({"code": "print(open('old').read())", "scratch": text(&scratch), "files": {"old": "new", "dir/new": "x"}}));
    done.succeeded().expect(json!({"output": "new\n"}));
    assert_eq!(fs::read_to_string(scratch.join("dir/new")).unwrap(), "x");
}

test!(Both, matching_files_are_collected);
fn matching_files_are_collected() {
    let code = "import os\nos.makedirs('out/deep')\nopen('out/a.txt','w').write('alpha')\nopen('out/deep/b.txt','w').write('')\nopen('out/c.bin','wb').write(b'\\xff\\x00')\nopen('other.txt','w').write('x')";
    let done = exec(json!({"code": code, "collect": ["out/**/*.txt", "out/*.bin", "nothing/*"]}));
    done.succeeded();
    assert_eq!(
        done["files"],
        json!([
            {"path": "out/a.txt", "size": 5, "sha256": "8ed3f6ad685b959ead7022518e1af76cd816f8e8ec7ccdda1ed4018e8f2223f8", "text": "alpha"},
            {"path": "out/c.bin", "size": 2, "sha256": "ea5dbf9596d187e9500f23e9a680109475341cf4e81f7e043f7d97152c10772f", "base64": "/wA="},
            {"path": "out/deep/b.txt", "size": 0, "sha256": EMPTY_SHA256, "text": ""},
        ])
    );
}

test!(Both, files_are_collected_after_a_limit_ended_the_run);
fn files_are_collected_after_a_limit_ended_the_run() {
    let code = "open('partial.txt','w').write('so far')\nprint('said', flush=True)\nwhile True: pass";
    let done = exec(json!({"code": code, "collect": ["*.txt"], "limits": {"wall": scaled_limit(300)}}));
    done.expect(json!({"verdict": "wall_timeout", "code": 124, "output": "said\n"}));
    assert_eq!(done.file("partial.txt")["text"], "so far");
}

test!(Both, files_beyond_collect_size_are_named_but_omitted);
fn files_beyond_collect_size_are_named_but_omitted() {
    let code = "for name, size in (('a', 600), ('b', 600), ('c', 300)): open(name,'w').write(name * size)";
    let done = exec(json!({"code": code, "collect": ["[abc]"], "limits": {"collect_size": "1KiB"}}));
    done.succeeded();
    assert_eq!(done.file("a")["text"], "a".repeat(600));
    assert_eq!(*done.file("b"), json!({"path": "b", "size": 600, "sha256": null, "omitted": "collect_size"}));
    assert_eq!(done.file("c")["size"], 300);
}

test!(Both, only_regular_files_are_collected);
fn only_regular_files_are_collected() {
    let scratch = scratch();
    let outside = directory().join("outside.txt");
    let secret = token("link");
    fs::write(&outside, &secret).unwrap();
    symlink(&outside, scratch.join("final.txt")).unwrap();
    symlink(directory(), scratch.join("way")).unwrap();
    symlink("loop.txt", scratch.join("loop.txt")).unwrap();
    symlink("..", scratch.join("up")).unwrap();
    let made = std::process::Command::new("mkfifo").arg(scratch.join("fifo.txt")).status().unwrap();
    assert!(made.success());
    let _socket = std::os::unix::net::UnixListener::bind(scratch.join("socket.txt")).unwrap();
    fs::create_dir(scratch.join("directory.txt")).unwrap();
    if is_root() {
        let made = std::process::Command::new("mknod").arg(scratch.join("device.txt")).args(["c", "1", "5"]).status().unwrap();
        assert!(made.success());
    }
    write_file(&scratch.join("real.txt"), "real");
    let code =
        "import os\nos.symlink('/etc/passwd', 'passwd.txt')\nos.symlink('/proc/self/environ', 'proc.txt')\nos.link('real.txt', 'hard.txt')";
    let done = exec(json!({"code": code, "scratch": text(&scratch), "collect": ["**/*.txt", "*.txt", "way/*", "up/*"]}));
    done.succeeded();
    let paths: Vec<&str> = done["files"].as_array().unwrap().iter().map(|file| file["path"].as_str().unwrap()).collect();
    assert_eq!(paths, ["hard.txt", "real.txt"]);
    assert!(!done.line.contains(&secret));
}

test!(Both, a_file_swapped_for_a_link_is_not_collected_through_it);
/// A background process that outlives the program exchanges a file and a link as fast
/// as it can; whatever was collected, it was never the link's target.
fn a_file_swapped_for_a_link_is_not_collected_through_it() {
    let scratch = scratch();
    let secret = token("race");
    let outside = directory().join("outside.txt");
    fs::write(&outside, &secret).unwrap();
    let code = format!(
        "import os\nif os.fork() == 0:\n    while True:\n        open('f.new','w').write('mine'); os.rename('f.new','f.txt')\n        os.symlink({:?}, 'f.new'); os.rename('f.new','f.txt')\nwhile not os.path.lexists('f.txt'): pass",
        text(&outside)
    );
    for _ in 0..5 {
        let done = exec(json!({"code": code, "scratch": text(&scratch), "collect": ["f.txt"]}));
        assert!(!done.line.contains(&secret), "{}", done.line);
    }
}

test!(Both, deep_trees_and_sparse_files_are_collected_in_bounds);
fn deep_trees_and_sparse_files_are_collected_in_bounds() {
    let code = "import os\ntop = os.getcwd()\nfor i in range(200):\n    os.mkdir('d'); os.chdir('d')\n    if i == 20: open('near.txt','w').write('near')\nopen('far.txt','w').write('far')\nos.chdir(top)\nwith open('sparse.txt','w') as f: f.truncate(100 << 20)";
    let done = exec(json!({"code": code, "collect": ["**/*.txt", "*.txt"]}));
    done.succeeded();
    let near = format!("{}near.txt", "d/".repeat(21));
    assert_eq!(done.file(&near)["text"], "near");
    assert_eq!(*done.file("sparse.txt"), json!({"path": "sparse.txt", "size": 100 << 20, "sha256": null, "omitted": "collect_size"}));
}

test!(Both, names_that_are_not_utf_8_are_marked_where_they_are_collected);
fn names_that_are_not_utf_8_are_marked_where_they_are_collected() {
    let code = "for name in b'n\\xfe', b'n\\xff', 'n\\ufffd': open(name, 'w').write(ascii(name))";
    let done = exec(json!({"code": code, "collect": ["n*"]}));
    done.succeeded();
    let seen: Vec<_> =
        done["files"].as_array().unwrap().iter().map(|file| (&file["path"], &file["lossy"], file["text"].as_str())).collect();
    let path = json!("n\u{fffd}");
    // The first is the control: a plain name.
    let wanted =
        [(&path, &Value::Null, Some("'n\\ufffd'")), (&path, &json!(true), Some("b'n\\xfe'")), (&path, &json!(true), Some("b'n\\xff'"))];
    assert_eq!(seen, wanted);
}

test!(Both, a_directory_that_cannot_be_collected_from_is_named);
fn a_directory_that_cannot_be_collected_from_is_named() {
    let code = "import os\nfor name in 'out', 'other':\n    os.mkdir(name); open(name + '/a.txt', 'w').write('x'); os.chmod(name, 0)";
    let done = exec(json!({"code": code, "collect": ["out/*.txt"]}));
    done.succeeded();
    if is_root() {
        // Root's launcher reads it all the same.
        assert_eq!(done.file("out/a.txt")["text"], "x");
    } else {
        let omitted = json!([{"path": "out/", "size": 0, "sha256": null, "omitted": "a directory that cannot be read"}]);
        assert_eq!(done["files"], omitted);
    }
    // A later run, which finds it closed, reports the same; but nothing of what the policy hides.
    let scratch = scratch();
    let code = "import os\nbelow = ['out/below', '.env/below']\nfor name in below: os.makedirs(name); open(name + '/a.txt', 'w').write('x')\nfor name in below: os.chmod(name, 0)";
    let ask = |code: &str| exec(json!({"code": code, "scratch": text(&scratch), "collect": ["**/*.txt"]}));
    // An ordinary user's launcher ends it, as it cannot count what is in there.
    let first = ask(code);
    let later = ask("");
    let paths = |done: &ExecResult| done["files"].as_array().unwrap().iter().map(|file| file["path"].to_string()).collect::<Vec<_>>();
    assert_eq!(paths(&first), ["\".env/below/\"", "\"out/below/\""], "{}", first.brief());
    later.succeeded();
    assert_eq!(paths(&later), ["\"out/below/\""], "{}", later.brief());
}

test!(Both, a_file_that_grew_in_vain_is_not_in_the_collection);
fn a_file_that_grew_in_vain_is_not_in_the_collection() {
    // No glob, no files: nothing of the scratch is collected.
    let done = python("open('f','w').write('x')");
    done.succeeded().expect(json!({"files": []}));
}

test!(Both, narrowed_limits_are_in_force_and_in_the_result);
fn narrowed_limits_are_in_force_and_in_the_result() {
    let limits = json!({
        "wall": "5min", "cpu": "4min", "memory": "96MiB", "address_space": "2GiB", "processes": 9, "cpus": 0.5, "file_size": "3MiB", "open_files": 32,
        "stack": "4MiB", "scratch_size": "6MiB", "scratch_files": 100, "tmp_size": "5MiB", "output_size": "8KiB", "collect_size": "9KiB",
    });
    let code = "import resource as r, os, json\nget = lambda n: r.getrlimit(getattr(r, n))[0]\nt = os.statvfs('/tmp'); s = os.statvfs('.')\nprint(json.dumps([get('RLIMIT_AS'), get('RLIMIT_FSIZE'), get('RLIMIT_NOFILE'), get('RLIMIT_STACK'), t.f_blocks * t.f_frsize // (1 << 20), s.f_blocks * s.f_frsize, s.f_files]))";
    let done = exec(json!({"code": code, "limits": limits}));
    assert_eq!(done.succeeded().json(), json!([2u64 << 30, 3 << 20, 32, 4 << 20, 5, 6 << 20, 101]));
    assert_eq!(
        done["limits"],
        json!({
            "wall_ms": 300_000, "cpu_ms": 240_000, "memory_bytes": 96 << 20, "address_space_bytes": 2u64 << 30, "processes": 9, "cpus_milli": 500,
            "file_size_bytes": 3 << 20, "open_files": 32, "stack_bytes": 4 << 20, "scratch_size_bytes": 6 << 20, "scratch_files": 100,
            "tmp_size_bytes": 5 << 20, "output_size_bytes": 8 << 10, "collect_size_bytes": 9 << 10,
        })
    );
}

test!(Both, a_limit_above_the_maximum_is_refused);
fn a_limit_above_the_maximum_is_refused() {
    exec(json!({"code": "", "limits": {"wall": "11min"}}))
        .refused("limit_above_maximum", &["limits.wall", "11min", "10min", "`default`", "[limits.max]"]);
    exec(json!({"code": "", "limits": {"memory": "none"}})).refused("limit_above_maximum", &["limits.memory", "4GiB"]);
    exec(json!({"code": "", "limits": {"processes": 513}})).refused("limit_above_maximum", &["limits.processes", "512"]);
    exec(json!({"code": "", "limits": {"wall": "10min", "processes": 512}})).succeeded();
}

test!(Both, sizes_of_tmpfs_are_lowered_with_memory_unless_the_request_states_them);
fn sizes_of_tmpfs_are_lowered_with_memory_unless_the_request_states_them() {
    let code = "import os, json
sizes = {place: os.statvfs(place).f_frsize * os.statvfs(place).f_blocks for place in ('/tmp', '/scratch')}
try: open('/scratch/large', 'wb').write(bytes(26 << 20))
except OSError as error: print(json.dumps([sizes['/tmp'] >> 10, sizes['/scratch'] >> 10, error.errno]))";
    let done = exec(json!({"code": code, "limits": {"memory": "100MiB"}}));
    let sizes: Vec<u64> = serde_json::from_value(done.succeeded().json()).unwrap();
    // The root directory of the sandbox is on the tmpfs of /tmp, with what the set-up puts there.
    assert!((25 << 10..(25 << 10) + 100).contains(&sizes[0]) && sizes[1..] == [25 << 10, 28], "{sizes:?}: {}", done.brief());
    assert_eq!((&done["limits"]["memory_bytes"], &done["limits"]["tmp_size_bytes"]), (&json!(100 << 20), &json!(25 << 20)));
    assert_eq!(done["limits"]["scratch_size_bytes"], 25 << 20);
    assert_eq!(done["limits_hit"], json!(["scratch_size"]));
    let refused = |limits: Value| {
        exec(json!({"code": "", "limits": limits})).refused("tmpfs_above_memory", &["tmp_size", "scratch_size", "memory"]);
    };
    refused(json!({"memory": "128MiB", "scratch_size": "128MiB"}));
    refused(json!({"memory": "128MiB", "scratch_size": "64MiB", "tmp_size": "64MiB"}));
    refused(json!({"scratch_size": "500MiB"}));
    let output = stockade(["run", "-q", "--memory", "100m", "df", "-k", "--output=size", "/scratch"]).output().unwrap();
    assert_eq!((output.status.code(), String::from_utf8_lossy(&output.stdout).lines().nth(1).map(str::trim)), (Some(0), Some("25600")));
}

test!(Both, no_limit_is_null);
fn no_limit_is_null() {
    let done = exec(json!({"code": "", "limits": {"cpu": "none"}}));
    assert_eq!((&done["limits"]["cpu_ms"], &done["limits"]["address_space_bytes"]), (&Value::Null, &Value::Null));
}

test!(Both, id_and_labels_are_echoed);
fn id_and_labels_are_echoed() {
    let done = exec(json!({"code": "", "id": "run \u{e9} \"7\"\n", "labels": {"agent": "a\u{1f600}", "": "x"}}));
    done.succeeded().expect(json!({"id": "run é \"7\"\n", "labels": {"agent": "a\u{1f600}", "": "x"}}));
}

test!(Both, id_is_echoed_by_a_refusal);
fn id_is_echoed_by_a_refusal() {
    exec(json!({"code": "", "id": "x", "language": "klingon"})).refused("unknown_language", &["klingon"]).expect(json!({"id": "x"}));
}

test!(Both, a_scratch_must_lie_below_the_ceiling);
fn a_scratch_must_lie_below_the_ceiling() {
    let (ceiling, beside) = (scratch_named("agent"), scratch_named("agent-2"));
    let below = ceiling.join("below");
    fs::create_dir(&below).unwrap();
    chown_to_owner(&below);
    let options = ["--scratch", text(&ceiling)];
    let ask = |scratch: &str| exec_with(&options, json!({"code": "import os; print(os.getcwd())", "scratch": scratch}));
    ask(text(&ceiling)).succeeded().expect(json!({"output": format!("{}\n", text(&ceiling))}));
    ask(text(&below)).succeeded().expect(json!({"output": format!("{}\n", text(&below))}));
    for outside in [text(&beside), &format!("{}/..", text(&ceiling)), &format!("{}/../agent-2", text(&ceiling)), text(&directory()), "/"] {
        ask(outside).refused("scratch_outside_ceiling", &[outside, text(&ceiling)]);
    }
    // A link below the ceiling that leads out of it: of root's it is followed so far.
    symlink(&beside, ceiling.join("link")).unwrap();
    let reason = if is_root() { "scratch_outside_ceiling" } else { "scratch_foreign_link" };
    ask(&format!("{}/link", text(&ceiling))).refused(reason, &[text(&beside)]);
}

test!(Both, the_ceiling_is_the_scratch_of_a_request_without_one);
fn the_ceiling_is_the_scratch_of_a_request_without_one() {
    let ceiling = scratch();
    exec_with(&["--scratch", text(&ceiling)], json!({"code": "open('made','w').write('x')"})).succeeded();
    assert!(ceiling.join("made").exists());
}

test!(Both, a_private_scratch_vanishes);
fn a_private_scratch_vanishes() {
    let code = "import os; print(os.getcwd(), os.path.exists('mark')); open('mark','w').write('x')";
    for _ in 0..2 {
        python(code).succeeded().expect(json!({"output": "/scratch False\n"}));
    }
}

test!(Both, a_host_scratch_stands_at_its_own_path_and_is_the_working_directory);
fn a_host_scratch_stands_at_its_own_path_and_is_the_working_directory() {
    let scratch = scratch();
    write_file(&scratch.join("input"), "from the host");
    let code = format!("import os; print(os.getcwd(), open('input').read()); open('{}/result','w').write('back')", text(&scratch));
    exec(json!({"code": code, "scratch": text(&scratch)}))
        .succeeded()
        .expect(json!({"output": format!("{} from the host\n", text(&scratch))}));
    assert_eq!(fs::read_to_string(scratch.join("result")).unwrap(), "back");
}

test!(Both, files_in_a_host_scratch_belong_to_its_owner);
fn files_in_a_host_scratch_belong_to_its_owner() {
    let scratch = scratch();
    write_file(&scratch.join("mine"), "x");
    let code = "import os\nprint(os.getuid(), os.stat('mine').st_uid, os.stat('.').st_uid)\nopen('new','w').write('x'); os.mkdir('d'); os.symlink('x','l'); open('mine','a').write('y')";
    let done = exec(json!({"code": code, "scratch": text(&scratch), "files": {"given": "x"}}));
    done.succeeded().expect(json!({"output": "1000 1000 1000\n"}));
    let owner = if is_root() { OWNER } else { nix::unistd::getuid().as_raw() };
    for name in ["new", "d", "l", "mine", "given"] {
        assert_eq!(fs::symlink_metadata(scratch.join(name)).unwrap().uid(), owner, "{name}");
    }
}

test!(Both, the_program_file_has_its_own_name_and_is_gone_afterwards);
fn the_program_file_has_its_own_name_and_is_gone_afterwards() {
    let scratch = scratch();
    let code = "import sys, os; print(os.path.basename(sys.argv[0]), sorted(os.listdir('.')))";
    let names: BTreeSet<String> = (0..3)
        .map(|_| {
            let done = exec(json!({"code": code, "scratch": text(&scratch)}));
            let name = done.succeeded().output().split(' ').next().unwrap().to_owned();
            assert_eq!(done.output(), format!("{name} ['{name}']\n"));
            name
        })
        .collect();
    assert_eq!(names.len(), 3);
    assert_eq!(fs::read_dir(&scratch).unwrap().count(), 0);
    // Also after a run that was ended.
    exec(json!({"code": "while True: pass", "scratch": text(&scratch), "limits": {"wall": "100ms"}}))
        .expect(json!({"verdict": "wall_timeout"}));
    assert_eq!(fs::read_dir(&scratch).unwrap().count(), 0);
}

test!(Both, a_result_that_cannot_be_written_is_no_success);
fn a_result_that_cannot_be_written_is_no_success() {
    let ask = |words: &str, stdin: &[u8]| {
        let output = run_with_stdin(&mut run_under(&["sh", "-c", &format!("exec \"$STOCKADE\" {words}")]), stdin);
        (output.status.code(), String::from_utf8(output.stderr).unwrap().lines().map(String::from).collect::<Vec<_>>())
    };
    let request = json!({"code": "print(1)"}).to_string();
    for (nowhere, why) in
        [(">&-", "Bad file descriptor"), (">/dev/full", "No space left on device"), ("</dev/null 1<&0", "Bad file descriptor")]
    {
        // The last has no stdin to read a request from: that answer is lost alike.
        for words in ["exec", "exec --no-such-option", "version"] {
            let (status, said) = ask(&format!("{words} {nowhere}"), request.as_bytes());
            let has_run = words == "exec" && !nowhere.contains("<&0");
            assert_eq!(status, Some(if has_run { 74 } else { 125 }), "{words} {nowhere}: {said:?}");
            let lost = said.iter().find(|line| line.starts_with("stockade: ") && line.contains("stdout") && line.contains(why));
            let lost = lost.unwrap_or_else(|| panic!("{words} {nowhere}: {said:?}"));
            assert_eq!(lost.contains("the code ran (exited)"), has_run, "{words} {nowhere}: {said:?}");
        }
    }
    // A reader that has gone away.
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let mut command = stockade(["exec"]);
    command.stdout(writer);
    let output = run_with_stdin(&mut command, request.as_bytes());
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.code() == Some(74) && said.contains("the code ran (exited)") && said.contains("Broken pipe"), "{said}");
    // The controls: thrown away on purpose, and not a byte lost.
    assert_eq!(ask("exec >/dev/null", request.as_bytes()).0, Some(0));
    assert_eq!(ask("exec | cat >&2", request.as_bytes()).1.iter().filter(|line| line.starts_with('{')).count(), 1);
}

test!(Both, several_runs_share_one_scratch);
fn several_runs_share_one_scratch() {
    let scratch = scratch();
    let waits = json!({"code": "import os, time\nwhile not os.path.exists('go'): time.sleep(0.005)\nprint(open('go').read())", "scratch": text(&scratch)});
    let first = start(&mut stockade(["exec"]), waits.to_string().as_bytes());
    exec(json!({"code": "open('go.new','w').write('from the other'); import os; os.rename('go.new','go')", "scratch": text(&scratch)}))
        .succeeded();
    let done = ExecResult::of(first.wait_with_output().unwrap());
    done.succeeded().expect(json!({"output": "from the other\n"}));
}

test!(Both, concurrent_runs_have_their_own_ids);
fn concurrent_runs_have_their_own_ids() {
    let request =
        json!({"code": "import sys; print('up', flush=True); sys.stdin.read()", "stdin": "x", "limits": {"wall": scaled_limit(20_000)}});
    let children: Vec<_> = (0..6).map(|_| start(&mut stockade(["exec"]), request.to_string().as_bytes())).collect();
    let mut ids = BTreeSet::new();
    for child in children {
        let done = ExecResult::of(child.wait_with_output().unwrap());
        done.succeeded().expect(json!({"output": "up\n"}));
        let layers = done["receipt"]["layers"].as_array().unwrap();
        ids.insert(layers[0]["detail"].as_str().unwrap().to_owned());
    }
    // Root: a host uid for each. Otherwise it is the caller's own.
    assert_eq!(ids.len(), if is_root() { 6 } else { 1 }, "{ids:?}");
}

test!(Both, a_read_only_scratch_can_be_read_and_not_written);
fn a_read_only_scratch_can_be_read_and_not_written() {
    let scratch = scratch();
    write_file(&scratch.join("input"), "x");
    let policies = PolicyDirectory::new();
    let policy = policies.write("ro", &derived("[scratch]\naccess = \"ro\""));
    let code = "import errno\nprint(open('input').read())\ntry: open('new','w')\nexcept OSError as e: print(errno.errorcode[e.errno])";
    let done = exec_with(&["--policy", &policy], json!({"code": code, "scratch": text(&scratch)}));
    done.succeeded().expect(json!({"output": "x\nEROFS\n"}));
    exec(json!({"code": code, "scratch": text(&scratch)})).succeeded().expect(json!({"output": "x\n"}));
    exec_with(&["--policy", &policy], json!({"code": "", "scratch": text(&scratch), "files": {"a": "b"}}))
        .refused("files_in_read_only_scratch", &["files"]);
}

test!(Both, protected_paths_of_a_scratch_can_be_read_and_not_written);
fn protected_paths_of_a_scratch_can_be_read_and_not_written() {
    let scratch = scratch();
    fs::create_dir(scratch.join(".git")).unwrap();
    chown_to_owner(&scratch.join(".git"));
    write_file(&scratch.join(".git/config"), "kept");
    let policies = PolicyDirectory::new();
    let policy = policies.write("repo", &derived("[scratch]\nread_only = { add = [\".git\"] }"));
    let code = "import errno, os, shutil\ndef t(f):\n    try: f(); print('ok')\n    except OSError as e: print(errno.errorcode[e.errno])\nprint(open('.git/config').read())\nt(lambda: open('.git/config','w'))\nt(lambda: os.mkdir('.git/hooks'))\nt(lambda: os.rename('.git','moved'))\nopen('beside','w').write('x')";
    let done = exec_with(&["--policy", &policy], json!({"code": code, "scratch": text(&scratch)}));
    done.succeeded().expect(json!({"output": "kept\nEROFS\nEROFS\nEBUSY\n"}));
    assert_eq!(fs::read_to_string(scratch.join(".git/config")).unwrap(), "kept");
    // The control: without the line all three succeed.
    exec(json!({"code": code, "scratch": text(&scratch)})).succeeded().expect(json!({"output": "kept\nok\nok\nok\n"}));
}

test!(Both, home_can_be_the_scratch);
fn home_can_be_the_scratch() {
    let scratch = scratch();
    let policies = PolicyDirectory::new();
    let policy = policies.write("home", &derived("[scratch]\nhome = true"));
    let code = "import os\np = os.path.expanduser('~/.kept')\nprint(os.environ['HOME'], os.path.exists(p))\nopen(p,'w').write('x')";
    let ask = || exec_with(&["--policy", &policy], json!({"code": code, "scratch": text(&scratch)}));
    ask().succeeded().expect(json!({"output": format!("{} False\n", text(&scratch))}));
    ask().succeeded().expect(json!({"output": format!("{} True\n", text(&scratch))}));
}

test!(Both, every_shipped_language_runs, needs[Program("node")]);
fn every_shipped_language_runs() {
    for (language, code) in
        [("python", "print(6*7)"), ("bash", "a=(6 7); echo $((a[0] * a[1]))"), ("sh", "echo $((6 * 7))"), ("node", "console.log(6 * 7)")]
    {
        exec(json!({"language": language, "code": code})).succeeded().expect(json!({"output": "42\n"}));
    }
}

test!(Both, a_language_is_found_by_alias_and_in_any_case);
fn a_language_is_found_by_alias_and_in_any_case() {
    for language in ["py", "Python3", "PYTHON"] {
        exec(json!({"language": language, "code": "print(1)"})).succeeded();
    }
    exec(json!({"language": "Shell", "code": "[[ a == a ]] && echo 1"})).succeeded().expect(json!({"output": "1\n"}));
}

test!(Both, empty_code_runs);
fn empty_code_runs() {
    python("").succeeded().expect(json!({"output": "", "error": "", "bytes": {"output": 0, "error": 0}}));
}

test!(Both, code_of_a_megabyte_runs);
fn code_of_a_megabyte_runs() {
    let code = format!("{}print('end')", "x = 1  # filler\n".repeat(70_000));
    python(&code).succeeded().expect(json!({"output": "end\n"}));
}

test!(Both, a_request_of_many_megabytes_is_taken);
fn a_request_of_many_megabytes_is_taken() {
    let big = "0123456789abcdef".repeat(1 << 20);
    let done = exec(json!({"code": "import hashlib; d = open('big').read(); print(len(d), d[-3:])", "files": {"big": big}}));
    done.succeeded().expect(json!({"output": "16777216 def\n"}));
}

test!(Both, the_policy_of_the_result_is_the_one_that_decided);
fn the_policy_of_the_result_is_the_one_that_decided() {
    let done = python("");
    assert_eq!((&done["policy"]["name"], &done["policy"]["origin"]), (&json!("default"), &json!("shipped")));
    assert_eq!(done["policy"]["sha256"].as_str().map(str::len), Some(64));
    let policies = PolicyDirectory::new();
    let path = policies.write("own", &derived(""));
    let own = exec_with(&["--policy", &path], json!({"code": ""}));
    assert_eq!(own["policy"]["origin"], json!(path));
    assert_ne!(own["policy"]["sha256"], done["policy"]["sha256"]);
}

test!(serial Both, usage_is_measured);
fn usage_is_measured() {
    let code = "import os, time\nopen('f','wb').write(b'x' * (2 << 20)); open('/tmp/f','wb').write(b'x' * (3 << 20))\nend = time.process_time() + 0.2\nwhile time.process_time() < end: pass";
    let done = python(code);
    let usage = &done.succeeded()["usage"];
    let number = |name: &str| usage[name].as_u64().unwrap_or_else(|| panic!("{name}: {usage}"));
    assert!((2 << 20..3 << 20).contains(&number("scratch_bytes")), "{usage}");
    assert!((3 << 20..4 << 20).contains(&number("tmp_bytes")), "{usage}");
    let cpu = Duration::from_millis(number("cpu_user_ms") + number("cpu_system_ms"));
    assert!((Duration::from_millis(190)..scaled(Duration::from_secs(2))).contains(&cpu), "{usage}");
}

test!(Both, memory_and_processes_are_measured, needs[Cgroup]);
fn memory_and_processes_are_measured() {
    let code =
        "import subprocess\na = b'x' * (100 << 20)\np = [subprocess.Popen(['sleep', '0.05']) for _ in range(4)]\nfor q in p: q.wait()";
    let done = python(code);
    let usage = &done.succeeded()["usage"];
    assert!((100 << 20..200 << 20).contains(&usage["memory_peak_bytes"].as_u64().unwrap()), "{usage}");
    // The kernel keeps a peak of processes since 6.1 on v2 only; the launcher's own count otherwise.
    assert!(usage["processes_peak"].is_null() || usage["processes_peak"].as_u64() >= Some(1), "{usage}");
}

test!(serial Both, duration_is_that_of_the_program);
fn duration_is_that_of_the_program() {
    let done = python("import time; time.sleep(0.25)");
    let took = Duration::from_millis(done["duration_ms"].as_u64().unwrap());
    assert!((Duration::from_millis(250)..scaled(Duration::from_secs(3))).contains(&took), "{took:?}");
}

test!(Both, a_dry_run_runs_nothing);
fn a_dry_run_runs_nothing() {
    let scratch = scratch();
    let request = json!({"code": "open('made','w')", "scratch": text(&scratch), "files": {"given": "x"}}).to_string();
    let output = run_with_stdin(&mut stockade(["exec", "--dry-run"]), request.as_bytes());
    let said = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(0), "{said}");
    for part in ["plan of policy default", "/usr read-only", text(&scratch), "memory", "loopback only"] {
        assert!(said.contains(part), "{part} is not in: {said}");
    }
    assert_eq!(fs::read_dir(&scratch).unwrap().count(), 0);
    let output = stockade(["run", "--dry-run", "--", "/bin/sh", "-c", "exit 7"]).output().unwrap();
    assert_eq!(output.status.code(), Some(0));
    assert!(String::from_utf8(output.stdout).unwrap().contains("exit 7"));
}

/// A plan as JSON, without what is new in each run: its id and the program's name.
fn plan(request: &Value) -> Value {
    let output = run_with_stdin(&mut stockade(["exec", "--dry-run", "--json"]), request.to_string().as_bytes());
    assert_eq!(output.status.code(), Some(0));
    let mut plan: Value = serde_json::from_slice(&output.stdout).unwrap();
    let name = plan["program_file"][1].as_str().unwrap().to_owned();
    let unique = name.starts_with("stockade_") && name.ends_with(".py") && name.len() == "stockade_0123456789abcdef.py".len();
    assert_eq!((unique, name == "main.py"), (request["scratch"].is_string(), request["scratch"].is_null()), "{name}");
    if is_root() {
        plan["identity"]["outside"] = json!("new");
    }
    serde_json::from_str(&plan.to_string().replace(&name, "NAME")).unwrap()
}

test!(Both, a_program_has_the_name_that_its_request_gives);
fn a_program_has_the_name_that_its_request_gives() {
    const NAMES: &str = "import os, sys; print(os.path.basename(sys.argv[0]), sorted(os.listdir('.')))";
    assert_eq!(exec(json!({"code": NAMES})).output(), "main.py ['main.py']\n");
    assert_eq!(exec(json!({"code": "echo $0", "language": "sh"})).output(), "/scratch/main.sh\n");
    assert_eq!(exec(json!({"code": NAMES, "filename": "sales.py"})).output(), "sales.py ['sales.py']\n");
    let traceback = exec(json!({"code": "1/0", "filename": "sales.py"}));
    assert!(traceback.error().contains("File \"/scratch/sales.py\", line 1"), "{}", traceback.error());
    // A file that the request brings keeps its name.
    let beside = exec(json!({"code": format!("{NAMES}; import main"), "files": {"main.py": "print('theirs')"}}));
    assert!(beside.output().starts_with("stockade_") && beside.output().ends_with("theirs\n"), "{}", beside.output());
    // Where scratch cannot be written the program stands in the sandbox's own /tmp.
    let policy = PolicyDirectory::new();
    let reader = policy.write("reader", &derived("[scratch]\naccess = \"ro\""));
    let scratch = scratch();
    let done = exec_with(&["--policy", &reader], json!({"code": NAMES, "scratch": text(&scratch)}));
    assert_eq!(done.output(), "main.py []\n");
    // In a directory of the caller's nothing is replaced, and nothing that was there is removed.
    write_file(&scratch.join("sales.py"), "mine");
    chown_to_owner(&scratch.join("sales.py"));
    exec(json!({"code": NAMES, "scratch": text(&scratch), "filename": "sales.py"})).refused("filename_taken", &["sales.py", "`filename`"]);
    assert_eq!(fs::read_to_string(scratch.join("sales.py")).unwrap(), "mine");
    let free = exec(json!({"code": NAMES, "scratch": text(&scratch), "filename": "other.py"}));
    assert_eq!(free.output(), "other.py ['other.py', 'sales.py']\n");
    assert_eq!(fs::read_dir(&scratch).unwrap().count(), 1);
    let unique = exec(json!({"code": NAMES, "scratch": text(&scratch)}));
    assert!(unique.output().starts_with("stockade_"), "{}", unique.output());
    for (name, reason) in [
        ("", "path_malformed"),
        ("a/b.py", "filename_malformed"),
        ("..", "path_malformed"),
        ("/etc/x.py", "path_malformed"),
        ("stockade_0.py", "filename_malformed"),
    ] {
        exec(json!({"code": "", "filename": name})).refused(reason, &["filename"]);
    }
    exec(json!({"code": "", "filename": "a", "files": {"a/b": ""}})).refused("filename_malformed", &["`files` has it too"]);
}

test!(Both, the_names_of_a_policys_runtimes_are_commands);
fn the_names_of_a_policys_runtimes_are_commands() {
    let named = "echo 'print(6*7)' > x.py; python x.py; py x.py; /usr/bin/env python x.py; python3 -c 'import sys; print(sys.prefix)'; command -v python3";
    assert_eq!(exec(json!({"code": named, "language": "bash"})).output(), "42\n42\n42\n/usr\n/usr/bin/python3\n");
    let names = "import shutil; print([shutil.which(name) for name in ('python', 'shell', 'bash', 'js')])";
    let found = exec(json!({"code": names}));
    assert!(found.output().contains("'/run/stockade/bin/python', '/run/stockade/bin/shell', '/usr/bin/bash'"), "{}", found.output());
    // They are the policy's: one without Node has no name for it but what lies below /usr.
    let js = if fs::exists("/usr/bin/js").unwrap() { "'/usr/bin/js'" } else { "None" };
    let policies = PolicyDirectory::new();
    let without = policies.write("without", &derived("remove_runtimes = [\"node\"]"));
    let done = exec_with(&["--policy", &without], json!({"code": names}));
    assert!(done.output().ends_with(&format!("'/usr/bin/bash', {js}]\n")), "{}", done.output());
    // Code can neither add to them nor replace one.
    let done = exec(json!({"code": "ln -sf /bin/true /run/stockade/bin/python; touch /run/stockade/bin/new", "language": "bash"}));
    assert_eq!(done.error().matches("Read-only file system").count(), 2, "{}", done.error());
}

test!(Both, two_plans_of_one_request_are_equal);
fn two_plans_of_one_request_are_equal() {
    let scratch = scratch();
    write_file(&scratch.join(".env"), "x");
    for request in [
        json!({"code": "1"}),
        json!({"code": "1", "scratch": text(&scratch), "args": ["a"], "env": {"DEBUG": "1"}, "limits": {"memory": "1GiB"}}),
    ] {
        let first = plan(&request);
        assert_eq!(first, plan(&request));
        assert_ne!(first, plan(&json!({"code": "1", "limits": {"memory": "2GiB"}})));
    }
    let protected = &plan(&json!({"code": "1", "scratch": text(&scratch)}))["scratch"]["protected"];
    assert_eq!(*protected, json!([[".env", "file", "hidden"]]));
}

test!(Both, a_dry_run_refuses_what_exec_refuses);
fn a_dry_run_refuses_what_exec_refuses() {
    for (request, reason) in [
        (json!({"code": "", "language": "klingon"}), "unknown_language"),
        (json!({"code": "", "limits": {"wall": "1h"}}), "limit_above_maximum"),
        (json!({"code": "", "scratch": "/no/such/place"}), "scratch_missing"),
    ] {
        for options in [&["--dry-run"][..], &["--dry-run", "--json"], &[]] {
            exec_with(options, request.clone()).refused(reason, &[]);
        }
    }
}

test!(Both, a_plan_holds_no_values_of_variables);
fn a_plan_holds_no_values_of_variables() {
    let secret = token("plan");
    let request = json!({"code": format!("# {secret}"), "env": {"DEBUG": secret}, "stdin": secret, "files": {"f": secret}}).to_string();
    for options in [&["exec", "--dry-run"][..], &["exec", "--dry-run", "--json"]] {
        let output = run_with_stdin(&mut stockade(options), request.as_bytes());
        let said = String::from_utf8(output.stdout).unwrap();
        assert!(said.contains("DEBUG") && !said.contains(&secret), "{said}");
    }
}

test!(Both, a_usage_error_is_a_result_too);
fn a_usage_error_is_a_result_too() {
    for options in [&["--nonsense"][..], &["--policy"], &["surplus"], &["--json"], &["--runtime", "python"]] {
        exec_bytes(options, b"{\"code\": \"\"}").refused("usage", &["error"]);
    }
    let output = stockade(["run"]).output().unwrap();
    assert_eq!((output.status.code(), output.stdout.len()), (Some(2), 0));
    let output = stockade(["exec", "--help"]).output().unwrap();
    assert_eq!(output.status.code(), Some(0));
}

test!(Both, version_names_schema_and_features);
fn version_names_schema_and_features() {
    let output = stockade(["version", "--json"]).output().unwrap();
    let version: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(version["schema"], 1);
    assert!(version["features"].as_array().unwrap().contains(&json!("exec")));
    let plain = stockade(["--version"]).output().unwrap();
    assert!(String::from_utf8(plain.stdout).unwrap().contains(version["version"].as_str().unwrap()));
}

test!(Both, a_limit_that_nothing_enforces_is_named);
fn a_limit_that_nothing_enforces_is_named() {
    let done = exec(json!({"code": "", "limits": {"cpus": 0.1}}));
    done.succeeded();
    assert_eq!(done["limits"]["cpus_milli"], 100);
    let without = done["receipt"]["degraded"].as_array().unwrap().contains(&json!("cgroup"));
    // Memory and processes are limited in another way.
    assert_eq!(done["limits_unenforced"], if without { json!(["cpus"]) } else { json!([]) });
    assert_eq!(done.stderr.contains("; not enforced: cpus (more: stockade doctor)"), without, "{}", done.stderr);
    // Nothing is kept from a run by a limit above the CPUs that there are.
    let ample = exec_with(
        &["--policy", &PolicyDirectory::new().write("ample", &derived("[limits]\ncpus = 4096\nmax = \"same\""))],
        json!({"code": ""}),
    );
    ample.succeeded().expect(json!({"limits_unenforced": []}));
}

test!(Both, what_is_degraded_is_said_on_stderr_and_in_the_receipt);
fn what_is_degraded_is_said_on_stderr_and_in_the_receipt() {
    let done = python("");
    let degraded = done["receipt"]["degraded"].as_array().unwrap();
    let said: Vec<&str> = done.stderr.lines().filter(|line| line.starts_with("stockade: running without ")).collect();
    assert_eq!(said.len(), degraded.len(), "{}", done.stderr);
    for layer in degraded {
        assert!(said.iter().any(|line| line.contains(&format!("`{}`", layer.as_str().unwrap()))), "{}", done.stderr);
    }
    // Nothing is degraded that the policy does not name.
    let policies = PolicyDirectory::new();
    let policy = policies.write("whole", &derived("[degrade]\nrootless = { replace = [] }"));
    let done = exec_with(&["--policy", &policy], json!({"code": "print(1)"}));
    if degraded.is_empty() {
        done.succeeded();
    } else {
        done.broke("cgroup_unavailable", &["cgroup", "[degrade]"]);
    }
}
