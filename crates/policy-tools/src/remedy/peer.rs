//! The policy line that adds a rule to a whitelist.
//!
//! A rule that contradicts the new one is removed by the same line, because contradicting
//! rules are refused at load. It does not judge the peer.

use stockade_policy::whitelist::{Rule, Whitelist, contradict};

use super::{line, quoted};

/// The line that adds a rule to this whitelist; none if the whitelist has the rule, or no
/// policy accepts it.
pub fn peer(whitelist: &Whitelist, rule: &str) -> Option<String> {
    let rule: Rule = rule.parse().ok()?;
    if whitelist.rules().contains(&rule) {
        return None;
    }
    let (mut add, mut remove) = (vec![rule.to_string()], Vec::new());
    for other in whitelist.rules().iter().filter(|other| contradict(&rule, other)) {
        remove.push(other.to_string());
        // Ports that the new rule does not have keep their rule.
        add.extend(other.ports.without(&rule.ports).map(|ports| Rule { ports, ..other.clone() }.to_string()));
    }
    let list = |name: &str, rules: Vec<String>| {
        let rules: Vec<String> = rules.iter().map(|rule| quoted(rule)).collect();
        (!rules.is_empty()).then(|| format!("{name} = [{}]", rules.join(", ")))
    };
    let changes: Vec<String> = [list("add", add), list("remove", remove)].into_iter().flatten().collect();
    Some(line("egress", &[format!("whitelist = {{ {} }}", changes.join(", "))]))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic, reason = "a test may panic")]
    use stockade_policy::{load_shipped, load_text};

    use super::*;
    use crate::compare::compare;

    #[test]
    fn a_contradicting_rule_is_removed_by_the_same_line() {
        let whitelist = |rules: &[&str]| Whitelist::try_from(rules.iter().map(|rule| (*rule).to_owned()).collect::<Vec<_>>()).unwrap();
        let rules = whitelist(&["pypi.org:80,443", "10.0.0.0/8:443"]);
        for (rule, expected) in [
            ("example.org:443", Some("[egress] whitelist = { add = [\"example.org:443\"] }")),
            ("pypi.org:8080/tcp", Some("[egress] whitelist = { add = [\"pypi.org:8080/tcp\"] }")),
            (
                "pypi.org:443/tcp",
                Some("[egress] whitelist = { add = [\"pypi.org:443/tcp\", \"pypi.org:80\"], remove = [\"pypi.org:80,443\"] }"),
            ),
            ("10.0.0.0/8:443", None),
            ("localhost:80", None),
        ] {
            assert_eq!(peer(&rules, rule).as_deref(), expected, "{rule}");
        }
    }

    #[test]
    fn every_line_loads_in_a_policy_that_extends_the_first() {
        let pypi = load_shipped("pypi").unwrap();
        for rule in ["pypi.org:443/tcp", "example.org:443", "169.254.169.254:80", "[2001:db8::1]:443"] {
            let line = peer(&pypi.egress.whitelist, rule).unwrap();
            let (section, rest) = line.split_once("] ").unwrap();
            let text = format!("schema = 1\ndescription = \"x\"\nextends = \"pypi\"\n{section}]\n{rest}\n");
            let allowing = load_text(&text).unwrap_or_else(|error| panic!("{line}: {error}"));
            assert_eq!(compare(&pypi, &allowing).more.len(), 1, "{line}");
            assert_eq!(compare(&pypi, &allowing).less, []);
        }
    }
}
