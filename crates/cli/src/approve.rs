//! `stockade approve`: what waits for somebody's approval, for a person to read, and their yes.
//!
//! What another wants run is hostile text: every line of it, as its language ends lines,
//! stands behind the number that findings call it by, whatever cannot be told by its looks,
//! blanks among it, stands as what no text looks like, and what was sent as base64 and is
//! text is shown as that. What is no text is shown as it was sent. A terminal of 80 columns
//! breaks none of it; a narrower one may. Who may approve is not decided here.

use std::{fmt::Write, path::Path};

use serde_json::{Value, json};
use stockade_policy::visible::marked;
use stockade_protocol::{
    TextOrBase64,
    screen::{Grammar, lines},
};
use stockade_runtime::{
    Refusal,
    admit::{decode, parse_request},
    approval::{self, Waiting},
    screen::{grammar_of_file, sentence},
};

use crate::{
    ExitCode, args,
    output::{say, say_json},
    refuse,
};

/// The columns of a terminal.
const WIDTH: usize = 80;

pub(crate) fn run(asked: &args::Approve) -> anyhow::Result<ExitCode> {
    let waiting = if asked.yes { approval::approve(&asked.token) } else { approval::look(&asked.token) };
    match waiting {
        Ok(waiting) if asked.json => say_json(&as_json(&waiting)?)?,
        Ok(waiting) => say(&in_words(&waiting, &asked.token)?)?,
        Err(refusal) => return Ok(refuse(&refusal)),
    }
    Ok(ExitCode::SUCCESS)
}

fn as_json(waiting: &Waiting) -> anyhow::Result<Value> {
    let Waiting { requester, seconds_left, approver, shown } = waiting;
    let mut whole = json!({ "schema": 1, "requester": requester, "seconds_left": seconds_left, "approver": approver, "shown": shown });
    whole["shown"]["request"] = serde_json::from_str(&shown.request)?;
    Ok(whole)
}

fn in_words(waiting: &Waiting, token: &str) -> anyhow::Result<String> {
    let Waiting { requester, seconds_left, approver, shown } = waiting;
    let place = match shown.session {
        true => "in a session that holds nothing before it, and keeps what it leaves",
        false => "in a scratch of its own that vanishes",
    };
    let mut out = format!("uid {requester} wants this run as {} under `{}`,\n{place}:\n", shown.language, shown.policy);
    let request = parse_request(shown.request.as_bytes())?;
    list(&mut out, &request.code, shown.grammar)?;
    if let Some(stdin) = &request.stdin {
        show_content(&mut out, "stdin", stdin, |_| None)?;
    }
    for (path, content) in &request.files {
        let name = format!("file {}", marked(&serde_json::to_string(path)?));
        show_content(&mut out, &name, content, |text| grammar_of_file(Path::new(path), text))?;
    }
    let rest = json!({ "args": request.args, "env": request.env, "collect": request.collect, "limits": request.limits });
    let rest = serde_json::to_string_pretty(&rest)?.lines().map(marked).collect::<Vec<_>>().join("\n");
    writeln!(out, "with {rest}\nwhat screening found in it:")?;
    for finding in &shown.findings {
        writeln!(out, "  {}: {}", finding.action.name(), marked(&sentence(finding)))?;
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

/// A text in lines that no terminal breaks: what it put at the beginning of the next could
/// pass for a line with a number. What goes on stands behind a colon, as no line begins,
/// and takes the blank with it that would end the line unseen.
fn folded(text: &str) -> String {
    // A letter may be counted as wider than it is.
    let advance = |column: usize, letter| match letter {
        '\n' => 0,
        '\u{1100}'.. => column + 2,
        _ => column + 1,
    };
    let (mut out, mut column) = (String::with_capacity(text.len()), 0);
    for letter in text.chars() {
        // After a blank there is room for the widest letter.
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

/// A text, each line behind its number. Every line ends with a line feed; what else ends
/// one is marked.
fn list(out: &mut String, text: &str, grammar: Option<Grammar>) -> std::fmt::Result {
    lines(text, grammar)
        .enumerate()
        .try_for_each(|(index, line)| writeln!(out, "{:5} | {}", index + 1, marked(line.strip_suffix('\n').unwrap_or(line))))
}

/// A file or stdin.
fn show_content(out: &mut String, name: &str, content: &TextOrBase64, grammar: impl FnOnce(&str) -> Option<Grammar>) -> anyhow::Result<()> {
    let bytes = decode(content, name)?;
    match (content, str::from_utf8(&bytes)) {
        (TextOrBase64::Base64(encoded), Err(_)) => {
            writeln!(out, "{name}, {} bytes that are no UTF-8, in base64:\n      | {}", bytes.len(), encoded.base64)?;
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

/// A request with a token that the command line names: the same as if it stood in it, so
/// that one which stands there already is refused as a second.
///
/// # Errors
/// The token is none.
pub(crate) fn into_request(request: Vec<u8>, token: &str) -> Result<Vec<u8>, Refusal> {
    let token = approval::check_token(token)?;
    let Some(start) = request.iter().position(|byte| !byte.is_ascii_whitespace()).filter(|at| request[*at] == b'{') else {
        // Whatever it is, it is refused for that.
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

    /// What somebody who approves reads of a request.
    fn read_by_approver(request: &Value, grammar: Option<Grammar>) -> String {
        let shown = shown(request, grammar);
        in_words(&Waiting { requester: 7, seconds_left: 60, approver: None, shown }, "0").unwrap()
    }

    fn shown(request: &Value, grammar: Option<Grammar>) -> approval::Shown {
        approval::Shown {
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
        let said = read_by_approver(&json!({ "code": code }), Some(Grammar::Python));
        for line in [
            "    1 | # harmless⟨U+000D⟩\n",
            "    2 | import os⟨U+000D⟩\n",
            "    3 | x = '⟨U+000C⟩⟨U+001B⟩[2J'\n",
            "    4 | # \\r\\u{1b}⟨U+27E8⟩U+001B⟨U+27E9⟩\n",
        ] {
            assert!(said.contains(line), "{line:?}: {said}");
        }
        // The same to a shell.
        let said = read_by_approver(&json!({ "code": code }), Some(Grammar::Shell));
        assert!(said.contains("    1 | # harmless⟨U+000D⟩import os⟨U+000D⟩\n    2 | x"), "{said}");
    }

    #[test]
    fn no_line_passes_for_two_where_a_terminal_breaks_it() {
        let long = |pad: &str, times: usize| format!("#{}    2 | check()\nrun()", pad.repeat(times));
        let requests = [(" ", 71), ("\t", 9), ("\u{4e00}", 36), ("\u{202e}", 9)].map(|(pad, times)| json!({ "code": long(pad, times) }));
        for request in requests.into_iter().chain([json!({ "code": "", "args": [long(" ", 74)] })]) {
            let said = read_by_approver(&request, None);
            assert!(said.lines().all(|line| !line.starts_with("    2 | check")), "{said}");
            assert!(said.contains("\n      : ") && said.replace("\n      : ", "").contains("    2 | check()"), "{said}");
        }
        // The control: what fits is left alone.
        let said = read_by_approver(&json!({ "code": "x".repeat(72) }), None);
        assert!(said.contains(&format!("\n    1 | {}\n", "x".repeat(72))) && !said.contains("\n      : "), "{said}");
        // Nor does a blank vanish where a letter does not fit behind it.
        for columns in 60..72 {
            let code = |blank: &str| json!({ "code": format!("{}{blank}\u{4e00}", "x".repeat(columns)) });
            let said = [" ", ""].map(|blank| read_by_approver(&code(blank), None));
            assert!(said[0].lines().all(|line| !line.ends_with(' ')) && said[0] != said[1], "{said:?}");
        }
    }

    #[test]
    fn its_own_lines_fit_a_terminal() {
        for (session, approver) in [(false, None), (true, None), (true, Some(u32::MAX))] {
            let shown = approval::Shown { session, findings_omitted: u64::MAX, ..shown(&json!({ "code": "" }), None) };
            let token = "0123456789abcdef0123456789abcdef";
            let said = in_words(&Waiting { requester: u32::MAX, seconds_left: 86_400, approver, shown }, token).unwrap();
            assert!(said.lines().all(|line| line.chars().count() <= WIDTH) && !said.contains("\n      : "), "{said}");
            assert_eq!(said.contains(&format!("\nstockade approve --yes {token}\n")), approver.is_none(), "{said}");
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
            let [said, control] = [code, looks].map(|code| read_by_approver(&json!({ "code": code }), Some(Grammar::Shell)));
            assert!(said.contains(line) && !control.contains(line) && !control.contains('⟨'), "{said}{control}");
        }
        let said = read_by_approver(&json!({ "code": "", "args": ["a\u{a0}b\u{2800}"], "files": {"\u{3000}": ""} }), None);
        assert!(said.contains("\"a⟨U+00A0⟩b⟨U+2800⟩\"") && said.contains("\nfile \"⟨U+3000⟩\""), "{said}");
    }

    #[test]
    fn base64_that_is_text_is_shown_as_text_and_says_what_it_was() {
        let request = json!({
            "code": "", "stdin": {"base64": "b25lDXR3bw=="}, "args": ["\u{202e}"],
            "files": {"a\u{202e}.py": {"base64": "aW1wb3J0IG9zDXg="}, "b": {"base64": "/w=="}, "c": "a\rb"},
        });
        let said = read_by_approver(&request, Some(Grammar::Python));
        for part in [
            "\nstdin, 7 bytes, sent as base64 and decoded here:\n    1 | one⟨U+000D⟩\n    2 | two\n",
            "\nfile \"a⟨U+202E⟩.py\", 11 bytes, sent as base64 and decoded here:\n    1 | import os⟨U+000D⟩\n    2 | x\n",
            "\nfile \"b\", 1 bytes that are no UTF-8, in base64:\n      | /w==\n",
            "\nfile \"c\", 3 bytes:\n    1 | a⟨U+000D⟩\n    2 | b\n",
            "\"⟨U+202E⟩\"",
        ] {
            assert!(said.contains(part), "{part:?}: {said}");
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
