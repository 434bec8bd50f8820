"""AutoGen 0.7: an executor for `CodeExecutorAgent` or `PythonCodeExecutionTool`."""

import asyncio

from autogen_core import CancellationToken
from autogen_core.code_executor import CodeBlock

from stockade.autogen import StockadeCodeExecutor


async def main() -> None:
    """Runs one block; an agent gets the executor as CodeExecutorAgent("executor", executor)."""
    async with StockadeCodeExecutor(work_dir="coding") as executor:
        block = CodeBlock(language="python", code="print(6*7)")
        result = await executor.execute_code_blocks([block], CancellationToken())
        print(result.exit_code, result.output, end="")


asyncio.run(main())
