//! Templates: interpreters that have started once, and of whose memory runs get a private copy.
//!
//! A template is an ordinary run of the policy with a program of Stockade's own
//! (`image-dump/src/template.py`): it imports what the policy names, and writes its memory to a
//! file. In another run the restorer turns the payload's process into a copy of that interpreter. That
//! run has a sandbox of its own, as every run has. [`make()`] makes and tries a template, [`Maker`] is
//! another process that does so, `Templates` keeps those of a session, and `LeasedTemplates` those that
//! a service's worker was given. No code of a request runs in a template, and no copy runs two programs.
//!
//! All copies of one image have its memory layout, seed of `hash` and stack canary. What else must
//! differ between two runs is compared before the first (`make.rs`).

mod leased;
mod make;
mod maker;

use std::{
    cell::Cell,
    collections::{BTreeMap, BTreeSet},
    ffi::OsStr,
    fs,
    os::unix::{ffi::OsStrExt, fs::MetadataExt},
    path::{Path, PathBuf},
    rc::Rc,
    sync::Arc,
    time::{Duration, Instant, SystemTime},
};

use rustix::{
    fd::OwnedFd,
    fs::{SealFlags, fcntl_get_seals},
};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use stockade_launcher::Memory;
use stockade_policy::{model, plan::Plan};
use stockade_protocol::{Request, text::hex};

pub use crate::admit::unique_stem;
use crate::{LoadedPolicy, Options, admit::Parts, pool::NotPrestarted};
pub use leased::Lease;
pub(crate) use leased::LeasedTemplates;
use make::plan_of_copies;
pub use make::{NoTemplate, RandomValues, Trial, empty_image, make, make_once};
pub use maker::{Answer, Maker, Progress};

/// One run of a template's life: the one that makes it, or one that tries it.
pub struct TemplateRun<'a> {
    /// Its language and code.
    pub(crate) request: &'a Request,
    /// What the name of its program's file begins with.
    pub(crate) stem: &'a str,
    pub(crate) stage: Stage<'a>,
}

/// What a run of a template's life is for.
#[derive(Clone)]
pub(crate) enum Stage<'a> {
    /// It makes the template, and writes the image to this file.
    Make(&'a model::Template, Arc<OwnedFd>),
    /// It starts as any run.
    Fresh,
    /// It is a copy from this image.
    Copy(Arc<OwnedFd>),
}

impl TemplateRun<'_> {
    /// What it does with the image.
    pub(crate) fn memory(&self) -> Option<Memory> {
        match &self.stage {
            Stage::Make(_, image) => Some(Memory::ToWrite(Arc::clone(image))),
            Stage::Fresh => None,
            Stage::Copy(image) => Some(Memory::ToRestore(Arc::clone(image))),
        }
    }
}

/// How many makers in a row may make none, where the host may be to blame, before the template is
/// refused.
const MAX_BROKEN: u32 = 3;

/// Modules that read a file of the working directory when they are imported.
const READ_AT_IMPORT: [(&str, &str); 1] = [("matplotlib", "matplotlibrc")];

/// What tells that a file is another one than it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct FileStamp {
    device: u64,
    inode: u64,
    size: u64,
    changed: (i64, i64),
}

impl FileStamp {
    /// Whether the file was changed for the last time before this.
    fn is_older_than(&self, time: SystemTime) -> bool {
        let (seconds, nanoseconds) = self.changed;
        let since = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        (seconds, nanoseconds) < (i64::try_from(since.as_secs()).unwrap_or(i64::MAX), i64::from(since.subsec_nanos()))
    }

    /// That which a template says of a file, and the file's path.
    fn read(line: &[u8]) -> Option<(Self, PathBuf)> {
        let mut words = line.splitn(6, |&byte| byte == b' ');
        let [device, inode, size, seconds, nanoseconds] = [(); 5].map(|()| std::str::from_utf8(words.next()?).ok());
        let changed = (seconds?.parse().ok()?, nanoseconds?.parse().ok()?);
        let stamp = FileStamp { device: device?.parse().ok()?, inode: inode?.parse().ok()?, size: size?.parse().ok()?, changed };
        Some((stamp, PathBuf::from(OsStr::from_bytes(words.next()?))))
    }

    /// None where there is none.
    fn of(path: &Path) -> Option<Self> {
        let found = fs::metadata(path).ok()?;
        Some(FileStamp { device: found.dev(), inode: found.ino(), size: found.size(), changed: (found.ctime(), found.ctime_nsec()) })
    }
}

/// What is known of a template that was made and tried.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Made {
    /// The modules that a copy has from its beginning, without what is below them.
    modules: BTreeSet<String>,
    /// The interpreter, its libraries, and the first file of each module.
    files: BTreeMap<PathBuf, FileStamp>,
    /// Bytes of the image.
    pub size: u64,
    /// SHA-256 over the policy and the start of the copies that were tried.
    start_sha256: String,
}

/// An image that is complete, with what is known of it.
#[derive(Clone, Debug)]
pub struct TemplateImage {
    /// Its file, sealed.
    pub file: Arc<OwnedFd>,
    /// What is known of it.
    pub made: Made,
}

impl TemplateImage {
    /// Whether nothing can change it any more.
    fn is_sealed(&self) -> bool {
        fcntl_get_seals(&self.file).is_ok_and(|seals| seals.contains(SealFlags::WRITE | SealFlags::GROW | SealFlags::SHRINK))
    }

    /// Whether copies of it may be started by this plan.
    fn is_for(&self, plan: &Plan) -> bool {
        self.made.start_sha256 == start_sha256(plan) && self.is_sealed()
    }
}

/// SHA-256 over the policy and what a process of this plan starts with.
fn start_sha256(plan: &Plan) -> String {
    let limits: Vec<(u32, Option<u64>)> = plan.rlimits.iter().map(|limit| (limit.resource, limit.value)).collect();
    let start = (&plan.policy_sha256, &plan.argv, &plan.environment_values, &plan.program_file, limits);
    let bytes = serde_json::to_vec(&start).unwrap_or_default();
    hex(&Sha256::digest(bytes))
}

/// A template whose copies may run programs.
pub(crate) struct Template {
    image: TemplateImage,
    stem: Option<String>,
    /// How a copy is started.
    plan: Rc<Plan>,
    since: Instant,
    max_age: Duration,
    /// Copies that may still be made.
    runs_left: Cell<u64>,
}

impl Template {
    /// What the file name of a copy's program begins with; none: as any program's in a scratch of its
    /// own.
    pub(crate) fn stem(&self) -> Option<&str> {
        self.stem.as_deref()
    }

    /// The image, for a run of this plan, which is then one of its runs.
    ///
    /// # Errors
    /// A copy would not be what a fresh start is.
    pub(crate) fn copy(&self, plan: &Plan, parts: &Parts<'_>) -> Result<Memory, NotPrestarted> {
        if !plan.starts_like_before_arguments(&self.plan) {
            return Err(NotPrestarted::AnotherThanCopies);
        }
        if plan.policy_sha256 != self.plan.policy_sha256 {
            return Err(NotPrestarted::OtherPolicy);
        }
        if parts.files.iter().any(|(path, _)| self.is_shadowed_by(Path::new(path))) {
            return Err(NotPrestarted::Shadowed);
        }
        if !self.is_current() {
            return Err(NotPrestarted::Outdated);
        }
        let left = self.runs_left.get().checked_sub(1).ok_or(NotPrestarted::UsedUp)?;
        self.runs_left.set(left);
        Ok(Memory::ToRestore(Arc::clone(&self.image.file)))
    }

    /// Whether a program would import what lies at this place of scratch, and not the module of that
    /// name that a copy has.
    pub(crate) fn is_shadowed_by(&self, path: &Path) -> bool {
        let Some(first) = path.components().next() else { return false };
        let name = first.as_os_str().to_string_lossy();
        let read = READ_AT_IMPORT.iter().find(|(_, file)| *file == name).map(|(module, _)| *module);
        self.image.made.modules.contains(read.unwrap_or(name.split('.').next().unwrap_or_default()))
    }

    /// Whether the interpreter, its libraries and the first file of each module are as they were.
    pub(crate) fn is_current(&self) -> bool {
        self.image.made.files.iter().all(|(path, stamp)| FileStamp::of(path).as_ref() == Some(stamp))
    }

    fn is_used_up(&self) -> bool {
        self.runs_left.get() == 0 || self.is_too_old()
    }

    pub(crate) fn is_too_old(&self) -> bool {
        self.since.elapsed() >= self.max_age
    }
}

/// The templates of a session, by runtime.
#[derive(Default)]
pub(crate) struct Templates {
    all: BTreeMap<String, State>,
}

/// How far the template of a runtime is.
#[derive(Default)]
struct State {
    ready: Option<Rc<Template>>,
    /// The process that makes the first or the next, and what its copies will be.
    maker: Option<(Maker, CopiesOf)>,
    /// Why it was refused. None is made again in this session then.
    refused: Option<String>,
    /// How many makers in a row have made none where another try may succeed.
    broken: u32,
}

/// What is settled of the copies of a template before it is made.
struct CopiesOf {
    stem: String,
    plan: Plan,
    template: model::Template,
}

impl CopiesOf {
    fn of(self, image: TemplateImage) -> Result<Template, String> {
        let CopiesOf { stem, plan, template } = self;
        if !image.is_for(&plan) {
            return Err(String::from("the policy is another one than when the session began"));
        }
        let (max_age, runs_left) = (template.max_age, Cell::new(template.max_runs));
        Ok(Template { image, stem: Some(stem), plan: Rc::new(plan), since: Instant::now(), max_age, runs_left })
    }
}

impl Templates {
    /// The template of a runtime, or why there is none yet.
    ///
    /// # Errors
    /// It is not made yet, or was refused.
    pub(crate) fn ready(&self, runtime: &str) -> Result<Rc<Template>, NotPrestarted> {
        let state = self.all.get(runtime).ok_or(NotPrestarted::TemplateNotBegun)?;
        match (&state.ready, &state.refused) {
            (Some(ready), _) => Ok(Rc::clone(ready)),
            (None, Some(why)) => Err(NotPrestarted::TemplateRefused(why.clone())),
            (None, None) if state.maker.is_some() => Err(NotPrestarted::NoTemplateYet),
            // Or the last try has made none.
            (None, None) => Err(NotPrestarted::TemplateNotBegun),
        }
    }

    /// Begins to make the template of a runtime where the policy has one and none is ready, or the
    /// one that is has been used up or is outdated. A process beside this one makes it. One that is too
    /// old serves until then.
    pub(crate) fn begin(&mut self, runtime: &str, loaded: &LoadedPolicy, options: &Options) {
        let Some((_, template)) = loaded.policy.template_of(runtime) else { return };
        let state = self.all.entry(runtime.to_owned()).or_default();
        let is_good = |ready: &Rc<Template>| !ready.is_used_up() && ready.is_current();
        if state.refused.is_some() || state.maker.is_some() || state.ready.as_ref().is_some_and(is_good) {
            return;
        }
        let start = || -> Result<_, NoTemplate> {
            let stem = unique_stem().map_err(|refusal| NoTemplate::NotStarted(Box::new(refusal)))?;
            let plan = plan_of_copies(runtime, &stem, loaded, options)?;
            Ok((Maker::start(runtime, &stem, options)?, CopiesOf { stem, plan, template: template.clone() }))
        };
        match start() {
            Ok(maker) => state.maker = Some(maker),
            Err(refused) => state.refuse(refused.to_string()),
        }
    }

    /// Whether any is being made.
    pub(crate) fn is_making(&self) -> bool {
        self.all.values().any(|state| state.maker.is_some())
    }

    /// Takes what was made meanwhile. Whether it was any.
    pub(crate) fn take_made(&mut self) -> bool {
        self.all.values_mut().filter_map(State::take_made).count() > 0
    }
}

impl State {
    /// Takes what the maker has made. None where that is not ready, or was refused.
    fn take_made(&mut self) -> Option<()> {
        let (maker, copies) = self.maker.take()?;
        match maker.poll() {
            Progress::Going(maker) => self.maker = Some((maker, copies)),
            Progress::Made(image) => match copies.of(image) {
                Ok(template) => {
                    (self.ready, self.broken) = (Some(Rc::new(template)), 0);
                    return Some(());
                }
                Err(why) => self.refuse(why),
            },
            Progress::Broken(_) if self.broken + 1 < MAX_BROKEN => self.broken += 1,
            Progress::Refused(why) | Progress::Broken(why) => self.refuse(why),
        }
        None
    }

    /// None is made again. The last image goes too: what has made it makes none any more.
    fn refuse(&mut self, why: String) {
        (self.ready, self.refused) = (None, Some(why));
    }
}
