"""The outermost layer around every request: ids, keys, tidy paths, timing, the last resort for bugs. No endpoint."""

import logging
import re
import secrets
import time
from collections.abc import MutableMapping
from typing import Any
from urllib.parse import quote

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trunkline import logs
from trunkline.api import request_log
from trunkline.api.errors import InternalError, Unauthorized, error_response
from trunkline.api.fields import ignored_fields
from trunkline.api.metrics import Metrics
from trunkline.api.request_log import Record
from trunkline.api.tenants import TENANT_SHOWN, Caller, Keys
from trunkline.api.tracing import Tracing
from trunkline.errors import RequestError, shown

logger = logging.getLogger("trunkline.api")

# What lies there needs the key; /health, /metrics, /version and the docs do not, as in vLLM.
PROTECTED = ("/v1", "/v2", "/tokenize", "/detokenize", "/rerank", "/score")
_BELOW = tuple(f"{path}/" for path in PROTECTED)
LONGEST_IGNORED = 40  # characters of a field's name in x-ignored-fields, which are percent-encoded if they are no ASCII
LONGEST_HEADER = 500  # characters of x-ignored-fields: proxies take only so much
_Headers = dict[bytes, bytes]  # of a request, by their names in small letters; of several of one name the first
_REQUEST_ID = re.compile(r"[!-~]{1,128}")  # visible ASCII: it goes into a header and into the log


class Edge:
    """ASGI middleware.

    path       "//" becomes "/", a "/" at the end goes: clients build "/v1//models"
    key        wanted for everything under PROTECTED, as `Authorization: Bearer KEY` or `x-api-key: KEY`; checked before
               the body is read. Whose it is, a Caller, goes into `request.state.caller`
    headers    x-request-id (the caller's own is echoed) and openai-processing-ms on every answer; x-ignored-fields, if the
               body has fields that nobody knows
    record     what becomes of the request is gathered in `request.state.record`; of those under PROTECTED it becomes a line
               of the log, and the span of a trace, once the answer is sent
    bugs       500 in the envelope, traceback in the log

    tracing        None: there are no traces
    logs_requests  False: no such lines
    """

    def __init__(
        self, app: ASGIApp, *, keys: Keys, metrics: Metrics, tracing: Tracing | None = None, logs_requests: bool = True
    ) -> None:
        self._app = app
        self._keys = keys
        self._metrics = metrics
        self._tracing = tracing
        self._logs_requests = logs_requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers: _Headers = dict(reversed(scope["headers"]))
        request_id = headers.get(b"x-request-id", b"").decode("latin-1")
        if not _REQUEST_ID.fullmatch(request_id):
            request_id = f"req_{secrets.token_hex(16)}"
        record = Record(request_id)
        state = scope.setdefault("state", {})
        state["request_id"], state["record"] = request_id, record
        _tidy_path(scope)
        is_told = _is_protected(scope["path"])
        token, names = logs.request_id.set(request_id), ignored_fields.set(record.ignored)
        span = None
        if self._tracing is not None and _is_traced(scope):
            span = self._tracing.begin(Headers(scope=scope), record)
        try:
            await self._answer(scope, receive, send, headers, record)
        finally:
            route = getattr(scope.get("route"), "path", "")
            if is_told and self._logs_requests:
                request_log.log(record, route)
            if self._tracing is not None and span is not None:
                self._tracing.end(span, record, method=scope["method"], route=route)
            ignored_fields.reset(names)
            logs.request_id.reset(token)

    async def _answer(self, scope: Scope, receive: Receive, send: Send, headers: _Headers, record: Record) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                milliseconds = round(1000 * (time.perf_counter() - record.arrived))
                own = [(b"x-request-id", record.request_id.encode()), (b"openai-processing-ms", b"%d" % milliseconds)]
                if record.ignored:
                    named = ", ".join(quote(name[:LONGEST_IGNORED], safe="[]") for name in record.ignored)
                    own.append((b"x-ignored-fields", named[:LONGEST_HEADER].encode()))
                message["headers"] = [*message["headers"], *own]
            await send(message)

        caller = self._keys.caller(_key(headers))
        if caller is None and _is_protected(scope["path"]):
            self._metrics.request_failures.labels(Unauthorized.code).inc()
            refusal = _unauthorized(headers)
            record.fail(refusal)
            await error_response(refusal)(scope, receive, send_with_headers)
            return
        scope["state"]["caller"] = caller
        record.tenant = caller.tenant[:TENANT_SHOWN] if caller is not None else ""
        try:
            await self._app(scope, receive, send_with_headers)
        except Exception:
            logger.exception("A request to %s failed.", shown(scope["path"]))
            bug = InternalError(record.request_id)
            record.fail(bug)
            if record.status is not None:
                raise  # the server closes the connection: what was sent cannot be taken back
            self._metrics.request_failures.labels(bug.code).inc()
            await error_response(bug)(scope, receive, send_with_headers)


def caller_of(request: Request) -> Caller:
    """Who sent a request to a protected path."""
    caller: Caller = request.state.caller
    return caller


def _is_protected(path: str) -> bool:
    return path in PROTECTED or path.startswith(_BELOW)


def _is_traced(scope: Scope) -> bool:
    """What may generate; looking at the cache is not."""
    return scope["method"] == "POST" and _is_protected(scope["path"])


def _key(headers: _Headers) -> str:
    scheme, _, key = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else headers.get(b"x-api-key", b"").decode("latin-1")


def _unauthorized(headers: _Headers) -> RequestError:
    if _key(headers):
        return Unauthorized("The API key is none of those this server was started with.")
    return Unauthorized("An API key is required: send 'Authorization: Bearer YOUR_KEY'.")


def _tidy_path(scope: MutableMapping[str, Any]) -> None:
    path = re.sub("/{2,}", "/", scope["path"]) if "//" in scope["path"] else scope["path"]
    scope["path"] = path.rstrip("/") or "/"
