//! The receipt: what was in force, as the kernel reports it.
//!
//! The launcher reads from outside what the kernel reports of the sandbox and compares it with
//! the plan; a mismatch is an error. What only the executor can try, it tries and judges itself
//! (`executor/src/evidence.rs`); the launcher keeps that evidence for the receipt. What the plan
//! should be is not decided here.

pub(crate) mod mounts;
mod status;

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use stockade_policy::plan::{ImageRoot, Plan, UserNamespaces};
use stockade_protocol::{Known, LayerReceipt, LimitKey, Receipt, ReceiptCost, StartKind, frame::Evidence};

use crate::{
    ErrorKind, LaunchError, PROGRAM,
    cgroup::Cgroup,
    error::ReceiptError,
    identity::OuterNamespaces,
    layers::{Layer, Layers},
    proc::ProcDirectory,
};

/// Namespaces that the child does not change any more after its last mount.
const MADE_FIRST: [&str; 5] = ["mnt", "pid", "net", "uts", "ipc"];
/// Namespaces that it makes later.
const USER: &str = "user";
const CGROUP: &str = "cgroup";

/// What the sandbox is compared with, gathered while the child sets itself up.
pub(crate) struct ExpectedSandbox {
    /// The launcher's own, by kind.
    namespaces: BTreeMap<&'static str, String>,
    mounts: mounts::ExpectedMounts,
    taken: Duration,
}

/// What was found after the last mount, before the child gives up its rights.
pub(crate) struct MountEvidence {
    /// Names of the namespaces that it does not change any more.
    namespaces: Vec<String>,
    mounts: u32,
    taken: Duration,
}

/// What was read from outside while the executor waited.
pub(crate) struct OutsideEvidence {
    namespaces: String,
    status: String,
    mounts: u32,
    taken: Duration,
}

impl OutsideEvidence {
    /// The signals that the executor ignores, as the launcher was started.
    pub(crate) fn ignored_signals(&self) -> u64 {
        status::ignored_signals(&self.status)
    }
}

impl ExpectedSandbox {
    /// For this plan.
    ///
    /// # Errors
    /// The launcher's own namespaces cannot be read.
    pub(crate) fn of(plan: &Plan) -> Result<Self, LaunchError> {
        let begun = Instant::now();
        let failed = LaunchError::system(ErrorKind::Receipt, "read the launcher's own namespaces");
        let own = ProcDirectory::open(std::process::id().cast_signed()).map_err(failed)?;
        let kinds = MADE_FIRST.into_iter().chain([USER, CGROUP]);
        let namespaces = kinds.map(|name| Ok((name, own.namespace(name)?))).collect::<Result<_, _>>().map_err(failed)?;
        Ok(ExpectedSandbox { namespaces, mounts: mounts::ExpectedMounts::of(plan), taken: begun.elapsed() })
    }

    /// Checks from outside that the sandbox has the plan's mounts, and that the namespaces which
    /// it will not change any more differ from the launcher's own. Valid only after the child has
    /// reported its last mount.
    ///
    /// # Errors
    /// It is not so.
    pub(crate) fn check_mounts(&self, outer: &OuterNamespaces) -> Result<MountEvidence, LaunchError> {
        let begun = Instant::now();
        let failed = LaunchError::system(ErrorKind::Receipt, "read the sandbox's mounts");
        let mounts = self.mounts.check(&outer.proc.open_to_read("mountinfo").map_err(failed)?)?;
        let namespaces = MADE_FIRST.iter().map(|name| self.check_namespace(name, outer)).collect::<Result<_, _>>()?;
        Ok(MountEvidence { namespaces, mounts, taken: begun.elapsed() })
    }

    /// Checks the rest: that the other namespaces differ too, the user namespace excepted where
    /// the plan goes without, that the sandbox is in its cgroup, and that nothing is left of its
    /// rights.
    ///
    /// # Errors
    /// It is not so; or without a user namespace its ids are not the plan's.
    pub(crate) fn check(
        &self,
        plan: &Plan,
        outer: &OuterNamespaces,
        cgroup: &Cgroup,
        mounts: Option<MountEvidence>,
    ) -> Result<OutsideEvidence, LaunchError> {
        let begun = Instant::now();
        let Some(MountEvidence { namespaces, mounts, taken }) = mounts else {
            return Err(ReceiptError::NoMounts.into());
        };
        let failed = |attempt| LaunchError::system(ErrorKind::Receipt, attempt);
        let status = outer.proc.read("status").map_err(failed("read the sandbox's status"))?;
        if outer.user.is_none() {
            status::check_ids(plan, &status)?;
        }
        status::check_confinement(&status)?;
        let membership = outer.proc.read("cgroup").map_err(failed("read the sandbox's cgroup"))?;
        if !cgroup.holds(&membership) {
            return Err(ReceiptError::Cgroup(membership).into());
        }
        // Last: reading these waits for the execve by which the child becomes the executor.
        let cgroups = self.check_namespace(CGROUP, outer)?;
        let user = self.check_user_namespace(outer)?;
        let namespaces: Vec<String> = user.into_iter().chain(namespaces).chain([cgroups]).collect();
        Ok(OutsideEvidence { namespaces: namespaces.join(" "), status, mounts, taken: self.taken + taken + begun.elapsed() })
    }

    /// The sandbox's namespace of this kind, and whether it is the launcher's.
    fn look_at_namespace(&self, name: &str, outer: &OuterNamespaces) -> Result<(String, bool), LaunchError> {
        let failed = LaunchError::system(ErrorKind::Receipt, "read the sandbox's namespaces");
        let theirs = outer.proc.namespace(name).map_err(failed)?;
        let shared = self.namespaces.get(name).is_none_or(|own| *own == theirs);
        Ok((theirs, shared))
    }

    fn check_namespace(&self, name: &'static str, outer: &OuterNamespaces) -> Result<String, LaunchError> {
        let left_out = match name {
            "pid" => Some(Layer::PidNamespace),
            "net" => Some(Layer::NetworkNamespace),
            "uts" => Some(Layer::UtsNamespace),
            "ipc" => Some(Layer::IpcNamespace),
            CGROUP => Some(Layer::CgroupNamespace),
            _ => None,
        };
        match self.look_at_namespace(name, outer)? {
            (_, true) if left_out.is_none_or(|layer| Layers::in_this_build().has(layer)) => Err(ReceiptError::SharedNamespace(name).into()),
            (theirs, _) => Ok(theirs),
        }
    }

    fn check_user_namespace(&self, outer: &OuterNamespaces) -> Result<Option<String>, LaunchError> {
        match (self.look_at_namespace(USER, outer)?, &outer.user) {
            ((_, true), None) => Ok(None),
            (_, None) => Err(ReceiptError::UserNamespace.into()),
            ((_, true), _) => Err(ReceiptError::SharedNamespace(USER).into()),
            ((theirs, _), Some(outer)) if theirs == *outer && Layers::in_this_build().has(Layer::InnerUserNamespace) => {
                Err(ReceiptError::OuterUserNamespace.into())
            }
            ((theirs, _), _) => Ok(Some(theirs)),
        }
    }
}

/// Puts the receipt together.
pub(crate) fn assemble(plan: &Plan, outside: &OutsideEvidence, cgroup: &Cgroup, evidence: &Evidence, listener: bool) -> Receipt {
    let status = outside.status.as_str();
    let mut layers = Vec::new();
    let mut layer = |layer, known, detail: String| layers.push(LayerReceipt { layer, known, detail });
    let (inside, outside_ids) = (plan.identity.inside, plan.identity.outside);
    match plan.identity.user_namespaces {
        UserNamespaces::Nested => layer(
            "user_namespace",
            Known::ReadBack,
            format!("two nested; inside {}:{} is host {}:{}", inside.0, inside.1, outside_ids.0, outside_ids.1),
        ),
        UserNamespaces::Missing => {
            layer("host_id", Known::ReadBack, format!("{}:{} inside and on the host, no supplementary groups", inside.0, inside.1));
        }
    }
    if !plan.identity.groups_kept.is_empty() {
        let groups: Vec<String> = plan.identity.groups_kept.iter().map(u32::to_string).collect();
        layer("supplementary_groups", Known::Applied, format!("an unprivileged launcher cannot drop host groups {}", groups.join(" ")));
    }
    layer("namespaces", Known::ReadBack, outside.namespaces.clone());
    layer(
        "mounts",
        Known::ReadBack,
        format!(
            "{} mounts, read-only but for {}{}",
            outside.mounts,
            plan.writable_mounts().iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(" "),
            if plan.session { ", which outlive the run" } else { "" }
        ),
    );
    layer(
        "capabilities",
        Known::ReadBack,
        format!(
            "effective {}, bounding {}, no_new_privs {}",
            status::line(status, "CapEff:"),
            status::line(status, "CapBnd:"),
            status::line(status, "NoNewPrivs:")
        ),
    );
    layer(
        "seccomp",
        Known::Probed,
        format!(
            "mode {}, {} filter(s), clone3 answered ENOSYS; sha256 {}{}{}",
            status::line(status, "Seccomp:"),
            status::line(status, "Seccomp_filters:"),
            plan.filter.sha256,
            if listener { "" } else { "; denials are not reported: another supervisor holds the listener" },
            match plan.callers_filters.len() {
                0 => String::new(),
                count => format!("; the program's process loads the caller's too, last ({count})"),
            }
        ),
    );
    if plan.landlock.handled != 0 {
        layer(
            "landlock",
            Known::Probed,
            format!(
                "ABI {}, {} rules, a fifo in /dev/shm answered EACCES{}",
                plan.landlock.abi,
                plan.landlock.rules.len(),
                if plan.landlock.scoped == 0 {
                    "; signals and abstract sockets are kept in by the PID and network namespaces (scopes need ABI 6)"
                } else {
                    ""
                }
            ),
        );
    }
    if plan.carried_program {
        layer(
            "image",
            Known::Applied,
            String::from("stockade's own program was run by descriptor; Landlock lets this one file be read and executed"),
        );
    }
    if let Some(image) = &plan.image_root {
        layer("root_image", Known::Applied, image_detail(image, plan));
    }
    let sockets: Vec<String> = plan.host_sockets().map(|path| path.display().to_string()).collect();
    if !sockets.is_empty() {
        layer("host_sockets", Known::Applied, format!("code may speak to the programs outside that listen at {}", sockets.join(" ")));
    }
    if !matches!(cgroup, Cgroup::Absent) {
        layer("cgroup", Known::ReadBack, cgroup.describe());
    }
    let rlimits: Vec<String> = plan
        .rlimits
        .iter()
        .map(|limit| format!("{}={}", limit.name, limit.value.map_or_else(|| String::from("unlimited"), |value| value.to_string())))
        .collect();
    layer("rlimits", Known::Applied, rlimits.join(" "));
    layer("descriptors", Known::ReadBack, format!("{} in the executor, none of them the caller's", evidence.descriptors));
    let egress = match &plan.egress {
        None => String::from("no egress"),
        Some(egress) => format!("egress by {} rules through the gate, a process of its own outside", egress.whitelist.rules().len()),
    };
    layer("network", Known::Applied, format!("a namespace of its own, in which only lo was made; {egress}"));
    if plan.scratch.host || !plan.writable_trees.is_empty() {
        let directories: Vec<String> = match plan.writable_trees.as_slice() {
            [] => vec![plan.scratch.path.display().to_string()],
            trees => trees.iter().map(|tree| format!("{} at {}", tree.source.display(), tree.target.display())).collect(),
        };
        layer(
            "scratch",
            Known::Applied,
            format!(
                "{}; blocks and files are counted about every {} ms, and what the file system has lost is looked at every {} ms or less: beyond scratch_size and a quarter more (4 to 64 MiB), or scratch_files and a sixteenth more (64 to 4096), they are counted at once; what is written until the kill comes on top, some 60 MiB as measured with two CPUs, more on a busy host",
                directories.join(", "),
                crate::scratch::INTERVAL_MS,
                crate::scratch::MAX_GLANCE_MS
            ),
        );
    }
    if matches!(cgroup, Cgroup::Absent) && plan.limits.get(LimitKey::Memory).is_some() {
        layer(
            "memory",
            Known::Applied,
            format!(
                "what all processes hold (private pages, shared maps, files in memory, page tables) is added up every {} ms or less; what is filled meanwhile may exceed memory, by some 200 MiB as measured with two busy CPUs, more with others beside",
                crate::supervise::MEMORY_INTERVAL_MS
            ),
        );
    }
    for (name, reason) in &plan.degraded {
        layer(name, Known::Degraded, reason.clone());
    }
    Receipt {
        mode: match plan.mode {
            stockade_policy::plan::Mode::Root => "root",
            stockade_policy::plan::Mode::Rootless => "rootless",
        },
        program: PROGRAM,
        kernel: rustix::system::uname().release().to_string_lossy().into_owned(),
        layers,
        degraded: plan.degraded.iter().map(|(name, _)| String::from(*name)).collect(),
        plan_sha256: String::new(),
        taken_us: ReceiptCost { inside: evidence.taken_us, outside: u64::try_from(outside.taken.as_micros()).unwrap_or(u64::MAX) },
        start: if evidence.prestarted { StartKind::Prestarted } else { StartKind::Fresh },
        start_cause: None,
        layout: None,
        image: plan.image_root.as_ref().map(|image| image.digest.clone()),
    }
}

/// What of an image was used, and what was not.
fn image_detail(image: &ImageRoot, plan: &Plan) -> String {
    let mut detail = image.title();
    detail.push_str(if plan.has_writable_root() { "; what code changes of it is gone with the run" } else { "; read-only" });
    if !image.user.is_empty() {
        detail.push_str(&format!("; its user {:?} is not used: code runs as {}", image.user, plan.identity.user));
    }
    if image.malformed_variables > 0 {
        detail.push_str(&format!("; {} of its variables have no usable name or a NUL byte, and are left out", image.malformed_variables));
    }
    detail
}
