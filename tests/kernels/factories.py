"""Kernels of every kind, and ragged batches over scrambled pages, for the tests of this folder."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

from trunkline.kernels.build import TARGET_FLAGS, BuildError, build_library, detect_target
from trunkline.kernels.cpu import CpuKernels
from trunkline.kernels.interface import Batch, Kernels, KvPages, make_batch
from trunkline.step import SharedRun

THIS_MACHINE = detect_target()
HERE = list(TARGET_FLAGS)[list(TARGET_FLAGS).index(THIS_MACHINE) :]  # all that this machine can run, the fastest first
TARGETS = [pytest.param(target, marks=[pytest.mark.slow] * (target != THIS_MACHINE)) for target in HERE]
STORAGE = {
    torch.float32: 1e-6,
    torch.float16: 2e-3,
    torch.bfloat16: 2e-2,
    torch.float8_e4m3fn: 7e-2,
}  # dtype -> relative error that its rounding may cause
KV_DTYPES = (torch.float32, torch.float16, torch.float8_e4m3fn)


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
    shared      what requests have in common: the first one's numbers and pages are those of all
    """

    def __init__(
        self,
        contexts: list[int],
        heads: Heads,
        *,
        page_size: int = 16,
        seed: int = 0,
        shared: Sequence[SharedRun] = (),
    ) -> None:
        self.contexts, self.heads, self.page_size, self.shared = contexts, heads, page_size, shared
        self.qkv = [random(context, heads.width, seed=seed + i) for i, context in enumerate(contexts)]
        counts = [math.ceil(context / page_size) for context in contexts]
        self.num_pages = sum(counts) + 3
        order = iter(np.random.default_rng(seed).permutation(self.num_pages).tolist())
        self.page_table = np.zeros((len(contexts), max(counts)), np.int32)
        for request, count in enumerate(counts):
            self.page_table[request, :count] = [next(order) for _ in range(count)]
        for (first, *others), start, end in shared:
            for other in others:
                self.qkv[other][start:end] = self.qkv[first][start:end]
                pages = slice(start // page_size, end // page_size)
                self.page_table[other, pages] = self.page_table[first, pages]
        self.rope = rope_table(max(contexts), heads.dim)

    def batch(self, chunks: list[tuple[int, int, int]], *, grouped: bool = False) -> Batch:
        """Rows first … last - 1 of a request, for every (request, first, last); `grouped`: they share what they can."""
        requests = [request for request, _, _ in chunks]
        return make_batch(
            positions=np.concatenate([np.arange(first, last, dtype=np.int32) for _, first, last in chunks]),
            query_start=np.cumsum([0, *(last - first for _, first, last in chunks)], dtype=np.int32),
            context_len=np.array([last for _, _, last in chunks], np.int32),
            page_table=self.page_table[requests],
            shared=self._runs(chunks) if grouped else (),
            page_size=self.page_size,
            num_pages=self.num_pages,
        )

    def _runs(self, chunks: list[tuple[int, int, int]]) -> list[SharedRun]:
        """Those of `shared` that at least two of these chunks lie behind, by their place in the step."""
        readers = [
            [place for place, (request, row, _) in enumerate(chunks) if request in run.requests and row >= run.end]
            for run in self.shared
        ]
        return [
            SharedRun(np.array(places, np.int32), run.start, run.end)
            for places, run in zip(readers, self.shared, strict=True)
            if len(places) > 1
        ]

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
        self,
        kernels: Kernels,
        kv: KvPages,
        chunks: list[tuple[int, int, int]],
        *,
        store: bool = True,
        grouped: bool = False,
        window: int = 0,
        soft_cap: float = 0.0,
    ) -> Tensor:
        """Attention of these rows in layer 1, over what is in the pages; [rows, query * dim]. `store` writes theirs first."""
        batch = kernels.prepare(self.batch(chunks, grouped=grouped), kv)
        qkv = self.rows(chunks, kernels.activation_dtype)
        rotated_into = kv if store else self.allocate(kernels, kv.keys.dtype)
        kernels.rotate_and_store(qkv, self.rope, batch, rotated_into, 1)
        out = torch.full((len(qkv), self.heads.query * self.heads.dim), math.nan, dtype=qkv.dtype)
        scale = self.heads.dim**-0.5
        kernels.attention(qkv, batch, kv, 1, scale, out=out, window=window, soft_cap=soft_cap)
        return out

    def everything(self) -> list[tuple[int, int, int]]:
        return [(request, 0, context) for request, context in enumerate(self.contexts)]
