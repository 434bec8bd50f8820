//! A chain of documents merged into one table whose values know where they stand.
//!
//! The document that extends nothing comes first. A value overrides, a list is edited,
//! tables merge by key. A change that changes nothing is refused, because its author
//! believed something else. Each document's values are checked here, also those that a
//! later document overrides; how values go together is the question of `consistency`.

use std::collections::BTreeMap;

use stockade_protocol::{LimitKey, screen};
use toml::de::DeTable;

use crate::{
    check,
    diagnostic::{Diagnostic, Located, SourceSpan, quote},
    document::{DocumentReader, ListEdit, MAX_ITEMS},
    keys::{self, Check, Key, Kind},
    modules, names,
};

/// In place of `[limits.max]`: the limits of the same document are the maximum too.
pub(crate) const SAME: &str = "same";

/// One table of a merged policy.
#[derive(Clone, Debug, Default)]
pub(crate) struct MergedTable {
    /// Where the last document that has it begins it.
    pub span: SourceSpan,
    pub values: BTreeMap<String, Located<toml::Value>>,
    /// Every item in its one spelling.
    pub lists: BTreeMap<String, Vec<Located<String>>>,
    pub tables: BTreeMap<String, MergedTable>,
}

impl MergedTable {
    /// A list of one of its tables.
    pub(crate) fn list(&self, section: &str, key: &str) -> &[Located<String>] {
        self.tables.get(section).and_then(|table| table.lists.get(key)).map_or(&[], Vec::as_slice)
    }

    /// A value of one of its tables.
    pub(crate) fn value(&self, section: &str, key: &str) -> Option<&Located<toml::Value>> {
        self.tables.get(section).and_then(|table| table.values.get(key))
    }

    /// The same as TOML, without places.
    pub(crate) fn into_toml(self) -> toml::Table {
        let items = |list: Vec<Located<String>>| list.into_iter().map(|item| toml::Value::from(item.value)).collect::<Vec<_>>();
        let values = self.values.into_iter().map(|(key, value)| (key, value.value));
        let lists = self.lists.into_iter().map(|(key, list)| (key, toml::Value::Array(items(list))));
        let tables = self.tables.into_iter().map(|(key, table)| (key, toml::Value::Table(table.into_toml())));
        values.chain(lists).chain(tables).collect()
    }

    fn set<T: Into<toml::Value>>(&mut self, key: &str, value: Option<Located<T>>) {
        if let Some(Located { value, span }) = value {
            self.values.insert(key.to_owned(), Located { value: value.into(), span });
        }
    }

    fn table_at(&mut self, key: &str, span: SourceSpan) -> &mut MergedTable {
        let table = self.tables.entry(key.to_owned()).or_default();
        table.span = span;
        table
    }
}

/// Merges a document into what it extends.
pub(crate) fn merge(into: &mut MergedTable, document: &DeTable<'_>, reader: &mut DocumentReader<'_>) {
    let start = reader.start();
    reader.merge_table(into, document, keys::TOP, "a policy", &start);
    raise_screener(into, reader.source);
}

/// Code that could not be read may hold anything. A document that holds code back or denies it
/// therefore raises `screener` to the severest action that it names, unless it names
/// `screener` itself: an inherited `note` was meant for a policy that stopped nothing.
fn raise_screener(policy: &mut MergedTable, source: usize) {
    let Some(table) = policy.tables.get_mut("screen") else { return };
    let action = |value: &Located<toml::Value>| value.value.as_str().and_then(|text| names::find(names::ACTIONS, text));
    let named = screen::Rule::ALL.iter().filter_map(|rule| table.values.get(rule.name())).filter(|value| value.span.source == source);
    let severest = named.max_by_key(|value| action(value)).cloned();
    let screener = screen::Rule::Screener.name();
    let inherited = table.values.get(screener);
    if let Some(severest) = severest
        && action(&severest) > Some(screen::Action::Note)
        && inherited.is_none_or(|value| value.span.source != source && action(value) < action(&severest))
    {
        table.values.insert(screener.to_owned(), severest);
    }
}

impl DocumentReader<'_> {
    fn merge_table(&mut self, into: &mut MergedTable, from: &DeTable<'_>, keys: &[Key], what: &str, span: &SourceSpan) {
        self.known(from, keys, span, what);
        for key in keys.iter().filter(|key| from.contains_key(key.name)) {
            self.merge_key(into, from, key);
        }
    }

    fn merge_key(&mut self, into: &mut MergedTable, from: &DeTable<'_>, key: &Key) {
        let name = key.name;
        let Some(node) = from.get(name) else { return };
        let inherits = self.inherits;
        match key.kind {
            Kind::Version => {}
            Kind::Text(check) => into.set(name, self.text(from, name, check)),
            Kind::Choice(what, known) => into.set(name, self.text(from, name, |text| check::choice(what, known, text))),
            Kind::Id => into.set(name, self.integer(from, name, check::id)),
            Kind::Count(least, most) => {
                into.set(name, self.integer(from, name, |number| check::count(name, least, most, number)));
            }
            Kind::Flag => into.set(name, self.flag(from, name)),
            Kind::List(item) => {
                let edit = self.list(from, name, |text| item.check(text)).unwrap_or_default();
                self.apply(into.lists.entry(name.to_owned()).or_default(), edit);
            }
            Kind::Words(check) => drop(into.lists.insert(name.to_owned(), self.strings(node, name, check))),
            Kind::Command(check) => {
                let words = self.strings(node, name, check::argument);
                let checked = check(&words);
                if self.take(node, checked).is_some() {
                    into.lists.insert(name.to_owned(), words);
                }
            }
            Kind::Removals => {
                if !inherits {
                    self.complain(node, Diagnostic::new(format!("`{name}` without `extends`"), "nothing is inherited"));
                }
                let removals = self.strings(node, name, check::language);
                for gone in removals.iter().filter(|_| inherits) {
                    self.remove_runtime(into, gone);
                }
            }
            Kind::Table(keys) => {
                if let Some(table) = self.table(from, name) {
                    let span = self.span(node);
                    self.merge_table(into.table_at(name, span.clone()), table, keys, &format!("`[{name}]`"), &span);
                }
            }
            Kind::Variables => {
                if let Some(table) = self.table(from, name) {
                    self.merge_variables(into.table_at(name, self.span(node)), table);
                }
            }
            Kind::Modules => {
                if let Some(table) = self.table(from, name) {
                    self.merge_modules(into.table_at(name, self.span(node)), table);
                }
            }
            Kind::Named(check, keys) => {
                if let Some(table) = self.table(from, name) {
                    self.merge_named(into.table_at(name, self.span(node)), table, name, check, keys);
                }
            }
            Kind::LimitsWithMax => {
                if let Some(table) = self.table(from, name) {
                    let span = self.span(node);
                    self.merge_limits(into.table_at(name, span.clone()), table, name, &span);
                    self.merge_maximums(into.table_at(name, span.clone()), table, &span);
                }
            }
        }
    }

    fn apply(&mut self, list: &mut Vec<Located<String>>, edit: ListEdit<String>) {
        if edit.replace.is_some() {
            list.clear();
        }
        for gone in edit.remove {
            let what = quote(&gone.value);
            match list.iter().position(|item| item.value == gone.value) {
                Some(_) if edit.add.iter().any(|item| item.value == gone.value) => {
                    self.problems.add(&gone.span, Diagnostic::new(format!("{what} is both added and removed"), "removed here"));
                }
                Some(index) => drop(list.remove(index)),
                None => self.problems.add(&gone.span, Diagnostic::new(format!("{what} is not there to be removed"), "not inherited")),
            }
        }
        for item in edit.replace.unwrap_or_default().into_iter().chain(edit.add) {
            match list.iter().find(|other| other.value == item.value) {
                Some(other) => {
                    let diagnostic = Diagnostic::new(format!("{} is already there", quote(&item.value)), "a line without effect");
                    self.problems.add(&item.span, diagnostic.also(&other.span, "first here"));
                }
                None => list.push(item),
            }
        }
    }

    fn remove_runtime(&mut self, policy: &mut MergedTable, gone: &Located<String>) {
        let runtimes = &mut policy.tables.entry("runtimes".to_owned()).or_default().tables;
        if runtimes.remove(&gone.value).is_none() {
            let known: Vec<&str> = runtimes.keys().map(String::as_str).collect();
            let diagnostic = Diagnostic::new(format!("{} is not there to be removed", quote(&gone.value)), "not inherited");
            self.problems.add(&gone.span, diagnostic.help(format!("inherited: {}", known.join(", "))));
        }
    }

    fn merge_variables(&mut self, into: &mut MergedTable, from: &DeTable<'_>) {
        for (key, node) in from {
            let name = key.get_ref().as_ref();
            match check::variable(name) {
                Ok(_) if node.get_ref().is_str() => into.set(name, self.text(from, name, check::variable_value)),
                Ok(_) => self.wrong_type(node, name, "a string"),
                Err(diagnostic) => self.complain(key, diagnostic),
            }
        }
    }

    fn merge_modules(&mut self, into: &mut MergedTable, from: &DeTable<'_>) {
        if from.len() > MAX_ITEMS {
            let span = from.keys().next().map_or_else(|| self.start(), |key| self.span(key));
            self.problems.add(&span, Diagnostic::new(format!("`modules` has more than {MAX_ITEMS} names"), ""));
            return;
        }
        for (key, node) in from {
            let name = key.get_ref().as_ref();
            if node.get_ref().is_table() {
                let diagnostic = Diagnostic::new(format!("`{name}` is a table here"), "a dot outside quotes begins another table");
                self.complain(node, diagnostic.help(format!("write the whole name in quotes, such as \"{name}.name\" = \"note\"")));
                continue;
            }
            let known = || modules::ACTIONS.iter().map(|(name, _)| *name);
            let action = |text: &str| names::find(modules::ACTIONS, text).ok_or_else(|| check::unlisted("action", text, known()));
            let Some(action) = self.text(from, name, action) else { continue };
            match modules::name(name, action.value) {
                Ok(()) => into.set(name, Some(Located { value: action.value.name(), span: action.span })),
                Err(diagnostic) => self.complain(key, diagnostic),
            }
        }
    }

    fn merge_named(&mut self, into: &mut MergedTable, from: &DeTable<'_>, section: &str, check: Check, keys: &[Key]) {
        for key in from.keys() {
            let span = self.span(key);
            match check(key.get_ref()) {
                Ok(name) => match self.table(from, &name) {
                    Some(table) => {
                        self.merge_table(into.table_at(&name, span.clone()), table, keys, &format!("`[{section}.{name}]`"), &span)
                    }
                    None => continue,
                },
                Err(diagnostic) => self.problems.add(&span, diagnostic),
            }
        }
    }

    fn merge_limits(&mut self, into: &mut MergedTable, from: &DeTable<'_>, section: &str, span: &SourceSpan) {
        let max = (section == "limits").then_some("max");
        let names = LimitKey::ALL.iter().map(|key| key.name()).chain(max);
        self.known_names(from, names, &format!("`[{section}]`"));
        for key in LimitKey::ALL {
            if from.contains_key(key.name()) {
                into.set(key.name(), self.limit(from, key));
            } else if !self.inherits {
                let diagnostic = Diagnostic::new(format!("`{}` is missing from `[{section}]`", key.name()), "");
                self.problems.add(span, diagnostic.help("\"none\" stands for no limit"));
            }
        }
    }

    fn merge_maximums(&mut self, into: &mut MergedTable, from: &DeTable<'_>, span: &SourceSpan) {
        match from.get("max") {
            Some(node) if node.get_ref().as_str() == Some(SAME) => {
                let own: Vec<_> = into.values.iter().filter(|(_, value)| value.span.source == self.source).collect();
                let own: Vec<_> = own.into_iter().map(|(key, value)| (key.clone(), value.clone())).collect();
                if own.is_empty() {
                    let diagnostic = Diagnostic::new(format!("`max = \"{SAME}\"` changes nothing"), "no limit stands beside it");
                    self.complain(node, diagnostic.help("write the limits that no request may exceed beside it, under [limits]"));
                }
                into.table_at("max", self.span(node)).values.extend(own);
            }
            Some(node) if node.get_ref().is_str() => {
                let diagnostic = Diagnostic::new(format!("`max` is neither a table nor \"{SAME}\""), "no value of it");
                let help = "`max = \"same\"`: requests may ask for no more than the limits that stand here; else write [limits.max]";
                self.complain(node, diagnostic.help(help));
            }
            Some(node) => {
                if let Some(table) = self.table(from, "max") {
                    let span = self.span(node);
                    self.merge_limits(into.table_at("max", span.clone()), table, "limits.max", &span);
                }
            }
            None if self.inherits => {}
            None => {
                let diagnostic = Diagnostic::new("`[limits.max]` is missing", "");
                self.problems.add(span, diagnostic.help("a policy that extends nothing states how far a request may go"));
            }
        }
    }
}
