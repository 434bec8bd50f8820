//! The configuration of a service, `serve.toml`: where it listens, for how much it has room, and
//! what it takes from a client.
//!
//! An address that other hosts reach is refused unless a proxy stands before it, and no setting is
//! accepted that would change nothing, but those of a facade that is switched off. What the host has and can listen on is not looked at, so a
//! value may be more than there is.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
};

use stockade_protocol::{LimitKey, MAX_REQUEST};
use toml::de::{DeTable, DeValue};

use super::{ServiceError, duration, refuse_if_wrong, size};
use crate::{
    check::{self, Checked},
    diagnostic::{Diagnostic, Diagnostics, Located, quote},
    document::{self, DocumentReader},
    trust,
};

/// What `serve.toml` says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServeConfig {
    /// Its file.
    pub path: PathBuf,
    /// `keys`: the file of the keys; default: `keys.toml` beside this one.
    pub keys: PathBuf,
    /// `hosts`: what `Host` of a request over TCP may be, in small letters; default: the address of
    /// `tcp`, and `localhost` with its port. Empty without `tcp`.
    pub hosts: Vec<String>,
    /// `[listen]`
    pub listen: Listen,
    /// `[capacity]`
    pub capacity: Capacity,
    /// `[limits]`
    pub limits: ServiceLimits,
    /// `[facade.sandbox_fusion]`
    pub sandbox_fusion: SandboxFusion,
    /// `[facade.execute]`
    pub execute: Execute,
}

/// `[listen]`: where clients connect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listen {
    /// `unix`: the path of a UNIX socket. `None` is the default: `/run/stockade-serve/serve.sock` of a
    /// service of root's, `stockade/serve.sock` in `$XDG_RUNTIME_DIR` of a user's.
    pub unix: Option<PathBuf>,
    /// `tcp`: an address with its port; default: `127.0.0.1:8722`. `None` is written `"none"`.
    pub tcp: Option<SocketAddr>,
    /// Whether `tcp` stands in the file.
    pub tcp_is_written: bool,
    /// `behind_proxy`: a proxy with TLS stands before `tcp`, which may then be an address that
    /// other hosts reach; default: false.
    pub behind_proxy: bool,
}

/// `[capacity]`: for how much the service has room at a time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Capacity {
    /// `cpus`: CPUs that runs share, in thousandths; default: all of the host's.
    pub cpus: Option<u64>,
    /// `oversubscribe`: how often a CPU is given to runs at a time, in thousandths; default: 1.0.
    pub oversubscribe: u64,
    /// `memory`: bytes that runs share; default: 80 % of the host's.
    pub memory: Option<u64>,
    /// `waiting`: requests that wait at a time; default: 1000.
    pub waiting: u32,
    /// `queue`: how long a request waits, in milliseconds; default: `"60s"`.
    pub queue: u64,
    /// `sessions`: sessions at a time; default: 64.
    pub sessions: u32,
}

/// `[limits]`: what the service takes from a client and keeps for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServiceLimits {
    /// `body`: bytes of the body of a request; default: `"64MiB"`.
    pub body: u64,
    /// `buffers`: bytes of all bodies and answers in memory; default: `"512MiB"`.
    pub buffers: u64,
    /// `stream_size`: bytes of output that the events of a run have; default: `"8MiB"`.
    pub stream_size: u64,
    /// `drain`: how long runs go on once the service was told to end, in milliseconds; default:
    /// `"30s"`.
    pub drain: u64,
}

/// `[facade.sandbox_fusion]`: the interface of SandboxFusion, `POST /run_code`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SandboxFusion {
    /// `enabled`: default: false.
    pub enabled: bool,
    /// `policy`: the policy of its runs; default: the first of the key.
    pub policy: Option<String>,
    /// `heartbeat`: how often a client that waits is sent a blank, in milliseconds; default:
    /// `"5s"`.
    pub heartbeat: u64,
}

/// `[facade.execute]`: the usual interface of services written by hand, `POST /execute`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Execute {
    /// `enabled`: default: false.
    pub enabled: bool,
    /// `policy`: the policy of its runs; default: the first of the key.
    pub policy: Option<String>,
}

const PORT: u16 = 8722;
const HEARTBEAT: u64 = 5000;
const BODY: u64 = 64 << 20;
const BUFFERS: u64 = 512 << 20;
const STREAM_SIZE: u64 = 8 << 20;

/// The longest path of a socket (`sun_path` of unix(7), without its last NUL).
const MAX_SOCKET_LEN: usize = 107;

impl ServeConfig {
    /// Reads a configuration from a file that only root, or this user, can have written. `None`:
    /// there is no file.
    ///
    /// # Errors
    /// The file cannot be read or is not trusted, or it has a mistake.
    pub fn load(path: &Path, user: u32) -> Result<Option<Self>, ServiceError> {
        trust::read_trusted_of(path, user, 0o7777)?.map(|text| Self::parse(path, text)).transpose()
    }

    /// The configuration where there is no file at this path: every default.
    pub fn of_no_file(path: &Path) -> Self {
        let tcp = SocketAddr::from((Ipv4Addr::LOCALHOST, PORT));
        ServeConfig {
            path: path.to_owned(),
            keys: path.with_file_name("keys.toml"),
            hosts: hosts_of(tcp),
            listen: Listen { unix: None, tcp: Some(tcp), tcp_is_written: false, behind_proxy: false },
            capacity: Capacity { cpus: None, oversubscribe: 1000, memory: None, waiting: 1000, queue: 60_000, sessions: 64 },
            limits: ServiceLimits { body: BODY, buffers: BUFFERS, stream_size: STREAM_SIZE, drain: 30_000 },
            sandbox_fusion: SandboxFusion { enabled: false, policy: None, heartbeat: HEARTBEAT },
            execute: Execute::default(),
        }
    }

    pub(super) fn parse(path: &Path, text: String) -> Result<Self, ServiceError> {
        let mut problems = Diagnostics::default();
        let mut config = Self::of_no_file(path);
        if let Some(root) = document::parse(0, &text, &mut problems) {
            let mut reader = DocumentReader { source: 0, inherits: false, problems: &mut problems };
            if reader.version(root.get_ref()) {
                config.read(root.get_ref(), &mut reader);
            }
        }
        refuse_if_wrong(path, text, problems).map(|_| config)
    }

    fn read(&mut self, top: &DeTable<'_>, reader: &mut DocumentReader<'_>) {
        let known = ["schema", "keys", "hosts", "listen", "capacity", "limits", "facade"];
        reader.known_names(top, known.into_iter(), "the configuration of a service");
        if let Some(keys) = reader.text(top, "keys", check::absolute) {
            self.keys = PathBuf::from(keys.value);
        }
        if let Some(table) = reader.table(top, "listen") {
            self.listen.read(table, reader);
        }
        if let Some(table) = reader.table(top, "capacity") {
            self.capacity.read(table, reader);
        }
        if let Some(table) = reader.table(top, "limits") {
            self.limits.read(table, reader);
        }
        if let Some(table) = reader.table(top, "facade") {
            reader.known_names(table, ["sandbox_fusion", "execute"].into_iter(), "[facade]");
            if let Some(table) = reader.table(table, "sandbox_fusion") {
                self.sandbox_fusion.read(table, reader);
            }
            if let Some(table) = reader.table(table, "execute") {
                self.execute.read(table, reader);
            }
        }
        self.hosts = self.read_hosts(top, reader);
    }

    /// The hosts, which belong to the address that was read before.
    fn read_hosts(&self, top: &DeTable<'_>, reader: &mut DocumentReader<'_>) -> Vec<String> {
        let Some(node) = top.get("hosts") else {
            let Some(tcp) = self.listen.tcp else { return Vec::new() };
            if tcp.ip().is_unspecified() && self.listen.behind_proxy {
                let diagnostic = Diagnostic::new("`hosts` is missing", format!("no client writes {tcp}"));
                reader.problems.add(
                    &reader.start(),
                    diagnostic.help("name the hosts that clients write, such as `hosts = [\"stockade.example.org\"]`"),
                );
            }
            return hosts_of(tcp);
        };
        let hosts: Vec<String> = reader.strings(node, "hosts", host).into_iter().map(|at| at.value).collect();
        if node.get_ref().as_array().is_some_and(|items| items.is_empty()) {
            let diagnostic = Diagnostic::new("without `hosts` no request over TCP is answered", "empty");
            reader.complain(node, diagnostic.help("name at least one host, or write `tcp = \"none\"` and leave `hosts` out"));
        } else if self.listen.tcp.is_none() {
            let diagnostic = Diagnostic::new("`hosts` is for requests over TCP", "`tcp` is \"none\"");
            reader.complain(node, diagnostic.help("leave `hosts` out: the UNIX socket takes every `Host`"));
        }
        hosts
    }
}

impl Listen {
    fn read(&mut self, table: &DeTable<'_>, reader: &mut DocumentReader<'_>) {
        reader.known_names(table, ["unix", "tcp", "behind_proxy"].into_iter(), "[listen]");
        self.unix = reader.text(table, "unix", socket).map(|at| PathBuf::from(at.value));
        let behind_proxy = reader.flag(table, "behind_proxy");
        self.behind_proxy = behind_proxy.as_ref().is_some_and(|at| at.value);
        if let Some(Located { value: tcp, span }) = reader.text(table, "tcp", address) {
            (self.tcp, self.tcp_is_written) = (tcp, true);
            if let Some(tcp) = tcp.filter(|tcp| !tcp.ip().to_canonical().is_loopback() && !self.behind_proxy) {
                let diagnostic =
                    Diagnostic::new(format!("other hosts reach {tcp}, and keys would cross the network"), "not of this host alone");
                let help = "listen on 127.0.0.1; or have a reverse proxy with TLS before it, and write `behind_proxy = true`";
                reader.problems.add(&span, diagnostic.help(help));
            }
        }
        if let (Some(Located { value: true, span }), None) = (behind_proxy, self.tcp) {
            let diagnostic = Diagnostic::new("`behind_proxy` is for an address of TCP", "`tcp` is \"none\"");
            reader.problems.add(&span, diagnostic.help("leave it out"));
        }
    }
}

impl Capacity {
    fn read(&mut self, table: &DeTable<'_>, reader: &mut DocumentReader<'_>) {
        reader.known_names(table, ["cpus", "oversubscribe", "memory", "waiting", "queue", "sessions"].into_iter(), "[capacity]");
        self.cpus = decimal(table, "cpus", 100..=65_536_000, "a number of CPUs, such as 8 or 1.5; 0.1 to 65536", reader);
        let often = decimal(table, "oversubscribe", 100..=16_000, "a factor, such as 1.5; 0.1 to 16", reader);
        self.oversubscribe = often.unwrap_or(self.oversubscribe);
        let memory = |text: &str| size("memory", 1 << 20, "a size such as \"16GiB\"; at least \"1MiB\"", text);
        self.memory = reader.text(table, "memory", memory).map(|at| at.value);
        let waiting = reader.integer(table, "waiting", |number| check::count("waiting", 1, 1_000_000, number));
        self.waiting = waiting.and_then(|at| u32::try_from(at.value).ok()).unwrap_or(self.waiting);
        let sessions = reader.integer(table, "sessions", |number| check::count("sessions", 1, 10_000, number));
        self.sessions = sessions.and_then(|at| u32::try_from(at.value).ok()).unwrap_or(self.sessions);
        let queue = |text: &str| duration("queue", 100, 3_600_000, "a duration such as \"60s\"; \"100ms\" to \"1h\"", text);
        self.queue = reader.text(table, "queue", queue).map_or(self.queue, |at| at.value);
    }
}

impl ServiceLimits {
    fn read(&mut self, table: &DeTable<'_>, reader: &mut DocumentReader<'_>) {
        reader.known_names(table, ["body", "buffers", "stream_size", "drain"].into_iter(), "[limits]");
        let body = reader.text(table, "body", |text| size("body", 1 << 10, "a size such as \"64MiB\"; at least \"1KiB\"", text));
        if let Some(written) = body.as_ref().filter(|body| body.value > MAX_REQUEST as u64) {
            let diagnostic = Diagnostic::new("a request has at most 64MiB", "here");
            reader.problems.add(&written.span, diagnostic.help("`body` is at most \"64MiB\""));
        }
        let buffers = reader.text(table, "buffers", |text| size("buffers", 1 << 20, "a size such as \"512MiB\"; at least \"1MiB\"", text));
        let stream_size = |text: &str| size("stream_size", 1 << 10, "a size such as \"8MiB\"; at least \"1KiB\"", text);
        self.stream_size = reader.text(table, "stream_size", stream_size).map_or(self.stream_size, |at| at.value);
        self.body = body.as_ref().map_or(self.body, |at| at.value);
        self.buffers = buffers.as_ref().map_or(self.buffers, |at| at.value);
        if let Some(written) = body.or(buffers).filter(|_| self.body > self.buffers) {
            let [body, buffers] = [self.body, self.buffers].map(|size| LimitKey::OutputSize.format(Some(size)));
            let diagnostic = Diagnostic::new(format!("a body of {body} does not fit into buffers of {buffers}"), "here");
            reader.problems.add(&written.span, diagnostic.help("`body` is at most `buffers`"));
        }
        let drain = |text: &str| duration("drain", 100, 3_600_000, "a duration such as \"30s\"; \"100ms\" to \"1h\"", text);
        self.drain = reader.text(table, "drain", drain).map_or(self.drain, |at| at.value);
    }
}

impl SandboxFusion {
    fn read(&mut self, table: &DeTable<'_>, reader: &mut DocumentReader<'_>) {
        reader.known_names(table, ["enabled", "policy", "heartbeat"].into_iter(), "[facade.sandbox_fusion]");
        self.enabled = reader.flag(table, "enabled").is_some_and(|at| at.value);
        self.policy = reader.text(table, "policy", check::policy_reference).map(|at| at.value);
        let heartbeat = |text: &str| duration("heartbeat", 100, 60_000, "a duration such as \"5s\"; \"100ms\" to \"1min\"", text);
        self.heartbeat = reader.text(table, "heartbeat", heartbeat).map_or(self.heartbeat, |at| at.value);
    }
}

impl Execute {
    fn read(&mut self, table: &DeTable<'_>, reader: &mut DocumentReader<'_>) {
        reader.known_names(table, ["enabled", "policy"].into_iter(), "[facade.execute]");
        self.enabled = reader.flag(table, "enabled").is_some_and(|at| at.value);
        self.policy = reader.text(table, "policy", check::policy_reference).map(|at| at.value);
    }
}

/// A number with or without a decimal point, in thousandths.
fn decimal(
    table: &DeTable<'_>,
    key: &str,
    range: std::ops::RangeInclusive<u64>,
    expected: &str,
    reader: &mut DocumentReader<'_>,
) -> Option<u64> {
    let node = table.get(key)?;
    // Written as `cpus` of a policy is.
    let number = match node.get_ref() {
        DeValue::Integer(found) => {
            let number = i64::from_str_radix(found.as_str(), found.radix()).ok();
            number.and_then(|number| LimitKey::Cpus.parse_integer(number).ok().flatten())
        }
        DeValue::Float(found) => {
            let number = found.as_str().parse().ok();
            number.and_then(|number| LimitKey::Cpus.parse_float(number).ok().flatten())
        }
        _ => {
            reader.wrong_type(node, key, "a number");
            return None;
        }
    };
    let found = number.filter(|number| range.contains(number));
    if found.is_none() {
        reader.complain(node, Diagnostic::new(format!("`{key}` is out of its range"), expected));
    }
    found
}

/// What clients on this host write for an address.
fn hosts_of(tcp: SocketAddr) -> Vec<String> {
    vec![tcp.to_string(), format!("localhost:{}", tcp.port())]
}

/// The path of a UNIX socket.
fn socket(text: &str) -> Checked<String> {
    let path = check::absolute(text)?;
    if path == "/" || path.len() > MAX_SOCKET_LEN {
        return Err(Diagnostic::new(
            format!("{} cannot be a UNIX socket", quote(text)),
            format!("a path of at most {MAX_SOCKET_LEN} bytes"),
        ));
    }
    Ok(path)
}

/// An address and a port of this host, or none.
fn address(text: &str) -> Checked<Option<SocketAddr>> {
    const SHAPE: &str = "such as \"127.0.0.1:8722\", \"[::1]:8722\" or \"none\"";
    let refuse = |label: &str| Diagnostic::new(format!("{} is no address to listen on", quote(text)), label).help(SHAPE);
    if text == "none" {
        return Ok(None);
    }
    let address: SocketAddr = text.parse().map_err(|_| match text.parse::<IpAddr>() {
        Ok(_) => refuse("the port is missing"),
        Err(_) => refuse("not an address and a port"),
    })?;
    match address.port() {
        0 => Err(refuse("no client knows a port that the kernel chooses")),
        _ => Ok(Some(address)),
    }
}

/// A host as `Host` of a request has it: a name or an address, in most cases with a port.
fn host(text: &str) -> Checked<String> {
    const SHAPE: &str = "such as \"localhost:8722\", \"[::1]:8722\" or \"stockade.example.org\"";
    let refuse = |label: &str| Diagnostic::new(format!("{} cannot be a host", quote(text)), label).help(SHAPE);
    if let Ok(address) = text.parse::<SocketAddr>() {
        return Ok(address.to_string());
    }
    let bracketed = text.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
    if let Some(Ok(address)) = bracketed.map(str::parse::<std::net::Ipv6Addr>) {
        return Ok(format!("[{address}]"));
    }
    if text.contains(['/', '@']) {
        return Err(refuse("a URL, of which only host and port are compared"));
    }
    let (name, port) = text.split_once(':').map_or((text, None), |(name, port)| (name, Some(port)));
    if port.is_some_and(|port| port.contains(':')) {
        return Err(refuse("an IPv6 address needs brackets"));
    }
    let is_number = |port: &str| port.bytes().all(|byte| byte.is_ascii_digit()) && port.parse::<u16>().is_ok_and(|port| port > 0);
    if !port.is_none_or(is_number) {
        return Err(refuse("not a port"));
    }
    let is_label = |label: &str| {
        (1..=63).contains(&label.len())
            && !label.starts_with('-')
            && !label.ends_with('-')
            && label.chars().all(|c| c.is_ascii_alphanumeric() || c == '-')
    };
    if name.len() > 253 || !name.split('.').all(is_label) {
        return Err(refuse("letters, digits and inner -, parts behind dots"));
    }
    Ok(text.to_ascii_lowercase())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]
    use super::*;

    fn parse(text: &str) -> Result<ServeConfig, String> {
        ServeConfig::parse(Path::new("/etc/stockade/serve.toml"), text.to_owned()).map_err(|error| error.to_string())
    }

    #[test]
    fn everything_that_is_not_written_has_its_default() {
        let config = parse("schema = 1").unwrap();
        let expected = ServeConfig {
            path: PathBuf::from("/etc/stockade/serve.toml"),
            keys: PathBuf::from("/etc/stockade/keys.toml"),
            hosts: vec!["127.0.0.1:8722".to_owned(), "localhost:8722".to_owned()],
            listen: Listen { unix: None, tcp: Some("127.0.0.1:8722".parse().unwrap()), tcp_is_written: false, behind_proxy: false },
            capacity: Capacity { cpus: None, oversubscribe: 1000, memory: None, waiting: 1000, queue: 60_000, sessions: 64 },
            limits: ServiceLimits { body: 64 << 20, buffers: 512 << 20, stream_size: 8 << 20, drain: 30_000 },
            sandbox_fusion: SandboxFusion { enabled: false, policy: None, heartbeat: 5000 },
            execute: Execute { enabled: false, policy: None },
        };
        assert_eq!(config, expected);
        let tables = "[listen]\n[capacity]\n[limits]\n[facade.sandbox_fusion]\n[facade.execute]";
        assert_eq!(parse(&format!("schema = 1\n{tables}")), Ok(expected.clone()));
        assert_eq!(ServeConfig::of_no_file(Path::new("/etc/stockade/serve.toml")), expected);
    }

    #[test]
    fn everything_that_is_written_is_read() {
        let text = r#"
schema = 1
keys = "/srv/keys.toml"
hosts = ["Stockade.Example.org", "[::1]", "localhost:8000", "[::1]:8000"]
[listen]
unix = "/run/other/serve.sock"
tcp = "0.0.0.0:8000"
behind_proxy = true
[capacity]
cpus = 1.5
oversubscribe = 2
memory = "16GiB"
waiting = 1
queue = "5min"
sessions = 7
[limits]
body = "1MiB"
buffers = "1GiB"
stream_size = "2KiB"
drain = "2s"
[facade.sandbox_fusion]
enabled = true
policy = "strict"
heartbeat = "1s"
[facade.execute]
enabled = true
policy = "/etc/own.toml"
"#;
        let expected = ServeConfig {
            path: PathBuf::from("/etc/stockade/serve.toml"),
            keys: PathBuf::from("/srv/keys.toml"),
            hosts: ["stockade.example.org", "[::1]", "localhost:8000", "[::1]:8000"].map(str::to_owned).to_vec(),
            listen: Listen {
                unix: Some(PathBuf::from("/run/other/serve.sock")),
                tcp: Some("0.0.0.0:8000".parse().unwrap()),
                tcp_is_written: true,
                behind_proxy: true,
            },
            capacity: Capacity { cpus: Some(1500), oversubscribe: 2000, memory: Some(16 << 30), waiting: 1, queue: 300_000, sessions: 7 },
            limits: ServiceLimits { body: 1 << 20, buffers: 1 << 30, stream_size: 2 << 10, drain: 2000 },
            sandbox_fusion: SandboxFusion { enabled: true, policy: Some("strict".to_owned()), heartbeat: 1000 },
            execute: Execute { enabled: true, policy: Some("/etc/own.toml".to_owned()) },
        };
        assert_eq!(parse(text), Ok(expected));
    }

    #[test]
    fn hosts_follow_the_address() {
        let hosts = |tcp: &str| parse(&format!("schema = 1\n[listen]\ntcp = \"{tcp}\"")).unwrap().hosts;
        assert_eq!(hosts("[::1]:9000"), ["[::1]:9000", "localhost:9000"]);
        assert_eq!(hosts("127.0.0.2:80"), ["127.0.0.2:80", "localhost:80"]);
        assert!(hosts("none").is_empty());
        // An address of IPv4 in IPv6 is of this host alone where the former is.
        assert_eq!(hosts("[::ffff:127.0.0.1]:1").len(), 2);
    }

    #[test]
    fn mistakes_are_refused_where_they_stand() {
        let listen = |lines: &str| format!("schema = 1\n[listen]\n{lines}\n");
        let capacity = |lines: &str| format!("schema = 1\n[capacity]\n{lines}\n");
        let limits = |lines: &str| format!("schema = 1\n[limits]\n{lines}\n");
        let facade = |name: &str, lines: &str| format!("schema = 1\n[facade{name}]\n{lines}\n");
        let long = format!("unix = \"/{}\"", "a".repeat(107));
        for (text, said) in [
            (String::new(), "`schema` is missing"),
            ("schema = 2".to_owned(), "reads schema 1"),
            ("schema = 1\nkeys = \"keys.toml\"".to_owned(), "must be absolute"),
            ("schema = 1\nkey = \"/keys.toml\"".to_owned(), "did you mean `keys`?"),
            ("schema = 1\nlisten = 1".to_owned(), "`listen` must be a table"),
            ("schema = 1\nfacade = true".to_owned(), "`facade` must be a table"),
            (facade("", "execute = true"), "`execute` must be a table"),
            (facade(".sandboxfusion", ""), "did you mean `sandbox_fusion`?"),
            (facade(".sandbox_fusion", "enabled = 1"), "true or false"),
            (facade(".sandbox_fusion", "policy = \"./own.toml\""), "must be absolute"),
            (facade(".sandbox_fusion", "heartbeat = \"99ms\""), "\"100ms\" to \"1min\""),
            (facade(".sandbox_fusion", "heartbeat = 5"), "`heartbeat` must be a string"),
            (facade(".execute", "heartbeat = \"5s\""), "not a key of [facade.execute]"),
            (facade(".execute", "policy = \"\""), "cannot name a policy"),
            ("schema = 1\nhosts = []".to_owned(), "no request over TCP is answered"),
            ("schema = 1\nhosts = \"a\"".to_owned(), "a list of strings"),
            ("schema = 1\nhosts = [\"http://a\"]".to_owned(), "only host and port"),
            ("schema = 1\nhosts = [\"::1\"]".to_owned(), "needs brackets"),
            ("schema = 1\nhosts = [\"a:+1\"]".to_owned(), "not a port"),
            ("schema = 1\nhosts = [\"a:0\"]".to_owned(), "not a port"),
            ("schema = 1\nhosts = [\"a..b\"]".to_owned(), "parts behind dots"),
            ("schema = 1\nhosts = [\"*\"]".to_owned(), "parts behind dots"),
            ("schema = 1\nhosts = [\"a\"]\n[listen]\ntcp = \"none\"".to_owned(), "`hosts` is for requests over TCP"),
            (listen("unix = \"serve.sock\""), "must be absolute"),
            (listen(&long), "at most 107 bytes"),
            (listen("unix = \"/\""), "cannot be a UNIX socket"),
            (listen("tcp = \"localhost:8722\""), "not an address and a port"),
            (listen("tcp = \"127.0.0.1\""), "the port is missing"),
            (listen("tcp = \"127.0.0.1:0\""), "that the kernel chooses"),
            (listen("tcp = 8722"), "`tcp` must be a string"),
            (listen("tcp = \"0.0.0.0:8722\""), "write `behind_proxy = true`"),
            (listen("tcp = \"192.0.2.1:8722\"\nbehind_proxy = false"), "other hosts reach 192.0.2.1:8722"),
            (listen("tcp = \"[::]:8722\"\nbehind_proxy = true"), "`hosts` is missing"),
            (listen("behind_proxy = 1"), "true or false"),
            (listen("tcp = \"none\"\nbehind_proxy = true"), "is for an address of TCP"),
            (listen("port = 1"), "not a key of [listen]"),
            (capacity("cpus = 0"), "0.1 to 65536"),
            (capacity("cpus = -1.5"), "0.1 to 65536"),
            (capacity("cpus = nan"), "0.1 to 65536"),
            (capacity("cpus = \"8\""), "must be a number"),
            (capacity("oversubscribe = 17"), "0.1 to 16"),
            (capacity("memory = \"none\""), "at least \"1MiB\""),
            (capacity("memory = 1"), "`memory` must be a string"),
            (capacity("waiting = -1"), "1 to 1000000"),
            (capacity("queue = \"61min\""), "\"100ms\" to \"1h\""),
            (capacity("queue = \"0s\""), "\"100ms\" to \"1h\""),
            (capacity("sessions = 0"), "1 to 10000"),
            (limits("body = \"1023B\""), "at least \"1KiB\""),
            (limits("body = \"64MB\""), "such as \"64MiB\""),
            (limits("buffers = \"32MiB\""), "a body of 64MiB does not fit into buffers of 32MiB"),
            (limits("body = \"65MiB\""), "a request has at most 64MiB"),
            (limits("buffers = \"32MiB\""), "a body of 64MiB does not fit"),
            (limits("drain = \"2h\""), "\"100ms\" to \"1h\""),
            (limits("stream_size = \"8B\""), "at least \"1KiB\""),
        ] {
            let error = parse(&text).unwrap_err();
            assert!(error.contains(said) && error.contains("/etc/stockade/serve.toml:"), "{text}: {error}");
            assert_eq!(error.lines().filter(|line| line.starts_with("error")).count(), 1, "{text}: {error}");
        }
    }
}
