//! Trying the attacks and their controls, and what follows from the answers.
//!
//! All that can be tried together is, so that a few dozen sandboxes do for hundreds of
//! attacks. An answer is compared with what was stated beforehand and nothing else: an
//! unexpected failure is no success of any layer.

use stockade_policy::filter::Filters;
use stockade_protocol::{
    Verdict,
    probe::{Answer, NO_BATCH, Script},
};
use stockade_runtime::{Loaded, Refusal};

use crate::{
    Finding, State,
    attack::{Act, Attack, Control, Expected, Limits, Place, Run, RunControl, Seen, Wanted},
    inside::Inside,
    outside::Outside,
    words::{self, errno::ENOSYS},
    world::World,
};

/// See the module.
pub(crate) fn judge(attacks: Vec<Attack>, world: &World, inside: &Inside<'_>) -> Result<Vec<Finding>, Refusal> {
    let outside = Outside::new()?;
    let answers = Answers::gather(&attacks, inside, &outside)?;
    let mut findings = Vec::with_capacity(attacks.len());
    for (attack, (seen, control)) in attacks.into_iter().zip(answers.0) {
        let finding = Draft { class: attack.class, name: attack.name, tried: attack.tried, layers: attack.layers };
        findings.push(match attack.act {
            Act::Script { expected, control: how, .. } => finding.by_script(expected, seen, &how, control),
            Act::Allowed(rule) => finding.done(State::Allowed, String::from("-"), rule, String::from("-"), None),
            Act::Kill { script, name } => {
                let (_, result) = inside.run(std::slice::from_ref(&script), &Limits::new(), &[])?;
                let held = result.report.verdict == Verdict::SyscallDenied && result.report.denials.iter().any(|denial| denial.what == name);
                let seen = Seen { held, what: words::verdict(&result.report) };
                finding.by_run(String::from("the run ends as syscall_denied"), seen, reaches(control))
            }
            Act::Reported { script, name } => reported(finding, &script, &name, inside)?,
            Act::Run { run, control: how } => {
                let seen = try_run(&run, world, inside)?;
                let shown = match how {
                    RunControl::Limits(limits) => {
                        let (_, result) = inside.run(std::slice::from_ref(&run.script), &limits, run.collect)?;
                        let ended = result.report.verdict == Verdict::Exited && result.report.code == 0;
                        (ended, format!("with more of it: {}", words::verdict(&result.report)))
                    }
                    RunControl::Outside(place, script, wanted) => {
                        let answer = outside.answers(place, &[script]).pop().flatten();
                        (comes_to(answer, wanted, None), format!("{}: {}", place_name(place), words::answer(answer)))
                    }
                    RunControl::Run(control) => {
                        let seen = try_run(&control, world, inside)?;
                        (seen.held, format!("{}: {}", control.expected, seen.what))
                    }
                };
                finding.by_run(run.expected, seen, shown)
            }
        });
    }
    findings.sort_by_key(|finding| finding.class);
    Ok(findings)
}

fn try_run(run: &Run, world: &World, inside: &Inside<'_>) -> Result<Seen, Refusal> {
    let mut options = inside.options.clone();
    if run.host_scratch {
        options.scratch = Some(world.scratch.clone());
    }
    let inside = Inside { loaded: inside.loaded, options: &options };
    let (_, result) = inside.run(std::slice::from_ref(&run.script), &run.limits, run.collect)?;
    Ok((run.judge)(&result, world))
}

/// The answers to each attack's script and to its control's.
struct Answers(Vec<(Option<Answer>, Option<Answer>)>);

impl Answers {
    fn gather(attacks: &[Attack], inside: &Inside<'_>, outside: &Outside) -> Result<Self, Refusal> {
        let mut all = vec![(None, None); attacks.len()];
        // Attacks and twins share their sandboxes.
        let mut together: Vec<(usize, bool, &Script)> = Vec::new();
        let mut places = [(Place::Host, Vec::new()), (Place::Own, Vec::new())];
        let mut lifted: Vec<(usize, &Script, fn(&mut stockade_policy::model::Policy))> = Vec::new();
        for (index, attack) in attacks.iter().enumerate() {
            let mut out = |place: Place, script| {
                places.iter_mut().filter(|(known, _)| *known == place).for_each(|(_, list)| list.push((index, script)));
            };
            match &attack.act {
                Act::Script { script, control, .. } => {
                    together.push((index, false, script));
                    match control {
                        Control::Outside(place, _) => out(*place, script),
                        Control::OutsideInstead(place, other, _) => out(*place, other),
                        Control::Instead(twin, _) => together.push((index, true, twin)),
                        Control::Lifted(lift, _) => lifted.push((index, script, *lift)),
                    }
                }
                Act::Kill { script, .. } => out(Place::Own, script),
                Act::Run { .. } | Act::Allowed(_) | Act::Reported { .. } => {}
            }
        }
        let mut keep = |index: usize, control: bool, answer| {
            if let Some(slot) = all.get_mut(index) {
                *(if control { &mut slot.1 } else { &mut slot.0 }) = answer;
            }
        };
        let scripts: Vec<Script> = together.iter().map(|(_, _, script)| (*script).clone()).collect();
        for ((index, control, _), answer) in together.iter().zip(inside.answers(&scripts)?) {
            keep(*index, *control, answer);
        }
        for (place, list) in &places {
            let scripts: Vec<Script> = list.iter().map(|(_, script)| Script::clone(script)).collect();
            for ((index, _), answer) in list.iter().zip(outside.answers(*place, &scripts)) {
                keep(*index, true, answer);
            }
        }
        for (index, script, lift) in lifted {
            let Some(loaded) = lift_policy(inside.loaded, lift) else { continue };
            // A policy that cannot be had lifts nothing: the control has no answer then.
            let answers = Inside { loaded: &loaded, options: inside.options }.answers(std::slice::from_ref(script));
            keep(index, true, answers.ok().and_then(|mut answers| answers.pop().flatten()));
        }
        Ok(Answers(all))
    }
}

fn lift_policy(loaded: &Loaded, lift: impl FnOnce(&mut stockade_policy::model::Policy)) -> Option<Loaded> {
    let mut policy = loaded.policy.clone();
    lift(&mut policy);
    let filters = Filters::new(&policy.seccomp).ok()?;
    Some(Loaded { policy, filters })
}

/// What is known of an attack before it is judged.
struct Draft {
    class: crate::Class,
    name: String,
    tried: String,
    layers: &'static [&'static str],
}

impl Draft {
    fn done(self, state: State, expected: String, seen: String, control: String, advice: Option<String>) -> Finding {
        let Draft { class, name, tried, layers } = self;
        Finding { class, attack: name, state, tried, expected, seen, control, layers: layers.to_vec(), advice }
    }

    fn by_script(self, expected: Expected, seen: Option<Answer>, how: &Control, control: Option<Answer>) -> Finding {
        let (place, wanted) = match how {
            Control::Outside(place, wanted) | Control::OutsideInstead(place, _, wanted) => (place_name(*place), *wanted),
            Control::Instead(_, wanted) => ("inside, with one thing changed", *wanted),
            Control::Lifted(_, wanted) => ("inside, with the rule lifted", *wanted),
        };
        let shown = (comes_to(control, wanted, Some(expected)), format!("{place}: {}", words::answer(control)));
        let absent = matches!(wanted, Wanted::Reaches) && control == Some(Answer::Result(-i64::from(ENOSYS)));
        let held = holds(seen, expected);
        let (expected, seen_in_words) = (words::expected(expected), words::answer(seen));
        if absent {
            return self.done(State::Absent, expected, seen_in_words, shown.1, None);
        }
        match (held, got_through(seen)) {
            (true, _) => self.by_run(expected, Seen { held, what: seen_in_words }, shown),
            (false, true) => self.breach(expected, seen_in_words, shown.1),
            (false, false) => self.unproven(expected, seen_in_words, shown.1, "it failed, but not as it must; this says nothing about the layer"),
        }
    }

    fn by_run(self, expected: String, seen: Seen, (shown, control): (bool, String)) -> Finding {
        match (seen.held, shown) {
            (true, true) => self.done(State::Held, expected, seen.what, control, None),
            (true, false) => {
                self.unproven(expected, seen.what, control, "the control did not succeed, so the attack may have failed for another reason")
            }
            (false, _) => self.breach(expected, seen.what, control),
        }
    }

    fn breach(self, expected: String, seen: String, control: String) -> Finding {
        let advice = if self.layers.is_empty() {
            String::from("do not run hostile code under this policy on this host, and report this")
        } else {
            format!(
                "look for `{}` in the receipt and in `stockade doctor`; run no hostile code under this policy here until this holds",
                self.layers.join("`, `")
            )
        };
        self.done(State::Breach, expected, seen, control, Some(advice))
    }

    fn unproven(self, expected: String, seen: String, control: String, why: &str) -> Finding {
        self.done(State::NotProven, expected, seen, control, Some(why.to_owned()))
    }
}

fn place_name(place: Place) -> &'static str {
    match place {
        Place::Host => "outside",
        Place::Own => "as root of namespaces of its own",
    }
}

fn holds(answer: Option<Answer>, expected: Expected) -> bool {
    match (answer, expected) {
        (Some(Answer::Result(value)), Expected::Errno(list)) => list.iter().any(|errno| -i64::from(*errno) == value),
        (Some(Answer::Result(value)), Expected::Value(wanted)) => value == wanted,
        (Some(Answer::Signal(number)), Expected::Signal(wanted)) => number == wanted,
        _ => false,
    }
}

/// The act succeeded, whatever was stated.
fn got_through(answer: Option<Answer>) -> bool {
    match answer {
        Some(Answer::Result(value)) => value >= 0,
        Some(Answer::Exited(_)) => true,
        Some(Answer::Broken { .. } | Answer::Signal(_)) | None => false,
    }
}

fn comes_to(answer: Option<Answer>, wanted: Wanted, expected: Option<Expected>) -> bool {
    match (answer, wanted) {
        (Some(Answer::Result(value)), Wanted::Succeeds) => value >= 0,
        (Some(Answer::Result(value)), Wanted::Finds) => value > 0,
        (Some(Answer::Exited(status)), Wanted::Starts) => status == NO_BATCH.cast_unsigned(),
        (Some(Answer::Result(value)), Wanted::Reaches) => {
            value != -i64::from(ENOSYS) && value != -1 && !expected.is_some_and(|expected| holds(answer, expected))
        }
        _ => false,
    }
}

fn reaches(control: Option<Answer>) -> (bool, String) {
    (comes_to(control, Wanted::Reaches, None), format!("{}: {}", place_name(Place::Own), words::answer(control)))
}

/// The filter reports what it refuses. With the call allowed the kernel refuses it by
/// itself, and nobody reports.
fn reported(finding: Draft, script: &Script, name: &str, inside: &Inside<'_>) -> Result<Finding, Refusal> {
    let is_reported = |report: &stockade_protocol::Report| report.denials.iter().any(|denial| denial.what == name);
    let (answers, result) = inside.run(std::slice::from_ref(script), &Limits::new(), &[])?;
    let answer = answers.and_then(|answers| answers.first().copied());
    let refused = answer == Some(Answer::Result(-1));
    let seen = Seen { held: refused && is_reported(&result.report), what: format!("{}, reported by the filter", words::answer(answer)) };
    let lifted = lift_policy(inside.loaded, |policy| {
        policy.seccomp.kill.retain(|killed| killed != name);
        policy.seccomp.allow.push(name.to_owned());
    });
    let control = match lifted {
        None => (false, String::from("no filter without this rule can be made")),
        Some(loaded) => {
            let (answers, result) = Inside { loaded: &loaded, options: inside.options }.run(std::slice::from_ref(script), &Limits::new(), &[])?;
            let answer = answers.and_then(|answers| answers.first().copied());
            (answer.is_some() && !is_reported(&result.report), format!("inside, with the rule lifted: {} by the kernel itself", words::answer(answer)))
        }
    };
    let expected = String::from("EPERM, reported by the filter");
    if refused && !seen.held {
        return Ok(finding.unproven(expected, words::answer(answer), control.1, "the filter's reports are not to be had here, and the kernel would refuse it too"));
    }
    Ok(finding.by_run(expected, seen, control))
}
