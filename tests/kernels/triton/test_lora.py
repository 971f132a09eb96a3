"""Grouped LoRA: right by float64 for any mixture of adapters, and rows without one are left alone."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels.factories import assert_close, random
from tests.kernels.triton.factories import DTYPES, TOLERANCE
from trunkline.kernels.triton.lora import (
    EXPAND,
    SHRINK,
    SPLITS,
    Adapters,
    add_lora,
    block_rows,
    max_items,
    plan_segments,
    reference,
    specs,
    workspace_size,
)
from trunkline.kernels.triton.spec import ARCHS

SHAPES = [  # T, N, K, padded rank
    (1, 80, 48, 16),
    (5, 144, 144, 32),
    (17, 48, 160, 16),
    (33, 96, 64, 48),
    (70, 160, 144, 16),
]


def make_adapters(ranks, n, k, padded, *, dtype=torch.float32, seed=0):
    """Everything beyond an adapter's rank is NaN, and so is slot 0, which no test uses."""
    a, b = random(len(ranks), padded, k, seed=seed), random(len(ranks), n, padded, seed=seed + 1)
    for slot, rank in enumerate(ranks):
        a[slot, rank:], b[slot, :, rank:] = math.nan, math.nan
    a[0], b[0] = math.nan, math.nan
    scales = torch.arange(len(ranks)) + 0.5
    return Adapters(
        a=(a / k**0.5).to(dtype), b=b.to(dtype), ranks=torch.tensor(ranks, dtype=torch.int32), scales=scales
    )


def add(x, adapters, slots, out, *, num_items=None):
    """`out` with the adapters' part added, in place."""
    segments = plan_segments(slots, block_m=block_rows(len(x), x.dtype), num_items=num_items)
    workspace = torch.full((workspace_size(len(x), adapters.a.shape[1], x.dtype),), math.nan)
    add_lora(x, adapters, segments, workspace=workspace, out=out)
    return out


def make_slots(rows, slots, seed=0):
    """Slots 1 … slots - 1, or none."""
    drawn = np.random.default_rng(seed).integers(0, slots, rows).astype(np.int32)
    return np.where(drawn == 0, -1, drawn).astype(np.int32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "n", "k", "padded"), SHAPES)
def test_equals_float64(rows, n, k, padded, dtype) -> None:
    adapters = make_adapters([8, 1, padded, padded - 3], n, k, padded, dtype=dtype)
    slots = make_slots(rows, 4) if rows > 1 else np.array([2], np.int32)
    x, before = random(rows, k, seed=2).to(dtype), random(rows, n, seed=3).to(dtype)
    x[slots < 0] = math.nan  # those rows are not read
    out = add(x, adapters, slots, before.clone())
    assert_close(out, reference(x, adapters, slots, before), TOLERANCE[dtype])
    assert torch.equal(out[slots < 0], before[slots < 0])


def test_rows_without_an_adapter_are_untouched() -> None:
    adapters = make_adapters([8, 8], 32, 32, 16)
    before = random(6, 32)
    before[1] = math.nan
    bits = before.clone().view(torch.int32)
    out = add(random(6, 32), adapters, np.full(6, -1, np.int32), before)
    assert torch.equal(out.view(torch.int32), bits)
    out = add(random(6, 32), adapters, np.array([-1, -1, 1, -1, -1, -1], np.int32), before)
    changed = (out.view(torch.int32) != bits).any(dim=1)
    assert changed.tolist() == [False, False, True, False, False, False]


def test_columns_of_a_wider_tensor() -> None:
    """The v of a merged q, k and v."""
    adapters, slots = make_adapters([8, 8], 32, 48, 16), np.array([1, -1, 1], np.int32)
    x, before = random(3, 48), random(3, 96)
    out = before.clone()
    add(x, adapters, slots, out[:, 64:])
    assert torch.equal(out[:, :64], before[:, :64])
    assert_close(out[:, 64:], reference(x, adapters, slots, before[:, 64:]), 1e-5)


@pytest.mark.parametrize("rows", [16, 70])
def test_a_row_does_not_depend_on_the_others(rows) -> None:
    """Its bits are the same among other rows, adapters and places, as long as items are of the same size."""
    adapters = make_adapters([8, 16, 5], 48, 144, 16, dtype=torch.bfloat16)
    x, before = random(rows, 144).bfloat16(), random(rows, 48, seed=1).bfloat16()
    slots = make_slots(rows, 3)
    together = add(x, adapters, slots, before.clone())
    order = torch.from_numpy(np.random.default_rng(1).permutation(rows))
    shuffled = add(x[order].contiguous(), adapters, slots[order.numpy()], before[order].contiguous())
    assert torch.equal(shuffled, together[order])
    some = slots.copy()
    some[1 : rows // 2] = -1
    fewer = add(x, adapters, some, before.clone())
    assert torch.equal(fewer[rows // 2 :], together[rows // 2 :])


def test_padding_of_a_captured_graph_changes_nothing() -> None:
    adapters, slots = make_adapters([8, 8], 32, 32, 16), np.array([1, -1, 1], np.int32)
    x, before = random(3, 32), random(3, 32, seed=1)
    exact = add(x, adapters, slots, before.clone())
    assert torch.equal(add(x, adapters, slots, before.clone(), num_items=max_items(3, 2, block_m=16)), exact)


@given(slots=st.lists(st.integers(-1, 5), max_size=80), block_m=st.sampled_from([2, 16, 64]))
def test_the_plan_covers_each_row_once(slots, block_m) -> None:
    segments = plan_segments(np.array(slots, np.int32), block_m=block_m)
    rows, seen = segments.rows.tolist(), []
    for slot, first, count in segments.items.tolist():
        assert 1 <= count <= block_m
        assert all(slots[row] == slot for row in rows[first : first + count])
        seen += rows[first : first + count]
    assert sorted(seen) == [row for row, slot in enumerate(slots) if slot >= 0]
    most = max_items(len(slots), 6, block_m=block_m)
    assert len(segments.items) <= most
    padded = plan_segments(np.array(slots, np.int32), block_m=block_m, num_items=most + 1)
    assert padded.items.tolist()[: len(segments.items)] == segments.items.tolist()
    assert not padded.items[len(segments.items) :, 2].any()


def test_the_plan_by_hand() -> None:
    segments = plan_segments(np.array([2, -1, 0, 2, 2], np.int32), block_m=2)
    assert segments.rows.tolist() == [2, 0, 3, 4, 0]
    assert segments.items.tolist() == [[0, 0, 1], [2, 1, 2], [2, 3, 1]]


def test_misfits_are_refused() -> None:
    adapters = make_adapters([8, 8], 32, 48, 16)
    slots, x, out = np.zeros(3, np.int32), torch.zeros(3, 48), torch.zeros(3, 32)
    parts = {"a": adapters.a, "b": adapters.b, "ranks": adapters.ranks, "scales": adapters.scales}
    with pytest.raises(AssertionError, match=r"b \(2, 16, 32\) must be \(2, 16, 16\)"):
        Adapters(**{**parts, "b": adapters.b.mT.contiguous()})
    with pytest.raises(AssertionError, match="padded to 8"):
        Adapters(**{**parts, "a": adapters.a[:, :8].contiguous(), "b": adapters.b[:, :, :8].contiguous()})
    with pytest.raises(AssertionError, match="ranks are"):
        Adapters(**{**parts, "ranks": adapters.ranks.long()})
    with pytest.raises(AssertionError, match="x has 32 columns, the adapters 48 inputs"):
        add(torch.zeros(3, 32), adapters, slots, out)
    with pytest.raises(AssertionError, match="out"):
        add(x, adapters, slots, torch.zeros(2, 32))
    with pytest.raises(AssertionError, match=r"x is torch\.float16"):
        add(x.half(), adapters, slots, out.half())
    with pytest.raises(AssertionError, match="segments are of 2 rows, x has 3"):
        add(x, adapters, slots[:2], out)
    with pytest.raises(AssertionError, match="multiple of 16"):
        add(x, adapters, slots, torch.zeros(3, 64)[:, 8:40])
    with pytest.raises(AssertionError, match="is too small"):
        add_lora(x, adapters, plan_segments(slots, block_m=16), workspace=torch.zeros(9), out=out)
    with pytest.raises(AssertionError, match="segments of 64 rows for 3 rows"):
        add_lora(x, adapters, plan_segments(slots, block_m=64), workspace=torch.zeros(9), out=out)
    with pytest.raises(AssertionError, match="1 items do not fit into 0"):
        plan_segments(slots, block_m=16, num_items=0)


@pytest.mark.parametrize("arch", ARCHS)
def test_what_is_shipped(arch) -> None:
    assert len(specs(arch)) == len({spec.name for spec in specs(arch)}) == 2 * 5
    for rows, splits in SPLITS.items():
        assert SHRINK[arch][rows].blocks["SPLITS"] == EXPAND[arch][rows].blocks["SPLITS"] == splits
