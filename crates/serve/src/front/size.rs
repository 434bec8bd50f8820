//! What a run takes of the capacity: what its request asks for, and else what its policy has.
//!
//! The settings can change while a request waits, so its size is computed anew from what it asks. Whether
//! there is room for it is decided in `admission`.

use stockade_protocol::service::{RunSize, Settings};

/// What a request says of what it takes.
#[derive(Clone, Debug, Default)]
pub struct AskedSize {
    /// Its language; empty: it names none, or none that a policy can have.
    pub language: String,
    /// Of its program.
    pub program: AskedLimits,
    /// Of its compiler.
    pub compiler: AskedLimits,
}

/// Limits that a request names; none: it takes those of its policy. A limit may be that there is none.
#[derive(Clone, Copy, Debug, Default)]
pub struct AskedLimits {
    /// Thousandths of a CPU.
    pub cpus: Option<Option<u64>>,
    /// Bytes.
    pub memory: Option<Option<u64>>,
}

impl AskedLimits {
    /// What has no limit takes the whole.
    fn or(self, usual: RunSize, whole: RunSize) -> RunSize {
        let or = |asked: Option<Option<u64>>, usual, whole| asked.map_or(usual, |limit| limit.unwrap_or(whole));
        RunSize { cpus: or(self.cpus, usual.cpus, whole.cpus), memory: or(self.memory, usual.memory, whole.memory) }
    }
}

impl AskedSize {
    /// What the run takes under a policy, as the settings have it: the more of what its compiler and its program
    /// take, where it has both.
    pub fn under(&self, settings: &Settings, policy: &str) -> RunSize {
        let usual = settings.policies.get(policy).copied().unwrap_or_default();
        let whole = settings.capacity.size;
        let program = self.program.or(usual, whole);
        let is_compiled =
            settings.compiled.get(policy).is_some_and(|names| names.iter().any(|known| known.eq_ignore_ascii_case(&self.language)));
        if !is_compiled {
            return program;
        }
        let compiler = self.compiler.or(usual, whole);
        RunSize { cpus: program.cpus.max(compiler.cpus), memory: program.memory.max(compiler.memory) }
    }
}
