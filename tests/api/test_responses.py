"""/v1/responses through OpenAI's own client: answered, streamed, parsed, called, continued, read again, refused."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import openai
import pytest
from pydantic import BaseModel

from tests.api.serving import MODEL, Server, metrics, wait_idle
from tests.api.test_chat import raw as raw_chat
from tests.api.test_responses_answer import read_events, told, without_new

DOCS = Path(__file__).parents[2] / "docs"
PLACE = {
    "type": "object",
    "properties": {
        "place": {"type": "string", "maxLength": 6},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["place", "days"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "name": "weather", "description": "The weather", "parameters": PLACE, "strict": True}
ROOM: dict[str, Any] = {"max_output_tokens": 120, "temperature": 1, "extra_body": {"close_on_length": True, "seed": 1}}
HELLO: Any = {"model": MODEL, "input": "hello world", "max_output_tokens": 12, "temperature": 0}


class Pet(BaseModel):
    kind: Literal["cat", "dog"]
    open: bool


def raw(http: httpx.Client, **fields: Any) -> httpx.Response:
    return http.post("/v1/responses", json={**HELLO, **fields})


def prompt_of(http: httpx.Client, messages: list[dict[str, Any]]) -> int:
    answer = raw_chat(http, messages=messages, max_tokens=1).json()
    num: int = answer["usage"]["prompt_tokens"]
    return num


def test_a_text_is_that_of_a_chat(client: openai.OpenAI, http: httpx.Client) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello world"}]
    chat = raw_chat(http, messages=messages, max_tokens=12, temperature=0).json()
    response = client.responses.create(**HELLO, instructions="Be brief.")
    assert response.output_text == chat["choices"][0]["message"]["content"]
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    usage = response.usage
    assert usage is not None
    assert (usage.input_tokens, usage.output_tokens) == (chat["usage"]["prompt_tokens"], 12)
    again = client.responses.create(**HELLO, instructions="Be brief.").usage
    assert again is not None and again.input_tokens_details.cached_tokens >= 16


@pytest.mark.parametrize("seed", range(8))
def test_a_stream_adds_up(client: openai.OpenAI, seed: int) -> None:
    fields: Any = {**HELLO, **ROOM, "max_output_tokens": 24, "extra_body": {"seed": seed, "stop": ["e"]}}
    whole = client.responses.create(**fields)
    with client.responses.stream(**fields) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
    final = client.responses.create(**fields, stream=True)
    (last,) = [event.response for event in final if event.type in ("response.completed", "response.incomplete")]
    assert "".join(deltas) == last.output_text == whole.output_text
    assert without_new(last.to_dict()) == without_new({**whole.to_dict(), "usage": last.to_dict()["usage"]})


def test_the_events_of_a_stream(http: httpx.Client) -> None:
    response = raw(http, stream=True, top_logprobs=2)
    assert response.headers["content-type"].startswith("text/event-stream")
    first, second, *middle, last = read_events(response.content)
    assert [event["type"] for event in (first, second, last)] == [
        "response.created", "response.in_progress", "response.incomplete",
    ]  # fmt: skip
    (item,) = told(middle)
    assert last["response"]["output"] == [item]
    scores = item["content"][0]["logprobs"]
    assert len(scores) == 12 and all(len(score["top_logprobs"]) == 2 for score in scores)


@pytest.mark.slow
def test_parse(client: openai.OpenAI) -> None:
    for _ in range(2):
        response = client.responses.parse(model=MODEL, input="hello", text_format=Pet, **ROOM)
        assert isinstance(response.output_parsed, Pet)
    with client.responses.stream(model=MODEL, input="hello", text_format=Pet, **ROOM) as stream:
        assert isinstance(stream.get_final_response().output_parsed, Pet)


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_is_called_and_answered(client: openai.OpenAI, http: httpx.Client, stream: bool) -> None:
    fields: Any = {"model": MODEL, "input": "hello", "tools": [TOOL], "tool_choice": "required", **ROOM}
    fields["parallel_tool_calls"] = False
    if stream:
        with client.responses.stream(**fields) as events:
            arguments = "".join(
                event.delta for event in events if event.type == "response.function_call_arguments.delta"
            )
            response: Any = events.get_final_response()
    else:
        response = client.responses.create(**fields)
        arguments = response.output[0].arguments
    (call,) = response.output
    assert (call.type, call.name, call.status, response.status) == (
        "function_call",
        "weather",
        "completed",
        "completed",
    )
    assert call.arguments == arguments
    assert json.loads(arguments).keys() == {"place", "days"}
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sun"}
    continued = client.responses.create(**{**HELLO, "input": [output]}, previous_response_id=response.id, tools=[TOOL])
    by_hand: Any = [{"role": "user", "content": "hello"}, call.to_dict(), output]
    sent = client.responses.create(**{**HELLO, "input": by_hand}, tools=[TOOL])
    assert continued.output_text == sent.output_text
    assert continued.usage.input_tokens == sent.usage.input_tokens


async def test_async(server: Server) -> None:
    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0) as client:
        whole = await client.responses.create(**HELLO)
        async with client.responses.stream(**HELLO) as stream:
            text = "".join([event.delta async for event in stream if event.type == "response.output_text.delta"])
        assert text == whole.output_text


def test_a_conversation_goes_on(client: openai.OpenAI, http: httpx.Client) -> None:
    """With all of it in the prompt, but for the instructions."""
    fields: Any = {**HELLO, "extra_body": {"guided_choice": ["a", "b"]}}
    first = client.responses.create(**fields, instructions="Be brief.")
    second = client.responses.create(**fields, previous_response_id=first.id)
    third = client.responses.create(**fields, previous_response_id=second.id, instructions="Be kind.")
    turns = [
        message
        for response in (first, second)
        for message in (
            {"role": "user", "content": "hello world"},
            {"role": "assistant", "content": response.output_text},
        )
    ]
    last = {"role": "user", "content": "hello world"}
    assert second.usage.input_tokens == prompt_of(http, [*turns[:2], last])
    assert third.usage.input_tokens == prompt_of(http, [{"role": "system", "content": "Be kind."}, *turns, last])
    again = client.responses.create(**fields, previous_response_id=second.id)
    assert again.usage.input_tokens_details.cached_tokens >= second.usage.input_tokens // 16 * 16


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_kept_can_be_read_and_deleted(client: openai.OpenAI, stream: bool) -> None:
    if stream:
        with client.responses.stream(**HELLO) as events:
            response_id = next(event.response.id for event in events if event.type == "response.created")
            (made,) = [event.response for event in events if event.type == "response.incomplete"]
    else:
        made = client.responses.create(**HELLO)
        response_id = made.id
    assert client.responses.retrieve(response_id).to_dict() == made.to_dict()
    client.responses.delete(response_id)
    for call in (client.responses.retrieve, client.responses.delete, client.responses.input_items.list):
        with pytest.raises(openai.NotFoundError) as raised:
            call(response_id)
        assert raised.value.code == "response_not_found"
        assert response_id in raised.value.message


def test_no_response_is_made_in_the_background(client: openai.OpenAI) -> None:
    """One that was kept, one that runs, and one that there never was."""
    made = client.responses.create(**HELLO)
    with client.responses.stream(**HELLO) as events:
        running = next(event.response.id for event in events if event.type == "response.created")
        for response_id in (made.id, running):
            with pytest.raises(openai.BadRequestError, match="Cannot cancel a synchronous response") as raised:
                client.responses.cancel(response_id)
            assert raised.value.param == "response_id"
    with pytest.raises(openai.NotFoundError) as missing:
        client.responses.cancel("resp_none")
    assert missing.value.code == "response_not_found"


def test_delete_says_so(http: httpx.Client) -> None:
    response_id = raw(http).json()["id"]
    assert http.delete(f"/v1/responses/{response_id}").json() == {
        "id": response_id,
        "object": "response",
        "deleted": True,
    }


def test_what_was_not_to_be_kept_is_not(client: openai.OpenAI) -> None:
    response = client.responses.create(**HELLO, store=False)
    assert response.store is False
    with pytest.raises(openai.NotFoundError) as raised:
        client.responses.create(**HELLO, previous_response_id=response.id)
    assert (raised.value.param, raised.value.code) == ("previous_response_id", "previous_response_not_found")
    assert response.id in raised.value.message


def test_input_items(client: openai.OpenAI, http: httpx.Client) -> None:
    words = ["a", "b", "c", "d", "e"]
    given: Any = [{"role": "user", "content": word} for word in words]
    response = client.responses.create(**{**HELLO, "input": given})

    def read(**query: Any) -> list[str]:
        items: Any = client.responses.input_items.list(response.id, **query)
        return [item.content[0].text for item in items]

    assert read() == words[::-1]
    assert read(order="asc") == words
    assert read(order="asc", limit=2) == words, "the client turns the pages"
    page = http.get(f"/v1/responses/{response.id}/input_items", params={"limit": 2, "order": "asc"}).json()
    assert [item["id"] for item in page["data"]] == [page["first_id"], page["last_id"]]
    assert page["has_more"] is True
    rest = http.get(
        f"/v1/responses/{response.id}/input_items", params={"after": page["last_id"], "order": "asc"}
    ).json()
    assert (len(rest["data"]), rest["has_more"]) == (3, False)


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("order=up", "order"),
        ("limit=0", "limit"),
        ("limit=101", "limit"),
        ("limit=x", "limit"),
        ("after=msg_0", "after"),
    ],
)
def test_input_items_refuses(http: httpx.Client, query: str, param: str) -> None:
    response_id = raw(http).json()["id"]
    answer = http.get(f"/v1/responses/{response_id}/input_items?{query}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_a_kept_one_is_not_streamed_again(http: httpx.Client) -> None:
    response_id = raw(http).json()["id"]
    answer = http.get(f"/v1/responses/{response_id}?stream=true")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "stream")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"input": "hello " * 20_000}, 400, "input"),
        ({"model": "other"}, 404, "model"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            400,
            "input[0].content[0]",
        ),
        (
            {"text": {"format": {"type": "json_schema", "name": "n", "schema": {"pattern": r"(a)\1"}}}},
            400,
            "text.format",
        ),
        ({"tools": [{"type": "web_search"}]}, 400, "tools[0].type"),
        ({"temperature": 9}, 400, "temperature"),
        ({"previous_response_id": "resp_0"}, 404, "previous_response_id"),
    ],
)
def test_refused(http: httpx.Client, fields: Any, status: int, param: str, stream: bool) -> None:
    answer = raw(http, **fields, stream=stream)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, param)
    assert error.keys() == {"message", "type", "param", "code"}


def test_truncation_leaves_the_oldest_turns_out(http: httpx.Client) -> None:
    turn = [{"role": "user", "content": "x" * 800}, {"role": "assistant", "content": "y" * 800}]
    system, last = {"role": "system", "content": "z" * 100}, {"role": "user", "content": "hello"}
    given = [system, *turn * 10, last]
    assert raw(http, input=given).json()["error"]["code"] == "context_length_exceeded"
    response = raw(http, input=given, truncation="auto").json()
    kept = [prompt_of(http, [system, *turn * number, last]) for number in range(5)]
    assert response["truncation"] == "auto"
    assert response["usage"]["input_tokens"] in kept[2:], "a few turns are left, and all of each"
    alone = raw(http, input=[{"role": "user", "content": "x" * 9000}], truncation="auto").json()
    assert alone["error"]["code"] == "context_length_exceeded", "the last turn is never cut"


def test_a_cache_report_comes_with_it(http: httpx.Client) -> None:
    assert raw(http, cache_report=True).json()["cache_report"]["prompt_tokens"] > 0


def test_failures_are_counted(http: httpx.Client, server: Server) -> None:
    name = 'trunkline:request_failures_total{code="previous_response_not_found"}'
    before = metrics(server.url).get(name, 0)
    raw(http, previous_response_id="resp_0")
    assert metrics(server.url)[name] == before + 1


def test_a_client_that_goes_away_frees_its_request(server: Server, http: httpx.Client) -> None:
    body = {**HELLO, "stream": True, "max_output_tokens": 8000, "ignore_eos": True}
    with http.stream("POST", "/v1/responses", json=body) as response:
        lines = response.iter_lines()
        event = next(line for line in lines if line.startswith("data: "))
    wait_idle(server.url)
    assert http.get(f"/v1/responses/{json.loads(event[6:])['response']['id']}").status_code == 404


def test_the_schema_describes_it(http: httpx.Client) -> None:
    document = http.get("/openapi.json").json()
    paths = document["paths"]
    assert paths["/v1/responses"].keys() == {"post"}
    assert paths["/v1/responses/{response_id}"].keys() == {"get", "delete"}
    assert paths["/v1/responses/{response_id}/input_items"].keys() == {"get"}
    assert {"ResponsesRequest", "ResponseBody", "InputItems"} <= document["components"]["schemas"].keys()


def test_the_example_of_the_page_runs(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    page = (DOCS / "api.md").read_text(encoding="utf-8")
    section = page[page.index("\n## Responses\n") :]
    code = re.search(r"```python\n(.*?)```", section, flags=re.DOTALL)
    assert code is not None
    with openai.OpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0, timeout=60) as client:
        exec(code[1], {"client": client, "model": MODEL})  # noqa: S102  # our own page
    assert capsys.readouterr().out


KEYS = ["--api-key", "key-a", "key-b", "--admin-api-key", "key-admin"]


@pytest.fixture(scope="module", params=["key", "all"])
def keyed(tiny: Path, request: pytest.FixtureRequest) -> Iterator[Server]:
    flags = ["--served-model-name", MODEL, "--kv-cache-memory", "16MiB", "--generation-config", "vllm"]
    flags += ["--cache-sharing", request.param, "--max-stored-responses", "4"]
    with Server(tiny, *KEYS, *flags) as server:
        yield server.wait_ready()


@pytest.mark.slow
def test_nobody_reads_what_another_key_has_made(keyed: Server) -> None:
    def sender(key: str) -> httpx.Client:
        return httpx.Client(base_url=keyed.url, headers={"authorization": f"Bearer {key}"}, timeout=60)

    with sender("key-a") as own, sender("key-b") as other, sender("key-admin") as admin:
        response_id = raw(own).json()["id"]
        assert own.get(f"/v1/responses/{response_id}", headers={"x-api-key": "key-b"}).status_code == 200
        for reader in (other, admin):
            path = f"/v1/responses/{response_id}"
            for answer in (reader.get(path), reader.get(f"{path}/input_items"), reader.delete(path)):
                assert (answer.status_code, answer.json()["error"]["code"]) == (404, "response_not_found")
            assert raw(reader, previous_response_id=response_id).status_code == 404
        ids = [raw(other).json()["id"] for _ in range(6)]
        assert own.get(f"/v1/responses/{response_id}").status_code == 200, "who makes many loses its own"
        kept = [other.get(f"/v1/responses/{name}").status_code for name in ids]
        assert kept == [404, 404, 404, 200, 200, 200]
