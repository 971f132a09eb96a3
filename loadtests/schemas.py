"""The JSON schemas of the load, and whether a text follows one, by `jsonschema`. Knows no Locust.

They bound every list, text and number, so that no valid answer is longer than MAX_TOKENS.
"""

import json
from typing import Any

from jsonschema import Draft202012Validator

MAX_TOKENS = 160


def schema(**properties: Any) -> dict[str, Any]:
    """An object that has these properties, and no other."""
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


WORD = {"type": "string", "pattern": "^[a-z]{1,12}$"}
SCHEMAS = {
    "ticket": schema(team={"enum": ["billing", "shipping", "returns"]}, urgent={"type": "boolean"}),
    "review": schema(
        stars={"type": "integer", "minimum": 1, "maximum": 5},
        topics={"type": "array", "items": WORD, "minItems": 1, "maxItems": 3},
    ),
    "order": schema(
        lines={
            "type": "array",
            "items": schema(article=WORD, count={"type": "integer", "minimum": 1, "maximum": 99}),
            "minItems": 1,
            "maxItems": 3,
        },
        note={"anyOf": [WORD, {"type": "null"}]},
    ),
}


def objection(answer_text: str, wanted: dict[str, Any]) -> str | None:
    """Why a text is not JSON that follows a schema, as one line that is the same for all such texts; None if it is."""
    try:
        value = json.loads(answer_text)
    except ValueError:
        return "not JSON"
    error = next(Draft202012Validator(wanted).iter_errors(value), None)
    return error and f"breaks its schema: {error.validator} at {error.json_path}"
