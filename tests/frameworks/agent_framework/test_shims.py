"""Microsoft's framework, unchanged: its shell is a shim, by the variable that it looks at."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest
from agent_framework_tools.shell import LocalShellTool

# Of stateless commands each is its own run; a persistent shell is one run.
MODES = ["stateless", "persistent"]
Opened = Callable[..., AbstractAsyncContextManager[LocalShellTool]]


@pytest.fixture
def tool(work_dir: Path, shims_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> Opened:
    """The framework's tool; without `sandboxed` its own shell, for controls."""

    @asynccontextmanager
    async def open_tool(mode: str, *, sandboxed: bool = True, **options: object) -> AsyncIterator[LocalShellTool]:
        if sandboxed:
            monkeypatch.setenv("AGENT_FRAMEWORK_SHELL", str(shims_of("shell") / "bash"))
        else:
            monkeypatch.delenv("AGENT_FRAMEWORK_SHELL", raising=False)
        async with LocalShellTool(
            mode=mode, workdir=work_dir, approval_mode="never_require", acknowledge_unsafe=True, **options
        ) as opened:
            yield opened

    return open_tool


@pytest.mark.root_too
@pytest.mark.parametrize("mode", MODES)
async def test_commands_run_in_the_sandbox_and_their_files_stay(tool: Opened, work_dir: Path, mode: str):
    async with tool(mode) as shell:
        first = await shell.run("id -un; echo 42 > answer; echo oops >&2; (exit 3)")
        second = await shell.run("cat answer; pwd")
    assert (first.stdout.splitlines(), first.stderr.splitlines(), first.exit_code) == (["sandbox"], ["oops"], 3)
    assert (second.stdout.splitlines(), second.exit_code) == (["42", str(work_dir)], 0)
    assert (work_dir / "answer").stat().st_uid == work_dir.stat().st_uid


@pytest.mark.parametrize("mode", MODES)
async def test_the_same_without_the_variable_is_not_in_a_sandbox(tool: Opened, mode: str):
    # The control.
    async with tool(mode, sandboxed=False) as shell:
        assert "sandbox" not in (await shell.run("id -un 2>&1; id -u")).stdout


async def test_a_persistent_shell_keeps_what_a_command_sets(tool: Opened):
    async with tool("persistent") as shell:
        await shell.run("answer=42")
        assert (await shell.run("echo $answer")).stdout.split() == ["42"]


@pytest.mark.parametrize("mode", MODES)
async def test_host_files_and_secrets_are_not_there(
    tool: Opened, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("FAKE_API_KEY", "secret")
    canary = tmp_path / "canary"
    canary.write_text("canary")
    look = f"echo ${{FAKE_API_KEY:-none}}; cat {canary} 2>/dev/null || echo no file"
    async with tool(mode) as shell:
        assert (await shell.run(look)).stdout.splitlines() == ["none", "no file"]
    async with tool(mode, sandboxed=False) as shell:  # the control
        assert (await shell.run(look)).stdout.split() == ["secret", "canary"]


@pytest.mark.parametrize("mode", MODES)
async def test_a_timeout_ends_what_runs(tool: Opened, running: Callable[[str], bool], mode: str):
    begin = time.monotonic()
    async with tool(mode) as shell:
        result = await shell.run("sleep 300 21.5 & sleep 300 22.5", timeout=1)
    assert result.timed_out
    assert time.monotonic() - begin < 30
    assert not running("300\x0021.5")
    assert not running("300\x0022.5")


async def test_an_agent_tool_of_it_says_what_the_command_said(tool: Opened):
    async with tool("stateless") as shell:
        said = await shell.as_function().invoke(arguments={"command": "id -un; exit 7"})
    text = "".join(str(getattr(part, "text", part)) for part in (said if isinstance(said, list) else [said]))
    assert "sandbox" in text
    assert "7" in text
