//! Names of images as people write them: `[HOST[:PORT]/]NAME[:TAG][@DIGEST]`.
//!
//! The grammar is that of <https://github.com/distribution/reference>: a name without a host is
//! Docker Hub's, one without a part before a slash is its `library/`, and without tag and digest the
//! tag is `latest`. What is accepted needs no escaping in a URL.

use std::{fmt, str::FromStr};

use stockade_images::Digest;

const DOCKER_HUB: &str = "docker.io";
/// Where Docker Hub speaks the protocol.
const DOCKER_HUB_API: &str = "registry-1.docker.io";
const MAX_REPOSITORY_LEN: usize = 255;
const MAX_TAG_LEN: usize = 128;
const MAX_HOST_LEN: usize = 253;

/// An image of a registry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reference {
    host: String,
    repository: String,
    /// None where a digest alone is named.
    tag: Option<String>,
    digest: Option<Digest>,
}

/// What is wrong with a reference.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text} names no image of a registry: {why}; write [HOST/]NAME[:TAG][@sha256:DIGEST], as python:3.13-slim or ghcr.io/owner/name")]
pub struct ReferenceError {
    /// What was written.
    pub text: String,
    /// What is wrong.
    pub why: &'static str,
}

impl Reference {
    /// The registry's host, with its port if one was named; `docker.io` for Docker Hub.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// The host that speaks the protocol.
    pub fn api_host(&self) -> &str {
        if self.host == DOCKER_HUB { DOCKER_HUB_API } else { &self.host }
    }

    /// The name without host, tag and digest.
    pub fn repository(&self) -> &str {
        &self.repository
    }

    /// The digest, if it names one.
    pub fn digest(&self) -> Option<&Digest> {
        self.digest.as_ref()
    }

    /// What is asked for: the digest, else the tag.
    pub fn wanted(&self) -> String {
        self.digest.as_ref().map(Digest::to_string).or_else(|| self.tag.clone()).unwrap_or_default()
    }
}

impl fmt::Display for Reference {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}/{}", self.host, self.repository)?;
        self.tag.as_ref().map_or(Ok(()), |tag| write!(formatter, ":{tag}"))?;
        self.digest.as_ref().map_or(Ok(()), |digest| write!(formatter, "@{digest}"))
    }
}

impl FromStr for Reference {
    type Err = ReferenceError;

    fn from_str(text: &str) -> Result<Self, ReferenceError> {
        parse(text).map_err(|why| ReferenceError { text: text.to_owned(), why })
    }
}

fn parse(text: &str) -> Result<Reference, &'static str> {
    if text.contains("://") {
        return Err("it has a scheme");
    }
    let (named, digest) = match text.split_once('@') {
        Some((named, digest)) => (named, Some(digest.parse().map_err(|_| "what follows `@` is not `sha256:` and 64 hexadecimal digits")?)),
        None => (text, None),
    };
    let is_host = |part: &str| part == "localhost" || part.contains(['.', ':']);
    let (host, path) = match named.split_once('/') {
        Some((host, path)) if is_host(host) => (host.to_ascii_lowercase(), path),
        _ => (DOCKER_HUB.to_owned(), named),
    };
    check_host(&host)?;
    let (path, tag) = match path.split_once(':') {
        Some((path, tag)) => (path, Some(tag)),
        None => (path, digest.is_none().then_some("latest")),
    };
    if tag.is_some_and(|tag| !is_tag(tag)) {
        return Err("its tag is not up to 128 letters, digits and `_.-`, of which the first is no `.` or `-`");
    }
    let host = if ["index.docker.io", DOCKER_HUB_API].contains(&&*host) { DOCKER_HUB.to_owned() } else { host };
    let repository = if host == DOCKER_HUB && !path.contains('/') { format!("library/{path}") } else { path.to_owned() };
    if repository.len() > MAX_REPOSITORY_LEN || !path.split('/').all(is_component) {
        return Err("its name is not lower-case letters and digits, with `.`, `_` or `-` between them, in parts divided by `/`");
    }
    Ok(Reference { host, repository, tag: tag.map(str::to_owned), digest })
}

/// Letters and digits, with `.`, `_`, `__` or any number of `-` between two of them.
fn is_component(part: &str) -> bool {
    let is_plain = |byte: &u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let bytes = part.as_bytes();
    let ends_plain = bytes.first().is_some_and(is_plain) && bytes.last().is_some_and(is_plain);
    let separators = bytes.split(is_plain).filter(|between| !between.is_empty());
    ends_plain && separators.into_iter().all(|between| matches!(between, b"." | b"_" | b"__") || between.iter().all(|byte| *byte == b'-'))
}

fn is_tag(tag: &str) -> bool {
    let is_word = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
    let is_first_fine = tag.bytes().next().is_some_and(is_word);
    is_first_fine && tag.len() <= MAX_TAG_LEN && tag.bytes().all(|byte| is_word(byte) || matches!(byte, b'.' | b'-'))
}

/// A name, an IPv4 address or an IPv6 address in brackets; perhaps a port.
pub(crate) fn check_host(host: &str) -> Result<(), &'static str> {
    let (name, port) = match host.strip_prefix('[') {
        Some(rest) => {
            let (address, rest) = rest.split_once(']').ok_or("its host has no `]`")?;
            address.parse::<std::net::Ipv6Addr>().map_err(|_| "what stands in brackets is no IPv6 address")?;
            ("", if rest.is_empty() { None } else { Some(rest.strip_prefix(':').ok_or("something follows `]`")?) })
        }
        None => host.split_once(':').map_or((host, None), |(name, port)| (name, Some(port))),
    };
    let is_number = |port: &str| port.bytes().all(|byte| byte.is_ascii_digit()) && port.parse::<u16>().is_ok_and(|port| port > 0);
    if port.is_some_and(|port| !is_number(port)) {
        return Err("its port is no number from 1 to 65535");
    }
    let is_label = |label: &str| {
        let is_fine = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
        (1..=63).contains(&label.len()) && label.bytes().all(is_fine) && !label.starts_with('-') && !label.ends_with('-')
    };
    if !host.starts_with('[') && (name.len() > MAX_HOST_LEN || !name.split('.').all(is_label)) {
        return Err("its host is no name and no address");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]

    use super::*;

    const HEX: &str = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

    #[test]
    fn names_are_completed_as_docker_does() {
        for (text, host, repository, wanted) in [
            ("python", "registry-1.docker.io", "library/python", "latest"),
            ("python:3.13-slim", "registry-1.docker.io", "library/python", "3.13-slim"),
            ("owner/name", "registry-1.docker.io", "owner/name", "latest"),
            ("docker.io/python", "registry-1.docker.io", "library/python", "latest"),
            ("index.docker.io/python", "registry-1.docker.io", "library/python", "latest"),
            ("ghcr.io/a/b/c:1", "ghcr.io", "a/b/c", "1"),
            ("GHCR.io/a", "ghcr.io", "a", "latest"),
            ("localhost/a", "localhost", "a", "latest"),
            ("localhost:5000", "registry-1.docker.io", "library/localhost", "5000"),
            ("localhost:5000/a:b", "localhost:5000", "a", "b"),
            ("127.0.0.1:5000/a__b/c--d.e_f", "127.0.0.1:5000", "a__b/c--d.e_f", "latest"),
            ("[::1]:5000/a", "[::1]:5000", "a", "latest"),
        ] {
            let reference: Reference = text.parse().unwrap();
            assert_eq!((reference.api_host(), reference.repository(), &*reference.wanted()), (host, repository, wanted), "{text}");
            assert_eq!(reference.to_string().parse(), Ok(reference.clone()), "{reference}");
        }
        let both: Reference = format!("python:3@sha256:{HEX}").parse().unwrap();
        assert_eq!((both.wanted(), both.to_string()), (format!("sha256:{HEX}"), format!("docker.io/library/python:3@sha256:{HEX}")));
    }

    #[test]
    fn what_names_no_image_is_refused_with_a_reason() {
        let long = "a".repeat(256);
        for (text, words) in [
            ("", "name is not"),
            ("https://ghcr.io/a", "scheme"),
            ("Python", "name is not"),
            ("a//b", "name is not"),
            ("a/../b", "name is not"),
            ("ghcr.io/..", "name is not"),
            ("a.", "name is not"),
            ("a___b", "name is not"),
            ("a._b", "name is not"),
            ("a%2fb", "name is not"),
            ("a?b", "name is not"),
            (&long, "name is not"),
            ("a:", "its tag"),
            ("a:.b", "its tag"),
            ("a:b c", "its tag"),
            ("a:b/c:d", "port"),
            ("a@sha256:ab", "follows `@`"),
            ("a@sha512:ab", "follows `@`"),
            ("u:p@h.io/a", "follows `@`"),
            ("h.io:0/a", "port"),
            ("h.io:99999/a", "port"),
            ("h.io:/a", "port"),
            ("h..io/a", "host"),
            ("-h.io/a", "host"),
            ("[::1/a", "`]`"),
            ("[::1]x:1/a", "follows `]`"),
            ("[::x]:1/a", "brackets"),
        ] {
            let error = text.parse::<Reference>().unwrap_err().to_string();
            assert!(error.contains(words), "{text}: {error}");
        }
    }
}
