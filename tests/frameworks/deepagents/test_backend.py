"""deepagents: the backend, by itself and under the framework's own agent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from deepagents import create_deep_agent
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatResult

from stockade.deepagents import StockadeSandbox


class ScriptedModel(BaseChatModel):
    """Writes a program with the file tool, runs it, and looks at what it printed."""

    agent: Any
    work_dir: str

    @property
    def _llm_type(self) -> str:
        return "scripted"

    def bind_tools(self, tools: Any, **options: Any) -> ScriptedModel:
        return self

    def _generate(self, messages: list[BaseMessage], *further: Any, **options: Any) -> ChatResult:
        last = messages[-1]
        seen = str(last.content) if isinstance(last, ToolMessage) else ""
        file = f"{self.work_dir}/program{len(messages)}.py"
        if isinstance(last, ToolMessage) and last.name == "write_file":
            written = f"{self.work_dir}/program{len(messages) - 2}.py"
            message = self.call("execute", command=f"python3 {written}")
        elif (program := self.agent.program(seen)) is not None:
            message = self.call("write_file", file_path=file, content=program)
        else:
            message = AIMessage(self.agent.answer(seen))
        return ChatResult(generations=[ChatGeneration(message=message)])

    def call(self, name: str, **arguments: str) -> AIMessage:
        return AIMessage("", tool_calls=[{"name": name, "args": arguments, "id": name, "type": "tool_call"}])


@pytest.fixture
def sandbox():
    with StockadeSandbox() as sandbox:
        yield sandbox


@pytest.mark.root_too
def test_an_agent_sees_what_its_code_did_and_corrects_itself(work_dir: Path, agent):
    with StockadeSandbox(scratch=work_dir) as sandbox:
        model = ScriptedModel(agent=agent, work_dir=sandbox.work_dir)
        outcome = create_deep_agent(model, backend=sandbox).invoke({"messages": [("user", "Measure.")]})
    said = [str(message.content) for message in outcome["messages"]]
    assert any("FileNotFoundError" in text for text in said), said
    assert agent.is_right(said[-1], work_dir), said


def test_a_command_prints_as_on_a_terminal(sandbox):
    result = sandbox.execute("echo one; echo two >&2; echo three; exit 3")
    assert (result.output, result.exit_code, result.truncated) == ("one\ntwo\nthree\n", 3, False)


def test_files_persist_and_processes_do_not(sandbox, running):
    assert sandbox.execute("echo 1 > n; setsid sleep 300 11.5 & true").exit_code == 0
    assert sandbox.execute("cat n").output == "1\n"
    assert not running("300\x0011.5")


def test_a_timeout_is_told_to_the_model(sandbox):
    result = sandbox.execute("echo begun; sleep 60", timeout=1)
    assert result.exit_code == 124
    assert result.output == "begun\n\nCommand timed out after 1 seconds"
    assert sandbox.execute("echo unlimited", timeout=0).output == "unlimited\n"


def test_much_output_is_said_to_be_cut(sandbox):
    result = sandbox.execute("head -c 20000000 /dev/zero | tr '\\0' x")
    assert result.truncated
    assert len(result.output) < 20_000_000


def test_files_go_up_and_come_down_each_by_itself(sandbox):
    here = sandbox.work_dir
    uploads = sandbox.upload_files(
        [(f"{here}/a/b.bin", b"\x00\xff"), ("relative", b""), ("/etc/x", b""), ("/tmp/t", b"t")]
    )
    assert [one.error for one in uploads] == [None, "invalid_path", "permission_denied", None]
    downloads = sandbox.download_files([f"{here}/a/b.bin", f"{here}/a", f"{here}/none", "relative", "/tmp/t"])
    assert [(one.content, one.error) for one in downloads] == [
        (b"\x00\xff", None),
        (None, "is_directory"),
        (None, "file_not_found"),
        (None, "invalid_path"),
        (b"t", None),
    ]


def test_what_the_framework_derives_from_it_works(sandbox):
    file = f"{sandbox.work_dir}/notes/plan.txt"
    assert sandbox.write(file, "alpha\nbeta\n").error is None
    assert "beta" in str(sandbox.read(file))
    assert sandbox.edit(file, "beta", "gamma").error is None
    assert sandbox.download_files([file])[0].content == b"alpha\ngamma\n"
    assert [entry["path"] for entry in sandbox.ls(f"{sandbox.work_dir}/notes").entries] == [file]
    assert [match["path"] for match in sandbox.grep("gamma", sandbox.work_dir).matches] == [file]
    assert "plan.txt" in str(sandbox.glob("**/*.txt", sandbox.work_dir).matches)


async def test_it_works_from_asyncio(sandbox):
    assert (await sandbox.aexecute("echo async")).output == "async\n"


def test_the_example_runs(example):
    assert "42" in example("deepagents_backend.py")


def test_the_readme_runs(readme):
    model = "from langchain_core.language_models.fake_chat_models import GenericFakeChatModel as Model"
    readme("### deepagents 0.7", before=f"{model}\nmodel = Model(messages=iter([]))")
