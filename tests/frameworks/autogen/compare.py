"""The same tasks through AutoGen's own local executor, through shims, and through the adapter:
with a sandbox begun from nothing for each block, and started, with a session.

Prints a table: time per code block, and what each makes of a timeout, of a child in the
background, of a byte that is not UTF-8, and of a secret in the environment. Not a test:
its figures depend on the host, and belong beside what the host was doing.

usage: compare.py [BLOCKS]     with STOCKADE as the tests have it; how many blocks to time, 40
"""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace

from autogen_core import CancellationToken
from autogen_core.code_executor import CodeBlock, CodeExecutor
from autogen_ext.code_executors.local import LocalCommandLineCodeExecutor

from stockade.autogen import StockadeCodeExecutor

# The host's interpreter, which the sandbox has too: a virtual environment would be slower by itself.
HOST = SimpleNamespace(env_exe="/usr/bin/python3", bin_path="/usr/bin")

HOLDER = ("bash", "echo begun; sleep 6 & sleep 6")
BACKGROUND = ("python", "import subprocess; subprocess.Popen(['sleep', '4']); print('done')")
NOT_UTF8 = ("python", "import sys; sys.stdout.buffer.write(b'a\\xffb')")
SECRET = ("sh", "echo ${FAKE_API_KEY:-not there}")


async def run(executor: CodeExecutor, language: str, code: str) -> str:
    """What came of one block, and when."""
    begin = time.monotonic()
    try:
        result = await executor.execute_code_blocks([CodeBlock(code, language)], CancellationToken())
        what = f"exit {result.exit_code}, {result.output!r}"
    except UnicodeDecodeError as error:
        what = f"raises {type(error).__name__}"
    return f"{what} after {time.monotonic() - begin:.1f} s"


async def per_block(kinds: dict[str, CodeExecutor], language: str, code: str, blocks: int) -> dict[str, list[float]]:
    """Milliseconds of each block, the kinds taking turns so that each sees the same host."""
    taken: dict[str, list[float]] = {name: [] for name in kinds}
    for number in range(blocks + 2):
        for name, executor in kinds.items():
            begin = time.perf_counter()
            await executor.execute_code_blocks([CodeBlock(f"{code}\n# {number}", language)], CancellationToken())
            taken[name].append((time.perf_counter() - begin) * 1000)
    # The first two of each warm caches.
    return {name: times[2:] for name, times in taken.items()}


async def compare(work: Path, shims: Path, blocks: int) -> None:
    """Prints the table."""
    sandboxed = SimpleNamespace(env_exe=str(shims / "python"), bin_path=str(shims))

    def kinds(timeout: int) -> dict[str, CodeExecutor]:
        directory = work / "coding"
        return {
            "local": LocalCommandLineCodeExecutor(timeout, directory, virtual_env_context=HOST),
            "shims": LocalCommandLineCodeExecutor(timeout, directory, virtual_env_context=sandboxed),
            "adapter": StockadeCodeExecutor(timeout, directory),
            "started": StockadeCodeExecutor(timeout, directory),
        }

    for title, language, code in (("a Python block", "python", "pass"), ("an sh block", "sh", "true")):
        executors = kinds(60)
        async with executors["started"]:
            taken = await per_block(executors, language, code, blocks)
        print(f"{title}, {blocks} times, in milliseconds (load average {os.getloadavg()[0]:.1f})")
        for name, times in taken.items():
            # On a busy host the least says more than the median.
            against = taken["local"]
            median, least = statistics.median(times), min(times)
            print(
                f"    {name:<8} median {median:7.1f} ({median - statistics.median(against):+6.1f})"
                f"   least {least:7.1f} ({least - min(against):+6.1f})"
            )
    trials: list[tuple[str, int, Callable[[CodeExecutor], Awaitable[str]]]] = [
        ("asked for 2 s, and a child holds the pipe for 6", 2, lambda one: run(one, *HOLDER)),
        ("a finished program whose child runs for 4 s, 2 s allowed", 2, lambda one: run(one, *BACKGROUND)),
        ("a byte that is not UTF-8", 60, lambda one: run(one, *NOT_UTF8)),
        ("a secret in the environment", 60, lambda one: run(one, *SECRET)),
    ]
    for title, timeout, trial in trials:
        print(title)
        for name, executor in kinds(timeout).items():
            # What is started differs in nothing but time.
            if name != "started":
                print(f"    {name:<8} {await trial(executor)}")


def main() -> None:
    """Makes a directory, compares, and removes it."""
    warnings.simplefilter("ignore")
    os.environ["FAKE_API_KEY"] = "a secret"
    with tempfile.TemporaryDirectory(prefix="compare-") as directory:
        work, shims = Path(directory), Path(directory, "shims")
        shims.mkdir()
        subprocess.run([os.environ["STOCKADE"], "shim", "install", shims], check=True, capture_output=True)
        asyncio.run(compare(work, shims, int(sys.argv[1]) if len(sys.argv) > 1 else 40))


if __name__ == "__main__":
    main()
