"""AutoGen's own executor, unchanged, whose interpreters are shims: no line of adapter."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from autogen_core import CancellationToken
from autogen_core.code_executor import CodeBlock
from autogen_ext.code_executors.local import LocalCommandLineCodeExecutor

pytestmark = pytest.mark.filterwarnings("ignore:Using LocalCommandLineCodeExecutor")

INSIDE = "import getpass; print(getpass.getuser())"


@pytest.fixture
def execute(work_dir: Path, shims: Path):
    """Runs blocks as the framework does, with the shims in place of a virtual environment."""

    async def run(*blocks: tuple[str, str], timeout: int = 60, sandboxed: bool = True):
        context = SimpleNamespace(env_exe=str(shims / "python"), bin_path=str(shims)) if sandboxed else None
        executor = LocalCommandLineCodeExecutor(timeout=timeout, work_dir=work_dir, virtual_env_context=context)
        listed = [CodeBlock(language=language, code=code) for language, code in blocks]
        return await executor.execute_code_blocks(listed, CancellationToken())

    return run


@pytest.mark.root_too
async def test_blocks_of_each_language_run_in_the_sandbox(execute, work_dir: Path):
    result = await execute(
        ("python", f"{INSIDE}; open('n', 'w').write('1')"),
        ("sh", "id -un; cat n; echo"),
        ("bash", "id -un; python3 -c 'print(open(\"n\").read())'"),
        ("shell", "id -un"),
    )
    assert (result.exit_code, result.output) == (0, "sandbox\nsandbox\n1\nsandbox\n1\nsandbox\n")
    assert (work_dir / "n").stat().st_uid == work_dir.stat().st_uid


async def test_the_same_without_shims_is_not_in_a_sandbox(execute):
    # The control.
    result = await execute(
        ("python", "import os; print(os.environ.get('HOME'))"), ("sh", "id -un 2>&1"), sandboxed=False
    )
    assert "sandbox" not in result.output


async def test_a_failure_and_its_traceback_come_back(execute):
    result = await execute(("python", "print('before'); 1/0"), ("sh", "echo never"))
    assert result.exit_code == 1
    assert result.output.endswith("before\n")
    assert "ZeroDivisionError" in result.output
    assert "never" not in result.output


async def test_a_module_that_a_block_named_is_found_by_the_next(execute):
    result = await execute(
        ("python", "# filename: half.py\ndef half(x): return x / 2"),
        ("python", "from half import half; print(half(84))"),
    )
    assert (result.exit_code, result.output) == (0, "42.0\n")


async def test_a_timeout_is_on_time_although_a_child_holds_the_pipe(execute, running):
    begin = time.monotonic()
    result = await execute(("bash", "sleep 300 12.5 & sleep 300 13.5"), timeout=1)
    assert time.monotonic() - begin < 30
    assert (result.exit_code, result.output) == (124, "\nTimeout")
    assert not running("300\x0012.5")
    assert not running("300\x0013.5")


async def test_a_child_in_the_background_delays_nothing(execute):
    begin = time.monotonic()
    result = await execute(("python", "import subprocess; subprocess.Popen(['sleep', '60']); print('done')"))
    assert time.monotonic() - begin < 30
    assert (result.exit_code, result.output) == (0, "done\n")


async def test_output_that_is_not_utf8_is_no_exception(execute):
    block = ("python", "import sys; sys.stdout.buffer.write(b'a\\xffb\\n')")
    assert (await execute(block)).output == "a\ufffdb\n"
    with pytest.raises(UnicodeDecodeError):  # the control
        await execute(block, sandboxed=False)


async def test_secrets_of_the_environment_are_not_there(execute, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FAKE_API_KEY", "secret")
    block = ("sh", "echo ${FAKE_API_KEY:-none}")
    assert (await execute(block)).output == "none\n"
    assert (await execute(block, sandboxed=False)).output == "secret\n"  # the control


async def test_a_cancelled_task_ends_what_runs(execute, running, wait_until):
    # The framework makes a result of it.
    task = asyncio.ensure_future(execute(("sh", "exec sleep 300 14.5")))
    await asyncio.to_thread(wait_until, lambda: running("300\x0014.5"))
    task.cancel()
    result = await task
    assert (result.exit_code, result.output) == (125, "\nCancelled")
    assert not running("300\x0014.5")
