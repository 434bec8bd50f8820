//! The egress gate of one run, as the launcher begins it.
//!
//! The child makes the sockets in its network namespace and hands them over; from there
//! on everything is done out here, where the sandbox cannot reach. What may leave is the
//! plan's whitelist. Whether the gate is confined is not known here yet: it is asked
//! before any code runs ([`Gate::confirm`]).

use rustix::fd::{AsFd, OwnedFd};
use stockade_egress::{
    RunAs,
    gate::{Gate, GateError, Request},
    inside::Sockets,
    resolve::Resolver,
    setup,
};
use stockade_policy::plan::{EgressPlan, Mode, Plan};

use crate::{
    LaunchError, What,
    relay::is_readable_within,
    supervise::{SETUP_DEADLINE, overdue},
};

/// Takes the child's sockets, sets its namespace up and starts the gate.
///
/// # Errors
/// This host's kernel lacks a part, the gate's process cannot be made, or the child stands still.
pub(crate) fn begin(plan: &Plan, egress: &EgressPlan, handover: &OwnedFd) -> Result<Gate, LaunchError> {
    let failed_to_take = |errno| LaunchError::system(What::Egress, "take the sandbox's network sockets", errno);
    if !is_readable_within(handover, SETUP_DEADLINE).map_err(failed_to_take)? {
        return Err(overdue("the sandbox's network sockets had not come", SETUP_DEADLINE));
    }
    let sockets = Sockets::receive(handover.as_fd()).map_err(failed_to_take)?;
    let channels = setup::configure(sockets)
        .map_err(|error| LaunchError::other(What::Egress, format!("set up the egress gate: {error}; `stockade doctor` says more")))?;
    let read = |path| std::fs::read_to_string(path).unwrap_or_default();
    let request = Request {
        whitelist: egress.whitelist.clone(),
        resolver: Resolver::new(&read("/etc/hosts"), &read("/etc/resolv.conf")),
        run_as: match plan.mode {
            Mode::Rootless => RunAs::Caller,
            // The run's own id, or the caller's: never root's.
            Mode::Root => RunAs::User { uid: plan.identity.outside.0, gid: plan.identity.outside.1 },
        },
    };
    Gate::start(channels, request).map_err(|error| failed(&error))
}

/// Words a failure of the gate.
pub(crate) fn failed(error: &GateError) -> LaunchError {
    LaunchError::other(What::Egress, error.to_string())
}
