"""EngineClient against a socket that the test itself answers on."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.asyncio

from tests.stub import make_ready
from trunkline.api.client import CallFailed, EngineClient
from trunkline.errors import EngineDead, InvalidParameter, Overloaded
from trunkline.messages import (
    Abort,
    Call,
    Finished,
    Generate,
    Loading,
    Reply,
    Tokens,
    decode_to_engine,
    encode,
)
from trunkline.sampling import SamplingParams

READY = make_ready(max_model_len=64, num_pages=8)


class Engine:
    """The other end: what the test makes of it."""

    def __init__(self, address: str) -> None:
        self.context = zmq.asyncio.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.set(zmq.SNDHWM, 0)
        self.socket.bind(address)
        self.client = b""

    async def receive(self) -> list[Any]:
        self.client, frame = await self.socket.recv_multipart()
        return decode_to_engine(frame)

    async def send(self, *messages: Any) -> None:
        await self.socket.send_multipart([self.client, encode(list(messages))])

    async def send_raw(self, frame: bytes) -> None:
        await self.socket.send_multipart([self.client, frame])


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[Engine]:
    engine = Engine(f"ipc://{tmp_path}/s")
    yield engine
    engine.context.destroy(linger=0)


@pytest.fixture
async def client(engine: Engine, tmp_path: Path) -> AsyncIterator[EngineClient]:
    client = EngineClient(f"ipc://{tmp_path}/s")
    client.start()
    (hello,) = await engine.receive()
    assert hello == Call(call_id=0, method="hello")
    yield client
    await client.close()


def request(name: str) -> Generate:
    return Generate(request_id=name, prompt=b"\x01\x00\x00\x00", sampling=SamplingParams(seed=1))


def tokens(name: str, *ids: int) -> Tokens:
    return Tokens(request_id=name, token_ids=list(ids))


def finished(name: str) -> Finished:
    return Finished(request_id=name, reason="stop", prompt_tokens=1, cached_tokens=0, completion_tokens=1)


async def test_loading_then_ready(engine: Engine, tmp_path: Path) -> None:
    told: list[Loading] = []
    client = EngineClient(f"ipc://{tmp_path}/s", on_loading=told.append)
    client.start()
    await engine.receive()
    await engine.send(Loading(done=1, total=2))
    await engine.send(Loading(done=2, total=2), READY)
    assert await client.wait_ready() == client.ready == READY
    assert told == [Loading(done=1, total=2), Loading(done=2, total=2)]
    await client.close()


async def test_messages_come_in_order_and_together(engine: Engine, client: EngineClient) -> None:
    inbox = client.generate([request("a"), request("b")])
    assert await engine.receive() == [request("a"), request("b")], "one frame"
    await engine.send(tokens("a", 1), tokens("b", 2), tokens("a", 3))
    assert await inbox.get() == [tokens("a", 1), tokens("b", 2), tokens("a", 3)]
    await engine.send(finished("b"), tokens("a", 4), finished("a"))
    assert await inbox.get() == [finished("b"), tokens("a", 4), finished("a")]
    assert await inbox.get() == []


async def test_closing_aborts_what_still_runs(engine: Engine, client: EngineClient) -> None:
    inbox = client.generate([request("a"), request("b")])
    await engine.receive()
    await engine.send(tokens("a", 1), finished("a"))
    await inbox.get()
    inbox.close()
    inbox.close()
    assert await engine.receive() == [Abort(request_id="b")]
    assert await inbox.get() == []
    other = client.generate([request("c")])
    await engine.receive()
    await engine.send(tokens("b", 9), Reply(call_id=99), tokens("c", 5))  # too late, and of no interest to anyone
    assert await other.get() == [tokens("c", 5)]


async def test_what_arrives_while_something_is_sent_is_noticed(engine: Engine, client: EngineClient) -> None:
    """Whoever asks the socket for its events takes away the signal that a frame has come; then nobody else tells of it."""
    inbox = client.generate([request("a")])
    await engine.receive()
    await engine.send(tokens("a", 1))
    while not inbox._messages and not client._socket.poll(10):
        pass
    client.send([Abort(request_id="other")])
    assert await asyncio.wait_for(inbox.get(), 10) == [tokens("a", 1)]


async def test_a_slow_reader_holds_up_nobody(engine: Engine, client: EngineClient) -> None:
    slow, fast = client.generate([request("slow")]), client.generate([request("fast")])
    await engine.receive()
    await engine.receive()
    for _ in range(3000):
        await engine.send(tokens("slow", 1))
    await engine.send(tokens("fast", 2), finished("fast"))
    assert await fast.get() == [tokens("fast", 2), finished("fast")]
    received = await slow.get()
    assert received == [tokens("slow", 1)] * 3000, "nothing was dropped"


async def test_waiting_reader_is_woken_by_closing(engine: Engine, client: EngineClient) -> None:
    inbox = client.generate([request("a")])
    waiting = asyncio.create_task(inbox.get())
    await engine.receive()
    inbox.close()
    assert await waiting == []


async def test_request_id_in_use_is_refused(engine: Engine, client: EngineClient) -> None:
    client.generate([request("a")])
    with pytest.raises(InvalidParameter, match="request_id"):
        client.generate([request("a")])


async def test_calls_are_answered_whatever_the_order(engine: Engine, client: EngineClient) -> None:
    stats = asyncio.create_task(client.call("stats"))
    flush = asyncio.create_task(client.call("flush", all=True))
    (first,), (second,) = await engine.receive(), await engine.receive()
    assert second.args == {"all": True}
    await engine.send(
        Reply(call_id=second.call_id, error="flush failed"), Reply(call_id=first.call_id, result={"a": 1})
    )
    assert await stats == {"a": 1}
    with pytest.raises(CallFailed, match="flush failed"):
        await flush


async def test_death_reaches_everything_under_way_and_to_come(engine: Engine, client: EngineClient) -> None:
    inbox = client.generate([request("a")])
    waiting = asyncio.create_task(inbox.get())
    call = asyncio.create_task(client.call("stats"))
    await engine.receive()
    await engine.receive()
    client.mark_dead(EngineDead("gone"))
    for doomed in (waiting, call, inbox.get(), client.call("stats"), client.wait_ready()):
        with pytest.raises(EngineDead, match="gone"):
            await doomed
    with pytest.raises(EngineDead, match="gone"):
        client.generate([request("b")])


async def test_what_arrived_before_the_end_is_still_delivered(engine: Engine, client: EngineClient) -> None:
    inbox = client.generate([request("a")])
    await engine.receive()
    await engine.send(tokens("a", 1))
    await engine.send(Reply(call_id=77))
    assert await inbox.get() == [tokens("a", 1)]
    client.end(Overloaded("shutting down"))
    with pytest.raises(Overloaded):
        await inbox.get()
    assert await engine.receive() == [Abort(request_id="a")]


async def test_unreadable_frame_is_the_end(engine: Engine, client: EngineClient) -> None:
    inbox = client.generate([request("a")])
    await engine.receive()
    await engine.send_raw(b"\xc1 no message")
    with pytest.raises(EngineDead, match="cannot be read"):
        await inbox.get()


async def test_what_cannot_be_sent_is_not_waited_for(engine: Engine, client: EngineClient) -> None:
    with pytest.raises(UnicodeEncodeError):
        client.generate([request("a"), request("\ud800")])
    again = client.generate([request("a")])
    assert await engine.receive() == [request("a")]
    await engine.send(finished("a"))
    assert await again.get() == [finished("a")]
