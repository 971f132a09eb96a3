"""Masks in the sampler: a row under a mask chooses as if everything else were banned, whatever stands beside it."""

import dataclasses
import math
import threading

import numpy as np
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.workers.test_sampler import make_row, naive_candidates, naive_choice, rows_with_logits
from tests.workers.test_worker import decode, make_counter
from trunkline.step import Int32
from trunkline.workers.sampler import allowed_tokens, sample


def mask_of(token_ids: set[int], num_words: int) -> Int32:
    """One row; bits beyond the vocabulary are as the caller likes."""
    bits = np.zeros(32 * num_words, np.uint8)
    bits[sorted(token_ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


@given(st.integers(1, 200), st.sets(st.integers(0, 223)))
def test_the_bits_of_a_mask_are_token_ids(vocab_size: int, token_ids: set[int]) -> None:
    mask = mask_of(token_ids, 7)
    assert allowed_tokens(mask, vocab_size).tolist() == sorted(token for token in token_ids if token < vocab_size)


@given(rows_with_logits(), st.data())
def test_a_mask_is_a_ban_of_everything_else(case, data) -> None:
    logits, row = case
    assume(len(logits) > 1)
    allowed = data.draw(st.sets(st.integers(0, len(logits) - 1), min_size=2))
    beyond = data.draw(st.sets(st.integers(len(logits), 95), max_size=3))
    banned = replace(row, banned=(*row.banned, *(set(range(len(logits))) - allowed)))
    assume(naive_candidates(logits, banned))
    rows = [replace(row, position=row.position + i, mask=1) for i in range(4)]
    masks = np.stack([mask_of(set(), 3), mask_of(allowed | beyond, 3)])
    samples = sample(torch.from_numpy(logits).repeat(len(rows), 1), rows, masks)
    assert not samples.failed
    expected = [naive_choice(logits, replace(banned, position=row.position)) for row in rows]
    assert samples.token_ids.tolist() == expected


def test_the_choice_under_a_mask_is_that_of_a_row_alone() -> None:
    generator = np.random.default_rng(1)
    logits = generator.standard_normal((6, 5000)).astype(np.float32)
    allowed = [set(generator.choice(5000, num, replace=False).tolist()) for num in (4999, 3000, 700, 12, 2, 1)]
    masks = np.stack([mask_of(ids, 160) for ids in allowed])
    rows = [replace(make_row(temperature=0.9, top_p=0.9, seed=i), mask=i) for i in range(6)]
    together = sample(torch.from_numpy(logits), rows, masks).token_ids.tolist()
    alone = [int(sample(torch.from_numpy(logits[i : i + 1]), [rows[i]], masks).token_ids[0]) for i in range(6)]
    assert together == alone
    assert all(token in ids for token, ids in zip(together, allowed, strict=True))


def test_one_token_left_is_taken_whatever_the_logits_say() -> None:
    row = replace(make_row(temperature=0, logprobs=1, logit_bias={2: -100}, min_tokens=3, banned=(2,)), mask=0)
    samples = sample(torch.tensor([[1.0, 5.0, -math.inf]]), [row], mask_of({2, 40}, 2)[None])
    assert samples.token_ids.tolist() == [2] and not samples.failed
    assert samples.logprobs[0] is not None and samples.logprobs[0].token_ids.tolist() == [2, 1]


def test_one_token_left_still_shows_that_logits_are_not_sound() -> None:
    samples = sample(torch.tensor([[1.0, math.nan]]), [replace(make_row(), mask=0)], mask_of({0}, 1)[None])
    assert "must be finite" in samples.failed[0] and samples.token_ids.tolist() == [-1]


def test_a_row_that_may_choose_nothing_fails_alone() -> None:
    rows = [replace(make_row(temperature=0), mask=0), make_row(temperature=0), replace(make_row(temperature=0), mask=1)]
    masks = np.stack([mask_of({40}, 2), mask_of({0, 1}, 2)])  # 40 is beyond the vocabulary
    samples = sample(torch.tensor([[1.0, 2.0, 3.0]] * 3), rows, masks)
    assert samples.token_ids.tolist() == [-1, 2, 1] and list(samples.failed) == [0]
    assert "The grammar leaves no token" in samples.failed[0]
    impossible = replace(make_row(temperature=0), mask=0)
    failed = sample(torch.tensor([[-math.inf, -math.inf, 3.0]]), [impossible], mask_of({0, 1}, 1)[None]).failed
    assert all(word in failed[0] for word in ("grammar", "min_tokens", "logit_bias"))


def test_the_logprob_of_the_fallback_is_reported_beside_the_choice() -> None:
    rows = [replace(make_row(temperature=0, logprobs=0), fallback=0), replace(make_row(temperature=0), fallback=0)]
    samples = sample(torch.tensor([[0.0, 1.0]] * 2), rows)
    assert samples.token_ids.tolist() == [1, 1] and list(samples.fallback_logprobs) == [0]
    (fallback,) = samples.fallback_logprobs.values()
    assert fallback.token_ids.tolist() == [0] and fallback.rank == 2
    np.testing.assert_allclose(fallback.logprobs, [-math.log(1 + math.e)], rtol=1e-6)


class LateMasks:
    """Filled when the test says so."""

    def __init__(self, masks: Int32) -> None:
        self.masks, self.filled, self.asked = masks, threading.Event(), threading.Event()

    def wait(self) -> Int32:
        self.asked.set()
        assert self.filled.wait(timeout=30)
        return self.masks


def test_a_worker_computes_while_its_masks_are_filled() -> None:
    worker = make_counter(depth=0)
    plan = decode(3, 8, step=1)
    masks = LateMasks(mask_of({2, 5}, 1)[None])
    rows = (replace(plan.rows[0], mask=0), plan.rows[1])
    handle = worker.submit(dataclasses.replace(plan, rows=rows, masks=masks))
    assert masks.asked.wait(timeout=30), "it was submitted before they are filled"
    assert worker._runner is not None and worker._runner.read == [[3, 8]], "and has computed the step"
    masks.filled.set()
    assert worker.wait(handle).token_ids.tolist() == [2, 9], "of equals the lowest, and the other row is free"
    worker.close()
