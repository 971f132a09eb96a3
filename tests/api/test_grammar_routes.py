"""POST /v1/grammar/check: whether it would be taken, by whom, at what cost."""

from typing import Any

import httpx
import pytest

from tests.api.serving import MODEL, Server, wait_idle

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
BACKREFERENCE = {"type": "object", "properties": {"a": {"type": "string", "pattern": r"^(a|b)\1$"}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}


def post(http: httpx.Client, **fields: Any) -> httpx.Response:
    return http.post("/v1/grammar/check", json=fields)


def check(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    response = post(http, **fields)
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    assert body.keys() == {
        *("ok", "backend", "error", "backends", "findings"),
        *("compile_ms", "mask_us", "mask_us_max", "num_bytes", "shortest_tokens"),
    }
    return body


@pytest.mark.parametrize(
    ("fields", "backend"),
    [
        ({"guided_json": SCHEMA}, "llguidance"),
        ({"model": MODEL, "response_format": {"type": "json_object"}}, "llguidance"),
        ({"guided_json": SCHEMA, "grammar_backend": "xgrammar"}, "xgrammar"),
        ({"guided_regex": "[0-9]{3}"}, "outlines"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "outlines"),
        ({"tools": [TOOL], "tool_choice": "required"}, "llguidance"),
    ],
)
def test_what_would_be_taken_is_measured(http: httpx.Client, fields: dict[str, Any], backend: str) -> None:
    told = check(http, **fields)
    assert (told["ok"], told["backend"], told["error"], told["findings"]) == (True, backend, None, [])
    assert told["backends"][backend] is None
    assert told["compile_ms"] > 0
    assert 0 < told["mask_us"] <= told["mask_us_max"]
    assert all(told[name] == round(told[name], 3) for name in ("compile_ms", "mask_us", "mask_us_max"))
    assert told["num_bytes"] > 0
    assert told["shortest_tokens"] > 0


def test_what_would_be_refused_is_an_answer(http: httpx.Client) -> None:
    told = check(http, guided_json=BACKREFERENCE)
    assert (told["ok"], told["backend"], told["compile_ms"]) == (False, None, None)
    (finding,) = told["findings"]
    assert (finding["pointer"], finding["keyword"]) == ("/properties/a", "pattern")
    assert all(problem is not None for problem in told["backends"].values())
    refused = http.post("/v1/completions", json={"prompt": "x", "guided_json": BACKREFERENCE})
    assert refused.json()["error"]["message"] == told["error"], "the error that a request gets"


def test_under_validate_the_same_is_taken_and_what_is_left_out_is_told(http: httpx.Client) -> None:
    told = check(http, guided_json=BACKREFERENCE, grammar_unsupported="validate")
    assert (told["ok"], told["error"]) == (True, None)
    assert [finding["keyword"] for finding in told["findings"]] == ["pattern"]
    assert told["backends"]["llguidance"]["keyword"] == "pattern"


def test_each_backend_tells_its_own_reason(http: httpx.Client) -> None:
    told = check(http, guided_grammar="start: /[0-9]+/")
    assert told["backends"]["llguidance"] is None
    assert told["backends"]["xgrammar"]["reason"] and told["backends"]["outlines"]["reason"]


@pytest.mark.parametrize("schema", [{"type": "strng"}, {"enum": []}, False, {"$ref": "#/x"}])
def test_a_wrong_schema_is_an_answer_too(http: httpx.Client, schema: Any) -> None:
    told = check(http, guided_json=schema)
    assert not told["ok"] and told["findings"] and told["error"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "response_format"),
        ({"response_format": {"type": "text"}}, "response_format"),
        ({"tools": [TOOL], "tool_choice": "none"}, "response_format"),
        ({"guided_json": 5}, "guided_json"),
        ({"guided_regex": "a", "ebnf": "root ::= a"}, "ebnf"),
        ({"guided_regex": "a", "grammar_backend": "nobody"}, "grammar_backend"),
        ({"tools": "f"}, "tools"),
        ({"guided_regex": "a", "model": 5}, "model"),
    ],
)
def test_a_body_that_says_nothing_is_an_error(http: httpx.Client, fields: dict[str, Any], param: str) -> None:
    response = post(http, **fields)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


def test_unknown_model(http: httpx.Client) -> None:
    assert post(http, guided_regex="a", model="gpt-4").status_code == 404


def test_it_generates_nothing(http: httpx.Client, server: Server) -> None:
    before = wait_idle(server.url)
    check(http, guided_json={"type": "string", "maxLength": 3})
    after = wait_idle(server.url)
    for name in ("generation_tokens_total", "prompt_tokens_total"):
        sample = f'trunkline:{name}{{model_name="tiny"}}'
        assert before[sample] == after[sample]


def test_it_is_described(http: httpx.Client) -> None:
    document = http.get("/openapi.json").json()
    route = document["paths"]["/v1/grammar/check"]["post"]
    assert route["requestBody"]["content"]["application/json"]["schema"]["$ref"].endswith("/GrammarCheckRequest")
    assert {"GrammarCheck", "GrammarCheckRequest", "ResponseFormat"} <= document["components"]["schemas"].keys()
