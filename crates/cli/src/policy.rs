//! `stockade policy`: check, show, explain, diff, list, schema.

use serde_json::json;
use stockade_policy::{compare::compare, model::Origin};
use stockade_runtime::{Options, list_policies, load_policy};

use crate::{
    ExitCode, USAGE_ERROR,
    args::Policy,
    explained,
    output::{say, say_json, warn},
};

pub(crate) fn run(command: Policy) -> anyhow::Result<ExitCode> {
    match command {
        Policy::Check { policies } => check(&policies),
        Policy::Show { policy, json } => show(policy, json),
        Policy::Explain { policy, against, json } => explain(&policy, &against, json),
        Policy::Diff { first, second, json } => diff(&first, &second, json),
        Policy::List => list(),
        Policy::Schema => {
            say_json(&stockade_policy::schema())?;
            Ok(ExitCode::SUCCESS)
        }
    }
}

fn load(name: &str) -> Result<stockade_policy::model::Policy, stockade_runtime::Refusal> {
    load_policy(&Options { policy: Some(name.to_owned()), ..Options::default() }).map(|loaded| loaded.policy)
}

fn check(policies: &[String]) -> anyhow::Result<ExitCode> {
    let mut code = ExitCode::SUCCESS;
    for name in policies {
        match load(name) {
            Ok(policy) => say(&format!("{name}: ok ({}, sha256 {})", origin(&policy.origin), policy.sha256))?,
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
        Ok(policy) if json => say_json(&policy)?,
        Ok(policy) => say(&stockade_policy::show(&policy))?,
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
    let explanation = stockade_policy::explain(&policy, &against);
    if json { say_json(&explanation) } else { say(&explained::explanation(&explanation)) }?;
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
        let name = |policy: &stockade_policy::model::Policy| json!({ "name": policy.name, "origin": origin(&policy.origin), "sha256": policy.sha256 });
        let whole = json!({ "schema": 1, "a": name(&first), "b": name(&second), "within": tight, "more": comparison.more, "less": comparison.less, "other": comparison.other });
        say_json(&whole)?;
    } else {
        say(&explained::comparison(&first.name, &second.name, &comparison))?;
    }
    Ok(if tight { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn origin(origin: &Origin) -> String {
    match origin {
        Origin::Shipped => String::from("shipped"),
        Origin::File(path) => path.display().to_string(),
    }
}

fn list() -> anyhow::Result<ExitCode> {
    for (name, from) in list_policies() {
        let description = load(&name).map_or_else(|refusal| format!("(unusable: {})", refusal.reason), |policy| policy.description);
        say(&format!("{name:<16} {description}  [{}]", origin(&from)))?;
    }
    Ok(ExitCode::SUCCESS)
}
