//! `stockade runtimes`: languages and packages for a person, a program or a model.
//!
//! The interpreters themselves were asked; this only prints the answers.

use std::fmt::Write;

use stockade_diagnose::inventory::{Inventory, Language, Package, take};
use stockade_engine::{Options, runs::EntryPoint};
use stockade_protocol::{LimitKey, Verdict};

use crate::{
    ExitCode,
    args::Runtimes,
    output::{print_json, print_text, warn},
};

pub(crate) fn run(runtimes: &Runtimes) -> anyhow::Result<ExitCode> {
    let inventory =
        match take(&Options { image: runtimes.image.clone(), via: Some(EntryPoint::Runtimes), ..Options::from(&runtimes.policy) }) {
            Ok(inventory) => inventory,
            Err(refusal) => {
                warn(&format!("stockade: {refusal}"));
                return Ok(ExitCode::from(if refusal.verdict == Verdict::BadRequest { crate::USAGE_ERROR } else { crate::SANDBOX_ERROR }));
            }
        };
    if runtimes.json {
        print_json(&inventory)?;
    } else if runtimes.prompt {
        print_text(&prompt(&inventory)?)?;
    } else {
        print_text(&table(&inventory)?)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// The short text for a model's prompt; none, where no sandbox can be put in place.
pub(crate) fn prompt_of(options: &Options) -> Option<String> {
    let inventory = take(&Options { via: Some(EntryPoint::Runtimes), ..options.clone() }).ok()?;
    prompt(&inventory).ok()
}

type Text = Result<String, std::fmt::Error>;

fn table(inventory: &Inventory) -> Text {
    let mut out = String::new();
    let image = inventory.image.as_ref().map(|image| format!(", image {image}")).unwrap_or_default();
    writeln!(out, "policy {}{image}\n", inventory.policy)?;
    let name_width = width(inventory, |language| &language.name).max("LANGUAGE".len());
    let version_width = width(inventory, |language| language.version.as_deref().unwrap_or_default()).max("VERSION".len());
    let path_width = width(inventory, |language| language.path.as_deref().unwrap_or_default()).max("INTERPRETER".len());
    writeln!(out, "{:<name_width$}  {:<version_width$}  {:<path_width$}  ALSO CALLED", "LANGUAGE", "VERSION", "INTERPRETER")?;
    for language in &inventory.runtimes {
        let (name, version) = (&language.name, language.version.as_deref().unwrap_or("-"));
        match &language.reason {
            Some(reason) => writeln!(out, "{name:<name_width$}  {:<version_width$}  {reason}", "missing")?,
            None => {
                let path = language.path.as_deref().unwrap_or_default();
                let default = if language.default { " (default)" } else { "" };
                let row = format!(
                    "{name:<name_width$}  {version:<version_width$}  {path:<path_width$}  {}{default}",
                    language.aliases.join(", ")
                );
                writeln!(out, "{}", row.trim_end())?;
            }
        }
    }
    for language in inventory.runtimes.iter().filter(|language| !language.packages.is_empty()) {
        writeln!(out, "\n{} packages of {}", language.packages.len(), language.name)?;
        language.packages.iter().try_for_each(|package| writeln!(out, "  {} {}", package.name, package.version))?;
    }
    Ok(out)
}

fn width<'a>(inventory: &'a Inventory, field: impl Fn(&'a Language) -> &'a str) -> usize {
    inventory.runtimes.iter().map(|language| field(language).chars().count()).max().unwrap_or(0)
}

/// What a model should know before it writes code; short, since every token costs.
fn prompt(inventory: &Inventory) -> Text {
    let mut out = String::new();
    writeln!(out, "Code runs in a Linux sandbox that starts fresh each time.")?;
    let available: Vec<&Language> = inventory.runtimes.iter().filter(|language| language.available).collect();
    let languages: Vec<String> = available.iter().map(|language| called(language)).collect();
    writeln!(out, "Languages: {}.", if languages.is_empty() { String::from("none is installed") } else { languages.join("; ") })?;
    for language in available.iter().filter(|language| !language.packages.is_empty()) {
        writeln!(out, "Packages for {}, besides its standard library: {}.", language.name, packages(&language.packages))?;
    }
    match inventory.network.as_slice() {
        [] => writeln!(out, "No network: nothing can be downloaded or installed.")?,
        peers => writeln!(out, "Network: only {}.", peers.join(", "))?,
    }
    let scratch = match (inventory.writable, inventory.home_in_scratch) {
        (true, false) => {
            "Files go into the working directory (scratch). They outlive the run only if the caller gave that directory; /tmp and the home directory are always lost."
        }
        (true, true) => {
            "Files go into the working directory (scratch), which is also the home directory. They outlive the run only if the caller gave that directory; /tmp is always lost."
        }
        (false, _) => "The working directory is read-only; temporary files go into /tmp, which is lost after the run.",
    };
    writeln!(out, "{scratch}")?;
    let limits: Vec<String> = LIMITS
        .iter()
        .filter_map(|(key, what)| inventory.limits.get(*key).map(|value| format!("{what} {}", key.format(Some(value)))))
        .collect();
    writeln!(out, "Limits: {}.", limits.join(", "))?;
    Ok(out)
}

/// Limits that change how code is written.
const LIMITS: [(LimitKey, &str); 8] = [
    (LimitKey::Wall, "wall clock"),
    (LimitKey::Cpu, "CPU time"),
    (LimitKey::Memory, "memory"),
    (LimitKey::Cpus, "CPUs"),
    (LimitKey::Processes, "processes"),
    (LimitKey::ScratchSize, "scratch"),
    (LimitKey::TmpSize, "/tmp"),
    (LimitKey::OutputSize, "output"),
];

fn called(language: &Language) -> String {
    let version = language.version.as_deref().map(|version| format!(" {version}")).unwrap_or_default();
    let default = if language.default { " (default)" } else { "" };
    format!("{}{version}{default}", language.name)
}

/// Packages that code is likely to want, first in a list that has no room for all.
const NOTABLE: [&str; 34] = [
    "numpy",
    "pandas",
    "polars",
    "scipy",
    "matplotlib",
    "seaborn",
    "plotly",
    "scikit-learn",
    "statsmodels",
    "sympy",
    "networkx",
    "torch",
    "tensorflow",
    "pyarrow",
    "openpyxl",
    "xlsxwriter",
    "sqlalchemy",
    "pydantic",
    "requests",
    "httpx",
    "beautifulsoup4",
    "lxml",
    "pyyaml",
    "pillow",
    "opencv-python",
    "pypdf",
    "reportlab",
    "jinja2",
    "pytest",
    "typescript",
    "lodash",
    "axios",
    "express",
    "yargs",
];
const MAX_IN_PROMPT: usize = 30;

fn packages(packages: &[Package]) -> String {
    let is_notable = |package: &&Package| NOTABLE.contains(&package.name.to_lowercase().as_str());
    let (notable, others): (Vec<&Package>, Vec<&Package>) = packages.iter().partition(is_notable);
    let shown: Vec<String> =
        notable.into_iter().chain(others).take(MAX_IN_PROMPT).map(|package| format!("{} {}", package.name, package.version)).collect();
    let rest = packages.len() - shown.len();
    let more = if rest == 0 { String::new() } else { format!(", and {rest} more") };
    format!("{}{more}", shown.join(", "))
}
