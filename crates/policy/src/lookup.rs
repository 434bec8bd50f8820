//! From a policy's name or path to the policy.
//!
//! A name is sought in the system's directory, then in the user's, then among the shipped,
//! never in the working directory; what holds a `/` is a path. For a privileged launcher
//! each file and every directory above it must be root's alone. The caller says where the
//! user's directory is and whether there is privilege: nothing here reads the environment.

use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use crate::{
    check,
    diagnostic::{Complaint, Problems, Report, Source},
    document::{self, Layer},
    inherit,
    model::{Origin, Policy},
    names, shipped,
    trust::{self, ReadError},
};

/// Where the system's policies are.
pub const SYSTEM_DIR: &str = "/etc/stockade/policies";

/// How many policies may extend one another.
const DEEPEST: usize = 8;

/// Where names are sought, and how much is believed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LookupContext {
    /// Whether the launcher has rights that the user has not.
    pub privileged: bool,
    /// The system's policies; empty: none.
    pub system_dir: PathBuf,
    /// The user's policies. Not used by a privileged launcher.
    pub user_dir: Option<PathBuf>,
}

impl LookupContext {
    /// For a launcher with the user's own rights.
    pub fn rootless(user_dir: Option<PathBuf>) -> Self {
        LookupContext { privileged: false, system_dir: PathBuf::from(SYSTEM_DIR), user_dir }
    }

    /// For a launcher with more rights than the user.
    pub fn privileged() -> Self {
        LookupContext { privileged: true, system_dir: PathBuf::from(SYSTEM_DIR), user_dir: None }
    }

    /// The directories where a name is sought, in order.
    fn directories(&self) -> impl Iterator<Item = &Path> {
        // The user's directory is dropped here too, whatever the caller put in.
        let user = self.user_dir.as_deref().filter(|_| !self.privileged);
        std::iter::once(self.system_dir.as_path()).filter(|path| !path.as_os_str().is_empty()).chain(user)
    }

    fn read(&self, path: &Path) -> Result<Option<String>, ReadError> {
        if self.privileged { trust::read_trusted(path) } else { trust::read_any(path) }
    }
}

/// Why there is no policy.
#[derive(Debug, thiserror::Error)]
pub enum PolicyError {
    /// The name could not be one.
    #[error("{} cannot name a policy: use small letters, digits, _ and -, or a path with a /", crate::diagnostic::quote(.0))]
    Name(String),
    /// Nothing has this name.
    #[error("there is no policy `{name}`{}; sought in {}", hint(.likely.as_deref()), .sought.join(", "))]
    NotFound {
        /// The name or path.
        name: String,
        /// Where it was sought.
        sought: Vec<String>,
        /// A shipped policy that was probably meant.
        likely: Option<String>,
    },
    /// A file could not be read or believed.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// The files are not a policy.
    #[error("{0}")]
    Invalid(Box<Report>),
}

fn hint(likely: Option<&str>) -> String {
    likely.map(|name| format!(" (did you mean `{name}`?)")).unwrap_or_default()
}

/// A text that a name or path led to.
struct Found {
    name: String,
    origin: Origin,
    text: String,
    /// Which of the directories it was in, if a name led to it.
    level: Option<usize>,
}

/// Loads a policy by name or path.
///
/// # Errors
/// It is not found, cannot be read or believed, or it or what it extends is no policy.
pub fn load(name_or_path: &str, context: &LookupContext) -> Result<Policy, PolicyError> {
    let found = if name_or_path.contains('/') { by_path(name_or_path, context)? } else { by_name(name_or_path, context, 0)? };
    resolve(found, context)
}

/// Loads a shipped policy, without looking at any file.
///
/// # Errors
/// No shipped policy has this name, or, which a test excludes, it is no policy.
pub fn load_shipped(name: &str) -> Result<Policy, PolicyError> {
    resolve(among_shipped(name, &[])?, &nowhere())
}

/// The names that `load` would find, with the place of each, in the order of search.
///
/// A directory that cannot be listed adds none.
pub fn names(context: &LookupContext) -> Vec<(String, Origin)> {
    let mut out: Vec<(String, Origin)> = Vec::new();
    let mut add = |name: String, origin: Origin| {
        if out.iter().all(|(known, _)| *known != name) {
            out.push((name, origin));
        }
    };
    for directory in context.directories() {
        let Ok(entries) = std::fs::read_dir(directory) else { continue };
        let mut paths: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
        paths.sort();
        for path in paths.into_iter().filter(|path| path.extension().is_some_and(|end| end == "toml")) {
            let name = path.file_stem().and_then(|stem| stem.to_str()).filter(|stem| check::is_policy_name(stem));
            if let Some(name) = name.map(str::to_owned) {
                add(name, Origin::File(path));
            }
        }
    }
    for (name, _) in shipped::SHIPPED {
        add((*name).to_owned(), Origin::Shipped);
    }
    out
}

/// A context in which only shipped policies are found.
fn nowhere() -> LookupContext {
    LookupContext { privileged: false, system_dir: PathBuf::new(), user_dir: None }
}

fn by_path(path: &str, context: &LookupContext) -> Result<Found, PolicyError> {
    let text = context.read(Path::new(path))?.ok_or_else(|| PolicyError::NotFound {
        name: path.to_owned(),
        sought: vec![path.to_owned()],
        likely: None,
    })?;
    Ok(Found { name: path.to_owned(), origin: Origin::File(PathBuf::from(path)), text, level: None })
}

/// Seeks a name, leaving out the first places.
fn by_name(name: &str, context: &LookupContext, skip: usize) -> Result<Found, PolicyError> {
    if !check::is_policy_name(name) {
        return Err(PolicyError::Name(name.to_owned()));
    }
    let mut sought = Vec::new();
    for (level, directory) in context.directories().enumerate().skip(skip) {
        let path = directory.join(format!("{name}.toml"));
        if let Some(text) = context.read(&path)? {
            return Ok(Found { name: name.to_owned(), origin: Origin::File(path), text, level: Some(level) });
        }
        sought.push(directory.display().to_string());
    }
    among_shipped(name, &sought)
}

fn among_shipped(name: &str, sought: &[String]) -> Result<Found, PolicyError> {
    let text = shipped::text(name).ok_or_else(|| PolicyError::NotFound {
        name: name.to_owned(),
        sought: sought.iter().cloned().chain(["the shipped policies".to_owned()]).collect(),
        likely: names::nearest(name, shipped::SHIPPED.iter().map(|(known, _)| *known)).map(str::to_owned),
    })?;
    Ok(Found { name: name.to_owned(), origin: Origin::Shipped, text: text.to_owned(), level: None })
}

/// Reads a policy and all that it extends, and combines them.
fn resolve(first: Found, context: &LookupContext) -> Result<Policy, PolicyError> {
    let (name, origin) = (first.name.clone(), first.origin.clone());
    let mut sources: Vec<Source> = Vec::new();
    let mut layers: Vec<Layer> = Vec::new();
    let mut visited: Vec<Origin> = Vec::new();
    let mut names_seen: Vec<String> = Vec::new();
    let mut next = Some(first);
    while let Some(found) = next.take() {
        let mut problems = Problems::default();
        let source = sources.len();
        sources.push(Source { label: label(&found), text: found.text });
        let layer = document::read(source, &sources[source].text, &mut problems);
        visited.push(found.origin);
        names_seen.push(found.name.clone());
        if problems.is_empty()
            && let Some(base) = &layer.extends
        {
            // A policy that extends its own name means the one that it hides.
            let skip = if base.value == found.name { found.level.map_or(0, |level| level + 1) } else { 0 };
            match base_of(&base.value, skip, visited.last(), context) {
                Ok(base_found) => {
                    let key = origin_key(&base_found);
                    if visited.iter().zip(&names_seen).any(|(origin, name)| (origin, name.as_str()) == key) {
                        let chain = names_seen.join(" -> ");
                        let complaint = Complaint::new("policies extend one another in a circle", "leads back")
                            .help(format!("the circle: {chain} -> {}", base.value));
                        problems.add(&base.place, complaint);
                    } else if layers.len() + 1 >= DEEPEST {
                        let title = format!("more than {DEEPEST} policies extend one another");
                        problems.add(&base.place, Complaint::new(title, "one too many"));
                    } else {
                        next = Some(base_found);
                    }
                }
                Err(PolicyError::NotFound { name, sought, likely }) => {
                    let complaint = Complaint::new(format!("there is no policy `{name}` to extend"), "not found");
                    let sought = format!("sought in {}", sought.join(", "));
                    let help = likely.map_or(sought, |likely| format!("did you mean `{likely}`?"));
                    problems.add(&base.place, complaint.help(help));
                }
                Err(error) => return Err(error),
            }
        }
        if !problems.is_empty() {
            return Err(PolicyError::Invalid(Box::new(Report::new(sources, problems))));
        }
        layers.push(layer);
    }
    layers.reverse();
    let sha256 = fingerprint(&sources);
    let mut problems = Problems::default();
    inherit::combine(layers, &name, origin, sha256, &mut problems)
        .ok_or_else(|| PolicyError::Invalid(Box::new(Report::new(sources, problems))))
}

fn base_of(name: &str, skip: usize, child: Option<&Origin>, context: &LookupContext) -> Result<Found, PolicyError> {
    // What is compiled in extends only what is compiled in, so that no file changes it.
    if child == Some(&Origin::Shipped) { among_shipped(name, &[]) } else { by_name(name, context, skip) }
}

fn origin_key(found: &Found) -> (&Origin, &str) {
    (&found.origin, found.name.as_str())
}

fn label(found: &Found) -> String {
    match &found.origin {
        Origin::Shipped => format!("shipped policy {}", found.name),
        Origin::File(path) => path.display().to_string().chars().map(|c| if c.is_control() { '?' } else { c }).collect(),
    }
}

/// The hash of one text, or for several the hash of their hashes, one per line.
fn fingerprint(sources: &[Source]) -> String {
    let one = |bytes: &[u8]| Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    match sources {
        [only] => one(only.text.as_bytes()),
        several => {
            let lines: String = several.iter().map(|source| one(source.text.as_bytes()) + "\n").collect();
            one(lines.as_bytes())
        }
    }
}

/// Loads a text as if it were a file of the name `test.toml`. It may extend shipped
/// policies only.
///
/// # Errors
/// The text is no policy.
pub fn load_text(text: &str) -> Result<Policy, PolicyError> {
    let found =
        Found { name: "./test.toml".to_owned(), origin: Origin::File(PathBuf::from("test.toml")), text: text.to_owned(), level: None };
    resolve(found, &nowhere())
}
