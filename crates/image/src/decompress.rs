//! Decompression of a layer, in a process that has given up all else (`confine.rs`).
//!
//! gzip with any number of members, and zstd with any number of frames, skippable ones among them (as
//! `zstd:chunked` has). What comes after the last must be another, or it is an error. How much may come
//! out is for the reader of the output to limit. A compressed stream of another kind is none that this knows.

use std::io::{self, BufRead, BufReader, Read, Write};

/// Bytes that are read and written at once.
pub const BUFFER: usize = 256 << 10;
/// Zstandard's own limit for a decoder that is not told otherwise: windows of 128 MiB.
const MAX_WINDOW_LOG: u32 = 27;

/// How bytes are compressed, by how they begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compression {
    /// RFC 1952.
    Gzip,
    /// RFC 8878.
    Zstd,
    /// They are not, for all that this knows.
    None,
}

impl Compression {
    /// By the first four bytes.
    pub fn of(begin: &[u8]) -> Self {
        match begin {
            [0x1f, 0x8b, ..] => Compression::Gzip,
            [0x28, 0xb5, 0x2f, 0xfd, ..] | [0x50..=0x5f, 0x2a, 0x4d, 0x18, ..] => Compression::Zstd,
            _ => Compression::None,
        }
    }
}

/// Decompresses all of `input`.
///
/// # Errors
/// It is not compressed so, or cut off, or one of both ends cannot be used.
pub fn decompress(input: impl Read, mut output: impl Write) -> io::Result<()> {
    let mut input = BufReader::with_capacity(BUFFER, input);
    // The writer has found out four bytes of it before, which a pipe may give one by one.
    let compression = Compression::of(&begin_of(&mut input)?);
    match compression {
        Compression::Gzip => copy(&mut flate2::bufread::MultiGzDecoder::new(input), &mut output),
        Compression::Zstd => {
            let mut decoder = zstd::stream::read::Decoder::with_buffer(input)?;
            decoder.window_log_max(MAX_WINDOW_LOG)?;
            copy(&mut decoder, &mut output)
        }
        Compression::None => Err(io::Error::new(io::ErrorKind::InvalidData, "neither gzip nor zstd")),
    }
}

/// The first bytes, which stay to be read; a pipe gives the first 4 KiB of a write at once.
fn begin_of(input: &mut impl BufRead) -> io::Result<Vec<u8>> {
    let ready = input.fill_buf()?;
    Ok(ready[..ready.len().min(4)].to_vec())
}

fn copy(from: &mut impl Read, to: &mut impl Write) -> io::Result<()> {
    let mut buffer = vec![0; BUFFER];
    loop {
        match from.read(&mut buffer) {
            Ok(0) => return to.flush(),
            Ok(length) => to.write_all(&buffer[..length])?,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]
    use super::*;

    #[test]
    fn several_members_and_skippable_frames_are_one_stream_and_a_cut_is_an_error() {
        let gzip = |text: &[u8]| {
            let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
            encoder.write_all(text).unwrap();
            encoder.finish().unwrap()
        };
        let zstd = |text: &[u8]| zstd::encode_all(text, 1).unwrap();
        let skippable = b"\x50\x2a\x4d\x18\x03\0\0\0abc".to_vec();
        let expand = |input: &[u8]| {
            let mut output = Vec::new();
            decompress(input, &mut output).map(|()| output)
        };
        assert_eq!(expand(&[gzip(b"ab"), gzip(b"c")].concat()).unwrap(), b"abc");
        assert_eq!(expand(&[skippable.clone(), zstd(b"ab"), skippable.clone(), zstd(b"c"), skippable].concat()).unwrap(), b"abc");
        for whole in [gzip(b"abc"), zstd(b"abc")] {
            assert!(expand(&whole[..whole.len() - 1]).is_err(), "cut off");
            assert!(expand(&[&whole[..], b"rubbish"].concat()).is_err(), "followed by something else");
        }
        assert!(expand(b"plain").is_err());
    }
}
