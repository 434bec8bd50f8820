//! One chain, even if writers die, several write, or files are cut.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may panic")]

use std::{fs, os::unix::fs::PermissionsExt, sync::atomic::AtomicU32, sync::atomic::Ordering};

use super::*;
use crate::{Actor, ApprovalRecord, Code, CodeKind, FileAct, Findings, Kind, MAX_LINE_LEN, PolicyRef, Preview, Verifier};

/// A directory of the test's own, removed with it.
pub(crate) struct Place(pub PathBuf);

impl Place {
    pub fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name = format!("audit-log-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        // On a disk each record waits for the disk.
        let path = Path::new("/dev/shm").join(name);
        fs::create_dir(&path).unwrap();
        Place(path)
    }

    pub fn log(&self) -> Log {
        Log::open(&self.0.join("log"), rustix::process::geteuid().as_raw(), 0o700).unwrap()
    }

    pub fn last(&self) -> PathBuf {
        files(&self.0.join("log")).unwrap().pop().unwrap()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _gone = fs::remove_dir_all(&self.0);
    }
}

pub(crate) fn event(run: &str) -> Event {
    Event { event: Kind::Run, run: run.to_owned(), verdict: Some("exited".to_owned()), ..Event::default() }
}

pub(crate) fn verified(directory: &Path, mut verifier: Verifier) -> Findings {
    let all = files(directory).unwrap();
    for (index, path) in all.iter().enumerate() {
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        verifier.file(&name, File::open(path).unwrap(), index + 1 == all.len()).unwrap();
    }
    verifier.finish()
}

fn whole(place: &Place) -> Findings {
    let findings = verified(&place.0.join("log"), Verifier::from_beginning());
    assert_eq!(findings.problems, []);
    findings
}

#[test]
fn no_record_is_longer_than_a_reader_takes() {
    let place = Place::new();
    let long = || "\u{e9}".repeat(MAX_LINE_LEN);
    let many = || (0..10_000).map(|number| format!("{number}.example.org:443")).collect::<Vec<_>>();
    let peers = Event { allowed_by_caller: many(), ..event("peers") };
    let unclipped = Event {
        event: Kind::Files,
        run: long(),
        who: Actor { unit: Some(long()), ..Actor::default() },
        id: Some(long()),
        policy: Some(PolicyRef { name: long(), origin: long(), sha256: long() }),
        code: Some(Code { kind: CodeKind::Code, sha256: long(), preview: Preview { bytes: 1, preview: long() } }),
        files: Some(FileAct { op: "write", path: long(), bytes: None }),
        verdict: Some(long()),
        reason: Some(long()),
        begun: Some(long()),
        receipt_sha256: Some(long()),
        approval: Some(ApprovalRecord { token_sha256: long(), ..ApprovalRecord::default() }),
        proof_sha256: Some(long()),
        degraded: many(),
        alerts: many(),
        ..event("unclipped")
    };
    for _ in 0..3 {
        for event in [&peers, &unclipped] {
            place.log().append(event, true).unwrap();
        }
    }
    place.log().append(&event("after"), true).unwrap();
    assert_eq!(whole(&place).records, 1 + 6 + 1);
    let text = fs::read_to_string(place.last()).unwrap();
    assert!(text.lines().all(|line| line.len() <= MAX_LINE_LEN), "{:?}", text.lines().map(str::len).max());
    let second: serde_json::Value = serde_json::from_str(text.lines().nth(1).unwrap()).unwrap();
    assert_eq!((&second["run"], &second["allowed_by_caller_omitted"]), (&"peers".into(), &10_000.into()));
    // The control: what fits is kept.
    let few = Event { allowed_by_caller: many()[..30].to_vec(), ..event("few") };
    place.log().append(&few, true).unwrap();
    let text = fs::read_to_string(place.last()).unwrap();
    assert!(text.lines().last().unwrap().contains("29.example.org:443") && !text.lines().last().unwrap().contains("shortened"));
}

#[test]
fn a_record_stands_where_its_writer_said_before() {
    let place = Place::new();
    let log = place.log().with_file_size(2048);
    let mut places = Vec::new();
    for run in 0..20 {
        if run == 7 {
            // A writer that died.
            let mut file = File::options().append(true).open(place.last()).unwrap();
            file.write_all(b"{\"half").unwrap();
        }
        log.append_at(&event(&run.to_string()), false, &mut |at| {
            assert!(!at.holds_run(&run.to_string()));
            places.push(at);
        })
        .unwrap();
    }
    assert!(files(&place.0.join("log")).unwrap().len() > 2);
    for (run, at) in places.iter().enumerate() {
        assert!(at.holds_run(&run.to_string()) && !at.holds_run("x"), "{run}: {at:?}");
    }
    whole(&place);
}

#[test]
fn many_writers_keep_one_chain_through_many_files() {
    let place = Place::new();
    place.log();
    thread::scope(|scope| {
        for writer in 0..8 {
            let log = place.log().with_file_size(8 << 10);
            scope.spawn(move || (0..50).for_each(|run| drop(log.append(&event(&format!("{writer}-{run}")), false).unwrap())));
        }
    });
    let findings = whole(&place);
    assert!(findings.files > 5, "{findings:?}");
    assert_eq!(findings.records, 400 + findings.files, "one record more begins each file");
    assert!(findings.notes.is_empty());
    for path in files(&place.0.join("log")).unwrap() {
        assert!(fs::metadata(&path).unwrap().len() <= 8 << 10);
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o027, 0, "no other user reads or writes it");
    }
}

#[test]
fn a_record_cut_at_any_byte_is_marked_and_nothing_else_is_lost() {
    let place = Place::new();
    place.log().append(&event("first"), false).unwrap();
    let before = fs::metadata(place.last()).unwrap().len();
    place.log().append(&event("second"), false).unwrap();
    let full = fs::read(place.last()).unwrap();
    for cut in usize::try_from(before).unwrap()..full.len() {
        fs::write(place.last(), &full[..cut]).unwrap();
        place.log().append(&event("third"), false).unwrap();
        let now = fs::read(place.last()).unwrap();
        assert!(now.starts_with(&full[..cut]), "nothing that stood there is changed");
        let findings = whole(&place);
        assert_eq!(findings.notes.len(), usize::from(cut as u64 > before && cut + 1 < full.len()), "cut at {cut}: {:?}", findings.notes);
        // And a writer that dies while it marks, at every byte of that.
        for again in (cut..now.len()).step_by(7) {
            fs::write(place.last(), &now[..again]).unwrap();
            place.log().append(&event("fourth"), false).unwrap();
            whole(&place);
        }
    }
}

#[test]
fn a_file_that_was_about_to_be_made_is_made_anew() {
    let place = Place::new();
    let log = place.log();
    fs::write(place.0.join("log/next"), "left by a writer that died").unwrap();
    log.append(&event("first"), true).unwrap();
    assert_eq!(whole(&place).records, 2);
}

#[test]
fn what_no_dying_writer_leaves_is_refused() {
    let place = Place::new();
    let log = place.log();
    log.append(&event("first"), false).unwrap();
    log.append(&event("second"), false).unwrap();
    let good = fs::read_to_string(place.last()).unwrap();
    let garbage = "x".repeat(2 << 20);
    for bad in [String::new(), String::from("\n\n"), garbage.clone(), format!("{good}{garbage}"), good.replace("first", "other")] {
        fs::write(place.last(), &bad).unwrap();
        let error = log.append(&event("third"), false).unwrap_err();
        assert_eq!(error.reason(), "audit_corrupted", "{error}");
        assert_eq!(fs::read_to_string(place.last()).unwrap(), bad, "and is left as it is");
    }
    fs::write(place.last(), &good).unwrap();
    log.append(&event("third"), false).expect("the control");
}

#[test]
fn a_directory_or_file_that_others_may_write_is_refused() {
    let place = Place::new();
    place.log().append(&event("first"), false).unwrap();
    let (directory, file) = (place.0.join("log"), place.last());
    let mode = |path: &Path, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    let owner = rustix::process::geteuid().as_raw();
    mode(&directory, 0o770);
    assert_eq!(Log::open(&directory, owner, 0o700).unwrap_err().reason(), "audit_untrusted");
    mode(&directory, 0o700);
    assert_eq!(Log::open(&directory, owner + 1, 0o700).unwrap_err().reason(), "audit_untrusted");
    mode(&file, 0o666);
    assert_eq!(place.log().append(&event("second"), false).unwrap_err().reason(), "audit_untrusted");
    mode(&file, 0o640);
    place.log().append(&event("second"), false).expect("the control");
    fs::rename(&file, place.0.join("elsewhere")).unwrap();
    std::os::unix::fs::symlink(place.0.join("elsewhere"), &file).unwrap();
    let error = place.log().append(&event("third"), false).unwrap_err();
    assert!(error.reason() == "audit_untrusted" && error.to_string().contains("it is a symlink"), "no link is followed: {error}");
}

#[test]
fn a_lock_that_nobody_lets_go_is_an_error_and_one_that_dies_is_none() {
    let place = Place::new();
    let log = place.log();
    let held = log.locked(LOCK).unwrap();
    assert_eq!(log.append(&event("first"), false).unwrap_err().reason(), "audit_locked");
    drop(held);
    log.append(&event("first"), false).expect("the control");
}

#[test]
fn a_record_is_never_longer_than_a_line_may_be() {
    let place = Place::new();
    let long = |length| Some(Preview { bytes: 1, preview: "\u{1b}".repeat(length) });
    let mut huge = Event { output: long(1 << 20), ..event("huge") };
    huge.labels.insert("label".to_owned(), "x".repeat(1 << 20));
    place.log().append(&huge, false).unwrap();
    place.log().append(&event("small"), false).unwrap();
    let text = fs::read_to_string(place.last()).unwrap();
    assert!(text.lines().all(|line| line.len() <= MAX_LINE_LEN) && text.contains("\"shortened\":true"));
    assert!(text.chars().all(|c| c == '\n' || (' '..='~').contains(&c)));
    whole(&place);
}

#[test]
fn ten_thousand_records_take_less_than_a_minute() {
    let place = Place::new();
    let log = place.log();
    let begin = Instant::now();
    for run in 0..10_000 {
        log.append(&event(&run.to_string()), false).unwrap();
    }
    assert!(begin.elapsed() < Duration::from_secs(60), "{:?}", begin.elapsed());
    assert_eq!(whole(&place).records, 10_001);
}

#[test]
fn two_hundred_writers_that_wait_for_the_disk_all_get_their_turn() {
    let place = Place::new();
    place.log();
    thread::scope(|scope| {
        for writer in 0..200 {
            let log = place.log();
            scope.spawn(move || (0..2).for_each(|run| drop(log.append(&event(&format!("{writer}-{run}")), true).unwrap())));
        }
    });
    assert_eq!(whole(&place).records, 401);
}

#[test]
fn alerts_are_limited_for_each_caller_apart() {
    let place = Place::new();
    let log = place.log();
    let at = |minute: u64| std::time::UNIX_EPOCH + Duration::from_secs(60 * minute + 1);
    let admit = |uid, minute| crate::alert::admit(&log, uid, at(minute)).unwrap();
    assert!((0..crate::alert::MAX_PER_MINUTE).all(|_| admit(1, 5) == Some(0)));
    assert_eq!((admit(1, 5), admit(1, 5)), (None, None), "one too many");
    assert_eq!(admit(2, 5), Some(0), "another caller");
    assert_eq!(admit(1, 6), Some(2), "the next minute, with the count that was held back");
    assert_eq!(admit(1, 6), Some(0));
    fs::write(place.0.join("log/alerts"), "no count\n1 2\n").unwrap();
    assert_eq!(admit(1, 6), Some(0), "a count that cannot be read starts again");
}

#[test]
fn a_rotated_log_is_one_chain_and_states_what_was_removed() {
    let place = Place::new();
    let log = place.log();
    assert_eq!(log.rotate(None).unwrap().appended, None, "there is no log yet");
    for run in ["first", "second", "third"] {
        log.append(&event(run), false).unwrap();
        log.rotate(None).unwrap();
    }
    // A file without a record of its own is not closed.
    log.rotate(None).unwrap();
    let all = || -> Vec<String> {
        files(&place.0.join("log")).unwrap().iter().map(|path| path.file_name().unwrap().to_string_lossy().into_owned()).collect()
    };
    assert_eq!(all().len(), 4, "{:?}", all());
    assert_eq!(whole(&place).notes, Vec::<String>::new());
    // Nothing is that old; then all is, but the file that is written to.
    assert_eq!(log.rotate(Some(Duration::from_secs(3600))).unwrap().removed, Vec::<PathBuf>::new());
    let kept = fs::read(place.0.join("log").join(&all()[2])).unwrap();
    let removed = log.rotate(Some(Duration::ZERO)).unwrap();
    assert_eq!((removed.removed.len(), all().len()), (3, 1), "{:?}", all());
    log.append(&event("fourth"), false).unwrap();
    let findings = whole(&place);
    assert!(findings.notes.len() == 1 && findings.notes[0].contains("3 files up to audit-00000003.jsonl"), "{findings:?}");
    // A rotation that died before it had removed the last of them.
    fs::write(place.0.join("log/audit-00000003.jsonl"), &kept).unwrap();
    fs::set_permissions(place.0.join("log/audit-00000003.jsonl"), fs::Permissions::from_mode(0o640)).unwrap();
    whole(&place);
    log.rotate(Some(Duration::ZERO)).unwrap();
    assert_eq!(all().len(), 1);
    whole(&place);
    // What was removed without that being stated is a gap as before.
    log.append(&event("fifth"), false).unwrap();
    log.rotate(None).unwrap();
    let first = files(&place.0.join("log")).unwrap().remove(0);
    fs::remove_file(first).unwrap();
    assert_eq!(verified(&place.0.join("log"), Verifier::from_beginning()).problems.len(), 1);
}
