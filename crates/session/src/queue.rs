//! Lines as they come in, also while a request runs.
//!
//! A line to cancel acts when it is read, on a request that was sent before it and has not
//! ended, and is answered in its turn. How much is read ahead is bounded; a line that is too
//! long is read to its end and forgotten.

use std::collections::VecDeque;

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fd::BorrowedFd,
    io::Errno,
};
use stockade_launcher::{Asked, Client, signals::Signals};
use stockade_protocol::{
    Request,
    session::{Cancel, Line},
};
use stockade_runtime::LARGEST_REQUEST;

use crate::line::{Malformed, parse};

/// Bytes of one read.
const PIECE: usize = 1 << 16;
/// SIGINT, which ends a request and not the session.
pub(crate) const CANCEL: i32 = 2;

/// Whether a signal ends a session that runs nothing: SIGHUP, SIGINT, SIGQUIT and SIGTERM do.
/// What else is held back means nothing to it.
pub(crate) fn ending(signal: i32) -> bool {
    matches!(signal, 1..=3 | 15)
}

/// A line in its turn.
#[derive(Debug)]
pub(crate) enum Turn {
    Asked(Line),
    /// A request that was cancelled before its turn came.
    NeverBegun(Box<Request>),
    Malformed(Malformed),
    /// A line to cancel, and whether it has.
    Cancelled {
        id: Option<String>,
        done: bool,
    },
}

/// What ends the waiting for a line.
#[derive(Debug)]
pub(crate) enum Next {
    Turn(Turn),
    /// None has come for a while.
    Nothing,
    /// What was prepared for the next has ended.
    Unprepared,
    /// There are no more lines.
    End,
    /// A signal that ends the session.
    Signal(i32),
    /// Nobody reads the answers.
    Unheard,
}

/// See the module.
pub(crate) struct Queue<'s> {
    signals: &'s mut Signals,
    partial: Vec<u8>,
    too_long: bool,
    ready: VecDeque<(Turn, usize)>,
    /// Bytes of lines in `ready`.
    waiting: usize,
    ended: bool,
    running: Option<Option<String>>,
    cancel: bool,
    /// The first signal to end the session that came while a request ran.
    told_to_end: Option<i32>,
    piece: Vec<u8>,
}

impl<'s> Queue<'s> {
    pub(crate) fn new(signals: &'s mut Signals) -> Self {
        let piece = vec![0; PIECE];
        Queue {
            signals,
            partial: Vec::new(),
            too_long: false,
            ready: VecDeque::new(),
            waiting: 0,
            ended: false,
            running: None,
            cancel: false,
            told_to_end: None,
            piece,
        }
    }

    /// Waits for the next line, no longer than this, and no longer than nothing can be read
    /// from what tells the end of what was prepared for it.
    ///
    /// # Errors
    /// Stdin cannot be read.
    pub(crate) fn next(&mut self, patience: Option<Timespec>, end_of_prepared: Option<BorrowedFd<'_>>) -> Result<Next, Errno> {
        loop {
            if let Some((turn, length)) = self.ready.pop_front() {
                self.waiting -= length;
                return Ok(Next::Turn(turn));
            }
            if self.ended {
                return Ok(Next::End);
            }
            let (stdin, stdout) = (rustix::stdio::stdin(), rustix::stdio::stdout());
            // Nothing is asked of what stands in the place of none.
            let (prepared, asked) = end_of_prepared.map_or((stdout, PollFlags::empty()), |end| (end, PollFlags::IN));
            let mut fds = [
                PollFd::new(&stdin, PollFlags::IN),
                PollFd::new(&*self.signals, PollFlags::IN),
                PollFd::new(&stdout, PollFlags::empty()),
                PollFd::new(&prepared, asked),
            ];
            match poll(&mut fds, patience.as_ref()) {
                Ok(0) => return Ok(Next::Nothing),
                Ok(_) | Err(Errno::INTR) => {}
                Err(errno) => return Err(errno),
            }
            let [input, signals, output, prepared] = fds.map(|fd| fd.revents());
            if !signals.is_empty() {
                match self.signals.take().filter(|signal| ending(*signal)) {
                    Some(signal) => return Ok(Next::Signal(signal)),
                    None => continue,
                }
            }
            if output.intersects(PollFlags::ERR | PollFlags::HUP) {
                return Ok(Next::Unheard);
            }
            if !input.is_empty() {
                self.take_in()?;
            } else if prepared.contains(PollFlags::IN) {
                return Ok(Next::Unprepared);
            }
        }
    }

    /// What the session is told beside its lines.
    pub(crate) fn signals(&mut self) -> &mut Signals {
        self.signals
    }

    /// A request begins, of this id.
    pub(crate) fn begin(&mut self, id: Option<String>) {
        self.running = Some(id);
        self.cancel = false;
    }

    /// It has ended. A signal by which the session is to end too, whatever the request itself
    /// has ended by.
    pub(crate) fn end(&mut self) -> Option<i32> {
        self.running = None;
        self.told_to_end
    }

    /// Reads once; does not wait if there is something, or the end, to read.
    fn take_in(&mut self) -> Result<(), Errno> {
        let length = match rustix::io::read(rustix::stdio::stdin(), &mut self.piece) {
            Ok(length) => length,
            Err(Errno::AGAIN | Errno::INTR) => return Ok(()),
            Err(errno) => return Err(errno),
        };
        if length == 0 {
            self.ended = true;
            // A last line without its end is one.
            if !self.partial.is_empty() || self.too_long {
                self.complete();
            }
            return Ok(());
        }
        let piece = std::mem::take(&mut self.piece);
        let mut rest = piece.get(..length).unwrap_or_default();
        while let Some(end) = rest.iter().position(|byte| *byte == b'\n') {
            self.add(rest.get(..end).unwrap_or_default());
            self.complete();
            rest = rest.get(end + 1..).unwrap_or_default();
        }
        self.add(rest);
        self.piece = piece;
        Ok(())
    }

    fn add(&mut self, bytes: &[u8]) {
        if self.too_long || self.partial.len() + bytes.len() > LARGEST_REQUEST {
            self.too_long = true;
            self.partial = Vec::new();
        } else {
            self.partial.extend_from_slice(bytes);
        }
    }

    fn complete(&mut self) {
        let line = std::mem::take(&mut self.partial);
        let turn = if std::mem::take(&mut self.too_long) {
            let error = String::from("the line is longer than 64 MiB; write large files in parts (`append`), or into a host scratch");
            Turn::Malformed(Malformed { op: None, id: None, reason: "line_too_long", error })
        } else {
            match parse(&line) {
                Ok(Line::Cancel(Cancel { run, id })) => Turn::Cancelled { id, done: self.cancel(run.as_ref()) },
                Ok(line) => Turn::Asked(line),
                Err(malformed) => Turn::Malformed(malformed),
            }
        };
        self.waiting += line.len();
        self.ready.push_back((turn, line.len()));
    }

    /// Cancels the first request that has not ended, or the first of this `id`.
    fn cancel(&mut self, run: Option<&String>) -> bool {
        let meant = |id: &Option<String>| run.is_none() || id.as_ref() == run;
        if !self.cancel && self.running.as_ref().is_some_and(meant) {
            self.cancel = true;
            return true;
        }
        for (turn, _) in &mut self.ready {
            if let Turn::Asked(Line::Run(request)) = turn
                && meant(&request.id)
            {
                *turn = Turn::NeverBegun(std::mem::take(request));
                return true;
            }
        }
        false
    }
}

/// While a request runs.
impl Client for Queue<'_> {
    fn requests(&self) -> Option<BorrowedFd<'_>> {
        (!self.ended).then(rustix::stdio::stdin)
    }

    fn results(&self) -> Option<BorrowedFd<'_>> {
        Some(rustix::stdio::stdout())
    }

    fn look(&mut self) -> Asked {
        // What stops the session's reading is found again, and said, when the request has ended.
        let read = self.take_in();
        match () {
            () if self.cancel => Asked::Cancel(CANCEL),
            () if read.is_err() || self.ended || self.waiting + self.partial.len() > LARGEST_REQUEST => Asked::NothingMore,
            () => Asked::Nothing,
        }
    }

    fn signalled(&mut self, signal: i32) {
        if signal != CANCEL {
            self.told_to_end.get_or_insert(signal);
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]
    use super::*;

    #[test]
    fn a_line_to_cancel_means_the_first_request_that_has_not_ended_or_the_one_it_names() {
        let mut signals = Signals::block().unwrap();
        let mut queue = Queue::new(&mut signals);
        let told = |queue: &mut Queue<'_>, line: &str| {
            queue.add(line.as_bytes());
            queue.complete();
        };
        for line in [
            r#"{"op":"cancel","id":"nothing"}"#,
            r#"{"op":"run","code":"1","id":"a"}"#,
            r#"{"op":"run","code":"1","id":"b"}"#,
            r#"{"op":"cancel","run":"b"}"#,
            r#"{"op":"cancel","run":"c"}"#,
        ] {
            told(&mut queue, line);
        }
        queue.begin(Some(String::from("running")));
        told(&mut queue, r#"{"op":"cancel"}"#);
        assert!(queue.cancel);
        told(&mut queue, r#"{"op":"cancel"}"#);
        told(&mut queue, r#"{"op":"cancel"}"#);
        let found: Vec<String> = queue
            .ready
            .iter()
            .map(|(turn, _)| match turn {
                Turn::Cancelled { done, .. } => done.to_string(),
                Turn::NeverBegun(request) => format!("never {}", request.id.as_deref().unwrap_or_default()),
                other => format!("{other:?}"),
            })
            .collect();
        assert_eq!(found, ["false", "never a", "never b", "true", "false", "true", "true", "false"]);
    }
}
