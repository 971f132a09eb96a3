"""Reads a stream as the strictest client would, and puts it together to the answer that it stands for.

    answer = read_chat(response, n=2, with_usage=True)       # {"choices": [{"message": …, "finish_reason": …}, …], "usage": …}

Whatever OpenAI's clients would stumble over is an AssertionError: they append choices in the order in which they arrive, join every
string that comes twice, and index choices[0]. Every event must have the shape that /openapi.json says, and nothing beside it.
"""

import json
from collections import defaultdict
from typing import Any

import httpx
import msgspec

from trunkline.api.answer_shapes import ChatChunk, TextCompletion

SAME_IN_ALL = ("id", "object", "created", "model", "system_fingerprint")


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """What stands between the headers and [DONE]."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    assert "content-length" not in response.headers
    *frames, rest = response.content.split(b"\n\n")
    assert rest == b"", "every frame has an end"
    *frames, done = [frame for frame in frames if frame != b": ping"]
    assert done == b"data: [DONE]"
    assert all(frame.startswith(b"data: {") and len(frame.decode().splitlines()) == 1 for frame in frames), (
        "one line of data each"
    )
    chunks = [json.loads(frame.removeprefix(b"data: ")) for frame in frames]
    for name in SAME_IN_ALL:
        assert len({chunk[name] for chunk in chunks}) == 1, f"{name} changes"
    return chunks


def split_usage(chunks: list[dict[str, Any]], with_usage: bool) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """The chunks with a choice, and the usage, which comes alone and last."""
    if not with_usage:
        assert all("usage" not in chunk for chunk in chunks)
    else:
        *chunks, last = chunks
        assert last["choices"] == []
        assert all(chunk["usage"] is None for chunk in chunks)
    assert all(len(chunk["choices"]) == 1 for chunk in chunks)
    return chunks, last["usage"] if with_usage else None


def read_chat(
    response: httpx.Response, *, n: int = 1, with_usage: bool = False, is_plain: bool = True
) -> dict[str, Any]:
    """The answer in one piece, but for the ids of calls, which are left out.

    is_plain  all that is written is content: the role comes with an empty one, else with null, for there may be none
    """
    chunks = events(response)
    msgspec.convert(chunks, list[ChatChunk])
    chunks, usage = split_usage(chunks, with_usage)
    choices = [chunk["choices"][0] for chunk in chunks]
    opening = {"role": "assistant", "content": "" if is_plain else None}
    assert [(choice["index"], choice["delta"]) for choice in choices[:n]] == [(index, opening) for index in range(n)]
    own: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for choice in choices:
        own[choice["index"]].append(choice)
    assert own.keys() == set(range(n))
    return {"choices": [_chat_choice(own[index]) for index in range(n)], "usage": usage}


def _chat_choice(choices: list[dict[str, Any]]) -> dict[str, Any]:
    opening, *middle, end = choices
    assert opening["finish_reason"] is None and opening["logprobs"] is None
    assert end["delta"] == {} and end["finish_reason"] is not None and end["logprobs"] is None
    message: dict[str, Any] = {"role": "assistant", "content": None, "refusal": None}
    if opening["delta"]["content"] == "":
        message["content"] = ""
    logprobs: list[Any] = []
    calls: list[dict[str, Any]] = []
    ids: set[str] = set()
    for choice in middle:
        assert choice["finish_reason"] is None
        assert "stop_reason" not in choice
        delta = choice["delta"]
        assert len(delta) <= 1, "one thing at a time"
        scores = choice["logprobs"]
        if scores is not None:
            logprobs += scores["content"]
        assert delta not in ({}, {"content": ""}) or scores or choice.get("token_ids"), "a chunk that says nothing"
        if "content" in delta:
            message["content"] = (message["content"] or "") + delta["content"]
        for call in delta.get("tool_calls", ()):
            function = call["function"]
            if call["index"] == len(calls):
                assert call.keys() == {"index", "id", "type", "function"}
                assert call["type"] == "function" and function.keys() == {"name", "arguments"}
                assert function["arguments"] == "" and function["name"]
                assert call["id"].startswith("call_") and call["id"] not in ids
                ids.add(call["id"])
                calls.append({"type": "function", "function": dict(function)})
            else:
                assert call["index"] == len(calls) - 1, "calls come one after the other"
                assert call.keys() == {"index", "function"} and function.keys() == {"arguments"}
                assert function["arguments"], "a piece that says nothing"
                calls[-1]["function"]["arguments"] += function["arguments"]
    if calls:
        message["tool_calls"] = calls
    return {
        "index": end["index"],
        "message": message,
        "logprobs": {"content": logprobs, "refusal": None} if logprobs else None,
        "finish_reason": end["finish_reason"],
        "stop_reason": end["stop_reason"],
    }


def read_completion(response: httpx.Response, *, num: int = 1, with_usage: bool = False) -> dict[str, Any]:
    """The answer in one piece; `num` choices."""
    chunks = events(response)
    msgspec.convert(chunks, list[TextCompletion])
    chunks, usage = split_usage(chunks, with_usage)
    own: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for chunk in chunks:
        own[chunk["choices"][0]["index"]].append(chunk["choices"][0])
    assert own.keys() == set(range(num))
    return {"choices": [_text_choice(own[index]) for index in range(num)], "usage": usage}


def _text_choice(choices: list[dict[str, Any]]) -> dict[str, Any]:
    *others, end = choices
    assert all(choice["finish_reason"] is None and choice["stop_reason"] is None for choice in others)
    assert all(choice["text"] for choice in others), "a chunk that says nothing"
    assert end["finish_reason"] is not None
    logprobs: dict[str, list[Any]] | None = None
    for lists in (choice["logprobs"] for choice in choices):
        if lists is not None:
            logprobs = lists if logprobs is None else {name: logprobs[name] + lists[name] for name in logprobs}
    return {
        "index": end["index"],
        "text": "".join(choice["text"] for choice in choices),
        "logprobs": logprobs,
        "finish_reason": end["finish_reason"],
        "stop_reason": end["stop_reason"],
    }
