//! Trying the attacks and their controls, and what follows from the answers.
//!
//! All that can be tried together is, so that a few dozen sandboxes do for hundreds of
//! attacks. An answer is compared with what was stated beforehand and nothing else: an
//! unexpected failure is no success of any layer.

use stockade_policy::filter::Filters;
use stockade_protocol::{
    Verdict,
    probe::{Answer, Door, Op, Script},
};
use stockade_runtime::{Loaded, Refusal};

use crate::{
    Finding, State,
    attack::{Act, Attack, Control, Expected, Place, Run, RunControl, Seen, Wanted},
    inside::{Errand, Inside},
    neighbour::Neighbour,
    outside::Outside,
    words::{self, errno::ENOSYS},
    world::World,
};

/// See the module.
pub(crate) fn judge(attacks: Vec<Attack>, world: &World, inside: &Inside<'_>, outside: &Outside) -> Result<Vec<Finding>, Refusal> {
    let mut options = inside.options.clone();
    options.scratch = Some(world.scratch.clone());
    let with_scratch = Inside { loaded: inside.loaded, options: &options };
    // Under sudo nobody may have granted a scratch of ours.
    let refused = with_scratch.run(&Errand::default()).err();
    let court = Court { world, inside, with_scratch: &with_scratch, outside, scratch_granted: refused.is_none() };
    let answers = court.gather(&attacks)?;
    let mut findings = Vec::with_capacity(attacks.len());
    for (attack, answers) in attacks.into_iter().zip(answers) {
        findings.push(match &refused {
            Some(refusal) if attack.needs_scratch() => absent(attack, refusal),
            _ => court.judge(attack, answers)?,
        });
    }
    findings.sort_by_key(|finding| finding.class);
    Ok(findings)
}

fn absent(attack: Attack, refusal: &Refusal) -> Finding {
    let draft = Draft { class: attack.class, name: attack.name, tried: attack.tried, layers: attack.layers };
    draft.done(State::Absent, String::from("-"), format!("not tried, as no host scratch is to be had: {refusal}"), String::from("-"), None)
}

/// Where attacks and controls are tried.
struct Court<'a> {
    world: &'a World,
    inside: &'a Inside<'a>,
    with_scratch: &'a Inside<'a>,
    outside: &'a Outside,
    scratch_granted: bool,
}

/// The answers to an attack's script and to its control's.
#[derive(Clone, Copy, Default)]
struct Answers {
    seen: Option<Answer>,
    control: Option<Answer>,
}

/// Where a script's answer belongs.
type Task<'s> = (usize, bool, &'s Script);

impl Court<'_> {
    /// Tries everything that can be tried together.
    fn gather(&self, attacks: &[Attack]) -> Result<Vec<Answers>, Refusal> {
        let mut all = vec![Answers::default(); attacks.len()];
        // Attacks and their twins share sandboxes: one kind without and one with a host
        // scratch, and one of these beside another run.
        let (mut private, mut shared, mut beside): (Vec<Task<'_>>, Vec<Task<'_>>, Vec<Task<'_>>) = (Vec::new(), Vec::new(), Vec::new());
        let (mut host, mut own): (Vec<Task<'_>>, Vec<Task<'_>>) = (Vec::new(), Vec::new());
        for (index, attack) in attacks.iter().enumerate() {
            let inside = match (attack.beside_another, attack.in_host_scratch) {
                (true, _) => &mut beside,
                (false, true) => &mut shared,
                (false, false) => &mut private,
            };
            let mut out = |place: Place, script| {
                if place == Place::Host { host.push((index, true, script)) } else { own.push((index, true, script)) }
            };
            match &attack.act {
                Act::Script { script, control, .. } => {
                    if !self.kills(script) {
                        inside.push((index, false, script));
                    }
                    match control {
                        Control::Outside(place, _) => out(*place, script),
                        Control::OutsideInstead(place, other, _) => out(*place, other),
                        Control::Instead(twin, _) => inside.push((index, true, twin)),
                    }
                }
                Act::Kill { script, .. } => out(Place::Own, script),
                Act::Run { .. } | Act::Allowed(_) => {}
            }
        }
        let mut keep = |tasks: &[Task<'_>], answers: Vec<Option<Answer>>| {
            for ((index, control, _), answer) in tasks.iter().zip(answers) {
                if let Some(slot) = all.get_mut(*index) {
                    *(if *control { &mut slot.control } else { &mut slot.seen }) = answer;
                }
            }
        };
        let scripts = |tasks: &[Task<'_>]| tasks.iter().map(|(_, _, script)| Script::clone(script)).collect::<Vec<_>>();
        keep(&private, self.inside.answers(&scripts(&private))?);
        if self.scratch_granted {
            keep(&shared, self.with_scratch.answers(&scripts(&shared))?);
            keep(&beside, self.beside_another(&scripts(&beside))?);
        }
        keep(&host, self.outside.answers(Place::Host, &scripts(&host)));
        keep(&own, self.outside.answers(Place::Own, &scripts(&own)));
        Ok(all)
    }

    /// What scripts come to beside another run. None of it counts unless that was there from
    /// the first to the last.
    fn beside_another(&self, scripts: &[Script]) -> Result<Vec<Option<Answer>>, Refusal> {
        let nothing = vec![None; scripts.len()];
        if scripts.is_empty() {
            return Ok(nothing);
        }
        let Some(mut neighbour) = Neighbour::start(self.world, self.inside.options) else { return Ok(nothing) };
        let answers = self.with_scratch.answers(scripts)?;
        Ok(if neighbour.is_there() { answers } else { nothing })
    }

    /// What follows for one attack. What needs a run of its own is tried here.
    fn judge(&self, attack: Attack, answers: Answers) -> Result<Finding, Refusal> {
        let draft = Draft { class: attack.class, name: attack.name, tried: attack.tried, layers: attack.layers };
        Ok(match (attack.act, attack.reported_as) {
            (Act::Script { script, .. }, Some(name)) if answers.control == Some(KERNELS_OWN_EPERM) => {
                self.by_report(draft, &script, &name)?
            }
            (Act::Script { script, control, .. }, _) if self.kills(&script) => {
                let done = self.inside.alone(&script)?;
                let seen = Seen { held: done.ended_as(Verdict::SyscallDenied), what: done.words() };
                draft.by_run(String::from(KILLED), seen, shown(&control, answers.control, None))
            }
            (Act::Script { expected, control, .. }, _) => draft.by_script(expected, &control, answers),
            (Act::Allowed(rule), _) => draft.done(State::Allowed, String::from("-"), rule, String::from("-"), None),
            (Act::Kill { script, name }, _) => {
                let done = self.inside.alone(&script)?;
                let report = &done.result.report;
                let held = report.verdict == Verdict::SyscallDenied && report.denials.iter().any(|denial| denial.what == name);
                let control = match answers.control {
                    Some(KERNELS_OWN_EPERM) => self.unreported(&script, &name)?,
                    other => (comes_to(other, Wanted::Reaches, None), format!("{}: {}", place_name(Place::Own), words::answer(other))),
                };
                if answers.control == Some(NO_SUCH_CALL) {
                    draft.done(State::Absent, String::from("-"), done.words(), control.1, None)
                } else {
                    draft.by_run(String::from(KILLED), Seen { held, what: done.words() }, control)
                }
            }
            (Act::Run { run, control }, _) => {
                let shown = refused(self.control_of_run(&run, control))?.unwrap_or_else(|refusal| (false, refusal));
                match self.try_run(&run)? {
                    Ok(seen) => draft.by_run(run.expected, seen, shown),
                    Err(why) => {
                        draft.unproven(run.expected, why, shown.1, "the run that would have tried it was refused, or could not begin to")
                    }
                }
            }
        })
    }

    /// The script makes a call for which the policy kills: it needs a run of its own.
    fn kills(&self, script: &Script) -> bool {
        let kill = &self.world.plan.filter.kill;
        script.ops.iter().any(|op| matches!(op, Op::Call { door: Door::Native, number, .. } if kill.contains(number)))
    }

    fn errand(run: &Run) -> Errand<'_> {
        let errand = Errand { limits: run.limits.clone(), collect: run.collect, long: true, ..Errand::default() };
        match run.first_process {
            true => Errand { prelude: run.script.clone(), ..errand },
            false => Errand { scripts: vec![run.script.clone()], ..errand },
        }
    }

    /// What a run came to, or why it tried nothing: then whatever it came to says nothing.
    fn try_run(&self, run: &Run) -> Result<Result<Seen, String>, Refusal> {
        let inside = if run.host_scratch { self.with_scratch } else { self.inside };
        Ok(match refused(inside.run(&Self::errand(run)))? {
            Ok(done) if done.untried() => Err(done.words()),
            Ok(done) => Ok((run.judge)(&done, self.world)),
            Err(refusal) => Err(refusal),
        })
    }

    fn control_of_run(&self, run: &Run, control: RunControl) -> Result<(bool, String), Refusal> {
        Ok(match control {
            RunControl::Limits(limits) => {
                let done = self.inside.run(&Errand { limits, ..Self::errand(run) })?;
                let failed = matches!(done.answer(), Some(answer) if !got_through(Some(answer)));
                let ended = done.ended_as(Verdict::Exited) && done.result.report.code == 0;
                (ended && !failed, format!("with a larger limit: {}", done.words()))
            }
            RunControl::Outside(place, script, wanted) => {
                let answer = self.outside.answers(place, &[script]).pop().flatten();
                (comes_to(answer, wanted, None), format!("{}: {}", place_name(place), words::answer(answer)))
            }
            RunControl::Run(control) => match self.try_run(&control)? {
                Ok(seen) => (seen.held, format!("{}: {}", control.expected, seen.what)),
                Err(why) => (false, format!("{}: {why}", control.expected)),
            },
        })
    }

    /// Where the kernel, too, answers EPERM to everybody but the host's root, the filter's
    /// report tells whose the refusal was.
    fn by_report(&self, draft: Draft, script: &Script, name: &str) -> Result<Finding, Refusal> {
        let done = self.inside.alone(script)?;
        let reported = done.result.report.denials.iter().any(|denial| denial.what == name);
        let control = self.unreported(script, name)?;
        let (expected, seen) = (String::from("EPERM, reported by the filter"), words::answer(done.answer()));
        Ok(match (done.answer() == Some(KERNELS_OWN_EPERM), reported) {
            (true, false) => draft.unproven(
                expected,
                format!("{seen}, reported by nobody"),
                control.1,
                "whether the filter or the kernel refused it cannot be told",
            ),
            (true, true) => draft.by_run(expected, Seen { held: true, what: format!("{seen}, reported by the filter") }, control),
            (false, _) => draft.by_run(expected, Seen { held: false, what: seen }, control),
        })
    }

    /// With the call on the policy's list, the kernel answers and nobody reports.
    fn unreported(&self, script: &Script, name: &str) -> Result<(bool, String), Refusal> {
        let mut policy = self.inside.loaded.policy.clone();
        policy.seccomp.kill.retain(|killed| killed != name);
        policy.seccomp.allow.push(name.to_owned());
        let Ok(filters) = Filters::new(&policy.seccomp) else {
            return Ok((false, String::from("no filter without this rule can be made")));
        };
        let loaded = Loaded { policy, filters };
        let done = Inside { loaded: &loaded, options: self.inside.options }.alone(script)?;
        let reported = done.result.report.denials.iter().any(|denial| denial.what == name);
        let answer = words::answer(done.answer());
        Ok((done.answer().is_some() && !reported, format!("inside, with the call on the policy's list: {answer}, by the kernel itself")))
    }
}

const KILLED: &str = "the run ends as syscall_denied";
const KERNELS_OWN_EPERM: Answer = Answer::Result(-1);
const NO_SUCH_CALL: Answer = Answer::Result(-(ENOSYS as i64));

/// A policy may refuse limits that an attack would need; that proves nothing, and is no
/// reason to try nothing else.
fn refused<T>(result: Result<T, Refusal>) -> Result<Result<T, String>, Refusal> {
    match result {
        Ok(value) => Ok(Ok(value)),
        Err(refusal) if refusal.verdict == Verdict::BadRequest => Ok(Err(format!("not tried: {refusal}"))),
        Err(refusal) => Err(refusal),
    }
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

    fn by_script(self, expected: Expected, how: &Control, answers: Answers) -> Finding {
        let Answers { seen, control } = answers;
        let absent = match how.wanted() {
            Wanted::Reaches => control == Some(NO_SUCH_CALL),
            Wanted::Exists => matches!(control, Some(NO_SUCH_CALL | Answer::Signal(SIGSEGV))),
            // The filter refused the one and passed the other, to a kernel without the call.
            Wanted::Succeeds => matches!(how, Control::Instead(..)) && control == Some(NO_SUCH_CALL) && holds(seen, expected),
            Wanted::Finds => false,
        };
        let shown = shown(how, control, Some(expected));
        let (wished, what) = (words::expected(expected), words::answer(seen));
        match (holds(seen, expected), got_through(seen)) {
            _ if absent => self.done(State::Absent, wished, what, shown.1, None),
            (true, _) => self.by_run(wished, Seen { held: true, what }, shown),
            (false, true) => self.breach(wished, what, shown.1),
            (false, false) => self.unproven(wished, what, shown.1, "it failed, but not as it must; this says nothing about the layer"),
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

/// Whether a control shows that the attack could have succeeded, and what it came to.
fn shown(how: &Control, answer: Option<Answer>, expected: Option<Expected>) -> (bool, String) {
    let place = match how {
        Control::Outside(place, _) | Control::OutsideInstead(place, ..) => place_name(*place),
        Control::Instead(..) => "inside, with one thing changed",
    };
    (comes_to(answer, how.wanted(), expected), format!("{place}: {}", words::answer(answer)))
}

fn comes_to(answer: Option<Answer>, wanted: Wanted, expected: Option<Expected>) -> bool {
    match (answer, wanted) {
        (Some(Answer::Result(value)), Wanted::Succeeds) => value >= 0,
        (Some(Answer::Result(value)), Wanted::Finds) => value > 0,
        (Some(answer @ Answer::Result(_)), Wanted::Reaches | Wanted::Exists) => {
            answer != NO_SUCH_CALL && answer != KERNELS_OWN_EPERM && !expected.is_some_and(|expected| holds(Some(answer), expected))
        }
        _ => false,
    }
}

/// A processor's answer to a door that the kernel has not opened.
const SIGSEGV: u32 = 11;
