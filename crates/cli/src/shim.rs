//! `stockade shim`: files in a directory of the caller's that act as interpreters.
//!
//! A shim is a few lines of text. The kernel starts this program by the first; the others hold
//! what options are for `run`. So no process is between caller and sandbox, and a shim can be
//! moved, linked to and called by any path. Only files with a shim's first line are
//! overwritten or removed. `engine` decides what a shim runs.

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
use stockade_engine::{
    Options, Origin, Refusal, RunSettings,
    caller::waiting,
    interpreter::{ArgumentNotUtf8, Interpreter, interpret},
    plan::Plan,
    runs::EntryPoint,
};

use crate::{
    ExitCode,
    args::{PolicyChoice, Shim, ShimExec},
    output::{print_text, warn},
    run::{ended_command, explain, refuse, refused_command},
};

/// Names that callers start, whatever the policy calls its runtimes.
const USUAL: [&str; 6] = ["python", "python3", "sh", "bash", "node", "pwsh"];
/// What the kernel reads of a first line, with its line break.
const MAX_FIRST_LINE_LEN: usize = 255;
/// A larger file is not read.
const MAX_SHIM_LEN: u64 = 64 << 10;
const NONE_FOUND: u8 = 1;

pub(crate) fn run(command: &Shim) -> anyhow::Result<ExitCode> {
    match command {
        Shim::Install { directory, policy, scratch, exact, quiet } => install(directory, policy, scratch.as_deref(), *exact, *quiet),
        Shim::List { directory } => list(directory),
        Shim::Remove { directory } => remove(directory),
    }
}

/// The lines of a shim after its first.
#[derive(Debug, Default, PartialEq, Eq)]
struct ShimFile {
    runtime: String,
    policy: Option<String>,
    interpreters: Vec<(String, PathBuf)>,
    scratch: Option<PathBuf>,
    exact: bool,
}

impl ShimFile {
    /// The text of the shim `name`.
    fn text(&self, name: &str, program: &Path) -> anyhow::Result<String> {
        let first = format!("#!{} {}\n", program.display(), ShimExec::WORD);
        if first.len() > MAX_FIRST_LINE_LEN || program.to_str().is_none_or(|path| path.contains(char::is_whitespace)) {
            bail!(
                "this program is at {}, which the kernel cannot read from a shim's first line; install it at a path without blanks and of at most {} bytes",
                program.display(),
                MAX_FIRST_LINE_LEN - ShimExec::WORD.len() - "#! \n".len()
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
        if let Some(scratch) = &self.scratch {
            writeln!(text, "scratch {}", scratch.display())?;
        }
        if self.exact {
            writeln!(text, "exact")?;
        }
        match text.lines().skip(2).map(str::to_owned).collect::<Vec<_>>() {
            lines if Self::read(&lines).is_ok_and(|read| read == *self) => Ok(text),
            _ => {
                bail!("a shim cannot hold a path that has a line break or is not UTF-8, neither of a policy, an interpreter nor a scratch")
            }
        }
    }

    fn read(lines: &[String]) -> anyhow::Result<ShimFile> {
        let mut shim_file = ShimFile::default();
        for line in lines.iter().filter(|line| !line.is_empty() && !line.starts_with('#')) {
            match line.split_once(' ').unwrap_or((line, "")) {
                ("runtime", runtime) => shim_file.runtime = runtime.to_owned(),
                ("policy", policy) => shim_file.policy = Some(policy.to_owned()),
                ("interpreter", pair) => {
                    let (runtime, path) = pair.split_once('=').ok_or_else(|| anyhow!("`interpreter {pair}` lacks its `=`"))?;
                    shim_file.interpreters.push((runtime.to_owned(), PathBuf::from(path)));
                }
                ("scratch", path) => shim_file.scratch = Some(PathBuf::from(path)),
                ("exact", "") => shim_file.exact = true,
                _ => bail!("this version does not know the line `{line}`; make the shims again with `stockade shim install`"),
            }
        }
        if shim_file.runtime.is_empty() {
            bail!("it names no runtime; make the shims again with `stockade shim install`");
        }
        Ok(shim_file)
    }

    fn options(&self) -> Options {
        Options { policy: self.policy.clone(), interpreters: self.interpreters.clone(), ends_with: waiting().into(), ..Options::default() }
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
    opened.take(MAX_SHIM_LEN).read_to_end(&mut bytes)?;
    let text = String::from_utf8_lossy(&bytes);
    let mut lines = text.lines();
    let program = lines.next().and_then(|line| line.strip_prefix("#!")?.strip_suffix(ShimExec::WORD)?.strip_suffix(' '));
    Ok(program.map(|program| (PathBuf::from(program), lines.map(str::to_owned).collect())))
}

/// What the kernel starts: a shim's file and the arguments of its caller.
pub(crate) fn exec(shim: &ShimExec) -> anyhow::Result<ExitCode> {
    let (file, arguments) =
        shim.words.split_first().context("only the first line of a shim starts this; `stockade shim install` makes shims")?;
    let file = Path::new(file);
    let of_file = || format!("the shim {}", file.display());
    let opened = stockade_engine::with_callers_rights(|| open(file))?;
    let (_, lines) = opened.with_context(of_file)?.ok_or_else(|| anyhow!("it is not a shim")).with_context(of_file)?;
    let shim_file = ShimFile::read(&lines).with_context(of_file)?;
    let arguments: Result<Vec<String>, OsString> = arguments.iter().cloned().map(OsString::into_string).collect();
    let arguments = match arguments {
        Ok(arguments) => arguments,
        Err(argument) => return Ok(ExitCode::from(refuse(&ArgumentNotUtf8(argument).into()))),
    };
    let asked = Interpreter {
        runtime: shim_file.runtime.clone(),
        arguments,
        variables: std::env::vars_os().filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?))).collect(),
        directory: std::env::current_dir().context("find the working directory, which becomes the sandbox's scratch")?,
        scratch: shim_file.scratch.clone(),
        shim: file.to_path_buf(),
        exact: shim_file.exact,
    };
    Ok(match interpret(&asked, &shim_file.options()) {
        Ok(result) => {
            // `shim install` reports missing layers: here stderr belongs to the program.
            let (report, status) = ended_command(result);
            explain(&report);
            status
        }
        Err(refusal) => ExitCode::from(refused_command(&refusal)),
    })
}

fn install(directory: &Path, choice: &PolicyChoice, scratch: Option<&Path>, exact: bool, quiet: bool) -> anyhow::Result<ExitCode> {
    let mut options = Options::from(choice);
    if let Some(policy) = options.policy.as_mut().filter(|policy| policy.contains('/')) {
        // A shim runs in its caller's working directory.
        let absolute = std::path::absolute(&policy).with_context(|| format!("find out where {policy} is"))?;
        *policy = absolute.into_os_string().into_string().map_err(|_| anyhow!("the path of policy {policy} is not UTF-8"))?;
    }
    let loaded = match stockade_engine::load_policy(&options) {
        Ok(loaded) => loaded,
        Err(refusal) => return Ok(ExitCode::from(refuse(&refusal))),
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
            Err(refusal) => return Ok(ExitCode::from(refuse(&refusal))),
        }
        let shim_file = ShimFile {
            runtime: name.to_owned(),
            policy: options.policy.clone(),
            interpreters: options.interpreters.clone(),
            scratch: scratch.map(Path::to_path_buf),
            exact,
        };
        texts.push((name, shim_file.text(name, &program)?));
    }
    let made = || -> anyhow::Result<String> {
        fs::create_dir_all(directory).with_context(|| format!("make {}", directory.display()))?;
        let mut paths = String::new();
        for (name, text) in &texts {
            let path = directory.join(name);
            put(&path, text)?;
            writeln!(paths, "{}", path.display())?;
        }
        Ok(paths)
    };
    // With the caller's rights: root must not write files that the caller could not.
    let made = stockade_engine::with_callers_rights(made)??;
    for (layer, why) in degraded.iter().filter(|_| !quiet) {
        warn(&format!("stockade: their runs here lack the layer `{layer}`: {why}"));
    }
    if texts.is_empty() {
        return Err(anyhow!("policy `{}` has no interpreter that is on this host", loaded.policy.name));
    }
    print_text(&made)?;
    Ok(ExitCode::SUCCESS)
}

/// What a run of this runtime would be here.
fn plan(runtime: &str, options: &Options) -> Result<Plan, Refusal> {
    let origin = Origin::Interpreter {
        via: EntryPoint::Shim,
        runtime,
        arguments: &[],
        environment: &BTreeMap::new(),
        alias: None,
        settings: RunSettings::NONE,
        terminal: false,
    };
    stockade_engine::plan(origin, options)
}

/// Writes a shim and renames it into place, so that a caller starts the old or the new one.
fn put(path: &Path, text: &str) -> anyhow::Result<()> {
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        // A symlink to a shim is not replaced, nor is its target.
        Ok(metadata) if metadata.is_file() && open(path)?.is_some() => {}
        Ok(_) => bail!("{} exists and is not a shim; move it away, or name another directory", path.display()),
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
    let found = stockade_engine::with_callers_rights(|| found(directory))??;
    let mut out = String::new();
    for (path, program, lines) in &found {
        let what = match ShimFile::read(lines) {
            Ok(shim_file) => {
                let interpreters = shim_file.interpreters.iter().map(|(runtime, path)| format!(", {runtime} is {}", path.display()));
                let scratch = shim_file.scratch.iter().map(|path| format!(", scratch {}", path.display()));
                let exact = if shim_file.exact { ", exact" } else { "" };
                let policy = shim_file.policy.as_deref().unwrap_or("default");
                format!("{} under policy {policy}{}{exact}", shim_file.runtime, interpreters.chain(scratch).collect::<String>())
            }
            Err(error) => error.to_string(),
        };
        let gone = if program.is_file() { String::new() } else { format!("; {} is missing: install the shims again", program.display()) };
        writeln!(out, "{}  {what}{gone}", path.display())?;
    }
    if found.is_empty() {
        return Ok(ExitCode::from(NONE_FOUND));
    }
    print_text(&out)?;
    Ok(ExitCode::SUCCESS)
}

fn remove(directory: &Path) -> anyhow::Result<ExitCode> {
    let removed = stockade_engine::with_callers_rights(|| -> anyhow::Result<usize> {
        let found = found(directory)?;
        for (path, ..) in &found {
            fs::remove_file(path).with_context(|| format!("remove {}", path.display()))?;
        }
        if !found.is_empty() {
            // The directory too, if it is empty.
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
