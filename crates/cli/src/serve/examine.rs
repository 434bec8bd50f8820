//! Whether this host can enforce the policies of the keys: an empty program runs under each, for its key.
//! Of policies under which a model may get a session, also what code finds there.
//!
//! That is another process's work, `stockade serve-examine`: the supervisor runs nothing itself, and its
//! signals end no run of an examination. What a policy lacks, `diagnose` says.

use std::{
    collections::BTreeMap,
    io::{ErrorKind, Read},
    os::fd::{AsFd, BorrowedFd},
    process::{Child, ChildStdout, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, bail};
use rustix::event::{PollFd, PollFlags, poll};
use serde::{Deserialize, Serialize};
use stockade_diagnose::doctor::{Shortfall, shortfall};
use stockade_engine::{Options, approval::ApprovedBy, own_program::own_program_of_service, runs::EntryPoint};
use stockade_policy::service::{Scope, ServiceKey};
use stockade_protocol::service::{Lack, Settings};

use crate::{ExitCode, args, output::write_out, runtimes::prompt_of};

/// How long it may take while the service is running, which goes on meanwhile. A policy takes 0.02 s and its
/// inventory 0.1 s on a quiet host. Where all CPUs are busy and many runs begin and end, the kernel has held a
/// change of mounts for 10 s (`synchronize_rcu_expedited`). systemd waits 90 s for a service that reloads
/// (TimeoutStartSec=, systemd.service(5)).
const WHILE_SERVING: Duration = Duration::from_secs(60);

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

/// The examining process at work. Dropping it ends it.
pub(super) struct Examination {
    child: Child,
    stdout: ChildStdout,
    printed: Vec<u8>,
    until: Option<Instant>,
    /// What code finds under policies that are as they were.
    inventories: BTreeMap<String, String>,
}

/// What was found out under all policies.
pub(super) struct Findings {
    lacks: Vec<Lack>,
    inventories: BTreeMap<String, String>,
}

impl Findings {
    /// Writes it down in the settings.
    pub(super) fn put_into(self, settings: &mut Settings) {
        (settings.lacks, settings.inventories) = (self.lacks, self.inventories);
    }
}

impl Examination {
    /// Begins to find out what this host lacks for the policies of these keys, and what code finds under them.
    /// `known`: what was found before under the policies that were explained so, where the service is running.
    ///
    /// # Errors
    /// There is no process.
    pub(super) fn begin(keys: &[ServiceKey], settings: &Settings, known: Option<&Settings>) -> anyhow::Result<Self> {
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
        let mut command = own_program_of_service();
        command.args(["serve-examine", "--"]).args(words).stdin(Stdio::null()).stdout(Stdio::piped());
        let mut child = command.spawn().context("examine what this host can do")?;
        let stdout = child.stdout.take().context("its stdout")?;
        let until = known.map(|_| Instant::now() + WHILE_SERVING);
        let examination = Examination { child, stdout, printed: Vec::new(), until, inventories };
        rustix::io::ioctl_fionbio(&examination.stdout, true).context("hear what it prints")?;
        Ok(examination)
    }

    /// What becomes readable when there is more to read of it.
    pub(super) fn stdout(&self) -> BorrowedFd<'_> {
        self.stdout.as_fd()
    }

    /// When it has to be done; none: it may take as long as it does.
    pub(super) fn until(&self) -> Option<Instant> {
        self.until
    }

    /// What was found; none: it is not done. Waits for nothing but the end of a process that has printed all.
    ///
    /// # Errors
    /// It failed, or has taken too long.
    pub(super) fn poll(&mut self) -> anyhow::Result<Option<Findings>> {
        let mut part = [0; 4096];
        loop {
            match self.stdout.read(&mut part) {
                Ok(0) => break,
                Ok(length) => self.printed.extend(part.iter().take(length)),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    if self.until.is_some_and(|until| Instant::now() >= until) {
                        let most = WHILE_SERVING.as_secs();
                        bail!(
                            "examine what this host can do: its policies have taken more than {most} s; try again, or restart the service"
                        );
                    }
                    return Ok(None);
                }
                Err(error) => return Err(error).context("read what it prints"),
            }
        }
        let status = self.child.wait().context("examine what this host can do")?;
        if !status.success() {
            bail!("examine what this host can do: {status}; what it said stands above");
        }
        let mut examined: Vec<Examined> = serde_json::from_slice(&self.printed).context("what this host can do")?;
        let mut inventories = std::mem::take(&mut self.inventories);
        inventories.extend(examined.iter_mut().filter_map(|one| Some((one.policy.clone(), one.inventory.take()?))));
        Ok(Some(Findings { lacks: examined.into_iter().flat_map(lacks).collect(), inventories }))
    }

    /// The same, when it is done.
    ///
    /// # Errors
    /// It failed.
    pub(super) fn wait(mut self) -> anyhow::Result<Findings> {
        loop {
            if let Some(findings) = self.poll()? {
                return Ok(findings);
            }
            poll(&mut [PollFd::new(&self.stdout, PollFlags::IN)], None).context("wait for what it prints")?;
        }
    }
}

impl Drop for Examination {
    fn drop(&mut self) {
        // What it leaves, the next start clears away.
        let _ended = self.child.kill();
        let _reaped = self.child.wait();
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
