"""What /openapi.json says, in words: the fields of a body, the kind of a value. For pages that tell of the API; knows no route.

    operations_of(document)                              # [("post", "/v1/chat/completions", {…}), …]
    fields_of({"properties": {"n": {"type": "integer", "minimum": 1, "default": 1}}})   # [Field("n", "integer, at least 1", "`1`")]

Names and values stand in `backquotes`.
"""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

Schema = Mapping[str, Any]

METHODS = ("get", "post", "delete", "put", "patch")


class Field(NamedTuple):
    """One of an object."""

    name: str
    kind: str
    default: str  # "": it must be sent


def operations_of(document: Schema) -> list[tuple[str, str, Schema]]:
    """Method, path and description of all there are."""
    return [
        (method, path, item[method]) for path, item in document["paths"].items() for method in METHODS if method in item
    ]


def body_of(operation: Schema) -> Schema:
    """The schema of what is sent; {}: nothing is."""
    content: Schema = operation.get("requestBody", {}).get("content", {})
    return dict(content.get("application/json", {}).get("schema", {}))


def names_in(schema: Schema) -> list[str]:
    """Of a reference, or of each alternative."""
    if "$ref" in schema:
        return [schema["$ref"].rsplit("/", 1)[1]]
    return [name for alternative in schema.get("anyOf", ()) for name in names_in(alternative)]


def fields_of(schema: Schema) -> list[Field]:
    """Of an object, in their order; none if it is no object."""
    required = schema.get("required", ())
    return [
        Field(name, f"{kind_of(field)} or null" if _may_be_null(field) else kind_of(field), "")
        if name in required
        else Field(name, kind_of(field), f"`{json.dumps(field.get('default'))}`")
        for name, field in schema.get("properties", {}).items()
    ]


def _may_be_null(schema: Schema) -> bool:
    return any(one.get("type") == "null" for one in schema.get("anyOf", ()))


def kind_of(schema: Schema) -> str:
    """In the words of JSON: "integer 1 to 128", "list of `ChatMessage`"."""
    if "$ref" in schema:
        return f"`{names_in(schema)[0]}`"
    for union in ("anyOf", "oneOf", "allOf"):
        if union in schema:
            kinds = dict.fromkeys(kind_of(one) for one in schema[union] if one.get("type") != "null")
            return " or ".join(kinds) or "null"
    if "const" in schema:
        return f"`{json.dumps(schema['const'])}`"
    if "enum" in schema:
        return ", ".join(f"`{json.dumps(value)}`" for value in schema["enum"])
    kind = schema.get("type", "anything")
    if isinstance(kind, list):
        kind = " or ".join(one for one in kind if one != "null")
    if kind == "array":
        items = schema.get("items") or (schema.get("prefixItems") or [{}])[0]
        return f"list of {kind_of(items)}{_limits(schema, 'minItems', 'maxItems')}"
    if kind == "object" and isinstance(schema.get("additionalProperties"), dict) and schema["additionalProperties"]:
        return f"object of {kind_of(schema['additionalProperties'])}"
    if kind == "string":
        return f"string{_limits(schema, 'minLength', 'maxLength')}"
    return f"{kind}{_limits(schema, 'minimum', 'maximum')}"


def _limits(schema: Schema, least: str, most: str) -> str:
    low, high = schema.get(least), schema.get(most)
    unit = "" if least == "minimum" else (" characters" if least == "minLength" else " of them")
    if low is None and high is None:
        return ""
    if high is None:
        return f", at least {low}{unit}"
    return f", up to {high}{unit}" if low is None else f", {low} to {high}{unit}"
