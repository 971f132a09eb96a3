"""Anthropic's answers without an engine: the texts are given. Events add up to the message, however the tokens arrive."""

import asyncio
import json
import random
from typing import Any

import pytest

from tests.api.test_chat_answer import CALLS, TEXTS, Case
from tests.api.test_reasoning import THOUGHT, thinking_case
from tests.api.test_tools import dialect_of
from trunkline.api.chat import StartedChat
from trunkline.api.constrained import Constrained
from trunkline.api.messages_answer import SIGNATURE, MessageAnswer
from trunkline.api.prompt_map import ReadPrompt
from trunkline.models.tokenizer import Tokenizer


def start(case: Case, seed: int) -> tuple[Any, MessageAnswer]:
    generation, _ = case._start(random.Random(seed))
    plan = case._dialect.plan(case.chat.tool_use(), response=None, prompt="")
    constrained = Constrained(None, None, None)  # type: ignore[arg-type]  # without a constraint nobody is told of one
    prompt = ReadPrompt([1, 2, 3], case._tokenizer)
    return generation, MessageAnswer("msg_1", StartedChat("tiny", prompt, plan, constrained, None, generation))


def whole(case: Case) -> dict[str, Any]:
    async def run() -> dict[str, Any]:
        generation, answer = start(case, 0)
        await generation.finish()
        return await answer.whole(generation)

    return asyncio.run(run())


def stream(case: Case, seed: int) -> str:
    async def run() -> str:
        generation, answer = start(case, seed)
        return b"".join([frame async for frames in answer.events(generation) for frame in frames]).decode()

    return asyncio.run(run())


def events(wire: str) -> list[dict[str, Any]]:
    """Those of a stream; asserts that each is framed as Anthropic frames it."""
    *frames, nothing = wire.split("\n\n")
    assert nothing == ""
    read = []
    for frame in frames:
        name, data = frame.split("\n")
        read.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {read[-1]['type']}"
    return read


def put_together(read: list[dict[str, Any]]) -> dict[str, Any]:
    """The message of a stream, as a client puts it together; asserts that its parts come in their order."""
    first, *middle, delta, last = [event for event in read if event["type"] != "ping"]
    assert (first["type"], delta["type"], last) == ("message_start", "message_delta", {"type": "message_stop"})
    message: dict[str, Any] = first["message"]
    assert (message["content"], message["stop_reason"], message["stop_sequence"]) == ([], None, None)
    is_open, arguments = False, ""
    for event in middle:
        assert event["index"] == len(message["content"]) - is_open, "blocks come one after the other"
        match event:
            case {"type": "content_block_start", "content_block": block}:
                assert not is_open
                message["content"].append(block)
                is_open, arguments = True, ""
            case {"type": "content_block_delta", "delta": added}:
                assert is_open
                arguments = _add(message["content"][-1], added, arguments)
            case {"type": "content_block_stop"}:
                assert is_open
                is_open = False
            case _:
                raise AssertionError(event)
    assert not is_open
    return {**message, **delta["delta"], "usage": {**message["usage"], **delta["usage"]}}


def _add(block: dict[str, Any], added: dict[str, Any], arguments: str) -> str:
    match added:
        case {"type": "text_delta", "text": words}:
            block["text"] += words
        case {"type": "thinking_delta", "thinking": words}:
            block["thinking"] += words
        case {"type": "signature_delta", "signature": signature}:
            block["signature"] = signature
        case {"type": "input_json_delta", "partial_json": piece}:
            arguments += piece
            try:
                block["input"] = json.loads(arguments)
            except ValueError:
                assert block["input"] == {}, "an object is whole only at its end"
        case _:
            raise AssertionError(added)
    return arguments


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    content = [{key: value for key, value in block.items() if key != "id"} for block in message["content"]]
    return {**message, "content": content}


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
@pytest.mark.parametrize("reason", ["stop", "length"])
def test_streams_add_up(tokenizer: Tokenizer, text: str, reason: str) -> None:
    expected = without_ids(whole(Case(tokenizer, [text], reason)))
    for seed in range(40):
        assert without_ids(put_together(events(stream(Case(tokenizer, [text], reason), seed)))) == expected


def test_text_and_calls_are_blocks_in_their_order(tokenizer: Tokenizer) -> None:
    message = whole(Case(tokenizer, [f"I look. {CALLS}"]))
    said, first, second = message["content"]
    assert said == {"type": "text", "text": "I look."}
    assert (first["type"], first["name"], first["input"]) == ("tool_use", "weather", {"place": "Köln", "x": [1]})
    assert (second["name"], second["input"]) == ("rain", {})
    assert first["id"] != second["id"]
    assert (message["stop_reason"], message["stop_sequence"]) == ("tool_use", None)
    assert (message["id"], message["type"], message["role"], message["model"]) == (
        "msg_1",
        "message",
        "assistant",
        "tiny",
    )


def test_an_empty_answer_has_no_blocks(tokenizer: Tokenizer) -> None:
    message = whole(Case(tokenizer, [""]))
    assert (message["content"], message["stop_reason"]) == ([], "end_turn")


def test_a_call_that_was_cut_off_has_what_came_of_it(tokenizer: Tokenizer) -> None:
    cut = CALLS[: CALLS.index("]}")]
    message = whole(Case(tokenizer, [cut], "length"))
    (call,) = message["content"]
    assert (call["name"], call["input"]) == ("weather", {"place": "Köln", "x": [1]})
    assert message["stop_reason"] == "max_tokens"


def test_a_named_tool_ends_as_any_other(tokenizer: Tokenizer) -> None:
    """OpenAI has "stop" there."""
    choice = {"type": "function", "function": {"name": "weather"}}
    message = whole(
        Case(tokenizer, ['<tool_call>[{"name": "weather", "arguments": {}}]</tool_call>'], tool_choice=choice)
    )
    assert message["stop_reason"] == "tool_use"


def test_stop_sequences(tokenizer: Tokenizer) -> None:
    case = Case(tokenizer, ["It rains in Köln. "], tools=None, stop=["snow", "in K"])
    message = whole(case)
    assert message["content"] == [{"type": "text", "text": "It rains "}]
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "in K")
    for seed in range(20):
        assert put_together(events(stream(case, seed))) == message


@pytest.mark.parametrize("answer", ["Yes.", CALLS, ""])
def test_thoughts(tokenizer: Tokenizer, answer: str) -> None:
    case = thinking_case(tokenizer, [f"{THOUGHT}\n{answer}"])
    case.chat = Case(tokenizer, [""]).chat  # with both tools
    message = whole(case)
    assert message["content"][0] == {"type": "thinking", "thinking": "Hm.", "signature": SIGNATURE}
    assert message["usage"]["output_tokens_details"] == {"thinking_tokens": len(THOUGHT)}, "a token is a byte"
    for seed in range(20):
        assert without_ids(put_together(events(stream(case, seed)))) == without_ids(message)


def test_usage_counts_every_token_of_the_prompt_once(tokenizer: Tokenizer) -> None:
    for cached, pinned in ((0, 0), (2, 0), (0, 2), (2, 3), (3, 2), (3, 3)):
        generation, answer = start(Case(tokenizer, ["a"]), 0)
        asyncio.run(generation.finish())
        (choice,) = generation.choices
        choice.cached_tokens, choice.pinned_tokens = cached, pinned
        generation._has_pin = True
        usage = asyncio.run(answer.whole(generation))["usage"]
        counts = [usage[f"{name}input_tokens"] for name in ("", "cache_read_", "cache_creation_")]
        assert counts == [3 - max(cached, pinned), cached, max(0, pinned - cached)]
        assert usage["output_tokens"] == 2


def test_dialect_without_thoughts_says_nothing_of_them(tokenizer: Tokenizer) -> None:
    assert dialect_of(tokenizer).reasoning is None
    assert "output_tokens_details" not in whole(Case(tokenizer, ["a"]))["usage"]
