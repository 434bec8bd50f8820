"""What the tests of every framework share. Runs as the user who starts it; touches only its own directories."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

EXAMPLES = Path(os.environ["STOCKADE_EXAMPLES"])

# Some ordinary user, for root; no account is needed.
NOBODY = 65534


@pytest.fixture(scope="session")
def bwrap(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The program, and the script of the package beside it."""
    place = tmp_path_factory.mktemp("bin")
    shutil.copy(os.environ["STOCKADE"], place / "stockade")
    script = place / "stockade-bwrap"
    script.write_text('#!/bin/sh\nexec "${0%/*}/stockade" bwrap "$@"\n')
    script.chmod(0o755)
    return str(script)


@pytest.fixture
def as_root() -> bool:
    return os.geteuid() == 0


@pytest.fixture
def work_dir(tmp_path: Path, as_root: bool) -> Path:
    """A directory that may be a scratch: as root it belongs to an ordinary user."""
    place = tmp_path / "work"
    place.mkdir()
    if as_root:
        os.chown(place, NOBODY, NOBODY)
    return place


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test no process of stockade is this process's child, and no thread is left."""
    threads = set(threading.enumerate())
    yield
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        left = [pid for pid in children() if b"stockade" in command_of(pid)]
        # asyncio's default executor and its watcher of processes before Python 3.12 are not ours.
        new = [one for one in threading.enumerate() if one not in threads and not one.name.startswith("asyncio_")]
        if not left and not new:
            return
        time.sleep(0.02)
    assert not left, f"processes left behind: {[command_of(pid) for pid in left]}"
    assert not new, f"threads left behind: {new}"


def children() -> list[int]:
    found = []
    for task in Path("/proc/self/task").iterdir():
        # A thread may end between the listing and the look.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found += [int(pid) for pid in (task / "children").read_text().split()]
    return found


def command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@pytest.fixture
def running() -> Callable[[str], bool]:
    """Whether any process of the host has these words on its command line."""

    def look(words: str) -> bool:
        return any(words.encode() in command_of(int(pid.name)) for pid in Path("/proc").iterdir() if pid.name.isdigit())

    return look


@pytest.fixture
def wait_until() -> Callable[[Callable[[], bool]], None]:
    def wait(condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline, "did not come true within a minute"
            time.sleep(0.02)

    return wait


@pytest.fixture
def example(work_dir: Path) -> Callable[[str], str]:
    """Runs an example of the package as its reader would, and returns what it prints."""

    def run(name: str) -> str:
        done = subprocess.run(
            [sys.executable, EXAMPLES / name], cwd=work_dir, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, f"{name} failed:\n{done.stdout}{done.stderr}"
        return done.stdout

    return run


@pytest.fixture
def readme(work_dir: Path) -> Callable[..., None]:
    """Runs what stands in Python under a heading of the package's README, and looks for the output that it promises."""

    def run(heading: str, before: str = "") -> None:
        _, found, section = f"\n{(EXAMPLES.parent / 'README.md').read_text()}".partition(f"\n{heading}\n")
        blocks = re.findall(r"```python\n(.*?)```", re.split(r"\n##+ ", section)[0], re.DOTALL)
        assert found and blocks, f"nothing to run under {heading!r}"
        program = "\n".join([before, *blocks])
        done = subprocess.run(
            [sys.executable, "-c", program], cwd=work_dir, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, f"{program}\n{done.stdout}{done.stderr}"
        promised = re.findall(r"print\(.*\)  # (.*)", program)
        assert done.stdout.splitlines() == promised

    return run


class Agent:
    """A model by script: it looks at the last output that it was shown, and decides.

    Its first program fails for want of a file. Only who reads that failure makes the
    file, and only who reads the number drawn in the sandbox can tell it.
    """

    first = 'print("read", open("measurements.txt").read())'
    second = (
        "import random\n"
        "number = random.randrange(10**9, 10**10)\n"
        'open("measurements.txt", "w").write(str(number))\n'
        'print("drawn", number)\n'
    )

    def program(self, seen: str) -> str | None:
        """The next program, or None when there is nothing left to run."""
        if "drawn" in seen:
            return None
        return self.second if "FileNotFoundError" in seen else self.first

    def answer(self, seen: str) -> str:
        drawn = re.search(r"drawn (\d+)", seen)
        return f"The number is {drawn[1] if drawn else 'unknown'}."

    def reply(self, seen: str) -> str:
        """In Markdown, as models write."""
        program = self.program(seen)
        if program is None:
            return f"{self.answer(seen)} TERMINATE"
        return f"I try this:\n\n```python\n{program}\n```\n"

    def is_right(self, answer: str, work_dir: Path) -> bool:
        return f"The number is {(work_dir / 'measurements.txt').read_text()}." in answer


@pytest.fixture
def agent() -> Agent:
    return Agent()


@pytest.fixture
def shims_of(tmp_path: Path) -> Callable[[str], Path]:
    """Shims of the host's interpreters under a policy, in their own directory."""

    def install(policy: str) -> Path:
        place = tmp_path / f"shims-{policy}"
        if not place.exists():
            place.mkdir()
            line = [os.environ["STOCKADE"], "shim", "install", "--policy", policy, place]
            subprocess.run(line, check=True, capture_output=True, timeout=120)
        return place

    return install


@pytest.fixture
def shims(shims_of: Callable[[str], Path]) -> Path:
    """The same under the policy that they have where none is named."""
    return shims_of("default")
