"""One request's text under a grammar: masks with its own ends, trying and taking back, forced tokens, closing."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tiny_grammars import EOS, SPECIAL, TOKENS, ids, lark, text_of, tiny_backend, tiny_vocabulary
from trunkline.grammar.closing import find_ending
from trunkline.grammar.mark import Mark
from trunkline.grammar.text import ConstrainedText, Rules

OBJECT = lark(r"""start: "{\"name\":\"" /[a-z]{1,6}/ "\",\"age\":" /[1-9][0-9]?/ "}" """)
LETTERS = lark("start: /[ab]{2,4}/")
NO_RULES = Rules()
B, X = ids("b")[0], ids("x")[0]


def text_under(grammar: Any, rules: Rules = NO_RULES, *, most: int | None = None) -> ConstrainedText:
    compiled = tiny_backend().compile(grammar.sources[0])
    ending = find_ending(compiled.matcher(), tiny_vocabulary()) if most is not None else None
    return ConstrainedText(compiled, tiny_vocabulary(), rules, most=most, ending=ending or ())


def allowed(text: ConstrainedText) -> set[int]:
    row = np.full(text.num_words, 0x5A5A5A5A, np.int32)
    text.fill(row)
    return set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")[: len(TOKENS)]).tolist())


def take(text: ConstrainedText, written: str) -> None:
    for token_id in ids(written):
        assert text.take(token_id)


# ---------------------------------------------------------------- where it may end


def test_end_of_text_is_allowed_exactly_where_the_text_is_complete() -> None:
    text = text_under(LETTERS)
    assert EOS not in allowed(text) and not text.is_complete
    take(text, "ab")
    assert EOS in allowed(text) and text.is_complete and not text.is_over and text.ends_with(EOS)
    assert not text.take(EOS), "it is no text"
    take(text, "ab")
    assert text.is_over and text.num_tokens == 2


def test_stop_ids_are_allowed_where_the_text_is_complete() -> None:
    text = text_under(LETTERS, Rules(stop_ids=(X, SPECIAL)))
    assert not {X, SPECIAL} & allowed(text)
    take(text, "ab")
    assert {X, SPECIAL, EOS} <= allowed(text) and text.ends_with(SPECIAL)


def test_before_min_tokens_nothing_ends_it_unless_nothing_else_is_left() -> None:
    text = text_under(LETTERS, Rules(min_tokens=9, stop_ids=(X,)))
    take(text, "ab")
    assert not {EOS, X} & allowed(text)
    take(text, "ab")
    assert allowed(text) == {EOS, X} and text.is_over


def test_ignore_eos_spares_the_stop_ids() -> None:
    text = text_under(LETTERS, Rules(ignore_eos=True, stop_ids=(X,)))
    take(text, "ab")
    assert EOS not in allowed(text) and X in allowed(text)
    both = text_under(LETTERS, Rules(ignore_eos=True, stop_ids=(EOS,)))
    take(both, "ab")
    assert EOS in allowed(both), "who names it as a stop id means it"


def test_a_stop_id_that_the_grammar_takes_as_text_is_text_before_min_tokens_if_it_must() -> None:
    text = text_under(lark('start: "b" "b"'), Rules(stop_ids=(B,), min_tokens=2))
    assert allowed(text) == {B}
    free = text_under(LETTERS, Rules(stop_ids=(B,), min_tokens=2))
    assert B not in allowed(free)


# ---------------------------------------------------------------- trying


@given(st.lists(st.integers(0, len(TOKENS) - 1), max_size=6), st.integers(0, 12), st.booleans())
def test_trying_tokens_changes_nothing(drafts: list[int], num_taken: int, free: bool) -> None:
    rules = Rules(after=Mark(b">ab", tiny_vocabulary().tokens)) if free else NO_RULES
    text, answer = text_under(OBJECT, rules), ids('{"name":"abcab","age":12}')
    start = [*ids("x>ab")] if free else []
    for token_id in (*start, *answer)[:num_taken]:
        assert text.take(token_id)
    drafts = [*(*start, *answer)[num_taken:][: len(drafts) // 2], *drafts]
    before, num = allowed(text), text.num_valid(drafts)
    for at, token_id in enumerate(drafts[: num + 1]):
        assert (token_id in allowed(text) - {EOS}) == (at < num)
        if at < num:
            assert text.accept(token_id)
    text.rollback(num)
    assert allowed(text) == before and text.num_tokens == min(num_taken, len(start) + len(answer))
    text.restore(text.num_tokens)
    assert allowed(text) == before


def test_forced_tokens_are_those_that_alone_are_allowed() -> None:
    text = text_under(OBJECT)
    alone, taken = text_under(OBJECT), text.force(most=64)
    assert text_of(taken) == '{"name":"' and text.num_tokens == len(taken)
    for token_id in taken:
        assert allowed(alone) == {token_id}
        assert alone.take(token_id)
    assert len(allowed(text)) > 1
    few = text_under(OBJECT)
    assert few.force(most=2) == taken[:2] and few.force(most=0) == []


def test_no_stop_id_is_forced() -> None:
    stop = ids('{"name":"')[-1]
    assert text_of(text_under(OBJECT, Rules(stop_ids=(stop,))).force(most=64)) == text_of(ids('{"name":"')[:-1])


# ---------------------------------------------------------------- before the mark


def test_before_the_mark_anything_may_come_but_an_end_and_a_token_that_writes_on() -> None:
    text = text_under(LETTERS, Rules(after=Mark(b"k>", tiny_vocabulary().tokens)))
    everything = set(range(len(TOKENS)))
    assert allowed(text) == everything - {EOS, TOKENS.index(b"k>ab")}
    assert text.is_free and not text.is_complete and text.force(most=9) == []
    take(text, "think")
    assert allowed(text) == everything - {EOS, TOKENS.index(b">{"), TOKENS.index(b"k>ab")}
    assert text.take(TOKENS.index(b">\n")), "white space may follow it"
    assert not text.is_free and all(set(TOKENS[token_id]) <= set(b"ab") for token_id in allowed(text))
    text.rollback(1)
    assert text.is_free and TOKENS.index(b">{") not in allowed(text)


def test_min_tokens_hold_before_the_mark_too() -> None:
    text = text_under(LETTERS, Rules(after=Mark(b"k>", tiny_vocabulary().tokens), stop_ids=(X,), min_tokens=2))
    assert X not in allowed(text)
    take(text, "zz")
    assert X in allowed(text)


# ---------------------------------------------------------------- closing


def test_what_leaves_no_room_for_an_ending_is_replaced() -> None:
    long = lark('start: "[" "1" (",1")* "]"')
    text = text_under(long, most=5)
    assert text_of([text.fallback]) == "["
    take(text, "[1")
    comma, bracket = ids(",")[0], ids("]")[0]
    assert text.settle(comma) == comma and not text.closed, "[1,1] has five"
    assert text.take(comma)
    take(text, "1")
    assert text.settle(comma) == bracket and text.closed
    assert text.take(bracket) and text.is_over and text.num_tokens == 5


def test_a_complete_text_ends_rather_than_go_on_for_ever() -> None:
    text = text_under(lark('start: "1" (",1")*'), most=2)
    take(text, "1")
    assert text.settle(ids(",")[0]) is None and text.closed
    assert text.settle(EOS) == EOS


def test_an_ending_that_fills_what_is_left_is_forced() -> None:
    text = text_under(lark('start: "[" /[1-9]*/ "]"'), most=4)
    take(text, "[1")
    assert text.force(most=64) == [] and not text.closed
    take(text, "3")
    assert text_of(text.force(most=64)) == "]" and text.closed and text.is_over


def test_what_would_be_forced_is_settled_too() -> None:
    """Whether it is forced or chosen is a matter of who comes first: drafts, or a step in flight, may be ahead of `force`."""
    either = lark('start: "[" ("1"|"2") "]"')
    forced, settled = text_under(either, most=3), text_under(either, most=3)
    take(settled, "[")
    take(forced, "[")
    rest = forced.force(most=64)
    (other,) = {*ids("1"), *ids("2")} - {rest[0]}
    assert settled.settle(other) == rest[0] and settled.closed


def test_without_a_limit_nothing_is_settled() -> None:
    text = text_under(LETTERS)
    assert text.fallback == -1 and text.settle(X) == X and not text.closed


@pytest.mark.parametrize("least", [0, 3])
def test_the_least_that_a_closing_text_takes(least: int) -> None:
    mark = Mark(b"</think>", tiny_vocabulary().tokens) if least else None
    expected = 2 + (1 if mark is not None else 0)  # "</think>" is one token
    assert ConstrainedText.least_tokens(mark, (4, 5)) == expected
