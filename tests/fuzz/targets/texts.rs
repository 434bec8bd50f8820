//! Texts: policies, the rules of a whitelist, requests.

use stockade_policy::{EXAMPLES, SHIPPED, load_text, show, whitelist::Rule};
use stockade_protocol::{Base64, Request, TextOrBase64, session::Line};

use super::Target;

/// Of a program as it was written.
fn length(code: &TextOrBase64) -> usize {
    match code {
        TextOrBase64::Text(written) | TextOrBase64::Base64(Base64 { base64: written }) => written.len(),
    }
}

pub const POLICY: Target = Target {
    name: "policy",
    about: "a policy in TOML",
    corpus: include_str!("../corpus/policy"),
    seeds: || SHIPPED.iter().chain(EXAMPLES).map(|(_, text)| without_comments(text)).collect(),
    words: &[
        b"extends = \"default\"\n",
        b"[egress]\n",
        b"whitelist = [\"pypi.org:443\"]\n",
        b"{ add = [], remove = [] }",
        b"{ replace = [] }",
        b"\"none\"",
        b"\"1GiB\"",
        b"[limits.max]\n",
        b"[[",
        b"\"\"\"",
        b"\\u0000",
        b" = ",
    ],
    longest: 16 << 10,
    run: |input| {
        let text = String::from_utf8_lossy(input);
        match load_text(&text) {
            Ok(policy) => {
                let again = load_text(&show(&policy)).map(|again| (again.egress, again.seccomp, again.limits));
                assert!(again.is_ok_and(|again| again == (policy.egress, policy.seccomp, policy.limits)), "what is shown loads again");
            }
            Err(error) => assert!(!error.to_string().is_empty()),
        }
    },
};

/// Comments would take most of the mutations.
fn without_comments(text: &str) -> Vec<u8> {
    let lines = text.lines().map(|line| line.split(" # ").next().unwrap_or_default().trim_end());
    lines.filter(|line| !line.is_empty() && !line.starts_with('#')).flat_map(|line| [line.as_bytes(), b"\n"].concat()).collect()
}

pub const RULE: Target = Target {
    name: "rule",
    about: "one rule of a whitelist",
    corpus: include_str!("../corpus/rule"),
    seeds: || {
        let rules = [
            "pypi.org:443",
            "*.example.org:80,443,8000-8100",
            "api.internal:5432/tcp",
            "10.0.5.0/24:443",
            "[2001:db8::/48]:5432",
            "bücher.example:1",
            "xn--bcher-kva.example:1",
        ];
        rules.iter().map(|rule| rule.as_bytes().to_vec()).collect()
    },
    words: &[
        b"*.",
        b":443",
        b"/tcp",
        b"/udp",
        b"[::",
        b"]",
        b"/24",
        b"xn--",
        b"0x",
        b"127.0.0.1",
        b"::ffff:",
        "ß".as_bytes(),
        "。".as_bytes(),
    ],
    longest: 512,
    run: |input| {
        let Ok(text) = std::str::from_utf8(input) else { return };
        let Ok(rule) = text.parse::<Rule>() else { return };
        let shown = rule.to_string();
        assert!(shown.is_ascii() && !shown.bytes().any(|byte| byte.is_ascii_control() || byte.is_ascii_uppercase()));
        assert_eq!(shown.parse::<Rule>(), Ok(rule), "a rule's one spelling is read as the same rule");
        assert!(!shown.starts_with("*:") && !shown.starts_with("localhost"));
    },
};

pub const REQUEST: Target = Target {
    name: "request",
    about: "a request of `exec` in JSON",
    corpus: include_str!("../corpus/request"),
    seeds: || {
        let requests = [
            r#"{"code":"print(6*7)"}"#,
            r#"{"code":"","language":"sh","args":["a"],"stdin":{"base64":"aGk="},"env":{"LANG":"C"},"files":{"a/b":"x","c":{"base64":""}},
               "collect":["*.txt"],"limits":{"wall":"5s","cpus":0.5,"processes":9},"encoding":"base64","id":"1","labels":{"a":"b"}}"#,
        ];
        requests.iter().map(|request| request.as_bytes().to_vec()).collect()
    },
    words: &[b"{\"base64\":", b"null", b"1e999", b"-0", b"\\ud800", b"[[[[[[[[", b"{\"\":{\"\":", b"\"code\":", b"\"limits\":{"],
    longest: 8 << 10,
    run: |input| {
        // As the launcher reads it: with the path of what is wrong.
        let mut deserializer = serde_json::Deserializer::from_slice(input);
        match serde_path_to_error::deserialize::<_, Request>(&mut deserializer) {
            Ok(request) => assert!(input.len() >= length(&request.code) / 6, "nothing comes from nothing"),
            Err(error) => assert!(!error.to_string().is_empty()),
        }
    },
};

pub const LINE: Target = Target {
    name: "line",
    about: "a line of `session` in JSON",
    corpus: include_str!("../corpus/line"),
    seeds: || {
        let lines = [
            r#"{"op":"run","code":"print(6*7)","stdin":{"base64":"aGk="},"limits":{"wall":"5s"},"id":"1"}"#,
            r#"{"op":"write","path":"a/b","contents":{"base64":"AA=="},"append":true,"id":"2"}"#,
            r#"{"op":"read","path":"/tmp/a","offset":1,"length":2,"encoding":"base64"}"#,
            r#"{"op":"list","path":"a","recursive":true}"#,
            r#"{"op":"cancel","run":"1"}"#,
            r#"{"op":"reset"}"#,
        ];
        lines.iter().map(|line| line.as_bytes().to_vec()).collect()
    },
    words: &[
        b"\"op\":\"",
        b"run",
        b"write",
        b"read",
        b"list",
        b"cancel",
        b"reset",
        b"close",
        b"\"contents\":",
        b"\"offset\":-1",
        b"null",
        b"\\u0000",
        b"[[",
    ],
    longest: 8 << 10,
    run: |input| {
        let mut deserializer = serde_json::Deserializer::from_slice(input);
        match serde_path_to_error::deserialize::<_, Line>(&mut deserializer) {
            // The tag may stand anywhere, so what comes before it is kept and read again.
            Ok(Line::Run(request)) => assert!(input.len() >= length(&request.code) / 6, "nothing comes from nothing"),
            Ok(Line::Write(asked)) => assert!(input.len() >= asked.path.len() / 6, "nothing comes from nothing"),
            Ok(_) => {}
            Err(error) => assert!(!error.to_string().is_empty()),
        }
    },
};
