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
mod findings;
mod paths;
mod python;
mod secrets;
mod shell;

use stockade_protocol::screen::{Answer, Grammar, Question};

use findings::Findings;

/// Code in text in code: deeper is not looked into.
const DEEPEST: u8 = 3;

/// Reads code and says what it found. It may overflow the stack.
pub fn screen(question: &Question<'_>) -> Answer {
    let mut findings = Findings::new(question.code);
    match question.grammar {
        Grammar::Python => python::screen(question, question.code, DEEPEST, &mut findings),
        Grammar::Shell => shell::screen(question, question.code, DEEPEST, &mut findings),
    }
    findings.into_answer()
}
