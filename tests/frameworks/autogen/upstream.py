"""A plugin of pytest for AutoGen's own tests: what they import as the local executor runs code in sandboxes.

`WAY` says how: `shims` leaves the framework's class and gives it shims for interpreters, as
a virtual environment is given to it; `adapter` puts `StockadeCodeExecutor` in its place. The
tests themselves are not changed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from types import SimpleNamespace

from autogen_ext.code_executors import local

from stockade.autogen import StockadeCodeExecutor


def interpreter_of(environment: SimpleNamespace | None) -> str:
    """The one that the framework would start."""
    return os.path.abspath(environment.env_exe) if environment else sys.executable


class WithShims(local.LocalCommandLineCodeExecutor):
    """The framework's executor, for which every interpreter is a shim."""

    def __init__(self, *arguments, virtual_env_context: SimpleNamespace | None = None, **options) -> None:
        shims = tempfile.mkdtemp(prefix="shims-")
        interpreter = f"python={interpreter_of(virtual_env_context)}"
        line = [os.environ["STOCKADE"], "shim", "install", "--runtime", interpreter, shims]
        subprocess.run(line, check=True, capture_output=True, timeout=120)
        context = SimpleNamespace(env_exe=f"{shims}/python", bin_path=shims)
        super().__init__(*arguments, virtual_env_context=context, **options)


class Adapter(StockadeCodeExecutor):
    """The adapter, by the framework's name for the interpreter."""

    component_provider_override = "upstream.Adapter"

    def __init__(self, *arguments, virtual_env_context: SimpleNamespace | None = None, **options) -> None:
        if not options.get("functions"):
            # None at all, which is all that it can take.
            options.pop("functions", None)
        # One that was written down has its own.
        options.setdefault("runtimes", {"python": interpreter_of(virtual_env_context)})
        super().__init__(*arguments, **options)


local.LocalCommandLineCodeExecutor = {"shims": WithShims, "adapter": Adapter}[os.environ["WAY"]]
