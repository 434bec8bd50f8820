"""Puts the program and its companions into the wheel.

`STOCKADE_PROGRAMS` names the directory where they lie. Without it the wheel is of Python
alone, for hosts that have the program already.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class BuildHook(BuildHookInterface):
    """Called by hatchling."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Adds the programs, and says for which machines the wheel then is."""
        directory = os.environ.get("STOCKADE_PROGRAMS")
        if not directory:
            return
        programs = [
            one for one in Path(directory).iterdir() if one.name == "stockade" or one.name.startswith("stockade-")
        ]
        if "stockade" not in {program.name for program in programs}:
            raise FileNotFoundError(f"STOCKADE_PROGRAMS: there is no program `stockade` in {directory}")
        for program in programs:
            build_data["force_include"][str(program.resolve())] = f"stockade/bin/{program.name}"
        build_data["pure_python"] = False
        # The programs are static: any libc will do.
        build_data["tag"] = "py3-none-manylinux_2_17_x86_64.musllinux_1_1_x86_64"
