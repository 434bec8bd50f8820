//! The companion program `stockade-remote`: what `stockade exec`, `ps` and `kill` become where they
//! are given `--server`.
//!
//! Beside `stockade-image` it alone links an HTTP client and TLS. It runs no code here and holds no
//! rights beyond its caller's: it sends a request to `stockade serve`, and prints what comes back. The
//! key goes to the address that was named and nowhere else. It believes nothing of an answer but what
//! it is: every part has a limit, and what is no answer of a service is an error. It sends no request
//! to run code twice.
#![forbid(unsafe_code)]

mod arguments;
mod connect;
mod error;
mod exec;
mod key;
mod lines;
mod runs;
mod server;
mod signals;

use std::{
    io::{self, Write},
    process::ExitCode,
};

use arguments::{Arguments, Task};
use error::RemoteError;
use stockade_protocol::text::visible;

fn main() -> ExitCode {
    let Some(arguments) = Arguments::of_process() else {
        warn("stockade-remote: only `stockade` starts this program, for its option --server");
        return ExitCode::from(2);
    };
    match &arguments.task {
        Task::Exec(task) => exec::run(&arguments, task),
        Task::Ps(task) => runs::list(&arguments, *task),
        Task::Kill(run) => runs::kill(&arguments, run),
    }
}

/// Says something on stderr; hidden characters are escaped.
fn warn(text: &str) {
    let _stderr_closed = writeln!(io::stderr().lock(), "{}", visible(text).trim_end());
}
