//! The companion program `stockade-image`: what `stockade image` becomes.
//!
//! It alone links decompressors and the client of registries. It starts itself as the confined processes that read layers. As root it
//! changes root's store, else that of the user who runs it; `stockade` has checked that its caller may.
#![forbid(unsafe_code)]

use std::{
    ffi::OsString,
    fs::File,
    io::{self, BufReader, Write},
    os::{fd::AsFd, unix::process::CommandExt},
    process::{Command, ExitCode},
    str::FromStr,
    thread,
};

use nix::sys::signal::{SigSet, Signal, raise};
use rustix::{
    fs::{Mode, OFlags},
    process::{Pid, Resource, geteuid, getrlimit, setrlimit, umask},
};
use serde::Serialize;
use stockade_image::{
    arguments::{self, ImportTask, PullTask, Task},
    confine,
    decompress::{BUFFER, decompress},
    error::{Attempt, ImportError},
    import::{self, Imported},
    layer::{self, DECOMPRESS, UNPACK},
    pull::{self, Pull},
    show,
    source::{self, ArchiveFiles, Layout, Source},
    unpack::{Limits, Unpacker},
    writer::Writer,
};
use stockade_images::{Dropped, ImageError, Store, check_name, default_path};
use stockade_protocol::text::{escape_json, is_hidden, unambiguous, visible};
use stockade_registry::Reference;
use stockade_sys::process::ignores;

/// Exit status: it could not be done.
const FAILED: u8 = 125;
/// The first argument after a signal, which is the second.
const SWEEP: &str = "--sweep";
/// Exit status: it was not started by `stockade`.
const USAGE: u8 = 2;

fn main() -> ExitCode {
    let words: Vec<OsString> = std::env::args_os().skip(1).collect();
    match words.first().and_then(|word| word.to_str()) {
        Some(DECOMPRESS) => return worker_ended(run_decompressor(&words[1..])),
        Some(UNPACK) => return worker_ended(run_unpacker(&words[1..])),
        Some(SWEEP) => return worker_ended(sweep_and_end(&words[1..])),
        _ => {}
    }
    let Some((version, task)) = arguments::of(words.into_iter()) else {
        warn("only `stockade image` starts this program");
        return ExitCode::from(USAGE);
    };
    if version != env!("CARGO_PKG_VERSION") {
        warn("`stockade` has another version; install both from one package or one build");
        return ExitCode::from(USAGE);
    }
    ended(run(task).map_err(|error| error.to_string()))
}

fn ended(done: Result<(), String>) -> ExitCode {
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            warn(&why);
            ExitCode::from(FAILED)
        }
    }
}

/// What a confined process says on stderr is for the process that started it.
fn worker_ended(done: Result<(), String>) -> ExitCode {
    let Err(why) = done else { return ExitCode::SUCCESS };
    let _unheard = io::stderr().lock().write_all(why.as_bytes());
    ExitCode::from(FAILED)
}

/// Says something on stderr; hidden characters are escaped.
fn warn(text: &str) {
    let _unheard = writeln!(io::stderr().lock(), "stockade: {}", visible(text));
}

fn print(text: &str) -> Result<(), ImportError> {
    writeln!(io::stdout().lock(), "{text}").attempt("write to", "stdout")
}

/// As indented JSON; hidden characters are escaped, since a configuration can have any.
fn print_json(value: &impl Serialize) -> Result<(), ImportError> {
    let json = serde_json::to_string_pretty(value).map_err(io::Error::from).attempt("write to", "stdout")?;
    print(&escape_json(&json, is_hidden))
}

fn run(task: Task) -> Result<(), ImportError> {
    // The sandbox's first process has another uid than root, and reads the trees.
    umask(Mode::from_raw_mode(0o022));
    let owner = geteuid();
    let path = default_path(owner.is_root())?;
    let open = || Store::open(&path, owner.as_raw());
    match task {
        Task::Import(task) => import_image(&Writer::open(&path, owner.as_raw())?, &task),
        Task::Pull(task) => pull_image(&Writer::open(&path, owner.as_raw())?, task),
        Task::List { json } => {
            let images = match open() {
                Err(ImageError::NoStore { .. }) => Vec::new(),
                store => show::list(&store?)?,
            };
            if json { print_json(&images) } else { print(show::table(&images).trim_end()) }
        }
        Task::Inspect(image) => print_json(&show::inspect(&open()?, &image)?),
        Task::Verify(images) => verify(&Writer::of(open()?)?, &images),
        Task::Remove(images) => remove(&Writer::of(open()?)?, &images),
        Task::Collect => {
            let removed = Writer::of(open()?)?.gc()?;
            print(&format!("{removed} layers and merged trees removed"))
        }
    }
}

/// From now on a signal that would end this program executes it anew, to remove what its change has in
/// `tmp`. The exec ends its threads, so that nothing more is put into the store, and releases its locks;
/// the processes that unpack end by their death signal.
fn sweep_at_signals() -> Result<(), ImportError> {
    let ending: SigSet = [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP].into_iter().filter(|signal| !ignores(*signal as i32)).collect();
    ending.thread_block().map_err(io::Error::from).attempt("hold back", "signals")?;
    thread::spawn(move || {
        let Ok(signal) = ending.wait() else { return };
        let mut anew = Command::new("/proc/self/exe");
        // It returns only where the kernel refuses; then the next change removes what stays.
        let _refused = anew.arg0("stockade-image").args([SWEEP, signal.as_str()]).exec();
        end_by(signal);
    });
    Ok(())
}

fn sweep_and_end(words: &[OsString]) -> Result<(), String> {
    let signal: Signal = words.first().and_then(|word| word.to_str()?.parse().ok()).ok_or_else(malformed)?;
    let swept = || -> Result<(), ImportError> {
        let owner = geteuid();
        Writer::of(Store::open(&default_path(owner.is_root())?, owner.as_raw())?)?.sweep()
    };
    // The next change removes what stays.
    let _left = swept();
    end_by(signal);
    Ok(())
}

fn end_by(signal: Signal) {
    // Both fail only for a signal that does not exist.
    let _open = SigSet::all().thread_unblock();
    let _raised = raise(signal);
}

fn import_image(writer: &Writer, task: &ImportTask) -> Result<(), ImportError> {
    sweep_at_signals()?;
    raise_descriptors()?;
    let (file, is_directory) = source::open(&task.from)?;
    let source = if is_directory {
        Source::Layout(Layout::of(&task.from, file))
    } else {
        let staging = writer.stage()?;
        let make = || {
            let path = staging.path().join("archive");
            File::options().read(true).write(true).create_new(true).open(&path).attempt("make", path)
        };
        // It stays readable when its directory has gone.
        let expanded = layer::expand(&file, make, import::budget(task.max_size), writer.store.path())?;
        Source::Archive(ArchiveFiles::open(&task.from, expanded.unwrap_or(file))?)
    };
    let found = source.find(&task.platform, task.reference.as_deref())?;
    let origin = task.from.display().to_string();
    say(&import::import(writer, &found, &source, task.name.as_deref(), &origin, task.max_size)?)
}

fn pull_image(writer: &Writer, task: PullTask) -> Result<(), ImportError> {
    sweep_at_signals()?;
    raise_descriptors()?;
    let reference: Reference = task.reference.parse()?;
    let name = task.name.unwrap_or_else(|| pull::name_of(&task.reference, &reference));
    // Before anything is asked for.
    check_name(&name)?;
    let pull = Pull::resolve(reference, task.options)?;
    let found = source::find(&pull, &[pull.top()], &task.platform, None)?;
    say(&import::import(writer, &found, &pull, Some(&name), &pull.origin(), task.max_size)?)
}

/// A merged tree of many layers is made with a directory of each open, at each depth.
fn raise_descriptors() -> Result<(), ImportError> {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    setrlimit(Resource::Nofile, limit).attempt("raise the limit of", "open files")
}

fn say(imported: &Imported) -> Result<(), ImportError> {
    let record = &imported.record;
    if record.digest == record.config_digest {
        warn("the archive has no manifest, so the digest is that of the image's configuration");
    }
    if let Some(lost) = lost(imported.dropped) {
        warn(&format!("left out: {lost}"));
    }
    if imported.was_there {
        warn("the store has had this image before");
    }
    print(&unambiguous(&format!("{}@{}", imported.name, record.digest)))
}

fn lost(dropped: Dropped) -> Option<String> {
    let counts = [
        (dropped.set_id, "set-ID and sticky bits"),
        (dropped.devices, "devices"),
        (dropped.fifos, "fifos"),
        (dropped.xattrs, "extended attributes of files"),
        (dropped.owners, "owners other than root"),
    ];
    let lost: Vec<String> = counts.iter().filter(|(count, _)| *count > 0).map(|(count, what)| format!("{count} {what}")).collect();
    (!lost.is_empty()).then(|| lost.join(", "))
}

fn verify(writer: &Writer, images: &[String]) -> Result<(), ImportError> {
    let _held = writer.store.lock_shared()?;
    let records = if images.is_empty() {
        writer.store.list()?
    } else {
        images.iter().map(|image| writer.store.record(&writer.store.find(image)?.1)).collect::<Result<_, _>>()?
    };
    for record in records {
        import::verify(writer, &record)?;
        print(&format!("{} is as it was imported", record.digest))?;
    }
    Ok(())
}

fn remove(writer: &Writer, images: &[String]) -> Result<(), ImportError> {
    for image in images {
        match writer.remove(image)? {
            Some(digest) => print(&format!("removed {digest}"))?,
            None => print(&format!("removed the name {image}"))?,
        }
    }
    match writer.gc() {
        Err(ImportError::Held) => {
            warn(
                "layers stay, since a run, a sandbox that is prepared for one, an import or a pull holds images; `stockade image gc` removes them later",
            );
            Ok(())
        }
        done => done.map(drop),
    }
}

/// Arguments of a confined process, which this program itself has made.
fn malformed() -> String {
    "only this program itself starts it so".into()
}

fn number<T: FromStr>(word: &OsString) -> Result<T, String> {
    word.to_str().and_then(|word| word.parse().ok()).ok_or_else(malformed)
}

fn parent(word: &OsString) -> Result<Pid, String> {
    Pid::from_raw(number(word)?).ok_or_else(malformed)
}

/// Decompresses stdin to stdout.
fn run_decompressor(words: &[OsString]) -> Result<(), String> {
    let [cpu_seconds, parent_pid] = words else { return Err(malformed()) };
    confine::decompressor(parent(parent_pid)?, number(cpu_seconds)?).map_err(|error| ImportError::Confine(error).to_string())?;
    decompress(io::stdin().lock(), io::stdout().lock()).map_err(|error| error.to_string())
}

/// Unpacks stdin, and says on stdout what came of it.
fn run_unpacker(words: &[OsString]) -> Result<(), String> {
    let [store, tree, bytes, entries, below @ .., cpu_seconds, parent_pid] = words else { return Err(malformed()) };
    let limits = Limits { bytes: number(bytes)?, entries: number(entries)? };
    let below: Vec<String> = below.iter().map(|word| word.clone().into_string()).collect::<Result<_, _>>().map_err(|_| malformed())?;
    umask(Mode::from_raw_mode(0o022));
    let open = |path: &OsString| {
        let directory = rustix::fs::open(path, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty());
        directory.map_err(|errno| format!("open {}: {errno}", path.display()))
    };
    let store = open(store)?;
    let open_below = |path: &str| rustix::fs::openat(&store, path, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty());
    let tree = open_below(tree.to_str().ok_or_else(malformed)?)
        .and_then(|tree| rustix::fs::openat(tree, ".", OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty()))
        .map_err(|errno| format!("open the tree: {errno}"))?;
    let layers = || below.iter().map(|path| open_below(path)).collect();
    confine::unpacker(parent(parent_pid)?, number(cpu_seconds)?, store.as_fd(), tree.as_fd(), layers).map_err(|error| error.to_string())?;
    let input = BufReader::with_capacity(BUFFER, io::stdin().lock());
    let done = Unpacker::new(tree, store, below, limits).unpack(input).map_err(|error| error.to_string())?;
    let said = serde_json::to_vec(&done).map_err(|error| error.to_string())?;
    io::stdout().lock().write_all(&said).map_err(|error| error.to_string())
}
