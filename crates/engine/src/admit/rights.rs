//! Whether the caller may have what is asked for: scratch below its ceiling, grants, and a
//! place in the registry.
//!
//! Where root acts for another the grants decide; everybody else acts with rights of their
//! own. Scratch itself is opened by the launcher, as the caller.

use std::path::{Component, Path, PathBuf};

use stockade_launcher::{
    OpenedScratch,
    registry::Record,
    scratch::{Opener, path::ScratchPath},
};
use stockade_policy::{
    Grants,
    facts::CgroupFacts,
    grants::{self, GrantRefusal, GrantsError},
    model::Policy,
};
use stockade_protocol::Verdict::{self, BadRequest, SandboxError};

use super::Origin;
use crate::{
    Options, Refusal, RefusalCause,
    caller::{self, Identity},
    facts,
};

/// Why the caller may not have what it asks for.
#[derive(Debug, thiserror::Error)]
enum RightsError {
    #[error("scratch {wanted}: it must be {ceiling}, which --scratch names, or lie below it")]
    OutsideCeiling { wanted: String, ceiling: String },
    #[error(transparent)]
    GrantsUnreadable(#[from] GrantsError),
    #[error(
        "{} does not exist, so root runs nothing for uid {uid}; name there what this user may run, or have it run stockade with its own rights",
        grants::PATH
    )]
    NoGrants { uid: u32 },
    #[error(transparent)]
    NotGranted(#[from] GrantRefusal),
    #[error("scratch {scratch}: key {key} gets none of the host's directories; send `files` and ask for them back by `collect`")]
    ScratchOfKey { key: String, scratch: String },
}

impl RefusalCause for RightsError {
    fn verdict_and_reason(&self) -> (Verdict, &'static str) {
        match self {
            RightsError::OutsideCeiling { .. } => (BadRequest, "scratch_outside_ceiling"),
            RightsError::GrantsUnreadable(_) => (SandboxError, "grants_unreadable"),
            RightsError::NoGrants { .. } | RightsError::NotGranted(_) => (SandboxError, "not_granted"),
            RightsError::ScratchOfKey { .. } => (BadRequest, "scratch_of_key"),
        }
    }
}

/// The request's scratch, below the command line's if that names one.
pub(crate) fn scratch_of(origin: Origin<'_>, options: &Options) -> Result<Option<String>, Refusal> {
    let ceiling = options.scratch.as_ref().map(|path| path.to_string_lossy().into_owned());
    let wanted = match origin {
        Origin::Request(request) | Origin::Script { request, .. } => request.scratch.clone(),
        Origin::Command { .. } | Origin::Interpreter { .. } | Origin::Carried(_) | Origin::Template(_) | Origin::Session { .. } => None,
    };
    if let (Some(key), Some(scratch)) = (&options.key, &wanted) {
        return Err(RightsError::ScratchOfKey { key: key.clone(), scratch: scratch.clone() }.into());
    }
    match (wanted, ceiling) {
        (Some(wanted), Some(ceiling)) => {
            let inside =
                Path::new(&wanted).starts_with(&ceiling) && !Path::new(&wanted).components().any(|part| part == Component::ParentDir);
            if inside { Ok(Some(wanted)) } else { Err(RightsError::OutsideCeiling { wanted, ceiling }.into()) }
        }
        (wanted, ceiling) => Ok(wanted.or(ceiling)),
    }
}

/// Opens a scratch that `judge` has nothing against. One that is yet to be made is judged
/// before, so that a refusal leaves nothing behind.
pub(crate) fn open_scratch(
    path: &str,
    policy: &Policy,
    opener: &Opener<'_>,
    judge: impl Fn(&ScratchPath) -> Result<(), Refusal>,
) -> Result<OpenedScratch, Refusal> {
    let place = ScratchPath::find(path, policy, opener)?;
    if place.is_missing() {
        judge(&place)?;
        return Ok(place.open(policy, opener)?);
    }
    // A directory of the system is named as that, whatever else it holds.
    let opened = place.open(policy, opener)?;
    judge(&place)?;
    Ok(opened)
}

/// Where root acts for another: whether that one was granted the policy, the scratch and
/// the interpreters. Everybody else acts with rights of their own.
///
/// # Errors
/// Not granted; the message says which line of the grants would do it.
pub fn check_grants(identity: &Identity, policy: &str, scratch: Option<&Path>, options: &Options) -> Result<(), Refusal> {
    if !identity.on_behalf || options.key.is_some() {
        return Ok(());
    }
    let through_sudo = options.peer.is_none().then(caller::sudo_remedy).flatten();
    decide(identity, policy, scratch, options).map_err(|error| {
        let refusal = Refusal::from(error);
        match through_sudo {
            Some(remedy) if refusal.reason == "not_granted" => Refusal { message: format!("{}\n{remedy}", refusal.message), ..refusal },
            _ => refusal,
        }
    })
}

fn decide(identity: &Identity, policy: &str, scratch: Option<&Path>, options: &Options) -> Result<(), RightsError> {
    let loaded = Grants::load(Path::new(grants::PATH))?;
    let grants = loaded.ok_or(RightsError::NoGrants { uid: identity.caller.uid })?;
    let asker = stockade_policy::Caller { uid: identity.caller.uid, gids: identity.caller.groups.clone() };
    let interpreters: Vec<PathBuf> = options.interpreters.iter().map(|(_, path)| path.clone()).collect();
    let name = options.policy.as_deref().unwrap_or(policy);
    Ok(grants.decide(&asker, name, scratch, &interpreters)?)
}

/// Claims the run's record. None where there is no
/// registry and none is needed: an ordinary user's run in memory leaves nothing behind.
pub(super) fn claim_record(identity: &Identity, needed: bool, claim: bool, cgroup: &CgroupFacts) -> Result<Option<Record>, Refusal> {
    if !claim && !identity.privileged {
        return Ok(None);
    }
    let needed = needed || identity.privileged || !matches!(cgroup, CgroupFacts::Unavailable { .. });
    let claim = || -> Result<Record, Refusal> { Ok(facts::registry(identity)?.claim()?) };
    match claim() {
        Err(_) if !needed => Ok(None),
        claimed => claimed.map(Some),
    }
}
