"""What a subschema means where it must hold: its keywords as cases. negation.py has the opposite."""

import json
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

from trunkline.grammar.algebra.cases import (
    ANY_ARRAY,
    ANY_NUMBER,
    ANY_OBJECT,
    ANY_STRING,
    ANYTHING,
    ArrayCase,
    Case,
    NumberCase,
    ObjectCase,
    StringCase,
)
from trunkline.grammar.algebra.evaluate import Seen
from trunkline.grammar.algebra.expansion import Expansion, absent, kinds_of, listed_values, present
from trunkline.grammar.algebra.names import name_layers
from trunkline.grammar.algebra.nodes import ALWAYS, IMPOSSIBLE, Conjunction, parts
from trunkline.grammar.algebra.oneof import exactly_one
from trunkline.grammar.interface import Finding, Unsupported
from trunkline.grammar.schema import values
from trunkline.grammar.schema.normalize import Schema

STRING_KEYWORDS = ("minLength", "maxLength", "pattern", "format")
NUMBER_KEYWORDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
ARRAY_KEYWORDS = ("prefixItems", "items", "minItems", "maxItems", "uniqueItems", "contains")
OBJECT_KEYWORDS = (
    "properties",
    "patternProperties",
    "additionalProperties",
    "propertyNames",
    "required",
    "minProperties",
    "maxProperties",
)
MOST_TOGETHER = 4  # branches of an anyOf of which every combination is followed, where it matters what they evaluate
PLAIN_KEYWORDS = frozenset(("type", *STRING_KEYWORDS, *NUMBER_KEYWORDS, *ARRAY_KEYWORDS, *OBJECT_KEYWORDS))


def expand_held(expansion: Expansion, number: int) -> list[Case]:
    """The alternatives in which subschema `number` holds. Raises Unsupported, InvalidSchema."""
    content, pointer = expansion.nodes.content(number), expansion.nodes.where(number)
    if listed_values(content) is not None:
        return _listed(expansion, content)
    cases, is_plain_done = [ANYTHING], False
    for keyword in content:  # in the order in which they are written: it decides that of the properties
        try:
            if keyword in PLAIN_KEYWORDS:
                if is_plain_done:
                    continue
                is_plain_done, found = True, _plain(expansion, content, pointer)
            elif keyword in APPLICATORS:
                found = APPLICATORS[keyword](expansion, content, pointer)
            else:
                continue
            cases = expansion.product(cases, found, pointer, keyword)
        except Unsupported as unsupported:
            expansion.refuse(unsupported.finding)
    if "unevaluatedProperties" in content or "unevaluatedItems" in content:
        cases = expansion.union(
            filter(None, (_without_unevaluated(expansion, content, pointer, case) for case in cases))
        )
    return cases


def _listed(expansion: Expansion, content: dict[str, Any]) -> list[Case]:
    """`const` or `enum`: the listed values for which the rest holds."""
    by_seen: dict[tuple[str, Seen], list[Any]] = {}
    for value in listed_values(content) or ():
        seen = expansion.evaluator.see(value, content, sure=True)
        if seen is not None:
            what = values.kind(value) if seen else ""
            by_seen.setdefault((what, seen), []).append(value)
    result = []
    for (what, seen), kept in by_seen.items():
        names = frozenset(name for name in seen if isinstance(name, str))
        first = next((index for index in range(len(seen) + 1) if index not in seen), 0) if what == values.ARRAY else 0
        result.append(Case(values=values.texts(kept), array=ArrayCase(seen=first), object=ObjectCase(seen=names)))
    return result


# --- keywords that say something of one kind of value each


def _plain(expansion: Expansion, content: dict[str, Any], pointer: str) -> list[Case]:
    kinds = kinds_of(content)
    said = content.keys()
    integers = "type" in content and "number" not in content["type"] and "integer" in content["type"]
    case = Case(
        kinds,
        _string(expansion, content, pointer) if said & STRING_KEYWORDS and values.STRING in kinds else ANY_STRING,
        _number(content, pointer, integers) if values.NUMBER in kinds else ANY_NUMBER,
        _array(expansion, content, pointer) if said & ARRAY_KEYWORDS and values.ARRAY in kinds else ANY_ARRAY,
        _object(expansion, content, pointer) if said & OBJECT_KEYWORDS and values.OBJECT in kinds else ANY_OBJECT,
    )
    tidy = case.tidied()
    if tidy is not None and values.OBJECT in tidy.kinds:
        layers = tidy.object.layers
        if any(expansion.conflicts(expansion.patterns.under(layers, name)) for name in tidy.object.required):
            tidy = tidy.without_objects()
    return [tidy] if tidy is not None else []


def _string(expansion: Expansion, content: dict[str, Any], pointer: str) -> StringCase:
    found: tuple[str, ...] = ()
    missed: tuple[str, ...] = ()
    blocked: tuple[Finding, ...] = ()
    if "pattern" in content:
        try:
            found, missed = expansion.patterns.split(content["pattern"], pointer, "pattern")
        except Unsupported as unsupported:
            blocked = (unsupported.finding,)
    return StringCase(
        min_length=content.get("minLength", 0),
        max_length=content.get("maxLength"),
        patterns=found,
        not_patterns=missed,
        formats=(content["format"],) if "format" in content else (),
        blocked=blocked,
        pointer=pointer,
    )


def _number(content: dict[str, Any], pointer: str, integers: bool) -> NumberCase:
    if not integers and not content.keys() & NUMBER_KEYWORDS:
        return ANY_NUMBER
    case = NumberCase(integer=integers, pointer=pointer).tidied()
    for keyword in NUMBER_KEYWORDS:
        if keyword in content:
            try:
                case &= number_case(keyword, values.fraction(content[keyword]), pointer)
            except ValueError as error:
                case &= NumberCase(blocked=(Finding(pointer, keyword, str(error)),))
    return case


def number_case(keyword: str, bound: Fraction, pointer: str) -> NumberCase:
    """The numbers that satisfy one keyword."""
    if keyword == "multipleOf":
        return NumberCase(multiple_of=bound, pointer=pointer).tidied()
    if keyword in ("minimum", "exclusiveMinimum"):
        return NumberCase(minimum=bound, exclusive_minimum=keyword == "exclusiveMinimum", pointer=pointer)
    return NumberCase(maximum=bound, exclusive_maximum=keyword == "exclusiveMaximum", pointer=pointer)


def _array(expansion: Expansion, content: dict[str, Any], pointer: str) -> ArrayCase:
    nodes = expansion.nodes
    prefix = tuple(nodes.literal(item) for item in content.get("prefixItems", ()))
    case = ArrayCase(
        prefix=prefix,
        rest=nodes.literal(content.get("items", True)),
        min_items=content.get("minItems", 0),
        max_items=content.get("maxItems"),
        unique=content.get("uniqueItems", False),
        pointer=pointer,
    )
    if nodes.has_unevaluated:
        case = replace(case, seen=None if "items" in content else len(prefix))
    if "contains" in content:
        least = content.get("minContains", 1)
        most = content.get("maxContains")
        case &= contains_case(expansion, content["contains"], least, most, pointer)
        if nodes.has_unevaluated:
            case = replace(case, seen_contained=(nodes.literal(content["contains"]),))
    return case


def contains_case(expansion: Expansion, item: Schema, least: int, most: int | None, pointer: str) -> ArrayCase:
    """Arrays of which at least and at most so many items are valid under `item`."""
    what = expansion.nodes.literal(item)
    if what is ALWAYS:
        return ArrayCase(min_items=least, max_items=most, pointer=pointer)
    if what is IMPOSSIBLE:
        return ArrayCase(min_items=least, max_items=0 if least else None, pointer=pointer)
    if most == 0 and least == 0:
        return ArrayCase(rest=expansion.nodes.literal(item, False), pointer=pointer)
    if most is not None and not is_exact(expansion, item):
        reason = "how many items are valid can't be counted: some may be whose validity is not known exactly"
        return ArrayCase(min_items=least, blocked=(Finding(pointer, "contains", reason),))
    counted = ((what, least, most),) if least or most is not None else ()
    return ArrayCase(min_items=least, contains=counted, pointer=pointer)


EXACT_KEYWORDS = frozenset(
    (
        "type",
        "const",
        "enum",
        *("allOf", "anyOf"),
        *("minLength", "maxLength", "pattern"),
        *NUMBER_KEYWORDS,
        *("prefixItems", "items", "minItems", "maxItems"),
        *("properties", "required", "minProperties", "maxProperties"),
    )
)


def is_exact(expansion: Expansion, schema: Schema) -> bool:
    """Whether the forms of a subschema will stand for all its values, not for fewer. Only plain ones are said to."""
    if isinstance(schema, bool):
        return True
    if not schema.keys() <= EXACT_KEYWORDS:
        return False
    if "pattern" in schema and not expansion.patterns.is_clear(schema["pattern"]):
        return False
    return all(is_exact(expansion, part) for part in parts(schema))


def _object(expansion: Expansion, content: dict[str, Any], pointer: str) -> ObjectCase:
    nodes, patterns = expansion.nodes, expansion.patterns
    named = {name: nodes.literal(under) for name, under in content.get("properties", {}).items()}
    matched: list[tuple[str, Conjunction]] = []
    blocked: list[Finding] = []
    additional = nodes.literal(content.get("additionalProperties", True))
    for source, under in content.get("patternProperties", {}).items():
        try:
            pattern = patterns.for_names(source, additional, pointer, "patternProperties")
            matched.append((pattern, nodes.literal(under)))
        except Unsupported as unsupported:
            blocked.append(unsupported.finding)
    layers = []
    if named or matched or additional is not ALWAYS:
        layers.append(patterns.layer(named, tuple(matched), additional))
    if "propertyNames" in content:
        try:
            layers += name_layers(expansion, nodes.literal(content["propertyNames"]), pointer)
        except Unsupported as unsupported:
            blocked.append(unsupported.finding)
    tracked = nodes.has_unevaluated
    return ObjectCase(
        layers=tuple(layers),
        required=tuple(dict.fromkeys(content.get("required", ()))),
        min_properties=content.get("minProperties", 0),
        max_properties=content.get("maxProperties"),
        seen=(None if "additionalProperties" in content else frozenset(named)) if tracked else frozenset(),
        seen_patterns=frozenset(pattern for pattern, _ in matched) if tracked else frozenset(),
        blocked=tuple(blocked),
        pointer=pointer,
    )


# --- keywords that apply other subschemas to the same value


def without_seen(expansion: Expansion, cases: list[Case]) -> list[Case]:
    """The same, without what was evaluated: that counts only where a subschema holds."""
    if not expansion.nodes.has_unevaluated:
        return cases
    return expansion.union(
        replace(
            case,
            array=replace(case.array, seen=0, seen_contained=()),
            object=replace(case.object, seen=frozenset(), seen_patterns=frozenset()),
        )
        for case in cases
    )


def _all_of(expansion: Expansion, content: dict[str, Any], pointer: str) -> list[Case]:
    cases = [ANYTHING]
    for member in content["allOf"]:
        try:
            cases = expansion.product(cases, expansion.of(member), pointer, "allOf")
        except Unsupported as unsupported:
            expansion.refuse(unsupported.finding)  # lenient: all but this one
    return cases


def _any_of(expansion: Expansion, content: dict[str, Any], pointer: str) -> list[Case]:
    cases: list[Case] = []
    for member in content["anyOf"]:
        found = expansion.of(member)
        if expansion.nodes.has_unevaluated and len(content["anyOf"]) <= MOST_TOGETHER:
            found = found + expansion.product(cases, found, pointer, "anyOf")  # both hold, and both evaluate
        cases = expansion.bounded(expansion.union(cases + found), pointer, "anyOf")
    return cases


def _if(expansion: Expansion, content: dict[str, Any], pointer: str) -> list[Case]:
    condition, then, otherwise = content["if"], content.get("then", True), content.get("else", True)
    if then is True and otherwise is True:
        return expansion.union([*expansion.of(condition), ANYTHING]) if expansion.nodes.has_unevaluated else [ANYTHING]
    if then is True and not expansion.nodes.has_unevaluated:  # "A, or not A and B" is "A or B"
        return expansion.union(expansion.of(condition) + expansion.of(otherwise))
    held = expansion.product(expansion.of(condition), expansion.of(then), pointer, "then")
    denied = expansion.product(expansion.of(condition, holds=False), expansion.of(otherwise), pointer, "else")
    return expansion.union(held + denied)


def _dependent_required(expansion: Expansion, content: dict[str, Any], pointer: str) -> list[Case]:
    cases = [ANYTHING]
    for name, others in content["dependentRequired"].items():
        if others and others != [name]:
            ways = [absent(name, pointer), present([name, *others], pointer)]
            cases = expansion.product(cases, ways, pointer, "dependentRequired")
    return cases


def _dependent_schemas(expansion: Expansion, content: dict[str, Any], pointer: str) -> list[Case]:
    cases = [ANYTHING]
    for name, under in content["dependentSchemas"].items():
        there = expansion.product([present([name], pointer)], expansion.of(under), pointer, "dependentSchemas")
        cases = expansion.product(cases, [absent(name, pointer), *there], pointer, "dependentSchemas")
    return cases


APPLICATORS: dict[str, Callable[[Expansion, dict[str, Any], str], list[Case]]] = {
    "$ref": lambda expansion, content, pointer: expansion.of(expansion.nodes.schema.resolve(content["$ref"])),
    "allOf": _all_of,
    "anyOf": _any_of,
    "oneOf": exactly_one,
    "not": lambda expansion, content, pointer: without_seen(expansion, expansion.of(content["not"], holds=False)),
    "if": _if,
    "dependentRequired": _dependent_required,
    "dependentSchemas": _dependent_schemas,
}


# --- what no other keyword has looked at


def _without_unevaluated(expansion: Expansion, content: dict[str, Any], pointer: str, case: Case) -> Case | None:
    if case.values is not None:
        read = [json.loads(text) for text in case.values]
        kept = [value for value in read if expansion.evaluator.is_valid(value, content, sure=True)]
        return (
            Case(values=values.texts(kept), object=ObjectCase(seen=None), array=ArrayCase(seen=None)) if kept else None
        )
    array, properties = case.array, case.object
    if "unevaluatedItems" in content and values.ARRAY in case.kinds and array.seen is not None:
        under = content["unevaluatedItems"]
        if array.seen_contained:
            ways = [expansion.nodes.schema_of(one) for one in array.seen_contained]
            under = expansion.nodes.make({"anyOf": [*ways, under]}, pointer)
        more = ArrayCase(prefix=(ALWAYS,) * array.seen, rest=expansion.nodes.literal(under), pointer=pointer)
        array = replace(array & more, seen=None)
    if "unevaluatedProperties" in content and values.OBJECT in case.kinds and properties.seen is not None:
        layer = expansion.patterns.layer(
            dict.fromkeys(sorted(properties.seen), ALWAYS),
            tuple((pattern, ALWAYS) for pattern in sorted(properties.seen_patterns)),
            expansion.nodes.literal(content["unevaluatedProperties"]),
        )
        properties = replace(properties & ObjectCase(layers=(layer,), pointer=pointer), seen=None)
    return replace(case, array=array, object=properties).tidied()
