"""What stands between brackets, as rules of a Lark grammar: things in a row with commas between them.

    some_of(lark, ", ", [Part("a", True), Part("b", False)])     a | a ", " b
    counted(lark, …)                                             the same, with a number of them between two bounds
    row(lark, ", ", ["a"], "b", 1, 3)                            a | a ", " b | a ", " b ", " b
    different(lark, …), containing(lark, …)                      rows in which no two are the same; that hold some of a kind

A part is what stands in a rule for it: "T0", "r7", '"x" r8'. Rules are halved again and again rather than chained, since the
library walks down them with its stack; a chain is at most LONGEST_CHAIN rules long. Counts are kept in the parameter that its
rules can have: 64 bits. No rule may lead to a place from which there is no way to the end: so what comes later is known wherever
something is taken. Nothing here knows what the parts mean.
"""

from collections.abc import Sequence
from typing import NamedTuple

from trunkline.grammar.backends.llguidance.lark import EMPTY, LarkWriter, quote

LONGEST_CHAIN = 250  # rules that lead to one another
PARAMETER_BITS = 64


class TooMany(ValueError):
    """There are more than can be counted; the message says of what, in half a sentence."""


class Part(NamedTuple):
    """One thing of a row whose order is fixed."""

    text: str
    required: bool


def some_of(lark: LarkWriter, comma: str, parts: Sequence[Part]) -> str:
    """At least one of the parts, in their order; all that are required. There must be at least one part."""
    if len(parts) == 1:
        return parts[0].text
    half = len(parts) // 2
    left, right = (some_of(lark, comma, side) for side in (parts[:half], parts[half:]))
    left_required, right_required = (any(part.required for part in side) for side in (parts[:half], parts[half:]))
    separator = quote(comma)
    match left_required, right_required:
        case True, True:
            return f"{left} {separator} {right}"
        case True, False:
            return lark.subrule([f"{left} ({separator} {right})?"])
        case False, True:
            return lark.subrule([f"({left} {separator})? {right}"])
    return lark.subrule([f"{left} ({separator} {right})?", right])


def times(part: str, least: int, most: int | None) -> str:
    """The part, repeated."""
    match least, most:
        case _, 0:
            return EMPTY
        case 0, None:
            return f"({part})*"
        case 1, 1:
            return part
        case 0, 1:
            return f"({part})?"
    return f"({part}){{{least},{'' if most is None else most}}}"


def repeated(comma: str, part: str, least: int, most: int | None) -> str:
    """The part at least once, as often as said, with commas; `least` and `most` are positive."""
    return f"{part} {times(f'{quote(comma)} {part}', max(least, 1) - 1, None if most is None else most - 1)}"


class Counter(NamedTuple):
    """A count in the low bits of a rule's parameter, which stops at the largest number these can hold."""

    bits: int

    @classmethod
    def up_to(cls, number: int) -> "Counter":
        """That can tell all numbers up to this one from larger ones. Raises TooMany."""
        bits = max(number.bit_length(), 1)
        if bits > PARAMETER_BITS // 2:
            raise TooMany(f"{number} cannot be counted up to")
        return cls(bits)

    @property
    def one_more(self) -> str:
        """The parameter of the next rule when one is taken."""
        return f"incr([0:{self.bits}])"

    def at_least(self, number: int) -> list[str]:
        """Conditions that the count is at least this; none if it always is."""
        return [f"ge([0:{self.bits}], {number})"] if number > 0 else []

    def less_than(self, number: int | None) -> list[str]:
        """Conditions that the count is less than this; none if there is no such bound."""
        return [] if number is None else [f"lt([0:{self.bits}], {number})"]

    def is_zero(self, yes: bool) -> list[str]:
        """Condition that nothing was taken yet; or that something was."""
        return [f"is_zeros([0:{self.bits}])" if yes else f"ge([0:{self.bits}], 1)"]

    def when(self, conditions: Sequence[str]) -> str:
        """What stands behind an alternative that needs all of these. There is always something: the library puts a rule whose
        only alternative has no condition into the one that uses it, and then trips over its parameter."""
        both, *others = conditions or [f"ge([0:{self.bits}], 0)"]
        for condition in others:
            both = f"and({both}, {condition})"
        return f" %if {both}"


def counted(
    lark: LarkWriter, comma: str, parts: Sequence[Part], extra: str | None, closing: str, least: int, most: int | None
) -> str:
    """Some of the parts, in their order, then any number of `extra`; `least` to `most` of them in all; then `closing`.

    No two parts are the same, but two extras may be: `least` are there without counting more than one of those.
    Raises TooMany.
    """
    if len(parts) > LONGEST_CHAIN:
        raise TooMany(f"{len(parts)} of which some may be missing cannot be counted")
    counter = Counter.up_to(max(least, most or 0))
    names = [lark.fresh() for _ in range(len(parts) + 2)]
    needed_later = [sum(part.required for part in parts[index + 1 :]) for index in range(len(parts))]

    def take(text: str, to: str, conditions: list[str]) -> list[str]:
        return [
            f"{separator} {text} {to}::{counter.one_more}".lstrip()
            + counter.when([*counter.is_zero(is_first), *conditions])
            for separator, is_first in (("", True), (quote(comma), False))
        ]

    for index, part in enumerate(parts):
        most_before = None if most is None else most - needed_later[index]
        left = len(parts) - index - 1 + (extra is not None)
        conditions = counter.less_than(most_before) + counter.at_least(least - 1 - left)
        alternatives = take(part.text, names[index + 1], conditions) if most_before is None or most_before > 0 else []
        if not part.required:
            alternatives.append(f"{names[index + 1]}::_{counter.when([])}")
        lark.rule(f"{names[index]}::_", alternatives)
    only_parts, with_extra = names[-2:]
    after_parts = [quote(closing) + counter.when(counter.at_least(least))]
    if extra is not None:
        after_parts += take(extra, with_extra, counter.less_than(most) + counter.at_least(least - 1))
        another = f"{quote(comma)} {extra} {with_extra}::{counter.one_more}" + counter.when(counter.less_than(most))
        lark.rule(f"{with_extra}::_", [quote(closing) + counter.when([]), another])
    lark.rule(f"{only_parts}::_", after_parts)
    return f"{names[0]}::0"


def row(
    lark: LarkWriter, comma: str, prefix: Sequence[str], rest: str | None, least: int, most: int | None
) -> list[str]:
    """`prefix` one by one, then any number of `rest` (None: nothing); `least` to `most` in all. Alternatives; may be none."""
    alternatives = []
    if least == 0:
        alternatives.append(EMPTY)
    longest = len(prefix) if most is None else min(len(prefix), most)
    first = max(least, 1)
    if first <= longest:
        start = f" {quote(comma)} ".join(prefix[:first])
        more = _beginnings(lark, comma, prefix[first:longest])
        alternatives.append(f"{start} ({quote(comma)} {more})?" if more else start)
    if rest is not None and (most is None or most > len(prefix)):
        after = None if most is None else most - len(prefix)
        if prefix:
            tail = times(f"{quote(comma)} {rest}", max(1, least - len(prefix)), after)
            alternatives.append(f" {quote(comma)} ".join(prefix) + f" {tail}")
        else:
            alternatives.append(repeated(comma, rest, least, after))
    return alternatives


def _beginnings(lark: LarkWriter, comma: str, parts: Sequence[str]) -> str:
    """The first of the parts, or the first two, and so on; "" if there are none."""
    if len(parts) <= 1:
        return "".join(parts)
    half = len(parts) // 2
    all_left = lark.subrule([f" {quote(comma)} ".join(parts[:half])])
    left, right = _beginnings(lark, comma, parts[:half]), _beginnings(lark, comma, parts[half:])
    return lark.subrule([left, f"{all_left} {quote(comma)} {right}"])


def different(lark: LarkWriter, comma: str, parts: Sequence[str], closing: str, least: int, most: int | None) -> str:
    """A row of these parts in any order, none twice, `least` to `most` of them, then `closing`. Raises TooMany.

    The parameter has a bit for each part that was taken. More than 64 parts keep their order, and are not counted.
    """
    size = len(parts)
    most = size if most is None else min(most, size)
    if size > PARAMETER_BITS:
        if least > 1 or most < size:
            raise TooMany(f"of {size} different values at most {PARAMETER_BITS} can be counted")
        some = some_of(lark, comma, [Part(part, False) for part in parts])
        return lark.subrule([f"{some} {quote(closing)}", *([] if least else [quote(closing)])])
    item, after = lark.fresh(), lark.fresh()
    taken = f"[0:{size}]"
    lark.rule(f"{item}::_", [f"{part} {after}::set_bit({bit}) %if bit_clear({bit})" for bit, part in enumerate(parts)])
    lark.rule(
        f"{after}::_",
        [
            f"{quote(closing)} %if bit_count_ge({taken}, {max(least, 1)})",
            f"{quote(comma)} {item}::_ %if bit_count_lt({taken}, {most})",
        ],
    )
    return lark.subrule([f"{item}::0", *([] if least else [quote(closing)])])


class Kind(NamedTuple):
    """A kind of item, and for each thing that is counted, whether such an item is one (0 or 1)."""

    text: str
    counts: tuple[int, ...]


class Count(NamedTuple):
    """At least `least` and at most `most` (None: any number) of something."""

    least: int
    most: int | None


State = tuple[int, ...]  # how many of each counted thing were seen, as far as that matters


class _Plan:
    """Which states items lead to, and from which there is a way to the end.

    to_end   state -> fewest items after which the row may end; states without a way are not in it
    longest  state -> most items that may follow; None: any number
    """

    def __init__(self, kinds: Sequence[Kind], counts: Sequence[Count]) -> None:
        self._kinds, self._counts = kinds, counts
        self._limits = [count.least if count.most is None else count.most for count in counts]
        self.to_end: dict[State, int] = {}
        self.longest: dict[State, int | None] = {}
        self.start: State = (0,) * len(counts)
        # An item leads to the same state, or to one with more: those come first.
        for state in sorted(self._reached(), key=sum, reverse=True):
            self._look_ahead(state)

    def step(self, state: State, kind: Kind) -> State | None:
        """The state after an item; None if it may not come."""
        reached = []
        for number, one, limit, count in zip(state, kind.counts, self._limits, self._counts, strict=True):
            if count.most is not None and number + one > limit:
                return None
            reached.append(min(number + one, limit))
        return tuple(reached)

    def steps(self, state: State) -> list[tuple[Kind, State]]:
        """Items that may come, and where they lead, if there is a way on from there."""
        ways = [(kind, self.step(state, kind)) for kind in self._kinds]
        return [(kind, to) for kind, to in ways if to is not None and to in self.to_end]

    def is_end(self, state: State) -> bool:
        """Whether there are enough of each."""
        return all(number >= count.least for number, count in zip(state, self._counts, strict=True))

    def _reached(self) -> set[State]:
        reached, waiting = {self.start}, [self.start]
        while waiting:
            state = waiting.pop()
            for kind in self._kinds:
                to = self.step(state, kind)
                if to is not None and to not in reached:
                    reached.add(to)
                    waiting.append(to)
            if len(reached) > LONGEST_CHAIN:
                raise TooMany("there are too many items to be counted")
        return reached

    def _look_ahead(self, state: State) -> None:
        others = [to for _, to in self.steps(state)]
        stays = any(self.step(state, kind) == state for kind in self._kinds)
        if self.is_end(state):
            self.to_end[state] = 0
        elif others:
            self.to_end[state] = 1 + min(self.to_end[to] for to in others)
        else:
            return
        lengths = [self.longest[to] for to in others]
        known = [1 + length for length in lengths if length is not None]
        self.longest[state] = None if stays or len(known) < len(lengths) else max(known, default=0)


def containing(
    lark: LarkWriter,
    comma: str,
    kinds: Sequence[Kind],
    counts: Sequence[Count],
    closing: str,
    least: int,
    most: int | None,
) -> str | None:
    """A row of items of these kinds, `least` to `most` in all, that holds as many as `counts` say; then `closing`.

    Each state has a rule for its next item and one for what follows an item; the parameter counts all items, where that
    matters. None if there is no such row. Raises TooMany.
    """
    plan = _Plan(kinds, counts)
    start = plan.start
    if start not in plan.to_end or (most is not None and max(least, plan.to_end[start]) > most):
        return None
    longest = plan.longest[start]
    if longest is not None and longest < least:
        return None
    counter = Counter.up_to(max(least, most or 0)) if most is not None or least > 1 else None
    items, afters = ({state: lark.fresh() for state in plan.to_end} for _ in range(2))
    for state in plan.to_end:
        following = plan.steps(state)
        if counter is None:
            lark.rule(items[state], [f"{kind.text} {afters[to]}" for kind, to in following])
            ends = [quote(closing)] if plan.is_end(state) else []
            lark.rule(afters[state], [*ends, *([f"{quote(comma)} {items[state]}"] if following else [])])
            continue
        alternatives = []
        for kind, to in following:
            longest = plan.longest[to]
            conditions = counter.less_than(None if most is None else most - plan.to_end[to])
            conditions += [] if longest is None else counter.at_least(least - 1 - longest)
            alternatives.append(f"{kind.text} {afters[to]}::{counter.one_more}{counter.when(conditions)}")
        lark.rule(f"{items[state]}::_", alternatives)
        ends = [quote(closing) + counter.when(counter.at_least(least))] if plan.is_end(state) else []
        onward = [f"{quote(comma)} {items[state]}::_{counter.when(counter.less_than(most))}"] if following else []
        lark.rule(f"{afters[state]}::_", [*ends, *onward])
    empty = [quote(closing)] if plan.is_end(start) and not least else []
    if not plan.steps(start):
        return lark.subrule(empty) if empty else None
    return lark.subrule([f"{items[start]}{'::0' if counter else ''}", *empty])
