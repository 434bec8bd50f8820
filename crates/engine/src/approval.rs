//! Approval: code that screening holds back runs once, after somebody has said so.
//!
//! The answer to such code is a token. The same request, sent again with the token, runs: the same code with the same arguments, stdin, variables, files and limits, under
//! the same text of the same policy, in the same scratch, by the same caller, once, within
//! the policy's time. What lies in scratch and on the host is not bound: it may have changed.
//! While it runs, no other run is in its host scratch, which could change its code.
//!
//! Who holds the token approves, and a program that reads its own results holds it. Where
//! that is not wanted, the policy names `approvers`: then somebody of these, who is not the
//! one who asked, approves through root by `stockade approve`, and sees what runs before.
//! That is only so much as they have seen, so all that the requester brings must stand in
//! the request: what runs in a host scratch, in a session that holds something already or on
//! an interpreter of the requester's is not put before them.
//!
//! Doors that cannot wait refuse such code: commands, shims, and whatever says so itself.

mod error;
mod store;

use std::{cell::Cell, collections::BTreeMap, os::unix::ffi::OsStrExt};

use serde::{Deserialize, Serialize};
use stockade_audit::{PolicyRef, text};
use stockade_launcher::OpenedScratch;
use stockade_policy::{approver, model::Policy, plan::ImageRoot};
use stockade_protocol::{
    Approval, LimitKey, LimitValue, Report, Request, TextOrBase64, Verdict,
    screen::{Action, Finding, Grammar},
};

use crate::{
    Admission, LoadedPolicy, Options, Origin, Purpose, Refusal,
    admit::{image_root, parse_request, scratch_of},
    audit::{ApprovalRecord, AuditRecorder, AuditSubject, policy_ref},
    caller::{self, Identity},
    facts, report,
    screen::{self, Screening},
};
use error::{ApprovalError, Unseen};
use store::{FoundToken, HeldRequest, Store, Token};

/// The longest request that others approve, as JSON: more than that nobody reads.
const MAX_SHOWN: usize = 256 << 10;

/// Who may approve a request that waits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ApprovedBy {
    /// The policy's `approvers`; without them the caller, by the token.
    #[default]
    Anyone,
    /// The policy's `approvers` alone: the caller is a program.
    Approvers,
    /// No one: no request comes a second time.
    NoOne,
}

/// What is run, beside policy and scratch.
#[derive(Serialize)]
struct BoundFields<'a> {
    code: &'a TextOrBase64,
    language: Option<&'a String>,
    /// Left out where there is none, so that a token from before this field stays one.
    #[serde(skip_serializing_if = "Option::is_none")]
    filename: Option<&'a String>,
    args: &'a [String],
    stdin: Option<&'a TextOrBase64>,
    env: &'a BTreeMap<String, String>,
    files: &'a BTreeMap<String, TextOrBase64>,
    collect: &'a [String],
    limits: &'a BTreeMap<String, LimitValue>,
    /// Left out where there are none, likewise.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    compile_limits: &'a BTreeMap<String, LimitValue>,
    /// Left out where there is none, likewise.
    #[serde(skip_serializing_if = "Option::is_none")]
    image: Option<&'a str>,
}

fn json(value: &impl Serialize) -> Result<String, ApprovalError> {
    serde_json::to_string(value).map_err(ApprovalError::Unwritable)
}

fn hash(value: &impl Serialize) -> Result<String, ApprovalError> {
    Ok(text::sha256(json(value)?.as_bytes()))
}

/// What a token is for and approvers see is one text.
/// `image`: the one that is the root, with its digest.
fn bound(request: &Request, image: Option<&str>) -> Result<String, ApprovalError> {
    let Request {
        code,
        scratch: _,
        language,
        filename,
        args,
        stdin,
        env,
        files,
        collect,
        limits,
        compile_limits,
        image: _,
        // What the code does is the same in a copy.
        template: _,
        encoding: _,
        id: _,
        labels: _,
        approve: _,
    } = request;
    json(&BoundFields {
        code,
        language: language.as_ref(),
        filename: filename.as_ref(),
        args,
        stdin: stdin.as_ref(),
        env,
        files,
        collect,
        limits,
        compile_limits,
        image,
    })
}

/// With what the caller has added on the command line.
fn hash_of_policy(policy: &Policy, options: &Options) -> Result<String, ApprovalError> {
    let interpreters: Vec<_> = options.interpreters.iter().map(|(name, path)| (name, path.as_os_str().as_bytes())).collect();
    let allowed: Vec<_> = options.allow.iter().map(ToString::to_string).collect();
    hash(&(&policy.name, &policy.sha256, interpreters, allowed))
}

/// The host's directory by path and number, and a session by its number.
fn hash_of_scratch(scratch: Option<&OpenedScratch>, origin: Origin<'_>) -> Result<String, Refusal> {
    let place = match scratch {
        None => None,
        Some(opened) => Some((opened.facts.path.as_os_str().as_bytes(), facts::scratch_id(opened)?)),
    };
    Ok(hash(&(place, origin.number_of_session()))?)
}

/// Why code that needs approval is refused at once, and what to do; none: it waits.
pub(crate) fn hindrance(origin: Origin<'_>, policy: &Policy, options: &Options) -> Option<&'static str> {
    match (origin, options.approved_by) {
        (Origin::Command { .. } | Origin::Script { .. } | Origin::Interpreter { .. }, _) => {
            Some("a command cannot wait for that: send it as a request to `stockade exec`, where it can be approved")
        }
        (_, ApprovedBy::NoOne) => Some("no user can approve it here: send it as a request to `stockade exec`, where it can be approved"),
        (_, ApprovedBy::Approvers) if policy.screen.approvers.is_empty() => Some(
            "no user can approve it here, because the caller is a program: do without it, have a person send it to `stockade exec`, or let a user approve it that the policy names in `approvers`",
        ),
        _ => None,
    }
}

/// Refuses under `approvers` what is more than they see.
fn check_self_contained(origin: Origin<'_>, policy: &Policy, options: &Options) -> Result<(), Refusal> {
    if policy.screen.approvers.is_empty() {
        return Ok(());
    }
    let unseen = if let Some(path) = scratch_of(origin, options)? {
        Unseen::Scratch(path)
    } else if let Some((runtime, path)) = options.interpreters.first() {
        Unseen::Interpreter { runtime: runtime.clone(), path: path.clone() }
    } else if let Some(state) = origin.session_state()
        && !state.is_left_empty()?
    {
        Unseen::Session
    } else {
        return Ok(());
    };
    Err(ApprovalError::NotSelfContained { policy: policy.name.clone(), unseen }.into())
}

/// Refuses what no token is for where it would be the way past approvers: a caller's
/// command, script or interpreter.
///
/// # Errors
/// The policy has them.
pub(crate) fn check_approvable(origin: Origin<'_>, policy: &Policy) -> Result<(), ApprovalError> {
    if !matches!(origin, Origin::Command { .. } | Origin::Script { .. } | Origin::Interpreter { .. }) || policy.screen.approvers.is_empty()
    {
        return Ok(());
    }
    Err(ApprovalError::NeedsRequest(policy.name.clone()))
}

/// What approvers are shown.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ApprovalView {
    /// The policy's name.
    pub policy: String,
    /// Where it came from.
    pub origin: String,
    /// Its hash.
    pub policy_sha256: String,
    /// The runtime that runs the code.
    pub language: String,
    /// How the lines of the code end; none: not known.
    pub grammar: Option<Grammar>,
    /// In a session that holds nothing yet, and keeps what the code leaves.
    pub session: bool,
    /// What screening found.
    pub findings: Vec<Finding>,
    /// How much more it found; one of each rule is listed.
    pub findings_omitted: u64,
    /// What is run: a request as JSON, with all that the token is for and nothing else.
    pub request: String,
}

/// Answers a request whose code has to be approved.
///
/// # Errors
/// It would not be run at all, or the token cannot be kept.
pub(crate) fn request_approval(
    origin: Origin<'_>,
    request: &Request,
    loaded: &LoadedPolicy,
    options: &Options,
    screening: &Screening,
) -> Result<Report, Refusal> {
    let policy = &loaded.policy;
    let identity = caller::identify(options.peer.as_ref())?;
    let approvers = &policy.screen.approvers;
    if !approvers.is_empty() && !identity.privileged {
        return Err(ApprovalError::NeedsRoot(policy.name.clone()).into());
    }
    check_self_contained(origin, policy, options)?;
    // What would be refused in any case is refused before an approver is asked.
    let admission = Admission::admit(origin, loaded, options, Purpose::Plan, None, crate::pool::Pool::default())?;
    let scratch = admission.scratch();
    let time = policy.screen.approval_time;
    let image = admission.plan.image_root.as_ref().map(ImageRoot::title);
    let bound = bound(request, image.as_deref())?;
    let held = HeldRequest {
        requester: identity.caller.uid,
        request: text::sha256(bound.as_bytes()),
        policy: hash_of_policy(policy, options)?,
        scratch: hash_of_scratch(scratch, origin)?,
        approvers: approvers.clone(),
        ..HeldRequest::for_time(time)?
    };
    let shown = match approvers.as_slice() {
        [] => None,
        _ => Some(shown(bound, origin, request, policy, screening)?),
    };
    let token = Store::open(&identity)?.hold(&held, shown.as_deref())?;
    let wanted = screening.sentences(Action::Approve);
    let why = format!("policy `{}` has this code approved before it runs, for what is in it: {wanted}", policy.name);
    Ok(waits(&held, &token, time / 1000, policy, &why))
}

fn shown(bound: String, origin: Origin<'_>, request: &Request, policy: &Policy, screening: &Screening) -> Result<String, ApprovalError> {
    let PolicyRef { name, origin: policy_origin, sha256 } = policy_ref(policy);
    let runtime = screen::runtime(policy, request.language.as_deref().unwrap_or(&policy.language));
    let shown = ApprovalView {
        policy: name,
        origin: policy_origin,
        policy_sha256: sha256,
        language: runtime.map_or_else(String::new, |(name, _)| name.to_owned()),
        grammar: runtime.and_then(|(_, runtime)| screen::grammar(runtime)),
        session: origin.session_state().is_some(),
        findings: screening.findings.clone(),
        findings_omitted: screening.omitted,
        request: bound,
    };
    let text = json(&shown)?;
    if text.len() > MAX_SHOWN {
        return Err(ApprovalError::TooLarge(text.len()));
    }
    Ok(text)
}

/// The result of code that waits.
fn waits(held: &HeldRequest, token: &Token, seconds_left: u64, policy: &Policy, why: &str) -> Report {
    let approvers: Vec<String> = held.approvers.iter().map(ToString::to_string).collect();
    let time = LimitKey::Wall.format(Some(seconds_left * 1000));
    let how = match approvers.as_slice() {
        [] => format!("to approve it, send the same request again within {time} with `approve` (or --approve), and in it `approval.token`"),
        some => format!(
            "one of {} approves it within {time} by `sudo stockade approve` with `approval.token`; then send the same request again with that as `approve`",
            some.join(", ")
        ),
    };
    let error = format!("{why}; {how}");
    let approval = Approval { token: token.text().to_owned(), seconds_left, approvers };
    Report {
        approval: Some(approval),
        policy: Some(report::policy_id(policy)),
        ..Report::refused(Verdict::ApprovalRequired, "approval_required", error)
    }
}

/// What a token comes to.
pub(crate) enum TokenCheck {
    /// It is good for this request, if scratch is the same too.
    Good(Box<ApprovalPass>),
    /// Its approvers have not approved it yet.
    Waits(Box<Report>),
}

/// A token that is good for a request.
pub(crate) struct ApprovalPass {
    store: Store,
    token: Token,
    held: HeldRequest,
    /// The image that it is good for.
    image: Option<String>,
    claimed: Cell<bool>,
    /// Who has approved.
    pub(crate) approver: u32,
}

/// Looks at the token of a request.
///
/// # Errors
/// It is none, or for something else.
pub(crate) fn judge_token(
    token: &str,
    origin: Origin<'_>,
    request: &Request,
    loaded: &LoadedPolicy,
    options: &Options,
) -> Result<TokenCheck, Refusal> {
    check_self_contained(origin, &loaded.policy, options)?;
    let identity = caller::identify(options.peer.as_ref())?;
    let (store, token) = (Store::open(&identity)?, Token::parse(token)?);
    let held = match store.find(&token)? {
        // Of a token that is another's nothing is said, not even that there is one.
        FoundToken::Held(held) | FoundToken::Used(held) if held.requester != identity.caller.uid => {
            return Err(ApprovalError::Unknown.into());
        }
        FoundToken::None => return Err(ApprovalError::Unknown.into()),
        FoundToken::Used(_) => return Err(ApprovalError::Used.into()),
        FoundToken::Held(held) => held,
    };
    let seconds_left = held.seconds_left()?.ok_or(ApprovalError::Expired)?;
    let image = image_root::find(origin, &loaded.policy, options, &identity)?.as_ref().map(image_root::title);
    if held.request != text::sha256(bound(request, image.as_deref())?.as_bytes()) {
        return Err(ApprovalError::OtherRequest.into());
    }
    if held.policy != hash_of_policy(&loaded.policy, options)? {
        return Err(ApprovalError::OtherPolicy(loaded.policy.name.clone()).into());
    }
    let approver = if held.approvers.is_empty() { Some(held.requester) } else { store.approver(&token)? };
    Ok(match approver {
        Some(approver) => TokenCheck::Good(Box::new(ApprovalPass { store, token, held, image, claimed: Cell::new(false), approver })),
        None => {
            let why = format!("policy `{}` has this code approved by somebody else, who has not done so yet", loaded.policy.name);
            TokenCheck::Waits(Box::new(Report {
                reason: Some(String::from("approval_pending")),
                ..waits(&held, &token, seconds_left, &loaded.policy, &why)
            }))
        }
    })
}

impl ApprovalPass {
    /// Uses the token up for a run in this scratch; for a second try of the same run it has
    /// been.
    ///
    /// # Errors
    /// Scratch or the image is another, or the token is not good any more: of two who claim it at one
    /// time one is late.
    pub(crate) fn claim(&self, scratch: Option<&OpenedScratch>, origin: Origin<'_>, image: Option<&ImageRoot>) -> Result<(), Refusal> {
        // A name may have been given to another image since the token was looked at.
        if self.image != image.map(ImageRoot::title) {
            return Err(ApprovalError::OtherRequest.into());
        }
        if self.held.scratch != hash_of_scratch(scratch, origin)? {
            return Err(ApprovalError::OtherScratch.into());
        }
        if self.claimed.replace(true) {
            return Ok(());
        }
        self.held.seconds_left()?.ok_or(ApprovalError::Expired)?;
        if self.store.claim(&self.token)? { Ok(()) } else { Err(ApprovalError::Used.into()) }
    }

    /// Takes a claim back for a run that does not start because of another in its host scratch. No
    /// approver was asked: none approves what runs in such a scratch.
    ///
    /// # Errors
    /// The token stays used.
    pub(crate) fn give_back(&self) -> Result<(), Refusal> {
        Ok(self.store.give_back(&self.token)?)
    }
}

/// Code that waits for somebody's approval.
#[derive(Debug)]
pub struct WaitingApproval {
    /// Who has asked for it.
    pub requester: u32,
    /// For how long it still waits.
    pub seconds_left: u64,
    /// Who has approved it already.
    pub approver: Option<u32>,
    /// What it is.
    pub shown: ApprovalView,
}

/// Shows what waits under a token to somebody who may approve it.
///
/// # Errors
/// There is none, or it is not theirs to approve.
pub fn look(token: &str) -> Result<WaitingApproval, Refusal> {
    let identity = caller::identify(None)?;
    let store = Store::open(&identity)?;
    look_as(&identity, &store, &Token::parse(token)?)
}

fn look_as(identity: &Identity, store: &Store, token: &Token) -> Result<WaitingApproval, Refusal> {
    let caller = &identity.caller;
    let FoundToken::Held(held) = store.find(token)? else { return Err(ApprovalError::NotYours.into()) };
    let own = held.requester == caller.uid;
    let is_approver = || approver::is_approver(&held.approvers, caller).map_err(ApprovalError::Accounts);
    match (own, held.approvers.is_empty()) {
        (true, true) => return Err(ApprovalError::ByRequest.into()),
        (true, false) => return Err(ApprovalError::OwnRequest.into()),
        (false, _) if !is_approver()? => return Err(ApprovalError::NotYours.into()),
        (false, _) => {}
    }
    let seconds_left = held.seconds_left()?.ok_or(ApprovalError::Expired)?;
    Ok(WaitingApproval { requester: held.requester, seconds_left, approver: store.approver(token)?, shown: store.shown(token)? })
}

/// Approves what waits under a token. It is written down first, or not approved.
///
/// # Errors
/// It is not this caller's to approve, or it cannot be written down.
pub fn approve(token: &str) -> Result<WaitingApproval, Refusal> {
    let identity = caller::identify(None)?;
    let (store, token) = (Store::open(&identity)?, Token::parse(token)?);
    let waiting = look_as(&identity, &store, &token)?;
    if waiting.approver.is_some() {
        return Ok(waiting);
    }
    let ApprovalView { policy, origin, policy_sha256, request, .. } = &waiting.shown;
    let approved = ApprovalRecord { token_sha256: token.sha256(), requester: Some(waiting.requester), approver: Some(identity.caller.uid) };
    let policy = PolicyRef { name: policy.clone(), origin: origin.clone(), sha256: policy_sha256.clone() };
    let request = parse_request(request.as_bytes())?;
    AuditRecorder::new(AuditSubject::Request(&request), None, &Options::default()).approve(policy, approved)?;
    store.approve(&token, identity.caller.uid)?;
    Ok(WaitingApproval { approver: Some(identity.caller.uid), ..waiting })
}

/// Whether a text has the form of a token.
///
/// # Errors
/// It has not.
pub fn check_token(text: &str) -> Result<&str, Refusal> {
    Token::parse(text)?;
    Ok(text)
}

/// The hash by which a token stands in the audit log.
pub(crate) fn hash_of_token(token: &str) -> String {
    text::sha256(token.as_bytes())
}
