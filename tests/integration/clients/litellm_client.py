"""LiteLLM: chats, streams, schemas, tools, completions, and its own names for errors."""

import asyncio
import json
import os
from typing import Literal

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else the import fetches prices from the internet

import litellm
from openai import OpenAI
from pydantic import BaseModel

server = os.environ.get("BASE_URL", "http://127.0.0.1:8000")
key = os.environ.get("API_KEY", "unused")
model = "hosted_vllm/" + OpenAI(base_url=f"{server}/v1", api_key=key).models.list().data[0].id
connection = {"model": model, "api_base": f"{server}/v1", "api_key": key}

messages = [{"role": "user", "content": "Name a sea, and say in a few words where on this earth it lies."}]
answer = litellm.completion(**connection, messages=messages, temperature=0, max_tokens=24)
print(answer.choices[0].message.content, answer.usage.prompt_tokens_details.cached_tokens, "tokens were cached")
# That was an example; from here on, everything is checked.
litellm.suppress_debug_info = True
text = answer.choices[0].message.content
asked = {**connection, "messages": messages, "temperature": 0, "max_tokens": 24}
again = litellm.completion(**asked)
assert text and again.choices[0].message.content == text and again.usage.prompt_tokens_details.cached_tokens >= 16

chunks = list(litellm.completion(**asked, stream=True, stream_options={"include_usage": True}))
assert len(chunks) > 3 and "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
built = litellm.stream_chunk_builder(chunks, messages=messages)
assert built.choices[0].message.content == text and built.usage.completion_tokens == answer.usage.completion_tokens
assert asyncio.run(litellm.acompletion(**asked)).choices[0].message.content == text
print("chats: whole, streamed, async, cached")


class Ticket(BaseModel, extra="forbid"):
    team: Literal["billing", "shipping"]
    urgent: bool


complaint = [{"role": "user", "content": "I paid twice. Help me today!"}]
sorted_ = litellm.completion(**connection, messages=complaint, temperature=0, response_format=Ticket)
assert Ticket.model_validate_json(sorted_.choices[0].message.content)
function = {"name": "open_ticket", "description": "Ask a team.", "parameters": Ticket.model_json_schema()}
calling = {**asked, "messages": complaint, "tools": [{"type": "function", "function": function}], "max_tokens": 80}
called = litellm.completion(**calling, tool_choice="required").choices[0]
assert Ticket(**json.loads(called.message.tool_calls[0].function.arguments)) and called.finish_reason == "tool_calls"
pieces = list(litellm.completion(**calling, tool_choice="required", stream=True))
streamed = litellm.stream_chunk_builder(pieces, messages=complaint).choices[0].message.tool_calls
assert [one.function.arguments for one in streamed] == [one.function.arguments for one in called.message.tool_calls]
print("schema; tools: called, streamed")

texts = {**connection, "model": model.replace("hosted_vllm", "text-completion-openai")}
assert litellm.text_completion(**texts, prompt="The sea", max_tokens=8).choices[0].text
for provider in ("hosted_vllm", "openai", "litellm_proxy"):
    named = model.replace("hosted_vllm", provider)
    wrong = ({"messages": [{"role": "user", "content": "word " * 9000}]}, {"model": f"{provider}/nobody"})
    for more, kind in zip(wrong, (litellm.ContextWindowExceededError, litellm.NotFoundError), strict=True):
        try:
            litellm.completion(**{**asked, "model": named, **more})
            raise AssertionError("it was answered")
        except kind as error:
            assert error.status_code in (400, 404)
print("completions, errors")
