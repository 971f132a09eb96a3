"""The last gate: is a finished text valid under the schema as it was sent? Asked of `jsonschema`, which shares no code with us.

    check = PostCheck({"type": "object", "required": ["a"]})
    check.check('{"a": 1}')      # Verdict(valid=True)
    check.check('{"b": 1}')      # Verdict(valid=False, error="The text is not valid under 'required' of the schema, at /required.")
    check.check('[[[[…')         # Verdict(valid=None): could not be checked within its limits, so nothing is claimed

Three things are done otherwise than jsonschema does them by itself:

- Numbers are decimal, as they are written: 0.07 is a multiple of 0.01.
- Patterns run in the `regex` package, which can be stopped, and not in `re`, which cannot. So does everything else: there
  is one deadline for a text.
- A reference that leads out of the schema is never followed.

And a schema with a part in another draft is not checked at all: jsonschema would need a validator for each.

Knows no tokens, no engine and no HTTP. jsonschema is imported when the first text is checked.
"""

import functools
import json
import logging
import re
import time
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from decimal import Decimal
from enum import Enum, auto
from fractions import Fraction
from typing import Any, NamedTuple

from trunkline.grammar.schema.keywords import Draft, draft_of

logger = logging.getLogger("trunkline.grammar")

CHECK_SECONDS = 2.0  # for one text
LONGEST_INTEGER = 4000  # digits that Python makes an int of; it refuses more than 4300
LARGEST_EXPONENT = 4000  # of a number whose divisibility is looked at
MAX_SHOWN = 200  # characters of a pointer in a verdict

# Keywords whose values are data, or names of things: nothing in them is a schema.
_DATA = frozenset({"const", "default", "enum", "examples", "example"})
# Those whose values are schemas by name.
_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"})

_deadline: ContextVar[float] = ContextVar("deadline")


class _Reading(Enum):
    """What a value in a schema is."""

    SCHEMA = auto()
    BY_NAME = auto()  # schemas by name
    DATA = auto()


class Verdict(NamedTuple):
    """What was found.

    valid  None: it could not be checked
    error  a sentence, if it is not valid: where in the text, and the keyword that it breaks
    """

    valid: bool | None
    error: str | None = None


UNCHECKED = Verdict(None)


class _Unchecked(Exception):
    """Within the limits it cannot be said."""


class PostCheck:
    """Checks texts against one schema. Thread-safe.

    schema   an object or a boolean: JSON as it was sent, numbers in whatever type
    seconds  for one text
    """

    def __init__(self, schema: Any, *, seconds: float = CHECK_SECONDS) -> None:
        self._seconds = seconds
        self._schema = _exact(schema, _Reading.SCHEMA)
        self._validator: Any = None  # made when the first text comes
        self._draft = draft_of(schema)
        self._is_mixed = _is_mixed(schema)

    def check(self, text: str) -> Verdict:
        """Whether a whole text is JSON and valid. Never raises."""
        try:
            value = _parse(text)
        except ValueError as error:
            return Verdict(False, f"The text is not JSON: {error}.")
        except (RecursionError, ArithmeticError):  # nested too deeply; an exponent that no number can have
            return UNCHECKED
        if self._is_mixed:
            return UNCHECKED
        token = _deadline.set(time.monotonic() + self._seconds)
        try:
            if self._validator is None:
                self._validator = _make_validator(self._draft, self._schema)
            found = next(self._validator.iter_errors(value), None)
        except (_Unchecked, RecursionError, TimeoutError):
            return UNCHECKED
        except Exception:  # jsonschema's own, e.g. of a reference that leads nowhere
            logger.exception("A text could not be checked against its schema.")
            return UNCHECKED
        finally:
            _deadline.reset(token)
        return Verdict(True) if found is None else Verdict(False, _sentence(found))


def _parse(text: str) -> Any:
    """JSON, strictly; of equal keys the last one counts, as for every reader. Raises ValueError and RecursionError."""
    try:
        return json.loads(text, parse_float=Decimal, parse_int=_integer, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg.removesuffix(' at')} at character {error.pos}") from None


def _integer(digits: str) -> int | Decimal:
    return int(digits) if len(digits) <= LONGEST_INTEGER else Decimal(digits)


def _no_constant(name: str) -> Any:
    raise ValueError(f"it holds {name}")


def _exact(node: Any, reading: _Reading) -> Any:
    """A copy with Decimals for floats and, in schemas, without `$schema`, by which jsonschema would choose another
    validator than ours for what is below it, and without booleans where older drafts have none, which jsonschema
    trips over: by name, and as `items`. (Of `false` by name it would not tell where it stands, either.)"""
    if isinstance(node, float | Fraction):
        return Decimal(repr(node)) if isinstance(node, float) else Decimal(node.numerator) / Decimal(node.denominator)
    if isinstance(node, list | tuple):
        return [_exact(item, reading) for item in node]
    if not isinstance(node, Mapping):
        return node
    return {
        key: _exact(_as_object(value) if _is_one_schema(reading, key) else value, _inside(reading, key))
        for key, value in node.items()
        if not (reading is _Reading.SCHEMA and key == "$schema" and isinstance(value, str))
    }


def _is_one_schema(reading: _Reading, key: str) -> bool:
    """The value at a key is a schema, of those where a boolean would be tripped over. (`items` may be a list, too.)"""
    return reading is _Reading.BY_NAME or (reading is _Reading.SCHEMA and key == "items")


def _as_object(schema: Any) -> Any:
    if isinstance(schema, bool):
        return {} if schema else {"not": {}}
    return schema


def _inside(reading: _Reading, key: str) -> _Reading:
    """What the value at a key is."""
    if reading is _Reading.BY_NAME:
        return _Reading.SCHEMA
    if reading is _Reading.DATA or key in _DATA:
        return _Reading.DATA
    return _Reading.BY_NAME if key in _BY_NAME else _Reading.SCHEMA


def _is_mixed(schema: Any) -> bool:
    """Whether a part of a schema, one that has a URI of its own, states another draft than the whole."""
    draft = draft_of(schema)
    unread = [(schema, _Reading.SCHEMA)]
    while unread:
        node, reading = unread.pop()
        if isinstance(node, list | tuple):
            unread.extend((item, reading) for item in node)
        elif isinstance(node, Mapping):
            is_resource = reading is _Reading.SCHEMA and ("$id" in node or "id" in node)
            if is_resource and draft_of(node, draft) is not draft:
                return True
            unread.extend((value, _inside(reading, key)) for key, value in node.items())
    return False


# The names of jsonschema's validators.
_VALIDATORS = {
    Draft.DRAFT_4: "Draft4Validator",
    Draft.DRAFT_6: "Draft6Validator",
    Draft.DRAFT_7: "Draft7Validator",
    Draft.DRAFT_2019_09: "Draft201909Validator",
    Draft.DRAFT_2020_12: "Draft202012Validator",
    Draft.UNSTATED: "Draft202012Validator",
}


def _make_validator(draft: Draft, schema: Any) -> Any:
    import jsonschema
    import referencing

    base = getattr(jsonschema, _VALIDATORS[draft])
    keywords: dict[str, Any] = {**base.VALIDATORS, **(_older_keywords() if draft is Draft.UNSTATED else {})}
    own: dict[str, Any] = {
        "pattern": _pattern,
        "patternProperties": _pattern_properties,
        "additionalProperties": _additional_properties,
        "multipleOf": _multiple_of,
        "divisibleBy": _multiple_of,
        "uniqueItems": _unique_items,
        "format": _format,
    }
    if _is_used(schema, "patternProperties"):
        own["unevaluatedProperties"] = _refuse  # jsonschema would look for the patterns with `re`
    timed = {name: _timed(own.get(name, keyword)) for name, keyword in keywords.items()}
    types = base.TYPE_CHECKER.redefine("number", _is_number)
    if draft is not Draft.DRAFT_4:  # there 1.0 is no integer
        types = types.redefine("integer", _is_integer)
    kind = jsonschema.validators.extend(base, timed, type_checker=types)
    # A registry of our own: the default one would fetch what a reference names.
    registry: Any = referencing.Registry()
    return kind(schema, registry=registry, format_checker=base.FORMAT_CHECKER)


def _older_keywords() -> dict[str, Any]:
    """What older drafts spell otherwise, for schemas that declare none: their authors mean it all the same."""
    import jsonschema

    newest = jsonschema.Draft202012Validator.VALIDATORS
    older, oldest = jsonschema.Draft7Validator.VALIDATORS, jsonschema.Draft4Validator.VALIDATORS

    def items(validator: Any, value: Any, instance: Any, schema: Any) -> Any:
        return (older if isinstance(value, list) else newest)["items"](validator, value, instance, schema)

    def bound(name: str, exclusive: str) -> Any:
        def check(validator: Any, value: Any, instance: Any, schema: Any) -> Any:
            is_flag = isinstance(schema.get(exclusive), bool)
            return (oldest if is_flag else newest)[name](validator, value, instance, schema)

        return check

    def unless_flag(name: str) -> Any:
        def check(validator: Any, value: Any, instance: Any, schema: Any) -> Any:
            return () if isinstance(value, bool) else newest[name](validator, value, instance, schema)

        return check

    return {
        "items": items,
        "additionalItems": older["additionalItems"],
        "dependencies": older["dependencies"],
        "minimum": bound("minimum", "exclusiveMinimum"),
        "maximum": bound("maximum", "exclusiveMaximum"),
        "exclusiveMinimum": unless_flag("exclusiveMinimum"),
        "exclusiveMaximum": unless_flag("exclusiveMaximum"),
    }


def _is_used(node: Any, keyword: str) -> bool:
    """Whether a key of this name is anywhere in a schema: the keyword, or a property that is called so."""
    unread = [node]
    while unread:
        node = unread.pop()
        if isinstance(node, Mapping):
            if keyword in node:
                return True
            unread.extend(node.values())
        elif isinstance(node, list):
            unread.extend(node)
    return False


def _timed(keyword: Any) -> Any:
    def check(validator: Any, value: Any, instance: Any, schema: Any) -> Any:
        if time.monotonic() >= _deadline.get():
            raise _Unchecked
        return keyword(validator, value, instance, schema)

    return check


def _sentence(error: Any) -> str:
    """Without the words of jsonschema, which repeat the text and the schema."""
    place = _pointer(error.absolute_path)
    what = f"The value at {place}" if place else "The text"
    if error.validator is None:  # of a schema that is `false` jsonschema does not tell where it stands
        return "The text is not valid: a schema that is false allows nothing."
    return f"{what} is not valid under {error.validator!r} of the schema, at {_pointer(error.absolute_schema_path)}."


def _pointer(steps: Any) -> str:
    pointer = "".join("/" + str(step).replace("~", "~0").replace("/", "~1") for step in steps)
    return pointer if len(pointer) <= MAX_SHOWN else pointer[: MAX_SHOWN - 1] + "…"


# ---------------------------------------------------------------- keywords


def _error(message: str) -> Any:
    from jsonschema.exceptions import ValidationError

    return ValidationError(message)


def _is_number(_checker: Any, value: Any) -> bool:
    return isinstance(value, int | float | Decimal) and not isinstance(value, bool)


def _is_integer(_checker: Any, value: Any) -> bool:
    if isinstance(value, Decimal):
        _, digits, exponent = value.as_tuple()
        return isinstance(exponent, int) and (exponent >= 0 or not any(digits[exponent:]))
    return isinstance(value, int) and not isinstance(value, bool)


def _multiple_of(validator: Any, factor: Any, instance: Any, _schema: Any) -> Iterator[Any]:
    if not validator.is_type(instance, "number"):
        return
    if isinstance(instance, Decimal) and abs(int(instance.as_tuple().exponent)) > LARGEST_EXPONENT:
        raise _Unchecked
    if Fraction(instance) % Fraction(factor) != 0:
        yield _error("not a multiple")


def _unique_items(validator: Any, is_wanted: Any, instance: Any, _schema: Any) -> Iterator[Any]:
    if is_wanted and validator.is_type(instance, "array"):
        seen = set()
        for item in instance:
            if (key := _key(item)) in seen:
                yield _error("not unique")
                return
            seen.add(key)


def _key(value: Any) -> Any:
    """Equal for values that are equal in JSON: 1 and 1.0, but not 1 and true."""
    if isinstance(value, list):
        return ("array", tuple(map(_key, value)))
    if isinstance(value, dict):
        return ("object", frozenset((name, _key(item)) for name, item in value.items()))
    return ("boolean", value) if isinstance(value, bool) else value


def _pattern(validator: Any, source: Any, instance: Any, _schema: Any) -> Iterator[Any]:
    if validator.is_type(instance, "string") and not _found(source, instance):
        yield _error("not matched")


def _pattern_properties(validator: Any, patterns: Any, instance: Any, _schema: Any) -> Iterator[Any]:
    if validator.is_type(instance, "object"):
        for source, below in patterns.items():
            for name, value in instance.items():
                if _found(source, name):
                    yield from validator.descend(value, below, path=name, schema_path=source)


def _additional_properties(validator: Any, below: Any, instance: Any, schema: Any) -> Iterator[Any]:
    if validator.is_type(instance, "object"):
        patterns = schema.get("patternProperties", {})
        for name, value in instance.items():
            if name in schema.get("properties", {}) or any(_found(source, name) for source in patterns):
                continue
            if below is False:
                yield _error("one too many")
            else:
                yield from validator.descend(value, below, path=name)


def _refuse(_validator: Any, _value: Any, _instance: Any, _schema: Any) -> Iterator[Any]:
    raise _Unchecked


def _format(validator: Any, name: Any, instance: Any, _schema: Any) -> Iterator[Any]:
    """Formats that we enforce, by our own rules; others by jsonschema's; those it does not know say nothing, as the
    specification has it."""
    from trunkline.grammar.schema import formats

    if not validator.is_type(instance, "string"):
        return
    if name in formats.KNOWN:
        if not _found(f"^(?:{formats.KNOWN[name]})$", instance):
            yield _error("not of this format")
    elif not validator.format_checker.conforms(instance, name):
        yield _error("not of this format")


# ---------------------------------------------------------------- patterns


def _found(source: str, text: str) -> bool:
    return _search(_compiled(_in_python(source)), text)


def _search(pattern: Any, text: str) -> bool:
    """Raises TimeoutError at the deadline."""
    left = _deadline.get() - time.monotonic()
    if left <= 0:
        raise _Unchecked
    return pattern.search(text, timeout=left, concurrent=True) is not None


@functools.lru_cache(maxsize=256)
def _compiled(source: str) -> Any:
    import regex

    try:
        return regex.compile(source, regex.V0)
    except (regex.error, OverflowError, RecursionError):
        raise _Unchecked from None


@functools.lru_cache(maxsize=256)
def _in_python(source: str) -> str:
    """A pattern of ECMA-262 as Python reads it."""
    from trunkline.grammar.interface import Unsupported
    from trunkline.grammar.regex import pattern

    try:
        return pattern.write(pattern.parse(source), "python")
    except Unsupported:  # lookaround and the like: not for a grammar, but it can be checked
        return _translated(source)


def _translated(source: str) -> str:
    """Classes are ASCII in ECMA-262, `$` is the very end of the text, and `[` inside of a class is a character."""
    pieces, in_class = ["(?a)"], False
    for piece in re.findall(r"\\.|.", source, re.DOTALL):
        if piece == "[":
            pieces.append(r"\[" if in_class else piece)
            in_class = True
        elif piece == "]":
            pieces.append(piece)
            in_class = False
        else:
            pieces.append(r"\Z" if piece == "$" and not in_class else piece)
    return "".join(pieces)
