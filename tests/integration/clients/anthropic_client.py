"""Anthropic's own client: messages, streams, tools, Pydantic, cache_control and its usage, errors."""

import asyncio
import os
import time
from typing import Literal

import anthropic
from anthropic import Anthropic, AsyncAnthropic
from pydantic import BaseModel

server = os.environ.get("BASE_URL", "http://127.0.0.1:8000")
client = Anthropic(base_url=server, api_key=os.environ.get("API_KEY", "unused"))
model = client.models.list().data[0].id

shop = "You answer questions about our shop. It opens at nine and closes at five, every day but Sunday. " * 4
system = [{"type": "text", "text": shop, "cache_control": {"type": "ephemeral"}}]
messages = [{"role": "user", "content": "When do you open?"}]
message = client.messages.create(model=model, max_tokens=32, system=system, messages=messages)
print(message.content[0].text, message.usage.cache_read_input_tokens, "tokens were cached")
# That was an example; from here on, everything is checked.
assert message.content[0].text and message.stop_reason in ("end_turn", "max_tokens")

greedy = {"temperature": 0, "cache_salt": f"anthropic {time.time()}"}  # the client has no arguments for these
asked = {"model": model, "max_tokens": 24, "system": system, "messages": messages, "extra_body": greedy}
length = client.messages.count_tokens(model=model, system=system, messages=messages).input_tokens
first, again = (client.messages.create(**asked) for _ in range(2))
for usage in (first.usage, again.usage):
    assert usage.input_tokens + usage.cache_creation_input_tokens + usage.cache_read_input_tokens == length
assert first.usage.cache_creation_input_tokens >= 64 and first.usage.cache_read_input_tokens == 0
assert again.usage.cache_read_input_tokens >= first.usage.cache_creation_input_tokens
assert first.content[0].text == again.content[0].text and first._request_id.startswith("req_")
print("messages: whole, with cache_control")

with client.messages.stream(**asked) as stream:
    assert "".join(stream.text_stream) == first.content[0].text
    assert stream.get_final_message().usage == again.usage
kinds = [event.type for event in client.messages.create(**asked, stream=True)]
assert kinds[:2] == ["message_start", "content_block_start"]
assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]


async def in_parallel() -> list[str]:
    async with AsyncAnthropic(base_url=server, api_key=client.api_key) as calls:
        answers = await asyncio.gather(*(calls.messages.create(**asked) for _ in range(3)))
        return [one.content[0].text for one in answers]


assert asyncio.run(in_parallel()) == [first.content[0].text] * 3
print("messages: streamed, async")


class Ticket(BaseModel, extra="forbid"):
    team: Literal["billing", "shipping"]


tools = [{"name": "open_ticket", "description": "Ask a team.", "input_schema": Ticket.model_json_schema()}]
calling = {**asked, "max_tokens": 80, "tools": tools, "tool_choice": {"type": "tool", "name": "open_ticket"}}
called = client.messages.create(**calling)
(use,) = called.content
assert Ticket(**use.input) and called.stop_reason == "tool_use"
with client.messages.stream(**calling) as stream:
    assert stream.get_final_message().content[0].input == use.input
result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "Ticket 42 is open."}]}
turns = [*messages, {"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
assert client.messages.create(**{**asked, "messages": turns}, tools=tools).content[0].text
parsed = client.messages.parse(model=model, max_tokens=80, messages=messages, output_format=Ticket)
assert isinstance(parsed.parsed_output, Ticket)
print("tools: called, streamed, answered; Pydantic")

too_long = {"messages": [{"role": "user", "content": "word " * 9000}]}
for wrong, kind in (({"model": "nobody"}, anthropic.NotFoundError), (too_long, anthropic.BadRequestError)):
    for streaming in (False, True):
        try:
            client.messages.create(**{**asked, **wrong}, stream=streaming)
            raise AssertionError("it was answered")
        except kind as error:
            assert error.body["type"] == "error" and error.request_id.startswith("req_")
print("errors")
