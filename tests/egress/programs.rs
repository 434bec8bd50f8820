//! Real programs, unmodified and without a word of configuration about a proxy.

use serde_json::json;

use crate::{egress::testbed::Testbed, egress::testbed::denials, egress::testbed::syn, support::runner::test};

/// The rules of the policy `pypi`.
const PYPI: [&str; 2] = ["pypi.org:443", "files.pythonhosted.org:443"];
/// Whose a root launcher's scratch is, since none may be root's. No account has this id.
const OWNER: u32 = 54321;

test!(Both, pip_installs_from_the_index_and_from_nowhere_else, seconds 90);
fn pip_installs_from_the_index_and_from_nowhere_else() {
    let mut testbed = Testbed::new();
    let certificate = testbed.index();
    let script = format!(
        "import shutil, tempfile
home = tempfile.mkdtemp()
def pip(*words):
    return subprocess.run([sys.executable, '-m', 'pip', '--isolated', '--cert', {certificate:?}, '--disable-pip-version-check', '--no-cache-dir',
        '--retries', '0', '--timeout', '5', 'install', '--target', home, '--no-deps', *words], capture_output=True, text=True, env={{'HOME': home, 'PATH': '/usr/bin:/bin'}})
first = pip('demo'); say(first.returncode, os.path.exists(home + '/demo.py'), first.stderr.replace('\\n', ' ') if first.returncode else '')
say(pip('stray').returncode != 0, pip('--index-url', 'https://203.0.113.10/simple', 'demo').returncode != 0)
shutil.rmtree(home)"
    );
    let ran = testbed.run(&PYPI, &script);
    assert_eq!(ran.output, "0 True \nTrue True\n", "{ran:?}");
    assert!(testbed.packets_but_dns().iter().all(|packet| *packet == syn("203.0.113.10", 443)));
    let denied = denials(&ran);
    assert!(denied.contains(&String::from("dns stray.example no_rule")), "{denied:?}");
    assert!(denied.contains(&String::from("connect 203.0.113.10 443 no_rule")), "{denied:?}");
    let hosts: Vec<&str> = ran.egress["allowed"].as_array().unwrap().iter().filter_map(|flow| flow["sni"].as_str()).collect();
    assert_eq!(hosts, ["pypi.org", "files.pythonhosted.org"]);
}

/// Somewhere that a sandbox may own.
fn scratch(testbed: &Testbed) -> String {
    let path = testbed.directory().join("scratch");
    std::fs::create_dir(&path).unwrap();
    if testbed.privileged {
        std::os::unix::fs::chown(&path, Some(OWNER), Some(OWNER)).unwrap();
    }
    path.to_str().unwrap().to_owned()
}

test!(Both, the_policy_pypi_installs_packages_that_the_next_run_has, seconds 90);
fn the_policy_pypi_installs_packages_that_the_next_run_has() {
    let mut testbed = Testbed::new();
    let certificate = testbed.index();
    let scratch = scratch(&testbed);
    // The shipped policy but for one more authority to believe, in a variable of pip's own.
    let policy = testbed.policy_of("pypi", &format!("[environment.set]\nPIP_CERT = {certificate:?}"));
    let options = ["--policy", &policy, "--scratch", &scratch];
    let script = "def pip(*words):
    done = subprocess.run(['pip', 'install', '--retries', '0', '--timeout', '5', *words], capture_output=True, text=True)
    return done.returncode, (done.stderr if done.returncode else '') + ('cache' if 'cache' in done.stderr else '')
say(pip('demo'), pip('--user', 'other'))
say(pip('stray')[0] != 0, pip('--index-url', 'https://203.0.113.10/simple', 'third')[0] != 0, attempt('stray.example', 443), attempt('10.0.5.7', 443))";
    let ran = testbed.run_with(&options, script, |_| ());
    assert_eq!(ran.output, "(0, '') (0, '')\nTrue True EAI_-2 ECONNREFUSED\n", "{ran:?}");
    assert!(testbed.packets_but_dns().iter().all(|packet| *packet == syn("203.0.113.10", 443)), "{:?}", testbed.packets_but_dns());
    let denied = denials(&ran);
    for expected in ["dns stray.example no_rule", "connect 203.0.113.10 443 no_rule", "connect 10.0.5.7 443 no_rule"] {
        assert!(denied.iter().any(|denied| denied == expected), "{expected}: {denied:?}");
    }
    let flows = ran.egress["allowed"].as_array().unwrap();
    assert_eq!(flows.iter().filter_map(|flow| flow["rule"].as_str()).collect::<Vec<_>>(), PYPI);
    // What was installed is in home, and home is in the scratch.
    let packets = testbed.packets_but_dns().len();
    let next = testbed.run_with(&options, "import demo, other; say(demo.NAME, other.NAME)", |_| ());
    assert_eq!(next.output, "demo other\n", "{next:?}");
    assert_eq!(testbed.packets_but_dns().len(), packets, "nothing had to be asked for again");
}

test!(Both, the_policy_pypi_believes_no_certificate_of_a_test, seconds 90);
fn the_policy_pypi_believes_no_certificate_of_a_test() {
    let mut testbed = Testbed::new();
    let _certificate = testbed.index();
    let script = "done = subprocess.run(['pip', 'install', '--retries', '0', '--timeout', '5', 'demo'], capture_output=True, text=True)
say(done.returncode, 'certificate' in done.stdout + done.stderr)";
    let ran = testbed.run_under("pypi", script, |_| ());
    assert_eq!(ran.output, "1 True\n", "{ran:?}");
    // As shipped it leads to the index, and only the certificate was wrong.
    assert_eq!((&ran.egress["allowed"][0]["rule"], &ran.egress["denied"]), (&json!("pypi.org:443"), &json!([])), "{ran:?}");
    assert!(testbed.packets_but_dns().iter().all(|packet| *packet == syn("203.0.113.10", 443)));
}

test!(Both, curl_and_python_use_the_network_as_ever, seconds 90);
fn curl_and_python_use_the_network_as_ever() {
    let mut testbed = Testbed::new();
    let certificate = testbed.index();
    let script = format!(
        "import urllib.request
def curl(*words):
    done = subprocess.run(['curl', '-sS', '--max-time', '5', '--cacert', {certificate:?}, *words], capture_output=True, text=True)
    return done.returncode, len(done.stdout) > 0
say(curl('https://pypi.org/simple/demo/'), curl('https://stray.example/'), curl('https://203.0.113.10/'))
say(curl('--connect-to', 'stray.example:443:pypi.org:443', 'https://stray.example/'))
say(len(urllib.request.urlopen('https://pypi.org/simple/demo/', context=ssl.create_default_context(cafile={certificate:?})).read()) > 0)"
    );
    let ran = testbed.run(&PYPI, &script);
    // 6: no such host; 7: refused; 35: cut off in the hello.
    assert_eq!(ran.output, "(0, True) (6, False) (7, False)\n(35, False)\nTrue\n", "{ran:?}");
    assert_eq!(testbed.packets_but_dns().len(), 3, "two answered, one reset before a byte: {:?}", testbed.packets_but_dns());
}

test!(Both, git_clones_by_name_and_from_nowhere_else, seconds 90);
fn git_clones_by_name_and_from_nowhere_else() {
    let mut testbed = Testbed::new();
    let certificate = testbed.index();
    let script = format!(
        "import shutil, tempfile
home = tempfile.mkdtemp()
def clone(url):
    done = subprocess.run(['git', '-c', 'http.sslCAInfo=' + {certificate:?}, 'clone', '--quiet', url, home + '/copy'], capture_output=True, text=True, env={{'HOME': home, 'PATH': '/usr/bin:/bin'}})
    return done.returncode, done.stderr.strip() if done.returncode == 0 else ''
say(clone('https://pypi.org/demo.git'), open(home + '/copy/file').read())
shutil.rmtree(home + '/copy')
say(clone('https://stray.example/demo.git')[0] != 0, clone('https://203.0.113.10/demo.git')[0] != 0, os.path.exists(home + '/copy'))
shutil.rmtree(home)"
    );
    let ran = testbed.run(&PYPI, &script);
    assert_eq!(ran.output, "(0, '') kept\n\nTrue True False\n", "{ran:?}");
    let denied = denials(&ran);
    assert!(denied.contains(&String::from("dns stray.example no_rule")), "{denied:?}");
    assert!(denied.contains(&String::from("connect 203.0.113.10 443 no_rule")), "{denied:?}");
}

test!(Both, node_fetches_by_name_and_from_nowhere_else, seconds 90);
fn node_fetches_by_name_and_from_nowhere_else() {
    let mut testbed = Testbed::new();
    let certificate = testbed.index();
    // Both of node's clients: the one with its own sockets, and the one of the web.
    let script = format!(
        r#"program = """
const ask = (url) => new Promise((answer) => require('https').get(url, (reply) => {{ reply.resume(); answer(reply.statusCode); }}).on('error', (error) => answer(error.code)));
const fetched = (url) => fetch(url).then((reply) => reply.status, (error) => error.cause.code);
(async () => {{
  for (const url of ['https://pypi.org/simple/demo/', 'https://stray.example/', 'https://203.0.113.10/'])
    console.log(await ask(url), await fetched(url));
}})();
"""
done = subprocess.run(['node', '-e', program], capture_output=True, text=True, env={{'PATH': '/usr/bin:/bin', 'NODE_EXTRA_CA_CERTS': {certificate:?}}})
say(done.stdout, done.stderr)"#
    );
    let ran = testbed.run(&PYPI, &script);
    assert_eq!(ran.output, "200 200\nENOTFOUND ENOTFOUND\nECONNREFUSED ECONNREFUSED\n \n", "{ran:?}");
    assert!(testbed.packets_but_dns().iter().all(|packet| *packet == syn("203.0.113.10", 443)));
}
