//! `stockade man`: the manual. Section 1 is made from the command line's definitions, sections 5
//! and 7 from the documents and the policy format.
//!
//! It has no text of its own but the names of pages: what is to be said differently is changed
//! where it is made from.

mod markdown;
mod roff;

use std::{
    io,
    path::Path,
    time::{Duration, SystemTime},
};

use anyhow::Context;
use clap::CommandFactory;
use serde_json::{Map, Value};

use self::markdown::{Code, Section};
use crate::{
    ExitCode, USAGE_ERROR,
    args::{self, Cli},
    collected::Destination,
    output::{print_text, warn, write_out},
    pages::PAGES,
};

const OVERVIEW: &str = include_str!("../../../README.md");
const POLICIES: &str = include_str!("../help/policies.md");
const INSTALLING: &str = include_str!("../../../scripts/README.md");
const GRANTS: &str = include_str!("../../../scripts/grants.toml");

/// What a document of the repository is called on a host that has the package.
const PLACES: &[(&str, &str)] = &[
    ("crates/cli/help/policies.md", "stockade-policy(5)"),
    ("policies.md", "stockade-policy(5)"),
    ("scripts/README.md", "stockade-grants(5)"),
    ("tests/THREAT-MODEL.md", "/usr/share/doc/stockade/THREAT-MODEL.md"),
    ("crates/ARCHITECTURE.md", "/usr/share/doc/stockade/ARCHITECTURE.md"),
    ("scripts/apparmor/stockade", "/usr/share/stockade/apparmor/stockade"),
];
/// The page that is of section 5.
const POLICY: &str = "policies";
/// Examples of a command that its page shows, the shortest first.
const MAX_EXAMPLES: usize = 3;

/// Prints the page of a topic or a command, without a word that of the program; or writes all
/// pages into a directory of manuals.
pub(crate) fn run(words: &[String], into: Option<&Path>) -> anyhow::Result<ExitCode> {
    let pages = pages(args::without_nested_help(Cli::command()), &date())?;
    if let Some(into) = into {
        // Through no link that code could have left there.
        let directory = Destination::open(std::path::absolute(into)?, None, true)?;
        stockade_engine::with_callers_rights(|| pages.iter().try_for_each(|page| write(page, &directory)))??;
        print_text(&format!("{} pages in {}; to read one: man -M {} stockade", pages.len(), into.display(), into.display()))?;
        return Ok(ExitCode::SUCCESS);
    }
    let Some(page) = find(&pages, words) else {
        let names: Vec<String> = pages.iter().map(Page::file_name).collect();
        warn(&format!("stockade: no manual page `{}`; there are {}", words.join(" "), names.join(", ")));
        return Ok(ExitCode::from(USAGE_ERROR));
    };
    write_out(page.text.as_bytes())?;
    Ok(ExitCode::SUCCESS)
}

/// The page that these words name: a topic, a command, or a page with its section, such as
/// `stockade-policy.5`.
fn find<'p>(pages: &'p [Page], words: &[String]) -> Option<&'p Page> {
    let typed = words.join("-");
    let name = match typed.as_str() {
        "" | "stockade" => return pages.iter().find(|page| page.file_name() == "stockade.1"),
        POLICY => return pages.iter().find(|page| page.file_name() == "stockade-policy.5"),
        name if name.starts_with("stockade") => name.to_owned(),
        name => format!("stockade-{name}"),
    };
    let exact = pages.iter().find(|page| page.file_name() == name);
    exact.or_else(|| pages.iter().filter(|page| page.name == name).min_by_key(|page| page.section))
}

fn write(page: &Page, into: &Destination<'_>) -> anyhow::Result<()> {
    let name = format!("man{}/{}", page.section, page.file_name());
    into.create_below(Path::new(&name), page.text.as_bytes()).with_context(|| format!("write {} below {}", name, into.path().display()))
}

/// The day that stands in the pages: today, or that of SOURCE_DATE_EPOCH, by which the same
/// sources give the same package (<https://reproducible-builds.org/specs/source-date-epoch/>).
fn date() -> String {
    let fixed = std::env::var("SOURCE_DATE_EPOCH").ok().and_then(|seconds| seconds.parse().ok());
    let at = fixed.and_then(|seconds| SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(seconds)));
    let mut time = stockade_audit::text::time(at.unwrap_or_else(SystemTime::now));
    time.truncate("2026-11-25".len());
    time
}

/// One page.
#[derive(Debug)]
struct Page {
    name: String,
    section: u8,
    text: String,
}

impl Page {
    fn file_name(&self) -> String {
        format!("{}.{}", self.name, self.section)
    }

    fn reference(&self) -> String {
        format!("{}({})", self.name, self.section)
    }
}

/// Every page of the manual, with this date.
///
/// # Errors
/// A document cannot be converted, or lacks a section that a page is made of.
fn pages(command: clap::Command, date: &str) -> io::Result<Vec<Page>> {
    let version = command.get_version().unwrap_or_default().to_owned();
    let head = Head { date, source: format!("stockade {version}") };
    let (overview, policies, installing) = (sections(OVERVIEW)?, sections(POLICIES)?, sections(INSTALLING)?);
    let help = PAGES
        .iter()
        .filter(|(name, ..)| *name != POLICY)
        .map(|(name, about, text)| Ok((*name, *about, sections(text)?)))
        .collect::<io::Result<Vec<_>>>()?;
    let documents = help.iter().map(|(_, _, sections)| sections).chain([&policies, &installing, &overview]);
    let examples: Vec<Code> = documents.flatten().flat_map(|section| section.code.clone()).collect();

    let mut pages = vec![
        head.page("stockade", 7, "run untrusted code in a fresh sandbox of the Linux kernel", overview_text(overview)),
        head.page("stockade-policy", 5, "what a sandbox of stockade allows", policy_text(&policies)?),
        head.page("stockade-grants", 5, "who may run what through root", grants_text(&policies, &installing)?),
    ];
    pages.extend(help.into_iter().map(|(name, about, sections)| head.page(&format!("stockade-{name}"), 7, about, all(sections))));
    command_pages(command, &head, &examples, &mut pages)?;
    let references: Vec<String> = pages.iter().map(Page::reference).collect();
    for page in &mut pages {
        page.text.push_str(&see_also(&page.reference(), &references));
    }
    Ok(pages)
}

struct Head<'a> {
    date: &'a str,
    source: String,
}

impl Head<'_> {
    fn page(&self, name: &str, section: u8, about: &str, body: String) -> Page {
        let title = roff::escape(&name.to_uppercase());
        // Its first line has a table set by tbl(1).
        let mut text = format!("'\\\" t\n.TH {title} {section} {} {} Stockade\n", self.date, roff::argument(&self.source));
        text.push_str(&roff::section("name", &roff::line(&format!("{} \\- {}", roff::escape(name), roff::escape(about)))));
        text.push_str(&body);
        Page { name: name.to_owned(), section, text }
    }
}

fn sections(document: &str) -> io::Result<Vec<Section>> {
    let resolve = |target: &str| {
        let path = target.split('#').next().unwrap_or_default().trim_start_matches("../");
        let file = path.strip_prefix("crates/cli/help/").unwrap_or(path).strip_suffix(".md");
        let page = PAGES
            .iter()
            .filter(|(name, ..)| *name != POLICY)
            .find(|(name, ..)| Some(*name) == file)
            .map(|(name, ..)| format!("stockade-{name}(7)"));
        page.or_else(|| PLACES.iter().find(|(place, _)| path == *place).map(|(_, there)| (*there).to_owned()))
    };
    markdown::sections(document, &resolve)
}

/// What is for readers of the sources.
fn overview_text(overview: Vec<Section>) -> String {
    all(overview.into_iter().filter(|section| !["Install", "Security, contributing, licence"].contains(&section.title.as_str())).collect())
}

/// A whole document. What stands below its title is the description.
fn all(sections: Vec<Section>) -> String {
    let titled = |(index, section): (usize, Section)| roff::section(if index == 0 { "description" } else { &section.title }, &section.body);
    sections.into_iter().enumerate().map(titled).collect()
}

fn named<'s>(sections: &'s [Section], title: &str) -> io::Result<&'s Section> {
    let found = sections.iter().find(|section| section.title == title);
    found.ok_or_else(|| io::Error::other(format!("no document has a section {title:?}, which a manual page is made of")))
}

fn policy_text(policies: &[Section]) -> io::Result<String> {
    named(policies, "Grants")?;
    let mut text = String::new();
    for (index, section) in policies.iter().enumerate().filter(|(_, section)| section.title != "Grants") {
        text.push_str(&roff::section(if index == 0 { "description" } else { &section.title }, &section.body));
        if section.title == "Format" {
            text.push_str(&roff::section("keys", &keys(&stockade_policy::schema())));
        }
    }
    Ok(text)
}

fn grants_text(policies: &[Section], installing: &[Section]) -> io::Result<String> {
    let mut text = roff::section("description", &named(policies, "Grants")?.body);
    for title in ["Through sudo", "Through a socket"] {
        text.push_str(&roff::section(title, &named(installing, title)?.body));
    }
    text.push_str(&roff::section("examples", &roff::verbatim(GRANTS)));
    Ok(text)
}

/// The keys of a policy, table by table, as the schema has them.
fn keys(schema: &Value) -> String {
    let mut text = String::new();
    table("", schema, &mut text);
    text
}

fn table(name: &str, schema: &Value, text: &mut String) {
    let Some(properties) = schema["properties"].as_object() else { return };
    let heading = if name.is_empty() { "above the first section".to_owned() } else { format!("[{name}]") };
    text.push_str(&format!(".SS {}\n", roff::argument(&roff::escape(&heading))));
    if let Some(about) = schema["description"].as_str() {
        text.push_str(&roff::line(&sentence(about)));
    }
    let (tables, values): (Vec<_>, Vec<_>) = properties.iter().partition(|(_, value)| inner(value).is_some());
    for (key, value) in values {
        let about = value["description"].as_str().unwrap_or_default();
        text.push_str(&roff::entry(&format!("\\fB{}\\fR = {}", roff::escape(key), roff::escape(&written(value))), &sentence(about)));
    }
    for (key, value) in tables {
        let (below, named) = inner(value).unwrap_or((value, ""));
        let path = [name, key, named].into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join(".");
        // `max` of the limits.
        if has_same_keys(below, properties) {
            let again = roff::line("The same keys, of the most that a request may ask for; or, under [limits], max = \"same\".");
            text.push_str(&format!(".SS {}\n{again}", roff::argument(&roff::escape(&format!("[{path}]")))));
            continue;
        }
        let mut below = below.clone();
        if let (Value::Object(members), Some(about)) = (&mut below, value.get("description")) {
            members.insert("description".to_owned(), about.clone());
        }
        table(&path, &below, text);
    }
}

/// A table of keys, or of tables with names of one's own.
fn inner(value: &Value) -> Option<(&Value, &'static str)> {
    // `max` of the limits: a table, or one word.
    let value = if value["oneOf"][0]["const"].is_string() { &value["oneOf"][1] } else { value };
    if value["properties"].is_object() {
        return Some((value, ""));
    }
    value["additionalProperties"]["properties"].is_object().then(|| (&value["additionalProperties"], "NAME"))
}

fn has_same_keys(table: &Value, others: &Map<String, Value>) -> bool {
    table["properties"].as_object().is_some_and(|keys| keys.keys().all(|key| others.contains_key(key)))
}

fn sentence(about: &str) -> String {
    let mut letters = about.chars();
    let first = letters.next().map(|first| first.to_uppercase().to_string()).unwrap_or_default();
    let end = if about.is_empty() || about.ends_with('.') { "" } else { "." };
    roff::escape(&format!("{first}{}{end}", letters.as_str()))
}

/// What a value looks like in a policy.
fn written(schema: &Value) -> String {
    if let Some(constant) = schema.get("const") {
        return constant.to_string();
    }
    if let Some(values) = schema["enum"].as_array() {
        return values.iter().map(Value::to_string).collect::<Vec<_>>().join(" | ");
    }
    if let Some(branches) = schema["oneOf"].as_array() {
        // A list, and the same as changes under `extends`.
        let shown = branches.iter().filter(|branch| branch["type"] != "object").map(written);
        return shown.collect::<Vec<_>>().join(" | ");
    }
    match (schema["type"].as_str().unwrap_or_default(), schema["pattern"].as_str()) {
        ("string", Some(pattern)) if pattern.contains("KiB") => "\"256MiB\" | \"none\"".to_owned(),
        ("string", Some(_)) => "\"30s\" | \"none\"".to_owned(),
        ("string", None) => "\"…\"".to_owned(),
        ("array", _) => match schema["items"]["enum"].as_array() {
            Some(values) => format!("[{}]", values.iter().map(Value::to_string).collect::<Vec<_>>().join(", ")),
            None => "[\"…\", …]".to_owned(),
        },
        ("boolean", _) => "true | false".to_owned(),
        ("object", _) => match schema["additionalProperties"]["enum"].as_array() {
            Some(values) => format!("{{ NAME = {}, … }}", values.iter().map(Value::to_string).collect::<Vec<_>>().join(" | ")),
            None => "{ NAME = \"…\", … }".to_owned(),
        },
        _ => "N".to_owned(),
    }
}

fn command_pages(command: clap::Command, head: &Head<'_>, examples: &[Code], pages: &mut Vec<Page>) -> io::Result<()> {
    for below in command.get_subcommands().filter(|below| !below.is_hide_set()).cloned() {
        command_pages(below, head, examples, pages)?;
    }
    let words = command.get_bin_name().unwrap_or_else(|| command.get_name()).to_owned();
    let name = words.replace(' ', "-");
    let is_leaf = !command.has_subcommands();
    let manual = clap_mangen::Man::new(command).title(name.to_uppercase()).date(head.date).source(head.source.as_str()).manual("Stockade");
    let mut bytes = Vec::new();
    manual.render(&mut bytes)?;
    let mut text = String::from_utf8(bytes).map_err(io::Error::other)?;
    let mut fitting: Vec<&Code> = examples.iter().filter(|code| is_leaf && calls(&code.text, &words)).collect();
    fitting.sort_by_key(|code| code.text.lines().count());
    fitting.truncate(MAX_EXAMPLES);
    if !fitting.is_empty() {
        let shown = fitting.iter().map(|code| {
            let introduction = code.introduction.as_deref().map(roff::paragraph).unwrap_or_default();
            format!("{introduction}{}", roff::verbatim(&code.text))
        });
        text.push_str(&roff::section("examples", &shown.collect::<String>()));
    }
    pages.push(Page { name, section: 1, text });
    Ok(())
}

/// Whether what is typed in a block of code calls this command. What its programs print is no
/// call.
fn calls(block: &str, words: &str) -> bool {
    let mut typed = false;
    block.lines().any(|line| {
        typed = line.starts_with("$ ") || typed && !line.starts_with(['{', '[']);
        let found = typed
            && line.match_indices(words).any(|(at, _)| {
                let (before, after) = (&line[..at], &line[at + words.len()..]);
                before.chars().next_back().is_none_or(|last| last == ' ') && after.chars().next().is_none_or(|next| next == ' ')
            });
        typed = typed && line.trim_end().ends_with(['|', '\\', '\'']);
        found
    })
}

/// The pages around one: those below it, those beside it below the same command, and the four
/// that are for all.
fn see_also(own: &str, references: &[String]) -> String {
    let stem = |reference: &str| reference.split('(').next().unwrap_or_default().to_owned();
    let name = stem(own);
    let parent = name.rsplit_once('-').map_or("", |(parent, _)| parent);
    let is_near = |other: &&String| {
        let above = stem(other);
        let above = above.rsplit_once('-').map_or("", |(above, _)| above);
        let is_command = own.ends_with("(1)") && other.ends_with("(1)");
        !other.ends_with("(1)") || **other == *"stockade(1)" || is_command && (above == name || above == parent && parent.contains('-'))
    };
    let mut near: Vec<&String> = references.iter().filter(|other| *other != own).filter(is_near).collect();
    near.sort_by_key(|reference| (reference.rsplit_once('(').map(|(_, section)| section.to_owned()), reference.as_str()));
    let shown: Vec<String> = near
        .iter()
        .filter_map(|reference| reference.split_once('('))
        .map(|(name, section)| format!("\\fB{}\\fR({section}", roff::escape(name)))
        .collect();
    roff::section("see also", &roff::line(&shown.join(", ")))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]
    use super::*;

    fn made() -> Vec<Page> {
        pages(args::without_nested_help(Cli::command()), "2026-01-02").unwrap()
    }

    fn text<'p>(pages: &'p [Page], name: &str) -> &'p str {
        &pages.iter().find(|page| page.file_name() == name).unwrap().text
    }

    #[test]
    fn every_page_has_its_date_name_and_neighbours() {
        for page in made() {
            for part in ["2026-01-02", ".SH NAME\n", ".SH \"SEE ALSO\"\n", "stockade 0."] {
                assert!(page.text.replace(".SH \"NAME\"", ".SH NAME").contains(part), "{}: {part}", page.file_name());
            }
        }
    }

    #[test]
    fn every_key_of_the_format_and_every_limit_stands_in_its_page_with_what_it_is_for() {
        fn each(schema: &Value, check: &mut dyn FnMut(&str, &str)) {
            for (key, value) in schema["properties"].as_object().into_iter().flatten() {
                if let Some((below, _)) = inner(value) {
                    each(below, check);
                } else {
                    check(key, value["description"].as_str().unwrap());
                }
            }
        }
        let pages = made();
        let page = text(&pages, "stockade-policy.5");
        let mut keys = 0;
        each(&stockade_policy::schema(), &mut |key, about| {
            keys += 1;
            assert!(page.contains(&format!("\\fB{}\\fR = ", roff::escape(key))), "{key}");
            assert!(page.contains(&sentence(about)), "{key}: {about}");
        });
        assert!(keys > 80, "{keys}");
    }

    #[test]
    fn grants_and_the_overview_are_made_of_the_documents() {
        let pages = made();
        assert!(text(&pages, "stockade-grants.5").contains("# [[grant]]"));
        assert!(text(&pages, "stockade-grants.5").contains("interpreters = ["));
        let overview = text(&pages, "stockade.7");
        assert!(overview.contains("stockade\\-policy(5)") && !overview.contains("README.md") && !overview.contains("scripts/stockade"));
        assert!(text(&pages, "stockade-request-result.7").contains("approval_required"));
    }

    #[test]
    fn a_page_is_found_by_its_topic_command_or_name() {
        let pages = made();
        for (words, file) in [
            ("", "stockade.1"),
            ("stockade", "stockade.1"),
            ("policies", "stockade-policy.5"),
            ("policy", "stockade-policy.1"),
            ("policy check", "stockade-policy-check.1"),
            ("security", "stockade-security.7"),
            ("stockade.7", "stockade.7"),
            ("stockade-grants", "stockade-grants.1"),
            ("grants.5", "stockade-grants.5"),
        ] {
            let words: Vec<String> = words.split_whitespace().map(str::to_owned).collect();
            assert_eq!(find(&pages, &words).map(Page::file_name).as_deref(), Some(file), "{words:?}");
        }
        assert!(find(&pages, &["nothing".to_owned()]).is_none());
        assert!(PAGES.iter().all(|(topic, ..)| find(&pages, &[(*topic).to_owned()]).is_some()));
    }

    #[test]
    fn an_example_is_of_the_command_that_it_calls() {
        assert!(calls("$ stockade audit verify\n212 records", "stockade audit verify"));
        assert!(calls("$ echo '{}' |\n    sudo stockade exec --policy x", "stockade exec"));
        assert!(!calls("$ stockade executor", "stockade exec"));
        assert!(!calls("$ cat x\nstockade exec is a command", "stockade exec"));
        let pages = made();
        for name in ["exec", "run", "session", "shim-install", "policy-diff", "audit-tail", "ps", "kill", "prove"] {
            assert!(text(&pages, &format!("stockade-{name}.1")).contains(".SH \"EXAMPLES\"\n"), "{name}");
        }
        assert!(text(&pages, "stockade-policy-show.1").contains("stockade\\-policy\\-diff\\fR(1)"));
    }
}
