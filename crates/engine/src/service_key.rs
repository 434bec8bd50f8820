//! Tokens of the keys of a service: how one is made, and the hash that `keys.toml` has of it.
//!
//! A token has 256 random bits, so that its plain SHA-256 tells nothing about it. It is neither
//! stored nor logged here. Who has which token is the front's to find, in constant time.

use std::fmt;

use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use sha2::{Digest, Sha256};
use stockade_policy::service::HASH_PREFIX;
use stockade_protocol::text::hex;

use crate::{Refusal, admit::random_bytes};

/// What every token begins with, so that scanners of repositories and logs can find one.
pub const TOKEN_PREFIX: &str = "sd_";

/// A token that was just made. It is shown once.
pub struct NewToken {
    /// `sd_ID_` and 43 letters.
    pub token: String,
    /// What [`hash_of`] it gives.
    pub hash: String,
}

impl fmt::Debug for NewToken {
    /// Without the token, which must not reach a log.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NewToken").field("hash", &self.hash).finish_non_exhaustive()
    }
}

/// Makes a token for the key of this id.
///
/// # Errors
/// The kernel gives no random bytes.
pub fn new_token(id: &str) -> Result<NewToken, Refusal> {
    let mut random = [0; 32];
    random_bytes(&mut random)?;
    let token = format!("{TOKEN_PREFIX}{id}_{}", URL_SAFE_NO_PAD.encode(random));
    let hash = hash_of(&token);
    Ok(NewToken { token, hash })
}

/// The hash of a whole token, as `keys.toml` has it: `sha256:` and 64 hexadecimal digits.
pub fn hash_of(token: &str) -> String {
    format!("{HASH_PREFIX}{}", hex(&Sha256::digest(token.as_bytes())))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn a_token_has_its_id_and_256_random_bits() {
        let mut seen = BTreeSet::new();
        for id in ["rl", "a.b_c-d", "_"] {
            let NewToken { token, hash } = new_token(id).unwrap();
            let random = token.strip_prefix(&format!("sd_{id}_")).unwrap();
            assert_eq!(random.len(), 43);
            assert_eq!(URL_SAFE_NO_PAD.decode(random).unwrap().len(), 32);
            assert_eq!(hash, hash_of(&token));
            assert!(seen.insert(random.to_owned()));
        }
        let [one, other] = [new_token("rl").unwrap(), new_token("rl").unwrap()];
        assert!(one.token != other.token && one.hash != other.hash);
    }

    #[test]
    fn the_hash_is_of_the_whole_token() {
        // As `printf %s sd_rl_abc | sha256sum` has it.
        assert_eq!(hash_of("sd_rl_abc"), "sha256:be6a2eb2bb5a80999b10a047512ab9ec7019b9c7c59f3ebb4bc2a4355785f77e");
        assert_ne!(hash_of("sd_rl_abc"), hash_of("abc"));
    }

    #[test]
    fn what_is_printed_of_a_token_for_debugging_is_its_hash() {
        let new = new_token("rl").unwrap();
        let printed = format!("{new:?}");
        assert!(printed.contains(&new.hash) && !printed.contains(&new.token), "{printed}");
    }

    #[test]
    fn the_keys_of_a_service_take_the_hash() {
        use std::path::Path;

        use stockade_policy::service::{Credential, Scope, ServiceKeys, key_table};
        let new = new_token("rl").unwrap();
        let keys =
            ServiceKeys::none(Path::new("/k.toml")).with(&key_table("rl", &new.hash, &["default".to_owned()], &[Scope::Run])).unwrap();
        assert!(matches!(keys.keys[0].credential, Credential::Hash(_)));
        assert_eq!(keys.keys[0].credential.to_string(), new.hash);
    }
}
