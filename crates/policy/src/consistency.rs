//! Whether the values of a merged policy go together, each mistake with its place.
//!
//! Single values are checked before (`merge`); what a host can do with them is the plan's
//! question.

use std::collections::BTreeMap;

use stockade_protocol::{
    LimitKey, NO_TEMPLATE,
    screen::{Action, Rule},
};

use crate::{
    check,
    diagnostic::{Diagnostic, Diagnostics, Located, SourceSpan, quote},
    filter::MAX_IOCTLS,
    merge::MergedTable,
    model::{AuditMode, OUTPUT, Origin, Policy, SocketFamily},
    names,
    plan::MIN_MEMORY,
    whitelist::{self, Protocol},
    written,
};

/// The most modules that a template imports.
const MAX_IMPORTS: usize = 32;

/// Makes a policy of the merged documents, if nothing is wrong.
pub(crate) fn policy(merged: MergedTable, name: &str, origin: Origin, sha256: &str, problems: &mut Diagnostics) -> Option<Policy> {
    check_runtimes(&merged, problems);
    check_templates(&merged, problems);
    if !problems.is_empty() {
        return None;
    }
    let mut policy = match written::read(merged.clone().into_toml(), name, origin, sha256) {
        Ok(policy) => policy,
        Err(error) => {
            problems.add(&merged.span, Diagnostic::new(format!("the merged policy cannot be read: {error}"), "a bug in stockade"));
            return None;
        }
    };
    let checks = ConsistencyChecks { merged: &merged, policy: &policy, problems };
    let language = checks.check();
    policy.language = language?;
    problems.is_empty().then_some(policy)
}

/// What each runtime must have wherever it comes from, and names that are taken twice.
fn check_runtimes(merged: &MergedTable, problems: &mut Diagnostics) {
    let Some(runtimes) = merged.tables.get("runtimes").map(|table| &table.tables) else { return };
    let mut taken: BTreeMap<&str, &SourceSpan> = runtimes.iter().map(|(name, runtime)| (name.as_str(), &runtime.span)).collect();
    for (name, runtime) in runtimes {
        for (key, missing) in
            [("command", !runtime.lists.contains_key("command")), ("extension", !runtime.values.contains_key("extension"))]
        {
            if missing {
                let diagnostic = Diagnostic::new(format!("`{key}` is missing from `[runtimes.{name}]`"), "");
                problems.add(&runtime.span, diagnostic.help("nothing of this name is inherited"));
            }
        }
        check_compiled(name, runtime, problems);
        let is_python = runtime.values.get("extension").is_some_and(|extension| extension.value.as_str() == Some("py"));
        if let Some(rule) = runtime.tables.get("modules").and_then(|modules| modules.values.values().next())
            && !is_python
        {
            let diagnostic = Diagnostic::new(format!("`{name}` is no Python, which alone can be watched for its modules"), "of no use");
            problems.add(&rule.span, diagnostic.help("a runtime is Python where its `extension` is \"py\""));
        }
        for alias in runtime.lists.get("aliases").into_iter().flatten() {
            match taken.get(alias.value.as_str()) {
                Some(other) => {
                    let diagnostic = Diagnostic::new(format!("the name {} is taken", quote(&alias.value)), "used again");
                    problems.add(&alias.span, diagnostic.also(other, "first here"));
                }
                None => drop(taken.insert(&alias.value, &alias.span)),
            }
        }
    }
}

/// That a command and a compiler belong together, and what a compiled language has no use for.
fn check_compiled(name: &str, runtime: &MergedTable, problems: &mut Diagnostics) {
    let holds_output = |word: &&Located<String>| word.value.contains(OUTPUT);
    let output = runtime.lists.get("command").into_iter().flatten().find(holds_output);
    let compile = runtime.lists.get("compile").and_then(|words| words.first());
    match (compile, output) {
        (None, Some(word)) => {
            let diagnostic = Diagnostic::new(format!("nothing makes `{OUTPUT}` in `[runtimes.{name}]`"), "used here");
            problems.add(&word.span, diagnostic.help("add `compile`, the compiler and its arguments"));
        }
        (Some(word), None) => {
            let diagnostic = Diagnostic::new(format!("the command of `{name}` does not run what `compile` makes"), "of no use");
            problems.add(&word.span, diagnostic.help(format!("write `command = [\"{OUTPUT}\"]`, or name `{OUTPUT}` in an argument of it")));
        }
        (Some(word), Some(_)) => {
            for key in ["venv", "template"] {
                let Some(value) = runtime.values.get(key).filter(|value| value.value.as_str() != Some(NO_TEMPLATE)) else { continue };
                let diagnostic = Diagnostic::new(format!("`{key}` has no use for `{name}`, whose code is compiled"), "of no use");
                problems.add(&value.span, diagnostic.also(&word.span, "compiled by this"));
            }
        }
        (None, None) => {}
    }
}

/// What each template imports, and that a template is there for each runtime that names one.
fn check_templates(merged: &MergedTable, problems: &mut Diagnostics) {
    let tables = |section| merged.tables.get(section).map(|table| &table.tables).into_iter().flatten();
    for (_, template) in tables("templates") {
        let imports = template.lists.get("imports").map_or(&[][..], Vec::as_slice);
        if let Some(module) = imports.get(MAX_IMPORTS) {
            let diagnostic = Diagnostic::new(format!("more than {MAX_IMPORTS} names in `imports`"), "one too many");
            problems.add(&module.span, diagnostic.help("name a module that imports several others"));
        }
        for (index, module) in imports.iter().enumerate() {
            if let Some(other) = find(&imports[..index], module) {
                let diagnostic = Diagnostic::new(format!("{} is already there", quote(&module.value)), "a line without effect");
                problems.add(&module.span, diagnostic.also(&other.span, "first here"));
            }
        }
    }
    let known: Vec<&str> = tables("templates").map(|(name, _)| name.as_str()).collect();
    for (_, runtime) in tables("runtimes") {
        let Some(written) = runtime.values.get("template") else { continue };
        let name = written.value.as_str().unwrap_or_default();
        if name != NO_TEMPLATE && !known.contains(&name) {
            let diagnostic = Diagnostic::new(format!("unknown template {}", quote(name)), format!("there is no [templates.{name}]"));
            let guess = names::nearest(name, known.iter().copied()).map(|name| format!("did you mean `{name}`? ")).unwrap_or_default();
            let known = if known.is_empty() { "the policy has no template".to_owned() } else { format!("known: {}", known.join(", ")) };
            let help = format!("{guess}{known}; define [templates.{name}], or write `template = \"none\"`");
            problems.add(&written.span, diagnostic.help(help));
        }
    }
}

struct ConsistencyChecks<'c> {
    merged: &'c MergedTable,
    policy: &'c Policy,
    problems: &'c mut Diagnostics,
}

impl ConsistencyChecks<'_> {
    /// Makes all checks; the runtime of a request that names none.
    fn check(mut self) -> Option<String> {
        let language = self.check_language();
        self.check_limits();
        self.check_paths();
        self.check_syscalls();
        self.check_ioctls();
        self.check_egress();
        self.check_screen();
        self.check_audit();
        language
    }

    fn check_language(&mut self) -> Option<String> {
        let (language, runtimes) = (&self.policy.language, &self.policy.runtimes);
        let found = runtimes.iter().find(|(name, runtime)| *name == language || runtime.aliases.contains(language));
        if found.is_none() {
            let known = runtimes.iter().flat_map(|(name, runtime)| runtime.aliases.iter().chain([name]));
            let mut known: Vec<&str> = known.map(String::as_str).collect();
            known.sort_unstable();
            if let Some(written) = self.merged.values.get("language") {
                self.problems.add(&written.span, check::unknown("runtime", language, known.into_iter()));
            }
        }
        found.map(|(name, _)| name.clone())
    }

    fn check_limits(&mut self) {
        let Some(limits) = self.merged.tables.get("limits") else { return };
        let maximums = limits.tables.get("max").map(|max| &max.values);
        let span = |key: LimitKey| limits.values.get(key.name()).map(|value| &value.span);
        let max_span = |key: LimitKey| maximums.and_then(|max| max.get(key.name())).map(|value| &value.span);
        for (key, value) in self.policy.limits.iter() {
            let max = self.policy.limits_max.get(key);
            // No limit is above every limit.
            if let (Some(at), Some(max_at)) = (span(key), max_span(key))
                && value.unwrap_or(u64::MAX) > max.unwrap_or(u64::MAX)
            {
                let title = format!("`{}` is above its own maximum", key.name());
                let diagnostic = Diagnostic::new(title, format!("{} by default", key.format(value)));
                self.problems.add(at, diagnostic.also(max_at, format!("at most {}", key.format(max))));
            }
        }
        let memory = LimitKey::Memory;
        for (limits, at) in [(&self.policy.limits, span(memory)), (&self.policy.limits_max, max_span(memory))] {
            let value = limits.get(memory);
            if let Some(at) = at.filter(|_| value.is_some_and(|value| value < MIN_MEMORY)) {
                let label = format!("{} is too little for the sandbox itself", memory.format(value));
                let help = format!("at least {}", memory.format(Some(MIN_MEMORY)));
                self.problems.add(at, Diagnostic::new("`memory` is too small", label).help(help));
            }
        }
        let value = |key| self.policy.limits.get(key);
        let (Some(total), Some(tmp), Some(scratch)) = (value(memory), value(LimitKey::TmpSize), value(LimitKey::ScratchSize)) else {
            return;
        };
        if let Some(at) = span(memory).filter(|_| tmp.saturating_add(scratch) >= total) {
            let label = format!(
                "{} is not above {} + {}",
                memory.format(Some(total)),
                LimitKey::TmpSize.format(Some(tmp)),
                LimitKey::ScratchSize.format(Some(scratch))
            );
            let diagnostic = Diagnostic::new("`memory` must be above `tmp_size` and `scratch_size` together", label);
            self.problems.add(at, diagnostic.help("files in tmp and in a private scratch are kept in that memory"));
        }
    }

    fn check_paths(&mut self) {
        let required = self.merged.list("filesystem", "read_only");
        for path in self.merged.list("filesystem", "read_only_optional") {
            if let Some(other) = find(required, path) {
                let diagnostic = Diagnostic::new(format!("{} is both optional and required", quote(&path.value)), "optional here");
                self.problems.add(&path.span, diagnostic.also(&other.span, "required here"));
            }
        }
    }

    fn check_syscalls(&mut self) {
        for (earlier, later) in [("allow", "kill"), ("allow", "enosys"), ("kill", "enosys")] {
            let list = self.merged.list("seccomp", earlier);
            for call in self.merged.list("seccomp", later) {
                if let Some(other) = find(list, call) {
                    let title = format!("{} is in `{earlier}` and in `{later}`", quote(&call.value));
                    let diagnostic = Diagnostic::new(title, format!("in `{later}` here"));
                    self.problems.add(&call.span, diagnostic.also(&other.span, format!("in `{earlier}` here")));
                }
            }
        }
    }

    fn check_ioctls(&mut self) {
        if let Some(request) = self.merged.list("seccomp", "ioctl").get(MAX_IOCTLS) {
            let diagnostic = Diagnostic::new(format!("more than {MAX_IOCTLS} ioctl requests"), "one too many");
            let help = format!("the filter compares at most {MAX_IOCTLS}; list those that the code needs");
            self.problems.add(&request.span, diagnostic.help(help));
        }
    }

    fn check_egress(&mut self) {
        let places = self.merged.list("egress", "whitelist");
        let rules: Vec<_> = self.policy.egress.whitelist.rules().iter().zip(places).collect();
        for (index, (rule, at)) in rules.iter().enumerate() {
            if let Some((other, other_at)) = rules[..index].iter().find(|(other, _)| whitelist::contradict(rule, other)) {
                let (tcp, named) = if rule.protocol == Protocol::AnyTcp { (rule, other) } else { (other, rule) };
                let [tcp, named] = [tcp, named].map(|rule| quote(&rule.to_string()));
                let title = format!("conflicting rules for one port: {tcp} allows any TCP, {named} only TLS and HTTP");
                let diagnostic = Diagnostic::new(title, "this rule");
                self.problems.add(&at.span, diagnostic.also(&other_at.span, "conflicts with this one"));
            }
        }
        let opens = self.policy.seccomp.socket_families.iter().any(|family| matches!(family, SocketFamily::Inet | SocketFamily::Inet6));
        if let Some(rule) = places.first().filter(|_| !opens) {
            let diagnostic = Diagnostic::new("the rule has no effect: this policy lets no program open an Internet socket", "of no use");
            let help = "add `inet` to `socket_families` under [seccomp], and the calls that sockets need";
            self.problems.add(&rule.span, diagnostic.help(help));
        }
    }

    /// A list of names and the rule about what is outside of it need each other.
    fn check_screen(&mut self) {
        let screen = &self.policy.screen;
        for (key, rule) in [("modules", Rule::Module), ("builtins", Rule::Builtin)] {
            let action = self.merged.value("screen", rule.name()).filter(|_| screen.action(rule) != Action::Allow);
            let rule = rule.name();
            match (self.merged.list("screen", key).first(), action) {
                (Some(item), None) => {
                    let title = format!("`{key}` has no effect: `{rule}`, the rule for all other names, is not set");
                    let help = format!("set `{rule}` to \"note\", \"approve\" or \"deny\"");
                    self.problems.add(&item.span, Diagnostic::new(title, "of no use").help(help));
                }
                (None, Some(action)) => {
                    let title = format!("`{rule}` has no effect: `{key}`, the list of allowed names, is empty");
                    let help = format!("name in `{key}` what may be used");
                    self.problems.add(&action.span, Diagnostic::new(title, "of no use").help(help));
                }
                _ => {}
            }
        }
        if let Some(approver) = self.merged.list("screen", "approvers").first().filter(|_| !screen.wants_approval()) {
            let diagnostic = Diagnostic::new("`approvers` has no effect: no screening rule is set to \"approve\"", "of no use");
            self.problems.add(&approver.span, diagnostic.help("set a rule to \"approve\", or name no approvers"));
        }
    }

    fn check_audit(&mut self) {
        let alerts = self.merged.list("audit", "alerts");
        if let Some(alert) = alerts.first().filter(|_| self.policy.audit.mode == AuditMode::Off) {
            let diagnostic = Diagnostic::new("`alerts` has no effect: nothing is audited under `mode = \"off\"`", "of no use");
            self.problems.add(&alert.span, diagnostic.help("remove the alerts, or set `mode` to \"try\" or \"required\""));
        }
    }
}

fn find<'l>(list: &'l [Located<String>], item: &Located<String>) -> Option<&'l Located<String>> {
    list.iter().find(|other| other.value == item.value)
}
