"""Whether a value is valid under a subschema, keyword by keyword as the specification says. No algebra here.

The algebra needs it for `const` and `enum`: a listed value stays if everything beside it holds. It is also the plain model
that the algebra is tested against.

Some things are not known for sure: a format's expression may be narrower than the format, a pattern may be beyond us. So one
asks in a direction, and the answer errs on the safe side of it:

    is_valid(value, node, sure=True)    False if in doubt: "surely valid"
    is_valid(value, node, sure=False)   True if in doubt: "perhaps valid"; so `not is_valid(…)` is "surely invalid"

A lenient evaluation gives the benefit of the doubt the other way round: what is not known is left out.
"""

import operator
from collections.abc import Callable, Hashable
from fractions import Fraction
from typing import Any

from trunkline.grammar.algebra.nodes import Conjunction, Nodes
from trunkline.grammar.algebra.patterns import Patterns
from trunkline.grammar.schema import values
from trunkline.grammar.schema.normalize import Schema

Seen = frozenset[str | int]  # names of properties and indexes of items that a subschema looked at
NOTHING_SEEN: Seen = frozenset()


class Evaluator:
    """Evaluates values under the subschemas of `nodes`."""

    def __init__(self, nodes: Nodes, patterns: Patterns, *, lenient: bool) -> None:
        self.nodes, self.patterns, self.lenient = nodes, patterns, lenient
        self._listed: dict[int, frozenset[Hashable]] = {}  # id() of an `enum` -> keys of its values

    def holds(self, value: Any, conjunction: Conjunction) -> bool:
        """Whether all literals surely hold."""
        return all(
            number >= 0 and self.is_valid(value, self.nodes.content(number), sure=holds) == holds
            for number, holds in conjunction
        )

    def is_valid(self, value: Any, schema: Schema, *, sure: bool) -> bool:
        """Whether the value is valid; for `sure` see above."""
        return self.see(value, schema, sure=sure) is not None

    def see(self, value: Any, schema: Schema, *, sure: bool) -> Seen | None:
        """None if the value is not valid; else which of its properties or items were evaluated."""
        if isinstance(schema, bool):
            return NOTHING_SEEN if schema else None
        if not self._has_type(value, schema):
            return None
        seen: set[str | int] = set()
        if not self._by_kind(value, schema, seen, sure) or not self._combined(value, schema, seen, sure):
            return None
        for keyword, inner in (
            ("unevaluatedProperties", value.items() if isinstance(value, dict) else ()),
            ("unevaluatedItems", enumerate(value) if isinstance(value, list) else ()),
        ):
            if keyword in schema:
                for place, member in inner:
                    if place not in seen and not self.is_valid(member, schema[keyword], sure=sure):
                        return None
                    seen.add(place)
        return frozenset(seen)

    def _by_kind(self, value: Any, schema: dict[str, Any], seen: set[str | int], sure: bool) -> bool:
        """The keywords that are about one kind of value."""
        match values.kind(value):
            case values.STRING:
                return self._string(value, schema, sure)
            case values.NUMBER:
                return _number(values.fraction(value), schema)
            case values.ARRAY:
                return self._array(value, schema, seen, sure)
            case values.OBJECT:
                return self._object(value, schema, seen, sure)
        return True

    def _has_type(self, value: Any, schema: dict[str, Any]) -> bool:
        if "type" in schema and not any(_is_of(value, name) for name in schema["type"]):
            return False
        if "const" in schema and values.key(value) != values.key(schema["const"]):
            return False
        return "enum" not in schema or values.key(value) in self._keys(schema["enum"])

    def _keys(self, listed: list[Any]) -> frozenset[Hashable]:
        """Of the values of an `enum`, which the schema keeps alive."""
        if id(listed) not in self._listed:
            self._listed[id(listed)] = frozenset(values.key(one) for one in listed)
        return self._listed[id(listed)]

    def _string(self, value: str, schema: dict[str, Any], sure: bool) -> bool:
        if not schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value)):
            return False
        if "pattern" in schema:
            found = self.patterns.found(schema["pattern"], value)
            if found is False or (found is None and sure != self.lenient):
                return False
        if "format" in schema:
            found = self.patterns.has_format(schema["format"], value)
            return found is True or (found is None and sure == self.lenient)
        return True

    def _object(self, value: dict[str, Any], schema: dict[str, Any], seen: set[str | int], sure: bool) -> bool:
        if not schema.get("minProperties", 0) <= len(value) <= schema.get("maxProperties", len(value)):
            return False
        if not all(name in value for name in schema.get("required", ())):
            return False
        for name, others in schema.get("dependentRequired", {}).items():
            if name in value and not all(other in value for other in others):
                return False
        if "propertyNames" in schema and not all(
            self.is_valid(name, schema["propertyNames"], sure=sure) for name in value
        ):
            return False
        for name, member in value.items():
            applied = [schema["properties"][name]] if name in schema.get("properties", {}) else []
            doubted = False
            for pattern, under in schema.get("patternProperties", {}).items():
                found = self.patterns.found(pattern, name)
                doubted |= found is None
                if found or (found is None and sure != self.lenient):
                    applied.append(under)
            if "additionalProperties" in schema and (sure != self.lenient if doubted else not applied):
                applied.append(schema["additionalProperties"])
            if not all(self.is_valid(member, under, sure=sure) for under in applied):
                return False
            if applied:
                seen.add(name)
        return True

    def _array(self, value: list[Any], schema: dict[str, Any], seen: set[str | int], sure: bool) -> bool:
        if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)):
            return False
        if schema.get("uniqueItems") and len(values.distinct(value)) < len(value):
            return False
        first = schema.get("prefixItems", [])
        for index, item in enumerate(value):
            under = first[index] if index < len(first) else schema.get("items")
            if under is not None:
                if not self.is_valid(item, under, sure=sure):
                    return False
                seen.add(index)
        if "contains" not in schema:
            return True
        sure_ones, perhaps = (
            [index for index, item in enumerate(value) if self.is_valid(item, schema["contains"], sure=way)]
            for way in (sure, not sure)
        )
        seen.update(sure_ones)
        least: int = schema.get("minContains", 1)
        most: int = schema.get("maxContains", len(value))
        return least <= len(sure_ones) and len(perhaps) <= most

    def _combined(self, value: Any, schema: dict[str, Any], seen: set[str | int], sure: bool) -> bool:
        """The keywords that apply other subschemas to the same value."""
        must = list(schema.get("allOf", ()))
        if "$ref" in schema:
            must.append(self.nodes.schema.resolve(schema["$ref"]))
        if isinstance(value, dict):
            must += [under for name, under in schema.get("dependentSchemas", {}).items() if name in value]
        for under in must:
            found = self.see(value, under, sure=sure)
            if found is None:
                return False
            seen.update(found)
        if "if" in schema and not self._conditional(value, schema, seen, sure):
            return False
        if "not" in schema and self.is_valid(value, schema["not"], sure=not sure):
            return False
        if "anyOf" in schema:
            found_all = [found for under in schema["anyOf"] if (found := self.see(value, under, sure=sure)) is not None]
            if not found_all:
                return False
            seen.update(*found_all)
        if "oneOf" in schema:
            taken = [self.see(value, under, sure=sure) for under in schema["oneOf"]]
            others = [self.is_valid(value, under, sure=not sure) for under in schema["oneOf"]]
            only = [
                found
                for index, found in enumerate(taken)
                if found is not None and not any(others[:index] + others[index + 1 :])
            ]
            if not only:
                return False
            seen.update(*only)
        return True

    def _conditional(self, value: Any, schema: dict[str, Any], seen: set[str | int], sure: bool) -> bool:
        """`if` with `then`, or its opposite with `else`. With sure=True neither may be known, and then it is neither."""
        condition = self.see(value, schema["if"], sure=sure)
        then = self.see(value, schema.get("then", True), sure=sure) if condition is not None else None
        if condition is not None and then is not None:
            seen.update(condition, then)
            return True
        if self.is_valid(value, schema["if"], sure=not sure):
            return False
        otherwise = self.see(value, schema.get("else", True), sure=sure)
        seen.update(otherwise or ())
        return otherwise is not None


def _is_of(value: Any, name: str) -> bool:
    if name == "integer":
        return values.kind(value) == values.NUMBER and values.fraction(value).denominator == 1
    if name == "boolean":
        return isinstance(value, bool)
    return values.kind(value) == name


def _number(value: Fraction, schema: dict[str, Any]) -> bool:
    return all(keyword not in schema or fits(value, values.fraction(schema[keyword])) for keyword, fits in FITS.items())


FITS: dict[str, Callable[[Fraction, Fraction], bool]] = {
    "minimum": operator.ge,
    "maximum": operator.le,
    "exclusiveMinimum": operator.gt,
    "exclusiveMaximum": operator.lt,
    "multipleOf": lambda value, unit: (value / unit).denominator == 1,
}
