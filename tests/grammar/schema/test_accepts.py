"""Values with their keys in the order in which they are written. What `accepts` says itself is tested along with `canonical`."""

import json
import random
from typing import Any

import pytest

from tests.grammar.random_forms import random_forms, random_value, shuffled
from tests.grammar.schemas import forms_of
from trunkline.grammar.schema.accepts import in_order

PAIR = {"type": "object", "properties": {"b": {}, "a": {}}}


@pytest.mark.parametrize(
    ("schema", "value", "expected"),
    [
        (PAIR, {"z": 1, "a": 2, "b": 3, "y": 4}, {"b": 3, "a": 2, "z": 1, "y": 4}),
        ({"items": PAIR}, [{"a": 1, "b": 2}, 3], [{"b": 2, "a": 1}, 3]),
        ({"properties": {"x": PAIR}}, {"x": {"a": 1, "b": 2}}, {"x": {"b": 2, "a": 1}}),
        ({"patternProperties": {"^x": PAIR}}, {"xy": {"a": 1, "b": 2}}, {"xy": {"b": 2, "a": 1}}),
        ({"additionalProperties": PAIR}, {"x": {"a": 1, "b": 2}}, {"x": {"b": 2, "a": 1}}),
        ({"prefixItems": [PAIR]}, [{"a": 1, "b": 2}, {"a": 1, "b": 2}], [{"b": 2, "a": 1}, {"a": 1, "b": 2}]),
        (
            {"const": {"b": [{"d": 1, "c": 1}], "a": 1}},
            {"a": 1.0, "b": [{"c": 1, "d": 1}]},
            {"b": [{"d": 1, "c": 1}], "a": 1.0},
        ),
        ({**PAIR, "required": ["a", "b"]}, {"z": 1, "b": 2}, {"b": 2, "z": 1}),  # it is not valid
        (PAIR, "text", "text"),
    ],
)
def test_in_order(schema: Any, value: Any, expected: Any) -> None:
    assert json.dumps(in_order(forms_of(schema), value)) == json.dumps(expected)


def test_the_alternative_that_takes_the_value_says_the_order() -> None:
    turned = {"type": "object", "properties": {"a": {"type": "string"}, "b": {}}, "required": ["a"]}
    forms = forms_of({"anyOf": [{**PAIR, "properties": {"b": {}, "a": {"type": "integer"}}}, turned]})
    assert list(in_order(forms, {"a": 1, "b": 1})) == ["b", "a"]
    assert list(in_order(forms, {"b": 1, "a": "x"})) == ["a", "b"]


def test_only_the_order_changes() -> None:
    rng = random.Random(0)
    for _ in range(300):
        forms = random_forms(rng)
        value = random_value(rng, forms, forms.root)
        once = in_order(forms, shuffled(rng, value))
        assert once == value
        assert repr(in_order(forms, once)) == repr(once)
