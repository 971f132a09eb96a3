"""outlines-core as a backend: masks, ends, taking back, forced tokens."""

import numpy as np
import pytest

from tests.grammar.matching import accepts, allowed, mask_of, small_vocabulary
from trunkline.constraint import GrammarSource
from trunkline.grammar.backends.outlines.backend import OutlinesBackend
from trunkline.grammar.interface import Matcher

VOCABULARY = small_vocabulary()
BACKEND = OutlinesBackend(VOCABULARY)
ENDS = set(VOCABULARY.eos_token_ids)


def matcher(source: str, text: bytes = b"") -> Matcher:
    made = BACKEND.compile(GrammarSource("outlines", "regex", source)).matcher()
    for token_id in VOCABULARY.encode(text):
        assert made.accept(token_id)
    return made


def test_masks_hold_what_may_come_and_ends_where_a_text_may_end() -> None:
    assert allowed(matcher("(?:hello|hi)"), VOCABULARY) == {b"h", b"hello"}
    assert mask_of(matcher("a+", b"a"), VOCABULARY) == {ord("a"), *ENDS}
    assert mask_of(matcher("ab?", b"ab"), VOCABULARY) == ENDS


def test_special_tokens_and_ids_without_a_token_never_come() -> None:
    mask = mask_of(matcher("[^x]+"), VOCABULARY)
    assert not mask & VOCABULARY.special_ids
    assert max(mask) < len([token for token in VOCABULARY.tokens if token])
    assert not matcher("[^x]+").accept(max(VOCABULARY.special_ids))
    assert not matcher("[^x]+").accept(10**6)


def test_the_state_of_a_text() -> None:
    one = matcher("ab?", b"a")
    assert one.is_complete and not one.is_stopped
    assert one.accept(ord("b")) and one.is_complete and one.is_stopped
    assert not one.accept(ord("b"))
    one.rollback(2)
    assert not one.is_complete and mask_of(one, VOCABULARY) == {ord("a")}
    with pytest.raises(ValueError, match="0 were accepted"):
        one.rollback(1)


def test_counting_changes_nothing() -> None:
    one = matcher("abc")
    assert one.count_valid([*b"abx"]) == 2
    assert one.count_valid([ord("a"), *ENDS]) == 1
    assert mask_of(one, VOCABULARY) == {ord("a")}


def test_forced_tokens_are_those_with_no_choice() -> None:
    assert matcher("(?:xyz|xy1)").forced() == [*b"xy"]
    assert matcher("a+").forced() == [ord("a")]
    assert matcher("[ab]").forced() == []


def test_forks_go_their_own_way() -> None:
    one = matcher("ab", b"a")
    other = one.fork()
    assert other.accept(ord("b")) and other.is_complete and not one.is_complete


def test_batches() -> None:
    made = [matcher("ab"), matcher("ab", b"a")]
    rows = [np.zeros(VOCABULARY.num_words, np.int32) for _ in made]
    assert BACKEND.fill_batch(made, rows) == {}
    assert [int(np.unpackbits(row.view(np.uint8)).sum()) for row in rows] == [1, 1]


def test_a_model_without_end_of_text() -> None:
    vocabulary = small_vocabulary()
    vocabulary.eos_token_ids = ()
    compiled = OutlinesBackend(vocabulary).compile(GrammarSource("outlines", "regex", "a"))
    one = compiled.matcher()
    assert one.accept(ord("a")) and one.is_complete and one.is_stopped and mask_of(one, vocabulary) == set()


@pytest.mark.parametrize(
    "source",
    [
        GrammarSource("outlines", "regex", "(" + "x" * 10_000),
        GrammarSource("outlines", "ebnf", "a"),
        GrammarSource("xgrammar", "regex", "a"),
    ],
)
def test_what_does_not_compile_is_said_briefly(source: GrammarSource) -> None:
    with pytest.raises(ValueError) as caught:
        BACKEND.compile(source)
    assert 0 < len(str(caught.value)) <= 200


def test_bytes_are_estimated() -> None:
    small, large = (BACKEND.compile(GrammarSource("outlines", "regex", source)) for source in ("a", "[a-z]{40}"))
    assert 0 < small.num_bytes < large.num_bytes
    assert accepts(large, VOCABULARY, "x" * 40)
