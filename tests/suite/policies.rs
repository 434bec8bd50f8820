//! Policies: where a name is sought, which files root trusts, what an error shows, and which
//! caller may use which through root.

use std::{
    fs::{self, Permissions},
    os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink},
    path::{Path, PathBuf},
    process::Output,
};

use serde_json::{Value, json};

use crate::support::{
    audit_log::{audit, own_log},
    exec::{
        ExecResult, OWNER, chown_to_owner, exec, exec_with, program_path, run_under, run_with_stdin, scratch_named, stockade, text,
        write_file,
    },
    policy_dir::{PolicyDirectory, derived, derived_from, with_etc},
    runner::{directory, test},
};

const SHIPPED: [&str; 9] = ["default", "strict", "review", "shell", "data-science", "pypi", "wasm", "pyodide", "blueprint"];

fn policy(arguments: &[&str]) -> (Output, String, String) {
    let output = stockade([&["policy"], arguments].concat()).output().unwrap();
    let (said, complained) = (String::from_utf8_lossy(&output.stdout).into_owned(), String::from_utf8_lossy(&output.stderr).into_owned());
    (output, said, complained)
}

test!(Both, every_shipped_policy_checks);
fn every_shipped_policy_checks() {
    let (output, said, complained) = policy(&[&["check"][..], &SHIPPED].concat());
    assert!(output.status.success(), "{complained}");
    for name in SHIPPED {
        assert!(said.contains(&format!("{name}: ok (shipped, sha256 ")), "{said}");
    }
    // The files that they were made from, too.
    let repo =
        Path::new(&std::env::var("CARGO_MANIFEST_DIR").unwrap_or_else(|_| String::from(env!("CARGO_MANIFEST_DIR")))).join("../policies");
    let policies = PolicyDirectory::new();
    for entry in fs::read_dir(&repo).unwrap().chain(fs::read_dir(repo.join("examples")).unwrap()).flatten() {
        let path = entry.path();
        if path.extension().is_some_and(|end| end == "toml") {
            let copy = policies.write(path.file_stem().unwrap().to_str().unwrap(), &fs::read_to_string(&path).unwrap());
            let (output, said, complained) = policy(&["check", &copy]);
            assert!(output.status.success() && said.contains("ok"), "{copy}: {complained}");
        }
    }
}

test!(Both, the_list_names_every_shipped_policy);
fn the_list_names_every_shipped_policy() {
    let (output, said, _) = policy(&["list"]);
    assert!(output.status.success());
    for name in SHIPPED {
        assert!(said.lines().any(|line| line.starts_with(&format!("{name} ")) && line.ends_with("[shipped]")), "{said}");
    }
}

test!(Both, a_policy_is_shown_whole_and_the_text_is_a_policy);
fn a_policy_is_shown_whole_and_the_text_is_a_policy() {
    let policies = PolicyDirectory::new();
    for name in SHIPPED {
        let (output, shown, complained) = policy(&["show", name]);
        assert!(output.status.success(), "{complained}");
        let copy = policies.write("shown", &shown);
        let (output, _, complained) = policy(&["check", &copy]);
        assert!(output.status.success() && !complained.contains("no reason"), "{name}: {complained}");
        let json = |name: &str| serde_json::from_str::<Value>(&policy(&["show", name, "--json"]).1).unwrap();
        let (original, again) = (json(name), json(&copy));
        for section in
            ["filesystem", "identity", "environment", "runtimes", "templates", "limits", "limits_max", "seccomp", "scratch", "degrade"]
        {
            assert_eq!(original[section], again[section], "{name} {section}");
        }
    }
}

test!(Both, the_schema_names_every_section);
fn the_schema_names_every_section() {
    let (output, said, _) = policy(&["schema"]);
    assert!(output.status.success());
    let schema: Value = serde_json::from_str(&said).unwrap();
    for section in [
        "schema",
        "extends",
        "filesystem",
        "identity",
        "environment",
        "runtimes",
        "templates",
        "limits",
        "seccomp",
        "egress",
        "scratch",
        "degrade",
    ] {
        assert!(schema["properties"][section].is_object(), "{section}: {said}");
    }
}

test!(Both, a_name_that_nothing_has_is_refused_with_a_suggestion);
fn a_name_that_nothing_has_is_refused_with_a_suggestion() {
    exec_with(&["--policy", "defualt"], json!({"code": ""}))
        .broke("policy_not_found", &["`defualt`", "did you mean `default`?", "shipped"]);
    for name in ["", "Default", "a b", "..", "default.toml"] {
        let done = exec_with(&["--policy", name], json!({"code": ""}));
        done.expect(json!({"verdict": "sandbox_error", "code": 125, "started": false}));
    }
    exec_with(&["--policy", "/no/such.toml"], json!({"code": ""})).broke("policy_not_found", &["/no/such.toml"]);
    let (output, _, complained) = policy(&["check", "defualt"]);
    assert!(output.status.code() == Some(1) && complained.contains("did you mean `default`?"), "{complained}");
}

/// Which policy `exec` runs under, with this environment, from this directory.
fn origin_of(name: &str, from: &Path, environment: &[(&str, &Path)]) -> ExecResult {
    let mut command = stockade(["exec", "--policy", name]);
    command.current_dir(from).envs(environment.iter().copied());
    ExecResult::of(run_with_stdin(&mut command, b"{\"code\": \"\"}"))
}

test!(Both, a_name_is_never_sought_in_the_working_directory);
fn a_name_is_never_sought_in_the_working_directory() {
    let here = directory().join("here");
    for below in ["", "policies", "stockade/policies", ".config/stockade/policies"] {
        let place = here.join(below);
        fs::create_dir_all(&place).unwrap();
        fs::write(place.join("mine.toml"), derived("")).unwrap();
        fs::write(place.join("default.toml"), derived("[environment.set]\nPLANTED = \"yes\"")).unwrap();
    }
    origin_of("mine", &here, &[]).broke("policy_not_found", &["`mine`"]);
    assert_eq!(origin_of("default", &here, &[])["policy"]["origin"], "shipped");
    // A relative user's directory would be the working directory in disguise.
    origin_of("mine", &here, &[("XDG_CONFIG_HOME", Path::new("."))]).broke("policy_not_found", &["`mine`"]);
    origin_of("mine", &here, &[("XDG_CONFIG_HOME", Path::new("")), ("HOME", Path::new(""))]).broke("policy_not_found", &["`mine`"]);
}

fn users_directory(name: &str) -> (PathBuf, PathBuf) {
    let config = directory().join(name);
    let policies = config.join("stockade/policies");
    fs::create_dir_all(&policies).unwrap();
    (config, policies)
}

test!(RootlessOnly, a_name_is_sought_with_the_user_then_among_the_shipped);
fn a_name_is_sought_with_the_user_then_among_the_shipped() {
    let (config, policies) = users_directory("config");
    fs::write(policies.join("mine.toml"), derived("")).unwrap();
    let done = origin_of("mine", Path::new("/"), &[("XDG_CONFIG_HOME", &config)]);
    assert_eq!(done.succeeded()["policy"]["origin"], json!(policies.join("mine.toml")));
    let done = origin_of("strict", Path::new("/"), &[("XDG_CONFIG_HOME", &config)]);
    assert!(done["policy"]["origin"] == "shipped" || done["reason"] == "cgroup_unavailable", "{}", done.brief());
    // Without the variable: below HOME.
    let home = directory().join("other-home");
    fs::create_dir_all(home.join(".config/stockade/policies")).unwrap();
    fs::write(home.join(".config/stockade/policies/athome.toml"), derived("")).unwrap();
    origin_of("athome", Path::new("/"), &[("HOME", &home)]).succeeded();
}

test!(RootlessOnly, a_users_policy_may_extend_the_one_it_hides);
fn a_users_policy_may_extend_the_one_it_hides() {
    let (config, policies) = users_directory("config");
    fs::write(policies.join("default.toml"), derived("[environment.set]\nOWN = \"yes\"")).unwrap();
    let mut command = stockade(["exec"]);
    command.env("XDG_CONFIG_HOME", &config);
    let done = ExecResult::of(run_with_stdin(
        &mut command,
        json!({"code": "import os; print(os.environ['OWN'], os.environ['TZ'])"}).to_string().as_bytes(),
    ));
    done.succeeded().expect(json!({"output": "yes UTC\n"}));
    assert_eq!(done["policy"]["origin"], json!(policies.join("default.toml")));
}

/// What a command line says on both streams.
fn said(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

test!(RootlessOnly, a_policy_that_hides_a_shipped_one_is_named);
fn a_policy_that_hides_a_shipped_one_is_named() {
    let (config, policies) = users_directory("config");
    fs::write(policies.join("strict.toml"), derived("")).unwrap();
    fs::write(policies.join("own.toml"), derived_from("strict", "")).unwrap();
    let of = |arguments: &[&str]| said(&stockade(arguments).env("XDG_CONFIG_HOME", &config).output().unwrap());
    let hides = format!("stockade: {} hides the shipped policy `strict`\n", policies.join("strict.toml").display());
    for arguments in [
        &["policy", "check", "strict"][..],
        &["policy", "check", "own"],
        &["policy", "explain", "own", "--against", "default"],
        &["policy", "diff", "default", "strict"],
        &["doctor", "--policy", "strict"],
    ] {
        let said = of(arguments);
        assert_eq!(said.matches(&hides).count(), 1, "{arguments:?}: {said}");
        // The same where no such file is found.
        let without: Vec<&str> = arguments.iter().map(|word| if *word == "own" { "strict" } else { word }).collect();
        assert!(!self::said(&stockade(without).output().unwrap()).contains("hides the shipped"), "{arguments:?}");
    }
    // A path hides nothing.
    let path = policies.join("strict.toml");
    assert!(!of(&["policy", "check", text(&path)]).contains("hides the shipped"));
    let list = of(&["policy", "list"]);
    assert!(list.contains(&format!("[{}, hides the shipped policy]", path.display())), "{list}");
    assert!(list.contains(&format!("[{}]", policies.join("own.toml").display())), "{list}");
    own_log();
    let mut command = stockade(["exec", "--policy", "strict"]);
    ExecResult::of(run_with_stdin(command.env("XDG_CONFIG_HOME", &config), b"{\"code\": \"\"}")).succeeded();
    let (_, tail) = audit(&["tail"]);
    assert!(tail.contains(&format!("  strict ({})  ", path.display())), "{tail}");
}

test!(RootOnly, a_policy_of_the_system_that_hides_a_shipped_one_is_named);
fn a_policy_of_the_system_that_hides_a_shipped_one_is_named() {
    let files = [("stockade/policies/default.toml", derived("")), ("stockade/policies/own.toml", derived(""))];
    let files: Vec<(&str, &str)> = files.iter().map(|(name, text)| (*name, text.as_str())).collect();
    for name in ["default", "own"] {
        let said = said(&with_etc(&files, &[], &["policy", "check", name], ""));
        assert!(said.contains("/etc/stockade/policies/default.toml hides the shipped policy `default`"), "{name}: {said}");
        assert!(!self::said(&with_etc(&files[1..], &[], &["policy", "check", name], "")).contains("hides the shipped"), "{name}");
    }
}

test!(RootOnly, root_reads_no_environment_variable_for_policies);
fn root_reads_no_environment_variable_for_policies() {
    let (config, policies) = users_directory("config");
    for name in ["mine", "default"] {
        fs::write(policies.join(format!("{name}.toml")), derived("[environment.set]\nOWN = \"yes\"")).unwrap();
    }
    let home = config.join("home");
    fs::create_dir_all(home.join(".config")).unwrap();
    symlink(config.join("stockade"), home.join(".config/stockade")).unwrap();
    for variables in [
        [("XDG_CONFIG_HOME", config.as_path()), ("HOME", config.as_path())],
        [("HOME", home.as_path()), ("XDG_CONFIG_DIRS", config.as_path())],
    ] {
        origin_of("mine", Path::new("/"), &variables).broke("policy_not_found", &["`mine`"]);
        assert_eq!(origin_of("default", Path::new("/"), &variables)["policy"]["origin"], "shipped");
    }
}

test!(RootOnly, a_name_is_sought_in_etc_before_the_shipped);
fn a_name_is_sought_in_etc_before_the_shipped() {
    let files =
        [("stockade/policies/mine.toml", derived("")), ("stockade/policies/default.toml", derived("[environment.set]\nOWN = \"yes\""))];
    let files: Vec<(&str, &str)> = files.iter().map(|(name, contents)| (*name, contents.as_str())).collect();
    let ask = |options: &[&str], code: &str| {
        ExecResult::of(with_etc(&files, &[], &[&["exec"], options].concat(), &json!({"code": code}).to_string()))
    };
    let done = ask(&["--policy", "mine"], "");
    assert_eq!(done.succeeded()["policy"]["origin"], "/etc/stockade/policies/mine.toml");
    let done = ask(&[], "import os; print(os.environ['OWN'])");
    done.succeeded().expect(json!({"output": "yes\n"}));
    assert_eq!(done["policy"]["origin"], "/etc/stockade/policies/default.toml");
    assert_eq!(ask(&["--policy", "shell"], "").result["policy"]["origin"], "shipped");
}

test!(RootOnly, root_believes_no_policy_that_others_could_have_written);
fn root_believes_no_policy_that_others_could_have_written() {
    let ask = |path: &str| exec_with(&["--policy", path], json!({"code": ""}));
    // Below /tmp, where anybody may write.
    let in_tmp = directory().join("policy.toml");
    fs::write(&in_tmp, derived("")).unwrap();
    ask(text(&in_tmp)).broke("policy_unreadable", &["not trusted", "/tmp may be written by others"]);
    // The control: the same text where only root could have written it.
    let policies = PolicyDirectory::new();
    let path = policies.write("good", &derived(""));
    ask(&path).succeeded();
    // Its own mode, its owner, a directory's mode and owner, a link.
    fs::set_permissions(&path, Permissions::from_mode(0o664)).unwrap();
    let message =
        format!("not trusted while running as root: {path} may be written by others than its owner (mode 0664); chmod go-w {path}, or put");
    let done = ask(&path);
    done.broke("policy_unreadable", &[&message, "put the file into /etc/stockade"]);
    assert!(done["error"].as_str().unwrap().starts_with("not trusted"), "{}", done["error"]);
    fs::set_permissions(&path, Permissions::from_mode(0o644)).unwrap();
    chown(&path, Some(OWNER), None).unwrap();
    ask(&path).broke("policy_unreadable", &[&format!("belongs to uid {OWNER}"), "chown root"]);
    chown(&path, Some(0), None).unwrap();
    fs::set_permissions(&policies.0, Permissions::from_mode(0o777)).unwrap();
    ask(&path).broke("policy_unreadable", &[text(&policies.0), "may be written by others"]);
    fs::set_permissions(&policies.0, Permissions::from_mode(0o755)).unwrap();
    chown(&policies.0, Some(OWNER), None).unwrap();
    ask(&path).broke("policy_unreadable", &[&format!("belongs to uid {OWNER}")]);
    chown(&policies.0, Some(0), None).unwrap();
    let link = policies.0.join("link.toml");
    symlink(&path, &link).unwrap();
    ask(text(&link)).broke("policy_unreadable", &["is a symlink"]);
    ask(&path).succeeded();
    ask("./good.toml").expect(json!({"verdict": "sandbox_error"}));
    // What is found so is also what it extends: a name, sought where only root writes.
    let child = policies.write("child", &derived_from("nowhere", ""));
    ask(&child).broke("policy_invalid", &["nowhere"]);
}

/// A policy of these lines, which must be refused with all of this said.
#[track_caller]
fn wrong(lines: &str, said: &[&str]) -> String {
    let policies = PolicyDirectory::new();
    let path = policies.write("wrong", &derived(lines));
    let (output, _, complained) = policy(&["check", &path]);
    assert_eq!(output.status.code(), Some(1), "{complained}");
    for part in said {
        assert!(complained.contains(part), "`{part}` is not in:\n{complained}");
    }
    assert!(complained.contains('^'), "no caret:\n{complained}");
    complained
}

test!(Both, inheritance_adds_removes_and_replaces);
fn inheritance_adds_removes_and_replaces() {
    let policies = PolicyDirectory::new();
    let show = |lines: &str| -> Value {
        let path = policies.write("child", &derived(lines));
        let (output, said, complained) = policy(&["show", &path, "--json"]);
        assert!(output.status.success(), "{complained}");
        serde_json::from_str(&said).unwrap()
    };
    let families = |shown: &Value| shown["seccomp"]["socket_families"].clone();
    assert_eq!(families(&show("")), json!(["unix", "inet", "inet6", "netlink"]));
    assert_eq!(families(&show("[seccomp]\nsocket_families = { remove = [\"inet\", \"netlink\"] }")), json!(["unix", "inet6"]));
    assert_eq!(families(&show("[seccomp]\nsocket_families = { replace = [\"unix\"] }")), json!(["unix"]));
    let accept = show("[environment]\naccept = { add = [\"OWN_*\"], remove = [\"DEBUG\"] }")["environment"]["accept"].clone();
    let accept: Vec<&str> = accept.as_array().unwrap().iter().filter_map(Value::as_str).collect();
    assert!(accept.contains(&"OWN_*") && accept.contains(&"LANG") && !accept.contains(&"DEBUG"), "{accept:?}");
    // A second generation, and that the run follows.
    let path = policies
        .write("grandchild", &derived_from("strict", "[degrade]\nrootless = { replace = [\"cgroup\"] }\n[limits]\nwall = \"700ms\""));
    let done = exec_with(&["--policy", &path], json!({"code": "while True: pass"}));
    done.expect(json!({"verdict": "wall_timeout"}));
    assert_eq!((&done["limits"]["wall_ms"], &done["limits"]["memory_bytes"]), (&json!(700), &json!(256 << 20)));
}

test!(Both, a_plain_list_under_extends_is_refused);
fn a_plain_list_under_extends_is_refused() {
    wrong("[environment]\naccept = [\"LANG\"]", &["accept", "wrong.toml:5:10", "replace"]);
}

test!(Both, a_circle_of_policies_is_refused);
fn a_circle_of_policies_is_refused() {
    let (config, policies) = users_directory("circle");
    fs::write(policies.join("one.toml"), derived_from("two", "")).unwrap();
    fs::write(policies.join("two.toml"), derived_from("one", "")).unwrap();
    if crate::support::runner::is_root() {
        let files = [("stockade/policies/one.toml", derived_from("two", "")), ("stockade/policies/two.toml", derived_from("one", ""))];
        let files: Vec<(&str, &str)> = files.iter().map(|(name, contents)| (*name, contents.as_str())).collect();
        ExecResult::of(with_etc(&files, &[], &["exec", "--policy", "one"], "{\"code\": \"\"}"))
            .broke("policy_invalid", &["circle", "one -> two -> one"]);
    } else {
        origin_of("one", Path::new("/"), &[("XDG_CONFIG_HOME", &config)]).broke("policy_invalid", &["circle", "one -> two -> one"]);
    }
}

test!(Both, errors_have_line_column_caret_and_a_suggestion);
fn errors_have_line_column_caret_and_a_suggestion() {
    wrong("[limits]\nmemroy = \"1GiB\"", &["memroy", "wrong.toml:5:1", "did you mean `memory`?"]);
    wrong("[limts]\nwall = \"1s\"", &["limts", "wrong.toml:4:2", "did you mean `limits`?"]);
    wrong("[limits]\nwall = \"1 fortnight\"", &["wall", "wrong.toml:5:8", "30s"]);
    wrong("[limits]\nwall = 30", &["wall", "wrong.toml:5:8"]);
    wrong("[limits]\nmemory = \"1GB\"", &["memory", "wrong.toml:5:10", "MiB"]);
    wrong("[limits]\nwall = \"1h\"", &["wall", "wrong.toml:5:8", "10min"]);
    wrong("[seccomp]\nallow = { add = [\"ptarce\"] }", &["ptarce", "wrong.toml:5:18", "did you mean `ptrace`?"]);
    wrong("[seccomp]\nallow = { add = [\"mount\"] }", &["mount", "wrong.toml:5:18"]);
    wrong("[seccomp]\nsocket_families = { add = [\"vsock\"] }", &["vsock", "wrong.toml:5:28"]);
    wrong("[seccomp]\nioctl = { add = [\"TIOCSTI\"] }", &["TIOCSTI", "wrong.toml:5:18"]);
    wrong("[seccomp]\nallow = { remove = [\"ptrace\"] }", &["ptrace", "wrong.toml:5:21"]);
    wrong("[scratch]\naccess = \"rx\"", &["rx", "wrong.toml:5:10"]);
    wrong("[identity]\nuid = 0", &["uid", "wrong.toml:5:7"]);
    wrong("[filesystem]\nread_only = { add = [\"etc\"] }", &["etc", "wrong.toml:5:22", "absolute"]);
    wrong("[degrade]\nroot = { add = [\"seccomp\"] }", &["seccomp", "wrong.toml:5:17"]);
    let small = "tmp_size = \"1MiB\"\nscratch_size = \"1MiB\"";
    wrong(&format!("[limits]\nmemory = \"4095KiB\"\n{small}"), &["memory", "wrong.toml:5:10", "at least 4MiB"]);
    wrong("[degrade]\nrootless = { add = [\"user_namespace\"] }", &["user_namespace", "wrong.toml:5:21", "`root` only"]);
    wrong("[limits]\nwall = \"1s", &["wrong.toml:5:"]);
}

test!(Both, every_error_of_a_policy_is_shown_at_once);
fn every_error_of_a_policy_is_shown_at_once() {
    let said = wrong("[limits]\nmemroy = \"1GiB\"\nwall = 3\n[scratch]\nacess = \"ro\"", &["memroy", "wall", "acess"]);
    assert!(said.matches('^').count() >= 3, "{said}");
    // Control characters of the file do not reach the terminal.
    let said = wrong("[limits]\n\"\\u001b[31mred\" = 1", &[]);
    assert!(!said.contains('\u{1b}'), "{said:?}");
}

test!(Both, exec_words_a_policys_errors_as_check_does);
fn exec_words_a_policys_errors_as_check_does() {
    let policies = PolicyDirectory::new();
    let path = policies.write("wrong", &derived("[limits]\nmemroy = \"1GiB\""));
    let done = exec_with(&["--policy", &path], json!({"code": ""}));
    done.broke("policy_invalid", &["memroy", "wrong.toml:5:1", "did you mean `memory`?"]);
    let output = stockade(["run", "--policy", &path, "--", "true"]).output().unwrap();
    assert_eq!(output.status.code(), Some(125));
    assert!(String::from_utf8_lossy(&output.stderr).contains("did you mean `memory`?"));
}

test!(Both, a_policy_that_is_no_text_is_refused);
fn a_policy_that_is_no_text_is_refused() {
    let policies = PolicyDirectory::new();
    let ask = |path: &Path| exec_with(&["--policy", text(path)], json!({"code": ""}));
    let file = policies.0.join("bytes.toml");
    fs::write(&file, b"schema = 1\n\xff").unwrap();
    ask(&file).broke("policy_unreadable", &["UTF-8"]);
    fs::write(&file, vec![b'#'; 2 << 20]).unwrap();
    ask(&file).broke("policy_unreadable", &["1 MiB"]);
    fs::write(&file, "").unwrap();
    ask(&file).broke("policy_invalid", &["schema"]);
    fs::write(&file, "schema = 2\n").unwrap();
    ask(&file).broke("policy_invalid", &["schema"]);
    ask(&policies.0).broke("policy_unreadable", &["regular file"]);
    let fifo = policies.0.join("fifo");
    assert!(std::process::Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    ask(&fifo).broke("policy_unreadable", &["regular file"]);
}

test!(Both, a_request_cannot_name_a_policy);
fn a_request_cannot_name_a_policy() {
    exec(json!({"code": "", "policy": "shell"})).refused("request_malformed", &["policy"]);
}

test!(Both, a_blueprint_request_gives_output_error_and_code);
fn a_blueprint_request_gives_output_error_and_code() {
    let home = directory().join("agents");
    fs::create_dir(&home).unwrap();
    chown_to_owner(&home);
    let scratch = home.join("agent_scratch");
    let code = "import sys, os\nprint('hello from', os.getcwd())\nprint('careful', file=sys.stderr)\nopen('result.txt','w').write('kept')\nsys.exit(4)";
    let done = exec_with(&["--policy", "blueprint"], json!({"code": code, "scratch": text(&scratch)}));
    done.expect(json!({"output": format!("hello from {}\n", text(&scratch)), "error": "careful\n", "code": 4, "verdict": "exited"}));
    assert_eq!(fs::read_to_string(scratch.join("result.txt")).unwrap(), "kept");
    // Who makes it has it.
    assert_eq!(fs::metadata(&scratch).unwrap().uid(), nix::unistd::geteuid().as_raw());
    // Once more, now that it is there.
    exec_with(&["--policy", "blueprint"], json!({"code": "print(open('result.txt').read())", "scratch": text(&scratch)}))
        .succeeded()
        .expect(json!({"output": "kept\n"}));
}

test!(Both, blueprint_has_the_limits_of_its_model);
fn blueprint_has_the_limits_of_its_model() {
    let ask = |code: &str| exec_with(&["--policy", "blueprint"], json!({"code": code}));
    let done = ask("import resource; print(resource.getrlimit(resource.RLIMIT_AS)[0])");
    done.succeeded().expect(json!({"output": "104857600\n"}));
    assert_eq!((&done["limits"]["wall_ms"], &done["limits"]["cpu_ms"]), (&json!(4000), &json!(5000)));
    let done = ask("x = bytearray(200 << 20)");
    done.expect(json!({"verdict": "exited", "code": 1}));
    assert!(done.error().contains("MemoryError"));
    ask("while True: pass").expect(json!({"verdict": "wall_timeout", "code": 124}));
}

test!(Both, an_interpreter_can_be_named_on_the_command_line, needs[DataScience]);
fn an_interpreter_can_be_named_on_the_command_line() {
    let python = "python=/opt/stockade/data-science/bin/python3";
    let code = "import sys\nprint(sys.prefix)\nimport numpy; print(numpy.arange(4).sum())";
    let done = exec_with(&["--runtime", python], json!({"code": code}));
    done.succeeded().expect(json!({"output": "/opt/stockade/data-science\n6\n"}));
    // The control: the distribution's own has no such package.
    let done = exec(json!({"code": "import sys\nprint(sys.prefix)"}));
    done.succeeded().expect(json!({"output": "/usr\n"}));
}

/// `exec` by root behind sudo, for a caller with these grants.
fn behind_sudo(grants: Option<&str>, options: &[&str], request: &Value) -> ExecResult {
    let files: Vec<(&str, &str)> = grants.map(|grants| ("stockade/grants.toml", grants)).into_iter().collect();
    let id = OWNER.to_string();
    let variables = [("SUDO_UID", id.as_str()), ("SUDO_GID", id.as_str()), ("SUDO_USER", "agent")];
    ExecResult::of(with_etc(&files, &variables, &[&["exec"], options].concat(), &request.to_string()))
}

test!(RootOnly, sudo_without_grants_runs_nothing);
fn sudo_without_grants_runs_nothing() {
    behind_sudo(None, &[], &json!({"code": "print(1)"})).broke("not_granted", &["/etc/stockade/grants.toml", &format!("uid {OWNER}")]);
    let other = "[[grant]]\nuid = 4242\npolicies = [\"default\"]\n";
    behind_sudo(Some(other), &[], &json!({"code": "print(1)"})).broke("not_granted", &[&format!("uid {OWNER}"), "[[grant]]"]);
    // The control: root for itself needs none.
    exec(json!({"code": "print(1)"})).succeeded();
}

test!(RootOnly, sudo_runs_what_is_granted_as_its_caller);
fn sudo_runs_what_is_granted_as_its_caller() {
    let home = directory().join("agents");
    fs::create_dir(&home).unwrap();
    chown_to_owner(&home);
    let scratch = home.join("agent_scratch");
    let grants = format!("[[grant]]\nuid = {OWNER}\npolicies = [\"blueprint\"]\nscratch = [{:?}]\n", text(&home));
    let code = "import sys\nprint('out'); print('err', file=sys.stderr); open('result','w').write('x'); sys.exit(3)";
    let done = behind_sudo(Some(&grants), &["--policy", "blueprint"], &json!({"code": code, "scratch": text(&scratch)}));
    done.expect(json!({"output": "out\n", "error": "err\n", "code": 3, "verdict": "exited"}));
    for path in [scratch.clone(), scratch.join("result")] {
        assert_eq!(fs::metadata(&path).unwrap().uid(), OWNER, "{}", path.display());
    }
    assert_eq!(done["receipt"]["mode"], "root");
    // Elsewhere nothing is made, where the caller could have made it.
    let other = scratch_named("other");
    let refused = behind_sudo(Some(&grants), &["--policy", "blueprint"], &json!({"code": "", "scratch": text(&other.join("new"))}));
    refused.broke("not_granted", &[text(&other.join("new"))]);
    assert_eq!(fs::read_dir(&other).unwrap().count(), 0, "made, and refused");
}

test!(RootOnly, sudo_runs_nothing_else);
fn sudo_runs_nothing_else() {
    let granted = directory().join("granted");
    let other = directory().join("other");
    for path in [&granted, &other] {
        fs::create_dir(path).unwrap();
        chown_to_owner(path);
    }
    let grants = format!("[[grant]]\nuid = {OWNER}\npolicies = [\"default\"]\nscratch = [{:?}]\n", text(&granted));
    let ask = |options: &[&str], scratch: Option<&Path>| {
        let mut request = json!({"code": "print(1)"});
        if let Some(scratch) = scratch {
            request["scratch"] = json!(text(scratch));
        }
        behind_sudo(Some(&grants), options, &request)
    };
    ask(&[], None).succeeded();
    ask(&[], Some(&granted)).succeeded();
    ask(&[], Some(&other)).broke("not_granted", &[text(&other), "grants.toml:1"]);
    ask(&["--policy", "shell"], None).broke("not_granted", &["`shell`", "policies = [\"default\", \"shell\"]"]);
    let own = directory().join("own.toml");
    write_file(&own, derived(""));
    let done = ask(&["--policy", text(&own)], None);
    assert_eq!(done["verdict"], "sandbox_error", "{}", done.brief());
    ask(&["--runtime", "python=/usr/bin/python3"], None).broke("not_granted", &["/usr/bin/python3"]);
    // A link from the granted directory to another.
    symlink(&other, granted.join("link")).unwrap();
    ask(&[], Some(&granted.join("link"))).broke("not_granted", &[text(&other)]);
}

test!(RootOnly, grants_that_others_could_have_written_are_not_believed);
fn grants_that_others_could_have_written_are_not_believed() {
    let grants = format!("[[grant]]\nuid = {OWNER}\npolicies = [\"default\"]\n");
    let ask = |spoil: &str| {
        let id = OWNER.to_string();
        let variables = [("SUDO_UID", id.as_str()), ("SUDO_GID", id.as_str()), ("SPOIL", spoil)];
        ExecResult::of(with_etc(&[("stockade/grants.toml", &grants)], &variables, &["exec"], "{\"code\": \"\"}"))
    };
    ask("").succeeded();
    ask("stockade/grants.toml").broke("grants_unreadable", &["may be written by others"]);
    ask("stockade").broke("grants_unreadable", &["may be written by others"]);
}

test!(RootOnly, root_opens_a_scratch_only_as_its_caller);
fn root_opens_a_scratch_only_as_its_caller() {
    let place = directory().join("place");
    let (closed, below) = (place.join("closed"), place.join("closed/below"));
    fs::create_dir_all(&below).unwrap();
    chown_to_owner(&below);
    chown_to_owner(&place);
    // A directory of the caller behind one that only another may enter.
    chown(&closed, Some(OWNER + 1), Some(OWNER + 1)).unwrap();
    fs::set_permissions(&closed, Permissions::from_mode(0o700)).unwrap();
    let grants = format!("[[grant]]\nuid = {OWNER}\npolicies = [\"default\", \"blueprint\"]\nscratch = [{:?}]\n", text(&directory()));
    let ask = |policy: &str, scratch: &Path| {
        behind_sudo(Some(&grants), &["--policy", policy], &json!({"code": "print(1)", "scratch": text(scratch)}))
    };
    ask("default", &below).refused("scratch_unreadable", &[]);
    ask("default", &closed).expect(json!({"verdict": "bad_request"}));
    // It makes none where the caller may not.
    ask("blueprint", &closed.join("new")).expect(json!({"verdict": "bad_request"}));
    assert!(!closed.join("new").exists());
    // The control: in a directory that all may enter.
    fs::set_permissions(&closed, Permissions::from_mode(0o755)).unwrap();
    ask("default", &below).succeeded();
}

test!(RootOnly, a_root_shell_of_sudo_is_told_whose_rights_it_has);
fn a_root_shell_of_sudo_is_told_whose_rights_it_has() {
    own_log();
    let id = OWNER.to_string();
    let call = |variables: &[(&str, &str)], words: &[&str]| {
        let output = with_etc(&[("stockade/grants.toml", "")], variables, words, "{\"code\": \"\"}");
        String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned()
    };
    call(&[], &["run", "true"]);
    let commands: [&[&str]; 8] = [
        &["audit", "tail"],
        &["audit", "verify"],
        &["audit", "rotate"],
        &["policy", "new", "mine"],
        &["policy", "check", "default"],
        &["run", "true"],
        &["exec"],
        &["doctor"],
    ];
    let remedy = format!("you came through sudo as uid {id} (SUDO_UID); as administrator: sudo env -u SUDO_UID -u SUDO_GID stockade ...");
    for words in commands {
        let said = call(&[("SUDO_UID", &id), ("SUDO_GID", &id)], words);
        assert_eq!(said.matches(&remedy).count(), 1, "{words:?}: {said}");
        // The control: root for itself is refused none of it.
        let said = call(&[], words);
        assert!(!said.contains("SUDO_UID"), "{words:?}: {said}");
    }
}

test!(RootOnly, senseless_sudo_variables_are_refused);
fn senseless_sudo_variables_are_refused() {
    let without_gid = ExecResult::of(run_with_stdin(stockade(["exec"]).env("SUDO_UID", "1000"), b"{\"code\": \"\"}"));
    without_gid.broke("sudo_variables", &["SUDO_UID is set but SUDO_GID is not"]);
    for (uid, gid) in [("agent", "1000"), ("1000", ""), ("-1", "1000"), ("99999999999", "0")] {
        let mut command = stockade(["exec"]);
        command.env("SUDO_UID", uid).env("SUDO_GID", gid);
        ExecResult::of(run_with_stdin(&mut command, b"{\"code\": \"\"}")).broke("sudo_variables", &["SUDO_"]);
    }
    // sudo by root is root.
    let mut command = stockade(["exec"]);
    command.env("SUDO_UID", "0").env("SUDO_GID", "0");
    ExecResult::of(run_with_stdin(&mut command, b"{\"code\": \"\"}")).succeeded();
}

test!(RootOnly, a_program_with_a_set_id_bit_refuses_to_start);
fn a_program_with_a_set_id_bit_refuses_to_start() {
    let policies = PolicyDirectory::new();
    let copy = policies.0.join("stockade");
    fs::copy(program_path().unwrap(), &copy).unwrap();
    let id = OWNER.to_string();
    let ask = |mode: u32| {
        fs::set_permissions(&copy, Permissions::from_mode(mode)).unwrap();
        let mut command = run_under(&["setpriv", "--reuid", &id, "--regid", &id, "--clear-groups", "--inh-caps=-all", text(&copy), "exec"]);
        command.env("XDG_RUNTIME_DIR", "/nonexistent").env("HOME", "/nonexistent");
        ExecResult::of(run_with_stdin(&mut command, b"{\"code\": \"\"}"))
    };
    ask(0o755).succeeded();
    ask(0o4755).broke("set_id_program", &["set-ID"]);
    ask(0o2755).broke("set_id_program", &["set-ID"]);
}

test!(RootOnly, grants_are_checked_with_line_and_column);
fn grants_are_checked_with_line_and_column() {
    let check = |grants: &str| {
        let output = with_etc(&[("stockade/grants.toml", grants)], &[], &["grants", "check"], "");
        (output.status.code(), String::from_utf8([output.stdout, output.stderr].concat()).unwrap())
    };
    let good = "[[grant]]\nuid = 1000\npolicies = [\"default\", \"strict\"]\n\n[[grant]]\ngid = 7\npolicies = [\"shell\"]\n";
    let (status, said) = check(good);
    assert!(status == Some(0) && said.contains("/etc/stockade/grants.toml: ok (2 grants)"), "{status:?}: {said}");
    for (bad, words) in [
        (good.replace("gid = 7", "gdi = 7"), &["grants.toml:6:1", "gid"][..]),
        (good.replace("uid = 1000", "user = \"has-no-account\""), &["grants.toml:2:", "has-no-account"]),
        (good.replace("\"shell\"", "\"shel\""), &["grants.toml:5", "shel"]),
        (good.replace("gid = 7", "gid ="), &["grants.toml:6:"]),
        (good.replace("policies = [\"shell\"]", "policy = [\"shell\"]"), &["grants.toml:7:1", "did you mean `policies`?"]),
    ] {
        let (status, said) = check(&bad);
        assert!(status == Some(1) && words.iter().all(|word| said.contains(word)), "{bad}: {status:?}: {said}");
    }
    assert!(check("[[grant]]\nuid = 1000\npolicies = [\"strict\"]\n").1.contains("ok (1 grant)"));
    let missing = stockade(["grants", "check", "/etc/stockade/no-such-file.toml"]).output().unwrap();
    assert_eq!(missing.status.code(), Some(1));
}

test!(RootOnly, a_granted_scratch_that_nobody_can_use_is_named, seconds 90);
fn a_granted_scratch_that_nobody_can_use_is_named() {
    own_log();
    let place = directory().join("granted");
    let (good, ramfs, missing) = (place.join("good"), place.join("ramfs"), place.join("missing"));
    [&good, &ramfs].into_iter().for_each(|path| fs::create_dir_all(path).unwrap());
    nix::mount::mount(Some("none"), &ramfs, Some("ramfs"), nix::mount::MsFlags::empty(), None::<&str>).unwrap();
    chown_to_owner(&ramfs);
    let call = |scratch: &Path, policy: &str, words: &[&str]| {
        let grants = format!("[[grant]]\nuid = {OWNER}\npolicies = [{policy:?}]\nscratch = [{:?}]\n", text(scratch));
        let output = with_etc(&[("stockade/grants.toml", &grants)], &[], words, "");
        (output.status.code(), String::from_utf8([output.stdout, output.stderr].concat()).unwrap())
    };
    for (path, policy, words) in [(&ramfs, "default", "cannot be idmapped"), (&missing, "default", "does not exist")] {
        let (status, said) = call(path, policy, &["grants", "check"]);
        assert!(status == Some(1) && said.contains(&format!("grants.toml:1: scratch {}", text(path))) && said.contains(words), "{said}");
        let (_, said) = call(path, policy, &["doctor"]);
        assert!(said.contains("grants ") && said.contains(words), "{said}");
    }
    // The controls: one that is there, and one that its policy makes.
    for (path, policy) in [(&good, "default"), (&missing, "blueprint")] {
        let (status, said) = call(path, policy, &["grants", "check"]);
        assert!(status == Some(0) && said.contains("ok (1 grant)"), "{said}");
    }
    let (status, said) = call(&good, "default", &["doctor", "--scratch", text(&ramfs)]);
    let line = said.lines().find(|line| line.starts_with("scratch ")).unwrap();
    assert!(status == Some(1) && line.contains("missing") && line.contains("idmap"), "{said}");
    assert!(!missing.exists());
}

test!(RootOnly, grants_check_shows_a_caller_of_sudo_no_file_that_it_cannot_read);
fn grants_check_shows_a_caller_of_sudo_no_file_that_it_cannot_read() {
    let shadow = fs::read_to_string("/etc/shadow").unwrap();
    let first = shadow.lines().next().unwrap();
    let id = OWNER.to_string();
    let check = |variables: &[(&str, &str)]| {
        let output = with_etc(&[], variables, &["grants", "check", "/etc/shadow"], "");
        assert_ne!(output.status.code(), Some(0), "{output:?}");
        String::from_utf8([output.stdout, output.stderr].concat()).unwrap()
    };
    // The control: root itself may see it.
    assert!(check(&[]).contains(first), "{}", check(&[]));
    let said = check(&[("SUDO_UID", &id), ("SUDO_GID", &id)]);
    assert!(!said.contains(first) && said.to_lowercase().contains("permission denied"), "{said}");
}
