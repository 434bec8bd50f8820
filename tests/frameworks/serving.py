"""A service of a test: `stockade serve` as the user who runs the tests, at a port of its own, with one key."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

PROGRAM = os.environ["STOCKADE"]


class Service:
    """Where it is, and the token of its key."""

    def __init__(self, place: Path, port: int, token: str, pid: int) -> None:
        self.place, self.port, self.token, self.pid = place, port, token, pid
        self.url = f"http://127.0.0.1:{port}"
        # For clients that send no key of their own.
        self.url_with_key = f"http://x:{token}@127.0.0.1:{port}"

    def signal(self, number: int) -> None:
        """Sends its process a signal."""
        os.kill(self.pid, number)


@contextmanager
def serving(
    place: Path, config: str = "", policy: str = "default", scopes: str = "run, keep, facade, watch"
) -> Iterator[Service]:
    """Serves with these lines more in `serve.toml`, and ends the service with all that it started."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    keys = place / "keys.toml"
    made = subprocess.run(
        [PROGRAM, "key", "new", "test", "--policy", policy, "--add", "--file", keys],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    listed = ", ".join(f'"{scope}"' for scope in scopes.split(", "))
    keys.write_text(keys.read_text().replace('scopes = ["run"]', f"scopes = [{listed}]"))
    # The path of a socket has 107 bytes at most, and that of a test's directory may be longer.
    sockets = tempfile.TemporaryDirectory(prefix="s")
    listen = f'[listen]\nunix = "{sockets.name}/s"\ntcp = "127.0.0.1:{port}"\n'
    (place / "serve.toml").write_text(f'schema = 1\nkeys = "{keys}"\n{listen}{config}\n')
    with sockets, (place / "log").open("w") as log:
        child = subprocess.Popen([PROGRAM, "serve", "--config", place / "serve.toml"], stderr=log)
        service = Service(place, port, made.stdout.strip(), child.pid)
        try:
            wait_for(service, child)
            yield service
        finally:
            child.send_signal(signal.SIGTERM)
            status = child.wait(60)
    assert status == 0, (place / "log").read_text()


def wait_for(service: Service, child: subprocess.Popen[bytes]) -> None:
    """Returns when it answers."""
    deadline = time.monotonic() + 60
    while True:
        try:
            with urlopen(f"{service.url}/live", timeout=10):
                return
        except OSError:
            assert child.poll() is None and time.monotonic() < deadline, (service.place / "log").read_text()
            time.sleep(0.05)
