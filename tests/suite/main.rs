//! The integration suite. It drives the real program, named by the environment variable
//! `STOCKADE`, as whoever runs it: root's tests as root, the rootless ones as anybody
//! else. It never builds or changes the program, and needs no account, network or service.
//!
//! usage: sandbox [--list] [WORD …]    only tests whose `module::name` holds a WORD
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a test panics where its promise is broken, and a runner prints"
)]

mod harness;
#[path = "../patience.rs"]
mod patience;
mod probe;
mod stockade;
mod tracer;

mod approval;
mod attacks;
mod audit;
mod bad_input;
mod cleanup;
mod container;
mod contract;
mod cross_run;
mod delegation;
mod door;
mod escapes;
mod evasions;
mod explained;
mod faults;
mod filters;
mod host_ids;
mod kernel;
mod load;
mod markdown;
mod meta;
mod misdeeds;
mod policies;
mod proof_files;
mod prove;
mod remedies;
mod resources;
mod run;
mod screen;
mod session_life;
mod sessions;
mod shims;
mod spares;
mod verdicts;
mod watching;
mod workloads;

fn main() -> std::process::ExitCode {
    let mut tests = Vec::new();
    for module in [
        contract::TESTS,
        bad_input::TESTS,
        verdicts::TESTS,
        resources::TESTS,
        delegation::TESTS,
        container::TESTS,
        door::TESTS,
        misdeeds::TESTS,
        attacks::TESTS,
        escapes::TESTS,
        evasions::TESTS,
        cross_run::TESTS,
        kernel::TESTS,
        filters::TESTS,
        policies::TESTS,
        explained::TESTS,
        remedies::TESTS,
        prove::TESTS,
        proof_files::TESTS,
        host_ids::TESTS,
        workloads::TESTS,
        run::TESTS,
        shims::TESTS,
        markdown::TESTS,
        cleanup::TESTS,
        sessions::TESTS,
        session_life::TESTS,
        spares::TESTS,
        audit::TESTS,
        screen::TESTS,
        approval::TESTS,
        watching::TESTS,
        faults::TESTS,
        load::TESTS,
        meta::TESTS,
    ] {
        tests.extend_from_slice(module);
    }
    harness::main(&tests)
}
