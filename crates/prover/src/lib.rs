//! `stockade prove`: attacks on a policy, inside real sandboxes on this host, and the result
//! of each.
//!
//! A line is `held` only if the attack failed as stated beforehand and its control shows that
//! the same probe could have succeeded. What is tried is data, in `attacks`; `judge` compares
//! the answers. No attack changes the policy under test, and no control changes the host.
//! It cannot show that there is no other attack.
//!
//! The probe carries out an attack as the payload of a sandbox, and outside for its control: the
//! same act by the same program. It enters the sandbox as an image, bytes in place of a command:
//! the child writes them beside the executor into an unlinked file (step 18), and the payload's
//! process executes that by descriptor (step 41). Landlock has a rule for this one inode and the
//! receipt a line; nothing else of the plan differs. No request can name an image.
#![forbid(unsafe_code)]

mod attack;
mod attacks;
mod concurrent_run;
mod copies;
mod error;
mod fixture;
mod guarded;
mod html;
mod inside;
mod judge;
mod outside;
mod room;
mod script;
mod target;
mod uncovered;
mod words;

use std::{
    collections::BTreeMap,
    time::{Instant, SystemTime},
};

use serde::Serialize;
use stockade_engine::{
    Options, Refusal,
    audit::{self, ProofEntry},
    load_policy,
};
use stockade_protocol::{AuditRef, LimitKey, PolicyId, Receipt};

pub use attack::Class;
pub use concurrent_run::run_concurrently;
pub use html::{html, unfinished};
pub use room::RaisedLimit;

use fixture::Fixture;
use inside::{Inside, ProbeBatch};
use outside::Outside;

/// The probe's program.
static PROBE: &[u8] = include_bytes!(env!("STOCKADE_PROBE"));

/// A script that takes longer is ended, in seconds.
const SCRIPT_TIMEOUT_S: u32 = 4;
/// The same for a script that uses up a limit.
const LONG_SCRIPT_TIMEOUT_S: u32 = 30;

/// Version of the form in which a proof is printed as JSON.
const SCHEMA: u32 = 1;

/// The result of an attack.
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
    /// Its target is not available here: the kernel lacks it, or no user may use it.
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
            State::Absent => "not available here",
        }
    }
}

/// One attack and its result.
#[derive(Clone, Debug, Serialize)]
pub struct Finding {
    /// Its class.
    pub class: Class,
    /// A short name.
    pub attack: String,
    /// Its result.
    pub state: State,
    /// What was tried.
    pub tried: String,
    /// The result that was stated beforehand.
    pub expected: String,
    /// What was observed.
    pub seen: String,
    /// What the control did.
    pub control: String,
    /// The layers that stop it.
    pub layers: Vec<&'static str>,
    /// How to fix it, where something got through or was not proven.
    pub advice: Option<String>,
}

/// How many attacks had which result.
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
    /// Their target is not available here.
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

/// The results of all attacks on one policy on this host.
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
    /// The launching user.
    pub uid: u32,
    /// When it was begun, in UTC.
    pub begun: String,
    /// When it ended, in UTC.
    pub ended: String,
    /// How long it took.
    pub duration_ms: u64,
    /// SHA-256 of the program; null where it could not be read.
    pub program_sha256: Option<String>,
    /// What `doctor` says of this host, by feature.
    pub doctor: BTreeMap<String, String>,
    /// All attacks.
    pub count: Count,
    /// Without those that only try a system call's number.
    pub distinct: Count,
    /// Each attack, by class.
    pub findings: Vec<Finding>,
    /// Limits that the attacks had larger than the policy has them, for the probe's own sake.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub limits_raised: Vec<RaisedLimit>,
    /// Limits and globs of the policy that no attack has tried.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub uncovered: Vec<String>,
    /// What was in force in a sandbox of the policy.
    pub receipt: Receipt,
    /// What of the proof's own files could not be removed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub left: Option<String>,
    /// Its record in the audit log, whose `proof_sha256` is of all but this field.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub audit: Option<AuditRef>,
}

impl Proof {
    /// The results of one class.
    pub fn count_of(&self, class: Class) -> Count {
        Count::of(self.of(class))
    }

    /// The attacks of one class.
    pub fn of(&self, class: Class) -> impl Iterator<Item = &Finding> {
        self.findings.iter().filter(move |finding| finding.class == class)
    }
}

/// Attacks a policy. `doctor`: what is known of this host, by feature. `progress` is told how many
/// of how many attacks are judged.
///
/// # Errors
/// The policy cannot be enforced here; `doctor` names what is missing.
pub fn prove(options: &Options, doctor: BTreeMap<String, String>, progress: &mut dyn FnMut(usize, usize)) -> Result<Proof, Refusal> {
    let (begun, begun_at) = (Instant::now(), audit::utc(SystemTime::now()));
    let loaded = load_policy(options)?;
    let plant = ProbeBatch { prelude: attacks::plant(), ..ProbeBatch::default() };
    let first = Inside { loaded: &loaded, options }.run(&plant)?.result;
    let policy = first.report.policy.clone().unwrap_or_else(|| identify(&loaded.policy));
    let room = room::with_room(&loaded)?;
    let attacked = room.as_ref().map_or(&loaded, |(roomy, _)| roomy);
    let inside = Inside { loaded: attacked, options };
    let plan = if room.is_some() { inside.run(&plant)?.result.plan } else { first.plan };
    let outside = Outside::new()?;
    let mut fixture = Fixture::new(attacked, plan, first.report.receipt.unwrap_or_default(), &outside)?;
    fixture.processes = loaded.policy.limits.get(LimitKey::Processes);
    let mut findings = judge::judge(attacks::all(&fixture), &fixture, &inside, &outside, progress)?;
    findings.extend(copies::findings(&loaded, options));
    let count = Count::of(findings.iter());
    let mut proof = Proof {
        schema: SCHEMA,
        version: env!("CARGO_PKG_VERSION"),
        proven: count.breaches == 0 && count.not_proven == 0,
        policy,
        description: loaded.policy.description.clone(),
        host: fixture.host_name.clone(),
        uid: fixture.uid,
        begun: begun_at,
        ended: audit::utc(SystemTime::now()),
        program_sha256: audit::program_sha256(),
        doctor,
        duration_ms: u64::try_from(begun.elapsed().as_millis()).unwrap_or(u64::MAX),
        count,
        distinct: Count::of(findings.iter().filter(|finding| finding.class != Class::SystemCalls)),
        uncovered: uncovered::uncovered(&loaded.policy, &fixture, &findings),
        findings,
        limits_raised: room.as_ref().map(|(_, raised)| raised.clone()).unwrap_or_default(),
        receipt: fixture.receipt.clone(),
        left: fixture.remove(),
        audit: None,
    };
    let verdict = match (count.breaches, count.not_proven) {
        (0, 0) => "held",
        (0, _) => "not_proven",
        _ => "breached",
    };
    let json = serde_json::to_vec(&proof).unwrap_or_default();
    let entry = ProofEntry { json: &json, begun: &proof.begun, duration_ms: proof.duration_ms, verdict };
    proof.audit = audit::write_proof(&loaded.policy, options, &entry);
    Ok(proof)
}

fn identify(policy: &stockade_policy::model::Policy) -> PolicyId {
    PolicyId { name: policy.name.clone(), origin: policy.origin.to_string(), sha256: policy.sha256.clone() }
}

/// A number that nothing in a sandbox can know.
fn nonce() -> Result<u64, Refusal> {
    let mut bytes = [0; 8];
    stockade_engine::admit::random_bytes(&mut bytes)?;
    Ok(u64::from_ne_bytes(bytes))
}
