//! Each change to a log is found and reported with its line.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use super::*;
use crate::log::tests::{Place, event};

/// A log of seven records in one file, and its anchors.
fn lines() -> (Vec<String>, Vec<Anchor>) {
    let place = Place::new();
    let anchors = (1..=6).map(|run| Anchor { link: place.log().append(&event(&format!("run-{run}")), false).unwrap().link }).collect();
    let text = std::fs::read_to_string(place.last()).unwrap();
    (text.lines().map(str::to_owned).collect(), anchors)
}

fn check(lines: &[String], anchors: &[Anchor]) -> Findings {
    let text: String = lines.iter().map(|line| format!("{line}\n")).collect();
    check_bytes(text.as_bytes(), anchors)
}

fn check_bytes(bytes: &[u8], anchors: &[Anchor]) -> Findings {
    let mut verifier = Verifier::from_beginning();
    verifier.expect(anchors.iter().cloned());
    verifier.file("log", bytes, true).unwrap();
    verifier.finish()
}

/// The first problem's line and words.
fn first(findings: &Findings) -> (u64, String) {
    findings.problems.first().map(|problem| (problem.line, problem.what.clone())).unwrap_or_default()
}

#[test]
fn a_whole_log_is_whole_and_meets_its_anchors() {
    let (lines, anchors) = lines();
    let findings = check(&lines, &anchors);
    assert_eq!((findings.problems, findings.records, findings.anchored), (vec![], 7, 6));
    assert_eq!(findings.end.as_ref(), anchors.last().map(|anchor| &anchor.link));
}

#[test]
fn every_change_of_a_byte_is_found() {
    let (lines, anchors) = lines();
    let text: String = lines.iter().map(|line| format!("{line}\n")).collect();
    let end = text.trim_end().rfind('\n').unwrap() + 1;
    for index in 0..text.len() {
        let mut bytes = text.clone().into_bytes();
        bytes[index] ^= 1;
        let anchored = check_bytes(&bytes, &anchors);
        assert!(!anchored.problems.is_empty(), "byte {index}");
        // The line break before the last record holds the two apart: without it they are one
        // torn tail.
        if index + 1 < end {
            assert!(!check_bytes(&bytes, &[]).problems.is_empty(), "byte {index}, without an anchor");
        }
    }
}

#[test]
fn a_change_says_where_and_what() {
    let (lines, _) = lines();
    let changed = |change: &dyn Fn(&mut Vec<String>)| {
        let mut lines = lines.clone();
        change(&mut lines);
        first(&check(&lines, &[]))
    };
    let (line, what) = changed(&|lines| lines[3] = lines[3].replace("run-3", "run-x"));
    assert!(line == 5 && what.contains("record 5 does not carry the hash of record 4"), "{line}: {what}");
    let (line, what) = changed(&|lines| drop(lines.remove(3)));
    assert!(line == 4 && what.contains("record 5 follows record 3: 1 record is missing"), "{line}: {what}");
    let (line, what) = changed(&|lines| lines.swap(3, 4));
    assert!(line == 4 && what.contains("missing"), "{line}: {what}");
    let (line, what) = changed(&|lines| lines.insert(4, lines[2].clone()));
    assert!(line == 5 && what.contains("out of order, or twice"), "{line}: {what}");
    let (line, what) = changed(&|lines| lines.insert(4, String::from("no record")));
    assert!(line == 5 && what.contains("none accounts for them"), "{line}: {what}");
    let (line, what) = changed(&|lines| drop(lines.remove(0)));
    assert!(line == 1 && what.contains("begins with record 2"), "{line}: {what}");
    let (line, what) = changed(&|lines| lines.clear());
    assert!(line == 0 && what.contains("holds no record"), "{line}: {what}");
}

#[test]
fn a_cut_tail_is_seen_by_its_anchor_alone() {
    let (lines, anchors) = lines();
    assert_eq!(check(&lines[..4], &[]).problems, []);
    let (_, what) = first(&check(&lines[..4], &anchors));
    assert!(what.contains("ends with record 4, but the anchor knows record 7: 3 records are cut off"), "{what}");
}

#[test]
fn anchors_of_another_chain_are_a_note_unless_it_must_be_here() {
    let (lines, foreign) = (self::lines().0, self::lines().1);
    let foreign_chain = foreign[0].link.chain.clone();
    let findings = check(&lines, &foreign);
    assert!(findings.problems.is_empty() && findings.notes[0].contains(&foreign_chain), "{findings:?}");
    let mut verifier = Verifier::from_beginning();
    verifier.want_chain(&foreign_chain);
    verifier.expect(foreign);
    verifier.file("log", lines.join("\n").as_bytes(), true).unwrap();
    let findings = verifier.finish();
    assert!(findings.problems.iter().any(|problem| problem.what.contains("the log was removed or replaced")), "{findings:?}");
}

#[test]
fn what_lies_behind_the_last_anchor_is_not_said_to_be_unchanged() {
    let (lines, anchors) = lines();
    assert_eq!(check(&lines, &anchors[..3]).anchored_up_to, Some(4));
    assert_eq!(check(&lines, &[]).anchored_up_to, None);
}

#[test]
fn a_tail_that_was_written_anew_is_seen_by_its_anchor_alone() {
    let place = Place::new();
    let append = |run: &str| Anchor { link: place.log().append(&event(run), false).unwrap().link };
    let anchors = [append("one"), append("two")];
    let text = std::fs::read_to_string(place.last()).unwrap();
    let kept: String = text.lines().take(2).map(|line| format!("{line}\n")).collect();
    std::fs::write(place.last(), kept).unwrap();
    append("other");
    let bytes = std::fs::read(place.last()).unwrap();
    assert_eq!(check_bytes(&bytes, &[]).problems, []);
    let (line, what) = first(&check_bytes(&bytes, &anchors));
    assert!(line == 3 && what.contains("it was rewritten"), "{line}: {what}");
}

#[test]
fn a_log_without_its_oldest_files_is_whole_after_their_last_hash() {
    let place = Place::new();
    let log = place.log().with_file_size(2 << 10);
    (0..20).for_each(|run| drop(log.append(&event(&run.to_string()), false).unwrap()));
    let directory = place.0.join("log");
    let gone = crate::files(&directory).unwrap().remove(0);
    let text = std::fs::read_to_string(&gone).unwrap();
    let hash = sha256(text.trim_end().rsplit('\n').next().unwrap().as_bytes());
    std::fs::remove_file(gone).unwrap();
    let verified = |verifier| crate::log::tests::verified(&directory, verifier);
    let (line, what) = first(&verified(Verifier::from_beginning()));
    assert!(line == 1 && what.contains("in audit-00000001.jsonl") && what.contains(&hash), "{what}");
    assert_eq!(verified(Verifier::new(Some(&hash))).problems, []);
    let anywhere = verified(Verifier::new(None));
    assert!(anywhere.problems.is_empty() && anywhere.notes.len() == 1, "{anywhere:?}");
    std::fs::remove_file(&crate::files(&directory).unwrap()[1]).unwrap();
    assert!(first(&verified(Verifier::new(Some(&hash)))).1.contains("missing between them"));
}
