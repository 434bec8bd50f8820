//! Has the program begin before libc's entry point, at the launcher's: see its `early.rs`.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-link-arg-bins=-Wl,-e,stockade_start");
}
