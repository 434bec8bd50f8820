//! The policy format as JSON Schema, from the table that the parser uses.
//!
//! An editor that follows it catches misspellings while a policy is written. It is looser
//! than the reader: it does not compare values with each other.

use serde_json::{Map, Value, json};
use stockade_protocol::{LimitKey, Quantity};

use crate::{
    keys::{self, Key, Kind},
    merge::SAME,
    modules,
};

/// JSON Schema (2020-12) of a policy file.
pub fn schema() -> Value {
    let mut root = object(keys::TOP);
    root.insert("$schema".to_owned(), json!("https://json-schema.org/draft/2020-12/schema"));
    root.insert("title".to_owned(), json!("Stockade policy"));
    root.insert("required".to_owned(), json!(["schema"]));
    // What a policy must state depends on whether it inherits.
    root.insert("if".to_owned(), json!({ "required": ["extends"] }));
    root.insert("else".to_owned(), json!({ "required": required(keys::TOP) }));
    Value::Object(root)
}

fn required(keys: &[Key]) -> Vec<&'static str> {
    keys.iter().filter(|key| key.required).map(|key| key.name).collect()
}

fn object(keys: &[Key]) -> Map<String, Value> {
    let mut properties = Map::new();
    for key in keys {
        let mut value = describe(key.kind);
        value.insert("description".to_owned(), json!(key.about));
        properties.insert(key.name.to_owned(), Value::Object(value));
    }
    closed(properties)
}

fn closed(properties: Map<String, Value>) -> Map<String, Value> {
    members(json!({ "type": "object", "additionalProperties": false, "properties": properties }))
}

fn members(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(members) => members,
        _ => Map::new(),
    }
}

fn describe(kind: Kind) -> Map<String, Value> {
    match kind {
        Kind::Version => members(json!({ "const": 1 })),
        Kind::Text(_) => members(json!({ "type": "string" })),
        Kind::Choice(_, values) => members(json!({ "enum": values })),
        Kind::Id => members(json!({ "type": "integer", "minimum": 1 })),
        Kind::Count(least, most) => members(json!({ "type": "integer", "minimum": least, "maximum": most })),
        Kind::Flag => members(json!({ "type": "boolean" })),
        Kind::Words(_) | Kind::Command(_) | Kind::Removals => members(words(json!({ "type": "string" }))),
        Kind::List(item) => {
            let known = item.values();
            let list = words(if known.is_empty() { json!({ "type": "string" }) } else { json!({ "enum": known }) });
            let changes = |names: &[&str]| closed(names.iter().map(|name| ((*name).to_owned(), list.clone())).collect());
            members(json!({ "oneOf": [list, changes(&["add", "remove"]), changes(&["replace"])] }))
        }
        Kind::Table(keys) => object(keys),
        Kind::Variables => members(json!({ "type": "object", "additionalProperties": { "type": "string" } })),
        Kind::Modules => {
            let actions: Vec<&str> = modules::ACTIONS.iter().map(|(name, _)| *name).collect();
            members(json!({ "type": "object", "additionalProperties": { "enum": actions } }))
        }
        Kind::Named(_, keys) => members(json!({ "type": "object", "additionalProperties": object(keys) })),
        Kind::LimitsWithMax => {
            let mut properties = limits();
            properties.insert("max".to_owned(), json!({ "oneOf": [{ "const": SAME }, closed(limits())] }));
            closed(properties)
        }
    }
}

fn words(item: Value) -> Value {
    json!({ "type": "array", "items": item, "uniqueItems": true })
}

fn limits() -> Map<String, Value> {
    LimitKey::ALL.into_iter().map(|key| (key.name().to_owned(), limit(key))).collect()
}

fn limit(key: LimitKey) -> Value {
    let mut value = match key.quantity() {
        Quantity::Duration => json!({ "type": "string", "pattern": "^(none|[0-9]+ *(ms|s|min|h))$" }),
        Quantity::Size => json!({ "type": "string", "pattern": "^(none|[0-9]+ *(B|KiB|MiB|GiB|TiB))$" }),
        Quantity::Count => json!({ "oneOf": [{ "const": "none" }, { "type": "integer", "minimum": 1 }] }),
        Quantity::Cpus => json!({ "oneOf": [{ "const": "none" }, { "type": "number", "minimum": 0.01 }] }),
    };
    value["description"] = json!(key.about());
    value
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic, reason = "a test may panic")]
    use super::*;
    use crate::shipped::{EXAMPLES, SHIPPED};

    fn accepts(schema: &Value, value: &toml::Value, at: &str) {
        let toml::Value::Table(table) = value else { return };
        let branches = schema["oneOf"].as_array().cloned().unwrap_or_else(|| vec![schema.clone()]);
        let fits = |branch: &Value| table.keys().all(|key| !below(branch, key).is_null());
        let Some(branch) = branches.iter().find(|branch| fits(branch)) else { panic!("{at}: {table:?}") };
        for (key, value) in table {
            accepts(&below(branch, key), value, &format!("{at}.{key}"));
        }
    }

    fn below(schema: &Value, key: &str) -> Value {
        match &schema["properties"][key] {
            Value::Null if schema["additionalProperties"].is_object() => schema["additionalProperties"].clone(),
            found => found.clone(),
        }
    }

    #[test]
    fn the_schema_knows_every_key_of_every_shipped_policy() {
        for (name, text) in SHIPPED.iter().chain(EXAMPLES) {
            accepts(&schema(), &toml::Value::Table(text.parse().unwrap()), name);
        }
    }

    #[test]
    fn the_schema_allows_no_other_key() {
        let schema = schema();
        assert!(below(&schema, "filesytem").is_null());
        assert!(below(&below(&schema, "limits"), "memroy").is_null());
        assert_eq!(schema["properties"]["limits"]["properties"]["max"]["oneOf"][1]["additionalProperties"], json!(false));
    }
}
