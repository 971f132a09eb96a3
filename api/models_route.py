"""GET /v1/models: what is served, one entry per name it is served under."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from trunkline.api.errors import json_response
from trunkline.api.service import Service


async def list_models(request: Request) -> Response:
    """All of them."""
    service: Service = request.app.state.service
    return json_response(
        {"object": "list", "data": [_entry(service, name) for name in service.config.served_model_names]}
    )


async def get_model(request: Request) -> Response:
    """One, by its name, which may hold slashes."""
    service: Service = request.app.state.service
    name = request.path_params["name"]
    service.served_model(name)
    return json_response(_entry(service, name))


def _entry(service: Service, name: str) -> dict[str, Any]:
    """`max_model_len` is null until the engine has told it."""
    ready = service.llm.ready
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "trunkline",
        "root": service.config.served_model_names[0],
        "parent": None,
        "max_model_len": ready.max_model_len if ready is not None else None,
    }
