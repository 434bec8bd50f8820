//! Running scripts in sandboxes of the policy under test.

use stockade_protocol::{
    LimitKey, Verdict,
    probe::{Answer, Batch, NOT_PREPARED, Script, decode_answers},
};
use stockade_runtime::{Image, ImageResult, Loaded, Options, Refusal, run_image};

use crate::{LONG_PATIENCE_S, PATIENCE_S, PROBE, attack::Limits};

/// Scripts in one sandbox: the answers stay well below any limit on output.
const TOGETHER: usize = 80;

/// A policy to run under.
pub(crate) struct Inside<'a> {
    /// The policy with its filters.
    pub(crate) loaded: &'a Loaded,
    /// What the command line fixes.
    pub(crate) options: &'a Options,
}

/// What one sandbox is for.
#[derive(Default)]
pub(crate) struct Errand<'a> {
    /// What the program's first process does.
    pub(crate) prelude: Script,
    /// What children of it do.
    pub(crate) scripts: Vec<Script>,
    /// Limits other than the policy's.
    pub(crate) limits: Limits,
    /// Globs of files to return.
    pub(crate) collect: &'a [&'a str],
    /// It may take its time.
    pub(crate) long: bool,
}

/// What came of it.
pub(crate) struct Done {
    /// The answers, where the probe could give them.
    pub(crate) answers: Option<Vec<Answer>>,
    /// The run.
    pub(crate) result: ImageResult,
}

impl Done {
    /// The first answer.
    pub(crate) fn answer(&self) -> Option<Answer> {
        self.answers.as_ref().and_then(|answers| answers.first().copied())
    }

    /// The run ended so.
    pub(crate) fn ended_as(&self, verdict: Verdict) -> bool {
        self.result.report.verdict == verdict
    }

    /// The script answered with this errno.
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
    pub(crate) fn run(&self, errand: &Errand<'_>) -> Result<Done, Refusal> {
        let nonce = crate::nonce()?;
        let (prelude, scripts) = (errand.prelude.clone(), errand.scripts.clone());
        let count = scripts.len();
        let batch = Batch { nonce, prelude, patience_s: if errand.long { LONG_PATIENCE_S } else { PATIENCE_S }, scripts };
        let image = Image {
            name: "stockade-probe",
            program: PROBE,
            stdin: &batch.encode(),
            limits: errand.limits.clone(),
            collect: errand.collect.iter().map(|glob| String::from(*glob)).collect(),
        };
        let result = run_image(&image, self.loaded, self.options)?;
        if result.report.verdict == Verdict::Cancelled {
            // A signal ended that run; the rest is not wanted either.
            return Err(Refusal::sandbox_error("cancelled", "the attacks were broken off by a signal"));
        }
        let answers = decode_answers(&result.output, nonce, count).ok();
        Ok(Done { answers, result })
    }

    /// What one script comes to, in a sandbox of its own.
    ///
    /// # Errors
    /// It was not started.
    pub(crate) fn alone(&self, script: &Script) -> Result<Done, Refusal> {
        self.run(&Errand { scripts: vec![script.clone()], ..Errand::default() })
    }

    /// What the scripts come to; none where the sandbox ended before it answered.
    ///
    /// # Errors
    /// No sandbox could be started.
    pub(crate) fn answers(&self, scripts: &[Script]) -> Result<Vec<Option<Answer>>, Refusal> {
        let mut all = Vec::with_capacity(scripts.len());
        for chunk in scripts.chunks(TOGETHER) {
            all.extend(self.halves(chunk)?);
        }
        Ok(all)
    }

    fn halves(&self, scripts: &[Script]) -> Result<Vec<Option<Answer>>, Refusal> {
        if scripts.is_empty() {
            return Ok(Vec::new());
        }
        match self.run(&Errand { scripts: scripts.to_vec(), limits: self.ample(), ..Errand::default() })?.answers {
            Some(answers) => Ok(answers.into_iter().map(Some).collect()),
            // One of them has ended the run: which, is found by halves.
            None if scripts.len() > 1 => {
                let (left, right) = scripts.split_at(scripts.len() / 2);
                Ok([self.halves(left)?, self.halves(right)?].concat())
            }
            None => Ok(vec![None]),
        }
    }

    /// The policy's own limits, but for room to answer where the policy lets it be asked for.
    fn ample(&self) -> Limits {
        const ROOM: u64 = 8 << 10;
        let policy = &self.loaded.policy;
        let small = policy.limits.get(LimitKey::OutputSize).is_some_and(|limit| limit < ROOM);
        let most = policy.limits_max.get(LimitKey::OutputSize).unwrap_or(ROOM);
        if small { Limits::from([(LimitKey::OutputSize, Some(ROOM.min(most)))]) } else { Limits::new() }
    }
}
