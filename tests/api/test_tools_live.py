"""Tools through OpenAI's own client: what must be called is called, arguments follow their schema, streams say the same.

The tiny model writes noise: whatever is right here, the grammar made right.
"""

import json
from typing import Any

import httpx
import jsonschema
import openai
import pytest

from tests.api.serving import MODEL, Server
from tests.api.test_chat import chunks, raw
from tests.api.test_tools import allowed, named

pytestmark = pytest.mark.slow  # together more than a second or two

HELLO: Any = [{"role": "user", "content": "hello world"}]
WEATHER = {
    "type": "object",
    "properties": {
        "place": {"type": "string", "maxLength": 6},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "unit": {"enum": ["C", "F"]},
    },
    "required": ["place", "days"],
    "additionalProperties": False,
}
BARE = {"type": "object", "properties": {}, "additionalProperties": False}
SCHEMAS = {"weather": WEATHER, "now": BARE}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "description": f"The {name}", "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "r", "schema": BARE, "strict": True}}
ROOM: Any = {"max_tokens": 120, "extra_body": {"close_on_length": True}}


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    (choice,) = create(client, **fields).choices
    return choice


def create(client: openai.OpenAI, **fields: Any) -> Any:
    fields = {"model": MODEL, "messages": HELLO, "tools": TOOLS, "temperature": 1, "seed": 1, **ROOM, **fields}
    return client.chat.completions.create(**fields)


def check_calls(calls: Any) -> list[str]:
    """Asserts that all are valid; returns their names."""
    for call in calls:
        assert call.type == "function"
        assert call.id.startswith("call_")
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
    return [call.function.name for call in calls]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("parallel", [True, False])
def test_required(client: openai.OpenAI, seed: int, parallel: bool) -> None:
    choice = ask(client, tool_choice="required", parallel_tool_calls=parallel, seed=seed)
    names = check_calls(choice.message.tool_calls)
    assert names
    assert parallel or len(names) == 1
    assert choice.message.content is None
    assert choice.finish_reason in ("tool_calls", "length")
    assert choice.finish_reason == "tool_calls" or parallel, "one call is shorter than the room"


@pytest.mark.parametrize("name", SCHEMAS)
def test_named(client: openai.OpenAI, name: str) -> None:
    choice = ask(client, tool_choice=named(name))
    assert check_calls(choice.message.tool_calls) == [name]
    assert choice.finish_reason == "stop"


def test_allowed_tools(client: openai.OpenAI) -> None:
    choice = ask(client, tool_choice=allowed("required", "now"), parallel_tool_calls=False)
    assert check_calls(choice.message.tool_calls) == ["now"]
    assert choice.finish_reason == "tool_calls"


@pytest.mark.parametrize("fields", [{}, {"tool_choice": "auto"}, {"tool_choice": "none"}])
def test_noise_is_text(client: openai.OpenAI, fields: Any) -> None:
    choice = ask(client, **fields)
    assert choice.message.content
    assert choice.message.tool_calls is None
    assert choice.finish_reason == "length"


@pytest.mark.parametrize("seed", range(4))
def test_auto_with_response_format_is_calls_or_json(client: openai.OpenAI, seed: int) -> None:
    message = ask(client, response_format=FORMAT, seed=seed).message
    if message.tool_calls:
        assert message.content is None
        assert set(check_calls(message.tool_calls)) <= SCHEMAS.keys()
    else:
        assert json.loads(message.content) == {}


def test_response_format_says_nothing_about_a_call_that_must_be_made(client: openai.OpenAI) -> None:
    choice = ask(client, response_format=FORMAT, tool_choice="required", parallel_tool_calls=False)
    assert check_calls(choice.message.tool_calls)
    assert choice.finish_reason == "tool_calls"


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tool_choice": "none"},
        {"tool_choice": "required"},
        {"tool_choice": "required", "max_tokens": 30},
        {"tool_choice": named("weather")},
        {"response_format": FORMAT, "seed": 3},
    ],
    ids=["auto", "none", "required", "cut", "named", "format"],
)
def test_streams_say_the_same(client: openai.OpenAI, fields: Any) -> None:
    fields = {"n": 2, "logprobs": True, **({} if "max_tokens" in fields else ROOM), **fields}
    fields = {"model": MODEL, "messages": HELLO, "tools": TOOLS, "temperature": 1, "seed": 1, **fields}
    plain = client.chat.completions.create(**fields)
    with client.chat.completions.stream(**fields, stream_options={"include_usage": True}) as stream:
        for _ in stream:
            pass
        streamed = stream.current_completion_snapshot
    assert streamed.usage == plain.usage
    for own, other in zip(streamed.choices, plain.choices, strict=True):
        assert own.finish_reason == other.finish_reason
        assert own.logprobs is not None
        assert other.logprobs is not None
        assert own.logprobs.content == other.logprobs.content
        assert _message(own) == _message(other)


def _message(choice: Any) -> dict[str, Any]:
    calls = [[call.function.name, call.function.arguments] for call in choice.message.tool_calls or ()]
    return {"content": choice.message.content, "calls": calls}


def test_calls_are_streamed_as_clients_expect(http: httpx.Client) -> None:
    events = chunks(http, messages=HELLO, tools=TOOLS, tool_choice=named("weather"), max_tokens=120, seed=1)
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas[0] == {"role": "assistant", "content": None}
    first, *others = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
    assert {**first, "id": ""} == {
        "index": 0,
        "id": "",
        "type": "function",
        "function": {"name": "weather", "arguments": ""},
    }
    assert len(others) > 3, "arguments come as they are written"
    assert all(other.keys() == {"index", "function"} and other["function"].keys() == {"arguments"} for other in others)


def test_a_call_that_was_cut_off(client: openai.OpenAI) -> None:
    choice = ask(client, tool_choice=named("weather"), max_tokens=45, extra_body={})
    assert choice.finish_reason == "length"
    (call,) = choice.message.tool_calls
    assert call.function.arguments.startswith("{")
    assert choice.message.content is None
    closed = ask(client, tool_choice=named("weather"), max_tokens=90, extra_body={"close_on_length": True})
    check_calls(closed.message.tool_calls)


def test_a_call_that_was_cut_off_behind_its_name(client: openai.OpenAI) -> None:
    """However few tokens there are: either no call yet, or one with its name. Whole and in a stream."""
    seen: list[Any] = []
    for max_tokens in range(1, 46, 2):
        fields: Any = {"tool_choice": named("weather"), "max_tokens": max_tokens, "extra_body": {}}
        choice = ask(client, **fields)
        assert choice.finish_reason == "length"
        found = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]
        seen.append(found[0] if found else None)
        deltas = [chunk.choices[0].delta for chunk in create(client, **fields, stream=True)]
        calls = [call.function for delta in deltas for call in delta.tool_calls or ()]
        streamed = [(calls[0].name, "".join(call.arguments for call in calls))] if calls else []
        assert streamed == found
    assert seen[0] is None
    assert ("weather", "") in seen
    assert seen[-1][1].startswith("{")


def test_the_conversation_goes_on(client: openai.OpenAI) -> None:
    message = ask(client, tool_choice="required", parallel_tool_calls=False).message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}
    history = [*HELLO, message, result]
    again = create(client, messages=history, tool_choice="none")
    assert again.choices[0].message.content
    parts = [{"type": "text", "text": "sunny"}]
    same = create(client, messages=[*HELLO, message, {**result, "content": parts}], tool_choice="none")
    assert same.usage.prompt_tokens == again.usage.prompt_tokens


def test_all_choices_have_the_same_prompt(http: httpx.Client) -> None:
    """So what is cached for one is cached for all."""
    prompts = [
        raw(http, tools=TOOLS, tool_choice=choice, return_token_ids=True, max_tokens=1).json()["prompt_token_ids"]
        for choice in ("none", "auto", "required", named("now"), allowed("auto", "now"))
    ]
    assert all(prompt == prompts[0] for prompt in prompts)


UNLIKELY = {"type": "object", "properties": {"a": {"type": "string", "pattern": r"(a|b)\1"}}}


@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_enforced_is_refused_where_it_was_promised(http: httpx.Client, stream: bool) -> None:
    def post(strict: bool, **fields: Any) -> httpx.Response:
        tool = {"type": "function", "function": {"name": "f", "parameters": UNLIKELY, "strict": strict}}
        return raw(http, tools=[tool], stream=stream, **fields)

    validate = {"grammar_unsupported": "validate"}
    for refused in (
        post(False, tool_choice="required"),
        post(True),
        post(True, **validate),
        post(True, tool_choice="required", **validate),
    ):
        error = refused.json()["error"]
        assert (refused.status_code, error["param"]) == (400, "tools[0].function.parameters")
        assert "'pattern'" in error["message"]
    assert post(False).status_code == 200
    assert post(False, tool_choice="required", **validate).status_code == 200


def test_wrong_schemas_are_refused_by_their_place(http: httpx.Client) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": []}}}
    error = raw(http, tools=[TOOLS[0], tool], tool_choice="required").json()["error"]
    assert (error["param"], error["code"]) == ("tools[1].function.parameters", "invalid_function_parameters")


def test_the_start_says_how_calls_are_read(server: Server) -> None:
    assert server.wait_for(r"The model's chat template has no tools branch: .* read as those of smollm")
