//! The header `WWW-Authenticate` (RFC 9110, section 11.6.1): by which scheme a server wants to be
//! asked.
//!
//! The bytes are a stranger's. It decides nothing about where a password goes: see `token.rs`.

/// One scheme that a server takes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Challenge {
    /// In lower case.
    pub scheme: String,
    parameters: Vec<(String, String)>,
}

impl Challenge {
    /// The value of a parameter, the name in lower case. One that stands twice has its first value.
    pub fn parameter(&self, name: &str) -> Option<&str> {
        self.parameters.iter().find(|(found, _)| found == name).map(|(_, value)| value.as_str())
    }

    /// All challenges of a header; none where it is not one.
    pub fn parse(header: &str) -> Option<Vec<Challenge>> {
        let mut rest = Rest(header);
        let mut found: Vec<Challenge> = Vec::new();
        loop {
            rest.skip(|letter| matches!(letter, ' ' | '\t' | ','));
            if rest.0.is_empty() {
                return Some(found);
            }
            let word = rest.token()?.to_ascii_lowercase();
            let is_scheme =
                rest.0.is_empty() || rest.0.starts_with([' ', '\t', ',']) && !rest.0.trim_start_matches([' ', '\t']).starts_with('=');
            if is_scheme {
                found.push(Challenge { scheme: word, ..Challenge::default() });
                continue;
            }
            rest.skip(|letter| matches!(letter, ' ' | '\t'));
            rest.0 = rest.0.strip_prefix('=')?;
            rest.skip(|letter| matches!(letter, ' ' | '\t'));
            let value = if rest.0.starts_with('"') { rest.quoted()? } else { rest.token()?.to_owned() };
            found.last_mut()?.parameters.push((word, value));
        }
    }
}

/// What is still to be read.
struct Rest<'a>(&'a str);

impl<'a> Rest<'a> {
    fn skip(&mut self, is_blank: impl Fn(char) -> bool) {
        self.0 = self.0.trim_start_matches(is_blank);
    }

    /// One letter or more, of those that RFC 9110 allows in a token, and `/`, which unquoted URLs have.
    fn token(&mut self) -> Option<&'a str> {
        let is_token = |letter: char| letter.is_ascii_alphanumeric() || "!#$%&'*+-.^_`|~/:".contains(letter);
        let length = self.0.find(|letter| !is_token(letter)).unwrap_or(self.0.len());
        let (token, rest) = self.0.split_at(length);
        self.0 = rest;
        (!token.is_empty()).then_some(token)
    }

    fn quoted(&mut self) -> Option<String> {
        let (mut value, mut is_escaped) = (String::new(), false);
        for (at, letter) in self.0.char_indices().skip(1) {
            match letter {
                _ if is_escaped => {
                    value.push(letter);
                    is_escaped = false;
                }
                '\\' => is_escaped = true,
                '"' => {
                    self.0 = self.0.get(at + 1..)?;
                    return Some(value);
                }
                _ => value.push(letter),
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]

    use super::*;

    #[test]
    fn challenges_are_read_as_registries_write_them() {
        let one =
            Challenge::parse(r#"Bearer realm="https://auth.docker.io/token",service="registry.docker.io",scope="repository:a/b:pull""#);
        let one = one.unwrap();
        assert_eq!((one.len(), one[0].scheme.as_str()), (1, "bearer"));
        assert_eq!(one[0].parameter("realm"), Some("https://auth.docker.io/token"));
        assert_eq!(one[0].parameter("scope"), Some("repository:a/b:pull"));
        let two = Challenge::parse(r#"Basic realm="a \"b\", c", Negotiate, BEARER Realm = https://x/t , service=s"#).unwrap();
        let schemes: Vec<&str> = two.iter().map(|challenge| challenge.scheme.as_str()).collect();
        assert_eq!(schemes, ["basic", "negotiate", "bearer"]);
        assert_eq!(two[0].parameter("realm"), Some("a \"b\", c"));
        assert_eq!((two[2].parameter("realm"), two[2].parameter("service")), (Some("https://x/t"), Some("s")));
    }

    #[test]
    fn what_is_no_challenge_is_refused() {
        for text in [r#"Bearer realm="x"#, r#"realm="x""#, "Bearer realm=", "Bearer =x", "\"", "Bearer realm=\"a\\\""] {
            assert_eq!(Challenge::parse(text), None, "{text}");
        }
        assert_eq!(Challenge::parse(""), Some(Vec::new()));
    }
}
