//! The tools' schemas without what costs a model tokens and tells it nothing.
//!
//! Every value that the full schema accepts, the slim one accepts too; what the slim one
//! describes is what is documented.

use std::sync::Arc;

use rmcp::model::{JsonObject, Tool};
use serde_json::{Map, Value, json};

/// What a derived schema says besides the shape.
const NOISE: &[&str] = &["$schema", "title", "default", "format", "minimum"];

/// Takes the noise out of both schemas of a tool, and the words out of its output's.
pub(crate) fn slim(tool: &mut Tool) {
    tool.input_schema = without_noise(&tool.input_schema, Part::Input);
    tool.output_schema = tool.output_schema.as_ref().map(|schema| without_noise(schema, Part::Output));
}

#[derive(Clone, Copy, PartialEq)]
enum Part {
    Input,
    Output,
}

fn without_noise(schema: &JsonObject, part: Part) -> Arc<JsonObject> {
    let mut schema = schema.clone();
    clean(&mut schema, part);
    Arc::new(schema)
}

fn clean(schema: &mut Map<String, Value>, part: Part) {
    schema.retain(|key, _| !NOISE.contains(&key.as_str()) && (part == Part::Input || key != "description"));
    if let Some(values) = schema.get("oneOf").and_then(constants) {
        schema.remove("oneOf");
        schema.insert(String::from("enum"), values);
    }
    // What may be left out need not be null as well.
    if part == Part::Input
        && let Some([kind, Value::String(null)]) = schema.get("type").and_then(Value::as_array).map(Vec::as_slice)
        && null == "null"
    {
        let kind = kind.clone();
        schema.insert(String::from("type"), kind);
    }
    for (key, value) in schema.iter_mut() {
        match (key.as_str(), value) {
            // These hold names, which may be words of a schema too.
            ("properties" | "$defs", Value::Object(named)) => named.values_mut().for_each(|value| clean_value(value, part)),
            (_, value) => clean_value(value, part),
        }
    }
}

fn clean_value(value: &mut Value, part: Part) {
    match value {
        Value::Object(schema) => clean(schema, part),
        Value::Array(several) => several.iter_mut().for_each(|value| clean_value(value, part)),
        _ => {}
    }
}

/// The values of a choice between constants.
fn constants(choices: &Value) -> Option<Value> {
    choices.as_array()?.iter().map(|choice| choice.get("const").cloned()).collect::<Option<Vec<_>>>().map(|values| json!(values))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn noise_goes_and_names_stay() {
        let full = json!({
            "$schema": "x", "title": "T", "type": "object", "required": ["title"],
            "properties": {
                "title": {"type": ["string", "null"], "description": "words", "default": "x"},
                "size": {"type": "integer", "format": "uint64", "minimum": 0},
                "kind": {"oneOf": [{"const": "a", "description": "A"}, {"const": "b"}]},
            },
        });
        let Value::Object(full) = full else { unreachable!() };
        let expected = |title: Value| {
            json!({"type": "object", "required": ["title"],
                "properties": {"title": title, "size": {"type": "integer"}, "kind": {"enum": ["a", "b"]}}})
        };
        assert_eq!(json!(without_noise(&full, Part::Input)), expected(json!({"type": "string", "description": "words"})));
        assert_eq!(json!(without_noise(&full, Part::Output)), expected(json!({"type": ["string", "null"]})));
    }
}
