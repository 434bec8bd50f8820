//! Controls outside the sandbox: the same probe as whoever launches, or as root of
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
use stockade_runtime::Refusal;

use crate::{
    PROBE,
    attack::Place,
    script::{Builder, n, script},
};

/// The probe as a program of the host.
pub(crate) struct Outside {
    program: OwnedFd,
    uid: u32,
}

impl Outside {
    /// Makes it: a file without a name, so that nothing is left.
    pub(crate) fn new() -> Result<Self, Refusal> {
        let failed = |error: std::io::Error| Refusal::sandbox_error("prover", format!("make the probe for the controls: {error}"));
        let program = memfd_create(c"stockade-probe", MemfdFlags::CLOEXEC).map_err(|errno| failed(errno.into()))?;
        let mut file = std::fs::File::from(program);
        file.write_all(PROBE).map_err(failed)?;
        Ok(Outside { program: file.into(), uid: rustix::process::geteuid().as_raw() })
    }

    /// What the scripts come to there; none where the probe did not answer.
    pub(crate) fn answers(&self, place: Place, scripts: &[Script]) -> Vec<Option<Answer>> {
        let together = match place {
            Place::Host => self.ask(Script::default(), scripts),
            // Root's own namespaces are an ordinary user's, where the host lets it.
            Place::Own => self.ask(namespaces(self.uid, true), scripts).or_else(|| self.ask(namespaces(self.uid, false), scripts)),
        };
        match together {
            Some(answers) => answers.into_iter().map(Some).collect(),
            // One of them has ended the probe itself.
            None if scripts.len() > 1 => {
                let (left, right) = scripts.split_at(scripts.len() / 2);
                [self.answers(place, left), self.answers(place, right)].concat()
            }
            None => vec![None; scripts.len()],
        }
    }

    /// Starts it. It reads to the end before it does anything, and says nothing if that is
    /// all there is.
    pub(crate) fn start(&self) -> std::io::Result<Child> {
        let mut command = Command::new(format!("/proc/self/fd/{}", self.program.as_raw_fd()));
        command.current_dir("/").stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        command.spawn()
    }

    fn ask(&self, prelude: Script, scripts: &[Script]) -> Option<Vec<Answer>> {
        let nonce = crate::nonce().ok()?;
        let has_prelude = !prelude.ops.is_empty();
        let batch = Batch { nonce, prelude, patience_s: crate::PATIENCE_S, scripts: scripts.to_vec() };
        let mut child = self.start().ok()?;
        let sent = child.stdin.take().map(|mut stdin| stdin.write_all(&batch.encode()));
        let mut said = Vec::new();
        let heard = child.stdout.take().map(|stdout| stdout.take(MOST).read_to_end(&mut said));
        let ended = child.wait();
        if !matches!((sent, heard, ended), (Some(Ok(())), Some(Ok(_)), Ok(_))) {
            return None;
        }
        let answers = decode_answers(&said, nonce, scripts.len()).ok()?;
        let unprepared =
            has_prelude && answers.len() > 1 && answers.windows(2).all(|pair| matches!(pair, [a @ Answer::Broken { .. }, b] if a == b));
        (!unprepared).then_some(answers)
    }
}

const MOST: u64 = 1 << 20;

/// Throw-away namespaces, as root of them.
fn namespaces(uid: u32, drop: bool) -> Script {
    const NEW: i64 = 0x1000_0000 | 0x2_0000 | 0x2000_0000 | 0x4000_0000 | 0x400_0000 | 0x800_0000 | 0x200_0000;
    const NOBODY: i64 = 65534;
    let (mut outside, mut group) = (i64::from(uid), i64::from(rustix::process::getegid().as_raw()));
    script(|b| {
        if uid == 0 && drop {
            b.need("setgroups", &[n(0), n(0)]);
            b.need("setresgid", &[n(NOBODY), n(NOBODY), n(NOBODY)]);
            b.need("setresuid", &[n(NOBODY), n(NOBODY), n(NOBODY)]);
            // The change of ids has made this process opaque, also to itself.
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
