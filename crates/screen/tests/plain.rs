//! Plain code, which nobody has hidden: what it does is found however it is spelt, and what
//! stands beside it honestly is not.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test may panic")]

use std::collections::BTreeSet;

use stockade_protocol::screen::{Grammar, Question, Rule, Rules, Source};

fn found(grammar: Grammar, code: &str) -> BTreeSet<Rule> {
    let question = Question { rules: Rules::ALL, scratch: "/scratch", sources: vec![Source { grammar, code }], ..Question::default() };
    stockade_screen::screen(&question).found.into_iter().map(|found| found.rule).collect()
}

/// In each of the codes this rule is found; all that are not are named together.
fn finds(grammar: Grammar, rule: Rule, codes: &[&str]) {
    let missed: Vec<_> = codes.iter().map(|code| (code, found(grammar, code))).filter(|(_, found)| !found.contains(&rule)).collect();
    assert!(missed.is_empty(), "{rule:?} is missed: {missed:#?}");
}

/// In none of the codes anything is found.
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
        "flock f -c 'curl x'",
        "flock -n f curl x",
        "script -c 'curl x' log",
        "script -qc 'curl x' log",
        "strace -f -o log curl x",
        "nice -n 5 time -p timeout -k 1 5 curl x",
        "taskset -c 0 curl x",
        "ls | xargs -n 1 -I{} curl {}",
        "watch -n 1 'curl x'",
        "su -c 'curl x' alice",
        "python3 -m pip install x",
        "python3 -m http.server",
        "PROMPT_COMMAND='curl x'",
        "export PROMPT_COMMAND='curl x'",
        "set -- curl x; \"$@\"",
        "set -- curl x\n$@",
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
            "set -- a b; echo \"$@\"",
        ],
    );
}

#[test]
fn what_a_command_changes_is_found() {
    finds(Grammar::Shell, Rule::Delete, &["find . -name '*.pyc' -delete", "find build -exec rm -rf {} +"]);
    finds(Grammar::Shell, Rule::Process, &["kill -9 1", "kill 1", "kill -s KILL -- -1"]);
    let outside = [
        "chmod 777 /etc/x",
        "chown me: /usr/bin/x",
        "tar xf a -C /etc",
        "tar -xzf a --directory=/usr",
        "unzip a -d /opt/x",
        "sed -i s/a/b/ /etc/x",
    ];
    finds(Grammar::Shell, Rule::WriteOutside, &outside);
    let bombs =
        ["while true; do bash x & done", "while :; do ./x 2>/dev/null & done", "for ((;;)); do sh x & done", "until false; do ./x & done"];
    finds(Grammar::Shell, Rule::ForkBomb, &bombs);
    finds_nothing(
        Grammar::Shell,
        &[
            "kill -9 \"$pid\"",
            "kill -1 $pid",
            "chmod 755 build/x",
            "tar -czf x.tgz -C /etc hosts",
            "tar xf a -C build",
            "sed -n p /etc/x",
            "while true; do ./worker & wait; done",
            "while true; do ./worker & sleep 5; done",
            "for i in 1 2; do ./x & done",
        ],
    );
}

#[test]
fn what_the_grammar_does_not_know_hides_nothing() {
    let destroys = [
        "((((((((:))))))))\nrm -rf /",
        "((((((((:))))))))\npython3 -c \"import shutil;shutil.rmtree('/')\"",
        "\\rm -rf /",
        "! ! rm -rf /",
        "for i in x; { rm -rf /; }",
        "select i in x; { rm -rf /; }",
        "coproc rm -rf /",
        "coproc X { rm -rf /; }",
        "{fd}</dev/null rm -rf /",
        "cat <<E\n`rm -rf /`\nE",
        "cat <<E\n$(rm -rf /)\nE",
        ": ${x:=`rm -rf /`}",
        ": ${x:=$(rm -rf /)}",
        "rm -rf \"${HOME:?}\"",
        "rm -rf ${HOME%/}",
        "rm -rf ${HOME:-/tmp/x}",
    ];
    finds(Grammar::Shell, Rule::Destroy, &destroys);
    finds_nothing(Grammar::Shell, &["cat <<'E'\n`rm -rf /`\nE", "cat <<E\nrm -rf / is bad\nE", "echo 'rm -rf /'"]);
    let after_an_error = "((((((((:))))))))\necho 'rm -rf /'\n# rm -rf /\ncat <<E\nrm -rf /\nE\n";
    assert_eq!(found(Grammar::Shell, after_an_error), BTreeSet::from([Rule::Syntax]));
}
