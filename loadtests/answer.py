"""One streamed chat answer: what it says, the calls it makes, and when. Knows no Locust and no user.

answer = read_answer(response.iter_content(chunk_size=None), started)
answer.text, answer.calls, answer.ttft, answer.cached_tokens / answer.prompt_tokens
"""

import json
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from trunkline.bench.client import EventParser


class BrokenAnswerError(Exception):
    """The stream said that something went wrong, or ended before it was complete."""


@dataclass(kw_only=True)
class Call:
    """A tool call, as its pieces come in."""

    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(kw_only=True)
class Answer:
    """Times are seconds of `time.perf_counter`; `first` and `last` are those of the chunks with text or a piece of a call."""

    started: float
    first: float | None = None
    last: float | None = None
    text: str = ""
    calls: list[Call] = field(default_factory=list)
    finish_reason: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0

    @property
    def ttft(self) -> float | None:
        """Seconds to the first token, or None if there was none. A chunk with the role alone is no token."""
        return None if self.first is None else self.first - self.started

    @property
    def tpot(self) -> float | None:
        """Seconds per output token after the first, or None if there was only one."""
        if self.first is None or self.last is None or self.output_tokens < 2:
            return None
        return (self.last - self.first) / (self.output_tokens - 1)


def read_answer(received: Iterable[bytes], started: float) -> Answer:
    """Read a `text/event-stream` body to its end. Raises BrokenAnswerError."""
    answer = Answer(started=started)
    events = EventParser()
    done = usage = False
    for piece in received:
        now = time.perf_counter()
        for data in events.feed(piece):
            if data == "[DONE]":
                done = True
                continue
            chunk = json.loads(data)
            if "error" in chunk:
                raise BrokenAnswerError(f"error in the stream: {chunk['error']}")
            for choice in chunk.get("choices") or ():
                _take(choice, answer, now)
            usage |= _count(chunk.get("usage"), answer)
    if not (done and usage and answer.finish_reason):
        missing = [("[DONE]", done), ("usage", usage), ("finish_reason", answer.finish_reason)]
        raise BrokenAnswerError("the stream ended without " + ", ".join(what for what, there in missing if not there))
    return answer


def _take(choice: dict[str, Any], answer: Answer, now: float) -> None:
    delta = choice.get("delta") or {}
    if (text := delta.get("content")) or delta.get("tool_calls"):
        answer.first = now if answer.first is None else answer.first
        answer.last = now
    answer.text += text or ""
    for piece in delta.get("tool_calls") or ():
        while len(answer.calls) <= piece["index"]:
            answer.calls.append(Call())
        call, function = answer.calls[piece["index"]], piece.get("function") or {}
        call.id += piece.get("id") or ""
        call.name += function.get("name") or ""
        call.arguments += function.get("arguments") or ""
    answer.finish_reason = choice.get("finish_reason") or answer.finish_reason


def _count(usage: dict[str, Any] | None, answer: Answer) -> bool:
    """Note the usage, if this chunk has one. Returns whether it has."""
    if not usage:
        return False
    answer.prompt_tokens = usage["prompt_tokens"]
    answer.output_tokens = usage["completion_tokens"]
    answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return True
