"""Instructor: Pydantic models out of a chat, in its modes, streamed in parts and as a list."""

import asyncio
import os
from typing import Literal

import instructor
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel, Field

server = os.environ.get("BASE_URL", "http://127.0.0.1:8000")
client = OpenAI(base_url=f"{server}/v1", api_key=os.environ.get("API_KEY", "unused"))
model = client.models.list().data[0].id


class Ticket(BaseModel, extra="forbid"):
    team: Literal["billing", "shipping"]
    urgent: bool


messages = [{"role": "user", "content": "I paid twice. Help me today!"}]
asker = instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA)
ticket = asker.chat.completions.create(model=model, messages=messages, response_model=Ticket, temperature=0)
print(ticket)
# That was an example; from here on, everything is checked.
assert isinstance(ticket, Ticket)


class Tickets(BaseModel, extra="forbid"):
    tickets: list[Ticket] = Field(min_length=1, max_length=3)


asked = {"model": model, "messages": messages, "temperature": 0, "max_tokens": 96, "max_retries": 0}
for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA):
    asker = instructor.from_openai(client, mode=mode)
    found, answer = asker.chat.completions.create_with_completion(**asked, response_model=Ticket)
    assert isinstance(found, Ticket), mode
    assert answer.choices[0].finish_reason in ("stop", "tool_calls") and answer.usage.total_tokens > 0
    assert 1 <= len(asker.chat.completions.create(**asked, response_model=Tickets).tickets) <= 3, mode
    parts = list(asker.chat.completions.create_partial(**asked, response_model=Ticket))
    assert len(parts) > 1 and parts[-1].model_dump() == found.model_dump(), mode
    print(mode, "whole, a list, in parts")

_, again = asker.chat.completions.create_with_completion(**asked, response_model=Ticket)
assert again.usage.prompt_tokens_details.cached_tokens > 0


class Anything(BaseModel, extra="allow"):
    """JSON without a schema is any object, and a small model writes one of its own."""


asker = instructor.from_openai(client, mode=instructor.Mode.JSON)
shown = [{"role": "user", "content": "Lost"}, {"role": "assistant", "content": '{"team": "shipping"}'}]
turns = [*shown, *shown, *messages]
found = asker.chat.completions.create(**{**asked, "messages": turns}, response_model=Anything)
assert found.model_dump()
print("Mode.JSON")


async def in_parallel() -> list[Ticket]:
    calls = AsyncOpenAI(base_url=client.base_url, api_key=client.api_key)
    asker = instructor.from_openai(calls, mode=instructor.Mode.TOOLS)
    return await asyncio.gather(*(asker.chat.completions.create(**asked, response_model=Ticket) for _ in range(3)))


assert all(isinstance(one, Ticket) for one in asyncio.run(in_parallel()))
print("async")
