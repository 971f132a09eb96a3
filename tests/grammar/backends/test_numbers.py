"""Ranges, multiples and exclusions as regular expressions, against exact arithmetic."""

import re
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trunkline.grammar.backends.numbers import FRACTION_DIGITS, WHOLE_DIGITS, NotDecimal, spans
from trunkline.grammar.schema.forms import Numbers

EDGES = ("0", "1", "4", "5", "6", "9", "10", "11", "49", "50", "51", "99", "100", "101", "999", "1000", "12345")
FRACTIONS = (
    "",
    "",
    "",
    ".0",
    ".5",
    ".50",
    ".49",
    ".51",
    ".1",
    ".10",
    ".09",
    ".9",
    ".99",
    ".000",
    ".0001",
    ".25",
    ".125",
)
EXPONENTS = ("", "", "", "", "e1", "E-2", "e+02", "e-06", "e0", "e15")
BOUNDS = tuple(map(Fraction, ("0", "5", "-5", "1/2", "-1/2", "99", "100", "-100", "12.345", "1000", "1/3")))
MULTIPLES = tuple(
    map(
        Fraction, ("1", "2", "4", "5", "10", "100", "1000", "0.01", "0.5", "0.25", "2.5", "0.05", "0.025", "1/3", "2/3")
    )
)
EXCLUDED = tuple(map(Fraction, ("0", "5", "6", "1/2", "10")))

texts = st.tuples(*map(st.sampled_from, (("", "-"), EDGES, FRACTIONS, EXPONENTS))).map("".join)
bounds = st.none() | st.sampled_from(BOUNDS)
forms = st.builds(
    Numbers,
    integer=st.booleans(),
    minimum=bounds,
    maximum=bounds,
    exclusive_minimum=st.booleans(),
    exclusive_maximum=st.booleans(),
    multiple_of=st.none() | st.sampled_from(MULTIPLES),
    excluded=st.lists(st.sampled_from(EXCLUDED), max_size=3).map(tuple),
)


def is_written(form: Numbers, text: str) -> bool:
    return any(all(re.fullmatch(term, text) for term in way) for span in spans(form) for way in span.alternatives())


def is_number(form: Numbers, value: Fraction) -> bool:
    if form.minimum is not None and (value < form.minimum or (form.exclusive_minimum and value == form.minimum)):
        return False
    if form.maximum is not None and (value > form.maximum or (form.exclusive_maximum and value == form.maximum)):
        return False
    if form.multiple_of is not None and (value / form.multiple_of).denominator != 1:
        return False
    return value not in form.excluded


@settings(max_examples=60)
@given(forms, st.lists(texts, min_size=10, max_size=10))
def test_what_is_written_is_exactly_what_is_asked_for(form, candidates):
    for text in candidates:
        is_plain = "e" not in text.lower()
        expected = is_number(form, Fraction(text)) and not (form.integer and not re.fullmatch("-?[0-9]+", text))
        written = is_written(form, text)
        assert not written or expected, f"{text} is none of {form}"
        assert written or not expected or not is_plain, f"{text} is missing in {form}"


@settings(max_examples=60)
@given(st.sampled_from(MULTIPLES), st.integers(-10_000, 10_000))
def test_multiples_are_written(step, times):
    value = step * times
    text = str(value) if value.denominator == 1 else str(float(value))
    if Fraction(text) == value:  # a third is none
        assert is_written(Numbers(multiple_of=step), text)


@pytest.mark.parametrize(
    "text", ["01", "1.", ".5", "+1", "1e", "1e999", "1e-100", "-", "", "1.e5", "00", "-01", "0x1", "1_0"]
)
def test_what_is_no_number_or_not_finite_is_not_written(text):
    for form in (
        Numbers(),
        Numbers(minimum=Fraction(-(10**9))),
        Numbers(integer=True),
        Numbers(multiple_of=Fraction(1)),
    ):
        assert not is_written(form, text)


def test_digits_are_bounded():
    assert is_written(Numbers(), "9" * WHOLE_DIGITS + "." + "1" * FRACTION_DIGITS + "e99")
    assert float("9" * WHOLE_DIGITS + "e99") < float("inf")
    assert not is_written(Numbers(), "9" * (WHOLE_DIGITS + 1))
    assert not is_written(Numbers(), "0." + "1" * (FRACTION_DIGITS + 1))
    assert not is_written(Numbers(integer=True, minimum=Fraction(0)), "9" * (WHOLE_DIGITS + 1))


@pytest.mark.parametrize(
    ("form", "yes", "no"),
    [
        (
            Numbers(minimum=Fraction(0), maximum=Fraction(1)),
            ["1e-06", "2.5E-7", "9.99e-1", "1e-1"],
            ["1e0", "1e1", "-1e-06"],
        ),
        (Numbers(minimum=Fraction(0)), ["1e15", "1.5e+16", "1e-99"], ["-1e5"]),
        (Numbers(maximum=Fraction(-1)), ["-1e5", "-2.5e02"], ["1e5", "-1e-5"]),
        (Numbers(excluded=(Fraction(1000),)), ["1e2", "1e4", "-1e3", "999.9"], ["1e3", "1000", "1000.0", "10.0e2"]),
    ],
)
def test_an_exponent_stands_where_all_of_its_numbers_are_inside(form, yes, no):
    assert [text for text in yes if not is_written(form, text)] == []
    assert [text for text in no if is_written(form, text)] == []


@pytest.mark.parametrize(
    "form",
    [
        Numbers(minimum=Fraction(2), maximum=Fraction(1)),
        Numbers(minimum=Fraction(1), maximum=Fraction(1), exclusive_minimum=True),
        Numbers(integer=True, minimum=Fraction("1.2"), maximum=Fraction("1.8")),
        Numbers(minimum=Fraction(1), maximum=Fraction(6), multiple_of=Fraction(7)),
        Numbers(minimum=Fraction(3), maximum=Fraction(3), excluded=(Fraction(3),)),
        Numbers(minimum=Fraction(10) ** WHOLE_DIGITS),
    ],
)
def test_where_no_number_is_left_there_is_no_span(form):
    assert spans(form) == []


def test_multiples_whose_last_digits_do_not_tell():
    (span,) = spans(Numbers(integer=True, multiple_of=Fraction(7), minimum=Fraction(1), maximum=Fraction(20)))
    assert (span.least, span.most) == (7, 14)
    with pytest.raises(NotDecimal, match="multiple of 7"):
        span.alternatives()


def test_bounds_beyond_what_can_be_written_are_no_bounds():
    form = Numbers(minimum=-(Fraction(10) ** 300), maximum=Fraction(10) ** 300)
    assert is_written(form, "123.5")
    assert is_written(form, "-" + "9" * WHOLE_DIGITS)
