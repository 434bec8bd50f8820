//! `--dry-run`: prints the plan as text or JSON. It runs nothing.

use std::fmt::Write;

use crate::ExitCode;

use stockade_engine::plan::{CgroupPlan, Mode, Plan, Protection, RootEntry, UserNamespaces};

use crate::output::{print_json, print_text};

pub(crate) fn print(plan: &Plan, json: bool) -> anyhow::Result<ExitCode> {
    if json {
        print_json(&plan)?;
    } else {
        print_text(&describe(plan)?)?;
    }
    Ok(ExitCode::SUCCESS)
}

fn describe(plan: &Plan) -> Result<String, std::fmt::Error> {
    let mut out = String::new();
    let identity = &plan.identity;
    let mode = if plan.mode == Mode::Root { "root" } else { "rootless" };
    writeln!(out, "plan of policy {} ({mode})", plan.policy)?;
    writeln!(out, "\nidentity")?;
    writeln!(
        out,
        "  inside {}:{} ({}), on the host {}:{}, host name {}",
        identity.inside.0, identity.inside.1, identity.user, identity.outside.0, identity.outside.1, identity.hostname
    )?;
    if let Some((uid, gid)) = identity.idmapped_to {
        writeln!(out, "  files in scratch belong to {uid}:{gid} (idmapped)")?;
    }
    if !identity.groups_kept.is_empty() {
        writeln!(out, "  host groups kept: {:?}", identity.groups_kept)?;
    }
    writeln!(out, "\nroot, in mount order")?;
    for entry in plan.root.iter() {
        writeln!(out, "  {}", describe_entry(entry))?;
    }
    let scratch = &plan.scratch;
    let kind = if scratch.host { "host directory" } else { "private tmpfs" };
    writeln!(out, "  scratch {} ({kind}, {})", scratch.path.display(), if scratch.read_only { "read-only" } else { "writable" })?;
    for (path, _, protection) in &scratch.protected {
        let how = match protection {
            Protection::Hidden => "hidden",
            Protection::ReadOnly => "read-only",
            Protection::Pinned => "cannot be renamed",
        };
        writeln!(out, "    {how} {}", path.display())?;
    }
    writeln!(out, "\nprogram\n  {}", plan.argv.join(" "))?;
    writeln!(out, "  variables: {}", plan.environment.join(" "))?;
    writeln!(out, "\nlimits")?;
    for (key, value) in plan.limits.iter() {
        writeln!(out, "  {:<14} {}", key.name(), key.format(value))?;
    }
    match &plan.cgroup {
        CgroupPlan::V1 { parents, settings } => {
            writeln!(
                out,
                "  cgroup v1 below {}",
                parents.values().map(|parent| parent.display().to_string()).collect::<Vec<_>>().join(", ")
            )?;
            settings.iter().try_for_each(|setting| writeln!(out, "    {} = {}", setting.file, setting.value))?;
        }
        CgroupPlan::V2 { parent, settings, .. } => {
            writeln!(out, "  cgroup v2 below {}", parent.display())?;
            settings.iter().try_for_each(|setting| writeln!(out, "    {} = {}", setting.file, setting.value))?;
        }
        CgroupPlan::Absent { reason } => writeln!(out, "  no cgroup: {reason}")?,
    }
    for limit in &plan.rlimits {
        writeln!(out, "  {} {}", limit.name, limit.value.map_or_else(|| String::from("unlimited"), |value| value.to_string()))?;
    }
    writeln!(out, "  visible CPUs: {}", plan.cpus)?;
    writeln!(out, "\nconfinement")?;
    let users = if identity.user_namespaces == UserNamespaces::Nested { "two user namespaces" } else { "no user namespace" };
    writeln!(out, "  {users}; mount, PID, network, UTS, IPC and cgroup namespaces; no capabilities; no_new_privs")?;
    writeln!(out, "  system call filter: {} instructions, sha256 {}", plan.filter.instructions, plan.filter.sha256)?;
    if plan.landlock.handled != 0 {
        writeln!(out, "  Landlock ABI {}, rules on:", plan.landlock.abi)?;
        plan.landlock.rules.iter().try_for_each(|rule| writeln!(out, "    {} {:#x}", rule.path.display(), rule.rights))?;
    }
    match &plan.egress {
        None => writeln!(out, "  network: loopback only")?,
        Some(egress) => {
            writeln!(out, "  network: loopback, and through the gate, names from {}:", egress.resolver)?;
            egress.whitelist.rules().iter().try_for_each(|rule| writeln!(out, "    {rule}"))?;
        }
    }
    for (layer, reason) in &plan.degraded {
        writeln!(out, "\ndegraded, without {layer}: {reason}")?;
    }
    Ok(out)
}

fn describe_entry(entry: &RootEntry) -> String {
    match entry {
        RootEntry::Directory { target, mode } => format!("directory /{} {mode:04o}", target.display()),
        RootEntry::Link { target, to } => format!("symlink   /{} -> {}", target.display(), to.display()),
        RootEntry::File { target, text, .. } if text.is_empty() => format!("file      /{} (mount point)", target.display()),
        RootEntry::File { target, .. } => format!("file      /{}", target.display()),
        RootEntry::Image { layers, writable } => {
            let layers: Vec<String> = layers.iter().rev().map(|layer| layer.display().to_string()).collect();
            format!("image     / {}, below the above: {}", if *writable { "writable" } else { "read-only" }, layers.join(" "))
        }
        RootEntry::Bind { source, executable, .. } => {
            format!("bind      {} read-only{}", source.display(), if *executable { "" } else { ", noexec" })
        }
        RootEntry::Placed { source, target, executable } => {
            format!("bind      {} at /{} read-only{}", source.display(), target.display(), if *executable { "" } else { ", noexec" })
        }
        RootEntry::Tree { target, .. } => format!("bind      /{} writable", target.display()),
        RootEntry::Socket { source, target, .. } => format!("socket    {} at /{}", source.display(), target.display()),
        RootEntry::Tmpfs { target, writable: true, .. } => format!("writable  /{}", target.display()),
        RootEntry::Tmpfs { target, .. } => format!("empty     /{}", target.display()),
        RootEntry::Overlay { layers, changes, target, executable } => {
            let layers: Vec<String> = layers.iter().rev().map(|layer| layer.display().to_string()).collect();
            let how = if changes.is_some() { "writable" } else { "read-only" };
            format!("overlay   {} at /{} {how}{}", layers.join(" over "), target.display(), if *executable { "" } else { ", noexec" })
        }
        RootEntry::Contents { target, .. } => format!("file      /{}", target.display()),
        RootEntry::Laid { target, .. } => format!("file      over /{}", target.display()),
        RootEntry::Device { source, .. } => format!("device    {}", source.display()),
        RootEntry::Writable { target } => format!("writable  /{}", target.display()),
        RootEntry::Proc { target } => format!("proc      /{} read-only", target.display()),
        RootEntry::Devpts { target } => format!("devpts    /{}", target.display()),
        RootEntry::Cover { target, .. } => format!("hook      /{}", target.display()),
        RootEntry::Pipe { target } => format!("pipe      /{}", target.display()),
        RootEntry::Mask { target } => format!("mask      /{}", target.display()),
    }
}
