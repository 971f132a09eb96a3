"""Masks of allowed tokens, applied to logits: what is not allowed becomes -inf.

A mask is a row of int32 words: token i is bit i % 32 of word i // 32 (step.Masks). No logit is read, and none is written where it is
allowed: a mask that allows everything costs the reading of its words.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton
import triton.language as tl
from torch import Tensor

from trunkline.kernels.triton.spec import Config, KernelSpec

WORD = 32  # bits
CONFIG = Config({"WORDS": 128})


@triton.jit(do_not_specialize=["vocab_size", "words"])
def _apply_bitmask_kernel(logits_ptr, masks_ptr, mask_rows_ptr, vocab_size, words, WORDS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    mask_row = tl.load(mask_rows_ptr + row).to(tl.int64)
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    bits = tl.load(masks_ptr + mask_row * words + word, mask=(mask_row >= 0) & (word < words), other=-1)
    bit = tl.arange(0, 32)[None]
    token = word[:, None] * 32 + bit
    is_banned = ((bits[:, None] >> bit) & 1) == 0
    nothing = tl.full([WORDS, 32], float("-inf"), tl.float32)
    tl.store(logits_ptr + row * vocab_size + token, nothing, mask=is_banned & (token < vocab_size))


def apply_bitmask(logits: Tensor, masks: Tensor, mask_rows: Tensor) -> None:
    """Ban tokens, in place.

    logits     float32 [L, V]
    masks      int32 [M, at least V/32]
    mask_rows  int32 [L]: the row of `masks` that holds for each row of logits; -1: none does
    """
    rows, vocab_size = logits.shape
    assert logits.dtype == torch.float32 and logits.is_contiguous(), f"{logits.dtype} {logits.stride()}"
    assert masks.dtype == torch.int32 and masks.is_contiguous(), f"{masks.dtype} {masks.stride()}"
    assert masks.shape[1] * WORD >= vocab_size, f"{masks.shape} for {vocab_size} tokens"
    assert mask_rows.shape == (rows,) and mask_rows.dtype == torch.int32, f"{mask_rows.shape} {mask_rows.dtype}"
    if not rows or not vocab_size:
        return
    grid = (rows, triton.cdiv(triton.cdiv(vocab_size, WORD), CONFIG.blocks["WORDS"]))
    _apply_bitmask_kernel[grid](logits, masks, mask_rows, vocab_size, masks.shape[1], **CONFIG.blocks, **CONFIG.options)


def specs(arch: int) -> list[KernelSpec]:
    """See spec.py."""
    spec = KernelSpec(
        name="apply_bitmask",
        kernel=_apply_bitmask_kernel,
        types={
            "logits_ptr": "*fp32",
            "masks_ptr": "*i32",
            "mask_rows_ptr": "*i32",
            "vocab_size": "i32",
            "words": "i32",
        },
        constants=CONFIG.blocks,
        config=CONFIG,
        quick=True,
    )
    return [spec]
