//! The code of a model's reply: its fenced blocks, in order.
//!
//! The CommonMark parser decides where a block begins and ends. This module reads what the
//! parser leaves as text: the language behind the fence, a file name in the first line, and
//! whether the fence was closed, since code that was cut off must not run. Pure: it runs
//! nothing, and refuses only languages that are no code.
#![forbid(unsafe_code)]

use std::ops::Range;

use pulldown_cmark::{CodeBlockKind, Event, Options, Parser, Tag, TagEnd};

/// A reply with more blocks to run is taken for a mistake.
pub const MAX_BLOCKS: usize = 100;

/// Languages behind fences that are shown and not run.
const NO_CODE: [&str; 27] = [
    "text",
    "txt",
    "plaintext",
    "plain",
    "output",
    "console",
    "log",
    "json",
    "jsonl",
    "yaml",
    "yml",
    "toml",
    "ini",
    "xml",
    "html",
    "css",
    "csv",
    "tsv",
    "markdown",
    "md",
    "diff",
    "patch",
    "mermaid",
    "svg",
    "latex",
    "tex",
    "http",
];

/// A fenced block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Block {
    /// The line of its opening fence, from 1.
    pub line: usize,
    /// The first word behind the fence.
    pub language: Option<String>,
    /// The name that its first line gives it: `# filename: x.py`.
    pub file: Option<String>,
    /// The text between the fences, with `\n` at the end of each line.
    pub code: String,
}

impl Block {
    /// Why it is not run, if it is not.
    pub fn is_no_code(&self) -> Option<&'static str> {
        match &self.language {
            None => Some("no_language"),
            Some(language) if NO_CODE.iter().any(|name| name.eq_ignore_ascii_case(language)) => Some("no_code"),
            Some(_) => None,
        }
    }
}

/// Why a reply has no blocks to run.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReplyError {
    /// Not text.
    #[error("the reply is not UTF-8: byte {0} begins no character; send the model's text unchanged")]
    NotUtf8(usize),
    /// Its end is missing, and so perhaps half of its last line.
    #[error(
        "the block that begins in line {0} is never closed, so the reply was cut off and none of it is run; ask the model to continue, or to repeat the whole reply"
    )]
    NotClosed(usize),
    /// Nothing to run.
    #[error(
        "the reply has no block to run{}; a block begins with a line such as ```python",
        if *.0 == 0 { String::new() } else { format!(", only {} without a language or in a language that is no code", .0) }
    )]
    NoCode(usize),
    /// Too many.
    #[error("the reply has {0} blocks to run, and at most {MAX_BLOCKS} are allowed; combine them, or send several replies")]
    TooMany(usize),
}

impl ReplyError {
    /// A stable identifier.
    pub fn reason(&self) -> &'static str {
        match self {
            ReplyError::NotUtf8(_) => "reply_not_utf8",
            ReplyError::NotClosed(_) => "reply_not_closed",
            ReplyError::NoCode(_) => "reply_without_code",
            ReplyError::TooMany(_) => "reply_too_many_blocks",
        }
    }
}

/// Every fenced block of a reply that has one to run.
///
/// # Errors
/// It is no text, was cut off within a block, or has no block to run or too many.
pub fn read(reply: &[u8]) -> Result<Vec<Block>, ReplyError> {
    let text = str::from_utf8(reply).map_err(|error| ReplyError::NotUtf8(error.valid_up_to()))?;
    let blocks = fenced(text)?;
    match blocks.iter().filter(|block| block.is_no_code().is_none()).count() {
        0 => Err(ReplyError::NoCode(blocks.len())),
        count if count > MAX_BLOCKS => Err(ReplyError::TooMany(count)),
        _ => Ok(blocks),
    }
}

fn fenced(text: &str) -> Result<Vec<Block>, ReplyError> {
    let mut blocks = Vec::new();
    let mut quotes = 0;
    let mut open: Option<(Block, Range<usize>)> = None;
    let (mut line, mut counted) = (1, 0);
    for (event, range) in Parser::new_ext(text, Options::empty()).into_offset_iter() {
        match event {
            Event::Start(Tag::BlockQuote(_)) => quotes += 1,
            Event::End(TagEnd::BlockQuote(_)) => quotes -= 1,
            Event::Start(Tag::CodeBlock(CodeBlockKind::Fenced(info))) => {
                line += text.get(counted..range.start).unwrap_or_default().matches('\n').count();
                counted = range.start.max(counted);
                open = Some((Block { line, language: language(&info), file: None, code: String::new() }, range));
            }
            Event::Text(piece) => {
                if let Some((block, _)) = &mut open {
                    block.code.push_str(&piece);
                }
            }
            Event::End(TagEnd::CodeBlock) => {
                let Some((mut block, range)) = open.take() else { continue };
                if !is_closed(text.get(range).unwrap_or_default(), quotes) {
                    return Err(ReplyError::NotClosed(block.line));
                }
                if block.code.contains('\r') {
                    // A carriage return alone ends a line too.
                    block.code = block.code.replace("\r\n", "\n").replace('\r', "\n");
                }
                block.file = file_name(&block.code);
                blocks.push(block);
            }
            _ => {}
        }
    }
    Ok(blocks)
}

/// Whether the last line of a block is a fence, and another than its first. A block also
/// ends with the quote or list around it, or with the text.
fn is_closed(block: &str, quotes: usize) -> bool {
    let Some((first, rest)) = block.split_once('\n') else { return false };
    let fence = first.chars().next().unwrap_or_default();
    let length = first.chars().take_while(|&c| c == fence).count();
    let mut last = rest.trim_end().rsplit('\n').next().unwrap_or_default().trim_start();
    for _ in 0..quotes {
        last = last.strip_prefix('>').unwrap_or(last).trim_start();
    }
    matches!(fence, '`' | '~') && last.chars().count() >= length && last.chars().all(|c| c == fence)
}

/// The first word behind a fence, also as `{.python}` and `python,ignore` have it.
fn language(info: &str) -> Option<String> {
    let word = info.trim_start_matches(['{', '.', ' ', '\t']);
    let end = word.find(|c: char| c.is_whitespace() || matches!(c, ',' | ':' | ';' | '{' | '}')).unwrap_or(word.len());
    word.get(..end).filter(|word| !word.is_empty()).map(String::from)
}

/// `# filename: x.py` as a block's first line, or the same behind `//`. The session decides
/// whether the name is allowed.
fn file_name(code: &str) -> Option<String> {
    let first = code.lines().next()?.trim();
    let comment = first.strip_prefix("//").or_else(|| first.strip_prefix('#'))?.trim_start();
    let name = comment.strip_prefix("filename:")?.trim();
    (!name.is_empty()).then(|| name.to_owned())
}

#[cfg(test)]
mod tests;
