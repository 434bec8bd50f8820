//! Making a template, and trying it before its first use.
//!
//! The run that makes it writes hostile bytes, as every run may: the header is checked and the file
//! sealed before anything is made of it. Then the same program runs in a fresh interpreter and in two
//! copies, each in a sandbox of its own, where all have the same pid. What it prints of its process,
//! of its start and of some computations must be the same in all three; random numbers, of every
//! generator that it knows, must differ between the copies. A generator that is not known is not
//! found here: `template.py` refuses compiled packages that were not tried.

use std::{collections::BTreeMap, fs::File, os::unix::fs::FileExt, path::PathBuf, sync::Arc, time::SystemTime};

use rustix::{
    fd::OwnedFd,
    fs::{MemfdFlags, SealFlags, fcntl_add_seals, fstat, memfd_create},
    io::Errno,
};
use stockade_launcher::{Outcome, Streams};
use stockade_policy::{model::Policy, plan::Plan};
use stockade_protocol::{
    LimitKey, Request, Verdict,
    memory_image::{self, HostFacts, MemoryImageError, VdsoParts},
    text::escape_line,
};

use super::{FileStamp, Made, Stage, TemplateRun, start_sha256};
use crate::{
    Admission, Ahead, LoadedPolicy, Options, Origin, Purpose, Refusal, RunResult, RunSpec,
    admit::{FileBytes, unique_stem},
    attempt,
    pool::{NotPrestarted, Pool},
};

/// What a template executes, and the library that it loads.
const TEMPLATE: &[u8] = include_bytes!("../../../image-dump/src/template.py");
static LIBRARY: &[u8] = include_bytes!(env!("STOCKADE_IMAGE_LIBRARY"));
/// The line before a template's facts.
const BEGIN: &[u8] = b"\nstockade: made from\n";
/// The one value that copies have in common.
const LAYOUT: &str = "layout";
/// What tries a copy.
const PROBE: &str = include_str!("probe.py");
/// Where these files are, below scratch.
const DIRECTORY: &str = ".stockade-template";
/// How a template begins to say why it is refused.
const REFUSED: &str = "stockade: template refused: ";
/// How long a run that tries a template may take, in milliseconds.
const TRIAL_MS: u64 = 60_000;
/// How much of each stream is kept of a run of a template's making, in bytes.
const KEPT_OUTPUT: u64 = 1 << 20;
/// Libraries that start threads by these when they are loaded; a template may have one thread.
const THREADS: [&str; 3] = ["OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"];

/// Why there is no template.
#[derive(Debug, thiserror::Error)]
pub enum NoTemplate {
    /// The policy names none.
    #[error("the policy names no template for `{0}`")]
    Unnamed(String),
    /// No interpreter may start ahead of its request.
    #[error("{0}")]
    Unfit(String),
    /// A run of its making was not started.
    #[error("{}", .0.message)]
    NotStarted(Box<Refusal>),
    /// The template itself refuses to be one.
    #[error("{0}")]
    Refused(String),
    /// A run of its making ended in another way than it should.
    #[error("{what} ended as {verdict:?} with status {code}{}", if .said.is_empty() { String::new() } else { format!(": {said}") })]
    Ended {
        /// Which run.
        what: &'static str,
        /// How it ended.
        verdict: Verdict,
        /// Its status.
        code: i32,
        /// The last that it said on stderr.
        said: String,
    },
    /// Part of what a run of its making printed was not kept.
    #[error("{0} printed more than the policy's output_size keeps")]
    CutOut(&'static str),
    /// What it was made from is not known.
    #[error("it does not say what it was made from")]
    NoFacts,
    /// A file that it was made from is another one by now, or is none of the host's.
    #[error("{} was changed while it was made, or cannot be found", .0.display())]
    Changed(PathBuf),
    /// The image is not one.
    #[error("its image: {0}")]
    Image(#[from] MemoryImageError),
    /// A file of this host could not be had.
    #[error("{what}: {errno}")]
    File {
        /// What for.
        what: &'static str,
        /// Why not.
        errno: Errno,
    },
    /// A copy is not what a fresh start is.
    #[error("a copy differs from a fresh start: {fresh:?} is {copy:?}")]
    Differs {
        /// What a fresh start printed.
        fresh: String,
        /// What a copy printed.
        copy: String,
    },
    /// Two copies drew the same random value.
    #[error("two copies draw the same random values: {0}")]
    Repeats(String),
    /// Nothing shows that two copies draw different random values.
    #[error("two copies did not say which random values they draw")]
    NothingDrawn,
    /// Another process was to make it, and did not.
    #[error("the process that makes it ended: {0}")]
    Maker(String),
}

impl NoTemplate {
    /// Whether another try may succeed: a file was exchanged meanwhile, or a busy host gave a run
    /// too little time or memory.
    pub fn may_pass(&self) -> bool {
        const OF_HOST: [Verdict; 3] = [Verdict::WallTimeout, Verdict::OutOfMemory, Verdict::Signaled];
        match self {
            NoTemplate::Changed(_) => true,
            NoTemplate::Ended { verdict, .. } => OF_HOST.contains(verdict),
            _ => false,
        }
    }
}

pub(super) fn file_failed(what: &'static str) -> impl Fn(Errno) -> NoTemplate {
    move |errno| NoTemplate::File { what, errno }
}

/// A file for an image, still empty.
///
/// # Errors
/// There is no memory for it.
pub fn empty_image() -> Result<OwnedFd, NoTemplate> {
    memfd_create(c"stockade-image", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).map_err(file_failed("make a file for the image"))
}

impl TemplateRun<'_> {
    /// The files that it writes to scratch before it starts.
    pub(crate) fn files(&self) -> Vec<(String, FileBytes<'static>)> {
        let Stage::Make(template, _) = self.stage else { return Vec::new() };
        let place = |name: &str| format!("{DIRECTORY}/{name}");
        let warm = template.warm.clone().unwrap_or_default().into_bytes();
        vec![(place("sitecustomize.py"), source()), (place("image.so"), LIBRARY.into()), (place("warm.py"), warm.into())]
    }

    /// Its limits, where they are not those of any run, as far as the policy lets a request ask for them.
    /// What tries a template has time on a busy host too: it ends by itself. What a run prints is read
    /// whole, however little of it a model would read.
    pub(crate) fn limits(&self, policy: &Policy) -> BTreeMap<LimitKey, Option<u64>> {
        let least = [(LimitKey::Wall, TRIAL_MS), (LimitKey::OutputSize, KEPT_OUTPUT)];
        let own = least.into_iter().filter(|(key, _)| *key != LimitKey::Wall || !matches!(self.stage, Stage::Make(..)));
        let limit = |(key, least): (LimitKey, u64)| {
            let most = policy.limits_max.get(key).unwrap_or(u64::MAX);
            policy.limits.get(key).map(|value| (key, Some(value.max(least.min(most)))))
        };
        own.filter_map(limit).collect()
    }

    /// Makes a request's plan that of this run. A template finds no program, and these variables.
    pub(crate) fn adjust(&self, plan: &mut Plan) {
        let Stage::Make(template, _) = self.stage else { return };
        plan.program_file = None;
        let place = plan.scratch.path.join(DIRECTORY);
        let below = |name: &str| place.join(name).to_string_lossy().into_owned();
        let own = [
            ("PYTHONPATH", place.to_string_lossy().into_owned()),
            ("STOCKADE_TEMPLATE_FD", memory_image::DESCRIPTOR.to_string()),
            ("STOCKADE_TEMPLATE_LIBRARY", below("image.so")),
            ("STOCKADE_TEMPLATE_IMPORTS", template.imports.join(",")),
            ("STOCKADE_TEMPLATE_WARM", below("warm.py")),
        ];
        let single = THREADS.map(|name| (name, String::from("1")));
        for (name, value) in own.into_iter().chain(single) {
            plan.environment.retain(|other| other != name);
            plan.environment.push(String::from(name));
            plan.environment_values.retain(|variable| variable.split('=').next() != Some(name));
            plan.environment_values.push(format!("{name}={value}"));
        }
    }
}

/// The template's source; a build for tests can leave out that copies seed their generators anew.
fn source() -> FileBytes<'static> {
    #[cfg(feature = "ablation")]
    if stockade_launcher::is_left_out(stockade_protocol::layer::Layer::Reseeding) {
        let source = String::from_utf8_lossy(TEMPLATE);
        return source.replace("            reseeding.reseed()\n", "").into_bytes().into();
    }
    TEMPLATE.into()
}

/// The plan by which copies of a runtime's template are started. Nothing is started here.
///
/// # Errors
/// Such a run would be refused, or no interpreter may start ahead of its request.
pub(super) fn plan_of_copies(runtime: &str, stem: &str, loaded: &LoadedPolicy, options: &Options) -> Result<Plan, NoTemplate> {
    let request = request_of(runtime);
    let run = TemplateRun { request: &request, stem, stage: Stage::Fresh };
    let admitted = Admission::admit(Origin::Template(&run), loaded, options, Purpose::Plan, None, Pool::default());
    let plan = admitted.map_err(|refusal| NoTemplate::NotStarted(Box::new(refusal)))?.plan;
    match NotPrestarted::of(&plan, &loaded.policy, None) {
        Some(cause) => Err(NoTemplate::Unfit(cause.to_string())),
        None => Ok(plan),
    }
}

fn request_of(runtime: &str) -> Request {
    Request { language: Some(runtime.to_owned()), code: PROBE.to_owned().into(), ..Request::default() }
}

/// Makes the template of a runtime in `image`, an empty file, and tries it. `stem`: what the names of
/// its copies' programs begin with.
///
/// # Errors
/// It is refused; nothing is left behind.
pub fn make(runtime: &str, stem: &str, image: OwnedFd, loaded: &LoadedPolicy, options: &Options) -> Result<Made, NoTemplate> {
    let trial = Trial::new(runtime, stem, image, loaded, options)?;
    let RandomValues { repeated, different, share_layout } = trial.random_values();
    match (repeated.as_slice(), share_layout && !different.is_empty()) {
        ([], true) => Ok(trial.made),
        ([], false) => Err(NoTemplate::NothingDrawn),
        (repeated, _) => Err(NoTemplate::Repeats(repeated.join(", "))),
    }
}

/// The same to see that it works: nothing of it is kept. Returns the bytes of the image.
///
/// # Errors
/// It is refused.
pub fn make_once(runtime: &str, loaded: &LoadedPolicy, options: &Options) -> Result<u64, NoTemplate> {
    let stem = unique_stem().map_err(|refusal| NoTemplate::NotStarted(Box::new(refusal)))?;
    make(runtime, &stem, empty_image()?, loaded, options).map(|made| made.size)
}

/// What two copies of a template drew, each in a sandbox of its own.
pub struct Trial {
    made: Made,
    drawn: [Vec<u8>; 2],
}

/// The names of random values, by what came of them.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct RandomValues {
    /// Both copies drew the same.
    pub repeated: Vec<String>,
    /// They drew different ones.
    pub different: Vec<String>,
    /// Whether both say that they have the same memory layout: this can be told at all.
    pub share_layout: bool,
}

impl Trial {
    /// Makes a template and runs copies, which are compared with a fresh start.
    ///
    /// # Errors
    /// It is refused for another reason than random values.
    pub fn new(runtime: &str, stem: &str, image: OwnedFd, loaded: &LoadedPolicy, options: &Options) -> Result<Self, NoTemplate> {
        let (_, template) = loaded.policy.template_of(runtime).ok_or_else(|| NoTemplate::Unnamed(runtime.to_owned()))?;
        let plan = plan_of_copies(runtime, stem, loaded, options)?;
        let image = Arc::new(image);
        let request = request_of(runtime);
        let run = |what, stage| {
            let run = TemplateRun { request: &request, stem, stage };
            let spec = RunSpec { origin: Origin::Template(&run), loaded, options, recorder: None, pass: None, step: None };
            let ran =
                attempt(spec, Streams::Capture, None, Ahead::default()).map_err(|refusal| NoTemplate::NotStarted(Box::new(refusal)))?;
            let RunResult { outcome, .. } = ran;
            ended_well(what, outcome)
        };
        let begun = SystemTime::now();
        let (facts, _) = run("the template", Stage::Make(template, Arc::clone(&image)))?;
        let size = seal_and_check(&image)?;
        let made = what_it_depends_on(&facts, &plan, size, begun)?;
        let (fresh, _) = run("a fresh start", Stage::Fresh)?;
        let (first, one) = run("a copy", Stage::Copy(Arc::clone(&image)))?;
        let (second, other) = run("a copy", Stage::Copy(image))?;
        compare(&fresh, &first)?;
        compare(&fresh, &second)?;
        Ok(Trial { made, drawn: [one, other] })
    }

    /// What the copies drew.
    pub fn random_values(&self) -> RandomValues {
        let [one, other] = &self.drawn;
        compare_values(one, other)
    }
}

/// What a run printed that ended as it should.
fn ended_well(what: &'static str, outcome: Outcome) -> Result<(Vec<u8>, Vec<u8>), NoTemplate> {
    let Outcome { verdict, code, output, error, message, .. } = outcome;
    if verdict == Verdict::Exited && code == 0 {
        // What was cut out may be a module that it has imported, or a random value.
        return if output.truncated || error.truncated { Err(NoTemplate::CutOut(what)) } else { Ok((output.bytes, error.bytes)) };
    }
    let stderr = String::from_utf8_lossy(&error.bytes);
    let last = stderr.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or_default();
    if let Some(why) = last.strip_prefix(REFUSED) {
        return Err(NoTemplate::Refused(escape_line(why, |letter| letter.is_control())));
    }
    let said = message.unwrap_or_else(|| escape_line(last, |letter| letter.is_control()));
    Err(NoTemplate::Ended { what, verdict, code, said })
}

/// Seals the image, so that nothing can change what is checked, and checks its header. Returns its
/// length.
fn seal_and_check(image: &OwnedFd) -> Result<u64, NoTemplate> {
    let seals = SealFlags::WRITE | SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL;
    fcntl_add_seals(image, seals).map_err(file_failed("seal the image"))?;
    let length = fstat(image).map_err(file_failed("look at the image"))?.st_size.cast_unsigned();
    let mut header = vec![0; memory_image::HEADER_LENGTH];
    let file = File::from(rustix::io::fcntl_dupfd_cloexec(image, 0).map_err(file_failed("read the image"))?);
    if file.read_exact_at(&mut header, 0).is_err() {
        return Err(MemoryImageError::Truncated.into());
    }
    let maps = std::fs::read("/proc/self/maps").map_err(|error| file_failed("read /proc/self/maps")(errno_of(&error)))?;
    let vdso = VdsoParts::from_maps(&maps).unwrap_or_default();
    memory_image::check(&header, length, &HostFacts { vdso })?;
    Ok(length)
}

pub(super) fn errno_of(error: &std::io::Error) -> Errno {
    Errno::from_io_error(error).unwrap_or(Errno::IO)
}

/// Compares what a copy printed with a fresh start, line by line.
fn compare(fresh: &[u8], copy: &[u8]) -> Result<(), NoTemplate> {
    if fresh == copy {
        return Ok(());
    }
    let (fresh, copy) = (String::from_utf8_lossy(fresh), String::from_utf8_lossy(copy));
    let (mut fresh, mut copy) = (fresh.lines(), copy.lines());
    loop {
        let (one, other) = (fresh.next(), copy.next());
        if one != other || one.is_none() {
            let text = |line: Option<&str>| line.unwrap_or("nothing").to_owned();
            return Err(NoTemplate::Differs { fresh: text(one), copy: text(other) });
        }
    }
}

/// Compares the values that two copies drew, by name. One that the second has not is no different one.
fn compare_values(one: &[u8], other: &[u8]) -> RandomValues {
    let values = |bytes: &[u8]| -> BTreeMap<String, String> {
        let text = String::from_utf8_lossy(bytes).into_owned();
        text.lines().filter_map(|line| line.split_once(' ')).map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
    };
    let (mut one, other) = (values(one), values(other));
    let layout = one.remove(LAYOUT);
    let (different, repeated): (Vec<_>, Vec<_>) =
        one.into_iter().partition(|(name, value)| other.get(name).is_some_and(|drawn| drawn != value));
    let names = |all: Vec<(String, String)>| all.into_iter().map(|(name, _)| name).collect();
    RandomValues {
        repeated: names(repeated),
        different: names(different),
        share_layout: layout.is_some() && layout.as_ref() == other.get(LAYOUT),
    }
}

/// Reads what a template says of what it was made from: the lines behind the last that its own modules
/// have printed. Its own files, which were in scratch, are left out.
///
/// A path that it names need not be one that its sandbox shows, and is looked up here by the launcher's
/// user. So it must say of each file what only those know who see it: what is at any other path, or
/// whether there is something, does not show in the answer.
fn what_it_depends_on(facts: &[u8], plan: &Plan, size: u64, begun: SystemTime) -> Result<Made, NoTemplate> {
    let lines = facts.strip_suffix(b"\nend\n").ok_or(NoTemplate::NoFacts)?;
    let begin = lines.windows(BEGIN.len()).rposition(|part| part == BEGIN).ok_or(NoTemplate::NoFacts)?;
    let lines = || lines.get(begin + BEGIN.len()..).unwrap_or_default().split(|&byte| byte == b'\n');
    let modules = lines().filter_map(|line| line.strip_prefix(b"module ")).map(|name| String::from_utf8_lossy(name).into_owned());
    let named = lines().filter_map(|line| line.strip_prefix(b"file ")).map(|line| FileStamp::read(line).ok_or(NoTemplate::NoFacts));
    // The interpreter, as the policy names it: a link may come to lead to another.
    let interpreter = plan.argv.first().map(|path| Ok((None, PathBuf::from(path))));
    let mut files = BTreeMap::new();
    for file in interpreter.into_iter().chain(named.map(|file| file.map(|(said, path)| (Some(said), path)))) {
        let (said, path) = file?;
        if path.starts_with(&plan.scratch.path) {
            continue;
        }
        match FileStamp::of(&path) {
            Some(stamp) if stamp.is_older_than(begun) && said.is_none_or(|said| said == stamp) => files.insert(path, stamp),
            _ => return Err(NoTemplate::Changed(path)),
        };
    }
    Ok(Made { modules: modules.collect(), files, size, start_sha256: start_sha256(plan) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_copy_prints_is_compared_line_by_line() {
        assert!(compare(b"a\nb\n", b"a\nb\n").is_ok());
        for copy in [&b"a\nc\n"[..], b"a\n", b"a\nb\nc\n", b""] {
            assert!(matches!(compare(b"a\nb\n", copy), Err(NoTemplate::Differs { .. })), "{copy:?}");
        }
    }

    #[test]
    fn another_try_may_succeed_where_the_host_was_to_blame() {
        let ended = |verdict| NoTemplate::Ended { what: "a copy", verdict, code: 137, said: String::new() };
        assert!(NoTemplate::Changed(PathBuf::from("/usr/bin/python3")).may_pass());
        assert!([Verdict::WallTimeout, Verdict::OutOfMemory].map(ended).iter().all(NoTemplate::may_pass));
        assert!(![Verdict::Exited, Verdict::SyscallDenied].map(ended).iter().any(NoTemplate::may_pass));
        assert!(!NoTemplate::Refused(String::from("2 threads")).may_pass());
    }

    #[test]
    fn a_line_of_a_file_has_five_numbers_and_its_path() {
        let stamp = FileStamp { device: 1, inode: 2, size: 3, changed: (4, 5) };
        assert_eq!(FileStamp::read(b"1 2 3 4 5 /a b"), Some((stamp, PathBuf::from("/a b"))));
        for line in [&b""[..], b"/a b", b"1 2 3 4 5", b"1 2 3 4 five /a", b"1 2 3 4 /a"] {
            assert_eq!(FileStamp::read(line), None, "{line:?}");
        }
    }

    #[test]
    fn every_random_value_must_differ() {
        for (one, other, repeated, share_layout) in [
            (&b"layout 7\na 1\nb 2\n"[..], &b"layout 7\na 3\nb 4\n"[..], vec![], true),
            (b"layout 7\na 1\nb 2\n", b"layout 8\na 3\nb 2\n", vec![String::from("b")], false),
            (b"a 1\n", b"", vec![String::from("a")], false),
        ] {
            let values = compare_values(one, other);
            assert_eq!((values.repeated, values.share_layout), (repeated, share_layout), "{one:?}");
        }
    }
}
