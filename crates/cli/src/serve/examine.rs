//! Whether this host can enforce the policies of the keys: an empty program runs under each, for its key.
//!
//! That is another process's work, `stockade serve-examine`: the supervisor runs nothing itself, and its
//! signals end no run of an examination. What a policy lacks, `diagnose` says.

use std::{
    collections::BTreeMap,
    process::{Command, Stdio},
};

use anyhow::{Context, bail};
use serde::{Deserialize, Serialize};
use stockade_diagnose::doctor::{Shortfall, shortfall};
use stockade_engine::{Options, approval::ApprovedBy, runs::EntryPoint};
use stockade_policy::service::ServiceKey;
use stockade_protocol::service::Lack;

use crate::{ExitCode, args, output::write_out};

/// What one policy lacks, as the examining process prints it.
#[derive(Deserialize, Serialize)]
struct Examined {
    policy: String,
    prevents: Option<String>,
    without: Vec<String>,
}

/// What this host lacks for the policies of these keys.
///
/// # Errors
/// They could not be examined.
pub(super) fn examine(keys: &[ServiceKey]) -> anyhow::Result<Vec<Lack>> {
    let mut first_keys = BTreeMap::new();
    for key in keys {
        for policy in &key.policies {
            first_keys.entry(policy.as_str()).or_insert(key.id.as_str());
        }
    }
    let mut command = Command::new("/proc/self/exe");
    command.args(["serve-examine", "--"]).args(first_keys.iter().flat_map(|(policy, key)| [*policy, *key]));
    command.env_remove("SUDO_UID").env_remove("SUDO_GID").stdin(Stdio::null()).stderr(Stdio::inherit());
    let output = command.output().context("examine what this host can do")?;
    if !output.status.success() {
        bail!("examine what this host can do: {}; what it said stands above", output.status);
    }
    let examined: Vec<Examined> = serde_json::from_slice(&output.stdout).context("what this host can do")?;
    Ok(examined.into_iter().flat_map(lacks).collect())
}

fn lacks(Examined { policy, prevents, without }: Examined) -> impl Iterator<Item = Lack> {
    let lack = move |(what, prevents)| Lack { policy: policy.clone(), what, prevents };
    prevents.map(|what| (what, true)).into_iter().chain(without.into_iter().map(|what| (what, false))).map(lack)
}

/// The examining process: policies, each with the key that it is examined for.
pub(crate) fn run(asked: &args::ServeExamine) -> anyhow::Result<ExitCode> {
    let account = super::account()?;
    let examined: Vec<Examined> = asked
        .words
        .chunks_exact(2)
        .filter_map(|pair| pair.first().zip(pair.get(1)))
        .map(|(policy, key)| {
            let options = Options {
                policy: Some(policy.clone()),
                peer: account.clone(),
                key: Some(key.clone()),
                approved_by: ApprovedBy::NoOne,
                via: Some(EntryPoint::Doctor),
                ..Options::default()
            };
            let Shortfall { prevents, without } = shortfall(&options);
            Examined { policy: policy.clone(), prevents, without }
        })
        .collect();
    write_out(&serde_json::to_vec(&examined)?)?;
    Ok(ExitCode::SUCCESS)
}
