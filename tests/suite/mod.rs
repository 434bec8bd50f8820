//! Promises of the program, one module for each kind: requests and results, verdicts, policies,
//! the kernel's surface, attacks, sessions, what a run leaves behind. Each denial has a control.

mod agent_misuse;
mod approval;
mod audit;
mod bad_input;
mod callers;
mod cleanup;
pub mod container;
mod contract;
mod cross_run;
mod delegation;
mod faults;
mod filters;
mod host_ids;
mod import_hooks;
mod kernel;
mod known_cves;
mod limit_bypasses;
mod load;
mod markdown;
mod meta;
mod policies;
mod policy_explain;
mod pool;
mod proof_files;
mod prove;
mod regressions;
mod remedies;
mod resources;
mod run;
mod screen;
mod session_life;
mod sessions;
mod shims;
mod socket;
mod verdicts;
mod workloads;
