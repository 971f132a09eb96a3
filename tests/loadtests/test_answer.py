"""A streamed answer, read to its end: its text, its calls, its usage, and what is missing."""

import json
from typing import Any

import pytest

from loadtests.answer import BrokenAnswerError, Call, read_answer

USAGE = {"prompt_tokens": 40, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 32}}


def delta(finish_reason: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": finish_reason}]}


def piece(index: int, **fields: Any) -> dict[str, Any]:
    return delta(tool_calls=[{"index": index, **fields}])


def stream(*chunks: dict[str, Any], done: bool = True) -> list[bytes]:
    events = [json.dumps(chunk) for chunk in chunks] + (["[DONE]"] if done else [])
    return [f"data: {event}\n\n".encode() for event in events]


ROLE, END, LAST = delta(role="assistant", content=""), delta("stop"), {"choices": [], "usage": USAGE}


def test_text_and_usage() -> None:
    answer = read_answer(stream(ROLE, delta(content="a"), delta(content="b"), delta(content="c"), END, LAST), 0.0)
    assert (answer.text, answer.calls, answer.finish_reason) == ("abc", [], "stop")
    assert (answer.prompt_tokens, answer.cached_tokens, answer.output_tokens) == (40, 32, 3)


def test_times_are_those_of_what_was_said() -> None:
    answer = read_answer(stream(ROLE, delta(content="a"), delta(content="b"), END, LAST), 0.0)
    assert answer.first is not None and answer.last is not None
    answer.first, answer.last = 1.0, 4.0
    assert (answer.ttft, answer.tpot) == (1.0, 1.5)
    silent = read_answer(stream(ROLE, END, LAST), 0.0)  # a role is no token
    assert (silent.ttft, silent.tpot) == (None, None)


def test_pieces_of_calls_are_put_together_by_index() -> None:
    pieces = [
        piece(0, id="x", function={"name": "f", "arguments": '{"a"'}),
        piece(1, id="y", function={"name": "g", "arguments": ""}),
        piece(0, function={"arguments": ": 1}"}),
        piece(1, function={"arguments": "{}"}),
    ]
    answer = read_answer(stream(ROLE, *pieces, delta("tool_calls"), LAST), 0.0)
    assert answer.calls == [Call(id="x", name="f", arguments='{"a": 1}'), Call(id="y", name="g", arguments="{}")]
    assert answer.ttft is not None


@pytest.mark.parametrize(
    ("chunks", "done", "says"),
    [
        ((ROLE, {"error": {"message": "the engine is gone"}}), False, "the engine is gone"),
        ((ROLE, END, LAST), False, r"without \[DONE\]$"),
        ((ROLE, END), True, "without usage$"),
        ((ROLE, LAST), True, "without finish_reason$"),
        ((ROLE,), False, r"without \[DONE\], usage, finish_reason$"),
    ],
)
def test_what_is_broken_is_said(chunks: tuple[dict[str, Any], ...], done: bool, says: str) -> None:
    with pytest.raises(BrokenAnswerError, match=says):
        read_answer(stream(*chunks, done=done), 0.0)
