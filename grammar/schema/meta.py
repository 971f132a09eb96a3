"""The first gate: whether something is a JSON schema at all, and one of bounded size.

    check('{"type": "object", "properties": {"age": {"type": "integer"}}}')     the value, keys in order
    check('{"properties": {"age": {"type": "int"}}}')                           InvalidSchema /properties/age: type: …

What a schema means, and whether it can be followed, is not asked here; nor is any library. The rules are those of the meta-schemas of
draft 4 to 2020-12, except that values of annotations are not looked at, and that sloppiness without consequence passes
(names twice in `required`, true and false as schemas in draft 4).
"""

import json
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from trunkline.errors import shown
from trunkline.grammar.interface import InvalidSchema
from trunkline.grammar.regex import pattern
from trunkline.grammar.schema.keywords import LARGEST_COUNT, TOO_OLD, Draft, beside_ref, known, token
from trunkline.grammar.schema.references import Document, Place

LARGEST_TEXT = 1_000_000  # bytes of UTF-8
MOST_VALUES = 20_000  # JSON values in a schema, itself included
DEEPEST_SCHEMA = 64  # schemas inside schemas
DEEPEST_JSON = 128  # objects and lists inside each other
MOST_DIGITS = 400
LONGEST_POINTER = 2_000  # characters of the way to a schema
LONGEST_PATTERNS = 200_000  # characters of all regular expressions together

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")


def check(schema: str | dict[str, Any] | bool) -> dict[str, Any] | bool:
    """A schema, as JSON text or as a value, as a fresh value. Raises InvalidSchema.

    Nothing of the schema is repeated in an error, other than names and values of at most 80 characters.
    """
    text = schema if isinstance(schema, str) else _to_text(schema)
    value = _parse(text)
    if not isinstance(value, dict | bool):
        raise InvalidSchema("", "schema", f"it is {_kind(value)}; a schema is an object, true or false")
    _check_data(value)
    if isinstance(value, dict):
        uri = value.get("$schema")
        if isinstance(uri, str) and uri.partition("://")[2].startswith(TOO_OLD):
            raise InvalidSchema("", "$schema", "drafts before draft 4 are not read")
        Document(value, _Visitor().visit).check_cycles()
    return value


# JSON


def _to_text(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)[:80]
        raise InvalidSchema("", "schema", f"it is no JSON: {reason}") from None


def _parse(text: str) -> Any:
    # A surrogate cannot be encoded; whether one is there is found out below, where it also has a place.
    size = len(text) if len(text) > LARGEST_TEXT else len(text.encode("utf-8", "surrogatepass"))
    if size > LARGEST_TEXT:
        raise InvalidSchema("", "schema", f"it has {size} bytes; at most {LARGEST_TEXT} are read")
    try:
        return _DECODER.decode(text)
    except json.JSONDecodeError as error:
        reason = f"it is no JSON: {error.msg[:80]} (line {error.lineno}, column {error.colno})"
        raise InvalidSchema("", "schema", reason) from None
    except RecursionError:
        raise InvalidSchema("", "schema", f"it is nested too deeply; at most {DEEPEST_JSON} levels are read") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise InvalidSchema("", "schema", f"it has the key {shown(key)} twice in one object")
            seen.add(key)
    return value


def _integer(digits: str) -> int:
    if len(digits) > MOST_DIGITS + 1:
        raise InvalidSchema("", "schema", f"it has a number of {len(digits)} digits; at most {MOST_DIGITS} are read")
    return int(digits)


def _number(digits: str) -> float:
    """As a float, if it is one: not if it is too large for one, or so small that it became 0."""
    value = float(digits)
    mantissa = re.split("[eE]", digits)[0]
    if len(digits) > MOST_DIGITS or math.isinf(value) or (value == 0 and mantissa.strip("-0.")):
        raise InvalidSchema("", "schema", f"it has the number {shown(digits)[1:-1]}, which no float holds")
    return value


def _constant(name: str) -> float:
    raise InvalidSchema("", "schema", f"it holds {name}, which is no JSON")


_DECODER = json.JSONDecoder(
    object_pairs_hook=_object, parse_int=_integer, parse_float=_number, parse_constant=_constant, strict=True
)


class _Within(NamedTuple):
    """Where a value is: a step from where the value around it is. Only errors need to spell it."""

    around: "_Within | None"
    step: str | int

    def pointer(self) -> str:
        steps: list[str] = []
        at: _Within | None = self
        while at is not None:
            steps.append(token(at.step)[:LONGEST_POINTER])
            at = at.around
        return "".join(reversed(steps))[:LONGEST_POINTER]


def _check_data(schema: Any) -> None:
    """What holds for all of it, data included: size, depth, text that can be encoded."""
    waiting: list[tuple[Any, _Within | None, int]] = [(schema, None, 1)]
    num_values = 0
    while waiting:
        value, within, depth = waiting.pop()
        num_values += 1
        if num_values > MOST_VALUES:
            raise InvalidSchema("", "schema", f"it has more than {MOST_VALUES} values")
        if depth > DEEPEST_JSON:
            raise InvalidSchema("", "schema", f"it is nested too deeply; at most {DEEPEST_JSON} levels are read")
        wrong = ""
        if isinstance(value, dict):
            waiting += [(item, _Within(within, key), depth + 1) for key, item in value.items()]
            if not all(map(_is_text, value)):
                wrong = "it has a key with half of a surrogate pair, which is no character"
        elif isinstance(value, list):
            waiting += [(item, _Within(within, index), depth + 1) for index, item in enumerate(value)]
        elif isinstance(value, str) and not _is_text(value):
            wrong = "it holds half of a surrogate pair, which is no character"
        if wrong:
            raise InvalidSchema(within.pointer() if within else "", "schema", wrong)


def _is_text(value: str) -> bool:
    return value.isascii() or not any("\ud800" <= character <= "\udfff" for character in value)


# Keywords


def _kind(value: Any) -> str:
    """How a sentence says what a value is."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list"
    return shown(value) if isinstance(value, str) else json.dumps(value)[:80]


class _Visitor:
    """Looks at one schema after the other."""

    def __init__(self) -> None:
        self.patterns_left = LONGEST_PATTERNS

    def visit(self, node: dict[str, Any], place: Place) -> None:
        """Raises InvalidSchema."""
        if len(place.pointer) > LONGEST_POINTER:
            reason = f"it stands behind names of {len(place.pointer)} characters; at most {LONGEST_POINTER} are read"
            raise InvalidSchema(place.pointer[:LONGEST_POINTER], "schema", reason)
        if place.depth > DEEPEST_SCHEMA:
            reason = f"it is nested too deeply; at most {DEEPEST_SCHEMA} schemas may stand inside each other"
            raise InvalidSchema(place.pointer, "schema", reason)
        matched = node.get("patternProperties")
        for source in (node.get("pattern"), *(matched if isinstance(matched, dict) else ())):
            self.patterns_left -= len(source) if isinstance(source, str) else 0
        if self.patterns_left < 0:
            reason = f"it comes after regular expressions of {LONGEST_PATTERNS} characters; no more are read"
            raise InvalidSchema(place.pointer, "pattern", reason)
        _check_node(node, place)


def _check_node(node: dict[str, Any], place: Place) -> None:
    """The values of all keywords of one schema that its draft has."""
    names = beside_ref(node, place.draft)
    for name, value in node.items():
        keyword = known(name, place.draft) if names is None or name in names else None
        if keyword is not None:
            wanted = CHECKS[keyword.value](value, place, name)
            if wanted:
                raise InvalidSchema(place.pointer, name, f"it is {_kind(value)}; it must be {wanted}")
    if "prefixItems" in node and isinstance(node.get("items"), list) and known("prefixItems", place.draft):
        raise InvalidSchema(place.pointer, "items", "it is a list beside prefixItems; one of them must go")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_schema(value: Any) -> bool:
    return isinstance(value, dict | bool)


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


# Each gives what the value must be, or "" if it is that.
Check = Callable[[Any, Place, str], str]


def _plain(is_right: Callable[[Any], bool], wanted: str) -> Check:
    return lambda value, place, name: "" if is_right(value) else wanted


def _check_count(value: Any, place: Place, name: str) -> str:
    if not _is_number(value) or value < 0 or value != int(value):
        return "a whole number from 0 on"
    return "" if value <= LARGEST_COUNT or name.startswith("max") else "at most 2**30: no text is longer"


def _check_bound(value: Any, place: Place, name: str) -> str:
    if place.draft is Draft.DRAFT_4:
        return "" if isinstance(value, bool) else "true or false in draft 4"
    if place.draft is Draft.UNSTATED and isinstance(value, bool):
        return ""
    return "" if _is_number(value) else "a number"


def _check_types(value: Any, place: Place, name: str) -> str:
    names = value if isinstance(value, list) else [value]
    for one in names:
        if not isinstance(one, str) or one not in TYPES:
            raise InvalidSchema(place.pointer, name, f"it has {_kind(one)}; there are {', '.join(TYPES)}")
    return "" if names else "one of " + ", ".join(TYPES) + ", or a list of some"


def _check_values(value: Any, place: Place, name: str) -> str:
    if value == []:
        raise InvalidSchema(place.pointer, name, "it is empty, so nothing satisfies it")
    return "" if isinstance(value, list) else "a list of values"


def _check_pattern(value: Any, place: Place, name: str) -> str:
    if not isinstance(value, str):
        return "a string"
    pattern.check(value, pointer=place.pointer, keyword=name)
    return ""


def _check_schemas(value: Any, place: Place, name: str) -> str:
    if not isinstance(value, list) or not value:
        return "a list of at least one schema"
    return _each_schema(enumerate(value), place, name)


def _check_schema_map(value: Any, place: Place, name: str) -> str:
    if not isinstance(value, dict):
        return "an object of schemas"
    return _each_schema(value.items(), place, name)


def _check_pattern_map(value: Any, place: Place, name: str) -> str:
    wanted = _check_schema_map(value, place, name)
    if not wanted:
        for source in value:
            pattern.check(source, pointer=place.pointer + token(name) + token(source), keyword=name)
    return wanted


def _each_schema(items: Any, place: Place, name: str) -> str:
    for key, item in items:
        if not _is_schema(item):
            where = place.pointer + token(name) + token(key)
            raise InvalidSchema(where, name, f"it is {_kind(item)}; a schema is an object, true or false")
    return ""


def _check_items(value: Any, place: Place, name: str) -> str:
    if not isinstance(value, list):
        return "" if _is_schema(value) else "a schema"
    if place.draft is Draft.DRAFT_2020_12:
        return "a schema in draft 2020-12; the first items are prefixItems"
    return _each_schema(enumerate(value), place, name)


def _check_dependencies(value: Any, place: Place, name: str) -> str:
    if not isinstance(value, dict):
        return "an object of schemas and lists of names"
    for key, item in value.items():
        if not _is_schema(item) and not _is_names(item):
            where = place.pointer + token(name) + token(key)
            raise InvalidSchema(where, name, f"it is {_kind(item)}; it must be a schema or a list of names")
    return ""


def _check_names_map(value: Any, place: Place, name: str) -> str:
    if not isinstance(value, dict):
        return "an object of lists of names"
    for key, item in value.items():
        if not _is_names(item):
            where = place.pointer + token(name) + token(key)
            raise InvalidSchema(where, name, f"it is {_kind(item)}; it must be a list of names")
    return ""


CHECKS: dict[str, Check] = {
    "uri": _plain(lambda value: isinstance(value, str), "a string"),
    "name": _plain(lambda value: isinstance(value, str) and bool(re.fullmatch(r"[A-Za-z_][\w.-]*", value)), "a name"),
    "text": _plain(lambda value: isinstance(value, str), "a string"),
    "boolean": _plain(lambda value: isinstance(value, bool), "true or false"),
    "number": _plain(_is_number, "a number"),
    "positive number": _plain(lambda value: _is_number(value) and value > 0, "a number greater than 0"),
    "value": _plain(lambda value: True, ""),
    "count": _check_count,
    "bound": _check_bound,
    "types": _check_types,
    "values": _check_values,
    "pattern": _check_pattern,
    "names": _plain(_is_names, "a list of names"),
    "names map": _check_names_map,
    "schema": _plain(_is_schema, "a schema: an object, true or false"),
    "schemas": _check_schemas,
    "schema map": _check_schema_map,
    "pattern map": _check_pattern_map,
    "items": _check_items,
    "dependencies": _check_dependencies,
}
