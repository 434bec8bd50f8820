//! What confines a run: cgroup, Landlock, filter, resource limits, CPUs.
//!
//! A layer that the host lacks is refused here unless the policy lets the run go without.

use std::path::{Path, PathBuf};

use stockade_protocol::{
    LimitKey, Limits,
    landlock::{access, scopes},
};

use super::{
    CgroupPlan, CgroupSetting, FilterPlan, LandlockPlan, LandlockRule, PlanError, RlimitPlan, RootEntry, ScratchPlan, degrade, temporary,
};
use crate::{
    facts::{CgroupFacts, HostFacts},
    filter::Filters,
    model::{Degradable, Policy},
};

pub(super) fn plan_cgroup(
    policy: &Policy,
    facts: &HostFacts,
    limits: &Limits,
    degraded: &mut Vec<(&'static str, String)>,
) -> Result<CgroupPlan, PlanError> {
    const PERIOD_US: u64 = 100_000;
    let get = |key| limits.get(key);
    let quota = get(LimitKey::Cpus).map(|milli| (milli * PERIOD_US / 1000).max(1000));
    // One more than asked for: pid 1 is the executor.
    let processes = get(LimitKey::Processes).map(|n| n + 1);
    match &facts.cgroup {
        CgroupFacts::V1 { controllers } => {
            let mut settings = Vec::new();
            let mut set = |controller, file, value: Option<u64>, optional| {
                if let Some(value) = value {
                    settings.push(CgroupSetting { controller: Some(controller), file, value: value.to_string(), optional });
                }
            };
            let memory = get(LimitKey::Memory).map(whole_pages);
            set("memory", "memory.limit_in_bytes", memory, false);
            // Memory and swap together: no swap. Missing where swap is not accounted.
            set("memory", "memory.memsw.limit_in_bytes", memory, !facts.swap);
            set("memory", "memory.swappiness", Some(0), true);
            // Socket buffers are not in the above on v1; this holds those of TCP and UDP, beside it.
            set("memory", "memory.kmem.tcp.limit_in_bytes", memory.map(socket_buffers), true);
            set("pids", "pids.max", processes, false);
            set("cpu", "cpu.cfs_period_us", quota.map(|_| PERIOD_US), false);
            set("cpu", "cpu.cfs_quota_us", quota, false);
            // cpuacct only counts: without a CPU limit pid 1's own account does, plus the CPU time of
            // processes killed with it.
            let counted = get(LimitKey::Cpu).is_some();
            let parents = controllers.iter().filter(|(kind, _)| counted || *kind != "cpuacct");
            Ok(CgroupPlan::V1 { parents: parents.map(|(kind, path)| (kind.clone(), path.clone())).collect(), settings })
        }
        CgroupFacts::V2 { parent, vacate } => {
            let mut settings = Vec::new();
            let mut set = |file, value: Option<String>, optional| {
                if let Some(value) = value {
                    settings.push(CgroupSetting { controller: None, file, value, optional });
                }
            };
            let memory = get(LimitKey::Memory).map(whole_pages);
            set("memory.max", memory.map(|m| m.to_string()), false);
            set("memory.swap.max", memory.map(|_| String::from("0")), !facts.swap);
            set("memory.oom.group", Some(String::from("1")), false);
            set("pids.max", processes.map(|n| n.to_string()), false);
            set("cpu.max", quota.map(|q| format!("{q} {PERIOD_US}")), false);
            Ok(CgroupPlan::V2 { parent: parent.clone(), vacate: *vacate, settings })
        }
        CgroupFacts::Unavailable { reason } => {
            degrade(policy, facts, Degradable::Cgroup, reason.clone(), degraded)?;
            if let Some((_, detail)) = degraded.last_mut() {
                detail.push_str(IN_ITS_PLACE);
            }
            Ok(CgroupPlan::Absent { reason: reason.clone() })
        }
    }
}

/// What the rlimits of `plan_rlimits` and the choice of CPUs leave of a cgroup's limits.
const IN_ITS_PLACE: &str = "; in its place RLIMIT_DATA and RLIMIT_CPU hold for each process by itself, RLIMIT_NPROC for the run, what all processes hold of memory is added up, and no share of a CPU is kept";

/// A tenth of `memory`, which a run may hold beside it of what `memory` does not count; at least this.
fn tenth_beside(memory: u64, least: u64) -> u64 {
    (memory / 10).max(least)
}

/// What the kernel may hold for a run that it charges to no cgroup, beside its memory.
pub fn kernel_memory(memory: u64) -> u64 {
    tenth_beside(memory, 16 << 20)
}

/// What a v1 cgroup may hold in socket buffers beside its memory.
fn socket_buffers(memory: u64) -> u64 {
    whole_pages(tenth_beside(memory, 4 << 20).min(memory))
}

/// The kernel keeps memory limits in whole pages; so do we, to read back what we wrote.
fn whole_pages(bytes: u64) -> u64 {
    bytes / 4096 * 4096
}

pub(super) fn plan_landlock(
    policy: &Policy,
    facts: &HostFacts,
    root: &[RootEntry],
    writable: &[PathBuf],
    scratch: &ScratchPlan,
    degraded: &mut Vec<(&'static str, String)>,
) -> Result<(LandlockPlan, LandlockPlan), PlanError> {
    let abi = facts.landlock_abi;
    if abi < 2 {
        let reason = if abi == 0 {
            "the kernel offers no Landlock (it needs CONFIG_SECURITY_LANDLOCK and `landlock` in the kernel's lsm= list)"
        } else {
            "the kernel's Landlock is ABI 1, 2 is needed (Linux 5.19)"
        };
        degrade(policy, facts, Degradable::Landlock, reason.to_owned(), degraded)?;
        return Ok((LandlockPlan::default(), LandlockPlan::default()));
    }
    let handled = access::handled(abi);
    let scoped = scopes(abi);
    let mut rules = Vec::new();
    let mut rule = |path: &Path, rights: u64| rules.push(LandlockRule { path: path.to_path_buf(), rights: rights & handled });
    rule(
        Path::new("/"),
        match (&facts.image, policy.filesystem.writable_root) {
            (None, _) => access::READ_DIR,
            // An overlay is one file system to Landlock: no rule can name one of its layers.
            (Some(_), false) => access::READ | access::EXECUTE,
            (Some(_), true) => access::WRITE_PLAIN,
        },
    );
    // A view need not have one.
    if root.iter().any(|entry| matches!(entry, RootEntry::Directory { target, .. } if target == Path::new("etc"))) {
        rule(Path::new("/etc"), access::READ);
    }
    rule(Path::new("/sys"), access::READ);
    rule(Path::new("/proc"), access::READ);
    rule(Path::new("/dev"), access::READ | access::WRITE_FILE | access::IOCTL_DEV);
    for (entry, later) in root.iter().enumerate().map(|(at, entry)| (entry, root.get(at + 1..).unwrap_or_default())) {
        if is_covered(entry, later) {
            continue;
        }
        if let RootEntry::Tree { target, .. } = entry {
            rule(&Path::new("/").join(target), access::WRITE_PLAIN);
        }
        if let RootEntry::Pipe { target } = entry {
            rule(&Path::new("/").join(target), access::WRITE_FILE);
        }
        if let RootEntry::Contents { target, .. } | RootEntry::Laid { target, writable: false, .. } = entry {
            rule(&Path::new("/").join(target), access::READ | access::EXECUTE);
        }
        if let RootEntry::Bind { target, executable, .. }
        | RootEntry::Placed { target, executable, .. }
        | RootEntry::Overlay { target, changes: None, executable, .. } = entry
        {
            let path = Path::new("/").join(target);
            // Rules reach through mounts: that of /etc covers what is bound there.
            if *executable || !path.starts_with("/etc") {
                rule(&path, access::READ | if *executable { access::EXECUTE } else { 0 });
            }
        }
    }
    // A rule reaches through the mounts below its path.
    let shows_tree = |path: &Path| {
        root.iter().any(|entry| matches!(entry, RootEntry::Tree { target, .. } if Path::new("/").join(target).starts_with(path)))
    };
    for path in writable {
        // One place takes sockets and fifos, unless the host would get them; the probe of the receipt
        // tries /dev/shm.
        let takes_all = path == temporary(scratch) && !shows_tree(path);
        let rights = if takes_all { access::WRITE_TREE } else { access::WRITE_PLAIN };
        rule(path, rights);
    }
    rule(&scratch.path, if scratch.read_only { access::READ | access::EXECUTE } else { access::WRITE_PLAIN });
    let payload = LandlockPlan {
        abi,
        // REFER must be handled to be allowed: without it every layer refuses to move
        // a file into another directory.
        handled: access::EXECUTE | access::REFER,
        scoped,
        rules: vec![LandlockRule { path: PathBuf::from("/"), rights: access::EXECUTE | access::REFER }],
    };
    Ok((LandlockPlan { abi, handled, scoped, rules }, payload))
}

/// Whether a later operation of a view has covered an earlier one, which has no path any more.
fn is_covered(entry: &RootEntry, later: &[RootEntry]) -> bool {
    fn laid(entry: &RootEntry) -> Option<&Path> {
        match entry {
            RootEntry::Placed { target, .. }
            | RootEntry::Tree { target, .. }
            | RootEntry::Tmpfs { target, .. }
            | RootEntry::Overlay { target, .. }
            | RootEntry::Socket { target, .. }
            | RootEntry::Laid { target, .. } => Some(target),
            _ => None,
        }
    }
    let own = match entry {
        RootEntry::Contents { target, .. } => Some(target.as_path()),
        entry => laid(entry),
    };
    own.is_some_and(|own| later.iter().filter_map(laid).any(|above| own != above && own.starts_with(above)))
}

pub(super) fn plan_filter(policy: &Policy, filters: &Filters, grows_on_host: bool, has_callers: bool) -> FilterPlan {
    let filter = if grows_on_host { &filters.host_scratch } else { &filters.private_scratch };
    let filter = if has_callers { filter.taking_callers() } else { filter.clone() };
    FilterPlan {
        sha256: filter.sha256,
        instructions: filter.program.len(),
        program: filter.program,
        kill: filters.kill.clone(),
        kill_names: policy.seccomp.kill.clone(),
    }
}

/// What one process may lock in memory: the least that kernels before Linux 5.16 gave by default.
const LOCKED: u64 = 64 << 10;

pub(super) fn plan_rlimits(facts: &HostFacts, limits: &Limits, no_cgroup: bool) -> Vec<RlimitPlan> {
    let get = |key| limits.get(key);
    let mut all = vec![
        ("RLIMIT_AS", 9, get(LimitKey::AddressSpace)),
        ("RLIMIT_FSIZE", 1, get(LimitKey::FileSize)),
        ("RLIMIT_NOFILE", 7, get(LimitKey::OpenFiles)),
        ("RLIMIT_STACK", 3, get(LimitKey::Stack)),
        // Message queues would be memory that no tmpfs limit counts.
        ("RLIMIT_MSGQUEUE", 12, Some(0)),
        // Code could take back the precedence that its first process gives up (`Step::Scheduling`).
        ("RLIMIT_NICE", 13, Some(0)),
        ("RLIMIT_RTPRIO", 14, Some(0)),
        // Locked pages of the host's files are charged to who read them first.
        ("RLIMIT_MEMLOCK", 8, Some(LOCKED)),
    ];
    if no_cgroup {
        // The first for each process, the second for the run, as the receipt has it.
        all.push(("RLIMIT_DATA", 2, get(LimitKey::Memory)));
        all.push(("RLIMIT_NPROC", 6, get(LimitKey::Processes).map(|n| n + 1)));
    }
    // Beside a cgroup, which counts finer, only what the caller imposes.
    all.push(("RLIMIT_CPU", 0, get(LimitKey::Cpu).filter(|_| no_cgroup).map(|ms| ms.div_ceil(1000))));
    all.into_iter()
        .map(|(name, resource, value)| {
            let hard = facts.hard_limits.get(&resource).copied();
            RlimitPlan { name, resource, value: value.map_or(hard, |v| Some(hard.map_or(v, |h| v.min(h)))) }
        })
        .collect()
}

/// How many CPUs the code sees: its quota rounded up, at most what there is.
pub(super) fn usable_cpus(facts: &HostFacts, limits: &Limits) -> usize {
    let present = facts.cpus.max(1);
    limits.get(LimitKey::Cpus).map_or(present, |milli| usize::try_from(milli.div_ceil(1000)).unwrap_or(usize::MAX)).min(present)
}
