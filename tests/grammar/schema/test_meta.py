"""The meta-check: what is no schema is refused with its place, keyword and reason, in bounded time."""

import json

import pytest

from tests.data import grammar_rows
from trunkline.grammar.interface import InvalidSchema
from trunkline.grammar.schema.meta import check

DRAFT_4 = "http://json-schema.org/draft-04/schema#"
DRAFT_7 = "http://json-schema.org/draft-07/schema#"
DRAFT_2019 = "https://json-schema.org/draft/2019-09/schema"
DRAFT_2020 = "https://json-schema.org/draft/2020-12/schema"


def refusal(schema) -> InvalidSchema:
    with pytest.raises(InvalidSchema) as caught:
        check(schema if isinstance(schema, str) else json.dumps(schema))
    return caught.value


def within(**keywords) -> dict:
    return {"properties": {"a": keywords}}


@pytest.mark.parametrize(
    ("schema", "pointer", "keyword", "reason"),
    [
        (within(type="strng"), "/properties/a", "type", "'strng'; there are null, boolean"),
        (within(type=[]), "/properties/a", "type", "a list"),
        (within(type=["string", 3]), "/properties/a", "type", "has 3"),
        (within(maxLength="5"), "/properties/a", "maxLength", "is '5'; it must be a whole number from 0 on"),
        (within(minLength=-1), "/properties/a", "minLength", "is -1"),
        (within(minItems=1.5), "/properties/a", "minItems", "is 1.5"),
        (within(minItems=True), "/properties/a", "minItems", "is true"),
        (within(minItems=2**30 + 1), "/properties/a", "minItems", "at most 2**30: no text is longer"),
        (within(contains={}, minContains=2**63), "/properties/a", "minContains", "at most 2**30"),
        (within(minimum="3"), "/properties/a", "minimum", "a number"),
        (within(multipleOf=0), "/properties/a", "multipleOf", "greater than 0"),
        (within(multipleOf=-2), "/properties/a", "multipleOf", "greater than 0"),
        (within(uniqueItems="yes"), "/properties/a", "uniqueItems", "true or false"),
        (within(properties=[1]), "/properties/a", "properties", "is a list; it must be an object of schemas"),
        (within(properties={"b": 3}), "/properties/a/properties/b", "properties", "is 3; a schema is"),
        (within(items="x"), "/properties/a", "items", "a schema"),
        (within(items=[{}, 5]), "/properties/a/items/1", "items", "is 5"),
        (within(prefixItems=[]), "/properties/a", "prefixItems", "at least one"),
        (within(prefixItems=[{}], items=[{}]), "/properties/a", "items", "beside prefixItems"),
        (within(required="b"), "/properties/a", "required", "a list of names"),
        (within(required=["b", 1]), "/properties/a", "required", "a list of names"),
        (within(required=True), "/properties/a", "required", "is true; it must be a list of names"),
        (within(enum={}), "/properties/a", "enum", "a list of values"),
        (within(enum=[]), "/properties/a", "enum", "nothing satisfies"),
        (within(anyOf=[]), "/properties/a", "anyOf", "at least one schema"),
        (within(anyOf=[{}, None]), "/properties/a/anyOf/1", "anyOf", "is null"),
        (within(allOf={}), "/properties/a", "allOf", "at least one schema"),
        (within(**{"not": 1}), "/properties/a", "not", "a schema"),
        (within(pattern=3), "/properties/a", "pattern", "a string"),
        (within(pattern="^(abc"), "/properties/a", "pattern", "a ( is not closed (at character 2)"),
        (within(pattern="[z-a]"), "/properties/a", "pattern", "the wrong order"),
        (within(pattern="a{5,2}"), "/properties/a", "pattern", "the wrong order"),
        (within(patternProperties={"[": {}}), "/properties/a/patternProperties/[", "patternProperties", "not closed"),
        (within(patternProperties={"a": 1}), "/properties/a/patternProperties/a", "patternProperties", "is 1"),
        (within(dependentRequired={"b": "c"}), "/properties/a/dependentRequired/b", "dependentRequired", "is 'c'"),
        (within(dependencies={"b": "c"}), "/properties/a/dependencies/b", "dependencies", "a schema or a list"),
        (within(format=1), "/properties/a", "format", "a string"),
        ({"$defs": {"a/b~": {"type": 1}}}, "/$defs/a~1b~0", "type", "has 1"),
        ({"definitions": []}, "", "definitions", "an object of schemas"),
        (within(**{"$ref": 1}), "/properties/a", "$ref", "a string"),
        (within(**{"$ref": "#/$defs/Nope"}), "/properties/a", "$ref", "leads nowhere"),
        (within(**{"$ref": "#/properties/~2"}), "/properties/a", "$ref", "leads nowhere"),
        (within(**{"$ref": "#nope"}), "/properties/a", "$ref", "no anchor"),
        (within(**{"$ref": "http://example.com/s"}), "/properties/a", "$ref", "nothing is fetched"),
        ({"$id": "http://a/b", "$ref": "c"}, "", "$ref", "nothing is fetched"),
        (within(**{"$ref": "urn:x:s"}), "/properties/a", "$ref", "leads nowhere"),
        (within(**{"$ref": "http://[x#y"}), "/properties/a", "$ref", "is no URI"),
        (within(**{"$id": "http://[x"}), "/properties/a", "$id", "is no URI"),
        ({"$ref": "#/enum", "enum": [1]}, "", "$ref", "no schema"),
        ({"$ref": "#/x", "x": {"type": "strng"}}, "/x", "type", "'strng'"),
        ({"$ref": "#"}, "", "$ref", "back to itself"),
        ({"$defs": {"A": {"$ref": "#/$defs/B"}, "B": {"$ref": "#/$defs/A"}}}, "/$defs/B", "$ref", "back to itself"),
        ({"allOf": [{"$ref": "#"}, {"type": "object"}]}, "/allOf/0", "$ref", "back to itself"),
        ({"anyOf": [{"type": "string"}, {"$ref": "#"}]}, "/anyOf/1", "$ref", "back to itself"),
        ({"not": {"$ref": "#"}}, "/not", "$ref", "back to itself"),
        ({"$schema": DRAFT_4, "exclusiveMinimum": 3}, "", "exclusiveMinimum", "true or false in draft 4"),
        ({"$schema": DRAFT_7, "exclusiveMinimum": True}, "", "exclusiveMinimum", "a number"),
        ({"$schema": DRAFT_2020, "items": [{}]}, "", "items", "prefixItems"),
        ({"$schema": "http://json-schema.org/draft-03/schema#"}, "", "$schema", "before draft 4"),
    ],
)
def test_what_is_no_schema_is_refused_with_its_place(schema, pointer, keyword, reason):
    finding = refusal(schema).finding
    assert (finding.pointer, finding.keyword) == (pointer, keyword)
    assert reason in finding.reason


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"type":', "is no JSON"),
        ("", "is no JSON"),
        ("[1,2]", "is a list; a schema is an object, true or false"),
        ('"x"', "is 'x'"),
        ("null", "is null"),
        ('{"type":"string","type":"null"}', "the key 'type' twice"),
        ('{"const":{"a":1,"a":2}}', "the key 'a' twice"),
        ('{"maximum":NaN}', "NaN"),
        ('{"maximum":-Infinity}', "-Infinity"),
        ('{"maximum":1e999}', "no float holds"),
        ('{"multipleOf":1e-999}', "no float holds"),
        ('{"maximum":' + "9" * 100_000 + "}", "100000 digits"),
        ('{"const":"\\ud800"}', "surrogate"),
        ('{"properties":{"\\udc00":{}}}', "surrogate"),
        ('{"const":"\t"}', "is no JSON"),
        ('{"const":' + "[" * 200 + "]" * 200 + "}", "too deeply"),
        ("[" * 100_000, "too deeply"),
        ('{"a":' * 100_000, "too deeply"),
        ('{"description":"' + "x" * 2_000_000 + '"}', "2000018 bytes"),
        ('{"description":"' + "é" * 600_000 + '"}', "1200018 bytes"),
        ('{"enum":[' + ",".join(map(str, range(30_000))) + "]}", "20000 values"),
    ],
)
def test_what_is_no_json_or_too_large_is_refused(text, reason):
    error = refusal(text)
    assert reason in error.finding.reason
    assert len(str(error)) < 250, "it repeats the schema"


def nested(count: int) -> str:
    return '{"not":' * (count - 1) + "{}" + "}" * (count - 1)


def test_schemas_may_stand_inside_each_other_64_deep():
    check(nested(64))
    assert "64" in refusal(nested(65)).finding.reason


def test_names_on_the_way_to_a_schema_are_bounded():
    error = refusal({"properties": {"k" * 100_000: {}}})
    assert "at most 2000" in error.finding.reason
    assert len(str(error)) < 2200


def test_a_long_name_in_data_is_not_spelled_for_every_value():
    assert check(json.dumps({"enum": [{"k" * 500_000: [1] * 15_000}]}))


def test_all_patterns_together_are_bounded():
    schema = {"properties": {f"p{i}": {"pattern": "a" * 1000} for i in range(201)}}
    assert "200000 characters" in refusal(schema).finding.reason


def test_values_are_data_not_schemas():
    data = {"type": "strng", "$ref": "nowhere", "properties": [1], "pattern": "["}
    for keyword in ("const", "default", "x-unknown"):
        check(json.dumps({keyword: data}))
    for keyword in ("enum", "examples"):
        check(json.dumps({keyword: [data]}))


def test_the_value_keeps_its_order_and_the_argument_its_content():
    schema = {"properties": {"z": {}, "a": True}, "required": ["z"]}
    checked = check(schema)
    assert checked == schema and checked is not schema
    assert list(checked["properties"]) == ["z", "a"]
    assert check("true") is True and check(False) is False


@pytest.mark.parametrize("value", [{"a": object()}, {"a": float("nan")}, [1]])
def test_values_that_are_no_json_are_refused(value):
    with pytest.raises(InvalidSchema):
        check(value)


@pytest.mark.parametrize(
    "schema",
    [
        {"$schema": DRAFT_4, "exclusiveMinimum": True, "minimum": 3, "const": 1},
        {"exclusiveMinimum": True, "minimum": 3},
        {"exclusiveMinimum": 3},
        {"items": [{}, {}], "additionalItems": False},
        {"$schema": DRAFT_2019, "items": [{}]},
        {"$schema": "https://example.com/own", "title": 3, "description": None},
        {"$schema": DRAFT_4, "properties": {"a": True}},
        {"$schema": DRAFT_7, "$ref": "#/definitions/a", "type": "no type beside $ref", "definitions": {"a": {}}},
        {"$defs": {"node": {"properties": {"next": {"$ref": "#/$defs/node"}}}}, "$ref": "#/$defs/node"},
        {"$id": "http://a/b", "properties": {"x": {"$ref": "http://a/b#/$defs/y"}}, "$defs": {"y": {}}},
        {"$id": "http://a/b", "$ref": "c#d", "$defs": {"c": {"$id": "c", "$defs": {"d": {"$anchor": "d"}}}}},
        {"$ref": "#/x-kept/0", "x-kept": [{"type": "string"}]},
        {"minLength": 2.0, "required": ["a", "a"], "pattern": "(?=a)\\1"},
        {"maximum": 10**300, "minimum": 1e-300, "multipleOf": 0.01},
    ],
)
def test_what_is_sound_in_its_draft_passes(schema):
    assert check(json.dumps(schema)) == schema


def test_a_part_may_be_of_another_draft():
    part = {"$id": "http://a/part", "$schema": DRAFT_7, "items": [{}]}
    check(json.dumps({"$schema": DRAFT_2020, "$defs": {"part": part}}))
    del part["$id"]
    assert refusal({"$schema": DRAFT_2020, "$defs": {"part": part}}).finding.keyword == "items"


@pytest.mark.parametrize(
    "schema",
    [
        {"pattern": "|".join(f"word{i}" for i in range(11_000))},
        {"pattern": r"\W" * 50_000},
        {"pattern": r"[\W]" * 25_000},
        {"pattern": "(?i)" + "a" * 90_000},
        {"pattern": "(^|a)" * 19_000},
        {"pattern": "(?=a)" * 19_000},
        {"pattern": "^(?!a)" + "x?" * 49_000},
        {"pattern": r"\b" * 40_000},
        {"pattern": "(" * 40_000 + ")" * 40_000},
        {"pattern": "((a{1,100}){1,100}){1,100}"},
        {"$ref": "#/u0", **{f"u{i}": {"$ref": f"#/u{i + 1}"} for i in range(5000)}, "u5000": {}},
        {
            "$ref": "#/$defs/0",
            "$defs": {str(i): {"anyOf": [{"$ref": f"#/$defs/{i + 1}"}] * 2} for i in range(900)} | {"900": {}},
        },
        {"properties": {f"p{i}": {"type": "string", "maxLength": i} for i in range(6000)}},
    ],
    ids=lambda schema: json.dumps(schema)[:20],
)
@pytest.mark.slow
def test_hostile_schemas_take_bounded_work(schema):
    check(json.dumps(schema))


@pytest.mark.parametrize("name", ["jsonschemabench_sample", "keyword_probes"])
def test_real_schemas_are_not_refused(name):
    refused = set()
    for row in grammar_rows(name):
        try:
            check(json.dumps(row["schema"]))
        except InvalidSchema:
            refused.add(row["id"].partition(":")[2])
    assert refused == (set() if name.startswith("json") else {"$ref unresolvable", "$ref remote http", "empty enum"})
