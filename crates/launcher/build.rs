//! Builds the executor, a static program without libc, and hands its path to the
//! compiler: the launcher carries its bytes, so that both are always of one version.
//!
//! The executor needs flags that no other crate of the workspace may have, so a cargo
//! of its own builds it, into a directory of its own.

use std::{env, path::PathBuf, process::Command};

const TARGET: &str = "x86_64-unknown-linux-gnu";

fn main() {
    let variable = |name: &str| PathBuf::from(env::var_os(name).unwrap_or_default());
    let manifest = variable("CARGO_MANIFEST_DIR").join("../executor/Cargo.toml");
    let target_dir = variable("OUT_DIR").join("executor");
    for directory in ["executor", "protocol", "sys"] {
        println!("cargo:rerun-if-changed=../{directory}/src");
        println!("cargo:rerun-if-changed=../{directory}/Cargo.toml");
    }
    let status = Command::new(variable("CARGO"))
        .args(["build", "--release", "--locked", "--target", TARGET, "--manifest-path"])
        .arg(&manifest)
        .arg("--target-dir")
        .arg(&target_dir)
        .env_remove("CARGO_ENCODED_RUSTFLAGS")
        .env_remove("RUSTC_WORKSPACE_WRAPPER")
        .env_remove("RUSTC_WRAPPER")
        .env("RUSTFLAGS", "-C relocation-model=static")
        .status();
    let program = target_dir.join(TARGET).join("release/stockade-executor");
    assert!(status.is_ok_and(|status| status.success()) && program.is_file(), "the executor did not build");
    println!("cargo:rustc-env=STOCKADE_EXECUTOR={}", program.display());
}
