"""Shims as frameworks use them that start a shell themselves, by a path or a variable."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.root_too


def test_a_shell_that_takes_one_command(work_dir: Path, shims: Path):
    line = [shims / "bash", "-c", "id -un; echo $((6*7)); echo oops >&2; exit 3"]
    done = subprocess.run(line, cwd=work_dir, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (3, "sandbox\n42\n", "oops\n")


def test_a_shell_that_is_fed_command_by_command(work_dir: Path, shims: Path):
    # As AGENT_FRAMEWORK_SHELL or a tool with a persistent shell does.
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
    with subprocess.Popen([shims / "bash"], cwd=work_dir, **pipes) as shell:
        for command, answer in (("cd /tmp; answer=42; echo set", "set"), ("echo $answer $PWD; id -un", "42 /tmp")):
            shell.stdin.write(f"{command}\n")
            assert shell.stdout.readline() == f"{answer}\n"
        assert shell.stdout.readline() == "sandbox\n"
        shell.stdin.close()
        assert shell.wait(60) == 0
