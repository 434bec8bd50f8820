//! Converting a stream to UTF-8 as it comes.
//!
//! What is not UTF-8 becomes U+FFFD, exactly as if the whole stream were converted at once: the
//! first bytes of a character that two reads have split wait for its rest. Nothing else is looked
//! at or changed.

/// Bytes of a character that may have to wait for its rest.
const MAX_PENDING: usize = 3;
/// U+FFFD in UTF-8, which takes the place of a single byte at worst.
const REPLACEMENT: &[u8] = "\u{fffd}".as_bytes();

/// How many bytes a piece of this length can become.
pub(crate) const fn max_len(piece: usize) -> usize {
    (piece + MAX_PENDING) * REPLACEMENT.len()
}

/// The state of one stream.
#[derive(Debug, Default)]
pub(crate) struct LossyUtf8 {
    /// What may be the beginning of a character.
    pending: Vec<u8>,
}

impl LossyUtf8 {
    /// Converts a piece; what is split at its end waits.
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
    use super::{LossyUtf8, MAX_PENDING, max_len};

    fn through(pieces: &[&[u8]]) -> Vec<u8> {
        let mut text = LossyUtf8::default();
        let mut out = Vec::new();
        for piece in pieces {
            let passed = text.push(piece);
            assert!(passed.len() <= max_len(piece.len()) && text.pending.len() <= MAX_PENDING, "{piece:?}");
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
    fn a_split_stream_becomes_what_the_whole_would() {
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
        let mut text = LossyUtf8::default();
        assert_eq!(text.push("eins €".as_bytes()), "eins €".as_bytes());
        assert_eq!(text.push(b"\xe2\x82"), b"");
        assert_eq!(text.push(b"\xac>"), "€>".as_bytes());
        assert_eq!(text.finish(), b"");
    }
}
