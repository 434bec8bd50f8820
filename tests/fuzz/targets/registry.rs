//! What a pull reads beside JSON: names of images, and a registry's challenges.

use stockade_registry::{Challenge, Reference};

use super::Target;

pub const REFERENCE: Target = Target {
    name: "reference",
    about: "the name of an image of a registry",
    corpus: include_str!("../corpus/reference"),
    seeds: || {
        let digest = "0123456789abcdef".repeat(4);
        let texts = [
            String::from("python"),
            String::from("python:3.13-slim"),
            String::from("ghcr.io/a-b/c__d/e.f:v1"),
            String::from("localhost:5000/a:1"),
            String::from("[::1]:5000/a"),
            format!("docker.io/library/python:3@sha256:{digest}"),
        ];
        texts.into_iter().map(String::into_bytes).collect()
    },
    words: &[b"docker.io/", b"index.docker.io/", b"library/", b"localhost", b":5000/", b"@sha256:", b"..", b"[::1]", b"%2f", b"?", b"#"],
    longest: 512,
    run: |input| {
        let Ok(text) = std::str::from_utf8(input) else { return };
        let Ok(reference) = text.parse::<Reference>() else { return };
        assert_eq!(reference.to_string().parse(), Ok(reference.clone()), "what is shown is the same image");
        let path = [reference.repository(), "/", &reference.wanted()].concat();
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"/._-:".contains(&byte);
        assert!(path.bytes().all(is_plain) && !path.split('/').any(|part| part.starts_with('.')), "no part leads elsewhere: {path}");
        assert!(!reference.host().contains(['/', '@', '?', '#', '%']), "{}", reference.host());
    },
};

pub const CHALLENGE: Target = Target {
    name: "challenge",
    about: "a header WWW-Authenticate",
    corpus: include_str!("../corpus/challenge"),
    seeds: || {
        let texts = [
            r#"Bearer realm="https://auth.docker.io/token",service="registry.docker.io",scope="repository:a/b:pull""#,
            r#"Basic realm="a \"b\"", Negotiate, Bearer realm=https://h/t"#,
        ];
        texts.iter().map(|text| text.as_bytes().to_vec()).collect()
    },
    words: &[b"Bearer ", b"Basic ", b"realm=", b"\"", b"\\", b",", b"=", b" "],
    longest: 2048,
    run: |input| {
        let Ok(text) = std::str::from_utf8(input) else { return };
        for challenge in Challenge::parse(text).into_iter().flatten() {
            assert!(!challenge.scheme.is_empty() && challenge.scheme == challenge.scheme.to_ascii_lowercase());
            assert!(challenge.parameter("realm").is_none_or(|realm| realm.len() < text.len()));
        }
    },
};
