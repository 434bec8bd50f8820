//! Whole systems as the root of runs: Debian 12, Debian 13 and one of musl. `tests/images` makes them,
//! and the step `images` of `scripts/test` runs these tests.
//!
//! Programs that end in a certain way under the host's directories end the same way in an image: the
//! honest ones of the corpus, and what the tests of the kernel, verdicts and misdeeds send to `exec`.
//! That needs the host's own version of Python in the image.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
    process::Command,
    sync::Mutex,
    thread,
};

use serde_json::{Value, json};

use super::same_result::{cold, decided, differences, named, recorded};
use crate::support::{
    exec::text,
    image_store::ImageStore,
    policy_dir::{PolicyDirectory, derived},
    runner::test,
    starts::compare_corpus,
    timeouts::scaled_limit,
};

/// Parts of programs that ask for what an image has and the host's directories have not, or another.
const OF_AN_IMAGE: [(&str, &str); 10] = [
    ("read('/etc/shadow')", "its own, without a user of the host"),
    ("read('/etc/gshadow')", "the same"),
    ("os.path.exists('/root')", "a directory of its own"),
    ("os.listdir('/var')", "the same"),
    ("os.listdir('/run/lock')", "the same"),
    ("for p in ('/', '/dev'", "the same"),
    ("open('/proc/self/mountinfo')", "one mount in place of those of the host's directories"),
    ("os.open(\"/proc/self/exe\", os.O_WRONLY)", "a file of the sandbox's own user, on a read-only mount: EROFS before EACCES"),
    ("os.stat(p).st_mode & stat.S_ISUID", "no set-ID program"),
    ("call(27, mapped, size, pages)", "a file of an ordinary user's store is its own user's, who may ask which pages are in memory"),
];
/// The directory with the images.
const IMAGES: &str = "STOCKADE_TEST_IMAGES";
/// How many requests there are at a time.
const CLIENTS: usize = 2;
/// How often a program is compared whose result was not the same at once.
const TRIES: usize = 4;

fn missing_images() -> Option<String> {
    let is_there = std::env::var_os(IMAGES).is_some_and(|path| Path::new(&path).is_dir());
    (!is_there).then(|| String::from("no images of whole systems: scripts/test images makes them"))
}

/// Whether the host has the Python of Debian 12, too.
fn other_python() -> Option<String> {
    let version = Command::new("/usr/bin/python3").arg("-V").output().map(|output| String::from_utf8_lossy(&output.stdout).into_owned());
    let is_alike = version.as_ref().is_ok_and(|version| version.starts_with("Python 3.11."));
    (!is_alike).then(|| format!("the image has Python 3.11, and this host {version:?}"))
}

/// A store with this image, by the name `system`.
fn store_of(file: &str) -> ImageStore {
    let path: PathBuf = Path::new(&std::env::var_os(IMAGES).unwrap()).join(file);
    let store = ImageStore::empty();
    let output = store.command(&["image", "import", "--name", "system", text(&path)]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    store
}

/// The program under this policy, in the image.
#[track_caller]
fn in_image(store: &ImageStore, policy: &str, request: &Value) -> Value {
    let mut request = named(request);
    request["image"] = json!("system");
    store.exec_with(&["--policy", policy], request).result
}

test!(Both, each_system_runs_its_own_programs, needs [Long, Other(missing_images)], seconds 600);
fn each_system_runs_its_own_programs() {
    let python = json!({"code": "import sys; print(sys.version_info[:2], open('/etc/debian_version').read()[:2])"});
    let musl = "echo $0; ls /usr 2>&1; /lib/ld-musl-x86_64.so.1 2>&1 | busybox head -n 1; id -u";
    for (file, request, output) in [
        ("debian-12", python.clone(), "(3, 11) 12\n"),
        ("debian-13.tar", python, "(3, 13) 13\n"),
        ("musl.tar", json!({"language": "sh", "code": musl}), "/scratch/main.sh\nbin\nshare\nmusl libc (x86_64)\n1000\n"),
    ] {
        let store = store_of(file);
        let mut request = request;
        request["image"] = json!("system");
        let done = store.exec_with(&[], request);
        done.succeeded().expect(json!({"output": output}));
        let layers = done["receipt"]["layers"].as_array().unwrap();
        let root = layers.iter().find(|layer| layer["layer"] == "root_image").unwrap();
        assert!(root["detail"].as_str().unwrap().contains("root"), "{file}: {root}");
        let verified = store.command(&["image", "verify", "system"]).output().unwrap();
        assert!(verified.status.success(), "{file}: {}", String::from_utf8_lossy(&verified.stderr));
    }
}

test!(Both, pip_and_git_work_in_an_image, needs [Long, Other(missing_images)], seconds 600);
fn pip_and_git_work_in_an_image() {
    let store = store_of("debian-12");
    let code = r#"
import subprocess, sys, zipfile
with zipfile.ZipFile("own-1.0-py3-none-any.whl", "w") as wheel:
    wheel.writestr("own.py", "word = 'installed'\n")
    wheel.writestr("own-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: own\nVersion: 1.0\n")
    wheel.writestr("own-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
    wheel.writestr("own-1.0.dist-info/RECORD", "own.py,,\nown-1.0.dist-info/METADATA,,\nown-1.0.dist-info/WHEEL,,\nown-1.0.dist-info/RECORD,,\n")
subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--target", "t", "own-1.0-py3-none-any.whl"], check=True)
sys.path.insert(0, "t")
import own
print(own.word)
git = "git init -q r && cd r && git -c user.name=a -c user.email=a@b.c commit -q --allow-empty -m one && git log --format=%s"
print(subprocess.run(git, shell=True, check=True, capture_output=True, text=True).stdout.strip())
"#;
    let request = json!({"code": code, "image": "system", "limits": {"wall": scaled_limit(30_000)}});
    store.exec_with(&[], request).succeeded().expect(json!({"output": "installed\none\n"}));
}

test!(Both, honest_programs_end_alike_in_an_image, needs [Long, Other(missing_images), Other(other_python)], seconds 900);
fn honest_programs_end_alike_in_an_image() {
    let (store, policies) = (store_of("debian-12"), PolicyDirectory::new());
    // Else the order of a set is another at every start.
    let policy = policies.write("honest", &derived("[environment.set]\nPYTHONHASHSEED = \"1\""));
    let (mut same, mut different) = (0, Vec::new());
    for corpus in [include_str!("../corpus/benign-python-1.txt"), include_str!("../corpus/benign-python-2.txt")] {
        let (alike, others) = compare_corpus(corpus, |code| {
            let request = json!({"code": code, "limits": {"wall": scaled_limit(20_000)}});
            let told = |result: &Value| Value::Object(decided(result)).to_string();
            (told(&cold(&policy, &request)), told(&in_image(&store, &policy, &request)))
        });
        same += alike;
        different.extend(others);
    }
    assert!(different.is_empty() && same > 90, "{same} are the same, and not: {different:?}");
}

test!(serial Both, what_tests_ask_for_ends_alike_in_an_image, needs [Long, Other(missing_images), Other(other_python)], seconds 1800);
fn what_tests_ask_for_ends_alike_in_an_image() {
    let modules =
        ["suite::kernel::", "suite::cross_run::", "suite::verdicts::", "suite::agent_misuse::", "--skip", "the_launcher_stays_small"];
    let lines = recorded(&modules);
    let (store, place) = (store_of("debian-12"), PolicyDirectory::new());
    let (mut policies, mut cases, mut seen) = (Vec::new(), Vec::new(), BTreeSet::new());
    for line in &lines {
        let (Some(policy), mut request) = (line["policy"].as_str(), line["request"].clone()) else { continue };
        let was_run = line["result"]["started"] == true && request["code"].is_string();
        // A directory of the test's is gone, and `strict` has no image.
        let has_place = ["scratch", "approve", "filename"].iter().any(|field| request.get(field).is_some());
        let is_of_image = OF_AN_IMAGE.iter().any(|(part, _)| request["code"].as_str().is_some_and(|code| code.contains(part)));
        if !was_run
            || has_place
            || is_of_image
            || ["/suite-", "strict"].iter().any(|part| policy.contains(part))
            || !seen.insert(format!("{policy}{request}"))
        {
            continue;
        }
        let text = if policy.is_empty() { derived("") } else { policy.to_owned() };
        let number = policies.iter().position(|known| *known == text).unwrap_or_else(|| {
            policies.push(text);
            policies.len() - 1
        });
        request.as_object_mut().unwrap().remove("template");
        cases.push((number, request));
    }
    let policies: Vec<String> = policies.iter().enumerate().map(|(number, text)| place.write(&format!("policy-{number}"), text)).collect();
    let (all, left) = (cases.len(), Mutex::new(cases.into_iter()));
    let (wrong, varied) = (Mutex::new(Vec::new()), Mutex::new(0));
    let work = || {
        loop {
            let Some((number, request)) = left.lock().unwrap().next() else { break };
            let policy = &policies[number];
            let first = cold(policy, &request);
            // Debian's Node is not the host's: its traces name other lines.
            let is_other = request["language"] == "node";
            let mut again = || differences(&first, &in_image(&store, policy, &request), is_other);
            let found = (0..TRIES).map(|_| again()).find(Vec::is_empty).unwrap_or_else(&mut again);
            if !found.is_empty() && differences(&first, &cold(policy, &request), false).is_empty() {
                wrong.lock().unwrap().push(format!("{}\n{request}", found.join("; ")));
            } else if !found.is_empty() {
                *varied.lock().unwrap() += 1;
            }
        }
    };
    thread::scope(|scope| (0..CLIENTS).for_each(|_| drop(scope.spawn(work))));
    let wrong = wrong.into_inner().unwrap();
    assert!(wrong.is_empty(), "{} of {all} differ:\n{}", wrong.len(), wrong.join("\n\n"));
    assert!(all > 150 && varied.into_inner().unwrap() < 15, "{all} programs were compared");
}
