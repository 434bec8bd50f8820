//! The lines of an explanation, section by section.
//!
//! It adds a sentence only where the consequence of a value is not obvious.

use stockade_policy::{
    model::{ANY_IMAGE, Access, AuditMode, OUTPUT, Policy, SharedBy, SocketFamily},
    names::ioctl_text,
    plan::{HOME, PRIVATE_SCRATCH, PROC_MASKS, WRITABLE},
};
use stockade_protocol::{
    LimitKey,
    screen::{Action, Rule},
};

use super::{Section, Statement};
use crate::compare::{VisiblePath, bound, excerpt, hooked, launched_by, recorded, screened, shared, visible_paths, without};

pub(super) fn sections(policy: &Policy) -> Vec<Section> {
    let section = |about, title, statements: Statements| Section { about, title, statements: statements.0 };
    vec![
        section("read", "Readable", read(policy)),
        section("write", "Writable", write(policy)),
        section("run", "Executable", run(policy)),
        section("reach", "Reachable", reach(policy)),
        section("system_calls", "System calls", system_calls(policy)),
        section("consume", "Limits", consume(policy)),
        section("request", "What a request may change", request(policy)),
        section("identity", "Identity", identity(policy)),
        section("environment", "Environment", environment(policy)),
        section("degrade", "Layers that may be missing", degrade(policy)),
        section("audit", "Audit", audit(policy)),
        section("screen", "Screening", screen(policy)),
    ]
}

/// The lines of a section, in order.
#[derive(Default)]
struct Statements(Vec<Statement>);

impl Statements {
    fn text(&mut self, text: impl Into<String>) {
        self.0.push(Statement { text: text.into(), items: Vec::new() });
    }

    /// A key and its list; an empty one is "none".
    fn list(&mut self, key: impl Into<String>, items: Vec<String>) {
        let key = key.into();
        let text = if items.is_empty() { format!("{key}: none") } else { key };
        self.0.push(Statement { text, items });
    }
}

fn paths(policy: &Policy, wanted: impl Fn(&VisiblePath) -> bool) -> Vec<String> {
    visible_paths(policy).iter().filter(|visible| wanted(visible)).map(|visible| visible.path.display().to_string()).collect()
}

fn read(policy: &Policy) -> Statements {
    let mut out = Statements::default();
    if let Some(image) = &policy.filesystem.root.image {
        out.text(format!("the root is image `{image}` of the store, in place of the host's /usr and /etc"));
    }
    out.list("host paths, required", paths(policy, |visible| !visible.optional));
    out.list("host paths, if they exist", paths(policy, |visible| visible.optional));
    out.text("permissions: those of the run's user on the host");
    out.list("device nodes, also writable", policy.filesystem.devices.iter().map(|name| format!("/dev/{name}")).collect());
    if !policy.filesystem.sockets.is_empty() {
        let sockets = policy.filesystem.sockets.clone();
        out.list("sockets of the caller's own that `stockade bwrap --bind` may show; code can speak to who listens there", sockets);
    }
    out.list("masked in /proc", PROC_MASKS.iter().map(|name| format!("/proc/{name}")).collect());
    out.text("/proc: read-only, the sandbox's processes only. It shows memory, load, CPUs and kernel version of the host.");
    out.text("/etc: passwd, group, hosts and a few more files are made for the sandbox");
    out.list("hidden in the scratch, if there when the run starts", policy.scratch.hidden.clone());
    out.text("other files, processes and environment of the host: none");
    out
}

fn write(policy: &Policy) -> Statements {
    let mut out = Statements::default();
    out.list("in memory, removed after the run", WRITABLE.map(str::to_owned).to_vec());
    if policy.filesystem.writable_root {
        out.text("the root of an image: writable, as before after the run");
    }
    let scratch = &policy.scratch;
    match scratch.access {
        Access::Rw => {
            out.text(format!(
                "scratch: the host directory that a request names, at the same path inside; without one a private {PRIVATE_SCRATCH}, removed after the run"
            ));
            out.list("read-only in the scratch, if there when the run starts", scratch.read_only.clone());
            out.text("code can change and delete everything in the scratch that is neither hidden nor read-only");
            out.text("refused in the scratch: set-ID bits, devices, sockets and fifos");
        }
        Access::Ro => {
            out.text("scratch: read-only");
            out.list("read-only in the scratch whatever `access` is", scratch.read_only.clone());
        }
    }
    out.text(match scratch.create {
        true => "missing scratch directory: made, if its parent exists",
        false => "missing scratch directory: refused",
    });
    match scratch.root.is_empty() {
        true => out.text("root-owned directories as the scratch: refused"),
        false => out.list(
            "root-owned directories as the scratch, for root only, outside system directories and homes, at or below",
            scratch.root.iter().map(|place| place.display().to_string()).collect(),
        ),
    }
    out.text(match scratch.home {
        true => String::from("HOME: in the scratch. The next run in that scratch reads what this run leaves there."),
        false => format!("HOME: {HOME}, empty in each run"),
    });
    out
}

fn run(policy: &Policy) -> Statements {
    let mut out = Statements::default();
    out.list("programs of the host", paths(policy, |visible| visible.executable));
    out.list("programs that code brings or makes", WRITABLE.iter().copied().chain(["the scratch"]).map(str::to_owned).collect());
    out.text(format!("default language: `{}`", policy.language));
    let variables = |set: &std::collections::BTreeMap<String, String>| set.iter().map(|(name, value)| format!("{name}={value}")).collect();
    for (name, runtime) in &policy.runtimes {
        let mut text = format!("language `{name}`: `{}`, in a file that ends in .{}", runtime.command.join(" "), runtime.extension);
        if let Some(venv) = &runtime.venv {
            text.push_str(&format!(", by the interpreter of the environment {}, which is readable and executable", venv.display()));
        }
        out.text(text);
        if runtime.compiles() {
            out.text(format!(
                "language `{name}` is compiled first, in a run of its own: `{}`; the two runs share what code may write, and {OUTPUT} is there",
                runtime.compile.join(" ")
            ));
        }
        if !runtime.aliases.is_empty() {
            out.list(format!("other names of `{name}`"), runtime.aliases.clone());
        }
        if !runtime.environment.is_empty() {
            out.list(format!("further variables of `{name}`"), variables(&runtime.environment));
        }
        template(policy, name, &mut out);
    }
    out
}

fn template(policy: &Policy, runtime: &str, out: &mut Statements) {
    let Some((name, template)) = policy.template_of(runtime) else { return };
    let start = format!("runs of `{runtime}` in a session or service start from a copy of an interpreter (template `{name}`) that has");
    match template.imports.is_empty() {
        true => out.text(format!("{start} started and made no imports")),
        false => out.list(format!("{start} imported"), template.imports.clone()),
    }
    if let Some(code) = &template.warm {
        out.text(format!("after its imports that interpreter has run {}", excerpt(code)));
    }
    out.text(shared(name, template));
    if template.images > 1 {
        out.text(format!("a service keeps {} images of `{name}`, each with its own memory layout and hash seed", template.images));
    }
    if template.ready > 0 {
        let each = if template.shared_by == SharedBy::Caller { " of each key" } else { "" };
        let workers = if template.ready == 1 {
            "1 worker of a service keeps".to_owned()
        } else {
            format!("{} workers of a service keep", template.ready)
        };
        out.text(format!("{workers} a copy of `{name}` waiting for a request{each}, from the start of the service on"));
    }
}

fn reach(policy: &Policy) -> Statements {
    let mut out = Statements::default();
    let rules: Vec<String> = policy.egress.whitelist.rules().iter().map(ToString::to_string).collect();
    if rules.is_empty() {
        out.text("network: none (loopback only)");
    } else {
        let peers = rules.join(", ");
        out.list("peers, over TCP, through a gate outside the sandbox", rules);
        out.text(format!("code can send anything that it reads to {peers}"));
        out.text("names: answered from these rules. No DNS query leaves for the code, except for a name under a wildcard.");
        out.text("closed unless a rule is within them: loopback, link-local, metadata, multicast and the host's own addresses");
    }
    let sockets = if opens_unix_sockets(policy) { "reachable, because AF_UNIX is allowed" } else { "not reachable" };
    out.text(format!("UNIX sockets of the host in visible paths: {sockets}. Code can also drain a fifo there."));
    out
}

/// Whether code may talk to sockets of the host, where a visible directory holds them.
fn opens_unix_sockets(policy: &Policy) -> bool {
    policy.seccomp.allow.iter().any(|name| name == "socket") && policy.seccomp.socket_families.contains(&SocketFamily::Unix)
}

fn system_calls(policy: &Policy) -> Statements {
    let mut out = Statements::default();
    let seccomp = &policy.seccomp;
    out.list(format!("allowed ({} calls)", seccomp.allow.len()), seccomp.allow.clone());
    out.text("other calls: EPERM, and reported; ENOSYS for calls newer than the list");
    out.list("calls that end the run", seccomp.kill.clone());
    // In every filter: their arguments lie in memory that the filter cannot read.
    let always = ["clone3", "openat2"].into_iter().filter(|name| seccomp.enosys.iter().all(|listed| listed != name));
    out.list("these fail with ENOSYS", seccomp.enosys.iter().cloned().chain(always.map(str::to_owned)).collect());
    let opens = seccomp.allow.iter().any(|name| name == "socket");
    out.list(
        "socket families, beside pairs from `socketpair`",
        seccomp.socket_families.iter().filter(|_| opens).map(|family| family.name().to_owned()).collect(),
    );
    out.list("ioctl requests", seccomp.ioctl.iter().map(|request| ioctl_text(*request)).collect());
    out.text("refused under every policy: new namespaces, set-ID bits, devices, limits and priorities of other processes");
    out
}

fn consume(policy: &Policy) -> Statements {
    let mut out = Statements::default();
    let read_only = policy.scratch.access == Access::Ro;
    let execs = policy.seccomp.allow.iter().any(|name| matches!(name.as_str(), "execve" | "execveat"));
    for (key, value) in policy.limits.iter() {
        let text = match key {
            LimitKey::ScratchSize | LimitKey::ScratchFiles if read_only => String::from("moot, the scratch is read-only"),
            LimitKey::Processes if value == Some(1) && execs => {
                format!("{}; code can still replace itself by another program (execve)", bound(key, value))
            }
            _ => bound(key, value),
        };
        out.text(format!("{}: {text}", key.name()));
    }
    out
}

fn request(policy: &Policy) -> Statements {
    let mut out = Statements::default();
    let text = |key: &LimitKey, value| format!("{} {}", key.name(), key.format(value));
    let (fixed, open): (Vec<LimitKey>, Vec<LimitKey>) =
        LimitKey::ALL.into_iter().partition(|key| policy.limits.get(*key) == policy.limits_max.get(*key));
    let raised = |key: &LimitKey| {
        format!("{} from {} to at most {}", key.name(), key.format(policy.limits.get(*key)), key.format(policy.limits_max.get(*key)))
    };
    out.list("limits that it may raise and lower", open.iter().map(raised).collect());
    out.list("limits that it may only lower", fixed.iter().map(|key| text(key, policy.limits_max.get(*key))).collect());
    out.list("variables that it may set", policy.environment.accept.clone());
    out.list("images that it may have as its root, in place of the host's /usr and /etc", images(policy));
    out.text("it names its scratch and brings code, arguments, stdin and files; it adds no path, system call or peer");
    out
}

fn images(policy: &Policy) -> Vec<String> {
    let word = |image: &String| if image == ANY_IMAGE { String::from("each that the store has") } else { image.clone() };
    policy.filesystem.images.iter().map(word).collect()
}

fn identity(policy: &Policy) -> Statements {
    let mut out = Statements::default();
    let identity = &policy.identity;
    out.text(format!("inside: user {}, uid {}, gid {}, host name {}", identity.user, identity.uid, identity.gid, identity.hostname));
    out.text("on the host, launched by an ordinary user: the caller's uid and supplementary groups");
    out.text("on the host, launched by root: a uid of this run alone");
    out.text("capabilities: none, and code can gain none");
    out
}

fn environment(policy: &Policy) -> Statements {
    let mut out = Statements::default();
    out.list("variables of the policy", policy.environment.set.iter().map(|(name, value)| format!("{name}={value}")).collect());
    out.text("also set: HOME, USER and LOGNAME");
    out.text("variables of the caller's environment: none");
    out
}

fn degrade(policy: &Policy) -> Statements {
    let mut out = Statements::default();
    for (who, list) in [("rootless", &policy.degrade.rootless), ("root", &policy.degrade.root)] {
        let launched = launched_by(who);
        if list.is_empty() {
            out.text(format!("{launched}: none; a host that lacks a layer refuses the run"));
        }
        for layer in list {
            out.text(format!("{launched}: `{}`. Without it {}.", layer.name(), without(*layer)));
        }
    }
    out
}

fn audit(policy: &Policy) -> Statements {
    let mut out = Statements::default();
    let audit = &policy.audit;
    out.text(format!("mode: {}, {}", audit.mode.name(), recorded(audit.mode)));
    if audit.mode == AuditMode::Off {
        return out;
    }
    out.text(match audit.preview {
        0 => String::from("recorded of code and output: hash and sizes"),
        bytes => format!("recorded of code and output: hash, sizes and the first {}", LimitKey::OutputSize.format(Some(bytes))),
    });
    out.text("not recorded: arguments, stdin, files and values of `env` of a request");
    out.list("alerts", audit.alerts.iter().map(ToString::to_string).collect());
    out
}

fn screen(policy: &Policy) -> Statements {
    let mut out = Statements::default();
    findings(policy, &mut out);
    hooks(policy, &mut out);
    out
}

fn findings(policy: &Policy, out: &mut Statements) {
    let screen = &policy.screen;
    if screen.severest() == Action::Allow {
        return out.text("before the run: none, code is not screened");
    }
    out.text("code is screened before it runs (advisory: the sandbox does not depend on it)");
    out.text("screened: code and files of a request, the words of a command, and the script in scratch that it names");
    out.text("not screened: stdin, files that code only imports, and code written at run time");
    for action in [Action::Deny, Action::Approve, Action::Note] {
        let rules: Vec<String> = Rule::ALL
            .into_iter()
            .filter(|rule| screen.action(*rule) == action)
            .map(|rule| format!("{}: {}", rule.name(), rule.about()))
            .collect();
        if !rules.is_empty() {
            out.list(format!("{} ({})", action.name(), screened(action)), rules);
        }
    }
    for (key, names) in [("modules that code may import", &screen.modules), ("built-in names that code may use", &screen.builtins)] {
        if !names.is_empty() {
            out.list(key, names.clone());
        }
    }
    if !screen.wants_approval() {
        return;
    }
    let time = LimitKey::Wall.format(Some(screen.approval_time));
    out.text(format!("approval: for one run of the same request by the same caller, valid for {time} after it was asked for"));
    match screen.approvers.as_slice() {
        [] => out.text("approvers: the caller, who sends the request again with the token of the first answer"),
        approvers => out.list("approvers, never for their own requests", approvers.iter().map(ToString::to_string).collect()),
    }
}

fn hooks(policy: &Policy, out: &mut Statements) {
    for (name, runtime) in policy.runtimes.iter().filter(|(_, runtime)| runtime.modules.watches()) {
        out.text(format!("interpreters of `{name}` are watched during the run (advisory, too)"));
        for action in [Action::Deny, Action::Note, Action::Allow] {
            let rules = runtime.modules.rules.iter().filter(|(_, of)| **of == action).map(|(name, _)| name.clone());
            let rest = (runtime.modules.default == Some(action)).then(|| String::from("every other module"));
            let names: Vec<String> = rules.chain(rest).collect();
            if !names.is_empty() {
                out.list(format!("{} in `{name}` ({})", action.name(), hooked(action)), names);
            }
        }
    }
}
