"""Normalization: one vocabulary, the same meaning, the same places."""

import json

import pytest
from jsonschema import Draft202012Validator

from tests.data import grammar_rows
from trunkline.grammar.interface import InvalidSchema, Unsupported
from trunkline.grammar.schema.meta import check
from trunkline.grammar.schema.normalize import NormalSchema, normalize

DRAFT_4 = "http://json-schema.org/draft-04/schema#"
DRAFT_7 = "http://json-schema.org/draft-07/schema#"
DRAFT_2019 = "https://json-schema.org/draft/2019-09/schema"
DRAFT_2020 = "https://json-schema.org/draft/2020-12/schema"

ONE = {"contains", "propertyNames", "additionalProperties", "unevaluatedItems", "unevaluatedProperties", "not", "if"}
ONE |= {"then", "else", "items"}
SEVERAL = {"allOf", "anyOf", "oneOf", "prefixItems"}
MAPS = {"properties", "patternProperties", "dependentSchemas"}
VALUES = {
    "type",
    "enum",
    "const",
    "multipleOf",
    "minimum",
    "exclusiveMinimum",
    "maximum",
    "exclusiveMaximum",
    "pattern",
}
VALUES |= {"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties", "minContains"}
VALUES |= {"maxContains", "uniqueItems", "required", "dependentRequired", "format"}


def make(schema) -> NormalSchema:
    return normalize(check(json.dumps(schema)))


def root_of(schema):
    return make(schema).root


def as_document(normal: NormalSchema):
    """A plain 2020-12 schema, with what is referred to as $defs. Fails on a keyword that normalize does not promise."""
    defs: dict = {}

    def copy(node):
        if isinstance(node, bool):
            return node
        copied = {}
        for name, value in node.items():
            if name == "$ref":
                if value not in defs:
                    defs[value] = None
                    defs[value] = copy(normal.resolve(value))
                escaped = value.replace("~", "~0").replace("/", "~1").replace("%", "%25")
                copied[name] = f"#/$defs/{escaped}"
            elif name in ONE:
                copied[name] = copy(value)
            elif name in SEVERAL:
                copied[name] = [copy(item) for item in value]
            elif name in MAPS:
                copied[name] = {key: copy(item) for key, item in value.items()}
            else:
                assert name in VALUES
                copied[name] = value
        return copied

    root = copy(normal.root)
    return {**root, "$defs": defs} if isinstance(root, dict) and defs else root


@pytest.mark.parametrize("count", [2**30 + 1, 2**31, 2**63, 10**300, 1e300])
def test_a_maximum_that_no_text_reaches_says_nothing(count: float) -> None:
    names = ("maxLength", "maxItems", "maxProperties", "maxContains")
    assert root_of({"contains": True, **dict.fromkeys(names, count)}) == {"contains": True}
    assert root_of({"contains": True, **dict.fromkeys(names, 2**30)}) == {
        "contains": True,
        **dict.fromkeys(names, 2**30),
    }


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (True, True),
        (False, False),
        ({}, {}),
        ({"title": "t", "description": "d", "default": 1, "x-y": {}, "nullable": True, "contentEncoding": "x"}, {}),
        ({"type": "string"}, {"type": ["string"]}),
        ({"type": ["string", "null", "string"]}, {"type": ["string", "null"]}),
        ({"minLength": 2.0, "required": ["b", "a", "b"]}, {"minLength": 2, "required": ["b", "a"]}),
        ({"format": "email"}, {"format": "email"}),
        ({"format": "int32"}, {}),
        ({"uniqueItems": False}, {}),
        ({"minimum": 5, "exclusiveMinimum": True}, {"exclusiveMinimum": 5}),
        ({"maximum": 5, "exclusiveMaximum": False}, {"maximum": 5}),
        ({"exclusiveMinimum": True}, {}),
        ({"minimum": 1, "exclusiveMinimum": 2}, {"minimum": 1, "exclusiveMinimum": 2}),
        (
            {"items": [{}, False], "additionalItems": {"type": "null"}},
            {"prefixItems": [{}, False], "items": {"type": ["null"]}},
        ),
        ({"items": {}, "additionalItems": False}, {"items": {}}),
        ({"additionalItems": False}, {}),
        ({"items": [], "additionalItems": False}, {"items": False}),
        ({"$schema": DRAFT_2020, "additionalItems": 3, "dependencies": 3}, {}),
        ({"dependencies": {"a": ["b"], "c": {}}}, {"dependentRequired": {"a": ["b"]}, "dependentSchemas": {"c": {}}}),
        ({"dependencies": {"a": ["b"]}, "dependentRequired": {"a": ["c"]}}, {"dependentRequired": {"a": ["c", "b"]}}),
        (
            {"dependencies": {"a": True}, "dependentSchemas": {"a": False}},
            {"dependentSchemas": {"a": {"allOf": [False, True]}}},
        ),
        ({"minContains": 2, "then": False, "else": False}, {}),
        ({"contains": {}, "minContains": 2}, {"contains": {}, "minContains": 2}),
        ({"if": {}}, {}),
        ({"if": {}, "then": False}, {"if": {}, "then": False}),
        ({"if": {}, "unevaluatedProperties": False}, {"if": {}, "unevaluatedProperties": False}),
        ({"$schema": DRAFT_4, "const": 1, "if": {}, "then": False, "contains": False}, {}),
        (
            {"$schema": DRAFT_7, "$ref": "#/definitions/a", "minLength": 3, "definitions": {"a": {}}},
            {"$ref": "#/definitions/a"},
        ),
        ({"$ref": "#/$defs/a", "minLength": 3, "$defs": {"a": {}}}, {"$ref": "#/$defs/a", "minLength": 3}),
        ({"$ref": "#foo", "$defs": {"a": {"$anchor": "foo"}}}, {"$ref": "#/$defs/a"}),
        ({"$ref": "urn:x:s", "$defs": {"a/b": {"$id": "urn:x:s"}}}, {"$ref": "#/$defs/a~1b"}),
        ({"$ref": "#/%24defs/a~1b", "$defs": {"a/b": {}}}, {"$ref": "#/$defs/a~1b"}),
        ({"$schema": DRAFT_4, "$ref": "#x", "definitions": {"a": {"id": "#x"}}}, {"$ref": "#/definitions/a"}),
        ({"$dynamicRef": "#n", "$defs": {"a": {"$dynamicAnchor": "n"}}}, {"$ref": "#/$defs/a"}),
        ({"items": {"$recursiveRef": "#"}}, {"items": {"$ref": "#"}}),
        (
            {"$ref": "#/$defs/a", "$dynamicRef": "#/$defs/b", "$defs": {"a": {}, "b": {}}},
            {"$ref": "#/$defs/a", "allOf": [{"$ref": "#/$defs/b"}]},
        ),
        ({"$schema": DRAFT_2020, "items": {"$recursiveRef": "#"}}, {"items": {}}),
    ],
)
def test_each_draft_becomes_one_vocabulary(schema, expected):
    assert root_of(schema) == expected


def test_the_order_of_properties_is_kept():
    names = ["z", "b", "a", "c"]
    assert list(root_of({"properties": dict.fromkeys(names, True)})["properties"]) == names


def test_nodes_know_where_they_were():
    normal = make(
        {
            "definitions": {"x": {"type": "string"}},
            "items": [{"$ref": "#/definitions/x"}, {}],
            "additionalItems": {"type": "null"},
            "dependencies": {"a/b": {"not": {}}},
        }
    )
    root = normal.root
    assert normal.pointer(root) == ""
    assert [normal.pointer(node) for node in root["prefixItems"]] == ["/items/0", "/items/1"]
    assert normal.pointer(root["items"]) == "/additionalItems"
    assert normal.pointer(root["dependentSchemas"]["a/b"]["not"]) == "/dependencies/a~1b/not"
    assert normal.pointer(normal.resolve(root["prefixItems"][0]["$ref"])) == "/definitions/x"


def test_a_reference_leads_to_the_very_node():
    normal = make({"properties": {"next": {"$ref": "#"}, "other": {"$ref": "#/properties/next"}}})
    following = normal.root["properties"]["next"]
    assert normal.resolve(following["$ref"]) is normal.root
    assert normal.resolve(normal.root["properties"]["other"]["$ref"]) is following


def test_a_reference_into_an_unknown_keyword_makes_it_a_schema():
    normal = make({"properties": {"a": {"$ref": "#/x-kept/0"}}, "x-kept": [{"type": "string", "title": "t"}]})
    assert normal.resolve("#/x-kept/0") == {"type": ["string"]}


def test_references_are_relative_to_the_nearest_id():
    inner = {"$id": "b/c", "$ref": "d", "$defs": {"d": {"$id": "d", "type": "null"}}}
    normal = make({"$id": "http://x/a", "properties": {"p": {"$ref": "b/c"}}, "$defs": {"c": inner}})
    middle = normal.resolve(normal.root["properties"]["p"]["$ref"])
    assert normal.resolve(middle["$ref"]) == {"type": ["null"]}


TREE = {"$id": "http://x/tree", "$dynamicAnchor": "node", "properties": {"kids": {"items": {"$dynamicRef": "#node"}}}}


def test_a_dynamic_reference_with_several_targets_is_refused():
    schema = {"$id": "http://x/strict", "$dynamicAnchor": "node", "$ref": "tree", "$defs": {"tree": TREE}}
    with pytest.raises(Unsupported) as caught:
        make(schema)
    assert caught.value.finding[:2] == ("/$defs/tree/properties/kids/items", "$dynamicRef")
    assert make(TREE).root["properties"]["kids"]["items"] == {"$ref": "#"}


def test_a_recursive_reference_with_several_targets_is_refused():
    inner = {"$id": "tree", "$recursiveAnchor": True, "items": {"$recursiveRef": "#"}}
    schema = {"$id": "http://x/strict", "$recursiveAnchor": True, "$ref": "tree", "$defs": {"tree": inner}}
    with pytest.raises(Unsupported) as caught:
        make({"$schema": DRAFT_2019, **schema})
    assert caught.value.finding[:2] == ("/$defs/tree/items", "$recursiveRef")


def test_contains_beside_unevaluated_items_means_another_thing_in_2019_09():
    schema = {"contains": {"type": "string"}, "unevaluatedItems": False}
    assert root_of(schema)
    with pytest.raises(Unsupported, match="contains"):
        make({"$schema": DRAFT_2019, **schema})


def test_what_another_draft_would_assert_is_listed():
    beside_ref = {"$ref": "#/definitions/x", "minLength": 3, "description": "d"}
    normal = make({"$schema": DRAFT_4, "const": 3, "properties": {"a": beside_ref}, "definitions": {"x": {}}})
    assert [finding[:2] for finding in normal.ignored] == [("", "const"), ("/properties/a", "minLength")]
    assert make({"const": 3, "title": "t"}).ignored == ()


@pytest.mark.parametrize(
    "name",
    ["keyword_probes", "jsonschemabench_sample", pytest.param("json_schema_test_suite", marks=pytest.mark.slow)],
)
@pytest.mark.filterwarnings("ignore:Possible nested set:FutureWarning")
def test_the_meaning_is_the_same(name):
    """The normal form, read by an independent validator, says what the data says of each instance."""
    num_read = num_refused = 0
    for row in grammar_rows(name):
        schema = row["schema"]
        if "\\\\p{" in json.dumps(schema) or row["id"].startswith("draft2020-12/vocabulary/"):
            continue  # re knows no \p; vocabularies of one's own are read as the usual ones
        if row["id"].startswith("draft7") and isinstance(schema, dict):
            schema = {"$schema": DRAFT_7, **schema}
        try:
            validator = Draft202012Validator(as_document(make(schema)))
        except (InvalidSchema, Unsupported):
            num_refused += 1
            continue
        num_read += 1
        for test in row["tests"]:
            if test["valid"] or '"format"' not in json.dumps(schema):
                assert validator.is_valid(test["data"]) == test["valid"], (row["id"], test)
    assert num_read > 100
    # remote and truly dynamic references; references to the meta-schemas; an empty enum
    assert num_refused <= {"keyword_probes": 3, "jsonschemabench_sample": 0, "json_schema_test_suite": 46}[name]
