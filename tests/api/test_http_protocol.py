"""What uvicorn's HTTP/1.1 does not do for us: proposals of another protocol are passed over, and heads have an end."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from trunkline.api import http_protocol
from trunkline.api.disconnect import on_disconnect
from trunkline.api.http_protocol import HttpProtocol

# As the first request of Java's HTTP client has it.
OFFERS = b"Connection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA\r\nUpgrade: h2c\r\n"


async def echo(scope, receive, send) -> None:
    """Answers with the method and the body."""
    body = scope["method"].encode() + b" "
    while (message := await receive()).get("more_body"):
        body += message["body"]
    body += message["body"]
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


async def exchange(*sent: bytes) -> bytes:
    """What comes back from a server of one connection. Each part is sent when those before it have been read."""
    config = uvicorn.Config(echo, lifespan="off", ws="none", log_config=None)
    config.load()

    received = asyncio.Event()

    class Watched(HttpProtocol):
        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            received.set()

    state = ServerState()
    server = await asyncio.get_running_loop().create_server(
        lambda: Watched(config=config, server_state=state, app_state={}), "127.0.0.1", 0
    )
    async with server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        for part in sent:
            received.clear()
            writer.write(part)
            await received.wait()
        answer = await reader.read()
        writer.close()
    return answer


def request(body: bytes, headers: bytes = b"") -> bytes:
    return b"POST / HTTP/1.1\r\nHost: x\r\n%sContent-Length: %d\r\n\r\n%s" % (headers, len(body), body)


LAST = request(b"last", b"Connection: close\r\n")


@pytest.mark.parametrize("offers", [OFFERS, OFFERS.lower(), OFFERS.replace(b"h2c", b"websocket")])
async def test_the_body_of_a_request_that_proposes_another_protocol_is_read(offers: bytes) -> None:
    answer = await exchange(request(b"Upgrade: h2c\r\n\r\n", offers), LAST)
    assert answer.count(b"HTTP/1.1 200 OK") == 2
    assert b"POST Upgrade: h2c\r\n\r\n" in answer, "bodies are left as they are"
    assert answer.endswith(b"POST last")


async def test_a_body_that_comes_after_its_head_is_left_as_it_is() -> None:
    head, body = request(b"\r\nUpgrade: h2c\r\n\r\n", OFFERS).split(b"\r\n\r\n", 1)
    answer = await exchange(head + b"\r\n\r\n", body, LAST)
    assert b"POST \r\nUpgrade: h2c\r\n\r\n" in answer and answer.endswith(b"POST last")


@pytest.mark.parametrize("endless", [b"GET /", b"GET / HTTP/1.1\r\nX-Long: ", b"GET / HTTP/1.1\r\nX-1: 2\r\n"])
async def test_a_head_without_end_is_refused(monkeypatch: pytest.MonkeyPatch, endless: bytes) -> None:
    monkeypatch.setattr(http_protocol, "MAX_HEAD", 1000)
    more = b"x" * 600 if not endless.endswith(b"\r\n") else b"X-1: 2\r\n" * 75
    answer = await exchange(endless, more, more)
    assert answer.startswith(b"HTTP/1.1 400 Bad Request")
    assert b"longer than 1000 bytes" in answer


async def test_many_requests_together_are_longer_than_a_head_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "MAX_HEAD", 1000)
    several = [request(b"x" * 2000, b"X-Long: %s\r\n" % (b"x" * 300))] * 5
    assert (await exchange(*several, LAST)).count(b"HTTP/1.1 200 OK") == 6


class Client:
    """A connection to a server of it alone, whose application watches for its end and answers when it is told to."""

    def __init__(self) -> None:
        self.asked, self.answers, self.told = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.body = b""
        self.num_told = 0
        self.writer: asyncio.StreamWriter
        self.connections: set[Any]

    async def application(self, scope, receive, send) -> None:
        while (message := await receive()).get("more_body"):
            self.body += message["body"]
        self.body += message["body"]
        before = asyncio.all_tasks()
        end_watch = on_disconnect(scope, receive, self.tell)
        self.tasks = asyncio.all_tasks() - before
        self.asked.set()
        await self.answers.wait()
        end_watch()
        end_watch()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    def tell(self) -> None:
        self.num_told += 1
        self.told.set()

    @contextlib.asynccontextmanager
    async def connect(self, *requests: bytes) -> AsyncIterator[asyncio.StreamReader]:
        config = uvicorn.Config(self.application, interface="asgi3", lifespan="off", ws="none", log_config=None)
        config.load()
        state = ServerState()
        self.connections = state.connections
        server = await asyncio.get_running_loop().create_server(
            lambda: HttpProtocol(config=config, server_state=state, app_state={}), "127.0.0.1", 0
        )
        async with server:
            reader, self.writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            self.writer.write(b"".join(requests))
            await asyncio.wait_for(self.asked.wait(), 10)
            yield reader
            self.answers.set()
            self.writer.close()


@pytest.mark.parametrize("size", [4, 10 * 2**20])
async def test_the_end_of_a_connection_is_told_while_a_request_is_answered(size: int) -> None:
    """Of a body that is longer than what uvicorn reads ahead, too: it stops reading then."""
    client = Client()
    async with client.connect(request(b"x" * size)):
        assert client.num_told == 0 and len(client.body) == size
        assert not client.tasks, "none only to watch"
        client.writer.close()
        await asyncio.wait_for(client.told.wait(), 10)
    assert client.num_told == 1


async def test_the_end_of_a_connection_is_told_of_requests_sent_together() -> None:
    """The first is answered, the others wait for it."""
    client = Client()
    async with client.connect(request(b"1"), request(b"2")):
        client.writer.close()
        await asyncio.wait_for(client.told.wait(), 10)


async def test_nothing_is_told_after_the_end_of_a_watch() -> None:
    client = Client()
    async with client.connect(request(b"1")) as reader:
        client.answers.set()
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        client.writer.close()
        while client.connections:  # until the server has noticed
            await asyncio.sleep(0)
    assert client.num_told == 0


async def test_a_watch_over_a_connection_that_is_lost() -> None:
    config = uvicorn.Config(echo, lifespan="off", ws="none", log_config=None)
    config.load()
    protocol = HttpProtocol(config=config, server_state=ServerState(), app_state={})
    protocol.connection_lost(OSError())
    told = asyncio.Event()
    protocol._watch(told.set)
    await asyncio.wait_for(told.wait(), 5)
