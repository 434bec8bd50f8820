"""LangChain: the agent's shell in a sandbox. A scripted model replaces a real one."""

from langchain.agents import create_agent
from langchain.agents.middleware import ShellToolMiddleware
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage

from stockade.langchain import StockadeExecutionPolicy


class Model(GenericFakeChatModel):
    """Returns scripted messages; in your program this is init_chat_model("…")."""

    def bind_tools(self, tools, **options):
        """Takes the tools and ignores them."""
        return self


call = {"name": "shell", "args": {"command": "echo $((6*7))"}, "id": "1", "type": "tool_call"}
model = Model(messages=iter([AIMessage("", tool_calls=[call]), AIMessage("Done.")]))

shell = ShellToolMiddleware(workspace_root="coding", execution_policy=StockadeExecutionPolicy())
agent = create_agent(model, middleware=[shell])
outcome = agent.invoke({"messages": [("user", "What is six times seven?")]})
print([message.content for message in outcome["messages"] if message.type == "tool"])
