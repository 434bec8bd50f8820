//! What this host can do for a policy: `doctor` tries every layer, `inventory` asks every
//! interpreter for its version and packages.
//!
//! Both run real programs through `engine`, so they cannot disagree with `exec`. Nothing
//! here decides how a run is confined.
#![forbid(unsafe_code)]

pub mod doctor;
pub mod inventory;
