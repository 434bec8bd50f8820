//! The image that is a run's root: which one, whether the policy lets the run have it, and what of the
//! policy's programs it has.
//!
//! An image is as hostile as code: its configuration, and every name in its layers. Layers
//! are looked at one name at a time and no link in them is followed by the kernel, so that nothing
//! outside of them is seen. What the image's programs do is not looked at.

use std::{
    cell::Cell,
    collections::BTreeMap,
    ffi::OsString,
    fs::{self, File, Metadata},
    os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt},
    path::{Component, Path, PathBuf},
};

use stockade_images::{Image, ImageError, MAX_LOWER, Store, default_path};
use stockade_policy::{
    facts::{ImageFacts, PathKind},
    model::{ANY_IMAGE, OUTPUT, Policy, Runtime},
    plan::MAX_OVERLAY_LAYERS,
};
use stockade_protocol::Verdict;

use super::{Origin, RunSettings, request::check_size};
use crate::{
    Options, Refusal, RefusalCause,
    caller::{self, Identity},
};

/// The architecture of this program, in the words of images.
const ARCHITECTURE: &str = "amd64";
/// The launcher takes every image that an import has not merged into one directory.
const _: () = assert!(MAX_LOWER <= MAX_OVERLAY_LAYERS);
/// Links that are followed for one path, as the kernel's limit is (path_resolution(7)).
const MAX_LINKS: usize = 40;

/// Directories of an image's PATH that programs are looked for in.
const MAX_DIRECTORIES: usize = 64;
/// Files that are looked at in an image for one run, whatever its links are: some tenths of a second.
/// 40 programs, 10 layers and 64 directories of two names are 77,000.
const MAX_LOOKS: usize = 100_000;

/// Why a run does not get an image as its root.
#[derive(Debug, thiserror::Error)]
enum ImageRootError {
    #[error("image: {0}")]
    Asked(ImageError),
    #[error("policy `{policy}`, [filesystem] root: {error}")]
    OfPolicy { policy: String, error: ImageError },
    #[error(
        "image {image}: policy `{policy}` {}; add it to `images` under [filesystem]",
        if allowed.is_empty() { String::from("lets no request name one") } else { format!("lets a request name only {}", allowed.join(", ")) }
    )]
    NotAllowed { image: String, policy: String, allowed: Vec<String> },
    #[error("--runtime {runtime}: an interpreter of the host cannot run in image {image}; leave --runtime out, or the image")]
    Interpreter { runtime: String, image: String },
    #[error(
        "policy `{policy}` has image {image} as the root of runs, and bubblewrap's options show directories of the host; use a policy without `root` under [filesystem]"
    )]
    WithView { image: String, policy: String },
    #[error("image {image}: its command holds a NUL byte; write a command behind `--`")]
    Command { image: String },
}

impl RefusalCause for ImageRootError {
    fn verdict_and_reason(&self) -> (Verdict, &'static str) {
        let (error, is_asked) = match self {
            ImageRootError::Asked(error) => (error, true),
            ImageRootError::OfPolicy { error, .. } => (error, false),
            ImageRootError::NotAllowed { .. } => return (Verdict::BadRequest, "image_not_allowed"),
            ImageRootError::Interpreter { .. } => return (Verdict::BadRequest, "image_with_interpreter"),
            ImageRootError::WithView { .. } => return (Verdict::BadRequest, "image_with_view"),
            ImageRootError::Command { .. } => return (Verdict::BadRequest, "command_malformed"),
        };
        let of_request = if is_asked { Verdict::BadRequest } else { Verdict::SandboxError };
        match error {
            ImageError::Name { .. } | ImageError::UnknownName { .. } | ImageError::UnknownDigest { .. } => (of_request, "image_unknown"),
            ImageError::NoStore { .. } | ImageError::Nowhere => (of_request, "image_store_missing"),
            _ => (Verdict::SandboxError, "image_store_unusable"),
        }
    }
}

impl<'a> Origin<'a> {
    /// The image that a request names.
    fn image(self) -> Option<&'a str> {
        match self {
            Origin::Request(request) | Origin::Script { request, .. } | Origin::Session { request: Some(request), .. } => {
                request.image.as_deref()
            }
            _ => None,
        }
    }
}

/// The store of the user who launches: root's, also where root acts for another user, or the caller's own.
///
/// # Errors
/// There is none that can be trusted.
pub(crate) fn store(identity: &Identity) -> Result<Store, ImageError> {
    let owner = if identity.privileged { 0 } else { identity.caller.uid };
    Store::open(&default_path(identity.privileged)?, owner)
}

/// The image that a run is to have, held as long as it lives; none: the host's directories.
///
/// # Errors
/// It is not there, or the policy does not let the run have it.
pub(crate) fn find(origin: Origin<'_>, policy: &Policy, options: &Options, identity: &Identity) -> Result<Option<Image>, Refusal> {
    let asked = origin.image().or(options.image.as_deref());
    let of_policy = policy.filesystem.root.image.as_deref();
    let Some(text) = asked.or(of_policy) else { return Ok(None) };
    if matches!(origin, Origin::Command { view: Some(_), .. }) {
        return Err(ImageRootError::WithView { image: text.to_owned(), policy: policy.name.clone() }.into());
    }
    let worded = |error| match asked {
        Some(_) => ImageRootError::Asked(error),
        None => ImageRootError::OfPolicy { policy: policy.name.clone(), error },
    };
    // What the store has besides is not said: who may not use an image learns nothing of it.
    let not_allowed = || {
        let (image, policy, allowed) = (text.to_owned(), policy.name.clone(), policy.filesystem.images.clone());
        Err(ImageRootError::NotAllowed { image, policy, allowed }.into())
    };
    let found = store(identity).and_then(|store| store.resolve(text).map(|image| (store, image)));
    let (store, image) = match found {
        Err(_) if asked.is_some() && !is_listed(text, policy) => return not_allowed(),
        found => found.map_err(worded)?,
    };
    if asked.is_some() && !is_allowed(&store, &image, text, policy) {
        return not_allowed();
    }
    if let Some((runtime, _)) = options.interpreters.first() {
        return Err(ImageRootError::Interpreter { runtime: runtime.clone(), image: title(&image) }.into());
    }
    Ok(Some(image))
}

/// Images that a request may name, as the policy lists them.
fn listed(policy: &Policy) -> impl Iterator<Item = &String> {
    policy.filesystem.images.iter().chain(&policy.filesystem.root.image)
}

/// Whether the policy lists this name or digest, or all.
fn is_listed(text: &str, policy: &Policy) -> bool {
    // Of `NAME@sha256:…` the digest alone decides.
    listed(policy).any(|listed| listed == ANY_IMAGE || listed == text && !text.contains('@'))
}

/// Whether the policy lets a request have this image: by the name that the request has for it, or because
/// one of the policy's names leads to the same digest.
fn is_allowed(store: &Store, image: &Image, text: &str, policy: &Policy) -> bool {
    let leads_here = |listed: &String| store.find(listed).is_ok_and(|(_, digest)| digest == image.record.digest);
    is_listed(text, policy) || listed(policy).any(leads_here)
}

/// Its name where it has one, and its digest.
pub(crate) fn title(image: &Image) -> String {
    let digest = &image.record.digest;
    image.name.as_ref().map_or_else(|| digest.to_string(), |name| format!("{name}@{digest}"))
}

/// What a plan needs to know of an image, and the lock that keeps its layers.
///
/// # Errors
/// Its configuration cannot be meant.
pub(crate) fn facts(image: Image, policy: &Policy) -> Result<(ImageFacts, File), Refusal> {
    let (title, record) = (title(&image), &image.record);
    let command: Vec<String> = record.entrypoint.iter().chain(&record.cmd).cloned().collect();
    if command.iter().any(|word| word.contains('\0')) {
        return Err(ImageRootError::Command { image: title }.into());
    }
    check_size("the image's command and variables", command.iter().chain(&record.env))?;
    let mut environment = BTreeMap::new();
    let mut malformed_variables = 0;
    for variable in &record.env {
        match variable.split_once('=') {
            Some((name, value)) if !name.is_empty() && !variable.contains('\0') => {
                drop(environment.insert(name.to_owned(), value.to_owned()))
            }
            _ => malformed_variables += 1,
        }
    }
    let tree = LayeredTree::new(&image.layers);
    let path = environment.get("PATH").or(policy.environment.set.get("PATH"));
    let directories: Vec<&Path> = path
        .map(|path| path.split(':').map(Path::new).filter(|part| part.is_absolute()).take(MAX_DIRECTORIES).collect())
        .unwrap_or_default();
    let programs = programs(policy, |program| tree.program(program, &directories));
    let working_directory = (!record.working_dir.is_empty()).then(|| {
        let path = PathBuf::from(record.working_dir.replace('\0', "\u{fffd}"));
        let there = tree.resolve(&path).map(|(_, kind)| kind);
        (path, there)
    });
    let facts = ImageFacts {
        name: image.name.clone(),
        digest: record.digest.to_string(),
        layers: image.layers.clone(),
        environment,
        malformed_variables,
        working_directory,
        command,
        user: record.user.clone(),
        programs,
    };
    Ok((facts, image.into_lock()))
}

/// An image of the store, as a policy's runs would find it.
#[derive(Clone, Debug)]
pub struct ImageStatus {
    /// Its name where it has one, and its digest.
    pub title: String,
    /// The runtimes of the policy whose program it has, with that program.
    pub programs: BTreeMap<String, PathBuf>,
    /// Why nothing of it can start here.
    pub problem: Option<String>,
}

/// The launcher's store, and each image that a policy lets a request name.
///
/// # Errors
/// There is no store that can be trusted, or it cannot be read.
pub fn look_at_images(policy: &Policy, identity: &Identity) -> Result<(PathBuf, Vec<ImageStatus>), ImageError> {
    let store = store(identity)?;
    let names = store.names()?;
    let named = names.iter().map(|(name, _)| name.clone());
    let nameless = store.list()?.into_iter().map(|record| record.digest).filter(|digest| names.iter().all(|(_, named)| named != digest));
    let mut all = Vec::new();
    for text in named.chain(nameless.map(|digest| digest.to_string())) {
        match store.resolve(&text) {
            Ok(image) if is_allowed(&store, &image, &text, policy) => all.push(status(image, policy)),
            Ok(_) => {}
            Err(error) => all.push(ImageStatus { title: text, programs: BTreeMap::new(), problem: Some(error.to_string()) }),
        }
    }
    Ok((store.path().to_path_buf(), all))
}

fn status(image: Image, policy: &Policy) -> ImageStatus {
    let title = title(&image);
    let (os, architecture) = (image.record.os.clone(), image.record.architecture.clone());
    let foreign = (os != "linux" || architecture != ARCHITECTURE)
        .then(|| format!("it is for {os} on {architecture}, and this is linux on {ARCHITECTURE}"));
    match facts(image, policy) {
        Ok((facts, _)) => {
            let program = |(name, runtime): (&String, &Runtime)| Some((name.clone(), facts.programs.get(&runtime.interpreter())?.clone()));
            ImageStatus { title, programs: policy.runtimes.iter().filter_map(program).collect(), problem: foreign }
        }
        Err(refusal) => ImageStatus { title, programs: BTreeMap::new(), problem: Some(refusal.message) },
    }
}

/// What an image has in the place of a runtime's program; none: it has none, or the run has no image.
///
/// # Errors
/// The run cannot have the image.
pub fn program_of(runtime: &Runtime, policy: &Policy, options: &Options) -> Result<Option<PathBuf>, Refusal> {
    let identity = caller::identify(options.peer.as_ref())?;
    let Some(image) =
        find(Origin::Command { command: &[], settings: RunSettings::NONE, terminal: false, view: None }, policy, options, &identity)?
    else {
        return Ok(None);
    };
    Ok(facts(image, policy)?.0.programs.remove(&runtime.interpreter()))
}

/// By program that a runtime of the policy starts or compiles with: what stands for it.
fn programs(policy: &Policy, find: impl Fn(&Path) -> Option<PathBuf>) -> BTreeMap<PathBuf, PathBuf> {
    let first = |words: &Vec<String>| words.first().filter(|word| *word != OUTPUT).map(PathBuf::from);
    let named = policy
        .runtimes
        .values()
        .flat_map(|runtime| [Some(runtime.interpreter()), first(&runtime.command), first(&runtime.compile)].into_iter().flatten());
    named.filter_map(|program| find(&program).map(|found| (program, found))).collect()
}

/// The files of an image as an overlay of its layers shows them. It looks at no more than
/// [`MAX_LOOKS`] files; from then on it finds nothing.
pub(crate) struct LayeredTree<'a> {
    /// Bottom first.
    layers: &'a [PathBuf],
    looks_left: Cell<usize>,
}

/// What stands at a path.
enum Found {
    Directory,
    File(Metadata),
    Link(PathBuf),
}

impl<'a> LayeredTree<'a> {
    fn new(layers: &'a [PathBuf]) -> Self {
        LayeredTree { layers, looks_left: Cell::new(MAX_LOOKS) }
    }

    /// A program of the image: the one at this path, else the first of its name in these directories.
    fn program(&self, program: &Path, directories: &[&Path]) -> Option<PathBuf> {
        let is_program =
            |path: &PathBuf| matches!(self.follow(path), Some((_, Found::File(found))) if found.permissions().mode() & 0o111 != 0);
        let name = program.file_name()?;
        std::iter::once(program.to_path_buf()).chain(directories.iter().map(|directory| directory.join(name))).find(is_program)
    }

    /// Where an absolute path leads, with links followed inside the image, and what is there.
    pub(crate) fn resolve(&self, path: &Path) -> Option<(PathBuf, PathKind)> {
        self.follow(path).map(|(real, found)| (real, if matches!(found, Found::Directory) { PathKind::Directory } else { PathKind::File }))
    }

    fn follow(&self, path: &Path) -> Option<(PathBuf, Found)> {
        let names = |path: &Path| -> Vec<OsString> { path.components().rev().map(|part| part.as_os_str().to_owned()).collect() };
        let mut pending = names(path);
        let mut at = PathBuf::from("/");
        let mut found = Found::Directory;
        let mut links = 0;
        while let Some(name) = pending.pop() {
            match Path::new(&name).components().next() {
                Some(Component::RootDir) => at = PathBuf::from("/"),
                Some(Component::ParentDir) => drop(at.pop()),
                Some(Component::Normal(name)) if matches!(found, Found::Directory) => at.push(name),
                Some(Component::Normal(_)) => return None,
                _ => continue,
            }
            found = self.look(&at)?;
            if let Found::Link(to) = &found {
                links += 1;
                if links > MAX_LINKS {
                    return None;
                }
                pending.extend(names(to));
                at.pop();
                found = Found::Directory;
            }
        }
        Some((at, found))
    }

    /// What stands at a path whose parents are directories.
    fn look(&self, path: &Path) -> Option<Found> {
        'layers: for layer in self.layers.iter().rev() {
            let mut at = layer.clone();
            let mut found = None;
            let mut hides_below = false;
            for name in path.components().skip(1) {
                // A link in a lower layer would be followed on the host.
                if found.as_ref().is_some_and(|above: &Metadata| !above.is_dir()) {
                    return None;
                }
                self.looks_left.set(self.looks_left.get().checked_sub(1)?);
                at.push(name);
                // It is in a layer below, or nowhere.
                let Ok(metadata) = fs::symlink_metadata(&at) else {
                    if hides_below {
                        return None;
                    }
                    continue 'layers;
                };
                if is_whiteout(&metadata) {
                    return None;
                }
                hides_below |= metadata.is_dir() && is_opaque(&at);
                found = Some(metadata);
            }
            return match found {
                None => Some(Found::Directory),
                Some(found) if found.is_dir() => Some(Found::Directory),
                Some(found) if found.is_symlink() => fs::read_link(&at).ok().map(Found::Link),
                Some(found) => Some(Found::File(found)),
            };
        }
        None
    }
}

fn is_whiteout(found: &Metadata) -> bool {
    found.file_type().is_char_device() && found.rdev() == 0
}

fn is_opaque(directory: &Path) -> bool {
    let mut value = [0; 2];
    matches!(rustix::fs::lgetxattr(directory, c"user.overlay.opaque", &mut value), Ok(1)) && value.first() == Some(&b'y')
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn links_of_an_image_lead_inside_it_and_upper_layers_hide_lower_ones() {
        let root = std::env::temp_dir().join(format!("stockade-layered-{}", std::process::id()));
        let [lower, upper] = ["lower", "upper"].map(|name| root.join(name));
        for directory in [lower.join("usr/bin"), lower.join("gone/below"), lower.join("file"), upper.join("usr/local/bin")] {
            fs::create_dir_all(directory).unwrap();
        }
        fs::write(lower.join("usr/bin/python3"), "").unwrap();
        fs::set_permissions(lower.join("usr/bin/python3"), fs::Permissions::from_mode(0o755)).unwrap();
        fs::write(lower.join("usr/bin/data"), "").unwrap();
        symlink("/usr/bin", lower.join("bin")).unwrap();
        symlink("/../../../etc", lower.join("out")).unwrap();
        symlink("loop", lower.join("loop")).unwrap();
        symlink("/etc", lower.join("through")).unwrap();
        fs::create_dir(upper.join("through")).unwrap();
        fs::write(upper.join("file"), "").unwrap();
        fs::write(upper.join("gone"), "").unwrap();
        symlink("../../bin/python3", upper.join("usr/local/bin/py")).unwrap();
        let layers = [lower, upper];
        let tree = LayeredTree::new(&layers);
        let real = |path: &str| tree.resolve(Path::new(path)).map(|(real, _)| real);
        assert_eq!(real("/bin/python3"), Some(PathBuf::from("/usr/bin/python3")));
        assert_eq!(real("/usr/local/bin/py"), Some(PathBuf::from("/usr/bin/python3")));
        assert_eq!(tree.resolve(Path::new("/file")).unwrap().1, PathKind::File);
        for missing in ["/out", "/out/passwd", "/loop", "/gone/below", "/etc/passwd", "/usr/bin/python3/x", "/through/passwd"] {
            assert_eq!(real(missing), None, "{missing}");
        }
        let on_path = [Path::new("/nowhere"), Path::new("/bin")];
        assert_eq!(tree.program(Path::new("/opt/python3"), &on_path), Some(PathBuf::from("/bin/python3")));
        assert_eq!(tree.program(Path::new("/usr/bin/data"), &[]), None, "it is no program");
        fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn the_links_of_an_image_cost_a_bounded_number_of_looks() {
        let root = std::env::temp_dir().join(format!("stockade-looks-{}", std::process::id()));
        fs::create_dir_all(root.join("a")).unwrap();
        fs::write(root.join("a/program"), "").unwrap();
        fs::set_permissions(root.join("a/program"), fs::Permissions::from_mode(0o755)).unwrap();
        // Each link leads through another, by as many names as a link holds.
        for link in 1..MAX_LINKS {
            symlink(format!("{}l{}", "a/../".repeat(800), link + 1), root.join(format!("l{link}"))).unwrap();
        }
        symlink("a", root.join(format!("l{MAX_LINKS}"))).unwrap();
        let layers = [root.clone()];
        let tree = LayeredTree::new(&layers);
        // The control: the links lead to the program.
        assert_eq!(tree.program(Path::new("/program"), &[Path::new("/l1")]), Some(PathBuf::from("/l1/program")));
        let (path, program) = (vec![Path::new("/l1"); 43_000], Path::new("/missing"));
        assert_eq!(tree.program(program, &path), None);
        assert_eq!((tree.looks_left.get(), tree.resolve(Path::new("/a"))), (0, None));
        fs::remove_dir_all(root).unwrap();
    }
}
