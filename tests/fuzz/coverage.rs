//! Which code an input reached, from the compiler's coverage counters.
//!
//! With `-C instrument-coverage` and the runtime's continuous mode (`%c` in
//! LLVM_PROFILE_FILE) the counters lie in a file that is mapped into this very program. So
//! they are read like any file, and no unsafe code and no nightly compiler is needed. The
//! file's layout does not matter: a word that was zero and is not any more is new.

use std::{env, fs::File, io, os::unix::fs::FileExt};

const WORD: usize = 8;

/// The counters of this program.
pub struct Coverage {
    file: File,
    now: Vec<u8>,
    reached: Vec<bool>,
    /// Words that were not zero at the beginning: what is no counter, and the start-up.
    at_first: usize,
}

impl Coverage {
    /// Opens the counters; none where the program was built or started without.
    pub fn open() -> io::Result<Option<Self>> {
        let Some(path) = env::var("LLVM_PROFILE_FILE").ok().filter(|path| path.contains("%c")) else { return Ok(None) };
        let file = File::open(path.replace("%c", ""))?;
        let length = usize::try_from(file.metadata()?.len()).unwrap_or(0) / WORD * WORD;
        if length == 0 {
            return Err(io::Error::other("the file of counters is empty"));
        }
        let mut coverage = Coverage { file, now: vec![0; length], reached: vec![false; length / WORD], at_first: 0 };
        coverage.at_first = coverage.new_words()?.len();
        Ok(Some(coverage))
    }

    /// Counters that were reached since the beginning.
    pub fn reached(&self) -> usize {
        self.reached.iter().filter(|reached| **reached).count() - self.at_first
    }

    /// The counters as they stand.
    pub fn look(&mut self) -> io::Result<Vec<u8>> {
        self.file.read_exact_at(&mut self.now, 0)?;
        Ok(self.now.clone())
    }

    /// Words that were reached for the first time since this was last asked.
    pub fn new_words(&mut self) -> io::Result<Vec<usize>> {
        self.file.read_exact_at(&mut self.now, 0)?;
        let mut new = Vec::new();
        for (index, (word, reached)) in self.now.chunks_exact(WORD).zip(&mut self.reached).enumerate() {
            if !*reached && word != [0; WORD] {
                *reached = true;
                new.push(index);
            }
        }
        Ok(new)
    }
}

/// Whether a word differs between two looks.
pub fn differs(before: &[u8], after: &[u8], word: usize) -> bool {
    let range = word * WORD..(word + 1) * WORD;
    before.get(range.clone()) != after.get(range)
}

/// Every word that differs between two looks.
pub fn differing(before: &[u8], after: &[u8]) -> Vec<usize> {
    let words = before.chunks_exact(WORD).zip(after.chunks_exact(WORD)).enumerate();
    words.filter(|(_, (one, other))| one != other).map(|(word, _)| word).collect()
}
