//! The request: what a caller asks for, exactly as written.
//!
//! Unknown fields are refused by name. Values are not judged here (paths, limits
//! and base64 stay text), so that every refusal can name its field.

use alloc::{collections::BTreeMap, format, string::String, vec::Vec};
use core::{fmt, marker::PhantomData};
use serde::{
    Deserialize, Deserializer, Serialize,
    de::{Error, MapAccess, Visitor},
};

use crate::{LimitError, LimitKey};

/// What a request or a runtime names in place of a template to have none.
pub const NO_TEMPLATE: &str = "none";

/// The largest request as JSON, in bytes.
pub const MAX_REQUEST: usize = 64 << 20;

/// One request of `stockade exec`, as the caller wrote it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Request {
    /// The program; in base64 where it is no text, such as a module of WebAssembly.
    pub code: TextOrBase64,
    /// Absolute host directory to expose; absent: a private one that vanishes.
    pub scratch: Option<String>,
    /// A runtime that the policy names, or an alias of one.
    pub language: Option<String>,
    /// The name of the program in scratch; absent: `main` with the runtime's ending in a private
    /// scratch, a name that nothing else has beside the caller's files.
    pub filename: Option<String>,
    /// Arguments of the program.
    #[serde(default)]
    pub args: Vec<String>,
    /// The program's stdin; absent: `/dev/null`.
    pub stdin: Option<Stdin>,
    /// Environment variables, of the names that the policy accepts.
    #[serde(default, deserialize_with = "map_of_distinct_keys")]
    pub env: BTreeMap<String, String>,
    /// Files to write into scratch before the start, by relative path.
    #[serde(default, deserialize_with = "map_of_distinct_keys")]
    pub files: BTreeMap<String, TextOrBase64>,
    /// Globs of the regular files under scratch to return.
    #[serde(default)]
    pub collect: Vec<String>,
    /// Limits, up to the policy's maximum.
    #[serde(default, deserialize_with = "map_of_distinct_keys")]
    pub limits: BTreeMap<String, LimitValue>,
    /// Limits of the compiler, where the runtime has one; one that is not named is the policy's.
    #[serde(default, deserialize_with = "map_of_distinct_keys", skip_serializing_if = "BTreeMap::is_empty")]
    pub compile_limits: BTreeMap<String, LimitValue>,
    /// The image whose files are the root, by name or digest, if the policy lets a request name it;
    /// absent: the policy's root.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<String>,
    /// The runtime's template, whose copy the program's interpreter is to be, or [`NO_TEMPLATE`];
    /// absent: a copy where the policy has a template.
    pub template: Option<String>,
    /// How the streams come back.
    #[serde(default)]
    pub encoding: Encoding,
    /// Echoed in the result.
    pub id: Option<String>,
    /// Claims of the caller, for the audit trail.
    #[serde(default, deserialize_with = "map_of_distinct_keys")]
    pub labels: BTreeMap<String, String>,
    /// The token of an earlier answer `approval_required` to the same request.
    pub approve: Option<String>,
}

/// A map in which no key stands twice: of two values the reader of the request would see one,
/// and the run have the other.
fn map_of_distinct_keys<'de, V: Deserialize<'de>, D: Deserializer<'de>>(deserializer: D) -> Result<BTreeMap<String, V>, D::Error> {
    struct DistinctKeys<V>(PhantomData<V>);
    impl<'de, V: Deserialize<'de>> Visitor<'de> for DistinctKeys<V> {
        type Value = BTreeMap<String, V>;

        fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
            out.write_str("a map")
        }

        fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Self::Value, A::Error> {
            let mut map = BTreeMap::new();
            while let Some((key, value)) = entries.next_entry::<String, V>()? {
                if map.contains_key(&key) {
                    return Err(A::Error::custom(format!("duplicate key {key:?}")));
                }
                map.insert(key, value);
            }
            Ok(map)
        }
    }
    deserializer.deserialize_map(DistinctKeys(PhantomData))
}

/// Text, or bytes in base64.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged, expecting = "expected a string or {\"base64\": \"…\"}")]
pub enum TextOrBase64 {
    /// The bytes of this text in UTF-8.
    Text(String),
    /// The bytes that this base64 encodes.
    Base64(Base64),
}

impl Default for TextOrBase64 {
    fn default() -> Self {
        TextOrBase64::Text(String::new())
    }
}

impl From<String> for TextOrBase64 {
    fn from(text: String) -> Self {
        TextOrBase64::Text(text)
    }
}

/// The program's stdin has the same two forms as a file.
pub type Stdin = TextOrBase64;

/// Bytes written as standard base64 with padding.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Base64 {
    /// The encoded bytes.
    pub base64: String,
}

/// A limit as the caller wrote it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged, expecting = "expected a number or a string such as \"30s\", \"256MiB\", \"none\"")]
pub enum LimitValue {
    /// A whole number.
    Integer(i64),
    /// A number with a decimal point.
    Float(f64),
    /// A value with its unit, or `none`.
    Text(String),
}

impl LimitKey {
    /// Reads a limit as a caller wrote it.
    ///
    /// # Errors
    /// It is not a value of this limit.
    pub fn parse(self, value: &LimitValue) -> Result<Option<u64>, LimitError> {
        match value {
            LimitValue::Integer(number) => self.parse_integer(*number),
            LimitValue::Float(number) => self.parse_float(*number),
            LimitValue::Text(text) => self.parse_text(text),
        }
    }
}

/// How stdout and stderr come back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Encoding {
    /// UTF-8, with U+FFFD for other bytes; `lossy` is true where that happened.
    #[default]
    Text,
    /// Base64 of the exact bytes.
    Base64,
}
