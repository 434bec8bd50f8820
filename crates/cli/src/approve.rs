//! `stockade approve`: shows a person the code that waits for approval, and takes their yes.
//!
//! The code is hostile text. Each line, as its language ends lines, has the number that
//! findings use. Characters that look like others, blanks included, are shown as code points.
//! Base64 that encodes text is shown decoded, other bytes as they were sent. No line is wider
//! than a terminal of 80 columns. The engine decides who may approve.

use std::{fmt::Write, path::Path};

use serde_json::{Value, json};
use stockade_engine::{
    Refusal,
    admit::{decode, parse_request},
    approval::{self, WaitingApproval},
    screen::{grammar_of_file, sentence},
};
use stockade_protocol::{
    TextOrBase64,
    screen::{Grammar, lines},
    text::unambiguous,
};

use crate::{
    ExitCode, args,
    output::{print_json, print_text},
    run::refuse,
};

/// The columns of a terminal.
const WIDTH: usize = 80;

pub(crate) fn run(asked: &args::Approve) -> anyhow::Result<ExitCode> {
    let waiting = if asked.yes { approval::approve(&asked.token) } else { approval::look(&asked.token) };
    match waiting {
        Ok(waiting) if asked.json => print_json(&as_json(&waiting)?)?,
        Ok(waiting) => print_text(&in_words(&waiting, &asked.token)?)?,
        Err(refusal) => return Ok(ExitCode::from(refuse(&refusal))),
    }
    Ok(ExitCode::SUCCESS)
}

fn as_json(waiting: &WaitingApproval) -> anyhow::Result<Value> {
    let WaitingApproval { requester, seconds_left, approver, shown } = waiting;
    let mut whole = json!({ "schema": 1, "requester": requester, "seconds_left": seconds_left, "approver": approver, "shown": shown });
    whole["shown"]["request"] = serde_json::from_str(&shown.request)?;
    Ok(whole)
}

fn in_words(waiting: &WaitingApproval, token: &str) -> anyhow::Result<String> {
    let WaitingApproval { requester, seconds_left, approver, shown } = waiting;
    let place = match shown.session {
        true => "in a session that is empty before it, and keeps the files that it leaves",
        false => "in a private scratch that vanishes",
    };
    let mut out = format!("uid {requester} wants this run as {} under `{}`,\n{place}:\n", shown.language, shown.policy);
    let request = parse_request(shown.request.as_bytes())?;
    match &request.code {
        TextOrBase64::Text(code) => list(&mut out, code, shown.grammar)?,
        code => show_content(&mut out, "code", code, |_| shown.grammar)?,
    }
    if let Some(stdin) = &request.stdin {
        show_content(&mut out, "stdin", stdin, |_| None)?;
    }
    for (path, content) in &request.files {
        let name = format!("file {}", unambiguous(&serde_json::to_string(path)?));
        show_content(&mut out, &name, content, |text| grammar_of_file(Path::new(path), text))?;
    }
    let rest = json!({ "args": request.args, "env": request.env, "collect": request.collect, "limits": request.limits });
    let rest = serde_json::to_string_pretty(&rest)?.lines().map(unambiguous).collect::<Vec<_>>().join("\n");
    writeln!(out, "with {rest}\nwhat screening found in it:")?;
    for finding in &shown.findings {
        writeln!(out, "  {}: {}", finding.action.name(), unambiguous(&sentence(finding)))?;
    }
    if shown.findings_omitted > 0 {
        writeln!(out, "  and {} more", shown.findings_omitted)?;
    }
    match approver {
        Some(uid) => writeln!(out, "approved by uid {uid}; it can be run once, within {seconds_left} s")?,
        None => writeln!(out, "not approved; within {seconds_left} s this approves it:\nstockade approve --yes {token}")?,
    }
    Ok(folded(&out))
}

/// Folds a text into lines that no terminal wraps, because wrapped text could look like a
/// numbered line. A continuation begins with a colon, as no numbered line does. A blank moves
/// to the continuation, because at the end of a line it could not be seen.
fn folded(text: &str) -> String {
    // Some letters are counted wider than they are.
    let advance = |column: usize, letter| match letter {
        '\n' => 0,
        '\u{1100}'.. => column + 2,
        _ => column + 1,
    };
    let (mut out, mut column) = (String::with_capacity(text.len()), 0);
    for letter in text.chars() {
        // A blank is followed by room for the widest letter.
        let needed = advance(column, letter) + if letter == ' ' { 2 } else { 0 };
        if needed > WIDTH {
            out.push_str("\n      : ");
            column = 8;
        }
        out.push(letter);
        column = advance(column, letter);
    }
    out
}

/// Lists a text with line numbers. Line ends other than a line feed are shown as code points.
fn list(out: &mut String, text: &str, grammar: Option<Grammar>) -> std::fmt::Result {
    lines(text, grammar)
        .enumerate()
        .try_for_each(|(index, line)| writeln!(out, "{:5} | {}", index + 1, unambiguous(line.strip_suffix('\n').unwrap_or(line))))
}

/// A file or stdin.
fn show_content(out: &mut String, name: &str, content: &TextOrBase64, grammar: impl FnOnce(&str) -> Option<Grammar>) -> anyhow::Result<()> {
    let bytes = decode(content, name)?;
    match (content, str::from_utf8(&bytes)) {
        (TextOrBase64::Base64(encoded), Err(_)) => {
            writeln!(out, "{name}, {} bytes that are not UTF-8, in base64:\n      | {}", bytes.len(), encoded.base64)?;
        }
        (content, text) => {
            let text = text?;
            let sent = if matches!(content, TextOrBase64::Base64(_)) { ", sent as base64 and decoded here" } else { "" };
            writeln!(out, "{name}, {} bytes{sent}:", bytes.len())?;
            list(out, text, grammar(text))?;
        }
    }
    Ok(())
}

/// Inserts the command line's token into a request, as its first member. A request that has
/// one already is then refused for the duplicate.
///
/// # Errors
/// The token is malformed.
pub(crate) fn into_request(request: Vec<u8>, token: &str) -> Result<Vec<u8>, Refusal> {
    let token = approval::check_token(token)?;
    let Some(start) = request.iter().position(|byte| !byte.is_ascii_whitespace()).filter(|at| request[*at] == b'{') else {
        // It is not an object, and is refused for that.
        return Ok(request);
    };
    let (before, rest) = request.split_at(start + 1);
    let more = rest.iter().find(|byte| !byte.is_ascii_whitespace()).is_some_and(|byte| *byte != b'}');
    let member = format!("\"approve\":\"{token}\"{}", if more { "," } else { "" });
    Ok([before, member.as_bytes(), rest].concat())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]
    use super::*;

    /// What an approver reads of a request.
    fn read_by_approver(request: &Value, grammar: Option<Grammar>) -> String {
        let shown = shown(request, grammar);
        in_words(&WaitingApproval { requester: 7, seconds_left: 60, approver: None, shown }, "0").unwrap()
    }

    fn shown(request: &Value, grammar: Option<Grammar>) -> approval::ApprovalView {
        approval::ApprovalView {
            policy: String::from("four-eyes"),
            origin: String::new(),
            policy_sha256: String::new(),
            language: String::from("python"),
            grammar,
            session: false,
            findings: Vec::new(),
            findings_omitted: 3,
            request: request.to_string(),
        }
    }

    #[test]
    fn lines_are_shown_as_their_language_ends_them_and_nothing_looks_like_what_it_is_not() {
        let code = "# harmless\rimport os\r\nx = '\u{c}\u{1b}[2J'\n# \\r\\u{1b}⟨U+001B⟩";
        let text = read_by_approver(&json!({ "code": code }), Some(Grammar::Python));
        for line in [
            "    1 | # harmless⟨U+000D⟩\n",
            "    2 | import os⟨U+000D⟩\n",
            "    3 | x = '⟨U+000C⟩⟨U+001B⟩[2J'\n",
            "    4 | # \\r\\u{1b}⟨U+27E8⟩U+001B⟨U+27E9⟩\n",
        ] {
            assert!(text.contains(line), "{line:?}: {text}");
        }
        // The same to a shell.
        let text = read_by_approver(&json!({ "code": code }), Some(Grammar::Shell));
        assert!(text.contains("    1 | # harmless⟨U+000D⟩import os⟨U+000D⟩\n    2 | x"), "{text}");
    }

    #[test]
    fn no_line_passes_for_two_where_a_terminal_breaks_it() {
        let long = |pad: &str, times: usize| format!("#{}    2 | check()\nrun()", pad.repeat(times));
        let requests = [(" ", 71), ("\t", 9), ("\u{4e00}", 36), ("\u{202e}", 9)].map(|(pad, times)| json!({ "code": long(pad, times) }));
        for request in requests.into_iter().chain([json!({ "code": "", "args": [long(" ", 74)] })]) {
            let text = read_by_approver(&request, None);
            assert!(text.lines().all(|line| !line.starts_with("    2 | check")), "{text}");
            assert!(text.contains("\n      : ") && text.replace("\n      : ", "").contains("    2 | check()"), "{text}");
        }
        // The control: what fits is left alone.
        let text = read_by_approver(&json!({ "code": "x".repeat(72) }), None);
        assert!(text.contains(&format!("\n    1 | {}\n", "x".repeat(72))) && !text.contains("\n      : "), "{text}");
        // Nor does a blank vanish where a letter does not fit behind it.
        for columns in 60..72 {
            let code = |blank: &str| json!({ "code": format!("{}{blank}\u{4e00}", "x".repeat(columns)) });
            let text = [" ", ""].map(|blank| read_by_approver(&code(blank), None));
            assert!(text[0].lines().all(|line| !line.ends_with(' ')) && text[0] != text[1], "{text:?}");
        }
    }

    #[test]
    fn its_own_lines_fit_a_terminal() {
        for (session, approver) in [(false, None), (true, None), (true, Some(u32::MAX))] {
            let shown = approval::ApprovalView { session, findings_omitted: u64::MAX, ..shown(&json!({ "code": "" }), None) };
            let token = "0123456789abcdef0123456789abcdef";
            let text = in_words(&WaitingApproval { requester: u32::MAX, seconds_left: 86_400, approver, shown }, token).unwrap();
            assert!(text.lines().all(|line| line.chars().count() <= WIDTH) && !text.contains("\n      : "), "{text}");
            assert_eq!(text.contains(&format!("\nstockade approve --yes {token}\n")), approver.is_none(), "{text}");
        }
    }

    #[test]
    fn blanks_that_mean_something_else_are_told_apart() {
        let pairs = [
            ("curl x \\ \nrm y", "curl x \\\nrm y", "    1 | curl x \\⟨U+0020⟩\n"),
            ("cat <<-E\n\tE", "cat <<-E\n        E", "    2 | ⟨U+0009⟩E\n"),
            (":\u{a0}# x; curl y", ": # x; curl y", "    1 | :⟨U+00A0⟩# x; curl y\n"),
            (":\u{2800}#", ": #", "    1 | :⟨U+2800⟩#\n"),
        ];
        for (code, looks, line) in pairs {
            let [text, control] = [code, looks].map(|code| read_by_approver(&json!({ "code": code }), Some(Grammar::Shell)));
            assert!(text.contains(line) && !control.contains(line) && !control.contains('⟨'), "{text}{control}");
        }
        let text = read_by_approver(&json!({ "code": "", "args": ["a\u{a0}b\u{2800}"], "files": {"\u{3000}": ""} }), None);
        assert!(text.contains("\"a⟨U+00A0⟩b⟨U+2800⟩\"") && text.contains("\nfile \"⟨U+3000⟩\""), "{text}");
    }

    #[test]
    fn base64_that_is_text_is_shown_as_text_and_says_what_it_was() {
        let request = json!({
            "code": "", "stdin": {"base64": "b25lDXR3bw=="}, "args": ["\u{202e}"],
            "files": {"a\u{202e}.py": {"base64": "aW1wb3J0IG9zDXg="}, "b": {"base64": "/w=="}, "c": "a\rb"},
        });
        let text = read_by_approver(&request, Some(Grammar::Python));
        for part in [
            "\nstdin, 7 bytes, sent as base64 and decoded here:\n    1 | one⟨U+000D⟩\n    2 | two\n",
            "\nfile \"a⟨U+202E⟩.py\", 11 bytes, sent as base64 and decoded here:\n    1 | import os⟨U+000D⟩\n    2 | x\n",
            "\nfile \"b\", 1 bytes that are not UTF-8, in base64:\n      | /w==\n",
            "\nfile \"c\", 3 bytes:\n    1 | a⟨U+000D⟩\n    2 | b\n",
            "\"⟨U+202E⟩\"",
        ] {
            assert!(text.contains(part), "{part:?}: {text}");
        }
    }

    #[test]
    fn a_token_becomes_a_member_of_whatever_object_there_is() {
        let token = "0123456789abcdef0123456789abcdef";
        let spliced = |request: &str| String::from_utf8(into_request(request.into(), token).unwrap()).unwrap();
        for request in ["{}", " {\"code\":\"1\"}", "{ \n}", "{\"approve\":\"x\"}"] {
            let whole = spliced(request);
            assert!(whole.trim_start().starts_with(&format!("{{\"approve\":\"{token}\"")), "{whole}");
            serde_json::from_str::<Value>(&whole).unwrap();
        }
        assert_eq!(spliced("[1]"), "[1]");
        assert_eq!(spliced(""), "");
        for wrong in ["", "x", "\",\"code\":\"", "0123456789ABCDEF0123456789ABCDEF"] {
            assert!(into_request(b"{}".to_vec(), wrong).is_err(), "{wrong}");
        }
    }
}
