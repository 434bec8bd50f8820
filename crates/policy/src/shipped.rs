//! The policies and examples that are compiled in, as text.
//!
//! They are parsed like every other policy. No file of a host can change them.

/// The shipped policies by name.
pub const SHIPPED: &[(&str, &str)] = &[
    ("default", include_str!("../../../policies/default.toml")),
    ("strict", include_str!("../../../policies/strict.toml")),
    ("review", include_str!("../../../policies/review.toml")),
    ("bwrap", include_str!("../../../policies/bwrap.toml")),
    ("shell", include_str!("../../../policies/shell.toml")),
    ("data-science", include_str!("../../../policies/data-science.toml")),
    ("pypi", include_str!("../../../policies/pypi.toml")),
    ("wasm", include_str!("../../../policies/wasm.toml")),
    ("pyodide", include_str!("../../../policies/pyodide.toml")),
    ("blueprint", include_str!("../../../policies/blueprint.toml")),
];

/// Policies to copy. A name never loads one.
pub const EXAMPLES: &[(&str, &str)] = &[("perl", include_str!("../../../policies/examples/perl.toml"))];

/// The text of a shipped policy.
pub(crate) fn text(name: &str) -> Option<&'static str> {
    SHIPPED.iter().find(|(known, _)| *known == name).map(|(_, text)| *text)
}
