//! What attacks are aimed at: files, sockets and a process of the host that a sandbox must
//! not reach, made for one proof and removed after it.
//!
//! They lie in a directory that no other user of the host can enter, so no other user can
//! make an attack seem to succeed or a control seem to fail.

use std::{
    fs::{DirBuilder, File, Permissions, set_permissions},
    io::{self, Write},
    net::{Ipv6Addr, TcpListener, UdpSocket},
    os::{
        linux::net::SocketAddrExt,
        unix::{
            fs::{DirBuilderExt, PermissionsExt, chown, symlink},
            net::{SocketAddr, UnixListener},
        },
    },
    path::{Path, PathBuf},
};

use stockade_engine::{LoadedPolicy, Refusal, tempdir::TempDir};
use stockade_policy::{
    filter::{Action, Rules},
    model::Policy,
    plan::{Plan, RootEntry},
};
use stockade_protocol::{LimitKey, Receipt, probe::Answer};

use crate::{
    attack::ControlHost,
    error::{ProveError, failed},
    guarded::{GuardedFile, hidden_files, read_only_files},
    outside::Outside,
    script::{n, one},
    target::Target,
};

/// Owns a scratch where root launches for itself: one of root's is refused.
const NOBODY: u32 = 65534;

/// The targets of one proof, and what is known of the sandbox that attacks them.
pub(crate) struct Fixture {
    /// The policy, as the attacks have it.
    pub(crate) policy: Policy,
    /// The processes that the policy itself allows: the attacks may have more.
    pub(crate) processes: Option<u64>,
    /// The plan of an attack's run.
    pub(crate) plan: Plan,
    /// What was in force in it.
    pub(crate) receipt: Receipt,
    /// What the filter does.
    pub(crate) rules: Rules,
    /// A directory of the host, outside every sandbox.
    pub(crate) directory: PathBuf,
    /// A host scratch in a directory of the caller's.
    pub(crate) scratch: PathBuf,
    /// Files of it that the policy's globs keep read-only.
    pub(crate) read_only: Vec<GuardedFile>,
    /// Files of it that the policy's globs hide.
    pub(crate) hidden: Vec<GuardedFile>,
    /// The text of the secret file; it occurs nowhere else on this host.
    pub(crate) secret: String,
    /// The port of a listener on the host's loopback, TCP and UDP.
    pub(crate) port: u16,
    /// The name of an abstract socket of the host.
    pub(crate) abstract_name: String,
    /// The host's name.
    pub(crate) host_name: String,
    /// The process that attacks on the launcher are aimed at, by its id on the host.
    pub(crate) target: Target,
    /// The number of the session keyring that this process was started with, if any.
    pub(crate) session_keyring: Option<i64>,
    /// The uid of the launcher and its controls.
    pub(crate) uid: u32,
    aside: TempDir,
    listeners: (TcpListener, Option<TcpListener>, UdpSocket, UnixListener, UnixListener),
}

impl Fixture {
    /// Makes it.
    pub(crate) fn new(loaded: &LoadedPolicy, plan: Plan, receipt: Receipt, outside: &Outside) -> Result<Self, Refusal> {
        let rules = Rules::new(&loaded.policy.seccomp, plan.scratch.host && !plan.scratch.read_only).map_err(ProveError::from)?;
        let nonce = crate::nonce()?;
        let uid = rustix::process::geteuid().as_raw();
        let aside = TempDir::new(nonce)?;
        let (directory, callers) = (aside.path().join(HOST), aside.path().join("callers"));
        let scratch = callers.join("scratch");
        for path in [&directory, &callers, &scratch] {
            DirBuilder::new().mode(0o700).create(path).map_err(failed("make a directory for the attacks"))?;
        }
        // Open to every id that a run can have, below a directory that is closed.
        set_permissions(&scratch, Permissions::from_mode(0o777)).map_err(failed("open the scratch"))?;
        let secret = format!("canary-{nonce:016x}");
        write_new(&directory.join(SECRET), &secret).map_err(failed("write the secret file"))?;
        let mut given = vec![callers.clone(), scratch.clone()];
        let mut write = |name: &str, text: &str| write_below(&scratch, name, text).map(|made| given.extend(made));
        write(".env", &secret).map_err(failed("write the secret file"))?;
        // A glob may want a directory where another wants a file; it is not attacked then.
        let (mut read_only, mut hidden) = (read_only_files(&loaded.policy), hidden_files(&loaded.policy));
        [&mut read_only, &mut hidden].into_iter().for_each(|files| files.retain(|file| write(&file.name, &secret).is_ok()));
        for index in 0..SCRATCH_VICTIMS {
            write(&scratch_victim(index), "victim").map_err(failed("write a file of the scratch"))?;
        }
        symlink(format!("../../{HOST}/{SECRET}"), scratch.join("link-to-secret")).map_err(failed("make a link"))?;
        if uid == 0 {
            let owner = plan_owner();
            for path in &given {
                chown(path, Some(owner.0), Some(owner.1)).map_err(failed("give the scratch away"))?;
            }
        }
        let tcp = TcpListener::bind("127.0.0.1:0").map_err(failed("listen on the host's loopback"))?;
        let port = tcp.local_addr().map_err(failed("listen on the host's loopback"))?.port();
        let tcp6 = TcpListener::bind((Ipv6Addr::LOCALHOST, port)).ok();
        let udp = UdpSocket::bind(("127.0.0.1", port)).map_err(failed("listen on the host's loopback"))?;
        let abstract_name = format!("stockade-prove-{nonce:016x}");
        let address = SocketAddr::from_abstract_name(&abstract_name).map_err(failed("name an abstract socket"))?;
        let unnamed = UnixListener::bind_addr(&address).map_err(failed("listen on an abstract socket"))?;
        let named = UnixListener::bind(directory.join(SOCKET)).map_err(failed("listen on a socket of the host"))?;
        Ok(Fixture {
            policy: loaded.policy.clone(),
            processes: loaded.policy.limits.get(LimitKey::Processes),
            plan,
            receipt,
            rules,
            scratch,
            read_only,
            hidden,
            directory,
            secret,
            port,
            abstract_name,
            host_name: rustix::system::uname().nodename().to_string_lossy().into_owned(),
            target: Target::new(outside)?,
            session_keyring: session_keyring(outside),
            uid,
            aside,
            listeners: (tcp, tcp6, udp, unnamed, named),
        })
    }

    /// The owner of a host scratch.
    pub(crate) fn scratch_owner(&self) -> u32 {
        if self.uid == 0 { plan_owner().0 } else { self.uid }
    }

    /// The secret file's path on the host.
    pub(crate) fn secret_path(&self) -> String {
        self.path(SECRET)
    }

    /// Removes everything that was made; returns what could not be removed.
    pub(crate) fn remove(self) -> Option<String> {
        self.aside.remove().err().map(|refusal| format!("{refusal}; the next start of stockade tries again"))
    }

    /// A path of the host in the attacks' directory.
    pub(crate) fn path(&self, name: &str) -> String {
        self.directory.join(name).to_string_lossy().into_owned()
    }

    /// A socket of the host, by its path.
    pub(crate) fn socket_path(&self) -> String {
        self.path(SOCKET)
    }

    /// Whether the host has the listener over IPv6 too.
    pub(crate) fn has_ipv6(&self) -> bool {
        self.listeners.1.is_some()
    }

    /// Whether the sandbox has a file at this path, private or the host's.
    pub(crate) fn has(&self, path: &str) -> bool {
        let path = Path::new(path);
        let at = |target: &Path| Path::new("/").join(target);
        let entries = self.plan.root.iter().any(|entry| match entry {
            // In the place of something that is bound.
            RootEntry::Cover { .. } => false,
            RootEntry::Bind { target, .. } | RootEntry::Placed { target, .. } | RootEntry::Tree { target, .. } => {
                path.starts_with(at(target)) || at(target).starts_with(path)
            }
            RootEntry::Image { layers, .. } => {
                let below = path.strip_prefix("/").unwrap_or(path);
                layers.iter().any(|layer| layer.join(below).symlink_metadata().is_ok())
            }
            // Where /bin is a link into what is bound.
            RootEntry::Link { target, .. } => path.starts_with(at(target)),
            RootEntry::Directory { target, .. }
            | RootEntry::File { target, .. }
            | RootEntry::Device { target, .. }
            | RootEntry::Writable { target }
            | RootEntry::Tmpfs { target, .. }
            | RootEntry::Overlay { target, .. }
            | RootEntry::Contents { target, .. }
            | RootEntry::Laid { target, .. }
            | RootEntry::Socket { target, .. }
            | RootEntry::Pipe { target }
            | RootEntry::Proc { target }
            | RootEntry::Devpts { target }
            | RootEntry::Mask { target } => at(target).starts_with(path),
        });
        entries || self.plan.scratch.path.starts_with(path) || self.scratch.starts_with(path)
    }

    /// Whether the policy allows sockets of this family.
    pub(crate) fn has_family(&self, number: u32) -> bool {
        use stockade_policy::model::SocketFamily;
        let of = |family: &SocketFamily| match family {
            SocketFamily::Unix => 1,
            SocketFamily::Inet => 2,
            SocketFamily::Inet6 => 10,
            SocketFamily::Netlink => 16,
        };
        self.knows("socket") && self.policy.seccomp.socket_families.iter().any(|family| of(family) == number)
    }

    /// Whether the filter lets a call pass with some arguments.
    pub(crate) fn knows(&self, name: &str) -> bool {
        matches!(self.rules.action(name), Some(Action::Allow | Action::Check(_)))
    }
}

/// `None` where the kernel has no keyrings, or a seccomp filter around us hides them.
fn session_keyring(outside: &Outside) -> Option<i64> {
    const GET_NUMBER: i64 = 0;
    const SESSION: i64 = -3;
    match outside.answers(ControlHost::Host, &[one("keyctl", &[n(GET_NUMBER), n(SESSION), n(0)])]).first() {
        Some(Some(Answer::Result(number))) if *number > 0 => Some(*number),
        _ => None,
    }
}

/// The scratch's owner where root launches: under sudo the caller.
fn plan_owner() -> (u32, u32) {
    stockade_engine::caller::identify(None)
        .ok()
        .map(|identity| (identity.caller.uid, identity.caller.gid))
        .filter(|(uid, gid)| *uid != 0 && *gid != 0)
        .unwrap_or((NOBODY, NOBODY))
}

const HOST: &str = "host";
const SECRET: &str = "secret";
const SOCKET: &str = "socket";

/// How many files of a scratch are there to be changed.
const SCRATCH_VICTIMS: usize = 6;

/// The path of one of them below the scratch.
pub(crate) fn scratch_victim(index: usize) -> String {
    format!("victim-{index}")
}

/// Writes a file below a directory, if it is not there, and the directories above it. What was made.
fn write_below(directory: &Path, name: &str, text: &str) -> io::Result<Vec<PathBuf>> {
    let path = directory.join(name);
    let missing: Vec<&Path> = path.ancestors().skip(1).take_while(|above| *above != directory && !above.is_dir()).collect();
    let mut made = Vec::new();
    for above in missing.into_iter().rev() {
        DirBuilder::new().create(above)?;
        made.push(above.to_path_buf());
    }
    if path.symlink_metadata().is_err() {
        write_new(&path, text)?;
        made.push(path);
    }
    Ok(made)
}

/// Writes a file that does not exist yet.
pub(crate) fn write_new(path: &Path, text: &str) -> io::Result<()> {
    File::create_new(path)?.write_all(text.as_bytes())
}
