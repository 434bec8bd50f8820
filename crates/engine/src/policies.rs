//! Finding the policy of a run.
//!
//! Shipped policies were resolved when the program was built. `stockade-policy` decides
//! which file a name means, and which files are trusted.

use std::{env, path::PathBuf};

use stockade_policy::{
    Ancestry, LookupContext, PolicyError,
    filter::{FilterError, Filters},
    model::{Policy, SocketFamily},
};
use stockade_protocol::Verdict;

use crate::{Options, Refusal, RefusalCause, admit::check_grants, caller};

/// The policy of a run that names none.
const DEFAULT: &str = "default";

static RESOLVED: &[(&str, &[u8])] = include!(concat!(env!("OUT_DIR"), "/shipped.rs"));

/// The directories in which this process looks up policy names.
pub fn lookup_context() -> LookupContext {
    if rustix::process::geteuid().is_root() {
        return LookupContext::privileged();
    }
    let absolute = |name: &str| env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let config = absolute("XDG_CONFIG_HOME").or_else(|| absolute("HOME").map(|home| home.join(".config")));
    LookupContext::rootless(config.map(|config| config.join("stockade/policies")))
}

/// A policy with its filters.
pub struct LoadedPolicy {
    /// The policy.
    pub policy: Policy,
    /// Its system call filters, compiled.
    pub filters: Filters,
}

impl RefusalCause for PolicyError {
    fn verdict_and_reason(&self) -> (Verdict, &'static str) {
        let reason = match self {
            PolicyError::Name { .. } => "policy_name",
            PolicyError::NotFound { .. } => "policy_not_found",
            PolicyError::Read(_) => "policy_unreadable",
            PolicyError::Invalid(_) => "policy_invalid",
        };
        (Verdict::SandboxError, reason)
    }
}

/// A policy whose system calls no filter can allow.
#[derive(Debug, thiserror::Error)]
#[error("policy `{policy}`: {error}")]
struct UnusableFilter {
    policy: String,
    error: FilterError,
}

impl RefusalCause for UnusableFilter {
    fn verdict_and_reason(&self) -> (Verdict, &'static str) {
        (Verdict::SandboxError, "filter_unusable")
    }
}

/// Peers that a caller has allowed by its own right, where it has none or they make no sense.
#[derive(Debug, thiserror::Error)]
enum AllowError {
    #[error("--allow: root runs this for uid {0}, whose network the policy alone decides; call stockade without sudo, or name a policy")]
    NotYours(u32),
    #[error("--allow {rule}: policy `{policy}` has the rule {other} for the same port, which conflicts with it")]
    Conflict { rule: String, policy: String, other: String },
    #[error("--allow: policy `{0}` lets no program open an Internet socket; take another policy, such as `default`")]
    NoSockets(String),
}

impl RefusalCause for AllowError {
    fn verdict_and_reason(&self) -> (Verdict, &'static str) {
        match self {
            AllowError::NotYours(_) => (Verdict::SandboxError, "allow_not_yours"),
            AllowError::Conflict { .. } => (Verdict::BadRequest, "allow_conflicts"),
            AllowError::NoSockets(_) => (Verdict::BadRequest, "allow_without_sockets"),
        }
    }
}

/// Adds to a policy the peers that the caller allows. Only a caller that uses its own rights may: it
/// could as well write such a policy.
fn allow(mut policy: Policy, options: &Options) -> Result<Policy, Refusal> {
    if options.allow.is_empty() {
        return Ok(policy);
    }
    let identity = caller::identify(options.peer.as_ref())?;
    if identity.on_behalf {
        return Err(AllowError::NotYours(identity.caller.uid).into());
    }
    let families = &policy.seccomp.socket_families;
    if !families.iter().any(|family| matches!(family, SocketFamily::Inet | SocketFamily::Inet6)) {
        return Err(AllowError::NoSockets(policy.name).into());
    }
    for rule in &options.allow {
        let added = policy.egress.whitelist.add(rule.clone());
        if let Err(other) = added {
            let (rule, other) = (rule.to_string(), other.to_string());
            return Err(AllowError::Conflict { rule, policy: policy.name, other }.into());
        }
    }
    Ok(policy)
}

/// The name or file of the policy that the options ask for.
pub(crate) fn name(options: &Options) -> &str {
    options.policy.as_deref().unwrap_or(DEFAULT)
}

/// Loads the policy that the options name, with the peers that they add.
///
/// # Errors
/// There is none of that name, it is not trusted, or it has errors; or the peers are not for this
/// caller to add.
pub fn load_policy(options: &Options) -> Result<LoadedPolicy, Refusal> {
    let name = name(options);
    // Before the file is read: an error would quote it to a caller without a grant.
    check_grants(&caller::identify(options.peer.as_ref())?, name, None, options)?;
    let context = lookup_context();
    if let Some((policy, filters)) = shipped(name, &context) {
        return Ok(LoadedPolicy { policy: allow(policy, options)?, filters });
    }
    let policy = allow(stockade_policy::load(name, &context)?, options)?;
    let filters = Filters::new(&policy.seccomp).map_err(|error| UnusableFilter { policy: policy.name.clone(), error })?;
    Ok(LoadedPolicy { policy, filters })
}

/// What the policy of this name extends, and which files hide a shipped policy on the way.
///
/// # Errors
/// It cannot be loaded. Grants are not asked: the caller of this has loaded it before.
pub fn ancestry(name: &str) -> Result<Ancestry, Refusal> {
    Ok(stockade_policy::ancestry(name, &lookup_context())?)
}

/// A shipped policy that no file shadows.
fn shipped(name: &str, context: &LookupContext) -> Option<(Policy, Filters)> {
    let bytes = RESOLVED.iter().find(|(shipped, _)| *shipped == name)?.1;
    let file = format!("{name}.toml");
    let directories = std::iter::once(&context.system_dir).chain(&context.user_dir);
    // Anything but "not there" is for the loader to judge.
    for directory in directories {
        match rustix::fs::lstat(directory.join(&file)) {
            Err(rustix::io::Errno::NOENT) => {}
            _ => return None,
        }
    }
    postcard::from_bytes(bytes).ok()
}

/// Every policy that a name can mean here.
pub fn list_policies() -> Vec<(String, stockade_policy::model::Origin)> {
    stockade_policy::list_names(&lookup_context())
}
