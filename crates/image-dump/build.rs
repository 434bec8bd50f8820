//! Link flags of the library that a template loads: it calls its own memory functions and not
//! libc's, and asks for nothing but `dlsym`. An ordinary build of the workspace builds that
//! library and the restorer, whose copies the tests start.

#[path = "../executor/embed.rs"]
mod embed;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    if std::env::var_os("CARGO_CFG_FREESTANDING").is_some() {
        println!("cargo:rustc-link-arg=-Wl,-Bsymbolic");
        return;
    }
    println!("cargo:rerun-if-changed=../executor/embed.rs");
    embed::build_image_library("STOCKADE_IMAGE_LIBRARY");
    embed::build_restorer("STOCKADE_RESTORE");
}
