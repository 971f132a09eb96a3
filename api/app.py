"""The HTTP application: which path leads where, and the errors' last stop.

POST /v1/chat/completions      api/chat.py
POST /v1/completions           api/completions.py
POST /v1/messages, …           api/messages.py
…    /v1/responses, …          api/responses.py
POST /v1/embeddings            api/embeddings.py
POST /v1/rerank, /v1/score, …  api/rerank.py
…    /v1/cache/… /v1/queue     api/cache_routes.py
POST /v1/requests/…/cancel     api/cancel_route.py
POST /v1/grammar/check         api/grammar_routes.py
POST /tokenize /detokenize     api/tokenize_routes.py
GET  /v1/models, /v1/models/…  api/models_route.py
GET  /health /version /metrics here
GET  /docs                     api/docs_page.py
GET  /openapi.json             FastAPI's
GET  / /dashboard/…            api/dashboard_files.py
GET  /v1/dashboard             api/dashboard_feed.py
"""

import asyncio

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

import trunkline
from trunkline.api import (
    cache_routes,
    cancel_route,
    chat,
    completions,
    dashboard_feed,
    embeddings,
    grammar_routes,
    messages,
    models_route,
    rerank,
    responses,
    tokenize_routes,
)
from trunkline.api.application import Application
from trunkline.api.client import CallFailed
from trunkline.api.dashboard_feed import DashboardFeed
from trunkline.api.dashboard_files import add_dashboard
from trunkline.api.docs_page import add_docs
from trunkline.api.edge import Edge
from trunkline.api.errors import (
    ErrorAnswer,
    ErrorDetails,
    as_request_error,
    envelope,
    error_response,
    json_response,
    on_http_exception,
)
from trunkline.api.messages_errors import AnthropicErrors
from trunkline.api.metrics import CONTENT_TYPE
from trunkline.api.openapi import Route, add_routes
from trunkline.api.service import Service
from trunkline.errors import EngineDead, Overloaded, TrunklineError

CLIENT_CLOSED_REQUEST = 499  # nginx's; nobody is there to read it
STATS_SECONDS = 5.0  # that /metrics waits for the engine; half of what Prometheus gives a scrape


def create_app(service: Service) -> FastAPI:
    """The application around one service."""
    app = Application(
        title="Trunkline",
        version=trunkline.__version__,
        summary="OpenAI-compatible API over a prefix-tree cache",
        redirect_slashes=False,
        docs_url=None,
        redoc_url=None,
    )
    app.add_exception_handler(HTTPException, on_http_exception)
    app.add_exception_handler(TrunklineError, _on_trunkline_error)
    app.add_exception_handler(ClientDisconnect, _on_client_disconnect)
    app.state.service = service
    add_routes(app, ROUTES + (dashboard_feed.ROUTES if service.config.dashboard else ()))
    if service.config.dashboard:
        app.state.dashboard_feed = DashboardFeed(service)
        add_dashboard(app)
    add_docs(app)
    app.add_middleware(
        Edge,
        keys=service.keys,
        metrics=service.metrics,
        tracing=service.tracing,
        logs_requests=service.config.enable_log_requests,
    )
    app.add_middleware(AnthropicErrors)
    return app


class Progress(msgspec.Struct, frozen=True):
    """Of loading: bytes of weights."""

    done: int
    total: int


class Health(msgspec.Struct, frozen=True):
    """Of the server: "ok", "loading", "restarting", "stopping" or "dead". `error` says why it is not ok."""

    status: str
    error: ErrorDetails | msgspec.UnsetType = msgspec.UNSET
    progress: Progress | msgspec.UnsetType = msgspec.UNSET


class Version(msgspec.Struct, frozen=True):
    """Of the server, not of the API."""

    version: str


async def health(request: Request) -> Response:
    """200 when requests are taken; else 503 and why, with the progress of loading."""
    service: Service = request.app.state.service
    try:
        service.check_ready()
    except Overloaded as error:
        status = "stopping" if service.stopping else "restarting" if service.restarting else "loading"
        body = {"status": status, **envelope(error)}
        body["progress"] = {"done": service.loading.done, "total": service.loading.total}
        return json_response(body, status=503, headers={"retry-after": "1"})
    except EngineDead as error:
        return json_response({"status": "dead", **envelope(as_request_error(error))}, status=503)
    return json_response(Health("ok"))


async def version(_request: Request) -> Response:
    """Of the server, not of the API."""
    return json_response(Version(trunkline.__version__))


async def metrics(request: Request) -> Response:
    """For Prometheus. Without the engine's part while it is loading, dead, or does not answer: it may be busy with a step."""
    service: Service = request.app.state.service
    try:
        async with asyncio.timeout(STATS_SECONDS):
            stats = await service.llm.call("stats")
    except (Overloaded, EngineDead, CallFailed, TimeoutError):
        stats = None
    process = service.llm.process
    page = service.metrics.render(
        stats,
        is_ready=service.is_ready,
        engine_pid=process.pid if process is not None and process.exit_code is None else None,
    )
    return Response(page, media_type=CONTENT_TYPE)


def _on_trunkline_error(request: Request, error: Exception) -> Response:
    """Anything raised on purpose."""
    assert isinstance(error, TrunklineError)
    service: Service = request.app.state.service
    told = as_request_error(error)
    service.count_failure(told)
    request.state.record.fail(told)
    return error_response(told)


def _on_client_disconnect(_request: Request, _error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


ROUTES = (
    *chat.ROUTES,
    *completions.ROUTES,
    *messages.ROUTES,
    *responses.ROUTES,
    *embeddings.ROUTES,
    *rerank.ROUTES,
    *cache_routes.ROUTES,
    *cancel_route.ROUTES,
    *grammar_routes.ROUTES,
    *tokenize_routes.ROUTES,
    *models_route.ROUTES,
    Route("GET", "/health", health, Health, errors=(Health, ErrorAnswer), statuses=(503,), protected=False),
    Route("GET", "/version", version, Version, protected=False),
    Route("GET", "/metrics", metrics, None, media_type="text/plain", protected=False),
)
