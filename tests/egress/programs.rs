//! Real programs, unmodified and without a word of configuration about a proxy.

use crate::{
    rig::{Rig, denials, syn},
    tests,
};

tests![pip_installs_from_the_index_and_from_nowhere_else, curl_and_python_use_the_network_as_ever];

/// The rules of the policy `pypi`.
const PYPI: [&str; 2] = ["pypi.org:443", "files.pythonhosted.org:443"];

fn pip_installs_from_the_index_and_from_nowhere_else() {
    let mut rig = Rig::new();
    let certificate = rig.index();
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
    let ran = rig.run(&PYPI, &script);
    assert_eq!(ran.output, "0 True \nTrue True\n", "{ran:?}");
    assert!(rig.packets_but_dns().iter().all(|packet| *packet == syn("203.0.113.10", 443)));
    let denied = denials(&ran);
    assert!(denied.contains(&String::from("dns stray.example no_rule")), "{denied:?}");
    assert!(denied.contains(&String::from("connect 203.0.113.10 443 no_rule")), "{denied:?}");
    let hosts: Vec<&str> = ran.egress["allowed"].as_array().unwrap().iter().filter_map(|flow| flow["sni"].as_str()).collect();
    assert_eq!(hosts, ["pypi.org", "files.pythonhosted.org"]);
}

fn curl_and_python_use_the_network_as_ever() {
    let mut rig = Rig::new();
    let certificate = rig.index();
    let script = format!(
        "import urllib.request
def curl(*words):
    done = subprocess.run(['curl', '-sS', '--max-time', '5', '--cacert', {certificate:?}, *words], capture_output=True, text=True)
    return done.returncode, len(done.stdout) > 0
say(curl('https://pypi.org/simple/demo/'), curl('https://stray.example/'), curl('https://203.0.113.10/'))
say(curl('--connect-to', 'stray.example:443:pypi.org:443', 'https://stray.example/'))
say(len(urllib.request.urlopen('https://pypi.org/simple/demo/', context=ssl.create_default_context(cafile={certificate:?})).read()) > 0)"
    );
    let ran = rig.run(&PYPI, &script);
    // 6: no such host; 7: refused; 35: cut off in the hello.
    assert_eq!(ran.output, "(0, True) (6, False) (7, False)\n(35, False)\nTrue\n", "{ran:?}");
    assert_eq!(rig.packets_but_dns().len(), 3, "two answered, one reset before a byte: {:?}", rig.packets_but_dns());
}
