//! A resolved policy as TOML that loads again to the same policy.
//!
//! What it inherited is written out, and reasons are gone: it is for looking, comparing
//! and copying, not for keeping. Name, origin and hash are not part of it.

use toml::{Table, Value};

use crate::{
    keys::{self, Key, Kind},
    model::Policy,
    visible::toml_text as text,
    written,
};
use stockade_protocol::LimitKey;

/// Writes a policy out in full, in the order of the format.
pub fn show(policy: &Policy) -> String {
    let mut out = String::new();
    // What was read can be written: a policy holds only texts and numbers.
    write_table(&mut out, "", keys::TOP, &written::write(policy).unwrap_or_default());
    out
}

fn write_table(out: &mut String, path: &str, keys: &[Key], table: &Table) {
    let entries = || keys.iter().filter_map(|key| table.get(key.name).map(|value| (key, value)));
    for (key, value) in entries().filter(|(_, value)| !value.is_table()) {
        // No compiler is the same as an empty one.
        let is_no_command = matches!(key.kind, Kind::Command(_)) && value.as_array().is_some_and(Vec::is_empty);
        if !is_no_command {
            write_value(out, key.name, value);
        }
    }
    for (key, value) in entries() {
        let Value::Table(inner) = value else { continue };
        let path = if path.is_empty() { key.name.to_owned() } else { format!("{path}.{}", key.name) };
        match key.kind {
            Kind::Named(_, keys) => {
                for (name, value) in inner {
                    let path = format!("{path}.{}", text(name));
                    out.push_str(&format!("\n[{path}]\n"));
                    value.as_table().into_iter().for_each(|table| write_table(out, &path, keys, table));
                }
            }
            Kind::Modules if inner.is_empty() => {}
            Kind::Modules => {
                out.push_str(&format!("\n[{path}]\n"));
                inner.iter().for_each(|(name, value)| write_value(out, &text(name), value));
            }
            Kind::LimitsWithMax => {
                write_limits(out, &path, inner);
                inner.get("max").and_then(Value::as_table).into_iter().for_each(|max| write_limits(out, &format!("{path}.max"), max));
            }
            Kind::Table(_) if inner.is_empty() => {}
            Kind::Table(keys) => {
                out.push_str(&format!("\n[{path}]\n"));
                write_table(out, &path, keys, inner);
            }
            _ => {
                out.push_str(&format!("\n[{path}]\n"));
                inner.iter().for_each(|(name, value)| write_value(out, name, value));
            }
        }
    }
}

fn write_limits(out: &mut String, path: &str, limits: &Table) {
    out.push_str(&format!("\n[{path}]\n"));
    let values = LimitKey::ALL.iter().filter_map(|key| limits.get(key.name()).map(|value| (key.name(), value)));
    values.for_each(|(name, value)| write_value(out, name, value));
}

fn write_value(out: &mut String, key: &str, value: &Value) {
    let show = |value: &Value| value.as_str().map_or_else(|| value.to_string(), text);
    let shown = match value {
        Value::Array(items) => {
            let items: Vec<String> = items.iter().map(show).collect();
            let short = items.join(", ");
            if short.len() <= 90 { format!("[{short}]") } else { format!("[\n    {},\n]", items.join(",\n    ")) }
        }
        value => show(value),
    };
    out.push_str(&format!("{key} = {shown}\n"));
}
