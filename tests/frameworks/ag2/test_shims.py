"""AG2's own executors, unchanged, whose interpreters are shims: no line of adapter."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from autogen import ConversableAgent
from autogen.coding import CodeBlock, LocalCommandLineCodeExecutor

INSIDE = "import getpass; print(getpass.getuser())"


def blocks(*listed: tuple[str, str]) -> list[CodeBlock]:
    return [CodeBlock(language=language, code=code) for language, code in listed]


@pytest.mark.root_too
def test_its_executor_with_the_shims_as_an_environment(work_dir: Path, shims: Path):
    context = SimpleNamespace(env_exe=str(shims / "python"), bin_path=str(shims))
    executor = LocalCommandLineCodeExecutor(work_dir=work_dir, virtual_env_context=context)
    result = executor.execute_code_blocks(blocks(("python", INSIDE), ("sh", "id -un"), ("bash", "id -un")))
    assert (result.exit_code, result.output) == (0, "sandbox\nsandbox\nsandbox\n")


def test_its_executor_with_the_shims_first_on_path(work_dir: Path, shims: Path, monkeypatch: pytest.MonkeyPatch):
    executor = LocalCommandLineCodeExecutor(work_dir=work_dir)
    control = executor.execute_code_blocks(blocks(("sh", "id -un 2>/dev/null || echo nameless")))
    assert "sandbox" not in control.output
    monkeypatch.setenv("PATH", f"{shims}:{os.environ['PATH']}")
    result = executor.execute_code_blocks(blocks(("python", INSIDE), ("sh", "id -un")))
    assert (result.exit_code, result.output) == (0, "sandbox\nsandbox\n")


def test_its_timeout_ends_the_whole_tree(work_dir: Path, shims: Path, running, wait_until):
    context = SimpleNamespace(env_exe=str(shims / "python"), bin_path=str(shims))
    executor = LocalCommandLineCodeExecutor(timeout=1, work_dir=work_dir, virtual_env_context=context)
    begin = time.monotonic()
    result = executor.execute_code_blocks(blocks(("bash", "sleep 300 15.5 & sleep 300 16.5")))
    assert time.monotonic() - begin < 30
    assert (result.exit_code, result.output) == (124, "\nTimeout")
    # It kills the shim alone, and waits for its pipes: the kernel takes the rest down after it.
    wait_until(lambda: not running("300\x0015.5") and not running("300\x0016.5"))


def test_the_configuration_of_its_tutorial(work_dir: Path, shims: Path, agent, monkeypatch: pytest.MonkeyPatch):
    # Without an executor the framework runs shell blocks by PATH, and Python by sys.executable.
    monkeypatch.setenv("PATH", f"{shims}:{os.environ['PATH']}")
    monkeypatch.setattr(sys, "executable", str(shims / "python"))
    user = ConversableAgent(
        "user",
        llm_config=False,
        human_input_mode="NEVER",
        code_execution_config={"work_dir": str(work_dir), "use_docker": False},
    )

    def told(code: str, language: str) -> str:
        message = {"role": "user", "content": f"```{language}\n{code}\n```"}
        return user.generate_reply(messages=[message])

    assert "sandbox" in told(INSIDE, "python")
    assert "sandbox" in told("id -un", "sh")
    first = told(agent.first, "python")
    assert "exitcode: 1 (execution failed)" in first
    assert "FileNotFoundError" in first
    second = told(agent.second, "python")
    assert "exitcode: 0 (execution succeeded)" in second
    assert agent.is_right(agent.answer(second), work_dir)
