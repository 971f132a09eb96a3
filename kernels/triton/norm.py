"""RMSNorm, alone and fused with the addition to the residual stream.        arXiv:1910.07467

A program takes whole rows, several of them where they are short. The width alone decides how a row is summed, in float32: its bits
do not depend on the rows beside it.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import itertools

import triton
import triton.language as tl
from torch import Tensor

from trunkline.kernels.triton.spec import Config, KernelSpec

CONFIGS = (  # the narrowest block that holds a row
    Config({"ROWS": 8, "BLOCK": 256}),
    Config({"ROWS": 2, "BLOCK": 1024}),
    Config({"ROWS": 1, "BLOCK": 2048}),
    Config({"ROWS": 1, "BLOCK": 4096}, num_warps=8),
    Config({"ROWS": 1, "BLOCK": 8192}, num_warps=8),
    Config({"ROWS": 1, "BLOCK": 16384}, num_warps=16),
)


@triton.jit(do_not_specialize=["rows"])
def _rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, rows, width, epsilon,
    HAS_RESIDUAL: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    at = row[:, None] * width + column[None]
    inside = (row < rows)[:, None] & (column < width)[None]
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        x += tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
        total = x.to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptr + at, total, mask=inside)
        x = total.to(tl.float32)  # the norm of what was stored, as it is without fusion
    scale = tl.rsqrt(tl.sum(x * x, axis=1) / width + epsilon)
    weight = tl.load(weight_ptr + column, mask=column < width, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, (x * scale[:, None] * weight[None]).to(out_ptr.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float, *, out: Tensor) -> None:
    """See interface.Kernels.rms_norm."""
    _launch(x, None, weight, epsilon, out)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, epsilon: float, *, out: Tensor) -> None:
    """See interface.Kernels.add_rms_norm."""
    _launch(x, residual, weight, epsilon, out)


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, epsilon: float, out: Tensor) -> None:
    rows, width = x.shape
    assert out.shape == x.shape and weight.shape == (width,), f"{x.shape} {weight.shape} {out.shape}"
    assert residual is None or residual.shape == x.shape, f"{x.shape} {residual}"
    tensors = [x, weight, out] if residual is None else [x, residual, weight, out]
    assert all(tensor.dtype == x.dtype and tensor.is_contiguous() for tensor in tensors), [t.dtype for t in tensors]
    if not rows:
        return
    config = _config(width)
    _rms_norm_kernel[(triton.cdiv(rows, config.blocks["ROWS"]),)](
        x, x if residual is None else residual, weight, out, rows, width, epsilon, HAS_RESIDUAL=residual is not None,
        **config.blocks, **config.options,
    )  # fmt: skip


def _config(width: int) -> Config:
    fitting = [config for config in CONFIGS if width <= config.blocks["BLOCK"]]
    assert fitting, f"rows of {width} numbers; at most {CONFIGS[-1].blocks['BLOCK']}"
    return fitting[0]


def specs(arch: int) -> list[KernelSpec]:
    """See spec.py."""
    return [_spec(*case) for case in itertools.product(("bf16", "fp16", "fp32"), CONFIGS, (False, True))]


def _spec(name: str, config: Config, has_residual: bool) -> KernelSpec:
    return KernelSpec(
        name=f"{'add_' * has_residual}rms_norm {name} N{config.blocks['BLOCK']}",
        kernel=_rms_norm_kernel,
        types={
            "x_ptr": f"*{name}",
            "residual_ptr": f"*{name}",
            "weight_ptr": f"*{name}",
            "out_ptr": f"*{name}",
            "rows": "i32",
            "width": "i32:16",
            "epsilon": "fp32",
        },
        constants={"HAS_RESIDUAL": has_residual, **config.blocks},
        config=config,
        quick=name == "bf16" and config.blocks["BLOCK"] == 4096,
    )
