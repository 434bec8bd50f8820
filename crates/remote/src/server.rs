//! The address of a service, as `--server` has it.

use std::path::PathBuf;

use stockade_connect::is_loopback;
use ureq::http::{Uri, uri::Scheme};

use crate::RemoteError;

/// Where a service listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// On a UNIX socket.
    Unix(PathBuf),
    /// Over TCP; without a slash at its end.
    Http(Uri),
}

impl Address {
    /// # Errors
    /// It is no address of a service.
    pub fn parse(url: &str) -> Result<Self, RemoteError> {
        let refuse = |why| RemoteError::Url { url: url.to_owned(), why };
        if let Some(path) = url.strip_prefix("unix:") {
            let path = path.strip_prefix("//").unwrap_or(path);
            let is_absolute = path.starts_with('/');
            return if is_absolute { Ok(Address::Unix(path.into())) } else { Err(refuse("the path of a UNIX socket is absolute")) };
        }
        if !["http://", "https://"].iter().any(|scheme| url.starts_with(scheme)) {
            return Err(refuse("it begins with none of unix:, http:// and https://"));
        }
        let uri: Uri = url.parse().map_err(|_| refuse("it is no URL"))?;
        let authority = uri.authority().map(|authority| authority.as_str()).unwrap_or_default();
        if authority.contains('@') {
            return Err(refuse("a name or a key stands in it, which other processes can see; STOCKADE_KEY_FILE names the file of the key"));
        }
        if url.contains(['?', '#']) {
            return Err(refuse("it has `?` or `#`"));
        }
        if uri.host().unwrap_or_default().is_empty() || authority.ends_with(':') {
            return Err(refuse("it names no host, or no port behind `:`"));
        }
        url.trim_end_matches('/').parse().map(Address::Http).map_err(|_| refuse("it is no URL"))
    }

    /// The URL of a path there.
    pub fn url(&self, path: &str) -> String {
        match self {
            Address::Unix(_) => format!("http://localhost{path}"),
            Address::Http(base) => format!("{}{path}", base.to_string().trim_end_matches('/')),
        }
    }

    /// For people.
    pub fn name(&self) -> String {
        match self {
            Address::Unix(path) => format!("unix:{}", path.display()),
            Address::Http(base) => base.to_string().trim_end_matches('/').to_owned(),
        }
    }

    /// Whether what is sent there leaves this host.
    pub fn is_local(&self) -> bool {
        match self {
            Address::Unix(_) => true,
            Address::Http(base) => is_loopback(base.host().unwrap_or_default()),
        }
    }

    /// Whether a key crosses a network that others may listen to.
    pub fn is_open(&self) -> bool {
        !self.is_local() && matches!(self, Address::Http(base) if base.scheme() == Some(&Scheme::HTTP))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]

    use super::*;

    #[test]
    fn addresses_are_what_the_service_prints_or_refused_with_a_reason() {
        for (url, there) in [
            ("unix:/run/s", "http://localhost/live"),
            ("unix:///run/s", "http://localhost/live"),
            ("http://127.0.0.1:8722", "http://127.0.0.1:8722/live"),
            ("https://runs.example.com/", "https://runs.example.com/live"),
            ("https://example.com:1/stockade/", "https://example.com:1/stockade/live"),
            ("http://[::1]:8722", "http://[::1]:8722/live"),
        ] {
            assert_eq!(Address::parse(url).unwrap().url("/live"), there, "{url}");
        }
        for (url, words) in [
            ("unix:s", "absolute"),
            ("localhost:8722", "begins with none"),
            ("ftp://x", "begins with none"),
            ("http://", "no URL"),
            ("http://:1", "names no host"),
            ("http://h:", "no port"),
            ("http://sd_x@h", "STOCKADE_KEY_FILE"),
            ("http://h/?k=1", "`?`"),
            ("http://h/#a", "`#`"),
            ("http://a b", "no URL"),
        ] {
            let error = Address::parse(url).unwrap_err().to_string();
            assert!(error.contains(words), "{url}: {error}");
        }
    }

    #[test]
    fn a_key_that_leaves_the_host_unencrypted_is_noticed() {
        for (url, is_open) in [
            ("unix:/s", false),
            ("http://127.8.0.1:1", false),
            ("http://[::1]:1", false),
            ("http://localhost", false),
            ("https://example.com", false),
            ("http://example.com", true),
            ("http://localhost.example.com", true),
            ("http://10.0.0.1", true),
        ] {
            assert_eq!(Address::parse(url).unwrap().is_open(), is_open, "{url}");
        }
    }
}
