//! From a chain of documents, the extended ones first, to one policy whose values go together.
//!
//! A scalar overrides, a list is edited, tables merge by key. A change that changes nothing
//! is refused, for it says that its author believed something else. The result holds no
//! trace of who said what, except in the place of each error.

use std::{collections::BTreeMap, path::PathBuf};

use stockade_protocol::{LimitKey, Limits, screen};

use crate::{
    alert::Alert,
    approver::Approver,
    diagnostic::{At, Complaint, Place, Problems, quote},
    document::{Edit, Layer, LimitValues, RuntimeLayer, Variables},
    egress::{self, Rule, Whitelist},
    model::{
        Access, Audit, AuditMode, Degradable, Degrade, Egress, Environment, Filesystem, Identity, Modules, Origin, Policy, Runtime,
        Scratch, Screen, Seccomp, SocketFamily,
    },
    modules, names,
    plan::LEAST_MEMORY,
};

/// How long code may wait for its approval where a policy does not say it: 15 minutes.
const APPROVAL_TIME: u64 = 15 * 60 * 1000;

/// A policy in the making.
#[derive(Default)]
struct Draft {
    description: String,
    language: Option<At<String>>,
    read_only: Vec<At<PathBuf>>,
    read_only_optional: Vec<At<PathBuf>>,
    devices: Vec<At<String>>,
    user: String,
    uid: u32,
    gid: u32,
    hostname: String,
    set: Variables,
    accept: Vec<At<String>>,
    runtimes: BTreeMap<String, RuntimeLayer>,
    limits: LimitValues,
    limits_max: LimitValues,
    allow: Vec<At<String>>,
    kill: Vec<At<String>>,
    enosys: Vec<At<String>>,
    socket_families: Vec<At<SocketFamily>>,
    ioctl: Vec<At<u32>>,
    whitelist: Vec<At<Rule>>,
    access: Access,
    create: bool,
    home: bool,
    scratch_read_only: Vec<At<String>>,
    hidden: Vec<At<String>>,
    rootless: Vec<At<Degradable>>,
    root: Vec<At<Degradable>>,
    mode: AuditMode,
    preview: u64,
    alerts: Vec<At<Alert>>,
    actions: BTreeMap<screen::Rule, At<screen::Action>>,
    modules: Vec<At<String>>,
    builtins: Vec<At<String>>,
    approval_time: Option<u64>,
    approvers: Vec<At<Approver>>,
}

/// Combines documents; the last one is the policy, the ones before it what it extends.
///
/// A policy comes back only if nothing was wrong.
pub(crate) fn combine(layers: Vec<Layer>, name: &str, origin: Origin, sha256: String, problems: &mut Problems) -> Option<Policy> {
    let mut draft = Draft::default();
    for layer in layers {
        draft.apply(layer, problems);
    }
    draft.check(problems);
    if !problems.is_empty() {
        return None;
    }
    draft.finish(name, origin, sha256)
}

fn set<T>(slot: &mut T, value: Option<At<T>>) {
    if let Some(value) = value {
        *slot = value.value;
    }
}

fn edit<T: PartialEq>(list: &mut Vec<At<T>>, edit: Option<Edit<T>>, show: impl Fn(&T) -> String, problems: &mut Problems) {
    let Some(edit) = edit else { return };
    if edit.replace.is_some() {
        list.clear();
    }
    for gone in edit.remove {
        match list.iter().position(|item| item.value == gone.value) {
            Some(_) if edit.add.iter().any(|item| item.value == gone.value) => {
                problems.add(&gone.place, Complaint::new(format!("{} is both added and removed", show(&gone.value)), "removed here"))
            }
            Some(index) => drop(list.remove(index)),
            None => problems.add(&gone.place, Complaint::new(format!("{} is not there to be removed", show(&gone.value)), "not inherited")),
        }
    }
    for item in edit.replace.unwrap_or_default().into_iter().chain(edit.add) {
        match list.iter().find(|other| other.value == item.value) {
            Some(other) => problems.add_also(
                &item.place,
                Complaint::new(format!("{} is already there", show(&item.value)), "a line without effect"),
                Some((other.place.clone(), "first here".to_owned())),
            ),
            None => list.push(item),
        }
    }
}

fn ioctl(value: &u32) -> String {
    names::ioctl_name(*value).map_or_else(|| format!("`{value:#x}`"), |name| format!("`{name}`"))
}

fn layer_name(value: &Degradable) -> String {
    format!("`{}`", value.name())
}

/// The name of a socket family in a policy.
pub(crate) fn family_name(value: SocketFamily) -> &'static str {
    names::FAMILIES.iter().find(|(_, family)| *family == value).map_or("", |(name, _)| name)
}

impl Draft {
    fn apply(&mut self, layer: Layer, problems: &mut Problems) {
        let text = |value: &String| quote(value);
        let path = |value: &PathBuf| quote(&value.to_string_lossy());
        set(&mut self.description, layer.description);
        self.language = layer.language.or(self.language.take());
        edit(&mut self.read_only, layer.read_only, path, problems);
        edit(&mut self.read_only_optional, layer.read_only_optional, path, problems);
        edit(&mut self.devices, layer.devices, text, problems);
        set(&mut self.user, layer.user);
        set(&mut self.uid, layer.uid);
        set(&mut self.gid, layer.gid);
        set(&mut self.hostname, layer.hostname);
        self.set.extend(layer.set);
        edit(&mut self.accept, layer.accept, text, problems);
        self.runtimes(layer.remove_runtimes, layer.runtimes, problems);
        self.limits.extend(layer.limits);
        self.limits_max.extend(layer.limits_max);
        edit(&mut self.allow, layer.allow, text, problems);
        edit(&mut self.kill, layer.kill, text, problems);
        edit(&mut self.enosys, layer.enosys, text, problems);
        let family = |value: &SocketFamily| format!("`{}`", family_name(*value));
        edit(&mut self.socket_families, layer.socket_families, family, problems);
        edit(&mut self.ioctl, layer.ioctl, ioctl, problems);
        edit(&mut self.whitelist, layer.whitelist, |rule| quote(&rule.to_string()), problems);
        set(&mut self.access, layer.access);
        set(&mut self.create, layer.create);
        set(&mut self.home, layer.home);
        edit(&mut self.scratch_read_only, layer.scratch_read_only, text, problems);
        edit(&mut self.hidden, layer.hidden, text, problems);
        edit(&mut self.rootless, layer.rootless, layer_name, problems);
        edit(&mut self.root, layer.root, layer_name, problems);
        set(&mut self.mode, layer.mode);
        set(&mut self.preview, layer.preview);
        edit(&mut self.alerts, layer.alerts, |alert| quote(&alert.to_string()), problems);
        self.screen_for(layer.actions);
        edit(&mut self.modules, layer.modules, text, problems);
        edit(&mut self.builtins, layer.builtins, text, problems);
        self.approval_time = layer.approval_time.map(|time| time.value).or(self.approval_time);
        edit(&mut self.approvers, layer.approvers, |approver| quote(&approver.to_string()), problems);
    }

    fn runtimes(&mut self, gone: Vec<At<String>>, new: BTreeMap<String, RuntimeLayer>, problems: &mut Problems) {
        for name in gone {
            if self.runtimes.remove(&name.value).is_none() {
                let known: Vec<&str> = self.runtimes.keys().map(String::as_str).collect();
                let complaint = Complaint::new(format!("{} is not there to be removed", quote(&name.value)), "not inherited")
                    .help(format!("inherited: {}", known.join(", ")));
                problems.add(&name.place, complaint);
            }
        }
        for (name, runtime) in new {
            match self.runtimes.get_mut(&name) {
                Some(old) => {
                    old.place = runtime.place;
                    old.command = runtime.command.or(old.command.take());
                    old.aliases = runtime.aliases.or(old.aliases.take());
                    old.extension = runtime.extension.or(old.extension.take());
                    old.venv = runtime.venv.or(old.venv.take());
                    old.environment.extend(runtime.environment);
                    old.modules.extend(runtime.modules);
                }
                None => {
                    self.runtimes.insert(name, runtime);
                }
            }
        }
    }

    /// Adds what is done about findings. Code that could not be read may hold whatever it is
    /// that stops code, so that counts as the severest of it unless the layer says otherwise:
    /// an inherited `note` about the unread was meant for a policy that stopped nothing.
    fn screen_for(&mut self, actions: BTreeMap<screen::Rule, At<screen::Action>>) {
        let stops = actions.values().filter(|action| action.value > screen::Action::Note).max_by_key(|action| action.value).cloned();
        let unread = screen::Rule::Screener;
        if let (Some(stops), false) = (stops, actions.contains_key(&unread))
            && self.actions.get(&unread).is_none_or(|inherited| inherited.value < stops.value)
        {
            self.actions.insert(unread, stops);
        }
        self.actions.extend(actions);
    }

    fn check(&mut self, problems: &mut Problems) {
        self.check_runtimes(problems);
        self.check_limits(problems);
        for path in &self.read_only_optional {
            if let Some(other) = self.read_only.iter().find(|other| other.value == path.value) {
                let complaint =
                    Complaint::new(format!("{} is both optional and required", quote(&path.value.to_string_lossy())), "optional here");
                problems.add_also(&path.place, complaint, Some((other.place.clone(), "required here".to_owned())));
            }
        }
        self.check_syscalls(problems);
        self.check_egress(problems);
        self.check_screen(problems);
        if let (AuditMode::Off, Some(alert)) = (self.mode, self.alerts.first()) {
            let complaint = Complaint::new("nothing is audited under `mode = \"off\"`, so nothing raises an alert", "of no use");
            problems.add(&alert.place, complaint.help("remove the alerts, or set `mode` to \"try\" or \"required\""));
        }
    }

    /// A list of names and the rule about what is outside of it need each other.
    fn check_screen(&self, problems: &mut Problems) {
        for (key, rule, list) in [("modules", screen::Rule::Module, &self.modules), ("builtins", screen::Rule::Builtin, &self.builtins)] {
            let action = self.actions.get(&rule).filter(|action| action.value != screen::Action::Allow);
            let rule = rule.name();
            match (list.first(), action) {
                (Some(item), None) => {
                    let complaint =
                        Complaint::new(format!("`{key}` says what may be used, and nothing is done about the rest"), "of no use");
                    problems.add(&item.place, complaint.help(format!("set `{rule}` to \"note\", \"approve\" or \"deny\"")));
                }
                (None, Some(action)) => {
                    let complaint =
                        Complaint::new(format!("`{rule}` is about what `{key}` does not name, and it names nothing"), "of no use");
                    problems.add(&action.place, complaint.help(format!("name in `{key}` what may be used")));
                }
                _ => {}
            }
        }
        if let (Some(approver), false) =
            (self.approvers.first(), self.actions.values().any(|action| action.value == screen::Action::Approve))
        {
            let complaint = Complaint::new("no rule wants an approval, so nobody has one to give", "of no use");
            problems.add(&approver.place, complaint.help("set a rule to \"approve\", or name no approvers"));
        }
    }

    fn check_egress(&self, problems: &mut Problems) {
        for (index, rule) in self.whitelist.iter().enumerate() {
            if let Some(other) = self.whitelist[..index].iter().find(|other| egress::contradict(&rule.value, &other.value)) {
                let title =
                    format!("{} and {} say different things of one port", quote(&other.value.to_string()), quote(&rule.value.to_string()));
                let also = Some((other.place.clone(), "the other is here".to_owned()));
                problems.add_also(&rule.place, Complaint::new(title, "any bytes, or only TLS and HTTP?"), also);
            }
        }
        let families = [SocketFamily::Inet, SocketFamily::Inet6];
        if self.socket_families.iter().any(|family| families.contains(&family.value)) {
            return;
        }
        if let Some(rule) = self.whitelist.first() {
            let complaint = Complaint::new("this policy lets no program open a socket that the rule could serve", "of no use");
            problems.add(&rule.place, complaint.help("add `inet` to `socket_families` under [seccomp], and the calls that sockets need"));
        }
    }

    fn check_syscalls(&self, problems: &mut Problems) {
        let lists = [("allow", &self.allow), ("kill", &self.kill), ("enosys", &self.enosys)];
        for (index, (name, list)) in lists.iter().enumerate() {
            for (other_name, other_list) in &lists[..index] {
                for item in *list {
                    if let Some(other) = other_list.iter().find(|other| other.value == item.value) {
                        let title = format!("{} is in `{other_name}` and in `{name}`", quote(&item.value));
                        let also = Some((other.place.clone(), format!("in `{other_name}` here")));
                        problems.add_also(&item.place, Complaint::new(title, format!("in `{name}` here")), also);
                    }
                }
            }
        }
    }

    fn check_runtimes(&mut self, problems: &mut Problems) {
        let mut taken: BTreeMap<String, Place> =
            self.runtimes.iter().map(|(name, runtime)| (name.clone(), runtime.place.clone())).collect();
        for (name, runtime) in &self.runtimes {
            for (key, missing) in [("command", runtime.command.is_none()), ("extension", runtime.extension.is_none())] {
                if missing {
                    let complaint = Complaint::new(format!("`{key}` is missing from `[runtimes.{name}]`"), "");
                    problems.add(&runtime.place, complaint.help("nothing of this name is inherited"));
                }
            }
            if let Some(rule) = runtime.modules.values().next()
                && runtime.extension.as_deref() != Some("py")
            {
                let complaint = Complaint::new(format!("`{name}` is no Python, which alone can be watched for its modules"), "of no use");
                problems.add(&rule.place, complaint.help("a runtime is Python where its `extension` is \"py\""));
            }
            for alias in runtime.aliases.iter().flatten() {
                match taken.get(&alias.value) {
                    Some(other) => {
                        let complaint = Complaint::new(format!("the name {} is taken", quote(&alias.value)), "used again");
                        problems.add_also(&alias.place, complaint, Some((other.clone(), "first here".to_owned())));
                    }
                    None => drop(taken.insert(alias.value.clone(), alias.place.clone())),
                }
            }
        }
        let Some(language) = &mut self.language else { return };
        let by_alias =
            |(_, runtime): &(&String, &RuntimeLayer)| runtime.aliases.iter().flatten().any(|alias| alias.value == language.value);
        if self.runtimes.contains_key(&language.value) {
            return;
        }
        match self.runtimes.iter().find(by_alias) {
            Some((name, _)) => language.value.clone_from(name),
            None => {
                let known = taken.keys().map(String::as_str);
                let complaint = crate::check::unknown("runtime", &language.value, known);
                problems.add(&language.place, complaint);
            }
        }
    }

    fn check_limits(&self, problems: &mut Problems) {
        for (key, at) in &self.limits {
            let Some(max) = self.limits_max.get(key) else { continue };
            // No limit is above every limit.
            if at.value.unwrap_or(u64::MAX) > max.value.unwrap_or(u64::MAX) {
                let title = format!("`{}` is above its own maximum", key.name());
                let label = format!("{} unasked", key.format(at.value));
                let also = Some((max.place.clone(), format!("at most {}", key.format(max.value))));
                problems.add_also(&at.place, Complaint::new(title, label), also);
            }
        }
        for at in [&self.limits, &self.limits_max].into_iter().filter_map(|limits| limits.get(&LimitKey::Memory)) {
            if at.value.is_some_and(|memory| memory < LEAST_MEMORY) {
                let label = format!("{} is too little for the sandbox itself", LimitKey::Memory.format(at.value));
                let complaint = Complaint::new("`memory` is too small", label);
                problems.add(&at.place, complaint.help(format!("at least {}", LimitKey::Memory.format(Some(LEAST_MEMORY)))));
            }
        }
        let value = |key| self.limits.get(&key).and_then(|at| at.value.map(|value| (value, &at.place)));
        let (Some((memory, at)), Some((tmp, _)), Some((scratch, _))) =
            (value(LimitKey::Memory), value(LimitKey::TmpSize), value(LimitKey::ScratchSize))
        else {
            return;
        };
        if tmp.saturating_add(scratch) >= memory {
            let label = format!(
                "{} is not above {} + {}",
                LimitKey::Memory.format(Some(memory)),
                LimitKey::TmpSize.format(Some(tmp)),
                LimitKey::ScratchSize.format(Some(scratch))
            );
            let complaint = Complaint::new("`memory` must be above `tmp_size` and `scratch_size` together", label);
            problems.add(at, complaint.help("files in tmp and in a private scratch are kept in that memory"));
        }
    }

    fn finish(self, name: &str, origin: Origin, sha256: String) -> Option<Policy> {
        let runtimes = self
            .runtimes
            .into_iter()
            .map(|(name, runtime)| {
                let mut rules: BTreeMap<_, _> = runtime.modules.into_iter().map(|(name, action)| (name, action.value)).collect();
                let runtime = Runtime {
                    command: runtime.command?.value,
                    aliases: values(runtime.aliases.unwrap_or_default()),
                    extension: runtime.extension?,
                    venv: runtime.venv,
                    environment: runtime.environment,
                    modules: Modules { default: rules.remove(modules::DEFAULT), rules },
                };
                Some((name, runtime))
            })
            .collect::<Option<BTreeMap<_, _>>>()?;
        Some(Policy {
            name: name.to_owned(),
            origin,
            sha256,
            description: self.description,
            language: self.language?.value,
            filesystem: Filesystem {
                read_only: values(self.read_only),
                read_only_optional: values(self.read_only_optional),
                devices: values(self.devices),
            },
            identity: Identity { user: self.user, uid: self.uid, gid: self.gid, hostname: self.hostname },
            environment: Environment { set: self.set, accept: values(self.accept) },
            runtimes,
            limits: limits(&self.limits),
            limits_max: limits(&self.limits_max),
            seccomp: Seccomp {
                allow: values(self.allow),
                kill: values(self.kill),
                enosys: values(self.enosys),
                socket_families: values(self.socket_families),
                ioctl: values(self.ioctl),
            },
            egress: Egress { whitelist: Whitelist::new(values(self.whitelist)) },
            scratch: Scratch {
                access: self.access,
                create: self.create,
                home: self.home,
                read_only: values(self.scratch_read_only),
                hidden: values(self.hidden),
            },
            degrade: Degrade { rootless: values(self.rootless), root: values(self.root) },
            audit: Audit { mode: self.mode, preview: self.preview, alerts: values(self.alerts) },
            screen: Screen {
                actions: self.actions.into_iter().map(|(rule, action)| (rule, action.value)).collect(),
                modules: values(self.modules),
                builtins: values(self.builtins),
                approval_time: self.approval_time.unwrap_or(APPROVAL_TIME),
                approvers: values(self.approvers),
            },
        })
    }
}

fn values<T>(list: Vec<At<T>>) -> Vec<T> {
    list.into_iter().map(|item| item.value).collect()
}

fn limits(values: &LimitValues) -> Limits {
    let mut limits = Limits::default();
    for (key, at) in values {
        limits.set(*key, at.value);
    }
    limits
}

/// The name of a way to open scratch.
pub(crate) fn access_name(value: Access) -> &'static str {
    names::ACCESS.iter().find(|(_, access)| *access == value).map_or("", |(name, _)| name)
}

/// The name of a mode of the audit.
pub(crate) fn audit_mode(value: AuditMode) -> &'static str {
    names::AUDIT_MODES.iter().find(|(_, mode)| *mode == value).map_or("", |(name, _)| name)
}
