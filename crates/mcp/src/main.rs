//! The companion `stockade-mcp`: the Model Context Protocol on stdin and stdout, in front
//! of one `stockade session`.
//!
//! It holds no rights and confines nothing: it starts the program that started it, and passes
//! requests on as lines. That program validates what a model sends; here only MCP's own
//! fields are checked.
#![forbid(unsafe_code)]

mod input;
mod session;

use std::{
    ffi::OsString,
    io::Write,
    path::{Path, PathBuf},
    process::{ExitCode, Stdio},
    sync::Arc,
    time::Duration,
};

use clap::Parser;
use rmcp::ServiceExt;

use input::Checked;
use session::ChildSession;
use stockade_mcp_tools::{Server, instructions};
use tokio::process::Command;

const SANDBOX_ERROR: u8 = 125;
/// How long the program may take to say what the sandbox has.
const INVENTORY_TIMEOUT: Duration = Duration::from_secs(20);

/// The Model Context Protocol in front of a session; started by `stockade mcp`.
#[derive(Debug, Parser)]
#[command(name = "stockade-mcp", version)]
struct Args {
    /// The program to drive
    #[arg(long, value_name = "PATH")]
    program: PathBuf,
    /// Its version, which must equal this program's
    #[arg(long, value_name = "VERSION")]
    program_version: String,
    /// A process that it does not outlive, by its pid
    #[arg(long = "ends-with", value_name = "PID")]
    ends_with: Vec<i32>,
    /// Options of `stockade session`
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    options: Vec<OsString>,
}

fn main() -> ExitCode {
    let args = Args::parse();
    let served = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(anyhow::Error::from).and_then(|runtime| {
        let served = runtime.block_on(serve(args));
        // A pending read of stdin must not keep the process alive.
        runtime.shutdown_background();
        served
    });
    match served {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _unheard = writeln!(std::io::stderr(), "stockade: {error:#}");
            ExitCode::from(SANDBOX_ERROR)
        }
    }
}

async fn serve(args: Args) -> anyhow::Result<()> {
    let own = env!("CARGO_PKG_VERSION");
    if args.program_version != own {
        let (program, version) = (args.program.display(), args.program_version);
        anyhow::bail!("{program} is version {version} and stockade-mcp {own}: install both from one package or one build");
    }
    // Where only its input ends, a client may still read answers.
    stockade_session_client::hang_up_with(&args.ends_with, Some(rustix::stdio::stdout()))?;
    // Before the handshake: the person who configures it sees why a session cannot start, not
    // the model later.
    let (session, inventory) =
        tokio::join!(ChildSession::start(args.program.clone(), args.options.clone()), inventory(&args.program, &args.options));
    let session = Arc::new(session?);
    let server = Server::new(Arc::clone(&session) as _, &instructions(&inventory));
    let (stdin, stdout) = rmcp::transport::stdio();
    let running = server.serve(Checked::new(stdin, stdout)).await?;
    running.waiting().await?;
    session.close().await;
    Ok(())
}

/// What `stockade runtimes --prompt` says of the policy. Nothing, if it cannot be had: a session that cannot
/// begin says why itself.
async fn inventory(program: &Path, options: &[OsString]) -> String {
    let of_the_policy = options.chunks(2).filter(|pair| pair[0] == "--policy" || pair[0] == "--runtime").flatten();
    let mut inventory = Command::new(program);
    inventory.args(["runtimes", "--prompt"]).args(of_the_policy);
    inventory.stdin(Stdio::null()).stderr(Stdio::null()).kill_on_drop(true);
    match tokio::time::timeout(INVENTORY_TIMEOUT, inventory.output()).await {
        Ok(Ok(done)) if done.status.success() => String::from_utf8_lossy(&done.stdout).into_owned(),
        _ => String::new(),
    }
}
