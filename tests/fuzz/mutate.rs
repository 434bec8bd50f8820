//! New inputs out of old ones.
//!
//! Bytes are changed, moved, repeated and taken from another input, and words of the
//! protocol are put in: most inputs stay near enough to good ones to get past the first
//! check.

/// Numbers that are the same for the same seed (xorshift64*, Vigna 2016).
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        // Zero would stay zero; neighbouring seeds must not begin alike.
        let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        for _ in 0..8 {
            random.next();
        }
        random
    }

    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// A number below `end`; 0 for an `end` of 0.
    pub fn below(&mut self, end: usize) -> usize {
        usize::try_from((self.next() >> 16) % (end.max(1) as u64)).unwrap_or(0)
    }

    fn byte(&mut self) -> u8 {
        self.next().to_be_bytes()[0]
    }

    /// A part of so many bytes, short more often than long.
    fn range(&mut self, length: usize) -> std::ops::Range<usize> {
        let begin = self.below(length);
        let most = if self.below(4) == 0 { length - begin } else { (length - begin).min(16) };
        begin..begin + self.below(most + 1)
    }
}

/// How inputs of one target change.
pub struct Mutator {
    pub words: &'static [&'static [u8]],
    pub longest: usize,
}

impl Mutator {
    /// An input made from one of these, and sometimes from two.
    pub fn mutate(&self, corpus: &[Vec<u8>], random: &mut Random) -> Vec<u8> {
        // The latest brought something new, so they are built upon more often.
        let recent = random.below(2) * (corpus.len() * 3 / 4);
        let mut input = corpus.get(recent + random.below(corpus.len() - recent)).cloned().unwrap_or_default();
        let other = corpus.get(random.below(corpus.len())).map_or(&[][..], |other| other);
        for _ in 0..=random.below(6) {
            self.change(&mut input, other, random);
        }
        input.truncate(self.longest);
        input
    }

    fn change(&self, input: &mut Vec<u8>, other: &[u8], random: &mut Random) {
        let at = random.below(input.len());
        match random.below(12) {
            0 => self.set(input, at, |byte, random| byte ^ 1 << random.below(8), random),
            1 => self.set(input, at, |_, random| random.byte(), random),
            2 => self.set(input, at, |byte, _| byte.wrapping_add(1), random),
            3 => self.set(input, at, |byte, _| byte.wrapping_sub(1), random),
            4 => self.set(input, at, |_, random| [0, 1, 0x7f, 0x80, 0xff, b'\n', b'\r', b' '][random.below(8)], random),
            5 => drop(input.drain(random.range(input.len()))),
            6 => {
                let piece = input[random.range(input.len())].to_vec();
                splice(input, at..at, &piece);
            }
            7 => {
                let piece = &other[random.range(other.len())];
                splice(input, at..at, piece);
            }
            8 => {
                let piece = &other[random.range(other.len())];
                let end = (at + piece.len()).min(input.len());
                splice(input, at..end, piece);
            }
            9 => input.truncate(at),
            _ => {
                let word = self.words.get(random.below(self.words.len())).copied().unwrap_or_default();
                let end = if random.below(2) == 0 { at } else { (at + word.len()).min(input.len()) };
                splice(input, at..end, word);
            }
        }
    }

    fn set(&self, input: &mut [u8], at: usize, to: impl Fn(u8, &mut Random) -> u8, random: &mut Random) {
        if let Some(byte) = input.get_mut(at) {
            *byte = to(*byte, random);
        }
    }
}

fn splice(input: &mut Vec<u8>, range: std::ops::Range<usize>, piece: &[u8]) {
    drop(input.splice(range, piece.iter().copied()));
}
