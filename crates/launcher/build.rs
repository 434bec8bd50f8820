//! Builds the executor and the restorer, whose bytes the launcher carries.

#[path = "../executor/embed.rs"]
mod embed;

fn main() {
    println!("cargo:rerun-if-changed=../executor/embed.rs");
    let features = if std::env::var_os("CARGO_FEATURE_ABLATION").is_some() { "ablation" } else { "" };
    embed::build("executor", features, "STOCKADE_EXECUTOR");
    embed::build_restorer("STOCKADE_RESTORER");
}
