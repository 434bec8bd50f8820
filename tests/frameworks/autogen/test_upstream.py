"""AutoGen's own tests of its command-line executor, unchanged, with sandboxes in its place.

`run` fetches them as their authors published them, at the version in `upstream.txt`, into the
directory that `UPSTREAM` names. `upstream.py` is what puts sandboxes in the executor's place.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

FILES = (
    "tests/code_executors/test_commandline_code_executor.py",
    "tests/code_executors/test_user_defined_functions.py",
    "tests/tools/test_python_code_executor_tool.py",
)
# All that the three hold, so that none is lost on the way.
TESTS = 31

NOT_ON_LINUX = {"test_ps1_script": "for Windows alone; its own mark skips it"}
NO_FUNCTIONS = "takes no `functions`: a module in its working directory does the same"
NO_TEMPORARY = "without a working directory the files are private to a session, not in a directory of the host"
IS_ENVIRONMENT = (
    "its working directory is the virtual environment itself, which code may not write: the host starts what is there"
)
ENVIRONMENT_IS_SCRATCH = dict.fromkeys(
    ("test_local_executor_with_custom_venv", "test_local_executor_with_custom_uv_venv"), IS_ENVIRONMENT
)
NOT_APPLICABLE = {
    "shims": {**NOT_ON_LINUX, **ENVIRONMENT_IS_SCRATCH},
    "adapter": {
        **NOT_ON_LINUX,
        **ENVIRONMENT_IS_SCRATCH,
        "test_local_commandline_code_executor_restart": "wants a warning that restart() does nothing; it restarts the session",
        "test_cleanup_temp_files_oserror": "leaves no file on the host that it would have to remove",
        "test_deprecated_warning": "wants a warning of `work_dir='.'`, which it takes like any other",
        "test_default_work_dir_is_temp": NO_TEMPORARY,
        "test_create_temp_dir": NO_TEMPORARY,
        "test_invalid_timeout": "allows fractions of a second, and refuses 0 in other words",
        "test_python_identifier": NO_FUNCTIONS,
        "test_can_load_function_with_reqs": NO_FUNCTIONS,
        "test_local_formatted_prompt": NO_FUNCTIONS,
        "test_local_formatted_prompt_str_func": NO_FUNCTIONS,
        "test_can_load_function": NO_FUNCTIONS,
        "test_fails_for_function_incorrect_import": NO_FUNCTIONS,
        "test_fails_for_function_incorrect_dep": NO_FUNCTIONS,
        "test_can_load_str_function_with_reqs": NO_FUNCTIONS,
        "test_cant_run_broken_str_function_with_reqs": NO_FUNCTIONS,
    },
}

# A test of our own among theirs, or these could pass without a sandbox.
INSIDE = """
import tempfile

from autogen_core import CancellationToken
from autogen_core.code_executor import CodeBlock
from autogen_ext.code_executors.local import LocalCommandLineCodeExecutor


async def test_inside():
    blocks = [CodeBlock("import getpass; print(getpass.getuser())", "python"), CodeBlock("id -un", "sh")]
    with tempfile.TemporaryDirectory() as directory:
        executor = LocalCommandLineCodeExecutor(work_dir=directory)
        result = await executor.execute_code_blocks(blocks, CancellationToken())
    assert result.output == "sandbox\\nsandbox\\n"
"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """For each way what became of each test: nothing, or how it was skipped or failed. Both run at once."""
    upstream = Path(os.environ["UPSTREAM"])
    running = {}
    for way in NOT_APPLICABLE:
        # Some tests work in the current directory; what they make in that of the system has no place in it.
        place = tmp_path_factory.mktemp(way)
        (place / "current").mkdir()
        (place / "tmp").mkdir()
        inside = place / "test_inside.py"
        inside.write_text(INSIDE)
        report = place / "report.xml"
        line = [sys.executable, "-m", "pytest", "-c", upstream / "pyproject.toml", "-p", "no:cacheprovider"]
        line += ["-p", "upstream", "-o", "asyncio_mode=auto", "-q", f"--junitxml={report}", inside]
        own = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",  # for uv
            "PYTHONPATH": str(Path(__file__).parent),
            "TMPDIR": str(place / "tmp"),
            "WAY": way,
            # What they want to install must be there, or is made up.
            "PIP_NO_INDEX": "1",
            "UV_PYTHON_DOWNLOADS": "never",
        }
        process = subprocess.Popen(
            [*line, *(upstream / name for name in FILES)],
            cwd=place / "current",
            env={**os.environ, **own},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        running[way] = process, report
    found = {}
    for way, (process, report) in running.items():
        output, _ = process.communicate(timeout=600)
        assert report.exists(), output
        found[way] = {
            case.attrib["name"].partition("[")[0]: "\n".join(f"{child.tag}: {child.text}" for child in case)
            for case in ElementTree.parse(report).iter("testcase")
        }
    return found


@pytest.mark.root_too
@pytest.mark.parametrize("way", NOT_APPLICABLE)
def test_autogens_own_tests_pass(outcomes: dict[str, dict[str, str]], way: str, capsys: pytest.CaptureFixture[str]):
    outcome, not_applicable = outcomes[way], NOT_APPLICABLE[way]
    assert outcome.pop("test_inside") == ""
    assert len(outcome) == TESTS
    passed = {name for name, what in outcome.items() if not what}
    failed = [f"{name}\n{what}" for name, what in outcome.items() if name not in passed | not_applicable.keys()]
    assert not failed, "\n\n".join(failed)
    # What passes after all stands on the list no longer.
    assert not_applicable.keys() == outcome.keys() - passed
    with capsys.disabled():
        print(f"\nAutoGen's own tests, {way}: {len(passed)} pass, {len(not_applicable)} do not apply")
        for name, why in not_applicable.items():
            print(f"    {name}: {why}")
