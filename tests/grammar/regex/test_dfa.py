"""Automata against Python's re, and the way back to expressions."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trunkline.grammar.regex import ast, dfa, pattern
from trunkline.grammar.regex.automaton import BudgetExceeded
from trunkline.grammar.regex.dfa import Dfa

EXPRESSIONS = ("^a*$", "^(a|bc)*$", "b", "^a{2,3}b?$", "^(ab|ba)+$", "^.{2}$", "^[^a]*$", "^(a|b)*abb$", "^$", "ca?$")
texts = st.text(alphabet="abc", max_size=7)


def build(*sources: str, but: tuple[str, ...] = (), **limits: int) -> Dfa | None:
    trees = [pattern.whole_tree(source) for source in sources]
    return dfa.build(trees, [pattern.whole_tree(source) for source in but], limit=500, **limits)


def runs(machine: Dfa | None, text: str) -> bool:
    if machine is None:
        return False
    state = 0
    for character in text:
        target = [to for first, last, to in machine.moves[state] if first <= ord(character) <= last]
        if not target:
            return False
        (state,) = target
    return machine.accepting[state]


@given(st.sampled_from(EXPRESSIONS), st.sampled_from(EXPRESSIONS), st.integers(0, 3), st.integers(2, 6), texts)
def test_both_and_not_and_length(wanted: str, unwanted: str, least: int, most: int, text: str) -> None:
    machine = build(wanted, but=(unwanted,), min_length=least, max_length=most)
    expected = bool(re.search(wanted, text)) and not re.search(unwanted, text) and least <= len(text) <= most
    assert runs(machine, text) == expected


@given(st.sampled_from(EXPRESSIONS), st.sampled_from(EXPRESSIONS), texts)
def test_a_tree_means_what_its_automaton_does(one: str, other: str, text: str) -> None:
    machine = build(one, but=(other,))
    if machine is not None:
        tree = dfa.to_tree(machine, limit=5_000)
        assert bool(re.fullmatch(pattern.write(tree, "python"), text)) == runs(machine, text)


def test_no_text_no_automaton() -> None:
    assert build("^a$", "^b$") is None
    assert build("^a{5}$", max_length=4) is None


def test_states_that_lead_nowhere_or_mean_the_same_are_gone() -> None:
    machine = build("^(ab|cb)$")
    assert machine == Dfa((((97, 97, 1), (99, 99, 1)), ((98, 98, 2),), ()), (False, False, True))


def test_surrogates_do_not_part_a_range() -> None:
    machine = dfa.build([ast.ANY_TEXT], limit=5)
    assert machine is not None and len(machine.moves) == 1


def test_limits() -> None:
    with pytest.raises(BudgetExceeded):
        build("^a{600}$")
    with pytest.raises(BudgetExceeded):
        dfa.to_tree(build("^(a|b)*a(a|b){4}$") or pytest.fail(), limit=20)


def test_a_long_tail_of_options_stays_short() -> None:
    machine = build("^[0-9]{1,60}$")
    assert machine is not None and dfa.to_tree(machine, limit=100).size == 60
