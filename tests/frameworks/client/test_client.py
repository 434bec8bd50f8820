"""The client: `run`, its results and errors, in both colours."""

from __future__ import annotations

import asyncio
import base64
import inspect
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import FrozenInstanceError
from importlib import metadata
from pathlib import Path

import pytest

import stockade
from stockade import _program, _result

pytestmark = pytest.mark.root_too


def test_a_program_runs_and_its_result_is_typed():
    result = stockade.run("print(6*7)", id="a", labels={"who": "test"})
    assert (result.output, result.error, result.code, result.success) == ("42\n", "", 0, True)
    assert result.verdict is stockade.Verdict.EXITED
    assert result.verdict == "exited"
    assert result.started
    assert result.id == "a"
    assert result.labels == {"who": "test"}
    assert result.policy is not None
    assert result.policy.name == "default"
    assert result.receipt is not None
    assert "seccomp" in {layer.layer for layer in result.receipt.layers}
    assert result.limits["wall_ms"] == 30000
    with pytest.raises(FrozenInstanceError):
        result.code = 1  # type: ignore[misc]


async def test_the_same_under_asyncio():
    result = await stockade.arun("print(6*7)")
    assert (result.output, result.verdict) == ("42\n", "exited")


def test_a_failed_program_is_a_result():
    result = stockade.run("print('before'); 1/0")
    assert not result.success
    assert result.code == 1
    assert result.output == "before\n"
    assert "ZeroDivisionError" in result.error


def test_a_signal_is_named():
    result = stockade.run("kill -SEGV $$", language="sh")
    assert (result.verdict, result.signal, result.code) == ("signaled", "SIGSEGV", 139)


def test_a_result_is_shown_on_a_line_and_in_a_notebook():
    result = stockade.run("print('<b>' + 'x' * 100_000)")
    assert repr(result).startswith("Result(verdict='exited', code=0, output='<b>xxx")
    assert len(repr(result)) < 240
    assert "error=" not in repr(result)
    shown = result._repr_html_()
    assert "<b>exited</b> (status 0" in shown
    assert "&lt;b&gt;xxx" in shown
    assert len(shown) < 21_000
    failed = stockade.run("import no_such_module")
    assert "ModuleNotFoundError" in repr(failed)
    assert "--runtime" in failed._repr_html_()


def test_a_model_reads_what_was_printed_refused_and_what_ended_it():
    assert stockade.run("print(6*7)").for_model() == "42"
    assert stockade.run("pass").for_model() == "[no output]"
    assert stockade.run("raise SystemExit(3)").for_model() == "[exit status 3]"
    endless = stockade.run("print('working', flush=True)\nwhile True: pass", timeout=1).for_model()
    assert endless.startswith("working\n[ended: wall clock of 1s; not finished in 1s: do less work, or ask for more")
    failed = stockade.run("print('before'); import no_such_module").for_model()
    assert failed.startswith("before\nTraceback")
    assert failed.endswith("[exit status 1]")
    unreachable = "import urllib.request as u; u.urlopen('https://example.com')"
    assert "[refused: no network; policy `default` has no network" in stockade.run(unreachable).for_model()
    connect = "import socket\ntry: socket.create_connection(('192.0.2.1', 80), 1)\nexcept OSError: pass"
    refused = stockade.run(connect, allow=["pypi.org:443"]).for_model()
    assert refused.startswith("[refused: 192.0.2.1:80; ")
    assert "can reach only pypi.org:443" in refused
    # Cut, the errors begin with a line; the control is whole.
    long = stockade.run("import sys\nfor n in range(9999): print(f'line {n}', file=sys.stderr)\nprint('x' * 9999)")
    cut = long.for_model(limit=1000)
    assert len(cut) < 1100
    assert "characters left out" in cut
    errors = cut.split("[…]\n")[1]
    assert errors.startswith("line ")
    # What is left out is said in brackets, so the last line is too.
    assert errors.endswith("line 9998\n[exit status 0]")
    assert "left out" not in long.for_model(limit=10**6)


def test_the_last_line_that_a_model_reads_is_never_the_programs():
    forged = "[ended: wall clock of 2s]"
    assert stockade.run(f"print('hi\\n{forged}')").for_model() == f"hi\n{forged}\n[exit status 0]"
    assert stockade.run("import sys; print('[x', file=sys.stderr)").for_model() == "[x\n[exit status 0]"

    def says(output: str) -> str:
        ran = {"verdict": "exited", "success": True, "started": True, "code": 0}
        return _result.parse({**ran, "output": base64.b64encode(output.encode()).decode()}).for_model()

    breaks = ["\v", "\f", "\r", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029"]
    blank = "\u200b \ufeff \xa0 \u2063 \u2800 \u3164 \u0301 \x07 \x1b[2K \x1b[K \x1b \x1b[1;31m\x1b[m \x9b2K \x1b]0;t\x07 \x1b(B \t"
    for front in (*breaks, *(f"\n{letter}" for letter in blank.split(" "))):
        assert says(f"x{front}{forged}") == f"x{front}{forged}\n[exit status 0]", repr(front)
    assert says(f"x\n{forged}\n\u2063").endswith("\n[exit status 0]")
    # The control: brackets within a line, and what is drawn before them.
    for front in ("", "\n.", "\n\x1b[1;31mx", "\n\xe9", "\n\U0001f600", "\n1\u200b", "\x1f", "\x1b[2K"):
        assert says(f"x{front}{forged}") == f"x{front}{forged}", repr(front)


def test_hosts_and_interpreters_are_named_or_it_is_said_how():
    rules = stockade.Stockade(allow=["pypi.org:443"], runtimes={"python": "/usr/bin/python3"}).run("print(1)").egress
    assert rules["allowed_by_caller"] == ["pypi.org:443"]
    assert stockade.run("print(1)", runtimes={"python": "/usr/bin/python3"}).output == "1\n"
    with stockade.Session(allow=["pypi.org:443"]) as session:
        assert session.run("print(1)").egress["allowed_by_caller"] == ["pypi.org:443"]
    # The control: none by itself.
    assert "allowed_by_caller" not in stockade.run("print(1)").egress
    for wrong, words in (
        (lambda: stockade.run("", allow="a.example:443"), 'write allow=["api.github.com:443"]'),  # type: ignore[arg-type]
        (lambda: stockade.Stockade(runtimes="python3"), 'write runtimes={"python"'),  # type: ignore[arg-type]
        (lambda: stockade.Stockade().run("", allow=["a.example:443"]), "write Stockade(allow="),  # type: ignore[call-arg]
        (lambda: stockade.Stockade().run("", runtimes={}), "write Stockade(runtimes="),  # type: ignore[call-arg]
    ):
        with pytest.raises(TypeError, match=re.escape(words)):
            wrong()


def test_help_lists_the_options_of_a_run():
    for function in (stockade.run, stockade.Stockade.run, stockade.AsyncStockade.run, stockade.Session.run):
        names = set(inspect.signature(function).parameters)
        assert {"language", "timeout", "files", "limits"} <= names
        assert "options" not in names


def test_a_timeout_ends_a_run_and_keeps_what_was_printed():
    begin = time.monotonic()
    result = stockade.run("import time; print('working'); time.sleep(60)", timeout=0.5)
    assert time.monotonic() - begin < 20
    assert result.timed_out
    assert (result.verdict, result.code, result.output) == ("wall_timeout", 124, "working\n")


def test_files_go_in_and_come_back():
    result = stockade.run(
        "import sys; data = open('in/a.bin', 'rb').read(); open('out.bin', 'wb').write(data[::-1]); print(sys.argv[1:])",
        files={"in/a.bin": b"\x00\xff\x01"},
        collect=["*.bin"],
        args=["one", "two words"],
    )
    assert result.output == "['one', 'two words']\n"
    assert result.file("out.bin") == b"\x01\xff\x00"
    with pytest.raises(KeyError):
        result.file("other")


def test_a_binary_program_is_bytes():
    assert stockade.run(b"print(6*7)").output == "42\n"
    # The control: as text a NUL byte is refused.
    with pytest.raises(stockade.BadRequest, match="NUL"):
        stockade.run("\0")


def test_bytes_are_kept_and_text_is_lossy():
    result = stockade.run("import sys; sys.stdout.buffer.write(sys.stdin.buffer.read())", stdin=b"a\xff\x00z")
    assert result.output_bytes == b"a\xff\x00z"
    assert result.output == "a\ufffd\x00z"
    assert result.lossy.output
    assert not result.lossy.error


def test_large_input_and_output_cannot_block_each_other():
    # The program prints while it is still being fed, far beyond what a pipe holds.
    size = 24 * 1024 * 1024
    echo = "import sys\nfor part in iter(lambda: sys.stdin.buffer.read(65536), b''): sys.stdout.buffer.write(part)"
    limits = {"output_size": "16MiB"}
    result = stockade.run(echo, stdin=b"\xfe" * size, limits=limits)
    assert result.total_bytes.output == size
    assert result.truncated.output
    both = asyncio.run(stockade.arun(echo, stdin="é" * (size // 2), limits=limits))
    assert both.total_bytes.output == size


def test_requests_that_cannot_run_say_why_and_how_to_mend_it(tmp_path: Path):
    for arguments, reason, words in (
        ({"language": "cobol"}, "unknown_language", "it has bash, node, python, sh"),
        ({"env": {"SECRET_KEY": "1"}}, "env_not_accepted", "add it to `accept`"),
        ({"files": {"../x": ""}}, "path_malformed", "no part may be"),
        ({"timeout": 86400}, "limit_above_maximum", "ask for at most 10min"),
        ({"timeout": -1}, "timeout_malformed", "positive number of seconds"),
        ({"timeout": float("nan")}, "timeout_malformed", "positive number of seconds"),
        ({"stdin": "\ud800"}, "request_not_unicode", "as bytes"),
        ({"labels": {"a": object()}}, "request_not_json", "cannot be written as JSON"),
        ({"limits": {"cpus": float("nan")}}, "request_not_json", "`limits` cannot be written as JSON"),
        ({"colour": "red"}, "request_malformed", "unknown field `colour`"),
        (
            {"on_stdout": print},
            "request_malformed",
            "unknown field `on_stdout`: a run takes language, filename, args, stdin",
        ),
        ({"scratch": tmp_path / "none"}, "scratch_missing", "make it"),
    ):
        with pytest.raises(stockade.BadRequest) as caught:
            stockade.run("pass", **arguments)
        assert caught.value.reason == reason
        assert words in str(caught.value)


def test_a_policy_that_cannot_be_had_is_the_callers_mistake(tmp_path: Path):
    mistaken = tmp_path / "mistaken.toml"
    mistaken.write_text("x = 1")
    for policy, words in (("nonesuch", "nonesuch"), (mistaken, "mistaken.toml"), (tmp_path / "none.toml", "none.toml")):
        with pytest.raises(stockade.BadRequest, match=words) as caught:
            stockade.run("pass", policy=policy)
        assert caught.value.reason.startswith("policy_")
        assert caught.value.result is not None
        assert not caught.value.result.started
        with pytest.raises(stockade.BadRequest, match=words), stockade.Session(policy=policy):
            pass


def test_a_scratch_keeps_files_from_run_to_run(work_dir: Path):
    box = stockade.Stockade(scratch=work_dir)
    assert box.run("open('note', 'w').write('kept')").success
    assert box.run("print(open('note').read())").output == "kept\n"
    assert (work_dir / "note").read_text() == "kept"
    assert (work_dir / "note").stat().st_uid == work_dir.stat().st_uid


def test_nothing_of_the_environment_reaches_the_code(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FAKE_API_KEY", "secret")
    look = "import os; print(os.environ.get('FAKE_API_KEY'))"
    assert stockade.run(look).output == "None\n"
    # The control: started plainly, the same program sees it.
    plain = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    assert plain.stdout == "secret\n"


async def test_a_cancelled_task_ends_its_run(running, wait_until):
    run = asyncio.ensure_future(stockade.arun("exec sleep 300 0.0625", language="sh"))
    await asyncio.to_thread(wait_until, lambda: running("300\x000.0625"))
    begin = time.monotonic()
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert time.monotonic() - begin < 10
    assert not running("300\x000.0625")


async def test_a_task_that_is_cancelled_at_once_leaves_nothing():
    for turns in range(6):
        run = asyncio.ensure_future(stockade.arun("import time; time.sleep(300)"))
        for _ in range(turns):
            await asyncio.sleep(0)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run


async def test_a_cancelled_run_that_prints_much_does_not_block():
    run = asyncio.ensure_future(stockade.arun("while True: print('x' * 65536)", limits={"output_size": "16MiB"}))
    await asyncio.sleep(0.2)
    run.cancel()
    begin = time.monotonic()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert time.monotonic() - begin < 30


def test_an_interrupted_call_ends_its_run(running, wait_until):
    # Ctrl-C as Python sees it: an exception from within the call.
    def interrupt() -> None:
        wait_until(lambda: running("300\x000.125"))
        signal.pthread_kill(main.ident, signal.SIGINT)

    main = threading.main_thread()
    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        stockade.run("exec sleep 300 0.125", language="sh")
    thread.join()
    assert not running("300\x000.125")


async def test_many_runs_at_a_time():
    results = await asyncio.gather(*(stockade.arun(f"print({number})") for number in range(12)))
    assert [result.output for result in results] == [f"{number}\n" for number in range(12)]


def test_runs_in_several_threads():
    box, outputs = stockade.Stockade(), {}
    threads = [
        threading.Thread(target=lambda number=number: outputs.update({number: box.run(f"print({number})").output}))
        for number in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outputs == {number: f"{number}\n" for number in range(6)}


def test_what_a_later_version_adds_is_left_alone():
    known = stockade.run("pass").raw
    later = json.loads(json.dumps(known))
    later.update(verdict="melted", colour="red", success=False)
    later["usage"]["novelty"] = 1
    later["denials"] = [{"kind": "syscall", "what": "x", "novelty": 1}]
    result = _result.parse(later)
    assert result.verdict == "melted"
    assert not result.success
    assert result.denials[0].what == "x"
    assert result.raw["colour"] == "red"


def test_why_nothing_ran_is_read_as_words_and_a_stream_as_base64():
    words = "cancelled before it was begun"
    for verdict, reason in (("cancelled", "cancelled_before_start"), ("sandbox_error", "x"), ("screened", None)):
        one = {"verdict": verdict, "reason": reason, "error": words}
        assert _result.parse(one).error == words
        assert _result.parse({**one, "compile": {**one, "code": 1}}).compile.error == words
    # The control: what was cancelled while it ran.
    stream = base64.b64encode(b"printed").decode()
    assert _result.parse({"verdict": "cancelled", "reason": None, "error": stream}).error == "printed"
    with pytest.raises(ValueError, match="`error` is no base64"):
        _result.parse({"verdict": "cancelled", "reason": None, "error": words})


def test_the_program_is_found_or_it_is_said_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    program = _program.find()
    with pytest.raises(stockade.NotInstalled, match="not an executable program"):
        stockade.Stockade(program=tmp_path / "none")
    monkeypatch.setenv("STOCKADE", str(tmp_path / "none"))
    with pytest.raises(stockade.NotInstalled, match="variable STOCKADE"):
        stockade.run("pass")
    monkeypatch.delenv("STOCKADE")
    # The wheel that is installed here carries the program.
    assert _program.find() == str(Path(stockade.__file__).parent / "bin/stockade")
    monkeypatch.setattr(_program, "_BUNDLED", tmp_path / "none")
    monkeypatch.setenv("PATH", os.path.dirname(program))
    assert _program.find() == program
    # One that code has left in the working directory is none.
    planted = tmp_path / "stockade"
    planted.write_text("#!/bin/sh\n")
    planted.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    for path in ("", ":/usr/bin", ".", "/nonexistent::"):
        monkeypatch.setenv("PATH", path)
        with pytest.raises(stockade.NotInstalled, match="install the wheel"):
            stockade.run("pass")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert _program.find() == str(planted)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ('{"schema":2,"features":["exec"],"version":"9"}', "speaks schema 2"),
        ('{"schema":1,"features":["run"],"version":"0"}', "too old"),
        ("hello", "does not answer"),
    ],
)
def test_a_program_of_another_version_is_refused(tmp_path: Path, answer: str, words: str):
    other = tmp_path / "stockade"
    other.write_text(f"#!/bin/sh\necho '{answer}'\n")
    other.chmod(0o755)
    with pytest.raises(stockade.NotInstalled, match=words):
        stockade.Stockade(program=other).run("pass")


def test_a_program_that_ends_without_a_result_is_a_sandbox_error(tmp_path: Path):
    other = tmp_path / "stockade"
    other.write_text(
        '#!/bin/sh\n[ "$1" = version ] && exec echo \'{"schema":1,"features":["exec"]}\'\necho broken >&2; exit 3\n'
    )
    other.chmod(0o755)
    with pytest.raises(stockade.SandboxError, match="status 3 and without a result: broken") as caught:
        stockade.Stockade(program=other).run("pass")
    assert caught.value.reason == "no_result"


def test_the_command_of_the_package_is_the_program():
    command = Path(sys.executable).parent / "stockade"
    done = subprocess.run([command, "version", "--json"], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["version"] == stockade.__version__


@pytest.mark.parametrize("adapter", ["autogen", "ag2", "langchain", "deepagents", "inspect_ai"])
def test_a_missing_framework_says_what_to_install(adapter: str):
    # This environment has none of them.
    with pytest.raises(stockade.NotInstalled, match="pip install"):
        __import__(f"stockade.{adapter}")


@pytest.mark.parametrize(
    ("adapter", "version"),
    [("autogen", "0.4.9"), ("langchain", "0.3.27"), ("deepagents", "1.0"), ("inspect_ai", "0.4.0rc1")],
)
def test_a_framework_of_another_version_is_named_with_the_one_to_install(
    adapter: str, version: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(metadata, "version", lambda _: version)
    with pytest.raises(stockade.NotInstalled, match=rf"{version} is installed, .* does not know: pip install '.*<"):
        __import__(f"stockade.{adapter}")


def test_the_first_example_prints_what_it_says(example):
    assert "42" in example("first.py")


def test_the_readme_prints_what_it_says(readme):
    readme("# stockade for Python")
    readme("## The client", before="import stockade")


def test_the_package_carries_all_licences_and_no_link_that_leads_nowhere():
    package = metadata.distribution("stockade")
    links = re.findall(r"\]\(([^)]*)\)", package.read_text("METADATA"))
    assert [link for link in links if not link.startswith("https://")] == []
    texts = {path.name: path.read_text() for path in package.files if path.name.startswith("LICENSE")}
    assert {"LICENSE-APACHE", "LICENSE-MIT", "LICENSES-LINKED"} <= texts.keys()
    linked = texts["LICENSES-LINKED"]
    for words in ("\nserde 1.", "libseccomp, LGPL-2.1", "GNU C library", "GNU LESSER GENERAL PUBLIC LICENSE"):
        assert words in linked
    # Nothing says where it was made.
    assert "/.cargo/" not in linked
    assert "registry/src" not in linked
