//! Requests that wait for approval, as files in the launching user's registry.
//!
//! A token's files are named by its hash, so that reading them reveals no token: `.held` has
//! the request, `.shown` the text for approvers, `.approved` the approver. Using a token renames
//! `.held` to `.used`, which succeeds for one process only. Files of an earlier boot are
//! ignored, and times are those of CLOCK_BOOTTIME, so setting the clock has no effect. Only
//! its owner may enter the registry's directory, which is checked when it is opened. This does
//! not protect against a process with the owner's rights: it can approve anything.

use std::{
    fs::{File, OpenOptions},
    io::{self, ErrorKind, Read, Write},
    os::unix::fs::{MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use rustix::{
    fs::OFlags,
    time::{ClockId, clock_gettime},
};
use serde::{Deserialize, Serialize};
use stockade_policy::approver::Approver;

use super::{ApprovalError, ApprovalView, hash_of_token};
use crate::{
    Refusal,
    admit::random_bytes,
    caller::Identity,
    facts::{self, HostError},
};

/// How many requests of one caller may wait.
pub(super) const MAX_HELD: usize = 16;
/// How many used tokens of one caller are remembered, to tell them from unknown ones.
const MAX_USED: usize = 64;
/// For how long an expired token is remembered, to tell it from an unknown one.
const REMEMBERED_MS: u64 = 5 * 60 * 1000;
/// For how long a file that cannot be parsed counts as one that is being written.
const UNFINISHED: Duration = Duration::from_secs(3600);
/// How many bytes of a file are read.
const MAX_FILE: u64 = 1 << 20;
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

    pub(super) fn parse(text: &str) -> Result<Self, ApprovalError> {
        if text.len() == 32 && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f')) {
            return Ok(Token(text.to_owned()));
        }
        Err(ApprovalError::Malformed)
    }

    pub(super) fn text(&self) -> &str {
        &self.0
    }

    pub(super) fn sha256(&self) -> String {
        hash_of_token(&self.0)
    }
}

/// The request that a token stands for.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct HeldRequest {
    pub(super) boot: String,
    /// Milliseconds of CLOCK_BOOTTIME.
    pub(super) until_ms: u64,
    pub(super) requester: u32,
    pub(super) request: String,
    pub(super) policy: String,
    pub(super) scratch: String,
    pub(super) approvers: Vec<Approver>,
}

impl HeldRequest {
    /// A request that expires after `time_ms`.
    pub(super) fn for_time(time_ms: u64) -> Result<Self, Refusal> {
        Ok(HeldRequest { boot: boot()?, until_ms: now_ms() + time_ms, ..HeldRequest::default() })
    }

    /// `None` once it has expired.
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
    const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
    let id = facts::small_file(BOOT_ID)?;
    match id.trim() {
        "" => Err(HostError::NoProc(BOOT_ID).into()),
        id => Ok(id.to_owned()),
    }
}

/// The state of a token.
pub(super) enum FoundToken {
    Held(HeldRequest),
    Used(HeldRequest),
    None,
}

/// The registry directory with the files.
pub(super) struct Store {
    directory: PathBuf,
    /// How many requests of this caller wait.
    waiting: usize,
}

fn failed(attempt: &'static str, path: &Path) -> impl Fn(io::Error) -> ApprovalError {
    move |error| ApprovalError::NotKept { attempt, path: path.to_path_buf(), error }
}

impl Store {
    /// Opens the launching user's store and removes expired files.
    pub(super) fn open(identity: &Identity) -> Result<Self, Refusal> {
        let mut store = Store { directory: facts::registry(identity)?.directory().to_path_buf(), waiting: 0 };
        store.waiting = store.sweep(identity.caller.uid)?;
        Ok(store)
    }

    fn path(&self, token: &Token, ending: &str) -> PathBuf {
        self.directory.join(format!("{PREFIX}{}.{ending}", token.sha256()))
    }

    fn read(&self, path: &Path) -> io::Result<Option<Vec<u8>>> {
        let opened = OpenOptions::new().read(true).custom_flags((OFlags::NOFOLLOW | OFlags::NONBLOCK).bits().cast_signed()).open(path);
        match opened {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            opened => {
                let mut bytes = Vec::new();
                opened?.take(MAX_FILE).read_to_end(&mut bytes)?;
                Ok(Some(bytes))
            }
        }
    }

    fn held(&self, path: &Path) -> Result<Option<HeldRequest>, ApprovalError> {
        let bytes = self.read(path).map_err(failed("read", path))?;
        Ok(bytes.and_then(|bytes| serde_json::from_slice(&bytes).ok()))
    }

    /// Creates a new file; removes it again where it cannot be written whole.
    fn make(&self, path: &Path, bytes: &[u8]) -> Result<(), ApprovalError> {
        let flags = OFlags::NOFOLLOW.bits().cast_signed();
        let made = OpenOptions::new().write(true).create_new(true).mode(0o600).custom_flags(flags).open(path);
        let written = made.and_then(|mut file: File| {
            file.write_all(bytes).inspect_err(|_| {
                // On a full disk the partial file could not be parsed.
                let _swept_later = std::fs::remove_file(path);
            })
        });
        written.map_err(failed("write", path))
    }

    /// Stores a waiting request and returns its token.
    pub(super) fn hold(&self, held: &HeldRequest, shown: Option<&str>) -> Result<Token, Refusal> {
        if self.waiting >= MAX_HELD {
            return Err(ApprovalError::TooMany.into());
        }
        let token = Token::new()?;
        let line = serde_json::to_vec(held).map_err(|error| failed("write", &self.directory)(error.into()))?;
        self.make(&self.path(&token, "held"), &line)?;
        if let Some(shown) = shown {
            self.make(&self.path(&token, "shown"), shown.as_bytes()).inspect_err(|_| {
                let _swept_later = std::fs::remove_file(self.path(&token, "held"));
            })?;
        }
        Ok(token)
    }

    pub(super) fn find(&self, token: &Token) -> Result<FoundToken, Refusal> {
        let this_boot = boot()?;
        for (ending, found) in [("held", FoundToken::Held as fn(HeldRequest) -> FoundToken), ("used", FoundToken::Used)] {
            if let Some(held) = self.held(&self.path(token, ending))?.filter(|held| held.boot == this_boot) {
                return Ok(found(held));
            }
        }
        Ok(FoundToken::None)
    }

    /// Marks a token as used; `false` where no request waits under it any more.
    pub(super) fn claim(&self, token: &Token) -> Result<bool, ApprovalError> {
        let held = self.path(token, "held");
        match std::fs::rename(&held, self.path(token, "used")) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(false),
            renamed => renamed.map_err(failed("use up", &held))?,
        }
        self.forget(&self.path(token, "shown"));
        self.forget(&self.path(token, "approved"));
        Ok(true)
    }

    /// Makes a used token wait again.
    pub(super) fn give_back(&self, token: &Token) -> Result<(), ApprovalError> {
        let used = self.path(token, "used");
        std::fs::rename(&used, self.path(token, "held")).map_err(failed("give back", &used))
    }

    /// The uid that has approved it.
    pub(super) fn approver(&self, token: &Token) -> Result<Option<u32>, ApprovalError> {
        let path = self.path(token, "approved");
        let bytes = self.read(&path).map_err(failed("read", &path))?;
        Ok(bytes.and_then(|bytes| serde_json::from_slice(&bytes).ok()))
    }

    /// Stores the approver, unless it is approved already.
    pub(super) fn approve(&self, token: &Token, approver: u32) -> Result<(), ApprovalError> {
        let path = self.path(token, "approved");
        self.make(&path, approver.to_string().as_bytes()).or_else(|error| match self.approver(token)? {
            Some(_) => Ok(()),
            None => Err(error),
        })
    }

    pub(super) fn shown(&self, token: &Token) -> Result<ApprovalView, ApprovalError> {
        let path = self.path(token, "shown");
        let bytes = self.read(&path).map_err(failed("read", &path))?.unwrap_or_default();
        serde_json::from_slice(&bytes).map_err(|error| failed("read", &path)(error.into()))
    }

    fn forget(&self, path: &Path) {
        // `sweep` removes it later; without `.held` it has no effect.
        let _swept_later = std::fs::remove_file(path);
    }

    /// Removes expired files; returns how many requests of this caller wait.
    fn sweep(&self, requester: u32) -> Result<usize, Refusal> {
        let entries = std::fs::read_dir(&self.directory).map_err(failed("read", &self.directory))?;
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
                    if own && ending == "used" && used > MAX_USED {
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

/// Whether another process may still be writing a file.
fn is_unfinished(path: &Path) -> bool {
    let since = |metadata: std::fs::Metadata| {
        let changed = SystemTime::UNIX_EPOCH + Duration::from_secs(u64::try_from(metadata.mtime()).unwrap_or(0));
        SystemTime::now().duration_since(changed).unwrap_or_default()
    };
    path.symlink_metadata().is_ok_and(|metadata| since(metadata) < UNFINISHED)
}
