//! `stockade doctor`: the findings as a table or as JSON, and the exit status.
//!
//! `diagnose` tries and judges the features; this only prints.

use std::fmt::Write;

use stockade_diagnose::doctor::{Examination, State, examine};
use stockade_engine::Options;

use crate::{
    ExitCode,
    args::Doctor,
    output::{print_json, print_text},
};

pub(crate) fn run(doctor: &Doctor) -> anyhow::Result<ExitCode> {
    let options = Options { scratch: doctor.scratch.clone(), ..Options::from(&doctor.policy) };
    let examination = examine(&options);
    if doctor.json {
        print_json(&examination)?;
    } else {
        print_text(&describe(&examination)?)?;
    }
    Ok(if examination.enforceable { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn describe(examination: &Examination) -> Result<String, std::fmt::Error> {
    let mut out = String::new();
    let Examination { policy, uid, kernel, findings, .. } = examination;
    let mode = examination.mode.map(|mode| format!(", {mode}")).unwrap_or_default();
    writeln!(out, "policy {policy}, uid {uid}{mode}, Linux {kernel}\n")?;
    let width = findings.iter().map(|finding| finding.feature.len()).max().unwrap_or(0);
    for finding in findings {
        writeln!(out, "{:<width$}  {:<8}  {}", finding.feature, finding.state.name(), one_line(&finding.detail))?;
        if let Some(remedy) = finding.remedy.as_ref().filter(|_| finding.state != State::Ok) {
            writeln!(out, "{:<width$}  {:<8}  -> {}", "", "", one_line(remedy))?;
        }
    }
    let verdict = match (examination.enforceable, examination.degraded.as_slice()) {
        (true, []) => format!("policy {policy} can be enforced here"),
        (true, layers) => format!("policy {policy} can be enforced here, degraded as its `[degrade]` allows: {}", layers.join(", ")),
        (false, _) => format!("policy {policy} cannot be enforced here; fix what is missing"),
    };
    writeln!(out, "\n{verdict}")?;
    Ok(out)
}

/// A message may hold line breaks, as those about policies do.
fn one_line(text: &str) -> String {
    text.split('\n').map(str::trim_end).collect::<Vec<_>>().join("\n    ")
}
