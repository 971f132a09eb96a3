"""GET /docs: what /openapi.json says, as one page for people. It loads nothing, from no host, and runs no script; knows no endpoint.

add_docs(app)      # after all its routes
"""

import base64
import functools
import hashlib
import json
import re
from collections.abc import Iterator
from html import escape

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from trunkline.api.dashboard_files import FOLDER, HEADERS
from trunkline.api.schema_words import Schema, body_of, fields_of, kind_of, names_in, operations_of

_OWN_STYLE = """
main { max-width: 1100px; margin: 0 auto; padding: var(--gap) 24px 40px; }
a { color: var(--accent); }
table { border-collapse: collapse; width: 100%; margin: 6px 0 12px; table-layout: fixed; }
th, td { padding: 5px 10px 5px 0; border-top: 1px solid var(--line); text-align: left; vertical-align: top; font-weight: 400; overflow-wrap: anywhere; }
thead th { border: 0; color: var(--soft); font-size: 13px; }
h3 { margin-top: 14px; }
:target { background: var(--accent-soft); }
pre { margin: 6px 0; padding: 8px 10px; background: var(--well); border-radius: 6px; }
"""


def add_docs(app: FastAPI) -> None:
    """Serve the page, made when it is first asked for."""
    style = (FOLDER / "style.css").read_text(encoding="utf-8") + _OWN_STYLE
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {**HEADERS, "content-security-policy": policy}
    page = functools.cache(lambda: render(app.openapi(), style))

    async def docs(request: Request) -> Response:
        """The page. Its links are relative: a proxy may have put a path before ours."""
        if request.scope.get("raw_path", b"").endswith(b"/"):  # the path proper has no last slash any more
            return RedirectResponse("../docs", status_code=308)
        return HTMLResponse(page(), headers=headers)

    app.add_api_route("/docs", docs, methods=["GET", "HEAD"], response_model=None, include_in_schema=False)


def render(document: Schema, style: str) -> str:
    """The whole page, as HTML."""
    info, schemas = document["info"], document["components"]["schemas"]
    operations = operations_of(document)
    groups: dict[str, list[str]] = {}
    for method, path, operation in operations:
        rows = groups.setdefault(operation["tags"][0], [])
        rows.append(_route(method, path, operation))
    bodies = dict.fromkeys(name for _, _, operation in operations for name in names_in(body_of(operation)))
    named = [*bodies, *sorted(schemas.keys() - bodies.keys())]
    routes = "".join(
        f'<section class="panel"><h2>{escape(group)}</h2>{_table(("route", "what it does", "body", "answer"), rows)}</section>\n'
        for group, rows in groups.items()
    )
    shapes = "".join(f'<div id="{escape(name)}">{"".join(_shape(name, schemas[name]))}</div>\n' for name in named)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(info["title"])}: the API</title>
<style>{style}</style>
</head>
<body>
<header class="top"><div class="brand"><h1>{escape(info["title"])} {escape(info["version"])}</h1></div><a href="openapi.json">openapi.json</a></header>
<main>
<p>{escape(info["summary"])}. Where the server has keys, most routes want one: <code>Authorization: Bearer KEY</code>.</p>
{routes}<section class="panel"><h2>Bodies, answers and their parts</h2>
{shapes}</section>
</main>
</body>
</html>
"""


def _route(method: str, path: str, operation: Schema) -> str:
    query = [item["name"] for item in operation.get("parameters", ()) if item["in"] == "query"]
    address = f"`{method.upper()} {path}`" + (f", query {', '.join(f'`{name}`' for name in query)}" if query else "")
    sent = operation["requestBody"]["content"]["application/json"] if "requestBody" in operation else {}
    body = " or ".join(f"`{name}`" for name in names_in(body_of(operation)))
    answers = operation["responses"]["200"].get("content", {})
    # The events of a stream are told of in /openapi.json.
    answer = " or ".join(kind_of(answers[media]["schema"]) for media in answers if media != "text/event-stream")
    example = f"<pre>{escape(json.dumps(sent['example']))}</pre>" if "example" in sent else ""
    what = " ".join(operation.get("description", "").split())
    return f"<tr><td>{_html(address)}</td><td>{escape(what)}{example}</td><td>{_html(body)}</td><td>{_html(answer)}</td></tr>"


def _shape(name: str, schema: Schema) -> Iterator[str]:
    yield f"<h3><code>{escape(name)}</code></h3>"
    if description := " ".join(schema.get("description", "").split()):
        yield f'<p class="note">{escape(description)}</p>'
    if fields := fields_of(schema):
        rows = [
            f"<tr><td>{_html(f'`{field.name}`')}</td><td>{_html(field.kind)}</td><td>{_html(field.default) or 'required'}</td></tr>"
            for field in fields
        ]
        yield _table(("field", "kind", "default"), rows)
    else:
        yield f"<p>{_html(kind_of(schema))}</p>"


def _table(heads: tuple[str, ...], rows: list[str]) -> str:
    return f"<table><thead><tr>{''.join(f'<th>{head}</th>' for head in heads)}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _html(words: str) -> str:
    """`backquotes` as code; what begins as the names of schemas do leads to its own."""
    text = re.sub(r"`([^`]*)`", r"<code>\1</code>", escape(words, quote=False))
    return re.sub(r"<code>([A-Z]\w+)</code>", r'<a href="#\1"><code>\1</code></a>', text)
