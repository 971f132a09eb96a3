"""What /openapi.json says of bodies, answers, events and errors. The endpoints read and write them, so FastAPI can't know."""

import functools
import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, NamedTuple

import msgspec
from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response

from trunkline.api.errors import ErrorAnswer

_SCHEMAS = "#/components/schemas/{}"
_JSON, _EVENTS = "application/json", "text/event-stream"
_STATUSES = {
    400: "Something in the request is wrong: `param` says what",
    401: "No key, or a wrong one",
    403: "The key may not do this",
    404: "There is no such thing here, or it is another key's",
    413: "The body is larger than the server reads",
    429: "Too much is waiting already; `retry-after` says when to try again",
    499: "The request was cancelled",
    500: "A bug of the server, or the engine ended",
    503: "The model is loading, the engine is being restarted, or the server is shutting down; `retry-after` says when to try again",
}
_HEADERS = {
    "x-request-id": ("The caller's own, or one that the server chose", "string"),
    "openai-processing-ms": ("Milliseconds until the first byte of the answer", "string"),
}
_IGNORED = {
    "description": "Fields of the body that nobody knows, percent-encoded; not sent if there are none",
    "required": False,
    "schema": {"type": "string"},
}
_SECURITY = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}


class Route(NamedTuple):
    """One route, and what OpenAPI tells of it.

    answer      what it returns with 200; None: text that is no JSON, of `media_type`
    bodies      that it takes, any of them; none: it takes no body
    query       names and meanings of the parameters in its address
    event       the data of each event of a stream, where it can stream
    done        the data of the last event, if that is another
    errors      what the body of an error may be
    statuses    of errors beside those that follow from the rest
    generates   it may be refused because too much waits, and cancelled
    protected   by a key, if the server has any
    example     of a body
    """

    method: str
    path: str
    endpoint: Callable[[Request], Awaitable[Response]]
    answer: Any
    bodies: tuple[type[BaseModel], ...] = ()
    query: tuple[tuple[str, str], ...] = ()
    event: Any = None
    done: str = ""
    errors: tuple[Any, ...] = (ErrorAnswer,)
    statuses: tuple[int, ...] = ()
    generates: bool = False
    protected: bool = True
    media_type: str = _JSON
    example: dict[str, Any] | None = None


def add_routes(app: FastAPI, routes: Iterable[Route]) -> None:
    """Let the app have them, and its document tell of them."""
    routes = tuple(routes)
    told = [shape for route in routes for shape in (route.answer, route.event, *route.errors) if shape is not None]
    shapes = list(dict.fromkeys(told))
    schemas, components = msgspec.json.schema_components(shapes, ref_template=_SCHEMAS.format("{name}"))
    schema_of = dict(zip(shapes, schemas, strict=True))
    for route in routes:
        app.add_api_route(
            route.path,
            route.endpoint,
            methods=[route.method],
            response_model=None,
            response_class=Response,
            openapi_extra=_describe(route, schema_of),
            tags=[_group(route)],
        )
    generate = app.openapi

    @functools.cache
    def openapi() -> dict[str, Any]:
        document = generate()
        bodies = {body for route in routes for body in route.bodies}
        _, ours = models_json_schema(
            [(body, "validation") for body in sorted(bodies, key=lambda body: body.__name__)],
            ref_template=_SCHEMAS.format("{model}"),
        )
        described = document.setdefault("components", {})
        described.setdefault("schemas", {}).update({**ours["$defs"], **components})
        described["securitySchemes"] = _SECURITY
        return document

    app.openapi = openapi  # type: ignore[method-assign]


def _describe(route: Route, schema_of: dict[Any, Any]) -> dict[str, Any]:
    """Of one route, for `openapi_extra`."""
    described: dict[str, Any] = {"responses": {"200": _answer(route, schema_of)}}
    error = {_JSON: {"schema": _any_of([schema_of[shape] for shape in route.errors])}}
    for status in _statuses(route):
        described["responses"][str(status)] = {
            "description": _STATUSES[status],
            "headers": _headers(route),
            "content": error,
        }
    if route.bodies:
        described["requestBody"] = _body(route)
    in_path = re.findall(r"{(\w+)", route.path)
    described["parameters"] = [
        *(
            _parameter(name, "path", f"The {name.replace('_', ' ')}", {"type": "string", "minLength": 1})
            for name in in_path
        ),
        *(_parameter(name, "query", meaning, {"type": "string"}) for name, meaning in route.query),
    ]
    if route.protected:
        described["security"] = [{}, *({name: []} for name in _SECURITY)]  # {}: a server without keys
    return described


def _answer(route: Route, schema_of: dict[Any, Any]) -> dict[str, Any]:
    schema = {"type": "string"} if route.answer is None else schema_of[route.answer]
    content: dict[str, Any] = {route.media_type: {"schema": schema}}
    if route.event is not None:
        data: dict[str, Any] = {
            "type": "string",
            "contentMediaType": _JSON,
            "contentSchema": _any_of([schema_of[shape] for shape in (route.event, *route.errors)]),
        }
        if route.done:
            data = {"anyOf": [data, {"const": route.done}]}
        fields = {"data": data, "event": {"type": "string"}}
        each = {"description": "Each event", "type": "object", "properties": fields, "required": ["data"]}
        content[_EVENTS] = {"schema": each}
    streams = "; events, if `stream` is true" if route.event is not None else ""
    return {"description": f"The answer{streams}", "headers": _headers(route), "content": content}


def _statuses(route: Route) -> Sequence[int]:
    statuses = {500, *route.statuses}
    if route.protected:
        statuses |= {401, 503}
    if route.bodies or route.query:
        statuses.add(400)
    if route.bodies:
        statuses |= {404, 413}
    if "{" in route.path:
        statuses.add(404)
    if any(name == "tenant" for name, _ in route.query) or any("tenant" in body.model_fields for body in route.bodies):
        statuses |= {403, 404}
    if route.generates:
        statuses |= {429, 499}
    return sorted(statuses)


def _body(route: Route) -> dict[str, Any]:
    # A route of which all fields can be left out takes no body, too.
    is_required = all(any(field.is_required() for field in body.model_fields.values()) for body in route.bodies)
    schemas = [{"$ref": _SCHEMAS.format(body.__name__)} for body in route.bodies]
    content: dict[str, Any] = {"schema": _any_of(schemas)}
    if route.example is not None:
        content["example"] = route.example
    return {"required": is_required, "content": {_JSON: content}}


def _parameter(name: str, where: str, meaning: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": where, "required": where == "path", "description": meaning, "schema": schema}


def _any_of(schemas: list[dict[str, Any]]) -> dict[str, Any]:
    return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}


def _headers(route: Route) -> dict[str, Any]:
    always = {
        name: {"description": meaning, "required": True, "schema": {"type": kind}}
        for name, (meaning, kind) in _HEADERS.items()
    }
    return {**always, "x-ignored-fields": _IGNORED} if route.bodies else always


def _group(route: Route) -> str:
    """Under what /docs shows it."""
    for beginning, group in (
        ("/v1/messages", "Anthropic"),
        ("/v1/responses", "OpenAI: responses"),
        ("/v1/cache", "Cache and queue"),
        ("/v1/queue", "Cache and queue"),
        ("/v1/tenants", "Cache and queue"),
        ("/v1/requests", "Cache and queue"),
        ("/v1/grammar", "Structured output"),
        ("/v1/tokenize", "Tokens"),
        ("/v1/detokenize", "Tokens"),
        ("/tokenize", "Tokens"),
        ("/detokenize", "Tokens"),
        ("/v1/rerank", "Rerank and score"),
        ("/v2/rerank", "Rerank and score"),
        ("/v1/score", "Rerank and score"),
        ("/rerank", "Rerank and score"),
        ("/score", "Rerank and score"),
        ("/v1/dashboard", "Server"),
        ("/v1/", "OpenAI"),
    ):
        if route.path.startswith(beginning):
            return group
    return "Server"
