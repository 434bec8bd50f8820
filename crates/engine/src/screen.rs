//! Screening: code is given to the screener, and the policy judges what that found.
//!
//! The screener is a separate program (`stockade-screen`), because a parser of hostile text
//! can overflow its stack, which no caller can catch. It gets the code in a memory file,
//! answers into another, and has 5 s. A screener that is missing, dies, times out or sends a
//! malformed answer is itself a finding, under the rule `screener`; it never ends the launcher.
//! A finding is advice. The sandbox does not rely on it.

mod scripts;
mod sources;
mod standing;

use std::{
    borrow::Cow,
    fs::File,
    io::{self, Read, Seek, Write},
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
        unix::{fs::FileExt, process::CommandExt},
    },
    path::Path,
    process::{Child, Command, Stdio},
    rc::Rc,
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create},
    io::{Errno, retry_on_intr},
    process::{Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, pidfd_open, pidfd_send_signal, setpriority_process, waitid},
};
use stockade_policy::model::{Policy, Runtime, Screen};
use stockade_protocol::{
    Report, Request, Verdict,
    screen::{Action, Answer, Finding, Found, Grammar, MAX_ANSWER_LEN, Question, Rule, Source},
    text::{escape_line, is_hidden},
};

use crate::{Options, Origin, Refusal, caller, companion};
pub(crate) use sources::runtime;
pub(crate) use standing::SessionScreener;
use standing::StandingScreener;

/// The screener's program.
const PROGRAM: &str = "stockade-screen";
/// Findings that an error names; the result has all.
const MAX_NAMED: usize = 5;
/// Its niceness, see nice(2).
const LESS_URGENT: i32 = 10;
/// How long it may take.
const SCREENER_TIMEOUT: Duration = Duration::from_secs(5);

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

    fn judge(answer: Answer, files: &[Option<String>], screen: &Screen) -> Self {
        let finding = |found: Found| Finding {
            file: usize::try_from(found.source).ok().and_then(|source| files.get(source)).cloned().flatten(),
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

    /// The result of code that the policy refuses for what was found in it; or has approved
    /// first, where no approval is possible, as `unapprovable` words it. None: it may run,
    /// or wait.
    pub(crate) fn refusal(&self, policy: &Policy, unapprovable: Option<&str>) -> Option<Report> {
        let severest = self.severest();
        let (reason, does, how) = match (severest, unapprovable) {
            (Action::Deny, _) => ("screened", "refuses this code", "change the code"),
            (Action::Approve, Some(how)) => ("approval_not_here", "has this code approved before it runs", how),
            _ => return None,
        };
        let name = &policy.name;
        let found = self.sentences(severest);
        let error = format!("policy `{name}` {does}, for what is in it: {found}; {how}, or take a policy whose [screen] allows it");
        Some(self.clone().onto(Report::refused(Verdict::Screened, reason, error)))
    }

    /// What was found about which the policy does this, in words.
    pub(crate) fn sentences(&self, action: Action) -> String {
        let mut all: Vec<String> = self.findings.iter().filter(|finding| finding.action == action).map(sentence).collect();
        let more = all.len().saturating_sub(MAX_NAMED);
        all.truncate(MAX_NAMED);
        if more > 0 {
            all.push(format!("and {more} more"));
        }
        all.join("; ")
    }

    /// Adds what was found to a result.
    pub(crate) fn onto(self, report: Report) -> Report {
        Report { findings: self.findings, findings_omitted: self.omitted, ..report }
    }
}

/// A finding in a sentence, with nothing in it that a terminal acts on.
pub fn sentence(finding: &Finding) -> String {
    let rule = finding.rule;
    let visible = |text: &str| escape_line(text, is_hidden);
    let file = finding.file.as_ref().map(|file| format!("{}: ", visible(file))).unwrap_or_default();
    let place = if finding.line == 0 { String::new() } else { format!("line {}, column {}: ", finding.line, finding.column) };
    let text = if finding.text.is_empty() { String::new() } else { format!(": `{}`", visible(&finding.text)) };
    let what =
        if finding.what.is_empty() || finding.what == finding.text { String::new() } else { format!(" ({})", visible(&finding.what)) };
    format!("{file}{place}{} {}{text}{what}", rule.name(), rule.about())
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

/// The language of a file, by its ending, else by its first line.
pub fn grammar_of_file(path: &Path, code: &str) -> Option<Grammar> {
    let by_ending = path.extension().and_then(|ending| ending.to_str()).and_then(grammar_of_ending);
    by_ending.or_else(|| {
        let mut words = code.lines().next()?.strip_prefix("#!")?.split_whitespace();
        let program = words.find(|word| !word.ends_with("/env") && !word.starts_with('-'))?;
        let name = program.rsplit('/').next()?.trim_end_matches(|c: char| c.is_ascii_digit() || c == '.');
        match name {
            "python" => Some(Grammar::Python),
            "sh" | "bash" | "dash" => Some(Grammar::Shell),
            _ => None,
        }
    })
}

/// What is to be read, and what is known without.
struct Sources<'a> {
    /// Where the code may write.
    scratch: Cow<'a, str>,
    /// Each with the file that it is in; none: the code itself.
    texts: Vec<(Option<String>, Grammar, Cow<'a, str>)>,
    known: Vec<(Option<String>, Rule, String)>,
}

/// A screening that goes on.
pub struct ScreeningJob<'p> {
    screen: &'p Screen,
    /// Root has started this process.
    privileged: bool,
    /// The file of each source.
    files: Vec<Option<String>>,
    known: Vec<Finding>,
    asked: Option<ScreenerProcess>,
}

/// The screener at work.
struct ScreenerProcess {
    by: Answering,
    question: File,
    answer: File,
    end: Instant,
}

/// Which process answers.
enum Answering {
    /// One that was started for it.
    Started(OwnedFd),
    /// The copy that a standing one makes for the question of this number.
    Copy(Rc<StandingScreener>, u32),
}

impl<'p> ScreeningJob<'p> {
    /// Begins to screen a request's code; `scratch` is what the command line has named.
    pub(crate) fn of_request(
        request: &Request,
        policy: &'p Policy,
        scratch: Option<&Path>,
        privileged: bool,
        standing: Option<&SessionScreener>,
    ) -> Self {
        // Without a runtime admission refuses it, and says more than could be said here.
        let sources = if policy.screen.severest() == Action::Allow { None } else { sources::of_request(request, policy, scratch) };
        Self::begin(sources, &policy.screen, privileged, standing.and_then(|standing| standing.screener(&policy.screen)))
    }

    /// Begins to screen what has its streams passed through, where somebody reads what is found or
    /// it can be refused.
    ///
    /// # Errors
    /// It cannot be known who asks.
    pub(crate) fn of_command(origin: Origin<'_>, policy: &'p Policy, options: &Options, read: bool) -> Result<Self, Refusal> {
        let least = if read { Action::Note } else { Action::Approve };
        if policy.screen.severest() < least {
            return Ok(Self::begin(None, &policy.screen, false, None));
        }
        let privileged = caller::identify(options.peer.as_ref())?.privileged;
        let sources = match origin {
            Origin::Script { request, .. } => sources::of_request(request, policy, options.scratch.as_deref()),
            _ => Some(sources::of_command(&origin.words(), policy, options.scratch.as_deref())),
        };
        Ok(Self::begin(sources, &policy.screen, privileged, None))
    }

    /// Begins to screen a text.
    pub fn of_text(code: &str, grammar: Grammar, screen: &'p Screen, privileged: bool) -> Self {
        let mut sources = Sources::new("".into());
        sources.add(None, grammar, code.into());
        Self::begin(Some(sources), screen, privileged, None)
    }

    fn begin(sources: Option<Sources<'_>>, screen: &'p Screen, privileged: bool, standing: Option<Rc<StandingScreener>>) -> Self {
        let mut pending = ScreeningJob { screen, privileged, files: Vec::new(), known: Vec::new(), asked: None };
        let Some(sources) = sources else { return pending };
        sources.known.into_iter().for_each(|(file, rule, what)| pending.know(file, rule, what));
        if sources.texts.is_empty() || screen.severest() == Action::Allow {
            return pending;
        }
        let list = |names: &'p [String]| names.iter().map(String::as_str).collect();
        let question = Question {
            rules: Rule::ALL.into_iter().filter(|rule| screen.action(*rule) != Action::Allow).collect(),
            modules: list(&screen.modules),
            builtins: list(&screen.builtins),
            scratch: &sources.scratch,
            sources: sources.texts.iter().map(|(_, grammar, code)| Source { grammar: *grammar, code }).collect(),
        };
        match ask(&question, screen, privileged, standing) {
            Ok(asked) => pending.asked = Some(asked),
            Err(why) => pending.know(None, Rule::Screener, why),
        }
        pending.files = sources.texts.into_iter().map(|(file, ..)| file).collect();
        pending
    }

    /// A finding about the whole of a source.
    fn know(&mut self, file: Option<String>, rule: Rule, what: String) {
        let action = self.screen.action(rule);
        if action != Action::Allow {
            self.known.push(Finding { file, rule, action, line: 0, column: 0, text: String::new(), what });
        }
    }

    /// Waits for it.
    pub fn finish(mut self) -> Screening {
        let mut screening = Screening::default();
        match self.asked.take().map(|asked| hear(asked, self.screen, self.privileged)) {
            Some(Ok(answer)) => screening = Screening::judge(answer, &self.files, self.screen),
            Some(Err(why)) => self.know(None, Rule::Screener, why),
            None => {}
        }
        let mut findings = std::mem::take(&mut self.known);
        findings.append(&mut screening.findings);
        Screening { findings, ..screening }
    }
}

fn unnamed_file() -> io::Result<File> {
    Ok(memfd_create("screen", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?.into())
}

/// A question, and the file for its answer.
fn hand_in(question: &[u8]) -> Result<(File, File), String> {
    let write = || -> io::Result<(File, File)> {
        let (mut file, answer) = (unnamed_file()?, unnamed_file()?);
        file.write_all(question)?;
        file.rewind()?;
        // Neither can be made to hold more of the launcher's memory than it does now.
        let fixed = SealFlags::SEAL | SealFlags::GROW | SealFlags::SHRINK;
        fcntl_add_seals(&file, fixed | SealFlags::WRITE)?;
        answer.set_len(MAX_ANSWER_LEN as u64)?;
        fcntl_add_seals(&answer, fixed)?;
        Ok((file, answer))
    };
    write().map_err(|error| format!("hand in the question: {error}"))
}

/// The same question once more, in files that no process has yet: one that still reads the first ones
/// moves the place in them.
fn hand_in_again(question: &File) -> Result<(File, File), String> {
    let read = || -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; usize::try_from(question.metadata()?.len()).unwrap_or(0)];
        question.read_exact_at(&mut bytes, 0)?;
        Ok(bytes)
    };
    hand_in(&read().map_err(|error| format!("read the question: {error}"))?)
}

/// Asks a screener; what is wrong is said in words, for the finding.
fn ask(
    question: &Question<'_>,
    screen: &Screen,
    privileged: bool,
    standing: Option<Rc<StandingScreener>>,
) -> Result<ScreenerProcess, String> {
    let end = Instant::now() + SCREENER_TIMEOUT;
    let (question, answer) = hand_in(&question.encode())?;
    let number = standing.as_ref().and_then(|standing| standing.ask(&question, &answer).ok());
    let by = match standing.zip(number) {
        Some((standing, number)) => Answering::Copy(standing, number),
        None => Answering::Started(start(&question, &answer, screen, privileged)?),
    };
    Ok(ScreenerProcess { by, question, answer, end })
}

/// Starts a screener for one question.
fn start(question: &File, answer: &File, screen: &Screen, privileged: bool) -> Result<OwnedFd, String> {
    let (_, program) = companion::find(PROGRAM, privileged).map_err(|error| error.to_string())?;
    let spawn = || -> io::Result<OwnedFd> {
        let mut command = Command::new(format!("/proc/self/fd/{}", program.as_raw_fd()));
        command.arg0(PROGRAM).env_clear().stdin(question.try_clone()?).stdout(answer.try_clone()?).stderr(Stdio::null());
        let child = command.spawn()?;
        less_urgent(screen, pid_of(&child));
        Ok(pidfd_open(pid_of(&child).ok_or(Errno::SRCH)?, PidfdFlags::empty())?)
    };
    spawn().map_err(|error| format!("start {PROGRAM}: {error}"))
}

/// What is only told gives way to the sandbox that is made meanwhile.
fn gives_way(screen: &Screen) -> bool {
    screen.severest() <= Action::Note
}

fn less_urgent(screen: &Screen, screener: Option<Pid>) {
    if let (Some(pid), true) = (screener, gives_way(screen)) {
        let _as_urgent = setpriority_process(Some(pid), LESS_URGENT);
    }
}

fn hear(asked: ScreenerProcess, screen: &Screen, privileged: bool) -> Result<Answer, String> {
    let ScreenerProcess { by, question, mut answer, end } = asked;
    let failed = |errno| format!("wait for {PROGRAM}: {errno}");
    let process = match by {
        Answering::Started(process) => Some(process),
        Answering::Copy(standing, number) => match standing.copy_for(number, end) {
            Ok(copy) => copy,
            // It has ended, or its copy was lost on the way, and may be reading.
            Err(_) => {
                let (question, own_answer) = hand_in_again(&question)?;
                answer = own_answer;
                Some(start(&question, &answer, screen, privileged)?)
            }
        },
    };
    let too_long = || format!("{PROGRAM} took longer than {} s", SCREENER_TIMEOUT.as_secs());
    let process = process.ok_or_else(too_long)?;
    let in_time = readable_by(process.as_fd(), end);
    if !matches!(in_time, Ok(true)) {
        // It may have ended just now.
        let _gone = pidfd_send_signal(&process, Signal::KILL);
    }
    let status = retry_on_intr(|| waitid(WaitId::PidFd(process.as_fd()), WaitIdOptions::EXITED)).map_err(failed)?;
    let status = status.ok_or_else(|| failed(Errno::CHILD))?;
    match in_time {
        Ok(true) if status.exit_status() == Some(0) => {}
        Ok(true) => {
            let how = status
                .terminating_signal()
                .map_or_else(|| format!("with status {}", status.exit_status().unwrap_or(-1)), |signal| format!("by signal {signal}"));
            return Err(format!("{PROGRAM} ended {how}"));
        }
        Ok(false) => return Err(too_long()),
        Err(errno) => return Err(failed(errno)),
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

fn pid_of(child: &Child) -> Option<Pid> {
    i32::try_from(child.id()).ok().and_then(Pid::from_raw)
}

/// Ends a screener that nothing waits for any more.
fn end(process: &OwnedFd) {
    let _gone = pidfd_send_signal(process, Signal::KILL);
    let _reaped = retry_on_intr(|| waitid(WaitId::PidFd(process.as_fd()), WaitIdOptions::EXITED));
}

impl Drop for ScreeningJob<'_> {
    /// One that is not waited for is ended; a standing screener's copy with the next question.
    fn drop(&mut self) {
        if let Some(ScreenerProcess { by: Answering::Started(process), .. }) = &self.asked {
            end(process);
        }
    }
}

/// Whether a process has ended by then, or a socket has something to read.
fn readable_by(descriptor: BorrowedFd<'_>, end: Instant) -> Result<bool, Errno> {
    loop {
        let left = end.saturating_duration_since(Instant::now());
        let timeout = Timespec::try_from(left).map_err(|_| Errno::INVAL)?;
        match poll(&mut [PollFd::new(&descriptor, PollFlags::IN)], Some(&timeout)) {
            Ok(ready) => return Ok(ready > 0),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_question_that_is_handed_in_again_shares_no_place_with_the_first() -> Result<(), Box<dyn std::error::Error>> {
        let (question, answer) = hand_in(b"asked")?;
        let (mut again, own_answer) = hand_in_again(&question)?;
        // A copy of the screener that is still at work.
        (&question).read_to_end(&mut Vec::new())?;
        (&answer).write_all(b"lost")?;
        let mut read = Vec::new();
        again.read_to_end(&mut read)?;
        assert_eq!((read.as_slice(), (&own_answer).stream_position()?), (&b"asked"[..], 0));
        let mut first = [0; 4];
        own_answer.read_exact_at(&mut first, 0)?;
        assert_eq!(first, [0; 4]);
        Ok(())
    }
}
