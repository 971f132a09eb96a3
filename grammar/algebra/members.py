"""Whether a value belongs to one part of a case. For lists of values that meet a case which does not list its own."""

from collections.abc import Callable
from fractions import Fraction
from typing import Any

from trunkline.grammar.algebra.cases import ArrayCase, NumberCase, ObjectCase, Somewhere, StringCase
from trunkline.grammar.algebra.nodes import Conjunction
from trunkline.grammar.algebra.patterns import Patterns
from trunkline.grammar.schema import values

Holds = Callable[[Any, Conjunction], bool]


def takes_string(case: StringCase, value: str, patterns: Patterns, *, lenient: bool = False) -> bool:
    """Whether the case has this string. A pattern that can't be searched for is taken to fail; if lenient, to be as it should."""
    if len(value) < case.min_length or (case.max_length is not None and len(value) > case.max_length):
        return False
    if value in case.excluded:
        return False
    sought = [(patterns.found(pattern, value), True) for pattern in case.patterns]
    sought += [(patterns.found(pattern, value), False) for pattern in case.not_patterns]
    sought += [(patterns.has_format(name, value), True) for name in case.formats]
    return all(found == wanted or (found is None and lenient) for found, wanted in sought)


def takes_number(case: NumberCase, value: Fraction) -> bool:
    """Whether the case has this number."""
    if case.integer and value.denominator != 1:
        return False
    if case.minimum is not None and (value < case.minimum or (case.exclusive_minimum and value == case.minimum)):
        return False
    if case.maximum is not None and (value > case.maximum or (case.exclusive_maximum and value == case.maximum)):
        return False
    if case.multiple_of is not None and (value / case.multiple_of).denominator != 1:
        return False
    return value not in case.excluded and all((value / unit).denominator != 1 for unit, _ in case.not_multiples)


def takes_array(case: ArrayCase, value: list[Any], holds: Holds) -> bool:
    """Whether the case has this array; `holds` says whether an item surely satisfies a conjunction."""
    if len(value) < case.min_items or (case.max_items is not None and len(value) > case.max_items):
        return False
    if not all(holds(item, case.item(index)) for index, item in enumerate(value)):
        return False
    if case.unique and len(values.distinct(value)) < len(value):
        return False
    for what, least, most in case.contains:
        count = sum(holds(item, what) for item in value)
        if count < least or (most is not None and count > most):
            return False
    return True


def takes_object(case: ObjectCase, value: dict[str, Any], holds: Holds, patterns: Patterns) -> bool:
    """Whether the case has this object; `holds` as in `takes_array`."""
    if len(value) < case.min_properties or (case.max_properties is not None and len(value) > case.max_properties):
        return False
    if not all(name in value for name in case.required):
        return False
    if not all(holds(member, patterns.under(case.layers, name)) for name, member in value.items()):
        return False
    return all(
        any(is_meant(one, name, holds, patterns) and holds(member, one.value) for name, member in value.items())
        for one in case.somewhere
    )


def is_meant(somewhere: Somewhere, name: str, holds: Holds, patterns: Patterns) -> bool:
    """Whether a property of this name is one of those of which at least one must satisfy something."""
    if somewhere.pattern is not None and not patterns.found(somewhere.pattern, name):
        return False
    if name in somewhere.outside or any(patterns.found(pattern, name) for pattern in somewhere.not_patterns):
        return False
    return holds(name, somewhere.name)
