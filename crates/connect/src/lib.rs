//! How the companion programs that speak HTTP reach a server: which authorities vouch for it, by
//! which proxy it is reached, and which addresses its name has.
//!
//! Names are resolved by getent(1), since getaddrinfo would load the host's plug-ins into a static
//! program. It sends nothing itself, and knows nothing of keys, services and registries.
#![forbid(unsafe_code)]

use std::{
    env, fs,
    io::{self, Read},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::{Arc, mpsc},
    thread,
    time::Duration,
};

use ipnet::IpNet;
use ureq::{
    Error, Proxy,
    config::Config,
    http::Uri,
    tls::{Certificate, RootCerts, TlsConfig},
    unversioned::{
        resolver::{ResolvedSocketAddrs, Resolver},
        transport::NextTimeout,
    },
};

const GETENT: &str = "/usr/bin/getent";
/// What may name a proxy.
const PROXIES: [&str; 6] = ["ALL_PROXY", "all_proxy", "HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy"];

/// Bytes of a file with authorities: the host's own have some 250 KiB.
const MAX_AUTHORITY_LEN: u64 = 4 << 20;

/// Why no server can be reached from here.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// There is none that could vouch for a server.
    #[error("no certificates of authorities: {0}")]
    NoAuthorities(String),
    /// The file of a private authority cannot be used.
    #[error("{}: {why}; name a file with the authority's certificate in PEM", path.display())]
    Authority {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// What names a proxy is no URL of one.
    #[error("{0} is no URL of a proxy; write http://HOST:PORT, or unset it")]
    Proxy(&'static str),
    /// Only HTTP proxies are spoken to.
    #[error("the environment names a SOCKS proxy, which is not spoken here: set HTTPS_PROXY, or NO_PROXY for this host")]
    SocksProxy,
}

/// Whether a host of a URL is this one.
pub fn is_loopback(host: &str) -> bool {
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    bare.eq_ignore_ascii_case("localhost") || bare.parse().is_ok_and(|address: IpAddr| address.to_canonical().is_loopback())
}

fn port_of(url: &Uri) -> u16 {
    url.port_u16().unwrap_or(if url.scheme_str() == Some("https") { 443 } else { 80 })
}

/// The environment's proxy for a URL: none for this host, nor for what `NO_PROXY` covers.
///
/// # Errors
/// It is none, or of a kind that is not spoken.
pub fn proxy(url: &Uri) -> Result<Option<Proxy>, ConnectError> {
    if is_loopback(url.host().unwrap_or_default()) {
        return Ok(None);
    }
    let found = Proxy::try_from_env();
    let is_set = |name: &&&'static str| env::var_os(name).is_some_and(|value| !value.is_empty());
    if let (None, Some(name)) = (&found, PROXIES.iter().find(is_set)) {
        return Err(ConnectError::Proxy(name));
    }
    let listed = |name: &&str| env::var(name).ok().filter(|list| !list.is_empty());
    let excepted = ["NO_PROXY", "no_proxy"].iter().find_map(listed).unwrap_or_default();
    let proxy = found.filter(|proxy| !proxy.is_no_proxy(url) && !is_covered(&excepted, url.host().unwrap_or_default(), port_of(url)));
    if proxy.as_ref().is_some_and(|proxy| proxy.protocol().to_string().starts_with("SOCKS")) {
        return Err(ConnectError::SocksProxy);
    }
    Ok(proxy)
}

/// Whether a list of `NO_PROXY` has a host, a domain above it, or a network that it is in, as curl and Go read
/// the list: of ureq's own reading a name covers itself alone. An entry with a port is for that port.
fn is_covered(list: &str, host: &str, port: u16) -> bool {
    let host = host.trim_start_matches('[').trim_end_matches(']').to_ascii_lowercase();
    // `::ffff:10.0.0.1` is 10.0.0.1.
    let address = host.parse::<IpAddr>().ok().map(|address| address.to_canonical());
    let host = address.map_or(host, |address| address.to_string());
    let covers = |entry: &str| {
        if let (Some(address), Ok(network)) = (address, entry.parse::<IpNet>()) {
            return canonical(network).contains(&address);
        }
        let (name, its_port) = match entry.rsplit_once(':') {
            Some((name, its_port)) if !name.contains(':') || name.ends_with(']') => (name, its_port.parse().ok()),
            _ => (entry, Some(port)),
        };
        let name = name.trim_start_matches(['.', '[']).trim_end_matches(']').to_ascii_lowercase();
        let name = name.parse::<IpAddr>().map_or(name, |address| address.to_canonical().to_string());
        let is_below = address.is_none() && host.strip_suffix(&name).is_some_and(|rest| rest.ends_with('.'));
        !name.is_empty() && its_port == Some(port) && (name == "*" || host == name || is_below)
    };
    list.split([',', ' ', '\t']).filter(|entry| !entry.is_empty()).any(covers)
}

/// The network of IPv4 that one of addresses like `::ffff:10.0.0.1` stands for (RFC 4291, 2.5.5.2).
fn canonical(network: IpNet) -> IpNet {
    let mapped = match network {
        IpNet::V6(mapped) => mapped.addr().to_ipv4_mapped().zip(mapped.prefix_len().checked_sub(96)),
        IpNet::V4(_) => None,
    };
    mapped.and_then(|(address, length)| IpNet::new(address.into(), length).ok()).unwrap_or(network)
}

/// The authorities that may vouch for a server: the host's, or those that `SSL_CERT_FILE` or `SSL_CERT_DIR` names,
/// and beside them a private one's file.
///
/// # Errors
/// There is none, or a file that was named cannot be used.
pub fn tls(private: Option<&Path>) -> Result<TlsConfig, ConnectError> {
    let found = rustls_native_certs::load_native_certs();
    let words = |errors: &[rustls_native_certs::Error]| errors.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ");
    let is_named = ["SSL_CERT_FILE", "SSL_CERT_DIR"].iter().any(|name| env::var_os(name).is_some());
    let mut authorities = found.certs;
    if (authorities.is_empty() && private.is_none()) || (is_named && !found.errors.is_empty()) {
        let why = if found.errors.is_empty() { String::from("this host has none") } else { words(&found.errors) };
        return Err(ConnectError::NoAuthorities(why));
    }
    if let Some(path) = private {
        let refuse = |why: String| ConnectError::Authority { path: path.to_owned(), why };
        // A pipe would be waited for, and a device may have no end.
        let file = fs::metadata(path).map_err(|error| refuse(error.to_string()))?;
        if !file.is_file() {
            return Err(refuse(String::from("it is no regular file")));
        }
        if file.len() > MAX_AUTHORITY_LEN {
            return Err(refuse(format!("it has more than {} MiB", MAX_AUTHORITY_LEN >> 20)));
        }
        let own = rustls_native_certs::load_certs_from_paths(Some(path), None);
        if !own.errors.is_empty() || own.certs.is_empty() {
            let why = if own.errors.is_empty() { String::from("it has no certificate") } else { words(&own.errors) };
            return Err(refuse(why));
        }
        authorities.extend(own.certs);
    }
    let roots: Vec<Certificate<'static>> = authorities.iter().map(|root| Certificate::from_der(root).to_owned()).collect();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    Ok(TlsConfig::builder().root_certs(RootCerts::new_with_certs(&roots)).unversioned_rustls_crypto_provider(provider).build())
}

/// What TLS had against a server.
pub fn tls_error(error: &Error) -> Option<&rustls::Error> {
    match error {
        Error::Rustls(error) => Some(error),
        Error::Io(error) => error.get_ref()?.downcast_ref(),
        _ => None,
    }
}

/// An error of a connection in plain words; `silence` is how long a server may say nothing.
pub fn words_of(error: &Error, silence: Duration) -> String {
    match error {
        Error::Io(error) if error.kind() == io::ErrorKind::UnexpectedEof => String::from("it closed the connection"),
        Error::Io(error) => error.to_string(),
        Error::Timeout(ureq::Timeout::PerRead) => format!("it was silent for {} s", silence.as_secs()),
        Error::Timeout(_) => String::from("it took too long"),
        Error::LargeResponseHeader(_, most) => format!("its head has more than {} KiB", most >> 10),
        Error::HostNotFound => String::from("the host has no address"),
        error => error.to_string(),
    }
}

/// Asks the host's own getent(1): addresses and `localhost` are known without it.
#[derive(Debug)]
pub struct GetentResolver;

impl Resolver for GetentResolver {
    fn resolve(&self, uri: &Uri, _: &Config, timeout: NextTimeout) -> Result<ResolvedSocketAddrs, Error> {
        let host = uri.host().unwrap_or_default();
        let port = port_of(uri);
        let bare = host.trim_start_matches('[').trim_end_matches(']');
        let found = match bare.parse() {
            Ok(address) => vec![address],
            Err(_) if is_loopback(host) => vec![Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()],
            Err(_) => look_up(bare, timeout)?,
        };
        let mut addresses = self.empty();
        found.into_iter().take(8).for_each(|address: IpAddr| addresses.push(SocketAddr::new(address, port)));
        if addresses.is_empty() { Err(Error::HostNotFound) } else { Ok(addresses) }
    }
}

fn look_up(host: &str, timeout: NextTimeout) -> Result<Vec<IpAddr>, Error> {
    let asked = output_within(Command::new(GETENT).args(["--", "ahosts", host]), *timeout.after);
    let failed = |error| io::Error::other(format!("{GETENT}, which resolves names, could not be started ({error}); name an IP address"));
    let answer = asked.map_err(failed)?.ok_or(Error::Timeout(timeout.reason))?;
    let lines = String::from_utf8_lossy(&answer);
    let streams = lines.lines().filter_map(|line| {
        let mut words = line.split_whitespace();
        let address = words.next()?.parse().ok()?;
        (words.next() == Some("STREAM")).then_some(address)
    });
    Ok(streams.collect())
}

/// What a command writes to stdout. None: it has not ended in time, and was killed.
fn output_within(command: &mut Command, limit: Duration) -> io::Result<Option<Vec<u8>>> {
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn()?;
    let (sender, receiver) = mpsc::channel();
    if let Some(mut stdout) = child.stdout.take() {
        thread::spawn(move || {
            let mut bytes = Vec::new();
            let read = stdout.read_to_end(&mut bytes).map(|_| bytes);
            // No thread waits for it once the time has passed.
            let _unheard = sender.send(read);
        });
    }
    let answer = receiver.recv_timeout(limit);
    // One that has closed its stdout has said all.
    let _ended = child.kill();
    child.wait()?;
    answer.ok().transpose()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]

    use std::time::Instant;

    use super::*;

    #[test]
    fn only_this_hosts_own_addresses_are_loopback() {
        for (host, is) in [
            ("localhost", true),
            ("LOCALHOST", true),
            ("127.0.0.1", true),
            ("127.8.0.1", true),
            ("[::1]", true),
            ("localhost.example.com", false),
            ("127.0.0.1.example.com", false),
            ("10.0.0.1", false),
            ("", false),
        ] {
            assert_eq!(is_loopback(host), is, "{host}");
        }
    }

    #[test]
    fn a_program_that_does_not_end_in_time_is_killed() {
        let quick = output_within(Command::new("/bin/echo").arg("said"), Duration::from_secs(60)).unwrap();
        assert_eq!(quick.as_deref(), Some(&b"said\n"[..]), "the control");
        let begun = Instant::now();
        assert_eq!(output_within(Command::new("/bin/sleep").arg("60"), Duration::from_millis(50)).unwrap(), None);
        assert!(begun.elapsed() < Duration::from_secs(30));
        assert!(output_within(&mut Command::new("/missing"), Duration::from_secs(1)).is_err());
    }

    #[test]
    fn a_file_without_a_certificate_is_no_authority() {
        for path in ["/missing/ca.pem", "/etc/passwd"] {
            let error = tls(Some(Path::new(path))).unwrap_err().to_string();
            assert!(error.contains(path) || error.contains("no certificates of authorities"), "{error}");
        }
        for path in ["/dev/zero", "/etc"] {
            let error = tls(Some(Path::new(path))).unwrap_err().to_string();
            assert!(error.contains("no regular file"), "{error}");
        }
    }

    #[test]
    fn no_proxy_has_names_with_what_is_below_networks_and_ports() {
        for (list, host, is) in [
            ("example.test", "example.test", true),
            ("example.test", "reg.example.test", true),
            ("other.test, Example.Test", "REG.example.test", true),
            (".example.test", "reg.example.test", true),
            ("example.test", "evilexample.test", false),
            ("example.test", "example.test.evil.org", false),
            ("reg.example.test", "example.test", false),
            ("10.0.0.1", "10.0.0.1", true),
            ("0.0.1", "10.0.0.1", false),
            ("", "example.test", false),
            (",.", "example.test", false),
            ("a.test example.test", "example.test", true),
            ("*", "example.test", true),
            ("10.0.0.0/8", "10.1.2.3", true),
            ("10.0.0.0/8", "11.1.2.3", false),
            ("10.0.0.0/8", "[::ffff:10.1.2.3]", true),
            ("10.1.2.3", "[::ffff:10.1.2.3]", true),
            ("::ffff:10.1.2.3", "[::ffff:a01:203]", true),
            ("[::ffff:a01:203]:443", "10.1.2.3", true),
            ("::ffff:10.1.2.0/120", "[::ffff:10.1.2.3]", true),
            ("::ffff:10.1.2.0/120", "10.1.3.3", false),
            ("::/0", "10.1.2.3", false),
            ("fd00::/8", "[fd00::1]", true),
            ("fd00::1", "[fd00::1]", true),
            ("[fd00::1]:443", "[fd00::1]", true),
            ("example.test:443", "reg.example.test", true),
            ("example.test:5000", "example.test", false),
            ("example.test:x", "example.test", false),
        ] {
            assert_eq!(is_covered(list, host, 443), is, "{list} {host}");
        }
    }
}
