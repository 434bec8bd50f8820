//! The policy line that adds rules to a whitelist.
//!
//! A rule that contradicts a new one is removed by the same line, because contradicting
//! rules are refused at load. The line is a whole statement of TOML, to stand above the first
//! section. It does not judge the peers.

use stockade_policy::whitelist::{Protocol, Rule, Target, Whitelist, contradict, is_closed};
use stockade_protocol::{DenialReason, EgressDenial};

use super::quoted;

/// The line that adds a rule to this whitelist; none if the whitelist has the rule, or no
/// policy accepts it.
pub fn peer(whitelist: &Whitelist, rule: &str) -> Option<String> {
    line(whitelist, &[rule.parse().ok()?])
}

/// The one line that adds the rules of all these refusals but those of closed addresses, the
/// host's own among them, each of which wants its own decision. Lines for single rules would
/// replace one another.
pub fn peers(whitelist: &Whitelist, denied: &[EgressDenial]) -> Option<String> {
    let mut rules: Vec<Rule> = denied.iter().filter_map(open_rule).collect();
    // Of two that contradict each other, the one that allows more stays.
    rules.sort_by_key(|rule| rule.protocol != Protocol::AnyTcp);
    let mut chosen: Vec<Rule> = Vec::new();
    for rule in rules {
        if !chosen.iter().any(|other| *other == rule || contradict(other, &rule)) {
            chosen.push(rule);
        }
    }
    line(whitelist, &chosen)
}

/// The rule that a refusal offers, unless it would open a closed address.
fn open_rule(denied: &EgressDenial) -> Option<Rule> {
    // The gate knows the host's own addresses.
    if matches!(denied.reason, DenialReason::ForbiddenRange | DenialReason::ResolvedToForbiddenRange) {
        return None;
    }
    let rule: Rule = denied.allow.as_deref()?.parse().ok()?;
    let opens = matches!(&rule.target, Target::Network(network) if is_closed(network.address()));
    (!opens).then_some(rule)
}

fn line(whitelist: &Whitelist, rules: &[Rule]) -> Option<String> {
    let new: Vec<&Rule> = rules.iter().filter(|rule| !whitelist.rules().contains(rule)).collect();
    let mut add: Vec<String> = new.iter().map(ToString::to_string).collect();
    let mut remove = Vec::new();
    for other in whitelist.rules() {
        let mut contradicting = new.iter().filter(|rule| contradict(rule, other)).peekable();
        if contradicting.peek().is_none() {
            continue;
        }
        remove.push(other.to_string());
        // Ports that no new rule has keep their rule.
        let left = contradicting.try_fold(other.ports.clone(), |ports, rule| ports.without(&rule.ports));
        add.extend(left.map(|ports| Rule { ports, ..other.clone() }.to_string()));
    }
    let list = |name: &str, rules: Vec<String>| {
        let rules: Vec<String> = rules.iter().map(|rule| quoted(rule)).collect();
        (!rules.is_empty()).then(|| format!("{name} = [{}]", rules.join(", ")))
    };
    let changes: Vec<String> = [list("add", add), list("remove", remove)].into_iter().flatten().collect();
    (!changes.is_empty()).then(|| format!("egress.whitelist = {{ {} }}", changes.join(", ")))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic, reason = "a test may panic")]
    use stockade_policy::{load_shipped, load_text};
    use stockade_protocol::DenialKind;

    use super::*;
    use crate::compare::compare;

    fn denial(rule: &str, reason: DenialReason) -> EgressDenial {
        EgressDenial {
            kind: DenialKind::Connect,
            host: None,
            addr: None,
            port: None,
            proto: None,
            sni: None,
            qtype: None,
            reason,
            allow: Some(rule.to_owned()),
            line: None,
            count: 1,
            first_ms: 0,
        }
    }

    #[test]
    fn no_line_for_all_opens_a_closed_address() {
        let whitelist = Whitelist::try_from(vec!["10.0.5.0/24:80".to_owned()]).unwrap();
        for rule in ["169.254.169.254:80", "[64:ff9b::a9fe:a9fe]:80", "[2002:a9fe:a9fe::1]:80", "[2001:0:a9fe:a9fe::1]:80"] {
            assert_eq!(peers(&whitelist, &[denial(rule, DenialReason::NoRule)]), None, "{rule}");
        }
        for reason in [DenialReason::ForbiddenRange, DenialReason::ResolvedToForbiddenRange] {
            assert_eq!(peers(&whitelist, &[denial("10.0.5.1:80", reason)]), None, "{reason:?}");
        }
        for rule in ["[64:ff9b::a00:507]:80", "[2002:a00:507::1]:80", "10.0.6.1:80"] {
            let line = peers(&whitelist, &[denial(rule, DenialReason::NoRule)]);
            assert!(line.is_some_and(|line| line.contains(rule)), "the control: {rule}");
        }
    }

    #[test]
    fn a_contradicting_rule_is_removed_by_the_same_line() {
        let whitelist = |rules: &[&str]| Whitelist::try_from(rules.iter().map(|rule| (*rule).to_owned()).collect::<Vec<_>>()).unwrap();
        let rules = whitelist(&["pypi.org:80,443", "10.0.0.0/8:443"]);
        for (rule, expected) in [
            ("example.org:443", Some("egress.whitelist = { add = [\"example.org:443\"] }")),
            ("pypi.org:8080/tcp", Some("egress.whitelist = { add = [\"pypi.org:8080/tcp\"] }")),
            (
                "pypi.org:443/tcp",
                Some("egress.whitelist = { add = [\"pypi.org:443/tcp\", \"pypi.org:80\"], remove = [\"pypi.org:80,443\"] }"),
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
            let text = format!("schema = 1\ndescription = \"x\"\nextends = \"pypi\"\n{line}\n");
            let allowing = load_text(&text).unwrap_or_else(|error| panic!("{line}: {error}"));
            assert_eq!(compare(&pypi, &allowing).more.len(), 1, "{line}");
            assert_eq!(compare(&pypi, &allowing).less, []);
        }
    }

    #[test]
    fn rules_for_ports_of_one_rule_are_added_by_one_line() {
        let text = |line: &str| {
            format!(
                "schema = 1\ndescription = \"x\"\nextends = \"pypi\"\negress.whitelist = {{ add = [\"api.example:80,443,8080\"] }}\n{line}"
            )
        };
        let policy = load_text(&text("")).unwrap();
        let whitelist = &policy.egress.whitelist;
        let rules = [
            "api.example:443/tcp",
            "api.example:80/tcp",
            "api.example:443/tcp",
            "169.254.169.254:80",
            "b.example:443",
            "b.example:443/tcp",
        ];
        let of = |rules: &[&str]| -> Vec<EgressDenial> { rules.iter().map(|rule| denial(rule, DenialReason::NoRule)).collect() };
        let line = peers(whitelist, &of(&rules)).unwrap();
        let expected = "egress.whitelist = { add = [\"api.example:443/tcp\", \"api.example:80/tcp\", \"b.example:443/tcp\", \"api.example:8080\"], remove = [\"api.example:80,443,8080\"] }";
        assert_eq!(line, expected);
        // Each alone would take the other's port away.
        let alone = rules.map(|rule| peer(whitelist, rule).unwrap());
        assert!(alone[0].contains("api.example:80,8080") && alone[1].contains("api.example:443,8080"), "{alone:?}");
        assert_eq!(peers(whitelist, &of(&["169.254.169.254:80", "nonsense"])), None);
        let child = Whitelist::try_from(vec!["api.example:80,443,8080".to_owned()]).unwrap();
        assert!(peers(&child, &of(&["api.example:80,443,8080"])).is_none());
    }
}
