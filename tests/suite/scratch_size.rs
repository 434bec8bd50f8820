//! The size of a host scratch: many files, deep trees, and directories that code closes to the
//! count. How code tries to write past the count is in `limit_bypasses.rs`.

use std::{
    fs::{self, File, Permissions},
    os::unix::fs::PermissionsExt,
    time::Duration,
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::{Value, json};

use crate::support::{
    exec::{ExecResult, both_streams, exec, scratch, scratch_named, start, stockade, text, write_file},
    policy_dir::{PolicyDirectory, derived},
    runner::{eventually, test},
    timeouts::{scaled, scaled_limit},
};

test!(Both, a_host_scratch_of_many_files_runs);
fn a_host_scratch_of_many_files_runs() {
    let scratch = scratch();
    for i in 0..16_000 {
        File::create(scratch.join(format!("f{i}"))).unwrap();
    }
    let done = exec(json!({"code": "import os; print(sum(name[0] == 'f' for name in os.listdir('.')))", "scratch": text(&scratch)}));
    done.succeeded().expect(json!({"output": "16000\n"}));
}

test!(Both, a_tree_too_deep_to_count_is_a_disk_limit, seconds 60);
fn a_tree_too_deep_to_count_is_a_disk_limit() {
    let ask = |name: &str, depth: u32| {
        let code = format!(
            "import os, time\nfor _ in range({depth}):\n    os.mkdir('d'); os.chdir('d')\nopen('f', 'wb').write(b'x' * (1 << 20))\ntime.sleep(3)"
        );
        exec(json!({"code": code, "scratch": text(&scratch_named(name)), "limits": {"wall": scaled_limit(20_000)}}))
    };
    uncounted(&ask("deep", 250));
    ask("flat", 50).succeeded();
}

/// Ended for what no larger limit lets through, and no limit is named.
#[track_caller]
fn uncounted(done: &ExecResult) {
    done.expect(json!({"verdict": "disk_limit", "code": 137, "success": false, "reason": "scratch_uncounted", "limits_hit": []}));
    let [denial] = done["denials"].as_array().unwrap().as_slice() else { panic!("{}", done["denials"]) };
    assert_eq!((&denial["answer"], &denial["allow"], &denial["limit"]), (&json!("ended"), &Value::Null, &Value::Null), "{denial}");
    assert!(denial["help"].as_str().unwrap().contains("keep u+rx"), "{denial}");
}

test!(RootlessOnly, a_directory_closed_to_the_count_is_a_disk_limit, seconds 60);
fn a_directory_closed_to_the_count_is_a_disk_limit() {
    let ask = |name: &str, mode: &str, size: &str| {
        let code = format!(
            "import os, time\nos.mkdir('d')\nfor i in range(40): open(f'd/f{{i}}', 'wb').write(b'x' * (1 << 20))\nos.chmod('d', {mode})\ntime.sleep(3)"
        );
        exec(json!({"code": code, "scratch": text(&scratch_named(name)), "limits": {"wall": scaled_limit(20_000), "scratch_size": size}}))
    };
    // However large the limit: what it holds cannot be known.
    for (name, size) in [("closed", "8MiB"), ("closed-large", "100MiB")] {
        let done = ask(name, "0", size);
        // It may have been counted, and too large, before it was closed.
        if size == "8MiB" && done["reason"].is_null() {
            done.expect(json!({"verdict": "disk_limit", "code": 137, "success": false}));
        } else {
            uncounted(&done);
        }
    }
    // The controls: it is the limit that ends an open one.
    let full = ask("open", "0o700", "8MiB");
    full.expect(json!({"verdict": "disk_limit", "code": 137, "success": false, "reason": null}));
    assert_eq!(full["denials"][0]["limit"]["key"], "scratch_size");
    ask("open-large", "0o700", "100MiB").succeeded();
}

test!(Both, a_name_of_a_file_that_lies_elsewhere_too_frees_nothing, seconds 60);
fn a_name_of_a_file_that_lies_elsewhere_too_frees_nothing() {
    const MIB: usize = 1 << 20;
    let ask = |name: &str, has_other_name: bool, code: &str| {
        let scratch = scratch_named(name);
        let file = scratch.join("old");
        write_file(&file, vec![1; 40 * MIB]);
        if has_other_name {
            fs::hard_link(&file, scratch.with_file_name(format!("{name}-elsewhere"))).unwrap();
        }
        let code = format!("import os, time\nblock = b'x' * (1 << 20)\n{code}\ntime.sleep(3)");
        exec(json!({"code": code, "scratch": text(&scratch), "limits": {"wall": scaled_limit(20_000), "scratch_size": "16MiB"}}))
    };
    let full = |done: ExecResult| {
        done.expect(json!({"verdict": "disk_limit", "code": 137, "success": false, "reason": null}));
        assert_eq!(done["denials"][0]["limit"]["key"], "scratch_size", "{}", done.brief());
    };
    let instead = "os.remove('old')\nwith open('new', 'wb') as file:\n    for _ in range(40): file.write(block)";
    full(ask("linked", true, instead));
    // Through a descriptor, when no name in the scratch is left.
    let behind = "with open('old', 'ab', 0) as file:\n    os.remove('old')\n    for _ in range(40): file.write(block)\n    time.sleep(3)";
    full(ask("behind", true, behind));
    // The controls: what is freed can be written, and a file with two names can be changed.
    ask("alone", false, instead).succeeded();
    ask("changed", true, "with open('old', 'r+b') as file:\n    for _ in range(40): file.write(block)").succeeded();
    full(ask("grown", true, "with open('old', 'ab') as file:\n    for _ in range(40): file.write(block)"));
}

test!(Both, one_of_several_names_in_a_scratch_frees_nothing, seconds 60);
fn one_of_several_names_in_a_scratch_frees_nothing() {
    let ask = |name: &str, code: &str| {
        let scratch = scratch_named(name);
        write_file(&scratch.join("a"), vec![1; 40 << 20]);
        fs::hard_link(scratch.join("a"), scratch.join("b")).unwrap();
        write_file(&scratch.join("one"), "");
        (0..900).for_each(|number| fs::hard_link(scratch.join("one"), scratch.join(format!("link{number}"))).unwrap());
        let code = format!("import os, glob, time\nblock = b'x' * (1 << 20)\nlinks = glob.glob('link*')\n{code}\ntime.sleep(3)");
        let limits = json!({"wall": scaled_limit(20_000), "scratch_size": "16MiB", "scratch_files": 1000});
        exec(json!({"code": code, "scratch": text(&scratch), "limits": limits}))
    };
    let full = |done: ExecResult, key: &str| {
        done.expect(json!({"verdict": "disk_limit", "code": 137, "success": false, "reason": null}));
        assert_eq!(done["denials"][0]["limit"]["key"], key, "{}", done.brief());
    };
    let write = "with open('new', 'wb') as file:\n    for _ in range(30): file.write(block)";
    full(ask("one_name", &format!("os.remove('b')\n{write}")), "scratch_size");
    full(ask("some_links", "for link in links: os.remove(link)\nfor i in range(1500): open(f'f{i}', 'w').close()"), "scratch_files");
    // The controls: with the last name a file frees its blocks, and a name more counts as one.
    ask("all_names", &format!("os.remove('b'); os.remove('a')\n{write}")).succeeded();
    ask("few_links", "for link in links: os.remove(link)\nfor i in range(900): open(f'f{i}', 'w').close()").succeeded();
    full(ask("more_links", "for i in range(1500): os.link('one', f'more{i}')"), "scratch_files");
}

test!(Both, a_scratch_that_grew_while_the_launcher_was_stopped_is_in_the_result, seconds 60);
fn a_scratch_that_grew_while_the_launcher_was_stopped_is_in_the_result() {
    let ask = |name: &str, mebibytes: u32| {
        let scratch = scratch_named(name);
        let code = format!(
            "import os, time\ntime.sleep(0.5)\nopen('begun', 'w').close()\nwhile not os.path.exists('go'): time.sleep(0.01)\n\
             for i in range({mebibytes}): open(str(i), 'wb').write(bytes(1 << 20))\nopen('done', 'w').close()\ntime.sleep(600)"
        );
        let request = json!({"code": code, "scratch": text(&scratch), "limits": {"wall": scaled_limit(4_000), "scratch_size": "16MiB"}});
        let child = start(&mut stockade(["exec", "--quiet"]), request.to_string().as_bytes());
        let there = |file: &str| eventually(Duration::from_secs(20), || scratch.join(file).exists());
        let signal = |signal| kill(Pid::from_raw(child.id().try_into().unwrap()), signal).unwrap();
        // Half a second after its start, from which the launcher counts.
        assert!(there("begun"));
        signal(Signal::SIGSTOP);
        write_file(&scratch.join("go"), "");
        let done = there("done");
        // Beyond the wall clock, which the launcher then sees before all else.
        std::thread::sleep(scaled(Duration::from_millis(4_500)));
        signal(Signal::SIGCONT);
        let output = child.wait_with_output().unwrap();
        assert!(done, "{}", both_streams(&output));
        serde_json::from_slice::<Value>(&output.stdout).unwrap()
    };
    let outgrown = ask("outgrown", 40);
    assert_eq!((&outgrown["verdict"], &outgrown["limits_hit"]), (&json!("wall_timeout"), &json!(["scratch_size"])), "{outgrown}");
    let within = ask("within", 4);
    assert_eq!((&within["verdict"], &within["limits_hit"]), (&json!("wall_timeout"), &json!([])), "{within}");
}

test!(Both, code_that_closes_its_own_scratch_ends_neither_its_run_nor_the_next, seconds 60);
fn code_that_closes_its_own_scratch_ends_neither_its_run_nor_the_next() {
    let scratch = scratch();
    let set = |mode| fs::set_permissions(&scratch, Permissions::from_mode(mode)).unwrap();
    let mode = || fs::metadata(&scratch).unwrap().permissions().mode() & 0o7777;
    let ask = |code: &str| exec(json!({"code": code, "scratch": text(&scratch), "limits": {"wall": scaled_limit(20_000)}}));
    set(0o711);
    // At once, and over several counts.
    for rest in ["", "; time.sleep(0.5)"] {
        for closed in [0, 0o311, 0o555, 0o055] {
            let code = format!("import os, time\nopen('kept', 'w').write('k'); os.chmod('.', {closed}){rest}; print('through')");
            ask(&code).succeeded().expect(json!({"output": "through\n"}));
            // The owner has back what it had, and the rest is as the code left it.
            assert_eq!(mode(), 0o700 | closed, "after {closed:o}");
            assert_eq!(fs::read_dir(&scratch).unwrap().count(), 1, "the program's file was left");
            ask("print(open('kept').read())").succeeded().expect(json!({"output": "k\n"}));
        }
    }
    // Closed again and again, faster than it is counted: its own end, or that of what cannot be.
    let done = ask(
        "import os, time\nend = time.monotonic() + 1\nwhile time.monotonic() < end: os.chmod('.', 0); os.chmod('.', 0o700); os.chmod('.', 0)",
    );
    assert!(["exited", "disk_limit"].contains(&done["verdict"].as_str().unwrap()), "{}", done.brief());
    ask("").succeeded();
    // The controls: the code's word counts while it runs, nothing is given that was not
    // there before, and nothing where the code could take nothing.
    ask("import os; os.chmod('.', 0o555); print(oct(os.stat('.').st_mode & 0o777))").succeeded().expect(json!({"output": "0o555\n"}));
    set(0o500);
    let output = stockade(["run", "--scratch", text(&scratch), "--", "chmod", "0", "."]).output().unwrap();
    assert_eq!((output.status.code(), mode()), (Some(0), 0o500), "{}", both_streams(&output));
    set(0o700);
    let policies = PolicyDirectory::new();
    let policy = policies.write("read-only", &derived("[scratch]\naccess = \"ro\""));
    let output = stockade(["run", "--policy", &policy, "--scratch", text(&scratch), "--", "chmod", "0", "."]).output().unwrap();
    assert_eq!((output.status.code(), mode()), (Some(1), 0o700), "{}", both_streams(&output));
}
