//! Whether the caller may have what is asked for: scratch below its ceiling, grants, and a
//! place in the registry.
//!
//! Where root acts for another the grants decide; everybody else acts with rights of their
//! own. Scratch itself is opened by the launcher, as the caller.

use std::path::{Component, Path, PathBuf};

use stockade_launcher::{
    OpenedScratch,
    registry::{Record, Registry},
    scratch::{Opener, ScratchError, path::ScratchPath},
};
use stockade_policy::{Grants, facts::CgroupFacts, grants, model::Policy};

use super::Origin;
use crate::{Options, Refusal, caller::Identity, facts};

/// The request's scratch, below the command line's if that names one.
pub(crate) fn scratch_of(origin: Origin<'_>, options: &Options) -> Result<Option<String>, Refusal> {
    let ceiling = options.scratch.as_ref().map(|path| path.to_string_lossy().into_owned());
    let wanted = match origin {
        Origin::Request(request) => request.scratch.clone(),
        Origin::Command { .. } | Origin::Interpreter { .. } | Origin::Image(_) | Origin::Session { .. } => None,
    };
    match (wanted, ceiling) {
        (Some(wanted), Some(ceiling)) => {
            let inside =
                Path::new(&wanted).starts_with(&ceiling) && !Path::new(&wanted).components().any(|part| part == Component::ParentDir);
            if inside {
                Ok(Some(wanted))
            } else {
                Err(Refusal::bad_request(
                    "scratch_outside_ceiling",
                    format!("scratch {wanted}: it must be {ceiling}, which --scratch names, or lie below it"),
                ))
            }
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
    judge: impl Fn(&Path) -> Result<(), Refusal>,
) -> Result<OpenedScratch, Refusal> {
    let refused = |error: ScratchError| Refusal::bad_request(error.problem.reason(), error.to_string());
    let place = ScratchPath::find(path, policy, opener).map_err(refused)?;
    if place.is_missing() {
        judge(place.path())?;
    }
    let opened = place.open(policy, opener).map_err(refused)?;
    // By the path that was opened: the one that was named may lead elsewhere now.
    judge(&opened.facts.path)?;
    Ok(opened)
}

/// Where root acts for another: whether that one was granted the policy, the scratch and
/// the interpreters. Everybody else acts with rights of their own.
///
/// # Errors
/// Not granted; the message says which line of the grants would do it.
pub fn check_grants(identity: &Identity, policy: &str, scratch: Option<&Path>, options: &Options) -> Result<(), Refusal> {
    if !identity.on_behalf {
        return Ok(());
    }
    let path = Path::new(grants::PATH);
    let loaded = Grants::load(path).map_err(|error| Refusal::sandbox_error("grants_unreadable", error.to_string()))?;
    let grants = loaded.ok_or_else(|| {
        Refusal::sandbox_error(
            "not_granted",
            format!(
                "{} does not exist, so root runs nothing for uid {}; name there what this user may run, or have it run stockade with its own rights",
                path.display(),
                identity.caller.uid
            ),
        )
    })?;
    let asker = stockade_policy::Caller { uid: identity.caller.uid, gids: identity.caller.groups.clone() };
    let interpreters: Vec<PathBuf> = options.interpreters.iter().map(|(_, path)| path.clone()).collect();
    let name = options.policy.as_deref().unwrap_or(policy);
    grants.decide(&asker, name, scratch, &interpreters).map_err(|refusal| Refusal::sandbox_error("not_granted", refusal.to_string()))
}

/// The run's record, and the registry, which is still to be swept; none where nothing could be
/// left behind.
pub(super) fn claim_record(
    identity: &Identity,
    host_scratch: bool,
    claim: bool,
    cgroup: &CgroupFacts,
) -> Result<Option<(Record, Registry)>, Refusal> {
    let leaves_nothing = !identity.privileged && !host_scratch && matches!(cgroup, CgroupFacts::Unavailable { .. });
    if leaves_nothing || (!claim && !identity.privileged) {
        return Ok(None);
    }
    let registry = facts::registry(identity)?;
    Ok(Some((registry.claim()?, registry)))
}
