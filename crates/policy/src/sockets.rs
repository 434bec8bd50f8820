//! Which Unix sockets of the host a caller's view may show.
//!
//! A pattern is an absolute path, with `*` in the last name alone. Sockets through which each who speaks to
//! them acts as the user are never shown, whatever a policy says: a pattern that takes one in by name is
//! no pattern, and a path with such a name is matched by none. It does not look at the host.

use std::path::Path;

use crate::{
    check::{self, Checked},
    diagnostic::{Diagnostic, quote},
};

/// Names of sockets whose owner does for a client what the user may do, or root: container engines,
/// message buses, agents that hold keys, displays. The last ones are beginnings of names.
const NAMES: [&str; 24] = [
    "docker.sock",
    "podman.sock",
    "containerd.sock",
    "crio.sock",
    "buildkitd.sock",
    "libvirt-sock",
    "unix.socket",
    "snapd.socket",
    "system_bus_socket",
    "bus",
    "private",
    "ssh",
    ".ssh",
    "control",
    "containerd.sock.ttrpc",
    "virtqemud-sock",
    "agent.",
    "ssh-agent",
    "S.",
    "bus_",
    "dbus-",
    "wayland-",
    "pipewire-",
    "X",
];
/// How many of these are whole names.
const WHOLE: usize = 16;

/// Whether a socket's name is that of one which is never shown.
pub(crate) fn is_never_shown(path: &Path) -> bool {
    let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let (whole, begun) = NAMES.split_at(WHOLE);
    whole.contains(&name.as_str()) || begun.iter().any(|begun| name.starts_with(begun))
}

/// Whether a pattern matches a path.
pub(crate) fn matches(pattern: &str, path: &Path) -> bool {
    path.to_str().is_some_and(|path| fast_glob::glob_match(pattern, path))
}

/// Checks a pattern.
pub(crate) fn pattern(text: &str) -> Checked<String> {
    let title = || format!("{} cannot name a socket", quote(text));
    check::absolute(text)?;
    let (above, name) = text.rsplit_once('/').unwrap_or(("", text));
    let is_plain = |text: &str| !text.contains(['?', '[', ']', '{', '}', '!', '\\']);
    if name.is_empty() || above.contains('*') || name.contains("**") || !is_plain(text) {
        return Err(Diagnostic::new(title(), "a path, with `*` in the last name alone and no other wildcard"));
    }
    let directory = Path::new(above);
    match NAMES.iter().find(|name| matches(text, &directory.join(name)) || is_never_shown(Path::new(text))) {
        None => Ok(text.to_owned()),
        Some(name) => Err(Diagnostic::new(title(), format!("it takes in {name}, whose owner acts for its clients as the user"))
            .help("name the socket of one program, such as /tmp/proxy-*.sock")),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]
    use std::path::Path;

    use super::{is_never_shown, matches, pattern};

    #[test]
    fn a_pattern_names_sockets_of_one_directory() {
        for good in ["/tmp/claude-http-*.sock", "/run/user/1000/proxy.sock"] {
            assert_eq!(pattern(good).unwrap(), good);
        }
        for bad in ["", "proxy.sock", "/tmp/*/x", "/tmp/**", "/tmp/a[0-9]", "/tmp/../x", "/tmp/{a,b}", "/tmp/a?", "/"] {
            assert!(pattern(bad).is_err(), "{bad:?}");
        }
        assert!(matches("/tmp/claude-http-*.sock", Path::new("/tmp/claude-http-0123.sock")));
        for other in
            ["/tmp/claude-http-0123.sock.x", "/tmp/x/claude-http-1.sock", "/tmp/claude-http-a/b.sock", "/var/tmp/claude-http-1.sock"]
        {
            assert!(!matches("/tmp/claude-http-*.sock", Path::new(other)), "{other}");
        }
    }

    #[test]
    fn no_pattern_takes_in_a_socket_that_acts_as_the_user() {
        for bad in ["/run/docker.sock", "/run/*", "/run/*.sock", "/run/user/1000/bus", "/tmp/ssh-x/agent.*", "/tmp/.X11-unix/X0"] {
            assert!(pattern(bad).is_err(), "{bad}");
        }
        for path in ["/run/docker.sock", "/tmp/ssh-1/agent.77", "/run/user/1/bus", "/tmp/dbus-1x"] {
            assert!(is_never_shown(Path::new(path)), "{path}");
        }
        assert!(!is_never_shown(Path::new("/tmp/claude-http-1.sock")));
    }
}
