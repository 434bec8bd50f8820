//! The tools, as clients and their models see them.
//!
//! Each call becomes one line of the session, which alone judges the arguments.

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
use serde::Deserialize;
use serde_json::Value;
use stockade_protocol::{
    Base64, Encoding, LimitValue, Request, TextOrBase64,
    session::{DirectoryListing, FilePart, Line, List, Read, Write, WrittenFile},
};

use crate::{
    results::{self, Executed, Reset},
    session::Session,
};

/// How much of an unknown tool's name an error repeats.
const MAX_NAME_LEN: usize = 64;
/// How often a client gets progress while code runs.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(1);

const INSTRUCTIONS: &str = "Runs code in a sandbox on this machine. Files stay from one call to the next (in the working directory, home and /tmp) until `reset`; processes, variables and open connections do not. Paths are relative to the working directory. A program that fails is a normal result: read `error` and try again.";

/// The server of one client.
#[derive(Clone)]
pub(crate) struct Server {
    session: Arc<Session>,
}

/// What `execute_code` takes.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct Execute {
    /// The program.
    code: String,
    /// Its language, such as python, bash, sh or node; default: python
    language: Option<String>,
    /// Arguments of the program
    #[serde(default)]
    args: Vec<String>,
    /// What the program reads from stdin
    stdin: Option<String>,
    /// Globs of files to return, such as *.png: images come back as images
    #[serde(default)]
    collect: Vec<String>,
    /// Limits, up to the policy's maximum, such as {"wall": "60s", "memory": "256MiB"}
    #[serde(default)]
    limits: BTreeMap<String, String>,
    /// The `approval.token` of an earlier answer to the same call, once a person has approved it
    approve: Option<String>,
}

impl From<Execute> for Request {
    fn from(execute: Execute) -> Self {
        let Execute { code, language, args, stdin, collect, limits, approve } = execute;
        let limits = limits.into_iter().map(|(key, value)| (key, LimitValue::Text(value))).collect();
        Request { code, language, args, stdin: stdin.map(TextOrBase64::Text), collect, limits, approve, ..Request::default() }
    }
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
        description = "Run code in a sandbox and return what it printed. Files stay from one call to the next; nothing else does. If the last line is in brackets, it states how the program ended; any line before it may be the program's.",
        output_schema = schema_for_output::<Executed>()
    )]
    async fn execute_code(
        &self,
        Parameters(execute): Parameters<Execute>,
        context: RequestContext<RoleServer>,
    ) -> Result<CallToolResult, ErrorData> {
        let line = Line::Run(Box::new(execute.into()));
        let cancel = context.ct.clone();
        let ran = self.session.ask(line, Some(Box::pin(async move { cancel.cancelled().await })));
        tokio::pin!(ran);
        let mut beats = tokio::time::interval(PROGRESS_INTERVAL);
        let mut count = 0.0;
        let answer = loop {
            tokio::select! {
                answer = &mut ran => break answer,
                _ = beats.tick() => {
                    if let Some(token) = context.meta.get_progress_token() {
                        let progress = ProgressNotificationParam::new(token, count).with_message(format!("runs for {count} s"));
                        // The transport notices a client that is gone.
                        let _unheard = context.peer.notify_progress(progress).await;
                    }
                    count += PROGRESS_INTERVAL.as_secs_f64();
                }
            }
        };
        finish(answer, results::executed)
    }

    #[tool(description = "Write a file where the code finds it.", output_schema = schema_for_output::<WrittenFile>())]
    async fn write_file(&self, Parameters(asked): Parameters<WriteFile>) -> Result<CallToolResult, ErrorData> {
        let contents = match (asked.text, asked.base64) {
            (Some(text), None) => TextOrBase64::Text(text),
            (None, Some(base64)) => TextOrBase64::Base64(Base64 { base64 }),
            _ => return Ok(results::error("write_file takes either `text` or `base64`")),
        };
        let line = Line::Write(Write { path: asked.path, contents, append: asked.append, id: None });
        finish(self.session.ask(line, None).await, results::written)
    }

    #[tool(
        description = "Read a file that the code left. Text comes as text, an image as an image, other bytes in base64.",
        output_schema = schema_for_output::<FilePart>(),
        annotations(read_only_hint = true)
    )]
    async fn read_file(&self, Parameters(asked): Parameters<ReadFile>) -> Result<CallToolResult, ErrorData> {
        let line = Line::Read(Read { path: asked.path, offset: asked.offset, length: asked.length, encoding: Encoding::Text, id: None });
        finish(self.session.ask(line, None).await, results::file_part)
    }

    #[tool(description = "List the files of a directory, a thousand at most as text.", output_schema = schema_for_output::<DirectoryListing>(), annotations(read_only_hint = true))]
    async fn list_files(&self, Parameters(asked): Parameters<ListFiles>) -> Result<CallToolResult, ErrorData> {
        let line = Line::List(List { path: asked.path, recursive: asked.recursive, id: None });
        finish(self.session.ask(line, None).await, results::listed)
    }

    #[tool(
        description = "Start over: removes the files in home, /tmp and a private working directory.",
        output_schema = schema_for_output::<Reset>(),
        annotations(destructive_hint = true)
    )]
    async fn reset(&self, Parameters(Nothing {}): Parameters<Nothing>) -> Result<CallToolResult, ErrorData> {
        finish(self.session.reset().await, |answer| results::reset(&answer))
    }
}

/// A session that has died is an error of the tool, which a model can fix by `reset`.
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
    ErrorData::internal_error(format!("the session's answer is malformed: {error}"), None)
}

#[tool_handler]
impl ServerHandler for Server {
    fn get_info(&self) -> ServerConfig {
        ServerConfig::new(ServerCapabilities::builder().enable_tools().build())
            .with_server_info(Implementation::new("stockade", env!("CARGO_PKG_VERSION")))
            .with_instructions(INSTRUCTIONS)
    }

    /// As the macro would write it, except for the error about an unknown tool.
    async fn call_tool(&self, request: CallToolRequestParams, context: RequestContext<RoleServer>) -> Result<CallToolResponse, ErrorData> {
        let router = Self::tool_router();
        if !router.has_route(&request.name) {
            let asked: String = request.name.chars().take(MAX_NAME_LEN).collect();
            let names: Vec<String> = router.list_all().into_iter().map(|tool| tool.name.into_owned()).collect();
            return Err(ErrorData::invalid_params(format!("there is no tool {asked:?}; there are {}", names.join(", ")), None));
        }
        router.call(ToolCallContext::new(self, request, context)).await
    }
}
