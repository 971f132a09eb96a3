"""GET /v1/models: what is served, one entry per name it is served under."""

from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from trunkline.api.errors import json_response
from trunkline.api.openapi import Route
from trunkline.api.service import Service


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """One name that the model is served under. `max_model_len` is null until the engine has told it."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "trunkline"
    root: str
    parent: str | None = None
    max_model_len: int | None


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """All of them."""

    object: Literal["list"] = "list"
    data: list[Model]


async def list_models(request: Request) -> Response:
    """What is served, one entry per name."""
    service: Service = request.app.state.service
    names = service.config.served_model_names
    return json_response(ModelList(data=[_model(service, name) for name in names]))


async def get_model(request: Request) -> Response:
    """One, by its name, which may hold slashes."""
    service: Service = request.app.state.service
    return json_response(_model(service, service.served_model(request.path_params["name"])))


def _model(service: Service, name: str) -> Model:
    ready = service.llm.ready
    return Model(
        id=name,
        created=service.created,
        root=service.config.served_model_names[0],
        max_model_len=ready.max_model_len if ready is not None else None,
    )


ROUTES = (
    Route("GET", "/v1/models", list_models, ModelList),
    Route("GET", "/v1/models/{name:path}", get_model, Model),
)
