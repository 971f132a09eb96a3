"""JSON objects in XGrammar's EBNF: a chain of rules over the properties, in their order.

    {"a": required, "b": optional, others}
        first_0   a then_1                          what follows "{"
        then_1    , next_1 | }                      what follows a member
        next_1    b then_2 | next_2                 what follows ","
        next_2    other then_2

A member is written at most once, so that members can be counted; other keys may be written twice, and only the first
one of them is sure to count towards `min_properties`.
"""

import json
from collections.abc import Callable, Sequence
from itertools import combinations

from trunkline.grammar.backends.xgrammar.ebnf import Ebnf, Style, literal
from trunkline.grammar.backends.xgrammar.leaves import QUOTE, Leaves
from trunkline.grammar.interface import Unsupported
from trunkline.grammar.regex import ast, pattern
from trunkline.grammar.regex.ast import Node
from trunkline.grammar.regex.automaton import BudgetExceeded
from trunkline.grammar.schema.forms import ANY, NEVER, Name, Objects

MOST_STATES = 20_000  # places between properties, times what is counted
MOST_OVERLAPPING = 4  # patterns whose combinations are looked at


class ObjectWriter:
    """Writes one object. `value` gives the rule of a definition."""

    def __init__(self, ebnf: Ebnf, leaves: Leaves, value: Callable[[Name], str], style: Style) -> None:
        self._ebnf = ebnf
        self._leaves = leaves
        self._value = value
        self._style = style

    def write(self, form: Objects) -> str:
        """An expression for an object. Raises Unsupported."""
        members = [(key, self._member(key, name)) for key, name in form.properties if name != NEVER]
        others = self._others(form)
        least = form.min_properties if form.min_properties > len(form.required) else 0
        most = form.max_properties
        if (least + 1) * ((most or 0) + 1) * (len(members) + 1) > MOST_STATES:
            keyword = "minProperties" if least else "maxProperties"
            raise Unsupported(
                form.pointer, keyword, f"xgrammar would need more than {MOST_STATES} rules to count that far"
            )
        is_possible = form.required <= {key for key, _ in members}
        chain = _Chain(self._ebnf, members, form.required, others, least, most, self._style.comma)
        start = chain.start() if is_possible else None
        if start is None:
            raise Unsupported(
                form.pointer,
                "minProperties" if least else "required",
                "xgrammar cannot count keys that may be written twice"
                if least and others
                else "no object satisfies it",
            )
        return f'"{{" {start}'

    def _member(self, key: str, name: Name) -> str:
        """A property and its value."""
        return f"{literal(json.dumps(key, ensure_ascii=False))} {self._style.colon} {self._value(name)}"

    def _others(self, form: Objects) -> list[str]:
        """Members with other keys: those of each combination of patterns, and those that match none."""
        known = [ast.union(ast.literal(key) for key, _ in form.properties)] if form.properties else []
        trees = [
            (pattern.whole_tree(source, pointer=form.pointer, keyword="patternProperties"), name)
            for source, name in form.patterns
        ]
        found = []
        left_out = False
        for inside in _combinations(trees):
            names = {trees[index][1] for index in inside} - {ANY} if inside else {form.additional}
            if NEVER in names:
                continue
            outside = [tree for index, (tree, _) in enumerate(trees) if index not in inside]
            try:
                key = self._leaves.key([trees[index][0] for index in inside], [*outside, *known])
            except BudgetExceeded:
                left_out = True
                continue  # such keys are not written: that is narrower
            if key is None:
                continue
            if len(names) > 1:
                raise Unsupported(
                    form.pointer, "patternProperties", "a key may match several patterns, with different schemas"
                )
            value = self._value(names.pop() if names else ANY)
            found.append(self._ebnf.rule(f"{QUOTE} {key} {self._style.colon} {value}"))
        if left_out and not found:
            reason = "which names have which patterns takes too much work to find out"
            raise Unsupported(form.pointer, "patternProperties", reason)
        return found


def _combinations(patterns: Sequence[tuple[Node, Name]]) -> list[tuple[int, ...]]:
    """Which patterns a key may match: none, one, and where they are few any of them."""
    indices = range(len(patterns))
    most = len(patterns) if len(patterns) <= MOST_OVERLAPPING else 1
    return [chosen for size in range(most + 1) for chosen in combinations(indices, size)]


class _Chain:
    """The rules of one object.

    `low` and `high` are how many members there are at least and at most, no further than that matters.
    """

    def __init__(
        self,
        ebnf: Ebnf,
        members: Sequence[tuple[str, str]],
        required: frozenset[str],
        others: Sequence[str],
        least: int,
        most: int | None,
        comma: str,
    ) -> None:
        self._ebnf = ebnf
        self._members = members
        self._required = required
        self._other = ebnf.rule(" | ".join(others)) if others else None
        self._least = least
        self._most = most
        self._comma = comma
        self._loops: dict[tuple[int, int], str | None] = {}

    def start(self) -> str | None:
        """What follows the opening brace; None if nothing can."""
        counts = [
            (low, high) for low in range(self._least + 1) for high in range(1 if self._most is None else self._most + 1)
        ]
        # Each rule names those behind it, so the last ones come first.
        following = {count: self._first_other(*count) for count in counts}
        after = {count: self._closing(following[count], count[0] >= self._least) for count in counts}
        must_follow = False
        for key, member in reversed(self._members):
            is_required = key in self._required
            here: dict[tuple[int, int], str | None] = {}
            for low, high in counts:
                ways = []
                if not self._is_full(high) and (rest := after[self._one_more(low, high)]) is not None:
                    ways.append(f"{member} {rest}")
                if not is_required and (skipped := following[low, high]) is not None:
                    ways.append(skipped)
                here[low, high] = self._any_of(ways)
            must_follow = must_follow or is_required
            following = here
            after = {
                (low, high): self._closing(here[low, high], low >= self._least and not must_follow)
                for low, high in counts
            }
        ways = [first] if (first := following[0, 0]) is not None else []
        if not self._least and not must_follow:
            ways.append('"}"')
        return self._any_of(ways)

    def _is_full(self, high: int) -> bool:
        return self._most is not None and high >= self._most

    def _one_more(self, low: int, high: int) -> tuple[int, int]:
        return min(low + 1, self._least), high if self._most is None else high + 1

    def _first_other(self, low: int, high: int) -> str | None:
        """Other members, and the end. The first one counts; those behind it may have its key, and then count for
        nothing."""
        if self._other is None or self._is_full(high):
            return None
        low, high = self._one_more(low, high)
        rest = self._more_others(low, high)
        return rest and self._ebnf.rule(f"{self._other} {rest}")

    def _more_others(self, low: int, high: int) -> str | None:
        """What follows another member."""
        if low < self._least:
            return None
        if self._most is None:
            if (low, high) not in self._loops:
                name = self._loops[low, high] = self._ebnf.reserve()
                self._ebnf.define(name, f'{self._comma} {self._other} {name} | "}}"')
            return self._loops[low, high]
        rest = None if self._is_full(high) else self._more_others(low, high + 1)
        return self._closing(rest and self._ebnf.rule(f"{self._other} {rest}"), True)

    def _closing(self, following: str | None, may_close: bool) -> str | None:
        """What follows a member, where `following` follows a comma."""
        ways = [f"{self._comma} {following}"] if following is not None else []
        if may_close:
            ways.append('"}"')
        return self._any_of(ways)

    def _any_of(self, ways: list[str]) -> str | None:
        return self._ebnf.rule(" | ".join(ways)) if ways else None
