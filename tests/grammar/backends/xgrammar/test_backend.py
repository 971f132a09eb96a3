"""XGrammar as a backend: masks, ends, taking back, batches. Slow: importing the library takes seconds."""

from typing import Any

import numpy as np
import pytest

from tests.grammar.matching import allowed, mask_of, small_vocabulary
from trunkline.constraint import GrammarSource
from trunkline.grammar.backends import registry
from trunkline.grammar.interface import Matcher

VOCABULARY = small_vocabulary()
ENDS = set(VOCABULARY.eos_token_ids)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def backend() -> Any:
    return registry.make("xgrammar", VOCABULARY)


def matcher(backend: Any, body: str, text: bytes = b"") -> Matcher:
    made: Matcher = backend.compile(GrammarSource("xgrammar", "ebnf", f"root ::= {body}")).matcher()
    for token_id in VOCABULARY.encode(text):
        assert made.accept(token_id)
    return made


def test_masks_hold_what_may_come_and_ends_where_a_text_may_end(backend: Any) -> None:
    assert allowed(matcher(backend, '"hello" | "hi"'), VOCABULARY) == {b"h", b"hello"}
    assert mask_of(matcher(backend, "[a]+", b"a"), VOCABULARY) == {ord("a"), *ENDS}
    assert mask_of(matcher(backend, '"ab"', b"ab"), VOCABULARY) == ENDS


def test_special_tokens_and_ids_without_a_token_never_come(backend: Any) -> None:
    for body in ('"\\"" [^"]* "\\""', "[^]*"):  # where any byte may come, the library leaves the mask as it was
        one = matcher(backend, body, b'"')
        mask = mask_of(one, VOCABULARY)
        assert mask & VOCABULARY.special_ids == (ENDS if one.is_complete else set())
        assert max(mask - ENDS) < len([token for token in VOCABULARY.tokens if token])
        assert not one.accept(max(VOCABULARY.special_ids)) and not one.accept(10**6)


def test_the_state_of_a_text(backend: Any) -> None:
    one = matcher(backend, '"a" "b"?', b"a")
    assert one.is_complete and not one.is_stopped
    assert one.accept(ord("b")) and one.is_complete and one.is_stopped
    assert not one.accept(ord("b")) and one.forced() == []
    assert mask_of(one, VOCABULARY) == ENDS  # a mask after the end can still be asked for
    one.rollback(2)
    assert not one.is_complete and mask_of(one, VOCABULARY) == {ord("a")}
    with pytest.raises(ValueError, match="0 were accepted"):
        one.rollback(1)


def test_counting_changes_nothing(backend: Any) -> None:
    one = matcher(backend, '"abc"')
    assert one.count_valid([*b"abx"]) == 2
    assert one.count_valid([ord("a"), *ENDS]) == 1
    assert mask_of(one, VOCABULARY) == {ord("a")}


def test_forks_go_their_own_way(backend: Any) -> None:
    one = matcher(backend, '"ab"', b"a")
    other = one.fork()
    assert other.accept(ord("b")) and other.is_complete and not one.is_complete
    other.rollback(2)
    assert mask_of(other, VOCABULARY) == {ord("a")}


def test_a_batch_is_what_each_mask_is(backend: Any) -> None:
    made = [matcher(backend, '"ab"'), matcher(backend, "[^x]*"), matcher(backend, '"ab"', b"ab")]
    rows = [np.full(VOCABULARY.num_words, 77, np.int32) for _ in made]
    assert backend.fill_batch(made, rows) == {}
    for one, row in zip(made, rows, strict=True):
        alone = np.zeros_like(row)
        one.fill(alone)
        assert (row == alone).all()
    assert backend.fill_batch([], []) == {}


def test_what_does_not_compile_is_said_briefly(backend: Any) -> None:
    for kind, text in (
        ("ebnf", 'root ::= "a'),
        ("ebnf", "x" * 10_000),
        ("structural_tag", '{"type": "structural_tag", "format": {"type": "' + "x" * 5_000 + '"}}'),
        ("regex", "a"),
    ):
        with pytest.raises(ValueError) as caught:
            backend.compile(GrammarSource("xgrammar", kind, text))
        assert 0 < len(str(caught.value)) <= 200 and ".cc" not in str(caught.value)


def test_bytes_grow_as_masks_are_made(backend: Any) -> None:
    compiled = backend.compile(GrammarSource("xgrammar", "ebnf", 'root ::= "x" [a-z]* "y" | root'))
    before = compiled.num_bytes
    one = compiled.matcher()
    one.accept(ord("x"))
    mask_of(one, VOCABULARY)
    assert compiled.num_bytes >= before > 0
