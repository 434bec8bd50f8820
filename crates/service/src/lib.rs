//! The door for local users: one request and one result over a UNIX socket.
//!
//! A connection carries the JSON of `stockade exec`, in both directions. The request ends
//! where the client closes its half, or at a NUL byte, which no JSON holds; after one, a
//! further byte is the number of a signal to cancel the run with. The result ends where the
//! server closes. Whoever hangs up cancels the run.
//!
//! Who asks is what the kernel says of the peer, and who may have what the grants decide,
//! in `runtime`, as for every door. Nothing here listens: systemd does, and starts one
//! server for each connection.
#![forbid(unsafe_code)]

mod ask;
mod place;
mod serve;

use std::time::Duration;

pub use ask::{Answer, ask};
pub use place::MOST_PLACES;
pub use serve::{ServeError, Served, serve};

/// Ends a request that does not end with its stream.
const END_OF_REQUEST: u8 = 0;
/// How long a client may take to send its request, and again to take its result.
const PATIENCE: Duration = Duration::from_secs(20);
