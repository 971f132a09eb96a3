"""The built-in model, OpenAI's client, and functions that people have written (BFCL): every call parses, and its arguments are valid.

What it picks is its own affair. `python -m benchmarks.tool_calls` prints the same as a table.
"""

import itertools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import jsonschema
import openai
import pytest

from benchmarks.server import serve
from benchmarks.tool_calls import (
    AT_A_TIME,
    MAX_TOKENS,
    MOST_REFUSED,
    WAYS,
    Answer,
    Case,
    Findings,
    ask,
    ask_streamed,
    fields_of,
    load_cases,
    problem_of,
    run,
)
from tests.data import data_file

pytestmark = [pytest.mark.real, pytest.mark.slow]

Result = TypeVar("Result")


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with serve() as address, openai.OpenAI(base_url=f"{address}/v1", api_key="unused", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def model(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return load_cases(data_file("grammar/bfcl_sample.jsonl"))


def together(request: Callable[[Any], Result], things: Sequence[Any]) -> list[Result]:
    """One request for each, AT_A_TIME at a time."""
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        return list(pool.map(request, things))


# -------------------------------------------------------------------- BFCL


def check(found: Findings, reason: str) -> None:
    """All answers are calls that follow their schemas, and end for the reason that docs/tools.md gives."""
    assert len(found.refused) <= MOST_REFUSED * len(found.answers), found.refused
    assert not found.wrong
    assert found.valid == found.parsed == found.calls >= len(found.answers) - len(found.refused)
    for answer in found.answers:
        if not answer.refused:
            assert answer.finish_reason in (reason, "length") and answer.tokens <= MAX_TOKENS
            assert answer.finish_reason == reason or answer.tokens > MAX_TOKENS // 2, "ended without need"


def test_calls_that_are_required(client: openai.OpenAI, model: str, cases: list[Case]) -> None:
    assert len(cases) == 103
    check(run(client, model, cases, "required"), "tool_calls")


def test_exactly_one_call(client: openai.OpenAI, model: str, cases: list[Case]) -> None:
    check(run(client, model, cases[::3], "required, one call"), "tool_calls")


def test_calls_of_a_named_function(client: openai.OpenAI, model: str, cases: list[Case]) -> None:
    several = [case for case in cases if len(case.tools) > 1][::2]
    found = run(client, model, several, "named")
    check(found, "stop")
    for case, answer in zip(several, found.answers, strict=True):
        assert answer.refused or [call.name for call in answer.calls] == [list(case.schemas)[-1]]


def test_streams_add_up_to_whole_answers(client: openai.OpenAI, model: str, cases: list[Case]) -> None:
    def compare(asked: tuple[Case, str]) -> None:
        case, way = asked
        fields = fields_of(way, case)
        assert ask_streamed(client, model, case, fields) == ask(client, model, case, fields), asked

    together(compare, list(zip(cases[::13], itertools.cycle(WAYS), strict=False)))


# -------------------------------------------------------------------- blanks


def only(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


BLANKS = {
    "three cities": "What's the weather in Paris, Berlin and Tokyo?",
    "numbers": "Count from 1 to 50, one number a line.",
    "line feeds": "\n" * 40,
    "spaces": " " * 200,
}
SHAPES = {
    "nothing": only(),
    "boolean": only(ok={"type": "boolean"}),
    "list": only(xs={"type": "array", "items": {"type": "boolean"}, "maxItems": 2}),
    "city": only(city={"enum": ["Paris", "Berlin", "Tokyo"]}),
}
LIMIT = 100  # tokens: several times what any of these needs


def test_blanks_do_not_go_on_until_the_tokens_are_used_up(client: openai.OpenAI, model: str) -> None:
    """The model writes blanks without end where it may. Where it may not, it comes to the point."""
    pairs = [(prompt, schema) for prompt in BLANKS.values() for schema in SHAPES.values()]

    def write(prompt: str, body: dict[str, Any]) -> Any:
        made = client.completions.create(model=model, prompt=prompt, temperature=0, max_tokens=LIMIT, extra_body=body)
        return made.choices[0]

    def freely(schema: Any) -> dict[str, Any]:
        text = json.dumps({"x-guidance": {"whitespace_flexible": True}, **schema})
        return {"guided_grammar": f"start: %json {text}", "grammar_backend": "llguidance"}

    free = together(lambda pair: write(pair[0], freely(pair[1])), pairs)
    endless = [one for one in free if one.finish_reason == "length" and re.search(r"\s{40}", one.text)]
    assert len(endless) >= 2, "none of these prompts makes the model write blanks: look for others"
    for (_, schema), one in zip(
        pairs, together(lambda pair: write(pair[0], {"guided_json": pair[1]}), pairs), strict=True
    ):
        assert one.finish_reason == "stop", one.text
        jsonschema.validate(json.loads(one.text), schema)


@pytest.mark.parametrize("shape", SHAPES)
def test_one_call_for_three_cities(client: openai.OpenAI, model: str, shape: str) -> None:
    """SGLang's #17998: one call is allowed, the model wants three, and blanks were all that it could write."""
    tools = [{"type": "function", "function": {"name": "weather", "parameters": SHAPES[shape]}}]
    for prompt in BLANKS.values():
        case = Case(shape, [{"role": "user", "content": prompt}], tools)
        fields = fields_of("named", case) | {"parallel_tool_calls": False, "max_tokens": LIMIT, "extra_body": {}}
        answer = ask(client, model, case, fields)
        assert not answer.refused and answer.finish_reason == "stop" and answer.tokens < LIMIT
        (call,) = answer.calls
        assert problem_of(call, case) is None


# -------------------------------------------------------------------- with response_format

REPLY = only(reply={"type": "string", "maxLength": 40}, sure={"type": "boolean"})
FORMAT = {"type": "json_schema", "json_schema": {"name": "reply", "schema": REPLY, "strict": True}}
SUMS = [  # that have been answered with JSON twice, so the model does so again
    {"role": "user", "content": "What is 2 and 2?"},
    {"role": "assistant", "content": '{"reply": "4", "sure": true}'},
    {"role": "user", "content": "What is 3 and 3?"},
    {"role": "assistant", "content": '{"reply": "6", "sure": true}'},
    {"role": "user", "content": "What is 4 and 4?"},
]


def test_required_calls_are_no_matter_of_response_format(client: openai.OpenAI, model: str, cases: list[Case]) -> None:
    fields = {"tool_choice": "required", "response_format": FORMAT, "parallel_tool_calls": False}
    for case, answer in _ask_all(client, model, cases[::20], fields):
        (call,) = answer.calls
        assert answer.content is None and problem_of(call, case) is None


def test_calls_or_an_answer_that_follows_response_format(client: openai.OpenAI, model: str, cases: list[Case]) -> None:
    """The model chooses freely between calls of strict functions and JSON; it writes nothing else."""
    strict = [
        case._replace(tools=[{**tool, "function": {**tool["function"], "strict": True}} for tool in case.tools])
        for case in [cases[0]._replace(messages=SUMS), *cases[::20]]
    ]
    chosen = set()
    for case, answer in _ask_all(client, model, strict, {"tool_choice": "auto", "response_format": FORMAT}):
        chosen.add(bool(answer.calls))
        if answer.calls:
            assert answer.content is None and all(problem_of(call, case) is None for call in answer.calls)
            assert answer.finish_reason in ("tool_calls", "length")
        else:
            assert answer.content is not None and answer.finish_reason in ("stop", "length")
            jsonschema.validate(json.loads(answer.content), REPLY)
    assert chosen == {True, False}


def _ask_all(
    client: openai.OpenAI, model: str, cases: list[Case], fields: dict[str, Any]
) -> Iterator[tuple[Case, Answer]]:
    answers = together(lambda case: ask(client, model, case, fields), cases)
    for case, answer in zip(cases, answers, strict=True):
        assert not answer.refused, answer.refused
        yield case, answer


# -------------------------------------------------------------------- closing


@pytest.mark.parametrize("at", [5, 45, 85])
def test_calls_are_whole_at_every_limit(client: openai.OpenAI, model: str, cases: list[Case], at: int) -> None:
    """From the fewest tokens that calls can have, which the refusal of less tells. (40 schemas: tests/scheduler.)"""
    case, fields = cases[at], fields_of("required", cases[at])
    refused = ask(client, model, case, fields | {"max_tokens": 1}).refused
    told = re.search(r"the shortest text that follows the schema has (\d+) tokens", refused)
    assert told is not None, refused
    limits = range(int(told[1]), int(told[1]) + 41, 3)
    answers = together(lambda limit: ask(client, model, case, fields | {"max_tokens": limit}), limits)
    for limit, answer in zip(limits, answers, strict=True):
        assert answer.calls and answer.tokens <= limit, (limit, answer)
        assert all(problem_of(call, case) is None for call in answer.calls), (limit, answer)
    assert answers[0].finish_reason == "length"
