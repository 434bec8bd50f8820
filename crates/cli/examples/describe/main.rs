//! Writes what is made of the command line's definitions, the policy format and the documents:
//! manual pages.
//!
//! usage: describe DIR YYYY-MM-DD     into DIR/man
//!
//! For `scripts/package`. An example and no part of the program, which stays as small as it
//! is. Nothing is run. The date stands in the pages, and no clock is read.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use clap::CommandFactory;

#[expect(dead_code, reason = "the program reads what is only described here")]
#[path = "../../src/args.rs"]
mod args;
mod manual;
mod markdown;
#[path = "../../src/pages.rs"]
mod pages;
mod roff;

fn main() -> io::Result<()> {
    let mut words = std::env::args_os().skip(1);
    let (Some(into), Some(date), None) = (words.next(), words.next(), words.next()) else {
        return Err(io::Error::other("usage: describe DIR YYYY-MM-DD"));
    };
    let (into, date) = (PathBuf::from(into), date.to_string_lossy().into_owned());
    for page in manual::pages(command(), &date)? {
        write(&into.join("man"), &page.file_name(), &page.text)?;
    }
    Ok(())
}

/// The program's definitions. `help policy show` says what `policy show --help` does, so it has
/// no page of its own.
fn command() -> clap::Command {
    let quiet = |command: clap::Command| command.disable_help_subcommand(true);
    let mut command = quiet(args::Cli::command()).mut_subcommand("policy", quiet);
    command.build();
    command
}

fn write(directory: &Path, name: &str, text: &str) -> io::Result<()> {
    fs::create_dir_all(directory)?;
    fs::write(directory.join(name), text)
}
