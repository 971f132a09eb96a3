from hashlib import sha256

from tests.radix.factories import DEMO, DONE, admit, cached, commit, look_up, packed, read, space
from trunkline.radix.cache import PrefixCache
from trunkline.radix.events import root_hash
from trunkline.radix.ghosts import ADMISSION, CAUSES, FLUSH, GROWTH, QUOTA, Ghost, Ghosts


def make_cache(num_pages: int = 8, tenant_share: float = 1.0) -> PrefixCache:
    return PrefixCache(num_pages=num_pages, page_size=2, tenant_share=tenant_share)


def gone(cache: PrefixCache, *tokens: int) -> Ghost | None:
    """What is known of the page with the last two tokens, where the tree has all before."""
    match = look_up(cache, *tokens[:-2], 0)
    assert match.num_tokens == len(tokens) - 2
    return cache.ghost(match.node, packed(tokens[-2:]))


def test_the_oldest_is_forgotten() -> None:
    ghosts = Ghosts(capacity=2)
    first, second, third = (Ghost(float(time), ADMISSION) for time in range(3))
    ghosts.add(b"a", first)
    ghosts.add(b"b", first)
    ghosts.add(b"a", second)
    ghosts.add(b"c", third)
    assert (ghosts.get(b"a"), ghosts.get(b"b"), ghosts.get(b"c")) == (second, None, third)
    assert len(ghosts) == 2


def test_each_cause() -> None:
    cache = make_cache(num_pages=4, tenant_share=0.5)
    cached(cache, 1, 1)
    cache.tick(1.0)
    lease = admit(cache, 2, 2, 2, 2, 2, 2, 2, 2)
    assert gone(cache, 1, 1) == Ghost(1.0, ADMISSION)
    cache.release(lease, after_step=DONE)

    cached(cache, 3, 3)
    cache.tick(2.0)
    lease = admit(cache, 4, 4)
    assert cache.grow(lease, 3)
    assert gone(cache, 3, 3) == Ghost(2.0, GROWTH)
    cache.release(lease, after_step=DONE)

    cached(cache, 5, 5)
    cache.tick(3.0)
    cached(cache, 6, 6)
    cached(cache, 7, 7)
    assert gone(cache, 5, 5) == Ghost(3.0, QUOTA)

    cache.tick(4.0)
    cache.flush()
    assert gone(cache, 6, 6) == gone(cache, 7, 7) == Ghost(4.0, FLUSH)
    assert {ADMISSION, GROWTH, QUOTA, FLUSH} == set(CAUSES)


def test_a_run_is_known_by_its_first_page() -> None:
    cache = make_cache()
    cached(cache, 1, 1, 2, 2, 3, 3)
    cached(cache, 1, 1, 9, 9)
    cache.tick(5.0)
    cache.evict(2)
    assert gone(cache, 1, 1, 2, 2) == Ghost(5.0, ADMISSION)
    assert gone(cache, 1, 1, 8, 8) is None, "never seen"
    name = sha256(root_hash(DEMO) + packed([1, 1, 2, 2])).digest()[:16]
    assert cache.ghosts.get(name) == Ghost(5.0, ADMISSION)
    assert len(cache.ghosts) == 1


def test_of_a_tail_that_is_cut_off_the_node_knows() -> None:
    cache = make_cache()
    cached(cache, 1, 1, 2, 2, 3, 3)
    cache.tick(1.0)
    cache.evict(1)
    cache.tick(2.0)
    cache.evict(1)
    assert gone(cache, 1, 1, 2, 2) == Ghost(2.0, ADMISSION)
    (node,) = cache.tree.nodes()
    assert node.trimmed == (packed([2, 2]), Ghost(2.0, ADMISSION))
    assert node.sha is None, "nothing was hashed"
    assert len(cache.ghosts) == 0

    cached(cache, 1, 1, 2, 2)
    assert node.trimmed is None, "it is back"
    cache.tick(3.0)
    cache.evict(1)
    assert gone(cache, 1, 1, 2, 2) == Ghost(3.0, ADMISSION)


def test_a_tail_that_was_cut_off_is_known_through_splits_and_other_children() -> None:
    cache = make_cache()
    cached(cache, 1, 1, 2, 2, 3, 3)
    cache.tick(1.0)
    cache.evict(1)
    cached(cache, 1, 1, 9, 9)
    cached(cache, 1, 1, 2, 2, 8, 8)
    assert gone(cache, 1, 1, 2, 2, 3, 3) == Ghost(1.0, ADMISSION)
    cache.check()


def test_a_join_remembers_what_was_cut_off_where_it_joins() -> None:
    cache = make_cache(num_pages=16)
    twin = admit(cache, 1, 1, 2, 2, 4, 4)
    cached(cache, 1, 1, 2, 2, 3, 3)
    cache.tick(1.0)
    cache.evict(1)
    commit(cache, twin, 1, 1, 2, 2)
    commit(cache, twin, 1, 1, 2, 2, 4, 4)
    assert cache.stats().nodes == 1, "one run, whose second page ends inside"
    assert gone(cache, 1, 1, 2, 2, 3, 3) == Ghost(1.0, ADMISSION)


def test_a_ghost_keeps_to_its_namespace() -> None:
    cache = make_cache()
    cached(cache, 1, 1, namespace=space("a"))
    cache.evict(1)
    assert gone(cache, 1, 1) is None
    assert cache.ghost(look_up(cache, 0, namespace=space("a")).node, packed([1, 1])) is not None


def test_a_flush_takes_one_tenants_pages_and_leaves_what_is_in_use() -> None:
    cache = make_cache(num_pages=16)
    lease = read(cache, 1, 1, 2, 2)
    cached(cache, 1, 1, 2, 2, 3, 3)
    cached(cache, 4, 4, namespace=space("a"))
    cached(cache, 4, 4, namespace=space("a", "salt"))
    cache.tick(7.0)
    assert cache.flush(lambda namespace: namespace.tenant == "a") == 2
    assert cache.flush(lambda namespace: namespace.tenant == "a") == 0
    assert cache.tenant_pages == {"demo": 3}
    assert cache.flush() == 1
    assert lease.pages.tolist() == [0, 1]
    assert gone(cache, 1, 1, 2, 2, 3, 3) == Ghost(7.0, FLUSH)
    cache.check()
