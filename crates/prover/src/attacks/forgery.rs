//! A forged result: the launcher must not take the code's output for its own knowledge.

use nix::libc::{EACCES, EBADF};
use stockade_protocol::{Verdict, probe::Script};

use super::open;
use crate::{
    attack::{Attack, Class, Control, ControlExpectation, Expected, Limits, Observation, Run, RunControl},
    fixture::Fixture,
    inside::ProbeRun,
    script::{CWD, n, one, script},
};

const CLASS: Class = Class::ResultForgery;
const LAUNCHER: &[&str] = &["launcher"];

pub(crate) fn attacks(fixture: &Fixture) -> Vec<Attack> {
    let mut all = Vec::new();
    all.extend(the_status_pipe());
    all.extend(endings());
    all.push(a_printed_result());
    if !fixture.plan.scratch.read_only {
        all.extend(collected(fixture));
    }
    all
}

/// The pipe on which pid 1 reports.
fn the_status_pipe() -> Vec<Attack> {
    const F_GETFD: i64 = 1;
    let mut all: Vec<Attack> = (3..9)
        .map(|fd| {
            Attack::new(
                CLASS,
                format!("descriptor {fd}"),
                format!("find descriptor {fd} open: the executor has its status pipe, lifeline and image among 3 to 6"),
                &["executor"],
                one("fcntl", &[n(fd), n(F_GETFD)]),
                Expected::Errno(&[EBADF]),
                Control::Instead(one("fcntl", &[n(1), n(F_GETFD)]), ControlExpectation::Succeeds),
            )
        })
        .collect();
    for fd in [3, 5] {
        all.push(Attack::new(
            CLASS,
            format!("pid 1's descriptor {fd}"),
            format!("open /proc/1/fd/{fd} for writing, to report an end that was none"),
            &["executor", "landlock of the payload"],
            open(&format!("/proc/1/fd/{fd}"), 1),
            Expected::Errno(&[EACCES]),
            Control::Instead(open("/proc/self/fd/1", 1), ControlExpectation::Succeeds),
        ));
    }
    all
}

fn of_first(script: Script, expected: &str, judge: crate::attack::Judge) -> Run {
    Run { script, first_process: true, limits: Limits::new(), host_scratch: false, collect: &[], expected: String::from(expected), judge }
}

/// Ends that look like a limit's.
fn endings() -> Vec<Attack> {
    let exit = |status: i64| one("exit_group", &[n(status)]);
    let by_signal = |signal: i64| {
        script(|b| {
            let own = b.need("getpid", &[]);
            b.attack("kill", &[own, n(signal)]);
        })
    };
    let signaled = |done: &ProbeRun, _: &Fixture| Observation { held: done.ended_as(Verdict::Signaled), what: done.words() };
    let ordinary = || {
        RunControl::Run(Box::new(of_first(exit(7), "exited with 7", |done, _| Observation {
            held: done.ended_as(Verdict::Exited) && done.result.report.code == 7,
            what: done.words(),
        })))
    };
    type Case = (&'static str, &'static str, Script, &'static str, crate::attack::Judge);
    let cases: [Case; 6] =
        [
            ("an out-of-memory kill", "exit with 137, as if killed for memory", exit(137), "exited with status 137", |done, _| {
                Observation { held: done.ended_as(Verdict::Exited) && done.result.report.code == 137, what: done.words() }
            }),
            ("a wall timeout", "exit with 124, as if out of time", exit(124), "exited with status 124", |done, _| Observation {
                held: done.ended_as(Verdict::Exited) && done.result.report.code == 124,
                what: done.words(),
            }),
            ("a broken sandbox", "exit with 125, as if the sandbox had failed", exit(125), "exited with status 125", |done, _| {
                Observation { held: done.ended_as(Verdict::Exited) && done.result.report.code == 125, what: done.words() }
            }),
            ("a kill by a limit", "kill its own process by SIGKILL", by_signal(9), "signaled", signaled),
            ("a refused system call", "kill its own process by SIGSYS", by_signal(31), "signaled", signaled),
            ("used-up CPU time", "kill its own process by SIGXCPU", by_signal(24), "signaled", signaled),
        ];
    cases
        .into_iter()
        .map(|(name, tried, act, expected, judge)| {
            Attack::run(CLASS, format!("pretend {name}"), tried, LAUNCHER, of_first(act, expected, judge), ordinary())
        })
        .collect()
}

const FORGED: &str = "{\"verdict\":\"exited\",\"success\":true,\"code\":0,\"receipt\":{}}\n";

fn a_printed_result() -> Attack {
    let print = |status: i64| {
        script(|b| {
            let text = b.bytes(FORGED.as_bytes());
            b.need("write", &[n(1), text, n(i64::try_from(FORGED.len()).unwrap_or(0))]);
            b.attack("exit_group", &[n(status)]);
        })
    };
    Attack::run(
        CLASS,
        "a printed result",
        "print a result with success, and fail",
        LAUNCHER,
        of_first(print(3), "exited with status 3, the text as output", |done, _| Observation {
            held: done.ended_as(Verdict::Exited) && done.result.report.code == 3 && done.result.output == FORGED.as_bytes(),
            what: done.words(),
        }),
        RunControl::Run(Box::new(of_first(print(0), "the same text, and status 0", |done, _| Observation {
            held: done.result.report.success && done.result.output == FORGED.as_bytes(),
            what: done.words(),
        }))),
    )
}

/// Files that are asked for must be the code's own.
fn collected(fixture: &Fixture) -> Vec<Attack> {
    let nothing = |done: &ProbeRun, fixture: &Fixture| {
        let taken = done.result.report.files.iter().find(|file| file.text.as_ref().is_some_and(|text| text.contains(&fixture.secret)));
        let any = done.result.report.files.iter().any(|file| file.text.is_some() || file.base64.is_some());
        Observation { held: taken.is_none() && !any, what: format!("{} files returned; {}", done.result.report.files.len(), done.words()) }
    };
    let link = |from: &str, to: &str| {
        script(|b| {
            let (to, from) = (b.text(to), b.text(from));
            b.need("symlinkat", &[to, CWD, from]);
        })
    };
    let secret = fixture.secret_path();
    let directory = fixture.directory.to_string_lossy().into_owned();
    let mut all = Vec::new();
    for (name, act, collect) in [
        ("a link to a file of the host", link("stolen", &secret), &["stolen"] as &'static [&'static str]),
        ("a link to a directory of the host", link("way", &directory), &["way/secret"]),
        ("a link upwards", link("up", "../../../../../.."), &["up/etc/passwd"]),
    ] {
        all.push(Attack::run(
            CLASS,
            format!("{name} among collected files"),
            format!("have the launcher read {name} as if it were the code's own"),
            LAUNCHER,
            Run { collect, ..of_first(act, "nothing is returned", nothing) },
            RunControl::Run(Box::new(an_own_file())),
        ));
    }
    all
}

fn an_own_file() -> Run {
    Run {
        collect: &["kept"],
        ..of_first(
            script(|b| {
                let fd = b.open("kept", 0o101);
                let text = b.text("mine");
                b.need("write", &[fd, text, n(4)]);
            }),
            "the code's own file is returned",
            |done, _| Observation {
                held: done.result.report.files.iter().any(|file| file.path == "kept" && file.text.as_deref() == Some("mine")),
                what: format!("{} files returned", done.result.report.files.len()),
            },
        )
    }
}
