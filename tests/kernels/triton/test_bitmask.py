"""Bitmasks on logits against the naive reading of their bits."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels.factories import random
from trunkline.kernels.triton import bitmask
from trunkline.kernels.triton.bitmask import apply_bitmask
from trunkline.step import mask_bits


def masked(logits: Tensor, masks: Tensor, mask_rows: list[int]) -> Tensor:
    """The naive way."""
    expected = logits.clone()
    for row, mask_row in enumerate(mask_rows):
        if mask_row >= 0:
            bits = torch.from_numpy(mask_bits(masks[mask_row].numpy())[: logits.shape[1]])
            expected[row, ~bits] = -math.inf
    return expected


def random_masks(rows: int, words: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(-(2**31), 2**31, (rows, words)).astype(np.int32))


@pytest.mark.parametrize(
    ("vocab_size", "words"), [(1, 1), (31, 1), (32, 2), (100, 4), (4097, 129), (9000, 300)], ids=str
)
def test_equals_the_naive_way(vocab_size: int, words: int) -> None:
    logits, masks, mask_rows = random(4, vocab_size), random_masks(3, words), [2, -1, 0, 2]
    expected = masked(logits, masks, mask_rows)
    apply_bitmask(logits, masks, torch.tensor(mask_rows, dtype=torch.int32))
    assert torch.equal(logits, expected)


@settings(max_examples=15)
@given(data=st.data())
def test_any_mask(data: st.DataObject) -> None:
    vocab_size = data.draw(st.integers(1, 200))
    words = st.sampled_from([0, -1, 1, -(2**31), 2**31 - 1]) | st.integers(-(2**31), 2**31 - 1)
    masks = torch.tensor(
        data.draw(st.lists(st.lists(words, min_size=7, max_size=7), min_size=1, max_size=3)), dtype=torch.int32
    )
    mask_rows = data.draw(st.lists(st.integers(-1, len(masks) - 1), min_size=1, max_size=4))
    logits = random(len(mask_rows), vocab_size)
    expected = masked(logits, masks, mask_rows)
    apply_bitmask(logits, masks, torch.tensor(mask_rows, dtype=torch.int32))
    assert torch.equal(logits, expected)


def test_what_everything_is_allowed_to_stays() -> None:
    logits = torch.tensor([[1.0, math.nan, -math.inf]])
    apply_bitmask(logits, torch.tensor([[-1]], dtype=torch.int32), torch.tensor([0], dtype=torch.int32))
    assert torch.equal(logits.isnan(), torch.tensor([[False, True, False]])) and logits[0, 2] == -math.inf


def test_no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU takes an empty grid for an error, the interpreter does not: nothing may be launched."""
    monkeypatch.setattr(bitmask, "_apply_bitmask_kernel", None)
    apply_bitmask(torch.empty(0, 8), random_masks(1, 1), torch.empty(0, dtype=torch.int32))


def test_misfits_are_refused() -> None:
    rows = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(AssertionError, match="for 33 tokens"):
        apply_bitmask(random(1, 33), random_masks(1, 1), rows)
    with pytest.raises(AssertionError):
        apply_bitmask(random(1, 32).half(), random_masks(1, 1), rows)
