//! Checked reading of one TOML document, value by value.
//!
//! Refuses unknown keys, wrong types and impossible single values, all of them at once and
//! each with its place. What is read becomes of no type here: `merge` keeps it.

use stockade_protocol::LimitKey;
use toml::{
    Spanned,
    de::{DeTable, DeValue},
};

use crate::{
    check::{self, Checked},
    diagnostic::{Diagnostic, Diagnostics, Located, SourceSpan},
    keys::Key,
    written,
};

pub(crate) type Node<'i> = Spanned<DeValue<'i>>;

/// More than there are system calls; a longer list is a mistake, and slow to word.
pub(crate) const MAX_ITEMS: usize = 1024;

/// A list as a document writes it.
#[derive(Clone, Debug, Default)]
pub(crate) struct ListEdit<T> {
    /// The whole list; else the rest changes the inherited one.
    pub replace: Option<Vec<Located<T>>>,
    pub add: Vec<Located<T>>,
    pub remove: Vec<Located<T>>,
}

/// Parses TOML; each syntax error goes to `problems`.
pub(crate) fn parse<'i>(source: usize, text: &'i str, problems: &mut Diagnostics) -> Option<Spanned<DeTable<'i>>> {
    let (root, errors) = DeTable::parse_recoverable(text);
    for error in &errors {
        let span = SourceSpan::new(source, error.span().unwrap_or(0..0));
        problems.add(&span, Diagnostic::new(format!("not TOML: {}", error.message().replace('\n', ", ")), ""));
    }
    errors.is_empty().then_some(root)
}

/// Reads checked values out of one document.
pub(crate) struct DocumentReader<'p> {
    pub source: usize,
    /// Whether the document starts from another one.
    pub inherits: bool,
    pub problems: &'p mut Diagnostics,
}

impl DocumentReader<'_> {
    pub(crate) fn span<T>(&self, node: &Spanned<T>) -> SourceSpan {
        SourceSpan::new(self.source, node.span())
    }

    /// The beginning of the document.
    pub(crate) fn start(&self) -> SourceSpan {
        SourceSpan::new(self.source, 0..0)
    }

    pub(crate) fn complain<T>(&mut self, node: &Spanned<T>, diagnostic: Diagnostic) {
        let span = self.span(node);
        self.problems.add(&span, diagnostic);
    }

    pub(crate) fn wrong_type(&mut self, node: &Node<'_>, key: &str, wanted: &str) {
        let found = node.get_ref().type_str();
        self.complain(node, Diagnostic::new(format!("`{key}` must be {wanted}"), format!("this is of type {found}")));
    }

    /// Refuses another format before anything else is said about the file.
    pub(crate) fn version(&mut self, top: &DeTable<'_>) -> bool {
        match top.get("schema") {
            Some(node) if self.number(node, "schema") == Some(1) => true,
            Some(node) => {
                self.complain(node, Diagnostic::new("unknown version of the format", "this version reads schema 1"));
                false
            }
            None => {
                let diagnostic = Diagnostic::new("`schema` is missing", "").help("start the file with `schema = 1`");
                self.problems.add(&self.start(), diagnostic);
                false
            }
        }
    }

    /// Refuses unknown keys, and asks for the required ones.
    pub(crate) fn known(&mut self, table: &DeTable<'_>, keys: &[Key], span: &SourceSpan, what: &str) {
        self.known_names(table, keys.iter().map(|key| key.name), what);
        if self.inherits {
            return;
        }
        for key in keys.iter().filter(|key| key.required && !table.contains_key(key.name)) {
            let diagnostic = Diagnostic::new(format!("`{}` is missing from {what}", key.name), key.about);
            self.problems.add(span, diagnostic.help("a policy that extends nothing states everything"));
        }
    }

    pub(crate) fn known_names<'k>(&mut self, table: &DeTable<'_>, names: impl Iterator<Item = &'k str> + Clone, what: &str) {
        for key in table.keys() {
            let name = key.get_ref().as_ref();
            if names.clone().all(|known| known != name) {
                let mut diagnostic = check::unknown("key", name, names.clone());
                diagnostic.label = format!("not a key of {what}");
                self.complain(key, diagnostic);
            }
        }
    }

    pub(crate) fn take<T>(&mut self, node: &Node<'_>, checked: Checked<T>) -> Option<Located<T>> {
        match checked {
            Ok(value) => Some(Located { value, span: self.span(node) }),
            Err(diagnostic) => {
                self.complain(node, diagnostic);
                None
            }
        }
    }

    fn number(&mut self, node: &Node<'_>, key: &str) -> Option<i64> {
        let number = node.get_ref().as_integer().map(|found| i64::from_str_radix(found.as_str(), found.radix()));
        match number {
            Some(Ok(number)) => Some(number),
            Some(Err(_)) => {
                self.complain(node, Diagnostic::new(format!("`{key}` is too large"), "beyond 64 bits"));
                None
            }
            None => {
                self.wrong_type(node, key, "a whole number");
                None
            }
        }
    }

    pub(crate) fn text<T>(&mut self, table: &DeTable<'_>, key: &str, check: impl Fn(&str) -> Checked<T>) -> Option<Located<T>> {
        let node = table.get(key)?;
        let Some(text) = node.get_ref().as_str() else {
            self.wrong_type(node, key, "a string");
            return None;
        };
        self.take(node, check(text))
    }

    pub(crate) fn integer<T>(&mut self, table: &DeTable<'_>, key: &str, check: impl Fn(i64) -> Checked<T>) -> Option<Located<T>> {
        let node = table.get(key)?;
        let number = self.number(node, key)?;
        self.take(node, check(number))
    }

    pub(crate) fn flag(&mut self, table: &DeTable<'_>, key: &str) -> Option<Located<bool>> {
        let node = table.get(key)?;
        let Some(value) = node.get_ref().as_bool() else {
            self.wrong_type(node, key, "true or false");
            return None;
        };
        Some(Located { value, span: self.span(node) })
    }

    pub(crate) fn table<'t, 'i>(&mut self, table: &'t DeTable<'i>, key: &str) -> Option<&'t DeTable<'i>> {
        let node = table.get(key)?;
        let found = node.get_ref().as_table();
        if found.is_none() {
            self.wrong_type(node, key, "a table");
        }
        found
    }

    /// A list of strings; what is wrong with one does not hide the others.
    pub(crate) fn strings<T>(&mut self, node: &Node<'_>, key: &str, check: impl Fn(&str) -> Checked<T>) -> Vec<Located<T>> {
        let Some(items) = node.get_ref().as_array() else {
            self.wrong_type(node, key, "a list of strings");
            return Vec::new();
        };
        let mut out = Vec::new();
        if items.len() > MAX_ITEMS {
            self.complain(node, Diagnostic::new(format!("`{key}` has more than {MAX_ITEMS} items"), ""));
            return out;
        }
        for item in items.iter() {
            match item.get_ref().as_str() {
                Some(text) => out.extend(self.take(item, check(text))),
                None => self.wrong_type(item, key, "a list of strings"),
            }
        }
        out
    }

    /// A list: the whole of it, or under `extends` its changes.
    pub(crate) fn list<T>(&mut self, table: &DeTable<'_>, key: &str, check: impl Fn(&str) -> Checked<T>) -> Option<ListEdit<T>> {
        let node = table.get(key)?;
        let mut edit = ListEdit { replace: None, add: Vec::new(), remove: Vec::new() };
        match node.get_ref() {
            DeValue::Array(_) => {
                edit.replace = Some(self.strings(node, key, check));
                if self.inherits {
                    let title = format!("`{key}` is inherited, so a bare list is ambiguous");
                    self.complain(
                        node,
                        Diagnostic::new(title, "a bare list under `extends`")
                            .help("write `{ add = […] }`, `{ remove = […] }`, both, or `{ replace = […] }`"),
                    );
                }
            }
            DeValue::Table(changes) if self.inherits => {
                self.known_names(changes, ["add", "remove", "replace"].into_iter(), "a list's changes");
                edit.add = changes.get("add").map(|node| self.strings(node, "add", &check)).unwrap_or_default();
                edit.remove = changes.get("remove").map(|node| self.strings(node, "remove", &check)).unwrap_or_default();
                edit.replace = changes.get("replace").map(|node| self.strings(node, "replace", &check));
                let changed = changes.contains_key("add") || changes.contains_key("remove");
                if changed == changes.contains_key("replace") {
                    let title = format!("`{key}` needs either `replace` or one of `add` and `remove`");
                    self.complain(node, Diagnostic::new(title, if changed { "has both" } else { "has none" }));
                }
            }
            DeValue::Table(_) => {
                let title = format!("`{key}` must be a list: this policy extends nothing");
                self.complain(node, Diagnostic::new(title, "there is nothing to change").help("write `[…]`"));
            }
            _ => self.wrong_type(node, key, "a list of strings"),
        }
        Some(edit)
    }

    /// The value of a limit, as it is written.
    pub(crate) fn limit(&mut self, table: &DeTable<'_>, key: LimitKey) -> Option<Located<toml::Value>> {
        let node = table.get(key.name())?;
        let value = match node.get_ref() {
            DeValue::String(text) => Some(toml::Value::from(text.as_ref())),
            DeValue::Integer(found) => i64::from_str_radix(found.as_str(), found.radix()).ok().map(toml::Value::from),
            DeValue::Float(found) => found.as_str().parse::<f64>().ok().map(toml::Value::from),
            _ => None,
        };
        let checked = match value {
            Some(value) => written::limit(key, &value).map(|_| value),
            None => Err(written::wrong_type(key)),
        };
        self.take(node, checked.map_err(|error| Diagnostic::new(error.expected, "not a value of this limit")))
    }
}
