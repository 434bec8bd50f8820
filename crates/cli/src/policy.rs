//! `stockade policy`: check, new, show, explain, diff, list, schema.

use std::{collections::BTreeSet, fs, io::Write, os::unix::fs::OpenOptionsExt};

use anyhow::{Context, bail};
use serde_json::json;
use stockade_engine::{Options, ancestry, list_policies, load_policy, lookup_context};
use stockade_policy::model::{Origin, Policy};
use stockade_policy_tools::{changes, compare::compare};
use stockade_protocol::LimitKey;

use crate::{
    ExitCode, USAGE_ERROR,
    args::{self, NewPolicy},
    output::{print_json, print_text, warn},
    policy_text,
    run::limits,
};

pub(crate) fn run(command: args::Policy) -> anyhow::Result<ExitCode> {
    match command {
        args::Policy::Check { policies } => check(&policies),
        args::Policy::New(new) => create(&new),
        args::Policy::Show { policy, json } => show(policy, json),
        args::Policy::Explain { policy, against, json } => explain(&policy, against.as_deref(), json),
        args::Policy::Diff { first, second, json } => diff(&first, &second, json),
        args::Policy::List => list(),
        args::Policy::Schema => {
            print_json(&stockade_policy::schema())?;
            Ok(ExitCode::SUCCESS)
        }
    }
}

pub(crate) fn load(name: &str) -> Result<Policy, stockade_engine::Refusal> {
    load_policy(&Options { policy: Some(name.to_owned()), ..Options::default() }).map(|loaded| loaded.policy)
}

/// Says which files are found in the place of shipped policies, under the names of these.
pub(crate) fn warn_of_hiding(names: &[&str]) {
    let mut said = BTreeSet::new();
    // A policy that cannot be loaded has been refused with its reason.
    let all = names.iter().filter_map(|name| ancestry(name).ok()).flat_map(|found| found.hiding);
    all.map(|hiding| hiding.to_string()).filter(|line| said.insert(line.clone())).for_each(|line| warn(&format!("stockade: {line}")));
}

fn check(policies: &[String]) -> anyhow::Result<ExitCode> {
    let mut code = ExitCode::SUCCESS;
    for name in policies {
        // As a run loads it, which also refuses a filter that cannot be compiled.
        let reviewed = load(name).and_then(|_| Ok(stockade_policy::review(name, &lookup_context())?));
        match reviewed {
            Ok((policy, advice)) => {
                // Of a shipped policy its user can change nothing.
                if !advice.diagnostics().is_empty() && policy.origin != Origin::Shipped {
                    warn(&advice.to_string());
                }
                warn_of_hiding(&[name]);
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

/// Writes a policy, and shows what it allows beside the one that it extends.
fn create(new: &NewPolicy) -> anyhow::Result<ExitCode> {
    if !stockade_policy::is_policy_name(&new.name) {
        warn(&format!("stockade: {} cannot name a policy: small letters, digits, `_` and `-`, at most 64", new.name));
        return Ok(ExitCode::from(USAGE_ERROR));
    }
    let context = lookup_context();
    let directory = match &context.user_dir {
        Some(user) => user.clone(),
        None if context.privileged => context.system_dir.clone(),
        None => bail!("neither XDG_CONFIG_HOME nor HOME says where this user's policies are; set one of them"),
    };
    let path = directory.join(format!("{}.toml", new.name));
    let extended = match load(&new.extends) {
        Ok(extended) => extended,
        Err(refusal) => {
            warn(&refusal.message);
            return Ok(ExitCode::FAILURE);
        }
    };
    let text = text_of(new, &extended)?;
    // As root's for a caller of sudo this would be another user's directory, and fails.
    stockade_engine::with_callers_rights(|| -> anyhow::Result<()> {
        fs::create_dir_all(&directory).with_context(|| format!("make {}", directory.display()))?;
        let file = fs::OpenOptions::new().write(true).create_new(true).mode(0o644).open(&path);
        file.and_then(|mut file| file.write_all(text.as_bytes())).with_context(|| format!("write {}", path.display()))
    })??;
    let policy = match load(&new.name) {
        Ok(policy) => policy,
        Err(refusal) => {
            let _it_is_no_policy = stockade_engine::with_callers_rights(|| fs::remove_file(&path))?;
            warn(&refusal.message);
            return Ok(ExitCode::FAILURE);
        }
    };
    print_text(&path.display().to_string())?;
    policy_text::comparison(&extended.name, &policy.name, &compare(&extended, &policy)).print()?;
    Ok(ExitCode::SUCCESS)
}

/// The policy's text, each loosening with its reason.
fn text_of(new: &NewPolicy, extended: &Policy) -> anyhow::Result<String> {
    let quoted = |text: &str| serde_json::Value::from(text).to_string();
    let mut out = format!(
        "schema = 1\nextends = {}\ndescription = {}\n",
        quoted(&new.extends),
        quoted(&format!("{}, as it was asked for", new.name))
    );
    if let Some(venv) = &new.venv {
        let venv = venv.to_str().with_context(|| format!("the path {} is not UTF-8", venv.display()))?;
        out.push_str(&format!("\n[runtimes.python]\nvenv = {}  # its packages\n", quoted(venv)));
    }
    let limits = limits(&new.limits);
    if !limits.is_empty() {
        out.push_str("\n[limits]\n");
        for (key, value) in &limits {
            out.push_str(&format!("{key} = {}\n", serde_json::to_value(value)?));
        }
        for (key, size) in sizes_in_memory(new, extended) {
            out.push_str(&format!("{} = {}  # a quarter of memory, which holds it\n", key.name(), quoted(&key.format(Some(size)))));
        }
        out.push_str("max = \"same\"  # no request gets more\n");
    }
    if !new.allow.is_empty() {
        let rules: String = new.allow.iter().map(|rule| format!("    {},  # asked for\n", quoted(&rule.to_string()))).collect();
        out.push_str(&format!("\n[egress]\nwhitelist = {{ add = [\n{rules}] }}\n"));
    }
    Ok(out)
}

/// Sizes of file systems in memory that are lowered with it, as a request's are.
fn sizes_in_memory(new: &NewPolicy, extended: &Policy) -> Vec<(LimitKey, u64)> {
    let Some(Ok(Some(memory))) = new.limits.memory.as_ref().map(|memory| LimitKey::Memory.parse(memory)) else { return Vec::new() };
    let sizes = [LimitKey::TmpSize, LimitKey::ScratchSize].map(|key| (key, extended.limits.get(key).unwrap_or(u64::MAX)));
    if sizes[0].1.saturating_add(sizes[1].1) < memory {
        return Vec::new();
    }
    sizes.into_iter().filter(|(_, size)| *size > memory / 4).map(|(key, _)| (key, memory / 4)).collect()
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

fn explain(name: &str, against_name: Option<&str>, json: bool) -> anyhow::Result<ExitCode> {
    // The JSON document always has the comparison.
    let against_name = against_name.or_else(|| json.then_some("strict"));
    let (policy, against) = match load(name).and_then(|policy| Ok((policy, against_name.map(load).transpose()?))) {
        Ok(both) => both,
        Err(refusal) => {
            warn(&refusal.message);
            return Ok(ExitCode::FAILURE);
        }
    };
    warn_of_hiding(&[Some(name), against_name].into_iter().flatten().collect::<Vec<_>>());
    let mut explanation = stockade_policy_tools::explain(&policy, against.as_ref());
    explanation.changes = ancestry(name)?.base.map(|base| changes(&base, &policy));
    if json { print_json(&explanation) } else { print_text(&policy_text::explanation(&explanation)) }?;
    Ok(ExitCode::SUCCESS)
}

fn diff(first_name: &str, second_name: &str, json: bool) -> anyhow::Result<ExitCode> {
    let (first, second) = match load(first_name).and_then(|first| Ok((first, load(second_name)?))) {
        Ok(both) => both,
        Err(refusal) => {
            warn(&refusal.message);
            return Ok(ExitCode::from(USAGE_ERROR));
        }
    };
    warn_of_hiding(&[first_name, second_name]);
    let comparison = compare(&first, &second);
    let tight = comparison.more.is_empty();
    if json {
        let name = |policy: &Policy| json!({ "name": policy.name, "origin": policy.origin.to_string(), "sha256": policy.sha256 });
        let whole = json!({ "schema": 1, "a": name(&first), "b": name(&second), "within": tight, "more": comparison.more, "less": comparison.less, "other": comparison.other });
        print_json(&whole)?;
    } else {
        policy_text::comparison(&first.name, &second.name, &comparison).print()?;
    }
    Ok(if tight { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn list() -> anyhow::Result<ExitCode> {
    for (name, from) in list_policies() {
        let description = load(&name).map_or_else(|refusal| format!("(unusable: {})", refusal.reason), |policy| policy.description);
        let hides = stockade_policy::hiding(&name, &from).map(|_| ", hides the shipped policy").unwrap_or_default();
        print_text(&format!("{name:<16} {description}  [{from}{hides}]"))?;
    }
    Ok(ExitCode::SUCCESS)
}
