//! Interfaces of other services, each translated to a request of `exec` and back.
//!
//! A client is to be moved here by changing its URL alone. What another service accepts and this one
//! cannot do is answered with a message that says so, never ignored.

pub mod execute;
mod fields;
pub mod sandbox_fusion;

pub use fields::{Invalid, Location, Mistake};
