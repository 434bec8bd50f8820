//! Answers and expectations in words.

use stockade_protocol::{Report, probe::Answer};

use crate::attack::Expected;

/// Errnos by the kernel's names.
pub(crate) mod errno {
    #![allow(missing_docs, reason = "the kernel's names")]
    pub(crate) const EPERM: i32 = 1;
    pub(crate) const ENOENT: i32 = 2;
    pub(crate) const ESRCH: i32 = 3;
    pub(crate) const EBADF: i32 = 9;
    pub(crate) const EAGAIN: i32 = 11;
    pub(crate) const ENOMEM: i32 = 12;
    pub(crate) const EACCES: i32 = 13;
    pub(crate) const EBUSY: i32 = 16;
    pub(crate) const EINVAL: i32 = 22;
    pub(crate) const EMFILE: i32 = 24;
    pub(crate) const ETXTBSY: i32 = 26;
    pub(crate) const ENOSPC: i32 = 28;
    pub(crate) const EROFS: i32 = 30;
    pub(crate) const ENOSYS: i32 = 38;
    pub(crate) const EOPNOTSUPP: i32 = 95;
    pub(crate) const ENETUNREACH: i32 = 101;
    pub(crate) const ECONNREFUSED: i32 = 111;
    pub(crate) const EHOSTUNREACH: i32 = 113;
}

const NAMES: [&str; 41] = [
    "0",
    "EPERM",
    "ENOENT",
    "ESRCH",
    "EINTR",
    "EIO",
    "ENXIO",
    "E2BIG",
    "ENOEXEC",
    "EBADF",
    "ECHILD",
    "EAGAIN",
    "ENOMEM",
    "EACCES",
    "EFAULT",
    "ENOTBLK",
    "EBUSY",
    "EEXIST",
    "EXDEV",
    "ENODEV",
    "ENOTDIR",
    "EISDIR",
    "EINVAL",
    "ENFILE",
    "EMFILE",
    "ENOTTY",
    "ETXTBSY",
    "EFBIG",
    "ENOSPC",
    "ESPIPE",
    "EROFS",
    "EMLINK",
    "EPIPE",
    "EDOM",
    "ERANGE",
    "EDEADLK",
    "ENAMETOOLONG",
    "ENOLCK",
    "ENOSYS",
    "ENOTEMPTY",
    "ELOOP",
];
const LATER: [(i32, &str); 18] = [
    (61, "ENODATA"),
    (75, "EOVERFLOW"),
    (77, "EBADFD"),
    (88, "ENOTSOCK"),
    (92, "ENOPROTOOPT"),
    (93, "EPROTONOSUPPORT"),
    (94, "ESOCKTNOSUPPORT"),
    (95, "EOPNOTSUPP"),
    (97, "EAFNOSUPPORT"),
    (98, "EADDRINUSE"),
    (99, "EADDRNOTAVAIL"),
    (101, "ENETUNREACH"),
    (104, "ECONNRESET"),
    (110, "ETIMEDOUT"),
    (111, "ECONNREFUSED"),
    (113, "EHOSTUNREACH"),
    (115, "EINPROGRESS"),
    (126, "ENOKEY"),
];

/// An errno's name.
pub(crate) fn errno_name(number: i32) -> String {
    let early = usize::try_from(number).ok().and_then(|index| NAMES.get(index)).copied();
    let name = early.or_else(|| LATER.iter().find(|(later, _)| *later == number).map(|(_, name)| *name));
    name.map_or_else(|| format!("errno {number}"), String::from)
}

/// An answer.
pub(crate) fn answer(answer: Option<Answer>) -> String {
    match answer {
        None => String::from("no answer: the probe itself was ended"),
        Some(Answer::Result(value)) if value < 0 => errno_name(i32::try_from(-value).unwrap_or(0)),
        Some(Answer::Result(value)) => format!("success ({value})"),
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
