//! Whether a policy can be enforced on this host, by doing it.
//!
//! One real run through the same door as `exec` decides, so that doctor and exec cannot
//! disagree; probes of single features, each in a process of its own, then explain what
//! is missing and how to mend it. Nothing is changed on the host, and nothing is left
//! behind. What is printed is not worded here beyond findings and remedies.

mod probe;

use std::{
    ffi::CString,
    fs,
    os::unix::fs::{DirBuilderExt, FileTypeExt},
    path::{Path, PathBuf},
};

use rustix::io::Errno;
use serde::Serialize;
use stockade_launcher::scratch::{self, Opener};
use stockade_policy::{
    facts::{CgroupFacts, HostFacts},
    model::{Degradable, Policy},
};
use stockade_protocol::{Known, Receipt, Report, Verdict};

use crate::{
    Loaded, Options, Refusal,
    caller::{self, Identity},
    facts, inventory, load_policy,
};
use probe::{Failure, Ids};

/// How a feature stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// It works.
    Ok,
    /// It does not, and the policy lets a run go on without it, or with less.
    Degraded,
    /// It is not here, and no run needs it that does not ask for it.
    Absent,
    /// It does not work, and no run can do without.
    Missing,
}

impl State {
    /// The word for it.
    pub const fn name(self) -> &'static str {
        match self {
            State::Ok => "ok",
            State::Degraded => "degraded",
            State::Absent => "absent",
            State::Missing => "missing",
        }
    }
}

/// What was found out about one feature.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// Its stable name.
    pub feature: String,
    /// How it stands.
    pub state: State,
    /// What was tried and seen.
    pub detail: String,
    /// How to mend it.
    pub remedy: Option<String>,
}

/// The findings about one policy on this host, for this user.
#[derive(Clone, Debug, Serialize)]
pub struct Examination {
    /// Version of this format.
    pub schema: u32,
    /// The policy.
    pub policy: String,
    /// `root` or `rootless`; null where the launcher's own rights make no sense.
    pub mode: Option<&'static str>,
    /// Who asked.
    pub uid: u32,
    /// The running kernel.
    pub kernel: String,
    /// A request runs here under this policy.
    pub enforceable: bool,
    /// Layers that it goes without.
    pub degraded: Vec<String>,
    /// Each feature.
    pub findings: Vec<Finding>,
}

/// Tries everything.
pub fn examine(options: &Options) -> Examination {
    let name = options.policy.clone().unwrap_or_else(|| String::from("default"));
    let mut examination = Examination {
        schema: 1,
        policy: name,
        mode: None,
        uid: rustix::process::getuid().as_raw(),
        kernel: rustix::system::uname().release().to_string_lossy().into_owned(),
        enforceable: false,
        degraded: Vec::new(),
        findings: Vec::new(),
    };
    let loaded = load_policy(options).map_err(|refusal| missing("policy", split(&refusal.message)));
    let identity = caller::identify().map_err(|refusal| missing("caller", split(&refusal.message)));
    match (loaded, identity) {
        (Ok(loaded), Ok(identity)) => Examiner::new(options, &loaded, &identity).examine(&mut examination),
        (loaded, identity) => examination.findings.extend(loaded.err().into_iter().chain(identity.err())),
    }
    examination
}

/// Detail and remedy.
type Words = (String, Option<String>);

/// A message of the form `what: why; remedy`.
fn split(message: &str) -> Words {
    match message.split_once("; ") {
        Some((what, remedy)) => (what.to_owned(), Some(remedy.to_owned())),
        None => (message.to_owned(), None),
    }
}

fn finding(feature: &str, state: State, (detail, remedy): Words) -> Finding {
    Finding { feature: feature.to_owned(), state, detail, remedy }
}

fn missing(feature: &str, words: Words) -> Finding {
    finding(feature, State::Missing, words)
}

fn fine(feature: &str, detail: impl Into<String>) -> Finding {
    finding(feature, State::Ok, (detail.into(), None))
}

struct Examiner<'a> {
    options: &'a Options,
    loaded: &'a Loaded,
    policy: &'a Policy,
    identity: &'a Identity,
    /// The run that decides.
    run: Report,
    host: HostFacts,
    registry: Result<(), Refusal>,
    ids: Ids,
}

impl<'a> Examiner<'a> {
    fn new(options: &'a Options, loaded: &'a Loaded, identity: &'a Identity) -> Self {
        let policy = &loaded.policy;
        // First, before anything that could stand in its way; an empty program ends at once.
        let run = crate::exec(br#"{"code": ""}"#, options);
        // Held while the probes use the run's host id, so that nobody else does.
        let record = facts::registry(identity).and_then(|registry| Ok(registry.claim()?));
        let host = facts::read(identity, record.as_ref().ok());
        let caller = (identity.caller.uid, identity.caller.gid);
        let outside = host.unique_id.map_or(caller, |id| (id, id));
        let ids = Ids { inside: (policy.identity.uid, policy.identity.gid), outside, privileged: identity.privileged };
        Examiner { options, loaded, policy, identity, run, host, registry: record.map(drop), ids }
    }

    fn examine(&self, examination: &mut Examination) {
        examination.mode = Some(if self.identity.privileged { "root" } else { "rootless" });
        examination.uid = self.identity.caller.uid;
        examination.enforceable = is_enforced(&self.run);
        examination.degraded = self.run.receipt.as_ref().map(|receipt| receipt.degraded.clone()).unwrap_or_default();
        let found = &mut examination.findings;
        found.push(self.kernel());
        found.push(self.user_namespaces());
        found.push(self.namespaces());
        found.push(self.of_probe("root", probe::root_file_system(self.ids), "tmpfs, read-only binds and pivot_root"));
        found.push(self.proc());
        found.push(self.of_probe("loopback", probe::loopback(self.ids), "lo comes up in a network namespace of its own; nothing else is there"));
        found.push(self.of_probe("keyring", probe::keyring(), "a session keyring of its own"));
        found.push(self.devices());
        found.push(self.paths());
        found.push(self.seccomp());
        found.push(denial_reports());
        found.push(self.landlock());
        found.push(self.cgroup());
        found.push(self.swap());
        found.push(self.identity());
        found.push(self.scratch());
        found.push(self.registry());
        found.push(self.terminals());
        found.extend(self.runtimes());
        if examination.enforceable {
            // The run has shown that it can do without, or that the probe was at fault.
            for finding in found.iter_mut().filter(|finding| finding.state == State::Missing) {
                finding.state = State::Degraded;
                finding.detail.push_str(" (yet the run below succeeded)");
            }
        }
        found.push(self.run());
    }

    fn may_degrade(&self, layer: Degradable) -> bool {
        let list = if self.identity.privileged { &self.policy.degrade.root } else { &self.policy.degrade.rootless };
        list.contains(&layer)
    }

    fn lost(&self, layer: Degradable) -> State {
        if self.may_degrade(layer) { State::Degraded } else { State::Missing }
    }

    fn of_probe(&self, feature: &str, outcome: Result<(), Failure>, what: &str) -> Finding {
        match outcome {
            Ok(()) => fine(feature, what),
            Err(failure) => missing(feature, (format!("{what}: {failure}"), Some(self.namespace_remedy(failure)))),
        }
    }

    /// What keeps an ordinary act in a user namespace from working here.
    fn namespace_remedy(&self, failure: Failure) -> String {
        let read = |path: &str| fs::read_to_string(path).unwrap_or_default().trim().to_owned();
        let container = Path::new("/.dockerenv").exists() || Path::new("/run/.containerenv").exists();
        let in_container = "start the container with --security-opt seccomp=unconfined --security-opt apparmor=unconfined --security-opt systempaths=unconfined, or use the host";
        match failure.errno() {
            Some(Errno::NOSPC) => String::from("the number of namespaces is used up or zero: sysctl -w user.max_user_namespaces=10000 (and likewise user.max_mnt_namespaces, max_pid_, max_net_, max_uts_, max_ipc_ and max_cgroup_namespaces)"),
            _ if !self.identity.privileged && read("/proc/sys/kernel/apparmor_restrict_unprivileged_userns") == "1" => String::from(
                "AppArmor keeps user namespaces from programs without a profile; load ours, which covers /usr/bin/stockade and /usr/local/bin/stockade: sudo install -m 644 scripts/apparmor/stockade /etc/apparmor.d/stockade && sudo apparmor_parser --replace /etc/apparmor.d/stockade",
            ),
            _ if !self.identity.privileged && read("/proc/sys/kernel/unprivileged_userns_clone") == "0" => {
                String::from("unprivileged user namespaces are switched off: sudo sysctl -w kernel.unprivileged_userns_clone=1")
            }
            _ if container => String::from(in_container),
            Some(Errno::NOSYS) => format!("the system call is not there: the kernel is older than 5.15, or an outer filter hides it; in a container, {in_container}"),
            _ => format!("an outer system call filter or a security module forbids it; in a container, {in_container}; in a systemd unit, drop RestrictNamespaces= and SystemCallFilter="),
        }
    }

    fn kernel(&self) -> Finding {
        let release = &self.host.kernel;
        let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|part| part.parse::<u32>().unwrap_or(0));
        let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
        if version >= (5, 15) {
            return fine("kernel", format!("Linux {release}"));
        }
        // Not missing: whether it will do is for the run to say.
        finding("kernel", State::Degraded, (format!("Linux {release}; stockade is made for 5.15 and later"), Some(String::from("use Ubuntu 22.04, Debian 12 or later"))))
    }

    fn user_namespaces(&self) -> Finding {
        let what = "two user namespaces, one in the other";
        self.of_probe("user_namespaces", probe::user_namespace(self.ids).and_then(|()| probe::nested_user_namespace(self.ids)), what)
    }

    fn namespaces(&self) -> Finding {
        let tried = probe::namespaces(self.ids);
        let failed: Vec<_> = tried.iter().filter_map(|(name, outcome)| Some((name, outcome.err()?))).collect();
        match failed.first() {
            None => fine("namespaces", tried.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(" ")),
            Some((_, first)) => {
                let detail = failed.iter().map(|(name, failure)| format!("{name}: {failure}")).collect::<Vec<_>>().join(", ");
                missing("namespaces", (detail, Some(self.namespace_remedy(*first))))
            }
        }
    }

    fn proc(&self) -> Finding {
        let what = "a fresh /proc";
        match probe::fresh_proc(self.ids) {
            // Where even a namespace is refused, that is what to mend.
            Err(failure) if failure.errno() == Some(Errno::PERM) && probe::root_file_system(self.ids).is_ok() => {
                let covered = covered_in_proc();
                let by = if covered.is_empty() { String::new() } else { format!(", here by {}", covered.join(", ")) };
                let remedy = "uncover it; Docker: --security-opt systempaths=unconfined; systemd unit: drop ProtectKernelTunables=, ProtectKernelLogs= and ProcSubset=";
                missing("proc", (format!("{what}: {failure}: the kernel gives none where the host's is partly covered (\"mount too revealing\"){by}"), Some(remedy.to_owned())))
            }
            outcome => self.of_probe("proc", outcome, what),
        }
    }

    fn devices(&self) -> Finding {
        let names = &self.policy.filesystem.devices;
        for name in names {
            let path = format!("/dev/{name}");
            let is_device = fs::metadata(&path).is_ok_and(|metadata| metadata.file_type().is_char_device());
            let outcome = match CString::new(path.as_str()) {
                Ok(path) if is_device => probe::device(&path, self.ids),
                _ => Err(Errno::NODEV.into()),
            };
            if let Err(failure) = outcome {
                let remedy = if is_device { self.namespace_remedy(failure) } else { format!("the host has no such device node; make it (mknod(1)), or remove {name:?} from `devices` under [filesystem]") };
                return missing("devices", (format!("{path}: {failure}"), Some(remedy)));
            }
        }
        fine("devices", names.join(" "))
    }

    fn paths(&self) -> Finding {
        let filesystem = &self.policy.filesystem;
        let gone = |paths: &[PathBuf]| paths.iter().filter(|path| fs::metadata(path).is_err()).map(|path| path.display().to_string()).collect::<Vec<_>>();
        let required = gone(&filesystem.read_only);
        if !required.is_empty() {
            let remedy = "remove it from `read_only` under [filesystem], or move it to `read_only_optional`";
            return missing("paths", (format!("not on this host: {}", required.join(" ")), Some(remedy.to_owned())));
        }
        let optional = gone(&filesystem.read_only_optional);
        let all = filesystem.read_only.len() + filesystem.read_only_optional.len() - optional.len();
        let without = if optional.is_empty() { String::new() } else { format!("; left out, as the policy allows: {}", optional.join(" ")) };
        fine("paths", format!("{all} paths of the host are shown read-only{without}"))
    }

    fn seccomp(&self) -> Finding {
        match probe::filter() {
            Ok(()) => fine("seccomp", "a filter is loaded and answers"),
            Err(failure) => {
                let remedy = match failure.errno() {
                    Some(Errno::NOSYS | Errno::INVAL) => "the kernel needs CONFIG_SECCOMP_FILTER, and no outer filter may forbid seccomp(2)",
                    _ => "an outer filter or a security module forbids seccomp(2); allow it there",
                };
                missing("seccomp", (format!("load a system call filter: {failure}"), Some(remedy.to_owned())))
            }
        }
    }

    fn landlock(&self) -> Finding {
        let abi = self.host.landlock_abi;
        let lost = |words| finding("landlock", self.lost(Degradable::Landlock), words);
        match probe::landlock() {
            Ok(()) if abi >= 2 => {
                let scopes = if abi >= 6 { "" } else { "; its scopes need ABI 6, until then the PID and network namespaces keep signals and abstract sockets in" };
                fine("landlock", format!("ABI {abi}, and a ruleset refuses what it should{scopes}"))
            }
            Ok(()) => lost((format!("ABI {abi}, 2 is needed"), Some(String::from("use Linux 5.19 or later")))),
            Err(failure) => {
                let remedy = match failure.errno() {
                    Some(Errno::OPNOTSUPP) => format!("it is switched off: add landlock to the list of lsm= on the kernel's command line{}, and start anew", current_lsm()),
                    Some(Errno::NOSYS) => String::from("the kernel needs CONFIG_SECURITY_LANDLOCK, and no outer filter may hide landlock_create_ruleset(2)"),
                    _ => String::from("an outer filter or a security module forbids it; allow landlock_create_ruleset(2) and landlock_restrict_self(2) there"),
                };
                lost((format!("restrict a process: {failure}"), Some(remedy)))
            }
        }
    }

    fn cgroup(&self) -> Finding {
        if let CgroupFacts::Unavailable { reason } = &self.host.cgroup {
            return finding("cgroup", self.lost(Degradable::Cgroup), split(reason));
        }
        if self.run.reason.as_deref() == Some("cgroup_failed") {
            return missing("cgroup", split(&self.run.error.0));
        }
        let read_back = |receipt: &Receipt| receipt.layers.iter().find(|layer| layer.layer == "cgroup" && layer.known == Known::ReadBack).map(|layer| layer.detail.clone());
        if let Some(detail) = self.run.receipt.as_ref().and_then(read_back) {
            return fine("cgroup", detail);
        }
        match self.try_without_other_layers() {
            Ok(Some(receipt)) => read_back(&receipt).map_or_else(|| missing("cgroup", (String::from("a run had none"), None)), |detail| fine("cgroup", detail)),
            Err(refusal) if refusal.reason == "cgroup_failed" => missing("cgroup", split(&refusal.message)),
            _ => match self.make_directories() {
                Ok(made) => fine("cgroup", format!("directories can be made in {made}; limits not tried, as no run got so far")),
                Err(why) => missing("cgroup", (why, Some(String::from("the launcher must be able to write there")))),
            },
        }
    }

    /// Makes and removes a cgroup where a run's would be.
    fn make_directories(&self) -> Result<String, String> {
        let parents: Vec<&Path> = match &self.host.cgroup {
            CgroupFacts::V2 { parent, .. } => vec![parent.as_path()],
            CgroupFacts::V1 { controllers } => controllers.values().map(PathBuf::as_path).collect(),
            CgroupFacts::Unavailable { reason } => return Err(reason.clone()),
        };
        for parent in &parents {
            let directory = parent.join(format!("stockade-doctor-{}", std::process::id()));
            let tried = fs::create_dir(&directory).and_then(|()| fs::remove_dir(&directory));
            tried.map_err(|error| format!("make and remove {}: {error}", directory.display()))?;
        }
        Ok(parents.iter().map(|parent| parent.display().to_string()).collect::<Vec<_>>().join(" "))
    }

    /// A run of no policy's: every layer may be missing, so that those which are there
    /// can be seen at work although another is not.
    fn try_without_other_layers(&self) -> Result<Option<Receipt>, Refusal> {
        let all = vec![Degradable::Cgroup, Degradable::Landlock, Degradable::UniqueUid, Degradable::UserNamespace];
        let mut policy = self.policy.clone();
        policy.degrade.root.clone_from(&all);
        policy.degrade.rootless = all;
        policy.filesystem.read_only.retain(|path| fs::metadata(path).is_ok());
        Ok(inventory::run_captured(&["/usr/bin/true"], &Loaded { policy, filters: self.loaded.filters.clone() }, self.options)?.receipt)
    }

    fn swap(&self) -> Finding {
        if !self.host.swap {
            return fine("swap", "switched off, so no memory limit can leak into it");
        }
        if matches!(self.host.cgroup, CgroupFacts::Unavailable { .. }) {
            let remedy = "as for cgroup; or switch swap off: sudo swapoff --all";
            return finding("swap", self.lost(Degradable::Cgroup), (String::from("switched on, and without a cgroup nothing keeps a run out of it"), Some(remedy.to_owned())));
        }
        if self.run.reason.as_deref() == Some("cgroup_failed") && (self.run.error.0.contains("memsw") || self.run.error.0.contains("memory.swap.max")) {
            return missing("swap", (self.run.error.0.clone(), Some(String::from("swap is not accounted: add swapaccount=1 to the kernel's command line, or switch swap off: sudo swapoff --all"))));
        }
        fine("swap", "switched on; the cgroup keeps runs out of it")
    }

    fn identity(&self) -> Finding {
        let caller = &self.identity.caller;
        if !self.identity.privileged {
            let groups: Vec<String> = caller.groups.iter().filter(|group| **group != caller.gid).map(u32::to_string).collect();
            let kept = if groups.is_empty() { String::new() } else { format!("; its groups stay, as only root can drop them: {}", groups.join(" ")) };
            return fine("host_id", format!("runs are uid {} on the host, the caller's own{kept}", caller.uid));
        }
        match (self.host.unique_id, &self.host.unique_id_refusal) {
            (Some(id), _) => fine("host_id", format!("each run has a host uid of its own, such as {id}")),
            (None, Some(refusal)) => {
                let (detail, remedy) = split(refusal);
                let elsewhere = "start stockade outside that container, or in it as an ordinary user";
                finding("host_id", self.lost(Degradable::UniqueUid), (detail, remedy.or_else(|| Some(elsewhere.to_owned()))))
            }
            (None, None) => finding("host_id", self.lost(Degradable::UniqueUid), (String::from("none could be set aside"), Some(String::from("see `registry`")))),
        }
    }

    /// Whether files in a host scratch can belong to the caller although the code runs as
    /// another: tried where temporary files lie, since nobody has named a scratch.
    fn scratch(&self) -> Finding {
        let named = self.options.scratch.as_ref();
        if let (Some(path), true) = (named, is_enforced(&self.run)) {
            return fine("scratch", format!("the run used {}", path.display()));
        }
        if !self.identity.privileged {
            return fine("scratch", "any directory of the caller's; its files stay the caller's");
        }
        let owner = if self.identity.caller.uid == 0 { (NOBODY, NOBODY) } else { (self.identity.caller.uid, self.identity.caller.gid) };
        let (mut able, mut unable) = (Vec::new(), Vec::new());
        for place in ["/tmp", "/var/tmp"] {
            match self.try_idmap(Path::new(place), owner) {
                Ok(true) => able.push(place),
                Ok(false) => unable.push(format!("{place} cannot be idmapped")),
                Err(why) => unable.push(why),
            }
        }
        let remedy = "put scratch on ext4, xfs, btrfs or (Linux 6.3) tmpfs";
        match (able.as_slice(), unable.is_empty()) {
            (able, true) => fine("scratch", format!("idmapped scratch works in {}", able.join(" and "))),
            ([], false) => finding("scratch", if self.may_degrade(Degradable::UniqueUid) { State::Degraded } else { State::Absent }, (unable.join(", "), Some(remedy.to_owned()))),
            (able, false) => fine("scratch", format!("idmapped scratch works in {}; {}: {remedy}", able.join(" and "), unable.join(", "))),
        }
    }

    fn try_idmap(&self, place: &Path, owner: (u32, u32)) -> Result<bool, String> {
        let directory = place.join(format!("stockade-doctor-{}", std::process::id()));
        let failed = |error: &dyn std::fmt::Display| format!("{}: {error}", directory.display());
        fs::DirBuilder::new().mode(0o700).create(&directory).map_err(|error| failed(&error))?;
        let opener = Opener { caller: &self.identity.caller, privileged: true, unique_id: self.host.unique_id, homes: &[] };
        let opened = std::os::unix::fs::lchown(&directory, Some(owner.0), Some(owner.1))
            .map_err(|error| failed(&error))
            .and_then(|()| scratch::open(&directory.to_string_lossy(), self.policy, &opener).map_err(|error| error.to_string()));
        let removed = fs::remove_dir(&directory).map_err(|error| failed(&error));
        let idmappable = opened?.facts.idmappable;
        removed.map(|()| idmappable)
    }

    fn registry(&self) -> Finding {
        match &self.registry {
            Ok(()) => fine("registry", "a place was claimed and given back"),
            Err(refusal) => {
                let needed = self.identity.privileged || !matches!(self.host.cgroup, CgroupFacts::Unavailable { .. });
                finding("registry", if needed { State::Missing } else { State::Absent }, split(&refusal.message))
            }
        }
    }

    fn terminals(&self) -> Finding {
        let what = "terminals of the sandbox's own, for `run` on a terminal";
        let found = self.of_probe("terminals", probe::terminals(self.ids), what);
        Finding { state: if found.state == State::Missing { State::Absent } else { found.state }, ..found }
    }

    /// Each interpreter is started, the default's by the run that decides.
    fn runtimes(&self) -> Vec<Finding> {
        let others_fault = !is_enforced(&self.run) && !is_interpreters_fault(&self.run);
        let of = |(name, runtime): (&String, &stockade_policy::model::Runtime)| {
            let feature = format!("runtime {name}");
            let is_default = stockade_policy::plan::find_runtime(self.policy, &self.policy.language).is_ok_and(|(default, _)| default == name);
            let program = interpreter_of(name, runtime, self.options);
            if others_fault {
                let there = program.is_file();
                let state = if there { State::Ok } else { absent_or_missing(is_default) };
                let detail = format!("{} is {}on this host; not started, as no sandbox is to be had", program.display(), if there { "" } else { "not " });
                return finding(&feature, state, (detail, (!there).then(|| install_hint(&program))));
            }
            let report;
            let run = if is_default {
                &self.run
            } else {
                report = self.start(name);
                &report
            };
            if run.started && run.success {
                return fine(&feature, format!("{} starts", program.display()));
            }
            if is_enforced(run) {
                return finding(&feature, State::Absent, (how_it_ended(&program, run), None));
            }
            let (detail, mut remedy) = split(&run.error.0);
            if run.reason.as_deref() == Some("interpreter_missing") && runtime.venv.is_none() {
                remedy = Some(install_hint(&program));
            }
            finding(&feature, absent_or_missing(is_default), (detail, remedy))
        };
        self.policy.runtimes.iter().map(of).collect()
    }

    fn start(&self, language: &str) -> Report {
        let request = serde_json::json!({ "code": "", "language": language });
        crate::exec(request.to_string().as_bytes(), self.options)
    }

    fn run(&self) -> Finding {
        if !is_enforced(&self.run) {
            return missing("run", split(&self.run.error.0));
        }
        let (mut read_back, mut probed) = (0, 0);
        for layer in self.run.receipt.iter().flat_map(|receipt| &receipt.layers) {
            read_back += usize::from(layer.known == Known::ReadBack);
            probed += usize::from(layer.known == Known::Probed);
        }
        fine("run", format!("an empty program ran behind every layer that the policy requires; {read_back} were read back, {probed} tried"))
    }
}

/// Who owns a scratch where root acts for itself.
const NOBODY: u32 = 65534;

/// The result speaks about the code, so the sandbox came to stand.
fn is_enforced(report: &Report) -> bool {
    !matches!(report.verdict, Verdict::SandboxError | Verdict::BadRequest)
}

fn is_interpreters_fault(report: &Report) -> bool {
    matches!(report.reason.as_deref(), Some("interpreter_missing" | "program_not_started"))
}

fn absent_or_missing(is_default: bool) -> State {
    if is_default { State::Missing } else { State::Absent }
}

fn denial_reports() -> Finding {
    let feature = "denial_reports";
    match probe::listener() {
        Ok(()) => fine(feature, "the filter's refusals can be listened to"),
        Err(failure) => {
            let why = if failure.errno() == Some(Errno::BUSY) { "another supervisor listens already" } else { "the filter gives no listener" };
            let remedy = "start stockade outside that supervisor; refusals hold all the same";
            finding(feature, if failure.errno() == Some(Errno::BUSY) { State::Degraded } else { State::Missing }, (format!("{why}: {failure}"), Some(remedy.to_owned())))
        }
    }
}

/// What hides parts of this process's /proc.
fn covered_in_proc() -> Vec<String> {
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    mounts.lines().filter_map(|line| line.split(' ').nth(4)).filter(|point| point.starts_with("/proc/") && *point != "/proc/sys/fs/binfmt_misc").map(String::from).collect()
}

fn current_lsm() -> String {
    let list = fs::read_to_string("/sys/kernel/security/lsm").unwrap_or_default();
    if list.trim().is_empty() { String::new() } else { format!(", such as lsm=landlock,{}", list.trim()) }
}

pub(crate) fn interpreter_of(name: &str, runtime: &stockade_policy::model::Runtime, options: &Options) -> PathBuf {
    let is_this = |asked: &str| asked.eq_ignore_ascii_case(name) || runtime.aliases.iter().any(|alias| alias.eq_ignore_ascii_case(asked));
    if let Some((_, path)) = options.interpreters.iter().find(|(asked, _)| is_this(asked)) {
        return path.clone();
    }
    let command = PathBuf::from(runtime.command.first().cloned().unwrap_or_default());
    match (&runtime.venv, command.file_name()) {
        (Some(venv), Some(file)) => venv.join("bin").join(file),
        _ => command,
    }
}

/// Why an interpreter that starts is of no use.
pub(crate) fn how_it_ended(program: &Path, report: &Report) -> String {
    let verdict = serde_json::to_value(report.verdict).ok();
    let verdict = verdict.as_ref().and_then(|verdict| verdict.as_str()).unwrap_or_default();
    let said = report.error.0.trim_end().lines().last().map(|line| format!(": {line}")).unwrap_or_default();
    format!("{} starts, but a short program ends as {verdict} with status {}{said}", program.display(), report.code)
}

/// How an interpreter gets onto this host.
pub(crate) fn install_hint(program: &Path) -> String {
    let name = program.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let package = match name.as_str() {
        "node" => "nodejs",
        "sh" => "dash",
        "awk" => "mawk",
        "java" => "default-jre-headless",
        "php" => "php-cli",
        "Rscript" => "r-base-core",
        other => other,
    };
    if Path::new("/usr/bin/apt-get").exists() {
        format!("sudo apt-get install {package}")
    } else {
        format!("install {package} with the system's package manager, or name another by --runtime NAME=PATH")
    }
}
