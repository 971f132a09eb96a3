"""Rotary embedding of queries and keys in place, their norms per head before it, and the write of keys and values into pages.

One kernel reads q, k and v of a step once. To it they are [T * (Q + 2 KV), D]: a program takes ROWS heads in a row, of one token or
several.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import itertools

import torch
import triton
import triton.language as tl
from torch import Tensor

from trunkline.kernels.interface import Batch, KvPages
from trunkline.kernels.triton.spec import TYPE_NAMES, Config, KernelSpec

NUMBERS = 2048  # of a program's tile

# What the gate compiles: head size, numbers of a head that are turned, dtype of activations, dtype of pages.
HEADS = ((64, 64), (96, 96), (128, 128), (256, 256), (64, 32), (128, 64), (256, 64))
DTYPES = (
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.float8_e4m3fn),
    (torch.float16, torch.float8_e4m3fn),
)
FLOAT8_ARCH = 90  # the oldest one of ours that can convert to float8_e4m3fn


@triton.jit(do_not_specialize=["num_heads", "queries", "kv_heads"])
def _rotate_and_store_kernel(
    qkv_ptr, rope_ptr, positions_ptr, slots_ptr, keys_ptr, values_ptr, q_norm_ptr, k_norm_ptr,
    num_heads,  # of all tokens, q, k and v
    queries, kv_heads, page_size, epsilon,
    NORM: tl.constexpr, LARGEST: tl.constexpr, D: tl.constexpr, ROTARY: tl.constexpr,
    ROWS: tl.constexpr, HALF_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < num_heads
    token, head = row // (queries + 2 * kv_heads), row % (queries + 2 * kv_heads)
    is_query, is_value = head < queries, head >= queries + kv_heads

    # A head is `first`, `second` and, where not all of it is turned, `rest`.
    HALF: tl.constexpr = ROTARY // 2
    pair = tl.arange(0, HALF_BLOCK)
    is_pair = is_row[:, None] & (pair < HALF)[None]
    first_ptr = qkv_ptr + row[:, None].to(tl.int64) * D + pair[None]
    first = tl.load(first_ptr, mask=is_pair, other=0.0).to(tl.float32)
    second = tl.load(first_ptr + HALF, mask=is_pair, other=0.0).to(tl.float32)
    if REST_BLOCK > 0:
        other = ROTARY + tl.arange(0, REST_BLOCK)
        is_other = is_row[:, None] & (other < D)[None]
        rest_ptr = qkv_ptr + row[:, None].to(tl.int64) * D + other[None]
        rest = tl.load(rest_ptr, mask=is_other, other=0.0).to(tl.float32)
    tl.debug_barrier()  # all threads have read what any of them is about to overwrite

    if NORM:
        squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
        if REST_BLOCK > 0:
            squares += tl.sum(rest * rest, axis=1)
        scale = tl.where(is_value, 1.0, tl.rsqrt(squares / D + epsilon))[:, None]
        first *= scale * _norm_weight(q_norm_ptr, k_norm_ptr, pair, HALF, is_query, is_value)
        second *= scale * _norm_weight(q_norm_ptr + HALF, k_norm_ptr + HALF, pair, HALF, is_query, is_value)
        if REST_BLOCK > 0:
            rest *= scale * _norm_weight(q_norm_ptr, k_norm_ptr, other, D, is_query, is_value)
            tl.store(rest_ptr, rest.to(qkv_ptr.dtype.element_ty), mask=is_other & ~is_value[:, None])

    position = tl.load(positions_ptr + token, mask=is_row, other=0).to(tl.int64)
    turn_ptr = rope_ptr + position[:, None] * ROTARY + pair[None]
    is_turned = is_pair & ~is_value[:, None]
    cosine = tl.load(turn_ptr, mask=is_turned, other=1.0)
    sine = tl.load(turn_ptr + HALF, mask=is_turned, other=0.0)
    first, second = first * cosine - second * sine, second * cosine + first * sine
    tl.store(first_ptr, first.to(qkv_ptr.dtype.element_ty), mask=is_turned)
    tl.store(first_ptr + HALF, second.to(qkv_ptr.dtype.element_ty), mask=is_turned)

    slot = tl.load(slots_ptr + token, mask=is_row, other=-1).to(tl.int64)
    kv_head = tl.where(is_value, head - queries - kv_heads, head - queries)
    page, place = slot // page_size, slot % page_size
    stored_at = (((page * kv_heads + kv_head) * page_size + place) * D)[:, None]
    is_key = (slot >= 0) & ~is_query & ~is_value
    is_value &= slot >= 0
    first, second = _fit(first, LARGEST, keys_ptr.dtype.element_ty), _fit(second, LARGEST, keys_ptr.dtype.element_ty)
    tl.store(keys_ptr + stored_at + pair[None], first, mask=is_pair & is_key[:, None])
    tl.store(keys_ptr + stored_at + HALF + pair[None], second, mask=is_pair & is_key[:, None])
    tl.store(values_ptr + stored_at + pair[None], first, mask=is_pair & is_value[:, None])
    tl.store(values_ptr + stored_at + HALF + pair[None], second, mask=is_pair & is_value[:, None])
    if REST_BLOCK > 0:
        rest = _fit(rest, LARGEST, keys_ptr.dtype.element_ty)
        tl.store(keys_ptr + stored_at + other[None], rest, mask=is_other & is_key[:, None])
        tl.store(values_ptr + stored_at + other[None], rest, mask=is_other & is_value[:, None])


@triton.jit
def _norm_weight(q_norm_ptr, k_norm_ptr, at, end, is_query, is_value):
    """[rows, at]: the weights of q's norm or of k's; 1 for v."""
    q_norm = tl.load(q_norm_ptr + at, mask=at < end, other=0.0).to(tl.float32)
    k_norm = tl.load(k_norm_ptr + at, mask=at < end, other=0.0).to(tl.float32)
    return tl.where(is_value[:, None], 1.0, tl.where(is_query[:, None], q_norm[None], k_norm[None]))


@triton.jit
def _fit(x, LARGEST: tl.constexpr, dtype: tl.constexpr):
    """As `dtype`, whose largest number stands for all beyond it; NaN stays."""
    return tl.clamp(x, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL).to(dtype)


def rotate_and_store(
    qkv: Tensor,
    rope: Tensor,
    batch: Batch,
    kv: KvPages,
    layer: int,
    *,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    epsilon: float = 0.0,
) -> None:
    """See interface.Kernels.rotate_and_store. Pages are [layer, page, kv_head, page_size, head_dim].

    A row whose slot is -1 is turned, but not stored: steps are padded with such rows. q_norm and k_norm come together or not at all.
    """
    tokens, width, rotary, D = *qkv.shape, rope.shape[1], kv.head_dim
    num_heads = width // D
    queries = num_heads - 2 * kv.kv_heads
    assert qkv.is_contiguous() and width % D == 0 and queries > 0, f"{qkv.shape} {kv.kv_heads} {D}"
    assert batch.positions.shape == batch.slots.shape == (tokens,), f"{qkv.shape} {batch}"
    assert batch.positions.dtype == batch.slots.dtype == torch.int32, f"{batch.positions.dtype} {batch.slots.dtype}"
    assert rope.dtype == torch.float32 and rope.is_contiguous(), rope.dtype
    assert 0 < rotary <= D and rotary % 2 == 0, f"{rope.shape} {D}"
    assert kv.keys.shape[2:] == (kv.kv_heads, kv.page_size, D) and kv.keys.is_contiguous(), kv.keys.shape
    assert kv.values.shape == kv.keys.shape and kv.values.is_contiguous(), kv.values.shape
    assert kv.keys.dtype == kv.values.dtype, f"{kv.keys.dtype} {kv.values.dtype}"
    assert (q_norm is None) == (k_norm is None), "both norms or none"
    for weight in (q_norm, k_norm):
        assert weight is None or (weight.shape == (D,) and weight.is_contiguous()), weight
    if not tokens:
        return
    config = _config(D, rotary)
    _rotate_and_store_kernel[(triton.cdiv(tokens * num_heads, config.blocks["ROWS"]),)](
        qkv, rope, batch.positions, batch.slots, kv.keys[layer], kv.values[layer],
        qkv if q_norm is None else q_norm, qkv if k_norm is None else k_norm,
        tokens * num_heads, queries, kv.kv_heads, kv.page_size, epsilon,
        NORM=q_norm is not None, LARGEST=torch.finfo(kv.keys.dtype).max, D=D, ROTARY=rotary,
        **config.blocks, **config.options,
    )  # fmt: skip


def _config(D: int, rotary: int) -> Config:
    return Config(
        {
            "ROWS": NUMBERS // triton.next_power_of_2(D),
            "HALF_BLOCK": triton.next_power_of_2(rotary // 2),
            "REST_BLOCK": triton.next_power_of_2(D - rotary) if rotary < D else 0,
        },
        registers=255,  # left alone, the compiler spills 8 bytes for sm_100 at 48 of them
    )


def specs(arch: int) -> list[KernelSpec]:
    """See spec.py."""
    return [
        _spec(D, rotary, dtype, stored, norm)
        for (D, rotary), (dtype, stored), norm in itertools.product(HEADS, DTYPES, (False, True))
        if stored != torch.float8_e4m3fn or arch >= FLOAT8_ARCH
    ]


def _spec(D: int, rotary: int, dtype: torch.dtype, stored: torch.dtype, norm: bool) -> KernelSpec:
    config, activations, pages = _config(D, rotary), f"*{TYPE_NAMES[dtype]}", f"*{TYPE_NAMES[stored]}"
    return KernelSpec(
        name=f"rotate_and_store{'_norm' * norm} {TYPE_NAMES[dtype]} {TYPE_NAMES[stored]} D{D} R{rotary}",
        kernel=_rotate_and_store_kernel,
        types={
            "qkv_ptr": activations,
            "rope_ptr": "*fp32",
            "positions_ptr": "*i32",
            "slots_ptr": "*i32",
            "keys_ptr": pages,
            "values_ptr": pages,
            "q_norm_ptr": activations,
            "k_norm_ptr": activations,
            "num_heads": "i32",
            "queries": "i32",
            "kv_heads": "i32",
            "page_size": "i32:16",
            "epsilon": "fp32",
        },
        constants={"NORM": norm, "LARGEST": torch.finfo(stored).max, "D": D, "ROTARY": rotary, **config.blocks},
        config=config,
        quick=D == rotary == 128 and dtype == torch.bfloat16,
    )
