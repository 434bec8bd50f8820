//! Passwords in the arguments of known commands, by their options.
//!
//! Strings that look like secrets are found by [`secrets`] everywhere.

use super::words::Word;
use crate::secrets;

/// The value of such an option.
#[derive(Clone, Copy, PartialEq)]
enum Given {
    Password,
    /// `user:password`.
    Credentials,
}

/// Commands and their options with passwords.
const OPTIONS: [(&str, &[&str], Given); 3] = [
    ("curl", &["-u", "--user", "-U", "--proxy-user"], Given::Credentials),
    ("wget", &["--password", "--http-password", "--ftp-password", "--proxy-password"], Given::Password),
    ("sshpass", &["-p"], Given::Password),
];

/// The passwords in the arguments of a command.
pub(super) fn given<'w>(name: &str, arguments: &'w [Word]) -> Vec<&'w str> {
    let Some((_, options, given)) = OPTIONS.iter().find(|(known, ..)| *known == name) else { return Vec::new() };
    let next = arguments.iter().skip(1).map(Some).chain([None]);
    let values = arguments.iter().zip(next).filter_map(|(word, next)| match behind(&word.text, options, *given)? {
        "" => next.map(|next| next.text.as_str()),
        value => Some(value),
    });
    let passwords = values.filter_map(|value| match given {
        Given::Password => Some(value),
        Given::Credentials => value.split_once(':').map(|(_, password)| password),
    });
    passwords.filter(|password| secrets::is_password(password)).collect()
}

/// The value of one of these options in the same word; empty where the next word is its
/// value.
fn behind<'w>(word: &'w str, options: &[&str], given: Given) -> Option<&'w str> {
    options.iter().find_map(|option| match option.starts_with("--") {
        true => word.strip_prefix(*option).and_then(|rest| if rest.is_empty() { Some(rest) } else { rest.strip_prefix('=') }),
        false => {
            let (before, value) = word.strip_prefix('-')?.split_once(option.trim_start_matches('-'))?;
            // Other options come before it, as in `-su`.
            let several = given == Given::Credentials && before.bytes().all(|byte| byte.is_ascii_alphabetic());
            (before.is_empty() || several).then_some(value)
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passwords_are_what_the_options_say() {
        let of = |line: &str| {
            let words: Vec<Word> = line.split(' ').map(|word| Word::plain(word.to_owned())).collect();
            given(&words[0].text, &words[1..]).join(" ")
        };
        for line in [
            "curl -u me:pa55w0rd! h",
            "curl -sSu me:pa55w0rd! h",
            "curl -ume:pa55w0rd! h",
            "curl h --user=me:pa55w0rd!",
            "curl --proxy-user me:pa55w0rd! h",
            "wget --password=pa55w0rd! h",
            "sshpass -p pa55w0rd! ssh h",
        ] {
            assert_eq!(of(line), "pa55w0rd!", "{line}");
        }
        for line in [
            "curl -u me h",
            "curl -u me:$PASSWORD h",
            "curl -u",
            "curl --url me:pa55w0rd!",
            "curl -o u:pa55w0rd! h",
            "wget -p pa55w0rd! h",
            "sshpass -fpa55w0rd! ssh h",
            "ls -u me:pa55w0rd!",
        ] {
            assert_eq!(of(line), "", "{line}");
        }
    }
}
