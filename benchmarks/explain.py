"""What it costs to say why a prompt missed, and to estimate what more memory would bring: microseconds a request.

    python -m benchmarks.explain         # a few seconds

A report is made at every admission, an estimate at every arrival, so both are paid by requests that never ask. The
prompts begin with a system prompt of which 200 requests have gone on with something else. Medians of 200 calls; the
hashes, which a node is given once, are in none of them.
"""

import statistics
import sys
import time
from collections.abc import Callable

import numpy as np

from trunkline.bench.tables import align
from trunkline.radix.cache import PrefixCache
from trunkline.radix.events import Namespace
from trunkline.radix.reuse import ReuseEstimator
from trunkline.sampling import SamplingParams
from trunkline.scheduler.reports import Reports
from trunkline.scheduler.request import Request

PAGE_SIZE = 16
NUM_PAGES = 65_536
LENGTHS = (512, 8_192, 32_768)
VOCAB_SIZE = 49_152
DONE = -1  # a step that is over

_rng = np.random.default_rng(0)


def tokens(num_tokens: int) -> bytes:
    """Random token ids: bytes of int32."""
    return _rng.integers(0, VOCAB_SIZE, num_tokens, dtype="<i4").tobytes()


def read(cache: PrefixCache, namespace: Namespace, prompt: bytes) -> None:
    """A request that reads a prompt and ends."""
    num_tokens = len(prompt) // 4
    match = cache.match(namespace, prompt, num_tokens)
    lease = cache.admit(match, cache.num_pages_of(num_tokens) - match.num_pages)
    assert lease is not None, "the cache is too small for this benchmark"
    cache.commit(lease, prompt, num_tokens, after_step=DONE)
    cache.release(lease, after_step=DONE)


def median(operation: Callable[[], object], count: int = 200) -> float:
    """Microseconds of one call."""
    seconds = []
    for _ in range(count):
        start = time.perf_counter()
        operation()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds) * 1e6


def report_times(num_tokens: int) -> list[float]:
    """Microseconds of a report on a prompt that differs after its system prompt, on one that is cached, and on a cold
    one."""
    namespace, cache = Namespace(tenant="acme"), PrefixCache(num_pages=NUM_PAGES, page_size=PAGE_SIZE)
    reports, system = Reports(cache), tokens(num_tokens)
    for _ in range(200):
        read(cache, namespace, system + tokens(64))
    cached = system + tokens(40)
    read(cache, namespace, cached)
    cache.evict(8)  # so that there are ghosts to look for
    times = []
    for prompt in (system + tokens(40), cached, tokens(num_tokens)):
        request = Request("", prompt=prompt, sampling=SamplingParams(), arrival=0.0, order=0, namespace=namespace)
        request.match = cache.match(namespace, prompt, request.num_prompt)
        times.append(median(lambda request=request: reports.at_admission(request)))  # type: ignore[misc]
    return times


def estimate_time(num_tokens: int) -> float:
    """Microseconds of taking one prompt into the estimate, once as many pages as it remembers were seen."""
    reuse = ReuseEstimator(page_size=PAGE_SIZE, horizon=64 * NUM_PAGES)
    for _ in range(100):
        reuse.see(Namespace(), tokens(32_768), 32_768)
    return median(lambda: reuse.see(Namespace(), tokens(num_tokens), num_tokens)) - median(lambda: tokens(num_tokens))


def main() -> int:
    """Measure, and print a table."""
    rows = [["prompt tokens", "report: differs µs", "complete µs", "cold µs", "estimate µs"]]
    for num_tokens in LENGTHS:
        figures = [*report_times(num_tokens), estimate_time(num_tokens)]
        rows.append([f"{num_tokens:,}", *(f"{figure:.0f}" for figure in figures)])
    print(align(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
