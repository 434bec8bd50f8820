//! The runner under test: a test that fails, hangs or crashes must make it fail.

use std::{fs, path::PathBuf, time::Duration};

use crate::support::runner::{directory, eventually, run_broken, test};

test!(broken Both, passes);
fn passes() {}

test!(broken Both, fails);
fn fails() {
    assert_eq!(1 + 1, 3, "as it should");
}

test!(broken Both, crashes);
fn crashes() {
    std::process::abort();
}

test!(broken Both, hangs, seconds 1);
fn hangs() {
    loop {
        std::thread::park();
    }
}

test!(broken Both, lacks_something, needs [Program("no-such-program")]);
fn lacks_something() {}

/// Directories of other tests of the same suite that are under way.
fn others() -> Vec<PathBuf> {
    let (own, suite) = (directory(), format!("suite-{}-", std::os::unix::process::parent_id()));
    let entries = fs::read_dir(own.parent().unwrap()).unwrap().flatten().map(|entry| entry.path());
    entries.filter(|path| *path != own && path.file_name().unwrap().to_string_lossy().starts_with(&suite)).collect()
}

test!(broken Both, meets_another);
/// Ends when another test has seen this one, and has been told that it was seen.
fn meets_another() {
    let met = eventually(Duration::from_secs(3), || {
        let seen = directory().join("met").exists();
        for other in others() {
            let _it_has_ended = fs::write(other.join("met"), "");
        }
        seen
    });
    assert!(met, "no other test ran");
}

test!(broken Both, meets_one);
fn meets_one() {
    meets_another();
}

test!(broken serial Both, is_alone);
/// As long as another one would need to begin.
fn is_alone() {
    let met = eventually(Duration::from_millis(300), || !others().is_empty());
    assert!(!met, "{:?}", others());
}

test!(broken serial Both, is_alone_too);
fn is_alone_too() {
    is_alone();
}

/// Whether the text has a line for the test `suite::meta::NAME` that ends with this outcome.
fn is_noted(text: &str, name: &str, outcome: &str) -> bool {
    text.lines().any(|line| line.contains(&format!("suite::meta::{name} ")) && line.ends_with(outcome))
}

fn ending(words: &[&str]) -> (Option<i32>, String, String) {
    let output = run_broken(1, words);
    let text = String::from_utf8(output.stdout).unwrap();
    (output.status.code(), text.lines().last().unwrap_or_default().to_owned(), text)
}

test!(Both, a_failing_test_fails_the_suite);
fn a_failing_test_fails_the_suite() {
    let (status, last, text) = ending(&["meta::passes", "meta::fails"]);
    assert_eq!((status, last.as_str()), (Some(1), "1 passed, 1 failed, 0 skipped"), "{text}");
    assert!(is_noted(&text, "fails", "FAILED") && text.contains("as it should"), "{text}");
    // The control: without it the suite passes.
    let (status, last, text) = ending(&["meta::passes"]);
    assert_eq!((status, last.as_str()), (Some(0), "1 passed, 0 failed, 0 skipped"), "{text}");
}

test!(Both, a_crashing_test_fails_the_suite);
fn a_crashing_test_fails_the_suite() {
    let (status, last, text) = ending(&["meta::crashes", "meta::passes"]);
    assert_eq!((status, last.as_str()), (Some(1), "1 passed, 1 failed, 0 skipped"), "{text}");
    assert!(text.contains("ended by signal 6"), "{text}");
}

test!(Both, a_hanging_test_is_ended_and_fails_the_suite);
fn a_hanging_test_is_ended_and_fails_the_suite() {
    let (status, last, text) = ending(&["meta::hangs"]);
    assert_eq!((status, last.as_str()), (Some(1), "0 passed, 1 failed, 0 skipped"), "{text}");
    assert!(text.contains("not done after 1 s"), "{text}");
}

test!(Both, a_slow_machine_is_given_more_time_and_no_more);
fn a_slow_machine_is_given_more_time_and_no_more() {
    let output = run_broken(2, &["meta::hangs"]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.code() == Some(1) && text.contains("not done after 2 s"), "{text}");
    // What is no factor is no patience either.
    assert!(!run_broken(0, &["meta::passes"]).status.success());
}

test!(Both, a_skipped_test_is_named_with_its_reason_and_counted);
fn a_skipped_test_is_named_with_its_reason_and_counted() {
    let (status, last, text) = ending(&["meta::passes", "meta::lacks_something"]);
    assert_eq!((status, last.as_str()), (Some(0), "1 passed, 0 failed, 1 skipped"), "{text}");
    assert!(is_noted(&text, "lacks_something", "ignored (no-such-program is not installed)"), "{text}");
}

test!(Both, a_suite_in_which_nothing_ran_fails);
fn a_suite_in_which_nothing_ran_fails() {
    assert_eq!(ending(&["meta::lacks_something"]).0, Some(1));
    assert_eq!(ending(&["no test has this name"]).0, Some(2));
}

test!(Both, independent_tests_run_at_the_same_time);
fn independent_tests_run_at_the_same_time() {
    let (status, last, text) = ending(&["meta::meets"]);
    assert_eq!((status, last.as_str()), (Some(0), "2 passed, 0 failed, 0 skipped"), "{text}");
    // The control: by itself neither passes.
    let (status, last, text) = ending(&["meta::meets_one"]);
    assert!(status == Some(1) && last.starts_with("0 passed, 1 failed") && text.contains("no other test ran"), "{text}");
}

test!(Both, a_test_that_is_to_be_alone_has_no_other_beside_it);
fn a_test_that_is_to_be_alone_has_no_other_beside_it() {
    let (status, last, text) = ending(&["meta::is_alone", "meta::meets"]);
    assert_eq!((status, last.as_str()), (Some(0), "4 passed, 0 failed, 0 skipped"), "{text}");
}

/// The suite itself, with these words and this variable; none: the variable is unset. Its copy
/// lies where cargo has built no program beside it.
fn again(words: &[&str], variable: &str, value: Option<&str>) -> (Option<i32>, String) {
    let copy = directory().join("integration");
    fs::copy(std::env::current_exe().unwrap(), &copy).unwrap();
    let mut command = std::process::Command::new(copy);
    command.args(words).env_remove(variable).envs(value.map(|value| (variable, value))).stdin(std::process::Stdio::null());
    let output = command.output().unwrap();
    (output.status.code(), format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr)))
}

/// The quickest test of all, to select.
const ANY: &str = "contract::version_names_schema_and_features";

test!(Both, without_a_program_the_suite_fails);
fn without_a_program_the_suite_fails() {
    let (status, said) = again(&[ANY], "STOCKADE", None);
    assert!(status == Some(2) && said.contains("STOCKADE"), "{said}");
    let (status, said) = again(&[ANY], "STOCKADE", Some("/no/such/program"));
    assert!(status == Some(2) && said.contains("/no/such/program"), "{said}");
}

test!(Both, without_a_program_and_words_the_tests_are_counted_and_not_run);
fn without_a_program_and_words_the_tests_are_counted_and_not_run() {
    let (status, said) = again(&[], "STOCKADE", None);
    assert_eq!(status, Some(0), "{said}");
    assert!(said.contains("scripts/test one NAME") && said.contains("\n0 passed, 0 failed, "), "{said}");
    assert!(!said.ends_with(" 0 skipped\n") && said.ends_with(" skipped\n"), "{said}");
}

test!(Both, a_word_that_selects_nothing_fails_the_suite);
fn a_word_that_selects_nothing_fails_the_suite() {
    let (status, said) = again(&[ANY, "a_test_that_was_renamed"], "STOCKADE_TEST_CGROUP", None);
    assert!(status == Some(2) && said.contains("a_test_that_was_renamed"), "{said}");
    let (status, said) = again(&[ANY], "STOCKADE_TEST_CGROUP", None);
    assert_eq!(status, Some(0), "{said}");
}

test!(Both, a_cgroup_that_is_not_as_it_must_be_fails_the_suite);
fn a_cgroup_that_is_not_as_it_must_be_fails_the_suite() {
    let (status, said) = again(&[ANY], "STOCKADE_TEST_CGROUP", Some("v3"));
    assert!(status == Some(2) && said.contains("cgroup v3"), "{said}");
}
