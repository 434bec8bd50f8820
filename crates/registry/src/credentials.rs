//! Passwords for registries, from a file in the form of docker's `config.json`.
//!
//! A password is in no error, no log and no argument. A file that others can read or write gives
//! none. Programs that keep passwords (`credsStore`, `credHelpers`) are not run: they would be
//! programs of the caller's PATH, and the error of a registry that refuses says which one was meant.

use std::{
    collections::BTreeMap,
    env, fmt,
    fs::File,
    io::Read,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use base64::{Engine, prelude::BASE64_STANDARD};
use rustix::{
    fs::{Mode, OFlags},
    process::geteuid,
};
use serde::Deserialize;

use crate::{FetchError, Reference};

const MAX_LEN: u64 = 1 << 20;
/// What docker calls Docker Hub in its file.
const DOCKER_HUB: &str = "docker.io";

/// What a registry is told of its user.
#[derive(Debug)]
pub(crate) enum Credentials {
    None,
    Basic(Login),
    /// A program has them.
    Helper(String),
}

/// A name and a password.
pub(crate) struct Login {
    user: String,
    password: String,
}

impl fmt::Debug for Login {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Login")
    }
}

impl Login {
    /// The value of the header `Authorization`.
    pub(crate) fn header(&self) -> String {
        format!("Basic {}", BASE64_STANDARD.encode(format!("{}:{}", self.user, self.password)))
    }
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Config {
    auths: BTreeMap<String, Entry>,
    creds_store: String,
    cred_helpers: BTreeMap<String, String>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Entry {
    auth: String,
    username: String,
    password: String,
    identitytoken: String,
    registrytoken: String,
}

/// Docker's file of this user, where it is: `$DOCKER_CONFIG/config.json`, else `~/.docker/config.json`.
/// None for root, who reads no environment variable and names the file.
pub fn docker_config() -> Option<PathBuf> {
    if geteuid().is_root() {
        return None;
    }
    let place = |name: &str| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let directory = place("DOCKER_CONFIG").or_else(|| Some(place("HOME")?.join(".docker")))?;
    Some(directory.join("config.json")).filter(|path| path.is_file())
}

/// What a file says of a reference's registry.
pub(crate) fn of_file(path: &Path, reference: &Reference) -> Result<Credentials, FetchError> {
    let refuse = |why: String| FetchError::Credentials { path: path.to_owned(), why };
    let failed = |error: std::io::Error| refuse(error.to_string());
    // A pipe is not waited for.
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let file = File::from(rustix::fs::open(path, flags, Mode::empty()).map_err(|errno| failed(errno.into()))?);
    let found = file.metadata().map_err(failed)?;
    if !found.is_file() {
        return Err(refuse("it is no regular file".into()));
    }
    let mut text = Vec::new();
    file.take(MAX_LEN + 1).read_to_end(&mut text).map_err(failed)?;
    if text.len() as u64 > MAX_LEN {
        return Err(refuse(String::from("it has more than 1 MiB")));
    }
    // serde would quote what it found, which may be a password.
    let config: Config = serde_json::from_slice(&text).map_err(|error| {
        refuse(format!("line {} is not the JSON of docker's config.json: {{\"auths\": {{\"HOST\": {{\"auth\": \"…\"}}}}}}", error.line()))
    })?;
    let credentials = config.of(reference).map_err(|why| refuse(why.into()))?;
    if matches!(credentials, Credentials::Basic(_)) {
        if ![0, geteuid().as_raw()].contains(&found.uid()) {
            return Err(refuse(format!("it belongs to uid {}, who is neither root nor you; copy it to a file of yours", found.uid())));
        }
        if found.mode() & 0o077 != 0 {
            let mode = found.mode() & 0o777;
            return Err(refuse(format!(
                "others may read or write it (mode {mode:04o}); make it yours alone: chmod 600 {}",
                path.display()
            )));
        }
    }
    Ok(credentials)
}

impl Config {
    fn of(&self, reference: &Reference) -> Result<Credentials, &'static str> {
        let host = reference.host();
        if let Some(helper) = self.cred_helpers.iter().find(|(key, _)| place_of(key) == host) {
            return Ok(Credentials::Helper(helper.1.clone()));
        }
        // The longest that leads to the image: podman's file also has HOST/OWNER.
        let image = format!("{host}/{}/", reference.repository());
        let covers = |key: &String| image.starts_with(&format!("{}/", place_of(key)));
        let entry = self.auths.iter().filter(|(key, _)| covers(key)).max_by_key(|(key, _)| place_of(key).len());
        let login = entry.map(|(_, entry)| entry.login()).transpose()?.flatten();
        Ok(match login {
            Some(login) => Credentials::Basic(login),
            None if !self.creds_store.is_empty() => Credentials::Helper(self.creds_store.clone()),
            None => Credentials::None,
        })
    }
}

impl Entry {
    fn login(&self) -> Result<Option<Login>, &'static str> {
        if !self.identitytoken.is_empty() || !self.registrytoken.is_empty() {
            return Err("the registry's entry has an `identitytoken` or a `registrytoken`, which are not used here; \
                        write `auth` with the base64 of USER:ACCESS-TOKEN");
        }
        let (user, password) = if self.auth.is_empty() {
            (self.username.clone(), self.password.clone())
        } else {
            let wrong = "the registry's `auth` is not the base64 of USER:PASSWORD";
            let decoded = BASE64_STANDARD.decode(self.auth.trim()).map_err(|_| wrong)?;
            let text = String::from_utf8(decoded).map_err(|_| wrong)?;
            let (user, password) = text.trim_end_matches('\0').split_once(':').ok_or(wrong)?;
            (user.to_owned(), password.to_owned())
        };
        // Docker writes an entry without a password beside `credsStore`.
        if user.is_empty() && password.is_empty() { Ok(None) } else { Ok(Some(Login { user, password })) }
    }
}

/// A key of the file, which may be a URL: `https://index.docker.io/v1/` is `docker.io`.
fn place_of(key: &str) -> String {
    let bare = key.split_once("://").map_or(key, |(_, rest)| rest).trim_end_matches('/');
    let bare = ["/v1", "/v2"].iter().find_map(|end| bare.strip_suffix(end)).unwrap_or(bare).to_ascii_lowercase();
    match bare.split_once('/').map_or((bare.as_str(), ""), |(host, rest)| (host, rest)) {
        ("index.docker.io" | "registry-1.docker.io", rest) => [DOCKER_HUB, rest].join("/").trim_end_matches('/').to_owned(),
        _ => bare,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]

    use super::*;

    fn asked(text: &str, reference: &str) -> Result<String, &'static str> {
        let config: Config = serde_json::from_str(text).unwrap();
        config.of(&reference.parse().unwrap()).map(|found| match found {
            Credentials::None => String::new(),
            Credentials::Basic(login) => format!("{}:{}", login.user, login.password),
            Credentials::Helper(name) => format!("helper {name}"),
        })
    }

    #[test]
    fn a_password_is_its_registrys_alone() {
        let auths = r#"{"auths": {
            "https://index.docker.io/v1/": {"auth": "YTpi"},
            "h.io": {"username": "c", "password": "d:e"},
            "h.io:5000": {"auth": "ZjpnOmg="},
            "h.io/owner": {"auth": "aTpq"},
            "empty.io": {}
        }}"#;
        for (reference, login) in [
            ("python", "a:b"),
            ("docker.io/x/y", "a:b"),
            ("h.io/x", "c:d:e"),
            ("h.io:5000/x", "f:g:h"),
            ("h.io/owner/x", "i:j"),
            ("h.io/owner", "i:j"),
            ("h.io/owners/x", "c:d:e"),
            ("h.io:5001/x", ""),
            ("evil-h.io/x", ""),
            ("h.io.evil.com/x", ""),
            ("sub.h.io/x", ""),
            ("empty.io/x", ""),
        ] {
            assert_eq!(asked(auths, reference).unwrap(), login, "{reference}");
        }
    }

    #[test]
    fn a_pipe_is_refused_and_not_waited_for() {
        let path = env::temp_dir().join(format!("stockade-credentials-{}", std::process::id()));
        rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, Mode::RUSR, 0).unwrap();
        let refused = of_file(&path, &"h.io/x".parse().unwrap()).unwrap_err().to_string();
        assert!(refused.contains("no regular file"), "{refused}");
        // The control: a file in its place.
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, "{}").unwrap();
        assert!(matches!(of_file(&path, &"h.io/x".parse().unwrap()), Ok(Credentials::None)));
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn programs_and_tokens_that_are_not_used_are_named() {
        let helpers = r#"{"credsStore": "desktop", "credHelpers": {"h.io": "ecr-login"}, "auths": {"h.io": {"auth": "YTpi"}, "a.io": {}, "b.io": {"auth": "YTpi"}}}"#;
        for (reference, found) in
            [("h.io/x", "helper ecr-login"), ("a.io/x", "helper desktop"), ("c.io/x", "helper desktop"), ("b.io/x", "a:b")]
        {
            assert_eq!(asked(helpers, reference).unwrap(), found, "{reference}");
        }
        for (entry, words) in
            [(r#"{"identitytoken": "x"}"#, "identitytoken"), (r#"{"auth": "%"}"#, "base64"), (r#"{"auth": "YWI="}"#, "base64")]
        {
            let error = asked(&format!(r#"{{"auths": {{"h.io": {entry}}}}}"#), "h.io/x").unwrap_err();
            assert!(error.contains(words), "{error}");
        }
    }
}
