//! The command line as typed. Nothing is resolved or judged here.

use std::{ffi::OsString, path::PathBuf};

use clap::{Args, Parser, Subcommand, ValueEnum};

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
        let mut words = std::env::args_os().skip(1);
        if words.next().is_some_and(|word| word == ShimExec::WORD) {
            // Whatever follows is the interpreter's, `--help` too.
            return Ok(Cli { command: Command::ShimExec(ShimExec { file: words.next().map(PathBuf::from), arguments: words.collect() }) });
        }
        let command = match std::env::args_os().nth(1).as_deref().and_then(std::ffi::OsStr::to_str) {
            Some("exec") => only("exec").map(Command::Exec),
            Some("run") => only("run").map(Command::Run),
            _ => None,
        };
        command.map_or_else(Self::try_parse, |command| Ok(Cli { command }))
    }

    /// Whether this is a run, as far as can be seen without parsing the command line, which
    /// takes as long as beginning it: a misuse of `run` is one too, a plan to look at is none.
    pub(crate) fn is_run_of_process() -> bool {
        let mut words = std::env::args_os().skip(1);
        words.next().is_some_and(|command| command == "run") && !words.take_while(|word| word != "--").any(|word| word == "--dry-run")
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
    /// Put sandboxed interpreters in place of the host's
    #[command(subcommand)]
    Shim(Shim),
    /// What a shim's first line starts
    #[command(skip)]
    ShimExec(ShimExec),
    /// Run requests one after the other, as JSON lines, with files that stay
    ///
    /// Each request is a whole sandbox of its own; scratch, home and /tmp are the session's,
    /// and no process outlives its request. One JSON object on a line of stdin asks, one on
    /// stdout answers: run, write, read, list, cancel, reset, close. Exit status: 0 when it
    /// was closed, 2 for a bad request or 125 for a sandbox error that kept it from
    /// beginning, 128+N for a signal.
    Session(Session),
    /// Serve the Model Context Protocol on stdin and stdout, in front of a session
    ///
    /// Tools: execute_code, write_file, read_file, list_files, reset. Needs the companion
    /// program stockade-mcp beside this one or in ../lib/stockade from here.
    Mcp(Kept),
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
    /// Verify and read the audit log
    #[command(subcommand)]
    Audit(Audit),
    /// Show what waits for the approval of somebody like you, and approve it
    ///
    /// For the `approvers` of a policy, through root: sudo stockade approve TOKEN. Shows who
    /// asks and all that would be run; nothing is approved without --yes. Exit status: 0 when
    /// it was shown or approved, 2 when it is not yours to approve, 125 when it could not be.
    Approve(Approve),
    /// Say what a policy's `[screen]` finds in files, without running them
    ///
    /// Exit status: 0 when nothing was found for which the policy would stop the code, 1 when
    /// something was, 2 when a file could not be read or screened.
    Screen(Screen),
    /// Serve one request from the connection on stdin, as systemd hands it over
    #[command(hide = true)]
    Serve(Serve),
    /// Print version, schema and features
    Version(Version),
}

/// Options that fix the sandbox.
#[derive(Args, Debug)]
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
}

impl Sandbox {
    /// These options once more, for a program beside this one.
    pub(crate) fn to_arguments(&self) -> Vec<OsString> {
        let policy = self.policy.iter().flat_map(|policy| ["--policy".into(), policy.into()]);
        let scratch = self.scratch.iter().flat_map(|scratch| ["--scratch".into(), scratch.into()]);
        let runtimes = self.runtimes.iter().flat_map(|(name, path)| {
            let mut pair = OsString::from(format!("{name}="));
            pair.push(path);
            ["--runtime".into(), pair]
        });
        policy.chain(scratch).chain(runtimes).collect()
    }
}

/// Whether there is to be a run, or its plan.
#[derive(Args, Debug)]
pub(crate) struct DryRun {
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
    #[command(flatten)]
    pub(crate) plan: DryRun,
    /// Have it run by the server behind this socket, whose name says the policy
    #[arg(long, value_name = "PATH", conflicts_with_all = ["policy", "scratch", "runtimes", "dry_run"])]
    pub(crate) socket: Option<PathBuf>,
    /// Approve what an earlier result of this request held back: its `approval.token`
    ///
    /// The same as `approve` in the request, where no other process can read it.
    #[arg(long, value_name = "TOKEN", conflicts_with_all = ["markdown", "dry_run"])]
    pub(crate) approve: Option<String>,
    /// Read a model's reply and run its fenced blocks, in order and in one scratch
    ///
    /// The word behind a fence says the language, `# filename: x.py` in a block's first line
    /// has it written to that file too. Blocks without a language and those of what is no
    /// code (text, json, …) are not run. The first block that fails is the last. The result
    /// is that of the last block, with the output of all; `blocks` has each block's own.
    #[arg(long, conflicts_with_all = ["socket", "dry_run"])]
    pub(crate) markdown: bool,
    /// With --markdown: run the last block only
    #[arg(long, requires = "markdown")]
    pub(crate) last: bool,
    /// With --markdown: print `exitcode: 0 (execution succeeded)` and the output under it
    #[arg(long, requires = "markdown")]
    pub(crate) text: bool,
}

#[derive(Args, Debug)]
#[command(mut_arg("scratch", |scratch| {
    scratch.help("The host directory to expose at its own path; default: a private scratch that ends with the session")
}))]
pub(crate) struct Kept {
    #[command(flatten)]
    pub(crate) sandbox: Sandbox,
}

#[derive(Args, Debug)]
pub(crate) struct Session {
    #[command(flatten)]
    pub(crate) kept: Kept,
    /// Who may approve what a policy has approved before it runs; else it is refused at once
    #[arg(long, value_name = "WHO", default_value = "anyone")]
    pub(crate) approved_by: ApprovedBy,
}

/// Who may approve what waits in a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ApprovedBy {
    /// Whoever asks, by the token, or the policy's `approvers`
    Anyone,
    /// The policy's `approvers` alone, since whoever asks is a program
    Approvers,
    /// Nobody
    Nobody,
}

impl ApprovedBy {
    /// This option once more, for a session that another program starts.
    pub(crate) fn to_arguments(self) -> [OsString; 2] {
        let value = self.to_possible_value().map(|value| value.get_name().to_owned());
        ["--approved-by".into(), value.unwrap_or_default().into()]
    }
}

impl From<ApprovedBy> for stockade_runtime::approval::ApprovedBy {
    fn from(who: ApprovedBy) -> Self {
        match who {
            ApprovedBy::Anyone => Self::Anyone,
            ApprovedBy::Approvers => Self::Approvers,
            ApprovedBy::Nobody => Self::Nobody,
        }
    }
}

#[derive(Args, Debug)]
pub(crate) struct Serve {
    /// Connections that one user may have at a time, through all sockets of the host
    #[arg(long, value_name = "NUMBER", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=i64::from(stockade_service::MOST_PLACES)))]
    pub(crate) per_user: u32,
    /// A policy's name, or a file (a path with a slash); default: the socket's name, without `.sock`
    #[arg(long, value_name = "NAME|FILE")]
    pub(crate) policy: Option<String>,
    /// The host directory that a request's scratch must be or lie below
    #[arg(long, value_name = "DIR")]
    pub(crate) scratch: Option<PathBuf>,
}

#[derive(Args, Debug)]
pub(crate) struct Run {
    #[command(flatten)]
    pub(crate) sandbox: Sandbox,
    #[command(flatten)]
    pub(crate) plan: DryRun,
    /// Write the result, without the streams, as JSON into this file
    #[arg(long, value_name = "FILE")]
    pub(crate) report: Option<PathBuf>,
    /// The command and its arguments
    #[arg(required = true, last = true, value_name = "COMMAND")]
    pub(crate) command: Vec<String>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Shim {
    /// Make shims in a directory: `python`, `python3`, `sh`, `bash`, `node`, `pwsh`
    ///
    /// Those that the policy has and this host has, and the policy's other runtimes. Each
    /// takes the arguments, streams and signals of its interpreter and gives its exit status,
    /// in a sandbox whose scratch is the caller's working directory. Put the directory first
    /// in PATH, or name a shim where an interpreter is asked for. Prints their paths.
    Install {
        /// The directory; made if it is missing
        #[arg(value_name = "DIR")]
        directory: PathBuf,
        #[command(flatten)]
        policy: PolicyChoice,
        /// Pass output on byte for byte, also what is not UTF-8
        ///
        /// Otherwise U+FFFD takes its place, since most callers expect text.
        #[arg(long)]
        exact: bool,
    },
    /// List the shims in a directory
    ///
    /// Exits with 1 when there is none.
    List {
        /// The directory
        #[arg(value_name = "DIR")]
        directory: PathBuf,
    },
    /// Remove the shims in a directory, and the directory if nothing else is in it
    ///
    /// Exits with 1 when there is none.
    Remove {
        /// The directory
        #[arg(value_name = "DIR")]
        directory: PathBuf,
    },
}

/// The words that the kernel makes of a shim's first line and its caller's.
#[derive(Debug)]
pub(crate) struct ShimExec {
    pub(crate) file: Option<PathBuf>,
    pub(crate) arguments: Vec<OsString>,
}

impl ShimExec {
    /// Stands between the program and the shim's path: the end of a shim's first line.
    pub(crate) const WORD: &str = "shim-exec";
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
    /// Be the run beside which a proof in this scratch tries its attacks; for the proof itself
    #[arg(long, value_name = "DIR", hide = true, conflicts_with_all = ["html", "json"])]
    pub(crate) beside: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Args, Debug)]
pub(crate) struct Screen {
    /// A policy's name, or a file (a path with a slash); default: `default`, which only notes
    #[arg(long, value_name = "NAME|FILE")]
    pub(crate) policy: Option<String>,
    /// Read every file as `python` or `bash`, whatever its name says
    #[arg(long, value_name = "LANGUAGE", value_parser = ["python", "bash"])]
    pub(crate) language: Option<String>,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
    /// Files, and directories with Python and shell files; `-`: stdin
    #[arg(required = true, value_name = "FILE|DIR")]
    pub(crate) files: Vec<PathBuf>,
}

#[derive(Args, Debug)]
pub(crate) struct Approve {
    /// Approve it
    #[arg(long)]
    pub(crate) yes: bool,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
    /// The token: `approval.token` of the result
    #[arg(value_name = "TOKEN")]
    pub(crate) token: String,
}

#[derive(Args, Debug)]
pub(crate) struct Version {
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Audit {
    /// Find any change, gap or reordering in a log
    ///
    /// Exit status: 0 when every record is in its place and unchanged, 1 when one is not, 2
    /// when the log cannot be read. Records that were cut off at the end show only against an
    /// anchor, which the journal or the syslog has.
    Verify {
        /// A file or the directory of a log; default: this user's
        #[arg(value_name = "FILE|DIR")]
        path: Option<PathBuf>,
        /// The log begins after the record with this hash, since older files were moved away
        #[arg(long, value_name = "SHA256")]
        after: Option<String>,
        /// Lines with anchors, as journalctl or a syslog has them; `-`: stdin
        #[arg(long, value_name = "FILE")]
        anchors: Option<PathBuf>,
    },
    /// Print the last records
    Tail {
        /// The directory of a log; default: this user's
        #[arg(long, value_name = "DIR")]
        log: Option<PathBuf>,
        /// How many
        #[arg(short = 'n', value_name = "N", default_value_t = 20)]
        number: usize,
        /// Go on printing what is added
        #[arg(long)]
        follow: bool,
        /// Print JSON, one record on a line
        #[arg(long)]
        json: bool,
    },
    /// Print the records of one run
    ///
    /// Exits with 1 when there is none.
    Show {
        /// The directory of a log; default: this user's
        #[arg(long, value_name = "DIR")]
        log: Option<PathBuf>,
        /// The run's number, or the `id` of its request
        id: String,
    },
    /// Print the records that meet all conditions
    ///
    /// Exits with 1 when there is none.
    Query(Filter),
}

/// Which records.
#[derive(Args, Debug)]
pub(crate) struct Filter {
    /// The directory of a log; default: this user's
    #[arg(long, value_name = "DIR")]
    pub(crate) log: Option<PathBuf>,
    /// Not before this time in UTC, such as 2026-11-22T06:50
    #[arg(long, value_name = "TIME")]
    pub(crate) since: Option<String>,
    /// Before this time
    #[arg(long, value_name = "TIME")]
    pub(crate) until: Option<String>,
    /// With this label
    #[arg(long = "label", value_name = "NAME=VALUE", value_parser = parse_label)]
    pub(crate) labels: Vec<(String, String)>,
    /// With this verdict
    #[arg(long, value_name = "VERDICT")]
    pub(crate) verdict: Option<String>,
    /// Under this policy
    #[arg(long, value_name = "NAME")]
    pub(crate) policy: Option<String>,
    /// Print JSON, one record on a line
    #[arg(long)]
    pub(crate) json: bool,
}

fn parse_label(text: &str) -> Result<(String, String), String> {
    let (name, value) = text.split_once('=').ok_or("write NAME=VALUE")?;
    Ok((name.to_owned(), value.to_owned()))
}
