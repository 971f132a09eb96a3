"""Server-sent events, as OpenAI's clients read them, and the watch over the connection behind a response.

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
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

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


def data(body: object) -> bytes:
    """One frame."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


async def finish_or_disconnect(generation: Generation, receive: Receive) -> bool:
    """Let a generation run to its end for a response that is not streamed.

    Returns False if the client went away first; the generation is closed then. Raises what the generation raises.
    """
    watch = asyncio.create_task(_close_on_disconnect(generation, receive))
    try:
        await generation.finish()
    finally:
        watch.cancel()
        generation.close()
    return all(choice.finished for choice in generation.choices)


async def _close_on_disconnect(generation: Generation, receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    generation.close()


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
        self._idle = True  # nothing was written since the watch last looked

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watch = asyncio.create_task(self._watch(receive, send))
        try:
            try:
                async with contextlib.aclosing(self._chunks):
                    async for frames in self._chunks:
                        await self._write(send, b"".join(frames))
            finally:
                watch.cancel()
                self._generation.close()
            await self._write(send, self.done, more=False)
        except OSError:  # what a server may raise when the client is gone
            logger.debug("A client went away in the middle of a stream.")
        except TrunklineError as error:
            await self._fail(as_request_error(error), scope, receive, send)
        except Exception:
            if not self._started:
                raise
            request_id = scope["state"]["request_id"]
            logger.exception("The stream of request %s failed.", request_id)
            await self._fail(InternalError(request_id), scope, receive, send)

    def error_event(self, error: RequestError) -> bytes:
        """What tells of an error that comes after the first chunk."""
        return data(envelope(error))

    async def _write(self, send: Send, body: bytes, *, more: bool = True) -> None:
        if not self._started:
            self._started = True
            await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        self._idle = False
        await send({"type": "http.response.body", "body": body, "more_body": more})

    async def _watch(self, receive: Receive, send: Send) -> None:
        """Close the generation when the client goes away; ping while nothing is written."""
        while True:
            try:
                message = await asyncio.wait_for(receive(), PING_SECONDS)
            except TimeoutError:
                if self._idle:
                    with contextlib.suppress(OSError):  # the client is gone: the next message says so
                        await self._write(send, self.ping)
                self._idle = True
                continue
            if message["type"] == "http.disconnect":
                self._generation.close()
                return

    async def _fail(self, error: RequestError, scope: Scope, receive: Receive, send: Send) -> None:
        """An ordinary HTTP error if nothing was sent yet; else an error event, and the end without [DONE]."""
        self._on_error(error)
        if not self._started:
            await error_response(error)(scope, receive, send)
            return
        with contextlib.suppress(OSError):
            await self._write(send, self.error_event(error), more=False)
