//! What replies look like, and what is made of them.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::time::{Duration, Instant};

use super::{Block, MAX_BLOCKS, ReplyError, read};

fn block(line: usize, language: &str, code: &str) -> Block {
    Block { line, language: (!language.is_empty()).then(|| language.to_owned()), file: None, code: code.to_owned() }
}

fn one(text: &str) -> Block {
    let blocks = read(text.as_bytes()).unwrap_or_else(|error| panic!("{error}: {text:?}"));
    assert_eq!(blocks.len(), 1, "{text:?}");
    blocks.into_iter().next().unwrap()
}

#[test]
fn fenced_blocks_come_in_their_order_with_their_lines() {
    let text = "First:\n\n```python\nprint(1)\n```\nthen\n~~~sh\necho 2\n~~~\n\nwhich says\n```\n2\n```\n";
    assert_eq!(read(text.as_bytes()).unwrap(), [block(3, "python", "print(1)\n"), block(7, "sh", "echo 2\n"), block(12, "", "2\n")]);
}

#[test]
fn a_longer_or_another_fence_holds_a_shorter_one() {
    assert_eq!(one("````python\nx = '''\n```\n'''\n````\n"), block(1, "python", "x = '''\n```\n'''\n"));
    assert_eq!(one("~~~md-maker\n```python\n1\n```\n~~~"), block(1, "md-maker", "```python\n1\n```\n"));
    assert_eq!(one("```sh\necho '~~~'\n`````\n"), block(1, "sh", "echo '~~~'\n"));
}

#[test]
fn fences_may_be_indented_and_stand_in_lists_and_quotes() {
    assert_eq!(one("   ```python\n   if x:\n       y\n   ```\n"), block(1, "python", "if x:\n    y\n"));
    assert_eq!(one("1. run this\n\n   ```python\n   x = 1\n\n   y = 2\n   ```\n2. done"), block(3, "python", "x = 1\n\ny = 2\n"));
    assert_eq!(one("- ```sh\n  a\n  ```\n"), block(1, "sh", "a\n"));
    assert_eq!(one("> ```sh\n> a\n> ```\n"), block(1, "sh", "a\n"));
    // Four blanks make a paragraph of code, and no fence.
    assert_eq!(read(b"    ```python\n    1\n    ```\n"), Err(ReplyError::NoCode(0)));
}

#[test]
fn lines_end_in_a_line_feed_whatever_they_ended_in() {
    assert_eq!(one("a\r\n```python\r\nx = 1\r\n\r\ny = 2\r\n```\r\n"), block(2, "python", "x = 1\n\ny = 2\n"));
}

#[test]
fn the_language_is_the_first_word_behind_the_fence() {
    for (info, language) in [
        ("python", "python"),
        (" Python ", "Python"),
        ("python title=\"x.py\"", "python"),
        ("python,ignore", "python"),
        ("{.python .numberLines}", "python"),
        ("{python}", "python"),
        ("c++", "c++"),
        ("python:x.py", "python"),
    ] {
        assert_eq!(one(&format!("```{info}\n1\n```")).language.as_deref(), Some(language), "{info}");
    }
}

#[test]
fn a_first_line_may_name_the_file() {
    for (first, name) in [
        ("# filename: x.py", Some("x.py")),
        ("#filename:a/b c.py  ", Some("a/b c.py")),
        ("// filename: x.js", Some("x.js")),
        ("# filename: ../x.py", Some("../x.py")),
        ("# filename:", None),
        ("# hello", None),
        ("# x.py", None),
        ("filename: x.py", None),
        ("print('# filename: x.py')", None),
    ] {
        assert_eq!(one(&format!("```python\n{first}\n1\n```")).file.as_deref(), name, "{first}");
    }
    assert_eq!(one("```python\nx = 1\n# filename: x.py\n```").file, None);
    assert_eq!(one("```python\r\n# filename: x.py\r\n1\r\n```\r\n").file.as_deref(), Some("x.py"));
}

#[test]
fn code_that_was_cut_off_is_none() {
    for (text, line) in [
        ("```python\nprint(1)\n", 1),
        ("```python", 1),
        ("```python\n", 1),
        ("x\n```sh\nrm -rf /tmp/a\n~~~\n", 2),
        ("````sh\na\n```\n", 1),
        ("```sh\na\n``` b\n", 1),
        ("> ```sh\n> a\n\noutside\n", 1),
        ("- ```sh\n  a\n\noutside\n", 1),
        ("```sh\na\n> ```\n", 1),
        ("```sh\na\n```\n\n~~~\nb", 5),
    ] {
        assert_eq!(read(text.as_bytes()), Err(ReplyError::NotClosed(line)), "{text:?}");
    }
}

#[test]
fn without_code_there_is_nothing_to_run() {
    for (text, shown) in
        [("", 0), ("just words and `code`", 0), ("```\nx\n```", 1), ("```json\n{}\n```\n```TEXT\na\n```", 2), ("    x = 1", 0)]
    {
        assert_eq!(read(text.as_bytes()), Err(ReplyError::NoCode(shown)), "{text:?}");
    }
    assert_eq!(read(b"```sh\n\xff\n```"), Err(ReplyError::NotUtf8(6)));
    let many = |count: usize| read("```sh\n:\n```\n".repeat(count).as_bytes()).map(|blocks| blocks.len());
    assert_eq!((many(MAX_BLOCKS), many(MAX_BLOCKS + 1)), (Ok(MAX_BLOCKS), Err(ReplyError::TooMany(MAX_BLOCKS + 1))));
}

#[test]
fn an_empty_block_is_one() {
    assert_eq!(one("```python\n```\n"), block(1, "python", ""));
}

#[test]
fn large_and_strange_replies_are_read_in_bounded_time() {
    let (large, size) = (10 << 20, 1 << 20);
    let begin = Instant::now();
    for text in [
        "`".repeat(large),
        "```\n".repeat(size / 4),
        "` ".repeat(size / 2),
        "> ".repeat(1 << 16),
        "- ".repeat(1 << 16),
        format!("```sh\n{}\n```\n", "x".repeat(large)),
        "~".repeat(large),
        "[".repeat(size / 10),
        "*a_ ".repeat(size / 40),
    ] {
        let _whatever = read(text.as_bytes());
    }
    assert!(begin.elapsed() < Duration::from_secs(60), "{:?}", begin.elapsed());
}
