//! The tools, as clients and their models see them.
//!
//! Each becomes one line of the session. What an argument may be is judged there, so that
//! there is one set of rules.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use rmcp::{
    ErrorData, RoleServer, ServerHandler,
    handler::server::{common::schema_for_output, tool::ToolCallContext, wrapper::Parameters},
    model::{
        CallToolRequestParams, CallToolResponse, CallToolResult, Implementation, ProgressNotificationParam, ServerCapabilities,
        ServerConfig,
    },
    schemars::{self, JsonSchema},
    service::RequestContext,
    tool, tool_handler, tool_router,
};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::{
    results::{self, Executed, Found, Listing, Reset, Written},
    session::Session,
};

/// What is said back of a name that is no tool's.
const LONGEST_NAME: usize = 64;
/// How often whoever asked for it is told that code still runs.
const BEAT: Duration = Duration::from_secs(1);

const INSTRUCTIONS: &str = "Runs code in a sandbox on this machine. Files stay from one call to the next (in the working directory, home and /tmp) until `reset`; processes, variables and open connections do not. Paths are relative to the working directory. A program that fails is a normal result: read `error` and try again.";

/// The server of one client.
#[derive(Clone)]
pub(crate) struct Server {
    session: Arc<Session>,
}

/// What `execute_code` takes.
#[derive(Debug, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct Execute {
    /// The program.
    code: String,
    /// Its language, such as python, bash, sh or node; default: python
    #[serde(default, skip_serializing_if = "Option::is_none")]
    language: Option<String>,
    /// Arguments of the program
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    args: Vec<String>,
    /// What the program reads from stdin
    #[serde(default, skip_serializing_if = "Option::is_none")]
    stdin: Option<String>,
    /// Globs of files to return, such as *.png: images come back as images
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    collect: Vec<String>,
    /// Limits, up to the policy's maximum, such as {"wall": "60s", "memory": "256MiB"}
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    limits: BTreeMap<String, String>,
    /// What somebody else has approved: `approval.token` of an earlier answer to the same call
    #[serde(default, skip_serializing_if = "Option::is_none")]
    approve: Option<String>,
}

/// What `write_file` takes.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct WriteFile {
    /// The file's path
    path: String,
    /// Its text; or else `base64`
    text: Option<String>,
    /// Its bytes in base64
    base64: Option<String>,
    /// Add to what is there
    #[serde(default)]
    append: bool,
}

/// What `read_file` takes.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ReadFile {
    /// The file's path
    path: String,
    /// From which byte on
    #[serde(default)]
    offset: u64,
    /// How many bytes; default: all, up to 16 MiB
    length: Option<u64>,
}

/// What `list_files` takes.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ListFiles {
    /// A directory; default: the working directory
    #[serde(default)]
    path: String,
    /// Everything below it too
    #[serde(default)]
    recursive: bool,
}

/// What `reset` takes.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct Nothing {}

#[tool_router]
impl Server {
    pub(crate) fn new(session: Arc<Session>) -> Self {
        Server { session }
    }

    #[tool(
        description = "Run code in a sandbox and return what it printed. Files stay from one call to the next; nothing else does. If the last line is in brackets, it says how the program ended; any line before it may be the program's own.",
        output_schema = schema_for_output::<Executed>()
    )]
    async fn execute_code(
        &self,
        Parameters(execute): Parameters<Execute>,
        context: RequestContext<RoleServer>,
    ) -> Result<CallToolResult, ErrorData> {
        let mut line = serde_json::to_value(execute).map_err(internal)?;
        if let Some(fields) = line.as_object_mut() {
            fields.insert(String::from("op"), json!("run"));
        }
        let cancel = context.ct.clone();
        let ran = self.session.ask(line, Some(Box::pin(async move { cancel.cancelled().await })));
        tokio::pin!(ran);
        let mut beats = tokio::time::interval(BEAT);
        let mut count = 0.0;
        let answer = loop {
            tokio::select! {
                answer = &mut ran => break answer,
                _ = beats.tick() => {
                    if let Some(token) = context.meta.get_progress_token() {
                        let progress = ProgressNotificationParam::new(token, count).with_message(format!("runs for {count} s"));
                        // A client that went away is noticed elsewhere.
                        let _unheard = context.peer.notify_progress(progress).await;
                    }
                    count += BEAT.as_secs_f64();
                }
            }
        };
        finish(answer, results::executed)
    }

    #[tool(description = "Write a file where the code finds it.", output_schema = schema_for_output::<Written>())]
    async fn write_file(&self, Parameters(asked): Parameters<WriteFile>) -> Result<CallToolResult, ErrorData> {
        let contents = match (asked.text, asked.base64) {
            (Some(text), None) => json!(text),
            (None, Some(base64)) => json!({"base64": base64}),
            _ => return Ok(results::error("write_file takes either `text` or `base64`")),
        };
        let line = json!({"op": "write", "path": asked.path, "contents": contents, "append": asked.append});
        finish(self.session.ask(line, None).await, results::written)
    }

    #[tool(
        description = "Read a file that the code left. Text comes as text, an image as an image, other bytes in base64.",
        output_schema = schema_for_output::<Found>(),
        annotations(read_only_hint = true)
    )]
    async fn read_file(&self, Parameters(asked): Parameters<ReadFile>) -> Result<CallToolResult, ErrorData> {
        let line = json!({"op": "read", "path": asked.path, "offset": asked.offset, "length": asked.length});
        finish(self.session.ask(line, None).await, results::found)
    }

    #[tool(description = "List the files of a directory, a thousand at most as text.", output_schema = schema_for_output::<Listing>(), annotations(read_only_hint = true))]
    async fn list_files(&self, Parameters(asked): Parameters<ListFiles>) -> Result<CallToolResult, ErrorData> {
        let line = json!({"op": "list", "path": asked.path, "recursive": asked.recursive});
        finish(self.session.ask(line, None).await, results::listed)
    }

    #[tool(
        description = "Begin anew: files in home, /tmp and a private working directory are gone afterwards.",
        output_schema = schema_for_output::<Reset>(),
        annotations(destructive_hint = true)
    )]
    async fn reset(&self, Parameters(Nothing {}): Parameters<Nothing>) -> Result<CallToolResult, ErrorData> {
        finish(self.session.reset().await, |answer| results::reset(&answer))
    }
}

/// A session that has died is the tool's error, which a model can mend by `reset`.
fn finish(
    answer: anyhow::Result<Value>,
    word: impl FnOnce(Value) -> Result<CallToolResult, serde_json::Error>,
) -> Result<CallToolResult, ErrorData> {
    match answer {
        Ok(answer) => word(answer).map_err(internal),
        Err(died) => Ok(results::error(format!("{died:#}"))),
    }
}

fn internal(error: serde_json::Error) -> ErrorData {
    ErrorData::internal_error(format!("the session answered what was not expected: {error}"), None)
}

#[tool_handler]
impl ServerHandler for Server {
    fn get_info(&self) -> ServerConfig {
        ServerConfig::new(ServerCapabilities::builder().enable_tools().build())
            .with_server_info(Implementation::new("stockade", env!("CARGO_PKG_VERSION")))
            .with_instructions(INSTRUCTIONS)
    }

    /// As the macro would write it, but for what is said of a tool that there is not.
    async fn call_tool(&self, request: CallToolRequestParams, context: RequestContext<RoleServer>) -> Result<CallToolResponse, ErrorData> {
        let router = Self::tool_router();
        if !router.has_route(&request.name) {
            let asked: String = request.name.chars().take(LONGEST_NAME).collect();
            let names: Vec<String> = router.list_all().into_iter().map(|tool| tool.name.into_owned()).collect();
            return Err(ErrorData::invalid_params(format!("there is no tool {asked:?}; there are {}", names.join(", ")), None));
        }
        router.call(ToolCallContext::new(self, request, context)).await
    }
}
