//! What screening finds in code, and the two frames by which the screener is asked.
//!
//! A rule names what was found; the policy decides what to do about it. The
//! screener reads hostile text with large parsers, so its answer is as untrusted as what a
//! sandbox says: every length is checked, and nothing here panics on any input.

use alloc::{string::String, vec::Vec};

use crate::frame::{Malformed, Reader, Writer};

/// What can be found in a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[cfg_attr(feature = "json", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
pub enum Rule {
    /// Starts or kills other programs.
    Process,
    /// Forks.
    Fork,
    /// Uses the network.
    Network,
    /// Calls into native code.
    Native,
    /// Imports what is not known beforehand.
    DynamicImport,
    /// Runs text as code.
    Eval,
    /// Runs as code what was encoded or put together.
    DecodedCode,
    /// Runs as code what was fetched.
    RemoteCode,
    /// Puts a name together that it could have written out.
    HiddenName,
    /// Reaches into the interpreter.
    Internals,
    /// Deletes whole trees.
    Delete,
    /// Deletes or overwrites a system, a home or a device.
    Destroy,
    /// Writes outside scratch and temporary directories.
    WriteOutside,
    /// Touches what holds credentials.
    Credentials,
    /// Holds a secret.
    Secret,
    /// Multiplies without end.
    ForkBomb,
    /// Holds a long encoded text.
    Blob,
    /// Reads a format that can run code.
    Deserialize,
    /// Changes the system.
    System,
    /// Imports a module outside the allowlist.
    Module,
    /// Uses a built-in function outside the allowlist.
    Builtin,
    /// Could not be parsed.
    Syntax,
    /// Is in a language that no rule knows.
    Language,
    /// The screener failed.
    Screener,
}

impl Rule {
    /// All, in the order of their numbers in a frame.
    pub const ALL: [Rule; 24] = [
        Rule::Process,
        Rule::Fork,
        Rule::Network,
        Rule::Native,
        Rule::DynamicImport,
        Rule::Eval,
        Rule::DecodedCode,
        Rule::RemoteCode,
        Rule::HiddenName,
        Rule::Internals,
        Rule::Delete,
        Rule::Destroy,
        Rule::WriteOutside,
        Rule::Credentials,
        Rule::Secret,
        Rule::ForkBomb,
        Rule::Blob,
        Rule::Deserialize,
        Rule::System,
        Rule::Module,
        Rule::Builtin,
        Rule::Syntax,
        Rule::Language,
        Rule::Screener,
    ];

    /// Its name in policies and results.
    pub const fn name(self) -> &'static str {
        self.words().0
    }

    /// What it means, in a few words.
    pub const fn about(self) -> &'static str {
        self.words().1
    }

    /// The rule of this name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|rule| rule.name() == name)
    }

    const fn words(self) -> (&'static str, &'static str) {
        match self {
            Rule::Process => ("process", "starts or kills other programs"),
            Rule::Fork => ("fork", "forks"),
            Rule::Network => ("network", "uses the network"),
            Rule::Native => ("native", "calls into native code"),
            Rule::DynamicImport => ("dynamic_import", "imports a module whose name only the run knows"),
            Rule::Eval => ("eval", "runs text as code"),
            Rule::DecodedCode => ("decoded_code", "runs as code what was encoded or put together"),
            Rule::RemoteCode => ("remote_code", "runs as code what was fetched"),
            Rule::HiddenName => ("hidden_name", "puts a name together that it could have written out"),
            Rule::Internals => ("internals", "reaches into the interpreter"),
            Rule::Delete => ("delete", "deletes whole directories"),
            Rule::Destroy => ("destroy", "deletes or overwrites a system, a home or a device"),
            Rule::WriteOutside => ("write_outside", "writes outside scratch and temporary directories"),
            Rule::Credentials => ("credentials", "touches files, variables or addresses that hold credentials"),
            Rule::Secret => ("secret", "holds a key, a token or a password"),
            Rule::ForkBomb => ("fork_bomb", "multiplies without end"),
            Rule::Blob => ("blob", "holds a long encoded text"),
            Rule::Deserialize => ("deserialize", "reads a format that can run code"),
            Rule::System => ("system", "changes users, mounts, services or the kernel"),
            Rule::Module => ("module", "imports a module outside `modules`"),
            Rule::Builtin => ("builtin", "uses a built-in name outside `builtins`"),
            Rule::Syntax => ("syntax", "cannot be parsed"),
            Rule::Language => ("language", "is in a language that is not screened"),
            Rule::Screener => ("screener", "could not be screened: too large, too deep, no text, or the screener ended"),
        }
    }
}

/// What a policy does about a finding, the mildest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[cfg_attr(feature = "json", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub enum Action {
    /// Nothing: the finding is not reported.
    Allow,
    /// The result reports it.
    Note,
    /// The code does not run until a person approves it.
    Approve,
    /// The code does not run.
    Deny,
}

impl Action {
    /// Its name in policies and results.
    pub const fn name(self) -> &'static str {
        match self {
            Action::Allow => "allow",
            Action::Note => "note",
            Action::Approve => "approve",
            Action::Deny => "deny",
        }
    }
}

/// Which rules are looked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rules(u32);

impl Rules {
    /// All of them.
    pub const ALL: Rules = Rules((1 << Rule::ALL.len()) - 1);

    /// Whether this one is.
    pub const fn has(self, rule: Rule) -> bool {
        self.0 & 1 << rule as u32 != 0
    }
}

impl FromIterator<Rule> for Rules {
    fn from_iter<I: IntoIterator<Item = Rule>>(rules: I) -> Self {
        Rules(rules.into_iter().fold(0, |bits, rule| bits | 1 << rule as u32))
    }
}

/// A finding as a result reports it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "json", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Finding {
    /// The file that it is in; none: the code itself.
    #[cfg_attr(feature = "json", serde(skip_serializing_if = "Option::is_none"))]
    pub file: Option<String>,
    /// What was found.
    #[cfg_attr(feature = "schema", schemars(with = "alloc::string::String"))]
    pub rule: Rule,
    /// What the policy does about it.
    pub action: Action,
    /// Line of the code, from 1; 0 where it is about the whole of it.
    pub line: u32,
    /// Column in characters, from 1.
    pub column: u32,
    /// The offending text.
    pub text: String,
    /// The resolved meaning, such as `os.system` for an alias of it.
    pub what: String,
}

/// One thing that was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// In which of the sources, from 0.
    pub source: u32,
    /// What.
    pub rule: Rule,
    /// Line, from 1.
    pub line: u32,
    /// Column in characters, from 1.
    pub column: u32,
    /// The offending text, cut short.
    pub text: String,
    /// The resolved meaning, such as `os.system` for an alias of it.
    pub what: String,
}

/// How code is to be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "json", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
pub enum Grammar {
    /// Python 3.
    Python,
    /// bash, and what sh understands of it.
    Shell,
}

/// The lines of a text, each with what ends it; the last has no end, and may be empty. A
/// return by itself ends a line of Python and none of a shell. Of a language that is not
/// known every character ends one that does so in any.
pub fn lines(code: &str, grammar: Option<Grammar>) -> impl Iterator<Item = &str> {
    let ends = move |letter| match letter {
        '\n' => true,
        '\r' => grammar != Some(Grammar::Shell),
        '\u{2028}' | '\u{2029}' => grammar.is_none(),
        _ => false,
    };
    let mut rest = Some(code);
    core::iter::from_fn(move || {
        let text = rest?;
        let (line, after) = match text.match_indices(ends).next() {
            None => (text, None),
            Some((at, end)) => {
                let both = text.get(at..).is_some_and(|from| from.starts_with("\r\n"));
                let (line, after) = text.split_at(at + end.len() + usize::from(both && end == "\r"));
                (line, Some(after))
            }
        };
        rest = after;
        Some(line)
    })
}

/// A text to read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Source<'a> {
    /// How to read it.
    pub grammar: Grammar,
    /// The code.
    pub code: &'a str,
}

/// What the screener is asked.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Question<'a> {
    /// What to look for.
    pub rules: Rules,
    /// Modules that may be imported; none: any.
    pub modules: Vec<&'a str>,
    /// Built-in names that may be used; none: any.
    pub builtins: Vec<&'a str>,
    /// Where the code may write, besides temporary directories.
    pub scratch: &'a str,
    /// What to read.
    pub sources: Vec<Source<'a>>,
}

/// What the screener answers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Answer {
    /// In the order of the texts.
    pub found: Vec<Found>,
    /// How many more there were. At least one of each rule is listed.
    pub omitted: u64,
}

/// The longest code that is screened, all sources together.
pub const MAX_CODE_LEN: usize = 1 << 20;
/// The screener's argument where its stdin is a socket, on which it serves many questions.
pub const STAY: &str = "stay";
/// The most sources.
pub const MAX_SOURCES: usize = 64;
/// The longest answer.
pub const MAX_ANSWER_LEN: usize = 256 << 10;
/// Findings that an answer lists.
pub const MAX_FINDINGS: usize = 100;
/// The longest `text` and `what`, in bytes.
pub const MAX_TEXT_LEN: usize = 160;

const QUESTION: u32 = 0x5343_5131;
const ANSWER: u32 = 0x5343_4131;

impl<'a> Question<'a> {
    /// As bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Writer::default();
        out.u32(QUESTION);
        out.u32(self.rules.0);
        for list in [&self.modules, &self.builtins] {
            out.u32(list.len() as u32);
            list.iter().for_each(|item| out.string(item.as_bytes()));
        }
        out.string(self.scratch.as_bytes());
        out.u32(self.sources.len() as u32);
        for source in &self.sources {
            out.u32(match source.grammar {
                Grammar::Python => 0,
                Grammar::Shell => 1,
            });
            out.string(source.code.as_bytes());
        }
        out.into_bytes()
    }

    /// From bytes.
    ///
    /// # Errors
    /// They are no question.
    pub fn decode(bytes: &'a [u8]) -> Result<Self, Malformed> {
        let mut from = Reader::new(bytes);
        if from.u32()? != QUESTION {
            return Err(Malformed);
        }
        let rules = Rules(from.u32()?);
        let (modules, builtins, scratch) = (from.list(text)?, from.list(text)?, text(&mut from)?);
        let sources = from.list(|from| {
            let grammar = match from.u32()? {
                0 => Grammar::Python,
                1 => Grammar::Shell,
                _ => return Err(Malformed),
            };
            Ok(Source { grammar, code: text(from)? })
        })?;
        if rules.0 & !Rules::ALL.0 != 0 || sources.len() > MAX_SOURCES || !from.is_empty() {
            return Err(Malformed);
        }
        Ok(Question { rules, modules, builtins, scratch, sources })
    }
}

impl Answer {
    /// As bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Writer::default();
        out.u32(ANSWER);
        out.u64(self.omitted);
        out.u32(self.found.len() as u32);
        for found in &self.found {
            out.u32(found.source);
            out.u32(found.rule as u32);
            out.u32(found.line);
            out.u32(found.column);
            out.string(found.text.as_bytes());
            out.string(found.what.as_bytes());
        }
        out.into_bytes()
    }

    /// Parses untrusted bytes.
    ///
    /// # Errors
    /// They are no answer, or exceed what an answer may hold.
    pub fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let mut from = Reader::new(bytes);
        if bytes.len() > MAX_ANSWER_LEN || from.u32()? != ANSWER {
            return Err(Malformed);
        }
        let omitted = from.u64()?;
        let found = from.list(|from| {
            let source = from.u32()?;
            let rule = *Rule::ALL.get(from.u32()? as usize).ok_or(Malformed)?;
            let (line, column) = (from.u32()?, from.u32()?);
            Ok(Found { source, rule, line, column, text: short(from)?, what: short(from)? })
        })?;
        if found.len() > MAX_FINDINGS || !from.is_empty() {
            return Err(Malformed);
        }
        Ok(Answer { found, omitted })
    }
}

fn text<'a>(from: &mut Reader<'a>) -> Result<&'a str, Malformed> {
    core::str::from_utf8(from.string()?).map_err(|_| Malformed)
}

fn short(from: &mut Reader<'_>) -> Result<String, Malformed> {
    let text = text(from)?;
    if text.len() > MAX_TEXT_LEN { Err(Malformed) } else { Ok(String::from(text)) }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]
    use alloc::{string::ToString, vec};

    use super::*;

    fn answer() -> Answer {
        let found = |rule| Found { source: 1, rule, line: 3, column: 7, text: "o.system('id')".to_string(), what: "os.system".to_string() };
        Answer { found: Rule::ALL.into_iter().map(found).collect(), omitted: 5 }
    }

    #[test]
    fn frames_come_back_as_they_went() {
        let sources = vec![Source { grammar: Grammar::Shell, code: "rm é" }, Source { grammar: Grammar::Python, code: "" }];
        let rules = [Rule::Fork, Rule::Screener].into_iter().collect();
        let question = Question { rules, modules: vec!["math"], builtins: vec![], scratch: "/s", sources };
        assert_eq!(Question::decode(&question.encode()).unwrap(), question);
        assert_eq!(Answer::decode(&answer().encode()).unwrap(), answer());
    }

    #[test]
    fn nothing_cut_off_lengthened_or_altered_passes_for_more_than_it_says() {
        let bytes = answer().encode();
        for end in 0..bytes.len() {
            assert!(Answer::decode(&bytes[..end]).is_err());
        }
        for at in 0..bytes.len() {
            let mut altered = bytes.clone();
            altered[at] ^= 0xff;
            // Even if it parses, it stays within bounds.
            if let Ok(answer) = Answer::decode(&altered) {
                assert!(answer.found.len() <= MAX_FINDINGS);
            }
        }
        assert!(Answer::decode(&[bytes, vec![0]].concat()).is_err());
        let long = Found { text: "x".repeat(MAX_TEXT_LEN + 1), ..answer().found[0].clone() };
        assert!(Answer::decode(&Answer { found: vec![long], omitted: 0 }.encode()).is_err());
    }

    #[test]
    fn lines_end_where_their_language_ends_them() {
        let code = "a\r\nb\rc\u{2028}d\u{c}e\u{85}\n";
        let of = |grammar| lines(code, grammar).collect::<Vec<_>>();
        assert_eq!(of(Some(Grammar::Python)), ["a\r\n", "b\r", "c\u{2028}d\u{c}e\u{85}\n", ""]);
        assert_eq!(of(Some(Grammar::Shell)), ["a\r\n", "b\rc\u{2028}d\u{c}e\u{85}\n", ""]);
        assert_eq!(of(None), ["a\r\n", "b\r", "c\u{2028}", "d\u{c}e\u{85}\n", ""]);
        assert_eq!(lines("", None).collect::<Vec<_>>(), [""]);
        assert_eq!(lines("\r", Some(Grammar::Python)).collect::<Vec<_>>(), ["\r", ""]);
    }

    #[test]
    fn rules_are_wanted_one_by_one() {
        let some: Rules = [Rule::Process, Rule::Screener].into_iter().collect();
        assert!(some.has(Rule::Process) && some.has(Rule::Screener) && !some.has(Rule::Fork));
        assert!(Rule::ALL.into_iter().all(|rule| Rules::ALL.has(rule) && !Rules::default().has(rule)));
    }

    #[test]
    fn rules_have_their_numbers_and_names() {
        for (number, rule) in Rule::ALL.into_iter().enumerate() {
            assert_eq!(rule as usize, number);
            assert_eq!(Rule::from_name(rule.name()), Some(rule));
        }
    }
}
