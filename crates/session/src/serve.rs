//! One session, from its first line to its last.
//!
//! Signals that end programs are held back throughout, so that a session is never left
//! before what it has begun is ended and taken down. SIGKILL needs no help: the kernel ends
//! every sandbox with its launcher, and what the session keeps with its last descriptor.

use std::io::Write;

use rustix::event::Timespec;
use serde::Serialize;
use stockade_launcher::signals::Signals;
use stockade_protocol::{Report, Verdict, session::Line};
use stockade_runtime::{Options, Refusal, session::Session};

use crate::{
    answer::{Cancelled, Done, Failed, Found, Listing, Nothing, Ran, Ready, Written},
    queue::{CANCEL, Next, Queue, Turn},
    voice::Voice,
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
            // Signals end it at once again: nothing is begun.
            let line = serde_json::to_vec(&Failed::new("ready", None, &refusal))?;
            std::io::stdout().write_all(&[line.as_slice(), b"\n"].concat())?;
            return Ok(Ended::Refused(refusal.verdict));
        }
    };
    let mut queue = Queue::new(&mut signals);
    let voice = Voice::new();
    let mut ended = voice.say(queue.signals(), &Done::new("ready", None, Ready::of(&session)))?;
    loop {
        if let Some(ended) = ended {
            return Ok(ended);
        }
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
        ended = match turn {
            Turn::Malformed(wrong) => {
                // It may have been meant for a run, and is written down as one that was refused.
                if matches!(wrong.op, None | Some("run")) {
                    session.refuse(&Refusal::bad_request(wrong.reason, wrong.error.clone()));
                }
                voice.say(queue.signals(), &Failed::from(&wrong))?
            }
            Turn::NeverBegun(request) => voice.say(queue.signals(), &Ran::new(&session.never_begun(&request, CANCEL)))?,
            Turn::Cancelled { id, done } => voice.say(queue.signals(), &Done::new("cancel", id.as_ref(), Cancelled { cancelled: done }))?,
            Turn::Asked(Line::Run(request)) => {
                queue.begin(request.id.clone());
                let report = session.run(&request, &mut queue);
                let told_to_end = queue.end();
                remark(&report);
                let ended = voice.say(queue.signals(), &Ran::new(&report))?;
                if let Some(signal) = told_to_end {
                    return Ok(Ended::Signal(signal));
                }
                ended
            }
            Turn::Asked(Line::Close(only)) => {
                let _it_ends_anyhow = voice.say(queue.signals(), &Done::new("close", only.id.as_ref(), Nothing {}))?;
                return Ok(Ended::Closed);
            }
            Turn::Asked(line) => answer(&mut session, &line, &voice, queue.signals())?,
        };
    }
}

/// Answers what is neither run nor cancelled. What the session ends by, if it cannot go on.
fn answer(session: &mut Session, line: &Line, voice: &Voice, signals: &mut Signals) -> Result<Option<Ended>, std::io::Error> {
    match line {
        Line::Write(asked) => {
            let written = session.write(asked).map(|size| Written { path: &asked.path, size });
            tell(voice, signals, "write", asked.id.as_ref(), written)
        }
        Line::Read(asked) => {
            let part = session.read(asked).map(|part| Found::new(asked, part));
            tell(voice, signals, "read", asked.id.as_ref(), part)
        }
        Line::List(asked) => {
            let listed = session.list(asked).map(|listed| Listing::new(asked, listed));
            tell(voice, signals, "list", asked.id.as_ref(), listed)
        }
        Line::Reset(asked) => tell(voice, signals, "reset", asked.id.as_ref(), session.reset(asked).map(|()| Nothing {})),
        Line::Run(_) | Line::Cancel(_) | Line::Close(_) => Ok(None),
    }
}

fn tell<A: Serialize>(
    voice: &Voice,
    signals: &mut Signals,
    op: &'static str,
    id: Option<&String>,
    came: Result<A, Refusal>,
) -> Result<Option<Ended>, std::io::Error> {
    match came {
        Ok(word) => voice.say(signals, &Done::new(op, id, word)),
        Err(refusal) => voice.say(signals, &Failed::new(op, id, &refusal)),
    }
}
