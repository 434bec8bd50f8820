//! Requests that cannot be run: each is refused with its reason, at once, and leaves
//! nothing behind. Never a hang, a crash or a guess.

use std::{
    fs::{self, Permissions},
    os::unix::fs::{MetadataExt, PermissionsExt, lchown, symlink},
    path::{Path, PathBuf},
};

use serde_json::{Value, json};

use crate::support::{
    exec::{
        ExecResult, OWNER, chown_to_owner, exec, exec_bytes, exec_with, program_path, run_under, run_with_stdin, scratch, scratch_named,
        stockade, text, token, write_file,
    },
    policy_dir::{PolicyDirectory, derived},
    runner::{directory, is_root, test},
};

test!(Both, what_is_not_json_is_refused_with_line_and_column);
fn what_is_not_json_is_refused_with_line_and_column() {
    for (bytes, place) in [
        (&b"print(6*7)"[..], "line 1 column 1"),
        (b"{\"code\": \"1\"", "line 1 column 12"),
        (b"{\n\"code\": 'x'}", "line 2 column 9"),
        (b"{\"code\": \"\xff\"}", "line 1"),
        (b"{\"code\": \"a\nb\"}", "line 2"),
        (b"{\"code\": \"\", }", "line 1"),
        (b"\xef\xbb\xbf{\"code\": \"\"}", "line 1 column 1"),
        (b"{\"code\": \"\", \"limits\": {\"cpus\": NaN}}", "line 1"),
    ] {
        exec_bytes(&[], bytes).refused("request_not_json", &[place]);
    }
}

test!(Both, an_empty_stdin_is_refused_with_an_example);
fn an_empty_stdin_is_refused_with_an_example() {
    for bytes in [&b""[..], b"\n \n"] {
        exec_bytes(&[], bytes).refused("request_empty", &["{\"code\":"]);
    }
}

test!(Both, two_requests_in_one_are_refused);
fn two_requests_in_one_are_refused() {
    exec_bytes(&[], b"{\"code\": \"\"}\n{\"code\": \"\"}").refused("request_not_json", &["one JSON object", "line 2"]);
    exec_bytes(&[], b"{\"code\": \"1\", \"code\": \"2\"}").refused("request_malformed", &["code"]);
    // White space behind it is no second request.
    exec_bytes(&[], b" {\"code\": \"\"}\r\n\t ").succeeded();
}

test!(Both, deep_nesting_is_refused);
fn deep_nesting_is_refused() {
    let deep = [b"{\"code\": ".to_vec(), vec![b'['; 1 << 20]].concat();
    let done = exec_bytes(&[], &deep);
    assert_eq!(done.status, Some(2));
    let labels = format!("{{\"code\": \"\", \"labels\": {}{}}}", "{\"a\":".repeat(10_000), "}".repeat(10_000));
    assert_eq!(exec_bytes(&[], labels.as_bytes()).status, Some(2));
}

test!(Both, lone_surrogates_are_refused);
fn lone_surrogates_are_refused() {
    exec_bytes(&[], br#"{"code": "\ud800"}"#).refused("request_not_json", &["line 1"]);
    exec_bytes(&[], br#"{"code": "print('\ud83d\ude00')"}"#).succeeded().expect(json!({"output": "\u{1f600}\n"}));
}

test!(Both, wrong_types_are_refused_with_their_field);
fn wrong_types_are_refused_with_their_field() {
    for (request, field) in [
        (json!([]), ""),
        (json!("code"), ""),
        (json!(null), ""),
        (json!({"code": 1}), "code"),
        (json!({"code": null}), "code"),
        (json!({"code": "", "scratch": ["/tmp"]}), "scratch"),
        (json!({"code": "", "language": 3}), "language"),
        (json!({"code": "", "args": "a"}), "args"),
        (json!({"code": "", "args": ["a", 1]}), "args[1]"),
        (json!({"code": "", "stdin": 1}), "stdin"),
        (json!({"code": "", "stdin": {"base32": ""}}), "stdin"),
        (json!({"code": "", "stdin": {"base64": "", "more": ""}}), "stdin"),
        (json!({"code": "", "env": ["A=b"]}), "env"),
        (json!({"code": "", "env": {"DEBUG": 1}}), "env.DEBUG"),
        (json!({"code": "", "files": {"a": 1}}), "files.a"),
        (json!({"code": "", "files": ["a"]}), "files"),
        (json!({"code": "", "collect": "*"}), "collect"),
        (json!({"code": "", "limits": []}), "limits"),
        (json!({"code": "", "limits": {"wall": true}}), "limits.wall"),
        (json!({"code": "", "encoding": "utf-8"}), "encoding"),
        (json!({"code": "", "id": 7}), "id"),
        (json!({"code": "", "labels": {"a": 1}}), "labels.a"),
    ] {
        exec(request).refused("request_malformed", &[field]);
    }
}

test!(Both, unknown_fields_are_refused_by_name);
fn unknown_fields_are_refused_by_name() {
    for field in ["timeout", "Code", "network", "verdict", "policy"] {
        exec(json!({"code": "", field: 1})).refused("request_malformed", &[field]);
    }
}

test!(Both, a_key_that_stands_twice_is_refused_in_every_map);
fn a_key_that_stands_twice_is_refused_in_every_map() {
    for (field, value) in [("limits", "\"1s\""), ("env", "\"x\""), ("files", "\"x\""), ("labels", "\"x\"")] {
        let request = |other: &str| format!("{{\"code\": \"\", \"{field}\": {{\"wall\": {value}, \"{other}\": {value}}}}}");
        exec_bytes(&[], request("wall").as_bytes()).refused("request_malformed", &[field, "duplicate key \"wall\""]);
        // The control: two keys are no mistake of this kind.
        assert!(!exec_bytes(&[], request("cpu").as_bytes()).error().contains("duplicate"));
    }
    exec_bytes(&[], br#"{"code": "", "code": ""}"#).refused("request_malformed", &["duplicate field `code`"]);
}

test!(Both, code_is_required);
fn code_is_required() {
    exec(json!({})).refused("request_malformed", &["code"]);
    exec(json!([{"code": "1"}])).refused("request_malformed", &["is a list", "{\"code\":", "stockade session"]);
    exec(json!(["1"])).refused("request_malformed", &["is a list"]);
    // Fields of other tools, each with what to write here.
    for (field, write) in
        [("timeout", "\"limits\": {\"wall\""), ("network", "--allow"), ("workdir", "\"scratch\""), ("packages", "--runtime")]
    {
        exec(json!({"code": "", field: 1})).refused("request_malformed", &[field, write]);
    }
    exec_bytes(&[], b"print(1)\n").refused("request_not_json", &["print(1)", "stockade run script.py"]);
}

test!(Both, sixty_five_mebibytes_are_refused);
fn sixty_five_mebibytes_are_refused() {
    let large = format!("{{\"code\": \"\", \"stdin\": \"{}\"}}", "x".repeat(65 << 20));
    exec_bytes(&[], large.as_bytes()).refused("request_too_large", &["64 MiB", "scratch"]);
}

test!(Both, nul_is_refused_with_its_field);
fn nul_is_refused_with_its_field() {
    exec(json!({"code": "print(1)\u{0}"})).refused("code_holds_nul", &["code"]);
    exec(json!({"code": "", "args": ["a", "b\u{0}"]})).refused("args_malformed", &["args[1]"]);
    exec(json!({"code": "", "files": {"a\u{0}b": ""}})).refused("path_malformed", &["files", "NUL"]);
    exec(json!({"code": "", "collect": ["a\u{0}"]})).refused("path_malformed", &["collect", "NUL"]);
    exec(json!({"code": "", "env": {"DEBUG": "a\u{0}"}})).refused("env_malformed", &["DEBUG"]);
    exec(json!({"code": "", "scratch": "/tmp/a\u{0}b"})).refused("scratch_malformed", &["NUL"]);
    let named = exec(json!({"code": "", "language": "py\u{0}thon"}));
    named.refused("unknown_language", &[]);
}

test!(Both, malformed_globs_are_refused_because_they_would_match_nothing);
fn malformed_globs_are_refused_because_they_would_match_nothing() {
    for (glob, reason) in [("[ab", "missing ']'"), ("a][b", "missing ']'"), ("{a,b", "missing '}'"), ("out\\", "trailing backslash")] {
        exec(json!({"code": "", "collect": [glob]})).refused("path_malformed", &["collect", reason]);
    }
    let done = exec(json!({"code": "open('[x', 'w').write('1')", "collect": ["[[]x"]}));
    done.succeeded();
    assert_eq!(done["files"][0]["path"], "[x");
}

test!(Both, paths_that_leave_scratch_are_refused);
fn paths_that_leave_scratch_are_refused() {
    let long = "x".repeat(256);
    let longer = "x/".repeat(2048) + "x";
    for path in ["/etc/passwd", "..", "../up", "a/../b", "a/./b", "./a", "a//b", "a/", "", &long, &longer] {
        exec(json!({"code": "", "files": {path: "x"}})).refused("path_malformed", &["files"]);
        exec(json!({"code": "", "collect": [path]})).refused("path_malformed", &["collect"]);
    }
    // What only looks like it is a name like any other.
    let done = exec(
        json!({"code": "import os; print(sorted(n for n in os.listdir('.') if n != 'main.py'))", "files": {"...": "", "..a": "", "~": "", "\\..": ""}}),
    );
    done.succeeded().expect(json!({"output": "['...', '..a', '\\\\..', '~']\n"}));
}

test!(Both, files_are_not_written_through_links);
fn files_are_not_written_through_links() {
    let scratch = scratch();
    let victim = directory().join("victim");
    fs::write(&victim, "untouched").unwrap();
    chown_to_owner(&victim);
    symlink(&victim, scratch.join("final")).unwrap();
    symlink(directory(), scratch.join("way")).unwrap();
    symlink("/etc", scratch.join("etc")).unwrap();
    for path in ["final", "way/victim", "way/new", "etc/passwd"] {
        let done = exec(json!({"code": "print('ran')", "scratch": text(&scratch), "files": {path: "written"}}));
        done.refused("files_not_writable", &["link"]);
    }
    assert_eq!(fs::read_to_string(&victim).unwrap(), "untouched");
    assert!(!directory().join("new").exists());
    // The control: the same file beside the links.
    exec(json!({"code": "", "scratch": text(&scratch), "files": {"plain": "written"}})).succeeded();
    assert_eq!(fs::read_to_string(scratch.join("plain")).unwrap(), "written");
}

test!(Both, files_are_not_written_into_fifos);
fn files_are_not_written_into_fifos() {
    let scratch = scratch();
    assert!(std::process::Command::new("mkfifo").arg(scratch.join("fifo")).status().unwrap().success());
    chown_to_owner(&scratch.join("fifo"));
    exec(json!({"code": "", "scratch": text(&scratch), "files": {"fifo": "x"}})).refused("files_not_writable", &[]);
}

test!(Both, files_beyond_scratch_size_are_refused);
fn files_beyond_scratch_size_are_refused() {
    let request = json!({"code": "", "files": {"big": "x".repeat(2 << 20)}, "limits": {"scratch_size": "1MiB"}});
    exec(request).refused("files_not_writable", &["scratch_size"]);
}

test!(Both, malformed_base64_is_refused_with_its_field);
fn malformed_base64_is_refused_with_its_field() {
    for bad in ["a", "YQ", "YQ==\n", "!!!!", "YQ=="] {
        let (files, stdin) = (json!({"code": "", "files": {"dir/a": {"base64": bad}}}), json!({"code": "", "stdin": {"base64": bad}}));
        if bad == "YQ==" {
            exec(files).succeeded();
            exec(stdin).succeeded();
        } else {
            exec(files).refused("base64_malformed", &["files", "dir/a"]);
            exec(stdin).refused("base64_malformed", &["stdin"]);
        }
    }
}

test!(Both, malformed_variables_are_refused);
fn malformed_variables_are_refused() {
    for name in ["", "A=B", "A\u{0}"] {
        exec(json!({"code": "", "env": {name: "x"}})).refused("env_malformed", &["env"]);
    }
}

test!(Both, an_unknown_language_is_refused_with_those_there_are);
fn an_unknown_language_is_refused_with_those_there_are() {
    for language in ["klingon", "", "../python", "/usr/bin/python3"] {
        exec(json!({"code": "", "language": language})).refused("unknown_language", &["python", "bash", "sh", "node", "[runtimes.NAME]"]);
    }
}

test!(Both, unknown_and_malformed_limits_are_refused);
fn unknown_and_malformed_limits_are_refused() {
    exec(json!({"code": "", "limits": {"memroy": "1GiB"}})).refused("unknown_limit", &["memroy", "did you mean `memory`?"]);
    exec(json!({"code": "", "limits": {"timeout": "1s"}})).refused("unknown_limit", &["timeout", "wall"]);
    for (name, value) in [
        ("wall", json!(30)),
        ("wall", json!("30")),
        ("wall", json!("30 s!")),
        ("wall", json!("-1s")),
        ("wall", json!("0s")),
        ("wall", json!("99999999999999999999s")),
        ("memory", json!(1 << 30)),
        ("memory", json!("1GB")),
        ("memory", json!("1.5GiB")),
        ("processes", json!(0)),
        ("processes", json!(-1)),
        ("processes", json!(1.5)),
        ("processes", json!("many")),
        ("cpus", json!(0)),
        ("cpus", json!(0.001)),
        ("cpus", json!("half")),
    ] {
        exec(json!({"code": "", "limits": {name: value}}))
            .refused("limit_malformed", &[&format!("`{name}`"), "such as"][..if name == "processes" { 1 } else { 2 }]);
    }
}

fn ask(scratch: &str) -> ExecResult {
    exec(json!({"code": "print('ran')", "scratch": scratch}))
}

test!(Both, a_missing_or_relative_scratch_is_refused);
fn a_missing_or_relative_scratch_is_refused() {
    let missing = directory().join("missing");
    ask(text(&missing)).refused("scratch_missing", &[text(&missing), "create"]);
    assert!(!missing.exists());
    ask(text(&missing.join("deeper"))).refused("scratch_missing", &[]);
    for relative in ["work", "./work", "~/work", "", "tmp/x"] {
        ask(relative).refused("scratch_relative", &["absolute"]);
    }
    ask(&format!("{}/../x", text(&directory()))).refused("scratch_malformed", &[".."]);
    ask(&format!("{}/a\nb", text(&directory()))).refused("scratch_malformed", &["line break"]);
}

test!(Both, a_file_is_no_scratch);
fn a_file_is_no_scratch() {
    let file = directory().join("file");
    write_file(&file, "x");
    ask(text(&file)).refused("scratch_not_directory", &["not a directory"]);
    ask(text(&file.join("below"))).refused("scratch_not_directory", &["not a directory"]);
}

test!(Both, system_directories_are_no_scratch);
fn system_directories_are_no_scratch() {
    for path in
        ["/", "/etc", "/usr", "/usr/bin", "/proc", "/proc/self", "/dev", "/dev/shm", "/sys", "/run", "/tmp", "/home", "/var", "/etc/ssl"]
    {
        if !Path::new(path).is_dir() {
            continue;
        }
        let done = ask(path);
        done.expect(json!({"verdict": "bad_request", "code": 2, "started": false}));
        let reason = done["reason"].as_str().unwrap();
        let known = [
            "scratch_is_home",
            "scratch_of_kernel",
            "scratch_holds_registry",
            "scratch_in_system_directory",
            "scratch_shared",
            "scratch_not_owned",
        ];
        assert!(known.contains(&reason), "{path}: {}", done.brief());
    }
    ask("/").refused("scratch_is_home", &["below it"]);
}

test!(RootOnly, a_home_directory_is_no_scratch_of_root);
fn a_home_directory_is_no_scratch_of_root() {
    ask("/root").refused("scratch_is_home", &["home directory"]);
}

test!(RootlessOnly, a_home_directory_is_no_scratch);
fn a_home_directory_is_no_scratch() {
    // The user who runs this may have no account; every other account's home counts too.
    let accounts = fs::read_to_string("/etc/passwd").unwrap();
    let mut homes = accounts.lines().filter_map(|line| line.split(':').nth(5)).filter(|home| home.len() > 1);
    let real = |home: &&str| fs::canonicalize(home).is_ok_and(|path| path == Path::new(home) && fs::read_dir(path).is_ok());
    let home = homes.find(real).expect("some account has a home that anybody may read");
    ask(home).refused("scratch_is_home", &["home directory"]);
}

test!(RootOnly, root_may_use_a_directory_of_its_own);
fn root_may_use_a_directory_of_its_own() {
    let path = directory().join("of-root");
    fs::create_dir(&path).unwrap();
    fs::write(path.join("mine"), "1").unwrap();
    let code =
        "import os\nopen('mine', 'a').write('2')\nopen('new', 'w').write('x')\nos.mkdir('below')\nprint(os.getuid(), os.stat('.').st_uid)";
    let done = exec(json!({"code": code, "scratch": text(&path)}));
    assert_eq!(done.output(), "1000 1000\n", "{}", done.brief());
    // Root's on the host, although the run had another uid.
    for name in ["mine", "new", "below"] {
        let found = fs::symlink_metadata(path.join(name)).unwrap();
        assert_eq!((found.uid(), found.gid(), found.mode() & 0o7000), (0, 0, 0), "{name}");
    }
    assert_eq!(fs::read_to_string(path.join("mine")).unwrap(), "12");
    assert!(done["receipt"].to_string().contains("1000:1000 is host 187"), "{}", done["receipt"]);
    // Not another user's run.
    ask_as(OWNER, &path).refused("scratch_not_owned", &[]);
    // The group alone is enough, and is what is named.
    std::os::unix::fs::chown(&path, Some(OWNER), Some(0)).unwrap();
    ask(text(&path)).succeeded();
    let request = json!({"code": "", "scratch": text(&path)});
    exec_with(&["--policy", "strict"], request.clone()).refused("scratch_root_owned", &["its group is root's", "chgrp"]);
    chown_to_owner(&path);
    exec_with(&["--policy", "strict"], request).succeeded();
}

test!(RootOnly, no_directory_that_the_host_trusts_is_a_scratch_of_root);
fn no_directory_that_the_host_trusts_is_a_scratch_of_root() {
    for path in ["/etc", "/etc/cron.d", "/opt", "/usr/local/bin", "/var", "/var/lib", "/boot", "/dev/shm", "/run/lock"] {
        if Path::new(path).is_dir() {
            let done = ask(path);
            let known = ["scratch_in_system_directory", "scratch_is_home", "scratch_shared"];
            assert!(known.contains(&done["reason"].as_str().unwrap()), "{path}: {}", done.brief());
        }
    }
    ask("/tmp").refused("scratch_shared", &["below it"]);
    ask("/home").refused("scratch_is_home", &["home"]);
    // A policy forbids it, and another adds a place.
    let path = directory().join("of-root");
    fs::create_dir(&path).unwrap();
    let request = |path: &Path| json!({"code": "open('made', 'w')", "scratch": text(path)});
    exec_with(&["--policy", "strict"], request(&path)).refused("scratch_root_owned", &["[scratch] root"]);
    let added = PathBuf::from(format!("/opt/{}", token("scratch")));
    fs::create_dir(&added).unwrap();
    let policies = PolicyDirectory::new();
    let wider = policies.write("wider", &derived(&format!("[scratch]\nroot = {{ add = [\"{}\"] }}", added.display())));
    let without = exec(request(&added));
    let with = exec_with(&["--policy", &wider], request(&added));
    fs::remove_dir_all(&added).unwrap();
    without.refused("scratch_in_system_directory", &["/opt", "[scratch] root"]);
    with.succeeded();
}

test!(Both, a_set_id_program_in_scratch_stays_as_it_is);
fn a_set_id_program_in_scratch_stays_as_it_is() {
    let scratch = scratch();
    for (name, mode) in [("plain", 0o755), ("set-id", 0o4755), ("set-gid", 0o2755)] {
        write_file(&scratch.join(name), "#!/bin/true");
        chown_to_owner(&scratch.join(name));
        fs::set_permissions(scratch.join(name), Permissions::from_mode(mode)).unwrap();
    }
    // By a mapping, which takes no bits away as write(2) does.
    let code = "import mmap\nfor name in ('plain', 'set-id', 'set-gid'):\n  try:\n    with open(name, 'r+b') as f, mmap.mmap(f.fileno(), 0) as m: m[2:] = b'/bin/evil'; print(name)\n  except OSError as e: print(name, e.errno)";
    let done = exec(json!({"code": code, "scratch": text(&scratch)}));
    // The control is the one without the bits.
    assert_eq!(done.output(), "plain\nset-id 30\nset-gid 30\n", "{}", done.brief());
    assert_eq!(fs::read_to_string(scratch.join("set-id")).unwrap(), "#!/bin/true");
}

test!(RootOnly, a_program_with_file_capabilities_and_a_device_stay_as_they_are);
fn a_program_with_file_capabilities_and_a_device_stay_as_they_are() {
    let path = directory().join("of-root");
    fs::create_dir(&path).unwrap();
    for name in ["plain", "able"] {
        write_file(&path.join(name), "#!/bin/true");
        fs::set_permissions(path.join(name), Permissions::from_mode(0o755)).unwrap();
        std::os::unix::fs::chown(path.join(name), Some(0), Some(0)).unwrap();
    }
    // cap_dac_read_search=ep: revision 2 with the effective bit, then permitted and inheritable words.
    let words: [u32; 5] = [0x0200_0001, 1 << 2, 0, 0, 0];
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    rustix::fs::setxattr(path.join("able"), c"security.capability", &bytes, rustix::fs::XattrFlags::empty()).unwrap();
    let device = rustix::fs::makedev(1, 3);
    rustix::fs::mknodat(rustix::fs::CWD, path.join("null"), rustix::fs::FileType::CharacterDevice, rustix::fs::Mode::RUSR, device).unwrap();
    let code = "import mmap, os\nfor name in ('plain', 'able'):\n  try:\n    with open(name, 'r+b') as f, mmap.mmap(f.fileno(), 0) as m: m[2:] = b'/bin/evil'; print(name)\n  except OSError as e: print(name, e.errno)\nfor name in ('plain', 'null'):\n  try: os.chmod(name, 0o666); print(name)\n  except OSError as e: print(name, e.errno)";
    let done = exec(json!({"code": code, "scratch": text(&path)}));
    // The control is the plain file.
    assert_eq!(done.output(), "plain\nable 30\nplain\nnull 30\n", "{}", done.brief());
    assert_eq!(fs::read_to_string(path.join("able")).unwrap(), "#!/bin/true");
    assert_eq!(fs::metadata(path.join("null")).unwrap().mode() & 0o777, 0o400);
}

test!(RootOnly, a_directory_that_all_users_write_to_is_no_scratch_of_root);
fn a_directory_that_all_users_write_to_is_no_scratch_of_root() {
    let path = directory().join("open");
    fs::create_dir(&path).unwrap();
    for mode in [0o777, 0o1777, 0o703] {
        fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
        ask(text(&path)).refused("scratch_shared", &["all users", "o-w"]);
    }
    fs::set_permissions(&path, Permissions::from_mode(0o775)).unwrap();
    ask(text(&path)).succeeded();
}

test!(RootlessOnly, a_scratch_of_somebody_else_is_refused);
fn a_scratch_of_somebody_else_is_refused() {
    ask("/var/tmp").refused("scratch_not_owned", &["uid 0"]);
}

/// `exec` as an ordinary user without an account.
fn ask_as(uid: u32, scratch: &Path) -> ExecResult {
    let program = program_path().unwrap();
    let id = uid.to_string();
    let words = ["setpriv", "--reuid", &id, "--regid", &id, "--clear-groups", "--inh-caps=-all", text(&program), "exec"];
    let home = directory().join(format!("user-{uid}"));
    fs::create_dir_all(&home).unwrap();
    std::os::unix::fs::chown(&home, Some(uid), Some(uid)).unwrap();
    let mut command = run_under(&words);
    command.env("XDG_RUNTIME_DIR", &home).env("HOME", &home);
    ExecResult::of(run_with_stdin(&mut command, json!({"code": "print('ran')", "scratch": text(scratch)}).to_string().as_bytes()))
}

test!(RootOnly, another_users_scratch_is_refused_to_an_ordinary_caller);
fn another_users_scratch_is_refused_to_an_ordinary_caller() {
    let path = scratch();
    fs::set_permissions(&path, Permissions::from_mode(0o777)).unwrap();
    ask_as(OWNER + 1, &path).refused("scratch_not_owned", &[&format!("uid {OWNER}"), &format!("uid {}", OWNER + 1)]);
    ask_as(OWNER, &path).succeeded();
}

test!(RootOnly, a_scratch_behind_another_users_link_is_refused);
fn a_scratch_behind_another_users_link_is_refused() {
    let path = scratch();
    let link = directory().join("link");
    symlink(&path, &link).unwrap();
    for uid in [OWNER + 1, OWNER] {
        lchown(&link, Some(uid), Some(uid)).unwrap();
        for done in [ask_as(OWNER, &link), ask(text(&link))] {
            let remedy = format!("name it without the link: {}", text(&path));
            done.refused("scratch_foreign_link", &[&format!("uid {uid}"), text(&link), &remedy]);
        }
    }
    // The controls: the path that is named instead, and a link of root's.
    ask_as(OWNER, &path).succeeded();
    lchown(&link, Some(0), Some(0)).unwrap();
    ask_as(OWNER, &link).succeeded();
    ask(text(&link)).succeeded();
    // Links that lead in a circle.
    symlink("circle", directory().join("circle")).unwrap();
    ask(text(&directory().join("circle"))).refused("scratch_link_loop", &[]);
}

test!(Both, a_link_that_code_left_leads_no_later_run_anywhere);
/// Links that code left on the way belong to the user who runs it, or to the owner of its scratch.
fn a_link_that_code_left_leads_no_later_run_anywhere() {
    let (above, secrets) = (scratch(), scratch_named("secrets"));
    write_file(&secrets.join("key"), token("led"));
    fs::create_dir(secrets.join("below")).unwrap();
    chown_to_owner(&secrets.join("below"));
    let plant = format!("import os\nos.symlink({:?}, 'task')\nos.mkdir('own')", text(&secrets));
    exec(json!({"code": plant, "scratch": text(&above)})).succeeded();
    let (task, own) = (above.join("task"), above.join("own"));
    let read =
        |options: &[&str], scratch: &Path| exec_with(options, json!({"code": "print(open('key').read())", "scratch": text(scratch)}));
    let (remedy, deeper) = (format!("link: {}", text(&secrets)), format!("link: {}", text(&secrets.join("below"))));
    read(&[], &task).refused("scratch_foreign_link", &[text(&task), &remedy]);
    read(&[], &task.join("below")).refused("scratch_foreign_link", &[text(&task), &deeper]);
    read(&["--scratch", text(&above)], &task).refused("scratch_foreign_link", &[text(&task)]);
    read(&["--scratch", text(&task)], &task).refused("scratch_foreign_link", &[text(&task)]);
    read(&["--scratch", text(&task)], &task.join("below")).refused("scratch_foreign_link", &[text(&task)]);
    // The controls: what was linked to, by its own name, and a directory that the code made.
    read(&[], &secrets).succeeded().expect(json!({"output": format!("{}\n", token("led"))}));
    write_file(&own.join("key"), "its own");
    read(&["--scratch", text(&above)], &own).succeeded().expect(json!({"output": "its own\n"}));
}

test!(Both, a_scratch_that_is_made_is_made_where_it_was_named_or_not_at_all);
fn a_scratch_that_is_made_is_made_where_it_was_named_or_not_at_all() {
    let (ceiling, beside) = (scratch_named("ceiling"), scratch_named("beside"));
    let uid = fs::metadata(&ceiling).unwrap().uid();
    let ask = |options: &[&str], path: &Path| {
        let words = [&["--policy", "blueprint"], options].concat();
        exec_with(&words, json!({"code": "open('made', 'w').close()", "scratch": text(path)}))
    };
    let below = ["--scratch", text(&ceiling)];
    let plant = format!("import os; os.symlink({:?}, 'up')", text(&beside));
    exec(json!({"code": plant, "scratch": text(&ceiling)})).succeeded();
    for options in [&[][..], &below] {
        ask(options, &ceiling.join("up/new")).refused("scratch_foreign_link", &[text(&beside.join("new"))]);
    }
    ask(&below, &beside.join("new")).refused("scratch_outside_ceiling", &[text(&ceiling)]);
    ask(&below, &ceiling.join("one/two")).refused("scratch_not_made", &["parent must exist"]);
    assert_eq!(fs::read_dir(&beside).unwrap().count(), 0, "made beside the ceiling");
    if is_root() {
        // A link of root's is followed, and its end is held to the ceiling.
        symlink(&beside, ceiling.join("roots")).unwrap();
        ask(&below, &ceiling.join("roots/new")).refused("scratch_outside_ceiling", &[text(&beside.join("new"))]);
        assert_eq!(fs::read_dir(&beside).unwrap().count(), 0, "made beside the ceiling");
    }
    // The controls: the same without a link, twice, since it is there the second time.
    for options in [&below[..], &[]] {
        let new = ceiling.join("new");
        ask(options, &new).succeeded();
        let made = fs::metadata(&new).unwrap();
        assert_eq!((made.uid(), made.permissions().mode() & 0o7777), (if is_root() { 0 } else { uid }, 0o755));
        assert!(new.join("made").exists());
    }
}

test!(Both, a_scratch_that_cannot_be_entered_is_refused);
fn a_scratch_that_cannot_be_entered_is_refused() {
    let path = scratch();
    let set = |mode| fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
    let remedy = format!("chmod u+rwx {}", text(&path));
    for mode in [0, 0o311, 0o600] {
        set(mode);
        ask(text(&path)).refused("scratch_unreadable", &["EACCES", &remedy]);
        if is_root() {
            ask_as(OWNER, &path).refused("scratch_unreadable", &["EACCES", &remedy]);
        }
    }
    // Commands may run where no program can be written.
    set(0o500);
    ask(text(&path)).broke("setup_step_failed", &[text(&path), "chmod u+rwx"]);
    set(0o700);
    ask(text(&path)).succeeded();
}

test!(Both, a_missing_interpreter_is_named);
fn a_missing_interpreter_is_named() {
    let policies = PolicyDirectory::new();
    let policy =
        policies.write("none", &derived("[runtimes.none]\ncommand = [\"/usr/bin/no-such-interpreter\", \"{file}\"]\nextension = \"x\""));
    let done = exec_with(&["--policy", &policy], json!({"code": "", "language": "none"}));
    done.broke("interpreter_missing", &["`none`", "/usr/bin/no-such-interpreter", "--runtime"]);
    exec_with(&["--runtime", "python=/no/such/python"], json!({"code": ""}))
        .refused("interpreter_missing", &["--runtime python=/no/such/python"]);
    exec_with(&["--runtime", "klingon=/usr/bin/python3"], json!({"code": ""})).refused("unknown_language", &["klingon"]);
}

test!(Both, an_interpreter_outside_the_root_is_named);
fn an_interpreter_outside_the_root_is_named() {
    let policies = PolicyDirectory::new();
    let interpreter = directory().join("interpreter");
    fs::write(&interpreter, "#!/bin/sh\nexec cat \"$1\"\n").unwrap();
    fs::set_permissions(&interpreter, Permissions::from_mode(0o755)).unwrap();
    let policy = policies
        .write("outside", &derived(&format!("[runtimes.outside]\ncommand = [{:?}, \"{{file}}\"]\nextension = \"x\"", text(&interpreter))));
    let done = exec_with(&["--policy", &policy], json!({"code": "", "language": "outside"}));
    done.broke("program_not_started", &[text(&interpreter), "the sandbox does not have it"]);
}

test!(Both, a_venv_that_is_not_there_is_named);
fn a_venv_that_is_not_there_is_named() {
    let policies = PolicyDirectory::new();
    let policy = policies.write("venv", &derived("[runtimes.python]\nvenv = \"/usr/no-such-venv\""));
    let done = exec_with(&["--policy", &policy], json!({"code": ""}));
    done.broke("interpreter_missing", &["/usr/no-such-venv"]);
}

test!(Both, a_command_that_is_too_long_is_refused);
fn a_command_that_is_too_long_is_refused() {
    // The kernel takes 128 KiB in one argument.
    let done = exec(json!({"code": "print('ran')", "args": ["x".repeat(1 << 20)]}));
    done.expect(json!({"started": false, "success": false}));
    assert!(done.error().contains("E2BIG") || done.error().contains("too long") || done.error().contains("args"), "{}", done.brief());
}

test!(Both, a_closed_stdin_is_refused);
fn a_closed_stdin_is_refused() {
    let program = program_path().unwrap();
    let output = run_under(&["sh", "-c", "exec \"$0\" exec <&-", text(&program)]).output().unwrap();
    let done = ExecResult::of(output);
    assert_eq!(done.status, Some(2), "{}", done.brief());
}

test!(Both, a_refusal_leaves_no_trace_in_scratch);
fn a_refusal_leaves_no_trace_in_scratch() {
    let scratch = scratch();
    let requests: [Value; 5] = [
        json!({"language": "klingon"}),
        json!({"limits": {"wall": "1h"}}),
        json!({"files": {"../x": ""}}),
        json!({"env": {"SECRET": "x"}}),
        json!({"files": {"a": {"base64": "!"}}}),
    ];
    for mut request in requests {
        request["code"] = json!("open('ran','w')");
        request["scratch"] = json!(text(&scratch));
        assert_eq!(exec(request).status, Some(2));
        assert_eq!(fs::read_dir(&scratch).unwrap().count(), 0);
    }
}

test!(Both, a_callers_limit_on_file_sizes_is_an_error_and_no_death);
/// The launcher's parent may have limited the size of files to 0.
fn a_callers_limit_on_file_sizes_is_an_error_and_no_death() {
    let limited = |blocks: &str, request: &Value| {
        let words = format!("ulimit -f {blocks}; exec \"$STOCKADE\" exec");
        ExecResult::of(run_with_stdin(&mut run_under(&["sh", "-c", &words]), request.to_string().as_bytes()))
    };
    let request = json!({"code": "print(1)"});
    for request in [&request, &json!({"code": "print(1)", "scratch": text(&scratch())})] {
        let done = limited("0", request);
        done.expect(json!({"verdict": "sandbox_error", "started": false}));
        assert!(done.error().contains("too large") && done.error().contains("ulimit -f"), "{}", done.error());
        limited("unlimited", request).succeeded();
    }
    // The launcher goes on where that signal comes; the code gets what a login would give it.
    let code = "ulimit -f 1; (exec head -c 4096 /dev/zero > grown); echo $?; grep SigIgn /proc/self/status";
    let done = exec(json!({"code": code, "language": "sh"}));
    done.succeeded().expect(json!({"output": "153\nSigIgn:\t0000000000000000\n"}));
}

test!(Both, a_callers_limit_on_the_stack_or_the_data_is_an_error_in_a_result);
fn a_callers_limit_on_the_stack_or_the_data_is_an_error_in_a_result() {
    let limited = |limit: &str| {
        let words = format!("ulimit {limit}; exec \"$STOCKADE\" exec");
        ExecResult::of(run_with_stdin(&mut run_under(&["sh", "-c", &words]), br#"{"code": "", "language": "sh"}"#))
    };
    limited("-s 64").broke("limits_of_caller", &["1 MiB", "ulimit -Hs"]);
    limited("-s 1024").succeeded();
    // Other commands are read and answered with more of it.
    for words in ["policy check default", "policy schema", "prove --help"] {
        let script = format!("ulimit -s 1024; exec \"$STOCKADE\" {words}");
        assert!(run_under(&["sh", "-c", &script]).output().unwrap().status.success(), "{words}");
    }
    limited("-d 8000").broke("limits_of_caller", &["16 MiB", "ulimit -d"]);
    limited("-d 32000").succeeded();
}

test!(Both, a_backtrace_that_was_asked_for_changes_no_error);
fn a_backtrace_that_was_asked_for_changes_no_error() {
    let failed = |words: &[&str], backtrace: &str| {
        let done = stockade(words).env("RUST_BACKTRACE", backtrace).env("RUST_LIB_BACKTRACE", backtrace).output().unwrap();
        (done.status.code(), String::from_utf8([done.stdout, done.stderr].concat()).unwrap())
    };
    for words in [&["shim", "list", "/nonexistent"][..], &["mcp", "--policy", "nonexistent"], &["policy", "show", "nonexistent"]] {
        let plain = failed(words, "0");
        assert!(plain.0.is_some_and(|code| code != 0) && plain.1.contains("nonexistent"), "{words:?}: {plain:?}");
        assert_eq!(failed(words, "full"), plain, "{words:?}");
    }
}

test!(RootOnly, what_keeps_a_launcher_from_its_work_is_named);
/// A chroot, a set of capabilities without CAP_CHOWN, too few descriptors.
fn what_keeps_a_launcher_from_its_work_is_named() {
    let program = crate::support::exec::program_path().unwrap();
    let asks = |words: &[&str]| ExecResult::of(run_with_stdin(&mut run_under(words), br#"{"code": ""}"#));
    let place = directory().join("chroot");
    fs::create_dir(&place).unwrap();
    // A directory with all of the host's, and no mount itself.
    let script = "cd \"$1\"; for it in /*; do if [ -L $it ]; then cp -P $it .; elif [ -d $it ]; then mkdir ./$it && mount --rbind $it ./$it; fi; done; exec chroot . \"$2\" exec";
    let in_chroot = asks(&["unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh", text(&place), text(&program)]);
    in_chroot.broke("namespaces_refused", &["chroot"]);
    assert!(!in_chroot.error().contains("seccomp profile"), "{}", in_chroot.error());
    let without = asks(&["setpriv", "--bounding-set=-chown", "--inh-caps=-chown", "--", text(&program), "exec"]);
    without.broke("root_without_capabilities", &["root without CAP_CHOWN"]);
    let few = asks(&["sh", "-c", "ulimit -Hn 20; ulimit -n 20; exec \"$0\" exec", text(&program)]);
    assert!(few.error().contains("EMFILE") && few.error().contains("ulimit -Hn"), "{}", few.error());
    // The control.
    asks(&[text(&program), "exec"]).succeeded();
}

test!(Both, too_many_arguments_are_refused);
fn too_many_arguments_are_refused() {
    let patterns = |count: usize| exec(json!({"code": "open('f', 'w').close()", "collect": vec!["f"; count]}));
    assert_eq!(patterns(256).succeeded()["files"].as_array().unwrap().len(), 1);
    patterns(257).expect(json!({"verdict": "bad_request", "reason": "too_many_patterns", "started": false}));
    let ask = |count: usize| exec(json!({"code": "import sys; print(len(sys.argv))", "args": vec!["x"; count]}));
    ask(50_000).refused("arguments_too_large", &["args"]);
    ask(1000).succeeded().expect(json!({"output": "1001\n"}));
}

test!(Both, too_long_a_variable_is_refused);
fn too_long_a_variable_is_refused() {
    let policies = PolicyDirectory::new();
    let policy = policies.write("long", &derived("[environment]\naccept = { add = [\"LONG\"] }"));
    let ask = |length: usize| {
        let code = "import os; print(len(os.environ['LONG']))";
        exec_with(&["--policy", &policy], json!({"code": code, "env": {"LONG": "x".repeat(length)}}))
    };
    ask(200 << 10).refused("arguments_too_large", &["env"]);
    ask(100 << 10).succeeded().expect(json!({"output": "102400\n"}));
}
