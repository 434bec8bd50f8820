//! Link flags of a program without libc: no start files, no libraries, static.
fn main() {
    for flag in ["-nostartfiles", "-nostdlib", "-static", "-no-pie", "-Wl,--build-id=none", "-Wl,-z,noseparate-code", "-Wl,-z,norelro"] {
        println!("cargo:rustc-link-arg-bins={flag}");
    }
}
