"""Documents of a chat: where the prompt shows them, and the prompt cut around them. Knows no tokens and no cache.

    layout = lay_out(render, chat)
    layout.pieces([2, 0, 1])   # Pieces(head="…<documents>\\n", documents=["<document>\\n…", …], glue=["", …], tail="…")

A model's chat template that knows documents gets them. For any other they stand as blocks at the end of the system
message, or, if the template takes no system message, before the text of the first user message:

    <documents>
    <document>
    Title: Opening hours
    We are open from nine to five.
    </document>
    </documents>

What a template makes of documents is found by looking: it is rendered once more with marks around their texts. Without
the marks that must be the prompt, letter for letter; else the prompt can't be cut, and is taken as a whole.
"""

import enum
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from trunkline.api.protocol import ChatRequest, Document
from trunkline.errors import InvalidParameter

TemplateDocuments = Sequence[Mapping[str, Any]]
Render = Callable[[ChatRequest, TemplateDocuments | None], str]
"""The prompt of a chat; its template sees these documents."""

# Noncharacters, which are in nobody's text: OPEN, the document's number in two digits, its text, CLOSE.
_OPEN, _CLOSE = "\ufdd4", "\ufdd5"
_DIGITS = [chr(0xFDE0 + digit) for digit in range(16)]
_MARKS = re.compile("\ufdd4([\ufde0-\ufdef]{2})|\ufdd5")


class Placement(enum.Enum):
    """Where the prompt shows the documents; the first that works is taken."""

    TEMPLATE = "as the model's own chat template does"
    SYSTEM = "at the end of the system message"
    USER = "before the first user message"


class Pieces(NamedTuple):
    """A prompt, cut: head, then for each document its glue and itself, then tail. Whole lines where there are lines.

    documents  in the order in which they stand; none if the prompt can't be cut, and is all head
    glue       what stands before each of them, whichever it is, such as "Document 2:\\n"; that of the first is ""
    """

    head: str
    documents: list[str]
    glue: list[str]
    tail: str

    @property
    def text(self) -> str:
        """The whole prompt."""
        blocks = (glue + document for glue, document in zip(self.glue, self.documents, strict=True))
        return "".join((self.head, *blocks, self.tail))


class Layout:
    """A chat with its documents in one placement."""

    def __init__(self, render: Render, chat: ChatRequest, placement: Placement) -> None:
        self.placement = placement
        self._render = render
        self._chat = chat
        self._documents = _documents_of(chat)
        self._texts: dict[tuple[tuple[int, ...], bool], str] = {}  # by order, and whether they have marks

    @property
    def num_documents(self) -> int:
        return len(self._documents)

    def text(self, order: Sequence[int], chat: ChatRequest | None = None) -> str:
        """The prompt with the documents in this order; of another chat with as many documents, if one is given."""
        return self._text_of(order) if chat is None else self._rendered(order, chat, marks=False)

    def pieces(self, order: Sequence[int]) -> Pieces:
        """The prompt, cut. All head if the template does more than to show each of the documents once, in order."""
        plain = self._text_of(order)
        return _cut(self._text_of(order, marks=True), plain, len(order)) or Pieces(plain, [], [], "")

    def shows_documents(self) -> bool:
        """False if the template leaves them out."""
        as_sent = range(self.num_documents)
        return self._text_of(as_sent) != self._text_of(as_sent, marks=True)

    def _text_of(self, order: Sequence[int], *, marks: bool = False) -> str:
        key = (tuple(order), marks)
        if key not in self._texts:
            self._texts[key] = self._rendered(order, self._chat, marks=marks)
        return self._texts[key]

    def _rendered(self, order: Sequence[int], chat: ChatRequest, *, marks: bool) -> str:
        sent = self._documents if chat is self._chat else _documents_of(chat)
        documents = [sent[index] for index in order]
        mark = _between_marks if marks else _as_it_is
        if self.placement is Placement.TEMPLATE:
            return self._render(
                chat,
                [
                    {
                        name: mark(value, number) if isinstance(value, str) else value
                        for name, value in document.model_dump(exclude_none=True).items()
                    }
                    for number, document in enumerate(documents)
                ],
            )
        blocks = (mark(_block(document), number) for number, document in enumerate(documents))
        block = "<documents>\n" + "".join(blocks) + "</documents>"
        add = _after_system if self.placement is Placement.SYSTEM else _before_user
        return self._render(add(chat, block), None)


def lay_out(render: Render, chat: ChatRequest, *, template_knows_documents: bool) -> Layout:
    """The layout of a chat that has documents.

    template_knows_documents  False saves the look whether it shows them

    Raises InvalidParameter if the template refuses the chat, or shows documents in none of the places.
    """
    refused: InvalidParameter | None = None
    for placement in list(Placement)[0 if template_knows_documents else 1 :]:
        layout = Layout(render, chat, placement)
        try:
            if layout.shows_documents():
                return layout
        except InvalidParameter as error:
            refused = refused or error
    raise refused or InvalidParameter(
        "The model's chat template shows neither documents, nor a system message, nor the first user message. Leave"
        " 'documents' out, or serve the model with another --chat-template.",
        param="documents",
    )


def _documents_of(chat: ChatRequest) -> list[Document]:
    return [Document(text=document) if isinstance(document, str) else document for document in chat.documents or ()]


def _block(document: Document) -> str:
    title = f"Title: {document.title}\n" if document.title else ""
    return f"<document>\n{title}{document.text}\n</document>\n"


def _after_system(chat: ChatRequest, block: str) -> ChatRequest:
    first, *others = messages = [message.model_dump(exclude_unset=True) for message in chat.messages]
    if first["role"] not in ("system", "developer"):
        first, others = {"role": "system", "content": ""}, messages
    return _with_messages(chat, [{**first, "content": _joined(first["content"], block)}, *others])


def _before_user(chat: ChatRequest, block: str) -> ChatRequest:
    messages = [message.model_dump(exclude_unset=True) for message in chat.messages]
    for message in messages:
        if message["role"] == "user":
            message["content"] = _joined(block, message["content"])
            break
    return _with_messages(chat, messages)


def _with_messages(chat: ChatRequest, messages: list[dict[str, Any]]) -> ChatRequest:
    parsed = [type(chat.messages[0]).model_validate(message) for message in messages]
    return chat.model_copy(update={"messages": parsed})


def _joined(*contents: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Texts with a blank line between them. Parts of a message are joined by one newline already."""
    if all(isinstance(content, str) for content in contents):
        return "\n\n".join(content for content in contents if isinstance(content, str) and content)
    first, second = (
        [{"type": "text", "text": content}] if isinstance(content, str) else content for content in contents
    )
    return [*first, {"type": "text", "text": ""}, *second]


# ---- marks


def _as_it_is(text: str, _number: int) -> str:
    return text


def _between_marks(text: str, number: int) -> str:
    """The marks stand inside of the blanks at the ends, which a template may strip."""
    if not (inner := text.strip()):
        return text
    start = text.index(inner)
    opening = _OPEN + _DIGITS[number // 16] + _DIGITS[number % 16]
    return text[:start] + opening + inner + _CLOSE + text[start + len(inner) :]


def _cut(marked: str, plain: str, num_documents: int) -> Pieces | None:
    """`plain`, cut where `marked` has marks. None if they differ in more than marks, or those are out of order."""
    if _MARKS.sub("", marked) != plain:
        return None
    spans = _spans(marked)
    if [number for number, _, _ in spans] != list(range(num_documents)):
        return None
    starts, ends = [start for _, start, _ in spans], [end for _, _, end in spans]
    gaps = [plain[end:start] for end, start in zip(ends, starts[1:], strict=False)]
    # Newlines that follow every document belong to it: tokenizers like to join them with what comes before.
    num_newlines = min(len(gap) - len(gap.lstrip("\n")) for gap in (*gaps, plain[ends[-1] :]))
    stops = [end + num_newlines for end in ends]
    begins = [start - length for start, length in zip(starts, _line_beginnings(plain[: starts[0]], gaps), strict=True)]
    return Pieces(
        head=plain[: begins[0]],
        documents=[plain[begin:stop] for begin, stop in zip(begins, stops, strict=True)],
        glue=["", *(plain[stop:begin] for stop, begin in zip(stops, begins[1:], strict=False))],
        tail=plain[stops[-1] :],
    )


def _line_beginnings(head: str, gaps: Sequence[str]) -> list[int]:
    """How many characters before each document are the beginning of its own first line, such as "Title: ".

    Nothing if documents stand on one line. What only the first one has in its line is the head's.
    """
    if not all("\n" in gap for gap in gaps):
        return [0] * (1 + len(gaps))
    first, *others = (text[text.rfind("\n") + 1 :] for text in (head, *gaps))
    alike = [len(line) for line in others if first.endswith(line)]
    return [max(alike, default=len(first)), *map(len, others)]


def _spans(marked: str) -> list[tuple[int, int, int]]:
    """Number, start and end of each document in the prompt without marks. A document may have many marks."""
    spans: list[tuple[int, int, int]] = []
    num_marks = 0  # characters of marks so far
    for mark in _MARKS.finditer(marked):
        at = mark.start() - num_marks
        num_marks += len(mark[0])
        if mark[1] is None:
            if spans:
                spans[-1] = (*spans[-1][:2], at)
            continue
        number = 16 * _DIGITS.index(mark[1][0]) + _DIGITS.index(mark[1][1])
        if not spans or spans[-1][0] != number:
            spans.append((number, at, at))
    return spans
