//! The rules against the labelled corpus: everything labelled is found, and nothing else in
//! honest programs, except what is listed here.
//!
//! Most of the corpus existed before the rules. Misses and false alarms are listed, so that the lists
//! only get shorter.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, reason = "a test may panic, and says what it measured")]

use std::{collections::BTreeSet, fs, path::Path};

use stockade_protocol::screen::{Grammar, Question, Rule, Rules, Source};

/// Programs in which a rule misses something.
const MISSED: [&str; 0] = [];
/// Honest programs with a false alarm.
const FALSE_ALARMS: [&str; 0] = [];
/// How many misbehaving and how many honest programs `strict` stops.
const STRICT_STOPS: usize = 177;
const STRICT_ALARMS: usize = 0;
/// The same for `review`, which also holds back honest programs.
const REVIEW_STOPS: usize = 227;
const REVIEW_ALARMS: usize = 29;

struct Program {
    name: String,
    labels: BTreeSet<Rule>,
    found: BTreeSet<Rule>,
}

fn programs(start: &str) -> Vec<Program> {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/corpus");
    let mut files: Vec<_> = fs::read_dir(corpus).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.retain(|path| path.file_name().unwrap().to_str().unwrap().starts_with(start));
    files.sort();
    let mut programs = Vec::new();
    for file in files {
        let grammar = if file.to_str().unwrap().contains("shell") { Grammar::Shell } else { Grammar::Python };
        let text = fs::read_to_string(&file).unwrap();
        for part in text.split("%%%% ").skip(1) {
            let (head, code) = part.split_once('\n').unwrap();
            let (name, labels) = head.split_once(": ").unwrap_or((head, ""));
            let labels = labels.split(", ").filter(|label| !label.is_empty()).map(|label| Rule::from_name(label).unwrap()).collect();
            let sources = vec![Source { grammar, code }];
            let question = Question { rules: Rules::ALL, scratch: "/scratch", sources, ..Question::default() };
            let found = stockade_screen::screen(&question).found.into_iter().map(|found| found.rule).collect();
            programs.push(Program { name: format!("{}:{name}", file.file_stem().unwrap().to_str().unwrap()), labels, found });
        }
    }
    programs
}

#[test]
fn what_misbehaves_is_found() {
    let mut programs = programs("misbehaving");
    programs.extend(self::programs("obfuscated"));
    assert!(programs.len() >= 150, "{}", programs.len());
    let mut missed = Vec::new();
    for program in &programs {
        let missing: Vec<Rule> = program.labels.difference(&program.found).copied().collect();
        if !missing.is_empty() {
            println!("{}: missed {missing:?}, found {:?}", program.name, program.found);
            missed.push(program.name.as_str());
        }
    }
    println!("{} of {} programs that misbehave: everything found", programs.len() - missed.len(), programs.len());
    assert_eq!(missed, MISSED);
}

#[test]
fn honest_programs_have_their_labels_and_nothing_else() {
    let programs = programs("benign");
    assert!(programs.len() >= 150, "{}", programs.len());
    let mut alarmed = Vec::new();
    for program in &programs {
        if program.found != program.labels {
            println!("{}: {:?} for {:?}", program.name, program.found, program.labels);
            alarmed.push(program.name.as_str());
        }
    }
    println!("{} of {} honest programs: told for what they do", programs.len() - alarmed.len(), programs.len());
    assert_eq!(alarmed, FALSE_ALARMS);
}

/// The rules for which a shipped policy stops code, read from its file.
fn stopped_by(policy: &str) -> BTreeSet<Rule> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../policies").join(policy);
    let text = fs::read_to_string(path).unwrap();
    let section = text.split_once("\n[screen]\n").unwrap().1.split("\n[").next().unwrap();
    let stops = |line: &str| {
        let (name, action) = line.split_once('=')?;
        let stopping = ["\"deny\"", "\"approve\""].iter().any(|word| action.trim_start().starts_with(word));
        stopping.then(|| Rule::from_name(name.trim())).flatten()
    };
    section.lines().filter_map(stops).collect()
}

/// Each policy stops at least so many misbehaving programs, and at most so many honest ones.
#[test]
fn shipped_policies_stop_what_they_are_for() {
    let mut misbehaving = programs("misbehaving");
    misbehaving.extend(programs("obfuscated"));
    let honest = programs("benign");
    for (policy, least, most) in
        [("default.toml", 0, 0), ("strict.toml", STRICT_STOPS, STRICT_ALARMS), ("review.toml", REVIEW_STOPS, REVIEW_ALARMS)]
    {
        let rules = stopped_by(policy);
        let stopped = |programs: &[Program]| programs.iter().filter(|program| !program.found.is_disjoint(&rules)).count();
        let told = |programs: &[Program]| programs.iter().filter(|program| !program.found.is_empty()).count();
        let (bad, good) = (stopped(&misbehaving), stopped(&honest));
        println!(
            "{policy}: stops {bad} of {} programs that misbehave and {good} of {} honest ones; something is found in {} and {}",
            misbehaving.len(),
            honest.len(),
            told(&misbehaving),
            told(&honest)
        );
        assert!(bad >= least && good <= most, "{policy}: {bad} and {good}");
    }
}
