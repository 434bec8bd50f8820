//! Builds a static program without libc and hands its path to the compiler, so that the
//! crate that embeds the program always has the same version.
//!
//! The program needs flags that no other crate of the workspace may have, so a nested cargo
//! builds it in a separate target directory.

use std::{env, path::PathBuf, process::Command};

const TARGET: &str = "x86_64-unknown-linux-gnu";

/// Builds `crates/{name}` with these features; its path goes into the variable `variable`.
pub fn build(name: &str, features: &str, variable: &str) {
    let of_cargo = |name: &str| PathBuf::from(env::var_os(name).unwrap_or_default());
    let manifest = of_cargo("CARGO_MANIFEST_DIR").join("..").join(name).join("Cargo.toml");
    let target_dir = of_cargo("OUT_DIR").join(name);
    for directory in [name, "protocol", "sys"] {
        println!("cargo:rerun-if-changed=../{directory}/src");
        println!("cargo:rerun-if-changed=../{directory}/Cargo.toml");
    }
    let status = Command::new(of_cargo("CARGO"))
        .args(["build", "--release", "--locked", "--target", TARGET, "--manifest-path"])
        .arg(&manifest)
        .arg("--target-dir")
        .arg(&target_dir)
        .args(["--features", features])
        .env_remove("CARGO_ENCODED_RUSTFLAGS")
        .env_remove("RUSTC_WORKSPACE_WRAPPER")
        .env_remove("RUSTC_WRAPPER")
        .env("RUSTFLAGS", "--cfg freestanding -C relocation-model=static")
        .status();
    let program = target_dir.join(TARGET).join(format!("release/stockade-{name}"));
    assert!(status.is_ok_and(|status| status.success()) && program.is_file(), "the {name} did not build");
    println!("cargo:rustc-env={variable}={}", program.display());
}
