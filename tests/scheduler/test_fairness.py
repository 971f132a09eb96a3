"""Who was served how much, and that it decides whose turn it is."""

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.scheduler.factories import Driver, generate, make_engine, plans
from trunkline.config import SchedulerConfig
from trunkline.radix.events import Namespace
from trunkline.sampling import SamplingParams
from trunkline.scheduler.cost_model import PROFILES
from trunkline.scheduler.fairness import MAX_REMEMBERED, Fairness
from trunkline.scheduler.request import Request
from trunkline.scheduler.simulator import Arrival, simulate


def of(tenant: str, num_prompt: int = 1000) -> Request:
    return Request(
        f"of {tenant}",
        prompt=bytes(4 * num_prompt),
        sampling=SamplingParams(seed=0),
        arrival=0.0,
        order=0,
        namespace=Namespace(tenant=tenant),
    )


# -------------------------------------------------------------------- the counters


def test_charged_are_uncached_prompt_tokens_once_and_output_twice() -> None:
    fairness, request = Fairness(burst=0), of("a", num_prompt=100)
    fairness.enter(request)
    request.num_charged = 40  # were cached
    fairness.charge_prompt(request, 70)
    assert fairness.service("a") == 30
    fairness.charge_prompt(request, 60)  # again, after a preemption
    fairness.charge_prompt(request, 100)
    fairness.charge_prompt(request, 105)  # generated tokens are no prompt
    assert fairness.service("a") == 60
    fairness.charge_output(request, 3)
    assert fairness.service("a") == 66


def test_without_a_burst_who_comes_back_is_lifted_to_the_least_of_the_active() -> None:
    fairness, a, b, c = Fairness(burst=0), of("a"), of("b"), of("c")
    fairness.enter(a)
    fairness.charge_prompt(a, 500)
    fairness.enter(b)
    assert fairness.service("b") == 500
    fairness.charge_prompt(b, 700)
    fairness.enter(c)
    assert fairness.service("c") == 500  # idle time earns nothing
    fairness.leave(b)
    fairness.enter(b)
    assert fairness.service("b") == 1200  # and saves nothing


def test_a_burst_is_all_that_idle_time_earns() -> None:
    fairness, busy, quiet = Fairness(burst=100), of("busy"), of("quiet")
    fairness.enter(busy)
    fairness.enter(quiet)
    assert fairness.service("busy") == fairness.service("quiet")  # at the beginning all are equal
    fairness.leave(quiet)
    fairness.charge_output(busy, 5000)
    fairness.enter(quiet)
    assert fairness.service("busy") - fairness.service("quiet") == 100
    fairness.charge_prompt(quiet, 60)
    fairness.leave(quiet)
    fairness.enter(quiet)  # to come and go earns nothing more
    assert fairness.service("busy") - fairness.service("quiet") == 40


def test_a_tenant_is_active_as_long_as_it_has_any_request() -> None:
    fairness, a, b = Fairness(burst=50), of("a"), of("b")
    fairness.enter(a)
    fairness.enter(b)
    fairness.charge_prompt(b, 100)
    fairness.enter(of("a"))
    fairness.leave(a)
    assert fairness.service("a") == fairness.service("b") - 100 and fairness.num_tenants == 2


def test_when_all_have_left_debts_are_forgotten() -> None:
    fairness, a, b = Fairness(burst=50), of("a"), of("b")
    fairness.enter(a)
    fairness.enter(b)
    fairness.charge_prompt(a, 900)
    fairness.leave(a)
    fairness.leave(b)
    assert fairness.num_remembered == 0
    fairness.enter(a)
    fairness.enter(b)
    assert fairness.service("a") == fairness.service("b")


def test_tenants_that_come_and_go_do_not_pile_up() -> None:
    fairness = Fairness(burst=100)
    fairness.enter(of("stays"))
    for i in range(3 * MAX_REMEMBERED):
        visitor = of(str(i))
        fairness.enter(visitor)
        fairness.charge_prompt(visitor, 10)
        fairness.leave(visitor)
    assert fairness.num_remembered <= MAX_REMEMBERED + 1


@given(
    st.integers(0, 60),
    st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(("enter", "leave", "charge")), st.integers(1, 50))),
)
def test_nobody_comes_further_behind_the_least_of_the_active_than_the_burst(
    burst: int, actions: list[tuple[str, str, int]]
) -> None:
    fairness, here = Fairness(burst), dict[str, list[Request]]()
    for tenant, action, amount in actions:
        if action == "enter":
            least = min((fairness.service(other) for other in here), default=-burst)
            here.setdefault(tenant, []).append(of(tenant))
            fairness.enter(here[tenant][-1])
            assert fairness.service(tenant) >= least - burst
        elif tenant in here and action == "leave":
            fairness.leave(here[tenant].pop())
            if not here[tenant]:
                del here[tenant]
        elif tenant in here:
            fairness.charge_output(here[tenant][0], amount)
    assert fairness.num_tenants == len(here)


# -------------------------------------------------------------------- live


def first_step_of(driver: Driver, name: str, most: int = 100) -> int:
    """Step until the request's first chunk is planned; how many steps that took."""
    for num_steps in range(1, most):
        driver.step()
        if driver.engine.scheduler.requests[name].num_planned:
            return num_steps
    raise AssertionError(f"{name} is never started")


def flooded(*, prompt: int = 60, requests: int = 10, **config: Any) -> Driver:
    """An engine in which a tenant has ten long prompts under way, and as many in the queue."""
    driver = Driver(make_engine(num_pages=2000, page_size=4, max_num_batched_tokens=16, **config))
    for i in range(2 * requests):
        driver.send(generate(f"flood {i}", [i + 1] * prompt, tenant="flood", max_tokens=4))
    for _ in range(requests // 2):
        driver.step()
    return driver


def test_a_quiet_tenants_first_chunk_is_planned_within_two_steps() -> None:
    driver = flooded()
    driver.send(generate("quiet", [90] * 20, tenant="quiet"))
    assert first_step_of(driver, "quiet") <= 2
    driver.drain()


@pytest.mark.parametrize("depth", (0, 1))
def test_a_quiet_tenants_first_chunk_is_planned_within_two_steps_of_a_free_place(depth: int) -> None:
    driver = flooded(max_num_seqs=3, depth=depth)
    driver.send(generate("quiet", [90] * 20, tenant="quiet"))
    scheduler = driver.engine.scheduler
    while not scheduler.requests["quiet"].num_planned:
        full = len(scheduler.running) == 3
        driver.step()
        if not full:
            break
    assert scheduler.requests["quiet"].num_planned or first_step_of(driver, "quiet") == 1
    driver.drain()


def test_without_fairness_the_quiet_one_waits_behind_the_flood() -> None:
    driver = flooded(fairness=False)
    driver.send(generate("quiet", [90] * 20, tenant="quiet"))
    assert first_step_of(driver, "quiet") > 10
    driver.drain()


def test_while_the_quiet_ones_head_does_not_fit_nobody_of_the_flood_starts() -> None:
    driver = Driver(make_engine(num_pages=20, page_size=4, max_num_seqs=8))
    for i in range(12):
        driver.send(generate(f"flood {i}", [i + 1] * 12, tenant="flood", max_tokens=2 + 5 * (i % 4)))
    driver.step()
    before = {request.request_id for request in driver.engine.scheduler.running}
    driver.send(generate("quiet", [90] * 40, tenant="quiet"))
    while driver.engine.scheduler.requests["quiet"].num_planned == 0:
        assert {request.request_id for request in driver.engine.scheduler.running} <= before
        driver.step()
    driver.drain()


def test_tenants_take_turns_even_within_a_step() -> None:
    driver = Driver(make_engine(num_pages=200, page_size=4))
    for i in range(3):
        driver.send(generate(f"a{i}", [1, 2, i], tenant="a"))
    for i in range(3):
        driver.send(generate(f"b{i}", [1, 2, i], tenant="b"))
    driver.step()
    assert [request.request_id for request in driver.engine.scheduler.running] == ["a0", "b0", "a1", "b1", "a2", "b2"]
    driver.drain()


def test_prompts_under_way_share_the_budget_between_tenants() -> None:
    driver = Driver(make_engine(num_pages=2000, page_size=4, max_num_batched_tokens=16))
    for i in range(10):
        driver.send(generate(f"flood {i}", [i + 1] * 160, tenant="flood", max_tokens=1))
    driver.send(generate("quiet", [90] * 160, tenant="quiet", max_tokens=1))
    for _ in range(21):
        driver.step()
    computed = {"flood": 0, "quiet": 0}
    for request in driver.engine.scheduler.requests.values():
        computed[request.namespace.tenant] += request.num_computed
    assert abs(computed["flood"] - computed["quiet"]) <= 16
    driver.drain()


def test_with_one_tenant_nothing_changes() -> None:
    def all_plans(fairness: bool, tenant: str) -> list[str]:
        driver = Driver(make_engine(num_pages=30, page_size=4, max_num_batched_tokens=17, fairness=fairness))
        for i in range(20):
            driver.send(generate(f"r{i}", [1, 2, 3, i, *range(i)], max_tokens=8, tenant=tenant))
        driver.drain()
        return [repr(plan) for plan in plans(driver.engine)]

    assert all_plans(True, "a") == all_plans(False, "a") == all_plans(True, "")


# -------------------------------------------------------------------- simulated


def load(tenant: str, per_second: float, *, seconds: float, seed: int) -> list[Arrival]:
    """Prompts of 1,000 to 3,000 tokens, of which no two share anything; 64 tokens each to generate."""
    rng, arrivals, now = random.Random(seed), list[Arrival](), 0.0
    while (now := now + rng.expovariate(per_second)) < seconds:
        first = seed * 10**7 + 3000 * len(arrivals)
        prompt = np.arange(first, first + rng.randint(1000, 3000), dtype="<i4").tobytes()
        arrivals.append(Arrival(seconds=now, prompt=prompt, num_output=64, tenant=tenant))
    return arrivals


def quiet_ttft(arrivals: list[Arrival], *, fairness: bool = True) -> float:
    """Mean seconds to the quiet tenant's first tokens."""
    report = simulate(
        sorted(arrivals, key=lambda arrival: arrival.seconds),
        cost=PROFILES["cpu-smollm2"],
        cache_tokens=200_000,
        scheduler=SchedulerConfig(fairness=fairness),
    )
    return (report.tenants["quiet"] if report.tenants else report.total).ttft.mean


@pytest.mark.slow
def test_ten_times_the_load_of_another_tenant_costs_the_quiet_one_at_most_half_more() -> None:
    quiet = load("quiet", 0.03, seconds=600, seed=1)
    flood = load("flood", 0.3, seconds=600, seed=2)
    alone = quiet_ttft(quiet)
    assert quiet_ttft(quiet + flood) <= 1.5 * alone
    assert quiet_ttft(quiet + flood, fairness=False) > 5 * alone
