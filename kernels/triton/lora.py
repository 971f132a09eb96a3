"""Low-rank adapters of many requests in one go: out[t] += scale · (x[t] Aᵀ) Bᵀ, by the adapter of each row.

    segments = plan_segments(slot_of_row, block_m=block_rows(len(x), x.dtype)).to(x.device)      # once a step
    add_lora(x, adapters, segments, workspace=workspace, out=out)                                # every layer

Low-rank adapters are arXiv:2106.09685; multiplying the rows of several at once is Punica's idea (arXiv:2310.18547). The
host sorts rows by adapter and cuts them into items, each at most `block_m` rows of one; a program works on one item.

slot_of_row   [ 2, -1,  0,  2,  2]         row 1 has no adapter: what it has in `out` is not even read
rows          [ 2,  0,  3,  4,  0]         sorted by slot; 0 pads
items         [(0, 0, 1), (2, 1, 2), (2, 3, 1)]           block_m 2: (slot, first of `rows`, count)

Two kernels: shrink sums parts of K into a workspace, expand adds these in a fixed order. The bits of a row depend on its
adapter and on block_m, not on the rows beside it.
"""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from trunkline.kernels.triton.spec import Config, KernelSpec
from trunkline.kernels.triton.tiles import FLOAT_TYPES, Tiles, arch_of, needed, shipped

RANK_MULTIPLE = 16  # what ranks are padded to: the least depth of a tensor-core product


# By rows of an item; 0: float32's. Few rows make few programs, so that K is cut into more parts.
SPLITS = {16: 8, 64: 2, 0: 8}


def _shrink(rows: int, block_k: int) -> Config:
    blocks = {"BLOCK_M": rows or 16, "BLOCK_R": RANK_MULTIPLE, "BLOCK_K": block_k, "SPLITS": SPLITS[rows]}
    return Config(blocks, num_stages=4)


def _expand(rows: int, block_n: int) -> Config:
    blocks = {"BLOCK_M": rows or 16, "BLOCK_R": RANK_MULTIPLE, "BLOCK_N": block_n, "SPLITS": SPLITS[rows]}
    return Config(blocks, num_stages=2)


SHRINK: dict[int, Tiles] = {
    80: {16: _shrink(16, 128), 64: _shrink(64, 64), 0: _shrink(0, 32)},
    90: {16: _shrink(16, 128), 64: _shrink(64, 128), 0: _shrink(0, 32)},
    100: {16: _shrink(16, 128), 64: _shrink(64, 128), 0: _shrink(0, 32)},
}
EXPAND: dict[int, Tiles] = {
    arch: {16: _expand(16, 128), 64: _expand(64, 128), 0: _expand(0, 64)} for arch in (80, 90, 100)
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapters:
    """The adapters of one linear layer with K inputs and N outputs (multiples of 16), stacked in slots.

    a       [slots, R, K]   R is the largest rank, rounded up to a multiple of 16
    b       [slots, N, R]
    ranks   int32 [slots]   the true rank of each, at most R: beyond it nothing of a and b is read
    scales  float32 [slots] alpha / rank
    """

    a: Tensor
    b: Tensor
    ranks: Tensor
    scales: Tensor

    def __post_init__(self) -> None:
        (slots, rank, k), n = self.a.shape, self.b.shape[1]
        assert self.b.shape == (slots, n, rank), f"b {tuple(self.b.shape)} must be {(slots, n, rank)}"
        assert rank % RANK_MULTIPLE == 0, f"ranks are padded to {rank}, which is no multiple of {RANK_MULTIPLE}"
        assert k % 16 == 0 and n % 16 == 0, f"K {k} and N {n} must be multiples of 16"
        assert self.a.dtype == self.b.dtype and self.a.dtype in FLOAT_TYPES, f"{self.a.dtype} and {self.b.dtype}"
        assert self.ranks.shape == (slots,) and self.ranks.dtype == torch.int32, f"ranks are {self.ranks}"
        assert self.scales.shape == (slots,) and self.scales.dtype == torch.float32, f"scales are {self.scales}"
        assert all(part.is_contiguous() for part in (self.a, self.b, self.ranks, self.scales))


@dataclass(frozen=True, slots=True)
class Segments:
    """Which rows each program works on; see the top.

    rows   int32 [T]
    items  int32 [I, 3]: slot, first place in `rows`, number of rows; of no rows at all: padding
    """

    rows: Tensor
    items: Tensor
    block_m: int

    def to(self, device: torch.device) -> "Segments":
        return replace(self, rows=self.rows.to(device), items=self.items.to(device))


def block_rows(rows: int, dtype: torch.dtype) -> int:
    """The `block_m` of a launch over that many rows."""
    return 16 if rows <= 64 or dtype == torch.float32 else 64


def max_items(rows: int, slots: int, *, block_m: int) -> int:
    """How many items that many rows make at most, with adapters in so many slots: what a CUDA graph is captured with."""
    return min(rows, rows // block_m + slots)


def workspace_size(rows: int, rank: int, dtype: torch.dtype) -> int:
    """How many float32 numbers `add_lora` needs for that many rows and adapters padded to this rank."""
    return SPLITS[_tile(block_rows(rows, dtype), dtype)] * rows * rank


def plan_segments(slot_of_row: npt.NDArray[np.int32], *, block_m: int, num_items: int | None = None) -> Segments:
    """Sort rows by their adapters' slots (-1: none) and cut them into items; padded to `num_items`, if given.

    Slots are not checked against those that there are: they come from whoever loaded the adapters.
    """
    order = np.argsort(slot_of_row, kind="stable").astype(np.int32)
    order = order[np.count_nonzero(slot_of_row < 0) :]
    slots, firsts, counts = np.unique(slot_of_row[order], return_index=True, return_counts=True)
    items = [
        (slot, first + done, min(block_m, count - done))
        for slot, first, count in zip(slots.tolist(), firsts.tolist(), counts.tolist(), strict=True)
        for done in range(0, count, block_m)
    ]
    size = len(items) if num_items is None else num_items
    assert len(items) <= size, f"{len(items)} items do not fit into {num_items}"
    padded = np.zeros((size, 3), np.int32)
    padded[: len(items)] = np.array(items, np.int32).reshape(-1, 3)
    rows = np.zeros(len(slot_of_row), np.int32)
    rows[: len(order)] = order
    return Segments(torch.from_numpy(rows), torch.from_numpy(padded), block_m)


@triton.jit(do_not_specialize=["T"])
def shrink_kernel(
    x_ptr,
    a_ptr,
    ranks_ptr,
    rows_ptr,
    items_ptr,
    workspace_ptr,
    T,
    K,
    R,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """workspace[split, row] = this part of x[row] @ a[slot].T, a block of the rank."""
    item_ptr = items_ptr + tl.program_id(0) * 3
    slot, first, count = tl.load(item_ptr).to(tl.int64), tl.load(item_ptr + 1), tl.load(item_ptr + 2)
    rank, first_r = tl.load(ranks_ptr + slot), tl.program_id(1) * BLOCK_R
    if (count == 0) | (first_r >= rank):
        return
    is_row = tl.arange(0, BLOCK_M) < count
    rows = tl.load(rows_ptr + first + tl.arange(0, BLOCK_M), mask=is_row, other=0).to(tl.int64)
    r = first_r + tl.arange(0, BLOCK_R)
    x_row_ptrs = x_ptr + rows[:, None] * K
    a_row_ptrs = a_ptr + (slot * R + r)[None, :] * K
    split = tl.program_id(2)
    length = tl.cdiv(tl.cdiv(K, SPLITS), BLOCK_K) * BLOCK_K
    total = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
    for start in range(split * length, min(K, (split + 1) * length), BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        x = tl.load(x_row_ptrs + k[None, :], mask=is_row[:, None] & (k < K)[None, :], other=0.0)
        a = tl.load(a_row_ptrs + k[:, None], mask=(r < rank)[None, :] & (k < K)[:, None], other=0.0)
        total = tl.dot(x, a, total, input_precision="ieee")
    part_ptrs = workspace_ptr + (split.to(tl.int64) * T + rows)[:, None] * R + r[None, :]
    tl.store(part_ptrs, total, mask=is_row[:, None])


@triton.jit(do_not_specialize=["T"])
def expand_kernel(
    workspace_ptr,
    b_ptr,
    ranks_ptr,
    scales_ptr,
    rows_ptr,
    items_ptr,
    out_ptr,
    T,
    N,
    R,
    stride_out,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """out[row] += scale * (sum over splits of workspace[split, row]) @ b[slot].T, a block of columns."""
    item_ptr = items_ptr + tl.program_id(0) * 3
    slot, first, count = tl.load(item_ptr).to(tl.int64), tl.load(item_ptr + 1), tl.load(item_ptr + 2)
    if count == 0:
        return
    rank, scale = tl.load(ranks_ptr + slot), tl.load(scales_ptr + slot)
    is_row = tl.arange(0, BLOCK_M) < count
    rows = tl.load(rows_ptr + first + tl.arange(0, BLOCK_M), mask=is_row, other=0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    b_row_ptrs = b_ptr + (slot * N + columns)[None, :] * R
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, rank, BLOCK_R):
        r = start + tl.arange(0, BLOCK_R)
        shrunk = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
        for split in tl.static_range(SPLITS):
            part_ptrs = workspace_ptr + (rows + split * T)[:, None] * R + r[None, :]
            shrunk += tl.load(part_ptrs, mask=is_row[:, None], other=0.0)
        b = tl.load(b_row_ptrs + r[:, None], mask=(columns < N)[None, :] & (r < rank)[:, None], other=0.0)
        total = tl.dot(shrunk.to(b.dtype), b, total, input_precision="ieee")
    out_ptrs = out_ptr + rows[:, None] * stride_out + columns[None, :]
    mask = is_row[:, None] & (columns < N)[None, :]
    out = tl.load(out_ptrs, mask=mask, other=0.0).to(tl.float32) + total * scale
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=mask)


def add_lora(x: Tensor, adapters: Adapters, segments: Segments, *, workspace: Tensor, out: Tensor) -> None:
    """out[t] += scale * (x[t] @ a[slot].T) @ b[slot].T for every row t with an adapter; the others stay bit for bit.

    x [T, K] contiguous; out [T, N], perhaps some columns of a wider tensor; both of the adapters' dtype.
    workspace float32, at least `workspace_size` long; what is in it does not matter.
    """
    (t, k), (_, rank, _), n = x.shape, adapters.a.shape, adapters.b.shape[1]
    assert k == adapters.a.shape[2], f"x has {k} columns, the adapters {adapters.a.shape[2]} inputs"
    assert out.shape == (t, n), f"out {tuple(out.shape)} must be {(t, n)}"
    assert x.dtype == out.dtype == adapters.a.dtype, f"x is {x.dtype}, out {out.dtype}, a {adapters.a.dtype}"
    assert x.is_contiguous() and out.stride(1) == 1
    assert out.stride(0) % 16 == 0 and out.storage_offset() % 16 == 0, "columns of `out` start at a multiple of 16"
    assert segments.rows.shape == (t,), f"segments are of {len(segments.rows)} rows, x has {t}"
    assert segments.block_m == block_rows(t, x.dtype), f"segments of {segments.block_m} rows for {t} rows"
    assert workspace.dtype == torch.float32 and workspace.is_contiguous()
    assert workspace.numel() >= workspace_size(t, rank, x.dtype), f"a workspace of {workspace.numel()} is too small"
    num_items = len(segments.items)
    if num_items == 0:
        return
    arch, tile = arch_of(x.device), _tile(segments.block_m, x.dtype)
    shrink, expand = SHRINK[arch][tile], EXPAND[arch][tile]
    shrink_kernel[(num_items, rank // RANK_MULTIPLE, shrink.blocks["SPLITS"])](
        x,
        adapters.a,
        adapters.ranks,
        segments.rows,
        segments.items,
        workspace,
        t,
        k,
        rank,
        **shrink.blocks,
        **shrink.options,
    )
    expand_kernel[(num_items, triton.cdiv(n, expand.blocks["BLOCK_N"]))](
        workspace,
        adapters.b,
        adapters.ranks,
        adapters.scales,
        segments.rows,
        segments.items,
        out,
        t,
        n,
        rank,
        out.stride(0),
        **expand.blocks,
        **expand.options,
    )


def _tile(block_m: int, dtype: torch.dtype) -> int:
    """Key of the tables."""
    return 0 if dtype == torch.float32 else block_m


def reference(x: Tensor, adapters: Adapters, slot_of_row: npt.NDArray[np.int32], out: Tensor) -> Tensor:
    """What `out` becomes, in float64, row by row."""
    result = out.double()
    for row, slot in enumerate(slot_of_row.tolist()):
        if slot >= 0:
            rank = int(adapters.ranks[slot])
            a, b = adapters.a[slot, :rank].double(), adapters.b[slot, :, :rank].double()
            result[row] += adapters.scales[slot].double() * (b @ (a @ x[row].double()))
    return result


def specs(arch: int) -> list[KernelSpec]:
    """Every tile of both kernels."""
    tables = {"workspace_ptr": "*fp32", "ranks_ptr": "*i32", "rows_ptr": "*i32", "items_ptr": "*i32", "T": "i32"}
    return [
        KernelSpec(
            name=f"lora_shrink {x_type} M{config.blocks['BLOCK_M']} K{config.blocks['BLOCK_K']}",
            kernel=shrink_kernel,
            types={"x_ptr": f"*{x_type}", "a_ptr": f"*{x_type}", **tables, "K": "i32:16", "R": "i32:16"},
            constants=config.blocks,
            config=config,
            needs=needed(arch, config, x_type),
            quick=x_type == "bf16",
        )
        for config, x_type in shipped(SHRINK[arch])
    ] + [
        KernelSpec(
            name=f"lora_expand {x_type} M{config.blocks['BLOCK_M']} N{config.blocks['BLOCK_N']}",
            kernel=expand_kernel,
            types={
                "b_ptr": f"*{x_type}",
                "out_ptr": f"*{x_type}",
                "scales_ptr": "*fp32",
                **tables,
                "N": "i32:16",
                "R": "i32:16",
                "stride_out": "i32:16",
            },
            constants=config.blocks,
            config=config,
            needs=needed(arch, config, x_type),
            quick=x_type == "bf16",
        )
        for config, x_type in shipped(EXPAND[arch])
    ]
