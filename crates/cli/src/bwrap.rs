//! `stockade bwrap`, which callers start as `stockade-bwrap`: bubblewrap's command line in front of a
//! sandbox of the policy `bwrap`.
//!
//! What the caller's options ask for becomes a view, which the plan checks against the policy. The exit
//! status is bubblewrap's: the command's, 128+N for a signal, and 1 where nothing was started. Only the
//! descriptors that the options name are read or written, and none enters the sandbox.

use std::{
    ffi::OsString,
    fs::File,
    io::{ErrorKind, Read, Write},
    os::unix::fs::FileTypeExt,
    path::{Path, PathBuf},
    sync::Arc,
};

use anyhow::{Context, anyhow, bail};
use stockade_bwrap::{Invocation, Operation, Parsed, parse};
use stockade_engine::{
    Asked, Client, Options, Origin, RunSettings,
    caller::waiting,
    is_interactive,
    plan::{MAX_INSTRUCTIONS, View, ViewEntry},
    run_for, with_callers_rights,
};

use crate::{
    ExitCode, args, help,
    output::{print_text, warn},
    run::{ended_command, explain},
};

/// The name under which callers start it (`scripts/stockade-bwrap`).
const NAME: &str = "stockade-bwrap";
/// The policy that says what callers may show; a host changes it by a file of that name.
const POLICY: &str = "bwrap";
/// bubblewrap's status for whatever keeps the command from starting.
const NOT_STARTED: u8 = 1;
/// What all descriptors together may hold that are read for one command.
const MAX_CONTENTS: usize = 64 << 20;
/// The bytes of an instruction of a filter.
const INSTRUCTION: usize = 8;

pub(crate) fn run(bwrap: &args::Bwrap) -> anyhow::Result<ExitCode> {
    started(&bwrap.words).or_else(|error| {
        warn(&format!("{NAME}: {error:#}"));
        Ok(ExitCode::from(NOT_STARTED))
    })
}

fn started(words: &[OsString]) -> anyhow::Result<ExitCode> {
    let words: Result<Vec<String>, OsString> = words.iter().cloned().map(OsString::into_string).collect();
    let words = words.map_err(|word| anyhow!("{} is not UTF-8", word.display()))?;
    let mut left = MAX_CONTENTS;
    let mut words_of = |fd| words_of(fd, &mut left).map_err(|error| format!("{error:#}"));
    let invocation = match parse(words, &mut words_of)? {
        Parsed::Help => return help::show(&[String::from("bwrap")]),
        Parsed::Version => {
            // A caller that looks at the version uses no option of a later one then, of which `--argv0` and
            // `--level-prefix` are refused.
            return print_text(concat!("bubblewrap 0.8.0 (stockade ", env!("CARGO_PKG_VERSION"), ")")).map(|()| ExitCode::SUCCESS);
        }
        Parsed::Run(invocation) => *invocation,
    };
    let view = view(&invocation, left)?;
    let status = invocation.status.map(descriptor).transpose()?;
    let mut readers =
        StatusReaders { info: invocation.info.map(descriptor).transpose()?, status: status.as_ref().map(File::try_clone).transpose()? };
    if let Some(fd) = invocation.block {
        let mut byte = [0];
        // Its end lets the command start as well.
        let _any = descriptor(fd)?.read(&mut byte).with_context(|| format!("--block-fd {fd}"))?;
    }
    let ends_with = if invocation.ends_with_parent { waiting().into() } else { Arc::default() };
    let options = Options { policy: Some(POLICY.to_owned()), ends_with, ..Options::default() };
    let origin =
        Origin::Command { command: &invocation.command, settings: RunSettings::NONE, terminal: is_interactive(), view: Some(&view) };
    let result = match run_for(origin, &options, false, Some(&mut readers)) {
        Ok(result) => result,
        Err(refusal) => bail!("{refusal}"),
    };
    let code = result.code;
    let (report, exit) = ended_command(result);
    explain(&report);
    if let Some(mut status) = status {
        // The reader may have gone: the command's status is still this program's.
        let _gone = status.write_all(format!("{{ \"exit-code\": {code} }}\n").as_bytes());
    }
    Ok(exit)
}

/// What the options ask for, with the contents of the descriptors that they name.
/// `left`: the bytes that they may still hold.
fn view(invocation: &Invocation, mut left: usize) -> anyhow::Result<View> {
    let mut entries = Vec::new();
    for operation in &invocation.operations {
        entries.extend(entry(operation, &mut left)?);
    }
    let filters =
        invocation.filters.iter().map(|fd| filter(*fd, &mut left).with_context(|| format!("--seccomp {fd}"))).collect::<Result<_, _>>()?;
    let working_directories = match &invocation.directory {
        Some(directory) => vec![PathBuf::from(directory)],
        // As bubblewrap: the caller's own where it is shown, else home, else the root.
        None => {
            let home = invocation.environment.iter().rev().find(|(name, _)| name == "HOME").and_then(|(_, value)| value.as_deref());
            let own = std::env::current_dir().ok();
            own.into_iter().chain(home.map(PathBuf::from)).chain([PathBuf::from("/")]).collect()
        }
    };
    if let Some(relative) = working_directories.iter().find(|directory| !directory.is_absolute()) {
        bail!("--chdir {}: name an absolute path", relative.display());
    }
    Ok(View {
        entries,
        working_directories,
        ids: (invocation.uid, invocation.gid),
        hostname: invocation.hostname.clone(),
        clears_environment: invocation.clears_environment,
        environment: invocation.environment.clone(),
        filters,
    })
}

fn entry(operation: &Operation, left: &mut usize) -> anyhow::Result<Option<ViewEntry>> {
    let path = |text: &String| -> anyhow::Result<PathBuf> {
        let whole = std::path::absolute(text).with_context(|| format!("find out where {text:?} is"))?;
        // It keeps a `//` at the beginning.
        Ok(whole.components().collect())
    };
    let inside = |text: &String| -> PathBuf { Path::new("/").join(text).components().collect() };
    Ok(Some(match operation {
        Operation::ReadOnly { source, target, optional } => {
            ViewEntry::Show { source: path(source)?, target: inside(target), optional: *optional }
        }
        Operation::Writable { source, target, optional } => {
            let (source, target) = (path(source)?, inside(target));
            match with_callers_rights(|| std::fs::symlink_metadata(&source))? {
                // Another error is told where it is opened.
                Err(error) if *optional && error.kind() == ErrorKind::NotFound => return Ok(None),
                Ok(found) if found.file_type().is_socket() => ViewEntry::Socket { source, target },
                _ => ViewEntry::Tree { source, target },
            }
        }
        Operation::Overlay { layers, target, writable } => {
            ViewEntry::Overlay { layers: layers.iter().map(path).collect::<Result<_, _>>()?, target: inside(target), writable: *writable }
        }
        Operation::Mode { target, mode } => ViewEntry::Mode { target: inside(target), mode: *mode },
        // It is one already, as the rest of `/dev` is the sandbox's.
        Operation::Tmpfs { target, .. } if inside(target) == Path::new("/dev/shm") => return Ok(None),
        Operation::Tmpfs { target, mode } => ViewEntry::Tmpfs { target: inside(target), mode: *mode },
        Operation::Directory { target, mode } => ViewEntry::Directory { target: inside(target), mode: *mode },
        Operation::Link { to, target } => ViewEntry::Link { target: inside(target), to: PathBuf::from(to) },
        Operation::File { fd, target, mode } => ViewEntry::File { target: inside(target), mode: *mode, bytes: contents(*fd, left)? },
        Operation::Data { fd, target, mode, writable } => {
            ViewEntry::Data { target: inside(target), mode: *mode, bytes: contents(*fd, left)?, writable: *writable }
        }
    }))
}

/// A copy of a descriptor that this process was started with.
fn descriptor(fd: i32) -> anyhow::Result<File> {
    let copy = stockade_sys::descriptors::copy_inherited(fd.unsigned_abs()).with_context(|| format!("descriptor {fd} is not open"))?;
    Ok(File::from(copy))
}

/// All that a descriptor has from where it stands, at most what is left.
fn contents(fd: i32, left: &mut usize) -> anyhow::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    descriptor(fd)?.take(*left as u64 + 1).read_to_end(&mut bytes).with_context(|| format!("read descriptor {fd}"))?;
    *left = left.checked_sub(bytes.len()).with_context(|| {
        format!("with descriptor {fd} the options' descriptors hold more than {} MiB; show large files by --ro-bind", MAX_CONTENTS >> 20)
    })?;
    Ok(bytes)
}

/// Words with a NUL behind each.
fn words_of(fd: i32, left: &mut usize) -> anyhow::Result<Vec<String>> {
    let text = String::from_utf8(contents(fd, left)?).context("it is not UTF-8")?;
    let Some(text) = text.strip_suffix('\0') else {
        return if text.is_empty() { Ok(Vec::new()) } else { Err(anyhow!("its last word has no NUL behind it")) };
    };
    Ok(text.split('\0').map(str::to_owned).collect())
}

/// A filter of system calls as the kernel has it: `struct sock_filter` after `struct sock_filter`. Whether it is
/// a valid program the kernel says.
fn filter(fd: i32, left: &mut usize) -> anyhow::Result<Vec<u64>> {
    let bytes = contents(fd, left)?;
    let (instructions, rest) = bytes.as_chunks::<INSTRUCTION>();
    if instructions.is_empty() || !rest.is_empty() || instructions.len() > MAX_INSTRUCTIONS {
        bail!("{} bytes are no filter: it has 1 to {MAX_INSTRUCTIONS} instructions of {INSTRUCTION} bytes", bytes.len());
    }
    Ok(instructions.iter().map(|instruction| u64::from_ne_bytes(*instruction)).collect())
}

/// What `--info-fd` and `--json-status-fd` get at the start.
struct StatusReaders {
    info: Option<File>,
    status: Option<File>,
}

impl Client for StatusReaders {
    fn requests(&self) -> Option<std::os::fd::BorrowedFd<'_>> {
        None
    }

    fn results(&self) -> Option<std::os::fd::BorrowedFd<'_>> {
        None
    }

    fn look(&mut self) -> Asked {
        Asked::NothingMore
    }

    fn signalled(&mut self, _: i32) {}

    fn begins(&mut self, pid: i32) {
        // A reader that has gone keeps no command from running.
        if let Some(mut info) = self.info.take() {
            let _gone = info.write_all(format!("{{\n    \"child-pid\": {pid}\n}}\n").as_bytes());
        }
        if let Some(mut status) = self.status.take() {
            let _gone = status.write_all(format!("{{ \"child-pid\": {pid} }}\n").as_bytes());
        }
    }
}
