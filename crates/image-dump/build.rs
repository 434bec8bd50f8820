//! Link flags of the library that a template loads: it calls its own memory functions and not
//! libc's, and asks for nothing but `dlsym`. An ordinary build of the workspace gets none.
fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    if std::env::var_os("CARGO_CFG_FREESTANDING").is_some() {
        println!("cargo:rustc-link-arg=-Wl,-Bsymbolic");
    }
}
