//! What is fuzzed: each target a function that panics when a promise is broken.

mod bytes;
mod command_line;
mod container_images;
mod images;
mod logs;
mod registry;
mod replies;
mod service;
mod speech;
mod texts;
mod words;

/// One parser, how to begin, and what must hold.
pub struct Target {
    pub name: &'static str,
    pub about: &'static str,
    /// Good inputs.
    pub seeds: fn() -> Vec<Vec<u8>>,
    /// Inputs that once reached something new, one a line: see [`crate::corpus`].
    pub corpus: &'static str,
    /// What the protocol is made of.
    pub words: &'static [&'static [u8]],
    /// Bytes of an input.
    pub longest: usize,
    pub run: fn(&[u8]),
}

/// Every target.
pub const TARGETS: &[Target] = &[
    bytes::DNS,
    bytes::ANSWER,
    bytes::PACKET,
    bytes::JOB,
    bytes::EVENT,
    bytes::FINDINGS,
    bytes::MODULES,
    container_images::TAR,
    container_images::LAYER,
    container_images::MANIFEST,
    container_images::COMPRESSED,
    images::IMAGE,
    speech::HELLO,
    speech::HTTP,
    texts::POLICY,
    texts::RULE,
    texts::REQUEST,
    texts::LINE,
    command_line::COMMAND_LINE,
    words::HINTS,
    logs::AUDIT,
    registry::REFERENCE,
    registry::CHALLENGE,
    replies::REPLY,
    service::FACADE,
    service::FRAMES,
];

/// A target with a planted fault, for the fuzzer's own trial: a blind one never finds it.
pub const PLANTED: Target = Target {
    name: "planted",
    about: "a fault behind six bytes",
    seeds: || vec![vec![0; 16]],
    corpus: "",
    words: &[],
    longest: 32,
    run: |input| {
        // Each is a function, and so has its own counter, which is what coverage sees.
        let wanted: [fn(u8) -> bool; 6] =
            [|is| is == b's', |is| is == b'7', |is| is == b'o', |is| is == b'k', |is| is == b'@', |is| is == b'd'];
        let found = input.iter().zip(wanted).take_while(|(is, wanted)| wanted(**is)).count();
        assert!(found < 6, "the planted fault");
    },
};

#[cfg(test)]
mod tests {
    use super::TARGETS;
    use crate::{corpus, engine::Fuzzer};

    /// Blind, short and always the same; `tests/fuzz/run` is the real thing.
    #[test]
    fn every_target_survives_its_seeds_its_corpus_and_some_changes_of_them() {
        for target in TARGETS {
            let mut fuzzer = Fuzzer::new(target, None, 1);
            fuzzer.run(std::time::Duration::ZERO);
            let batches = if ["policy", "layer"].contains(&target.name) { 3 } else { 60 };
            (0..batches).for_each(|_| fuzzer.step());
        }
    }

    #[test]
    fn every_corpus_is_small_sorted_and_without_repetition() {
        for target in TARGETS {
            let lines: Vec<&str> = target.corpus.lines().collect();
            assert!(!lines.is_empty() && target.corpus.len() <= 64 << 10, "{}: {} lines", target.name, lines.len());
            assert!(
                lines.is_sorted_by(|one, other| (one.len(), one) < (other.len(), other)),
                "{}: not sorted, or a line twice",
                target.name
            );
            for line in lines {
                let input = corpus::input(line).unwrap_or_else(|| panic!("{}: {line}", target.name));
                assert_eq!(corpus::line(&input), line, "{}: spelt in another way", target.name);
                assert!(input.len() <= target.longest, "{}: {line}", target.name);
            }
        }
    }
}
