//! Requests to one registry, and to the hosts that it leads to.
//!
//! What authorises a request goes to the registry's own origin alone. A redirect is followed without
//! it, never from https to http, and a challenge of another host than the registry is an error: a
//! stranger who asks for a password gets none (CVE-2020-15157). Parts of an answer have limits.

use std::{
    fmt,
    io::Read,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread,
    time::Duration,
};

use serde::Deserialize;
use sha2::{Digest as _, Sha256};
use stockade_connect::{GetentResolver, is_loopback, proxy, tls, tls_error, words_of};
use stockade_images::Digest;
use stockade_protocol::text::visible;
use ureq::{
    Agent, Body, BodyReader, Error, Timeout,
    config::Config,
    http::{HeaderMap, Response, StatusCode, Uri, header, header::HeaderName},
    unversioned::transport::{ConnectProxyConnector, Connector, RustlsConnector, TcpConnector},
};

use crate::{
    Blob, FetchError, Options, Reference, Timeouts,
    challenge::Challenge,
    credentials::{self, Credentials},
    reference::check_host,
    token,
};

const MAX_HEAD_LEN: usize = 64 << 10;
const MAX_REDIRECTS: usize = 5;
/// Of an error's body, and of its message.
const MAX_ERROR_LEN: usize = 16 << 10;
const MAX_MESSAGE_LEN: usize = 200;
/// Attempts at one request or blob.
const ATTEMPTS: u32 = 5;
const MAX_WAIT: Duration = Duration::from_secs(60);
/// Registries themselves take no more.
const MAX_MANIFEST_LEN: u64 = 4 << 20;
const DOCKER_CONTENT_DIGEST: HeaderName = HeaderName::from_static("docker-content-digest");
/// Indexes and manifests, as OCI and as docker call them.
const MANIFESTS: &str = "application/vnd.oci.image.index.v1+json, application/vnd.oci.image.manifest.v1+json, \
     application/vnd.docker.distribution.manifest.list.v2+json, application/vnd.docker.distribution.manifest.v2+json";

/// A registry, for one reference. Copies are the same client.
#[derive(Clone)]
pub struct Registry(Arc<Client>);

struct Client {
    reference: Reference,
    options: Options,
    credentials: Credentials,
    /// Scheme and host, without a slash at the end.
    base: Uri,
    agent: Agent,
    /// What the registry's own origin is sent.
    authorization: Mutex<Option<String>>,
}

/// Without what authorises.
impl fmt::Debug for Registry {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Registry({})", self.0.reference)
    }
}

/// An index or a manifest.
#[derive(Debug)]
pub struct Manifest {
    /// Its digest, of its bytes.
    pub digest: Digest,
    /// As they were sent.
    pub bytes: Vec<u8>,
}

/// What is asked for.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Kind {
    /// A small thing of these types.
    Document(&'static str),
    /// A layer, without the bytes before `from` if the server can.
    Blob { from: u64 },
}

/// An answer that has what was asked for.
pub(crate) struct Answer {
    /// Host and port.
    pub(crate) server: String,
    /// 200 or 206.
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    pub(crate) body: BodyReader<'static>,
}

impl Answer {
    pub(crate) fn text(&self, name: HeaderName) -> Option<&str> {
        self.headers.get(name)?.to_str().ok()
    }

    /// All of a body that may have so many bytes.
    pub(crate) fn read(self, most: u64, what: &str, silence: Duration) -> Result<Vec<u8>, FetchError> {
        let mut bytes = Vec::new();
        let server = self.server;
        self.body.take(most + 1).read_to_end(&mut bytes).map_err(|error| broken(&server, Error::from(error), silence))?;
        if bytes.len() as u64 > most {
            return Err(FetchError::Answer { server, what: format!("{what} has more than {} KiB", most >> 10) });
        }
        Ok(bytes)
    }
}

impl Registry {
    /// A client of a reference's registry, which is not asked yet.
    ///
    /// # Errors
    /// An option, the credentials or the certificates cannot be used.
    pub fn new(reference: Reference, options: Options) -> Result<Self, FetchError> {
        let credentials = options.credentials.as_deref().map_or(Ok(Credentials::None), |path| credentials::of_file(path, &reference))?;
        for (option, hosts) in [("--insecure-http", &options.insecure_http), ("--auth-host", &options.auth_hosts)] {
            for host in hosts {
                check_host(host).map_err(|why| FetchError::Host { option, host: host.clone(), why })?;
            }
        }
        let host = reference.api_host();
        // One on this host speaks TLS if its authority was named.
        let is_plain = is_named(&options.insecure_http, host) || is_loopback(name_of(host)) && options.ca.is_none();
        let base = format!("{}://{host}", if is_plain { "http" } else { "https" });
        let base: Uri = base.parse().map_err(|_| unusable_url(host))?;
        let timeouts = &options.timeouts;
        let config = Config::builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .user_agent(concat!("stockade-image/", env!("CARGO_PKG_VERSION")))
            .max_response_header_size(MAX_HEAD_LEN)
            .timeout_resolve(Some(timeouts.connect))
            .timeout_connect(Some(timeouts.connect))
            .timeout_recv_response(Some(timeouts.silence))
            .timeout_per_read(Some(timeouts.silence))
            .timeout_per_write(Some(timeouts.silence))
            .tls_config(tls(options.ca.as_deref())?)
            .build();
        let connector = ().chain(ConnectProxyConnector::default()).chain(TcpConnector::default()).chain(RustlsConnector::default());
        let agent = Agent::with_parts(config, connector, GetentResolver);
        let authorization = Mutex::default();
        Ok(Registry(Arc::new(Client { reference, options, credentials, base, agent, authorization })))
    }

    /// What the reference names: an index or a manifest. A tag may name another the next time.
    ///
    /// # Errors
    /// The registry does not give it, or gives another than the digest of the reference says.
    pub fn resolve(&self) -> Result<Manifest, FetchError> {
        let reference = &self.0.reference;
        let (server, said, found) = self.manifest_of(&reference.wanted(), &reference.to_string())?;
        // Of a tag the registry says the digest itself, if it wishes.
        let said = said.and_then(|said| said.parse().ok());
        match reference.digest().cloned().or(said) {
            Some(wanted) if wanted != found.digest => {
                Err(FetchError::Digest { server, what: reference.to_string(), wanted, got: found.digest })
            }
            _ => Ok(found),
        }
    }

    /// The manifest or index of a digest, which its reader compares.
    ///
    /// # Errors
    /// The registry does not give it.
    pub fn manifest(&self, digest: &Digest) -> Result<Manifest, FetchError> {
        self.manifest_of(&digest.to_string(), &format!("the manifest {digest}")).map(|(.., found)| found)
    }

    /// A blob of so many bytes, whose digest its reader compares. It is asked for when it is read.
    pub fn blob(&self, digest: &Digest, size: u64) -> Blob {
        Blob::new(self.clone(), digest.clone(), size)
    }

    /// Where it came from, what the registry says of its digest, and what it is.
    fn manifest_of(&self, wanted: &str, what: &str) -> Result<(String, Option<String>, Manifest), FetchError> {
        let mut attempts = self.attempts();
        loop {
            let once = || {
                let answer = self.get(&format!("manifests/{wanted}"), what, Kind::Document(MANIFESTS))?;
                let (server, said) = (answer.server.clone(), answer.text(DOCKER_CONTENT_DIGEST).map(str::to_owned));
                let bytes = answer.read(MAX_MANIFEST_LEN, "a manifest", self.timeouts().silence)?;
                Ok((server, said, Manifest { digest: Digest::of_bytes(&Sha256::digest(&bytes).into()), bytes }))
            };
            match once() {
                Err(error) => attempts.after(error)?,
                done => return done,
            }
        }
    }

    pub(crate) fn timeouts(&self) -> &Timeouts {
        &self.0.options.timeouts
    }

    pub(crate) fn attempts(&self) -> Attempts {
        Attempts { left: ATTEMPTS - 1, pause: self.timeouts().pause }
    }

    /// The registry, for people.
    pub(crate) fn server(&self) -> String {
        server_of(self.base())
    }

    pub(crate) fn base(&self) -> &Uri {
        &self.0.base
    }

    pub(crate) fn reference(&self) -> &Reference {
        &self.0.reference
    }

    pub(crate) fn credentials(&self) -> &Credentials {
        &self.0.credentials
    }

    /// Whether the user lets a host have the password.
    pub(crate) fn is_auth_host(&self, host: &str) -> bool {
        is_named(&self.0.options.auth_hosts, host)
    }

    fn authorization(&self) -> MutexGuard<'_, Option<String>> {
        self.0.authorization.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks the registry for what stands below the image's name; `what` is for errors.
    pub(crate) fn get(&self, path: &str, what: &str, kind: Kind) -> Result<Answer, FetchError> {
        let first = format!("{}/v2/{}/{path}", self.base().to_string().trim_end_matches('/'), self.reference().repository());
        let first: Uri = first.parse().map_err(|_| unusable_url(&self.server()))?;
        let mut has_asked_for_token = false;
        let (mut url, mut redirects) = (first.clone(), 0);
        loop {
            let is_own = is_same_origin(&url, self.base());
            let authorization = if is_own { self.authorization().clone() } else { None };
            let (head, body) = self.send(&url, authorization.as_deref(), kind)?.into_parts();
            let server = server_of(&url);
            match head.status.as_u16() {
                200 | 206 => return Ok(Answer { server, status: head.status, headers: head.headers, body: body.into_reader() }),
                301 | 302 | 303 | 307 | 308 => {
                    redirects += 1;
                    let place = head.headers.get(header::LOCATION).and_then(|place| place.to_str().ok()).unwrap_or_default();
                    url = self.followed(&url, place, redirects)?;
                }
                401 if is_own && !has_asked_for_token => {
                    has_asked_for_token = true;
                    let challenges = challenges_of(&head.headers, &server)?;
                    let answer = token::authorization(self, &challenges, what)?;
                    *self.authorization() = Some(answer);
                    url = first.clone();
                }
                401 if !is_own => {
                    let what = format!("it asks for a password, and is another host than the registry {}", self.server());
                    return Err(FetchError::Answer { server, what });
                }
                status => return Err(self.refusal(&url, status, &head.headers, body, what)),
            }
        }
    }

    /// Sends one request.
    pub(crate) fn send(&self, url: &Uri, authorization: Option<&str>, kind: Kind) -> Result<Response<Body>, FetchError> {
        let config = self.0.agent.get(url.clone()).config().proxy(proxy(url)?);
        let (config, accept) = match kind {
            Kind::Document(accept) => (config.timeout_global(Some(self.timeouts().document)), accept),
            Kind::Blob { .. } => (config, "*/*"),
        };
        let mut builder = config.build().header(header::ACCEPT, accept);
        if let Some(authorization) = authorization {
            builder = builder.header(header::AUTHORIZATION, authorization);
        }
        if let Kind::Blob { from: from @ 1.. } = kind {
            builder = builder.header(header::RANGE, format!("bytes={from}-"));
        }
        builder.call().map_err(|error| broken(&server_of(url), error, self.timeouts().silence))
    }

    /// Where a redirect leads.
    fn followed(&self, from: &Uri, place: &str, redirects: usize) -> Result<Uri, FetchError> {
        let refuse = |to: String, why| FetchError::Redirect { server: server_of(from), to, why };
        let absolute = if place.starts_with('/') && !place.starts_with("//") {
            format!("{}://{}{place}", from.scheme_str().unwrap_or_default(), from.authority().map(|host| host.as_str()).unwrap_or_default())
        } else {
            place.to_owned()
        };
        let url: Uri =
            absolute.split('#').next().unwrap_or_default().parse().map_err(|_| refuse(String::from("no URL"), "it is no URL"))?;
        let to = server_of(&url);
        if redirects > MAX_REDIRECTS {
            return Err(refuse(to, "it is the sixth redirect in succession"));
        }
        self.check_scheme(from, &url).map_err(|why| refuse(to, why))?;
        Ok(url)
    }

    /// Whether a URL that a server named may be asked.
    pub(crate) fn check_scheme(&self, from: &Uri, to: &Uri) -> Result<(), &'static str> {
        let Some(authority) = to.authority().filter(|authority| !authority.as_str().contains('@')) else {
            return Err("it names no host, or a user before the host");
        };
        match (from.scheme_str(), to.scheme_str()) {
            (_, Some("https")) => Ok(()),
            (Some("http"), Some("http")) => {
                let is_local = is_loopback(to.host().unwrap_or_default()) && is_loopback(self.base().host().unwrap_or_default());
                if is_local || is_named(&self.0.options.insecure_http, authority.as_str()) {
                    Ok(())
                } else {
                    Err("it is plain HTTP, which --insecure-http allows for a host")
                }
            }
            (_, Some("http")) => Err("from https to http nothing is followed"),
            _ => Err("it is neither https nor http"),
        }
    }

    /// The error of an answer that has not what was asked for.
    pub(crate) fn refusal(&self, url: &Uri, status: u16, headers: &HeaderMap, body: Body, what: &str) -> FetchError {
        let (server, what, message) = (server_of(url), what.to_owned(), message_of(body));
        match status {
            404 => FetchError::NotFound { server, what },
            401 | 403 => FetchError::Denied { server, what, status, message, hint: self.hint() },
            429 | 500.. => {
                let retry_after = headers.get(header::RETRY_AFTER).and_then(|value| value.to_str().ok()?.parse().ok());
                FetchError::Busy { server, status, message, retry_after }
            }
            // So answers one that speaks TLS.
            400 if url.scheme_str() == Some("http") => FetchError::Answer {
                server,
                what: String::from("status 400 by plain HTTP; if it speaks TLS, name its authority with --ca"),
            },
            _ => FetchError::Answer { server, what: format!("status {status} {message}").trim_end().to_owned() },
        }
    }

    /// The registry wants a password, and there is none.
    pub(crate) fn denied(&self, what: &str) -> FetchError {
        FetchError::Denied { server: self.server(), what: what.to_owned(), status: 401, message: String::new(), hint: self.hint() }
    }

    fn hint(&self) -> String {
        match self.credentials() {
            Credentials::Basic(_) => String::from("the name, the password of the credentials file, or its rights are wrong"),
            Credentials::Helper(helper) => format!(
                "it was asked without a password: docker-credential-{helper} has one, and is not run; write {{\"auths\": {{\"{}\": \
                 {{\"auth\": \"base64 of USER:PASSWORD\"}}}}}} to a file of yours alone, and name it with --creds-file",
                self.reference().host()
            ),
            Credentials::None => String::from("there is no such image, or it needs a password: --creds-file names the file that has it"),
        }
    }
}

/// How often something is still tried.
pub(crate) struct Attempts {
    left: u32,
    pause: Duration,
}

impl Attempts {
    /// Waits before another attempt, where an error may pass and there is one left.
    pub(crate) fn after(&mut self, error: FetchError) -> Result<(), FetchError> {
        let asked = if let FetchError::Busy { retry_after: Some(seconds), .. } = error { Duration::from_secs(seconds) } else { self.pause };
        if !error.is_passing() || self.left == 0 || asked > MAX_WAIT {
            return Err(error);
        }
        thread::sleep(asked.max(self.pause));
        self.left -= 1;
        self.pause *= 2;
        Ok(())
    }
}

/// What went wrong before there was a head, or before the end of a body.
pub(crate) fn broken(server: &str, error: Error, silence: Duration) -> FetchError {
    let (server, why) = (server.to_owned(), words_of(&error, silence));
    match tls_error(&error) {
        Some(rustls_error) if rustls_error.to_string().starts_with("invalid peer certificate") => {
            return FetchError::Untrusted { server, why: rustls_error.to_string() };
        }
        Some(rustls_error) => return FetchError::Unreachable { server, why: format!("no TLS is spoken there: {rustls_error}") },
        None => {}
    }
    match &error {
        Error::Io(error) if error.kind() == std::io::ErrorKind::ConnectionRefused => FetchError::Unreachable { server, why },
        Error::HostNotFound
        | Error::ConnectProxyFailed(_)
        | Error::ConnectionFailed
        | Error::Timeout(Timeout::Connect | Timeout::Resolve) => FetchError::Unreachable { server, why },
        Error::Io(_) | Error::Timeout(_) | Error::BodyStalled => FetchError::Broken { server, why },
        _ => FetchError::Answer { server, what: why },
    }
}

fn challenges_of(headers: &HeaderMap, server: &str) -> Result<Vec<Challenge>, FetchError> {
    let lines = headers.get_all(header::WWW_AUTHENTICATE).iter().map(|line| line.to_str().ok().and_then(Challenge::parse));
    let all: Option<Vec<Vec<Challenge>>> = lines.collect();
    let wrong = || FetchError::Answer { server: server.to_owned(), what: String::from("its header WWW-Authenticate cannot be read") };
    all.map(|all| all.concat()).ok_or_else(wrong)
}

/// What a registry says in an error, on one line.
fn message_of(body: Body) -> String {
    #[derive(Deserialize)]
    struct Errors {
        errors: Vec<Problem>,
    }
    #[derive(Deserialize)]
    struct Problem {
        #[serde(default)]
        message: String,
    }
    // What has come with the head: a server that has more to say is not waited for.
    let mut bytes = vec![0; MAX_ERROR_LEN];
    let count = body.into_reader().read(&mut bytes).unwrap_or(0);
    let found =
        serde_json::from_slice(bytes.get(..count).unwrap_or_default()).ok().and_then(|found: Errors| found.errors.into_iter().next());
    let message: String = found.map(|problem| problem.message).unwrap_or_default().chars().take(MAX_MESSAGE_LEN).collect();
    visible(&message).replace('\n', " ").trim().to_owned()
}

/// A host of a URL without what may be secret in it.
pub(crate) fn server_of(url: &Uri) -> String {
    let port = url.port().map(|port| format!(":{port}")).unwrap_or_default();
    visible(&format!("{}{port}", url.host().unwrap_or("no host")))
}

fn unusable_url(host: &str) -> FetchError {
    FetchError::Unreachable { server: host.to_owned(), why: String::from("the address is no URL") }
}

/// The host without its port.
pub(crate) fn name_of(host: &str) -> &str {
    match host.rfind(':') {
        Some(at) if !host.ends_with(']') => host.get(..at).unwrap_or(host),
        _ => host,
    }
}

/// Whether a list has a host, with its port or without one.
pub(crate) fn is_named(list: &[String], host: &str) -> bool {
    list.iter().any(|named| named.eq_ignore_ascii_case(host) || named.eq_ignore_ascii_case(name_of(host)))
}

/// Whether two URLs have one scheme, host and port.
pub(crate) fn is_same_origin(one: &Uri, other: &Uri) -> bool {
    let port = |url: &Uri| url.port_u16().unwrap_or(if url.scheme_str() == Some("https") { 443 } else { 80 });
    let is_same_host = one.host().unwrap_or_default().eq_ignore_ascii_case(other.host().unwrap_or_default());
    is_same_host && one.scheme() == other.scheme() && port(one) == port(other)
}
