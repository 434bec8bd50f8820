//! What a program is about to do, as far as its text tells: rules over parsed Python and
//! shell code.
//!
//! Advice, not a boundary: whoever writes code against these rules gets past them, and the
//! sandbox holds without them. The parsers are large and meet hostile text: they overflow
//! their stack on deep nesting and may do worse. Nothing but the program `stockade-screen`
//! links them, and it confines itself before it reads ([`confine`]). What is to be done
//! about a finding is the policy's to say.
#![forbid(unsafe_code)]

pub mod confine;
mod decode;
mod encoding;
mod findings;
mod paths;
mod python;
mod secrets;
mod shell;
mod work;

use std::borrow::Cow;

use stockade_protocol::screen::{Answer, Grammar, Question, Rule, Source};

use findings::Findings;

/// Code in text in code: deeper is not looked into.
const DEEPEST: u8 = 3;

/// Reads code and says what it found. It may overflow the stack.
pub fn screen(question: &Question<'_>) -> Answer {
    let (mut found, mut all) = (Vec::new(), 0);
    for (number, source) in (0u32..).zip(&question.sources) {
        let readable = as_read(source);
        let mut findings = Findings::new(&readable, source.grammar, question.rules);
        if readable.len() < source.code.len() || (source.grammar == Grammar::Python && readable.contains('\0')) {
            let at = source.code.find('\0').unwrap_or_default();
            findings.add(Rule::HiddenName, (at, at), "a NUL byte");
        }
        match source.grammar {
            Grammar::Python => python::screen_file(question, &readable, DEEPEST, &mut findings),
            Grammar::Shell => shell::screen(question, &readable, DEEPEST, &mut findings),
        }
        all += findings.count();
        found.extend(findings.into_found(number));
    }
    findings::answer(found, all)
}

/// The code as its interpreter takes it: a shell skips NUL bytes, and the commands that
/// they cut in two are whole.
fn as_read<'c>(source: &Source<'c>) -> Cow<'c, str> {
    match source.grammar {
        Grammar::Shell if source.code.contains('\0') => Cow::Owned(source.code.replace('\0', "")),
        _ => Cow::Borrowed(source.code),
    }
}
