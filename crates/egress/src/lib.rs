//! Egress: which peers a sandbox may reach, inspection of hostile bytes, and the gate.
//!
//! The pure half decides and parses: no system call, no clock, bounded memory. The other half moves
//! packets and bytes, and asks the pure half before it does.
//!
//! The launcher starts one gate for each run under a whitelist. The gate lives as long as the
//! run, outside the sandbox, on sockets that the child has made inside:
//!
//! ```text
//! payload ─ connect ─> lo of the sandbox ─ nft: hold, log the SYN ─> gate: decide, look up, dial ─────> peer
//!                                                                      │ reached: send the SYN on       │
//! payload <═══════════ bytes ═══════════> transparent listener <═ inspected until the name is sure ═══> │
//! payload ─ port 53, any address ────────> name socket ─> answered from the rules, never passed on
//!                                                      record ─> Report.egress
//! ```
#![forbid(unsafe_code)]

// Pure.
pub mod decide;
pub mod dns;
pub mod http;
pub mod inspect;
pub mod names;
pub mod packet;
pub mod record;
pub mod tls;

// With system calls.
mod confine;
mod dial;
pub mod gate;
pub mod netlink;
pub mod netns;
mod nft;
mod poll;
mod probe;
mod relay;
pub mod resolve;
mod route;
mod serve;
pub mod setup;

pub use confine::RunAs;
pub use probe::{ProbeError, probe};
