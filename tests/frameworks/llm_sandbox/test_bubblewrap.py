"""llm-sandbox: its bubblewrap backend with `stockade-bwrap` in place of bwrap."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from llm_sandbox import SandboxSession
from llm_sandbox.exceptions import CommandFailedError, SandboxTimeoutError
from llm_sandbox.local.config import LocalSandboxConfig


@pytest.fixture(scope="module")
def session(bwrap: str) -> Iterator[Any]:
    with SandboxSession(backend="bubblewrap", lang="python", bwrap_path=bwrap) as opened:
        yield opened


def test_code_runs_and_its_status_comes_back(session: Any) -> None:
    ran = session.run("import sys\nprint(6 * 7)\nprint('e', file=sys.stderr)\nsys.exit(3)")
    assert (ran.exit_code, ran.stdout, ran.stderr) == (3, "42\n", "e\n")


def test_files_stay_from_run_to_run_in_the_workspace_and_in_tmp(session: Any) -> None:
    session.run("open('a', 'w').write('1'); open('/tmp/b', 'w').write('2')")
    assert session.run("print(open('a').read() + open('/tmp/b').read())").stdout == "12\n"


def test_files_are_copied_in_and_out(session: Any, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("text")
    session.copy_to_runtime(str(tmp_path / "in.txt"), "/sandbox/in.txt")
    assert session.run("open('out.txt', 'w').write(open('in.txt').read().upper())").exit_code == 0
    session.copy_from_runtime("/sandbox/out.txt", str(tmp_path / "out.txt"))
    assert (tmp_path / "out.txt").read_text() == "TEXT"


def test_its_default_filter_is_taken_and_the_sandboxs_own_is_there_too(session: Any) -> None:
    code = "import re\nprint(re.findall(r'Seccomp_filters:\\t(\\d+)', open('/proc/self/status').read()))"
    # One is the caller's; this process may itself run behind others.
    status = Path("/proc/self/status").read_text().splitlines()
    own = next(int(line.split()[1]) for line in status if line.startswith("Seccomp_filters"))
    assert session.run(code).stdout == f"['{own + 2}']\n"


def test_the_hosts_files_and_network_are_not_there(session: Any) -> None:
    home = Path.home()
    paths = ["/root", "/home", "/var", "/etc/shadow", str(home)]
    code = (
        f"import os, socket\nprint([path for path in {paths} if os.path.exists(path)])\n"
        "socket.create_connection(('192.0.2.1', 9), 2)"
    )
    ran = session.run(code)
    assert (ran.exit_code, ran.stdout) == (1, "[]\n")
    assert "Network is unreachable" in ran.stderr


def test_a_run_that_takes_too_long_is_ended(bwrap: str) -> None:
    with (
        pytest.raises(SandboxTimeoutError),
        SandboxSession(backend="bubblewrap", lang="python", bwrap_path=bwrap) as session,
    ):
        session.run("import time; time.sleep(60)", timeout=1)


def test_the_hosts_network_is_refused_by_name(bwrap: str) -> None:
    config = LocalSandboxConfig(network="host")
    session = SandboxSession(backend="bubblewrap", lang="python", bwrap_path=bwrap, sandbox_config=config)
    with pytest.raises(CommandFailedError, match="--share-net is not taken"):
        session.open()
