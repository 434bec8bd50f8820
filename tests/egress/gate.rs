//! The gate's process and the rules that serve it: confined, out of the sandbox's reach,
//! and when it dies nothing leaves.

use std::{
    fs,
    os::fd::AsFd,
    path::PathBuf,
    process::Command,
    time::{Duration, Instant},
};

use nix::{
    sys::{
        resource::{Resource, setrlimit},
        signal::{Signal, kill},
    },
    unistd::Pid,
};
use serde_json::json;
use stockade_egress::{
    RunAs,
    gate::{Gate, GateError, GateRequest},
    netns::Sockets,
    setup,
};
use stockade_policy::whitelist::Whitelist;
use stockade_sys::clone;

use crate::{
    egress::testbed::{Sandbox, Testbed, syn},
    support::{runner::test, timeouts::scaled},
};

/// Resident memory of a process, in KiB.
pub fn resident_kib(pid: i32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap_or_default();
    line.split_whitespace().next().and_then(|number| number.parse().ok()).unwrap_or(0)
}

fn field(status: &str, name: &str) -> String {
    let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    line.unwrap_or_default().split_whitespace().next().unwrap_or_default().to_owned()
}

test!(Both, this_host_can_do_it, seconds 90);
fn this_host_can_do_it() {
    let _rig = Testbed::new();
    let begin = Instant::now();
    assert_eq!(stockade_egress::probe(), Ok(()));
    assert!(begin.elapsed() < scaled(Duration::from_secs(1)));
}

test!(Both, the_gate_is_confined, seconds 90);
fn the_gate_is_confined() {
    let mut testbed = Testbed::new();
    let privileged = testbed.privileged;
    testbed.run_watched(&["10.0.5.7:80"], "time.sleep(.3)", |gate| {
        let process = format!("/proc/{}", gate.gate);
        let status = fs::read_to_string(format!("{process}/status")).unwrap();
        for set in ["CapInh", "CapPrm", "CapEff", "CapAmb"] {
            assert_eq!(field(&status, set), "0000000000000000", "{set}");
        }
        assert_eq!((field(&status, "Seccomp").as_str(), field(&status, "NoNewPrivs").as_str()), ("2", "1"));
        if privileged {
            assert_eq!(field(&status, "CapBnd"), "0000000000000000");
            // The run's own id, which no other process has.
            assert!(field(&status, "Uid").parse::<u32>().unwrap() >= 0x7000_0000, "{status}");
            assert_eq!(field(&status, "Groups"), "");
            // Only root may look at what it has open: not dumpable, so 9 and /dev/null.
            assert_eq!(fs::read_dir(format!("{process}/fd")).unwrap().count(), 12);
        } else {
            assert!(fs::read_dir(format!("{process}/fd")).is_err(), "its memory and descriptors are hidden from its own user");
        }
    });
}

test!(Both, a_connection_over_which_nothing_passes_does_not_wake_the_gate, seconds 90);
fn a_connection_over_which_nothing_passes_does_not_wake_the_gate() {
    let mut testbed = Testbed::new();
    testbed.listen("echo", &[80]);
    let mut wakes = |port: u16| {
        let script = format!("s = dial('10.0.5.7', {port}); time.sleep(2)");
        let mut last = 0;
        testbed.run_watched(&["10.0.5.7:80"], &script, |running| {
            let status = || fs::read_to_string(format!("/proc/{}/status", running.gate)).unwrap_or_default();
            while let Ok(number) = field(&status(), "voluntary_ctxt_switches").parse::<u64>() {
                last = last.max(number);
                std::thread::sleep(Duration::from_millis(20));
            }
        });
        last
    };
    let (idle, control) = (wakes(80), wakes(53));
    assert!(idle < 20, "{idle}");
    assert!(control > 20, "the control: who asks for names has half a minute, which has to be measured: {control}");
}

test!(Both, a_gate_that_cannot_confine_itself_does_not_serve, seconds 90);
fn a_gate_that_cannot_confine_itself_does_not_serve() {
    let testbed = Testbed::new();
    let sandbox = Sandbox::start(&testbed, "pass");
    let channels = setup::configure(Sockets::receive(sandbox.handover.as_fd()).unwrap()).unwrap();
    // A user that does not exist for anybody: no user namespace maps it.
    let request = GateRequest { run_as: RunAs::User { uid: u32::MAX, gid: u32::MAX }, ..testbed.request(Whitelist::default()) };
    let gate = Gate::start(channels, request).unwrap();
    let refused = gate.confirm().unwrap_err();
    assert!(matches!(refused, GateError::Confine { .. }), "{refused}");
    assert_eq!(gate.finish(), Err(GateError::Died));
}

test!(Both, no_code_starts_where_the_gate_is_not_confined, seconds 90);
fn no_code_starts_where_the_gate_is_not_confined() {
    let mut testbed = Testbed::new();
    testbed.listen("echo", &[80]);
    let lines = "[egress]\nwhitelist = { replace = [\"10.0.5.7:80\"] }\n[limits]\nopen_files = 64";
    let policy = testbed.policy_of("default", lines);
    let script = "say(attempt('10.0.5.7', 80))";
    assert_eq!(testbed.run_under(&policy, script, |_| ()).output, "connected\n", "the control");
    testbed.clear();
    // Too few for all connections that the gate may be told of, which it finds out when it
    // confines itself.
    setrlimit(Resource::RLIMIT_NOFILE, 512, 512).unwrap();
    let ran = testbed.run_under(&policy, script, |_| ());
    assert_eq!((ran.output.as_str(), &ran.report["started"]), ("", &json!(false)), "{ran:?}");
    assert_eq!(ran.report["verdict"], "sandbox_error", "{ran:?}");
    assert!(ran.report["error"].as_str().unwrap().contains("the egress gate could not limit its resources"), "{ran:?}");
    assert_eq!(testbed.packets(), []);
}

test!(Both, the_gate_does_not_outlive_its_launcher, seconds 90);
fn the_gate_does_not_outlive_its_launcher() {
    let testbed = Testbed::new();
    let (told, tell) = nix::unistd::pipe().unwrap();
    let launcher = clone::clone_process(0, || {
        let sandbox = Sandbox::start(&testbed, "time.sleep(9)");
        let channels = setup::configure(Sockets::receive(sandbox.handover.as_fd()).unwrap()).unwrap();
        let gate = Gate::start(channels, testbed.request(Whitelist::default())).unwrap();
        gate.confirm().unwrap();
        nix::unistd::write(&tell, &gate.pid().to_ne_bytes()).unwrap();
        std::thread::sleep(Duration::from_secs(20));
        0
    })
    .unwrap();
    let mut pid = [0u8; 4];
    assert_eq!(nix::unistd::read(&told, &mut pid), Ok(4));
    let gate = PathBuf::from(format!("/proc/{}", i32::from_ne_bytes(pid)));
    assert!(gate.exists());
    kill(Pid::from_raw(launcher.pid), Signal::SIGKILL).unwrap();
    assert!(soon(|| is_gone(i32::from_ne_bytes(pid))));
}

test!(Both, without_the_gate_nothing_leaves, seconds 90);
fn without_the_gate_nothing_leaves() {
    let mut testbed = Testbed::new();
    testbed.listen("echo", &[80]);
    // A file that both sides can reach tells that the connection is open.
    let open = std::env::temp_dir().join(format!("egress-{}-open", std::process::id()));
    let script = format!(
        "s = dial('10.0.5.7', 80); s.sendall(b'a'); say(s.recv(9)); os.close(os.open({open:?}, os.O_CREAT)); time.sleep(1)
try: s.sendall(b'b'); time.sleep(.1); say('got', s.recv(9))
except OSError as error: say(word(error))
say(attempt('10.0.5.7', 80, .5))"
    );
    let ran = testbed.run_bare_watched(&["10.0.5.7:80"], &script, |gate| {
        assert!(soon(|| open.exists()));
        kill(Pid::from_raw(gate.pid()), Signal::SIGKILL).unwrap();
        let begin = Instant::now();
        let fd = gate.watch();
        let mut fds = [rustix::event::PollFd::new(&fd, rustix::event::PollFlags::IN)];
        let told = rustix::event::poll(&mut fds, Some(&rustix::event::Timespec { tv_sec: 2, tv_nsec: 0 }));
        assert_eq!(told, Ok(1), "the launcher is not told");
        assert!(begin.elapsed() < Duration::from_secs(1));
    });
    fs::remove_file(&open).unwrap();
    assert_eq!(ran.output, "b'a'\ngot b''\nhang\n".replace("got b''", ran.output.lines().nth(1).unwrap()));
    assert!(!ran.output.contains("got b'b'"), "{ran:?}");
    assert_eq!(ran.egress, json!({"gate": "the egress gate ended unexpectedly"}));
    assert_eq!(testbed.packets(), [syn("10.0.5.7", 80)]);
}

/// Whether a process has ended; an orphan's zombie is reaped by this host's subreaper.
fn is_gone(pid: i32) -> bool {
    fs::read_to_string(format!("/proc/{pid}/stat")).map_or(true, |stat| stat.contains(") Z "))
}

/// Whether any process has this word in its command line.
fn runs(word: &str) -> bool {
    fs::read_dir("/proc").unwrap().flatten().any(|entry| {
        let line = fs::read(entry.path().join("cmdline")).unwrap_or_default();
        entry.file_name() != *std::process::id().to_string() && String::from_utf8_lossy(&line).contains(word)
    })
}

fn soon(is: impl Fn() -> bool) -> bool {
    (0..500).any(|_| {
        std::thread::sleep(Duration::from_millis(10));
        is()
    })
}

test!(Both, the_death_of_the_gate_ends_the_run, seconds 90);
fn the_death_of_the_gate_ends_the_run() {
    let mut testbed = Testbed::new();
    testbed.listen("echo", &[80]);
    let mark = format!("mark-of-{}", std::process::id());
    let script = format!("'{mark}'; s = dial('10.0.5.7', 80); s.sendall(b'a'); say(s.recv(9)); time.sleep(60)");
    let policy = testbed.policy(&["10.0.5.7:80"]);
    let begin = Instant::now();
    let ran = testbed.run_under(&policy, &script, |running| {
        std::thread::sleep(Duration::from_millis(1500));
        kill(Pid::from_raw(running.gate), Signal::SIGKILL).unwrap();
    });
    assert!(begin.elapsed() < Duration::from_secs(10));
    assert_eq!(ran.output, "b'a'\n", "the script was in the midst of it");
    assert_eq!(ran.report["verdict"], "sandbox_error", "{ran:?}");
    assert_eq!((&ran.report["code"], &ran.report["success"]), (&json!(125), &json!(false)), "{ran:?}");
    assert!(ran.report["error"].as_str().unwrap().contains("the egress gate ended unexpectedly"), "{ran:?}");
    assert!(soon(|| !runs(&mark)), "something of the run is left");
    // The control: with its gate the same run ends well, and nothing was wrong with it.
    assert_eq!(testbed.run(&["10.0.5.7:80"], &script.replace("time.sleep(60)", "pass")).output, "b'a'\n");
}

test!(Both, the_death_of_the_launcher_ends_gate_and_run, seconds 90);
fn the_death_of_the_launcher_ends_gate_and_run() {
    let mut testbed = Testbed::new();
    let mark = format!("mark-of-{}", std::process::id());
    let policy = testbed.policy(&["10.0.5.7:80"]);
    let mut gate = 0;
    let ran = testbed.run_under(&policy, &format!("'{mark}'; say('on'); time.sleep(60)"), |running| {
        gate = running.gate;
        std::thread::sleep(Duration::from_millis(1500));
        kill(Pid::from_raw(running.launcher), Signal::SIGKILL).unwrap();
    });
    assert_eq!((ran.output.as_str(), &ran.report), ("on\n", &json!(null)), "a killed launcher says nothing");
    assert!(gate > 0 && soon(|| is_gone(gate)), "the gate outlived its launcher");
    assert!(soon(|| !runs(&mark)), "the run outlived its launcher");
}

/// The rules as nft(8) shows them.
const RULES: &str = r#"table inet stockade {
	chain from_sandbox {
		type filter hook prerouting priority mangle; policy drop;
		meta mark 0x00000057 tcp flags syn / fin,syn,rst,ack tproxy to :1 accept
		meta mark 0x00000057 tcp flags syn / fin,syn,rst,ack drop
		ip daddr 127.0.0.0/8 tcp dport 1 tcp flags syn / fin,syn,rst,ack reject with tcp reset
		ip daddr 198.19.255.254 tcp dport 1 tcp flags syn / fin,syn,rst,ack reject with tcp reset
		ip6 daddr ::1 tcp dport 1 tcp flags syn / fin,syn,rst,ack reject with tcp reset
		ip6 daddr fd53:746f:636b::1 tcp dport 1 tcp flags syn / fin,syn,rst,ack reject with tcp reset
		udp dport 53 limit rate 1000/second burst 2000 packets accept
		udp dport 53 limit rate 50/second burst 100 packets log prefix "u" group 5 snaplen 128
		udp dport 53 reject
		ip daddr 127.0.0.0/8 accept
		ip daddr 198.19.255.254 accept
		ip6 daddr ::1 accept
		ip6 daddr fd53:746f:636b::1 accept
		tcp flags != syn / fin,syn,rst,ack socket transparent 1 accept
		tcp flags syn / fin,syn,rst,ack limit rate 1000/second burst 2000 packets log prefix "h" group 5 snaplen 128 drop
		tcp flags syn / fin,syn,rst,ack limit rate 1/second log prefix "u" group 5 snaplen 128
		meta l4proto tcp reject with tcp reset
		meta l4proto udp limit rate 50/second burst 100 packets log prefix "r" group 5 snaplen 128 reject
		meta l4proto udp limit rate 1/second log prefix "u" group 5 snaplen 128
		meta l4proto udp reject
		limit rate 50/second burst 100 packets log prefix "r" group 5 snaplen 128 drop
		limit rate 1/second log prefix "u" group 5 snaplen 128
		drop
	}
}
"#;

test!(Both, the_rules_are_what_is_documented, seconds 90);
fn the_rules_are_what_is_documented() {
    let mut testbed = Testbed::new();
    // Seen from the namespace's own side, where no code of the payload ever runs.
    let script = "#outer
subprocess.run(['/usr/sbin/nft', 'list', 'ruleset'])
for family in '-4', '-6': subprocess.run(['/usr/sbin/ip', family, 'route', 'show', 'table', 'local', 'default'])
say(os.listdir('/sys/class/net') if os.path.exists('/sys/class/net') else '')";
    let ran = testbed.run_bare(&["10.0.5.7:80"], script);
    let (rules, rest) = ran.output.split_at(RULES.len().min(ran.output.len()));
    assert_eq!(rules, RULES);
    assert!(
        rest.contains("local default dev lo") && rest.contains("src 198.19.255.254") && rest.contains("src fd53:746f:636b::1"),
        "{rest}"
    );
}

test!(Both, the_code_cannot_see_or_change_the_rules, seconds 90);
fn the_code_cannot_see_or_change_the_rules() {
    let mut testbed = Testbed::new();
    let script = "def netlink(kind, flags, body):
    s = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 12)
    s.send(struct.pack('IHHII', 16 + len(body), kind, flags, 1, 0) + body)
    return errno.errorcode[-struct.unpack_from('i', s.recv(9999), 16)[0]]
GET_TABLES, GET_RULES, DELETE = 0xa01, 0xa07, 0xa02
say(netlink(GET_TABLES, 0x301, bytes(4)), netlink(GET_RULES, 0x301, bytes(4)), netlink(DELETE, 5, bytes(4)))
batch = lambda kind: struct.pack('IHHII', 20, kind, 1, 0, 0) + bytes([0, 0, 0, 10])
s = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 12)
s.send(batch(16) + struct.pack('IHHII', 20, DELETE, 5, 1, 0) + bytes([1, 0, 0, 0]) + batch(17)); say(errno.errorcode[-struct.unpack_from('i', s.recv(999), 16)[0]])
route = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
route.send(struct.pack('IHHII', 28, 25, 5, 1, 0) + bytes([2, 0, 0, 0, 255, 3, 254, 2, 0, 0, 0, 0])); say(errno.errorcode[-struct.unpack_from('i', route.recv(999), 16)[0]])
say(libc.unshare(0x50000000) == 0 and attempt('10.0.5.7', 80))";
    testbed.listen("echo", &[80]);
    // What holds by itself, without the filter that forbids most of it before.
    let ran = testbed.run_bare(&["10.0.5.7:80"], script);
    assert_eq!(ran.output, "EPERM EPERM EPERM\nEPERM\nEPERM\nENETUNREACH\n", "{ran:?}");
    assert_eq!(testbed.packets(), []);
}

test!(Both, nothing_of_the_gate_is_left_behind, seconds 90);
fn nothing_of_the_gate_is_left_behind() {
    let mut testbed = Testbed::new();
    testbed.listen("echo", &[80]);
    let open = || fs::read_dir("/proc/self/fd").unwrap().count();
    let _first = testbed.run(&["10.0.5.7:80"], "say(attempt('10.0.5.7', 80))");
    let before = open();
    for _ in 0..20 {
        assert_eq!(testbed.run(&["10.0.5.7:80"], "say(attempt('10.0.5.7', 80))").output, "connected\n");
    }
    assert_eq!(open(), before);
    let children = fs::read_to_string(format!("/proc/self/task/{}/children", std::process::id())).unwrap();
    assert_eq!(children.split_whitespace().count(), 1, "only the other hosts: {children}");
}

test!(Both, the_hosts_own_network_is_not_changed, seconds 90);
fn the_hosts_own_network_is_not_changed() {
    let mut testbed = Testbed::new();
    testbed.listen("echo", &[80]);
    let look = || {
        let said = |program: &str, words: &str| {
            let output = Command::new(program).args(words.split(' ')).env("PATH", "/usr/sbin:/sbin:/usr/bin:/bin").output().unwrap();
            // Lifetimes run down.
            String::from_utf8(output.stdout).unwrap().lines().filter(|line| !line.contains("valid_lft")).collect::<Vec<_>>().join("\n")
        };
        [
            said("ip", "addr"),
            said("ip", "route show table all"),
            said("ip", "-6 route show table all"),
            said("ip", "rule"),
            said("nft", "list ruleset"),
        ]
    };
    // The test bed's link comes up in its own time.
    assert!(soon(|| look()[0].contains("vh@") && !look()[0].contains("NO-CARRIER")));
    let before = look();
    let mut during = None;
    let ran = testbed.run_watched(&["10.0.5.7:80"], "say(attempt('10.0.5.7', 80)); time.sleep(.3)", |_| during = Some(look()));
    assert_eq!(ran.output, "connected\n");
    assert_eq!(during, Some(before.clone()));
    assert_eq!(look(), before);
}
