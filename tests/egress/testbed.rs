//! The test bed: this process becomes its own host, another process all other hosts,
//! and a third one a sandbox. Nothing of the real host's network is touched: all three
//! live in namespaces that end with them.
//!
//! A sandbox is one call of the program under test, [`Testbed::run`], whose record is that of
//! its report. Where the program's other layers would hide what is to be shown, or end the
//! run too early to show it, [`Testbed::run_bare`] has only the gate and a network namespace.

use std::{
    fs,
    io::{BufRead, BufReader, Read, Write},
    os::{
        fd::{AsFd, OwnedFd},
        unix::process::CommandExt,
    },
    path::{Path, PathBuf},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    time::{Duration, Instant},
};

use nix::{
    mount::{MsFlags, mount},
    sched::{CloneFlags, unshare},
    sys::socket::{AddressFamily, SockFlag, SockType, socketpair},
    unistd::{Uid, pipe},
};
use serde_json::{Value, json};
use stockade_egress::{
    gate::{Gate, GateRequest},
    netns::Sockets,
    resolve::Resolver,
    setup,
};
use stockade_policy::{alert::Alert, whitelist::Whitelist};
use stockade_sys::{clone, cred};

use crate::support::timeouts::scaled;

/// This host and the others.
pub struct Testbed {
    remote: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
    directory: PathBuf,
    /// The launcher's home, outside what sandboxes are shown: the audit log lies in it.
    home: PathBuf,
    /// Root outside the test bed.
    pub privileged: bool,
}

/// What a sandbox did.
#[derive(Debug)]
pub struct GateRun {
    /// What the script printed.
    pub output: String,
    /// `result.egress`.
    pub egress: Value,
    /// The alerts that the gate saw met, where there was only a gate.
    pub alerts: Vec<String>,
    /// The whole report; null where there was only a gate.
    pub report: Value,
}

/// A run of the program while it lasts.
#[derive(Clone, Copy, Debug)]
pub struct Running {
    /// The launcher's process.
    pub launcher: i32,
    /// The gate's process.
    pub gate: i32,
}

/// The rootless launcher's user in the test bed.
const ORDINARY: u32 = 1000;
const PATH: &str = "/usr/sbin:/sbin:/usr/bin:/bin";
const PYTHON: &str = "/usr/bin/python3";
/// Where the test's own files are seen in its mount namespace: policies, certificates.
/// Only their owner can write anywhere above them, as a privileged launcher demands.
pub const FILES: &str = "/mnt";
/// The directory, among these, of the certificates that programs trust.
const TRUSTED: &str = "certificates";
/// What the host's own resolver is told.
const HOSTS: &str = "203.0.113.9 hosts.internal\n";
const SERVERS: &str = "nameserver 10.0.5.7\noptions timeout:2\n";
/// The alert of gates without a launcher.
pub const ALERT: &str = "egress:169.254.*";
/// What every script begins with.
const PRELUDE: &str = include_str!("../support/egress_prelude.py");

fn ip(line: &str) {
    let status = Command::new("ip").args(line.split(' ')).env("PATH", PATH).status().expect("run ip");
    assert!(status.success(), "ip {line}");
}

impl Testbed {
    /// Moves this process into its own namespaces and starts the other hosts.
    pub fn new() -> Self {
        Self::with(&[])
    }

    /// The same on a host that trusts the certificate of [`Testbed::index`], and no other.
    pub fn trusted() -> Self {
        Self::with(&[(TRUSTED, "/etc/ssl/certs")])
    }

    /// The same with these files or directories of the test's own in the place of the host's.
    fn with(more: &[(&str, &str)]) -> Self {
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
        let home = std::env::temp_dir().join(format!("egress-home-{}", std::process::id()));
        fs::create_dir_all(directory.join(TRUSTED)).unwrap();
        fs::create_dir_all(&home).unwrap();
        fs::write(directory.join("hosts"), HOSTS).unwrap();
        fs::write(directory.join("servers"), SERVERS).unwrap();
        for (from, to) in [&[("", FILES), ("hosts", "/etc/hosts"), ("servers", "/etc/resolv.conf")], more].concat() {
            mount(Some(&directory.join(from)), to, None::<&str>, MsFlags::MS_BIND, None::<&str>).unwrap();
        }
        ip("link set lo up");
        // For controls: the launcher's group may ping.
        fs::write("/proc/sys/net/ipv4/ping_group_range", "0 0").unwrap();
        let mut remote = Command::new("/usr/bin/unshare");
        remote
            .args(["--net", PYTHON, "-c", include_str!("../support/egress_remote.py")])
            .env("PATH", PATH)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut remote = remote.spawn().expect("start the other hosts");
        let to = remote.stdin.take().unwrap();
        let from = BufReader::new(remote.stdout.take().unwrap());
        let mut testbed = Testbed { remote, to, from, directory, home, privileged };
        // It answers once it is where it belongs.
        testbed.remote(json!({"op": "clear"}));
        ip(&format!("link add vh type veth peer name vr netns {}", testbed.remote.id()));
        ip("addr add 10.0.5.1/24 dev vh");
        ip("-6 addr add 2001:db8:5::1/64 dev vh nodad");
        // No further address, which would be tentative for a second.
        ip("link set vh addrgenmode none");
        ip("link set vh up");
        testbed.remote(json!({"op": "up"}));
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
        testbed
    }

    /// The test's own directory, by its path on the host.
    pub fn directory(&self) -> &Path {
        &self.directory
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

    /// The answers of the host's name server: `{"name": {"a": [["10.0.5.7"], …]}}`, a list of
    /// answers by turns.
    pub fn zone(&mut self, zone: Value) {
        self.remote(json!({"op": "zone", "zone": zone}));
    }

    /// Serves a package index under the names of the real one, a git repository, `/demo.git`, and
    /// pages of api.github.com; where its certificate is.
    pub fn index(&mut self) -> PathBuf {
        let (certificate, key) = (PathBuf::from(FILES).join("certificate.pem"), self.directory.join("key.pem"));
        let mut openssl = Command::new("openssl");
        openssl.args("req -x509 -nodes -newkey ec -pkeyopt ec_paramgen_curve:P-256 -days 2 -subj /CN=pypi.org".split(' '));
        openssl.args(["-addext", "subjectAltName=DNS:pypi.org,DNS:files.pythonhosted.org,DNS:api.github.com"]);
        openssl.arg("-keyout").arg(&key).arg("-out").arg(&certificate);
        let made = openssl.env("PATH", PATH).output().expect("run openssl");
        assert!(made.status.success(), "{made:?}");
        self.trust(&certificate);
        let repository = self.repository();
        self.remote(json!({"op": "index", "certificate": certificate, "key": key, "repository": repository}));
        let here = json!({"a": [["203.0.113.10"]]});
        self.zone(json!({"pypi.org": here, "files.pythonhosted.org": here, "stray.example": here, "api.github.com": here}));
        certificate
    }

    /// Puts a certificate where programs look for those that they trust: curl and pip in one file,
    /// OpenSSL by its hash.
    fn trust(&self, certificate: &Path) {
        let mut openssl = Command::new("openssl");
        let hashed = openssl.args(["x509", "-noout", "-hash", "-in"]).arg(certificate).env("PATH", PATH).output().expect("run openssl");
        let hash = String::from_utf8(hashed.stdout).expect("a hash");
        for name in [String::from("ca-certificates.crt"), format!("{}.0", hash.trim())] {
            fs::copy(certificate, self.directory.join(TRUSTED).join(name)).unwrap();
        }
    }

    /// A git repository of one commit, as files that any web server can hand out.
    fn repository(&self) -> PathBuf {
        let (tree, bare) = (self.directory.join("tree"), self.directory.join("demo.git"));
        let git = |words: &[&str]| {
            let mut git = Command::new("git");
            git.args(["-c", "init.defaultBranch=main", "-c", "user.name=test", "-c", "user.email=test@example.org"]).args(words);
            let done = git.env_clear().env("PATH", PATH).env("HOME", &self.directory).output().expect("run git");
            assert!(done.status.success(), "{words:?}: {done:?}");
        };
        let (from, to) = (tree.to_str().unwrap(), bare.to_str().unwrap());
        git(&["init", "--quiet", from]);
        fs::write(tree.join("file"), "kept\n").unwrap();
        git(&["-C", from, "add", "file"]);
        git(&["-C", from, "commit", "--quiet", "--message", "one"]);
        git(&["clone", "--quiet", "--bare", from, to]);
        git(&["-C", to, "update-server-info"]);
        bare
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

    /// Runs a script in a sandbox of the program whose policy has this whitelist.
    pub fn run(&mut self, whitelist: &[&str], script: &str) -> GateRun {
        self.run_watched(whitelist, script, |_| ())
    }

    /// The same; `meanwhile` is called while the script runs.
    pub fn run_watched(&mut self, whitelist: &[&str], script: &str, meanwhile: impl FnOnce(Running)) -> GateRun {
        let ran = self.run_under(&self.policy(whitelist), script, meanwhile);
        let verdict = ran.report["verdict"].as_str().unwrap_or_default();
        assert!(verdict == "exited", "the run was ended as {verdict}: {}\n{}", ran.report, ran.output);
        ran
    }

    /// Writes a policy with this whitelist and limits that no test comes near.
    pub fn policy(&self, whitelist: &[&str]) -> String {
        self.policy_with(whitelist, "1GiB")
    }

    /// The same with this `memory`.
    pub fn policy_with(&self, whitelist: &[&str], memory: &str) -> String {
        self.policy_of("default", &format!(
            "[egress]\nwhitelist = {{ replace = {} }}\n[limits]\nwall = \"85s\"\nmemory = {memory:?}\nprocesses = 256\nopen_files = 2048\ncpus = 2",
            json!(whitelist)
        ))
    }

    /// Writes a policy that extends a shipped one by these lines and shows [`FILES`].
    pub fn policy_of(&self, base: &str, lines: &str) -> String {
        let text = format!(
            "schema = 1\ndescription = \"of a test\"\nextends = \"{base}\"\n[filesystem]\nread_only = {{ add = [\"{FILES}\"] }}\n{lines}\n"
        );
        fs::write(self.directory.join("policy.toml"), text).unwrap();
        format!("{FILES}/policy.toml")
    }

    /// A call of the program.
    pub fn program(&self, arguments: &[&str]) -> Command {
        let program = crate::support::exec::program_path().unwrap();
        let mut command = Command::new(program);
        command.args(arguments).env_clear().env("PATH", PATH).env("HOME", &self.home).env("XDG_RUNTIME_DIR", &self.directory);
        command.current_dir("/").stdin(Stdio::null());
        command
    }

    /// Runs a script under a policy, to whatever end.
    pub fn run_under(&mut self, policy: &str, script: &str, meanwhile: impl FnOnce(Running)) -> GateRun {
        self.run_with(&["--policy", policy], script, meanwhile)
    }

    /// Runs a script with these options of `run`, to whatever end.
    pub fn run_with(&mut self, options: &[&str], script: &str, meanwhile: impl FnOnce(Running)) -> GateRun {
        let path = self.directory.join("report.json");
        let script = format!("{PRELUDE}\n{script}");
        let report = path.to_str().unwrap();
        let arguments = [&["run", "--report", report], options, &["--", PYTHON, "-c", &script]].concat();
        let mut launcher = self.program(&arguments).stdout(Stdio::piped()).spawn().expect("start the program");
        let pid = launcher.id().cast_signed();
        let gate = std::thread::spawn(move || gate_of(pid));
        // Read beside it: the script must not wait for room.
        let mut stdout = launcher.stdout.take().unwrap();
        let reader = std::thread::spawn(move || {
            let mut output = String::new();
            stdout.read_to_string(&mut output).map(|_| output)
        });
        if let Some(gate) = gate.join().unwrap() {
            meanwhile(Running { launcher: pid, gate });
        }
        let _status = launcher.wait().expect("the program ends");
        let output = reader.join().unwrap().unwrap();
        let report: Value = serde_json::from_slice(&fs::read(&path).unwrap_or_default()).unwrap_or_default();
        let _removed = fs::remove_file(&path);
        GateRun { output, egress: report["egress"].clone(), alerts: Vec::new(), report }
    }

    /// Runs a script on the host, as the controls do; what it prints.
    pub fn outside(&self, script: &str) -> String {
        let output = Command::new(PYTHON).args(["-c", &format!("{PRELUDE}\n{script}")]).env("PATH", PATH).output().expect("run a script");
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// Runs a script behind a gate in a network namespace, and in nothing else.
    pub fn run_bare(&mut self, whitelist: &[&str], script: &str) -> GateRun {
        self.run_bare_watched(whitelist, script, |_| ())
    }

    /// The same; `meanwhile` is called with the gate while the script runs.
    pub fn run_bare_watched(&mut self, whitelist: &[&str], script: &str, meanwhile: impl FnOnce(&Gate)) -> GateRun {
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
        let (egress, alerts) = match gate.finish() {
            Ok(report) => (serde_json::to_value(&report).unwrap(), report.alerts),
            Err(error) => (json!({"gate": error.to_string()}), Vec::new()),
        };
        GateRun { output, egress, alerts, report: Value::Null }
    }

    /// What the launcher asks of the gate.
    pub fn request(&self, whitelist: Whitelist) -> GateRequest {
        GateRequest {
            whitelist,
            resolver: Resolver::new(HOSTS, SERVERS),
            alerts: vec![Alert::try_from(ALERT.to_owned()).expect("an alert")],
            run_as: if self.privileged { stockade_egress::RunAs::User { uid: 65534, gid: 65534 } } else { stockade_egress::RunAs::Caller },
        }
    }
}

impl Drop for Testbed {
    fn drop(&mut self) {
        let _ended = self.remote.kill().and_then(|()| self.remote.wait());
        let _removed = fs::remove_dir_all(&self.directory).and_then(|()| fs::remove_dir_all(&self.home));
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
    /// A process in its own namespaces that has sent its sockets and waits.
    pub fn start(testbed: &Testbed, script: &str) -> Self {
        let (handover, handover_child) = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC).unwrap();
        let (mapped_read, mapped_write) = pipe().unwrap();
        let (go_read, go_write) = pipe().unwrap();
        let (output, output_child) = pipe().unwrap();
        let resolv = testbed.directory.join("resolv.conf");
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
        // Root's sandboxes run as their own user.
        let outside = if testbed.privileged { 0x7000_0001 } else { ORDINARY };
        let process = PathBuf::from(format!("/proc/{}", child.pid));
        fs::write(process.join("setgroups"), "deny").unwrap();
        fs::write(process.join("uid_map"), format!("0 {outside} 1")).unwrap();
        fs::write(process.join("gid_map"), format!("0 {outside} 1")).unwrap();
        drop(mapped_write);
        Sandbox { child, handover, go: go_write, output }
    }
}

/// The gate of a launcher, once it is confined; none: it had none until it ended.
fn gate_of(launcher: i32) -> Option<i32> {
    let end = Instant::now() + scaled(Duration::from_secs(5));
    while Instant::now() < end && !fs::read_to_string(format!("/proc/{launcher}/stat")).ok()?.contains(") Z ") {
        let children = fs::read_to_string(format!("/proc/{launcher}/task/{launcher}/children")).ok()?;
        let gate = children.split_whitespace().filter_map(|pid| pid.parse().ok()).find(|pid: &i32| {
            let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
            let line = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default().trim().to_owned();
            // The other children are the sandbox, which is in its own pid namespace, and
            // the screener.
            let command = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            // Of one that ends there is none left to read.
            !command.is_empty()
                && line("Seccomp:") == "2"
                && line("NSpid:").split_whitespace().count() == depth(launcher)
                && !command.starts_with(b"stockade-screen")
        });
        if gate.is_some() {
            return gate;
        }
        std::thread::sleep(Duration::from_micros(500));
    }
    None
}

/// In how many pid namespaces a process has a number.
fn depth(pid: i32) -> usize {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    status.lines().find_map(|line| line.strip_prefix("NSpid:")).map_or(0, |line| line.split_whitespace().count())
}

fn failed(error: &std::io::Error) -> i32 {
    eprintln!("start the script: {error}");
    125
}

/// A TCP packet of [`Testbed::packets`].
pub fn syn(to: &str, port: u64) -> (u64, String, u64) {
    (6, to.to_owned(), port)
}

/// The denials of a run in words: kind, host, address, port, reason.
pub fn denials(ran: &GateRun) -> Vec<String> {
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
