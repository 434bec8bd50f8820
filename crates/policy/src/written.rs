//! How a policy's values are written in TOML, by serde both ways.
//!
//! The policies that are compiled in have a compact form, which is read at every start: names
//! of system calls in one string, limits and ioctl requests as numbers. Nothing is checked
//! here but what a type cannot hold, because `merge` has checked every value.

use serde::{Deserialize, Deserializer, Serializer, de::Error};
use stockade_protocol::{LimitError, LimitKey, NO_TEMPLATE, Quantity, screen::Rule};
use toml::{Table, Value};

use crate::model::{NO_IMAGE, Origin, Policy};

/// The policy of a whole document.
pub(crate) fn read(mut document: Table, name: &str, origin: Origin, sha256: &str) -> Result<Policy, toml::de::Error> {
    let mut limits = take(&mut document, "limits");
    let mut screen = take(&mut document, "screen");
    let actions: Table = Rule::ALL.iter().filter_map(|rule| screen.remove_entry(rule.name())).collect();
    put(&mut document, "limits_max", take(&mut limits, "max"));
    put(&mut document, "limits", limits);
    put(&mut screen, "actions", actions);
    put(&mut document, "screen", screen);
    // An origin can be a path that is no UTF-8, which TOML cannot hold.
    let beside = [("name", name), ("origin", "Shipped"), ("sha256", sha256)];
    document.extend(beside.map(|(key, value)| (key.to_owned(), value.into())));
    Ok(Policy { origin, ..Policy::deserialize(document)? })
}

/// The whole document of a policy. Name, origin and hash are no keys of a document, and lie
/// beside those that are.
pub(crate) fn write(policy: &Policy) -> Result<Table, toml::ser::Error> {
    let mut document = Table::try_from(Policy { origin: Origin::Shipped, ..policy.clone() })?;
    let mut limits = take(&mut document, "limits");
    let mut screen = take(&mut document, "screen");
    let actions = take(&mut screen, "actions");
    put(&mut limits, "max", take(&mut document, "limits_max"));
    put(&mut document, "limits", limits);
    screen.extend(actions);
    put(&mut document, "screen", screen);
    document.insert("schema".to_owned(), 1.into());
    Ok(document)
}

fn take(from: &mut Table, key: &str) -> Table {
    match from.remove(key) {
        Some(Value::Table(table)) => table,
        _ => Table::new(),
    }
}

fn put(into: &mut Table, key: &str, table: Table) {
    into.insert(key.to_owned(), table.into());
}

/// Reads the value of a limit.
pub(crate) fn limit(key: LimitKey, value: &Value) -> Result<Option<u64>, LimitError> {
    match value {
        Value::String(text) => key.parse_text(text),
        Value::Integer(number) => key.parse_integer(*number),
        Value::Float(number) => key.parse_float(*number),
        _ => Err(wrong_type(key)),
    }
}

/// Why a value that is neither text nor number is no limit.
pub(crate) fn wrong_type(key: LimitKey) -> LimitError {
    LimitError { expected: format!("`{}` cannot be of this type", key.name()) }
}

/// A limit as a document writes it: counts and CPUs as bare numbers.
fn limit_value(key: LimitKey, value: Option<u64>) -> Value {
    let text = key.format(value);
    let bare = value.is_some() && matches!(key.quantity(), Quantity::Count | Quantity::Cpus);
    let integer = text.parse().map(Value::Integer).ok();
    let number = integer.or_else(|| text.parse().map(Value::Float).ok());
    number.filter(|_| bare).unwrap_or(Value::String(text))
}

/// Names of system calls.
pub(crate) mod joined {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub(crate) fn serialize<S: Serializer>(names: &[String], to: S) -> Result<S::Ok, S::Error> {
        if to.is_human_readable() { names.serialize(to) } else { to.serialize_str(&names.join(" ")) }
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<String>, D::Error> {
        if from.is_human_readable() {
            return Vec::deserialize(from);
        }
        let all = <&str>::deserialize(from)?;
        Ok(all.split(' ').filter(|name| !name.is_empty()).map(String::from).collect())
    }
}

/// Requests of `ioctl`.
pub(crate) mod ioctls {
    use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error};

    use crate::{check, names};

    pub(crate) fn serialize<S: Serializer>(requests: &[u32], to: S) -> Result<S::Ok, S::Error> {
        if to.is_human_readable() {
            to.collect_seq(requests.iter().map(|request| names::ioctl_text(*request)))
        } else {
            requests.serialize(to)
        }
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<u32>, D::Error> {
        if !from.is_human_readable() {
            return Vec::deserialize(from);
        }
        let texts = Vec::<String>::deserialize(from)?;
        texts.iter().map(|text| check::ioctl(text).map_err(|wrong| D::Error::custom(wrong.title))).collect()
    }
}

/// A value for every limit.
pub(crate) mod limits {
    use std::collections::BTreeMap;

    use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error};
    use stockade_protocol::{LimitKey, Limits};

    pub(crate) fn serialize<S: Serializer>(limits: &Limits, to: S) -> Result<S::Ok, S::Error> {
        if !to.is_human_readable() {
            return limits.serialize(to);
        }
        to.collect_map(limits.iter().map(|(key, value)| (key.name(), super::limit_value(key, value))))
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Limits, D::Error> {
        if !from.is_human_readable() {
            return Limits::deserialize(from);
        }
        let mut limits = Limits::default();
        for (name, value) in BTreeMap::<String, toml::Value>::deserialize(from)? {
            let key = LimitKey::from_name(&name).ok_or_else(|| D::Error::custom(format!("there is no limit `{name}`")))?;
            limits.set(key, super::limit(key, &value).map_err(D::Error::custom)?);
        }
        Ok(limits)
    }
}

/// A size, in bytes, which may be none.
pub(crate) mod size {
    use serde::{Deserializer, Serializer};
    use stockade_protocol::LimitKey::OutputSize;

    pub(crate) fn serialize<S: Serializer>(value: &u64, to: S) -> Result<S::Ok, S::Error> {
        super::write_quantity(OutputSize, *value, to)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<u64, D::Error> {
        super::read_quantity(OutputSize, from)
    }
}

/// A duration, in milliseconds.
pub(crate) mod duration {
    use serde::{Deserializer, Serializer};
    use stockade_protocol::LimitKey::Wall;

    pub(crate) fn serialize<S: Serializer>(value: &u64, to: S) -> Result<S::Ok, S::Error> {
        super::write_quantity(Wall, *value, to)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<u64, D::Error> {
        super::read_quantity(Wall, from)
    }
}

/// A duration in whole milliseconds, as the standard library has it.
pub(crate) mod age {
    use std::time::Duration;

    use serde::{Deserializer, Serializer};

    pub(crate) fn serialize<S: Serializer>(value: &Duration, to: S) -> Result<S::Ok, S::Error> {
        super::duration::serialize(&u64::try_from(value.as_millis()).unwrap_or(u64::MAX), to)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Duration, D::Error> {
        super::duration::deserialize(from).map(Duration::from_millis)
    }
}

/// The template of a runtime; "none" takes an inherited one away.
pub(crate) fn template<'de, D: Deserializer<'de>>(from: D) -> Result<Option<String>, D::Error> {
    Ok(Option::<String>::deserialize(from)?.filter(|name| name != NO_TEMPLATE))
}

/// The image of a root; `none` takes an inherited one away.
pub(crate) fn image<'de, D: Deserializer<'de>>(from: D) -> Result<Option<String>, D::Error> {
    Ok(Option::<String>::deserialize(from)?.filter(|image| image != NO_IMAGE))
}

/// The code of a template; an empty one takes an inherited one away.
pub(crate) fn code<'de, D: Deserializer<'de>>(from: D) -> Result<Option<String>, D::Error> {
    Ok(Option::<String>::deserialize(from)?.filter(|code| !code.is_empty()))
}

fn write_quantity<S: Serializer>(like: LimitKey, value: u64, to: S) -> Result<S::Ok, S::Error> {
    if to.is_human_readable() { to.serialize_str(&like.format(Some(value))) } else { to.serialize_u64(value) }
}

fn read_quantity<'de, D: Deserializer<'de>>(like: LimitKey, from: D) -> Result<u64, D::Error> {
    if !from.is_human_readable() {
        return u64::deserialize(from);
    }
    let text = String::deserialize(from)?;
    if like == LimitKey::OutputSize && text == crate::check::NO_BYTES {
        return Ok(0);
    }
    let value = like.parse_text(&text).map_err(D::Error::custom)?;
    value.ok_or_else(|| D::Error::custom("`none` is no quantity"))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]
    use crate::{SHIPPED, load_shipped, load_text, model::Policy};

    #[test]
    fn a_preview_may_be_empty_and_is_shown_so() {
        let policy = |preview: &str| load_text(&format!("schema = 1\nextends = \"default\"\n[audit]\npreview = {preview:?}\n"));
        assert_eq!(policy("0B").unwrap().audit.preview, 0);
        let shown = toml::to_string(&policy("0B").unwrap().audit).unwrap();
        assert!(shown.contains("preview = \"0B\""), "{shown}");
        assert!(policy("0").is_err() && policy("5KiB").is_err() && policy("4KiB").is_ok());
    }

    #[test]
    fn the_compact_form_of_a_policy_reads_back_to_the_same() {
        let watching = "schema = 1\nextends = \"review\"\n[runtimes.python.modules]\ndefault = \"note\"\n\"os.*\" = \"deny\"\n\
            [templates.bare]\nimports = [\"json\"]\nwarm = \"x = 1\"\nmax_age = \"1500ms\"\n\
            [egress]\nwhitelist = { add = [\"pypi.org:443\"] }\n[audit]\nalerts = { add = [\"verdict:exited\"] }\n";
        let shipped = SHIPPED.iter().map(|(name, _)| load_shipped(name).unwrap());
        for policy in shipped.chain([load_text(watching).unwrap()]) {
            let bytes = postcard::to_allocvec(&policy).unwrap();
            assert_eq!(postcard::from_bytes::<Policy>(&bytes).unwrap(), policy);
        }
    }
}
