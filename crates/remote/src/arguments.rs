//! The arguments that `stockade` passes. It has checked them; this finds each in its place.

use std::{ffi::OsString, path::PathBuf};

use stockade_protocol::form::ResultForm;

use crate::RemoteError;

/// All of them.
#[derive(Debug)]
pub struct Arguments {
    /// The program that has become this one.
    program: PathBuf,
    program_version: OsString,
    /// The processes that an answer is for, by their pids.
    pub ends_with: Vec<i32>,
    /// The service's address.
    pub server: String,
    /// What is to be done there.
    pub task: Task,
}

/// What is to be done at a service.
#[derive(Debug)]
pub enum Task {
    /// Run the request on stdin.
    Exec(ExecTask),
    /// List the runs.
    Ps(PsTask),
    /// End the run of this number.
    Kill(String),
}

/// How to run a request.
#[derive(Debug, Default)]
pub struct ExecTask {
    /// The policy, if it is not the key's first.
    pub policy: Option<String>,
    /// The form of its result.
    pub form: ResultForm,
    /// Prints the events of the run.
    pub stream: bool,
    /// Says nothing of missing layers.
    pub quiet: bool,
}

/// How to list runs.
#[derive(Clone, Copy, Debug, Default)]
pub struct PsTask {
    /// As JSON.
    pub json: bool,
    /// Again with every change.
    pub watch: bool,
}

impl Arguments {
    /// None: another program has started this.
    pub fn of_process() -> Option<Self> {
        Self::of(std::env::args_os().skip(1))
    }

    fn of(mut words: impl Iterator<Item = OsString>) -> Option<Self> {
        let (mut program, mut program_version, mut ends_with) = (PathBuf::new(), OsString::new(), Vec::new());
        let command = loop {
            let word = words.next()?;
            match word.to_str()? {
                "--program" => program = words.next()?.into(),
                "--program-version" => program_version = words.next()?,
                "--ends-with" => ends_with.push(words.next()?.to_str()?.parse().ok()?),
                _ => break word,
            }
        };
        let server = words.next()?.into_string().ok()?;
        let mut texts = words.map(OsString::into_string);
        let task = match command.to_str()? {
            "exec" => Task::Exec(exec_task(&mut texts)?),
            "ps" => Task::Ps(ps_task(&mut texts)?),
            "kill" => Task::Kill(texts.next()?.ok()?),
            _ => return None,
        };
        (program.is_absolute() && texts.next().is_none()).then_some(Arguments { program, program_version, ends_with, server, task })
    }

    /// # Errors
    /// This program and the one that has become it do not belong together.
    pub fn check_version(&self) -> Result<(), RemoteError> {
        if self.program_version == env!("CARGO_PKG_VERSION") {
            return Ok(());
        }
        Err(RemoteError::Version { program: self.program.clone(), other: self.program_version.clone() })
    }
}

type Texts<'a> = &'a mut dyn Iterator<Item = Result<String, OsString>>;

fn exec_task(texts: Texts<'_>) -> Option<ExecTask> {
    let mut task = ExecTask::default();
    while let Some(text) = texts.next() {
        match text.ok()?.as_str() {
            "--policy" => task.policy = Some(texts.next()?.ok()?),
            "--pretty" => task.form = ResultForm::Pretty,
            "--brief" => task.form = ResultForm::Brief,
            "--text" => task.form = ResultForm::Text,
            "--stream" => task.stream = true,
            "--quiet" => task.quiet = true,
            _ => return None,
        }
    }
    Some(task)
}

fn ps_task(texts: Texts<'_>) -> Option<PsTask> {
    let mut task = PsTask::default();
    for text in texts {
        match text.ok()?.as_str() {
            "--json" => task.json = true,
            "--watch" => task.watch = true,
            _ => return None,
        }
    }
    Some(task)
}
