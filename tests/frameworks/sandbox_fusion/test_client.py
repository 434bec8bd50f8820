"""SandboxFusion's own client, moved here by its URL alone."""

from __future__ import annotations

import base64
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests
from sandbox_fusion import (
    CommandRunStatus,
    RunCodeRequest,
    RunJupyterRequest,
    RunStatus,
    SummaryMapping,
    run_code,
    run_code_async,
    run_concurrent,
    run_jupyter,
    summary_run_code_result,
)
from serving import Service

SUMMARY = SummaryMapping(RunFailed="RunFailed", RunTimeout="RunTimeout")


def ask(service: Service, code: str, language: str = "python", **fields):
    request = RunCodeRequest(code=code, language=language, **fields)
    return run_code(request, endpoint=service.url_with_key, max_attempts=1)


def test_a_program_that_succeeds_fails_or_takes_too_long(service: Service):
    good = ask(service, "print(input())", stdin="in")
    assert (good.status, good.message, good.compile_result, good.files) == (RunStatus.Success, "", None, {})
    ran = good.run_result
    assert (ran.status, ran.return_code, ran.stdout, ran.stderr) == (CommandRunStatus.Finished, 0, "in\n", "")
    assert 0 <= ran.execution_time < 10 and good.executor_pod_name is None
    bad = ask(service, "import sys; sys.exit(3)")
    assert (bad.status, bad.run_result.status, bad.run_result.return_code) == ("Failed", "Finished", 3)
    late = ask(service, "print(1, flush=True)\nwhile True: pass", run_timeout=0.5)
    assert (late.status, late.run_result.status, late.run_result.return_code) == ("Failed", "TimeLimitExceeded", None)
    assert late.run_result.stdout == "1\n"
    assert [summary_run_code_result(one, SUMMARY) for one in (good, bad, late)] == [
        "Success",
        "RunFailed",
        "RunTimeout",
    ]


def test_stdin_that_is_null_is_empty(service: Service):
    assert ask(service, "import sys; print(repr(sys.stdin.read()))").run_result.stdout == "''\n"


def test_each_language_by_its_name(service: Service):
    assert ask(service, "echo $((6 * 7))", "bash").run_result.stdout == "42\n"
    passed = ask(service, "def test_it(): assert 6 * 7 == 42\n", "pytest")
    assert passed.status == RunStatus.Success, passed
    failed = ask(service, "def test_it(): assert 6 * 7 == 41\n", "pytest")
    assert (failed.status, failed.run_result.return_code) == ("Failed", 1) and "1 failed" in failed.run_result.stdout
    with pytest.raises(Exception, match=r"Sandbox responded with error: language `verilog`.*\[runtimes.NAME\]"):
        ask(service, "", "verilog")


def test_a_language_that_is_compiled(service: Service):
    good = ask(service, "#include <cstdio>\nint main() { return putchar(getchar()) != 'x'; }", "cpp", stdin="x")
    made, ran = good.compile_result, good.run_result
    assert (good.status, made.status, made.return_code, made.stderr) == ("Success", "Finished", 0, "")
    assert (ran.status, ran.return_code, ran.stdout) == ("Finished", 0, "x") and made.execution_time > 0
    bad = ask(service, "int main() { return nowhere; }", "cpp")
    assert (bad.status, bad.compile_result.status, bad.run_result) == ("Failed", "Finished", None)
    assert bad.compile_result.return_code == 1 and "nowhere" in bad.compile_result.stderr
    # The preprocessor reads for as long as it may.
    late = ask(service, '#include "/dev/urandom"\nint main() {}', "cpp", compile_timeout=0.3)
    assert (late.status, late.compile_result.status, late.run_result) == ("Failed", "TimeLimitExceeded", None)
    summaries = SummaryMapping(CompileFailed="CompileFailed", CompileTimeout="CompileTimeout")
    assert [summary_run_code_result(one, summaries) for one in (good, bad, late)] == [
        "Success",
        "CompileFailed",
        "CompileTimeout",
    ]


def test_arguments_select_tests(service: Service):
    code = "def test_good(): pass\ndef test_bad(): assert False\n"
    body = {"code": code, "language": "pytest", "args": ["-k", "good"]}
    answer = requests.post(f"{service.url_with_key}/run_code", json=body, timeout=60).json()
    assert answer["status"] == "Success" and "1 passed, 1 deselected" in answer["run_result"]["stdout"]


def test_files_go_in_and_come_out(service: Service):
    code = "import os\nopen('out[1].bin', 'wb').write(open('in/a', 'rb').read()[::-1])\nprint(os.path.exists('none'))"
    content = bytes(range(256))
    files = {"in/a": base64.b64encode(content).decode(), "none": None}
    answer = ask(service, code, files=files, fetch_files=["out[1].bin", "missing"])
    assert answer.run_result.stdout == "False\n"
    assert {path: base64.b64decode(text) for path, text in answer.files.items()} == {"out[1].bin": content[::-1]}


def test_many_at_once(service: Service):
    answers = run_concurrent(ask, args=[[service, f"print({number})"] for number in range(40)], concurrency=40)
    assert [answer.run_result.stdout for answer in answers] == [f"{number}\n" for number in range(40)]


async def test_the_client_that_does_not_block(service: Service):
    request = RunCodeRequest(code="print(6*7)", language="python")
    answer = await run_code_async(request, endpoint=service.url_with_key, max_attempts=1)
    assert answer.run_result.stdout == "42\n"


def test_what_is_not_to_be_run_is_an_error_of_the_client(service: Service):
    with pytest.raises(Exception, match=r"responded with code 401: .*key_missing"):
        run_code(RunCodeRequest(code="1", language="python"), endpoint=service.url, max_attempts=1)
    with pytest.raises(Exception, match=r"responded with code 404: .*no_kernels"):
        run_jupyter(RunJupyterRequest(cells=["1"]), endpoint=service.url_with_key, max_attempts=1)
    wrong = requests.post(f"{service.url_with_key}/run_code", json={"code": 1, "language": "python"}, timeout=60)
    assert (wrong.status_code, wrong.json()["detail"][0]["loc"]) == (422, ["body", "code"])
    ping = requests.get(f"{service.url}/v1/ping", timeout=60)
    assert (ping.status_code, ping.json()) == (200, "pong")


def test_a_client_that_waits_is_sent_blanks(service: Service):
    def take(_: int) -> tuple[list[float], str]:
        body = {"code": "import time; time.sleep(1.5)", "language": "python"}
        with requests.post(f"{service.url_with_key}/run_code", json=body, stream=True, timeout=1.8) as answer:
            # Each byte begins the client's time anew; a service that said nothing would have lost it.
            parts = list(answer.iter_content(None))
            assert answer.status_code == 200
        return [part for part in parts if part.isspace()], b"".join(parts)

    with ThreadPoolExecutor(8) as pool:
        taken = list(pool.map(take, range(8)))
    assert all(b'"Success"' in text for _, text in taken)
    assert any(len(blanks) > 2 for blanks, _ in taken)
