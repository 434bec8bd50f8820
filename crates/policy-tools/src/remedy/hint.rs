//! Hints: error messages on a failed program's stderr, compared with the plan.
//!
//! Only errors without evidence from the kernel are read: paths, modules, commands, and limits
//! that a program sees as an error. The bytes are untrusted: only their end is read, the number
//! of hints is bounded, each is marked as a hint, and none changes a verdict. The host is not
//! read, so neither text nor time of a hint reveals whether a path exists there. No hint offers
//! a line that shows a path with secrets.

mod location;
mod messages;
mod secret;

use std::path::Path;

use stockade_policy::{
    may_be_shown,
    model::{Access, Policy},
    names,
    plan::{CgroupPlan, HOME, Plan, find_runtime, is_in_image},
    whitelist::{Name, Target},
};
use stockade_protocol::{
    Denial, LimitKey,
    text::{escape, is_hidden},
};

use super::{limit, line, quoted};
use location::{PathLocation, locate};
use messages::{ErrorMessage, PathError, is_of_starting, plain_command, read};

/// Bytes of stderr that are read, from the end.
const MAX_TAIL_LEN: usize = 16 << 10;
/// Hints of one run.
pub const MAX_HINTS: usize = 8;

/// The hints of a failed run's stderr.
pub fn hints(stderr: &[u8], plan: &Plan, policy: &Policy) -> Vec<Denial> {
    let tail = stderr.get(stderr.len().saturating_sub(MAX_TAIL_LEN)..).unwrap_or_default();
    let mut out: Vec<Denial> = Vec::new();
    let mut is_starting = false;
    let lines = tail.split(|byte| matches!(byte, b'\n' | b'\r')).map(String::from_utf8_lossy);
    let messages = lines.flat_map(|line| {
        is_starting |= is_of_starting(&line);
        read(&line).into_iter().map(|message| if is_starting { as_command(message) } else { message }).collect::<Vec<_>>()
    });
    for message in messages {
        if out.len() == MAX_HINTS {
            break;
        }
        let Some(hint) = of_message(message, plan, policy) else { continue };
        match out.iter_mut().find(|known| known.kind == hint.kind && known.what == hint.what) {
            Some(known) => known.count += 1,
            None => out.push(hint),
        }
    }
    out
}

/// A name without a directory that could not be started is a command, and no path.
fn as_command(message: ErrorMessage) -> ErrorMessage {
    match &message {
        ErrorMessage::Path { path, error: PathError::Missing } => plain_command(path).unwrap_or(message),
        _ => message,
    }
}

fn of_message(message: ErrorMessage, plan: &Plan, policy: &Policy) -> Option<Denial> {
    match message {
        ErrorMessage::Path { path, error } => of_path(&path, error, plan, policy),
        ErrorMessage::Module { name, python } => Some(of_module(&name, python, plan, policy)),
        ErrorMessage::Command(name) => Some(of_command(&name, plan, policy)),
        ErrorMessage::Limit(key) => of_limit(key, plan, policy),
        ErrorMessage::Network => of_network(plan, policy),
        ErrorMessage::Pip => of_pip(plan, policy),
    }
}

fn hint(kind: &'static str, what: String, answer: &str, rule: &str, allow: Option<String>, help: String) -> Denial {
    Denial { kind, what, count: 1, answer: answer.to_owned(), rule: rule.to_owned(), allow, help: Some(help), hint: true, limit: None }
}

fn of_path(path: &str, error: PathError, plan: &Plan, policy: &Policy) -> Option<Denial> {
    let (real, location) = locate(path, plan, policy)?;
    let what = escape(&real.to_string_lossy(), is_hidden);
    let hint = |rule: &str, allow, help: String| Some(hint("path", what.clone(), error.errno(), rule, allow, help));
    let scratch = plan.scratch.path.display();
    let elsewhere = match plan.scratch.read_only {
        true => format!("write below /tmp or {HOME} instead"),
        false => format!("write below {scratch}, /tmp or {HOME} instead"),
    };
    if let (Some(image), PathLocation::Outside) = (&plan.image_root, &location) {
        let title = image.title();
        return match error {
            PathError::Missing | PathError::Unknown if is_in_image(&real) => {
                let help = format!("image {title} does not have it; bring it in the request's `files`, or take an image that has it");
                hint("[filesystem]", None, help)
            }
            PathError::Missing | PathError::Unknown => {
                let (allow, help) = shown_by(&real);
                hint("[filesystem]", allow, help)
            }
            _ => {
                let allow = Some(String::from("[filesystem] writable_root = true"));
                hint("[filesystem] writable_root", allow, format!("the root is image {title}, and read-only: {elsewhere}"))
            }
        };
    }
    match (location, error) {
        // Where some assistants' own sandboxes keep a user's files.
        (PathLocation::Outside, _) if real.starts_with("/mnt/data") => hint(
            "[filesystem]",
            None,
            format!("this sandbox has no /mnt/data: files of the request are in the working directory, {scratch}"),
        ),
        (PathLocation::Outside, PathError::Missing | PathError::Unknown) => {
            let (allow, help) = shown_by(&real);
            hint("[filesystem]", allow, help)
        }
        (PathLocation::Outside, _) => {
            let help = format!(
                "this is outside the sandbox, and no policy line makes it writable: {elsewhere}, or name that directory as the request's `scratch`"
            );
            hint("[filesystem]", None, help)
        }
        (PathLocation::Visible, PathError::ReadOnly | PathError::Refused) => {
            let help =
                format!("host paths are read-only, and the host's permissions apply; no policy line makes them writable: {elsewhere}");
            hint("[filesystem]", None, help)
        }
        (PathLocation::Made, PathError::ReadOnly | PathError::Refused) => hint(
            "[filesystem]",
            None,
            format!("this belongs to the sandbox and is read-only; no policy line makes it writable: {elsewhere}"),
        ),
        (PathLocation::Masked, _) => hint("/proc", None, String::from("it is masked in every sandbox, because it has data of the host")),
        (PathLocation::Hidden(globs), PathError::Refused | PathError::Unknown | PathError::ReadOnly) => {
            let help = String::from("the policy hides it; pass what the code needs in the request's `env` or `files`");
            hint("[scratch] hidden", removed("hidden", &globs), help)
        }
        (PathLocation::ReadOnly(globs), PathError::Refused | PathError::ReadOnly) => {
            let help = format!("the policy makes it read-only: write a copy elsewhere below {scratch}");
            hint("[scratch] read_only", removed("read_only", &globs), help)
        }
        (PathLocation::Scratch, PathError::ReadOnly) if plan.scratch.read_only && policy.scratch.access == Access::Ro => {
            hint("[scratch] access", Some(String::from("[scratch] access = \"rw\"")), format!("the scratch is read-only: {elsewhere}"))
        }
        _ => None,
    }
}

/// The policy line that shows a path, if one may, and what else can be done.
fn shown_by(path: &Path) -> (Option<String>, String) {
    let device = path.strip_prefix("/dev").ok().and_then(Path::to_str).filter(|name| names::DEVICES.contains(name));
    if let Some(name) = device {
        let allow = line("filesystem", &[format!("devices = {{ add = [{}] }}", quoted(name))]);
        return (Some(allow), String::from("the policy does not list this device"));
    }
    let bring = "bring data in the request's `files` or in the scratch";
    if secret::is_guarded(path) {
        return (None, format!("no line is offered: this path, or one below it, may hold secrets or give rights over the host; {bring}"));
    }
    if !may_be_shown(path) {
        return (None, format!("no policy can show this; {bring}"));
    }
    let list = format!("read_only_optional = {{ add = [{}] }}", quoted(&path.to_string_lossy()));
    (
        Some(line("filesystem", &[list])),
        format!("this is outside the sandbox; {bring}, or let the policy show it (programs run only from `read_only`)"),
    )
}

fn removed(list: &str, globs: &[String]) -> Option<String> {
    let globs: Vec<String> = globs.iter().map(|glob| quoted(glob)).collect();
    (!globs.is_empty()).then(|| line("scratch", &[format!("{list} = {{ remove = [{}] }}", globs.join(", "))]))
}

/// What `scripts/prepare-data-science` installs.
const DATA_SCIENCE: [&str; 3] = ["numpy", "pandas", "matplotlib"];

/// How a policy whose Python is Pyodide gets packages. Another interpreter or policy would be without
/// its second wall.
fn wheels_of_pyodide(policy: &Policy) -> Option<&'static str> {
    let (_, runtime) = find_runtime(policy, "python").ok()?;
    runtime.interpreter().ends_with("pyodide").then_some("`prepare-pyodide --wheels DIRECTORY` unpacks packages beside the interpreter")
}

fn of_module(name: &str, python: bool, plan: &Plan, policy: &Policy) -> Denial {
    if !python {
        let help = String::from(
            "Node finds its own modules and those in the scratch: bring this one in `files`, or as node_modules in the scratch",
        );
        return hint("module", name.to_owned(), "not found", "[runtimes]", None, help);
    }
    if let Some(remedy) = wheels_of_pyodide(policy) {
        let help = format!("the interpreter does not find it; {remedy}; your own module goes into `files`");
        return hint("module", name.to_owned(), "not found", "[runtimes]", None, help);
    }
    let mut remedies = Vec::new();
    let reaches = |host: &str| {
        let host = Name::new(host);
        let rules = plan.egress.iter().flat_map(|egress| egress.whitelist.rules());
        rules
            .filter(|rule| rule.ports.contains(443))
            .any(|rule| matches!((&rule.target, &host), (Target::Name(name), Ok(host)) if name == host))
    };
    if reaches("pypi.org") && reaches("files.pythonhosted.org") {
        remedies.push(String::from("the Python package index can be reached: install its package with pip"));
    } else {
        remedies.push(String::from("under policy `pypi` code can install it with pip"));
    }
    let python = find_runtime(policy, "python").ok();
    if DATA_SCIENCE.contains(&name) && python.is_none_or(|(_, runtime)| runtime.venv.is_none()) {
        remedies.push(String::from("policy `data-science` has it, if its environment was prepared"));
    }
    if let Some((runtime, _)) = python {
        remedies.push(format!("`--runtime {runtime}=VENV/bin/python` takes a virtual environment that has it"));
    }
    let help = format!("the interpreter does not find it; {}; your own module goes into `files`", remedies.join("; "));
    hint("module", name.to_owned(), "not found", "[runtimes]", None, help)
}

fn of_command(name: &str, plan: &Plan, policy: &Policy) -> Denial {
    let path = plan.environment_values.iter().find_map(|variable| variable.strip_prefix("PATH=")).unwrap_or_default();
    // `python3.9` where there is `python`.
    let plain = name.trim_end_matches(|c: char| c.is_ascii_digit() || c == '.');
    let near = find_runtime(policy, plain).map_or_else(|_| String::new(), |(runtime, _)| format!("; `{runtime}` is there"));
    if let Some(image) = &plan.image_root {
        let help = format!("image {} has no such program in PATH ({path}); take an image that has it", image.title());
        return hint("command", name.to_owned(), "not found", "[filesystem]", None, help);
    }
    let help = format!(
        "not found in PATH ({path}){near}; for a program elsewhere on the host, list its directory in [filesystem] read_only and call it by its absolute path"
    );
    hint("command", name.to_owned(), "not found", "[filesystem] read_only", None, help)
}

/// Under a whitelist the gate's own list says what was refused.
fn of_network(plan: &Plan, policy: &Policy) -> Option<Denial> {
    if plan.egress.is_some() {
        return None;
    }
    let help = format!(
        "policy `{}` has no network, so no name and no peer is reached: bring data in the request's `files`, or take a policy whose [egress] whitelist names the peer",
        policy.name
    );
    Some(hint("network", String::from("no network"), "not reached", "[egress] whitelist", None, help))
}

fn of_pip(plan: &Plan, policy: &Policy) -> Option<Denial> {
    if plan.egress.is_some() {
        return None;
    }
    let remedy = wheels_of_pyodide(policy)
        .unwrap_or("take policy `pypi`, or `--runtime python=VENV/bin/python` with a virtual environment that has the package");
    let help = format!("policy `{}` has no network, so pip can install nothing, with whatever option: {remedy}", policy.name);
    Some(hint("network", String::from("pip install"), "not reached", "[egress] whitelist", None, help))
}

fn of_limit(key: LimitKey, plan: &Plan, policy: &Policy) -> Option<Denial> {
    let limited = |key| plan.limits.get(key).is_some();
    let absent = matches!(plan.cgroup, CgroupPlan::Absent { .. });
    let key = match key {
        // A cgroup counts memory and processes: the result has the kernel's own evidence.
        LimitKey::Processes if !absent => return None,
        LimitKey::AddressSpace if limited(key) => key,
        LimitKey::AddressSpace if absent && limited(LimitKey::Memory) => LimitKey::Memory,
        LimitKey::AddressSpace => return None,
        key if limited(key) => key,
        _ => return None,
    };
    let remedy = limit(policy, plan, key, None);
    let what = format!("{} {}", key.name(), remedy.limit.value);
    Some(Denial { limit: Some(remedy.limit), ..hint("limit", what, "refused", &remedy.rule, remedy.allow, remedy.help) })
}

#[cfg(test)]
mod tests;
