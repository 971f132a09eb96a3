"""Matmul over 4-bit weights, as GPTQ and AWQ checkpoints hold them: x @ ((codes - zeros) * scales).

    weight = Int4Weight(layout="gptq", qweight=qweight, qzeros=qzeros, scales=scales, group_size=128)
    matmul_int4(x, weight, out=out)

Eight codes to an int32; G = K / group_size groups of consecutive inputs share a zero and a scale per output.

            qweight int32   eight codes of a word lie along        qzeros int32   scales float16
    gptq    [K/8, N]        K, lowest nibble first                 [G, N/8]       [G, N]           arXiv:2210.17323
    awq     [K, N/8]        N; nibble i is column 0,2,4,6,1,3,5,7  [G, N/8]       [G, N]           arXiv:2306.00978

The zeros of a word are ordered along N as AWQ's codes are, or lowest nibble first for GPTQ. GPTQ's first format (what
AutoGPTQ writes, "checkpoint_format": "gptq") stores them minus one, modulo 16; its second ("gptq_v2") and AWQ as they
are. Without qzeros the weights are symmetric: every zero is 8.

A word is loaded once and its nibbles spread over a new axis: loading it for each of its eight codes took eight times the
shared memory.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from trunkline.kernels.triton.spec import Config, KernelSpec
from trunkline.kernels.triton.tiles import (
    FLOAT_TYPES,
    Tiles,
    arch_of,
    grid,
    needed,
    shipped,
    store_tile,
    tile,
    tile_of,
    title,
)

GROUP_SIZES = (32, 64, 128, -1)  # -1: one group of all K
SYMMETRIC_ZEROS = tl.constexpr(-0x77777778)  # 0x88888888, as an int32

# Groups that BLOCK_K does not divide (of 32 inputs) take SMALL_GROUP instead.
SMALL_GROUP = 32
TILES: dict[int, Tiles] = {
    80: {16: tile(16, 64, 64), 64: tile(64, 64, 64), 128: tile(128, 64, 64, warps=8), 0: tile(16, 64, 32)},
    90: {16: tile(16, 64, 64), 64: tile(64, 128, 64), 128: tile(128, 128, 64, warps=8), 0: tile(16, 64, 32)},
    100: {16: tile(16, 64, 64), 64: tile(64, 128, 64), 128: tile(128, 128, 64, warps=8), 0: tile(16, 64, 32)},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Int4Weight:
    """The weights of a layer with K inputs and N outputs, both multiples of 32 and 16.

    layout          which of the two above
    group_size      inputs per group; -1: K
    zeros_minus_one whether qzeros are stored minus one; None: as `layout` does by default (GPTQ's first format does)
    """

    layout: Literal["gptq", "awq"]
    qweight: Tensor
    scales: Tensor
    qzeros: Tensor | None = None
    group_size: int = -1
    zeros_minus_one: bool | None = None

    def __post_init__(self) -> None:
        k, n = self.k, self.n
        assert self.layout in ("gptq", "awq"), f"layout {self.layout!r} is neither gptq nor awq"
        assert self.group_size in GROUP_SIZES, f"group_size {self.group_size} is none of {GROUP_SIZES}"
        assert k % 32 == 0 and n % 16 == 0, f"K {k} and N {n} must be multiples of 32 and 16"
        assert k % self.inputs_per_group == 0, f"K {k} is no multiple of the group size {self.group_size}"
        groups = k // self.inputs_per_group
        packed = (k // 8, n) if self.layout == "gptq" else (k, n // 8)
        assert self.qweight.shape == packed, f"qweight {tuple(self.qweight.shape)} of {self.layout} must be {packed}"
        assert self.qweight.dtype == torch.int32 and self.qweight.is_contiguous()
        assert self.scales.shape == (groups, n), f"scales {tuple(self.scales.shape)} must be {(groups, n)}"
        assert self.scales.dtype == torch.float16 and self.scales.is_contiguous()
        if self.qzeros is not None:
            assert self.qzeros.shape == (groups, n // 8), (
                f"qzeros {tuple(self.qzeros.shape)} must be {(groups, n // 8)}"
            )
            assert self.qzeros.dtype == torch.int32 and self.qzeros.is_contiguous()

    @property
    def k(self) -> int:
        return self.qweight.shape[0] * (8 if self.layout == "gptq" else 1)

    @property
    def n(self) -> int:
        return self.scales.shape[1]

    @property
    def inputs_per_group(self) -> int:
        return self.k if self.group_size == -1 else self.group_size

    @property
    def zero_offset(self) -> int:
        """What is to be added to a stored zero."""
        if self.qzeros is None:
            return 0
        return int(self.layout == "gptq" if self.zeros_minus_one is None else self.zeros_minus_one)


@triton.jit(do_not_specialize=["M", "group_size", "zero_offset", "has_zeros", "has_bias"])
def matmul_int4_kernel(
    x_ptr,
    qweight_ptr,
    qzeros_ptr,
    scales_ptr,
    bias_ptr,
    out_ptr,
    M,
    N,
    K,
    group_size,
    zero_offset,
    has_zeros,
    has_bias,
    AWQ: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    column_words = tl.program_id(1) * (BLOCK_N // 8) + tl.arange(0, BLOCK_N // 8)
    is_row, is_column, is_word = rows < M, columns < N, column_words < N // 8
    place = tl.arange(0, 8)  # of a code in its word
    # AWQ's columns 0, 1, 2, … are nibbles 0, 4, 1, 5, 2, 6, 3, 7.
    shifts = (place // 2 + place % 2 * 4) * 4 if AWQ else place * 4
    x_row_ptrs = x_ptr + rows.to(tl.int64)[:, None] * K
    accumulator = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        x = tl.load(x_row_ptrs + (start + tl.arange(0, BLOCK_K))[None, :], mask=is_row[:, None], other=0.0)
        if AWQ:
            k = (start + tl.arange(0, BLOCK_K)).to(tl.int64)
            words = tl.load(qweight_ptr + k[:, None] * (N // 8) + column_words[None, :], mask=is_word[None, :], other=0)
            spread = words[:, :, None] >> shifts[None, None, :]
        else:
            word_row = (start // 8 + tl.arange(0, BLOCK_K // 8)).to(tl.int64)
            words = tl.load(qweight_ptr + word_row[:, None] * N + columns[None, :], mask=is_column[None, :], other=0)
            spread = words[:, None, :] >> shifts[None, :, None]
        codes = tl.reshape(spread & 15, (BLOCK_K, BLOCK_N))
        group = (start // group_size).to(tl.int64)
        zero_words = tl.load(
            qzeros_ptr + group * (N // 8) + column_words, mask=is_word & (has_zeros != 0), other=SYMMETRIC_ZEROS
        )
        zeros = tl.reshape(((zero_words[:, None] >> shifts[None, :]) + zero_offset) & 15, (BLOCK_N,))
        scales = tl.load(scales_ptr + group * N + columns, mask=is_column, other=0.0).to(tl.float32)
        weight = ((codes - zeros[None, :]).to(tl.float32) * scales[None, :]).to(x.dtype)
        accumulator = tl.dot(x, weight, accumulator, input_precision="ieee")
    store_tile(accumulator, bias_ptr, has_bias, out_ptr, rows, columns, M, N)


def matmul_int4(x: Tensor, weight: Int4Weight, bias: Tensor | None = None, *, out: Tensor) -> None:
    """out = x @ weight + bias.

    x [M, K], bias [N], out [M, N]: contiguous, all bfloat16, float16 or float32. Of a checkpoint with `desc_act`, x's
    columns must be in the order that `sort_by_group` gives.
    """
    (m, k), n = x.shape, weight.n
    assert k == weight.k, f"x has {k} columns, the weights {weight.k} inputs"
    assert out.shape == (m, n), f"out {tuple(out.shape)} must be {(m, n)}"
    assert x.dtype == out.dtype and x.dtype in FLOAT_TYPES, f"x is {x.dtype}, out {out.dtype}"
    assert x.is_contiguous() and out.is_contiguous()
    assert bias is None or (bias.shape == (n,) and bias.dtype == x.dtype and bias.is_contiguous())
    if m == 0:
        return
    config = _config(TILES[arch_of(x.device)], m, x.dtype, weight.inputs_per_group)
    matmul_int4_kernel[grid(config, m, n)](
        x,
        weight.qweight,
        weight.qweight if weight.qzeros is None else weight.qzeros,
        weight.scales,
        x if bias is None else bias,
        out,
        m,
        n,
        k,
        weight.inputs_per_group,
        weight.zero_offset,
        int(weight.qzeros is not None),
        int(bias is not None),
        AWQ=weight.layout == "awq",
        **config.blocks,
        **config.options,
    )


def _config(tiles: Tiles, rows: int, dtype: torch.dtype, group_size: int) -> Config:
    config = tile_of(tiles, rows, dtype)
    if group_size % config.blocks["BLOCK_K"] != 0:
        config = _for_small_groups(config)
    # A block of inputs that reached into the next group would take that group's codes at this one's zeros and scales.
    assert group_size % config.blocks["BLOCK_K"] == 0, f"BLOCK_K {config.blocks['BLOCK_K']} in groups of {group_size}"
    return config


def _for_all_groups(config: Config) -> list[Config]:
    return [config] if config.blocks["BLOCK_K"] == SMALL_GROUP else [config, _for_small_groups(config)]


def _for_small_groups(config: Config) -> Config:
    return config._replace(blocks={**config.blocks, "BLOCK_K": SMALL_GROUP})


def sort_by_group(qweight: Tensor, g_idx: Tensor) -> tuple[Tensor, Tensor]:
    """(qweight, order): GPTQ weights whose groups are not consecutive ("desc_act") made so, once, at loading.

    g_idx int32 [K]: the group of each input. x[:, order] (int64 [K]) is what the sorted weights are to be multiplied with.
    """
    assert g_idx.shape == (qweight.shape[0] * 8,), f"g_idx {tuple(g_idx.shape)} must be {(qweight.shape[0] * 8,)}"
    order = torch.argsort(g_idx, stable=True)
    codes = _unpack(qweight[:, None, :], 1)[order].reshape(len(qweight), 8, -1)
    words = torch.zeros_like(qweight)
    for place in range(8):
        words |= codes[:, place] << (4 * place)
    return words, order


def reference(x: Tensor, weight: Int4Weight, bias: Tensor | None = None) -> Tensor:
    """The same in float64."""
    result = x.double() @ dequantize(weight)
    return result if bias is None else result + bias.double()


def dequantize(weight: Int4Weight) -> Tensor:
    """float64 [K, N]"""
    if weight.layout == "gptq":
        codes = _unpack(weight.qweight[:, None, :], 1)
    else:
        codes = _unpack(weight.qweight[:, :, None], 2, awq=True)
    if weight.qzeros is None:
        zeros = torch.full_like(weight.scales, 8)
    else:
        zeros = (_unpack(weight.qzeros[:, :, None], 2, awq=weight.layout == "awq") + weight.zero_offset) % 16
    group = torch.arange(weight.k, device=codes.device) // weight.inputs_per_group
    return (codes - zeros[group]).double() * weight.scales[group].double()


def _unpack(words: Tensor, axis: int, *, awq: bool = False) -> Tensor:
    """The codes of words [a, b, c], of which `axis` has length 1: int32 [a * b * 8, c] or [a, b * c * 8]."""
    column_of_nibble = [0, 2, 4, 6, 1, 3, 5, 7] if awq else range(8)
    codes: list[Tensor] = [words] * 8
    for nibble, column in enumerate(column_of_nibble):
        codes[column] = words >> (4 * nibble) & 15
    joined = torch.cat(codes, dim=axis)
    return joined.flatten(0, 1) if axis == 1 else joined.flatten(1, 2)


def specs(arch: int) -> list[KernelSpec]:
    """Every tile, for each type of activations, layout and groups of 32 or more."""
    return [
        KernelSpec(
            name=f"matmul_int4 {layout} {x_type} {title(config)}",
            kernel=matmul_int4_kernel,
            types={
                "x_ptr": f"*{x_type}",
                "qweight_ptr": "*i32",
                "qzeros_ptr": "*i32",
                "scales_ptr": "*fp16",
                "bias_ptr": f"*{x_type}",
                "out_ptr": f"*{x_type}",
                "M": "i32",
                "N": "i32:16",
                "K": "i32:16",
                "group_size": "i32",
                "zero_offset": "i32",
                "has_zeros": "i32",
                "has_bias": "i32",
            },
            constants={"AWQ": layout == "awq", **config.blocks},
            config=config,
            needs=needed(arch, config, x_type),
            quick=x_type == "bf16" and layout == "gptq" and config.blocks["BLOCK_K"] == 64,
        )
        for large, x_type in shipped(TILES[arch])
        for config in _for_all_groups(large)
        for layout in ("gptq", "awq")
    ]
