//! `stockade bwrap` beside bubblewrap itself: the same command line, the same script, and what each
//! prints and exits with. Then what only a sandbox of stockade refuses, with bubblewrap as the control.

use std::{
    fs,
    io::Write,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::{Command, Output},
    time::Duration,
};

use crate::support::{
    exec::{program_path, run_under, start, stockade, text},
    policy_dir::{command_with_etc, derived_from},
    runner::{directory, eventually, is_root, test},
};

/// A root of the host's programs, as callers write it.
pub(super) const PROGRAMS: &str = "--unshare-all --new-session --ro-bind /usr /usr --symlink usr/bin /bin --symlink usr/lib /lib \
                        --symlink usr/lib64 /lib64 --proc /proc --dev /dev --setenv PATH /usr/bin";

pub(super) fn words(line: &str) -> Vec<String> {
    line.split_ascii_whitespace().map(str::to_owned).collect()
}

/// The options for one of the two programs, started with `inputs` at descriptors 5, 6 and so on.
pub(super) fn command(of: &[&str], options: &str, inputs: &[&[u8]], then: &[&str]) -> Command {
    let mut open = String::new();
    for (fd, bytes) in (5..).zip(inputs) {
        let path = directory().join(format!("input-{fd}"));
        fs::write(&path, bytes).unwrap();
        open.push_str(&format!("exec {fd}<'{}'; ", path.display()));
    }
    let script = format!("{open}exec \"$@\"");
    let mut command = run_under(&["sh", "-c", &script, "sh"]);
    command.args(of).args(words(options)).arg("--").args(then);
    command
}

pub(super) fn ours(options: &str, inputs: &[&[u8]], then: &[&str]) -> Output {
    command(&[text(&program_path().unwrap()), "bwrap"], options, inputs, then).output().unwrap()
}

pub(super) fn bubblewrap(options: &str, inputs: &[&[u8]], then: &[&str]) -> Output {
    command(&["bwrap"], options, inputs, then).output().unwrap()
}

/// A directory that may be bound writable. Root's is root's own: bubblewrap's user namespace has no
/// other id.
pub(super) fn tree_named(name: &str) -> PathBuf {
    let path = directory().join(name);
    fs::create_dir(&path).unwrap();
    path
}

pub(super) fn said(output: &Output) -> (Option<i32>, String) {
    (output.status.code(), String::from_utf8_lossy(&output.stdout).into_owned())
}

pub(super) fn error(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Both do the same with a shell's script, which is this.
#[track_caller]
fn both_say(options: &str, inputs: &[&[u8]], script: &str, wanted: (i32, &str)) {
    let options = format!("{PROGRAMS} {options}");
    let then = ["/bin/sh", "-c", script];
    let (real, own) = (bubblewrap(&options, inputs, &then), ours(&options, inputs, &then));
    let wanted = (Some(wanted.0), wanted.1.to_owned());
    assert_eq!(said(&real), wanted, "bubblewrap: {}", error(&real));
    assert_eq!(said(&own), wanted, "stockade: {}", error(&own));
}

/// A shell's script under this policy of the name `bwrap`.
fn under_policy(policy: &str, line: &str, script: &str) -> Output {
    let words: Vec<String> = [vec![String::from("bwrap")], words(line), vec![script.to_owned()]].concat();
    let arguments: Vec<&str> = words.iter().map(String::as_str).collect();
    if is_root() {
        return command_with_etc(&[("stockade/policies/bwrap.toml", policy)], &[], &arguments).output().unwrap();
    }
    let config = directory().join("config");
    fs::create_dir_all(config.join("stockade/policies")).unwrap();
    fs::File::create(config.join("stockade/policies/bwrap.toml")).unwrap().write_all(policy.as_bytes()).unwrap();
    stockade(&arguments).env("XDG_CONFIG_HOME", &config).output().unwrap()
}

/// Nothing was started, and this was said.
#[track_caller]
pub(super) fn refused(options: &str, wanted: &str) {
    let output = ours(options, &[], &["/bin/echo", "started"]);
    assert_eq!(said(&output), (Some(1), String::new()), "{}", error(&output));
    assert!(error(&output).contains(wanted), "{options}: {}", error(&output));
}

test!(Both, each_file_operation_does_what_bubblewrap_does, needs[Program("bwrap")]);
fn each_file_operation_does_what_bubblewrap_does() {
    let (tree, other) = (tree_named("tree"), tree_named("other"));
    fs::write(tree.join("old"), "old\n").unwrap();
    fs::create_dir(tree.join("below")).unwrap();
    let (tree, other) = (text(&tree), text(&other));
    let say = |options: &str, script: &str, wanted: &str| both_say(options, &[], script, (0, wanted));
    say(&format!("--bind {tree} /w"), "cat /w/old; echo new > /w/new; cat /w/new; rm /w/new", "old\nnew\n");
    say(
        &format!("--bind {tree} /w --bind {other} /tmp"),
        "echo 1 > /w/1; echo 2 > /tmp/2; ls /w /tmp; rm /w/1 /tmp/2",
        "/tmp:\n2\n\n/w:\n1\nbelow\nold\n",
    );
    say("--ro-bind /usr/bin /tools", "test -x /tools/env && echo shown; touch /tools/x 2>/dev/null || echo refused", "shown\nrefused\n");
    say("--tmpfs /t", "ls -A /t; echo x > /t/x; cat /t/x", "x\n");
    say("--perms 0700 --tmpfs /t --perms 0750 --dir /t/d --dir /t/e", "stat -c %a /t /t/d /t/e", "700\n750\n755\n");
    say("--symlink to/there /t/link", "readlink /t/link", "to/there\n");
    say(
        "--tmpfs /t --dir /t/d --chmod 0711 /t/d --chmod 1777 /t --dir /x/y --chmod 0500 /x --dir /x/z",
        "stat -c %a /t/d /t /x /x/z",
        "711\n1777\n500\n755\n",
    );
    // Later operations lie over earlier ones.
    say("--tmpfs /t --dir /t/a --ro-bind /usr/bin /t/a --dir /t/b", "ls /t; test -x /t/a/env && echo bound", "a\nb\nbound\n");
    say("--tmpfs /t --ro-bind /usr/bin /t/a --tmpfs /t", "ls -A /t; echo done", "done\n");
    say(&format!("--bind {tree} /w --tmpfs /w/below"), "touch /w/below/x; ls /w/below", "x\n");
    say(&format!("--bind {tree} /w --ro-bind {tree}/below /w/below"), "touch /w/below/y 2>/dev/null || echo refused", "refused\n");
    say("--ro-bind /usr/share /w --ro-bind /dev/null /w/doc/base-files/README", "cat /w/doc/base-files/README; echo done", "done\n");
    // Covered twice; bubblewrap's is a device, which cannot be opened there.
    let covered = format!("--ro-bind /dev/null /w/old --ro-bind {tree}/below /w/below --ro-bind /dev/null /w/old");
    say(&format!("--bind {tree} /w {covered}"), "cat /w/old 2>/dev/null; echo done", "done\n");
    say(&format!("--bind /{tree} /w"), "cat /w/old", "old\n");
    say("--tmpfs /run --dir /run/d --tmpfs /dev/shm", "touch /run/x /dev/shm/y && ls /run/x /dev/shm", "/run/x\n\n/dev/shm:\ny\n");
    say("--ro-bind-try /no/such /x --bind-try /no/such /y", "ls -d /x /y 2>/dev/null; echo done", "done\n");
    // What was laid over the tree has left nothing in it.
    assert_eq!(fs::read_dir(Path::new(tree).join("below")).unwrap().count(), 0);
}

test!(Both, contents_and_words_come_from_descriptors, needs[Program("bwrap")]);
fn contents_and_words_come_from_descriptors() {
    let data: &[u8] = b"data \xff\n";
    let options = "--tmpfs /t --file 5 /t/file --ro-bind-data 6 /t/fixed --perms 0600 --bind-data 7 /t/own";
    let script = "cat /t/file; od -An -c /t/fixed | tr -d ' '; cat /t/own; for f in file fixed own; do echo >> /t/$f; done 2>/dev/null; wc -c < /t/own; wc -c < /t/fixed; stat -c %a /t/file /t/own";
    both_say(options, &[b"first\n", data, b"third\n"], script, (0, "first\ndata377\\n\nthird\n7\n7\n666\n600\n"));
    both_say("--args 5", &[b"--tmpfs\0/t\0--dir\0/t/of-args\0"], "ls /t", (0, "of-args\n"));
    let output = ours(&format!("{PROGRAMS} --args 77"), &[], &["true"]);
    assert!(said(&output).0 == Some(1) && error(&output).contains("descriptor 77 is not open"), "{}", error(&output));
}

test!(Both, identity_directory_and_variables_are_bubblewraps, needs[Program("bwrap")]);
fn identity_directory_and_variables_are_bubblewraps() {
    let tree = tree_named("tree");
    let say = |options: &str, script: &str, wanted: &str| both_say(options, &[], script, (0, wanted));
    say("--uid 1234 --gid 4321", "id -u; id -g", "1234\n4321\n");
    say("--hostname box", "cat /proc/sys/kernel/hostname", "box\n");
    say(&format!("--bind {} /w --chdir /w", text(&tree)), "pwd", "/w\n");
    say("", "pwd", "/\n");
    say("--setenv A 1 --setenv B 2 --setenv A 3 --unsetenv B", "echo $A,$B", "3,\n");
    say("--setenv A 1 --clearenv --setenv B 2", "env | grep -c -e A= -e HOME=; echo $B", "0\n2\n");
    // The caller's own directory is kept where it is shown.
    let mut here =
        command(&[text(&program_path().unwrap()), "bwrap"], &format!("{PROGRAMS} --bind {0} {0}", text(&tree)), &[], &["/bin/pwd"]);
    let here = here.current_dir(&tree).output().unwrap();
    assert_eq!(said(&here), (Some(0), format!("{}\n", text(&tree))), "{}", error(&here));
}

test!(Both, no_open_descriptor_is_a_working_directory, needs[Program("bwrap")]);
/// As CVE-2024-21626 of runc: by name, and by a link that earlier code has left.
fn no_open_descriptor_is_a_working_directory() {
    let (host, tree) = (tree_named("host"), tree_named("tree"));
    fs::write(host.join("secret"), "").unwrap();
    symlink("/proc/self/fd/9", tree.join("link")).unwrap();
    symlink(".", tree.join("plain")).unwrap();
    let starts = |of: &[&str], directory: &str| {
        let script = format!("exec 9<'{}' && exec \"$@\"", host.display());
        let mut command = run_under(&["sh", "-c", &script, "sh"]);
        command.args(of).args(words(&format!("{PROGRAMS} --bind {} /w --chdir {directory} -- /bin/ls", text(&tree))));
        command.output().unwrap()
    };
    let program = program_path().unwrap();
    let own = |directory: &str| starts(&[text(&program), "bwrap"], directory);
    for directory in ["/proc/self/fd/9", "/w/link", "/proc/thread-self/fd/9", "/proc/self/root", "/proc/self/cwd", "/proc/self/fd"] {
        let done = own(directory);
        assert_eq!(said(&done), (Some(1), String::new()), "{directory}: {}", error(&done));
        assert!(error(&done).contains(&format!("enter the working directory {directory}: ")), "{}", error(&done));
    }
    // The controls: a link that leads elsewhere, and the descriptors where they are open.
    assert_eq!(said(&own("/w/plain")), (Some(0), String::from("link\nplain\n")));
    assert!(said(&starts(&["bwrap"], "/proc/self/fd")).1.starts_with("0\n1\n2\n"));
    for directory in ["/proc/self/fd/9", "/w/link"] {
        assert_eq!(said(&starts(&["bwrap"], directory)), (Some(0), String::from("secret\n")), "{directory}");
    }
}

test!(Both, the_sandbox_is_as_closed_as_bubblewraps_with_all_its_options, needs[Program("bwrap")]);
fn the_sandbox_is_as_closed_as_bubblewraps_with_all_its_options() {
    let options = "--disable-userns --cap-drop ALL --unshare-user";
    let say = |script: &str, wanted: &str| both_say(options, &[], script, (0, wanted));
    say("unshare --user true 2>/dev/null || echo refused", "refused\n");
    say("grep -E '^Cap(Eff|Bnd)' /proc/self/status | cut -f2 | sort -u", "0000000000000000\n");
    say("tail -n +3 /proc/net/dev | cut -d: -f1 | tr -d ' '", "lo\n");
    say("ls -d /proc/[0-9]* | wc -l | sed 's/^[1-9]$/few/'", "few\n");
    say("for d in null zero full random urandom tty; do test -c /dev/$d || echo no $d; done", "");
}

test!(Both, the_exit_status_is_bubblewraps, needs[Program("bwrap")]);
fn the_exit_status_is_bubblewraps() {
    both_say("", &[], "exit 3", (3, ""));
    both_say("", &[], "kill -KILL $$", (137, ""));
    both_say("", &[], "kill -TERM $$", (143, ""));
    for (options, then) in
        [("--ro-bind /no/such /x", "true"), ("", "no-such-program"), ("--frobnicate", "true"), ("--chdir /no/such", "true")]
    {
        let options = format!("{PROGRAMS} {options}");
        let (real, own) = (bubblewrap(&options, &[], &[then]), ours(&options, &[], &[then]));
        assert_eq!((real.status.code(), own.status.code()), (Some(1), Some(1)), "{options}: {}{}", error(&real), error(&own));
        assert!(error(&own).starts_with("stockade-bwrap: "), "{}", error(&own));
    }
}

/// A filter that answers EPERM to mkdir(2) and mkdirat(2), or with `allows` nothing but to let all
/// pass: `struct sock_filter` each.
fn filter(allows: bool) -> Vec<u8> {
    let step = |code: u16, jt: u8, k: u32| [&code.to_ne_bytes()[..], &[jt, 0], &k.to_ne_bytes()].concat();
    let (load, allow, deny) = (step(0x20, 0, 0), step(0x06, 0, 0x7fff_0000), step(0x06, 0, 0x0005_0001));
    if allows { allow } else { [load, step(0x15, 2, 83), step(0x15, 1, 258), allow, deny].concat() }
}

test!(Both, a_callers_filter_is_added_and_never_replaces_the_sandboxs_own, needs[Program("bwrap")]);
fn a_callers_filter_is_added_and_never_replaces_the_sandboxs_own() {
    let script = "mkdir /t/x 2>/dev/null && echo made || echo refused";
    both_say("--tmpfs /t --seccomp 5", &[&filter(false)], script, (0, "refused\n"));
    both_say("--tmpfs /t --seccomp 5", &[&filter(true)], script, (0, "made\n"));
    both_say("--tmpfs /t --add-seccomp-fd 5 --add-seccomp-fd 6", &[&filter(true), &filter(false)], script, (0, "refused\n"));
    let keyctl = "import ctypes; c = ctypes.CDLL(None, use_errno=True); print(c.syscall(250, 0, -3, 0), ctypes.get_errno())";
    let then = ["/usr/bin/python3", "-c", keyctl];
    let options = format!("{PROGRAMS} --seccomp 5");
    // Control: with that filter alone keyctl gives the session keyring's number.
    let real = said(&bubblewrap(&options, &[&filter(true)], &then)).1;
    assert!(!real.starts_with('-') && real.ends_with(" 0\n"), "{real}");
    assert_eq!(said(&ours(&options, &[&filter(true)], &then)), (Some(0), String::from("-1 1\n")));
    for (bytes, wanted) in
        [(&b"1234567"[..], "7 bytes are no filter"), (&[], "0 bytes are no filter"), (&[0xff; 8], "the kernel takes no such filter")]
    {
        let output = ours(&options, &[bytes], &["true"]);
        assert!(said(&output).0 == Some(1) && error(&output).contains(wanted), "{}", error(&output));
    }
}

/// A filter that lets all calls pass but these, for which it answers the errno; 0 is success. A call of
/// a third value is answered only where its second argument has that value.
fn answering(calls: &[(u32, u16, Option<u32>)]) -> Vec<u8> {
    let step = |code: u16, jump_false: u8, k: u32| [&code.to_ne_bytes()[..], &[0, jump_false], &k.to_ne_bytes()].concat();
    let mut program = Vec::new();
    for (call, errno, second) in calls {
        let answer = step(0x06, 0, 0x0005_0000 | u32::from(*errno));
        let told = second.map_or(answer.clone(), |value| [step(0x20, 0, 24), step(0x15, 1, value), answer].concat());
        program.extend([step(0x20, 0, 0), step(0x15, u8::try_from(told.len() / 8).unwrap(), *call), told].concat());
    }
    program.extend(step(0x06, 0, 0x7fff_0000));
    program
}

test!(Both, a_callers_filter_answers_no_call_of_the_set_up, needs[Program("bwrap")]);
fn a_callers_filter_answers_no_call_of_the_set_up() {
    // What a filter would answer that wants the sandbox's own not to be loaded: that it has been. Then that
    // so have limits and Landlock, and that descriptors are closed.
    let loaded = [(317, 16, Some(8)), (317, 16, Some(40)), (317, 0, Some(0)), (435, 38, None)];
    let hostile = answering(&loaded);
    let more_hostile = answering(&[&loaded[..], &[(302, 0, None), (446, 0, None), (436, 0, None)]].concat());
    let script = "import ctypes; c = ctypes.CDLL(None, use_errno=True); print(c.syscall(250, 0, -3, 0), ctypes.get_errno())\n\
                  print([line.split()[3:5] for line in open('/proc/self/limits') if line.startswith('Max open files')])\n\
                  try: __import__('os').mkfifo('/t/f'); print('made')\n\
                  except PermissionError: print('refused')\n";
    let (then, options) = (["/usr/bin/python3", "-c", script], format!("{PROGRAMS} --tmpfs /t --seccomp 5"));
    let of = |filter: &[u8]| said(&ours(&options, &[filter], &then));
    let harmless = of(&filter(true));
    assert!(harmless.0 == Some(0) && harmless.1.starts_with("-1 1\n") && harmless.1.ends_with("refused\n"), "{harmless:?}");
    assert_eq!((of(&hostile), of(&more_hostile)), (harmless.clone(), harmless));
    // Control: a sandbox that has that filter alone refuses none of it.
    let real = said(&bubblewrap(&options, &[&hostile], &then)).1;
    assert!(!real.starts_with('-') && real.ends_with("made\n"), "{real}");
    let load = "import ctypes, struct; c = ctypes.CDLL(None, use_errno=True)\n\
                step = ctypes.create_string_buffer(struct.pack('HBBI', 6, 0, 0, 0x7fff0000))\n\
                program = struct.pack('HxxxxxxP', 1, ctypes.addressof(step))\n\
                print(c.syscall(317, 1, 0, program), ctypes.get_errno(), c.prctl(22, 2, program), ctypes.get_errno())\n";
    let (then, filters) = (["/usr/bin/python3", "-c", load], [filter(true), filter(true)]);
    let options = format!("{PROGRAMS} --add-seccomp-fd 5 --add-seccomp-fd 6");
    let inputs = [filters[0].as_slice(), filters[1].as_slice()];
    assert_eq!(said(&ours(&options, &inputs, &then)), (Some(0), String::from("-1 1 -1 1\n")));
    assert_eq!(said(&bubblewrap(&options, &inputs, &then)), (Some(0), String::from("0 0 0 0\n")), "the control");
}

test!(Both, a_callers_filter_that_refuses_every_call_ends_the_start, needs[Program("bwrap")]);
fn a_callers_filter_that_refuses_every_call_ends_the_start() {
    // EPERM to all, and 0 to all, as if each had been done: exit_group(2) too.
    for refuses in [0x0005_0001u32, 0x0005_0000] {
        let filter = [&6u16.to_ne_bytes()[..], &[0, 0], &refuses.to_ne_bytes()].concat();
        let done = ours(&format!("{PROGRAMS} --seccomp 5"), &[&filter], &["/bin/true"]);
        assert_eq!(said(&done), (Some(1), String::new()), "{}", error(&done));
        assert!(error(&done).contains("start the program /bin/true: "), "{}", error(&done));
    }
    let done = ours(&format!("{PROGRAMS} --seccomp 5"), &[&filter(true)], &["/bin/true"]);
    assert_eq!(said(&done), (Some(0), String::new()), "the control: {}", error(&done));
}

test!(Both, no_socket_or_fifo_is_left_on_the_host, needs[Program("bwrap")]);
fn no_socket_or_fifo_is_left_on_the_host() {
    let tree = tree_named("tree");
    let make = "import os, socket\n\
                for act in (lambda: os.mkfifo('/tmp/w/fifo'), lambda: socket.socket(socket.AF_UNIX).bind('/tmp/w/socket'), lambda: open('/tmp/w/file', 'w')):\n\
                \x20   try: act(); print(0)\n\
                \x20   except OSError as e: print(e.errno)";
    let (options, then) = (format!("{PROGRAMS} --tmpfs /tmp --bind {} /tmp/w", text(&tree)), ["/usr/bin/python3", "-c", make]);
    assert_eq!(said(&ours(&options, &[], &then)), (Some(0), String::from("13\n13\n0\n")));
    let names = || fs::read_dir(&tree).unwrap().count();
    assert_eq!(names(), 1);
    // The controls: where no directory of the host lies, and bubblewrap.
    let own = format!("{PROGRAMS} --tmpfs /tmp --dir /tmp/w");
    assert_eq!(said(&ours(&own, &[], &then)), (Some(0), String::from("0\n0\n0\n")));
    assert_eq!(said(&bubblewrap(&options, &[], &then)), (Some(0), String::from("0\n0\n0\n")));
    assert_eq!(names(), 3);
}

test!(Both, what_is_shown_read_only_in_a_writable_directory_stays_in_its_place, needs[Program("bwrap")]);
fn what_is_shown_read_only_in_a_writable_directory_stays_in_its_place() {
    let tree = tree_named("tree");
    fs::create_dir_all(tree.join("git/hooks")).unwrap();
    let script = "mv git moved 2>/dev/null && mkdir -p git/hooks; echo x > git/hooks/new && echo written; echo y > own && echo own";
    let options = |read_only: &str| format!("{PROGRAMS} --bind {0} /w --ro-bind {0}{read_only} /w{read_only} --chdir /w", text(&tree));
    let run = |read_only: &str| ours(&options(read_only), &[], &["/bin/sh", "-c", script]);
    let done = run("/git/hooks");
    assert_eq!(said(&done), (Some(0), String::from("own\n")), "{}", error(&done));
    assert!(!tree.join("git/hooks/new").exists() && !tree.join("moved").exists());
    let done = run("");
    assert_eq!(said(&done).1, "", "{}", error(&done));
    fs::write(tree.join("git/hooks/old"), "").unwrap();
    let covered = format!("{PROGRAMS} --bind {0} /w --tmpfs /w/git --ro-bind {0}/git/hooks /w/git/hooks", text(&tree));
    refused(&covered, "does not show");
    // Control: where nothing above is kept in its place, code puts its own there.
    let real = bubblewrap(&options("/git/hooks"), &[], &["/bin/sh", "-c", script]);
    assert!(said(&real).1.contains("written") && tree.join("git/hooks/new").exists(), "{}", error(&real));
}

test!(Both, no_link_leaves_writable_what_was_to_be_read_only, needs[Program("bwrap")]);
fn no_link_leaves_writable_what_was_to_be_read_only() {
    let tree = tree_named("tree");
    fs::create_dir_all(tree.join("kept")).unwrap();
    symlink("kept", tree.join("link")).unwrap();
    symlink("nowhere", tree.join("loose")).unwrap();
    let tree = text(&tree);
    for option in ["--ro-bind", "--ro-bind-try"] {
        let options = format!("{PROGRAMS} --bind {tree} {tree} {option} {tree}/link {tree}/link");
        refused(&options, "link");
        // The control: bubblewrap follows it.
        let script = format!("touch {tree}/kept/x 2>/dev/null || echo read-only; test -d {tree}/kept && echo there");
        assert_eq!(said(&bubblewrap(&options, &[], &["/bin/sh", "-c", &script])), (Some(0), String::from("read-only\nthere\n")));
    }
    // The same of a link elsewhere, for a place in the tree. Root's own links are followed.
    let elsewhere = tree_named("elsewhere");
    symlink("kept", elsewhere.join("link")).unwrap();
    if !is_root() {
        refused(&format!("{PROGRAMS} --bind {tree} /w --ro-bind-try {}/link /w/kept", text(&elsewhere)), "link");
    }
    // What is not there is left out.
    let nothing = format!("{PROGRAMS} --bind {tree} {tree} --ro-bind-try {tree}/none {tree}/none");
    assert_eq!(said(&ours(&nothing, &[], &["/bin/echo", "on"])), (Some(0), String::from("on\n")));
}

test!(Both, nothing_laid_read_only_leaves_a_directory_of_the_host_writable, needs[Program("bwrap")]);
fn nothing_laid_read_only_leaves_a_directory_of_the_host_writable() {
    let (tree, other) = (tree_named("tree"), tree_named("other"));
    for name in ["etc", "kept", "u"] {
        fs::create_dir(tree.join(name)).unwrap();
    }
    fs::write(other.join("file"), "x").unwrap();
    symlink(".", other.join("link")).unwrap();
    let (tree, other) = (text(&tree), text(&other));
    for (options, at, wanted) in [
        (format!("--bind {tree} /w --ro-bind /etc /w/etc"), "/w/etc", "shows parts"),
        (format!("--bind {tree} /w --bind {other} /w/u --ro-bind {tree} /w"), "/w/u", "may write"),
        (format!("--bind {tree} /w --ro-bind-try {other} /w/kept"), "/w/kept", "does not show"),
        (format!("--bind {tree} /w/u --ro-bind-try {other} /w"), "/w/u", "does not show"),
        (format!("--bind {tree} /w --symlink w /v --ro-bind-try {other} /v/kept"), "/w/kept", "does not show"),
        (format!("--bind {tree} /w/u --ro-bind-try {other}/link /w"), "/w/u", if is_root() { "does not show" } else { "link" }),
        (format!("--bind {tree} /w --ro-bind-try {other}/file/x /w/kept"), "/w/kept", "not a directory"),
    ] {
        let options = format!("{PROGRAMS} {options}");
        refused(&options, wanted);
        // The control: bubblewrap keeps it from being written, which otherwise it is.
        let script = format!("touch {at}/new 2>/dev/null || echo kept");
        let (status, told) = said(&bubblewrap(&options, &[], &["/bin/sh", "-c", &script]));
        assert!((status, told.as_str()) == (Some(0), "kept\n") || status == Some(1), "{options}: {told}");
    }
    // What leads nowhere, or cannot lie over the host, is left out.
    for options in
        [format!("--bind {tree} /w --ro-bind-try {other}/none /w/kept"), format!("--bind {tree} /w --ro-bind-try {other}/link /x")]
    {
        assert_eq!(said(&ours(&format!("{PROGRAMS} {options}"), &[], &["/bin/echo", "on"])), (Some(0), String::from("on\n")), "{options}");
    }
    let writable = format!("{PROGRAMS} --bind {tree} /w --bind {other} /w/u");
    assert_eq!(said(&ours(&writable, &[], &["/bin/sh", "-c", "touch /w/u/new && echo made"])), (Some(0), String::from("made\n")));
}

test!(Both, no_state_of_the_kernel_is_a_writable_directory, needs[Program("bwrap")]);
fn no_state_of_the_kernel_is_a_writable_directory() {
    let mut other = run_under(&["sleep", "60"]).spawn().unwrap();
    let options = format!("{PROGRAMS} --bind /proc/{} /x", other.id());
    refused(&options, "its file system is the kernel's own");
    // The control: bubblewrap shows it.
    let shown = bubblewrap(&options, &[], &["/bin/cat", "/x/comm"]);
    other.kill().unwrap();
    other.wait().unwrap();
    assert_eq!(said(&shown), (Some(0), String::from("sleep\n")), "{}", error(&shown));
}

test!(Both, status_and_pid_are_told_as_bubblewrap_tells_them, needs[Program("bwrap")]);
fn status_and_pid_are_told_as_bubblewrap_tells_them() {
    for of in [&["bwrap"][..], &[text(&program_path().unwrap()), "bwrap"]] {
        let told = directory().join("told");
        let script = format!("exec 5>'{}' 6>'{}'; exec \"$@\"", told.display(), directory().join("info").display());
        let mut command = run_under(&["sh", "-c", &script, "sh"]);
        command.args(of).args(words(&format!("{PROGRAMS} --json-status-fd 5 --info-fd 6 -- /bin/sh -c")));
        assert_eq!(command.arg("exit 7").output().unwrap().status.code(), Some(7), "{of:?}");
        let lines: Vec<serde_json::Value> =
            fs::read_to_string(&told).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert!(lines[0]["child-pid"].as_u64().is_some_and(|pid| pid > 1) && lines[1]["exit-code"] == 7, "{of:?}: {lines:?}");
        let info: serde_json::Value = serde_json::from_str(&fs::read_to_string(directory().join("info")).unwrap()).unwrap();
        assert_eq!(info["child-pid"], lines[0]["child-pid"], "{of:?}");
    }
}

test!(Both, the_sandbox_ends_with_its_parent_where_that_is_asked);
fn the_sandbox_ends_with_its_parent_where_that_is_asked() {
    let tree = tree_named("tree");
    for (option, ends) in [("--die-with-parent", true), ("", false)] {
        let (begun, stop) = (tree.join("begun"), tree.join("stop"));
        let (program, line) = (program_path().unwrap(), format!("{PROGRAMS} {option} --bind {} /w -- /bin/sh -c", text(&tree)));
        // A parent that is killed, beside which the sandbox runs.
        let mut parent = run_under(&["sh", "-c", "\"$@\" & wait", "sh", text(&program), "bwrap"]);
        parent.args(words(&line)).arg("touch /w/begun; for i in $(seq 600); do test -e /w/stop && exit; touch /w/alive; sleep 0.05; done");
        let mut parent = start(&mut parent, b"");
        assert!(eventually(Duration::from_secs(20), || begun.exists()), "{option}");
        parent.kill().unwrap();
        parent.wait().unwrap();
        let alive = tree.join("alive");
        let is_over = || {
            let _gone = fs::remove_file(&alive);
            !eventually(Duration::from_millis(300), || alive.exists())
        };
        assert_eq!(eventually(Duration::from_millis(if ends { 20_000 } else { 300 }), is_over), ends, "{option}");
        fs::write(&stop, "").unwrap();
        assert!(eventually(Duration::from_secs(20), is_over), "{option}");
        fs::remove_file(stop).unwrap();
        fs::remove_file(begun).unwrap();
    }
}

test!(Both, the_hosts_secrets_are_not_shown_with_the_whole_host, needs[Program("bwrap")]);
fn the_hosts_secrets_are_not_shown_with_the_whole_host() {
    let secret = tree_named("secret");
    fs::write(secret.join("key"), "canary").unwrap();
    let key = secret.join("key");
    let script = format!("cat {}; ls -d /root /home /var /run/* /etc/shadow /etc/ssh /srv {}; echo done", text(&key), text(&directory()));
    let then = ["/bin/sh", "-c", &script];
    for options in ["--ro-bind / /", "--dev-bind / /", "--ro-bind / / --dev /dev --proc /proc --tmpfs /tmp"] {
        // Control: bubblewrap shows them.
        let real = said(&bubblewrap(options, &[], &then));
        assert!(options.ends_with("/tmp") || real.1.contains("canary"), "{real:?}");
        assert!(real.1.contains("/etc/shadow"), "{real:?}");
        assert_eq!(said(&ours(options, &[], &then)), (Some(0), String::from("/run/stockade\ndone\n")), "{options}");
    }
    for path in [text(&secret), "/etc/shadow", "/run", "/home", "/var/log", "/sys"] {
        refused(&format!("--ro-bind / / --ro-bind {path} /x"), "policy `bwrap` does not show");
        let left_out = ours(&format!("--ro-bind / / --ro-bind-try {path} /x"), &[], &["/bin/sh", "-c", "ls -d /x; echo done"]);
        assert_eq!(said(&left_out), (Some(0), String::from("done\n")), "{}", error(&left_out));
    }
    // Below a directory that the policy shows a link of anybody leads nowhere else.
    symlink(&secret, secret.join("link")).unwrap();
    refused(&format!("--ro-bind {}/link /x", text(&secret)), if is_root() { "does not show" } else { "link" });
}

test!(Both, no_operation_leaves_anything_on_the_host, needs[Program("bwrap")]);
fn no_operation_leaves_anything_on_the_host() {
    let (tree, outside) = (tree_named("tree"), tree_named("outside"));
    symlink(&outside, tree.join("out")).unwrap();
    symlink("/proc/self", tree.join("magic")).unwrap();
    let bound = format!("{PROGRAMS} --bind {} /w", text(&tree));
    let left = || -> Vec<String> {
        let all = [&tree, &outside].into_iter().flat_map(|at| fs::read_dir(at).unwrap());
        let mut names: Vec<String> = all.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    };
    for (operation, status, is_made) in [
        ("--dir /w/made", 1, true),
        ("--symlink x /w/made", 1, true),
        ("--file 5 /w/made", 1, true),
        // What is laid there gets a mount point, which ends with the run.
        ("--tmpfs /w/made", 0, true),
        ("--ro-bind-data 5 /w/made", 0, true),
        ("--ro-bind /usr /w/made", 0, true),
        ("--ro-bind /dev/null /w/made", 0, true),
        ("--dir /w/out/made", 1, false),
        ("--tmpfs /w/out/made", 1, false),
        ("--file 5 /w/out/made", 1, false),
        ("--ro-bind-data 5 /w/out", 1, false),
        ("--tmpfs /w/out", 1, false),
        ("--tmpfs /w/magic", 1, false),
    ] {
        let options = format!("{bound} {operation}");
        let own = ours(&options, &[b"x"], &["true"]);
        assert_eq!(said(&own), (Some(status), String::new()), "{operation}: {}", error(&own));
        assert_eq!(left(), ["magic", "out"], "{operation}");
        if !is_made {
            continue;
        }
        // Control: bubblewrap makes it there.
        assert_eq!(bubblewrap(&options, &[b"x"], &["true"]).status.code(), Some(0), "{operation}");
        assert_eq!(left(), ["made", "magic", "out"], "{operation}");
        let path = tree.join("made");
        fs::remove_file(&path).or_else(|_| fs::remove_dir(&path)).unwrap();
    }
}

test!(Both, a_writable_directory_has_the_guards_of_a_scratch);
fn a_writable_directory_has_the_guards_of_a_scratch() {
    let tree = tree_named("tree");
    fs::write(tree.join(".env"), "canary").unwrap();
    let output = ours(
        &format!("{PROGRAMS} --tmpfs /t --bind {} /w", text(&tree)),
        &[],
        &["/bin/sh", "-c", "cat /w/.env; mkfifo /w/f; mkfifo /t/f; chmod u+s /w 2>&1; true"],
    );
    assert!(!said(&output).1.contains("canary") && error(&output).contains("/w/.env: Permission denied"), "{}", error(&output));
    assert!(error(&output).contains("'/w/f': Permission denied"), "{}", error(&output));
    for (path, wanted) in [("/etc", ""), ("/", "never writable"), ("/usr/local", ""), ("/proc", "--proc /proc")] {
        refused(&format!("{PROGRAMS} --bind {path} /w"), wanted);
    }
    let [one, inner] = [text(&tree).to_owned(), format!("{}/inner", text(&tree))];
    fs::create_dir(&inner).unwrap();
    refused(&format!("{PROGRAMS} --bind {one} /a --bind {inner} /b"), "one lies in the other");
}

/// Two directories that a policy shows, which have a file each and one in common, and that policy.
fn layers() -> (PathBuf, PathBuf, String) {
    let (lower, upper) = (tree_named("lower"), tree_named("upper"));
    for (tree, name) in [(&lower, "lower"), (&upper, "upper")] {
        fs::write(tree.join("both"), format!("both of {name}\n")).unwrap();
        fs::write(tree.join(name), format!("{name}\n")).unwrap();
        fs::create_dir(tree.join("below")).unwrap();
        fs::write(tree.join("below").join(name), "").unwrap();
    }
    let policy = derived_from(
        "bwrap",
        &format!(
            "[filesystem]\nread_only_optional = {{ add = [\"{}\", \"{}\"] }}\n[limits]\ntmp_size = \"4MiB\"\n",
            text(&lower),
            text(&upper)
        ),
    );
    (lower, upper, policy)
}

test!(Both, an_overlay_shows_the_last_source_on_top_and_changes_nothing_of_them);
fn an_overlay_shows_the_last_source_on_top_and_changes_nothing_of_them() {
    let (lower, upper, policy) = layers();
    let sources = format!("{PROGRAMS} --overlay-src {} --overlay-src {}", text(&lower), text(&upper));
    let run = |options: &str, script: &str| under_policy(&policy, &format!("{options} -- /bin/sh -c"), script);
    let read = "cat /o/both /o/lower /o/upper; ls /o/below";
    let write = "echo x 2>/dev/null > /o/new && cat /o/new || echo refused; rm /o/both 2>/dev/null && ls /o";
    let shown = "both of upper\nlower\nupper\nlower\nupper\n";
    let done = run(&format!("{sources} --ro-overlay /o"), &format!("{read}; {write}"));
    assert_eq!(said(&done), (Some(1), format!("{shown}refused\n")), "{}", error(&done));
    let done = run(&format!("{sources} --tmp-overlay /o"), &format!("{read}; {write}"));
    assert_eq!(said(&done), (Some(0), format!("{shown}x\nbelow\nlower\nnew\nupper\n")), "{}", error(&done));
    // What belongs to the code's user can be changed. Root's run has another: to it all of that is another's.
    let done = run(&format!("{sources} --tmp-overlay /o"), "echo changed > /o/lower; cat /o/lower; touch /o/below/new; ls /o/below");
    let changed = if is_root() { "lower\nlower\nupper\n" } else { "changed\nlower\nnew\nupper\n" };
    assert_eq!(said(&done).1, changed, "{}", error(&done));
    // A mount lies over a directory of it, and an overlay over a directory of a tree.
    let tree = tree_named("tree");
    fs::create_dir(tree.join("o")).unwrap();
    let done = run(&format!("{sources} --tmp-overlay /o --tmpfs /o/below"), "ls -A /o/below; touch /o/below/own; ls /o/below");
    assert_eq!(said(&done), (Some(0), String::from("own\n")), "{}", error(&done));
    let one = format!("{PROGRAMS} --bind {} /w --overlay-src {} --tmp-overlay /w/o", text(&tree), text(&lower));
    let done = run(&one, "touch /w/o/new /w/kept; ls /w/o");
    assert_eq!(said(&done), (Some(0), String::from("below\nboth\nlower\nnew\n")), "{}", error(&done));
    assert!(tree.join("kept").exists() && fs::read_dir(tree.join("o")).unwrap().count() == 0);
    for (tree, name) in [(&lower, "lower"), (&upper, "upper")] {
        let mut names: Vec<_> = fs::read_dir(tree).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        assert_eq!(names, ["below", "both", name]);
        assert_eq!(fs::read_to_string(tree.join("both")).unwrap(), format!("both of {name}\n"));
        assert_eq!(fs::read_dir(tree.join("below")).unwrap().count(), 1);
    }
}

test!(Both, what_code_writes_to_an_overlay_counts_as_what_it_writes_to_a_tmpfs);
fn what_code_writes_to_an_overlay_counts_as_what_it_writes_to_a_tmpfs() {
    let (lower, _, policy) = layers();
    let line = format!("{PROGRAMS} --tmpfs /t --overlay-src {} --tmp-overlay /o -- /bin/sh -c", text(&lower));
    let fill =
        "head -c 3000000 /dev/zero > /t/x; head -c 3000000 /dev/zero > /o/x || rm /t/x; head -c 3000000 /dev/zero > /o/x && echo fits";
    let done = under_policy(&policy, &line, fill);
    assert_eq!(said(&done), (Some(0), String::from("fits\n")), "{}", error(&done));
    assert!(error(&done).contains("No space left on device"), "{}", error(&done));
}

test!(RootOnly, an_overlay_does_not_uncover_what_a_mount_of_the_host_hides);
fn an_overlay_does_not_uncover_what_a_mount_of_the_host_hides() {
    let program = program_path().unwrap();
    let line = format!("{PROGRAMS} --overlay-src /usr/lib --tmp-overlay /o -- /bin/sh -c");
    let run = |before: &str| {
        let mut command = run_under(&["unshare", "--mount", "sh", "-c", &format!("{before} exec \"$@\""), "sh", text(&program), "bwrap"]);
        command.args(words(&line)).arg("grep -q NAME /o/os-release && echo seen").output().unwrap()
    };
    let done = run("mount --bind /dev/null /usr/lib/os-release;");
    assert!(said(&done) == (Some(1), String::new()) && error(&done).contains("no mount of the host may lie below"), "{}", error(&done));
    // The control: without that mount the file is seen.
    assert_eq!(said(&run("")), (Some(0), String::from("seen\n")));
}

test!(Both, each_writable_directory_is_limited_in_size);
fn each_writable_directory_is_limited_in_size() {
    let (one, two) = (tree_named("one"), tree_named("two"));
    let policy = derived_from("shell", "[limits]\nscratch_size = \"8MiB\"\nfile_size = \"none\"\n[limits.max]\nfile_size = \"none\"\n");
    let line = format!("{PROGRAMS} --bind {} /one --bind {} /two -- /bin/sh -c", text(&one), text(&two));
    for (megabytes, status) in [(4, 0), (64, 137)] {
        let script = format!("dd if=/dev/zero of=/two/x bs=1M count={megabytes} 2>/dev/null; sleep {}", if status == 0 { 0 } else { 20 });
        let output = under_policy(&policy, &line, &script);
        assert_eq!(output.status.code(), Some(status), "{}", error(&output));
        fs::remove_file(two.join("x")).unwrap();
    }
}

test!(Both, what_would_weaken_the_sandbox_is_refused_by_name);
fn what_would_weaken_the_sandbox_is_refused_by_name() {
    for (option, wanted) in [
        ("--share-net", "--share-net is not taken: code has no network of the host's"),
        ("--cap-add CAP_SYS_ADMIN", "--cap-add is not taken"),
        ("--uid 0", "--uid 0: code is never root"),
        ("--gid 0", "--gid 0: code is never root"),
        ("--userns 5", "--userns is not taken"),
        ("--dev-bind /dev/kmsg /dev/kmsg", "no devices of the host"),
        ("--bind / /", "never writable"),
        ("--proc /elsewhere", "/proc alone"),
        ("--tmpfs /proc/x", "the sandbox's own"),
        ("--ro-bind /usr /dev/x", "the sandbox's own"),
        ("--ro-bind /usr /run", "the sandbox's own"),
        ("--tmpfs /", "the sandbox's root is its own"),
        ("--symlink /usr /l --dir /l/x", "goes through /l, a link of this view"),
        ("--overlay-src /usr --overlay /a /b /x", "--overlay is not taken: what it leaves in a directory of the host"),
        ("--overlay-src /root --tmp-overlay /x", "policy `bwrap` does not show /root"),
        ("--overlay-src /etc --tmp-overlay /x", "policy `bwrap` does not show /etc"),
        ("--overlay-src /usr/bin/env --tmp-overlay /x", "is not a directory"),
        ("--overlay-src /usr --overlay-src /usr/bin --ro-overlay /x", "lies in another layer"),
        ("--overlay-src /usr --tmp-overlay /run", "the sandbox's own"),
        ("--overlay-src /usr --tmp-overlay /", "the sandbox's root is its own"),
        ("--overlay-src /usr --tmp-overlay /x --dir /x/new", "nothing is made there"),
        ("--chmod 0777 /usr/bin", "none of them has made this"),
        ("--chmod 0777 /missing", "none of them has made this"),
        ("--chmod 0777 /proc", "the sandbox's own"),
        ("--symlink /dev/shm /.view --dir /t --tmpfs /t", "the sandbox's own"),
    ] {
        refused(&format!("{PROGRAMS} {option}"), wanted);
    }
}

test!(Both, stockade_bwrap_beside_the_program_starts_it);
fn stockade_bwrap_beside_the_program_starts_it() {
    let place = directory().join("bin");
    fs::create_dir(&place).unwrap();
    fs::copy(program_path().unwrap(), place.join("stockade")).unwrap();
    let script = place.join("stockade-bwrap");
    let tests = std::env::var_os("CARGO_MANIFEST_DIR").map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")), PathBuf::from);
    fs::copy(tests.join("../scripts/stockade-bwrap"), &script).unwrap();
    let run = |line: &str| run_under(&[text(&script)]).args(words(line)).output().unwrap();
    let done = run("--ro-bind / / -- /bin/echo a  b");
    assert_eq!(said(&done), (Some(0), String::from("a b\n")), "{}", error(&done));
    assert!(said(&run("--version")).1.starts_with("bubblewrap "));
    assert!(said(&run("--help")).1.contains("--ro-bind"));
    // Its own words are bubblewrap's, and no command of stockade.
    assert_eq!(said(&run("version")), (Some(1), String::new()));
}
