//! What a single value must look like; nothing about how values go together.
//!
//! Each function returns the one spelling of a written text, or what is wrong with it. None looks at the host: whether a path exists is the plan's question.

use std::path::{Component, Path, PathBuf};

use stockade_protocol::{LimitKey, NO_TEMPLATE};

use crate::{
    diagnostic::{Diagnostic, Located, quote},
    model::OUTPUT,
    names,
    plan::COMMANDS,
};

pub(crate) type Checked<T> = Result<T, Diagnostic>;

fn complain<T>(title: String, label: &str) -> Checked<T> {
    Err(Diagnostic::new(title, label))
}

/// One of these texts, with a guess when it is none.
pub(crate) fn listed(what: &str, known: &[&str], text: &str) -> Checked<String> {
    if known.contains(&text) { Ok(text.to_owned()) } else { Err(unknown(what, text, known.iter().copied())) }
}

/// One of a few words.
pub(crate) fn choice(what: &str, known: &[&str], text: &str) -> Checked<String> {
    if known.contains(&text) { Ok(text.to_owned()) } else { Err(unlisted(what, text, known.iter().copied())) }
}

/// An unknown word in the place of a few of which some let code do more: a guess could name one of
/// these, so all are listed.
pub(crate) fn unlisted<'a>(what: &str, text: &str, known: impl Iterator<Item = &'a str>) -> Diagnostic {
    let diagnostic = Diagnostic::new(format!("unknown {what} {}", quote(text)), "not known");
    diagnostic.help(format!("known: {}", known.collect::<Vec<_>>().join(", ")))
}

/// Looks a word up, with a guess when it is unknown.
pub(crate) fn one_of<T: Copy>(table: &[(&str, T)], what: &str, text: &str) -> Checked<T> {
    names::find(table, text).ok_or_else(|| unknown(what, text, table.iter().map(|(name, _)| *name)))
}

/// An unknown word: the likely one where there is one, else all.
pub(crate) fn unknown<'a>(what: &str, text: &str, known: impl Iterator<Item = &'a str> + Clone) -> Diagnostic {
    let diagnostic = Diagnostic::new(format!("unknown {what} {}", quote(text)), "not known");
    match names::nearest(text, known.clone()) {
        Some(name) => diagnostic.help(format!("did you mean `{name}`?")),
        None => diagnostic.help(format!("known: {}", known.collect::<Vec<_>>().join(", "))),
    }
}

/// A path below the root of the host, in its plainest spelling.
pub(crate) fn absolute(text: &str) -> Checked<String> {
    let path = Path::new(text);
    let title = || format!("{} is not a usable path", quote(text));
    if text.chars().any(char::is_control) {
        return complain(title(), "holds a control character");
    }
    if !path.is_absolute() {
        return complain(title(), "must be absolute: start with /");
    }
    if path.components().any(|part| part == Component::ParentDir) {
        return complain(title(), "must not hold `..`");
    }
    if text.len() >= 4096 {
        return complain(title(), "longer than the kernel takes");
    }
    let plain: PathBuf = path.components().collect();
    if plain.as_os_str() != text {
        return Err(Diagnostic::new(title(), "not in its plain spelling").help(format!("write `{}`", plain.display())));
    }
    Ok(text.to_owned())
}

/// Directories that the launcher makes, or leaves out.
const OWN: [&str; 3] = ["/proc", "/sys", "/dev"];

/// Whether no path that is shown may be this one, by itself or at the end of a link.
pub fn is_never_shown(path: &Path) -> bool {
    path == Path::new("/") || own(path).is_some()
}

/// The launcher's own directory that a path of the host would replace.
fn own(path: &Path) -> Option<&'static str> {
    let covers_names = path.starts_with(COMMANDS) || Path::new(COMMANDS).starts_with(path);
    OWN.into_iter().find(|own| path.starts_with(own)).or(covers_names.then_some(COMMANDS))
}

/// Whether a policy may show this path of the host.
pub fn may_be_shown(path: &Path) -> bool {
    path.to_str().is_some_and(|text| shown(text).is_ok())
}

/// A path that the sandbox's root may show.
pub(crate) fn shown(text: &str) -> Checked<String> {
    let text = absolute(text)?;
    let path = Path::new(&text);
    if path == Path::new("/") {
        return Err(
            Diagnostic::new("the whole host cannot be shown", "every file of the host").help("name the directories that the code needs")
        );
    }
    match own(path) {
        None => Ok(text),
        Some(own) => Err(Diagnostic::new(format!("{} cannot be taken from the host", quote(&text)), "made by the launcher")
            .help(format!("the sandbox has its own {own}, or none"))),
    }
}

pub(crate) fn syscall(text: &str) -> Checked<String> {
    if names::is_syscall(text) {
        return Ok(text.to_owned());
    }
    let diagnostic = Diagnostic::new(format!("unknown system call {}", quote(text)), "libseccomp knows none of this name");
    let known = names::syscalls();
    Err(match names::nearest(text, known.iter().map(String::as_str)) {
        Some(name) => diagnostic.help(format!("did you mean `{name}`?")),
        None => diagnostic,
    })
}

pub(crate) fn ioctl(text: &str) -> Checked<u32> {
    let number = text.strip_prefix("0x").map(|digits| u32::from_str_radix(digits, 16).ok());
    let forbidden = names::FORBIDDEN_IOCTLS.iter().find(|(name, value, _)| *name == text || number == Some(Some(*value)));
    if let Some((name, _, reason)) = forbidden {
        return complain(format!("no policy may allow {name}"), reason);
    }
    match number {
        Some(Some(number)) if !text.starts_with("0x+") => Ok(number),
        Some(_) => complain(format!("{} is not a number of an ioctl request", quote(text)), "0x and at most 8 digits"),
        None => names::find(names::IOCTLS, text).ok_or_else(|| {
            let diagnostic = Diagnostic::new(format!("unknown ioctl request {}", quote(text)), "not known");
            diagnostic.help(match names::nearest(text, names::IOCTLS.iter().map(|(name, _)| *name)) {
                Some(name) => format!("did you mean `{name}`?"),
                None => "a request without a name is written as a number, such as \"0x5401\"".to_owned(),
            })
        }),
    }
}

fn is_variable(text: &str) -> bool {
    !text.is_empty()
        && text.len() <= 256
        && !text.starts_with(|c: char| c.is_ascii_digit())
        && text.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
}

/// The name of an environment variable that a policy sets.
pub(crate) fn variable(text: &str) -> Checked<String> {
    if text == "HOME" {
        return Err(Diagnostic::new("`HOME` cannot be set", "chosen by the launcher").help("`[scratch] home = true` moves it into scratch"));
    }
    if is_variable(text) {
        return Ok(text.to_owned());
    }
    complain(format!("{} cannot name a variable", quote(text)), "letters, digits and _, no digit first")
}

pub(crate) fn variable_value(text: &str) -> Checked<String> {
    if text.contains('\0') {
        return complain("a variable's value cannot hold NUL".to_owned(), "holds NUL");
    }
    Ok(text.to_owned())
}

/// Name or digest of an image.
pub(crate) fn image(text: &str) -> Checked<String> {
    const MAX_LEN: usize = 512;
    if !text.is_empty() && text.len() <= MAX_LEN && text.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'*') {
        return Ok(text.to_owned());
    }
    let diagnostic =
        Diagnostic::new(format!("{} cannot name an image", quote(text)), "printable ASCII without spaces and `*`, at most 512");
    Err(diagnostic.help("a name such as `python:3.12`, or a digest such as `sha256:` and 64 hex digits"))
}

/// A variable's name, or its beginning and a star.
pub(crate) fn pattern(text: &str) -> Checked<String> {
    let stem = text.strip_suffix('*').unwrap_or(text);
    if is_variable(stem) {
        return Ok(text.to_owned());
    }
    complain(format!("{} cannot name a variable", quote(text)), "letters, digits and _, no digit first, a * only at the end")
}

/// A name of Python, its parts behind dots.
pub(crate) fn dotted(what: &str, text: &str) -> Checked<String> {
    let part = |part: &str| {
        !part.is_empty() && !part.starts_with(|c: char| c.is_ascii_digit()) && part.chars().all(|c| c.is_alphanumeric() || c == '_')
    };
    if text.len() <= 256 && text.split('.').all(part) {
        return Ok(text.to_owned());
    }
    complain(format!("{} is not the name of a {what}", quote(text)), "letters, digits and _, parts behind dots, no digit first")
}

/// A glob below scratch.
pub(crate) fn glob(text: &str) -> Checked<String> {
    let title = || format!("{} is not a usable glob", quote(text));
    if text.is_empty() || text.chars().any(char::is_control) {
        return complain(title(), "empty, or with a control character");
    }
    if text.starts_with('/') {
        return complain(title(), "must be relative to scratch: no / first");
    }
    if text.split('/').any(|part| matches!(part, ".." | "." | "")) {
        return complain(title(), "must not hold `..`, `.` or an empty part");
    }
    // A malformed glob matches nothing, so a file that it should hide would stay readable.
    match fast_glob::validate(text) {
        Ok(()) => Ok(text.to_owned()),
        Err(error) => complain(title(), &error.to_string()),
    }
}

pub(crate) fn user(text: &str) -> Checked<String> {
    let first = text.starts_with(|c: char| c.is_ascii_lowercase() || c == '_');
    let rest = text.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || matches!(c, '_' | '-'));
    if !first || !rest || text.len() > 32 {
        return complain(
            format!("{} cannot be a login name", quote(text)),
            "a small letter or _ first, then small letters, digits, _ and -; at most 32",
        );
    }
    if text == "root" {
        return complain("the code is never root".to_owned(), "choose another name");
    }
    Ok(text.to_owned())
}

/// A user or group id inside.
pub(crate) fn id(number: i64) -> Checked<u32> {
    match u32::try_from(number) {
        Ok(0) => complain("the code is never user or group 0".to_owned(), "must be above 0"),
        Ok(65534) => complain("65534 stands for ids that are not mapped".to_owned(), "choose another"),
        Ok(number) if number < u32::MAX => Ok(number),
        _ => complain(format!("{number} is not a user or group id"), "1 to 4294967294"),
    }
}

pub(crate) fn hostname(text: &str) -> Checked<String> {
    let label = |part: &str| {
        !part.is_empty() && !part.starts_with('-') && !part.ends_with('-') && part.chars().all(|c| c.is_ascii_alphanumeric() || c == '-')
    };
    if text.len() <= 64 && text.split('.').all(label) {
        return Ok(text.to_owned());
    }
    complain(format!("{} cannot be a host name", quote(text)), "letters, digits and inner -, at most 64")
}

/// No preview at all.
pub(crate) const NO_BYTES: &str = "0B";

/// How much of something is written down.
pub(crate) fn preview(text: &str) -> Checked<String> {
    const MAX: u64 = 4096;
    match LimitKey::OutputSize.parse_text(text) {
        Ok(Some(bytes)) if bytes <= MAX => Ok(text.to_owned()),
        // No limit is 0, but a preview may be.
        Err(_) if text == NO_BYTES => Ok(text.to_owned()),
        _ => complain(format!("{} is not a size of a preview", quote(text)), "such as \"256B\"; \"0B\" for none, at most \"4KiB\""),
    }
}

/// How long code may wait for its approval, in milliseconds.
pub(crate) fn approval_time(text: &str) -> Checked<String> {
    const MIN: u64 = 10 * 1000;
    const MAX: u64 = 24 * 3600 * 1000;
    match LimitKey::Wall.parse_text(text) {
        Ok(Some(time)) if (MIN..=MAX).contains(&time) => Ok(text.to_owned()),
        _ => complain(format!("{} is not a time to wait for an approval", quote(text)), "such as \"15min\"; \"10s\" to \"24h\""),
    }
}

/// The name of a language.
pub(crate) fn language(text: &str) -> Checked<String> {
    let good = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || matches!(c, '_' | '-' | '+' | '#' | '.');
    if text.starts_with(|c: char| c.is_ascii_lowercase()) && text.len() <= 32 && text.chars().all(good) {
        return Ok(text.to_owned());
    }
    complain(format!("{} cannot name a language", quote(text)), "a small letter first, then small letters, digits, _ - + # .; at most 32")
}

/// The name of a template.
pub(crate) fn template(text: &str) -> Checked<String> {
    if text == NO_TEMPLATE {
        return Err(
            Diagnostic::new(format!("{} cannot name a template", quote(text)), "stands for no template").help("choose another name")
        );
    }
    let good = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || matches!(c, '_' | '-');
    if text.starts_with(|c: char| c.is_ascii_lowercase()) && text.len() <= 32 && text.chars().all(good) {
        return Ok(text.to_owned());
    }
    complain(format!("{} cannot name a template", quote(text)), "a small letter first, then small letters, digits, _ and -; at most 32")
}

/// The template of a runtime.
pub(crate) fn template_or_none(text: &str) -> Checked<String> {
    if text == NO_TEMPLATE { Ok(text.to_owned()) } else { template(text) }
}

/// A module that a template imports.
pub(crate) fn import(text: &str) -> Checked<String> {
    const MAX: usize = 200;
    if text.len() > MAX {
        return complain("the name of a module is too long".to_owned(), &format!("{} bytes, at most {MAX}", text.len()));
    }
    dotted("module", text)
}

/// Python code that a template runs.
pub(crate) fn warm(text: &str) -> Checked<String> {
    const MAX: usize = 16 << 10;
    if text.contains('\0') {
        return complain("the code of a template cannot hold NUL".to_owned(), "holds NUL");
    }
    if text.len() > MAX {
        return Err(Diagnostic::new("the code of a template is too long", format!("{} bytes, at most {MAX}", text.len()))
            .help("put the code into a module that the sandbox shows, and name the module in `imports`"));
    }
    Ok(text.to_owned())
}

/// The age at which an image is made anew.
pub(crate) fn max_age(text: &str) -> Checked<String> {
    const MIN: u64 = 1000;
    const MAX: u64 = 24 * 3600 * 1000;
    match LimitKey::Wall.parse_text(text) {
        Ok(Some(age)) if (MIN..=MAX).contains(&age) => Ok(text.to_owned()),
        _ => complain(format!("{} is not an age of an image", quote(text)), "such as \"10min\"; \"1s\" to \"24h\""),
    }
}

/// A whole number in the range of its key.
pub(crate) fn count(key: &str, least: i64, most: i64, number: i64) -> Checked<i64> {
    if (least..=most).contains(&number) {
        return Ok(number);
    }
    complain(format!("`{key}` cannot be {number}"), &format!("{least} to {most}"))
}

pub(crate) fn extension(text: &str) -> Checked<String> {
    if (1..=16).contains(&text.len()) && text.chars().all(|c| c.is_ascii_alphanumeric()) {
        return Ok(text.to_owned());
    }
    complain(format!("{} cannot end a file's name", quote(text)), "letters and digits without the dot, at most 16")
}

/// The name of a policy.
pub(crate) fn policy_name(text: &str) -> Checked<String> {
    if is_policy_name(text) {
        return Ok(text.to_owned());
    }
    complain(
        format!("{} cannot name a policy", quote(text)),
        "a small letter or digit first, then small letters, digits, _ and -; at most 64",
    )
}

/// Whether this can name a policy.
pub fn is_policy_name(text: &str) -> bool {
    text.starts_with(|c: char| c.is_ascii_lowercase() || c.is_ascii_digit())
        && text.len() <= 64
        && text.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || matches!(c, '_' | '-'))
}

/// The name of a policy, or the absolute path of its file.
pub(crate) fn policy_reference(text: &str) -> Checked<String> {
    if text.contains('/') { absolute(text) } else { policy_name(text) }
}

/// A line for a person.
pub(crate) fn line(text: &str) -> Checked<String> {
    if text.trim().is_empty() || text.len() > 200 || text.chars().any(char::is_control) {
        return complain("this is not one line for a person".to_owned(), "one line, not empty, at most 200 bytes");
    }
    Ok(text.to_owned())
}

/// A runtime's command: a program's path, and one place for the code, or for what was made of it.
pub(crate) fn command(words: &[Located<String>]) -> Checked<()> {
    let program = program(words, "such as [\"/usr/bin/perl\", \"{file}\"]")?;
    if program.value != OUTPUT {
        absolute(&program.value)?;
    }
    match places(words, FILE) {
        0 if places(words, OUTPUT) > 0 => Ok(()),
        1 => Ok(()),
        found => Err(Diagnostic::new("exactly one argument of a command holds `{file}`", format!("{found} of them here"))
            .help("`{file}` becomes the path of the code, such as [\"/usr/bin/perl\", \"{file}\"]")),
    }
}

/// A runtime's compiler: its path, one place for the code and at least one for what it makes. No words:
/// none.
pub(crate) fn compile(words: &[Located<String>]) -> Checked<()> {
    if words.is_empty() {
        return Ok(());
    }
    const SUCH: &str = "such as [\"/usr/bin/gcc\", \"-O2\", \"-o\", \"{output}\", \"{file}\"]";
    absolute(&program(words, SUCH)?.value)?;
    match (places(words, FILE), places(words, OUTPUT)) {
        (1, 1..) => Ok(()),
        (1, _) => {
            let help = format!("`{OUTPUT}` becomes the path of what the command runs, {SUCH}");
            Err(Diagnostic::new(format!("no argument of `compile` holds `{OUTPUT}`"), "it makes nothing").help(help))
        }
        (found, _) => Err(Diagnostic::new("exactly one argument of `compile` holds `{file}`", format!("{found} of them here"))
            .help(format!("`{FILE}` becomes the path of the code, {SUCH}"))),
    }
}

const FILE: &str = "{file}";

fn program<'w>(words: &'w [Located<String>], such: &str) -> Checked<&'w Located<String>> {
    let Some(program) = words.first() else {
        return Err(Diagnostic::new("a command needs a program", "empty").help(such));
    };
    if program.value.contains(FILE) {
        return Err(Diagnostic::new("the code cannot be its own interpreter", "the first word is the program"));
    }
    Ok(program)
}

fn places(words: &[Located<String>], place: &str) -> usize {
    words.iter().map(|word| word.value.matches(place).count()).sum()
}

/// One word of a runtime's command.
pub(crate) fn argument(text: &str) -> Checked<String> {
    if text.is_empty() || text.contains('\0') {
        return complain("a command's word is empty or holds NUL".to_owned(), "here");
    }
    Ok(text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_absolute_and_plain() {
        assert_eq!(absolute("/usr/share").ok(), Some("/usr/share".to_owned()));
        for bad in ["", "usr", "./usr", "/usr/../etc", "/usr/", "//usr", "/usr/./x", "/a\0b", "/a\nb"] {
            assert!(absolute(bad).is_err(), "{bad:?}");
        }
        for bad in ["/", "/proc", "/proc/self", "/sys/class", "/dev", "/run", "/run/stockade", "/run/stockade/bin/python"] {
            assert!(shown(bad).is_err(), "{bad:?}");
        }
        assert!(shown("/devices").is_ok() && shown("/run/service").is_ok());
    }

    #[test]
    fn ids_are_never_zero() {
        assert_eq!(id(1000).ok(), Some(1000));
        for bad in [0, -1, 65534, i64::from(u32::MAX), i64::MAX] {
            assert!(id(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn names_hold_only_what_a_passwd_line_can() {
        assert!(user("sandbox").is_ok() && user("_a-1").is_ok());
        for bad in ["", "root", "a:b", "a b", "-a", "A", "a\n", "1a"] {
            assert!(user(bad).is_err(), "{bad:?}");
        }
        assert!(hostname("stockade").is_ok() && hostname("a.b-c").is_ok());
        for bad in ["", "-a", "a-", "a..b", "a_b", "a b", "a\n"] {
            assert!(hostname(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn globs_stay_below_scratch() {
        for good in [".git", ".env*", "**/*.pem", "a/[ab]/{x,y}", "[[]x", "\\[x", "a}"] {
            assert!(glob(good).is_ok(), "{good}");
        }
        for bad in ["", "/etc", "../x", "a/../b", "a//b", "a\0"] {
            assert!(glob(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn malformed_globs_are_refused_because_they_would_match_nothing() {
        let groups = "{a,b}".repeat(11);
        for bad in ["[ab", "{a,b", "a][b", "secrets\\", groups.as_str()] {
            assert!(glob(bad).is_err_and(|diagnostic| !diagnostic.label.is_empty()), "{bad}");
        }
    }

    #[test]
    fn variables_have_names_that_a_shell_can_spell() {
        assert!(variable("LANG").is_ok() && pattern("LC_*").is_ok());
        for bad in ["", "1A", "A=B", "A B", "HOME", "A*"] {
            assert!(variable(bad).is_err(), "{bad:?}");
        }
        for bad in ["*", "A*B", "A**", ""] {
            assert!(pattern(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn terminal_injection_is_refused_by_name_and_by_number() {
        for bad in ["TIOCSTI", "0x5412", "0x00005412", "TIOCLINUX", "0x541C", "TIOCSETD", "0x5423", "TIOCCONS", "0x541d"] {
            assert!(ioctl(bad).is_err_and(|diagnostic| diagnostic.title.starts_with("no policy may allow")), "{bad}");
        }
        assert_eq!(ioctl("TCGETS").ok(), Some(0x5401));
        assert_eq!(ioctl("0x5401").ok(), Some(0x5401));
        for bad in ["5401", "0x", "0x+5401", "0x100005401", "TCGETZ"] {
            assert!(ioctl(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn an_unknown_system_call_is_refused_with_the_likely_name() {
        assert_eq!(syscall("opnat").err().and_then(|diagnostic| diagnostic.help).as_deref(), Some("did you mean `openat`?"));
        assert!(syscall("read\0x").is_err());
    }
}
