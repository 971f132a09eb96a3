"""What it means that a subschema does not hold: at least one of its keywords fails. assertions.py has the opposite.

    not {"type": "string", "minLength": 3}    ──►  not a string, or a string of at most 2 characters

Every keyword fails in its own way, as a list of cases; the subschema fails in all these ways. What can't be said exactly is
a blocked case, never a wider one.
"""

from collections.abc import Callable
from fractions import Fraction
from itertools import combinations
from typing import Any

from trunkline.grammar.algebra.assertions import contains_case, number_case, without_seen
from trunkline.grammar.algebra.cases import (
    ALL_KINDS,
    ANYTHING,
    ArrayCase,
    Case,
    Layer,
    NumberCase,
    ObjectCase,
    Somewhere,
    StringCase,
)
from trunkline.grammar.algebra.expansion import Expansion, absent, kinds_of, present
from trunkline.grammar.algebra.nodes import ALWAYS, IMPOSSIBLE
from trunkline.grammar.interface import Finding, Unsupported
from trunkline.grammar.schema import values

Failure = Callable[[Expansion, dict[str, Any], str], list[Case]]


def expand_denied(expansion: Expansion, number: int) -> list[Case]:
    """The alternatives in which subschema `number` does not hold. Raises Unsupported, InvalidSchema."""
    content, pointer = expansion.nodes.content(number), expansion.nodes.where(number)
    cases: list[Case] = []
    for keyword, failure in FAILURES.items():
        if keyword not in content:
            continue
        try:
            found = failure(expansion, content, pointer)
            if keyword not in ("type", "const", "enum") and "type" in content:  # where the type fails, that says it
                found = expansion.product([Case().only(kinds_of(content))], found, pointer, keyword)
            cases = expansion.bounded(expansion.union(cases + found), pointer, keyword)
        except Unsupported as unsupported:
            expansion.refuse(unsupported.finding)
            return [ANYTHING]  # lenient: all that could have failed by this keyword
    return without_seen(expansion, cases)


# --- one kind of value at a time


def _strings(**fields: Any) -> Case:
    return Case(frozenset({values.STRING}), string=StringCase(**fields))


def _numbers(case: NumberCase) -> Case:
    return Case(frozenset({values.NUMBER}), number=case)


def _arrays(**fields: Any) -> Case:
    return Case(frozenset({values.ARRAY}), array=ArrayCase(**fields))


def _objects(**fields: Any) -> Case:
    return Case(frozenset({values.OBJECT}), object=ObjectCase(**fields))


def _type(expansion: Expansion, content: dict[str, Any], pointer: str) -> list[Case]:
    names = content["type"]
    kinds = ALL_KINDS - kinds_of(content)
    cases = [Case().only(kinds)] if kinds else []
    if "integer" in names and "number" not in names:
        finding = Finding(pointer, "type", "that a number is no integer can't be enforced")
        cases.append(_numbers(NumberCase(not_multiples=((Fraction(1), finding),), pointer=pointer)))
    return expansion.union(cases)


def _none_of(expansion: Expansion, listed: list[Any], pointer: str) -> list[Case]:
    """None of the listed values."""
    kinds = ALL_KINDS - {values.kind(value) for value in listed if value is None or isinstance(value, bool)}
    strings = tuple(value for value in listed if isinstance(value, str))
    numbers = tuple(values.fraction(value) for value in listed if values.kind(value) == values.NUMBER)
    cases = [
        Case(
            kinds,
            string=StringCase(excluded=strings, pointer=pointer),
            number=NumberCase(excluded=numbers, pointer=pointer),
        )
    ]
    for value in listed:
        if isinstance(value, list):
            cases = expansion.product(cases, _other_than_array(expansion, value, pointer), pointer, "enum")
        elif isinstance(value, dict):
            cases = expansion.product(cases, _other_than_object(expansion, value, pointer), pointer, "enum")
    return cases


def _other_than_array(expansion: Expansion, value: list[Any], pointer: str) -> list[Case]:
    """Another length, or one item is another."""
    nodes = expansion.nodes
    cases = [Case().only(ALL_KINDS - {values.ARRAY}), _arrays(min_items=len(value) + 1, pointer=pointer)]
    if value:
        cases.append(_arrays(max_items=len(value) - 1, pointer=pointer))
    for index, item in enumerate(value):
        other = nodes.literal(nodes.make({"const": item}, pointer), False)
        cases.append(_arrays(prefix=(ALWAYS,) * index + (other,), min_items=index + 1, pointer=pointer))
    return cases


def _other_than_object(expansion: Expansion, value: dict[str, Any], pointer: str) -> list[Case]:
    """More properties, or one is not there or another."""
    nodes = expansion.nodes
    cases = [Case().only(ALL_KINDS - {values.OBJECT}), _objects(min_properties=len(value) + 1, pointer=pointer)]
    for name, member in value.items():
        other = nodes.literal(nodes.make({"const": member}, pointer), False)
        cases.append(_objects(layers=(Layer({name: other}),), pointer=pointer))
    return cases


def _pattern(expansion: Expansion, content: dict[str, Any], pointer: str) -> list[Case]:
    try:
        found, missed = expansion.patterns.split(content["pattern"], pointer, "pattern", wide=True)
    except Unsupported as unsupported:
        return [_strings(blocked=(unsupported.finding,))]
    return [_strings(not_patterns=(one,), pointer=pointer) for one in found] + [
        _strings(patterns=(one,), pointer=pointer) for one in missed
    ]


def _format(expansion: Expansion, content: dict[str, Any], pointer: str) -> list[Case]:
    return [_strings(blocked=(Finding(pointer, "format", "which strings don't have a format is not known exactly"),))]


OPPOSITES = {
    "minimum": "exclusiveMaximum",
    "maximum": "exclusiveMinimum",
    "exclusiveMinimum": "maximum",
    "exclusiveMaximum": "minimum",
}


def _bound(keyword: str) -> Failure:
    def failure(expansion: Expansion, content: dict[str, Any], pointer: str) -> list[Case]:
        try:
            bound = values.fraction(content[keyword])
        except ValueError as error:
            return [_numbers(NumberCase(blocked=(Finding(pointer, keyword, str(error)),)))]
        if keyword == "multipleOf":
            finding = Finding(pointer, keyword, f"that a number is no multiple of {content[keyword]} can't be enforced")
            return [_numbers(NumberCase(not_multiples=((bound, finding),), pointer=pointer))]
        return [_numbers(number_case(OPPOSITES[keyword], bound, pointer))]

    return failure


# --- arrays


def _unique_items(expansion: Expansion, content: dict[str, Any], pointer: str) -> list[Case]:
    reason = "that two items must be equal can't be enforced"
    return [_arrays(min_items=2, blocked=(Finding(pointer, "uniqueItems", reason),))]


def _prefix_items(expansion: Expansion, content: dict[str, Any], pointer: str) -> list[Case]:
    return [
        _arrays(
            prefix=(ALWAYS,) * index + (expansion.nodes.literal(item, False),), min_items=index + 1, pointer=pointer
        )
        for index, item in enumerate(content["prefixItems"])
    ]


def _items(expansion: Expansion, content: dict[str, Any], pointer: str) -> list[Case]:
    """One of the items behind the first ones is not as it should be."""
    other, start = expansion.nodes.literal(content["items"], False), len(content.get("prefixItems", ()))
    if other is IMPOSSIBLE:
        return []
    if other is ALWAYS:
        return [_arrays(min_items=start + 1, pointer=pointer)]
    if not start:
        return [_arrays(min_items=1, contains=((other, 1, None),), pointer=pointer)]
    reason = "that an item behind the first ones must differ can't be enforced"
    return [
        _arrays(prefix=(ALWAYS,) * start + (other,), min_items=start + 1, pointer=pointer),
        _arrays(min_items=start + 2, blocked=(Finding(pointer, "items", reason),)),
    ]


def _contains(expansion: Expansion, content: dict[str, Any], pointer: str) -> list[Case]:
    least, item = content.get("minContains", 1), content["contains"]
    cases = []
    if least:
        cases.append(contains_case(expansion, item, 0, least - 1, pointer))
    if "maxContains" in content:
        cases.append(contains_case(expansion, item, content["maxContains"] + 1, None, pointer))
    return [Case(frozenset({values.ARRAY}), array=case) for case in cases]


# --- objects


def _required(expansion: Expansion, content: dict[str, Any], pointer: str) -> list[Case]:
    """A property is not there; or, what can be said in one breath, is not what `properties` asks for."""
    asked = content.get("properties", {})
    return [
        _objects(layers=(Layer({name: expansion.nodes.literal(asked.get(name, True), False)}),), pointer=pointer)
        for name in content["required"]
    ]


def _properties(expansion: Expansion, content: dict[str, Any], pointer: str) -> list[Case]:
    """A property is there and is not what it must be. Those that are required have been seen to."""
    cases = []
    for name, under in content["properties"].items():
        other = expansion.nodes.literal(under, False)
        if other is not IMPOSSIBLE and name not in content.get("required", ()):
            cases.append(_objects(layers=(Layer({name: other}),), required=(name,), pointer=pointer))
    return cases


def _somewhere(one: Somewhere, pointer: str) -> list[Case]:
    return [_objects(somewhere=(one,), min_properties=1, pointer=pointer)] if one.value is not IMPOSSIBLE else []


def _pattern_properties(expansion: Expansion, content: dict[str, Any], pointer: str) -> list[Case]:
    reason = "that some property whose name matches must differ can't be enforced"
    cases = []
    for source, under in content["patternProperties"].items():
        other = expansion.nodes.literal(under, False)
        try:
            pattern = expansion.patterns.one(source, pointer, "patternProperties")
        except Unsupported as unsupported:
            cases.append(_objects(blocked=(unsupported.finding,)))
            continue
        finding = Finding(pointer, "patternProperties", reason)
        cases += _somewhere(Somewhere(other, finding, pattern=pattern), pointer)
    return cases


def _additional_properties(expansion: Expansion, content: dict[str, Any], pointer: str) -> list[Case]:
    finding = Finding(pointer, "additionalProperties", "that some other property must differ can't be enforced")
    try:
        matched = tuple(
            expansion.patterns.one(source, pointer, "patternProperties", wide=True)
            for source in content.get("patternProperties", ())
        )
    except Unsupported as unsupported:
        return [_objects(blocked=(unsupported.finding,))]
    other = expansion.nodes.literal(content["additionalProperties"], False)
    named = tuple(content.get("properties", ()))
    return _somewhere(Somewhere(other, finding, outside=named, not_patterns=matched), pointer)


def _property_names(expansion: Expansion, content: dict[str, Any], pointer: str) -> list[Case]:
    finding = Finding(pointer, "propertyNames", "that some name must differ can't be enforced")
    other = expansion.nodes.literal(content["propertyNames"], False)
    return _somewhere(Somewhere(ALWAYS, finding, name=other), pointer) if other is not IMPOSSIBLE else []


def _dependent_required(expansion: Expansion, content: dict[str, Any], pointer: str) -> list[Case]:
    return [
        case
        for name, others in content["dependentRequired"].items()
        for other in others
        if other != name and (case := present([name], pointer) & absent(other, pointer))
    ]


def _dependent_schemas(expansion: Expansion, content: dict[str, Any], pointer: str) -> list[Case]:
    cases: list[Case] = []
    for name, under in content["dependentSchemas"].items():
        failing = expansion.of(under, holds=False)
        cases += expansion.product([present([name], pointer)], failing, pointer, "dependentSchemas")
    return cases


# --- keywords that apply other subschemas to the same value


def _all_of(expansion: Expansion, content: dict[str, Any], pointer: str) -> list[Case]:
    cases: list[Case] = []
    for member in content["allOf"]:
        cases = expansion.bounded(expansion.union(cases + expansion.of(member, holds=False)), pointer, "allOf")
    return cases


def _any_of(expansion: Expansion, content: dict[str, Any], pointer: str) -> list[Case]:
    """None of the branches holds."""
    cases = [ANYTHING]
    for member in content.get("anyOf") or content["oneOf"]:
        cases = expansion.product(cases, expansion.of(member, holds=False), pointer, "anyOf")
    return cases


def _one_of(expansion: Expansion, content: dict[str, Any], pointer: str) -> list[Case]:
    """No branch holds, or two do."""
    cases = _any_of(expansion, {"oneOf": content["oneOf"]}, pointer)
    for one, other in combinations(content["oneOf"], 2):
        cases = expansion.union(cases + expansion.product(expansion.of(one), expansion.of(other), pointer, "oneOf"))
    return expansion.bounded(cases, pointer, "oneOf")


def _if(expansion: Expansion, content: dict[str, Any], pointer: str) -> list[Case]:
    condition = content["if"]
    held = expansion.product(
        expansion.of(condition), expansion.of(content.get("then", True), holds=False), pointer, "then"
    )
    denied = expansion.product(
        expansion.of(condition, holds=False), expansion.of(content.get("else", True), holds=False), pointer, "else"
    )
    return expansion.union(held + denied)


def _unevaluated(keyword: str, kind: str) -> Failure:
    def failure(expansion: Expansion, content: dict[str, Any], pointer: str) -> list[Case]:
        finding = Finding(pointer, keyword, "it can't be enforced under `not`, `if` or an overlapping `oneOf`")
        blocked = _arrays(blocked=(finding,)) if kind == values.ARRAY else _objects(blocked=(finding,))
        return [blocked]

    return failure


FAILURES: dict[str, Failure] = {
    "type": _type,
    "const": lambda expansion, content, pointer: _none_of(expansion, [content["const"]], pointer),
    "enum": lambda expansion, content, pointer: _none_of(expansion, values.distinct(content["enum"]), pointer),
    "minLength": lambda expansion, content, pointer: (
        [_strings(max_length=content["minLength"] - 1, pointer=pointer)] if content["minLength"] else []
    ),
    "maxLength": lambda expansion, content, pointer: [_strings(min_length=content["maxLength"] + 1, pointer=pointer)],
    "pattern": _pattern,
    "format": _format,
    **{keyword: _bound(keyword) for keyword in (*OPPOSITES, "multipleOf")},
    "minItems": lambda expansion, content, pointer: (
        [_arrays(max_items=content["minItems"] - 1, pointer=pointer)] if content["minItems"] else []
    ),
    "maxItems": lambda expansion, content, pointer: [_arrays(min_items=content["maxItems"] + 1, pointer=pointer)],
    "uniqueItems": _unique_items,
    "prefixItems": _prefix_items,
    "items": _items,
    "contains": _contains,
    "required": _required,
    "properties": _properties,
    "patternProperties": _pattern_properties,
    "additionalProperties": _additional_properties,
    "propertyNames": _property_names,
    "minProperties": lambda expansion, content, pointer: (
        [_objects(max_properties=content["minProperties"] - 1, pointer=pointer)] if content["minProperties"] else []
    ),
    "maxProperties": lambda expansion, content, pointer: [
        _objects(min_properties=content["maxProperties"] + 1, pointer=pointer)
    ],
    "dependentRequired": _dependent_required,
    "dependentSchemas": _dependent_schemas,
    "allOf": _all_of,
    "anyOf": _any_of,
    "oneOf": _one_of,
    "not": lambda expansion, content, pointer: expansion.of(content["not"]),
    "$ref": lambda expansion, content, pointer: expansion.of(
        expansion.nodes.schema.resolve(content["$ref"]), holds=False
    ),
    "if": _if,
    "unevaluatedItems": _unevaluated("unevaluatedItems", values.ARRAY),
    "unevaluatedProperties": _unevaluated("unevaluatedProperties", values.OBJECT),
}
