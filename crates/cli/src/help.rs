//! `stockade help TOPIC`: the pages of crates/cli/help, which the program carries, and what `--help`
//! says of a command.

use std::process::ExitCode;

use crate::{
    USAGE_ERROR,
    args::Cli,
    output::{print_text, warn},
    pages::PAGES,
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
        print_text(text)?;
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
