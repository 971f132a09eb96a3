"""What one step of the engine takes on this machine, by what is in it. Plans are made by hand: there is no scheduler, no queue and no text.

decode    `batch` requests generate a token each, with `context` tokens in the cache
prefill   one request reads a chunk of `tokens`, behind `context` that are cached
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from trunkline.errors import ConfigError
from trunkline.sampling import SamplingParams
from trunkline.step import CopyKind, LogitsRow, PageCopy, Plan, Worker

GREEDY = SamplingParams(temperature=0)
WARM_UPS = 2
FIRST_TOKEN = 10  # ids that every vocabulary has, and that end no text


class StepTime(NamedTuple):
    """A kind of step and how long it takes.

    seconds   the median; None: it does not fit into the KV cache
    fastest   of all that were timed
    """

    batch: int
    tokens: int
    context: int
    seconds: float | None
    fastest: float | None


class Stepper:
    """Makes plans for a worker and times them."""

    def __init__(self, worker: Worker, *, max_model_len: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self.worker = worker
        self.max_model_len = max_model_len
        self._clock = clock
        self._step = 0
        self._num_filled = 0  # pages that hold real keys and values

    def check(self, context: int) -> None:
        """Raises ConfigError if a request of so many tokens is longer than the model allows."""
        if context > self.max_model_len:
            raise ConfigError(f"A context of {context:,} tokens is more than the model's {self.max_model_len:,}.")

    def time(self, *, batch: int, tokens: int, context: int, repeat: int) -> StepTime:
        """A step in which each of `batch` requests computes `tokens`, the last of them at position `context` - 1.

        Raises ConfigError if a request is longer than the model allows.
        """
        self.check(context)
        pages_each = -(-context // self.worker.page_size)
        if batch * pages_each > self.worker.num_pages:
            return StepTime(batch, tokens, context, None, None)
        self._fill(batch * pages_each)
        times = []
        for number in range(WARM_UPS + repeat):
            plan = self.plan(batch=batch, tokens=tokens, context=context)
            started = self._clock()
            self.worker.wait(self.worker.submit(plan))
            if number >= WARM_UPS:
                times.append(self._clock() - started)
        return StepTime(batch, tokens, context, statistics.median(times), min(times))

    def plan(self, *, batch: int, tokens: int, context: int) -> Plan:
        """Every request has pages of its own."""
        self._step += 1
        pages_each = -(-context // self.worker.page_size)
        return Plan(
            step=self._step,
            token_ids=FIRST_TOKEN + np.arange(batch * tokens, dtype=np.int32) % 64,
            positions=np.tile(np.arange(context - tokens, context, dtype=np.int32), batch),
            query_start=np.arange(batch + 1, dtype=np.int32) * tokens,
            context_len=np.full(batch, context, np.int32),
            page_table=np.arange(batch * pages_each, dtype=np.int32).reshape(batch, pages_each),
            rows=tuple(
                LogitsRow(request=request, at=(request + 1) * tokens - 1, position=context, sampling=GREEDY)
                for request in range(batch)
            ),
        )

    def _fill(self, num_pages: int) -> None:
        """Put real keys and values into the first pages: those of one, copied."""
        size = self.worker.page_size
        if not self._num_filled:
            self.worker.wait(self.worker.submit(self.plan(batch=1, tokens=size, context=size)))
            self._num_filled = 1
        if num_pages > self._num_filled:
            self._step += 1
            targets = np.arange(self._num_filled, num_pages, dtype=np.int32)
            nothing = np.empty(0, np.int32)
            plan = Plan(
                step=self._step,
                token_ids=nothing,
                positions=nothing,
                query_start=np.zeros(1, np.int32),
                context_len=nothing,
                page_table=np.empty((0, 0), np.int32),
                rows=(),
                copies=(PageCopy(CopyKind.FORK, np.zeros_like(targets), targets),),
            )
            self.worker.wait(self.worker.submit(plan))
            self._num_filled = num_pages


def measure(
    stepper: Stepper, *, batches: Sequence[int], contexts: Sequence[int], chunks: Sequence[int], repeat: int
) -> tuple[list[StepTime], list[StepTime]]:
    """Decode steps for every batch and context, and prefill steps for every chunk and context that has room for it.

    Raises ConfigError at once for a context that is longer than the model allows.
    """
    for context in contexts:
        stepper.check(context)
    decode = [
        stepper.time(batch=batch, tokens=1, context=context, repeat=repeat) for batch in batches for context in contexts
    ]
    prefill = [
        stepper.time(batch=1, tokens=chunk, context=max(chunk, context), repeat=repeat)
        for chunk in chunks
        for context in dict.fromkeys(max(chunk, context) for context in (0, *contexts))
        if context <= stepper.max_model_len
    ]
    return decode, prefill
