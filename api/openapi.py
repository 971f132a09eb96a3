"""What /openapi.json says of bodies and answers. The endpoints read and write them, so FastAPI can't know."""

import functools
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

import msgspec
from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response

_SCHEMAS = "#/components/schemas/{}"


class Route(NamedTuple):
    """One route, and what OpenAPI tells of it.

    bodies  that it takes, any of them; none: it takes no body
    query   names and meanings of the parameters in its address
    """

    method: str
    path: str
    endpoint: Callable[[Request], Awaitable[Response]]
    answer: type[msgspec.Struct]
    bodies: tuple[type[BaseModel], ...] = ()
    query: tuple[tuple[str, str], ...] = ()


def describe(
    bodies: Sequence[type[BaseModel]],
    answer: type[msgspec.Struct] | None = None,
    query: Iterable[tuple[str, str]] = (),
) -> dict[str, Any]:
    """The description of one route, for `openapi_extra`.

    bodies  what it takes, any of them; none: no body
    answer  what it returns with 200; None: it is not described
    query   names and meanings of the parameters in the address
    """
    described: dict[str, Any] = {}
    if bodies:
        # A route of which all fields can be left out takes no body, too.
        is_required = all(any(field.is_required() for field in body.model_fields.values()) for body in bodies)
        schemas = [_ref(body) for body in bodies]
        schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
        described["requestBody"] = {"required": is_required, "content": {"application/json": {"schema": schema}}}
    if answer is not None:
        described["responses"] = {"200": {"content": {"application/json": {"schema": _ref(answer)}}}}
    if query:
        described["parameters"] = [
            {"name": name, "in": "query", "required": False, "description": meaning, "schema": {"type": "string"}}
            for name, meaning in query
        ]
    return described


def add_schemas(app: FastAPI, bodies: Collection[type[BaseModel]], answers: Collection[type[msgspec.Struct]]) -> None:
    """Let the app's document define what the routes refer to."""
    generate = app.openapi

    @functools.cache
    def openapi() -> dict[str, Any]:
        document = generate()
        _, ours = models_json_schema(
            [(body, "validation") for body in sorted(bodies, key=_name)], ref_template=_SCHEMAS.format("{model}")
        )
        _, theirs = msgspec.json.schema_components(sorted(answers, key=_name), ref_template=_SCHEMAS.format("{name}"))
        document.setdefault("components", {}).setdefault("schemas", {}).update({**ours["$defs"], **theirs})
        return document

    app.openapi = openapi  # type: ignore[method-assign]


def _name(schema: type[Any]) -> str:
    return schema.__name__


def _ref(schema: type[Any]) -> dict[str, str]:
    return {"$ref": _SCHEMAS.format(schema.__name__)}
