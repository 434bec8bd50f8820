//! The tools of stockade for the Model Context Protocol: their schemas, what each call asks of a
//! session, and what a model is told of the answer.
//!
//! `stockade-mcp` serves them on stdin and stdout in front of a `stockade session`, `stockade-serve`
//! over HTTP in front of a session of a key. Both give the same tools and the same results. Nothing here
//! starts a process, keeps a session or judges an argument: the session does.
#![forbid(unsafe_code)]

mod long;
mod results;
mod schema;
mod tools;

use std::pin::Pin;

use serde_json::Value;
use stockade_protocol::session::Line;

pub use tools::{Server, instructions};

/// Completes when the caller cancels a request.
pub type Cancelled = Pin<Box<dyn Future<Output = ()> + Send>>;

/// What a session answers: one JSON object, or in words why there is none.
pub type Answered<'a> = Pin<Box<dyn Future<Output = anyhow::Result<Value>> + Send + 'a>>;

/// The session behind the tools of one client.
pub trait Session: Send + Sync + 'static {
    /// Has it do what a line says. It goes on to its end even where its caller has gone.
    ///
    /// # Errors
    /// It has ended, or cannot take the line now.
    fn ask(&self, line: Line, cancelled: Option<Cancelled>) -> Answered<'_>;

    /// Empties what it keeps. One of `stockade mcp` that has ended is begun anew; one of a service is not.
    ///
    /// # Errors
    /// It cannot begin.
    fn reset(&self) -> Answered<'_>;
}
