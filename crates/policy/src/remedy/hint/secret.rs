//! Which paths of a host no hint offers to show.
//!
//! Hostile code chooses the paths that its stderr names, and a hint speaks in Stockade's
//! words. So no line is offered for what holds secrets or gives rights over the host, nor
//! for a directory that has such things below it. The list knows the usual places: that a
//! path is not on it does not make it harmless, and a policy may still name any of them.

use std::path::{Component, Path};

/// Places with everything below them.
const PLACES: &[&str] = &[
    "/boot",
    "/dev",
    "/etc/NetworkManager",
    "/etc/credstore",
    "/etc/credstore.encrypted",
    "/etc/docker",
    "/etc/gshadow",
    "/etc/gshadow-",
    "/etc/krb5.keytab",
    "/etc/kubernetes",
    "/etc/letsencrypt",
    "/etc/openvpn",
    "/etc/pki/tls/private",
    "/etc/rancher",
    "/etc/shadow",
    "/etc/shadow-",
    "/etc/ssh",
    "/etc/ssl/private",
    "/etc/stockade",
    "/etc/sudoers",
    "/etc/sudoers.d",
    "/etc/wireguard",
    "/proc",
    "/root",
    "/run",
    "/sys",
    "/var/backups",
    "/var/lib/containerd",
    "/var/lib/containers",
    "/var/lib/docker",
    "/var/lib/kubelet",
    "/var/lib/libvirt",
    "/var/lib/lxd",
    "/var/lib/mysql",
    "/var/lib/postgresql",
    "/var/lib/private",
    "/var/lib/sss",
    "/var/lib/systemd",
    "/var/log",
    "/var/mail",
    "/var/run",
    "/var/spool",
];

/// Names of files and directories that hold credentials, wherever they lie.
const NAMES: &[&str] = &[
    ".aws",
    ".azure",
    ".docker",
    ".git-credentials",
    ".gnupg",
    ".kube",
    ".my.cnf",
    ".netrc",
    ".npmrc",
    ".password-store",
    ".pgpass",
    ".pypirc",
    ".ssh",
    ".vault-token",
    "id_dsa",
    "id_ecdsa",
    "id_ed25519",
    "id_rsa",
];

/// Ends of names of keys, and of sockets whose other end may do anything.
const ENDS: &[&str] = &[".jks", ".kdbx", ".key", ".keytab", ".p12", ".pem", ".pfx", ".sock", ".socket"];

/// Whether showing a path, in its plain form, could show a secret or give rights.
pub(super) fn is_guarded(path: &Path) -> bool {
    let place = PLACES.iter().any(|place| path.starts_with(place) || Path::new(place).starts_with(path));
    let mut parts = path.components().skip(1).filter_map(|part| match part {
        Component::Normal(name) => Some(name.to_string_lossy()),
        _ => None,
    });
    let named = parts.clone().any(|part| {
        let part = part.to_lowercase();
        NAMES.contains(&part.as_str()) || part.starts_with(".env") || ENDS.iter().any(|end| part.ends_with(end))
    });
    let home = parts.next().is_some_and(|first| first == "home") && {
        // All homes, one whole home, or what a home keeps out of sight.
        let below: Vec<_> = parts.skip(1).collect();
        below.first().is_none_or(|name| name.starts_with('.'))
    };
    place || named || home
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_gives_rights_or_holds_secrets_is_guarded_and_so_is_what_holds_it() {
        for path in [
            "/",
            "/etc",
            "/etc/shadow",
            "/etc/shadow-",
            "/etc/sudoers.d/x",
            "/etc/ssh/ssh_host_ed25519_key",
            "/root",
            "/root/.ssh/id_rsa",
            "/root/data.csv",
            "/home",
            "/home/alice",
            "/home/alice/.ssh/id_ed25519",
            "/home/alice/.config/gcloud",
            "/home/alice/work/.env.local",
            "/srv/app/.netrc",
            "/srv/app/server.key",
            "/srv/app/Server.PEM",
            "/run/docker.sock",
            "/var/run/docker.sock",
            "/var",
            "/var/lib",
            "/srv/agent.sock",
            "/proc/1/environ",
            "/sys/kernel",
            "/dev/mem",
            "/boot/vmlinuz",
        ] {
            assert!(is_guarded(Path::new(path)), "{path}");
        }
        for path in [
            "/data/x.csv",
            "/etc/os-release",
            "/etc/pki/x",
            "/home/alice/data/x.csv",
            "/srv/work",
            "/opt/tool",
            "/var/lib/tool/x",
            "/mnt/keys",
        ] {
            assert!(!is_guarded(Path::new(path)), "{path}");
        }
    }
}
