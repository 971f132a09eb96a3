import tracemalloc

import numpy as np
import pytest

from tests.radix.factories import DEMO, DONE, admit, cached, commit, packed, read, space
from trunkline.radix.cache import PrefixCache, Stats


def make_cache(num_pages: int = 16, page_size: int = 2, enabled: bool = True) -> PrefixCache:
    return PrefixCache(num_pages=num_pages, page_size=page_size, enabled=enabled)


def hit(cache: PrefixCache, *tokens: int, limit: int | None = None) -> int:
    return cache.match(DEMO, packed(tokens), len(tokens), limit=limit).num_tokens


# ---- match


def test_a_match_leaves_the_last_token_to_compute() -> None:
    cache = make_cache(num_pages=16, page_size=4)
    cached(cache, *range(16))
    for num_tokens in range(1, 17):
        assert hit(cache, *range(num_tokens)) == (num_tokens - 1) // 4 * 4
    assert hit(cache) == 0
    assert hit(cache, *range(16), 99) == 16


def test_a_match_of_a_limited_length() -> None:
    cache = make_cache(page_size=4)
    cached(cache, *range(16))
    found = {limit: hit(cache, *range(16), limit=limit) for limit in (0, 3, 4, 7, 8, 12, 15, 16, 99)}
    assert found == {0: 0, 3: 0, 4: 4, 7: 4, 8: 8, 12: 12, 15: 12, 16: 12, 99: 12}


def test_a_match_looks_at_num_tokens_only() -> None:
    cache = make_cache()
    cached(cache, 1, 2, 3, 4)
    assert cache.match(DEMO, packed([1, 2, 3, 4, 5]), 3).num_tokens == 2
    with pytest.raises(ValueError, match="8 bytes of tokens are fewer than 3 tokens"):
        cache.match(DEMO, packed([1, 2]), 3)


def test_a_match_outdated_by_eviction_is_refused() -> None:
    cache = make_cache(num_pages=4)
    cached(cache, 1, 2, 3, 4)
    match = cache.match(DEMO, packed([1, 2, 3, 4, 5]), 5)
    assert cache.is_valid(match)
    cache.evict(1)
    before = cache.stats()
    assert not cache.is_valid(match)
    assert cache.admit(match, 1) is None
    assert cache.stats() == before
    cached(cache, 1, 2, 9, 9)  # the same depth again, with other tokens
    assert cache.admit(match, 1) is None


def test_a_match_survives_splits() -> None:
    cache = make_cache()
    lease = read(cache, 1, 2, 3, 4)
    match = cache.match(DEMO, packed([1, 2, 3, 4, 0]), 5)
    cache.match(DEMO, packed([1, 2, 0]), 3)
    assert cache.stats().nodes == 2
    assert cache.is_valid(match)
    other = cache.admit(match, 1)
    assert other is not None
    assert other.pages[:2].tolist() == lease.pages[:2].tolist()
    cache.check()


def test_a_match_of_a_node_that_was_joined_is_made_anew() -> None:
    cache = make_cache()
    lease = admit(cache, 1, 2, 3, 4, 5, 6, 7)
    commit(cache, lease, 1, 2, 3, 4)
    match = cache.match(DEMO, packed([1, 2, 3, 4, 0]), 5)
    commit(cache, lease, 1, 2, 3, 4, 5, 6)  # its node becomes part of a longer one
    assert not cache.is_valid(match)
    assert cache.admit(match, 1) is None
    assert cache.match(DEMO, packed([1, 2, 3, 4, 0]), 5).num_pages == 2


# ---- admit and grow


def test_a_lease_holds_shared_pages_first() -> None:
    cache = make_cache()
    cached(cache, 1, 2, 3, 4)
    lease = admit(cache, 1, 2, 3, 4, 5, 6, 7)
    assert lease.pages.tolist() == [0, 1, 2, 3]
    assert (lease.num_shared, lease.num_private, lease.num_pages) == (2, 2, 4)
    assert (lease.namespace, lease.released) == (DEMO, False)
    assert cache.stats() == Stats(
        free=12, tree_evictable=0, tree_locked=2, leased=2, in_flight=0, evicted_pages_total=0, nodes=1, pinned=0
    )
    with pytest.raises(ValueError, match="read-only"):
        lease.pages[0] = 7


def test_admitting_evicts_what_it_must_and_never_its_own_prefix() -> None:
    cache = make_cache(num_pages=6)
    cached(cache, 1, 2, 3, 4)
    cached(cache, 7, 8, 9, 10)
    lease = admit(cache, 1, 2, 3, 4, 5, 6, 5, 6, 5)  # its prefix, the two free pages, and one more
    assert lease.pages.tolist()[:2] == [0, 1]
    assert cache.evicted_pages_total == 1
    assert hit(cache, 7, 8, 9, 10, 0) == 2
    cache.check()


def test_a_failed_admission_leaves_no_trace() -> None:
    cache = make_cache(num_pages=6)
    cached(cache, 1, 2, 3, 4)
    cached(cache, 7, 8)
    match = cache.match(DEMO, packed([1, 2, 3, 4, 5]), 5)
    before, drawing = cache.stats(), cache.show()
    for _ in range(1000):
        assert cache.admit(match, 5) is None, "three free pages and one evictable one: its own prefix doesn't count"
    assert (cache.stats(), cache.show()) == (before, drawing)
    assert cache.available == 6
    cache.check()


def test_growing() -> None:
    cache = make_cache(num_pages=40, page_size=1)
    cached(cache, *range(10))
    lease = admit(cache, 100)
    seen = lease.pages.tolist()
    for _ in range(30):
        assert cache.grow(lease, 1)
        assert lease.pages.tolist()[:-1] == seen
        seen = lease.pages.tolist()
    assert lease.num_pages == 31
    assert cache.grow(lease, 9), "the rest of the tree is evicted"
    assert cache.grow(lease, 0)
    assert not cache.grow(lease, 1)
    assert lease.num_pages == 40
    assert cache.available == 0
    cache.check()


def test_a_failed_growth_leaves_no_trace() -> None:
    cache = make_cache(num_pages=4)
    cached(cache, 1, 2, 3, 4)
    lease = admit(cache, 7)
    before, pages = cache.stats(), lease.pages.tolist()
    assert not cache.grow(lease, 4)
    assert (cache.stats(), lease.pages.tolist()) == (before, pages)


def test_growth_copies_seldom() -> None:
    """Doubling: a lease of 5,000 pages, grown one by one, moves to a longer buffer a dozen times."""
    cache = make_cache(num_pages=5000)
    lease = admit(cache, 1)
    moves = 0
    for _ in range(4999):
        before = lease.pages.base
        cache.grow(lease, 1)
        moves += lease.pages.base is not before
    assert moves <= 12


# ---- commit


def test_commit_in_two_chunks_makes_one_run() -> None:
    cache = make_cache()
    tokens = [1, 2, 3, 4, 5, 6, 7]
    lease = admit(cache, *tokens)
    assert cache.commit(lease, packed(tokens), 3, after_step=DONE) == 1
    assert (lease.num_shared, lease.num_private) == (1, 3)
    assert cache.commit(lease, packed(tokens), 7, after_step=DONE) == 2
    assert (lease.num_shared, lease.num_private) == (3, 1)
    assert cache.show() == "tenant='demo'\n└─ 1 2|3 4|5 6 → 0 1 2  locked ×1"
    cache.check()


def test_commit_is_idempotent() -> None:
    cache = make_cache()
    lease = read(cache, 1, 2, 3, 4, 5)
    before, drawing = cache.stats(), cache.show()
    assert commit(cache, lease, 1, 2, 3, 4, 5) == 0
    assert commit(cache, lease, 1, 2) == 0
    assert (cache.stats(), cache.show()) == (before, drawing)


def test_less_than_a_page_is_not_shared() -> None:
    cache = make_cache(page_size=4)
    lease = admit(cache, 1, 2, 3)
    assert commit(cache, lease, 1, 2, 3) == 0
    cache.release(lease, after_step=DONE)
    assert cache.stats().free == 16


def test_a_twin_goes_over_to_the_pages_that_came_first() -> None:
    """mini-sglang's PR 142: the row of the second request pointed at its freed duplicates."""
    cache = make_cache(num_pages=8)
    first, second = (admit(cache, 1, 2, 3, 4, 5, 6, 7) for _ in range(2))
    assert second.pages.tolist() == [4, 5, 6, 7]
    commit(cache, first, 1, 2, 3, 4, after_step=5)
    assert commit(cache, second, 1, 2, 3, 4, 5, 6, 7, after_step=5) == 3
    assert second.pages.tolist() == [0, 1, 6, 7], "two of the tree, one that is the tree's now, one of its own"
    assert cache.show() == "tenant='demo'\n└─ 1 2|3 4 → 0 1  locked ×1\n   └─ 5 6 → 6  locked ×1"
    assert (cache.stats().in_flight, cache.in_flight, cache.available) == (2, 2, 0)
    assert not cache.grow(first, 1), "step 5 may still read the duplicates"
    cache.check()
    cache.step_done(5)
    assert (cache.in_flight, cache.available) == (0, 2)
    assert cache.grow(first, 1)
    commit(cache, first, 1, 2, 3, 4, 5, 6)
    assert first.pages.tolist()[:3] == [0, 1, 6]
    assert cache.show() == "tenant='demo'\n└─ 1 2|3 4|5 6 → 0 1 6  locked ×2"
    cache.check()


def test_a_commit_that_ends_inside_a_run() -> None:
    cache = make_cache()
    first, second = admit(cache, 1, 2, 3, 4, 5, 6), admit(cache, 1, 2, 3, 4, 9, 9)
    commit(cache, first, 1, 2, 3, 4, 5, 6)
    commit(cache, second, 1, 2)
    assert second.pages.tolist() == [0, 4, 5]
    assert cache.show() == "tenant='demo'\n└─ 1 2 → 0  locked ×1\n   └─ 3 4|5 6 → 1 2  locked ×1"
    commit(cache, second, 1, 2, 3, 4, 9, 9)
    assert second.pages.tolist() == [0, 1, 5]
    assert cache.show() == "tenant='demo'\n└─ 1 2|3 4 → 0 1  locked\n   ├─ 5 6 → 2  locked ×1\n   └─ 9 9 → 5  locked ×1"
    assert first.pages.tolist() == [0, 1, 2], "its node was split and joined under it"
    cache.check()


def test_a_commit_into_what_nobody_holds() -> None:
    cache = make_cache()
    twin = admit(cache, 1, 2, 3, 4, 5, 6)
    cached(cache, 1, 2, 3, 4, 8, 8)
    commit(cache, twin, 1, 2, 3, 4, 5, 6)
    assert cache.show() == "tenant='demo'\n└─ 1 2|3 4 → 3 4  locked\n   ├─ 8 8 → 5  #1\n   └─ 5 6 → 2  locked ×1"
    cache.check()


def test_more_tokens_than_pages_or_bytes() -> None:
    cache = make_cache()
    lease = admit(cache, 1, 2)
    with pytest.raises(ValueError, match="4 tokens fill 2 pages, and the lease has 1"):
        commit(cache, lease, 1, 2, 3, 4)
    with pytest.raises(ValueError, match="fewer than 2 tokens"):
        cache.commit(lease, packed([1]), 2, after_step=DONE)
    assert cache.stats().nodes == 0


# ---- release


def test_release_in_every_state_and_twice() -> None:
    cache = make_cache()
    admitted = admit(cache, 1, 2, 3)
    chunked = admit(cache, 5, 6, 7, 8, 9)
    commit(cache, chunked, 5, 6)
    done = read(cache, 3, 3, 4, 4)
    for lease in (chunked, admitted, done) * 2:
        cache.release(lease, after_step=DONE)
        assert lease.released
        assert (lease.pages.tolist(), lease.num_shared, lease.num_private) == ([], 0, 0)
        cache.check()
    assert cache.show() == "tenant='demo'\n├─ 5 6 → 2  #1\n└─ 3 3|4 4 → 5 6  #2", "what was committed stays"
    assert cache.stats().free == 13
    assert cache.flush() == 3
    assert cache.stats() == Stats(
        free=16, tree_evictable=0, tree_locked=0, leased=0, in_flight=0, evicted_pages_total=0, nodes=0, pinned=0
    )


def test_release_waits_for_the_step_in_flight() -> None:
    cache = make_cache(num_pages=2)
    lease = admit(cache, 1, 2, 3)
    cache.release(lease, after_step=7)
    assert cache.stats().in_flight == 2
    assert cache.admit(cache.match(DEMO, packed([9]), 1), 1) is None
    cache.step_done(6)
    assert cache.available == 0
    cache.step_done(7)
    assert cache.available == 2
    cache.release(lease, after_step=8)
    assert cache.available == 2


def test_a_released_lease_is_of_no_use() -> None:
    cache = make_cache()
    lease = read(cache, 1, 2)
    cache.release(lease, after_step=DONE)
    with pytest.raises(ValueError, match="admit the request again"):
        cache.grow(lease, 1)
    with pytest.raises(ValueError, match="admit the request again"):
        commit(cache, lease, 1, 2)


# ---- forks


def test_a_fork_shares_and_goes_its_own_way() -> None:
    cache = make_cache()
    first = admit(cache, 1, 2, 3, 4, 5, priority=3)
    commit(cache, first, 1, 2, 3, 4)
    second = cache.fork(first, 2)
    assert second is not None
    assert first.pages.tolist() == [0, 1, 2]
    assert second.pages.tolist() == [0, 1, 3, 4]
    assert (second.num_shared, second.num_private, second.priority) == (2, 2, 3)
    assert cache.show() == "tenant='demo'\n└─ 1 2|3 4 → 0 1  locked ×2"
    commit(cache, first, 1, 2, 3, 4, 5, 6)
    commit(cache, second, 1, 2, 3, 4, 5, 7)
    assert cache.show() == (
        "tenant='demo'\n└─ 1 2|3 4 → 0 1  locked\n   ├─ 5 6 → 2  locked ×1\n   └─ 5 7 → 3  locked ×1"
    )
    cache.release(first, after_step=DONE)
    cache.check()
    assert cache.flush() == 1
    assert second.pages.tolist() == [0, 1, 3, 4]
    cache.release(second, after_step=DONE)
    assert cache.flush() == 3


def test_a_fork_that_does_not_fit_leaves_no_trace() -> None:
    cache = make_cache(num_pages=4)
    lease = read(cache, 1, 2, 3)
    before, drawing = cache.stats(), cache.show()
    assert cache.fork(lease, 3) is None
    assert (cache.stats(), cache.show()) == (before, drawing)
    cached(cache, 7, 7)
    forked = cache.fork(lease, 2)
    assert forked is not None, "what nobody uses makes room"
    cache.release(lease, after_step=DONE)
    with pytest.raises(ValueError, match="admit the request again"):
        cache.fork(lease, 0)
    cache.check()


# ---- sizes


def test_a_pool_of_one_page() -> None:
    cache = make_cache(num_pages=1)
    first = read(cache, 1, 2)
    assert cache.admit(cache.match(DEMO, packed([1, 2, 3]), 3), 1) is None
    cache.release(first, after_step=DONE)
    match = cache.match(DEMO, packed([1, 2, 3]), 3)
    assert match.num_pages == 1
    assert cache.admit(match, 1) is None, "the only page holds its prefix"
    second = admit(cache, 8, 9)
    assert second.pages.tolist() == [0]
    assert hit(cache, 1, 2, 3) == 0
    cache.check()


def test_a_lease_of_no_pages() -> None:
    cache = make_cache()
    lease = admit(cache)
    assert lease.pages.tolist() == []
    assert cache.grow(lease, 2)
    cache.release(lease, after_step=DONE)
    assert cache.stats().free == 16


def test_a_cache_that_is_off() -> None:
    cache = make_cache(enabled=False)
    lease = read(cache, 1, 2, 3, 4)
    assert (lease.num_shared, lease.num_private) == (0, 2)
    cache.release(lease, after_step=DONE)
    assert hit(cache, 1, 2, 3, 4, 5) == 0
    assert (cache.stats().free, cache.show()) == (16, "")
    cache.check()


@pytest.mark.parametrize("chained", [False, True])
def test_what_a_page_costs(chained: bool) -> None:
    """100 bytes at most, tokens included, where nodes have 32 pages: beside each other, or eight in a row."""
    page_size, num_nodes = 16, 256
    cache = make_cache(num_pages=num_nodes * 32, page_size=page_size)
    rng = np.random.default_rng(0)
    runs = [rng.integers(0, 50_000, 32 * page_size, "<i4").tobytes() for _ in range(num_nodes)]
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for number, run in enumerate(runs):
        cache.tick(float(number))
        path = b"".join([*runs[number - number % 8 : number], run]) if chained else bytes(bytearray(run))
        match = cache.match(DEMO, path, len(path) // 4)
        lease = cache.admit(match, len(path) // 4 // page_size - match.num_pages, number % 5)
        assert lease is not None
        cache.commit(lease, path, len(path) // 4, after_step=DONE)
        cache.release(lease, after_step=DONE, tail=path[-40:])
        del match, lease, path
    used = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert cache.stats().nodes == num_nodes
    assert used / (num_nodes * 32) < 100


def test_memory_does_not_grow_with_namespaces() -> None:
    cache = make_cache()
    for salt in range(200):
        cached(cache, 1, 2, 3, 4, namespace=space("demo", f"salt {salt}"))
        cache.match(space(f"other {salt}"), packed([1, 2, 3]), 3)
    assert cache.stats().nodes == len(cache.tree._roots) == 8
    cache.flush()
    assert len(cache.tree._roots) == 0


def test_the_same_calls_give_the_same_pages() -> None:
    def life() -> list[str]:
        cache, drawings = make_cache(num_pages=24, page_size=1), []
        rng = np.random.default_rng(5)
        leases = []
        for step in range(300):
            tokens = rng.integers(0, 3, size=8).tolist()
            match = cache.match(space("demo", str(step % 2)), packed(tokens), 8)
            if (lease := cache.admit(match, 8 - match.num_pages)) is not None:
                cache.commit(lease, packed(tokens), 8, after_step=step)
                leases.append(lease)
            if len(leases) > 1:
                cache.release(leases.pop(0), after_step=step)
            cache.step_done(step - 1)
            drawings.append(cache.show())
        return drawings

    assert life() == life()


# ---- the audit


def test_check_finds_what_leases_and_tree_disagree_on() -> None:
    cache = make_cache()
    lease = read(cache, 1, 2, 3, 4, 5)
    cache.check()
    lease._buffer[0] = 9
    with pytest.raises(AssertionError, match=r"takes \[9, 1\] for its shared pages, but the tree has \[0, 1\]"):
        cache.check()
    lease._buffer[:] = [0, 1, 1]
    with pytest.raises(AssertionError, match=r"page 1 has two owners: the node 1 2\|3 4 → 0 1 and lease 0"):
        cache.check()
    lease._buffer[:] = [0, 1, 2]
    cache.tree.lock(lease.node)
    with pytest.raises(AssertionError, match="2 locks at depth 2, but 1 leases and pins end there"):
        cache.check()
    cache.tree.unlock(lease.node)
    cache._num_leased += 1
    with pytest.raises(AssertionError, match="2 private pages are counted, but leases have 1"):
        cache.check()
