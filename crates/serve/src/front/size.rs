//! What a run takes of the capacity: what its request asks for, and else what its policy has.
//!
//! The settings can change while a request waits, so its size is computed anew from what it asks. Whether
//! there is room for it is decided in `admission`.

use stockade_protocol::service::{RunSize, Settings};

/// What a request says of what it takes.
#[derive(Clone, Debug, Default)]
pub struct AskedSize {
    /// Its language; empty: it names none.
    pub language: String,
    /// Of its program.
    pub program: AskedLimits,
    /// Of its compiler.
    pub compiler: AskedLimits,
}

/// Limits that a request names; none: it takes those of its policy.
#[derive(Clone, Copy, Debug, Default)]
pub struct AskedLimits {
    /// Thousandths of a CPU.
    pub cpus: Option<u64>,
    /// Bytes.
    pub memory: Option<u64>,
}

impl AskedLimits {
    fn or(self, usual: RunSize) -> RunSize {
        RunSize { cpus: self.cpus.unwrap_or(usual.cpus), memory: self.memory.unwrap_or(usual.memory) }
    }
}

impl AskedSize {
    /// What the run takes under a policy, as the settings have it: the more of what its compiler and its program
    /// take, where it has both.
    pub fn under(&self, settings: &Settings, policy: &str) -> RunSize {
        let usual = settings.policies.get(policy).copied().unwrap_or_default();
        let program = self.program.or(usual);
        let is_compiled =
            settings.compiled.get(policy).is_some_and(|names| names.iter().any(|known| known.eq_ignore_ascii_case(&self.language)));
        if !is_compiled {
            return program;
        }
        let compiler = self.compiler.or(usual);
        RunSize { cpus: program.cpus.max(compiler.cpus), memory: program.memory.max(compiler.memory) }
    }
}
