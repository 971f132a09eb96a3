"""The queue orders."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trunkline.config import POLICIES, SchedulerConfig
from trunkline.errors import ConfigError
from trunkline.radix.cache import Match, PrefixCache
from trunkline.radix.events import NOBODY, Namespace
from trunkline.sampling import SamplingParams
from trunkline.scheduler.pace import Pace
from trunkline.scheduler.policy import QueueOrder
from trunkline.scheduler.request import Request

NODE = PrefixCache(num_pages=1, page_size=1).match(NOBODY, b"", 0).node


def waiting(order: int, *, arrival: float = 0.0, num_tokens: int = 10, cached: int = 0, priority: int = 0) -> Request:
    request = Request(
        f"r{order}",
        prompt=bytes(4 * num_tokens),
        sampling=SamplingParams(seed=0),
        arrival=arrival,
        order=order,
        priority=priority,
    )
    request.match = Match(NODE, cached // 2, cached, NOBODY)
    return request


def ordered(policy: str, requests: list[Request], *, seconds_per_token: float = 0.01) -> list[Request]:
    pace = Pace()
    pace.seconds_per_token = seconds_per_token
    requests = list(requests)
    QueueOrder(SchedulerConfig(policy=policy, window_seconds=20.0), pace).sort(requests)
    return requests


def names(policy: str, *requests: Request, seconds_per_token: float = 0.01) -> list[str]:
    return [request.request_id for request in ordered(policy, list(requests), seconds_per_token=seconds_per_token)]


def test_each_policy_in_its_order() -> None:
    early_long = waiting(0, arrival=0.0, num_tokens=100)
    warm = waiting(1, arrival=1.0, num_tokens=100, cached=98)
    urgent = waiting(2, arrival=2.0, num_tokens=50, priority=-1)
    assert names("fcfs", urgent, warm, early_long) == ["r0", "r1", "r2"]
    assert names("lpm", urgent, warm, early_long) == ["r1", "r0", "r2"]
    assert names("shortest", urgent, warm, early_long) == ["r1", "r2", "r0"]
    assert names("priority", urgent, warm, early_long) == ["r2", "r0", "r1"]
    assert names("window", urgent, warm, early_long) == ["r1", "r0", "r2"]  # 1 + 1, 0 + min(20, 50), 2 + min(20, 25)


def test_the_seeds_names_mean_the_same() -> None:
    rng = random.Random(3)
    requests = [waiting(i, num_tokens=rng.randint(10, 99), cached=rng.randint(0, 9)) for i in range(30)]
    assert ordered("throughput", requests) == ordered("lpm", requests)
    assert ordered("latency", requests) == ordered("shortest", requests)


def test_window_is_fcfs_until_the_cost_of_a_token_is_known() -> None:
    requests = [waiting(0, num_tokens=100), waiting(1, arrival=0.1, num_tokens=1)]
    assert names("window", *requests, seconds_per_token=0.0) == ["r0", "r1"]


requests = st.builds(
    waiting,
    st.integers(0, 1000),
    arrival=st.floats(0, 100),
    num_tokens=st.integers(1, 5000),
    cached=st.integers(0, 5000),
)


@given(requests, requests, st.floats(0, 1))
def test_nobody_is_overtaken_by_one_that_arrived_a_window_later(
    a: Request, b: Request, seconds_per_token: float
) -> None:
    a.match = Match(NODE, 0, min(a.num_tokens - 1, a.match.num_tokens if a.match else 0), NOBODY)
    b.match = Match(NODE, 0, min(b.num_tokens - 1, b.match.num_tokens if b.match else 0), NOBODY)
    first, second = ordered("window", [a, b], seconds_per_token=seconds_per_token)
    assert first.arrival <= second.arrival + 20.0


@pytest.mark.parametrize("policy", sorted(set(POLICIES) - {"priority"}))
def test_whoever_was_preempted_goes_ahead_of_all_that_arrived_later(policy: str) -> None:
    preempted = waiting(0, arrival=0.0, num_tokens=1000)
    preempted.num_preemptions = 1
    later = [waiting(i, arrival=0.001 * i, num_tokens=100, cached=98) for i in range(1, 5)]
    assert ordered(policy, [*later, preempted])[0] is preempted


def test_a_preempted_request_does_not_go_before_a_higher_priority() -> None:
    preempted = waiting(0, priority=1)
    preempted.num_preemptions = 1
    assert names("priority", preempted, waiting(1, priority=1), waiting(2, priority=0)) == ["r2", "r0", "r1"]


def test_unknown_policy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="'fastest'; choose one of window, fcfs, lpm"):
        QueueOrder(SchedulerConfig(policy="fastest"), Pace())


# -------------------------------------------------------------------- dfs-weight


class Forest:
    """A cache of pages of one token, and requests that wait for prompts in it."""

    def __init__(self) -> None:
        self.cache = PrefixCache(num_pages=4096, page_size=1)
        self.requests: list[Request] = []

    def read(self, *tokens: int, tenant: str = "") -> None:
        """Some prompt was read."""
        data = np.array(tokens, "<i4").tobytes()
        match = self.cache.match(Namespace(tenant=tenant), data, len(tokens))
        lease = self.cache.admit(match, len(tokens) - match.num_pages)
        assert lease is not None
        self.cache.commit(lease, data, len(tokens), after_step=0)
        self.cache.release(lease, after_step=0)

    def wait(self, *tokens: int, tenant: str = "") -> Request:
        request = Request(
            "".join(map(str, tokens)),
            prompt=np.array(tokens, "<i4").tobytes(),
            sampling=SamplingParams(seed=0),
            arrival=0.0,
            order=len(self.requests),
            namespace=Namespace(tenant=tenant),
        )
        request.match = self.cache.match(request.namespace, bytes(request.tokens), request.num_tokens)
        self.requests.append(request)
        return request


def naive_depth_first(requests: list[Request]) -> list[Request]:
    """By recursion over prompts' cached prefixes; pages hold one token."""

    def prefix(request: Request) -> tuple[object, ...]:
        assert request.match is not None
        return (request.namespace, *request.token_ids(0, request.match.num_tokens).tolist())

    def walk(path: tuple[object, ...], under: list[Request]) -> list[Request]:
        groups: dict[object, list[Request]] = {}
        here = []
        for request in under:
            if len(prefix(request)) == len(path):
                here.append(request)
            else:
                groups.setdefault(prefix(request)[len(path)], []).append(request)
        by_weight = sorted(groups.items(), key=lambda group: (-len(group[1]), min(r.order for r in group[1])))
        return [r for step, group in by_weight for r in walk((*path, step), group)] + here

    preempted = [request for request in requests if request.num_preemptions]
    return preempted + walk((), [request for request in requests if not request.num_preemptions])


def test_the_subtree_where_most_requests_wait_goes_first_and_the_cold_go_last() -> None:
    forest = Forest()
    forest.read(1, 2, 3, 4)
    forest.read(1, 2, 5, 6)
    forest.read(7, 8, 9)
    for prompt in ((50, 51), (7, 8, 9, 1), (1, 2, 3, 4, 9), (1, 2, 60), (1, 2, 5, 6, 9), (1, 2, 5, 6, 8)):
        forest.wait(*prompt)
    assert names("dfs-weight", *forest.requests) == ["12569", "12568", "12349", "1260", "7891", "5051"]


@given(st.data())
def test_depth_first_equals_a_naive_walk(data: st.DataObject) -> None:
    forest = Forest()
    prompts = st.lists(st.integers(1, 3), min_size=1, max_size=6)
    tenants = st.sampled_from(("", "other"))
    for _ in range(data.draw(st.integers(0, 8))):
        forest.read(*data.draw(prompts), tenant=data.draw(tenants))
    for _ in range(data.draw(st.integers(0, 12))):
        forest.wait(*data.draw(prompts), tenant=data.draw(tenants)).num_preemptions = data.draw(
            st.sampled_from((0, 0, 0, 1))
        )
    shuffled = data.draw(st.permutations(forest.requests))
    assert ordered("dfs-weight", shuffled) == naive_depth_first(forest.requests)


def test_a_path_longer_than_pythons_stack_can_be_walked() -> None:
    forest = Forest()
    chain = [*range(1, 1500)]
    for end in range(len(chain), 0, -1):
        forest.read(*chain[:end], 7777)  # a branch at every page: the path is a chain of nodes
    forest.wait(*chain, 9, 9)
    forest.wait(5)
    assert [request.num_tokens for request in ordered("dfs-weight", forest.requests)] == [1501, 1]
