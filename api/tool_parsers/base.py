"""Tool calls in the text of a model, as it arrives: what the dialects have in common. Knows no HTTP and no tokens.

    parser = HermesParser(ToolNames(known={"f"}))
    parser.push('Let me see. <tool_call>\\n{"na')      [Content("Let me see.")]      "<tool_call>" is no content: it is held back
    parser.push('me": "f", "arguments": {"a": ')      [CallStart(0, "call_…", "f"), Arguments(0, '{"a": ')]
    parser.push('1}}\\n</tool_call>')                  [Arguments(0, "1}"), CallEnd(0)]
    parser.finish()                                   []

A dialect is one class in one file. Its `read` is written as if the whole text were there: it takes characters from the front, and
yields events. Where the text is not there yet, it is suspended in the middle (that is what the `yield from` is for), so how the
text was cut into pieces makes no difference to what comes out.

    def read(self) -> Steps[None]:
        while (yield from self.content_until("<call>")):     # False at the end of the text
            yield from self.attempt(self._call())

    def _call(self) -> Steps[None]:
        name = yield from self.until("(")                    # raises Malformed if the text ends before
        yield from self.start_call(name)
        yield from self.arguments()                          # a JSON value: handed on as the model wrote it
        yield from self.expect(")")
        yield from self.end_call()

What turns out to be no call after all becomes content, marker and all: nothing that a model wrote is lost, and nothing is raised.
Blanks around calls are layout: they are held back until text follows them, and dropped at the end if there was a call.
"""

import secrets
import string
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, TypeVar

import msgspec

from trunkline.api.marks import first_of, overlap
from trunkline.api.tool_parsers.json_value import JsonValue
from trunkline.constraint import Tag, Tags

MAX_NAME_CHARACTERS = 256  # of a function: a marker followed by more than this without an end is no call


@dataclass(frozen=True, slots=True)
class Content:
    """Text for people."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call begins. Calls are numbered from 0, one after the other."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """Goes on with the JSON text of a call's arguments."""

    index: int
    fragment: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The call is complete. Without it, the text ended in the middle of its arguments."""

    index: int


Event = Content | CallStart | Arguments | CallEnd
Result = TypeVar("Result")
Steps = Generator[Event | None, None, Result]
"""Reading: yields events, and None where it waits for more text."""


class ToolNames(NamedTuple):
    """Which functions there are.

    known         those in the request
    is_exclusive  a call of any other is no call. Otherwise it is handed on: the model meant to call, and the client knows best
                  what to tell it
    parameters    the schema of each one's arguments: dialects that write values without saying what they are read them by it
    """

    known: frozenset[str] = frozenset()
    is_exclusive: bool = False
    parameters: Mapping[str, Mapping[str, Any]] = MappingProxyType({})


class CallForm(NamedTuple):
    """How calls are written in a dialect whose arguments are JSON, so that a grammar can make a model write them:

    opening, begin arguments end, separator, begin arguments end, …, closing

    begin    with {name} where the name of the function stands
    trigger  what calls begin with, and nothing else does: it is how a grammar knows them within free text. It may also stand
             further on in the beginning: what comes before is then not enforced
    free_tokens  special tokens that come outside of calls, too
    """

    begin: str
    end: str
    separator: str
    trigger: str
    opening: str = ""
    closing: str = ""
    free_tokens: tuple[str, ...] = ()

    def tags(
        self,
        tools: Sequence[tuple[str, Tag]],
        *,
        forced: bool,
        at_most: int | None,
        instead: Tag | None = None,
        special_tokens: tuple[str, ...] = (),
    ) -> Tags:
        """Calls of these tools, each with its name and a tag of its arguments, whose begin and end are filled in here.

        special_tokens  of the vocabulary, if they may stand in calls
        """
        return Tags(
            tags=tuple(
                msgspec.structs.replace(arguments, begin=self.begin.replace("{name}", name), end=self.end)
                for name, arguments in tools
            ),
            forced=forced or instead is not None,
            trigger=self.trigger,
            opening=self.opening,
            separator=self.separator,
            closing=self.closing,
            at_most=at_most,
            instead=instead,
            special_tokens=special_tokens,
            free_tokens=tuple(token for token in self.free_tokens if token in special_tokens),
        )

    def write(self, calls: Sequence[tuple[str, str]]) -> str:
        """Calls, each with its name and its arguments as JSON text."""
        texts = (self.begin.replace("{name}", name) + arguments + self.end for name, arguments in calls)
        return self.opening + self.separator.join(texts) + self.closing


class Malformed(Exception):
    """This is no call."""


class Ended(Malformed):
    """The text ended in the middle of what might have been one."""


class ToolParser(ABC):
    """Reads the text of one choice.

    name     as --tool-call-parser calls it
    aliases  as other servers call it
    hints    a chat template that has one of these in its source teaches this dialect; "a … b": that has both
    form     how a grammar makes a model write calls; None: it can't, since their arguments aren't JSON.
             Where calls must be written, they are then written (and read) as generic JSON
    markers  texts that the parser looks for, and that are special tokens in some vocabularies: they must be shown to it even if
             special tokens are hidden, and a grammar writes them as those tokens
    """

    name: ClassVar[str]
    aliases: ClassVar[tuple[str, ...]] = ()
    hints: ClassVar[tuple[str, ...]] = ()
    form: ClassVar[CallForm | None] = None
    markers: ClassVar[tuple[str, ...]] = ()

    def __init__(self, names: ToolNames = ToolNames()) -> None:  # noqa: B008 (immutable)
        self.names = names
        self.num_calls = 0
        self.ids: set[str] = set()  # of the calls
        self._text = ""
        self._at = 0  # everything before is read
        self._held: int | None = None  # from here on the text may be a call, or else content
        self._is_over = False
        self._is_cut = False
        self._ended_at: int | None = None  # the text ended where something that might have come there had only begun
        self._blanks = ""  # read, but held back until it is known whether text follows
        self._steps = self._all()

    @classmethod
    def fitting(cls, template: str) -> type["ToolParser"]:
        """The version of this dialect that a template teaches, for who has named only the dialect."""
        return cls

    def push(self, text: str) -> list[Event]:
        """More text; what it adds."""
        read = self._at if self._held is None else self._held
        self._text = self._text[read:] + text
        self._at -= read
        self._held = None if self._held is None else 0
        return self._advance()

    def finish(self, *, is_cut: bool = False) -> list[Event]:
        """No more text comes: what was held back. If the text was cut off, the beginning of a call at its end is dropped."""
        self._is_over, self._is_cut = True, is_cut
        return self._advance()

    def new_id(self) -> str:
        """An id for a call, as the clients of this dialect expect it."""
        return "call_" + random_id(24)

    @abstractmethod
    def read(self) -> Steps[None]:
        """Read the text to its end."""

    # ---------------------------------------------------------------- what dialects are written with

    def content_until(self, *markers: str) -> Steps[bool]:
        """Hand on text up to the first of the markers, and read that. False: the text ended without.

        From the marker on, the text is held back, until a call starts or it is given up.
        """
        assert self._held is None
        while True:
            if markers and (found := first_of(markers).search(self._text, self._at)):
                yield from self._say(self._text[self._at : found.start()])
                self._held, self._at = found.span()
                return True
            # After a call, the beginning of a marker where the text was cut off is the beginning of another.
            is_certain = self._is_over and not (self._is_cut and self.num_calls)
            certain = len(self._text) if is_certain else self._certain(markers)
            yield from self._say(self._text[self._at : certain])
            self._at = certain
            if self._is_over:
                return False
            yield None

    def hold(self, literal: str) -> Steps[bool]:
        """Read the literal if the text, from here on, begins with it. As with a marker, what follows is held back then."""
        if not (yield from self.begins_with(literal)):
            return False
        self._held = self._at - len(literal)
        return True

    def unread(self) -> None:
        """Go back to where the text is held back from."""
        assert self._held is not None
        self._at = self._held

    def put_back(self) -> None:
        """What was read since the text is held back is no part of a call, unless the text was cut off there: then drop it."""
        if self._is_cut and self._at in (len(self._text), self._ended_at):
            self._at = len(self._text)
        else:
            self.unread()

    def drop(self) -> None:
        """What was held back and is read is neither a call nor content."""
        self._held = None

    def hold_from_here(self) -> None:
        """What was read is a part of calls; what comes now may be none."""
        self._held = self._at

    def attempt(self, call: Steps[None]) -> Steps[None]:
        """Read a call. If it is none, the text from the marker on becomes content, as far as it was read."""
        try:
            yield from call
        except Malformed as problem:
            held, self._held = self._held, None
            if self._is_cut and (isinstance(problem, Ended) or self._at == self._ended_at):
                self._at = len(self._text)
            elif held is not None:
                yield from self._say(self._text[held : self._at])
        self._held = None

    def peek(self) -> Steps[str]:
        """The next character; "" at the end of the text."""
        while self._at == len(self._text) and not self._is_over:
            yield None
        return self._text[self._at : self._at + 1]

    def skip_blanks(self) -> Steps[None]:
        """Read over white space."""
        while (character := (yield from self.peek())) and character.isspace():
            self._at += 1

    def begins_with(self, literal: str) -> Steps[bool]:
        """Read the literal if it comes next. Waits only as long as it may."""
        while True:
            if self._text.startswith(literal, self._at):
                self._at += len(literal)
                return True
            if not literal.startswith(self._text[self._at : self._at + len(literal)]):
                return False
            if self._is_over:
                self._ended_at = self._at
                return False
            yield None

    def expect(self, literal: str) -> Steps[None]:
        """Read the literal. Raises Malformed if anything else comes."""
        if not (yield from self.begins_with(literal)):
            raise Ended if self._is_rest_of(literal) else Malformed

    def read_over(self, literal: str) -> Steps[bool]:
        """Read the literal if it comes next, or as much of it as there is before a text was cut off."""
        if (yield from self.begins_with(literal)):
            return True
        is_cut_off = self._is_cut and self._is_rest_of(literal)
        if is_cut_off:
            self._at = len(self._text)
        return is_cut_off

    def word(self, ends: str, *, most: int = MAX_NAME_CHARACTERS) -> Steps[str]:
        """The text before the first of these characters, or up to the end. Raises Malformed if it is longer than `most`."""
        characters: list[str] = []
        while (character := (yield from self.peek())) and character not in ends:
            characters.append(character)
            self._at += 1
            if len(characters) > most:
                raise Malformed
        return "".join(characters)

    def until(self, literal: str, *, most: int = MAX_NAME_CHARACTERS) -> Steps[str]:
        """The text before the literal, which is read too. Raises Malformed if it doesn't come within `most` characters."""
        longest = most + len(literal)
        while (found := self._text.find(literal, self._at, self._at + longest)) < 0:
            if len(self._text) - self._at >= longest:
                raise Malformed
            if self._is_over:
                raise Ended
            yield None
        before, self._at = self._text[self._at : found], found + len(literal)
        return before

    def start_call(self, name: str, call_id: str = "") -> Steps[None]:
        """It is a call: nothing of it is content any more. Raises Malformed for a name that no function can have.

        call_id  that the model gave it; "": a new one
        """
        if not name or len(name) > MAX_NAME_CHARACTERS or (self.names.is_exclusive and name not in self.names.known):
            raise Malformed
        self._held = None
        self.num_calls += 1
        call_id = call_id or self.new_id()
        self.ids.add(call_id)
        yield CallStart(self.num_calls - 1, call_id, name)

    def start_cut_call(self, name: str, call_id: str = "", *, arguments: str = "") -> Steps[None]:
        """The text has ended behind the name. If it was cut off there, and the function is known, it is a call, with the arguments
        that there are: the model did not choose to write no more."""
        if self._is_cut and name in self.names.known:
            yield from self.start_call(name, call_id)
            yield from self.add_arguments(arguments)

    def add_arguments(self, fragment: str) -> Steps[None]:
        """Go on with the arguments of the last call."""
        if fragment:
            yield Arguments(self.num_calls - 1, fragment)

    def end_call(self) -> Steps[None]:
        """The last call is complete. From here on the text is held back again, until what closes the call is read."""
        self.hold_from_here()
        yield CallEnd(self.num_calls - 1)

    def call_of(self, name: str, call_id: str = "") -> Steps[None]:
        """A whole call, whose arguments are the JSON object that comes next. Raises Malformed if none does."""
        yield from self.skip_blanks()
        if (begins := (yield from self.peek())) != "{":
            if not begins:
                yield from self.start_cut_call(name.strip(), call_id)
            yield from self.expect("{")
        yield from self.start_call(name.strip(), call_id)
        yield from self.arguments()
        yield from self.end_call()

    def section(self, call: Callable[[], Steps[None]], *, begin: str, end: str, closing: str) -> Steps[None]:
        """Calls up to `closing`, each between `begin` and `end`; what opens the section was read. `call` reads what is between.

        Raises Malformed if anything else than a call or `closing` comes first.
        """
        yield from self.skip_blanks()
        if not (yield from self.begins_with(begin)):
            yield from self.expect(closing)
            return
        while True:
            yield from call()
            yield from self.skip_blanks()
            if (yield from self.read_over(end)):
                self.hold_from_here()
            yield from self.skip_blanks()
            if not (yield from self.begins_with(begin)):
                break
        if not (yield from self.read_over(closing)):
            self.put_back()

    def arguments(self) -> Steps[None]:
        """Hand on a JSON value as the arguments of the last call, as it comes. Raises Malformed if the text ends within.

        What follows it is held back again.
        """
        value = JsonValue()
        while not value.is_over:
            yield from self.add_arguments((yield from self._more_of(value)))
        self.hold_from_here()

    def json_value(self) -> Steps[str]:
        """The text of a JSON value. Raises Malformed if the text ends within, or no value begins here."""
        value, pieces = JsonValue(), []
        while not value.is_over:
            pieces.append((yield from self._more_of(value)))
        if not any(pieces):
            raise Malformed
        return "".join(pieces)

    # ---------------------------------------------------------------- the machinery

    def _more_of(self, value: JsonValue) -> Steps[str]:
        """What comes next of a value; "" if that is its end. Raises Ended."""
        while True:
            end = value.advance(self._text, self._at)
            piece, self._at = self._text[self._at : end], end
            if piece or value.is_over:
                return piece
            if self._is_over:
                raise Ended
            yield None

    def _is_rest_of(self, literal: str) -> bool:
        """Whether all text that is left, and there comes no more, is the beginning of the literal."""
        return self._is_over and literal.startswith(self._text[self._at : self._at + len(literal) + 1])

    def _advance(self) -> list[Event]:
        events: list[Event] = []
        for event in self._steps:
            if event is None:
                break
            events.append(event)
        return events

    def _all(self) -> Steps[None]:
        yield from self.read()
        if self._blanks and not self.num_calls:
            yield Content(self._blanks)

    def _say(self, text: str) -> Steps[None]:
        text = self._blanks + text
        end = len(text.rstrip())
        self._blanks = text[end:]
        if end:
            yield Content(text[:end])

    def _certain(self, markers: Sequence[str]) -> int:
        """Up to where the text cannot be the beginning of a marker."""
        return len(self._text) - overlap(self._text, markers, self._at)


_ALPHANUMERICS = string.ascii_letters + string.digits


def random_id(length: int) -> str:
    """Letters and digits."""
    return "".join(secrets.choice(_ALPHANUMERICS) for _ in range(length))
