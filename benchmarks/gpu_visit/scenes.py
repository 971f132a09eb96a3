"""Random requests over scattered pages, on the device, for the parts about attention. What must not be read is NaN."""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from trunkline.kernels.interface import Batch, KvPages, make_batch
from trunkline.kernels.reference import ReferenceKernels
from trunkline.kernels.triton.attention import Work, Workspace, attention, plan_attention
from trunkline.kernels.triton.tiles import arch_of
from trunkline.step import SPLIT, SharedRun

SPARE_PAGES = 2  # that belong to nobody


class Heads(NamedTuple):
    query: int
    kv: int
    dim: int


LLAMA_8B = Heads(32, 8, 128)
TINY = Heads(4, 2, 64)


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """Requests. Those of one document begin with the same `prefix` tokens, in the same pages.

    contexts   tokens in the cache, this step's included
    new        this step's rows of each
    documents  the number of its document, per request
    prefix     tokens that a document has, a multiple of SPLIT; 0: nothing is shared
    """

    contexts: tuple[int, ...]
    new: tuple[int, ...]
    documents: tuple[int, ...] = ()
    prefix: int = 0


class Scene:
    """The requests' pages, queries, and a place for the result.

    kv   [layers, pages, kv_heads, page_size, head_dim]
    qkv  [T, (Q + 2 KV) D]; k and v are NaN, for they are not read from here
    """

    def __init__(
        self,
        asked: Asked,
        heads: Heads,
        dtype: torch.dtype,
        device: torch.device,
        *,
        layers: int = 1,
        page_size: int = 16,
        seed: int = 0,
    ) -> None:
        self.asked, self.heads, self.device, self.page_size = asked, heads, device, page_size
        rng = np.random.default_rng(seed)
        shared_pages = asked.prefix // page_size
        own_pages = [math.ceil(context / page_size) - shared_pages for context in asked.contexts]
        num_documents = max(asked.documents, default=-1) + 1
        self.num_pages = num_documents * shared_pages + sum(own_pages) + SPARE_PAGES
        order = rng.permutation(self.num_pages)
        prefixes = order[: num_documents * shared_pages].reshape(num_documents, shared_pages)
        self.page_table = np.zeros((len(asked.contexts), shared_pages + max(own_pages)), np.int32)
        begin = prefixes.size
        for request, count in enumerate(own_pages):
            own = order[begin : begin + count]
            if shared_pages:
                self.page_table[request, :shared_pages] = prefixes[asked.documents[request]]
            self.page_table[request, shared_pages : shared_pages + count] = own
            begin += count
        generator = torch.Generator(device).manual_seed(seed)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=dtype, device=device)

        shape = (layers, self.num_pages, heads.kv, page_size, heads.dim)
        keys, values = random(*shape), random(*shape)
        for pool in (keys, values):
            pool[:, torch.from_numpy(order[begin:]).to(device)] = math.nan
            for request, context in enumerate(asked.contexts):
                if context % page_size:
                    pool[:, int(self.page_table[request, context // page_size]), :, context % page_size :] = math.nan
        self.kv = KvPages(keys, values, self.num_pages, page_size, heads.kv, heads.dim)
        rows = sum(asked.new)
        self.qkv = random(rows, (heads.query + 2 * heads.kv) * heads.dim)
        self.qkv[:, heads.query * heads.dim :] = math.nan
        self.out = torch.empty(rows, heads.query * heads.dim, dtype=dtype, device=device)

    def batch(self, *, shared: bool) -> Batch:
        """On the host."""
        asked = self.asked
        positions = [np.arange(c - n, c, dtype=np.int32) for c, n in zip(asked.contexts, asked.new, strict=True)]
        runs = []
        if shared and asked.prefix:
            assert asked.prefix % SPLIT == 0, asked.prefix
            documents = np.array(asked.documents)
            members = (np.flatnonzero(documents == document).astype(np.int32) for document in set(asked.documents))
            runs = [SharedRun(requests, 0, asked.prefix) for requests in members if len(requests) > 1]
        return make_batch(
            positions=np.concatenate(positions),
            query_start=np.cumsum([0, *asked.new], dtype=np.int32),
            context_len=np.array(asked.contexts, np.int32),
            page_table=self.page_table,
            shared=runs,
            page_size=self.page_size,
            num_pages=self.num_pages,
        )

    def plan(self, *, shared: bool) -> Work:
        """On the host."""
        arch = arch_of(self.device)
        return plan_attention(self.batch(shared=shared), self.kv, self.heads.query, arch)

    def launch(self, work: Work, *, window: int = 0, soft_cap: float = 0.0) -> "Launch":
        batch = self.batch(shared=False)
        on_device = replace(
            batch,
            positions=batch.positions.to(self.device),
            page_table=batch.page_table.to(self.device),
            work=work.to(self.device),
        )
        workspace = Workspace(work.num_parts, self.heads.query, self.heads.dim, self.device)
        return Launch(self, on_device, workspace, window, soft_cap)

    def oracle(self, layer: int, *, window: int = 0, soft_cap: float = 0.0) -> Tensor:
        """The reference in float64, on the host."""
        keys, values = (pool.cpu().double().transpose(2, 3) for pool in (self.kv.keys, self.kv.values))
        kv = replace(self.kv, keys=keys, values=values)
        out = torch.full(self.out.shape, math.nan, dtype=torch.float64)
        scale = self.heads.dim**-0.5
        ReferenceKernels(torch.float64).attention(
            self.qkv.cpu().double(),
            self.batch(shared=False),
            kv,
            layer,
            scale,
            out=out,
            window=window,
            soft_cap=soft_cap,
        )
        return out

    @property
    def kv_bytes(self) -> int:
        """Of a token's keys and values in one layer."""
        return 2 * self.heads.kv * self.heads.dim * self.kv.keys.dtype.itemsize

    @property
    def flops(self) -> int:
        """Of two products for each pair of a row and a token that it sees, in one layer."""
        pairs = sum(n * (c - n) + n * (n + 1) // 2 for c, n in zip(self.asked.contexts, self.asked.new, strict=True))
        return 4 * self.heads.query * self.heads.dim * pairs


class Launch:
    """Attention of a scene, ready to be called with the number of a layer."""

    def __init__(self, scene: Scene, batch: Batch, workspace: Workspace, window: int, soft_cap: float) -> None:
        self._scene, self._batch, self.workspace = scene, batch, workspace
        self._window, self._soft_cap = window, soft_cap

    def __call__(self, layer: int) -> None:
        scene = self._scene
        attention(
            scene.qkv,
            self._batch,
            scene.kv,
            layer % len(scene.kv.keys),
            scene.heads.dim**-0.5,
            out=scene.out,
            workspace=self.workspace,
            window=self._window,
            soft_cap=self._soft_cap,
        )
