//! `stockade prove`: attacks on a policy, inside real sandboxes on this host, and what
//! became of each.
//!
//! A line says `held` only if the attack failed as was stated beforehand and its control
//! shows that the very same probe could have succeeded. What is tried is data, in
//! `attacks`; how it is judged stands in `judge`. Nothing of the policy under test is
//! changed for an attack, and nothing of the host for a control. It cannot show that
//! there is no other attack.
#![forbid(unsafe_code)]

mod attack;
mod attacks;
mod html;
mod inside;
mod judge;
mod neighbour;
mod outside;
mod script;
mod target;
mod words;
mod world;

use std::{io::Read, time::Instant};

use serde::Serialize;
use stockade_policy::plan::Plan;
use stockade_protocol::{PolicyId, Receipt};
use stockade_runtime::{Options, Refusal, load_policy};

pub use attack::Class;
pub use html::{html, unfinished};
pub use neighbour::stand_beside;

use inside::{Errand, Inside};
use outside::Outside;
use world::World;

/// The probe's program.
static PROBE: &[u8] = include_bytes!(env!("STOCKADE_PROBE"));

/// A script that takes longer hangs.
const PATIENCE_S: u32 = 4;
/// The same, for what uses up a limit.
const LONG_PATIENCE_S: u32 = 30;

/// Version of the form in which a proof is printed as JSON.
const SCHEMA: u32 = 1;

/// What became of an attack.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// It got through.
    Breach,
    /// It failed, or was not tried, in a way that proves nothing.
    NotProven,
    /// It failed as stated, and its control succeeded.
    Held,
    /// The policy allows it.
    Allowed,
    /// What it aims at is not to be had here: the kernel lacks it, or nobody may use it.
    Absent,
}

impl State {
    /// What a person reads.
    pub const fn title(self) -> &'static str {
        match self {
            State::Breach => "BREACH",
            State::NotProven => "not proven",
            State::Held => "held",
            State::Allowed => "allowed by policy",
            State::Absent => "not to be had here",
        }
    }
}

/// One attack and what became of it.
#[derive(Clone, Debug, Serialize)]
pub struct Finding {
    /// Its class.
    pub class: Class,
    /// A short name.
    pub attack: String,
    /// What became of it.
    pub state: State,
    /// What was tried.
    pub tried: String,
    /// What had to come of it.
    pub expected: String,
    /// What came of it.
    pub seen: String,
    /// What the control came to.
    pub control: String,
    /// The layers that stop it.
    pub layers: Vec<&'static str>,
    /// What to do, where something got through or was not proven.
    pub advice: Option<String>,
}

/// How many attacks came to what.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Count {
    /// Attacks that were tried: all but the last two.
    pub tried: usize,
    /// Failed as stated.
    pub held: usize,
    /// Got through.
    pub breaches: usize,
    /// Proved nothing.
    pub not_proven: usize,
    /// The policy allows them.
    pub allowed: usize,
    /// Aim at what is not to be had here.
    pub absent: usize,
}

impl Count {
    fn of<'a>(findings: impl Iterator<Item = &'a Finding>) -> Self {
        let mut count = Count::default();
        for finding in findings {
            let (slot, tried) = match finding.state {
                State::Held => (&mut count.held, 1),
                State::Breach => (&mut count.breaches, 1),
                State::NotProven => (&mut count.not_proven, 1),
                State::Allowed => (&mut count.allowed, 0),
                State::Absent => (&mut count.absent, 0),
            };
            *slot += 1;
            count.tried += tried;
        }
        count
    }
}

/// All that was tried of one policy on this host.
#[derive(Clone, Debug, Serialize)]
pub struct Proof {
    /// Version of this form.
    pub schema: u32,
    /// Of the program.
    pub version: &'static str,
    /// Everything held.
    pub proven: bool,
    /// The policy.
    pub policy: PolicyId,
    /// Its description.
    pub description: String,
    /// The host's name.
    pub host: String,
    /// Who launched.
    pub uid: u32,
    /// How long it took.
    pub duration_ms: u64,
    /// All attacks.
    pub count: Count,
    /// Without those that only try a system call's number.
    pub distinct: Count,
    /// Each attack, by class.
    pub findings: Vec<Finding>,
    /// What was in force in the sandbox of the attacks.
    pub receipt: Receipt,
    /// What of the proof's own files could not be removed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub left: Option<String>,
}

impl Proof {
    /// What became of the attacks of one class.
    pub fn count_of(&self, class: Class) -> Count {
        Count::of(self.of(class))
    }

    /// The attacks of one class.
    pub fn of(&self, class: Class) -> impl Iterator<Item = &Finding> {
        self.findings.iter().filter(move |finding| finding.class == class)
    }
}

/// Attacks a policy.
///
/// # Errors
/// No sandbox of it can be had here; what is missing `doctor` says.
pub fn prove(options: &Options) -> Result<Proof, Refusal> {
    let begun = Instant::now();
    let loaded = load_policy(options)?;
    let inside = Inside { loaded: &loaded, options };
    let first = inside.run(&Errand { scripts: vec![attacks::plant()], ..Errand::default() })?.result;
    let policy = first.report.policy.clone().unwrap_or_else(|| identify(&loaded.policy));
    let outside = Outside::new()?;
    let world = World::new(&loaded, first.plan, first.report.receipt.unwrap_or_default(), &outside)?;
    let findings = judge::judge(attacks::all(&world), &world, &inside, &outside)?;
    let count = Count::of(findings.iter());
    Ok(Proof {
        schema: SCHEMA,
        version: env!("CARGO_PKG_VERSION"),
        proven: count.breaches == 0 && count.not_proven == 0,
        policy,
        description: loaded.policy.description.clone(),
        host: world.host_name.clone(),
        uid: world.uid,
        duration_ms: u64::try_from(begun.elapsed().as_millis()).unwrap_or(u64::MAX),
        count,
        distinct: Count::of(findings.iter().filter(|finding| finding.class != Class::SystemCalls)),
        findings,
        receipt: world.receipt.clone(),
        left: world.remove(),
    })
}

fn identify(policy: &stockade_policy::model::Policy) -> PolicyId {
    PolicyId { name: policy.name.clone(), origin: Plan::origin(policy), sha256: policy.sha256.clone() }
}

/// A number that nothing in a sandbox can know.
fn nonce() -> Result<u64, Refusal> {
    let mut bytes = [0; 8];
    let filled = std::fs::File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut bytes));
    filled.map_err(|error| Refusal::sandbox_error("no_randomness", format!("/dev/urandom cannot be read: {error}")))?;
    Ok(u64::from_ne_bytes(bytes))
}
