"""A stream is its answer in pieces: for 200 seeds, whatever is asked for, what it adds up to is what is answered without it.

All requests of a test run side by side, so that no two are computed in the same company.
"""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from pydantic_core import from_json

from tests.api.serving import MODEL, Server, sse_events
from tests.api.streams import read_chat, read_completion
from tests.api.test_tools import named
from tests.api.test_tools_live import TOOLS

pytestmark = pytest.mark.slow

SEEDS = range(200)
AT_ONCE = 24
EMOJI = "🦊👩‍🚀é漢\u2028\u2029\x85"  # the last three end a line, for some clients
BYTES = {
    str(byte): 100 for byte in EMOJI.encode()
}  # the model writes nothing else, in any order: whole characters, and halves
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "tags": {"type": "array", "maxItems": 2, "items": {"enum": ["🦊", "b"]}},
    },
    "required": ["name", "tags"],
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "r", "schema": SCHEMA, "strict": True}}
STOPS = ["e", "th", "\n\n", ": ", "aa", "🦊"]

CHAT_KINDS: dict[str, dict[str, Any]] = {
    "stop": {"stop": STOPS},
    "stop kept": {"stop": STOPS, "include_stop_str_in_output": True, "logprobs": True},
    "emoji": {"logit_bias": BYTES},
    "emoji and stop": {"logit_bias": BYTES, "stop": ["🦊", "漢"], "logprobs": True, "top_logprobs": 2},
    "emoji by a grammar": {"regex": "[😀-🙏]{1,6}(🦊|é)!"},
    "emoji by a grammar and stop": {"regex": "[😀-🙏]{1,6}(🦊|é)!", "stop": ["🦊", "é!"], "logprobs": True},
    "auto": {"tools": TOOLS, "n": 2},
    "auto or a format": {"tools": TOOLS, "response_format": FORMAT, "close_on_length": True, "max_tokens": 80},
    "required": {"tools": TOOLS, "tool_choice": "required", "max_tokens": 120},
    "one at most": {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "n": 2, "max_tokens": 90},
    "named": {"tools": TOOLS, "tool_choice": named("weather"), "logprobs": True, "max_tokens": 90},
    "cut": {"tools": TOOLS, "tool_choice": "required", "max_tokens": 25},
    "logprobs": {"logprobs": True, "top_logprobs": 3, "n": 3},
    "schema": {"response_format": FORMAT, "max_tokens": 80},
    "end": {"logit_bias": {"274": 4}, "n": 4},
}
COMPLETION_KINDS: dict[str, dict[str, Any]] = {
    "stop": {"stop": STOPS},
    "stop and logprobs": {"stop": STOPS, "logprobs": 2},
    "emoji": {"logit_bias": BYTES, "logprobs": 0},
    "many prompts": {"prompt": ["hello", "world 🦊"], "n": 2},
    "echo": {"echo": True, "logprobs": 1, "prompt": "echo é"},
    "grammar": {"regex": "[😀-🙏]{1,6}!"},
}


MESSAGE_TOOLS = [{**tool["function"], "input_schema": tool["function"]["parameters"]} for tool in TOOLS]
MESSAGE_KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "stop": {"stop_sequences": STOPS},
    "auto": {"tools": MESSAGE_TOOLS},
    "required": {"tools": MESSAGE_TOOLS, "tool_choice": {"type": "any"}, "max_tokens": 120},
    "cut": {"tools": MESSAGE_TOOLS, "tool_choice": {"type": "any"}, "max_tokens": 60},
}
RESPONSE_TOOLS = [{"type": "function", **tool["function"]} for tool in TOOLS]
RESPONSE_KINDS: dict[str, dict[str, Any]] = {
    "emoji": {"logit_bias": BYTES},
    "stop": {"stop": STOPS},
    "required": {"tools": RESPONSE_TOOLS, "tool_choice": "required", "max_output_tokens": 120},
    "schema": {"text": {"format": {"type": "json_schema", "name": "r", "schema": SCHEMA, "strict": True}}},
}


def of_seed(kinds: dict[str, dict[str, Any]], seed: int) -> dict[str, Any]:
    """Each kind with many seeds, half of them with usage."""
    fields = {"max_tokens": 40, "temperature": 1, **list(kinds.values())[seed % len(kinds)]}
    return {"model": MODEL, "seed": seed, **fields}


async def side_by_side(server: Server, compare: Callable[[httpx.AsyncClient, int], Any], seeds: range) -> list[Any]:
    room = asyncio.Semaphore(AT_ONCE)
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as http:

        async def one(seed: int) -> Any:
            async with room:
                return await compare(http, seed)

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(seed)) for seed in seeds]
        return [task.result() for task in tasks]


async def both(
    http: httpx.AsyncClient, path: str, body: dict[str, Any], with_usage: bool
) -> tuple[Any, httpx.Response]:
    options = {"stream_options": {"include_usage": True}} if with_usage else {}
    plain, stream = await asyncio.gather(
        http.post(path, json=body), http.post(path, json={**body, "stream": True, **options})
    )
    assert plain.status_code == 200, plain.text
    return plain.json(), stream


def check_usage(streamed: Any, plain: Any) -> None:
    """How much was cached depends on what else was there at the time."""
    for usage in (streamed, plain):
        assert usage.pop("prompt_tokens_details")["cached_tokens"] >= 0
    assert streamed == plain


async def test_chats(server: Server) -> None:
    async def compare(http: httpx.AsyncClient, seed: int) -> dict[str, Any]:
        with_usage = seed % 3 != 0
        body = {**of_seed(CHAT_KINDS, seed), "messages": [{"role": "user", "content": f"hello {seed}"}]}
        plain, stream = await both(http, "/v1/chat/completions", body, with_usage)
        streamed = read_chat(stream, n=body.get("n", 1), with_usage=with_usage, is_plain="tools" not in body)
        for choice in plain["choices"]:
            for call in choice["message"].get("tool_calls", ()):
                assert call.pop("id").startswith("call_")
        assert streamed["choices"] == plain["choices"], body
        if with_usage:
            check_usage(streamed["usage"], plain["usage"])
        return plain

    answers = await side_by_side(server, compare, SEEDS)
    choices = [choice for answer in answers for choice in answer["choices"]]
    assert {choice["finish_reason"] for choice in choices} == {"stop", "length", "tool_calls"}
    texts = [choice["message"]["content"] or "" for choice in choices]
    assert sum("🦊" in text for text in texts) > 5 and sum("\ufffd" in text for text in texts) > 5
    assert {choice["stop_reason"] for choice in choices} >= {"e", "🦊", None}
    assert max(len(choice["message"].get("tool_calls", ())) for choice in choices) > 1


async def test_completions(server: Server) -> None:
    async def compare(http: httpx.AsyncClient, seed: int) -> None:
        with_usage = seed % 3 != 0
        body = {"prompt": f"hello {seed}", **of_seed(COMPLETION_KINDS, seed)}
        plain, stream = await both(http, "/v1/completions", body, with_usage)
        streamed = read_completion(stream, num=len(plain["choices"]), with_usage=with_usage)
        assert streamed["choices"] == plain["choices"], body
        if with_usage:
            check_usage(streamed["usage"], plain["usage"])

    await side_by_side(server, compare, SEEDS)


async def test_messages(server: Server) -> None:
    """Anthropic's events: blocks that start, grow and stop."""

    async def compare(http: httpx.AsyncClient, seed: int) -> None:
        messages = [{"role": "user", "content": f"hello {seed}"}]
        body = {**of_seed(MESSAGE_KINDS, seed), "messages": messages}
        plain, stream = await both(http, "/v1/messages", body, with_usage=False)
        blocks: list[dict[str, Any]] = []
        pieces: list[str] = []
        ended: dict[str, Any] = {}
        for line in stream.text.splitlines():
            if not line.startswith("data: "):
                continue
            match json.loads(line.removeprefix("data: ")):
                case {"type": "content_block_start", "index": index, "content_block": block}:
                    assert index == len(blocks)
                    blocks.append(block)
                    pieces.append("")
                case {
                    "type": "content_block_delta",
                    "index": index,
                    "delta": {"text": piece} | {"partial_json": piece},
                }:
                    assert index == len(blocks) - 1
                    pieces[index] += piece
                case {"type": "message_delta", "delta": delta}:
                    ended = delta
        for block, piece in zip(blocks, pieces, strict=True):
            if block["type"] == "text":
                block["text"] = piece
            else:
                block["input"] = from_json(piece or "{}", allow_partial=True)  # as clients read what was cut off
        assert ended == {name: plain[name] for name in ended}
        said = [[{**block, "id": ""} for block in content] for content in (blocks, plain["content"])]
        assert said[0] == said[1], body

    await side_by_side(server, compare, SEEDS[:40])


async def test_responses(server: Server) -> None:
    """Deltas add up to the items that the last event has, and those are the answer."""

    async def compare(http: httpx.AsyncClient, seed: int) -> None:
        body = {"input": f"hello {seed}", "max_output_tokens": 60, **of_seed(RESPONSE_KINDS, seed), "max_tokens": None}
        plain, stream = await both(http, "/v1/responses", body, with_usage=False)
        texts: dict[int, str] = {}
        events = [
            json.loads(line.removeprefix("data: ")) for line in stream.text.splitlines() if line.startswith("data: ")
        ]
        for event in events:
            if event["type"].endswith(".delta"):
                texts[event["output_index"]] = texts.get(event["output_index"], "") + event["delta"]
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        streamed = events[-1]["response"]
        for index, item in enumerate(streamed["output"]):
            whole = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
            assert texts.get(index, "") == whole
        forget = {"id": "", "call_id": ""}
        said = [[{**item, **forget} for item in answer["output"]] for answer in (streamed, plain)]
        assert said[0] == said[1], body
        assert streamed["status"] == plain["status"]

    await side_by_side(server, compare, SEEDS[:40])


async def test_the_reader_is_strict(server: Server) -> None:
    """Each rule that it knows is one that it can see broken."""
    body = {
        "model": MODEL,
        "seed": 7,
        **CHAT_KINDS["required"],
        "messages": [{"role": "user", "content": "hello"}],
        "stream": True,
    }
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as http:
        good = await http.post("/v1/chat/completions", json=body)
    read_chat(good, is_plain=False)
    text = good.text
    call = text.index('"name"')
    for broken in (
        text.replace("data: [DONE]\n\n", ""),
        text.replace("data: ", "event: x\ndata: ", 1),
        text.replace('"content":null', '"content":"h"', 1),
        text.replace('"finish_reason":null', '"finish_reason":""', 1),
        text.replace('"delta":{}', '"delta":{"content":""}'),
        text[:call] + text[call:].replace('"function":{"arguments"', '"id":"call_1","function":{"arguments"', 1),
        text[:call] + text[call:].replace('"function":{"arguments"', '"function":{"name":"weather","arguments"', 1),
        text.replace('"delta":{"tool_calls":[{"index":0', '"delta":{"tool_calls":[{"index":1', 1),
        text.replace('"system_fingerprint":"', '"system_fingerprint":"x', 1),
        text.replace('"choices":[', '"usage":null,"choices":[', 1),
    ):
        assert broken != text
        assert len(sse_events(broken)) > 1
        with pytest.raises((AssertionError, ValueError)):
            read_chat(httpx.Response(200, headers=good.headers, text=broken), is_plain=False)
