//! Hostile bytes for every parser of hostile bytes, for as long as one likes.
//!
//! Inputs grow out of good ones by mutation. Built by `tests/fuzz/run`, with the compiler's
//! own coverage counters, an input that reaches new code is kept and built upon; built by
//! plain cargo it is blind mutation, and reports that. A target ends the program when it panics,
//! when what it promises does not hold, or when one input takes ten seconds; the input is
//! kept in a file. What no input reached is not proved.
//!
//! usage: stockade-fuzz list
//!        stockade-fuzz TARGET SECONDS SEED   all for every target, each so long; SEED may be left out
//!        stockade-fuzz TARGET FILE           one input once more
//!        stockade-fuzz keep TARGET SECONDS   then prints the fewest inputs that reach as much, for tests/fuzz/corpus
#![forbid(unsafe_code)]

mod corpus;
mod coverage;
mod engine;
mod mutate;
mod targets;

use std::{env, fs, io::Write, process::ExitCode, time::Duration};

use coverage::Coverage;
use engine::Fuzzer;
use targets::{PLANTED, TARGETS, Target};

fn main() -> ExitCode {
    let words: Vec<String> = env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match run(&words) {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            say(&format!("stockade-fuzz: {message}"));
            ExitCode::from(2)
        }
    }
}

/// One line; its reader may have exited.
fn say(line: &str) {
    let _nobody_reads = writeln!(std::io::stdout(), "{line}");
}

fn run(words: &[&str]) -> Result<(), String> {
    match words {
        ["list"] => {
            TARGETS.iter().for_each(|target| say(&format!("{:<10} {}", target.name, target.about)));
            Ok(())
        }
        ["keep", name, seconds] => {
            let target =
                TARGETS.iter().find(|target| target.name == *name).ok_or_else(|| format!("no target {name}; `list` names them"))?;
            let seconds = seconds.parse().map_err(|_| format!("{seconds} is no number of seconds"))?;
            keep(target, Duration::from_secs(seconds))
        }
        [name, how, seed @ ..] => {
            let chosen: Vec<&Target> = match *name {
                "all" => TARGETS.iter().collect(),
                _ => TARGETS.iter().chain([&PLANTED]).filter(|target| target.name == *name).collect(),
            };
            if chosen.is_empty() {
                return Err(format!("no target {name}; `list` names them"));
            }
            let Ok(seconds) = how.parse() else { return replay(&chosen, how) };
            let seed = match seed {
                [] => now(),
                [seed] => seed.parse().map_err(|_| format!("{seed} is no seed"))?,
                _ => return Err(String::from("too many words")),
            };
            chosen.into_iter().try_for_each(|target| fuzz(target, Duration::from_secs(seconds), seed))
        }
        _ => Err(String::from("usage: stockade-fuzz list | TARGET SECONDS [SEED] | TARGET FILE | keep TARGET SECONDS")),
    }
}

fn now() -> u64 {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(1, |now| now.as_secs())
}

fn keep(target: &'static Target, time: Duration) -> Result<(), String> {
    let coverage = Coverage::open().map_err(|error| format!("the counters cannot be read: {error}"))?;
    let coverage = coverage.ok_or("without coverage it is unknown which inputs are worth keeping: tests/fuzz/run --keep")?;
    engine::watch(target);
    let mut fuzzer = Fuzzer::new(target, Some(coverage), now());
    fuzzer.run(time);
    fuzzer.fewest().iter().for_each(|input| say(&corpus::line(input)));
    Ok(())
}

fn replay(chosen: &[&Target], file: &str) -> Result<(), String> {
    let [target] = chosen else { return Err(format!("{file} is no number of seconds")) };
    let input = fs::read(file).map_err(|error| format!("{file}: {error}"))?;
    (target.run)(&input);
    say("passed");
    Ok(())
}

fn fuzz(target: &'static Target, time: Duration, seed: u64) -> Result<(), String> {
    let coverage = Coverage::open().map_err(|error| format!("the counters cannot be read: {error}"))?;
    engine::watch(target);
    let mut fuzzer = Fuzzer::new(target, coverage, seed);
    let tally = fuzzer.run(time);
    let guided = match tally.reached {
        Some(reached) => format!("{reached} counters reached, {} inputs kept", tally.kept),
        None => String::from("without coverage"),
    };
    say(&format!("{:<10} {} runs in {} s, {guided}, seed {seed}", target.name, tally.runs, time.as_secs()));
    Ok(())
}
