//! Tries the attacks and their controls, and compares the answers with what was expected.
//!
//! Scripts share sandboxes where they can, so that a few dozen sandboxes serve hundreds of
//! attacks. An unexpected failure is not counted as the success of any layer.

use nix::libc::ENOSYS;
use stockade_engine::{LoadedPolicy, Refusal};
use stockade_policy::{filter::Filters, model::Access};
use stockade_protocol::{
    Verdict,
    probe::{Answer, Op, Script, SyscallAbi},
};

use crate::{
    Finding, State,
    attack::{Act, Attack, Control, ControlExpectation, ControlHost, Expected, Observation, Run, RunControl},
    concurrent_run::ConcurrentRun,
    fixture::Fixture,
    inside::{Inside, ProbeBatch, ProbeRun},
    outside::Outside,
    words,
};

/// Tries every attack and its control, and judges each.
pub(crate) fn judge(
    attacks: Vec<Attack>,
    fixture: &Fixture,
    inside: &Inside<'_>,
    outside: &Outside,
    progress: &mut dyn FnMut(usize, usize),
) -> Result<Vec<Finding>, Refusal> {
    let mut options = inside.options.clone();
    options.scratch = Some(fixture.scratch.clone());
    let with_scratch = Inside { loaded: inside.loaded, options: &options };
    // Under sudo the grants may not cover this scratch.
    let refused = with_scratch.run(&ProbeBatch::default()).err();
    let evaluator = Evaluator { fixture, inside, with_scratch: &with_scratch, outside, scratch_granted: refused.is_none() };
    let answers = evaluator.gather(&attacks)?;
    let mut findings = Vec::with_capacity(attacks.len());
    let all = attacks.len();
    for (attack, answers) in attacks.into_iter().zip(answers) {
        progress(findings.len(), all);
        findings.push(match &refused {
            Some(refusal) if attack.needs_scratch() => absent(attack, refusal),
            _ => evaluator.judge(attack, answers)?,
        });
    }
    findings.sort_by_key(|finding| finding.class);
    Ok(findings)
}

fn absent(attack: Attack, refusal: &Refusal) -> Finding {
    let draft = FindingDraft { class: attack.class, name: attack.name, tried: attack.tried, layers: attack.layers };
    draft.done(
        State::Absent,
        String::from("-"),
        format!("not tried, because no host scratch is available: {refusal}"),
        String::from("-"),
        None,
    )
}

/// Where attacks and controls are tried.
struct Evaluator<'a> {
    fixture: &'a Fixture,
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

impl Evaluator<'_> {
    /// Tries everything that can be tried together.
    fn gather(&self, attacks: &[Attack]) -> Result<Vec<Answers>, Refusal> {
        let mut all = vec![Answers::default(); attacks.len()];
        // Attacks and their twins share sandboxes: one kind without and one with a host
        // scratch, and one with a host scratch and a concurrent run.
        let (mut private, mut shared, mut concurrent): (Vec<Task<'_>>, Vec<Task<'_>>, Vec<Task<'_>>) = (Vec::new(), Vec::new(), Vec::new());
        let (mut host, mut own): (Vec<Task<'_>>, Vec<Task<'_>>) = (Vec::new(), Vec::new());
        let (mut writable, mut shared_writable): (Vec<Task<'_>>, Vec<Task<'_>>) = (Vec::new(), Vec::new());
        for (index, attack) in attacks.iter().enumerate() {
            let inside = match (attack.concurrent, attack.in_host_scratch) {
                (true, _) => &mut concurrent,
                (false, true) => &mut shared,
                (false, false) => &mut private,
            };
            let mut out = |place: ControlHost, script| {
                if place == ControlHost::Host { host.push((index, true, script)) } else { own.push((index, true, script)) }
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
                        Control::Writable(_) if attack.in_host_scratch => shared_writable.push((index, true, script)),
                        Control::Writable(_) => writable.push((index, true, script)),
                    }
                }
                Act::Kill { script, .. } => out(ControlHost::OwnNamespaces, script),
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
        let lifted = writable_scratch(self.inside.loaded);
        let (lifted_private, lifted_shared) =
            (Inside { loaded: &lifted, options: self.inside.options }, Inside { loaded: &lifted, options: self.with_scratch.options });
        keep(&private, self.inside.answers(&scripts(&private))?);
        keep(&writable, lifted_private.answers(&scripts(&writable))?);
        if self.scratch_granted {
            keep(&shared, self.with_scratch.answers(&scripts(&shared))?);
            // After the attacks: these change the files that the attacks could not.
            keep(&shared_writable, lifted_shared.answers(&scripts(&shared_writable))?);
            keep(&concurrent, self.concurrent(&scripts(&concurrent))?);
        }
        keep(&host, self.outside.answers(ControlHost::Host, &scripts(&host)));
        keep(&own, self.outside.answers(ControlHost::OwnNamespaces, &scripts(&own)));
        Ok(all)
    }

    /// The scripts' answers while a concurrent run lives. They count only if that run lived
    /// from the first script to the last.
    fn concurrent(&self, scripts: &[Script]) -> Result<Vec<Option<Answer>>, Refusal> {
        let nothing = vec![None; scripts.len()];
        if scripts.is_empty() {
            return Ok(nothing);
        }
        let Some(mut concurrent) = ConcurrentRun::start(self.fixture, self.inside.options) else { return Ok(nothing) };
        let answers = self.with_scratch.answers(scripts)?;
        Ok(if concurrent.is_there() { answers } else { nothing })
    }

    /// Judges one attack; an attack with its own sandbox is tried here.
    fn judge(&self, attack: Attack, answers: Answers) -> Result<Finding, Refusal> {
        let draft = FindingDraft { class: attack.class, name: attack.name, tried: attack.tried, layers: attack.layers };
        Ok(match (attack.act, attack.reported_as) {
            (Act::Script { script, .. }, Some(name)) if answers.control == Some(KERNELS_OWN_EPERM) => {
                self.by_report(draft, &script, &name)?
            }
            (Act::Script { script, control, .. }, _) if self.kills(&script) => {
                let done = self.inside.alone(&script)?;
                let tried = seen(&done, done.ended_as(Verdict::SyscallDenied));
                draft.by_attempt(String::from(KILLED), tried, shown(&control, answers.control, None))
            }
            (Act::Script { expected, control, .. }, _) => draft.by_script(expected, &control, answers),
            (Act::Allowed(rule), _) => draft.done(State::Allowed, String::from("-"), rule, String::from("-"), None),
            (Act::Kill { script, name }, _) => {
                let done = self.inside.alone(&script)?;
                let report = &done.result.report;
                let held = report.verdict == Verdict::SyscallDenied && report.denials.iter().any(|denial| denial.what == name);
                let control = match answers.control {
                    Some(KERNELS_OWN_EPERM) => self.unreported(&script, &name)?,
                    other => (
                        comes_to(other, ControlExpectation::Reaches, None),
                        format!("{}: {}", control_host_name(ControlHost::OwnNamespaces), words::answer(other)),
                    ),
                };
                if answers.control == Some(NO_SUCH_CALL) {
                    draft.done(State::Absent, String::from("-"), done.words(), control.1, None)
                } else {
                    draft.by_attempt(String::from(KILLED), seen(&done, held), control)
                }
            }
            (Act::Run { run, control }, _) => {
                let shown = refused(self.control_of_run(&run, control))?.unwrap_or_else(|refusal| (false, refusal));
                let tried = self.try_run(&run)?;
                draft.by_attempt(run.expected, tried, shown)
            }
        })
    }

    /// Whether the script makes a call for which the policy kills: it needs its own sandbox.
    fn kills(&self, script: &Script) -> bool {
        let kill = &self.fixture.plan.filter.kill;
        script.ops.iter().any(|op| matches!(op, Op::Call { abi: SyscallAbi::Native, number, .. } if kill.contains(number)))
    }

    fn probe_batch(run: &Run) -> ProbeBatch<'_> {
        let probe_batch = ProbeBatch { limits: run.limits.clone(), collect: run.collect, long: true, ..ProbeBatch::default() };
        match run.first_process {
            true => ProbeBatch { prelude: run.script.clone(), ..probe_batch },
            false => ProbeBatch { scripts: vec![run.script.clone()], ..probe_batch },
        }
    }

    /// What a run's result shows, or why it shows nothing: its memory may have ended it before it answered.
    fn try_run(&self, run: &Run) -> Result<Result<Observation, String>, Refusal> {
        let inside = if run.host_scratch { self.with_scratch } else { self.inside };
        Ok(refused(inside.run(&Self::probe_batch(run)))?.and_then(|done| {
            let seen = (run.judge)(&done, self.fixture);
            let was_ended = done.answer().is_none() && done.ended_as(Verdict::OutOfMemory);
            if done.untried() || (was_ended && !seen.held) { Err(done.words()) } else { Ok(seen) }
        }))
    }

    fn control_of_run(&self, run: &Run, control: RunControl) -> Result<(bool, String), Refusal> {
        Ok(match control {
            RunControl::Limits(limits) => {
                let done = self.inside.run(&ProbeBatch { limits, ..Self::probe_batch(run) })?;
                let failed = matches!(done.answer(), Some(answer) if !got_through(Some(answer)));
                let ended = done.ended_as(Verdict::Exited) && done.result.report.code == 0;
                (ended && !failed, format!("with a larger limit: {}", done.words()))
            }
            RunControl::Outside(place, script, wanted) => {
                let answer = self.outside.answers(place, &[script]).pop().flatten();
                (comes_to(answer, wanted, None), format!("{}: {}", control_host_name(place), words::answer(answer)))
            }
            RunControl::Run(control) => match self.try_run(&control)? {
                Ok(seen) => (seen.held, format!("{}: {}", control.expected, seen.what)),
                Err(why) => (false, format!("{}: {why}", control.expected)),
            },
        })
    }

    /// Where the kernel, too, answers EPERM to everybody but the host's root, the filter's
    /// report shows which of the two refused.
    fn by_report(&self, draft: FindingDraft, script: &Script, name: &str) -> Result<Finding, Refusal> {
        let done = self.inside.alone(script)?;
        let reported = done.result.report.denials.iter().any(|denial| denial.what == name);
        let control = self.unreported(script, name)?;
        let (expected, seen) = (String::from("EPERM, reported by the filter"), words::answer(done.answer()));
        Ok(match (done.answer() == Some(KERNELS_OWN_EPERM), reported) {
            _ if done.untried() => draft.by_attempt(expected, Err(seen), control),
            (true, false) => draft.unproven(
                expected,
                format!("{seen}, not reported by the filter"),
                control.1,
                "it is unknown whether the filter or the kernel refused it",
            ),
            (true, true) => draft.by_run(expected, Observation { held: true, what: format!("{seen}, reported by the filter") }, control),
            (false, _) => draft.by_run(expected, Observation { held: false, what: seen }, control),
        })
    }

    /// With the call on the policy's list, the kernel answers and the filter reports nothing.
    fn unreported(&self, script: &Script, name: &str) -> Result<(bool, String), Refusal> {
        let mut policy = self.inside.loaded.policy.clone();
        policy.seccomp.kill.retain(|killed| killed != name);
        policy.seccomp.allow.push(name.to_owned());
        let Ok(filters) = Filters::new(&policy.seccomp) else {
            return Ok((false, String::from("no filter without this rule can be made")));
        };
        let loaded = LoadedPolicy { policy, filters };
        let done = Inside { loaded: &loaded, options: self.inside.options }.alone(script)?;
        let reported = done.result.report.denials.iter().any(|denial| denial.what == name);
        let answer = words::answer(done.answer());
        Ok((done.answer().is_some() && !reported, format!("inside, with the call on the policy's list: {answer}, by the kernel itself")))
    }
}

/// What a run shows, or why it tried nothing.
fn seen(done: &ProbeRun, held: bool) -> Result<Observation, String> {
    if done.untried() { Err(done.words()) } else { Ok(Observation { held, what: done.words() }) }
}

/// The policy with nothing of a scratch kept from writing.
fn writable_scratch(loaded: &LoadedPolicy) -> LoadedPolicy {
    let mut policy = loaded.policy.clone();
    policy.scratch.access = Access::Rw;
    policy.scratch.read_only.clear();
    LoadedPolicy { policy, filters: loaded.filters.clone() }
}

const KILLED: &str = "the run ends as syscall_denied";
const KERNELS_OWN_EPERM: Answer = Answer::Result(-1);
const NO_SUCH_CALL: Answer = Answer::Result(-(ENOSYS as i64));

/// A policy may refuse the limits that an attack needs. That proves nothing, and the other
/// attacks go on.
fn refused<T>(result: Result<T, Refusal>) -> Result<Result<T, String>, Refusal> {
    match result {
        Ok(value) => Ok(Ok(value)),
        Err(refusal) if refusal.verdict == Verdict::BadRequest => Ok(Err(format!("not tried: {refusal}"))),
        Err(refusal) => Err(refusal),
    }
}

/// What is known of an attack before it is judged.
struct FindingDraft {
    class: crate::Class,
    name: String,
    tried: String,
    layers: &'static [&'static str],
}

impl FindingDraft {
    fn done(self, state: State, expected: String, seen: String, control: String, advice: Option<String>) -> Finding {
        let FindingDraft { class, name, tried, layers } = self;
        Finding { class, attack: name, state, tried, expected, seen, control, layers: layers.to_vec(), advice }
    }

    fn by_script(self, expected: Expected, how: &Control, answers: Answers) -> Finding {
        let Answers { seen, control } = answers;
        let absent = match how.wanted() {
            ControlExpectation::Reaches => control == Some(NO_SUCH_CALL),
            ControlExpectation::Exists => matches!(control, Some(NO_SUCH_CALL | Answer::Signal(SIGSEGV))),
            // The filter refused the one and passed the other, to a kernel without the call.
            ControlExpectation::Succeeds => matches!(how, Control::Instead(..)) && control == Some(NO_SUCH_CALL) && holds(seen, expected),
            ControlExpectation::Finds => false,
        };
        let shown = shown(how, control, Some(expected));
        let (wished, what) = (words::expected(expected), words::answer(seen));
        match (holds(seen, expected), got_through(seen)) {
            _ if absent => self.done(State::Absent, wished, what, shown.1, None),
            (true, _) => self.by_run(wished, Observation { held: true, what }, shown),
            (false, true) => self.breach(wished, what, shown.1),
            (false, false) => self.unproven(wished, what, shown.1, "it failed, but not as expected; this proves nothing about the layer"),
        }
    }

    fn by_run(self, expected: String, seen: Observation, (shown, control): (bool, String)) -> Finding {
        match (seen.held, shown) {
            (true, true) => self.done(State::Held, expected, seen.what, control, None),
            (true, false) => {
                self.unproven(expected, seen.what, control, "the control did not succeed, so the attack may have failed for another reason")
            }
            (false, _) => self.breach(expected, seen.what, control),
        }
    }

    /// What was not tried is never a breach, whatever else was seen.
    fn by_attempt(self, expected: String, tried: Result<Observation, String>, control: (bool, String)) -> Finding {
        match tried {
            Ok(seen) => self.by_run(expected, seen, control),
            Err(why) => self.unproven(expected, why, control.1, "the run that would have tried it was refused, or could not begin to"),
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

fn control_host_name(place: ControlHost) -> &'static str {
    match place {
        ControlHost::Host => "outside",
        ControlHost::OwnNamespaces => "as root of new namespaces",
    }
}

fn holds(answer: Option<Answer>, expected: Expected) -> bool {
    match (answer, expected) {
        (Some(Answer::Result(value)), Expected::Errno(list)) => list.iter().any(|errno| -i64::from(*errno) == value),
        (Some(Answer::Result(value)), Expected::Value(wanted)) => value == wanted,
        _ => false,
    }
}

/// Whether the act succeeded, expected or not.
fn got_through(answer: Option<Answer>) -> bool {
    match answer {
        Some(Answer::Result(value)) => value >= 0,
        Some(Answer::Exited(_)) => true,
        Some(Answer::Broken { .. } | Answer::Signal(_)) | None => false,
    }
}

/// Whether a control shows that the attack could have succeeded, and its answer.
fn shown(how: &Control, answer: Option<Answer>, expected: Option<Expected>) -> (bool, String) {
    let place = match how {
        Control::Outside(place, _) | Control::OutsideInstead(place, ..) => control_host_name(*place),
        Control::Instead(..) => "inside, with one thing changed",
        Control::Writable(_) => "inside, in a scratch that may be written",
    };
    (comes_to(answer, how.wanted(), expected), format!("{place}: {}", words::answer(answer)))
}

fn comes_to(answer: Option<Answer>, wanted: ControlExpectation, expected: Option<Expected>) -> bool {
    match (answer, wanted) {
        (Some(Answer::Result(value)), ControlExpectation::Succeeds) => value >= 0,
        (Some(Answer::Result(value)), ControlExpectation::Finds) => value > 0,
        (Some(answer @ Answer::Result(_)), ControlExpectation::Reaches | ControlExpectation::Exists) => {
            answer != NO_SUCH_CALL && answer != KERNELS_OWN_EPERM && !expected.is_some_and(|expected| holds(Some(answer), expected))
        }
        _ => false,
    }
}

/// SIGSEGV: the processor's answer where the kernel has no such ABI.
const SIGSEGV: u32 = 11;

#[cfg(test)]
mod tests {
    use super::*;

    fn state(tried: Result<bool, &str>, control: bool) -> State {
        let draft = FindingDraft { class: crate::Class::Resources, name: String::new(), tried: String::new(), layers: &[] };
        let tried = tried.map(|held| Observation { held, what: String::new() }).map_err(String::from);
        draft.by_attempt(String::new(), tried, (control, String::new())).state
    }

    #[test]
    fn what_was_not_tried_is_no_breach_and_not_held() {
        for control in [true, false] {
            assert_eq!(state(Err("not tried"), control), State::NotProven);
            assert_eq!(state(Ok(false), control), State::Breach);
        }
        assert_eq!((state(Ok(true), true), state(Ok(true), false)), (State::Held, State::NotProven));
    }
}
