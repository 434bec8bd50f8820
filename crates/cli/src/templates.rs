//! `stockade templates`: the interpreters whose copies run the programs of sessions and services.
//!
//! Making and trying one is the engine's; this prints what came of it.

use std::{
    io::{self, Write},
    os::fd::AsFd,
    sync::Arc,
    time::Instant,
};

use rustix::process::{PidfdFlags, Signal, getppid, pidfd_open, set_parent_process_death_signal, setpriority_process};
use serde_json::json;
use stockade_engine::{
    Options, load_policy,
    template::{Answer, make, make_once},
};
use stockade_protocol::text::{escape, is_hidden};

use crate::{
    ExitCode, SANDBOX_ERROR, USAGE_ERROR,
    args::{PolicyChoice, Templates},
    output::{print_json, print_text, warn},
    serve::account_of_runs,
};

/// How far the process that makes a template stands back, see nice(2).
const LESS_URGENT: i32 = 10;

pub(crate) fn run(command: &Templates) -> anyhow::Result<ExitCode> {
    match command {
        Templates::Ls { policy, json } => list(policy, *json),
        Templates::Make { runtime, stem, session, key, policy } => {
            let (key, peer) = (key.clone(), if key.is_some() { account_of_runs()? } else { None });
            make_for(*session, runtime, stem, Options { key, peer, ..Options::from(policy) })
        }
    }
}

/// Makes every template of a policy once, and prints what came of it.
fn list(choice: &PolicyChoice, json: bool) -> anyhow::Result<ExitCode> {
    let options = Options::from(choice);
    let loaded = match load_policy(&options) {
        Ok(loaded) => loaded,
        Err(refusal) => {
            warn(&format!("stockade: {refusal}"));
            return Ok(ExitCode::from(USAGE_ERROR));
        }
    };
    let mut rows = Vec::new();
    for runtime in loaded.policy.runtimes.keys() {
        let Some((name, template)) = loaded.policy.template_of(runtime) else { continue };
        let begun = Instant::now();
        let made = make_once(runtime, &loaded, &options).map_err(|why| why.to_string());
        let ms = u64::try_from(begun.elapsed().as_millis()).unwrap_or(u64::MAX);
        rows.push(Row { name: name.to_owned(), runtime: runtime.clone(), imports: template.imports.clone(), made, ms });
    }
    let refused = rows.iter().any(|row| row.made.is_err());
    if json {
        let templates: Vec<_> = rows.iter().map(Row::json).collect();
        print_json(&json!({ "schema": 1, "policy": loaded.policy.name, "templates": templates }))?;
    } else if rows.is_empty() {
        print_text(&format!("policy {} has no template", escape(&loaded.policy.name, is_hidden)))?;
    } else {
        print_text(&rows.iter().map(Row::text).collect::<Vec<_>>().join("\n"))?;
    }
    Ok(if refused { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// What came of one template.
struct Row {
    name: String,
    runtime: String,
    imports: Vec<String>,
    /// Bytes of its image, or why there is none.
    made: Result<u64, String>,
    ms: u64,
}

impl Row {
    fn json(&self) -> serde_json::Value {
        let Row { name, runtime, imports, made, ms } = self;
        let (bytes, refused) = (made.as_ref().ok(), made.as_ref().err());
        json!({ "name": name, "runtime": runtime, "imports": imports, "image_bytes": bytes, "refused": refused, "making_ms": ms })
    }

    fn text(&self) -> String {
        let Row { name, runtime, imports, made, ms } = self;
        let imports = if imports.is_empty() { String::from("nothing") } else { imports.join(", ") };
        let outcome = match made {
            Ok(bytes) => format!("an image of {} MiB, made and tried in {ms} ms", bytes.div_ceil(1 << 20)),
            Err(why) => format!("refused: {why}"),
        };
        escape(&format!("{name}: {runtime} with {imports} imported; {outcome}"), is_hidden)
    }
}

/// Makes a template for the session or service that has started this process: into stdout, an empty
/// file. Says what came of it in one line on stderr.
fn make_for(session: u32, runtime: &str, stem: &str, options: Options) -> anyhow::Result<ExitCode> {
    // The session ends this process, unless it was killed.
    set_parent_process_death_signal(Some(Signal::TERM))?;
    // Of one that was killed before there is no signal.
    let Some(parent) = getppid().filter(|parent| parent.as_raw_nonzero().get().cast_unsigned() == session) else {
        return Ok(ExitCode::from(SANDBOX_ERROR));
    };
    // The kernel refuses it where this process gives way already (setpriority(2)).
    let _gives_way = setpriority_process(None, LESS_URGENT);
    // The signal is lost where the launcher takes on a caller's ids meanwhile (prctl(2)).
    let session = pidfd_open(parent, PidfdFlags::empty())?;
    let options = Options { ends_with: Arc::new([session]), ..options };
    let image = io::stdout().as_fd().try_clone_to_owned()?;
    let made = match load_policy(&options) {
        Ok(loaded) => make(runtime, stem, image, &loaded, &options).map_err(|error| match error.may_pass() {
            true => Answer::Failed(error.to_string()),
            false => Answer::Refused(error.to_string()),
        }),
        Err(refusal) => Err(Answer::Refused(refusal.to_string())),
    };
    let (answer, status) = match made {
        Ok(made) => (Answer::Made(made), ExitCode::SUCCESS),
        Err(answer) => (answer, ExitCode::from(SANDBOX_ERROR)),
    };
    serde_json::to_writer(io::stderr(), &answer)?;
    io::stderr().flush()?;
    Ok(status)
}
