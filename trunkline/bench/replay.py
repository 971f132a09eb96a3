"""A trace through the prefix cache alone, request by request: hit rate, and CPU time. No clock, no steps.

    result = replay(PrefixCache(num_pages=65536, page_size=16), read_trace("trace.jsonl", limit=2000))
    result.hit_rate, result.requests_per_cpu_second

Prompts only, in the order of the file, and a fixed number of them running at a time. So it tells how good the order of
eviction is, and what the tree costs, with nothing of a scheduler in between. The same requests give the same hit rate
in any cache that evicts single pages in least-recently-used order, its tails first.
"""

import time
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from trunkline.errors import ConfigError
from trunkline.radix.cache import Lease, PrefixCache
from trunkline.radix.events import NOBODY
from trunkline.traces import TraceRow

RUNNING = 8
NO_STEP = -1  # after_step of a page that no step in flight can touch


class Replay(NamedTuple):
    """What a replay measured.

    requests       that were replayed
    prompt_tokens  of all of them
    hit_tokens     of these, found in the cache
    cpu_seconds    of this thread in the cache's operations
    """

    requests: int
    prompt_tokens: int
    hit_tokens: int
    cpu_seconds: float

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / self.prompt_tokens

    @property
    def requests_per_cpu_second(self) -> float:
        return self.requests / self.cpu_seconds


def replay(cache: PrefixCache, rows: Iterable[TraceRow], *, running: int = RUNNING) -> Replay:
    """Read every prompt once: match, release the request `running` before it, admit (lock and evict), commit (insert).

    A prompt's last page is published only if it is whole. Raises ConfigError if one doesn't fit beside those running.
    """
    leases: deque[Lease] = deque()
    requests = prompt_tokens = hit_tokens = 0
    cpu_seconds = 0.0
    for row in rows:
        prompt = row.prompt()
        started = time.thread_time()
        match = cache.match(NOBODY, prompt, row.num_prompt)
        if len(leases) == running:
            cache.release(leases.popleft(), after_step=NO_STEP)
        lease = cache.admit(match, row.num_prompt // cache.page_size - match.num_pages)
        if lease is None:
            raise ConfigError(
                f"A prompt of {row.num_prompt:,} tokens does not fit beside {running - 1} others into a cache of"
                f" {cache.num_pages * cache.page_size:,} tokens; take a larger one."
            )
        cache.commit(lease, prompt, row.num_prompt, after_step=NO_STEP)
        cpu_seconds += time.thread_time() - started
        leases.append(lease)
        requests += 1
        prompt_tokens += row.num_prompt
        hit_tokens += match.num_tokens
    for lease in leases:
        cache.release(lease, after_step=NO_STEP)
    return Replay(requests, prompt_tokens, hit_tokens, cpu_seconds)
