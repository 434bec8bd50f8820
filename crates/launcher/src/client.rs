//! Somebody outside who waits for a run's result, and may cancel the run.
//!
//! What comes from a client is not trusted and changes nothing but whether the run goes on.

use nix::sys::signal::Signal;
use rustix::{
    fd::BorrowedFd,
    net::{RecvFlags, recv},
};
use stockade_protocol::OutputStream;

/// What a look at a client's requests has shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Asked {
    /// Nothing that concerns the run.
    Nothing,
    /// Nor will it: there is nothing more to watch for.
    NothingMore,
    /// To cancel the run, as this signal would.
    Cancel(i32),
}

/// The client of a run: what it asks for while the run goes on, and what it hears of it.
pub trait Client {
    /// What becomes readable when the client asks for something.
    fn requests(&self) -> Option<BorrowedFd<'_>>;
    /// Another descriptor, which hangs up when no process waits for the result any more.
    fn results(&self) -> Option<BorrowedFd<'_>>;
    /// Reads what there is to read, without waiting.
    fn look(&mut self) -> Asked;
    /// This signal has come for the launcher and was taken for the run, which may have been
    /// ending for another cause, or have failed. The run ends by itself.
    fn signalled(&mut self, signal: i32);
    /// The program may run from now on; `pid` is the launcher's number for the sandbox's pid 1.
    fn begins(&mut self, _pid: i32) {}
    /// The program has printed this, which the result has as well. Must not wait.
    fn printed(&mut self, _: OutputStream, _: &[u8]) {}
    /// Whether [`Client::look`] is to be called as soon as [`Client::requests`] can be written to.
    fn wants_room(&self) -> bool {
        false
    }
}

/// A client at the other end of a stream socket, who cancels by closing it.
#[derive(Clone, Copy, Debug)]
pub struct SocketClient<'a> {
    /// The connection.
    pub socket: BorrowedFd<'a>,
    /// Nothing is to come from it any more but, as one byte, the signal to cancel the run
    /// with. Otherwise it has closed its half already, and whatever comes is left unread.
    pub may_cancel: bool,
}

impl Client for SocketClient<'_> {
    fn requests(&self) -> Option<BorrowedFd<'_>> {
        self.may_cancel.then_some(self.socket)
    }

    fn results(&self) -> Option<BorrowedFd<'_>> {
        (!self.may_cancel).then_some(self.socket)
    }

    fn look(&mut self) -> Asked {
        let mut asked = [0];
        Asked::Cancel(match (recv(self.socket, &mut asked, RecvFlags::DONTWAIT), asked) {
            (Ok((1, _)), [signal @ 1..=31]) => i32::from(signal),
            // It is gone, which is what SIGHUP has always meant.
            _ => Signal::SIGHUP as i32,
        })
    }

    /// One run is all that there is.
    fn signalled(&mut self, _: i32) {}
}
