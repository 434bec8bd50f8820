//! Digests as the OCI image specification writes them, of which only `sha256:` and 64 hex digits is
//! one here. A value of this type is safe as the name of a file.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

/// A SHA-256 digest.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Digest(String);

/// A text that is no digest.
#[derive(Debug, thiserror::Error)]
#[error("{0:?} is no digest: `sha256:` and 64 hex digits in lower case are one")]
pub struct NotADigest(pub String);

impl Digest {
    /// The digest of these 32 bytes.
    pub fn of_bytes(bytes: &[u8; 32]) -> Self {
        Digest(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
    }

    /// Its 64 hex digits.
    pub fn hex(&self) -> &str {
        &self.0
    }

    /// From 64 hex digits.
    ///
    /// # Errors
    /// Other than 64 hex digits in lower case.
    pub fn from_hex(hex: &str) -> Result<Self, NotADigest> {
        let is_hex = hex.len() == 64 && hex.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
        if is_hex { Ok(Digest(hex.to_owned())) } else { Err(NotADigest(hex.to_owned())) }
    }
}

impl FromStr for Digest {
    type Err = NotADigest;

    fn from_str(text: &str) -> Result<Self, NotADigest> {
        text.strip_prefix("sha256:").and_then(|hex| Digest::from_hex(hex).ok()).ok_or_else(|| NotADigest(text.to_owned()))
    }
}

impl TryFrom<String> for Digest {
    type Error = NotADigest;

    fn try_from(text: String) -> Result<Self, NotADigest> {
        text.parse()
    }
}

impl From<Digest> for String {
    fn from(digest: Digest) -> String {
        digest.to_string()
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "sha256:{}", self.0)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]

    use super::Digest;

    #[test]
    fn a_digest_is_sha256_and_nothing_that_leads_elsewhere() {
        let good = format!("sha256:{}", "0a".repeat(32));
        assert_eq!(good.parse::<Digest>().unwrap().to_string(), good);
        for bad in ["", "sha256:", "sha256:../../../etc/passwd", &good[1..], &good.to_uppercase(), &format!("{good}0"), "sha512:00"] {
            assert!(bad.parse::<Digest>().is_err(), "{bad}");
        }
        assert!(serde_json::from_str::<Digest>("\"sha256:..\"").is_err());
    }
}
