"""Where the program `stockade` is, and whether this package can talk to it.

Looked for in this order: the argument, the variable `STOCKADE`, the program that came with
the package, `PATH`. Nothing is downloaded, and nothing is run from the working directory.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

from ._errors import NotInstalled

#: The format of requests and results that this package speaks.
SCHEMA = 1

_BUNDLED = Path(__file__).parent / "bin" / "stockade"

# Features of a program, by its path and the file's identity.
_known: dict[tuple[str, int, int], frozenset[str]] = {}


def find(program: str | os.PathLike[str] | None = None) -> str:
    """The path of the program; `NotInstalled` if there is none."""
    for source, given in (("program", program), ("the variable STOCKADE", os.environ.get("STOCKADE"))):
        if given:
            found = shutil.which(os.path.abspath(given))
            if found is None:
                raise NotInstalled(
                    f"{source} names {os.fspath(given)!r}, which is not an executable program; give the path of the program `stockade`",
                    reason="program_missing",
                )
            return found
    found = str(_BUNDLED) if os.access(_BUNDLED, os.X_OK) else _on_path()
    if found is None:
        raise NotInstalled(
            "the program `stockade` is neither in this package nor on PATH: install the wheel for Linux on x86_64, "
            "put the program on PATH, or name it by program=… or the variable STOCKADE",
            reason="program_missing",
        )
    return os.path.abspath(found)


def _on_path() -> str | None:
    """The first `stockade` on PATH, whose relative and empty elements mean the working directory."""
    elements = [element for element in os.environ.get("PATH", "").split(os.pathsep) if os.path.isabs(element)]
    return shutil.which("stockade", path=os.pathsep.join(elements))


def require(program: str, feature: str) -> None:
    """Raises `NotInstalled` if this package cannot use `feature` of the program.

    Starts the program once for each file: a few milliseconds.
    """
    status = os.stat(program)
    key = (program, status.st_mtime_ns, status.st_size)
    if key not in _known:
        _known[key] = _features(program)
    if feature not in _known[key]:
        raise NotInstalled(
            f"{program} is too old for this package: it has no `{feature}`; install the version that the package came with",
            reason="program_version",
        )


def _features(program: str) -> frozenset[str]:
    try:
        done = subprocess.run(
            [program, "version", "--json"], stdin=subprocess.DEVNULL, capture_output=True, timeout=30, check=False
        )
        answer = json.loads(done.stdout)
        schema, features = answer["schema"], frozenset(str(name) for name in answer["features"])
    except (OSError, subprocess.TimeoutExpired, ValueError, KeyError, TypeError) as error:
        raise NotInstalled(
            f"{program} does not answer `version --json` as stockade does ({error}); name the program `stockade` itself",
            reason="program_version",
        ) from error
    if schema != SCHEMA:
        raise NotInstalled(
            f"{program} speaks schema {schema}, this package schema {SCHEMA}; install a program and a package of one version",
            reason="program_version",
        )
    return features


def main() -> NoReturn:
    """The command `stockade` of an environment in which this package is installed."""
    # This very script is on PATH, so only the bundled program can be meant.
    if not (os.access(_BUNDLED, os.X_OK) and stat.S_ISREG(_BUNDLED.stat().st_mode)):
        sys.exit("stockade: this package was built without the program; install the wheel for Linux on x86_64")
    os.execv(_BUNDLED, [str(_BUNDLED), *sys.argv[1:]])
