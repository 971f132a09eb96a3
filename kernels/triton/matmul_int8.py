"""Matmul over int8 weights with a scale per output channel: x @ (weight * scales[:, None]).T.

    matmul_int8(x, weight, scales, out=out)                          # activations of 16 bits; the weights are exact in them

    quantize_rows(x, out=codes, scales=row_scales)                   # or int8 times int8, summed exactly in int32
    matmul_int8_rows(codes, row_scales, weight, scales, out=out)

The second takes half the memory traffic for activations and, with many rows, twice the rate of the tensor cores; its
activations carry 7 bits.
"""

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

TILES: dict[int, Tiles] = {  # activations of 16 bits
    80: {16: tile(16, 64, 64), 64: tile(64, 64, 64), 128: tile(128, 64, 64, warps=8), 0: tile(16, 64, 32)},
    90: {16: tile(16, 64, 64), 64: tile(64, 128, 64), 128: tile(128, 128, 64, warps=8), 0: tile(16, 64, 32)},
    100: {16: tile(16, 64, 64), 64: tile(64, 128, 64), 128: tile(128, 128, 64, warps=8), 0: tile(16, 64, 32)},
}
ROWS_TILES: dict[int, Tiles] = {  # int8 activations
    80: {16: tile(16, 64, 128), 64: tile(64, 64, 64), 128: tile(128, 64, 64, warps=8), 0: tile(16, 64, 128)},
    90: {16: tile(16, 64, 128), 64: tile(64, 128, 128), 128: tile(128, 128, 128, warps=8), 0: tile(16, 64, 128)},
    100: {16: tile(16, 64, 128), 64: tile(64, 128, 128), 128: tile(128, 128, 128, warps=8), 0: tile(16, 64, 128)},
}


@triton.jit(do_not_specialize=["M", "has_bias"])
def matmul_int8_kernel(
    x_ptr,
    weight_ptr,
    scales_ptr,
    bias_ptr,
    out_ptr,
    M,
    N,
    K,
    has_bias,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, is_column = rows < M, columns < N
    x_row_ptrs = x_ptr + rows.to(tl.int64)[:, None] * K
    weight_row_ptrs = weight_ptr + columns.to(tl.int64)[None, :] * K
    accumulator = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        x = tl.load(x_row_ptrs + k[None, :], mask=is_row[:, None] & (k < K)[None, :], other=0.0)
        weight = tl.load(weight_row_ptrs + k[:, None], mask=is_column[None, :] & (k < K)[:, None], other=0)
        accumulator = tl.dot(x, weight.to(tl.float32).to(x.dtype), accumulator, input_precision="ieee")
    scales = tl.load(scales_ptr + columns, mask=is_column, other=0.0)
    store_tile(accumulator * scales[None, :], bias_ptr, has_bias, out_ptr, rows, columns, M, N)


@triton.jit(do_not_specialize=["M", "has_bias"])
def matmul_int8_rows_kernel(
    x_ptr,
    row_scales_ptr,
    weight_ptr,
    scales_ptr,
    bias_ptr,
    out_ptr,
    M,
    N,
    K,
    has_bias,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, is_column = rows < M, columns < N
    x_row_ptrs = x_ptr + rows.to(tl.int64)[:, None] * K
    weight_row_ptrs = weight_ptr + columns.to(tl.int64)[None, :] * K
    accumulator = tl.zeros([BLOCK_M, BLOCK_N], tl.int32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        x = tl.load(x_row_ptrs + k[None, :], mask=is_row[:, None] & (k < K)[None, :], other=0)
        weight = tl.load(weight_row_ptrs + k[:, None], mask=is_column[None, :] & (k < K)[:, None], other=0)
        accumulator = tl.dot(x, weight, accumulator, out_dtype=tl.int32)
    row_scales = tl.load(row_scales_ptr + rows, mask=is_row, other=0.0)
    scales = tl.load(scales_ptr + columns, mask=is_column, other=0.0)
    product = accumulator.to(tl.float32) * row_scales[:, None] * scales[None, :]
    store_tile(product, bias_ptr, has_bias, out_ptr, rows, columns, M, N)


def matmul_int8(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None = None, *, out: Tensor) -> None:
    """out = x @ (weight * scales[:, None]).T + bias.

    x [M, K], bias [N], out [M, N]: all bfloat16, float16 or float32. weight int8 [N, K], scales float32 [N]. All
    contiguous, K and N multiples of 16.
    """
    m, n, k = _check(x, weight, scales, bias, out)
    assert x.dtype == out.dtype, f"x is {x.dtype}, out {out.dtype}"
    if m == 0:
        return
    config = tile_of(TILES[arch_of(x.device)], m, x.dtype)
    matmul_int8_kernel[grid(config, m, n)](
        x,
        weight,
        scales,
        out if bias is None else bias,
        out,
        m,
        n,
        k,
        int(bias is not None),
        **config.blocks,
        **config.options,
    )


def matmul_int8_rows(
    x: Tensor, row_scales: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None = None, *, out: Tensor
) -> None:
    """out = (x * row_scales[:, None]) @ (weight * scales[:, None]).T + bias.

    x int8 [M, K] and row_scales float32 [M]: what `quantize_rows` makes of activations; else as `matmul_int8`.
    """
    m, n, k = _check(x, weight, scales, bias, out)
    assert x.dtype == torch.int8, f"x is {x.dtype}, not int8"
    assert row_scales.shape == (m,) and row_scales.dtype == torch.float32 and row_scales.is_contiguous()
    if m == 0:
        return
    config = tile_of(ROWS_TILES[arch_of(x.device)], m, out.dtype)
    matmul_int8_rows_kernel[grid(config, m, n)](
        x,
        row_scales,
        weight,
        scales,
        out if bias is None else bias,
        out,
        m,
        n,
        k,
        int(bias is not None),
        **config.blocks,
        **config.options,
    )


def _check(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, out: Tensor) -> tuple[int, int, int]:
    """M, N, K"""
    (m, k), n = x.shape, len(weight)
    assert weight.shape == (n, k) and weight.dtype == torch.int8, f"weight is {weight.dtype} {tuple(weight.shape)}"
    assert k % 16 == 0 and n % 16 == 0, f"K {k} and N {n} must be multiples of 16"
    assert scales.shape == (n,) and scales.dtype == torch.float32, f"scales are {scales.dtype} {tuple(scales.shape)}"
    assert out.shape == (m, n) and out.dtype in FLOAT_TYPES, f"out is {out.dtype} {tuple(out.shape)}"
    assert bias is None or (bias.shape == (n,) and bias.dtype == out.dtype and bias.is_contiguous())
    assert x.is_contiguous() and weight.is_contiguous() and scales.is_contiguous() and out.is_contiguous()
    return m, n, k


def reference(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
    """Either one in float64; x in floats, its row scales multiplied in."""
    result = x.double() @ (weight.double() * scales.double()[:, None]).T
    return result if bias is None else result + bias.double()


def specs(arch: int) -> list[KernelSpec]:
    """Every tile of both kernels."""
    integers = {"M": "i32", "N": "i32:16", "K": "i32:16", "has_bias": "i32"}
    return [
        KernelSpec(
            name=f"matmul_int8 {x_type} {title(config)}",
            kernel=matmul_int8_kernel,
            types={
                "x_ptr": f"*{x_type}",
                "weight_ptr": "*i8",
                "scales_ptr": "*fp32",
                "bias_ptr": f"*{x_type}",
                "out_ptr": f"*{x_type}",
                **integers,
            },
            constants=config.blocks,
            config=config,
            needs=needed(arch, config, x_type),
            quick=x_type == "bf16",
        )
        for config, x_type in shipped(TILES[arch])
    ] + [
        KernelSpec(
            name=f"matmul_int8_rows {out_type} {title(config)}",
            kernel=matmul_int8_rows_kernel,
            types={
                "x_ptr": "*i8",
                "row_scales_ptr": "*fp32",
                "weight_ptr": "*i8",
                "scales_ptr": "*fp32",
                "bias_ptr": f"*{out_type}",
                "out_ptr": f"*{out_type}",
                **integers,
            },
            constants=config.blocks,
            config=config,
            needs=needed(arch, config, "i8"),
            quick=out_type == "bf16",
        )
        for config, out_type in shipped(ROWS_TILES[arch])
    ]
