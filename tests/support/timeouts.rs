//! How long tests wait for what takes its time: by one factor for the whole suite, so that
//! it has the same result on a machine that is many times slower, such as an emulated one.
//!
//! `STOCKADE_TEST_TIMEOUT_FACTOR=8` makes waits, and the limits of runs that are about something else
//! than that limit's exact value, eight times as long. It excuses nothing that a run does.

use std::{sync::OnceLock, time::Duration};

fn factor() -> u32 {
    static FACTOR: OnceLock<u32> = OnceLock::new();
    *FACTOR.get_or_init(|| match std::env::var("STOCKADE_TEST_TIMEOUT_FACTOR") {
        Err(std::env::VarError::NotPresent) => 1,
        set => set
            .ok()
            .and_then(|text| text.parse().ok())
            .filter(|factor| *factor > 0)
            .expect("STOCKADE_TEST_TIMEOUT_FACTOR is a whole number from 1"),
    })
}

/// Whether this machine is said to be slower.
pub fn is_slow() -> bool {
    factor() > 1
}

/// So much time on a developer's machine is so much here.
pub fn scaled(time: Duration) -> Duration {
    time * factor()
}

/// The same, as the `wall` or `cpu` limit of a request or policy.
pub fn scaled_limit(milliseconds: u32) -> String {
    format!("{}ms", u64::from(milliseconds) * u64::from(factor()))
}
