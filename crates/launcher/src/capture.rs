//! Keeping the head and the tail of a stream in bounded memory.
//!
//! Never more than the limit is held, however much is printed. What the bytes mean is not looked
//! at.

use std::collections::VecDeque;

/// A stream as it was kept.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Captured {
    /// The bytes; a marker line takes the place of those that were cut out.
    pub bytes: Vec<u8>,
    /// Some were cut out.
    pub truncated: bool,
}

/// Takes a stream's bytes as they come.
#[derive(Debug)]
pub(crate) struct Capture {
    head: Vec<u8>,
    tail: VecDeque<u8>,
    /// How many bytes may be kept; half each for head and tail once there are more.
    limit: usize,
    total: u64,
}

impl Capture {
    pub(crate) fn new(limit: Option<u64>) -> Self {
        let limit = limit.map_or(usize::MAX, |limit| usize::try_from(limit).unwrap_or(usize::MAX));
        Capture { head: Vec::new(), tail: VecDeque::new(), limit, total: 0 }
    }

    /// How many bytes came in all.
    pub(crate) fn total(&self) -> u64 {
        self.total
    }

    pub(crate) fn push(&mut self, bytes: &[u8]) {
        self.total += bytes.len() as u64;
        let head_room = (self.limit - self.limit / 2).saturating_sub(self.head.len());
        let (head, tail) = bytes.split_at(head_room.min(bytes.len()));
        self.head.extend_from_slice(head);
        let tail_limit = self.limit / 2;
        let tail = tail.get(tail.len().saturating_sub(tail_limit)..).unwrap_or_default();
        let excess = (self.tail.len() + tail.len()).saturating_sub(tail_limit);
        self.tail.drain(..excess.min(self.tail.len()));
        self.tail.extend(tail);
    }

    pub(crate) fn finish(mut self) -> Captured {
        let kept = (self.head.len() + self.tail.len()) as u64;
        let truncated = self.total > kept;
        if truncated {
            let cut = self.total - kept;
            self.head.extend_from_slice(format!("\n[stockade: {cut} bytes cut out here]\n").as_bytes());
        }
        self.head.extend(self.tail);
        Captured { bytes: self.head, truncated }
    }
}

#[cfg(test)]
mod tests {
    use super::Capture;

    fn captured(limit: u64, pieces: &[&str]) -> (String, bool) {
        let mut capture = Capture::new(Some(limit));
        pieces.iter().for_each(|piece| capture.push(piece.as_bytes()));
        let captured = capture.finish();
        (String::from_utf8_lossy(&captured.bytes).into_owned(), captured.truncated)
    }

    #[test]
    fn what_fits_is_kept_unchanged() {
        assert_eq!(captured(8, &["abc", "defgh"]), ("abcdefgh".into(), false));
        assert_eq!(captured(1, &[]), (String::new(), false));
    }

    #[test]
    fn head_and_tail_are_kept_for_any_pieces() {
        let marker = "\n[stockade: 4 bytes cut out here]\n";
        assert_eq!(captured(8, &["abcdefghijkl"]), (format!("abcd{marker}ijkl"), true));
        assert_eq!(captured(8, &["abcdef", "ghij", "kl"]), (format!("abcd{marker}ijkl"), true));
        let letters: Vec<String> = ('a'..='l').map(String::from).collect();
        let letters: Vec<&str> = letters.iter().map(String::as_str).collect();
        assert_eq!(captured(8, &letters), (format!("abcd{marker}ijkl"), true));
    }
}
