//! Limits that ended a run or refused something: the value in force, the maximum of a request,
//! and the lines that double it.
//!
//! A doubled limit may need more memory: then the remedy raises `memory` as well. It does not
//! know what the host can give.

use stockade_policy::{model::Policy, plan::Plan};
use stockade_protocol::{LimitDenial, LimitKey, Limits, Quantity};

/// How to raise a limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LimitRemedy {
    /// Who set the value: the policy, or the request below it.
    pub rule: String,
    /// The lines that double it; none if the policy's own value is at least that.
    pub allow: Option<String>,
    /// What the code's author can do.
    pub help: String,
    /// The values.
    pub limit: LimitDenial,
}

/// The remedy for a limit of a plan.
pub fn limit(policy: &Policy, plan: &Plan, key: LimitKey, peak: Option<u64>) -> LimitRemedy {
    if plan.callers_limits.contains(&key) {
        return of_caller(policy, &plan.limits, key, peak);
    }
    of_policy(policy, &plan.limits, plan.scratch.host, key, peak)
}

/// The remedy for a hard limit of the process that starts stockade, which no policy and no request
/// can raise.
fn of_caller(policy: &Policy, limits: &Limits, key: LimitKey, peak: Option<u64>) -> LimitRemedy {
    let flag = match key {
        LimitKey::Cpu => " -t",
        LimitKey::FileSize => " -f",
        LimitKey::Stack => " -s",
        LimitKey::OpenFiles => " -n",
        LimitKey::AddressSpace => " -v",
        _ => "",
    };
    let value = key.format(limits.get(key));
    LimitRemedy {
        rule: format!("the caller's hard limit (ulimit{flag})"),
        allow: None,
        help: format!(
            "the process that starts stockade may have no more than {value}: raise the hard limit there (ulimit -H{})",
            flag.trim_start_matches(" -")
        ),
        limit: LimitDenial {
            key: key.name(),
            value,
            peak: peak.map(|peak| key.format(Some(peak))),
            maximum: key.format(policy.limits_max.get(key)),
            request: None,
            raise_maximum: None,
        },
    }
}

/// The remedy for a limit of the policy's or the request's. `limits` were in force. The size of a
/// host scratch does not count as memory.
fn of_policy(policy: &Policy, limits: &Limits, host_scratch: bool, key: LimitKey, peak: Option<u64>) -> LimitRemedy {
    let (value, most) = (limits.get(key), policy.limits_max.get(key));
    let twice = value.map(|value| value.saturating_mul(2));
    let by_request = limits.get(key) != policy.limits.get(key);
    let rule = if by_request { format!("the request's limits.{}", key.name()) } else { format!("[limits] {}", key.name()) };
    let within = |wanted: Option<u64>, most: Option<u64>| wanted.unwrap_or(u64::MAX) <= most.unwrap_or(u64::MAX);
    // The maximum, if the double is above it.
    let asked = if within(twice, most) { twice } else { most };
    let request = (value.is_some() && asked != value)
        .then(|| together(limits, key, asked, host_scratch))
        .filter(|wanted| wanted.iter().all(|(key, value)| within(*value, policy.limits_max.get(*key))));
    let allow = (!within(twice, policy.limits.get(key))).then(|| lines(policy, key, twice));
    // Beside `max = "same"` a table [limits.max] would be `max` a second time.
    let section = if policy.max_is_same { "limits" } else { "limits.max" };
    let raise_maximum = most.map(|most| format!("[{section}] {} = {}", key.name(), written(key, Some(most.saturating_mul(2)))));
    let request = request.map(|wanted| {
        let members: Vec<String> = wanted.iter().map(|(key, value)| format!("\"{}\": {}", key.name(), written(*key, *value))).collect();
        format!("\"limits\": {{{}}}", members.join(", "))
    });
    let instead = instead(key, &key.format(value));
    let help = match &request {
        Some(request) if most.is_none() => format!("{instead}, or ask for more by {request} in the request, or for \"none\""),
        Some(request) => format!("{instead}, or ask for more by {request} in the request, at most {}", key.format(most)),
        None => format!("{instead}; no request gets more than {} here", key.format(most)),
    };
    let limit = LimitDenial {
        key: key.name(),
        value: key.format(value),
        peak: peak.map(|peak| key.format(Some(peak))),
        maximum: key.format(most),
        request,
        raise_maximum,
    };
    LimitRemedy { rule, allow, help, limit }
}

/// What the code's author can do without a larger limit.
fn instead(key: LimitKey, value: &str) -> String {
    match key {
        LimitKey::Wall => format!("not finished in {value}: do less work"),
        LimitKey::Cpu => format!("not finished in {value} of CPU time: do less work"),
        LimitKey::Memory => format!("more than {value} of memory is not there: keep less of the data at a time"),
        LimitKey::Processes => format!("no more than {value} processes and threads run at a time: start fewer"),
        LimitKey::ScratchSize | LimitKey::TmpSize | LimitKey::FileSize => format!("no more than {value} can be written: write less"),
        LimitKey::OutputSize => format!("no more than {value} of output is kept: print less"),
        _ => format!("{} is {value}: use less", key.name()),
    }
}

/// A limit with the `memory` that it needs: tmpfs counts as memory, and `memory` must exceed
/// the tmpfs sizes.
fn together(limits: &Limits, key: LimitKey, value: Option<u64>, host_scratch: bool) -> Vec<(LimitKey, Option<u64>)> {
    let mut all = vec![(key, value)];
    let mut raised = limits.clone();
    raised.set(key, value);
    let get = |key| raised.get(key);
    let held = [Some(LimitKey::TmpSize), (!host_scratch).then_some(LimitKey::ScratchSize)];
    let held = held.into_iter().flatten().map(|key| get(key).unwrap_or(u64::MAX)).fold(0, u64::saturating_add);
    if let Some(memory) = get(LimitKey::Memory).filter(|memory| held >= *memory) {
        let more = value.unwrap_or(u64::MAX).saturating_sub(limits.get(key).unwrap_or(u64::MAX));
        all.push((LimitKey::Memory, Some(memory.saturating_add(more))));
    }
    all
}

/// The lines under `[limits]` that make this value the default.
fn lines(policy: &Policy, key: LimitKey, value: Option<u64>) -> String {
    let mut lines = Vec::new();
    for (key, value) in together(&policy.limits, key, value, false) {
        lines.push(format!("{} = {}", key.name(), written(key, value)));
        if !policy.max_is_same && value.unwrap_or(u64::MAX) > policy.limits_max.get(key).unwrap_or(u64::MAX) {
            lines.push(format!("max.{} = {}", key.name(), written(key, value)));
        }
    }
    super::line("limits", &lines)
}

/// A value as TOML and JSON write it.
fn written(key: LimitKey, value: Option<u64>) -> String {
    let text = key.format(value);
    if value.is_some() && matches!(key.quantity(), Quantity::Count | Quantity::Cpus) { text } else { format!("\"{text}\"") }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic, reason = "a test may panic")]
    use stockade_policy::{SHIPPED, load_shipped, load_text};

    use super::*;

    #[test]
    fn every_line_for_a_limit_loads_and_doubles_it() {
        for (name, _) in SHIPPED {
            let policy = load_shipped(name).unwrap();
            for key in LimitKey::ALL {
                let Some(value) = policy.limits.get(key) else { continue };
                let remedy = of_policy(&policy, &policy.limits, false, key, None);
                for line in [remedy.allow.unwrap()].into_iter().chain(remedy.limit.raise_maximum) {
                    let (section, rest) = line.split_once("] ").unwrap();
                    let text = format!("schema = 1\ndescription = \"x\"\nextends = \"{name}\"\n{section}]\n{rest}\n");
                    let raised = load_text(&text).unwrap_or_else(|error| panic!("{name} {key:?}: {error}"));
                    let most = raised.limits_max.get(key) > policy.limits_max.get(key);
                    assert!(raised.limits.get(key) == Some(2 * value) || most, "{name} {key:?}: {line}");
                }
            }
        }
    }

    #[test]
    fn the_line_for_a_maximum_goes_where_the_policy_has_it() {
        let load =
            |limits: &str| load_text(&format!("schema = 1\ndescription = \"x\"\nextends = \"default\"\n[limits]\n{limits}")).unwrap();
        let policy = load("wall = \"5s\"\nmax = \"same\"\n");
        for key in [LimitKey::Wall, LimitKey::Processes] {
            let remedy = of_policy(&policy, &policy.limits, false, key, None);
            for line in [remedy.allow, remedy.limit.raise_maximum] {
                let line = line.unwrap();
                let line = line.strip_prefix("[limits] ").unwrap_or_else(|| panic!("{line}"));
                let own = if key == LimitKey::Wall { "" } else { "wall = \"5s\"\n" };
                let raised = load(&format!("{own}{line}\nmax = \"same\"\n"));
                assert!(raised.limits_max.get(key) == raised.limits.get(key) && raised.limits.get(key) > policy.limits.get(key), "{line}");
            }
        }
        // The control: elsewhere the maximum has a table of its own.
        let policy = load("wall = \"5s\"\n");
        let remedy = of_policy(&policy, &policy.limits, false, LimitKey::Wall, None);
        assert!(remedy.limit.raise_maximum.unwrap().starts_with("[limits.max] wall = "));
    }

    #[test]
    fn the_remedy_has_the_maximum_of_a_request() {
        let policy = load_shipped("default").unwrap();
        let remedy_for = |key, value| {
            let mut limits = policy.limits.clone();
            limits.set(key, value);
            of_policy(&policy, &limits, false, key, Some(1))
        };
        let remedy = remedy_for(LimitKey::Memory, Some(512 << 20));
        assert_eq!(remedy.limit.request.as_deref(), Some("\"limits\": {\"memory\": \"1GiB\"}"));
        assert_eq!((remedy.rule.as_str(), remedy.allow.as_deref()), ("[limits] memory", Some("[limits] memory = \"1GiB\"")));
        assert_eq!(
            (remedy.limit.maximum.as_str(), remedy.limit.raise_maximum.as_deref()),
            ("4GiB", Some("[limits.max] memory = \"8GiB\""))
        );
        // Below the policy's own value no line is needed.
        let remedy = remedy_for(LimitKey::Wall, Some(1000));
        assert_eq!((remedy.rule.as_str(), remedy.allow), ("the request's limits.wall", None));
        assert_eq!(remedy.limit.request.as_deref(), Some("\"limits\": {\"wall\": \"2s\"}"));
        // At the maximum, both have to be raised.
        let remedy = remedy_for(LimitKey::Processes, Some(512));
        assert_eq!((remedy.limit.request, remedy.allow.as_deref()), (None, Some("[limits] processes = 1024\nmax.processes = 1024")));
        // `memory` rises with a tmpfs size.
        let remedy = remedy_for(LimitKey::ScratchSize, Some(256 << 20));
        assert_eq!(remedy.limit.request.as_deref(), Some("\"limits\": {\"scratch_size\": \"512MiB\", \"memory\": \"768MiB\"}"));
    }
}
