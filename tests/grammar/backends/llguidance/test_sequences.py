"""Rows of things with commas: every text up to some length, against a plain description of the row."""

import re
from collections.abc import Callable, Iterator
from itertools import product

import pytest

from tests.grammar.matching import accepts, random_text, small_vocabulary
from trunkline.constraint import GrammarSource
from trunkline.grammar.backends.llguidance.backend import LlguidanceBackend
from trunkline.grammar.backends.llguidance.lark import LarkWriter, quote, regex, wrap
from trunkline.grammar.backends.llguidance.sequences import (
    Count,
    Kind,
    Part,
    TooMany,
    containing,
    counted,
    different,
    repeated,
    row,
    some_of,
)
from trunkline.grammar.interface import CompiledGrammar

VOCABULARY = small_vocabulary()
BACKEND = LlguidanceBackend(VOCABULARY)


def compiled(lark: LarkWriter, start: str | list[str]) -> CompiledGrammar:
    lark.rule("start", [start] if isinstance(start, str) else start)
    return BACKEND.compile(GrammarSource("llguidance", "grammar", wrap(lark.text())))


def rows(letters: str, most: int) -> Iterator[str]:
    """All rows of up to `most` letters."""
    for length in range(most + 1):
        yield from map("".join, product(letters, repeat=length))


def written(grammar: CompiledGrammar, letters: str, most: int, closing: str) -> Iterator[str]:
    """The rows of up to `most` letters that the grammar takes, found by going on as long as it does."""
    matcher = grammar.matcher()

    def go_on(text: str) -> Iterator[str]:
        ends = matcher.fork()
        if all(map(ends.accept, closing.encode())) and ends.is_complete:
            yield text
        for letter in letters if len(text) < most else "":
            step = (f",{letter}" if text else letter).encode()
            if matcher.count_valid(list(step)) == len(step):
                assert all(map(matcher.accept, step))
                yield from go_on(text + letter)
                matcher.rollback(len(step))

    return go_on("")


def check(grammar: CompiledGrammar, letters: str, most: int, closing: str, is_right: Callable[[str], bool]) -> None:
    """The grammar takes exactly the rows that are right; and what it can write always comes to an end."""
    assert set(written(grammar, letters, most, closing)) == set(filter(is_right, rows(letters, most)))
    for seed in range(5):
        text = random_text(grammar, VOCABULARY, seed)
        assert text is None or is_right(text.decode().removesuffix(closing).replace(",", ""))


def is_ordered(text: str, parts: str) -> bool:
    return list(text) == sorted(set(text), key=parts.index) if set(text) <= set(parts) else False


@pytest.mark.parametrize("required", ["", "a", "c", "bd", "abcd"])
def test_some_of(required):
    lark = LarkWriter()
    start = some_of(lark, ",", [Part(quote(letter), letter in required) for letter in "abcd"])
    check(
        compiled(lark, start),
        "abcde",
        4,
        "",
        lambda text: bool(text) and is_ordered(text, "abcd") and set(required) <= set(text),
    )


@pytest.mark.parametrize(
    ("least", "most"), [(0, 1), (0, 2), (1, 2), (2, 2), (2, None), (3, 3), (0, 3), (4, None), (3, 5)]
)
@pytest.mark.parametrize("extra", [None, "x"])
@pytest.mark.parametrize("required", ["", "b", "ac"])
def test_counted(least, most, extra, required):
    if most is not None and most < len(required):
        return
    lark = LarkWriter()
    parts = [Part(quote(letter), letter in required) for letter in "abc"]
    if least > len(parts) + (extra is not None):
        return
    start = counted(lark, ",", parts, extra and quote(extra), "]", least, most)

    def is_right(text: str) -> bool:
        extras = text.lstrip("abc")
        named = text[: len(text) - len(extras)]
        return (
            set(extras) <= {"x"}
            and (extra is not None or not extras)
            and is_ordered(named, "abc")
            and set(required) <= set(named)
            and least <= len(named) + bool(extras)  # two extras may be the same one
            and (most is None or len(text) <= most)
        )

    check(compiled(lark, start), "abcx", 4, "]", is_right)


@pytest.mark.parametrize("prefix", ["", "a", "ab", "abcab"])
@pytest.mark.parametrize("rest", [None, "r"])
@pytest.mark.parametrize(("least", "most"), [(0, None), (0, 2), (1, 1), (2, 4), (3, None), (0, 0)])
def test_row(prefix, rest, least, most):
    lark = LarkWriter()
    alternatives = row(lark, ",", [quote(letter) for letter in prefix], rest and quote(rest), least, most)

    def is_right(text: str) -> bool:
        expected = (prefix + (rest or "") * len(text))[: len(text)]
        return text == expected and least <= len(text) and (most is None or len(text) <= most)

    if alternatives:
        check(compiled(lark, alternatives), "abcr"[: 4 if len(prefix) < 5 else 3], 5, "", is_right)
    else:
        assert not any(map(is_right, rows("abcr", 5)))


def test_repeated():
    lark = LarkWriter()
    check(
        compiled(lark, repeated(",", '"a"', 2, 4)),
        "ab",
        6,
        "",
        lambda text: text == "a" * len(text) and 2 <= len(text) <= 4,
    )


@pytest.mark.parametrize(("least", "most"), [(0, None), (1, 2), (2, 3), (4, None), (0, 9)])
def test_different(least, most):
    lark = LarkWriter()
    start = different(lark, ",", [quote(letter) for letter in "abcd"], "]", least, most)
    check(
        compiled(lark, start),
        "abcd",
        5,
        "]",
        lambda text: len(set(text)) == len(text) and least <= len(text) <= (9 if most is None else most),
    )


def test_more_different_parts_than_a_parameter_has_bits_keep_their_order():
    lark = LarkWriter()
    grammar = compiled(lark, different(lark, ",", [f'"<{number}>"' for number in range(65)], "]", 0, None))
    assert accepts(grammar, VOCABULARY, "]")
    assert accepts(grammar, VOCABULARY, "<3>,<7>,<64>]")
    assert not accepts(grammar, VOCABULARY, "<3>,<3>]")
    assert not accepts(grammar, VOCABULARY, "<7>,<3>]")
    with pytest.raises(TooMany):
        different(lark, ",", [f'"<{number}>"' for number in range(65)], "]", 2, None)


KINDS = [Kind('"r"', (0, 0)), Kind('"a"', (1, 0)), Kind('"b"', (0, 1)), Kind('"x"', (1, 1))]


@pytest.mark.parametrize(
    "counts", [[(1, None), (0, None)], [(2, None), (1, None)], [(0, 1), (0, None)], [(1, 2), (1, 1)]]
)
@pytest.mark.parametrize(("least", "most"), [(0, None), (0, 3), (3, None), (2, 2)])
def test_containing(counts, least, most):
    lark = LarkWriter()
    start = containing(lark, ",", KINDS, [Count(*count) for count in counts], "]", least, most)

    def is_right(text: str) -> bool:
        seen = [sum(letter in letters for letter in text) for letters in ("ax", "bx")]
        return (
            all(
                low <= number <= (99 if high is None else high)
                for number, (low, high) in zip(seen, counts, strict=True)
            )
            and least <= len(text)
            and (most is None or len(text) <= most)
        )

    if start is None:
        assert not any(map(is_right, rows("rabx", 4)))
    else:
        check(compiled(lark, start), "rabx", 4, "]", is_right)


@pytest.mark.parametrize(
    ("kinds", "count", "least", "most"),
    [
        ([Kind('"r"', (0,))], Count(1, None), 0, None),
        ([Kind('"a"', (1,))], Count(0, 2), 3, None),
        ([Kind('"a"', (1,)), Kind('"r"', (0,))], Count(3, None), 0, 2),
        ([], Count(0, None), 1, None),
    ],
)
def test_rows_that_there_cannot_be(kinds, count, least, most):
    assert containing(LarkWriter(), ",", kinds, [count], "]", least, most) is None


def test_items_that_all_count_end_when_there_are_enough():
    lark = LarkWriter()
    start = containing(lark, ",", [Kind('"a"', (1,))], [Count(1, 2)], "]", 0, None)
    assert start is not None
    check(compiled(lark, start), "ab", 4, "]", lambda text: text in ("a", "aa"))


@pytest.mark.parametrize("source", ["a/b", "a\\/b", "\\\\", "[/]", "a\nb", 'a"b', "\\n", "é😀"])
def test_expressions_stand_as_they_were_in_a_grammar(source):
    lark = LarkWriter()
    grammar = compiled(lark, lark.terminal([source]))
    for text in ("a/b", "\\", "/", "a\nb", 'a"b', "\n", "é😀", "x"):
        assert accepts(grammar, VOCABULARY, text) == bool(re.fullmatch(source, text))


@pytest.mark.parametrize("text", ['"', "\\", "\n", "\x00", "\x7f", "é😀", "a//b #c", "%if", "<eos>", "'"])
def test_texts_stand_as_they_are_in_a_grammar(text):
    assert accepts(compiled(LarkWriter(), [quote(text)]), VOCABULARY, text)
    assert regex("/") == "/\\//"
