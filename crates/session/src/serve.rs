//! One session, from its first line to its last.
//!
//! Signals that end programs are held back throughout, so that a session is never left
//! before what it has begun is ended and taken down. SIGKILL needs no help: the kernel ends
//! every sandbox with its launcher, and what the session keeps with its last descriptor.

use rustix::{event::Timespec, io::Errno, stdio::stdout};
use serde::Serialize;
use stockade_launcher::signals::Signals;
use stockade_protocol::{Report, Verdict, session::Line};
use stockade_runtime::{Options, Refusal, session::Session};

use crate::{
    answer::{Cancelled, Done, Failed, Found, Listing, Nothing, Ran, Ready, Written},
    queue::{CANCEL, Next, Queue, Turn},
};

/// After how long without a line the next request's sandbox is set up: who sends lines one
/// upon the other has it made while its line is read.
const PAUSE: Timespec = Timespec { tv_sec: 0, tv_nsec: 2_000_000 };

/// How a session ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// By a line, or with its input.
    Closed,
    /// It never began, which its first line says.
    Refused(Verdict),
    /// By this signal.
    Signal(i32),
    /// Nobody reads its answers.
    Unheard,
}

/// Serves the lines on stdin, and answers on stdout. `remark` is told what a person should
/// know of each result.
///
/// # Errors
/// Stdin cannot be read, or stdout not written.
pub fn serve(options: Options, remark: impl Fn(&Report)) -> Result<Ended, std::io::Error> {
    let opened = Signals::block().map_err(Refusal::from).and_then(|signals| Ok((signals, Session::open(options)?)));
    let (mut signals, mut session) = match opened {
        Ok(opened) => opened,
        Err(refusal) => {
            let _unheard = say(&Failed::new("ready", None, &refusal))?;
            return Ok(Ended::Refused(refusal.verdict));
        }
    };
    let mut queue = Queue::new(&mut signals);
    let mut heard = say(&Done::new("ready", None, Ready::of(&session)))?;
    while heard {
        let turn = match queue.next(session.can_prepare().then_some(PAUSE), session.end_of_prepared())? {
            Next::Turn(turn) => turn,
            Next::Nothing => {
                session.prepare();
                continue;
            }
            Next::Unprepared => {
                session.clear_prepared();
                continue;
            }
            Next::End => return Ok(Ended::Closed),
            Next::Signal(signal) => return Ok(Ended::Signal(signal)),
            Next::Unheard => return Ok(Ended::Unheard),
        };
        heard = match turn {
            Turn::Malformed(wrong) => {
                // It may have been meant for a run, and is written down as one that was refused.
                if matches!(wrong.op, None | Some("run")) {
                    session.refuse(&Refusal::bad_request(wrong.reason, wrong.error.clone()));
                }
                say(&Failed::from(&wrong))?
            }
            Turn::NeverBegun(request) => say(&Ran::new(&session.never_begun(&request, CANCEL)))?,
            Turn::Cancelled { id, done } => say(&Done::new("cancel", id.as_ref(), Cancelled { cancelled: done }))?,
            Turn::Asked(Line::Run(request)) => {
                queue.begin(request.id.clone());
                let report = session.run(&request, &mut queue);
                let told_to_end = queue.end();
                remark(&report);
                let heard = say(&Ran::new(&report))?;
                if let Some(signal) = told_to_end {
                    return Ok(Ended::Signal(signal));
                }
                heard
            }
            Turn::Asked(Line::Close(only)) => {
                let _unheard = say(&Done::new("close", only.id.as_ref(), Nothing {}))?;
                return Ok(Ended::Closed);
            }
            Turn::Asked(line) => answer(&mut session, &line)?,
        };
    }
    Ok(Ended::Unheard)
}

/// Answers what is neither run nor cancelled.
fn answer(session: &mut Session, line: &Line) -> Result<bool, std::io::Error> {
    match line {
        Line::Write(asked) => tell("write", asked.id.as_ref(), session.write(asked), |size| Written { path: &asked.path, size }),
        Line::Read(asked) => {
            let part = session.read(asked);
            tell("read", asked.id.as_ref(), part, |part| Found::new(asked, part))
        }
        Line::List(asked) => {
            let listed = session.list(asked);
            tell("list", asked.id.as_ref(), listed, |listed| Listing::new(asked, listed))
        }
        Line::Reset(asked) => tell("reset", asked.id.as_ref(), session.reset(asked), |()| Nothing {}),
        Line::Run(_) | Line::Cancel(_) | Line::Close(_) => Ok(true),
    }
}

fn tell<T, A: Serialize>(
    op: &'static str,
    id: Option<&String>,
    came: Result<T, Refusal>,
    word: impl FnOnce(T) -> A,
) -> Result<bool, std::io::Error> {
    match came {
        Ok(came) => say(&Done::new(op, id, word(came))),
        Err(refusal) => say(&Failed::new(op, id, &refusal)),
    }
}

/// Writes one line; false where nobody reads it.
fn say(answer: &impl Serialize) -> Result<bool, std::io::Error> {
    let mut line = serde_json::to_vec(answer)?;
    line.push(b'\n');
    let mut rest = line.as_slice();
    while !rest.is_empty() {
        match rustix::io::write(stdout(), rest) {
            Ok(length) => rest = rest.get(length..).unwrap_or_default(),
            Err(Errno::INTR) => {}
            Err(Errno::PIPE | Errno::CONNRESET) => return Ok(false),
            Err(Errno::AGAIN) => {
                let out = stdout();
                rustix::event::poll(&mut [rustix::event::PollFd::new(&out, rustix::event::PollFlags::OUT)], None)?;
            }
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(true)
}
