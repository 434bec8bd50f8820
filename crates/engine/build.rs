//! Resolves the shipped policies at build time, and compiles their filters: a run under
//! one of them parses no TOML.
//! A shipped policy with an error therefore does not build. Builds the library that writes memory
//! images, which the engine carries.

use std::{env, fs, path::PathBuf};

#[path = "../executor/embed.rs"]
mod embed;

fn main() {
    println!("cargo:rerun-if-changed=../executor/embed.rs");
    println!("cargo:rerun-if-changed=../image-dump/src/template.py");
    embed::build_image_library("STOCKADE_IMAGE_LIBRARY");
    println!("cargo:rerun-if-changed=../../policies");
    println!("cargo:rerun-if-changed=../policy/src");
    let out = PathBuf::from(env::var_os("OUT_DIR").unwrap_or_default());
    let mut table = String::from("&[\n");
    for (name, _) in stockade_policy::SHIPPED {
        let policy = stockade_policy::load_shipped(name);
        assert!(policy.is_ok(), "policies/{name}.toml: {}", policy.as_ref().err().map(ToString::to_string).unwrap_or_default());
        let filters = policy.as_ref().ok().map(|policy| stockade_policy::filter::Filters::new(&policy.seccomp));
        assert!(matches!(filters, Some(Ok(_))), "policies/{name}.toml: {filters:?}");
        let both = policy.ok().zip(filters.and_then(Result::ok));
        let bytes = both.and_then(|both| postcard::to_allocvec(&both).ok()).unwrap_or_default();
        let file = out.join(format!("{name}.policy"));
        assert!(fs::write(&file, bytes).is_ok(), "cannot write {}", file.display());
        table.push_str(&format!("    ({name:?}, include_bytes!({:?})),\n", file.display().to_string()));
    }
    table.push(']');
    assert!(fs::write(out.join("shipped.rs"), table).is_ok(), "cannot write the table of shipped policies");
}
