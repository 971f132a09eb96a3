"""Whether a regular expression means the same to a matcher that prefers: the first way to match, written first, wins.

    is_whole("a|ab")      False: behind `a` the second alternative is given up
    is_whole("ab|a")      True
    is_whole("[a-z]+")    True: going on is preferred

Rust's automata, and so outlines-core's, prefer like Perl does, even where the whole text is wanted. Ways to go on that
come after the first way to end are never tried. Here they are looked for (Cox, "Regular Expression Matching: the
Virtual Machine Approach", 2009: threads in order of preference, cut at the first that matches).
The library (0.2.14) also loses what comes between two places where a text may end, such as the point of 1.5: a match is
reported one byte late, and it takes that for the end. Such trees are not whole either.
"""

from collections.abc import Iterator
from functools import lru_cache

from trunkline.grammar.regex import ast
from trunkline.grammar.regex.ast import Node
from trunkline.grammar.regex.automaton import BudgetExceeded
from trunkline.grammar.regex.characters import Ranges, contains

Way = tuple[Ranges, Node] | None  # a character, and what follows it; None: the text ends
MOST_STATES = 2_000
MOST_WORK = 200_000


def is_whole(tree: Node) -> bool:
    """Whether nothing that a tree without anchors matches is given up. Raises BudgetExceeded if that takes too many
    states."""
    machine = _Threads(tree, anywhere=False)
    machine.walk()
    return not machine.gave_up


def check_anywhere(tree: Node) -> None:
    """Raises BudgetExceeded if the automaton that looks for a tree anywhere in a text is large: a[ab]{20} needs 2**20
    states.

    The library makes that one as well.
    """
    _Threads(tree, anywhere=True).walk()


class _Threads:
    """States are threads in order of preference; with `anywhere`, one more begins at each character until one has
    matched."""

    def __init__(self, tree: Node, *, anywhere: bool) -> None:
        self._tree = tree
        self._anywhere = anywhere
        self.gave_up = False

    def walk(self) -> None:
        """Come to all states."""
        start: tuple[tuple[Node, ...], bool] = ((self._tree,), self._anywhere)
        seen = {start}
        waiting = [start]
        work = 0
        for threads, begins in waiting:  # grows meanwhile
            ways = list(dict.fromkeys(way for thread in threads for way in _ways(thread)))
            may_end = None in ways
            if may_end:
                end = ways.index(None)
                self.gave_up = self.gave_up or end + 1 < len(ways)
                ways, begins = ways[:end], False
            steps = [way for way in ways if way is not None]
            places = {place for ranges, _ in steps for first, last in ranges for place in (first, last + 1)}
            for code in sorted(places | {0x80}):
                rests = [rest for ranges, rest in steps if contains(ranges, code)]
                after = tuple(dict.fromkeys([*rests, self._tree] if begins else rests)), begins
                work += 1 + len(steps)
                if may_end and rests and (code > 0x7F or not any(rest.is_nullable for rest in rests)):
                    self.gave_up = True
                if after[0] and after not in seen:
                    seen.add(after)
                    waiting.append(after)
            if len(seen) > MOST_STATES or work > MOST_WORK:
                raise BudgetExceeded


@lru_cache(maxsize=4096)
def _ways(node: Node) -> tuple[Way, ...]:
    """All ways to begin, the preferred one first, without repetitions."""
    return tuple(dict.fromkeys(_begin(node)))


def _begin(node: Node) -> Iterator[Way]:
    match node:
        case ast.Chars(ranges):
            if ranges:
                yield ranges, ast.EMPTY
        case ast.Union(options):
            for option in options:
                yield from _ways(option)
        case ast.Concat(parts):
            if not parts:
                yield None
                return
            rest = ast.concat(parts[1:])
            for way in _ways(parts[0]):
                if way is None:
                    yield from _ways(rest)
                else:
                    yield way[0], ast.concat((way[1], rest))
        case ast.Repeat(body, least, most):
            fewer = ast.repeat(body, max(0, least - 1), None if most is None else most - 1)
            for way in _ways(body):
                if way is not None:
                    yield way[0], ast.concat((way[1], fewer))
            if least == 0 or body.is_nullable:
                yield None
        case _:
            raise ValueError("only trees without anchors and lookarounds can be asked about")
