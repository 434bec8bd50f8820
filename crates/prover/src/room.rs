//! What the prover itself needs of the limit on processes, beside the attacks.
//!
//! The probe runs each script in a child, so that a killed script has an answer too. Under a
//! policy with `processes = 1` it could try nothing. The attacks then have more processes than
//! the policy allows, the proof says so, and the attack `processes` alone has the policy's own
//! number. No other limit, and no other key, is changed.

use serde::Serialize;
use stockade_engine::{LoadedPolicy, Refusal};
use stockade_policy::filter::Filters;
use stockade_protocol::LimitKey;

use crate::error::ProveError;

/// The probe, one script at a time, and what a killed script leaves until it is reaped.
const PROBE_PROCESSES: u64 = 16;
/// How many more the control of the attack `processes` may have.
pub(crate) const MORE_PROCESSES: u64 = 8;
/// The attack `processes` makes no more, whatever the policy allows.
pub(crate) const MAX_PROCESSES: u64 = 64;

/// A limit that the attacks had larger than the policy has it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RaisedLimit {
    /// Its name.
    pub limit: &'static str,
    /// The policy's value.
    pub policy: u64,
    /// The value that the attacks had.
    pub attacks: u64,
}

impl RaisedLimit {
    /// What a person reads.
    pub fn words(&self) -> String {
        let RaisedLimit { limit, policy, attacks } = self;
        format!(
            "{limit} = {attacks} instead of {policy}, because the probe makes a child for each attack; the attack `{limit}` tried {policy}"
        )
    }
}

/// The policy as the attacks have it, where that is not the policy itself, and what it raises
/// for all of them.
pub(crate) fn with_room(loaded: &LoadedPolicy) -> Result<Option<(LoadedPolicy, Vec<RaisedLimit>)>, Refusal> {
    const KEY: LimitKey = LimitKey::Processes;
    let mut policy = loaded.policy.clone();
    let (own, most) = (policy.limits.get(KEY), policy.limits_max.get(KEY));
    let all = own.map(|own| own.max(PROBE_PROCESSES));
    // A control has more than the policy's number, so the maximum may be in its way.
    let wanted = own.map_or(MAX_PROCESSES, |own| own.min(MAX_PROCESSES)) + MORE_PROCESSES;
    let room = most.map(|most| most.max(wanted).max(all.unwrap_or(0)));
    if (all, room) == (own, most) {
        return Ok(None);
    }
    policy.limits.set(KEY, all);
    policy.limits_max.set(KEY, room);
    let filters = Filters::new(&policy.seccomp).map_err(ProveError::from)?;
    let raised = own.zip(all).filter(|(own, all)| own != all).map(|(policy, attacks)| RaisedLimit { limit: KEY.name(), policy, attacks });
    Ok(Some((LoadedPolicy { policy, filters }, raised.into_iter().collect())))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]
    use super::*;

    fn with(processes: &str) -> LoadedPolicy {
        let mut policy = stockade_policy::load_shipped("default").unwrap();
        let [own, most] = processes.split(' ').map(|number| number.parse().ok()).collect::<Vec<_>>()[..] else { panic!("two numbers") };
        policy.limits.set(LimitKey::Processes, own);
        policy.limits_max.set(LimitKey::Processes, most);
        LoadedPolicy { policy, filters: Filters::default() }
    }

    fn room(processes: &str) -> Option<(Option<u64>, Option<u64>, usize)> {
        let (loaded, raised) = with_room(&with(processes)).unwrap()?;
        Some((loaded.policy.limits.get(LimitKey::Processes), loaded.policy.limits_max.get(LimitKey::Processes), raised.len()))
    }

    #[test]
    fn a_policy_has_room_made_for_the_probe_and_no_more() {
        assert_eq!(room("64 512"), None);
        assert_eq!(room("none none"), None);
        assert_eq!(room("1 1"), Some((Some(16), Some(16), 1)));
        assert_eq!(room("8 8"), Some((Some(16), Some(16), 1)));
        assert_eq!(room("16 16"), Some((Some(16), Some(24), 0)));
        assert_eq!(room("64 64"), Some((Some(64), Some(72), 0)));
        assert_eq!(room("1 512"), Some((Some(16), Some(512), 1)));
    }
}
