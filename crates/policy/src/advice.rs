//! What is valid in a policy and may mean something else than its author believed.
//!
//! Only the file itself is looked at, not what it extends. Nothing here refuses a policy.

use std::path::Path;

use stockade_protocol::{LimitKey, screen};

use crate::{
    diagnostic::{Diagnostic, Diagnostics, Located, quote},
    merge::MergedTable,
    model::AuditMode,
    written,
};

/// The first document that is read is the file itself.
const OWN: usize = 0;
/// Lists of which every item lets code do more.
const LOOSENING: [(&str, &str); 13] = [
    ("egress", "whitelist"),
    ("environment", "accept"),
    ("filesystem", "read_only"),
    ("filesystem", "read_only_optional"),
    ("filesystem", "devices"),
    ("filesystem", "images"),
    ("filesystem", "sockets"),
    ("seccomp", "allow"),
    ("seccomp", "socket_families"),
    ("seccomp", "ioctl"),
    ("scratch", "root"),
    ("degrade", "root"),
    ("degrade", "rootless"),
];

/// What is to be said of a merged policy. `text`: of its file; `extends`: it extends another.
pub(crate) fn of(merged: &MergedTable, text: &str, extends: bool) -> Diagnostics {
    let mut found = Diagnostics::default();
    defaults_without_maximum(merged, &mut found);
    screening_as_a_boundary(merged, text, &mut found);
    shown_secrets(merged, &mut found);
    sockets_in_shown_directories(merged, &mut found);
    variables(merged, &mut found);
    no_record(merged, &mut found);
    // What states every key, as `policy show` prints it, loosens nothing that can be told, and has
    // templates that it inherited.
    if extends {
        templates_of_no_runtime(merged, &mut found);
        loosenings_without_reason(merged, text, &mut found);
    }
    found
}

/// What the file itself adds to a list.
fn own<'m>(merged: &'m MergedTable, section: &str, key: &str) -> impl Iterator<Item = &'m Located<String>> {
    merged.list(section, key).iter().filter(|item| item.span.source == OWN)
}

/// Paths of the host that the file shows.
fn shown(merged: &MergedTable) -> impl Iterator<Item = &Located<String>> {
    ["read_only", "read_only_optional"].into_iter().flat_map(|key| own(merged, "filesystem", key))
}

/// Said whatever comment stands beside them.
fn shown_secrets(merged: &MergedTable, found: &mut Diagnostics) {
    for item in shown(merged) {
        let path = Path::new(&item.value);
        let parts = path.components().count();
        let (what, help) = if Path::new("/etc/shadow").starts_with(path) {
            ("the hashes of passwords", "name the files of /etc that the code needs")
        } else if Path::new("/root").starts_with(path) || path == Path::new("/home") || (path.starts_with("/home") && parts == 3) {
            ("a home directory, with its keys, tokens and histories", "name the directories below it that the code needs")
        } else {
            continue;
        };
        let title = format!("{} holds {what}", quote(&item.value));
        found.add(&item.span, Diagnostic::new(title, "code reads what the run's host user can read").help(help));
    }
}

/// Programs and settings, where no service listens.
const SYSTEM: [&str; 7] = ["/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc"];

/// Said once: a directory that is read-only inside still lets code connect to a socket in it.
fn sockets_in_shown_directories(merged: &MergedTable, found: &mut Diagnostics) {
    let has = |section, key, name: &str| merged.list(section, key).iter().any(|item| item.value == name);
    let opens = has("seccomp", "socket_families", "unix") && has("seccomp", "allow", "socket");
    let of_the_system = |item: &&Located<String>| SYSTEM.iter().any(|directory| Path::new(&item.value).starts_with(directory));
    if let Some(item) = shown(merged).find(|item| opens && !of_the_system(item)) {
        let title = format!("code can talk to services that listen on a UNIX socket below {}", quote(&item.value));
        let diagnostic = Diagnostic::new(title, "shown, and AF_UNIX is allowed");
        found.add(
            &item.span,
            diagnostic.help("if sockets lie there, remove `unix` from [seccomp] socket_families (`stockade help tighten`)"),
        );
    }
}

/// Variables that choose code, and values that should not stand in a file.
fn variables(merged: &MergedTable, found: &mut Diagnostics) {
    for item in own(merged, "environment", "accept") {
        let linker = match item.value.strip_suffix('*') {
            Some(prefix) => prefix.starts_with(LINKER) || LINKER.starts_with(prefix),
            None => item.value.starts_with(LINKER),
        };
        if linker {
            let title = format!("{} lets a request choose what the dynamic linker loads", quote(&item.value));
            found.add(&item.span, by_the_linker(title));
        }
    }
    let environment = merged.tables.get("environment").into_iter();
    let runtimes = merged.tables.get("runtimes").into_iter().flat_map(|runtimes| runtimes.tables.values());
    let set = environment.filter_map(|table| table.tables.get("set"));
    let set = set.chain(runtimes.filter_map(|runtime| runtime.tables.get("environment")));
    for (name, value) in set.flat_map(|table| &table.values).filter(|(_, value)| value.span.source == OWN) {
        if name.starts_with(LINKER) {
            found.add(&value.span, by_the_linker(format!("{} chooses what the dynamic linker loads", quote(name))));
        }
        if is_secret(name) {
            let diagnostic = Diagnostic::new(format!("{} looks like a secret", quote(name)), "code can read it, and print it");
            found.add(&value.span, diagnostic.help("keep secrets out of policies: a service outside can hold them"));
        }
    }
}

const LINKER: &str = "LD_";

fn by_the_linker(title: String) -> Diagnostic {
    let diagnostic = Diagnostic::new(title, "code that screening and module watching do not see");
    diagnostic.help("the sandbox holds that code as any other; leave the variable out unless a program needs it")
}

fn is_secret(name: &str) -> bool {
    let name = name.to_uppercase();
    ["_KEY", "_TOKEN"].iter().any(|end| name.ends_with(end)) || ["PASSWORD", "PASSWD", "SECRET"].iter().any(|part| name.contains(part))
}

fn no_record(merged: &MergedTable, found: &mut Diagnostics) {
    let mode = merged.value("audit", "mode").filter(|mode| mode.span.source == OWN);
    if let Some(mode) = mode.filter(|mode| mode.value.as_str() == Some(AuditMode::Off.name())) {
        let diagnostic = Diagnostic::new("no run and no refusal under this policy is recorded", "no record");
        found.add(&mode.span, diagnostic.help("`try` records where a record can be written, and never stops a run"));
    }
}

/// The file has a template that no runtime starts from.
fn templates_of_no_runtime(merged: &MergedTable, found: &mut Diagnostics) {
    let tables = |section| merged.tables.get(section).map(|table| &table.tables).into_iter().flatten();
    let used = |name: &str| {
        tables("runtimes").any(|(_, runtime)| runtime.values.get("template").and_then(|template| template.value.as_str()) == Some(name))
    };
    for (name, template) in tables("templates").filter(|(name, template)| template.span.source == OWN && !used(name)) {
        let diagnostic = Diagnostic::new(format!("no runtime starts from template `{name}`"), "of no use");
        found.add(&template.span, diagnostic.help(format!("write `template = \"{name}\"` under a runtime, such as [runtimes.python]")));
    }
}

/// A request may ask for more than a default, up to the maximum.
fn defaults_without_maximum(merged: &MergedTable, found: &mut Diagnostics) {
    let Some(limits) = merged.tables.get("limits") else { return };
    let Some(max) = limits.tables.get("max") else { return };
    for key in LimitKey::ALL {
        let (Some(own), Some(most)) = (limits.values.get(key.name()), max.values.get(key.name())) else { continue };
        let (Ok(value), Ok(maximum)) = (written::limit(key, &own.value), written::limit(key, &most.value)) else { continue };
        if own.span.source != OWN || most.span.source == OWN || maximum.unwrap_or(u64::MAX) <= value.unwrap_or(u64::MAX) {
            continue;
        }
        let name = key.name();
        let title = format!("`{name}` is only the default: a request may ask for up to {}", key.format(maximum));
        let help = format!(
            "to make it the most that a request gets, set `{name}` under [limits.max] too, or write `max = \"same\"` under [limits] for all of them"
        );
        found.add(&own.span, Diagnostic::new(title, "the default").also(&most.span, "the maximum that is inherited").help(help));
    }
}

/// Said once, and not where a comment beside a rule says `advisory`: what screening refuses can be
/// written so that screening does not see it.
fn screening_as_a_boundary(merged: &MergedTable, text: &str, found: &mut Diagnostics) {
    let rules = screen::Rule::ALL.iter().filter_map(|rule| merged.value("screen", rule.name()));
    let runtimes = merged.tables.get("runtimes").into_iter().flat_map(|runtimes| runtimes.tables.values());
    let watched = runtimes.filter_map(|runtime| runtime.tables.get("modules")).flat_map(|modules| modules.values.values());
    let denies = |value: &&Located<toml::Value>| value.span.source == OWN && value.value.as_str() == Some(screen::Action::Deny.name());
    let denied: Vec<&Located<toml::Value>> = rules.chain(watched).filter(denies).collect();
    if denied.iter().any(|value| comment_beside(text, value.span.start).is_some_and(|comment| comment.contains("advisory"))) {
        return;
    }
    if let Some(value) = denied.first() {
        let diagnostic = Diagnostic::new("screening is advisory: it is not a security boundary", "code can hide from this rule");
        found.add(
            &value.span,
            diagnostic
                .help("limits, [seccomp], [filesystem] and [egress] prevent; a comment with `advisory` beside the rule says that you know"),
        );
    }
}

/// A reader of the policy has to know why code may do more.
fn loosenings_without_reason(merged: &MergedTable, text: &str, found: &mut Diagnostics) {
    for (section, key) in LOOSENING {
        for item in own(merged, section, key) {
            if comment_beside(text, item.span.start).is_none() {
                let title = format!("{} has no reason beside it", quote(&item.value));
                let diagnostic = Diagnostic::new(title, format!("lets code do more: [{section}] {key}"));
                found.add(&item.span, diagnostic.help("say why in a comment, on this line or above it"));
            }
        }
    }
}

/// The line of a place with its comment, or the comment that is the line above it.
fn comment_beside(text: &str, at: usize) -> Option<&str> {
    let Some((before, after)) = text.split_at_checked(at) else { return Some("") };
    let begin = before.rfind('\n').map_or(0, |end| end + 1);
    let line = text[begin..].lines().next().unwrap_or(after);
    let above = before[..begin].lines().next_back().unwrap_or_default();
    if ends_with_comment(line) { Some(line) } else { Some(above).filter(|above| above.trim_start().starts_with('#')) }
}

/// Whether a line of TOML has a `#` outside its strings.
fn ends_with_comment(line: &str) -> bool {
    let mut within = None;
    let mut letters = line.chars();
    while let Some(letter) = letters.next() {
        match (within, letter) {
            (None, '#') => return true,
            (None, '"' | '\'') => within = Some(letter),
            (Some('"'), '\\') => drop(letters.next()),
            (Some(quote), _) if quote == letter => within = None,
            _ => {}
        }
    }
    false
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic, reason = "a test may panic")]

    use super::*;
    use crate::{
        keys::{self, Kind},
        lookup::{LookupContext, load_text, review},
    };

    fn titles(text: &str) -> Vec<String> {
        let path = std::env::temp_dir().join(format!("stockade-advice-{}-{:?}.toml", std::process::id(), std::thread::current().id()));
        std::fs::write(&path, format!("schema = 1\nextends = \"default\"\n{text}")).unwrap();
        let reviewed = review(path.to_str().unwrap(), &LookupContext::rootless(None));
        std::fs::remove_file(&path).unwrap();
        reviewed.unwrap().1.diagnostics().iter().map(|found| found.value.title.clone()).collect()
    }

    #[test]
    fn a_default_below_an_inherited_maximum_is_named() {
        let [title] = titles("[limits]\nprocesses = 1\n").try_into().unwrap();
        assert!(title.contains("`processes` is only the default") && title.contains("512"), "{title}");
        for tight in ["[limits]\nprocesses = 1\n[limits.max]\nprocesses = 1\n", "[limits]\nprocesses = 1\nmax = \"same\"\n", ""] {
            assert!(titles(tight).is_empty(), "{tight}");
        }
    }

    #[test]
    fn a_denying_rule_is_said_to_be_advice() {
        assert!(titles("[screen]\nprocess = \"deny\"\nnetwork = \"deny\"\n")[0].contains("advisory"));
        assert!(titles("[screen]\nprocess = \"note\"\n").is_empty());
        assert!(titles("[screen]\n# advisory: it tells honest code apart\nprocess = \"deny\"\nnetwork = \"deny\"\n").is_empty());
    }

    #[test]
    fn a_loosening_wants_a_reason() {
        assert!(titles("[egress]\nwhitelist = { add = [\"pypi.org:443\"] }\n")[0].contains("no reason"));
        for said in [
            "[egress]\n# for pip\nwhitelist = { add = [\"pypi.org:443\"] }\n",
            "[egress]\nwhitelist = { add = [\"pypi.org:443\"] } # for pip\n",
            "[filesystem]\nread_only_optional = { add = [\"/etc/#1\"] } # data\n",
        ] {
            assert!(titles(said).is_empty(), "{said}");
        }
        // A `#` in a string is no comment, and a comment is about one line.
        assert_eq!(titles("[filesystem]\nread_only_optional = { add = [\"/etc/a#b\", '/etc/#c'] }\n").len(), 2);
        let lines = "[egress]\n# for pip\nwhitelist = { add = [\"pypi.org:443\"] }\n[seccomp]\nallow = { add = [\"ptrace\"] }\n";
        let [title] = titles(lines).try_into().unwrap();
        assert!(title.contains("ptrace"), "{title}");
        for (section, key, item) in [("seccomp", "ioctl", "TIOCEXCL"), ("filesystem", "devices", "tty"), ("environment", "accept", "MINE")]
        {
            let found = titles(&format!("[{section}]\n{key} = {{ replace = [\"{item}\"] }}\n"));
            assert!(found.len() == 1 && found[0].contains("no reason"), "{key}: {found:?}");
        }
    }

    #[test]
    fn each_loosening_is_a_list_of_the_format() {
        for (section, name) in LOOSENING {
            let table = keys::TOP.iter().find(|key| key.name == section).unwrap();
            let Kind::Table(keys) = table.kind else { panic!("{section} is no table") };
            assert!(keys.iter().any(|key| key.name == name && matches!(key.kind, Kind::List(_))), "[{section}] {name}");
        }
    }

    #[test]
    fn the_same_maximum_of_no_limit_is_refused() {
        let load = |limits: &str| load_text(&format!("schema = 1\ndescription = \"x\"\nextends = \"default\"\n[limits]\n{limits}"));
        let refused = load("max = \"same\"\n").unwrap_err().to_string();
        assert!(refused.contains("changes nothing"), "{refused}");
        assert_eq!(load("processes = 3\nmax = \"same\"\n").unwrap().limits_max.get(LimitKey::Processes), Some(3));
    }

    #[test]
    fn a_module_that_is_denied_is_advice_too() {
        let [title] = titles("[runtimes.python.modules]\nsubprocess = \"deny\"\n").try_into().unwrap();
        assert!(title.contains("advisory"), "{title}");
        assert!(titles("[runtimes.python.modules]\nsubprocess = \"note\"\n").is_empty());
    }

    #[test]
    fn a_shown_home_and_the_hashes_of_passwords_are_named_whatever_comment_stands_there() {
        let lines = |path: &str| titles(&format!("[filesystem]\n# for a reason\nread_only = {{ add = [\"{path}\"] }}\n"));
        for path in ["/etc", "/etc/shadow"] {
            assert!(lines(path)[0].contains("passwords"), "{:?}", lines(path));
        }
        for path in ["/root", "/home", "/home/u"] {
            assert!(lines(path)[0].contains("home directory"), "{:?}", lines(path));
        }
        assert!(lines("/etc/ssl").is_empty());
        let [title] = lines("/home/u/data").try_into().unwrap();
        assert!(title.contains("UNIX socket"), "{title}");
    }

    #[test]
    fn sockets_in_a_shown_directory_are_named_where_code_may_open_one() {
        let shown = "[filesystem]\nread_only = { add = [\"/srv/a\", \"/srv/b\"] } # data\n";
        let [title] = titles(shown).try_into().unwrap();
        assert!(title.contains("UNIX socket") && title.contains("/srv/a"), "{title}");
        assert!(titles(&format!("{shown}[seccomp]\nsocket_families = {{ remove = [\"unix\"] }}\n")).is_empty());
    }

    #[test]
    fn variables_that_choose_code_or_hold_secrets_are_named() {
        for accept in ["LD_PRELOAD", "LD_*", "L*"] {
            let [title] = titles(&format!("[environment]\naccept = {{ add = [\"{accept}\"] }} # mine\n")).try_into().unwrap();
            assert!(title.contains("dynamic linker"), "{title}");
        }
        assert!(titles("[environment.set]\nLD_LIBRARY_PATH = \"/opt\"\n")[0].contains("dynamic linker"));
        for name in ["AWS_KEY", "API_TOKEN", "DB_PASSWORD", "client_secret"] {
            assert!(titles(&format!("[environment.set]\n{name} = \"x\"\n"))[0].contains("looks like a secret"), "{name}");
        }
        assert!(titles("[environment]\naccept = { add = [\"EXTRA\"] } # mine\n[environment.set]\nKEYS = \"1\"\n").is_empty());
    }

    #[test]
    fn a_template_that_no_runtime_names_is_named() {
        let template = "[templates.data]\nimports = [\"json\"]\n";
        let [title] = titles(template).try_into().unwrap();
        assert!(title.contains("no runtime starts from template `data`"), "{title}");
        assert!(titles(&format!("{template}[runtimes.python]\ntemplate = \"data\"\n")).is_empty());
        // One that is inherited is not the file's own.
        assert!(titles("[runtimes.python]\ntemplate = \"none\"\n").is_empty());
    }

    #[test]
    fn a_policy_without_records_is_named() {
        assert!(titles("[audit]\nmode = \"off\"\n")[0].contains("recorded"));
        assert!(titles("[audit]\nmode = \"try\"\n").is_empty());
    }

    #[test]
    fn a_policy_that_extends_nothing_needs_no_reasons() {
        let whole = crate::show(&crate::load_shipped("default").unwrap());
        let path = std::env::temp_dir().join(format!("stockade-advice-{}-whole.toml", std::process::id()));
        std::fs::write(&path, &whole).unwrap();
        let reviewed = review(path.to_str().unwrap(), &LookupContext::rootless(None));
        std::fs::remove_file(&path).unwrap();
        let titles: Vec<String> = reviewed.unwrap().1.diagnostics().iter().map(|found| found.value.title.clone()).collect();
        assert!(titles.iter().all(|title| !title.contains("no reason")), "{titles:?}");
    }
}
