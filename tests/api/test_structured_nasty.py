"""Schemas and requests that broke other servers: each answer follows its schema, or the request is refused, and the server lives on.

What happened elsewhere is told in docs/failures.md.
"""

import json
from typing import Any

import httpx
import jsonschema
import pytest

from tests.api.serving import MODEL, Server, wait_idle
from trunkline.models.tokenizer import Tokenizer

pytestmark = pytest.mark.slow


def ask(http: httpx.Client, schema: Any, **fields: Any) -> httpx.Response:
    body = {
        "model": MODEL,
        "prompt": "hello",
        "max_tokens": 200,
        "close_on_length": True,
        "temperature": 1,
        "seed": 1,
        "n": 4,
        "guided_json": schema,
        **fields,
    }
    return http.post("/v1/completions", json=body)


def answers(response: httpx.Response) -> list[str]:
    assert response.status_code == 200, response.text
    return [choice["text"] for choice in response.json()["choices"]]


def of(**property_: Any) -> dict[str, Any]:
    """An object with one property, `a`, and no other."""
    return {"type": "object", "properties": {"a": property_}, "required": ["a"], "additionalProperties": False}


def short(**keywords: Any) -> dict[str, Any]:
    return {"type": "string", "maxLength": 8, **keywords}


A, B = {"type": "object", "properties": {"a": {"const": 1}}}, {"type": "object", "properties": {"b": {"const": 2}}}
BOTH = {"required": ["a"], **A}, {"required": ["b"], **B}
NUMBER = {"type": "integer", "minimum": 5, "maximum": 12}

SCHEMAS: dict[str, Any] = {
    "pattern with quotes": of(**short(pattern='^"[a-z]+"$')),
    "pattern with a line feed": of(**short(pattern="^a\nb$")),
    "pattern with a backslash": of(**short(pattern=r"^C:\\[a-z]+$")),
    "pattern that could go on beyond the string": of(**short(pattern=".*")),
    "pattern beside lengths": of(type="string", pattern="^[ -~]+$", minLength=2, maxLength=4),
    "pattern with alternatives": {"type": "object", "propertyNames": {"pattern": "^(ab|cd)$"}, "maxProperties": 1},
    "pattern of a repeat over 128": of(type="string", pattern=r"^[^\n\r]{1,129}$"),
    "allOf of two objects": {"allOf": list(BOTH)},
    "allOf of two integers": of(allOf=[{"type": "integer", "minimum": 0}, {"type": "integer", "maximum": 9}]),
    "anyOf beside properties": {
        "type": "object",
        "properties": {"a": {"const": 1}, "b": {"const": 2}},
        "additionalProperties": False,
        "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
    },
    "required but not declared": {"type": "object", "required": ["z"], "additionalProperties": {"const": 0}},
    "reference with a sibling": of(**{"$ref": "#/$defs/n", "maximum": 6}) | {"$defs": {"n": NUMBER}},
    "reference by anchor": of(**{"$ref": "#n"}) | {"$defs": {"n": {"$anchor": "n", **NUMBER}}},
    "reference by id": of(**{"$ref": "urn:n"}) | {"$defs": {"n": {"$id": "urn:n", **NUMBER}}},
    "bounds": of(**NUMBER),
    "a number": of(type="number"),
    "a string": of(**short()),
    "a boolean": {"type": "boolean"},
    "a tuple after all that": {"type": "array", "prefixItems": [NUMBER, {"type": "boolean"}], "items": False},
    "a tuple of draft 7": {
        "type": "array",
        "items": [NUMBER, {"type": "null"}],
        "additionalItems": False,
        "minItems": 2,
    },
    "oneOf that overlaps": of(oneOf=[{"type": "integer", "minimum": 1}, {"const": 1}, {"const": 2}]),
    "not": of(**short(**{"not": {"enum": ["", "a"]}})),
    "uniqueItems": of(type="array", items={"enum": [1, 2, 3]}, uniqueItems=True),
    "if, then, else": {
        "type": "object",
        "properties": {"a": {"enum": [1, 2]}, "b": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
        "if": {"properties": {"a": {"const": 1}}},
        "then": {"required": ["b"]},
    },
    "patternProperties beside a property": {
        "type": "object",
        "properties": {"score": {"enum": [1, 2]}},
        "patternProperties": {"^score$": {"minimum": 2}},
        "required": ["score"],
        "additionalProperties": False,
    },
    "recursion": {"type": "array", "items": {"$ref": "#"}, "maxItems": 2},
    "an enum of 5,000": of(enum=[f"value {i}" for i in range(5000)]),
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_answers_follow_the_schema(http: httpx.Client, name: str) -> None:
    """None of them is refused: that would be too easy."""
    schema = SCHEMAS[name]
    kind = jsonschema.Draft7Validator if "draft 7" in name else jsonschema.Draft202012Validator
    for text in answers(ask(http, schema)):
        text.encode()  # no half of a surrogate pair
        assert kind(schema).is_valid(json.loads(text)), text


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def doubled(levels: int) -> dict[str, Any]:
    """anyOf of anyOf of …: 2**levels leaves, all alike but for their numbers."""
    if levels == 0:
        return {"type": "object", "properties": {"a": {"type": "integer"}}}
    below = doubled(levels - 1)
    return {"anyOf": [below, {"type": "object", "properties": {f"p{levels}": below}}]}


def products(pairs: int) -> dict[str, Any]:
    """allOf of anyOf pairs: a product of 2**pairs alternatives."""
    return {"allOf": [{"anyOf": [{"required": [f"a{i}"]}, {"required": [f"b{i}"]}]} for i in range(pairs)]}


PATHOLOGIES: dict[str, Any] = {
    "900 levels": nested(30) | {"properties": {"a": json.loads("[" * 40 + "]" * 40)}},
    "60 levels": nested(60),
    "2**12 alternatives": doubled(11),
    "a product of 2**24": products(24),
    "an enum of 50,000": {"enum": [f"value {i}" for i in range(50_000)]},
    "a reference to itself": {"$ref": "#"},
    "two that lead to each other": {
        "$ref": "#/$defs/a",
        "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
    },
    "repeats of repeats": {"type": "string", "pattern": "^((a{1,100}){1,100}){1,100}$"},
    "an automaton of 2**20": {"type": "string", "pattern": "^.*a.{20}$"},
    "bounds of 400 digits": {"type": "integer", "minimum": 10**18, "maximum": 10**18 + 1},
    "10,000 characters at least": {"type": "string", "minLength": 10_000},
    "400 optional properties": {"type": "object", "properties": {f"p{i}": {"type": "null"} for i in range(400)}},
    "nothing satisfies it": {"type": "string", "minLength": 5, "maxLength": 2},
}


@pytest.mark.parametrize("name", PATHOLOGIES)
def test_pathologies_are_bounded_and_hurt_nobody_else(http: httpx.Client, server: Server, name: str) -> None:
    response = ask(http, PATHOLOGIES[name], n=1, max_tokens=64)
    assert response.status_code in (200, 400), response.text
    assert len(response.text) < 5000, "what was sent is not repeated"
    canary = http.post("/v1/completions", json={"prompt": "hello", "max_tokens": 2, "ignore_eos": True})
    assert canary.json()["usage"]["completion_tokens"] == 2
    wait_idle(server.url)


def test_end_of_text_is_no_part_of_a_string(http: httpx.Client, tokenizer: Tokenizer) -> None:
    """Wished for at every place, it comes where the text may end, and nowhere else."""
    wish = {str(token_id): 100 for token_id in tokenizer.eos_token_ids}
    for text in answers(ask(http, of(**short(minLength=3)), logit_bias=wish)):
        assert len(json.loads(text)["a"]) >= 3


def test_special_tokens_are_no_part_of_a_string(http: httpx.Client, tokenizer: Tokenizer) -> None:
    wish = {str(token_id): 100 for token_id in tokenizer.special_ids}
    response = ask(http, of(**short(minLength=3)), logit_bias=wish, skip_special_tokens=False)
    for text in answers(response):
        assert "<|" not in json.loads(text)["a"]


@pytest.mark.parametrize("fields", [{"ignore_eos": True}, {"min_tokens": 50}, {"ignore_eos": True, "min_tokens": 200}])
def test_a_text_that_is_complete_ends_whatever_else_is_wished(http: httpx.Client, fields: dict[str, Any]) -> None:
    response = ask(http, {"type": "boolean"}, **fields)
    assert set(answers(response)) <= {"true", "false"}
    assert {choice["finish_reason"] for choice in response.json()["choices"]} == {"stop"}


def test_a_bias_against_the_only_token_changes_nothing(http: httpx.Client) -> None:
    against = {str(token_id): -100 for token_id in b'{"a:'}
    for text in answers(ask(http, of(const=1), logit_bias=against)):
        assert json.loads(text) == {"a": 1}


def test_the_same_schema_in_another_order_is_another_grammar(http: httpx.Client) -> None:
    for keys in ("ab", "ba", "ab"):
        schema = {"type": "object", "properties": {key: {"const": key} for key in keys}, "required": ["a", "b"]}
        for text in answers(ask(http, {**schema, "additionalProperties": False})):
            assert list(json.loads(text)) == list(keys)


def test_whitespace_is_bounded(http: httpx.Client) -> None:
    """A model that wishes for nothing but blanks ends all the same."""
    blanks = {str(token_id): 100 for token_id in b" \n\t\r"}
    schema = {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2}
    response = ask(http, schema, logit_bias=blanks, max_tokens=100, close_on_length=False)
    for text in answers(response):
        assert len(json.loads(text)) == 2 and len(text) < 40
    assert {choice["finish_reason"] for choice in response.json()["choices"]} == {"stop"}


def test_each_request_has_a_backend_of_its_own(http: httpx.Client) -> None:
    """Whichever came first."""
    for backend in ("xgrammar", "llguidance", "auto", "xgrammar"):
        for schema in (of(**NUMBER), {"type": "array", "prefixItems": [NUMBER], "items": False}):
            for text in answers(ask(http, schema, grammar_backend=backend)):
                assert jsonschema.Draft202012Validator(schema).is_valid(json.loads(text))
