//! Screening: rules over parsed Python and shell code that report what a program is about to do.
//!
//! Advice, not a boundary: code that is written against the rules evades them, and the sandbox does
//! not depend on them. The parsers are large and read hostile text; deep nesting overflows their
//! stack. Only the program `stockade-screen` links them, and it locks itself down before it reads
//! ([`confine`]). The policy decides what a finding means.
#![forbid(unsafe_code)]

mod budget;
pub mod confine;
mod encoding;
mod findings;
mod paths;
mod python;
mod secrets;
mod shell;

use std::borrow::Cow;

use stockade_protocol::screen::{Answer, Grammar, Question, Rule, Source};

use findings::Findings;

/// Levels of code in strings of code.
const MAX_DEPTH: u8 = 3;

/// Reads code and returns findings. It may overflow the stack.
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
            Grammar::Python => python::screen_file(question, &readable, MAX_DEPTH, &mut findings),
            Grammar::Shell => shell::screen(question, &readable, MAX_DEPTH, &mut findings),
        }
        all += findings.count();
        found.extend(findings.into_found(number));
    }
    findings::answer(found, all)
}

/// Screens code in the string at `place` of a program.
fn screen_string(question: &Question<'_>, source: Source<'_>, depth: u8, place: (usize, usize), findings: &mut Findings<'_>) {
    let Some(depth) = depth.checked_sub(1) else { return };
    findings.inside(place, budget::of_code(source), |findings| match source.grammar {
        Grammar::Python => python::screen(question, source.code, depth, findings),
        Grammar::Shell => shell::screen(question, source.code, depth, findings),
    });
}

/// The code as its interpreter reads it: a shell skips NUL bytes.
fn as_read<'c>(source: &Source<'c>) -> Cow<'c, str> {
    match source.grammar {
        Grammar::Shell if source.code.contains('\0') => Cow::Owned(source.code.replace('\0', "")),
        _ => Cow::Borrowed(source.code),
    }
}
