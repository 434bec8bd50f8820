//! Every name that a policy's values may use, and the nearest one to a misspelling.
//!
//! The parser, the schema and `show` read the same tables. Names of system calls are not
//! copied here: libseccomp knows them. What a name does is the compiler's business.

use libseccomp::ScmpSyscall;

use stockade_protocol::screen::Action;

use crate::model::{Access, AuditMode, Degradable, SocketFamily};

/// Nodes that a policy may show below `/dev`.
pub const DEVICES: &[&str] = &["null", "zero", "full", "random", "urandom", "tty"];

/// Socket families by the name that a policy uses.
pub const FAMILIES: &[(&str, SocketFamily)] = &[
    (SocketFamily::Unix.name(), SocketFamily::Unix),
    (SocketFamily::Inet.name(), SocketFamily::Inet),
    (SocketFamily::Inet6.name(), SocketFamily::Inet6),
    (SocketFamily::Netlink.name(), SocketFamily::Netlink),
];

/// Whether runs are written down.
pub const AUDIT_MODES: &[(&str, AuditMode)] =
    &[(AuditMode::Off.name(), AuditMode::Off), (AuditMode::Try.name(), AuditMode::Try), (AuditMode::Required.name(), AuditMode::Required)];

/// What is done about a finding of screening.
pub const ACTIONS: &[(&str, Action)] = &[
    (Action::Allow.name(), Action::Allow),
    (Action::Note.name(), Action::Note),
    (Action::Approve.name(), Action::Approve),
    (Action::Deny.name(), Action::Deny),
];

/// Ways to open scratch.
pub const ACCESS: &[(&str, Access)] = &[(Access::Rw.name(), Access::Rw), (Access::Ro.name(), Access::Ro)];

/// Layers that a policy may let a run go without.
pub const DEGRADABLE: &[(&str, Degradable)] = &[
    ("cgroup", Degradable::Cgroup),
    ("landlock", Degradable::Landlock),
    ("unique_uid", Degradable::UniqueUid),
    ("user_namespace", Degradable::UserNamespace),
];

/// Requests of `ioctl` by name. The numbers are those of x86-64 and arm64, which share
/// the kernel's generic table.
pub const IOCTLS: &[(&str, u32)] = &[
    ("TCGETS", 0x5401),
    ("TCSETS", 0x5402),
    ("TCSETSW", 0x5403),
    ("TCSETSF", 0x5404),
    ("TCGETA", 0x5405),
    ("TCSBRK", 0x5409),
    ("TCXONC", 0x540a),
    ("TCFLSH", 0x540b),
    ("TIOCEXCL", 0x540c),
    ("TIOCNXCL", 0x540d),
    ("TIOCSCTTY", 0x540e),
    ("TIOCGPGRP", 0x540f),
    ("TIOCSPGRP", 0x5410),
    ("TIOCOUTQ", 0x5411),
    ("TIOCGWINSZ", 0x5413),
    ("TIOCSWINSZ", 0x5414),
    ("FIONREAD", 0x541b),
    ("TIOCPKT", 0x5420),
    ("FIONBIO", 0x5421),
    ("TIOCNOTTY", 0x5422),
    ("TIOCGETD", 0x5424),
    ("TCSBRKP", 0x5425),
    ("TIOCGSID", 0x5429),
    ("TCGETS2", 0x802c_542a),
    ("TCSETS2", 0x402c_542b),
    ("TCSETSW2", 0x402c_542c),
    ("TCSETSF2", 0x402c_542d),
    ("TIOCGPTN", 0x8004_5430),
    ("TIOCSPTLCK", 0x4004_5431),
    ("TIOCGPTPEER", 0x5441),
    ("FIONCLEX", 0x5450),
    ("FIOCLEX", 0x5451),
    ("FIOASYNC", 0x5452),
    ("FIOQSIZE", 0x5460),
    ("FIGETBSZ", 0x2),
    ("FICLONE", 0x4004_9409),
    ("FICLONERANGE", 0x4020_940d),
    ("FIDEDUPERANGE", 0xc018_9436),
    ("FS_IOC_GETFLAGS", 0x8008_6601),
    ("FS_IOC_SETFLAGS", 0x4008_6602),
    ("FS_IOC_GETVERSION", 0x8008_7601),
    ("FS_IOC_FIEMAP", 0xc020_660b),
    ("FS_IOC_FSGETXATTR", 0x801c_581f),
    ("SIOCATMARK", 0x8905),
    ("SIOCGIFNAME", 0x8910),
    ("SIOCGIFCONF", 0x8912),
    ("SIOCGIFFLAGS", 0x8913),
    ("SIOCGIFADDR", 0x8915),
    ("SIOCGIFDSTADDR", 0x8917),
    ("SIOCGIFBRDADDR", 0x8919),
    ("SIOCGIFNETMASK", 0x891b),
    ("SIOCGIFMTU", 0x8921),
    ("SIOCGIFHWADDR", 0x8927),
    ("SIOCGIFINDEX", 0x8933),
    ("SIOCGIFTXQLEN", 0x8942),
    ("RNDGETENTCNT", 0x8004_5200),
];

/// Requests of `ioctl` that no policy may allow, with the reason.
pub const FORBIDDEN_IOCTLS: &[(&str, u32, &str)] = &[
    ("TIOCSTI", 0x5412, "it types into the terminal as if the user had"),
    ("TIOCLINUX", 0x541c, "it pastes into a Linux console as if the user had"),
    ("TIOCSETD", 0x5423, "it loads line disciplines, which are kernel modules"),
    ("TIOCCONS", 0x541d, "it takes over the output of the host's console"),
];

const NAMESPACES: &str = "it enters or makes namespaces, out of which the sandbox is built";
const MOUNTS: &str = "it changes the mount table, out of which the sandbox is built";
const RING: &str = "what it queues never meets the filter";
const KERNEL: &str = "it loads code into the kernel";

/// System calls that no policy may allow, with the reason: each undoes another layer.
pub const FORBIDDEN_SYSCALLS: &[(&str, &str)] = &[
    ("clone3", "its flags lie in memory, where a filter cannot read them; it is answered ENOSYS and programs use `clone`"),
    ("openat2", "its mode bits lie in memory, where a filter cannot read them; it is answered ENOSYS and programs use `openat`"),
    ("io_uring_setup", RING),
    ("io_uring_enter", RING),
    ("io_uring_register", RING),
    ("unshare", NAMESPACES),
    ("setns", NAMESPACES),
    ("mount", MOUNTS),
    ("umount", MOUNTS),
    ("umount2", MOUNTS),
    ("mount_setattr", MOUNTS),
    ("move_mount", MOUNTS),
    ("open_tree", MOUNTS),
    ("fsopen", MOUNTS),
    ("fsmount", MOUNTS),
    ("fsconfig", MOUNTS),
    ("fspick", MOUNTS),
    ("pivot_root", MOUNTS),
    ("chroot", MOUNTS),
    ("open_by_handle_at", "it opens files by number, past every path rule"),
    ("pidfd_getfd", "it takes descriptors out of other processes"),
    ("bpf", KERNEL),
    ("init_module", KERNEL),
    ("finit_module", KERNEL),
    ("delete_module", KERNEL),
    ("kexec_load", KERNEL),
    ("kexec_file_load", KERNEL),
];

/// Whether libseccomp knows a system call, on this or on another architecture.
pub fn is_syscall(name: &str) -> bool {
    // libseccomp takes a C string; a NUL would make the rest invisible.
    !name.is_empty() && !name.contains('\0') && ScmpSyscall::from_name(name).is_ok()
}

/// Every system call that libseccomp knows here. Slow; for suggestions only.
pub fn syscalls() -> Vec<String> {
    (0..600).filter_map(|number| ScmpSyscall::from_raw_syscall(number).get_name().ok()).collect()
}

/// The name of an `ioctl` request, if the table has one.
pub fn ioctl_name(number: u32) -> Option<&'static str> {
    IOCTLS.iter().find(|(_, known)| *known == number).map(|(name, _)| *name)
}

/// An `ioctl` request as a policy may write it: its name, or its number in hex.
pub fn ioctl_text(number: u32) -> String {
    ioctl_name(number).map_or_else(|| format!("{number:#x}"), str::to_owned)
}

/// Looks a name up in a table of pairs.
pub(crate) fn find<T: Copy>(table: &[(&str, T)], name: &str) -> Option<T> {
    table.iter().find(|(known, _)| *known == name).map(|(_, value)| *value)
}

/// The known name that a misspelt one most likely meant.
pub fn nearest<'a>(word: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    // A quarter of the letters may be wrong: more, and the guess is noise.
    let length = word.chars().count();
    if length > 64 {
        return None;
    }
    let allowed = (length / 4).clamp(1, 3);
    let plural = word.strip_suffix('y').map(|stem| format!("{stem}ies"));
    known
        .into_iter()
        .map(|candidate| if plural.as_deref() == Some(candidate) { (0, candidate) } else { (distance(word, candidate), candidate) })
        .filter(|(distance, _)| *distance <= allowed)
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, candidate)| candidate)
}

/// Insertions, deletions, replacements and swaps of neighbours between two words.
fn distance(left: &str, right: &str) -> usize {
    strsim::osa_distance(&left.to_lowercase(), &right.to_lowercase())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_misspelling_finds_its_name() {
        assert_eq!(nearest("memroy", ["memory", "cpu"]), Some("memory"));
        assert_eq!(nearest("oepnat", syscalls().iter().map(String::as_str)), Some("openat"));
        assert_eq!(nearest("Inet", ["inet", "inet6"]), Some("inet"));
        assert_eq!(nearest("quite_else", ["memory", "cpu"]), None);
    }

    #[test]
    fn swapped_neighbours_count_once() {
        assert_eq!(distance("memroy", "memory"), 1);
        assert_eq!(distance("", "abc"), 3);
        assert_eq!(distance("kitten", "sitting"), 3);
    }

    #[test]
    fn forbidden_names_are_known_and_not_offered() {
        for (name, _) in FORBIDDEN_SYSCALLS {
            assert!(is_syscall(name), "{name}");
        }
        for (name, number, _) in FORBIDDEN_IOCTLS {
            assert!(IOCTLS.iter().all(|(other, value)| other != name && value != number), "{name}");
        }
    }

    #[test]
    fn tables_hold_no_name_or_number_twice() {
        for (index, (name, number)) in IOCTLS.iter().enumerate() {
            assert!(IOCTLS[index + 1..].iter().all(|(other, value)| other != name && value != number), "{name}");
        }
    }
}
