"""Every kernel against its reference in float64, on random inputs that are new each time; what must not be read, or must be
written, is NaN before.

An error is the largest of all elements', relative to the largest element. Tests in the interpreter ask for the same, of more shapes
(tests/kernels/triton); this is about the compiler and the chip.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu_visit import correctness_attention
from benchmarks.gpu_visit.part import Visit
from trunkline.kernels.reference import ReferenceKernels
from trunkline.kernels.triton import (
    activation,
    bitmask,
    embedding,
    lora,
    matmul_fp8,
    matmul_int4,
    matmul_int8,
    norm,
    pages,
)
from trunkline.kernels.triton import quantize_rows as quantization

ORACLE = ReferenceKernels(torch.float64)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 5e-3}


def run(visit: Visit) -> None:
    torch.manual_seed(visit.seed)
    for check in (rows, activations, lookups, masks, page_copies, int4, int8, fp8, adapters):
        for dtype in visit.sizes((torch.bfloat16, torch.float16, torch.float32), (torch.bfloat16,)):
            with visit.row(f"{check.__name__} {name(dtype)}"):
                check(visit, dtype)
    correctness_attention.run(visit)


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def compare(visit: Visit, what: str, ours: Tensor, oracle: Tensor, tolerance: float) -> None:
    """Emit how far off ours is; NaN, an element that nobody wrote, is as far off as can be."""
    oracle = oracle.cpu().double()
    error = ((ours.cpu().double() - oracle).abs().max() / oracle.abs().max().clamp(min=1e-30)).item()
    error = error if math.isfinite(error) else math.inf
    visit.emit(
        what,
        error if math.isfinite(error) else None,
        goal=f"≤ {tolerance:.0e}",
        met=error <= tolerance,
        failed=not error <= tolerance,
        note="" if math.isfinite(error) else "not finite: something was not written, or read that must not be",
    )


def random(visit: Visit, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, device=visit.device, dtype=torch.float32).to(dtype)


def poisoned(visit: Visit, *shape: int, dtype: torch.dtype) -> Tensor:
    return torch.full(shape, math.nan, device=visit.device, dtype=dtype)


def rows(visit: Visit, dtype: torch.dtype) -> None:
    """RMSNorm, alone and with the residual."""
    for count, width in visit.sizes(((1, 64), (7, 576), (33, 4096), (5, 8192)), ((3, 64),)):
        x, residual, weight = (
            random(visit, *shape, dtype=dtype) for shape in ((count, width), (count, width), (width,))
        )
        out, oracle = poisoned(visit, count, width, dtype=dtype), torch.empty(count, width, dtype=torch.float64)
        norm.rms_norm(x, weight, 1e-5, out=out)
        ORACLE.rms_norm(x.cpu().double(), weight.cpu().double(), 1e-5, out=oracle)
        compare(visit, f"rms_norm {count} × {width} {name(dtype)}", out, oracle, TOLERANCE[dtype])
        total = (x.cpu().double() + residual.cpu().double()).to(dtype).double()  # rounded as it is stored
        ORACLE.rms_norm(total, weight.cpu().double(), 1e-5, out=oracle)
        norm.add_rms_norm(x, residual, weight, 1e-5, out=out.fill_(math.nan))
        compare(visit, f"add_rms_norm {count} × {width} {name(dtype)}", out, oracle, TOLERANCE[dtype])


def activations(visit: Visit, dtype: torch.dtype) -> None:
    for count, width in visit.sizes(((1, 96), (9, 1536), (33, 14336)), ((3, 64),)):
        gate_up = random(visit, count, 2 * width, dtype=dtype)
        for kind in ("silu", "gelu_tanh"):
            out, oracle = poisoned(visit, count, width, dtype=dtype), torch.empty(count, width, dtype=torch.float64)
            activation.gated_mul(gate_up, kind, out=out)
            ORACLE.gated_mul(gate_up.cpu().double(), kind, out=oracle)
            compare(visit, f"gated_mul {kind} {count} × {width} {name(dtype)}", out, oracle, TOLERANCE[dtype])


def lookups(visit: Visit, dtype: torch.dtype) -> None:
    """Embedding, of a vocabulary of which others hold a part."""
    count, width, num_ids, first_id = visit.sizes((70, 4096, 5000, 1000), (5, 64, 20, 10))
    weight = random(visit, num_ids, width, dtype=dtype)
    ids = torch.randint(0, 2 * num_ids, (count,), dtype=torch.int32, device=visit.device)
    out = poisoned(visit, count, width, dtype=dtype)
    embedding.embed(ids, weight, out=out, first_id=first_id)
    at = ids.long() - first_id
    here = (at >= 0) & (at < num_ids)
    oracle = weight.double()[at.where(here, 0)] * here[:, None]
    compare(visit, f"embed {count} × {width} {name(dtype)}", out, oracle, 0.0)


def masks(visit: Visit, dtype: torch.dtype) -> None:
    if dtype != torch.bfloat16:  # logits are always float32: once is enough
        return
    count, vocab_size = visit.sizes((9, 128_256), (3, 70))
    logits = random(visit, count, vocab_size)
    words = torch.randint(-(2**31), 2**31, (count, -(-vocab_size // 32)), dtype=torch.int64, device=visit.device).int()
    mask_rows = torch.arange(count, dtype=torch.int32, device=visit.device) - 1  # the first has none
    ids = torch.arange(vocab_size, device=visit.device)
    allowed = (words[:, ids // 32] >> (ids % 32)) & 1 != 0
    oracle = logits.clone()
    oracle[1:][~allowed[:-1]] = -torch.inf
    bitmask.apply_bitmask(logits, words, mask_rows)
    differing = int((logits != oracle).sum())
    visit.emit(
        f"apply_bitmask {count} × {vocab_size}",
        differing,
        "differ",
        goal="0",
        met=not differing,
        failed=bool(differing),
    )


def page_copies(visit: Visit, dtype: torch.dtype) -> None:
    """Within the storage, and through a staging buffer and back."""
    scene = correctness_attention.small_scene(visit, dtype)
    kv = scene.kv
    kv.keys.normal_()
    kv.values.normal_()
    before = kv.keys.clone(), kv.values.clone()
    half = kv.num_pages // 2
    order = torch.randperm(kv.num_pages, device=visit.device).int()
    source, target = order[:half].clone(), order[half : 2 * half].clone()
    pages.copy_pages(kv, source, target)
    page_bytes = 2 * len(kv.keys) * kv.keys[0, 0].nbytes
    staging = torch.zeros(half, page_bytes, dtype=torch.uint8, device=visit.device)
    pages.gather_pages(kv, target, staging)
    elsewhere = replace(kv, keys=torch.full_like(kv.keys, math.nan), values=torch.full_like(kv.values, math.nan))
    pages.scatter_pages(elsewhere, staging, source)
    same = all(
        torch.equal(now[:, target.long()], then[:, source.long()])
        and torch.equal(there[:, source.long()], then[:, source.long()])
        and torch.equal(now[:, source.long()], then[:, source.long()])
        for now, there, then in zip((kv.keys, kv.values), (elsewhere.keys, elsewhere.values), before, strict=True)
    )
    visit.emit(f"page copies {name(dtype)}", float(not same), "differ", goal="0", met=same, failed=not same)


def matmul(
    visit: Visit,
    what: str,
    dtype: torch.dtype,
    launch: Callable[[Tensor, Tensor | None, Tensor], None],
    reference: Callable[[Tensor, Tensor | None], Tensor],
    n: int,
    k: int,
) -> None:
    for m in visit.sizes((1, 16, 17, 64, 200), (3,)):
        x, bias = random(visit, m, k, dtype=dtype), random(visit, n, dtype=dtype)
        for has_bias in (False, True):
            out = poisoned(visit, m, n, dtype=dtype)
            given = bias if has_bias else None
            launch(x, given, out)
            compare(
                visit,
                f"{what} {m} × {n} × {k}{' + bias' * has_bias} {name(dtype)}",
                out,
                reference(x, given),
                TOLERANCE[dtype],
            )


def sizes(visit: Visit) -> tuple[int, int]:
    """N and K"""
    n, k = visit.sizes((1040, 1024), (32, 64))
    return n, k


def int4(visit: Visit, dtype: torch.dtype) -> None:
    n, k = sizes(visit)
    group = visit.sizes(128, 32)

    def words(*shape: int) -> Tensor:
        return torch.randint(-(2**31), 2**31, shape, dtype=torch.int64, device=visit.device).int()

    for layout in ("gptq", "awq"):
        weight = matmul_int4.Int4Weight(
            layout=layout,
            qweight=words(k // 8, n) if layout == "gptq" else words(k, n // 8),
            qzeros=words(k // group, n // 8),
            scales=(random(visit, k // group, n).abs() * 0.01).half(),
            group_size=group,
        )
        matmul(visit, f"matmul_int4 {layout}", dtype, *_both(matmul_int4, weight), n, k)


def int8(visit: Visit, dtype: torch.dtype) -> None:
    n, k = sizes(visit)
    weight = torch.randint(-127, 128, (n, k), dtype=torch.int8, device=visit.device)
    scales = random(visit, n).abs() * 0.01 + 1e-3
    matmul(visit, "matmul_int8", dtype, *_both(matmul_int8, weight, scales), n, k)
    quantized_rows(visit, "matmul_int8_rows", dtype, torch.int8, matmul_int8, (weight, scales), n, k)


def fp8(visit: Visit, dtype: torch.dtype) -> None:
    n, k = sizes(visit)
    data = random(visit, n, k).to(torch.float8_e4m3fn)
    for kind, shape in {"all": (1,), "outputs": (n,), "blocks": (-(-n // 128), -(-k // 128))}.items():
        weight = matmul_fp8.Fp8Weight(data=data, scales=random(visit, *shape).abs() + 0.1)
        matmul(visit, f"matmul_fp8, scale of {kind}", dtype, *_both(matmul_fp8, weight), n, k)
        quantized_rows(
            visit, f"matmul_fp8_rows, scale of {kind}", dtype, torch.float8_e4m3fn, matmul_fp8, (weight,), n, k
        )


def _both(module: Any, *weight: Any) -> tuple[Any, Any]:
    """A module's launch and its reference, with the weight given."""
    launch = getattr(module, module.__name__.rpartition(".")[2])
    return (
        lambda x, bias, out: launch(x, *weight, bias, out=out),
        lambda x, bias: module.reference(x, *weight, bias),
    )


def quantized_rows(
    visit: Visit, what: str, dtype: torch.dtype, code: torch.dtype, module: Any, weight: tuple[Any, ...], n: int, k: int
) -> None:
    """Activations become 8-bit codes, and are multiplied as such."""
    launch = getattr(module, f"{module.__name__.rpartition('.')[2]}_rows")
    for m in visit.sizes((1, 17, 200), (3,)):
        x = random(visit, m, k, dtype=dtype)
        codes, scales = torch.zeros(m, k, dtype=code, device=visit.device), poisoned(visit, m, dtype=torch.float32)
        quantization.quantize_rows(x, out=codes, scales=scales)
        out = poisoned(visit, m, n, dtype=dtype)
        launch(codes, scales, *weight, None, out=out)
        oracle = module.reference(codes.float() * scales[:, None], *weight, None)
        compare(visit, f"{what} {m} × {n} × {k} {name(dtype)}", out, oracle, TOLERANCE[dtype])
        oracle = x.double()
        within = 1 / 254 if code == torch.int8 else 1 / 28  # half a step of the largest
        compare(
            visit,
            f"quantize_rows {name(code)} {m} × {k} {name(dtype)}",
            codes.float() * scales[:, None],
            oracle,
            1.5 * within,
        )


def adapters(visit: Visit, dtype: torch.dtype) -> None:
    """Rows of several adapters at once, of different ranks, and rows without one; what is beyond an adapter's rank is NaN."""
    k, n, padded, ranks = visit.sizes((4096, 1024, 64, (64, 8, 33)), (64, 32, 16, (16, 3)))
    a, b = random(visit, len(ranks), padded, k) / k**0.5, random(visit, len(ranks), n, padded)
    for slot, rank in enumerate(ranks):
        a[slot, rank:], b[slot, :, rank:] = math.nan, math.nan
    weights = lora.Adapters(
        a=a.to(dtype),
        b=b.to(dtype),
        ranks=torch.tensor(ranks, dtype=torch.int32, device=visit.device),
        scales=torch.arange(len(ranks), device=visit.device) + 0.5,
    )
    for count in visit.sizes((1, 17, 64, 200), (5,)):
        slots = (np.arange(count) % (len(ranks) + 1) - 1).astype(np.int32)  # -1: none
        x, out = random(visit, count, k, dtype=dtype), random(visit, count, n, dtype=dtype)
        oracle = lora.reference(x, weights, slots, out)
        segments = lora.plan_segments(slots, block_m=lora.block_rows(count, dtype)).to(visit.device)
        workspace = poisoned(visit, lora.workspace_size(count, padded, dtype), dtype=torch.float32)
        lora.add_lora(x, weights, segments, workspace=workspace, out=out)
        compare(visit, f"add_lora {count} × {n} × {k} {name(dtype)}", out, oracle, TOLERANCE[dtype])
