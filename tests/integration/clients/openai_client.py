"""OpenAI's own client: chats, streams, Pydantic, tools, responses, completions, errors; the same from 2.x on."""

import asyncio
import os
from typing import Literal

import openai
from openai import AsyncOpenAI, OpenAI, pydantic_function_tool
from pydantic import BaseModel

server = os.environ.get("BASE_URL", "http://127.0.0.1:8000")
client = OpenAI(base_url=f"{server}/v1", api_key=os.environ.get("API_KEY", "unused"))
model = client.models.list().data[0].id


class Ticket(BaseModel, extra="forbid"):
    team: Literal["billing", "shipping"]
    urgent: bool


system = {"role": "system", "content": "You sort what customers write. " * 10}
messages = [system, {"role": "user", "content": "I paid twice. Help me today!"}]
ticket = client.chat.completions.parse(model=model, messages=messages, response_format=Ticket, temperature=0)
print(ticket.choices[0].message.parsed, ticket.usage.prompt_tokens_details.cached_tokens, "tokens were cached")
# That was an example; from here on, everything is checked.
assert isinstance(ticket.choices[0].message.parsed, Ticket)

chats = client.chat.completions
asked = {"model": model, "messages": messages, "temperature": 0, "max_tokens": 24}
answer = chats.create(**asked)
text = answer.choices[0].message.content
assert text and answer.usage.prompt_tokens_details.cached_tokens >= 64

*chunks, last = chats.create(**asked, stream=True, stream_options={"include_usage": True})
assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
assert chunks[0].choices[0].delta.role == "assistant" and last.choices == []
assert last.usage.completion_tokens == answer.usage.completion_tokens

with chats.stream(model=model, messages=messages, temperature=0, response_format=Ticket) as stream:
    assert {"chunk", "content.delta", "content.done"} <= {event.type for event in stream}
    assert stream.get_final_completion().choices[0].message.parsed == ticket.choices[0].message.parsed
print("chats: whole, streamed, parsed")
tools = [pydantic_function_tool(Ticket, name="open_ticket")]
calling = {"model": model, "messages": messages, "tools": tools, "tool_choice": "required", "temperature": 0}
called = chats.parse(**calling).choices[0].message
assert isinstance(called.tool_calls[0].function.parsed_arguments, Ticket)
with chats.stream(**calling) as stream:
    streamed = stream.get_final_completion().choices[0].message
assert streamed.tool_calls[0].function.arguments == called.tool_calls[0].function.arguments
results = [{"role": "tool", "tool_call_id": call.id, "content": "It is open."} for call in called.tool_calls]
turns = [*messages, called.model_dump(exclude_none=True), *results]
assert chats.create(model=model, messages=turns, tools=tools, max_tokens=16).choices[0].message.content
print("tools: called, streamed, answered")
first = client.responses.create(model=model, input="Name a sea.", temperature=0, max_output_tokens=16)
again = client.responses.create(model=model, input="Another!", previous_response_id=first.id, max_output_tokens=8)
assert first.output_text and again.usage.input_tokens_details.cached_tokens > 0
with client.responses.stream(model=model, input="Name a sea.", temperature=0, max_output_tokens=16) as events:
    assert "".join(one.delta for one in events if one.type == "response.output_text.delta") == first.output_text
assert isinstance(client.responses.parse(model=model, input=messages, text_format=Ticket).output_parsed, Ticket)
print("responses: whole, continued, streamed, parsed")
plain = client.completions.create(model=model, prompt=["The sea", "A ship"], max_tokens=8, logprobs=1)
assert len(plain.choices) == 2 and len(plain.choices[1].logprobs.tokens) == 8


async def in_parallel() -> list[str]:
    async with AsyncOpenAI(base_url=client.base_url, api_key=client.api_key) as calls:
        answers = await asyncio.gather(*(calls.chat.completions.create(**asked) for _ in range(3)))
    return [one.choices[0].message.content for one in answers]


assert asyncio.run(in_parallel()) == [text] * 3
too_long = {"messages": [{"role": "user", "content": "word " * 9000}]}
for wrong, kind in (({"model": "nobody"}, openai.NotFoundError), (too_long, openai.BadRequestError)):
    try:
        chats.create(**{**asked, **wrong})
        raise AssertionError("it was answered")
    except kind as error:
        assert error.code in ("model_not_found", "context_length_exceeded") and error.request_id
print("completions, async, errors")
