//! `stockade key`: makes keys of the service, lists them and checks their file.
//!
//! A token is printed once, to stdout, and never stored: the file has its hash. A table is added
//! whole or the file stays as it was. Files are read and written with the caller's rights: a caller of
//! sudo can neither read nor write root's keys.

mod file;

use std::{
    path::{Path, PathBuf},
    time::SystemTime,
};

use anyhow::bail;
use serde_json::json;
use stockade_engine::{
    lookup_context,
    service_key::{NewToken, new_token},
};
use stockade_policy::service::{Credential, Scope, ServiceError, ServiceKey, ServiceKeys, is_key_id, key_table};

use crate::{
    ExitCode, SANDBOX_ERROR, USAGE_ERROR,
    args::{Key, NewKey},
    output::{print_json, print_text, warn, words_of, write_out},
    policy,
};

/// Hexadecimal digits of a hash that a list has: enough to tell keys apart.
const HASH_DIGITS: usize = 12;

pub(crate) fn run(command: &Key) -> anyhow::Result<ExitCode> {
    match command {
        Key::New(new) => create(new),
        Key::Ls { file, json } => list(file.as_deref(), *json),
        Key::Check { file } => check(file.as_deref()),
    }
}

/// A file of this name that belongs to the service: root's, or this user's. `option` names another.
pub(crate) fn service_file(name: &str, option: &str) -> anyhow::Result<PathBuf> {
    let context = lookup_context();
    let directory = if context.privileged { Some(context.system_dir) } else { context.user_dir };
    // Both are a directory of policies, beside which the keys are.
    let Some(beside) = directory.as_deref().and_then(Path::parent) else {
        bail!("neither XDG_CONFIG_HOME nor HOME says where this user's {name} is; set one of them, or name a file with {option}");
    };
    Ok(beside.join(name))
}

fn path_of(file: Option<&Path>) -> anyhow::Result<PathBuf> {
    file.map_or_else(|| service_file("keys.toml", "--file"), |file| Ok(file.to_owned()))
}

/// Who can have written the keys beside root.
fn user() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// The keys, or what was said in place of them.
fn load(path: &Path) -> anyhow::Result<Option<ServiceKeys>> {
    match stockade_engine::with_callers_rights(|| ServiceKeys::load(path, user()))? {
        Ok(Some(keys)) => return Ok(Some(keys)),
        Ok(None) => warn(&format!("{} does not exist; `stockade key new ID --add` makes it", path.display())),
        Err(error) => warn(&words_of(&error.into())),
    }
    Ok(None)
}

fn create(new: &NewKey) -> anyhow::Result<ExitCode> {
    if !is_key_id(&new.id) {
        warn(&format!("stockade: {} cannot be the id of a key: 1 to 64 of a-z, 0-9, `.`, `_` and `-`", new.id));
        return Ok(ExitCode::from(USAGE_ERROR));
    }
    for name in &new.policies {
        if !(stockade_policy::is_policy_name(name) || name.starts_with('/')) {
            warn(&format!("stockade: {name} names no policy that a key can have: write its name, or the absolute path of its file"));
            return Ok(ExitCode::from(USAGE_ERROR));
        }
    }
    let path = path_of(new.file.as_deref())?;
    let made = new_token(&new.id)?;
    let scopes: Vec<Scope> = Scope::ALL.into_iter().filter(|scope| new.scopes.iter().any(|name| name == scope.name())).collect();
    let table = key_table(&new.id, &made.hash, &new.policies, &scopes);
    if new.add {
        return add(new, &path, &made, &table);
    }
    if let Err(error) = ServiceKeys::none(&path).with(&table) {
        warn(&error.to_string());
        return Ok(ExitCode::from(USAGE_ERROR));
    }
    write_out(format!("{}\n", made.token).as_bytes())?;
    warn(&format!("# for {}; the token is not kept, and cannot be shown again\n{table}", path.display()));
    Ok(ExitCode::SUCCESS)
}

/// Adds the table to the file, then prints the token: one that is printed is good.
fn add(new: &NewKey, path: &Path, made: &NewToken, table: &str) -> anyhow::Result<ExitCode> {
    // Before the policies: a caller of sudo without a right to the keys is told so.
    if let Err(error) = stockade_engine::with_callers_rights(|| ServiceKeys::load(path, user()))? {
        warn(&words_of(&error.into()));
        return Ok(ExitCode::FAILURE);
    }
    // A misspelled name would be found only when the service starts.
    if let Some(refusal) = new.policies.iter().find_map(|name| policy::load(name).err()) {
        warn(&refusal.message);
        return Ok(ExitCode::FAILURE);
    }
    let may_make_directory = new.file.is_none();
    let line = match stockade_engine::with_callers_rights(|| file::add(path, &new.id, table, user(), may_make_directory))? {
        Ok(line) => line,
        Err(error) if error.is::<ServiceError>() || error.is::<file::IdTaken>() => {
            warn(&words_of(&error));
            return Ok(ExitCode::FAILURE);
        }
        Err(error) => return Err(error),
    };
    if let Err(error) = write_out(format!("{}\n", made.token).as_bytes()) {
        let place = format!("{}:{line}", path.display());
        warn(&format!("stockade: the key {} was added to {place}, and its token is lost; remove it there: {error:#}", new.id));
        return Ok(ExitCode::from(SANDBOX_ERROR));
    }
    warn(&format!("stockade: added to {}:{line}; the token is not kept, and cannot be shown again", path.display()));
    Ok(ExitCode::SUCCESS)
}

fn list(file: Option<&Path>, json: bool) -> anyhow::Result<ExitCode> {
    let path = path_of(file)?;
    let Some(keys) = load(&path)? else { return Ok(ExitCode::FAILURE) };
    let now = SystemTime::now();
    if json {
        let keys: Vec<_> = keys.keys.iter().map(|key| key_as_json(key, now)).collect();
        print_json(&json!({ "schema": 1, "file": path.to_string_lossy(), "keys": keys }))?;
        return Ok(ExitCode::SUCCESS);
    }
    let heads = ["ID", "HASH OR UID", "POLICIES", "SCOPES", "EXPIRES"].map(String::from);
    let rows: Vec<[String; 5]> = std::iter::once(heads).chain(keys.keys.iter().map(|key| row(key, now))).collect();
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..4).map(width).collect();
    let line = |row: &[String; 5]| {
        let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:width$}  ")).collect::<String>();
        format!("{cells}{}", row[4])
    };
    print_text(&rows.iter().map(line).collect::<Vec<_>>().join("\n"))?;
    Ok(ExitCode::SUCCESS)
}

fn row(key: &ServiceKey, now: SystemTime) -> [String; 5] {
    let expires = match key.expires {
        None => "never".to_owned(),
        Some(at) if at <= now => format!("{} (expired)", time(at)),
        Some(at) => time(at),
    };
    [key.id.clone(), credential(key.credential), key.policies.join(","), scopes(key).join(","), expires]
}

fn key_as_json(key: &ServiceKey, now: SystemTime) -> serde_json::Value {
    let (hash, uid) = match key.credential {
        Credential::Hash(_) => (Some(credential(key.credential)), None),
        Credential::Uid(uid) => (None, Some(uid)),
    };
    json!({
        "id": key.id, "hash": hash, "uid": uid, "policies": key.policies, "scopes": scopes(key),
        "running": key.running, "waiting": key.waiting, "runs_per_minute": key.runs_per_minute,
        "cpu_per_hour_ms": key.cpu_per_hour, "weight": key.weight,
        "expires": key.expires.map(time), "expired": key.expires.is_some_and(|at| at <= now), "line": key.line,
    })
}

/// The beginning of the hash, or the uid.
fn credential(credential: Credential) -> String {
    let mut text = credential.to_string();
    if let Credential::Hash(_) = credential {
        text.truncate(stockade_policy::service::HASH_PREFIX.len() + HASH_DIGITS);
    }
    text
}

fn scopes(key: &ServiceKey) -> Vec<&'static str> {
    key.scopes.iter().copied().map(Scope::name).collect()
}

/// A moment in UTC. The file has whole seconds.
fn time(at: SystemTime) -> String {
    let text = stockade_audit::text::time(at);
    text.split_once('.').map_or(text.clone(), |(seconds, _)| format!("{seconds}Z"))
}

fn check(file: Option<&Path>) -> anyhow::Result<ExitCode> {
    let path = path_of(file)?;
    let Some(keys) = load(&path)? else { return Ok(ExitCode::FAILURE) };
    let mut code = ExitCode::SUCCESS;
    for key in &keys.keys {
        for name in &key.policies {
            if let Err(refusal) = policy::load(name) {
                warn(&format!("{}:{}: {}", path.display(), key.line, refusal.message));
                code = ExitCode::FAILURE;
            }
        }
    }
    if code == ExitCode::SUCCESS {
        let count = keys.keys.len();
        print_text(&format!("{}: ok ({count} key{})", path.display(), if count == 1 { "" } else { "s" }))?;
    }
    Ok(code)
}
