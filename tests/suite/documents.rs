//! README and the pages of `stockade help`: every command in them is run, and prints what stands
//! below it.
//!
//! A block `console` has commands after `$ `, continued by `\`, and below each what it prints on
//! stdout and stderr; `…` in a line stands for any text, and alone for any lines. All blocks of a
//! page run in one directory, in their order. `file=NAME` after a block's language writes it there.
//! `needs=…` says what a host for tests does not have; such a block is counted and not run.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use crate::support::{
    exec::{program_path, text},
    runner::{directory, test},
    timeouts::scaled,
};

/// A fenced block: the line of its fence, what stands behind that, and its lines.
struct Block {
    line: usize,
    info: Vec<String>,
    body: Vec<String>,
}

impl Block {
    fn is(&self, language: &str) -> bool {
        self.info.first().is_some_and(|first| first == language)
    }

    fn option(&self, name: &str) -> Option<&str> {
        self.info.iter().find_map(|word| word.strip_prefix(name)?.strip_prefix('='))
    }
}

fn blocks(page: &str) -> Vec<Block> {
    let mut found = Vec::new();
    let mut open: Option<Block> = None;
    for (index, line) in page.lines().enumerate() {
        match (&mut open, line.strip_prefix("```")) {
            (None, Some(info)) => {
                open = Some(Block { line: index + 1, info: info.split_whitespace().map(str::to_owned).collect(), body: Vec::new() });
            }
            (Some(_), Some("")) => found.extend(open.take()),
            (Some(block), _) => block.body.push(line.to_owned()),
            (None, None) => {}
        }
    }
    assert!(open.is_none(), "a block is not closed");
    found
}

/// The commands of a block, each with the lines that it prints.
fn commands(block: &Block) -> Vec<(String, Vec<String>)> {
    let mut all: Vec<(String, Vec<String>)> = Vec::new();
    let mut continued = false;
    for line in &block.body {
        match (line.strip_prefix("$ "), all.last_mut()) {
            (Some(command), _) if !continued => all.push((command.to_owned(), Vec::new())),
            (_, Some((command, _))) if continued => command.push_str(&format!("\n{line}")),
            (_, Some((_, printed))) => printed.push(line.clone()),
            (_, None) => panic!("line {}: output before a command", block.line),
        }
        continued = line.ends_with('\\') && (continued || line.starts_with("$ "));
    }
    all
}

/// Whether a line is as it was written, with `…` for any text.
fn fits(line: &str, wanted: &str) -> bool {
    let parts: Vec<&str> = wanted.split('…').collect();
    let [first, middle @ .., last] = parts.as_slice() else { return line == wanted };
    let Some(mut rest) = line.strip_prefix(first) else { return false };
    for part in middle {
        let Some(at) = rest.find(part) else { return false };
        rest = &rest[at + part.len()..];
    }
    rest.ends_with(last)
}

/// The same of lines, with a line `…` for any lines.
fn all_fit(lines: &[&str], wanted: &[String]) -> bool {
    match wanted {
        [] => lines.is_empty(),
        [first, others @ ..] if first.trim() == "…" => (0..=lines.len()).any(|skipped| all_fit(&lines[skipped..], others)),
        [first, others @ ..] => lines.split_first().is_some_and(|(line, rest)| fits(line, first) && all_fit(rest, others)),
    }
}

/// Runs a page in a directory of its own; how many commands, and how many need another host.
fn follow(page: &Path, faults: &mut Vec<String>) -> (usize, usize) {
    let name = page.file_stem().unwrap().to_str().unwrap();
    let place = directory().join("pages").join(name);
    let home = directory().join("homes").join(name);
    for directory in [&place, &home] {
        fs::create_dir_all(directory).unwrap();
    }
    let program = program_path().unwrap();
    let path = format!("{}:/usr/local/bin:/usr/bin:/bin", text(program.parent().unwrap()));
    let (mut run, mut left_out) = (0, 0);
    for block in blocks(&fs::read_to_string(page).unwrap()) {
        let at = format!("{name}.md:{}", block.line);
        let contents = block.body.join("\n") + "\n";
        if let Some(file) = block.option("file") {
            fs::write(place.join(file), &contents).unwrap();
        }
        match block.info.first().map(String::as_str) {
            Some("json") if serde_json::from_str::<serde_json::Value>(&contents).is_err() => faults.push(format!("{at}: no JSON")),
            Some("toml") if contents.parse::<toml::Table>().is_err() => faults.push(format!("{at}: no TOML")),
            None => faults.push(format!("{at}: a block without a language")),
            _ => {}
        }
        if !block.is("console") {
            continue;
        }
        if block.option("needs").is_some() {
            left_out += commands(&block).len();
            continue;
        }
        for (command, wanted) in commands(&block) {
            let limit = scaled(Duration::from_secs(60)).as_secs().to_string();
            let output = Command::new("timeout")
                .args([&limit, "sh", "-c", &format!("exec 2>&1\n{command}")])
                .env_clear()
                .envs([("PATH", path.as_str()), ("HOME", text(&home)), ("LANG", "C.UTF-8")])
                .current_dir(&place)
                .output()
                .unwrap();
            run += 1;
            let said = String::from_utf8_lossy(&output.stdout).into_owned();
            if !all_fit(&said.lines().collect::<Vec<_>>(), &wanted) {
                faults.push(format!("{at}: $ {command}\nprints\n{said}in place of\n{}\n", wanted.join("\n")));
            }
        }
    }
    (run, left_out)
}

fn pages() -> Vec<PathBuf> {
    let repo = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_path_buf();
    let repo = std::env::var_os("CARGO_MANIFEST_DIR").map_or(repo, |tests| PathBuf::from(tests).parent().unwrap().to_path_buf());
    let mut pages = vec![repo.join("README.md")];
    pages.extend(fs::read_dir(repo.join("crates/cli/help")).unwrap().map(|entry| entry.unwrap().path()));
    pages.sort();
    pages
}

test!(RootlessOnly, every_command_of_the_documents_prints_what_they_say, needs [Program("jq")], seconds 600);
fn every_command_of_the_documents_prints_what_they_say() {
    let mut faults = Vec::new();
    let counts: Vec<(usize, usize)> = pages().iter().map(|page| follow(page, &mut faults)).collect();
    let (run, left_out) = counts.iter().fold((0, 0), |sum, count| (sum.0 + count.0, sum.1 + count.1));
    println!("{} pages: {run} commands run, {left_out} that need root, systemd, a network or packages are not", counts.len());
    assert!(faults.is_empty(), "{}", faults.join("\n"));
    assert!(run >= 60, "{run}");
}

test!(Both, what_documents_print_is_compared);
fn what_documents_print_is_compared() {
    let wanted = |lines: &[&str]| lines.iter().map(|line| (*line).to_owned()).collect::<Vec<_>>();
    assert!(all_fit(&["a 12 b", "c", "d"], &wanted(&["a … b", "…", "d"])) && all_fit(&[], &wanted(&["…"])));
    assert!(!all_fit(&["a 12 c"], &wanted(&["a … b"])) && !all_fit(&["a"], &wanted(&["a", "b"])) && !all_fit(&["a", "b"], &wanted(&["a"])));
}
