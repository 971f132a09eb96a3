"""The HTTP application: which path leads where, and the errors' last stop.

POST /v1/chat/completions      api/chat.py
POST /v1/completions           api/completions.py
POST /v1/messages, …           api/messages.py
…    /v1/responses, …          api/responses.py
…    /v1/cache/… /v1/queue     api/cache_routes.py
POST /v1/requests/…/cancel     api/cancel_route.py
POST /v1/grammar/check         api/grammar_routes.py
POST /tokenize /detokenize     api/tokenize_routes.py
GET  /v1/models, /v1/models/…  api/models_route.py
GET  /health /version /metrics here
GET  /docs /openapi.json       FastAPI's
"""

import asyncio

from fastapi import FastAPI
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

import trunkline
from trunkline.api import cache_routes, cancel_route, grammar_routes, responses, tokenize_routes
from trunkline.api.chat import chat_completions
from trunkline.api.client import CallFailed
from trunkline.api.completions import completions
from trunkline.api.edge import Edge
from trunkline.api.errors import as_request_error, envelope, error_response, json_response, on_http_exception
from trunkline.api.messages import ROUTES as MESSAGES_ROUTES
from trunkline.api.messages import messages
from trunkline.api.messages_errors import AnthropicErrors
from trunkline.api.messages_protocol import MessagesRequest
from trunkline.api.metrics import CONTENT_TYPE
from trunkline.api.models_route import get_model, list_models
from trunkline.api.openapi import add_schemas, describe
from trunkline.api.protocol import ChatRequest, CompletionRequest
from trunkline.api.service import Service
from trunkline.errors import EngineDead, Overloaded, TrunklineError

ROUTES = (
    *MESSAGES_ROUTES,
    *responses.ROUTES,
    *cache_routes.ROUTES,
    *cancel_route.ROUTES,
    *grammar_routes.ROUTES,
    *tokenize_routes.ROUTES,
)
CLIENT_CLOSED_REQUEST = 499  # nginx's; nobody is there to read it
STATS_SECONDS = 5.0  # that /metrics waits for the engine; half of what Prometheus gives a scrape


def create_app(service: Service) -> FastAPI:
    """The application around one service."""
    app = FastAPI(
        title="Trunkline",
        version=trunkline.__version__,
        summary="OpenAI-compatible API over a prefix-tree cache",
        redirect_slashes=False,
    )
    app.add_exception_handler(HTTPException, on_http_exception)
    app.add_exception_handler(TrunklineError, _on_trunkline_error)
    app.add_exception_handler(ClientDisconnect, _on_client_disconnect)
    app.state.service = service
    for path, endpoint, body in (
        ("/v1/chat/completions", chat_completions, ChatRequest),
        ("/v1/completions", completions, CompletionRequest),
        ("/v1/messages", messages, MessagesRequest),
    ):
        app.add_api_route(path, endpoint, methods=["POST"], response_model=None, openapi_extra=describe((body,)))
    for route in ROUTES:
        extra = describe(route.bodies, route.answer, route.query)
        app.add_api_route(route.path, route.endpoint, methods=[route.method], response_model=None, openapi_extra=extra)
    for path, getter in (
        ("/v1/models", list_models),
        ("/v1/models/{name:path}", get_model),
        ("/health", health),
        ("/version", version),
        ("/metrics", metrics),
    ):
        app.add_api_route(path, getter, methods=["GET"], response_model=None)
    app.add_middleware(Edge, keys=service.keys, metrics=service.metrics)
    app.add_middleware(AnthropicErrors)
    bodies: set[type[BaseModel]] = {ChatRequest, CompletionRequest, MessagesRequest}
    bodies.update(*(route.bodies for route in ROUTES))
    add_schemas(app, bodies, {route.answer for route in ROUTES})
    return app


async def health(request: Request) -> Response:
    """200 when requests are taken; else 503 and why, with the progress of loading."""
    service: Service = request.app.state.service
    try:
        service.check_ready()
    except Overloaded as error:
        body = {"status": "stopping" if service.stopping else "loading", **envelope(error)}
        body["progress"] = {"done": service.loading.done, "total": service.loading.total}
        return json_response(body, status=503, headers={"retry-after": "1"})
    except EngineDead as error:
        return json_response({"status": "dead", **envelope(as_request_error(error))}, status=503)
    return json_response({"status": "ok"})


async def version(_request: Request) -> Response:
    """Of the server, not of the API."""
    return json_response({"version": trunkline.__version__})


async def metrics(request: Request) -> Response:
    """For Prometheus. Without the engine's part while it is loading, dead, or does not answer."""
    service: Service = request.app.state.service
    try:
        async with asyncio.timeout(STATS_SECONDS):
            stats = await service.llm.call("stats")
    except (Overloaded, EngineDead, CallFailed, TimeoutError):
        stats = None
    return Response(service.metrics.render(stats), media_type=CONTENT_TYPE)


def _on_trunkline_error(request: Request, error: Exception) -> Response:
    """Anything raised on purpose."""
    assert isinstance(error, TrunklineError)
    service: Service = request.app.state.service
    told = as_request_error(error)
    service.count_failure(told)
    return error_response(told)


def _on_client_disconnect(_request: Request, _error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)
