//! Fields of a JSON body, read as services that are written with pydantic read them.
//!
//! Unknown fields are passed over. What is wrong is said in the shape that clients of such services
//! know, `{"detail": [{"loc", "msg", "type"}]}`, all mistakes at once and in the order in which the
//! fields are asked for. As in pydantic's lax mode, a number may be written as text.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

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
pub struct Fields {
    left: Map<String, Value>,
    mistakes: Vec<Mistake>,
}

impl Fields {
    /// Those of a body.
    ///
    /// # Errors
    /// It is no JSON object.
    pub fn of(body: &[u8]) -> Result<Self, Invalid> {
        if body.trim_ascii().is_empty() {
            return Err(Invalid::whole(Vec::new(), "Field required", "missing"));
        }
        match serde_json::from_slice(body) {
            Ok(Value::Object(left)) => Ok(Fields { left, mistakes: Vec::new() }),
            Ok(_) => Err(Invalid::whole(
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

    fn wrong(&mut self, location: Vec<Location>, message: &'static str, kind: &'static str) {
        self.mistakes.push(Mistake { location, message, kind });
    }

    fn wrong_at(&mut self, name: &str, (message, kind): (&'static str, &'static str)) {
        self.wrong(vec![member(name)], message, kind);
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
            Some(Value::String(text)) => text,
            Some(_) => {
                self.wrong_at(name, NO_TEXT);
                String::new()
            }
        }
    }

    /// Text or null, which it also is where it is not written.
    pub fn optional_text(&mut self, name: &str) -> Option<String> {
        match self.left.remove(name) {
            None | Some(Value::Null) => None,
            Some(Value::String(text)) => Some(text),
            Some(_) => {
                self.wrong_at(name, NO_TEXT);
                None
            }
        }
    }

    /// Seconds above zero, or these.
    pub fn seconds(&mut self, name: &str, usual: f64) -> f64 {
        let found = match self.left.remove(name) {
            None => return usual,
            Some(Value::Number(number)) => number.as_f64().ok_or(NO_NUMBER),
            Some(Value::Bool(is)) => Ok(f64::from(u8::from(is))),
            Some(Value::String(text)) => text.trim().parse().map_err(|_| NOT_READ_AS_NUMBER),
            Some(_) => Err(NO_NUMBER),
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
        let found = match self.left.remove(name) {
            None => return usual,
            Some(Value::Number(number)) => match (number.as_i64(), number.as_f64()) {
                (Some(number), _) => Ok(number),
                (None, Some(number)) if number.fract() == 0.0 => Ok(saturated(number)),
                _ => Err(("Input should be a valid integer, got a number with a fractional part", "int_from_float")),
            },
            Some(Value::Bool(is)) => Ok(i64::from(is)),
            Some(Value::String(text)) => {
                text.trim().parse().map_err(|_| ("Input should be a valid integer, unable to parse string as an integer", "int_parsing"))
            }
            Some(_) => Err(("Input should be a valid integer", "int_type")),
        };
        found.unwrap_or_else(|why| {
            self.wrong_at(name, why);
            usual
        })
    }

    /// A list of texts, or none.
    pub fn texts(&mut self, name: &str) -> Vec<String> {
        let Some(found) = self.left.remove(name) else { return Vec::new() };
        let Value::Array(items) = found else {
            self.wrong_at(name, ("Input should be a valid list", "list_type"));
            return Vec::new();
        };
        let mut texts = Vec::new();
        for (index, item) in items.into_iter().enumerate() {
            match item {
                Value::String(text) => texts.push(text),
                _ => self.wrong(vec![member(name), Location::Index(index)], NO_TEXT.0, NO_TEXT.1),
            }
        }
        texts
    }

    /// Texts by name, without those that are null; or none.
    pub fn texts_by_name(&mut self, name: &str) -> BTreeMap<String, String> {
        let Some(found) = self.left.remove(name) else { return BTreeMap::new() };
        let Value::Object(members) = found else {
            self.wrong_at(name, ("Input should be a valid dictionary", "dict_type"));
            return BTreeMap::new();
        };
        let mut texts = BTreeMap::new();
        for (key, value) in members {
            match value {
                Value::Null => {}
                Value::String(text) => {
                    texts.insert(key, text);
                }
                _ => self.wrong(vec![member(name), Location::Member(key)], NO_TEXT.0, NO_TEXT.1),
            }
        }
        texts
    }
}

const NO_TEXT: (&str, &str) = ("Input should be a valid string", "string_type");
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
        let mut fields = match Fields::of(body.as_bytes()) {
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
