//! What a client sends to a peer: TLS hellos and HTTP requests, cut into pieces.
//!
//! Each stream is examined in one piece and in many, which must come to the same, and what
//! was released is read once more by a plainer reader that knows no pieces.

use stockade_egress::inspect::{InspectionRefusal, Inspector, MAX_HELD};
use stockade_policy::whitelist::Name;

use super::Target;

const HOST: &str = "api.internal";
const PORT: u16 = 8080;

pub const HELLO: Target = Target {
    name: "hello",
    about: "a TLS ClientHello, in pieces and over records",
    corpus: include_str!("../corpus/hello"),
    seeds: hello_seeds,
    words: &[
        &[22, 3, 1, 0],
        &[20, 3, 3, 0, 1, 1],
        &[23, 3, 3, 0, 4],
        &[0, 0, 0, 17, 0, 15, 0, 0, 12],
        b"api.internal",
        b"evil.example",
        &[0xfe, 0x0d],
        &[0, 42, 0, 0],
    ],
    longest: 20 << 10,
    run: run_hello,
};

pub const HTTP: Target = Target {
    name: "http",
    about: "HTTP/1 requests, one behind the other and in pieces",
    corpus: include_str!("../corpus/http"),
    seeds: http_seeds,
    words: &[
        b"\r\n",
        b"\r\n\r\n",
        b"\n\n",
        b"GET / HTTP/1.1\r\n",
        b"POST / HTTP/1.1\r\n",
        b"Host: api.internal\r\n",
        b"Host: evil.example\r\n",
        b"Content-Length: 5\r\n",
        b"Transfer-Encoding: chunked\r\n",
        b"5\r\nabcde\r\n",
        b"0\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"http://api.internal",
    ],
    longest: 40 << 10,
    run: run_http,
};

/// The first two bytes of an input say how it is cut.
fn cut(stream: &[u8]) -> Vec<u8> {
    [&[3, 11][..], stream].concat()
}

fn vector16(body: &[u8]) -> Vec<u8> {
    [&u16::try_from(body.len()).unwrap_or(0).to_be_bytes(), body].concat()
}

fn hello(name: &str, more: &[u8]) -> Vec<u8> {
    let server = vector16(&vector16(&[&[0], &vector16(name.as_bytes())[..]].concat()));
    let extensions = [&[0, 0][..], &server, &[0, 43, 0, 3, 2, 3, 4], more].concat();
    let body = [&[3, 3][..], &[7; 32], &[0], &vector16(&[0x13, 1]), &[1, 0], &vector16(&extensions)].concat();
    [&[1, 0][..], &vector16(&body)].concat()
}

fn record(body: &[u8]) -> Vec<u8> {
    [&[22, 3, 1][..], &vector16(body)].concat()
}

fn hello_seeds() -> Vec<Vec<u8>> {
    let good = hello(HOST, &[]);
    let split = [record(&good[..50]), record(&good[50..])].concat();
    let early = [record(&hello(HOST, &[0, 42, 0, 0])), vec![23, 3, 3, 0, 2, 9, 9], record(&good)].concat();
    let twice = [record(&good), vec![20, 3, 3, 0, 1, 1], record(&good)].concat();
    [record(&good), split, early, twice, record(&hello("evil.example", &[]))].iter().map(|stream| cut(stream)).collect()
}

fn http_seeds() -> Vec<Vec<u8>> {
    let get = "GET /simple/ HTTP/1.1\r\nHost: api.internal:8080\r\nAccept: */*\r\n\r\n";
    let post = "POST / HTTP/1.1\r\nhost: api.internal\r\nContent-Length: 5\r\n\r\nabcde";
    let chunked = "PUT http://api.internal/x HTTP/1.1\r\nHost: api.internal\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabcde\r\n0\r\n\r\n";
    let all = [get.to_owned(), post.to_owned(), chunked.to_owned(), [get, post, chunked, get].concat()];
    all.iter().map(|text| cut(text.as_bytes())).collect()
}

/// Shows a stream to an inspector in pieces: how much was released, and how it ended.
fn examine(stream: &[u8], mut piece: impl FnMut() -> usize) -> (usize, Result<(), InspectionRefusal>) {
    let Ok(name) = Name::new(HOST) else { return (0, Ok(())) };
    let mut inspector = Inspector::new(name, PORT);
    let (mut shown, mut released) = (0, 0);
    while shown < stream.len() && !inspector.is_through() {
        shown = (shown + piece().max(1)).min(stream.len());
        match inspector.examine(&stream[released..shown]) {
            Ok(more) => released += more,
            Err(refused) => return (released, Err(refused)),
        }
        assert!(released <= shown && shown - released <= MAX_HELD, "no more is held than was promised");
    }
    if inspector.is_through() { (stream.len(), Ok(())) } else { (released, Ok(())) }
}

/// Examines in one piece and in many; what of the stream left, and whether it had to end.
fn examine_both(input: &[u8]) -> (&[u8], bool) {
    let Some((&[first, second], stream)) = input.split_first_chunk::<2>() else { return (&[], false) };
    let (at_once, whole) = examine(stream, || stream.len());
    let mut turn = 0u8;
    let (in_pieces, parts) = examine(stream, || {
        turn = turn.wrapping_mul(31).wrapping_add(second);
        usize::from(turn % first.max(1)) + 1
    });
    assert_eq!(whole.as_ref().map_err(|refused| refused.reason), parts.as_ref().map_err(|refused| refused.reason), "pieces change nothing");
    if whole.is_ok() {
        assert_eq!(at_once, in_pieces, "pieces release as much");
    }
    (&stream[..in_pieces], parts.is_ok())
}

fn run_hello(input: &[u8]) {
    let (released, _) = examine_both(input);
    if released.is_empty() || released[0] != 22 {
        return;
    }
    // The hello without its records: the name is in it.
    let (mut message, mut rest) = (Vec::new(), released);
    while let Some((&[22, _, _, high, low], after)) = rest.split_first_chunk::<5>() {
        let length = usize::from(u16::from_be_bytes([high, low])).min(after.len());
        message.extend_from_slice(&after[..length]);
        rest = &after[length..];
    }
    let named = message.to_ascii_lowercase().windows(HOST.len()).any(|window| window == HOST.as_bytes());
    assert!(named, "nothing leaves that does not name the peer");
}

fn run_http(input: &[u8]) {
    let (mut rest, _) = examine_both(input);
    if rest.first().is_none_or(|first| !first.is_ascii_uppercase()) {
        return;
    }
    // Whatever left is whole requests for the host, but for a last body that may be cut.
    while let Some(end) = rest.windows(4).position(|window| window == b"\r\n\r\n") {
        let (head, after) = rest.split_at(end + 4);
        let body = check_head(head);
        rest = match body {
            Some(length) => after.get(length..).unwrap_or_default(),
            None => match last_chunk(after) {
                Some(after) => after,
                None => return,
            },
        };
    }
    assert!(rest.is_empty(), "no part of a head leaves: {}", rest.escape_ascii());
}

/// The length of a request's body; none for chunks.
fn check_head(head: &[u8]) -> Option<usize> {
    let text = String::from_utf8_lossy(head).to_lowercase();
    let headers: Vec<(&str, &str)> = text.lines().skip(1).filter_map(|line| line.split_once(':')).collect();
    let values = |wanted: &str| -> Vec<&str> {
        headers.iter().filter(|(name, _)| *name == wanted).map(|(_, value)| value.trim_matches([' ', '\t'])).collect()
    };
    let hosts = ["api.internal", "api.internal.", "api.internal:8080", "api.internal.:8080"];
    assert!(matches!(values("host")[..], [host] if hosts.contains(&host)), "{text}");
    match (&values("content-length")[..], &values("transfer-encoding")[..]) {
        ([], []) => Some(0),
        ([length], []) => Some(length.parse().unwrap_or(usize::MAX)),
        ([], ["chunked"]) => None,
        other => panic!("no certain end: {other:?}"),
    }
}

/// What follows the last chunk, if it is there.
fn last_chunk(mut rest: &[u8]) -> Option<&[u8]> {
    loop {
        let end = rest.windows(2).position(|window| window == b"\r\n")?;
        let length = usize::from_str_radix(std::str::from_utf8(&rest[..end]).unwrap_or("!"), 16);
        let Ok(length) = length else { panic!("no length of a chunk: {}", rest[..end].escape_ascii()) };
        let chunk = rest.get(end + 2..end.checked_add(4)?.checked_add(length)?)?;
        assert!(chunk.ends_with(b"\r\n"), "a chunk ends where it says");
        rest = &rest[end + 4 + length..];
        if length == 0 {
            return Some(rest);
        }
    }
}
