"""verl's reward function, as it was published, moved here by its URL alone."""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest
from serving import Service

# Of each program with its input: what is expected, and verl's result.
CASES = [
    ("1", "2", True),
    ("5", "9", False),
    ("raise", "0", -2),
    ("exit", "0", -2),
    ("sleep", "0", -3),
    ("flood", "0", -2),
    ("7", "8", True),
    ("9", "10", True),
]
PROGRAM = """
import sys, time
text = input()
if text == "raise": raise ValueError(text)
if text == "exit": sys.exit(7)
if text == "sleep": time.sleep(60)
if text == "flood": x = bytearray(3 << 30)
time.sleep(0.1)
print(int(text) + 1)
"""


@pytest.fixture(scope="module")
def reward() -> ModuleType:
    """The package that has the function, without the rest of verl, which it does not need."""
    place = Path(os.environ["UPSTREAM"]) / "verl" / "utils" / "reward_score" / "sandbox_fusion"
    spec = importlib.util.spec_from_file_location(
        "verls_reward", place / "__init__.py", submodule_search_locations=[str(place)]
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules["verls_reward"] = module
    spec.loader.exec_module(module)
    return module


def test_more_than_a_hundred_at_once_have_their_right_rewards(service: Service, reward: ModuleType):
    rounds, at_once = 4, threading.Semaphore(128)
    inputs = [given for given, _, _ in CASES] * rounds
    outputs = [wanted for _, wanted, _ in CASES] * rounds
    expected = [result for _, _, result in CASES] * rounds

    def check(_: int) -> list:
        cases = {"inputs": inputs, "outputs": outputs}
        results, _metadata = reward.check_correctness(
            f"{service.url_with_key}/run_code",
            cases,
            PROGRAM,
            timeout=3,
            memory_limit_mb=1024,
            concurrent_semaphore=at_once,
        )
        return results

    # Each has 32 threads of its own.
    with ThreadPoolExecutor(4) as pool:
        all_results = list(pool.map(check, range(4)))
    assert all_results == [expected] * 4


def test_code_that_does_not_compile_has_its_own_reward(service: Service, reward: ModuleType):
    def check(code: str) -> list:
        cases = {"inputs": ["1", "2"], "outputs": ["2", "0"]}
        return reward.check_correctness(f"{service.url_with_key}/run_code", cases, code, timeout=10, language="cpp")[0]

    good = '#include <cstdio>\nint main() { int x; return scanf("%d", &x) - 1 + printf("%d\\n", x + 1) - 2; }'
    assert check(good) == [True, False]
    assert check("int main() { return nowhere; }") == [-4, -4]


def test_a_completion_has_its_score(service: Service, reward: ModuleType):
    cases = {"inputs": ["1", "2", "3", "4"], "outputs": ["2", "3", "4", "0"]}
    url = f"{service.url_with_key}/run_code"
    completion = "So:\n```python\nprint(int(input()) + 1)\n```\n"
    score, _ = reward.compute_score(url, None, 512, completion, cases)
    assert score == 0.75
    functions = {"inputs": ["1\n2"], "outputs": ["3"], "fn_name": "add"}
    score, metadata = reward.compute_score(url, None, 512, "```python\ndef add(a, b): return a + b\n```", functions)
    assert score == 1.0, metadata
    # The control: a wrong key is no reward.
    wrong = reward.check_correctness(url.replace("sd_", "sd_x"), {"inputs": ["1"], "outputs": ["2"]}, PROGRAM)
    assert wrong[0] == [-1]
