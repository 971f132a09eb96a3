import asyncio
import itertools
import json

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trunkline.bench.client import EventParser, Outcome, stream

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
        self._answers = answers

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
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


@pytest.mark.parametrize(("answers", "errors", "requests"), [(1, [None, None], 3), (0, ["Server disc"] * 2, 4)])
async def test_a_request_on_a_connection_that_was_closed_is_sent_once_more(
    answers: int, errors: list[str | None], requests: int
) -> None:
    forgetful = Forgetful(answers)
    server = await asyncio.start_server(forgetful, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, aiohttp.ClientSession() as session:
        outcomes = [await stream(session, f"http://127.0.0.1:{port}/", {}) for _ in errors]
    for outcome, error in zip(outcomes, errors, strict=True):
        assert outcome.error == error if error is None else error in (outcome.error or "")
    assert forgetful.requests == requests
