"""ResponseAnswer without an engine: the texts are given. Its events tell the response in one piece, however the tokens arrive."""

import asyncio
import json
import random
from typing import Any

import msgspec
import pytest

from tests.api.test_chat_answer import CALLS, TEXTS, Case
from tests.api.test_reasoning import CALL, THOUGHT, thinking_case
from tests.api.test_tools import named
from trunkline.api.chat import StartedChat
from trunkline.api.responses_answer import ResponseAnswer, ResponseBody, response_body
from trunkline.api.responses_protocol import ResponsesRequest
from trunkline.errors import GenerationFailed, QueueFull
from trunkline.models.tokenizer import Tokenizer

NEW = ("id", "created_at", "completed_at", "call_id", "item_id")


class Answers:
    """One case, answered in both ways."""

    def __init__(self, case: Case, **fields: Any) -> None:
        self._case = case
        self._wanted = ResponsesRequest.parse({"input": "Hi", **fields})
        self.kept: list[ResponseBody] = []

    def whole(self) -> dict[str, Any]:
        async def run() -> ResponseBody:
            answer, generation = self.start(random.Random(0))
            await generation.finish()
            return await answer.whole()

        return as_json(asyncio.run(run()))

    def events(self, seed: int) -> list[dict[str, Any]]:
        async def run() -> bytes:
            answer, _ = self.start(random.Random(seed))
            return b"".join([frame async for frames in answer.frames() for frame in frames])

        return read_events(asyncio.run(run()))

    def start(self, cuts: random.Random) -> tuple[ResponseAnswer, Any]:
        generation, chat = self._case._start(cuts)
        prompt: Any = None  # only reports look at it
        started = StartedChat("tiny", prompt, chat._plan, chat._constrained, None, generation)
        body = response_body(self._wanted, response_id="resp_1", model="tiny", temperature=1.0, top_p=1.0)
        return ResponseAnswer(body, started, places=["input"], keep=self.kept.append), generation


def as_json(body: ResponseBody) -> dict[str, Any]:
    decoded: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(body))
    return decoded


def read_events(text: bytes) -> list[dict[str, Any]]:
    """The events of a stream; asserts that each says its type twice, and that they are numbered."""
    frames = text.decode().split("\n\n")[:-1]
    events = []
    for number, frame in enumerate(frames):
        first, second = frame.split("\n")
        event = json.loads(second.removeprefix("data: "))
        assert first == f"event: {event['type']}"
        assert event["sequence_number"] == number
        events.append(event)
    return events


def without_new(value: Any) -> Any:
    """Without what is new in every answer."""
    if isinstance(value, dict):
        return {key: without_new(child) for key, child in value.items() if key not in NEW}
    return [without_new(child) for child in value] if isinstance(value, list) else value


def told(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items that the events between the first two and the last tell of; asserts their grammar."""
    items: list[dict[str, Any]] = []
    inside = None
    for event in events:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert inside is None
            inside, text = event["item"], ""
            assert inside["status"] == "in_progress"
            assert event["output_index"] == len(items)
            assert not inside.get("content") and not inside.get("arguments")
            expected = ["function_call_arguments"] if inside["type"] == "function_call" else ["content_part"]
            continue
        assert inside is not None
        assert event["output_index"] == len(items)
        if kind == "output_item.done":
            assert expected == []
            assert event["item"]["id"] == inside["id"]
            assert (
                event["item"].get("arguments") or "".join(part["text"] for part in event["item"].get("content", []))
            ) == text
            items.append(event["item"])
            inside = None
            continue
        assert event["item_id"] == inside["id"]
        assert event.get("content_index", 0) == 0
        if kind.endswith(".delta"):
            text += event["delta"]
        elif kind == "content_part.added":
            assert expected == ["content_part"]
            assert event["part"]["text"] == ""
            expected = ["reasoning_text" if inside["type"] == "reasoning" else "output_text"]
        elif kind == "content_part.done":
            assert event["part"]["text"] == text and expected == ["content_part.done"]
            expected = []
        else:
            assert kind == f"{expected[0]}.done"
            assert event.get("text", event.get("arguments")) == text
            expected = [] if kind == "function_call_arguments.done" else ["content_part.done"]
    assert inside is None
    return items


def check(answers: Answers, seed: int) -> dict[str, Any]:
    """Asserts that stream and whole are one; returns the response."""
    whole = answers.whole()
    first, second, *middle, last = answers.events(seed)
    assert (first["type"], second["type"]) == ("response.created", "response.in_progress")
    assert first["response"]["status"] == "in_progress" and first["response"]["output"] == []
    assert last["type"] == f"response.{whole['status']}"
    assert told(middle) == last["response"]["output"]
    assert without_new(last["response"]) == without_new(whole)
    assert len(answers.kept) == 2
    return whole


def kinds(response: dict[str, Any]) -> list[tuple[str, str]]:
    return [(item["type"], item["status"]) for item in response["output"]]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("choice", ["auto", "required", "none", named("weather")], ids=str)
@pytest.mark.parametrize("reason", ["stop", "length"])
def test_events_tell_the_response(tokenizer: Tokenizer, text: str, choice: Any, reason: str) -> None:
    for seed in range(3):
        response = check(Answers(Case(tokenizer, [text], reason, tool_choice=choice, logprobs=True)), seed)
        assert response["status"] == ("completed" if reason == "stop" else "incomplete")


def test_a_text(tokenizer: Tokenizer) -> None:
    response = check(Answers(Case(tokenizer, ["It rains."], tools=None)), 0)
    (item,) = response["output"]
    assert item["id"].startswith("msg_")
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    assert item["content"] == [{"type": "output_text", "text": "It rains.", "annotations": [], "logprobs": []}]
    assert response["incomplete_details"] is None and response["completed_at"]
    assert response["usage"] == {
        "input_tokens": 3,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": 10,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 13,
    }


def test_nothing_is_an_empty_text(tokenizer: Tokenizer) -> None:
    (item,) = check(Answers(Case(tokenizer, [""], tools=None)), 0)["output"]
    assert item["content"][0]["text"] == ""


def test_calls_that_must_be_made_leave_no_text(tokenizer: Tokenizer) -> None:
    assert check(Answers(Case(tokenizer, ["<tool_call>"], "length", tool_choice="required")), 0)["output"] == []


def test_text_and_calls_in_their_order(tokenizer: Tokenizer) -> None:
    response = check(Answers(Case(tokenizer, [f"I look. {CALLS} Done."])), 1)
    assert kinds(response) == [
        ("message", "completed"),
        ("function_call", "completed"),
        ("function_call", "completed"),
        ("message", "completed"),
    ]
    _, first, second, last = response["output"]
    assert (first["name"], json.loads(first["arguments"])) == ("weather", {"place": "Köln", "x": [1]})
    assert first["id"].startswith("fc_") and first["call_id"].startswith("call_")
    assert first["call_id"] != second["call_id"]
    assert last["content"][0]["text"].strip() == "Done."


def test_what_was_cut_is_incomplete(tokenizer: Tokenizer) -> None:
    response = check(Answers(Case(tokenizer, [f"I look. {CALLS[:50]}"], "length")), 0)
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert kinds(response) == [("message", "completed"), ("function_call", "incomplete")]
    assert kinds(check(Answers(Case(tokenizer, ["I lo"], "length")), 0)) == [("message", "incomplete")]
    second = '<tool_call>[{"name": "weather", "arguments": {}}, {"name": "rain", "arguments": {"place": "K'
    cut = check(Answers(Case(tokenizer, [second], "length")), 0)
    assert kinds(cut) == [("function_call", "completed"), ("function_call", "incomplete")]


def test_a_stop_string_leaves_a_call_incomplete(tokenizer: Tokenizer) -> None:
    response = check(Answers(Case(tokenizer, [CALLS], stop="Kö")), 0)
    assert (response["status"], kinds(response)) == ("completed", [("function_call", "incomplete")])


def test_thoughts_stand_first(tokenizer: Tokenizer) -> None:
    response = check(Answers(thinking_case(tokenizer, [f"{THOUGHT}I look. {CALL}"])), 2)
    assert kinds(response) == [("reasoning", "completed"), ("message", "completed"), ("function_call", "completed")]
    thought = response["output"][0]
    assert thought["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert thought["summary"] == [] and thought["id"].startswith("rs_")
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] == len(THOUGHT)
    cut = check(Answers(thinking_case(tokenizer, [THOUGHT[:9]], "length")), 0)
    assert kinds(cut) == [("reasoning", "incomplete")]


def test_logprobs_of_a_text_are_those_of_all_tokens(tokenizer: Tokenizer) -> None:
    answers = Answers(Case(tokenizer, ["It räins."], tools=None, logprobs=True))
    events = answers.events(3)
    (item,) = events[-1]["response"]["output"]
    scores = item["content"][0]["logprobs"]
    assert bytes(byte for score in scores[:-1] for byte in score["bytes"]).decode() == "It räins."
    assert [
        score for event in events if event["type"] == "response.output_text.delta" for score in event["logprobs"]
    ] == scores


def test_logprobs_beside_thoughts_and_calls_are_those_of_the_text(tokenizer: Tokenizer) -> None:
    response = check(Answers(thinking_case(tokenizer, [f"{THOUGHT} Hm. {CALL} Hm."], logprobs=True)), 0)
    texts = [item for item in response["output"] if item["type"] == "message"]
    assert len(texts) == 2
    for item in texts:
        (part,) = item["content"]
        assert bytes(byte for score in part["logprobs"] for byte in score["bytes"]).decode() == part["text"].strip()


def test_a_failure_is_the_last_event(tokenizer: Tokenizer) -> None:
    answers = Answers(Case(tokenizer, ["It rains."], tools=None))

    async def run(error: Any) -> list[dict[str, Any]]:
        answer, _ = answers.start(random.Random(1))
        frames = answer.frames()
        sent = b"".join(await anext(frames))
        await frames.aclose()
        return read_events(sent + answer.failed(error))

    *events, last = asyncio.run(run(GenerationFailed("No 'messages[0]' left.")))
    assert last["type"] == "response.failed"
    response = last["response"]
    assert response["status"] == "failed"
    assert response["error"] == {"code": "server_error", "message": "No 'input' left."}
    assert kinds(response) == [("message", "incomplete")]
    said = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    assert response["output"][0]["content"][0]["text"] == said != ""
    assert as_json(answers.kept[-1]) == response
    *_, last = asyncio.run(run(QueueFull("requests", "the queue", 2, 1, retry_after=1)))
    assert last["response"]["error"]["code"] == "rate_limit_exceeded"


def test_a_failure_before_the_first_event(tokenizer: Tokenizer) -> None:
    """A ping has sent the status by then. Clients want to be told of a response before it fails."""
    answer, _ = Answers(Case(tokenizer, ["a"])).start(random.Random(1))
    events = read_events(answer.failed(GenerationFailed("No.")))
    assert [event["type"] for event in events] == ["response.created", "response.in_progress", "response.failed"]


def test_the_request_is_told_again(tokenizer: Tokenizer) -> None:
    tool = {"type": "function", "name": "f", "strict": True}
    fields: dict[str, Any] = {
        "metadata": {"a": "b"},
        "instructions": "x",
        "user": "u",
        "tools": [tool],
        "reasoning": {"effort": "low"},
    }
    fields |= {"text": {"format": {"type": "json_object"}}, "previous_response_id": "resp_0", "store": False}
    response = Answers(Case(tokenizer, ["a"]), **fields).whole()
    assert response["text"] == {"format": {"type": "json_object"}, "verbosity": "medium"}
    assert response["tools"] == [{"parameters": None, **tool}]
    assert response["reasoning"] == {"effort": "low", "summary": None}
    for name in ("metadata", "instructions", "user", "previous_response_id", "store"):
        assert response[name] == fields[name]
    plain = Answers(Case(tokenizer, ["a"])).whole()
    assert (plain["store"], plain["parallel_tool_calls"], plain["truncation"]) == (True, True, "disabled")
    assert (plain["tool_choice"], plain["tools"], plain["metadata"]) == ("auto", [], {})
    assert plain["text"]["format"] == {"type": "text"}
    assert not {"valid", "validation_error", "cache_report"} & plain.keys()
