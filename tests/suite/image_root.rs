//! Runs whose root is an image: what they see, what of the image's configuration they use, and what
//! neither a hostile image nor a request makes of it.

use std::{
    fs::{self, File, Permissions, TryLockError},
    io::Write,
    os::unix::fs::{PermissionsExt, symlink},
    path::Path,
    process::{Command, Stdio},
    time::Duration,
};

use serde_json::{Value, json};

use super::serve::Service;
use crate::support::{
    audit_log::{own_log, records},
    exec::{ExecResult, both_streams, exec, program_path, run_under, run_with_stdin, stockade, text},
    image_store::ImageStore,
    policy_dir::{PolicyDirectory, derived},
    runner::{directory, eventually, is_root, test},
    session::Session,
    timeouts::scaled,
};

/// A store with the image `plain` of two layers.
fn plain() -> ImageStore {
    let store = ImageStore::new();
    store.layer("own", |tree| {
        fs::create_dir_all(tree.join("etc")).unwrap();
        fs::write(tree.join("etc/passwd"), "intruder:x:0:0::/:/bin/sh\n").unwrap();
        fs::write(tree.join("etc/resolv.conf"), "nameserver 192.0.2.1\n").unwrap();
        fs::write(tree.join("etc/own"), "of the image\n").unwrap();
        fs::create_dir_all(tree.join("srv/app")).unwrap();
    });
    store.image("plain", &["programs", "own"], json!({"user": "postgres"}));
    store
}

#[track_caller]
fn layer<'r>(done: &'r ExecResult, name: &str) -> &'r str {
    let layers = done["receipt"]["layers"].as_array().unwrap();
    layers.iter().find(|layer| layer["layer"] == name).unwrap()["detail"].as_str().unwrap()
}

test!(Both, an_image_is_the_root_and_nothing_of_the_hosts_system_is_seen);
fn an_image_is_the_root_and_nothing_of_the_hosts_system_is_seen() {
    let (store, log) = (plain(), own_log());
    let code = "for f in /usr/bin/python3 /etc/ld.so.cache /etc/alternatives; do [ -e $f ] && echo $f; done; cat /etc/own; cat /etc/passwd /etc/resolv.conf; \
                ls /; echo x 2>/dev/null > /bin/new || echo read-only; echo $PATH $HOME; touch /tmp/a /dev/shm/b $HOME/c d && echo writable";
    let done = store.sh("plain", code);
    done.succeeded();
    let output = done.output();
    assert!(output.starts_with("of the image\nroot:x:0:0"), "{output}");
    assert!(output.contains("sandbox:x:1000:") && !output.contains("intruder") && !output.contains("nameserver"), "{output}");
    assert!(output.ends_with("read-only\n/bin /home/sandbox\nwritable\n"), "{output}");
    // The control: the host's, which the same code sees without an image.
    let of_host = exec(json!({"language": "sh", "code": "[ -e /usr/bin/python3 ] && echo there"}));
    of_host.succeeded().expect(json!({"output": "there\n"}));
    let digest = done["receipt"]["image"].as_str().unwrap();
    let recorded: Vec<_> = records(&log).into_iter().filter(|record| record["event"] == "run").map(|run| run["image"].clone()).collect();
    assert_eq!(recorded, [json!(digest), Value::Null], "the audit log says whose files the code saw");
    assert!(layer(&done, "root_image").starts_with(&format!("plain@{digest}; read-only; its user \"postgres\" is not used")));
    let mounts = |done: &ExecResult| layer(done, "mounts").split(' ').next().unwrap().parse::<u32>().unwrap();
    assert!(mounts(&done) < mounts(&of_host), "{} mounts, and {} without an image", mounts(&done), mounts(&of_host));
    // By its digest it is the same one.
    store.sh(digest, "cat /etc/own").succeeded().expect(json!({"output": "of the image\n"}));
}

test!(Both, an_images_command_variables_and_directory_are_used_where_nothing_else_is_said);
fn an_images_command_variables_and_directory_are_used_where_nothing_else_is_said() {
    let store = plain();
    let env = ["PATH=/bin", "FOO=bar", "HOME=/root", "TMPDIR=/nowhere", "=nameless", "novalue", "NUL=\u{0}"];
    let fields = |directory: &str| json!({"env": env, "working_dir": directory, "entrypoint": ["sh", "-c"], "cmd": ["pwd; echo $FOO $HOME $TMPDIR"]});
    store.image("app", &["programs", "own"], fields("/srv/app"));
    let run = |options: &[&str]| store.command(&[&["run", "-q"], options].concat()).output().unwrap();
    assert_eq!(both_streams(&run(&["--image", "app"])), "/srv/app\nbar /home/sandbox /tmp\n");
    assert_eq!(both_streams(&run(&["--image", "app", "--", "sh", "-c", "pwd; echo $0 $FOO"])), "/srv/app\nsh bar\n");
    assert_eq!(both_streams(&run(&["--image", "app", "--language", "sh", "-c", "pwd"])), "/scratch\n");
    let done = store.sh("app", "pwd; echo $FOO");
    done.succeeded().expect(json!({"output": "/scratch\nbar\n"}));
    assert!(layer(&done, "root_image").contains("3 of its variables"), "{}", layer(&done, "root_image"));
    // A directory that the image lacks is made, and one that leads nowhere is refused.
    store.image("made", &["programs"], fields("/var/app/deep"));
    assert!(both_streams(&run(&["--image", "made"])).starts_with("/var/app/deep\n"));
    // So is one that the image has below a directory that each run has for itself.
    store.layer("covered", |tree| fs::create_dir_all(tree.join("tmp/app")).unwrap());
    store.image("covered", &["programs", "covered"], fields("/tmp/app"));
    assert!(both_streams(&run(&["--image", "covered"])).starts_with("/tmp/app\n"));
    for directory in ["srv/app", "../../etc", "/srv/../../etc", "/bin/sh"] {
        store.image("crooked", &["programs", "own"], fields(directory));
        let done = run(&["--image", "crooked"]);
        let said = both_streams(&done);
        assert!(done.status.code() == Some(2) && said.contains(&format!("its working directory {directory}")), "{said}");
    }
    store.image("silent", &["programs"], json!({}));
    let done = run(&["--image", "silent"]);
    assert!(done.status.code() == Some(2) && both_streams(&done).contains("names no command of its own"), "{}", both_streams(&done));
}

test!(Both, an_images_working_directory_leads_through_no_descriptor);
/// As CVE-2024-21626 of runc.
fn an_images_working_directory_leads_through_no_descriptor() {
    let store = plain();
    fs::write(directory().join("secret"), "").unwrap();
    store.layer("linked", |tree| {
        // Without it the links would lead nowhere in the image, and a directory be made above them.
        fs::create_dir_all(tree.join("proc/self/fd/9")).unwrap();
        symlink("/proc/self", tree.join("process")).unwrap();
        symlink("/proc/self/fd/9", tree.join("open")).unwrap();
        symlink("/srv/app", tree.join("plain")).unwrap();
    });
    let run = |working_dir: &str| {
        store.image(
            "linked",
            &["programs", "own", "linked"],
            json!({"env": ["PATH=/bin"], "working_dir": working_dir, "cmd": ["sh", "-c", "ls; pwd -P"]}),
        );
        let script = format!("exec 9<'{}' && exec \"$@\"", directory().display());
        let mut command = run_under(&["sh", "-c", &script, "sh"]);
        let of_store = store.command(&["run", "-q", "--image", "linked"]);
        command
            .arg(of_store.get_program())
            .args(of_store.get_args())
            .envs(of_store.get_envs().filter_map(|(name, value)| Some((name, value?))));
        command.output().unwrap()
    };
    for working_dir in ["/proc/self/fd/9", "/process/fd/9", "/open", "/proc/self/cwd"] {
        let done = run(working_dir);
        let said = both_streams(&done);
        assert!(
            done.status.code() != Some(0) && said.contains("the working directory") && !said.contains("secret"),
            "{working_dir}: {said}"
        );
    }
    // The control: a link that leads elsewhere is followed.
    assert_eq!(both_streams(&run("/plain")), "/srv/app\n");
}

test!(Both, what_a_hostile_image_has_at_the_sandboxs_own_places_is_hidden);
fn what_a_hostile_image_has_at_the_sandboxs_own_places_is_hidden() {
    let store = plain();
    store.layer("hostile", |tree| {
        for (name, to) in [("proc", "/etc"), ("tmp", "/"), ("home", "/etc"), ("dev", "/bin"), ("scratch", "/proc"), ("sys", "/")] {
            symlink(to, tree.join(name)).unwrap();
        }
        fs::write(tree.join("run"), "a file\n").unwrap();
        fs::create_dir(tree.join("etc")).unwrap();
        symlink("/proc/1/environ", tree.join("etc/hosts")).unwrap();
    });
    store.image("hostile", &["programs", "hostile"], json!({}));
    let code = "[ -L /proc ] || [ -L /tmp ] || [ -L /home ] || [ -L /dev ] || [ -L /scratch ] && echo links; ls /tmp; cat /etc/hosts /run; \
                cat /proc/self/stat > /dev/null && echo > /dev/null && pwd";
    let done = store.sh("hostile", code);
    done.succeeded().expect(json!({"output": "127.0.0.1 localhost stockade\n::1 localhost\na file\n/scratch\n"}));
    // The control: what lies elsewhere is the image's.
    store.layer("elsewhere", |tree| symlink("/etc", tree.join("proc2")).unwrap());
    store.image("elsewhere", &["programs", "elsewhere"], json!({}));
    store.sh("elsewhere", "[ -L /proc2 ] && echo link").succeeded().expect(json!({"output": "link\n"}));
}

test!(Both, upper_layers_hide_and_remove_what_lower_ones_have);
fn upper_layers_hide_and_remove_what_lower_ones_have() {
    let store = plain();
    store.layer("lower", |tree| {
        for path in ["gone", "opaque", "merged"] {
            fs::create_dir_all(tree.join(path)).unwrap();
            fs::write(tree.join(path).join("lower"), "").unwrap();
        }
    });
    store.layer("upper", |tree| {
        fs::create_dir(tree.join("opaque")).unwrap();
        fs::create_dir(tree.join("merged")).unwrap();
        fs::write(tree.join("merged/upper"), "").unwrap();
        let made = Command::new("mknod").arg(tree.join("gone")).args(["c", "0", "0"]).status().unwrap();
        assert!(made.success());
        rustix::fs::setxattr(tree.join("opaque"), "user.overlay.opaque", b"y", rustix::fs::XattrFlags::empty()).unwrap();
    });
    store.image("layered", &["programs", "lower", "upper"], json!({}));
    store.sh("layered", "ls -d /gone 2>&1; ls /opaque /merged").expect(json!({
        "output": "ls: cannot access '/gone': No such file or directory\n/merged:\nlower\nupper\n\n/opaque:\n"
    }));
    // The control: without the upper layer all is there.
    store.image("lower", &["programs", "lower"], json!({}));
    store.sh("lower", "ls -d /gone; ls /opaque").expect(json!({"output": "/gone\nlower\n"}));
}

test!(RootOnly, a_device_in_a_layer_cannot_be_opened);
fn a_device_in_a_layer_cannot_be_opened() {
    let store = plain();
    store.layer("devices", |tree| {
        assert!(Command::new("mknod").args(["-m", "666"]).arg(tree.join("zero")).args(["c", "1", "5"]).status().unwrap().success());
    });
    store.image("devices", &["programs", "devices"], json!({}));
    store.sh("devices", "echo x > /dev/zero && echo ours; : < /zero && echo theirs").expect(json!({"output": "ours\n", "success": false}));
}

test!(Both, a_policy_says_which_images_a_request_may_have);
fn a_policy_says_which_images_a_request_may_have() {
    let (store, policies) = (plain(), PolicyDirectory::new());
    let other = store.image("other", &["programs"], json!({}));
    let ask = |lines: &str, image: Option<&str>| {
        let policy = policies.write("images", &derived(&format!("[filesystem]\n{lines}")));
        let mut request = json!({"language": "sh", "code": "[ -e /etc/own ] && echo own; [ -e /usr/bin/python3 ] && echo host"});
        if let Some(image) = image {
            request["image"] = json!(image);
        }
        store.exec_with(&["--policy", &policy], request)
    };
    let plain = ask("", Some("plain"));
    plain.expect(json!({"output": "own\n"}));
    let digest = plain["receipt"]["image"].as_str().unwrap().to_owned();
    ask("images = { replace = [] }", Some("plain")).refused("image_not_allowed", &["image plain:", "lets no request name one"]);
    ask("images = { replace = [\"other\"] }", Some("plain")).refused("image_not_allowed", &["lets a request name only other"]);
    ask("images = { replace = [\"plain\"] }", Some("plain")).expect(json!({"output": "own\n"}));
    ask("images = { replace = [\"plain\"] }", Some(&digest)).expect(json!({"output": "own\n"}));
    ask(&format!("images = {{ replace = [\"{digest}\"] }}"), Some("plain")).expect(json!({"output": "own\n"}));
    // A name in front of another digest is no way round it.
    ask("images = { replace = [\"plain\"] }", Some(&format!("plain@{other}"))).refused("image_not_allowed", &[]);
    // The policy's own root, which a request need not name; and the host's, which it cannot ask for.
    let root = "root = { image = \"plain\" }\nimages = { replace = [] }";
    ask(root, None).expect(json!({"output": "own\n"}));
    ask(root, Some("plain")).expect(json!({"output": "own\n"}));
    ask(root, Some("other")).refused("image_not_allowed", &[]);
    // What the store has is not told to who may not use it.
    for image in ["other", "missing", "none", &other] {
        ask(root, Some(image)).refused("image_not_allowed", &[&format!("image {image}: ")]);
    }
    ask("images = { replace = [\"missing\"] }", Some("missing")).refused("image_unknown", &[]);
    ask("root = { image = \"missing\" }", None).broke("image_unknown", &["[filesystem] root", "missing"]);
    ask("", None).expect(json!({"output": "host\n"}));
}

test!(Both, an_image_that_is_not_there_or_not_the_launchers_own_is_refused);
fn an_image_that_is_not_there_or_not_the_launchers_own_is_refused() {
    let store = plain();
    let ask = |image: &str| store.sh(image, "echo ran");
    ask("plain").expect(json!({"output": "ran\n"}));
    ask("plane").refused("image_unknown", &["plane", "stockade image ls"]);
    ask(&format!("sha256:{}", "0".repeat(64))).refused("image_unknown", &[]);
    ask("../../etc").refused("image_unknown", &[]);
    ask("").refused("image_unknown", &["it is empty"]);
    let python = store.exec_with(&[], json!({"code": "print(1)", "image": "plain"}));
    python.broke("interpreter_missing", &["has no /usr/bin/python3"]);
    let with_template = json!({"code": "print(1)", "image": "plain", "template": "bare"});
    store.exec_with(&[], with_template).refused("template_in_image", &["bare"]);
    // A layer that was exchanged for a link is not followed.
    let (tree, kept) = (store.tree("own"), directory().join("kept"));
    fs::rename(&tree, &kept).unwrap();
    symlink(&kept, &tree).unwrap();
    let exchanged = ask("plain");
    assert_eq!((&exchanged["verdict"], &exchanged["started"]), (&json!("sandbox_error"), &json!(false)), "{}", exchanged.brief());
    fs::remove_file(&tree).unwrap();
    fs::rename(&kept, &tree).unwrap();
    ask("plain").expect(json!({"output": "ran\n"}));
    // Nor is a store that others can write.
    let names = store.path().join("names");
    fs::set_permissions(&names, Permissions::from_mode(0o777)).unwrap();
    ask("plain").broke("image_store_unusable", &["no other user may write it"]);
    fs::set_permissions(&names, Permissions::from_mode(0o755)).unwrap();
    fs::remove_dir_all(store.path()).unwrap();
    fs::create_dir(store.path()).unwrap();
    ask("plain").refused("image_store_missing", &["stockade image import FILE"]);
}

test!(Both, the_layers_of_a_run_are_held_until_it_has_ended);
fn the_layers_of_a_run_are_held_until_it_has_ended() {
    let store = plain();
    let mut command = store.command(&["run", "-q", "--image", "plain", "--", "sh", "-c", "read word; cat /etc/own"]);
    let mut run = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let lock = || File::options().write(true).open(store.path().join("lock")).unwrap();
    assert!(eventually(Duration::from_secs(10), || lock().try_lock().is_err()), "the run does not hold its image");
    run.stdin.take().unwrap().write_all(b"go on\n").unwrap();
    let done = run.wait_with_output().unwrap();
    assert_eq!(String::from_utf8_lossy(&done.stdout), "of the image\n");
    lock().try_lock().unwrap();
}

test!(Both, what_code_changes_of_an_image_is_limited_and_gone_after_the_run);
fn what_code_changes_of_an_image_is_limited_and_gone_after_the_run() {
    let (store, policies) = (plain(), PolicyDirectory::new());
    let writable = policies.write("writable", &derived("[filesystem]\nwritable_root = true\n"));
    let ask = |code: &str, limits: Value| {
        store.exec_with(&["--policy", &writable], json!({"language": "sh", "code": code, "image": "plain", "limits": limits}))
    };
    let code =
        "echo changed > /etc/own && touch /new && rm /bin/ls && mkdir /srv/app/x && cat /etc/own && echo x > /proc/sys/kernel/hostname";
    let done = ask(code, json!({}));
    done.expect(json!({"output": "changed\n", "success": false}));
    assert!(layer(&done, "mounts").contains("read-only but for / /tmp"), "{}", layer(&done, "mounts"));
    let again = "cat /etc/own; ls -d /new /srv/app/* 2> /dev/null";
    ask(again, json!({})).expect(json!({"output": "of the image\n"}));
    assert_eq!(fs::read_to_string(store.tree("own").join("etc/own")).unwrap(), "of the image\n");
    let fill = "cat /dev/zero > /full; rm /full && echo again > /small && cat /small";
    let done = ask(fill, json!({"tmp_size": "4MiB"}));
    done.expect(json!({"output": "again\n"}));
    assert!(done.error().contains("No space left on device"), "{}", done.error());
    let small = policies.write("small", &derived("[filesystem]\nwritable_root = true\n[limits]\ntmp_size = \"4MiB\"\n"));
    let mut session = Session::of(&mut store.command(&["session", "--policy", &small]));
    let done = session.ask(json!({"op": "run", "language": "sh", "code": fill, "image": "plain"}));
    assert!(done["output"] == "again\n" && done["error"].as_str().unwrap().contains("No space left on device"), "{done}");
    // The control: without the key none of it can be written.
    let done = store.sh("plain", "touch /new");
    assert!(done.error().contains("Read-only file system"), "{}", done.error());
    let hints = done["denials"].as_array().unwrap();
    assert!(hints.iter().any(|hint| hint["allow"] == "[filesystem] writable_root = true"), "{}", done.brief());
}

test!(Both, what_code_finds_in_a_writable_image_is_its_users_own_and_the_store_is_as_before);
fn what_code_finds_in_a_writable_image_is_its_users_own_and_the_store_is_as_before() {
    let (store, policies) = (plain(), PolicyDirectory::new());
    store.layer("rights", |tree| {
        fs::create_dir_all(tree.join("root/deep")).unwrap();
        fs::set_permissions(tree.join("root"), Permissions::from_mode(0o700)).unwrap();
        fs::write(tree.join("root/secret"), "of the image\n").unwrap();
        fs::set_permissions(tree.join("root/secret"), Permissions::from_mode(0o600)).unwrap();
        fs::create_dir(tree.join("bin")).unwrap();
        fs::copy(fs::canonicalize("/usr/bin/id").unwrap(), tree.join("bin/id")).unwrap();
        fs::set_permissions(tree.join("bin/id"), Permissions::from_mode(0o6755)).unwrap();
        assert!(Command::new("mknod").arg(tree.join("srv")).args(["c", "0", "0"]).status().unwrap().success());
    });
    store.image("rights", &["programs", "own", "rights"], json!({}));
    let writable = policies.write("writable", &derived("[filesystem]\nwritable_root = true\n"));
    let before = listing(store.path());
    let code = "ls -n /bin/id /root/secret; id -u; cat /root/secret; echo changed > /root/secret; echo x >> /bin/id; ls -d /srv; \
                rm -r /root/deep; mkdir -p /srv/new; cat /root/secret; ls /srv; ls -d /.* /.layers";
    let done = store.exec_with(&["--policy", &writable], json!({"language": "sh", "code": code, "image": "rights"}));
    let output = done.output();
    let mut lines = output.lines();
    let owned = |line: Option<&str>, name: &str| line.is_some_and(|line| line.contains(" 1000 1000 ") && line.ends_with(name));
    assert!(owned(lines.next(), "/bin/id") && owned(lines.next(), "/root/secret"), "{output}");
    assert_eq!(lines.collect::<Vec<_>>(), ["1000", "of the image", "changed", "new", "/.", "/.."], "{output}");
    let missing = ["'/srv'", "'/.layers'"].map(|path| format!("ls: cannot access {path}: No such file or directory\n"));
    assert_eq!(done.error(), missing.concat());
    assert_eq!(listing(store.path()), before, "the store is as before");
}

/// Names, modes, owners, sizes, times and contents of all that lies below a directory.
fn listing(directory: &Path) -> String {
    let script = "find . -printf '%p %m %U %G %s %T@ %l\\n' | sort; find . -type f -exec sha256sum {} + | sort";
    both_streams(&Command::new("sh").args(["-c", script]).current_dir(directory).output().unwrap())
}

test!(RootOnly, an_image_of_roots_is_not_writable_on_a_file_system_without_idmapped_mounts);
fn an_image_of_roots_is_not_writable_on_a_file_system_without_idmapped_mounts() {
    let (store, policies) = (plain(), PolicyDirectory::new());
    let writable = policies.write("writable", &derived("[filesystem]\nwritable_root = true\n"));
    let request = json!({"language": "sh", "code": "echo ran", "image": "plain"}).to_string();
    // An overlay takes no idmap.
    let over = "mkdir /var/lib/stockade/upper /var/lib/stockade/work && mount -t overlay -o \
                lowerdir=/var/lib/stockade/images,upperdir=/var/lib/stockade/upper,workdir=/var/lib/stockade/work over /var/lib/stockade/images && exec \"$@\"";
    let program = program_path().unwrap();
    let run = |words: &[&str]| {
        let words = [&store.words()[..], &["sh", "-c", over, "sh", text(&program)], words].concat();
        run_with_stdin(&mut run_under(&words), request.as_bytes())
    };
    let refused = ExecResult::of(run(&["exec", "--policy", &writable]));
    refused.broke("writable_root_unavailable", &["cannot be idmapped", "put it on ext4", "ordinary user"]);
    let examined = both_streams(&run(&["doctor", "--policy", &writable]));
    assert!(examined.contains("writable_root: ") && examined.contains("images cannot be idmapped"), "{examined}");
    // The control: it is a layer where nothing of it is written.
    ExecResult::of(run(&["exec"])).expect(json!({"output": "ran\n"}));
}

test!(Both, requests_of_a_session_have_images_of_their_own_and_share_its_files);
fn requests_of_a_session_have_images_of_their_own_and_share_its_files() {
    let store = plain();
    store.image("bare", &["programs"], json!({}));
    let mut session = Session::of(&mut store.command(&["session"]));
    let mut ask = |image: Option<&str>, code: &str| session.ask(json!({"op": "run", "language": "sh", "code": code, "image": image}));
    let output = |result: Value| result["output"].as_str().map(str::to_owned).unwrap_or_else(|| panic!("{result}"));
    assert_eq!(output(ask(Some("plain"), "cat /etc/own; echo kept > here; echo 1 > /tmp/there")), "of the image\n");
    assert_eq!(output(ask(Some("bare"), "ls /etc/own; cat here /tmp/there")), "kept\n1\n");
    assert_eq!(output(ask(None, "ls /usr/bin/python3; cat here")), "/usr/bin/python3\nkept\n");
    assert_eq!(output(ask(Some("plain"), "cat /etc/own here")), "of the image\nkept\n");
}

test!(Both, a_key_of_a_service_runs_code_in_an_image_of_the_store);
fn a_key_of_a_service_runs_code_in_an_image_of_the_store() {
    let store = plain();
    let service = Service::under(&store.words(), &[], PolicyDirectory::new(), "", "");
    let ask = |image: Option<&str>, code: &str| {
        service.ask("POST", "/v1/run", &service.token, &json!({"language": "sh", "code": code, "image": image}))
    };
    for _ in 0..2 {
        ask(Some("plain"), "cat /etc/own; ls /usr/bin/python3 2>&1 || :")
            .ran("of the image\nls: cannot access '/usr/bin/python3': No such file or directory\n");
        ask(None, "ls /usr/bin/python3").ran("/usr/bin/python3\n");
    }
    let refused = ask(Some("missing"), "echo ran");
    assert_eq!((&refused.body["verdict"], &refused.body["reason"]), (&json!("bad_request"), &json!("image_unknown")), "{}", refused.body);
}

test!(Both, an_approval_is_for_the_image_that_the_code_was_to_run_in);
fn an_approval_is_for_the_image_that_the_code_was_to_run_in() {
    let (store, policies) = (plain(), PolicyDirectory::new());
    let other = store.image("other", &["programs"], json!({}));
    let policy = policies.write("asks", &derived("[screen]\ndelete = \"approve\"\n"));
    let mut request = json!({"language": "sh", "code": "rm -rf here; echo ran", "image": "plain"});
    let ask = |request: &Value| store.exec_with(&["--policy", &policy], request.clone());
    let held = ask(&request);
    held.expect(json!({"verdict": "approval_required"}));
    let token = held["approval"]["token"].clone();
    request["approve"] = token;
    let digest = fs::read_to_string(store.path().join("names/plain")).unwrap();
    store.name("plain", &other);
    ask(&request).refused("approval_of_other_request", &[]);
    store.name("plain", &digest);
    ask(&request).expect(json!({"output": "ran\n"}));
}

test!(Both, code_is_not_given_the_store_to_write);
fn code_is_not_given_the_store_to_write() {
    let store = plain();
    if is_root() {
        // Nothing of /var is a scratch.
        let done = store.exec_with(&["-C", "/var/lib/stockade/images"], json!({"language": "sh", "code": ":"}));
        assert_eq!(done["verdict"], "bad_request", "{}", done.brief());
        return;
    }
    for place in [store.path(), store.path().parent().unwrap(), &store.tree("own").join("srv")] {
        let done = store.exec_with(&["-C", text(place)], json!({"language": "sh", "code": ":"}));
        done.refused("scratch_holds_images", &[text(store.path())]);
    }
    let beside = directory().join("beside");
    fs::create_dir(&beside).unwrap();
    store.exec_with(&["-C", text(&beside)], json!({"language": "sh", "code": ":"})).succeeded();
}

test!(Both, runtimes_and_doctor_say_what_an_image_has);
fn runtimes_and_doctor_say_what_an_image_has() {
    let store = plain();
    store.image("foreign", &["programs"], json!({"architecture": "arm64"}));
    let said = |words: &[&str]| both_streams(&store.command(words).output().unwrap());
    let listed: Value = serde_json::from_str(&said(&["runtimes", "--image", "plain", "--json"])).unwrap();
    let of = |name: &str| listed["runtimes"].as_array().unwrap().iter().find(|language| language["name"] == name).unwrap().clone();
    assert_eq!((&of("sh")["available"], &of("sh")["path"]), (&json!(true), &json!("/bin/sh")), "{listed}");
    assert_eq!(of("python")["available"], json!(false), "{listed}");
    assert!(of("python")["reason"].as_str().unwrap().contains("has no /usr/bin/python3"), "{listed}");
    let examined = said(&["doctor"]);
    let line = examined.lines().find(|line| line.starts_with("images")).unwrap();
    assert!(line.contains("(sh, without bash, node, python)") && line.contains("it is for linux on arm64"), "{line}");
}

test!(Both, a_dry_run_lists_the_layers_of_an_image);
fn a_dry_run_lists_the_layers_of_an_image() {
    let store = plain();
    let planned = both_streams(&store.command(&["run", "--dry-run", "--image", "plain", "--", "sh"]).output().unwrap());
    let line = planned.lines().find(|line| line.trim_start().starts_with("image ")).unwrap_or_else(|| panic!("{planned}"));
    let tree = |layer: &str| store.tree(layer).strip_prefix(store.path()).map(Path::to_path_buf).unwrap();
    let place = |layer: &str| line.find(text(&tree(layer))).unwrap_or_else(|| panic!("{line}"));
    assert!(line.contains("/ read-only") && place("own") < place("programs"), "the topmost first: {line}");
}

test!(Both, an_image_that_no_request_needs_any_more_is_let_go_after_half_a_minute, needs [Long], seconds 200);
fn an_image_that_no_request_needs_any_more_is_let_go_after_half_a_minute() {
    let (store, policies) = (plain(), PolicyDirectory::new());
    let rooted = policies.write("rooted", &derived("language = \"sh\"\n[filesystem]\nroot = { image = \"plain\" }\n"));
    let is_held = || matches!(File::open(store.path().join("lock")).unwrap().try_lock(), Err(TryLockError::WouldBlock));
    let ask = json!({"language": "sh", "code": "cat /etc/own"});
    let waits = |what: &str, is: bool, seconds: u64| {
        assert!(eventually(scaled(Duration::from_secs(seconds)), || is_held() == is), "{what}: held is not {is}");
    };
    let mut session = Session::of(&mut store.command(&["session", "--policy", &rooted]));
    let mut in_session = || {
        let mut asked = ask.clone();
        asked["op"] = json!("run");
        assert_eq!(session.ask(asked)["output"], "of the image\n");
    };
    in_session();
    waits("a session", true, 10);
    waits("a session", false, 40);
    in_session();
    waits("a session that goes on", true, 10);
    drop(session);
    waits("the session's end", false, 10);
    let service = Service::under(&store.words(), &[], policies, "[capacity]\ncpus = 1\n", "");
    let made = stockade(["key", "new", "rooted", "--policy", &rooted, "--add", "--file", text(&service.keys())]).output().unwrap();
    let token = String::from_utf8(made.stdout).unwrap().trim().to_owned();
    service.signal("HUP");
    let in_service = || service.ask("POST", "/v1/run", &token, &ask);
    assert!(eventually(scaled(Duration::from_secs(10)), || in_service().body["output"] == "of the image\n"), "{}", service.log());
    waits("a service", true, 10);
    waits("a service", false, 40);
    in_service().ran("of the image\n");
    waits("a service that goes on", true, 10);
    service.end();
}
