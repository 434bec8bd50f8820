//! The limits of a run and how a person writes their values.
//!
//! The same keys and the same spelling serve a policy, a request and a result.
//! This file knows nothing of what enforces a limit, nor of how far a request may go.

use alloc::{format, string::String, vec::Vec};
use core::fmt;

/// What kind of quantity a limit is, and with it the unit of its integer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Quantity {
    /// Milliseconds; written `"30s"`, `"500ms"`, `"10min"`, `"1h"`.
    Duration,
    /// Bytes; written `"256MiB"`, `"64KiB"`, `"1GiB"`, `"100B"`.
    Size,
    /// A plain number of things.
    Count,
    /// Thousandths of one CPU; written as a number such as `0.5`.
    Cpus,
}

macro_rules! limit_keys {
    ($(#[doc = $about:literal] $variant:ident $key:literal $json:literal $quantity:ident;)*) => {
        /// One limit of a run.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        #[repr(u8)]
        pub enum LimitKey { $(#[doc = $about] $variant,)* }

        impl LimitKey {
            /// Every limit, in the order in which a policy lists them.
            pub const ALL: [LimitKey; 14] = [$(LimitKey::$variant,)*];

            /// The key in a policy and in a request.
            pub const fn name(self) -> &'static str {
                match self { $(LimitKey::$variant => $key,)* }
            }

            /// The key in a result, with its unit.
            pub const fn json_name(self) -> &'static str {
                match self { $(LimitKey::$variant => $json,)* }
            }

            /// What it bounds, as a sentence.
            pub fn about(self) -> &'static str {
                // As a doc comment it begins with a blank.
                match self { $(LimitKey::$variant => $about,)* }.trim_start()
            }

            /// What kind of quantity the value is.
            pub const fn quantity(self) -> Quantity {
                match self { $(LimitKey::$variant => Quantity::$quantity,)* }
            }
        }
    };
}

limit_keys! {
    /// Time from the start of the program to its end.
    Wall "wall" "wall_ms" Duration;
    /// CPU time of all processes together.
    Cpu "cpu" "cpu_ms" Duration;
    /// Memory of all processes together, tmpfs included, with no swap.
    Memory "memory" "memory_bytes" Size;
    /// Address space of each process (RLIMIT_AS).
    AddressSpace "address_space" "address_space_bytes" Size;
    /// Processes and threads at one time.
    Processes "processes" "processes" Count;
    /// CPUs' worth of time per period.
    Cpus "cpus" "cpus_milli" Cpus;
    /// The largest file that may be written (RLIMIT_FSIZE).
    FileSize "file_size" "file_size_bytes" Size;
    /// Open descriptors of each process.
    OpenFiles "open_files" "open_files" Count;
    /// Stack of each process's first thread.
    Stack "stack" "stack_bytes" Size;
    /// What the scratch may grow by.
    ScratchSize "scratch_size" "scratch_size_bytes" Size;
    /// Files and directories that the scratch may hold more than at the start.
    ScratchFiles "scratch_files" "scratch_files" Count;
    /// `/tmp`, `/dev/shm` and the home directory together.
    TmpSize "tmp_size" "tmp_size_bytes" Size;
    /// Bytes kept of stdout, and of stderr.
    OutputSize "output_size" "output_size_bytes" Size;
    /// Bytes of all collected files together.
    CollectSize "collect_size" "collect_size_bytes" Size;
}

impl LimitKey {
    /// Finds a limit by the name that a policy or request uses.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|key| key.name() == name)
    }
}

/// A value for every limit; `None` means that there is no limit.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "json", derive(serde::Serialize, serde::Deserialize))]
pub struct Limits {
    values: [Option<u64>; LimitKey::ALL.len()],
}

impl Limits {
    /// The value in the limit's unit, or `None` for no limit.
    pub fn get(&self, key: LimitKey) -> Option<u64> {
        self.values[key as usize]
    }

    /// Sets one limit.
    pub fn set(&mut self, key: LimitKey, value: Option<u64>) {
        self.values[key as usize] = value;
    }

    /// All limits with their values.
    pub fn iter(&self) -> impl Iterator<Item = (LimitKey, Option<u64>)> + '_ {
        LimitKey::ALL.into_iter().map(|key| (key, self.get(key)))
    }
}

/// Why a written value is not a value of its limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LimitError {
    /// What was expected, with an example.
    pub expected: String,
}

impl fmt::Display for LimitError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.expected)
    }
}

impl core::error::Error for LimitError {}

const DURATIONS: &[(&str, u64)] = &[("ms", 1), ("s", 1_000), ("min", 60_000), ("h", 3_600_000)];
const SIZES: &[(&str, u64)] = &[("B", 1), ("KiB", 1 << 10), ("MiB", 1 << 20), ("GiB", 1 << 30), ("TiB", 1 << 40)];

fn units(quantity: Quantity) -> &'static [(&'static str, u64)] {
    match quantity {
        Quantity::Duration => DURATIONS,
        Quantity::Size => SIZES,
        Quantity::Count | Quantity::Cpus => &[],
    }
}

/// The kernel has no more process ids (PID_MAX_LIMIT, 2^22), refuses a larger pids.max, and
/// one of them is pid 1's.
const MAX_PROCESSES: u64 = (1 << 22) - 1;

impl LimitKey {
    fn expected(self) -> LimitError {
        let example = match self.quantity() {
            Quantity::Duration => "a duration such as \"30s\", \"500ms\", \"10min\"",
            Quantity::Size => "a size such as \"256MiB\", \"64KiB\", \"1GiB\"",
            Quantity::Count if self == LimitKey::Processes => "a whole number from 1 to 4194303",
            Quantity::Count => "a whole number above zero",
            Quantity::Cpus => "a number of CPUs such as 0.5 or 2, at least 0.01",
        };
        LimitError { expected: format!("`{}` must be {example}, or \"none\"", self.name()) }
    }

    /// Reads a value written as text. `"none"` is `Ok(None)`.
    ///
    /// # Errors
    /// The text is not a number with one of the known units, is zero, or does not fit.
    pub fn parse_text(self, text: &str) -> Result<Option<u64>, LimitError> {
        if text == "none" {
            return Ok(None);
        }
        let split = text.find(|c: char| !c.is_ascii_digit()).ok_or_else(|| self.expected())?;
        let (number, unit) = text.split_at(split);
        let number: u64 = number.parse().map_err(|_| self.expected())?;
        let factor = units(self.quantity()).iter().find(|(name, _)| *name == unit.trim_start()).ok_or_else(|| self.expected())?.1;
        let value = number.checked_mul(factor).ok_or_else(|| self.expected())?;
        self.checked(value)
    }

    /// Reads a value written as a whole number; only counts and CPUs are.
    ///
    /// # Errors
    /// The limit is a size or a duration (which need a unit), or the number is out of range.
    pub fn parse_integer(self, number: i64) -> Result<Option<u64>, LimitError> {
        let number = u64::try_from(number).map_err(|_| self.expected())?;
        match self.quantity() {
            Quantity::Count => self.checked(number),
            Quantity::Cpus => self.checked(number.checked_mul(1000).ok_or_else(|| self.expected())?),
            Quantity::Duration | Quantity::Size => Err(self.expected()),
        }
    }

    /// Reads a value written with a decimal point; only CPUs are.
    ///
    /// # Errors
    /// The limit is not `cpus`, or the number is below 0.01 or absurdly large.
    pub fn parse_float(self, number: f64) -> Result<Option<u64>, LimitError> {
        if self.quantity() != Quantity::Cpus || !(0.01..=65536.0).contains(&number) {
            return Err(self.expected());
        }
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "the range was checked above")]
        let milli = (number * 1000.0 + 0.5) as u64;
        self.checked(milli)
    }

    fn checked(self, value: u64) -> Result<Option<u64>, LimitError> {
        // No limit is 0: "none" alone says that there is none.
        let least = if self.quantity() == Quantity::Cpus { 10 } else { 1 };
        let most = match self {
            LimitKey::Processes => MAX_PROCESSES,
            // The kernel reads most of these as signed, and no real limit exceeds 2^60.
            _ => 1 << 60,
        };
        if value < least || value > most { Err(self.expected()) } else { Ok(Some(value)) }
    }

    /// Writes a value as a person would.
    pub fn format(self, value: Option<u64>) -> String {
        let Some(value) = value else { return String::from("none") };
        match self.quantity() {
            Quantity::Count => format!("{value}"),
            Quantity::Cpus if value % 1000 == 0 => format!("{}", value / 1000),
            Quantity::Cpus => {
                let text = format!("{}.{:03}", value / 1000, value % 1000);
                String::from(text.trim_end_matches('0'))
            }
            quantity => {
                // Of nothing, the smallest unit.
                let fits = |factor: u64| value % factor == 0 && value >= factor || factor == 1;
                let whole: Vec<_> = units(quantity).iter().filter(|(_, factor)| fits(*factor)).collect();
                whole.last().map_or_else(|| format!("{value}"), |(unit, factor)| format!("{}{unit}", value / factor))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]
    use super::*;

    #[test]
    fn written_values_survive_a_round_trip() {
        for (key, text) in
            [(LimitKey::Wall, "30s"), (LimitKey::Wall, "10min"), (LimitKey::Memory, "512MiB"), (LimitKey::TmpSize, "1536KiB")]
        {
            let value = key.parse_text(text).unwrap();
            assert_eq!(key.format(value), text);
        }
        assert_eq!(LimitKey::Cpus.parse_float(0.5).unwrap(), Some(500));
        assert_eq!(LimitKey::Cpus.format(Some(1500)), "1.5");
        assert_eq!(LimitKey::Memory.parse_text("none").unwrap(), None);
    }

    #[test]
    fn ambiguous_values_are_refused() {
        for text in ["256", "", "MiB", "-1MiB", "1.5GiB", "1MB", "0s", "99999999999GiB", "30 m"] {
            assert!(LimitKey::Memory.parse_text(text).is_err(), "{text}");
        }
        assert!(LimitKey::Memory.parse_integer(5).is_err());
        assert!(LimitKey::Processes.parse_integer(0).is_err());
        assert_eq!(LimitKey::Processes.parse_integer(4_194_303).unwrap(), Some(4_194_303));
        assert_eq!(LimitKey::OpenFiles.parse_integer(4_194_304).unwrap(), Some(4_194_304));
        let error = LimitKey::Processes.parse_integer(4_194_304).unwrap_err();
        assert!(error.expected.contains("from 1 to 4194303"), "{error}");
        assert!(LimitKey::Cpus.parse_float(f64::NAN).is_err());
    }
}
