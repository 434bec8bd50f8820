//! Running scripts in sandboxes of the policy under test.

use stockade_protocol::{
    LimitKey,
    probe::{Answer, Batch, Script, decode_answers},
};
use stockade_runtime::{Image, ImageResult, Loaded, Options, Refusal, run_image};

use crate::{PROBE, attack::Limits};

/// Scripts in one sandbox: the answers stay well below any limit on output.
const TOGETHER: usize = 80;

/// A policy to run under.
pub(crate) struct Inside<'a> {
    /// The policy with its filters.
    pub(crate) loaded: &'a Loaded,
    /// What the command line fixes.
    pub(crate) options: &'a Options,
}

impl Inside<'_> {
    /// Runs scripts in one sandbox.
    ///
    /// # Errors
    /// It was not started.
    pub(crate) fn run(&self, scripts: &[Script], limits: &Limits, collect: &[&str]) -> Result<(Option<Vec<Answer>>, ImageResult), Refusal> {
        let nonce = crate::nonce()?;
        let batch = Batch { nonce, prelude: Script::default(), scripts: scripts.to_vec() }.encode();
        let image = Image {
            name: "stockade-probe",
            program: PROBE,
            stdin: &batch,
            limits: limits.clone(),
            collect: collect.iter().map(|glob| String::from(*glob)).collect(),
        };
        let result = run_image(&image, self.loaded, self.options)?;
        let answers = decode_answers(&result.output, nonce, scripts.len()).ok();
        Ok((answers, result))
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
        let limits = self.ample();
        match self.run(scripts, &limits, &[])?.0 {
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
