//! Writes what is made of the command line's definitions: manual pages and completions.
//!
//! usage: describe DIR      into DIR/man, DIR/bash, DIR/zsh and DIR/fish
//!
//! For `scripts/package`. An example and no part of the program, which stays as small as it
//! is; nothing of `stockade` but its definitions is in here, and nothing is run.

use std::{
    ffi::OsString,
    fs, io,
    path::{Path, PathBuf},
};

use clap::CommandFactory;
use clap_complete::{Shell, generate_to};

#[expect(dead_code, reason = "the program reads what is only described here")]
#[path = "../src/args.rs"]
mod args;

fn main() -> io::Result<()> {
    let into = std::env::args_os().nth(1).map(PathBuf::from).ok_or_else(|| io::Error::other("usage: describe DIR"))?;
    // `help policy show` says what `policy show --help` does: no page of its own.
    let quiet = |command: clap::Command| command.disable_help_subcommand(true);
    let mut command = quiet(args::Cli::command()).mut_subcommand("policy", quiet);
    for (shell, name) in [(Shell::Bash, "bash"), (Shell::Zsh, "zsh"), (Shell::Fish, "fish")] {
        let place = directory(&into, name)?;
        generate_to(shell, &mut command, "stockade", place)?;
    }
    let man = directory(&into, "man")?;
    clap_mangen::generate_to(command, man)
}

fn directory(into: &Path, name: &str) -> io::Result<PathBuf> {
    let path = into.join(OsString::from(name));
    fs::create_dir_all(&path)?;
    Ok(path)
}
