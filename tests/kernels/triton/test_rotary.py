"""RoPE, norms per head and the write into pages: right by the float64 oracle, and nothing else is touched."""

import dataclasses
import math
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.kernels.factories import Heads, Requests, assert_close, random, rope_table
from tests.kernels.triton.factories import DTYPES, TOLERANCE
from trunkline.kernels.interface import Batch, KvPages
from trunkline.kernels.reference import ReferenceKernels
from trunkline.kernels.triton.rotary import rotate_and_store, specs

ORACLE = ReferenceKernels(torch.float64)


class Shape(NamedTuple):
    contexts: tuple[int, ...]
    heads: Heads
    rotary: int
    page_size: int


SHAPES = [
    Shape((1,), Heads(query=1, kv=1, dim=2), 2, 16),
    Shape((4, 1), Heads(query=9, kv=3, dim=64), 64, 16),
    Shape((3, 2), Heads(query=6, kv=2, dim=96), 96, 32),
    Shape((21,), Heads(query=8, kv=1, dim=256), 64, 64),
    Shape((5, 3), Heads(query=7, kv=7, dim=10), 6, 16),
]
FLOAT8 = torch.float8_e4m3fn
STORED_WITHIN = TOLERANCE | {FLOAT8: 0.07}  # three bits after the first


def make_pages(requests: Requests, dtype: torch.dtype) -> KvPages:
    """Full of NaN."""
    heads = requests.heads
    keys, values = (
        torch.full((2, requests.num_pages, heads.kv, requests.page_size, heads.dim), math.nan).to(dtype)
        for _ in range(2)
    )
    return KvPages(
        keys,
        values,
        num_pages=requests.num_pages,
        page_size=requests.page_size,
        kv_heads=heads.kv,
        head_dim=heads.dim,
    )


def oracle(requests: Requests, qkv: Tensor, rope: Tensor, **norm: Any) -> tuple[Tensor, KvPages]:
    """What qkv becomes, and its pages, in our order."""
    turned = qkv.double()
    kv = requests.allocate(ORACLE, torch.float64)
    norm = {name: weight.double() if isinstance(weight, Tensor) else weight for name, weight in norm.items()}
    ORACLE.rotate_and_store(turned, rope, requests.batch(requests.everything()), kv, 1, **norm)
    return turned, dataclasses.replace(kv, keys=kv.keys.transpose(2, 3), values=kv.values.transpose(2, 3))


def check(requests: Requests, rope: Tensor, dtype: torch.dtype, stored: torch.dtype, *, norm: bool) -> None:
    D = requests.heads.dim
    weights: dict[str, Any] = {}
    if norm:
        weights = {"q_norm": random(D, seed=8).to(dtype), "k_norm": random(D, seed=9).to(dtype), "epsilon": 1e-5}
    qkv = requests.rows(requests.everything(), dtype)
    values = qkv[:, -requests.heads.kv * D :].clone()
    expected, pages = oracle(requests, qkv, rope, **weights)
    kv = make_pages(requests, stored)
    rotate_and_store(qkv, rope, requests.batch(requests.everything()), kv, 1, **weights)
    assert_close(qkv, expected, TOLERANCE[dtype])
    assert torch.equal(qkv[:, -requests.heads.kv * D :], values)
    tolerance = max(STORED_WITHIN[stored], TOLERANCE[dtype])
    for ours, theirs in ((kv.keys, pages.keys), (kv.values, pages.values)):
        ours = ours.float()
        assert ours[0].isnan().all(), "the other layer"
        assert torch.equal(ours[1].isnan(), theirs[1].isnan()), "these tokens, and nothing else"
        assert_close(ours[1].nan_to_num(), theirs[1].nan_to_num(), tolerance)


@pytest.mark.parametrize("norm", [False, True], ids=["", "norm"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_oracle(shape: Shape, dtype: torch.dtype, norm: bool) -> None:
    requests = Requests(list(shape.contexts), shape.heads, page_size=shape.page_size)
    check(requests, rope_table(max(shape.contexts), shape.rotary), dtype, dtype, norm=norm)


@pytest.mark.parametrize(
    ("dtype", "stored"),
    [
        (torch.float32, FLOAT8),
        (torch.bfloat16, FLOAT8),
        (torch.float16, FLOAT8),
        (torch.bfloat16, torch.float16),
        (torch.float32, torch.bfloat16),
    ],
    ids=str,
)
def test_pages_of_another_dtype(dtype: torch.dtype, stored: torch.dtype) -> None:
    requests = Requests([5, 2], Heads(query=4, kv=2, dim=64))
    check(requests, rope_table(5, 64), dtype, stored, norm=False)


@pytest.mark.parametrize(
    ("stored", "largest"), [(FLOAT8, 448.0), (torch.float16, 65504.0), (torch.float32, 1e30)], ids=str
)
def test_what_is_too_large_becomes_the_largest_and_nan_stays(stored: torch.dtype, largest: float) -> None:
    requests = Requests([1], Heads(query=1, kv=1, dim=4))
    requests.qkv[0][0, -4:] = torch.tensor([1e30, -1e30, 2.0, math.nan])
    kv = make_pages(requests, stored)
    batch = requests.batch(requests.everything())
    rotate_and_store(requests.rows(requests.everything()), rope_table(1, 2), batch, kv, 0)
    page, place = divmod(int(batch.slots[0]), 16)
    written = kv.values[0, page, 0, place].float()
    assert written[:3].tolist() == pytest.approx([largest, -largest, 2.0]) and written[3].isnan()


def test_padding_is_turned_but_not_stored() -> None:
    requests = Requests([4], Heads(query=2, kv=1, dim=16))
    batch = requests.batch(requests.everything())
    batch = dataclasses.replace(batch, slots=torch.where(torch.arange(4) < 2, batch.slots, -1).int())
    kv, qkv, rope = make_pages(requests, torch.float32), requests.rows(requests.everything()), rope_table(4, 16)
    expected, _ = oracle(requests, qkv, rope)
    rotate_and_store(qkv, rope, batch, kv, 1)
    assert_close(qkv, expected, 1e-5)
    for pool in (kv.keys, kv.values):
        assert (
            pool.isfinite().sum() == 2 * 16
            and pool[1].transpose(1, 2).flatten(0, 1)[batch.slots[:2].long()].isfinite().all()
        )


def test_a_row_does_not_depend_on_the_others() -> None:
    requests = Requests([40], Heads(query=5, kv=2, dim=16))
    rope = rope_table(40, 16)
    norms: dict[str, Any] = {"q_norm": random(16, seed=8), "k_norm": random(16, seed=9), "epsilon": 1e-5}
    kv, together = make_pages(requests, torch.float32), requests.rows(requests.everything())
    rotate_and_store(together, rope, requests.batch(requests.everything()), kv, 1, **norms)
    for row in (0, 17, 39):
        alone = requests.rows([(0, row, row + 1)])
        other = make_pages(requests, torch.float32)
        rotate_and_store(alone, rope, requests.batch([(0, row, row + 1)]), other, 1, **norms)
        assert torch.equal(alone[0], together[row])
        written = other.keys.isfinite()
        assert torch.equal(other.keys[written], kv.keys[written])


def test_a_pool_of_more_than_2_to_the_31_numbers() -> None:
    """Memory that nobody touches costs nothing: two pages of 2 GiB of keys and 2 GiB of values."""
    page_size, D = 64, 256
    num_pages = 2**31 // (page_size * D) + 2
    keys, values = (torch.empty(1, num_pages, 1, page_size, D, dtype=FLOAT8) for _ in range(2))
    kv = KvPages(keys, values, num_pages=num_pages, page_size=page_size, kv_heads=1, head_dim=D)
    slot = num_pages * page_size - 3
    batch = Batch(
        positions=torch.zeros(1, dtype=torch.int32),
        slots=torch.tensor([slot], dtype=torch.int32),
        **{name: torch.empty(0) for name in ("query_start", "context_len", "page_table", "readers", "runs")},
    )
    qkv = random(1, 3 * D)
    rotate_and_store(qkv, rope_table(1, D), batch, kv, 0)
    assert torch.equal(values[0, -1, 0, -3].float(), qkv[0, -D:].to(FLOAT8).float())


def test_misfits_are_refused() -> None:
    requests = Requests([3], Heads(query=2, kv=1, dim=16))
    batch, kv, qkv = requests.batch(requests.everything()), make_pages(requests, torch.float32), random(3, 64)
    with pytest.raises(AssertionError):
        rotate_and_store(qkv[:2], rope_table(3, 16), batch, kv, 0)
    with pytest.raises(AssertionError):
        rotate_and_store(qkv, rope_table(3, 18), batch, kv, 0)
    with pytest.raises(AssertionError, match="both norms or none"):
        rotate_and_store(qkv, rope_table(3, 16), batch, kv, 0, q_norm=torch.ones(16))


def test_only_newer_chips_are_shipped_float8() -> None:
    assert not any("fp8" in spec.name for spec in specs(80))
    assert any("fp8" in spec.name for spec in specs(90))
    assert len({spec.name for spec in specs(90)}) == len(specs(90))
