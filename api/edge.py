"""The outermost layer around every request: ids, keys, tidy paths, timing, and the last resort for bugs. Knows no endpoint."""

import hmac
import logging
import re
import time
import uuid
from collections.abc import MutableMapping
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trunkline.api.errors import InternalError, Unauthorized, error_response
from trunkline.api.metrics import Metrics
from trunkline.errors import RequestError

logger = logging.getLogger("trunkline.api")

PROTECTED = "/v1"  # needs the key; /health, /metrics, /version and the docs do not, as in vLLM
_REQUEST_ID = re.compile(r"[!-~]{1,128}")  # visible ASCII: it goes into a header and into the log


class Edge:
    """ASGI middleware.

    path       "//" becomes "/", a "/" at the end goes: clients build "/v1//models"
    key        wanted for everything under /v1, as `Authorization: Bearer KEY` or `x-api-key: KEY`; checked before the body is read
    headers    x-request-id (the caller's own is echoed) and openai-processing-ms on every answer
    bugs       500 in the envelope, traceback in the log
    """

    def __init__(self, app: ASGIApp, *, api_key: str | None, metrics: Metrics) -> None:
        self._app = app
        self._api_key = api_key.encode() if api_key else None
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

        if not self._may_enter(scope["path"], headers):
            self._metrics.request_failures.labels(Unauthorized.code).inc()
            await error_response(_unauthorized(headers))(scope, receive, send_with_headers)
            return
        try:
            await self._app(scope, receive, send_with_headers)
        except Exception:
            logger.exception("Request %s to %s failed.", request_id, scope["path"])
            if answering:
                raise  # the server closes the connection: what was sent cannot be taken back
            self._metrics.request_failures.labels(InternalError.code).inc()
            await error_response(InternalError(request_id))(scope, receive, send_with_headers)

    def _may_enter(self, path: str, headers: Headers) -> bool:
        if self._api_key is None or not (path == PROTECTED or path.startswith(PROTECTED + "/")):
            return True
        return hmac.compare_digest(_key(headers).encode(), self._api_key)


def _key(headers: Headers) -> str:
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")


def _unauthorized(headers: Headers) -> RequestError:
    if _key(headers):
        return Unauthorized("The API key is not the one this server was started with.")
    return Unauthorized("An API key is required: send 'Authorization: Bearer YOUR_KEY'.")


def _tidy_path(scope: MutableMapping[str, Any]) -> None:
    path = re.sub("/{2,}", "/", scope["path"])
    scope["path"] = path.rstrip("/") or "/"
