"""AutoGen 0.7: the adapter, beside the framework's own executor where that is the control."""

from __future__ import annotations

import asyncio
import time
import warnings
from pathlib import Path

import pytest
from autogen_agentchat.agents import AssistantAgent, CodeExecutorAgent
from autogen_agentchat.conditions import TextMentionTermination
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_core import CancellationToken
from autogen_core.code_executor import CodeBlock, CodeExecutor
from autogen_ext.code_executors.local import LocalCommandLineCodeExecutor
from autogen_ext.models.replay import ReplayChatCompletionClient
from autogen_ext.tools.code_execution import PythonCodeExecutionTool

from stockade import BadRequest
from stockade.autogen import StockadeCodeExecutor, StockadeCodeResult


class ScriptedModel(ReplayChatCompletionClient):
    """Decides what to say when it has seen what was said."""

    def __init__(self, agent) -> None:
        super().__init__([""])
        self._agent = agent

    async def create(self, messages, **options):
        seen = str(messages[-1].content) if len(messages) > 2 else ""
        self.chat_completions = [self._agent.reply(seen)]
        self._current_index = 0
        return await super().create(messages, **options)


async def run(executor: CodeExecutor, *blocks: tuple[str, str], token: CancellationToken | None = None):
    listed = [CodeBlock(language=language, code=code) for language, code in blocks]
    return await executor.execute_code_blocks(listed, token or CancellationToken())


@pytest.mark.root_too
@pytest.mark.filterwarnings("ignore:No approval function")
async def test_an_agent_sees_what_its_code_did_and_corrects_itself(work_dir: Path, agent):
    async with StockadeCodeExecutor(work_dir=work_dir) as executor:
        team = RoundRobinGroupChat(
            [AssistantAgent("coder", ScriptedModel(agent)), CodeExecutorAgent("executor", executor)],
            termination_condition=TextMentionTermination("TERMINATE", sources=["coder"]),
            max_turns=8,
        )
        outcome = await team.run(task="Measure, and tell me the number.")
    said = [str(message.content) for message in outcome.messages]
    assert any("FileNotFoundError" in text for text in said), said
    assert agent.is_right(said[-1], work_dir), said


async def test_blocks_of_each_language_run_in_one_directory(work_dir: Path):
    executor = StockadeCodeExecutor(work_dir=work_dir)
    result = await run(
        executor,
        ("python", "open('n', 'w').write('1'); print('from python')"),
        ("sh", "cat n; echo; echo to stderr >&2"),
        ("bash", "[[ -n $BASH_VERSION ]] && echo bash"),
        ("shell", '[ -z "$BASH_VERSION" ] && echo sh'),
        ("py", "print('py')"),
    )
    # stderr first, block by block, as the framework's own executor has it.
    assert result.output == "from python\nto stderr\n1\nbash\nsh\npy\n"
    assert result.exit_code == 0
    assert [one.verdict for one in result.results] == ["exited"] * 5
    # The program's own file is gone; what the code wrote is there, and the caller's.
    assert [path.name for path in work_dir.iterdir()] == ["n"]


async def test_between_start_and_stop_the_blocks_are_of_one_session(work_dir: Path):
    executor = StockadeCodeExecutor(work_dir=work_dir)
    keep, look = ("sh", "echo kept > /tmp/n; echo there > n"), ("sh", "cat /tmp/n n")
    # A control: before it is started each has its own /tmp.
    await run(executor, keep)
    assert (await run(executor, look)).exit_code == 1
    async with executor:
        await run(executor, keep)
        result = await run(executor, look)
        assert (result.exit_code, result.output) == (0, "kept\nthere\n")
        await executor.restart()
        assert (await run(executor, look)).output.endswith("there\n")
        assert (await run(executor, look)).exit_code == 1
    assert (await run(executor, look)).exit_code == 1
    assert [path.name for path in work_dir.iterdir()] == ["n"]


async def test_the_first_failure_stops_the_blocks(work_dir: Path):
    executor = StockadeCodeExecutor(work_dir=work_dir)
    result = await run(executor, ("sh", "echo one"), ("sh", "echo two; exit 3"), ("sh", "echo three"))
    assert (result.exit_code, result.output) == (3, "one\ntwo\n")


async def test_an_unknown_language_is_told_to_the_model(work_dir: Path):
    result = await run(StockadeCodeExecutor(work_dir=work_dir), ("python", "print(1)"), ("cobol", "STOP RUN."))
    assert (result.exit_code, result.output) == (1, "1\n\nunknown language cobol")


async def test_a_block_with_a_file_name_stays_for_later_ones(work_dir: Path):
    executor = StockadeCodeExecutor(work_dir=work_dir)
    result = await run(
        executor,
        ("python", "# filename: lib/half.py\ndef half(x): return x / 2"),
        ("python", "import sys; sys.path.insert(0, 'lib'); from half import half; print(half(84))"),
    )
    assert (result.exit_code, result.output) == (0, "42.0\n")
    named = await run(executor, ("sh", f"# filename: {work_dir}/again.sh\necho again"))
    assert named.output == "again\n"
    assert (work_dir / "again.sh").read_text().endswith("echo again")


async def test_the_first_blocks_file_is_named_and_kept_where_asked_for(work_dir: Path):
    blocks = (("python", "print(1)"), ("sh", "# filename: say.sh\necho 2"))
    result = await run(StockadeCodeExecutor(work_dir=work_dir), *blocks)
    assert result.output == "1\n2\n"
    assert Path(result.code_file).parent == work_dir
    assert [path.name for path in work_dir.iterdir()] == ["say.sh"]
    named = await run(StockadeCodeExecutor(work_dir=work_dir), *reversed(blocks))
    assert named.code_file == str(work_dir / "say.sh")
    for executor in (StockadeCodeExecutor(work_dir=work_dir, cleanup_temp_files=False), StockadeCodeExecutor()):
        written = CodeExecutor.load_component(executor.dump_component().model_dump())
        kept = await run(written, *blocks)
        # The name is the one that the framework's own executor gives.
        assert Path(kept.code_file).name == Path(result.code_file).name
        await written.stop()
    assert (work_dir / Path(kept.code_file).name).read_text() == "print(1)"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        local = LocalCommandLineCodeExecutor(work_dir=work_dir)
    assert (await run(local, *blocks)).code_file == result.code_file


@pytest.mark.parametrize("name", ["../out.py", "/etc/out.py", "a/../../out.py"])
async def test_a_file_name_cannot_lead_out_of_the_directory(work_dir: Path, name: str):
    result = await run(StockadeCodeExecutor(work_dir=work_dir), ("python", f"# filename: {name}\nprint(1)"))
    assert (result.exit_code, result.output) == (1, "Filename is not in the workspace")
    assert not (work_dir.parent / "out.py").exists()


async def test_a_link_in_the_directory_leads_nowhere(work_dir: Path, tmp_path: Path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (work_dir / "away").symlink_to(outside)
    result = await run(StockadeCodeExecutor(work_dir=work_dir), ("python", "# filename: away/x.py\nprint(1)"))
    assert result.exit_code == 1
    assert "a link or a file stands where" in result.output
    assert list(outside.iterdir()) == []


async def test_a_timeout_is_on_time_although_a_child_holds_the_pipe(work_dir: Path):
    # The framework's own executor returns when the child does: see compare.py.
    executor = StockadeCodeExecutor(timeout=1, work_dir=work_dir)
    begin = time.monotonic()
    result = await run(executor, ("bash", "echo begun; sleep 60 & sleep 60"), ("sh", "echo never"))
    assert time.monotonic() - begin < 20
    assert (result.exit_code, result.output) == (124, "begun\n\nTimeout")
    assert result.results[0].verdict == "wall_timeout"


async def test_a_child_in_the_background_delays_nothing(work_dir: Path):
    begin = time.monotonic()
    code = "import subprocess; subprocess.Popen(['sleep', '60']); print('done')"
    result = await run(StockadeCodeExecutor(work_dir=work_dir), ("python", code))
    assert time.monotonic() - begin < 20
    assert (result.exit_code, result.output) == (0, "done\n")


async def test_output_need_not_be_utf8(work_dir: Path):
    block = ("python", "import sys; sys.stdout.buffer.write(b'a\\xffb\\n')")
    result = await run(StockadeCodeExecutor(work_dir=work_dir), block)
    assert (result.exit_code, result.output) == (0, "a\ufffdb\n")
    assert result.results[0].output_bytes == b"a\xffb\n"


async def test_secrets_of_the_environment_are_not_there(work_dir: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FAKE_API_KEY", "secret")
    block = ("python", "import os; print(os.environ.get('FAKE_API_KEY'))")
    assert (await run(StockadeCodeExecutor(work_dir=work_dir), block)).output == "None\n"
    # The control: the framework's own executor hands them over.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        local = LocalCommandLineCodeExecutor(work_dir=work_dir)
    assert (await run(local, block)).output == "secret\n"


async def test_the_token_cancels_and_the_result_says_so(work_dir: Path, running, wait_until):
    token = CancellationToken()
    executor = StockadeCodeExecutor(work_dir=work_dir)
    blocks = (("sh", "echo one"), ("sh", "exec sleep 300 0.25"))
    task = asyncio.ensure_future(run(executor, *blocks, token=token))
    await asyncio.to_thread(wait_until, lambda: running("300\x000.25"))
    token.cancel()
    result = await task
    assert (result.exit_code, result.output) == (125, "one\n\nCancelled")
    assert not running("300\x000.25")


async def test_a_cancelled_task_is_no_result(work_dir: Path, running, wait_until):
    task = asyncio.ensure_future(run(StockadeCodeExecutor(work_dir=work_dir), ("sh", "exec sleep 300 0.5")))
    await asyncio.to_thread(wait_until, lambda: running("300\x000.5"))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not running("300\x000.5")


async def test_a_limit_that_struck_is_told_to_the_model(work_dir: Path):
    code = "import os\nopen('big', 'wb').write(b'x' * (1 << 28))"
    result = await run(StockadeCodeExecutor(work_dir=work_dir), ("python", code))
    assert result.exit_code != 0
    assert not result.results[0].success


def test_it_warns_of_nothing_and_the_frameworks_own_does(work_dir: Path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        StockadeCodeExecutor(work_dir=work_dir)
    with pytest.warns(UserWarning, match="can be unsafe"):
        LocalCommandLineCodeExecutor(work_dir=work_dir)


async def test_it_is_a_component_that_can_be_written_down_and_loaded(work_dir: Path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        written = StockadeCodeExecutor(timeout=7, work_dir=work_dir, policy="shell").dump_component()
    assert written.provider == "stockade.autogen.StockadeCodeExecutor"
    loaded = CodeExecutor.load_component(written.model_dump())
    assert isinstance(loaded, StockadeCodeExecutor)
    assert loaded.timeout == 7
    result = await run(loaded, ("python", "print('loaded')"))
    assert isinstance(result, StockadeCodeResult)
    assert result.output == "loaded\n"
    assert result.results[0].policy is not None
    assert result.results[0].policy.name == "shell"


async def test_the_frameworks_tool_runs_with_it(work_dir: Path):
    tool = PythonCodeExecutionTool(StockadeCodeExecutor(work_dir=work_dir))
    answer = await tool.run_json({"code": "print(6*7)"}, CancellationToken())
    assert tool.return_value_as_string(answer) == "42\n"


@pytest.mark.root_too
async def test_without_a_directory_the_blocks_share_a_session():
    async with StockadeCodeExecutor() as executor:
        assert executor.work_dir is None
        result = await run(
            executor, ("sh", "# filename: say.sh\necho kept > n"), ("sh", "cat n; sh say.sh; ls n say.sh")
        )
        assert result.output == "kept\nn\nsay.sh\n"
        assert (await run(executor, ("sh", "cat n"))).output == "kept\n"
        await executor.restart()
        assert (await run(executor, ("sh", "ls n 2>/dev/null || echo none"))).output == "none\n"
    assert (await run(executor, ("sh", "echo begun anew"))).output == "begun anew\n"
    await executor.stop()


@pytest.mark.parametrize("directory", [True, False])
def test_it_goes_on_in_a_second_event_loop(work_dir: Path, directory: bool):
    executor = StockadeCodeExecutor(work_dir=work_dir if directory else None)
    asyncio.run(executor.start())
    asyncio.run(run(executor, ("sh", "echo kept > n")))
    assert asyncio.run(run(executor, ("sh", "cat n"))).output == "kept\n"
    asyncio.run(executor.restart())
    assert asyncio.run(run(executor, ("sh", "cat n"))).exit_code == (0 if directory else 1)
    asyncio.run(executor.stop())


async def test_blocks_at_the_same_time_share_one_session():
    executor = StockadeCodeExecutor()
    await asyncio.gather(*(run(executor, ("sh", f"echo > n{number}")) for number in range(3)))
    assert (await run(executor, ("sh", "ls n*"))).output == "n0\nn1\nn2\n"
    await executor.stop()


async def test_what_the_caller_got_wrong_is_raised(work_dir: Path):
    with pytest.raises(ValueError, match="positive number"):
        StockadeCodeExecutor(timeout=0)
    with pytest.raises(BadRequest, match="at most 10min"):
        await run(StockadeCodeExecutor(timeout=86400, work_dir=work_dir), ("python", "print(1)"))


def test_the_example_runs(example):
    assert "42" in example("autogen_blocks.py")


def test_the_readme_runs(readme):
    readme("### AutoGen 0.7")
