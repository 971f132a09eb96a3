"""Copies of pages, bit by bit against the naive way, also where a page is target and source."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels.factories import random
from tests.kernels.triton import factories
from trunkline.kernels.interface import KvPages
from trunkline.kernels.triton.pages import copy_pages, gather_pages, scatter_pages

assert factories.DTYPES  # with them comes the mended interpreter
NUM_PAGES = 7


def make_pages(dtype: torch.dtype = torch.float16, layers: int = 3, kv_heads: int = 3, D: int = 10) -> KvPages:
    shape = (layers, NUM_PAGES, kv_heads, 16, D)
    keys, values = random(*shape, seed=1).to(dtype), random(*shape, seed=2).to(dtype)
    return KvPages(keys, values, num_pages=NUM_PAGES, page_size=16, kv_heads=kv_heads, head_dim=D)


def content(kv: KvPages) -> list[bytes]:
    """Of each page: keys of all layers, then values, as a host slot holds them."""
    pools = [pool.flatten(2).view(torch.uint8).numpy() for pool in (kv.keys, kv.values)]
    return [b"".join(pool[:, page].tobytes() for pool in pools) for page in range(kv.num_pages)]


def ids(*pages: int) -> Tensor:
    return torch.tensor(pages, dtype=torch.int32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize(("layers", "kv_heads", "D"), [(1, 1, 1), (2, 3, 24), (3, 1, 96), (2, 2, 128), (5, 7, 10)])
def test_every_dtype_and_size(layers: int, kv_heads: int, D: int, dtype: torch.dtype) -> None:
    kv = make_pages(dtype, layers, kv_heads, D)
    before = content(kv)
    copy_pages(kv, ids(1, 5), ids(0, 3))
    before[0], before[3] = before[1], before[5]
    assert content(kv) == before
    staging = torch.full((2, len(before[0])), 255, dtype=torch.uint8)
    gather_pages(kv, ids(6, 2), staging)
    assert [row.tobytes() for row in staging.numpy()] == [before[6], before[2]] and content(kv) == before
    scatter_pages(kv, staging, ids(4, 6))
    before[4], before[6] = before[6], before[2]
    assert content(kv) == before


@settings(max_examples=20)
@given(st.lists(st.tuples(st.integers(0, NUM_PAGES - 1), st.integers(0, NUM_PAGES - 1)), max_size=8))
def test_copies_are_done_in_order(copies: list[tuple[int, int]]) -> None:
    kv = make_pages(layers=2, kv_heads=1)
    expected = content(kv)
    for source, target in copies:
        expected[target] = expected[source]
    copy_pages(kv, ids(*(source for source, _ in copies)), ids(*(target for _, target in copies)))
    assert content(kv) == expected


def test_the_later_of_two_wins() -> None:
    kv = make_pages()
    staging = torch.from_numpy(np.arange(3, dtype=np.uint8)).repeat_interleave(len(content(kv)[0])).view(3, -1)
    scatter_pages(kv, staging, ids(4, 2, 4))
    assert (content(kv)[4], content(kv)[2]) == (staging[2].numpy().tobytes(), staging[1].numpy().tobytes())


def test_a_pool_of_more_than_2_to_the_31_words() -> None:
    """Memory that nobody touches costs nothing: the last pages of two pools of 16 GiB."""
    num_pages = 2**31 // 2048 + 4
    keys, values = (torch.empty(1, num_pages, 8, 16, 128, dtype=torch.uint8) for _ in range(2))
    kv = KvPages(keys, values, num_pages=num_pages, page_size=16, kv_heads=8, head_dim=128)
    keys[0, -1], values[0, -1] = 3, 4
    copy_pages(kv, ids(num_pages - 1), ids(num_pages - 2))
    assert (keys[0, -2] == 3).all() and (values[0, -2] == 4).all()


def test_misfits_are_refused() -> None:
    kv = make_pages()
    with pytest.raises(AssertionError):
        copy_pages(kv, ids(1), ids(2, 3))
    with pytest.raises(AssertionError):
        copy_pages(kv, ids(1).long(), ids(2).long())
    with pytest.raises(AssertionError):
        gather_pages(kv, ids(1), torch.empty(1, 100, dtype=torch.uint8))
