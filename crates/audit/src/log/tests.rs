//! One chain, even if writers die, several write, or files are cut.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may panic")]

use std::{fs, os::unix::fs::PermissionsExt, sync::atomic::AtomicU32, sync::atomic::Ordering};

use super::*;
use crate::{Findings, Kind, MAX_LINE_LEN, Preview, Verifier};

/// A directory of the test's own, removed with it.
pub(crate) struct Place(pub PathBuf);

impl Place {
    pub fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name = format!("audit-log-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(name);
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
    assert_eq!(place.log().append(&event("third"), false).unwrap_err().reason(), "audit_unwritable", "no link is followed");
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
