//! Whether a policy can be enforced on this host, by doing it.
//!
//! One real run, started as `exec` starts one, decides, so that doctor and exec cannot
//! disagree; probes of single features, each in a separate process, then explain what is
//! missing and how to fix it. Nothing is changed on the host, and nothing is left
//! behind. What is printed is not worded here beyond findings and remedies.

mod features;
mod probe;

use std::{
    fs,
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
};

use serde::Serialize;
use stockade_audit::AnchorSink;
use stockade_launcher::scratch::{self, Opener, ShownFiles, path::ScratchPath};
use stockade_policy::{
    Grants,
    facts::{CgroupFacts, HostFacts},
    grants,
    model::{AuditMode, Degradable, Policy},
    plan::{UserNamespaces, how_made, is_in_image},
};
use stockade_protocol::{
    Known, Receipt, Report, Verdict,
    screen::{Action, Grammar, Rule},
};

use probe::{Ids, Probe};
use stockade_engine::{
    LoadedPolicy, Options, Refusal,
    admit::{ImageStatus, look_at_images, program_of},
    audit,
    caller::{self, Identity},
    exec, facts, load_policy, lookup_context, run_captured,
    screen::ScreeningJob,
    template,
};

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
    /// How to fix it.
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
    let identity = caller::identify(None).map_err(|refusal| missing("caller", split(&refusal.message)));
    match (loaded, identity) {
        (Ok(loaded), Ok(identity)) => match Examiner::new(options, &loaded, &identity) {
            Ok(examiner) => examiner.examine(&mut examination),
            Err(refusal) => examination.findings.push(missing("host", split(&refusal.message))),
        },
        (loaded, identity) => examination.findings.extend(loaded.err().into_iter().chain(identity.err())),
    }
    examination
}

/// Detail and remedy.
type Words = (String, Option<String>);

/// A message of the form `what: why; remedy`.
fn split(message: &str) -> Words {
    match message.split_once("; ") {
        Some((what, remedy)) => (what.to_owned(), Some(remedy.strip_prefix("or ").unwrap_or(remedy).to_owned())),
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
    loaded: &'a LoadedPolicy,
    policy: &'a Policy,
    identity: &'a Identity,
    /// The run that decides.
    run: Report,
    host: HostFacts,
    registry: Result<(), Refusal>,
    ids: Ids,
    /// Whether a child can be made at all, and a user namespace: most else needs them.
    child: Probe,
    user_namespace: Probe,
}

impl<'a> Examiner<'a> {
    fn new(options: &'a Options, loaded: &'a LoadedPolicy, identity: &'a Identity) -> Result<Self, Refusal> {
        let policy = &loaded.policy;
        // First, before anything that could stand in its way; an empty program ends at once.
        let run = start(&policy.language, policy, options);
        // Held while the probes use the run's host id, so that no other run gets it.
        let record = facts::registry(identity).and_then(|registry| Ok(registry.claim()?));
        let host = facts::read(identity, facts::unique_id(identity, record.as_ref().ok())?, facts::cgroup_facts()?)?;
        let caller = (identity.caller.uid, identity.caller.gid);
        let outside = host.unique_id.map_or(caller, |id| (id, id));
        let inside = (policy.identity.uid, policy.identity.gid);
        let mut ids = Ids { user_namespaces: UserNamespaces::Nested, inside, outside, privileged: identity.privileged };
        let child = probe::child();
        let user_namespace = child.and_then(|()| probe::user_namespace(ids));
        if user_namespace.is_err()
            && policy.degrade.root.contains(&Degradable::UserNamespace)
            && identity.privileged
            && host.unique_id.is_some()
            && stockade_launcher::user_namespace_refusal().is_some()
        {
            // The rest is tried as a run would have it.
            ids = Ids { user_namespaces: UserNamespaces::Missing, inside: outside, ..ids };
        }
        Ok(Examiner { options, loaded, policy, identity, run, host, registry: record.map(drop), ids, child, user_namespace })
    }

    fn examine(&self, examination: &mut Examination) {
        examination.mode = Some(if self.identity.privileged { "root" } else { "rootless" });
        examination.uid = self.identity.caller.uid;
        examination.enforceable = is_enforced(&self.run);
        examination.degraded = self.run.receipt.as_ref().map(|receipt| receipt.degraded.clone()).unwrap_or_default();
        let found = &mut examination.findings;
        found.extend(self.features());
        found.push(self.paths());
        found.push(self.cgroup());
        found.push(self.swap());
        found.push(self.identity());
        found.push(self.scratch());
        found.extend(self.granted_scratch());
        found.push(self.registry());
        found.push(self.audit());
        found.extend(self.runtimes());
        found.push(self.images());
        let screener = screener(self.policy, self.identity.privileged);
        examination.enforceable &= screener.state != State::Missing;
        found.push(screener);
        if examination.enforceable {
            found.extend(self.templates());
            // The run has shown that it can do without, or that the probe was at fault.
            for finding in found.iter_mut().filter(|finding| finding.state == State::Missing) {
                finding.state = State::Degraded;
                finding.detail.push_str(" (yet the run below succeeded)");
            }
        }
        found.push(self.run());
    }

    /// Makes and tries each template, as a session does. Without one its programs have other starts.
    fn templates(&self) -> Vec<Finding> {
        let mut all = Vec::new();
        for runtime in self.policy.runtimes.keys() {
            let Some((name, _)) = self.policy.template_of(runtime) else { continue };
            let made = template::make_once(runtime, self.loaded, self.options);
            all.push(match made {
                Ok(size) => fine("template", format!("{name}: copies of {runtime} run, from an image of {} MiB", size.div_ceil(1 << 20))),
                Err(why) => finding("template", State::Absent, (format!("{name}: {runtime} starts without it: {why}"), None)),
            });
        }
        all
    }

    fn may_degrade(&self, layer: Degradable) -> bool {
        let list = if self.identity.privileged { &self.policy.degrade.root } else { &self.policy.degrade.rootless };
        list.contains(&layer)
    }

    fn lost(&self, layer: Degradable) -> State {
        if self.may_degrade(layer) { State::Degraded } else { State::Missing }
    }

    /// Which images runs may have, and which languages each can start.
    fn images(&self) -> Finding {
        const MAX_LISTED: usize = 8;
        let filesystem = &self.policy.filesystem;
        let state = if filesystem.root.image.is_some() { State::Missing } else { State::Absent };
        if filesystem.images.is_empty() && filesystem.root.image.is_none() {
            let remedy = "name some by `images` under [filesystem]";
            return finding("images", State::Absent, (String::from("the policy lets no run have one"), Some(remedy.to_owned())));
        }
        let overlay = self.inside("images", "overlay with `userxattr`", || probe::overlay(self.ids));
        if overlay.state != State::Ok {
            let remedy = "runs need it that have an image as their root: load the module `overlay`, of Linux 5.11 or later";
            return finding("images", state, (overlay.detail, Some(remedy.to_owned())));
        }
        let (store, images) = match look_at_images(self.policy, self.identity) {
            Ok(found) => found,
            Err(error) => return finding("images", state, split(&error.to_string())),
        };
        if let Some(refusal) = self.writable_root_refusal(&store) {
            let (why, remedy) = split(&refusal);
            return finding("images", state, (format!("writable_root: {} cannot be idmapped: {why}", store.display()), remedy));
        }
        if images.is_empty() {
            let remedy = "`stockade image import FILE` adds one";
            return finding("images", state, (format!("none that the policy allows in {}", store.display()), Some(remedy.to_owned())));
        }
        let words = |image: &ImageStatus| {
            let missing: Vec<&str> =
                self.policy.runtimes.keys().filter(|name| !image.programs.contains_key(*name)).map(String::as_str).collect();
            let has: Vec<&str> = image.programs.keys().map(String::as_str).collect();
            let languages = match (has.as_slice(), missing.as_slice()) {
                ([], _) => String::from("none of the policy's languages"),
                (has, []) => has.join(", "),
                (has, missing) => format!("{}, without {}", has.join(", "), missing.join(", ")),
            };
            format!("{} ({})", image.title, image.problem.as_ref().unwrap_or(&languages))
        };
        let mut listed: Vec<String> = images.iter().take(MAX_LISTED).map(words).collect();
        listed.extend(images.len().checked_sub(MAX_LISTED + 1).map(|more| format!("{} more", more + 1)));
        fine("images", format!("{} in {}: {}", images.len(), store.display(), listed.join("; ")))
    }

    /// Why root's launcher could let no code change an image of this store.
    fn writable_root_refusal(&self, store: &Path) -> Option<String> {
        if !(self.identity.privileged && self.policy.filesystem.writable_root) {
            return None;
        }
        scratch::idmap_refusal(store, facts::FIRST_UNIQUE_ID).unwrap_or_else(|error| Some(error.to_string()))
    }

    fn paths(&self) -> Finding {
        let filesystem = &self.policy.filesystem;
        let is_shown = |path: &&PathBuf| filesystem.root.image.is_none() || !is_in_image(path);
        let gone = |paths: &[PathBuf]| {
            paths
                .iter()
                .filter(is_shown)
                .filter(|path| fs::metadata(path).is_err())
                .map(|path| path.display().to_string())
                .collect::<Vec<_>>()
        };
        let required = gone(&filesystem.read_only);
        if !required.is_empty() {
            let remedy = "remove it from `read_only` under [filesystem], or move it to `read_only_optional`";
            return missing("paths", (format!("not on this host: {}", required.join(" ")), Some(remedy.to_owned())));
        }
        let optional = gone(&filesystem.read_only_optional);
        let all = filesystem.read_only.iter().chain(&filesystem.read_only_optional).filter(is_shown).count() - optional.len();
        let without = if optional.is_empty() { String::new() } else { format!("; left out, as the policy allows: {}", optional.join(" ")) };
        fine("paths", format!("{all} paths of the host are shown read-only{without}"))
    }

    fn cgroup(&self) -> Finding {
        if let CgroupFacts::Unavailable { reason } = &self.host.cgroup {
            return finding("cgroup", self.lost(Degradable::Cgroup), split(reason));
        }
        if self.run.reason.as_deref() == Some("cgroup_failed") {
            return missing("cgroup", split(&self.run.error.0));
        }
        let read_back = |receipt: &Receipt| {
            receipt.layers.iter().find(|layer| layer.layer == "cgroup" && layer.known == Known::ReadBack).map(|layer| layer.detail.clone())
        };
        if let Some(detail) = self.run.receipt.as_ref().and_then(read_back) {
            return fine("cgroup", detail);
        }
        match self.try_without_other_layers() {
            Ok(Some(receipt)) => read_back(&receipt)
                .map_or_else(|| missing("cgroup", (String::from("a run had none"), None)), |detail| fine("cgroup", detail)),
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
        let mut all = vec![Degradable::Cgroup, Degradable::Landlock, Degradable::UniqueUid];
        let mut policy = self.policy.clone();
        policy.degrade.rootless.clone_from(&all);
        all.push(Degradable::UserNamespace);
        policy.degrade.root = all;
        policy.filesystem.read_only.retain(|path| fs::metadata(path).is_ok());
        // No caller's command.
        policy.audit.mode = AuditMode::Off;
        Ok(run_captured(&["/usr/bin/true"], &LoadedPolicy { policy, filters: self.loaded.filters.clone() }, self.options)?.receipt)
    }

    fn swap(&self) -> Finding {
        if !self.host.swap {
            return fine("swap", "switched off, so no memory limit can leak into it");
        }
        if matches!(self.host.cgroup, CgroupFacts::Unavailable { .. }) {
            let remedy = "as for cgroup; or switch swap off: sudo swapoff --all";
            return finding(
                "swap",
                self.lost(Degradable::Cgroup),
                (String::from("switched on, and without a cgroup nothing keeps a run out of it"), Some(remedy.to_owned())),
            );
        }
        if self.run.reason.as_deref() == Some("cgroup_failed")
            && (self.run.error.0.contains("memsw") || self.run.error.0.contains("memory.swap.max"))
        {
            return missing(
                "swap",
                (
                    self.run.error.0.clone(),
                    Some(String::from(
                        "swap is not accounted: add swapaccount=1 to the kernel's command line, or switch swap off: sudo swapoff --all",
                    )),
                ),
            );
        }
        fine("swap", "switched on; the cgroup keeps runs out of it")
    }

    fn identity(&self) -> Finding {
        let caller = &self.identity.caller;
        if !self.identity.privileged {
            let groups: Vec<String> = caller.groups.iter().filter(|group| **group != caller.gid).map(u32::to_string).collect();
            let kept = if groups.is_empty() {
                String::new()
            } else {
                format!("; its groups stay, as only root can drop them: {}", groups.join(" "))
            };
            return fine("host_id", format!("runs are uid {} on the host, the caller's own{kept}", caller.uid));
        }
        match (self.host.unique_id, &self.host.unique_id_refusal) {
            (Some(id), _) => fine("host_id", format!("each run has a host uid of its own, such as {id}")),
            (None, Some(refusal)) => {
                let (detail, remedy) = split(refusal);
                let elsewhere = "start stockade outside that container, or in it as an ordinary user";
                finding("host_id", self.lost(Degradable::UniqueUid), (detail, remedy.or_else(|| Some(elsewhere.to_owned()))))
            }
            (None, None) => finding(
                "host_id",
                self.lost(Degradable::UniqueUid),
                (String::from("none could be set aside"), Some(String::from("see `registry`"))),
            ),
        }
    }

    /// Whether files in a host scratch can belong to the caller although the code runs as
    /// another: tried in /tmp and /var/tmp, since no scratch was named.
    fn scratch(&self) -> Finding {
        let named = self.options.scratch.as_ref();
        match named {
            Some(path) if is_enforced(&self.run) => return fine("scratch", format!("the run used {}", path.display())),
            Some(_) if is_of_scratch(&self.run) => return missing("scratch", split(&self.run.error.0)),
            _ => {}
        }
        if !self.identity.privileged {
            return fine("scratch", "any directory of the caller's; its files stay the caller's");
        }
        let owner = if self.identity.caller.uid == 0 { (NOBODY, NOBODY) } else { (self.identity.caller.uid, self.identity.caller.gid) };
        let (mut able, mut unable, mut remedy) = (Vec::new(), Vec::new(), None);
        for place in ["/tmp", "/var/tmp"] {
            match self.try_idmap(Path::new(place), owner) {
                Ok(None) => able.push(place),
                Ok(Some(refusal)) => {
                    let (why, how) = split(&refusal);
                    unable.push(format!("{place} cannot be idmapped: {why}"));
                    remedy = how;
                }
                Err(why) => unable.push(why),
            }
        }
        match (able.as_slice(), unable.is_empty()) {
            (able, true) => fine("scratch", format!("idmapped scratch works in {}", able.join(" and "))),
            ([], false) => finding(
                "scratch",
                if self.may_degrade(Degradable::UniqueUid) { State::Degraded } else { State::Absent },
                (unable.join(", "), remedy),
            ),
            (able, false) => fine("scratch", format!("idmapped scratch works in {}; {}", able.join(" and "), unable.join(", "))),
        }
    }

    /// The directories that users were granted. A caller of sudo is not told of other users' grants.
    fn granted_scratch(&self) -> Option<Finding> {
        if !self.identity.privileged || self.identity.on_behalf {
            return None;
        }
        // What is wrong with the file itself, a run of a granted user says, and `grants check`.
        let grants = Grants::load(Path::new(grants::PATH)).ok()??;
        let all = grants.grants.iter().map(|grant| grant.scratch.len()).sum::<usize>();
        let unusable: Vec<String> = unusable_scratch(&grants).into_iter().map(|(line, why)| format!("line {line}: {why}")).collect();
        match (all, unusable.as_slice()) {
            (0, _) => None,
            (_, []) => Some(fine("grants", format!("each granted scratch can be used ({all})"))),
            (_, unusable) => {
                let remedy = Some(format!("make the directories, or name others in {}", grants::PATH));
                Some(finding("grants", State::Degraded, (format!("{}: {}", grants::PATH, unusable.join(", ")), remedy)))
            }
        }
    }

    /// Idmaps a directory of its own there. Says why the kernel refuses it.
    fn try_idmap(&self, place: &Path, owner: (u32, u32)) -> Result<Option<String>, String> {
        let directory = place.join(format!("stockade-doctor-{}", std::process::id()));
        let failed = |error: &dyn std::fmt::Display| format!("{}: {error}", directory.display());
        if self.host.unique_id.is_none() {
            return Ok(Some(String::from("there is no host uid to map its owner's files to")));
        }
        fs::DirBuilder::new().mode(0o700).create(&directory).map_err(|error| failed(&error))?;
        let opener = Opener {
            caller: &self.identity.caller,
            privileged: true,
            unique_id: self.host.unique_id,
            homes: &[],
            registry: None,
            ceiling: None,
            roots: &[],
            shown: &ShownFiles::new(),
        };
        let opened = std::os::unix::fs::lchown(&directory, Some(owner.0), Some(owner.1)).map_err(|error| failed(&error)).and_then(|()| {
            let found = ScratchPath::find(&directory.to_string_lossy(), self.policy, &opener);
            found.and_then(|place| place.open(self.policy, &opener)).map_err(|error| error.to_string())
        });
        let removed = fs::remove_dir(&directory).map_err(|error| failed(&error));
        let idmap_refusal = opened?.facts.idmap_refusal;
        removed.map(|()| idmap_refusal)
    }

    /// As the run above was written down, and who keeps its anchors.
    fn audit(&self) -> Finding {
        let mode = self.policy.audit.mode;
        let Some(audit) = self.run.audit.as_ref().filter(|_| mode != AuditMode::Off) else {
            return finding("audit", State::Absent, (String::from("the policy wants no audit log"), None));
        };
        if let Some(failure) = &audit.failure {
            let state = if mode == AuditMode::Required { State::Missing } else { State::Degraded };
            return finding("audit", state, split(failure));
        }
        let log = audit::directory(self.identity).unwrap_or_default();
        let log = log.display();
        match audit::carrier() {
            Some(AnchorSink::Journal) => fine("audit", format!("{log}, anchors in the journal")),
            Some(AnchorSink::Syslog) => fine("audit", format!("{log}, anchors in syslog, where any user can forge one")),
            None => {
                let why = format!("{log}; no journald or syslog: truncation of the log's end cannot be detected");
                finding("audit", State::Absent, (why, Some(String::from("run journald or a syslog daemon"))))
            }
        }
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

    /// Each interpreter is started, the default's by the run that decides.
    fn runtimes(&self) -> Vec<Finding> {
        let others_fault = !is_enforced(&self.run) && !is_interpreters_fault(&self.run);
        let of = |(name, runtime): (&String, &stockade_policy::model::Runtime)| {
            let feature = format!("runtime {name}");
            let is_default =
                stockade_policy::plan::find_runtime(self.policy, &self.policy.language).is_ok_and(|(default, _)| default == name);
            let of_image = program_of(runtime, self.policy, self.options).ok().flatten();
            let is_of_host = self.policy.filesystem.root.image.is_none();
            let program = of_image.unwrap_or_else(|| interpreter_of(name, runtime, self.options));
            if others_fault && is_of_host {
                let there = program.is_file();
                let state = if there { State::Ok } else { absent_or_missing(is_default) };
                let detail = format!("{} is {}on this host; not tested (no sandbox)", program.display(), if there { "" } else { "not " });
                return finding(&feature, state, (detail, (!there).then(|| install_hint(&program))));
            }
            let report;
            let run = if is_default {
                &self.run
            } else {
                report = start(name, self.policy, self.options);
                &report
            };
            if run.started && run.success || compiler_starts(run) {
                return fine(&feature, format!("{} starts", program.display()));
            }
            if is_enforced(run) {
                return finding(&feature, State::Absent, (how_it_ended(&program, run), None));
            }
            let (detail, mut remedy) = split(&run.error.0);
            if run.reason.as_deref() == Some("interpreter_missing") && runtime.venv.is_none() && is_of_host {
                remedy = Some(install_hint(&program));
            }
            finding(&feature, absent_or_missing(is_default), (detail, remedy))
        };
        self.policy.runtimes.iter().map(of).collect()
    }

    fn run(&self) -> Finding {
        if !is_enforced(&self.run) {
            let (detail, remedy) = split(&self.run.error.0);
            let elsewhere =
                "fix the lines marked `missing`; if there is none, an outer filter, a limit or a security module prevents this step";
            return missing("run", (detail, remedy.or_else(|| Some(elsewhere.to_owned()))));
        }
        let (mut read_back, mut probed) = (0, 0);
        for layer in self.run.receipt.iter().flat_map(|receipt| &receipt.layers) {
            read_back += usize::from(layer.known == Known::ReadBack);
            probed += usize::from(layer.known == Known::Probed);
        }
        fine("run", format!("an empty program ran behind every layer that the policy requires; {read_back} were read back, {probed} tried"))
    }
}

/// The granted directories of scratch that no run can use, each with the line of its grant: such as
/// are missing and made by no policy of the grant, or lie in a file system that cannot be idmapped
/// while a policy requires that. Root alone can try it; nothing is changed on the host.
pub fn unusable_scratch(grants: &Grants) -> Vec<(usize, String)> {
    let mut unusable = Vec::new();
    for grant in &grants.grants {
        let policies = || grant.policies.iter().filter_map(|name| stockade_policy::load(name, &lookup_context()).ok());
        for path in &grant.scratch {
            let is_made = || path.parent().is_some_and(Path::is_dir) && policies().any(|policy| policy.scratch.create);
            // The kernel refuses all ids for a file system, or none.
            let why = match scratch::idmap_refusal(path, facts::FIRST_UNIQUE_ID) {
                Ok(None) => continue,
                Ok(Some(_)) if policies().any(|policy| policy.degrade.root.contains(&Degradable::UniqueUid)) => continue,
                Ok(Some(refusal)) => format!("scratch {} cannot be idmapped: {refusal}", path.display()),
                Err(error) if matches!(error.problem.reason(), "scratch_missing") && is_made() => continue,
                Err(error) => error.to_string(),
            };
            unusable.push((grant.line, why));
        }
    }
    unusable
}

/// Who owns a scratch where root acts for itself.
const NOBODY: u32 = 65534;

/// Whether a run was refused for its scratch.
fn is_of_scratch(report: &Report) -> bool {
    report.reason.as_deref().is_some_and(|reason| reason.starts_with("scratch_") || reason == "unique_uid_unavailable")
}

/// The result is about the code, so there was a sandbox.
/// A program is screened, since none is in the run that decides.
fn screener(policy: &Policy, privileged: bool) -> Finding {
    let screen = &policy.screen;
    if screen.severest() == Action::Allow {
        return finding("screener", State::Absent, (String::from("the policy has no code screened"), None));
    }
    let screening = ScreeningJob::of_text("pass", Grammar::Python, screen, privileged).finish();
    match screening.findings.iter().find(|finding| finding.rule == Rule::Screener) {
        None => fine("screener", "a program was read by stockade-screen"),
        Some(found) => {
            let stops = matches!(found.action, Action::Approve | Action::Deny);
            let (detail, remedy) = split(&found.what);
            let remedy =
                remedy.unwrap_or_else(|| String::from("install stockade-screen beside this program, as scripts/build and the package do"));
            finding("screener", if stops { State::Missing } else { State::Degraded }, (detail, Some(remedy)))
        }
    }
}

/// What a policy lacks here, of a run that decides as it does in [`examine`], without the probes that
/// explain it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Shortfall {
    /// Why no run of it can be started; None: it can be enforced.
    pub prevents: Option<String>,
    /// What its runs go without, as it permits.
    pub without: Vec<String>,
}

/// Runs an empty program as these options say, and screens one where the policy asks for that.
pub fn shortfall(options: &Options) -> Shortfall {
    let loaded = match load_policy(options) {
        Ok(loaded) => loaded,
        Err(refusal) => return Shortfall { prevents: Some(refusal.message), ..Shortfall::default() },
    };
    let run = start(&loaded.policy.language, &loaded.policy, options);
    if !is_enforced(&run) {
        return Shortfall { prevents: Some(run.error.0), ..Shortfall::default() };
    }
    let layers = run.receipt.iter().flat_map(|receipt| &receipt.layers);
    let missing = layers.filter(|layer| layer.known == Known::Degraded).map(|layer| format!("{}: {}", layer.layer, layer.detail));
    let mut shortfall = Shortfall { prevents: None, without: missing.collect() };
    if let Some(failure) = run.audit.and_then(|audit| audit.failure) {
        shortfall.without.push(format!("audit log: {failure}"));
    }
    // The run has read it too.
    let screened = caller::identify(None).ok().map(|identity| screener(&loaded.policy, identity.privileged));
    if let Some(found) = screened.filter(|found| matches!(found.state, State::Missing | State::Degraded)) {
        let what = format!("{}; {}", found.detail, found.remedy.unwrap_or_default());
        match found.state {
            State::Missing => shortfall.prevents = Some(what),
            _ => shortfall.without.push(format!("screener: {what}")),
        }
    }
    shortfall
}

/// Runs a program that does nothing. A module of WebAssembly is not empty even then.
fn start(language: &str, policy: &Policy, options: &Options) -> Report {
    let interpreter = stockade_policy::plan::find_runtime(policy, language).map(|(_, runtime)| runtime.interpreter());
    let code = if interpreter.is_ok_and(|program| program.ends_with("wasmtime")) { "(module)" } else { "" };
    // Where descriptors are few, a caller's run must not find one fewer than this.
    let _one_more = fs::File::open("/dev/null");
    exec(serde_json::json!({ "code": code, "language": language }).to_string().as_bytes(), options)
}

fn is_enforced(report: &Report) -> bool {
    !matches!(report.verdict, Verdict::SandboxError | Verdict::BadRequest)
}

fn is_interpreters_fault(report: &Report) -> bool {
    report.verdict == Verdict::SandboxError && matches!(report.reason.as_deref(), Some("interpreter_missing" | "program_not_started"))
}

fn absent_or_missing(is_default: bool) -> State {
    if is_default { State::Missing } else { State::Absent }
}

pub(crate) fn interpreter_of(name: &str, runtime: &stockade_policy::model::Runtime, options: &Options) -> PathBuf {
    let is_this = |asked: &str| asked.eq_ignore_ascii_case(name) || runtime.aliases.iter().any(|alias| alias.eq_ignore_ascii_case(asked));
    if let Some((_, path)) = options.interpreters.iter().find(|(asked, _)| is_this(asked)) {
        return path.clone();
    }
    runtime.interpreter()
}

/// Whether a compiler has refused the program: in many languages an empty one is none.
pub(crate) fn compiler_starts(report: &Report) -> bool {
    !report.started && report.compile.as_ref().is_some_and(|compile| compile.verdict == Verdict::Exited)
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
    if let Some(command) = how_made(program) {
        return format!("make it by {command}");
    }
    if !program.starts_with("/usr") {
        // No package puts anything there.
        return String::from("make it, or name another by --runtime NAME=PATH");
    }
    if Path::new("/usr/bin/apt-get").exists() {
        format!("sudo apt-get install {package}")
    } else {
        format!("install {package} with the system's package manager, or name another by --runtime NAME=PATH")
    }
}
