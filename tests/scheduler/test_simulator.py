"""The engine on a virtual clock: times worked out by hand, and the promises of the queue's order on recorded traffic."""

import itertools
import math
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.data import data_file
from tests.scheduler.test_cost_model import COST
from trunkline.config import CacheConfig, SchedulerConfig
from trunkline.errors import ConfigError, InvalidParameter
from trunkline.scheduler import simulator
from trunkline.scheduler.simulator import Arrival, Report, Simulator, Spread, simulate
from trunkline.sweep import Scenario, speed_for_load, sweep

PAGES_OF_4 = CacheConfig(block_size=4)
FLAT = replace(COST, far_context=10**12)  # a prompt's token costs the same wherever it stands


def arrival(seconds: float, first: int, num_prompt: int, num_output: int = 1, tenant: str = "") -> Arrival:
    """A prompt of consecutive token ids."""
    prompt = np.arange(first, first + num_prompt, dtype="<i4").tobytes()
    return Arrival(seconds=seconds, prompt=prompt, num_output=num_output, tenant=tenant)


def run(*arrivals: Arrival, cache_tokens: int = 400, **scheduler: object) -> Report:
    config = SchedulerConfig(**scheduler)  # type: ignore[arg-type]
    return simulate(arrivals, cost=FLAT, cache_tokens=cache_tokens, cache=PAGES_OF_4, scheduler=config)


def test_times_worked_out_by_hand() -> None:
    # at 0      the first prompt: 8 tokens read                                       1 + 8·0.01             = 1.08
    # at 1.08   its second token, reading 9; the second prompt: 8 cached, 4 read      1 + .1 + .009 + 4·0.01 = 1.149
    # at 2.229  the last token of the second, reading 13                              1 + .1 + .013          = 1.113
    # at 10     after a pause, the third prompt: 2 tokens read                        1 + 2·0.01             = 1.02
    report = run(arrival(0, 0, 8, 2), arrival(0.5, 0, 12, 2), arrival(10, 100, 2))
    assert report.ttft.mean == pytest.approx((1.08 + (2.229 - 0.5) + 1.02) / 3)
    assert report.ttft.p50 == pytest.approx(1.08)
    assert report.ttft.max == pytest.approx(2.229 - 0.5)
    assert report.hit_rate == pytest.approx(8 / 22)
    assert (report.steps, report.preemptions) == (4, 0)
    assert report.makespan == pytest.approx(11.02)
    assert report.utilization == pytest.approx((1.08 + 1.149 + 1.113 + 1.02) / 11.02)
    assert (report.total.finished, report.total.prompt_tokens, report.total.output_tokens) == (3, 22, 5)
    assert report.total.token_seconds == pytest.approx((1.149 + 1.113) / 2)
    assert report.total.longest_gap == pytest.approx(1.149)
    assert report.tenants == {}


def test_the_budget_cuts_a_prompt_into_steps() -> None:
    report = run(arrival(0, 0, 8), max_num_batched_tokens=4)
    assert report.ttft.max == pytest.approx(1.04 + 1.04)


def test_the_policy_decides_who_is_read_first() -> None:
    busy, long, short = arrival(0, 0, 8), arrival(0.1, 100, 16), arrival(0.2, 200, 8)
    first = run(busy, long, short, policy="fcfs", max_num_seqs=1)
    least = run(busy, long, short, policy="shortest", max_num_seqs=1)
    assert first.ttft.max == pytest.approx(1.08 + 1.16 + 1.08 - 0.2)
    assert least.ttft.max == pytest.approx(1.08 + 1.08 + 1.16 - 0.1)
    assert least.ttft.mean < first.ttft.mean


def test_what_was_generated_is_like_nothing_else() -> None:
    engine = Simulator(cost=FLAT, cache_tokens=400, cache=PAGES_OF_4)
    report = engine.run([arrival(0, 0, 8, 9), arrival(50, 0, 8, 9), arrival(100, 0, 17)])
    assert report.hit_rate == pytest.approx((0 + 4 + 8) / 33)
    # two pages of what is alike, two that each of the first two generated, two that only the third prompt has
    assert engine.engine.scheduler.cache.stats().tree_evictable == 2 + 2 * 2 + 2


def test_a_prompt_that_never_fits_is_refused() -> None:
    report = run(arrival(0, 0, 41), arrival(0, 0, 8), cache_tokens=40)
    assert (report.total.refused, report.total.finished) == (1, 1)
    assert report.total.prompt_tokens == 8, "it has no part in the hit rate"
    assert str(report).startswith(
        "1 OF 2 REQUESTS WERE REFUSED, and are in no other figure. The first: This model's maximum"
    )
    nothing = run(arrival(0, 0, 41), cache_tokens=40)
    assert nothing.ttft == Spread() and math.isnan(nothing.ttft.mean) and math.isnan(nothing.hit_rate)
    assert str(nothing).startswith("1 OF 1 REQUESTS WERE REFUSED") and "time to first token" not in str(nothing)
    fine = run(arrival(0, 0, 8), cache_tokens=40)
    assert fine.total.why_refused is None and str(fine).startswith(
        "1 requests served in 1.1 s, 0.0 % of their 8 prompt"
    )


def test_prompts_may_be_ids_or_their_bytes() -> None:
    first, again = Arrival(seconds=0, prompt=range(8), num_output=1), arrival(2, 0, 12)
    assert run(first, again).hit_rate == pytest.approx(8 / 20)


@pytest.mark.parametrize("prompt", ["text", b"odd", b"", [], [1, "2"], [1.5], [-1], [2**30], None, [2**70]])
def test_what_is_no_prompt_is_told(prompt: Any) -> None:
    with pytest.raises(
        InvalidParameter, match=r"^'prompt' is .*; allowed is a sequence of token ids from 0 to 1073741823"
    ):
        run(Arrival(seconds=0, prompt=prompt, num_output=1))


def test_requests_come_in_order_and_generate_something() -> None:
    with pytest.raises(InvalidParameter, match=r"'seconds' is 1; allowed is 2 and more"):
        run(arrival(2, 0, 8), arrival(1, 0, 8))
    with pytest.raises(InvalidParameter, match="'num_output' is 0; allowed is an integer of at least 1"):
        run(arrival(0, 0, 8, num_output=0))


def test_tight_memory_preempts() -> None:
    report = run(arrival(0, 0, 16, 20), arrival(0, 100, 16, 20), cache_tokens=48)
    assert report.preemptions > 0 and report.total.finished == 2


def test_tenants_are_told_apart_and_share_nothing() -> None:
    report = run(*(arrival(20 * i, 0, 8, tenant="ab"[i % 2]) for i in range(4)))
    assert set(report.tenants) == {"a", "b"}
    for summary in report.tenants.values():
        assert summary.finished == 2
        assert summary.hit_rate == pytest.approx(4 / 16)
    assert report.total.finished == 4


def test_replicas_run_each_on_its_own_clock() -> None:
    left, right = (Simulator(cost=FLAT, cache_tokens=400, cache=PAGES_OF_4) for _ in range(2))
    left.submit(arrival(0, 0, 8))
    assert left.step() and not left.busy
    right.wait_until(3.0)
    right.submit(arrival(2.5, 0, 8))
    assert right.step()
    assert (left.now, right.now) == pytest.approx((1.08, 4.08))
    assert right.report().ttft.max == pytest.approx(1.08 + 0.5), (
        "it had waited for half a second when it was handed over"
    )
    right.wait_until(1.0)
    assert right.now == pytest.approx(4.08), "time does not go back"


def test_an_engine_that_never_starts_anybody_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulator, "MOST_IDLE_STEPS", 5)
    stuck = Simulator(cost=FLAT, cache_tokens=400, cache=PAGES_OF_4)
    monkeypatch.setattr(stuck.engine.scheduler, "schedule", lambda now: None)
    with pytest.raises(RuntimeError, match="1 requests wait, and none of them is ever started"):
        stuck.run([arrival(0, 0, 8)])


def test_a_cache_of_no_page_is_refused() -> None:
    with pytest.raises(ConfigError, match="A cache of 3 tokens is less than a page of 4"):
        Simulator(cost=FLAT, cache_tokens=3, cache=PAGES_OF_4)


def test_the_same_arrivals_give_the_same_report() -> None:
    def once() -> Report:
        rng = np.random.default_rng(7)
        times = np.cumsum(rng.exponential(0.8, 60)).tolist()
        return run(
            *(arrival(at, 40 * int(rng.integers(9)), int(rng.integers(1, 40)), int(rng.integers(1, 9))) for at in times)
        )

    assert once() == once()


# ---------------------------------------------------------------- recorded traffic


def tool_calls(**settings: object) -> Scenario:
    """Tools and agents on an H100: long prompts of which more than half was sent before."""
    trace = data_file("traces/toolagent_like_trace.jsonl")
    scheduler = SchedulerConfig(max_num_batched_tokens=8192, window_seconds=20.0, window_gamma=50.0)
    scenario = Scenario(trace=str(trace), profile="h100-llama8b", scheduler=scheduler)
    return replace(scenario, **settings)  # type: ignore[arg-type]


@pytest.mark.real
@pytest.mark.slow
def test_window_order_shortens_the_wait_of_most_and_lengthens_that_of_none_by_much() -> None:
    scenario = tool_calls(rows=2500)
    scenario = replace(scenario, speed=speed_for_load(scenario, 1.0, 2**20))
    strict = replace(scenario, scheduler=msgspec.structs.replace(scenario.scheduler, window_seconds=0.0))
    ((window,), (fcfs,)) = (
        sweep(one, policies=(policy,), cache_sizes=(2**20,)) for one, policy in ((scenario, "window"), (strict, "fcfs"))
    )
    assert fcfs.report.total.finished == window.report.total.finished == 2500
    assert window.report.ttft.mean <= 0.35 * fcfs.report.ttft.mean
    assert window.report.ttft.max <= 1.15 * fcfs.report.ttft.max
    assert window.report.hit_rate >= fcfs.report.hit_rate


@pytest.mark.slow
def test_points_are_the_same_in_one_process_and_in_several() -> None:
    scenario = tool_calls(rows=40)
    alone = sweep(scenario, policies=("fcfs", "window"), cache_sizes=(2**17, 2**18))
    told: list[str] = []
    beside = sweep(
        scenario,
        policies=("fcfs", "window"),
        cache_sizes=(2**17, 2**18),
        jobs=2,
        on_point=lambda point: told.append(f"{point.policy} {point.cache_tokens}"),
    )
    assert [point.report for point in alone] == [point.report for point in beside]
    assert told == [f"{policy} {size}" for policy, size in itertools.product(("fcfs", "window"), (2**17, 2**18))]
