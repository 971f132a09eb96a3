"""Server-sent events, as OpenAI's clients read them, and waiting for an answer in one piece.

    data: {"id": …, "choices": […]}\\n\\n        one frame per chunk; those that arrive together are written together
    : ping\\n\\n                                  while nothing else was written for a while: keeps proxies from closing
    data: [DONE]\\n\\n                            the end, unless an error event was the end

Until the first chunk is there no status is sent, so an early error is an ordinary HTTP error. When the client goes away, the
generation is closed: the engine forgets the request within a step. Knows no endpoint.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Iterable

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from trunkline.api.disconnect import on_disconnect
from trunkline.api.errors import InternalError, as_request_error, envelope, error_response
from trunkline.api.generation import Generation
from trunkline.errors import RequestError, TrunklineError

logger = logging.getLogger("trunkline.api")

PING_SECONDS = 15.0
DONE = b"data: [DONE]\n\n"
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx must not collect the chunks
]


_ENDS_OF_LINES = ((b"\xc2\x85", b"\\u0085"), (b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"))


def data(body: object) -> bytes:
    """One frame."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def _in_lines(frames: Iterable[bytes]) -> bytes:
    """Frames, one behind the other, without the characters in their JSON that end a line for Python's str.splitlines, and so for clients
    that read lines by httpx, though not for the specification: escaped, they mean the same."""
    encoded = b"".join(frames)
    for character, escape in _ENDS_OF_LINES:
        if character in encoded:
            encoded = encoded.replace(character, escape)
    return encoded


async def finish_or_disconnect(generation: Generation, request: Request) -> bool:
    """Let a generation run to its end for a response that is not streamed.

    Returns False if the client went away first; the generation is closed then. Raises what the generation raises.
    """
    end_watch = on_disconnect(request.scope, request.receive, generation.close)
    try:
        await generation.finish()
    finally:
        end_watch()
        generation.close()
    return all(choice.finished for choice in generation.choices)


class EventStream(Response):
    """A response that writes the frames of `chunks` (all of a batch at once), then [DONE].

    The class attributes and `error_event` are OpenAI's wire format; another API's stream has its own.
    """

    done = DONE
    ping = b": ping\n\n"

    def __init__(
        self,
        generation: Generation,
        chunks: AsyncGenerator[Iterable[bytes], None],
        *,
        on_error: Callable[[RequestError], None],
    ) -> None:
        self.status_code = 200
        self.background = None
        self._generation = generation
        self._chunks = chunks
        self._on_error = on_error  # is told what ended the stream
        self._started = False
        self._held = b""  # frames that wait for those after them
        self._idle = True  # nothing was written since it was last looked
        self._next_look: asyncio.TimerHandle
        self._pinging: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        end_watch = on_disconnect(scope, receive, self._generation.close)
        self._look_later(send)
        try:
            try:
                async with contextlib.aclosing(self._chunks):
                    async for frames in self._chunks:
                        if self._generation.is_running:
                            await self._write(send, _in_lines(frames))
                        else:  # all there is has arrived, so that it is written at once
                            self._held += _in_lines(frames)
            finally:
                end_watch()
                self._next_look.cancel()
                if self._pinging is not None:
                    self._pinging.cancel()
                self._generation.close()
            await self._write(send, self.done, more=False)
        except OSError:  # what a server may raise when the client is gone
            logger.debug("A client went away in the middle of a stream.")
        except TrunklineError as error:
            await self._fail(as_request_error(error), scope, receive, send)
        except Exception:
            if not self._has_begun:
                raise
            request_id = scope["state"]["request_id"]
            logger.exception("The stream of a request failed.")
            await self._fail(InternalError(request_id), scope, receive, send)

    def error_event(self, error: RequestError) -> bytes:
        """What tells of an error that comes after the first chunk."""
        return data(envelope(error))

    @property
    def _has_begun(self) -> bool:
        return self._started or bool(self._held)

    async def _write(self, send: Send, body: bytes, *, more: bool = True) -> None:
        body, self._held = self._held + body, b""
        if not self._started:
            self._started = True
            await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        self._idle = False
        await send({"type": "http.response.body", "body": body, "more_body": more})

    def _look_later(self, send: Send) -> None:
        self._next_look = asyncio.get_running_loop().call_later(PING_SECONDS, self._look, send)

    def _look(self, send: Send) -> None:
        """Ping if nothing was written since the last look, nor is being written to a client that does not read."""
        if self._idle and (self._pinging is None or self._pinging.done()):
            self._pinging = asyncio.create_task(self._ping(send))
        self._idle = True
        self._look_later(send)

    async def _ping(self, send: Send) -> None:
        with contextlib.suppress(OSError):  # the client is gone, as the next message says
            await self._write(send, self.ping)
            self._idle = True

    async def _fail(self, error: RequestError, scope: Scope, receive: Receive, send: Send) -> None:
        """An ordinary HTTP error if nothing was sent yet; else an error event, and the end without [DONE]."""
        self._on_error(error)
        scope["state"]["record"].fail(error)
        if not self._has_begun:
            await error_response(error)(scope, receive, send)
            return
        with contextlib.suppress(OSError):
            await self._write(send, self.error_event(error), more=False)
