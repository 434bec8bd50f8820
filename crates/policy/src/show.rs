//! A resolved policy as TOML that loads again to the same policy.
//!
//! What it inherited is written out, and reasons are gone: it is for looking, comparing
//! and copying, not for keeping. Name, origin and hash are not part of it.

use std::{
    collections::BTreeMap,
    fmt::{self, Write},
    path::PathBuf,
};

use stockade_protocol::{LimitKey, Limits, Quantity};

use crate::{
    egress::Rule,
    inherit::{access_name, audit_mode, family_name},
    model::{Degradable, Policy},
    modules, names,
    visible::toml_text as text,
};

/// Writes a policy out in full.
pub fn show(policy: &Policy) -> String {
    let mut out = String::new();
    // Writing to a string cannot fail.
    match write(policy, &mut out) {
        Ok(()) | Err(fmt::Error) => out,
    }
}

fn list<T>(items: &[T], show: impl Fn(&T) -> String) -> String {
    let items: Vec<String> = items.iter().map(|item| text(&show(item))).collect();
    let short = items.join(", ");
    if short.len() <= 90 { format!("[{short}]") } else { format!("[\n    {},\n]", items.join(",\n    ")) }
}

fn paths(items: &[PathBuf]) -> String {
    list(items, |path| path.to_string_lossy().into_owned())
}

fn strings(items: &[String]) -> String {
    list(items, String::clone)
}

fn layers(items: &[Degradable]) -> String {
    list(items, |layer| layer.name().to_owned())
}

fn variables(out: &mut String, variables: &BTreeMap<String, String>) -> fmt::Result {
    variables.iter().try_for_each(|(name, value)| writeln!(out, "{name} = {}", text(value)))
}

fn limits(out: &mut String, limits: &Limits) -> fmt::Result {
    for (key, value) in limits.iter() {
        let written = key.format(value);
        let bare = value.is_some() && matches!(key.quantity(), Quantity::Count | Quantity::Cpus);
        writeln!(out, "{} = {}", key.name(), if bare { written } else { text(&written) })?;
    }
    Ok(())
}

fn write(policy: &Policy, out: &mut String) -> fmt::Result {
    writeln!(out, "schema = 1\ndescription = {}\nlanguage = {}", text(&policy.description), text(&policy.language))?;
    writeln!(out, "\n[filesystem]\nread_only = {}", paths(&policy.filesystem.read_only))?;
    writeln!(out, "read_only_optional = {}", paths(&policy.filesystem.read_only_optional))?;
    writeln!(out, "devices = {}", strings(&policy.filesystem.devices))?;
    let identity = &policy.identity;
    writeln!(out, "\n[identity]\nuser = {}\nuid = {}\ngid = {}", text(&identity.user), identity.uid, identity.gid)?;
    writeln!(out, "hostname = {}", text(&identity.hostname))?;
    writeln!(out, "\n[environment]\naccept = {}\n\n[environment.set]", strings(&policy.environment.accept))?;
    variables(out, &policy.environment.set)?;
    for (name, runtime) in &policy.runtimes {
        writeln!(out, "\n[runtimes.{}]\ncommand = {}", text(name), strings(&runtime.command))?;
        writeln!(out, "aliases = {}\nextension = {}", strings(&runtime.aliases), text(&runtime.extension))?;
        if let Some(venv) = &runtime.venv {
            writeln!(out, "venv = {}", text(&venv.to_string_lossy()))?;
        }
        writeln!(out, "\n[runtimes.{}.environment]", text(name))?;
        variables(out, &runtime.environment)?;
        let modules = &runtime.modules;
        if modules.default.is_some() || !modules.rules.is_empty() {
            writeln!(out, "\n[runtimes.{}.modules]", text(name))?;
            let default = modules.default.map(|action| (modules::DEFAULT, action));
            let rules = modules.rules.iter().map(|(name, action)| (name.as_str(), *action));
            default.into_iter().chain(rules).try_for_each(|(name, action)| writeln!(out, "{} = {}", text(name), text(action.name())))?;
        }
    }
    writeln!(out, "\n[limits]")?;
    limits(out, &policy.limits)?;
    writeln!(out, "\n[limits.max]")?;
    limits(out, &policy.limits_max)?;
    let seccomp = &policy.seccomp;
    writeln!(out, "\n[seccomp]\nallow = {}", strings(&seccomp.allow))?;
    writeln!(out, "kill = {}\nenosys = {}", strings(&seccomp.kill), strings(&seccomp.enosys))?;
    writeln!(out, "socket_families = {}", list(&seccomp.socket_families, |family| family_name(*family).to_owned()))?;
    let number = |number: &u32| names::ioctl_name(*number).map_or_else(|| format!("{number:#x}"), str::to_owned);
    writeln!(out, "ioctl = {}", list(&seccomp.ioctl, number))?;
    writeln!(out, "\n[egress]\nwhitelist = {}", list(policy.egress.whitelist.rules(), Rule::to_string))?;
    let scratch = &policy.scratch;
    writeln!(out, "\n[scratch]\naccess = {}", text(access_name(scratch.access)))?;
    writeln!(out, "create = {}\nhome = {}", scratch.create, scratch.home)?;
    writeln!(out, "read_only = {}\nhidden = {}", strings(&scratch.read_only), strings(&scratch.hidden))?;
    writeln!(out, "\n[degrade]\nrootless = {}", layers(&policy.degrade.rootless))?;
    writeln!(out, "root = {}", layers(&policy.degrade.root))?;
    let audit = &policy.audit;
    writeln!(out, "\n[audit]\nmode = {}", text(audit_mode(audit.mode)))?;
    writeln!(out, "preview = {}", text(&LimitKey::OutputSize.format(Some(audit.preview))))?;
    writeln!(out, "alerts = {}", list(&audit.alerts, ToString::to_string))?;
    let screen = &policy.screen;
    writeln!(out, "\n[screen]\nmodules = {}\nbuiltins = {}", strings(&screen.modules), strings(&screen.builtins))?;
    writeln!(out, "approval_time = {}", text(&LimitKey::Wall.format(Some(screen.approval_time))))?;
    writeln!(out, "approvers = {}", list(&screen.approvers, ToString::to_string))?;
    screen.actions.iter().try_for_each(|(rule, action)| writeln!(out, "{} = {}", rule.name(), text(action.name())))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]
    use super::*;
    use crate::{lookup::load_text, shipped::SHIPPED};

    #[test]
    fn what_is_shown_loads_again_to_the_same_policy() {
        for (name, _) in SHIPPED {
            let first = crate::load_shipped(name).unwrap();
            let mut second = load_text(&show(&first)).unwrap_or_else(|error| panic!("{name}: {error}"));
            second.name.clone_from(&first.name);
            second.origin = first.origin.clone();
            second.sha256.clone_from(&first.sha256);
            assert_eq!(first, second);
        }
    }
}
