"""Errors as HTTP answers: OpenAI's envelope, for every status that is not 2xx.

{"error": {"message": "…", "type": "invalid_request_error", "param": "top_p", "code": null}}
"""

import math
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route

from trunkline.api.unknown_routes import advice
from trunkline.errors import EngineDead, RequestError, TrunklineError

RETRY_AFTER = "1"  # seconds; sent with every 503 that knows no better


class ErrorDetails(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What went wrong. `param` is the parameter to blame, if one is."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of every answer that is no success; in a stream, its last event."""

    error: ErrorDetails


class Unauthorized(RequestError):
    """No key, or a wrong one."""

    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class BodyTooLarge(RequestError):
    """The body is larger than the server reads."""

    status = 413
    code = "request_too_large"


class InternalError(RequestError):
    """A bug of ours. The log has the traceback, the caller only an id to ask about."""

    status = 500
    type = "server_error"
    code = "internal_error"

    def __init__(self, request_id: str) -> None:
        super().__init__(
            f"The server failed to handle this request; its log says why under the request id {request_id}."
        )


def as_request_error(error: TrunklineError) -> RequestError:
    """What a caller is told of an error: itself, or for EngineDead a 500."""
    if isinstance(error, RequestError):
        return error
    told = RequestError(str(error), code="engine_dead" if isinstance(error, EngineDead) else "internal_error")
    told.status, told.type = 500, "server_error"
    return told


def envelope(error: RequestError) -> dict[str, Any]:
    """The body of an error."""
    return {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}}


def error_response(error: TrunklineError) -> Response:
    """A whole answer."""
    told = as_request_error(error)
    headers = {}
    if told.status == 401:
        headers["www-authenticate"] = "Bearer"
    if told.retry_after is not None:
        headers["retry-after"] = str(max(1, math.ceil(told.retry_after)))  # whole seconds, by RFC 9110
    elif told.status == 503:
        headers["retry-after"] = RETRY_AFTER
    return json_response(envelope(told), status=told.status, headers=headers)


def json_response(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Any value msgspec can encode, as application/json."""
    return Response(msgspec.json.encode(body), status_code=status, headers=headers, media_type="application/json")


def on_http_exception(request: Request, error: Exception) -> Response:
    """Starlette's own 404 and 405, in OpenAI's words."""
    assert isinstance(error, HTTPException)
    path = request.scope["path"]  # request.url fails where a query is no UTF-8
    where = f"{request.method} {path}"
    told, headers = RequestError(str(error.detail)), dict(error.headers or {})
    if error.status_code == 404:
        there = {
            route.path: min(route.methods)  # GET, of GET and HEAD
            for route in request.app.routes
            if isinstance(route, Route) and route.methods and "{" not in route.path
        }
        hint = " ".join(filter(None, (advice(path, there), "The API lies under /v1; /docs lists it.")))
        told = RequestError(f"Unknown request URL: {where}. {hint}", code="unknown_url")
    elif error.status_code == 405:
        allowed = headers["Allow"] = _allowed(request) or headers.get("Allow", "GET, HEAD")
        hint = " CORS is not there: let a reverse proxy in front answer preflights." if _is_preflight(request) else ""
        told = RequestError(f"Not allowed: {where}. Use {allowed}.{hint}", code="method_not_supported")
    told.status = error.status_code
    request.state.record.fail(told)
    response = error_response(told)
    response.headers.update(headers)
    return response


def _allowed(request: Request) -> str:
    """The methods of all routes of the path, where Starlette names those of the first; "": a folder of files is there."""
    methods = {
        method
        for route in request.app.routes
        if isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE
        for method in route.methods or ()
    }
    if "GET" in methods:
        methods.add("HEAD")
    return ", ".join(sorted(methods))


def _is_preflight(request: Request) -> bool:
    """Whether a browser asks if a page from elsewhere may send a request."""
    return request.method == "OPTIONS" and "access-control-request-method" in request.headers
