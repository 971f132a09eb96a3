"""Matmul over float8 weights (e4m3) with one scale, a scale per output channel, or one per block of 128 × 128.

    weight = Fp8Weight(data=weight, scales=weight_scale_inv)        # which kind of scales: see there
    matmul_fp8(x, weight, out=out)                                  # activations of 16 bits

    quantize_rows(x, out=codes, scales=row_scales)                  # or float8 times float8, from Hopper on
    matmul_fp8_rows(codes, row_scales, weight, out=out)

Blocks are DeepSeek-V3's (arXiv:2412.19437, §3.3). Its authors found that Hopper's tensor cores keep about 14 bits of a sum
of float8 products: here as there, every 128 inputs at most are added to a float32 sum outside of them.

Weights are decoded by moving bits: e4m3 is float16 with a smaller exponent, so that the pattern moved seven places is a
float16 of 1/256 of the value, subnormals included. It needs no float8 instructions, which Ampere lacks. The codes of NaN
have no meaning in weights; they are read as ±480.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from trunkline.kernels.triton.spec import KernelSpec
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

BLOCK = 128  # inputs and outputs that share a scale; a constant of the format
SCALE_BLOCK = tl.constexpr(BLOCK)

# BLOCK_N and BLOCK_K divide BLOCK: a tile of weights has one scale.
TILES: dict[int, Tiles] = {  # activations of 16 bits
    80: {16: tile(16, 64, 64), 64: tile(64, 64, 64), 128: tile(128, 64, 64, warps=8), 0: tile(16, 64, 32)},
    90: {16: tile(16, 64, 64), 64: tile(64, 128, 64), 128: tile(128, 128, 64, warps=8), 0: tile(16, 64, 32)},
    100: {16: tile(16, 64, 64), 64: tile(64, 128, 64), 128: tile(128, 128, 64, warps=8), 0: tile(16, 64, 32)},
}
ROWS_TILES: dict[int, Tiles] = {  # float8 activations
    90: {16: tile(16, 64, 128), 64: tile(64, 128, 128), 128: tile(128, 128, 128, warps=8), 0: tile(16, 64, 128)},
    100: {16: tile(16, 64, 128), 64: tile(64, 128, 128), 128: tile(128, 128, 128, warps=8), 0: tile(16, 64, 128)},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Weight:
    """The weights of a layer with K inputs and N outputs, multiples of 16: data * scales.

    data    float8_e4m3fn [N, K], contiguous
    scales  float32 [1], [N] or [ceil(N / 128), ceil(K / 128)]: of all, of an output, of a block
    """

    data: Tensor
    scales: Tensor

    def __post_init__(self) -> None:
        n, k = self.data.shape
        blocks = (-(-n // BLOCK), -(-k // BLOCK))
        assert self.data.dtype == torch.float8_e4m3fn and self.data.is_contiguous(), f"data is {self.data.dtype}"
        assert k % 16 == 0 and n % 16 == 0, f"K {k} and N {n} must be multiples of 16"
        assert self.scales.shape in ((1,), (n,), blocks), (
            f"scales {tuple(self.scales.shape)} must be (1,), {(n,)} or {blocks}"
        )
        assert self.scales.dtype == torch.float32 and self.scales.is_contiguous(), f"scales are {self.scales.dtype}"

    @property
    def is_blockwise(self) -> bool:
        return self.scales.ndim == 2

    @property
    def scale_step(self) -> int:
        """From the scale of an output to the next one's, or from a row of blocks to the next."""
        return self.scales.shape[1] if self.is_blockwise else int(len(self.scales) > 1)


@triton.jit
def from_e4m3(bits, dtype: tl.constexpr):
    """1/256 of the values of e4m3 numbers given as uint8; exact."""
    wide = bits.to(tl.uint16)
    value = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)
    return value if dtype == tl.float16 else value.to(tl.float32).to(dtype)


@triton.jit(do_not_specialize=["M", "scale_step", "has_bias"])
def matmul_fp8_kernel(
    x_ptr,
    weight_ptr,
    scales_ptr,
    bias_ptr,
    out_ptr,
    M,
    N,
    K,
    scale_step,
    has_bias,
    BLOCKWISE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    first_column = tl.program_id(1) * BLOCK_N
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = first_column + tl.arange(0, BLOCK_N)
    is_row, is_column = rows < M, columns < N
    x_row_ptrs = x_ptr + rows.to(tl.int64)[:, None] * K
    weight_row_ptrs = weight_ptr + columns.to(tl.int64)[None, :] * K
    accumulator = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        x = tl.load(x_row_ptrs + k[None, :], mask=is_row[:, None] & (k < K)[None, :], other=0.0)
        bits = tl.load(weight_row_ptrs + k[:, None], mask=is_column[None, :] & (k < K)[:, None], other=0)
        weight = from_e4m3(bits, x.dtype)
        if BLOCKWISE:
            scale = tl.load(scales_ptr + first_column // SCALE_BLOCK * scale_step + start // SCALE_BLOCK)
            accumulator += tl.dot(x, weight, input_precision="ieee") * scale
        else:
            accumulator = tl.dot(x, weight, accumulator, input_precision="ieee")
    product = accumulator * 256.0
    if not BLOCKWISE:
        product *= tl.load(scales_ptr + columns * scale_step, mask=is_column, other=0.0)[None, :]
    store_tile(product, bias_ptr, has_bias, out_ptr, rows, columns, M, N)


@triton.jit(do_not_specialize=["M", "scale_step", "has_bias"])
def matmul_fp8_rows_kernel(
    x_ptr,
    row_scales_ptr,
    weight_ptr,
    scales_ptr,
    bias_ptr,
    out_ptr,
    M,
    N,
    K,
    scale_step,
    has_bias,
    BLOCKWISE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    first_column = tl.program_id(1) * BLOCK_N
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = first_column + tl.arange(0, BLOCK_N)
    is_row, is_column = rows < M, columns < N
    x_row_ptrs = x_ptr + rows.to(tl.int64)[:, None] * K
    weight_row_ptrs = weight_ptr + columns.to(tl.int64)[None, :] * K
    accumulator = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        x = tl.load(x_row_ptrs + k[None, :], mask=is_row[:, None] & (k < K)[None, :], other=0.0)
        weight = tl.load(weight_row_ptrs + k[:, None], mask=is_column[None, :] & (k < K)[:, None], other=0.0)
        if BLOCKWISE:
            scale = tl.load(scales_ptr + first_column // SCALE_BLOCK * scale_step + start // SCALE_BLOCK)
            accumulator += tl.dot(x, weight) * scale
        else:
            accumulator = tl.dot(x, weight, accumulator, max_num_imprecise_acc=BLOCK_K)
    product = accumulator * tl.load(row_scales_ptr + rows, mask=is_row, other=0.0)[:, None]
    if not BLOCKWISE:
        product *= tl.load(scales_ptr + columns * scale_step, mask=is_column, other=0.0)[None, :]
    store_tile(product, bias_ptr, has_bias, out_ptr, rows, columns, M, N)


def matmul_fp8(x: Tensor, weight: Fp8Weight, bias: Tensor | None = None, *, out: Tensor) -> None:
    """out = x @ (weight.data * weight.scales).T + bias.

    x [M, K], bias [N], out [M, N]: contiguous, all bfloat16, float16 or float32.
    """
    m, n, k = _check(x, weight, bias, out)
    assert x.dtype == out.dtype, f"x is {x.dtype}, out {out.dtype}"
    if m == 0:
        return
    config = tile_of(TILES[arch_of(x.device)], m, x.dtype)
    matmul_fp8_kernel[grid(config, m, n)](
        x,
        weight.data.view(torch.uint8),
        weight.scales,
        out if bias is None else bias,
        out,
        m,
        n,
        k,
        weight.scale_step,
        int(bias is not None),
        BLOCKWISE=weight.is_blockwise,
        **config.blocks,
        **config.options,
    )


def matmul_fp8_rows(
    x: Tensor, row_scales: Tensor, weight: Fp8Weight, bias: Tensor | None = None, *, out: Tensor
) -> None:
    """out = (x * row_scales[:, None]) @ (weight.data * weight.scales).T + bias; not on Ampere.

    x float8_e4m3fn [M, K] and row_scales float32 [M]: what `quantize_rows` makes of activations; else as `matmul_fp8`.
    """
    m, n, k = _check(x, weight, bias, out)
    arch = arch_of(x.device)
    assert arch in ROWS_TILES, f"chips of sm_{arch} multiply no float8; they can take 16-bit activations"
    assert x.dtype == torch.float8_e4m3fn, f"x is {x.dtype}, not float8_e4m3fn"
    assert row_scales.shape == (m,) and row_scales.dtype == torch.float32 and row_scales.is_contiguous()
    if m == 0:
        return
    config = tile_of(ROWS_TILES[arch], m, out.dtype)
    matmul_fp8_rows_kernel[grid(config, m, n)](
        x,
        row_scales,
        weight.data,
        weight.scales,
        out if bias is None else bias,
        out,
        m,
        n,
        k,
        weight.scale_step,
        int(bias is not None),
        BLOCKWISE=weight.is_blockwise,
        **config.blocks,
        **config.options,
    )


def _check(x: Tensor, weight: Fp8Weight, bias: Tensor | None, out: Tensor) -> tuple[int, int, int]:
    """M, N, K"""
    (m, k), n = x.shape, len(weight.data)
    assert k == weight.data.shape[1], f"x has {k} columns, the weights {weight.data.shape[1]} inputs"
    assert out.shape == (m, n) and out.dtype in FLOAT_TYPES, f"out is {out.dtype} {tuple(out.shape)}"
    assert bias is None or (bias.shape == (n,) and bias.dtype == out.dtype and bias.is_contiguous())
    assert x.is_contiguous() and out.is_contiguous()
    return m, n, k


def reference(x: Tensor, weight: Fp8Weight, bias: Tensor | None = None) -> Tensor:
    """Either one in float64; x in floats, its row scales multiplied in."""
    result = x.double() @ dequantize(weight).T
    return result if bias is None else result + bias.double()


def dequantize(weight: Fp8Weight) -> Tensor:
    """float64 [N, K]"""
    n, k = weight.data.shape
    scales = weight.scales.double()
    if weight.is_blockwise:
        scales = scales.repeat_interleave(BLOCK, 0)[:n].repeat_interleave(BLOCK, 1)[:, :k]
    else:
        scales = scales[:, None]
    return weight.data.float().double() * scales


def specs(arch: int) -> list[KernelSpec]:
    """Every tile of both kernels, with scales per output (or one for all) and per block."""
    integers = {"M": "i32", "N": "i32:16", "K": "i32:16", "scale_step": "i32", "has_bias": "i32"}
    return [
        KernelSpec(
            name=f"matmul_fp8 {kind} {x_type} {title(config)}",
            kernel=matmul_fp8_kernel,
            types={
                "x_ptr": f"*{x_type}",
                "weight_ptr": "*u8",
                "scales_ptr": "*fp32",
                "bias_ptr": f"*{x_type}",
                "out_ptr": f"*{x_type}",
                **integers,
            },
            constants={"BLOCKWISE": kind == "block", **config.blocks},
            config=config,
            needs=needed(arch, config, x_type),
            quick=x_type == "bf16",
        )
        for config, x_type in shipped(TILES[arch])
        for kind in ("channel", "block")
    ] + [
        KernelSpec(
            name=f"matmul_fp8_rows {kind} {out_type} {title(config)}",
            kernel=matmul_fp8_rows_kernel,
            types={
                "x_ptr": "*fp8e4nv",
                "row_scales_ptr": "*fp32",
                "weight_ptr": "*fp8e4nv",
                "scales_ptr": "*fp32",
                "bias_ptr": f"*{out_type}",
                "out_ptr": f"*{out_type}",
                **integers,
            },
            constants={"BLOCKWISE": kind == "block", **config.blocks},
            config=config,
            needs=needed(arch, config, "fp8e4nv"),
            quick=out_type == "bf16",
        )
        for config, out_type in shipped(ROWS_TILES.get(arch, {}))
        for kind in ("channel", "block")
    ]
