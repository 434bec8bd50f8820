//! The command line as typed. Nothing is resolved or judged here.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

/// Run code that nobody trusts in a fresh sandbox of the kernel's own.
///
/// Without a daemon, an image or a container engine; as root or as an ordinary user.
#[derive(Debug, Parser)]
#[command(name = "stockade", version, max_term_width = 100, arg_required_else_help = true)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

impl Cli {
    /// Parses the command line.
    ///
    /// Describing every subcommand takes longer than making a process, so a run describes
    /// its own only. Whatever is wrong or asked about then is left to the whole parser.
    ///
    /// # Errors
    /// A usage error, or a question for help.
    pub(crate) fn of_process() -> Result<Self, clap::Error> {
        fn only<T: Args>(name: &'static str) -> Option<T> {
            let command = T::augment_args(clap::Command::new(name).disable_help_flag(true));
            let matches = command.try_get_matches_from(std::env::args_os().skip(1)).ok()?;
            T::from_arg_matches(&matches).ok()
        }
        let command = match std::env::args_os().nth(1).as_deref().and_then(std::ffi::OsStr::to_str) {
            Some("exec") => only("exec").map(Command::Exec),
            Some("run") => only("run").map(Command::Run),
            _ => None,
        };
        command.map_or_else(Self::try_parse, |command| Ok(Cli { command }))
    }
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run one JSON request from stdin and print one JSON result
    ///
    /// Exit status: 0 when the result speaks about the code, whatever the code did; 2 for
    /// a bad request; 125 when the sandbox could not be put in place.
    Exec(Exec),
    /// Run a command with its streams passed through
    ///
    /// Exits with the command's status; 128+N for a signal, 124 when the wall clock ran
    /// out, 125 when the sandbox could not be put in place, 126 or 127 when the command
    /// could not be executed or found.
    Run(Run),
    /// Show which languages and packages code finds in the sandbox
    Runtimes(Runtimes),
    /// Check, show, explain and compare policies
    #[command(subcommand)]
    Policy(Policy),
    /// Try every feature that a policy needs on this host, as this user
    ///
    /// Exits with 1 when the policy could not be enforced here.
    Doctor(Doctor),
    /// Attack a policy from inside, on this host, and see what holds
    ///
    /// Tries hundreds of small attacks in real sandboxes, each with a control that shows
    /// that it could have succeeded. Exit status: 0 when everything held, 1 when something
    /// got through, 3 when something could not be proven.
    Prove(Prove),
    /// Print version, schema and features
    Version(Version),
}

/// Options that fix the sandbox.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct Sandbox {
    /// A policy's name, or a file (a path with a slash); default: `default`
    #[arg(long, value_name = "NAME|FILE")]
    pub(crate) policy: Option<String>,
    /// The host directory to expose at its own path; a request's must be it or below it
    #[arg(long, value_name = "DIR")]
    pub(crate) scratch: Option<PathBuf>,
    /// An interpreter in place of the policy's, with its virtual environment read-only
    #[arg(long = "runtime", value_name = "NAME=PATH", value_parser = parse_runtime)]
    pub(crate) runtimes: Vec<(String, PathBuf)>,
    /// Print the plan instead of running anything
    #[arg(long)]
    pub(crate) dry_run: bool,
    /// With --dry-run: print the plan as JSON
    #[arg(long, requires = "dry_run")]
    pub(crate) json: bool,
}

fn parse_runtime(text: &str) -> Result<(String, PathBuf), String> {
    let (name, path) = text.split_once('=').ok_or("write NAME=PATH, such as python=/opt/venv/bin/python")?;
    Ok((name.to_owned(), PathBuf::from(path)))
}

#[derive(Args, Debug)]
pub(crate) struct Exec {
    #[command(flatten)]
    pub(crate) sandbox: Sandbox,
}

#[derive(Args, Debug)]
pub(crate) struct Run {
    #[command(flatten)]
    pub(crate) sandbox: Sandbox,
    /// Write the result, without the streams, as JSON into this file
    #[arg(long, value_name = "FILE")]
    pub(crate) report: Option<PathBuf>,
    /// The command and its arguments
    #[arg(required = true, last = true, value_name = "COMMAND")]
    pub(crate) command: Vec<String>,
}

#[derive(Args, Debug)]
pub(crate) struct Runtimes {
    #[command(flatten)]
    pub(crate) policy: PolicyChoice,
    /// Print JSON
    #[arg(long, conflicts_with = "prompt")]
    pub(crate) json: bool,
    /// Print a short text for a model's prompt
    #[arg(long)]
    pub(crate) prompt: bool,
}

/// Which policy a command speaks of.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct PolicyChoice {
    /// A policy's name, or a file (a path with a slash); default: `default`
    #[arg(long, value_name = "NAME|FILE")]
    pub(crate) policy: Option<String>,
    /// An interpreter in place of the policy's
    #[arg(long = "runtime", value_name = "NAME=PATH", value_parser = parse_runtime)]
    pub(crate) runtimes: Vec<(String, PathBuf)>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Policy {
    /// Check policies; errors come with line, column and a suggestion
    Check {
        /// Names or files
        #[arg(required = true, value_name = "NAME|FILE")]
        policies: Vec<String>,
    },
    /// Print a policy with everything that it inherits
    Show {
        /// A name or a file
        #[arg(default_value = "default", value_name = "NAME|FILE")]
        policy: String,
        /// Print it as JSON
        #[arg(long)]
        json: bool,
    },
    /// Say in plain sentences what code under a policy may do, and what follows from each loosening
    Explain {
        /// A name or a file
        #[arg(default_value = "default", value_name = "NAME|FILE")]
        policy: String,
        /// The policy that loosenings are told against
        #[arg(long, default_value = "strict", value_name = "NAME|FILE")]
        against: String,
        /// Print it as JSON
        #[arg(long)]
        json: bool,
    },
    /// Say what policy B allows that A does not, and the other way round
    ///
    /// Exit status: 0 when B allows nothing that A does not, 1 when it allows more or that
    /// cannot be decided, 2 when one of them is no policy.
    Diff {
        /// The ceiling: a name or a file
        #[arg(value_name = "A")]
        first: String,
        /// The policy that is held to it
        #[arg(value_name = "B")]
        second: String,
        /// Print it as JSON
        #[arg(long)]
        json: bool,
    },
    /// List the policies that a name can mean here
    List,
    /// Print the JSON Schema of the policy format
    Schema,
}

#[derive(Args, Debug)]
pub(crate) struct Doctor {
    #[command(flatten)]
    pub(crate) policy: PolicyChoice,
    /// Try this host directory as scratch
    #[arg(long, value_name = "DIR")]
    pub(crate) scratch: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Args, Debug)]
pub(crate) struct Prove {
    #[command(flatten)]
    pub(crate) policy: PolicyChoice,
    /// Write a page to read and to print into this file
    #[arg(long, value_name = "FILE")]
    pub(crate) html: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Args, Debug)]
pub(crate) struct Version {
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}
