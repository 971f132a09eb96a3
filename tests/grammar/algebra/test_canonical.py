"""What each keyword becomes, and what they become together. Read it as the documentation of the forms."""

from fractions import Fraction
from typing import Any

import pytest

from tests.grammar.schemas import canonical, forms_of, only, root_of
from trunkline.grammar.interface import Finding, InvalidSchema, Unsupported
from trunkline.grammar.schema.accepts import accepts
from trunkline.grammar.schema.forms import ANY, NEVER, Arrays, Contains, Numbers, Objects, Strings, Values

BOOLEANS_AND_NULL = Values(values=("true", "false", "null"))


def takes(schema: Any, *values: Any) -> list[bool]:
    forms = forms_of(schema)
    return [accepts(forms, value) for value in values]


# --- types


def test_everything_and_nothing() -> None:
    assert forms_of(True).root == forms_of({}).root == forms_of({"description": "x"}).root == ANY
    with pytest.raises(InvalidSchema, match="nothing satisfies"):
        canonical(False)


def test_each_type_is_an_alternative() -> None:
    assert root_of({"type": ["string", "null"], "maxLength": 5}) == (Strings(max_length=5), Values(values=("null",)))
    assert root_of({"type": "boolean"}) == (Values(values=("true", "false")),)


def test_a_keyword_says_nothing_of_other_types() -> None:
    assert root_of({"minLength": 2}) == (Strings(min_length=2), Numbers(), Arrays(), Objects(), BOOLEANS_AND_NULL)


# --- values


def test_listed_values_are_filtered_by_all_that_stands_beside_them() -> None:
    assert only({"enum": ["a", "bcd", 5, None], "type": ["string", "integer"], "maxLength": 2}).values == ('"a"', "5")
    assert only({"enum": [1, 1.0, True, [1, {"b": 2, "a": 1}]]}).values == ("1", "true", '[1,{"b":2,"a":1}]')
    assert only({"allOf": [{"enum": ["a", "b", "c"]}, {"enum": ["c", "b"]}], "not": {"const": "c"}}).values == ('"b"',)


def test_values_of_several_alternatives_are_listed_once() -> None:
    assert only({"anyOf": [{"const": "a"}, {"const": "b"}, {"enum": ["a", "c"]}]}).values == ('"a"', '"b"', '"c"')
    assert only({"anyOf": [{"const": {"a": 1, "b": 2}}, {"const": {"b": 2, "a": 1}}]}).values == ('{"a":1,"b":2}',)
    assert only({"anyOf": [{"type": "string"}, {"const": "b"}]}) == Strings()


# --- strings and numbers


def test_strings() -> None:
    schema = {"type": "string", "minLength": 1, "allOf": [{"maxLength": 9, "pattern": "^a"}, {"minLength": 3}]}
    assert only(schema) == Strings(min_length=3, max_length=9, patterns=("^a",))
    denied = {"type": "string", "not": {"anyOf": [{"enum": ["x", "y"]}, {"pattern": "^a"}, {"maxLength": 1}]}}
    assert only(denied) == Strings(min_length=2, not_patterns=("^a",), excluded=())
    assert only({"type": "string", "not": {"enum": ["x", "y"]}}) == Strings(excluded=("x", "y"))
    assert only({"type": "string", "maxLength": 0}) == Values(values=('""',))


def test_integers_have_whole_bounds() -> None:
    assert only({"type": "integer", "minimum": 0.5, "exclusiveMaximum": 10}) == Numbers(
        integer=True, minimum=Fraction(1), maximum=Fraction(9)
    )
    assert only({"type": "number", "multipleOf": 2}) == Numbers(integer=True, multiple_of=Fraction(2))
    assert only({"type": "integer", "minimum": 5, "maximum": 5}) == Values(values=("5",))
    assert only({"type": "integer", "minimum": 0, "not": {"enum": [0, 1, 7]}}) == Numbers(
        integer=True, minimum=Fraction(2), excluded=(Fraction(7),)
    )


def test_multiples_are_exact_fractions() -> None:
    assert only({"type": "number", "multipleOf": 0.01}).multiple_of == Fraction(1, 100)
    both = {"type": "number", "allOf": [{"multipleOf": 0.5}, {"multipleOf": 0.75}]}
    assert only(both).multiple_of == Fraction(3, 2)


def test_no_multiple_is_said_of_few_integers_only() -> None:
    few = {"type": "integer", "minimum": 1, "maximum": 7, "not": {"multipleOf": 3}}
    assert only(few) == Numbers(
        integer=True, minimum=Fraction(1), maximum=Fraction(7), excluded=(Fraction(3), Fraction(6))
    )
    with pytest.raises(Unsupported) as caught:
        canonical({"properties": {"n": {"type": "integer", "not": {"multipleOf": 3}}}})
    assert caught.value.finding[:2] == ("/properties/n/not", "multipleOf")


# --- arrays


def test_arrays() -> None:
    schema = {"type": "array", "prefixItems": [{"type": "string"}], "items": {"type": "integer"}, "minItems": 1}
    forms = forms_of(schema)
    assert forms.definitions["#"] == (Arrays(prefix=("#/prefixItems/0",), rest="#/items", min_items=1),)
    assert only({"type": "array", "prefixItems": [True, {"type": "string"}], "maxItems": 1}) == Arrays(
        prefix=(ANY,), rest=NEVER
    )
    assert only({"type": "array", "items": False}) == only({"type": "array", "maxItems": 0}) == Arrays(rest=NEVER)
    assert only({"type": "array", "prefixItems": [True, False]}) == Arrays(prefix=(ANY,), rest=NEVER)


def test_contains() -> None:
    assert only({"type": "array", "contains": {"const": 1}, "maxContains": 2}) == Arrays(
        min_items=1, contains=(Contains(item="#/contains", least=1, most=2),)
    )
    assert only({"type": "array", "contains": True, "minContains": 2, "maxContains": 3}) == Arrays(
        min_items=2, max_items=3
    )
    assert only({"type": "array", "not": {"contains": {"const": 1}}}).rest == "not #/not/contains"
    assert only({"type": "array", "not": {"items": {"const": 1}}}).contains == (Contains(item="not #/not/items"),)


# --- objects


def test_a_plain_object_is_one_alternative_with_its_properties_in_order() -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "id": {"type": "string"}},
        "required": ["id", "name"],
        "additionalProperties": False,
    }
    assert forms_of(schema).definitions == {
        "#": (
            Objects(
                properties=(
                    ("name", "#/properties/name"),
                    ("age", "#/properties/age"),
                    ("id", "#/properties/name"),  # what is spelled alike is one definition
                ),
                required=frozenset(("id", "name")),
                additional=NEVER,
            ),
        ),
        "#/properties/name": (Strings(),),
        "#/properties/age": (Numbers(integer=True),),
    }


def test_required_properties_are_properties() -> None:
    schema = {
        "type": "object",
        "properties": {"b": {"type": "integer"}},
        "patternProperties": {"^x": {"type": "null"}},
        "additionalProperties": {"type": "string"},
        "required": ["xy", "a"],
    }
    assert only(schema).properties == (
        ("b", "#/properties/b"),
        ("xy", "#/patternProperties/^x"),
        ("a", "#/additionalProperties"),
    )


def test_a_conjunction_of_objects_is_one_object() -> None:
    schema = {
        "allOf": [
            {"type": "object", "properties": {"id": {"type": "string"}}, "required": ["id"]},
            {"properties": {"z": {"type": "integer"}, "id": {"maxLength": 3}}},
        ],
        "unevaluatedProperties": False,
    }
    form = only(schema)
    assert [name for name, _ in form.properties] == ["id", "z"]
    assert (form.required, form.additional) == (frozenset({"id"}), NEVER)
    assert takes(schema, {"id": "abc"}, {"id": "abcd"}, {"id": "a", "y": 1}) == [True, False, False]


def test_names_of_properties_become_patterns() -> None:
    schema = {
        "type": "object",
        "propertyNames": {"pattern": "^[a-z]+$"},
        "additionalProperties": {"type": "integer"},
    }
    assert only(schema) == Objects(patterns=(("^[a-z]+$", "#/additionalProperties"),), additional=NEVER)
    listed = {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "properties": {"c": {}}}
    assert only(listed) == Objects(properties=(("a", ANY), ("b", ANY)), additional=NEVER)
    short = {"type": "object", "propertyNames": {"maxLength": 2}}
    assert takes(short, {"ab": 1}, {"abc": 1}) == [True, False]


def test_a_dependent_requirement_is_two_alternatives() -> None:
    assert root_of({"type": "object", "properties": {"a": {}, "b": {}}, "dependentRequired": {"a": ["b"]}}) == (
        Objects(properties=(("a", NEVER), ("b", ANY))),
        Objects(properties=(("a", ANY), ("b", ANY)), required=frozenset(("a", "b"))),
    )


def test_a_condition_is_two_alternatives() -> None:
    schema = {
        "type": "object",
        "properties": {"kind": {"enum": ["a", "b"]}, "x": {"type": "integer"}},
        "required": ["kind"],
        "if": {"properties": {"kind": {"const": "a"}}},
        "then": {"required": ["x"]},
    }
    forms = forms_of(schema)
    first, second = forms.definitions["#"]
    assert isinstance(first, Objects) and isinstance(second, Objects)
    assert forms.definitions[dict(first.properties)["kind"]] == (Values(values=('"a"',)),)
    assert forms.definitions[dict(second.properties)["kind"]] == (Values(values=('"b"',)),)
    assert (first.required, second.required) == (frozenset(("kind", "x")), frozenset(("kind",)))


def test_some_other_property_must_be_there() -> None:
    schema = {"type": "object", "not": {"properties": {"a": {}}, "additionalProperties": False}}
    assert takes(schema, {}, {"a": 1}, {"b": 1}, {"a": 1, "b": 1}) == [False, False, True, True]
    closed = {"type": "object", "properties": {"a": {}, "b": {}}, "additionalProperties": False}
    both = closed | {"not": {"properties": {"a": {}}, "additionalProperties": False}}
    assert takes(both, {}, {"a": 1}, {"b": 1}, {"c": 1}) == [False, False, True, False]


# --- exactly one


def test_branches_told_by_a_tag_need_no_denial() -> None:
    def tagged(tag: str) -> dict[str, Any]:
        return {"type": "object", "properties": {"t": {"const": tag}}, "required": ["t"]}

    alternatives: Any = root_of({"oneOf": [tagged("x"), tagged("y"), tagged("z")]})
    assert [len(form.properties) for form in alternatives] == [1, 1, 1]


def test_branches_that_overlap_exclude_each_other() -> None:
    schema = {"type": "integer", "oneOf": [{"minimum": 0}, {"maximum": 10}]}
    assert root_of(schema) == (Numbers(integer=True, minimum=Fraction(11)), Numbers(integer=True, maximum=Fraction(-1)))
    either = {"type": "object", "oneOf": [{"required": ["a"]}, {"required": ["b"]}]}
    assert takes(either, {}, {"a": 1}, {"b": 1}, {"a": 1, "b": 1}) == [False, True, True, False]


def test_many_branches_of_one_property_each_stay_one_alternative_each() -> None:
    branches = [{"type": "object", "properties": {f"p{i}": {"type": "null"}}, "required": [f"p{i}"]} for i in range(12)]
    assert len(root_of({"oneOf": branches})) == 12


def test_a_tag_that_need_not_be_there_is_asked_for_where_all_else_is_too_much() -> None:
    def branch(tag: int) -> dict[str, Any]:
        some = {f"p{tag}_{i}": {"type": "null"} for i in range(30)}
        return {"type": "object", "properties": {"t": {"enum": [f"t{tag}"]}, **some}}

    alternatives: Any = root_of({"oneOf": [branch(tag) for tag in range(30)]})
    assert [form.required for form in alternatives] == [frozenset("t")] * 30


# --- references and emptiness


def test_a_reference_is_its_target() -> None:
    schema = {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": {
                "type": "object",
                "properties": {"next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
                "required": ["next"],
            }
        },
    }
    forms = forms_of(schema)
    assert forms.root == "#/$defs/node" and len(forms.definitions) == 2
    assert takes(schema, {"next": {"next": None}}, {"next": {}}) == [True, False]


def test_a_conjunction_of_recursive_schemas_is_recursive() -> None:
    schema = {
        "allOf": [{"$ref": "#/$defs/tree"}, {"$ref": "#/$defs/named"}],
        "$defs": {
            "tree": {"type": "object", "properties": {"kids": {"type": "array", "items": {"$ref": "#/$defs/tree"}}}},
            "named": {
                "required": ["n"],
                "properties": {"kids": {"items": {"$ref": "#/$defs/named"}}, "n": {"type": "string"}},
            },
        },
    }
    assert takes(schema, {"n": "x", "kids": [{"n": "y"}]}, {"n": "x", "kids": [{}]}) == [True, False]
    assert len(forms_of(schema).definitions) == 3


def test_what_never_ends_has_no_value() -> None:
    endless: Any = {"$ref": "#/$defs/n", "$defs": {"n": {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}}}}
    assert only(endless).properties == (("n", "#/$defs/n"),)
    endless["$defs"]["n"]["required"] = ["n"]
    with pytest.raises(InvalidSchema):
        canonical(endless)
    optional = {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}, "$defs": endless["$defs"]}
    assert only(optional) == Objects(properties=(("n", NEVER),))


def test_an_alternative_that_nothing_satisfies_is_left_out() -> None:
    impossible = {"type": "object", "properties": {"a": {"minLength": 3, "maxLength": 2, "type": "string"}}}
    assert only(impossible | {"additionalProperties": False}) == Objects(additional=NEVER)
    assert only({"anyOf": [impossible | {"required": ["a"]}, {"type": "null"}]}) == Values(values=("null",))
    nothing = [
        impossible | {"required": ["a"]},
        {"type": "string", "allOf": [{"pattern": "^a"}, {"pattern": "^b"}]},
        {"type": "array", "minItems": 2, "items": False},
        {"type": "object", "minProperties": 2, "properties": {"a": {}}, "additionalProperties": False},
        {"type": "object", "required": ["a", "b"], "maxProperties": 1},
        {"type": "array", "items": {"type": "string"}, "contains": {"type": "null"}},
        {"type": "integer", "minimum": 1, "exclusiveMaximum": 2, "not": {"const": 1}},
    ]
    for schema in nothing:
        with pytest.raises(InvalidSchema, match="nothing satisfies"):
            canonical(schema)


# --- what can't be said


@pytest.mark.parametrize(
    "schema, pointer, keyword",
    [
        ({"properties": {"a/b": {"type": "string", "pattern": r"(a)\1"}}}, "/properties/a~1b", "pattern"),
        ({"items": {"not": {"format": "date"}}}, "/items/not", "format"),
        ({"type": "array", "not": {"uniqueItems": True}}, "/not", "uniqueItems"),
        ({"type": "object", "not": {"propertyNames": {"pattern": "^a"}}}, "/not", "propertyNames"),
    ],
)
def test_what_cannot_be_said_is_named_or_left_out(schema: Any, pointer: str, keyword: str) -> None:
    with pytest.raises(Unsupported) as caught:
        canonical(schema)
    assert caught.value.finding[:2] == (pointer, keyword)
    forms, findings = canonical(schema, lenient=True)
    assert [finding[:2] for finding in findings] == [(pointer, keyword)]
    assert isinstance(findings[0], Finding) and forms.definitions


def test_what_is_left_out_under_a_denial_widens_the_whole() -> None:
    schema = {"type": "object", "not": {"patternProperties": {"^a": {"type": "string"}}}, "required": ["b"]}
    forms, findings = canonical(schema, lenient=True)
    assert findings[0].keyword == "patternProperties"
    assert accepts(forms, {"b": 1, "ax": 1}) and accepts(forms, {"b": 1})  # the second is not valid, and may pass
    assert not accepts(forms, {})


def test_an_alternative_that_cannot_be_said_yields_to_others_of_its_type() -> None:
    schema = {"type": "string", "anyOf": [{"pattern": r"(a)\1"}, {"maxLength": 3}]}
    assert only(schema) == Strings(max_length=3)


def test_what_only_an_unsaid_alternative_satisfies_is_not_called_impossible() -> None:
    endless = {"type": "object", "properties": {"x": {"$ref": "#"}}, "required": ["x"]}
    with pytest.raises(Unsupported) as caught:
        canonical({"anyOf": [endless, {"type": "object", "not": {"patternProperties": {"^a": {"type": "null"}}}}]})
    assert caught.value.finding.keyword == "patternProperties"


def test_unevaluated_properties_count_what_the_taken_branches_looked_at() -> None:
    schema = {
        "type": "object",
        "anyOf": [
            {"properties": {"a": {"const": 1}}, "required": ["a"]},
            {"properties": {"b": {"const": 2}}, "required": ["b"]},
        ],
        "unevaluatedProperties": False,
    }
    assert takes(schema, {"a": 1}, {"a": 1, "b": 2}, {"a": 1, "b": 3}, {"c": 1}) == [True, True, False, False]
    denied = {"type": "object", "not": {"not": {"properties": {"a": {}}}}, "unevaluatedProperties": False}
    assert takes(denied, {}, {"a": 1}) == [True, False]  # what is denied looks at nothing, even denied twice
    listed = {"type": "array", "prefixItems": [True], "contains": {"type": "null"}, "unevaluatedItems": False}
    assert takes(listed, [1], [1, None], [1, None, 2]) == [False, True, False]


@pytest.mark.parametrize(
    "schema, pointer, keyword",
    [
        (False, "", "type"),
        (
            {
                "properties": {"a": {"type": "string", "minLength": 3, "maxLength": 2}},
                "required": ["a"],
                "type": "object",
            },
            "/properties/a",
            "minLength",
        ),
        ({"type": "object", "required": ["a"], "additionalProperties": False}, "", "required"),
        (
            {"type": "array", "minItems": 1, "items": {"allOf": [{"minimum": 2}, {"type": "number", "maximum": 1}]}},
            "/items/allOf/0",
            "minimum",
        ),
    ],
)
def test_a_contradiction_is_found(schema: Any, pointer: str, keyword: str) -> None:
    with pytest.raises(InvalidSchema) as caught:
        canonical(schema)
    assert caught.value.finding == Finding(pointer, keyword, "nothing satisfies the schema")
