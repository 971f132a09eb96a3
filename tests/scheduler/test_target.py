"""The wanted time between tokens: chunks of prompts shrink so that running streams need not wait longer. On a virtual clock."""

import random
from collections.abc import Callable

import numpy as np
import pytest

from tests.scheduler.factories import EOS, Clock, generate
from tests.stub import VOCAB_SIZE, StubWorker
from trunkline.config import CacheConfig, EngineConfig, ModelSource, SchedulerConfig
from trunkline.messages import Tokens
from trunkline.scheduler.engine import Engine
from trunkline.step import Plan, StepResult

TARGET = 0.050
PAGE = 16


class TimedWorker(StubWorker):
    """A stub whose steps move a clock by what they cost: 10 ms, 0.2 ms a prompt token, 1 ms a generating sequence.

    per_context_token  seconds more for each token that a prompt's token has before it
    """

    def __init__(self, clock: Clock, factor: Callable[[], float], per_context_token: float = 0.0) -> None:
        super().__init__(num_pages=4000, page_size=PAGE)
        self.clock = clock
        self.factor = factor
        self.per_context_token = per_context_token

    def wait(self, handle: int) -> StepResult:
        plan = self.in_flight[0]
        num_generating = int((np.diff(plan.query_start) == 1).sum())
        num_prompt = plan.num_tokens - num_generating
        context = int(plan.positions.sum() - plan.context_len[np.diff(plan.query_start) == 1].sum()) + num_generating
        seconds = 0.010 + 0.0002 * num_prompt + 0.001 * num_generating + self.per_context_token * context
        self.clock.now += seconds * self.factor()
        return super().wait(handle)


class Streams:
    """Four streams and then a long prompt; what its chunks were, and how long the streams waited for tokens meanwhile."""

    def __init__(
        self,
        num_prompt: int,
        target: float | None,
        factor: Callable[[], float] = lambda: 1.0,
        per_context_token: float = 0.0,
    ) -> None:
        self.clock = Clock()
        self.worker = TimedWorker(self.clock, factor, per_context_token)
        self.engine = Engine(
            EngineConfig(
                model=ModelSource(path="stub"),
                cache=CacheConfig(block_size=PAGE),
                scheduler=SchedulerConfig(target_token_seconds=target, num_speculative_tokens=0),
            ),
            self.worker,
            eos_token_ids=(EOS,),
            max_model_len=60_000,
            vocab_size=VOCAB_SIZE,
            clock=self.clock,
        )
        self.longest_gap = 0.0
        self._last: dict[str, float] = {}
        for i in range(4):
            self.engine.handle(generate(f"stream {i}", [i + 1] * 20, max_tokens=20_000))
        for _ in range(10):
            self.step()
        first = len(self.worker.plans)
        self.engine.handle(generate("long", np.arange(num_prompt) % 90 + 5, max_tokens=2))
        while "long" in self.engine.scheduler.requests:
            self.step()
        self.chunks = [largest_chunk(plan) for plan in self.worker.plans[first:]]

    def step(self) -> None:
        for message in self.engine.step():
            if isinstance(message, Tokens) and message.request_id != "long":
                before = self._last.get(message.request_id, self.clock.now)
                self.longest_gap = max(self.longest_gap, self.clock.now - before)
                self._last[message.request_id] = self.clock.now


def largest_chunk(plan: Plan) -> int:
    return int(np.diff(plan.query_start).max())


def test_while_a_prompt_of_32k_is_read_no_stream_waits_longer_than_the_target() -> None:
    streams = Streams(32_000, TARGET)
    assert streams.longest_gap <= TARGET
    assert max(streams.chunks) >= 100  # 155 tokens are what 90 % of the target has room for
    assert len(streams.chunks) <= 32_000 / 100


def test_without_a_target_chunks_are_as_large_as_allowed() -> None:
    streams = Streams(4_000, None)
    assert max(streams.chunks) == 508 and streams.longest_gap > 2 * TARGET


def test_with_noise_of_a_tenth_the_target_is_missed_by_little() -> None:
    rng = random.Random(4)
    streams = Streams(8_000, TARGET, lambda: rng.uniform(0.9, 1.1))
    assert streams.longest_gap <= 1.1 * TARGET
    assert max(streams.chunks) >= 100


def test_chunks_get_smaller_where_a_prompt_is_long() -> None:
    """At 4,000 tokens one of a prompt costs three times as much as the first."""
    streams = Streams(8_000, TARGET, per_context_token=1e-7)
    assert streams.longest_gap <= 1.05 * TARGET  # in one step, the second large one: nothing could be known of it
    assert max(streams.chunks) >= 100
    assert PAGE < streams.chunks[-3] < max(streams.chunks) / 4
    learned = streams.engine.scheduler.pace.coefficients
    assert learned.per_context_token == pytest.approx(1e-7, rel=0.05)
    assert learned.per_prompt_token == pytest.approx(0.0002, rel=0.2)


def test_a_target_that_cannot_be_kept_still_lets_prompts_go_on_by_a_page() -> None:
    streams = Streams(200, 0.001)
    assert set(streams.chunks[:12]) == {PAGE}


def test_chunks_grow_back_when_no_stream_is_left() -> None:
    streams = Streams(400, TARGET)
    for name in list(streams.engine.scheduler.requests):
        streams.engine.scheduler.abort(name)
    first = len(streams.worker.plans)
    streams.engine.handle(generate("alone", [7, 8] * 600, max_tokens=1))
    while streams.engine.has_work:
        streams.step()
    assert [largest_chunk(plan) for plan in streams.worker.plans[first:]] == [512, 512, 176]
