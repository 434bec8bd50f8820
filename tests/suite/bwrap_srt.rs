//! The command lines of sandbox-runtime (`srt`), beside bubblewrap: the sockets of its proxies, and what it
//! lays over names that are not there. Then what of these is refused, and what is left on the host.

use std::{
    fs,
    io::Write,
    os::unix::{
        fs::{PermissionsExt, chown, symlink},
        net::UnixListener,
    },
    path::{Path, PathBuf},
    process::{Command, Output},
    thread,
    time::Duration,
};

use super::bwrap::{PROGRAMS, bubblewrap, command, error, ours, refused, said, tree_named, words};
use crate::support::{
    exec::{program_path, start, stockade, text},
    policy_dir::{command_with_etc, derived_from},
    runner::{directory, eventually, is_root, test},
};

/// What `srt` gives for each command, beside what it binds.
const EACH: &str = "--dev /dev --unshare-pid --unshare-user --cap-drop ALL --proc /proc";
/// Prints what the program says that listens at a socket, or the error.
const ASK: &str = "import socket, sys\ns = socket.socket(socket.AF_UNIX)\ntry: s.connect(sys.argv[1]); print(s.recv(99).decode())\nexcept OSError as e: print(e.strerror)\n";

/// A socket that answers each who connects. Its file goes with it.
struct Proxy(PathBuf);

impl Proxy {
    fn at(path: &Path) -> Self {
        let listener = UnixListener::bind(path).unwrap();
        // Its owner alone may connect.
        fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
        thread::spawn(move || listener.incoming().flatten().for_each(|mut peer| drop(peer.write_all(b"from outside"))));
        Proxy(path.to_path_buf())
    }

    /// As `srt` names it, in /tmp.
    fn in_tmp() -> Self {
        Self::at(Path::new(&format!("/tmp/claude-http-{:016x}.sock", std::process::id())))
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        let _gone = fs::remove_file(&self.0);
    }
}

fn names(at: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(at).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// Under a policy `bwrap` of the host's that lists a socket.
fn listing(pattern: &str, options: &str, then: &[&str]) -> Output {
    let policy = derived_from("shell", &format!("[filesystem]\nsockets = {{ add = [\"{pattern}\"] }}\n"));
    let line: Vec<String> =
        [words(&format!("bwrap {PROGRAMS} {options} --")), then.iter().map(|word| (*word).to_owned()).collect()].concat();
    let line: Vec<&str> = line.iter().map(String::as_str).collect();
    if is_root() {
        return command_with_etc(&[("stockade/policies/bwrap.toml", &policy)], &[], &line).output().unwrap();
    }
    let config = directory().join("config");
    fs::create_dir_all(config.join("stockade/policies")).unwrap();
    fs::write(config.join("stockade/policies/bwrap.toml"), policy).unwrap();
    stockade(&line).env("XDG_CONFIG_HOME", &config).output().unwrap()
}

test!(Both, srt_writes_and_speaks_to_its_proxy_with_the_same_result, needs[Program("bwrap")]);
fn srt_writes_and_speaks_to_its_proxy_with_the_same_result() {
    let (tree, empty, proxy) = (tree_named("tree"), tree_named("claude-empty-a1B2c3"), Proxy::in_tmp());
    fs::create_dir_all(tree.join(".git/hooks")).unwrap();
    fs::write(tree.join("key"), "secret").unwrap();
    let (tree, empty, socket) = (text(&tree), text(&empty), text(&proxy.0));
    let options = format!(
        "--new-session --die-with-parent --unshare-net --bind {socket} {socket} --setenv SANDBOX_RUNTIME 1 --setenv HTTP_PROXY http://localhost:3128 \
         --ro-bind / / --ro-bind {tree}/.git {tree}/.git --bind {tree} {tree} --tmpfs /etc/ssh/ssh_config.d --ro-bind /dev/null {tree}/key \
         --ro-bind {tree}/.git/hooks {tree}/.git/hooks --ro-bind /dev/null {tree}/.bashrc --ro-bind /dev/null {tree}/.mcp.json \
         --ro-bind {empty} {tree}/.claude --ro-bind {empty} {empty} {EACH} --chdir {tree}"
    );
    let script = format!(
        "python3 -c \"$0\" {socket}; cat key 2>/dev/null; for f in .bashrc .claude/new .git/hooks/new {empty}/new new; do echo x 2>/dev/null > $f && echo $f; done; \
         for f in .bashrc .claude .git key; do mv $f moved 2>/dev/null && echo moved $f; rm -f $f 2>/dev/null && echo removed $f; done; \
         ls -A . .claude; test -s .bashrc || echo empty; rm new; exit 7"
    );
    let then = ["/usr/bin/bash", "-c", &script, ASK];
    let wanted = "from outside\nnew\n.:\n.bashrc\n.claude\n.git\n.mcp.json\nkey\nnew\n\n.claude:\nempty\n";
    let own = ours(&options, &[], &then);
    assert_eq!(said(&own), (Some(7), wanted.to_owned()), "{}", error(&own));
    assert_eq!(names(Path::new(tree)), [".git", "key"]);
    let real = bubblewrap(&options, &[], &then);
    assert_eq!(said(&real), said(&own), "{}", error(&real));
    // bubblewrap leaves its mount points to srt.
    assert_eq!(names(Path::new(tree)), [".bashrc", ".claude", ".git", ".mcp.json", "key"]);
    assert!(names(Path::new(empty)).is_empty());
    // Without the proxy's socket there is nothing to speak to.
    let without = options.replace(&format!("--bind {socket} {socket} "), "");
    let alone = ours(&without, &[], &["/usr/bin/python3", "-c", ASK, socket]);
    assert_eq!(said(&alone).1, "No such file or directory\n", "{}", error(&alone));
}

test!(Both, what_srt_asks_for_beside_that_runs_or_is_refused_by_name, needs[Program("bwrap")]);
fn what_srt_asks_for_beside_that_runs_or_is_refused_by_name() {
    // Its probe, and its options for a command that may write nowhere.
    let probe = "--unshare-user --dev-bind / /";
    assert_eq!(said(&ours(probe, &[], &["true"])), said(&bubblewrap(probe, &[], &["true"])));
    let options = format!("--new-session --die-with-parent --ro-bind / / {EACH}");
    let then = ["/usr/bin/bash", "-c", "touch /usr/x 2>/dev/null || echo refused; exit 5"];
    for output in [ours(&options, &[], &then), bubblewrap(&options, &[], &then)] {
        assert_eq!(said(&output), (Some(5), String::from("refused\n")), "{}", error(&output));
    }
    for (more, wanted) in [("--cap-add CAP_SETFCAP", "--cap-add is not taken"), ("--bind /proc /proc", "write --proc /proc")] {
        refused(&format!("{options} {more}"), wanted);
    }
}

test!(Both, unlisted_and_replaceable_sockets_are_refused);
fn unlisted_and_replaceable_sockets_are_refused() {
    let place = tree_named("place");
    let proxy = Proxy::at(&place.join("proxy.sock"));
    let at = text(&proxy.0);
    let ask = ["/usr/bin/python3", "-c", ASK, "/s"];
    let pattern = format!("{}/proxy*.sock", text(&place));
    let bind = |path: &str| listing(&pattern, &format!("--bind {path} /s"), &ask);
    // Control: listed, it can be spoken to.
    assert_eq!(said(&bind(at)), (Some(0), String::from("from outside\n")), "{}", error(&bind(at)));
    refused(&format!("{PROGRAMS} --bind {at} /s"), "does not show this socket");
    let is_refused = |output: &Output, wanted: &str| {
        assert_eq!(said(output), (Some(1), String::new()), "{}", error(output));
        assert!(error(output).contains(wanted), "{}", error(output));
    };
    symlink(&proxy.0, place.join("proxy-link.sock")).unwrap();
    // Root's own links are followed, and this one leads to no directory.
    is_refused(&bind(&format!("{}/proxy-link.sock", text(&place))), if is_root() { "not a directory" } else { "is a link of uid" });
    fs::set_permissions(&place, fs::Permissions::from_mode(0o777)).unwrap();
    is_refused(&bind(at), "others may write in");
    fs::set_permissions(&place, fs::Permissions::from_mode(0o1777)).unwrap();
    assert_eq!(said(&bind(at)).0, Some(0));
    if is_root() {
        chown(&proxy.0, Some(65534), None).unwrap();
        is_refused(&bind(at), "it belongs to uid 65534");
    }
    for name in ["docker.sock", "bus", "agent.77"] {
        let acts = Proxy::at(&place.join(name));
        refused(&format!("{PROGRAMS} --bind {} /s", text(&acts.0)), "a socket of this name is never shown");
        is_refused(&listing(text(&acts.0), &format!("--bind {} /s", text(&acts.0)), &ask), "cannot name a socket");
    }
}

/// A run that lays an empty file over `.bashrc` of the directory, and waits for the end of its stdin.
fn waiting(tree: &Path) -> Command {
    waiting_under(tree, "/dev/null")
}

/// The same with another file over it.
fn waiting_under(tree: &Path, cover: &str) -> Command {
    let options = format!("{PROGRAMS} --bind {0} /w --ro-bind {cover} /w/.bashrc", text(tree));
    let script = "echo ready > /w/ready; cat; echo x > /w/.bashrc || exit 3";
    command(&[text(&program_path().unwrap()), "bwrap"], &options, &[], &["/bin/sh", "-c", script])
}

test!(Both, a_mount_point_is_shared_and_ends_with_the_last_run);
fn a_mount_point_is_shared_and_ends_with_the_last_run() {
    let tree = tree_named("tree");
    let (point, ready) = (tree.join(".bashrc"), tree.join("ready"));
    let begin_under = |cover: &str| {
        let _of_the_last = fs::remove_file(&ready);
        let mut child = waiting_under(&tree, cover).stdin(std::process::Stdio::piped()).spawn().unwrap();
        assert!(eventually(Duration::from_secs(20), || ready.exists()) && point.exists(), "{:?}", child.try_wait());
        child
    };
    let begin = || begin_under("/dev/null");
    // The second finds the name, and so keeps the file that is there read-only, as `srt` does.
    let (mut first, mut second) = (begin(), begin_under(text(&point)));
    assert_eq!(fs::metadata(&point).unwrap().permissions().mode() & 0o066, 0, "another user could lock it");
    drop(first.stdin.take());
    assert_eq!(first.wait().unwrap().code(), Some(3));
    assert!(point.exists(), "the second run still has it");
    drop(second.stdin.take());
    assert_eq!(second.wait().unwrap().code(), Some(3), "it was not laid over any more");
    assert!(!point.exists());
    // What a killed launcher leaves, the next run takes over.
    let mut killed = begin();
    killed.kill().unwrap();
    killed.wait().unwrap();
    assert!(point.exists());
    assert_eq!(start(&mut waiting(&tree), b"").wait().unwrap().code(), Some(3));
    assert!(!point.exists());
    // Control: what somebody has put there, before or meanwhile, stays.
    let mut third = begin();
    fs::set_permissions(&point, fs::Permissions::from_mode(0o644)).unwrap();
    fs::write(&point, "own").unwrap();
    drop(third.stdin.take());
    third.wait().unwrap();
    assert_eq!(fs::read_to_string(&point).unwrap(), "own");
    assert_eq!(start(&mut waiting(&tree), b"").wait().unwrap().code(), Some(3));
    assert_eq!(fs::read_to_string(&point).unwrap(), "own");
}
