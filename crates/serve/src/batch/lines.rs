//! The lines of a batch, and the requests in them.
//!
//! A line is read when its turn comes, and of one with `cases` one request is made after the other, from texts
//! as they came: what waits is as large as what has come. Whether a request is a good one is for its worker to say.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
};

use axum::http::StatusCode;
use serde::{
    Deserialize, Deserializer,
    de::{Error, IgnoredAny, MapAccess, SeqAccess, Visitor},
};
use serde_json::{Deserializer as JsonDeserializer, json, value::RawValue};

use crate::problem::Problem;

/// The most cases of a line.
const MAX_CASES: usize = 100_000;
/// The most bytes of an id.
const MAX_ID: usize = 1 << 10;
/// The most fields of a line with cases, and the most variables that it or a case sets.
const MAX_FIELDS: usize = 4096;

/// What comes of a line.
pub enum Line {
    /// It is a request, with this id.
    Whole(Option<String>),
    /// It is a request for each of these.
    Cases(Cases),
}

impl Line {
    /// Reads a line of this index.
    ///
    /// # Errors
    /// It is no request; with its id, where it has one.
    pub fn read(line: &[u8], index: usize) -> Result<Self, (Option<String>, Problem)> {
        let bad = |detail: String| Problem::new(StatusCode::BAD_REQUEST, "bad_json", detail);
        let no_object = |error: serde_json::Error| bad(format!("the line is no JSON object of a request: {error}"));
        let Head { id, cases } = serde_json::from_slice(line).map_err(|error| (None, no_object(error)))?;
        let length = id.as_ref().map_or(0, String::len);
        if length > MAX_ID {
            return Err((None, bad(format!("`id` has {length} bytes, and may have {MAX_ID}; send a shorter one"))));
        }
        if cases.is_none() {
            return Ok(Line::Whole(id));
        }
        let Fields(mut fields) = serde_json::from_slice(line).map_err(|error| (id.clone(), no_object(error)))?;
        let mut take = |name: &str| fields.remove(name);
        let (_, list, env, stdin, args) = (take("id"), take("cases"), take("env"), take("stdin"), take("args"));
        let list = list.unwrap_or_default();
        let bad_cases =
            |error: serde_json::Error| (id.clone(), bad(format!("`cases` is a list of `id`, `stdin`, `args` and `env`: {error}")));
        let CaseCount(count) = serde_json::from_str(list.get()).map_err(bad_cases)?;
        if count == 0 {
            return Err((id, bad("`cases` is empty; leave it out for one run".to_owned())));
        }
        let checked: Result<Option<Fields>, _> = serde_json::from_str(env.as_deref().map_or("null", RawValue::get));
        let has_env = checked.map_err(|error| (id.clone(), bad(format!("`env` is an object: {error}"))))?.is_some();
        let shared = fields.iter().map(|(name, value)| format!(",{}:{}", json!(name), value.get())).collect();
        let of_line = id.unwrap_or_else(|| index.to_string());
        Ok(Line::Cases(Cases { of_line, shared, stdin, args, env: env.filter(|_| has_env), list, at: 1, number: 0 }))
    }
}

/// The cases of a line that are left.
pub struct Cases {
    of_line: String,
    /// The fields of the line that no case replaces, with a comma before each.
    shared: String,
    stdin: Option<Box<RawValue>>,
    args: Option<Box<RawValue>>,
    env: Option<Box<RawValue>>,
    /// All cases, which are good ones, and the byte from which on they are left.
    list: Box<RawValue>,
    at: usize,
    number: usize,
}

impl Cases {
    /// The next case: its id, and what it has of its own.
    pub fn next(&mut self) -> Option<(String, Case)> {
        let left = self.list.get().get(self.at..)?.trim_start_matches([',', ' ', '\t', '\r', '\n']);
        if left == "]" {
            return None;
        }
        let mut read = JsonDeserializer::from_str(left).into_iter::<Case>();
        let mut case = read.next()?.ok()?;
        self.at = self.list.get().len() - left.len() + read.byte_offset();
        let id = format!("{}/{}", self.of_line, case.id.take().unwrap_or_else(|| self.number.to_string()));
        self.number += 1;
        Some((id, case))
    }

    /// The request of a case with this id.
    pub fn request(&self, id: &str, case: Case) -> Vec<u8> {
        let Case { id: _, stdin, args, env } = case;
        let mut request = format!("{{\"id\":{}{}", json!(id), self.shared);
        let mut add = |name: &str, value: &str| request.push_str(&format!(",\"{name}\":{value}"));
        for (name, own, of_line) in [("stdin", &stdin, &self.stdin), ("args", &args, &self.args)] {
            own.as_ref().or(of_line.as_ref()).iter().for_each(|value| add(name, value.get()));
        }
        let of_line = self.env.as_deref().map_or("null", RawValue::get);
        match env {
            Some(Fields(own)) => {
                // It was read before.
                let all: Option<Fields> = serde_json::from_str(of_line).unwrap_or_default();
                let Fields(mut all) = all.unwrap_or_default();
                all.extend(own);
                let variables: Vec<String> = all.iter().map(|(name, value)| format!("{}:{}", json!(name), value.get())).collect();
                add("env", &format!("{{{}}}", variables.join(",")));
            }
            None if self.env.is_some() => add("env", of_line),
            None => {}
        }
        request.push('}');
        request.into_bytes()
    }
}

/// What tells a line of one run from one with cases.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Head {
    id: Option<String>,
    cases: Option<IgnoredAny>,
}

/// One case of a line: what it has in place of the line's own.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Case {
    id: Option<String>,
    stdin: Option<Box<RawValue>>,
    args: Option<Box<RawValue>>,
    env: Option<Fields>,
}

/// The fields of an object, of which there are not too many.
#[derive(Default)]
struct Fields(BTreeMap<String, Box<RawValue>>);

/// The number of the cases in a list. Each is a good one with an id of its own, and there are not too many.
struct CaseCount(usize);

impl<'de> Deserialize<'de> for Fields {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_map(Fields::default())
    }
}

impl<'de> Visitor<'de> for Fields {
    type Value = Self;

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut map: A) -> Result<Self, A::Error> {
        while let Some((name, value)) = map.next_entry()? {
            if self.0.insert(name, value).is_some() || self.0.len() > MAX_FIELDS {
                return Err(A::Error::custom(format!("a name stands twice, or there are more than {MAX_FIELDS}")));
            }
        }
        Ok(self)
    }
}

impl<'de> Deserialize<'de> for CaseCount {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_seq(CaseCount(0))
    }
}

impl<'de> Visitor<'de> for CaseCount {
    type Value = Self;

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("a list")
    }

    fn visit_seq<A: SeqAccess<'de>>(mut self, mut list: A) -> Result<Self, A::Error> {
        let mut ids = BTreeSet::new();
        while let Some(Case { id, .. }) = list.next_element()? {
            let id = id.unwrap_or_else(|| self.0.to_string());
            if id.len() > MAX_ID {
                return Err(A::Error::custom(format!("the `id` of a case has {} bytes, and may have {MAX_ID}", id.len())));
            }
            if let Some(id) = ids.replace(id) {
                return Err(A::Error::custom(format!("two cases have the `id` {id:?}, which may be the number of one without")));
            }
            self.0 += 1;
            if self.0 > MAX_CASES {
                return Err(A::Error::custom(format!("there are more than {MAX_CASES}")));
            }
        }
        Ok(self)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]

    use serde_json::Value;

    use super::*;

    fn texts(line: &str) -> Vec<(String, Value)> {
        let Line::Cases(mut cases) = Line::read(line.as_bytes(), 7).map_err(|(_, problem)| problem.detail).unwrap() else {
            return Vec::new();
        };
        let mut texts = Vec::new();
        while let Some((id, case)) = cases.next() {
            texts.push((id.clone(), serde_json::from_slice(&cases.request(&id, case)).unwrap()));
        }
        texts
    }

    #[test]
    fn a_line_is_one_request_or_one_for_each_case() {
        // As it came: the worker refuses what stands twice.
        let own = Line::read(br#"{"code":"a","code":"b","id":"p"}"#, 0);
        assert!(matches!(own, Ok(Line::Whole(Some(id))) if id == "p"));
        let cases = r#"{"code":"a","stdin":"z","env":{"A":"1","B":"2"},"cases":[{"stdin":"x","env":{"B":"3"}},{"id":"c","args":["y"]}]}"#;
        assert_eq!(
            texts(cases),
            [
                ("7/0".to_owned(), json!({"code": "a", "env": {"A": "1", "B": "3"}, "stdin": "x", "id": "7/0"})),
                ("7/c".to_owned(), json!({"code": "a", "env": {"A": "1", "B": "2"}, "stdin": "z", "args": ["y"], "id": "7/c"})),
            ]
        );
        let spaced = " {\"id\":\"i\",\"code\":\"a\", \"cases\" : [ {\"id\":\"]\"} ,\t{\"env\":{\"A\":\"1\"}}\r,{} ] ,\"env\":null} ";
        assert_eq!(
            texts(spaced),
            [
                ("i/]".to_owned(), json!({"code": "a", "id": "i/]"})),
                ("i/1".to_owned(), json!({"code": "a", "id": "i/1", "env": {"A": "1"}})),
                ("i/2".to_owned(), json!({"code": "a", "id": "i/2"})),
            ]
        );
        let long = |length: usize| format!(r#"{{"id":"{}","code":"a"}}"#, "i".repeat(length));
        assert!(matches!(Line::read(long(MAX_ID).as_bytes(), 0), Ok(Line::Whole(Some(_)))));
        let of_case = |length: usize| format!(r#"{{"code":"a","cases":[{{"id":"{}"}}]}}"#, "i".repeat(length));
        assert_eq!(texts(&of_case(MAX_ID)).len(), 1);
        let many = format!(r#"{{"code":"a","cases":[{}{{}}]}}"#, "{},".repeat(MAX_CASES));
        let fields = format!(r#"{{{}"cases":[{{}}]}}"#, (0..MAX_FIELDS).map(|n| format!("\"{n}\":0,")).collect::<String>());
        for (line, said) in [
            ("7", "no JSON object"),
            (r#"{"code":"a","cases":[]}"#, "empty"),
            (r#"{"code":"a","cases":[{"code":"b"}]}"#, "unknown field `code`"),
            (r#"{"code":"a","code":"b","cases":[{}]}"#, "twice"),
            (r#"{"code":"a","cases":7}"#, "`cases` is a list"),
            (r#"{"code":"#, "EOF"),
            (&many, "more than 100000"),
            (&long(MAX_ID + 1), "`id` has 1025 bytes, and may have 1024"),
            (&of_case(MAX_ID + 1), "the `id` of a case has 1025 bytes"),
            (r#"{"code":"a","cases":[{"id":"x"},{"id":"x"}]}"#, "two cases have the `id` \"x\""),
            (r#"{"code":"a","cases":[{"id":"1"},{}]}"#, "two cases have the `id` \"1\""),
            (&fields, "more than 4096"),
        ] {
            let (_, problem) = Line::read(line.as_bytes(), 0).err().unwrap();
            assert!(problem.detail.contains(said), "{}: {}", &line[..line.len().min(80)], problem.detail);
        }
    }
}
