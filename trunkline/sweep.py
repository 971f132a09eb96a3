"""A trace through the simulator, for several queue orders and sizes of cache. It prints nothing.

scenario = Scenario(trace="trace.jsonl", profile="h100-llama8b")
points = sweep(scenario, policies=("window", "fcfs"), cache_sizes=(2**19, 2**20), jobs=2)
points[0].report.ttft.mean
"""

import multiprocessing
import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace

import msgspec

from trunkline.config import CacheConfig, SchedulerConfig
from trunkline.errors import ConfigError
from trunkline.scheduler.cost_model import profile
from trunkline.scheduler.simulator import Arrival, Report, Spread, simulate
from trunkline.traces import TraceRow, read_trace, spread


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """What all points of a sweep have in common.

    trace      a file, read as trunkline.traces does
    profile    name of the cost model
    rows       of the trace, from the first one on; None: all
    speed      the requests come this many times as fast as recorded; 0: all at once
    tenants    weights: each row is given to a tenant by chance, with these odds; none: all rows are one tenant's
    cache      page size and eviction
    scheduler  everything but the policy
    """

    trace: str
    profile: str
    rows: int | None = None
    speed: float = 1.0
    tenants: tuple[float, ...] = ()
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One simulation of a sweep.

    alone        by tenant: time to first token if the others sent nothing; empty without tenants
    cpu_seconds  that it took to simulate
    """

    policy: str
    cache_tokens: int
    report: Report
    alone: dict[str, Spread]
    cpu_seconds: float


def sweep(
    scenario: Scenario,
    *,
    policies: Sequence[str],
    cache_sizes: Sequence[int],
    jobs: int = 1,
    on_point: Callable[[Point], None] = lambda point: None,
) -> list[Point]:
    """Simulate every policy with every size of cache, in tokens; `jobs` at a time, each in a process of its own.

    The points come back policy by policy; `on_point` is told of each as soon as those before it are done.
    Raises ConfigError if the trace or the profile cannot be used.
    """
    cells = [(scenario, policy, size) for policy in policies for size in cache_sizes]
    points = []
    for point in _each(cells, min(jobs, len(cells))):
        points.append(point)
        on_point(point)
    return points


def speed_for_load(scenario: Scenario, load: float, cache_tokens: int) -> float:
    """The speed at which requests come at `load` times the rate that an engine can serve in order of arrival.

    That rate is measured on the same rows: all of them come at once, and their number is divided by the time until the
    last one is done. With load 1 they arrive over just that time. Raises ConfigError if none of them fits into the
    cache.
    """
    strict = msgspec.structs.replace(scenario.scheduler, window_seconds=0.0, fairness=False)
    crowd = replace(scenario, speed=0.0, scheduler=strict)
    rows = load_rows(scenario)
    makespan = _simulate(crowd, arrivals(crowd, rows), "fcfs", cache_tokens).makespan
    if not makespan:
        raise ConfigError(
            f"No request of {scenario.trace} fits into a cache of {cache_tokens:,} tokens, so there is no load to"
            " measure; take a larger one."
        )
    return (rows[-1].arrival - rows[0].arrival) * load / makespan


def load_rows(scenario: Scenario) -> list[TraceRow]:
    """The rows of the trace, in order of arrival."""
    return spread(read_trace(scenario.trace, limit=scenario.rows))


def arrivals(scenario: Scenario, rows: Sequence[TraceRow], *, only: str | None = None) -> Iterator[Arrival]:
    """The requests as they come; of one tenant, `only`, they come when they would beside the others."""
    names = tenant_names(scenario)
    rng = random.Random(1)
    for row in rows:
        (tenant,) = rng.choices(names, scenario.tenants or None)
        if only is None or tenant == only:
            seconds = row.arrival / scenario.speed if scenario.speed else 0.0
            yield Arrival(seconds=seconds, prompt=row.prompt(), num_output=row.num_output, tenant=tenant)


def tenant_names(scenario: Scenario) -> list[str]:
    """By the place of their weights: "1", "2" …; one without a name if there are none."""
    return [str(i + 1) for i in range(len(scenario.tenants))] or [""]


def _each(cells: Sequence[tuple[Scenario, str, int]], jobs: int) -> Iterator[Point]:
    if jobs == 1:
        yield from map(_point, cells)
        return
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(_point, cells)


def _point(cell: tuple[Scenario, str, int]) -> Point:
    scenario, policy, cache_tokens = cell
    started = time.process_time()
    rows = load_rows(scenario)
    report = _simulate(scenario, arrivals(scenario, rows), policy, cache_tokens)
    alone = {
        tenant: _simulate(scenario, arrivals(scenario, rows, only=tenant), policy, cache_tokens).ttft
        for tenant in report.tenants
    }
    return Point(
        policy=policy,
        cache_tokens=cache_tokens,
        report=report,
        alone=alone,
        cpu_seconds=time.process_time() - started,
    )


def _simulate(scenario: Scenario, requests: Iterator[Arrival], policy: str, cache_tokens: int) -> Report:
    return simulate(
        requests,
        cost=profile(scenario.profile),
        cache_tokens=cache_tokens,
        cache=scenario.cache,
        scheduler=msgspec.structs.replace(scenario.scheduler, policy=policy),
    )
