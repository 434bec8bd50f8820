//! Has the program begin before libc's entry point, at the launcher's: see its `early.rs`.
//!
//! What runs there may call nothing that is not inlined, so an unoptimised build begins in
//! the ordinary way, as one does for which STOCKADE_ORDINARY_START is set.

use std::env;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-env-changed=STOCKADE_ORDINARY_START");
    let optimised = env::var("OPT_LEVEL").is_ok_and(|level| level != "0");
    if optimised && env::var_os("STOCKADE_ORDINARY_START").is_none() {
        println!("cargo:rustc-link-arg-bins=-Wl,-e,stockade_start");
    }
}
