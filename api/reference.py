"""The reference of the HTTP API, docs/reference.md, made from what /openapi.json says. Starts no engine.

python -m trunkline.api.reference docs/reference.md      # write the page
python -m trunkline.api.reference                        # print it
"""

import argparse
import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from trunkline.api.app import create_app
from trunkline.api.service import Service
from trunkline.async_llm import AsyncLLM
from trunkline.config import ApiConfig, engine_config

Schema = Mapping[str, Any]

COMMAND = ".venv/bin/python -m trunkline.api.reference docs/reference.md"
HEAD = f"""# API reference

Made from the server's own description, `GET /openapi.json`, by `{COMMAND}`: don't edit it. What the fields mean,
and how they differ from OpenAI's, is on [the API's page](api.md).

Of a body, a field without a default must be sent, and one whose default is `null` may be `null`. Of an answer, `?` says that a field is not
always there. Errors have the body `ErrorAnswer`, under `/v1/messages` Anthropic's; their codes are [listed](api.md#errors).
"""
ALIKE = ("ChatRequest", "CompletionRequest")  # what both have, most other bodies have, too
METHODS = ("get", "post", "delete", "put", "patch")


class Field(NamedTuple):
    name: str
    kind: str
    default: str  # "": it must be sent


def document() -> dict[str, Any]:
    """What a server of any model says of itself."""
    service = Service(ApiConfig(served_model_names=("model",)), AsyncLLM.of(engine_config("model")))
    return create_app(service).openapi()


def render(openapi: Schema) -> str:
    """The whole page, as Markdown."""
    schemas: Mapping[str, Schema] = openapi["components"]["schemas"]
    operations = [
        (method, path, item[method]) for path, item in openapi["paths"].items() for method in METHODS if method in item
    ]
    bodies = dict.fromkeys(name for _, _, operation in operations for name in _names(_body(operation)))
    common = {field for field in _fields(schemas[ALIKE[0]]) if field in _fields(schemas[ALIKE[1]])}
    lines = [HEAD, "## Routes", "", *_routes(operations), "", "## Bodies", ""]
    lines += ["### Common fields", "", *_table(field for field in _fields(schemas[ALIKE[0]]) if field in common)]
    for name in bodies:
        fields = _fields(schemas[name])
        shared = [field.name for field in fields if field in common]
        lines += ["", f"### {name}", ""]
        if len(shared) == len(common):
            lines += ["The common fields, and", ""]
        elif shared:
            lines += [f"Of the common fields {_codes(shared)}, and", ""]
        lines += _table(field for field in fields if field not in common) if set(fields) - common else ["nothing else."]
    lines += ["", "## Parts, answers and events", "", "| name | fields |", "|---|---|"]
    for name in sorted(schemas.keys() - bodies.keys()):
        lines.append(f"| `{name}` | {_inline(schemas[name])} |")
    return "\n".join(lines) + "\n"


def _routes(operations: list[tuple[str, str, Schema]]) -> Iterator[str]:
    yield "| route | what | body | answer | other statuses |"
    yield "|---|---|---|---|---|"
    for method, path, operation in operations:
        query = [item["name"] for item in operation.get("parameters", ()) if item["in"] == "query"]
        address = f"`{method.upper()} {path}`" + (f", query {_codes(query)}" if query else "")
        answers = operation["responses"]
        content = answers.get("200", {}).get("content", {})
        told = [_answer(media, item) for media, item in content.items()]
        others = ", ".join(status for status in answers if status != "200")
        body = " or ".join(f"`{name}`" for name in _names(_body(operation)))
        what = " ".join(operation.get("description", "").split())
        yield f"| {address} | {_cell(what)} | {body} | {_cell('; '.join(told))} | {others} |"


def _answer(media: str, content: Schema) -> str:
    if media == "text/event-stream":
        data = re.findall(r'"#/components/schemas/(\w+)"', json.dumps(content))
        return f"events of {_codes(sorted(set(data)))}"
    return _kind(content["schema"]) + ("" if media == "application/json" else f" as {media.split(';')[0]}")


def _body(operation: Schema) -> Schema:
    content: Schema = operation.get("requestBody", {}).get("content", {})
    return dict(content.get("application/json", {}).get("schema", {}))


def _names(schema: Schema) -> list[str]:
    """Of a reference, or of each alternative."""
    if "$ref" in schema:
        return [schema["$ref"].rsplit("/", 1)[1]]
    return [name for alternative in schema.get("anyOf", ()) for name in _names(alternative)]


def _fields(schema: Schema) -> list[Field]:
    required = schema.get("required", ())
    return [
        Field(name, f"{_kind(field)} or null" if _may_be_null(field) else _kind(field), "")
        if name in required
        else Field(name, _kind(field), f"`{json.dumps(field.get('default'))}`")
        for name, field in schema.get("properties", {}).items()
    ]


def _may_be_null(schema: Schema) -> bool:
    return any(one.get("type") == "null" for one in schema.get("anyOf", ()))


def _table(fields: Iterator[Field]) -> list[str]:
    rows = [f"| `{field.name}` | {_cell(field.kind)} | {field.default} |" for field in fields]
    return ["| field | kind | default |", "|---|---|---|", *rows]


def _inline(schema: Schema) -> str:
    fields = _fields(schema)
    if not fields:
        return _cell(_kind(schema))
    return _cell(" · ".join(f"`{field.name}` {field.kind}{'?' if field.default else ''}" for field in fields))


def _kind(schema: Schema) -> str:
    """In the words of JSON: "integer 1 to 128", "list of `ChatMessage`"."""
    if "$ref" in schema:
        return f"`{_names(schema)[0]}`"
    for union in ("anyOf", "oneOf", "allOf"):
        if union in schema:
            kinds = dict.fromkeys(_kind(one) for one in schema[union] if one.get("type") != "null")
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
        return f"list of {_kind(items)}{_limits(schema, 'minItems', 'maxItems')}"
    if kind == "object" and isinstance(schema.get("additionalProperties"), dict) and schema["additionalProperties"]:
        return f"object of {_kind(schema['additionalProperties'])}"
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


def _codes(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="trunkline.api.reference", description="Write the reference of the HTTP API.")
    parser.add_argument("page", nargs="?", type=Path, help="a Markdown file (default: print it)")
    path = parser.parse_args(arguments).page
    page = render(document())
    if path is not None:
        path.write_text(page, encoding="utf-8")
    else:
        print(page, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
