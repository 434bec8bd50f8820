//! What code finds in the sandbox: languages, their versions and packages.
//!
//! Every answer comes from the interpreter itself, started in the sandbox as a request
//! would start it, so that nothing is listed which code could not use. What comes back
//! is data of the host's packages, yet it is parsed as strictly as anything from inside.
//! Nothing is worded here for a person.

use std::{collections::BTreeMap, path::Path};

use serde::{Deserialize, Serialize};
use stockade_policy::model::{Policy, Runtime};
use stockade_protocol::{LimitKey, Limits, Report, Verdict};

use stockade_engine::{LoadedPolicy, Options, Refusal, admit::program_of, exec, load_policy, run_captured};

use crate::doctor;

/// A package that code can import without installing anything.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Package {
    /// Its name.
    pub name: String,
    /// Its version.
    pub version: String,
}

/// One language of a policy.
#[derive(Clone, Debug, Serialize)]
pub struct Language {
    /// The name that a request gives.
    pub name: String,
    /// Other names of it.
    pub aliases: Vec<String>,
    /// A request that names no language gets it.
    pub default: bool,
    /// The interpreter, as code sees it; null where none could be started.
    pub path: Option<String>,
    /// Its version; null where it does not tell.
    pub version: Option<String>,
    /// Code in this language runs.
    pub available: bool,
    /// Installed packages, by name.
    pub packages: Vec<Package>,
    /// Why it is not available, and the remedy.
    pub reason: Option<String>,
}

/// The languages of a policy, and what else a program's author should know.
#[derive(Clone, Debug, Serialize)]
pub struct Inventory {
    /// Version of this format.
    pub schema: u32,
    /// The policy's name.
    pub policy: String,
    /// The image whose languages these are; null: the host's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub image: Option<String>,
    /// Its languages.
    pub runtimes: Vec<Language>,
    /// The default limits of a run.
    #[serde(skip)]
    pub limits: Limits,
    /// Scratch can be written to.
    #[serde(skip)]
    pub writable: bool,
    /// HOME lies in scratch.
    #[serde(skip)]
    pub home_in_scratch: bool,
    /// The rules of the whitelist; empty: no network.
    #[serde(skip)]
    pub network: Vec<String>,
}

/// Asks every interpreter of the policy.
///
/// # Errors
/// The policy cannot be loaded, or no sandbox can be put in place at all.
pub fn take(options: &Options) -> Result<Inventory, Refusal> {
    let loaded = load_policy(options)?;
    let policy = &loaded.policy;
    let mut runtimes = Vec::new();
    for (name, runtime) in &policy.runtimes {
        runtimes.push(ask(name, runtime, &loaded, options)?);
    }
    Ok(Inventory {
        schema: 1,
        policy: policy.name.clone(),
        image: image_of(policy, options).cloned(),
        runtimes,
        limits: policy.limits.clone(),
        writable: policy.scratch.access == stockade_policy::model::Access::Rw,
        home_in_scratch: policy.scratch.home,
        network: policy.egress.whitelist.clone().into(),
    })
}

/// The image that the runs have.
fn image_of<'a>(policy: &'a Policy, options: &'a Options) -> Option<&'a String> {
    options.image.as_ref().or(policy.filesystem.root.image.as_ref())
}

/// What an interpreter says of itself.
#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Answer {
    version: String,
    #[serde(default)]
    packages: Vec<Package>,
}

/// Milliseconds that an interpreter has for its answer, or the policy's wall clock where that is less:
/// that of an image may never give one.
const MAX_ANSWER_MS: u64 = 15_000;
/// A run may list no more.
const MAX_PACKAGES: usize = 20_000;

const ASK_PYTHON: &str = r#"
import json, platform, re
found = {}
try:
    from importlib import metadata
    for distribution in metadata.distributions():
        name, version = distribution.metadata["Name"], distribution.version
        # The first on the path is the one that is imported.
        if name and version:
            found.setdefault(re.sub(r"[-_.]+", "-", name).lower(), (name, version))
except ImportError:
    pass
packages = [{"name": str(name), "version": str(version)} for _, (name, version) in sorted(found.items())]
print(json.dumps({"version": platform.python_version(), "packages": packages}))
"#;

const ASK_NODE: &str = r#"
const fs = require("fs"), path = require("path"), found = new Map();
function look(directory, scope) {
  let names = [];
  try { names = fs.readdirSync(directory); } catch { return; }
  for (const name of names) {
    if (name.startsWith(".")) continue;
    if (name.startsWith("@") && !scope) { look(path.join(directory, name), name + "/"); continue; }
    try {
      const { version } = JSON.parse(fs.readFileSync(path.join(directory, name, "package.json"), "utf8"));
      if (typeof version === "string" && !found.has(scope + name)) found.set(scope + name, version);
    } catch {}
  }
}
for (const directory of require("module").globalPaths) look(directory, "");
const packages = [...found].sort((a, b) => (a[0] < b[0] ? -1 : 1)).map(([name, version]) => ({ name, version }));
console.log(JSON.stringify({ version: process.versions.node, packages }));
"#;

/// The braces end the version where Bash prints its release in brackets.
const ASK_BASH: &str = r#"printf '{"version": "%s"}\n' "${BASH_VERSION%%(*}""#;

/// A module cannot be empty. It is asked for its version by an option.
const EMPTY_MODULE: &str = "(module)";

/// How an interpreter is asked, by the name of its program.
fn question_for(program: &Path) -> Option<&'static str> {
    let name = program.file_name()?.to_str()?;
    match name.trim_end_matches(|c: char| c.is_ascii_digit() || c == '.') {
        "python" | "pypy" => Some(ASK_PYTHON),
        "node" | "nodejs" => Some(ASK_NODE),
        "bash" => Some(ASK_BASH),
        "pyodide" => Some(ASK_PYTHON),
        "wasmtime" => Some(EMPTY_MODULE),
        _ => None,
    }
}

fn ask(name: &str, runtime: &Runtime, loaded: &LoadedPolicy, options: &Options) -> Result<Language, Refusal> {
    let policy = &loaded.policy;
    let is_default = stockade_policy::plan::find_runtime(policy, &policy.language).is_ok_and(|(default, _)| default == name);
    let mut language = Language {
        name: name.to_owned(),
        aliases: runtime.aliases.clone(),
        default: is_default,
        path: None,
        version: None,
        available: false,
        packages: Vec::new(),
        reason: None,
    };
    let of_image = program_of(runtime, policy, options)?;
    let program = of_image.unwrap_or_else(|| doctor::interpreter_of(name, runtime, options));
    let question = question_for(&program);
    let wall = LimitKey::Wall.format(Some(answer_ms(policy)));
    let limits = BTreeMap::from([(LimitKey::Wall.name(), wall)]);
    let request = serde_json::json!({ "code": question.unwrap_or_default(), "language": name, "limits": limits });
    let report = exec(request.to_string().as_bytes(), options);
    // The others are not asked either.
    if report.verdict == Verdict::Cancelled {
        let reason = report.reason.unwrap_or_default();
        return Err(Refusal { verdict: report.verdict, reason, message: String::from("cancelled"), exec_errno: None });
    }
    let is_refused = doctor::compiler_starts(&report);
    if !report.started && !is_refused {
        language.reason = Some(why_not(&report, &program, runtime, image_of(policy, options).is_none())?);
        return Ok(language);
    }
    if !report.success && !is_refused {
        language.reason = Some(doctor::how_it_ended(&program, &report));
        return Ok(language);
    }
    language.available = true;
    language.path = Some(program.to_string_lossy().into_owned());
    if question.is_some_and(|question| question != EMPTY_MODULE) {
        let answer: Answer = report.output.and_then(|output| serde_json::from_str(&output.0).ok()).unwrap_or_default();
        language.version = Some(answer.version).filter(|version| is_plain(version));
        language.packages = answer
            .packages
            .into_iter()
            .filter(|package| is_plain(&package.name) && is_plain(&package.version))
            .take(MAX_PACKAGES)
            .collect();
    } else {
        language.version = version_by_option(name, &program, loaded, options);
    }
    Ok(language)
}

/// The wall clock of a question.
fn answer_ms(policy: &Policy) -> u64 {
    policy.limits.get(LimitKey::Wall).map_or(MAX_ANSWER_MS, |wall| wall.min(MAX_ANSWER_MS))
}

/// Whether a text can stand in a table and in a model's prompt as it is.
fn is_plain(text: &str) -> bool {
    !text.is_empty() && text.len() <= 200 && text.chars().all(|c| c.is_ascii_graphic())
}

/// Why a language did not start, where that is its own fault.
fn why_not(report: &Report, program: &Path, runtime: &Runtime, is_of_host: bool) -> Result<String, Refusal> {
    let message = report.error.0.clone();
    // An option of the caller's is refused for every language alike.
    let reason = report.reason.as_deref();
    match reason.filter(|_| report.verdict == Verdict::SandboxError) {
        Some("interpreter_missing") if runtime.venv.is_none() && is_of_host => {
            Ok(format!("{} is not on this host: {}", program.display(), doctor::install_hint(program)))
        }
        Some("interpreter_missing" | "program_not_started") => Ok(message),
        _ => {
            let verdict = if report.verdict == Verdict::BadRequest { Verdict::BadRequest } else { Verdict::SandboxError };
            Err(Refusal { verdict, reason: reason.unwrap_or("not_started").to_owned(), message, exec_errno: None })
        }
    }
}

/// The version that `--version` prints; of a program that prints none, such as dash, none.
fn version_by_option(name: &str, program: &Path, loaded: &LoadedPolicy, options: &Options) -> Option<String> {
    // Its virtual environment is shown where it is the policy's language.
    let mut policy = Policy { language: name.to_owned(), ..loaded.policy.clone() };
    policy.limits.set(LimitKey::Wall, Some(answer_ms(&policy)));
    let loaded = LoadedPolicy { policy, filters: loaded.filters.clone() };
    let report = run_captured(&[program.to_str()?, "--version"], &loaded, options).ok().filter(|report| report.success)?;
    find_version(&[report.output.unwrap_or_default().0, report.error.0].concat())
}

/// The first number with a dot in it.
fn find_version(text: &str) -> Option<String> {
    text.split(|c: char| !(c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '+')))
        .map(|word| word.trim_start_matches(|c: char| !c.is_ascii_digit()).trim_end_matches(['.', '-', '+']))
        .find(|word| {
            word.contains('.') && word.split('.').take(2).all(|part| part.starts_with(|c: char| c.is_ascii_digit())) && is_plain(word)
        })
        .map(String::from)
}

#[cfg(test)]
mod tests {
    use super::{find_version, question_for};
    use std::path::Path;

    #[test]
    fn versions_are_found_in_what_programs_print() {
        let cases = [
            ("\nThis is perl 5, version 36, subversion 0 (v5.36.0) built for x86_64-linux-gnu", Some("5.36.0")),
            ("mawk 1.3.4 20200120\nCopyright 2008", Some("1.3.4")),
            ("ruby 3.1.2p20 (2022-04-12 revision 4491bb740a) [x86_64-linux-gnu]", Some("3.1.2p20")),
            ("openjdk 17.0.7 2023-04-18", Some("17.0.7")),
            ("R version 4.2.2 Patched", Some("4.2.2")),
            ("sh: 0: Illegal option --", None),
            ("", None),
        ];
        for (printed, version) in cases {
            assert_eq!(find_version(printed).as_deref(), version, "{printed}");
        }
    }

    #[test]
    fn a_versioned_program_is_asked_like_its_family() {
        assert!(question_for(Path::new("/opt/venv/bin/python3.11")).is_some_and(|question| question.contains("platform")));
        assert!(question_for(Path::new("/usr/bin/perl")).is_none());
    }
}
