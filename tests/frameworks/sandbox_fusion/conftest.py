"""The service that the clients of SandboxFusion are moved to."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from serving import Service, serving

FACADE = '[capacity]\ncpus = 2\n[facade.sandbox_fusion]\nenabled = true\npolicy = "{policy}"\nheartbeat = "1s"\n'


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    policy = tmp_path / "fusion.toml"
    policy.write_text(with_pytest(sys.prefix))
    with serving(tmp_path, FACADE.format(policy=policy), str(policy)) as service:
        yield service


def with_pytest(environment: str) -> str:
    """The default policy with a runtime that tests programs, from this environment, and one that compiles."""
    return f"""
schema = 1
description = "The default policy with pytest and C++"
extends = "default"
[filesystem]
# pytest and what it imports.
read_only = {{ add = ["{Path(environment)}"] }}
[runtimes.pytest]
# The tests' own environment.
command = ["{environment}/bin/python", "-m", "pytest", "-p", "no:cacheprovider", "{{file}}"]
# What pytest reads as a module.
extension = "py"
[runtimes.cpp]
# A compiler of the host, and what it makes.
compile = ["/usr/bin/g++", "-O1", "-o", "{{output}}", "{{file}}"]
command = ["{{output}}"]
# By convention.
extension = "cpp"
"""
