//! `stockade prove`: the proof as a table, as JSON or as a page, and the exit status.
//!
//! `prover` tries and judges the attacks; this only prints.

use std::fmt::Write;

use stockade_diagnose::doctor::examine;
use stockade_engine::{Options, runs::EntryPoint};
use stockade_prover::{Class, Proof, State, html, prove, run_concurrently, unfinished};

use crate::{
    ExitCode,
    args::Prove,
    output::{Colour, Painted, Progress, print_json, warn},
    page::Page,
    run::refuse,
};

const BREACH: u8 = 1;
const NOT_PROVEN: u8 = 3;

pub(crate) fn run(asked: &Prove) -> anyhow::Result<ExitCode> {
    if let Some(scratch) = &asked.concurrent {
        let options = Options { scratch: Some(scratch.clone()), via: Some(EntryPoint::Prove), ..Options::from(&asked.policy) };
        return Ok(run_concurrently(&options).map_or_else(|refusal| ExitCode::from(refuse(&refusal)), |()| ExitCode::SUCCESS));
    }
    // First, so that no proof is run whose page cannot be written.
    let page = asked.html.as_deref().map(Page::begin).transpose()?;
    let put = |text: &str| page.as_ref().map_or(Ok(()), |page| page.put(text));
    let options = Options { via: Some(EntryPoint::Prove), ..Options::from(&asked.policy) };
    let doctor = examine(&options).findings.into_iter().map(|finding| (finding.feature, finding.state.name().to_owned())).collect();
    let mut progress = Progress::new("attacks judged");
    let proof = match prove(&options, doctor, &mut |done, all| progress.at(done, all)) {
        Ok(proof) => proof,
        Err(refusal) => {
            let status = refuse(&refusal);
            put(&unfinished(Some(&refusal.message)))?;
            return Ok(status.into());
        }
    };
    drop(progress);
    if let Some(left) = &proof.left {
        warn(&format!("stockade: {left}"));
    }
    put(&html(&proof))?;
    if asked.json {
        print_json(&proof)?;
    } else {
        let mut out = Painted::default();
        out.add(Colour::Plain, describe(&proof)?);
        let colour = match (proof.count.breaches, proof.count.not_proven) {
            (0, 0) => Colour::Good,
            (0, _) => Colour::Warning,
            _ => Colour::Bad,
        };
        out.add(colour, verdict(&proof));
        out.add(Colour::Plain, "\n");
        out.print()?;
    }
    Ok(ExitCode::from(match proof.count {
        count if count.breaches > 0 => BREACH,
        count if count.not_proven > 0 => NOT_PROVEN,
        _ => 0,
    }))
}

fn describe(proof: &Proof) -> Result<String, std::fmt::Error> {
    let mut out = String::new();
    let (policy, receipt) = (&proof.policy, &proof.receipt);
    writeln!(out, "policy {} ({}), uid {}, {}, Linux {}\n", policy.name, policy.origin, proof.uid, receipt.mode, receipt.kernel)?;
    writeln!(out, "{:<24}{:>7}{:>7}{:>8}{:>12}{:>10}{:>8}", "", "tried", "held", "breach", "not proven", "allowed", "absent")?;
    for class in Class::ALL {
        let count = proof.count_of(class);
        let numbers =
            [(count.tried, 7), (count.held, 7), (count.breaches, 8), (count.not_proven, 12), (count.allowed, 10), (count.absent, 8)];
        write!(out, "{:<24}", class.title())?;
        for (number, width) in numbers {
            let shown = if number == 0 { String::from("-") } else { number.to_string() };
            write!(out, "{shown:>width$}")?;
        }
        writeln!(out)?;
    }
    for raised in &proof.limits_raised {
        writeln!(out, "\nfor the attacks: {}", raised.words())?;
    }
    if !proof.uncovered.is_empty() {
        writeln!(out, "\nno attack tries: {}", proof.uncovered.join(", "))?;
    }
    for finding in proof.findings.iter().filter(|finding| matches!(finding.state, State::Breach | State::NotProven)) {
        writeln!(out, "\n{}: {} ({})", finding.state.title(), finding.attack, finding.class.title())?;
        writeln!(out, "  tried     {}", finding.tried)?;
        writeln!(out, "  expected  {}", finding.expected)?;
        writeln!(out, "  seen      {}", finding.seen)?;
        writeln!(out, "  control   {}", finding.control)?;
        if let Some(advice) = &finding.advice {
            writeln!(out, "  -> {advice}")?;
        }
    }
    writeln!(out)?;
    Ok(out)
}

/// The result in one sentence.
fn verdict(proof: &Proof) -> String {
    let (count, distinct) = (proof.count, proof.distinct);
    let seconds = proof.duration_ms.div_ceil(100);
    let tried = format!(
        "{} attacks tried in {}.{} s, {} of them more than a system call's number",
        count.tried,
        seconds / 10,
        seconds % 10,
        distinct.tried
    );
    match (count.breaches, count.not_proven) {
        (0, 0) => format!("everything held: {tried}"),
        (0, unproven) => format!("nothing got through, but {unproven} could not be proven: {tried}"),
        (breaches, _) => format!("{breaches} GOT THROUGH: {tried}"),
    }
}
