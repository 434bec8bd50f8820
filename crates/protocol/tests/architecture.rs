//! ARCHITECTURE.md repeats the privileged steps in a table of two columns, the child's and the
//! launcher's. This keeps number, name and order equal to the code's; whether the reasons given
//! there are true it cannot tell.

use stockade_protocol::step::Step;

const DOCUMENT: &str = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../ARCHITECTURE.md"));

/// Number and name of each row `| 14 | mount the root tmpfs | – | … |`. A step without a name
/// in the child's column has it in the launcher's.
fn rows() -> Vec<(u16, &'static str)> {
    let row = |line: &'static str| {
        let mut cells = line.strip_prefix('|')?.split('|').map(str::trim);
        let number = cells.next()?.parse().ok()?;
        Some((number, cells.find(|name| *name != "–")?))
    };
    DOCUMENT.lines().filter_map(row).collect()
}

#[test]
fn the_table_of_steps_is_that_of_the_code() {
    let steps: Vec<(u16, &str)> = Step::ALL.iter().map(|&step| (step as u16, step.name())).collect();
    assert_eq!(rows(), steps);
}

#[test]
fn every_step_has_a_reason() {
    for line in DOCUMENT.lines().filter(|line| line.starts_with("| ")) {
        let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
        assert!(cells.iter().all(|cell| !cell.is_empty()), "an empty cell in: {line}");
    }
}
