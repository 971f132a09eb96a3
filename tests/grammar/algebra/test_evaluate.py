"""The plain evaluator against `jsonschema`, and what it says when in doubt."""

import json
from typing import Any

from hypothesis import given, settings
from jsonschema import Draft202012Validator

from tests.grammar.schemas import rooted, schemas, values
from trunkline.grammar.algebra.evaluate import Evaluator
from trunkline.grammar.algebra.nodes import Nodes
from trunkline.grammar.algebra.patterns import Patterns
from trunkline.grammar.interface import InvalidSchema
from trunkline.grammar.schema import meta
from trunkline.grammar.schema.normalize import normalize


def evaluator(schema: Any, *, lenient: bool = False) -> tuple[Evaluator, Any]:
    normal = normalize(meta.check(json.dumps(schema)))
    return Evaluator(Nodes(normal), Patterns(), lenient=lenient), normal.root


@settings(max_examples=60)
@given(schemas(), schemas(1), values())
def test_it_agrees_with_jsonschema(schema: Any, definition: Any, value: Any) -> None:
    whole = rooted(schema, definition)
    try:
        one, root = evaluator(whole)
    except InvalidSchema:  # leads back to itself, or lists nothing
        return
    expected = Draft202012Validator(whole).is_valid(value)
    assert one.is_valid(value, root, sure=True) == one.is_valid(value, root, sure=False) == expected


def test_what_is_not_known_for_sure_is_neither_valid_nor_invalid() -> None:
    for schema in ({"pattern": r"(a)\1"}, {"format": "date"}, {"not": {"format": "date"}}):
        strict, root = evaluator(schema)
        assert not strict.is_valid("x", root, sure=True)
        assert strict.is_valid("x", root, sure=False)
    either, root = evaluator({"if": {"format": "date"}, "then": {"minLength": 1}, "else": {"maxLength": 0}})
    assert not either.is_valid("x", root, sure=True) and either.is_valid("x", root, sure=False)


def test_lenient_gives_the_benefit_of_the_doubt() -> None:
    lenient, root = evaluator({"pattern": r"(a)\1", "maxLength": 3}, lenient=True)
    assert lenient.is_valid("x", root, sure=True) and not lenient.is_valid("long", root, sure=True)


def test_numbers_are_what_was_written() -> None:
    one, root = evaluator({"multipleOf": 0.01, "type": "number"})
    assert one.is_valid(4.35, root, sure=True) and not one.is_valid(4.355, root, sure=True)
    one, root = evaluator({"const": 1})
    assert one.is_valid(1.0, root, sure=True) and not one.is_valid(True, root, sure=True)
