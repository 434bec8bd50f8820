//! The budget bounds the work for a program by its length, and findings are still made. Nothing
//! is timed: without the bounds these tests would not end.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::fmt::Write;

use stockade_protocol::screen::{Grammar, Question, Rule, Rules, Source};

/// The rules of all findings, one per line.
fn found(grammar: Grammar, code: &str) -> Vec<Rule> {
    let sources = vec![Source { grammar, code }];
    let question = Question { rules: Rules::ALL, scratch: "/scratch", sources, ..Question::default() };
    stockade_screen::screen(&question).found.into_iter().map(|found| found.rule).collect()
}

#[test]
fn lists_of_lists_are_shared_and_followed() {
    let mut code = String::from("import os\na0 = 'rm -rf /'\n");
    (0..60).for_each(|n| writeln!(code, "a{} = [a{n}, a{n}]", n + 1).unwrap());
    let quiet = found(Grammar::Python, &code);
    assert!(!quiet.contains(&Rule::Screener) && !quiet.contains(&Rule::Destroy), "{quiet:?}");
    code.push_str("os.system(a60");
    code.push_str(&"[1]".repeat(55));
    code.push_str(")\nos.system(a4[0][1][0][1])\n");
    let told = found(Grammar::Python, &code);
    assert!(told.contains(&Rule::Destroy) && !told.contains(&Rule::Screener), "{told:?}");
}

#[test]
fn a_long_chain_of_methods_is_no_more_than_its_links() {
    let links: String = (0..200).map(|n| format!(".where({n})")).collect();
    let code = format!("import os, query\nrows = query{links}.all()\nos.system('rm -rf /')\n");
    let told = found(Grammar::Python, &code);
    assert!(told.contains(&Rule::Destroy) && !told.contains(&Rule::Screener), "{told:?}");
}

#[test]
fn work_beyond_the_budget_is_reported_once_and_not_done() {
    let times = |lines: &str, line: &str, times: usize| format!("{lines}\n{}", format!("{line}\n").repeat(times));
    let doubled: String = (0..13).map(|n| format!("a{}=\"$a{n}$a{n}\"\n", n + 1)).collect();
    let many = [
        (Grammar::Python, "s = 'a = 1\\n' * 10000", "exec(s)"),
        (Grammar::Python, "s = 'x' * 65000", "t = s + '.'"),
        (Grammar::Shell, &format!("a0='a=1;'\n{doubled}"), "sh -c \"$a13\""),
    ];
    for (grammar, lines, line) in many {
        let told = found(grammar, &times(lines, line, 2500));
        assert_eq!(told.iter().filter(|rule| **rule == Rule::Screener).count(), 1, "{line}: {told:?}");
        let told = found(grammar, &times(lines, line, 3));
        assert!(!told.contains(&Rule::Screener), "{line}: {told:?}");
    }
}

#[test]
fn a_page_built_line_by_line_is_within_the_budget() {
    let mut code = String::from("import os\npage = ''\n");
    (0..400).for_each(|n| writeln!(code, "page = page + '<p>paragraph {n} of a page, as long as a line of text is'").unwrap());
    code.push_str("os.system('rm -rf /')\n");
    let told = found(Grammar::Python, &code);
    assert!(told.contains(&Rule::Destroy) && !told.contains(&Rule::Screener), "{told:?}");
}

#[test]
fn nested_commands_are_followed_within_the_budget() {
    for chain in ["nice ".repeat(5000), "find / -exec ".repeat(5)] {
        let told = found(Grammar::Shell, &format!("{chain}rm -rf /\n"));
        assert!(told.contains(&Rule::Destroy) && !told.contains(&Rule::Screener), "{told:?}");
    }
    // Each of these words contains all words after it.
    for chain in ["find / -exec ".repeat(40), "python -m ".repeat(5000)] {
        let told = found(Grammar::Shell, &format!("{chain}rm -rf /\n"));
        assert_eq!(told.iter().filter(|rule| **rule == Rule::Screener).count(), 1, "{told:?}");
    }
}

#[test]
fn names_that_are_bound_again_and_again_are_followed() {
    let mut code = String::from("import os\n");
    (0..20_000).for_each(|n| writeln!(code, "x = os.a{n}\nif n: x = os.b{n}").unwrap());
    code.push_str("x = os.system\ndef f():\n    x('rm -rf /')\n");
    let told = found(Grammar::Python, &code);
    assert!(told.contains(&Rule::Destroy) && !told.contains(&Rule::Screener), "{told:?}");
}

#[test]
fn names_bound_beyond_the_budget_are_reported_once() {
    let nested = |depth: usize| (0..depth).map(|n| format!("{}if a:\n", " ".repeat(n))).collect::<String>() + &" ".repeat(depth);
    let names: String = (0..20_000).map(|n| format!("a{n} = 1; ")).collect();
    // Each name is sought in every branch around it.
    let reads = "a; ".repeat(50_000);
    for code in [format!("{}{names}\n", nested(80)), format!("{}{reads}\n", nested(300))] {
        let told = found(Grammar::Python, &code);
        assert_eq!(told.iter().filter(|rule| **rule == Rule::Screener).count(), 1, "{told:?}");
    }
}
