//! Which restrictions of a policy no attack has tried.
//!
//! Limits, and the globs of `[scratch]`: of each it is known which attack would try it. A
//! list of addresses and names has a suite of its own, and screening restricts nothing.

use stockade_policy::model::{Access, Policy};
use stockade_protocol::LimitKey;

use crate::{Finding, State, fixture::Fixture};

/// The attack that tries a limit.
fn attack_on(key: LimitKey) -> Option<&'static str> {
    Some(match key {
        LimitKey::Wall => "sleep past the wall clock",
        LimitKey::Cpu => "CPU time",
        LimitKey::Memory => "memory",
        LimitKey::AddressSpace => "raise RLIMIT_AS",
        LimitKey::Processes => "processes",
        LimitKey::FileSize => "a large file",
        LimitKey::OpenFiles => "open files",
        LimitKey::Stack => "raise RLIMIT_STACK",
        LimitKey::ScratchSize => "fill a host scratch",
        LimitKey::ScratchFiles => "many files",
        LimitKey::TmpSize => "fill /tmp",
        LimitKey::OutputSize => "flood stdout",
        LimitKey::Cpus | LimitKey::CollectSize => return None,
    })
}

/// Their names, as a policy spells them.
pub(crate) fn uncovered(own: &Policy, fixture: &Fixture, findings: &[Finding]) -> Vec<String> {
    let tried = |name: &str| findings.iter().any(|finding| finding.attack == name && finding.state != State::Absent);
    // Nothing is written to a read-only scratch, which other attacks try.
    let read_only = own.scratch.access == Access::Ro;
    let mut all = Vec::new();
    for (key, _) in own.limits.iter().filter(|(_, value)| value.is_some()) {
        let moot = read_only && matches!(key, LimitKey::ScratchSize | LimitKey::ScratchFiles);
        if !moot && !attack_on(key).is_some_and(tried) {
            all.push(format!("limits.{}", key.name()));
        }
    }
    let globs = |name: &str, globs: &[String], files: &[crate::guarded::GuardedFile]| -> Vec<String> {
        let without = globs.iter().filter(|glob| files.iter().all(|file| file.glob != **glob));
        without.map(|glob| format!("scratch.{name} {glob}")).collect()
    };
    if !read_only {
        all.extend(globs("read_only", &own.scratch.read_only, &fixture.read_only));
    }
    all.extend(globs("hidden", &own.scratch.hidden, &fixture.hidden));
    if !own.egress.whitelist.is_empty() {
        all.push(String::from("egress.whitelist"));
    }
    all
}
