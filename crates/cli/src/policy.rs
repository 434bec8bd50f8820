//! `stockade policy`: check, show, explain, diff, list, schema.

use serde_json::json;
use stockade_engine::{Options, list_policies, load_policy, lookup_context};
use stockade_policy_tools::compare::compare;

use crate::{
    ExitCode, USAGE_ERROR,
    args::Policy,
    output::{print_json, print_text, warn},
    policy_text,
};

pub(crate) fn run(command: Policy) -> anyhow::Result<ExitCode> {
    match command {
        Policy::Check { policies } => check(&policies),
        Policy::Show { policy, json } => show(policy, json),
        Policy::Explain { policy, against, json } => explain(&policy, &against, json),
        Policy::Diff { first, second, json } => diff(&first, &second, json),
        Policy::List => list(),
        Policy::Schema => {
            print_json(&stockade_policy::schema())?;
            Ok(ExitCode::SUCCESS)
        }
    }
}

pub(crate) fn load(name: &str) -> Result<stockade_policy::model::Policy, stockade_engine::Refusal> {
    load_policy(&Options { policy: Some(name.to_owned()), ..Options::default() }).map(|loaded| loaded.policy)
}

fn check(policies: &[String]) -> anyhow::Result<ExitCode> {
    let mut code = ExitCode::SUCCESS;
    for name in policies {
        // As a run loads it, which also refuses a filter that cannot be compiled.
        let reviewed = load(name).and_then(|_| Ok(stockade_policy::review(name, &lookup_context())?));
        match reviewed {
            Ok((policy, advice)) => {
                if !advice.diagnostics().is_empty() {
                    warn(&advice.to_string());
                }
                print_text(&format!("{name}: ok ({}, sha256 {})", policy.origin, policy.sha256))?;
            }
            Err(refusal) => {
                warn(&refusal.message);
                code = ExitCode::FAILURE;
            }
        }
    }
    Ok(code)
}

fn show(name: String, json: bool) -> anyhow::Result<ExitCode> {
    match load(&name) {
        Ok(policy) if json => print_json(&policy)?,
        Ok(policy) => print_text(&stockade_policy::show(&policy))?,
        Err(refusal) => {
            warn(&refusal.message);
            return Ok(ExitCode::FAILURE);
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn explain(name: &str, against: &str, json: bool) -> anyhow::Result<ExitCode> {
    let (policy, against) = match load(name).and_then(|policy| Ok((policy, load(against)?))) {
        Ok(both) => both,
        Err(refusal) => {
            warn(&refusal.message);
            return Ok(ExitCode::FAILURE);
        }
    };
    let explanation = stockade_policy_tools::explain(&policy, &against);
    if json { print_json(&explanation) } else { print_text(&policy_text::explanation(&explanation)) }?;
    Ok(ExitCode::SUCCESS)
}

fn diff(first: &str, second: &str, json: bool) -> anyhow::Result<ExitCode> {
    let (first, second) = match load(first).and_then(|first| Ok((first, load(second)?))) {
        Ok(both) => both,
        Err(refusal) => {
            warn(&refusal.message);
            return Ok(ExitCode::from(USAGE_ERROR));
        }
    };
    let comparison = compare(&first, &second);
    let tight = comparison.more.is_empty();
    if json {
        let name = |policy: &stockade_policy::model::Policy| json!({ "name": policy.name, "origin": policy.origin.to_string(), "sha256": policy.sha256 });
        let whole = json!({ "schema": 1, "a": name(&first), "b": name(&second), "within": tight, "more": comparison.more, "less": comparison.less, "other": comparison.other });
        print_json(&whole)?;
    } else {
        print_text(&policy_text::comparison(&first.name, &second.name, &comparison))?;
    }
    Ok(if tight { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn list() -> anyhow::Result<ExitCode> {
    for (name, from) in list_policies() {
        let description = load(&name).map_or_else(|refusal| format!("(unusable: {})", refusal.reason), |policy| policy.description);
        print_text(&format!("{name:<16} {description}  [{from}]"))?;
    }
    Ok(ExitCode::SUCCESS)
}
