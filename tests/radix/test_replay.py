"""A recorded hour of chats, replayed: the hit rate must be that of a plain LRU over single pages.

The trace is Mooncake's conversation trace (FAST '25): prompt lengths, and one hash for each 512 tokens. Other caches that
evict by page were measured with the same requests, 8 of them running at a time: these are the numbers to meet.
"""

import json
from collections import deque
from collections.abc import Iterator
from functools import cache as remember
from itertools import islice

import numpy as np
import pytest

from tests.data import data_file
from tests.radix.factories import DONE
from trunkline.radix.cache import Lease, PrefixCache

PAGE_SIZE = 16
RUNNING = 8
REQUESTS = 2000


@remember
def block(hash_id: int) -> bytes:
    """512 tokens that go with a hash of the trace."""
    return np.random.default_rng(hash_id).integers(0, 49152, 512, dtype="<i4").tobytes()


def prompts() -> Iterator[tuple[bytes, int]]:
    """Tokens, and how many of them are the prompt."""
    with data_file("traces/conversation_trace.jsonl").open(encoding="utf-8") as lines:
        for line in islice(lines, REQUESTS):
            request = json.loads(line)
            tokens = b"".join(map(block, request["hash_ids"]))
            yield tokens, min(request["input_length"], len(tokens) // 4)


@pytest.mark.slow
@pytest.mark.parametrize(("num_tokens", "hit_rate"), [(2**20, 0.0499), (2**22, 0.1870)])
def test_hit_rate_is_that_of_an_lru_over_pages(num_tokens: int, hit_rate: float) -> None:
    cache = PrefixCache(num_pages=num_tokens // PAGE_SIZE, page_size=PAGE_SIZE)
    running: deque[Lease] = deque()
    hits = total = 0
    for tokens, length in prompts():
        match = cache.match("", tokens, length)
        hits += match.num_tokens
        total += length
        if len(running) == RUNNING:
            cache.release(running.popleft(), after_step=DONE)
        lease = cache.admit(match, length // PAGE_SIZE - match.num_pages)
        assert lease is not None
        cache.commit(lease, tokens, length, after_step=DONE)
        running.append(lease)
    cache.check()
    assert round(hits / total, 4) == hit_rate
