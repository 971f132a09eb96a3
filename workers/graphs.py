"""CUDA graphs of steps in which every request decodes one token, by the number of requests.

    graphs = DecodeGraphs(device, max_num_seqs=256, work_of=…)
    graphs.capture_common(on_progress)
    size = graphs.size_for(37)            # 48 or 64: the step is padded to as many; None: no graph will do
    graphs.replay(size)

A graph is a fixed list of launches with fixed arguments: whatever differs between two steps must stand in memory that is
written before. Launching a graph costs the host one call where a forward pass costs hundreds. Steps that read prompts or
verify drafts come in too many shapes: they run without.
"""

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from trunkline.kernels.interface import Batch
from trunkline.step import Plan
from trunkline.workers.device import Device, Graph

logger = logging.getLogger("trunkline.worker")

LAZY_AFTER = 64  # steps of a rare size before it gets a graph of its own: capturing holds up the steps in flight
NO_SLOT = -1  # of a padded row: its keys and values go nowhere


def common_sizes(max_num_seqs: int) -> list[int]:
    """Ascending: powers of two, and the largest step. They are captured at the start."""
    return [*(1 << power for power in range(20) if 1 << power < max_num_seqs), max_num_seqs]


def rare_sizes(max_num_seqs: int) -> list[int]:
    """Ascending: between the powers of two, from 24 on. They are captured when they turn out to be needed."""
    return [3 << power for power in range(3, 20) if 3 << power < max_num_seqs]


def is_decode(plan: Plan) -> bool:
    """Whether each request has one token in the step, and wants the logits of it, and nothing else."""
    num = plan.num_requests
    return (
        plan.num_tokens == num == len(plan.rows)
        and not plan.pooled
        and bool((np.diff(plan.query_start) == 1).all())
        and all(row.at == index for index, row in enumerate(plan.rows))
    )


def pad(ids: Tensor, batch: Batch, size: int) -> tuple[Tensor, Batch]:
    """The step with rows added up to `size`, on the host: rows of token 0 that are written nowhere and read nothing.

    batch   of a step with one token row per request; it has its work already, which does not grow

    Each row that is added comes with a request that has no rows and no context; its page table names page 0.
    """
    more = size - len(ids)

    def longer(tensor: Tensor, value: int) -> Tensor:
        return torch.cat([tensor, tensor.new_full((more, *tensor.shape[1:]), value)])

    return longer(ids, 0), replace(
        batch,
        positions=longer(batch.positions, 0),
        slots=longer(batch.slots, NO_SLOT),
        query_start=longer(batch.query_start, int(batch.query_start[-1])),
        context_len=longer(batch.context_len, 0),
        page_table=longer(batch.page_table, 0),
        readers=torch.cat([batch.readers, batch.readers.new_zeros(len(batch.readers), more)], dim=1),
    )


class DecodeGraphs:
    """The graphs, each made once.

    common          sizes that are captured at the start, ascending
    work_of(size)   the launches of a step of `size` requests, over memory that stays where it is. It is called before
                    the graph of that size is captured, and what it returns is run once, too: kernels may be compiled
                    on the way
    """

    def __init__(self, device: Device, max_num_seqs: int, work_of: Callable[[int], Callable[[], None]]) -> None:
        self._device = device
        self._work_of = work_of
        self.common = common_sizes(max_num_seqs)
        self._sizes = sorted({*self.common, *rare_sizes(max_num_seqs)})
        self._pool = device.new_graph_pool()
        self._graphs: dict[int, Graph] = {}
        self._wanted: Counter[int] = Counter()

    def __len__(self) -> int:
        """Graphs there are."""
        return len(self._graphs)

    def capture_common(self, on_progress: Callable[[int, int], None] | None = None) -> None:
        """Capture the common sizes, the largest first: the smaller ones fit in its memory."""
        for done, size in enumerate(reversed(self.common), start=1):
            self.capture(size)
            if on_progress is not None:
                on_progress(done, len(self.common))

    def capture(self, size: int) -> None:
        """Capture the graph of this size. Waits until the device has nothing to do."""
        work = self._work_of(size)
        self._device.launch(work)
        self._device.synchronize()
        self._graphs[size] = self._device.capture(work, self._pool)

    def size_for(self, num_requests: int) -> int | None:
        """The size of the graph that is to run a step of so many requests; None: there is none.

        A rare size that is wanted again and again is captured on the way. If there is no memory for it, it is left alone.
        """
        best = next((size for size in self._sizes if size >= num_requests), None)
        if best is not None and best not in self._graphs:
            self._wanted[best] += 1
            if self._wanted[best] >= LAZY_AFTER:
                logger.info("Capturing a CUDA graph for steps of up to %d requests.", best)
                try:
                    self.capture(best)
                except torch.OutOfMemoryError as error:
                    logger.warning("There is no memory for that graph: %s", error)
                    self._sizes.remove(best)
        return min((size for size in self._graphs if size >= num_requests), default=None)

    def replay(self, size: int) -> None:
        """Launch that graph; within Device.launch."""
        self._graphs[size].replay()

    def close(self) -> None:
        """Drop the graphs, and with them their memory. Those of several ranks go before the ranks' connection."""
        self._graphs.clear()
