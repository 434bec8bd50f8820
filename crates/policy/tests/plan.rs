//! Policy, host facts and a run request, to the whole plan: compared as one value.
//!
//! The expected plans lie beside this file as JSON. After a change that is meant, write
//! them anew with `UPDATE_PLANS=1 cargo test -p stockade-policy --test plan` and read the
//! difference.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test may panic")]

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use stockade_policy::{
    facts::{Caller, CgroupFacts, Codec, HostFacts, ImageFacts, PathKind},
    filter::Filters,
    load_shipped,
    model::{Degradable, Policy},
    plan::{HostScratch, Interpreter, Plan, PlanError, Program, Protection, RootEntry, RunRequest, RunStep, UserNamespaces, plan},
    whitelist::Whitelist,
};
use stockade_protocol::{LimitKey, screen::Action};

fn facts(privileged: bool) -> HostFacts {
    let paths = ["/usr", "/etc/alternatives", "/etc/ssl/certs"].map(|path| (PathBuf::from(path), PathKind::Directory));
    let files = ["/etc/ld.so.cache", "/usr/bin/python3", "/usr/bin/bash", "/usr/bin/sh", "/usr/bin/node"]
        .map(|path| (PathBuf::from(path), PathKind::File));
    let v1 = ["cpu", "cpuacct", "memory", "pids"].map(|kind| (kind.to_owned(), PathBuf::from("/sys/fs/cgroup").join(kind).join("outer")));
    HostFacts {
        kernel: String::from("6.1.0"),
        landlock_abi: 7,
        privileged,
        caller: Caller { uid: 1234, gid: 1234, groups: vec![1234, 27] },
        unique_id: privileged.then_some(0x7000_0007),
        cpus: 4,
        cgroup: if privileged {
            CgroupFacts::V1 { controllers: v1.into_iter().collect() }
        } else {
            CgroupFacts::Unavailable { reason: String::from("not delegated") }
        },
        paths: paths.into_iter().chain(files).collect(),
        links: vec![(String::from("bin"), String::from("usr/bin")), (String::from("lib64"), String::from("usr/lib64"))],
        hard_limits: BTreeMap::from([(7, 512)]),
        ..HostFacts::default()
    }
}

fn code() -> RunRequest {
    RunRequest { program: Program::Code { language: None, filename: None, stem: String::from("stockade_0") }, ..RunRequest::default() }
}

fn in_scratch(path: &str) -> RunRequest {
    let protected = vec![(PathBuf::from(".env"), PathKind::File, Protection::Hidden)];
    RunRequest { scratch: Some(HostScratch { path: PathBuf::from(path), owner: (1234, 1234), idmap_refusal: None, protected }), ..code() }
}

fn planned(policy: &Policy, facts: &HostFacts, run_request: &RunRequest) -> Result<Plan, PlanError> {
    plan(policy, &Filters::new(&policy.seccomp).unwrap(), facts, run_request)
}

#[track_caller]
fn compare(name: &str, plan: &Plan) {
    let mut found = serde_json::to_value(plan).unwrap();
    // These change with every word of the policy and have tests of their own.
    found["policy_sha256"] = serde_json::Value::Null;
    found["filter"] = serde_json::Value::Null;
    let file = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests").join(format!("{name}.json"));
    if std::env::var_os("UPDATE_PLANS").is_some() {
        std::fs::write(&file, serde_json::to_string_pretty(&found).unwrap() + "\n").unwrap();
    }
    let expected: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(&file).unwrap()).unwrap();
    assert_eq!(found, expected, "the plan differs from {}", file.display());
}

#[test]
fn what_links_lead_to_is_bound_at_the_path_that_was_named() {
    let led = BTreeMap::from([(PathBuf::from("/etc/ssl/certs"), PathBuf::from("/etc/pki/certs"))]);
    let plan = planned(&load_shipped("default").unwrap(), &HostFacts { led, ..facts(true) }, &code()).unwrap();
    let (source, target) = (PathBuf::from("/etc/pki/certs"), PathBuf::from("etc/ssl/certs"));
    assert!(plan.root.contains(&RootEntry::Bind { source, target, executable: false }), "{:?}", plan.root);
}

#[test]
fn a_root_run_in_a_host_scratch_is_planned_whole() {
    compare("plan-root-scratch", &planned(&load_shipped("default").unwrap(), &facts(true), &in_scratch("/srv/work")).unwrap());
}

#[test]
fn a_rootless_private_run_is_planned_whole() {
    compare("plan-rootless-private", &planned(&load_shipped("default").unwrap(), &facts(false), &code()).unwrap());
}

#[test]
fn a_run_that_may_reach_peers_is_planned_whole() {
    compare("plan-pypi", &planned(&load_shipped("pypi").unwrap(), &facts(true), &in_scratch("/srv/work")).unwrap());
}

/// An image with a shell, whose configuration asks for much.
fn image() -> ImageFacts {
    ImageFacts {
        name: Some(String::from("busybox:latest")),
        digest: format!("sha256:{}", "0a".repeat(32)),
        layers: vec![PathBuf::from("/images/layers/1/root"), PathBuf::from("/images/layers/2/root")],
        environment: BTreeMap::from(
            [("PATH", "/bin"), ("HOME", "/root"), ("TMPDIR", "/var/tmp"), ("FOO", "1")].map(|(n, v)| (n.into(), v.into())),
        ),
        malformed_variables: 1,
        working_directory: Some((PathBuf::from("/srv/app/"), None)),
        command: vec![String::from("sh"), String::from("-c"), String::from("true")],
        user: String::from("postgres"),
        programs: BTreeMap::from([(PathBuf::from("/usr/bin/sh"), PathBuf::from("/bin/sh"))]),
    }
}

fn from_image(privileged: bool) -> HostFacts {
    HostFacts { image: Some(image()), ..facts(privileged) }
}

fn variable<'p>(plan: &'p Plan, name: &str) -> Option<&'p str> {
    plan.environment_values.iter().find_map(|variable| variable.strip_prefix(name)?.strip_prefix('='))
}

#[test]
fn an_images_own_command_is_planned_whole() {
    compare("plan-image", &planned(&load_shipped("default").unwrap(), &from_image(false), &RunRequest::default()).unwrap());
}

#[test]
fn a_run_from_an_image_is_shown_nothing_of_the_hosts_system() {
    let mut policy = load_shipped("default").unwrap();
    policy.filesystem.read_only.push(PathBuf::from("/srv/data"));
    let paths = facts(true).paths.into_iter().chain([(PathBuf::from("/srv/data"), PathKind::Directory)]).collect();
    let bound = |facts: &HostFacts| -> Vec<PathBuf> {
        let plan =
            planned(&policy, facts, &RunRequest { program: Program::Command(vec![String::from("sh")]), ..RunRequest::default() }).unwrap();
        let source = |entry: &RootEntry| if let RootEntry::Bind { source, .. } = entry { Some(source.clone()) } else { None };
        plan.root.iter().filter_map(source).collect()
    };
    let of_host = HostFacts { paths, ..facts(true) };
    assert!(bound(&of_host).contains(&PathBuf::from("/usr")), "the control");
    assert_eq!(bound(&HostFacts { image: Some(image()), ..of_host }), [PathBuf::from("/srv/data")]);
}

#[test]
fn what_an_image_sets_is_used_where_neither_request_nor_sandbox_says_otherwise() {
    let policy = load_shipped("default").unwrap();
    let shell = RunRequest {
        program: Program::Code { language: Some(String::from("sh")), filename: None, stem: String::from("stockade_0") },
        ..RunRequest::default()
    };
    let plan = planned(&policy, &from_image(true), &shell).unwrap();
    assert_eq!(plan.argv, ["/bin/sh", "/scratch/main.sh"]);
    assert_eq!(plan.start_directories().next().unwrap(), Path::new("/scratch"), "code starts beside its files");
    let of = |name| variable(&plan, name);
    assert_eq!((of("FOO"), of("HOME"), of("TMPDIR"), of("PATH")), (Some("1"), Some("/home/sandbox"), Some("/tmp"), Some("/bin")));
    let own = planned(&policy, &from_image(true), &RunRequest::default()).unwrap();
    assert_eq!((own.argv.join(" ").as_str(), own.start_directories().next().unwrap()), ("sh -c true", Path::new("/srv/app")));
    let asked = RunRequest { program: Program::Command(vec![String::from("ls")]), ..in_scratch("/srv/work") };
    let plan = planned(&policy, &from_image(true), &asked).unwrap();
    assert_eq!((plan.argv.join(" ").as_str(), plan.start_directories().next().unwrap()), ("ls", Path::new("/srv/work")));
}

#[test]
fn a_session_opens_in_an_image_whose_own_command_or_directory_cannot_be_used() {
    let policy = load_shipped("default").unwrap();
    let mut image = image();
    image.command.clear();
    image.working_directory = Some((PathBuf::from("srv/app"), None));
    let facts = HostFacts { image: Some(image), ..facts(true) };
    planned(&policy, &facts, &RunRequest { session: true, ..RunRequest::default() }).unwrap();
    // The control: a run by itself needs both.
    refused(planned(&policy, &facts, &RunRequest::default()), "image_without_command", true);
}

#[test]
fn an_image_that_cannot_be_run_as_asked_is_refused() {
    let policy = load_shipped("default").unwrap();
    let refuse = |change: &dyn Fn(&mut ImageFacts), request: &RunRequest, reason| {
        let mut image = image();
        change(&mut image);
        refused(planned(&policy, &HostFacts { image: Some(image), ..facts(true) }, request), reason, true);
    };
    let own = RunRequest::default();
    planned(&policy, &from_image(true), &own).expect("the control");
    refuse(&|image| image.command.clear(), &own, "image_without_command");
    for path in ["srv/app", "../app", "/srv/../../app", "."] {
        refuse(&|image| image.working_directory = Some((PathBuf::from(path), Some(PathKind::Directory))), &own, "image_working_directory");
    }
    refuse(&|image| image.working_directory = Some((PathBuf::from("/etc/own"), Some(PathKind::File))), &own, "image_working_directory");
    refused(planned(&policy, &from_image(true), &code()), "interpreter_missing", false);
    let mut writable = policy.clone();
    writable.filesystem.writable_root = true;
    for privileged in [true, false] {
        let plan = planned(&writable, &from_image(privileged), &own).unwrap();
        assert!(plan.has_writable_root() && plan.writable_mounts().contains(&PathBuf::from("/")));
    }
    assert!(!planned(&writable, &facts(false), &code()).unwrap().has_writable_root(), "the host's directories are never writable");
}

#[test]
fn a_whitelist_changes_the_plan_and_its_hash_and_an_empty_one_does_not() {
    let mut policy = load_shipped("default").unwrap();
    let before = planned(&policy, &facts(true), &code()).unwrap();
    assert!(before.egress.is_none());
    let text = |plan: &Plan| serde_json::to_string(plan).unwrap();
    assert!(!text(&before).contains("egress") && !text(&before).contains("resolv.conf"));
    policy.egress.whitelist = Whitelist::new(vec!["10.0.5.0/24:443".parse().unwrap()]);
    let after = planned(&policy, &facts(true), &code()).unwrap();
    assert!(text(&after).contains("\"egress\":{\"whitelist\":[\"10.0.5.0/24:443\"],\"resolver\":\"198.19.255.253\"}"));
    assert!(text(&after).contains("nameserver 198.19.255.253") && text(&after).contains("hosts: files dns"));
}

#[test]
fn an_interpreter_is_planned_with_its_arguments_alone() {
    let policy = load_shipped("default").unwrap();
    let run_request = RunRequest {
        program: Program::Interpreter { runtime: String::from("PY") },
        arguments: vec![String::from("-c"), String::from("1")],
        scratch_alias: Some(PathBuf::from("/home/alice/work")),
        ..in_scratch("/srv/work")
    };
    let plan = planned(&policy, &facts(true), &run_request).unwrap();
    assert_eq!((plan.argv.join(" ").as_str(), &plan.program_file), ("/usr/bin/python3 -c 1", &None));
    let link = RootEntry::Link { target: PathBuf::from("home/alice/work"), to: PathBuf::from("/srv/work") };
    assert_eq!(plan.root.iter().last(), Some(&link));
    let unknown = RunRequest { program: Program::Interpreter { runtime: String::from("cobol") }, ..code() };
    refused(planned(&policy, &facts(true), &unknown), "unknown_language", true);
}

#[test]
fn a_runtime_whose_command_has_options_is_no_name_on_path() {
    let mut policy = load_shipped("default").unwrap();
    let links = |policy: &Policy| -> Vec<PathBuf> {
        let names = |entry: &RootEntry| match entry {
            RootEntry::Link { target, .. } if target.starts_with("run/stockade/bin") => Some(target.clone()),
            _ => None,
        };
        planned(policy, &facts(true), &code()).unwrap().root.iter().filter_map(names).collect()
    };
    let python = PathBuf::from("run/stockade/bin/python");
    assert!(links(&policy).contains(&python), "the control");
    for command in [&["/usr/bin/python3", "-I", "{file}"][..], &["/usr/bin/python3", "--file={file}"]] {
        policy.runtimes.get_mut("python").unwrap().command = command.iter().map(|word| (*word).to_owned()).collect();
        assert!(!links(&policy).contains(&python), "{command:?}");
        assert!(links(&policy).contains(&PathBuf::from("run/stockade/bin/nodejs")), "others stay");
    }
}

#[test]
fn no_link_stands_where_something_of_the_sandbox_is() {
    let policy = load_shipped("default").unwrap();
    let without = planned(&policy, &facts(true), &in_scratch("/srv/work")).unwrap().root;
    for alias in [
        "/",
        "/usr",
        "/usr/bin/x",
        "/etc/passwd",
        "/bin",
        "/lib64/x",
        "/run/x",
        "/tmp",
        "/home/sandbox",
        "/srv",
        "/srv/work/x",
        "/a/../b",
        "a",
    ] {
        let run_request = RunRequest { scratch_alias: Some(PathBuf::from(alias)), ..in_scratch("/srv/work") };
        assert_eq!(planned(&policy, &facts(true), &run_request).unwrap().root, without, "{alias}");
    }
}

#[test]
fn watched_modules_cover_a_codec_of_each_interpreter_that_is_shown() {
    let mut policy = load_shipped("default").unwrap();
    let without = planned(&policy, &facts(true), &code()).unwrap();
    let codec = |path: &str| Codec { path: PathBuf::from(path), text: String::from("codec = 1\n") };
    let codecs = vec![codec("/usr/lib/python3.11/encodings/utf_8.py"), codec("/opt/python/lib/python3.12/encodings/utf_8.py")];
    let host = HostFacts { codecs: BTreeMap::from([(String::from("python"), codecs)]), ..facts(true) };
    assert_eq!(planned(&policy, &host, &code()), Ok(without.clone()));
    policy.runtimes.get_mut("python").unwrap().modules.rules.insert(String::from("os.system"), Action::Deny);
    let plan = planned(&policy, &host, &code()).unwrap();
    let new: Vec<&RootEntry> = plan.root.iter().filter(|entry| without.root.iter().all(|other| other != *entry)).collect();
    let path = |path: &str| PathBuf::from(path);
    let (RootEntry::Cover { target, text }, [pipe]) = (new[0], &new[1..]) else { panic!("{new:?}") };
    assert_eq!(*target, path("usr/lib/python3.11/encodings/utf_8.py"));
    assert!(
        text.starts_with("codec = 1\n")
            && text.contains("_watch({'os.system': 'deny'}, 'allow', ('/dev/', '/tmp/', '/home/sandbox/', '/scratch/',)")
    );
    assert_eq!(**pipe, RootEntry::Pipe { target: path("run/stockade/modules") });
    assert!(plan.required_mounts().contains(&path("/usr/lib/python3.11/encodings/utf_8.py")));
    let rule = plan.landlock.rules.iter().find(|rule| rule.path == path("/run/stockade/modules")).unwrap();
    assert_eq!(rule.rights, stockade_protocol::landlock::access::WRITE_FILE);
    // Where something is refused and nothing can be watched, Python does not start; Bash does.
    refused(planned(&policy, &facts(true), &code()), "modules_not_watchable", false);
    let bash = RunRequest {
        program: Program::Code { language: Some(String::from("bash")), filename: None, stem: String::from("x") },
        ..RunRequest::default()
    };
    assert!(planned(&policy, &facts(true), &bash).is_ok());
    policy.runtimes.get_mut("python").unwrap().modules.rules.insert(String::from("os.system"), Action::Note);
    assert!(planned(&policy, &facts(true), &code()).is_ok());
}

#[test]
fn a_compiler_and_its_program_are_planned_apart_and_share_what_they_write() {
    let mut policy = load_shipped("default").unwrap();
    let words = |words: &[&str]| words.iter().map(|word| String::from(*word)).collect::<Vec<_>>();
    let bash = policy.runtimes.get_mut("bash").unwrap();
    bash.compile = words(&["/usr/bin/bash", "{file}", "-o={output}"]);
    bash.command = words(&["{output}"]);
    bash.template = None;
    policy.environment.accept.push(String::from("EXTRA"));
    let request = |step| RunRequest {
        program: Program::Code { language: Some(String::from("bash")), filename: None, stem: String::from("stockade_0") },
        arguments: words(&["a"]),
        environment: BTreeMap::from([(String::from("EXTRA"), String::from("e"))]),
        step,
        ..RunRequest::default()
    };
    let facts = facts(true);
    let [compiler, program] = [RunStep::Compile, RunStep::Program].map(|step| planned(&policy, &facts, &request(Some(step))).unwrap());
    assert_eq!(compiler.argv, ["/usr/bin/bash", "/scratch/main.sh", "-o=/tmp/compiled"]);
    assert_eq!(compiler.program_file, Some((PathBuf::from("/scratch"), String::from("main.sh"))));
    assert_eq!((program.argv.clone(), &program.program_file), (words(&["/tmp/compiled", "a"]), &None));
    let has = |plan: &Plan| plan.environment.contains(&String::from("EXTRA"));
    assert_eq!((has(&compiler), has(&program)), (false, true));
    assert!(compiler.session && program.session && compiler.is_set_up_like(&program));
    // The name of the code's file is the request's: what stands in it is no place of the policy's.
    let mut named = request(Some(RunStep::Compile));
    named.program =
        Program::Code { language: Some(String::from("bash")), filename: Some(String::from("x{output}{file}")), stem: String::new() };
    assert_eq!(planned(&policy, &facts, &named).unwrap().argv[1..], ["/scratch/x{output}{file}", "-o=/tmp/compiled"]);
    // In a session the names are those that nothing in it has; a scratch below /tmp is no place either.
    let session = RunRequest { session: true, ..request(Some(RunStep::Compile)) };
    assert_eq!(planned(&policy, &facts, &session).unwrap().argv[1..], ["/scratch/stockade_0.sh", "-o=/tmp/stockade_0"]);
    let below = RunRequest { scratch: in_scratch("/tmp/x").scratch, ..request(Some(RunStep::Program)) };
    assert_eq!(planned(&policy, &facts, &below).unwrap().argv[0], "/home/sandbox/compiled");
    // Where the interpreter runs what was made, the compiler must be there as well.
    let bash = policy.runtimes.get_mut("bash").unwrap();
    bash.command = words(&["/usr/bin/bash", "{output}"]);
    bash.compile[0] = String::from("/usr/bin/nowhere");
    assert_eq!(planned(&policy, &facts, &request(Some(RunStep::Program))).unwrap().argv[..2], ["/usr/bin/bash", "/tmp/compiled"]);
    refused(planned(&policy, &facts, &request(Some(RunStep::Compile))), "interpreter_missing", false);
    let alone = RunRequest { program: Program::Interpreter { runtime: String::from("bash") }, ..RunRequest::default() };
    refused(planned(&policy, &facts, &alone), "runtime_compiles", true);
}

#[test]
fn what_a_shipped_policy_lacks_is_refused_with_the_command_that_makes_it() {
    for name in ["data-science", "wasm", "pyodide"] {
        let (policy, mut facts) = (load_shipped(name).unwrap(), facts(true));
        let refusal = planned(&policy, &facts, &code()).unwrap_err();
        let command = format!("make it by `sudo /usr/share/stockade/prepare-{name}` ");
        assert!(refusal.reason() == "interpreter_missing" && refusal.to_string().contains(&command), "{refusal}");
        // Another one in its place needs nothing of it.
        let program = PathBuf::from("/srv/own/bin/other");
        facts.paths.insert(program.clone(), PathKind::File);
        facts.paths.insert(PathBuf::from("/srv/own"), PathKind::Directory);
        let own = Interpreter { program, read_only: vec![PathBuf::from("/srv/own")] };
        let interpreters = BTreeMap::from([(policy.language.clone(), own)]);
        let plan = planned(&policy, &facts, &RunRequest { interpreters, ..code() }).unwrap();
        assert_eq!(plan.argv[0], "/srv/own/bin/other");
    }
}

#[test]
fn the_same_inputs_give_the_same_plan() {
    let policy = load_shipped("strict").unwrap();
    assert_eq!(planned(&policy, &facts(true), &code()), planned(&policy, &facts(true), &code()));
}

#[track_caller]
fn refused(result: Result<Plan, PlanError>, reason: &str, callers_fault: bool) {
    let error = result.unwrap_err();
    assert_eq!((error.reason(), error.is_the_callers_fault()), (reason, callers_fault), "{error}");
}

#[test]
fn a_layer_that_is_missing_is_refused_unless_the_policy_lets_it_go() {
    let strict = load_shipped("strict").unwrap();
    refused(planned(&strict, &facts(false), &code()), "cgroup_unavailable", false);
    let no_landlock = HostFacts { landlock_abi: 0, ..facts(true) };
    refused(planned(&load_shipped("default").unwrap(), &no_landlock, &code()), "landlock_unavailable", false);
    let no_id = HostFacts { unique_id: None, ..facts(true) };
    refused(planned(&load_shipped("default").unwrap(), &no_id, &code()), "unique_uid_unavailable", false);
    let mut run_request = in_scratch("/srv/work");
    run_request.scratch.as_mut().unwrap().idmap_refusal = Some(String::from("its file system does not take it"));
    refused(planned(&load_shipped("default").unwrap(), &facts(true), &run_request), "unique_uid_unavailable", false);
}

#[test]
fn without_user_namespaces_root_needs_the_policys_leave_and_an_id_of_the_runs_own() {
    let forbidden = HostFacts { user_namespace_refusal: Some(String::from("make the namespaces: ENOSPC")), ..facts(true) };
    let mut policy = load_shipped("default").unwrap();
    refused(planned(&policy, &forbidden, &code()), "namespaces_refused", false);
    policy.degrade.root = vec![Degradable::UserNamespace, Degradable::UniqueUid];
    let with = planned(&policy, &facts(true), &code()).unwrap();
    let without = planned(&policy, &forbidden, &code()).unwrap();
    assert_eq!((with.identity.user_namespaces, without.identity.user_namespaces), (UserNamespaces::Nested, UserNamespaces::Missing));
    assert_eq!((without.identity.inside, without.identity.outside), ((0x7000_0007, 0x7000_0007), (0x7000_0007, 0x7000_0007)));
    assert_eq!(without.degraded, [("user_namespace", String::from("make the namespaces: ENOSPC"))]);
    // Nothing else is given up with it; passwd and group tell the ids.
    let others = |plan: &Plan| (plan.cgroup.clone(), plan.landlock.clone(), plan.payload_landlock.clone(), plan.filter.clone());
    assert_eq!(others(&with), others(&without));
    let differing: Vec<_> = with.root.iter().zip(without.root.iter()).filter(|(one, other)| one != other).collect();
    assert_eq!((differing.len(), with.root.len()), (2, without.root.len()), "{differing:?}");
    let no_id = HostFacts { unique_id: None, ..forbidden.clone() };
    refused(planned(&policy, &no_id, &code()), "unique_uid_unavailable", false);
    refused(planned(&policy, &forbidden, &in_scratch("/srv/work")), "scratch_not_idmappable", false);
    let user = HostFacts { user_namespace_refusal: forbidden.user_namespace_refusal, ..facts(false) };
    refused(planned(&policy, &user, &code()), "namespaces_refused", false);
}

#[test]
fn a_request_narrows_and_never_widens() {
    let policy = load_shipped("default").unwrap();
    let with = |key, value| RunRequest { limits: BTreeMap::from([(key, value)]), ..code() };
    assert_eq!(planned(&policy, &facts(true), &with(LimitKey::Wall, Some(1000))).unwrap().limits.get(LimitKey::Wall), Some(1000));
    refused(planned(&policy, &facts(true), &with(LimitKey::Wall, None)), "limit_above_maximum", true);
    refused(planned(&policy, &facts(true), &with(LimitKey::Memory, Some(1 << 50))), "limit_above_maximum", true);
    let env = RunRequest { environment: BTreeMap::from([(String::from("LD_PRELOAD"), String::from("x"))]), ..code() };
    refused(planned(&policy, &facts(true), &env), "env_not_accepted", true);
    let language = RunRequest {
        program: Program::Code { language: Some(String::from("cobol")), filename: None, stem: String::new() },
        ..RunRequest::default()
    };
    refused(planned(&policy, &facts(true), &language), "unknown_language", true);
}

#[test]
fn sizes_that_no_one_set_are_lowered_with_memory() {
    let policy = load_shipped("default").unwrap();
    let mib = |limits: &[(LimitKey, u64)]| limits.iter().map(|(key, size)| (*key, Some(size << 20))).collect::<BTreeMap<_, _>>();
    let asked = |limits: &[(LimitKey, u64)]| RunRequest { limits: mib(limits), ..code() };
    let sizes = |run_request: &RunRequest| {
        let plan = planned(&policy, &facts(true), run_request).unwrap();
        let size = |key| plan.limits.get(key).unwrap() as f64 / f64::from(1 << 20);
        assert!(plan.scratch.host || plan.scratch.size == plan.limits.get(LimitKey::ScratchSize));
        (size(LimitKey::TmpSize), size(LimitKey::ScratchSize), plan.root_size.unwrap() - plan.limits.get(LimitKey::TmpSize).unwrap())
    };
    use LimitKey::{Memory, ScratchSize, TmpSize};
    const ROOT: u64 = 512 << 10;
    assert_eq!(sizes(&asked(&[(Memory, 193)])), (64.0, 128.0, ROOT), "they fit");
    assert_eq!(sizes(&asked(&[(Memory, 192)])), (48.0, 48.0, ROOT));
    assert_eq!(sizes(&asked(&[(Memory, 100)])), (25.0, 25.0, ROOT));
    assert_eq!(sizes(&asked(&[(Memory, 4)])), (1.0, 1.0, ROOT));
    assert_eq!(sizes(&asked(&[(Memory, 100), (TmpSize, 60)])), (60.0, 10.0, ROOT));
    assert_eq!(sizes(&asked(&[(Memory, 100), (ScratchSize, 99)])), (0.25, 99.0, ROOT));
    // A scratch of the host is not in memory.
    let host = |limits: &[(LimitKey, u64)]| RunRequest { limits: mib(limits), ..in_scratch("/srv/work") };
    assert_eq!(sizes(&host(&[(Memory, 100)])), (64.0, 128.0, ROOT));
    assert_eq!(sizes(&host(&[(Memory, 64)])), (16.0, 128.0, ROOT));
    // What a request states, and what it asks of a session's file systems, is refused as ever.
    for run_request in [
        asked(&[(Memory, 100), (ScratchSize, 100)]),
        asked(&[(Memory, 100), (TmpSize, 50), (ScratchSize, 50)]),
        asked(&[(ScratchSize, 500)]),
        RunRequest { session: true, ..asked(&[(Memory, 100)]) },
    ] {
        refused(planned(&policy, &facts(true), &run_request), "tmpfs_above_memory", true);
    }
    let mut unlimited = policy.clone();
    unlimited.limits.set(TmpSize, None);
    let plan = planned(&unlimited, &facts(true), &asked(&[(Memory, 400)])).unwrap();
    assert_eq!((plan.limits.get(TmpSize), plan.limits.get(ScratchSize)), (Some(100 << 20), Some(100 << 20)));
}

#[test]
fn memory_must_hold_the_sandbox_itself_where_a_cgroup_enforces_it() {
    let policy = load_shipped("default").unwrap();
    let with = |memory| RunRequest {
        limits: BTreeMap::from([
            (LimitKey::Memory, Some(memory)),
            (LimitKey::TmpSize, Some(1 << 20)),
            (LimitKey::ScratchSize, Some(1 << 20)),
        ]),
        ..code()
    };
    refused(planned(&policy, &facts(true), &with((4 << 20) - 1)), "memory_too_small", true);
    assert_eq!(planned(&policy, &facts(true), &with(4 << 20)).unwrap().limits.get(LimitKey::Memory), Some(4 << 20));
    // An rlimit of the program alone is no danger to the launcher.
    assert!(planned(&policy, &facts(false), &with(3 << 20)).is_ok());
    let mut small = policy;
    for (key, value) in [(LimitKey::Memory, 3 << 20), (LimitKey::TmpSize, 1 << 20), (LimitKey::ScratchSize, 1 << 20)] {
        small.limits.set(key, Some(value));
    }
    refused(planned(&small, &facts(true), &code()), "memory_too_small", false);
}

#[test]
fn a_scratch_cannot_cover_the_sandboxs_own_directories() {
    let policy = load_shipped("default").unwrap();
    for path in ["/usr/local/work", "/etc", "/proc/self", "/dev/shm/x", "/", "/bin"] {
        refused(planned(&policy, &facts(true), &in_scratch(path)), "scratch_in_system_directory", true);
    }
}

#[test]
fn no_value_of_an_environment_variable_is_printed() {
    let run_request = RunRequest { environment: BTreeMap::from([(String::from("LANG"), String::from("hush-hush"))]), ..code() };
    let plan = planned(&load_shipped("default").unwrap(), &facts(true), &run_request).unwrap();
    assert!(plan.environment_values.iter().any(|value| value == "LANG=hush-hush"));
    assert!(!serde_json::to_string(&plan).unwrap().contains("hush-hush"));
}

#[test]
fn a_sandbox_serves_another_plan_that_differs_in_its_job_alone() {
    let policy = load_shipped("default").unwrap();
    let limited =
        |limits: &[(LimitKey, u64)]| RunRequest { limits: limits.iter().map(|(key, value)| (*key, Some(*value))).collect(), ..code() };
    let stands = planned(&policy, &facts(true), &code()).unwrap();
    let fits = |facts: &HostFacts, run_request: &RunRequest| planned(&policy, facts, run_request).unwrap().is_set_up_like(&stands);
    let other_code = Program::Code { language: Some(String::from("bash")), filename: None, stem: String::from("stockade_1") };
    let arguments = vec![String::from("a")];
    assert!(fits(&facts(true), &RunRequest { program: other_code, arguments, ..code() }));
    assert!(fits(
        &facts(true),
        &limited(&[(LimitKey::Wall, 1000), (LimitKey::OutputSize, 1), (LimitKey::OpenFiles, 64), (LimitKey::Stack, 4096)])
    ));
    for (key, value) in [
        (LimitKey::Memory, 256 << 20),
        (LimitKey::Processes, 7),
        (LimitKey::Cpus, 500),
        (LimitKey::ScratchSize, 1 << 20),
        (LimitKey::TmpSize, 1 << 20),
        // Has it counted in a cgroup of its own.
        (LimitKey::Cpu, 1000),
    ] {
        assert!(!fits(&facts(true), &limited(&[(key, value)])), "{}", key.name());
    }
    for other in [in_scratch("/srv/work"), RunRequest { session: true, ..code() }, RunRequest { terminal: true, ..code() }] {
        assert!(!fits(&facts(true), &other), "{other:?}");
    }
    assert!(!fits(&HostFacts { unique_id: Some(0x7000_0008), ..facts(true) }, &code()));
    assert!(!fits(&HostFacts { landlock_abi: 6, ..facts(true) }, &code()));
    assert!(!fits(&facts(false), &code()));
    // A launcher leaves its cgroup once.
    let unified = |vacate| HostFacts { cgroup: CgroupFacts::V2 { parent: PathBuf::from("/sys/fs/cgroup/outer"), vacate }, ..facts(true) };
    let planned = |facts: &HostFacts, limits: &RunRequest| planned(&policy, facts, limits).unwrap();
    assert!(planned(&unified(false), &code()).is_set_up_like(&planned(&unified(true), &code())));
    assert!(!planned(&unified(true), &limited(&[(LimitKey::Memory, 256 << 20)])).is_set_up_like(&planned(&unified(true), &code())));
}
