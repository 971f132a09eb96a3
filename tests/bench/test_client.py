import asyncio
import contextlib
import itertools
import json

import aiohttp
from hypothesis import given
from hypothesis import strategies as st

from trunkline.bench.client import EventParser, Outcome, reused_connections, stream

BODY = (
    ": a comment, as some proxies send to keep a connection open\r\n\r\n"
    'event: message\r\nid: 7\r\ndata: {"text": "Grüße, 世界 🌍"}\r\n\r\n'
    "data:no space\n\n"
    "data: two\ndata: lines\n\n"
    "data: carriage returns\r\r"
    "data: [DONE]\n\n"
    "data: never finished"
).encode()
EVENTS = ['{"text": "Grüße, 世界 🌍"}', "no space", "two\nlines", "carriage returns", "[DONE]"]


def test_whole_body() -> None:
    assert EventParser().feed(BODY) == EVENTS


def test_byte_by_byte() -> None:
    stream = EventParser()
    assert [event for byte in BODY for event in stream.feed(bytes([byte]))] == EVENTS


@given(cuts=st.lists(st.integers(0, len(BODY)), max_size=12))
def test_cut_anywhere(cuts: list[int]) -> None:
    stream = EventParser()
    at = [0, *sorted(cuts), len(BODY)]
    events = [event for start, end in itertools.pairwise(at) for event in stream.feed(BODY[start:end])]
    assert events == EVENTS
    assert json.loads(events[0])["text"] == "Grüße, 世界 🌍"


def test_time_per_output_token_counts_the_gaps() -> None:
    outcome = Outcome(started=10.0, first=10.5, last=11.5, completion_tokens=5)
    assert outcome.time_to_first_token == 0.5
    assert outcome.time_per_output_token == 0.25


def test_one_token_has_no_pace() -> None:
    assert Outcome(started=10.0, first=10.5, last=10.5, completion_tokens=1).time_per_output_token is None
    assert Outcome(started=10.0).time_to_first_token is None


class Forgetful:
    """Answers the first `answers` requests of each connection, which it says it keeps, and closes it at the next."""

    def __init__(self, answers: int) -> None:
        self.requests = 0
        self.connections: set[asyncio.Task[None] | None] = set()
        self._answers = answers

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections.add(asyncio.current_task())
        chunk = {"choices": [{"text": "one", "finish_reason": "stop"}], "usage": {"completion_tokens": 1}}
        content = f"data: {json.dumps(chunk)}\n\n".encode()
        head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nKeep-Alive: timeout=5, max=100\r\n"
        for answered in itertools.count():
            try:
                await reader.readuntil(b"{}")
            except asyncio.IncompleteReadError:
                break
            self.requests += 1
            if answered == self._answers:
                break
            writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
            await writer.drain()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def ask(forgetful: Forgetful, *rounds: int) -> list[Outcome]:
    """Round after round so many requests at once."""
    server = await asyncio.start_server(forgetful, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
    outcomes: list[Outcome] = []
    async with server:
        async with aiohttp.ClientSession(trace_configs=[reused_connections()]) as session:
            for count in rounds:
                outcomes += await asyncio.gather(*(stream(session, url, {}) for _ in range(count)))
        await asyncio.gather(*filter(None, forgetful.connections))
    return outcomes


async def test_a_request_on_a_connection_that_was_closed_is_sent_once_more() -> None:
    """Also if it gets several of them, one after the other."""
    forgetful = Forgetful(answers=1)
    outcomes = await ask(forgetful, 4, 1, 4)
    assert [outcome.error for outcome in outcomes] == [None] * 9
    assert forgetful.requests == 9 + 4 + 1, "each connection but those of the last round was tried once more"


async def test_a_server_that_hangs_up_is_asked_once() -> None:
    forgetful = Forgetful(answers=0)
    outcomes = await ask(forgetful, 1, 2)
    assert all("Server disc" in (outcome.error or "") for outcome in outcomes) and forgetful.requests == 3
