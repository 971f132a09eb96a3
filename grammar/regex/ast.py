"""Regular expressions as trees: the nodes, and what can be said of them without running them.

    ^a{2,}(b|$)   ──►  Concat(START, Repeat(Chars a, 2, None), Union(Chars b, END))

`pattern` makes trees of text, and text of trees. `whole` gives the language of all texts in which an expression is found, so
without anchors; `json_form` the same texts as they stand inside a JSON string. Both are what backends can be given.

Nodes are immutable and hashable.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter

from trunkline.grammar.regex import characters
from trunkline.grammar.regex.characters import Ranges

_SIZE, _IS_NULLABLE, _HASH = attrgetter("size"), attrgetter("is_nullable"), attrgetter("_hash")
_HAS_ANCHOR, _HAS_LOOK = attrgetter("has_anchor"), attrgetter("has_look")


class _Measured:
    """What is asked of nodes all the time, worked out once.

    size         characters of it, with repeats written out: states of a nondeterministic automaton
    is_nullable  it matches the empty text; an anchor or a lookaround: as if it held
    has_anchor   `^` or `$` is in it, other than in a lookaround
    has_look     a lookaround is in it
    """

    __slots__ = ("_hash", "has_anchor", "has_look", "is_nullable", "size")

    size: int
    is_nullable: bool
    has_anchor: bool
    has_look: bool
    _hash: int

    def _measure(
        self, size: int, is_nullable: bool, *inside: "Node", has_anchor: bool = False, has_look: bool = False
    ) -> None:
        put = object.__setattr__
        put(self, "size", size)
        put(self, "is_nullable", is_nullable)
        put(self, "has_anchor", has_anchor or any(map(_HAS_ANCHOR, inside)))
        put(self, "has_look", has_look or any(map(_HAS_LOOK, inside)))

    def _hash_of(self, *values: object) -> None:
        object.__setattr__(self, "_hash", hash((type(self), *values)))

    def __hash__(self) -> int:
        return self._hash


@dataclass(frozen=True, slots=True)
class Chars(_Measured):
    """One character of a set. With no ranges: nothing at all matches."""

    ranges: Ranges

    def __post_init__(self) -> None:
        self._measure(1, False)
        self._hash_of(self.ranges)

    __hash__ = _Measured.__hash__


@dataclass(frozen=True, slots=True)
class Concat(_Measured):
    """One after the other. Without parts: the empty text."""

    parts: tuple["Node", ...]

    def __post_init__(self) -> None:
        parts = self.parts
        self._measure(sum(map(_SIZE, parts)), all(map(_IS_NULLABLE, parts)), *parts)
        self._hash_of(*map(_HASH, parts))

    __hash__ = _Measured.__hash__


@dataclass(frozen=True, slots=True)
class Union(_Measured):
    """Any of at least two."""

    options: tuple["Node", ...]

    def __post_init__(self) -> None:
        options = self.options
        self._measure(sum(option.size for option in options), any(option.is_nullable for option in options), *options)
        self._hash_of(options)

    __hash__ = _Measured.__hash__


@dataclass(frozen=True, slots=True)
class Repeat(_Measured):
    """`body`, at least `least` and at most `most` times (None: any number)."""

    body: "Node"
    least: int
    most: int | None

    def __post_init__(self) -> None:
        size = self.body.size * max(1, self.least, self.most or 0)
        self._measure(size, self.least == 0 or self.body.is_nullable, self.body)
        self._hash_of(self.body, self.least, self.most)

    __hash__ = _Measured.__hash__


@dataclass(frozen=True, slots=True)
class Anchor(_Measured):
    """The place before the first character of the text, or behind the last."""

    at_start: bool

    def __post_init__(self) -> None:
        self._measure(0, True, has_anchor=True)
        self._hash_of(self.at_start)

    __hash__ = _Measured.__hash__


@dataclass(frozen=True, slots=True)
class Look(_Measured):
    """A place from which `body` is found going on (ahead) or coming up to it (behind), or isn't (negative).

    Only `lookaround` deals with it: no tree that pattern.parse gives holds one.
    """

    body: "Node"
    ahead: bool
    negative: bool

    def __post_init__(self) -> None:
        self._measure(self.body.size, True, has_look=True)
        self._hash_of(self.body, self.ahead, self.negative)

    __hash__ = _Measured.__hash__


Node = Chars | Concat | Union | Repeat | Anchor | Look

EMPTY = Concat(())
NOTHING = Chars(characters.NONE)
ANY_CHAR = Chars(characters.ALL)
ANY_TEXT = Repeat(ANY_CHAR, 0, None)
START = Anchor(True)
END = Anchor(False)

LARGEST_SIZE = 1_000_000  # of all ways in which a tree may use its anchors
MOST_UNROLLED = 3  # copies of a repeated tree that has anchors


class TooComplex(ValueError):
    """The anchors of an expression cannot be resolved; the message says why, in half a sentence."""


def char(character: str) -> Chars:
    """That character."""
    return Chars(((ord(character), ord(character)),))


def literal(text: str) -> Node:
    """That text."""
    return concat(char(character) for character in text)


def concat(parts: Iterable[Node]) -> Node:
    """Flattened; NOTHING if one part is."""
    flat: list[Node] = []
    for part in parts:
        if isinstance(part, Concat):
            flat += part.parts
        elif part == NOTHING:
            return NOTHING
        else:
            flat.append(part)
    return flat[0] if len(flat) == 1 else Concat(tuple(flat))


def union(options: Iterable[Node]) -> Node:
    """Flattened, without duplicates, in order; single characters become one set at the place of the first."""
    flat: list[Node] = []
    ranges: list[Ranges] = []
    at = -1
    for option in options:
        for one in option.options if isinstance(option, Union) else (option,):
            if isinstance(one, Chars):
                if at < 0:
                    at = len(flat)
                    flat.append(one)
                ranges.append(one.ranges)
            else:
                flat.append(one)
    if ranges:
        flat[at] = Chars(characters.union(*ranges) if len(ranges) > 1 else ranges[0])
    flat = [option for option in dict.fromkeys(flat) if option != NOTHING]
    if not flat:
        return NOTHING
    return flat[0] if len(flat) == 1 else Union(tuple(flat))


def repeat(body: Node, least: int, most: int | None) -> Node:
    """`body{least,most}`, simplified where that is plain."""
    if most == 0 or body == EMPTY:
        return EMPTY
    if body == NOTHING:
        return NOTHING if least else EMPTY
    if (least, most) == (1, 1):
        return body
    if isinstance(body, Repeat) and body.least <= 1 and body.most is None and least <= 1:  # (x*)*, (x+)?, (x*)+
        return Repeat(body.body, min(least, body.least), None)
    return Repeat(body, least, most)


def optional(body: Node) -> Node:
    """`body?`"""
    return repeat(body, 0, 1)


def lengths(node: Node) -> tuple[int, int | None]:
    """The least and the most characters that a match has; None: any number. Anchors and lookarounds have none."""
    match node:
        case Chars():
            return 1, 1
        case Concat(parts):
            pairs = [lengths(part) for part in parts]
            most = [pair[1] for pair in pairs]
            return sum(pair[0] for pair in pairs), None if None in most else sum(m for m in most if m is not None)
        case Union(options):
            pairs = [lengths(option) for option in options]
            most = [pair[1] for pair in pairs]
            return min(pair[0] for pair in pairs), None if None in most else max(m for m in most if m is not None)
        case Repeat(body, least, times):
            shortest, longest = lengths(body)
            if longest == 0:
                return 0, 0
            return shortest * least, None if times is None or longest is None else longest * times
        case Anchor() | Look():
            return 0, 0


@dataclass(frozen=True, slots=True)
class Piece:
    """A way to use a tree: `body`, free of anchors; nothing may stand before it (`first`), or behind it (`last`)."""

    first: bool
    body: Node
    last: bool

    def then(self, other: "Piece") -> "Piece | None":
        """Both, one after the other; None if they can't be."""
        left, right = self.body, other.body
        if (other.first and left.has_look) or (self.last and right.has_look):
            raise TooComplex("a lookaround beside an anchor cannot be resolved")
        if other.first:
            if not left.is_nullable:
                return None
            left = EMPTY
        if self.last:
            if not right.is_nullable:
                return None
            right = EMPTY
        return Piece(self.first or other.first, concat((left, right)), self.last or other.last)


def pieces(node: Node) -> list[Piece]:
    """All ways to use a tree, one of each kind. Raises TooComplex."""
    if not node.has_anchor:
        return [Piece(False, node, False)]
    match node:
        case Anchor(at_start):
            return [Piece(at_start, EMPTY, not at_start)]
        case Union(options):
            return _joined([piece for option in options for piece in pieces(option)])
        case Concat(parts):
            ways = [Piece(False, EMPTY, False)]
            for run in _runs(parts):
                after = pieces(run)
                ways = _joined([both for way in ways for piece in after if (both := way.then(piece)) is not None])
            return ways
        case Repeat(body, least, most):
            return _joined(_repeated(body, least, most))
        case _:
            raise AssertionError(node)


def _runs(parts: tuple[Node, ...]) -> Iterable[Node]:
    """Neighbours without anchors as one."""
    free: list[Node] = []
    for part in parts:
        if part.has_anchor:
            if free:
                yield concat(free)
                free = []
            yield part
        else:
            free.append(part)
    if free:
        yield concat(free)


def _repeated(body: Node, least: int, most: int | None) -> list[Piece]:
    if least > MOST_UNROLLED:
        raise TooComplex("an anchor inside of something repeated cannot be resolved")
    if least > 1:  # x{2,} is x x{1,}
        return pieces(Concat((body, Repeat(body, least - 1, None if most is None else most - 1))))
    ways = pieces(body)
    free = union(piece.body for piece in ways if not piece.first and not piece.last)
    found = [Piece(False, repeat(free, least, most), False)] if free != NOTHING or least == 0 else []
    one_less = repeat(free, 0, None if most is None else max(0, most - 1))
    two_less = repeat(free, 0, None if most is None else max(0, most - 2))
    # An anchored copy stands first or last: copies before `^`, or behind `$`, are empty and can be left out.
    for piece in ways:
        if piece.first and piece.last:
            found.append(piece)
        elif piece.first:
            found.append(Piece(True, concat((piece.body, one_less)), False))
            if most is None or most > 1:
                found += [
                    Piece(True, concat((piece.body, two_less, end.body)), True)
                    for end in ways
                    if end.last and not end.first
                ]
        elif piece.last:
            found.append(Piece(False, concat((one_less, piece.body)), True))
    return found


def _joined(ways: list[Piece]) -> list[Piece]:
    """One piece for each kind."""
    kinds: dict[tuple[bool, bool], list[Node]] = {}
    for way in ways:
        kinds.setdefault((way.first, way.last), []).append(way.body)
    if sum(way.body.size for way in ways) > LARGEST_SIZE:
        raise TooComplex("its anchors can be used in too many ways")
    return [Piece(first, union(bodies), last) for (first, last), bodies in kinds.items()]


def whole(node: Node) -> Node:
    """All texts in which it is found, as a tree without anchors. Raises TooComplex."""
    ways = []
    for piece in pieces(node):
        body = piece.body
        if not piece.first:
            body = _beside_any(body, at_start=True)
        if not piece.last:
            body = _beside_any(body, at_start=False)
        if body == EMPTY and not (piece.first and piece.last):
            return ANY_TEXT
        ways.append(concat((EMPTY if piece.first else ANY_TEXT, body, EMPTY if piece.last else ANY_TEXT)))
    return union(ways)


def _beside_any(node: Node, *, at_start: bool) -> Node:
    """What is left to say of a tree that any text may stand before (behind, if not at its start): that takes in what it can."""
    if node.has_look:
        return node
    if node.is_nullable:
        return EMPTY
    match node:
        case Concat(parts):
            order = parts if at_start else parts[::-1]
            needed = next(at for at, part in enumerate(order) if not part.is_nullable)
            kept = (_beside_any(order[needed], at_start=at_start), *order[needed + 1 :])
            return concat(kept if at_start else kept[::-1])
        case Union(options):
            return union(_beside_any(option, at_start=at_start) for option in options)
        case Repeat(body, least):
            return _beside_any(body, at_start=at_start) if least == 1 else Repeat(body, least, least)
        case _:
            return node


# How json.dumps(…, ensure_ascii=False) writes what it must escape; the other control characters are \u00xx.
SHORT_ESCAPES = {'"': '"', "\\": "\\", "\b": "b", "\t": "t", "\n": "n", "\f": "f", "\r": "r"}
MUST_ESCAPE: Ranges = ((0x00, 0x1F), (0x22, 0x22), (0x5C, 0x5C))


@lru_cache(maxsize=1024)  # a schema asks for a few sets, again and again
def json_chars(ranges: Ranges) -> Node:
    """One character of a set as it stands inside a JSON string: each has exactly one spelling."""
    raw = Chars(characters.difference(ranges, MUST_ESCAPE))
    escaped = characters.intersection(ranges, MUST_ESCAPE)
    codes = [code for first, last in escaped for code in range(first, last + 1)]
    short = "".join(SHORT_ESCAPES[chr(code)] for code in codes if chr(code) in SHORT_ESCAPES)
    long = [f"{code:04x}" for code in codes if chr(code) not in SHORT_ESCAPES]
    ways: list[Node] = []
    if short:
        ways.append(Chars(characters.of(short)))
    for high in ("000", "001"):
        low = "".join(code[3] for code in long if code.startswith(high))
        if low:
            ways.append(concat((literal("u" + high), Chars(characters.of(low)))))
    return union((raw, concat((char("\\"), union(ways)))) if ways else (raw,))


def json_form(node: Node) -> Node:
    """The texts of an anchor-free tree as they stand inside a JSON string, between the quotes."""
    match node:
        case Chars(ranges):
            return json_chars(ranges)
        case Concat(parts):
            return concat(map(json_form, parts))
        case Union(options):
            return union(map(json_form, options))
        case Repeat(body, least, most):
            return repeat(json_form(body), least, most)
        case Anchor() | Look():
            raise ValueError("json_form takes trees without anchors: use whole() first")
