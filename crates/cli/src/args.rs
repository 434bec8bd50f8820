//! The command line as typed. This module neither resolves nor validates values.

use std::{
    ffi::OsString,
    path::{Component, Path, PathBuf},
};

use clap::{
    Args, CommandFactory, FromArgMatches, Parser, Subcommand, ValueEnum,
    builder::{OsStringValueParser, PossibleValuesParser, TypedValueParser},
    error::{ContextKind, ContextValue, ErrorKind},
};
use stockade_policy::{service::Scope, whitelist::Rule};
use stockade_protocol::{LimitKey, LimitValue, Quantity};

/// Run untrusted code in a throwaway Linux sandbox.
///
/// Needs no daemon, image or container engine; runs as root or as an ordinary user.
#[derive(Debug, Parser)]
#[command(name = "stockade", version, max_term_width = 100, arg_required_else_help = true, disable_help_subcommand = true)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

impl Cli {
    /// Parses the command line.
    ///
    /// # Errors
    /// A usage error, or a request for help.
    pub(crate) fn of_process() -> Result<Self, clap::Error> {
        Self::of(std::env::args_os().collect())
    }

    fn of(words: Vec<OsString>) -> Result<Self, clap::Error> {
        let command = words.get(1).and_then(|word| word.to_str()).unwrap_or_default().to_owned();
        if let Some(Ok(matches)) = Self::alone(&command).map(|alone| alone.try_get_matches_from(&words)) {
            return Self::from_arg_matches(&matches);
        }
        let matches = Self::described().try_get_matches_from(words).map_err(|error| with_remedy(error, &command))?;
        Self::from_arg_matches(&matches)
    }

    /// The command line with this command alone, where it starts one run: to describe all commands takes
    /// a tenth of a run. What this does not parse, [`Cli::described`] does, for its errors and help.
    fn alone(command: &str) -> Option<clap::Command> {
        let below = match command {
            "exec" => Exec::augment_args(clap::Command::new("exec")),
            "run" => Run::augment_args(clap::Command::new("run")),
            Bwrap::WORD => Bwrap::augment_args(clap::Command::new(Bwrap::WORD).disable_help_flag(true)),
            ShimExec::WORD => ShimExec::augment_args(clap::Command::new(ShimExec::WORD).disable_help_flag(true)),
            _ => return None,
        };
        Some(clap::Command::new("stockade").subcommand(below))
    }

    /// The command line with two examples of each command.
    pub(crate) fn described() -> clap::Command {
        EXAMPLES.iter().fold(Self::command(), |all, (name, one, other)| {
            let line = |words: &str| format!("  stockade {name} {words}").trim_end().to_owned();
            let add = |command: clap::Command| command.after_help(format!("Examples:\n{}\n{}", line(one), line(other)));
            match name.split_once(' ') {
                Some((name, below)) => all.mut_subcommand(name, |command| command.mut_subcommand(below, add)),
                None => all.mut_subcommand(name, add),
            }
        })
    }
}

/// Commands that make a sandbox.
const SANDBOXED: [&str; 4] = ["run", "exec", "session", "mcp"];

/// Options of other tools, and what their users write here after a command of [`SANDBOXED`].
const GUESSED: &[(&[&str], &str)] = &[
    (&["--network", "--net"], "code has no network; `--allow HOST:PORT` opens one peer"),
    (&["--venv", "--virtualenv"], "`--runtime python=DIR/bin/python` takes the interpreter of a virtual environment"),
    (&["--cwd", "--workdir", "--chdir", "-w"], "`-C DIR` makes a directory the working directory"),
    (&["--env", "-e"], "`stockade run -- env NAME=VALUE COMMAND` sets a variable; a request has the field `env`"),
    (
        &["--volume", "-v", "--mount", "--bind"],
        "`-C DIR` shows one directory; a policy for `--policy FILE` shows others ([filesystem] read_only)",
    ),
];

/// An error with a remedy in place of options that only look alike.
fn with_remedy(mut error: clap::Error, command: &str) -> clap::Error {
    let (ErrorKind::UnknownArgument, Some(ContextValue::String(given))) = (error.kind(), error.get(ContextKind::InvalidArg)) else {
        return error;
    };
    let guessed = GUESSED.iter().find(|(options, _)| SANDBOXED.contains(&command) && options.contains(&given.as_str()));
    let remedy = match guessed {
        Some((_, remedy)) => (*remedy).to_owned(),
        None if command == "exec" && !given.starts_with('-') => {
            format!("`stockade run {given}` runs a script, `stockade exec < {given}` a request in JSON")
        }
        None => return error,
    };
    error.remove(ContextKind::SuggestedArg);
    error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![remedy.into()]));
    // Clap's shows the option that looked alike.
    error.remove(ContextKind::Usage);
    error
}

/// Commands as completions and the manual have them: `help policy show` says what `policy show
/// --help` does, so it is none of its own.
pub(crate) fn without_nested_help(command: clap::Command) -> clap::Command {
    let quiet = |command: clap::Command| command.disable_help_subcommand(true);
    let mut command = quiet(command).mut_subcommand("policy", quiet);
    command.build();
    command
}

/// A command, and two ways to call it.
const EXAMPLES: &[(&str, &str, &str)] = &[
    ("exec", r#"--pretty <<< '{"code": "print(6*7)"}'"#, "--policy strict --scratch /srv/job < request.json"),
    ("run", "--timeout 10s script.py", "-C . --allow pypi.org:443 -- pip download six"),
    ("bwrap", "--ro-bind / / --tmpfs /tmp -- ls -l /", "--ro-bind /usr /usr --symlink usr/bin /bin --symlink usr/lib64 /lib64 -- /bin/id"),
    ("shim install", "~/sandboxed", "~/sandboxed --policy strict"),
    ("shim list", "~/sandboxed", "~/sandboxed | wc -l"),
    ("shim remove", "~/sandboxed", "./bin"),
    ("session", "--policy default", "--scratch /srv/job --approved-by nobody"),
    ("mcp", "--policy default", "--scratch ~/project"),
    ("runtimes", "--prompt", "--policy data-science --json"),
    ("templates ls", "", "--policy data-science --json"),
    ("image import", "python.tar --name python:3.13", "./layout --ref v2 --platform linux/arm64"),
    ("image pull", "python:3.13-slim", "localhost:5000/tools:1 --name tools"),
    ("image ls", "", "--json"),
    ("image inspect", "python:3.13", "python:3.13 | jq .env"),
    ("image verify", "", "python:3.13"),
    ("image rm", "python:3.13", "python:3.12 python:3.13"),
    ("image gc", "", "&& stockade image ls"),
    ("policy check", "./api.toml", "default strict"),
    ("policy new", "api --allow api.github.com:443 --timeout 10s", "science --venv ~/science --memory 2g"),
    ("policy show", "strict", "./api.toml --json"),
    ("policy explain", "./api.toml", "data-science --against default"),
    ("policy diff", "default ./api.toml", "strict default --json"),
    ("policy list", "", "| grep shipped"),
    ("policy schema", "> stockade-policy.schema.json", "| jq .properties"),
    ("grants check", "", "./grants.toml"),
    ("key new", "grader --policy default --policy strict", "notebook --scope run --scope keep --add > notebook.token"),
    ("key ls", "", "--file ./keys.toml --json"),
    ("key check", "", "--file ./keys.toml"),
    ("serve", "--check", "--config ./serve.toml"),
    ("doctor", "", "--policy strict --strict --json"),
    ("prove", "--html proof.html", "--policy ./api.toml --json"),
    ("audit verify", "", "--log /var/log/stockade --anchors journal.txt --require-anchor"),
    ("audit rotate", "", "--keep-days 90"),
    ("audit tail", "--follow", "-n 100 --json"),
    ("audit show", "4f1c2a9be07d3365", "my-request-17"),
    ("audit query", "--since 1h --verdict out_of_memory", "--since today --event refused --json"),
    ("ps", "", "--watch --server https://runs.example.com"),
    ("kill", "4f1c2a9be07d3365", "\"$(stockade ps --json | jq -r .runs[0].run)\""),
    ("approve", "TOKEN", "TOKEN --yes"),
    ("screen", "script.py", "--policy strict --json src/"),
    ("help", "security", "policy check"),
    ("man", "| man -l -", "--into ~/.local/share/man"),
    ("completions", "bash", "zsh > ~/.zfunc/_stockade"),
    ("version", "", "--json"),
];

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run one JSON request from stdin and print one JSON result
    ///
    /// Exit status: 0 when the code was run, whatever it did: `success` and `verdict` tell. 2 for
    /// a bad request, 125 when the sandbox could not be put in place, 74 when the code ran and its
    /// result could not be written.
    Exec(Exec),
    /// Run a script, code or a command with its streams passed through
    ///
    /// A first word that is a file with the ending of a language is a script. Any other word
    /// begins a command; `--` before it is optional.
    ///
    /// Exits with the command's status; 128+N for a signal. 124: the wall clock ran out. 125:
    /// the sandbox could not be put in place. 126 or 127: the command could not be executed or
    /// found. 74: it ran, and its output, report or collected files could not be written.
    Run(Run),
    /// Make sandboxed interpreters that callers start instead of the host's
    #[command(subcommand)]
    Shim(Shim),
    /// Run an interpreter for a shim, whose first line starts this
    #[command(hide = true, disable_help_flag = true)]
    ShimExec(ShimExec),
    /// Run a command as bubblewrap would, in a sandbox of the policy `bwrap`
    ///
    /// The options are those of bwrap(1); callers start `stockade-bwrap` in place of bwrap. What it shows must be shown by the policy; an option that would
    /// weaken the sandbox is refused. See `stockade help bwrap`.
    ///
    /// Exits with the command's status; 128+N for a signal; 1 where nothing was started.
    #[command(disable_help_flag = true)]
    Bwrap(Bwrap),
    /// Run a series of requests (JSON Lines) that share files
    ///
    /// Each request has its own sandbox; scratch, home and /tmp belong to the session, and no
    /// process outlives its request. Each line of stdin is one JSON object with an `op` (run,
    /// write, read, list, cancel, reset, close); each has one line of stdout as its answer.
    /// Exit status: 0 when it was closed, 2 for a bad request or 125 for a sandbox error at
    /// its start, 128+N for a signal.
    Session(Session),
    /// Serve the Model Context Protocol on stdin and stdout, in front of a session
    ///
    /// Tools: execute_code, write_file, read_file, list_files, reset. Needs the companion
    /// program stockade-mcp in this program's directory or in ../lib/stockade from there.
    Mcp(SessionOptions),
    /// Show which languages and packages code finds in the sandbox
    Runtimes(Runtimes),
    /// Show what came of a policy's templates
    #[command(subcommand)]
    Templates(Templates),
    /// Bring container images into this user's store, list, verify and remove them
    ///
    /// Root's store is /var/lib/stockade/images, a user's ~/.local/share/stockade/images. Needs the
    /// companion program stockade-image in this program's directory or in ../lib/stockade from there.
    #[command(subcommand)]
    Image(Image),
    /// Check, show, explain and compare policies
    #[command(subcommand)]
    Policy(Policy),
    /// Check what users may do through root
    #[command(subcommand)]
    Grants(Grants),
    /// Make, list and check the keys of a service
    ///
    /// A client proves by a token, or as a user of this host, which key it has. The key says which
    /// policies it may use, and how much.
    #[command(subcommand)]
    Key(Key),
    /// Try every feature that a policy needs on this host, as this user
    ///
    /// Exits with 1 when the policy could not be enforced here. With --strict also with 3 when
    /// something is degraded or the audit log cannot be written.
    Doctor(Doctor),
    /// Attack a policy from inside, on this host, and report what holds
    ///
    /// Tries hundreds of small attacks in real sandboxes, each with a control that shows
    /// that it could have succeeded. Exit status: 0 when everything held, 1 when something
    /// got through, 3 when something could not be proven.
    Prove(Prove),
    /// Verify and read the audit log
    #[command(subcommand)]
    Audit(Audit),
    /// List the runs that are alive on this host, or at a service
    ///
    /// Root sees all but those of users who keep their registry in an unusual place; a caller of
    /// sudo sees its own runs through root, an ordinary user its own. Of a service, a key sees its own
    /// runs, waiting ones too, and with the scope `watch` those of all keys.
    Ps(Ps),
    /// End a run as `cancelled`, and wait until nothing of it is left
    ///
    /// A session goes on without it. Exit status: 0 when it has ended, 1 when there is no such
    /// run or it is not yours, 125 when it does not end.
    Kill(Kill),
    /// Show a pending request; approve it with --yes
    ///
    /// For the `approvers` of a policy, through root: sudo stockade approve TOKEN. Shows the
    /// caller and all that would run; approves nothing without --yes. Exit status: 0 when it
    /// was shown or approved, 2 when you may not approve it, 125 when that failed.
    Approve(Approve),
    /// Report what a policy's `[screen]` finds in files, without running them
    ///
    /// Exit status: 0 when nothing was found for which the policy would stop the code, 1 when
    /// something was, 2 when a file could not be read or screened.
    Screen(Screen),
    /// Serve many requests at a time over HTTP
    ///
    /// On a UNIX socket and, for keys with tokens, on 127.0.0.1:8722: `stockade key new` makes a key,
    /// and POST /v1/run takes the JSON of `exec`. SIGHUP reads configuration and keys again; SIGTERM
    /// lets runs end. Needs the companion program stockade-serve in this program's directory or in
    /// ../lib/stockade from there. Exit status: 0 when a signal ended it, 125 when it cannot serve.
    Serve(Serve),
    /// Run what the service's front sends on stdin, as the table on stdout permits
    #[command(hide = true)]
    ServeWorker,
    /// Keep one session for the service's front, whose socket comes by stdin
    #[command(hide = true)]
    ServeKeeper(ServeKeeper),
    /// Run an empty program under each of these policies, and print what the host lacks for them
    #[command(hide = true)]
    ServeExamine(ServeExamine),
    /// Serve one request from the connection that systemd passes on stdin
    #[command(hide = true)]
    ServeOne(ServeOne),
    /// Show a page of the documentation, or the help of a command
    Help {
        /// A topic or a command; without one, the list of both
        #[arg(value_name = "TOPIC|COMMAND")]
        words: Vec<String>,
    },
    /// Print a page of the manual, or write all of them for man(1)
    ///
    /// In the format of manual pages (roff). The Debian package and the tarball bring them along.
    Man {
        /// A topic or a command; without one, the program's page
        #[arg(value_name = "TOPIC|COMMAND")]
        words: Vec<String>,
        /// Write all pages into man1, man5 and man7 of this directory; older ones are written over
        #[arg(long, value_name = "DIR", conflicts_with = "words", value_parser = path_from_here())]
        into: Option<PathBuf>,
    },
    /// Print the completions of a shell
    ///
    /// bash: stockade completions bash > ~/.local/share/bash-completion/completions/stockade
    Completions {
        /// The shell
        #[arg(value_name = "SHELL")]
        shell: CompletedShell,
    },
    /// Print version, schema and features
    Version(Version),
}

/// The long options of a command, without their hyphens.
pub(crate) fn long_options(command: &str) -> Vec<String> {
    let described = Cli::command();
    let found = described.find_subcommand(command).into_iter().flat_map(clap::Command::get_arguments);
    found.filter_map(clap::Arg::get_long).map(str::to_owned).collect()
}

/// Options that fix the sandbox.
#[derive(Args, Debug)]
pub(crate) struct Sandbox {
    /// A policy's name, or a file (a path with a slash); default: `default`
    #[arg(long, value_name = "NAME|FILE")]
    pub(crate) policy: Option<String>,
    /// Host directory to use as working directory, at the same path inside
    ///
    /// A request may only name this directory or one below it. The path may contain no symlinks
    /// but root's.
    #[arg(short = 'C', long, value_name = "DIR", value_parser = path_from_here())]
    pub(crate) scratch: Option<PathBuf>,
    /// An interpreter in place of the policy's, with its virtual environment read-only
    #[arg(long = "runtime", value_name = "NAME=PATH", value_parser = parse_runtime)]
    pub(crate) runtimes: Vec<(String, PathBuf)>,
    /// Image whose files are the root, by name or digest, of those that the policy allows; a request may
    /// name another
    #[arg(long, value_name = "IMAGE", conflicts_with = "runtimes")]
    pub(crate) image: Option<String>,
    /// Let the code reach this peer too, such as `pypi.org:443`; may be repeated
    ///
    /// Not through sudo or a socket, where the policy alone decides. The result lists it.
    #[arg(long, value_name = "HOST:PORT", value_parser = peer)]
    pub(crate) allow: Vec<Rule>,
    /// Let the run go on when the process that started stockade ends
    ///
    /// Else it ends too, as after SIGHUP, unless nohup started it.
    #[arg(long)]
    pub(crate) outlive_caller: bool,
}

impl Sandbox {
    /// These options as arguments, for another program.
    pub(crate) fn to_arguments(&self) -> Vec<OsString> {
        let policy = self.policy.iter().flat_map(|policy| ["--policy".into(), policy.into()]);
        let scratch = self.scratch.iter().flat_map(|scratch| ["--scratch".into(), scratch.into()]);
        let runtimes = self.runtimes.iter().flat_map(|(name, path)| {
            let mut pair = OsString::from(format!("{name}="));
            pair.push(path);
            ["--runtime".into(), pair]
        });
        let allow = self.allow.iter().flat_map(|rule| ["--allow".into(), rule.to_string().into()]);
        let image = self.image.iter().flat_map(|image| ["--image".into(), image.into()]);
        let outlive = self.outlive_caller.then(|| "--outlive-caller".into());
        policy.chain(scratch).chain(runtimes).chain(image).chain(allow).chain(outlive).collect()
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
    Ok((name.to_owned(), from_here(Path::new(path))?))
}

/// A peer; a list of peers is told apart from what is merely wrong.
fn peer(text: &str) -> Result<Rule, String> {
    text.parse().map_err(|error: String| {
        if text.split(',').filter(|one| one.trim().parse::<Rule>().is_ok()).count() > 1 {
            let each: Vec<String> = text.split(',').map(|one| format!("--allow {}", one.trim())).collect();
            return format!("one --allow per host: {}", each.join(" "));
        }
        error
    })
}

fn path_from_here() -> impl TypedValueParser<Value = PathBuf> {
    OsStringValueParser::new().try_map(|path| from_here(Path::new(&path)))
}

/// A path of the command line: a relative one begins at the working directory, which the
/// kernel names without links. An empty one, as of a variable that is not set, stays empty.
pub(crate) fn from_here(path: &Path) -> Result<PathBuf, String> {
    if path.as_os_str().is_empty() || path.is_absolute() {
        return Ok(path.to_path_buf());
    }
    let mut whole = std::env::current_dir().map_err(|error| format!("the working directory has no path: {error}"))?;
    let mut parts = path.components().filter(|part| *part != Component::CurDir).peekable();
    while parts.next_if_eq(&Component::ParentDir).is_some() {
        whole.pop();
    }
    whole.extend(parts);
    Ok(whole)
}

#[derive(Args, Debug)]
pub(crate) struct Exec {
    #[command(flatten)]
    pub(crate) sandbox: Sandbox,
    #[command(flatten)]
    pub(crate) plan: DryRun,
    /// Send the request to the server on this socket; the socket's name selects the policy
    #[arg(long, value_name = "PATH", conflicts_with_all = ["policy", "scratch", "runtimes", "image", "allow", "outlive_caller", "dry_run"])]
    pub(crate) socket: Option<PathBuf>,
    /// Send the request to a service: `unix:PATH`, `http://HOST:PORT` or `https://HOST`
    ///
    /// The policy is one of its key's. The variable STOCKADE_KEY_FILE names the file that has the key's
    /// token, and that others cannot read. Needs the companion program stockade-remote.
    #[arg(long, value_name = "URL", conflicts_with_all = ["scratch", "runtimes", "image", "allow", "dry_run", "socket", "approve", "markdown"])]
    pub(crate) server: Option<String>,
    /// With --server: print events while the code runs, one JSON object a line; the last has the result
    ///
    /// With --text: what the code prints, as it comes, on stdout and stderr; then the status on stderr.
    #[arg(long, requires = "server", conflicts_with_all = ["pretty", "brief"])]
    pub(crate) stream: bool,
    /// Approve what an earlier result of this request held back: its `approval.token`
    ///
    /// The same as `approve` in the request, which other processes cannot read.
    #[arg(long, value_name = "TOKEN", conflicts_with_all = ["markdown", "dry_run"])]
    pub(crate) approve: Option<String>,
    /// Read a model's reply and run its fenced blocks, in order and in one scratch
    ///
    /// The word behind a fence is the language; `# filename: x.py` in a block's first line
    /// also writes the block to that file. Blocks without a language, or in one that is no
    /// code (text, json, …), are not run. Stops at the first block that fails. The
    /// result is that of the last block, with the output of all; `blocks` has each result.
    #[arg(long, conflicts_with_all = ["socket", "dry_run"])]
    pub(crate) markdown: bool,
    /// With --markdown: run the last block only
    #[arg(long, requires = "markdown")]
    pub(crate) last: bool,
    /// Print what a model reads in place of JSON: `exitcode: 0 (execution succeeded)`, the output,
    /// and in brackets what was refused and what ended it
    #[arg(long)]
    pub(crate) text: bool,
    /// Print the JSON indented
    #[arg(long, conflicts_with_all = ["text", "markdown"])]
    pub(crate) pretty: bool,
    /// Print the fields that say what happened, and no others
    #[arg(long, conflicts_with_all = ["text", "pretty", "markdown"])]
    pub(crate) brief: bool,
    /// Say nothing on stderr of layers that are missing here
    #[arg(short, long)]
    pub(crate) quiet: bool,
}

#[derive(Args, Debug)]
#[command(mut_arg("scratch", |scratch| {
    scratch.help("Host directory to use as working directory, at the same path inside; default: a private one that ends with the session")
}))]
pub(crate) struct SessionOptions {
    #[command(flatten)]
    pub(crate) sandbox: Sandbox,
}

#[derive(Args, Debug)]
pub(crate) struct Session {
    #[command(flatten)]
    pub(crate) options: SessionOptions,
    /// Who may approve code that a policy holds back; without an approver it is refused at once
    #[arg(long, value_name = "WHO", default_value = "anyone")]
    pub(crate) approved_by: ApprovedBy,
    /// Say nothing on stderr of layers that are missing here
    #[arg(short, long)]
    pub(crate) quiet: bool,
}

/// Who may approve code that waits in a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ApprovedBy {
    /// The caller, by the token, or the policy's `approvers`
    Anyone,
    /// The policy's `approvers` alone, since the caller is a program
    Approvers,
    /// No one
    #[value(name = "nobody")]
    NoOne,
}

impl ApprovedBy {
    /// This option as arguments, for a session that another program starts.
    pub(crate) fn to_arguments(self) -> [OsString; 2] {
        let value = self.to_possible_value().map(|value| value.get_name().to_owned());
        ["--approved-by".into(), value.unwrap_or_default().into()]
    }
}

impl From<ApprovedBy> for stockade_engine::approval::ApprovedBy {
    fn from(who: ApprovedBy) -> Self {
        match who {
            ApprovedBy::Anyone => Self::Anyone,
            ApprovedBy::Approvers => Self::Approvers,
            ApprovedBy::NoOne => Self::NoOne,
        }
    }
}

#[derive(Args, Debug)]
pub(crate) struct Serve {
    /// The configuration; default: /etc/stockade/serve.toml, of a user stockade/serve.toml in ~/.config
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// Read configuration, keys and policies, try each policy, say what is wrong, and serve nothing
    #[arg(long)]
    pub(crate) check: bool,
}

/// `serve-keeper`.
#[derive(Args, Debug)]
pub(crate) struct ServeKeeper {
    /// The key that has the session
    #[arg(long)]
    pub(crate) key: String,
    /// The policy of its runs
    #[arg(long)]
    pub(crate) policy: String,
}

#[derive(Args, Debug)]
pub(crate) struct ServeExamine {
    /// Policies, each with the key of the service that may use it, and whether its inventory is wanted
    #[arg(value_name = "POLICY KEY INVENTORY", required = true)]
    pub(crate) words: Vec<String>,
}

#[derive(Args, Debug)]
pub(crate) struct ServeOne {
    /// Connections that one user may have at a time, through all sockets of the host
    #[arg(long, value_name = "NUMBER", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=i64::from(stockade_server::socket::MAX_CONNECTIONS)))]
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
    /// Run this code, with the words as its arguments
    #[arg(short = 'c', long, value_name = "CODE")]
    pub(crate) code: Option<String>,
    /// The language of the code, where no ending of a file says it
    #[arg(long, value_name = "NAME")]
    pub(crate) language: Option<String>,
    #[command(flatten)]
    pub(crate) limits: RunLimits,
    /// Copy the files in scratch that match to the directory of --into; may be repeated
    #[arg(long, value_name = "PATTERN", conflicts_with = "dry_run")]
    pub(crate) collect: Vec<String>,
    /// Where collected files go, through no link but root's; default: `collected`
    #[arg(long, value_name = "DIR", requires = "collect", value_parser = path_from_here())]
    pub(crate) into: Option<PathBuf>,
    /// Replace files of the same names there, which are kept otherwise
    #[arg(long, requires = "collect")]
    pub(crate) overwrite: bool,
    /// Write the result, without the streams, as JSON into this file
    #[arg(long, value_name = "FILE", conflicts_with = "dry_run")]
    pub(crate) report: Option<PathBuf>,
    /// Say nothing of missing layers, refusals and collected files
    #[arg(short, long)]
    pub(crate) quiet: bool,
    /// A script, `-` for code on stdin, or a command; then its arguments. With --image it may be left
    /// out: the image's own command runs
    #[arg(required_unless_present_any = ["code", "image"], trailing_var_arg = true, value_name = "SCRIPT|COMMAND")]
    pub(crate) words: Vec<String>,
}

/// Limits of one run, up to the policy's maximum.
#[derive(Args, Debug)]
pub(crate) struct RunLimits {
    /// End the run after this time: `10s`, `10` (seconds), `2min`
    #[arg(long, value_name = "TIME", value_parser = |text: &str| limit(LimitKey::Wall, text))]
    pub(crate) timeout: Option<LimitValue>,
    /// Memory of all processes together: `512MiB`, `1g`
    #[arg(long, value_name = "SIZE", value_parser = |text: &str| limit(LimitKey::Memory, text))]
    pub(crate) memory: Option<LimitValue>,
    /// Processes and threads at a time
    #[arg(long, value_name = "NUMBER", value_parser = |text: &str| limit(LimitKey::Processes, text))]
    pub(crate) processes: Option<LimitValue>,
    /// CPUs, such as `2` or `0.5`
    #[arg(long, value_name = "NUMBER", value_parser = |text: &str| limit(LimitKey::Cpus, text))]
    pub(crate) cpus: Option<LimitValue>,
}

/// The value of a limit as a request has it. Beside a policy's spelling: seconds and bytes without
/// a unit, other names of minutes and hours, and `k`, `m`, `g` or `gb` for sizes in powers of 1024,
/// as other tools take them.
fn limit(key: LimitKey, text: &str) -> Result<LimitValue, String> {
    let text = text.trim();
    let (number, unit) = text.split_at(text.find(|letter: char| !letter.is_ascii_digit()).unwrap_or(text.len()));
    let in_unit = |unit: &str| LimitValue::Text(format!("{number}{unit}"));
    let value = match (key.quantity(), unit.trim_start()) {
        (Quantity::Duration, "" | "sec" | "secs" | "second" | "seconds") => in_unit("s"),
        (Quantity::Duration, "m" | "mins" | "minute" | "minutes") => in_unit("min"),
        (Quantity::Duration, "hour" | "hours") => in_unit("h"),
        (Quantity::Size, "") => in_unit("B"),
        (Quantity::Size, "k" | "K" | "kb" | "KB") => in_unit("KiB"),
        (Quantity::Size, "m" | "M" | "mb" | "MB") => in_unit("MiB"),
        (Quantity::Size, "g" | "G" | "gb" | "GB") => in_unit("GiB"),
        (Quantity::Duration | Quantity::Size, _) => LimitValue::Text(text.to_owned()),
        (Quantity::Count, _) => LimitValue::Integer(text.parse().map_err(|_| String::from("not a whole number"))?),
        (Quantity::Cpus, _) => LimitValue::Float(text.parse().map_err(|_| String::from("not a number"))?),
    };
    key.parse(&value).map(|_| value).map_err(|error| error.to_string())
}

#[derive(Debug, Subcommand)]
pub(crate) enum Shim {
    /// Make shims in a directory: `python`, `python3`, `sh`, `bash`, `node`, `pwsh`
    ///
    /// Makes those that both the policy and this host have, and the policy's other runtimes.
    /// Each takes the arguments, streams and signals of its interpreter and exits with its
    /// status, in a sandbox whose scratch is the caller's working directory. Put the directory
    /// first in PATH, or use a shim's path as an interpreter. Prints their paths.
    Install {
        /// The directory; made if it is missing
        #[arg(value_name = "DIR")]
        directory: PathBuf,
        #[command(flatten)]
        policy: PolicyChoice,
        /// The scratch of callers that work neither in it nor below it
        ///
        /// For programs that start their shells elsewhere, as in `/`.
        #[arg(long, value_name = "DIR", value_parser = path_from_here())]
        scratch: Option<PathBuf>,
        /// Pass output on byte for byte, also what is not UTF-8
        ///
        /// Otherwise U+FFFD replaces it, since most callers expect text.
        #[arg(long)]
        exact: bool,
        /// Say nothing on stderr of layers that are missing here
        #[arg(short, long)]
        quiet: bool,
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

/// bubblewrap's command line.
#[derive(Args, Debug)]
pub(crate) struct Bwrap {
    /// Options of bwrap(1), then the command
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "OPTION|COMMAND")]
    pub(crate) words: Vec<OsString>,
}

impl Bwrap {
    const WORD: &str = "bwrap";
}

/// The arguments that the kernel makes of a shim's first line and its caller's command line.
#[derive(Args, Debug)]
pub(crate) struct ShimExec {
    /// The shim's path, then its caller's arguments, none of which is an option here
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    pub(crate) words: Vec<OsString>,
}

impl ShimExec {
    /// The last word of a shim's first line, between the program and the shim's path.
    pub(crate) const WORD: &str = "shim-exec";
}

#[derive(Args, Debug)]
pub(crate) struct Runtimes {
    #[command(flatten)]
    pub(crate) policy: PolicyChoice,
    /// The image that is looked at in place of the host, by name or digest
    #[arg(long, value_name = "IMAGE", conflicts_with = "runtimes")]
    pub(crate) image: Option<String>,
    /// Print JSON
    #[arg(long, conflicts_with = "prompt")]
    pub(crate) json: bool,
    /// Print a short text for a model's prompt
    #[arg(long)]
    pub(crate) prompt: bool,
}

/// The policy of a command.
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
pub(crate) enum Templates {
    /// Make and try every template of a policy, as a session does, and print what came of each
    ///
    /// Exit status: 0 when none was refused, 1 when one was. Nothing of them is kept.
    Ls {
        #[command(flatten)]
        policy: PolicyChoice,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Make one for the session or service that starts this
    #[command(hide = true)]
    Make {
        /// Its runtime
        runtime: String,
        /// What the names of its programs begin with
        #[arg(long)]
        stem: String,
        /// The process of the session or service
        #[arg(long)]
        session: u32,
        /// The service's key whose request would have used it
        #[arg(long)]
        key: Option<String>,
        #[command(flatten)]
        policy: PolicyChoice,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum Image {
    /// Bring in an image from an OCI layout, an archive of one, or a file of `docker save`
    ///
    /// Archives may be compressed with gzip or zstd. Layers are unpacked by processes without rights, and
    /// compared with their digests. Prints NAME@DIGEST. An import that fails changes no image that was there.
    Import {
        /// The archive or the directory
        #[arg(value_name = "FILE|DIR", value_parser = path_from_here())]
        from: PathBuf,
        /// Its name in the store, in place of the name that it has in the archive
        #[arg(long, value_name = "NAME")]
        name: Option<String>,
        /// Which image, where there are several
        #[arg(long = "ref", value_name = "NAME")]
        reference: Option<String>,
        /// For which machine, where there are several; linux/amd64 otherwise
        #[arg(long, value_name = "OS/ARCH", value_parser = platform)]
        platform: Option<String>,
        /// The most that it may have when it is uncompressed; 16g otherwise
        #[arg(long, value_name = "SIZE", value_parser = size)]
        max_size: Option<u64>,
    },
    /// Bring in an image from a registry
    ///
    /// A tag is resolved once; prints NAME@DIGEST. A registry is asked by https, one of this host by
    /// plain HTTP unless --ca is given. Proxies are those of HTTPS_PROXY and NO_PROXY.
    Pull {
        /// The image: `[HOST/]NAME[:TAG][@sha256:DIGEST]`; of Docker Hub where no host is named
        #[arg(value_name = "REF")]
        reference: String,
        /// Its name in the store, in place of REF
        #[arg(long, value_name = "NAME")]
        name: Option<String>,
        /// For which machine, where there are several; linux/amd64 otherwise
        #[arg(long, value_name = "OS/ARCH", value_parser = platform)]
        platform: Option<String>,
        /// The most that it may have when it is uncompressed; 16g otherwise
        #[arg(long, value_name = "SIZE", value_parser = size)]
        max_size: Option<u64>,
        /// The file with the password, in the form of docker's config.json
        ///
        /// Otherwise a user's own config.json of docker is read; root names the file.
        #[arg(long, value_name = "FILE", value_parser = path_from_here())]
        creds_file: Option<PathBuf>,
        /// The certificate of a private authority, in PEM, beside those of this host
        #[arg(long, value_name = "FILE", value_parser = path_from_here())]
        ca: Option<PathBuf>,
        /// A host that is asked by plain HTTP; it gets no password
        #[arg(long, value_name = "HOST")]
        insecure_http: Vec<String>,
        /// A host of another domain that may get the registry's password for a token
        #[arg(long, value_name = "HOST")]
        auth_host: Vec<String>,
    },
    /// List images: name, digest, platform, layers, size and age
    Ls {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Print all that is known of an image, as JSON
    Inspect {
        /// A name, NAME@sha256:… or sha256:…
        #[arg(value_name = "IMAGE")]
        image: String,
    },
    /// Compare the files of images with what was imported; of all images where none is named
    Verify {
        /// A name, NAME@sha256:… or sha256:…
        #[arg(value_name = "IMAGE")]
        images: Vec<String>,
    },
    /// Remove names, and images with their last name
    ///
    /// A digest removes the image and all its names. Layers that no image has go too, unless a run or
    /// an import holds images: then `gc` removes them later.
    Rm {
        /// A name, NAME@sha256:… or sha256:…
        #[arg(value_name = "IMAGE", required = true)]
        images: Vec<String>,
    },
    /// Remove layers that no image has, and what crashed imports left
    Gc,
}

fn platform(text: &str) -> Result<String, String> {
    let parts: Vec<&str> = text.split('/').collect();
    let is_one = (2..=3).contains(&parts.len()) && parts.iter().all(|part| !part.is_empty());
    if is_one { Ok(text.to_owned()) } else { Err(String::from("write OS/ARCH, such as linux/amd64")) }
}

/// Bytes, written as a limit is.
fn size(text: &str) -> Result<u64, String> {
    let LimitValue::Text(text) = limit(LimitKey::Memory, text)? else { return Err(String::from("not a size")) };
    let bytes = LimitKey::Memory.parse_text(&text).map_err(|error| error.to_string())?;
    bytes.ok_or_else(|| String::from("an image has a limit; write a size"))
}

#[derive(Debug, Subcommand)]
pub(crate) enum Policy {
    /// Check policies; errors come with line, column and a suggestion
    Check {
        /// Names or files
        #[arg(required = true, value_name = "NAME|FILE")]
        policies: Vec<String>,
    },
    /// Write a policy, check it and explain it
    ///
    /// Into the directory of this user's policies; as root into /etc/stockade/policies. Writes over
    /// no file.
    New(NewPolicy),
    /// Print a policy with everything that it inherits
    Show {
        /// A name or a file
        #[arg(default_value = "default", value_name = "NAME|FILE")]
        policy: String,
        /// Print it as JSON
        #[arg(long)]
        json: bool,
    },
    /// Explain in sentences what code under a policy may do
    Explain {
        /// A name or a file
        #[arg(default_value = "default", value_name = "NAME|FILE")]
        policy: String,
        /// Also list what it allows and this policy does not, each with its effect
        #[arg(long, value_name = "NAME|FILE")]
        against: Option<String>,
        /// Print it as JSON
        #[arg(long)]
        json: bool,
    },
    /// Report what policy B allows that A does not, and vice versa
    ///
    /// Exit status: 0 when B allows nothing that A does not, 1 when it allows more or this
    /// cannot be decided, 2 when one of them is not a valid policy.
    Diff {
        /// The ceiling: a name or a file
        #[arg(value_name = "A")]
        first: String,
        /// The policy to compare with it
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

/// A shell for which there are completions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum CompletedShell {
    Bash,
    Zsh,
    Fish,
}

#[derive(Args, Debug)]
pub(crate) struct NewPolicy {
    /// Its name: small letters, digits, `_` and `-`
    #[arg(value_name = "NAME")]
    pub(crate) name: String,
    /// The policy that it changes
    #[arg(long, value_name = "NAME", default_value = "default")]
    pub(crate) extends: String,
    /// Allow this peer, such as `pypi.org:443`; may be repeated
    #[arg(long, value_name = "HOST:PORT", value_parser = peer)]
    pub(crate) allow: Vec<Rule>,
    /// Use the interpreter of this virtual environment for Python
    #[arg(long, value_name = "DIR", value_parser = path_from_here())]
    pub(crate) venv: Option<PathBuf>,
    /// Limits that no request can exceed
    #[command(flatten)]
    pub(crate) limits: RunLimits,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Grants {
    /// Check the file of the grants; errors come with line, column and a suggestion
    ///
    /// As a run through root reads it: its owner and mode, the names of users and groups, and
    /// whether each policy that is named exists. As root also whether each scratch can be used.
    /// Exits with 1 when something is wrong.
    Check {
        /// Another file than /etc/stockade/grants.toml
        #[arg(value_name = "FILE", value_parser = path_from_here())]
        file: Option<PathBuf>,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum Key {
    /// Make a key: print its token once, and the table for the file of the keys
    ///
    /// The token goes to stdout, the table to stderr. The table has the hash of the token, which
    /// cannot be turned back. Exit status: 0 when it was made, 1 when the file has a mistake or a
    /// key of this id, 125 when the file cannot be written.
    New(NewKey),
    /// List the keys: id, hash or uid, policies, scopes and the time at which they expire
    Ls {
        /// Another file than /etc/stockade/keys.toml, or ~/.config/stockade/keys.toml of a user
        #[arg(long, value_name = "FILE", value_parser = path_from_here())]
        file: Option<PathBuf>,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Check the file of the keys; errors come with line, column and a suggestion
    ///
    /// Its owner and mode, the names of users, and whether each policy that is named exists. Exits
    /// with 1 when something is wrong.
    Check {
        /// Another file than /etc/stockade/keys.toml, or ~/.config/stockade/keys.toml of a user
        #[arg(long, value_name = "FILE", value_parser = path_from_here())]
        file: Option<PathBuf>,
    },
}

#[derive(Args, Debug)]
pub(crate) struct NewKey {
    /// Its name, in the audit log too: small letters, digits, `.`, `_` and `-`
    #[arg(value_name = "ID")]
    pub(crate) id: String,
    /// A policy that it may use: a name, or the absolute path of a file; may be repeated
    #[arg(long = "policy", value_name = "NAME|FILE", default_value = "default")]
    pub(crate) policies: Vec<String>,
    /// What it is good for: run, keep (sessions), facade (the interfaces of other services) or watch (the
    /// runs of all keys); may be repeated
    #[arg(long = "scope", value_name = "SCOPE", default_value = "run", value_parser = PossibleValuesParser::new(Scope::ALL.map(Scope::name)), hide_possible_values = true)]
    pub(crate) scopes: Vec<String>,
    /// Another file than /etc/stockade/keys.toml, or ~/.config/stockade/keys.toml of a user
    #[arg(long, value_name = "FILE", value_parser = path_from_here())]
    pub(crate) file: Option<PathBuf>,
    /// Add the table to the file, which is made where there is none
    ///
    /// Only the owner can read a new file; of root's also the group stockade-serve, where the host
    /// has it.
    #[arg(long)]
    pub(crate) add: bool,
}

#[derive(Args, Debug)]
pub(crate) struct Doctor {
    #[command(flatten)]
    pub(crate) policy: PolicyChoice,
    /// Try this host directory as scratch
    #[arg(long, value_name = "DIR", value_parser = path_from_here())]
    pub(crate) scratch: Option<PathBuf>,
    /// Exit with 3 when anything is degraded, such as an audit log that cannot be written
    #[arg(long)]
    pub(crate) strict: bool,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Args, Debug)]
pub(crate) struct Prove {
    #[command(flatten)]
    pub(crate) policy: PolicyChoice,
    /// Write the result as an HTML page into this file
    #[arg(long, value_name = "FILE")]
    pub(crate) html: Option<PathBuf>,
    /// Be the concurrent run that a proof in this scratch attacks; started by the proof
    #[arg(long, value_name = "DIR", hide = true, conflicts_with_all = ["html", "json"])]
    pub(crate) concurrent: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Args, Debug)]
pub(crate) struct Screen {
    /// A policy's name, or a file (a path with a slash); default: `default`, which only notes
    #[arg(long, value_name = "NAME|FILE")]
    pub(crate) policy: Option<String>,
    /// Read every file as `python` or `bash`, whatever its name
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
pub(crate) struct Ps {
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
    /// Look again every second, and print the list when it has changed, until a signal ends this
    ///
    /// On a terminal the new list takes the place of the old one. With --json each list is a line.
    #[arg(long)]
    pub(crate) watch: bool,
    /// List the runs at this service, as `exec --server` has it
    #[arg(long, value_name = "URL")]
    pub(crate) server: Option<String>,
}

#[derive(Args, Debug)]
pub(crate) struct Kill {
    /// The run's number, as `stockade ps` prints it
    #[arg(value_name = "ID")]
    pub(crate) id: String,
    /// End a run at this service, as `exec --server` has it
    #[arg(long, value_name = "URL")]
    pub(crate) server: Option<String>,
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
    /// Exit status: 0 when nothing is wrong, 1 when a record is changed, missing or out of its
    /// place, 2 when the log cannot be read. An anchor is a record's number and hash outside the
    /// log: `audit head CHAIN:SEQ:SHA256` in the journal or syslog, or `audit` of a result. Only
    /// anchors reveal a change of the last record, a cut tail or a full rewrite.
    Verify(Verify),
    /// Close the last file and begin the next; the chain goes on in it
    ///
    /// Root's log is for root alone to rotate. Exit status: 0 when it was done, 125 when not.
    Rotate {
        /// Remove the oldest files whose last record is older than so many days
        ///
        /// A record in the new file states which, so that `verify` follows the chain from there.
        #[arg(long, value_name = "DAYS")]
        keep_days: Option<u32>,
    },
    /// Print the last records
    Tail {
        /// The directory of a log; default: this user's
        #[arg(long, value_name = "DIR")]
        log: Option<PathBuf>,
        /// How many
        #[arg(short = 'n', value_name = "N", default_value_t = 20)]
        number: usize,
        /// Keep printing new records
        #[arg(long)]
        follow: bool,
        /// Print all records as they stand in the log, one line of JSON each
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
    /// Search the log; filters are combined with AND
    ///
    /// Exits with 1 when no record matches.
    Query(Filter),
}

#[derive(Args, Clone, Debug)]
pub(crate) struct Verify {
    /// A file or the directory of a log; default: this user's
    #[arg(value_name = "FILE|DIR")]
    pub(crate) path: Option<PathBuf>,
    /// The same as FILE|DIR
    #[arg(long, value_name = "DIR", conflicts_with = "path")]
    pub(crate) log: Option<PathBuf>,
    /// The log begins after the record with this hash, because older files were moved away
    #[arg(long, value_name = "SHA256")]
    pub(crate) after: Option<String>,
    /// Anchors: lines of a journal or syslog, or results as JSON; `-`: stdin
    #[arg(long, value_name = "FILE")]
    pub(crate) anchors: Option<PathBuf>,
    /// Exit with 1 when no anchor matches a record
    #[arg(long)]
    pub(crate) require_anchor: bool,
    /// Exit with 1 when no record is of this chain
    #[arg(long, value_name = "ID")]
    pub(crate) chain: Option<String>,
}

/// Which records.
#[derive(Args, Clone, Debug)]
pub(crate) struct Filter {
    /// The directory of a log; default: this user's
    #[arg(long, value_name = "DIR")]
    pub(crate) log: Option<PathBuf>,
    /// Not before this time in UTC: `2026-11-22T06:50`, `today`, or how long ago, such as `1h`, `7d`
    #[arg(long, value_name = "TIME")]
    pub(crate) since: Option<String>,
    /// Before this time
    #[arg(long, value_name = "TIME")]
    pub(crate) until: Option<String>,
    /// With this label
    #[arg(long = "label", value_name = "NAME=VALUE", value_parser = parse_label)]
    pub(crate) labels: Vec<(String, String)>,
    /// Of this kind
    #[arg(long, value_name = "EVENT", value_parser = stockade_audit::Kind::NAMES)]
    pub(crate) event: Option<String>,
    /// With this verdict
    #[arg(long, value_name = "VERDICT")]
    pub(crate) verdict: Option<String>,
    /// Under this policy
    #[arg(long, value_name = "NAME")]
    pub(crate) policy: Option<String>,
    /// Leave out runs of `doctor`, `prove` and `runtimes`, which examine the host
    #[arg(long)]
    pub(crate) without_checks: bool,
    /// Print the records as they stand in the log, one line of JSON each
    #[arg(long)]
    pub(crate) json: bool,
}

fn parse_label(text: &str) -> Result<(String, String), String> {
    let (name, value) = text.split_once('=').ok_or("write NAME=VALUE")?;
    Ok((name.to_owned(), value.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shims_arguments_are_not_options_of_this_program() {
        for words in [&["/bin/python", "--help", "-c", "1"][..], &["/bin/python", "--", "--version", "--"], &["/bin/sh", "", "-"], &[]] {
            let line = ["stockade", "shim-exec"].iter().chain(words);
            let parsed = Cli::try_parse_from(line);
            assert!(matches!(&parsed, Ok(Cli { command: Command::ShimExec(shim) }) if shim.words == words), "{words:?}: {parsed:?}");
        }
    }

    fn error_of(words: &[&str]) -> String {
        let line = ["stockade"].iter().chain(words).map(OsString::from).collect();
        Cli::of(line).map_or_else(|error| error.to_string(), |_| String::from("no error"))
    }

    #[test]
    fn guessed_options_are_told_what_to_write() {
        for (options, remedy) in GUESSED {
            // Each option that a remedy names is one of every command that has the remedy.
            for named in remedy.split(['`', ' ', '=']).filter(|word| word.starts_with('-') && *word != "--") {
                for command in SANDBOXED {
                    let said = error_of(&[command, named]);
                    assert!(said.contains("a value is required") || said.contains("2 values"), "{command} {named}: {said}");
                }
            }
            for option in *options {
                for command in SANDBOXED {
                    let said = error_of(&[command, option, "x"]);
                    assert!(said.contains(remedy), "{command} {option}: {said}");
                }
            }
        }
        let said = error_of(&["exec", "a.py"]);
        assert!(said.contains("`stockade run a.py`") && said.contains("`stockade exec < a.py`"), "{said}");
        // The controls: what clap itself suggests stays, and other commands have no remedy.
        assert!(error_of(&["run", "--alow", "x"]).contains("'--allow'") && error_of(&["runn", "x"]).contains("'run'"));
        assert!(!error_of(&["doctor", "--network"]).contains("--allow"));
    }

    #[test]
    fn a_command_alone_is_parsed_as_among_all() {
        let lines = [
            "exec",
            "exec --policy strict --scratch /srv --runtime python=/usr/bin/python3 --allow pypi.org:443 --pretty -q",
            "exec --markdown --last",
            "exec --approve T",
            "run a.py --timeout 1s",
            "run --timeout 10s --memory 1g --collect *.txt --into out --overwrite --report r.json -C . -- ls -l --color",
            "run -c pass -- -x --help",
            "run --dry-run --json true",
            "shim-exec /bin/python --help --version -c 1",
        ];
        for line in lines {
            let words = || std::iter::once("stockade").chain(line.split(' ')).map(OsString::from);
            let alone = Cli::alone(line.split(' ').next().unwrap_or_default()).map(|alone| alone.try_get_matches_from(words()));
            let parsed = alone.and_then(Result::ok).and_then(|matches| Cli::from_arg_matches(&matches).ok());
            let among_all = Cli::try_parse_from(words()).ok();
            assert!(parsed.is_some() && format!("{parsed:?}") == format!("{among_all:?}"), "{line}: {parsed:?}, {among_all:?}");
        }
        // Help and errors come from the whole description.
        assert!(error_of(&["exec", "--help"]).contains("Examples:") && error_of(&["run"]).contains("Usage: stockade run"));
    }

    #[test]
    fn the_command_line_is_described_without_a_contradiction() {
        Cli::described().debug_assert();
    }

    #[test]
    fn no_sentence_of_the_help_is_longer_than_forty_words() {
        fn long(command: &clap::Command, out: &mut Vec<String>) {
            let about = [command.get_about(), command.get_long_about()].into_iter().flatten();
            let options = command.get_arguments().flat_map(|option| [option.get_help(), option.get_long_help()]).flatten();
            let texts = about.chain(options).map(ToString::to_string);
            let parts = |text: String| text.split("\n\n").flat_map(|part| part.split(". ")).map(str::to_owned).collect::<Vec<_>>();
            let sentences = texts.flat_map(parts);
            out.extend(sentences.filter(|sentence| sentence.split_whitespace().count() > 40));
            command.get_subcommands().for_each(|below| long(below, out));
        }
        let mut found = Vec::new();
        long(&Cli::command(), &mut found);
        assert!(found.is_empty(), "{found:#?}");
    }

    #[test]
    fn every_command_has_two_examples() {
        fn ends(command: &clap::Command, above: &str, out: &mut Vec<String>) {
            for below in command.get_subcommands().filter(|command| !command.is_hide_set()) {
                let name = format!("{above} {}", below.get_name()).trim_start().to_owned();
                if below.has_subcommands() { ends(below, &name, out) } else { out.push(name) }
            }
        }
        let mut names = Vec::new();
        ends(&Cli::command(), "", &mut names);
        let without: Vec<_> = names.iter().filter(|name| !EXAMPLES.iter().any(|(known, ..)| known == name)).collect();
        assert!(without.is_empty() && names.len() == EXAMPLES.len(), "{without:?}");
    }
}
