"""One model on one device: its weights, its KV pages, and the forward pass of a step.

    runner = load_runner(checkpoint, "auto", threads=2)
    runner.allocate(num_pages, page_size)
    logits = runner.forward(plan, plan.token_ids)        # float32 [L, V], one row for each of plan.rows

It does not sample, and knows of a request only its rows and pages.
"""

import numpy as np
import torch
from torch import Tensor

from trunkline.kernels.collectives import ALONE, Collectives
from trunkline.kernels.interface import Kernels, KvPages, make_batch
from trunkline.kernels.select import cpu_kernels
from trunkline.models.checkpoint import Checkpoint, OnProgress
from trunkline.models.config import ModelConfig
from trunkline.models.layers import Loader
from trunkline.models.registry import Model, make_model
from trunkline.models.split import Split
from trunkline.step import CopyKind, Float64, Int32, PageCopy, Plan, UInt8
from trunkline.workers.pooling import pooled_sums
from trunkline.workers.weight_format import WeightFormat, choose_format


def load_runner(
    checkpoint: Checkpoint,
    dtype: str = "auto",
    threads: int | None = None,
    on_progress: OnProgress | None = None,
    ranks: Collectives = ALONE,
    *,
    quantization: str = "auto",
    kv_dtype: torch.dtype | None = None,
) -> "ModelRunner":
    """Read the weights of `checkpoint` into the fastest kernels there are for this CPU.

    dtype, quantization  how weights are stored, see weight_format.py; arithmetic is float32
    threads   None: all the cores this process may use
    ranks     who holds the model: only this rank's part of each tensor is read
    kv_dtype  how keys and values are stored: float32, float16 or float8_e4m3fn; None: as the weights, but float16 beside bfloat16

    Raises ModelError if the checkpoint's tensors do not fit.
    """
    kernels = cpu_kernels(threads, head_dim=checkpoint.config.head_dim, kv_dtype=kv_dtype)
    form = choose_format(checkpoint, kernels, dtype=dtype, quantization=quantization)
    tensors = form.tensors(checkpoint, on_progress, Split(ranks.rank, ranks.size))
    loader = Loader(tensors, kernels, form.dtype, ranks)
    model = make_model(checkpoint.config, loader)
    return ModelRunner(model, kernels, form)


class ModelRunner:
    """A loaded model and its pages.

    config    of the model
    dtype     how weights are stored, for people, e.g. "float16"
    device    for people, e.g. "cpu (2 threads, compiled kernels for avx2)"
    model     that it runs, on
    kernels   these
    numerics  of the kernels, see kernels.interface, and how weights, keys and values are stored
    """

    def __init__(self, model: Model, kernels: Kernels, form: WeightFormat) -> None:
        self.config: ModelConfig = model.config
        self.dtype = form.name
        self.device = f"cpu ({kernels.description})"
        self.numerics = f"{kernels.numerics} weights-{form.quantization}-{form.dtype} kv-{kernels.kv_dtype(form.dtype)}"
        self.model = model
        self.kernels = kernels
        self._dtype = form.dtype
        self._kv: KvPages | None = None

    def page_bytes(self, page_size: int) -> int:
        """Bytes of one page: the keys and values of `page_size` tokens in all layers."""
        config = self.config
        numbers = 2 * config.num_layers * config.num_kv_heads * config.head_dim * page_size
        return numbers * self.kernels.kv_dtype(self._dtype).itemsize

    def allocate(self, num_pages: int, page_size: int) -> None:
        """Make the KV storage. Memory is taken from the system as pages are first written.

        Raises ConfigError for a page size that the kernels can't do.
        """
        config = self.config
        self._kv = self.kernels.allocate_kv(
            num_layers=config.num_layers,
            num_pages=num_pages,
            page_size=page_size,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=self._dtype,
        )

    def copy_pages(self, copy: PageCopy, host_pages: UInt8) -> None:
        """Copy whole pages, in the order given. A slot holds the keys of a page, layer by layer, and then its values.

        host_pages  uint8 [slots, page_bytes]

        Raises ValueError, before anything is copied, for a page or a slot that there isn't.
        """
        assert self._kv is not None, "allocate() comes first"
        check_copy(copy, num_pages=self._kv.num_pages, num_slots=len(host_pages))
        slots, begin = torch.from_numpy(host_pages), 0
        for pool in (self._kv.keys, self._kv.values):
            pages = pool.flatten(2).view(torch.uint8)  # [layers, pages, bytes]
            end = begin + pages.shape[0] * pages.shape[2]
            parts = slots[:, begin:end].unflatten(1, (pages.shape[0], -1))  # [slots, layers, bytes]
            begin = end
            for source, target in zip(copy.source.tolist(), copy.target.tolist(), strict=True):
                match copy.kind:
                    case CopyKind.STORE:
                        parts[target].copy_(pages[:, source])
                    case CopyKind.LOAD:
                        pages[:, target].copy_(parts[source])
                    case CopyKind.FORK:
                        pages[:, target].copy_(pages[:, source])

    def forward(self, plan: Plan, token_ids: Int32) -> Tensor:
        """Logits float32 [L, V] of plan.rows; the keys and values of all T rows are in their pages afterwards.

        token_ids   int32 [T], each 0 … V-1: the plan's own, with those still unknown to the plan filled in

        Raises ValueError for a plan that leads outside the pages or the vocabulary.
        """
        assert self._kv is not None, "allocate() comes first"
        if token_ids.min() < 0 or token_ids.max() >= self.config.vocab_size:
            raise ValueError(
                f"Token ids reach from {token_ids.min()} to {token_ids.max()}; the vocabulary is {self.config.vocab_size}."
            )
        batch = make_batch(
            positions=plan.positions,
            query_start=plan.query_start,
            context_len=plan.context_len,
            page_table=plan.page_table,
            shared=plan.shared,
            page_size=self._kv.page_size,
            num_pages=self._kv.num_pages,
        )
        device = self.kernels.device
        ids = torch.from_numpy(np.array(token_ids, np.int32)).to(device)
        at = [row.at for row in plan.rows]
        wanted = None if at == list(range(len(ids))) else torch.tensor(at, dtype=torch.int64).to(device)
        self.model.grow_rope(int(plan.context_len.max()))
        return self.model.forward(ids, self.kernels.prepare(batch, self._kv), self._kv, wanted)

    def pool(self, plan: Plan) -> Float64:
        """The sums float64 [K, H] of plan.pooled; `forward` has just computed the step."""
        return pooled_sums(self.model.last_hidden(plan.num_tokens), plan.pooled).cpu().numpy()


def check_copy(copy: PageCopy, *, num_pages: int, num_slots: int) -> None:
    """Raises ValueError if `copy` names a page or a slot that there isn't."""
    limits = {
        CopyKind.STORE: (num_pages, num_slots),
        CopyKind.LOAD: (num_slots, num_pages),
        CopyKind.FORK: (num_pages, num_pages),
    }
    for name, ids, limit in zip(("source", "target"), (copy.source, copy.target), limits[copy.kind], strict=True):
        if len(ids) != len(copy.source) or (len(ids) and not 0 <= ids.min() <= ids.max() < limit):
            raise ValueError(
                f"A copy of kind '{copy.kind.value}' names {len(ids)} as {name}: {ids}; allowed are {len(copy.source)}"
                f" from 0 to {limit - 1}."
            )
