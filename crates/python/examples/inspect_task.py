"""inspect_ai: a task whose tools run in the sandbox. A scripted model replaces a real one."""

from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import ModelOutput, ModelUsage, get_model
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import bash

task = Task(
    dataset=[Sample(input="What is six times seven?")],
    solver=[use_tools(bash()), generate()],
    sandbox="stockade",
)
# In your evaluation: inspect eval task.py --model … --sandbox stockade
answers = [
    ModelOutput.for_tool_call("mockllm", "bash", {"command": "echo $((6*7))"}),
    ModelOutput.from_content("mockllm", "Done."),
]
for answer in answers:
    # Otherwise the scripted model would count its tokens, with a table from the network.
    answer.usage = ModelUsage()
(log,) = eval(task, model=get_model("mockllm/model", custom_outputs=answers), display="none")
print([message.text for message in log.samples[0].messages if message.role == "tool"])
