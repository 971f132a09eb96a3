"""Hermes' and SmolLM2's dialects: exact strings, in every split; and what is no call after all."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.api.tool_parsers.readings import Call, read, read_in_all_splits
from tests.data import grammar_rows
from trunkline.api.tool_parsers.base import Arguments, CallEnd, CallStart, Content, ToolNames, ToolParser
from trunkline.api.tool_parsers.hermes import HermesParser
from trunkline.api.tool_parsers.json_calls import GenericParser
from trunkline.api.tool_parsers.smollm import SmolLMParser

F, G = '{"name": "f", "arguments": {"a": 1}}', '{"name": "g", "arguments": {}}'
FIRST, SECOND = Call("f", '{"a": 1}'), Call("g", "{}")


def block(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


def wire_formats(name: str) -> dict[str, Any]:
    (row,) = [row for row in grammar_rows("wire_formats") if row["format"].startswith(name)]
    return row


@pytest.mark.parametrize(("name", "parser"), [("hermes", HermesParser), ("smollm2", SmolLMParser)])
def test_formats_as_models_write_them(name: str, parser: type[ToolParser]) -> None:
    row = wire_formats(name)
    assert read_in_all_splits(parser, row["single"]) == ("", [Call("get_weather", '{"city": "Paris"}')])
    assert read_in_all_splits(parser, row["parallel"]) == ("", [FIRST, SECOND])


@pytest.mark.parametrize("parser", [HermesParser, SmolLMParser])
@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("", "", []),
        ("Just text, <b>bold</b>.\n", "Just text, <b>bold</b>.\n", []),
        (f"Let me see.\n\n{block(F)}\n", "Let me see.", [FIRST]),
        (f"{block(F)}\n{block(G)}\nDone.", "\n\nDone.", [FIRST, SECOND]),
        (f"<tool_call>[{F}, {G}]</tool_call>", "", [FIRST, SECOND]),
        (f"<tool_call>{F}", "", [FIRST]),  # never closed
        ("<tool_call>[]</tool_call>none", "none", []),
        ('<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', "", [FIRST]),
        ('<tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call>', "", [FIRST]),
        ('<tool_call>{"id": 7, "name": "f", "arguments": {"a": 1}, "x": [1, "}"]}</tool_call>', "", [FIRST]),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [FIRST]),
        ('<tool_call>{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}</tool_call>', "", [FIRST]),
        ('<tool_call>{"name": "g"}</tool_call>', "", [SECOND]),
        ('<tool_call>{"name": "g", "arguments": null}</tool_call>', "", [SECOND]),
        # Arguments are handed on as they were written, not made anew.
        (
            block('{"name": "f", "arguments": { "a":1.0e0,"b" : "é\\u00e9 </tool_call>" }}'),
            "",
            [Call("f", '{ "a":1.0e0,"b" : "é\\u00e9 </tool_call>" }')],
        ),
        # The end of the text in the middle.
        ('<tool_call>{"name": "f", "arguments": {"a": "x', "", [Call("f", '{"a": "x', False)]),
        ('<tool_call>{"name": "f", "argu', '<tool_call>{"name": "f", "argu', []),
        ("text <tool_ca", "text <tool_ca", []),
        # No call after all.
        ("<tool_call> hello </tool_call>", "<tool_call> hello </tool_call>", []),
        (f"<tool_call><tool_call>{F}</tool_call>", "<tool_call>", [FIRST]),
        (f"<tool_call>{{'name': 'f'}}</tool_call> {block(F)}", "<tool_call>{'name': 'f'}</tool_call>", [FIRST]),
        ('<tool_call>{"name": 5, "arguments": {}}', '<tool_call>{"name": 5, "arguments": {}}', []),
        ('<tool_call>{"name": "f", "arguments": [1]}!', '<tool_call>{"name": "f", "arguments": [1]}!', []),
        ('<tool_call>{"name": "\\ud83d", "arguments": {}}', '<tool_call>{"name": "\\ud83d", "arguments": {}}', []),
        ('<tool_call>{"arguments": {}}', '<tool_call>{"arguments": {}}', []),
        (f"<tool_call>[{F}, nothing]</tool_call>", ", nothing]</tool_call>", [FIRST]),
    ],
)
def test_texts(parser: type[ToolParser], text: str, content: str, calls: list[Call]) -> None:
    assert read_in_all_splits(parser, text) == (content, calls)


def test_generic_json_is_a_list_of_calls() -> None:
    assert read_in_all_splits(GenericParser, f"[{F}, {G}]") == ("", [FIRST, SECOND])
    assert read_in_all_splits(GenericParser, f"no [{F}]") == (f"no [{F}]", [])
    assert read_in_all_splits(GenericParser, "[1, 2] is a list") == ("[1, 2] is a list", [])


def test_text_and_arguments_stream_as_soon_as_they_are_certain() -> None:
    parser = HermesParser()
    assert parser.push("Let me ") == [Content("Let me")]
    assert parser.push("see <") == [Content(" see")]
    assert parser.push("b> <tool_call>") == [Content(" <b>")]
    assert parser.push('{"name": "f", "arguments": ') == []
    start, arguments = parser.push('{"a": ')
    assert isinstance(start, CallStart)
    assert (start.index, start.name, arguments) == (0, "f", Arguments(0, '{"a": '))
    assert start.id.startswith("call_")
    assert len(start.id) == 29
    assert parser.push('"x') == [Arguments(0, '"x')]
    assert parser.push('"}}') == [Arguments(0, '"}'), CallEnd(0)]


def test_calls_of_functions_that_are_not_allowed_are_text_where_that_is_asked_for() -> None:
    text = block(F)
    assert read_in_all_splits(HermesParser, text, ToolNames(frozenset({"g"}))).calls == [FIRST]
    assert read_in_all_splits(HermesParser, text, ToolNames(frozenset({"g"}), is_exclusive=True)) == (text, [])


def test_a_long_text_of_broken_calls_takes_linear_time() -> None:
    """Each was read once: half a megabyte takes a moment, not hours."""
    text = '<tool_call>{"arguments": "' * 20_000
    assert read(HermesParser, text) == (text, [])


PIECES = [
    "<tool_call>",
    "</tool_call>",
    F,
    G,
    "[",
    "]",
    ",",
    "{",
    "}",
    '"',
    "\\",
    " ",
    "\n",
    "<",
    "a",
    '{"name": "f"',
    "é",
]


@given(st.lists(st.sampled_from(PIECES), max_size=9).map("".join), st.randoms())
def test_any_text_reads_the_same_in_pieces(text: str, random: Any) -> None:
    cuts = sorted(random.randrange(len(text) + 1) for _ in range(random.randrange(6)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(SmolLMParser, *pieces) == read(SmolLMParser, text) == read(SmolLMParser, *text)
