//! `stockade shim`: files that stand for interpreters, in a directory of the caller's.
//!
//! A shim is a few lines of text. The first has the kernel start this program, the others
//! say what `run` would be told by options; so nothing stands between caller and sandbox,
//! and a shim can be moved, linked to and called by any path. Which files are shims is told
//! from their first lines: nothing else is overwritten or removed. What one runs is decided
//! in `runtime`.

use std::{
    collections::BTreeMap,
    ffi::OsString,
    fmt::Write as _,
    fs::{self, OpenOptions},
    io::{self, ErrorKind, Read, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
};

use anyhow::{Context, anyhow, bail};
use stockade_policy::plan::Plan;
use stockade_runtime::{
    Ask, Options, Refusal,
    interpreter::{Interpreter, interpret},
};

use crate::{
    ExitCode,
    args::{PolicyChoice, Shim, ShimExec},
    command_status, explain,
    output::{say, warn},
    refuse, refused_command,
};

/// What callers start by name, whatever a policy calls it.
const USUAL: [&str; 6] = ["python", "python3", "sh", "bash", "node", "pwsh"];
/// What the kernel reads of a first line, its end included.
const LONGEST_FIRST_LINE: usize = 255;
/// A shim is smaller by far.
const LARGEST: u64 = 64 << 10;
const NONE_FOUND: u8 = 1;

pub(crate) fn run(command: &Shim) -> anyhow::Result<ExitCode> {
    match command {
        Shim::Install { directory, policy, exact } => install(directory, policy, *exact),
        Shim::List { directory } => list(directory),
        Shim::Remove { directory } => remove(directory),
    }
}

/// What a shim says.
#[derive(Debug, Default, PartialEq, Eq)]
struct Said {
    runtime: String,
    policy: Option<String>,
    interpreters: Vec<(String, PathBuf)>,
    exact: bool,
}

impl Said {
    /// The text of the shim `name`.
    fn text(&self, name: &str, program: &Path) -> anyhow::Result<String> {
        let first = format!("#!{} {}\n", program.display(), ShimExec::WORD);
        if first.len() > LONGEST_FIRST_LINE || program.to_str().is_none_or(|path| path.contains(char::is_whitespace)) {
            bail!(
                "this program is at {}, which the kernel cannot read from a shim's first line; install it at a path without blanks and of at most {} bytes",
                program.display(),
                LONGEST_FIRST_LINE - ShimExec::WORD.len() - "#! \n".len()
            );
        }
        let mut text = first;
        writeln!(text, "# `{name}` in a sandbox: made by `stockade shim install`, taken away by `stockade shim remove`.")?;
        writeln!(text, "runtime {}", self.runtime)?;
        if let Some(policy) = &self.policy {
            writeln!(text, "policy {policy}")?;
        }
        for (runtime, path) in &self.interpreters {
            writeln!(text, "interpreter {runtime}={}", path.display())?;
        }
        if self.exact {
            writeln!(text, "exact")?;
        }
        match text.lines().skip(2).map(str::to_owned).collect::<Vec<_>>() {
            lines if Self::read(&lines).is_ok_and(|read| read == *self) => Ok(text),
            _ => bail!("a policy or an interpreter with a line break in its path cannot stand in a shim"),
        }
    }

    fn read(lines: &[String]) -> anyhow::Result<Said> {
        let mut said = Said::default();
        for line in lines.iter().filter(|line| !line.is_empty() && !line.starts_with('#')) {
            match line.split_once(' ').unwrap_or((line, "")) {
                ("runtime", runtime) => said.runtime = runtime.to_owned(),
                ("policy", policy) => said.policy = Some(policy.to_owned()),
                ("interpreter", pair) => {
                    let (runtime, path) = pair.split_once('=').ok_or_else(|| anyhow!("`interpreter {pair}` lacks its `=`"))?;
                    said.interpreters.push((runtime.to_owned(), PathBuf::from(path)));
                }
                ("exact", "") => said.exact = true,
                _ => bail!("`{line}` means nothing to this version; make the shims anew with `stockade shim install`"),
            }
        }
        if said.runtime.is_empty() {
            bail!("it names no runtime; make the shims anew with `stockade shim install`");
        }
        Ok(said)
    }

    fn options(&self) -> Options {
        Options { policy: self.policy.clone(), interpreters: self.interpreters.clone(), ..Options::default() }
    }
}

/// The program that a shim starts, and its lines after the first; none where the file is no shim.
///
/// # Errors
/// It cannot be read.
fn open(file: &Path) -> io::Result<Option<(PathBuf, Vec<String>)>> {
    // A fifo or a device must not keep us.
    let opened = OpenOptions::new().read(true).custom_flags(rustix::fs::OFlags::NONBLOCK.bits().cast_signed()).open(file)?;
    if !opened.metadata()?.is_file() {
        return Ok(None);
    }
    let mut bytes = Vec::new();
    opened.take(LARGEST).read_to_end(&mut bytes)?;
    let text = String::from_utf8_lossy(&bytes);
    let mut lines = text.lines();
    let program = lines.next().and_then(|line| line.strip_prefix("#!")?.strip_suffix(ShimExec::WORD)?.strip_suffix(' '));
    Ok(program.map(|program| (PathBuf::from(program), lines.map(str::to_owned).collect())))
}

/// What the kernel starts: a shim's file and the arguments of its caller.
pub(crate) fn exec(shim: &ShimExec) -> anyhow::Result<ExitCode> {
    let file = shim.file.as_ref().context("this is for the first line of a shim, which `stockade shim install` makes")?;
    let of_file = || format!("the shim {}", file.display());
    let opened = stockade_runtime::with_callers_rights(|| open(file))?;
    let (_, lines) = opened.with_context(of_file)?.ok_or_else(|| anyhow!("it is no shim")).with_context(of_file)?;
    let said = Said::read(&lines).with_context(of_file)?;
    let arguments: Result<Vec<String>, OsString> = shim.arguments.iter().cloned().map(OsString::into_string).collect();
    let arguments = match arguments {
        Ok(arguments) => arguments,
        Err(argument) => {
            let message = format!("the argument {} is not UTF-8", argument.to_string_lossy());
            return Ok(refuse(&Refusal::bad_request("command_malformed", message)));
        }
    };
    let asked = Interpreter {
        runtime: said.runtime.clone(),
        arguments,
        variables: std::env::vars_os().filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?))).collect(),
        directory: std::env::current_dir().context("find out the working directory, which is to be the sandbox's scratch")?,
        shim: file.clone(),
        exact: said.exact,
    };
    Ok(match interpret(&asked, &said.options()) {
        Ok(result) => {
            // What the run went without is said when a shim is made: here stderr is the program's.
            explain(&result.report);
            command_status(result.code)
        }
        Err(refusal) => refused_command(&refusal),
    })
}

fn install(directory: &Path, choice: &PolicyChoice, exact: bool) -> anyhow::Result<ExitCode> {
    let mut options = Options::from(choice);
    if let Some(policy) = options.policy.as_mut().filter(|policy| policy.contains('/')) {
        // The shim runs wherever its caller stands.
        let absolute = std::path::absolute(&policy).with_context(|| format!("find out where {policy} is"))?;
        *policy = absolute.into_os_string().into_string().map_err(|_| anyhow!("the path of policy {policy} is not UTF-8"))?;
    }
    let loaded = match stockade_runtime::load_policy(&options) {
        Ok(loaded) => loaded,
        Err(refusal) => return Ok(refuse(&refusal)),
    };
    let mut names: Vec<&str> = USUAL.to_vec();
    names.extend(loaded.policy.runtimes.keys().map(String::as_str).filter(|name| !USUAL.contains(name) && !name.contains('/')));
    let program = std::env::current_exe().context("find out where this program is")?;
    let (mut texts, mut degraded) = (Vec::new(), BTreeMap::new());
    for name in names {
        match plan(name, &options) {
            Ok(plan) => degraded.extend(plan.degraded),
            Err(refusal) if matches!(refusal.reason.as_str(), "unknown_language" | "interpreter_missing") => {
                warn(&format!("stockade: left out {name}: {refusal}"));
                continue;
            }
            Err(refusal) => return Ok(refuse(&refusal)),
        }
        let said = Said { runtime: name.to_owned(), policy: options.policy.clone(), interpreters: options.interpreters.clone(), exact };
        texts.push((name, said.text(name, &program)?));
    }
    let made = || -> anyhow::Result<String> {
        fs::create_dir_all(directory).with_context(|| format!("make {}", directory.display()))?;
        let mut said = String::new();
        for (name, text) in &texts {
            let path = directory.join(name);
            put(&path, text)?;
            writeln!(said, "{}", path.display())?;
        }
        Ok(said)
    };
    // With the caller's rights: root writes no file for whoever may not.
    let made = stockade_runtime::with_callers_rights(made)??;
    for (layer, why) in degraded {
        warn(&format!("stockade: here their runs go without `{layer}`: {why}"));
    }
    if texts.is_empty() {
        return Err(anyhow!("policy `{}` has no interpreter that is on this host", loaded.policy.name));
    }
    say(&made)?;
    Ok(ExitCode::SUCCESS)
}

/// What a run of this runtime would be here.
fn plan(runtime: &str, options: &Options) -> Result<Plan, Refusal> {
    let ask = Ask::Interpreter { runtime, arguments: &[], environment: &BTreeMap::new(), alias: None, terminal: false };
    stockade_runtime::plan(ask, options)
}

/// Puts a shim in its place, at once: whoever starts it meanwhile gets the old or the new one.
fn put(path: &Path, text: &str) -> anyhow::Result<()> {
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        // A link to a shim is not ours to replace, nor what it leads to.
        Ok(metadata) if metadata.is_file() && open(path)?.is_some() => {}
        Ok(_) => bail!("{} is there and is no shim; move it away, or name another directory", path.display()),
        Err(error) => return Err(error).with_context(|| format!("look at {}", path.display())),
    }
    let next = path.with_file_name(format!(".{}.{}", path.file_name().unwrap_or_default().to_string_lossy(), std::process::id()));
    let write = || -> io::Result<()> {
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o755).open(&next)?;
        file.write_all(text.as_bytes())?;
        fs::rename(&next, path)
    };
    write().map_err(|error| {
        let _not_made = fs::remove_file(&next);
        anyhow!(error).context(format!("make {}", path.display()))
    })
}

/// A shim's path, the program that it starts, and its lines after the first.
type Found = (PathBuf, PathBuf, Vec<String>);

/// The shims of a directory, by name.
fn found(directory: &Path) -> anyhow::Result<Vec<Found>> {
    let look = || -> anyhow::Result<Vec<Found>> {
        let mut found = Vec::new();
        for entry in fs::read_dir(directory)? {
            let path = entry?.path();
            if fs::symlink_metadata(&path)?.is_file()
                && let Some((program, lines)) = open(&path).with_context(|| format!("read {}", path.display()))?
            {
                found.push((path, program, lines));
            }
        }
        found.sort();
        Ok(found)
    };
    let found = look().with_context(|| format!("look into {}", directory.display()))?;
    if found.is_empty() {
        warn(&format!("stockade: there are no shims in {}", directory.display()));
    }
    Ok(found)
}

fn list(directory: &Path) -> anyhow::Result<ExitCode> {
    let found = stockade_runtime::with_callers_rights(|| found(directory))??;
    let mut out = String::new();
    for (path, program, lines) in &found {
        let what = match Said::read(lines) {
            Ok(said) => {
                let interpreters = said.interpreters.iter().map(|(runtime, path)| format!(", {runtime} is {}", path.display()));
                let exact = if said.exact { ", exact" } else { "" };
                let policy = said.policy.as_deref().unwrap_or("default");
                format!("{} under policy {policy}{}{exact}", said.runtime, interpreters.collect::<String>())
            }
            Err(error) => error.to_string(),
        };
        let gone = if program.is_file() { String::new() } else { format!("; {} is not there: install the shims again", program.display()) };
        writeln!(out, "{}  {what}{gone}", path.display())?;
    }
    if found.is_empty() {
        return Ok(ExitCode::from(NONE_FOUND));
    }
    say(&out)?;
    Ok(ExitCode::SUCCESS)
}

fn remove(directory: &Path) -> anyhow::Result<ExitCode> {
    let removed = stockade_runtime::with_callers_rights(|| -> anyhow::Result<usize> {
        let found = found(directory)?;
        for (path, ..) in &found {
            fs::remove_file(path).with_context(|| format!("remove {}", path.display()))?;
        }
        if !found.is_empty() {
            // The directory too, unless it holds something else.
            match fs::remove_dir(directory) {
                Err(error) if error.kind() != ErrorKind::DirectoryNotEmpty => {
                    return Err(error).with_context(|| format!("remove {}", directory.display()));
                }
                _ => {}
            }
        }
        Ok(found.len())
    })??;
    Ok(if removed == 0 { ExitCode::from(NONE_FOUND) } else { ExitCode::SUCCESS })
}
