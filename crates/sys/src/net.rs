//! The one thing that a new network namespace needs: its loopback interface up.

use rustix::{
    fd::AsRawFd,
    net::{AddressFamily, SocketFlags, SocketType, socket_with},
};

use crate::{Result, call::syscall};

/// Brings up `lo` in the caller's network namespace.
///
/// # Errors
/// EPERM without CAP_NET_ADMIN over that namespace.
pub fn bring_up_loopback() -> Result<()> {
    /// `struct ifreq` up to its flags.
    #[repr(C)]
    struct InterfaceRequest {
        name: [u8; 16],
        flags: u16,
        rest: [u8; 22],
    }
    const SIOCSIFFLAGS: usize = 0x8914;
    const IFF_UP_AND_RUNNING: u16 = 0x41;
    let mut name = [0; 16];
    name[0] = b'l';
    name[1] = b'o';
    let request = InterfaceRequest { name, flags: IFF_UP_AND_RUNNING, rest: [0; 22] };
    let socket = socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    // SAFETY: the request lives and has the 40 bytes of `struct ifreq`.
    unsafe { syscall(16, [socket.as_raw_fd() as usize, SIOCSIFFLAGS, (&raw const request) as usize, 0, 0, 0]) }.map(drop)
}
