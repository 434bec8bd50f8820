//! Explanations and comparisons of policies as text for a person: lines of `key: value`.
//!
//! It adds headings and colours only, wraps lines, and counts lists that are too long to read. A
//! policy's description is indented and each name from it is one word, so that a policy cannot
//! imitate a heading.

use stockade_policy_tools::{
    Changes, Explanation,
    compare::{Comparison, Difference},
};
use stockade_protocol::text::visible;

use crate::output::{Colour, Painted};

/// Columns of a line.
const WIDTH: usize = 100;
/// Items of a list that is printed whole.
const MAX_ITEMS: usize = 60;
/// Lines of a summary, and items of each.
const MAX_CHANGES: usize = 10;
const MAX_CHANGED_ITEMS: usize = 6;

/// An explanation.
pub(crate) fn explanation(explanation: &Explanation) -> String {
    let mut out = String::new();
    paragraph(&mut out, "", words(&format!("Policy {} ({}):", explanation.policy, explanation.origin)));
    paragraph(&mut out, "    ", words(&explanation.description));
    if let Some(changes) = &explanation.changes {
        summary(&mut out, changes, &explanation.policy);
    }
    for section in &explanation.sections {
        heading(&mut out, section.title);
        for statement in &section.statements {
            let colon = if statement.items.is_empty() { "" } else { ":" };
            paragraph(&mut out, "- ", words(&format!("{}{colon}", statement.text)));
            match statement.items.len() {
                0 => {}
                many if many > MAX_ITEMS => {
                    paragraph(&mut out, "    ", words(&format!("{many} entries: stockade policy show {}", explanation.policy)))
                }
                _ => paragraph(&mut out, "    ", items(&statement.items)),
            }
        }
    }
    if let Some(loosened) = &explanation.loosened {
        heading(&mut out, &format!("Allowed, but not by {}", loosened.against));
        differences(&mut out, &loosened.differences);
    }
    out
}

/// What a policy changes of its base, in about ten lines.
fn summary(out: &mut String, changes: &Changes, policy: &str) {
    let Comparison { more, less, other } = &changes.comparison;
    heading(out, &format!("Changed, compared with {}, which it extends", changes.base));
    let all: Vec<(&str, &Difference)> = [("new", more), ("no longer", less), ("changed", other)]
        .into_iter()
        .flat_map(|(mark, list)| list.iter().map(move |difference| (mark, difference)))
        .collect();
    if all.is_empty() {
        paragraph(out, "- ", words("nothing that code notices"));
    }
    for (mark, difference) in all.iter().take(MAX_CHANGES) {
        let mut line = words(&format!("{mark}: {}", difference.text));
        line.extend(items(difference.items.get(..MAX_CHANGED_ITEMS).unwrap_or(&difference.items)));
        if difference.items.len() > MAX_CHANGED_ITEMS {
            line.push(format!("and {} more", difference.items.len() - MAX_CHANGED_ITEMS));
        }
        paragraph(out, "- ", line);
    }
    if all.len() > MAX_CHANGES {
        let rest = all.len() - MAX_CHANGES;
        paragraph(out, "- ", words(&format!("and {rest} more: stockade policy diff {} {policy}", changes.base)));
    }
}

/// A comparison of two policies of these names: red is what the second loosens, green what it
/// tightens.
pub(crate) fn comparison(first: &str, second: &str, comparison: &Comparison) -> Painted {
    let mut out = Painted::default();
    let lists = [
        (Colour::Bad, format!("Allowed by {second}, not by {first}"), &comparison.more),
        (Colour::Good, format!("Allowed by {first}, not by {second}"), &comparison.less),
        (Colour::Plain, String::from("Other differences"), &comparison.other),
    ];
    for (colour, title, list) in lists {
        let mut text = String::new();
        heading(&mut text, &title);
        out.add(Colour::Plain, text);
        let mut text = String::new();
        differences(&mut text, list);
        // Each line by itself: a pager forgets a colour at the end of a line.
        for line in text.lines() {
            out.add(if list.is_empty() { Colour::Plain } else { colour }, line);
            out.add(Colour::Plain, "\n");
        }
        out.add(Colour::Plain, "\n");
    }
    let undecided = comparison.more.iter().filter(|difference| !difference.certain).count();
    let verdict = match (comparison.more.len(), undecided) {
        (0, _) => format!("{second} allows nothing that {first} does not."),
        (all, 0) => format!("{second} allows more than {first}: {all} differences."),
        (all, some) => format!("{second} allows more than {first}: {all} differences, {some} of them undecided."),
    };
    let mut text = String::new();
    paragraph(&mut text, "", words(&verdict));
    out.add(if comparison.more.is_empty() { Colour::Good } else { Colour::Bad }, text.trim_end());
    out.add(Colour::Plain, "\n");
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
        let mut line = words(&format!("{}{colon}", difference.text));
        line.extend(items(&difference.items));
        line.push(format!("({})", visible(&difference.key)));
        paragraph(out, "- ", line);
        if !difference.certain {
            paragraph(out, "    ", words("undecided, so it counts as more"));
        }
        if let Some(consequence) = &difference.consequence {
            paragraph(out, "    ", words(consequence));
        }
    }
}

fn words(text: &str) -> Vec<String> {
    visible(text).split_whitespace().map(str::to_owned).collect()
}

/// The names from a policy, each as one word.
fn items(list: &[String]) -> Vec<String> {
    let last = list.len().saturating_sub(1);
    let word = |(index, item): (usize, &String)| {
        let comma = if index < last { "," } else { "" };
        // A path may contain what looks like several paths or like our text.
        let plain = !item.starts_with('/') || !item.contains([' ', ',', '"', '(']);
        let item = visible(item);
        if plain { format!("{item}{comma}") } else { format!("\"{}\"{comma}", item.replace('"', "\\\"")) }
    };
    list.iter().enumerate().map(word).collect()
}

/// Words in lines of bounded width, indented below the first word.
pub(crate) fn paragraph(out: &mut String, mark: &str, words: Vec<String>) {
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
