"""The gated activation of an MLP.        arXiv:2002.05202"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import itertools

import triton
import triton.language as tl
from torch import Tensor

from trunkline.kernels.interface import Activation
from trunkline.kernels.triton.spec import Config, KernelSpec

NARROW = Config({"ROWS": 8, "BLOCK": 256})
WIDE = Config({"ROWS": 1, "BLOCK": 2048})


@triton.jit(do_not_specialize=["rows"])
def _gated_mul_kernel(
    gate_up_ptr, out_ptr, rows, width, SILU: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    column = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None]
    inside = (row < rows) & (column < width)
    gate_ptr = gate_up_ptr + row * (2 * width) + column
    gate = tl.load(gate_ptr, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + width, mask=inside, other=0.0).to(tl.float32)
    if SILU:
        logit = gate
    else:
        TWICE_SQRT_2_OVER_PI: tl.constexpr = 1.5957691216057308
        logit = TWICE_SQRT_2_OVER_PI * (gate + 0.044715 * gate * gate * gate)
    decay = tl.exp(-tl.abs(logit))  # never overflows
    sigmoid = tl.where(logit < 0, decay, 1.0) / (1.0 + decay)
    tl.store(out_ptr + row * width + column, (gate * sigmoid * up).to(out_ptr.dtype.element_ty), mask=inside)


def gated_mul(gate_up: Tensor, activation: Activation, *, out: Tensor) -> None:
    """See interface.Kernels.gated_mul."""
    rows, width = out.shape
    assert gate_up.shape == (rows, 2 * width) and gate_up.dtype == out.dtype, f"{gate_up.shape} {out.shape}"
    assert gate_up.is_contiguous() and out.is_contiguous(), f"{gate_up.stride()} {out.stride()}"
    if not rows:
        return
    config = _config(width)
    grid = (triton.cdiv(rows, config.blocks["ROWS"]), triton.cdiv(width, config.blocks["BLOCK"]))
    _gated_mul_kernel[grid](gate_up, out, rows, width, SILU=activation == "silu", **config.blocks, **config.options)


def _config(width: int) -> Config:
    return NARROW if width <= 4 * NARROW.blocks["BLOCK"] else WIDE


def specs(arch: int) -> list[KernelSpec]:
    """See spec.py."""
    cases = itertools.product(("bf16", "fp16", "fp32"), (NARROW, WIDE), ("silu", "gelu_tanh"))
    return [_spec(*case) for case in cases]


def _spec(name: str, config: Config, activation: str) -> KernelSpec:
    return KernelSpec(
        name=f"gated_mul {activation} {name} N{config.blocks['BLOCK']}",
        kernel=_gated_mul_kernel,
        types={"gate_up_ptr": f"*{name}", "out_ptr": f"*{name}", "rows": "i32", "width": "i32:16"},
        constants={"SILU": activation == "silu", **config.blocks},
        config=config,
        quick=name == "bf16" and config == WIDE,
    )
