//! Screening: the code is given to the screener, and the policy judges what that found.
//!
//! The screener is a program of its own (`stockade-screen`), because parsers of hostile
//! text fail in ways that nobody can catch: it gets the code in a file without a name,
//! answers into another, and has five seconds. That it is missing, dies, takes too long or
//! talks nonsense is itself a finding, under the rule `screener`; nothing that it does ends
//! the launcher. A finding is advice. The sandbox does not rely on it.

use std::{
    fs::File,
    io::{self, Read, Seek, Write},
    os::{
        fd::{AsFd, AsRawFd},
        unix::process::{CommandExt, ExitStatusExt},
    },
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create},
    io::Errno,
    process::{Pid, PidfdFlags, pidfd_open},
};
use stockade_policy::model::{Policy, Runtime, Screen};
use stockade_protocol::{
    Report, Request, Verdict,
    screen::{Action, Answer, Finding, Found, Grammar, LONGEST_ANSWER, LONGEST_CODE, Question, Rule},
};

use crate::companion;

/// The screener's program.
const PROGRAM: &str = "stockade-screen";
/// How long it may take.
const PATIENCE: Duration = Duration::from_secs(5);

/// What screening found, judged by a policy.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Screening {
    /// In the order of the text.
    pub findings: Vec<Finding>,
    /// How many more there were.
    pub omitted: u64,
}

impl Screening {
    /// The most that the policy does about anything that was found.
    pub fn severest(&self) -> Action {
        self.findings.iter().map(|finding| finding.action).max().unwrap_or(Action::Allow)
    }

    fn judge(answer: Answer, screen: &Screen) -> Self {
        let finding = |found: Found| Finding {
            rule: found.rule,
            action: screen.action(found.rule),
            line: found.line,
            column: found.column,
            text: found.text,
            what: found.what,
        };
        let findings = answer.found.into_iter().map(finding).filter(|finding| finding.action != Action::Allow).collect();
        Screening { findings, omitted: answer.omitted }
    }

    /// The result of code that the policy refuses for what was found in it.
    pub(crate) fn refusal(&self, policy: &Policy) -> Report {
        let refused: Vec<String> = self.findings.iter().filter(|finding| finding.action == Action::Deny).map(sentence).collect();
        let name = &policy.name;
        let error = format!(
            "policy `{name}` refuses this code for what is in it: {}; change the code, or take a policy whose [screen] allows it",
            refused.join("; ")
        );
        Report::refused(Verdict::Screened, "screened", error)
    }

    /// Adds what was found to a result.
    pub(crate) fn onto(self, report: Report) -> Report {
        Report { findings: self.findings, findings_omitted: self.omitted, ..report }
    }
}

/// A finding in a sentence, with nothing in it that a terminal acts on.
pub fn sentence(finding: &Finding) -> String {
    let rule = finding.rule;
    let place = if finding.line == 0 { String::new() } else { format!("line {}, column {}: ", finding.line, finding.column) };
    let text = if finding.text.is_empty() { String::new() } else { format!(": `{}`", visible(&finding.text)) };
    let what =
        if finding.what.is_empty() || finding.what == finding.text { String::new() } else { format!(" ({})", visible(&finding.what)) };
    format!("{place}{} {}{text}{what}", rule.name(), rule.about())
}

/// A text with whatever cannot be seen made visible, directions of writing among it.
fn visible(text: &str) -> String {
    text.chars().map(|c| if matches!(c, '"' | '\'') { c.to_string() } else { c.escape_debug().to_string() }).collect()
}

/// How the code of a runtime is to be read; none: no rule knows its language.
pub fn grammar(runtime: &Runtime) -> Option<Grammar> {
    grammar_of_ending(&runtime.extension)
}

/// The same by the ending of a file's name.
pub fn grammar_of_ending(ending: &str) -> Option<Grammar> {
    match ending {
        "py" | "pyw" | "pyi" => Some(Grammar::Python),
        "sh" | "bash" => Some(Grammar::Shell),
        _ => None,
    }
}

/// A screening that goes on.
pub struct Pending<'p> {
    screen: &'p Screen,
    state: State,
}

enum State {
    /// Nothing is looked for.
    Idle,
    /// It is known already.
    Known(Rule, String),
    Asked {
        child: Child,
        answer: File,
        end: Instant,
    },
}

impl<'p> Pending<'p> {
    /// Begins to screen a request's code.
    pub(crate) fn of_request(request: &Request, policy: &'p Policy, privileged: bool) -> Self {
        let language = request.language.as_deref().unwrap_or(&policy.language).to_lowercase();
        let named = |(name, runtime): &(&String, &Runtime)| **name == language || runtime.aliases.contains(&language);
        let Some((name, runtime)) = policy.runtimes.iter().find(named) else {
            // Admission refuses it, and says more than could be said here.
            return Pending { screen: &policy.screen, state: State::Idle };
        };
        let scratch = request.scratch.as_deref().unwrap_or(stockade_policy::plan::PRIVATE_SCRATCH);
        match grammar(runtime) {
            Some(grammar) => Self::new(&request.code, grammar, scratch, &policy.screen, privileged),
            None => Pending { screen: &policy.screen, state: State::Known(Rule::Language, name.clone()) },
        }
    }

    /// Begins to screen code.
    pub fn new(code: &str, grammar: Grammar, scratch: &str, screen: &'p Screen, privileged: bool) -> Self {
        let state = if screen.severest() == Action::Allow {
            State::Idle
        } else if code.len() > LONGEST_CODE {
            State::Known(Rule::Screener, format!("{} bytes, which is more than {LONGEST_CODE}", code.len()))
        } else {
            let list = |names: &'p [String]| names.iter().map(String::as_str).collect();
            let question = Question { grammar, modules: list(&screen.modules), builtins: list(&screen.builtins), scratch, code };
            match ask(&question, privileged) {
                Ok((child, answer)) => State::Asked { child, answer, end: Instant::now() + PATIENCE },
                Err(why) => State::Known(Rule::Screener, why),
            }
        };
        Pending { screen, state }
    }

    /// Waits for it.
    pub fn finish(self) -> Screening {
        let known = |rule, what| Answer { found: vec![Found { rule, line: 0, column: 0, text: String::new(), what }], omitted: 0 };
        let answer = match self.state {
            State::Idle => Answer::default(),
            State::Known(rule, what) => known(rule, what),
            State::Asked { child, answer, end } => hear(child, answer, end).unwrap_or_else(|why| known(Rule::Screener, why)),
        };
        Screening::judge(answer, self.screen)
    }
}

fn unnamed_file() -> io::Result<File> {
    Ok(memfd_create("screen", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?.into())
}

/// Starts the screener; what is wrong is said in words, for the finding.
fn ask(question: &Question<'_>, privileged: bool) -> Result<(Child, File), String> {
    let (_, program) = companion::find(PROGRAM, privileged).map_err(|error| error.to_string())?;
    let start = || -> io::Result<(Child, File)> {
        let (mut asked, answer) = (unnamed_file()?, unnamed_file()?);
        asked.write_all(&question.encode())?;
        asked.rewind()?;
        // Neither can be made to hold more of the launcher's memory than it does now.
        let fixed = SealFlags::SEAL | SealFlags::GROW | SealFlags::SHRINK;
        fcntl_add_seals(&asked, fixed | SealFlags::WRITE)?;
        answer.set_len(LONGEST_ANSWER as u64)?;
        fcntl_add_seals(&answer, fixed)?;
        let mut command = Command::new(format!("/proc/self/fd/{}", program.as_raw_fd()));
        command.arg0(PROGRAM).env_clear().stdin(asked).stdout(answer.try_clone()?).stderr(Stdio::null());
        Ok((command.spawn()?, answer))
    };
    start().map_err(|error| format!("start {PROGRAM}: {error}"))
}

fn hear(mut child: Child, mut answer: File, end: Instant) -> Result<Answer, String> {
    let in_time = ended_by(&child, end);
    if !matches!(in_time, Ok(true)) {
        // It may have ended just now.
        let _gone = child.kill();
    }
    let status = child.wait().map_err(|error| format!("wait for {PROGRAM}: {error}"))?;
    match in_time {
        Ok(true) if status.success() => {}
        Ok(true) => {
            let how = status
                .signal()
                .map_or_else(|| format!("with status {}", status.code().unwrap_or(-1)), |signal| format!("by signal {signal}"));
            return Err(format!("{PROGRAM} ended {how}"));
        }
        Ok(false) => return Err(format!("{PROGRAM} took longer than {} s", PATIENCE.as_secs())),
        Err(errno) => return Err(format!("wait for {PROGRAM}: {errno}")),
    }
    let mut bytes = Vec::new();
    // The place in the file is shared: it is where the answer ends.
    let mut read = || {
        let length = answer.stream_position()?;
        answer.rewind()?;
        (&answer).take(length).read_to_end(&mut bytes)
    };
    read().map_err(|error| format!("read what {PROGRAM} answers: {error}"))?;
    Answer::decode(&bytes).map_err(|error| format!("{PROGRAM} talks nonsense: {error}"))
}

/// Whether it has ended by then.
fn ended_by(child: &Child, end: Instant) -> Result<bool, Errno> {
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw).ok_or(Errno::SRCH)?;
    let process = pidfd_open(pid, PidfdFlags::empty())?;
    loop {
        let left = end.saturating_duration_since(Instant::now());
        let timeout = Timespec::try_from(left).map_err(|_| Errno::INVAL)?;
        match poll(&mut [PollFd::new(&process.as_fd(), PollFlags::IN)], Some(&timeout)) {
            Ok(ready) => return Ok(ready > 0),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
}
