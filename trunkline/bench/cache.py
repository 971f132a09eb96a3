"""What the prefix cache costs, operation by operation: time of this process, in microseconds. No model, no server.

Times are the best of several rounds, so that what else runs on the machine counts little. Operations that cannot be
repeated on the same tree (inserting, evicting) are the median of many. Every match is measured beside
`bytes.startswith` over the same tokens, the least that any comparison of them can take, round by round in turn.
"""

import gc
import statistics
import time
import tracemalloc
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from trunkline.radix.cache import Lease, Match, PrefixCache
from trunkline.radix.events import NOBODY

PAGE_SIZE = 16
CHAIN_NODE = 512  # tokens of each node of a chain
MATCH_LENGTHS = (1024, 8192, 32768, 131072)  # tokens
EVICTED_PAGES = (1, 16, 256)
LEAVES = (1_000, 10_000, 50_000)
LEAF_PAGES = 4
NODE_PAGES = (4, 32, 256)
METADATA_PAGES = 65536  # pages of the trees whose memory is measured
INSERT_LENGTHS = (1024, 32768)  # tokens
INSERTS = 64  # prompts that fill a cache
ROUNDS = 15
ROUND_SECONDS = 2e-3  # an operation is repeated so long in each round
EVICTIONS = 64  # of each kind, or until a tenth of the tree is gone
NO_STEP = -1  # after_step of a page that no step in flight can touch


class MatchTimes(NamedTuple):
    """Microseconds of finding a warm prompt again. Chains have a node for each 512 tokens.

    startswith  one comparison of the whole prompt
    row         the pages of the match, as one array
    lock        locking and unlocking a path that nobody else has locked
    """

    tokens: int
    startswith: float
    one_node: float
    chain: float
    row_one_node: float
    row_chain: float
    lock_one_node: float
    lock_chain: float


class EvictTime(NamedTuple):
    """Microseconds of evicting so many pages from a tree of so many leaves, each of LEAF_PAGES pages."""

    pages: int
    leaves: int
    microseconds: float


class Measured(NamedTuple):
    """Everything but the replay.

    insert    tokens -> microseconds of admitting and committing a new prompt of that length, evictions included
    metadata  pages a node -> bytes of memory a page, the tokens themselves included
    """

    match: list[MatchTimes]
    insert: dict[int, float]
    evict: list[EvictTime]
    metadata: dict[int, float]


def measure() -> Measured:
    """All of it; takes a minute or less. The garbage collector is off meanwhile, so that it is in nobody's time."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        return Measured(
            match=[match_times(length) for length in MATCH_LENGTHS],
            insert={length: insert_time(length) for length in INSERT_LENGTHS},
            evict=evict_times(),
            metadata={pages: metadata_bytes(pages, num_pages=METADATA_PAGES) for pages in NODE_PAGES},
        )
    finally:
        if collecting:
            gc.enable()


def match_times(num_tokens: int) -> MatchTimes:
    """A prompt of `num_tokens` tokens and one more, found whole."""
    prompt = tokens(num_tokens + 1)
    whole, chain = warm_cache(prompt, num_tokens), warm_cache(prompt, CHAIN_NODE)
    copy = prompt[: 4 * num_tokens]
    in_whole, in_chain = (cache.match(NOBODY, prompt, num_tokens + 1) for cache in (whole, chain))
    assert in_whole.num_tokens == in_chain.num_tokens == num_tokens
    microseconds = best(
        lambda: prompt.startswith(copy),
        lambda: whole.match(NOBODY, prompt, num_tokens + 1),
        lambda: chain.match(NOBODY, prompt, num_tokens + 1),
        lambda: whole.tree.page_ids(in_whole.node),
        lambda: chain.tree.page_ids(in_chain.node),
        lambda: lock_and_unlock(whole, in_whole),
        lambda: lock_and_unlock(chain, in_chain),
    )
    return MatchTimes(num_tokens, *microseconds)


def lock_and_unlock(cache: PrefixCache, match: Match) -> None:
    """As a lease of the match would, from its beginning to its end."""
    cache.tree.lock(match.node)
    cache.tree.unlock(match.node)


def insert_time(num_tokens: int) -> float:
    """A new prompt after another, in a cache that is full: admitting evicts, committing inserts."""
    num_pages = num_tokens // PAGE_SIZE
    cache = PrefixCache(num_pages=INSERTS * num_pages, page_size=PAGE_SIZE)
    samples = []
    for number in range(3 * INSERTS):
        prompt = tokens(num_tokens, number)
        started = time.perf_counter()
        read(cache, prompt)
        samples.append(time.perf_counter() - started)
    return 1e6 * statistics.median(samples[INSERTS:])  # the pool is full from there on


def evict_times() -> list[EvictTime]:
    """Every number of pages from every size of tree, one eviction in turn from each."""
    found = []
    for pages in EVICTED_PAGES:
        caches = [broad_cache(leaves) for leaves in LEAVES]
        samples: list[list[float]] = [[] for _ in caches]
        for _ in range(min(EVICTIONS, LEAVES[0] * LEAF_PAGES // (2 * pages))):
            for cache, mine in zip(caches, samples, strict=True):
                started = time.perf_counter()
                cache.evict(pages)
                mine.append(time.perf_counter() - started)
        found += [
            EvictTime(pages, leaves, 1e6 * statistics.median(mine))
            for leaves, mine in zip(LEAVES, samples, strict=True)
        ]
    return found


def metadata_bytes(node_pages: int, *, num_pages: int) -> float:
    """Bytes a page that the tree takes beside the pool, with nodes of so many pages."""
    cache = PrefixCache(num_pages=num_pages, page_size=PAGE_SIZE)
    num_tokens = node_pages * PAGE_SIZE
    tracemalloc.start()
    try:
        for number in range(num_pages // node_pages):
            read(cache, tokens(num_tokens, number))
        gc.collect()
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert cache.stats().nodes == num_pages // node_pages
    return taken / num_pages


def tokens(num_tokens: int, prompt: int = 0) -> bytes:
    """int32 little-endian; different prompts have no token in common."""
    start = prompt * num_tokens
    return np.arange(start, start + num_tokens, dtype="<i4").tobytes()


def warm_cache(prompt: bytes, node_tokens: int) -> PrefixCache:
    """A cache that has read the prompt, with a node for each `node_tokens` tokens of it, and not what is left over."""
    num_tokens = len(prompt) // 4 // node_tokens * node_tokens
    cache = PrefixCache(num_pages=2 * num_tokens // PAGE_SIZE, page_size=PAGE_SIZE)
    ends = range(node_tokens, num_tokens + 1, node_tokens)
    for lease in [hold(cache, prompt[: 4 * end]) for end in ends]:  # all held at first, so that nodes are not joined
        cache.release(lease, after_step=NO_STEP)
    assert cache.stats().nodes == num_tokens // node_tokens
    return cache


def broad_cache(leaves: int) -> PrefixCache:
    """A full cache of short prompts that have nothing in common."""
    cache = PrefixCache(num_pages=leaves * LEAF_PAGES, page_size=PAGE_SIZE)
    for number in range(leaves):
        read(cache, tokens(LEAF_PAGES * PAGE_SIZE, number))
    return cache


def read(cache: PrefixCache, prompt: bytes) -> None:
    """Admit, commit and release it, as if it were computed."""
    cache.release(hold(cache, prompt), after_step=NO_STEP)


def hold(cache: PrefixCache, prompt: bytes) -> Lease:
    """Admit and commit it, as if it were computed."""
    num_tokens = len(prompt) // 4
    match = cache.match(NOBODY, prompt, num_tokens)
    lease = cache.admit(match, num_tokens // PAGE_SIZE - match.num_pages)
    assert lease is not None
    cache.commit(lease, prompt, num_tokens, after_step=NO_STEP)
    return lease


def best(*operations: Callable[[], Any]) -> list[float]:
    """Microseconds of each operation: the fastest of several rounds, in which they take turns."""
    repeats = [_repeats(operation) for operation in operations]
    fastest = [float("inf")] * len(operations)
    for _ in range(ROUNDS):
        for i, (operation, count) in enumerate(zip(operations, repeats, strict=True)):
            fastest[i] = min(fastest[i], _seconds(operation, count) / count)
    return [1e6 * seconds for seconds in fastest]


def _repeats(operation: Callable[[], Any]) -> int:
    """How often it must be called to fill a round."""
    count = 1
    while _seconds(operation, count) < ROUND_SECONDS:
        count *= 2
    return count


def _seconds(operation: Callable[[], Any], count: int) -> float:
    rounds = [None] * count
    started = time.perf_counter()
    for _ in rounds:
        operation()
    return time.perf_counter() - started
