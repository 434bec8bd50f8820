//! `stockade help TOPIC`: the pages of crates/cli/help, which the program carries, and what `--help`
//! says of a command.

use std::process::ExitCode;

use crate::{
    USAGE_ERROR,
    args::Cli,
    output::{print_text, warn},
    pages::PAGES,
    policy_text::paragraph,
};

/// Shows the page or the command that the words name; without a word, the list of pages.
pub(crate) fn show(words: &[String]) -> anyhow::Result<ExitCode> {
    let mut command = Cli::described();
    command.build();
    let [first, ..] = words else {
        let page = |(topic, about, _): &(&str, &str, &str)| format!("  {topic:<16} {about}");
        let pages = PAGES.iter().map(page).collect::<Vec<_>>().join("\n");
        print_text(&format!("{}\nPages (stockade help TOPIC):\n{pages}", command.render_help()))?;
        return Ok(ExitCode::SUCCESS);
    };
    // The manual has the page `operate` under the name `stockade-operate`.
    let named = first.strip_prefix("stockade-").unwrap_or(first);
    if let (Some((.., text)), 1) = (PAGES.iter().find(|(topic, ..)| *topic == named), words.len()) {
        print_text(&for_reading(text))?;
        return Ok(ExitCode::SUCCESS);
    }
    let found = words.iter().try_fold(&mut command, |command, word| command.find_subcommand_mut(word));
    match found {
        Some(command) => print_text(&command.render_long_help().to_string())?,
        None => {
            let topics: Vec<&str> = PAGES.iter().map(|(topic, ..)| *topic).collect();
            warn(&format!("stockade: no page and no command `{}`; there are the pages {}", words.join(" "), topics.join(", ")));
            return Ok(ExitCode::from(USAGE_ERROR));
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// A page as a terminal shows it: paragraphs in lines of bounded width, code indented, and the
/// command that shows the page in place of a link to it.
fn for_reading(page: &str) -> String {
    let mut out = String::new();
    let mut is_code = false;
    for line in page.lines() {
        if let Some(info) = line.strip_prefix("```") {
            is_code = !is_code;
            if let Some(name) = info.split_whitespace().find_map(|word| word.strip_prefix("file=")) {
                out.push_str(&format!("  {name}:\n"));
            }
        } else if is_code {
            out.push_str(&format!("    {line}\n"));
        } else if line.is_empty() || line.starts_with(['#', '|']) {
            out.push_str(&format!("{}\n", without_links(line)));
        } else {
            let (mark, text) = if let Some(item) = line.strip_prefix("- ") { ("- ", item) } else { ("", line) };
            paragraph(&mut out, mark, without_links(text).split_whitespace().map(str::to_owned).collect());
        }
    }
    out
}

/// A line whose links lead to pages of this program, or nowhere.
fn without_links(line: &str) -> String {
    let mut out = String::new();
    let mut rest = line;
    while let Some((before, after)) = rest.split_once("](")
        && let Some((before, text)) = before.rsplit_once('[')
        && let Some((target, after)) = after.split_once(')')
    {
        let page = target.split('#').next().and_then(|file| file.strip_suffix(".md")).unwrap_or_default();
        let is_page = PAGES.iter().any(|(topic, ..)| *topic == page);
        let place = if is_page { format!(" (stockade help {page})") } else { String::new() };
        out.push_str(&format!("{before}{text}{place}"));
        rest = after;
    }
    out + rest
}
