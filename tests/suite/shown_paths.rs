//! Paths of the host that a policy or an interpreter's environment has shown: code chooses none of
//! them by a link or a setting, and changes none. What is shown can be used, sockets too.

use std::{
    fs::{self, File, Permissions},
    io::Write,
    os::unix::{fs::PermissionsExt, net::UnixListener},
    path::Path,
    sync::atomic::{AtomicBool, Ordering},
    thread,
};

use rustix::fs::{CWD, FileType, Mode, RenameFlags};
use serde_json::json;

use crate::support::{
    exec::{ExecResult, OWNER, chown_to_owner, exec, exec_with, run_with_stdin, scratch, scratch_named, stockade, text, token, write_file},
    policy_dir::{PolicyDirectory, derived},
    runner::{directory, is_root, test},
};

test!(Both, code_does_not_choose_what_its_environment_has_shown);
fn code_does_not_choose_what_its_environment_has_shown() {
    let (scratch, secrets, other) = (scratch(), directory().join("secrets"), scratch_named("other"));
    fs::create_dir_all(secrets.join("bin")).unwrap();
    fs::write(secrets.join("id"), "TOPKEY").unwrap();
    fs::write(secrets.join("bin/key"), "TOPKEY").unwrap();
    let environment = scratch.join("venv");
    fs::create_dir_all(environment.join("bin")).unwrap();
    let program = environment.join("bin/python");
    std::os::unix::fs::symlink("/usr/bin/python3", &program).unwrap();
    let option = format!("python={}", text(&program));
    let code = format!("print(6*7)\ntry: print(open({:?}).read())\nexcept OSError as e: print(e.strerror)", text(&secrets.join("id")));
    let run = |scratch: Option<&Path>| exec_with(&["--runtime", &option], json!({"code": code, "scratch": scratch.map(text)}));
    let ask = |home: &str, scratch: Option<&Path>| {
        fs::write(environment.join("pyvenv.cfg"), format!("home = {home}\n")).unwrap();
        run(scratch)
    };
    ask("/usr/bin", Some(&scratch)).succeeded().expect(json!({"output": "42\nNo such file or directory\n"}));
    let crooked = format!("{}/../secrets/bin", text(&scratch));
    // Whatever the scratch is this time: an earlier run may have had another.
    for place in [Some(&*scratch), Some(&*other), None] {
        for home in [text(&secrets.join("bin")), &crooked, "secrets/bin"] {
            ask(home, place).refused("interpreter_led_astray", &[text(&program), "pyvenv.cfg", home.trim_end_matches("/bin"), "read_only"]);
        }
    }
    // Nor by a link.
    fs::write(environment.join("pyvenv.cfg"), "home = /usr/bin\n").unwrap();
    fs::remove_file(&program).unwrap();
    std::os::unix::fs::symlink(secrets.join("bin/key"), &program).unwrap();
    run(None).refused("interpreter_led_astray", &[text(&program), "link", text(&secrets), "read_only"]);
    fs::rename(&environment, scratch.join("real")).unwrap();
    fs::rename(secrets.join("bin/key"), secrets.join("bin/python")).unwrap();
    std::os::unix::fs::symlink(&secrets, &environment).unwrap();
    run(None).refused("interpreter_led_astray", &[text(&environment), "link"]);
    // The control: the same directory, once it is an interpreter's own.
    fs::remove_file(&environment).unwrap();
    fs::rename(scratch.join("real"), &environment).unwrap();
    fs::remove_file(&program).unwrap();
    std::os::unix::fs::symlink("/usr/bin/python3", &program).unwrap();
    fs::create_dir_all(secrets.join("lib/python3.99")).unwrap();
    fs::write(secrets.join("lib/python3.99/os.py"), "").unwrap();
    let home = secrets.join("bin");
    for place in [Some(&*other), None] {
        ask(text(&home), place).succeeded().expect(json!({"output": "42\nTOPKEY\n"}));
    }
    // Not where what is hidden lies beside it, nor from out of this run's own scratch.
    fs::write(secrets.join(".netrc"), "").unwrap();
    ask(text(&home), None).refused("interpreter_led_astray", &[text(&secrets)]);
    fs::remove_file(secrets.join(".netrc")).unwrap();
    ask(text(&home), Some(&scratch)).refused("scratch_holds_the_environment", &[text(&secrets), "read_only"]);
    std::os::unix::fs::symlink(&secrets, scratch.join("way")).unwrap();
    ask(text(&scratch.join("way/bin")), Some(&scratch)).refused("scratch_holds_the_environment", &["way", "read_only"]);
}

test!(Both, an_environment_in_the_scratch_stays_as_it_is, seconds 60);
/// The host starts `venv/bin/pip`, and each start of the interpreter reads `evil.pth`.
fn an_environment_in_the_scratch_stays_as_it_is() {
    let (place, policies) = (scratch(), PolicyDirectory::new());
    let project = place.join("a/project");
    let environment = project.join("venv");
    fs::create_dir_all(environment.join("bin")).unwrap();
    fs::create_dir_all(environment.join("lib/python3/site-packages")).unwrap();
    std::os::unix::fs::symlink("/usr/bin/python3", environment.join("bin/python3")).unwrap();
    for (name, text) in [("bin/pip", "the user's"), ("pyvenv.cfg", "home = /usr/bin\n")] {
        write_file(&environment.join(name), text);
    }
    let made = ["a", "a/project", "a/project/venv", "a/project/venv/bin", "a/project/venv/bin/pip", "a/project/venv/pyvenv.cfg"];
    for path in made.into_iter().chain(["a/project/venv/lib", "a/project/venv/lib/python3", "a/project/venv/lib/python3/site-packages"]) {
        chown_to_owner(&place.join(path));
    }
    let code = r#"
import os, shutil, sys
def tried(what, act, *words):
    try: act(*words); print(what, 'done')
    except OSError as e: print(what, e.strerror)
tried('open', open, 'a/project/venv/bin/pip', 'a')
tried('make', open, 'a/project/venv/lib/python3/site-packages/evil.pth', 'w')
tried('replace', os.rename, 'own', 'a/project/venv/bin/pip')
tried('remove', os.unlink, 'a/project/venv/pyvenv.cfg')
tried('chmod', os.chmod, 'a/project/venv/bin', 0o777)
tried('link', os.link, 'a/project/venv/bin/pip', 'linked')
for path in ('a/project/venv', 'a/project', 'a'):
    tried('move ' + path, os.rename, path, path + '-moved')
tried('beside', open, 'a/project/beside', 'w')
"#;
    let attempt = |options: &[&str]| {
        write_file(&place.join("own"), "the code's");
        chown_to_owner(&place.join("own"));
        let _none = fs::remove_file(project.join("beside"));
        let done = exec_with(options, json!({"code": code, "scratch": text(&place)}));
        done.succeeded();
        done["output"].as_str().unwrap().to_owned()
    };
    let program = environment.join("bin/python3");
    let option = format!("python={}", text(&program));
    let of_policy = policies.write("of-policy", &derived(&format!("[runtimes.python]\nvenv = {environment:?}")));
    let busy = "move a/project/venv Device or resource busy\nmove a/project Device or resource busy\nmove a Device or resource busy\n";
    let read_only = ["open", "make"].map(|what| format!("{what} Read-only file system\n")).concat();
    let kept = format!(
        "{read_only}replace Invalid cross-device link\nremove Read-only file system\nchmod Read-only file system\nlink Invalid cross-device link\n{busy}beside done\n"
    );
    // The second is for another language: that policy's environment is in the scratch all the same.
    let shell = policies.write("shell-first", &derived(&format!("language = \"bash\"\n[runtimes.python]\nvenv = {environment:?}")));
    for options in [&["--runtime", &option][..], &["--policy", &of_policy]] {
        assert_eq!(attempt(options), kept, "{options:?}");
    }
    let overwrite = json!({"code": "echo evil >> a/project/venv/bin/pip", "scratch": text(&place)});
    exec_with(&["--policy", &shell], overwrite).expect(json!({"verdict": "exited", "code": 1}));
    assert_eq!(fs::read_to_string(environment.join("bin/pip")).unwrap(), "the user's");
    // Nor where the environment is, or holds, the scratch.
    for inside in [&environment, &environment.join("lib")] {
        let refused = exec_with(&["--runtime", &option], json!({"code": "", "scratch": text(inside)}));
        refused.refused("scratch_shown_read_only", &[text(&environment), "read-only"]);
    }
    // Nor by a link that code could replace.
    std::os::unix::fs::symlink("/usr/bin/python3", place.join("python3")).unwrap();
    let linked = format!("python={}", text(&place.join("python3")));
    exec_with(&["--runtime", &linked], json!({"code": "", "scratch": text(&place)}))
        .refused("scratch_holds_the_environment", &["python3", "link"]);
    // The control: under a policy that does not name it, it is a directory of the scratch.
    assert!(attempt(&[]).starts_with("open done\nmake done\nreplace done\nremove done\n"));
}

test!(Both, code_does_not_choose_what_a_policy_shows_by_a_link);
/// A policy shows what lies below another run's scratch.
fn code_does_not_choose_what_a_policy_shows_by_a_link() {
    let (above, secrets, policies) = (scratch(), scratch_named("secrets"), PolicyDirectory::new());
    let (data, canary) = (above.join("data"), token("shown"));
    for (path, key) in [(&data, "own"), (&secrets, canary.as_str())] {
        fs::create_dir_all(path.join("below")).unwrap();
        fs::write(path.join("key"), key).unwrap();
        fs::write(path.join("below/key"), key).unwrap();
        fs::write(path.join("pyvenv.cfg"), "home = /usr/bin\n").unwrap();
        fs::create_dir(path.join("bin")).unwrap();
        std::os::unix::fs::symlink("/usr/bin/python3", path.join("bin/python")).unwrap();
    }
    chown_to_owner(&data);
    let policy =
        |name: &str, key: &str, path: &Path| policies.write(name, &derived(&format!("[filesystem]\n{key} = {{ add = [{path:?}] }}")));
    let read = |policy: &str, path: &Path| {
        let code = format!("print(open({:?}).read(20000)[:40])", text(&path.join("key")));
        exec_with(&["--policy", policy], json!({"code": code}))
    };
    let ways = ["read_only", "read_only_optional"].map(|key| policy(key, key, &data));
    let deeper = policy("deeper", "read_only", &data.join("below"));
    let option = format!("python={}", text(&data.join("bin/python")));
    let run = || exec_with(&["--runtime", &option], json!({"code": format!("print(open({:?}).read())", text(&data.join("key")))}));
    // The control: they are shown while they are what they were.
    for policy in &ways {
        read(policy, &data).succeeded().expect(json!({"output": "own\n"}));
    }
    read(&deeper, &data.join("below")).succeeded().expect(json!({"output": "own\n"}));
    run().succeeded().expect(json!({"output": "own\n"}));
    let plant = format!("import os\nos.rename('data', 'moved')\nos.symlink({:?}, 'data')", text(&secrets));
    exec(json!({"code": plant, "scratch": text(&above)})).succeeded();
    let remedy = format!("without the link: {}", text(&secrets));
    for policy in &ways {
        read(policy, &data).broke("shown_foreign_link", &[text(&data), "only root's are followed", &remedy]);
        let output = run_with_stdin(&mut stockade(["exec", "--dry-run", "--policy", policy]), br#"{"code": ""}"#);
        let said = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && said.contains(&remedy), "{said}");
    }
    read(&deeper, &data.join("below")).broke("shown_foreign_link", &[text(&data), &format!("{}/below", text(&secrets))]);
    run().refused("shown_foreign_link", &[text(&data), "python", &format!("without the link: in {}", text(&secrets))]);
    // The controls: what it leads to by its own name, and links of root's.
    read(&policy("own", "read_only", &secrets), &secrets).succeeded().expect(json!({"output": format!("{canary}\n")}));
    let release = Path::new("/etc/os-release");
    assert!(release.is_symlink());
    let code = "print(len(open('/etc/os-release').read()) > 9)";
    exec_with(&["--policy", &policy("release", "read_only", release)], json!({"code": code}))
        .succeeded()
        .expect(json!({"output": "True\n"}));
    if is_root() {
        std::os::unix::fs::lchown(&data, Some(0), Some(0)).unwrap();
        read(&ways[0], &data).succeeded().expect(json!({"output": format!("{canary}\n")}));
    }
    // Root's link to where no policy may name anything.
    let mounts = Path::new("/etc/mtab");
    assert!(mounts.is_symlink());
    read(&policy("mounts", "read_only", mounts), mounts).broke("shown_system_directory", &["/etc/mtab", "/proc/"]);
}

test!(Both, a_link_put_there_meanwhile_is_not_shown);
/// Between the launcher's look at the way and the mount a link takes a directory's place.
fn a_link_put_there_meanwhile_is_not_shown() {
    let (above, secrets, policies) = (scratch(), scratch_named("secrets"), PolicyDirectory::new());
    let (data, link, canary) = (above.join("data"), above.join("link"), token("shown"));
    fs::create_dir(&data).unwrap();
    fs::write(data.join("key"), "own").unwrap();
    fs::write(secrets.join("key"), &canary).unwrap();
    std::os::unix::fs::symlink(&secrets, &link).unwrap();
    if is_root() {
        std::os::unix::fs::lchown(&link, Some(OWNER), Some(OWNER)).unwrap();
    }
    let policy = policies.write("shows", &derived(&format!("[filesystem]\nread_only = {{ add = [{data:?}] }}")));
    let code = format!("print(open({:?}).read())", text(&data.join("key")));
    let stop = AtomicBool::new(false);
    let outcomes: Vec<ExecResult> = thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                rustix::fs::renameat_with(CWD, &data, CWD, &link, RenameFlags::EXCHANGE).unwrap();
            }
        });
        let outcomes = (0..40).map(|_| exec_with(&["--policy", &policy], json!({"code": code}))).collect();
        stop.store(true, Ordering::Relaxed);
        outcomes
    });
    outcomes.iter().for_each(|done| assert!(!done.result.to_string().contains(&canary), "{}", done.result));
    // The control: it is shown where it was no link.
    if data.is_symlink() {
        fs::remove_file(&data).unwrap();
        fs::rename(&link, &data).unwrap();
    }
    exec_with(&["--policy", &policy], json!({"code": code})).succeeded().expect(json!({"output": "own\n"}));
}

test!(Both, a_socket_and_a_fifo_that_a_policy_shows_can_be_used);
/// What the threat model states of them; in a scratch they are covered.
fn a_socket_and_a_fifo_that_a_policy_shows_can_be_used() {
    let (shown, policies) = (directory().join("shown"), PolicyDirectory::new());
    fs::create_dir(&shown).unwrap();
    let (socket, fifo) = (shown.join("socket"), shown.join("fifo"));
    let listener = UnixListener::bind(&socket).unwrap();
    rustix::fs::mknodat(CWD, &fifo, FileType::Fifo, Mode::from_raw_mode(0o644), 0).unwrap();
    fs::set_permissions(&socket, Permissions::from_mode(0o666)).unwrap();
    let mut writer = File::options().read(true).write(true).open(&fifo).unwrap();
    writer.write_all(b"word").unwrap();
    let code = format!(
        "import os, socket\ns = socket.socket(socket.AF_UNIX)\ns.connect({:?})\nf = os.open({:?}, os.O_RDONLY | os.O_NONBLOCK)\nprint(os.read(f, 9))",
        text(&socket),
        text(&fifo)
    );
    let policy = policies.write("shows", &derived(&format!("[filesystem]\nread_only = {{ add = [{shown:?}] }}")));
    exec_with(&["--policy", &policy], json!({"code": code})).succeeded().expect(json!({"output": "b'word'\n"}));
    listener.set_nonblocking(true).unwrap();
    listener.accept().unwrap();
    // Where they are not shown they are not there.
    let done = exec(json!({"code": code}));
    assert!(done["error"].as_str().unwrap().contains("FileNotFoundError"), "{}", done.result);
}
