"""One model on one GPU: its weights, its KV pages, and the launches of a step.

    runner = GpuRunner(model, kernels, torch.bfloat16, device, room=Room(…))
    runner.allocate(num_pages, page_size)
    runner.capture()                            # CUDA graphs; without it all steps run eagerly
    batch = runner.check(plan, num_chosen)      # raises for a plan that leads outside
    forward = runner.prepare(plan, batch)       # packs and uploads what the step reads
    device.launch(…forward()…)                  # logits float32 [L, V]

A token that the step before chooses is named `-1 - row` and looked up in `chosen`, on the device: the host does not know
it yet. Nothing here waits for a step in flight, but for packing into memory that the step before last was copied from.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from trunkline.kernels.interface import Batch, Kernels, KvPages, make_batch
from trunkline.kernels.triton import pages
from trunkline.models.config import ModelConfig
from trunkline.models.registry import Model
from trunkline.step import CopyKind, Int32, PageCopy, Plan
from trunkline.workers.device import Device
from trunkline.workers.graphs import NO_SLOT, DecodeGraphs, is_decode, pad
from trunkline.workers.pooling import pooled_sums
from trunkline.workers.runner import check_copy
from trunkline.workers.step_inputs import StepInputs, shapes

FIRST_CAPACITY = 2**16  # numbers, of what an eager step reads; it grows
STAGING_BYTES = 2**26  # of device memory, between pages and host slots


class GpuKernels(Kernels, Protocol):
    """What the runner asks of kernels beyond their interface."""

    def plan(self, batch: Batch, kv: KvPages, *, num_requests: int) -> Batch:
        """The batch, on the host, with its work, on the host, too.

        num_requests  the work's tensors and numbers are the same for all batches of so many requests with one row each:
                      what they are filled with may differ
        """


class Room(NamedTuple):
    """The largest step.

    requests       in a step
    rows           token rows in a step
    max_model_len  tokens of a request
    """

    requests: int
    rows: int
    max_model_len: int

    @property
    def logits_rows(self) -> int:
        """Rows of logits in a step: of each token row, and as many again as requests may fork (scheduler/planner.py)."""
        return self.rows + self.requests


class _Padded(NamedTuple):
    """A step of a graph's size on the device: its tensors, their shapes, and the page table beside them."""

    ids: Tensor
    batch: Batch
    shapes: list[torch.Size]
    page_table: Tensor


class GpuRunner:
    """A loaded model and its pages.

    config    of the model
    dtype     how weights are stored, e.g. "bfloat16"
    device    for people, e.g. "cuda (NVIDIA H200, Triton kernels)"
    numerics  of the kernels, see kernels.interface
    is_fixed  False: its steps cannot be captured
    chosen    int32 [logits_rows], on the device: the token that each logits row of the newest step chose; negative: none
    """

    def __init__(self, model: Model, kernels: GpuKernels, dtype: torch.dtype, device: Device, room: Room) -> None:
        self.config: ModelConfig = model.config
        self.is_fixed = model.is_fixed
        self.dtype = str(dtype).removeprefix("torch.")
        self.device = f"cuda ({device.name}, {kernels.description})"
        self.numerics = f"{kernels.numerics} kv-{kernels.kv_dtype(dtype)}"
        self._model = model
        self._kernels = kernels
        self._dtype = dtype
        self._device = device
        self._room = room
        self._kv: KvPages | None = None
        self._graphs: DecodeGraphs | None = None
        self._captured: dict[int, _Padded] = {}  # what each graph reads
        torch_device = device.torch_device
        self.chosen = torch.full((room.logits_rows,), -1, dtype=torch.int32, device=torch_device)
        self._eager_inputs = StepInputs(device, FIRST_CAPACITY)
        self._decode_inputs = StepInputs(device, 0)  # the first graph, which is the largest, makes room
        self._copy_inputs = StepInputs(device, FIRST_CAPACITY)
        model.grow_rope(room.max_model_len)
        model.grow_activations(room.rows)

    def page_bytes(self, page_size: int) -> int:
        """Bytes of one page: the keys and values of `page_size` tokens in all layers."""
        config = self.config
        numbers = 2 * config.num_layers * config.num_kv_heads * config.head_dim * page_size
        return numbers * self._kernels.kv_dtype(self._dtype).itemsize

    def allocate(self, num_pages: int, page_size: int) -> None:
        """Make the KV storage, in place of what there was. Graphs of that are dropped."""
        config, room = self.config, self._room
        if self._graphs is not None:
            self._graphs.close()
            self._graphs, self._captured = None, {}
        self._kv = None  # given back before the new one is taken
        self._device.trim()
        self._kv = self._kernels.allocate_kv(
            num_layers=config.num_layers,
            num_pages=num_pages,
            page_size=page_size,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=self._dtype,
        )
        self._kv.keys[:, 0].zero_()  # graphs are captured on a step that reads page 0
        self._kv.values[:, 0].zero_()
        self._table_width = -(-room.max_model_len // page_size)

    def close(self) -> None:
        """Give the memory back."""
        if self._graphs is not None:
            self._graphs.close()
        self._kv, self._captured = None, {}

    # ---------------------------------------------------------------- steps

    def check(self, plan: Plan, num_chosen: int) -> Batch:
        """The plan's batch, on the host.

        num_chosen  rows of logits of the step before, which tokens may be named by

        Raises ValueError for a plan that leads outside the pages, the vocabulary, or what there is room for.
        """
        assert self._kv is not None, "allocate() comes first"
        lowest, highest = int(plan.token_ids.min()), int(plan.token_ids.max())
        if lowest < -num_chosen or highest >= self.config.vocab_size:
            raise ValueError(
                f"Token ids reach from {lowest} to {highest}; the vocabulary is {self.config.vocab_size}, and the step"
                f" before had {num_chosen} rows of logits."
            )
        if plan.num_tokens > self._room.rows or plan.context_len.max() > self._room.max_model_len:
            raise ValueError(
                f"Step {plan.step} has {plan.num_tokens} tokens and contexts up to {plan.context_len.max()}; there is room"
                f" for {self._room.rows} and {self._room.max_model_len}."
            )
        if len(plan.rows) > self._room.logits_rows:
            raise ValueError(
                f"Step {plan.step} wants {len(plan.rows)} rows of logits; there is room for {self._room.logits_rows}."
            )
        return make_batch(
            positions=plan.positions,
            query_start=plan.query_start,
            context_len=plan.context_len,
            page_table=plan.page_table,
            shared=plan.shared,
            page_size=self._kv.page_size,
            num_pages=self._kv.num_pages,
        )

    def prepare(self, plan: Plan, batch: Batch) -> Callable[[], Tensor]:
        """Upload what the step reads. Returns its launches: call them within Device.launch, before the next `prepare`.

        batch  of `check`

        The logits they return are float32 [L, V], and last until the next step is launched.
        """
        ids = _int32(plan.token_ids)
        if self._graphs is not None and is_decode(plan):
            size = self._graphs.size_for(plan.num_requests)
            if size is not None:
                return self._prepare_graph(ids, batch, size)
        assert self._kv is not None
        wanted = torch.tensor([row.at for row in plan.rows], dtype=torch.int32)
        planned = self._kernels.plan(batch, self._kv, num_requests=0)
        ids, planned, wanted = self._eager_inputs.upload((ids, planned, wanted))
        return lambda: self._forward(ids, planned, wanted)

    def pool(self, plan: Plan) -> Tensor:
        """The sums float64 [K, H] of plan.pooled, on the device; called within Device.launch, after the launches of that step."""
        return pooled_sums(self._model.last_hidden(plan.num_tokens), plan.pooled)

    def _forward(self, ids: Tensor, batch: Batch, wanted: Tensor) -> Tensor:
        assert self._kv is not None
        return self._model.forward(self._fill_in(ids), batch, self._kv, wanted)

    def _fill_in(self, ids: Tensor) -> Tensor:
        """Tokens in place of the rows that choose them; 0 in place of a row that failed."""
        rows = (-1 - ids).clamp(min=0)
        return torch.where(ids < 0, self.chosen.index_select(0, rows).clamp(min=0), ids)

    # ---------------------------------------------------------------- graphs

    def capture(self, on_progress: Callable[[int, int], None] | None = None) -> None:
        """Capture the graphs of the common batch sizes."""
        self._make_graphs().capture_common(on_progress)

    def captures(self) -> list[Callable[[], None]]:
        """What `capture` does, graph by graph, the largest first; to be measured."""
        graphs = self._make_graphs()
        return [partial(graphs.capture, size) for size in reversed(graphs.common)]

    def _make_graphs(self) -> DecodeGraphs:
        assert self._kv is not None, "allocate() comes first"
        requests, torch_device = self._room.requests, self._device.torch_device
        self._tables = torch.zeros(requests, self._table_width, dtype=torch.int32, device=torch_device)
        self._logits = torch.empty(requests, self.config.vocab_size, device=torch_device)
        self._every_row = torch.arange(requests, dtype=torch.int32, device=torch_device)
        self._graphs, self._captured = DecodeGraphs(self._device, requests, self._graph_work), {}
        return self._graphs

    def _graph_work(self, size: int) -> Callable[[], None]:
        """The launches of a step of `size` requests."""
        zero = torch.zeros(1, dtype=torch.int32)
        one = Batch(  # request, which reads page 0 and writes nowhere; the others are padding
            positions=zero,
            slots=zero + NO_SLOT,
            query_start=torch.arange(2, dtype=torch.int32),
            context_len=zero + 1,
            page_table=zero.expand(1, self._table_width),
            readers=zero[:0].view(0, 1),
            runs=zero[:0].view(0, 2),
        )
        self._captured[size] = padded = self._upload(zero, one, size)
        batch = replace(padded.batch, page_table=self._tables[:size])
        wanted, logits = self._every_row[:size], self._logits[:size]

        def work() -> None:
            logits.copy_(self._forward(padded.ids, batch, wanted))

        return work

    def _prepare_graph(self, ids: Tensor, batch: Batch, size: int) -> Callable[[], Tensor]:
        graphs, num = self._graphs, len(ids)
        assert graphs is not None
        padded, captured = self._upload(ids, batch, size), self._captured[size]
        assert padded.shapes == captured.shapes, f"a graph of {captured.shapes} cannot run {padded.shapes}"
        assert padded.ids.data_ptr() == captured.ids.data_ptr(), "what a graph reads has moved"
        table = self._tables[:size, : padded.page_table.shape[1]]

        def work() -> Tensor:
            table.copy_(padded.page_table)
            graphs.replay(size)
            return self._logits[:num]

        return work

    def _upload(self, ids: Tensor, batch: Batch, size: int) -> _Padded:
        """The step, padded. Its page table comes last, for how wide it is differs from step to step."""
        assert self._kv is not None
        ids, padded = pad(ids, self._kernels.plan(batch, self._kv, num_requests=size), size)
        # What requests share, kernels know from the work.
        padded = replace(padded, readers=padded.readers[:0], runs=padded.runs[:0])
        table = padded.page_table.contiguous()
        (ids, on_device), table = self._decode_inputs.upload(
            ((ids, replace(padded, page_table=table.new_empty(size, 0))), table)
        )
        return _Padded(ids, on_device, shapes((ids, on_device)), table)

    # ---------------------------------------------------------------- pages

    def copy_pages(self, copy: PageCopy, host_pages: Tensor) -> None:
        """Enqueue a copy of whole pages, in the order given. A slot holds the keys of a page, layer by layer, and then
        its values.

        host_pages  uint8 [slots, page_bytes], pinned

        Raises ValueError, before anything is copied, for a page or a slot that there isn't.
        """
        kv = self._kv
        assert kv is not None, "allocate() comes first"
        check_copy(copy, num_pages=kv.num_pages, num_slots=len(host_pages))
        if copy.kind is CopyKind.FORK:
            source, target = self._copy_inputs.upload((_int32(copy.source), _int32(copy.target)))
            self._device.launch(lambda: pages.copy_pages(kv, source, target))
            return
        chunk = max(1, STAGING_BYTES // host_pages.shape[1])
        for first in range(0, len(copy.source), chunk):
            part = slice(first, first + chunk)
            if copy.kind is CopyKind.STORE:
                self._store(kv, copy.source[part], host_pages, copy.target[part])
            else:
                self._load(kv, host_pages, copy.source[part], copy.target[part])

    def _store(self, kv: KvPages, source: Int32, host_pages: Tensor, target: Int32) -> None:
        (ids,) = self._copy_inputs.upload((_int32(source),))
        staging = self._staging(len(source), host_pages)
        self._device.launch(lambda: pages.gather_pages(kv, ids, staging))
        for at, slots in _runs(target):
            self._device.copy(staging[at], host_pages[slots])

    def _load(self, kv: KvPages, host_pages: Tensor, source: Int32, target: Int32) -> None:
        (ids,) = self._copy_inputs.upload((_int32(target),))
        staging = self._staging(len(source), host_pages)
        for at, slots in _runs(source):
            self._device.copy(host_pages[slots], staging[at])
        self._device.launch(lambda: pages.scatter_pages(kv, staging, ids))

    def _staging(self, num_pages: int, host_pages: Tensor) -> Tensor:
        return torch.empty(num_pages, host_pages.shape[1], dtype=torch.uint8, device=self._device.torch_device)


def _int32(array: Int32) -> Tensor:
    return torch.from_numpy(np.array(array, np.int32))  # a plan's arrays may be read-only


def _runs(slots: Int32) -> Iterator[tuple[slice, slice]]:
    """Cut where the next slot is not the one behind: (places in `slots`, those slots), each to be copied at once."""
    ends = [*(np.flatnonzero(np.diff(slots) != 1) + 1).tolist(), len(slots)]
    first = 0
    for end in ends:
        if end > first:
            yield slice(first, end), slice(int(slots[first]), int(slots[first]) + end - first)
        first = end
