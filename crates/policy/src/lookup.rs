//! From a policy's name or path to the policy.
//!
//! A name is looked up in the system's directory, then in the user's, then among the shipped
//! policies, never in the working directory. A name with a `/` is a path. For a privileged
//! launcher root must own each file and every directory above it, and no other user may write
//! them. It does not read the environment: the caller passes the user's directory.

use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};
use stockade_protocol::text::is_hidden;

use crate::{
    advice, check, consistency,
    diagnostic::{Diagnostic, DiagnosticReport, Diagnostics, Located, Source},
    document::{self, DocumentReader},
    merge::{self, MergedTable},
    model::{Origin, Policy},
    names, shipped,
    trust::{self, ReadError},
};

/// The directory of the system's policies.
pub const SYSTEM_DIR: &str = "/etc/stockade/policies";

/// Policies in a chain of `extends`.
const MAX_DEPTH: usize = 8;

/// The directories of a lookup, and which files it trusts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LookupContext {
    /// Whether the launcher has rights that the user lacks.
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

    /// The directories of a lookup, in order.
    fn directories(&self) -> impl Iterator<Item = &Path> {
        // A privileged launcher never reads the user's directory.
        let user = self.user_dir.as_deref().filter(|_| !self.privileged);
        std::iter::once(self.system_dir.as_path()).filter(|path| !path.as_os_str().is_empty()).chain(user)
    }

    fn read(&self, path: &Path) -> Result<Option<String>, ReadError> {
        if self.privileged { trust::read_trusted(path) } else { trust::read_any(path) }
    }
}

/// Why a policy was not loaded.
#[derive(Debug, thiserror::Error)]
pub enum PolicyError {
    /// It is no valid name.
    #[error("{} cannot name a policy: use small letters, digits, _ and -, or a path with a /, such as ./{}", crate::diagnostic::quote(.0), .0.escape_debug())]
    Name(String),
    /// No policy has this name.
    #[error("there is no policy `{name}`{}; searched {}", hint(.likely.as_deref()), .searched.join(", "))]
    NotFound {
        /// The name or path.
        name: String,
        /// The directories that were searched.
        searched: Vec<String>,
        /// A shipped policy with a similar name.
        likely: Option<String>,
    },
    /// A file could not be read or is not trusted.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// The files are not a policy.
    #[error("{0}")]
    Invalid(Box<DiagnosticReport>),
}

fn hint(likely: Option<&str>) -> String {
    likely.map(|name| format!(" (did you mean `{name}`?)")).unwrap_or_default()
}

/// A policy of a directory that has the name of a shipped one, and is found in its place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HidingPolicy {
    /// The name of both.
    pub name: String,
    /// Its file.
    pub path: PathBuf,
}

impl std::fmt::Display for HidingPolicy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let path: String = self.path.display().to_string().chars().map(|c| if is_hidden(c) { '?' } else { c }).collect();
        write!(f, "{path} hides the shipped policy `{}`", self.name)
    }
}

/// Where a policy comes from.
#[derive(Clone, Debug, Default)]
pub struct Ancestry {
    /// What it extends.
    pub base: Option<Policy>,
    /// Files among itself and all that it extends that hide a shipped policy.
    pub hiding: Vec<HidingPolicy>,
}

/// The text of a policy, and where it was found.
#[derive(Clone)]
struct PolicySource {
    name: String,
    origin: Origin,
    text: String,
    /// The index of its directory, if it was looked up by name.
    level: Option<usize>,
}

/// Loads a policy by name or path.
///
/// # Errors
/// It is not found, cannot be read, is not trusted, or it or a policy that it extends is invalid.
pub fn load(name_or_path: &str, context: &LookupContext) -> Result<Policy, PolicyError> {
    resolve(find(name_or_path, context)?, context).map(|resolved| resolved.policy)
}

/// The same, and what its author may not have meant.
///
/// # Errors
/// Likewise.
pub fn review(name_or_path: &str, context: &LookupContext) -> Result<(Policy, DiagnosticReport), PolicyError> {
    resolve(find(name_or_path, context)?, context).map(|resolved| (resolved.policy, resolved.advice))
}

/// What a policy extends, and which shipped policies are hidden on the way.
///
/// # Errors
/// Likewise.
pub fn ancestry(name_or_path: &str, context: &LookupContext) -> Result<Ancestry, PolicyError> {
    let chain = resolve(find(name_or_path, context)?, context)?.chain;
    let hiding = chain.iter().filter_map(hidden_by).collect();
    let base = chain.into_iter().nth(1).map(|base| resolve(base, context).map(|resolved| resolved.policy)).transpose()?;
    Ok(Ancestry { base, hiding })
}

fn find(name_or_path: &str, context: &LookupContext) -> Result<PolicySource, PolicyError> {
    if name_or_path.contains('/') { by_path(name_or_path, context) } else { by_name(name_or_path, context, 0) }
}

/// The shipped policy that a found one hides. One that was found by its path hides nothing.
fn hidden_by(found: &PolicySource) -> Option<HidingPolicy> {
    found.level.and_then(|_| hiding(&found.name, &found.origin))
}

/// Loads a shipped policy without reading a file.
///
/// # Errors
/// No shipped policy has this name, or it is invalid, which a test excludes.
pub fn load_shipped(name: &str) -> Result<Policy, PolicyError> {
    resolve(among_shipped(name, &[])?, &nowhere()).map(|resolved| resolved.policy)
}

/// The names that `load` finds, each with its origin, in the order of the lookup.
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

/// The shipped policy that one of this name hides, which a lookup by name finds there.
pub fn hiding(name: &str, origin: &Origin) -> Option<HidingPolicy> {
    let Origin::File(path) = origin else { return None };
    shipped::text(name).map(|_| HidingPolicy { name: name.to_owned(), path: path.clone() })
}

/// A context in which only shipped policies are found.
fn nowhere() -> LookupContext {
    LookupContext { privileged: false, system_dir: PathBuf::new(), user_dir: None }
}

fn by_path(path: &str, context: &LookupContext) -> Result<PolicySource, PolicyError> {
    let text = context.read(Path::new(path))?.ok_or_else(|| PolicyError::NotFound {
        name: path.to_owned(),
        searched: vec![path.to_owned()],
        likely: None,
    })?;
    Ok(PolicySource { name: path.to_owned(), origin: Origin::File(PathBuf::from(path)), text, level: None })
}

/// Looks a name up, without the first `skip` directories.
fn by_name(name: &str, context: &LookupContext, skip: usize) -> Result<PolicySource, PolicyError> {
    if !check::is_policy_name(name) {
        return Err(PolicyError::Name(name.to_owned()));
    }
    let mut searched = Vec::new();
    for (level, directory) in context.directories().enumerate().skip(skip) {
        let path = directory.join(format!("{name}.toml"));
        if let Some(text) = context.read(&path)? {
            return Ok(PolicySource { name: name.to_owned(), origin: Origin::File(path), text, level: Some(level) });
        }
        searched.push(directory.display().to_string());
    }
    among_shipped(name, &searched)
}

fn among_shipped(name: &str, searched: &[String]) -> Result<PolicySource, PolicyError> {
    let text = shipped::text(name).ok_or_else(|| PolicyError::NotFound {
        name: name.to_owned(),
        searched: searched.iter().cloned().chain(["the shipped policies".to_owned()]).collect(),
        likely: names::nearest(name, shipped::SHIPPED.iter().map(|(known, _)| *known)).map(str::to_owned),
    })?;
    Ok(PolicySource { name: name.to_owned(), origin: Origin::Shipped, text: text.to_owned(), level: None })
}

/// A policy, and what it was made of.
struct Resolved {
    policy: Policy,
    advice: DiagnosticReport,
    /// It and all that it extends, in this order.
    chain: Vec<PolicySource>,
}

/// Reads a policy and all that it extends, and merges them.
fn resolve(found: PolicySource, context: &LookupContext) -> Result<Resolved, PolicyError> {
    let (name, origin) = (found.name.clone(), found.origin.clone());
    let mut chain = DocumentChain {
        context,
        sources: Vec::new(),
        visited: Vec::new(),
        merged: MergedTable::default(),
        problems: Diagnostics::default(),
        max_is_same: false,
    };
    chain.read(found)?;
    let DocumentChain { sources, visited, merged, mut problems, max_is_same, .. } = chain;
    let policy = match problems.is_empty() {
        true => consistency::policy(merged.clone(), &name, origin, &fingerprint(&sources), &mut problems),
        false => None,
    };
    match policy {
        Some(policy) => {
            let found = advice::of(&merged, sources.first().map_or("", |own| &own.text), sources.len() > 1);
            Ok(Resolved { policy: Policy { max_is_same, ..policy }, advice: DiagnosticReport::advice(sources, found), chain: visited })
        }
        None => Err(PolicyError::Invalid(Box::new(DiagnosticReport::new(sources, problems)))),
    }
}

/// Documents that extend one another, the last one first.
struct DocumentChain<'c> {
    context: &'c LookupContext,
    sources: Vec<Source>,
    visited: Vec<PolicySource>,
    merged: MergedTable,
    problems: Diagnostics,
    /// Of the last document.
    max_is_same: bool,
}

impl DocumentChain<'_> {
    /// Merges a document into what it extends, which is read first. Where the chain ends
    /// early, nothing is merged and the reason stands in `problems`.
    fn read(&mut self, found: PolicySource) -> Result<bool, PolicyError> {
        let source = self.sources.len();
        self.sources.push(Source { label: label(&found), text: found.text.clone() });
        self.visited.push(found.clone());
        let Some(root) = document::parse(source, &found.text, &mut self.problems) else { return Ok(false) };
        let document = root.get_ref();
        let inherits = document.contains_key("extends");
        if source == 0 {
            let limits = document.get("limits").and_then(|limits| limits.get_ref().as_table());
            self.max_is_same = limits.and_then(|limits| limits.get("max")).is_some_and(|max| max.get_ref().is_str());
        }
        let mut reader = DocumentReader { source, inherits, problems: &mut self.problems };
        if !reader.version(document) {
            return Ok(false);
        }
        if inherits {
            let base = reader.text(document, "extends", check::policy_name);
            let Some(base) = base.map(|base| self.find_base(&base, &found)).transpose()?.flatten() else { return Ok(false) };
            if !self.read(base)? {
                return Ok(false);
            }
        }
        let mut reader = DocumentReader { source, inherits, problems: &mut self.problems };
        merge::merge(&mut self.merged, document, &mut reader);
        Ok(true)
    }

    fn find_base(&mut self, base: &Located<String>, child: &PolicySource) -> Result<Option<PolicySource>, PolicyError> {
        // A policy that extends its own name means the one that it hides.
        let skip = if base.value == child.name { child.level.map_or(0, |level| level + 1) } else { 0 };
        let wrong = match base_of(&base.value, skip, &child.origin, self.context) {
            Ok(found) if self.visited.iter().any(|known| known.origin == found.origin && known.name == found.name) => {
                let chain: Vec<&str> = self.visited.iter().map(|known| known.name.as_str()).collect();
                Diagnostic::new("policies extend one another in a circle", "leads back").help(format!(
                    "the circle: {} -> {}",
                    chain.join(" -> "),
                    base.value
                ))
            }
            Ok(_) if self.visited.len() >= MAX_DEPTH => {
                Diagnostic::new(format!("more than {MAX_DEPTH} policies extend one another"), "one too many")
            }
            Ok(found) => return Ok(Some(found)),
            Err(PolicyError::NotFound { name, searched, likely }) => {
                let searched = format!("searched {}", searched.join(", "));
                let help = likely.map_or(searched, |likely| format!("did you mean `{likely}`?"));
                Diagnostic::new(format!("there is no policy `{name}` to extend"), "not found").help(help)
            }
            Err(error) => return Err(error),
        };
        self.problems.add(&base.span, wrong);
        Ok(None)
    }
}

fn base_of(name: &str, skip: usize, child: &Origin, context: &LookupContext) -> Result<PolicySource, PolicyError> {
    // What is compiled in extends only what is compiled in, so that no file changes it.
    if *child == Origin::Shipped { among_shipped(name, &[]) } else { by_name(name, context, skip) }
}

fn label(found: &PolicySource) -> String {
    match &found.origin {
        Origin::Shipped => format!("shipped policy {}", found.name),
        Origin::File(path) => path.display().to_string().chars().map(|c| if c.is_control() { '?' } else { c }).collect(),
    }
}

/// The hash of one text, or for several the hash of their hashes, one per line.
fn fingerprint(sources: &[Source]) -> String {
    let one = |bytes: &[u8]| stockade_protocol::text::hex(&Sha256::digest(bytes));
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
    let found = PolicySource {
        name: "./test.toml".to_owned(),
        origin: Origin::File(PathBuf::from("test.toml")),
        text: text.to_owned(),
        level: None,
    };
    resolve(found, &nowhere()).map(|resolved| resolved.policy)
}
