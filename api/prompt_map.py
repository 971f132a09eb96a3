"""A prompt with its way back: from a token to the message of the chat that it stands in. Knows no cache and no engine.

    prompt = ReadPrompt([17, 4, …], tokenizer, text="<|im_start|>user\\nHello<|im_end|>\\n", spans=…)
    prompt.place(5)              # Place(message=0, role="user", character=2)
    prompt.num_tokens_until(0)   # tokens up to the end of messages[0]

A template may do with its messages what it likes, so where they went is found by looking: it is rendered once more with a mark around
each message's text. Without the marks that must be the prompt, letter for letter; else nobody knows, and nothing is claimed.
"""

import re
from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

from trunkline.errors import RequestError
from trunkline.models.tokenizer import Tokenizer

if TYPE_CHECKING:
    from trunkline.api.protocol import ChatRequest

# Noncharacters, which are in nobody's text (U+FDD0 is the template's own): OPEN 1 2 OPEN … CLOSE stands around messages[12].
_OPEN, _CLOSE = "\ufdd1", "\ufdd2"
_DIGITS = {ord(str(digit)): 0xFDE0 + digit for digit in range(10)}
_VALUES = {mark: digit for digit, mark in _DIGITS.items()}
_MARKS = re.compile("\ufdd1([\ufde0-\ufde9]+)\ufdd1|\ufdd2")
_ANY_MARK = re.compile("[\ufdd1\ufdd2\ufde0-\ufde9]")


class Span(NamedTuple):
    """A message's text in a prompt, as bytes of UTF-8, [start, end). What the template may strip, blanks at its ends, is outside."""

    start: int
    end: int
    message: int
    role: str
    num_blanks: int  # characters of the message before the span


class Place(NamedTuple):
    """Where a token begins: in a message, or in what the template writes around them.

    message    index of the message; None: in the template's own text
    role       of the message; "" in the template
    character  of the message's text
    words      the same for people: "character 12 of messages[1] (user)"
    """

    message: int | None
    role: str
    character: int
    words: str


class ReadPrompt:
    """A prompt as the model reads it.

    text   of a rendered chat; None: the prompt has no messages
    spans  finds the messages in it; called at most once, and only if somebody asks. It may return None: nobody knows
    documents_order  the indices of the request's documents in the order in which they stand; None if it has none
    """

    def __init__(
        self,
        token_ids: list[int],
        tokenizer: Tokenizer,
        *,
        text: str | None = None,
        spans: Callable[[], list[Span] | None] = lambda: None,
        documents_order: list[int] | None = None,
    ) -> None:
        self.token_ids = token_ids
        self.documents_order = documents_order
        self.tokenizer = tokenizer
        self._text = None if text is None else text.encode()
        self._find_spans = spans
        self._found: tuple[list[Span], list[int]] | None = None
        self._has_looked = False

    def to_bytes(self) -> bytes:
        """int32 little-endian, as the engine has it."""
        return array("i", self.token_ids).tobytes()

    def place(self, position: int) -> Place | None:
        """Where token `position` begins; None if the prompt has no messages or they can't be told apart."""
        if (found := self._look()) is None:
            return None
        spans, offsets = found
        byte = offsets[position]
        after = bisect_right(spans, byte, key=lambda span: span.start)  # the first span beyond that byte
        if after and byte < spans[after - 1].end:
            return self._in_message(spans[after - 1], byte)
        before, behind = spans[:after], spans[after:]
        words = "the template's own text"
        if before and behind:
            words += f" between messages[{before[-1].message}] and messages[{behind[0].message}]"
        elif before:
            words += f" after messages[{before[-1].message}]"
        elif behind:
            words += f" before messages[{behind[0].message}]"
        return Place(None, "", 0, words)

    def num_tokens_until(self, message: int) -> int:
        """How many of the first tokens lie before the end of messages[message]; all of them if that can't be told."""
        if (found := self._look()) is None:
            return len(self.token_ids)
        spans, offsets = found
        ends = [span.end for span in spans if span.message <= message]
        return bisect_right(offsets, max(ends)) - 1 if ends else 0

    def _in_message(self, span: Span, byte: int) -> Place:
        assert self._text is not None
        character = span.num_blanks + len(self._text[span.start : byte].decode("utf-8", "ignore"))
        words = f"character {character} of messages[{span.message}] ({span.role})"
        return Place(span.message, span.role, character, words)

    def _look(self) -> tuple[list[Span], list[int]] | None:
        """The spans in their order, and the byte at which each token begins; one more for the end of the last."""
        if not self._has_looked:
            self._has_looked = True
            offsets = None if self._text is None else _offsets(self.token_ids, self.tokenizer, self._text)
            spans = None if offsets is None else self._find_spans()
            self._found = None if offsets is None or spans is None else (spans, offsets)
        return self._found


def _offsets(token_ids: Sequence[int], tokenizer: Tokenizer, text: bytes) -> list[int] | None:
    """Where each token begins in `text`, and where the last one ends. None if the tokens don't spell it.

    What a tokenizer puts before the text (a begin token, SentencePiece's space) begins below 0.
    """
    pieces = [tokenizer.token_bytes(token_id) for token_id in token_ids]
    start = b"".join(pieces).find(text)
    return None if start < 0 else list(accumulate(map(len, pieces), initial=-start))


def message_spans(chat: "ChatRequest", text: str, render: Callable[["ChatRequest"], str]) -> list[Span] | None:
    """Where `text`, which is what `render` makes of `chat`, has the text of each message, in the order of the prompt.

    Messages without text, or that the template leaves out, have no span. None if the template doesn't hand them on as they are.
    """
    if _ANY_MARK.search(text):
        return None
    messages = [
        message.model_copy(update={"content": _marked(message.content, index)})
        for index, message in enumerate(chat.messages)
    ]
    try:
        marked = render(chat.model_copy(update={"messages": messages}))
    except RequestError:  # it looks into the text, and the marks are in its way
        return None
    if _MARKS.sub("", marked) != text:
        return None
    return _read_marks(marked, chat)


def _read_marks(marked: str, chat: "ChatRequest") -> list[Span] | None:
    spans: list[Span] = []
    opened: int | None = None  # the message that a mark opened, and where
    start = num_bytes = end = 0
    for mark in _MARKS.finditer(marked):
        num_bytes += len(marked[end : mark.start()].encode())
        end = mark.end()
        is_opening = mark[1] is not None
        if is_opening != (opened is None):
            return None
        if is_opening:
            opened, start = int(mark[1].translate(_VALUES)), num_bytes
        elif opened is not None:
            message = chat.messages[opened]
            spans.append(Span(start, num_bytes, opened, message.role, _num_blanks(message.content)))
            opened = None
    return spans if opened is None else None


def _marked(content: str | list[dict[str, Any]] | None, index: int) -> str | list[dict[str, Any]] | None:
    """The content with marks around it, inside of the blanks at its ends; as it is if there is nothing else."""
    opening = _OPEN + str(index).translate(_DIGITS) + _OPEN
    if isinstance(content, str):
        return _with(content, opening, _CLOSE) if content.strip() else content
    if content is None:
        return None
    texts = [at for at, part in enumerate(content) if _part_text(part).strip()]
    if not texts:
        return content
    parts = list(content)
    for at, before, after in ((texts[0], opening, ""), (texts[-1], "", _CLOSE)):
        parts[at] = {**parts[at], parts[at]["type"]: _with(_part_text(parts[at]), before, after)}
    return parts


def _with(text: str, before: str, after: str) -> str:
    start, end = len(text) - len(text.lstrip()), len(text.rstrip())
    return text[:start] + before + text[start:end] + after + text[end:]


def _part_text(part: dict[str, Any]) -> str:
    text = part.get(part.get("type", ""))
    return text if isinstance(text, str) else ""


def _num_blanks(content: str | list[dict[str, Any]] | None) -> int:
    text = content if isinstance(content, str) else "\n".join(map(_part_text, content or []))
    return len(text) - len(text.lstrip())
