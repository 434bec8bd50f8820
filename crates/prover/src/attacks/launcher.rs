//! The bounds that the launcher enforces: time and output.

use stockade_protocol::{LimitKey, Verdict};

use crate::{
    attack::{Attack, Class, Limits, Observation, Run, RunControl},
    fixture::Fixture,
    script::{Builder, n, script},
};

const CLASS: Class = Class::Launcher;
const LAUNCHER: &[&str] = &["launcher"];

pub(crate) fn attacks(fixture: &Fixture) -> Vec<Attack> {
    let mut all = wall_clock(fixture);
    all.extend(output(fixture));
    all
}

/// A policy may let a run take all the time it wants.
fn wall_clock(fixture: &Fixture) -> Vec<Attack> {
    type Prepare = fn(&mut Builder);
    const BLOCK: i64 = 0;
    let ways: [(&str, &str, Prepare); 3] = [
        ("sleep past the wall clock", "sleep for longer than the wall clock allows", |_| {}),
        ("sleep past the wall clock without signals", "block every signal first", |b| {
            let mask = b.bytes(&[0xff; 8]);
            b.need("rt_sigprocmask", &[n(BLOCK), mask, n(0), n(8)]);
        }),
        ("sleep past the wall clock in a new session", "leave the session first", |b| {
            b.may("setsid", &[]);
        }),
    ];
    let limits =
        |ms: u64| Limits::from([(LimitKey::Wall, Some(fixture.policy.limits_max.get(LimitKey::Wall).map_or(ms, |most| ms.min(most))))]);
    ways.into_iter()
        .map(|(name, tried, prepare)| {
            let act = script(|b| {
                prepare(b);
                // 1.2 s.
                let time = b.bytes(&[1u64.to_le_bytes(), 200_000_000u64.to_le_bytes()].concat());
                b.attack("nanosleep", &[time, n(0)]);
            });
            let run = Run {
                script: act,
                first_process: false,
                limits: limits(300),
                host_scratch: false,
                collect: &[],
                expected: String::from("wall_timeout"),
                judge: |done, _| Observation { held: done.ended_as(Verdict::WallTimeout), what: done.words() },
            };
            Attack::run(CLASS, name, tried, LAUNCHER, run, RunControl::Limits(limits(30_000)))
        })
        .collect()
}

fn output(fixture: &Fixture) -> Vec<Attack> {
    const KIB: u64 = 1 << 10;
    let limits = |kib: u64| {
        let wanted = kib * KIB;
        Limits::from([(
            LimitKey::OutputSize,
            Some(fixture.policy.limits_max.get(LimitKey::OutputSize).map_or(wanted, |most| wanted.min(most))),
        )])
    };
    [(1i64, "stdout"), (2, "stderr")]
        .into_iter()
        .map(|(fd, name)| {
            let act = script(|b| {
                let block = b.bytes(&[b'x'; 1 << 12]);
                b.repeat(256, "write", &[n(fd), block, n(1 << 12)]);
            });
            let run = Run {
                script: act,
                first_process: false,
                limits: limits(4),
                host_scratch: false,
                collect: &[],
                expected: String::from("output_limit"),
                judge: |done, _| Observation { held: done.ended_as(Verdict::OutputLimit), what: done.words() },
            };
            Attack::run(
                CLASS,
                format!("flood {name}"),
                format!("print 1 MiB to {name} where 64 times 4 KiB are let pass"),
                LAUNCHER,
                run,
                RunControl::Limits(limits(64)),
            )
        })
        .collect()
}
