"""What the matmuls over quantized weights share: which tile a launch takes, and how a tile of the output is written.

    rows 1 … 16     16 rows high, the least that tensor cores multiply: reading the weights is all that counts
    rows 17 … 64    64 rows high, so that the weights are still read once
    more            128 rows high: the tensor cores are busy

Within a class each row goes through the same instructions, so its bits do not depend on how many rows there are. float32
has one tile for all: it is there to check the others with. The sizes were chosen by what compiles without spills; they
have not been measured.
"""

import functools
from collections.abc import Iterator, Mapping

import torch
import triton
import triton.language as tl

from trunkline.kernels.triton.spec import Config

FLOAT_TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}  # dtype -> Triton's name
WGMMA = {"bf16": ("HGMMA",), "fp16": ("HGMMA",), "i8": ("IGMMA",), "fp8e4nv": ("QGMMA",)}  # its names by type

Tiles = Mapping[int, Config]  # rows of the tile -> how it is launched; 0: float32's


def tile(block_m: int, block_n: int, block_k: int, *, warps: int = 4, stages: int = 4) -> Config:
    return Config({"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k}, warps, stages)


def tile_of(tiles: Tiles, rows: int, dtype: torch.dtype) -> Config:
    """The tile for a launch over `rows` rows of activations of this dtype."""
    if dtype == torch.float32:
        return tiles[0]
    return tiles[16 if rows <= 16 else 64 if rows <= 64 else 128]


def shipped(tiles: Tiles) -> Iterator[tuple[Config, str]]:
    """Every tile with the types of activations that it is launched for."""
    for rows, config in tiles.items():
        for name in ("bf16", "fp16") if rows else ("fp32",):
            yield config, name


def needed(arch: int, config: Config, x_type: str) -> tuple[str, ...]:
    """A KernelSpec's `needs`: Hopper's tensor cores reach their rate only through wgmma, 64 rows high."""
    return WGMMA[x_type] if arch == 90 and config.blocks["BLOCK_M"] >= 64 else ()


def title(config: Config) -> str:
    """E.g. "M64 N128 K64"."""
    return " ".join(f"{name[-1]}{config.blocks[name]}" for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K"))


def grid(config: Config, m: int, n: int) -> tuple[int, int]:
    """Programs of one block of columns follow each other: its weights come from memory once, then from the L2 cache."""
    return triton.cdiv(m, config.blocks["BLOCK_M"]), triton.cdiv(n, config.blocks["BLOCK_N"])


@functools.cache
def arch_of(device: torch.device) -> int:
    """The architecture in spec.ARCHS whose configurations run on this device; 90 in the interpreter.

    Chips with the 100 KiB of shared memory of a desktop card (86, 89, 120) take the A100's, which fit, but for float32 with heads
    of 256.
    """
    if device.type == "cpu":
        return 90
    major, _ = torch.cuda.get_device_capability(device)
    return {9: 90, 10: 100}.get(major, 80)


@triton.jit
def store_tile(tile, bias_ptr, has_bias, out_ptr, rows, columns, M, N):
    """out[rows, columns] = tile + bias; without a bias nothing is read through its pointer."""
    is_column = columns < N
    bias = tl.load(bias_ptr + columns, mask=is_column & (has_bias != 0), other=0.0).to(tl.float32)
    out = (tile + bias[None, :]).to(out_ptr.dtype.element_ty)
    out_ptrs = out_ptr + rows.to(tl.int64)[:, None] * N + columns[None, :]
    tl.store(out_ptrs, out, mask=(rows < M)[:, None] & is_column[None, :])
