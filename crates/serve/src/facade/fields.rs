//! Fields of a JSON body, read as services that are written with pydantic read them.
//!
//! Unknown fields are passed over. What is wrong is said in the shape that clients of such services
//! know, `{"detail": [{"loc", "msg", "type"}]}`, the first hundred mistakes at once and in the order in which
//! the fields are asked for. As in pydantic's lax mode, a number may be written as text.
//!
//! A body is not taken apart before its fields are asked for, and of a list or an object no more is read than a
//! request may have: what is read takes hardly more memory than it has bytes in the body.

use std::{collections::BTreeMap, fmt};

use serde::{
    Deserializer as _,
    de::{IgnoredAny, MapAccess, SeqAccess, Visitor},
};
use serde_json::{Deserializer, Value, json, value::RawValue};

/// Items of a list or members of an object that are read: one more than any request may have, so that who
/// judges the request sees that there are too many.
const MAX_ITEMS: usize = 10_001;
/// Mistakes that are told.
const MAX_MISTAKES: usize = 100;

/// A step on the way to a value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Location {
    /// A member of an object.
    Member(String),
    /// A place in a list, or a byte of a body that is no JSON.
    Index(usize),
}

/// One mistake.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mistake {
    /// Where, below the body.
    pub location: Vec<Location>,
    /// For people.
    pub message: &'static str,
    /// For programs.
    pub kind: &'static str,
}

/// Why a body is not read; at least one mistake.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Invalid(pub Vec<Mistake>);

impl Invalid {
    fn whole(location: Vec<Location>, message: &'static str, kind: &'static str) -> Self {
        Invalid(vec![Mistake { location, message, kind }])
    }

    /// The answer's body.
    pub fn to_json(&self) -> String {
        let detail: Vec<Value> = self
            .0
            .iter()
            .map(|Mistake { location, message, kind }| {
                let steps = location.iter().map(|step| match step {
                    Location::Member(name) => json!(name),
                    Location::Index(index) => json!(index),
                });
                let location: Vec<Value> = std::iter::once(json!("body")).chain(steps).collect();
                json!({ "loc": location, "msg": message, "type": kind })
            })
            .collect();
        json!({ "detail": detail }).to_string()
    }
}

/// The fields of a body that are not read yet, and the mistakes in those that are.
#[derive(Debug)]
pub struct Fields<'a> {
    left: BTreeMap<&'static str, &'a RawValue>,
    mistakes: Vec<Mistake>,
}

/// The members of an object that have one of these names, each as it is written. The last of a name counts.
struct Members<'n>(&'n [&'static str]);

impl<'a> Visitor<'a> for Members<'_> {
    type Value = BTreeMap<&'static str, &'a RawValue>;

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("an object")
    }

    fn visit_map<A: MapAccess<'a>>(self, mut members: A) -> Result<Self::Value, A::Error> {
        let mut found = BTreeMap::new();
        while let Some(name) = members.next_key::<String>()? {
            match self.0.iter().find(|known| **known == name) {
                Some(known) => {
                    found.insert(*known, members.next_value()?);
                }
                None => {
                    members.next_value::<IgnoredAny>()?;
                }
            }
        }
        Ok(found)
    }
}

/// The first items of a list, each as it is written.
struct Items;

impl<'a> Visitor<'a> for Items {
    type Value = Vec<&'a RawValue>;

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("a list")
    }

    fn visit_seq<A: SeqAccess<'a>>(self, mut list: A) -> Result<Self::Value, A::Error> {
        let mut items = Vec::new();
        while items.len() < MAX_ITEMS {
            let Some(item) = list.next_element()? else { return Ok(items) };
            items.push(item);
        }
        while list.next_element::<IgnoredAny>()?.is_some() {}
        Ok(items)
    }
}

/// The first members of an object, each as it is written.
struct FirstMembers;

impl<'a> Visitor<'a> for FirstMembers {
    type Value = Vec<(String, &'a RawValue)>;

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("an object")
    }

    fn visit_map<A: MapAccess<'a>>(self, mut object: A) -> Result<Self::Value, A::Error> {
        let mut members = Vec::new();
        while members.len() < MAX_ITEMS {
            let Some(member) = object.next_entry()? else { return Ok(members) };
            members.push(member);
        }
        while object.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
        Ok(members)
    }
}

/// What begins so is an object, a list or a text.
fn begins(value: &RawValue, with: char) -> bool {
    value.get().starts_with(with)
}

/// A number, text, truth value or null; none: a list, an object, or a number that is too large.
fn scalar(value: &RawValue) -> Option<Value> {
    if begins(value, '[') || begins(value, '{') { None } else { serde_json::from_str(value.get()).ok() }
}

impl<'a> Fields<'a> {
    /// Those of a body that have one of these names.
    ///
    /// # Errors
    /// It is no JSON object.
    pub fn of(body: &'a [u8], names: &[&'static str]) -> Result<Self, Invalid> {
        if body.trim_ascii().is_empty() {
            return Err(Invalid::whole(Vec::new(), "Field required", "missing"));
        }
        let mut from = Deserializer::from_slice(body);
        let read = if body.trim_ascii_start().starts_with(b"{") {
            from.deserialize_map(Members(names)).and_then(|left| from.end().map(|()| Some(left)))
        } else {
            serde_json::from_slice::<IgnoredAny>(body).map(|_| None)
        };
        match read {
            Ok(Some(left)) => Ok(Fields { left, mistakes: Vec::new() }),
            Ok(None) => Err(Invalid::whole(
                Vec::new(),
                "Input should be a valid dictionary or object to extract fields from",
                "model_attributes_type",
            )),
            Err(error) => Err(Invalid::whole(vec![Location::Index(offset(body, &error))], "JSON decode error", "json_invalid")),
        }
    }

    /// What was read, if nothing was wrong.
    ///
    /// # Errors
    /// All mistakes.
    pub fn check<T>(self, read: T) -> Result<T, Invalid> {
        if self.mistakes.is_empty() { Ok(read) } else { Err(Invalid(self.mistakes)) }
    }

    fn wrong(&mut self, location: Vec<Location>, (message, kind): (&'static str, &'static str)) {
        if self.mistakes.len() < MAX_MISTAKES {
            self.mistakes.push(Mistake { location, message, kind });
        }
    }

    fn wrong_at(&mut self, name: &str, what: (&'static str, &'static str)) {
        self.wrong(vec![member(name)], what);
    }

    /// The text that stands there.
    fn read_text(&mut self, value: &RawValue, location: impl FnOnce() -> Vec<Location>) -> String {
        let what = if begins(value, '"') { NO_UNICODE } else { NO_TEXT };
        let text = if begins(value, '"') { serde_json::from_str(value.get()).ok() } else { None };
        text.unwrap_or_else(|| {
            self.wrong(location(), what);
            String::new()
        })
    }

    fn missing<T: Default>(&mut self, name: &str) -> T {
        self.wrong_at(name, ("Field required", "missing"));
        T::default()
    }

    /// Text that must be there.
    pub fn text(&mut self, name: &str) -> String {
        if self.left.contains_key(name) { self.text_or(name, "") } else { self.missing(name) }
    }

    /// Text, or this.
    pub fn text_or(&mut self, name: &str, usual: &str) -> String {
        match self.left.remove(name) {
            None => usual.to_owned(),
            Some(value) => self.read_text(value, || vec![member(name)]),
        }
    }

    /// Text or null, which it also is where it is not written.
    pub fn optional_text(&mut self, name: &str) -> Option<String> {
        let value = self.left.remove(name).filter(|value| !begins(value, 'n'))?;
        Some(self.read_text(value, || vec![member(name)]))
    }

    /// Seconds above zero, or these.
    pub fn seconds(&mut self, name: &str, usual: f64) -> f64 {
        let Some(value) = self.left.remove(name) else { return usual };
        let found = match scalar(value) {
            Some(Value::Number(number)) => number.as_f64().ok_or(NO_NUMBER),
            Some(Value::Bool(is)) => Ok(f64::from(u8::from(is))),
            Some(Value::String(text)) => text.trim().parse().map_err(|_| NOT_READ_AS_NUMBER),
            _ => Err(NO_NUMBER),
        };
        let checked = found.and_then(|seconds| match seconds {
            seconds if seconds.is_nan() => Err(("Input should be a finite number", "finite_number")),
            seconds if seconds <= 0.0 => Err(("Input should be greater than 0", "greater_than")),
            seconds => Ok(seconds),
        });
        checked.unwrap_or_else(|why| {
            self.wrong_at(name, why);
            usual
        })
    }

    /// A whole number, or this.
    pub fn integer(&mut self, name: &str, usual: i64) -> i64 {
        let Some(value) = self.left.remove(name) else { return usual };
        let found = match scalar(value) {
            Some(Value::Number(number)) => match (number.as_i64(), number.as_f64()) {
                (Some(number), _) => Ok(number),
                (None, Some(number)) if number.fract() == 0.0 => Ok(saturated(number)),
                _ => Err(("Input should be a valid integer, got a number with a fractional part", "int_from_float")),
            },
            Some(Value::Bool(is)) => Ok(i64::from(is)),
            Some(Value::String(text)) => {
                text.trim().parse().map_err(|_| ("Input should be a valid integer, unable to parse string as an integer", "int_parsing"))
            }
            _ => Err(("Input should be a valid integer", "int_type")),
        };
        found.unwrap_or_else(|why| {
            self.wrong_at(name, why);
            usual
        })
    }

    /// A list of texts, or none.
    pub fn texts(&mut self, name: &str) -> Vec<String> {
        let Some(value) = self.left.remove(name) else { return Vec::new() };
        let Ok(items) = Deserializer::from_str(value.get()).deserialize_seq(Items) else {
            self.wrong_at(name, ("Input should be a valid list", "list_type"));
            return Vec::new();
        };
        let at = |index| move || vec![member(name), Location::Index(index)];
        items.into_iter().enumerate().map(|(index, item)| self.read_text(item, at(index))).collect()
    }

    /// Texts by name, without those that are null; or none.
    pub fn texts_by_name(&mut self, name: &str) -> BTreeMap<String, String> {
        let Some(value) = self.left.remove(name) else { return BTreeMap::new() };
        let Ok(members) = Deserializer::from_str(value.get()).deserialize_map(FirstMembers) else {
            self.wrong_at(name, if begins(value, '{') { NO_UNICODE } else { ("Input should be a valid dictionary", "dict_type") });
            return BTreeMap::new();
        };
        let texts = members.into_iter().filter(|(_, value)| !begins(value, 'n')).map(|(key, value)| {
            let text = self.read_text(value, || vec![member(name), Location::Member(key.clone())]);
            (key, text)
        });
        texts.collect()
    }
}

const NO_TEXT: (&str, &str) = ("Input should be a valid string", "string_type");
/// Half of a pair of UTF-16, which JSON can write.
const NO_UNICODE: (&str, &str) = ("Input should be a valid string, unable to parse raw data as a unicode string", "string_unicode");
const NO_NUMBER: (&str, &str) = ("Input should be a valid number", "float_type");
const NOT_READ_AS_NUMBER: (&str, &str) = ("Input should be a valid number, unable to parse string as a number", "float_parsing");

fn member(name: &str) -> Location {
    Location::Member(name.to_owned())
}

#[expect(clippy::cast_possible_truncation, reason = "a number that does not fit becomes the nearest that does")]
fn saturated(number: f64) -> i64 {
    number as i64
}

/// The byte at which a text stops being JSON.
fn offset(body: &[u8], error: &serde_json::Error) -> usize {
    let before: usize = body.split_inclusive(|byte| *byte == b'\n').take(error.line().saturating_sub(1)).map(<[u8]>::len).sum();
    (before + error.column().saturating_sub(1)).min(body.len())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]

    use super::*;

    fn detail(invalid: &Invalid) -> Value {
        serde_json::from_str::<Value>(&invalid.to_json()).unwrap()["detail"].clone()
    }

    fn mistakes(body: &str) -> Value {
        let mut fields = match Fields::of(body.as_bytes(), &["time", "number", "code", "stdin", "args", "files"]) {
            Ok(fields) => fields,
            Err(invalid) => return detail(&invalid),
        };
        let (time, number) = (fields.seconds("time", 10.0), fields.integer("number", -1));
        let read = (time, number, fields.text("code"), fields.optional_text("stdin"), fields.texts("args"), fields.texts_by_name("files"));
        fields.check(read).map_or_else(|invalid| detail(&invalid), |read| json!(format!("{read:?}")))
    }

    #[test]
    fn what_is_not_written_has_its_default_and_the_unknown_is_passed_over() {
        let usual = json!(r#"(10.0, -1, "x", None, [], {})"#);
        assert_eq!(mistakes(r#"{"code": "x"}"#), usual);
        assert_eq!(mistakes(r#"{"code": "x", "colour": [1], "stdin": null, "args": [], "files": {}}"#), usual);
        let all = r#"{"code": "", "time": 0.5, "number": 7, "stdin": "", "args": ["a"], "files": {"a": "b", "c": null}}"#;
        assert_eq!(mistakes(all), json!(r#"(0.5, 7, "", Some(""), ["a"], {"a": "b"})"#));
        // As in pydantic's lax mode.
        let lax = r#"{"code": "", "time": " 2 ", "number": 8.0}"#;
        assert_eq!(mistakes(lax), json!(r#"(2.0, 8, "", None, [], {})"#));
        assert_eq!(mistakes(r#"{"code": "", "time": true, "number": "9"}"#), json!(r#"(1.0, 9, "", None, [], {})"#));
    }

    #[test]
    fn all_mistakes_are_told_at_once_where_they_are() {
        let body = r#"{"time": "soon", "number": 1.5, "stdin": 1, "args": ["a", 2], "files": {"b": 3}}"#;
        let at = |location: &[Value], message: &str, kind: &str| json!({ "loc": location, "msg": message, "type": kind });
        let text = "Input should be a valid string";
        let expected = json!([
            at(&[json!("body"), json!("time")], "Input should be a valid number, unable to parse string as a number", "float_parsing"),
            at(&[json!("body"), json!("number")], "Input should be a valid integer, got a number with a fractional part", "int_from_float"),
            at(&[json!("body"), json!("code")], "Field required", "missing"),
            at(&[json!("body"), json!("stdin")], text, "string_type"),
            at(&[json!("body"), json!("args"), json!(1)], text, "string_type"),
            at(&[json!("body"), json!("files"), json!("b")], text, "string_type"),
        ]);
        assert_eq!(mistakes(body), expected);
        for (field, kind) in [
            (r#""time": 0"#, "greater_than"),
            (r#""time": -1"#, "greater_than"),
            (r#""time": "nan""#, "finite_number"),
            (r#""time": null"#, "float_type"),
            (r#""number": null"#, "int_type"),
            (r#""number": "x""#, "int_parsing"),
            (r#""args": "a""#, "list_type"),
            (r#""files": []"#, "dict_type"),
        ] {
            let found = mistakes(&format!(r#"{{"code": "", {field}}}"#));
            assert_eq!((&found[0]["type"], found.as_array().map(Vec::len)), (&json!(kind), Some(1)), "{field}");
        }
    }

    #[test]
    fn the_last_field_of_a_name_counts_and_half_a_pair_of_utf_16_is_no_text() {
        assert_eq!(mistakes(r#"{"code": 1, "code": "x"}"#), json!(r#"(10.0, -1, "x", None, [], {})"#));
        for (body, location) in [
            (r#"{"code": "\ud800"}"#, json!(["body", "code"])),
            (r#"{"code": "", "args": ["\ud800"]}"#, json!(["body", "args", 0])),
            (r#"{"code": "", "files": {"a": "\ud800"}}"#, json!(["body", "files", "a"])),
            (r#"{"code": "", "files": {"\ud800": ""}}"#, json!(["body", "files"])),
        ] {
            let found = mistakes(body);
            assert_eq!(
                (&found[0]["loc"], &found[0]["type"], found.as_array().map(Vec::len)),
                (&location, &json!("string_unicode"), Some(1))
            );
        }
        // The control: a whole pair.
        assert_eq!(mistakes(r#"{"code": "\ud83d\ude00"}"#), json!(r#"(10.0, -1, "😀", None, [], {})"#));
    }

    #[test]
    fn of_what_no_request_may_have_little_is_read() {
        let names = ["args", "files"];
        let read = |body: &str| {
            let mut fields = Fields::of(body.as_bytes(), &names).unwrap();
            let read = (fields.texts("args").len(), fields.texts_by_name("files").len());
            fields.check(read).map_err(|Invalid(mistakes)| mistakes.len())
        };
        let body = |args: usize, item: &str, files: usize| {
            let files: Vec<String> = (0..files).map(|number| format!("\"{number}\":\"\"")).collect();
            format!("{{\"args\":[{}],\"files\":{{{}}}}}", vec![item; args].join(","), files.join(","))
        };
        assert_eq!(read(&body(20_000, "\"\"", 20_000)), Ok((MAX_ITEMS, MAX_ITEMS)));
        assert_eq!(read(&body(20_000, "1", 0)), Err(MAX_MISTAKES));
        // The control.
        assert_eq!(read(&body(4096, "\"\"", 10_000)), Ok((4096, 10_000)));
        assert_eq!(read(&body(20, "1", 0)), Err(20));
    }

    #[test]
    fn what_is_no_object_is_told_with_its_byte() {
        let first = |body: &str| (mistakes(body)[0]["loc"].clone(), mistakes(body)[0]["type"].clone());
        assert_eq!(first("  "), (json!(["body"]), json!("missing")));
        assert_eq!(first("[]"), (json!(["body"]), json!("model_attributes_type")));
        assert_eq!(first("{\n \"code\": x}"), (json!(["body", 11]), json!("json_invalid")));
        assert_eq!(first("{"), (json!(["body", 0]), json!("json_invalid")));
        assert_eq!(first("\u{1}"), (json!(["body", 0]), json!("json_invalid")));
        assert_eq!(first(&"[".repeat(100_000)).1, json!("json_invalid"));
    }
}
