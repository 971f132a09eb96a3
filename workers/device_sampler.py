"""The sampler on a GPU: the tokens that workers/sampler.py would choose, chosen where the logits are; the host never waits.

    sampler = DeviceSampler(vocab_size, max_rows=256, device=device)
    prepared = sampler.prepare(plan.rows)                            # one copy to the device
    samples = sampler.sample(logits, prepared, masks, previous)      # enqueued; samples.token_ids is the next step's input
    host = sampler.to_host(samples)                                  # enqueued, too: one copy
    …                                                                # wait for an event behind it
    sampler.fetch(host)                                              # sampler.Samples

What is computed is written in kernels/triton: sampling.py, filters.py, logprobs.py, all exact as on the CPU up to the last bits of
float64: a token differs only where the two best scores, or a share of the weight and top_p, are equal to about 1e-12. Log-probabilities
differ by some 1e-6. There are no texts there: why a row failed is a number, which `fetch` turns into the CPU sampler's sentence.

Three steps have their own memory: what `prepare` gave, and all that was made of it, is overwritten by the third `prepare` after it.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trunkline.errors import GenerationFailed
from trunkline.kernels.triton import filters, interpreter, logprobs, sampling
from trunkline.kernels.triton import sampling_table as columns
from trunkline.kernels.triton.sampling_table import Counts, Kind, RowTable, Status, Workspace
from trunkline.sampling import SamplingParams
from trunkline.step import Int32, LogitsRow, RowLogprobs
from trunkline.workers import sampler

STEPS = 3
FIRST_WORDS = 1 << 14  # room for the ids of prompts, outputs and changes; it grows
ALIGNMENT = 16  # bytes: what kernels are compiled for


class Prepared(NamedTuple):
    """Rows that are packed and on their way to the device."""

    rows: Sequence[LogitsRow]
    counts: Counts
    table: RowTable
    refusals: dict[int, str]
    reported: tuple[tuple[int, bool], ...]  # row of each report, and whether it is of the fallback
    num_futures: int  # tokens of the step before that rows may name; 0: none does
    slot: int


class DeviceSamples(NamedTuple):
    """What was chosen, on the device, or copied to the host by `to_host`.

    prepared   the rows it belongs to
    words      int32 [any]: all that follows, one behind the other
    token_ids  int32 [L]; -1 where none was asked for, or the row failed
    status     int32 [L]: sampling_table.Status
    tops       float32 [L]: the largest logit, which some sentences name
    reports    int32 [R, logprobs.REPORT]: ranks, token ids and log-probabilities
    """

    prepared: Prepared
    words: Tensor
    token_ids: Tensor
    status: Tensor
    tops: Tensor
    reports: Tensor


class DeviceSampler:
    """Samples up to `max_rows` rows a step, from logits of `vocab_size` numbers on `device`.

    Memory on the device: some kilobytes a row, and 4 * vocab_size bytes for each row of a step that penalizes, biases or bans.
    """

    def __init__(self, vocab_size: int, max_rows: int, device: torch.device | str) -> None:
        if interpreter.is_on():
            interpreter.mend()
        assert 0 < vocab_size <= columns.MAX_VOCAB, f"a vocabulary of {vocab_size}, at most {columns.MAX_VOCAB}"
        self.vocab_size = vocab_size
        self.max_rows = max_rows
        self.device = torch.device(device)
        self._workspace = _make_workspace(vocab_size, max_rows, self.device)
        self._slots = [_Slot(max_rows, self.device) for _ in range(STEPS)]
        self._turn = 0

    def prepare(self, rows: Sequence[LogitsRow], *, num_previous: int = 0) -> Prepared:
        """Pack what the kernels need to know of rows, and start its copy to the device, on the current stream.

        num_previous  rows of logits of the step before; of these alone an output may name tokens still unknown
        """
        assert len(rows) <= self.max_rows, f"{len(rows)} rows, at most {self.max_rows}"
        slot = self._slots[self._turn]
        packer = _Packer(rows, self.vocab_size, num_previous)
        table = slot.fill(packer)
        if (shortage := len(packer.adjusts) - len(self._workspace.adjusted)) > 0:
            grown = min(self.max_rows, 2 * (len(self._workspace.adjusted) + shortage))
            adjusted = torch.empty(grown, self.vocab_size, device=self.device)
            self._workspace = self._workspace._replace(adjusted=adjusted)
        prepared = Prepared(
            rows, packer.counts, table, packer.refusals, tuple(packer.reported), packer.num_futures, self._turn
        )
        self._turn = (self._turn + 1) % STEPS
        return prepared

    def sample(
        self, logits: Tensor, prepared: Prepared, masks: Tensor | None = None, previous: Tensor | None = None
    ) -> DeviceSamples:
        """Enqueue the choice of a token for each row, and the reports it asks for; the host waits for nothing.

        logits    float32 [L, V] on the device
        masks     int32 [M, at least V/32] on the device, of the rows that name one; None: no row is masked
        previous  int32 [num_previous]: token_ids of the step before, if rows name any
        """
        counts, table, workspace = prepared.counts, prepared.table, self._workspace
        assert logits.shape == (counts.rows, self.vocab_size), f"{logits.shape} for {counts.rows} rows"
        if prepared.num_futures and (previous is None or len(previous) < prepared.num_futures):
            raise ValueError("Rows name tokens that the step before chooses; give them as `previous`.")
        samples = _views(prepared, self._slots[prepared.slot].samples)
        sampling.adjust(logits, previous, table, counts, workspace)
        sampling.choose(
            logits,
            masks,
            table,
            counts,
            workspace,
            token_ids=samples.token_ids,
            status=samples.status,
            tops=samples.tops,
        )
        filters.filter_rows(logits, masks, table, counts, workspace)
        sampling.draw(logits, masks, table, counts, workspace, token_ids=samples.token_ids)
        logprobs.report(
            logits, table, counts, workspace, token_ids=samples.token_ids, status=samples.status, out=samples.reports
        )
        return samples

    def to_host(self, samples: DeviceSamples) -> DeviceSamples:
        """Enqueue the copy of all results to pinned memory; they are there once the current stream has come so far."""
        host = self._slots[samples.prepared.slot].host_samples
        host[: len(samples.words)].copy_(samples.words, non_blocking=True)
        return _views(samples.prepared, host)

    def fetch(self, samples: DeviceSamples) -> sampler.Samples:
        """The results, of what `to_host` gave, when its copy is done. They are the caller's: nothing overwrites them."""
        prepared = samples.prepared
        token_ids = samples.token_ids.numpy().copy()
        status = samples.status.numpy()
        failed = {
            int(index): _sentence(prepared, int(index), Status(status[index]), samples.tops.numpy()[index])
            for index in np.flatnonzero(status)
        }
        row_logprobs: list[RowLogprobs | None] = [None] * len(prepared.rows)
        fallbacks: dict[int, RowLogprobs] = {}
        for (index, is_fallback), words in zip(prepared.reported, samples.reports.numpy(), strict=True):
            if index in failed:
                continue
            report = _report(words, prepared.rows[index], self.vocab_size)
            if is_fallback:
                fallbacks[index] = report
            else:
                row_logprobs[index] = report
        return sampler.Samples(token_ids, tuple(row_logprobs), failed, fallbacks)


def _sentence(prepared: Prepared, index: int, status: Status, top: np.float32) -> str:
    """Why a row failed."""
    position = prepared.rows[index].position
    match status:
        case Status.NOT_FINITE:
            return sampler.not_finite(position, top)
        case Status.NOTHING_ALLOWED:
            return sampler.nothing_allowed(position)
        case Status.REFUSED:
            return prepared.refusals[index]
        case Status.ALL_BANNED:
            return sampler.ALL_BANNED
        case Status.TOO_STRONG:
            return sampler.too_strong(top)
        case Status.IMPOSSIBLE:
            return sampler.IMPOSSIBLE
        case Status.OK:
            raise AssertionError("a row that did not fail")


def _report(words: Int32, row: LogitsRow, vocab_size: int) -> RowLogprobs:
    assert row.logprobs is not None
    number = 1 + min(row.logprobs, vocab_size)
    first = logprobs.FIRST_LOGPROB
    return RowLogprobs(
        token_ids=words[1 : 1 + number].copy(),
        logprobs=np.maximum(words[first : first + number].view(np.float32), np.float32(sampler.MIN_LOGPROB)),
        rank=int(words[0]),
    )


class _Packer:
    """The rows of a step as lines of RowTable, in lists."""

    def __init__(self, rows: Sequence[LogitsRow], vocab_size: int, num_previous: int) -> None:
        self.reals: list[tuple[float, ...]] = []
        self.seeds: list[int] = []
        self.integers: list[tuple[int, ...]] = []
        self.draws: list[int] = []
        self.filters: list[int] = []
        self.adjusts: list[tuple[int, ...]] = []
        self.reports: list[tuple[int, ...]] = []
        self.words: list[Int32] = []
        self.reported: list[tuple[int, bool]] = []
        self.refusals: dict[int, str] = {}
        self.num_futures = 0
        self.num_words = 0
        self._vocab_size = vocab_size
        self._num_previous = num_previous
        for index, row in enumerate(rows):
            self._add(index, row)
        self.counts = Counts(len(rows), len(self.draws), len(self.filters), len(self.adjusts), len(self.reports))

    def _add(self, index: int, row: LogitsRow) -> None:
        kind, top_k, place = Kind.LOOK, 0, -1
        reals = (0.0,) * columns.REALS.value
        try:
            if row.sampling is None:
                if row.target >= 0 and row.logprobs is not None:
                    sampler.check_vocabulary(np.array([row.target]), self._vocab_size, sampler.PROMPT)
                    self._report(index, row, row.target)
            else:
                kind = Kind.GREEDY if row.sampling.greedy else Kind.DRAW
                reals = _reals(row.sampling, self._vocab_size)
                top_k = row.sampling.top_k if 0 < row.sampling.top_k < self._vocab_size else 0
                if kind is Kind.DRAW:
                    self.draws.append(index)
                    if top_k or row.sampling.top_p < 1:
                        self.filters.append(index)
                if row.logprobs is not None:
                    self._report(index, row, -1)
                place = self._adjust(index, row, row.sampling)
        except GenerationFailed as failure:
            self.refusals[index] = failure.message
        if row.logprobs is not None and row.fallback >= 0:
            self._report(index, row, row.fallback, is_fallback=True)
        position = (row.position + 2**31) % 2**32 - 2**31  # as int32
        self.reals.append(reals)
        self.seeds.append((row.seed + 2**63) % 2**64 - 2**63)
        self.integers.append((kind, position, top_k, row.mask, place, index in self.refusals, 0, 0))

    def _report(self, index: int, row: LogitsRow, target: int, *, is_fallback: bool = False) -> None:
        assert row.logprobs is not None and target < self._vocab_size, f"token id {target} of {self._vocab_size}"
        self.reports.append((index, target, min(row.logprobs, self._vocab_size), 0))
        self.reported.append((index, is_fallback))

    def _adjust(self, index: int, row: LogitsRow, params: SamplingParams) -> int:
        """The row's place among those that adjust, or -1. Raises GenerationFailed for a token id that there isn't."""
        if not (params.penalizes or params.logit_bias or row.banned):
            return -1
        changes: dict[int, float] = {}
        history: list[Int32] = []
        if params.penalizes:
            assert row.prompt is not None and row.output is not None, "a row that penalizes needs its prompt and output"
            sampler.check_vocabulary(row.prompt, self._vocab_size, sampler.PROMPT)
            sampler.check_vocabulary(row.output, self._vocab_size, sampler.OUTPUT, futures=self._num_previous)
            history = [row.prompt, row.output]
            if len(row.output) and row.output.min() < 0:
                self.num_futures = self._num_previous
        if params.logit_bias:
            biased = np.fromiter(params.logit_bias, dtype=np.int64)
            sampler.check_vocabulary(biased, self._vocab_size, sampler.BIAS)
            changes.update(params.logit_bias)
        changes.update((token_id, -math.inf) for token_id in row.banned if token_id < self._vocab_size)
        pairs = np.empty((len(changes), 2), np.int32)
        pairs[:, 0] = list(changes)
        pairs[:, 1] = np.array(list(changes.values()), np.float32).view(np.int32)
        begins = [self.num_words]
        for ids in history or [np.empty(0, np.int32)] * 2:
            self._append(ids)
            begins.append(self.num_words)
        self._append(pairs.reshape(-1))
        self.adjusts.append((index, *begins, begins[-1], self.num_words, 0, 0))
        return len(self.adjusts) - 1

    def _append(self, words: Int32) -> None:
        self.words.append(words)
        self.num_words += len(words)


def _reals(params: SamplingParams, vocab_size: int) -> tuple[float, ...]:
    """A line of RowTable.reals."""
    temperature = params.temperature
    # Beyond this all tokens together weigh less than 1 - top_p of the top one alone. A little more, for the rounding.
    top_p_reach = temperature * (math.log((1 - params.top_p) / vocab_size) - 1) if params.top_p < 1 else -math.inf
    return (
        temperature,
        temperature * math.log(params.min_p) if params.min_p > 0 else -math.inf,
        params.top_p,
        top_p_reach,
        params.presence_penalty,
        params.frequency_penalty,
        params.repetition_penalty,
        0.0,
    )


class _Slot:
    """Memory of one step: the table in pinned memory and on the device, and the results, on both, too."""

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self._device = device
        reals, integers = columns.REALS.value, columns.INTEGERS.value
        adjusts, reports = columns.ADJUSTS.value, columns.REPORTS.value
        self._parts: list[tuple[np.dtype, tuple[int, ...]]] = [
            (np.dtype(np.float64), (max_rows, reals)),
            (np.dtype(np.int64), (max_rows,)),
            (np.dtype(np.int32), (max_rows, integers)),
            (np.dtype(np.int32), (max_rows,)),
            (np.dtype(np.int32), (max_rows,)),
            (np.dtype(np.int32), (max_rows, adjusts)),
            (np.dtype(np.int32), (2 * max_rows, reports)),
        ]
        self._allocate(FIRST_WORDS)
        num_samples = 3 * _aligned(max_rows) + 2 * max_rows * logprobs.REPORT
        self.samples = torch.empty(num_samples, dtype=torch.int32, device=device)
        self.host_samples = _pinned(num_samples, torch.int32, device)

    def _allocate(self, num_words: int) -> None:
        parts = [*self._parts, (np.dtype(np.int32), (num_words,))]
        sizes = [-(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT for dtype, shape in parts]
        self._host = _pinned(sum(sizes), torch.uint8, self._device)
        self._on_device = torch.empty(sum(sizes), dtype=torch.uint8, device=self._device)
        self._num_words = num_words
        self._fixed = sum(sizes[:-1])
        arrays, tensors, begin = [], [], 0
        for (dtype, shape), size in zip(parts, sizes, strict=True):
            end = begin + math.prod(shape) * dtype.itemsize
            arrays.append(self._host[begin:end].numpy().view(dtype).reshape(shape))
            tensors.append(self._on_device[begin:end].view(getattr(torch, dtype.name)).view(shape))
            begin += size
        self._arrays: list[npt.NDArray] = arrays
        self._table = RowTable(*tensors)

    def fill(self, packer: _Packer) -> RowTable:
        """Write the table, and start its copy."""
        if packer.num_words > self._num_words:
            self._allocate(2 * packer.num_words)
        lines: tuple[Sequence[Any], ...] = (
            packer.reals, packer.seeds, packer.integers, packer.draws, packer.filters, packer.adjusts, packer.reports
        )  # fmt: skip
        for array, part in zip(self._arrays, lines, strict=False):
            if part:
                array[: len(part)] = part
        if packer.words:
            np.concatenate(packer.words, out=self._arrays[-1][: packer.num_words])
        used = self._fixed + packer.num_words * 4
        self._on_device[:used].copy_(self._host[:used], non_blocking=True)
        return self._table


def _views(prepared: Prepared, words: Tensor) -> DeviceSamples:
    """The parts of a slot's `samples`."""
    rows, reports = prepared.counts.rows, prepared.counts.reports
    step = _aligned(rows)
    end = 3 * step + reports * logprobs.REPORT
    return DeviceSamples(
        prepared,
        words[:end],
        words[:rows],
        words[step : step + rows],
        words[2 * step : 2 * step + rows].view(torch.float32),
        words[3 * step : end].view(reports, logprobs.REPORT),
    )


def _aligned(num_words: int) -> int:
    """At least so many int32, until the next whole unit of alignment."""
    unit = ALIGNMENT // 4
    return -(-num_words // unit) * unit


def _pinned(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory of the host, from which a GPU copies while the host goes on."""
    return torch.empty(size, dtype=dtype, pin_memory=device.type == "cuda")


def _make_workspace(vocab_size: int, max_rows: int, device: torch.device) -> Workspace:
    def empty(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    lanes, blocks = columns.LANES, sampling.num_blocks(vocab_size)
    return Workspace(
        ranked=empty(max_rows, 3, lanes, dtype=torch.int64),
        allowed=empty(max_rows, lanes, dtype=torch.int32),
        state=empty(max_rows, columns.STATE.value, dtype=torch.int32),
        scores=empty(max_rows, lanes, dtype=torch.float64),
        winners=empty(max_rows, lanes, dtype=torch.int32),
        lists=empty(max_rows, filters.LIST, dtype=torch.int32),
        totals=empty(max_rows, dtype=torch.float64),
        adjusted=empty(0, vocab_size, dtype=torch.float32),
        peaks=empty(2 * max_rows, lanes, 2, dtype=torch.float32),
        ranks=empty(2 * max_rows, lanes, dtype=torch.int32),
        likeliest=empty(2 * max_rows, blocks, logprobs.MAX_ALTERNATIVES, dtype=torch.int64),
    )
