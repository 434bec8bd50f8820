//! A `stockade session` as a child, asked one thing at a time.
//!
//! Each line that is sent is answered before another is, save for one that cancels it. A
//! session that has died is said to have, until `reset` starts another.

use std::{ffi::OsString, path::PathBuf, process::Stdio, sync::Arc, time::Duration};

use anyhow::{Context, bail};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader},
    process::{Child, ChildStdin, ChildStdout, Command},
    sync::Mutex,
};

/// How long a session that was asked to end may take.
const PATIENCE: Duration = Duration::from_secs(5);

/// See the module.
pub(crate) struct Session {
    program: PathBuf,
    options: Vec<OsString>,
    /// Whoever holds it has the turn; none: it has died, or was never begun.
    process: Mutex<Option<Process>>,
}

struct Process {
    child: Child,
    lines: ChildStdin,
    answers: BufReader<ChildStdout>,
    asked: u64,
}

/// What cancels a request.
pub(crate) type Cancelled = std::pin::Pin<Box<dyn Future<Output = ()> + Send>>;

impl Session {
    /// Starts one.
    ///
    /// # Errors
    /// It cannot begin, for the reason that its first line names.
    pub(crate) async fn start(program: PathBuf, options: Vec<OsString>) -> anyhow::Result<Arc<Self>> {
        let process = Process::start(&program, &options).await?;
        Ok(Arc::new(Session { program, options, process: Mutex::new(Some(process)) }))
    }

    /// Sends a line and returns its answer. Once begun this goes on to the end whether or
    /// not its caller waits, so that no answer is taken for another's.
    ///
    /// # Errors
    /// The session has died, with what is known of it.
    pub(crate) async fn ask(self: &Arc<Self>, line: Value, cancelled: Option<Cancelled>) -> anyhow::Result<Value> {
        let session = Arc::clone(self);
        let asked = tokio::spawn(async move {
            let mut process = session.process.lock().await;
            let Some(alive) = process.as_mut() else {
                bail!("the session has ended, and its files with it; call `reset` to begin another");
            };
            let answer = alive.ask(line, cancelled).await;
            if answer.is_err()
                && let Some(dead) = process.take()
            {
                return Err(dead.obituary().await);
            }
            answer
        });
        asked.await?
    }

    /// Empties what the session keeps; where it has died, starts another.
    ///
    /// # Errors
    /// It cannot begin.
    pub(crate) async fn reset(self: &Arc<Self>) -> anyhow::Result<Value> {
        {
            let mut process = self.process.lock().await;
            if process.is_none() {
                *process = Some(Process::start(&self.program, &self.options).await?);
                return Ok(json!({"op": "reset", "ok": true}));
            }
        }
        self.ask(json!({"op": "reset"}), None).await
    }

    /// Ends it, by the end of its lines. One that is busy ends when this process does, at
    /// which nobody reads its answers any more.
    pub(crate) async fn close(&self) {
        let process = self.process.try_lock().ok().and_then(|mut process| process.take());
        if let Some(Process { mut child, lines, answers, .. }) = process {
            drop(lines);
            // Dropping the child kills it.
            let _ended_or_killed = tokio::time::timeout(PATIENCE, child.wait()).await;
            drop(answers);
        }
    }
}

impl Process {
    async fn start(program: &PathBuf, options: &[OsString]) -> anyhow::Result<Self> {
        let mut command = Command::new(program);
        command.arg("session").args(options).stdin(Stdio::piped()).stdout(Stdio::piped()).kill_on_drop(true);
        let mut child = command.spawn().with_context(|| format!("start {}", program.display()))?;
        let (Some(lines), Some(answers)) = (child.stdin.take(), child.stdout.take()) else { bail!("the session has no pipes") };
        let mut process = Process { child, lines, answers: BufReader::new(answers), asked: 0 };
        match process.answer().await {
            Ok(ready) if ready.get("ok") == Some(&Value::Bool(true)) => Ok(process),
            Ok(refused) => bail!("{}", refused.get("error").and_then(Value::as_str).unwrap_or("the session did not begin")),
            Err(_) => Err(process.obituary().await),
        }
    }

    async fn ask(&mut self, mut line: Value, cancelled: Option<Cancelled>) -> anyhow::Result<Value> {
        self.asked += 1;
        let id = self.asked.to_string();
        if let Some(fields) = line.as_object_mut() {
            fields.insert(String::from("id"), json!(id));
        }
        self.send(&line).await?;
        let Some(cancelled) = cancelled else { return self.answer().await };
        // Reading a line is not to be broken off in its middle: it is one future throughout.
        let mut asked_to_end = false;
        let answered = {
            let Process { lines, answers, .. } = &mut *self;
            let answer = answer(answers);
            tokio::pin!(answer);
            tokio::select! {
                answer = &mut answer => answer,
                () = cancelled => {
                    asked_to_end = true;
                    send(lines, &json!({"op": "cancel", "run": id})).await?;
                    answer.await
                }
            }
        }?;
        if asked_to_end {
            // Of the line that cancelled.
            self.answer().await?;
        }
        Ok(answered)
    }

    async fn send(&mut self, line: &Value) -> anyhow::Result<()> {
        send(&mut self.lines, line).await
    }

    async fn answer(&mut self) -> anyhow::Result<Value> {
        answer(&mut self.answers).await
    }

    /// What is known of a session that has stopped answering.
    async fn obituary(mut self) -> anyhow::Error {
        drop((self.lines, self.answers));
        let how = match tokio::time::timeout(PATIENCE, self.child.wait()).await {
            Ok(Ok(status)) => status.to_string(),
            Ok(Err(error)) => error.to_string(),
            Err(_) => String::from("it does not answer, and was killed"),
        };
        anyhow::anyhow!("the session has died ({how}); nothing of it is left, its files neither; call `reset` to begin another")
    }
}

async fn send(lines: &mut ChildStdin, line: &Value) -> anyhow::Result<()> {
    let mut bytes = serde_json::to_vec(line)?;
    bytes.push(b'\n');
    lines.write_all(&bytes).await?;
    Ok(lines.flush().await?)
}

async fn answer(answers: &mut BufReader<ChildStdout>) -> anyhow::Result<Value> {
    let mut line = Vec::new();
    answers.read_until(b'\n', &mut line).await?;
    if line.is_empty() {
        bail!("the session has closed its output");
    }
    Ok(serde_json::from_slice(&line)?)
}
