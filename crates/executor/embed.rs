//! Builds a program or library without libc and hands its path to the compiler, so that the
//! crate that embeds it always has the same version.
//!
//! It needs flags that no other crate of the workspace may have, so a nested cargo builds it in
//! a separate target directory.
#![allow(dead_code, reason = "each build script includes this file and calls what it needs")]

use std::{env, path::PathBuf, process::Command};

const TARGET: &str = "x86_64-unknown-linux-gnu";

/// Builds the static program of `crates/{name}` with these features; its path goes into the
/// variable `variable`.
pub fn build(name: &str, features: &str, variable: &str) {
    let artifact = format!("stockade-{name}");
    nested(name, &["build", "--features", features], "-C relocation-model=static", &artifact, variable);
}

/// Builds the restorer likewise. It is linked far above the reach of 32-bit addresses.
pub fn build_restorer(variable: &str) {
    nested("restore", &["build"], "-C relocation-model=static -C code-model=large", "stockade-restore", variable);
}

/// Builds the library that writes images likewise.
pub fn build_image_library(variable: &str) {
    nested("image-dump", &["rustc", "--lib", "--crate-type", "cdylib"], "-C relocation-model=pic", "libstockade_image_dump.so", variable);
}

fn nested(name: &str, arguments: &[&str], rustflags: &str, artifact: &str, variable: &str) {
    let of_cargo = |name: &str| PathBuf::from(env::var_os(name).unwrap_or_default());
    let manifest = of_cargo("CARGO_MANIFEST_DIR").join("..").join(name).join("Cargo.toml");
    let target_dir = of_cargo("OUT_DIR").join(name);
    for directory in [name, "protocol", "sys"] {
        println!("cargo:rerun-if-changed=../{directory}/src");
        println!("cargo:rerun-if-changed=../{directory}/Cargo.toml");
    }
    let status = Command::new(of_cargo("CARGO"))
        .args(arguments)
        .args(["--release", "--locked", "--target", TARGET, "--manifest-path"])
        .arg(&manifest)
        .arg("--target-dir")
        .arg(&target_dir)
        .env_remove("CARGO_ENCODED_RUSTFLAGS")
        .env_remove("RUSTC_WORKSPACE_WRAPPER")
        .env_remove("RUSTC_WRAPPER")
        .env("RUSTFLAGS", format!("--cfg freestanding {rustflags}"))
        .status();
    let path = target_dir.join(TARGET).join("release").join(artifact);
    assert!(status.is_ok_and(|status| status.success()) && path.is_file(), "the {name} did not build");
    println!("cargo:rustc-env={variable}={}", path.display());
}
