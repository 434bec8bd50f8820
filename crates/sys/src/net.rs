//! Brings up the loopback interface of a new network namespace; it configures nothing else.

use crate::{Result, call::syscall};

/// Brings up `lo` in the caller's network namespace.
///
/// # Errors
/// EPERM without CAP_NET_ADMIN over that namespace.
#[inline]
pub fn bring_up_loopback() -> Result<()> {
    /// `struct ifreq` up to its flags.
    #[repr(C)]
    struct InterfaceRequest {
        name: [u8; 16],
        flags: u16,
        rest: [u8; 22],
    }
    const CLOSE: usize = 3;
    const IOCTL: usize = 16;
    const SOCKET: usize = 41;
    const AF_INET: usize = 2;
    const SOCK_DGRAM: usize = 2;
    const SIOCSIFFLAGS: usize = 0x8914;
    const IFF_UP_AND_RUNNING: u16 = 0x41;
    let mut name = [0; 16];
    name[0] = b'l';
    name[1] = b'o';
    let request = InterfaceRequest { name, flags: IFF_UP_AND_RUNNING, rest: [0; 22] };
    // Closed by a raw call: dropping an `OwnedFd` calls libc, which is not allowed between clone
    // and exec.
    // SAFETY: integers only.
    let socket = unsafe { syscall(SOCKET, [AF_INET, SOCK_DGRAM, 0, 0, 0, 0]) }?;
    // SAFETY: the request lives and has the 40 bytes of `struct ifreq`.
    let answer = unsafe { syscall(IOCTL, [socket, SIOCSIFFLAGS, (&raw const request) as usize, 0, 0, 0]) };
    // SAFETY: integers only; the descriptor was made above and nothing else uses it.
    unsafe { syscall(CLOSE, [socket, 0, 0, 0, 0, 0]) }.and(answer).map(drop)
}
