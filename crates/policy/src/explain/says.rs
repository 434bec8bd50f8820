//! The sentences of an explanation, section by section.

use stockade_protocol::{
    LimitKey,
    screen::{Action, Rule},
};

use super::{Section, Statement};
use crate::{
    compare::{consequence, ioctl, launched_by, met, recorded, screened, shown, without},
    inherit::family_name,
    model::{Access, AuditMode, Degradable, Policy},
    plan::{HOME, PRIVATE_SCRATCH, PROC_MASKS, WRITABLE},
};

pub(super) fn sections(policy: &Policy) -> Vec<Section> {
    let section = |about, title, statements| Section { about, title, statements };
    vec![
        section("read", "What code may read", read(policy)),
        section("write", "What code may write", write(policy)),
        section("run", "What code may run", run(policy)),
        section("reach", "Whom code may reach", reach(policy)),
        section("system_calls", "What code may ask of the kernel", system_calls(policy)),
        section("consume", "What code may consume", consume(policy)),
        section("request", "What a request may change", request(policy)),
        section("identity", "Whose rights code has", identity(policy)),
        section("environment", "What code finds in its environment", environment(policy)),
        section("degrade", "Which layers may be missing", degrade(policy)),
        section("audit", "What is written down", audit(policy)),
        section("screen", "What code is screened for", [screen(policy), watched(policy)].concat()),
    ]
}

/// Sentences as they are added.
#[derive(Default)]
struct Says(Vec<Statement>);

impl Says {
    fn say(&mut self, says: impl Into<String>) {
        self.list(says, Vec::new());
    }

    fn list(&mut self, says: impl Into<String>, items: Vec<String>) {
        self.0.push(Statement { says: says.into(), items });
    }

    /// Nothing is said of an empty list but what its emptiness means.
    fn list_or(&mut self, says: &str, items: Vec<String>, empty: &str) {
        if items.is_empty() { self.say(empty) } else { self.list(says, items) }
    }
}

fn paths(policy: &Policy, wanted: impl Fn(&crate::compare::Shown) -> bool) -> Vec<String> {
    shown(policy).iter().filter(|shown| wanted(shown)).map(|shown| shown.path.display().to_string()).collect()
}

fn read(policy: &Policy) -> Vec<Statement> {
    let mut says = Says::default();
    says.list_or(
        "these paths of the host, at their own places, as far as the run's host user may read them; a host without one of them refuses the run",
        paths(policy, |shown| !shown.optional),
        "no path of the host that must be there",
    );
    says.list_or("these where the host has them", paths(policy, |shown| shown.optional), "no further path of the host");
    let devices = policy.filesystem.devices.iter().map(|name| format!("/dev/{name}")).collect();
    says.list_or("these device nodes, which may be written too", devices, "no device node of the host");
    let masks = PROC_MASKS.iter().map(|name| format!("/proc/{name}")).collect();
    says.list("a /proc of the sandbox's own processes, read-only, in which these are masked; memory, load, CPUs and kernel version of the host show there", masks);
    says.say("passwd, group, hosts and a few more files of /etc that are made for the sandbox, not the host's");
    let hidden = policy.scratch.hidden.clone();
    says.list_or(
        "everything in its scratch but what these globs matched when the run began",
        hidden,
        "everything in its scratch: nothing there is hidden",
    );
    says.say("nothing else of the host's files, processes or environment");
    says.0
}

fn write(policy: &Policy) -> Vec<Statement> {
    let mut says = Says::default();
    says.list("these directories, which are memory and gone after the run", WRITABLE.map(str::to_owned).to_vec());
    let scratch = &policy.scratch;
    match scratch.access {
        Access::Rw => {
            says.say(format!("its scratch: the host directory that a request names, at its own path, else a private {PRIVATE_SCRATCH} that is gone after the run"));
            says.list_or(
                "code can delete everything in the scratch but what these globs matched when the run began, which is read-only",
                scratch.read_only.clone(),
                "code can change and delete everything in the scratch that is not hidden",
            );
            says.say("set-ID bits, devices, sockets and fifos cannot be left there");
        }
        Access::Ro => {
            says.say("not its scratch, which is read-only");
            says.list_or("these globs say so once more", scratch.read_only.clone(), "no glob protects a part of it, and none is needed");
        }
    }
    says.say(match scratch.create {
        true => "a scratch directory that is missing is made, if its parent is there",
        false => "a scratch directory that is missing is refused, not made",
    });
    says.say(match scratch.home {
        true => String::from("HOME is in the scratch: what a run leaves there is there for the next run in that scratch"),
        false => format!("HOME is {HOME}: nothing that a run leaves there reaches the next"),
    });
    says.0
}

fn run(policy: &Policy) -> Vec<Statement> {
    let mut says = Says::default();
    says.list_or("programs from these paths of the host", paths(policy, |shown| shown.executable), "no program of the host");
    let own = WRITABLE.iter().map(|path| (*path).to_owned()).chain([String::from("the scratch")]).collect();
    says.list("programs that it brings or makes, from these", own);
    for (name, runtime) in &policy.runtimes {
        let mut sentence =
            format!("code of a request in `{name}`, by `{}`, as a file that ends in .{}", runtime.command.join(" "), runtime.extension);
        if let Some(venv) = &runtime.venv {
            sentence.push_str(&format!(
                "; its interpreter is that of the virtual environment {}, which can be read and run then",
                venv.display()
            ));
        }
        says.say(sentence);
        if !runtime.aliases.is_empty() {
            says.list(format!("`{name}` is also called"), runtime.aliases.clone());
        }
        if !runtime.environment.is_empty() {
            says.list(
                format!("`{name}` gets these variables beside the others"),
                runtime.environment.iter().map(|(name, value)| format!("{name}={value}")).collect(),
            );
        }
    }
    says.say(format!("a request that names no language is in `{}`", policy.language));
    says.0
}

/// No rule of the network asks for these.
const BESIDE: &str = "at a socket of the host that lies in what the policy shows, whoever listens there, where sockets of AF_UNIX are allowed; a fifo there can be read empty";

fn reach(policy: &Policy) -> Vec<Statement> {
    let mut says = Says::default();
    let rules: Vec<String> = policy.egress.whitelist.rules().iter().map(ToString::to_string).collect();
    if rules.is_empty() {
        says.say("by the network nobody: it has only the sandbox's own lo");
        says.say(BESIDE);
        return says.0;
    }
    let peers = rules.join(", ");
    says.list("by the network these peers and nobody else, over TCP, through a gate outside the sandbox", rules);
    says.say(format!("code can send anything that it reads to {peers}; what the peer does with it is the peer's"));
    says.say(
        "names are answered from these rules; no question for a name leaves on behalf of the code, but a wildcard's label that it chose",
    );
    says.say("loopback, the host's own, link-local, metadata and multicast addresses stay closed unless a rule lies within them");
    says.say(BESIDE);
    says.0
}

fn system_calls(policy: &Policy) -> Vec<Statement> {
    let mut says = Says::default();
    let seccomp = &policy.seccomp;
    says.list(
        format!(
            "these {} system calls; every other is refused with EPERM and reported, or, if newer than the list, does not exist",
            seccomp.allow.len()
        ),
        seccomp.allow.clone(),
    );
    says.list_or("these end the run when they are tried", seccomp.kill.clone(), "no refused call ends the run: code can go on trying");
    // Whatever a policy says: their arguments lie out of a filter's sight.
    let always = ["clone3", "openat2"].into_iter().filter(|name| seccomp.enosys.iter().all(|listed| listed != name));
    let missing = seccomp.enosys.iter().cloned().chain(always.map(str::to_owned)).collect();
    says.list("these answer ENOSYS, as an older kernel would", missing);
    let opens = seccomp.allow.iter().any(|name| name == "socket");
    let families = seccomp.socket_families.iter().filter(|_| opens).map(|family| family_name(*family).to_owned()).collect();
    says.list_or("sockets of these families", families, "no sockets, but pairs of its own where socketpair is among the calls");
    says.list_or("these requests of ioctl", seccomp.ioctl.iter().map(|request| ioctl(*request)).collect(), "no request of ioctl");
    says.say("whatever the lists say: no new namespace, no set-ID bit, no device, nobody else's limits or priorities");
    says.0
}

fn consume(policy: &Policy) -> Vec<Statement> {
    let mut says = Says::default();
    for (key, value) in policy.limits.iter() {
        says.say(consequence(key, value));
    }
    says.0
}

fn request(policy: &Policy) -> Vec<Statement> {
    let mut says = Says::default();
    let raised = |key: LimitKey| (policy.limits.get(key), policy.limits_max.get(key));
    let text = |key: LimitKey| {
        let (value, most) = raised(key);
        format!("{} from {} to at most {}", key.name(), key.format(value), key.format(most))
    };
    let (fixed, open): (Vec<LimitKey>, Vec<LimitKey>) = LimitKey::ALL.into_iter().partition(|key| raised(*key).0 == raised(*key).1);
    says.list_or("it may raise these limits, and lower any", open.into_iter().map(text).collect(), "it may lower limits and raise none");
    says.list_or(
        "these it may lower only",
        fixed.into_iter().map(|key| format!("{} {}", key.name(), key.format(raised(key).1))).collect(),
        "there is none that it may not raise",
    );
    says.list_or("it may set these variables", policy.environment.accept.clone(), "it may set no variable");
    says.say("it names its scratch, brings code, arguments, stdin and files, and adds no path, system call or peer");
    says.0
}

fn identity(policy: &Policy) -> Vec<Statement> {
    let mut says = Says::default();
    let identity = &policy.identity;
    says.say(format!(
        "inside it is {} with uid {} and gid {}, on a host called {}",
        identity.user, identity.uid, identity.gid, identity.hostname
    ));
    says.say("outside it is the caller where an ordinary user launches, with the caller's supplementary groups; where root launches, a uid of the run's own that nobody else has");
    says.say("it has no capability and can gain none");
    says.0
}

fn environment(policy: &Policy) -> Vec<Statement> {
    let mut says = Says::default();
    let set = policy.environment.set.iter().map(|(name, value)| format!("{name}={value}")).collect();
    says.list_or("these variables", set, "no variable of the policy's");
    says.say("HOME, USER and LOGNAME, and nothing of the caller's environment");
    says.0
}

fn degrade(policy: &Policy) -> Vec<Statement> {
    let mut says = Says::default();
    for (who, list) in [("rootless", &policy.degrade.rootless), ("root", &policy.degrade.root)] {
        if list.is_empty() {
            says.say(format!("none {}: a host that lacks one refuses the run", launched_by(who)));
        }
        for layer in list {
            says.say(missing(*layer, who));
        }
    }
    says.0
}

fn missing(layer: Degradable, who: &str) -> String {
    format!("`{}` where the host lacks it, {}: {}", layer.name(), launched_by(who), without(layer))
}

fn audit(policy: &Policy) -> Vec<Statement> {
    let mut says = Says::default();
    let audit = &policy.audit;
    says.say(recorded(audit.mode));
    if audit.mode == AuditMode::Off {
        return says.0;
    }
    match audit.preview {
        0 => says.say("of the code and of its output the hash and the sizes alone"),
        bytes => says.say(format!("of the code and of each output stream the first {bytes} bytes")),
    }
    says.say("values of `env`, files, stdin and arguments of a request are not");
    says.list_or("these raise an alert", audit.alerts.iter().map(ToString::to_string).collect(), "nothing raises an alert");
    says.0
}

fn screen(policy: &Policy) -> Vec<Statement> {
    let mut says = Says::default();
    let screen = &policy.screen;
    if screen.severest() == Action::Allow {
        says.say("for nothing: it is not looked at");
        return says.0;
    }
    says.say("its text is read before it runs; this is advice to whoever reads results, and no boundary: the sandbox holds without it");
    says.say("read are code and files of a request, the words of a command, and the script in scratch that it names; not what comes on stdin, what is only imported, or what code writes itself");
    for action in [Action::Deny, Action::Approve, Action::Note] {
        let rules: Vec<String> = Rule::ALL
            .into_iter()
            .filter(|rule| screen.action(*rule) == action)
            .map(|rule| format!("{}: {}", rule.name(), rule.about()))
            .collect();
        if !rules.is_empty() {
            says.list(format!("for these: {}", screened(action)), rules);
        }
    }
    if !screen.modules.is_empty() {
        says.list("it may import these modules", screen.modules.clone());
    }
    if !screen.builtins.is_empty() {
        says.list("it may use these built-in names", screen.builtins.clone());
    }
    if !screen.wants_approval() {
        return says.0;
    }
    let time = LimitKey::Wall.format(Some(screen.approval_time));
    says.say(format!("an approval is for this very request of this very caller, good once, and for {time} from when it was asked"));
    says.list_or(
        "these approve, and never what they have asked for themselves",
        screen.approvers.iter().map(ToString::to_string).collect(),
        "whoever asks approves, by sending the request again with the token of the first answer",
    );
    says.0
}

fn watched(policy: &Policy) -> Vec<Statement> {
    let mut says = Says::default();
    for (name, runtime) in policy.runtimes.iter().filter(|(_, runtime)| runtime.modules.watches()) {
        says.say(format!("interpreters of `{name}` are watched for what they import and do while it runs; this is advice too"));
        for action in [Action::Deny, Action::Note, Action::Allow] {
            let rules = runtime.modules.rules.iter().filter(|(_, of)| **of == action).map(|(name, _)| name.clone());
            let rest = (runtime.modules.default == Some(action)).then(|| String::from("every other module"));
            let names: Vec<String> = rules.chain(rest).collect();
            if !names.is_empty() {
                says.list(format!("where it comes to these: {}", met(action)), names);
            }
        }
    }
    says.0
}
