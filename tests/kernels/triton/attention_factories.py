"""Requests over scattered pages that share what they begin with, for the tests of attention.

What a step must not read is NaN: pages of others, tokens not yet written, tokens that every window has left behind, K and V
beside the queries, and the workspace and the output before they are written.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from tests.kernels.factories import random
from trunkline.kernels.interface import Batch, KvPages, make_batch
from trunkline.kernels.reference import ReferenceKernels
from trunkline.kernels.triton.attention import Capacity, Workspace, attention, plan_attention
from trunkline.step import SharedRun

ORACLE = ReferenceKernels(torch.float64)
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 2e-2}
ARCH = 90
LAYER = 1  # of two
Chunk = tuple[int, int, int]  # request, first row, row behind the last


class Requests:
    """Requests that are made of segments.

    segments  per request [(name, tokens), …]: of one name are the same tokens in the same pages, if the segment begins at
              the same position; all but a request's last one fill whole pages
    """

    def __init__(
        self,
        segments: Sequence[Sequence[tuple[str, int]]],
        *,
        query: int = 4,
        kv: int = 2,
        dim: int = 64,
        page_size: int = 16,
        dtype: torch.dtype = torch.float32,
        kv_dtype: torch.dtype | None = None,
        seed: int = 0,
    ) -> None:
        self.query, self.kv, self.dim, self.page_size = query, kv, dim, page_size
        self.dtype, self.kv_dtype = dtype, kv_dtype or dtype
        lengths = {name: length for request in segments for name, length in request}
        self.num_pages = 2 + sum(-(-length // page_size) for length in lengths.values())
        order = iter((np.random.default_rng(seed).permutation(self.num_pages - 1) + 1).tolist())  # page 0 is nobody's
        pages = {name: [next(order) for _ in range(-(-length // page_size))] for name, length in lengths.items()}
        tokens = {
            name: random(2, length, kv, dim, seed=seed + index).to(self.kv_dtype)
            for index, (name, length) in enumerate(lengths.items())
        }
        self.contexts = [sum(length for _, length in request) for request in segments]
        self.tokens = [torch.cat([tokens[name] for name, _ in request], dim=1) for request in segments]
        self.page_table = np.zeros(
            (len(segments), max(-(-context // page_size) for context in self.contexts)), np.int32
        )
        for request, names in enumerate(segments):
            own = [page for name, _ in names for page in pages[name]]
            self.page_table[request, : len(own)] = own
        self.queries = [
            random(context, query * dim, seed=seed + 100 + request).to(dtype)
            for request, context in enumerate(self.contexts)
        ]

    def batch(self, chunks: Sequence[Chunk], shared: Sequence[SharedRun] = ()) -> Batch:
        """Row r of `chunks` is request r of the batch."""
        requests = [request for request, _, _ in chunks]
        return make_batch(
            positions=np.concatenate([np.arange(first, last, dtype=np.int32) for _, first, last in chunks]),
            query_start=np.cumsum([0, *(last - first for _, first, last in chunks)], dtype=np.int32),
            context_len=np.array([last for _, _, last in chunks], np.int32),
            page_table=self.page_table[requests],
            shared=shared,
            page_size=self.page_size,
            num_pages=self.num_pages,
        )

    def pages(self, chunks: Sequence[Chunk], window: int = 0) -> KvPages:
        """[layer, page, kv head, page_size, head size], with what these rows see."""
        shape = (2, self.num_pages, self.kv, self.page_size, self.dim)
        keys, values = (torch.full(shape, math.nan).to(self.kv_dtype) for _ in range(2))
        for request, first, last in chunks:
            seen = torch.arange(max(0, first - window + 1) if window else 0, last)
            page = torch.from_numpy(self.page_table[request]).long()[seen // self.page_size]
            for pool, tokens in zip((keys, values), self.tokens[request], strict=True):
                pool[LAYER].view(self._bits)[page, :, seen % self.page_size] = tokens[seen].view(self._bits)
        return KvPages(keys, values, self.num_pages, self.page_size, self.kv, self.dim)

    @property
    def _bits(self) -> torch.dtype:
        """To move numbers of types that torch cannot index."""
        return torch.uint8 if self.kv_dtype.itemsize == 1 else self.kv_dtype

    def attend(
        self,
        chunks: Sequence[Chunk],
        shared: Sequence[SharedRun] = (),
        *,
        window: int = 0,
        planned_window: int | None = None,
        soft_cap: float = 0.0,
        capacity: Capacity | None = None,
        scales: tuple[float, float] = (1.0, 1.0),
        kv: KvPages | None = None,
    ) -> Tensor:
        """[rows, query * dim]"""
        kv = kv or self.pages(chunks, window)
        batch = self.batch(chunks, shared)
        planned = window if planned_window is None else planned_window
        work = plan_attention(batch, kv, self.query, ARCH, capacity, window=planned)
        queries = self.rows(chunks)
        qkv = torch.cat([queries, queries.new_full((len(queries), 2 * self.kv * self.dim), math.nan)], dim=1)
        workspace = Workspace(work.num_parts, self.query, self.dim, "cpu")
        workspace.parts.fill_(math.nan)
        workspace.logarithms.fill_(math.nan)
        out = torch.full_like(queries, math.nan)
        attention(
            qkv,
            replace(batch, work=work),
            kv,
            LAYER,
            self.dim**-0.5,
            out=out,
            workspace=workspace,
            window=window,
            soft_cap=soft_cap,
            key_scale=scales[0],
            value_scale=scales[1],
        )
        return out

    def rows(self, chunks: Sequence[Chunk]) -> Tensor:
        return torch.cat([self.queries[request][first:last] for request, first, last in chunks])

    def oracle(
        self,
        chunks: Sequence[Chunk],
        *,
        window: int = 0,
        soft_cap: float = 0.0,
        scales: tuple[float, float] = (1.0, 1.0),
    ) -> Tensor:
        """The same by the reference kernels, float64 [rows, query * dim]."""
        kv = self.pages(chunks)
        keys, values = (
            scale * pool.double().transpose(2, 3) for scale, pool in zip(scales, (kv.keys, kv.values), strict=True)
        )
        queries = self.rows(chunks).double()
        qkv = torch.cat([queries, queries.new_zeros(len(queries), 2 * self.kv * self.dim)], dim=1)
        out = torch.empty_like(queries)
        ORACLE.attention(
            qkv,
            self.batch(chunks),
            replace(kv, keys=keys, values=values),
            LAYER,
            self.dim**-0.5,
            out=out,
            window=window,
            soft_cap=soft_cap,
        )
        return out

    def last_rows(self, count: int = 1) -> list[Chunk]:
        return [(request, max(context - count, 0), context) for request, context in enumerate(self.contexts)]


def shared_run(requests: Sequence[int], start: int, end: int) -> SharedRun:
    return SharedRun(np.array(requests, np.int32), start, end)
