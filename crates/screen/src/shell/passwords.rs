//! Passwords in the arguments of known commands, by their options.
//!
//! Strings that look like secrets are found by [`secrets`] everywhere.

use super::words::{Word, option_values};
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
    let values = option_values(arguments, options, *given == Given::Credentials);
    let passwords = values.filter_map(|value| match given {
        Given::Password => Some(value),
        Given::Credentials => value.split_once(':').map(|(_, password)| password),
    });
    passwords.filter(|password| secrets::is_password(password)).collect()
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
