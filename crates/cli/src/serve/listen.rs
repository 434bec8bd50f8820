//! Where the service listens: at sockets that it makes, or that systemd made and passes.
//!
//! `[listen]` says where, and nothing else does: a passed socket that is at another place ends the
//! service before it begins, and what is not passed is made here. A UNIX socket that was passed stays
//! systemd's, with its owner and mode.

use std::{
    fs::{self, DirBuilder, Permissions},
    io,
    net::{SocketAddr, TcpListener},
    os::{
        fd::OwnedFd,
        unix::{
            fs::{DirBuilderExt, FileTypeExt, PermissionsExt, chown},
            net::{UnixListener, UnixStream},
        },
    },
    path::{Path, PathBuf},
};

use anyhow::{Context, bail};
use rustix::net::{
    AddressFamily, SocketType,
    sockopt::{socket_acceptconn, socket_domain, socket_type},
};
use stockade_engine::caller;
use stockade_policy::service::ServeConfig;
use stockade_protocol::service::ListenerKind;

/// Its members may connect to the UNIX socket.
const GROUP: &str = "stockade";

/// What the service listens at.
pub(super) struct Listening {
    pub(super) listeners: Vec<(ListenerKind, OwnedFd)>,
    /// For people.
    pub(super) addresses: String,
    /// The socket's file that was made here, and goes with the service.
    pub(super) own_file: Option<PathBuf>,
}

/// Where it is to listen, by the configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place<'a> {
    Unix(&'a Path),
    Tcp(SocketAddr),
}

impl std::fmt::Display for Place<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Place::Unix(path) => write!(f, "unix:{}", path.display()),
            Place::Tcp(address) => write!(f, "http://{address}"),
        }
    }
}

/// The path of the UNIX socket: `[listen] unix`, or what is usual. None: this user has no directory for it.
pub(super) fn unix_path(config: &ServeConfig, privileged: bool) -> Option<PathBuf> {
    let usual = || match privileged {
        true => Some(PathBuf::from("/run/stockade-serve/serve.sock")),
        false => std::env::var_os("XDG_RUNTIME_DIR").map(|directory| PathBuf::from(directory).join("stockade/serve.sock")),
    };
    config.listen.unix.clone().or_else(usual)
}

/// The address of TCP, where any key could be used there.
///
/// # Errors
/// The configuration asks for one, and no key has a token.
pub(super) fn tcp_address(config: &ServeConfig, has_tokens: bool) -> anyhow::Result<Option<SocketAddr>> {
    match config.listen.tcp {
        Some(tcp) if !has_tokens && config.listen.tcp_is_written => bail!(
            "{}: `tcp` is {tcp}, and no key in {} has a token, which every client of TCP needs; make one: stockade key new NAME --add; or write `tcp = \"none\"`",
            config.path.display(),
            config.keys.display()
        ),
        tcp => Ok(tcp.filter(|_| has_tokens)),
    }
}

/// Listens at both.
pub(super) fn listen(unix: Option<&Path>, tcp: Option<SocketAddr>, privileged: bool) -> anyhow::Result<Listening> {
    let mut passed = passed()?;
    let wanted: Vec<Place<'_>> = unix.map(Place::Unix).into_iter().chain(tcp.map(Place::Tcp)).collect();
    if wanted.is_empty() {
        bail!(
            "no client could connect: XDG_RUNTIME_DIR is not set, `[listen] unix` names no socket, and no key has a token, which TCP needs"
        );
    }
    let mut made = Vec::new();
    let mut own_file = None;
    for place in &wanted {
        let found = passed.iter().position(|socket| socket.is_at(*place)).map(|index| passed.swap_remove(index).socket);
        let listener = match (found, place) {
            (Some(socket), Place::Unix(_)) => (ListenerKind::Unix, socket),
            (Some(socket), Place::Tcp(_)) => (ListenerKind::Tcp, socket),
            (None, Place::Unix(path)) => {
                let socket = listen_at(path, privileged).with_context(|| format!("listen at {}", path.display()))?;
                own_file = Some(path.to_path_buf());
                (ListenerKind::Unix, socket)
            }
            (None, Place::Tcp(address)) => {
                let socket = TcpListener::bind(address).with_context(|| {
                    format!("listen at {address}; another service has the port, or `[listen] tcp` names an address of another host")
                })?;
                (ListenerKind::Tcp, socket.into())
            }
        };
        made.push(listener);
    }
    let addresses = wanted.iter().map(ToString::to_string).collect::<Vec<_>>().join(" and ");
    if let Some(other) = passed.first() {
        bail!(
            "systemd passes a socket at {}, and the service is to listen at {addresses}; make `ListenStream=` of its socket unit and `[listen]` the same",
            other.at
        );
    }
    Ok(Listening { listeners: made, addresses, own_file })
}

/// A socket that systemd made.
struct Passed {
    socket: OwnedFd,
    unix: Option<PathBuf>,
    tcp: Option<SocketAddr>,
    /// For people.
    at: String,
}

impl Passed {
    fn is_at(&self, place: Place<'_>) -> bool {
        match place {
            Place::Unix(path) => self.unix.as_deref() == Some(path),
            Place::Tcp(address) => self.tcp == Some(address),
        }
    }
}

/// The sockets that systemd passes to this process (`sd_listen_fds(3)`).
fn passed() -> anyhow::Result<Vec<Passed>> {
    let numbers = sd_notify::listen_fds().context("take the sockets that LISTEN_FDS counts")?;
    numbers.map(|number| take(number).with_context(|| format!("the socket that systemd passes as descriptor {number}"))).collect()
}

fn take(number: i32) -> anyhow::Result<Passed> {
    let socket = stockade_sys::descriptors::copy_inherited(number.unsigned_abs())?;
    if socket_type(&socket)? != SocketType::STREAM || !socket_acceptconn(&socket)? {
        bail!("it does not listen for connections; its unit needs `ListenStream=` and `Accept=no`");
    }
    let (mut unix, mut tcp) = (None, None);
    // The types are those of the standard library, which ask the kernel for the address.
    match socket_domain(&socket)? {
        AddressFamily::UNIX => unix = UnixListener::from(socket.try_clone()?).local_addr()?.as_pathname().map(Path::to_owned),
        AddressFamily::INET | AddressFamily::INET6 => tcp = Some(TcpListener::from(socket.try_clone()?).local_addr()?),
        _ => bail!("it is neither a UNIX socket nor one of TCP"),
    }
    let at = unix.as_deref().map(Place::Unix).or(tcp.map(Place::Tcp)).map_or_else(|| "no path".to_owned(), |place| place.to_string());
    Ok(Passed { socket, unix, tcp, at })
}

fn listen_at(path: &Path, privileged: bool) -> anyhow::Result<OwnedFd> {
    if let Some(directory) = path.parent() {
        let made = DirBuilder::new().recursive(true).mode(if privileged { 0o755 } else { 0o700 }).create(directory);
        made.with_context(|| format!("make {}", directory.display()))?;
    }
    match fs::symlink_metadata(path) {
        Ok(found) if !found.file_type().is_socket() => bail!("another file is there; remove it, or name another path in `[listen] unix`"),
        Ok(_) if UnixStream::connect(path).is_ok() => bail!("another service listens there already"),
        // That of a service that was killed.
        Ok(_) => fs::remove_file(path)?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error.into()),
    }
    let listener = UnixListener::bind(path)?;
    fs::set_permissions(path, Permissions::from_mode(if privileged { 0o660 } else { 0o600 }))?;
    if let Some(group) = caller::group_id(GROUP).filter(|_| privileged) {
        chown(path, None, Some(group))?;
    }
    Ok(listener.into())
}
