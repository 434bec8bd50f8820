"""AG2 classic: the adapter with agents of the real framework, whose model is a script."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from autogen import ConversableAgent
from autogen.coding import CodeBlock, CodeExecutor, LocalCommandLineCodeExecutor
from autogen.coding.factory import CodeExecutorFactory

from stockade.ag2 import StockadeCodeExecutor


def run(executor: CodeExecutor, *blocks: tuple[str, str]):
    return executor.execute_code_blocks([CodeBlock(language=language, code=code) for language, code in blocks])


def scripted(agent) -> ConversableAgent:
    """An agent that answers by the script, from what it was shown last."""
    coder = ConversableAgent("coder", llm_config=False, human_input_mode="NEVER")

    def reply(recipient, messages=None, sender=None, config=None):
        seen = messages[-1]["content"] if len(messages) > 1 else ""
        return True, agent.reply(seen)

    coder.register_reply([ConversableAgent, None], reply, position=0)
    return coder


@pytest.mark.root_too
def test_an_agent_sees_what_its_code_did_and_corrects_itself(work_dir: Path, agent):
    user = ConversableAgent(
        "user",
        llm_config=False,
        human_input_mode="NEVER",
        is_termination_msg=lambda message: "TERMINATE" in (message.get("content") or ""),
        code_execution_config={"executor": StockadeCodeExecutor(work_dir=work_dir)},
    )
    chat = user.initiate_chat(scripted(agent), message="Measure, and tell me the number.", max_turns=6, silent=True)
    said = [message["content"] for message in chat.chat_history]
    assert any("exitcode: 1 (execution failed)" in text and "FileNotFoundError" in text for text in said), said
    assert any("exitcode: 0 (execution succeeded)" in text and "drawn" in text for text in said), said
    assert agent.is_right(said[-1], work_dir), said


def test_it_is_what_the_framework_takes_for_an_executor(work_dir: Path):
    executor = StockadeCodeExecutor(work_dir=work_dir)
    assert isinstance(executor, CodeExecutor)
    assert CodeExecutorFactory.create({"executor": executor}) is executor
    blocks = executor.code_extractor.extract_code_blocks("So:\n```python\nprint(6*7)\n```\n")
    assert executor.execute_code_blocks(blocks).output == "42\n"


def test_blocks_run_in_one_directory_until_one_fails(work_dir: Path):
    executor = StockadeCodeExecutor(work_dir=work_dir)
    result = run(
        executor,
        ("python", "# filename: half.py\ndef half(x): return x / 2"),
        ("python", "import sys; sys.path.insert(0, '.'); from half import half; print(half(84))"),
        ("bash", "echo oops >&2; echo out; exit 5"),
        ("sh", "echo never"),
    )
    assert (result.exit_code, result.output) == (5, "42.0\noops\nout\n")


def test_a_comment_is_not_a_file_name(work_dir: Path):
    # The framework's own executor takes any comment on the first line for one.
    result = run(StockadeCodeExecutor(work_dir=work_dir), ("python", "# the answer\nprint(6*7)"))
    assert result.output == "42\n"
    assert list(work_dir.iterdir()) == []


def test_a_file_name_cannot_lead_out_of_the_directory(work_dir: Path):
    result = run(StockadeCodeExecutor(work_dir=work_dir), ("python", "# filename: ../x.py\nprint(1)"))
    assert (result.exit_code, result.output) == (1, "Filename is not in the workspace")


def test_no_word_is_forbidden_because_the_sandbox_decides(work_dir: Path):
    (work_dir / "d").mkdir(mode=0o777)
    block = ("sh", "rm -rf / 2>/dev/null; ls /usr/bin/env")
    result = run(StockadeCodeExecutor(work_dir=work_dir), block)
    assert (result.exit_code, result.output) == (0, "/usr/bin/env\n")
    # The control: there, the words alone are refused.
    with pytest.raises(ValueError, match="not allowed"):
        run(LocalCommandLineCodeExecutor(work_dir=work_dir), block)


@pytest.mark.root_too
def test_without_a_directory_the_blocks_share_a_session():
    executor = StockadeCodeExecutor()
    assert run(executor, ("sh", "echo kept > n"), ("sh", "cat n")).output == "kept\n"
    assert run(executor, ("sh", "cat n")).output == "kept\n"
    executor.restart()
    assert run(executor, ("sh", "ls n 2>/dev/null || echo none")).output == "none\n"
    executor.close()


def test_a_timeout_is_on_time_although_a_child_holds_the_pipe(work_dir: Path):
    begin = time.monotonic()
    result = run(StockadeCodeExecutor(timeout=1, work_dir=work_dir), ("bash", "echo begun; sleep 60 & sleep 60"))
    assert time.monotonic() - begin < 20
    assert (result.exit_code, result.output) == (124, "begun\n\nTimeout")


def test_output_need_not_be_utf8(work_dir: Path):
    block = ("python", "import sys; sys.stdout.buffer.write(b'a\\xffb\\n')")
    assert run(StockadeCodeExecutor(work_dir=work_dir), block).output == "a\ufffdb\n"


def test_secrets_of_the_environment_are_not_there(work_dir: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FAKE_API_KEY", "secret")
    block = ("sh", "echo ${FAKE_API_KEY:-none}")
    assert run(StockadeCodeExecutor(work_dir=work_dir), block).output == "none\n"
    # The control: the framework's own executor hands them over.
    assert run(LocalCommandLineCodeExecutor(work_dir=work_dir), block).output == "secret\n"


def test_the_example_runs(example):
    assert "42" in example("ag2_blocks.py")


def test_the_readme_runs(readme):
    readme("### AG2 classic")
