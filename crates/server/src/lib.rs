//! The servers: `session` answers JSON lines on stdin, `socket` one request of a local user over
//! a UNIX socket, `service` many requests at a time over HTTP.
//!
//! Who may have what is decided in `engine`, for every client alike; nothing here starts a
//! sandbox by itself.
#![forbid(unsafe_code)]

pub mod service;
pub mod session;
pub mod socket;
