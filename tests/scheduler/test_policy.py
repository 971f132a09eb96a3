"""The keys of the queue orders."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trunkline.config import SchedulerConfig
from trunkline.errors import ConfigError
from trunkline.radix.cache import Match, PrefixCache
from trunkline.sampling import SamplingParams
from trunkline.scheduler.policy import QueueOrder
from trunkline.scheduler.request import Request

NODE = PrefixCache(num_pages=1, page_size=1).match("namespace", b"", 0).node


def waiting(order: int, *, arrival: float = 0.0, num_tokens: int = 10, cached: int = 0, priority: int = 0) -> Request:
    request = Request(
        f"r{order}",
        prompt=bytes(4 * num_tokens),
        sampling=SamplingParams(seed=0),
        arrival=arrival,
        order=order,
        priority=priority,
    )
    request.match = Match(NODE, cached // 2, cached, "namespace")
    return request


def names(policy: str, *requests: Request, seconds_per_token: float = 0.01) -> list[str]:
    order = QueueOrder(SchedulerConfig(policy=policy))
    order.seconds_per_token = seconds_per_token
    return [request.request_id for request in sorted(requests, key=order.key)]


def test_each_policy_in_its_order() -> None:
    early_long = waiting(0, arrival=0.0, num_tokens=100)
    warm = waiting(1, arrival=1.0, num_tokens=100, cached=98)
    urgent = waiting(2, arrival=2.0, num_tokens=50, priority=-1)
    assert names("fcfs", urgent, warm, early_long) == ["r0", "r1", "r2"]
    assert names("lpm", urgent, warm, early_long) == ["r1", "r0", "r2"]
    assert names("priority", urgent, warm, early_long) == ["r2", "r0", "r1"]
    assert names("window", urgent, warm, early_long) == ["r1", "r0", "r2"]  # 1 + 1, 0 + min(20, 50), 2 + min(20, 25)


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
    order = QueueOrder(SchedulerConfig(policy="window", window_seconds=20.0))
    order.seconds_per_token = seconds_per_token
    a.match = Match(NODE, 0, min(a.num_tokens - 1, a.match.num_tokens if a.match else 0), "namespace")
    b.match = Match(NODE, 0, min(b.num_tokens - 1, b.match.num_tokens if b.match else 0), "namespace")
    if order.key(b) < order.key(a):
        assert b.arrival <= a.arrival + 20.0


def test_seconds_per_token_follows_large_steps_only() -> None:
    order = QueueOrder(SchedulerConfig())
    order.observe(8, 1.0)
    assert order.seconds_per_token == 0.0
    order.observe(100, 1.0)
    assert order.seconds_per_token == pytest.approx(0.01)
    order.observe(100, 2.0)
    assert order.seconds_per_token == pytest.approx(0.012)


def test_unknown_policy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="'fastest'; choose one of window, fcfs, lpm, priority"):
        QueueOrder(SchedulerConfig(policy="fastest"))
