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
from typing import Any

from trunkline.api.app import create_app
from trunkline.api.schema_words import Field, Schema, body_of, fields_of, kind_of, names_in, operations_of
from trunkline.api.service import Service
from trunkline.async_llm import AsyncLLM
from trunkline.config import ApiConfig, engine_config

COMMAND = ".venv/bin/python -m trunkline.api.reference docs/reference.md"
HEAD = f"""# API reference

Made from the server's own description, `GET /openapi.json`, by `{COMMAND}`: don't edit it. What the fields mean,
and how they differ from OpenAI's, is on [the API's page](api.md).

Of a body, a field without a default must be sent, and one whose default is `null` may be `null`. Of an answer, `?` says that a field is not
always there. Errors have the body `ErrorAnswer`, under `/v1/messages` Anthropic's; their codes are [listed](api.md#errors).
"""
ALIKE = ("ChatRequest", "CompletionRequest")  # what both have, most other bodies have, too


def document() -> dict[str, Any]:
    """What a server of any model says of itself."""
    service = Service(ApiConfig(served_model_names=("model",)), AsyncLLM.of(engine_config("model")))
    return create_app(service).openapi()


def render(openapi: Schema) -> str:
    """The whole page, as Markdown."""
    schemas: Mapping[str, Schema] = openapi["components"]["schemas"]
    operations = operations_of(openapi)
    bodies = dict.fromkeys(name for _, _, operation in operations for name in names_in(body_of(operation)))
    common = {field for field in fields_of(schemas[ALIKE[0]]) if field in fields_of(schemas[ALIKE[1]])}
    lines = [HEAD, "## Routes", "", *_routes(operations), "", "## Bodies", ""]
    lines += ["### Common fields", "", *_table(field for field in fields_of(schemas[ALIKE[0]]) if field in common)]
    for name in bodies:
        fields = fields_of(schemas[name])
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
        body = " or ".join(f"`{name}`" for name in names_in(body_of(operation)))
        what = " ".join(operation.get("description", "").split())
        yield f"| {address} | {_cell(what)} | {body} | {_cell('; '.join(told))} | {others} |"


def _answer(media: str, content: Schema) -> str:
    if media == "text/event-stream":
        data = re.findall(r'"#/components/schemas/(\w+)"', json.dumps(content))
        return f"events of {_codes(sorted(set(data)))}"
    return kind_of(content["schema"]) + ("" if media == "application/json" else f" as {media.split(';')[0]}")


def _table(fields: Iterator[Field]) -> list[str]:
    rows = [f"| `{field.name}` | {_cell(field.kind)} | {field.default} |" for field in fields]
    return ["| field | kind | default |", "|---|---|---|", *rows]


def _inline(schema: Schema) -> str:
    fields = fields_of(schema)
    if not fields:
        return _cell(kind_of(schema))
    return _cell(" · ".join(f"`{field.name}` {field.kind}{'?' if field.default else ''}" for field in fields))


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
