"""Structured answers through the whole server, with OpenAI's client: they are what they claim, streamed or not, or they are refused.

The tiny model's weights are random: what is well-formed here is so because of the grammar. Schemas are bounded, for it has no wish to end.
"""

import json
import re
from itertools import permutations
from typing import Any, Literal

import httpx
import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field

from tests.api.serving import MODEL, Server, metrics, sse_events, wait_idle

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["cat", "dog"]},
        "open": {"type": "boolean"},
        "places": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
    },
    "required": ["kind", "open"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "pet", "schema": SCHEMA, "strict": True}}
GBNF = 'root ::= "(" inner ")"\ninner ::= "yes" | "no"'
# What no grammar enforces: a backreference. Of such texts only the empty one is as short as that.
TWICE = {"type": "string", "pattern": r"^(|a)\1$", "maxLength": 0}
NEVER_TWICE = {"type": "string", "pattern": r"^(a|b)\1$", "maxLength": 0}


class Pet(BaseModel):
    kind: Literal["cat", "dog"]
    open: bool
    places: list[int] = Field(max_length=2)


def chat(http: httpx.Client, **fields: Any) -> httpx.Response:
    body = {"model": MODEL, "messages": HELLO, "max_tokens": 128, "seed": 1, "temperature": 1, **fields}
    return http.post("/v1/chat/completions", json=body)


def completion(http: httpx.Client, **fields: Any) -> httpx.Response:
    body = {"model": MODEL, "prompt": "hello", "max_tokens": 128, "seed": 1, "temperature": 1, **fields}
    return http.post("/v1/completions", json=body)


def texts(response: httpx.Response) -> list[str]:
    assert response.status_code == 200, response.text
    choices = response.json()["choices"]
    assert {choice["finish_reason"] for choice in choices} == {"stop"}
    return [choice["text"] if "text" in choice else choice["message"]["content"] for choice in choices]


def follows(text: str, schema: Any = SCHEMA) -> bool:
    return bool(jsonschema.Draft202012Validator(schema).is_valid(json.loads(text)))


def test_json_follows_its_schema(http: httpx.Client) -> None:
    for found in (texts(chat(http, response_format=FORMAT, n=4)), texts(completion(http, guided_json=SCHEMA, n=4))):
        assert len(found) == 4 and all(map(follows, found))
        assert len(set(found)) > 1, "choices have seeds of their own"


def test_any_json_object(http: httpx.Client) -> None:
    response = chat(http, response_format={"type": "json_object"}, close_on_length=True, max_tokens=24)
    assert isinstance(json.loads(response.json()["choices"][0]["message"]["content"]), dict)


@pytest.mark.parametrize("backend", ["llguidance", "xgrammar"])
def test_each_backend_by_its_name(http: httpx.Client, backend: str) -> None:
    (text,) = texts(chat(http, response_format=FORMAT, grammar_backend=backend))
    assert follows(text)


@pytest.mark.parametrize("backend", ["auto", "llguidance", "xgrammar", "outlines"])
def test_expressions_and_choices(http: httpx.Client, backend: str) -> None:
    (text,) = texts(completion(http, guided_regex="[ab]{3}[0-9]", grammar_backend=backend))
    assert re.fullmatch("[ab]{3}[0-9]", text)
    (text,) = texts(completion(http, structured_outputs={"choice": ["yes", "no", "may be"]}, grammar_backend=backend))
    assert text in ("yes", "no", "may be")


def test_grammars_in_two_languages(http: httpx.Client) -> None:
    for fields in ({"guided_grammar": GBNF}, {"ebnf": GBNF}, {"grammar": 'start: "(" ("yes" | "no") ")"'}):
        (text,) = texts(completion(http, **fields))
        assert text in ("(yes)", "(no)")


def test_many_prompts_each_follow_it_and_an_echo_does_not_count(http: httpx.Client) -> None:
    found = texts(completion(http, prompt=["one", "two"], regex="[ab]{2}", echo=True, n=2, best_of=3))
    assert [bool(re.fullmatch("(one|two)[ab]{2}", text)) for text in found] == [True] * 4


@pytest.mark.parametrize("fields", [{"response_format": FORMAT}, {"response_format": FORMAT, "logprobs": True, "n": 2}])
def test_a_stream_adds_up_to_the_answer(http: httpx.Client, fields: dict[str, Any]) -> None:
    whole = texts(chat(http, **fields))
    found = [""] * len(whole)
    for event in sse_events(chat(http, stream=True, **fields).text)[:-1]:
        for choice in json.loads(event)["choices"]:
            found[choice["index"]] += choice["delta"].get("content") or ""
    assert found == whole


def test_logprobs_are_one_for_each_token(http: httpx.Client) -> None:
    body = chat(http, response_format=FORMAT, logprobs=True, top_logprobs=2).json()
    tokens = [bytes(one["bytes"]) for one in body["choices"][0]["logprobs"]["content"]]
    assert b"".join(tokens).decode().startswith(body["choices"][0]["message"]["content"])
    assert len(tokens) == body["usage"]["completion_tokens"]


def test_compact_json_has_no_whitespace(http: httpx.Client) -> None:
    for text in texts(chat(http, response_format=FORMAT, compact_json=True, n=4)):
        assert follows(text) and not re.search(r"\s", text)


def test_keys_in_any_order(http: httpx.Client) -> None:
    names = ["a", "b", "c"]
    schema = {
        "type": "object",
        "properties": {name: {"enum": [0, 1]} for name in names},
        "required": names,
        "additionalProperties": False,
    }
    for key_order, wanted in (("schema", {"abc"}), ("any", {"".join(one) for one in permutations(names)})):
        found = texts(chat(http, guided_json=schema, key_order=key_order, n=8))
        orders = {"".join(json.loads(text)) for text in found}
        assert orders <= wanted and (len(orders) > 1) == (key_order == "any")
    refused = chat(http, guided_json=schema, key_order="any", grammar_backend="xgrammar")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "key_order")


def test_openais_client_parses_into_a_model(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model=MODEL, messages=HELLO, response_format=Pet, max_tokens=128, temperature=1, seed=3
    )
    assert isinstance(answer.choices[0].message.parsed, Pet)
    assert answer.choices[0].message.refusal is None


def test_openais_client_streams_into_a_model(client: openai.OpenAI) -> None:
    settings: dict[str, Any] = {"model": MODEL, "messages": HELLO, "max_tokens": 128, "temperature": 1, "seed": 3}
    with client.chat.completions.stream(response_format=Pet, **settings) as stream:
        kinds = {event.type for event in stream}
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Pet)
    assert {"content.delta", "content.done"} <= kinds


def test_a_cut_answer_is_not_parsed(client: openai.OpenAI) -> None:
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(model=MODEL, messages=HELLO, response_format=Pet, max_tokens=4)


def test_closed_in_time(http: httpx.Client) -> None:
    schema = {"type": "object", "properties": {"s": {"type": "string"}}, "required": ["s"]}
    for max_tokens in (16, 24, 40):
        choice = chat(http, guided_json=schema, max_tokens=max_tokens, close_on_length=True).json()["choices"][0]
        assert follows(choice["message"]["content"], schema)
        assert choice["finish_reason"] in ("length", "stop")


def found(choice: dict[str, Any]) -> dict[str, Any]:
    return {name: choice[name] for name in ("valid", "validation_error") if name in choice}


NOT_VALID = {
    "valid": False,
    "validation_error": "The text is not valid under 'pattern' of the schema, at /pattern.",
}


@pytest.mark.parametrize("ask", [chat, completion])
@pytest.mark.parametrize(("schema", "told"), [(TWICE, {"valid": True}), (NEVER_TWICE, NOT_VALID)])
def test_what_cannot_be_enforced_is_checked(http: httpx.Client, ask: Any, schema: Any, told: dict[str, Any]) -> None:
    fields = {"guided_json": schema, "grammar_unsupported": "validate"}
    assert found(ask(http, **fields).json()["choices"][0]) == told
    events = [json.loads(event) for event in sse_events(ask(http, stream=True, **fields).text)[:-1]]
    told_in = [found(choice) for event in events for choice in event["choices"] if choice["finish_reason"]]
    assert told_in == [told]
    assert not any(found(choice) for event in events for choice in event["choices"] if not choice["finish_reason"])


def test_what_was_not_checked_is_not_claimed(http: httpx.Client) -> None:
    cut = chat(http, response_format=FORMAT, grammar_unsupported="error", max_tokens=3).json()["choices"][0]
    assert found(cut) == {}
    cut = chat(http, guided_json=SCHEMA, grammar_unsupported="validate", max_tokens=3).json()["choices"][0]
    assert found(cut) == {"valid": None}
    assert found(chat(http, grammar_unsupported="validate", max_tokens=3).json()["choices"][0]) == {}
    whole = chat(http, guided_json=SCHEMA, grammar_unsupported="validate").json()["choices"][0]
    assert found(whole) == {"valid": True}


def test_a_refusal_says_where_and_what_and_is_counted(http: httpx.Client, server: Server) -> None:
    def refused() -> float:
        samples = metrics(server.url)
        return sum(value for name, value in samples.items() if name.startswith("trunkline:grammar_refused_total"))

    before = refused()
    schema = {"type": "object", "properties": {"a b": TWICE}}
    for strict in (True, False):
        format_ = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema, "strict": strict}}
        error = chat(http, response_format=format_, grammar_unsupported="validate" if strict else "error").json()[
            "error"
        ]
        assert error["message"].startswith(
            "Invalid schema for response_format 'it': In context=('properties', 'a b'), 'pattern' is not permitted."
        )
        assert (error["param"], error["type"]) == ("response_format", "invalid_request_error")
    assert refused() == before + 2


def test_what_it_cost_is_counted(http: httpx.Client, server: Server) -> None:
    texts(completion(http, regex="[xyz]{2}", grammar_backend="llguidance"))
    wait_idle(server.url)
    samples = metrics(server.url)
    assert samples['trunkline:grammar_compile_seconds_count{backend="llguidance"}'] >= 1
    assert samples['trunkline:grammar_mask_seconds_count{backend="llguidance"}'] >= 1
    assert samples['trunkline:grammar_mask_seconds_sum{backend="llguidance"}'] > 0


def test_a_request_after_all_that_is_free(http: httpx.Client) -> None:
    body = chat(http, max_tokens=4, ignore_eos=True).json()
    assert body["usage"]["completion_tokens"] == 4
