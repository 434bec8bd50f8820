//! Rules over a parsed shell script.
//!
//! The grammar is tree-sitter's of bash. [`words`] expands the words of a command as far as they are
//! known, and [`commands`] judges the command. Variables are followed in the order of the text;
//! branches are not distinguished.

mod commands;
mod passwords;
mod words;
mod wrappers;

use stockade_protocol::screen::{Question, Rule};
use tree_sitter::{Node, Parser};

use crate::{budget, findings::Findings, paths, secrets};
use words::{Variables, Word};

/// Nodes that are nested deeper are not walked.
const MAX_DEPTH: u16 = 400;
/// How often a script is parsed again after an error.
const MAX_ROUNDS: usize = 32;
/// Stages of a pipeline that may feed a later one.
const MAX_PIPELINE_LEN: usize = 16;

/// Screens a shell script. After a line with a syntax error it is parsed again from the next
/// line, since a shell continues after most errors.
pub(crate) fn screen(question: &Question<'_>, code: &str, depth: u8, findings: &mut Findings<'_>) {
    let mut parser = Parser::new();
    if parser.set_language(&tree_sitter_bash::LANGUAGE.into()).is_err() {
        findings.add(Rule::Screener, (0, 0), "no grammar");
        return;
    }
    let (mut begin, mut variables, mut directory) = (0, Variables::default(), String::new());
    for _ in 0..MAX_ROUNDS {
        // Lines that were read are blanked, so that offsets stay.
        let rest = " ".repeat(begin) + code.get(begin..).unwrap_or_default();
        let Some(tree) = parser.parse(words::with_plain_offsets(&rest), None) else {
            findings.add(Rule::Screener, (begin, begin), "not parsed");
            return;
        };
        let root = tree.root_node();
        let mut walk = Walk { variables, directory, ..Walk::new(question, &rest, depth, findings) };
        walk.node(root, 0);
        if !root.has_error() {
            return;
        }
        (variables, directory) = (walk.variables, walk.directory);
        let error = first_error(root);
        if !findings.is_inside() {
            findings.add(Rule::Syntax, span(error), "not understood");
        }
        let at = error.start_byte().max(begin);
        let Some(end) = code.get(at..).and_then(|rest| rest.find('\n')) else { return };
        begin = at + end + 1;
        // The rest is parsed once more.
        if !findings.budget().spend(budget::of_shell(code.len() - begin)) {
            findings.report_budget((begin, begin));
            return;
        }
    }
}

/// Screens one command by its words.
pub(crate) fn screen_words(question: &Question<'_>, words: Vec<String>, depth: u8, findings: &mut Findings<'_>) {
    let mut walk = Walk::new(question, "", depth, findings);
    let words: Vec<Word> = words.into_iter().map(Word::plain).collect();
    walk.command_of(&words, (0, 0), &[]);
}

fn first_error(node: Node<'_>) -> Node<'_> {
    let mut at = node;
    // The smallest node with the error. The depth is bounded by the length of the text.
    loop {
        let mut cursor = at.walk();
        let next = at.children(&mut cursor).find(|child| child.has_error() || child.is_missing());
        match next {
            Some(child) => at = child,
            None => return at,
        }
    }
}

fn span(node: Node<'_>) -> (usize, usize) {
    (node.start_byte(), node.end_byte())
}

struct Walk<'w, 'c> {
    question: &'w Question<'w>,
    code: &'w str,
    depth: u8,
    findings: &'w mut Findings<'c>,
    variables: Variables,
    /// The directory after `cd`; empty at the start.
    directory: String,
    /// The functions whose bodies are read.
    functions: Vec<String>,
    /// Endless loops around this place.
    endless: u32,
}

impl<'w, 'c> Walk<'w, 'c> {
    fn new(question: &'w Question<'w>, code: &'w str, depth: u8, findings: &'w mut Findings<'c>) -> Self {
        Walk {
            question,
            code,
            depth,
            findings,
            variables: Variables::default(),
            directory: String::new(),
            functions: Vec::new(),
            endless: 0,
        }
    }
}

impl Walk<'_, '_> {
    fn source(&self, node: Node<'_>) -> &str {
        self.code.get(node.byte_range()).unwrap_or_default()
    }

    fn children<'n>(&self, node: Node<'n>) -> Vec<Node<'n>> {
        let mut cursor = node.walk();
        node.named_children(&mut cursor).collect()
    }

    fn word(&self, node: Node<'_>) -> Word {
        let budget = self.findings.budget();
        if !budget.spend(1) {
            return Word::unknown("*");
        }
        let word = words::evaluate(node, self.code, &self.variables, 0);
        budget.spend_searched(&word.text);
        word
    }

    fn node(&mut self, node: Node<'_>, depth: u16) {
        if depth > MAX_DEPTH {
            self.findings.add(Rule::Screener, span(node), "nested too deep");
            return;
        }
        match node.kind() {
            "command" => self.command(node),
            "pipeline" => self.pipeline(node),
            "variable_assignment" => self.assignment(node),
            "file_redirect" => self.redirect(node),
            "heredoc_redirect" => self.here_document(node),
            "function_definition" => {
                let name = node.child_by_field_name("name").map(|name| self.source(name).to_owned()).unwrap_or_default();
                self.functions.push(name);
                self.descend(node, depth);
                self.functions.pop();
                return;
            }
            "while_statement" if self.is_endless(node) => {
                self.endless += 1;
                self.descend(node, depth);
                self.endless -= 1;
                return;
            }
            "string" | "raw_string" | "ansi_c_string" | "word" | "concatenation" => self.text(node),
            _ => {}
        }
        self.descend(node, depth);
    }

    /// Whether the condition of a loop never ends it.
    fn is_endless(&self, node: Node<'_>) -> bool {
        let condition = node.child_by_field_name("condition").map(|condition| self.source(condition).trim().trim_end_matches(';'));
        matches!(condition, Some("true" | ":" | "[ 1 ]" | "[[ 1 ]]" | "((1))" | "(( 1 ))"))
    }

    fn descend(&mut self, node: Node<'_>, depth: u16) {
        for child in self.children(node) {
            self.node(child, depth + 1);
        }
        self.findings.report_budget(span(node));
    }

    /// Secrets, encoded data and credentials in a word.
    fn text(&mut self, node: Node<'_>) {
        let word = self.word(node);
        if let Some(kind) = secrets::in_text(&word.text) {
            self.findings.secret(span(node), &word.text, kind);
        }
        if secrets::is_blob(&word.text) {
            self.findings.add(Rule::Blob, span(node), &format!("{} characters", word.text.len()));
        }
        // Paths in options and forms: `key=@~/.ssh/id`.
        let part = word.text.rsplit(['@', '=', ' ']).next().unwrap_or_default();
        if paths::is_credential(&word.text) || paths::is_credential(part) {
            self.findings.add(Rule::Credentials, span(node), &word.text);
        }
    }

    fn assignment(&mut self, node: Node<'_>) {
        let (Some(name), Some(value)) = (node.child_by_field_name("name"), node.child_by_field_name("value")) else { return };
        let (name, word) = (self.source(name).to_owned(), self.word(value));
        if word.known && secrets::under_name(&name, &word.text) {
            self.findings.secret(span(value), &word.text, &name);
        }
        self.variables.set(&name, word);
    }

    fn redirect(&mut self, node: Node<'_>) {
        let operator = self.children_text(node);
        let Some(destination) = node.child_by_field_name("destination") else { return };
        let word = self.word(destination);
        if word.text.starts_with("/dev/tcp/") || word.text.starts_with("/dev/udp/") {
            self.findings.add(Rule::Network, span(node), &word.text);
        }
        let command = node.parent().and_then(|statement| statement.child_by_field_name("body")).filter(|body| body.kind() == "command");
        let words = command.map(|command| self.words_of(command)).unwrap_or_default();
        let path = paths::join(&self.directory, &word.text);
        if operator.contains('>') {
            self.writes(&word.text, span(node), "redirection");
            if commands::fetches(&words) {
                self.findings.fetches(&path);
            }
        } else if self.findings.has_fetched(&path) && commands::reads_code(&words).is_some() {
            self.findings.add(Rule::RemoteCode, span(node), &path);
        }
    }

    fn children_text(&self, node: Node<'_>) -> String {
        let mut cursor = node.walk();
        node.children(&mut cursor).filter(|child| !child.is_named()).map(|child| self.source(child)).collect()
    }

    /// A file is written at this path.
    fn writes(&mut self, path: &str, at: (usize, usize), what: &str) {
        let path = paths::join(&self.directory, path);
        if paths::is_disk(&path) {
            self.findings.add(Rule::Destroy, at, &path);
        } else if paths::is_outside(&path, self.question.scratch) {
            self.findings.add(Rule::WriteOutside, at, &format!("{what} {path}"));
        }
    }

    /// The words of a command, after word splitting.
    fn words_of(&self, node: Node<'_>) -> Vec<Word> {
        let mut cursor = node.walk();
        let parts: Vec<Node<'_>> = node
            .named_children(&mut cursor)
            .filter(|child| !matches!(child.kind(), "variable_assignment" | "file_redirect" | "herestring_redirect" | "heredoc_redirect"))
            .collect();
        parts.into_iter().flat_map(|part| self.word(part).split()).collect()
    }

    fn command(&mut self, node: Node<'_>) {
        let words = self.words_of(node);
        let name_built = node.child_by_field_name("name").is_some_and(words::is_put_together);
        if name_built && words.first().is_some_and(|name| name.known && commands::is_known(&name.text)) {
            self.findings.add(Rule::HiddenName, span(node), &words.first().map(|name| name.text.clone()).unwrap_or_default());
        }
        if let (Some(name), Some(script)) = (commands::reads_code(&words), self.here_string(node)) {
            self.runs(&name, &script, span(node));
        }
        let fed = self.fed_by_here_string(node);
        self.command_of(&words, span(node), &fed);
        self.substituted(&words, node);
        let name = words.first().map(|word| word.text.as_str()).unwrap_or_default();
        let starts_itself = words.iter().any(|word| word.text == "$0");
        let statement = node.parent().filter(|parent| parent.kind() == "redirected_statement").unwrap_or(node);
        let in_background = statement.next_sibling().is_some_and(|next| self.source(next) == "&");
        if in_background && self.endless > 0 && starts_itself {
            self.findings.add(Rule::ForkBomb, span(node), "starts itself without end");
        }
        let in_pipeline = node.parent().is_some_and(|parent| parent.kind() == "pipeline");
        if in_pipeline && self.functions.iter().any(|function| function == name) {
            self.findings.add(Rule::ForkBomb, span(node), name);
        }
    }

    /// The redirections of this kind of a command.
    fn redirects<'n>(&self, node: Node<'n>, kind: &str) -> Vec<Node<'n>> {
        let mut parts = self.children(node);
        if let Some(parent) = node.parent().filter(|parent| parent.kind() == "redirected_statement") {
            parts.extend(self.children(parent));
        }
        parts.retain(|part| part.kind() == kind);
        parts
    }

    /// The commands whose output is the here-string of a command.
    fn fed_by_here_string(&self, node: Node<'_>) -> Vec<Stage> {
        self.redirects(node, "herestring_redirect").into_iter().flat_map(|part| self.inner_stages(part, 0)).collect()
    }

    /// The here-string of a command.
    fn here_string(&self, node: Node<'_>) -> Option<String> {
        let part = *self.redirects(node, "herestring_redirect").first()?;
        let word = self.word(*self.children(part).first()?);
        word.known.then_some(word.text)
    }

    /// A here-document: code if its reader is a shell, also at the end of a pipeline.
    fn here_document(&mut self, node: Node<'_>) {
        let parts = self.children(node);
        let Some(script) = parts.iter().find(|part| part.kind() == "heredoc_body").map(|body| self.source(*body).to_owned()) else {
            return;
        };
        let before = node.parent().filter(|parent| parent.kind() == "redirected_statement");
        let readers: Vec<Node<'_>> = before
            .and_then(|statement| statement.child_by_field_name("body"))
            .into_iter()
            .chain(parts)
            .flat_map(|part| if part.kind() == "pipeline" { self.children(part) } else { vec![part] })
            .flat_map(|part| self.commands_in(part))
            .collect();
        for reader in readers {
            if let Some(name) = commands::reads_code(&self.words_of(reader)) {
                self.runs(&name, &script, span(reader));
            }
        }
    }

    /// The commands of substitutions in this node.
    fn inner_stages(&self, node: Node<'_>, depth: u16) -> Vec<Stage> {
        if depth > MAX_DEPTH {
            return Vec::new();
        }
        let own = (node.kind() == "command").then(|| Stage { words: self.words_of(node) });
        own.into_iter().chain(self.children(node).into_iter().flat_map(|child| self.inner_stages(child, depth + 1))).collect()
    }

    fn pipeline(&mut self, node: Node<'_>) {
        let mut before: Vec<Stage> = Vec::new();
        for part in self.children(node) {
            if let Some(command) = self.commands_in(part).last() {
                let words = self.words_of(*command);
                let fed = [before.as_slice(), self.fed_by_here_string(*command).as_slice()].concat();
                self.fed(&words, &fed, span(*command));
            }
            before.extend(self.inner_stages(part, 0));
            // Only the last stages are kept, because each stage is compared with them.
            before.drain(..before.len().saturating_sub(MAX_PIPELINE_LEN));
        }
    }

    fn commands_in<'n>(&self, node: Node<'n>) -> Vec<Node<'n>> {
        match node.kind() {
            "command" => vec![node],
            "redirected_statement" | "subshell" | "compound_statement" | "negated_command" => self
                .children(node)
                .into_iter()
                .flat_map(|child| if child.kind() == "pipeline" { Vec::new() } else { self.commands_in(child) })
                .collect(),
            _ => Vec::new(),
        }
    }
}

/// The words of one command of a pipeline.
#[derive(Clone, Debug)]
struct Stage {
    words: Vec<Word>,
}
