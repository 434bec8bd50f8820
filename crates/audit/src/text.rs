//! Bounded texts, hashes, and times as a record has them.
//!
//! It escapes nothing: `protocol`'s module `text` does.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use sha2::{Digest, Sha256};
use stockade_protocol::text::hex;

/// The beginning of a text, at most so many bytes of it.
pub fn clip(text: &str, most: usize) -> String {
    text[..text.floor_char_boundary(most)].to_owned()
}

/// SHA-256 in hex.
pub fn sha256(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

/// A time as RFC 3339 in UTC with microseconds, so that texts compare as the times do.
pub fn time(at: SystemTime) -> String {
    const DAY: u64 = 86400;
    // A clock before 1970 has no better name than its beginning.
    let since = at.duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO);
    let (days, seconds) = (since.as_secs() / DAY, since.as_secs() % DAY);
    // Days to date by eras of 400 years that begin in March, so that a leap day is a year's last.
    let shifted = days + 719_468;
    let (era, day) = (shifted / 146_097, shifted % 146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let of_year = day - (365 * year + year / 4 - year / 100);
    let march = (5 * of_year + 2) / 153;
    let (date, month) = (of_year - (153 * march + 2) / 5 + 1, if march < 10 { march + 3 } else { march - 9 });
    let year = year + era * 400 + u64::from(month <= 2);
    let (hour, minute, second) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    format!("{year:04}-{month:02}-{date:02}T{hour:02}:{minute:02}:{second:02}.{:06}Z", since.subsec_micros())
}

/// Whether a text is the beginning of such a time, and so can be compared with one.
pub fn is_time(text: &str) -> bool {
    const SHAPE: &str = "dddd-dd-ddTdd:dd:dd.ddddddZ";
    let fits = |(found, wanted): (char, char)| if wanted == 'd' { found.is_ascii_digit() } else { found == wanted };
    let bare = text.strip_suffix('Z').unwrap_or(text);
    bare.len() >= "dddd-dd-dd".len() && text.len() <= SHAPE.len() && bare.chars().zip(SHAPE.chars()).all(fits)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_written_as_the_calendar_has_them() {
        let at = |seconds| time(UNIX_EPOCH + Duration::from_secs(seconds));
        assert_eq!(at(0), "1970-01-01T00:00:00.000000Z");
        assert_eq!(at(951_782_400), "2000-02-29T00:00:00.000000Z");
        assert_eq!(at(1_709_251_199), "2024-02-29T23:59:59.000000Z");
        assert_eq!(at(4_102_444_800), "2100-01-01T00:00:00.000000Z");
        assert_eq!(time(UNIX_EPOCH - Duration::from_secs(5)), at(0), "a clock before its beginning");
        assert!(is_time(&at(951_782_400)) && is_time("2026-11-22") && is_time("2026-11-22T06:50Z"));
        assert!(!is_time("2026-11") && !is_time("yesterday!") && !is_time("2026-11-22T06:50+01:00"));
    }
}
