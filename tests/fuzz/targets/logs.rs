//! Files of the audit log, written by any user who can write there.

use stockade_audit::{Anchor, Event, Findings, Log, Verifier, files};
use stockade_protocol::text::{escape_json, escape_line, is_not_ascii};

use super::Target;

pub const AUDIT: Target = Target {
    name: "audit",
    about: "a file of the audit log, to what verifies and prints it",
    seeds,
    corpus: include_str!("../corpus/audit"),
    words: &[
        b"\n",
        b"{\"schema\":1,\"chain\":\"0123456789abcdef\",\"seq\":1,\"prev\":\"",
        b"\"event\":\"opened\",\"before\":null",
        b"\"before\":{\"file\":\"audit-00000001.jsonl\",\"sha256\":\"",
        b"\"event\":\"torn\",\"torn\":{\"bytes\":1,\"sha256\":\"",
        b"audit head 0123456789abcdef:2:",
        b"\\u001b",
        b"18446744073709551615",
    ],
    longest: 16 << 10,
    run,
};

/// A log as it is written, whole and with a torn line in it.
fn seeds() -> Vec<Vec<u8>> {
    let directory = std::env::temp_dir().join(format!("fuzz-audit-{}-{:?}", std::process::id(), std::thread::current().id()));
    let log = Log::open(&directory, rustix::process::geteuid().as_raw(), 0o700);
    assert!(log.is_ok(), "the log of the seeds");
    let mut seeds = Vec::new();
    for log in log.iter() {
        for run in ["first", "second", "third"] {
            let event = Event { run: run.to_owned(), verdict: Some("exited".to_owned()), ..Event::default() };
            assert!(log.append(&event, false).is_ok(), "a record of the seeds");
            let file = files(&directory).ok().and_then(|files| files.into_iter().next_back()).unwrap_or_default();
            let bytes = std::fs::read(&file).unwrap_or_default();
            seeds.push(bytes.clone());
            assert!(std::fs::write(&file, [&bytes[..], b"{\"schema\":1,\"cha"].concat()).is_ok(), "a torn line");
        }
    }
    assert!(std::fs::remove_dir_all(&directory).is_ok(), "the log of the seeds is removed");
    seeds
}

fn verified(input: &[u8]) -> Findings {
    let mut verifier = Verifier::from_beginning();
    verifier.expect(String::from_utf8_lossy(input).lines().filter_map(Anchor::find));
    assert!(verifier.file("audit-00000001.jsonl", input, true).is_ok(), "bytes in memory can be read");
    verifier.finish()
}

fn run(input: &[u8]) {
    let findings = verified(input);
    let lines = input.iter().filter(|byte| **byte == b'\n').count() as u64;
    assert!(findings.records <= lines && findings.problems.len() <= 100, "no more is found than is there");
    assert_eq!(findings.end.is_some(), findings.records > 0);
    // Whatever passes as whole does not any more when a byte before its last record changes.
    let body = input.strip_suffix(b"\n").unwrap_or(input);
    let last = body.iter().rposition(|byte| *byte == b'\n').unwrap_or(0);
    if findings.problems.is_empty() && findings.notes.is_empty() && last > 0 {
        let mut changed = input.to_vec();
        changed[usize::from(input[last + 1..].iter().fold(0_u8, |sum, byte| sum.wrapping_add(*byte))) * last / 256] ^= 1;
        assert!(!verified(&changed).problems.is_empty(), "a change is found");
    }
    let text = String::from_utf8_lossy(input);
    let safe = |text: &str| text.chars().all(|c| c == '\n' || (' '..='~').contains(&c));
    assert!(
        safe(&escape_json(&text, is_not_ascii)) && safe(&escape_line(&text, is_not_ascii)),
        "nothing is printed that a terminal acts on"
    );
}
