//! The lines of a batch, and the requests in them.
//!
//! A line is read when its turn comes, and of one with `cases` one request is made after the other: what
//! waits is as large as what has come. Whether a request is a good one is for its worker to say.

use std::{collections::BTreeMap, fmt, marker::PhantomData, vec};

use axum::http::StatusCode;
use serde::{
    Deserialize, Deserializer,
    de::{Error, IgnoredAny, MapAccess, SeqAccess, Visitor},
};
use serde_json::{json, value::RawValue};

use crate::problem::Problem;

/// The most cases of a line.
const MAX_CASES: usize = 100_000;
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
        if cases.is_none() {
            return Ok(Line::Whole(id));
        }
        let Fields(mut fields) = serde_json::from_slice(line).map_err(|error| (id.clone(), no_object(error)))?;
        let mut take = |name: &str| fields.remove(name);
        let (_, cases, env) = (take("id"), take("cases"), take("env"));
        let bad_cases =
            |error: serde_json::Error| (id.clone(), bad(format!("`cases` is a list of `id`, `stdin`, `args` and `env`: {error}")));
        let List(cases) = serde_json::from_str(cases.as_deref().map_or("[]", RawValue::get)).map_err(bad_cases)?;
        if cases.is_empty() {
            return Err((id, bad("`cases` is empty; leave it out for one run".to_owned())));
        }
        let env: Result<Option<Fields>, _> = serde_json::from_str(env.as_deref().map_or("null", RawValue::get));
        let Fields(env) = env.map_err(|error| (id.clone(), bad(format!("`env` is an object: {error}"))))?.unwrap_or_default();
        let of_line = id.unwrap_or_else(|| index.to_string());
        Ok(Line::Cases(Cases { of_line, fields, env, cases: cases.into_iter(), number: 0 }))
    }
}

/// The cases of a line that are left.
pub struct Cases {
    of_line: String,
    /// What each of them has of the line.
    fields: BTreeMap<String, Box<RawValue>>,
    env: BTreeMap<String, Box<RawValue>>,
    cases: vec::IntoIter<Case>,
    number: usize,
}

impl Cases {
    /// The next case: its id, and what it has of its own.
    pub fn next(&mut self) -> Option<(String, Case)> {
        let mut case = self.cases.next()?;
        let id = format!("{}/{}", self.of_line, case.id.take().unwrap_or_else(|| self.number.to_string()));
        self.number += 1;
        Some((id, case))
    }

    /// The request of a case with this id.
    pub fn request(&self, id: &str, case: Case) -> Vec<u8> {
        let Case { id: _, stdin, args, env } = case;
        let mut variables: BTreeMap<&str, &RawValue> = self.env.iter().map(|(name, value)| (&**name, &**value)).collect();
        let Fields(own) = env.unwrap_or_default();
        variables.extend(own.iter().map(|(name, value)| (&**name, &**value)));
        let replaced = [("stdin", &stdin), ("args", &args)];
        let is_replaced = |name: &str| replaced.iter().any(|(other, value)| *other == name && value.is_some());
        let mut request = format!("{{\"id\":{}", json!(id));
        let mut add = |name: &str, value: &str| {
            request.push_str(&format!(",{}:{value}", json!(name)));
        };
        self.fields.iter().filter(|(name, _)| !is_replaced(name)).for_each(|(name, value)| add(name, value.get()));
        for (name, value) in replaced {
            value.iter().for_each(|value| add(name, value.get()));
        }
        if !variables.is_empty() {
            let variables: Vec<String> = variables.iter().map(|(name, value)| format!("{}:{}", json!(name), value.get())).collect();
            add("env", &format!("{{{}}}", variables.join(",")));
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

/// The entries of a list, of which there are not too many.
struct List<T>(Vec<T>);

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

impl<'de, T: Deserialize<'de>> Deserialize<'de> for List<T> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_seq(ListVisitor(PhantomData))
    }
}

struct ListVisitor<T>(PhantomData<T>);

impl<'de, T: Deserialize<'de>> Visitor<'de> for ListVisitor<T> {
    type Value = List<T>;

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("a list")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<List<T>, A::Error> {
        let mut entries = Vec::new();
        while let Some(entry) = list.next_element()? {
            entries.push(entry);
            if entries.len() > MAX_CASES {
                return Err(A::Error::custom(format!("there are more than {MAX_CASES}")));
            }
        }
        Ok(List(entries))
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
            (&fields, "more than 4096"),
        ] {
            let (_, problem) = Line::read(line.as_bytes(), 0).err().unwrap();
            assert!(problem.detail.contains(said), "{}: {}", &line[..line.len().min(80)], problem.detail);
        }
    }
}
