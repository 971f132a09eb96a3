"""Errors under /v1/messages, as Anthropic's clients read them.

{"error": {"message": "…", "type": "invalid_request_error", "param": "top_p", "code": null}}                what we have
{"type": "error", "error": {"type": "invalid_request_error", "message": "…"}, "request_id": "req_…"}        what they get

Translated where an answer leaves, so that all are: also that of a wrong key, of a method that is not allowed, of a bug.
"""

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trunkline.api.errors import envelope
from trunkline.api.messages_answer import event
from trunkline.api.sse import EventStream
from trunkline.errors import RequestError

PATH = "/v1/messages"
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def anthropic_error(status: int, error: Mapping[str, Any]) -> dict[str, Any]:
    """The body of an error; `error` is what stands in OpenAI's envelope."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    message = error["message"]
    if error["code"] == "context_length_exceeded":
        message = f"prompt is too long: {message}"  # Anthropic's words: clients match on them, and shorten their prompt
    return {"type": "error", "error": {"type": kind, "message": message}}


class MessageStream(EventStream):
    """A stream in Anthropic's form: every event has its name, and the last one is an event like the others."""

    done = b""
    ping = event("ping")

    def error_event(self, error: RequestError) -> bytes:
        return event("error", error=anthropic_error(error.status, envelope(error)["error"])["error"])


class AnthropicErrors:
    """ASGI middleware, outside of all that may answer with an error. Every answer also gets the header `request-id`, which
    Anthropic's clients look for."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and "/messages" in scope["path"]:
            send = _Translator(scope, send)
        await self._app(scope, receive, send)


class _Translator:
    """The `send` of one request. Holds an error back until its body is whole."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope = scope
        self._send = send
        self._start: Message | None = None
        self._body = b""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start" and self._is_ours():
            headers = MutableHeaders(scope=message)
            if request_id := headers.get("x-request-id"):
                headers["request-id"] = request_id
            if message["status"] >= 400:
                self._start = message
                return
        elif self._start is not None:
            self._body += message.get("body", b"")
            if message.get("more_body", False):
                return
            message = self._translated(self._start)
            await self._send(self._start)
            self._start = None
        await self._send(message)

    def _is_ours(self) -> bool:
        """Looked at late: by then the path is tidied."""
        path: str = self._scope["path"]
        return path == PATH or path.startswith(f"{PATH}/")

    def _translated(self, start: Message) -> Message:
        headers = MutableHeaders(scope=start)
        try:
            body = anthropic_error(start["status"], msgspec.json.decode(self._body)["error"])
        except msgspec.DecodeError:  # nobody is there to read it: no body at all
            return {"type": "http.response.body", "body": self._body}
        encoded = msgspec.json.encode({**body, "request_id": headers.get("x-request-id")})
        headers["content-length"] = str(len(encoded))
        return {"type": "http.response.body", "body": encoded}
