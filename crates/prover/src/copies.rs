//! The attack on copies of a template: that two draw the same random numbers.
//!
//! It is no script of the probe: the copies are interpreters, each in a sandbox of the policy, where
//! both have the same pid. What confines them is what confines every program, which the other attacks
//! try.

use stockade_engine::{
    LoadedPolicy, Options,
    template::{NoTemplate, RandomValues, Trial, empty_image, unique_stem},
};

use crate::{Finding, State, attack::Class};

/// One finding for each template of the policy.
pub(crate) fn findings(loaded: &LoadedPolicy, options: &Options) -> Vec<Finding> {
    let named = |runtime: &String| loaded.policy.template_of(runtime).map(|(name, _)| (runtime.clone(), name.to_owned()));
    loaded.policy.runtimes.keys().filter_map(named).map(|(runtime, name)| finding(&runtime, &name, loaded, options)).collect()
}

fn finding(runtime: &str, name: &str, loaded: &LoadedPolicy, options: &Options) -> Finding {
    let (state, seen, control) = match try_copies(runtime, loaded, options) {
        Ok(values) => judge(&values),
        // A session makes none either.
        Err(
            why @ (NoTemplate::Unfit(_)
            | NoTemplate::Refused(_)
            | NoTemplate::CutOut(_)
            | NoTemplate::Differs { .. }
            | NoTemplate::Ended { .. }),
        ) => (State::Absent, format!("no copy is made: {why}"), String::from("not tried")),
        Err(why) => (State::NotProven, why.to_string(), String::from("not tried")),
    };
    Finding {
        class: Class::CrossRunLeaks,
        attack: format!("random numbers of another copy of template {name}"),
        state,
        tried: String::from("two copies, each in a sandbox of its own and with the same pid, draw random numbers"),
        expected: String::from("each number differs"),
        seen,
        control,
        layers: vec!["reseeding"],
        advice: (state == State::Breach).then(|| format!("take template {name} away: template = \"none\"")),
    }
}

fn try_copies(runtime: &str, loaded: &LoadedPolicy, options: &Options) -> Result<RandomValues, NoTemplate> {
    let stem = unique_stem().map_err(|refusal| NoTemplate::NotStarted(Box::new(refusal)))?;
    Ok(Trial::new(runtime, &stem, empty_image()?, loaded, options)?.random_values())
}

/// That both have the same memory layout shows that what is the same would be seen.
fn judge(values: &RandomValues) -> (State, String, String) {
    let control = if values.share_layout { "the addresses of both are the same" } else { "no value of both is the same" };
    let (state, seen) = match (values.repeated.as_slice(), values.share_layout && !values.different.is_empty()) {
        ([], true) => (State::Held, format!("{} differ", values.different.join(", "))),
        ([], false) => (State::NotProven, format!("{} values were drawn", values.different.len())),
        (repeated, _) => (State::Breach, format!("{} are the same", repeated.join(", "))),
    };
    (state, seen, control.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_are_judged_by_what_they_drew() {
        let values = |repeated: &[&str], different: &[&str], share_layout| RandomValues {
            repeated: repeated.iter().copied().map(String::from).collect(),
            different: different.iter().copied().map(String::from).collect(),
            share_layout,
        };
        for (values, state) in [
            (values(&[], &["ssl"], true), State::Held),
            (values(&["ssl"], &["uuid4"], true), State::Breach),
            (values(&[], &["ssl"], false), State::NotProven),
            (values(&[], &[], true), State::NotProven),
        ] {
            assert_eq!(judge(&values).0, state, "{values:?}");
        }
    }
}
