//! What the kernel tells of the TCP, UDP and UNIX sockets of a network namespace: a dump by
//! NETLINK_SOCK_DIAG (sock_diag(7)).
//!
//! The socket belongs to the namespace in which the child made it, and never reaches the payload.
//! Only the kernel can answer: to send to a netlink socket of another process takes
//! CAP_NET_ADMIN over the namespace. A dump is no snapshot: what is opened or closed meanwhile may
//! be missing or come twice. TCP sockets that are closed, and UDP sockets without a port, are in
//! none (`supervise/closed_sockets.rs`), nor are UNIX sockets that are closed or not accepted. What
//! is held too much is not decided here.

use rustix::{
    fd::OwnedFd,
    io::{Errno, retry_on_intr},
    net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, netlink, recv, send, socket_with},
};
use stockade_egress::netlink::{Attributes, Messages, REQUEST, Received};

const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
const NLM_F_DUMP: u16 = 0x300;
const SOCK_DIAG_BY_FAMILY: u16 = 20;
const INET_DIAG_SKMEMINFO: u16 = 7;
const INET_DIAG_SOCKOPT: u16 = 22;
/// The bit of IP_TRANSPARENT in the first byte of `struct inet_diag_sockopt` (Linux 5.10).
const TRANSPARENT: u8 = 1 << 5;
/// Sockets in every state but TCP_SYN_RECV, TCP_TIME_WAIT and TCP_NEW_SYN_RECV, which hold no data.
const STATES: u32 = !(1 << 3 | 1 << 6 | 1 << 12);
/// Parts of `struct unix_diag_req` and an attribute of its answers.
const UDIAG_SHOW_MEMINFO: u32 = 1 << 5;
const UNIX_DIAG_MEMINFO: u16 = 5;
/// The kernel makes no larger piece of a dump.
const PIECE: usize = 32 << 10;

/// A protocol of one address family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Protocol {
    /// AF_INET, AF_INET6 or AF_UNIX.
    family: u8,
    /// IPPROTO_TCP or IPPROTO_UDP; of UNIX sockets none.
    number: u8,
}

/// How a family's message of a dump is laid out.
struct Layout {
    /// The length of `struct inet_diag_msg` or `struct unix_diag_msg`, and where its inode stands.
    message: usize,
    inode: usize,
    /// The attributes of the numbers SK_MEMINFO_* and of the bits of options, if it has such.
    memory: u16,
    options: Option<u16>,
    /// Where `idiag_rqueue` and `idiag_wqueue` stand, if it has such.
    queues: Option<usize>,
}

impl Layout {
    /// By the first byte, which is the family's number.
    fn of(body: &[u8]) -> Option<Self> {
        Some(match *body.first()? {
            1 => Layout { message: 16, inode: 4, memory: UNIX_DIAG_MEMINFO, options: None, queues: None },
            _ => Layout { message: 72, inode: 68, memory: INET_DIAG_SKMEMINFO, options: Some(INET_DIAG_SOCKOPT), queues: Some(56) },
        })
    }
}

impl Protocol {
    pub(crate) const TCP: Protocol = Protocol { family: 2, number: 6 };
    pub(crate) const TCP6: Protocol = Protocol { family: 10, number: 6 };
    pub(crate) const UDP: Protocol = Protocol { family: 2, number: 17 };
    pub(crate) const UDP6: Protocol = Protocol { family: 10, number: 17 };
    pub(crate) const UNIX: Protocol = Protocol { family: 1, number: 0 };
}

/// What a socket holds, in bytes, with what the kernel needs to keep them (`truesize`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SocketMemory {
    /// Waiting to be read, and in the error queue.
    pub(crate) received: u64,
    /// Of UDP: on the way, or a piece of a datagram that is not sent yet. Of UNIX sockets: not read yet.
    pub(crate) sent: u64,
    /// Of TCP: not acknowledged yet.
    pub(crate) unacknowledged: u64,
    /// Of TCP: the bytes of its data alone, in what is received and in what is not acknowledged.
    pub(crate) data_received: u64,
    pub(crate) data_unacknowledged: u64,
    /// Reserved for more.
    pub(crate) reserved: u64,
    /// 0: no descriptor leads to it, because no accept(2) has taken it, or it is closed.
    pub(crate) inode: u64,
    /// It may have addresses of others (IP_TRANSPARENT), as code can make none.
    pub(crate) is_transparent: bool,
}

/// A socket that dumps the others.
pub(crate) struct SockDiag(OwnedFd);

impl SockDiag {
    /// Makes the socket in this network namespace: a single system call. None: there is no such
    /// family or protocol, or an outer filter hides it.
    ///
    /// # Errors
    /// Else what socket(2) answers.
    pub(crate) fn open() -> Result<Option<OwnedFd>, Errno> {
        match socket_with(AddressFamily::NETLINK, SocketType::DGRAM, SocketFlags::CLOEXEC, Some(netlink::SOCK_DIAG)) {
            Err(Errno::AFNOSUPPORT | Errno::PROTONOSUPPORT) => Ok(None),
            made => made.map(Some),
        }
    }

    pub(crate) fn new(socket: OwnedFd) -> Self {
        SockDiag(socket)
    }

    /// Shows each socket of a protocol.
    ///
    /// # Errors
    /// ENOENT: this kernel has no such dump (`inet_diag`, `tcp_diag`, `udp_diag`, `unix_diag`). Else what the
    /// kernel answers; what was shown is not all then.
    pub(crate) fn each(&self, protocol: Protocol, show: &mut dyn FnMut(SocketMemory)) -> Result<(), Errno> {
        let request = request(protocol);
        send(&self.0, request.bytes(), SendFlags::NOSIGNAL)?;
        let mut piece = vec![0; PIECE];
        loop {
            // The kernel has made a piece before send and recv return: there is nothing to wait for.
            let (_, length) = retry_on_intr(|| recv(&self.0, &mut piece[..], RecvFlags::DONTWAIT))?;
            if let Some(end) = show_piece(piece.get(..length).unwrap_or_default(), show) {
                return end;
            }
        }
    }
}

/// Tries whether this kernel dumps TCP and UDP sockets.
///
/// # Errors
/// What it answers; EPROTONOSUPPORT where no such socket can be made.
pub fn probe() -> Result<(), Errno> {
    let diag = SockDiag::new(SockDiag::open()?.ok_or(Errno::PROTONOSUPPORT)?);
    [Protocol::TCP, Protocol::UDP].into_iter().try_for_each(|protocol| diag.each(protocol, &mut |_| {}))
}

/// A dump's request: `struct inet_diag_req_v2` for all addresses, or `struct unix_diag_req`.
fn request(Protocol { family, number }: Protocol) -> Messages {
    const EXTENSIONS: u8 = 1 << (INET_DIAG_SKMEMINFO - 1);
    let mut request = Messages::default();
    request.message(SOCK_DIAG_BY_FAMILY, REQUEST | NLM_F_DUMP, |body| {
        if family == Protocol::UNIX.family {
            let show = UDIAG_SHOW_MEMINFO.to_ne_bytes();
            body.raw(&[family, number, 0, 0]).raw(&u32::MAX.to_ne_bytes()).raw(&[0; 4]).raw(&show).raw(&[0; 8]);
        } else {
            body.raw(&[family, number, EXTENSIONS, 0]).raw(&STATES.to_ne_bytes()).raw(&[0; 48]);
        }
    });
    request
}

/// Shows the sockets of one piece of a dump, and how the dump has ended, if it has.
fn show_piece(piece: &[u8], show: &mut dyn FnMut(SocketMemory)) -> Option<Result<(), Errno>> {
    for (kind, _, body) in Received::new(piece) {
        match kind {
            SOCK_DIAG_BY_FAMILY => SocketMemory::of(body).into_iter().for_each(&mut *show),
            NLMSG_DONE | NLMSG_ERROR => {
                return Some(match body.first_chunk().map_or(0, |code| i32::from_ne_bytes(*code)) {
                    code @ -4095..0 => Err(Errno::from_raw_os_error(-code)),
                    0.. => Ok(()),
                    _ => Err(Errno::BADMSG),
                });
            }
            _ => {}
        }
    }
    None
}

impl SocketMemory {
    /// Of a message's body. None: it is too short.
    fn of(body: &[u8]) -> Option<Self> {
        let layout = Layout::of(body)?;
        let number = |at: usize| Some(u64::from(u32::from_ne_bytes(*body.get(at..)?.first_chunk()?)));
        let mut memory = SocketMemory { inode: number(layout.inode)?, ..SocketMemory::default() };
        if let Some(queues) = layout.queues {
            (memory.data_received, memory.data_unacknowledged) = (number(queues)?, number(queues + 4)?);
        }
        for (kind, value) in Attributes::new(body.get(layout.message..)?) {
            match kind {
                _ if kind == layout.memory => {
                    // SK_MEMINFO_*: received, its bound, sent, its bound, reserved, unacknowledged.
                    // The reserve may be below nothing for a moment.
                    let mut numbers = value.chunks_exact(4).map(|chunk| chunk.first_chunk().map_or(0, |four| i32::from_ne_bytes(*four)));
                    let mut next = || u64::try_from(numbers.next().unwrap_or(0)).unwrap_or(0);
                    memory.received = next();
                    next();
                    memory.sent = next();
                    next();
                    memory.reserved = next();
                    memory.unacknowledged = next();
                }
                _ if Some(kind) == layout.options => memory.is_transparent = value.first().is_some_and(|bits| bits & TRANSPARENT != 0),
                _ => {}
            }
        }
        Some(memory)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]

    use std::net::{TcpListener, TcpStream, UdpSocket};

    use super::*;

    /// A message of a dump, of the given type.
    fn message(kind: u16, body: &[u8]) -> Vec<u8> {
        let mut messages = Messages::default();
        messages.message(kind, 0, |to| {
            to.raw(body);
        });
        messages.bytes().to_vec()
    }

    /// A socket's message, with the numbers of SK_MEMINFO_* and the bits of its options.
    fn body(inode: u32, numbers: &[u32], options: u8) -> Vec<u8> {
        let mut bytes = vec![0xee; 56];
        bytes.extend([600_u32, 30, 0xeeee].iter().flat_map(|number| number.to_ne_bytes()));
        bytes.extend_from_slice(&inode.to_ne_bytes());
        let numbers: Vec<u8> = numbers.iter().flat_map(|number| number.to_ne_bytes()).collect();
        for (kind, value) in [(INET_DIAG_SKMEMINFO, numbers), (INET_DIAG_SOCKOPT, vec![options, 0])] {
            bytes.extend_from_slice(&u16::try_from(value.len() + 4).unwrap().to_ne_bytes());
            bytes.extend_from_slice(&kind.to_ne_bytes());
            bytes.extend_from_slice(&value);
            bytes.resize(bytes.len().next_multiple_of(4), 0);
        }
        bytes
    }

    fn shown(piece: &[u8]) -> (Vec<SocketMemory>, Option<Result<(), Errno>>) {
        let mut all = Vec::new();
        let end = show_piece(piece, &mut |memory| all.push(memory));
        (all, end)
    }

    #[test]
    fn a_dump_tells_what_each_socket_holds_and_how_it_has_ended() {
        let mut piece = message(SOCK_DIAG_BY_FAMILY, &body(0, &[700, 1, 20, 2, 3000, 40, 0, 0, 9], 0));
        piece.extend(message(SOCK_DIAG_BY_FAMILY, &body(7, &[8, 0, 0, 0, u32::MAX], TRANSPARENT)));
        let none = SocketMemory { data_received: 600, data_unacknowledged: 30, ..SocketMemory::default() };
        let first = SocketMemory { received: 700, sent: 20, reserved: 3000, unacknowledged: 40, ..none };
        let second = SocketMemory { received: 8, inode: 7, is_transparent: true, ..none };
        assert_eq!(shown(&piece), (vec![first, second], None));
        piece.extend(message(NLMSG_DONE, &0_i32.to_ne_bytes()));
        assert_eq!(shown(&piece).1, Some(Ok(())));
        for kind in [NLMSG_DONE, NLMSG_ERROR] {
            assert_eq!(shown(&message(kind, &(-2_i32).to_ne_bytes())), (Vec::new(), Some(Err(Errno::NOENT))));
        }
    }

    #[test]
    fn a_dump_of_unix_sockets_tells_the_same() {
        let mut bytes = vec![1, 5, 1, 0];
        bytes.extend(7_u32.to_ne_bytes());
        bytes.extend([0xee; 8]);
        bytes.extend([40_u16, UNIX_DIAG_MEMINFO].iter().flat_map(|number| number.to_ne_bytes()));
        bytes.extend([8_u32, 0, 20, 0, 0, 0, 0, 0, 0].iter().flat_map(|number| number.to_ne_bytes()));
        let expected = SocketMemory { received: 8, sent: 20, inode: 7, ..SocketMemory::default() };
        assert_eq!(shown(&message(SOCK_DIAG_BY_FAMILY, &bytes)).0, vec![expected]);
    }

    #[test]
    fn bytes_of_any_kind_are_read_without_a_panic() {
        let whole = message(SOCK_DIAG_BY_FAMILY, &body(7, &[1, 2, 3, 4, 5, 6], 0xff));
        for length in 0..whole.len() {
            assert_eq!(shown(whole.get(..length).unwrap()).0, Vec::new(), "{length}");
            let mut cut = message(SOCK_DIAG_BY_FAMILY, whole.get(..length).unwrap());
            cut.extend([0xff; 3]);
            shown(&cut);
        }
        for place in 0..whole.len() {
            for byte in [0, 1, 3, 4, 5, 0x7f, 0x80, 0xff] {
                let mut changed = whole.clone();
                *changed.get_mut(place).unwrap() = byte;
                shown(&changed);
            }
        }
        for code in [i32::MIN, i32::MAX] {
            assert!(shown(&message(NLMSG_ERROR, &code.to_ne_bytes())).1.is_some());
        }
    }

    #[test]
    fn the_kernel_dumps_sockets_of_each_protocol_and_says_where_it_cannot() {
        let diag = SockDiag::new(SockDiag::open().unwrap().unwrap());
        let server = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = TcpStream::connect(server.local_addr().unwrap()).unwrap();
        std::io::Write::write_all(&mut &client, &[0; 5000]).unwrap();
        let datagrams = UdpSocket::bind("127.0.0.1:0").unwrap();
        datagrams.send_to(&[0; 5000], datagrams.local_addr().unwrap()).unwrap();
        for (protocol, is_nameless) in [(Protocol::TCP, true), (Protocol::UDP, false)] {
            let mut found = false;
            diag.each(protocol, &mut |memory| found |= memory.received >= 5000 && (memory.inode == 0) == is_nameless).unwrap();
            assert!(found, "{protocol:?}");
        }
        let (sender, _receiver) = std::os::unix::net::UnixStream::pair().unwrap();
        std::io::Write::write_all(&mut &sender, &[0; 5000]).unwrap();
        let mut found = false;
        diag.each(Protocol::UNIX, &mut |memory| found |= memory.sent >= 5000 && memory.inode != 0).unwrap();
        assert!(found);
        assert_eq!(diag.each(Protocol { family: 2, number: 253 }, &mut |_| {}), Err(Errno::NOENT));
        // The socket serves on after a refusal.
        diag.each(Protocol::TCP6, &mut |_| {}).unwrap();
    }
}
