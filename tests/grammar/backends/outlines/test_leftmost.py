"""Which expressions a preferring matcher follows as a whole, told without one."""

import pytest

from trunkline.grammar.backends.outlines.leftmost import check_anywhere, is_whole
from trunkline.grammar.regex.ast import Node
from trunkline.grammar.regex.automaton import BudgetExceeded
from trunkline.grammar.regex.full_match import full_match


def tree(source: str) -> Node:
    ((only,), _) = full_match(source)
    return only


@pytest.mark.parametrize("source", ["[a-z]+", "ab?", "(ab|a)", "abc|abd", "-?(0|[1-9][0-9]*)", "a{2}", "(a|b)(c|d)"])
def test_whole(source: str) -> None:
    assert is_whole(tree(source))


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("a|ab", "the second is given up behind a"),
        ("yes|yes please", "the same"),
        ("(|a)b?", "nothing is preferred to a"),
        ("[0-9]+(\\.[0-9]+)?", "the point stands between two ends"),
        ("aé?", "é has two bytes, and between them is no end"),
    ],
)
def test_not_whole(source: str, why: str) -> None:
    assert not is_whole(tree(source)), why


def test_the_automaton_that_begins_anywhere() -> None:
    check_anywhere(tree("[ab]{20}"))
    check_anywhere(tree("[1-9][0-9]{0,20}"))  # the first match ends the search
    with pytest.raises(BudgetExceeded):
        check_anywhere(tree("a[ab]{20}"))
