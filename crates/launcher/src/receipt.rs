//! The receipt: what was in force, from the kernel's own words.
//!
//! The launcher reads from outside what only it can see; the executor's evidence comes
//! from inside. Both are compared with the plan: what does not match is an error.

use std::time::{Duration, Instant};

use stockade_policy::plan::{Plan, UserNamespaces};
use stockade_protocol::{Known, LayerReceipt, Receipt, ReceiptCost, frame::Evidence};

use crate::{
    LaunchError, What,
    cgroup::Cgroup,
    identity::OuterNamespaces,
    layers::{Layer, Layers},
    proc::ProcDirectory,
};

const NAMESPACES: [&str; 7] = ["user", "mnt", "pid", "net", "uts", "ipc", "cgroup"];

/// What only the launcher can see, read while the executor waits for it.
pub(crate) struct Outside {
    namespaces: String,
    taken: Duration,
}

/// Checks from outside that every namespace differs from the launcher's own, the user
/// namespace excepted where the plan goes without, and that the sandbox is in its cgroup.
///
/// # Errors
/// It shares one, or is not; or without a user namespace its ids are not the plan's.
pub(crate) fn check_outside(plan: &Plan, outer: &OuterNamespaces, cgroup: &Cgroup) -> Result<Outside, LaunchError> {
    let begun = Instant::now();
    let failed = |errno| LaunchError::system(What::Receipt, "read the sandbox's namespaces", errno);
    let own = ProcDirectory::open(std::process::id().cast_signed()).map_err(failed)?;
    let layers = Layers::of_environment();
    let mut seen = Vec::new();
    for name in NAMESPACES {
        let theirs = outer.proc.namespace(name).map_err(failed)?;
        let shared = theirs == own.namespace(name).map_err(failed)?;
        if name == "user" && outer.user.is_none() {
            if !shared {
                return Err(LaunchError::other(What::Receipt, String::from("the sandbox has a user namespace that the plan goes without")));
            }
            check_ids(plan, &outer.proc.read("status").map_err(failed)?)?;
            continue;
        }
        let left_out = match name {
            "pid" => Some(Layer::PidNamespace),
            "net" => Some(Layer::NetworkNamespace),
            "uts" => Some(Layer::UtsNamespace),
            "ipc" => Some(Layer::IpcNamespace),
            "cgroup" => Some(Layer::CgroupNamespace),
            _ => None,
        };
        if shared && left_out.is_none_or(|layer| layers.keep(layer)) {
            return Err(LaunchError::other(What::Receipt, format!("the sandbox shares the launcher's {name} namespace")));
        }
        if outer.user.as_ref() == Some(&theirs) && layers.keep(Layer::InnerUserNamespace) {
            return Err(LaunchError::other(What::Receipt, String::from("the sandbox is still in its outer user namespace")));
        }
        seen.push(theirs);
    }
    let membership = outer.proc.read("cgroup").map_err(failed)?;
    if !cgroup.holds(&membership) {
        return Err(LaunchError::other(
            What::Receipt,
            format!("the sandbox is not in its cgroup but in {}", membership.trim().replace('\n', " ")),
        ));
    }
    Ok(Outside { namespaces: seen.join(" "), taken: begun.elapsed() })
}

/// With no map between them and the host, the ids themselves are read back.
fn check_ids(plan: &Plan, status: &str) -> Result<(), LaunchError> {
    let (uid, gid) = plan.identity.outside;
    let four = |id: u32| [id.to_string(), id.to_string(), id.to_string(), id.to_string()].join("\t");
    for (key, expected) in [("Uid:", four(uid)), ("Gid:", four(gid)), ("Groups:", String::new())] {
        let found = status_line(status, key);
        if found != expected {
            return Err(LaunchError::other(What::Receipt, format!("the sandbox has {key} {found}, not {expected}")));
        }
    }
    Ok(())
}

fn status_line<'a>(status: &'a str, key: &str) -> &'a str {
    status.lines().find_map(|line| line.strip_prefix(key)).unwrap_or_default().trim()
}

/// Puts the receipt together.
pub(crate) fn assemble(plan: &Plan, outside: &Outside, cgroup: &Cgroup, evidence: &Evidence, listener: bool) -> Receipt {
    let status = String::from_utf8_lossy(&evidence.status);
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
            evidence.mounts,
            plan.writable_mounts().iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(" "),
            if plan.session { ", which the session keeps" } else { "" }
        ),
    );
    layer(
        "capabilities",
        Known::ReadBack,
        format!(
            "effective {}, bounding {}, no_new_privs {}",
            status_line(&status, "CapEff:"),
            status_line(&status, "CapBnd:"),
            status_line(&status, "NoNewPrivs:")
        ),
    );
    layer(
        "seccomp",
        Known::Probed,
        format!(
            "mode {}, {} filter(s), clone3 answered ENOSYS; sha256 {}{}",
            status_line(&status, "Seccomp:"),
            status_line(&status, "Seccomp_filters:"),
            plan.filter.sha256,
            if listener { "" } else { "; denials are not reported: another supervisor holds the listener" }
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
    if plan.image {
        layer(
            "image",
            Known::Applied,
            String::from("stockade's own program was run by descriptor; Landlock lets this one file be read and executed"),
        );
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
    if plan.scratch.host {
        layer(
            "scratch",
            Known::Applied,
            format!(
                "{}; blocks are counted about every {} ms, so up to one interval's writes may exceed scratch_size",
                plan.scratch.path.display(),
                crate::scratch::INTERVAL_MS
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
        kernel: rustix::system::uname().release().to_string_lossy().into_owned(),
        layers,
        degraded: plan.degraded.iter().map(|(name, _)| String::from(*name)).collect(),
        plan_sha256: String::new(),
        taken_us: ReceiptCost { inside: evidence.taken_us, outside: u64::try_from(outside.taken.as_micros()).unwrap_or(u64::MAX) },
    }
}
