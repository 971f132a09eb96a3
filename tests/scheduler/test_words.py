"""Lists of tokens that a text may have, and of words that it must not: on the stub worker, by name with drafts and steps in flight."""

from typing import Any

import numpy as np
import pytest

from tests.scheduler.factories import EOS, Driver, generate, make_engine, plans, plant_drafts
from tests.stub import VOCAB_SIZE, next_token
from trunkline.messages import Generate
from trunkline.step import mask_bits, mask_words


def ask(request_id: str, prompt: list[int], bad_words: Any = (), **sampling: Any) -> Generate:
    asked = generate(request_id, prompt, **sampling)
    return Generate(
        request_id=request_id, prompt=asked.prompt, sampling=asked.sampling, group=asked.group, bad_words=bad_words
    )


def allowed_text(prompt: list[int], max_tokens: int, allowed: set[int], bad_words: Any = ()) -> list[int]:
    """What the stub writes of these tokens alone: its next token, or cyclically the next that may be."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < max_tokens:
        output = tokens[len(prompt) :]
        banned = {ids[-1] for ids in bad_words if output[len(output) - len(ids) + 1 :] == list(ids[:-1])}
        first = next_token(tokens)
        may = allowed - banned
        tokens.append(next(at % VOCAB_SIZE for at in range(first, first + VOCAB_SIZE) if at % VOCAB_SIZE in may))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("right", [0.0, 0.7])
def test_only_these(depth: int, right: float) -> None:
    """Beside one without a list; drafts that may not be are wrong."""
    engine = make_engine(depth=depth)
    plant_drafts(engine, right)
    driver, allowed = Driver(engine), {3, 40, 41, 90}
    driver.send(
        ask("a", [1, 2, 3], allowed_token_ids=tuple(allowed), max_tokens=20), ask("b", [1, 2, 3], max_tokens=20)
    )
    driver.drain()
    assert driver.outcomes["a"].tokens == allowed_text([1, 2, 3], 20, allowed)
    assert driver.outcomes["b"].tokens == allowed_text([1, 2, 3], 20, set(range(VOCAB_SIZE)))


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("right", [0.0, 0.7])
def test_words_are_never_completed(depth: int, right: float) -> None:
    """Of one token, of two and of three; what the prompt ends with is no beginning of one."""
    engine = make_engine(depth=depth)
    plant_drafts(engine, right)
    driver, allowed, bad_words = Driver(engine), {5, 30, 60, 90}, ((90,), (5, 30), (30, 60, 5), (3, 5))
    driver.send(ask("a", [1, 2, 3], bad_words, allowed_token_ids=tuple(allowed), max_tokens=40))
    driver.drain()
    tokens = driver.outcomes["a"].tokens
    assert tokens == allowed_text([1, 2, 3], 40, allowed, bad_words)
    assert {5, 30, 60} == set(tokens) and tokens != allowed_text([1, 2, 3], 40, allowed)


def test_rows_ban_what_would_complete_a_word_without_a_list_of_allowed_ones() -> None:
    engine = make_engine()
    driver = Driver(engine)
    driver.send(ask("a", [1, 2, 3], ((50,), (90, 91)), max_tokens=3))
    driver.drain()
    first, second = driver.outcomes["a"].tokens[:2]
    assert [row.banned for plan in plans(engine) for row in plan.rows] == [(50,)] * 3
    num_before = len(plans(engine))
    driver.send(ask("b", [1, 2, 3], ((50,), (first, 91), (first, second, 92)), max_tokens=3))
    driver.drain()
    assert [row.banned for plan in plans(engine)[num_before:] for row in plan.rows] == [(50,), (50, 91), (50, 92)]


def test_min_tokens_still_hold_and_forks_have_their_own() -> None:
    engine = make_engine()
    driver, allowed = Driver(engine), {EOS, 40}
    for index in range(3):
        driver.send(
            ask(
                f"a{index}",
                [1, 2, 3],
                group="g",
                allowed_token_ids=tuple(allowed),
                min_tokens=2,
                ignore_eos=False,
                seed=index,
            )
        )
    driver.drain()
    for index in range(3):
        assert driver.outcomes[f"a{index}"].tokens[:2] == [40, 40]
        assert set(driver.outcomes[f"a{index}"].tokens) <= allowed


@pytest.mark.parametrize(
    ("bad_words", "sampling", "words"),
    [
        (((1,), (2,)), {"allowed_token_ids": (1, 2)}, "holds only ids that 'bad_words' or 'min_tokens' forbid"),
        ((), {"allowed_token_ids": (EOS,), "min_tokens": 1}, "holds only ids that"),
        (((VOCAB_SIZE,),), {}, f"ids from 0 to {VOCAB_SIZE - 1}"),
        (((),), {}, "'bad_words' is ()"),
        ((), {"allowed_token_ids": (VOCAB_SIZE,)}, f"'allowed_token_ids' is {VOCAB_SIZE}"),
    ],
)
def test_what_leaves_nothing_is_refused(bad_words: Any, sampling: dict[str, Any], words: str) -> None:
    driver = Driver(make_engine())
    driver.send(ask("a", [1, 2, 3], bad_words, **sampling))
    failed = driver.outcomes["a"].failed
    assert failed is not None and failed.status == 400 and words in failed.message, failed


def test_a_word_that_takes_the_last_token_away_fails_its_request() -> None:
    driver = Driver(make_engine())
    driver.send(ask("a", [1, 2, 3], ((40, 40),), allowed_token_ids=(40,)), ask("b", [1, 2, 3], max_tokens=2))
    driver.drain()
    assert driver.outcomes["a"].tokens == [40] and driver.outcomes["a"].failed is not None
    assert len(driver.outcomes["b"].tokens) == 2


@pytest.mark.parametrize("vocab_size", [31, 32, 33, 97])
def test_bits(vocab_size: int) -> None:
    ids = {0, 5, vocab_size - 1}
    words = mask_words(ids, vocab_size)
    assert words.dtype == np.int32 and len(words) == -(-vocab_size // 32)
    assert set(np.flatnonzero(mask_bits(words)).tolist()) == ids
