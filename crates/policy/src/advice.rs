//! What is valid in a policy and may mean something else than its author believed.
//!
//! Only the file itself is looked at, not what it extends. Nothing here refuses a policy.

use stockade_protocol::{LimitKey, screen};

use crate::{
    diagnostic::{Diagnostic, Diagnostics, Located, quote},
    merge::MergedTable,
    written,
};

/// The first document that is read is the file itself.
const OWN: usize = 0;
/// Lists of which every item lets code do more.
const LOOSENING: [(&str, &str); 11] = [
    ("egress", "whitelist"),
    ("environment", "accept"),
    ("filesystem", "read_only"),
    ("filesystem", "read_only_optional"),
    ("filesystem", "devices"),
    ("seccomp", "allow"),
    ("seccomp", "socket_families"),
    ("seccomp", "ioctl"),
    ("scratch", "root"),
    ("degrade", "root"),
    ("degrade", "rootless"),
];

/// What is to be said of a merged policy. `text`: of its file.
pub(crate) fn of(merged: &MergedTable, text: &str) -> Diagnostics {
    let mut found = Diagnostics::default();
    defaults_without_maximum(merged, &mut found);
    screening_as_a_boundary(merged, &mut found);
    loosenings_without_reason(merged, text, &mut found);
    found
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

/// Said once: what screening refuses can be written so that screening does not see it.
fn screening_as_a_boundary(merged: &MergedTable, found: &mut Diagnostics) {
    let own = |rule: &screen::Rule| merged.value("screen", rule.name()).filter(|value| value.span.source == OWN);
    let denies = |value: &&Located<toml::Value>| value.value.as_str() == Some(screen::Action::Deny.name());
    if let Some(value) = screen::Rule::ALL.iter().filter_map(own).find(denies) {
        let diagnostic = Diagnostic::new("screening is advisory: it is not a security boundary", "code can hide from this rule");
        found.add(&value.span, diagnostic.help("what code must not do, limits, [seccomp], [filesystem] and [egress] prevent"));
    }
}

/// A reader of the policy has to know why code may do more.
fn loosenings_without_reason(merged: &MergedTable, text: &str, found: &mut Diagnostics) {
    for (section, key) in LOOSENING {
        for item in merged.list(section, key).iter().filter(|item| item.span.source == OWN) {
            if !has_comment(text, item.span.start) {
                let title = format!("{} has no reason beside it", quote(&item.value));
                let diagnostic = Diagnostic::new(title, format!("lets code do more: [{section}] {key}"));
                found.add(&item.span, diagnostic.help("say why in a comment, on this line or above it"));
            }
        }
    }
}

/// Whether a comment is on the line of a place, or is the line above it.
fn has_comment(text: &str, at: usize) -> bool {
    let Some((before, after)) = text.split_at_checked(at) else { return true };
    let begin = before.rfind('\n').map_or(0, |end| end + 1);
    let line = text[begin..].lines().next().unwrap_or(after);
    let above = before[..begin].lines().next_back().unwrap_or_default();
    ends_with_comment(line) || above.trim_start().starts_with('#')
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
        let path = std::env::temp_dir().join(format!("stockade-advice-{}-{}.toml", std::process::id(), text.len()));
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
    }

    #[test]
    fn a_loosening_wants_a_reason() {
        assert!(titles("[egress]\nwhitelist = { add = [\"pypi.org:443\"] }\n")[0].contains("no reason"));
        for said in [
            "[egress]\n# for pip\nwhitelist = { add = [\"pypi.org:443\"] }\n",
            "[egress]\nwhitelist = { add = [\"pypi.org:443\"] } # for pip\n",
            "[filesystem]\nread_only_optional = { add = [\"/srv/#1\"] } # data\n",
        ] {
            assert!(titles(said).is_empty(), "{said}");
        }
        // A `#` in a string is no comment, and a comment is about one line.
        assert_eq!(titles("[filesystem]\nread_only_optional = { add = [\"/srv/a#b\", '/srv/#c'] }\n").len(), 2);
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
}
