"""EventStream without a server: what it writes, and when, whatever happens to the stream or the client."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from trunkline.api import sse
from trunkline.api.request_log import Record
from trunkline.api.sse import EventStream
from trunkline.errors import EngineDead, InvalidParameter, RequestError

FRAME = b"data: 1\n\n"


class Stream:
    """A stream of frames, the connection it is written to, and what became of both."""

    def __init__(self) -> None:
        self.frames: asyncio.Queue[list[bytes] | Exception | None] = asyncio.Queue()
        self.gone = asyncio.Event()
        self.wrote = asyncio.Event()
        self.closed = False
        self.is_running = True
        self.sent: list[Any] = []
        self.errors: list[RequestError] = []
        self.record = Record("r-1")
        self.response = EventStream(self, self._chunks(), on_error=self.errors.append)  # type: ignore[arg-type]

    async def _chunks(self) -> AsyncGenerator[list[bytes], None]:
        while (frames := await self.frames.get()) is not None:
            if isinstance(frames, Exception):
                raise frames
            yield frames

    def close(self) -> None:
        """As Generation.close: whoever iterates comes to the end."""
        self.closed = True
        self.frames.put_nowait(None)

    async def receive(self) -> Any:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append(message)
        self.wrote.set()

    async def run(self, *frames: list[bytes] | Exception | None) -> None:
        for frame in frames:
            self.frames.put_nowait(frame)
        state = {"request_id": "r-1", "record": self.record}
        await self.response({"type": "http", "state": state}, self.receive, self.send)

    @property
    def bodies(self) -> list[bytes]:
        return [message["body"] for message in self.sent if message["type"] == "http.response.body"]

    @property
    def status(self) -> int:
        return self.sent[0]["status"]


async def test_frames_that_arrive_together_are_written_together() -> None:
    stream = Stream()
    await stream.run([FRAME, FRAME], [FRAME], None)
    assert stream.status == 200
    assert stream.bodies == [FRAME + FRAME, FRAME, b"data: [DONE]\n\n"]
    assert [message.get("more_body") for message in stream.sent[1:]] == [True, True, False]
    assert stream.closed


async def test_what_is_left_when_the_engine_has_ended_is_written_at_once() -> None:
    stream = Stream()
    stream.is_running = False
    await stream.run([FRAME], [FRAME], None)
    assert stream.bodies == [FRAME + FRAME + b"data: [DONE]\n\n"]


async def test_error_after_frames_that_were_not_written_yet_is_an_event_too() -> None:
    stream = Stream()
    stream.is_running = False
    await stream.run([FRAME], EngineDead("The engine process ended."))
    assert stream.status == 200
    (body,) = stream.bodies
    assert body.startswith(FRAME + b'data: {"error":')


async def test_error_before_the_first_frame_is_an_http_error() -> None:
    stream = Stream()
    await stream.run(InvalidParameter.of("top_p", 2, "a number from 0 to 1"))
    assert stream.status == 400
    assert b'"param":"top_p"' in b"".join(stream.bodies)
    assert [error.param for error in stream.errors] == ["top_p"]


async def test_error_after_it_is_an_event_and_the_end() -> None:
    stream = Stream()
    await stream.run([FRAME], EngineDead("The engine process ended."))
    assert stream.status == 200
    first, last = stream.bodies
    assert first == FRAME
    assert last.startswith(b'data: {"error":{"message":"The engine process ended."')
    assert last.count(b"data:") == 1, "no [DONE] after an error"
    assert stream.sent[-1]["more_body"] is False
    assert stream.closed


async def test_bug_in_the_middle_tells_the_request_id_only(caplog: pytest.LogCaptureFixture) -> None:
    stream = Stream()
    await stream.run([FRAME], ZeroDivisionError("secret"))
    assert b"r-1" in stream.bodies[-1]
    assert b"secret" not in stream.bodies[-1]
    assert "secret" in caplog.text


async def test_bug_before_the_first_frame_is_left_to_the_outer_layer() -> None:
    stream = Stream()
    with pytest.raises(ZeroDivisionError):
        await stream.run(ZeroDivisionError())
    assert stream.sent == []
    assert stream.closed


async def test_pings_only_while_nothing_else_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "PING_SECONDS", 0.01)
    stream = Stream()
    running = asyncio.create_task(stream.run())
    while stream.bodies.count(b": ping\n\n") < 2:
        stream.wrote.clear()
        await stream.wrote.wait()
    assert stream.status == 200, "the first ping opens the stream"
    stream.frames.put_nowait([FRAME])
    stream.frames.put_nowait(None)
    await running
    assert stream.bodies[-2:] == [FRAME, b"data: [DONE]\n\n"]


async def test_a_client_that_does_not_read_is_pinged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "PING_SECONDS", 0.001)
    stream, pinging, looks, looked = Stream(), 0, 0, asyncio.Event()
    look = sse.EventStream._look

    async def stuck(self: sse.EventStream, send: Any) -> None:
        nonlocal pinging
        pinging += 1
        await asyncio.Event().wait()

    def counted(self: sse.EventStream, send: Any) -> None:
        nonlocal looks
        look(self, send)
        looks += 1
        if looks == 5:
            looked.set()

    monkeypatch.setattr(sse.EventStream, "_ping", stuck)
    monkeypatch.setattr(sse.EventStream, "_look", counted)
    running = asyncio.create_task(stream.run())
    await looked.wait()
    assert pinging == 1
    stream.frames.put_nowait(None)
    await running


async def test_client_that_goes_away_closes_the_generation() -> None:
    stream = Stream()
    running = asyncio.create_task(stream.run([FRAME]))
    stream.gone.set()
    await asyncio.wait_for(running, 10)
    assert stream.closed
