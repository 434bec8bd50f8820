//! Finding the policy of a run.
//!
//! Shipped policies were resolved when the program was built. `stockade-policy` decides
//! which file a name means, and which files are trusted.

use std::{env, path::PathBuf};

use stockade_policy::{
    LookupContext, PolicyError,
    filter::{FilterError, Filters},
    model::Policy,
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

/// Loads the policy that the options name.
///
/// # Errors
/// There is none of that name, it is not trusted, or it has errors.
pub fn load_policy(options: &Options) -> Result<LoadedPolicy, Refusal> {
    let name = options.policy.as_deref().unwrap_or(DEFAULT);
    // Before the file is read: an error would quote it to a caller without a grant.
    check_grants(&caller::identify(options.peer.as_ref())?, name, None, options)?;
    let context = lookup_context();
    if let Some((policy, filters)) = shipped(name, &context) {
        return Ok(LoadedPolicy { policy, filters });
    }
    let policy = stockade_policy::load(name, &context)?;
    let filters = Filters::new(&policy.seccomp).map_err(|error| UnusableFilter { policy: policy.name.clone(), error })?;
    Ok(LoadedPolicy { policy, filters })
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
