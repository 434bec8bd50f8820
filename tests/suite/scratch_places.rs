//! Directories that are no scratch, because code there could write what the host or the next run
//! trusts: policies, logs, records, the program itself, what lies behind a bind mount.
//!
//! Paths that are malformed, missing or another user's are in `bad_input.rs`.

use std::{fs, path::Path};

use serde_json::json;

use crate::support::{
    exec::{
        ExecResult, OWNER, both_streams, chown_to_owner, exec, exec_with, program_path, run_under, run_with_stdin, scratch, scratch_named,
        stockade, text,
    },
    policy_dir::derived,
    runner::{directory, is_root, test},
};

test!(RootlessOnly, the_registrys_directory_is_no_scratch);
fn the_registrys_directory_is_no_scratch() {
    let home = directory().join("home");
    let ask = |path: &Path| exec(json!({"code": "", "scratch": text(path)}));
    let (registry, other) = (home.join("stockade"), home.join("other"));
    let below = registry.join("below");
    // A run that keeps records has made it already.
    for path in [&below, &other] {
        fs::create_dir_all(path).unwrap();
    }
    for path in [&registry, &below] {
        ask(path).refused("scratch_holds_registry", &["records"]);
    }
    // The control: a directory beside it.
    ask(&other).succeeded();
}

test!(RootOnly, a_bind_mount_makes_no_scratch_of_what_the_host_trusts, seconds 60);
fn a_bind_mount_makes_no_scratch_of_what_the_host_trusts() {
    let place = directory().join("bound");
    fs::create_dir(&place).unwrap();
    let home = directory().join("stock");
    fs::create_dir_all(home.join("work")).unwrap();
    let program = home.join("stockade");
    fs::copy(program_path().unwrap(), &program).unwrap();
    let script = "set -e; mount --bind \"$1\" \"$2\"; shift 2; exec \"$@\" exec";
    let run = |source: &Path, below: &str, words: &[&str]| {
        let scratch = place.join(below);
        let scratch = if below.is_empty() { &place } else { &scratch };
        let mut command =
            run_under(&[&["unshare", "--mount", "sh", "-c", script, "sh", text(source), text(&place)], words, &[text(&program)]].concat());
        ExecResult::of(run_with_stdin(&mut command, json!({"code": "", "scratch": text(scratch)}).to_string().as_bytes()))
    };
    for (source, below, reason) in [
        ("/etc", "", "scratch_in_system_directory"),
        ("/etc", "ssl", "scratch_in_system_directory"),
        ("/etc/ssl", "", "scratch_in_system_directory"),
        ("/usr", "lib", "scratch_in_system_directory"),
        ("/", "usr/bin", "scratch_in_system_directory"),
        ("/run", "", "scratch_holds_registry"),
        ("/", "", "scratch_is_home"),
        ("/root", "", "scratch_is_home"),
    ] {
        if Path::new(source).join(below).is_dir() {
            run(Path::new(source), below, &[]).refused(reason, &[]);
        }
    }
    // The running program, also for an ordinary user; and a control beside it.
    let own = OWNER.to_string();
    let as_user =
        ["setpriv", "--reuid", &own, "--regid", &own, "--clear-groups", "--inh-caps=-all", "env", "-u", "XDG_RUNTIME_DIR", "HOME=/"];
    run(&home, "", &[]).refused("scratch_holds_the_launcher", &[text(&place)]);
    run(&home, "work", &[]).succeeded();
    for path in [&home, &home.join("work")] {
        chown_to_owner(path);
    }
    run(&home, "", &as_user).refused("scratch_holds_the_launcher", &[text(&place)]);
    run(&home, "work", &as_user).succeeded();
}

test!(RootlessOnly, no_scratch_holds_what_the_next_run_believes);
fn no_scratch_holds_what_the_next_run_believes() {
    let home = directory().join("home");
    let ask = |path: &Path| exec(json!({"code": "", "scratch": text(path)}));
    let other = home.join("other");
    for (place, reason) in [(".config", "scratch_holds_a_policy"), (".local/state", "scratch_holds_the_log")] {
        let (place, below) = (home.join(place), home.join(place).join("stockade"));
        // Before there is anything in it, and after.
        for path in [&place, &below, &other] {
            fs::create_dir_all(path).unwrap();
            match path == &other {
                true => drop(ask(path).succeeded()),
                false => drop(ask(path).refused(reason, &[text(path), "lies in it"])),
            }
        }
        let output = stockade(["session", "--scratch", text(&below)]).output().unwrap();
        assert!(both_streams(&output).contains(reason), "{}", both_streams(&output));
    }
    // Where the user's policies are elsewhere, that place is the one.
    let request = json!({"code": "", "scratch": text(&other)}).to_string();
    let done = ExecResult::of(run_with_stdin(stockade(["exec"]).env("XDG_CONFIG_HOME", &other), request.as_bytes()));
    done.refused("scratch_holds_a_policy", &[text(&other)]);
}

test!(Both, no_scratch_holds_the_policy_of_its_run_or_the_program);
fn no_scratch_holds_the_policy_of_its_run_or_the_program() {
    let scratch = scratch();
    let policy = scratch.join("own.toml");
    fs::write(&policy, derived("")).unwrap();
    let ask = |options: &[&str]| exec_with(options, json!({"code": "print(6*7)", "scratch": text(&scratch)}));
    let named = ask(&["--policy", text(&policy)]);
    // Root believes no policy where others could write.
    let reason = if is_root() { "policy_unreadable" } else { "scratch_holds_a_policy" };
    assert_eq!(named["reason"], reason, "{}", named.result);
    ask(&[]).succeeded().expect(json!({"output": "42\n"}));
    let copy = scratch.join("stockade");
    fs::copy(program_path().unwrap(), &copy).unwrap();
    let request = json!({"code": "print(6*7)", "scratch": text(&scratch)}).to_string();
    ExecResult::of(run_with_stdin(&mut run_under(&[text(&copy), "exec"]), request.as_bytes()))
        .refused("scratch_holds_the_launcher", &[text(&copy)]);
    // The same for a link by which it is started.
    let (links, other) = (scratch_named("links"), scratch_named("other"));
    let link = links.join("stockade");
    std::os::unix::fs::symlink(program_path().unwrap(), &link).unwrap();
    let start = |scratch: &Path| {
        let request = json!({"code": "print(6*7)", "scratch": text(scratch)}).to_string();
        ExecResult::of(run_with_stdin(&mut run_under(&[text(&link), "exec"]), request.as_bytes()))
    };
    start(&links).refused("scratch_holds_the_launcher", &[text(&link)]);
    start(&other).succeeded().expect(json!({"output": "42\n"}));
}

test!(RootlessOnly, no_scratch_holds_a_link_on_the_way_to_what_the_next_run_believes);
fn no_scratch_holds_a_link_on_the_way_to_what_the_next_run_believes() {
    let (scratch, far, other) = (scratch(), directory().join("far"), scratch_named("other"));
    fs::create_dir(&far).unwrap();
    let (policy, middle, first) = (far.join("mine.toml"), scratch.join("mine.toml"), directory().join("mine.toml"));
    fs::write(&policy, derived("")).unwrap();
    std::os::unix::fs::symlink(&policy, &middle).unwrap();
    std::os::unix::fs::symlink(&middle, &first).unwrap();
    let ask = |scratch: &Path| exec_with(&["--policy", text(&first)], json!({"code": "print(6*7)", "scratch": text(scratch)}));
    ask(&scratch).refused("scratch_holds_a_policy", &[text(&first)]);
    // The control: the same policy, and a scratch off its way.
    ask(&other).succeeded().expect(json!({"output": "42\n"}));
}
