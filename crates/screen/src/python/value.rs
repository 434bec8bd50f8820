//! What an expression stands for, as far as it can be told without running it.
//!
//! Names are followed through imports and assignments ([`super::names`]), texts are put
//! together as far as their parts are known. Loops are not followed. Values are shared, and
//! sizes and work are bounded ([`Work`]).

use std::rc::Rc;

use ruff_python_ast::{Expr, ExprAttribute, ExprCall, ExprSubscript, FStringPart, InterpolatedStringElement, Number, Operator, UnaryOp};

use super::{
    names::{Names, tells},
    tables,
};
use crate::{decode, paths, work::Work};

/// Deeper expressions are not looked into.
const DEEPEST: u8 = 60;
/// Longer lists are not kept.
const MOST_ITEMS: usize = 4096;
/// Modules that others carry along, so that `shutil.os` is `os`.
const CARRIED: [&str; 8] = ["os", "sys", "subprocess", "builtins", "importlib", "ctypes", "socket", "posix"];

/// What an expression stands for. What is shared is equal without a look, by `Eq`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) enum What {
    #[default]
    Unknown,
    /// A text or bytes; `whole` where every part of it is known, else `*` stands for the rest.
    Text {
        text: Rc<str>,
        whole: bool,
    },
    Number(i64),
    List(Rc<[Value]>),
    /// A module, a function, a class.
    Name(String),
    /// The dictionary of one.
    Namespace(String),
    /// What came of calling one.
    Result(String),
    /// A function that takes this attribute of what it is given.
    Getter(String),
}

/// How a value came to be.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Made {
    /// Put together from parts that could have been one.
    pub built: bool,
    /// Out of an encoding.
    pub decoded: bool,
    /// From elsewhere.
    pub fetched: bool,
}

impl Made {
    fn and(self, other: Made) -> Made {
        Made { built: self.built || other.built, decoded: self.decoded || other.decoded, fetched: self.fetched || other.fetched }
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Value {
    pub what: What,
    pub made: Made,
}

impl Value {
    pub(super) fn name(name: impl Into<String>) -> Self {
        Value { what: What::Name(name.into()), made: Made::default() }
    }

    fn text(text: impl Into<Rc<str>>, whole: bool, made: Made) -> Self {
        let text = text.into();
        if text.len() > decode::LONGEST {
            return Value { what: What::Unknown, made };
        }
        Value { what: What::Text { text, whole }, made }
    }

    fn of(what: What, made: Made) -> Self {
        Value { what, made }
    }

    /// The text, also where parts of it are not known.
    pub(super) fn as_text(&self) -> Option<&str> {
        match &self.what {
            What::Text { text, .. } => Some(text),
            _ => None,
        }
    }

    /// The text, where all of it is known.
    pub(super) fn as_whole(&self) -> Option<&str> {
        match &self.what {
            What::Text { text, whole: true } => Some(text),
            _ => None,
        }
    }

    /// The dotted name.
    pub(super) fn as_name(&self) -> Option<&str> {
        match &self.what {
            What::Name(name) => Some(name),
            _ => None,
        }
    }

    pub(super) fn items(&self) -> &[Value] {
        match &self.what {
            What::List(items) => items,
            _ => &[],
        }
    }

    /// Whoever gets it may look at all of it.
    fn charge(&self, work: &Work) {
        match &self.what {
            What::Text { text, .. } => work.take_made(text),
            // A name that is put together link by link is copied with each link.
            What::Name(name) | What::Namespace(name) | What::Result(name) | What::Getter(name) => work.take_made(name),
            What::List(items) => {
                work.take(items.len());
            }
            _ => {}
        }
    }
}

impl Names {
    /// What an expression stands for.
    pub(super) fn value(&mut self, expr: &Expr) -> Value {
        self.at(expr, 0)
    }

    fn at(&mut self, expr: &Expr, depth: u8) -> Value {
        if depth > DEEPEST || !self.work.take(1) {
            return Value::default();
        }
        let value = self.part(expr, depth + 1);
        value.charge(&self.work);
        value
    }

    fn part(&mut self, expr: &Expr, depth: u8) -> Value {
        match expr {
            Expr::StringLiteral(literal) => Value::text(literal.value.to_str(), true, Made::default()),
            Expr::BytesLiteral(literal) => {
                let text: String = literal.value.bytes().map(char::from).collect();
                Value::text(text, true, Made::default())
            }
            Expr::FString(literal) => self.f_string(literal.value.as_slice(), depth),
            Expr::NumberLiteral(literal) => match &literal.value {
                Number::Int(number) => number.as_i64().map(|number| Value::of(What::Number(number), Made::default())).unwrap_or_default(),
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
                (UnaryOp::USub, Value { what: What::Number(number), made }) => Value::of(What::Number(number.wrapping_neg()), made),
                (_, value) => Value::of(What::Unknown, value.made),
            },
            Expr::Call(call) => self.call(call, depth),
            Expr::Tuple(tuple) => self.list(&tuple.elts, depth),
            Expr::List(list) => self.list(&list.elts, depth),
            Expr::Set(set) => self.list(&set.elts, depth),
            Expr::Generator(made) => self.elements(&made.elt, depth),
            Expr::ListComp(made) => self.elements(&made.elt, depth),
            Expr::Starred(inner) => self.at(&inner.value, depth),
            Expr::Await(inner) => self.at(&inner.value, depth),
            Expr::Named(named) => {
                let value = self.at(&named.value, depth);
                // It may stand behind an `and`.
                let mark = self.enter();
                self.assign(&named.target, &value);
                self.join(mark);
                value
            }
            Expr::If(branches) => one_of([self.at(&branches.body, depth), self.at(&branches.orelse, depth)]),
            Expr::BoolOp(choice) => {
                let values: Vec<Value> = choice.values.iter().map(|value| self.at(value, depth)).collect();
                one_of(values)
            }
            _ => Value::default(),
        }
    }

    fn list(&mut self, items: &[Expr], depth: u8) -> Value {
        let items: Vec<Value> = items.iter().take(MOST_ITEMS).map(|item| self.at(item, depth)).collect();
        let made = items.iter().fold(Made::default(), |made, item| made.and(item.made));
        Value::of(What::List(items.into()), made)
    }

    /// Of what a comprehension makes only how it came to be is known.
    fn elements(&mut self, element: &Expr, depth: u8) -> Value {
        let made = self.at(element, depth).made;
        Value::of(What::Unknown, made)
    }

    fn f_string(&mut self, parts: &[FStringPart], depth: u8) -> Value {
        let (mut text, mut whole, mut made) = (String::new(), true, Made::default());
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

    /// An attribute as somebody has set it, or of what its object stands for: the one that
    /// rules may know, else the one that was set.
    fn attribute_of(&self, base: &Value, attribute: &ExprAttribute) -> Value {
        let name = attribute.attr.as_str();
        let set = attribute.value.as_name_expr().and_then(|owner| self.set_attribute(owner.id.as_str(), name));
        match set {
            Some(set) if tells(&set) => set,
            set => {
                let own = self.attribute(base, name);
                set.filter(|_| !tells(&own)).unwrap_or(own)
            }
        }
    }

    /// An attribute of what is known by name.
    pub(super) fn attribute(&self, base: &Value, attribute: &str) -> Value {
        let made = base.made;
        match &base.what {
            What::Name(name) if attribute == "__dict__" => Value::of(What::Namespace(name.clone()), made),
            What::Name(name) if CARRIED.contains(&attribute) && !name.starts_with("builtins") => {
                Value::of(What::Name(canonical(attribute)), made)
            }
            What::Name(name) => Value::of(What::Name(canonical(&format!("{name}.{attribute}"))), made),
            What::Result(name) => Value::of(What::Result(name.clone()), made),
            _ => Value::of(What::Unknown, made),
        }
    }

    fn subscript(&mut self, subscript: &ExprSubscript, depth: u8) -> Value {
        let base = self.at(&subscript.value, depth);
        if let Expr::Slice(slice) = &*subscript.slice {
            let mut bound = |part: &Option<Box<Expr>>| match part.as_deref().map(|part| self.at(part, depth).what) {
                Some(What::Number(number)) => Some(Some(number)),
                Some(_) => None,
                None => Some(None),
            };
            return match (base.as_whole(), bound(&slice.lower), bound(&slice.upper), bound(&slice.step)) {
                (Some(text), Some(lower), Some(upper), Some(step)) => {
                    let step = step.unwrap_or(1);
                    Value::text(sliced(text, lower, upper, step), true, Made { built: base.made.built || step < 0, ..base.made })
                }
                _ => Value::of(What::Unknown, base.made),
            };
        }
        let index = self.at(&subscript.slice, depth);
        let made = base.made.and(index.made);
        match (&base.what, &index.what) {
            (What::Namespace(name), What::Text { text, whole: true }) => Value { made, ..self.attribute(&Value::name(name), text) },
            (What::Name(name), What::Text { text, whole: true }) => match name.as_str() {
                "sys.modules" => Value::of(What::Name(canonical(text)), made),
                "os.environ" if &**text == "HOME" => Value::text("~", true, made),
                "builtins" => Value::of(What::Name(format!("builtins.{text}")), made),
                _ => Value::of(What::Unknown, made),
            },
            (What::Result(name), What::Text { text, whole: true })
                if matches!(name.as_str(), "builtins.globals" | "builtins.locals" | "builtins.vars") =>
            {
                Value { made, ..self.look_up(text) }
            }
            (What::Text { text, whole: true }, What::Number(at)) => {
                match sliced(text, Some(*at), at.checked_add(1).filter(|end| *end != 0), 1) {
                    letter if letter.is_empty() => Value::of(What::Unknown, made),
                    letter => Value::text(letter, true, made),
                }
            }
            (What::List(items), What::Number(at)) => usize::try_from(*at).ok().and_then(|at| items.get(at)).cloned().unwrap_or_default(),
            (What::Result(name), _) => Value::of(What::Result(name.clone()), made),
            _ => Value::of(What::Unknown, made),
        }
    }

    fn call(&mut self, call: &ExprCall, depth: u8) -> Value {
        let arguments: Vec<Value> = call.arguments.args.iter().take(MOST_ITEMS).map(|argument| self.at(argument, depth)).collect();
        let brought = arguments.iter().fold(Made::default(), |made, argument| made.and(argument.made));
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
            // What it is an attribute of is evaluated once: chains of methods are long.
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
            What::Name(name) => self.result(name, &arguments, made),
            What::Getter(attribute) => arguments.first().map(|object| self.attribute(object, attribute)).unwrap_or_default(),
            What::Result(name) => Value::of(What::Result(name.clone()), made),
            _ => Value::of(What::Unknown, made),
        }
    }

    /// What comes of calling a known function.
    fn result(&mut self, name: &str, arguments: &[Value], made: Made) -> Value {
        let first = arguments.first();
        let text = first.and_then(Value::as_text);
        let whole = first.and_then(Value::as_whole);
        let known = |value: Option<String>, made: Made| value.map(|text| Value::text(text, true, made));
        let built = Made { built: true, ..made };
        let decoded = Made { decoded: true, ..made };
        let value = match name {
            "builtins.chr" => match first.map(|first| &first.what) {
                Some(What::Number(number)) => known(u32::try_from(*number).ok().and_then(char::from_u32).map(String::from), built),
                _ => Some(Value::of(What::Unknown, built)),
            },
            "builtins.map" => match arguments {
                [Value { what: What::Name(name), .. }, list] if !list.items().is_empty() => {
                    let items: Vec<Value> =
                        list.items().iter().map(|item| self.result(name, std::slice::from_ref(item), item.made)).collect();
                    let made = items.iter().fold(made, |made, item| made.and(item.made));
                    Some(Value::of(What::List(items.into()), made))
                }
                [Value { what: What::Name(name), .. }, ..] if name == "builtins.chr" => Some(Value::of(What::Unknown, built)),
                _ => None,
            },
            "builtins.bytes" | "builtins.bytearray" => match first.map(|first| &first.what) {
                Some(What::List(items)) => {
                    let byte =
                        |item: &Value| if let What::Number(number) = item.what { u8::try_from(number).ok().map(char::from) } else { None };
                    known(items.iter().map(byte).collect(), built)
                }
                Some(What::Text { .. }) => first.cloned(),
                _ => None,
            },
            "builtins.reversed" => known(whole.map(|text| text.chars().rev().collect()), built),
            "builtins.str" | "builtins.list" | "builtins.tuple" | "builtins.repr" => first.cloned(),
            "builtins.__import__" => whole.map(|module| Value::of(What::Name(canonical(module.split('.').next().unwrap_or(module))), made)),
            "importlib.import_module" | "importlib.__import__" => whole.map(|module| Value::of(What::Name(canonical(module)), made)),
            "builtins.getattr" => match arguments {
                [object, name, ..] => name.as_whole().map(|name| Value { made, ..self.attribute(object, name) }),
                _ => None,
            },
            "builtins.vars" => first.and_then(Value::as_name).map(|name| Value::of(What::Namespace(name.to_owned()), made)),
            "operator.attrgetter" => whole.map(|name| Value::of(What::Getter(name.to_owned()), made)),
            "os.path.expanduser" | "os.path.expandvars" | "os.path.abspath" | "os.path.realpath" | "os.path.normpath" | "os.fspath" => {
                first.cloned()
            }
            "pathlib.Path" | "pathlib.PurePath" | "pathlib.PosixPath" | "os.path.join" => {
                let parts: Vec<&str> = arguments.iter().map(|part| part.as_text().unwrap_or("*")).collect();
                let all = arguments.iter().all(|part| part.as_whole().is_some());
                text.map(|_| Value::text(along("", &parts), all, made))
            }
            "pathlib.Path.home" => Some(Value::text("~", true, made)),
            "os.getenv" | "os.environ.get" if whole == Some("HOME") => Some(Value::text("~", true, made)),
            "builtins.bytes.fromhex" | "builtins.bytearray.fromhex" | "binascii.unhexlify" | "binascii.a2b_hex" => {
                known(whole.and_then(decode::hex), decoded)
            }
            "base64.b64decode"
            | "base64.urlsafe_b64decode"
            | "base64.standard_b64decode"
            | "base64.decodebytes"
            | "binascii.a2b_base64" => known(whole.and_then(decode::base64), decoded),
            "codecs.decode" => {
                let by = arguments.get(1).and_then(Value::as_whole).unwrap_or_default().replace(['_', '-'], "");
                let plain = whole.and_then(|text| match by.as_str() {
                    "rot13" => Some(decode::rot13(text)),
                    "hex" | "hexcodec" => decode::hex(text),
                    "base64" | "base64codec" => decode::base64(text),
                    _ => None,
                });
                known(plain, decoded)
            }
            _ => None,
        };
        value.unwrap_or_else(|| {
            let made = Made { decoded: made.decoded || tables::decodes(name), fetched: made.fetched || tables::fetches(name), ..made };
            Value::of(What::Result(name.to_owned()), made)
        })
    }
}

/// The one of several values that rules may know, else the first that is known.
fn one_of(values: impl IntoIterator<Item = Value>) -> Value {
    let mut known: Vec<Value> = values.into_iter().filter(|value| value.what != What::Unknown).collect();
    match known.iter().position(tells) {
        Some(at) => known.swap_remove(at),
        None => known.into_iter().next().unwrap_or_default(),
    }
}

/// The name by which a module is in the tables.
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
        (Operator::Add, What::Text { text: a, whole: x }, What::Text { text: b, whole: y }) => {
            Value::text(format!("{a}{b}"), *x && *y, Made { built: made.built || (*x && *y), ..made })
        }
        // A path below a known one is as telling as the whole.
        (Operator::Add, What::Text { text, .. }, _) => Value::text(format!("{text}*"), false, made),
        (Operator::Add, _, What::Text { text, .. }) => Value::text(format!("*{text}"), false, made),
        (Operator::Add, What::List(a), What::List(b)) if a.len() + b.len() <= MOST_ITEMS => {
            Value::of(What::List(a.iter().chain(b.iter()).cloned().collect()), made)
        }
        (Operator::Div, What::Text { text: a, whole: x }, What::Text { text: b, whole: y }) => {
            Value::text(paths::join(a, b), *x && *y, made)
        }
        (Operator::Div, What::Text { text, .. }, _) => Value::text(paths::join(text, "*"), false, made),
        (Operator::Mult, What::Text { text, whole }, What::Number(times))
            if text.len().saturating_mul(usize::try_from(*times).unwrap_or(0)) <= decode::LONGEST =>
        {
            Value::text(text.repeat(usize::try_from(*times).unwrap_or(0)), *whole, made)
        }
        (Operator::Mod, What::Text { text, whole: true }, _) => {
            let values = if right.items().is_empty() { std::slice::from_ref(&right) } else { right.items() };
            filled(text, "%s", values, made)
        }
        (Operator::Add, What::Number(a), What::Number(b)) => Value::of(What::Number(a.wrapping_add(*b)), made),
        (Operator::Sub, What::Number(a), What::Number(b)) => Value::of(What::Number(a.wrapping_sub(*b)), made),
        (Operator::BitXor, What::Number(a), What::Number(b)) => Value::of(What::Number(a ^ b), made),
        _ => Value::of(What::Unknown, made),
    }
}

/// Puts a text behind another, which is not kept when it has become too long.
fn put(out: &mut String, text: &str) {
    if out.len() <= decode::LONGEST {
        out.push_str(text);
    }
}

/// Texts with another between them, until they are too long to be kept.
fn joined<'t>(parts: impl IntoIterator<Item = &'t str>, between: &str) -> String {
    let mut out = String::new();
    for (at, part) in parts.into_iter().enumerate() {
        if at > 0 {
            put(&mut out, between);
        }
        put(&mut out, part);
        if out.len() > decode::LONGEST {
            break;
        }
    }
    out
}

/// The path to which these parts lead, until it is too long to be kept.
fn along(base: &str, parts: &[&str]) -> String {
    parts.iter().fold(base.to_owned(), |path, part| if path.len() > decode::LONGEST { path } else { paths::join(&path, part) })
}

/// A text whose gaps are filled in order.
fn filled(text: &str, gap: &str, values: &[Value], made: Made) -> Value {
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
    Value::text(out, whole, Made { built: made.built || filled_one, ..made })
}

/// Methods of texts and paths.
fn method(base: &Value, name: &str, arguments: &[Value]) -> Option<Value> {
    let made = arguments.iter().fold(base.made, |made, argument| made.and(argument.made));
    let first = arguments.first();
    let What::Text { text, whole } = &base.what else { return None };
    let known = |text: String, made: Made| Some(Value::text(text, *whole, made));
    let built = Made { built: true, ..made };
    match name {
        "join" => match first.map(|list| &list.what) {
            Some(What::List(items)) => {
                let parts: Option<Vec<&str>> = items.iter().map(Value::as_whole).collect();
                Some(parts.map_or(Value::of(What::Unknown, made), |parts| Value::text(joined(parts, text), true, built)))
            }
            Some(What::Text { text: letters, whole: true }) => {
                Some(Value::text(joined(letters.split("").filter(|letter| !letter.is_empty()), text), true, made))
            }
            _ => Some(Value::of(What::Unknown, made)),
        },
        "replace" => match arguments {
            [old, new, ..] => match (old.as_whole(), new.as_whole()) {
                (Some(old), Some(new)) if !old.is_empty() => {
                    known(joined(text.split(old), new), Made { built: made.built || text.contains(old), ..made })
                }
                _ => Some(Value::of(What::Unknown, made)),
            },
            _ => None,
        },
        "format" if text.contains("{}") => Some(filled(text, "{}", arguments, made)),
        "format" => {
            let mut out = text.to_string();
            for (at, argument) in arguments.iter().enumerate().take(16) {
                out = joined(out.split(&format!("{{{at}}}")), argument.as_text().unwrap_or("*"));
            }
            let all = *whole && !out.contains('{');
            Some(Value::text(out, all, Made { built: made.built || all, ..made }))
        }
        "decode" | "encode" | "expanduser" | "absolute" | "resolve" | "strip" | "as_posix" | "rstrip" | "lstrip" | "__str__" => {
            Some(Value::text(text.clone(), *whole, made))
        }
        "lower" | "casefold" => known(text.to_lowercase(), Made { built: made.built || text.to_lowercase() != **text, ..made }),
        "upper" => known(text.to_uppercase(), made),
        "swapcase" => {
            let swap = |c: char| if c.is_uppercase() { c.to_ascii_lowercase() } else { c.to_ascii_uppercase() };
            known(text.chars().map(swap).collect(), built)
        }
        "joinpath" => {
            let parts: Vec<&str> = arguments.iter().map(|part| part.as_text().unwrap_or("*")).collect();
            Some(Value::text(along(text, &parts), *whole && arguments.iter().all(|part| part.as_whole().is_some()), made))
        }
        _ => None,
    }
}

/// A slice as Python takes it.
fn sliced(text: &str, lower: Option<i64>, upper: Option<i64>, step: i64) -> String {
    let letters: Vec<char> = text.chars().collect();
    let length = i64::try_from(letters.len()).unwrap_or(0);
    if step == 0 {
        return String::new();
    }
    let (least, most) = if step > 0 { (0, length) } else { (-1, length - 1) };
    let place = |at: i64| (if at < 0 { at.saturating_add(length) } else { at }).clamp(least, most);
    let mut at = lower.map_or(if step > 0 { 0 } else { length - 1 }, place);
    let end = upper.map_or(if step > 0 { length } else { -1 }, place);
    let mut out = String::new();
    while (step > 0 && at < end) || (step < 0 && at > end) {
        out.extend(usize::try_from(at).ok().and_then(|at| letters.get(at)));
        at = at.saturating_add(step);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::sliced;

    #[test]
    fn slices_are_pythons() {
        for (lower, upper, step, expected) in [
            (None, None, -1, "fedcba"),
            (Some(1), None, -1, "ba"),
            (Some(1), Some(-1), 2, "bd"),
            (Some(-2), None, 1, "ef"),
            (None, Some(-7), 1, ""),
            (None, None, 3, "ad"),
            (Some(4), Some(1), -2, "ec"),
        ] {
            assert_eq!(sliced("abcdef", lower, upper, step), expected, "{lower:?} {upper:?} {step}");
        }
    }
}
