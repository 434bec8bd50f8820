//! That a program has the same result however its interpreter was started: cold by `exec`, as a copy
//! of a template's image, or as one that waited. The programs are those of other modules: the table
//! of causes, and what the tests of verdicts, misdeeds, the kernel and two runs send to `exec`.
//!
//! All that a program decides is compared, byte for byte; how long it took, what it used and the
//! receipt are not. The honest programs of the corpus are compared in `templates.rs` and
//! `prestarted.rs`. What `prove` tries no request can name, and in a scratch of the host no
//! interpreter waits: neither is here.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    panic::{AssertUnwindSafe, catch_unwind},
    process::{Command, Stdio},
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

use serde_json::{Map, Value, json};

use super::causes::TABLE;
use crate::support::{
    exec::{RECORD, exec_with},
    policy_dir::{PolicyDirectory, derived},
    runner::{directory, eventually, test},
    session::Session,
    starts::{result_after_pause, result_without_pause, started},
    timeouts::{is_slow, scaled_limit},
};

/// A second Python, of which there is no template: its interpreters wait.
const PLAIN: &str = "[runtimes.plain]\ncommand = [\"/usr/bin/python3\", \"{file}\"]\nextension = \"py\"\n";

/// How many sessions there are at a time: more would only make each slower.
const SESSIONS: usize = 3;

/// How often a program is compared whose result was not the same at once.
const TRIES: usize = 4;

/// How a program starts in a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Start {
    /// From an image, after the request has come.
    Restored,
    /// From an image, before the request comes.
    RestoredBefore,
    /// Without an image, before the request comes.
    Prestarted,
}

impl Start {
    const ALL: [Start; 3] = [Start::Restored, Start::RestoredBefore, Start::Prestarted];

    fn in_receipt(self) -> &'static str {
        if self == Start::Prestarted { "prestarted" } else { "restored" }
    }
}

/// A program, and the starts that it gets.
struct Case {
    name: String,
    request: Value,
    starts: Vec<Start>,
    /// Not all of its result is the same each time: its verdict, limits and denials are compared.
    varies: bool,
}

/// What a program decides of its result.
pub(super) fn decided(result: &Value) -> Map<String, Value> {
    const FIELDS: [&str; 17] = [
        "verdict",
        "code",
        "signal",
        "success",
        "started",
        "reason",
        "limits_hit",
        "limits",
        "limits_unenforced",
        "denials",
        "denials_omitted",
        "findings",
        "findings_omitted",
        "output",
        "error",
        "truncated",
        "lossy",
    ];
    let text = |value: &Value| serde_json::from_str(&with_one_name(&value.to_string())).unwrap();
    let mut all: Map<String, Value> = FIELDS.into_iter().map(|field| (field.to_owned(), text(&result[field]))).collect();
    // How much was used at most is another figure each time.
    let denials = all["denials"].as_array_mut().into_iter().flatten();
    denials.filter_map(|denial| denial.get_mut("limit")).for_each(|limit| limit["peak"] = Value::Null);
    // What prints until it is ended comes to another end each time: up to the cut it is the same.
    for stream in ["output", "error"].into_iter().filter(|stream| result["truncated"][stream] == true) {
        let text = all[stream].as_str().unwrap_or_default();
        all[stream] = json!(text.split("\n[stockade: ").next());
    }
    all
}

/// What the file of a cold start is called: as long a name as a session gives.
const COLD_NAME: &str = "cold_____0000000000000000";

/// A program's file has a random name at each start of a session's.
fn with_one_name(text: &str) -> String {
    let text = text.replace(COLD_NAME, "stockade_0000000000000000");
    let mut parts = text.split("stockade_");
    let first = parts.next().unwrap_or_default().to_owned();
    parts.fold(first, |all, part| all + "stockade_" + "0000000000000000" + part.get(16..).unwrap_or_default())
}

/// The fields that differ, with what they hold.
pub(super) fn differences(cold: &Value, other: &Value, varies: bool) -> Vec<String> {
    const OF_VERDICT: [&str; 6] = ["verdict", "code", "signal", "success", "limits_hit", "limits"];
    let (cold, other) = (decided(cold), decided(other));
    let rules = |result: &Map<String, Value>| {
        let denials = result["denials"].as_array().into_iter().flatten();
        denials.map(|denial| (denial["kind"].clone(), denial["rule"].clone())).collect::<Vec<_>>()
    };
    let mut all: Vec<String> = Vec::new();
    for (field, value) in &cold {
        if *value != other[field] && (!varies || OF_VERDICT.contains(&field.as_str())) {
            all.push(format!("{field}: cold {value}, not {}", other[field]));
        }
    }
    if varies && rules(&cold) != rules(&other) {
        all.push(format!("denials: cold {}, not {}", cold["denials"], other["denials"]));
    }
    all
}

/// The request with its program under the name that a session would give it.
pub(super) fn named(request: &Value) -> Value {
    let mut request = request.clone();
    let extension = match request["language"].as_str().unwrap_or("python") {
        "bash" | "sh" => "sh",
        "node" => "js",
        _ => "py",
    };
    request["filename"] = json!(format!("{COLD_NAME}.{extension}"));
    request
}

/// The program in a process that was started for it.
#[track_caller]
pub(super) fn cold(policy: &str, request: &Value) -> Value {
    let result = exec_with(&["--policy", policy], named(request)).result;
    assert_eq!(result["started"], true, "{result}");
    result
}

/// A session under this policy, whose template is made; or why it is not.
fn ready_session(policy: &str) -> (Session, Result<(), String>) {
    let mut session = Session::open(&["--policy", policy]);
    let mut receipt = Value::Null;
    let made = eventually(Duration::from_secs(60), || {
        thread::sleep(Duration::from_millis(30));
        receipt = result_without_pause(&mut session, &json!({"op": "run", "code": ""}))["receipt"].take();
        let cause = receipt["start_cause"].as_str().unwrap_or_default();
        receipt["start"] == "restored" || !["not being made yet", "still being made"].iter().any(|so_far| cause.contains(so_far))
    });
    assert!(made, "the template is not made: {receipt}");
    let is_ready = receipt["start"] == "restored";
    (session, if is_ready { Ok(()) } else { Err(receipt["start_cause"].to_string()) })
}

/// A session under a policy of these tests.
struct Compared<'a> {
    session: Session,
    policy: &'a str,
    /// Of the last request: an interpreter of it waits.
    language: String,
}

impl Compared<'_> {
    /// A program's result after such a start.
    #[track_caller]
    fn in_session(&mut self, request: &Value, start: Start) -> Value {
        let mut line = request.clone();
        line["op"] = json!("run");
        let language = line["language"].as_str().unwrap_or("python").to_owned();
        let language = if start == Start::Prestarted && language == "python" { String::from("plain") } else { language };
        line["language"] = json!(language);
        if start != Start::Restored && self.language != language {
            self.session.ask(json!({"op": "run", "code": "", "language": language}));
        }
        self.language = language;
        let result = match start {
            Start::Restored => result_without_pause(&mut self.session, &line),
            Start::RestoredBefore | Start::Prestarted => result_after_pause(&mut self.session, &line),
        };
        started(&result, start.in_receipt(), "");
        result
    }

    /// What differs in one case. A difference counts if it is there each time, while two cold starts
    /// are alike. `varied` takes the names of those that are not.
    #[track_caller]
    fn compare(&mut self, case: &Case, varied: &Mutex<BTreeSet<String>>) -> Vec<String> {
        let first = cold(self.policy, &case.request);
        let mut wrong = Vec::new();
        for start in &case.starts {
            let mut varies = case.varies;
            let mut is_alike = || {
                let found = differences(&first, &self.in_session(&case.request, *start), varies);
                if !found.is_empty() && !varies && !differences(&first, &cold(self.policy, &case.request), false).is_empty() {
                    varies = true;
                    varied.lock().unwrap().insert(case.name.clone());
                }
                found
            };
            let found = (0..TRIES).map(|_| is_alike()).find(Vec::is_empty).unwrap_or_else(&mut is_alike);
            if !found.is_empty() {
                wrong.push(format!("{}, {start:?}: {}\n{}", case.name, found.join("; "), case.request));
            }
        }
        wrong
    }
}

/// Cases under one policy.
struct Group {
    policy: String,
    /// Whether no template is made under it, so that only waiting interpreters are compared.
    may_lack_template: bool,
    cases: Vec<Case>,
}

/// What a comparison has found.
#[derive(Default)]
struct Findings {
    wrong: Mutex<Vec<String>>,
    /// Programs of which two cold starts differed.
    varied: Mutex<BTreeSet<String>>,
    /// How many programs got each start.
    counts: [AtomicUsize; 3],
}

impl Findings {
    fn compare(&self, policy: &str, group: Group) {
        let (session, template) = ready_session(policy);
        assert!(group.may_lack_template || template.is_ok(), "{template:?}: {}", group.policy);
        let mut compared = Compared { session, policy, language: String::from("python") };
        for mut case in group.cases {
            case.starts.retain(|start| *start == Start::Prestarted || template.is_ok());
            for start in &case.starts {
                self.counts[*start as usize].fetch_add(1, Ordering::Relaxed);
            }
            let found = catch_unwind(AssertUnwindSafe(|| compared.compare(&case, &self.varied)));
            self.wrong.lock().unwrap().extend(found.unwrap_or_else(|_| vec![format!("the comparison failed: {}", case.request)]));
        }
    }
}

/// Compares all groups, some at a time. Returns how many programs got each start, and which vary.
#[track_caller]
fn compare_all(groups: Vec<Group>) -> ([usize; 3], BTreeSet<String>) {
    let policies = PolicyDirectory::new();
    let (left, findings) = (Mutex::new(groups.into_iter().enumerate()), Findings::default());
    let work = || {
        loop {
            let Some((number, group)) = left.lock().unwrap().next() else { break };
            let policy = policies.write(&format!("group-{number}"), &group.policy);
            findings.compare(&policy, group);
        }
    };
    thread::scope(|scope| (0..SESSIONS).for_each(|_| drop(scope.spawn(work))));
    let (wrong, varied) = (findings.wrong.into_inner().unwrap(), findings.varied.into_inner().unwrap());
    let counts = findings.counts.map(AtomicUsize::into_inner);
    println!("{counts:?} programs: {:?}; of two cold starts differ: {varied:?}", Start::ALL);
    assert!(wrong.is_empty(), "{} differ:\n{}", wrong.len(), wrong.join("\n\n"));
    (counts, varied)
}

/// Limits as lines of a policy: for a request with others another sandbox would be made.
pub(super) fn lines_of_limits(limits: &Value) -> String {
    let lines = limits.as_object().into_iter().flatten().map(|(key, value)| format!("{key} = {value}\n"));
    format!("[limits]\n{}", lines.collect::<String>())
}

/// Rows of the table of causes that get no such start here, or not in the time that a landing has.
const LEFT_OUT: [(&str, &str, &str); 2] = [
    ("host not allowed", "all", "a run that reaches peers has a gate of its own: nothing is started before its request"),
    ("processes", "bash", "bash itself waits 15 s before it gives a refused fork up"),
];

test!(Both, each_cause_of_an_end_is_told_alike_after_each_start, needs [Program("curl"), Program("node")], seconds 120);
fn each_cause_of_an_end_is_told_alike_after_each_start() {
    let mut groups: BTreeMap<(bool, String), Group> = BTreeMap::new();
    for row in TABLE {
        if LEFT_OUT.iter().any(|(cause, language, _)| *cause == row.cause && (*language == row.language || *language == "all")) {
            continue;
        }
        let mut limits: Value = serde_json::from_str(row.limits).unwrap();
        if limits.get("wall").is_none() {
            limits["wall"] = json!(scaled_limit(20_000));
        }
        let policy = derived(&format!("{}{PLAIN}", lines_of_limits(&limits)));
        let name = format!("{} in {}", row.cause, row.language);
        let starts = if row.language == "python" { Start::ALL.to_vec() } else { vec![Start::Prestarted] };
        // Those that take a second for each start begin first.
        let takes_long = row.limits.contains("\"1s\"");
        // The image is a file that would be too large. A slow machine makes none in a second.
        let may_lack_template = row.cause == "file too large" || takes_long && is_slow();
        let new = Group { policy: policy.clone(), may_lack_template, cases: Vec::new() };
        let request = json!({"language": row.language, "code": row.code});
        groups.entry((!takes_long, policy)).or_insert(new).cases.push(Case { name, request, starts, varies: false });
    }
    // An image fits in here.
    let limits = json!({"file_size": "32MiB", "wall": scaled_limit(20_000)});
    let request = json!({"code": "open('f', 'wb').write(bytes(33 << 20))"});
    let case = Case { name: String::from("file larger than an image"), request, starts: Start::ALL.to_vec(), varies: false };
    let policy = derived(&format!("{}{PLAIN}", lines_of_limits(&limits)));
    groups.insert((true, policy.clone()), Group { policy, may_lack_template: false, cases: vec![case] });
    let (counts, varied) = compare_all(groups.into_values().collect());
    let copies = if is_slow() { 10 } else { 14 };
    assert!(counts[0] >= copies && counts[1] >= copies && counts[2] >= 40, "{counts:?}");
    assert!(varied.is_empty(), "another each time: {varied:?}");
}

/// Runs these tests as their own process, and returns what they asked `exec` for, with its results.
#[track_caller]
pub(super) fn recorded(words: &[&str]) -> Vec<Value> {
    let path = directory().join("recorded");
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(words).env(RECORD, &path).stdin(Stdio::null());
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    let lines = fs::read_to_string(&path).unwrap();
    lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// The starts that a request can get in a session, once its limits are the policy's. Copies are
/// taken in turns before and after the request has come.
fn starts_of(request: &Value, number: usize) -> Vec<Start> {
    let has_only = |known: &[&str]| request.as_object().unwrap().keys().all(|field| known.contains(&field.as_str()));
    let is_python = request["language"].as_str().is_none_or(|language| language == "python");
    let mut starts = Vec::new();
    if is_python && has_only(&["code", "language", "limits", "stdin", "args", "files"]) {
        starts.push([Start::Restored, Start::RestoredBefore][number % 2]);
    }
    if has_only(&["code", "language", "limits"]) {
        starts.push(Start::Prestarted);
    }
    // The next program begins with the language that this one ends with.
    if number % 2 == 1 {
        starts.reverse();
    }
    starts
}

/// A part of the code of programs that meet what every start in a session has, and a cold one has not.
const OF_A_SESSION: [(&str, &str); 1] = [(
    "'/proc/self/mountinfo')]\nprint(json.dumps({r[4]: r[5].split(',') for r in rows}))",
    "scratch is mounted for the session, with other options",
)];

/// Groups of what tests asked for, with some of it left out: where a scratch of the host, a variable
/// or a name is asked for, no interpreter waits and no copy starts.
fn groups_of(lines: &[Value]) -> Vec<Group> {
    let (mut groups, mut seen): (BTreeMap<String, Group>, BTreeSet<String>) = (BTreeMap::new(), BTreeSet::new());
    for (number, line) in lines.iter().enumerate() {
        let Some(policy) = line["policy"].as_str() else { continue };
        let mut request = line["request"].clone();
        let was_run = line["result"]["started"] == true && request["code"].is_string();
        if !was_run || !seen.insert(format!("{policy}{request}")) {
            continue;
        }
        let starts = starts_of(&request, number);
        let limits = request.as_object_mut().unwrap().remove("limits").unwrap_or_default();
        // A policy has one table of limits, and takes sizes as text. A directory of the test's is gone.
        let is_size = |(key, value): (&String, &Value)| value.is_number() && (key.ends_with("size") || key == "memory");
        let has_numbers = limits.as_object().is_some_and(|all| all.iter().any(is_size));
        if starts.is_empty() || has_numbers || ["[limits]", "[runtimes", "/suite-"].iter().any(|part| policy.contains(part)) {
            continue;
        }
        let policy = if policy.is_empty() { derived("") } else { policy.to_owned() };
        let policy = format!("{policy}\n{PLAIN}{}", if limits.is_null() { String::new() } else { lines_of_limits(&limits) });
        let code = request["code"].as_str().unwrap();
        let varies = OF_A_SESSION.iter().any(|(part, _)| code.contains(part));
        // What the frame of all denials ends with is what the program tries.
        let name = code.chars().skip(code.chars().count().saturating_sub(160)).collect();
        let new = Group { policy: policy.clone(), may_lack_template: true, cases: Vec::new() };
        groups.entry(policy).or_insert(new).cases.push(Case { name, request, starts, varies });
    }
    // In parts, for the sessions beside each other. From one image only so many runs may come.
    let mut parts = Vec::new();
    for mut group in groups.into_values() {
        while !group.cases.is_empty() {
            let rest = group.cases.split_off(group.cases.len().min(40));
            let cases = std::mem::replace(&mut group.cases, rest);
            parts.push(Group { policy: group.policy.clone(), may_lack_template: true, cases });
        }
    }
    parts
}

test!(serial Both, what_tests_of_the_kernel_ask_for_ends_alike_after_each_start, needs [SlowAsUser], seconds 120);
fn what_tests_of_the_kernel_ask_for_ends_alike_after_each_start() {
    let (counts, varied) = compare_all(groups_of(&recorded(&["suite::kernel::", "suite::cross_run::"])));
    assert!(counts[0] > 60 && counts[1] > 60 && counts[2] > 120, "{counts:?}");
    assert!(varied.len() < 8, "{varied:?}");
}

test!(serial Both, what_tests_of_verdicts_and_misdeeds_ask_for_ends_alike_after_each_start, needs [Long], seconds 1200);
fn what_tests_of_verdicts_and_misdeeds_ask_for_ends_alike_after_each_start() {
    let words = ["suite::verdicts::", "suite::agent_misuse::", "--skip", "the_launcher_stays_small"];
    let (counts, varied) = compare_all(groups_of(&recorded(&words)));
    assert!(counts[0] > 30 && counts[1] > 30 && counts[2] > 60, "{counts:?}");
    assert!(varied.len() < 12, "{varied:?}");
}

test!(Both, a_difference_between_starts_is_found, seconds 60);
/// What a copy cannot hide (policies.md), and what is another each time.
fn a_difference_between_starts_is_found() {
    let policies = PolicyDirectory::new();
    let policy = policies.write("two", &derived(PLAIN));
    let (session, template) = ready_session(&policy);
    assert_eq!(template, Ok(()));
    let mut compared = Compared { session, policy: &policy, language: String::from("python") };
    let varied = Mutex::new(BTreeSet::new());
    let mut found = |code: &str, starts: Vec<Start>| {
        let case = Case { name: String::from(code), request: json!({"code": code}), starts, varies: false };
        compared.compare(&case, &varied)
    };
    let (file, copies) = ("import os; print(os.readlink('/proc/self/exe'))", vec![Start::Restored, Start::RestoredBefore]);
    let all = found(file, copies.clone());
    assert!(all.len() == 2 && all.iter().all(|one| one.contains("output: cold") && one.contains("python3")), "{all:?}");
    // In one that waited it is as cold; and the same code without a difference is alike.
    assert_eq!(found(file, vec![Start::Prestarted]), [""; 0]);
    assert_eq!(found("import os; print(os.path.basename('/usr/bin/python3'))", copies), [""; 0]);
    // Where cold starts differ too, the rest is still compared: here the code of the end.
    let differs = "print(id(object()), hash('x'))";
    assert_eq!(found(differs, Start::ALL.to_vec()), [""; 0]);
    assert_eq!(*varied.lock().unwrap(), BTreeSet::from([differs.to_owned()]));
    let code = "import os; print(hash('x')); raise SystemExit('python' not in os.readlink('/proc/self/exe'))";
    let all = found(code, vec![Start::Restored]);
    assert!(all.len() == 1 && all[0].contains("code: cold 0, not 1") && !all[0].contains("output"), "{all:?}");
}
