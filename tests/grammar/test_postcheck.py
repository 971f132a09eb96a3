"""The last gate: what jsonschema says of finished texts, made exact, and bounded in time."""

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data import grammar_rows
from trunkline.grammar.postcheck import PostCheck, Verdict

DRAFT = "http://json-schema.org/draft-0{}/schema#"


def valid(schema: Any, text: str) -> bool | None:
    return PostCheck(schema).check(text).valid


# schema, a valid text, one that is not
CASES: list[tuple[Any, str, str]] = [
    ({"type": "object", "required": ["a"]}, '{"a": 1}', '{"b": 1}'),
    ({"type": "integer"}, "7", "7.5"),
    ({"type": "integer"}, "7.0", '"7"'),
    ({"type": "integer"}, "1e999999999", "1e-999999999"),
    ({"type": "number"}, "1e400", "true"),
    ({"$schema": DRAFT.format(7), "type": "integer"}, "7.0", "7.1"),
    ({"$schema": DRAFT.format(4), "type": "integer"}, "7", "7.0"),
    ({"multipleOf": 0.01}, "0.07", "0.075"),
    ({"multipleOf": 0.1}, "123456789.3", "123456789.35"),
    ({"multipleOf": 3}, "9" * 5000, "9" * 4999 + "8"),
    ({"maximum": 0.1}, "0.1", "0.10000000000000000001"),
    ({"exclusiveMinimum": 0.1}, "0.10000000000000000001", "0.1"),
    ({"enum": [0.1, 1]}, "0.10", "0.11"),
    ({"const": 1}, "1.0", "true"),
    ({"uniqueItems": True}, '[1, true, "1", [1], [true], {"a": 1}]', "[1, 1.0]"),
    ({"uniqueItems": True}, '[{"a": 1, "b": 2}, {"a": 2, "b": 1}]', '[{"a": 1, "b": 2}, {"b": 2, "a": 1}]'),
    ({"pattern": "^a$"}, '"a"', '"a\\n"'),
    ({"pattern": "b"}, '"abc"', '"aac"'),
    ({"pattern": r"^\d$"}, '"3"', '"٣"'),
    ({"pattern": "^(?!x)[a-z]+$"}, '"ax"', '"xa"'),
    ({"pattern": "^(a|b)\\1$"}, '"aa"', '"ab"'),
    ({"pattern": r"\bfoo\b"}, '"a foo"', '"afoo"'),
    ({"patternProperties": {"^n": {"type": "integer"}}}, '{"n": 1, "s": ""}', '{"n": ""}'),
    (
        {"properties": {"a": True}, "patternProperties": {"^b": True}, "additionalProperties": False},
        '{"a": 1, "b1": 2}',
        '{"c": 1}',
    ),
    ({"additionalProperties": {"type": "null"}}, '{"a": null}', '{"a": 1}'),
    ({"properties": {"a": {"type": "integer"}}, "unevaluatedProperties": False}, '{"a": 1}', '{"b": 1}'),
    ({"format": "ipv4"}, '"1.2.3.4"', '"1.2.3.400"'),
    ({"format": "date"}, '"2020-02-28"', '"2020-02-28x"'),
    ({"$ref": "#/$defs/x", "$defs": {"x": {"type": "null"}}}, "null", "1"),
    ({"properties": {"a": {"$ref": "#"}}, "required": ["b"]}, '{"b": 1, "a": {"b": 1}}', '{"b": 1, "a": {}}'),
    (True, "null", "nil"),
    ({}, '{"a": 1}', '{"a": 1'),
    ({}, "[1]", "[NaN]"),
    ({}, "1", "1 2"),
    ({}, '"a\\nb"', '"a\nb"'),
    # Spelled as older drafts do, without a word about which draft.
    ({"items": [{"type": "integer"}], "additionalItems": False}, "[1]", "[1, 2]"),
    ({"items": True, "additionalItems": False}, "[1, 2]", "[1, "),
    ({"items": [True], "additionalItems": {"type": "integer"}}, '["", 2]', '["", ""]'),
    ({"$schema": DRAFT.format(7), "items": False, "additionalItems": True}, "[]", "[1]"),
    ({"$schema": DRAFT.format(4), "items": False}, "[]", "[1]"),
    (
        {"$schema": "https://json-schema.org/draft/2019-09/schema", "items": False, "unevaluatedItems": False},
        "[]",
        "[1]",
    ),
    (
        {"$schema": DRAFT.format(4), "properties": {"a": {"$ref": "#/definitions/x"}}, "definitions": {"x": True}},
        '{"a": 1}',
        '{"a": ',
    ),
    ({"minimum": 5, "exclusiveMinimum": True}, "6", "5"),
    ({"maximum": 5, "exclusiveMaximum": False}, "5", "6"),
    ({"dependencies": {"a": ["b"]}}, '{"a": 1, "b": 2}', '{"a": 1}'),
    # A property that is called like a keyword.
    (
        {"properties": {"dependencies": {"prefixItems": [{"type": "integer"}]}}},
        '{"dependencies": [1]}',
        '{"dependencies": [""]}',
    ),
    (
        {"properties": {"properties": {"uniqueItems": False, "maxItems": 2}}},
        '{"properties": [1, 1]}',
        '{"properties": [1, 2, 3]}',
    ),
    (
        {"$schema": DRAFT.format(4), "properties": {"definitions": {"minimum": 1, "exclusiveMinimum": False}}},
        '{"definitions": 1}',
        '{"definitions": 0}',
    ),
    ({"properties": {"const": {"const": 0.1}}}, '{"const": 0.1}', '{"const": 0.10000000000000000001}'),
    # A URI that is no draft's, though it looks like one: read as the newest, where `dependencies` means nothing.
    ({"$schema": "https://example.com/draft-07/schema#", "dependencies": {"a": ["b"]}}, '{"a": 1}', '{"a": '),
    ({"$schema": "https://example.com/draft-04/schema#", "type": "integer"}, "1.0", "1.5"),
    ({"$schema": "https://json-schema.org/draft-07/schema", "dependencies": {"a": ["b"]}}, "{}", '{"a": 1}'),
]


@pytest.mark.parametrize(("schema", "good", "bad"), CASES, ids=lambda value: json.dumps(value)[:50])
def test_valid_and_not(schema: Any, good: str, bad: str) -> None:
    assert (valid(schema, good), valid(schema, bad)) == (True, False)


@pytest.mark.parametrize(
    ("schema", "text", "error"),
    [
        ({"required": ["a"]}, "{}", "The text is not valid under 'required' of the schema, at /required."),
        (
            {"properties": {"a/b": {"items": {"enum": [1]}}}},
            '{"a/b": [1, 2]}',
            "The value at /a~1b/1 is not valid under 'enum' of the schema, at /properties/a~1b/items/enum.",
        ),
        (
            {"properties": {"a": False}},
            '{"a": 1}',
            "The value at /a is not valid under 'not' of the schema, at /properties/a/not.",
        ),
        (False, "1", "The text is not valid: a schema that is false allows nothing."),
        ({}, '{"a": }', "The text is not JSON: Expecting value at character 6."),
        ({}, "Infinity", "The text is not JSON: it holds Infinity."),
    ],
)
def test_errors_say_where_and_repeat_no_text(schema: Any, text: str, error: str) -> None:
    assert PostCheck(schema).check(text) == Verdict(False, error)


def test_an_error_stays_short() -> None:
    key = "k" * 10_000
    error = PostCheck({"additionalProperties": {"type": "null"}}).check(json.dumps({key: 1})).error
    assert error is not None and len(error) < 400


def test_decimal_schemas_are_read_as_they_are_written() -> None:
    schema = json.loads('{"multipleOf": 0.01, "maximum": 1e2}')
    assert valid(schema, "99.99") and not valid(schema, "100.01")


def doubling(levels: int) -> dict[str, Any]:
    """2**levels ways lead to one leaf, which takes nothing."""
    schema: dict[str, Any] = {"$ref": f"#/$defs/{levels}", "$defs": {"0": False}}
    for level in range(1, levels + 1):
        below = {"$ref": f"#/$defs/{level - 1}"}
        schema["$defs"][f"{level}"] = {"anyOf": [below, below]}
    return schema


HANGING: list[tuple[Any, str]] = [
    ({"pattern": "^(a|aa)+\\1?$"}, '"' + "a" * 80 + '!"'),
    ({"patternProperties": {"^(a|aa)+\\1?$": True}}, '{"' + "a" * 80 + '!": 1}'),
    ({"patternProperties": {"^(a|aa)+\\1?$": True}, "additionalProperties": False}, '{"' + "a" * 80 + '!": 1}'),
    (
        {"$schema": DRAFT.format(7), "properties": {"a": {"$ref": "#"}}, "patternProperties": {"^(b|bb)+\\1?$": False}},
        '{"a": {"a": {"' + "b" * 80 + '!": 1}}}',
    ),
    (doubling(40), "1"),
]


@pytest.mark.parametrize(("schema", "text"), HANGING, ids=["pattern", "keys", "other keys", "below a $ref", "doubling"])
def test_what_would_take_forever_is_not_claimed(schema: Any, text: str) -> None:
    started = time.monotonic()
    assert PostCheck(schema, seconds=0.1).check(text) == Verdict(None)
    assert time.monotonic() - started < 30, "it was stopped"


UNCHECKED: list[tuple[Any, str]] = [
    ({}, "[" * 5000 + "]" * 5000),
    ({"$ref": "#"}, "1"),
    ({"$ref": "http://127.0.0.1:9/schema"}, "1"),
    ({"multipleOf": 7}, "1e999999999"),
    ({"type": "integer"}, "1e9999999999999999999999"),
    ({"pattern": "(?P<"}, '"a"'),
    ({"patternProperties": {"^a": {}}, "unevaluatedProperties": False}, '{"a": 1}'),
    # In the part, nothing counts beside $ref; in the whole it would.
    (
        {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "$ref": "urn:x",
            "$defs": {
                "x": {
                    "$id": "urn:x",
                    "$schema": DRAFT.format(7),
                    "allOf": [{"$ref": "#/definitions/n", "minimum": 5}],
                    "definitions": {"n": {"type": "integer"}},
                }
            },
        },
        "1",
    ),
]


@pytest.mark.parametrize(("schema", "text"), UNCHECKED, ids=lambda value: json.dumps(value)[:50])
def test_what_cannot_be_checked_is_not_claimed(schema: Any, text: str) -> None:
    assert PostCheck(schema).check(text) == Verdict(None)


def test_the_deadline_is_one_for_the_whole_text() -> None:
    assert PostCheck({"items": {"type": "integer"}}, seconds=0.0).check("[1, 2]") == Verdict(None)


def test_one_check_serves_many_texts() -> None:
    check = PostCheck({"items": {"pattern": "^a+$"}})
    assert [check.check(text).valid for text in ('["a"]', '["b"]', '["aa"]', "[")] == [True, False, True, False]


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-5, 5)
    | st.sampled_from((0.5, -1.0, 1e30))
    | st.text('ab"\\\n☃', max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", max_size=2), inner, max_size=3),
    max_leaves=8,
)


@given(json_values, json_values)
def test_const_is_equality_in_json(one: Any, other: Any) -> None:
    def key(value: Any) -> Any:
        """Tells true from 1, and 1.0 not from 1."""
        if isinstance(value, list):
            return ["list", *map(key, value)]
        if isinstance(value, dict):
            return {name: key(item) for name, item in value.items()}
        return ("boolean", value) if isinstance(value, bool) else value

    is_equal = key(one) == key(other)
    assert valid({"const": one}, json.dumps(other)) is is_equal
    assert valid({"enum": [one]}, json.dumps(other)) is is_equal
    assert valid({"uniqueItems": True}, json.dumps([one, other])) is not is_equal


def test_the_official_suite() -> None:
    """All required tests of draft 2020-12 and draft 7: never the opposite of what they say."""
    num_checked = num_unchecked = 0
    for group in grammar_rows("json_schema_test_suite"):
        if group["category"] not in ("draft2020-12", "draft7") or group["keyword"] in ("format", "vocabulary"):
            continue  # there a format says nothing, and here it does; a meta-schema of one's own is not read here
        schema = group["schema"]
        if group["category"] == "draft7" and isinstance(schema, dict):
            schema = {"$schema": DRAFT.format(7), **schema}
        check = PostCheck(schema)
        for test in group["tests"]:
            verdict = check.check(json.dumps(test["data"]))
            num_checked += verdict.valid is not None
            num_unchecked += verdict.valid is None
            assert verdict.valid in (None, test["valid"]), (group, test, verdict)
    assert num_checked > 1800 and num_unchecked < 100, (num_checked, num_unchecked)
