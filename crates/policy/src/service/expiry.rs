//! The moment from which on a key is refused, as TOML writes it.
//!
//! A date means its beginning in UTC. A time without an offset is refused, because it would mean
//! another moment on another host; fractions of a second are left out. Whether the moment has come
//! is for the reader of a clock.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use toml::value::{Date, Datetime, Offset, Time};

use crate::{check::Checked, diagnostic::Diagnostic};

/// A moment as a string writes it.
pub(super) fn of_text(text: &str) -> Checked<SystemTime> {
    match text.parse::<Datetime>() {
        Ok(written) => of(&written),
        Err(_) => Err(no_moment("not a date or a time of RFC 3339")),
    }
}

/// A moment as TOML has it.
pub(super) fn of(written: &Datetime) -> Checked<SystemTime> {
    let Some(date) = written.date else { return Err(no_moment("a time without a date")) };
    let seconds = match (written.time, written.offset) {
        (None, _) => 0,
        (Some(time), Some(offset)) => seconds(time) - ahead_of_utc(offset),
        (Some(_), None) => return Err(no_moment("a time without its offset from UTC")),
    };
    let since = u64::try_from(days(date) * 86_400 + seconds).ok();
    let moment = since.and_then(|since| UNIX_EPOCH.checked_add(Duration::from_secs(since)));
    moment.ok_or_else(|| Diagnostic::new("a key cannot expire before 1970", "long past").help("remove the key, or this line"))
}

fn no_moment(label: &str) -> Diagnostic {
    Diagnostic::new("`expires` must be a date, or a time with its offset from UTC", label)
        .help("write 2027-01-31, which is its beginning in UTC, or 2027-01-31T18:00:00Z")
}

/// Seconds of the day.
fn seconds(time: Time) -> i64 {
    (i64::from(time.hour) * 60 + i64::from(time.minute)) * 60 + i64::from(time.second.unwrap_or(0))
}

/// Seconds by which a clock with this offset is ahead of one in UTC.
fn ahead_of_utc(offset: Offset) -> i64 {
    match offset {
        Offset::Z => 0,
        Offset::Custom { minutes } => i64::from(minutes) * 60,
    }
}

/// Days since 1970-01-01 in the Gregorian calendar. A year is counted from March, so that a leap
/// day is its last.
fn days(date: Date) -> i64 {
    let (year, month, day) = (i64::from(date.year), i64::from(date.month), i64::from(date.day));
    let (year, month) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let leap_days = year.div_euclid(4) - year.div_euclid(100) + year.div_euclid(400);
    // The first of March of the year 0 lies 719,468 days before 1970.
    365 * year + leap_days + (153 * month + 2) / 5 + day - 1 - 719_468
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]
    use super::*;

    #[test]
    fn moments_are_those_of_the_calendar() {
        // As `date --utc --date=TEXT +%s` has them.
        for (text, seconds) in [
            ("1970-01-01", 0),
            ("1970-01-01T00:00:00Z", 0),
            ("2000-02-29", 951_782_400),
            ("2000-03-01", 951_868_800),
            ("2024-12-31T23:59:59Z", 1_735_689_599),
            ("2027-01-31T18:00:00+02:00", 1_801_411_200),
            ("2027-01-31T18:00:00-05:30", 1_801_438_200),
            ("2038-01-19T03:14:08Z", 2_147_483_648),
            ("2100-03-01", 4_107_542_400),
            ("9999-12-31T23:59:59.9Z", 253_402_300_799),
        ] {
            assert_eq!(of_text(text).unwrap(), UNIX_EPOCH + Duration::from_secs(seconds), "{text}");
        }
    }

    #[test]
    fn what_is_no_one_moment_is_refused() {
        for (text, said) in [
            ("2027-02-29", "not a date"),
            ("tomorrow", "not a date"),
            ("", "not a date"),
            ("18:00:00", "without a date"),
            ("2027-01-31T18:00:00", "without its offset"),
            ("1969-12-31", "long past"),
            ("1970-01-01T00:00:00+01:00", "long past"),
            ("0000-01-01", "long past"),
        ] {
            assert!(of_text(text).unwrap_err().label.contains(said), "{text}");
        }
    }
}
