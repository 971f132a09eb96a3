"""Structural tags: what is replaced, what is refused. What is matched is tested in test_xgrammar_emitter."""

import json
from typing import Any

import pytest

from trunkline.grammar.backends.xgrammar import structural_tag
from trunkline.grammar.interface import InvalidSchema, Unsupported

TAG = {"type": "tag", "begin": "<a>", "content": {"type": "any_text"}, "end": "</a>"}


def emitted(one: Any) -> Any:
    source = structural_tag.emit(json.dumps({"type": "structural_tag", "format": one}))
    assert (source.backend, source.kind) == ("xgrammar", "structural_tag")
    return json.loads(source.text)["format"]


def test_schemas_and_expressions_become_grammars_wherever_they_stand() -> None:
    schema = {"type": "json_schema", "json_schema": {"type": "integer"}}
    one = {"type": "sequence", "elements": [schema, TAG | {"content": schema}, {"type": "regex", "pattern": "a+"}]}
    made = emitted(one)["elements"]
    assert [made[0]["type"], made[1]["content"]["type"], made[2]["type"]] == ["grammar"] * 3
    assert made[0]["grammar"].startswith("root ::= ")


def test_compact_reaches_every_schema() -> None:
    schema = {"type": "json_schema", "json_schema": {"type": "array"}}
    tag = {"type": "structural_tag", "format": {"type": "sequence", "elements": [schema, TAG | {"content": schema}]}}
    either, compact = (json.loads(structural_tag.emit(json.dumps(tag), compact=flag).text) for flag in (False, True))
    for grammars, has_spaces in ((either, True), (compact, False)):
        first, second = grammars["format"]["elements"]
        for grammar in (first["grammar"], second["content"]["grammar"]):
            assert '","' in grammar and ('", "' in grammar) is has_spaces
    without = structural_tag.emit(
        json.dumps(tag).replace('"json_schema", ', '"json_schema", "max_whitespace_cnt": 0, ')
    )
    assert json.loads(without.text) == compact


def test_the_older_spelling() -> None:
    old = {"structures": [{"begin": "<f>", "schema": {"type": "null"}, "end": "</f>"}], "triggers": ["<f"]}
    made = json.loads(structural_tag.emit(json.dumps(old)).text)["format"]
    assert made["type"] == "triggered_tags" and made["triggers"] == ["<f"]
    assert made["tags"][0]["content"]["type"] == "grammar"


@pytest.mark.parametrize("kind", [{"type": "triggered_tags", "triggers": ["<"]}, {"type": "tags_with_separator", "separator": ","}])  # fmt: skip
def test_in_a_list_of_tags_each_is_one_without_saying_so(kind: dict[str, Any]) -> None:
    bare = {key: value for key, value in TAG.items() if key != "type"}
    assert emitted({**kind, "tags": [bare, TAG]}) == {**kind, "tags": [TAG, TAG]}
    with pytest.raises(Unsupported):
        emitted({"type": "sequence", "elements": [bare]})
    with pytest.raises(InvalidSchema):
        emitted({**kind, "tags": ["<a>"]})


@pytest.mark.parametrize(
    ("one", "pointer"),
    [
        ({"type": "token", "token": 3}, "/format"),
        ({"type": "json_schema", "json_schema": {}, "style": "qwen_xml"}, "/format/style"),
        ({"type": "json_schema", "json_schema": {}, "any_order": True}, "/format"),
        (TAG | {"begin": "<a>", "content": {"type": "any_tokens"}}, "/format/content"),
        ({"type": "grammar", "grammar": "start: A", "syntax": "lark"}, "/format/syntax"),
        (
            {"type": "or", "elements": [{"type": "json_schema", "json_schema": {"items": {"uniqueItems": True}}}]},
            "/format/elements/0/json_schema/items",
        ),
    ],
)
def test_what_could_not_be_true_is_refused_with_its_place(one: Any, pointer: str) -> None:
    with pytest.raises(Unsupported) as caught:
        emitted(one)
    assert caught.value.finding.pointer == pointer


@pytest.mark.parametrize(
    "one",
    [
        None,
        {"type": "sequence", "elements": []},
        TAG | {"begin": 3},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"type": "strng"}},
        {"type": "regex", "pattern": "("},
        {"type": "regex"},
    ],
)
def test_what_is_wrong(one: Any) -> None:
    with pytest.raises(InvalidSchema):
        emitted(one)


def test_depth_and_json() -> None:
    deep: Any = {"type": "any_text"}
    for _ in range(40):
        deep = {"type": "star", "content": deep}
    with pytest.raises(InvalidSchema, match="nested"):
        emitted(deep)
    for text in ("{", "[]", "{}"):
        with pytest.raises(InvalidSchema):
            structural_tag.emit(text)
