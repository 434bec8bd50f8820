//! The abstract value of an expression, without running it.
//!
//! Names are followed through imports and assignments ([`super::names`]); strings are built as far
//! as their parts are known. Loops, attributes that the program sets and the results of its own
//! functions are not followed. Values are shared, and size and work are bounded ([`Budget`]).

use std::rc::Rc;

use ruff_python_ast::{Expr, ExprCall, ExprSubscript, FStringPart, InterpolatedStringElement, Number, Operator, UnaryOp};

use super::{names::Names, tables};
use crate::{
    budget::{Budget, MAX_TEXT_LEN},
    paths,
};

/// Expressions that are nested deeper are unknown.
const MAX_DEPTH: u8 = 60;
/// Items of a list that are kept.
const MAX_ITEMS: usize = 4096;
/// Modules that others import, so that `shutil.os` is `os`.
const CARRIED: [&str; 8] = ["os", "sys", "subprocess", "builtins", "importlib", "ctypes", "socket", "posix"];

/// What an expression evaluates to. `Eq` compares shared parts by pointer first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) enum AbstractValue {
    #[default]
    Unknown,
    /// A string or bytes; not `whole` where `*` stands for unknown parts.
    Text {
        text: Rc<str>,
        whole: bool,
    },
    Number(i64),
    List(Rc<[Value]>),
    /// A module, a function or a class, or the `__dict__` of one, by its dotted name.
    Name(String),
    /// A function that returns this attribute of its argument.
    Getter(String),
}

/// Where a value comes from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Provenance {
    /// Built from parts without need.
    pub built: bool,
    /// Decoded.
    pub decoded: bool,
    /// Fetched.
    pub fetched: bool,
}

impl Provenance {
    fn and(self, other: Provenance) -> Provenance {
        Provenance { built: self.built || other.built, decoded: self.decoded || other.decoded, fetched: self.fetched || other.fetched }
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Value {
    pub what: AbstractValue,
    pub made: Provenance,
}

impl Value {
    pub(super) fn name(name: impl Into<String>) -> Self {
        Value { what: AbstractValue::Name(name.into()), made: Provenance::default() }
    }

    pub(super) fn unknown(made: Provenance) -> Self {
        Value { what: AbstractValue::Unknown, made }
    }

    fn text(text: impl Into<Rc<str>>, whole: bool, made: Provenance) -> Self {
        let text = text.into();
        if text.len() > MAX_TEXT_LEN {
            return Value::unknown(made);
        }
        Value { what: AbstractValue::Text { text, whole }, made }
    }

    /// The string, also with unknown parts.
    pub(super) fn as_text(&self) -> Option<&str> {
        match &self.what {
            AbstractValue::Text { text, .. } => Some(text),
            _ => None,
        }
    }

    /// The string, where all of it is known.
    pub(super) fn as_whole(&self) -> Option<&str> {
        match &self.what {
            AbstractValue::Text { text, whole: true } => Some(text),
            _ => None,
        }
    }

    /// The dotted name.
    pub(super) fn as_name(&self) -> Option<&str> {
        match &self.what {
            AbstractValue::Name(name) => Some(name),
            _ => None,
        }
    }

    pub(super) fn items(&self) -> &[Value] {
        match &self.what {
            AbstractValue::List(items) => items,
            _ => &[],
        }
    }

    /// Spends the cost of reading it.
    fn charge(&self, budget: &Budget) {
        match &self.what {
            AbstractValue::Text { text, .. } => budget.spend_built(text),
            // A chain of attributes copies the name with each link.
            AbstractValue::Name(name) | AbstractValue::Getter(name) => budget.spend_built(name),
            AbstractValue::List(items) => drop(budget.spend(items.len())),
            _ => {}
        }
    }
}

/// A string that is built from parts, until it is too long to be kept.
#[derive(Default)]
struct Builder {
    text: String,
    /// Parts that are not empty.
    parts: usize,
    has_unknown: bool,
    made: Provenance,
}

impl Builder {
    fn literal(&mut self, text: &str) {
        self.parts += usize::from(!text.is_empty());
        if self.text.len() <= MAX_TEXT_LEN {
            self.text.push_str(text);
        }
    }

    /// A value; `*` where it is unknown.
    fn value(&mut self, value: &Value) {
        self.literal(value.as_text().unwrap_or("*"));
        self.has_unknown |= value.as_whole().is_none();
        self.made = self.made.and(value.made);
    }

    fn done(self) -> Value {
        let built = self.made.built || (self.parts > 1 && !self.has_unknown);
        Value::text(self.text, !self.has_unknown, Provenance { built, ..self.made })
    }
}

impl Names {
    /// The value of an expression.
    pub(super) fn value(&self, expr: &Expr) -> Value {
        self.at(expr, 0)
    }

    fn at(&self, expr: &Expr, depth: u8) -> Value {
        if depth > MAX_DEPTH || !self.budget.spend(1) {
            return Value::default();
        }
        let value = self.part(expr, depth + 1);
        value.charge(&self.budget);
        value
    }

    fn part(&self, expr: &Expr, depth: u8) -> Value {
        match expr {
            Expr::StringLiteral(literal) => Value::text(literal.value.to_str(), true, Provenance::default()),
            Expr::BytesLiteral(literal) => {
                let text: String = literal.value.bytes().map(char::from).collect();
                Value::text(text, true, Provenance::default())
            }
            Expr::FString(literal) => self.f_string(literal.value.as_slice(), depth),
            Expr::NumberLiteral(literal) => match &literal.value {
                Number::Int(number) => number.as_i64().map(number_of).unwrap_or_default(),
                _ => Value::default(),
            },
            Expr::Name(name) => self.look_up(name.id.as_str()),
            Expr::Attribute(attribute) => self.at(&attribute.value, depth).attribute(attribute.attr.as_str()),
            Expr::Subscript(subscript) => self.subscript(subscript, depth),
            Expr::BinOp(both) => operate(both.op, &self.at(&both.left, depth), &self.at(&both.right, depth)),
            Expr::UnaryOp(unary) => match (unary.op, self.at(&unary.operand, depth)) {
                (UnaryOp::USub, Value { what: AbstractValue::Number(number), .. }) => number_of(number.wrapping_neg()),
                (_, value) => Value::unknown(value.made),
            },
            Expr::Call(call) => self.call(call, depth),
            Expr::Tuple(tuple) => self.list(&tuple.elts, depth),
            Expr::List(list) => self.list(&list.elts, depth),
            Expr::Named(named) => self.at(&named.value, depth),
            // What it makes is unknown, its provenance is not.
            Expr::Generator(made) => Value::unknown(self.at(&made.elt, depth).made),
            Expr::Lambda(lambda) => Value::unknown(self.at(&lambda.body, depth).made),
            _ => Value::default(),
        }
    }

    fn list(&self, items: &[Expr], depth: u8) -> Value {
        let items: Vec<Value> = items.iter().take(MAX_ITEMS).map(|item| self.at(item, depth)).collect();
        let made = items.iter().fold(Provenance::default(), |made, item| made.and(item.made));
        Value { what: AbstractValue::List(items.into()), made }
    }

    fn f_string(&self, parts: &[FStringPart], depth: u8) -> Value {
        let mut out = Builder::default();
        for part in parts {
            match part {
                FStringPart::Literal(literal) => out.literal(literal.as_str()),
                FStringPart::FString(formatted) => formatted.elements.iter().for_each(|element| match element {
                    InterpolatedStringElement::Literal(literal) => out.literal(&literal.value),
                    InterpolatedStringElement::Interpolation(inner) => out.value(&self.at(&inner.expression, depth)),
                }),
            }
        }
        out.done()
    }

    fn subscript(&self, subscript: &ExprSubscript, depth: u8) -> Value {
        let base = self.at(&subscript.value, depth);
        if let Expr::Slice(slice) = &*subscript.slice {
            let step = slice.step.as_deref().map(|step| self.at(step, depth).what);
            let whole = slice.lower.is_none() && slice.upper.is_none();
            return match base.as_whole() {
                Some(text) if whole && step == Some(AbstractValue::Number(-1)) => {
                    Value::text(text.chars().rev().collect::<String>(), true, Provenance { built: true, ..base.made })
                }
                _ => Value::unknown(base.made),
            };
        }
        let index = self.at(&subscript.slice, depth);
        let made = base.made.and(index.made);
        match (&base.what, &index.what) {
            (AbstractValue::Name(name), AbstractValue::Text { text, whole: true }) if name == "sys.modules" => {
                Value { made, ..Value::name(canonical(text)) }
            }
            (AbstractValue::Name(_), AbstractValue::Text { text, whole: true }) => Value { made, ..base.attribute(text) },
            (AbstractValue::List(items), AbstractValue::Number(at)) => {
                usize::try_from(*at).ok().and_then(|at| items.get(at)).cloned().unwrap_or_default()
            }
            _ => Value::unknown(made),
        }
    }

    fn call(&self, call: &ExprCall, depth: u8) -> Value {
        let arguments: Vec<Value> = call.arguments.args.iter().take(MAX_ITEMS).map(|argument| self.at(argument, depth)).collect();
        let made = arguments.iter().fold(Provenance::default(), |made, argument| made.and(argument.made));
        let made = call.arguments.keywords.iter().fold(made, |made, keyword| made.and(self.at(&keyword.value, depth).made));
        let function = match &*call.func {
            // The object is evaluated once, because chains of methods are long.
            Expr::Attribute(attribute) => {
                let base = self.at(&attribute.value, depth);
                if let Some(value) = method(&base, attribute.attr.as_str(), &arguments, made) {
                    return value;
                }
                base.attribute(attribute.attr.as_str())
            }
            function => self.at(function, depth),
        };
        let made = made.and(function.made);
        match &function.what {
            AbstractValue::Name(name) => self.result(name, &arguments, made),
            AbstractValue::Getter(attribute) => arguments.first().map(|object| object.attribute(attribute)).unwrap_or_default(),
            _ => Value::unknown(made),
        }
    }

    /// The result of a known function.
    fn result(&self, name: &str, arguments: &[Value], made: Provenance) -> Value {
        let first = arguments.first();
        let whole = first.and_then(Value::as_whole);
        let value = match name {
            "builtins.chr" => Some(Value::unknown(Provenance { built: true, ..made })),
            "builtins.map" if first.and_then(Value::as_name) == Some("builtins.chr") => {
                Some(Value::unknown(Provenance { built: true, ..made }))
            }
            "builtins.bytes" | "builtins.bytearray" if first.is_some_and(|list| !list.items().is_empty()) => {
                Some(Value::unknown(Provenance { built: true, ..made }))
            }
            "builtins.__import__" | "importlib.import_module" | "importlib.__import__" => {
                whole.map(|module| Value { made, ..Value::name(canonical(module)) })
            }
            "builtins.getattr" => match arguments {
                [object, name, ..] => name.as_whole().map(|name| Value { made, ..object.attribute(name) }),
                _ => None,
            },
            "operator.attrgetter" => whole.map(|name| Value { what: AbstractValue::Getter(name.to_owned()), made }),
            "builtins.str" | "os.path.expanduser" | "os.path.expandvars" | "os.path.abspath" | "os.path.realpath" | "os.path.normpath"
            | "os.fspath" => first.cloned(),
            "pathlib.Path" | "pathlib.PurePath" | "pathlib.PosixPath" | "os.path.join" => {
                first.filter(|path| path.as_text().is_some()).map(|path| {
                    arguments.iter().skip(1).fold(path.clone(), |path, part| {
                        path.charge(&self.budget);
                        below(&path, part)
                    })
                })
            }
            "pathlib.Path.home" => Some(Value::text("~", true, made)),
            _ => None,
        };
        value.unwrap_or_else(|| {
            Value::unknown(Provenance {
                decoded: made.decoded || tables::decodes(name),
                fetched: made.fetched || tables::fetches(name),
                ..made
            })
        })
    }
}

impl Value {
    /// An attribute of a module or a class.
    pub(super) fn attribute(&self, attribute: &str) -> Value {
        match &self.what {
            AbstractValue::Name(_) if attribute == "__dict__" => self.clone(),
            AbstractValue::Name(name) => {
                let carried = CARRIED.contains(&attribute) && !name.starts_with("builtins");
                let full = if carried { canonical(attribute) } else { canonical(&format!("{name}.{attribute}")) };
                Value { made: self.made, ..Value::name(full) }
            }
            _ => Value::unknown(self.made),
        }
    }
}

fn number_of(number: i64) -> Value {
    Value { what: AbstractValue::Number(number), made: Provenance::default() }
}

/// The name of a module in the tables.
pub(super) fn canonical(name: &str) -> String {
    for (other, usual) in
        [("posix", "os"), ("nt", "os"), ("__builtin__", "builtins"), ("_io", "io"), ("posixpath", "os.path"), ("pathlib2", "pathlib")]
    {
        if let Some(rest) = name.strip_prefix(other).filter(|rest| rest.is_empty() || rest.starts_with('.')) {
            return format!("{usual}{rest}");
        }
    }
    name.to_owned()
}

fn operate(operator: Operator, left: &Value, right: &Value) -> Value {
    let made = left.made.and(right.made);
    match (operator, &left.what, &right.what) {
        // Rules match a path by its known beginning.
        (Operator::Add, AbstractValue::Text { .. }, _) | (Operator::Add, _, AbstractValue::Text { .. }) => {
            let mut out = Builder::default();
            out.value(left);
            out.value(right);
            out.done()
        }
        (Operator::Div, AbstractValue::Text { .. }, _) => below(left, right),
        (Operator::Mult, AbstractValue::Text { text, whole }, AbstractValue::Number(times)) => {
            let times = usize::try_from(*times).unwrap_or(0);
            match text.len().saturating_mul(times) <= MAX_TEXT_LEN {
                true => Value::text(text.repeat(times), *whole, made),
                false => Value::unknown(made),
            }
        }
        (Operator::Mod, AbstractValue::Text { text, whole: true }, AbstractValue::List(values)) => filled(text, "%s", values, made),
        (Operator::Mod, AbstractValue::Text { text, whole: true }, _) => filled(text, "%s", std::slice::from_ref(right), made),
        _ => Value::unknown(made),
    }
}

/// A path below another.
fn below(path: &Value, part: &Value) -> Value {
    let whole = path.as_whole().is_some() && part.as_whole().is_some();
    let joined = paths::join(path.as_text().unwrap_or("*"), part.as_text().unwrap_or("*"));
    Value::text(joined, whole, path.made.and(part.made))
}

/// A format string with its gaps filled in order.
fn filled(text: &str, gap: &str, values: &[Value], made: Provenance) -> Value {
    let mut out = Builder { made, ..Builder::default() };
    for (at, part) in text.split(gap).enumerate() {
        if let Some(before) = at.checked_sub(1) {
            out.value(values.get(before).unwrap_or(&Value::default()));
        }
        out.literal(part);
    }
    out.done()
}

/// Methods of strings and paths.
fn method(base: &Value, name: &str, arguments: &[Value], made: Provenance) -> Option<Value> {
    let made = base.made.and(made);
    let AbstractValue::Text { text, whole } = &base.what else { return None };
    let mut out = Builder { made, has_unknown: !whole, ..Builder::default() };
    match (name, arguments) {
        ("join", [Value { what: AbstractValue::List(items), .. }, ..]) => {
            for (at, item) in items.iter().enumerate() {
                out.literal(if at > 0 { text } else { "" });
                out.value(item);
            }
            Some(out.done())
        }
        ("replace", [old, new, ..]) => {
            let (Some(old), Some(new)) = (old.as_whole().filter(|old| !old.is_empty()), new.as_whole()) else {
                return Some(Value::unknown(made));
            };
            for (at, part) in text.split(old).enumerate() {
                out.literal(if at > 0 { new } else { "" });
                out.literal(part);
            }
            Some(out.done())
        }
        ("format", _) if text.contains("{}") => Some(filled(text, "{}", arguments, made)),
        ("decode" | "encode" | "expanduser" | "absolute" | "resolve" | "strip" | "as_posix" | "rstrip" | "lstrip" | "__str__", _) => {
            Some(Value::text(text.clone(), *whole, made))
        }
        ("join", _) => Some(Value::unknown(made)),
        _ => None,
    }
}
