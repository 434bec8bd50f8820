//! `stockade doctor`: the findings as a table or as JSON, and the exit status.
//!
//! `diagnose` tries and judges the features; this only prints.

use stockade_diagnose::doctor::{Examination, State, examine};
use stockade_engine::{Options, runs::EntryPoint};

use crate::{
    ExitCode,
    args::Doctor,
    output::{Colour, Painted, print_json},
    policy::warn_of_hiding,
};

/// The policy can be enforced, and something that a run can do without does not work.
const DEGRADED: u8 = 3;

pub(crate) fn run(doctor: &Doctor) -> anyhow::Result<ExitCode> {
    let options = Options { scratch: doctor.scratch.clone(), via: Some(EntryPoint::Doctor), ..Options::from(&doctor.policy) };
    let examination = examine(&options);
    warn_of_hiding(&[&examination.policy]);
    if doctor.json {
        print_json(&examination)?;
    } else {
        describe(&examination).print()?;
    }
    let is_degraded = !examination.degraded.is_empty() || examination.findings.iter().any(|finding| finding.state == State::Degraded);
    Ok(match examination.enforceable {
        false => ExitCode::FAILURE,
        true if doctor.strict && is_degraded => ExitCode::from(DEGRADED),
        true => ExitCode::SUCCESS,
    })
}

fn describe(examination: &Examination) -> Painted {
    let mut out = Painted::default();
    let Examination { policy, uid, kernel, findings, .. } = examination;
    let mode = examination.mode.map(|mode| format!(", {mode}")).unwrap_or_default();
    out.add(Colour::Plain, format!("policy {policy}, uid {uid}{mode}, Linux {kernel}\n\n"));
    let width = findings.iter().map(|finding| finding.feature.len()).max().unwrap_or(0);
    for finding in findings {
        out.add(Colour::Plain, format!("{:<width$}  ", finding.feature));
        out.add(colour(finding.state), format!("{:<8}", finding.state.name()));
        out.add(Colour::Plain, format!("  {}\n", one_line(&finding.detail)));
        if let Some(remedy) = finding.remedy.as_ref().filter(|_| finding.state != State::Ok) {
            out.add(Colour::Plain, format!("{:<width$}  {:<8}  -> {}\n", "", "", one_line(remedy)));
        }
    }
    let (colour, verdict) = match (examination.enforceable, examination.degraded.as_slice()) {
        (true, []) => (Colour::Good, format!("policy {policy} can be enforced here")),
        (true, layers) => {
            let layers = layers.join(", ");
            (Colour::Warning, format!("policy {policy} can be enforced here. Not available, and optional in this policy: {layers}"))
        }
        (false, _) => (Colour::Bad, format!("policy {policy} cannot be enforced here: fix the lines marked `missing`")),
    };
    out.add(Colour::Plain, "\n");
    out.add(colour, verdict);
    out.add(Colour::Plain, "\n");
    out
}

fn colour(state: State) -> Colour {
    match state {
        State::Ok => Colour::Good,
        State::Absent => Colour::Plain,
        State::Degraded => Colour::Warning,
        State::Missing => Colour::Bad,
    }
}

/// A message may hold line breaks, as those about policies do.
fn one_line(text: &str) -> String {
    text.split('\n').map(str::trim_end).collect::<Vec<_>>().join("\n    ")
}
