"""One streamed request to an OpenAI-compatible server: what came back, and when. Knows no workload.

    outcome = await stream(session, "http://127.0.0.1:8000/v1/completions", body)
    outcome.error or outcome.text

Time to first token is the first chunk that carries text: a chunk with only the role in it does not count.
"""

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp

ERROR_CHARACTERS = 300  # of an error's text that are kept


@dataclass(kw_only=True, slots=True)
class Outcome:
    """What one request gave. Times are seconds of `time.perf_counter`.

    started, finished  the request was sent, its last byte was read
    first, last        the first and the last chunk that carried text; None if none did
    gaps               seconds between each two of them
    error              why it failed, or None
    """

    started: float
    finished: float = 0.0
    first: float | None = None
    last: float | None = None
    text: str = ""
    finish_reason: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    error: str | None = None
    gaps: list[float] = field(default_factory=list)

    @property
    def time_to_first_token(self) -> float | None:
        return None if self.first is None else self.first - self.started

    @property
    def time_per_output_token(self) -> float | None:
        """Seconds per token after the first, or None if there was only one."""
        if self.first is None or self.last is None or self.completion_tokens < 2:
            return None
        return (self.last - self.first) / (self.completion_tokens - 1)


class EventParser:
    """Takes a `text/event-stream` body apart, however the network has cut it (WHATWG HTML, §9.2.6).

    events = EventParser()
    events.feed(b'data: {"a": 1}\\n\\nda')     # ['{"a": 1}']
    events.feed(b"ta: [DONE]\\n\\n")           # ['[DONE]']
    """

    def __init__(self) -> None:
        self._tail = b""
        self._data: list[str] = []

    def feed(self, received: bytes) -> list[str]:
        """The data of every event that `received` completes, in order."""
        buffer = self._tail + received
        held = b"\r" if buffer.endswith(b"\r") else b""  # its line feed may be still to come
        text = buffer.removesuffix(held).replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, tail = text.split(b"\n")
        self._tail = tail + held
        return [event for line in lines for event in self._take(line.decode("utf-8", "replace"))]

    def _take(self, line: str) -> Iterator[str]:
        if not line:
            if self._data:
                yield "\n".join(self._data)
            self._data = []
        elif line.startswith("data:"):
            self._data.append(line[5:].removeprefix(" "))
        # comments, event names, ids and retry times say nothing about the text


async def stream(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> Outcome:
    """Send one streaming request and read it to its end. Failures are reported in the outcome, never raised.

    session  one with `reused_connections` among its trace configs
    """
    outcome = Outcome(started=time.perf_counter())
    try:
        async with await _post(session, url, body) as response:
            if response.status != 200:
                outcome.error = f"HTTP {response.status}: {_shorten(await response.text())}"
            elif "text/event-stream" not in response.headers.get("Content-Type", ""):
                outcome.error = f"The server did not stream: {_shorten(await response.text())}"
            else:
                await _read(response, outcome)
    except TimeoutError:
        outcome.error = "The server sent nothing for too long (--timeout)."
    except aiohttp.ClientError as error:
        outcome.error = _shorten(f"{type(error).__name__}: {error}")
    outcome.finished = time.perf_counter()
    return outcome


def reused_connections() -> aiohttp.TraceConfig:
    """For a session whose requests `stream` sends: tells it which of them went out on a connection of an earlier one."""
    trace = aiohttp.TraceConfig()

    async def tell(_: object, context: Any, __: object) -> None:
        if context.trace_request_ctx is not None:  # another request than `stream`'s
            context.trace_request_ctx.append(True)

    trace.on_connection_reuseconn.append(tell)
    return trace


async def _post(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> aiohttp.ClientResponse:
    """Send a request, once more as long as the connection was kept from an earlier one and is closed by now.

    Some servers, llama.cpp's for one, close it behind every stream and do not say so: after several streams there are as many such
    connections, each found out when it is tried. A new connection that is closed is the server's answer.
    """
    while True:
        reused: list[bool] = []
        try:
            return await session.post(url, json=body, trace_request_ctx=reused)
        except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError):
            if not reused:
                raise


async def _read(response: aiohttp.ClientResponse, outcome: Outcome) -> None:
    events = EventParser()
    has_usage = False
    async for received in response.content.iter_any():
        now = time.perf_counter()
        for data in events.feed(received):
            if data == "[DONE]":
                continue
            try:
                chunk = json.loads(data)
            except ValueError:
                outcome.error = f"A chunk is not JSON: {_shorten(data)}"
                return
            if "error" in chunk:
                outcome.error = f"Error in the stream: {_shorten(json.dumps(chunk['error'], ensure_ascii=False))}"
                return
            has_usage |= _take_chunk(chunk, now, outcome)
    if outcome.finish_reason is None:
        outcome.error = "The stream ended without a finish_reason."
    elif not has_usage:
        outcome.error = "The server sent no usage, so its tokens cannot be counted (stream_options.include_usage)."


def _take_chunk(chunk: dict[str, Any], now: float, outcome: Outcome) -> bool:
    """Note what a chunk brings. Returns True if it brought the usage."""
    for choice in chunk.get("choices") or ():
        text = choice.get("text") or (choice.get("delta") or {}).get("content")
        if text:
            outcome.text += text
            if outcome.last is not None:
                outcome.gaps.append(now - outcome.last)
            outcome.last = now
            if outcome.first is None:
                outcome.first = now
        outcome.finish_reason = choice.get("finish_reason") or outcome.finish_reason
    usage = chunk.get("usage")
    if not usage:
        return False
    outcome.prompt_tokens = usage.get("prompt_tokens") or 0
    outcome.completion_tokens = usage.get("completion_tokens") or 0
    outcome.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return True


def _shorten(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= ERROR_CHARACTERS else text[: ERROR_CHARACTERS - 3] + "..."
