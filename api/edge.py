"""The outermost layer around every request: ids, keys, tidy paths, timing, the last resort for bugs. No endpoint."""

import logging
import re
import time
import uuid
from collections.abc import MutableMapping
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trunkline.api.errors import InternalError, Unauthorized, error_response
from trunkline.api.metrics import Metrics
from trunkline.api.tenants import Caller, Keys
from trunkline.errors import RequestError

logger = logging.getLogger("trunkline.api")

# What lies there needs the key; /health, /metrics, /version and the docs do not, as in vLLM.
PROTECTED = ("/v1", "/tokenize", "/detokenize")
_REQUEST_ID = re.compile(r"[!-~]{1,128}")  # visible ASCII: it goes into a header and into the log


class Edge:
    """ASGI middleware.

    path       "//" becomes "/", a "/" at the end goes: clients build "/v1//models"
    key        wanted for everything under PROTECTED, as `Authorization: Bearer KEY` or `x-api-key: KEY`; checked before
               the body is read. Whose it is, a Caller, goes into `request.state.caller`
    headers    x-request-id (the caller's own is echoed) and openai-processing-ms on every answer
    bugs       500 in the envelope, traceback in the log
    """

    def __init__(self, app: ASGIApp, *, keys: Keys, metrics: Metrics) -> None:
        self._app = app
        self._keys = keys
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        headers = Headers(scope=scope)
        request_id = headers.get("x-request-id", "")
        if not _REQUEST_ID.fullmatch(request_id):
            request_id = f"req_{uuid.uuid4().hex}"
        scope.setdefault("state", {})["request_id"] = request_id
        _tidy_path(scope)
        answering = False

        async def send_with_headers(message: Message) -> None:
            nonlocal answering
            if message["type"] == "http.response.start":
                answering = True
                answer = MutableHeaders(scope=message)
                answer["x-request-id"] = request_id
                answer["openai-processing-ms"] = str(round(1000 * (time.perf_counter() - started)))
            await send(message)

        caller = self._keys.caller(_key(headers))
        if caller is None and _is_protected(scope["path"]):
            self._metrics.request_failures.labels(Unauthorized.code).inc()
            await error_response(_unauthorized(headers))(scope, receive, send_with_headers)
            return
        scope["state"]["caller"] = caller
        try:
            await self._app(scope, receive, send_with_headers)
        except Exception:
            logger.exception("Request %s to %s failed.", request_id, scope["path"])
            if answering:
                raise  # the server closes the connection: what was sent cannot be taken back
            self._metrics.request_failures.labels(InternalError.code).inc()
            await error_response(InternalError(request_id))(scope, receive, send_with_headers)


def caller_of(request: Request) -> Caller:
    """Who sent a request to a protected path."""
    caller: Caller = request.state.caller
    return caller


def _is_protected(path: str) -> bool:
    return any(path == protected or path.startswith(protected + "/") for protected in PROTECTED)


def _key(headers: Headers) -> str:
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")


def _unauthorized(headers: Headers) -> RequestError:
    if _key(headers):
        return Unauthorized("The API key is none of those this server was started with.")
    return Unauthorized("An API key is required: send 'Authorization: Bearer YOUR_KEY'.")


def _tidy_path(scope: MutableMapping[str, Any]) -> None:
    path = re.sub("/{2,}", "/", scope["path"])
    scope["path"] = path.rstrip("/") or "/"
