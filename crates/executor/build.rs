//! Link flags of a program without libc: no start files, no libraries, static. An ordinary
//! build of the workspace gets none.
fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    if std::env::var_os("CARGO_CFG_FREESTANDING").is_none() {
        return;
    }
    for flag in ["-nostartfiles", "-nostdlib", "-static", "-no-pie", "-Wl,--build-id=none", "-Wl,-z,noseparate-code", "-Wl,-z,norelro"] {
        println!("cargo:rustc-link-arg-bins={flag}");
    }
}
