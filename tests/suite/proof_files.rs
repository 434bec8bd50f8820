//! What a proof makes on the host: where its attacks lie, and its page. No other user gets
//! in its way, and nothing of it is left, however it ends.

use std::{
    collections::BTreeSet,
    fs::{self, Permissions},
    os::unix::{
        ffi::OsStrExt,
        fs::{MetadataExt, PermissionsExt, chown, lchown, symlink},
    },
    path::{Path, PathBuf},
    process::{Child, Command, Output},
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::{Value, json};

use crate::support::{
    exec::{OWNER, exec, program_path, run_under, scratch, stockade, text},
    runner::{directory, eventually, is_root, test},
};

/// Directories of this user's proofs that are there now.
pub fn proofs() -> BTreeSet<PathBuf> {
    let own = nix::unistd::getuid().as_raw();
    let entries = fs::read_dir("/tmp").unwrap().flatten().map(|entry| entry.path());
    entries
        .filter(|path| path.file_name().is_some_and(|name| name.as_bytes().starts_with(b"stockade-prove-")))
        .filter(|path| path.symlink_metadata().is_ok_and(|found| found.uid() == own))
        .collect()
}

/// A proof under way, held still; killed when dropped.
struct Held {
    child: Option<Child>,
    place: PathBuf,
}

impl Held {
    /// Starts it and holds it as soon as its attacks are under way.
    fn start(command: &mut Command) -> Self {
        let before = proofs();
        let child = command.spawn().unwrap();
        let mut place = None;
        let found = eventually(Duration::from_secs(20), || {
            place = proofs().difference(&before).next().cloned();
            place.as_ref().is_some_and(|place| place.join("host/victim-6").exists())
        });
        let held = Held { child: Some(child), place: place.unwrap_or_default() };
        held.send(Signal::SIGSTOP);
        assert!(found, "no proof has begun: {}", held.place.display());
        held
    }

    fn pid(&self) -> Pid {
        Pid::from_raw(self.child.as_ref().unwrap().id().try_into().unwrap())
    }

    fn send(&self, signal: Signal) {
        kill(self.pid(), signal).unwrap();
    }

    fn finish(mut self) -> Output {
        self.send(Signal::SIGCONT);
        self.child.take().unwrap().wait_with_output().unwrap()
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ended_by_itself = child.kill();
            let _reaped = child.wait();
        }
    }
}

/// A run that leaves things behind if it is killed, and so sweeps first.
fn next_start() {
    let place = directory().join("sweeping");
    if !place.exists() {
        fs::rename(scratch(), &place).unwrap();
    }
    exec(json!({"code": "", "scratch": text(&place)})).succeeded();
}

test!(serial RootOnly, no_other_user_enters_the_directory_of_the_attacks, seconds 60);
fn no_other_user_enters_the_directory_of_the_attacks() {
    let proof = Held::start(&mut stockade(["prove"]));
    let place = text(&proof.place);
    let as_somebody = |act: &str| {
        let id = format!("--reuid={OWNER}");
        run_under(&["setpriv", &id, "--clear-groups", "--inh-caps=-all", "--", "sh", "-c", act]).output().unwrap()
    };
    let another = format!("--reuid={}", OWNER + 1);
    for act in [
        format!("cat {place}/host/secret"),
        format!("echo x > {place}/host/victim-0"),
        format!("ls {place}/callers/scratch"),
        format!("cat {place}/callers/scratch/.env"),
        format!("echo x > {place}/callers/scratch/planted"),
        format!("ln -s /etc/shadow {place}/callers/scratch/planted"),
        format!("mkfifo {place}/callers/scratch/planted"),
        format!("mv {place} {place}-2"),
        format!("ls {place}"),
    ] {
        for refused in [
            as_somebody(&act),
            run_under(&["setpriv", &another, "--clear-groups", "--inh-caps=-all", "--", "sh", "-c", &act]).output().unwrap(),
        ] {
            let said = String::from_utf8_lossy(&refused.stderr).into_owned();
            assert!(!refused.status.success() && (said.contains("ermission") || said.contains("not permitted")), "{act}: {said}");
        }
    }
    // The same acts by the same programs, where the proof's owner makes them.
    for act in [format!("cat {place}/host/secret && ls {place}"), format!("ln -s /etc/shadow {place}/callers/scratch/planted")] {
        assert!(run_under(&["sh", "-c", &act]).status().unwrap().success(), "{act}");
    }
    // And by the other user, where one may.
    assert!(as_somebody("ln -s /etc/shadow /tmp/planted-by-a-test && rm /tmp/planted-by-a-test").status.success());
    drop(proof);
    next_start();
}

test!(serial Both, a_killed_proof_is_swept_and_its_page_proves_nothing, seconds 60);
fn a_killed_proof_is_swept_and_its_page_proves_nothing() {
    let page = directory().join("page.html");
    fs::write(&page, "everything held, long ago").unwrap();
    let proof = Held::start(&mut stockade(["prove", "--html", text(&page)]));
    let place = proof.place.clone();
    // What code could leave: closed to its owner, and a link that leads elsewhere.
    let (closed, beside) = (place.join("host/closed"), directory().join("beside"));
    fs::create_dir(&closed).unwrap();
    fs::write(closed.join("file"), "").unwrap();
    fs::create_dir(&beside).unwrap();
    fs::write(beside.join("kept"), "").unwrap();
    symlink(&beside, closed.join("link")).unwrap();
    fs::set_permissions(&closed, Permissions::from_mode(0o000)).unwrap();
    // What a live launcher owns is not swept.
    next_start();
    assert!(place.join("host/secret").exists());
    drop(proof);
    assert!(place.join("host/secret").exists(), "it was not killed before its end");
    next_start();
    assert!(!place.exists() && beside.join("kept").exists());
    let said = fs::read_to_string(&page).unwrap();
    assert!(said.contains("nothing is proven") && !said.contains("long ago"), "{said}");
    // What is written beside it has taken its place.
    let names: Vec<String> = fs::read_dir(directory()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    assert!(!names.iter().any(|name| name.starts_with(".page")), "{names:?}");
}

test!(serial RootOnly, what_cannot_be_removed_is_said_and_removed_later, seconds 180);
fn what_cannot_be_removed_is_said_and_removed_later() {
    let program = program_path().unwrap().display().to_string();
    let proof = Held::start(&mut run_under(&["unshare", "--mount", "--propagation", "slave", "--", &program, "prove", "--json"]));
    let place = proof.place.clone();
    let kept = place.join("host/kept");
    fs::create_dir(&kept).unwrap();
    // A mount in the proof's own view of the host, which ends with it.
    let pid = proof.pid().to_string();
    let mounted = run_under(&["nsenter", "--target", &pid, "--mount", "mount", "-t", "tmpfs", "kept", text(&kept)]).status().unwrap();
    assert!(mounted.success());
    let output = proof.finish();
    let (said, value) =
        (String::from_utf8_lossy(&output.stderr).into_owned(), serde_json::from_slice::<Value>(&output.stdout).unwrap_or_default());
    let left = value["left"].as_str().unwrap_or_default();
    assert!(left.contains(text(&kept)) && left.contains("EBUSY") && said.contains(left), "{left}\n{said}");
    assert_eq!((output.status.code(), place.exists()), (Some(0), true), "{said}");
    next_start();
    assert!(!place.exists());
}

/// Refused at once, by these words.
#[track_caller]
fn refused(page: &Path, why: &str) {
    let begun = Instant::now();
    let output = stockade(["prove", "--html", text(page)]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.code() == Some(125) && output.stdout.is_empty() && said.contains(why), "{}: {said}", page.display());
    // Before anything was tried: a proof takes longer on any machine.
    assert!(begun.elapsed() < Duration::from_secs(5) || crate::support::timeouts::is_slow(), "{:?}", begun.elapsed());
}

test!(serial Both, a_page_takes_the_place_of_a_file_of_ones_own_only);
fn a_page_takes_the_place_of_a_file_of_ones_own_only() {
    let of = |name: &str| directory().join(name);
    let (target, link, fifo) = (of("target"), of("link"), of("fifo"));
    fs::write(&target, "as it was").unwrap();
    symlink(&target, &link).unwrap();
    nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::from_bits_truncate(0o600)).unwrap();
    for other in [&link, &fifo, Path::new("/dev/null"), &directory()] {
        refused(other, "no regular file");
    }
    assert_eq!(fs::read_to_string(&target).unwrap(), "as it was");
    let foreign = if is_root() { of("foreign") } else { PathBuf::from("/etc/passwd") };
    if is_root() {
        fs::write(&foreign, "as it was").unwrap();
        chown(&foreign, Some(OWNER), Some(OWNER)).unwrap();
    }
    let before = fs::read(&foreign).unwrap();
    refused(&foreign, "does not replace another user's file");
    assert_eq!(fs::read(&foreign).unwrap(), before);
    // Nor is a link on the way followed that code may have left.
    let (led, elsewhere) = (of("led"), of("elsewhere"));
    fs::create_dir(&elsewhere).unwrap();
    symlink(&elsewhere, &led).unwrap();
    if is_root() {
        lchown(&led, Some(OWNER), Some(OWNER)).unwrap();
    }
    refused(&led.join("page.html"), "is a link of uid");
    assert_eq!(fs::read_dir(&elsewhere).unwrap().count(), 0);
    refused(Path::new("/no/such/directory/page.html"), "/no/such/directory/page.html");
    refused(Path::new("/"), "names no file");
}

test!(serial Both, a_proof_that_cannot_begin_leaves_no_older_page);
fn a_proof_that_cannot_begin_leaves_no_older_page() {
    let page = directory().join("page.html");
    fs::write(&page, "everything held, long ago").unwrap();
    let output = stockade(["prove", "--policy", "no-such-<b>policy", "--html", text(&page)]).output().unwrap();
    let said = fs::read_to_string(&page).unwrap();
    assert_eq!(output.status.code(), Some(125));
    assert!(
        said.contains("nothing is proven") && said.contains("broken off") && !said.contains("long ago") && !said.contains("<b>"),
        "{said}"
    );
}
