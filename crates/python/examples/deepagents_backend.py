"""deepagents: a backend for `create_deep_agent(model, backend=sandbox)`."""

from stockade.deepagents import StockadeSandbox

with StockadeSandbox() as sandbox:
    sandbox.write(f"{sandbox.work_dir}/answer.py", "print(6*7)")
    result = sandbox.execute("python3 answer.py")
    print(result.exit_code, result.output, end="")
