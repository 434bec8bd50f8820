//! Values and short lists: limits, variables, runtimes, degradable layers, screening, audit;
//! and changes that are neither more nor less.
//!
//! It does not judge what another command of a runtime can do: that counts as undecided.

use std::collections::BTreeSet;

use stockade_policy::model::{Audit, AuditMode, Degradable, Modules, Policy, Runtime, Screen, SharedBy, Template};
use stockade_protocol::{
    LimitKey, Limits,
    screen::{Action, Rule},
};

use super::{
    Area, Difference,
    calls::{SyscallOutcome, named, outcome},
};

pub(super) fn loosened(ceiling: &Policy, policy: &Policy, out: &mut Vec<Difference>) {
    limits(Area::Limits, &ceiling.limits, &policy.limits, out);
    limits(Area::RequestMaximums, &ceiling.limits_max, &policy.limits_max, out);
    variables(&ceiling.environment.accept, &policy.environment.accept, out);
    runtimes(ceiling, policy, out);
    layers("rootless", &ceiling.degrade.rootless, &policy.degrade.rootless, out);
    layers("root", &ceiling.degrade.root, &policy.degrade.root, out);
    audit(&ceiling.audit, &policy.audit, out);
    screen(&ceiling.screen, &policy.screen, out);
}

fn screen(ceiling: &Screen, screen: &Screen, out: &mut Vec<Difference>) {
    for rule in Rule::ALL {
        let (strict, mild) = (ceiling.action(rule), screen.action(rule));
        if mild < strict {
            let action = |action: Action| format!("`{}`", action.name());
            let text = format!("screening rule `{}` ({}): {}", rule.name(), rule.about(), changed(&action(mild), &action(strict)));
            out.push(Difference::new(Area::Screen, format!("[screen] {}", rule.name()), text).consequence(screened(mild)));
        }
    }
    for (key, before, after) in [("modules", &ceiling.modules, &screen.modules), ("builtins", &ceiling.builtins, &screen.builtins)] {
        let wider = after.iter().filter(|name| !before.contains(name)).cloned().collect::<Vec<_>>();
        if !before.is_empty() && (after.is_empty() || !wider.is_empty()) {
            let items = if after.is_empty() { vec![String::from("any")] } else { wider };
            let difference = Difference::new(Area::Screen, format!("[screen] {key}"), format!("names in `{key}`")).items(items);
            out.push(difference.consequence("code may use them without a finding"));
        }
    }
    let wider: Vec<String> = match (ceiling.approvers.as_slice(), screen.approvers.as_slice()) {
        ([], _) => Vec::new(),
        (_, []) => vec![String::from("the caller")],
        (before, after) => after.iter().filter(|approver| !before.contains(approver)).map(ToString::to_string).collect(),
    };
    if !wider.is_empty() {
        let difference = Difference::new(Area::Screen, "[screen] approvers", "approvers").items(wider);
        out.push(difference.consequence("code that screening holds back runs once one of them approves it"));
    }
    if screen.approval_time > ceiling.approval_time {
        let [before, after] = [ceiling, screen].map(|screen| LimitKey::Wall.format(Some(screen.approval_time)));
        let text = format!("approval time: {}", changed(&after, &before));
        out.push(Difference::new(Area::Screen, "[screen] approval_time", text).consequence("a leaked token stays valid longer"));
    }
}

/// A value and the one that the other policy has.
fn changed(after: &str, before: &str) -> String {
    format!("{after} instead of {before}")
}

/// What an action does with code that has a finding.
pub(crate) fn screened(action: Action) -> &'static str {
    match action {
        Action::Allow => "it runs, and the result has no finding",
        Action::Note => "it runs, and the result has a finding",
        Action::Approve => "it runs after an approval",
        Action::Deny => "it does not run",
    }
}

fn audit(ceiling: &Audit, audit: &Audit, out: &mut Vec<Difference>) {
    if audit.mode < ceiling.mode {
        let text = format!("audit mode: {}", changed(audit.mode.name(), ceiling.mode.name()));
        out.push(Difference::new(Area::Audit, "[audit] mode", text).consequence(recorded(audit.mode)));
    }
    let silent: Vec<String> = ceiling.alerts.iter().filter(|alert| !audit.alerts.contains(alert)).map(ToString::to_string).collect();
    if !silent.is_empty() {
        let difference = Difference::new(Area::Audit, "[audit] alerts", "without an alert").items(silent);
        out.push(difference.consequence("no message goes to the journal; the audit log has the event, if runs are recorded"));
    }
}

/// What a mode of the audit records.
pub(crate) fn recorded(mode: AuditMode) -> &'static str {
    match mode {
        AuditMode::Off => "no run and no refusal is recorded",
        AuditMode::Try => "each run and refusal is recorded; a run that cannot be recorded runs anyway",
        AuditMode::Required => "each run is recorded before it starts and after it ends; a run that cannot be recorded does not start",
    }
}

fn limits(area: Area, ceiling: &Limits, limits: &Limits, out: &mut Vec<Difference>) {
    for (key, value) in limits.iter() {
        let other = ceiling.get(key);
        if value.unwrap_or(u64::MAX) <= other.unwrap_or(u64::MAX) {
            continue;
        }
        let (section, kind) = if area == Area::RequestMaximums { ("limits.max", "maximum") } else { ("limits", "default") };
        let text = format!("{kind} limit `{}`: {}", key.name(), changed(&key.format(value), &key.format(other)));
        let bound = bound(key, value);
        let consequence = if area == Area::RequestMaximums { format!("if a request asks for it, {bound}") } else { bound };
        out.push(Difference::new(area, format!("[{section}] {}", key.name()), text).consequence(consequence));
    }
}

/// What a limit of this value bounds.
pub(crate) fn bound(key: LimitKey, value: Option<u64>) -> String {
    let amount = key.format(value);
    let plural = if amount == "1" { "" } else { "s" };
    let processes = if amount == "1" { "process or thread" } else { "processes and threads" };
    let (bounded, unbounded) = match key {
        LimitKey::Wall => (format!("a run lasts at most {amount}"), "a run may last for ever"),
        LimitKey::Cpu => (format!("at most {amount} of CPU time for all processes together"), "no limit of CPU time but `wall` and `cpus`"),
        LimitKey::Memory => (format!("at most {amount} for all processes together"), "code may use all memory of the host"),
        LimitKey::AddressSpace => {
            (format!("at most {amount} of addresses for each process"), "a process may reserve any number of addresses")
        }
        LimitKey::Processes => (format!("at most {amount} {processes} at a time"), "code may start processes until the host refuses more"),
        LimitKey::Cpus => (format!("at most {amount} CPU{plural}"), "code may use all CPUs of the host"),
        LimitKey::FileSize => (format!("at most {amount} for one file"), "a file is bounded by its file system alone"),
        LimitKey::OpenFiles => {
            (format!("at most {amount} open file{plural} for each process"), "the launcher's limit of open files applies")
        }
        LimitKey::Stack => (format!("at most {amount} of stack for a process's first thread"), "stacks are bounded by memory alone"),
        LimitKey::ScratchSize => {
            (format!("the scratch may grow by at most {amount}"), "code may fill the scratch's file system, or memory")
        }
        LimitKey::ScratchFiles => (
            format!("at most {amount} new file{plural} in the scratch"),
            "code may make as many files in the scratch as its file system holds",
        ),
        LimitKey::TmpSize => (
            format!("at most {amount} of memory in /tmp, /dev/shm and home together"),
            "/tmp, /dev/shm and home are bounded by memory alone",
        ),
        LimitKey::OutputSize => (
            format!("the result keeps at most {amount} of each output stream; the run ends at 64 times that"),
            "the launcher keeps all output in its memory",
        ),
        LimitKey::CollectSize => {
            (format!("at most {amount} of collected files together"), "collected files are bounded by the launcher's memory alone")
        }
    };
    if value.is_none() { unbounded.to_owned() } else { bounded }
}

fn variables(ceiling: &[String], accept: &[String], out: &mut Vec<Difference>) {
    let covered = |pattern: &String| {
        ceiling.iter().any(|wide| match wide.strip_suffix('*') {
            Some(prefix) => pattern.trim_end_matches('*').starts_with(prefix),
            None => wide == pattern,
        })
    };
    let open: Vec<String> = accept.iter().filter(|pattern| !covered(pattern)).cloned().collect();
    if !open.is_empty() {
        let loads = open.iter().any(|name| {
            let stem = name.trim_end_matches('*');
            LOADING.iter().any(|known| known == name || (stem.len() < name.len() && known.starts_with(stem)))
        });
        let difference = Difference::new(Area::Environment, "[environment] accept", "variables that a request may set").items(open);
        out.push(difference.consequence(if loads {
            "set by the caller, not by the code; some of them (such as LD_PRELOAD) make programs load code"
        } else {
            "set by the caller, not by the code"
        }));
    }
}

/// Variables that make programs load or run something.
const LOADING: &[&str] = &[
    "LD_PRELOAD",
    "LD_LIBRARY_PATH",
    "PYTHONPATH",
    "PYTHONSTARTUP",
    "PYTHONHOME",
    "NODE_PATH",
    "NODE_OPTIONS",
    "BASH_ENV",
    "ENV",
    "PERL5LIB",
    "PERL5OPT",
    "RUBYLIB",
    "RUBYOPT",
    "PATH",
];

/// A runtime by one of its names.
fn runtime<'p>(policy: &'p Policy, name: &str) -> Option<(&'p str, &'p Runtime)> {
    let found = policy.runtimes.iter().find(|(own, runtime)| *own == name || runtime.aliases.iter().any(|alias| alias == name));
    found.map(|(name, runtime)| (name.as_str(), runtime))
}

fn runtimes(ceiling: &Policy, policy: &Policy, out: &mut Vec<Difference>) {
    for (name, here) in &policy.runtimes {
        let key = format!("[runtimes.{name}]");
        let Some((_, other)) = runtime(ceiling, name) else {
            let difference = Difference::new(Area::Runtimes, key, format!("language `{name}`")).items(vec![here.command.join(" ")]);
            out.push(difference.consequence("a request can be written in it; any code can start its interpreter, if the sandbox shows it"));
            continue;
        };
        if other.command != here.command {
            let text = format!("command of `{name}`: {}", changed(&here.command.join(" "), &other.command.join(" ")));
            let difference = Difference::new(Area::Runtimes, format!("{key} command"), text);
            out.push(difference.consequence("another program or option may let code do more").undecided());
        }
        if other.compile != here.compile {
            let text = |words: &[String]| if words.is_empty() { String::from("none") } else { words.join(" ") };
            let text = format!("compiler of `{name}`: {}", changed(&text(&here.compile), &text(&other.compile)));
            let difference = Difference::new(Area::Runtimes, format!("{key} compile"), text);
            out.push(difference.consequence("another program or option may let code do more").undecided());
        }
        watched(&format!("[runtimes.{name}.modules]"), &other.modules, &here.modules, out);
    }
    templates(ceiling, policy, out);
}

/// Copies of one image have the same addresses, so what code learns in one run holds in others.
fn templates(ceiling: &Policy, policy: &Policy, out: &mut Vec<Difference>) {
    for name in policy.runtimes.keys() {
        let (Some((own, _)), Some((template, here))) = (runtime(ceiling, name), policy.template_of(name)) else { continue };
        let mut add = |key: String, text: String| out.push(Difference::new(Area::Runtimes, key, text).consequence(shared(template, here)));
        let Some((_, other)) = ceiling.template_of(own) else {
            add(format!("[runtimes.{name}] template"), format!("template of `{name}`: {}", changed(template, "none")));
            continue;
        };
        if here.max_runs > other.max_runs {
            let [after, before] = [here, other].map(|template| template.max_runs.to_string());
            add(format!("[templates.{template}] max_runs"), format!("runs of `{name}` from one image: {}", changed(&after, &before)));
        }
        if here.max_age > other.max_age {
            let text = format!("age of an image of `{name}`: {}", changed(&max_age(here), &max_age(other)));
            add(format!("[templates.{template}] max_age"), text);
        }
        if (here.shared_by, other.shared_by) == (SharedBy::Policy, SharedBy::Caller) {
            add(format!("[templates.{template}] shared_by"), changed("policy", "caller"));
        }
    }
}

/// What the copies of one image have in common, and for how long.
pub(crate) fn shared(name: &str, template: &Template) -> String {
    let plural = if template.max_runs == 1 { "" } else { "s" };
    let keys = if template.shared_by == SharedBy::Policy { "; in a service all keys of the policy share it" } else { "" };
    format!(
        "copies of one image of `{name}` share memory layout, hash seed and stack canary; the image is made anew after {} run{plural} or {}{keys}",
        template.max_runs,
        max_age(template)
    )
}

fn max_age(template: &Template) -> String {
    LimitKey::Wall.format(u64::try_from(template.max_age.as_millis()).ok())
}

/// The beginning of a template's code.
pub(crate) fn excerpt(code: &str) -> String {
    const LENGTH: usize = 60;
    let start: String = code.chars().take(LENGTH).collect();
    let rest = if start.len() < code.len() { "…" } else { "" };
    format!("{start:?}{rest} ({} bytes)", code.len())
}

fn watched(section: &str, ceiling: &Modules, here: &Modules, out: &mut Vec<Difference>) {
    let default = |modules: &Modules| modules.default.unwrap_or(Action::Allow);
    let mut differ = |key: &str, what: String, strict: Action, mild: Action| {
        if mild < strict {
            let text = format!("{what}: {}", changed(mild.name(), strict.name()));
            out.push(Difference::new(Area::Runtimes, format!("{section} {key}"), text).consequence(hooked(mild)));
        }
    };
    differ("default", String::from("imports that no line names"), default(ceiling), default(here));
    let names: BTreeSet<&String> = ceiling.rules.keys().chain(here.rules.keys()).collect();
    for name in names {
        differ(&format!("{name:?}"), format!("`{name}`"), ceiling.action(name), here.action(name));
    }
}

/// What a watched interpreter does about a module or an event.
pub(crate) fn hooked(action: Action) -> &'static str {
    match action {
        Action::Deny => "the interpreter refuses it, and the result lists it; code can bypass this",
        Action::Note => "the result lists it; code can bypass this",
        _ => "the result does not list it",
    }
}

fn layers(who: &str, ceiling: &[Degradable], degrade: &[Degradable], out: &mut Vec<Difference>) {
    for layer in degrade.iter().filter(|layer| !ceiling.contains(layer)) {
        let text = format!("layer that may be missing, {}: `{}`", launched_by(who), layer.name());
        out.push(Difference::new(Area::Degrade, format!("[degrade] {who}"), text).consequence(without(*layer)));
    }
}

/// The launcher that a list of `[degrade]` is for.
pub(crate) fn launched_by(who: &str) -> &'static str {
    if who == "root" { "launched by root" } else { "launched by an ordinary user" }
}

/// What a run lacks without a layer.
pub(crate) fn without(layer: Degradable) -> &'static str {
    match layer {
        Degradable::Cgroup => {
            "the memory of all processes is added up, processes are limited for the run, CPU time for each process, and no share of a CPU is kept"
        }
        Degradable::Landlock => "only the mount table protects files, and only namespaces keep signals and abstract sockets in",
        Degradable::UniqueUid => "the run has the caller's uid on the host, and so do all runs of one caller",
        Degradable::UserNamespace => {
            "the run's namespaces belong to the host's user namespace: a kernel bug that grants a capability grants it on the host"
        }
    }
}

/// Values that differ where neither policy allows more.
pub(super) fn other_changes(first: &Policy, second: &Policy) -> Vec<Difference> {
    let mut out = Vec::new();
    let mut differ = |area, key: &str, before: String, after: String| {
        if before != after {
            out.push(Difference::new(area, key, changed(&after, &before)));
        }
    };
    for name in named(&first.seccomp, &second.seccomp) {
        let (before, after) = (outcome(&first.seccomp, name), outcome(&second.seccomp, name));
        use SyscallOutcome::{Missing, Refused};
        if matches!((before, after), (Refused, Missing) | (Missing, Refused)) {
            let errno = |outcome| String::from(if outcome == Missing { "ENOSYS" } else { "EPERM" });
            differ(Area::SystemCalls, &format!("[seccomp] enosys, of {name}"), errno(before), errno(after));
        }
    }
    let variables = first.environment.set.keys().chain(second.environment.set.keys()).collect::<BTreeSet<_>>();
    for name in variables {
        let value = |policy: &Policy| policy.environment.set.get(name).map_or_else(|| String::from("unset"), |value| format!("{value:?}"));
        differ(Area::Environment, &format!("[environment.set] {name}"), value(first), value(second));
    }
    differ(Area::Runtimes, "language", first.language.clone(), second.language.clone());
    for (name, after) in &second.runtimes {
        let Some((_, before)) = counterpart(first, second, name) else { continue };
        let list = |list: &[String]| if list.is_empty() { String::from("none") } else { list.join(", ") };
        let set =
            |runtime: &Runtime| if runtime.environment.is_empty() { String::from("none") } else { format!("{:?}", runtime.environment) };
        let venv = |runtime: &Runtime| runtime.venv.as_ref().map_or_else(|| String::from("none"), |path| path.display().to_string());
        let key = |key: &str| format!("[runtimes.{name}] {key}");
        differ(Area::Runtimes, &key("aliases"), list(&before.aliases), list(&after.aliases));
        differ(Area::Runtimes, &key("extension"), before.extension.clone(), after.extension.clone());
        differ(Area::Runtimes, &key("environment"), set(before), set(after));
        differ(Area::Runtimes, &key("venv"), venv(before), venv(after));
    }
    let (before, after) = (&first.identity, &second.identity);
    differ(Area::Identity, "[identity] user", before.user.clone(), after.user.clone());
    differ(Area::Identity, "[identity] uid", before.uid.to_string(), after.uid.to_string());
    differ(Area::Identity, "[identity] gid", before.gid.to_string(), after.gid.to_string());
    differ(Area::Identity, "[identity] hostname", before.hostname.clone(), after.hostname.clone());
    let preview = |policy: &Policy| LimitKey::OutputSize.format(Some(policy.audit.preview));
    differ(Area::Audit, "[audit] preview", preview(first), preview(second));
    other_templates(first, second, &mut out);
    out.sort_by_key(|difference| difference.area);
    out
}

/// The runtime of the first policy that goes by this name of the second, and the other way round: a name
/// that is only another name of a different runtime there makes no pair.
fn counterpart<'p>(first: &'p Policy, second: &Policy, name: &str) -> Option<(&'p str, &'p Runtime)> {
    runtime(first, name).filter(|(own, _)| runtime(second, own).is_some_and(|(back, _)| back == name))
}

/// In what templates differ, of runtimes that have one under both policies.
fn other_templates(first: &Policy, second: &Policy, out: &mut Vec<Difference>) {
    for name in second.runtimes.keys() {
        let Some((own, _)) = counterpart(first, second, name) else { continue };
        let (Some((before, other)), Some((after, here))) = (first.template_of(own), second.template_of(name)) else { continue };
        let mut add = |key: String, text: String| out.push(Difference::new(Area::Runtimes, key, text));
        if before != after {
            add(format!("[runtimes.{name}] template"), changed(after, before));
        }
        if other.imports != here.imports {
            let list = |template: &Template| if template.imports.is_empty() { String::from("none") } else { template.imports.join(", ") };
            add(format!("[templates.{after}] imports"), changed(&list(here), &list(other)));
        }
        if other.warm != here.warm {
            let code = |template: &Template| template.warm.as_deref().map_or_else(|| String::from("none"), excerpt);
            add(format!("[templates.{after}] warm"), changed(&code(here), &code(other)));
        }
        for (key, here, other) in [("images", here.images, other.images), ("ready", here.ready, other.ready)] {
            if here != other {
                add(format!("[templates.{after}] {key}"), changed(&here.to_string(), &other.to_string()));
            }
        }
    }
}
