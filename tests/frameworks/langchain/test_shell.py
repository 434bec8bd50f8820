"""LangChain: the shell of `ShellToolMiddleware` in a sandbox, with a real agent around it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import HostExecutionPolicy, ShellToolMiddleware
from langchain.agents.middleware.shell_tool import ShellSession
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatResult

from stockade import BadRequest, SandboxError
from stockade.langchain import StockadeExecutionPolicy


class ScriptedModel(BaseChatModel):
    """Calls the shell until the script has its answer."""

    agent: Any

    @property
    def _llm_type(self) -> str:
        return "scripted"

    def bind_tools(self, tools: Any, **options: Any) -> ScriptedModel:
        return self

    def _generate(self, messages: list[BaseMessage], *further: Any, **options: Any) -> ChatResult:
        seen = str(messages[-1].content) if isinstance(messages[-1], ToolMessage) else ""
        program = self.agent.program(seen)
        if program is None:
            message = AIMessage(self.agent.answer(seen))
        else:
            command = f"python3 - <<'END'\n{program}\nEND"
            call = {"name": "shell", "args": {"command": command}, "id": str(len(messages)), "type": "tool_call"}
            message = AIMessage("", tool_calls=[call])
        return ChatResult(generations=[ChatGeneration(message=message)])


@pytest.fixture
def shell(work_dir: Path):
    """A session as the middleware makes it."""
    opened = []

    def open_session(policy=None, env=None) -> ShellSession:
        session = ShellSession(work_dir, policy or StockadeExecutionPolicy(), ("/bin/bash",), env or {})
        session.start()
        opened.append(session)
        return session

    yield open_session
    for session in opened:
        session.stop(10)
        # The framework leaves its pipes to the garbage collector.


@pytest.mark.root_too
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_agent_sees_what_its_code_did_and_corrects_itself(work_dir: Path, agent):
    middleware = ShellToolMiddleware(workspace_root=work_dir, execution_policy=StockadeExecutionPolicy())
    graph = create_agent(ScriptedModel(agent=agent), middleware=[middleware])
    outcome = graph.invoke({"messages": [("user", "Measure, and tell me the number.")]})
    said = [str(message.content) for message in outcome["messages"]]
    assert any("FileNotFoundError" in text for text in said), said
    assert agent.is_right(said[-1], work_dir), said


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
class TestShell:
    def test_it_persists_from_command_to_command(self, shell, work_dir: Path):
        session = shell()
        session.execute("mkdir sub; cd sub; answer=42", timeout=30)
        result = session.execute("echo $answer; pwd; id -un; echo oops >&2; (exit 3)", timeout=30)
        assert f"42\n{work_dir}/sub\nsandbox\n" in result.output
        assert "[stderr] oops" in result.output
        assert result.exit_code == 3

    def test_a_timeout_ends_the_shell_and_all_that_it_started(self, shell, running):
        session = shell()
        begin = time.monotonic()
        result = session.execute("sleep 300 1.5 & sleep 300 2.5", timeout=1)
        assert result.timed_out
        assert time.monotonic() - begin < 30
        assert session.execute("echo again", timeout=30).output == "again\n"
        assert not running("300\x001.5")
        assert not running("300\x002.5")

    def test_an_end_leaves_nothing_running(self, shell, running, wait_until):
        session = shell()
        session.execute("setsid sleep 300 3.5 >/dev/null 2>&1 &", timeout=30)
        wait_until(lambda: running("300\x003.5"))
        session.stop(10)
        assert not running("300\x003.5")

    def test_it_sees_what_env_says_and_nothing_of_the_callers(self, shell, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setenv("FAKE_API_KEY", "secret")
        result = shell(env={"GREETING": "good day; $HOME"}).execute(
            'echo "$GREETING" ${FAKE_API_KEY:-none}', timeout=30
        )
        assert result.output == "good day; $HOME none\n"

    def test_the_hosts_files_are_not_there(self, shell, tmp_path: Path):
        secret = tmp_path / "secret"
        secret.write_text("for nobody\n")
        look = f"cat {secret}"
        assert shell(HostExecutionPolicy()).execute(look, timeout=30).output == "for nobody\n"  # the control
        assert "No such file" in shell().execute(look, timeout=30).output

    def test_output_need_not_be_utf8(self, shell):
        assert shell().execute("printf 'a\\377b\\n'", timeout=30).output == "a\ufffdb\n"


@pytest.mark.root_too
@pytest.mark.parametrize(
    ("policy", "error", "words"),
    [
        ({"policy": "nonesuch"}, BadRequest, "no policy `nonesuch`"),
        ({"runtimes": {"python": "/nonexistent"}}, BadRequest, "/nonexistent"),
    ],
)
def test_a_refusal_is_an_error_and_no_timeout(work_dir: Path, agent, policy: dict, error: type, words: str):
    middleware = ShellToolMiddleware(workspace_root=work_dir, execution_policy=StockadeExecutionPolicy(**policy))
    graph = create_agent(ScriptedModel(agent=agent), middleware=[middleware])
    begin = time.monotonic()
    with pytest.raises(error, match=words):
        graph.invoke({"messages": [("user", "Measure, and tell me the number.")]})
    assert time.monotonic() - begin < 20


@pytest.mark.root_too
def test_a_directory_that_may_be_no_scratch_is_an_error_that_says_why(tmp_path: Path):
    # The middleware makes one of its own where none is named, as root with root's rights.
    (tmp_path / "file").write_text("")
    policy = StockadeExecutionPolicy()
    with pytest.raises(BadRequest) as caught:
        policy.spawn(workspace=tmp_path / "file", env={"A": "b"}, command=("/bin/bash",))
    assert caught.value.reason.startswith("scratch_")


def test_a_shell_that_is_not_there_is_an_error(work_dir: Path):
    with pytest.raises(SandboxError, match="nonexistent") as caught:
        StockadeExecutionPolicy().spawn(workspace=work_dir, env={}, command=("/nonexistent",))
    assert caught.value.reason == "shell_not_started"


def test_the_example_runs(example):
    assert "42" in example("langchain_shell.py")


def test_the_readme_runs(readme):
    readme("### LangChain")
