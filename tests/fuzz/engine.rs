//! The loop: mutate, run, keep what reached new code.
//!
//! Counters are read once for a batch of inputs; only a batch that reached something new
//! is run again one by one, to tell which input it was. Targets keep no state, so a second
//! run does what the first did.

use std::{
    collections::BTreeSet,
    env, fs,
    path::PathBuf,
    sync::{
        Mutex, Once,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use crate::{
    corpus,
    coverage::{Coverage, differing, differs},
    mutate::{Mutator, Random},
    say,
    targets::Target,
};

const BATCH: usize = 64;
/// Bytes of an input that is kept in the tree.
const MAX_KEPT_LEN: usize = 1024;
/// Longer than any input may take on a busy machine.
const RUN_TIMEOUT: Duration = Duration::from_secs(10);

/// What is being run: named in the report of a failure.
static CURRENT: Mutex<(&str, Vec<u8>)> = Mutex::new(("", Vec::new()));
static RUNS: AtomicU64 = AtomicU64::new(0);

/// What one target's time brought.
pub struct Tally {
    pub runs: u64,
    pub kept: usize,
    pub reached: Option<usize>,
}

/// Grows inputs for one target.
pub struct Fuzzer {
    target: &'static Target,
    coverage: Option<Coverage>,
    random: Random,
    corpus: Vec<Vec<u8>>,
    runs: u64,
}

impl Fuzzer {
    pub fn new(target: &'static Target, coverage: Option<Coverage>, seed: u64) -> Self {
        let corpus = (target.seeds)().into_iter().chain(target.corpus.lines().filter_map(corpus::input)).collect();
        Fuzzer { target, coverage, random: Random::new(seed), corpus, runs: 0 }
    }

    /// Runs for so long, and at least every seed once.
    pub fn run(&mut self, time: Duration) -> Tally {
        let end = Instant::now() + time;
        let seeds = self.corpus.len();
        self.batch(self.corpus.clone(), false);
        while Instant::now() < end {
            self.step();
        }
        let reached = self.coverage.as_ref().map(Coverage::reached);
        Tally { runs: self.runs, kept: self.corpus.len() - seeds, reached }
    }

    /// The fewest inputs, shortest first, that reach what all of them reach beyond the
    /// seeds; none without coverage.
    pub fn fewest(&mut self) -> Vec<Vec<u8>> {
        let mut inputs = (self.target.seeds)();
        let seeds = inputs.len();
        let mut others: Vec<Vec<u8>> = self.corpus.iter().filter(|input| input.len() <= MAX_KEPT_LEN).cloned().collect();
        others.sort_by(|one, other| (one.len(), one).cmp(&(other.len(), other)));
        others.dedup();
        inputs.extend(others);
        let (mut covered, mut fewest) = (BTreeSet::new(), Vec::new());
        for (number, input) in inputs.into_iter().enumerate() {
            let Some(before) = self.look() else { return Vec::new() };
            self.execute(&input);
            let Some(after) = self.look() else { return Vec::new() };
            let known = covered.len();
            covered.extend(differing(&before, &after));
            if number >= seeds && covered.len() > known {
                fewest.push(input);
            }
        }
        fewest
    }

    /// One batch of new inputs.
    pub fn step(&mut self) {
        let mut inputs = Vec::with_capacity(BATCH);
        for _ in 0..BATCH {
            let mutator = Mutator { words: self.target.words, longest: self.target.longest };
            inputs.push(mutator.mutate(&self.corpus, &mut self.random));
        }
        self.batch(inputs, true);
    }

    fn batch(&mut self, inputs: Vec<Vec<u8>>, keep: bool) {
        inputs.iter().for_each(|input| self.execute(input));
        let Some(coverage) = &mut self.coverage else { return };
        let Ok(mut new) = coverage.new_words() else { return };
        for input in inputs {
            if new.is_empty() || !keep {
                return;
            }
            let Some(before) = self.look() else { return };
            self.execute(&input);
            let Some(after) = self.look() else { return };
            let unclaimed = new.len();
            new.retain(|word| !differs(&before, &after, *word));
            if new.len() < unclaimed {
                self.corpus.push(input);
            }
        }
    }

    fn look(&mut self) -> Option<Vec<u8>> {
        self.coverage.as_mut()?.look().ok()
    }

    fn execute(&mut self, input: &[u8]) {
        if let Ok(mut current) = CURRENT.lock() {
            current.0 = self.target.name;
            current.1.clear();
            current.1.extend_from_slice(input);
        }
        (self.target.run)(input);
        self.runs += 1;
        RUNS.fetch_add(1, Ordering::Relaxed);
    }
}

/// From here on a failure keeps its input, and an input that hangs is one.
pub fn watch(_target: &Target) {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let usual = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            usual(info);
            keep_input();
        }));
        thread::spawn(|| {
            let mut last = (RUNS.load(Ordering::Relaxed), Instant::now());
            loop {
                thread::sleep(Duration::from_millis(500));
                let runs = RUNS.load(Ordering::Relaxed);
                if runs != last.0 {
                    last = (runs, Instant::now());
                } else if last.1.elapsed() > RUN_TIMEOUT {
                    say("an input is not done after 10 s");
                    keep_input();
                    std::process::abort();
                }
            }
        });
    });
}

fn keep_input() {
    // The one who runs it does not hold it then.
    let Ok(current) = CURRENT.try_lock() else { return };
    let (target, input) = (current.0, &current.1);
    let file: PathBuf = env::temp_dir().join(format!("stockade-fuzz-{target}-{}", std::process::id()));
    let kept = fs::write(&file, input);
    say(&format!("target {target} failed on this input of {} bytes: {}", input.len(), input.escape_ascii()));
    match kept {
        Ok(()) => say(&format!("kept; again: stockade-fuzz {target} {}", file.display())),
        Err(error) => say(&format!("it could not be kept in {}: {error}", file.display())),
    }
}
