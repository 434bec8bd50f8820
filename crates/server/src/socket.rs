//! The UNIX socket for local users: one request and one result per connection.
//!
//! A connection carries the JSON of `stockade exec`, in both directions. The request ends
//! where the client closes its half, or at a NUL byte, which no JSON holds; after one, a
//! further byte is the number of a signal to cancel the run with. The result ends where the
//! server closes. A client that hangs up cancels the run.
//!
//! The kernel names the peer (SO_PEERCRED), and the grants decide in `engine` what it may run.
//! Nothing here listens: systemd does, and starts one server for each connection.

mod ask;
mod serve;
mod slot;

use std::time::Duration;

pub use ask::{ServerAnswer, ask};
pub use serve::{ServeError, ServedConnection, serve};
pub use slot::MAX_CONNECTIONS;

/// Ends a request whose stream stays open.
const END_OF_REQUEST: u8 = 0;
/// How long a client may take to send its request, and again to read its result.
const CLIENT_TIMEOUT: Duration = Duration::from_secs(20);
