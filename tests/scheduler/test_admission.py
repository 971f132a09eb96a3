"""Who is admitted, who may go before whom, how often prompts are looked up, and why those that wait do."""

import random
from collections import Counter
from collections.abc import Callable, Iterable

import numpy as np
import pytest

from tests.scheduler.factories import Clock, Driver, generate, make_engine
from tests.stub import continuation
from trunkline.config import POLICIES, SchedulerConfig
from trunkline.radix.cache import Match, PrefixCache
from trunkline.radix.events import Namespace
from trunkline.sampling import SamplingParams
from trunkline.scheduler.admission import NUM_CANDIDATES
from trunkline.scheduler.request import Request, State
from trunkline.scheduler.scheduler import Scheduler
from trunkline.scheduler.turns import LOOK_AHEAD
from trunkline.step import StepResult


class Bench:
    """A scheduler on a clock of its own, without a worker: every row chooses token 1.

    admissions  in order: who, and who else was waiting then
    """

    def __init__(self, *, num_pages: int = 64, page_size: int = 4, caching: bool = True, **config: object) -> None:
        self.cache = PrefixCache(num_pages=num_pages, page_size=page_size, enabled=caching)
        settings = SchedulerConfig(**{"num_speculative_tokens": 0} | config)  # type: ignore[arg-type]
        self.scheduler = Scheduler(settings, self.cache, eos_token_ids=(0,), max_model_len=10**6)
        self.now = 0.0
        self.admissions: list[tuple[Request, list[Request]]] = []

    def add(
        self, name: str, prompt: Iterable[int], *, max_tokens: int = 4, tenant: str = "", priority: int = 0
    ) -> Request:
        request = self.scheduler.make_request(
            name,
            prompt=np.fromiter(prompt, "<i4").tobytes(),
            sampling=SamplingParams(max_tokens=max_tokens, temperature=0, seed=0, ignore_eos=True),
            arrival=self.now,
            priority=priority,
            namespace=Namespace(tenant=tenant),
        )
        self.scheduler.add(request)
        return request

    def step(self, seconds: float = 1.0) -> None:
        """One step, and the time it takes."""
        before = list(self.scheduler.waiting)
        plan = self.scheduler.schedule(self.now)
        admitted = [request for request in self.scheduler.running if request in before]
        left_behind = [request for request in before if request.state is State.WAITING]
        for number, request in enumerate(admitted, start=1):
            self.admissions.append((request, admitted[number:] + left_behind))
        self.now += seconds
        if plan is not None:
            chosen = np.array([-1 if row.sampling is None else 1 for row in plan.rows], np.int32)
            self.scheduler.apply(StepResult(step=plan.step, token_ids=chosen, logprobs=(None,) * len(chosen)), self.now)

    def drain(self, max_steps: int = 3000) -> None:
        for _ in range(max_steps):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError(f"never done: {self.scheduler.admission.reasons()}")

    def order(self) -> list[str]:
        return [request.request_id for request, _ in self.admissions]

    def why(self) -> dict[str, str]:
        return {request.request_id: why for request, why in self.scheduler.admission.reasons().items()}


# -------------------------------------------------------------------- the bound


def random_pattern(seed: int, policy: str, num_tenants: int = 1) -> tuple[Bench, float]:
    """A random run to its end; returns it with its window."""
    rng = random.Random(seed)
    window = rng.choice((0.0, 2.0, 5.0, 20.0))
    bench = Bench(
        num_pages=rng.randint(12, 40),
        max_num_seqs=rng.randint(1, 5),
        max_num_batched_tokens=rng.choice((4, 16, 64)),
        policy=policy,
        window_seconds=window,
        window_gamma=rng.choice((1.0, 50.0)),
    )
    bench.scheduler.pace.seconds_per_token = rng.choice((0.0, 0.01, 0.3))
    prefixes = [[100 + i] * rng.randint(0, 16) for i in range(3)]
    for number in range(rng.randint(5, 18)):
        prompt = [*rng.choice(prefixes), *rng.choices(range(1, 4), k=rng.choice((1, 3, 8, 24)))]
        bench.add(str(number), prompt, max_tokens=rng.randint(1, 16), tenant=str(rng.randrange(num_tenants)))
        for _ in range(rng.choice((0, 0, 1, 2))):
            bench.step(seconds=rng.choice((0.25, 1.0, 3.0)))
    bench.drain()
    bench.scheduler.check()
    return bench, window


def overtakings(bench: Bench) -> list[tuple[Request, Request]]:
    """Pairs (q, r): q was admitted while r, which had arrived earlier, was waiting. Of one tenant only."""
    return [
        (q, r)
        for q, waiting in bench.admissions
        for r in waiting
        if r.arrival < q.arrival and r.namespace == q.namespace
    ]


@pytest.mark.parametrize("seeds", (range(60), pytest.param(range(60, 500), marks=pytest.mark.slow)))
def test_nobody_is_overtaken_by_one_that_arrived_a_window_later(seeds: range) -> None:
    """On 500 random patterns; the head that does not fit, twins, and preempted requests included."""
    num_overtakings = num_preemptions = 0
    for seed in seeds:
        bench, window = random_pattern(seed, "window")
        num_preemptions += bench.scheduler.counters.preemptions
        for q, r in overtakings(bench):
            num_overtakings += 1
            assert q.arrival < r.arrival + window, f"seed {seed}: {q.request_id} before {r.request_id}"
    assert num_overtakings > len(seeds) // 4 and num_preemptions > len(seeds) // 10  # the patterns do try


def test_between_tenants_the_bound_holds_for_each() -> None:
    for seed in range(30):
        bench, window = random_pattern(seed, "window", num_tenants=3)
        for q, r in overtakings(bench):
            assert q.arrival < r.arrival + window, f"seed {seed}: {q.request_id} before {r.request_id}"


@pytest.mark.parametrize("policy", POLICIES)
def test_under_every_policy_all_are_served(policy: str) -> None:
    for seed in range(6):
        bench, _ = random_pattern(seed, policy, num_tenants=2)
        assert not bench.scheduler.requests


def test_fcfs_without_a_window_never_overtakes() -> None:
    for seed in range(60):
        bench, window = random_pattern(seed, "fcfs")
        if window == 0.0:
            assert not overtakings(bench), f"seed {seed}"


# -------------------------------------------------------------------- passing


def test_small_requests_pass_a_head_that_does_not_fit_within_the_window() -> None:
    bench = Bench(num_pages=8, policy="fcfs", window_seconds=10.0)
    bench.add("running", [1] * 11, max_tokens=40)
    bench.step()
    bench.add("large", [2] * 24, max_tokens=2)
    bench.add("small", [3], max_tokens=1)
    bench.step()
    assert bench.order() == ["running", "small"]
    bench.now = 11.5  # more than W after "large"
    bench.add("late", [4], max_tokens=1)
    bench.step()
    assert bench.order() == ["running", "small"]
    assert bench.why() == {
        "large": "needs 8 pages; 4 are available",
        "late": "behind a more urgent request that cannot start yet",
    }
    bench.scheduler.abort("running")
    bench.drain()
    assert bench.order() == ["running", "small", "large", "late"]


def test_memory_is_kept_for_a_request_that_has_waited_for_half_the_window() -> None:
    bench = Bench(num_pages=8, policy="fcfs", window_seconds=10.0)
    bench.add("running", [1] * 11, max_tokens=40)
    bench.step()
    large_at = bench.now
    bench.add("large", [2] * 24, max_tokens=2)
    bench.now = large_at + 4.9
    bench.add("soon", [3], max_tokens=1)
    bench.step()
    assert bench.order() == ["running", "soon"]
    bench.now = large_at + 5.0
    bench.add("later", [4], max_tokens=1)
    bench.step()
    assert bench.order() == ["running", "soon"]


def test_pages_of_the_own_prefix_are_not_taken_for_free_ones() -> None:
    bench = Bench(num_pages=12, policy="fcfs")
    bench.add("before", range(1, 18), max_tokens=1)
    bench.drain()  # leaves 4 pages in the cache
    bench.add("running", [90] * 20, max_tokens=4)
    bench.step()
    bench.add("again", range(1, 22), max_tokens=9)
    bench.step()
    assert bench.why() == {"again": "needs 3 pages; 2 are available"}  # one of them to spare
    bench.drain()


def test_nobody_passes_a_preempted_request_but_who_arrived_before_it() -> None:
    bench = Bench(num_pages=9, policy="fcfs", caching=False)
    bench.add("a", [1] * 8, max_tokens=16)
    bench.now = 1.0
    bench.add("b", [2] * 8, max_tokens=16)
    while not bench.scheduler.counters.preemptions:
        bench.step()
    bench.add("small", [3], max_tokens=1)
    bench.drain()
    assert bench.order() == ["a", "b", "b", "small"]


def test_no_more_than_the_next_few_are_tried_behind_one_that_does_not_fit() -> None:
    bench = Bench(num_pages=8, policy="fcfs")
    bench.add("running", [1] * 11, max_tokens=40)
    bench.step()
    for i in range(LOOK_AHEAD + 1):
        bench.add(f"large {i}", [2] * 24, max_tokens=2)
    bench.add("small", [3], max_tokens=1)
    bench.step()
    assert bench.order() == ["running"]
    bench.scheduler.abort("large 5")
    bench.step()
    assert bench.order() == ["running", "small"]


@pytest.mark.parametrize("budget", (32, 100, 2000))  # of a step: for less than one of them, for one and a half, for all
def test_sixteen_twins_compute_their_prefix_once(budget: int) -> None:
    bench = Bench(num_pages=400, max_num_batched_tokens=budget, policy="fcfs")
    for i in range(16):
        bench.add(f"twin {i}", range(1, 66), max_tokens=1)
    bench.drain()
    assert bench.scheduler.counters.prompt_tokens_computed == 65 + 15 * 1


def test_a_twin_that_waits_for_its_leader_is_passed_within_the_window_only() -> None:
    bench = Bench(max_num_batched_tokens=10, window_seconds=20.0)
    bench.add("leader", range(1, 16), max_tokens=1)
    bench.add("twin", range(1, 16), max_tokens=1)
    bench.step()
    bench.now = 19.0
    bench.add("in time", [50], max_tokens=1)
    bench.now = 20.0
    bench.add("too late", [60], max_tokens=1)
    bench.step()  # the rest of the leader's prompt leaves 5 tokens
    assert bench.order() == ["leader", "in time"]
    bench.drain()
    assert bench.order() == ["leader", "in time", "twin", "too late"]


def test_waiting_for_a_twin_names_it() -> None:
    bench = Bench(max_num_batched_tokens=8, policy="fcfs")
    bench.add("first", range(1, 30))
    bench.add("second", range(1, 30))
    bench.step()
    assert bench.why() == {"second": "this step's tokens are spent"}
    bench.scheduler.running[0].num_planned = 28  # the next step has tokens left
    bench.step()
    assert bench.why() == {"second": "waits for first to compute the same prefix"}


# -------------------------------------------------------------------- prompts under way


def chunks_of_a_short_prompt(policy: str) -> tuple[list[str], Bench]:
    """A long prompt is being read when a short and urgent one arrives: who is admitted by the next step."""
    bench = Bench(num_pages=200, max_num_batched_tokens=16, policy=policy)
    bench.scheduler.pace.seconds_per_token = 0.01
    bench.add("long", [1] * 100, priority=1)
    bench.step()
    bench.add("short", [2] * 10)
    bench.step()
    return bench.order(), bench


@pytest.mark.parametrize("policy", ("window", "shortest", "priority"))
def test_whoever_is_more_urgent_goes_before_the_rest_of_a_prompt_under_way(policy: str) -> None:
    order, bench = chunks_of_a_short_prompt(policy)
    assert order == ["long", "short"]
    assert bench.scheduler.requests["long"].num_computed == 16 + 6  # what the short one left
    bench.drain()


@pytest.mark.parametrize("policy", ("fcfs", "lpm", "dfs-weight"))
def test_where_nobody_is_more_urgent_a_prompt_under_way_is_read_to_its_end(policy: str) -> None:
    order, bench = chunks_of_a_short_prompt(policy)
    assert order == ["long"]
    bench.drain()


def test_a_prompt_under_way_is_held_up_within_the_window_only() -> None:
    bench = Bench(num_pages=200, max_num_batched_tokens=16, window_seconds=5.0)
    bench.scheduler.pace.seconds_per_token = 0.001
    bench.add("long", [1] * 100)
    bench.step()  # key 0 + 50 · 84 · 0.001 = 4.2
    for number in range(1, 7):
        bench.add(str(number), [2, number] * 8, max_tokens=1)  # keys 1.8, 2.8, 3.8, 4.8 …
        bench.step()
    assert bench.order() == ["long", "1", "2", "3"]
    bench.drain()


# -------------------------------------------------------------------- look-ups


class Counting:
    """Counts the look-ups of a cache, by prompt."""

    def __init__(self, bench: Bench) -> None:
        self.by_prompt: Counter[bytes] = Counter()
        self._match: Callable[..., Match] = bench.cache.match
        bench.cache.match = self  # type: ignore[method-assign]

    def __call__(self, namespace: Namespace, tokens: bytes, num_tokens: int, *, limit: int | None = None) -> Match:
        self.by_prompt[tokens] += 1
        return self._match(namespace, tokens, num_tokens, limit=limit)


def test_whoever_waits_is_looked_up_once_unless_the_tree_changes_below_its_prefix() -> None:
    bench = Bench(num_pages=2000, max_num_seqs=1, policy="lpm")
    lookups = Counting(bench)
    bench.add("running", [9] * 5, max_tokens=30)
    for i in range(200):
        bench.add(str(i), [*range(1, 40), 50 + i], max_tokens=1)
    bench.step()
    for _ in range(10):
        bench.scheduler.admission.config = SchedulerConfig(max_num_seqs=2)  # a place, that nobody can take
        bench.cache.pool.take(bench.cache.pool.num_free)
        bench.step()
    assert set(lookups.by_prompt.values()) == {1}


def test_only_the_first_candidates_are_looked_up_again_when_their_prefix_has_grown() -> None:
    bench = Bench(num_pages=2000, max_num_seqs=1, policy="fcfs")
    bench.add("running", [*range(1, 40)], max_tokens=1)
    for i in range(300):
        bench.add(str(i), [*range(1, 40), 50 + i], max_tokens=9)
    lookups = Counting(bench)
    bench.step()
    bench.step()  # what "running" read is there now
    assert sum(lookups.by_prompt.values()) <= NUM_CANDIDATES
    assert bench.scheduler.requests["0"].cached_tokens == 36


@pytest.mark.parametrize("policy", ("lpm", "window", "dfs-weight"))
def test_an_admitted_request_has_the_longest_prefix_there_is(policy: str) -> None:
    """Kept look-ups are as good as new ones."""
    rng = random.Random(5)
    bench = Bench(num_pages=30, max_num_seqs=2, policy=policy)
    bench.scheduler.pace.seconds_per_token = 0.1
    for number in range(120):
        prompt = [*([rng.randint(1, 2)] * rng.choice((4, 8, 12))), *rng.choices((3, 4), k=rng.randint(1, 12))]
        bench.add(str(number), prompt, max_tokens=2)
    admit = bench.cache.admit

    def checked(match: Match, num_new_pages: int, *args: int) -> object:
        request = next(r for r in bench.scheduler.waiting if r.match is match)
        fresh = bench.cache.match(request.namespace, bytes(request.tokens), request.num_tokens)
        assert (fresh.node, fresh.num_pages) == (match.node, match.num_pages)
        return admit(match, num_new_pages, *args)

    bench.cache.admit = checked  # type: ignore[method-assign,assignment]
    bench.drain()
    assert bench.scheduler.counters.prefix_cache_hits > 0


# -------------------------------------------------------------------- why


def test_each_waiting_request_can_say_why() -> None:
    bench = Bench(num_pages=100, max_num_seqs=2, policy="fcfs")
    assert bench.why() == {}
    for name in "abcde":
        bench.add(name, [ord(name)] * 5, max_tokens=9)
    assert bench.why()["a"] == "its turn comes next"
    bench.step()
    assert bench.why() == {
        "c": "all 2 places are taken",
        "d": "behind 1 more urgent request",
        "e": "behind 2 more urgent requests",
    }


def test_the_reason_of_a_tenant_that_was_served_more_says_so_and_counts_its_own_requests_only() -> None:
    bench = Bench(num_pages=100, max_num_seqs=1, policy="fcfs")
    for name in ("x1", "x2", "x3"):
        bench.add(name, [1, 2, 3], max_tokens=9, tenant="x")
    bench.step()
    bench.add("y1", [1, 2, 3], tenant="y")
    bench.step()
    assert bench.why() == {
        "y1": "the only place is taken",
        "x2": "its tenant was served more than others that wait",
        "x3": "behind 1 more urgent request",
    }


# -------------------------------------------------------------------- nobody starves


def test_a_cold_request_in_a_stream_of_warm_ones_waits_no_longer_than_the_window() -> None:
    bench = Bench(num_pages=200, max_num_seqs=1, window_seconds=20.0)
    bench.scheduler.pace.seconds_per_token = 0.01
    bench.add("warm", range(1, 40), max_tokens=1)
    bench.step()
    cold = bench.add("cold", range(200, 240), max_tokens=1)
    for number in range(60):
        bench.add(f"warm {number}", range(1, 40), max_tokens=1)
        bench.step()
    assert cold.admitted_at - cold.arrival <= 20.0
    num_earlier = bench.order().index("cold")
    assert 15 <= num_earlier <= 21  # it was passed, but not for ever
    bench.drain()


def test_in_every_step_every_text_under_way_gets_its_token() -> None:
    bench = Bench(num_pages=500, max_num_batched_tokens=12)
    for number in range(6):
        bench.add(str(number), [number + 1] * 4, max_tokens=60)
        bench.step()
    bench.add("long", [90] * 300)
    for _ in range(30):
        before = {request.request_id: request.num_output for request in bench.scheduler.running}
        bench.step()
        gained = {r.request_id: r.num_output - before.get(r.request_id, 0) for r in bench.scheduler.running}
        assert all(gained[str(number)] == 1 for number in range(6))
    bench.drain()


def test_requests_that_were_passed_lose_nothing_of_their_text() -> None:
    clock = Clock()
    driver = Driver(make_engine(num_pages=12, page_size=4, clock=clock, max_num_batched_tokens=24))
    prompts = {f"r{i}": [i + 1] * (30 if i % 3 == 0 else 3) for i in range(12)}
    for name, prompt in prompts.items():
        driver.send(generate(name, prompt, max_tokens=6))
        clock.now += 0.5
    driver.drain()
    for name, prompt in prompts.items():
        assert driver.outcomes[name].tokens == continuation(prompt, 6)
