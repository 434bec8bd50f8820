//! Lines of `/proc/PID/maps` and `smaps`, which the kernel writes.
//!
//! It reads what the kernel shows and judges nothing. A line of another form is `None`.

use super::{VdsoPart, protection};

/// One mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mapping<'a> {
    /// Where it begins.
    pub start: u64,
    /// The first address behind it.
    pub end: u64,
    /// [`protection`] bits.
    pub protection: u64,
    /// Whether writes reach others (`s` in place of `p`).
    pub shared: bool,
    /// A path, a name in brackets, or nothing.
    pub name: &'a [u8],
}

impl<'a> Mapping<'a> {
    /// Reads a line that opens a mapping: `start-end perms offset device inode   name`.
    pub fn parse(line: &'a [u8]) -> Option<Mapping<'a>> {
        let mut rest = line;
        let mut field = || {
            let end = rest.iter().position(|&byte| byte == b' ').unwrap_or(rest.len());
            let (field, behind) = rest.split_at_checked(end)?;
            rest = behind.trim_ascii_start();
            (!field.is_empty()).then_some(field)
        };
        let (range, permissions) = (field()?, field()?);
        let (_offset, _device, _inode) = (field()?, field()?, field()?);
        let dash = range.iter().position(|&byte| byte == b'-')?;
        let (start, end) = (hexadecimal(range.get(..dash)?)?, hexadecimal(range.get(dash + 1..)?)?);
        let &[read, write, exec, shared] = permissions else { return None };
        let bit = |shown: u8, letter: u8, bit: u64| if shown == letter { bit } else { 0 };
        let protection = bit(read, b'r', protection::READ) | bit(write, b'w', protection::WRITE) | bit(exec, b'x', protection::EXEC);
        Some(Mapping { start, end, protection, shared: shared == b's', name: rest })
    }

    /// Whether it is a part of the vDSO: its code, or the kernel's data for it.
    pub fn is_vdso(&self) -> bool {
        self.name == b"[vdso]" || self.name.starts_with(b"[vvar")
    }

    /// The same as a part, by the address of the vDSO's code.
    pub fn vdso_part(&self, code: u64) -> VdsoPart {
        VdsoPart { offset: self.start.wrapping_sub(code) as i64, length: self.end.wrapping_sub(self.start) }
    }
}

fn hexadecimal(digits: &[u8]) -> Option<u64> {
    u64::from_str_radix(core::str::from_utf8(digits).ok()?, 16).ok()
}
