//! Inputs kept in the tree: one a line, with what is not plain ASCII escaped as in Rust's own
//! byte strings, so that a change of them can be read.
//!
//! They are where every target begins, beside its seeds, and so a test of each by plain
//! cargo. `tests/fuzz/run --keep` writes them anew.

/// The line of an input.
pub fn line(input: &[u8]) -> String {
    input.escape_ascii().to_string()
}

/// The input of a line; none where it is not spelt as [`line()`] spells.
pub fn input(line: &str) -> Option<Vec<u8>> {
    let mut out = Vec::new();
    let mut rest = line.bytes();
    while let Some(byte) = rest.next() {
        out.push(match byte {
            b'\\' => match rest.next()? {
                b'n' => b'\n',
                b'r' => b'\r',
                b't' => b'\t',
                b'x' => nibble(rest.next()?)? << 4 | nibble(rest.next()?)?,
                quoted @ (b'\\' | b'\'' | b'"') => quoted,
                _ => return None,
            },
            plain => plain,
        });
    }
    Some(out)
}

fn nibble(digit: u8) -> Option<u8> {
    char::from(digit).to_digit(16).and_then(|value| u8::try_from(value).ok())
}
