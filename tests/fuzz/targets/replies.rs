//! Replies of a model, whose fenced blocks are run.

use stockade_markdown::{Block, MAX_BLOCKS, ReplyError, read};

use super::Target;

pub const REPLY: Target = Target {
    name: "reply",
    about: "Markdown of a model",
    corpus: include_str!("../corpus/reply"),
    seeds: || {
        let texts = [
            "First:\n\n```python\n# filename: a/x.py\nprint(1)\n```\nthen\n~~~sh\necho 2\n~~~\nwhich says\n```\n2\n```\n",
            "1. run\n\n   ````{.python .x}\n   ```\n   ````\n> ~~~js,y\r\n> // filename: x.js\r\n> ~~~\r\n",
            "```sh\n\ta\n``` b\n```\n    ```\n- ```\n",
        ];
        texts.iter().map(|text| text.as_bytes().to_vec()).collect()
    },
    words: &[
        b"```",
        b"````",
        b"~~~",
        b"\n",
        b"\r\n",
        b"    ",
        b"> ",
        b"- ",
        b"1. ",
        b"# filename: ",
        b"python",
        b"sh",
        b"<details>\n",
        b"\0",
    ],
    longest: 2 << 10,
    run: |input| {
        let blocks = match read(input) {
            Ok(blocks) => blocks,
            Err(ReplyError::NotUtf8(at)) => return assert!(str::from_utf8(&input[..at]).is_ok(), "all before it is text"),
            Err(_) => return,
        };
        let lines = input.iter().filter(|&&byte| byte == b'\n').count() + 1;
        assert!(blocks.iter().filter(|block| block.is_no_code().is_none()).count() <= MAX_BLOCKS, "so many and no more");
        assert!(blocks.iter().all(|block| block.line <= lines), "bounded by the reply");
        assert!(blocks.windows(2).all(|pair| matches!(pair, [a, b] if a.line < b.line)), "in their order");
        for block in &blocks {
            let plain = |word: &str| !word.is_empty() && !word.contains(char::is_whitespace);
            assert!(block.language.as_deref().is_none_or(plain), "a language is one word");
            assert!(!block.code.contains('\r'), "lines end in one character");
            assert_again(block);
        }
    },
};

/// What was found is found again, behind a fence that nothing in it can close; and without
/// the end of that fence, never.
fn assert_again(block: &Block) {
    // A reader of CommonMark shows no NUL.
    if block.code.contains('\0') {
        return;
    }
    let fence = "~".repeat(block.code.split(|c| c != '~').map(str::len).max().unwrap_or(0) + 3);
    let ending = if block.code.is_empty() || block.code.ends_with('\n') { "" } else { "\n" };
    let open = format!("{fence}sh\n{}{ending}", block.code);
    let again = read(format!("{open}{fence}\n").as_bytes());
    let code = format!("{}{ending}", block.code);
    assert!(
        matches!(&again, Ok(found) if matches!(found.as_slice(), [found] if found.code == code && found.file == block.file)),
        "{again:?}"
    );
    assert_eq!(read(open.as_bytes()), Err(ReplyError::NotClosed(1)), "what is cut off is none");
}
