//! Host paths that no hint offers to show.
//!
//! Hostile code chooses the paths on its stderr. A hint offers no line for a path that holds
//! secrets or gives rights over the host, nor for a directory above one. The list has the usual
//! paths only: one that is not listed may still hold secrets. A policy may show any of them.

use std::path::{Component, Path};

/// Paths, with all below them.
const PATHS: &[&str] = &[
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

/// Names of files and directories with credentials, in any directory.
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

/// Endings of key files, and of sockets, whose server may have any rights.
const ENDS: &[&str] = &[".jks", ".kdbx", ".key", ".keytab", ".p12", ".pem", ".pfx", ".sock", ".socket"];

/// Whether a path may hold a secret or give rights. It has no `.`, `..` or symlink.
pub(super) fn is_guarded(path: &Path) -> bool {
    let listed = PATHS.iter().any(|place| path.starts_with(place) || Path::new(place).starts_with(path));
    let mut parts = path.components().skip(1).filter_map(|part| match part {
        Component::Normal(name) => Some(name.to_string_lossy()),
        _ => None,
    });
    let named = parts.clone().any(|part| {
        let part = part.to_lowercase();
        NAMES.contains(&part.as_str()) || part.starts_with(".env") || ENDS.iter().any(|end| part.ends_with(end))
    });
    let home = parts.next().is_some_and(|first| first == "home") && {
        // All homes, one whole home, or a dot file in one.
        let below: Vec<_> = parts.skip(1).collect();
        below.first().is_none_or(|name| name.starts_with('.'))
    };
    listed || named || home
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_with_secrets_or_rights_are_guarded_and_so_are_their_parents() {
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
