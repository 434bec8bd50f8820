//! Asks the host's routing whether an address is the host's own.
//!
//! Asked before each dial, because interfaces come and go. The answer covers what a list of
//! addresses would miss: addresses on any interface, whole local networks, broadcast and multicast.
//! Read-only. It does not decide.

use std::net::IpAddr;

use rustix::{
    fd::{AsFd, BorrowedFd, OwnedFd},
    io::Errno,
    net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socket_with},
};

use crate::netlink::{Messages, REQUEST, Received};

/// Where the host's route to an address ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RouteKind {
    /// To another host.
    Remote,
    /// To this host itself, or to no single host.
    Local,
}

/// A routing socket in the host's network namespace.
pub(crate) struct Routes {
    socket: OwnedFd,
}

const GET_ROUTE: u16 = 26;
const NEW_ROUTE: u16 = 24;
const ERROR: u16 = 2;
const UNICAST: u8 = 1;
const RTA_DST: u16 = 1;
const AF_INET: u8 = 2;
const AF_INET6: u8 = 10;

impl Routes {
    pub(crate) fn open() -> Result<Self, Errno> {
        let socket = socket_with(AddressFamily::NETLINK, SocketType::RAW, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK, None)?;
        Ok(Routes { socket })
    }

    pub(crate) fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// The route to an address.
    ///
    /// # Errors
    /// ENETUNREACH, EHOSTUNREACH or EACCES where no route leads there.
    pub(crate) fn route_to(&self, address: IpAddr) -> Result<RouteKind, Errno> {
        let mut request = Messages::default();
        request.message(GET_ROUTE, REQUEST, |body| {
            let (family, bits) = if address.is_ipv4() { (AF_INET, 32) } else { (AF_INET6, 128) };
            body.raw(&[family, bits, 0, 0, 0, 0, 0, 0]).raw(&[0; 4]);
            match address {
                IpAddr::V4(v4) => body.attribute(RTA_DST, &v4.octets()),
                IpAddr::V6(v6) => body.attribute(RTA_DST, &v6.octets()),
            };
        });
        send(self.socket.as_fd(), request.bytes(), SendFlags::NOSIGNAL)?;
        let mut buffer = [0u8; 2048];
        let (length, _) = rustix::io::retry_on_intr(|| recv(&self.socket, &mut buffer, RecvFlags::empty()))?;
        let (kind, _, body) = Received::new(buffer.get(..length).unwrap_or_default()).next().ok_or(Errno::PROTO)?;
        match kind {
            // `struct rtmsg`: the seventh byte is the type.
            NEW_ROUTE => match body.get(7) {
                Some(&UNICAST) => Ok(RouteKind::Remote),
                Some(_) => Ok(RouteKind::Local),
                None => Err(Errno::PROTO),
            },
            ERROR => {
                let code = body.first_chunk::<4>().map_or(0, |code| i32::from_ne_bytes(*code).saturating_neg());
                Err(if code > 0 { Errno::from_raw_os_error(code) } else { Errno::PROTO })
            }
            _ => Err(Errno::PROTO),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]
    use super::*;

    #[test]
    fn loopback_and_multicast_are_not_other_hosts() {
        let routes = Routes::open().unwrap();
        assert_eq!(routes.route_to("127.0.0.1".parse().unwrap()), Ok(RouteKind::Local));
        assert_eq!(routes.route_to("127.9.9.9".parse().unwrap()), Ok(RouteKind::Local));
        assert_eq!(routes.route_to("::1".parse().unwrap()), Ok(RouteKind::Local));
        for _ in 0..1000 {
            assert_ne!(routes.route_to("224.0.0.1".parse().unwrap()), Ok(RouteKind::Remote));
        }
    }
}
