//! What a journal and a syslog get to read, and what is read back from them.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use super::*;
use crate::log::tests::{Place, event};

fn appended() -> AppendedRecord {
    let link = Link { chain: "0123456789abcdef".to_owned(), seq: 7, hash: crate::text::sha256(b"line") };
    AppendedRecord { link, file: PathBuf::from("/var/log/stockade/audit-00000001.jsonl") }
}

fn listening(path: &Path) -> UnixDatagram {
    let socket = UnixDatagram::bind(path).unwrap();
    socket.set_nonblocking(true).unwrap();
    socket
}

fn received(socket: &UnixDatagram) -> String {
    let mut bytes = vec![0; 64 << 10];
    let length = socket.recv(&mut bytes).unwrap();
    String::from_utf8(bytes[..length].to_vec()).unwrap()
}

#[test]
fn a_head_goes_to_the_journal_with_its_fields_else_to_syslog_else_to_nobody() {
    let place = Place::new();
    let sinks = AnchorSinks { journal: place.0.join("journal"), syslog: place.0.join("syslog") };
    let hostile = Event { id: Some("x".to_owned()), ..event("run\nPRIORITY=0\nMESSAGE=\u{1b}[2J") };
    assert_eq!((sinks.available(), sinks.head(&appended(), &hostile)), (None, None));
    let syslog = listening(&sinks.syslog);
    assert_eq!((sinks.available(), sinks.head(&appended(), &hostile)), (Some(AnchorSink::Syslog), Some(AnchorSink::Syslog)));
    let line = received(&syslog);
    assert!(line.starts_with("<86>stockade[") && !line.contains(char::is_control), "{line}");
    assert_eq!(Anchor::find(&line).unwrap().link, appended().link);
    let journal = listening(&sinks.journal);
    assert_eq!((sinks.available(), sinks.head(&appended(), &hostile)), (Some(AnchorSink::Journal), Some(AnchorSink::Journal)));
    let native = received(&journal);
    let fields: Vec<(&str, &str)> = native.lines().map(|line| line.split_once('=').unwrap()).collect();
    let value = |name: &str| fields.iter().filter(|(field, _)| *field == name).map(|(_, value)| *value).collect::<Vec<_>>();
    assert_eq!((value("MESSAGE_ID"), value("PRIORITY")), (vec![HEAD], vec!["6"]), "{native}");
    assert_eq!((value("STOCKADE_AUDIT_SEQ"), value("STOCKADE_AUDIT_CHAIN")), (vec!["7"], vec!["0123456789abcdef"]));
    assert_eq!(Anchor::find(value("MESSAGE")[0]).unwrap().link, appended().link);
    let alerting = Event { alerts: vec!["verdict:exited".to_owned()], ..hostile };
    assert_eq!(sinks.alert(&alerting, 3), Some(AnchorSink::Journal));
    let native = received(&journal);
    assert!(
        native.contains(&format!("MESSAGE_ID={ALERT}\nPRIORITY=4\n")) && native.contains("3 alerts before it were held back"),
        "{native}"
    );
    assert!(!native.chars().any(|c| c.is_control() && c != '\n'));
    assert_eq!(sinks.unrecorded(&event("run"), "no\nroom"), Some(AnchorSink::Journal));
    let native = received(&journal);
    assert!(
        native.contains(&format!("MESSAGE_ID={UNRECORDED}\nPRIORITY=3\n")) && native.contains("STOCKADE_FAILURE=no\\nroom\n"),
        "{native}"
    );
    let lost = Event { event: Kind::Lost, verdict: None, ..event("run") };
    assert_eq!(sinks.head(&appended(), &lost), Some(AnchorSink::Journal));
    assert!(received(&journal).contains("\nPRIORITY=4\n"), "a run that was lost is a warning");
}

#[test]
fn only_an_anchor_is_one() {
    let word = format!("0123456789abcdef:7:{}", crate::text::sha256(b""));
    for good in [
        format!("audit head {word}"),
        format!("Nov 22 host stockade[1]: audit head {word} run x"),
        format!("{{\"M\":\"audit head {word}\"}}"),
    ] {
        assert_eq!(Anchor::find(&good).unwrap().link.seq, 7, "{good}");
    }
    let short = &word[..word.len() - 1];
    for bad in [
        "audit head",
        "",
        &word,
        &format!("audit head {short}"),
        &format!("audit head {word}:1"),
        &format!("audit head {}", word.to_uppercase()),
    ] {
        assert_eq!(Anchor::find(bad), None, "{bad}");
    }
}

#[test]
fn a_result_carries_an_anchor() {
    let Link { chain, seq, hash } = appended().link;
    let result = serde_json::json!({"schema": 1, "audit": {"run": "r", "chain": chain, "seq": seq, "sha256": hash}});
    assert_eq!(Anchor::of_result(&result).unwrap().link, appended().link);
    let unwritten = serde_json::json!({"audit": {"run": "r", "seq": null, "sha256": null, "failure": "full"}});
    assert_eq!(Anchor::of_result(&unwritten), None);
}
