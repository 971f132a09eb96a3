"""The four policies, by what they let go first; what counts as a hit; and what the hooks hear of it."""

import numpy as np
import pytest

from tests.radix.factories import DEMO, DONE, admit, cached, commit, look_up, packed, read, space
from trunkline.config import EVICTION_POLICIES
from trunkline.radix.cache import PrefixCache
from trunkline.radix.eviction import Segmented, make_order
from trunkline.radix.node import Node
from trunkline.radix.pages import Int32


def make_cache(policy: str = "lru", num_pages: int = 32) -> PrefixCache:
    return PrefixCache(num_pages=num_pages, page_size=1, eviction_policy=policy)


def evicted(cache: PrefixCache) -> list[int]:
    """The first tokens of the runs in the order in which they go, all of them."""
    firsts = [int(np.frombuffer(node.tokens, "<i4")[0]) for node in cache.tree.eviction_order()]
    cache.check()
    return firsts


def hit(cache: PrefixCache, *tokens: int, times: int = 1, priority: int = 0) -> None:
    """So many requests go on from these tokens, all of them cached."""
    for _ in range(times):
        cache.release(admit(cache, *tokens, 0, priority=priority), after_step=DONE)


# ---- hits


def test_a_hit_is_counted_when_a_request_is_admitted() -> None:
    cache = make_cache()
    cache.tick(1.0)
    cached(cache, 1, 2)
    (node,) = cache.tree.nodes()
    assert (node.hits, node.last_used) == (0, 1.0), "whoever computed it is no hit"
    for _ in range(10):
        match = look_up(cache, 1, 2, 3)
    assert match.node is node
    assert node.hits == 0, "a request that waits is looked up again and again"
    cache.tick(2.0)
    assert cache.admit(match, cache.available) is None
    assert (node.hits, node.last_used) == (0, 1.0), "it didn't fit"
    lease = cache.admit(match, 1)
    assert lease is not None
    assert (node.hits, node.last_used) == (1, 2.0)
    commit(cache, lease, 1, 2, 3)
    cache.fork(lease, 1)
    assert [node.hits for node in cache.tree.nodes()] == [1, 0]


def test_one_hit_for_every_node_of_the_path() -> None:
    cache = make_cache()
    cached(cache, 1, 2)
    cached(cache, 1, 2, 3, 4)
    cached(cache, 1, 5)
    hit(cache, 1, 2, 3, 4)
    hits = {int(np.frombuffer(node.tokens, "<i4")[0]): node.hits for node in cache.tree.nodes()}
    assert hits == {1: 3, 2: 2, 3: 1, 4: 1, 5: 0} or hits == {1: 3, 2: 2, 3: 1, 5: 0}
    cache.check()


def test_what_was_hit_is_not_joined_with_what_was_not() -> None:
    """So hits are those of single pages, however the runs are cut."""
    cache = make_cache()
    cached(cache, 1, 2)
    lease = admit(cache, 1, 2, 3, 4)
    commit(cache, lease, 1, 2, 3)
    commit(cache, lease, 1, 2, 3, 4)
    assert cache.show() == "tenant='demo'\n└─ 1|2 → 0 1  locked\n   └─ 3|4 → 2 3  locked ×1"


# ---- the policies


def test_lru_looks_at_time_alone() -> None:
    cache = make_cache("lru")
    cached(cache, 1)
    cached(cache, 2)
    hit(cache, 1, times=5)
    cached(cache, 3)
    assert evicted(cache) == [2, 1, 3]


def test_lfu_takes_what_was_hit_least() -> None:
    cache = make_cache("lfu")
    for token, hits in ((1, 4), (2, 1), (3, 0), (4, 3), (5, 2)):
        cached(cache, token)
        hit(cache, token, times=hits)
    assert evicted(cache) == [3, 2, 4, 5, 1], "2 and 3 hits are worth the same: the older goes first"
    hit(cache, 3, times=8)
    assert evicted(cache) == [2, 4, 5, 1, 3]


def test_priority_takes_what_only_the_least_urgent_used() -> None:
    cache = make_cache("priority")
    for token, priority in ((1, 0), (2, 7), (3, -2), (4, 3), (5, 7)):
        cached(cache, token, priority=priority)
    assert evicted(cache) == [2, 5, 4, 1, 3]
    hit(cache, 2, priority=-5)
    assert evicted(cache) == [5, 4, 1, 3, 2], "an urgent request used it by now"
    hit(cache, 2, priority=9)
    assert evicted(cache) == [5, 4, 1, 3, 2]


def test_a_prefix_is_as_urgent_as_what_continues_it() -> None:
    """Also if a less urgent twin has computed it: or a parent would go before its child."""
    cache = make_cache("priority")
    urgent = admit(cache, 1, 2, 3, priority=-1)
    cached(cache, 1, 2, priority=5)
    commit(cache, urgent, 1, 2, 3)
    cache.release(urgent, after_step=DONE)
    cached(cache, 9, priority=0)
    assert evicted(cache) == [9, 3, 1]


def test_slru_protects_what_was_hit_up_to_its_share() -> None:
    cache = make_cache("slru", num_pages=10)
    for token in (1, 2, 3):
        cached(cache, token, token, token)
    hit(cache, 1, 1, 1)
    hit(cache, 2, 2, 2)
    assert evicted(cache) == [3, 1, 2]
    hit(cache, 3, 3, 3)  # 9 pages were hit, and 8 are protected: the oldest three wait for their turn again
    assert evicted(cache) == [1, 2, 3]
    cached(cache, 4)
    assert evicted(cache) == [1, 4, 2, 3]


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_every_policy_takes_tails_first_and_spares_its_own_prefix(policy: str) -> None:
    cache = make_cache(policy, num_pages=8)
    cached(cache, 1, 2, 3, 4)
    hit(cache, 1, 2, times=3, priority=-1)
    lease = admit(cache, 1, 2, 7, 8, 9)
    assert lease.pages.tolist()[:2] == [0, 1]
    cache.check()
    assert cache.grow(lease, 3)
    assert look_up(cache, 1, 2, 3, 4, 0).num_pages == 2
    cache.release(lease, after_step=DONE)
    assert cache.evict(9) == 2
    assert evicted(cache) == []


def test_a_thousand_urgencies_leave_nothing_behind() -> None:
    cache = make_cache("priority")
    order = cache.tree._order
    assert isinstance(order, Segmented)
    for priority in range(1000):
        cached(cache, priority, priority=priority)
        assert len(order._values) == len(order._segments) <= 32
    cache.flush()
    assert not order._values and not order._segments


def test_an_unknown_policy() -> None:
    with pytest.raises(ValueError, match="the eviction policy is 'mru'; choose one of lru, lfu, slru, priority"):
        make_order("mru", 8)


# ---- hooks


def test_pages_are_announced_before_they_leave() -> None:
    cache = PrefixCache(num_pages=4, page_size=2)
    heard: list[tuple[bytes, int, list[int], int]] = []

    def hear(node: Node, first: int, pages: Int32) -> None:
        heard.append((node.tokens, first, pages.tolist(), len(node.pages)))

    cache.on_evicted = hear
    cached(cache, 1, 2, 3, 4, 5, 6)
    lease = admit(cache, 7, 8, 9)
    assert heard == [(packed([1, 2, 3, 4, 5, 6]), 2, [2], 3)]
    assert cache.grow(lease, 2)
    assert heard[1:] == [(packed([1, 2, 3, 4]), 0, [0, 1], 2)]
    cache.release(lease, after_step=DONE)
    cached(cache, 1, 2)
    cache.flush()
    assert len(heard) == 2, "what is flushed is wanted no more"


def test_the_second_use_is_announced_once() -> None:
    cache = make_cache()
    heard: list[tuple[bytes, int]] = []
    cache.on_reused = lambda node: heard.append((node.tokens, node.hits))
    cached(cache, 1, 2)
    cached(cache, 1, 2, 3)
    assert heard == [(packed([1, 2]), 1)]
    cached(cache, 1, 2, 3)  # all but its last token is found; that is another node
    assert heard == [(packed([1, 2]), 1)]
    hit(cache, 1, 2, 3)
    assert heard == [(packed([1, 2]), 1), (packed([3]), 1)]


# ---- shares of tenants


def shared_cache(share: float, policy: str = "lru") -> PrefixCache:
    return PrefixCache(num_pages=20, page_size=1, tenant_share=share, eviction_policy=policy)


def test_a_tenant_above_its_share_pays_with_its_own_pages() -> None:
    cache = shared_cache(0.25)
    quiet, loud = space("quiet"), space("loud")
    cached(cache, 1, 2, 3, namespace=quiet)
    for token in range(10):
        cached(cache, token, 7, namespace=loud)
    assert cache.tenant_pages == {"quiet": 3, "loud": 5}
    assert look_up(cache, 1, 2, 3, 0, namespace=quiet).num_pages == 3
    assert look_up(cache, 9, 7, 0, namespace=loud).num_pages == 2
    assert look_up(cache, 7, 7, 0, namespace=loud).num_pages == 1, "the tail of the oldest went"
    assert cache.stats().free == 12
    cache.check()


def test_salts_of_a_tenant_are_one_tenant() -> None:
    cache = shared_cache(0.25)
    for number in range(4):
        cached(cache, 1, 2, namespace=space("demo", f"salt {number}"))
    assert cache.tenant_pages == {"demo": 5}
    cache.check()


def test_what_is_in_use_may_exceed_a_share_until_it_is_released() -> None:
    cache = shared_cache(0.25)
    lease = read(cache, *range(8))
    assert cache.tenant_pages == {"demo": 8}
    cache.release(lease, after_step=DONE)
    assert cache.tenant_pages == {"demo": 5}
    assert look_up(cache, *range(8)).num_pages == 5


def test_a_share_is_kept_by_the_policy() -> None:
    cache = shared_cache(0.25, "lfu")
    cached(cache, 1)
    hit(cache, 1, times=2)
    for token in range(2, 10):
        cached(cache, token)
    assert evicted(cache) == [6, 7, 8, 9, 1]


def test_without_shares_there_is_one_order() -> None:
    cache = shared_cache(1.0)
    cached(cache, *range(20))
    assert cache.tenant_pages == {"demo": 20}
    assert cache._orders is None
    cache.evict(3)
    assert cache.tenant_pages == {"demo": 17}
    cache.flush(lambda namespace: namespace == DEMO)
    assert cache.tenant_pages == {}
