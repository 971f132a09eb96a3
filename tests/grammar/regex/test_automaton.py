"""Questions about languages, against trying out all short texts."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trunkline.grammar.regex import ast, automaton, pattern
from trunkline.grammar.regex.automaton import Automaton, Budget, BudgetExceeded

SMALL = "^[ab]{0,4}$"  # so that all texts can be tried
TEXTS = ["".join(letters) for length in range(5) for letters in product("ab", repeat=length)]
PIECES = ["a", "b", "[ab]", "ab", "a*", "(?:ab)+", "b{2,3}", "(?:a|bb)", "a?", "[^a]", ".{2}"]

expressions = st.tuples(
    st.sampled_from(["", "^"]),
    st.lists(st.sampled_from(PIECES), min_size=1, max_size=3).map("".join),
    st.sampled_from(["", "$"]),
).map("".join)
some = st.lists(expressions, max_size=2).map(tuple)
bounds = st.tuples(st.integers(0, 3), st.one_of(st.none(), st.integers(0, 4)))


def texts_of(patterns, not_patterns, least, most) -> list[str]:
    return [
        text
        for text in TEXTS
        if least <= len(text) <= (4 if most is None else most)
        and all(automaton.matches(one, text) for one in patterns)
        and not any(automaton.matches(one, text) for one in not_patterns)
    ]


@settings(max_examples=80)
@given(some, some, bounds)
def test_what_is_empty_agrees_with_trying(patterns, not_patterns, bounds):
    expected = texts_of(patterns, not_patterns, *bounds)
    asked = ((SMALL, *patterns), not_patterns, *bounds)
    assert automaton.is_empty(*asked) == (not expected)


@settings(max_examples=50)
@given(expressions, expressions)
def test_two_languages(left, right):
    small = tuple(pattern.parse(SMALL).parts[1:-1])
    both = [ast.concat(small), *map(automaton.tree_of, (left, right))]
    lefts, rights = set(texts_of((left,), (), 0, None)), set(texts_of((right,), (), 0, None))
    assert automaton.is_empty(tuple(both)) == lefts.isdisjoint(rights)
    assert automaton.is_empty((right, ast.concat(small)), (left,)) == (lefts >= rights)
    if automaton.is_empty((left, right)):
        assert lefts.isdisjoint(rights)


@pytest.mark.parametrize(
    ("left", "right", "are_disjoint"),
    [
        ("^a", "^b", True),
        ("^a", "b", False),
        ("^x_", "^[a-z]+$", True),
        ("^S_", "^I_", True),
        ("^[0-9]+$", "^0x", True),
        ("^\\d+$", "^[a-z0-9]{3}$", False),
        ("a$", "b$", True),
        ("", "^$", False),
    ],
)
def test_disjoint_names_of_properties(left, right, are_disjoint):
    assert automaton.is_empty((left, right)) == are_disjoint


def test_lengths_are_characters_not_bytes():
    assert not automaton.is_empty(("^😀$",), (), 1, 1)
    assert automaton.is_empty(("^😀$",), (), 2, None)


def test_long_lengths_are_no_walk():
    """Whole rounds are left out: a budget of a few hundred steps is enough."""
    assert not automaton.is_empty(("^(ab)*$",), (), 10**9, None, work=500)
    assert automaton.is_empty(("^(ab)*$",), (), 10**9 + 1, 10**9 + 1, work=500)
    assert automaton.is_empty(("^a{3}$",), (), 10**9, None, work=500)
    assert automaton.is_empty((), (), 5, 4)


def test_surrogates_are_in_no_language():
    assert automaton.is_empty((), ("[\\x00-\ud7ff\ue000-\U0010ffff]",), 1, 1)


def test_too_much_work_is_said():
    hard = (".*a.{20}$", ".*b.{19}$")
    with pytest.raises(BudgetExceeded):
        automaton.is_empty(hard, ("c",), 40, None)


@pytest.mark.parametrize(
    ("source", "states"), [("^abc$", 4), ("^a*$", 1), ("a", 2), ("^(yes|no)$", 5), ("^.{0,50}$", 51)]
)
def test_there_are_few_states(source, states):
    machine = Automaton(automaton.tree_of(source), Budget())
    seen = {machine.start}
    waiting = [machine.start]
    for state in waiting:  # grows meanwhile
        waiting += dict.fromkeys(target for _, _, target in machine.moves(state) if target not in seen)
        seen.update(waiting)
    assert len(seen) == states


def test_counted_repeats_cost_what_is_walked():
    budget = Budget(200)
    walked = Automaton(automaton.tree_of("^[^\\n]{1,100000}$"), budget)
    state = walked.start
    for _ in range(10):
        ((_, _, state), *_) = walked.moves(state)
    assert walked.accepts(state)
    assert budget.left > 0


def test_trees_stand_for_whole_texts():
    assert automaton.matches(ast.char("a"), "a") and not automaton.matches(ast.char("a"), "ab")
    with pytest.raises(ValueError, match="anchors"):
        automaton.matches(ast.START, "a")


def test_what_is_copied_is_counted():
    """Each state of a long concatenation holds the rest of it."""
    with pytest.raises(BudgetExceeded):
        automaton.is_empty(("^" + "(ab|cd)" * 1000 + "$",), work=100_000)


def test_all_that_is_asked_has_so_much_time():
    with automaton.all_within(10**9, seconds=-1.0), pytest.raises(BudgetExceeded):
        automaton.spend(automaton.WORK_PER_LOOK)
    with automaton.all_within(10**9, seconds=100.0):
        automaton.spend(automaton.WORK_PER_LOOK)
    automaton.spend(10**9)  # nobody counts
