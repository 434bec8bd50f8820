//! In a container, as Docker starts one by default: the same capabilities, covered files and
//! devices, a filter that refuses what Docker's profile refuses, a read-only /sys. The engine
//! is runc, which Docker starts its own with; there is no daemon and no image, for the
//! host's /usr is the container's. AppArmor's part is not there.
//!
//! Of the host it uses a cgroup with its own name, which ends with the container.

use std::{
    fs::{self, Permissions},
    os::unix::fs::{PermissionsExt, symlink},
    path::Path,
    process::{Command, Output, Stdio},
    sync::OnceLock,
};

use serde_json::{Value, json};

use crate::support::{
    exec::{ExecResult, program_path, run_with_stdin, text},
    needs::find_program,
    runner::{directory, test},
};

/// What Docker gives root of a container.
const CAPABILITIES: &str =
    "CHOWN DAC_OVERRIDE FSETID FOWNER MKNOD NET_RAW SETGID SETUID SETFCAP SETPCAP NET_BIND_SERVICE SYS_CHROOT KILL AUDIT_WRITE";
/// What Docker's profile refuses with EPERM without CAP_SYS_ADMIN, beside what the
/// next two constants say. Docker lists what it allows; for stockade's calls it is the same.
const REFUSED: &str = "acct add_key bpf clock_settime delete_module fanotify_init finit_module fsconfig fsmount fsopen fspick get_mempolicy init_module ioperm iopl kcmp kexec_file_load kexec_load keyctl lookup_dcookie mbind migrate_pages mount mount_setattr move_mount move_pages open_by_handle_at open_tree perf_event_open pidfd_getfd pivot_root process_madvise quotactl quotactl_fd reboot request_key set_mempolicy setdomainname sethostname setns settimeofday swapoff swapon syslog umount2 unshare uselib userfaultfd ustat vhangup";
/// So that a libc falls back to clone, whose flags a filter can see.
const HIDDEN: &str = "clone3";
/// Bits of clone's flags that ask for a namespace.
const NAMESPACES: [u32; 7] = [17, 25, 26, 27, 28, 29, 30];
const MASKED: &str = "/proc/asound /proc/acpi /proc/interrupts /proc/kcore /proc/keys /proc/latency_stats /proc/timer_list /proc/timer_stats /proc/sched_debug /proc/scsi /sys/firmware";
const READ_ONLY: &str = "/proc/bus /proc/fs /proc/irq /proc/sys /proc/sysrq-trigger";

/// What is not as Docker starts it by default.
#[derive(Clone, Copy, Default)]
struct Unlike {
    /// `--security-opt seccomp=unconfined`
    no_filter: bool,
    /// `--security-opt systempaths=unconfined`
    no_covers: bool,
    /// `--privileged`: every capability of ours, and cgroups that can be written to.
    privileged: bool,
}

/// `--user`
const ROOT: u32 = 0;
const USER: u32 = 1000;

fn words(list: &str) -> Vec<&str> {
    list.split(' ').collect()
}

/// Capabilities of this process, by number: a container has none that its engine lacks.
fn own_capabilities() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    u64::from_str_radix(status.lines().find_map(|line| line.strip_prefix("CapEff:\t")).unwrap(), 16).unwrap()
}

/// All names that runc knows, in the order of their numbers.
const ALL: &str = "CHOWN DAC_OVERRIDE DAC_READ_SEARCH FOWNER FSETID KILL SETGID SETUID SETPCAP LINUX_IMMUTABLE NET_BIND_SERVICE NET_BROADCAST NET_ADMIN NET_RAW IPC_LOCK IPC_OWNER SYS_MODULE SYS_RAWIO SYS_CHROOT SYS_PTRACE SYS_PACCT SYS_ADMIN SYS_BOOT SYS_NICE SYS_RESOURCE SYS_TIME SYS_TTY_CONFIG MKNOD LEASE AUDIT_WRITE AUDIT_CONTROL SETFCAP MAC_OVERRIDE MAC_ADMIN SYSLOG WAKE_ALARM BLOCK_SUSPEND AUDIT_READ PERFMON BPF CHECKPOINT_RESTORE";

fn capabilities(unlike: Unlike) -> Vec<String> {
    let named = |name: &&str| format!("CAP_{name}");
    if !unlike.privileged {
        return words(CAPABILITIES).iter().map(named).collect();
    }
    let own = own_capabilities();
    words(ALL).iter().enumerate().filter(|(number, _)| own & (1 << number) != 0).map(|(_, name)| named(name)).collect()
}

fn filter() -> Value {
    let refuse = |names: &[&str], errno: i32| json!({"names": names, "action": "SCMP_ACT_ERRNO", "errnoRet": errno});
    let mut rules = vec![refuse(&words(REFUSED), nix::libc::EPERM), refuse(&[HIDDEN], nix::libc::ENOSYS)];
    for bit in NAMESPACES {
        let flag = 1u64 << bit;
        let mut rule = refuse(&["clone"], nix::libc::EPERM);
        rule["args"] = json!([{"index": 0, "value": flag, "valueTwo": flag, "op": "SCMP_CMP_MASKED_EQ"}]);
        rules.push(rule);
    }
    let machines = ["SCMP_ARCH_X86_64", "SCMP_ARCH_X86", "SCMP_ARCH_X32"];
    json!({"defaultAction": "SCMP_ACT_ALLOW", "architectures": machines, "syscalls": rules})
}

fn mounts(unlike: Unlike, program: &Path) -> Value {
    let mount = |at: &str, kind: &str, options: &str| json!({"destination": at, "type": kind, "source": kind, "options": words(options)});
    let bind = |from: &str, at: &str| json!({"destination": at, "type": "bind", "source": from, "options": ["bind", "ro"]});
    let sealed = if unlike.privileged { "rw" } else { "ro" };
    json!([
        mount("/proc", "proc", "nosuid noexec nodev"),
        mount("/dev", "tmpfs", "nosuid strictatime mode=755 size=65536k"),
        mount("/dev/pts", "devpts", "nosuid noexec newinstance ptmxmode=0666 mode=0620 gid=5"),
        mount("/dev/shm", "tmpfs", "nosuid noexec nodev mode=1777 size=65536k"),
        mount("/dev/mqueue", "mqueue", "nosuid noexec nodev"),
        mount("/sys", "sysfs", &format!("nosuid noexec nodev {sealed}")),
        mount("/sys/fs/cgroup", "cgroup", &format!("nosuid noexec nodev {sealed}")),
        mount("/run", "tmpfs", "nosuid nodev mode=755"),
        bind("/usr", "/usr"),
        bind("/etc", "/etc"),
        bind(text(program), PROGRAM),
    ])
}

/// Where the program under test lies inside.
const PROGRAM: &str = "/stockade";

/// A container's name, and that of its cgroup.
fn name() -> String {
    format!("suite-container-{}", std::process::id())
}

fn configuration(uid: u32, unlike: Unlike, program: &Path, arguments: &[&str]) -> Value {
    let capabilities = capabilities(unlike);
    // An ordinary user has none, and could gain them from a program's file.
    let held = if uid == ROOT { capabilities.clone() } else { Vec::new() };
    let namespaces = ["pid", "ipc", "uts", "mount", "network"].map(|kind| json!({"type": kind}));
    let device = |major: u32, minor: u32| json!({"allow": true, "type": "c", "major": major, "minor": minor, "access": "rwm"});
    let devices = [json!({"allow": unlike.privileged, "access": "rwm"}), json!({"allow": true, "type": "c", "access": "m"})];
    let usual = [(1, 3), (1, 5), (1, 7), (1, 8), (1, 9), (5, 0), (5, 2)].map(|(major, minor)| device(major, minor));
    let devices = [&devices[..], &usual[..]].concat();
    let mut linux = json!({
        "namespaces": namespaces, "cgroupsPath": format!("/{}", name()), "resources": {"devices": devices},
    });
    if !unlike.no_filter {
        linux["seccomp"] = filter();
    }
    if !unlike.no_covers {
        (linux["maskedPaths"], linux["readonlyPaths"]) = (json!(words(MASKED)), json!(words(READ_ONLY)));
    }
    json!({
        "ociVersion": "1.0.2", "root": {"path": "root"}, "hostname": "container", "linux": linux, "mounts": mounts(unlike, program),
        "process": {
            "user": {"uid": uid, "gid": uid}, "cwd": "/tmp", "args": arguments,
            "env": ["PATH=/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/tmp", "LANG=C.UTF-8"],
            "capabilities": {"bounding": capabilities, "effective": held, "permitted": held},
        },
    })
}

/// Runs a program in a container that ends with it.
fn contained(place: &Path, uid: u32, unlike: Unlike, arguments: &[&str], stdin: &str) -> Output {
    let bundle = place.join("bundle");
    let root = bundle.join("root");
    if !root.exists() {
        fs::create_dir_all(root.join("tmp")).unwrap();
        fs::create_dir_all(root.join("var/tmp")).unwrap();
        for open in ["tmp", "var/tmp"] {
            fs::set_permissions(root.join(open), Permissions::from_mode(0o1777)).unwrap();
        }
        for link in ["bin", "sbin", "lib", "lib64"] {
            symlink(format!("usr/{link}"), root.join(link)).unwrap();
        }
    }
    let configuration = configuration(uid, unlike, &program_path().unwrap(), arguments);
    fs::write(bundle.join("config.json"), configuration.to_string()).unwrap();
    let state = place.join("state");
    let runc = |words: &[&str]| {
        let mut runc = Command::new("runc");
        runc.args(["--root", text(&state)]).args(words).stdout(Stdio::piped()).stderr(Stdio::piped());
        runc.env_clear().env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
        runc
    };
    let output = run_with_stdin(&mut runc(&["run", "--bundle", text(&bundle), &name()]), stdin.as_bytes());
    // It is gone with its process, unless runc was stopped midway.
    let _gone = runc(&["delete", "--force", &name()]).output();
    output
}

/// Why no container can be started here. It is tried once: two tries at one time would have one
/// name.
pub fn missing() -> Option<String> {
    static ANSWER: OnceLock<Option<String>> = OnceLock::new();
    ANSWER.get_or_init(try_container).clone()
}

fn try_container() -> Option<String> {
    let place = std::env::temp_dir().join(format!("suite-container-{}", std::process::id()));
    fs::create_dir_all(&place).ok()?;
    let answer = match find_program("runc") {
        Some(_) => {
            let tried = contained(&place, ROOT, Unlike::default(), &["/bin/true"], "");
            (!tried.status.success()).then(|| format!("runc starts no container here: {}", String::from_utf8_lossy(&tried.stderr).trim()))
        }
        None => Some(String::from("runc is not installed")),
    };
    let _left = fs::remove_dir_all(&place);
    answer
}

/// What `doctor` found, and what became of a request; they agree.
fn asked(uid: u32, unlike: Unlike) -> (Value, ExecResult) {
    let doctor = contained(&directory(), uid, unlike, &[PROGRAM, "doctor", "--json"], "");
    let found: Value = serde_json::from_slice(&doctor.stdout).unwrap_or_else(|error| panic!("{error}: {doctor:?}"));
    let done = ExecResult::of(contained(&directory(), uid, unlike, &[PROGRAM, "exec"], r#"{"code": "print(6 * 7)"}"#));
    assert_eq!(doctor.status.success(), done["verdict"] == "exited", "doctor and exec disagree: {found}\n{} {}", done.brief(), done.stderr);
    assert_eq!(found["enforceable"], doctor.status.success(), "{found}");
    (found, done)
}

fn remedy_of(found: &Value, feature: &str) -> String {
    let findings = found["findings"].as_array().unwrap();
    let finding = findings.iter().find(|finding| finding["feature"] == feature).unwrap_or_else(|| panic!("no {feature}: {found}"));
    assert_eq!(finding["state"], "missing", "{finding}");
    finding["remedy"].as_str().unwrap_or_else(|| panic!("no remedy: {finding}")).to_owned()
}

/// The words of a remedy that Docker's options stand in.
const OPTIONS: [&str; 2] = ["--security-opt seccomp=unconfined", "--security-opt systempaths=unconfined"];

test!(RootOnly, a_container_as_its_engine_starts_it_is_refused_and_told_how_to_start, needs [Other(missing)], seconds 90);
fn a_container_as_its_engine_starts_it_is_refused_and_told_how_to_start() {
    for (uid, feature, reason) in [(ROOT, "caller", "root_without_capabilities"), (USER, "user_namespaces", "namespaces_refused")] {
        let (found, done) = asked(uid, Unlike::default());
        done.expect(json!({"verdict": "sandbox_error", "reason": reason, "started": false, "output": ""}));
        let (remedy, said) = (remedy_of(&found, feature), done["error"].as_str().unwrap());
        assert!(OPTIONS.iter().all(|option| remedy.contains(option) && said.contains(option)), "{remedy}\n{said}");
        // Root is to be an ordinary user then.
        assert_eq!(remedy.contains("(Docker: --user)"), uid == ROOT, "{remedy}");
    }
}

test!(RootOnly, the_remedy_for_a_container_lets_its_users_run, needs [Other(missing)], seconds 90);
fn the_remedy_for_a_container_lets_its_users_run() {
    let remedied = Unlike { no_filter: true, no_covers: true, ..Unlike::default() };
    let (_, done) = asked(USER, remedied);
    done.succeeded().expect(json!({"output": "42\n"}));
    // No cgroup is an ordinary user's there, and that stands in the receipt.
    assert_eq!(done["receipt"]["degraded"], json!(["cgroup"]));
    // Each half of it by itself is not enough, and what is still missing is named.
    let (found, done) = asked(USER, Unlike { no_filter: true, ..Unlike::default() });
    done.expect(json!({"verdict": "sandbox_error", "reason": "root_entry_failed", "started": false}));
    assert!(remedy_of(&found, "proc").contains(OPTIONS[1]) && done["error"].as_str().unwrap().contains(OPTIONS[1]), "{}", done.brief());
    let (found, done) = asked(USER, Unlike { no_covers: true, ..Unlike::default() });
    done.expect(json!({"verdict": "sandbox_error", "reason": "namespaces_refused", "started": false}));
    assert!(remedy_of(&found, "user_namespaces").contains(OPTIONS[0]), "{found}");
}

test!(RootOnly, a_container_with_all_rights_runs_as_root, needs [Other(missing)], seconds 90);
fn a_container_with_all_rights_runs_as_root() {
    let privileged = Unlike { no_filter: true, no_covers: true, privileged: true };
    let (_, done) = asked(ROOT, privileged);
    done.succeeded().expect(json!({"output": "42\n"}));
    assert_eq!(done["receipt"]["degraded"], json!([]));
}
