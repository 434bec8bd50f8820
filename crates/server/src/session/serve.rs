//! The main loop of one session.
//!
//! Signals that end programs are blocked throughout, so the session always takes its
//! sandboxes down before it exits. After SIGKILL the kernel does that: every sandbox ends with
//! its launcher, and the session's file systems with their last descriptor. Admission and
//! launch are the engine's.

use std::{io::Write, sync::Arc};

use serde::Serialize;
use stockade_engine::{Options, Refusal, session::Session, signals::Signals};
use stockade_protocol::{
    Report, Verdict,
    session::{Line, WrittenFile},
};

use super::{
    answer::{CancelAnswer, ErrorAnswer, NoFields, OkAnswer, ReadyAnswer, RunAnswer, directory_listing, file_part},
    line::MalformedLine,
    queue::{CANCEL, Command, Event, LineQueue},
    writer::ResponseWriter,
};

/// How a session ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SessionEnd {
    /// By a line, or with its input.
    Closed,
    /// It was refused; its first line has the reason.
    Refused(Verdict),
    /// By this signal.
    Signal(i32),
    /// The reader of its answers has closed its end.
    OutputClosed,
}

/// SIGHUP, as for a run whose caller has ended.
const HANG_UP: i32 = 1;

/// Executes the lines of stdin and writes the answers to stdout. `remark` gets each result, to
/// print warnings for a person.
///
/// # Errors
/// Stdin cannot be read, or stdout not written.
pub fn serve(options: Options, remark: impl Fn(&Report)) -> Result<SessionEnd, std::io::Error> {
    let callers = Arc::clone(&options.ends_with);
    let opened = Signals::block().map_err(Refusal::from).and_then(|signals| Ok((signals, Session::open(options)?)));
    let (mut signals, mut session) = match opened {
        Ok(opened) => opened,
        Err(refusal) => {
            let line = serde_json::to_vec(&ErrorAnswer::new("ready", None, &refusal))?;
            std::io::stdout().write_all(&[line.as_slice(), b"\n"].concat())?;
            return Ok(SessionEnd::Refused(refusal.verdict));
        }
    };
    let mut queue = LineQueue::new(&mut signals, Arc::clone(&callers));
    let mut writer = ResponseWriter::new(callers);
    let mut ended = writer.write(queue.signals(), &OkAnswer::new("ready", None, ReadyAnswer::of(&session)))?;
    loop {
        if let Some(ended) = ended {
            return Ok(ended);
        }
        let command = match queue.next(session.until_preparation(), session.end_of_prepared())? {
            Event::Command(command) => command,
            Event::Idle => {
                session.prepare_next();
                continue;
            }
            Event::PreparedExited => {
                session.clear_prepared();
                continue;
            }
            Event::End => return Ok(SessionEnd::Closed),
            Event::Signal(signal) => return Ok(SessionEnd::Signal(signal)),
            Event::CallerGone => return Ok(SessionEnd::Signal(HANG_UP)),
            Event::OutputClosed => return Ok(SessionEnd::OutputClosed),
        };
        ended = match command {
            Command::MalformedLine(MalformedLine { op, id, error }) => {
                let refusal = Refusal::from(error);
                // It may have been a `run`, so the audit log has it as a refused one.
                if matches!(op, None | Some("run")) {
                    session.refuse(&refusal);
                }
                writer.write(queue.signals(), &ErrorAnswer::new(op, id.as_ref(), &refusal))?
            }
            Command::CancelledBeforeStart(request) => {
                writer.write(queue.signals(), &RunAnswer::new(&session.never_begun(&request, CANCEL)))?
            }
            Command::Cancelled { id, done } => {
                writer.write(queue.signals(), &OkAnswer::new("cancel", id.as_ref(), CancelAnswer { cancelled: done }))?
            }
            Command::Line(Line::Run(request)) => {
                queue.begin(request.id.clone());
                let report = session.run(&request, &mut queue);
                queue.end().into_iter().for_each(|signal| writer.tell(signal));
                remark(&report);
                writer.write(queue.signals(), &RunAnswer::new(&report))?
            }
            Command::Line(Line::Close(only)) => {
                let _ends_anyway = writer.write(queue.signals(), &OkAnswer::new("close", only.id.as_ref(), NoFields {}))?;
                return Ok(SessionEnd::Closed);
            }
            Command::Line(line) => match answer(&mut session, &line)? {
                Some(answer) => writer.write_line(queue.signals(), answer)?,
                None => None,
            },
        };
    }
}

/// The answer to what is neither `run`, `cancel` nor `close`; none: it is.
///
/// # Errors
/// None: an answer always has a JSON form.
pub(crate) fn answer(session: &mut Session, line: &Line) -> Result<Option<Vec<u8>>, serde_json::Error> {
    Ok(Some(match line {
        Line::Write(asked) => {
            let written = session.write(asked).map(|size| WrittenFile { path: asked.path.clone(), size });
            answer_of("write", asked.id.as_ref(), written)
        }
        Line::Read(asked) => answer_of("read", asked.id.as_ref(), session.read(asked).map(|part| file_part(asked, part))),
        Line::List(asked) => answer_of("list", asked.id.as_ref(), session.list(asked).map(|listed| directory_listing(asked, listed))),
        Line::Remove(asked) => answer_of("remove", asked.id.as_ref(), session.remove(asked).map(|()| NoFields {})),
        Line::Reset(asked) => answer_of("reset", asked.id.as_ref(), session.reset(asked).map(|()| NoFields {})),
        Line::Run(_) | Line::Cancel(_) | Line::Close(_) => return Ok(None),
    }?))
}

fn answer_of<A: Serialize>(op: &'static str, id: Option<&String>, result: Result<A, Refusal>) -> Result<Vec<u8>, serde_json::Error> {
    match result {
        Ok(fields) => serde_json::to_vec(&OkAnswer::new(op, id, fields)),
        Err(refusal) => serde_json::to_vec(&ErrorAnswer::new(op, id, &refusal)),
    }
}
