//! Output that is to be UTF-8, whatever the program prints.
//!
//! What is not becomes U+FFFD, exactly as where the whole stream is converted at once: a
//! character that two reads cut in two stays whole, since its first bytes wait for the
//! rest. Nothing else is looked at or changed.

/// The longest beginning of a character that may have to wait for its rest.
const LONGEST_BEGINNING: usize = 3;
/// U+FFFD in UTF-8, which takes the place of a single byte at worst.
const REPLACEMENT: &[u8] = "\u{fffd}".as_bytes();

/// So many bytes at most come of a piece of this length.
pub(crate) const fn longest(piece: usize) -> usize {
    (piece + LONGEST_BEGINNING) * REPLACEMENT.len()
}

/// One stream on its way.
#[derive(Debug, Default)]
pub(crate) struct Text {
    /// What may be the beginning of a character.
    pending: Vec<u8>,
}

impl Text {
    /// Takes a piece, and gives what can be passed on.
    pub(crate) fn push(&mut self, piece: &[u8]) -> Vec<u8> {
        let mut bytes = std::mem::take(&mut self.pending);
        bytes.extend_from_slice(piece);
        let mut out = Vec::with_capacity(bytes.len());
        let mut rest = bytes.as_slice();
        while let Err(error) = str::from_utf8(rest) {
            let (valid, invalid) = rest.split_at(error.valid_up_to());
            out.extend_from_slice(valid);
            let Some(length) = error.error_len() else {
                self.pending.extend_from_slice(invalid);
                return out;
            };
            out.extend_from_slice(REPLACEMENT);
            rest = invalid.get(length..).unwrap_or_default();
        }
        out.extend_from_slice(rest);
        out
    }

    /// The stream has ended: what waited has no rest.
    pub(crate) fn finish(&mut self) -> &'static [u8] {
        if std::mem::take(&mut self.pending).is_empty() { &[] } else { REPLACEMENT }
    }
}

#[cfg(test)]
mod tests {
    use super::{LONGEST_BEGINNING, Text, longest};

    fn through(pieces: &[&[u8]]) -> Vec<u8> {
        let mut text = Text::default();
        let mut out = Vec::new();
        for piece in pieces {
            let passed = text.push(piece);
            assert!(passed.len() <= longest(piece.len()) && text.pending.len() <= LONGEST_BEGINNING, "{piece:?}");
            out.extend(passed);
        }
        out.extend(text.finish());
        out
    }

    const SAMPLES: [&[u8]; 9] = [
        b"",
        b"plain",
        "grüße €uro 🦀 end".as_bytes(),
        b"\xff",
        b"a\xf0\x9f\xa6b\xf0\x9f\xa6",
        b"\xe2\x82\xe2\x82\xac\xe2",
        b"\xed\xa0\x80 surrogate, \xc0\xaf overlong, \xf5\x80\x80\x80 beyond",
        b"\x80\x80\x80\x80\x80\x80\x80",
        b"\xf4\x8f\xbf\xbf\xf4\x90\x80\x80",
    ];

    #[test]
    fn whatever_the_pieces_it_is_what_the_whole_would_be() {
        for sample in SAMPLES {
            let whole = String::from_utf8_lossy(sample).into_owned().into_bytes();
            for first in 0..=sample.len() {
                for second in first..=sample.len() {
                    let pieces = [&sample[..first], &sample[first..second], &sample[second..]];
                    assert_eq!(through(&pieces), whole, "{pieces:?}");
                }
            }
            let bytes: Vec<&[u8]> = sample.chunks(1).collect();
            assert_eq!(through(&bytes), whole, "{sample:?}, byte by byte");
        }
    }

    #[test]
    fn what_is_whole_is_passed_on_at_once() {
        let mut text = Text::default();
        assert_eq!(text.push("eins €".as_bytes()), "eins €".as_bytes());
        assert_eq!(text.push(b"\xe2\x82"), b"");
        assert_eq!(text.push(b"\xac>"), "€>".as_bytes());
        assert_eq!(text.finish(), b"");
    }
}
