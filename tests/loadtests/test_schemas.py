"""The schemas of the load: what follows them, what does not, and that no answer needs more tokens than it is given."""

import json

import pytest
from jsonschema import Draft202012Validator

from loadtests.schemas import MAX_TOKENS, SCHEMAS, objection

LONGEST = {
    "ticket": {"team": "shipping", "urgent": False},
    "review": {"stars": 5, "topics": ["a" * 12] * 3},
    "order": {"lines": [{"article": "a" * 12, "count": 99}] * 3, "note": "a" * 12},
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_longest_answer_fits(name: str) -> None:
    Draft202012Validator.check_schema(SCHEMAS[name])
    text = json.dumps(LONGEST[name])
    assert objection(text, SCHEMAS[name]) is None
    assert len(text) <= 2 * MAX_TOKENS  # a token has two characters or more, in JSON of English words


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "not JSON"),
        ('{"team": "billing", "urg', "not JSON"),
        ('{"team": "sales", "urgent": true}', "breaks its schema: enum at $.team"),
        ('{"team": "billing"}', "breaks its schema: required at $"),
        ('{"team": "billing", "urgent": true, "x": 1}', "breaks its schema: additionalProperties at $"),
    ],
)
def test_what_breaks_a_schema_is_said(text: str, says: str) -> None:
    assert objection(text, SCHEMAS["ticket"]) == says
