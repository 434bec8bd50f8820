//! What may leave a sandbox: the decision, the inspection of hostile bytes, the gate.
//!
//! Two halves. The pure one makes no system call and holds no clock: it decides, parses
//! and words, on typed values and bytes that it is handed, with bounded memory. The other
//! moves packets and bytes and asks the first before it does.
#![forbid(unsafe_code)]

// The pure half.
pub mod decide;
pub mod dns;
pub mod hello;
pub mod http;
pub mod inspect;
pub mod names;
pub mod packet;
pub mod record;

// The mechanism.
mod confine;
mod dial;
pub mod gate;
pub mod inside;
mod netlink;
mod nft;
mod poll;
mod probe;
mod relay;
pub mod resolve;
mod route;
mod serve;
pub mod setup;

pub use confine::RunAs;
pub use probe::{Cannot, probe};
