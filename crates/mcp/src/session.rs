//! The session behind the tools: one call at a time, and `reset` after it has died.
//!
//! Each line is answered before the next is sent, except for one that cancels it. The client
//! of the session blocks, so its calls run on threads that may.

use std::{ffi::OsString, path::PathBuf, sync::Arc, time::Duration};

use anyhow::bail;
use serde_json::{Value, json};
use stockade_mcp_tools::{Answered, Cancelled, Session};
use stockade_protocol::session::{Cancel, Line, Only};
use stockade_session_client::{Answer, SessionClient, SessionError};
use tokio::{sync::Mutex, task::spawn_blocking};

/// How long a session may take to end after its input was closed.
const END_TIMEOUT: Duration = Duration::from_secs(5);

/// A `stockade session` as a child, which can be started again.
pub(crate) struct ChildSession {
    program: PathBuf,
    options: Vec<OsString>,
    /// The call that holds the lock has its turn. None: the session has died.
    client: Arc<Mutex<Option<Arc<SessionClient>>>>,
}

impl Session for ChildSession {
    fn ask(&self, line: Line, cancelled: Option<Cancelled>) -> Answered<'_> {
        Box::pin(self.ask_child(line, cancelled))
    }

    fn reset(&self) -> Answered<'_> {
        Box::pin(async move {
            {
                let mut slot = self.client.lock().await;
                if slot.is_none() {
                    *slot = Some(self.begin().await?);
                    return Ok(json!({"op": "reset", "ok": true}));
                }
            }
            self.ask_child(Line::Reset(Only { id: None }), None).await
        })
    }
}

impl ChildSession {
    /// Starts one.
    ///
    /// # Errors
    /// It cannot begin, for the reason that its first line names.
    pub(crate) async fn start(program: PathBuf, options: Vec<OsString>) -> anyhow::Result<Self> {
        let session = ChildSession { program, options, client: Arc::default() };
        *session.client.lock().await = Some(session.begin().await?);
        Ok(session)
    }

    async fn begin(&self) -> anyhow::Result<Arc<SessionClient>> {
        let (program, options) = (self.program.clone(), self.options.clone());
        let begun = spawn_blocking(move || {
            let client = SessionClient::start(&program, &options)?;
            client.wait_until_ready().map(|()| client)
        });
        Ok(Arc::new(begun.await??))
    }

    /// Sends a line and returns its answer. The task goes on to the end even where its caller
    /// stops waiting, so that no answer is taken for another line's.
    ///
    /// # Errors
    /// The session has died, with what is known of it.
    async fn ask_child(&self, line: Line, cancelled: Option<Cancelled>) -> anyhow::Result<Value> {
        let client = Arc::clone(&self.client);
        let asked = tokio::spawn(async move {
            let mut slot = client.lock().await;
            let Some(client) = slot.as_ref() else {
                bail!("the session has ended, and its files with it; call `reset` to start another");
            };
            match exchange(client, line, cancelled).await {
                Ok(answer) => Ok(Value::Object(answer)),
                Err(error) => Err(obituary(slot.take(), &error).await),
            }
        });
        asked.await?
    }

    /// Ends the session by closing its input. A busy one ends when this process does, because
    /// its output then has no reader.
    pub(crate) async fn close(&self) {
        if let Some(client) = self.client.try_lock().ok().and_then(|mut slot| slot.take()) {
            // Nothing is left to do for one that cannot be waited for.
            let _ended = spawn_blocking(move || client.end(Some(END_TIMEOUT))).await;
        }
    }
}

/// Runs a call of the client on a thread that may block.
async fn blocking<T: Send + 'static>(
    client: &Arc<SessionClient>,
    call: impl FnOnce(&SessionClient) -> Result<T, SessionError> + Send + 'static,
) -> anyhow::Result<T> {
    let client = Arc::clone(client);
    Ok(spawn_blocking(move || call(&client)).await??)
}

async fn exchange(client: &Arc<SessionClient>, line: Line, cancelled: Option<Cancelled>) -> anyhow::Result<Answer> {
    blocking(client, move |client| client.send(&line)).await?;
    let answer = blocking(client, SessionClient::answer);
    let Some(cancelled) = cancelled else { return answer.await };
    tokio::pin!(answer);
    tokio::select! {
        answer = &mut answer => answer,
        () = cancelled => {
            blocking(client, |client| client.send(&Line::Cancel(Cancel { run: None, id: None }))).await?;
            let answered = answer.await?;
            // The line that cancels has an answer too.
            blocking(client, SessionClient::answer).await?;
            Ok(answered)
        }
    }
}

/// What is known of a session that has stopped answering.
async fn obituary(client: Option<Arc<SessionClient>>, error: &anyhow::Error) -> anyhow::Error {
    let ended = match client {
        Some(client) => spawn_blocking(move || client.end(Some(END_TIMEOUT))).await.ok().and_then(Result::ok),
        None => None,
    };
    let how = ended.map_or_else(|| error.to_string(), |status| status.to_string());
    anyhow::anyhow!("the session has died ({how}), and its files with it; call `reset` to start another")
}
