//! Whole systems as the root of runs: Debian 12, Debian 13 and one of musl. `tests/images` makes them,
//! and the step `images` of `scripts/test` runs these tests.
//!
//! Honest programs of the corpus end in an image as under the host's directories. The tests of the
//! kernel, verdicts, misdeeds and two runs hold there as they stand, with what they look for on the
//! host after a run. Both need the host's own version of Python in the image.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use serde_json::{Value, json};

use super::same_result::{cold, decided, named};
use crate::support::{
    exec::{RECORD, text},
    image_store::{IN_IMAGE, ImageStore, SYSTEM},
    policy_dir::{PolicyDirectory, derived},
    runner::{directory, test},
    starts::compare_corpus,
    timeouts::scaled_limit,
};

/// Tests of what an image has otherwise than the host's directories, or not at all.
const OF_THE_HOST: [(&str, &str); 9] = [
    ("the_launcher_stays_small", "its runs are of `stockade run`, which gets no image here"),
    ("the_shadow_file_is_not_there_to_read", "an image has its own, without a user of the host"),
    ("ssh_keys_are_not_there_to_read", "a /root of its own"),
    ("nothing_can_be_written_through_proc", "a program of the sandbox's own user, on a read-only mount: EROFS before EACCES"),
    ("the_root_holds_nothing_of_the_host_but", "other directories"),
    ("a_lock_on_a_file_of_the_host_is_felt_by_all", "no file of the host"),
    ("a_watch_on_a_directory_of_the_host_sees", "no directory of the host"),
    ("what_is_in_the_page_cache_is_not_told", "a file of an ordinary user's store is its own user's, who may ask"),
    ("verdicts::strict_", "`strict` lets no request name an image"),
];
/// The directory with the images.
const IMAGES: &str = "STOCKADE_TEST_IMAGES";

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

/// A store with this image, by the name [`SYSTEM`].
fn store_of(file: &str) -> ImageStore {
    let path: PathBuf = Path::new(&std::env::var_os(IMAGES).unwrap()).join(file);
    let store = ImageStore::empty();
    let output = store.command(&["image", "import", "--name", SYSTEM, text(&path)]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    store
}

/// The program under this policy, in the image.
#[track_caller]
fn in_image(store: &ImageStore, policy: &str, request: &Value) -> Value {
    let mut request = named(request);
    request["image"] = json!(SYSTEM);
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
        request["image"] = json!(SYSTEM);
        let done = store.exec_with(&[], request);
        done.succeeded().expect(json!({"output": output}));
        let layers = done["receipt"]["layers"].as_array().unwrap();
        let root = layers.iter().find(|layer| layer["layer"] == "root_image").unwrap();
        assert!(root["detail"].as_str().unwrap().contains("root"), "{file}: {root}");
        let verified = store.command(&["image", "verify", SYSTEM]).output().unwrap();
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
    let request = json!({"code": code, "image": SYSTEM, "limits": {"wall": scaled_limit(30_000)}});
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
            let told = |result: &Value| {
                let mut decided = decided(result);
                // Tracebacks have lines of the library, which each update of it may move.
                decided.remove("error");
                Value::Object(decided).to_string()
            };
            (told(&cold(&policy, &request)), told(&in_image(&store, &policy, &request)))
        });
        same += alike;
        different.extend(others);
    }
    // An image has its own /etc/os-release, and not the host's packages.
    different.retain(|name| !["read-host-file", "yaml-config"].contains(name));
    assert!(different.is_empty() && same > 90, "{same} are the same, and not: {different:?}");
}

test!(serial Both, what_tests_claim_holds_in_an_image, needs [Long, Other(missing_images), Other(other_python)], seconds 1800);
fn what_tests_claim_holds_in_an_image() {
    let (store, requests) = (store_of("debian-12"), directory().join("requests"));
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["suite::kernel::", "suite::cross_run::", "suite::verdicts::", "suite::agent_misuse::"]).stdin(Stdio::null());
    command.args(OF_THE_HOST.iter().flat_map(|(name, _)| ["--skip", name]));
    let output = command.env(IN_IMAGE, store.path()).env(RECORD, &requests).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}");
    let requests = fs::read_to_string(requests).unwrap();
    let results = requests.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()["result"].take());
    let in_image = results.filter(|result| result["receipt"]["image"].is_string()).count();
    assert!(in_image > 200, "{in_image} requests ran in the image");
}
