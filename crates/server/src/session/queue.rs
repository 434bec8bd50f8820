//! Reads lines from stdin, also while a request runs.
//!
//! A `cancel` line acts when it is read, on a request that was sent before it and has not
//! ended; its answer keeps the order of the lines. Read-ahead is bounded. A line that is too
//! long is read to its end and dropped. No line is executed here.

use std::{collections::VecDeque, sync::Arc, time::Duration};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fd::{BorrowedFd, OwnedFd},
    io::Errno,
};
use stockade_engine::{Asked, Client, MAX_REQUEST, answer::ending, signals::Signals};
use stockade_protocol::{
    Request,
    session::{Cancel, Line},
};

use super::line::{LineError, MalformedLine, parse};

/// Bytes of one read.
const PIECE: usize = 1 << 16;
/// SIGINT, which ends a request and not the session.
pub(crate) const CANCEL: i32 = 2;

/// A line that was read.
#[derive(Debug)]
pub(crate) enum Command {
    Line(Line),
    /// A request that was cancelled while it waited.
    CancelledBeforeStart(Box<Request>),
    MalformedLine(MalformedLine),
    /// A `cancel` line, and whether it cancelled something.
    Cancelled {
        id: Option<String>,
        done: bool,
    },
}

/// What the session reacts to next.
#[derive(Debug)]
pub(crate) enum Event {
    Command(Command),
    /// No line has come for the given time.
    Idle,
    /// The prepared sandbox has exited.
    PreparedExited,
    /// The input has ended.
    End,
    /// A signal that ends the session.
    Signal(i32),
    /// The reader of the answers has closed its end.
    OutputClosed,
    /// A process that the session ends with has ended.
    CallerGone,
}

/// The lines that were read and not yet executed.
pub(crate) struct LineQueue<'s> {
    signals: &'s mut Signals,
    /// Pidfds: the session ends when the first of their processes does.
    callers: Arc<[OwnedFd]>,
    partial: Vec<u8>,
    too_long: bool,
    ready: VecDeque<(Command, usize)>,
    /// Bytes of lines in `ready`.
    waiting: usize,
    ended: bool,
    running: Option<Option<String>>,
    cancel: bool,
    /// The first signal that came during a request and ends the session.
    told_to_end: Option<i32>,
    piece: Vec<u8>,
}

impl<'s> LineQueue<'s> {
    pub(crate) fn new(signals: &'s mut Signals, callers: Arc<[OwnedFd]>) -> Self {
        let piece = vec![0; PIECE];
        LineQueue {
            signals,
            callers,
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

    /// Waits for the next line, at most for `timeout`, and until `end_of_prepared` is readable.
    ///
    /// # Errors
    /// Stdin cannot be read.
    pub(crate) fn next(&mut self, timeout: Option<Duration>, end_of_prepared: Option<BorrowedFd<'_>>) -> Result<Event, Errno> {
        loop {
            // Also before a line that was read already: no process waits for its answer.
            if self.is_caller_gone()? {
                return Ok(Event::CallerGone);
            }
            if let Some((command, length)) = self.ready.pop_front() {
                self.waiting -= length;
                return Ok(Event::Command(command));
            }
            if self.ended {
                return Ok(Event::End);
            }
            let (stdin, stdout) = (rustix::stdio::stdin(), rustix::stdio::stdout());
            // Without a prepared sandbox stdout fills its place, and no event of it is requested.
            let (prepared, asked) = end_of_prepared.map_or((stdout, PollFlags::empty()), |end| (end, PollFlags::IN));
            let mut fds = vec![
                PollFd::new(&stdin, PollFlags::IN),
                PollFd::new(&*self.signals, PollFlags::IN),
                PollFd::new(&stdout, PollFlags::empty()),
                PollFd::new(&prepared, asked),
            ];
            fds.extend(self.callers.iter().map(|caller| PollFd::new(caller, PollFlags::IN)));
            match poll(&mut fds, timeout.map(timespec).as_ref()) {
                Ok(0) => return Ok(Event::Idle),
                Ok(_) | Err(Errno::INTR) => {}
                Err(errno) => return Err(errno),
            }
            let [input, signals, output, prepared] = [0, 1, 2, 3].map(|at: usize| fds.get(at).map_or(PollFlags::empty(), PollFd::revents));
            drop(fds);
            if !signals.is_empty() {
                match self.signals.take().filter(|signal| ending(*signal)) {
                    Some(signal) => return Ok(Event::Signal(signal)),
                    None => continue,
                }
            }
            if output.intersects(PollFlags::ERR | PollFlags::HUP) {
                return Ok(Event::OutputClosed);
            }
            if !input.is_empty() {
                self.take_in()?;
            } else if prepared.contains(PollFlags::IN) {
                return Ok(Event::PreparedExited);
            }
        }
    }

    fn is_caller_gone(&self) -> Result<bool, Errno> {
        let mut fds: Vec<PollFd<'_>> = self.callers.iter().map(|caller| PollFd::new(caller, PollFlags::IN)).collect();
        match poll(&mut fds, Some(&Timespec::default())) {
            Ok(ready) => Ok(ready > 0),
            Err(Errno::INTR) => Ok(false),
            Err(errno) => Err(errno),
        }
    }

    /// The session's signals.
    pub(crate) fn signals(&mut self) -> &mut Signals {
        self.signals
    }

    /// A request with this id starts.
    pub(crate) fn begin(&mut self, id: Option<String>) {
        self.running = Some(id);
        self.cancel = false;
    }

    /// The request has ended. Returns the signal that ends the session too, if one came.
    pub(crate) fn end(&mut self) -> Option<i32> {
        self.running = None;
        self.told_to_end
    }

    /// Reads once. Does not block where `poll` has reported data or the end.
    fn take_in(&mut self) -> Result<(), Errno> {
        let length = match rustix::io::read(rustix::stdio::stdin(), &mut self.piece) {
            Ok(length) => length,
            Err(Errno::AGAIN | Errno::INTR) => return Ok(()),
            Err(errno) => return Err(errno),
        };
        if length == 0 {
            self.ended = true;
            // A last line may lack its newline.
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
        if self.too_long || self.partial.len() + bytes.len() > MAX_REQUEST {
            self.too_long = true;
            self.partial = Vec::new();
        } else {
            self.partial.extend_from_slice(bytes);
        }
    }

    fn complete(&mut self) {
        let line = std::mem::take(&mut self.partial);
        let command = if std::mem::take(&mut self.too_long) {
            Command::MalformedLine(LineError::TooLong.into())
        } else {
            match parse(&line) {
                Ok(Line::Cancel(Cancel { run, id })) => Command::Cancelled { id, done: self.cancel(run.as_ref()) },
                Ok(line) => Command::Line(line),
                Err(malformed) => Command::MalformedLine(malformed),
            }
        };
        self.waiting += line.len();
        self.ready.push_back((command, line.len()));
    }

    /// Cancels the first request that has not ended, or the first of this `id`.
    fn cancel(&mut self, run: Option<&String>) -> bool {
        let meant = |id: &Option<String>| run.is_none() || id.as_ref() == run;
        if !self.cancel && self.running.as_ref().is_some_and(meant) {
            self.cancel = true;
            return true;
        }
        for (command, _) in &mut self.ready {
            if let Command::Line(Line::Run(request)) = command
                && meant(&request.id)
            {
                *command = Command::CancelledBeforeStart(std::mem::take(request));
                return true;
            }
        }
        false
    }
}

/// While a request runs.
impl Client for LineQueue<'_> {
    fn requests(&self) -> Option<BorrowedFd<'_>> {
        (!self.ended).then(rustix::stdio::stdin)
    }

    fn results(&self) -> Option<BorrowedFd<'_>> {
        Some(rustix::stdio::stdout())
    }

    fn look(&mut self) -> Asked {
        // A read error occurs again after the request, and is reported then.
        let read = self.take_in();
        match () {
            () if self.cancel => Asked::Cancel(CANCEL),
            () if read.is_err() || self.ended || self.waiting + self.partial.len() > MAX_REQUEST => Asked::NothingMore,
            () => Asked::Nothing,
        }
    }

    fn signalled(&mut self, signal: i32) {
        if signal != CANCEL {
            self.told_to_end.get_or_insert(signal);
        }
    }
}

fn timespec(time: Duration) -> Timespec {
    Timespec { tv_sec: time.as_secs().cast_signed(), tv_nsec: i64::from(time.subsec_nanos()) }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]
    use super::*;

    #[test]
    fn a_line_to_cancel_means_the_first_request_that_has_not_ended_or_the_one_it_names() {
        let mut signals = Signals::block().unwrap();
        let mut queue = LineQueue::new(&mut signals, Arc::default());
        let told = |queue: &mut LineQueue<'_>, line: &str| {
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
            .map(|(command, _)| match command {
                Command::Cancelled { done, .. } => done.to_string(),
                Command::CancelledBeforeStart(request) => format!("never {}", request.id.as_deref().unwrap_or_default()),
                other => format!("{other:?}"),
            })
            .collect();
        assert_eq!(found, ["false", "never a", "never b", "true", "false", "true", "true", "false"]);
    }
}
