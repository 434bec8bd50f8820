//! Whether this host can enforce the policies of the keys: an empty program runs under each, for its key.
//! Of policies under which a model may get a session, also what code finds there.
//!
//! That is another process's work, `stockade serve-examine`: the supervisor runs nothing itself, and its
//! signals end no run of an examination. What a policy lacks, `diagnose` says.

use std::{
    collections::BTreeMap,
    io::Read,
    process::{Child, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, bail};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::{Deserialize, Serialize};
use stockade_diagnose::doctor::{Shortfall, shortfall};
use stockade_engine::{Options, approval::ApprovedBy, own_program::own_program_of_service, runs::EntryPoint};
use stockade_policy::service::{Scope, ServiceKey};
use stockade_protocol::service::{Lack, Settings};

use crate::{ExitCode, args, output::write_out, runtimes::prompt_of};

/// How long it may take where the supervisor waits for it: until then no process that ends is replaced, and
/// the service's manager hears nothing. A policy takes some hundredths of a second.
const WHILE_SERVING: Duration = Duration::from_secs(15);

/// What one policy lacks, as the examining process prints it.
#[derive(Deserialize, Serialize)]
struct Examined {
    policy: String,
    prevents: Option<String>,
    without: Vec<String>,
    inventory: Option<String>,
}

/// The word for a policy whose inventory is wanted too.
const WITH_INVENTORY: &str = "inventory";

/// Sets what this host lacks for the policies of these keys, and what code finds under them. `known`: what
/// was found before under the policies that were explained so.
///
/// # Errors
/// They could not be examined, or not in [`WHILE_SERVING`] where the service is running.
pub(super) fn examine(keys: &[ServiceKey], settings: &mut Settings, known: Option<&Settings>) -> anyhow::Result<()> {
    let mut first_keys = BTreeMap::new();
    for key in keys {
        for policy in &key.policies {
            let (_, keeps) = first_keys.entry(policy.as_str()).or_insert((key.id.as_str(), false));
            *keeps |= key.scopes.contains(&Scope::Keep);
        }
    }
    let is_same = |policy: &str| known.is_some_and(|known| known.explained.get(policy) == settings.explained.get(policy));
    let found = |policy: &str| known.filter(|_| is_same(policy)).and_then(|known| known.inventories.get(policy));
    let (mut words, mut inventories) = (Vec::new(), BTreeMap::new());
    for (policy, (key, keeps)) in first_keys {
        let before = found(policy).filter(|_| keeps);
        inventories.extend(before.map(|inventory| (policy.to_owned(), inventory.clone())));
        words.extend([policy, key, if keeps && before.is_none() { WITH_INVENTORY } else { "" }]);
    }
    let most = known.map(|_| WHILE_SERVING);
    let mut command = own_program_of_service();
    command.args(["serve-examine", "--"]).args(words);
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().context("examine what this host can do")?;
    let printed = printed_within(&mut child, most);
    if !matches!(printed, Ok(Some(_))) {
        // What it leaves, the next start clears away.
        child.kill().context("end the examination of this host")?;
    }
    let status = child.wait().context("examine what this host can do")?;
    let Some(printed) = printed? else {
        let most = most.unwrap_or_default().as_secs();
        bail!("examine what this host can do: its policies have taken more than {most} s; try again, or restart the service");
    };
    if !status.success() {
        bail!("examine what this host can do: {status}; what it said stands above");
    }
    let mut examined: Vec<Examined> = serde_json::from_slice(&printed).context("what this host can do")?;
    inventories.extend(examined.iter_mut().filter_map(|one| Some((one.policy.clone(), one.inventory.take()?))));
    settings.inventories = inventories;
    settings.lacks = examined.into_iter().flat_map(lacks).collect();
    Ok(())
}

/// All that a process prints; none: it takes longer than this.
fn printed_within(child: &mut Child, most: Option<Duration>) -> anyhow::Result<Option<Vec<u8>>> {
    let end = most.map(|most| Instant::now() + most);
    let (mut stdout, mut printed, mut part) = (child.stdout.take().context("its stdout")?, Vec::new(), [0; 4096]);
    loop {
        let left = end.map(|end| Timespec::try_from(end.saturating_duration_since(Instant::now()))).transpose()?;
        if poll(&mut [PollFd::new(&stdout, PollFlags::IN)], left.as_ref()).context("wait for what it prints")? == 0 {
            return Ok(None);
        }
        match stdout.read(&mut part).context("read what it prints")? {
            0 => return Ok(Some(printed)),
            length => printed.extend(part.iter().take(length)),
        }
    }
}

fn lacks(Examined { policy, prevents, without, .. }: Examined) -> impl Iterator<Item = Lack> {
    let lack = move |(what, prevents)| Lack { policy: policy.clone(), what, prevents };
    prevents.map(|what| (what, true)).into_iter().chain(without.into_iter().map(|what| (what, false))).map(lack)
}

/// The examining process: policies, each with the key that it is examined for, and whether its inventory is
/// wanted.
pub(crate) fn run(asked: &args::ServeExamine) -> anyhow::Result<ExitCode> {
    let account = super::account()?;
    let examined: Vec<Examined> = asked
        .words
        .as_chunks()
        .0
        .iter()
        .map(|[policy, key, wanted]| {
            let options = Options {
                policy: Some(policy.clone()),
                peer: account.clone(),
                key: Some(key.clone()),
                approved_by: ApprovedBy::NoOne,
                via: Some(EntryPoint::Doctor),
                ..Options::default()
            };
            let Shortfall { prevents, without } = shortfall(&options);
            let inventory = if wanted == WITH_INVENTORY { prompt_of(&options) } else { None };
            Examined { policy: policy.clone(), prevents, without, inventory }
        })
        .collect();
    write_out(&serde_json::to_vec(&examined)?)?;
    Ok(ExitCode::SUCCESS)
}
