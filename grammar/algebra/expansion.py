"""From conjunctions of subschemas to cases: the disjunctive normal form, in which every alternative says all. Forms come later.

    literal      ──►  cases     assertions.py where it holds, negation.py where it does not
    conjunction  ──►  cases     every case of one literal with every case of the others, without the impossible ones

This goes only through keywords that speak of the same value (allOf, anyOf, $ref, …); what properties and items must be
stays a conjunction, and is expanded when a definition for it is wanted. So a schema may lead to itself through those.

After Habib, Shinnar, Hirzel, Pradel: Finding Data Compatibility Bugs with JSON Subschema Checks (ISSTA 2021), §4; unlike
there, references are followed, nothing is expanded before it is needed, and all is bounded.
"""

import json
from collections.abc import Callable, Iterable
from typing import Any

from trunkline.grammar.algebra.cases import ALL_KINDS, ANYTHING, Case, Layer, ObjectCase, union
from trunkline.grammar.algebra.evaluate import Evaluator
from trunkline.grammar.algebra.members import takes_array, takes_number, takes_object, takes_string
from trunkline.grammar.algebra.nodes import ALWAYS, IMPOSSIBLE, Conjunction, Literal, Nodes
from trunkline.grammar.algebra.patterns import Patterns
from trunkline.grammar.interface import Finding, InvalidSchema, Unsupported
from trunkline.grammar.regex.automaton import BudgetExceeded, spend
from trunkline.grammar.schema import values
from trunkline.grammar.schema.normalize import Schema

MOST_CASES = 256  # in one expansion
MOST_STEPS = 30_000  # conjunctions of two cases, in all
WORK_OF_A_STEP = 10
MOST_NESTED = 100  # keywords that speak of the same value, one in another


Rule = Callable[["Expansion", int], list[Case]]


class Expansion:
    """What the conjunctions of one schema's subschemas mean.

    held      gives the cases in which a subschema holds, by its number: assertions.expand_held
    denied    those in which it does not: negation.expand_denied
    lenient   what can't be said is left out, which is wider, and added to `findings`
    findings  all that was left out
    """

    def __init__(self, nodes: Nodes, patterns: Patterns, *, held: Rule, denied: Rule, lenient: bool) -> None:
        self._held, self._denied = held, denied
        self.nodes, self.patterns, self.lenient = nodes, patterns, lenient
        self.evaluator = Evaluator(nodes, patterns, lenient=lenient)
        self.findings: dict[Finding, None] = {}
        self._steps = 0
        self._cases: dict[Conjunction, list[Case]] = {ALWAYS: [ANYTHING], IMPOSSIBLE: []}
        self._open: list[Literal] = []  # being expanded, outermost first
        self._conflicts: dict[Conjunction, bool] = {}

    # --- expanding

    def cases(self, conjunction: Conjunction) -> list[Case]:
        """The alternatives; [] if nothing satisfies it. Raises Unsupported, InvalidSchema."""
        found = self._cases.get(conjunction)
        if found is None:
            if len(conjunction) == 1:
                (literal,) = conjunction
                found = self._expand(literal)
            else:
                listed = self.listed(conjunction) if not self.nodes.has_unevaluated else None
                if listed is not None:
                    found = [Case(values=values.texts(listed))] if listed else []
                else:
                    where = self.nodes.where(max(conjunction)[0])
                    found = [ANYTHING]
                    for literal in sorted(conjunction):
                        try:
                            found = self.product(found, self.cases(frozenset({literal})), where, "allOf")
                        except Unsupported as unsupported:
                            self.refuse(unsupported.finding)  # lenient: all but this one
            self._cases[conjunction] = found
        return found

    def of(self, schema: Schema, *, holds: bool = True) -> list[Case]:
        """The alternatives of a subschema, or of its opposite."""
        return self.cases(self.nodes.literal(schema, holds))

    def _expand(self, literal: Literal) -> list[Case]:
        number, holds = literal
        pointer = self.nodes.where(number)
        if literal in self._open:
            raise InvalidSchema(pointer, "$ref", "it leads back to itself before it says anything")
        if len(self._open) >= MOST_NESTED:
            raise Unsupported(pointer, "allOf", f"it is nested deeper than {MOST_NESTED} levels")
        self._open.append(literal)
        try:
            return (self._held if holds else self._denied)(self, number)
        finally:
            self._open.pop()

    def listed(self, conjunction: Conjunction) -> list[Any] | None:
        """All values that satisfy it, if one of its literals lists values: then the others choose among them."""
        for number, holds in sorted(conjunction):
            if holds and number >= 0 and (listed := listed_values(self.nodes.content(number))) is not None:
                return [value for value in listed if self.evaluator.holds(value, conjunction)]
        return None

    # --- combining

    def product(self, left: list[Case], right: list[Case], pointer: str, keyword: str) -> list[Case]:
        """One of `left` and one of `right`."""
        if left == [ANYTHING] or right == [ANYTHING]:
            return right if left == [ANYTHING] else left
        result = self.union(
            (both for one in left for other in right if (both := self.both(one, other, pointer, keyword))),
            most=MOST_CASES,
        )
        return self.bounded(result, pointer, keyword)

    def union(self, cases: Iterable[Case], *, most: int | None = None) -> list[Case]:
        """One of these; of more than `most`, some."""
        result = union(cases, most=most)
        # Beside what allows everything nothing else matters; but for what it evaluates.
        return [ANYTHING] if ANYTHING in result and not self.nodes.has_unevaluated else result

    def bounded(self, cases: list[Case], pointer: str, keyword: str) -> list[Case]:
        """The cases, unless there are too many."""
        if len(cases) > MOST_CASES:
            raise Unsupported(pointer, keyword, f"it makes more than {MOST_CASES} alternatives in combination")
        return cases

    def spend(self, work: int, pointer: str, keyword: str) -> None:
        """Of what the whole constraint has. Raises Unsupported if nothing is left."""
        try:
            spend(work)
        except BudgetExceeded:
            raise Unsupported(pointer, keyword, "the schema takes too much work to combine") from None

    def both(self, left: Case, right: Case, pointer: str, keyword: str) -> Case | None:
        """The values of both; None if there are none, as far as is seen at once."""
        self._steps += 1
        if self._steps > MOST_STEPS:
            raise Unsupported(pointer, keyword, f"the schema takes more than {MOST_STEPS} steps to combine")
        self.spend(WORK_OF_A_STEP, pointer, keyword)
        if left.values is not None or right.values is not None:
            return self._filtered(left, right)
        both = left & right
        if both is None or values.OBJECT not in both.kinds:
            return both
        return both if self._is_possible(both, left, right) else both.without_objects()

    def _is_possible(self, both: Case, left: Case, right: Case) -> bool:
        """Whether no required property is asked for what it can't be. Only what the two cases add to each other is new."""
        layers = both.object.layers
        if len(layers) == len(left.object.layers) and both.object.required == left.object.required:
            return True
        if len(layers) == len(right.object.layers) and both.object.required == right.object.required:
            return True
        return not any(self.conflicts(self.patterns.under(layers, name)) for name in both.object.required)

    def _filtered(self, left: Case, right: Case) -> Case | None:
        listing, other = (left, right) if left.values is not None else (right, left)
        assert listing.values is not None
        if other.values is not None:
            keys = {values.key(json.loads(text)) for text in other.values}
            kept = tuple(text for text in listing.values if values.key(json.loads(text)) in keys)
        else:
            kept = tuple(text for text in listing.values if self.takes(other, json.loads(text)))
        if not kept:
            return None
        return Case(
            values=kept,
            array=listing.array & other.array.only_seen(),
            object=listing.object & other.object.only_seen(),
        )

    def takes(self, case: Case, value: Any) -> bool:
        """Whether a case that does not list its values has this one."""
        kind = values.kind(value)
        if kind not in case.kinds:
            return False
        if isinstance(value, str):
            taken, blocked = takes_string(case.string, value, self.patterns, lenient=self.lenient), case.string.blocked
        elif kind == values.NUMBER:
            taken, blocked = takes_number(case.number, values.fraction(value)), case.number.blocked
        elif isinstance(value, list):
            taken, blocked = takes_array(case.array, value, self.evaluator.holds), case.array.blocked
        elif isinstance(value, dict):
            taken, blocked = takes_object(case.object, value, self.evaluator.holds, self.patterns), case.object.blocked
        else:
            return True
        if taken:
            self.refuse(*blocked)
        return taken

    def refuse(self, *findings: Finding) -> None:
        """Something can't be said: raises Unsupported, or is noted and left out."""
        for finding in findings:
            if not self.lenient:
                raise Unsupported(*finding)
            self.findings[finding] = None

    def conflicts(self, conjunction: Conjunction) -> bool:
        """Whether nothing satisfies it, as far as is seen without expanding it: by types and listed values."""
        if conjunction is IMPOSSIBLE:
            return True
        if len(conjunction) < 2:
            return False
        known = self._conflicts.get(conjunction)
        if known is None:
            known = self._conflicts[conjunction] = self._conflict(conjunction)
        return known

    def _conflict(self, conjunction: Conjunction) -> bool:
        listed = self.listed(conjunction)
        if listed is not None:
            return not listed
        kinds = ALL_KINDS
        for number, holds in conjunction:
            if holds:
                kinds &= kinds_of(self.nodes.content(number))
        return not kinds


def absent(name: str, pointer: str) -> Case:
    """All values without a property of that name."""
    return Case(object=ObjectCase(layers=(Layer({name: IMPOSSIBLE}),), pointer=pointer))


def present(names: list[str], pointer: str) -> Case:
    """Objects that have all these properties."""
    return Case(frozenset({values.OBJECT}), object=ObjectCase(required=tuple(names), pointer=pointer))


def listed_values(content: dict[str, Any]) -> list[Any] | None:
    """The values that a subschema lists, of which other keywords may forbid some; None if it lists none."""
    if "const" in content:
        return [content["const"]]
    return values.distinct(content["enum"]) if "enum" in content else None


def kinds_of(content: dict[str, Any]) -> frozenset[str]:
    """The kinds that `type` allows."""
    if "type" not in content:
        return ALL_KINDS
    return frozenset(kind for name in content["type"] for kind in KINDS_OF_TYPE[name])


KINDS_OF_TYPE = {
    "null": (values.NULL,),
    "boolean": (values.TRUE, values.FALSE),
    "string": (values.STRING,),
    "integer": (values.NUMBER,),
    "number": (values.NUMBER,),
    "array": (values.ARRAY,),
    "object": (values.OBJECT,),
}
