//! Running scripts in sandboxes of the policy under test.

use stockade_engine::{CarriedProgram, CarriedResult, LoadedPolicy, Options, Refusal, run_carried};
use stockade_protocol::{
    LimitKey, Verdict,
    probe::{Answer, Batch, NOT_PREPARED, Script, decode_answers},
};

use crate::{LONG_SCRIPT_TIMEOUT_S, PROBE, SCRIPT_TIMEOUT_S, attack::Limits, error::ProveError};

/// Scripts in one sandbox: so few that their answers stay below any output limit.
const MAX_SCRIPTS: usize = 80;

/// A policy to run under.
pub(crate) struct Inside<'a> {
    /// The policy with its filters.
    pub(crate) loaded: &'a LoadedPolicy,
    /// What the command line fixes.
    pub(crate) options: &'a Options,
}

/// Scripts for one sandbox.
#[derive(Default)]
pub(crate) struct ProbeBatch<'a> {
    /// What the program's first process does.
    pub(crate) prelude: Script,
    /// What children of it do.
    pub(crate) scripts: Vec<Script>,
    /// Limits other than the policy's.
    pub(crate) limits: Limits,
    /// Globs of files to return.
    pub(crate) collect: &'a [&'a str],
    /// Its scripts use up a limit, and may take longer.
    pub(crate) long: bool,
}

/// The result of one sandbox.
pub(crate) struct ProbeRun {
    /// The answers, where the probe could give them.
    pub(crate) answers: Option<Vec<Answer>>,
    /// The run.
    pub(crate) result: CarriedResult,
}

impl ProbeRun {
    /// The first answer.
    pub(crate) fn answer(&self) -> Option<Answer> {
        self.answers.as_ref().and_then(|answers| answers.first().copied())
    }

    /// Whether the run ended with this verdict.
    pub(crate) fn ended_as(&self, verdict: Verdict) -> bool {
        self.result.report.verdict == verdict
    }

    /// Whether the script answered with this errno.
    pub(crate) fn answered(&self, errno: i32) -> bool {
        self.answer() == Some(Answer::Result(-i64::from(errno)))
    }

    /// Nothing was tried: what the attack needs could not be prepared.
    pub(crate) fn untried(&self) -> bool {
        matches!(self.answer(), Some(Answer::Broken { .. })) || (self.ended_as(Verdict::Exited) && self.result.report.code == NOT_PREPARED)
    }

    /// Answer and verdict in words.
    pub(crate) fn words(&self) -> String {
        let verdict = crate::words::verdict(&self.result.report);
        match self.answer() {
            Some(answer) => format!("{}; {verdict}", crate::words::answer(Some(answer))),
            None if self.untried() => String::from("not tried: what it needs could not be prepared"),
            None => verdict,
        }
    }
}

impl Inside<'_> {
    /// Runs one sandbox.
    ///
    /// # Errors
    /// It was not started.
    pub(crate) fn run(&self, probe_batch: &ProbeBatch<'_>) -> Result<ProbeRun, Refusal> {
        let nonce = crate::nonce()?;
        let (prelude, scripts) = (probe_batch.prelude.clone(), probe_batch.scripts.clone());
        let count = scripts.len();
        let batch = Batch { nonce, prelude, timeout_s: if probe_batch.long { LONG_SCRIPT_TIMEOUT_S } else { SCRIPT_TIMEOUT_S }, scripts };
        let program = CarriedProgram {
            name: "stockade-probe",
            program: PROBE,
            stdin: &batch.encode(),
            limits: probe_batch.limits.clone(),
            collect: probe_batch.collect.iter().map(|glob| String::from(*glob)).collect(),
        };
        let result = run_carried(&program, self.loaded, self.options)?;
        if result.report.verdict == Verdict::Cancelled {
            // A signal ended that run, and with it the proof.
            return Err(ProveError::Cancelled.into());
        }
        let answers = decode_answers(&result.output, nonce, count).ok();
        Ok(ProbeRun { answers, result })
    }

    /// Runs one script in its own sandbox.
    ///
    /// # Errors
    /// It was not started.
    pub(crate) fn alone(&self, script: &Script) -> Result<ProbeRun, Refusal> {
        self.run(&ProbeBatch { scripts: vec![script.clone()], ..ProbeBatch::default() })
    }

    /// The scripts' answers; `None` where the sandbox ended before it answered.
    ///
    /// # Errors
    /// No sandbox could be started.
    pub(crate) fn answers(&self, scripts: &[Script]) -> Result<Vec<Option<Answer>>, Refusal> {
        let mut all = Vec::with_capacity(scripts.len());
        for chunk in scripts.chunks(MAX_SCRIPTS) {
            all.extend(self.halves(chunk)?);
        }
        Ok(all)
    }

    fn halves(&self, scripts: &[Script]) -> Result<Vec<Option<Answer>>, Refusal> {
        if scripts.is_empty() {
            return Ok(Vec::new());
        }
        match self.run(&ProbeBatch { scripts: scripts.to_vec(), limits: self.ample(), ..ProbeBatch::default() })?.answers {
            Some(answers) => Ok(answers.into_iter().map(Some).collect()),
            // One of them ended the run: halving finds it.
            None if scripts.len() > 1 => {
                let (left, right) = scripts.split_at(scripts.len() / 2);
                Ok([self.halves(left)?, self.halves(right)?].concat())
            }
            None => Ok(vec![None]),
        }
    }

    /// The policy's limits, with room for the answers where the policy allows that much output.
    fn ample(&self) -> Limits {
        const ROOM: u64 = 8 << 10;
        let policy = &self.loaded.policy;
        let small = policy.limits.get(LimitKey::OutputSize).is_some_and(|limit| limit < ROOM);
        let most = policy.limits_max.get(LimitKey::OutputSize).unwrap_or(ROOM);
        if small { Limits::from([(LimitKey::OutputSize, Some(ROOM.min(most)))]) } else { Limits::new() }
    }
}
