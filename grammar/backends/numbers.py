"""JSON numbers between two bounds, as regular expressions to be intersected.

    spans(Numbers(minimum=Fraction(5), excluded=(Fraction(7),)))     5 … 6.999…, 7.000…1 …
    span.alternatives()                                              lists of expressions; a number matches all of one list

A number is written without leading zeros, with at most WHOLE_DIGITS before the point and FRACTION_DIGITS after it: a grid of
evenly spaced numbers, or the multiples of a number. So an exclusive bound is the next number of the grid, and a bound between
two of them is the one inside. "At least this", "at most this" and "ends in digits that make it a multiple" are each a short
expression over digits; their intersection is left to the library.
An exponent has at most two digits, so that every number is finite in every language that reads it; between bounds it stands
only behind one digit before the point, and only where all such numbers are inside: 1e-06 between 0 and 1.
Integers are written without point and exponent.

Knows `Numbers`, and no syntax around an expression.
"""

from fractions import Fraction
from math import ceil, floor
from typing import NamedTuple

from trunkline.grammar.schema.forms import Numbers

WHOLE_DIGITS = 60
FRACTION_DIGITS = 30
MAX_EXPONENT = 99

DIGIT = "[0-9]"
UNSIGNED = rf"(0|[1-9]{DIGIT}{{0,{WHOLE_DIGITS - 1}}})"
FRACTION = rf"(\.{DIGIT}{{1,{FRACTION_DIGITS}}})"
INTEGER = rf"-?{UNSIGNED}"
DECIMAL = rf"{INTEGER}{FRACTION}?"
NUMBER = rf"{DECIMAL}([eE][+-]?{DIGIT}{{1,2}})?"


class NotDecimal(ValueError):
    """The multiples asked for cannot be told by their last digits; the message says why, in half a sentence."""


class Span(NamedTuple):
    """Numbers of a grid from `least` to `most`, both belonging to it; None: no bound.

    step      distance of two numbers of the grid
    integer   they are written as integers
    multiple  the grid is coarser than what can be written
    """

    least: Fraction | None
    most: Fraction | None
    step: Fraction
    integer: bool
    multiple: bool

    @property
    def is_empty(self) -> bool:
        """No number that we write lies in it."""
        largest = 10**WHOLE_DIGITS - self.step
        least = -largest if self.least is None else max(self.least, -largest)
        most = largest if self.most is None else min(self.most, largest)
        return bool(least > most)

    def alternatives(self) -> list[list[str]]:
        """Ways to write its numbers: the text matches all expressions of one of these lists. Raises NotDecimal."""
        if self.least is None and self.most is None and not self.multiple:
            return [[INTEGER if self.integer else NUMBER]]
        plain = [INTEGER if self.integer else DECIMAL]
        if self.least is not None and self.least > -(10**WHOLE_DIGITS):
            plain.append(_at_least(self.least, minus="-", plus="", integer=self.integer))
        if self.most is not None and self.most < 10**WHOLE_DIGITS:
            plain.append(_at_least(-self.most, minus="", plus="-", integer=self.integer))
        if self.multiple:
            plain.append(_multiple_of(self.step))
        if self.integer or self.multiple:
            return [plain]
        with_exponent = [
            [rf"{sign}[1-9]{FRACTION}?[eE]({'|'.join(_spell_exponent(exponent) for exponent in exponents)})"]
            for sign, exponents in (("", self._exponents(1)), ("-", self._exponents(-1)))
            if exponents
        ]
        return [plain, *with_exponent]

    def _exponents(self, sign: int) -> list[int]:
        """e for which every sign · x · 10**e with 1 <= x < 10 is inside."""
        largest = 10 - Fraction(1, 10**FRACTION_DIGITS)
        inside = []
        for exponent in range(-MAX_EXPONENT, MAX_EXPONENT + 1):
            ends = sign * Fraction(10) ** exponent, sign * largest * Fraction(10) ** exponent
            if (self.least is None or self.least <= min(ends)) and (self.most is None or max(ends) <= self.most):
                inside.append(exponent)
        return inside


def spans(form: Numbers) -> list[Span]:
    """What a form's bounds, multiple and excluded numbers leave, in ascending order, without empty ones. Raises NotDecimal."""
    step = grid = Fraction(1) if form.integer else Fraction(1, 10**FRACTION_DIGITS)
    if form.multiple_of is not None:
        step = _common_multiple(form.multiple_of, grid)
    least = None if form.minimum is None else _grid_above(form.minimum, step, form.exclusive_minimum)
    most = None if form.maximum is None else -_grid_above(-form.maximum, step, form.exclusive_maximum)
    left = [Span(least, most, step, form.integer, multiple=step != grid)]
    for number in sorted(set(form.excluded)):
        last = left.pop()
        below = last._replace(most=-_grid_above(-number, step, exclusive=True))
        above = last._replace(least=_grid_above(number, step, exclusive=True))
        is_inside = (last.least is None or last.least <= number) and (last.most is None or number <= last.most)
        left += [below, above] if is_inside else [last]
    return [span for span in left if not span.is_empty]


def _common_multiple(multiple: Fraction, grid: Fraction) -> Fraction:
    """The smallest number that both divide: its multiples are those of `multiple` that can be written. Raises NotDecimal.

    Of 1/3 these are the integers, of 0.07 and the integers they are 7, 14, …
    """
    over = multiple / grid
    common = over.numerator * grid
    if common.numerator >= 10**WHOLE_DIGITS:
        raise NotDecimal(f"no multiple of {_short(multiple)} has at most {FRACTION_DIGITS} digits after the point")
    return common


def _short(number: Fraction) -> str:
    text = str(number)
    return text if len(text) <= 40 else text[:39] + "…"


def _grid_above(bound: Fraction, step: Fraction, exclusive: bool) -> Fraction:
    """The smallest number of the grid that is at least `bound`, or larger if that is exclusive."""
    units = bound / step
    return (floor(units) + 1 if exclusive else ceil(units)) * step


def _at_least(bound: Fraction, *, minus: str, plus: str, integer: bool) -> str:
    """Numbers x >= bound. With the signs swapped: numbers with -x >= bound."""
    fraction = "" if integer else rf"(\.{DIGIT}+)?"
    every = rf"{DIGIT}+{fraction}"
    if bound > 0:
        return plus + _from(bound, integer)
    zero = "0" if integer else r"0(\.0+)?"
    return f"{plus}{every}|{minus}{zero if bound == 0 else _up_to(-bound, integer)}"


def _from(bound: Fraction, integer: bool) -> str:
    """Unsigned numbers x >= bound > 0."""
    whole, digits = _digits(bound)
    longer = rf"[1-9]{DIGIT}{{{len(whole)},}}"
    larger = "|".join([longer, *_differing(whole, above=True)])
    if integer:
        return f"({larger}|{whole})"
    if not digits:
        return rf"({larger}|{whole})(\.{DIGIT}+)?"
    fractions = [rf"{start}{DIGIT}*" for start in _differing_starts(digits, above=True)]
    return rf"(({larger})(\.{DIGIT}+)?|{whole}\.({'|'.join([*fractions, f'{digits}{DIGIT}*'])}))"


def _up_to(bound: Fraction, integer: bool) -> str:
    """Unsigned numbers x <= bound, where bound > 0."""
    whole, digits = _digits(bound)
    shorter = [rf"{DIGIT}{{1,{len(whole) - 1}}}"] if len(whole) > 1 else []
    smaller = "|".join([*shorter, *_differing(whole, above=False)])
    if integer:
        return f"({smaller}|{whole})" if smaller else whole
    alternatives = [rf"({smaller})(\.{DIGIT}+)?"] if smaller else []
    fractions = [rf"{start}{DIGIT}*" for start in _differing_starts(digits, above=False)]
    fractions += [digits[:end] for end in range(1, len(digits))]
    fractions.append(f"{digits}0*" if digits else "0+")
    alternatives.append(rf"{whole}(\.({'|'.join(fractions)}))?")
    return f"({'|'.join(alternatives)})"


def _digits(bound: Fraction) -> tuple[str, str]:
    """Before the point, and after it without zeros at the end."""
    whole, rest = divmod(bound, 1)
    return str(whole), str(int(rest * 10**FRACTION_DIGITS)).zfill(FRACTION_DIGITS).rstrip("0")


def _differing(whole: str, *, above: bool) -> list[str]:
    """Expressions for the other numbers of as many digits that are larger, or smaller."""
    starts = _differing_starts(whole, above=above)
    return [f"{start}{DIGIT}{{{len(whole) - at - 1}}}" for at, start in _numbered(starts)]


def _numbered(starts: list[str]) -> list[tuple[int, str]]:
    """Each with the number of digits before its last, which is a class of digits."""
    return [(start.index("["), start) for start in starts]


def _differing_starts(digits: str, *, above: bool) -> list[str]:
    """Beginnings that decide that a run of digits is larger (smaller): the same digits, then one that is."""
    if above:
        return [f"{digits[:at]}[{int(digit) + 1}-9]" for at, digit in enumerate(digits) if digit != "9"]
    return [f"{digits[:at]}[0-{int(digit) - 1}]" for at, digit in enumerate(digits) if digit != "0"]


def _spell_exponent(exponent: int) -> str:
    """Each way to write it: 6, 06, +6, +06, -6, -06."""
    sign = r"\+?" if exponent >= 0 else "-"
    return f"{sign}0?{abs(exponent)}" if abs(exponent) < 10 else f"{sign}{abs(exponent)}"


MOST_ENDINGS = 25  # in an expression; the library gets slow with hundreds


def _multiple_of(step: Fraction) -> str:
    """Multiples of a decimal number, by their last digits. Raises NotDecimal where those do not tell, as for 3.

    `units` is how many units of the last place make `step`; the last `tail` digits tell if it divides 10**tail.
    """
    places = next(n for n in range(FRACTION_DIGITS + 1) if (step * 10**n).denominator == 1)
    units = int(step * 10**places)
    tail = next((n for n in range(FRACTION_DIGITS + 1) if 10**n % units == 0), None)
    if tail is None or 10**tail // units > MOST_ENDINGS:
        raise NotDecimal(f"the last digits do not tell whether a number is a multiple of {_short(step)}")
    endings = [str(n).zfill(tail) if tail else "" for n in range(0, 10**tail, units)]
    if places >= tail:
        free = f"{DIGIT}{{0,{places - tail}}}"
        ends = [ending.rstrip("0") for ending in endings if ending.strip("0")]
        exact = [rf"{DIGIT}{{{places - tail}}}({'|'.join(ends)})0*"] if ends else []
        return rf"-?{DIGIT}+(\.({'|'.join([f'{free}0*', *exact])}))?"
    parts = []
    for ending in endings:
        whole, fraction = ending[: tail - places], ending[tail - places :].rstrip("0")
        shortest = whole.lstrip("0") or "0"
        parts.append(rf"({DIGIT}*{whole}|{shortest})" + (rf"\.{fraction}0*" if fraction else r"(\.0+)?"))
    return f"-?({'|'.join(parts)})"
