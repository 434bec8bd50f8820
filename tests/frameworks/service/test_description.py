"""The service's description of itself, held against the service by requests that a generator makes of it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest
from serving import Service, serving

FACADES = "[facade.sandbox_fusion]\nenabled = true\n[facade.execute]\nenabled = true\n"
# What a worker refuses is a result, as of `exec`, and numbers may be written as text to the facades; a
# good request may come too late or twice; a run that is answered has ended, and is not found any more.
ACCEPTED = "negative_data_rejection,positive_data_acceptance,ensure_resource_availability"
# The generator writes no lines of JSON.
NOT_ASKED = "/v1/batch"


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    with serving(tmp_path, FACADES) as service:
        yield service


def generate(service: Service, description: str, *options: str) -> tuple[int, str]:
    """The exit status of the generator, and what it says."""
    done = subprocess.run(
        [
            f"{sys.prefix}/bin/schemathesis",
            "run",
            description,
            f"--url={service.url}",
            f"--header=Authorization: Bearer {service.token}",
            f"--exclude-checks={ACCEPTED}",
            f"--exclude-path={NOT_ASKED}",
            "--no-color",
            "--warnings=off",
            *options,
        ],
        cwd=service.place,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_every_answer_is_one_that_is_described(service: Service):
    status, said = generate(service, f"{service.url}/openapi.json", "--max-examples=30")
    assert status == 0, said
    with urlopen(f"{service.url}/openapi.json", timeout=60) as answer:
        methods = [method for path in json.load(answer)["paths"].values() for method in path]
    # It has read the description itself.
    assert f"Operations:       {len(methods) - 2} selected / {len(methods) - 1} total" in said


def test_a_wrong_description_is_found(service: Service):
    with urlopen(f"{service.url}/openapi.json", timeout=60) as answer:
        wrong = json.load(answer)
    del wrong["components"]["schemas"]["Problem"]["properties"]["reason"]["enum"][:]
    wrong["components"]["schemas"]["Problem"]["properties"]["reason"]["const"] = "something_else"
    place = service.place / "wrong.json"
    place.write_text(json.dumps(wrong))
    status, said = generate(service, str(place), "--max-examples=5", "--include-path=/v1/runs/{run}")
    assert status == 1 and "something_else" in said, said
