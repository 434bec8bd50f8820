//! Builds the probe, whose bytes the prover carries.

#[path = "../executor/embed.rs"]
mod embed;

fn main() {
    println!("cargo:rerun-if-changed=../executor/embed.rs");
    embed::build("probe", "", "STOCKADE_PROBE");
}
