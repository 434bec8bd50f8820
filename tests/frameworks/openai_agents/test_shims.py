"""OpenAI's Agents SDK, unchanged: the shells of its local sandbox, which starts them in `/`, are shims."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from agents.sandbox.manifest import Manifest
from agents.sandbox.sandboxes.unix_local import UnixLocalSandboxClient


async def run(work_dir: Path, command: str, shims: Path | None = None):
    path = f"{shims}:/usr/bin:/bin" if shims else "/usr/bin:/bin"
    # The framework makes HOME the workspace, where policies, the log and images may not lie.
    home = Path.home()
    places = {"XDG_CONFIG_HOME": ".config", "XDG_STATE_HOME": ".local/state", "XDG_DATA_HOME": ".local/share"}
    own = {name: str(home / place) for name, place in places.items()}
    manifest = Manifest(root=str(work_dir), environment={"value": {"PATH": path, **own}})
    client = UnixLocalSandboxClient()
    session = await client.create(manifest=manifest)
    async with session:
        return await session.exec(command)


@pytest.fixture
def shims_for_it(work_dir: Path, tmp_path: Path) -> Path:
    shims = tmp_path / "shims"
    line = [os.environ["STOCKADE"], "shim", "install", "--scratch", work_dir, shims]
    subprocess.run(line, check=True, capture_output=True, timeout=120)
    return shims


@pytest.mark.root_too
async def test_commands_run_in_the_sandbox_and_their_files_stay(work_dir: Path, shims_for_it: Path):
    first = await run(work_dir, "id -un; pwd; echo 42 > answer; echo oops >&2; exit 3", shims_for_it)
    assert (first.stdout.decode().splitlines(), first.stderr, first.exit_code) == (
        ["sandbox", str(work_dir)],
        b"oops\n",
        3,
    )
    second = await run(work_dir, "cat answer", shims_for_it)
    assert (second.stdout, second.exit_code) == (b"42\n", 0)


async def test_shims_without_a_scratch_say_what_to_do(work_dir: Path, shims: Path):
    result = await run(work_dir, "id -un", shims)
    assert (result.stdout, result.exit_code) == (b"", 2)
    assert b"install them with `--scratch DIR`" in result.stderr


async def test_the_same_without_shims_is_not_in_a_sandbox(work_dir: Path):
    # The control.
    result = await run(work_dir, "id -u; pwd")
    assert result.stdout.decode().splitlines() == [str(os.geteuid()), str(work_dir)]
