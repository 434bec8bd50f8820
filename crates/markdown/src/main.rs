//! The companion program `stockade-markdown`: what `stockade exec --markdown` becomes.
//!
//! Reads a reply from stdin, has `stockade session` run its blocks in one scratch until one
//! fails, and prints one result. It holds no rights and validates neither policy, languages
//! nor file names: the session does. Only the answer goes to stdout.
#![forbid(unsafe_code)]

mod answer;
mod session;

use std::{
    ffi::OsString,
    io::{self, Read, Write},
    path::PathBuf,
    process::ExitCode,
    sync::mpsc::channel,
    thread,
    time::Duration,
};

use answer::{Answer, Given};
use session::Session;
use stockade_markdown::{Block, read};
use stockade_protocol::{Report, Verdict};

/// The largest reply, the same as the largest request.
const MAX_REPLY_LEN: u64 = 64 << 20;

/// How long a reader has for the answer after the program was told to end.
const PRINT_TIMEOUT: Duration = Duration::from_secs(2);

/// The arguments that `stockade exec --markdown` passes.
#[derive(Default)]
struct Arguments {
    program: PathBuf,
    program_version: OsString,
    ends_with: Vec<i32>,
    last: bool,
    text: bool,
    session: Vec<OsString>,
}

impl Arguments {
    fn of_process() -> Option<Self> {
        let mut arguments = Arguments::default();
        let mut words = std::env::args_os().skip(1);
        while let Some(word) = words.next() {
            match word.to_str()? {
                "--program" => arguments.program = words.next()?.into(),
                "--program-version" => arguments.program_version = words.next()?,
                "--ends-with" => arguments.ends_with.push(words.next()?.to_str()?.parse().ok()?),
                "--last" => arguments.last = true,
                "--text" => arguments.text = true,
                "--" => arguments.session = words.by_ref().collect(),
                _ => return None,
            }
        }
        arguments.program.is_absolute().then_some(arguments)
    }
}

fn main() -> ExitCode {
    let Some(arguments) = Arguments::of_process() else {
        let _stderr_closed = writeln!(io::stderr(), "stockade-markdown: only `stockade exec --markdown` starts this program");
        return ExitCode::from(2);
    };
    let answer = run(&arguments);
    let printed = if arguments.text { answer.text() } else { answer.json() };
    let cancelled_by = session::let_signals_end_this();
    match print(printed, cancelled_by) {
        Ok(()) => ExitCode::from(answer.status()),
        Err(PrintError::NotTaken(signal)) => ExitCode::from(u8::try_from(128 + signal).unwrap_or(125)),
        Err(PrintError::Write(error)) => {
            let _stderr_closed = writeln!(io::stderr(), "stockade: write the answer to stdout: {error}");
            ExitCode::from(125)
        }
    }
}

/// Why the answer was not printed.
enum PrintError {
    Write(io::Error),
    /// This signal had told the program to end, and its reader did not read.
    NotTaken(i32),
}

/// Prints the answer. After a signal that told this program to end, its reader has a moment for
/// that; else it has all the time, until a signal ends this program.
fn print(answer: String, cancelled_by: Option<i32>) -> Result<(), PrintError> {
    let (done, written) = channel();
    // It ends with this program, however long it is kept waiting.
    thread::spawn(move || done.send(io::stdout().write_all(answer.as_bytes()).and_then(|()| io::stdout().flush())));
    let came = match cancelled_by {
        Some(signal) => written.recv_timeout(PRINT_TIMEOUT).map_err(|_| PrintError::NotTaken(signal))?,
        None => written.recv().unwrap_or_else(|_| Err(io::ErrorKind::BrokenPipe.into())),
    };
    came.map_err(PrintError::Write)
}

fn run(arguments: &Arguments) -> Answer {
    let begin = || -> Result<_, Box<Report>> {
        check_version(arguments)?;
        session::hang_up_with(&arguments.ends_with)?;
        let blocks = read(&read_reply()?).map_err(|error| bad_request(error.reason(), &error))?;
        Ok((blocks, Session::start(&arguments.program, &arguments.session)?))
    };
    match begin() {
        Ok((blocks, session)) => run_blocks(&blocks, arguments.last, session),
        Err(report) => Answer::of(&report),
    }
}

fn bad_request(reason: &str, why: &dyn std::fmt::Display) -> Box<Report> {
    Box::new(Report::refused(Verdict::BadRequest, reason, why.to_string()))
}

fn check_version(arguments: &Arguments) -> Result<(), Box<Report>> {
    let own = env!("CARGO_PKG_VERSION");
    if arguments.program_version == own {
        return Ok(());
    }
    let (program, other) = (arguments.program.display(), arguments.program_version.display());
    let message = format!("stockade-markdown is of version {own} and {program} of version {other}; install both from one package");
    Err(Box::new(Report::refused(Verdict::SandboxError, "companion_version", message)))
}

fn read_reply() -> Result<Vec<u8>, Box<Report>> {
    let mut reply = Vec::new();
    match io::stdin().lock().take(MAX_REPLY_LEN + 1).read_to_end(&mut reply) {
        Ok(_) if reply.len() as u64 <= MAX_REPLY_LEN => Ok(reply),
        Ok(_) => Err(bad_request("reply_too_large", &"the reply is larger than 64 MiB")),
        Err(error) => Err(bad_request("reply_unreadable", &format!("the reply cannot be read: {error}"))),
    }
}

fn run_blocks(blocks: &[Block], last: bool, session: Session) -> Answer {
    let chosen = blocks.iter().rposition(|block| block.is_no_code().is_none());
    let mut answer = Answer::default();
    for (index, block) in blocks.iter().enumerate() {
        let given = match block.is_no_code() {
            Some(why) => Given::NotSent(why),
            None if last && chosen != Some(index) => Given::NotSent("not_last"),
            None if answer.has_failed() => Given::NotSent("after_failure"),
            None => Given::Result(session.run(block)),
        };
        answer.add(block, given);
    }
    session.end();
    answer
}
