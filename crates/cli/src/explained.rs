//! Explanations and comparisons of policies as text for a person.
//!
//! Says what it is given, wrapped and indented, and nothing of its own but headings; a list
//! too long to be read is counted. What a policy says of itself stands indented and what it
//! names stands as one word, so that neither can be read as ours.

use stockade_policy::{
    Explanation,
    compare::{Comparison, Difference},
};

use crate::output::visible;

/// Columns of a line.
const WIDTH: usize = 100;
/// Items of a list that a person still reads.
const READABLE: usize = 60;

/// An explanation.
pub(crate) fn explanation(explanation: &Explanation) -> String {
    let mut out = String::new();
    paragraph(&mut out, "", words(&format!("Policy {} ({}), in its own words:", explanation.policy, explanation.origin)));
    paragraph(&mut out, "    ", words(&explanation.description));
    for section in &explanation.sections {
        heading(&mut out, section.title);
        for statement in &section.statements {
            let colon = if statement.items.is_empty() { "" } else { ":" };
            paragraph(&mut out, "- ", words(&format!("{}{colon}", statement.says)));
            match statement.items.len() {
                0 => {}
                many if many > READABLE => paragraph(
                    &mut out,
                    "    ",
                    words(&format!("{many} of them, which `stockade policy show {}` lists", explanation.policy)),
                ),
                _ => paragraph(&mut out, "    ", items(&statement.items)),
            }
        }
    }
    heading(&mut out, &format!("What it allows beyond {}, and what follows", explanation.loosened.against));
    differences(&mut out, &explanation.loosened.differences);
    out
}

/// A comparison of two policies of these names.
pub(crate) fn comparison(first: &str, second: &str, comparison: &Comparison) -> String {
    let mut out = String::new();
    for (title, list) in [
        (format!("{second} allows, and {first} does not"), &comparison.more),
        (format!("{first} allows, and {second} does not"), &comparison.less),
        (String::from("Otherwise, and neither more nor less"), &comparison.other),
    ] {
        heading(&mut out, &title);
        differences(&mut out, list);
    }
    let undecided = comparison.more.iter().filter(|difference| !difference.certain).count();
    let verdict = match (comparison.more.len(), undecided) {
        (0, _) => format!("{second} allows nothing that {first} does not."),
        (all, 0) => format!("{second} allows more than {first}: {all} differences."),
        (all, some) => format!("{second} allows more than {first}, as far as can be decided: {all} differences, {some} of them undecided."),
    };
    out.push('\n');
    paragraph(&mut out, "", words(&verdict));
    out
}

fn heading(out: &mut String, title: &str) {
    if !out.is_empty() {
        out.push('\n');
    }
    paragraph(out, "", words(title));
}

fn differences(out: &mut String, list: &[Difference]) {
    if list.is_empty() {
        paragraph(out, "- ", words("nothing"));
    }
    for difference in list {
        let colon = if difference.items.is_empty() { "" } else { ":" };
        let mut line = words(&format!("{}{colon}", difference.says));
        line.extend(items(&difference.items));
        line.push(format!("({})", visible(&difference.key)));
        paragraph(out, "- ", line);
        if !difference.certain {
            paragraph(out, "    ", words("this cannot be decided, and so counts as more"));
        }
        if let Some(follows) = &difference.follows {
            paragraph(out, "    ", words(follows));
        }
    }
}

fn words(text: &str) -> Vec<String> {
    visible(text).split_whitespace().map(str::to_owned).collect()
}

/// What a policy names: a word each, whatever it holds.
fn items(list: &[String]) -> Vec<String> {
    let last = list.len().saturating_sub(1);
    let word = |(index, item): (usize, &String)| {
        let comma = if index < last { "," } else { "" };
        // A path may hold what would look like more than one, or like words of ours.
        let plain = !item.starts_with('/') || !item.contains([' ', ',', '"', '(']);
        let item = visible(item);
        if plain { format!("{item}{comma}") } else { format!("\"{}\"{comma}", item.replace('"', "\\\"")) }
    };
    list.iter().enumerate().map(word).collect()
}

/// Words in lines of bounded width; those after the first stand under its first letter.
fn paragraph(out: &mut String, mark: &str, words: Vec<String>) {
    let indent = " ".repeat(mark.len());
    let mut line = String::from(mark);
    let mut empty = true;
    for word in words {
        if !empty && line.chars().count() + 1 + word.chars().count() > WIDTH {
            out.push_str(&line);
            out.push('\n');
            line.clone_from(&indent);
            empty = true;
        }
        if !empty {
            line.push(' ');
        }
        line.push_str(&word);
        empty = false;
    }
    out.push_str(&line);
    out.push('\n');
}
