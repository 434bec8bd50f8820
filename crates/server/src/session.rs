//! The protocol of `stockade session`: each line has one JSON object, and one line answers it.
//!
//! Lines come from the session's caller and are parsed strictly: a malformed line is answered
//! with an error and changes nothing. Answers keep the order of the lines. Output of code in a
//! sandbox is never parsed here: it comes back inside JSON strings. `engine` decides what is
//! permitted, as for every client.

pub(crate) mod answer;
pub(crate) mod line;
mod queue;
pub(crate) mod serve;
mod writer;

pub use serve::{SessionEnd, serve};
