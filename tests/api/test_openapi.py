"""/openapi.json describes what is there: every route, its errors, its streams, the ranges of numbers; and answers are as it says."""

import json
from typing import Any

import httpx
import msgspec
import pytest
import schemathesis

from tests.api.serving import MODEL, sse_events
from tests.api.test_app import connect, make_service
from tests.api.test_tools import named
from tests.api.test_tools_live import TOOLS
from trunkline.api import app
from trunkline.api.answer_shapes import (
    AnthropicError,
    ChatChunk,
    ChatCompletion,
    Message,
    MessageEvent,
    TextCompletion,
)
from trunkline.api.errors import ErrorAnswer
from trunkline.api.models_route import Model, ModelList
from trunkline.api.protocol import ChatRequest, CompletionRequest
from trunkline.api.response_format import GrammarDefaults
from trunkline.api.responses_answer import ResponseBody, ResponseEvent
from trunkline.errors import InvalidParameter

HELLO = [{"role": "user", "content": "hello world"}]
UNLIKELY = {"type": "string", "pattern": r"(a|b)\1"}


async def read_document(**config: Any) -> dict[str, Any]:
    async with connect(make_service(**config)) as client:
        document: dict[str, Any] = (await client.get("/openapi.json")).json()
    return document


async def test_it_is_a_document_of_openapi() -> None:
    schemathesis.openapi.from_dict(await read_document()).validate()


async def test_every_route_is_told_of_with_its_errors_and_its_address() -> None:
    document = await read_document()
    for route in app.ROUTES:
        described = document["paths"][route.path.replace(":path}", "}")][route.method.lower()]
        assert described["description"] and described["tags"]
        answers = described["responses"]
        assert {"200", "500"} <= answers.keys()
        assert ("401" in answers) == bool(described.get("security")) == route.protected
        assert ("413" in answers) == ("requestBody" in described) == bool(route.bodies)
        for status, answer in answers.items():
            assert answer["headers"]["x-request-id"]["required"]
            assert ("x-ignored-fields" in answer["headers"]) == bool(route.bodies)
            assert not answer["headers"].get("x-ignored-fields", {}).get("required", False)
            assert answer["content"].keys() == (
                {route.media_type} | ({"text/event-stream"} if route.event else set())
                if status == "200"
                else {"application/json"}
            )
        in_path = {parameter["name"] for parameter in described["parameters"] if parameter["in"] == "path"}
        assert all(f"{{{name}" in route.path for name in in_path)
        assert len(in_path) == route.path.count("{")


async def test_numbers_have_the_ranges_that_it_tells() -> None:
    schemas = (await read_document())["components"]["schemas"]
    num_tried = 0
    for body, least in ((ChatRequest, {"messages": HELLO}), (CompletionRequest, {"prompt": "x"})):
        for field, described in schemas[body.__name__]["properties"].items():
            if "minimum" not in described or field in (
                "best_of",
                "truncate_prompt_tokens",
            ):  # which other fields bound, too
                continue
            needed = (
                {"logprobs": True}
                if field == "top_logprobs"
                else {"max_tokens": 2**31 - 1}
                if field == "min_tokens"
                else {}
            )
            low, high = described["minimum"], described["maximum"]
            for value in (low, high):
                if (field, value, body) != ("max_tokens", 0, CompletionRequest):  # only with an echo
                    body.parse({**least, **needed, field: max(value, 1) if field == "max_tokens" else value}).sampling(
                        {}, GrammarDefaults()
                    )
            for value in (low - 1, high + 1):
                with pytest.raises(InvalidParameter):
                    body.parse({**least, **needed, field: value}).sampling({}, GrammarDefaults())
            num_tried += 1
    assert num_tried > 20


TELLING: dict[str, dict[str, Any]] = {
    "plain": {},
    "scores": {"logprobs": True, "top_logprobs": 2, "n": 2, "return_token_ids": True},
    "calls": {"tools": TOOLS, "tool_choice": named("weather"), "max_tokens": 100},
    "verdict": {"guided_json": UNLIKELY, "grammar_unsupported": "validate", "close_on_length": True},
    "report": {"cache_report": True, "cache_control": {"type": "ephemeral", "ttl": 60}, "documents": ["a", "b"]},
}


def read_chat(http: httpx.Client, **fields: Any) -> httpx.Response:
    answer = http.post("/v1/chat/completions", json={"model": MODEL, "messages": HELLO * 4, "max_tokens": 8, **fields})
    assert answer.status_code == 200, answer.text
    return answer


@pytest.mark.parametrize("fields", TELLING.values(), ids=TELLING)
def test_chats_have_their_shape(http: httpx.Client, fields: dict[str, Any]) -> None:
    whole = read_chat(http, **fields).json()
    msgspec.convert(whole, ChatCompletion)
    usage = {"stream_options": {"include_usage": True}}
    *events, _ = sse_events(read_chat(http, **fields, stream=True, **usage).text)
    chunks = [msgspec.json.decode(event, type=ChatChunk) for event in events]
    assert len(chunks) > 2
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({**whole, "more": 1}, ChatCompletion)


@pytest.mark.parametrize(
    "fields",
    [{}, {"logprobs": 1, "echo": True, "prompt_logprobs": 1, "return_token_ids": True, "cache_report": True}],
    ids=len,
)
def test_completions_have_their_shape(http: httpx.Client, fields: dict[str, Any]) -> None:
    body = {"model": MODEL, "prompt": "hello", "max_tokens": 3, **fields}
    msgspec.convert(http.post("/v1/completions", json=body).json(), TextCompletion)
    body = {**body, "stream": True, "prompt_logprobs": None, "stream_options": {"include_usage": True}}
    *events, _ = sse_events(http.post("/v1/completions", json=body).text)
    assert [msgspec.json.decode(event, type=TextCompletion) for event in events]


@pytest.mark.parametrize("fields", [{}, {"tool_choice": {"type": "any"}}, {"cache_report": True}], ids=str)
def test_messages_have_their_shape(http: httpx.Client, fields: dict[str, Any]) -> None:
    tools = [{"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]} for tool in TOOLS]
    body = {"model": MODEL, "messages": HELLO, "max_tokens": 60, "tools": tools, **fields}
    msgspec.convert(http.post("/v1/messages", json=body).json(), Message)
    lines = http.post("/v1/messages", json={**body, "stream": True}).text.splitlines()
    events = [
        msgspec.json.decode(line.removeprefix("data: "), type=MessageEvent)
        for line in lines
        if line.startswith("data: ")
    ]
    assert len(events) > 4


@pytest.mark.parametrize(
    "fields", [{}, {"tool_choice": "required"}, {"include": ["message.output_text.logprobs"]}], ids=str
)
def test_responses_have_their_shape(http: httpx.Client, fields: dict[str, Any]) -> None:
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    body = {"model": MODEL, "input": "hello", "max_output_tokens": 60, **fields}
    body |= {"tools": tools} if "tool_choice" in fields else {}
    msgspec.convert(http.post("/v1/responses", json=body).json(), ResponseBody)
    lines = http.post("/v1/responses", json={**body, "stream": True}).text.splitlines()
    events = [
        msgspec.json.decode(line.removeprefix("data: "), type=ResponseEvent)
        for line in lines
        if line.startswith("data: ")
    ]
    assert len(events) > 4


def test_errors_and_models_have_their_shape(http: httpx.Client) -> None:
    for answer in (http.get("/v1/nothing"), http.get("/v1/completions"), http.post("/v1/completions", content=b"{")):
        assert answer.status_code >= 400
        msgspec.json.decode(answer.content, type=ErrorAnswer)
    msgspec.json.decode(http.post("/v1/messages", content=b"{").content, type=AnthropicError)
    (first, *_) = msgspec.json.decode(http.get("/v1/models").content, type=ModelList).data
    assert msgspec.json.decode(http.get(f"/v1/models/{first.id}").content, type=Model) == first
    assert json.loads(http.get("/health").content) == {"status": "ok"}
