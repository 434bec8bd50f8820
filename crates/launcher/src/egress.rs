//! Starting the egress gate of one run.
//!
//! The child makes the sockets in its network namespace and hands them over. Everything else is
//! done outside the sandbox, out of its reach. What may leave is the plan's whitelist. Whether
//! the gate is confined is not known here: [`Gate::confirm`] is asked before any code runs.

use rustix::fd::{AsFd, OwnedFd};
use stockade_egress::{
    RunAs,
    gate::{Gate, GateRequest},
    netns::Sockets,
    resolve::Resolver,
    setup,
};
use stockade_policy::plan::{EgressPlan, Mode, Plan};

use crate::{ErrorKind, LaunchError, error::ExecutorError, relay::is_readable_within, supervise::SETUP_TIMEOUT};

/// Receives the child's sockets, sets its network namespace up and starts the gate.
///
/// # Errors
/// The kernel lacks a feature, the gate's process cannot be made, or the child does not go on.
pub(crate) fn begin(plan: &Plan, egress: &EgressPlan, handover: &OwnedFd) -> Result<Gate, LaunchError> {
    let failed_to_take = LaunchError::system(ErrorKind::Egress, "take the sandbox's network sockets");
    if !is_readable_within(handover, SETUP_TIMEOUT).map_err(failed_to_take)? {
        return Err(ExecutorError::Overdue { missing: "the sandbox's network sockets had not come", after: SETUP_TIMEOUT }.into());
    }
    let sockets = Sockets::receive(handover.as_fd()).map_err(failed_to_take)?;
    let channels = setup::configure(sockets).map_err(LaunchError::EgressSetup)?;
    let read = |path| std::fs::read_to_string(path).unwrap_or_default();
    let request = GateRequest {
        whitelist: egress.whitelist.clone(),
        resolver: Resolver::new(&read("/etc/hosts"), &read("/etc/resolv.conf")),
        alerts: egress.alerts.clone(),
        run_as: match plan.mode {
            Mode::Rootless => RunAs::Caller,
            // The run's own id, or the caller's: never root's.
            Mode::Root => RunAs::User { uid: plan.identity.outside.0, gid: plan.identity.outside.1 },
        },
    };
    Ok(Gate::start(channels, request)?)
}
