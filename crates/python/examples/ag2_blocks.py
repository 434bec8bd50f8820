"""AG2 classic: an executor for `code_execution_config`."""

from autogen import ConversableAgent

from stockade.ag2 import StockadeCodeExecutor

user = ConversableAgent(
    "user",
    llm_config=False,
    human_input_mode="NEVER",
    code_execution_config={"executor": StockadeCodeExecutor(work_dir="coding")},
)
# What a model would have written.
message = {"role": "user", "content": "```python\nprint(6*7)\n```"}
print(user.generate_reply(messages=[message]))
