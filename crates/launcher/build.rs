//! Builds the executor, whose bytes the launcher carries.

#[path = "../executor/embed.rs"]
mod embed;

fn main() {
    println!("cargo:rerun-if-changed=../executor/embed.rs");
    embed::build("executor", "STOCKADE_EXECUTOR");
}
