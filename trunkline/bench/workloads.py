"""The workloads: what is sent, how much of it at a time. Texts come from the word list and a seed; no clock, no network.

| name | what it is like | requests | in (tokens) | out | at a time |
|------|-----------------|----------|-------------|-----|-----------|
| W1  | one person, one stream            | 3               | 128                               | 128   | 1   |
| W2  | RAG: one system prompt for all    | 32              | 1,024 shared + 128 of 8 + 24 own  | 64    | 8   |
| W3  | chats that grow turn by turn      | 8 chats × 4     | 128 shared, then 32 a turn        | 64    | 8   |
| W4  | extraction into a JSON schema     | 16              | about 64                          | ≤ 128 | 8   |
| W4u | the same sixteen, unconstrained   | 16              | about 64                          | ≤ 128 | 8   |
| W5  | cold prompts, nothing shared      | 16              | 512                               | 64    | 8   |
| W6  | a crowd, all at once              | 256             | 64                                | 64    | 256 |

W1, W2, W5 and W6 send text to /v1/completions: the same bytes to every server, and no chat template moves a prefix boundary.
W3 and W4 are chats. What the user says in W3 is the same for every server; the history holds the server's own answers, as it does
for a real client: replaying prepared answers would hide whether a server finds again what it wrote itself.
W4 and W4u differ in one word at the start of the system message, so that neither finds the other's prompts in a cache.
Temperature is 0. End-of-text is ignored (`ignore_eos`), so that every server writes equally much, except in W4 and W4u.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trunkline.bench.texts import Texts

Message = dict[str, str]

# Medium: nested object, array, enums, bounds. Nothing that a common grammar backend refuses, and it fits into 128 tokens.
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 40},
        "kind": {"type": "string", "enum": ["question", "fault", "wish", "praise"]},
        "urgency": {"type": "integer", "minimum": 1, "maximum": 5},
        "open": {"type": "boolean"},
        "place": {
            "type": "object",
            "properties": {
                "town": {"type": "string", "maxLength": 20},
                "floor": {"type": "integer", "minimum": 0, "maximum": 40},
            },
            "required": ["town", "floor"],
            "additionalProperties": False,
        },
        "tags": {
            "type": "array",
            "items": {"type": "string", "enum": ["water", "light", "door", "heat", "noise"]},
            "minItems": 1,
            "maxItems": 3,
        },
    },
    "required": ["title", "kind", "urgency", "open", "place", "tags"],
    "additionalProperties": False,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One request: either a text to continue, or the messages that a client adds to its chat.

    prompt         text for /v1/completions; None: this is a turn of a chat
    messages       new messages for /v1/chat/completions, after those of earlier turns and the server's answers to them
    prompt_tokens  tokens in `prompt`, or in the contents of `messages` (a server's chat template adds its own)
    max_tokens     tokens to write
    ignore_eos     go on after end-of-text
    schema         JSON schema that the answer must meet, or None
    """

    prompt: str | None = None
    messages: tuple[Message, ...] = ()
    prompt_tokens: int
    max_tokens: int
    ignore_eos: bool = True
    schema: dict[str, Any] | None = None

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.prompt is None else "/v1/completions"

    def body(self, model: str, history: list[Message]) -> dict[str, Any]:
        """The JSON to send; `history` holds the chat so far, with this turn's own messages at its end."""
        body: dict[str, Any] = {
            "model": model,
            "temperature": 0,
            "max_tokens": self.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        body |= {"messages": history} if self.prompt is None else {"prompt": self.prompt}
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.schema is not None:
            json_schema = {"name": "ticket", "strict": True, "schema": self.schema}
            body["response_format"] = {"type": "json_schema", "json_schema": json_schema}
        return body


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Sessions that run `concurrency` at a time, in order; the turns of one session follow each other."""

    name: str
    title: str
    concurrency: int
    sessions: tuple[tuple[Turn, ...], ...]


class Writer:
    """Texts of one workload, each from a generator of its own: `(seed, workload, name)` names a text for good."""

    def __init__(self, texts: Texts, seed: int, workload: str) -> None:
        self._texts = texts
        self._key = f"{seed}/{workload}"

    def rng(self, name: str) -> random.Random:
        return random.Random(f"{self._key}/{name}")

    def count(self, text: str) -> int:
        return self._texts.count(text)

    def piece(self, name: str, tokens: int, *, first: bool = False) -> tuple[str, int]:
        return self._texts.piece(tokens, self.rng(name), first=first), tokens

    def completion(self, *pieces: tuple[str, int], max_tokens: int) -> Turn:
        prompt_tokens = sum(tokens for _, tokens in pieces)
        return Turn(prompt=self._texts.join(*pieces), prompt_tokens=prompt_tokens, max_tokens=max_tokens)


def _alone(writer: Writer) -> Workload:
    turns = (writer.completion(writer.piece(f"{i}", 128, first=True), max_tokens=128) for i in range(3))
    return Workload(name="W1", title="one stream", concurrency=1, sessions=tuple((turn,) for turn in turns))


def _rag(writer: Writer) -> Workload:
    system = writer.piece("system", 1024, first=True)
    documents = [writer.piece(f"document {i}", 128) for i in range(8)]
    questions = [writer.piece(f"question {i}", 24) for i in range(32)]
    turns = [
        writer.completion(system, documents[i % 8], question, max_tokens=64) for i, question in enumerate(questions)
    ]
    writer.rng("order").shuffle(turns)
    return Workload(
        name="W2", title="RAG, shared system prompt", concurrency=8, sessions=tuple((turn,) for turn in turns)
    )


def _chats(writer: Writer) -> Workload:
    system = _message("system", writer.piece("system", 128, first=True)[0])
    sessions = []
    for chat in range(8):
        says = [_message("user", writer.piece(f"{chat}.{turn}", 32, first=True)[0]) for turn in range(4)]
        opening = Turn(messages=(system, says[0]), prompt_tokens=128 + 32, max_tokens=64)
        rest = (Turn(messages=(said,), prompt_tokens=32, max_tokens=64) for said in says[1:])
        sessions.append((opening, *rest))
    return Workload(name="W3", title="chats of four turns", concurrency=8, sessions=tuple(sessions))


def _tickets(writer: Writer, name: str, opening: str, schema: dict[str, Any] | None) -> Workload:
    system = _message("system", f"{opening} desk: answer with the note's ticket, as one JSON object.")
    prompt_tokens = writer.count(system["content"]) + 48
    sessions = []
    for i in range(16):
        messages = (system, _message("user", writer.piece(f"note {i}", 48, first=True)[0]))
        sessions.append(
            (Turn(messages=messages, prompt_tokens=prompt_tokens, max_tokens=128, ignore_eos=False, schema=schema),)
        )
    title = "JSON schema" if schema else "the same, unconstrained"
    return Workload(name=name, title=title, concurrency=8, sessions=tuple(sessions))


def _cold(writer: Writer) -> Workload:
    turns = (writer.completion(writer.piece(f"{i}", 512, first=True), max_tokens=64) for i in range(16))
    return Workload(name="W5", title="cold prompts", concurrency=8, sessions=tuple((turn,) for turn in turns))


def _crowd(writer: Writer) -> Workload:
    turns = (writer.completion(writer.piece(f"{i}", 64, first=True), max_tokens=64) for i in range(256))
    return Workload(name="W6", title="256 at once", concurrency=256, sessions=tuple((turn,) for turn in turns))


_MAKERS: dict[str, tuple[Callable[[Writer], Workload], ...]] = {
    "W1": (_alone,),
    "W2": (_rag,),
    "W3": (_chats,),
    "W4": (
        lambda writer: _tickets(writer, "W4", "North", SCHEMA),
        lambda writer: _tickets(writer, "W4u", "South", None),
    ),
    "W5": (_cold,),
    "W6": (_crowd,),
}
NAMES = tuple(_MAKERS)


def make_workloads(name: str, texts: Texts, seed: int) -> tuple[Workload, ...]:
    """The workload called `name`, one of NAMES; W4 brings W4u along. The same seed gives the same bytes on every machine."""
    return tuple(make(Writer(texts, seed, name)) for make in _MAKERS[name])


def warm_up(workload: Workload, texts: Texts, seed: int, count: int) -> Workload:
    """Requests of the same kind that share nothing with the workload's, to be sent before the clock starts."""
    writer = Writer(texts, seed, f"{workload.name} warm-up")
    pieces = [writer.piece(f"{i}", 16, first=True) for i in range(count)]
    if workload.sessions[0][0].prompt is None:
        turns = [Turn(messages=(_message("user", text),), prompt_tokens=16, max_tokens=8) for text, _ in pieces]
    else:
        turns = [writer.completion(piece, max_tokens=8) for piece in pieces]
    return Workload(name=workload.name, title="warm-up", concurrency=1, sessions=tuple((turn,) for turn in turns))


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}
