"""/v1/messages on the wire: answers, events, what is cached and kept, and every error in Anthropic's shape."""

import asyncio
import json
import logging
from typing import Any

import httpx
import jsonschema
import pytest

from tests.api.serving import MODEL
from tests.api.test_app import KEY, connect, make_service
from tests.api.test_messages_answer import events, put_together, without_ids
from tests.api.test_reasoning import thinking  # noqa: F401 (a fixture)
from trunkline.api import sse
from trunkline.api.messages_errors import MessageStream, anthropic_error
from trunkline.api.request_log import Record
from trunkline.errors import GenerationFailed

HELLO: Any = [{"role": "user", "content": "hello world"}]
PAGES: Any = [
    {"role": "user", "content": "a page holds sixteen tokens; this message has a few pages of them, and a name: "}
]
SCHEMA: Any = {
    "type": "object",
    "properties": {"place": {"type": "string", "maxLength": 6}, "days": {"enum": [1, 2]}},
    "required": ["place", "days"],
    "additionalProperties": False,
}
TOOLS: Any = [{"name": "weather", "description": "Tomorrow's", "input_schema": SCHEMA}]
ONE: Any = {"type": "any", "disable_parallel_tool_use": True}
ROOM: Any = {"max_tokens": 150, "close_on_length": True, "temperature": 1, "seed": 1}
MARK = {"type": "ephemeral"}


def raw(http: httpx.Client, path: str = "", **fields: Any) -> httpx.Response:
    body = {"model": MODEL, "messages": HELLO, "temperature": 0, "max_tokens": 12, **fields}
    return http.post(f"/v1/messages{path}", json={name: value for name, value in body.items() if value is not None})


def ask(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    response = raw(http, **fields)
    assert response.status_code == 200, response.text
    message: dict[str, Any] = response.json()
    return message


def stream(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    response = raw(http, stream=True, **fields)
    assert response.status_code == 200, response.text
    return put_together(events(response.text))


def error_of(response: httpx.Response, status: int, kind: str) -> str:
    """Its message; asserts that all else is as Anthropic has it."""
    assert response.status_code == status, response.text
    body = response.json()
    assert body.keys() == {"type", "error", "request_id"}
    assert body["type"] == "error"
    assert body["error"].keys() == {"type", "message"}
    assert body["error"]["type"] == kind
    assert body["request_id"] == response.headers["request-id"]
    message: str = body["error"]["message"]
    return message


# ── answers ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_answer_has_what_anthropics_has(http: httpx.Client) -> None:
    response = raw(http)
    message = response.json()
    assert message["id"].startswith("msg_")
    assert (message["type"], message["role"], message["model"]) == ("message", "assistant", MODEL)
    (block,) = message["content"]
    assert block.keys() == {"type", "text"}
    assert (message["stop_reason"], message["stop_sequence"]) == ("max_tokens", None)
    usage = message["usage"]
    assert usage.keys() == {"input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens", "output_tokens"}
    assert usage["output_tokens"] == 12
    assert response.headers["request-id"] == response.headers["x-request-id"]


def test_the_prompt_and_the_text_are_those_of_a_chat(http: httpx.Client) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "the"}, {"role": "user", "content": "that is your world"}]
    system = {"role": "system", "content": "hello"}
    body = {"model": MODEL, "messages": [system, *messages], "temperature": 0, "max_tokens": 12}
    chat = http.post("/v1/chat/completions", json=body).json()
    own = ask(http, messages=messages, system="hello")
    assert own["content"][0]["text"] == chat["choices"][0]["message"]["content"]
    counted = raw(http, "/count_tokens", messages=messages, system="hello", max_tokens=None).json()
    assert counted == {"input_tokens": chat["usage"]["prompt_tokens"]}


def test_headers_of_the_client_are_accepted(http: httpx.Client) -> None:
    headers = {"x-api-key": "any", "anthropic-version": "2023-06-01", "anthropic-beta": "a-1,b-2"}
    body = {"model": MODEL, "messages": HELLO, "max_tokens": 1}
    assert http.post("/v1/messages?beta=true", json=body, headers=headers).status_code == 200


@pytest.mark.slow
def test_stream_says_the_same(http: httpx.Client) -> None:
    """Twenty seeds of noise: characters that span tokens, control characters, cut ones at the end."""
    for seed in range(20):
        fields = {"temperature": 1, "seed": seed, "max_tokens": 24, "cache_salt": f"twice-{seed}"}
        ask(http, **fields)
        plain, streamed = ask(http, **fields), stream(http, **fields)
        assert {**streamed, "id": ""} == {**plain, "id": ""}


def test_a_stop_sequence_is_told_and_not_shown(http: httpx.Client) -> None:
    text = ask(http, max_tokens=40)["content"][0]["text"]
    stop = text[5:8]
    plain = ask(http, max_tokens=40, stop_sequences=["never said", stop])
    assert plain["content"][0]["text"] == text[: text.index(stop)]
    assert (plain["stop_reason"], plain["stop_sequence"]) == ("stop_sequence", stop)
    assert {**stream(http, max_tokens=40, stop_sequences=["never said", stop]), "id": ""} == {**plain, "id": ""}


def test_a_last_message_of_the_assistant_goes_on(http: httpx.Client) -> None:
    begun = {"role": "assistant", "content": "the world"}
    open_ended = ask(http, messages=[*HELLO, begun])["usage"]["input_tokens"]
    closed = raw(http, "/count_tokens", messages=[*HELLO, begun, *HELLO]).json()["input_tokens"]
    assert open_ended < closed - len("hello world<|im_end|>") / 4


def test_streaming_headers(http: httpx.Client) -> None:
    response = raw(http, stream=True)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.text.startswith("event: message_start\ndata: {")
    assert response.text.endswith('event: message_stop\ndata: {"type":"message_stop"}\n\n')
    assert response.headers["request-id"]


@pytest.mark.slow
@pytest.mark.parametrize("choice", [ONE, {"type": "tool", "name": "weather"}], ids=["any", "tool"])
def test_tools(http: httpx.Client, choice: Any) -> None:
    fields = {**ROOM, "tools": TOOLS, "tool_choice": choice}
    message = ask(http, **fields)
    (call,) = message["content"]
    assert (call["type"], call["name"], message["stop_reason"]) == ("tool_use", "weather", "tool_use")
    jsonschema.validate(call["input"], SCHEMA)
    streamed = stream(http, **fields)
    assert without_ids(streamed)["content"] == without_ids(message)["content"]
    assert streamed["stop_reason"] == "tool_use"
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": "rain"}
    turns = [*HELLO, {"role": "assistant", "content": message["content"]}, {"role": "user", "content": [result]}]
    again = ask(http, messages=turns, tools=TOOLS, tool_choice={"type": "none"})
    assert again["content"][0]["type"] == "text"
    assert again["usage"]["cache_read_input_tokens"] > message["usage"]["output_tokens"], "the call is found, too"


@pytest.mark.slow
def test_output_format(http: httpx.Client) -> None:
    fields = {**ROOM, "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}, "effort": "low"}}
    message = ask(http, **fields)
    jsonschema.validate(json.loads(message["content"][0]["text"]), SCHEMA)
    assert stream(http, **fields)["content"] == message["content"]


@pytest.mark.slow
def test_thinking(thinking: httpx.Client) -> None:  # noqa: F811
    fields = {**ROOM, "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}
    fields["thinking"] = {"type": "adaptive"}
    message = ask(thinking, **fields)
    thought, said = message["content"]
    assert (thought["type"], said["type"]) == ("thinking", "text")
    assert message["usage"]["output_tokens_details"]["thinking_tokens"] > 0
    assert stream(thinking, **fields)["content"] == message["content"]
    hidden = ask(thinking, **{**fields, "thinking": {**fields["thinking"], "display": "omitted"}})
    assert hidden["content"] == [said]
    (unthought,) = ask(thinking, **{**fields, "thinking": {"type": "disabled"}})["content"]
    assert unthought["type"] == "text"


# ── the cache ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def counts(message: dict[str, Any]) -> tuple[int, int, int]:
    usage = message["usage"]
    return usage["input_tokens"], usage["cache_creation_input_tokens"], usage["cache_read_input_tokens"]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_usage_is_counted_as_anthropic_counts(http: httpx.Client, is_streamed: bool) -> None:
    fields: Any = {"messages": PAGES, "cache_salt": f"usage-{is_streamed}"}
    read = stream if is_streamed else ask
    length = raw(http, "/count_tokens", messages=PAGES).json()["input_tokens"]
    pages = (length - 1) // 16 * 16
    assert counts(read(http, **fields)) == (length, 0, 0), "without a mark nothing is counted as kept"
    assert counts(read(http, **fields)) == (length - pages, 0, pages)
    fields["cache_salt"] += "-marked"
    assert counts(read(http, **fields, cache_control=MARK)) == (length % 16, length // 16 * 16, 0)
    assert counts(read(http, **fields, cache_control=MARK))[2] == pages


def test_a_mark_pins_up_to_the_end_of_its_message(http: httpx.Client) -> None:
    system = [{"type": "text", "text": PAGES[0]["content"], "cache_control": {**MARK, "ttl": "1h"}}]
    fields: Any = {"system": system, "cache_salt": "marked"}
    _, created, _ = counts(ask(http, **fields))
    (pin,) = [pin for pin in http.get("/v1/cache/pins").json()["data"] if pin["cache_salt"] == "marked"]
    assert pin["pinned_tokens"] == created > 16
    assert 3500 < pin["expires_in_seconds"] <= 3600
    assert created < raw(http, "/count_tokens", system=system).json()["input_tokens"] - len("hello world") // 4


def test_without_max_tokens_to_spend_the_prompt_is_cached(http: httpx.Client) -> None:
    fields: Any = {"messages": PAGES, "cache_salt": "warmed", "cache_control": MARK}
    warmed = ask(http, **fields, max_tokens=0)
    assert (warmed["content"], warmed["stop_reason"], warmed["usage"]["output_tokens"]) == ([], "max_tokens", 0)
    assert warmed["usage"]["cache_creation_input_tokens"] > 0
    assert counts(ask(http, **fields))[2] > 0
    assert stream(http, **fields, max_tokens=0)["content"] == []


def test_cache_report(http: httpx.Client) -> None:
    words = [{"role": "user", "content": "of these words nobody else has asked, under whatever salt: xyzzy plugh"}]
    fields: Any = {"messages": words, "cache_report": True}
    assert ask(http, **fields)["cache_report"]["reason"] != "complete"
    response = raw(http, **fields, stream=True)
    assert events(response.text)[-2]["cache_report"]["reason"] == "complete"


# ── errors ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": None}, "'max_tokens' is missing"),
        ({"temperature": 9}, "'temperature' is 9"),
        ({"top_k": -5}, "'top_k' is -5"),
        ({"stop_sequences": [""]}, "'stop_sequences' is ''"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "'messages[0].content[0]' is a block of type 'image'"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 2000}, "--reasoning-parser"),
        ({"tools": [{"name": "a", "input_schema": {"type": "object", "properties": {"b": {"type": "x"}}}}], "tool_choice": ONE},
         "tools[0].input_schema: Invalid schema for function 'a'"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "x"}}}}, "output_config.format.schema: Invalid schema"),
        ({"messages": [{"role": "user", "content": "a b " * 5000}]}, "prompt is too long: This model's maximum context length"),
    ],
)  # fmt: skip
def test_bad_requests(http: httpx.Client, fields: Any, words: str, is_streamed: bool) -> None:
    assert words in error_of(raw(http, **fields, stream=is_streamed), 400, "invalid_request_error")


def test_other_errors(http: httpx.Client) -> None:
    assert "'nobody'" in error_of(raw(http, model="nobody"), 404, "not_found_error")
    assert "'nobody'" in error_of(raw(http, "/count_tokens", model="nobody"), 404, "not_found_error")
    assert "POST" in error_of(http.get("/v1//messages/"), 405, "invalid_request_error")
    assert "batches" in error_of(http.post("/v1/messages/batches"), 404, "not_found_error")
    assert "JSON" in error_of(http.post("/v1/messages", content=b"{x"), 400, "invalid_request_error")


def test_other_routes_keep_their_errors(http: httpx.Client) -> None:
    for response in (http.post("/v1/chat/completions", json={}), http.get("/v1/messagesx")):
        assert response.json()["error"].keys() == {"message", "type", "param", "code"}
        assert "request-id" not in response.headers


async def test_errors_before_the_route(caplog: pytest.LogCaptureFixture) -> None:
    service = make_service(api_keys=(KEY,), max_body_bytes=99)
    async with connect(service) as client:
        for headers in ({}, {"x-api-key": "wrong"}):
            response = await client.post("/v1//messages", headers=headers)
            assert "key" in error_of(response, 401, "authentication_error")
            assert response.headers["www-authenticate"] == "Bearer"
        own = {"x-api-key": KEY}
        response = await client.post("/v1/messages", headers=own)
        assert "loading" in error_of(response, 503, "overloaded_error")
        assert response.headers["retry-after"] == "1"
        service.check_ready = lambda: None  # type: ignore[method-assign]
        response = await client.post("/v1/messages", headers=own, content=b"x" * 100)
        assert "100 bytes" in error_of(response, 413, "request_too_large")
        service.check_ready = lambda: 1 // 0  # type: ignore[assignment, method-assign]
        with caplog.at_level(logging.CRITICAL):
            response = await client.post("/v1/messages", headers=own)
        assert response.headers["request-id"] in error_of(response, 500, "api_error")


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, "invalid_request_error"), (422, "invalid_request_error"), (403, "permission_error"), (429, "rate_limit_error"),
     (500, "api_error"), (502, "api_error"), (503, "overloaded_error")],
)  # fmt: skip
def test_types_of_errors(status: int, kind: str) -> None:
    body = anthropic_error(status, {"message": "Why.", "type": "t", "param": None, "code": None})
    assert body == {"type": "error", "error": {"type": kind, "message": "Why."}}


async def test_an_error_in_the_middle_of_a_stream_is_an_event() -> None:
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def frames() -> Any:
        yield [b"event: message_start\ndata: {}\n\n"]
        raise GenerationFailed("The worker failed.")

    told: list[str] = []
    generation: Any = type("Running", (), {"close": lambda _: None, "is_running": True})()
    response = MessageStream(generation, frames(), on_error=lambda error: told.append(error.message))
    record = Record("req_1")
    await response({"type": "http", "state": {"record": record}}, receive, send)
    assert record.error == "internal_error"
    last = events(sent[-1]["body"].decode())
    assert last == [{"type": "error", "error": {"type": "api_error", "message": "The worker failed."}}]
    assert told == ["The worker failed."]


async def test_while_nothing_is_written_there_are_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "PING_SECONDS", 0.0)
    pinged = asyncio.Event()
    sent = b""

    async def send(message: Any) -> None:
        nonlocal sent
        sent += message.get("body", b"")
        if b"ping" in sent:
            pinged.set()

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def frames() -> Any:
        await pinged.wait()
        yield [b'event: message_stop\ndata: {"type":"message_stop"}\n\n']

    generation: Any = type("Running", (), {"close": lambda _: None, "is_running": True})()
    await MessageStream(generation, frames(), on_error=lambda _: None)({"type": "http"}, receive, send)
    first, *_, last = events(sent.decode())
    assert (first, last) == ({"type": "ping"}, {"type": "message_stop"})
