"""Activations rounded to int8 or float8 with a scale per row, while they are served ("dynamic per token").

    quantize_rows(x, out=codes, scales=scales)      # x is about codes * scales[:, None]

A row's scale is its largest magnitude over the largest code, 127 or 448, so it depends on no other row. A row with a NaN
or an infinity gets the scale NaN: a code could not say so, and the row would look healthy.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from trunkline.kernels.triton.spec import Config, KernelSpec
from trunkline.kernels.triton.tiles import FLOAT_TYPES

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}  # dtype of the codes -> the largest one
CONFIG = Config({"BLOCK": 1024})


@triton.jit(do_not_specialize=["largest"])
def quantize_rows_kernel(x_ptr, out_ptr, scales_ptr, K, largest, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    magnitude = tl.zeros([BLOCK], tl.float32)
    broken = tl.zeros([BLOCK], tl.int32)
    for start in range(0, K, BLOCK):
        k = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * K + k, mask=k < K, other=0.0).to(tl.float32)
        is_finite = tl.abs(x) < float("inf")
        magnitude = tl.maximum(magnitude, tl.where(is_finite, tl.abs(x), 0.0))
        broken |= (is_finite == 0).to(tl.int32)
    scale = tl.max(magnitude, axis=0) / largest
    inverse = 1.0 / tl.where(scale > 0.0, scale, 1.0)
    tl.store(scales_ptr + row, tl.where(tl.max(broken, axis=0) > 0, float("nan"), scale))
    for start in range(0, K, BLOCK):
        k = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * K + k, mask=k < K, other=0.0).to(tl.float32)
        code = tl.where(tl.abs(x) < float("inf"), x, 0.0) * inverse
        code = tl.minimum(tl.maximum(code, -largest), largest)
        if out_ptr.dtype.element_ty == tl.int8:
            code = tl.floor(code + 0.5)
        tl.store(out_ptr + row * K + k, code.to(out_ptr.dtype.element_ty), mask=k < K)


def quantize_rows(x: Tensor, *, out: Tensor, scales: Tensor) -> None:
    """x [M, K], contiguous; out [M, K] int8 or float8_e4m3fn; scales [M] float32."""
    (m, k) = x.shape
    assert x.dtype in FLOAT_TYPES and x.is_contiguous() and k % 16 == 0, f"x is {x.dtype} {tuple(x.shape)}"
    assert out.shape == x.shape and out.is_contiguous(), f"out {tuple(out.shape)} must be {tuple(x.shape)}"
    assert out.dtype in LARGEST, f"out is {out.dtype}, it must be one of {list(LARGEST)}"
    assert scales.shape == (m,) and scales.dtype == torch.float32 and scales.is_contiguous()
    if m == 0:
        return
    quantize_rows_kernel[(m,)](x, out, scales, k, LARGEST[out.dtype], **CONFIG.blocks, **CONFIG.options)


def reference(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(codes, scales) of rows that are finite."""
    scales = x.float().abs().amax(dim=1) / LARGEST[dtype]
    codes = (x.float() / scales.where(scales > 0, 1)[:, None]).clamp(-LARGEST[dtype], LARGEST[dtype])
    return (codes + 0.5).floor().to(dtype) if dtype == torch.int8 else codes.to(dtype), scales


def specs(arch: int) -> list[KernelSpec]:
    """For each type of activations and of codes; Ampere has no float8."""
    return [
        KernelSpec(
            name=f"quantize_rows {x_type} to {code_type}",
            kernel=quantize_rows_kernel,
            types={
                "x_ptr": f"*{x_type}",
                "out_ptr": f"*{code_type}",
                "scales_ptr": "*fp32",
                "K": "i32:16",
                "largest": "fp32",
            },
            constants=CONFIG.blocks,
            config=CONFIG,
            quick=x_type == "bf16",
        )
        for x_type in FLOAT_TYPES.values()
        for code_type in (("i8", "fp8e4nv") if arch >= 90 else ("i8",))
    ]
