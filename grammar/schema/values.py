"""JSON values as JSON Schema sees them: equality, exact numbers, compact text. No schema is known here.

1 and 1.0 are one number, true is not 1, and the order of keys does not matter:

    key(1.0) == key(1) != key(True)        text(1.0) == "1"        fraction(0.01) == Fraction(1, 100)
"""

import json
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any

MOST_DIGITS = 400  # of a number before or after its point; floats have 308

# The seven kinds of value that the algebra tells apart. Two of them have one value each less than their type.
NULL, TRUE, FALSE = "null", "true", "false"
STRING, NUMBER, ARRAY, OBJECT = "string", "number", "array", "object"
KINDS = (STRING, NUMBER, ARRAY, OBJECT, NULL, TRUE, FALSE)


def kind(value: Any) -> str:
    """One of KINDS."""
    if value is None:
        return NULL
    if isinstance(value, bool):
        return TRUE if value else FALSE
    if isinstance(value, str):
        return STRING
    if isinstance(value, int | float | Decimal):
        return NUMBER
    return ARRAY if isinstance(value, list) else OBJECT


def fraction(number: float | Decimal) -> Fraction:
    """The number that was written: 0.01 is one hundredth, not the float nearest to it."""
    if isinstance(number, int):
        return Fraction(number)
    decimal = number if isinstance(number, Decimal) else Decimal(repr(number))
    if not decimal.is_finite() or (decimal and abs(decimal.adjusted()) > MOST_DIGITS):
        raise ValueError(f"The number {number} is too large or too small; at most {MOST_DIGITS} digits are followed.")
    return Fraction(decimal)


def key(value: Any) -> Hashable:
    """Equal for two values exactly if JSON Schema calls them equal."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool):
        return ("bool", value)
    if isinstance(value, int | float | Decimal):
        return fraction(value)
    if isinstance(value, list):
        return ("array", tuple(key(item) for item in value))
    return ("object", frozenset((name, key(member)) for name, member in value.items()))


def text(value: Any) -> str:
    """Compact JSON in the value's own order of keys. A whole number is written without a point."""
    return json.dumps(_plain(value), ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def texts(values: Iterable[Any]) -> tuple[str, ...]:
    """The text of each, without those that equal an earlier one."""
    return tuple(text(value) for value in distinct(values))


def distinct_texts(written: Iterable[str]) -> tuple[str, ...]:
    """JSON texts without those whose value equals that of an earlier one: only lists and objects can differ in spelling."""
    known: dict[Hashable, str] = {}
    for one in written:
        known.setdefault(key(json.loads(one)) if one[0] in "[{" else ("text", one), one)
    return tuple(known.values())


def distinct(values: Iterable[Any]) -> list[Any]:
    """The values without those that equal an earlier one."""
    return list({key(value): value for value in reversed(list(values))}.values())[::-1]


@dataclass(frozen=True, slots=True)
class Numeral:
    """A number as it is written, to be written so again."""

    spelling: str


def with_numerals(written: str) -> Any:
    """A JSON text as a value, with a Numeral for each number."""
    return json.loads(written, parse_int=Numeral, parse_float=Numeral)


def _plain(value: Any) -> Any:
    if isinstance(value, Decimal):
        value = int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**63:
        return int(value)
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {name: _plain(member) for name, member in value.items()}
    return value
