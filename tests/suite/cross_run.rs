//! Two runs side by side on one host: one leaves something or makes itself heard, the other
//! looks. Each look has its control: in the run that left it, the same look finds it.
//!
//! Both runs are the same caller's, which is the nearest that two can be: an ordinary user's
//! share the uid. What two runs in one scratch have of each other is not looked at, since
//! sharing is what such a caller asks for; nor is timing. The last tests show what is not
//! stopped, so that the threat model states exactly what holds.

use std::{
    io::{BufRead, BufReader, Read},
    process::{Child, Stdio},
};

use serde_json::json;

use crate::support::{
    control::{Control, denied, program},
    exec::{ExecResult, exec_with, stockade},
    policy_dir::{PolicyDirectory, derived},
    runner::test,
};

/// A run that has done its part and stays until this is dropped.
struct ConcurrentRun(Child);

impl ConcurrentRun {
    #[track_caller]
    fn after(options: &[&str], act: &str) -> Self {
        let code = format!(
            "{}\nprint(flush=True)\nsys.stdin.read()\nprint('still here')",
            program(act).replace("print(json.dumps(answer(act)))", "act()\nprint('ready', flush=True)")
        );
        // What the act made lives as long as its frame: it is not called `act` for nothing.
        let code = code.replace("def act():", "def act():\n    global kept, more");
        let words = [&["run"], options, &["--", "/usr/bin/python3", "-c", &code]].concat();
        let mut child = stockade(words).stdin(Stdio::piped()).spawn().unwrap();
        let mut first = String::new();
        BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut first).unwrap();
        if first != "ready\n" {
            let mut why = String::new();
            child.stderr.take().unwrap().read_to_string(&mut why).unwrap();
            panic!("{act}: {why}");
        }
        ConcurrentRun(child)
    }

    /// It was there the whole time, and ends as it would have alone.
    #[track_caller]
    fn ends(mut self) {
        drop(self.0.stdin.take());
        assert!(self.0.wait().unwrap().success());
    }
}

impl Drop for ConcurrentRun {
    fn drop(&mut self) {
        // Ended already, where the test came so far.
        let _gone = self.0.kill();
        let _reaped = self.0.wait();
    }
}

fn look(options: &[&str], act: &str) -> ExecResult {
    let done = exec_with(options, json!({"code": program(act)}));
    done.succeeded();
    done
}

/// What one run leaves another does not find, and its own finds.
#[track_caller]
fn apart(options: &[&str], leave: &str, find: &str, errno: &str) {
    let neighbour = ConcurrentRun::after(options, leave);
    let done = look(options, find);
    assert_eq!(done.json(), errno, "{find}: {}", done.brief());
    neighbour.ends();
    let done = look(options, &format!("{leave}\n{find}"));
    assert_eq!(done.json(), "ok", "the control of {find}: {}", done.brief());
}

test!(Both, sockets_of_one_run_are_not_another_runs);
fn sockets_of_one_run_are_not_another_runs() {
    let bind = |family: &str, address: &str| format!("kept = socket.socket({family})\nkept.bind({address})\nkept.listen()");
    let connect = |family: &str, address: &str| format!("socket.socket({family}).connect({address})");
    for (family, address) in
        [("socket.AF_UNIX", "'\\0canary'"), ("socket.AF_INET", "('127.0.0.1', 40404)"), ("socket.AF_INET6", "('::1', 40404)")]
    {
        apart(&[], &bind(family, address), &connect(family, address), "ECONNREFUSED");
    }
    apart(&[], &bind("socket.AF_UNIX", "'/tmp/canary'"), &connect("socket.AF_UNIX", "'/tmp/canary'"), "ENOENT");
}

test!(Both, files_in_memory_of_one_run_are_not_another_runs);
fn files_in_memory_of_one_run_are_not_another_runs() {
    for path in ["/dev/shm/canary", "/tmp/canary", "/home/sandbox/canary", "/scratch/canary"] {
        apart(&[], &format!("write({path:?})"), &format!("read({path:?})"), "ENOENT");
    }
    let leave = "from multiprocessing import shared_memory, resource_tracker\nkept = shared_memory.SharedMemory('canary', True, 4096)\nresource_tracker.unregister('/canary', 'shared_memory')";
    apart(&[], leave, "from multiprocessing import shared_memory\nshared_memory.SharedMemory('canary')", "ENOENT");
}

/// A policy that allows these calls besides.
fn allowing(directory: &PolicyDirectory, names: &[&str]) -> String {
    directory.write("allowing", &derived(&format!("[seccomp]\nallow = {{ add = {} }}", json!(names))))
}

test!(Both, system_v_objects_of_one_run_are_not_another_runs);
fn system_v_objects_of_one_run_are_not_another_runs() {
    let directory = PolicyDirectory::new();
    let policy = allowing(&directory, &["shmget", "semget", "msgget"]);
    for (name, leave, find) in [
        ("shmget", "call(29, 0x5afe, 4096, 0o1666)", "call(29, 0x5afe, 0, 0)"),
        ("semget", "call(64, 0x5afe, 1, 0o1666)", "call(64, 0x5afe, 0, 0)"),
        ("msgget", "call(68, 0x5afe, 0o1666)", "call(68, 0x5afe, 0)"),
    ] {
        // By default the filter alone would do.
        let done = denied(find, "EPERM", Control::Reaches(&["ENOENT"]));
        assert_eq!(done["denials"][0]["what"], name);
        apart(&["--policy", &policy], leave, find, "ENOENT");
    }
}

test!(Both, message_queues_are_refused);
fn message_queues_are_refused() {
    let act = "call(240, b'canary', 0o102, 0o600, 0)\ncall(241, b'canary')";
    denied(act, "EPERM", Control::Outside);
    // Nor would one be the host's or another run's: no byte may be spent on any.
    let directory = PolicyDirectory::new();
    let policy = allowing(&directory, &["mq_open", "mq_unlink"]);
    assert_eq!(look(&["--policy", &policy], act).json(), "EMFILE");
}

test!(Both, keys_of_one_run_are_not_another_runs);
fn keys_of_one_run_are_not_another_runs() {
    let directory = PolicyDirectory::new();
    let policy = allowing(&directory, &["add_key", "keyctl"]);
    // The rings of the session, of the user, and of the user's session.
    for ring in [-3, -4, -5] {
        let leave = format!("call(248, b'user', b'canary', b'x', 1, {ring})");
        let find = format!("call(250, 10, {ring}, b'user', b'canary', 0)");
        denied(&find, "EPERM", Control::Reaches(&["ENOKEY"]));
        apart(&["--policy", &policy], &leave, &find, "ENOKEY");
    }
}

test!(Both, processes_of_one_run_are_not_another_runs);
fn processes_of_one_run_are_not_another_runs() {
    let neighbour = ConcurrentRun::after(&[], "kept = subprocess.Popen(['sleep', '600'])");
    // Every number that there can be, by asking and by sending; its own are 1, 3 and 4.
    let ask = "own = subprocess.Popen(['sleep', '600'])\nfound = []\nfor pid in range(1, 1 << 17):\n    try:\n        os.kill(pid, 0)\n        found.append(pid)\n    except ProcessLookupError: pass\n    except PermissionError: found.append(pid)\nassert set(found) <= {1, os.getpid(), own.pid} and own.pid in found, found\nos.kill(-1, 9)\nassert own.wait() == -9";
    assert_eq!(look(&[], ask).json(), "ok");
    neighbour.ends();
}

test!(Both, the_list_of_locks_is_empty);
/// The kernel leaves out those of processes in other PID namespaces, but not those that
/// belong to an open file: by file system and inode they tell what others have open.
fn the_list_of_locks_is_empty() {
    let act = "kept = open('/usr/bin/env', 'rb')\nfcntl.flock(kept, fcntl.LOCK_SH)\nif not read('/proc/locks').strip(): raise OSError(errno.ENOENT, 'no locks')";
    denied(act, "ENOENT", Control::Outside);
}

test!(Both, what_is_in_the_page_cache_is_not_told_of_files_of_the_host);
fn what_is_in_the_page_cache_is_not_told_of_files_of_the_host() {
    // Pages that mincore says are not in memory; the advice is to take them out.
    let act = |path: &str| {
        format!(
            "import glob\nlibrary.syscall.restype = ctypes.c_long\npath = {path}\nfd, size = os.open(path, os.O_RDONLY), os.path.getsize(path) & ~4095\nos.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)\npages = ctypes.create_string_buffer(size >> 12)\nmapped = call(9, 0, size, 1, 1, fd, 0)\ncall(27, mapped, size, pages)\nif all(page[0] & 1 for page in map(lambda n: pages[n], range(size >> 12))): raise OSError(errno.ENODATA, 'all are said to be there')"
        )
    };
    let large = "next(p for p in sorted(glob.glob('/usr/lib/python3*/**/*.py', recursive=True)) if os.path.getsize(p) > 1 << 16)";
    let own = format!("with open('/scratch/own', 'wb') as file: file.truncate(1 << 20)\n{}", act("'/scratch/own'"));
    denied(&act(large), "ENODATA", Control::Instead(&own));
    denied("call(451, 0, 0, 0, 0)", "EPERM", Control::Reaches(&["EBADF", "EFAULT", "ENOSYS"]));
}

test!(Both, leases_are_refused);
/// One would block a process of the host that opens the file, which in a scratch of the host the
/// code may own, and the launcher of the next run there. F_SETDELEG, of which older kernels
/// know nothing, would hold up changes to a directory too.
fn leases_are_refused() {
    let own = "path = f'/tmp/lease-{os.getpid()}'\nwrite(path)\nfd = os.open(path, os.O_RDONLY)\nos.unlink(path)";
    denied(&format!("{own}\nfcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)"), "EPERM", Control::Outside);
    denied(&format!("{own}\nfcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)"), "EPERM", Control::Outside);
    denied(&format!("{own}\nfcntl.fcntl(fd, 1040, bytes(8))"), "EPERM", Control::Reaches(&["EINVAL", "EAGAIN", "ok"]));
    denied(
        &format!("{own}\nfcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)"),
        "EPERM",
        Control::Instead(&format!("{own}\nfcntl.fcntl(fd, fcntl.F_GETLEASE)")),
    );
}

test!(Both, a_lock_on_a_file_of_the_host_is_felt_by_all);
/// Not stopped: the kernel keeps locks with the file, which is the host's for every run.
fn a_lock_on_a_file_of_the_host_is_felt_by_all() {
    let act = "kept = open('/usr/bin/env', 'rb')\nfcntl.flock(kept, fcntl.LOCK_EX | fcntl.LOCK_NB)";
    let neighbour = ConcurrentRun::after(&[], act);
    assert_eq!(look(&[], act).json(), "EAGAIN");
    neighbour.ends();
    assert_eq!(look(&[], act).json(), "ok", "it goes with the run that held it");
}

test!(Both, a_watch_on_a_directory_of_the_host_sees_who_opens_what);
/// Not stopped under `default`, by inotify or its forerunner dnotify, which gives no names.
/// A policy without the one, such as `strict`, is without the other.
fn a_watch_on_a_directory_of_the_host_sees_who_opens_what() {
    let by_name = "fd = call(294, 0)\ncall(254, fd, b'/usr/share', 0x20)";
    let by_signal = "fd = os.open('/usr/share', os.O_RDONLY)\nsignal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGIO])\nfcntl.fcntl(fd, fcntl.F_NOTIFY, fcntl.DN_ACCESS)";
    let directory = PolicyDirectory::new();
    let unwatched =
        directory.write("unwatched", &derived("[seccomp.allow]\nremove = [\"inotify_init\", \"inotify_init1\", \"inotify_add_watch\"]"));
    for (watch, wait) in [(by_name, "os.read(fd, 4096) != b''"), (by_signal, "signal.sigtimedwait([signal.SIGIO], 60) is not None")] {
        let code = program(&format!("{watch}\nprint('ready', flush=True)\nprint({wait})"));
        let mut watcher = stockade(["run", "--", "/usr/bin/python3", "-c", &code]).spawn().unwrap();
        let mut lines = BufReader::new(watcher.stdout.take().unwrap()).lines();
        assert_eq!(lines.next().unwrap().unwrap(), "ready");
        // What says that a file was opened, and what says that one was read.
        look(&[], "os.listdir('/usr/share')");
        assert_eq!(lines.next().unwrap().unwrap(), "True");
        assert!(watcher.wait().unwrap().success());
    }
    for watch in [by_name, by_signal] {
        assert_eq!(look(&["--policy", &unwatched], watch).json(), "EPERM");
    }
}
