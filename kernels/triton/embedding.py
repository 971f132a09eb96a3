"""Row look-up in an embedding, the whole one or a rank's share of its rows."""

# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton
import triton.language as tl
from torch import Tensor

from trunkline.kernels.triton.spec import Config, KernelSpec

NARROW = Config({"ROWS": 8, "BLOCK": 256})
WIDE = Config({"ROWS": 1, "BLOCK": 2048})


@triton.jit(do_not_specialize=["tokens", "first_id", "num_ids"])
def _embed_kernel(
    ids_ptr, weight_ptr, out_ptr, tokens, first_id, num_ids, width, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None]
    row = tl.load(ids_ptr + token, mask=token < tokens, other=-1).to(tl.int64) - first_id
    is_here = (row >= 0) & (row < num_ids)
    numbers = tl.load(
        weight_ptr + row[:, None] * width + column, mask=is_here[:, None] & (column < width), other=0.0
    ).to(tl.float32)
    tl.store(
        out_ptr + token[:, None] * width + column,
        numbers.to(out_ptr.dtype.element_ty),
        mask=(token < tokens)[:, None] & (column < width),
    )


def embed(ids: Tensor, weight: Tensor, *, out: Tensor, first_id: int = 0) -> None:
    """See interface.Kernels.embed; weight [N, K]."""
    tokens, width = out.shape
    assert ids.shape == (tokens,) and ids.dtype == torch.int32 and ids.is_contiguous(), f"{ids.shape} {ids.dtype}"
    assert weight.shape[1:] == (width,) and weight.is_contiguous(), f"{weight.shape} {out.shape}"
    assert weight.dtype == out.dtype and out.is_contiguous(), f"{weight.dtype} {out.dtype}"
    if not tokens:
        return
    config = NARROW if width <= 4 * NARROW.blocks["BLOCK"] else WIDE
    grid = (triton.cdiv(tokens, config.blocks["ROWS"]), triton.cdiv(width, config.blocks["BLOCK"]))
    _embed_kernel[grid](ids, weight, out, tokens, first_id, len(weight), width, **config.blocks, **config.options)


def specs(arch: int) -> list[KernelSpec]:
    """See spec.py."""
    return [_spec(name, config) for name in ("bf16", "fp16", "fp32") for config in (NARROW, WIDE)]


def _spec(name: str, config: Config) -> KernelSpec:
    return KernelSpec(
        name=f"embed {name} N{config.blocks['BLOCK']}",
        kernel=_embed_kernel,
        types={
            "ids_ptr": "*i32",
            "weight_ptr": f"*{name}",
            "out_ptr": f"*{name}",
            "tokens": "i32",
            "first_id": "i32",
            "num_ids": "i32",
            "width": "i32:16",
        },
        constants=config.blocks,
        config=config,
        quick=name == "bf16" and config == WIDE,
    )
