"""inspect_ai: evaluations of real tasks in the sandbox, with a model that is a script."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import ModelOutput, ModelUsage, get_model
from inspect_ai.scorer import Score, Target, accuracy, scorer
from inspect_ai.solver import TaskState, generate, use_tools
from inspect_ai.tool import python
from inspect_ai.util import OutputLimitExceededError, SandboxUnavailableError, SandboxUserUnsupportedError, sandbox

from stockade.inspect_ai import StockadeSandboxConfig, StockadeSandboxEnvironment


@scorer(metrics=[accuracy()])
def tells_the_number():
    """Right, if the answer has the number that stands in the sandbox's file."""

    async def score(state: TaskState, target: Target) -> Score:
        number = await sandbox().read_file("measurements.txt")
        return Score(value="C" if number in state.output.completion else "I", explanation=number)

    return score


@pytest.mark.root_too
# The framework leaves its own streams unclosed.
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_agent_sees_what_its_code_did_and_corrects_itself(agent, tmp_path: Path):
    seen_failures = []

    def model(messages, tools, choice, config) -> ModelOutput:
        seen = messages[-1].text if messages[-1].role == "tool" else ""
        seen_failures.append("FileNotFoundError" in seen)
        program = agent.program(seen)
        if program is None:
            output = ModelOutput.from_content("mockllm", agent.answer(seen))
        else:
            output = ModelOutput.for_tool_call("mockllm", "python", {"code": program})
        # Or it would count tokens, with a table that it fetches from the network.
        output.usage = ModelUsage()
        return output

    task = Task(
        dataset=[Sample(input="Measure, and tell me the number.")],
        solver=[use_tools(python(timeout=60)), generate()],
        scorer=tells_the_number(),
        # By its name alone: found through the entry point of the installed package.
        sandbox="stockade",
        message_limit=20,
    )
    (log,) = eval(
        task,
        model=get_model("mockllm/model", custom_outputs=model),
        log_dir=str(tmp_path / "logs"),
        display="none",
    )
    assert log.status == "success", log.error
    assert any(seen_failures)
    assert log.results.scores[0].metrics["accuracy"].value == 1.0


@pytest.fixture
async def environment():
    environments = await StockadeSandboxEnvironment.sample_init("t", "shell", {})
    yield environments["default"]
    await StockadeSandboxEnvironment.sample_cleanup("t", None, environments, False)


async def test_places_beyond_the_sessions_own_are_read_with_the_codes_rights(environment):
    assert "sandbox" in await environment.read_file("/etc/passwd")
    await environment.exec(["ln", "-s", "/etc/passwd", "link"])
    assert "sandbox" in await environment.read_file("link")
    with pytest.raises(PermissionError):
        await environment.write_file("/usr/bin/x", "x")
    with pytest.raises(IsADirectoryError):
        await environment.write_file("/usr", "x")
    with pytest.raises(FileNotFoundError):
        await environment.read_file("/usr/none")


async def test_a_command_that_is_not_there_is_127_and_no_error(environment):
    assert (await environment.exec(["nonesuch"])).returncode == 127
    assert (await environment.exec(["nonesuch"], env={"A": "b"})).returncode == 127


async def test_output_beyond_the_limit_is_an_error(environment):
    with pytest.raises(OutputLimitExceededError):
        await environment.exec(["sh", "-c", "head -c 12000000 /dev/zero | tr '\\0' x"])


async def test_it_runs_as_nobody_else(environment):
    assert (await environment.exec(["id", "-un"], user="sandbox")).stdout == "sandbox\n"
    with pytest.raises(SandboxUserUnsupportedError):
        await environment.exec(["id"], user="root")


async def test_calls_of_one_sample_take_turns(environment):
    results = await asyncio.gather(*(environment.exec(["echo", str(number)]) for number in range(5)))
    assert [result.stdout for result in results] == [f"{number}\n" for number in range(5)]


async def test_a_session_that_died_is_an_unavailable_sandbox(environment):
    environment._session._process.kill()
    with pytest.raises(SandboxUnavailableError, match="signal 9"):
        await environment.exec(["true"])


async def test_a_task_may_name_a_policy_and_a_wrong_one_is_said():
    config = StockadeSandboxEnvironment.config_deserialize({"policy": "default"})
    assert isinstance(config, StockadeSandboxConfig)
    environments = await StockadeSandboxEnvironment.sample_init("t", config, {})
    assert (await environments["default"].exec(["echo", "default"])).stdout == "default\n"
    await StockadeSandboxEnvironment.sample_cleanup("t", config, environments, True)
    with pytest.raises(Exception, match="nonesuch"):
        await StockadeSandboxEnvironment.sample_init("t", "nonesuch", {})


def test_the_example_runs(example):
    assert "42" in example("inspect_task.py")
