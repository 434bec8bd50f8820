//! One TOML document, read into typed values that still know where they stand.
//!
//! Refuses unknown keys, wrong types and impossible single values, all of them at once,
//! and asks a document that extends nothing for every required key. How documents are
//! combined, and whether the values go together, is `inherit`'s question.

use std::{collections::BTreeMap, path::PathBuf};

use stockade_protocol::{LimitError, LimitKey, screen};
use toml::{
    Spanned,
    de::{DeTable, DeValue},
};

use crate::{
    alert::{self, Alert},
    approver::{self, Approver},
    check::{self, Checked},
    diagnostic::{At, Complaint, Place, Problems, quote},
    egress::{self, Rule},
    keys::{self, Item, Key},
    model::{Access, AuditMode, Degradable, SocketFamily},
    modules, names,
};

type Node<'i> = Spanned<DeValue<'i>>;

/// More than there are system calls; a longer list is a mistake, and slow to word.
const MOST_ITEMS: usize = 1024;

/// A set as a document writes it.
#[derive(Clone, Debug)]
pub(crate) struct Edit<T> {
    /// The whole set; else what follows changes the inherited one.
    pub replace: Option<Vec<At<T>>>,
    pub add: Vec<At<T>>,
    pub remove: Vec<At<T>>,
}

/// Values of limits.
pub(crate) type LimitValues = BTreeMap<LimitKey, At<Option<u64>>>;

/// Variables by name.
pub(crate) type Variables = BTreeMap<String, String>;

/// One runtime as a document writes it.
#[derive(Clone, Debug)]
pub(crate) struct RuntimeLayer {
    pub place: Place,
    pub command: Option<At<Vec<String>>>,
    pub aliases: Option<Vec<At<String>>>,
    pub extension: Option<String>,
    pub venv: Option<PathBuf>,
    pub environment: Variables,
    pub modules: BTreeMap<String, At<screen::Action>>,
}

/// One document. An absent value is inherited.
#[derive(Clone, Debug, Default)]
pub(crate) struct Layer {
    pub description: Option<At<String>>,
    pub extends: Option<At<String>>,
    pub language: Option<At<String>>,
    pub remove_runtimes: Vec<At<String>>,
    pub read_only: Option<Edit<PathBuf>>,
    pub read_only_optional: Option<Edit<PathBuf>>,
    pub devices: Option<Edit<String>>,
    pub user: Option<At<String>>,
    pub uid: Option<At<u32>>,
    pub gid: Option<At<u32>>,
    pub hostname: Option<At<String>>,
    pub set: Variables,
    pub accept: Option<Edit<String>>,
    pub runtimes: BTreeMap<String, RuntimeLayer>,
    pub limits: LimitValues,
    pub limits_max: LimitValues,
    pub allow: Option<Edit<String>>,
    pub kill: Option<Edit<String>>,
    pub enosys: Option<Edit<String>>,
    pub socket_families: Option<Edit<SocketFamily>>,
    pub ioctl: Option<Edit<u32>>,
    pub whitelist: Option<Edit<Rule>>,
    pub access: Option<At<Access>>,
    pub create: Option<At<bool>>,
    pub home: Option<At<bool>>,
    pub scratch_read_only: Option<Edit<String>>,
    pub hidden: Option<Edit<String>>,
    pub rootless: Option<Edit<Degradable>>,
    pub root: Option<Edit<Degradable>>,
    pub mode: Option<At<AuditMode>>,
    pub preview: Option<At<u64>>,
    pub alerts: Option<Edit<Alert>>,
    pub actions: BTreeMap<screen::Rule, At<screen::Action>>,
    pub modules: Option<Edit<String>>,
    pub builtins: Option<Edit<String>>,
    pub approval_time: Option<At<u64>>,
    pub approvers: Option<Edit<Approver>>,
}

/// Reads one document as a policy. What is wrong goes to `problems`.
pub(crate) fn read(source: usize, text: &str, problems: &mut Problems) -> Layer {
    let mut layer = Layer::default();
    let Some(root) = parse(source, text, problems) else { return layer };
    let top = root.get_ref();
    let mut reader = Reader { source, inherits: top.contains_key("extends"), problems };
    if !reader.version(top) {
        return layer;
    }
    reader.known(top, keys::TOP, &Place::new(source, 0..0), "a policy");
    layer.description = reader.text(top, "description", check::line);
    layer.extends = reader.text(top, "extends", check::policy_name);
    layer.language = reader.text(top, "language", check::language);
    if let Some(node) = top.get("remove_runtimes") {
        layer.remove_runtimes = reader.words(node, "remove_runtimes", check::language);
        if !reader.inherits {
            reader.complain(node, Complaint::new("`remove_runtimes` without `extends`", "nothing is inherited"));
        }
    }
    reader.sections(top, &mut layer);
    layer
}

/// Parses TOML, or says everywhere that it is none.
pub(crate) fn parse<'i>(source: usize, text: &'i str, problems: &mut Problems) -> Option<Spanned<DeTable<'i>>> {
    let (root, errors) = DeTable::parse_recoverable(text);
    for error in &errors {
        let place = Place::new(source, error.span().unwrap_or(0..0));
        problems.add(&place, Complaint::new(format!("not TOML: {}", error.message().replace('\n', ", ")), ""));
    }
    errors.is_empty().then_some(root)
}

/// Reads typed values out of one document.
pub(crate) struct Reader<'p> {
    pub source: usize,
    /// Whether the document starts from another one.
    pub inherits: bool,
    pub problems: &'p mut Problems,
}

impl Reader<'_> {
    pub(crate) fn place(&self, node: &Node<'_>) -> Place {
        Place::new(self.source, node.span())
    }

    pub(crate) fn complain(&mut self, node: &Node<'_>, complaint: Complaint) {
        let place = self.place(node);
        self.problems.add(&place, complaint);
    }

    fn wrong_type(&mut self, node: &Node<'_>, key: &str, wanted: &str) {
        let found = node.get_ref().type_str();
        self.complain(node, Complaint::new(format!("`{key}` must be {wanted}"), format!("this is of type {found}")));
    }

    /// Refuses another format before anything else is said about the file.
    pub(crate) fn version(&mut self, top: &DeTable<'_>) -> bool {
        match top.get("schema") {
            Some(node) if self.number(node, "schema") == Some(1) => true,
            Some(node) => {
                self.complain(node, Complaint::new("unknown version of the format", "this version reads schema 1"));
                false
            }
            None => {
                let place = Place::new(self.source, 0..0);
                let complaint = Complaint::new("`schema` is missing", "").help("start the file with `schema = 1`");
                self.problems.add(&place, complaint);
                false
            }
        }
    }

    /// Refuses unknown keys, and asks for the required ones.
    pub(crate) fn known(&mut self, table: &DeTable<'_>, keys: &[Key], place: &Place, what: &str) {
        self.known_names(table, keys.iter().map(|key| key.name), what);
        if self.inherits {
            return;
        }
        for key in keys.iter().filter(|key| key.required && !table.contains_key(key.name)) {
            let complaint = Complaint::new(format!("`{}` is missing from {what}", key.name), key.about);
            self.problems.add(place, complaint.help("a policy that extends nothing states everything"));
        }
    }

    pub(crate) fn known_names<'k>(&mut self, table: &DeTable<'_>, names: impl Iterator<Item = &'k str> + Clone, what: &str) {
        for key in table.keys() {
            let name = key.get_ref().as_ref();
            if names.clone().all(|known| known != name) {
                let mut complaint = check::unknown("key", name, names.clone());
                complaint.label = format!("not a key of {what}");
                self.problems.add(&Place::new(self.source, key.span()), complaint);
            }
        }
    }

    pub(crate) fn take<T>(&mut self, node: &Node<'_>, checked: Checked<T>) -> Option<At<T>> {
        match checked {
            Ok(value) => Some(At { value, place: self.place(node) }),
            Err(complaint) => {
                self.complain(node, complaint);
                None
            }
        }
    }

    fn number(&mut self, node: &Node<'_>, key: &str) -> Option<i64> {
        let number = node.get_ref().as_integer().map(|found| i64::from_str_radix(found.as_str(), found.radix()));
        match number {
            Some(Ok(number)) => Some(number),
            Some(Err(_)) => {
                self.complain(node, Complaint::new(format!("`{key}` is too large"), "beyond 64 bits"));
                None
            }
            None => {
                self.wrong_type(node, key, "a whole number");
                None
            }
        }
    }

    pub(crate) fn text<T>(&mut self, table: &DeTable<'_>, key: &str, check: impl Fn(&str) -> Checked<T>) -> Option<At<T>> {
        let node = table.get(key)?;
        let Some(text) = node.get_ref().as_str() else {
            self.wrong_type(node, key, "a string");
            return None;
        };
        self.take(node, check(text))
    }

    pub(crate) fn id(&mut self, table: &DeTable<'_>, key: &str, check: impl Fn(i64) -> Checked<u32>) -> Option<At<u32>> {
        let node = table.get(key)?;
        let number = self.number(node, key)?;
        self.take(node, check(number))
    }

    fn flag(&mut self, table: &DeTable<'_>, key: &str) -> Option<At<bool>> {
        let node = table.get(key)?;
        let Some(value) = node.get_ref().as_bool() else {
            self.wrong_type(node, key, "true or false");
            return None;
        };
        Some(At { value, place: self.place(node) })
    }

    /// A list of strings; what is wrong with one does not hide the others.
    pub(crate) fn words<T>(&mut self, node: &Node<'_>, key: &str, check: impl Fn(&str) -> Checked<T>) -> Vec<At<T>> {
        let Some(items) = node.get_ref().as_array() else {
            self.wrong_type(node, key, "a list of strings");
            return Vec::new();
        };
        let mut out = Vec::new();
        if items.len() > MOST_ITEMS {
            self.complain(node, Complaint::new(format!("`{key}` has more than {MOST_ITEMS} items"), ""));
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

    /// A set: the whole of it, or under `extends` its changes.
    fn edit<T>(&mut self, table: &DeTable<'_>, key: &str, check: impl Fn(&str) -> Checked<T>) -> Option<Edit<T>> {
        let node = table.get(key)?;
        let mut edit = Edit { replace: None, add: Vec::new(), remove: Vec::new() };
        match node.get_ref() {
            DeValue::Array(_) => {
                edit.replace = Some(self.words(node, key, check));
                if self.inherits {
                    let title = format!("`{key}` is inherited, so a bare list does not say what becomes of it");
                    self.complain(
                        node,
                        Complaint::new(title, "a bare list under `extends`")
                            .help("write `{ add = […] }`, `{ remove = […] }`, both, or `{ replace = […] }`"),
                    );
                }
            }
            DeValue::Table(changes) if self.inherits => {
                self.known_names(changes, ["add", "remove", "replace"].into_iter(), "a list's changes");
                edit.add = changes.get("add").map(|node| self.words(node, "add", &check)).unwrap_or_default();
                edit.remove = changes.get("remove").map(|node| self.words(node, "remove", &check)).unwrap_or_default();
                edit.replace = changes.get("replace").map(|node| self.words(node, "replace", &check));
                let changed = changes.contains_key("add") || changes.contains_key("remove");
                if changed == changes.contains_key("replace") {
                    let title = format!("`{key}` needs either `replace` or one of `add` and `remove`");
                    self.complain(node, Complaint::new(title, if changed { "has both" } else { "has none" }));
                }
            }
            DeValue::Table(_) => {
                let title = format!("`{key}` must be a list: this policy extends nothing");
                self.complain(node, Complaint::new(title, "there is nothing to change").help("write `[…]`"));
            }
            _ => self.wrong_type(node, key, "a list of strings"),
        }
        Some(edit)
    }

    fn table<'t, 'i>(&mut self, table: &'t DeTable<'i>, key: &str) -> Option<&'t DeTable<'i>> {
        let node = table.get(key)?;
        let found = node.get_ref().as_table();
        if found.is_none() {
            self.wrong_type(node, key, "a table");
        }
        found
    }

    fn section<'t, 'i>(&mut self, top: &'t DeTable<'i>, name: &str, keys: &[Key]) -> Option<&'t DeTable<'i>> {
        let table = self.table(top, name)?;
        let place = top.get(name).map_or(Place::new(self.source, 0..0), |node| self.place(node));
        self.known(table, keys, &place, &format!("`[{name}]`"));
        Some(table)
    }

    fn variables(&mut self, table: &DeTable<'_>, key: &str) -> Variables {
        let mut out = Variables::new();
        let Some(table) = self.table(table, key) else { return out };
        for (name, node) in table {
            let place = Place::new(self.source, name.span());
            if let Err(complaint) = check::variable(name.get_ref()) {
                self.problems.add(&place, complaint);
                continue;
            }
            match node.get_ref().as_str() {
                Some(text) => {
                    let value = self.take(node, check::variable_value(text));
                    out.extend(value.map(|value| (name.get_ref().to_string(), value.value)));
                }
                None => self.wrong_type(node, name.get_ref(), "a string"),
            }
        }
        out
    }

    fn limits(&mut self, table: &DeTable<'_>, section: &str, place: &Place) -> LimitValues {
        let mut out = LimitValues::new();
        let max = (section == "limits").then_some("max");
        let names = LimitKey::ALL.iter().map(|key| key.name()).chain(max);
        self.known_names(table, names, &format!("`[{section}]`"));
        for key in LimitKey::ALL {
            match table.get(key.name()) {
                Some(node) => out.extend(self.limit(key, node).map(|value| (key, value))),
                None if self.inherits => {}
                None => {
                    let complaint = Complaint::new(format!("`{}` is missing from `[{section}]`", key.name()), "");
                    self.problems.add(place, complaint.help("\"none\" stands for no limit"));
                }
            }
        }
        out
    }

    fn limit(&mut self, key: LimitKey, node: &Node<'_>) -> Option<At<Option<u64>>> {
        let wrong = || LimitError { expected: format!("`{}` cannot be of this type", key.name()) };
        let value = match node.get_ref() {
            DeValue::String(text) => key.parse_text(text),
            DeValue::Integer(found) => {
                i64::from_str_radix(found.as_str(), found.radix()).map_err(|_| wrong()).and_then(|number| key.parse_integer(number))
            }
            DeValue::Float(found) => found.as_str().parse().map_err(|_| wrong()).and_then(|number| key.parse_float(number)),
            _ => Err(wrong()),
        };
        self.take(node, value.map_err(|error| Complaint::new(error.expected, "not a value of this limit")))
    }

    fn runtimes(&mut self, top: &DeTable<'_>) -> BTreeMap<String, RuntimeLayer> {
        let mut out = BTreeMap::new();
        let Some(table) = self.table(top, "runtimes") else { return out };
        for (name, node) in table {
            let place = Place::new(self.source, name.span());
            let checked = check::language(name.get_ref());
            let (Ok(name), Some(runtime)) = (&checked, node.get_ref().as_table()) else {
                match checked {
                    Ok(name) => self.wrong_type(node, &name, "a table"),
                    Err(complaint) => self.problems.add(&place, complaint),
                }
                continue;
            };
            out.insert(name.clone(), self.runtime(name, runtime, place));
        }
        out
    }

    fn runtime(&mut self, name: &str, table: &DeTable<'_>, place: Place) -> RuntimeLayer {
        self.known(table, keys::RUNTIME, &place, &format!("`[runtimes.{name}]`"));
        let command = table.get("command").and_then(|node| {
            let words: Vec<_> = self.words(node, "command", check::argument).into_iter().map(|word| word.value).collect();
            let checked = command(words);
            self.take(node, checked)
        });
        RuntimeLayer {
            place,
            command,
            aliases: table.get("aliases").map(|node| self.words(node, "aliases", check::language)),
            extension: self.text(table, "extension", check::extension).map(|at| at.value),
            venv: self.text(table, "venv", check::shown).map(|at| at.value),
            environment: self.variables(table, "environment"),
            modules: self.modules(table),
        }
    }

    fn modules(&mut self, table: &DeTable<'_>) -> BTreeMap<String, At<screen::Action>> {
        let mut out = BTreeMap::new();
        let Some(table) = self.table(table, "modules") else { return out };
        if table.len() > MOST_ITEMS {
            let place = table.iter().next().map_or(Place::new(self.source, 0..0), |(name, _)| Place::new(self.source, name.span()));
            self.problems.add(&place, Complaint::new(format!("`modules` has more than {MOST_ITEMS} names"), ""));
            return out;
        }
        for (key, node) in table {
            let name = key.get_ref().as_ref();
            if node.get_ref().is_table() {
                let complaint = Complaint::new(format!("`{name}` is a table here"), "a dot outside quotes begins another table");
                self.complain(node, complaint.help(format!("write the whole name in quotes, such as \"{name}.name\" = \"note\"")));
                continue;
            }
            let Some(action) = self.text(table, name, |text| check::word(modules::ACTIONS, "action", text)) else { continue };
            match modules::name(name, action.value) {
                Ok(()) => drop(out.insert(name.to_owned(), action)),
                Err(complaint) => self.problems.add(&Place::new(self.source, key.span()), complaint),
            }
        }
        out
    }

    fn sections(&mut self, top: &DeTable<'_>, layer: &mut Layer) {
        if let Some(table) = self.section(top, "filesystem", keys::FILESYSTEM) {
            layer.read_only = self.edit(table, "read_only", check::shown);
            layer.read_only_optional = self.edit(table, "read_only_optional", check::shown);
            layer.devices = self.edit(table, "devices", check::device);
        }
        if let Some(table) = self.section(top, "identity", keys::IDENTITY) {
            layer.user = self.text(table, "user", check::user);
            layer.uid = self.id(table, "uid", check::id);
            layer.gid = self.id(table, "gid", check::id);
            layer.hostname = self.text(table, "hostname", check::hostname);
        }
        if let Some(table) = self.section(top, "environment", keys::ENVIRONMENT) {
            layer.set = self.variables(table, "set");
            layer.accept = self.edit(table, "accept", check::pattern);
        }
        layer.runtimes = self.runtimes(top);
        if let Some(table) = self.table(top, "limits") {
            let place = top.get("limits").map_or(Place::new(self.source, 0..0), |node| self.place(node));
            layer.limits = self.limits(table, "limits", &place);
            match self.table(table, "max") {
                Some(max) => {
                    let place = table.get("max").map_or(place, |node| self.place(node));
                    layer.limits_max = self.limits(max, "limits.max", &place);
                }
                None if self.inherits || table.contains_key("max") => {}
                None => self.problems.add(
                    &place,
                    Complaint::new("`[limits.max]` is missing", "").help("a policy that extends nothing says how far a request may go"),
                ),
            }
        }
        if let Some(table) = self.section(top, "seccomp", keys::SECCOMP) {
            layer.allow = self.edit(table, "allow", allowed_syscall);
            layer.kill = self.edit(table, "kill", check::syscall);
            layer.enosys = self.edit(table, "enosys", check::syscall);
            layer.socket_families = self.edit(table, "socket_families", |text| check::word(names::FAMILIES, "socket family", text));
            layer.ioctl = self.edit(table, "ioctl", check::ioctl);
        }
        if let Some(table) = self.section(top, "egress", keys::EGRESS) {
            layer.whitelist = self.edit(table, "whitelist", egress::rule);
        }
        if let Some(table) = self.section(top, "scratch", keys::SCRATCH) {
            layer.access = self.text(table, "access", |text| check::word(names::ACCESS, "access", text));
            layer.create = self.flag(table, "create");
            layer.home = self.flag(table, "home");
            layer.scratch_read_only = self.edit(table, "read_only", check::glob);
            layer.hidden = self.edit(table, "hidden", check::glob);
        }
        if let Some(table) = self.section(top, "degrade", keys::DEGRADE) {
            let check = |text: &str| check::word(names::DEGRADABLE, "degradable layer", text);
            layer.rootless = self.edit(table, "rootless", |text| match check(text)? {
                Degradable::UserNamespace => {
                    let why = "an ordinary user makes all other namespaces by means of it";
                    Err(Complaint::new(format!("{} may be missing under `root` only", quote(text)), why))
                }
                layer => Ok(layer),
            });
            layer.root = self.edit(table, "root", check);
        }
        if let Some(table) = self.section(top, "audit", keys::AUDIT) {
            layer.mode = self.text(table, "mode", |text| check::word(names::AUDIT_MODES, "mode", text));
            layer.preview = self.text(table, "preview", check::preview);
            layer.alerts = self.edit(table, "alerts", alert::alert);
        }
        if let Some(table) = self.section(top, "screen", &keys::SCREEN) {
            for rule in screen::Rule::ALL {
                let action = self.text(table, rule.name(), |text| check::word(names::ACTIONS, "action", text));
                layer.actions.extend(action.map(|action| (rule, action)));
            }
            layer.modules = self.edit(table, "modules", |text| check::dotted("module", text));
            layer.builtins = self.edit(table, "builtins", |text| check::dotted("built-in name", text));
            layer.approval_time = self.text(table, "approval_time", check::approval_time);
            layer.approvers = self.edit(table, "approvers", approver::approver);
        }
    }
}

/// A system call that may be allowed at all.
fn allowed_syscall(text: &str) -> Checked<String> {
    match names::find(names::FORBIDDEN_SYSCALLS, text) {
        Some(reason) => Err(Complaint::new(format!("no policy may allow {}", quote(text)), reason)),
        None => check::syscall(text),
    }
}

/// A runtime's command: a program's path, and one place for the code.
fn command(words: Vec<String>) -> Checked<Vec<String>> {
    let Some(program) = words.first() else {
        return Err(Complaint::new("a command needs a program", "empty").help("such as [\"/usr/bin/perl\", \"{file}\"]"));
    };
    if program.contains("{file}") {
        return Err(Complaint::new("the code cannot be its own interpreter", "the first word is the program"));
    }
    check::absolute(program)?;
    match words.iter().map(|word| word.matches("{file}").count()).sum::<usize>() {
        1 => Ok(words),
        found => Err(Complaint::new("exactly one argument of a command holds `{file}`", format!("{found} of them here"))
            .help("`{file}` becomes the path of the code, such as [\"/usr/bin/perl\", \"{file}\"]")),
    }
}

/// The table's word for an item, for the schema.
pub(crate) fn item_values(item: Item) -> Vec<&'static str> {
    match item {
        Item::Device => names::DEVICES.to_vec(),
        Item::Family => names::FAMILIES.iter().map(|(name, _)| *name).collect(),
        Item::Layer => names::DEGRADABLE.iter().map(|(name, _)| *name).collect(),
        Item::UsersLayer => {
            let users = names::DEGRADABLE.iter().filter(|(_, layer)| *layer != Degradable::UserNamespace);
            users.map(|(name, _)| *name).collect()
        }
        Item::Path
        | Item::Pattern
        | Item::Syscall
        | Item::Ioctl
        | Item::Peer
        | Item::Glob
        | Item::Alert
        | Item::Module
        | Item::Builtin
        | Item::Approver => Vec::new(),
    }
}
