"""A prompt with its way back: from a token to the message or document that it stands in. Knows no cache and no engine.

    prompt = ReadPrompt([17, 4, …], tokenizer, text="<|im_start|>user\\nHello<|im_end|>\\n", spans=…)
    prompt.place(5)              # Place(source=Source("messages[0]", message=0, role="user"), character=2, …)
    prompt.num_tokens_until(0)   # tokens up to the end of messages[0]

A template may do with its messages and documents what it likes, so where they went is found by looking: it is rendered
once more with a mark around each text. Without the marks that must be the prompt, letter for letter; else nobody knows,
and nothing is claimed.
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
    from trunkline.api.protocol import ChatRequest, Document

# Noncharacters, which are in nobody's text (U+FDD0 is the template's own): OPEN 1 2 OPEN … CLOSE stands around the
# twelfth source.
_OPEN, _CLOSE = "\ufdd1", "\ufdd2"
_DIGITS = {ord(str(digit)): 0xFDE0 + digit for digit in range(10)}
_VALUES = {mark: digit for digit, mark in _DIGITS.items()}
_MARKS = re.compile("\ufdd1([\ufde0-\ufde9]+)\ufdd1|\ufdd2")
_ANY_MARK = re.compile("[\ufdd1\ufdd2\ufde0-\ufde9]")


Content = str | list[dict[str, Any]] | None


class Source(NamedTuple):
    """A text that a request brings.

    name      as the caller calls it: "messages[1]", "documents[0]"
    message   its index, if it is that of a message
    document  its index in `documents` as they were sent, if it is that of a document, or its title
    role      of the message
    """

    name: str
    message: int | None = None
    document: int | None = None
    role: str | None = None

    @property
    def words(self) -> str:
        return self.name if self.role is None else f"{self.name} ({self.role})"


class Span(NamedTuple):
    """Such a text in a prompt, as bytes of UTF-8, [start, end). What the template may strip, blanks at its ends, is
    outside."""

    start: int
    end: int
    source: Source
    num_blanks: int  # characters of the text before the span


class Place(NamedTuple):
    """Where a token begins: in a message or a document, or in what stands around them.

    source     None: in the template's own text
    character  of the source's text
    words      the same for people: "character 12 of messages[1] (user)"
    """

    source: Source | None
    character: int
    words: str


class ReadPrompt:
    """A prompt as the model reads it.

    text   of a rendered chat; None: the prompt has no messages
    spans  finds messages and documents in it; called at most once, and only if somebody asks. It may return None:
           nobody knows
    documents_order  the indices of the request's documents in the order in which they stand; None if it has none
    longest  of the tokens only so many are read, the last ones; None: all. Tokens are counted from the first that is read
    """

    def __init__(
        self,
        token_ids: list[int],
        tokenizer: Tokenizer,
        *,
        text: str | None = None,
        spans: Callable[[], list[Span] | None] = lambda: None,
        documents_order: list[int] | None = None,
        longest: int | None = None,
    ) -> None:
        self.num_cut = 0 if longest is None else max(0, len(token_ids) - longest)  # tokens left out at the beginning
        self.token_ids = token_ids[self.num_cut :]
        self._cut_ids = token_ids[: self.num_cut]
        self.documents_order = documents_order
        self.tokenizer = tokenizer
        self._text = None if text is None else text.encode()
        self._find_spans = spans
        self._found: tuple[list[Span], list[int]] | None = None
        self._has_looked = False

    @property
    def text(self) -> str:
        """As the template rendered it; "" without messages."""
        return "" if self._text is None else self._text.decode()

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
            return self._within(spans[after - 1], byte)
        before, behind = spans[:after], spans[after:]
        words = "the template's own text"
        if before and behind:
            words += f" between {before[-1].source.name} and {behind[0].source.name}"
        elif before:
            words += f" after {before[-1].source.name}"
        elif behind:
            words += f" before {behind[0].source.name}"
        return Place(None, 0, words)

    def num_tokens_until(self, message: int) -> int:
        """How many of the first tokens lie before the end of messages[message]; all of them if that can't be told."""
        if (found := self._look()) is None:
            return len(self.token_ids)
        spans, offsets = found
        ends = [span.end for span in spans if span.source.message is not None and span.source.message <= message]
        return max(0, bisect_right(offsets, max(ends)) - 1) if ends else 0

    def _within(self, span: Span, byte: int) -> Place:
        assert self._text is not None
        character = span.num_blanks + len(self._text[span.start : byte].decode("utf-8", "ignore"))
        return Place(span.source, character, f"character {character} of {span.source.words}")

    def _look(self) -> tuple[list[Span], list[int]] | None:
        """The spans in their order, and the byte at which each token begins; one more for the end of the last."""
        if not self._has_looked:
            self._has_looked = True
            all_ids = [*self._cut_ids, *self.token_ids]
            offsets = None if self._text is None else _offsets(all_ids, self.tokenizer, self._text)
            spans = None if offsets is None else self._find_spans()
            self._found = None if offsets is None or spans is None else (spans, offsets[self.num_cut :])
        return self._found


def _offsets(token_ids: Sequence[int], tokenizer: Tokenizer, text: bytes) -> list[int] | None:
    """Where each token begins in `text`, and where the last one ends. None if the tokens don't spell it.

    What a tokenizer puts before the text (a begin token, SentencePiece's space) begins below 0.
    """
    pieces = [tokenizer.token_bytes(token_id) for token_id in token_ids]
    start = b"".join(pieces).find(text)
    return None if start < 0 else list(accumulate(map(len, pieces), initial=-start))


def source_spans(chat: "ChatRequest", text: str, render: Callable[["ChatRequest"], str]) -> list[Span] | None:
    """Where `text`, which is what `render` makes of `chat`, has its messages and documents, in the order of the prompt.

    Those without text, or that the template leaves out, have no span. None if the template doesn't hand them on as they
    are.
    """
    if _ANY_MARK.search(text):
        return None
    marker = _Marker()
    messages = [
        message.model_copy(
            update={
                "content": marker.around(
                    message.content, Source(f"messages[{index}]", message=index, role=message.role)
                )
            }
        )
        for index, message in enumerate(chat.messages)
    ]
    documents = [marker.around_document(document, index) for index, document in enumerate(chat.documents or ())]
    try:
        marked = render(chat.model_copy(update={"messages": messages, "documents": documents or chat.documents}))
    except RequestError:  # it looks into the text, and the marks are in its way
        return None
    return marker.spans(marked) if _MARKS.sub("", marked) == text else None


class _Marker:
    """Puts marks around texts, and reads in a prompt where they went."""

    def __init__(self) -> None:
        self._marked: list[
            tuple[Source, int]
        ] = []  # by the number in the mark: whose text, and how many blanks it begins with

    def around(self, content: Content, source: Source) -> Content:
        """The content with marks around it, inside of the blanks at its ends; as it is if there is nothing else."""
        if isinstance(content, str):
            return self._around_text(content, source)
        if content is None:
            return None
        texts = [at for at, part in enumerate(content) if _part_text(part).strip()]
        if not texts:
            return content
        opening = self._opening("\n".join(map(_part_text, content)), source)
        parts = list(content)
        for at, before, after in ((texts[0], opening, ""), (texts[-1], "", _CLOSE)):
            parts[at] = {**parts[at], parts[at]["type"]: _with(_part_text(parts[at]), before, after)}
        return parts

    def around_document(self, document: "str | Document", index: int) -> "str | Document":
        """The document with marks around its text, and others around its title."""
        source = Source(f"documents[{index}]", document=index)
        if isinstance(document, str):
            return self._around_text(document, source)
        marked = {"text": self._around_text(document.text, source)}
        if document.title:
            marked["title"] = self._around_text(document.title, source._replace(name=f"the title of {source.name}"))
        return document.model_copy(update=marked)

    def spans(self, prompt: str) -> list[Span] | None:
        """Where the marked texts are in the prompt without marks. None if the marks don't go in pairs."""
        spans: list[Span] = []
        opened: int | None = None  # the number of the text that a mark opened, and where
        start = num_bytes = end = 0
        for mark in _MARKS.finditer(prompt):
            num_bytes += len(prompt[end : mark.start()].encode())
            end = mark.end()
            is_opening = mark[1] is not None
            if is_opening != (opened is None):
                return None
            if is_opening:
                opened, start = int(mark[1].translate(_VALUES)), num_bytes
            elif opened is not None:
                spans.append(Span(start, num_bytes, *self._marked[opened]))
                opened = None
        return spans if opened is None else None

    def _around_text(self, text: str, source: Source) -> str:
        return _with(text, self._opening(text, source), _CLOSE) if text.strip() else text

    def _opening(self, text: str, source: Source) -> str:
        self._marked.append((source, len(text) - len(text.lstrip())))
        return _OPEN + str(len(self._marked) - 1).translate(_DIGITS) + _OPEN


def _with(text: str, before: str, after: str) -> str:
    start, end = len(text) - len(text.lstrip()), len(text.rstrip())
    return text[:start] + before + text[start:end] + after + text[end:]


def _part_text(part: dict[str, Any]) -> str:
    text = part.get(part.get("type", ""))
    return text if isinstance(text, str) else ""
