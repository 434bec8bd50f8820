//! Whether the sandbox's mounts are those of the plan, from its mountinfo (proc_pid_mountinfo(5)).
//!
//! Every mount is read-only and nosuid unless the plan lists it as writable; every mount that
//! the plan requires is there. Which file systems they are, and what lies in them, is not
//! looked at.

use std::{collections::BTreeSet, ffi::OsString, os::unix::ffi::OsStringExt};

use rustix::{fd::OwnedFd, io::Errno};
use stockade_policy::plan::Plan;

use crate::{
    ErrorKind, LaunchError,
    error::ReceiptError,
    layers::{Layer, Layers},
};

/// Mount points as bytes.
type Points = BTreeSet<Vec<u8>>;

/// The mounts of the plan.
pub(super) struct ExpectedMounts {
    writable: Points,
    required: Points,
    layers: Layers,
}

impl ExpectedMounts {
    pub(super) fn of(plan: &Plan) -> Self {
        let points = |paths: Vec<std::path::PathBuf>| paths.into_iter().map(|path| OsString::from(path).into_vec()).collect();
        ExpectedMounts {
            writable: points(plan.writable_mounts()),
            required: points(plan.required_mounts()),
            layers: Layers::in_this_build(),
        }
    }

    /// Reads the mounts and compares. Returns how many there are.
    ///
    /// # Errors
    /// They differ from the plan, or cannot be read.
    pub(super) fn check(&self, mountinfo: &OwnedFd) -> Result<u32, LaunchError> {
        let mut missing: BTreeSet<&[u8]> = self.required.iter().map(Vec::as_slice).collect();
        let mut count = 0;
        let mut point = Vec::with_capacity(256);
        each_line(mountinfo, &mut |line| {
            self.check_line(line, &mut point)?;
            count += 1;
            missing.remove(point.as_slice());
            Ok(())
        })?;
        match missing.first() {
            Some(point) => Err(wrong("not mounted: ", point)),
            None => Ok(count),
        }
    }

    /// One mount; leaves where it is in `point`.
    fn check_line(&self, line: &[u8], point: &mut Vec<u8>) -> Result<(), LaunchError> {
        let mut fields = line.split(|&byte| byte == b' ').skip(4);
        let (Some(escaped), Some(options)) = (fields.next(), fields.next()) else {
            return Err(wrong("unreadable mount ", line));
        };
        unescape(escaped, point);
        let has = |option: &[u8]| options.split(|&byte| byte == b',').any(|o| o == option);
        let all_are_kept = |layers: &[Layer]| layers.iter().all(|layer| self.layers.has(*layer));
        let must_be_read_only =
            !self.writable.contains(point) && all_are_kept(&[Layer::ReadOnlyRoot, Layer::ReadOnlyProc, Layer::DetachedRoot]);
        if must_be_read_only && !has(b"ro") {
            return Err(wrong("writable: ", point));
        }
        if !has(b"nosuid") && all_are_kept(&[Layer::ScratchFlags, Layer::DetachedRoot]) {
            return Err(wrong("honours set-ID bits: ", point));
        }
        Ok(())
    }
}

fn wrong(problem: &'static str, point: &[u8]) -> LaunchError {
    ReceiptError::Mount { problem, point: String::from_utf8_lossy(point).into_owned() }.into()
}

/// Reads a file line by line: what code has left in a scratch can make thousands of mounts.
fn each_line(file: &OwnedFd, check: &mut dyn FnMut(&[u8]) -> Result<(), LaunchError>) -> Result<(), LaunchError> {
    let failed = LaunchError::system(ErrorKind::Receipt, "read the sandbox's mounts");
    let mut buffer = vec![0; 8 << 10];
    let mut held = 0;
    loop {
        if held == buffer.len() {
            buffer.resize(held * 2, 0);
        }
        match rustix::io::read(file, buffer.get_mut(held..).unwrap_or_default()) {
            Ok(0) => return if held == 0 { Ok(()) } else { Err(failed(Errno::BADMSG)) },
            Ok(n) => held += n,
            Err(Errno::INTR) => {}
            Err(errno) => return Err(failed(errno)),
        }
        let mut rest = buffer.get(..held).unwrap_or_default();
        while let Some(end) = rest.iter().position(|&byte| byte == b'\n') {
            check(rest.get(..end).unwrap_or_default())?;
            rest = rest.get(end + 1..).unwrap_or_default();
        }
        let (from, left) = (held - rest.len(), rest.len());
        buffer.copy_within(from..held, 0);
        held = left;
    }
}

/// Undoes the octal escapes of mountinfo (`\040` for a space), into a buffer that is used again.
pub(crate) fn unescape(field: &[u8], plain: &mut Vec<u8>) {
    plain.clear();
    let mut rest = field;
    while let Some((&byte, tail)) = rest.split_first() {
        rest = tail;
        match tail {
            [a @ b'0'..=b'3', b @ b'0'..=b'7', c @ b'0'..=b'7', more @ ..] if byte == b'\\' => {
                plain.push((a - b'0') << 6 | (b - b'0') << 3 | (c - b'0'));
                rest = more;
            }
            _ => plain.push(byte),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]
    use std::{
        fs::File,
        io::{Seek, Write},
    };

    use super::{ExpectedMounts, Layers, unescape};

    fn check(required: &[&str], lines: &str) -> Result<u32, String> {
        let points = |paths: &[&str]| paths.iter().map(|path| path.as_bytes().to_vec()).collect();
        let expected = ExpectedMounts { writable: points(&["/tmp"]), required: points(required), layers: Layers::in_this_build() };
        let mut file = File::from(rustix::fs::memfd_create("mountinfo", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
        file.write_all(lines.as_bytes()).unwrap();
        file.rewind().unwrap();
        expected.check(&file.into()).map_err(|error| error.to_string())
    }

    #[test]
    fn mounts_are_compared_with_the_plan() {
        let root = "1 0 0:1 / / ro,nosuid,nodev - tmpfs tmpfs rw\n";
        let tmp = "2 1 0:1 /tmp /tmp rw,nosuid,nodev - tmpfs tmpfs rw\n";
        assert_eq!(check(&["/", "/tmp"], &[root, tmp].concat()), Ok(2));
        for (required, lines, words) in [
            ("/usr", root.to_owned(), "not mounted: /usr"),
            ("/", [root, "3 1 0:1 / /a\\040b rw,nosuid - tmpfs tmpfs rw\n"].concat(), "writable: /a b"),
            ("/", [root, "3 1 0:1 / /usr ro,nodev - ext4 x rw\n"].concat(), "honours set-ID bits: /usr"),
            ("/", [root, "3 1 0:1 /\n"].concat(), "unreadable mount 3 1 0:1 /"),
        ] {
            let error = check(&[required], &lines).unwrap_err();
            assert!(error.contains(words), "{error}");
        }
        assert!(check(&["/"], "1 0 0:1 / / ro,nosuid").is_err(), "a line without its end");
        let many: String = (0..5000).map(|n| format!("{n} 1 0:1 / /usr/{n} ro,nosuid,nodev - ext4 x rw\n")).collect();
        assert_eq!(check(&["/usr/4999"], &many), Ok(5000));
    }

    #[test]
    fn escapes_are_undone() {
        let mut plain = b"old".to_vec();
        unescape(b"/a\\040b\\134\\01", &mut plain);
        assert_eq!(plain, b"/a b\\\\01");
    }
}
