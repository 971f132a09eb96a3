"""Regular expressions as constraints: the whole text."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trunkline.grammar.interface import InvalidSchema, Unsupported
from trunkline.grammar.regex.automaton import matches
from trunkline.grammar.regex.full_match import full_match

EXPRESSIONS = ("a|ab", "^a$|b", "(?=.*b)[abc]{2,3}", "(?!ab)[abc]+", "[abc]*(?<!b)", "a.c", "", "(?:a|b)+c?", "a?b?c?")


@given(st.sampled_from(EXPRESSIONS), st.text(alphabet="abc", max_size=5))
def test_as_python_has_it(source: str, text: str) -> None:
    trees, not_trees = full_match(source)
    found = all(matches(tree, text) for tree in trees) and not any(matches(tree, text) for tree in not_trees)
    assert found == bool(re.fullmatch(source, text))


def test_flags_stay_in_front() -> None:
    trees, _ = full_match("(?i)ab")
    assert all(matches(trees[0], text) for text in ("ab", "AB", "aB")) and not matches(trees[0], "xab")


@pytest.mark.parametrize("source", ["a)(b", "(a", "[z-a]", "a{5,2}", "a\\"])
def test_wrong(source: str) -> None:
    with pytest.raises(InvalidSchema) as caught:
        full_match(source)
    assert caught.value.finding.keyword == "regex"


@pytest.mark.parametrize("source", [r"(a)\1", "(a(?=b))+"])
def test_unsupported(source: str) -> None:
    with pytest.raises(Unsupported):
        full_match(source)


@pytest.mark.parametrize(
    ("source", "place"),
    [(r"(a|b)\1", 6), ("ab)", 3), ("(?i)(a", 5), ("[z-a]", 3), (r"(?i)(a)\1", 8), ("x[[:alpha:]]", 3)],
)
def test_places_are_those_in_the_text_as_it_was_sent(source: str, place: int) -> None:
    with pytest.raises((InvalidSchema, Unsupported), match=rf"\(at character {place}\)"):
        full_match(source)


@pytest.mark.parametrize("source", ["[[:alpha:]]", "[a[:^digit:]]+", "[^[:space:]]"])
def test_posix_classes_are_refused(source: str) -> None:
    with pytest.raises(Unsupported, match="POSIX classes"):
        full_match(source)


@pytest.mark.parametrize("source", ["[[:]", "[:alpha:]", "[[a:]"])
def test_brackets_and_colons_stand_for_themselves_otherwise(source: str) -> None:
    trees, _ = full_match(source)
    assert all(matches(trees[0], text) for text in source[1:-1])
