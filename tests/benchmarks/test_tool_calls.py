"""The benchmark of tool calls: what it takes for a fault, and its table."""

import json

import pytest

from benchmarks.tool_calls import Answer, Called, Case, Findings, fields_of, problem_of, table

DAYS = {"type": "object", "properties": {"days": {"type": "integer"}}, "required": ["days"]}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": DAYS}} for name in ("past", "future")]
CASE = Case("one", [{"role": "user", "content": "hello"}], TOOLS)


@pytest.mark.parametrize(
    ("name", "arguments", "problem"),
    [
        ("past", '{"days": 1}', None),
        ("past", '{"days": 1', "no JSON"),
        ("never", '{"days": 1}', "no function 'never'"),
        ("future", '{"days": "1"}', "is not of type 'integer'"),
        ("future", "{}", "'days' is a required property"),
    ],
)
def test_what_is_wrong_with_a_call(name: str, arguments: str, problem: str | None) -> None:
    told = problem_of(Called(name, arguments), CASE)
    assert told is None if problem is None else problem in str(told)


def test_ways_to_ask() -> None:
    assert fields_of("required", CASE) == {"tool_choice": "required"}
    assert fields_of("required, one call", CASE) == {"tool_choice": "required", "parallel_tool_calls": False}
    assert fields_of("named", CASE)["tool_choice"]["function"] == {"name": "future"}


def test_table_is_markdown() -> None:
    call = Called("past", json.dumps({"days": 1}))
    answers = [
        Answer((call, call), None, "tool_calls", 1200),
        Answer((call,), None, "length", 300),
        Answer(refused="no"),
    ]
    lines = table([Findings("required", answers, 3, 2, ["wrong"], 6.4)]).splitlines()
    cells = [cell.strip() for cell in lines[2].strip("|").split("|")]
    assert cells == ["required", "3", "1", "3", "3", "2", "tool_calls 1, length 1", "1,500", "6"]
