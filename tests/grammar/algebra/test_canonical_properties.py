"""Forms against `jsonschema`, on random schemas: they never accept what is not valid, and seldom less."""

from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from tests.grammar.schemas import canonical, check_form, rooted, schemas, values
from trunkline.grammar.interface import InvalidSchema, Unsupported
from trunkline.grammar.schema.accepts import accepts

MANY = st.lists(values(), min_size=20, max_size=30)


def check_never_wider(schema: dict[str, Any], samples: list[Any]) -> None:
    try:
        forms = canonical(schema).forms
        check_form(forms)
    except Unsupported:
        return
    except InvalidSchema as invalid:
        if "nothing satisfies" in invalid.finding.reason:
            forms = None
        else:
            return  # leads back to itself
    validator = Draft202012Validator(schema)
    for value in samples:
        if forms is None or not accepts(forms, value):
            continue
        assert validator.is_valid(value), value


@settings(max_examples=40)
@given(schemas(), schemas(1), MANY)
def test_what_the_forms_accept_is_valid(schema: Any, definition: Any, samples: list[Any]) -> None:
    check_never_wider(rooted(schema, definition), samples)


@pytest.mark.slow
@settings(max_examples=500)
@given(schemas(), schemas(1), MANY)
def test_what_the_forms_accept_is_valid_at_length(schema: Any, definition: Any, samples: list[Any]) -> None:
    check_never_wider(rooted(schema, definition), samples)


def check_exact(schema: dict[str, Any], samples: list[Any]) -> None:
    try:
        forms = canonical(schema).forms
    except InvalidSchema as invalid:
        assume("nothing satisfies" in invalid.finding.reason)
        forms = None
    validator = Draft202012Validator(schema)
    for value in samples:
        assert (forms is not None and accepts(forms, value)) == validator.is_valid(value), value


@settings(max_examples=40)
@given(schemas(2, exact=True), schemas(1, exact=True), MANY)
def test_plain_schemas_lose_nothing(schema: Any, definition: Any, samples: list[Any]) -> None:
    check_exact(rooted(schema, definition), samples)


@pytest.mark.slow
@settings(max_examples=500)
@given(schemas(3, exact=True), schemas(1, exact=True), MANY)
def test_plain_schemas_lose_nothing_at_length(schema: Any, definition: Any, samples: list[Any]) -> None:
    check_exact(rooted(schema, definition), samples)
