//! What waits for approval, as files in the registry of whoever launches.
//!
//! A token's files are named by its hash, so that reading them gives no token away:
//! `.held` says what it is for, `.shown` what approvers see, `.approved` who has approved.
//! Using it up renames `.held` to `.used`, which one of several can do. Nothing here outlives
//! the boot that it was made in, and its time is the kernel's CLOCK_BOOTTIME: setting the
//! clock changes nothing. The registry's directory is its owner's alone, which is checked
//! when it is opened; whoever has that owner's rights can approve anything.

use std::{
    fs::{File, OpenOptions},
    io::{self, ErrorKind, Read, Write},
    os::unix::fs::{MetadataExt, OpenOptionsExt},
    path::PathBuf,
    time::{Duration, SystemTime},
};

use rustix::{
    fs::OFlags,
    time::{ClockId, clock_gettime},
};
use serde::{Deserialize, Serialize};
use stockade_policy::approver::Approver;

use super::{Shown, hash_of_token};
use crate::{Refusal, admit::random_bytes, caller::Identity, facts};

/// How much may wait for one caller.
const MOST_HELD: usize = 16;
/// How many used tokens of one caller are told apart from ones that never were.
const MOST_USED: usize = 64;
/// For how long a token is told apart from one that never was, once it is past.
const REMEMBERED_MS: u64 = 5 * 60 * 1000;
/// For how long a file that says nothing is taken for one that is being written.
const UNFINISHED: Duration = Duration::from_secs(3600);
/// The largest file.
const LARGEST: u64 = 1 << 20;
const PREFIX: &str = "approval-";

/// 128 random bits as hex digits.
#[derive(Debug)]
pub(super) struct Token(String);

impl Token {
    fn new() -> Result<Self, Refusal> {
        let mut bits = [0; 16];
        random_bytes(&mut bits)?;
        Ok(Token(format!("{:032x}", u128::from_ne_bytes(bits))))
    }

    pub(super) fn parse(text: &str) -> Result<Self, Refusal> {
        if text.len() == 32 && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f')) {
            return Ok(Token(text.to_owned()));
        }
        Err(Refusal::bad_request(
            "approval_malformed",
            "approve: a token has 32 hexadecimal digits, as `approval.token` of a result has them",
        ))
    }

    pub(super) fn text(&self) -> &str {
        &self.0
    }

    pub(super) fn sha256(&self) -> String {
        hash_of_token(&self.0)
    }
}

/// What a token is for.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Held {
    pub(super) boot: String,
    /// By CLOCK_BOOTTIME.
    pub(super) until_ms: u64,
    pub(super) requester: u32,
    pub(super) request: String,
    pub(super) policy: String,
    pub(super) scratch: String,
    pub(super) approvers: Vec<Approver>,
}

impl Held {
    /// One that waits for so long from now.
    pub(super) fn for_time(time_ms: u64) -> Result<Self, Refusal> {
        Ok(Held { boot: boot()?, until_ms: now_ms() + time_ms, ..Held::default() })
    }

    /// None: its time is over.
    pub(super) fn seconds_left(&self) -> Result<Option<u64>, Refusal> {
        let left = self.until_ms.saturating_sub(now_ms());
        Ok((left > 0 && self.boot == boot()?).then_some(left.div_ceil(1000)))
    }
}

fn now_ms() -> u64 {
    let now = clock_gettime(ClockId::Boottime);
    let part = |number: i64| u64::try_from(number).unwrap_or(0);
    part(now.tv_sec) * 1000 + part(now.tv_nsec) / 1_000_000
}

fn boot() -> Result<String, Refusal> {
    let id = facts::small_file("/proc/sys/kernel/random/boot_id")?;
    match id.trim() {
        "" => Err(Refusal::sandbox_error("no_proc", "/proc/sys/kernel/random/boot_id cannot be read; mount proc on /proc")),
        id => Ok(id.to_owned()),
    }
}

/// What is known of a token.
pub(super) enum Found {
    Held(Held),
    Used(Held),
    None,
}

/// The files.
pub(super) struct Store {
    directory: PathBuf,
    /// How much of this caller's waits.
    waiting: usize,
}

fn failed(attempt: &str, path: &std::path::Path, error: &io::Error) -> Refusal {
    let why = format!("cannot {attempt} {}: {error}; nothing was approved", path.display());
    Refusal::sandbox_error("approval_not_kept", why)
}

impl Store {
    /// That of whoever launches, without what is past.
    pub(super) fn open(identity: &Identity) -> Result<Self, Refusal> {
        let mut store = Store { directory: facts::registry(identity)?.directory().to_path_buf(), waiting: 0 };
        store.waiting = store.sweep(identity.caller.uid)?;
        Ok(store)
    }

    fn path(&self, token: &Token, ending: &str) -> PathBuf {
        self.directory.join(format!("{PREFIX}{}.{ending}", token.sha256()))
    }

    fn read(&self, path: &std::path::Path) -> io::Result<Option<Vec<u8>>> {
        let opened = OpenOptions::new().read(true).custom_flags((OFlags::NOFOLLOW | OFlags::NONBLOCK).bits().cast_signed()).open(path);
        match opened {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            opened => {
                let mut bytes = Vec::new();
                opened?.take(LARGEST).read_to_end(&mut bytes)?;
                Ok(Some(bytes))
            }
        }
    }

    fn held(&self, path: &std::path::Path) -> Result<Option<Held>, Refusal> {
        let bytes = self.read(path).map_err(|error| failed("read", path, &error))?;
        Ok(bytes.and_then(|bytes| serde_json::from_slice(&bytes).ok()))
    }

    /// Makes a file that was not there, whole or not at all.
    fn make(&self, path: &std::path::Path, bytes: &[u8]) -> Result<(), Refusal> {
        let flags = OFlags::NOFOLLOW.bits().cast_signed();
        let made = OpenOptions::new().write(true).create_new(true).mode(0o600).custom_flags(flags).open(path);
        let written = made.and_then(|mut file: File| {
            file.write_all(bytes).inspect_err(|_| {
                // A full disk: what is left of it would say nothing.
                let _swept_later = std::fs::remove_file(path);
            })
        });
        written.map_err(|error| failed("write", path, &error))
    }

    /// Keeps what waits, and gives it a token.
    pub(super) fn hold(&self, held: &Held, shown: Option<&str>) -> Result<Token, Refusal> {
        if self.waiting >= MOST_HELD {
            let why =
                format!("{MOST_HELD} requests of yours wait for approval already; have them approved, or wait until their time is over");
            return Err(Refusal::bad_request("too_many_approvals", why));
        }
        let token = Token::new()?;
        let line = serde_json::to_vec(held).map_err(|error| failed("write", &self.directory, &error.into()))?;
        self.make(&self.path(&token, "held"), &line)?;
        if let Some(shown) = shown {
            self.make(&self.path(&token, "shown"), shown.as_bytes()).inspect_err(|_| {
                let _swept_later = std::fs::remove_file(self.path(&token, "held"));
            })?;
        }
        Ok(token)
    }

    pub(super) fn find(&self, token: &Token) -> Result<Found, Refusal> {
        let this_boot = boot()?;
        for (ending, found) in [("held", Found::Held as fn(Held) -> Found), ("used", Found::Used)] {
            if let Some(held) = self.held(&self.path(token, ending))?.filter(|held| held.boot == this_boot) {
                return Ok(found(held));
            }
        }
        Ok(Found::None)
    }

    /// Uses a token up; false: it has been.
    pub(super) fn claim(&self, token: &Token) -> Result<bool, Refusal> {
        let held = self.path(token, "held");
        match std::fs::rename(&held, self.path(token, "used")) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(false),
            renamed => renamed.map_err(|error| failed("use up", &held, &error))?,
        }
        self.forget(&self.path(token, "shown"));
        self.forget(&self.path(token, "approved"));
        Ok(true)
    }

    /// Whoever has approved it.
    pub(super) fn approver(&self, token: &Token) -> Result<Option<u32>, Refusal> {
        let path = self.path(token, "approved");
        let bytes = self.read(&path).map_err(|error| failed("read", &path, &error))?;
        Ok(bytes.and_then(|bytes| serde_json::from_slice(&bytes).ok()))
    }

    /// Notes who approves it, if nobody has.
    pub(super) fn approve(&self, token: &Token, approver: u32) -> Result<(), Refusal> {
        let path = self.path(token, "approved");
        self.make(&path, approver.to_string().as_bytes()).or_else(|refusal| match self.approver(token)? {
            Some(_) => Ok(()),
            None => Err(refusal),
        })
    }

    pub(super) fn shown(&self, token: &Token) -> Result<Shown, Refusal> {
        let path = self.path(token, "shown");
        let bytes = self.read(&path).map_err(|error| failed("read", &path, &error))?.unwrap_or_default();
        serde_json::from_slice(&bytes).map_err(|error| failed("read", &path, &error.into()))
    }

    fn forget(&self, path: &std::path::Path) {
        // What stays is swept with the rest, and says nothing alone.
        let _swept_later = std::fs::remove_file(path);
    }

    /// Removes what is past; says how much waits for this caller.
    fn sweep(&self, requester: u32) -> Result<usize, Refusal> {
        let entries = std::fs::read_dir(&self.directory).map_err(|error| failed("read", &self.directory, &error))?;
        let (this_boot, now) = (boot()?, now_ms());
        let (mut waiting, mut used) = (0, 0);
        for path in entries.flatten().map(|entry| entry.path()) {
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            let Some((hash, ending)) = name.strip_prefix(PREFIX).and_then(|name| name.split_once('.')) else { continue };
            if !matches!(ending, "held" | "used") {
                let held = self.directory.join(format!("{PREFIX}{hash}.held"));
                if !held.exists() {
                    self.forget(&path);
                }
                continue;
            }
            match self.held(&path).unwrap_or_default() {
                Some(held) if held.boot == this_boot && held.until_ms + REMEMBERED_MS > now => {
                    let own = held.requester == requester;
                    waiting += usize::from(own && ending == "held" && held.until_ms > now);
                    used += usize::from(own && ending == "used");
                    if own && ending == "used" && used > MOST_USED {
                        self.forget(&path);
                    }
                    if held.until_ms <= now {
                        self.forget(&self.directory.join(format!("{PREFIX}{hash}.shown")));
                    }
                }
                Some(_) => self.forget(&path),
                None if is_unfinished(&path) => {}
                None => self.forget(&path),
            }
        }
        Ok(waiting)
    }
}

/// Whether somebody may still be writing a file.
fn is_unfinished(path: &std::path::Path) -> bool {
    let since = |metadata: std::fs::Metadata| {
        let changed = SystemTime::UNIX_EPOCH + Duration::from_secs(u64::try_from(metadata.mtime()).unwrap_or(0));
        SystemTime::now().duration_since(changed).unwrap_or_default()
    };
    path.symlink_metadata().is_ok_and(|metadata| since(metadata) < UNFINISHED)
}
