"""Kernels of every kind, and ragged batches over scrambled pages, for the tests of this folder."""

import math
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

from trunkline.kernels.build import BuildError, build_library, detect_target
from trunkline.kernels.cpu import CpuKernels
from trunkline.kernels.interface import Batch, Kernels, KvPages, make_batch

THIS_MACHINE = detect_target()
TARGETS = [
    pytest.param(THIS_MACHINE, id=THIS_MACHINE),
    *([pytest.param("baseline", id="baseline", marks=pytest.mark.slow)] if THIS_MACHINE != "baseline" else []),
]
STORAGE = {
    torch.float32: 1e-6,
    torch.float16: 2e-3,
    torch.bfloat16: 2e-2,
}  # dtype -> relative error that its rounding may cause


@cache
def compiled(target: str = THIS_MACHINE, threads: int = 2) -> CpuKernels:
    """The compiled kernels; skips the test where there is no compiler."""
    try:
        return CpuKernels(threads, build_library(target))
    except BuildError as error:
        pytest.skip(f"not compiled: {error}")


def random(*shape: int, seed: int = 0, std: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * std


def rope_table(positions: int, rotary: int) -> Tensor:
    angles = torch.arange(positions)[:, None] / 100 ** (torch.arange(rotary // 2) / (rotary // 2))
    return torch.cat([angles.cos(), angles.sin()], dim=1).float()


def assert_close(ours: Tensor, oracle: Tensor, tolerance: float) -> None:
    """Every element within `tolerance` of the largest one."""
    assert ours.isfinite().all()
    error = (ours.double() - oracle).abs().max() / oracle.abs().max()
    assert error <= tolerance, f"off by {error:.2e} of the largest, allowed is {tolerance:.0e}"


@dataclass(frozen=True, kw_only=True)
class Heads:
    query: int = 6
    kv: int = 2
    dim: int = 16

    @property
    def width(self) -> int:
        return (self.query + 2 * self.kv) * self.dim


class Requests:
    """Random q, k, v of some requests, and a page table that scatters them.

    qkv[r]      [context_len[r], heads.width], before RoPE
    page_table  int32 [R, P]; pages that no request owns are left over
    """

    def __init__(self, contexts: list[int], heads: Heads, *, page_size: int = 16, seed: int = 0) -> None:
        self.contexts, self.heads, self.page_size = contexts, heads, page_size
        self.qkv = [random(context, heads.width, seed=seed + i) for i, context in enumerate(contexts)]
        counts = [math.ceil(context / page_size) for context in contexts]
        self.num_pages = sum(counts) + 3
        order = iter(np.random.default_rng(seed).permutation(self.num_pages).tolist())
        self.page_table = np.zeros((len(contexts), max(counts)), np.int32)
        for request, count in enumerate(counts):
            self.page_table[request, :count] = [next(order) for _ in range(count)]
        self.rope = rope_table(max(contexts), heads.dim)

    def batch(self, chunks: list[tuple[int, int, int]]) -> Batch:
        """Rows first … last - 1 of a request, for every (request, first, last)."""
        requests = [request for request, _, _ in chunks]
        return make_batch(
            positions=np.concatenate([np.arange(first, last, dtype=np.int32) for _, first, last in chunks]),
            query_start=np.cumsum([0, *(last - first for _, first, last in chunks)], dtype=np.int32),
            context_len=np.array([last for _, _, last in chunks], np.int32),
            page_table=self.page_table[requests],
            page_size=self.page_size,
            num_pages=self.num_pages,
        )

    def rows(self, chunks: list[tuple[int, int, int]], dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.cat([self.qkv[request][first:last] for request, first, last in chunks]).to(dtype)

    def allocate(self, kernels: Kernels, dtype: torch.dtype, *, poison: bool = True) -> KvPages:
        """Pages full of NaN."""
        kv = kernels.allocate_kv(
            num_layers=2,
            num_pages=self.num_pages,
            page_size=self.page_size,
            kv_heads=self.heads.kv,
            head_dim=self.heads.dim,
            dtype=dtype,
        )
        if poison:
            kv.keys.fill_(math.nan)
            kv.values.fill_(math.nan)
        return kv

    def attend(
        self, kernels: Kernels, kv: KvPages, chunks: list[tuple[int, int, int]], *, store: bool = True
    ) -> Tensor:
        """Attention of these rows in layer 1, over what is in the pages; [rows, query * dim]. `store` writes theirs first."""
        batch, qkv = self.batch(chunks), self.rows(chunks, kernels.activation_dtype)
        rotated_into = kv if store else self.allocate(kernels, kv.keys.dtype)
        kernels.rotate_and_store(qkv, self.rope, batch, rotated_into, 1)
        out = torch.full((len(qkv), self.heads.query * self.heads.dim), math.nan, dtype=qkv.dtype)
        kernels.attention(qkv, batch, kv, 1, self.heads.dim**-0.5, out=out)
        return out

    def everything(self) -> list[tuple[int, int, int]]:
        return [(request, 0, context) for request, context in enumerate(self.contexts)]
