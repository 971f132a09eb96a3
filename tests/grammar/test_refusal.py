"""The words in which constraints are refused."""

from typing import Any

import pytest

from tests.grammar.test_prepare import UNIQUE, refused, tag
from trunkline.constraint import Tags

IMPOSSIBLE = {"type": "array", "items": {"enum": ["a"]}, "uniqueItems": True, "minItems": 3}
UNKNOWABLE = {"type": "string", "pattern": r"^(a|b)\1$"}


def test_what_nothing_satisfies_is_no_valid_schema() -> None:
    error = refused(json_schema=IMPOSSIBLE, where="response_format")
    assert error.message == (
        "Invalid schema for response_format: In context=(), this schema is not valid. At the root: nothing satisfies the schema."
    )
    assert error.code is None
    error = refused(json_schema=IMPOSSIBLE, unsupported="validate")
    assert error.message.endswith("nothing satisfies the schema.")


def test_nor_are_arguments_that_nothing_satisfies() -> None:
    nothing = {"type": "object", "properties": {"a": IMPOSSIBLE}, "required": ["a"]}
    error = refused(tags=Tags(tags=(tag("f", {"type": "object"}), tag("g", nothing, 1)), forced=True))
    assert error.message.startswith("Invalid schema for function 'g'") and "nothing satisfies" in error.message
    assert (error.param, error.code) == ("tools[1].function.parameters", "invalid_function_parameters")


def test_a_long_pointer_is_cut_in_the_middle() -> None:
    schema: dict[str, Any] = {"type": "strng"}
    for _ in range(60):
        schema = {"items": schema}
    (finding,) = refused(json_schema=schema).findings
    assert finding.pointer.count("items") == 60, "whole for machines"
    message = refused(json_schema=schema).message
    assert "context=('items', 'items', " in message and "items', 'items')" in message
    assert message.count("items") < 60 and len(message) < 700
    for _ in range(60):
        schema = {"items": schema}
    assert len(refused(json_schema=schema).message) < 700


@pytest.mark.parametrize(
    ("fields", "advice"),
    [
        ({}, 'enforced: Constraint(unsupported="validate").'),
        (
            {"where": "response_format"},
            "enforced: grammar_unsupported 'validate' in the request, --grammar-unsupported validate for",
        ),
        ({"strict": True}, "Leave it out, or set strict to false and unsupported to 'validate'."),
        ({"strict": True, "unsupported": "validate"}, "Leave it out, or set strict to false."),
        (
            {"strict": True, "where": "response_format"},
            "Leave it out, or set strict to false and grammar_unsupported to 'validate'.",
        ),
        ({"backend": "xgrammar"}, ' Constraint(backend="auto") may find another backend for it.'),
        ({"backend": "xgrammar", "where": "guided_json"}, " by grammar_backend 'xgrammar': "),
        ({"backend": "xgrammar", "where": "guided_json"}, " grammar_backend 'auto' may find another backend for it."),
    ],
)
def test_the_advice_is_in_the_words_of_who_asks(fields: dict[str, Any], advice: str) -> None:
    for schema in (UNKNOWABLE, UNIQUE):
        assert advice in refused(json_schema=schema, **fields).message
