//! Hints: what a program that failed says of itself on stderr, read against the plan.
//!
//! The bytes are the program's own and may be anything. So only their end is looked at, a
//! bounded number of hints comes of it, each is a guess and marked as one, and none ever
//! changes a verdict. Nothing is looked up: whether the host has what is named does not
//! show, neither in the words nor in the time. No line is offered for what guards the host.

mod messages;
mod place;
mod secret;

use std::path::Path;

use stockade_protocol::{Denial, LimitKey};

use super::{limit, line, quoted};
use crate::{
    check,
    egress::{Name, Target},
    model::Policy,
    names,
    plan::{CgroupPlan, HOME, Plan, find_runtime},
    visible::visible,
};
use messages::{Message, Trouble, read};
use place::{Place, place};

/// Bytes of stderr that are looked at, from the end.
pub const LONGEST_TAIL: usize = 16 << 10;
/// Hints that come of one run.
pub const MOST_HINTS: usize = 8;

/// What a failed run's stderr hints at.
pub fn hints(stderr: &[u8], plan: &Plan, policy: &Policy) -> Vec<Denial> {
    let tail = stderr.get(stderr.len().saturating_sub(LONGEST_TAIL)..).unwrap_or_default();
    let mut out: Vec<Denial> = Vec::new();
    for message in tail.split(|byte| matches!(byte, b'\n' | b'\r')).flat_map(|line| read(&String::from_utf8_lossy(line))) {
        if out.len() == MOST_HINTS {
            break;
        }
        let Some(hint) = word(message, plan, policy) else { continue };
        match out.iter_mut().find(|known| known.kind == hint.kind && known.what == hint.what) {
            Some(known) => known.count += 1,
            None => out.push(hint),
        }
    }
    out
}

fn word(message: Message, plan: &Plan, policy: &Policy) -> Option<Denial> {
    match message {
        Message::Path { path, trouble } => of_path(&path, trouble, plan, policy),
        Message::Module { name, python } => Some(of_module(&name, python, plan, policy)),
        Message::Command(name) => Some(of_command(&name, plan)),
        Message::Limit(key) => of_limit(key, plan, policy),
    }
}

fn hint(kind: &'static str, what: String, answer: &str, rule: &str, allow: Option<String>, help: String) -> Denial {
    Denial { kind, what, count: 1, answer: answer.to_owned(), rule: rule.to_owned(), allow, help: Some(help), hint: true, limit: None }
}

fn of_path(path: &str, trouble: Trouble, plan: &Plan, policy: &Policy) -> Option<Denial> {
    let (real, place) = place(path, plan, policy)?;
    let what = visible(&real.to_string_lossy(), &[]);
    let say = |rule: &str, allow, help: String| Some(hint("path", what.clone(), trouble.errno(), rule, allow, help));
    let scratch = plan.scratch.path.display();
    let elsewhere = match plan.scratch.read_only {
        true => format!("write below /tmp or {HOME} instead"),
        false => format!("write below {scratch}, /tmp or {HOME} instead"),
    };
    match (place, trouble) {
        (Place::Outside, Trouble::Missing | Trouble::Unknown) => {
            let (allow, help) = shown_by(&real);
            say("[filesystem]", allow, help)
        }
        (Place::Outside, _) => {
            let help = format!(
                "this lies outside the sandbox, and no line makes it writable: {elsewhere}, or name that directory as the request's `scratch`"
            );
            say("[filesystem]", None, help)
        }
        (Place::Shown, Trouble::ReadOnly | Trouble::Refused) => {
            let help =
                format!("what is shown of the host is read-only, and its permissions there hold; no line makes it writable: {elsewhere}");
            say("[filesystem]", None, help)
        }
        (Place::Own, Trouble::ReadOnly | Trouble::Refused) => {
            say("[filesystem]", None, format!("this belongs to the sandbox and is read-only; no line makes it writable: {elsewhere}"))
        }
        (Place::Masked, _) => say("/proc", None, String::from("it is masked in every sandbox, because it tells of the host")),
        (Place::Hidden(globs), Trouble::Refused | Trouble::Unknown | Trouble::ReadOnly) => {
            let help = String::from("it is hidden from code; do without it, or let the caller pass what is needed by `env` or `files`");
            say("[scratch] hidden", removed("hidden", &globs), help)
        }
        (Place::Kept(globs), Trouble::Refused | Trouble::ReadOnly) => {
            let help = format!("it may be read, not changed: write a copy elsewhere below {scratch}");
            say("[scratch] read_only", removed("read_only", &globs), help)
        }
        (Place::Scratch, Trouble::ReadOnly) if plan.scratch.read_only && policy.scratch.access == crate::model::Access::Ro => {
            say("[scratch] access", Some(String::from("[scratch] access = \"rw\"")), format!("the scratch is read-only: {elsewhere}"))
        }
        _ => None,
    }
}

/// The line that shows a path, if a policy may.
fn shown_by(path: &Path) -> (Option<String>, String) {
    let text = path.to_string_lossy();
    let device = path.strip_prefix("/dev").ok().and_then(Path::to_str).filter(|name| names::DEVICES.contains(name));
    if let Some(name) = device {
        let allow = line("filesystem", &[format!("devices = {{ add = [{}] }}", quoted(name))]);
        return (Some(allow), String::from("the policy gives no such device"));
    }
    let help = "this lies outside the sandbox; bring data in the request's `files`, put it into the scratch, or have the policy show it";
    if secret::is_guarded(path) {
        let help = "this can hold secrets of the host or give rights over it, or has below it what does, so no line is offered that would show it; \
                    bring what the code needs in the request's `files`, or put it into the scratch";
        return (None, help.to_owned());
    }
    match check::shown(&text) {
        Ok(_) => {
            let list = format!("read_only_optional = {{ add = [{}] }}", quoted(&text));
            (Some(line("filesystem", &[list])), format!("{help} (programs run only from `read_only`)"))
        }
        Err(_) => (None, String::from("no policy can show this; bring data in the request's `files`, or put it into the scratch")),
    }
}

fn removed(list: &str, globs: &[String]) -> Option<String> {
    let globs: Vec<String> = globs.iter().map(|glob| quoted(glob)).collect();
    (!globs.is_empty()).then(|| line("scratch", &[format!("{list} = {{ remove = [{}] }}", globs.join(", "))]))
}

/// What `scripts/prepare-data-science` installs.
const DATA_SCIENCE: [&str; 3] = ["numpy", "pandas", "matplotlib"];

fn of_module(name: &str, python: bool, plan: &Plan, policy: &Policy) -> Denial {
    if !python {
        let help = String::from(
            "only modules of Node itself and those in the scratch are found: bring it in `files`, or as node_modules in the scratch",
        );
        return hint("module", name.to_owned(), "not found", "[runtimes]", None, help);
    }
    let mut ways = Vec::new();
    let reaches = |host: &str| {
        let host = Name::new(host);
        let rules = plan.egress.iter().flat_map(|egress| egress.whitelist.rules());
        rules
            .filter(|rule| rule.ports.contains(443))
            .any(|rule| matches!((&rule.target, &host), (Target::Name(name), Ok(host)) if name == host))
    };
    if reaches("pypi.org") && reaches("files.pythonhosted.org") {
        ways.push(String::from("the Python package index can be reached: install the package that has it with pip"));
    } else {
        ways.push(String::from("under policy `pypi` code can install it with pip"));
    }
    let python = find_runtime(policy, "python").ok();
    if DATA_SCIENCE.contains(&name) && python.is_none_or(|(_, runtime)| runtime.venv.is_none()) {
        ways.push(String::from("policy `data-science` has it, where its environment was prepared"));
    }
    if let Some((runtime, _)) = python {
        ways.push(format!("`--runtime {runtime}=VENV/bin/python` takes a virtual environment that has it"));
    }
    let help = format!("the interpreter in use does not find it; {}; a module of one's own goes into `files`", ways.join("; "));
    hint("module", name.to_owned(), "not found", "[runtimes]", None, help)
}

fn of_command(name: &str, plan: &Plan) -> Denial {
    let path = plan.environment_values.iter().find_map(|variable| variable.strip_prefix("PATH=")).unwrap_or_default();
    let help = format!(
        "nothing of this name is found by PATH ({path}); where the host has it elsewhere, a policy shows its directory by [filesystem] read_only, and it is called by its whole path"
    );
    hint("command", name.to_owned(), "not found", "[filesystem] read_only", None, help)
}

fn of_limit(key: LimitKey, plan: &Plan, policy: &Policy) -> Option<Denial> {
    let limited = |key| plan.limits.get(key).is_some();
    let absent = matches!(plan.cgroup, CgroupPlan::Absent { .. });
    let key = match key {
        // Where a cgroup counts memory, the kernel ends the run and says so itself.
        LimitKey::AddressSpace if limited(key) => key,
        LimitKey::AddressSpace if absent && limited(LimitKey::Memory) => LimitKey::Memory,
        LimitKey::AddressSpace => return None,
        key if limited(key) => key,
        _ => return None,
    };
    let remedy = limit(policy, &plan.limits, plan.scratch.host, key, None);
    let what = format!("{} {}", key.name(), remedy.limit.value);
    Some(Denial { limit: Some(remedy.limit), ..hint("limit", what, "refused", &remedy.rule, remedy.allow, remedy.help) })
}

#[cfg(test)]
mod tests;
