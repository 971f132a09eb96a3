"""Pydantic AI: agents whose output is a model, by a tool and by a schema; their own tools; streams; usage."""

import asyncio
import os
from typing import Literal

from openai import OpenAI
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.capabilities import PrepareOutputTools, PrepareTools
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

server = os.environ.get("BASE_URL", "http://127.0.0.1:8000")
connection = {"base_url": f"{server}/v1", "api_key": os.environ.get("API_KEY", "unused")}
name = OpenAI(**connection).models.list().data[0].id
model = OpenAIChatModel(name, provider=OpenAIProvider(**connection), settings={"temperature": 0, "max_tokens": 64})


class Ticket(BaseModel, extra="forbid"):
    team: Literal["billing", "shipping"]
    urgent: bool


handbook = "You sort what customers write. Parcels are for shipping, money is for billing. " * 8
agent = Agent(model, output_type=NativeOutput(Ticket), system_prompt=handbook)
result = agent.run_sync("I paid twice. Help me today!")
print(result.output, result.usage.cache_read_tokens, "tokens were cached")
# That was an example; from here on, everything is checked.
assert isinstance(result.output, Ticket)
assert (result.usage.requests, result.usage.output_tokens > 0) == (1, True)

by_tool = Agent(model, output_type=ToolOutput(Ticket, strict=True), system_prompt=handbook)
first, again = (by_tool.run_sync("I paid twice. Help me today!") for _ in range(2))
assert isinstance(first.output, Ticket) and first.output == again.output
assert again.usage.cache_read_tokens >= 96
print("output: by a schema, by a tool, cached")

told: list[str] = []


def ticket_number(team: Literal["billing", "shipping"]) -> str:
    """The number of a team's ticket."""
    told.append(team)
    return f"The ticket of {team} is number 42."


# A small model does not know when to stop asking: each tool is there only while it is its turn.
turns = [
    PrepareTools(lambda context, tools: [] if told else tools),
    PrepareOutputTools(lambda context, tools: tools if told else []),
]
run = Agent(model, output_type=Ticket, tools=[ticket_number], capabilities=turns).run_sync("I paid twice!")
assert isinstance(run.output, Ticket) and len(told) == run.usage.tool_calls == 1 and run.usage.requests == 2
print("tools: called, answered")


async def streamed() -> str:
    async with Agent(model).run_stream("Name a sea.") as run:
        pieces = [piece async for piece in run.stream_text(delta=True, debounce_by=None)]
        assert run.usage.output_tokens > 1
    assert len(pieces) > 1
    return "".join(pieces)


assert asyncio.run(streamed()) == Agent(model).run_sync("Name a sea.").output
responses = OpenAIResponsesModel(name, provider=OpenAIProvider(**connection), settings={"max_tokens": 48})
assert isinstance(Agent(responses, output_type=NativeOutput(Ticket)).run_sync("I paid twice!").output, Ticket)
print("streamed; responses")
