"""Paged attention on GPUs that reads what several requests share once: planning, launching, and what is shipped.

    work = plan_attention(batch, kv, query_heads=32, arch=90)      # host, once a step
    workspace = Workspace(slots, query_heads, head_dim, device)    # once
    batch = replace(batch_on_device, work=work.to(device))
    attention(qkv, batch, kv, layer, scale, out=out, workspace=workspace)

worklist.py says what is read for whom, attention_kernels.py how. Keys and values are each
[layers, pages, kv_heads, page_size, head_dim], in the dtype of the queries or in float8_e4m3fn.
"""

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
from torch import Tensor

from trunkline.kernels.interface import Batch, KvPages
from trunkline.kernels.triton import interpreter
from trunkline.kernels.triton.attention_kernels import attend_prompt_kernel, attend_splits_kernel, merge_splits_kernel
from trunkline.kernels.triton.spec import TYPE_NAMES, Config, KernelSpec
from trunkline.kernels.triton.worklist import FIELDS, WorkList, make_work_list
from trunkline.step import SPLIT

LOG2E = math.log2(math.e)
PROCESSORS = {80: 108, 90: 132, 100: 148}  # arch -> streaming multiprocessors
PROGRAMS_PER_PROCESSOR = 4
PROMPT_ROWS = 256  # token rows × group from which a request is read by tiles that run over all splits
ALIGNMENT = 4  # int32 numbers: Triton compiles a kernel anew for pointers that 16 bytes don't divide


class Tiles(NamedTuple):
    """How the kernels are launched for one kind of head.

    splits  height of a tile -> configuration of attend_splits
    prompt  configuration of attend_prompt
    merge   configuration of merge_splits
    """

    splits: Mapping[int, Config]
    prompt: Config
    merge: Config


def _tiles(
    block_n: int,
    splits: dict[int, tuple[int, int]],
    prompt: tuple[int, int, int],
    *,
    merged_heads: int = 4,
    registers: tuple[int | None, int | None] = (255, 255),
) -> Tiles:
    """From (num_warps, num_stages) per height of a tile. BLOCK_N is one for all, for it decides how a row is summed.

    registers  of splits and of prompt. 255 is all there are: left alone, the compiler stops a few short of them, and spills;
               where float32 is multiplied it spills if it may take so many
    """

    def config(block_m: int, num_warps: int, num_stages: int, registers: int | None) -> Config:
        return Config({"BLOCK_M": block_m, "BLOCK_N": block_n}, num_warps, num_stages, registers)

    return Tiles(
        splits={height: config(height, *options, registers[0]) for height, options in splits.items()},
        prompt=config(*prompt, registers[1]),
        merge=Config({"BLOCK_H": merged_heads}, num_warps=4, num_stages=3),
    )


# (bytes of an element of a page, head size) -> tiles; chosen by what compiles without spills, not measured.
_HOPPER = {
    (1, 64): _tiles(64, {16: (4, 3), 64: (4, 3), 128: (8, 3)}, prompt=(128, 8, 3)),
    (1, 128): _tiles(64, {16: (4, 3), 64: (8, 2), 128: (8, 3)}, prompt=(64, 8, 2)),
    (1, 256): _tiles(16, {16: (4, 3), 64: (8, 2)}, prompt=(64, 8, 2), merged_heads=2),
    (2, 64): _tiles(64, {16: (4, 3), 64: (4, 3), 128: (8, 3)}, prompt=(128, 8, 3)),
    (2, 128): _tiles(64, {16: (4, 3), 64: (8, 2), 128: (8, 3)}, prompt=(64, 8, 2)),
    (2, 256): _tiles(16, {16: (4, 3), 64: (8, 2)}, prompt=(64, 8, 2), merged_heads=2),
    (4, 64): _tiles(32, {16: (4, 2), 32: (8, 2)}, prompt=(32, 8, 2), registers=(None, 232)),
    (4, 128): _tiles(32, {16: (4, 2)}, prompt=(32, 8, 2), registers=(None, 232)),
    (4, 256): _tiles(32, {16: (4, 2), 32: (8, 2)}, prompt=(32, 8, 2), merged_heads=2, registers=(None, None)),
}
_AMPERE = {
    **_HOPPER,
    (2, 64): _tiles(32, {16: (4, 3), 64: (4, 3), 128: (8, 3)}, prompt=(64, 8, 3)),
    (2, 128): _tiles(32, {16: (4, 3), 64: (8, 2)}, prompt=(64, 8, 2)),
    (2, 256): _tiles(16, {16: (4, 3), 64: (8, 2)}, prompt=(32, 8, 2), merged_heads=2),
    (4, 64): _tiles(32, {16: (4, 2), 32: (8, 2)}, prompt=(32, 8, 2), registers=(None, 168)),
    (4, 128): _tiles(32, {16: (4, 2)}, prompt=(32, 8, 2), registers=(None, 168)),
}
_BLACKWELL = {  # its tensor cores' memory is filled from registers: tiles of 64 rows spill for the largest heads
    **_HOPPER,
    (1, 256): _tiles(16, {16: (4, 3), 32: (4, 2)}, prompt=(32, 8, 2), merged_heads=2),
    (2, 128): _tiles(64, {16: (4, 3), 64: (8, 2)}, prompt=(64, 8, 2)),
    (2, 256): _tiles(16, {16: (4, 3), 32: (4, 2)}, prompt=(32, 8, 2), merged_heads=2),
}
TABLES = {80: _AMPERE, 90: _HOPPER, 100: _BLACKWELL}
# What differs in layers with a window, which mask more. The heights of the tiles don't: one list of work serves all layers.
WINDOWED = {100: {(2, 128): _tiles(32, {16: (4, 3), 64: (8, 1)}, prompt=(64, 8, 1))}}
TENSOR_CORES = {90: ("HGMMA",), 100: ("UTCHMMA", "UTCQMMA")}  # arch -> instructions of tiles of 64 rows or more
HEAD_DIMS = (64, 96, 128, 256)  # what is compiled ahead of time; others up to 256 take the tiles of the next larger one


def tiles_for(arch: int, dtype: torch.dtype, head_dim: int, *, has_window: bool = False) -> Tiles:
    """How attention is launched for pages of this dtype."""
    assert head_dim <= 256 and head_dim % 8 == 0, head_dim
    key = dtype.itemsize, max(64, triton.next_power_of_2(head_dim))
    return WINDOWED.get(arch, {}).get(key, TABLES[arch][key]) if has_window else TABLES[arch][key]


class Capacity(NamedTuple):
    """How much room a Work has; a captured graph needs the same for every step.

    rows, item_rows, merge_rows, prompts  lengths of worklist.WorkList's arrays
    splits                                those of its splits, per class
    parts                                 slots that partial results may take: the size of the Workspace
    """

    rows: int
    item_rows: int
    splits: tuple[int, ...]
    prompts: int
    merge_rows: int
    parts: int


def decode_capacity(rows: int, max_context: int, kv: KvPages, query_heads: int, arch: int) -> Capacity:
    """Enough for any step of so many token rows without prompts, in contexts up to `max_context`, whatever they share.

    Each item takes some rows over a split, and no row and split come twice; those of a class that the class below would
    have held are in that one.
    """
    group = query_heads // kv.kv_heads
    pairs = rows * -(-max_context // SPLIT)
    heights = tuple(tiles_for(arch, kv.keys.dtype, kv.head_dim).splits)
    smallest = [1, *(height // group + 1 for height in heights[:-1])]  # token rows of an item of the class
    splits = tuple(pairs // fewest for fewest in smallest)
    return Capacity(rows, item_rows=rows + pairs, splits=splits, prompts=0, merge_rows=rows, parts=pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A worklist.WorkList in one tensor, so that it reaches the device in one copy.

    buffer        int32; `section` cuts it
    capacity      what it has room for; beyond what there is it holds zeros
    num_parts     slots of the workspace that are used
    arch, tiles   the configurations it was made for
    window        see plan_attention
    max_programs  of a launch
    """

    buffer: Tensor
    capacity: Capacity
    num_parts: int
    arch: int
    tiles: Tiles
    window: int
    max_programs: int

    def to(self, device: torch.device | str) -> "Work":
        return replace(self, buffer=self.buffer.to(device, non_blocking=True))

    def copy_(self, other: "Work") -> None:
        """Take over another work of the same capacity, in place: what a captured graph reads stays where it is."""
        assert other.capacity == self.capacity and other.tiles == self.tiles, f"{other.capacity} {self.capacity}"
        assert other.window == self.window, f"{other.window} {self.window}"
        self.buffer.copy_(other.buffer, non_blocking=True)

    def section(self, name: str) -> Tensor:
        """One of `_layout`; the counts stand at multiples of ALIGNMENT."""
        start, length = _layout(self.capacity)[name]
        return self.buffer[start : start + length]


@functools.lru_cache(maxsize=64)
def _layout(capacity: Capacity) -> Mapping[str, tuple[int, int]]:
    """Name -> where it starts and how long it is. Every layer of a step asks."""
    lengths = {
        "counts": (len(capacity.splits) + 2) * ALIGNMENT,
        "item_rows": capacity.item_rows,
        "first_part": capacity.rows,
        "merge_rows": capacity.merge_rows,
        "prompts": capacity.prompts * FIELDS,
        **{f"splits{kind}": items * FIELDS for kind, items in enumerate(capacity.splits)},
    }
    starts = np.cumsum([0, *(-(-length // ALIGNMENT) * ALIGNMENT for length in lengths.values())]).tolist()
    layout = {name: (start, length) for (name, length), start in zip(lengths.items(), starts, strict=False)}
    return {**layout, "end": (starts[-1], 0)}


def plan_attention(
    batch: Batch,
    kv: KvPages,
    query_heads: int,
    arch: int,
    capacity: Capacity | None = None,
    *,
    window: int = 0,
) -> Work:
    """The work of a batch that is on the CPU; on the CPU as well.

    capacity  None: as much as it takes. Then the number of programs fits the work, too
    window    the widest window of the model's layers; 0: some layer sees everything. Splits beyond it are left out

    Raises ValueError if the work does not fit into `capacity`.
    """
    group = query_heads // kv.kv_heads
    assert group * kv.kv_heads == query_heads, f"{query_heads} query heads, {kv.kv_heads} kv heads"
    tiles = tiles_for(arch, kv.keys.dtype, kv.head_dim)
    no_prompts = capacity is not None and not capacity.prompts
    work = make_work_list(
        positions=batch.positions.numpy(),
        query_start=batch.query_start.numpy(),
        readers=batch.readers.numpy(),
        runs=batch.runs.numpy(),
        group=group,
        classes=tuple(tiles.splits),
        prompt_tile=tiles.prompt.blocks["BLOCK_M"],
        prompt_rows=np.iinfo(np.int32).max if no_prompts else PROMPT_ROWS,
        window=window,
    )
    needed = Capacity(
        rows=len(work.first_part),
        item_rows=len(work.item_rows),
        splits=tuple(map(len, work.splits)),
        prompts=len(work.prompts),
        merge_rows=len(work.merge_rows),
        parts=work.num_parts,
    )
    return Work(
        buffer=_pack(work, needed, needed if capacity is None else capacity),
        capacity=needed if capacity is None else capacity,
        num_parts=work.num_parts,
        arch=arch,
        tiles=tiles,
        window=window,
        max_programs=2**31 - 1 if capacity is None else _resident_programs(arch),
    )


def _resident_programs(arch: int) -> int:
    """Programs that run at the same time; in the interpreter they do not, and each costs a little."""
    return 2 if interpreter.is_on() else PROCESSORS[arch] * PROGRAMS_PER_PROCESSOR


def _pack(work: WorkList, needed: Capacity, capacity: Capacity) -> Tensor:
    for name, length, room in zip(Capacity._fields, needed, capacity, strict=True):
        lengths, rooms = (value if isinstance(value, tuple) else (value,) for value in (length, room))
        if any(length > room for length, room in zip(lengths, rooms, strict=True)):
            raise ValueError(f"The step's attention needs {length} {name}; there is room for {room}.")
    layout = _layout(capacity)
    buffer = np.zeros(layout["end"][0], np.int32)

    def write(name: str, values: Any) -> None:
        start, _ = layout[name]
        buffer[start : start + values.size] = values.ravel()

    counts = np.zeros((len(work.splits) + 2, ALIGNMENT), np.int32)
    counts[:, 0] = [*needed.splits, needed.prompts, needed.merge_rows]
    write("counts", counts)
    write("item_rows", work.item_rows)
    write("first_part", work.first_part)
    write("merge_rows", work.merge_rows)
    write("prompts", work.prompts)
    for kind, items in enumerate(work.splits):
        write(f"splits{kind}", items)
    return torch.from_numpy(buffer)


class Workspace:
    """Where the partial results of a layer lie until they are merged; undefined before.

    parts       float32 [slots, Q, D]
    logarithms  float32 [slots, Q]: of their weights, to base 2
    """

    def __init__(self, slots: int, query_heads: int, head_dim: int, device: torch.device | str) -> None:
        slots = max(slots, 1)
        self.parts = torch.empty(slots, query_heads, head_dim, dtype=torch.float32, device=device)
        self.logarithms = torch.empty(slots, query_heads, dtype=torch.float32, device=device)


def attention(
    qkv: Tensor,
    batch: Batch,
    kv: KvPages,
    layer: int,
    scale: float,
    *,
    out: Tensor,
    workspace: Workspace,
    window: int = 0,
    soft_cap: float = 0.0,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> None:
    """See interface.Kernels.attention; `batch.work` is a Work on the device. Rows that pad the batch are not written.

    key_scale, value_scale  what the numbers in FP8 pages are multiplied by
    """
    work: Work = batch.work
    rows, dim = len(qkv), kv.head_dim
    heads = out.shape[1] // dim
    keys, values = kv.keys[layer], kv.values[layer]
    assert out.shape == (rows, heads * dim) and qkv.shape == (rows, (heads + 2 * kv.kv_heads) * dim), (
        f"{qkv.shape} {out.shape} {kv.kv_heads} × {dim}"
    )
    assert heads % kv.kv_heads == 0 and qkv.is_contiguous() and out.is_contiguous(), f"{heads} {kv.kv_heads}"
    assert out.dtype == qkv.dtype and keys.dtype in (qkv.dtype, torch.float8_e4m3fn), f"{qkv.dtype} {keys.dtype}"
    assert keys.stride() == values.stride() and keys.stride()[1:] == (kv.page_size * dim, dim, 1), keys.stride()
    assert rows == work.capacity.rows == len(batch.positions), f"{rows} {work.capacity} {batch.positions.shape}"
    assert len(workspace.parts) >= work.num_parts and workspace.parts.shape[1:] == (heads, dim), workspace.parts.shape
    assert scale > 0 and soft_cap >= 0 and (not work.window or 0 < window <= work.window), (
        f"{scale} {soft_cap} {window} {work.window}"
    )
    assert work.tiles == tiles_for(work.arch, keys.dtype, dim), f"the work was not planned for {TYPE_NAMES[keys.dtype]}"

    tiles = tiles_for(work.arch, keys.dtype, dim, has_window=window > 0)
    score_scale = scale * key_scale
    numbers = {
        "window": window,
        "unit": (soft_cap or score_scale) * LOG2E,
        "bend": 2 * score_scale / soft_cap if soft_cap else 0.0,
    }
    shape = _constants(heads // kv.kv_heads, kv.kv_heads, dim, kv.page_size, keys.stride(0), window > 0, soft_cap > 0)
    lists = {
        "item_rows_ptr": work.section("item_rows"),
        "positions_ptr": batch.positions,
        "page_table_ptr": batch.page_table,
        "table_stride": batch.page_table.stride(0),
    }
    counts = work.section("counts")[::ALIGNMENT]
    first_part = work.section("first_part")

    def grid(items: int) -> tuple[int]:
        return (min(items, work.max_programs),)

    if work.capacity.prompts:
        config = tiles.prompt
        attend_prompt_kernel[grid(work.capacity.prompts * kv.kv_heads)](
            qkv, keys, values, out, items_ptr=work.section("prompts"), num_items_ptr=counts[-2:], **lists, **numbers,
            value_scale=value_scale, **shape, **config.blocks, **config.options,
        )  # fmt: skip
    for kind, (items, config) in enumerate(zip(work.capacity.splits, tiles.splits.values(), strict=True)):
        if items:
            attend_splits_kernel[grid(items * kv.kv_heads)](
                qkv, keys, values, workspace.parts, workspace.logarithms, items_ptr=work.section(f"splits{kind}"),
                num_items_ptr=counts[kind:], first_part_ptr=first_part, **lists, **numbers,
                **shape, **config.blocks, **config.options,
            )  # fmt: skip
    if work.capacity.merge_rows:
        config = tiles.merge
        blocks = triton.cdiv(heads, config.blocks["BLOCK_H"])
        merge_splits_kernel[grid(work.capacity.merge_rows * blocks)](
            workspace.parts, workspace.logarithms, out, work.section("merge_rows"), counts[-1:], first_part,
            batch.positions, window, value_scale, HAS_WINDOW=window > 0, HEADS=heads, HEAD_DIM=dim,
            BLOCK_D=shape["BLOCK_D"], **config.blocks, **config.options,
        )  # fmt: skip


def _constants(
    group: int, kv_heads: int, head_dim: int, page_size: int, page_stride: int, has_window: bool, has_soft_cap: bool
) -> dict[str, Any]:
    return {
        "HAS_WINDOW": has_window,
        "SOFT_CAP": has_soft_cap,
        "GROUP": group,
        "KV_HEADS": kv_heads,
        "HEAD_DIM": head_dim,
        "BLOCK_D": max(16, triton.next_power_of_2(head_dim)),
        "PAGE_SIZE": page_size,
        "PAGE_STRIDE": page_stride,
    }


def specs(arch: int) -> Iterator[KernelSpec]:
    """See spec.py."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for head_dim in HEAD_DIMS:
            yield from _specs(arch, dtype, head_dim, quick=dtype == torch.bfloat16 and head_dim == 128)
    yield from _specs(arch, torch.bfloat16, 256, has_window=True, has_soft_cap=True, group=2, quick=True)
    yield from _specs(arch, torch.bfloat16, 128, has_window=True, group=5, page_size=32)
    yield from _specs(arch, torch.float16, 64, has_soft_cap=True, group=3, page_size=64)
    yield from _specs(arch, torch.float32, 128, has_window=True, has_soft_cap=True, group=7)
    yield from _specs(arch, torch.bfloat16, 64, group=8, page_size=64)
    if arch >= 90:  # the A100 has no such numbers
        for head_dim in (64, 128, 256):
            yield from _specs(arch, torch.bfloat16, head_dim, kv_dtype=torch.float8_e4m3fn, quick=head_dim == 128)
        yield from _specs(arch, torch.float16, 128, kv_dtype=torch.float8_e4m3fn)


def _specs(
    arch: int,
    dtype: torch.dtype,
    head_dim: int,
    *,
    kv_dtype: torch.dtype | None = None,
    has_window: bool = False,
    has_soft_cap: bool = False,
    group: int = 4,
    kv_heads: int = 8,
    page_size: int = 16,
    quick: bool = False,
) -> Iterator[KernelSpec]:
    """Every kernel for one kind of head."""
    constants = _constants(
        group, kv_heads, head_dim, page_size, kv_heads * page_size * head_dim, has_window, has_soft_cap
    )
    tiles = tiles_for(arch, kv_dtype or dtype, head_dim, has_window=has_window)
    query, stored = (f"*{TYPE_NAMES[each]}:16" for each in (dtype, kv_dtype or dtype))
    ints = "*i32:16"
    tensors = {"qkv_ptr": query, "keys_ptr": stored, "values_ptr": stored}
    parts = {"parts_ptr": "*fp32:16", "logarithms_ptr": "*fp32:16"}
    lists = {"items_ptr": ints, "num_items_ptr": ints, "item_rows_ptr": ints}
    batch = {"positions_ptr": ints, "page_table_ptr": ints, "table_stride": "i32", "window": "i32"}
    scales = {"unit": "fp32", "bend": "fp32"}
    title = f"{TYPE_NAMES[dtype]} D{head_dim} G{group} P{page_size}" + (
        f"{' fp8' if kv_dtype else ''}{' window' if has_window else ''}{' softcap' if has_soft_cap else ''}"
    )

    def spec(name: str, kernel: Any, config: Config, types: dict[str, str], constants: dict[str, Any]) -> KernelSpec:
        height = config.blocks.get("BLOCK_M", 0)
        return KernelSpec(
            name=f"{name} {title}" + (f" M{height}" if height else ""),
            kernel=kernel,
            types=types,
            constants={**constants, **config.blocks},
            config=config,
            needs=TENSOR_CORES.get(arch, ()) if height >= 64 and dtype.itemsize == 2 else (),
            quick=quick,
        )

    for config in tiles.splits.values():
        types = {**tensors, **parts, **lists, "first_part_ptr": ints, **batch, **scales}
        yield spec("attend_splits", attend_splits_kernel, config, types, constants)
    types = {**tensors, "out_ptr": query, **lists, **batch, **scales, "value_scale": "fp32"}
    yield spec("attend_prompt", attend_prompt_kernel, tiles.prompt, types, constants)
    if kv_dtype is None and not has_soft_cap:
        rows = dict.fromkeys(("merge_rows_ptr", "num_rows_ptr", "first_part_ptr", "positions_ptr"), ints)
        types = {**parts, "out_ptr": query, **rows, "window": "i32", "value_scale": "fp32"}
        own = {"HAS_WINDOW": has_window, "HEADS": group * kv_heads}
        own |= {name: constants[name] for name in ("HEAD_DIM", "BLOCK_D")}
        yield spec("merge_splits", merge_splits_kernel, tiles.merge, types, own)
