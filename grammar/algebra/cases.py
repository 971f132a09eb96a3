"""One alternative of a schema's meaning, as the algebra computes with it; `canonical` turns it into forms. Nothing is expanded here.

A case says for each kind of value what must hold of it, so that schemas that speak of several kinds are still one case, and
a conjunction of two cases is again one:

    {"minLength": 2}                    ──►  strings of 2 characters, any number, any array, …
    {"type": ["string", "null"]}        ──►  any string, null
    both                                ──►  strings of 2 characters, null

A disjunction is a list of cases. A case may instead list its values; then no more is said of them.

What a definition can't say is kept as `blocked`: the case stands for fewer values than it claims, and it must vanish in a
conjunction, be dropped beside other alternatives of its kind (which is narrower), or the schema is refused.
"""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import ceil, floor, gcd, lcm
from typing import TypeVar

from trunkline.grammar.algebra.nodes import ALWAYS, IMPOSSIBLE, Conjunction, conjoin
from trunkline.grammar.interface import Finding
from trunkline.grammar.schema.values import ARRAY, KINDS, NUMBER, OBJECT, STRING


@dataclass(frozen=True, slots=True)
class StringCase:
    """As forms.Strings."""

    min_length: int = 0
    max_length: int | None = None
    patterns: tuple[str, ...] = ()
    not_patterns: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()
    formats: tuple[str, ...] = ()
    blocked: tuple[Finding, ...] = ()
    pointer: str = field(default="", compare=False)

    def __and__(self, other: "StringCase") -> "StringCase":
        return StringCase(
            max(self.min_length, other.min_length),
            _least(self.max_length, other.max_length),
            _merged(self.patterns, other.patterns),
            _merged(self.not_patterns, other.not_patterns),
            _merged(self.excluded, other.excluded),
            _merged(self.formats, other.formats),
            _merged(self.blocked, other.blocked),
            self.pointer or other.pointer,
        )

    @property
    def is_empty(self) -> bool:
        """Certainly none."""
        return self.max_length is not None and self.min_length > self.max_length


@dataclass(frozen=True, slots=True)
class NumberCase:
    """As forms.Numbers; and no multiple of any of `not_multiples`, each with what to say where that can't be said."""

    integer: bool = False
    minimum: Fraction | None = None
    maximum: Fraction | None = None
    exclusive_minimum: bool = False
    exclusive_maximum: bool = False
    multiple_of: Fraction | None = None
    excluded: tuple[Fraction, ...] = ()
    not_multiples: tuple[tuple[Fraction, Finding], ...] = ()
    blocked: tuple[Finding, ...] = ()
    pointer: str = field(default="", compare=False)

    def __and__(self, other: "NumberCase") -> "NumberCase":
        low = max(
            ((c.minimum, c.exclusive_minimum) for c in (self, other) if c.minimum is not None), default=(None, False)
        )
        high = min(
            ((c.maximum, not c.exclusive_maximum) for c in (self, other) if c.maximum is not None), default=(None, True)
        )
        return NumberCase(
            self.integer or other.integer,
            low[0],
            high[0],
            low[1],
            not high[1],
            _common_multiple(self.multiple_of, other.multiple_of),
            _merged(self.excluded, other.excluded),
            _merged(self.not_multiples, other.not_multiples),
            _merged(self.blocked, other.blocked),
            self.pointer or other.pointer,
        ).tidied()

    def tidied(self) -> "NumberCase":
        """Multiples of a whole number are integers, and the bounds of integers are integers that belong to them."""
        unit = self.multiple_of
        integer = self.integer or (unit is not None and unit.denominator == 1)
        if integer and unit is not None:
            unit = _common_multiple(unit, Fraction(1))
        if not integer:
            return self
        low, high = self.minimum, self.maximum
        if low is not None:
            low = Fraction(floor(low) + 1 if self.exclusive_minimum else ceil(low))
        if high is not None:
            high = Fraction(ceil(high) - 1 if self.exclusive_maximum else floor(high))
        return replace(
            self,
            integer=True,
            minimum=low,
            maximum=high,
            exclusive_minimum=False,
            exclusive_maximum=False,
            multiple_of=None if unit == 1 else unit,
        )

    @property
    def is_empty(self) -> bool:
        """Certainly none."""
        unit = self.multiple_of or (Fraction(1) if self.integer else None)
        if unit is not None and any((unit / other).denominator == 1 for other, _ in self.not_multiples):
            return True
        if self.minimum is None or self.maximum is None:
            return False
        if self.minimum > self.maximum:
            return True
        return self.minimum == self.maximum and (self.exclusive_minimum or self.exclusive_maximum)


@dataclass(frozen=True, slots=True)
class ArrayCase:
    """As forms.Arrays, with conjunctions for definitions.

    contains        (of what, at least, at most)
    seen            items before this index were evaluated; None: all were
    seen_contained  items that satisfy one of these were, too
    """

    prefix: tuple[Conjunction, ...] = ()
    rest: Conjunction = ALWAYS
    min_items: int = 0
    max_items: int | None = None
    unique: bool = False
    contains: tuple[tuple[Conjunction, int, int | None], ...] = ()
    seen: int | None = 0
    seen_contained: tuple[Conjunction, ...] = ()
    blocked: tuple[Finding, ...] = ()
    pointer: str = field(default="", compare=False)

    def item(self, index: int) -> Conjunction:
        """What an item must be."""
        return self.prefix[index] if index < len(self.prefix) else self.rest

    def __and__(self, other: "ArrayCase") -> "ArrayCase":
        length = max(len(self.prefix), len(other.prefix))
        return ArrayCase(
            tuple(conjoin(self.item(index), other.item(index)) for index in range(length)),
            conjoin(self.rest, other.rest),
            max(self.min_items, other.min_items),
            _least(self.max_items, other.max_items),
            self.unique or other.unique,
            _merged(self.contains, other.contains),
            None if self.seen is None or other.seen is None else max(self.seen, other.seen),
            _merged(self.seen_contained, other.seen_contained),
            _merged(self.blocked, other.blocked),
            self.pointer or other.pointer,
        )

    def only_seen(self) -> "ArrayCase":
        """What it says of evaluated items, without what it asks for."""
        return ArrayCase(seen=self.seen, seen_contained=self.seen_contained) if self is not ANY_ARRAY else self

    @property
    def is_empty(self) -> bool:
        """Certainly none."""
        if self.max_items is not None and self.min_items > self.max_items:
            return True
        if any(self.item(index) is IMPOSSIBLE for index in range(min(self.min_items, len(self.prefix) + 1))):
            return True
        return any(most is not None and least > most for _, least, most in self.contains)


class Layer:
    """What one object schema says of each property: by name, else by every pattern that matches, else by `additional`.

    Names that are given do not fall under the patterns: whoever makes a layer has joined them (Patterns.layer).
    """

    __slots__ = ("_hash", "additional", "patterns", "properties")

    def __init__(
        self,
        properties: dict[str, Conjunction] | None = None,
        patterns: tuple[tuple[str, Conjunction], ...] = (),
        additional: Conjunction = ALWAYS,
    ) -> None:
        self.properties = properties or {}
        self.patterns = patterns
        self.additional = additional
        self._hash = hash((tuple(self.properties.items()), patterns, additional))

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, Layer)
            and self._hash == other._hash
            and list(self.properties.items()) == list(other.properties.items())
            and (self.patterns, self.additional) == (other.patterns, other.additional)
        )

    def __hash__(self) -> int:
        return self._hash


@dataclass(frozen=True, slots=True)
class Somewhere:
    """At least one property, of those that meet the description, satisfies `value`.

    pattern  its name matches
    outside  its name is not one of these, and matches no pattern of `not_patterns`
    name     its name satisfies this
    """

    value: Conjunction
    finding: Finding
    pattern: str | None = None
    outside: tuple[str, ...] = ()
    not_patterns: tuple[str, ...] = ()
    name: Conjunction = ALWAYS


@dataclass(frozen=True, slots=True)
class ObjectCase:
    """As forms.Objects, in layers that all hold.

    somewhere      each must hold
    seen           names of properties that were evaluated; None: all were
    seen_patterns  properties whose name matches one of these were, too
    """

    layers: tuple[Layer, ...] = ()
    required: tuple[str, ...] = ()
    min_properties: int = 0
    max_properties: int | None = None
    somewhere: tuple[Somewhere, ...] = ()
    seen: frozenset[str] | None = frozenset()
    seen_patterns: frozenset[str] = frozenset()
    blocked: tuple[Finding, ...] = ()
    pointer: str = field(default="", compare=False)

    def __and__(self, other: "ObjectCase") -> "ObjectCase":
        return ObjectCase(
            _merged(self.layers, other.layers),
            _merged(self.required, other.required),
            max(self.min_properties, other.min_properties),
            _least(self.max_properties, other.max_properties),
            _merged(self.somewhere, other.somewhere),
            None if self.seen is None or other.seen is None else self.seen | other.seen,
            self.seen_patterns | other.seen_patterns,
            _merged(self.blocked, other.blocked),
            self.pointer or other.pointer,
        )

    def only_seen(self) -> "ObjectCase":
        """What it says of evaluated properties, without what it asks for."""
        return ObjectCase(seen=self.seen, seen_patterns=self.seen_patterns) if self is not ANY_OBJECT else self

    @property
    def is_empty(self) -> bool:
        """Certainly none; what the layers say of the required properties is for others to see."""
        return self.max_properties is not None and max(self.min_properties, len(self.required)) > self.max_properties


ANY_STRING, ANY_NUMBER, ANY_ARRAY, ANY_OBJECT = StringCase(), NumberCase(), ArrayCase(), ObjectCase()
ALL_KINDS = frozenset(KINDS)


@dataclass(frozen=True, slots=True)
class Case:
    """Values of the `kinds`, each as its field says; or the `values`, as JSON texts, and no others: then the fields hold
    only what was evaluated of them.

    What is not among the kinds has its field at rest, so that equal cases compare equal.
    """

    kinds: frozenset[str] = ALL_KINDS
    string: StringCase = ANY_STRING
    number: NumberCase = ANY_NUMBER
    array: ArrayCase = ANY_ARRAY
    object: ObjectCase = ANY_OBJECT
    values: tuple[str, ...] | None = None

    def tidied(self) -> "Case | None":
        """Without kinds of which there is certainly no value; None if nothing is left."""
        kinds = self.kinds
        for name, one in ((STRING, self.string), (NUMBER, self.number), (ARRAY, self.array), (OBJECT, self.object)):
            if name in kinds and one.is_empty:
                kinds = kinds - {name}
        return self.only(kinds) if kinds else None

    def only(self, kinds: frozenset[str]) -> "Case":
        """The part of these kinds, which are among its own."""
        return Case(
            kinds,
            self.string if STRING in kinds else ANY_STRING,
            self.number if NUMBER in kinds else ANY_NUMBER,
            self.array if ARRAY in kinds else ANY_ARRAY,
            self.object if OBJECT in kinds else ANY_OBJECT,
        )

    def without_objects(self) -> "Case | None":
        """None if nothing is left."""
        kinds = self.kinds - {OBJECT}
        return self.only(kinds) if kinds else None

    def __and__(self, other: "Case") -> "Case | None":
        """Both, for cases that do not list values."""
        kinds = self.kinds & other.kinds
        if not kinds:
            return None
        return Case(
            kinds,
            _both(self.string, other.string) if STRING in kinds else ANY_STRING,
            _both(self.number, other.number) if NUMBER in kinds else ANY_NUMBER,
            _both(self.array, other.array) if ARRAY in kinds else ANY_ARRAY,
            _both(self.object, other.object) if OBJECT in kinds else ANY_OBJECT,
        ).tidied()

    def united(self, other: "Case") -> "Case | None":
        """Either, if that is one case again: they have no kind in common, or both list values."""
        if self.values is not None and other.values is not None:
            alike = (self.array, self.object) == (other.array, other.object)  # what was evaluated of them
            return replace(self, values=_merged(self.values, other.values)) if alike else None
        if self.values is not None or other.values is not None or self.kinds & other.kinds:
            return None
        return Case(
            self.kinds | other.kinds,
            self.string if STRING in self.kinds else other.string,
            self.number if NUMBER in self.kinds else other.number,
            self.array if ARRAY in self.kinds else other.array,
            self.object if OBJECT in self.kinds else other.object,
        )


ANYTHING = Case()


def union(cases: Iterable[Case], *, most: int | None = None) -> list[Case]:
    """The same alternatives in as few cases as is easily seen. The first keep their place. Of more than `most`, only so many
    and one more."""
    result: list[Case] = []
    known: set[Case] = set()
    for case in cases:
        if case in known:
            continue
        for index, earlier in enumerate(result):
            united = earlier.united(case)
            if united is not None:
                known.discard(earlier)
                result[index] = united
                known.add(united)
                break
        else:
            result.append(case)
            known.add(case)
            if most is not None and len(result) > most:
                break
    return result


Part = TypeVar("Part", StringCase, NumberCase, ArrayCase, ObjectCase)
T = TypeVar("T", bound=Hashable)


def _both(left: Part, right: Part) -> Part:
    resting = (ANY_STRING, ANY_NUMBER, ANY_ARRAY, ANY_OBJECT)
    if left is right or any(right is one for one in resting):
        return left
    return right if any(left is one for one in resting) else left & right


def _merged(left: tuple[T, ...], right: tuple[T, ...]) -> tuple[T, ...]:
    """In order, each once."""
    if not left or not right:
        return left or right
    return left if left is right else tuple(dict.fromkeys(left + right))


def _least(left: int | None, right: int | None) -> int | None:
    return right if left is None else left if right is None else min(left, right)


def _common_multiple(left: Fraction | None, right: Fraction | None) -> Fraction | None:
    """What is a multiple of both is a multiple of this, and the other way round; None: of anything."""
    if left is None or right is None:
        return left or right
    return Fraction(lcm(left.numerator, right.numerator), gcd(left.denominator, right.denominator))
