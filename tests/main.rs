//! The integration tests: the real program, named by the environment variable `STOCKADE` or built
//! by cargo beside this one, driven from outside by the user who runs it. They never build or
//! change the program, and need no account, network or service.
//!
//! usage: integration [--list] [OPTION …] [WORD …]   tests with a WORD in their `suite::module::name`
//!        integration --bench                         the egress gate's figures, for scripts/bench
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a test panics where its promise is broken, and a runner prints"
)]

mod egress;
mod suite;
mod support;

use std::process::ExitCode;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["--bench"] => egress::bench::main(),
        ["--bench-server"] => egress::bench::serve(),
        ["--bench-client", what] => egress::bench::client(what),
        _ => return support::runner::main(),
    }
    ExitCode::SUCCESS
}

/// Exists only under rustc's own harness, which would find no other test here, and pass.
#[test]
fn the_runner_of_this_package_runs_its_tests() {
    panic!("tests/Cargo.toml lacks `harness = false`");
}
