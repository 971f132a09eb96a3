"""Why a prompt is cached no further: every reason, built for real, and what shows of other tenants (nothing).

Page size 2. Namespaces are tenants unless a test says otherwise.
"""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.radix.factories import DONE, packed
from trunkline.messages import CacheReport
from trunkline.radix.cache import PrefixCache
from trunkline.radix.events import Namespace
from trunkline.radix.explain import MAX_CHILDREN, MAX_RELATED, explain, find
from trunkline.radix.ghosts import ADMISSION, FLUSH, GROWTH

ACME = Namespace(tenant="acme")
REPEATED = [1, 2, 3, 4, 5, 6, 7]  # three whole pages, and a token


def make_cache(num_pages: int = 64, **options: Any) -> PrefixCache:
    return PrefixCache(num_pages=num_pages, page_size=2, **options)


def keep(cache: PrefixCache, *tokens: int, namespace: Namespace = ACME, tail: bool = False) -> None:
    """Leave the whole pages of these tokens in the tree; with `tail`, also the knowledge of what follows them."""
    match = cache.match(namespace, packed(tokens), len(tokens))
    lease = cache.admit(match, cache.num_pages_of(len(tokens)) - match.num_pages)
    assert lease is not None
    cache.commit(lease, packed(tokens), len(tokens), after_step=DONE)
    rest = packed(tokens[len(tokens) // 2 * 2 :]) if tail else b""
    cache.release(lease, after_step=DONE, tail=rest)


def why(cache: PrefixCache, *tokens: int, namespace: Namespace = ACME, **options: Any) -> CacheReport:
    walk = find(cache, namespace, packed(tokens), len(tokens), options.get("limit"))
    return explain(cache, namespace, walk, packed(tokens), len(tokens), **options)


def report(cached_tokens: int, reason: str, prompt_tokens: int = len(REPEATED), **fields: Any) -> CacheReport:
    by_tier = {"device": cached_tokens} if cached_tokens else {}
    return CacheReport(
        prompt_tokens=prompt_tokens, cached_tokens=cached_tokens, cached_by_tier=by_tier, reason=reason, **fields
    )


def test_complete() -> None:
    cache = make_cache()
    keep(cache, *REPEATED)
    assert why(cache, *REPEATED) == report(6, "complete")
    assert why(cache, *REPEATED[:6]) == report(4, "complete", 6), "the last page has the last prompt token"
    assert why(cache, *REPEATED[:5]) == report(4, "complete", 5), "in the middle of a run"


def test_short() -> None:
    cache = make_cache()
    keep(cache, *REPEATED)
    for num_tokens in (1, 2):
        assert why(cache, *REPEATED[:num_tokens]) == report(0, "short", num_tokens)
    assert why(cache, 9, 9) == report(0, "short", 2)


def test_disabled() -> None:
    cache = make_cache(enabled=False)
    keep(cache, *REPEATED)
    assert why(cache, *REPEATED) == report(0, "disabled")
    assert why(cache, 1) == report(0, "disabled", 1)


def test_prompt_logprobs() -> None:
    cache = make_cache()
    keep(cache, *REPEATED)
    assert why(cache, *REPEATED, limit=0) == report(0, "prompt_logprobs")
    assert why(cache, *REPEATED, limit=3) == report(2, "prompt_logprobs")
    assert why(cache, *REPEATED, limit=7) == report(6, "complete")
    assert why(cache, 1, 2, limit=0) == report(0, "short", 2)


def test_unseen() -> None:
    cache = make_cache()
    assert why(cache, *REPEATED) == report(0, "unseen"), "nothing is cached"
    keep(cache, 8, 8, 8, 8)
    assert why(cache, *REPEATED) == report(0, "unseen"), "nothing in common"
    keep(cache, *REPEATED)
    assert why(cache, *REPEATED, 8, 9) == report(6, "unseen", 9), "nothing came after that"


def test_differs_at_a_node() -> None:
    cache = make_cache()
    keep(cache, *REPEATED[:4], 5, 9)
    keep(cache, *REPEATED[:4], 9, 9)
    assert why(cache, *REPEATED) == report(4, "differs", position=5, expected=packed([9]))
    keep(cache, *REPEATED[:4], 5, 8, *range(20, 40))
    newest = packed([8, *range(20, 27)])
    assert why(cache, *REPEATED) == report(4, "differs", position=5, expected=newest), "of two as near, the newer"


def test_differs_in_a_run() -> None:
    cache = make_cache()
    keep(cache, 1, 2, 3, 4, 9, 9, 9, 8)
    assert why(cache, *REPEATED) == report(4, "differs", position=4, expected=packed([9, 9, 9, 8]))
    assert why(cache, 1, 2, 3, 7, 7) == report(2, "differs", 5, position=3, expected=packed([4, 9, 9, 9, 8]))


def test_differs_at_the_root_only_if_something_is_the_same() -> None:
    cache = make_cache()
    keep(cache, 1, 3, 5, 7)
    assert why(cache, *REPEATED) == report(0, "differs", position=1, expected=packed([3, 5, 7]))
    assert why(cache, 2, 3, 4) == report(0, "unseen", 3)


def test_differs_in_what_followed_the_last_whole_page() -> None:
    cache = make_cache()
    keep(cache, 1, 2, 8, tail=True)
    assert why(cache, *REPEATED) == report(2, "differs", position=2, expected=packed([8]))
    assert why(cache, 1, 2, 8, 7, 7) == report(2, "unseen", 5), "what followed is the same, as far as it went"


def test_the_newest_children_are_compared() -> None:
    cache = make_cache()
    keep(cache, 1, 2, 3, 7)  # the nearest, but too long ago
    for token in range(100, 100 + MAX_CHILDREN):
        keep(cache, 1, 2, token, token)
    newest = packed([99 + MAX_CHILDREN] * 2)
    assert why(cache, *REPEATED) == report(2, "differs", position=2, expected=newest)


@pytest.mark.parametrize("cause", [ADMISSION, GROWTH])
def test_evicted(cause: str) -> None:
    cache = make_cache()
    keep(cache, *REPEATED)
    cache.tick(5.0)
    cache.evict(1, cause)
    cache.tick(12.5)
    assert why(cache, *REPEATED) == report(4, "evicted", seconds_ago=7.5, cause=cause), "the tail of a run"
    cache.evict(2, cause)
    assert why(cache, *REPEATED) == report(0, "evicted", seconds_ago=0.0, cause=cause), "the whole namespace"
    cache.tick(13.0)
    keep(cache, *REPEATED)
    assert why(cache, *REPEATED) == report(6, "complete"), "it has come back"


def test_evicted_from_below_a_node() -> None:
    cache = make_cache()
    keep(cache, *REPEATED)
    keep(cache, 1, 2, 9, 9)  # used later
    cache.evict(2)
    assert why(cache, *REPEATED) == report(2, "evicted", seconds_ago=0.0, cause=ADMISSION)
    assert why(cache, 1, 2, 3, 9, 9) == report(2, "differs", 5, position=2, expected=packed([9, 9])), "that never was"


def test_evicted_from_inside_a_run() -> None:
    """A run that was in two parts, one with a branch, is one again: what was evicted is still known."""
    cache = make_cache()
    keep(cache, 1, 2, 3, 4)
    match = cache.match(ACME, packed(REPEATED), 3)
    lease = cache.admit(match, 3)
    assert lease is not None
    cache.evict(1)  # `3 4`
    cache.commit(lease, packed([1, 2, 8, 8, 9, 9]), 6, after_step=DONE)
    assert why(cache, *REPEATED) == report(2, "evicted", seconds_ago=0.0, cause=ADMISSION)


def test_flushed() -> None:
    cache = make_cache()
    keep(cache, *REPEATED)
    cache.flush()
    assert why(cache, *REPEATED) == report(0, "evicted", seconds_ago=0.0, cause=FLUSH)


def test_computing() -> None:
    cache = make_cache()
    keep(cache, 1, 2)
    root = cache.tree.find_root(ACME)
    assert root is not None
    node = next(iter(root.children.values()))
    assert why(cache, *REPEATED, computing={(node, packed([3, 4]))}) == report(2, "computing")
    assert why(cache, *REPEATED, computing={(node, packed([3, 9]))}) == report(2, "unseen")
    assert why(cache, *REPEATED, computing={(root, packed([3, 4]))}) == report(2, "unseen")


def test_another_namespace() -> None:
    cache = make_cache()
    salted, adapted = ACME._replace(salt="s"), ACME._replace(adapter="a")
    keep(cache, 1, 2, 7, 7)
    for other in (salted, adapted):
        keep(cache, *REPEATED[:4], namespace=other)
        assert why(cache, *REPEATED, related=[ACME, other]) == report(2, "namespace")
        assert why(cache, 1, 2, 3, 9, 9, related=[other]).reason == "differs", "it doesn't have the missing page"
    assert why(cache, *REPEATED) == report(2, "differs", position=2, expected=packed([7, 7])), "no need to look there"
    other_weights = Namespace(tenant="acme", weights="w")
    assert why(cache, *REPEATED, namespace=other_weights, related=[ACME, salted]) == report(0, "unseen")


def test_a_bounded_number_of_namespaces_is_looked_into() -> None:
    cache = make_cache(256)
    salted = [ACME._replace(salt=str(i)) for i in range(MAX_RELATED + 1)]
    for namespace in salted[:-1]:
        keep(cache, 9, 9, namespace=namespace)
    keep(cache, *REPEATED, namespace=salted[-1])
    assert why(cache, *REPEATED, related=salted).reason == "unseen"
    assert why(cache, *REPEATED, related=salted[1:]).reason == "namespace"


def test_lower_tiers() -> None:
    """What is missing is the first page that no tier has."""
    cache = make_cache()
    keep(cache, *REPEATED)
    keep(cache, 1, 2, 3, 4, 9, 9)
    cache.evict(1)  # `5 6`
    told = why(cache, *REPEATED, 8, 9, beyond={"host": 1})
    assert (told.cached_tokens, told.cached_by_tier) == (6, {"device": 4, "host": 2})
    assert told.reason == "unseen", "of the page `7 8` nothing is known, and `9 9` is nowhere near it"
    assert why(cache, *REPEATED, beyond={"disk": 1}).reason == "complete"
    cache.evict(3)
    told = why(cache, *REPEATED, beyond={"host": 1, "disk": 1})
    assert (told.cached_by_tier, told.reason) == ({"host": 2, "disk": 2}, "evicted")


def test_what_is_known_comes_before_what_is_like_it() -> None:
    """Each reason where all that come after it hold, too."""
    cache = make_cache()
    salted = ACME._replace(salt="s")
    keep(cache, *REPEATED, namespace=salted)
    keep(cache, *REPEATED)
    cache.evict(3)  # of the salted
    cache.evict(2)
    keep(cache, *REPEATED, namespace=salted)
    keep(cache, 1, 2, 3, 9)
    (node,) = (node for node in cache.tree.nodes() if node.namespace == ACME and node.depth == 1)
    computing, related = {(node, packed([3, 4]))}, [salted]
    nearest: dict[str, Any] = {"position": 3, "expected": packed([9])}
    assert why(cache, *REPEATED, computing=computing, related=related) == report(2, "computing")
    assert why(cache, *REPEATED, related=related).reason == "evicted"
    cache.ghosts = type(cache.ghosts)()
    node.trimmed = None
    assert why(cache, *REPEATED, related=related) == report(2, "namespace")
    assert why(cache, *REPEATED) == report(2, "differs", **nearest)


# ---- two tenants

tokens_of_a_prompt = st.lists(st.integers(0, 2), min_size=1, max_size=12)


@given(
    ours=st.lists(tokens_of_a_prompt, max_size=4),
    theirs=st.lists(tokens_of_a_prompt, max_size=4),
    asked=tokens_of_a_prompt,
)
def test_nothing_shows_of_another_tenant(ours: list[list[int]], theirs: list[list[int]], asked: list[int]) -> None:
    """The report is the same, byte for byte, whatever another tenant has cached, and names only tokens of one's own."""
    alone, beside = make_cache(512), make_cache(512)
    foreign = Namespace(tenant="other"), Namespace(tenant="other", salt="s")
    for tokens in ours:
        keep(alone, *tokens)
        keep(beside, *tokens)
    for namespace in foreign:
        for tokens in theirs:
            keep(beside, *(token + 1 for token in tokens), namespace=namespace)
            keep(beside, *tokens, namespace=namespace)
    told = why(beside, *asked, related=foreign)
    assert told == why(alone, *asked)
    if told.position is not None:
        expected = np.frombuffer(told.expected, "<i4").tolist()
        assert any(tokens[told.position : told.position + len(expected)] == expected for tokens in ours)


@given(st.lists(tokens_of_a_prompt, max_size=6), tokens_of_a_prompt, st.integers(0, 20))
def test_looking_changes_nothing(prompts: list[list[int]], asked: list[int], num_evicted: int) -> None:
    cache = make_cache()
    for tokens in prompts:
        keep(cache, *tokens)
    cache.evict(num_evicted)
    before = cache.show(), [(node.hits, node.last_used, node.depth) for node in cache.tree.nodes()]
    told = why(cache, *asked)
    assert before == (cache.show(), [(node.hits, node.last_used, node.depth) for node in cache.tree.nodes()])
    assert told.cached_tokens == cache.match(ACME, packed(asked), len(asked)).num_tokens
    assert told == why(cache, *asked), "after the match has split a run"
