"""Schemas that are made to cost a lot end soon, in forms or in a refusal. What is counted is work, not time."""

from typing import Any

import pytest

from tests.grammar.schemas import canonical, root_of
from trunkline.grammar.algebra.expansion import MOST_CASES, MOST_STEPS
from trunkline.grammar.interface import Unsupported
from trunkline.grammar.schema.forms import Values


def nested(depth: int, leaf: Any, name: str = "x") -> Any:
    if not depth:
        return leaf(name)
    return {"anyOf": [nested(depth - 1, leaf, name + "0"), nested(depth - 1, leaf, name + "1")]}


def pairs(count: int) -> list[Any]:
    return [{"anyOf": [{"required": [f"a{i}"]}, {"required": [f"b{i}"]}]} for i in range(count)]


def test_alternatives_that_are_one_do_not_multiply() -> None:
    assert len(root_of(nested(10, lambda name: {"type": "string"}))) == 1
    (listed,) = root_of(nested(10, lambda name: {"const": name}))
    assert isinstance(listed, Values) and len(listed.values) == 1024
    assert len(root_of({"allOf": [{"anyOf": [{"type": "string"}, {"type": "null"}]}] * 12})) == 2


@pytest.mark.parametrize(
    "schema, keyword",
    [
        ({"type": "object", "allOf": pairs(12)}, "allOf"),
        (nested(9, lambda name: {"type": "object", "required": [name]}), "anyOf"),
        ({"dependentRequired": {f"a{i}": [f"b{i}"] for i in range(30)}}, "dependentRequired"),
        ({"not": {"properties": {f"p{i}": {"type": "null"} for i in range(300)}}}, "properties"),
        ({"oneOf": [{"properties": {f"p{i}_{j}": {"const": j} for j in range(20)}} for i in range(20)]}, "oneOf"),
        (
            {
                "$defs": {f"n{i}": {"allOf": [{"$ref": f"#/$defs/n{i + 1}"}, {"minProperties": 1}]} for i in range(300)}
                | {"n300": {"type": "object"}},
                "$ref": "#/$defs/n0",
            },
            "allOf",
        ),
    ],
    ids=["products", "alternatives", "dependencies", "denial", "overlaps", "depth"],
)
def test_too_many_combinations_are_refused_or_left_out(schema: Any, keyword: str) -> None:
    with pytest.raises(Unsupported) as caught:
        canonical(schema)
    assert caught.value.finding.keyword == keyword
    forms, findings = canonical(schema, lenient=True)
    assert findings and findings[0].keyword == keyword
    assert all(len(alternatives) <= MOST_CASES for alternatives in forms.definitions.values())


def test_a_product_keeps_what_it_had_when_it_became_too_large() -> None:
    forms, findings = canonical({"type": "object", "allOf": [*pairs(8), *pairs(12)[8:]]}, lenient=True)
    assert len(forms.definitions[forms.root]) == 2**8
    assert [finding.keyword for finding in findings] == ["allOf"]


def test_ways_that_double_are_not_walked_one_by_one() -> None:
    """Two references to the next definition, and so on: 2**60 ways lead to the last."""
    doubling = {f"n{i}": {"allOf": [{"$ref": f"#/$defs/n{i + 1}"}] * 2} for i in range(60)}
    assert root_of({"$defs": doubling | {"n60": {"const": 1}}, "$ref": "#/$defs/n0"}) == (Values(values=("1",)),)


def test_many_alternatives_that_are_told_apart_are_all_kept() -> None:
    def tagged(tag: int) -> Any:
        return {"type": "object", "properties": {"t": {"const": tag}, "v": {"type": "string"}}, "required": ["t"]}

    assert len(root_of({"oneOf": [tagged(tag) for tag in range(100)]})) == 100
    chain = [{"if": {"properties": {"k": {"const": i}}}, "then": {"required": [f"r{i}"]}} for i in range(20)]
    schema = {"type": "object", "properties": {"k": {"enum": list(range(20))}}, "required": ["k"], "allOf": chain}
    assert len(root_of(schema)) == 20
    assert MOST_STEPS > 100 * 100


def test_a_pattern_cannot_make_a_listed_value_slow() -> None:
    schema = {"enum": ["a" * 3000, "aab"], "pattern": "^(a|a?)+b$"}
    assert root_of(schema) == (Values(values=('"aab"',)),)


def test_a_one_of_of_listed_values_takes_no_steps() -> None:
    """A list of countries, each with its title: more pairs than there are steps."""
    (listed,) = root_of({"oneOf": [{"const": f"country {i}", "title": str(i)} for i in range(300)]})
    assert isinstance(listed, Values) and len(listed.values) == 300
    (listed,) = root_of({"oneOf": [{"enum": [1, 2]}, {"enum": [2.0, 3]}, {"const": 4}]})
    assert isinstance(listed, Values) and listed.values == ("1", "3", "4")


def test_a_product_ends_when_it_is_too_large() -> None:
    """It was compared with itself to the end: 30,000 cases, each with each."""
    many = [{"type": "object", "required": [f"a{i}"]} for i in range(170)]
    more = [{"type": "object", "required": [f"b{i}"]} for i in range(170)]
    with pytest.raises(Unsupported) as caught:
        canonical({"allOf": [{"anyOf": many}, {"anyOf": more}]})
    assert "more than 256 alternatives" in caught.value.finding.reason
