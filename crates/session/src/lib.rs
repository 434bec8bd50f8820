//! The protocol of `stockade session`: one JSON object on a line asks, one answers.
//!
//! Lines come from whoever started the session and are read strictly: what is not
//! understood is answered with an error, and changes nothing. Answers come in the order of
//! the lines. Nothing that code in a sandbox prints is ever read here: it comes back inside
//! JSON strings. Who may have what is decided in `runtime`, as for every door.
#![forbid(unsafe_code)]

mod answer;
mod line;
mod queue;
mod serve;
mod voice;

pub use serve::{Ended, serve};
