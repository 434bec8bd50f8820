//! A reader of tar archives that trusts none of them.
//!
//! Reads ustar, PAX and GNU archives as layers and `docker save` have them. Every name and extension has a
//! limit, so memory is bounded whatever an archive says. It decides nothing about a name: it may be
//! absolute, lead out of a directory or have an empty part. Sparse files and types that no image has
//! are errors. See tar(5) of FreeBSD, and "pax Interchange Format" of POSIX.1-2017.

use std::io::{self, BufRead, Read, Write};

const BLOCK: usize = 512;
/// The longest extension of one entry, in bytes: extended attributes are the longest.
const MAX_EXTENSION_LEN: u64 = 1 << 20;
/// The longest name or target, in bytes.
const MAX_NAME_LEN: usize = 64 << 10;

/// Why an archive cannot be read on.
#[derive(Debug, thiserror::Error)]
pub enum TarError {
    /// It could not be read.
    #[error("read the archive: {0}")]
    Read(#[from] io::Error),
    /// What was read could not be written.
    #[error("write: {0}")]
    Write(io::Error),
    /// It ends within a header or a file.
    #[error("the archive ends at byte {0}, in the middle of an entry: it is cut off")]
    Truncated(u64),
    /// No header is where one must be.
    #[error("byte {at} of the archive begins no tar header: {why}")]
    Header {
        /// Where.
        at: u64,
        /// What is wrong.
        why: &'static str,
    },
    /// An entry of a kind that no image has.
    #[error("an entry at byte {at} of the archive is {what}, which this program does not unpack")]
    Unsupported {
        /// Where.
        at: u64,
        /// What it is.
        what: &'static str,
    },
}

/// What an entry is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A regular file.
    File,
    /// A directory.
    Directory,
    /// A symbolic link.
    Symlink,
    /// Another name of an earlier file.
    HardLink,
    /// A block or character device.
    Device,
    /// A fifo.
    Fifo,
}

/// The header of an entry.
#[derive(Clone, Debug)]
pub struct Entry {
    /// Its name, as it stands there.
    pub name: Vec<u8>,
    /// The target of a link.
    pub target: Vec<u8>,
    /// What it is.
    pub kind: Kind,
    /// Its permissions, with set-ID and sticky bits.
    pub mode: u32,
    /// The owner and group are both 0.
    pub is_roots: bool,
    /// When it was changed, in seconds since 1970.
    pub mtime: i64,
    /// Bytes of its content.
    pub size: u64,
    /// Where in the archive its content begins.
    pub position: u64,
    /// Its extended attributes, which are not read.
    pub xattrs: u64,
}

/// What extension headers say of the entry after them.
#[derive(Default)]
struct Extension {
    name: Option<Vec<u8>>,
    target: Option<Vec<u8>>,
    size: Option<u64>,
    mtime: Option<i64>,
    uid: Option<u64>,
    gid: Option<u64>,
    xattrs: u64,
}

/// An archive that is read from the beginning to the end.
pub struct Archive<R> {
    input: R,
    position: u64,
    /// Bytes of the last entry's content that were not read.
    left: u64,
    /// Zeros after it, to the next block.
    padding: u64,
}

impl<R: BufRead> Archive<R> {
    /// An archive that begins where `input` stands.
    pub fn new(input: R) -> Self {
        Archive { input, position: 0, left: 0, padding: 0 }
    }

    /// The next entry; none at the end of the archive.
    ///
    /// # Errors
    /// It is no archive, is cut off, or has an entry that this does not read.
    pub fn next_entry(&mut self) -> Result<Option<Entry>, TarError> {
        let mut extension = Extension::default();
        let mut is_extended = false;
        loop {
            self.skip(self.left + self.padding)?;
            (self.left, self.padding) = (0, 0);
            let at = self.position;
            let Some(header) = self.header()? else {
                return if is_extended { Err(TarError::Truncated(at)) } else { Ok(None) };
            };
            let size = number(&header[124..136]).ok_or(TarError::Header { at, why: "its size is no number" })?;
            match header[156] {
                b'x' => {
                    let records = self.extension(size)?;
                    read_records(&records, &mut extension).map_err(|problem| problem.at(at))?;
                }
                b'g' => drop(self.extension(size)?),
                b'L' => extension.name = Some(text(&self.extension(size)?).to_vec()),
                b'K' => extension.target = Some(text(&self.extension(size)?).to_vec()),
                flag => {
                    let entry = self.entry(at, &header, flag, size, extension)?;
                    (self.left, self.padding) = (entry.size, padding(entry.size));
                    return Ok(Some(entry));
                }
            }
            is_extended |= header[156] != b'g';
        }
    }

    fn entry(&self, at: u64, header: &[u8; BLOCK], flag: u8, size: u64, extension: Extension) -> Result<Entry, TarError> {
        let mut name = extension.name.unwrap_or_else(|| short_name(header));
        let target = extension.target.unwrap_or_else(|| text(&header[157..257]).to_vec());
        if name.len().max(target.len()) > MAX_NAME_LEN || name.contains(&0) || target.contains(&0) {
            return Err(TarError::Header { at, why: "its name is too long or has a NUL" });
        }
        let unsupported = |what| Err(TarError::Unsupported { at, what });
        let kind = match flag {
            b'0' | 0 | b'7' if name.ends_with(b"/") => Kind::Directory,
            b'0' | 0 | b'7' => Kind::File,
            b'1' => Kind::HardLink,
            b'2' => Kind::Symlink,
            b'3' | b'4' => Kind::Device,
            b'5' => Kind::Directory,
            b'6' => Kind::Fifo,
            b'S' => return unsupported("a sparse file"),
            _ => return unsupported("of an unknown type"),
        };
        while name.len() > 1 && name.ends_with(b"/") {
            name.pop();
        }
        let field = |range: std::ops::Range<usize>, why| number(&header[range]).ok_or(TarError::Header { at, why });
        let owner = extension.uid.map_or_else(|| field(108..116, "its owner is no number"), Ok)?;
        let group = extension.gid.map_or_else(|| field(116..124, "its group is no number"), Ok)?;
        // Of these kinds a size means nothing, and no content follows.
        let size = if kind == Kind::File { extension.size.unwrap_or(size) } else { 0 };
        if size > i64::MAX as u64 {
            return Err(TarError::Header { at, why: "its size is absurd" });
        }
        Ok(Entry {
            name,
            target,
            kind,
            mode: (field(100..108, "its mode is no number")? & 0o7777) as u32,
            is_roots: owner == 0 && group == 0,
            mtime: extension.mtime.unwrap_or_else(|| number(&header[136..148]).and_then(|time| i64::try_from(time).ok()).unwrap_or(0)),
            size,
            position: self.position,
            xattrs: extension.xattrs,
        })
    }

    /// Writes the content of the last entry.
    ///
    /// # Errors
    /// The archive is cut off, or `output` refuses.
    pub fn copy_to(&mut self, output: &mut impl Write) -> Result<(), TarError> {
        while self.left > 0 {
            let ready = fill(&mut self.input)?;
            let length = ready.len().min(usize::try_from(self.left).unwrap_or(usize::MAX));
            if length == 0 {
                return Err(TarError::Truncated(self.position));
            }
            output.write_all(&ready[..length]).map_err(TarError::Write)?;
            self.consume(length);
            self.left -= length as u64;
        }
        Ok(())
    }

    /// Reads what is after the end of the archive, which belongs to its digest.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn drain(&mut self) -> Result<(), TarError> {
        loop {
            let length = fill(&mut self.input)?.len();
            if length == 0 {
                return Ok(());
            }
            self.consume(length);
        }
    }

    /// The next header; none at the end. One block of zeros and the end of the file are an end, too.
    fn header(&mut self) -> Result<Option<[u8; BLOCK]>, TarError> {
        let at = self.position;
        let Some(header) = self.block()? else { return Ok(None) };
        if header == [0; BLOCK] {
            return match self.block()? {
                None => Ok(None),
                Some(second) if second == [0; BLOCK] => Ok(None),
                Some(_) => Err(TarError::Header { at, why: "it is empty, and another follows" }),
            };
        }
        let stated = number(&header[148..156]);
        let sum = |value: fn(u8) -> i64| {
            let of_bytes = |(place, byte): (usize, &u8)| value(if (148..156).contains(&place) { b' ' } else { *byte });
            header.iter().enumerate().map(of_bytes).sum::<i64>()
        };
        let sums = [sum(i64::from), sum(|byte| i64::from(byte.cast_signed()))];
        if !stated.is_some_and(|stated| sums.iter().any(|sum| u64::try_from(*sum) == Ok(stated))) {
            return Err(TarError::Header { at, why: "its checksum is wrong" });
        }
        Ok(Some(header))
    }

    /// None: the end of the file.
    fn block(&mut self) -> Result<Option<[u8; BLOCK]>, TarError> {
        let mut block = [0; BLOCK];
        let mut have = 0;
        while have < BLOCK {
            let ready = fill(&mut self.input)?;
            let length = ready.len().min(BLOCK - have);
            if length == 0 {
                return if have == 0 { Ok(None) } else { Err(TarError::Truncated(self.position)) };
            }
            block[have..have + length].copy_from_slice(&ready[..length]);
            self.consume(length);
            have += length;
        }
        Ok(Some(block))
    }

    fn extension(&mut self, size: u64) -> Result<Vec<u8>, TarError> {
        if size > MAX_EXTENSION_LEN {
            return Err(TarError::Header { at: self.position, why: "its extension is longer than 1 MiB" });
        }
        let mut bytes = Vec::new();
        (self.left, self.padding) = (size, padding(size));
        self.copy_to(&mut bytes)?;
        Ok(bytes)
    }

    fn skip(&mut self, mut bytes: u64) -> Result<(), TarError> {
        while bytes > 0 {
            let length = fill(&mut self.input)?.len().min(usize::try_from(bytes).unwrap_or(usize::MAX));
            if length == 0 {
                return Err(TarError::Truncated(self.position));
            }
            self.consume(length);
            bytes -= length as u64;
        }
        Ok(())
    }

    fn consume(&mut self, length: usize) {
        self.input.consume(length);
        self.position += length as u64;
    }
}

impl<R: BufRead + io::Seek> Archive<R> {
    /// Leaves the content of the last entry out without reading it.
    ///
    /// # Errors
    /// The file cannot be sought.
    pub fn seek_over(&mut self) -> Result<(), TarError> {
        let offset = i64::try_from(self.left).map_err(|_| TarError::Truncated(self.position))?;
        self.input.seek_relative(offset)?;
        self.position += self.left;
        self.left = 0;
        Ok(())
    }
}

/// Bytes that are ready; none at the end.
fn fill(input: &mut impl BufRead) -> io::Result<&[u8]> {
    // Twice, since the borrow of a first success would last.
    while let Err(error) = input.fill_buf() {
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
    input.fill_buf()
}

fn padding(size: u64) -> u64 {
    size.wrapping_neg() % BLOCK as u64
}

/// The bytes up to the first NUL.
fn text(field: &[u8]) -> &[u8] {
    field.split(|byte| *byte == 0).next().unwrap_or_default()
}

/// The name in the header itself. In GNU's own form the place of the prefix has other fields.
fn short_name(header: &[u8; BLOCK]) -> Vec<u8> {
    let (name, prefix) = (text(&header[..100]), text(&header[345..500]));
    if &header[257..263] != b"ustar\0" || prefix.is_empty() {
        return name.to_vec();
    }
    [prefix, name].join(&b'/')
}

/// A number in octal digits, or in GNU's base 256. None: it is none, or negative.
fn number(field: &[u8]) -> Option<u64> {
    let (first, rest) = field.split_first()?;
    if first & 0x80 != 0 {
        // 0xff begins a negative number.
        let begin = if *first == 0x80 { 0 } else { return None };
        return rest.iter().try_fold(begin, |value: u64, byte| Some(value.checked_mul(256)? | u64::from(*byte)));
    }
    let digits = field.trim_ascii_start();
    let length = digits.iter().position(|byte| matches!(byte, 0 | b' ')).unwrap_or(digits.len());
    digits[..length].iter().try_fold(0_u64, |value, byte| match byte {
        b'0'..=b'7' => value.checked_mul(8)?.checked_add(u64::from(byte - b'0')),
        _ => None,
    })
}

/// What is wrong with the records of a PAX header.
enum RecordProblem {
    Malformed,
    Sparse,
}

impl RecordProblem {
    fn at(self, at: u64) -> TarError {
        match self {
            RecordProblem::Malformed => TarError::Header { at, why: "its PAX records are malformed" },
            RecordProblem::Sparse => TarError::Unsupported { at, what: "a sparse file" },
        }
    }
}

/// Reads `LENGTH KEY=VALUE\n` records, each with its own length in decimal digits.
fn read_records(mut rest: &[u8], extension: &mut Extension) -> Result<(), RecordProblem> {
    while !rest.is_empty() {
        let (key, value, after) = split_record(rest).ok_or(RecordProblem::Malformed)?;
        rest = after;
        let decimal = || str::from_utf8(value).ok().and_then(|text| text.parse::<u64>().ok()).ok_or(RecordProblem::Malformed);
        match key {
            b"path" => extension.name = Some(value.to_vec()),
            b"linkpath" => extension.target = Some(value.to_vec()),
            b"size" => extension.size = Some(decimal()?),
            b"uid" => extension.uid = Some(decimal()?),
            b"gid" => extension.gid = Some(decimal()?),
            b"mtime" => extension.mtime = str::from_utf8(value).ok().and_then(|text| text.split('.').next()?.parse().ok()),
            _ if key.starts_with(b"GNU.sparse.") => return Err(RecordProblem::Sparse),
            _ if key.starts_with(b"SCHILY.xattr.") || key.starts_with(b"LIBARCHIVE.xattr.") => extension.xattrs += 1,
            _ => {}
        }
    }
    Ok(())
}

/// Key, value, and what comes after the record.
fn split_record(records: &[u8]) -> Option<(&[u8], &[u8], &[u8])> {
    let space = records.iter().position(|byte| *byte == b' ')?;
    let length: usize = str::from_utf8(&records[..space]).ok()?.parse().ok()?;
    let record = records.get(space + 1..length)?.strip_suffix(b"\n")?;
    let equals = record.iter().position(|byte| *byte == b'=')?;
    Some((&record[..equals], &record[equals + 1..], &records[length..]))
}

/// Reads at most so many bytes of a file from a place on, without moving others that read it.
pub struct Section {
    file: std::sync::Arc<std::fs::File>,
    at: u64,
    end: u64,
}

impl Section {
    /// `length` bytes from `at` on.
    pub fn new(file: std::sync::Arc<std::fs::File>, at: u64, length: u64) -> Self {
        Section { file, at, end: at.saturating_add(length) }
    }
}

impl Read for Section {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let most = into.len().min(usize::try_from(self.end - self.at).unwrap_or(usize::MAX));
        let read = std::os::unix::fs::FileExt::read_at(&*self.file, &mut into[..most], self.at)?;
        self.at += read as u64;
        Ok(read)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]
    use super::*;

    /// A header with a right checksum.
    fn header(name: &str, flag: u8, size: &[u8]) -> Vec<u8> {
        let mut header = vec![0; BLOCK];
        header[..name.len()].copy_from_slice(name.as_bytes());
        header[100..124].copy_from_slice(b"0000644\x000000000\x000000000\0");
        header[124..124 + size.len()].copy_from_slice(size);
        header[148..156].fill(b' ');
        header[156] = flag;
        header[257..265].copy_from_slice(b"ustar\x0000");
        let sum: u64 = header.iter().map(|byte| u64::from(*byte)).sum();
        header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        header
    }

    fn read(bytes: &[u8]) -> Result<Vec<(String, u64)>, TarError> {
        let (mut archive, mut found) = (Archive::new(bytes), Vec::new());
        while let Some(entry) = archive.next_entry()? {
            found.push((String::from_utf8_lossy(&entry.name).into_owned(), entry.size));
        }
        Ok(found)
    }

    #[test]
    fn a_size_is_octal_or_of_base_256_and_never_negative() {
        assert_eq!(number(b"0000017\0"), Some(15));
        assert_eq!(number(b"     17 "), Some(15));
        assert_eq!(number(b""), None);
        assert_eq!(number(b"\x80\0\0\0\0\0\0\0\0\0\x01\0"), Some(256));
        assert_eq!(number(b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff"), None);
        assert_eq!(number(b"\x80\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff"), None, "more than fits");
        assert_eq!(number(b"0000019\0"), None);
    }

    #[test]
    fn an_archive_that_is_cut_off_or_changed_is_an_error_and_one_without_an_end_is_none() {
        let whole = [header("f", b'0', b"3"), b"abc".to_vec(), vec![0; 509]].concat();
        assert_eq!(read(&whole).unwrap(), [("f".to_owned(), 3)]);
        assert_eq!(read(&[&whole[..], &[0; 1024]].concat()).unwrap().len(), 1);
        assert!(matches!(read(&whole[..600]), Err(TarError::Truncated(_))));
        assert!(matches!(read(&whole[..100]), Err(TarError::Truncated(_))));
        let mut changed = whole.clone();
        changed[1] = b'x';
        assert!(matches!(read(&changed), Err(TarError::Header { why: "its checksum is wrong", .. })));
        assert!(matches!(read(&[&[0; BLOCK], &whole[..]].concat()), Err(TarError::Header { .. })));
    }

    #[test]
    fn an_extension_is_bounded_and_belongs_to_one_entry() {
        let huge = header("x", b'x', b"77777777777");
        assert!(matches!(read(&huge), Err(TarError::Header { why: "its extension is longer than 1 MiB", .. })));
        let pax = |text: &str| {
            let mut bytes = [header("x", b'x', format!("{:o}", text.len()).as_bytes()), text.as_bytes().to_vec()].concat();
            bytes.resize(bytes.len().next_multiple_of(BLOCK), 0);
            bytes
        };
        let both = [pax("13 path=a/b/c\n"), header("short", b'0', b"0"), header("plain", b'0', b"0")].concat();
        assert!(read(&both).is_err(), "a length that is wrong");
        let both = [pax("14 path=a/b/c\n"), header("short", b'0', b"0"), header("plain", b'0', b"0")].concat();
        assert_eq!(read(&both).unwrap(), [("a/b/c".to_owned(), 0), ("plain".to_owned(), 0)]);
        assert!(matches!(read(&[pax("22 GNU.sparse.major=1\n"), header("s", b'0', b"0")].concat()), Err(TarError::Unsupported { .. })));
        assert!(matches!(read(&pax("14 path=a/b/c\n")), Err(TarError::Truncated(_))), "an extension of nothing");
    }
}
