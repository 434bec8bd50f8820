//! Lines of a stream from a server that is not trusted, each with a limit.

use std::io::{self, BufRead, BufReader, Read};

/// The longest line, and the longest answer: twice the most that a request may have.
pub const MAX_LEN: usize = 128 << 20;

/// Why there is no further line.
#[derive(Debug, thiserror::Error)]
pub enum LineError {
    #[error("an answer of more than 128 MiB")]
    TooLong,
    #[error(transparent)]
    Read(#[from] io::Error),
}

/// Lines without their ends.
pub struct Lines<R>(BufReader<R>);

impl<R: Read> Lines<R> {
    /// Those of this stream.
    pub fn new(stream: R) -> Self {
        Lines(BufReader::with_capacity(64 << 10, stream))
    }

    /// The next; none at the end. A last one without an end was cut off, and is left out.
    ///
    /// # Errors
    /// The stream breaks off, or the line is too long.
    pub fn next(&mut self) -> Result<Option<Vec<u8>>, LineError> {
        let mut line = Vec::new();
        self.0.by_ref().take(MAX_LEN as u64 + 1).read_until(b'\n', &mut line)?;
        match line.pop() {
            Some(b'\n') => Ok(Some(line)),
            _ if line.len() >= MAX_LEN => Err(LineError::TooLong),
            _ => Ok(None),
        }
    }

    /// All that is left.
    ///
    /// # Errors
    /// The stream breaks off, or it is too long.
    pub fn rest(mut self) -> Result<Vec<u8>, LineError> {
        let mut all = Vec::new();
        self.0.by_ref().take(MAX_LEN as u64 + 1).read_to_end(&mut all)?;
        if all.len() > MAX_LEN { Err(LineError::TooLong) } else { Ok(all) }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]

    use super::*;

    #[test]
    fn a_line_ends_with_its_end_and_has_a_limit() {
        let mut lines = Lines::new(&b"a\n\nbc\ncut"[..]);
        let next = |lines: &mut Lines<&[u8]>| lines.next().unwrap();
        assert_eq!([next(&mut lines), next(&mut lines), next(&mut lines)], [Some(b"a".to_vec()), Some(vec![]), Some(b"bc".to_vec())]);
        assert_eq!(next(&mut lines), None);
        let mut endless = Lines::new(io::repeat(b'x'));
        assert!(matches!(endless.next(), Err(LineError::TooLong)));
        assert!(matches!(Lines::new(io::repeat(b'x')).rest(), Err(LineError::TooLong)));
        let longest = [vec![b'x'; MAX_LEN], b"\n".to_vec()].concat();
        assert_eq!(Lines::new(&longest[..]).next().unwrap().unwrap().len(), MAX_LEN);
    }
}
