//! Encodings that code hides behind, undone on texts that stand in it.
//!
//! Strict and small: what is not clearly of an encoding is not decoded. Texts stand for
//! bytes where their characters are below 256.

/// Longer texts are not put together or decoded.
pub(crate) const LONGEST: usize = 64 << 10;

/// Standard or URL-safe base64, spaces and padding aside.
pub(crate) fn base64(text: &str) -> Option<String> {
    let (mut out, mut bits, mut held) = (Vec::new(), 0u32, 0u32);
    for byte in text.bytes().filter(|byte| !byte.is_ascii_whitespace() && *byte != b'=') {
        let value = match byte {
            b'A'..=b'Z' => byte - b'A',
            b'a'..=b'z' => byte - b'a' + 26,
            b'0'..=b'9' => byte - b'0' + 52,
            b'+' | b'-' => 62,
            b'/' | b'_' => 63,
            _ => return None,
        };
        bits = bits << 6 | u32::from(value);
        held += 6;
        if held >= 8 {
            held -= 8;
            out.push(u8::try_from(bits >> held & 0xff).ok()?);
            bits &= (1 << held) - 1;
        }
    }
    readable(&out)
}

/// Pairs of hexadecimal digits.
pub(crate) fn hex(text: &str) -> Option<String> {
    let digits: Vec<u32> = text.chars().filter(|c| !c.is_whitespace()).map(|c| c.to_digit(16)).collect::<Option<_>>()?;
    let bytes: Option<Vec<u8>> = digits.chunks(2).map(|pair| u8::try_from(pair.first()? * 16 + pair.get(1)?).ok()).collect();
    readable(&bytes?)
}

/// Letters moved by thirteen.
pub(crate) fn rot13(text: &str) -> String {
    let turn = |c: char, first: u8| char::from((u8::try_from(c).unwrap_or(first) - first + 13) % 26 + first);
    text.chars()
        .map(|c| match c {
            'a'..='z' => turn(c, b'a'),
            'A'..='Z' => turn(c, b'A'),
            other => other,
        })
        .collect()
}

fn readable(bytes: &[u8]) -> Option<String> {
    std::str::from_utf8(bytes).ok().filter(|text| !text.is_empty()).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn encodings_are_undone() {
        assert_eq!(base64("b3M=").as_deref(), Some("os"));
        assert_eq!(base64("b3M").as_deref(), Some("os"));
        assert_eq!(base64("no base64!"), None);
        assert_eq!(hex("6f 73").as_deref(), Some("os"));
        assert_eq!(hex("6f7"), None);
        assert_eq!(rot13("Fhocebprff"), "Subprocess");
    }
}
