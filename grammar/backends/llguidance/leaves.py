"""Strings, numbers, names of properties and listed values as terminals of a Lark grammar.

    leaves = Leaves(lark)
    leaves.strings(Strings(max_length=5))      what stands in a rule for them: "T0"
    leaves.numbers(Numbers(integer=True))
    leaves.name(["^x-"], excluded=["x-y"])     a terminal for a name and what follows it

A string is written in one way only: an escape where JSON demands one, the short one where there is one, and lower-case digits
in \\u001f. So a pattern of the schema is a pattern of the text, and no name can hide behind an escape. Several patterns, lengths
and exclusions are intersected by the library. Whitespace is none of these: nothing here depends on it.
"""

import json
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache

from trunkline.grammar.backends import numbers
from trunkline.grammar.backends.llguidance.lark import LarkWriter
from trunkline.grammar.backends.numbers import NotDecimal, Span
from trunkline.grammar.backends.strings import string_trees
from trunkline.grammar.interface import Unsupported
from trunkline.grammar.regex import ast, automaton, pattern
from trunkline.grammar.schema.forms import Form, Numbers, Strings, Values

UNIT = pattern.json_unit("rust")  # one character of a string, as it is written
# Of the library's own multiples, all divisors of a grammar together: it keeps as many states, several times where there are bounds,
# and may need all of them for one mask. From 7,000 on some texts come to its limits.
LARGEST_DIVISORS = 5_000
LARGEST_MULTIPLE = 10**12  # the library's bounds are floats: these have digits left behind the point
MANY = (
    1  # expressions that hold for one string, or don't: the library has to follow more of them together, in a product
)
RISKY_SIZE = 20_000  # characters of an expression with its repetitions written out


def json_string(text: str) -> str:
    """A string as it is written, quotes included."""
    return json.dumps(text, ensure_ascii=False)


@lru_cache(maxsize=1024)
def _inside(tree: ast.Node) -> str:
    """Between quotes: an expression for the texts of a tree without anchors."""
    return f"(?:{pattern.write(ast.json_form(tree), 'rust')})"


class Leaves:
    """Writes terminals; each form once. `is_risky`: one of them may cost much."""

    def __init__(self, lark: LarkWriter) -> None:
        self._lark = lark
        self._written: dict[Form, list[str]] = {}
        self._trees: dict[str, ast.Node] = {}
        self._divisors: dict[str, int] = {}  # of multiples as they were written
        self.is_risky = False

    def write(self, form: Values | Strings | Numbers) -> list[str]:
        """Alternatives for a form's values; none if we can write none of them. Values must be no arrays or objects.

        Raises Unsupported.
        """
        if form not in self._written:
            if isinstance(form, Strings):
                self._written[form] = self._strings(form)
            elif isinstance(form, Numbers):
                self._written[form] = self._numbers(form)
            else:
                self._written[form] = [self._lark.literals(form.values)] if form.values else []
        return self._written[form]

    def name(self, found: Sequence[str], not_found: Sequence[str], excluded: Sequence[str], end: str) -> str | None:
        """A terminal for names in which all of `found` match and none of `not_found`, and that are not `excluded`; then `end`.

        None if there is no such name. Raises Unsupported.
        """
        trees, not_trees = map(self._name_trees, (found, not_found))
        if excluded:
            not_trees.append(ast.union(ast.literal(name) for name in excluded))
        if trees and _is_empty(trees, not_trees, 0, None):
            return None
        ways = [f'"{_inside(tree)}"{end}' for tree in trees] or [f'"{UNIT}*"{end}']
        return self._lark.terminal(ways, excluding=[f'"{_inside(tree)}"{end}' for tree in not_trees])

    def are_apart(self, source: str, other: str) -> bool:
        """Whether surely no text has both in it."""
        return _is_empty(self._name_trees((source, other)), [], 0, None)

    def _strings(self, form: Strings) -> list[str]:
        trees, not_trees = string_trees(form, self._tree)
        self.is_risky |= len(trees) + len(not_trees) > MANY
        least, most = form.min_length, form.max_length
        if len(trees) + len(not_trees) + (least > 0 or most is not None) > 1 and _is_empty(
            trees, not_trees, least, most
        ):
            return []
        ways = [f'"{_inside(tree)}"' for tree in trees]
        if least or most is not None:
            ways.append(f'"{UNIT}{{{least},{"" if most is None else most}}}"')
        return [self._lark.terminal(ways or [f'"{UNIT}*"'], excluding=[f'"{_inside(tree)}"' for tree in not_trees])]

    def _name_trees(self, sources: Sequence[str]) -> list[ast.Node]:
        return [self._tree(source, pointer="", keyword="patternProperties") for source in sources]

    def _tree(self, source: str, *, pointer: str, keyword: str) -> ast.Node:
        tree = self._trees.get(source)
        if tree is None:
            tree = self._trees[source] = pattern.whole_tree(source, pointer=pointer, keyword=keyword)
        self.is_risky |= tree.size > RISKY_SIZE
        return tree

    def _numbers(self, form: Numbers) -> list[str]:
        try:
            spans = numbers.spans(form)
        except NotDecimal as error:
            raise Unsupported(form.pointer, "multipleOf", str(error)) from None
        try:
            ways = [way for span in spans for way in span.alternatives()]
        except NotDecimal:
            return [self._lark.subrule([self._multiples(span, form.pointer)]) for span in spans]
        return [self._lark.terminal(*ways)] if ways else []

    def _multiples(self, span: Span, pointer: str) -> str:
        """The library's own multiples, which it has only inside of a JSON schema. Raises Unsupported."""
        largest = LARGEST_MULTIPLE // span.step * span.step
        least = -largest if span.least is None else max(span.least, -largest)
        most = largest if span.most is None else min(span.most, largest)
        limits = [_exact_float(number) for number in (span.step, least, most)]
        divisor = _divisor(span.step)
        if least > most or None in limits or divisor is None:
            raise Unsupported(pointer, "multipleOf", f"multiples of {span.step} are too many to tell apart")
        step, least_float, most_float = limits
        schema = {
            "type": "integer" if span.integer else "number",
            "multipleOf": step,
            "minimum": least_float,
            "maximum": most_float,
            "x-guidance": {"whitespace_flexible": False},
        }
        written = f"%json {json.dumps(schema)}"
        self._divisors[written] = divisor
        if sum(self._divisors.values()) > LARGEST_DIVISORS:
            others = ", with the others in the schema," if len(self._divisors) > 1 else ""
            reason = f"multiples of {span.step}{others} are too many to tell apart"
            raise Unsupported(pointer, "multipleOf", reason)
        return written


def _is_empty(trees: Sequence[ast.Node], not_trees: Sequence[ast.Node], least: int, most: int | None) -> bool:
    """Whether no text is left. Where that takes long to find out: no."""
    try:
        return automaton.is_empty(tuple(trees), tuple(not_trees), least, most)
    except automaton.BudgetExceeded:
        return False


def _exact_float(number: Fraction) -> float | int | None:
    if number.denominator == 1:
        return int(number)
    return float(number) if Fraction(repr(float(number))) == number else None


def _divisor(step: Fraction) -> int | None:
    """Of how many numbers in a row the library, which shifts a float's point until nothing is left behind it, takes one as a
    multiple; None: not of the right number."""
    value, places = float(step), 0
    while value % 1 and places < 20:
        value, places = value * 10, places + 1
    return int(value) if Fraction(int(value), 10**places) == step else None
