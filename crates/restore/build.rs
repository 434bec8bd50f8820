//! Link flags of the restorer: those of a program without libc, at an address where no image
//! can have memory (`stockade_protocol::memory_image::place`). An ordinary build of the workspace
//! gets none. The option is that of lld, which Rust links with for this target.
fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    if std::env::var_os("CARGO_CFG_FREESTANDING").is_none() {
        return;
    }
    let place = "-Wl,--image-base=0x100000000000";
    for flag in
        ["-nostartfiles", "-nostdlib", "-static", "-no-pie", "-Wl,--build-id=none", "-Wl,-z,noseparate-code", "-Wl,-z,norelro", place]
    {
        println!("cargo:rustc-link-arg-bins={flag}");
    }
}
