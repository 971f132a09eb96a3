"""The text of one choice, read as a chat's answer: what was thought, what was said, what was called. Knows no HTTP.

    text ──► ReasoningParser ──► ToolParser ──► events ──► deltas of a stream
                                                  └──────► the message

A stream and an answer in one piece come from the same events, so the one adds up to the other.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from trunkline.api.reasoning import ReasoningParser
from trunkline.api.tool_parsers.base import Arguments, CallEnd, CallStart, Content, Event, ToolParser


@dataclass(slots=True)
class ReadCall:
    """A call, as far as it was read."""

    id: str
    name: str
    pieces: list[str] = field(default_factory=list)
    is_complete: bool = False

    @property
    def arguments(self) -> str:
        """JSON text."""
        return "".join(self.pieces)

    @property
    def body(self) -> dict[str, Any]:
        """As OpenAI's API has it."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class AnswerReader:
    """Reads one choice.

    tools           the parser of its calls; None: nothing may be called
    reasoning       the parser of its thoughts; None: there are none
    only_calls      the answer is calls and nothing else: what is left of one that was cut off is no text for people
    at_most         calls that are handed on; None: all
    is_named        one function was asked for: a call of it is an answer like any other, not a reason to end
    shows_thoughts  False: they are left out
    """

    def __init__(
        self,
        tools: ToolParser | None = None,
        reasoning: ReasoningParser | None = None,
        *,
        only_calls: bool = False,
        at_most: int | None = None,
        is_named: bool = False,
        shows_thoughts: bool = True,
    ) -> None:
        self.calls: list[ReadCall] = []
        self.has_thought = False  # shown or not
        self._tools = tools
        self._reasoning = reasoning
        self._only_calls = only_calls
        self._at_most = at_most
        self._is_named = is_named
        self._shows_thoughts = shows_thoughts
        self._content: list[str] = []
        self._thoughts: list[str] = []

    @property
    def is_plain(self) -> bool:
        """All text is content."""
        return self._tools is None and self._reasoning is None

    @property
    def has_closed(self) -> bool:
        """There were thoughts, and they are over."""
        return self._reasoning is not None and self._reasoning.has_closed

    @property
    def content(self) -> str:
        """What was said so far."""
        return "".join(self._content)

    def push(self, text: str) -> list[dict[str, Any]]:
        """More text; the deltas that it makes, each with one thing in it."""
        if self.is_plain:
            if text:
                self._content.append(text)
            return [{"content": text}] if text else []
        reasoning = ""
        if self._reasoning is not None:
            reasoning, text = self._reasoning.push(text)
        return self._deltas(reasoning, self._events(text))

    def finish(self, reason: str | None) -> list[dict[str, Any]]:
        """No more text comes, for the engine's "stop" or "length"; the last deltas."""
        reasoning, text = ("", "") if self._reasoning is None else self._reasoning.finish()
        events = self._events(text)
        return self._deltas(
            reasoning, events if self._tools is None else events + self._tools.finish(is_cut=reason == "length")
        )

    def message(self) -> dict[str, Any]:
        """The whole answer. Fields that would be empty are left out, but for `content`."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content, "refusal": None}
        if not self.is_plain:
            message["content"] = message["content"] or None
        if self._thoughts:
            message["reasoning_content"] = "".join(self._thoughts)
        if self.calls:
            message["tool_calls"] = [call.body for call in self.calls]
        return message

    def finish_reason(self, reason: str) -> str:
        """OpenAI's, for the engine's "stop" or "length": "tool_calls" if calls end the answer, all of them complete."""
        if reason != "stop" or self._is_named or not self.calls or not all(call.is_complete for call in self.calls):
            return reason
        return "tool_calls"

    def _events(self, text: str) -> list[Event]:
        if self._tools is not None:
            return self._tools.push(text)
        return [Content(text)] if text else []

    def _deltas(self, reasoning: str, events: Iterable[Event]) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = []
        self.has_thought = self.has_thought or bool(reasoning)
        if reasoning and self._shows_thoughts:
            self._thoughts.append(reasoning)
            deltas.append({"reasoning_content": reasoning})
        for event in _joined(events):
            match event:
                case Content(text):
                    if not self._only_calls:
                        self._content.append(text)
                        deltas.append({"content": text})
                case CallStart(index, call_id, name):
                    if not self._is_beyond(index):
                        self.calls.append(ReadCall(call_id, name))
                        function = {"name": name, "arguments": ""}
                        deltas.append(_of_call(index, id=call_id, type="function", function=function))
                case Arguments(index, fragment):
                    if not self._is_beyond(index):
                        self.calls[index].pieces.append(fragment)
                        deltas.append(_of_call(index, function={"arguments": fragment}))
                case CallEnd(index):
                    if not self._is_beyond(index):
                        self.calls[index].is_complete = True
        return deltas

    def _is_beyond(self, index: int) -> bool:
        return self._at_most is not None and index >= self._at_most


def _of_call(index: int, **fields: Any) -> dict[str, Any]:
    return {"tool_calls": [{"index": index, **fields}]}


def _joined(events: Iterable[Event]) -> Iterable[Event]:
    """Neighbours of a kind as one."""
    last: Event | None = None
    for event in events:
        match last, event:
            case Content(before), Content(text):
                last = Content(before + text)
            case Arguments(index, before), Arguments(_, fragment):
                last = Arguments(index, before + fragment)
            case _:
                if last is not None:
                    yield last
                last = event
    if last is not None:
        yield last
