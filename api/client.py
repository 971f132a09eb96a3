"""The API's end of the socket to the engine: messages out, and each request's messages back to whoever waits for them.

    client = EngineClient(address)
    client.start()                                    # says hello; `client.ready` is set when the engine takes requests
    inbox = client.generate([Generate(…), …])         # one inbox for all continuations of a request
    while messages := await inbox.get(): …            # in order; all that have arrived since the last call
    inbox.close()                                     # aborts what is still running; idempotent
    stats = await client.call("stats")

Token ids only; no text here. A reader that is slow holds up nobody: its messages wait in its own inbox, which cannot hold more
than the tokens of its requests.
"""

import asyncio
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import zmq

from trunkline.errors import EngineDead, InvalidParameter, TrunklineError
from trunkline.messages import (
    Abort,
    Call,
    Failed,
    Finished,
    FromEngine,
    Generate,
    Loading,
    Ready,
    Reply,
    ToEngine,
    Tokens,
    decode_from_engine,
    encode,
)

HELLO = 0  # call_id of the greeting
POLLIN = int(zmq.POLLIN)  # as a plain number: `&` of Python's flags takes as long as asking the socket
OF_REQUEST = (Tokens, Finished, Failed)


class CallFailed(TrunklineError):
    """The engine answered a Call with an error."""


class Inbox:
    """Messages of some requests, kept until they are read, by one reader."""

    def __init__(self, client: "EngineClient", request_ids: Sequence[str]) -> None:
        self._client = client
        self._running = set(request_ids)
        self._messages: list[Tokens | Finished | Failed] = []
        self._error: TrunklineError | None = None
        self._waiting: asyncio.Future[None] | None = None  # of the reader, for the next message

    async def get(self) -> list[Tokens | Finished | Failed]:
        """All messages that have arrived since the last call, at least one; [] once every request has ended or was closed.

        Raises what `close` was given, e.g. EngineDead.
        """
        while not self._messages:
            if self._error is not None:
                raise self._error
            if not self._running:
                return []
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        messages, self._messages = self._messages, []
        return messages

    @property
    def is_running(self) -> bool:
        """False once every request has ended or was closed, even if not all of their messages are read."""
        return bool(self._running)

    def abort(self, request_id: str) -> None:
        """Stop one of the requests; nothing more arrives for it."""
        if request_id in self._running:
            self._forget(request_id)
            self._client.send([Abort(request_id=request_id)])

    def close(self, error: TrunklineError | None = None) -> None:
        """Abort whatever still runs. With `error`, a waiting or later `get` raises it."""
        if self._running:
            self._client.send([Abort(request_id=request_id) for request_id in sorted(self._running)])
        for request_id in list(self._running):
            self._forget(request_id)
        if error is not None and self._error is None:
            self._error = error
        self._wake()

    def _put(self, message: Tokens | Finished | Failed) -> None:
        self._messages.append(message)
        if not isinstance(message, Tokens):
            self._forget(message.request_id)
        self._wake()

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def _forget(self, request_id: str) -> None:
        self._running.discard(request_id)
        self._client._inboxes.pop(request_id, None)


class EngineClient:
    """Talks to one engine.

    on_loading  is told of every Loading message
    """

    def __init__(self, address: str, *, on_loading: Callable[[Loading], None] | None = None) -> None:
        self.ready: Ready | None = None
        self.dead: EngineDead | None = None
        self._on_loading = on_loading
        self._inboxes: dict[str, Inbox] = {}
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._call_ids = itertools.count(HELLO + 1)
        self._loop = asyncio.get_running_loop()
        self._is_ready: asyncio.Future[Ready] = self._loop.create_future()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        # No high-water marks: what is under way is bounded by the requests, and a dropped message would hang its request.
        self._socket.set(zmq.SNDHWM, 0)
        self._socket.set(zmq.RCVHWM, 0)
        self._socket.set(zmq.LINGER, 0)
        self._socket.connect(address)
        self._is_reading = False
        self._will_read = False  # in this round of the loop or the next

    def start(self) -> None:
        """Greet the engine, which need not be listening yet, and begin to read."""
        self._is_reading = True
        self._loop.add_reader(self._socket.fileno(), self._read)
        self.send([Call(call_id=HELLO, method="hello")])

    async def wait_ready(self) -> Ready:
        """Raises EngineDead if the engine ends before it is ready."""
        return await asyncio.shield(self._is_ready)

    def generate(self, requests: Sequence[Generate]) -> Inbox:
        """Submit requests, and get one inbox for the messages of them all.

        Raises EngineDead, and InvalidParameter for a request id that is in use.
        """
        if self.dead is not None:
            raise self.dead
        for request in requests:
            if request.request_id in self._inboxes:
                raise InvalidParameter.of("request_id", request.request_id, "an id that no running request has")
        frame = encode(list(requests))  # if that fails, nothing has been promised yet
        inbox = Inbox(self, [request.request_id for request in requests])
        for request in requests:
            self._inboxes[request.request_id] = inbox
        self._send(frame)
        return inbox

    async def call(self, method: str, **args: Any) -> Any:
        """Administration: the engine's reply. Raises CallFailed with the engine's words, or EngineDead."""
        if self.dead is not None:
            raise self.dead
        call_id = next(self._call_ids)
        self._calls[call_id] = asyncio.get_running_loop().create_future()
        self.send([Call(call_id=call_id, method=method, args=args)])
        try:
            return await self._calls[call_id]
        finally:
            del self._calls[call_id]

    def send(self, messages: Sequence[ToEngine]) -> None:
        """One frame; never blocks. Ignored if the engine is gone."""
        if self.dead is None:
            self._send(encode(list(messages)))

    def end(self, error: TrunklineError) -> None:
        """Every request under way fails with `error`, and those to come."""
        for inbox in list(self._inboxes.values()):
            inbox.close(error)
        for reply in self._calls.values():
            if not reply.done():
                reply.set_exception(error)

    def mark_dead(self, error: EngineDead) -> None:
        """The engine process ended: everything under way fails, and everything to come."""
        self.dead = self.dead or error
        self.end(error)
        if not self._is_ready.done():
            self._is_ready.set_exception(error)
            self._is_ready.exception()  # retrieved: nobody need be waiting

    async def close(self) -> None:
        """Free the socket. Idempotent."""
        self.mark_dead(EngineDead("The engine was shut down."))
        self._stop_reading()
        self._socket.close()
        self._context.term()

    def _send(self, frame: bytes) -> None:
        """Without high-water marks it never blocks. What has arrived meanwhile is looked for, once after all that is sent in
        one round of the loop: sending takes the signal that would have told of it away (zmq_getsockopt(3), ZMQ_FD)."""
        self._socket.send(frame, zmq.NOBLOCK)
        if self._is_reading and not self._will_read:
            self._will_read = True
            self._loop.call_soon(self._read)

    def _read(self) -> None:
        """Take in all frames that have arrived. The descriptor says only that something may have happened."""
        self._will_read = False
        try:
            while self._is_reading and self._has_frames():
                for message in decode_from_engine(self._socket.recv(zmq.NOBLOCK)):
                    self._take(message)
        except msgspec.MsgspecError as error:
            self._stop_reading()
            self.mark_dead(EngineDead(f"The engine sent a frame that cannot be read: {error}"))

    def _has_frames(self) -> bool:
        events = self._socket.get(zmq.EVENTS)
        assert isinstance(events, int)
        return bool(events & POLLIN)

    def _stop_reading(self) -> None:
        if self._is_reading:
            self._is_reading = False
            self._loop.remove_reader(self._socket.fileno())

    def _take(self, message: FromEngine) -> None:
        if isinstance(message, OF_REQUEST):
            inbox = self._inboxes.get(message.request_id)
            if inbox is not None:  # else aborted a moment ago
                inbox._put(message)
        elif isinstance(message, Reply):
            reply = self._calls.get(message.call_id)
            if reply is not None and not reply.done():
                if message.error is None:
                    reply.set_result(message.result)
                else:
                    reply.set_exception(CallFailed(message.error))
        elif isinstance(message, Ready):
            self.ready = message
            if not self._is_ready.done():
                self._is_ready.set_result(message)
        elif self._on_loading is not None:
            self._on_loading(message)
