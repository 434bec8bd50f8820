//! Controls outside the sandbox: the same probe as the launching user, or as root of
//! throw-away namespaces.
//!
//! Nothing of the host is changed: scripts for the host look only, and what changes
//! something does so in namespaces that end with the probe.

use std::{
    io::{Read, Write},
    process::{Child, Command, Stdio},
};

use rustix::{
    fd::{AsRawFd, OwnedFd},
    fs::{MemfdFlags, memfd_create},
};
use stockade_protocol::probe::{Answer, Batch, Script, decode_answers};

use crate::{
    PROBE,
    attack::ControlHost,
    error::{ProveError, failed},
    script::{Builder, n, script},
};

/// The probe as a program of the host.
pub(crate) struct Outside {
    program: OwnedFd,
    uid: u32,
}

impl Outside {
    /// Puts it into a memory file, so that nothing is left on disk.
    pub(crate) fn new() -> Result<Self, ProveError> {
        let failed = failed("make the probe for the controls");
        let program = memfd_create(c"stockade-probe", MemfdFlags::CLOEXEC).map_err(|errno| failed(errno.into()))?;
        let mut file = std::fs::File::from(program);
        file.write_all(PROBE).map_err(failed)?;
        Ok(Outside { program: file.into(), uid: rustix::process::geteuid().as_raw() })
    }

    /// The scripts' answers there; `None` where the probe gave none.
    pub(crate) fn answers(&self, place: ControlHost, scripts: &[Script]) -> Vec<Option<Answer>> {
        let together = match place {
            ControlHost::Host => self.ask(Script::default(), scripts),
            // Root drops to an ordinary user first, where the host allows user namespaces to one.
            ControlHost::OwnNamespaces => {
                self.ask(namespaces(self.uid, true), scripts).or_else(|| self.ask(namespaces(self.uid, false), scripts))
            }
        };
        match together {
            Some(answers) => answers.into_iter().map(Some).collect(),
            // One of them ended the probe itself: halving finds it.
            None if scripts.len() > 1 => {
                let (left, right) = scripts.split_at(scripts.len() / 2);
                [self.answers(place, left), self.answers(place, right)].concat()
            }
            None => vec![None; scripts.len()],
        }
    }

    /// Starts the probe. It reads its input to the end first, and prints nothing for an empty
    /// one.
    pub(crate) fn start(&self) -> std::io::Result<Child> {
        let mut command = Command::new(format!("/proc/self/fd/{}", self.program.as_raw_fd()));
        command.current_dir("/").stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        command.spawn()
    }

    fn ask(&self, prelude: Script, scripts: &[Script]) -> Option<Vec<Answer>> {
        let nonce = crate::nonce().ok()?;
        let has_prelude = !prelude.ops.is_empty();
        let batch = Batch { nonce, prelude, timeout_s: crate::SCRIPT_TIMEOUT_S, scripts: scripts.to_vec() };
        let mut child = self.start().ok()?;
        let sent = child.stdin.take().map(|mut stdin| stdin.write_all(&batch.encode()));
        let mut printed = Vec::new();
        let read = child.stdout.take().map(|stdout| stdout.take(MAX_ANSWER_BYTES).read_to_end(&mut printed));
        let ended = child.wait();
        if !matches!((sent, read, ended), (Some(Ok(())), Some(Ok(_)), Ok(_))) {
            return None;
        }
        let answers = decode_answers(&printed, nonce, scripts.len()).ok()?;
        let unprepared =
            has_prelude && answers.len() > 1 && answers.windows(2).all(|pair| matches!(pair, [a @ Answer::Broken { .. }, b] if a == b));
        (!unprepared).then_some(answers)
    }
}

const MAX_ANSWER_BYTES: u64 = 1 << 20;

/// Makes throw-away namespaces and becomes root in them.
fn namespaces(uid: u32, drop: bool) -> Script {
    const NEW: i64 = 0x1000_0000 | 0x2_0000 | 0x2000_0000 | 0x4000_0000 | 0x400_0000 | 0x800_0000 | 0x200_0000;
    const NOBODY: i64 = 65534;
    let (mut outside, mut group) = (i64::from(uid), i64::from(rustix::process::getegid().as_raw()));
    script(|b| {
        if uid == 0 && drop {
            b.need("setgroups", &[n(0), n(0)]);
            b.need("setresgid", &[n(NOBODY), n(NOBODY), n(NOBODY)]);
            b.need("setresuid", &[n(NOBODY), n(NOBODY), n(NOBODY)]);
            // The change of ids made this process undumpable: it could not write its own maps.
            b.need("prctl", &[n(4), n(1)]);
            (outside, group) = (NOBODY, NOBODY);
        }
        b.need("unshare", &[n(NEW)]);
        write(b, "/proc/self/setgroups", "deny");
        write(b, "/proc/self/uid_map", &format!("0 {outside} 1"));
        write(b, "/proc/self/gid_map", &format!("0 {group} 1"));
        let (none, root) = (b.text("none"), b.text("/"));
        const REC_PRIVATE: i64 = 0x4000 | 0x4_0000;
        b.need("mount", &[none, root, n(0), n(REC_PRIVATE), n(0)]);
        b.descend();
    })
}

fn write(b: &mut Builder, path: &str, text: &str) {
    let fd = b.open(path, 1);
    let bytes = b.bytes(text.as_bytes());
    b.need("write", &[fd, bytes, n(i64::try_from(text.len()).unwrap_or(0))]);
    b.need("close", &[fd]);
}
