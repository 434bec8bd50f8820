//! What crosses a boundary: the request and the result of the fixed contract, and
//! the frames between launcher and executor, and between prover and probe.
//!
//! Only values and their encoding live here; nothing in this crate acts. It builds
//! without std, because the executor does. It does not judge a request: that is
//! `engine`'s work.
#![no_std]
#![forbid(unsafe_code)]
extern crate alloc;

#[cfg(feature = "json")]
mod egress;
#[cfg(feature = "json")]
pub mod ending;
#[cfg(feature = "form")]
pub mod form;
pub mod frame;
pub mod landlock;
pub mod layer;
mod limit;
pub mod memory_image;
#[cfg(feature = "json")]
pub mod modules;
pub mod probe;
#[cfg(feature = "json")]
mod report;
#[cfg(feature = "json")]
mod request;
pub mod screen;
#[cfg(feature = "service")]
pub mod service;
#[cfg(feature = "json")]
pub mod session;
pub mod step;
pub mod text;

#[cfg(feature = "json")]
pub use egress::*;
pub use limit::{LimitError, LimitKey, Limits, Quantity};
#[cfg(feature = "json")]
pub use report::*;
#[cfg(feature = "json")]
pub use request::{Base64, Encoding, LimitValue, MAX_REQUEST, NO_TEMPLATE, Request, Stdin, TextOrBase64};
