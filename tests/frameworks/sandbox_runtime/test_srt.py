"""sandbox-runtime: its command `srt` with `stockade-bwrap` in place of bwrap."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

SRT = Path(os.environ["NODE_MODULES"]) / "@anthropic-ai/sandbox-runtime/dist/cli.js"

pytestmark = pytest.mark.root_too

Run = Callable[..., "subprocess.CompletedProcess[str]"]


class Answer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"from outside\n")

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A server of the host's, which `srt` may allow."""
    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


@pytest.fixture
def srt(bwrap: str, work_dir: Path, tmp_path: Path) -> Run:
    """Runs a line of shell in the working directory, with these settings."""

    def run(
        line: str, domains: list[str] | None = None, helper: Path | None = None, **filesystem: list[str]
    ) -> subprocess.CompletedProcess[str]:
        # Its helper makes namespaces. Code has no socket but the proxy's here.
        network = {"allowedDomains": domains or [], "deniedDomains": [], "allowAllUnixSockets": helper is None}
        settings: dict[str, Any] = {
            "bwrapPath": bwrap,
            "network": network,
            "filesystem": {"denyRead": [], "allowWrite": [], "denyWrite": [], **filesystem},
        }
        if helper:
            settings["seccomp"] = {"applyPath": str(helper)}
        file = tmp_path / "settings.json"
        file.write_text(json.dumps(settings))
        command = ["node", str(SRT), "--settings", str(file), "-c", line]
        # The policy lists the sockets of its proxies in /tmp.
        environment = {**os.environ, "TMPDIR": "/tmp"}
        return subprocess.run(
            command, cwd=work_dir, env=environment, capture_output=True, text=True, timeout=60, check=False
        )

    return run


def test_a_command_runs_and_its_status_comes_back(srt: Run) -> None:
    ran = srt("echo out; echo err >&2; touch new; exit 7")
    assert (ran.returncode, ran.stdout) == (7, "out\n"), ran.stderr
    assert "err\n" in ran.stderr


def test_allowed_domains_are_reached_through_its_proxy_and_no_others(srt: Run, address: str) -> None:
    fetch = f"curl -sS --noproxy '' --max-time 10 {address}"
    ran = srt(fetch, ["127.0.0.1"])
    assert (ran.returncode, ran.stdout) == (0, "from outside\n"), ran.stderr
    ran = srt(fetch, ["example.org"])
    assert "blocked by network allowlist" in ran.stdout, (ran.stdout, ran.stderr)
    # Without the proxy nothing is reached.
    assert srt(f"curl -sS --noproxy '*' --max-time 10 {address}", ["127.0.0.1"]).returncode == 7


def test_what_it_writes_is_there_and_what_it_denies_is_not(srt: Run, work_dir: Path) -> None:
    (work_dir / "fixed").write_text("old")
    (work_dir / "secret").write_text("secret")
    hooks = work_dir / ".git/hooks"
    hooks.mkdir(parents=True)
    line = (
        "for f in new fixed .bashrc .git/hooks/x .claude/x later; do echo x 2>/dev/null >$f && echo $f; done; "
        "cat secret; mv .git moved; rm .bashrc; ls -A"
    )
    owner = work_dir.stat()
    for path in (work_dir / "fixed", work_dir / "secret", work_dir / ".git", hooks):
        os.chown(path, owner.st_uid, owner.st_gid)
    ran = srt(line, allowWrite=["."], denyWrite=["fixed", "later"], denyRead=["secret"])
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("new\n.bash"), (ran.stdout, ran.stderr)
    assert {".bashrc", ".claude", "later"} <= set(ran.stdout.split())
    # Its mount points have gone with the run.
    assert sorted(path.name for path in work_dir.iterdir()) == [".git", "fixed", "new", "secret"]
    assert (work_dir / "fixed").read_text() == "old" and not list(hooks.iterdir())


def test_the_hosts_files_are_not_there(srt: Run) -> None:
    ran = srt(f"ls -d /home /var /etc/shadow {Path.home()} 2>/dev/null; echo done")
    assert ran.stdout == "done\n", ran.stderr


def test_its_own_seccomp_helper_is_refused(srt: Run, work_dir: Path, as_root: bool) -> None:
    machine = {"x86_64": "x64", "aarch64": "arm64"}[platform.machine()]
    helper = work_dir / "apply-seccomp"
    shutil.copy(SRT.parent.parent / "vendor/seccomp" / machine / "apply-seccomp", helper)
    helper.chmod(0o755)
    ran = srt("echo started", helper=helper, allowWrite=["."])
    # The filter refuses the namespaces that it makes, for which root's needs a capability.
    assert ran.returncode != 0 and not ran.stdout
    assert ("--cap-add is not taken" if as_root else "apply-seccomp: ") in ran.stderr, ran.stderr
