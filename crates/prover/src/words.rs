//! Answers and expectations in words.

use nix::errno::Errno;
use stockade_protocol::{
    Report,
    probe::{Answer, NO_PROCESS},
};

use crate::attack::Expected;

/// An errno's name.
pub(crate) fn errno_name(number: i32) -> String {
    match Errno::from_raw(number) {
        Errno::UnknownErrno => format!("errno {number}"),
        known => format!("{known:?}"),
    }
}

/// An answer.
pub(crate) fn answer(answer: Option<Answer>) -> String {
    match answer {
        None => String::from("no answer: the probe itself was ended"),
        Some(Answer::Result(value)) if value < 0 => errno_name(i32::try_from(-value).unwrap_or(0)),
        Some(Answer::Result(value)) => format!("success ({value})"),
        Some(Answer::Broken { step: NO_PROCESS, errno }) => {
            format!("not tried: the probe got no process for it ({})", errno_name(errno.cast_signed()))
        }
        Some(Answer::Broken { step, errno: 0 }) => format!("not tried: a condition of step {step} was not met"),
        Some(Answer::Broken { step, errno }) => format!("not tried: step {step} answered {}", errno_name(errno.cast_signed())),
        Some(Answer::Signal(14)) => String::from("nothing: it hung until it was ended"),
        Some(Answer::Signal(number)) => format!("ended by signal {number}"),
        Some(Answer::Exited(status)) if status == stockade_protocol::probe::NO_BATCH.cast_unsigned() => {
            String::from("the program was started")
        }
        Some(Answer::Exited(status)) => format!("another program, which ended with {status}"),
    }
}

/// An expectation.
pub(crate) fn expected(expected: Expected) -> String {
    match expected {
        Expected::Errno(list) => list.iter().map(|number| errno_name(*number)).collect::<Vec<_>>().join(" or "),
        Expected::Value(value) => format!("{value}"),
    }
}

/// A run's end.
pub(crate) fn verdict(report: &Report) -> String {
    let verdict = serde_word(report.verdict);
    match &report.signal {
        Some(signal) => format!("{verdict} ({signal})"),
        None => format!("{verdict} with status {}", report.code),
    }
}

/// A verdict as the contract spells it.
pub(crate) fn serde_word(verdict: stockade_protocol::Verdict) -> String {
    let camel = format!("{verdict:?}");
    let mut word = String::new();
    for (index, letter) in camel.chars().enumerate() {
        if letter.is_uppercase() && index > 0 {
            word.push('_');
        }
        word.extend(letter.to_lowercase());
    }
    word
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_script_without_a_process_has_no_step() {
        let without = answer(Some(Answer::Broken { step: NO_PROCESS, errno: 11 }));
        assert_eq!(without, "not tried: the probe got no process for it (EAGAIN)");
        assert_eq!(answer(Some(Answer::Broken { step: 3, errno: 11 })), "not tried: step 3 answered EAGAIN");
    }
}
