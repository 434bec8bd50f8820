//! The test bed: this process becomes a host of its own, another process all other hosts,
//! and a third one a sandbox. Nothing of the real host's network is touched: all three
//! live in namespaces that end with them.
//!
//! How a sandbox is started is one function, [`Rig::run`].

use std::{
    fs,
    io::{BufRead, BufReader, Read, Write},
    os::{
        fd::{AsFd, OwnedFd},
        unix::process::CommandExt,
    },
    path::PathBuf,
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
};

use nix::{
    mount::{MsFlags, mount},
    sched::{CloneFlags, unshare},
    sys::socket::{AddressFamily, SockFlag, SockType, socketpair},
    unistd::{Uid, pipe},
};
use serde_json::{Value, json};
use stockade_egress::{
    gate::{Gate, Request},
    inside::Sockets,
    resolve::Resolver,
    setup,
};
use stockade_policy::egress::Whitelist;
use stockade_sys::{clone, cred};

/// This host and the others.
pub struct Rig {
    remote: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
    directory: PathBuf,
    /// Root outside the test bed.
    pub privileged: bool,
}

/// What a sandbox did.
#[derive(Debug)]
pub struct Ran {
    /// What the script printed.
    pub output: String,
    /// `result.egress`.
    pub egress: Value,
}

/// The rootless launcher's user in the test bed.
const ORDINARY: u32 = 1000;
const PATH: &str = "/usr/sbin:/sbin:/usr/bin:/bin";
const PYTHON: &str = "/usr/bin/python3";
/// What every script begins with.
const PRELUDE: &str = include_str!("prelude.py");

fn ip(line: &str) {
    let status = Command::new("ip").args(line.split(' ')).env("PATH", PATH).status().expect("run ip");
    assert!(status.success(), "ip {line}");
}

impl Rig {
    /// Moves this process into namespaces of its own and starts the other hosts.
    pub fn new() -> Self {
        let (uid, gid) = (Uid::current(), nix::unistd::Gid::current());
        let privileged = uid.is_root();
        let mut flags = CloneFlags::CLONE_NEWNET | CloneFlags::CLONE_NEWNS;
        if !privileged {
            flags |= CloneFlags::CLONE_NEWUSER;
        }
        unshare(flags).expect("namespaces of the test's own");
        if !privileged {
            fs::write("/proc/self/setgroups", "deny").unwrap();
            fs::write("/proc/self/uid_map", format!("0 {uid} 1")).unwrap();
            fs::write("/proc/self/gid_map", format!("0 {gid} 1")).unwrap();
        }
        mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>).unwrap();
        let directory = std::env::temp_dir().join(format!("egress-{}", std::process::id()));
        fs::create_dir_all(&directory).unwrap();
        ip("link set lo up");
        let mut remote = Command::new("/usr/bin/unshare");
        remote.args(["--net", PYTHON, "-c", include_str!("remote.py")]).env("PATH", PATH).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut remote = remote.spawn().expect("start the other hosts");
        let to = remote.stdin.take().unwrap();
        let from = BufReader::new(remote.stdout.take().unwrap());
        let mut rig = Rig { remote, to, from, directory, privileged };
        // It answers once it is where it belongs.
        rig.remote(json!({"op": "clear"}));
        ip(&format!("link add vh type veth peer name vr netns {}", rig.remote.id()));
        ip("addr add 10.0.5.1/24 dev vh");
        ip("-6 addr add 2001:db8:5::1/64 dev vh nodad");
        ip("link set vh up");
        rig.remote(json!({"op": "up"}));
        ip("route add default via 10.0.5.7");
        ip("-6 route add default via 2001:db8:5::7");
        ip("route add unreachable 203.0.113.88");
        if !privileged {
            // As an ordinary user's launcher: no root, and no capability over its network.
            unshare(CloneFlags::CLONE_NEWUSER).expect("an ordinary user's namespace");
            fs::write("/proc/self/setgroups", "deny").unwrap();
            fs::write("/proc/self/uid_map", format!("{ORDINARY} 0 1")).unwrap();
            fs::write("/proc/self/gid_map", format!("{ORDINARY} 0 1")).unwrap();
            cred::drop_all_sets().expect("drop capabilities");
            nix::sys::prctl::set_dumpable(true).expect("stay readable");
        }
        rig
    }

    /// Has the other hosts do something.
    pub fn remote(&mut self, operation: Value) -> Value {
        writeln!(self.to, "{operation}").expect("tell the other hosts");
        let mut line = String::new();
        self.from.read_line(&mut line).expect("hear the other hosts");
        serde_json::from_str(&line).unwrap_or_else(|_| panic!("{operation}: {line}"))
    }

    /// Lets ports of every other host answer: `echo`, `banner`, `source`, `sink`, `mute`,
    /// `reset`, `http`.
    pub fn listen(&mut self, behaviour: &str, ports: &[u16]) {
        self.remote(json!({"op": "listen", "behaviour": behaviour, "ports": ports}));
    }

    /// What the host's name server says: `{"name": {"a": [["10.0.5.7"], …]}}`, a list of
    /// answers by turns.
    pub fn zone(&mut self, zone: Value) {
        self.remote(json!({"op": "zone", "zone": zone}));
    }

    /// Serves a package index under the names of the real one; where its certificate is.
    pub fn index(&mut self) -> PathBuf {
        let (certificate, key) = (self.directory.join("certificate.pem"), self.directory.join("key.pem"));
        let mut openssl = Command::new("openssl");
        openssl.args("req -x509 -nodes -newkey ec -pkeyopt ec_paramgen_curve:P-256 -days 2 -subj /CN=pypi.org".split(' '));
        openssl.args(["-addext", "subjectAltName=DNS:pypi.org,DNS:files.pythonhosted.org"]);
        openssl.arg("-keyout").arg(&key).arg("-out").arg(&certificate);
        let made = openssl.env("PATH", PATH).output().expect("run openssl");
        assert!(made.status.success(), "{made:?}");
        self.remote(json!({"op": "index", "certificate": certificate, "key": key}));
        let here = json!({"a": [["203.0.113.10"]]});
        self.zone(json!({"pypi.org": here, "files.pythonhosted.org": here, "stray.example": here}));
        certificate
    }

    /// Packets that left this host: protocol, destination, port; TCP by its SYNs.
    pub fn packets(&mut self) -> Vec<(u64, String, u64)> {
        let packets = self.remote(json!({"op": "packets"}));
        let packet = |p: &Value| (p[0].as_u64().unwrap(), p[1].as_str().unwrap().to_owned(), p[2].as_u64().unwrap());
        packets.as_array().unwrap().iter().map(packet).collect()
    }

    /// The same without questions to the host's name server.
    pub fn packets_but_dns(&mut self) -> Vec<(u64, String, u64)> {
        let mut packets = self.packets();
        // And without the host's word that an answer came too late (ICMP).
        packets.retain(|(protocol, to, port)| to != "10.0.5.7" || (*port != 53 && *protocol != 1));
        packets
    }

    /// What connections to a port carried.
    pub fn heard(&mut self, port: u16) -> Vec<String> {
        let heard = self.remote(json!({"op": "heard", "port": port}));
        heard.as_array().unwrap().iter().map(|text| text.as_str().unwrap().to_owned()).collect()
    }

    pub fn clear(&mut self) {
        self.remote(json!({"op": "clear"}));
    }

    /// Runs a script in a sandbox whose policy has this whitelist.
    pub fn run(&mut self, whitelist: &[&str], script: &str) -> Ran {
        self.run_watched(whitelist, script, |_| ())
    }

    /// The same; `meanwhile` is called with the gate while the script runs.
    pub fn run_watched(&mut self, whitelist: &[&str], script: &str, meanwhile: impl FnOnce(&Gate)) -> Ran {
        let whitelist: Vec<String> = whitelist.iter().map(|&rule| rule.to_owned()).collect();
        let whitelist = Whitelist::try_from(whitelist).expect("a whitelist");
        let sandbox = Sandbox::start(self, script);
        let sockets = Sockets::receive(sandbox.handover.as_fd()).expect("the sandbox's sockets");
        let channels = setup::configure(sockets).expect("set up egress");
        let gate = Gate::start(channels, self.request(whitelist)).expect("start the gate");
        gate.confirm().expect("the gate serves");
        drop(sandbox.go);
        meanwhile(&gate);
        let mut output = String::new();
        fs::File::from(sandbox.output).read_to_string(&mut output).unwrap();
        let _ended = stockade_sys::process::wait_child(&sandbox.child.pidfd).expect("the sandbox ends");
        let egress = match gate.finish() {
            Ok(report) => serde_json::to_value(report).unwrap(),
            Err(error) => json!({"gate": error.to_string()}),
        };
        Ran { output, egress }
    }

    /// What the launcher asks of the gate.
    pub fn request(&self, whitelist: Whitelist) -> Request {
        Request {
            whitelist,
            resolver: Resolver::new("203.0.113.9 hosts.internal\n", "nameserver 10.0.5.7\noptions timeout:2\n"),
            run_as: if self.privileged { stockade_egress::RunAs::User { uid: 65534, gid: 65534 } } else { stockade_egress::RunAs::Caller },
        }
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        let _ended = self.remote.kill().and_then(|()| self.remote.wait());
        let _removed = fs::remove_dir_all(&self.directory);
    }
}

/// A sandbox that waits for its go, which is the end of `go`.
pub struct Sandbox {
    pub child: clone::Child,
    pub handover: OwnedFd,
    pub go: OwnedFd,
    pub output: OwnedFd,
}

impl Sandbox {
    /// A process in namespaces of its own that has sent its sockets and waits.
    pub fn start(rig: &Rig, script: &str) -> Self {
        let (handover, handover_child) = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC).unwrap();
        let (mapped_read, mapped_write) = pipe().unwrap();
        let (go_read, go_write) = pipe().unwrap();
        let (output, output_child) = pipe().unwrap();
        let resolv = rig.directory.join("resolv.conf");
        fs::write(&resolv, format!("nameserver {}\noptions timeout:2 attempts:1\n", setup::RESOLVER)).unwrap();
        let script = format!("{PRELUDE}\n{script}");
        let ends = [mapped_write.as_fd(), go_write.as_fd()].map(|fd| std::os::fd::AsRawFd::as_raw_fd(&fd).unsigned_abs());
        let namespaces = clone::flags::NEWUSER | clone::flags::NEWNET | clone::flags::NEWNS;
        let child = clone::clone_process(namespaces, || {
            for end in ends {
                stockade_sys::process::close_range(end, end).unwrap();
            }
            let wait = |fd: &OwnedFd| {
                let mut byte = [0u8];
                let _end_of_file = rustix::io::read(fd, &mut byte);
            };
            wait(&mapped_read);
            cred::set_group(0).and_then(|()| cred::set_user(0)).unwrap();
            nix::sys::prctl::set_dumpable(true).unwrap();
            Sockets::open().expect("the sandbox's sockets").send(handover_child.as_fd()).expect("send them");
            mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>).unwrap();
            mount(Some(&resolv), "/etc/resolv.conf", None::<&str>, MsFlags::MS_BIND, None::<&str>).unwrap();
            wait(&go_read);
            if script.contains("#outer") {
                // For looking at the rules, which the code itself may not.
                return failed(
                    &Command::new(PYTHON).arg("-c").arg(&script).env("PATH", PATH).stdout(output_child.try_clone().unwrap()).exec(),
                );
            }
            unshare(CloneFlags::CLONE_NEWUSER).unwrap();
            nix::sys::prctl::set_dumpable(true).unwrap();
            fs::write("/proc/self/setgroups", "deny").unwrap();
            fs::write("/proc/self/uid_map", "0 0 1").unwrap();
            fs::write("/proc/self/gid_map", "0 0 1").unwrap();
            cred::drop_bounding_set().unwrap();
            cred::drop_all_sets().unwrap();
            failed(
                &Command::new(PYTHON).arg("-c").arg(&script).env_clear().env("PATH", PATH).stdout(output_child.try_clone().unwrap()).exec(),
            )
        })
        .expect("a sandbox");
        // Root's sandboxes run as a user of their own.
        let outside = if rig.privileged { 0x7000_0001 } else { ORDINARY };
        let process = PathBuf::from(format!("/proc/{}", child.pid));
        fs::write(process.join("setgroups"), "deny").unwrap();
        fs::write(process.join("uid_map"), format!("0 {outside} 1")).unwrap();
        fs::write(process.join("gid_map"), format!("0 {outside} 1")).unwrap();
        drop(mapped_write);
        Sandbox { child, handover, go: go_write, output }
    }
}

fn failed(error: &std::io::Error) -> i32 {
    eprintln!("start the script: {error}");
    125
}

/// A TCP packet of [`Rig::packets`].
pub fn syn(to: &str, port: u64) -> (u64, String, u64) {
    (6, to.to_owned(), port)
}

/// The denials of a run in words: kind, host, address, port, reason.
pub fn denials(ran: &Ran) -> Vec<String> {
    let word = |denial: &Value, key: &str| match &denial[key] {
        Value::String(text) => Some(text.clone()),
        Value::Number(number) => Some(number.to_string()),
        _ => None,
    };
    let words = |denial: &Value| {
        ["kind", "host", "addr", "port", "reason"].iter().filter_map(|key| word(denial, key)).collect::<Vec<_>>().join(" ")
    };
    ran.egress["denied"].as_array().expect("denials").iter().map(words).collect()
}
