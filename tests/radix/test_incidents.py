"""What went wrong in other caches, as their public reports tell it, tried on this one. The names are those of the reports.

Only what isn't said by another test here: most of these are rules of machine.py, or bugs in test_planted_bugs.py.
docs/failures.md has the whole list.
"""

from itertools import product

import pytest

from tests.radix.factories import DONE, admit, cached, commit, look_up, packed, read, space
from trunkline.radix import tree as tree_module
from trunkline.radix.cache import Event, PrefixCache
from trunkline.radix.events import NOBODY, Namespace, Stored, chain, root_hash


def make_cache(num_pages: int = 16, page_size: int = 2) -> PrefixCache:
    return PrefixCache(num_pages=num_pages, page_size=page_size)


def hit(cache: PrefixCache, *tokens: int, namespace: Namespace = NOBODY) -> int:
    return look_up(cache, *tokens, namespace=namespace).num_tokens


# ---- pages


def test_a_finish_while_the_next_page_is_being_written() -> None:
    """sgl-jax 982: one page was freed by the end of the request, and by the step that had been planned past it."""
    cache = make_cache(num_pages=4)
    lease = read(cache, 1, 2, 3)
    assert cache.grow(lease, 1)
    cache.release(lease, after_step=7)  # step 7 writes to that page; the request ends with step 6
    cache.step_done(6)
    assert cache.stats().in_flight == 2
    cache.check()
    cache.step_done(7)
    cache.release(lease, after_step=8)
    assert (cache.stats().in_flight, cache.stats().free) == (0, 3)
    cache.check()


@pytest.mark.parametrize("num_computed", range(9))
def test_an_end_off_the_grid_of_pages(num_computed: int) -> None:
    """sgl 38941: two runs that were freed met inside one page."""
    cache = make_cache(page_size=4)
    tokens = [*range(9)]
    lease = admit(cache, *tokens)
    cache.commit(lease, packed(tokens), num_computed, after_step=DONE)
    cache.release(lease, after_step=DONE)
    assert cache.stats().free == 16 - num_computed // 4
    cache.check()


def test_an_abort_between_two_chunks() -> None:
    """sgl 38319: pages of the first chunk were freed although the tree had them, and poisoned every later hit."""
    cache = make_cache(num_pages=6)
    lease = admit(cache, 1, 2, 3, 4, 5, 6, 7)
    commit(cache, lease, 1, 2, 3, 4)
    shared = lease.pages[:2].tolist()
    cache.release(lease, after_step=DONE)
    other = admit(cache, 8, 8, 8, 8, 8, 8, 8, 8)
    assert not {*shared} & {*other.pages.tolist()}
    again = look_up(cache, 1, 2, 3, 4, 5, 6, 7)
    assert cache.tree.page_ids(again.node).tolist() == shared
    cache.check()


def test_an_abort_before_anything_is_shared() -> None:
    """TRT-LLM 12933: pages that were computed, and not registered yet, came back with old contents."""
    cache = make_cache()
    lease = admit(cache, 1, 2, 3, 4)
    cache.release(lease, after_step=DONE)
    assert hit(cache, 1, 2, 3, 4, 5) == 0
    assert cache.stats().nodes == 0


def test_nothing_is_found_after_everything_was_replaced() -> None:
    """vllm 480 of local-inference-lab: hits of pages that a huge request had taken long since; kvcached 362."""
    cache = make_cache(num_pages=16)
    for token in range(8):
        cached(cache, token, token, token, token, namespace=NOBODY)
    huge = read(cache, *[9] * 32, namespace=NOBODY)
    for token in range(8):
        assert hit(cache, token, token, token, token, 0) == 0
    cache.release(huge, after_step=DONE)
    cached(cache, 1, 1, namespace=NOBODY)
    assert hit(cache, *[9] * 32) == 30
    cache.check()


def test_a_thousand_admissions_that_fail_leave_no_lock() -> None:
    """sgl 16067, vllm 44100: locks of a look-up outlived the admission that failed."""
    cache = make_cache(num_pages=4)
    cached(cache, 1, 1, 2, 2, namespace=NOBODY)
    running = admit(cache, 7, 7, 7)
    for _ in range(1000):
        assert cache.admit(look_up(cache, 1, 1, 2, 2, 0, namespace=NOBODY), 1) is None
    assert cache.stats().tree_locked == 0
    cache.release(running, after_step=DONE)
    assert cache.evict(4) == 2


# ---- whose they are


def test_adapters_never_share() -> None:
    """vllm 3264, 8240; xllm 2047."""
    cache = make_cache()
    spaces = (NOBODY, Namespace(adapter="A"), Namespace(adapter="B"))
    for namespace in spaces:
        assert hit(cache, 1, 2, 3, namespace=namespace) == 0
        cached(cache, 1, 2, 3, namespace=namespace)
    pages = [cache.tree.page_ids(look_up(cache, 1, 2, 3, namespace=namespace).node).tolist() for namespace in spaces]
    assert len({page for run in pages for page in run}) == 3


def test_fields_are_never_taken_for_one_another() -> None:
    """vllm 44701: an adapter called like a salt; tinfoil 386: org_1 + 2345 and org_12 + 345."""
    cache = make_cache(num_pages=300)
    spaces = [Namespace(*fields) for fields in product(("", "X", "X1"), repeat=4)]
    for namespace in spaces:
        assert hit(cache, 1, 2, 3, namespace=namespace) == 0
        cached(cache, 1, 2, namespace=namespace)
    assert len({root_hash(namespace) for namespace in spaces}) == len(spaces) == cache.stats().nodes


def test_other_weights_under_the_same_name() -> None:
    """vllm 30931, 42125; lmdeploy 4917: pages of weights that are no longer loaded."""
    cache = make_cache()
    cached(cache, 1, 2, namespace=Namespace(weights="before", tenant="me"))
    assert hit(cache, 1, 2, 3, namespace=Namespace(weights="after", tenant="me")) == 0
    assert hit(cache, 1, 2, 3, namespace=Namespace(weights="before", tenant="me")) == 2


# ---- security


def test_equal_hashes_find_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """GHSA-rm76-4mrf-v9r8, megatron 4158: whoever made hashes collide read another prompt's pages. Here tokens are compared."""

    def collide(parent: bytes, tokens: bytes, page_bytes: int) -> bytes:
        return bytes(16) * (len(tokens) // page_bytes)

    monkeypatch.setattr(tree_module, "chain", collide)
    monkeypatch.setattr(tree_module.RadixTree, "path_hash", lambda self, node, after: bytes(16))
    cache = make_cache()
    cached(cache, 1, 2, 3, 4, namespace=NOBODY)
    match = look_up(cache, 1, 2, 3, 4, 0, namespace=NOBODY)
    assert (match.num_tokens, cache.tree.prefix_hash(match.node)) == (4, bytes(16))
    assert hit(cache, 5, 6, 7, 8, 0) == 0
    assert hit(cache, 1, 2, 7, 8, 0) == 2
    assert hit(cache, 1, 2, 3, 4, 0, namespace=space("other")) == 0


# Pages of other tokens with an equal hash, for hashes that are easily computed backwards.
COLLISIONS = {
    "h · 31 + token": ([7, 100, 0, 0], [8, 69, 0, 0]),
    "sum of tokens": ([7, 100, 0, 0], [8, 99, 0, 0]),
    "exclusive or": ([7, 100, 5, 0], [7, 5, 100, 0]),
    "Python's hash of -1 and -2": ([-1, 5, 0, 0], [-2, 5, 0, 0]),
    "16 bits of a token": ([7, 100, 0, 0], [7 + 2**16, 100, 0, 0]),
    "digits one after the other": ([1, 23, 0, 0], [12, 3, 0, 0]),
}


@pytest.mark.parametrize("before", [[], [1, 2, 3, 4]], ids=["first page", "inside a run"])
@pytest.mark.parametrize("collision", COLLISIONS)
def test_tokens_that_a_weak_hash_takes_for_equal(collision: str, before: list[int]) -> None:
    """aibrix 749, vllm 12621, Megatron 4158: neither the tree nor the names that the tiers use take them for equal."""
    mine, theirs = ([*before, *page] for page in COLLISIONS[collision])
    cache = make_cache(page_size=4)
    cached(cache, *mine, namespace=NOBODY)
    assert hit(cache, *theirs, 9) == len(before)
    assert hit(cache, *mine, 9) == len(mine)
    assert chain(root_hash(NOBODY), packed(mine), 16)[-16:] != chain(root_hash(NOBODY), packed(theirs), 16)[-16:]


def test_tokens_are_found_at_their_own_position_only() -> None:
    """An equal page behind other tokens is another page, in the tree and by its name."""
    cache = make_cache()
    cached(cache, 1, 2, 3, 4, namespace=NOBODY)
    assert hit(cache, 3, 4, 5) == 0
    assert hit(cache, 1, 2, 1, 2, 3, 4, 5) == 2
    paths = ([3, 4], [1, 2, 3, 4], [3, 4, 3, 4], [1, 2, 1, 2, 3, 4])
    assert len({chain(root_hash(NOBODY), packed(path), 8)[-16:] for path in paths}) == len(paths)


def test_time_tells_nothing_of_another_salt() -> None:
    """CVE-2025-46570: how long the first token takes told whether somebody had sent the same prompt before."""
    cache = make_cache(num_pages=64)
    secret = [5, 3, 5, 3, 8, 8]
    cached(cache, *secret, namespace=space("victim", "a"))
    for length in range(1, 7):
        for foreign in (space("thief"), space("thief", "a"), space("victim"), space("victim", "b"), space("", "a")):
            match = look_up(cache, *secret[:length], 0, namespace=foreign)
            assert match.num_tokens == 0
            assert cache.ghost(match.node, packed(secret[:2])) is None
            lease = admit(cache, *secret[:length], namespace=foreign)
            assert cache.continuation(lease, packed(secret), length, 9) == b""
            cache.release(lease, after_step=DONE)
    assert hit(cache, *secret, 0, namespace=space("victim", "a")) == 6


def test_events_rebuild_the_tree() -> None:
    """TRT-LLM 3543: events named parents that nobody had heard of; llm-d-router 2927: and whose pages they were."""
    events: list[Event] = []
    cache = PrefixCache(num_pages=24, page_size=2, tenant_share=0.5, on_event=events.append)
    for number in range(60):
        tokens = [number % 2, number % 3, number % 5, 1, number % 7, 2, number % 4, 3]
        cached(cache, *tokens, namespace=space(f"tenant {number % 3}"))
    prefixes: dict[bytes, tuple[Namespace, bytes]] = {}  # by prefix hash: all up to there
    for event in events:
        name, path = event.parent, prefixes.get(event.parent, (event.namespace, b""))[1]
        assert name in prefixes or name == root_hash(event.namespace)
        for start in range(0, len(event.tokens), 8):
            page = event.tokens[start : start + 8]
            name, path = chain(name, page, 8), path + page
            if isinstance(event, Stored):
                assert name not in prefixes
                prefixes[name] = event.namespace, path
            else:
                assert prefixes.pop(name) == (event.namespace, path)
    in_tree = set()
    for node in cache.tree.nodes():
        path = b"".join(above.tokens for above in reversed([*cache.tree.path(node)]))
        first = len(path) - len(node.tokens)
        in_tree |= {(node.namespace, path[:end]) for end in range(first + 8, len(path) + 1, 8)}
    assert {*prefixes.values()} == in_tree
    assert any(not isinstance(event, Stored) for event in events)
