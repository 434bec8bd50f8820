//! Findings about the kernel's features, and what keeps each of them from working.
//!
//! A remedy names one thing to do, as exactly as this host lets it be known. Where a
//! feature only fails because another is missing, it says so and does not guess.

use std::{ffi::CString, fs, os::unix::fs::FileTypeExt, path::Path};

use rustix::io::Errno;
use stockade_launcher::CONTAINER;
use stockade_policy::{model::Degradable, plan::UserNamespaces};

use super::{
    Examiner, Finding, State, finding, fine, missing,
    probe::{self, Failure, Probe},
};

const APPARMOR: &str = "AppArmor keeps user namespaces from programs without a profile; load ours, which covers /usr/bin/stockade and /usr/local/bin/stockade: sudo install -m 644 scripts/apparmor/stockade /etc/apparmor.d/stockade && sudo apparmor_parser --replace /etc/apparmor.d/stockade";

fn read(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_default().trim().to_owned()
}

impl Examiner<'_> {
    /// Every feature, from those that others need to those that stand alone.
    pub(super) fn features(&self) -> Vec<Finding> {
        vec![
            self.kernel(),
            self.user_namespaces(),
            self.namespaces(),
            self.inside("root", "tmpfs, read-only binds and pivot_root", || probe::root_file_system(self.ids)),
            self.proc(),
            self.inside("loopback", "lo comes up, alone in a network namespace", || probe::loopback(self.ids)),
            self.inside("host_name", "private", || probe::host_name(self.ids)),
            self.devices(),
            self.keyring(),
            self.seccomp(),
            self.denial_reports(),
            self.landlock(),
            self.terminals(),
            Self::socket_memory(),
            self.egress(),
            self.upstream_proxy(),
        ]
    }

    fn kernel(&self) -> Finding {
        let release = &self.host.kernel;
        let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|part| part.parse::<u32>().unwrap_or(0));
        let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
        if version >= (5, 15) {
            return fine("kernel", format!("Linux {release}"));
        }
        // Not missing: whether it will do is for the run to say.
        let detail = format!("Linux {release}; stockade is made for 5.15 and later");
        finding("kernel", State::Degraded, (detail, Some(String::from("use Ubuntu 22.04, Debian 12 or later"))))
    }

    /// Without it runs go on, and only what their sockets keep beside the memory is not limited.
    fn socket_memory() -> Finding {
        match stockade_launcher::probe_sock_diag() {
            Ok(()) => fine("socket_memory", "the kernel tells what TCP and UDP sockets hold"),
            Err(errno) => {
                let detail = format!("the kernel does not tell what TCP and UDP sockets hold, so that is not limited: {errno}");
                let remedy = match errno {
                    Errno::NOENT => "load the kernel's modules: sudo modprobe --all inet_diag tcp_diag udp_diag",
                    _ => "allow sockets of AF_NETLINK with NETLINK_SOCK_DIAG where an outer filter refuses them",
                };
                finding("socket_memory", State::Degraded, (detail, Some(remedy.to_owned())))
            }
        }
    }

    /// The gate's part of the kernel, which only a policy with a whitelist needs.
    fn egress(&self) -> Finding {
        let needed = !self.policy.egress.whitelist.is_empty();
        let state = if needed { State::Missing } else { State::Absent };
        let purpose = if needed { "" } else { "; this policy has no egress whitelist and does without" };
        if self.user_namespace.is_err() {
            return finding(
                "egress",
                state,
                (format!("not tried, as it needs a user namespace{purpose}"), Some(String::from("as for user_namespaces"))),
            );
        }
        match stockade_launcher::probe_egress() {
            Ok(()) => fine("egress", "the gate's routes, nftables rules, log and transparent listener, in a namespace of their own"),
            Err(cannot) => finding(
                "egress",
                state,
                (
                    format!("{cannot}{purpose}"),
                    Some(String::from(
                        "as root: modprobe -a nf_tables nft_tproxy nft_socket nft_log nfnetlink_log nf_tproxy_ipv4 nf_tproxy_ipv6; in a container: on its host",
                    )),
                ),
            ),
        }
    }

    /// Whether this environment names proxies, which the gate does not use. Their values can
    /// hold passwords and are not shown.
    fn upstream_proxy(&self) -> Finding {
        let names = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok());
        let found = proxy_variables(names);
        if found.is_empty() {
            return fine("upstream_proxy", "no *_proxy variable is set here");
        }
        let detail = format!(
            "{}: the gate dials peers itself and asks no proxy, so it reaches what this host reaches without one",
            found.join(", ")
        );
        let remedy = "let this host reach the peers of a whitelist directly; do not allow the proxy with `/tcp`, since code could reach any peer through it";
        finding("upstream_proxy", State::Absent, (detail, Some(String::from(remedy))))
    }

    /// A feature that needs a user namespace first, unless the policy lets root go without.
    pub(super) fn inside(&self, feature: &str, what: &str, probe: impl FnOnce() -> Probe) -> Finding {
        if self.user_namespace.is_err() && self.ids.user_namespaces == UserNamespaces::Nested {
            return missing(
                feature,
                (String::from("not tried, as it needs a user namespace"), Some(String::from("as for user_namespaces"))),
            );
        }
        match probe() {
            Ok(()) => fine(feature, what),
            Err(failure) => missing(feature, (format!("{what}: {failure}"), Some(self.remedy(failure)))),
        }
    }

    /// A feature of a single process; `explain` words what failed.
    fn apart(
        &self,
        feature: &str,
        what: &str,
        probe: impl FnOnce() -> Probe,
        explain: impl FnOnce(String, Option<Errno>) -> Finding,
    ) -> Finding {
        if self.child.is_err() {
            return missing(feature, (String::from("not tried, as no process can be made"), Some(String::from("as for user_namespaces"))));
        }
        match probe() {
            Ok(()) => fine(feature, what),
            Err(failure) => explain(format!("{what}: {failure}"), failure.errno()),
        }
    }

    /// What keeps an act that a user namespace should permit from working here.
    fn remedy(&self, failure: Failure) -> String {
        let unprivileged = !self.identity.privileged;
        let container = Path::new("/.dockerenv").exists() || Path::new("/run/.containerenv").exists();
        match failure.errno() {
            Some(Errno::NOSPC) => String::from("as for namespaces"),
            Some(Errno::AGAIN) => {
                String::from("the number of processes is used up: raise ulimit -u, or pids.max of the cgroup that this runs in")
            }
            Some(Errno::NOMEM) => String::from("there is too little memory"),
            Some(Errno::MFILE | Errno::NFILE) => String::from("too few descriptors: raise ulimit -n"),
            _ if unprivileged && read("/proc/sys/kernel/apparmor_restrict_unprivileged_userns") == "1" => APPARMOR.to_owned(),
            _ if unprivileged && read("/proc/sys/kernel/unprivileged_userns_clone") == "0" => {
                String::from("unprivileged user namespaces are switched off: sudo sysctl -w kernel.unprivileged_userns_clone=1")
            }
            Some(Errno::INVAL) => String::from("the kernel needs CONFIG_USER_NS"),
            _ if container => CONTAINER.to_owned(),
            Some(Errno::NOSYS) => {
                format!("the kernel is older than 5.15, or an outer filter hides the system call; in a container: {CONTAINER}")
            }
            _ => format!(
                "an outer filter or a security module forbids it; in a systemd unit, drop RestrictNamespaces= and SystemCallFilter=; in a container: {CONTAINER}"
            ),
        }
    }

    fn user_namespaces(&self) -> Finding {
        match self.user_namespace.and_then(|()| probe::nested_user_namespace(self.ids)) {
            Ok(()) => fine("user_namespaces", "two, nested"),
            Err(failure) => {
                let remedy = if failure.errno() == Some(Errno::NOSPC) { too_few("user") } else { self.remedy(failure) };
                let state = if self.ids.user_namespaces == UserNamespaces::Missing { State::Degraded } else { State::Missing };
                finding("user_namespaces", state, (failure.to_string(), Some(remedy)))
            }
        }
    }

    fn namespaces(&self) -> Finding {
        let mut tried = Vec::new();
        let found = self.inside("namespaces", "mnt pid net uts ipc cgroup", || {
            tried = probe::namespaces(self.ids).into_iter().collect();
            tried.iter().find_map(|(_, outcome)| outcome.err()).map_or(Ok(()), Err)
        });
        let failed: Vec<(&str, Failure)> = tried.iter().filter_map(|(name, outcome)| Some((*name, outcome.err()?))).collect();
        let Some((_, first)) = failed.first() else { return found };
        let detail = failed.iter().map(|(name, failure)| format!("{name}: {failure}")).collect::<Vec<_>>().join(", ");
        let used_up: Vec<String> =
            failed.iter().filter(|(_, failure)| failure.errno() == Some(Errno::NOSPC)).map(|(name, _)| too_few(name)).collect();
        missing("namespaces", (detail, Some(if used_up.is_empty() { self.remedy(*first) } else { used_up.join("; ") })))
    }

    fn proc(&self) -> Finding {
        let found = self.inside("proc", "private", || probe::fresh_proc(self.ids));
        // Where no file system can be mounted at all, that is what to fix.
        if found.state == State::Ok || probe::root_file_system(self.ids).is_err() {
            return found;
        }
        let covered = covered_in_proc();
        if covered.is_empty() {
            return found;
        }
        let detail = format!("{}: the host's is partly covered (\"mount too revealing\"), by {}", found.detail, covered.join(", "));
        let remedy = "uncover it; Docker: --security-opt systempaths=unconfined; systemd unit: drop ProtectKernelTunables=, ProtectKernelLogs= and ProcSubset=";
        missing("proc", (detail, Some(remedy.to_owned())))
    }

    fn devices(&self) -> Finding {
        let names = &self.policy.filesystem.devices;
        let is_device = |name: &&String| fs::metadata(format!("/dev/{name}")).is_ok_and(|metadata| metadata.file_type().is_char_device());
        match names.iter().find(|name| !is_device(name)) {
            Some(name) => {
                let remedy = format!("make it (mknod(1)), or remove {name:?} from `devices` under [filesystem]");
                missing("devices", (format!("/dev/{name} is no device node of this host"), Some(remedy)))
            }
            None => self.inside("devices", &names.join(" "), || {
                let paths = names.iter().filter_map(|name| CString::new(format!("/dev/{name}")).ok());
                paths.into_iter().try_for_each(|path| probe::device(&path, self.ids))
            }),
        }
    }

    fn keyring(&self) -> Finding {
        self.apart("keyring", "a session keyring of its own", probe::keyring, |detail, errno| {
            let remedy = match errno {
                Some(Errno::DQUOT) => String::from("this user's keys are used up: raise kernel.keys.maxkeys, or look at /proc/key-users"),
                _ => format!("an outer filter forbids keyctl(2), as container engines do: {CONTAINER}"),
            };
            missing("keyring", (detail, Some(remedy)))
        })
    }

    fn seccomp(&self) -> Finding {
        self.apart("seccomp", "a filter is loaded and answers", probe::filter, |detail, errno| {
            let remedy = match errno {
                Some(Errno::INVAL) => "the kernel needs CONFIG_SECCOMP_FILTER",
                _ => "an outer filter or a security module forbids seccomp(2), or the kernel lacks CONFIG_SECCOMP_FILTER; allow it there",
            };
            missing("seccomp", (detail, Some(remedy.to_owned())))
        })
    }

    /// Without a listener the refusals hold, and only their reports are lost.
    fn denial_reports(&self) -> Finding {
        let feature = "denial_reports";
        self.apart(feature, "the filter's refusals can be listened to", probe::listener, |detail, errno| match errno {
            Some(Errno::BUSY) => {
                let remedy = "start stockade outside the supervisor that listens already; refusals hold all the same";
                finding(feature, State::Degraded, (detail, Some(remedy.to_owned())))
            }
            _ => missing(feature, (detail, Some(String::from("as for seccomp")))),
        })
    }

    fn landlock(&self) -> Finding {
        let abi = self.host.landlock_abi;
        let lost = |words| finding("landlock", self.lost(Degradable::Landlock), words);
        let found = self.apart("landlock", "a ruleset refuses what it should", probe::landlock, |detail, errno| {
            let remedy = match errno {
                Some(Errno::OPNOTSUPP) => format!(
                    "it is switched off: add landlock to the list of lsm= on the kernel's command line{}, and start anew",
                    current_lsm()
                ),
                Some(Errno::NOSYS) => {
                    String::from("the kernel needs CONFIG_SECURITY_LANDLOCK, and no outer filter may hide landlock_create_ruleset(2)")
                }
                _ => String::from("an outer filter forbids landlock_create_ruleset(2) or landlock_restrict_self(2); allow both there"),
            };
            lost((detail, Some(remedy)))
        });
        match (found.state, abi) {
            (State::Ok, 0 | 1) => lost((format!("ABI {abi}, 2 is needed"), Some(String::from("use Linux 5.19 or later")))),
            (State::Ok, 2..6) => Finding {
                detail: format!(
                    "ABI {abi}, {}; scopes need ABI 6, until then namespaces keep signals and abstract sockets in",
                    found.detail
                ),
                ..found
            },
            (State::Ok, _) => Finding { detail: format!("ABI {abi}, {}", found.detail), ..found },
            _ => found,
        }
    }

    /// Needed by `run` on a terminal alone.
    fn terminals(&self) -> Finding {
        let found = self.inside("terminals", "a devpts of its own, for `run` on a terminal", || probe::terminals(self.ids));
        Finding { state: if found.state == State::Missing { State::Absent } else { found.state }, ..found }
    }
}

/// The kernel counts each kind of namespace for itself.
fn too_few(kind: &str) -> String {
    format!("the number of namespaces is used up or zero: sudo sysctl -w user.max_{kind}_namespaces=10000")
}

/// What hides parts of this process's /proc.
fn covered_in_proc() -> Vec<String> {
    let mounts = read("/proc/self/mountinfo");
    let points = mounts.lines().filter_map(|line| line.split(' ').nth(4));
    points.filter(|point| point.starts_with("/proc/") && *point != "/proc/sys/fs/binfmt_misc").map(String::from).collect()
}

fn current_lsm() -> String {
    let list = read("/sys/kernel/security/lsm");
    if list.is_empty() { String::new() } else { format!(", such as lsm=landlock,{list}") }
}

/// Those of these names that are a proxy's, in their order.
fn proxy_variables(names: impl Iterator<Item = String>) -> Vec<String> {
    let is_proxy = |name: &String| {
        let name = name.to_ascii_lowercase();
        name.strip_suffix("_proxy").is_some_and(|scheme| matches!(scheme, "http" | "https" | "all" | "ftp" | "socks"))
    };
    let mut found: Vec<String> = names.filter(is_proxy).collect();
    found.sort();
    found
}

#[cfg(test)]
mod tests {
    use super::proxy_variables;

    #[test]
    fn variables_that_name_a_proxy_are_found() {
        let names = ["PATH", "https_proxy", "NO_PROXY", "HTTP_PROXY", "my_proxy", "ALL_PROXY"].map(String::from);
        assert_eq!(proxy_variables(names.into_iter()), ["ALL_PROXY", "HTTP_PROXY", "https_proxy"]);
    }
}
