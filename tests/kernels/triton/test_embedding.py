"""Row look-up: exact, and with a vocabulary that is split over ranks."""

import math

import pytest
import torch

from tests.kernels.factories import random
from tests.kernels.triton.factories import DTYPES
from trunkline.kernels.triton import embedding
from trunkline.kernels.triton.embedding import embed

SHAPES = [(1, 1, 1), (3, 50, 33), (17, 9, 128), (9, 300, 1030), (2, 70, 5000)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "vocab_size", "width"), SHAPES)
def test_rows_of_the_whole_vocabulary(tokens: int, vocab_size: int, width: int, dtype: torch.dtype) -> None:
    weight = random(vocab_size, width).to(dtype)
    ids = torch.arange(tokens, dtype=torch.int32) * 7 % vocab_size
    out = torch.full((tokens, width), math.nan, dtype=dtype)
    embed(ids, weight, out=out)
    assert torch.equal(out, weight[ids.long()])


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_shares_of_all_ranks_add_up(ranks: int) -> None:
    weight, ids = random(60, 40), torch.tensor([0, 19, 20, 29, 30, 59, 7], dtype=torch.int32)
    total = torch.zeros(7, 40)
    for first_id in range(0, 60, 60 // ranks):
        out = torch.full((7, 40), math.nan)
        embed(ids, weight[first_id : first_id + 60 // ranks].clone(), out=out, first_id=first_id)
        is_here = (ids >= first_id) & (ids < first_id + 60 // ranks)
        assert not out[~is_here].any()
        total += out
    assert torch.equal(total, weight[ids.long()])


def test_no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU takes an empty grid for an error, the interpreter does not: nothing may be launched."""
    monkeypatch.setattr(embedding, "_embed_kernel", None)
    embed(torch.empty(0, dtype=torch.int32), random(5, 8), out=torch.empty(0, 8))


def test_misfits_are_refused() -> None:
    with pytest.raises(AssertionError):
        embed(torch.zeros(2, dtype=torch.int64), random(5, 8), out=torch.empty(2, 8))
    with pytest.raises(AssertionError):
        embed(torch.zeros(2, dtype=torch.int32), random(5, 8).half(), out=torch.empty(2, 8))
