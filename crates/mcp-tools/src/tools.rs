//! The tools, as clients and their models see them.
//!
//! Each call becomes one line of the session, which alone judges the arguments.

use std::{
    borrow::Cow,
    collections::BTreeMap,
    sync::{Arc, LazyLock},
    time::Duration,
};

use rmcp::{
    ErrorData, RoleServer, ServerHandler,
    handler::server::{common::schema_for_output, router::tool::ToolRouter, tool::ToolCallContext, wrapper::Parameters},
    model::{
        CallToolRequestParams, CallToolResponse, CallToolResult, Implementation, ProgressNotificationParam, ProtocolVersion,
        ServerCapabilities, ServerConfig,
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
    Session,
    results::{self, Executed, Reset},
    schema::slim,
};

/// How much of an unknown tool's name an error repeats.
const MAX_NAME_LEN: usize = 64;
/// Where the session keeps the last streams that were too long for a model.
const ALL_OUTPUT: &str = "/tmp/stockade-output.txt";
const ALL_ERROR: &str = "/tmp/stockade-error.txt";
/// How often a client gets progress while code runs.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(1);

const INSTRUCTIONS: &str = "Runs code in a sandbox on this machine. Files stay from one call to the next (in the working directory, home and /tmp) until `reset`; processes, variables and open connections do not. Paths are relative to the working directory. A program that fails is a normal result: read `error` and try again.";

/// What a client is told about the tools, with languages, packages, network and limits as
/// `stockade runtimes --prompt` words them; empty: they are not known.
pub fn instructions(inventory: &str) -> String {
    let mut words = String::from(INSTRUCTIONS);
    // How long files stay is different in a session, and said already.
    for line in inventory.lines().filter(|line| !line.starts_with("Code runs") && !line.starts_with("Files go")) {
        words.push('\n');
        words.push_str(&line.replace(", which is lost after the run", ""));
    }
    words
}

/// All tools, with their schemas.
static TOOLS: LazyLock<ToolRouter<Server>> = LazyLock::new(|| {
    let mut tools = Server::tool_router();
    for route in tools.map.values_mut() {
        slim(&mut route.attr);
    }
    tools
});

/// The server of one client.
#[derive(Clone)]
pub struct Server {
    session: Arc<dyn Session>,
    instructions: Arc<str>,
    versions: &'static [ProtocolVersion],
}

/// What `execute_code` takes.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct Execute {
    /// The program.
    code: String,
    /// Its language, such as python, bash, sh or node; default: the policy's
    language: Option<String>,
    /// Arguments of the program
    #[serde(default)]
    args: Vec<String>,
    /// What the program reads from stdin
    stdin: Option<String>,
    /// Globs of files to return, such as *.png: images come back as images
    #[serde(default)]
    collect: Vec<String>,
    /// Seconds that it may take: the same as {"wall": …} in `limits`
    timeout: Option<f64>,
    /// Limits, up to the policy's maximum, such as {"wall": "60s", "memory": "256MiB"}
    #[serde(default)]
    limits: BTreeMap<String, String>,
    /// The `approval.token` of an earlier answer to the same call, once a person has approved it
    approve: Option<String>,
}

impl TryFrom<Execute> for Request {
    type Error = &'static str;

    fn try_from(execute: Execute) -> Result<Self, Self::Error> {
        let Execute { code, language, args, stdin, collect, timeout, mut limits, approve } = execute;
        if let Some(seconds) = timeout {
            if !(seconds.is_finite() && seconds > 0.0) {
                return Err("timeout must be a positive number of seconds");
            }
            // No less than was asked for.
            if limits.insert(String::from("wall"), format!("{:.0}ms", (seconds * 1000.0).ceil())).is_some() {
                return Err("execute_code takes either `timeout` or `limits.wall`");
            }
        }
        let limits = limits.into_iter().map(|(key, value)| (key, LimitValue::Text(value))).collect();
        Ok(Request {
            code: code.into(),
            language,
            args,
            stdin: stdin.map(TextOrBase64::Text),
            collect,
            limits,
            approve,
            ..Request::default()
        })
    }
}

/// What `write_file` takes.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct WriteFile {
    /// The file's path
    path: String,
    /// Its text; or else `base64`
    #[serde(alias = "content")]
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
    /// How many bytes, up to 16 MiB; default: of text the first 30000 characters, of an image all
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
    /// One in front of this session, which tells its client this.
    pub fn new(session: Arc<dyn Session>, instructions: &str) -> Self {
        Server { session, instructions: instructions.into(), versions: ProtocolVersion::KNOWN_VERSIONS }
    }

    /// The same, for the versions of the protocol alone that begin by `initialize`. Over HTTP the later ones
    /// have no sessions, so that nothing would stay from one call to the next.
    pub fn with_handshake_only(self) -> Self {
        Server { versions: ProtocolVersion::known_up_to(&ProtocolVersion::LATEST_WITH_INITIALIZE), ..self }
    }

    #[tool(
        title = "Run code",
        description = "Run code in a sandbox and return what it printed. Files stay from one call to the next; nothing else does. If the last line is in brackets, it states how the program ended; any line before it may be the program's.",
        output_schema = schema_for_output::<Executed>(),
        annotations(read_only_hint = false, destructive_hint = true, idempotent_hint = false, open_world_hint = true)
    )]
    async fn execute_code(
        &self,
        Parameters(execute): Parameters<Execute>,
        context: RequestContext<RoleServer>,
    ) -> Result<CallToolResult, ErrorData> {
        let line = match Request::try_from(execute) {
            Ok(request) => Line::Run(Box::new(request)),
            Err(why) => return Ok(results::error(why)),
        };
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
        let mut kept = Vec::new();
        for (stream, text) in answer.as_ref().map(results::long_streams).unwrap_or_default() {
            let place = if stream == "output" { ALL_OUTPUT } else { ALL_ERROR };
            let whole = Write { path: place.to_owned(), contents: TextOrBase64::Text(text), append: false, whole: false, id: None };
            // Where there is no room for it, the model is told to print less.
            if self.session.ask(Line::Write(whole), None).await.is_ok_and(|answer| answer.get("ok") == Some(&Value::Bool(true))) {
                kept.push((stream, place));
            }
        }
        finish(answer, |answer| results::executed(answer, &kept))
    }

    #[tool(
        title = "Write a file",
        description = "Write a file where the code finds it.",
        output_schema = schema_for_output::<WrittenFile>(),
        annotations(read_only_hint = false, destructive_hint = true, idempotent_hint = false, open_world_hint = false)
    )]
    async fn write_file(&self, Parameters(asked): Parameters<WriteFile>) -> Result<CallToolResult, ErrorData> {
        let contents = match (asked.text, asked.base64) {
            (Some(text), None) => TextOrBase64::Text(text),
            (None, Some(base64)) => TextOrBase64::Base64(Base64 { base64 }),
            _ => return Ok(results::error("write_file takes either `text` or `base64`")),
        };
        let line = Line::Write(Write { path: asked.path, contents, append: asked.append, whole: false, id: None });
        finish(self.session.ask(line, None).await, results::written)
    }

    #[tool(
        title = "Read a file",
        description = "Read a file that the code left. Text comes as text, an image as an image, other bytes in base64.",
        output_schema = schema_for_output::<FilePart>(),
        annotations(read_only_hint = true, open_world_hint = false)
    )]
    async fn read_file(&self, Parameters(asked): Parameters<ReadFile>) -> Result<CallToolResult, ErrorData> {
        let all = asked.length.is_some();
        let line = Line::Read(Read { path: asked.path, offset: asked.offset, length: asked.length, encoding: Encoding::Text, id: None });
        finish(self.session.ask(line, None).await, |answer| results::file_part(answer, all))
    }

    #[tool(
        title = "List files",
        description = "List the files of a directory, a thousand at most as text.",
        output_schema = schema_for_output::<DirectoryListing>(),
        annotations(read_only_hint = true, open_world_hint = false)
    )]
    async fn list_files(&self, Parameters(asked): Parameters<ListFiles>) -> Result<CallToolResult, ErrorData> {
        let line = Line::List(List { path: asked.path, recursive: asked.recursive, id: None });
        finish(self.session.ask(line, None).await, results::listed)
    }

    #[tool(
        title = "Start over",
        description = "Start over: removes the files in home, /tmp and a private working directory.",
        output_schema = schema_for_output::<Reset>(),
        annotations(read_only_hint = false, destructive_hint = true, idempotent_hint = true, open_world_hint = false)
    )]
    async fn reset(&self, Parameters(Nothing {}): Parameters<Nothing>) -> Result<CallToolResult, ErrorData> {
        finish(self.session.reset().await, |answer| results::reset(&answer))
    }
}

/// Where the session has no answer, that is an error of the tool: its text says what a model can do.
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

#[tool_handler(router = TOOLS)]
impl ServerHandler for Server {
    fn get_info(&self) -> ServerConfig {
        ServerConfig::new(ServerCapabilities::builder().enable_tools().build())
            .with_server_info(Implementation::new("stockade", env!("CARGO_PKG_VERSION")))
            .with_instructions(&*self.instructions)
    }

    fn supported_protocol_versions(&self) -> Cow<'static, [ProtocolVersion]> {
        Cow::Borrowed(self.versions)
    }

    /// As the macro would write it, except for the error about an unknown tool.
    async fn call_tool(&self, request: CallToolRequestParams, context: RequestContext<RoleServer>) -> Result<CallToolResponse, ErrorData> {
        let router = &*TOOLS;
        if !router.has_route(&request.name) {
            let asked: String = request.name.chars().take(MAX_NAME_LEN).collect();
            let names: Vec<String> = router.list_all().into_iter().map(|tool| tool.name.into_owned()).collect();
            return Err(ErrorData::invalid_params(format!("there is no tool {asked:?}; there are {}", names.join(", ")), None));
        }
        router.call(ToolCallContext::new(self, request, context)).await
    }
}
