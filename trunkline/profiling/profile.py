"""Where a step of the engine goes, part by part, against what the machine can do at most (kernels/limits.py).

    profile = profiler.decode(batch=8, context=512, steps=20)     # profiler.py
    profile.parts, profile.seconds, profile.bound_seconds

The engine is the real one: requests are added, and each step is planned, computed and applied, and what it chose is sent through a
socket, as in the engine process. Every part is the time between two marks that follow one another:

    engine's thread    ─ plan ─┐submit   (masks are filled)   wait┌─ apply ─── send ─
    worker's thread            └─ take ─ compute ─ masks ─ choose ─┘        (of a short step without masks, the engine's as well)

so the parts of a step add up to it. What the kernels take, they say themselves (`CpuKernels.start_profile`); of kernels that keep
no times, `compute` stays whole.
"""

import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from trunkline.kernels.interface import PackedLinear
from trunkline.kernels.limits import Arithmetic, Limits
from trunkline.models.config import ModelConfig
from trunkline.step import Plan, StepMarks

MATMULS, ATTENTION, SMALL, AROUND = "matmuls", "attention", "small operations", "around the kernels"
MODEL = "model (not taken apart)"
SAMPLING, MASKS, SCHEDULING, MESSAGES = "sampling", "masks", "scheduling", "IPC"
GROUPS = (MATMULS, ATTENTION, SMALL, AROUND, MODEL, SAMPLING, MASKS, SCHEDULING, MESSAGES)  # in the order of a report

LINEAR = re.compile(r"linear\w* (\d+) -> (\d+)")  # a name in the kernels' profile: inputs, outputs


class Part(NamedTuple):
    """A part of a step.

    group       one of GROUPS
    name        within the group; "": it is all of it
    num_bytes   of weights, keys and values, or logits, that it must read
    operations  two for each product that is added
    arithmetic  of these
    """

    group: str
    name: str
    seconds: float
    num_bytes: float = 0.0
    operations: float = 0.0
    arithmetic: Arithmetic = "float32"


class StepProfile(NamedTuple):
    """Of one kind of step. Times are means over the middle half of the steps by duration, so that they add up.

    requests, tokens  of a step
    context           tokens in the cache of each request, about
    constrained       every request follows a JSON schema
    fastest           seconds of the fastest step of all
    parts             one after the other: together the whole step
    beside            name -> seconds, of what goes on meanwhile
    weight_bytes      packed
    kv_bytes          keys and values
    limits            None: they could not be measured
    memory_rate       bytes a second, of what no cache holds
    """

    requests: int
    tokens: int
    context: int
    constrained: bool
    fastest: float
    parts: tuple[Part, ...]
    beside: dict[str, float]
    weight_bytes: float
    kv_bytes: float
    limits: Limits | None
    memory_rate: float = 0.0

    @property
    def seconds(self) -> float:
        return sum(part.seconds for part in self.parts)

    @property
    def reading_seconds(self) -> float:
        """The least that weights, keys and values can be read in."""
        assert self.limits is not None
        return (self.weight_bytes + self.kv_bytes) / self.limits.read_rate

    @property
    def memory_seconds(self) -> float:
        """The least if no cache held any of them."""
        return (self.weight_bytes + self.kv_bytes) / self.memory_rate

    @property
    def multiplying_seconds(self) -> float:
        """The least that matmuls and attention can be computed in."""
        assert self.limits is not None
        return multiplying_seconds(self.parts, self.limits)

    @property
    def bound_seconds(self) -> float:
        """The least that such a step could take."""
        return max(self.reading_seconds, self.multiplying_seconds)


def with_best_limits(profiles: Sequence[StepProfile], memory_rate: float) -> list[StepProfile]:
    """The same, each with the best limits that were measured beside any of them: more bytes are not read faster than fewer, all the
    memory there is least of all, and what is read has no part in multiplying."""
    measured = [(one.weight_bytes + one.kv_bytes, one.limits) for one in profiles if one.limits is not None]

    def best(profile: StepProfile) -> Limits:
        num_bytes = profile.weight_bytes + profile.kv_bytes
        read_rate = max(memory_rate, *(limits.read_rate for read, limits in measured if read >= num_bytes))
        names = measured[0][1].multiply_rates
        return Limits(read_rate, {name: max(limits.multiply_rates[name] for _, limits in measured) for name in names})

    return [one if one.limits is None else one._replace(limits=best(one), memory_rate=memory_rate) for one in profiles]


def multiplying_seconds(parts: Iterable[Part], limits: Limits) -> float:
    """The least that their operations take."""
    return sum(part.operations / limits.multiply_rates[part.arithmetic] for part in parts)


# ---------------------------------------------------------------- what a step has to do


class Work:
    """Counts what a step must read and compute.

    matrices        all the weights that are multiplied by
    kv_token_bytes  keys and values of a token, all layers
    """

    def __init__(self, config: ModelConfig, matrices: Iterable[PackedLinear], kv_token_bytes: float) -> None:
        self._config = config
        self._kv_token_bytes = kv_token_bytes
        self._by_shape: dict[tuple[int, int], list[PackedLinear]] = {}
        for matrix in matrices:
            self._by_shape.setdefault((matrix.k, matrix.n), []).append(matrix)

    def weight_bytes(self) -> float:
        """Of a step: every matrix once. Of an embedding matrix beside the head, only a few rows are read."""
        return sum(
            _mean_bytes(matrices) * (1 if self._is_head(k, n) else len(matrices))
            for (k, n), matrices in self._by_shape.items()
        )

    def kv_bytes(self, plan: Plan) -> float:
        """What requests share is read once."""
        saved = sum((len(run.requests) - 1) * (run.end - run.start) for run in plan.shared)
        return (float(plan.context_len.sum()) - saved) * self._kv_token_bytes

    def linear(self, name: str, calls: int, seconds: float, plan: Plan) -> Part | None:
        """The linear layers of one shape; None: it is the name of something else."""
        match = LINEAR.fullmatch(name)
        if match is None:
            return None
        k, n = int(match[1]), int(match[2])
        matrices = self._by_shape[k, n]
        rows = len(plan.rows) if self._is_head(k, n) else plan.num_tokens
        is_plain = all(matrix.integers is None for matrix in matrices)
        return Part(
            MATMULS,
            f"{k:,} → {n:,} ×{calls}",
            seconds,
            num_bytes=_mean_bytes(matrices) * calls,
            operations=2.0 * k * n * rows * calls,
            arithmetic="float32" if is_plain else "int16",
        )

    def attention(self, seconds: float, plan: Plan) -> Part:
        config = self._config
        visible = float(plan.positions.sum(dtype=np.int64)) + plan.num_tokens
        operations = 4.0 * visible * config.num_heads * config.head_dim * config.num_layers
        return Part(ATTENTION, "", seconds, num_bytes=self.kv_bytes(plan), operations=operations)

    def sampling(self, seconds: float, plan: Plan) -> Part:
        return Part(SAMPLING, "", seconds, num_bytes=4.0 * len(plan.rows) * self._config.vocab_size)

    def _is_head(self, k: int, n: int) -> bool:
        return (k, n) == (self._config.hidden_size, self._config.vocab_size)


def packed_matrices(model: Any) -> Iterator[PackedLinear]:
    """All that a model's parts hold, each once: the embedding may be the head as well."""
    seen, left = set[int](), [model]
    while left:
        part = left.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, PackedLinear):
            yield part
        elif isinstance(part, list | tuple):
            left += part
        elif type(part).__module__.startswith("trunkline.models."):
            left += getattr(part, "__dict__", {}).values()


def _mean_bytes(matrices: Sequence[PackedLinear]) -> float:
    return statistics.fmean(matrix.num_bytes for matrix in matrices)


# ---------------------------------------------------------------- one step


class TimedStep(NamedTuple):
    """Marks of a step, in order, on the clock of its worker's.

    handed      behind submit: the engine's thread fills masks
    waiting     it waits for the worker
    delivered   messages are sent
    read        whoever they were for has decoded them
    operations  name -> calls and seconds, of the kernels; empty: they keep no times
    """

    plan: Plan
    marks: StepMarks
    started: float
    submitted: float
    handed: float
    waiting: float
    received: float
    applied: float
    delivered: float
    read: float
    operations: Mapping[str, tuple[int, float]]

    @property
    def seconds(self) -> float:
        return self.delivered - self.started

    def parts(self, work: Work) -> list[Part]:
        marks = self.marks
        return [
            *self._computing(work, marks.computed - marks.begun),
            work.sampling(marks.done - marks.masked, self.plan),
            Part(MASKS, "waited for", marks.masked - marks.computed),
            Part(SCHEDULING, "planning", self.submitted - self.started),
            Part(SCHEDULING, "applying the result", self.applied - self.received),
            Part(MESSAGES, "threads' hand-over", marks.begun - self.submitted + self.received - marks.done),
            Part(MESSAGES, "messages are sent", self.delivered - self.applied),
        ]

    def beside(self) -> dict[str, float]:
        return {"masks are filled": self.waiting - self.handed, "messages are read": self.read - self.delivered}

    def _computing(self, work: Work, seconds: float) -> Iterator[Part]:
        if not self.operations:
            yield Part(MODEL, "", seconds)
            return
        for name, (calls, taken) in sorted(
            self.operations.items(), key=lambda item: -item[1][0]
        ):  # the head comes last
            seconds -= taken
            if name == "attention":
                yield work.attention(taken, self.plan)
            else:
                yield work.linear(name, calls, taken, self.plan) or Part(SMALL, f"{name} ×{calls}", taken)
        yield Part(AROUND, "", seconds)


def middle_half(steps: Sequence[TimedStep]) -> list[TimedStep]:
    """By duration."""
    cut = len(steps) // 4
    return sorted(steps, key=lambda step: step.seconds)[cut : len(steps) - cut]


def mean_parts(steps: Sequence[TimedStep], work: Work) -> tuple[tuple[Part, ...], dict[str, float]]:
    """Parts in the order of GROUPS, and what goes on beside them: means over the steps."""
    found: dict[tuple[str, str], list[Part]] = {}
    for step in steps:
        for part in step.parts(work):
            found.setdefault((part.group, part.name), []).append(part)

    def mean(numbers: Iterable[float]) -> float:
        return sum(numbers) / len(steps)  # what is in some of the steps only counts in all of them

    parts = [
        Part(
            *name,
            seconds=mean(part.seconds for part in same),
            num_bytes=mean(part.num_bytes for part in same),
            operations=mean(part.operations for part in same),
            arithmetic=same[0].arithmetic,
        )
        for name, same in found.items()
    ]
    parts.sort(key=lambda part: GROUPS.index(part.group))
    besides = [step.beside() for step in steps]
    return tuple(parts), {name: mean(beside[name] for beside in besides) for name in besides[0]}
