//! What a path stands for, by its text alone: no file is looked at.
//!
//! A home directory is `~`. A `*` stands for an unknown part.

/// Directories of the system.
const SYSTEM: [&str; 19] = [
    "bin", "boot", "dev", "etc", "home", "lib", "lib32", "lib64", "media", "mnt", "opt", "proc", "root", "run", "sbin", "srv", "sys",
    "usr", "var",
];

/// Parts of paths to credentials.
const CREDENTIALS: [&str; 34] = [
    "/etc/shadow",
    "/etc/gshadow",
    "/etc/krb5.keytab",
    "/.ssh/",
    "/.aws/",
    "/.azure/",
    "/.gnupg/",
    "/.kube/",
    "/.docker/config.json",
    "/.netrc",
    "/.pgpass",
    "/.my.cnf",
    "/.git-credentials",
    "/.npmrc",
    "/.pypirc",
    "/.config/gcloud",
    "/.config/gh/",
    "/.mozilla/",
    "/.bash_history",
    "/.zsh_history",
    "/.python_history",
    "/id_rsa",
    "/id_ed25519",
    "/id_ecdsa",
    "/serviceaccount/token",
    "/cookies.sqlite",
    "/Login Data",
    "/wallet.dat",
    "/dev/input/",
    "/dev/mem",
    "/proc/kcore",
    "169.254.169.254",
    "metadata.google.internal",
    "/run/secrets/",
];

/// A path without `.`, `..` and double slashes. A relative path stays relative.
pub(crate) fn plain(path: &str) -> String {
    let mut parts: Vec<&str> = Vec::new();
    for part in path.split('/').filter(|part| !part.is_empty() && *part != ".") {
        match (part, parts.last()) {
            ("..", Some(last)) if *last != ".." && *last != "~" => drop(parts.pop()),
            ("..", None) if path.starts_with('/') => {}
            _ => parts.push(part),
        }
    }
    let joined = parts.join("/");
    if path.starts_with('/') { format!("/{joined}") } else { joined }
}

/// A path below another; an absolute path replaces it.
pub(crate) fn join(base: &str, path: &str) -> String {
    match path.starts_with(['/', '~']) || base.is_empty() {
        true => path.to_owned(),
        false => format!("{}/{path}", base.trim_end_matches('/')),
    }
}

/// Whether deleting a tree here deletes a system or a home directory.
pub(crate) fn is_vital(path: &str) -> bool {
    let path = plain(path);
    let path = path.strip_suffix("/*").map_or(path.as_str(), |above| if above.is_empty() { "/" } else { above });
    let parts: Vec<&str> = path.split('/').collect();
    match parts.as_slice() {
        ["", ""] | ["~"] | ["~", _] | ["", "home", _] => true,
        ["", one] => SYSTEM.contains(one),
        ["", "usr" | "var" | "boot" | "etc", _] => !path.starts_with("/var/tmp"),
        _ => false,
    }
}

/// Whether this is a disk device.
pub(crate) fn is_disk(path: &str) -> bool {
    let known = ["sd", "hd", "vd", "xvd", "nvme", "mmcblk", "disk", "mapper", "md", "dm-", "loop"];
    plain(path).strip_prefix("/dev/").is_some_and(|name| known.iter().any(|start| name.starts_with(start)))
}

/// Whether this is outside scratch and the temporary directories. An unknown path counts as
/// inside.
pub(crate) fn is_outside(path: &str, scratch: &str) -> bool {
    let path = plain(path);
    let within = |top: &str| path == top || path.strip_prefix(top).is_some_and(|rest| rest.starts_with('/'));
    if !path.starts_with('/') {
        return path == ".." || path.starts_with("../") || path.starts_with('~');
    }
    let free = [
        "/tmp",
        "/var/tmp",
        "/dev/shm",
        "/dev/null",
        "/dev/zero",
        "/dev/full",
        "/dev/tty",
        "/dev/stdout",
        "/dev/stderr",
        "/dev/fd",
        "/proc/self/fd",
    ];
    // Unknown paths, and network redirections, which are no files.
    !(path.starts_with("/*")
        || free.into_iter().any(within)
        || (!scratch.is_empty() && within(scratch))
        || within("/dev/tcp")
        || within("/dev/udp"))
}

/// Whether this path holds credentials.
pub(crate) fn is_credential(text: &str) -> bool {
    if text.len() > 4096 {
        return false;
    }
    // Matches a directory at the end, and a relative path.
    let whole = format!("/{}/", text.trim_matches('/'));
    let process = whole.contains("/proc/") && ["/environ/", "/mem/"].iter().any(|end| whole.ends_with(end));
    process || CREDENTIALS.iter().any(|part| whole.contains(part) || (!part.ends_with('/') && whole.ends_with(&format!("{part}/"))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_system_and_a_home_are_vital_and_a_project_is_not() {
        for path in
            ["/", "/*", "//", "/home", "/home/alice", "~", "~/", "~/*", "~/Documents", "/usr/", "/etc/../etc", "/var/lib", "/usr/lib"]
        {
            assert!(is_vital(path), "{path}");
        }
        for path in ["build", "./build", "/tmp", "/tmp/x", "/srv/work/build", "~/work/build", "../build", "", "/var/tmp/x"] {
            assert!(!is_vital(path), "{path}");
        }
    }

    #[test]
    fn outside_is_what_is_neither_scratch_nor_temporary() {
        for path in ["/etc/passwd", "~/.bashrc", "../x", "/tmp/../etc/x", "/dev/sda", "/scratchy"] {
            assert!(is_outside(path, "/scratch"), "{path}");
        }
        for path in ["out.txt", "a/../b", "/tmp/x", "/scratch/x", "/scratch", "/dev/null", "/*/x"] {
            assert!(!is_outside(path, "/scratch"), "{path}");
        }
    }

    #[test]
    fn credentials_are_known_by_their_places() {
        for path in [
            "/etc/shadow",
            "~/.ssh",
            "~/.ssh/id_rsa",
            "/proc/1/environ",
            "/proc/*/mem",
            "http://169.254.169.254/latest",
            "/root/.aws/credentials",
        ] {
            assert!(is_credential(path), "{path}");
        }
        for path in ["shadow.txt", "/proc/meminfo", "environ", "ssh", "members"] {
            assert!(!is_credential(path), "{path}");
        }
    }
}
