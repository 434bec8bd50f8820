//! `stockade policy`: check, show, list, schema.

use std::process::ExitCode;

use stockade_policy::model::Origin;
use stockade_runtime::{Options, list_policies, load_policy};

use crate::{
    args::Policy,
    output::{say, warn},
};

pub(crate) fn run(command: Policy) -> anyhow::Result<ExitCode> {
    match command {
        Policy::Check { policies } => check(&policies),
        Policy::Show { policy, json } => show(policy, json),
        Policy::List => list(),
        Policy::Schema => {
            say(&serde_json::to_string_pretty(&stockade_policy::schema())?)?;
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
        Ok(policy) if json => say(&serde_json::to_string_pretty(&policy)?)?,
        Ok(policy) => say(&stockade_policy::show(&policy))?,
        Err(refusal) => {
            warn(&refusal.message);
            return Ok(ExitCode::FAILURE);
        }
    }
    Ok(ExitCode::SUCCESS)
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
