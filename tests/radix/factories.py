"""Small makers that the radix tests share."""

from collections.abc import Iterable

import numpy as np

from trunkline.radix.cache import Lease, Match, PrefixCache
from trunkline.radix.events import Namespace

DONE = -1  # after_step of a page that no step in flight can touch


def space(tenant: str, salt: str = "") -> Namespace:
    """Whose KV it is: drawn as `tenant='demo'`."""
    return Namespace(tenant=tenant, salt=salt)


DEMO = space("demo")


def packed(tokens: Iterable[int]) -> bytes:
    """Token ids as the cache takes them: packed([1, 2]) is b"\\1\\0\\0\\0\\2\\0\\0\\0"."""
    return np.fromiter(tokens, "<i4").tobytes()


def look_up(cache: PrefixCache, *tokens: int, namespace: Namespace = DEMO) -> Match:
    return cache.match(namespace, packed(tokens), len(tokens))


def admit(cache: PrefixCache, *tokens: int, namespace: Namespace = DEMO, priority: int = 0) -> Lease:
    """A lease with room for just these tokens."""
    match = look_up(cache, *tokens, namespace=namespace)
    lease = cache.admit(match, -(-len(tokens) // cache.page_size) - match.num_pages, priority)
    assert lease is not None, f"{cache.stats()} has no room for {len(tokens)} tokens"
    return lease


def commit(cache: PrefixCache, lease: Lease, *tokens: int, after_step: int = DONE) -> int:
    """Share all whole pages of these tokens, as if they were computed."""
    return cache.commit(lease, packed(tokens), len(tokens), after_step=after_step)


def read(cache: PrefixCache, *tokens: int, namespace: Namespace = DEMO, priority: int = 0) -> Lease:
    """A lease of these tokens, computed and committed."""
    lease = admit(cache, *tokens, namespace=namespace, priority=priority)
    commit(cache, lease, *tokens)
    return lease


def cached(cache: PrefixCache, *tokens: int, namespace: Namespace = DEMO, priority: int = 0) -> None:
    """Leave these tokens in the tree, with nobody holding them."""
    cache.release(read(cache, *tokens, namespace=namespace, priority=priority), after_step=DONE)
