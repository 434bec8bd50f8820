//! The abstract value of an expression, without running it.
//!
//! Names are followed through imports and assignments ([`super::names`]); strings are built as far
//! as their parts are known. Loops are not followed. Values are shared, and size and work are
//! bounded ([`Budget`]).

use std::rc::Rc;

use ruff_python_ast::{Expr, ExprAttribute, ExprCall, ExprSubscript, FStringPart, InterpolatedStringElement, Number, Operator, UnaryOp};

use super::{
    names::{Names, is_meaningful},
    tables,
};
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
    /// A module, a function or a class, by its dotted name.
    Name(String),
    /// The `__dict__` of one.
    Namespace(String),
    /// The result of calling one.
    Result(String),
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

    fn text(text: impl Into<Rc<str>>, whole: bool, made: Provenance) -> Self {
        let text = text.into();
        if text.len() > MAX_TEXT_LEN {
            return Value { what: AbstractValue::Unknown, made };
        }
        Value { what: AbstractValue::Text { text, whole }, made }
    }

    fn of(what: AbstractValue, made: Provenance) -> Self {
        Value { what, made }
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
            AbstractValue::Name(name) | AbstractValue::Namespace(name) | AbstractValue::Result(name) | AbstractValue::Getter(name) => {
                budget.spend_built(name)
            }
            AbstractValue::List(items) => {
                budget.spend(items.len());
            }
            _ => {}
        }
    }
}

impl Names {
    /// The value of an expression.
    pub(super) fn value(&mut self, expr: &Expr) -> Value {
        self.at(expr, 0)
    }

    fn at(&mut self, expr: &Expr, depth: u8) -> Value {
        if depth > MAX_DEPTH || !self.budget.spend(1) {
            return Value::default();
        }
        let value = self.part(expr, depth + 1);
        value.charge(&self.budget);
        value
    }

    fn part(&mut self, expr: &Expr, depth: u8) -> Value {
        match expr {
            Expr::StringLiteral(literal) => Value::text(literal.value.to_str(), true, Provenance::default()),
            Expr::BytesLiteral(literal) => {
                let text: String = literal.value.bytes().map(char::from).collect();
                Value::text(text, true, Provenance::default())
            }
            Expr::FString(literal) => self.f_string(literal.value.as_slice(), depth),
            Expr::NumberLiteral(literal) => match &literal.value {
                Number::Int(number) => {
                    number.as_i64().map(|number| Value::of(AbstractValue::Number(number), Provenance::default())).unwrap_or_default()
                }
                _ => Value::default(),
            },
            Expr::Name(name) => self.look_up(name.id.as_str()),
            Expr::Attribute(attribute) => {
                let base = self.at(&attribute.value, depth);
                self.attribute_of(&base, attribute)
            }
            Expr::Subscript(subscript) => self.subscript(subscript, depth),
            Expr::BinOp(both) => {
                let (left, right) = (self.at(&both.left, depth), self.at(&both.right, depth));
                operate(both.op, left, right)
            }
            Expr::UnaryOp(unary) => match (unary.op, self.at(&unary.operand, depth)) {
                (UnaryOp::USub, Value { what: AbstractValue::Number(number), made }) => {
                    Value::of(AbstractValue::Number(number.wrapping_neg()), made)
                }
                (_, value) => Value::of(AbstractValue::Unknown, value.made),
            },
            Expr::Call(call) => self.call(call, depth),
            Expr::Tuple(tuple) => self.list(&tuple.elts, depth),
            Expr::List(list) => self.list(&list.elts, depth),
            // The elements are unknown, their provenance is not.
            Expr::Generator(made) => Value::of(AbstractValue::Unknown, self.at(&made.elt, depth).made),
            Expr::Named(named) => {
                let value = self.at(&named.value, depth);
                // It may not run, after `and` for example.
                let mark = self.enter();
                self.assign(&named.target, &value);
                self.join(mark);
                value
            }
            Expr::If(branches) => one_of([self.at(&branches.body, depth), self.at(&branches.orelse, depth)]),
            _ => Value::default(),
        }
    }

    fn list(&mut self, items: &[Expr], depth: u8) -> Value {
        let items: Vec<Value> = items.iter().take(MAX_ITEMS).map(|item| self.at(item, depth)).collect();
        let made = items.iter().fold(Provenance::default(), |made, item| made.and(item.made));
        Value::of(AbstractValue::List(items.into()), made)
    }

    fn f_string(&mut self, parts: &[FStringPart], depth: u8) -> Value {
        let (mut text, mut whole, mut made) = (String::new(), true, Provenance::default());
        for part in parts {
            match part {
                FStringPart::Literal(literal) => text.push_str(literal.as_str()),
                FStringPart::FString(formatted) => {
                    for element in &formatted.elements {
                        match element {
                            InterpolatedStringElement::Literal(literal) => text.push_str(&literal.value),
                            InterpolatedStringElement::Interpolation(inner) => {
                                let value = self.at(&inner.expression, depth);
                                made = made.and(value.made);
                                whole &= value.as_whole().is_some();
                                made.built |= value.as_whole().is_some();
                                put(&mut text, value.as_text().unwrap_or("*"));
                            }
                        }
                    }
                }
            }
        }
        Value::text(text, whole, made)
    }

    /// An attribute that the program has set, or one of its object: the one that rules may know,
    /// else the one that was set.
    fn attribute_of(&self, base: &Value, attribute: &ExprAttribute) -> Value {
        let name = attribute.attr.as_str();
        let set = attribute.value.as_name_expr().and_then(|owner| self.set_attribute(owner.id.as_str(), name));
        match set {
            Some(set) if is_meaningful(&set) => set,
            set => {
                let own = self.attribute(base, name);
                set.filter(|_| !is_meaningful(&own)).unwrap_or(own)
            }
        }
    }

    /// An attribute of a value.
    pub(super) fn attribute(&self, base: &Value, attribute: &str) -> Value {
        let made = base.made;
        match &base.what {
            AbstractValue::Name(name) if attribute == "__dict__" => Value::of(AbstractValue::Namespace(name.clone()), made),
            AbstractValue::Name(name) if CARRIED.contains(&attribute) && !name.starts_with("builtins") => {
                Value::of(AbstractValue::Name(canonical(attribute)), made)
            }
            AbstractValue::Name(name) => Value::of(AbstractValue::Name(canonical(&format!("{name}.{attribute}"))), made),
            _ => Value::of(AbstractValue::Unknown, made),
        }
    }

    fn subscript(&mut self, subscript: &ExprSubscript, depth: u8) -> Value {
        let base = self.at(&subscript.value, depth);
        if let Expr::Slice(slice) = &*subscript.slice {
            let step = slice.step.as_deref().map(|step| self.at(step, depth).what);
            let whole = slice.lower.is_none() && slice.upper.is_none();
            return match base.as_whole() {
                Some(text) if whole && step == Some(AbstractValue::Number(-1)) => {
                    Value::text(text.chars().rev().collect::<String>(), true, Provenance { built: true, ..base.made })
                }
                _ => Value::of(AbstractValue::Unknown, base.made),
            };
        }
        let index = self.at(&subscript.slice, depth);
        let made = base.made.and(index.made);
        match (&base.what, &index.what) {
            (AbstractValue::Namespace(name), AbstractValue::Text { text, whole: true }) => {
                Value { made, ..self.attribute(&Value::name(name), text) }
            }
            (AbstractValue::Name(name), AbstractValue::Text { text, whole: true }) => match name.as_str() {
                "sys.modules" => Value::of(AbstractValue::Name(canonical(text)), made),
                "builtins" => Value::of(AbstractValue::Name(format!("builtins.{text}")), made),
                _ => Value::of(AbstractValue::Unknown, made),
            },
            (AbstractValue::Result(name), AbstractValue::Text { text, whole: true })
                if matches!(name.as_str(), "builtins.globals" | "builtins.locals" | "builtins.vars") =>
            {
                Value { made, ..self.look_up(text) }
            }
            (AbstractValue::List(items), AbstractValue::Number(at)) => {
                usize::try_from(*at).ok().and_then(|at| items.get(at)).cloned().unwrap_or_default()
            }
            _ => Value::of(AbstractValue::Unknown, made),
        }
    }

    fn call(&mut self, call: &ExprCall, depth: u8) -> Value {
        let arguments: Vec<Value> = call.arguments.args.iter().take(MAX_ITEMS).map(|argument| self.at(argument, depth)).collect();
        let brought = arguments.iter().fold(Provenance::default(), |made, argument| made.and(argument.made));
        let keywords = call.arguments.keywords.iter().fold(brought, |made, keyword| made.and(self.at(&keyword.value, depth).made));
        if let Expr::Lambda(lambda) = &*call.func {
            let mark = self.enter();
            if let Some(parameters) = &lambda.parameters {
                self.bind_parameters(parameters);
                for (parameter, value) in parameters.posonlyargs.iter().chain(&parameters.args).zip(&arguments) {
                    self.bind(parameter.parameter.name.as_str(), value.clone());
                }
            }
            let value = self.at(&lambda.body, depth);
            self.leave(mark);
            return value;
        }
        let function = match &*call.func {
            // The object is evaluated once, because chains of methods are long.
            Expr::Attribute(attribute) => {
                let base = self.at(&attribute.value, depth);
                if let Some(value) = method(&base, attribute.attr.as_str(), &arguments) {
                    return value;
                }
                self.attribute_of(&base, attribute)
            }
            function => self.at(function, depth),
        };
        let made = function.made.and(keywords);
        match &function.what {
            AbstractValue::Name(name) => self.result(name, &arguments, made),
            AbstractValue::Getter(attribute) => arguments.first().map(|object| self.attribute(object, attribute)).unwrap_or_default(),
            _ => Value::of(AbstractValue::Unknown, made),
        }
    }

    /// The result of a known function.
    fn result(&mut self, name: &str, arguments: &[Value], made: Provenance) -> Value {
        let first = arguments.first();
        let text = first.and_then(Value::as_text);
        let whole = first.and_then(Value::as_whole);
        let built = Provenance { built: true, ..made };
        let value = match name {
            "builtins.chr" => Some(Value::of(AbstractValue::Unknown, built)),
            "builtins.map" => match arguments {
                [Value { what: AbstractValue::Name(name), .. }, ..] if name == "builtins.chr" => {
                    Some(Value::of(AbstractValue::Unknown, built))
                }
                _ => None,
            },
            "builtins.bytes" | "builtins.bytearray" => first.and_then(|list| {
                let byte = |item: &Value| {
                    if let AbstractValue::Number(number) = item.what { u8::try_from(number).ok().map(char::from) } else { None }
                };
                let text: Option<String> = list.items().iter().map(byte).collect();
                text.filter(|text| !text.is_empty()).map(|text| Value::text(text, true, built))
            }),
            "builtins.str" => first.cloned(),
            "builtins.__import__" => {
                whole.map(|module| Value::of(AbstractValue::Name(canonical(module.split('.').next().unwrap_or(module))), made))
            }
            "importlib.import_module" | "importlib.__import__" => {
                whole.map(|module| Value::of(AbstractValue::Name(canonical(module)), made))
            }
            "builtins.getattr" => match arguments {
                [object, name, ..] => name.as_whole().map(|name| Value { made, ..self.attribute(object, name) }),
                _ => None,
            },
            "operator.attrgetter" => whole.map(|name| Value::of(AbstractValue::Getter(name.to_owned()), made)),
            "os.path.expanduser" | "os.path.expandvars" | "os.path.abspath" | "os.path.realpath" | "os.path.normpath" | "os.fspath" => {
                first.cloned()
            }
            "pathlib.Path" | "pathlib.PurePath" | "pathlib.PosixPath" | "os.path.join" => {
                let parts: Vec<&str> = arguments.iter().map(|part| part.as_text().unwrap_or("*")).collect();
                let all = arguments.iter().all(|part| part.as_whole().is_some());
                text.map(|_| Value::text(along("", &parts), all, made))
            }
            "pathlib.Path.home" => Some(Value::text("~", true, made)),
            _ => None,
        };
        value.unwrap_or_else(|| {
            let made =
                Provenance { decoded: made.decoded || tables::decodes(name), fetched: made.fetched || tables::fetches(name), ..made };
            Value::of(AbstractValue::Result(name.to_owned()), made)
        })
    }
}

/// The first value that rules may know, else the first known one.
fn one_of(values: impl IntoIterator<Item = Value>) -> Value {
    let mut known: Vec<Value> = values.into_iter().filter(|value| value.what != AbstractValue::Unknown).collect();
    match known.iter().position(is_meaningful) {
        Some(at) => known.swap_remove(at),
        None => known.into_iter().next().unwrap_or_default(),
    }
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

fn operate(operator: Operator, left: Value, right: Value) -> Value {
    let made = left.made.and(right.made);
    match (operator, &left.what, &right.what) {
        (Operator::Add, AbstractValue::Text { text: a, whole: x }, AbstractValue::Text { text: b, whole: y }) => {
            Value::text(format!("{a}{b}"), *x && *y, Provenance { built: made.built || (*x && *y), ..made })
        }
        // Rules match a path by its known beginning.
        (Operator::Add, AbstractValue::Text { text, .. }, _) => Value::text(format!("{text}*"), false, made),
        (Operator::Add, _, AbstractValue::Text { text, .. }) => Value::text(format!("*{text}"), false, made),
        (Operator::Div, AbstractValue::Text { text: a, whole: x }, AbstractValue::Text { text: b, whole: y }) => {
            Value::text(paths::join(a, b), *x && *y, made)
        }
        (Operator::Div, AbstractValue::Text { text, .. }, _) => Value::text(paths::join(text, "*"), false, made),
        (Operator::Mult, AbstractValue::Text { text, whole }, AbstractValue::Number(times))
            if text.len().saturating_mul(usize::try_from(*times).unwrap_or(0)) <= MAX_TEXT_LEN =>
        {
            Value::text(text.repeat(usize::try_from(*times).unwrap_or(0)), *whole, made)
        }
        (Operator::Mod, AbstractValue::Text { text, whole: true }, _) => {
            let values = if right.items().is_empty() { std::slice::from_ref(&right) } else { right.items() };
            filled(text, "%s", values, made)
        }
        _ => Value::of(AbstractValue::Unknown, made),
    }
}

/// Appends a string, until the whole is too long to be kept.
fn put(out: &mut String, text: &str) {
    if out.len() <= MAX_TEXT_LEN {
        out.push_str(text);
    }
}

/// Joins strings, until the whole is too long to be kept.
fn joined<'t>(parts: impl IntoIterator<Item = &'t str>, between: &str) -> String {
    let mut out = String::new();
    for (at, part) in parts.into_iter().enumerate() {
        if at > 0 {
            put(&mut out, between);
        }
        put(&mut out, part);
        if out.len() > MAX_TEXT_LEN {
            break;
        }
    }
    out
}

/// Joins paths, until the whole is too long to be kept.
fn along(base: &str, parts: &[&str]) -> String {
    parts.iter().fold(base.to_owned(), |path, part| if path.len() > MAX_TEXT_LEN { path } else { paths::join(&path, part) })
}

/// A format string with its placeholders replaced in order.
fn filled(text: &str, gap: &str, values: &[Value], made: Provenance) -> Value {
    let mut parts = text.split(gap);
    let mut out = parts.next().unwrap_or_default().to_owned();
    let (mut whole, mut filled_one) = (true, false);
    for (part, value) in parts.zip(values.iter().map(Some).chain(std::iter::repeat(None))) {
        let known = value.and_then(Value::as_whole);
        whole &= known.is_some();
        filled_one |= known.is_some();
        put(&mut out, value.and_then(Value::as_text).unwrap_or("*"));
        put(&mut out, part);
    }
    Value::text(out, whole, Provenance { built: made.built || filled_one, ..made })
}

/// Methods of strings and paths.
fn method(base: &Value, name: &str, arguments: &[Value]) -> Option<Value> {
    let made = arguments.iter().fold(base.made, |made, argument| made.and(argument.made));
    let first = arguments.first();
    let AbstractValue::Text { text, whole } = &base.what else { return None };
    match name {
        "join" => match first.map(|list| &list.what) {
            Some(AbstractValue::List(items)) => {
                let parts: Option<Vec<&str>> = items.iter().map(Value::as_whole).collect();
                Some(parts.map_or(Value::of(AbstractValue::Unknown, made), |parts| {
                    Value::text(joined(parts, text), true, Provenance { built: true, ..made })
                }))
            }
            _ => Some(Value::of(AbstractValue::Unknown, made)),
        },
        "replace" => match arguments {
            [old, new, ..] => match (old.as_whole(), new.as_whole()) {
                (Some(old), Some(new)) if !old.is_empty() => {
                    let made = Provenance { built: made.built || text.contains(old), ..made };
                    Some(Value::text(joined(text.split(old), new), *whole, made))
                }
                _ => Some(Value::of(AbstractValue::Unknown, made)),
            },
            _ => None,
        },
        "format" if text.contains("{}") => Some(filled(text, "{}", arguments, made)),
        "decode" | "encode" | "expanduser" | "absolute" | "resolve" | "strip" | "as_posix" | "rstrip" | "lstrip" | "__str__" => {
            Some(Value::text(text.clone(), *whole, made))
        }
        "joinpath" => {
            let parts: Vec<&str> = arguments.iter().map(|part| part.as_text().unwrap_or("*")).collect();
            Some(Value::text(along(text, &parts), *whole && arguments.iter().all(|part| part.as_whole().is_some()), made))
        }
        _ => None,
    }
}
