//! What is a value or a short list: limits, variables, runtimes, degradable layers; and
//! what is set otherwise without being more or less.

use std::collections::BTreeSet;

use stockade_protocol::{
    LimitKey, Limits,
    screen::{Action, Rule},
};

use super::{
    Area, Difference,
    calls::{Answer, answer, named},
};
use crate::{
    inherit::audit_mode,
    model::{Audit, AuditMode, Degradable, Modules, Policy, Runtime, Screen},
    modules,
};

pub(super) fn beyond(ceiling: &Policy, policy: &Policy, out: &mut Vec<Difference>) {
    limits(Area::Limits, &ceiling.limits, &policy.limits, out);
    limits(Area::Maxima, &ceiling.limits_max, &policy.limits_max, out);
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
            let says = format!("be code that {}, with `{}` instead of `{}`", rule.about(), mild.name(), strict.name());
            out.push(Difference::new(Area::Screen, format!("[screen] {}", rule.name()), says).follows(screened(mild)));
        }
    }
    for (key, before, after) in [("modules", &ceiling.modules, &screen.modules), ("builtins", &ceiling.builtins, &screen.builtins)] {
        let wider = after.iter().filter(|name| !before.contains(name)).cloned().collect::<Vec<_>>();
        if !before.is_empty() && (after.is_empty() || !wider.is_empty()) {
            let items = if after.is_empty() { vec![String::from("any")] } else { wider };
            out.push(Difference::new(Area::Screen, format!("[screen] {key}"), format!("name these beyond `{key}`")).items(items));
        }
    }
    let wider: Vec<String> = match (ceiling.approvers.as_slice(), screen.approvers.as_slice()) {
        ([], _) => Vec::new(),
        (_, []) => vec![String::from("whoever asks")],
        (before, after) => after.iter().filter(|approver| !before.contains(approver)).map(ToString::to_string).collect(),
    };
    if !wider.is_empty() {
        let difference = Difference::new(Area::Screen, "[screen] approvers", "run what these approve").items(wider);
        out.push(difference.follows("what screening holds back runs on their word"));
    }
    if screen.approval_time > ceiling.approval_time {
        let [before, after] = [ceiling, screen].map(|screen| LimitKey::Wall.format(Some(screen.approval_time)));
        let says = format!("wait for an approval for {after} instead of {before}");
        out.push(
            Difference::new(Area::Screen, "[screen] approval_time", says).follows("a token that somebody else finds is good for longer"),
        );
    }
}

/// What an action about a finding means.
pub(crate) fn screened(action: Action) -> &'static str {
    match action {
        Action::Allow => "it runs, and nothing is said",
        Action::Note => "it runs, and the result says so",
        Action::Approve => "it runs once somebody has approved it",
        Action::Deny => "it does not run",
    }
}

fn audit(ceiling: &Audit, audit: &Audit, out: &mut Vec<Difference>) {
    if audit.mode < ceiling.mode {
        let says = format!("run with the audit `{}` instead of `{}`", audit_mode(audit.mode), audit_mode(ceiling.mode));
        out.push(Difference::new(Area::Audit, "[audit] mode", says).follows(recorded(audit.mode)));
    }
    let silent: Vec<String> = ceiling.alerts.iter().filter(|alert| !audit.alerts.contains(alert)).map(ToString::to_string).collect();
    if !silent.is_empty() {
        let difference = Difference::new(Area::Audit, "[audit] alerts", "do these without raising an alert").items(silent);
        out.push(difference.follows("nobody is told at once; where runs are written down, it stands there"));
    }
}

/// What a mode of the audit means.
pub(crate) fn recorded(mode: AuditMode) -> &'static str {
    match mode {
        AuditMode::Off => "no run and no refusal is written down",
        AuditMode::Try => "each run and each refusal is written down, and a run that cannot be is run all the same",
        AuditMode::Required => "each run is written down before it starts and when it ends, and one that cannot be does not start",
    }
}

fn limits(area: Area, ceiling: &Limits, limits: &Limits, out: &mut Vec<Difference>) {
    for (key, value) in limits.iter() {
        let other = ceiling.get(key);
        if value.unwrap_or(u64::MAX) <= other.unwrap_or(u64::MAX) {
            continue;
        }
        let (section, says) = match area {
            Area::Maxima => (
                "limits.max",
                format!("have `{}` raised by a request to {} instead of {}", key.name(), amount(key, value), amount(key, other)),
            ),
            _ => ("limits", format!("have a `{}` of {} unasked instead of {}", key.name(), amount(key, value), amount(key, other))),
        };
        let may = consequence(key, value);
        let follows = if area == Area::Maxima { format!("where a request asks for it, {may}") } else { may };
        out.push(Difference::new(area, format!("[{section}] {}", key.name()), says).follows(follows));
    }
}

fn amount(key: LimitKey, value: Option<u64>) -> String {
    value.map_or_else(|| String::from("no limit"), |_| key.format(value))
}

/// What a limit of this value means.
pub(crate) fn consequence(key: LimitKey, value: Option<u64>) -> String {
    let amount = key.format(value);
    let (bounded, unbounded) = match key {
        LimitKey::Wall => (format!("a run may last {amount}"), "a run may last for ever"),
        LimitKey::Cpu => (format!("all processes together may compute for {amount}"), "processes may compute for as long as the run lasts"),
        LimitKey::Memory => (format!("memory of all processes together may reach {amount}"), "code may use up the memory of the host"),
        LimitKey::AddressSpace => {
            (format!("each process may reserve {amount} of addresses"), "each process may reserve as many addresses as it likes")
        }
        LimitKey::Processes => {
            (format!("there may be {amount} processes and threads at one time"), "code may start processes until the host takes no more")
        }
        LimitKey::Cpus => (format!("code may take {amount} times what one CPU gives"), "code may take all CPUs of the host"),
        LimitKey::FileSize => (format!("one file may grow to {amount}"), "one file may grow as far as its file system holds"),
        LimitKey::OpenFiles => {
            (format!("each process may hold {amount} files open"), "each process may hold as many files open as its launcher may")
        }
        LimitKey::Stack => {
            (format!("the stack of a process's first thread may grow to {amount}"), "stacks may grow as far as memory holds")
        }
        LimitKey::ScratchSize => {
            (format!("the scratch may grow by {amount}"), "code may fill the scratch as far as its file system or memory holds")
        }
        LimitKey::ScratchFiles => (
            format!("the scratch may hold {amount} files more than before"),
            "code may make as many files in the scratch as its file system holds",
        ),
        LimitKey::TmpSize => (
            format!("/tmp, /dev/shm and home together may hold {amount} of memory"),
            "/tmp, /dev/shm and home may hold as much as memory does",
        ),
        LimitKey::OutputSize => (
            format!("{amount} are kept of each output stream, and 64 times as much may be printed"),
            "all that is printed is kept, in the launcher's memory",
        ),
        LimitKey::CollectSize => {
            (format!("collected files may be {amount} together"), "collected files may be as large as the launcher's memory holds")
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
        let difference = Difference::new(Area::Environment, "[environment] accept", "have these variables set by a request").items(open);
        out.push(difference.follows(if loads {
            "the caller, not the code, sets them; some of them say which further code a program loads"
        } else {
            "the caller, not the code, sets them"
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
            let difference = Difference::new(Area::Runtimes, key, format!("have requests in `{name}`")).items(vec![here.command.join(" ")]);
            out.push(difference.follows("a request can be written in it; a program that the sandbox shows can be started by any code"));
            continue;
        };
        if other.command != here.command {
            let says = format!("start `{name}` by another command, `{}` instead of `{}`", here.command.join(" "), other.command.join(" "));
            let difference = Difference::new(Area::Runtimes, format!("{key} command"), says);
            out.push(difference.follows("what another program or option lets code do cannot be told from here").undecided());
        }
        watched(&format!("[runtimes.{name}.modules]"), &other.modules, &here.modules, out);
    }
}

fn watched(section: &str, ceiling: &Modules, here: &Modules, out: &mut Vec<Difference>) {
    let default = |modules: &Modules| modules.default.unwrap_or(Action::Allow);
    let mut differ = |key: &str, what: String, strict: Action, mild: Action| {
        if mild < strict {
            let says = format!("{what}, with `{}` instead of `{}`", mild.name(), strict.name());
            out.push(Difference::new(Area::Runtimes, format!("{section} {key}"), says).follows(met(mild)));
        }
    };
    differ(modules::DEFAULT, String::from("import what no line names"), default(ceiling), default(here));
    let names: BTreeSet<&String> = ceiling.rules.keys().chain(here.rules.keys()).collect();
    for name in names {
        differ(&format!("{name:?}"), format!("come to `{name}`"), modules::action(ceiling, name), modules::action(here, name));
    }
}

/// What an action about a module or an event means.
pub(crate) fn met(action: Action) -> &'static str {
    match action {
        Action::Deny => "its interpreter refuses it, and the result says so; code can get around that",
        Action::Note => "the result says so; code can get around that",
        _ => "nothing is said",
    }
}

fn layers(who: &str, ceiling: &[Degradable], degrade: &[Degradable], out: &mut Vec<Difference>) {
    for layer in degrade.iter().filter(|layer| !ceiling.contains(layer)) {
        let says = format!("run without the layer `{}` where the host lacks it, {}", layer.name(), launched_by(who));
        out.push(Difference::new(Area::Degrade, format!("[degrade] {who}"), says).follows(without(*layer)));
    }
}

/// Who launches, in words.
pub(crate) fn launched_by(who: &str) -> &'static str {
    if who == "root" { "when root launches" } else { "when an ordinary user launches" }
}

/// What a run is like without a layer.
pub(crate) fn without(layer: Degradable) -> &'static str {
    match layer {
        Degradable::Cgroup => "memory, processes and CPU time are then limited for each process and not for all together",
        Degradable::Landlock => "files are then kept by the mount table alone, and signals and abstract sockets by namespaces alone",
        Degradable::UniqueUid => "the run then has the caller's uid on the host, and two runs of one caller the same",
        Degradable::UserNamespace => {
            "the run's namespaces then belong to the host's own user namespace: a hole in the kernel that hands out capabilities hands out the host's"
        }
    }
}

/// What two policies set otherwise, neither allowing more by it.
pub(super) fn otherwise(first: &Policy, second: &Policy) -> Vec<Difference> {
    let mut out = Vec::new();
    let mut differ = |area, key: &str, before: String, after: String| {
        if before != after {
            out.push(Difference::new(area, key, format!("{after} instead of {before}")));
        }
    };
    for name in named(&first.seccomp, &second.seccomp) {
        let (before, after) = (answer(&first.seccomp, name), answer(&second.seccomp, name));
        if matches!((before, after), (Answer::Refused, Answer::Missing) | (Answer::Missing, Answer::Refused)) {
            let word = |answer| String::from(if answer == Answer::Missing { "ENOSYS" } else { "EPERM" });
            differ(Area::SystemCalls, &format!("[seccomp] enosys, of {name}"), word(before), word(after));
        }
    }
    let variables = first.environment.set.keys().chain(second.environment.set.keys()).collect::<BTreeSet<_>>();
    for name in variables {
        let value = |policy: &Policy| policy.environment.set.get(name).map_or_else(|| String::from("unset"), |value| format!("{value:?}"));
        differ(Area::Environment, &format!("[environment.set] {name}"), value(first), value(second));
    }
    differ(Area::Runtimes, "language", first.language.clone(), second.language.clone());
    for (name, after) in &second.runtimes {
        let Some((_, before)) = runtime(first, name) else { continue };
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
    out
}
