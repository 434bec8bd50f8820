//! Runs in one host scratch at a time: approved code is alone there, so that no other run can
//! exchange it before its interpreter reads it, nor a session write to it.
//!
//! The controls show the exchange where nothing was approved. That a program of the host
//! can do the same is not tried: it is the caller's own.

use std::{
    fs,
    io::{BufRead, BufReader},
    path::Path,
    process::{Child, Stdio},
    time::Duration,
};

use serde_json::{Value, json};

use crate::{
    suite::approval::{STARTS, own_registry, review, token_of, with_token},
    support::{
        exec::{ExecResult, chown_to_owner, exec, exec_with, scratch_named, start, stockade, text, write_file},
        policy_dir::{PolicyDirectory, derived},
        runner::{eventually, test},
        session::Session,
    },
};

/// Puts another program in the place of each that a launcher writes below its scratch.
const EXCHANGES: &str = "
import os, sys
print('ready', flush=True)
while True:
    for place, below, names in os.walk('.'):
        for name in names:
            if name.startswith('stockade_') and name.endswith('.py'):
                with open('other', 'w') as file: file.write(\"print('exchanged')\")
                try: os.rename('other', os.path.join(place, name))
                except FileNotFoundError: pass
";

/// A run in a scratch that has begun and stays until this is dropped.
struct RunningCode(Child);

impl RunningCode {
    #[track_caller]
    fn of(scratch: &Path, code: &str) -> Self {
        let mut command = stockade(["run", "--policy", "default", "--scratch", text(scratch), "--", "python3", "-c", code]);
        let mut child = command.stdin(Stdio::piped()).spawn().unwrap();
        let mut first = String::new();
        BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut first).unwrap();
        assert_eq!(first, "ready\n");
        RunningCode(child)
    }
}

impl Drop for RunningCode {
    fn drop(&mut self) {
        // By a signal that the launcher passes on: nothing is left when it has ended.
        let pid = nix::unistd::Pid::from_raw(self.0.id().cast_signed());
        let _gone = nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM);
        let _reaped = self.0.wait();
    }
}

fn in_scratch(place: &Path, code: &str) -> Value {
    json!({"code": code, "scratch": text(place)})
}

/// Directories in one another: above, the middle one and below.
fn nested() -> [std::path::PathBuf; 3] {
    let above = scratch_named("above");
    let (middle, below) = (above.join("middle"), above.join("middle/below"));
    for place in [&middle, &below] {
        fs::create_dir(place).unwrap();
        chown_to_owner(place);
    }
    [above, middle, below]
}

test!(Both, approved_code_is_exchanged_by_no_other_run_in_its_scratch, seconds 90);
fn approved_code_is_exchanged_by_no_other_run_in_its_scratch() {
    own_registry();
    let [above, middle, below] = nested();
    let granted = |place: &Path| {
        let request = in_scratch(place, STARTS);
        with_token(&request, &token_of(&review(&request)))
    };
    let (here, deeper) = (granted(&middle), granted(&below));
    let in_use = |request: &Value| {
        review(request).refused("scratch_in_use", &["another run", "approved code", "the token can still be used"]);
    };
    for place in [&above, &middle] {
        let exchanging = RunningCode::of(place, EXCHANGES);
        // The control: what was not approved is exchanged.
        let exchanged = || exec(in_scratch(&middle, "print('sent')")).succeeded().output() == "exchanged\n";
        assert!(eventually(Duration::from_secs(20), exchanged));
        in_use(&here);
        in_use(&deeper);
        drop(exchanging);
    }
    // One below could change files of the request that lie there.
    let waiting = RunningCode::of(&below, "print('ready', flush=True); input()");
    in_use(&here);
    drop(waiting);
    for request in [here, deeper] {
        review(&request).succeeded().expect(json!({"output": "ran\n"}));
        review(&request).refused("approval_used", &[]);
    }
}

test!(Both, while_approved_code_runs_no_other_starts_in_its_scratch, seconds 90);
fn while_approved_code_runs_no_other_starts_in_its_scratch() {
    own_registry();
    let [above, middle, below] = nested();
    let beside = above.join("beside");
    fs::create_dir(&beside).unwrap();
    chown_to_owner(&beside);
    let code = "import os, subprocess, time\nopen('begun', 'w').close()\nwhile not os.path.exists('over'): time.sleep(0.01)\nprint('ran')";
    let request = in_scratch(&middle, code);
    let granted = with_token(&request, &token_of(&review(&request)));
    let approved = start(&mut stockade(["exec", "--policy", "review"]), granted.to_string().as_bytes());
    assert!(eventually(Duration::from_secs(20), || middle.join("begun").exists()));
    for place in [&above, &middle, &below] {
        exec(in_scratch(place, "print(1)")).refused("scratch_in_use", &["a run of approved code", "wait for its end"]);
        let command = stockade(["run", "--scratch", text(place), "--", "true"]).output().unwrap();
        assert_eq!(command.status.code(), Some(2), "{}", String::from_utf8_lossy(&command.stderr));
    }
    // The controls: beside it, and where nothing can be changed.
    exec(in_scratch(&beside, "print(1)")).succeeded();
    let policies = PolicyDirectory::new();
    let reading = policies.write("reading", &derived("[scratch]\naccess = \"ro\""));
    exec_with(&["--policy", &reading], in_scratch(&middle, "print(1)")).succeeded();
    write_file(&middle.join("over"), "");
    ExecResult::of(approved.wait_with_output().unwrap()).succeeded().expect(json!({"output": "ran\n"}));
    for place in [&above, &middle, &below] {
        exec(in_scratch(place, "print(1)")).succeeded();
    }
}

test!(Both, locks_of_code_in_a_scratch_hold_up_no_program_and_let_no_other_in, seconds 60);
fn locks_of_code_in_a_scratch_hold_up_no_program_and_let_no_other_in() {
    own_registry();
    let place = scratch_named("place");
    let request = in_scratch(&place, STARTS);
    let granted = with_token(&request, &token_of(&review(&request)));
    // flock(2) is the code's own.
    let own =
        "import fcntl, os\nfd = os.open('.', os.O_RDONLY)\nfcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)\nprint('ready', flush=True)";
    exec(in_scratch(&place, own)).succeeded();
    let locking = RunningCode::of(&place, &format!("{own}\ninput()"));
    exec(in_scratch(&place, "print(1)")).succeeded();
    review(&granted).refused("scratch_in_use", &[]);
    drop(locking);
    // Unlocking all bytes takes none of the launcher's away.
    let unlocks = "fcntl.lockf(fd, fcntl.LOCK_SH)\nfcntl.lockf(fd, fcntl.LOCK_UN)";
    let unlocking = RunningCode::of(&place, &format!("{}\ninput()", own.replace("print", &format!("{unlocks}\nprint"))));
    review(&granted).refused("scratch_in_use", &[]);
    drop(unlocking);
    // Nor does a lock of its own keep others out.
    let keeps = own.replace("print", "fcntl.lockf(fd, fcntl.LOCK_SH)\nprint");
    let keeping = RunningCode::of(&place, &format!("{keeps}\ninput()"));
    exec(in_scratch(&place, "print(1)")).succeeded();
    drop(keeping);
    exec(in_scratch(&place, "print(1)")).succeeded();
    review(&granted).succeeded();
}

test!(Both, a_session_writes_no_file_where_approved_code_runs, seconds 60);
fn a_session_writes_no_file_where_approved_code_runs() {
    own_registry();
    let place = scratch_named("place");
    let code = "import os, subprocess, time\nopen('begun', 'w').close()\nwhile not os.path.exists('over'): time.sleep(0.01)\nprint('ran')";
    let request = in_scratch(&place, code);
    let granted = with_token(&request, &token_of(&review(&request)));
    let mut session = Session::open(&["--scratch", text(&place)]);
    // The control: it may write there before.
    session.write("first", json!("x"));
    let approved = start(&mut stockade(["exec", "--policy", "review"]), granted.to_string().as_bytes());
    assert!(eventually(Duration::from_secs(20), || place.join("begun").exists()));
    session.refused(json!({"op": "write", "path": "second", "contents": "x"}), "scratch_in_use");
    assert!(!place.join("second").exists());
    write_file(&place.join("over"), "");
    ExecResult::of(approved.wait_with_output().unwrap()).succeeded().expect(json!({"output": "ran\n"}));
    session.write("second", json!("x"));
    session.close();
}
