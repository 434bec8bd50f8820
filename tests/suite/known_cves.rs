//! Escapes from other sandboxes that have a number. Each test does what the exploit did, and
//! shows beside it that the act works where the one protection is missing.
//!
//! That a hole of another program is not here proves nothing about this one's own holes: those
//! stand with their subjects, such as `scratch_protection.rs`. The one whose act is a name on the network, srt's NUL byte in
//! a SOCKS host, stands with the egress suite: `names::a_name_with_a_nul_byte_is_no_other_name`.

use std::{
    fs::{self, Permissions},
    os::unix::fs::{MetadataExt, PermissionsExt, lchown, symlink},
    path::Path,
    process::Command,
    sync::atomic::{AtomicBool, Ordering},
    thread,
};

use serde_json::{Value, json};

use crate::support::{
    control::{Control, denied, denied_in, outside, program},
    exec::{
        ExecResult, OWNER, chown_to_owner, exec, exec_with, program_path, run_under, run_with_stdin, scratch, scratch_named, stockade,
        text, token, write_file,
    },
    policy_dir::{PolicyDirectory, derived},
    runner::{directory, is_root, test},
};

/// A file that opens a program of the host for reading only, waits until no process runs it any
/// more, and opens the same file once more for writing.
const REOPEN: &str = "p = subprocess.Popen([PROGRAM, '600'])
while os.readlink(f'/proc/{p.pid}/exe') != os.path.realpath(PROGRAM): pass
fd = os.open(f'/proc/{p.pid}/exe', os.O_PATH)
p.kill()
p.wait()
os.write(os.open(f'/proc/self/fd/{fd}', os.O_WRONLY), b'overwritten')";

test!(Both, cve_2019_5736_the_hosts_program_is_not_overwritten);
/// runc, CVE-2019-5736: a process inside opened `/proc/PID/exe` of the runtime that entered
/// the container, and wrote to the host's `runc` as soon as no process ran it. Here nothing of
/// the host's program is executed inside: pid 1 is a file without a name, made for this run,
/// its `/proc` entry is closed to the code, and no mount with a program of the host can be
/// written.
fn cve_2019_5736_the_hosts_program_is_not_overwritten() {
    let victim = directory().join("victim");
    fs::copy("/usr/bin/sleep", &victim).unwrap();
    let act = |program: &str| REOPEN.replace("PROGRAM", &format!("{program:?}"));
    denied("os.open('/proc/1/exe', os.O_PATH)", "EACCES", Control::Instead("os.open('/proc/self/exe', os.O_PATH)"));
    denied(
        &act("/usr/bin/sleep"),
        "EACCES",
        Control::Instead(&act("/tmp/own").replacen("p = ", "import shutil\nshutil.copy('/usr/bin/sleep', '/tmp/own')\np = ", 1)),
    );
    // The other half of the exploit: a process that starts this script becomes its interpreter.
    let scratch = scratch();
    let script = scratch.join("script");
    write_file(&script, "#!/proc/self/exe\n");
    fs::set_permissions(&script, Permissions::from_mode(0o755)).unwrap();
    let program = program_path().unwrap();
    let before = fs::read(&program).unwrap();
    let output = stockade(["run", "--scratch", text(&scratch), "--", "./script"]).output().unwrap();
    assert!(output.status.code().is_some(), "{output:?}");
    assert!(fs::read(&program).unwrap() == before, "the program was changed");
    // The control: outside the act overwrites a program that is the attacker's to write.
    assert_eq!(outside(&[], &act(text(&victim))), "ok");
    assert!(fs::read(&victim).unwrap().starts_with(b"overwritten"));
}

test!(Both, cve_2024_21626_no_descriptor_leads_out);
/// runc, CVE-2024-21626: a descriptor of the host's `/sys/fs/cgroup` was left open, and a
/// working directory of `/proc/self/fd/7` led through it to the host's root. Here the
/// sandbox's first process closes what it has of its caller before anything else, executor and
/// program are started with the descriptors that they are given and no other, and no link of `/proc`
/// to an open directory is followed to the working directory: of `--chdir` and an image's that is
/// shown by `bwrap::no_open_descriptor_is_a_working_directory` and
/// `image_root::an_images_working_directory_leads_through_no_descriptor`.
fn cve_2024_21626_no_descriptor_leads_out() {
    let secret = token("descriptor");
    fs::write(directory().join("secret"), &secret).unwrap();
    let climb = format!(
        "import os\nfound = []\nfor top in ['/proc/self/fd/%d' % n for n in range(3, 64)] + ['/proc/1/fd/%d' % n for n in range(64)] + ['/proc/1/cwd', '/proc/1/root', '/proc/self/cwd']:\n    for up in ('', '/..', '/../../../../../../..'):\n        for name in ('secret', {:?}):\n            try: found.append(open(top + up + '/' + name).read())\n            except OSError: pass\nprint(len(found), found[:1])",
        text(&directory().join("secret"))
    );
    let starter = "import os, sys\nfor _ in range(20):\n    for path in ('/', '.', '/sys/fs/cgroup', '/proc/self/ns'): os.set_inheritable(os.open(path, os.O_RDONLY), True)\nos.execv(sys.argv[1], sys.argv[1:])";
    let program = program_path().unwrap();
    let request = json!({"code": climb}).to_string();
    let done =
        ExecResult::of(run_with_stdin(&mut run_under(&["/usr/bin/python3", "-c", starter, text(&program), "exec"]), request.as_bytes()));
    done.succeeded().expect(json!({"output": "0 []\n"}));
    // As a working directory, and as the scratch that becomes one: the directory itself is
    // shown then, and not what lies above it.
    let output = run_under(&[
        "/usr/bin/python3",
        "-c",
        starter,
        text(&program),
        "run",
        "--",
        "sh",
        "-c",
        "cd /proc/self/fd/7 || cd /proc/self/fd/8",
    ])
    .output()
    .unwrap();
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    // The control: without the launcher between, the same descriptors lead there.
    let output = run_under(&["/usr/bin/python3", "-c", starter, "/usr/bin/python3", "-c", &climb]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(said.contains(&secret) && !said.starts_with("0 "), "{said}");
}

/// A world whose `/dev` can be written, for the acts that replace something there.
const OPEN_DEV: &[&str] =
    &["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", "mount -t tmpfs none /dev && touch /dev/null && exec \"$0\" \"$@\""];

test!(Both, cve_2025_31133_what_masks_cannot_be_replaced);
/// runc, CVE-2025-31133: files of `/proc` are masked with the container's own `/dev/null`; an
/// image with a link in its place had the link's target mounted instead, such as
/// `core_pattern`, open for writing. Here what covers is made for the purpose, in a root that
/// is built from nothing before any code exists, and is read-only when there is some.
fn cve_2025_31133_what_masks_cannot_be_replaced() {
    for act in [
        "os.unlink('/dev/null')",
        "os.rename('/dev/null', '/dev/other')",
        "os.symlink('/proc/sys/kernel/core_pattern', '/dev/other')",
        "os.symlink('/proc/sys/kernel/core_pattern', '/dev/link')\nos.rename('/dev/link', '/dev/null')",
    ] {
        denied(act, "EROFS", Control::Behind(OPEN_DEV));
    }
    // An earlier run in the same scratch leaves a link where this run's cover will be.
    let (canary, scratch) = (directory().join("canary"), scratch());
    fs::write(&canary, "untouched").unwrap();
    chown_to_owner(&canary);
    symlink(&canary, scratch.join(".env")).unwrap();
    let mounted = "import os\nprint(os.path.islink('.env'), any(r[4].startswith('/proc') and 'rw' in r[5].split(',') for r in map(str.split, open('/proc/self/mountinfo'))), os.path.getsize('/proc/keys'))";
    let done = exec(json!({"code": mounted, "scratch": text(&scratch)}));
    done.succeeded().expect(json!({"output": "True False 0\n"}));
    assert_eq!(fs::read_to_string(&canary).unwrap(), "untouched");
    // The control: a file of that name is covered.
    fs::remove_file(scratch.join(".env")).unwrap();
    write_file(&scratch.join(".env"), "secret");
    denied_in(json!({"scratch": text(&scratch)}), "read('.env')", "EACCES", Control::Lifted("[scratch]\nhidden = { replace = [] }"));
}

/// Runs words on their own terminal and prints, as JSON, what they printed and how many
/// bytes then wait in it as if they had been typed.
const TERMINAL: &str = r#"
import fcntl, json, os, pty, struct, sys, termios, tty
master, slave = pty.openpty()
tty.setraw(slave)
pid = os.fork()
if pid == 0:
    os.login_tty(slave) if hasattr(os, "login_tty") else (os.setsid(), fcntl.ioctl(slave, termios.TIOCSCTTY, 0), [os.dup2(slave, n) for n in (0, 1, 2)])
    os.execv(sys.argv[1], sys.argv[1:])
status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
os.set_blocking(master, False)
said = b""
try:
    while more := os.read(master, 65536): said += more
except OSError: pass
typed = struct.unpack("i", fcntl.ioctl(slave, termios.FIONREAD, bytes(4)))[0]
print(json.dumps({"status": status, "said": said.decode(errors="replace"), "typed": typed}))
"#;

#[track_caller]
fn on_terminal(words: &[&str]) -> Value {
    let output = run_under(&[&["/usr/bin/python3", "-c", TERMINAL], words].concat()).output().unwrap();
    serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{}", String::from_utf8_lossy(&output.stderr)))
}

/// What the program said; the launcher says on the same terminal what is missing here.
fn first_line(found: &Value) -> &str {
    found["said"].as_str().unwrap().lines().next().unwrap_or_default()
}

test!(Both, cve_2025_52565_the_console_leads_nowhere_else, seconds 60);
/// runc, CVE-2025-52565: `/dev/pts/N` was bound to `/dev/console` before masks were in place,
/// and links in the image led the mount elsewhere. Here there is no `/dev/console`; the
/// terminal of a run is opened in its own `/dev/pts`, after the root has been entered,
/// and bound to nothing.
fn cve_2025_52565_the_console_leads_nowhere_else() {
    let inside = |words: &str| {
        let program_path = program_path().unwrap();
        let found = on_terminal(&[text(&program_path), "run", "--", "/usr/bin/python3", "-c", &program(words)]);
        first_line(&found).trim_matches('"').to_owned()
    };
    assert_eq!(inside("assert os.isatty(0) and os.ttyname(0) == '/dev/pts/0'"), "ok");
    assert_eq!(inside("assert not os.path.lexists('/dev/console')\nassert ' /dev/console ' not in read('/proc/self/mountinfo')"), "ok");
    for (words, errno) in [
        ("os.symlink('/proc/sys/kernel/core_pattern', '/dev/console')", "EROFS"),
        ("os.unlink('/dev/pts/0')", "EPERM"),
        ("os.rename('/dev/pts', '/dev/other')", "EBUSY"),
        ("call(165, b'/dev/pts/0', b'/dev/null', 0, 4096, 0)", "EPERM"),
    ] {
        let answer = inside(words);
        assert!(answer == errno || answer == "EACCES" || answer == "EROFS", "{words}: {answer}");
    }
    // The control: in a `/dev` that can be written, the link is made.
    assert_eq!(outside(OPEN_DEV, "os.symlink('/proc/sys/kernel/core_pattern', '/dev/console')"), "ok");
}

test!(Both, cve_2025_52881_writes_to_proc_are_not_led_astray);
/// runc, CVE-2025-52881: what runc wrote to `/proc/self/attr` and to sysctls went, by links
/// and by mounts that the code shared with it, to other files of `/proc`. Here nothing is
/// written to any `/proc` once code exists, no process inside can mount anything, and `/proc`
/// takes neither writes nor links.
fn cve_2025_52881_writes_to_proc_are_not_led_astray() {
    let own = &["unshare", "--user", "--map-root-user", "--mount"][..];
    denied("call(165, b'none', b'/proc/self/task', b'tmpfs', 0, 0)", "EPERM", Control::Behind(own));
    denied("call(165, b'/dev/null', b'/proc/self/attr/exec', 0, 4096, 0)", "EPERM", Control::Behind(own));
    denied("write('/proc/self/comm')", "EROFS", Control::Outside);
    denied("os.rename('/proc', '/other')", "EROFS", Control::Instead("os.mkdir('/tmp/proc')\nos.rename('/tmp/proc', '/tmp/other')"));
    // A `/proc` of the code's own making, in its scratch, is written to by no launcher.
    let (canary, scratch) = (directory().join("canary"), scratch());
    fs::write(&canary, "untouched").unwrap();
    fs::set_permissions(&canary, Permissions::from_mode(0o666)).unwrap();
    for path in ["proc/self/attr/exec", "proc/self/uid_map", "proc/self/setgroups", "proc/sys/kernel/hostname", "proc/self/oom_score_adj"] {
        let path = scratch.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        symlink(&canary, path).unwrap();
    }
    chown_to_owner(&scratch.join("proc"));
    let output = stockade(["run", "--scratch", text(&scratch.join("proc")), "--", "true"]).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    exec(json!({"code": "import os; os.chdir('proc')", "scratch": text(&scratch)})).succeeded();
    assert_eq!(fs::read_to_string(&canary).unwrap(), "untouched");
    assert_eq!(outside(&[], &format!("write({:?}, 'written')", text(&scratch.join("proc/self/attr/exec")))), "ok");
    assert_eq!(fs::read_to_string(&canary).unwrap(), "written", "the control");
}

test!(Both, cve_2026_47766_a_link_at_dev_makes_nothing_on_the_host);
/// crun, CVE-2026-47766, and the like of it in runc, CVE-2026-41579. The advisories were not
/// read here; by what others write of them, an image whose `/dev` is a link made the runtime
/// create devices and links on the host, before it had entered the image. That class is tried. Here there is no image: mount points are made in a tmpfs of the
/// run's own, and what a policy shows of the host is never written to make room for more.
fn cve_2026_47766_a_link_at_dev_makes_nothing_on_the_host() {
    let policies = PolicyDirectory::new();
    let (image, elsewhere) = (policies.0.join("image"), policies.0.join("elsewhere"));
    for path in [&image, &elsewhere] {
        fs::create_dir(path).unwrap();
        fs::set_permissions(path, Permissions::from_mode(0o755)).unwrap();
    }
    symlink(&elsewhere, image.join("dev")).unwrap();
    let is_empty = || fs::read_dir(&elsewhere).unwrap().count() == 0;
    let policy = policies.write("image", &derived(&format!("[filesystem]\nread_only = {{ add = [{:?}] }}", text(&image))));
    let look = format!("import os\nprint(os.path.islink({0:?} + '/dev'), os.path.exists({0:?} + '/dev/null'))", text(&image));
    let done = exec_with(&["--policy", &policy], json!({"code": look}));
    done.succeeded().expect(json!({"output": "True False\n"}));
    assert!(is_empty());
    // A mount point behind the link is not made, and one that is there is not changed.
    let behind = format!("[filesystem]\nread_only = {{ add = [{:?}, {:?}] }}", text(&image), text(&image.join("dev/null")));
    let policy = policies.write("behind", &derived(&behind));
    let ask = || exec_with(&["--policy", &policy], json!({"code": "print('ran')"}));
    // Where the link is not root's it is not even looked behind.
    let unless_foreign = |reason| if is_root() { reason } else { "shown_foreign_link" };
    ask().broke(unless_foreign("path_missing"), &["dev/null"]);
    assert!(is_empty());
    fs::write(elsewhere.join("null"), "untouched").unwrap();
    if is_root() {
        ask().succeeded();
    } else {
        ask().broke("shown_foreign_link", &["dev/null"]);
    }
    assert_eq!(fs::read_to_string(elsewhere.join("null")).unwrap(), "untouched");
    assert_eq!(fs::read_dir(&elsewhere).unwrap().count(), 1);
    // The control: who makes a device's place in the image by its path makes it elsewhere.
    fs::write(image.join("dev/zero"), "").unwrap();
    assert!(elsewhere.join("zero").exists());
}

test!(Both, cve_2021_30465_a_scratch_swapped_for_a_link_leads_nowhere, seconds 120);
/// runc, CVE-2021-30465, and the like of it in whatever looks at a directory by name twice: the
/// scratch becomes a link while the run is set up. Here it is opened once, through no link
/// but root's, and mounted by its descriptor: a run works in the directory that was checked,
/// or is refused.
fn cve_2021_30465_a_scratch_swapped_for_a_link_leads_nowhere() {
    let (work, victim) = (scratch_named("above").join("work"), scratch_named("victim"));
    write_file(&victim.join("secret"), token("swapped"));
    fs::create_dir(&work).unwrap();
    chown_to_owner(&work);
    let mut number = 0;
    raced(&work, &victim, || {
        number += 1;
        let code = format!("touch written-{number}; ls");
        let done = exec(json!({"code": code, "language": "sh", "scratch": text(&work)}));
        assert!(!done.output().contains("secret"), "{}", done.brief());
        // The control: who goes by the name is led there.
        (done, (0..1000).any(|_| work.join("secret").exists()))
    });
    assert_eq!(fs::read_dir(&victim).unwrap().count(), 1, "written through the link");
}

test!(Both, no_scratch_is_made_or_given_away_behind_a_swapped_link, seconds 120);
/// The same while a scratch is made, which root then gives away: what stands behind the link
/// by the same name is neither given away nor written.
fn no_scratch_is_made_or_given_away_behind_a_swapped_link() {
    let (work, victim) = (scratch_named("above").join("work"), directory().join("victim"));
    let mut news = (0..RACES).map(|number| format!("new-{number}"));
    for path in news.clone().map(|new| victim.join(new)).chain([work.clone()]) {
        fs::create_dir_all(path).unwrap();
    }
    fs::write(victim.join("secret"), token("swapped")).unwrap();
    chown_to_owner(&work);
    let owner = fs::metadata(&victim).unwrap().uid();
    raced(&work, &victim, || {
        let new = work.join(news.next().expect("one for each"));
        let done = exec_with(&["--policy", "blueprint"], json!({"code": "touch written", "language": "sh", "scratch": text(&new)}));
        (done, (0..1000).any(|_| work.join("secret").exists()))
    });
    for entry in fs::read_dir(&victim).unwrap() {
        let path = entry.unwrap().path();
        assert_eq!(fs::metadata(&path).unwrap().uid(), owner, "given away: {}", path.display());
        assert!(path.is_file() || fs::read_dir(&path).unwrap().next().is_none(), "written: {}", path.display());
    }
    assert_eq!(fs::read_dir(&victim).unwrap().count(), RACES + 1);
}

/// How often [`raced`] runs what it races.
const RACES: usize = 60;

/// Has runs asked for while a directory and a link to another, both of a user who may have a
/// scratch, change places all the time. `act` says also whether one by name was led astray.
fn raced(work: &Path, victim: &Path, mut act: impl FnMut() -> (ExecResult, bool)) {
    struct Stop<'a>(&'a AtomicBool);
    impl Drop for Stop<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }
    let link = work.with_file_name("link");
    symlink(victim, &link).unwrap();
    if is_root() {
        lchown(&link, Some(OWNER), Some(OWNER)).unwrap();
    }
    let stop = AtomicBool::new(false);
    let (mut ran, mut refused, mut led) = (0, 0, 0);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                exchange(work, &link);
            }
        });
        let _stopped = Stop(&stop);
        for _ in 0..RACES {
            let (done, astray) = act();
            match done["verdict"].as_str() {
                Some("exited") => ran += 1,
                Some("bad_request" | "sandbox_error") => refused += 1,
                _ => panic!("{}", done.brief()),
            }
            led += u32::from(astray);
        }
    });
    assert!(ran > 0 && refused > 0 && led > 0, "{ran} ran, {refused} were refused, {led} of the control were led: nothing was raced");
}

/// The two names change places in one step.
fn exchange(one: &Path, other: &Path) {
    use rustix::fs::{CWD, RenameFlags, renameat_with};
    renameat_with(CWD, one, CWD, other, RenameFlags::EXCHANGE).unwrap();
}

test!(Both, cve_2017_5226_nothing_is_typed_into_the_callers_terminal, seconds 60);
/// bubblewrap, CVE-2017-5226: a program inside pushed bytes into the terminal that it shared
/// with its caller (TIOCSTI), whose shell then read them as typed. Here the terminal inside is
/// another one, in its own session, and the filter refuses the request whatever the high
/// half of its number says.
fn cve_2017_5226_nothing_is_typed_into_the_callers_terminal() {
    let act = "for byte in b'id\\n': call(16, 0, REQUEST, ctypes.create_string_buffer(bytes([byte])))";
    let stockade = program_path().unwrap();
    for request in ["0x5412", "0x100005412", "0x541C"] {
        let code = program(&act.replace("REQUEST", request));
        let found = on_terminal(&[text(&stockade), "run", "--", "/usr/bin/python3", "-c", &code]);
        assert_eq!((&found["typed"], &found["status"]), (&json!(0), &json!(0)), "{found}");
        assert_eq!(first_line(&found), "\"EPERM\"", "{found}");
    }
    // The control: without the sandbox the bytes are there, or the kernel itself has refused
    // them to an ordinary user (dev.tty.legacy_tiocsti).
    let found = on_terminal(&["/usr/bin/python3", "-c", &program(&act.replace("REQUEST", "0x5412"))]);
    let refused_by_kernel = found["said"].as_str().is_some_and(|said| said.contains("EIO")) && !is_root();
    assert!(found["typed"] == 3 || refused_by_kernel, "{found}");
}

test!(Both, cve_2024_28185_a_planted_link_is_not_written_through);
/// judge0, CVE-2024-28185: the service wrote the next submission's script into a directory in
/// which the last one had left a link, and so, as root, to any file of the host. Here files of
/// a request are written inside, as the sandbox's id and behind all layers, and through no link.
fn cve_2024_28185_a_planted_link_is_not_written_through() {
    let (scratch, elsewhere) = (scratch(), directory().join("elsewhere"));
    fs::create_dir(&elsewhere).unwrap();
    fs::set_permissions(&elsewhere, Permissions::from_mode(0o777)).unwrap();
    let canary = elsewhere.join("canary");
    fs::write(&canary, "untouched").unwrap();
    fs::set_permissions(&canary, Permissions::from_mode(0o666)).unwrap();
    let plant = format!(
        "import os\nfor name in ('run', 'main.py'): os.symlink({:?}, name)\nos.symlink({:?}, 'new')\nos.symlink({:?}, 'box')",
        text(&canary),
        text(&elsewhere.join("made")),
        text(&elsewhere)
    );
    exec(json!({"code": plant, "scratch": text(&scratch)})).succeeded();
    for name in ["run", "main.py", "new", "box/canary", "box/made"] {
        exec(json!({"code": "", "scratch": text(&scratch), "files": {name: "written"}})).refused("files_not_writable", &[]);
    }
    assert_eq!(fs::read_to_string(&canary).unwrap(), "untouched");
    assert_eq!(fs::read_dir(&elsewhere).unwrap().count(), 1);
    // The control: a write by the name alone lands there.
    fs::write(scratch.join("run"), "written").unwrap();
    assert_eq!(fs::read_to_string(&canary).unwrap(), "written");
}

test!(RootOnly, cve_2024_28189_a_planted_link_is_not_given_away);
/// judge0, CVE-2024-28189: after a submission the service ran `chown` in its directory, which
/// followed a link and gave any file of the host away. Here no owner of anything is changed:
/// a scratch is seen through an idmapped mount, or is its owner's already.
fn cve_2024_28189_a_planted_link_is_not_given_away() {
    let (scratch, canary) = (scratch(), directory().join("canary"));
    fs::write(&canary, "root's").unwrap();
    let code = format!("import os\nos.symlink({:?}, 'link')\nopen('own', 'w').close()", text(&canary));
    for _ in 0..2 {
        exec(json!({"code": code.replace("os.symlink", "os.path.lexists('link') or os.symlink"), "scratch": text(&scratch), "collect": ["*"]})).succeeded();
        let seen = fs::metadata(&canary).unwrap();
        assert_eq!((seen.uid(), seen.gid()), (0, 0));
    }
    assert_eq!(fs::symlink_metadata(scratch.join("link")).unwrap().uid(), OWNER);
    assert_eq!(fs::metadata(scratch.join("own")).unwrap().uid(), OWNER);
    // The control: by its name the link gives the file away.
    assert!(Command::new("chown").arg(OWNER.to_string()).arg(scratch.join("link")).status().unwrap().success());
    assert_eq!(fs::metadata(&canary).unwrap().uid(), OWNER);
}
