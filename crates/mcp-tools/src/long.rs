//! What a model is given of long text: a head and a tail of a stream, the head of a file or of
//! a list. Lengths are in characters.
//!
//! It cuts and says so; what it leaves out is for the caller to keep.

/// How much of a program's streams, of a file or of a directory a model is given at once.
pub(crate) const MAX_TEXT: usize = 30_000;

/// How much of each of two texts is given: both whole where they fit together, else stderr has
/// at least a third and stdout at least two thirds.
pub(crate) fn shares(output: &str, error: &str) -> (usize, usize) {
    let (output, error) = (output.chars().count(), error.chars().count());
    (MAX_TEXT - error.min(MAX_TEXT / 3), MAX_TEXT - output.min(MAX_TEXT - MAX_TEXT / 3))
}

/// Head and tail of a text that is longer than `share`, with a line between that tells where
/// the rest is; none for one that is not longer.
pub(crate) fn head_and_tail(text: &str, share: usize, place: Option<&str>) -> Option<String> {
    let left_out = text.chars().count().checked_sub(share).filter(|left_out| *left_out > 0)?;
    let half = share / 2;
    let head = &text[..at(text, half)];
    let tail = &text[at(text, half + left_out)..];
    let place = place.map_or_else(|| String::from("print less, or into a file"), |place| format!("the rest is in {place}"));
    Some(format!("{head}\n[stockade: {left_out} characters left out here; {place}]\n{tail}"))
}

/// The head of a text, and whether it is not all of it.
pub(crate) fn head(text: &str) -> (&str, bool) {
    let end = at(text, MAX_TEXT);
    (&text[..end], end < text.len())
}

/// As many of these lines as are given of a list, and how many are left out.
pub(crate) fn lines(lines: impl Iterator<Item = String>, most: usize) -> (Vec<String>, usize) {
    let (mut shown, mut left_out, mut length) = (Vec::new(), 0, 0);
    for line in lines {
        length += line.chars().count() + 1;
        if shown.len() < most && length <= MAX_TEXT { shown.push(line) } else { left_out += 1 }
    }
    (shown, left_out)
}

/// Where the character of this number begins, or the end.
fn at(text: &str, number: usize) -> usize {
    text.char_indices().nth(number).map_or(text.len(), |(position, _)| position)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]

    use super::*;

    #[test]
    fn both_streams_together_are_given_up_to_the_limit_and_neither_takes_all() {
        let long = "é".repeat(MAX_TEXT * 2);
        let (third, rest) = (MAX_TEXT / 3, MAX_TEXT - MAX_TEXT / 3);
        assert_eq!(shares(&long, ""), (MAX_TEXT, third));
        assert_eq!(shares("", &long), (rest, MAX_TEXT));
        assert_eq!(shares(&long, &long), (rest, third));
        assert_eq!(shares(&long, "é").0, MAX_TEXT - 1);
    }

    #[test]
    fn what_fits_is_whole_and_what_does_not_says_how_much_is_missing_and_where_it_is() {
        assert_eq!(head_and_tail("äöü", 3, None), None);
        assert_eq!(
            head_and_tail("aäbcöd", 4, Some("/tmp/x")).unwrap(),
            "aä\n[stockade: 2 characters left out here; the rest is in /tmp/x]\nöd"
        );
        assert!(head_and_tail("abcd", 2, None).unwrap().contains("2 characters left out here; print less"));
        assert_eq!(head("ab"), ("ab", false));
        let (given, cut) = (("é".repeat(MAX_TEXT + 1)), true);
        assert_eq!(head(&given), (&given[..MAX_TEXT * 2], cut));
    }

    #[test]
    fn a_list_is_cut_by_its_lines_and_by_its_length() {
        let of = |count: usize, length: usize| std::iter::repeat_n("x".repeat(length), count);
        assert_eq!(lines(of(3, 1), 2).1, 1);
        assert_eq!(lines(of(2, MAX_TEXT / 2), 10).1, 1);
        assert_eq!(lines(of(2, 10), 10), (vec!["x".repeat(10); 2], 0));
    }
}
