"""Tool calls as rules of a Lark grammar: literal texts around JSON, alone or amid free text.

    forced    opening tag (separator tag)* closing
    free      TEXT, or: text up to the trigger, the rest of opening and tag, …, closing, and free text again

A special token within a literal is one character here that no text can hold, half of a surrogate pair. As a trigger it ends free
text by itself, which no terminal can hold one in; where free text may hold some, it goes on behind each.

Literals that may come at one place are written as a tree of common beginnings (`either`), since the library would follow the
longest one and never come back. Free text up to the trigger is a lazy terminal: it ends with the first trigger. Free text at the
end must not hold a trigger; where another tag may follow a tag without closing, free text must not begin as that would.
"""

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from trunkline.constraint import Tag, Tags
from trunkline.grammar.backends.llguidance.lark import EMPTY, LarkWriter, quote
from trunkline.grammar.interface import Unsupported
from trunkline.grammar.regex import ast, pattern

ANY_TEXT = "(?s:.*)"
JSON_BEGINS = frozenset('{["-0123456789tfn \t\r\n')
MOST_UNROLLED = 2_000  # tags times how often there may be one


class Way(NamedTuple):
    """A literal, and what follows it, as it stands in a rule; "": nothing."""

    literal: str
    then: str


class Marks:
    """Special tokens within literals: each is one character, in place of its text."""

    def __init__(self, lark: LarkWriter, texts: Sequence[str]) -> None:
        self._lark = lark
        self._texts = [text for text in dict.fromkeys(texts) if text]
        longest_first = sorted(self._texts, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def read(self, text: str) -> str:
        """A text with its special tokens as characters. Raises Unsupported for one that is no Unicode."""
        if _MARK.search(text):
            raise Unsupported("", "tags", f"{text[:40]!r} holds half of a surrogate pair")
        return self._pattern.sub(lambda found: chr(_FIRST_MARK + self._texts.index(found[0])), text)

    def read_tag(self, tag: Tag) -> Tag:
        """The same for the literals of a tag."""
        return msgspec.structs.replace(tag, begin=self.read(tag.begin), end=self.read(tag.end))

    def quote(self, literal: str) -> str:
        """A literal that was read, as it stands in a rule."""
        parts = [part for part in _MARK.split(literal) if part]
        return " ".join(self._rule(part) if _MARK.match(part) else quote(part) for part in parts) or EMPTY

    def rules(self, texts: Sequence[str]) -> list[str]:
        """The rules of these special tokens."""
        return [self._lark.special(text) for text in dict.fromkeys(texts)]

    def _rule(self, mark: str) -> str:
        return self._lark.special(self._texts[ord(mark) - _FIRST_MARK])


_FIRST_MARK = 0xD800
_MARK = re.compile("([\ud800-\udfff])")


def before_mark(literal: str) -> str:
    """Of a literal that was read, what comes before its first special token."""
    return _MARK.split(literal, maxsplit=1)[0]


def either(ways: Sequence[Way], quote: Callable[[str], str] = quote) -> str:
    """One of these, as it stands in a rule. Literals with a common beginning share it; `quote` spells them."""
    alternatives = []
    for group in _by_first_character(ways):
        shared = _common_beginning(group)
        rest = [Way(way.literal[len(shared) :], way.then) for way in group]
        if not shared:
            alternatives += [way.then or EMPTY for way in rest]
        elif len(rest) == 1:
            alternatives.append(f"{quote(shared)} {rest[0].then}".rstrip())
        else:
            alternatives.append(f"{quote(shared)} {either(rest, quote)}")
    text = " | ".join(dict.fromkeys(alternatives))
    return f"({text})" if len(alternatives) > 1 else text


def _by_first_character(ways: Sequence[Way]) -> list[list[Way]]:
    firsts = dict.fromkeys(way.literal[:1] for way in ways)
    return [[way for way in ways if way.literal[:1] == first] for first in firsts]


def _common_beginning(ways: Sequence[Way]) -> str:
    texts = [way.literal for way in ways]
    shortest = min(texts, key=len)
    length = next((at for at, character in enumerate(shortest) if any(text[at] != character for text in texts)), None)
    return shortest[:length]


class TagWriter:
    """Writes the rules for tags whose JSON is given as rules: one for each tag, and the last for `instead`, if there is one.

    Raises Unsupported.
    """

    def __init__(self, lark: LarkWriter, tags: Tags, bodies: Sequence[str]) -> None:
        self._lark, self._bodies = lark, bodies[: len(tags.tags)]
        self._marks = marks = Marks(lark, tags.special_tokens)
        self._tags = tags = msgspec.structs.replace(
            tags,
            tags=tuple(map(marks.read_tag, tags.tags)),
            **{name: marks.read(getattr(tags, name)) for name in ("trigger", "opening", "separator", "closing")},
        )
        self._instead = bodies[-1] if tags.instead is not None else None
        if tags.at_most is not None and tags.at_most * len(bodies) > MOST_UNROLLED:
            raise Unsupported("", "at_most", f"{tags.at_most} times {len(bodies)} tags are more than {MOST_UNROLLED}")
        self._at = self._find_trigger()
        if tags.instead is not None and any(start[:1] in JSON_BEGINS for start in self._starts()):
            raise Unsupported("", "instead", "a call would begin as JSON does")  # and be taken for one, see `either`
        self._after: dict[int, str] = {}
        self._free: dict[int, str] = {}

    def start(self) -> str:
        """What the text is, as it stands in a rule."""
        if not self._tags.forced:
            return self._free_text(0)
        if self._tags.at_most == 0:
            raise Unsupported("", "at_most", "a call is forced, and none is allowed")
        calls = self._either(self._calls(self._starts(), 0))
        return calls if self._instead is None else f"{calls} | {self._instead}"

    def _find_trigger(self) -> int:
        """Where it stands in the beginning of every call."""
        tags, starts = self._tags, self._starts()
        if tags.forced or not starts:
            return 0
        at = starts[0].find(tags.trigger)
        before = starts[0][: max(at, 0)] + tags.trigger
        if not tags.trigger or at < 0 or not all(start.startswith(before) for start in starts):
            raise Unsupported("", "trigger", f"{tags.trigger!r} is in the beginning of not every call")
        if not _MARK.fullmatch(tags.trigger) and before_mark(tags.trigger) != tags.trigger:
            raise Unsupported("", "trigger", "it must be one special token, or text")
        free = [self._marks.read(token) for token in tags.free_tokens]
        if any(_MARK.match(character) and character not in free for character in starts[0][:at]):
            raise Unsupported("", "trigger", "before it stands a special token that free text may not hold")
        return at

    def _either(self, ways: Sequence[Way]) -> str:
        return either(ways, self._marks.quote)

    def _starts(self) -> list[str]:
        return [self._tags.opening + tag.begin for tag in self._tags.tags]

    def _calls(self, literals: Sequence[str], count: int) -> list[Way]:
        """A tag of each kind, begun by these literals, and what follows it; `count` tags came before."""
        after = self._following(count + 1)
        return [
            Way(literal, f"{body} {self._marks.quote(tag.end)} {after}")
            for literal, body, tag in zip(literals, self._bodies, self._tags.tags, strict=True)
        ]

    def _following(self, count: int) -> str:
        """The rule for what follows a tag, when there were `count`."""
        return self._once(self._after, count, self._after_tag)

    def _once(self, known: dict[int, str], count: int, write: Callable[[int], str]) -> str:
        key = 0 if self._tags.at_most is None else count
        if key not in known:
            known[key] = self._lark.fresh()
            self._lark.rule(known[key], [write(count)])
        return known[key]

    def _more(self, count: int) -> list[str]:
        """How another tag begins right behind a tag; amid free text without brackets that is free text's affair."""
        tags = self._tags
        if (tags.at_most is not None and count >= tags.at_most) or not (tags.forced or tags.opening or tags.closing):
            return []
        return [tags.separator + tag.begin for tag in tags.tags]

    def _after_tag(self, count: int) -> str:
        more = self._more(count)
        calls = self._calls(more, count) if more else []
        begin = [] if self._tags.closing else [_common_beginning(group) for group in _by_first_character(calls)]
        then = "" if self._tags.forced else self._free_text(count, begin)
        return self._either([*calls, Way(self._tags.closing, then)])

    def _free_text(self, count: int, not_first: Sequence[str] = ()) -> str:
        """Free text, and calls in it; it begins with none of `not_first`."""
        if not not_first:
            return self._once(self._free, count, self._free_rule)
        return self._free_rule(count, not_first)

    def _free_rule(self, count: int, not_first: Sequence[str] = ()) -> str:
        trigger = self._tags.trigger
        is_last = self._tags.at_most is not None and count >= self._tags.at_most
        not_first = [text for text in map(before_mark, not_first) if text]
        excluded = [f"(?:{'|'.join(map(_expression, not_first))}){ANY_TEXT}"] if not_first else []
        if _MARK.match(trigger):
            text = self._lark.terminal([ANY_TEXT], excluding=excluded)
            head = f"{text} {self._marks.quote(trigger)}"
        else:
            none = f"{ANY_TEXT}{_expression(trigger)}{ANY_TEXT}"
            text = self._lark.terminal([ANY_TEXT], excluding=[none, *excluded])
            head = self._lark.fresh()
            if not is_last:
                self._lark.rule(
                    f"{head}[lazy]", [self._lark.terminal([f"{ANY_TEXT}{_expression(trigger)}"], excluding=excluded)]
                )
        ways = [text]
        if marks := self._marks.rules(self._tags.free_tokens):
            ways.append(f"{text} ({' | '.join(marks)}) {self._free_text(count)}")
        if not is_last:
            rest = [start[self._at + len(trigger) :] for start in self._starts()]
            ways.append(f"{head} {self._either(self._calls(rest, count))}")
        return f"({' | '.join(ways)})" if len(ways) > 1 else text


def _expression(literal: str) -> str:
    return pattern.write(ast.literal(literal), "rust")
