"""A recorded hour of chats, replayed: the hit rate must be that of a plain LRU over single pages.

The trace is Mooncake's conversation trace (FAST '25): prompt lengths, and one hash for each 512 tokens. Other caches that
evict by page were measured with the same requests, 8 of them running at a time: these are the numbers to meet.
"""

import pytest

from tests.data import data_file
from trunkline.bench.replay import replay
from trunkline.radix.cache import PrefixCache
from trunkline.traces import read_trace

PAGE_SIZE = 16
REQUESTS = 2000


@pytest.mark.slow
@pytest.mark.parametrize(("num_tokens", "hit_rate"), [(2**20, 0.0499), (2**22, 0.1870)])
def test_hit_rate_is_that_of_an_lru_over_pages(num_tokens: int, hit_rate: float) -> None:
    rows = read_trace(data_file("traces/conversation_trace.jsonl"), limit=REQUESTS)
    cache = PrefixCache(num_pages=num_tokens // PAGE_SIZE, page_size=PAGE_SIZE)
    result = replay(cache, rows, running=8)
    cache.check()
    assert result.requests == REQUESTS
    assert round(result.hit_rate, 4) == hit_rate
